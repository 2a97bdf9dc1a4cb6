# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what a target venv is, read from its files; its interpreter is not run."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _elf
from ansible_collections.gpufleet.sglang.plugins.module_utils._outcome import Account

_VERSION = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?")
_LIB = re.compile(r"^python(\d+)\.(\d+)(t?)$")
_NUMBERED = re.compile(r"^python(\d+)\.(\d+)(t?)$")


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _problem(path: str, state: str, code: str, message: str, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "path": path, "python": None, "state": state, "code": code, "message": message, "owner": None,
        "owner_uid": None, "python_version": None, "soabi": None, "machine": None, "site_packages": [],
        "libc": libc(), "system_site": False, "is_venv": False,
    }  # fmt: skip
    result.update(more)
    return result


def libc() -> Optional[str]:
    """The host's C library, ``"glibc 2.36"``, or None where it is not glibc."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError, AttributeError):
        return None


def parse_pyvenv_cfg(text: str) -> dict[str, str]:
    """The lines ``key = value`` of a pyvenv.cfg, keys in lower case."""
    result = {}
    for line in text.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            result[key.strip().lower()] = value.strip()
    return result


def _find_python(prefix: str) -> Optional[str]:
    for name in ("python", "python3"):
        path = os.path.join(prefix, "bin", name)
        if os.path.lexists(path):
            return path
    return None


def _prefix_of(path: str) -> tuple[str, Optional[str]]:
    """(prefix, interpreter) of a venv folder, or of an interpreter inside one."""
    path = os.path.normpath(path)
    name = os.path.basename(path)
    if not os.path.isdir(path) and name.startswith("python") and os.path.basename(os.path.dirname(path)) == "bin":
        return os.path.dirname(os.path.dirname(path)), path
    return path, None


def read_venv(path: str) -> dict[str, Any]:
    """The ``venv`` part of the probe (contracts.md) for a venv folder or its interpreter; never raises.

    ``state`` is ``ok``, ``venv_absent``, ``not_a_venv`` or ``unreadable``. Beside the contract's keys:
    ``owner_uid``, ``system_site`` (the venv sees the base interpreter's packages), ``is_venv`` (has a pyvenv.cfg).
    """
    if not path or "\0" in path:
        return _problem(path, "not_a_venv", "not_a_venv", "No path of a venv was given.")
    prefix, python = _prefix_of(path)
    try:
        info = os.stat(prefix)
        if python is not None:
            os.lstat(python)
    except PermissionError:
        return _problem(path, "unreadable", "venv_unreadable", f"{path} cannot be looked into by this user.")
    except OSError:
        return _problem(path, "venv_absent", "venv_absent", f"There is nothing at {path}.")
    owner = {"owner": _account(info.st_uid), "owner_uid": info.st_uid}
    if not stat.S_ISDIR(info.st_mode):
        return _problem(path, "not_a_venv", "not_a_venv", f"{path} is a file, not a venv.", **owner)
    try:
        os.listdir(prefix)
    except OSError:
        return _problem(path, "unreadable", "venv_unreadable", f"{prefix} cannot be listed by this user.", **owner)
    python = python or _find_python(prefix)
    if python is None:
        return _problem(path, "not_a_venv", "not_a_venv", f"{prefix} has no bin/python.", **owner)
    real = os.path.realpath(python)
    if not os.path.isfile(real):
        return _problem(
            path, "not_a_venv", "venv_python_dangling",
            f"{python} points at {real}, which does not exist: the interpreter the venv was made with is gone.",
            python=python, **owner,
        )  # fmt: skip
    return _describe(path, prefix, python, real, owner)


def _read_cfg(prefix: str) -> Optional[dict[str, str]]:
    try:
        with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="replace") as stream:
            return parse_pyvenv_cfg(stream.read(65_536))
    except OSError:
        return None


def _describe(path: str, prefix: str, python: str, real: str, owner: dict[str, Any]) -> dict[str, Any]:
    cfg = _read_cfg(prefix)
    full = (cfg or {}).get("version_info") or (cfg or {}).get("version") or ""
    matched = _VERSION.match(full)
    configured = (int(matched.group(1)), int(matched.group(2))) if matched else None
    numbered = _NUMBERED.match(os.path.basename(real))
    running = (int(numbered.group(1)), int(numbered.group(2))) if numbered else configured
    libs = []
    try:
        for name in os.listdir(os.path.join(prefix, "lib")):
            hit = _LIB.match(name)
            if hit:
                libs.append((int(hit.group(1)), int(hit.group(2)), hit.group(3), name))
    except OSError:
        libs = []
    if not libs:
        return _problem(path, "not_a_venv", "not_a_venv", f"{prefix} has no lib/pythonX.Y.", python=python, **owner)
    version = running or max(libs)[:2]
    chosen = [lib for lib in libs if lib[:2] == version]
    if not chosen:
        there = ", ".join(sorted(lib[3] for lib in libs))
        return _problem(
            path, "not_a_venv", "venv_python_changed",
            f"{python} is Python {version[0]}.{version[1]} now, the packages are for {there}: make the venv again.",
            python=python, **owner,
        )  # fmt: skip
    lib = chosen[0]
    elf = _elf.read(real)
    machine = elf.machine or os.uname().machine
    base = os.path.join(prefix, "lib", lib[3])
    system = cfg is None or cfg.get("include-system-site-packages", "").lower() == "true"
    site = [os.path.join(base, "site-packages")]
    if system:
        home = prefix if cfg is None else os.path.dirname(cfg.get("home", "/usr/bin"))
        site += [
            os.path.join(base, "dist-packages"),
            os.path.join(home, "lib", lib[3], "site-packages"),
            *(
                [
                    os.path.join("/usr/local/lib", lib[3], "dist-packages"),
                    "/usr/lib/python3/dist-packages",
                ]
                if home == "/usr"
                else []
            ),
        ]
    seen: list[str] = []
    for entry in site:
        if entry not in seen and os.path.isdir(entry):
            seen.append(entry)
    text = full if matched and configured == version else f"{version[0]}.{version[1]}"
    return {
        "path": prefix,
        "python": python,
        "state": "ok",
        "code": None,
        "message": None,
        **owner,
        "python_version": text,
        "soabi": f"cpython-{version[0]}{version[1]}{lib[2]}-{machine}-linux-gnu",
        "machine": machine,
        "site_packages": seen,
        "libc": libc(),
        "system_site": system,
        "is_venv": cfg is not None,
    }


def python_tuple(venv: dict[str, Any]) -> tuple[int, int]:
    """(major, minor) of the venv's Python; (0, 0) where it is unknown."""
    matched = _VERSION.match(venv.get("python_version") or "")
    return (int(matched.group(1)), int(matched.group(2))) if matched else (0, 0)


def extension_suffixes(venv: dict[str, Any]) -> list[str]:
    """What the venv's Python accepts at the end of an extension module's file name, in its order."""
    soabi = venv.get("soabi")
    return (["." + soabi + ".so"] if soabi else []) + [".abi3.so", ".so"]


def user_ids(user: str) -> Optional[tuple[int, int, list[int], str]]:
    """(uid, gid, all groups, home) of an account, or None where it does not exist."""
    try:
        entry = pwd.getpwnam(user)
    except (KeyError, ValueError):
        return None
    groups = {entry.pw_gid}
    groups.update(group.gr_gid for group in grp.getgrall() if user in group.gr_mem)
    return entry.pw_uid, entry.pw_gid, sorted(groups), entry.pw_dir


def _denies(path: str, uid: int, groups: Sequence[int], bits: int) -> bool:
    info = os.stat(path)
    if uid == info.st_uid:
        granted = info.st_mode >> 6
    elif info.st_gid in groups:
        granted = info.st_mode >> 3
    else:
        granted = info.st_mode
    if granted & bits == bits:
        return False
    try:
        # An access control list can grant what the mode bits deny.
        return "system.posix_acl_access" not in os.listxattr(path)
    except OSError:
        return True


def first_denied(path: str, uid: int, groups: Sequence[int], bits: int = 5) -> Optional[str]:
    """The first part of ``path`` that the account may not enter, or ``path`` itself if it may not read and run it.

    None where nothing is denied, and for root. ``bits`` are those needed of the last part (4 read, 1 run or enter).
    """
    if uid == 0:
        return None
    parts = path.strip("/").split("/")
    current = "/"
    try:
        for part in parts[:-1]:
            current = os.path.join(current, part)
            if _denies(current, uid, groups, 1):
                return current
        return path if _denies(path, uid, groups, bits) else None
    except OSError:
        return None


def unreadable_by(venv: dict[str, Any], uid: int, groups: Sequence[int]) -> Optional[str]:
    """What of the venv the account cannot reach: a folder, the interpreter, or the base interpreter behind it."""
    places = [venv["path"], *venv["site_packages"]]
    for place in places:
        denied = first_denied(os.path.realpath(place), uid, groups)
        if denied:
            return denied
    return first_denied(os.path.realpath(venv["python"]), uid, groups, 1)


def account_of(uid: int) -> Account:
    """The account of a uid; one without an entry in the user database has its number for a name."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid, uid, [], str(uid), "/")
    ids = user_ids(entry.pw_name)
    groups = ids[2] if ids else [entry.pw_gid]
    return Account(uid, entry.pw_gid, groups, entry.pw_name, entry.pw_dir)
