# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: long work on a host that outlives the connection, with a lock, a log and heartbeats.

A job is a folder: ``spec.json``, ``lock``, ``status.json``, ``log`` and ``worker.py``. The last is a copy of this very
file, which therefore imports the standard library only: nothing of the Ansible payload has to survive.
The lock is an flock that the worker inherits open from whoever started it, so it is free exactly when the worker is
gone, however that came about; its text (pid, start time, boot) is for people and for the message of a second run.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

MARKER = "GPUFLEET_SGLANG_JOB"
FINAL = ("succeeded", "failed", "timed_out", "cancelled")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 3.0


# --- what the module calls -------------------------------------------------------------------------------------------


def start(job_dir: str, spec: Mapping[str, Any], python: str | None = None) -> dict[str, Any]:
    """Start the job of ``job_dir``, or attach to the one that is running there.

    ``spec``: ``{id, steps: [{name, argv, env: {}, cwd, user: name|None}], time_limit: s, heartbeat: s}``; the steps
    run one after the other, a step's rc other than 0 ends the job. Returns ``{attached: bool, holder: {pid, start_time,
    boot_id, alive} | None, ended: [pid]}``; ``ended`` are leftovers of a worker that died.
    Raises OSError when the folder cannot be written.
    """
    os.makedirs(job_dir, mode=0o755, exist_ok=True)
    lock = _take_lock(job_dir)
    deadline = time.monotonic() + 5
    while lock is None and time.monotonic() < deadline:
        # A worker that has written its result holds the lock for a moment more: that is nobody to attach to.
        if (read_json(os.path.join(job_dir, "status.json")) or {}).get("state") not in FINAL:
            break
        time.sleep(0.05)
        lock = _take_lock(job_dir)
    if lock is None:
        return {"attached": True, "holder": holder(job_dir), "ended": []}
    try:
        ended = end_leftovers(job_dir)
        write_json(os.path.join(job_dir, "spec.json"), dict(spec))
        worker = os.path.join(job_dir, "worker.py")
        _write(worker, _own_source())
        write_json(
            os.path.join(job_dir, "status.json"),
            {
                "id": spec.get("id"),
                "state": "running",
                "step": None,
                "started_at": time.time(),
                "heartbeat_at": time.time(),
            },
        )
        with open(os.path.join(job_dir, "log"), "ab") as log:
            process = subprocess.Popen(
                [python or sys.executable, "-I", worker, job_dir, str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(lock,),
            )
        # Nobody waits for it: it is to outlive this process.
        process.returncode = 0
        _describe_holder(lock, process.pid)
        return {"attached": False, "holder": holder(job_dir), "ended": ended}
    finally:
        os.close(lock)


def observe(job_dir: str) -> dict[str, Any]:
    """Return the job's status: ``{state, rc, step, elapsed, heartbeat_age, running: [name], pid, log, message}``.

    ``state``: ``absent``, ``running``, ``succeeded``, ``failed``, ``timed_out``, ``cancelled``, or ``lost`` (the
    worker is gone and left no result: killed, or the host was restarted). Seconds everywhere.
    """
    status = read_json(os.path.join(job_dir, "status.json"))
    log = os.path.join(job_dir, "log")
    if not status:
        return {"state": "absent", "rc": None, "step": None, "elapsed": 0.0, "running": [], "pid": None, "log": log}
    owner = holder(job_dir)
    state = str(status.get("state"))
    message = status.get("message")
    if state not in FINAL and not is_locked(job_dir):
        # It may have finished between the two looks.
        status = read_json(os.path.join(job_dir, "status.json")) or status
        state = str(status.get("state"))
        if state not in FINAL:
            state = "lost"
            message = "the worker (pid {}) is gone without a result: it was killed, or the host was restarted".format(
                (owner or {}).get("pid")
            )
    now = time.time()
    end = status.get("finished_at") or (now if state == "running" else status.get("heartbeat_at")) or now
    return {
        "id": status.get("id"),
        "state": state,
        "rc": status.get("rc"),
        "step": status.get("step"),
        "steps": status.get("steps") or [],
        "elapsed": round(max(0.0, float(end) - float(status.get("started_at") or end)), 1),
        "heartbeat_age": round(max(0.0, now - float(status.get("heartbeat_at") or now)), 1),
        "running": status.get("running") or [],
        "pid": (owner or {}).get("pid"),
        "log": log,
        "message": message,
    }


def cancel(job_dir: str, wait: float = 10.0) -> bool:
    """End a running job and its whole process tree; return whether there was one."""
    owner = holder(job_dir)
    if not is_locked(job_dir):
        return bool(end_leftovers(job_dir))
    if owner and owner["alive"]:
        os.kill(owner["pid"], signal.SIGTERM)
    deadline = time.monotonic() + wait
    while is_locked(job_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_locked(job_dir) and owner and owner["alive"]:
        os.kill(owner["pid"], signal.SIGKILL)
        time.sleep(0.2)
    end_leftovers(job_dir)
    return True


def tail(job_dir: str, size: int = 65536) -> list[str]:
    """Return the last lines of the job's log (at most ``size`` bytes of it)."""
    try:
        with open(os.path.join(job_dir, "log"), "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - size))
            return stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def log_lines(job_dir: str, limit: int = 32 << 20) -> list[str]:
    """Return the log of the last attempt (from its header line on)."""
    try:
        with open(os.path.join(job_dir, "log"), "rb") as stream:
            lines = stream.read(limit).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    first = max((index for index, line in enumerate(lines) if line.startswith("=== job ")), default=0)
    return lines[first:]


def is_locked(job_dir: str) -> bool:
    """Whether a worker holds the job's lock right now."""
    try:
        handle = os.open(os.path.join(job_dir, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def holder(job_dir: str) -> dict[str, Any] | None:
    """Return who took the lock last: ``{pid, start_time, boot_id, alive}``; ``alive`` compares all three."""
    noted = read_json(os.path.join(job_dir, "lock"))
    if not noted or not isinstance(noted.get("pid"), int):
        return None
    alive = noted.get("boot_id") == boot_id() and process_start_time(noted["pid"]) == noted.get("start_time")
    return dict(noted, alive=alive)


def end_leftovers(job_dir: str) -> list[int]:
    """Kill processes that a dead worker of this job left behind; return their ids. Only call it with the lock in
    hand."""
    wanted = (f"{MARKER}={os.path.abspath(job_dir)}").encode()
    ended = []
    for _attempt in range(5):
        found = [pid for pid in _processes() if pid != os.getpid() and wanted in _environ(pid)]
        if not found:
            break
        for pid in found:
            _signal(pid, signal.SIGKILL)
            if pid not in ended:
                ended.append(pid)
        time.sleep(0.1)
    return ended


def process_start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None when there is none (or only a zombie)."""
    fields = _stat(pid)
    if not fields or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def boot_id() -> str:
    """Return what distinguishes this boot of the host from the others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return "unknown"


def read_json(path: str) -> dict[str, Any] | None:
    """Return a JSON object from a file, or None where there is none (absent, unreadable, half a file, another type)."""
    try:
        with open(path, encoding="utf-8") as stream:
            loaded = json.load(stream)
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def write_json(path: str, value: Mapping[str, Any], mode: int = 0o644) -> None:
    """Write a JSON file so that a reader sees the old or the new one, never a half."""
    _write(path, json.dumps(value, sort_keys=True, indent=1) + "\n", mode)


# --- shared ----------------------------------------------------------------------------------------------------------


def _write(path: str, text: str, mode: int = 0o644) -> None:
    temporary = f"{path}.{os.getpid()}.new"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def _take_lock(job_dir: str) -> int | None:
    handle = os.open(os.path.join(job_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _describe_holder(lock: int, pid: int) -> None:
    text = json.dumps({"pid": pid, "start_time": process_start_time(pid), "boot_id": boot_id()}) + "\n"
    os.ftruncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)


def _own_source() -> str:
    # Inside an Ansible payload this module comes from a zip file: ask the loader, not the disk.
    loader = globals().get("__loader__")
    if loader is not None and hasattr(loader, "get_source"):
        text = loader.get_source(__name__)
        if text:
            return str(text)
    spec = importlib.util.find_spec(__name__)
    if spec is not None and spec.loader is not None and hasattr(spec.loader, "get_source"):
        text = spec.loader.get_source(__name__)
        if text:
            return str(text)
    with open(__file__, encoding="utf-8") as stream:
        return stream.read()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()
    except OSError:
        return None


def _environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def _cmdline(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return [word.decode("utf-8", "replace") for word in stream.read().split(b"\0") if word]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all living processes below ``ancestor``."""
    children: dict[int, list[int]] = {}
    for pid in _processes():
        fields = _stat(pid)
        if fields and fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    queue = list(children.get(ancestor, []))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, []))
    return found


# --- the worker ------------------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, job_dir: str) -> None:
        self.job_dir = job_dir
        self.spec = read_json(os.path.join(job_dir, "spec.json")) or {}
        self.cancelled = False
        self.started = time.monotonic()
        self.status: dict[str, Any] = {
            "id": self.spec.get("id"),
            "state": "running",
            "started_at": time.time(),
            "steps": [],
            "running": [],
            "rc": None,
        }
        self.heartbeat = float(self.spec.get("heartbeat") or 5)
        self.time_limit = float(self.spec.get("time_limit") or 3600)

    def note(self, **values: Any) -> None:
        self.status.update(values, heartbeat_at=time.time())
        write_json(os.path.join(self.job_dir, "status.json"), self.status)

    def on_signal(self, number: int, frame: Any) -> None:
        self.cancelled = True

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        libc = ctypes.CDLL(None, use_errno=True)
        # Orphans of the build come to us instead of to init, so that "the whole tree" stays one tree.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.say("=== job {} {}".format(self.spec.get("id"), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())))
        self.note()
        state, rc, message = "succeeded", 0, None
        for step in self.spec.get("steps") or []:
            begun = time.monotonic()
            self.say("=== step {}".format(step["name"]))
            self.note(step=step["name"])
            state, rc, message = self.step(step, libc)
            self.kill_tree()
            self.status["steps"].append({"name": step["name"], "rc": rc, "seconds": round(time.monotonic() - begun, 1)})
            self.say(f"=== step {step['name']} rc {rc} after {time.monotonic() - begun:.1f} s")
            if state != "succeeded":
                break
        self.note(state=state, rc=rc, message=message, running=[], finished_at=time.time())
        self.say(f"=== {state}")
        return 0

    def step(self, step: Mapping[str, Any], libc: Any) -> tuple[str, int, str | None]:
        user = step.get("user")
        who: dict[str, Any] = {}
        if user and os.geteuid() == 0 and pwd.getpwnam(user).pw_uid != 0:
            entry = pwd.getpwnam(user)
            who = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(user, entry.pw_gid)}
        environment = dict(step.get("env") or {})
        environment[MARKER] = os.path.abspath(self.job_dir)
        try:
            process = subprocess.Popen(
                list(step["argv"]),
                stdin=subprocess.DEVNULL,
                stdout=sys.stdout.fileno(),
                stderr=sys.stdout.fileno(),
                env=environment,
                cwd=step.get("cwd") or "/",
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0),
                **who,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.say("cannot start {}: {}".format(step["argv"][0], error))
            return "failed", 127, "cannot start {}: {}".format(step["argv"][0], error)
        last = time.monotonic()
        while True:
            rc = process.poll()
            if rc is not None:
                return ("succeeded" if rc == 0 else "failed"), rc, None
            now = time.monotonic()
            if self.cancelled:
                self.kill_tree()
                process.poll()
                return "cancelled", -15, "ended on request"
            if now - self.started > self.time_limit:
                self.kill_tree()
                process.poll()
                return (
                    "timed_out",
                    -9,
                    f"the time limit of {self.time_limit:g} s is over; step {step['name']} was ended",
                )
            if now - last >= self.heartbeat:
                last = now
                self.note(running=self.compiling())
            time.sleep(0.05 if now - self.started < 2 else 0.25)

    def compiling(self) -> list[str]:
        """Return the sources that compilers below us work on."""
        found = set()
        for pid in descendants(os.getpid()):
            words = _cmdline(pid)
            if words and re.search(r"(?:nvcc|g\+\+|gcc|c\+\+|clang\+*)$", os.path.basename(words[0])):
                for word in words:
                    if re.search(r"\.(?:cu|cpp|cc|cxx)$", word):
                        found.add(os.path.basename(word))
        return sorted(found)

    def kill_tree(self) -> None:
        """End everything below us: first ask, then insist until nothing is left."""
        deadline = time.monotonic() + _GRACE
        asked = False
        while True:
            self.reap()
            left = descendants(os.getpid())
            if not left:
                return
            insist = time.monotonic() > deadline
            if insist or not asked:
                for pid in left:
                    _signal(pid, signal.SIGKILL if insist else signal.SIGTERM)
                asked = True
            if time.monotonic() > deadline + 30:
                self.say(f"still there after SIGKILL (uninterruptible): {left}")
                return
            time.sleep(0.05)

    @staticmethod
    def reap() -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return

    @staticmethod
    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Run as ``worker.py JOB_DIR LOCK_FD``; the descriptor is the lock, held open until we end."""
    os.set_inheritable(int(argv[2]), False)
    worker = _Worker(argv[1])
    try:
        return worker.run()
    except Exception as error:
        worker.note(state="failed", rc=1, message=f"the worker failed: {error}", finished_at=time.time())
        raise


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
