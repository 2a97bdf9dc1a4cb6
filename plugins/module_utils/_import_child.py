# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: imports modules in child processes of a venv's interpreter, and survives what they do.

One child imports torch once, as SGLang does before any backend, then forks for each group of modules: an abort, exit
or hang in one group is that group's result and hides no other. Results come through pipes of their own, so that
nothing printed can be taken for one.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._outcome import LIBRARIES, Account, Group, Outcome

RESULT_LIMIT = 256 * 1024
OUTPUT_HEAD, OUTPUT_TAIL = 2048, 4096
_FLOOD = 256 << 20
_MEMORY = 16 << 30

CHILD = r"""
import json, os, sys
spec = json.loads(sys.argv[1])
del sys.argv[1:]
dumps, write, leave, fork, wait, exit_now = json.dumps, os.write, os._exit, os.fork, os.waitpid, os._exit
control, groups = spec["control"], spec["groups"]
fds = [control] + [g["result"] for g in groups] + [g["output"] for g in groups]
for fd in fds:
    os.set_inheritable(fd, False)

def tell(fd, data):
    try:
        raw = dumps(data).encode("ascii", "replace") + b"\n"
        while raw:
            raw = raw[write(fd, raw):]
    except Exception:
        leave(97)

def text(value, limit=4000):
    try:
        return str(value)[:limit]
    except BaseException as error:
        return "<%s while printing %s>" % (type(error).__name__, type(value).__name__)

def one(error):
    data = {"type": type(error).__name__, "bases": [k.__name__ for k in type(error).__mro__],
            "message": text(error), "name": text(getattr(error, "name", None) or "", 300),
            "path": text(getattr(error, "path", None) or "", 1000)}
    if isinstance(error, OSError):
        data["errno"], data["filename"] = error.errno, text(error.filename or "", 1000)
    lost = data["message"].partition(": cannot open shared object file")[0].rsplit(None, 1)[-1:]
    if lost and lost[0].startswith("/"):
        data["exists"] = os.path.exists(lost[0])
    if isinstance(error, SystemExit):
        data["exit"] = text(error.code, 100)
    frames, tb = [], error.__traceback__
    while tb is not None and len(frames) < 400:
        code = tb.tb_frame.f_code
        frames.append([text(code.co_filename, 500), tb.tb_lineno, text(code.co_name, 200)])
        tb = tb.tb_next
    data["frames"] = [f for f in frames if not f[0].startswith("<") and "/importlib/" not in f[0]][-6:]
    return data

def describe(error):
    data = one(error)
    chain, seen, current = [], set(), error
    while current is not None and id(current) not in seen and len(chain) < 8:
        seen.add(id(current))
        chain.append(one(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    data["chain"] = chain[1:]
    return data

def libraries():
    found = []
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.rstrip("\n").split(None, 5)[5:]
                if path and ".so" in path[0] and path[0] not in found:
                    found.append(path[0])
    except OSError:
        pass
    words = spec["libraries"]
    return [p for p in found if any(w in p.rsplit("/", 1)[-1] for w in words)][:80]

def work(group):
    import importlib
    out = {"ok": False, "modules": {}, "attributes": {}, "error": None}
    try:
        for name, attributes in group["modules"].items():
            module = importlib.import_module(name)
            module = sys.modules.get(name, module)
            module_file = getattr(module, "__file__", None)
            module_spec = getattr(module, "__spec__", None)
            out["modules"][name] = {"file": text(module_file, 1000) if module_file else None,
                                    "origin": text(getattr(module_spec, "origin", None) or "", 1000) or None,
                                    "namespace": module_file is None and hasattr(module, "__path__")}
            for attribute in attributes:
                out["attributes"][name + "." + attribute] = hasattr(module, attribute)
        out["ok"] = True
    except BaseException as error:
        out["error"] = describe(error)
    top = sys.modules.get(group["top"])
    out["top_file"] = text(getattr(top, "__file__", None) or "", 1000) or None
    out["version"] = text(getattr(top, "__version__", None) or "", 100) or None
    out["libraries"] = libraries()
    return out

tell(control, {"begun": True})
torch = {"asked": spec["torch"], "error": None}
if spec["torch"]:
    try:
        import torch as _torch
        torch["version"] = text(_torch.__version__, 100)
        torch["file"] = text(getattr(_torch, "__file__", None), 1000)
    except BaseException as error:
        torch["error"] = describe(error)
tell(control, {"torch": torch})
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = spec["memory"] if hard < 0 else min(hard, spec["memory"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
except (ImportError, ValueError, OSError):
    pass
sys.stdout.flush()
sys.stderr.flush()
pids = {}
for index, group in enumerate(groups):
    pid = fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            os.dup2(group["output"], 1)
            os.dup2(group["output"], 2)
            for fd in fds:
                if fd != group["result"]:
                    os.close(fd)
            tell(group["result"], work(group))
            sys.stdout.flush()
        finally:
            exit_now(0)
    pids[pid] = index
    tell(control, {"pid": pid, "group": index})
for fd in fds[1:]:
    os.close(fd)
while pids:
    pid, status = wait(-1, 0)
    if pid in pids:
        tell(control, {"group": pids.pop(pid), "status": status})
exit_now(0)
"""


