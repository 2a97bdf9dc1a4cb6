# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: remedies as ordered operations, and what pip's words and files mean. No I/O."""

from __future__ import annotations

import base64
import csv
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

EXECUTED = ("pip_uninstall", "pip_install", "os_install")
REPORTED = ("set_env", "build", "manual")

# Whoever changes one of these changes the service, not a backend: only when asked by name.
_PROTECTED = re.compile(
    r"torch|torchvision|torchaudio|pytorch-triton(-.+)?|triton|sglang|sgl-kernel|sglang-kernel|nvidia-.+|cuda-.+"
)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_REQUIREMENT = re.compile(rf"({_NAME.pattern})(?:\[[A-Za-z0-9._, -]*\])?(?:\s*==\s*([A-Za-z0-9.!+_-]+))?")
_OS_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_:~-]*")


class BadRemedy(Exception):
    """A remedy that cannot be carried out as it is written; the text says which step and why."""


class Requirement(NamedTuple):
    """One package of a step. ``version`` is None when any will do; ``wheel`` is the path of a local wheel."""

    text: str
    name: str
    version: Optional[str]
    wheel: Optional[str]


class Step(NamedTuple):
    """One step. ``requirements`` for pip, ``packages`` as written; ``flags`` without those that have a field."""

    action: str
    packages: tuple[str, ...]
    requirements: tuple[Requirement, ...] = ()
    flags: tuple[str, ...] = ()
    no_deps: bool = True
    manager: Optional[str] = None


class Group(NamedTuple):
    """The pip steps of one remedy, done wholly or not at all, with the state that they lead to."""

    backend: str
    steps: tuple[Step, ...]

    @property
    def present(self) -> dict[str, Requirement]:
        """What is installed in the end, by canonical name."""
        result: dict[str, Requirement] = {}
        for step in self.steps:
            for requirement in step.requirements:
                if step.action == "pip_install":
                    result[requirement.name] = requirement
                else:
                    result.pop(requirement.name, None)
        return result

    @property
    def absent(self) -> set[str]:
        """What is gone in the end."""
        named = {requirement.name for step in self.steps for requirement in step.requirements}
        return named - set(self.present)


class Work(NamedTuple):
    """Remedies in the order of their execution. ``not_executed`` are steps as the plan wrote them."""

    os_steps: tuple[Step, ...]
    groups: tuple[Group, ...]
    not_executed: tuple[dict[str, Any], ...]


class Row(NamedTuple):
    """One row of a RECORD; ``path`` as written (relative to site-packages), ``digest`` ``sha256=…`` or empty."""

    path: str
    digest: str
    size: Optional[int]


class Change(NamedTuple):
    """One distribution that a resolver would install; ``before`` is the installed version, None when there is none."""

    name: str
    version: str
    before: Optional[str]


class Problem(NamedTuple):
    """Why a pip command failed: the first line that says so, and what to do about it ("" when nothing is known)."""

    line: str
    mend: str


def canonical(name: str) -> str:
    """The distribution's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def same_version(one: str, other: str) -> bool:
    """Whether two versions are the same but for spelling (``1.0+ABC-1`` and ``1.0+abc.1``, ``v1.0`` and ``1.0``)."""

    def normal(text: str) -> str:
        public, _sep, local = text.strip().lower().partition("+")
        return public.lstrip("v").replace("-", ".").replace("_", ".") + "+" + re.sub(r"[-_]", ".", local)

    return normal(one) == normal(other)


def is_protected(name: str, allowed: Iterable[str] = ()) -> bool:
    """Whether a distribution must not be touched although a step names it, unless it is in ``allowed``."""
    wanted = canonical(name)
    return bool(_PROTECTED.fullmatch(wanted)) and wanted not in {canonical(item) for item in allowed}


def parse_wheel_name(path: str) -> Optional[tuple[str, str]]:
    """``(canonical name, version)`` of a wheel's file name, None if it is none."""
    base = posixpath.basename(path)
    if not base.endswith(".whl"):
        return None
    parts = base[: -len(".whl")].split("-")
    if len(parts) not in (5, 6) or not _NAME.fullmatch(parts[0]) or not parts[1]:
        return None
    return canonical(parts[0]), parts[1].replace("_", "-") if "!" in parts[1] else parts[1]


def parse_requirement(text: str) -> Requirement:
    """``name``, ``name==version`` or the absolute path of a wheel. Raises BadRemedy for anything else.

    Ranges and URLs are refused: a remedy says exactly what it installs, so that a second run can see it is there.
    """
    written = str(text).strip()
    if written.startswith("/"):
        wheel = parse_wheel_name(written)
        if wheel is None:
            raise BadRemedy(f"{redact(written)!r} is not the path of a wheel (name-version-python-abi-platform.whl)")
        return Requirement(written, wheel[0], wheel[1], written)
    match = _REQUIREMENT.fullmatch(written)
    if match is None:
        raise BadRemedy(f"{redact(written)!r} is not an exact requirement: write name==version or a wheel's path")
    return Requirement(written, canonical(match.group(1)), match.group(2), None)


