# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: a lock whose holder is a process, told by pid, start time and boot.

The holder may be another process than the one that took the lock (a detached build), so the kernel's ``flock``
guards only the moments in which the file is read and written. A holder that died, became a zombie, or whose pid was
given to somebody else, holds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple, Optional


class Holder(NamedTuple):
    """Who holds a lock. ``start_time`` is in clock ticks since boot, ``since`` in seconds since the epoch."""

    pid: int
    start_time: int
    boot_id: str
    purpose: str
    since: float

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.purpose}, since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self.since))})"


class LockHeld(Exception):
    """Another living process holds the lock; ``holder`` says which."""

    def __init__(self, path: str, holder: Holder) -> None:
        super().__init__(f"{path} is held by {holder}")
        self.path = path
        self.holder = holder


def boot_id() -> str:
    """The kernel's id of this boot, or an empty string where /proc does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def parse_stat(text: str) -> Optional[tuple[str, int]]:
    """``(state, start time in ticks)`` from the text of /proc/<pid>/stat; None if it is not one.

    The command's name is in parentheses and may hold spaces and parentheses itself.
    """
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or not fields[19].isdigit():
        return None
    return fields[0], int(fields[19])


def process_start(pid: int) -> Optional[int]:
    """Start time of a living process in ticks since boot; None when there is none (a zombie is none)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            parsed = parse_stat(stream.read())
    except OSError:
        return None
    if parsed is None or parsed[0] in "ZX":
        return None
    return parsed[1]


def is_alive(holder: Holder) -> bool:
    """Whether the very process that took the lock is still there."""
    return holder.boot_id == boot_id() and process_start(holder.pid) == holder.start_time


def parse_holder(text: str) -> Optional[Holder]:
    """The holder written in a lock file, None for an empty or torn one."""
    try:
        data = json.loads(text)
        return Holder(
            int(data["pid"]),
            int(data["start_time"]),
            str(data["boot_id"]),
            str(data["purpose"]),
            float(data["since"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


@contextlib.contextmanager
def _guarded(path: str, timeout: float = 10.0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Optional[Holder]:
    return parse_holder(os.pread(descriptor, 65536, 0).decode("utf-8", "replace"))


def _write(descriptor: int, holder: Optional[Holder]) -> None:
    data = b"" if holder is None else json.dumps(holder._asdict()).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    os.fsync(descriptor)


def holder_of(path: str) -> Optional[Holder]:
    """The living holder of the lock at ``path``, or None. Reads only, so that check mode may use it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            holder = parse_holder(stream.read(65536))
    except OSError:
        return None
    return holder if holder is not None and is_alive(holder) else None


class Lock:
    """A lock that was taken. ``pass_to`` gives it to a detached child; ``release`` ends it if it is still ours."""

    def __init__(self, path: str, holder: Holder) -> None:
        self.path = path
        self.holder = holder

    def pass_to(self, pid: int) -> None:
        """Make process ``pid`` the holder. Raises ProcessLookupError when it is gone already."""
        start = process_start(pid)
        if start is None:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone", self.path)
        holder = self.holder._replace(pid=pid, start_time=start)
        with _guarded(self.path) as descriptor:
            if _read(descriptor) != self.holder:
                raise RuntimeError(f"{self.path} is not ours any more")
            _write(descriptor, holder)
        self.holder = holder

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would let two processes lock two files of one name."""
        with _guarded(self.path) as descriptor:
            if _read(descriptor) == self.holder:
                _write(descriptor, None)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.release()


def acquire(path: str, purpose: str, wait: float = 0.0, poll: float = 0.25) -> Lock:
    """Take the lock at ``path`` for this process, waiting at most ``wait`` seconds for a living holder.

    Raises LockHeld (with the holder) when it is not to be had, OSError when the file cannot be written.
    A lock of this process itself counts as held: the lock is not re-entrant.
    """
    pid = os.getpid()
    start = process_start(pid)
    if start is None:
        raise RuntimeError(f"/proc/{pid}/stat cannot be read: no lock without a start time")
    deadline = time.monotonic() + wait
    while True:
        with _guarded(path) as descriptor:
            current = _read(descriptor)
            if current is None or not is_alive(current):
                mine = Holder(pid, start, boot_id(), purpose, time.time())
                _write(descriptor, mine)
                return Lock(path, mine)
        if time.monotonic() >= deadline:
            raise LockHeld(path, current)
        time.sleep(poll)
