# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: start as root, work as somebody else (a venv's owner, the service's user)."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult

# Of the caller's login, and wrong for anybody else.
_PERSONAL = (
    "SUDO_", "XDG_", "SSH_", "DBUS_", "VIRTUAL_ENV", "CONDA_", "PYTHON", "LD_PRELOAD", "MAIL", "LS_COLORS",
    "__PYVENV", "PYENV_", "TMPDIR", "TEMP", "TMP",
)  # fmt: skip


class Identity(NamedTuple):
    """A user as a process needs it; ``groups`` are the supplementary ones. An unknown user is named ``uid <n>``."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str


class CannotDrop(Exception):
    """The user does not exist, or this process may not act as it."""


def current() -> Identity:
    """The identity of this process."""
    return identity_of_uid(os.geteuid())


def identity_of_uid(uid: int, gid: Optional[int] = None) -> Identity:
    """The identity of a uid, also of one without an account (then without supplementary groups)."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Identity(uid, uid if gid is None else gid, (), f"uid {uid}", "/")
    primary = entry.pw_gid if gid is None else gid
    groups = tuple(sorted(set(os.getgrouplist(entry.pw_name, primary))))
    return Identity(uid, primary, groups, entry.pw_name, entry.pw_dir or "/")


def identity_of_user(user: str, group: Optional[str] = None) -> Identity:
    """The identity of a user by name or number, with another primary ``group`` if one is given.

    Raises CannotDrop when the user or the group does not exist.
    """
    gid = None
    if group:
        try:
            gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        except KeyError:
            raise CannotDrop(f"there is no group {group!r} on this host") from None
    if user.isdigit():
        return identity_of_uid(int(user), gid)
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise CannotDrop(f"there is no user {user!r} on this host") from None
    return identity_of_uid(entry.pw_uid, gid)


def owner_of(paths: Sequence[str]) -> Identity:
    """Whom to run as so that nothing of another user is ever run as root: the one owner of ``paths`` besides root.

    Symbolic links are followed for none of them. Raises CannotDrop when two users besides root own them,
    OSError when a path cannot be read.
    """
    found: dict[int, tuple[int, str]] = {}
    for path in paths:
        status = os.lstat(path)
        found.setdefault(status.st_uid, (status.st_gid, path))
    others = [uid for uid in found if uid != 0]
    if len(others) > 1:
        said = ", ".join(f"{found[uid][1]} belongs to {identity_of_uid(uid).name}" for uid in sorted(others))
        raise CannotDrop(f"it has several owners: {said}")
    uid = others[0] if others else 0
    identity = identity_of_uid(uid)
    return identity if not identity.name.startswith("uid ") else identity_of_uid(uid, found[uid][0])


def popen_arguments(identity: Identity) -> dict[str, Any]:
    """``user``, ``group`` and ``extra_groups`` for subprocess; empty when this process is that user already.

    Raises CannotDrop when this process is neither root nor that user.
    """
    if os.getuid() != os.geteuid():
        raise RuntimeError("no command is started inside acting_as: it could become root again")
    if os.geteuid() == identity.uid and identity.uid != 0:
        return {}
    if os.geteuid() != 0:
        mine = identity_of_uid(os.geteuid()).name
        raise CannotDrop(f"this must run as {identity.name} or as root, and runs as {mine}: set become")
    if identity.uid == 0:
        return {}
    return {"user": identity.uid, "group": identity.gid, "extra_groups": list(identity.groups)}


def environment(
    identity: Identity,
    base: Optional[Mapping[str, str]] = None,
    extra: Optional[Mapping[str, str]] = None,
) -> dict[str, str]:
    """``base`` (default: this process's) without what belongs to the login it came from, as ``identity`` would have it.

    PATH, proxies, certificates and ``PIP_*`` stay. A home that this user cannot enter becomes ``/``.
    """
    source = os.environ if base is None else base
    result = {name: value for name, value in source.items() if not name.startswith(_PERSONAL)}
    home = identity.home if os.path.isdir(identity.home) else "/"
    result.update(HOME=home, USER=identity.name, LOGNAME=identity.name, LC_ALL="C", LANGUAGE="C")
    result.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    result.update(extra or {})
    return result


@contextlib.contextmanager
def acting_as(identity: Identity) -> Iterator[None]:
    """Do file operations with the rights of ``identity`` and no more, so that its links cannot lead root astray.

    Effective ids of the whole process change: for single-threaded modules only.
    """
    if not popen_arguments(identity):
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(list(identity.groups))
    try:
        os.setegid(identity.gid)
        os.seteuid(identity.uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass


def run_as(
    identity: Identity,
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str],
    cwd: str = "/",
    limit: int = 1 << 20,
) -> RunResult:
    """Run ``argv`` as ``identity`` with exactly ``env``, keeping the last ``limit`` bytes of either stream.

    No shell, no standard input; its own process group, which is ended when the time is over or the command is
    gone, so that nothing is left behind. rc 127 when it cannot be started, -9 with ``timed_out`` when ended.
    Raises CannotDrop (see popen_arguments).
    """
    drop = popen_arguments(identity)
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            umask=0o022,
            **drop,
        )
    except OSError as error:
        return RunResult(127, "", str(error))
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("the pipes of a started process are missing")
    kept = {"out": bytearray(), "err": bytearray()}
    deadline = time.monotonic() + timeout
    timed_out = False
    gone_at: Optional[float] = None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "out")
            selector.register(process.stderr, selectors.EVENT_READ, "err")
            while selector.get_map():
                now = time.monotonic()
                if now >= deadline:
                    timed_out = process.poll() is None
                    break
                # A grandchild may hold the pipes open long after the command: give it a moment, not forever.
                if process.poll() is not None:
                    gone_at = gone_at or now
                    if now - gone_at > 2:
                        break
                for key, _unused in selector.select(min(0.25, deadline - now)):
                    chunk = os.read(key.fd, 65536)
                    if not chunk:
                        selector.unregister(key.fileobj)
                        continue
                    buffer = kept[key.data]
                    buffer += chunk
                    if len(buffer) > 2 * limit:
                        del buffer[:-limit]
        if not timed_out:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                timed_out = True
    finally:
        _end_group(process)
        process.stdout.close()
        process.stderr.close()
        process.wait()
    out, err = (bytes(kept[name][-limit:]).decode("utf-8", "replace") for name in ("out", "err"))
    return RunResult(-9 if timed_out else process.returncode, out, err, timed_out)