def service_environment(given: Optional[Mapping[str, str]], account: Account) -> dict[str, str]:
    """The environment that systemd gives a service with ``User=`` and the variables ``given``: nothing of ours."""
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    environment.update({"HOME": account.home or "/", "SHELL": "/bin/sh"})
    if account.name:
        environment.update({"USER": account.name, "LOGNAME": account.name})
    for name, value in (given or {}).items():
        if name and "=" not in name and "\0" not in name and "\0" not in str(value):
            environment[str(name)] = str(value)
    return environment


class _Tail:
    """The first and the last bytes of a stream, in bounded memory."""

    def __init__(self) -> None:
        self.head, self.tail, self.total = b"", b"", 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = OUTPUT_HEAD - len(self.head)
        if room > 0:
            self.head, data = self.head + data[:room], data[room:]
        self.tail = (self.tail + data)[-OUTPUT_TAIL:]

    def text(self) -> str:
        gap = b"\n[...]\n" if self.total > len(self.head) + len(self.tail) else b""
        return (self.head + gap + self.tail).decode("utf-8", "replace").replace("\0", "")


def _become_reaper(on: bool) -> bool:
    """Orphans of our children become our children, so that a daemon that left its session is found and ended."""
    try:
        import ctypes

        return ctypes.CDLL(None).prctl(36, 1 if on else 0, 0, 0, 0) == 0
    except (ImportError, OSError, AttributeError):
        return False


