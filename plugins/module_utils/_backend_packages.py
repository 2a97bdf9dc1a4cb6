# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: carry out remedies in a venv, so that a kill or a failure leaves it whole.

Everything that can fail for outside reasons (resolving, downloading, building) happens before the first file is
touched. Then the files that will be replaced are kept, and pip works from local wheels without an index. A failure
puts the kept files back; after a kill the next run puts them back and does the same steps again.

Files of the venv are read and written with the rights of its owner (``_drop.acting_as``), and pip runs as it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _drop,
    _journal,
    _libraries,
    _lockfile,
    _packages,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run, RunResult

STATE_DIR = "/var/lib/gpufleet-sglang/journal"
_OWN = ".gpufleet-sglang"

_LOOK = """
import glob, json, os, sys, sysconfig
paths = sysconfig.get_paths()
info = {"prefix": sys.prefix, "base": sys.base_prefix, "version": sys.version.split()[0],
        "sites": sorted({paths["purelib"], paths["platlib"]}), "scripts": paths["scripts"]}
try:
    import pip
    info["pip"] = pip.__version__
except ImportError:
    wheels = []
    try:
        import ensurepip
        wheels = glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl"))
    except ImportError:
        pass
    shared = sysconfig.get_config_var("WHEEL_PKG_DIR") or "/usr/share/python-wheels"
    wheels += glob.glob(os.path.join(shared, "pip-*.whl"))
    info["pip_wheel"] = wheels[0] if wheels else None
print("\\n" + json.dumps(info))
"""  # fmt: skip


class Options(NamedTuple):
    """What the module was asked for; see its documentation."""

    venv: str
    remedies: Sequence[Mapping[str, Any]] = ()
    wheelhouse: Optional[str] = None
    pip_args: Sequence[str] = ()
    manage_system_packages: bool = False
    restore: bool = False
    journal_id: Optional[str] = None
    journal_ids: Sequence[str] = ()
    allow_changes: Sequence[str] = ()
    check_mode: bool = False
    timeout: float = 1800.0
    lock_wait: float = 60.0
    keep_journals: int = 5
    refuse_in_use: bool = True
    state_dir: str = STATE_DIR


class Failure(Exception):
    """It cannot be done; ``fields`` go into the module's result."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class Venv(NamedTuple):
    """A target venv. ``pip`` is the argv that starts its pip, ``pip_version`` a tuple of numbers."""

    path: str
    python: str
    owner: _drop.Identity
    sites: tuple[str, ...]
    scripts: str
    pip: tuple[str, ...]
    pip_version: tuple[int, ...]


class Dist(NamedTuple):
    """An installed distribution; ``rows`` is None when nobody wrote down its files (an egg)."""

    name: str
    version: str
    site: str
    info: str
    rows: Optional[tuple[_packages.Row, ...]]


class Wheel(NamedTuple):
    """A fetched wheel; ``targets`` are absolute paths → digest (or empty)."""

    name: str
    version: str
    path: str
    targets: dict[str, str]


def root_of(path: str) -> str:
    """The folder of a venv given as such or by its interpreter."""
    path = os.path.abspath(path)
    if os.path.basename(path).startswith("python") and not os.path.isdir(path):
        path = os.path.dirname(os.path.dirname(path))
    return os.path.realpath(path)


def look_at(path: str) -> Venv:
    """Learn what is needed of a venv by one call of its own interpreter, as its owner. Raises Failure."""
    root = root_of(path)
    python = os.path.join(root, "bin", "python")
    if not os.path.isdir(root):
        raise Failure(f"there is no venv at {path}: make it first, or correct sglang_venv", code="venv_absent")
    marks = [os.path.join(root, name) for name in ("pyvenv.cfg", "conda-meta")]
    if not os.path.lexists(python) or not any(os.path.exists(mark) for mark in marks):
        raise Failure(f"{path} is not a virtual environment (no bin/python, or no pyvenv.cfg)", code="not_a_venv")
    parts = [root, os.path.join(root, "bin"), python, *(mark for mark in marks if os.path.exists(mark))]
    parts += glob.glob(os.path.join(glob.escape(root), "lib", "python3*", "site-packages"))
    try:
        owner = _drop.owner_of(parts)
        result = _drop.run_as(owner, [python, "-I", "-c", _LOOK], 60, _drop.environment(owner))
    except _drop.CannotDrop as error:
        raise Failure(f"the venv {root}: {error}", code="owner") from None
    try:
        info = json.loads(result.stdout.rpartition("\n{")[2].join(["{", ""]))
    except ValueError:
        said = _packages.explain(result.stdout, result.stderr, result.timed_out).line
        raise Failure(f"{python} does not run as {owner.name} (rc {result.rc}): {said}", code="not_a_venv") from None
    if info["prefix"] == info["base"] and not os.path.isdir(marks[1]):
        raise Failure(f"{path} belongs to no virtual environment: its prefix is {info['prefix']}", code="not_a_venv")
    if info.get("pip"):
        pip: tuple[str, ...] = (python, "-I", "-m", "pip")
        version = str(info["pip"])
    elif info.get("pip_wheel"):
        # A venv made by uv has no pip: the one that Python bundles runs from its wheel and leaves the venv alone.
        pip = (python, "-I", os.path.join(info["pip_wheel"], "pip"))
        version = (_packages.parse_wheel_name(info["pip_wheel"]) or ("pip", "0"))[1]
    else:
        raise Failure(f"the venv {root} has no pip, nor has its Python one: run {python} -m ensurepip", code="no_pip")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return Venv(root, python, owner, tuple(info["sites"]), info["scripts"], pip, numbers)


def _parse_metadata(text: str) -> tuple[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            break
        key, sep, value = line.partition(":")
        if sep and key.lower() in ("name", "version"):
            found.setdefault(key.lower(), value.strip())
    return found.get("name", ""), found.get("version", "")


def _read(path: str, limit: int = 64 << 20) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return None
            return stream.read(limit)
    except OSError:
        return None


def read_distributions(sites: Iterable[str]) -> dict[str, list[Dist]]:
    """The distributions in ``sites`` by canonical name. Names of hidden or half-removed ones (``~x``) are left out."""
    found: dict[str, list[Dist]] = {}
    for site in sites:
        try:
            names = sorted(os.listdir(site))
        except OSError:
            continue
        for name in names:
            info = os.path.join(site, name)
            stem, extension = os.path.splitext(name)
            if name.startswith(("~", ".")) or extension not in (".dist-info", ".egg-info", ".egg", ".egg-link"):
                continue
            if extension == ".dist-info":
                metadata = _read(os.path.join(info, "METADATA")) or ""
                record = _read(os.path.join(info, "RECORD"))
                rows = None if record is None else tuple(_packages.parse_record(record))
            else:
                inner = {".egg": "EGG-INFO/PKG-INFO", ".egg-info": "PKG-INFO"}.get(extension, "")
                metadata = (_read(os.path.join(info, inner)) if inner else None) or _read(info) or ""
                rows = None
            known, version = _parse_metadata(metadata)
            parts = stem.split("-")
            dist = Dist(
                _packages.canonical(known or parts[0]),
                version or (parts[1] if len(parts) > 1 else ""),
                site,
                info,
                rows,
            )
            found.setdefault(dist.name, []).append(dist)
    return found


def paths_of(venv: Venv, dist: Dist) -> dict[str, str]:
    """``{absolute path: digest}`` of a distribution's files that lie in the venv; others are nobody's to touch."""
    result = {}
    for row in dist.rows or ():
        path = os.path.normpath(os.path.join(dist.site, row.path))
        if path.startswith(venv.path + os.sep):
            result[path] = row.digest
    return result


def _metadata_files(dist: Dist) -> Iterator[str]:
    """What lies in a distribution's own folder: pip killed in a write leaves files there that no RECORD names."""
    if dist.info.endswith(".dist-info"):
        for folder, _folders, names in os.walk(dist.info):
            for name in names:
                yield os.path.join(folder, name)


