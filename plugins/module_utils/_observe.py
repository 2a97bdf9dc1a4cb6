# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what can be seen of a running service on its host (systemd, /proc, journal, HTTP).

Everything here reads. A request that may take long runs in a detached child with its own time limit, and leaves its
answer in a file: the caller goes on watching systemd and the log meanwhile, and a request outlives the slice that
began it instead of being aborted (an aborted health probe has crashed servers).
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_state import VENDORED

UNIT_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "ExecMainCode",
    "MainPID",
    "NRestarts",
    "InvocationID",
    "ControlGroup",
    "ActiveEnterTimestampMonotonic",
    "InactiveEnterTimestampMonotonic",
)
COMPILERS = frozenset(
    (
        *("nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "hipcc"),
        *("cc1", "cc1plus", "ninja", "gcc", "g++", "clang", "clang++", "ld", "as"),
    )
)
MAX_BODY = 256 * 1024
FAKE_BOOTSTRAP_HOST = "2.2.2.2"

# ---- systemd ---------------------------------------------------------------------------------------------------------


def parse_show(text: str) -> dict[str, Any]:
    """``systemctl show`` output → ``{load_state, active_state, sub_state, result, exec_status, main_pid, n_restarts,
    invocation, control_group, active_enter}``; numbers are int or None, times are seconds of the monotonic clock."""
    raw: dict[str, str] = {}
    for line in text.splitlines():
        name, sep, value = line.partition("=")
        if sep:
            raw[name.strip()] = value.strip()

    def number(name: str) -> Optional[int]:
        try:
            return int(raw.get(name, ""))
        except ValueError:
            return None

    entered = number("ActiveEnterTimestampMonotonic")
    return {
        "load_state": raw.get("LoadState"),
        "active_state": raw.get("ActiveState"),
        "sub_state": raw.get("SubState"),
        "result": raw.get("Result"),
        "exec_status": number("ExecMainStatus"),
        "main_pid": number("MainPID") or 0,
        "n_restarts": number("NRestarts") or 0,
        "invocation": raw.get("InvocationID") or None,
        "control_group": raw.get("ControlGroup") or None,
        "active_enter": entered / 1e6 if entered else None,
    }


def show_unit(run: Run, unit: str) -> Optional[dict[str, Any]]:
    """What systemd says of ``unit``; None when systemd does not answer."""
    result = run(["systemctl", "show", unit, "--no-pager", "-p", ",".join(UNIT_PROPERTIES)], 20.0)
    if result.rc != 0 or "ActiveState=" not in result.stdout:
        return None
    return parse_show(result.stdout)


# ---- processes -------------------------------------------------------------------------------------------------------


def _read(path: str, limit: int = 1 << 20) -> Optional[bytes]:
    try:
        with open(path, "rb") as handle:
            return handle.read(limit)
    except OSError:
        return None


def cgroup_pids(
    control_group: str, roots: Sequence[str] = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
) -> list[int]:
    """The pids of a control group and of those below it."""
    pids: list[int] = []
    for root in roots:
        top = root + control_group
        if control_group in ("", "/") or not os.path.isdir(top):
            continue
        for folder, _folders, files in os.walk(top):
            if "cgroup.procs" in files:
                text = _read(os.path.join(folder, "cgroup.procs")) or b""
                pids.extend(int(word) for word in text.split() if word.isdigit())
        if pids:
            break
    return sorted(set(pids))


def _stat_fields(pid: int, proc: str = "/proc") -> Optional[list[str]]:
    text = _read(f"{proc}/{pid}/stat")
    if not text:
        return None
    return text.decode("ascii", "replace").rpartition(")")[2].split()


def start_time(pid: int, proc: str = "/proc") -> Optional[int]:
    """When a process began, in clock ticks since boot: with the pid it names one process for ever."""
    fields = _stat_fields(pid, proc)
    return int(fields[19]) if fields and len(fields) > 19 else None


def is_alive(pid: int, proc: str = "/proc") -> bool:
    """There is such a process, and it is no zombie."""
    fields = _stat_fields(pid, proc)
    return bool(fields) and fields is not None and fields[0] not in ("Z", "X")


def descendants(pid: int, proc: str = "/proc") -> list[int]:
    """A process and all that it (or its children) started and that still have it as an ancestor."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(proc):
        if name.isdigit():
            fields = _stat_fields(int(name), proc)
            if fields and len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        if one in found:
            continue
        found.append(one)
        todo.extend(children.get(one, ()))
    return sorted(one for one in found if is_alive(one, proc))


def argv_of(pid: int, proc: str = "/proc") -> Optional[list[str]]:
    """The argv of a process; None when there is none to read."""
    raw = _read(f"{proc}/{pid}/cmdline")
    if not raw:
        return None
    return [part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0")]


def running_argv(unit: Optional[str], pid: Optional[int], run: Run, proc: str = "/proc") -> list[str]:
    """The argv of a unit's main process, or of ``pid``; [] when there is none."""
    if unit:
        result = run(["systemctl", "show", "-p", "MainPID", "--value", unit], 20.0)
        pid = int(result.stdout.strip()) if result.stdout.strip().isdigit() else None
    return (argv_of(pid, proc) if pid else None) or []


def name_of(pid: int, proc: str = "/proc") -> str:
    """The short name of a process."""
    return (_read(f"{proc}/{pid}/comm") or b"?").decode("utf-8", "replace").strip()


def read_process(pids: Sequence[int], main_pid: int, proc: str = "/proc") -> dict[str, Any]:
    """``{alive, main_pid, pids, argv, compilers, read_bytes}`` of a service's processes."""
    read_bytes = 0
    compilers = []
    for pid in pids:
        text = _read(f"{proc}/{pid}/io") or b""
        for line in text.split(b"\n"):
            name, _sep, value = line.partition(b":")
            if name in (b"rchar", b"read_bytes") and value.strip().isdigit():
                read_bytes += int(value)
        if name_of(pid, proc) in COMPILERS:
            compilers.append(pid)
    return {
        "alive": bool(main_pid) and is_alive(main_pid, proc),
        "main_pid": main_pid,
        "pids": list(pids),
        "argv": argv_of(main_pid, proc) if main_pid else None,
        "compilers": compilers,
        "read_bytes": read_bytes,
    }


def loaded_libraries(pids: Iterable[int], wanted: str, proc: str = "/proc") -> tuple[list[str], bool]:
    """``(paths, complete)``: mapped files of the processes whose path matches the pattern ``wanted``; ``complete`` is
    False when the maps of a living process could not be read."""
    pattern = re.compile(wanted)
    found = set()
    complete = True
    for pid in pids:
        text = _read(f"{proc}/{pid}/maps", 32 << 20)
        if text is None:
            complete = complete and not is_alive(pid, proc)
            continue
        for line in text.decode("utf-8", "replace").splitlines():
            path = line.partition("/")[2]
            if path and pattern.search(path) and not VENDORED.search(path):
                found.add("/" + path)
    return sorted(found), complete


# ---- the port --------------------------------------------------------------------------------------------------------


def _address(text: str) -> Optional[str]:
    raw = bytes.fromhex(text)
    if len(raw) == 4:
        return str(ipaddress.IPv4Address(raw[::-1]))
    if len(raw) == 16:
        words = b"".join(raw[i : i + 4][::-1] for i in range(0, 16, 4))
        address = ipaddress.IPv6Address(words)
        return str(address.ipv4_mapped or address)
    return None


def parse_listeners(text: str, port: int) -> list[tuple[str, int]]:
    """``(address, inode)`` of the listening sockets on ``port`` in the text of /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != "0A":
            continue
        where, _sep, number = fields[1].partition(":")
        try:
            if int(number, 16) == port:
                address = _address(where)
                if address:
                    found.append((address, int(fields[9])))
        except ValueError:
            continue
    return found


def relevant(address: str, host: str) -> bool:
    """Does a socket on ``address`` answer for, or stand in the way of, a service on ``host``?"""
    wild = ("0.0.0.0", "::")
    return address in wild or host in wild or address == host


def connect_host(host: str) -> str:
    """Where to reach a service that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def resolve(host: str) -> str:
    """A host name as an address, for the comparison with /proc/net; the name itself when it does not resolve."""
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


def _inodes_of(pid: int, wanted: set[int], proc: str) -> tuple[set[int], bool]:
    folder = f"{proc}/{pid}/fd"
    found: set[int] = set()
    try:
        names = os.listdir(folder)
    except PermissionError:
        return found, False
    except OSError:
        return found, True
    for name in names:
        try:
            target = os.readlink(os.path.join(folder, name))
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1].isdigit() and int(target[8:-1]) in wanted:
            found.add(int(target[8:-1]))
    return found, True


