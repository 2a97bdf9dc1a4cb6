# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: an immutable virtual environment, named by the content of its lock.

A virtual environment cannot be moved: scripts, ``pyvenv.cfg`` and compiled search paths hold its place. So it is built
where it will be, ``<base>/<hash>``, and a marker (``.complete``) is written last. A folder without the marker is no
environment: nobody is told its path, and the next run builds it anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _drop, _journal, _lockfile, _packages
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult

MARKER = ".complete"
_HASH = re.compile(r"[0-9a-f]{16}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

_FACTS = """
import json, platform, sys, sysconfig
print("\\n" + json.dumps({"version": sys.version.split()[0], "soabi": sysconfig.get_config_var("SOABI"),
                         "machine": platform.machine(), "libc": "-".join(platform.libc_ver())}))
"""


class Options(NamedTuple):
    """What the module was asked for; see its documentation."""

    lock: str
    base: str
    python: str
    owner: Optional[str] = None
    wheelhouse: Optional[str] = None
    pip_args: Sequence[str] = ()
    prove_imports: Sequence[str] = ()
    prove_consistent: bool = True
    keep: Optional[int] = None
    check_mode: bool = False
    timeout: float = 3600.0
    lock_wait: float = 60.0


class Failure(Exception):
    """It cannot be made; ``fields`` go into the module's result."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class Lock(NamedTuple):
    """A lock as pip reads it. ``hashed``: every requirement has a hash. ``names``: ``{name: version}`` that it pins."""

    lines: tuple[str, ...]
    hashed: bool
    names: dict[str, str]


def parse_lock(text: str) -> Lock:
    """The requirements of a lock without comments and order. Raises Failure for what is not pinned exactly.

    Only options that say nothing of places are allowed (``--hash``, ``--no-binary``, ``--only-binary``, ``--pre``):
    where packages come from is the host's business.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = []
    names: dict[str, str] = {}
    hashed = 0
    for number, raw in enumerate(joined.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if not line:
            continue
        if line.startswith("-"):
            if not re.match(r"--(no-binary|only-binary|pre|require-hashes)\b", line):
                raise Failure(
                    f"the lock, line {number}: {_packages.redact(line)[:100]!r} is not allowed: name the index in "
                    "the owner's pip.conf, or give wheelhouse",
                    code="bad_lock",
                )
            lines.append(line)
            continue
        requirement, *options = re.split(r"\s+(?=--)", line)
        bare = requirement.partition(";")[0].strip()
        if any(not re.fullmatch(r"--hash[= ]sha(256|384|512):[0-9a-f]+", option.strip()) for option in options):
            raise Failure(f"the lock, line {number}: unknown option in {line[:100]!r}", code="bad_lock")
        direct = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?\s*@\s*(\S+)", bare)
        if direct is not None:
            if not options and "#sha256=" not in direct.group(3):
                raise Failure(
                    f"the lock, line {number}: {direct.group(1)} comes from a URL and has no hash", code="bad_lock"
                )
            names[_packages.canonical(direct.group(1))] = ""
        else:
            try:
                parsed = _packages.parse_requirement(bare)
            except _packages.BadRemedy:
                parsed = None
            if parsed is None or parsed.version is None or parsed.wheel is not None:
                raise Failure(
                    f"the lock, line {number}: {_packages.redact(bare)[:100]!r} is not pinned: write name==version",
                    code="bad_lock",
                )
            # A name may appear once for each marker (platform, Python): the last one that applies counts for pip.
            names[parsed.name] = "" if names.get(parsed.name, parsed.version) != parsed.version else parsed.version
        hashed += bool(options)
        lines.append(" ".join([requirement.strip(), *sorted(option.strip() for option in options)]))
    if not names:
        raise Failure("the lock is empty: give requirements, each with == and a version", code="bad_lock")
    requirements = sum(not line.startswith("-") for line in lines)
    if hashed and hashed != requirements:
        raise Failure(
            f"the lock has hashes for {hashed} of {requirements} requirements: give all of them a hash, or none",
            code="bad_lock",
        )
    return Lock(tuple(sorted(lines)), hashed > 0, names)


def content_hash(lock: Lock, facts: dict[str, Any]) -> str:
    """The name of the environment that ``lock`` gives on an interpreter (``{version, soabi, machine, libc}``)."""
    text = json.dumps([list(lock.lines), facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_use(path: str, proc: str = "/proc") -> list[int]:
    """The processes that run from an environment, or have one of its files mapped."""
    inside = path + os.sep
    found = []
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            with open(os.path.join(proc, name, "cmdline"), "rb") as stream:
                words = stream.read(65536).decode("utf-8", "replace").split("\0")
            used = any(word.startswith(inside) for word in words)
            if not used:
                with open(os.path.join(proc, name, "maps"), encoding="utf-8", errors="replace") as stream:
                    used = any(inside in line for line in stream)
        except OSError:
            continue
        if used and int(name) != os.getpid():
            found.append(int(name))
    return found


def mentioned(path: str, folders: Iterable[str]) -> bool:
    """Whether a file below ``folders`` (units, recorded plans and revisions) names ``path``."""
    needle = os.fsencode(path)
    for top in folders:
        for folder, _names, files in os.walk(top):
            for name in files:
                full = os.path.join(folder, name)
                try:
                    if os.path.getsize(full) > 4 << 20 or not os.path.isfile(full):
                        continue
                    with open(full, "rb") as stream:
                        if needle in stream.read():
                            return True
                except OSError:
                    continue
    return False


REFERENCES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/etc/gpufleet-sglang",
    "/var/lib/gpufleet-sglang/instances",
)


class Maker:
    """One call of the module."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = parse_lock(options.lock)
        self.base = os.path.realpath(options.base)
        if not os.path.isabs(options.base):
            raise Failure(f"base {options.base!r} must be an absolute path", code="bad_base")
        for name in options.prove_imports:
            if not _MODULE.fullmatch(name):
                raise Failure(f"prove_imports: {name!r} is not the name of a module", code="bad_import")
        try:
            self.owner = _drop.identity_of_user(options.owner) if options.owner else _drop.current()
            self._drop_proved = _drop.popen_arguments(self.owner)
        except _drop.CannotDrop as error:
            raise Failure(f"owner {options.owner!r}: {error}", code="owner") from None
        python = shutil.which(options.python)
        if python is None:
            raise Failure(f"there is no Python {options.python} on this host: correct python", code="no_python")
        self.python = python
        said = self._run([python, "-I", "-c", _FACTS], 60)
        try:
            self.facts = json.loads(said.stdout.strip().rpartition("\n")[2])
        except ValueError:
            line = _packages.explain(said.stdout, said.stderr, said.timed_out).line
            raise Failure(f"{python} does not run as {self.owner.name}: {line}", code="no_python") from None
        self.hash = content_hash(self.lock, self.facts)
        self.path = os.path.join(self.base, self.hash)

    def _run(self, argv: Sequence[str], timeout: float, tmp: str = "/", **extra: str) -> RunResult:
        env = _drop.environment(self.owner, extra={"TMPDIR": tmp, **extra} if tmp != "/" else extra)
        env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_NO_COLOR="1")
        return _drop.run_as(self.owner, argv, timeout, env, cwd=tmp)

    def _checked(self, what: str, argv: Sequence[str], tmp: str) -> RunResult:
        result = self._run(argv, self.options.timeout, tmp)
        if result.rc != 0:
            problem = _packages.explain(result.stdout, result.stderr, result.timed_out, self.options.wheelhouse)
            raise Failure(
                f"{what} failed for {self.path}: {problem.line}" + (f" ({problem.mend})" if problem.mend else ""),
                code="build_failed",
                command=_packages.redact(" ".join(argv)),
                rc=result.rc,
                stdout_tail=_packages.tail(result.stdout + "\n" + result.stderr),
            )
        return result

    def is_complete(self) -> bool:
        """Whether the environment is there, whole, and of this very lock."""
        try:
            with open(os.path.join(self.path, MARKER), encoding="utf-8") as stream:
                marker = json.load(stream)
        except (OSError, ValueError):
            return False
        return marker.get("hash") == self.hash and os.path.exists(os.path.join(self.path, "bin", "python"))

    def prepare_base(self) -> None:
        """``base`` belongs to whoever runs the module; what is built in it, to the owner."""
        try:
            os.makedirs(self.base, 0o755, exist_ok=True)
            os.mkdir(self.path, 0o755)
        except OSError as error:
            raise Failure(f"{self.path} cannot be made: {error.strerror}", code="bad_base") from None
        if os.geteuid() == 0:
            os.chown(self.path, self.owner.uid, self.owner.gid, follow_symlinks=False)

    def build(self) -> list[str]:
        """Make it, prove it, mark it. Returns the pinned distributions. What is half built is removed on a failure."""
        if os.path.lexists(self.path):
            # What an interrupted run left, or what lost its marker.
            users = in_use(self.path)
            if users:
                raise Failure(
                    f"{self.path} is not complete, and pid {', '.join(map(str, users[:8]))} uses it: stop that first",
                    code="in_use",
                )
            _journal.remove(self.path)
        self.prepare_base()
        try:
            return self._build()
        except Exception:
            _journal.remove(self.path)
            raise

    def _build(self) -> list[str]:
        tmp = os.path.join(self.path, ".tmp")
        python = os.path.join(self.path, "bin", "python")
        with _drop.acting_as(self.owner):
            os.mkdir(tmp, 0o700)
        self._checked("making the environment", [self.python, "-I", "-m", "venv", self.path], tmp)
        with _drop.acting_as(self.owner):
            written = os.path.join(tmp, "lock.txt")
            with open(written, "w", encoding="utf-8") as stream:
                stream.write("\n".join(self.lock.lines) + "\n")
            with open(os.path.join(self.path, "lock.txt"), "w", encoding="utf-8") as stream:
                stream.write(_packages.redact("\n".join(self.lock.lines)) + "\n")
        flags = ["--no-deps", "--requirement", written]
        if self.lock.hashed:
            flags.append("--require-hashes")
        if self.options.wheelhouse is not None:
            flags += ["--no-index", "--find-links", self.options.wheelhouse]
        self._checked(
            "installing the lock", [python, "-I", "-m", "pip", "install", *flags, *self.options.pip_args], tmp
        )
        checked = self._run([python, "-I", "-m", "pip", "check"], 600, tmp)
        if checked.rc != 0 and self.options.prove_consistent:
            conflicts = _packages.tail(checked.stdout + "\n" + checked.stderr, 20)
            raise Failure(
                f"the lock does not fit together: {(conflicts or ['pip check said nothing'])[0]} (mend the lock; "
                "nothing was installed that it does not name)",
                code="lock_conflicts",
                stdout_tail=conflicts,
            )
        for name in self.options.prove_imports:
            tried = self._run([python, "-I", "-c", f"import {name}"], 600, tmp)
            if tried.rc != 0:
                lines = _packages.tail(tried.stderr, 20)
                why = "it did not end" if tried.timed_out else (lines or [f"rc {tried.rc}"])[-1]
                raise Failure(
                    f"import {name} fails in the new environment: {why}", code="import_failed", stdout_tail=lines
                )
        frozen = self._checked("listing", [python, "-I", "-m", "pip", "freeze", "--all"], tmp).stdout.split("\n")
        pinned = [_packages.redact(line) for line in frozen if line.strip()]
        with _drop.acting_as(self.owner):
            shutil.rmtree(tmp, ignore_errors=True)
            _journal.write_whole(
                os.path.join(self.path, MARKER), {"hash": self.hash, "python": self.facts, "built": int(time.time())}
            )
        return pinned

    def old(self) -> list[str]:
        """The environments that nothing uses or names, without the ``keep`` newest, and half-built ones."""
        if self.options.keep is None:
            return []
        complete, broken = [], []
        try:
            names = os.listdir(self.base)
        except FileNotFoundError:
            return []
        for name in names:
            path = os.path.join(self.base, name)
            if not _HASH.fullmatch(name) or path == self.path or os.path.islink(path):
                continue
            try:
                complete.append((os.stat(os.path.join(path, MARKER)).st_mtime, path))
            except OSError:
                broken.append(path)
        spare = [path for _time, path in sorted(complete, reverse=True)[self.options.keep :]]
        return [path for path in broken + spare if not in_use(path) and not mentioned(path, REFERENCES)]


def work(options: Options) -> dict[str, Any]:
    """All of the module: returns its result. Raises Failure, whose ``fields`` belong to the result too."""
    maker = Maker(options)
    result: dict[str, Any] = {
        "path": maker.path,
        "hash": maker.hash,
        "python_version": maker.facts["version"],
        "removed": [],
    }
    try:
        if options.check_mode:
            missing = not maker.is_complete()
            removed = maker.old()
        else:
            os.makedirs(maker.base, 0o755, exist_ok=True)
            with _lockfile.acquire(os.path.join(maker.base, ".lock"), "managed_venv", options.lock_wait):
                missing = not maker.is_complete()
                if missing:
                    result["distributions"] = maker.build()
                removed = maker.old()
                for path in removed:
                    # The marker goes first: half of an environment is none.
                    _journal.remove(os.path.join(path, MARKER))
                    _journal.remove(path)
    except _lockfile.LockHeld as held:
        raise Failure(f"another run builds in {maker.base}: {held.holder}", code="locked") from None
    except OSError as error:
        raise Failure(f"{maker.base}: {error.strerror}: {error.filename}", code="io") from error
    result["removed"] = removed
    before = "".join(f"{path}\n" for path in sorted([*removed, *([] if missing else [maker.path])]))
    return {**result, "changed": bool(missing or removed), "diff": {"before": before, "after": maker.path + "\n"}}