def _own_children() -> set[int]:
    own = os.getpid()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open("/proc/" + entry + "/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
                if int(fields[1]) == own:
                    found.add(int(entry))
            except (OSError, IndexError, ValueError):
                continue
    return found


def _kill(pid: int, group: bool = False) -> None:
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except OSError:
        return


def _sweep(before: set[int], limit: float = 5.0) -> None:
    """Ends and reaps every child that was not there before, and theirs as they come to us."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        left = _own_children() - before
        if not left:
            return
        for pid in left:
            _kill(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                continue
        time.sleep(0.01)


class _Session:
    def __init__(self, groups: Sequence[Group], timeout: float) -> None:
        self.groups = groups
        self.timeout = timeout
        self.selector = selectors.DefaultSelector()
        self.results: list[Optional[dict[str, Any]]] = [None] * len(groups)
        self.raw = [b""] * len(groups)
        self.status: list[Optional[int]] = [None] * len(groups)
        self.pids: dict[int, int] = {}
        self.outputs = [_Tail() for _group in groups]
        self.own_output = _Tail()
        self.control = b""
        self.torch: Optional[dict[str, Any]] = None
        self.begun = self.timed_out = False
        self.ended: set[int] = set()
        self.flooded: set[int] = set()

    def line(self, line: bytes) -> None:
        try:
            data = json.loads(line)
        except ValueError:
            return
        if not isinstance(data, dict):
            return
        if "begun" in data:
            self.begun = True
        elif "torch" in data:
            self.torch = data["torch"]
        elif "pid" in data:
            self.pids[data["group"]] = data["pid"]
        elif "status" in data:
            self.status[data["group"]] = data["status"]

    def feed(self, kind: str, index: int, data: bytes) -> None:
        if kind == "control":
            self.control += data
            *lines, self.control = self.control.split(b"\n")
            for line in lines:
                self.line(line)
        elif kind == "result":
            if len(self.raw[index]) < RESULT_LIMIT:
                self.raw[index] += data
        else:
            tail = self.own_output if index < 0 else self.outputs[index]
            tail.add(data)
            if tail.total > _FLOOD and index >= 0 and index in self.pids and index not in self.flooded:
                self.flooded.add(index)
                _kill(self.pids[index], group=True)

    def parse(self) -> None:
        for index, raw in enumerate(self.raw):
            line, newline, _rest = raw.partition(b"\n")
            if self.results[index] is None and newline:
                try:
                    data = json.loads(line)
                except ValueError:
                    continue
                if isinstance(data, dict):
                    self.results[index] = data

    def pump(self, wait: float) -> bool:
        """Reads what there is; False when every pipe is at its end."""
        if not self.selector.get_map():
            return False
        for key, _events in self.selector.select(wait):
            kind, index = key.data
            try:
                data = os.read(key.fd, 65_536)
            except OSError:
                data = b""
            if data:
                self.feed(kind, index, data)
            else:
                self.selector.unregister(key.fd)
                os.close(key.fd)
                if kind == "result":
                    self.ended.add(index)
        return True

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()

    def finished(self, orphaned: bool = False) -> bool:
        """Whether there is nothing to wait for; ``orphaned``: the first child is gone and forks no more."""
        return all(
            self.results[i] is not None or self.status[i] is not None or (orphaned and i in self.ended)
            for i in range(len(self.groups))
        )

    def adopt(self) -> None:
        """The first child is gone: its children are ours now, so their status is ours to collect."""
        for index in range(len(self.groups)):
            pid = self.pids.get(index)
            if self.status[index] is None and pid is not None:
                try:
                    done, status = os.waitpid(pid, os.WNOHANG)
                except OSError:
                    done, status = pid, -1
                if done:
                    self.status[index] = status

    def run(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.timeout
        torch_seen = False
        while True:
            self.pump(0.2)
            self.parse()
            if self.torch is not None and not torch_seen:
                torch_seen = True
                deadline = time.monotonic() + self.timeout
            if self.finished():
                break
            if process.poll() is not None:
                while self.selector.get_map() and self.selector.select(0):
                    self.pump(0)
                self.parse()
                if not self.pids:
                    break
                self.adopt()
                if self.finished(orphaned=True):
                    break
            if time.monotonic() > deadline:
                self.timed_out = True
                break
        end = time.monotonic() + 1.0
        while self.selector.get_map() and self.selector.select(0) and time.monotonic() < end:
            self.pump(0)
        self.parse()

    def outcome(self, index: int, returncode: Optional[int]) -> Outcome:
        result, status = self.results[index], self.status[index]
        output = self.outputs[index].text() or self.own_output.text()
        if result is not None:
            error = result.get("error")
            kind = "ok" if result.get("ok") else "error"
            if isinstance(error, dict) and "SystemExit" in error.get("bases", []):
                kind = "exit"
            return Outcome(
                kind, error=error, modules=result.get("modules") or {}, attributes=result.get("attributes") or {},
                libraries=result.get("libraries") or [], version=result.get("version"),
                top_file=result.get("top_file"), output=output, torch=self.torch,
            )  # fmt: skip
        if index in self.flooded:
            return Outcome("exit", output=output, torch=self.torch, message="ended: it printed without end")
        if status is not None and status >= 0 and os.WIFSIGNALED(status):
            return Outcome("signal", signal=signal_name(os.WTERMSIG(status)), output=output, torch=self.torch)
        if status is not None:
            code = os.WEXITSTATUS(status) if status >= 0 else None
            return Outcome("exit", status=code, output=output, torch=self.torch)
        if self.timed_out:
            kind = "timeout" if self.torch is not None else "torch" if self.begun else "interpreter"
            return Outcome(kind, output=output, torch=self.torch, message=f"no answer in {self.timeout:g} s")
        if self.torch is not None:
            return Outcome("exit", output=output, torch=self.torch, message="the importing process was ended")
        died = signal_name(-returncode) if returncode is not None and returncode < 0 else None
        kind = "torch" if self.begun else "interpreter"
        message = f"it was ended by {died}" if died else f"it ended with status {returncode}"
        return Outcome(kind, signal=died, status=None if died else returncode, output=output, message=message)


def signal_name(number: int) -> str:
    """``SIGABRT`` for 6; the number as text where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def run_imports(
    python: str,
    groups: Sequence[Group],
    account: Account,
    environment: Optional[Mapping[str, str]] = None,
    timeout: float = 120.0,
    with_torch: bool = True,
) -> dict[str, Outcome]:
    """Imports every group in a child of ``python`` and says what became of each; never raises.

    ``environment`` is what the service has, or None: then the interpreter is isolated (``-I``). ``timeout`` seconds
    are given to torch, and again to the groups together. Nothing is left running, and the working directory, an empty
    one of the account's own, is removed.
    """
    if not groups:
        return {}
    folder = None
    before = _own_children()
    reaper = _become_reaper(True)
    try:
        folder = tempfile.mkdtemp(prefix="gpufleet-probe-")
        if account.uid is not None:
            os.chown(folder, account.uid, -1 if account.gid is None else account.gid)
        return _run(python, groups, account, environment, timeout, with_torch, folder)
    except OSError as error:
        return {group.name: Outcome("not_started", message=str(error)) for group in groups}
    finally:
        if reaper:
            _sweep(before)
            _become_reaper(False)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _run(
    python: str,
    groups: Sequence[Group],
    account: Account,
    environment: Optional[Mapping[str, str]],
    timeout: float,
    with_torch: bool,
    folder: str,
) -> dict[str, Outcome]:
    session = _Session(groups, timeout)
    writers: list[int] = []

    def pipe(kind: str, index: int) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        session.selector.register(reader, selectors.EVENT_READ, (kind, index))
        writers.append(writer)
        return writer

    control, own = pipe("control", -1), pipe("output", -1)
    specs = [
        {"result": pipe("result", i), "output": pipe("output", i), "top": group.top,
         "modules": {module: list(names) for module, names in group.modules.items()}}
        for i, group in enumerate(groups)
    ]  # fmt: skip
    spec = {
        "control": control, "groups": specs, "torch": with_torch, "libraries": list(LIBRARIES), "memory": _MEMORY,
    }  # fmt: skip
    argv = [python, "-B", *(["-I"] if environment is None else []), "-c", CHILD, json.dumps(spec)]
    options: dict[str, Any] = {}
    if account.uid is not None and os.geteuid() == 0 and account.uid != 0:
        options = {"user": account.uid, "group": account.gid, "extra_groups": list(account.groups or [])}
    process: Optional[subprocess.Popen[bytes]] = None
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=own, stderr=own, cwd=folder, start_new_session=True,
            env=service_environment(environment, account), pass_fds=[w for w in writers if w != own], **options,
        )  # fmt: skip
    finally:
        for writer in writers:
            os.close(writer)
        if process is None:
            session.close()
    try:
        session.run(process)
    finally:
        for pid in session.pids.values():
            _kill(pid, group=True)
            _kill(pid)
        _kill(process.pid, group=True)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
        session.close()
    return {group.name: session.outcome(i, process.returncode) for i, group in enumerate(groups)}