def _step(raw: Mapping[str, Any], where: str) -> Optional[Step]:
    action = str(raw.get("action") or "")
    if action in REPORTED:
        return None
    if action not in EXECUTED:
        raise BadRemedy(f"{where}: unknown action {action!r} (known: {', '.join(EXECUTED + REPORTED)})")
    packages = raw.get("packages")
    if not isinstance(packages, (list, tuple)) or not packages or not all(isinstance(item, str) for item in packages):
        raise BadRemedy(f"{where}: {action} needs packages, a list of names")
    names = tuple(str(item) for item in packages)
    args = raw.get("args") or {}
    if not isinstance(args, Mapping):
        raise BadRemedy(f"{where}: args must be a dictionary")
    if action == "os_install":
        for name in names:
            if not _OS_PACKAGE.fullmatch(name):
                raise BadRemedy(f"{where}: {name!r} is not the name of a system package")
        manager = args.get("manager")
        if manager not in (None, "apt", "dnf"):
            raise BadRemedy(f"{where}: manager {manager!r} is not apt or dnf")
        return Step(action, names, manager=None if manager is None else str(manager))
    try:
        requirements = tuple(parse_requirement(name) for name in names)
    except BadRemedy as error:
        raise BadRemedy(f"{where}: {error}") from None
    flags = tuple(str(flag) for flag in (args.get("flags") if "flags" in args else ["--no-deps"]) or ())
    return Step(
        action,
        names,
        requirements,
        tuple(flag for flag in flags if flag not in ("--no-deps", "--force-reinstall", "--upgrade", "-U")),
        "--no-deps" in flags or action == "pip_uninstall",
    )


def order(remedies: Sequence[Mapping[str, Any]]) -> Work:
    """The remedies of a plan as work: system packages first, then each remedy's pip steps, each thing once.

    Raises BadRemedy for an unknown step, and when two remedies want different things of one distribution.
    """
    os_steps: list[Step] = []
    groups: list[Group] = []
    not_executed: list[dict[str, Any]] = []
    for number, remedy in enumerate(remedies):
        if not isinstance(remedy, Mapping):
            raise BadRemedy(f"remedies[{number}] is not a dictionary")
        backend = str(remedy.get("backend") or "")
        steps = []
        for index, raw in enumerate(remedy.get("steps") or ()):
            where = f"remedies[{number}] ({backend or 'no backend'}), step {index}"
            if not isinstance(raw, Mapping):
                raise BadRemedy(f"{where} is not a dictionary")
            step = _step(raw, where)
            if step is None:
                said = {"backend": backend, **{key: raw.get(key) for key in ("action", "packages", "args")}}
                if said not in not_executed:
                    not_executed.append(said)
            elif step.action == "os_install":
                if step not in os_steps:
                    os_steps.append(step)
            else:
                steps.append(step)
        group = Group(backend, tuple(steps))
        if steps and all(group.steps != other.steps for other in groups):
            groups.append(group)
    _refuse_conflicts(groups)
    return Work(tuple(os_steps), tuple(groups), tuple(not_executed))


def _refuse_conflicts(groups: Sequence[Group]) -> None:
    present: dict[str, Requirement] = {}
    absent: set[str] = set()
    for group in groups:
        for name, requirement in group.present.items():
            other = present.setdefault(name, requirement)
            if (other.version, other.wheel) != (requirement.version, requirement.wheel):
                raise BadRemedy(f"two remedies want different versions of {name}: {other.text} and {requirement.text}")
        absent |= group.absent
    for name in sorted(absent & set(present)):
        raise BadRemedy(f"one remedy installs {present[name].text} and another one removes {name}")


def parse_record(text: str) -> list[Row]:
    """The rows of a RECORD. Rows that are none are left out; never raises."""
    rows = []
    try:
        for fields in csv.reader(text.replace("\0", "").splitlines()):
            if fields and fields[0]:
                size = fields[2] if len(fields) > 2 else ""
                rows.append(
                    Row(fields[0], fields[1] if len(fields) > 1 else "", int(size) if size.isdecimal() else None)
                )
    except csv.Error:
        pass
    return rows