def is_intact(path: str, digest: str) -> bool:
    """Whether the file has the digest that RECORD gives it (an unknown kind of digest counts as right)."""
    kind, _sep, value = digest.partition("=")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        if kind not in ("sha256", "sha384", "sha512"):
            return True
        made = hashlib.new(kind)
        with open(path, "rb") as stream:
            for chunk in iter(lambda: stream.read(1 << 20), b""):
                made.update(chunk)
    except OSError:
        return False
    return _packages.digest_of(made.digest()).partition("=")[2] == value.rstrip("=")


def damaged(venv: Venv, dist: Dist) -> list[str]:
    """The files of a distribution that are gone or differ from RECORD; all of an egg's are taken for right."""
    return [path for path, digest in paths_of(venv, dist).items() if digest and not is_intact(path, digest)]


def _wheel_member(archive: zipfile.ZipFile, suffix: str) -> str:
    for name in archive.namelist():
        if name.count("/") == 1 and name.endswith(suffix):
            return archive.read(name).decode("utf-8", "replace")
    return ""


def read_wheel(venv: Venv, path: str) -> Wheel:
    """Where a wheel's files would go. Raises Failure when it is not a wheel."""
    parsed = _packages.parse_wheel_name(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            record = {
                row.path: row.digest for row in _packages.parse_record(_wheel_member(archive, ".dist-info/RECORD"))
            }
            entry_points = _wheel_member(archive, ".dist-info/entry_points.txt")
            known, version = _parse_metadata(_wheel_member(archive, ".dist-info/METADATA"))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise Failure(f"{path} cannot be read as a wheel: {error}", code="bad_wheel") from None
    if parsed is None:
        raise Failure(f"{path} has no wheel's name", code="bad_wheel")
    infos = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    targets: dict[str, str] = {}
    for target, member in _packages.wheel_targets(names, entry_points).items():
        base, relative = (venv.scripts, target[4:]) if target.startswith("bin:") else (venv.sites[0], target)
        full = os.path.normpath(os.path.join(base, relative))
        if not full.startswith(venv.path + os.sep):
            raise Failure(f"{os.path.basename(path)} would write {full}, outside the venv", code="bad_wheel")
        targets[full] = record.get(member, "") if member and base != venv.scripts else ""
    for info in infos:
        for made in ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json"):
            targets[os.path.join(venv.sites[0], info, made)] = ""
    return Wheel(_packages.canonical(known or parsed[0]), version or parsed[1], path, targets)


def _caches(path: str) -> list[str]:
    # Also those that Python was about to rename: x.cpython-311.pyc.140234
    folder, name = os.path.split(path)
    if not name.endswith(".py"):
        return []
    return glob.glob(os.path.join(glob.escape(folder), "__pycache__", glob.escape(name[:-3]) + ".*.pyc*"))


def in_use(paths: Iterable[str], proc: str = "/proc") -> list[int]:
    """The processes that have one of ``paths`` mapped, as far as this user may see."""
    wanted = set(paths)
    found = []
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(os.path.join(proc, name, "maps"), encoding="utf-8", errors="replace") as stream:
                mapped = {
                    line.rstrip("\n").split(None, 5)[5] for line in stream if line.count(" ") >= 5 and "/" in line
                }
        except (OSError, IndexError):
            continue
        if mapped & wanted:
            found.append(int(name))
    return sorted(found)


def end_leftovers(folder: str, proc: str = "/proc") -> list[int]:
    """End the commands that a killed run left behind: those whose TMPDIR lies in ``folder``. Returns their pids."""
    mark = b"\0TMPDIR=" + os.fsencode(folder) + b"/"
    ended = []
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(os.path.join(proc, name, "environ"), "rb") as stream:
                environ = b"\0" + stream.read(1 << 20)
            start = _lockfile.process_start(int(name))
            if mark in environ and start is not None:
                os.kill(int(name), signal.SIGKILL)
                ended.append((int(name), start))
        except OSError:
            continue
    deadline = time.monotonic() + 30
    while any(_lockfile.process_start(pid) == start for pid, start in ended):
        if time.monotonic() > deadline:
            raise Failure(
                f"pid {', '.join(str(pid) for pid, _start in ended)} of an earlier run does not end", code="locked"
            )
        time.sleep(0.05)
    return [pid for pid, _start in ended]


class SystemPackages:
    """apt and dnf behind one face. Raises Failure when a command fails."""

    def __init__(self, timeout: float, run: Optional[Run] = None) -> None:
        self.timeout = timeout
        self._runner = run or self._as_ourselves

    @staticmethod
    def _as_ourselves(argv: Sequence[str], timeout: float) -> RunResult:
        me = _drop.current()
        env = _drop.environment(me, extra={"DEBIAN_FRONTEND": "noninteractive", "APT_LISTCHANGES_FRONTEND": "none"})
        return _drop.run_as(me, argv, timeout, env)

    def _run(self, argv: Sequence[str], timeout: Optional[float] = None) -> RunResult:
        return self._runner(argv, timeout or self.timeout)

    @staticmethod
    def manager(wanted: Optional[str]) -> Optional[str]:
        """``apt`` or ``dnf``, whichever this host has, None if it is not the wanted one."""
        for name, program in (("apt", "apt-get"), ("dnf", "dnf")):
            if shutil.which(program) and wanted in (None, name):
                return name
        return None

    def missing(self, manager: str, packages: Sequence[str]) -> list[str]:
        """Those of ``packages`` that are not installed."""
        result = []
        for package in packages:
            if manager == "apt":
                said = self._run(["dpkg-query", "-W", "-f=${db:Status-Status}\\n", package], 60)
                there = said.rc == 0 and "installed" in said.stdout.split()
            else:
                there = self._run(["rpm", "-q", "--whatprovides", package], 60).rc == 0
            if not there:
                result.append(package)
        return result

    def install(self, manager: str, packages: Sequence[str]) -> RunResult:
        """Install, removing nothing; package lists are fetched only when a package is not known to them."""
        if manager == "dnf":
            argv = ["dnf", "-y", "--setopt=install_weak_deps=False", "install", *packages]
            return self._checked(argv, packages)
        lock = ["-o", "DPkg::Lock::Timeout=120", "-o", "Dpkg::Use-Pty=0"]
        install = ["apt-get", *lock, "-y", "--no-install-recommends", "--no-remove", "install", *packages]
        known = all(self._run(["apt-cache", "show", "--no-all-versions", package], 60).rc == 0 for package in packages)
        if known:
            result = self._run(install)
            stale = re.search(r"404 +Not Found|Unable to fetch|Failed to fetch", result.stdout + result.stderr)
            if result.rc == 0 or not stale:
                return self._judge(result, install, packages)
        self._checked(["apt-get", *lock, "update"], packages)
        return self._checked(install, packages)

    def _checked(self, argv: Sequence[str], packages: Sequence[str]) -> RunResult:
        return self._judge(self._run(argv), argv, packages)

    @staticmethod
    def _judge(result: RunResult, argv: Sequence[str], packages: Sequence[str]) -> RunResult:
        if result.rc == 0:
            return result
        problem = _packages.explain(result.stdout, result.stderr, result.timed_out)
        raise Failure(
            f"the system packages {', '.join(packages)} could not be installed: {problem.line}"
            + (f" ({problem.mend})" if problem.mend else ""),
            code="os_install_failed",
            command=" ".join(argv),
            rc=result.rc,
            stdout_tail=_packages.tail(result.stdout + "\n" + result.stderr),
        )


class Mender:
    """One call of the module."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.venv = look_at(options.venv)
        self.owner = self.venv.owner
        self.system = SystemPackages(options.timeout)
        self.steps: list[dict[str, Any]] = []
        self.problems: list[dict[str, Any]] = []
        self.recovered: list[str] = []
        self.privileged = os.geteuid() == 0
        self.own_root = os.path.join(self.venv.path, _OWN, "journal")
        self.root = options.state_dir if self.privileged else self.own_root

    # What is there

    def distributions(self) -> dict[str, list[Dist]]:
        with _drop.acting_as(self.owner):
            return read_distributions(self.venv.sites)

    def _is_there(self, requirement: _packages.Requirement, installed: Mapping[str, list[Dist]]) -> bool:
        found = installed.get(requirement.name, [])
        if len(found) != 1 or found[0].rows is None:
            return False
        dist = found[0]
        if requirement.version is not None and not _packages.same_version(requirement.version, dist.version):
            return False
        if requirement.wheel is not None and os.path.exists(requirement.wheel):
            wheel = read_wheel(self.venv, requirement.wheel)
            here = paths_of(self.venv, dist)
            if any(digest and here.get(path) != digest for path, digest in wheel.targets.items()):
                return False
        with _drop.acting_as(self.owner):
            return not damaged(self.venv, dist)

    def is_satisfied(self, group: _packages.Group, installed: Mapping[str, list[Dist]]) -> bool:
        return not any(name in installed for name in group.absent) and all(
            self._is_there(requirement, installed) for requirement in group.present.values()
        )

    def versions(self, installed: Mapping[str, list[Dist]], names: Iterable[str]) -> list[str]:
        return sorted(f"{name}=={dist.version}" for name in set(names) for dist in installed.get(name, []))

    # Commands

    def _pip(self, what: str, arguments: Sequence[str], tmp: str, local: bool = False) -> RunResult:
        env = _drop.environment(self.owner, extra={"TMPDIR": tmp})
        if local:
            env = {name: value for name, value in env.items() if not name.startswith("PIP_")}
            env["PIP_CONFIG_FILE"] = os.devnull
        env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_NO_COLOR="1")
        with _drop.acting_as(self.owner):
            if not os.access(env["HOME"], os.W_OK, effective_ids=True):
                env.setdefault("PIP_NO_CACHE_DIR", "1")
        argv = [*self.venv.pip, *arguments]
        result = _drop.run_as(self.owner, argv, self.options.timeout, env, cwd=tmp)
        if result.rc != 0:
            problem = _packages.explain(result.stdout, result.stderr, result.timed_out, self.options.wheelhouse)
            raise Failure(
                f"{what} failed in {self.venv.path}: {problem.line}" + (f" ({problem.mend})" if problem.mend else ""),
                code="pip_failed",
                command=_packages.redact(" ".join(argv)),
                rc=result.rc,
                stdout_tail=_packages.tail(result.stdout + "\n" + result.stderr),
            )
        return result

    # Preparing: nothing in the venv changes here

    def _own_folder(self, path: str) -> None:
        os.mkdir(path, 0o700)
        if self.privileged:
            os.chown(path, self.owner.uid, self.owner.gid, follow_symlinks=False)

    def _sources(self) -> list[str]:
        house = self.options.wheelhouse
        extra = [str(item) for item in self.options.pip_args]
        if house is None:
            return extra
        with _drop.acting_as(self.owner):
            if not os.path.isdir(house) or not os.access(house, os.R_OK | os.X_OK, effective_ids=True):
                raise Failure(
                    f"the wheelhouse {house} is not readable for {self.owner.name}: correct sglang_wheelhouse",
                    code="wheelhouse",
                )
        return ["--no-index", "--find-links", house, *extra]

    def _resolve(self, step: _packages.Step, requirements: Sequence[_packages.Requirement], tmp: str) -> list[str]:
        written = [requirement.text for requirement in requirements]
        if step.no_deps:
            return written
        if self.venv.pip_version < (22, 2):
            raise Failure(
                f"pip {'.'.join(map(str, self.venv.pip_version))} of {self.venv.path} cannot tell beforehand what it "
                f"would change for {', '.join(written)}: add --no-deps to the step's flags, or renew pip (22.2)",
                code="pip_too_old",
            )
        flags = ["--dry-run", "--quiet", "--report", "-", *self._sources(), *step.flags]
        result = self._pip(f"resolving {', '.join(written)}", ["install", *flags, *written], tmp)
        installed = self.distributions()
        try:
            changes = _packages.parse_report(
                result.stdout, {name: found[0].version for name, found in installed.items()}
            )
        except ValueError as error:
            raise Failure(f"pip's report cannot be read: {error}", code="pip_failed") from None
        self._refuse(changes, {requirement.name for requirement in requirements})
        local = {requirement.name: requirement.text for requirement in requirements if requirement.wheel}
        return [local.get(change.name, f"{change.name}=={change.version}") for change in changes]

    def _refuse(self, changes: Iterable[_packages.Change], named: set[str]) -> None:
        bad = _packages.unwanted(changes, named, self.options.allow_changes)
        if bad:
            said = ", ".join(f"{item.name} {item.before or '(absent)'} → {item.version}" for item in bad)
            raise Failure(
                f"this would change what no remedy may change in {self.venv.path}: {said}. Nothing was changed. "
                "Use --no-deps in the step, or name it in allow_changes",
                code="would_change_others",
                unwanted=[item._asdict() for item in bad],
            )

    def _fetch(self, written: Sequence[str], step: _packages.Step, folder: str, tmp: str) -> None:
        for text in written:
            requirement = _packages.parse_requirement(text)
            if requirement.wheel is None:
                continue
            target = os.path.join(folder, os.path.basename(requirement.wheel))
            try:
                # Read with our own rights: the store of built wheels need not be open to the venv's owner.
                with open(requirement.wheel, "rb") as reader:
                    data_of = os.fstat(reader.fileno())
                    if not stat.S_ISREG(data_of.st_mode):
                        raise Failure(f"{requirement.wheel} is not a file", code="bad_wheel")
                    with _drop.acting_as(self.owner), open(target, "wb") as writer:
                        shutil.copyfileobj(reader, writer, 1 << 20)
            except OSError as error:
                raise Failure(
                    f"the wheel {requirement.wheel} cannot be read: {error.strerror}", code="bad_wheel"
                ) from None
        names = [text for text in written if not text.startswith("/")]
        if names:
            flags = ["--no-deps", "--wheel-dir", folder, *self._sources(), *step.flags]
            self._pip(f"fetching {', '.join(names)}", ["wheel", *flags, *names], tmp)

    def _installs(
        self, group: _packages.Group, step: _packages.Step, installed: Mapping[str, list[Dist]]
    ) -> list[_packages.Requirement]:
        """Those of a step that are not as they should be, or would be hurt by the group's uninstalls."""
        gone = {
            requirement.name
            for other in group.steps
            if other.action == "pip_uninstall"
            for requirement in other.requirements
        }
        lost = {path for name in gone for dist in installed.get(name, []) for path in paths_of(self.venv, dist)}
        result = []
        for requirement in step.requirements:
            shared = any(lost & set(paths_of(self.venv, dist)) for dist in installed.get(requirement.name, []))
            if requirement.name in gone or shared or not self._is_there(requirement, installed):
                result.append(requirement)
        return result

    def preflight(self, groups: Sequence[_packages.Group], installed: Mapping[str, list[Dist]]) -> None:
        """What can be refused by looking, also in check mode."""
        for group in groups:
            for step in group.steps:
                for requirement in step.requirements:
                    for dist in installed.get(requirement.name, []):
                        if dist.rows is None:
                            raise Failure(
                                f"{dist.name} {dist.version} ({dist.info}) was not installed by pip as a wheel, so "
                                "nobody wrote down its files and pip cannot remove it: remove it by hand",
                                code="no_record",
                            )
            for name in group.absent & set(installed):
                if _packages.is_protected(name, self.options.allow_changes):
                    raise Failure(
                        f"a remedy removes {name} from {self.venv.path}: name it in allow_changes if it is meant",
                        code="would_change_others",
                    )
            self._refuse(
                [
                    _packages.Change(name, requirement.version, installed[name][0].version)
                    for name, requirement in group.present.items()
                    if requirement.version is not None and name in installed
                ],
                set(group.present),
            )
        self.refuse_used(
            {
                path
                for group in groups
                for step in group.steps
                for item in step.requirements
                for dist in installed.get(item.name, [])
                for path in paths_of(self.venv, dist)
            }
        )

    def refuse_used(self, paths: Iterable[str]) -> None:
        """Failure when a process has one of the files mapped (a problem only, where that is allowed)."""
        users = in_use(path for path in paths if ".so" in os.path.basename(path))
        if not users:
            return
        text = (
            f"the files to be replaced in {self.venv.path} are in use by pid {', '.join(map(str, users[:8]))}: "
            "drain and stop the service first"
        )
        if self.options.refuse_in_use and not self.options.check_mode:
            raise Failure(text, code="venv_in_use", pids=users)
        self.problems.append({"code": "venv_in_use", "message": text, "pids": users})

    def prepare(self, groups: Sequence[_packages.Group], installed: Mapping[str, list[Dist]]) -> _journal.Entry:
        """Fetch, prove, keep. The venv is as before when this raises."""
        entry = self._begin(groups)
        try:
            self._prepare(entry, groups, installed)
        except BaseException:
            entry.discard()
            raise
        return entry

    def _begin(self, groups: Sequence[_packages.Group]) -> _journal.Entry:
        if self.privileged:
            # Its owner must be able to pass through to his own kept files, and needs to see nothing else.
            os.makedirs(self.root, 0o755, exist_ok=True)
            for folder in (os.path.dirname(self.root), self.root):
                mode = stat.S_IMODE(os.stat(folder).st_mode)
                if mode & 0o111 != 0o111:
                    os.chmod(folder, mode | 0o111)
        else:
            os.makedirs(self.root, 0o700, exist_ok=True)
        digest = hashlib.sha256(repr((self.venv.path, groups)).encode()).hexdigest()[:8]
        wanted = self.options.journal_id or time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + digest
        with _drop.acting_as(self.owner):
            stashes = self._stashes()
        try:
            entry = _journal.Journal(self.root).begin(
                wanted, self.venv.path, {"sites": list(self.venv.sites), "stashes": stashes, "steps": []}
            )
        except OSError as error:
            raise Failure(f"the journal {self.root} cannot be written: {error.strerror}", code="journal") from None
        for folder in (entry.files, entry.work):
            self._own_folder(folder)
        return entry

    def _stashes(self) -> list[str]:
        """pip's half-removed folders (``~name``)."""
        return sorted(
            os.path.join(site, name) for site in self.venv.sites if os.path.isdir(site)
            for name in os.listdir(site) if name.startswith("~")
        )  # fmt: skip

    def _prepare(
        self, entry: _journal.Entry, groups: Sequence[_packages.Group], installed: Mapping[str, list[Dist]]
    ) -> None:
        touched: set[str] = set()
        wheels: list[Wheel] = []
        for group in groups:
            for step in group.steps:
                if step.action == "pip_uninstall":
                    names = [item.name for item in step.requirements if item.name in installed]
                    touched |= set(names)
                    if names:
                        entry.data["steps"].append({"action": step.action, "packages": names, "state": "pending"})
                    continue
                wanted = self._installs(group, step, installed)
                if not wanted:
                    continue
                folder = os.path.join(entry.work, f"wheels-{len(entry.data['steps'])}")
                tmp = folder + ".tmp"
                self._own_folder(folder)
                self._own_folder(tmp)
                self._fetch(self._resolve(step, wanted, tmp), step, folder, tmp)
                with _drop.acting_as(self.owner):
                    fetched = [
                        read_wheel(self.venv, path)
                        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.whl")))
                    ]
                self._refuse(
                    [
                        _packages.Change(
                            wheel.name,
                            wheel.version,
                            installed[wheel.name][0].version if wheel.name in installed else None,
                        )
                        for wheel in fetched
                    ],
                    {item.name for item in step.requirements},
                )
                missing = {item.name for item in wanted} - {wheel.name for wheel in fetched}
                if missing:
                    raise Failure(f"pip fetched no wheel for {', '.join(sorted(missing))}", code="pip_failed")
                wheels += fetched
                touched |= {wheel.name for wheel in fetched}
                entry.data["steps"].append(
                    {
                        "action": step.action,
                        "packages": [f"{wheel.name}=={wheel.version}" for wheel in fetched],
                        "wheels": os.path.basename(folder),
                        "state": "pending",
                    }
                )
        entry.data["names"] = sorted(touched)
        self._refuse_overwriting(wheels, touched, installed)
        with _drop.acting_as(self.owner):
            paths = {path for wheel in wheels for path in wheel.targets}
            for name in touched:
                for dist in installed.get(name, []):
                    paths |= set(paths_of(self.venv, dist))
            paths |= {cache for path in list(paths) for cache in _caches(path)}
            self._refuse_unwritable(paths)
            self._refuse_without_room(paths, entry.files)
        with _drop.acting_as(self.owner):
            entry.data["before"] = _libraries.snapshot(self.venv.sites, touched)
            manifest = _journal.keep(paths, entry.files)
        entry.save_manifest(manifest)
        entry.save()

    def _refuse_overwriting(
        self, wheels: Sequence[Wheel], touched: set[str], installed: Mapping[str, list[Dist]]
    ) -> None:
        owners = {
            path: (dist.name, digest)
            for name, found in installed.items() if name not in touched
            for dist in found for path, digest in paths_of(self.venv, dist).items()
        }  # fmt: skip
        for wheel in wheels:
            taken: dict[str, int] = {}
            for path, digest in wheel.targets.items():
                if path in owners and (not digest or owners[path][1] != digest):
                    taken[owners[path][0]] = taken.get(owners[path][0], 0) + 1
            if taken:
                said = ", ".join(f"{count} files of {name}" for name, count in sorted(taken.items()))
                raise Failure(
                    f"{wheel.name} {wheel.version} would overwrite {said}: the remedy must uninstall that first",
                    code="file_owned_by_two_distributions",
                )

    def _refuse_unwritable(self, paths: Iterable[str]) -> None:
        for folder in sorted({os.path.dirname(path) for path in paths}):
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                raise Failure(
                    f"{self.owner.name}, the owner of the venv, may not write to {folder}: "
                    f"give it back with chown -R {self.owner.name} {self.venv.path}",
                    code="not_writable",
                )

    @staticmethod
    def _refuse_without_room(paths: Iterable[str], files: str) -> None:
        device = os.stat(files).st_dev
        needed = 0
        for path in paths:
            try:
                status = os.lstat(path)
            except OSError:
                continue
            needed += status.st_size if status.st_dev != device else 0
        free = os.statvfs(files)
        if needed > free.f_bavail * free.f_frsize:
            raise Failure(f"{files} has no room for the {needed >> 20} MiB that are kept for rollback", code="no_space")

    # Changing

    def change(self, entry: _journal.Entry) -> list[dict[str, Any]]:
        """Do the entry's steps; on a failure everything is as before, and Failure says so."""
        done: list[dict[str, Any]] = []
        entry.save(_journal.CHANGING)
        try:
            for number, step in enumerate(entry.data["steps"]):
                step["state"] = "running"
                entry.save()
                tmp = os.path.join(entry.work, f"run-{number}.tmp")
                with _drop.acting_as(self.owner):
                    shutil.rmtree(tmp, ignore_errors=True)
                self._own_folder(tmp)
                names = list(step["packages"])
                if step["action"] == "pip_uninstall":
                    result = self._pip(f"removing {', '.join(names)}", ["uninstall", "--yes", *names], tmp, local=True)
                else:
                    links = os.path.join(entry.work, step["wheels"])
                    flags = ["--no-index", "--find-links", links, "--no-deps", "--force-reinstall"]
                    result = self._pip(
                        f"installing {', '.join(names)}",
                        ["install", *flags, "--no-warn-script-location", *names],
                        tmp,
                        local=True,
                    )
                step["state"] = "done"
                entry.save()
                tail = _packages.tail(result.stdout + "\n" + result.stderr)
                done.append({"action": step["action"], "packages": names, "state": "done", "stdout_tail": tail})
            self._prove(entry)
        except Exception as error:
            self.put_back(entry)
            fields = error.fields if isinstance(error, Failure) else {}
            raise Failure(
                f"{error} Everything in the venv is as it was before.", **{**fields, "restored": True}
            ) from error
        with _drop.acting_as(self.owner):
            entry.data["after"] = _libraries.snapshot(self.venv.sites, entry.data["names"])
        entry.save(_journal.DONE)
        self._forget(entry.work)
        return done

    def _prove(self, entry: _journal.Entry) -> None:
        installed = self.distributions()
        expected: dict[str, Optional[str]] = {}
        for step in entry.data["steps"]:
            for package in step["packages"]:
                requirement = _packages.parse_requirement(package)
                expected[requirement.name] = requirement.version if step["action"] == "pip_install" else None
        for name, version in expected.items():
            found = installed.get(name, [])
            if version is None and found:
                raise Failure(f"pip says that it removed {name}, and {found[0].info} is there.", code="not_proven")
            if version is None:
                continue
            if len(found) != 1 or not _packages.same_version(found[0].version, version):
                here = ", ".join(dist.version for dist in found) or "nothing"
                raise Failure(f"pip says that it installed {name} {version}, and {here} is there.", code="not_proven")
            with _drop.acting_as(self.owner):
                broken = damaged(self.venv, found[0])
            if broken:
                raise Failure(
                    f"{len(broken)} files of {name} are not as its RECORD says ({broken[0]}).", code="not_proven"
                )

    # Going back

    def put_back(self, entry: _journal.Entry) -> None:
        """Bring back what an entry kept and remove what it added. May be interrupted and repeated."""
        entry.save(_journal.RESTORING)
        self._files_back(entry)
        entry.save(_journal.RESTORED)
        self._forget(entry.work)
        self._forget(entry.files)

    @staticmethod
    def _forget(folder: str) -> None:
        # The folder's parent is ours, not the owner's. What cannot go now goes with the entry.
        shutil.rmtree(folder, ignore_errors=True)

    def _files_back(self, entry: _journal.Entry) -> None:
        manifest = entry.manifest()
        kept = {row["path"] for row in manifest if row["kind"] != "absent"}
        with _drop.acting_as(self.owner):
            installed = read_distributions(self.venv.sites)
            added = {row["path"] for row in manifest} - kept
            for name in entry.data["names"]:
                for dist in installed.get(name, []):
                    added |= set(paths_of(self.venv, dist)) | set(_metadata_files(dist))
            added |= {cache for path in added | kept for cache in _caches(path)}
            added -= kept
            for path in [*sorted(set(self._stashes()) - set(entry.data["stashes"])), *sorted(added)]:
                _journal.remove(path)
            _journal.put_back(manifest, entry.files)
            self._prune({os.path.dirname(path) for path in added})

    def _prune(self, folders: Iterable[str]) -> None:
        stop = {*self.venv.sites, self.venv.scripts, self.venv.path}
        for folder in sorted(folders, key=len, reverse=True):
            while folder not in stop and folder.startswith(self.venv.path + os.sep):
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    pass
                except OSError:
                    break
                folder = os.path.dirname(folder)

    # The journal

    def entries(self) -> list[_journal.Entry]:
        return _journal.Journal(self.root).entries(self.venv.path)

    def recover(self, forward: bool) -> None:
        """Finish what was interrupted: forward (the same steps again) or back."""
        _journal.Journal(self.root).sweep()
        for entry in reversed(self.entries()):
            if entry.state in (_journal.PREPARING, *_journal.INTERRUPTED):
                end_leftovers(entry.folder)
            if entry.state == _journal.PREPARING:
                entry.discard()
            elif entry.state in _journal.INTERRUPTED:
                going_forward = forward and entry.state == _journal.CHANGING
                if not going_forward:
                    self.put_back(entry)
                else:
                    self._again(entry)
                self.recovered.append(entry.id)
            else:
                # Killed when all was done but the tidying.
                self._forget(entry.work)
                if entry.state == _journal.RESTORED:
                    self._forget(entry.files)

    def _again(self, entry: _journal.Entry) -> None:
        self._files_back(entry)
        for step in entry.data["steps"]:
            step["state"] = "pending"
        self.steps += self.change(entry)

    def prune(self) -> None:
        """Forget all but the newest entries, and those that a stored revision needs for going back."""
        instances = os.path.join(os.path.dirname(self.options.state_dir), "instances")
        kept = _libraries.kept_for_revisions(instances, self.venv.path) if self.privileged else None
        for entry in self.entries()[: -max(self.options.keep_journals, 1)]:
            needed = kept is not None and any(entry.id not in journals for journals in kept)
            if entry.state == _journal.RESTORED or (entry.state == _journal.DONE and not needed):
                entry.discard()


def _installed_lines(mender: Mender, names: Iterable[str]) -> str:
    return "".join(line + "\n" for line in mender.versions(mender.distributions(), names))


def _os_steps(mender: Mender, work: _packages.Work) -> list[tuple[_packages.Step, str, list[str]]]:
    """The system packages to be installed: ``(step, manager, missing)``; the others are reported here."""
    wanted = []
    for step in work.os_steps:
        said = {"action": step.action, "packages": list(step.packages), "stdout_tail": []}
        manager = mender.system.manager(step.manager)
        missing = list(step.packages) if manager is None else mender.system.missing(manager, step.packages)
        code = ""
        if missing and not mender.options.manage_system_packages:
            code, why = "system_packages_not_managed", "set sglang_manage_system_packages, or install them yourself"
        elif manager is None:
            code, why = "no_package_manager", f"the host has no {step.manager or 'apt or dnf'}"
        elif missing and not mender.privileged:
            code, why = "not_root", "system packages need root: set become"
        if code:
            text = f"{', '.join(missing)} missing: {why}"
            mender.problems.append({"code": code, "message": text, "packages": missing})
            mender.steps.append({**said, "state": "skipped", "reason": text})
        elif missing and manager is not None:
            wanted.append((step, manager, missing))
        else:
            mender.steps.append({**said, "state": "skipped", "reason": "installed already"})
    return wanted


def _skipped(group: _packages.Group) -> list[dict[str, Any]]:
    return [
        {
            "action": step.action,
            "packages": list(step.packages),
            "state": "skipped",
            "reason": "satisfied",
            "stdout_tail": [],
        }
        for step in group.steps
    ]


def apply(mender: Mender) -> dict[str, Any]:
    """Carry the remedies out (or say what would be done, in check mode). Returns the module's result."""
    options = mender.options
    work = _packages.order(options.remedies)
    names = {item.name for group in work.groups for step in group.steps for item in step.requirements}
    interrupted = [entry for entry in mender.entries() if entry.state in _journal.INTERRUPTED]
    for entry in interrupted:
        names |= set(entry.data.get("names", ()))
    before = _installed_lines(mender, names)
    if not options.check_mode:
        mender.recover(forward=True)
    installed = mender.distributions()
    todo = [group for group in work.groups if not mender.is_satisfied(group, installed)]
    for group in work.groups:
        if group not in todo:
            mender.steps += _skipped(group)
    mender.preflight(todo, installed)
    os_steps = _os_steps(mender, work)
    result: dict[str, Any] = {"journal_id": None}
    os_before = os_after = ""
    if options.check_mode:
        planned = [(step.action, missing) for step, _unused, missing in os_steps]
        planned += [(step.action, list(step.packages)) for group in todo for step in group.steps]
        mender.steps += [
            {"action": action, "packages": packages, "state": "pending", "stdout_tail": []}
            for action, packages in planned
        ]
        after_lines = set(before.splitlines())
        for group in todo:
            gone = group.absent | set(group.present)
            after_lines = {line for line in after_lines if line.partition("==")[0] not in gone}
            after_lines |= {f"{name}=={item.version or '(newest)'}" for name, item in group.present.items()}
        after = "".join(line + "\n" for line in sorted(after_lines))
        changed = bool(planned or interrupted)
        os_after = "".join(f"system package {name}\n" for _step, _unused, missing in os_steps for name in missing)
        mender.recovered = [entry.id for entry in interrupted]
        pip_changed = bool(todo or interrupted)
    else:
        begun = mender.prepare(todo, installed) if todo else None
        try:
            for step, manager, missing in os_steps:
                said = mender.system.install(manager, missing)
                os_after += "".join(f"system package {name}\n" for name in missing)
                tail = _packages.tail(said.stdout)
                mender.steps.append({"action": step.action, "packages": missing, "state": "done", "stdout_tail": tail})
        except Failure:
            if begun is not None:
                begun.discard()
            raise
        if begun is not None:
            mender.steps += mender.change(begun)
            result["journal_id"] = begun.id
        pip_changed = bool(todo or mender.recovered)
        changed = bool(todo or os_steps or mender.recovered)
        after = _installed_lines(mender, names)
        if changed:
            mender.prune()
    result.update(
        changed=changed,
        restart_needed=pip_changed or bool(os_steps),
        not_executed=list(work.not_executed),
        diff={"before": os_before + before, "after": os_after + after},
    )
    return result


def _exactly(mender: Mender, entries: Sequence[_journal.Entry]) -> list[_journal.Entry]:
    """The entries of ``journal_ids``; Failure unless they are the newest and the venv is as they left it.

    ``entries`` are those that can be taken back, oldest first.
    """
    wanted = set(mender.options.journal_ids)
    unknown = wanted - {entry.id for entry in mender.entries()}
    if unknown:
        raise Failure(f"there is no journal {', '.join(sorted(unknown))} of {mender.venv.path}", code="no_journal")
    back = [entry for entry in entries if entry.id in wanted]
    newest = list(entries[len(entries) - len(back) :])
    if back != newest:
        others = ", ".join(entry.id for entry in newest if entry not in back)
        raise Failure(
            f"{mender.venv.path} was changed since by {others}: nothing is taken back, so that this is not lost",
            code="journal_not_newest",
        )
    with _drop.acting_as(mender.owner):
        present = _libraries.snapshot(mender.venv.sites, _libraries.touched(entry.data for entry in back))
    _found, reason = _libraries.undo(present, [entry.data for entry in reversed(back)])
    if reason:
        raise Failure(f"{mender.venv.path}: {reason}; nothing is taken back", code="changed_since")
    if not mender.options.check_mode:
        installed = mender.distributions()
        names = _libraries.touched(entry.data for entry in back)
        mender.refuse_used(
            path for name in names for dist in installed.get(name, []) for path in paths_of(mender.venv, dist)
        )
    return back


def restore(mender: Mender) -> dict[str, Any]:
    """Go back over the entries of the venv, newest first, as far as the one asked for (else the newest)."""
    wanted = mender.options.journal_id
    entries = mender.entries()
    back: list[_journal.Entry] = [entry for entry in entries if entry.state in _journal.INTERRUPTED]
    done = [entry for entry in entries if entry.state == _journal.DONE]
    if mender.options.journal_ids:
        back = _exactly(mender, [entry for entry in entries if entry in back or entry in done])
    elif wanted is None:
        if not back:
            back = done[-1:]
    else:
        known = {entry.id: entry for entry in entries}
        if wanted not in known:
            raise Failure(
                f"there is no journal {wanted} of {mender.venv.path} in {mender.root} (there are: "
                f"{', '.join(sorted(known)) or 'none'})",
                code="no_journal",
            )
        oldest = int(known[wanted].data["sequence"])
        back += [entry for entry in done if int(entry.data["sequence"]) >= oldest]
    names = {name for entry in back for name in entry.data.get("names", ())}
    before = after = _installed_lines(mender, names)
    for entry in sorted(back, key=lambda item: int(item.data["sequence"]), reverse=True):
        said = {
            "action": "restore",
            "packages": list(entry.data.get("names", ())),
            "journal_id": entry.id,
            "stdout_tail": [],
        }
        if not mender.options.check_mode:
            end_leftovers(entry.folder)
            mender.put_back(entry)
        mender.steps.append({**said, "state": "pending" if mender.options.check_mode else "done"})
    if not mender.options.check_mode:
        after = _installed_lines(mender, names)
    return {
        "changed": bool(back),
        "journal_id": back[0].id if back else None,
        "restart_needed": bool(back),
        "not_executed": [],
        "diff": {"before": before, "after": after},
    }


def work(options: Options) -> dict[str, Any]:
    """All of the module: returns its result. Raises Failure, whose ``fields`` belong to the result too."""
    mender = Mender(options)
    act = restore if options.restore else apply
    lock = None
    folder = os.path.join(mender.venv.path, _OWN)
    path = os.path.join(folder, "lock")
    try:
        if not options.check_mode:
            with _drop.acting_as(mender.owner):
                os.makedirs(folder, 0o700, exist_ok=True)
                lock = _lockfile.acquire(path, "backend_packages", options.lock_wait)
        result = act(mender)
    except _lockfile.LockHeld as held:
        raise Failure(f"another run works on the venv {mender.venv.path}: {held.holder}", code="locked") from None
    except _packages.BadRemedy as error:
        raise Failure(str(error), code="bad_remedy") from None
    except (_journal.JournalError, _drop.CannotDrop) as error:
        raise Failure(f"{mender.venv.path}: {error}", code="journal") from error
    except OSError as error:
        raise Failure(f"{mender.venv.path}: {error.strerror}: {error.filename}", code="io") from error
    except Failure as failure:
        failure.fields.setdefault("steps", mender.steps)
        failure.fields.setdefault("problems", mender.problems)
        raise
    finally:
        if lock is not None:
            with _drop.acting_as(mender.owner):
                lock.release()
    return {**result, "steps": mender.steps, "problems": mender.problems, "recovered": mender.recovered}