def find_listener(host: str, port: int, own_pids: Sequence[int], proc: str = "/proc") -> Optional[dict[str, Any]]:
    """Who listens on ``host:port``: ``{pids, owned, name, addresses}``; None when nobody does.

    ``owned`` is False as soon as one relevant socket is another's, None when an owner cannot be read (not root).
    """
    here = resolve(host)
    sockets: list[tuple[str, int]] = []
    for table in ("tcp", "tcp6"):
        text = (_read(f"{proc}/net/{table}", 64 << 20) or b"").decode("ascii", "replace")
        sockets.extend(one for one in parse_listeners(text, port) if relevant(one[0], here))
    if not sockets:
        return None
    left = {inode for _address_, inode in sockets}
    addresses = sorted({address for address, _inode in sockets})
    mine = []
    for pid in own_pids:
        found, _readable = _inodes_of(pid, left, proc)
        if found:
            mine.append(pid)
            left -= found
        if not left:
            return {"pids": mine, "owned": True, "name": name_of(mine[0], proc), "addresses": addresses}
    others, blind = [], False
    for name in os.listdir(proc):
        if name.isdigit() and int(name) not in own_pids:
            found, readable = _inodes_of(int(name), left, proc)
            blind = blind or not readable
            if found:
                others.append(int(name))
    if others:
        return {"pids": sorted(others), "owned": False, "name": name_of(others[0], proc), "addresses": addresses}
    return {"pids": mine, "owned": None, "name": None, "addresses": addresses}