def digest_of(sha256: bytes) -> str:
    """A SHA-256 as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(sha256).rstrip(b"=").decode()


def wheel_targets(names: Iterable[str], entry_points: str = "") -> dict[str, Optional[str]]:
    """Where the members of a wheel go: ``{path relative to site-packages or "bin:<name>": member}``.

    The scripts made from entry points have no member (None). Headers and data outside site-packages are left out,
    since no backend has them.
    """
    result: dict[str, Optional[str]] = {}
    for name in names:
        if name.endswith("/"):
            continue
        match = re.match(r"[^/]+\.data/([^/]+)/(.+)", name)
        if match is None:
            result[name] = name
        elif match.group(1) in ("purelib", "platlib"):
            result[match.group(2)] = name
        elif match.group(1) == "scripts":
            result["bin:" + match.group(2)] = name
    section = ""
    for line in entry_points.splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line.strip("[] ")
        elif section in ("console_scripts", "gui_scripts") and "=" in line and not line.startswith(("#", ";")):
            result["bin:" + line.partition("=")[0].strip()] = None
    return result


def parse_report(text: str, installed: Mapping[str, str]) -> list[Change]:
    """What ``pip install --dry-run --report`` says would be installed, against ``{canonical name: version}``.

    Raises ValueError when the text is not such a report.
    """
    report = json.loads(text[max(text.find("{"), 0) :])
    try:
        return [
            Change(
                canonical(str(item["metadata"]["name"])),
                str(item["metadata"]["version"]),
                installed.get(canonical(str(item["metadata"]["name"]))),
            )
            for item in report["install"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report of pip: {error!r}") from None


def unwanted(changes: Iterable[Change], named: Collection[str], allowed: Collection[str]) -> list[Change]:
    """The changes that no step may make: another distribution replaced, or a protected one installed or moved.

    What a step names may change, a protected distribution only be repaired (the same version again) or installed
    where there is none. A dependency that is not there yet may come along when the step lets pip resolve.
    """
    allow = {canonical(item) for item in allowed}

    def is_bad(change: Change) -> bool:
        if change.name in named:
            moved = change.before is not None and not same_version(change.before, change.version)
            return moved and is_protected(change.name)
        return change.before is not None or is_protected(change.name)

    return [change for change in changes if change.name not in allow and is_bad(change)]


def redact(text: str) -> str:
    """``text`` without the credentials of URLs and of options that carry them."""
    text = re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"]+@", r"\1***@", text)
    return re.sub(r"(?i)\b(token|password|passwd|secret|api[_-]?key)=[^&\s'\"]+", r"\1=***", text)


_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|Connection refused|Name or service not known|name resolution|ProxyError"
    r"|Network is unreachable|No route to host|Max retries exceeded|Read timed out|connection broken by"
)
_WHEELHOUSE = "the host cannot reach its package index: set sglang_wheelhouse to a folder of wheels on the host"
_MENDS = (
    (re.compile(r"SSLError|CERTIFICATE_VERIFY_FAILED"), "give pip the site's CA (PIP_CERT or pip.conf on the host)"),
    (
        re.compile(r"HTTP error 40[137]|\b40[137] (Client )?Error|User for "),
        "the index asks for credentials: put them into the pip.conf of the venv's owner",
    ),
    (_NETWORK, _WHEELHOUSE),
    (re.compile(r"No space left on device"), "make room on the file system of the venv or of the journal"),
    (
        re.compile(r"THESE PACKAGES DO NOT MATCH THE HASHES"),
        "the file differs from its hash: the index or the wheelhouse holds another build",
    ),
    (re.compile(r"not a supported wheel on this platform"), "take the wheel for this venv's Python and machine"),
    (re.compile(r"Permission denied|EACCES"), "give all files of the venv to the venv's owner"),
    (re.compile(r"externally-managed-environment"), "give a virtualenv, not the system's Python"),
    (
        re.compile(r"RECORD file (was )?not found|no RECORD|distutils installed"),
        "remove the files by hand: pip did not write them",
    ),
    (
        re.compile(r"Could not find a version|No matching distribution"),
        "the index has no such version for this Python and machine: add the wheel, or point pip at another index",
    ),
)


def explain(stdout: str, stderr: str, timed_out: bool = False, wheelhouse: Optional[str] = None) -> Problem:
    """The first real error line of a failed pip or apt, without secrets, and its mend."""
    lines = [line.strip() for line in (stderr + "\n" + stdout).splitlines() if line.strip()]
    whole = "\n".join(lines)
    errors = [line for line in lines if re.match(r"(ERROR|E|Error|error|fatal error)\s*:", line)]
    broken = [line for line in lines if _NETWORK.search(line)]
    first = (errors or broken or lines or ["no output"])[0]
    if "conflicting dependencies" in first and "The conflict is caused by:" in lines:
        start = lines.index("The conflict is caused by:") + 1
        reasons = [line for line in lines[start : start + 4] if re.search(r"depends on|requested|requires", line)]
        first = f"{first} {'; '.join(reasons)}"
    if timed_out:
        return Problem(redact(first)[:500], "it ran out of time: " + (_WHEELHOUSE if broken else "raise timeout"))
    if broken and not wheelhouse and re.search(r"Could not find a version|No matching|Could not install", first):
        first = broken[0]
    if "(from versions: none)" in first and not broken and not wheelhouse:
        return Problem(redact(first)[:500], f"the index has it in no version; if it is out of reach: {_WHEELHOUSE}")
    for pattern, mend in _MENDS:
        if pattern.search(first) or (pattern is _NETWORK and broken and not wheelhouse):
            if wheelhouse and mend.startswith("the index has"):
                mend = f"the wheelhouse {wheelhouse} has no such version for this Python and machine: add the wheel"
            return Problem(redact(first)[:500], mend)
    for pattern, mend in _MENDS:
        if pattern.search(whole):
            return Problem(redact(first)[:500], mend)
    return Problem(redact(first)[:500], "")


def tail(text: str, lines: int = 15, width: int = 300) -> list[str]:
    """The last lines of an output, cut and without secrets."""
    return [redact(line)[:width] for line in text.splitlines() if line.strip()][-lines:]