# ---- the log ---------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One line of the log: which start wrote it (an invocation id, or None), and its text."""

    invocation: Optional[str]
    text: str


def _message(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        # journald gives bytes for a text with control characters, and a list of texts for a repeated field.
        if all(isinstance(one, int) and 0 <= one < 256 for one in value):
            return bytes(value).decode("utf-8", "replace")
        return _message(value[-1]) if value else ""
    return ""


def parse_journal(text: str) -> tuple[list[Entry], Optional[str]]:
    """``journalctl -o json`` → entries (a message of several lines is several entries) and the last cursor."""
    entries: list[Entry] = []
    cursor = None
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        cursor = record.get("__CURSOR") or cursor
        # The manager's own lines carry INVOCATION_ID; those of the service the trusted field.
        invocation = record.get("INVOCATION_ID") or record.get("_SYSTEMD_INVOCATION_ID")
        if record.get("_PID") == "1" and not record.get("INVOCATION_ID"):
            invocation = None
        for part in _message(record.get("MESSAGE")).split("\n"):
            entries.append(Entry(invocation if isinstance(invocation, str) else None, part))
    return entries, cursor if isinstance(cursor, str) else None


# All namespaces: a service with secrets may log into one of its own, and the manager's lines about it are elsewhere.
_JOURNAL = ("journalctl", "--namespace=*", "--no-pager", "-q", "-o", "json", "--all")


def read_journal(
    run: Run, unit: str, cursor: Optional[str], lines: int = 4000
) -> tuple[list[Entry], Optional[str], str]:
    """What the unit logged after ``cursor`` (without one its last ``lines``): entries, next cursor, error text."""
    argv = [*_JOURNAL, "-u", unit]
    argv += ["--after-cursor", cursor] if cursor else ["-n", str(lines)]
    result = run(argv, 30.0)
    if result.rc != 0 and not result.stdout:
        return [], cursor, (result.stderr.strip() or f"journalctl ended with {result.rc}")[:300]
    entries, last = parse_journal(result.stdout)
    return entries, last or cursor, ""


def read_invocation(run: Run, invocation: str, lines: int = 5000) -> list[str]:
    """The last lines of one start of a unit, the manager's included."""
    result = run(
        [*_JOURNAL, "-n", str(lines), f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"], 30.0
    )
    return [entry.text for entry in parse_journal(result.stdout)[0]]


def read_first_hour(run: Run, invocation: str, began: float, now: float, wall: float) -> list[str]:
    """The lines of a start's first hour; ``began`` and ``now`` are monotonic, ``wall`` is now in epoch seconds."""
    since = int(wall - (now - began)) - 5
    result = run(
        [*_JOURNAL, "--since", f"@{since}", "--until", f"@{since + 3600}", f"_SYSTEMD_INVOCATION_ID={invocation}"], 60.0
    )
    return [entry.text for entry in parse_journal(result.stdout)[0]]


def read_log_file(path: str, offset: int, limit: int = 8 << 20) -> tuple[list[str], int, str]:
    """The whole lines that a log file got after ``offset``: lines, the next offset, and an error text.

    A file that became shorter was begun anew, and is read from its beginning.
    """
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size < offset:
                offset = 0
            if size - offset > limit:
                offset = size - limit
            handle.seek(offset)
            data = handle.read(limit)
    except OSError as error:
        return [], offset, f"{path}: {error.strerror}"
    whole = data.rfind(b"\n") + 1
    return data[:whole].decode("utf-8", "replace").splitlines(), offset + whole, ""


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """Where and how a service is asked. ``key`` stays in this process and its children."""

    host: str
    port: int
    scheme: str = "http"
    key: Optional[str] = None
    verify_ca: Optional[str] = None
    server_name: Optional[str] = None


def scheme_of(argv: Sequence[str]) -> str:
    """How a server that was started with ``argv`` is spoken to: ``https`` when it was given a certificate."""
    names = {item.partition("=")[0].replace("_", "-") for item in argv if item.startswith("--")}
    return "https" if "--ssl-certfile" in names else "http"


class Ask(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    body: Optional[dict[str, Any]] = None


def _tls(target: Target) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=target.verify_ca)
    context.check_hostname = bool(target.verify_ca and target.server_name)
    if not target.verify_ca:
        context.verify_mode = ssl.CERT_NONE
    return context


class _NamedTLS(http.client.HTTPSConnection):
    """HTTPS to one address with the certificate of another name."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._context_ = _tls(target)
        self._name = target.server_name or target.host
        super().__init__(target.host, target.port, timeout=timeout, context=self._context_)

    def connect(self) -> None:
        raw = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._context_.wrap_socket(raw, server_hostname=self._name)


def ask(target: Target, request: Ask, limit: float) -> dict[str, Any]:
    """One request: ``{status, body, seconds, error}``; ``status`` is None without an answer, ``refused`` is True when
    nobody listens. Never raises."""
    began = time.monotonic()
    headers = {"Connection": "close", "Accept": "application/json", "User-Agent": "gpufleet-sglang"}
    data = None
    if request.body is not None:
        data = json.dumps(request.body).encode()
        headers["Content-Type"] = "application/json"
    if target.key:
        headers["Authorization"] = "Bearer " + target.key
    out: dict[str, Any] = {"status": None, "body": "", "error": None}
    connection: http.client.HTTPConnection
    try:
        if target.scheme == "https":
            connection = _NamedTLS(target, limit)
        else:
            connection = http.client.HTTPConnection(target.host, target.port, timeout=limit)
        try:
            connection.request(request.method, request.path, body=data, headers=headers)
            response = connection.getresponse()
            out["status"] = response.status
            out["body"] = response.read(MAX_BODY).decode("utf-8", "replace")
        finally:
            connection.close()
    except ConnectionRefusedError:
        out.update(error="connection refused", refused=True)
    except (socket.timeout, TimeoutError):
        out["error"] = f"no answer within {limit:.0f} s"
    except (OSError, http.client.HTTPException, ValueError) as error:
        out["error"] = f"{type(error).__name__}: {error}"[:200]
    out["seconds"] = round(time.monotonic() - began, 3)
    return out


def ask_first_that_exists(target: Target, requests: Sequence[Ask], limit: float) -> dict[str, Any]:
    """Ask in order until one exists (not 404, 405, nor a 400 or 422 that another form of the request could cure)."""
    result: dict[str, Any] = {"status": None, "body": "", "error": "nothing to ask", "seconds": 0.0}
    for number, request in enumerate(requests):
        result = ask(target, request, limit)
        result["path"] = request.path
        last = number + 1 == len(requests)
        if result["status"] not in (404, 405, 501) and (last or result["status"] not in (400, 422)):
            break
    return result


def json_body(result: Mapping[str, Any]) -> Any:
    """The answer's JSON, or None."""
    try:
        return json.loads(result.get("body") or "")
    except ValueError:
        return None


def _prompt(words: int, unique: str) -> str:
    # Unique, so that no prefix cache answers for the model.
    sentence = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "writes", "a", "letter")
    return " ".join([unique, *(sentence[number % len(sentence)] for number in range(max(1, words)))])


def requests_for(kind: str, model: Optional[str], unique: str, words: int = 600) -> list[Ask]:
    """The requests that a probe may consist of, in the order in which they are tried."""
    if kind == "health":
        return [Ask("GET", "/health"), Ask("GET", "/health_generate")]
    if kind == "models":
        return [Ask("GET", "/v1/models")]
    if kind == "info":
        return [Ask("GET", "/model_info"), Ask("GET", "/get_model_info")]
    if kind == "server_info":
        return [Ask("GET", "/server_info"), Ask("GET", "/get_server_info")]
    if kind == "disaggregated":
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        fake = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
        return [
            Ask("POST", "/generate", {"input_ids": [10, 11, 12, 13], "sampling_params": sampling, **fake}),
            Ask("GET", "/health_generate"),
        ]
    text = _prompt(words, unique) if kind == "long" else f"{unique} The capital of France is"
    if kind == "embedding":
        return [
            Ask("POST", "/v1/embeddings", {"model": model or "default", "input": text}),
            Ask("POST", "/encode", {"text": text}),
        ]
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    name = model or "default"
    return [
        Ask("POST", "/generate", {"text": text, "sampling_params": sampling}),
        Ask("POST", "/v1/completions", {"model": name, "prompt": text, "max_tokens": 4, "temperature": 0}),
        Ask(
            "POST",
            "/v1/chat/completions",
            {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0},
        ),
        Ask("POST", "/generate", {"input_ids": [10, 11, 12, 13, 14], "sampling_params": sampling}),
    ]


def generated_tokens(answer: Any) -> int:
    """How many tokens an answer of /generate, /v1/completions or /v1/chat/completions brings; 0 for anything else."""
    if isinstance(answer, list):
        return sum(generated_tokens(one) for one in answer)
    if not isinstance(answer, dict) or answer.get("error") or answer.get("object") == "error":
        return 0
    for place, name in (("meta_info", "completion_tokens"), ("usage", "completion_tokens")):
        count = (answer.get(place) or {}).get(name) if isinstance(answer.get(place), dict) else None
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    ids = answer.get("output_ids")
    if isinstance(ids, list) and ids:
        return len(ids)
    if isinstance(answer.get("text"), str) and answer["text"]:
        return 1
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        text = choices[0].get("text")
        message = choices[0].get("message")
        if isinstance(message, dict):
            text = message.get("content") or message.get("reasoning_content")
        return 1 if text else 0
    return 0


def judge_answer(kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A probe's result as an observation: ``{kind, ok, status, seconds, error, path, tokens}``."""
    probe = {name: result.get(name) for name in ("status", "seconds", "error", "path", "refused")}
    probe["kind"] = kind
    probe["ok"] = result.get("status") == 200
    if not probe["ok"]:
        if result.get("status") and not probe["error"]:
            probe["error"] = f"{result.get('path')} answered {result['status']}"
        return probe
    if kind in ("short", "long"):
        probe["tokens"] = generated_tokens(json_body(result))
        if not probe["tokens"]:
            probe.update(ok=False, error=f"{result.get('path')} answered 200 without a generated token")
    elif kind == "embedding":
        answer = json_body(result)
        vector = answer.get("data") or answer.get("embedding") if isinstance(answer, dict) else answer
        if not vector:
            probe.update(ok=False, error=f"{result.get('path')} answered 200 without an embedding")
    elif kind == "disaggregated" and result.get("path") == "/generate":
        answer = json_body(result)
        if not isinstance(answer, (dict, list)) or (isinstance(answer, dict) and answer.get("error")):
            probe.update(ok=False, error="/generate answered 200 with an error")
    return probe


def parse_metrics(text: str) -> dict[str, float]:
    """The sums of what moves while a server works, out of /metrics: ``{tokens, requests}`` (absent when not told)."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"sglang[:_](\w+)(?:\{[^}]*\})?\s+([-+.\deE]+)", line)
        if not match:
            continue
        name = match.group(1)
        try:
            value = float(match.group(2))
        except ValueError:
            continue
        if name.endswith("tokens_total"):
            sums["tokens"] = sums.get("tokens", 0.0) + value
        elif name.endswith("requests_total"):
            sums["requests"] = sums.get("requests", 0.0) + value
    return sums


# ---- requests that outlive a slice -----------------------------------------------------------------------------------


def private_folder() -> str:
    """A folder for the answers, readable by this user only."""
    return tempfile.mkdtemp(prefix="gpufleet-ready-", dir="/run" if os.access("/run", os.W_OK) else None)


def begin(target: Target, kind: str, requests: Sequence[Ask], limit: float, folder: str) -> dict[str, Any]:
    """Send a probe from a detached child. Returns its handle: ``{kind, pid, start, path, began, limit}``.

    The child ends by itself after ``limit`` seconds at the latest; its answer is at ``path`` when it is done.
    """
    began = time.monotonic()
    path = os.path.join(folder, f"{kind}-{int(began * 1000)}.json")
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            os.close(reading)
            os.setsid()
            second = os.fork()
            if second:
                os.write(writing, str(second).encode())
                os._exit(0)
            os.close(writing)
            _detach()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(limit * len(requests)) + 30)
            result = ask_first_that_exists(target, requests, limit)
            with open(path + ".new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as handle:
                json.dump(result, handle)
            os.rename(path + ".new", path)
        finally:
            # Whatever happened: this copy of the caller must not run on.
            os._exit(0)
    os.close(writing)
    word = os.read(reading, 32)
    os.close(reading)
    os.waitpid(first, 0)
    pid = int(word or b"0")
    return {"kind": kind, "pid": pid, "start": start_time(pid), "path": path, "began": began, "limit": limit}


def _detach() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    top = min(os.sysconf("SC_OPEN_MAX"), 4096)
    os.closerange(3, top if top > 3 else 4096)
    os.chdir("/")


def collect(handle: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """The answer of a probe that was begun (by this or an earlier slice); None while it is still waiting."""
    raw = _read(str(handle["path"]), 4 * MAX_BODY)
    if raw is None:
        same = start_time(int(handle["pid"])) == handle.get("start") and is_alive(int(handle["pid"]))
        if same:
            return None
        raw = _read(str(handle["path"]), 4 * MAX_BODY)
        if raw is None:
            return {"status": None, "body": "", "error": "the probe was ended from outside", "seconds": None}
    try:
        os.unlink(str(handle["path"]))
    except OSError:
        pass
    return json.loads(raw.decode("utf-8"))


def remove_folder(folder: Optional[str]) -> None:
    """Remove the folder of the answers; a child that is still waiting then ends without leaving anything."""
    if folder and os.path.basename(folder).startswith("gpufleet-ready-"):
        shutil.rmtree(folder, ignore_errors=True)


def own_folder(folder: Optional[str]) -> bool:
    """Is this a folder that an earlier slice made: ours, private, no link?"""
    if not folder or not os.path.basename(folder).startswith("gpufleet-ready-"):
        return False
    try:
        info = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


# ---- files -----------------------------------------------------------------------------------------------------------


def read_key(path: str) -> str:
    """The API key out of a file: the bare key, or the ``api-key`` of a --config YAML; ValueError in plain words."""
    raw = _read(path, 64 * 1024)
    if raw is None:
        raise ValueError(f"api_key_file: {path} cannot be read on the host")
    text = raw.decode("utf-8", "replace")
    match = re.search(r"^\s*['\"]?api[-_]key['\"]?\s*:\s*(?P<value>\S.*?)\s*$", text, re.M)
    if match:
        value = match.group("value")
        if value[:1] == '"':
            try:
                return str(json.loads(value))
            except ValueError:
                return value.strip('"')
        if value[:1] == "'":
            return value[1:-1].replace("''", "'")
        return value
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        raise ValueError(f"api_key_file: {path} holds neither one line with the key nor a YAML key api-key")
    return lines[0]


def encode_secret_forms(key: Optional[str]) -> tuple[str, ...]:
    """The forms in which a key could appear in a log."""
    if not key:
        return ()
    return (key, base64.b64encode(key.encode()).decode())


def gpu_memory(run: Run) -> Optional[int]:
    """The used memory of all GPUs in MiB; None without nvidia-smi."""
    result = run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], 10.0)
    if result.rc != 0:
        return None
    values = [line.strip() for line in result.stdout.splitlines()]
    return sum(int(value) for value in values if value.isdigit())
