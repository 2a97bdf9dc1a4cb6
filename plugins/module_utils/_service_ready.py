# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: one slice of waiting for an SGLang service. Wires ``_observe`` to ``_readiness``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Protocol

from ansible_collections.gpufleet.sglang.plugins.module_utils import _observe as observe
from ansible_collections.gpufleet.sglang.plugins.module_utils._causes import find_cause
from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import (
    HIDDEN,
    is_secret_name,
    parse_line,
    redact,
    redact_argv,
    shown,
    template,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._readiness import (
    GENERATIONS,
    Settings,
    Verdict,
    deadline,
    judge,
    new_memory,
    next_probe,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run

INTERVAL = 1.0
LIBRARIES = (
    r"/(?:deep_ep|deep_ep_cpp|hybrid_ep_cpp|mooncake|nixl\w*|mori|pplx\w*)(?:[./_-]|$)|libnvshmem|libnixl|libnccl"
)

Carry = dict[str, Any]


class Options(NamedTuple):
    """What is waited for. ``unit`` or ``foreground_pid``; ``log_file`` instead of the journal."""

    unit: Optional[str]
    foreground_pid: Optional[int]
    log_file: Optional[str]
    host: str
    port: int
    health_timeout: float = 30.0
    generation_timeout: float = 600.0
    long_prompt_words: int = 600


class Eyes(Protocol):
    """What a slice sees, and its clock: the real host, or a script in a test."""

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def unit(self) -> Optional[dict[str, Any]]:
        """systemd's word; None for a process that is no unit."""

    def pids(self, unit: Optional[Mapping[str, Any]]) -> list[int]:
        """The processes of the service."""

    def process(self, pids: Sequence[int], unit: Optional[Mapping[str, Any]]) -> dict[str, Any]:
        """See ``_observe.read_process``."""

    def listener(self, pids: Sequence[int]) -> Optional[dict[str, Any]]:
        """See ``_observe.find_listener``."""

    def log(self, mark: Any) -> tuple[list[observe.Entry], Any, str]:
        """New log lines after ``mark``, the next mark, an error text."""

    def lines_of(self, invocation: Optional[str]) -> list[str]:
        """The log of one start."""

    def begin(self, kind: str, facts: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Send a probe; returns its handle."""

    def collect(self, handle: Mapping[str, Any]) -> Optional[dict[str, Any]]:
        """Its answer, or None."""

    def folder(self) -> str:
        """A private folder for answers."""

    def remove(self, folder: Optional[str]) -> None:
        """Remove it."""

    def counters(self) -> Optional[dict[str, float]]:
        """What /metrics counts; None when there is no such page."""

    def gpu_memory(self) -> Optional[int]:
        """Used GPU memory in MiB."""

    def server_info(self) -> Optional[dict[str, Any]]:
        """/server_info."""

    def libraries(self, pids: Sequence[int]) -> tuple[list[str], bool]:
        """Loaded libraries of the backends."""

    def startup_lines(self, unit: Optional[Mapping[str, Any]]) -> list[str]:
        """The log of the running start's first hour."""


class HostEyes:
    """The real host."""

    def __init__(self, options: Options, target: observe.Target, run: Run, model: Optional[str]) -> None:
        self.options, self.target, self.run, self.model = options, target, run, model
        self.blind_gpu = False

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def unit(self) -> Optional[dict[str, Any]]:
        if self.options.foreground_pid is not None or not self.options.unit:
            return None
        shown_unit = observe.show_unit(self.run, self.options.unit)
        if shown_unit is None:
            return {}
        entered = shown_unit.get("active_enter")
        shown_unit["uptime"] = round(self.now() - entered, 1) if entered else None
        return shown_unit

    def pids(self, unit: Optional[Mapping[str, Any]]) -> list[int]:
        if unit is None:
            pid = self.options.foreground_pid or 0
            return observe.descendants(pid) if pid and observe.is_alive(pid) else []
        found = observe.cgroup_pids(str(unit.get("control_group") or ""))
        main = int(unit.get("main_pid") or 0)
        return found or (observe.descendants(main) if main else [])

    def process(self, pids: Sequence[int], unit: Optional[Mapping[str, Any]]) -> dict[str, Any]:
        main = int((unit or {}).get("main_pid") or 0) if unit is not None else int(self.options.foreground_pid or 0)
        return observe.read_process(pids, main)

    def listener(self, pids: Sequence[int]) -> Optional[dict[str, Any]]:
        return observe.find_listener(self.options.host, self.options.port, pids)

    def log(self, mark: Any) -> tuple[list[observe.Entry], Any, str]:
        if self.options.log_file:
            lines, offset, error = observe.read_log_file(self.options.log_file, int(mark or 0))
            return [observe.Entry(None, line) for line in lines], offset, error
        if not self.options.unit:
            return [], mark, "no log: neither a unit nor log_file was given"
        return observe.read_journal(self.run, self.options.unit, mark)

    def lines_of(self, invocation: Optional[str]) -> list[str]:
        if self.options.log_file:
            return observe.read_log_file(self.options.log_file, 0)[0]
        return observe.read_invocation(self.run, invocation) if invocation else []

    def begin(self, kind: str, facts: Mapping[str, Any], folder: str) -> dict[str, Any]:
        longest = facts.get("max_model_len")
        words = self.options.long_prompt_words
        if isinstance(longest, int) and longest > 0:
            words = max(1, min(words, longest // 8))
        requests = observe.requests_for(kind, self.model or facts.get("name"), f"{os.urandom(4).hex()}:", words)
        limit = self.options.generation_timeout if kind in GENERATIONS else self.options.health_timeout
        return observe.begin(self.target, kind, requests, limit, folder)

    def collect(self, handle: Mapping[str, Any]) -> Optional[dict[str, Any]]:
        return observe.collect(handle)

    def folder(self) -> str:
        return observe.private_folder()

    def remove(self, folder: Optional[str]) -> None:
        observe.remove_folder(folder)

    def counters(self) -> Optional[dict[str, float]]:
        answer = observe.ask(self.target, observe.Ask("GET", "/metrics"), 5.0)
        if answer["status"] == 200:
            return observe.parse_metrics(answer["body"])
        return None if answer["status"] in (401, 403, 404) else {}

    def gpu_memory(self) -> Optional[int]:
        if self.blind_gpu:
            return None
        used = observe.gpu_memory(self.run)
        self.blind_gpu = used is None
        return used

    def server_info(self) -> Optional[dict[str, Any]]:
        answer = observe.ask_first_that_exists(self.target, observe.requests_for("server_info", None, ""), 25.0)
        body = observe.json_body(answer) if answer["status"] == 200 else None
        return body if isinstance(body, dict) else None

    def libraries(self, pids: Sequence[int]) -> tuple[list[str], bool]:
        return observe.loaded_libraries(pids, LIBRARIES)

    def startup_lines(self, unit: Optional[Mapping[str, Any]]) -> list[str]:
        if self.options.log_file:
            return observe.read_log_file(self.options.log_file, 0)[0]
        if unit and unit.get("invocation") and unit.get("active_enter"):
            return observe.read_first_hour(
                self.run, str(unit["invocation"]), float(unit["active_enter"]), self.now(), time.time()
            )
        return []


def usable(params: Mapping[str, Any]) -> Optional[str]:
    """What is wrong with the module's parameters, as one message; None when nothing is."""
    if not 0 < int(params["port"]) < 65536:
        return f"port: {params['port']} is no port; use 1 to 65535 (sglang_port)"
    if params["successes"] < 1:
        return f"successes: {params['successes']} proves nothing; use at least 1 (sglang_ready_successes)"
    for name in ("timeout", "stall_timeout", "hard_timeout"):
        if not params[name] > 0:
            return f"{name}: {params[name]} must be more than 0 seconds (sglang_ready_{name})"
    if params["hard_timeout"] < params["timeout"]:
        return (
            f"hard_timeout: {params['hard_timeout']:.0f} is less than timeout {params['timeout']:.0f}; "
            "raise sglang_ready_hard_timeout or lower sglang_ready_timeout"
        )
    return None


def redact_server_info(info: dict[str, Any]) -> dict[str, Any]:
    """/server_info without secrets: any value under a secret's name, and secrets inside of texts and argvs."""

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(name): HIDDEN if inner not in (None, "", False) and is_secret_name(str(name)) else visit(inner)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            if all(isinstance(one, str) for one in value):
                return redact_argv(value)
            return [visit(one) for one in value]
        return redact(value) if isinstance(value, str) else value

    out: dict[str, Any] = visit(info)
    return out


def failure_text(instance: str, result: Mapping[str, Any]) -> str:
    """One message for a wait that ended badly."""
    cause = result.get("cause") or {}
    text = f"{instance} is {result['state']} after {result['elapsed']:.0f} s: "
    text += f"{cause.get('message') or result.get('progress') or 'no cause is known'} [{cause.get('code', 'unknown')}]"
    return text + (f"; mend: {cause['mend']}" if cause.get("mend") else "")


def new_carry(now: float) -> Carry:
    """The state between slices, at the beginning of a wait."""
    return {
        "began": now,
        "memory": new_memory(),
        "mark": None,
        "flight": None,
        "folder": None,
        "probe_after": 0.0,
        "ids": [],
        "facts": {},
        "counts": {"other": 0, "generations": 0},
        "log_error": "",
        "gpu_at": None,
        "counters_at": None,
        "no_metrics": False,
        "tail": [],
    }


class Watch:
    """One slice: looks again and again, and keeps what it learns in ``carry``."""

    def __init__(
        self, eyes: Eyes, options: Options, settings: Settings, carry: Optional[Carry], secrets: Sequence[str]
    ):
        self.eyes, self.options, self.settings, self.secrets = eyes, options, settings, tuple(secrets)
        self.carry: Carry = dict(carry) if carry else new_carry(eyes.now())
        if self.carry["folder"] and not isinstance(self.carry["folder"], str):
            raise ValueError("carry: not what an earlier slice returned")
        self.seen: dict[str, Any] = {}

    # -- looking

    def _read_log(self, unit: Optional[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        entries, mark, error = self.eyes.log(self.carry["mark"])
        self.carry["mark"], self.carry["log_error"] = mark, error
        current = (unit or {}).get("invocation")
        events: list[dict[str, Any]] = []
        fresh: list[str] = []
        for entry in entries:
            if entry.invocation and entry.invocation not in self.carry["ids"]:
                self.carry["ids"] = [*self.carry["ids"], entry.invocation][-200:]
            if entry.invocation and current and entry.invocation != current:
                continue
            event = parse_line(entry.text)
            if event:
                events.append(event)
            elif entry.text.strip():
                fresh.append(template(entry.text))
            if entry.text.strip() and (event or {}).get("kind") not in ("noise", "access"):
                self.carry["tail"] = [*self.carry["tail"], shown(entry.text, self.secrets)][-12:]
        if current and current not in self.carry["ids"]:
            self.carry["ids"] = [*self.carry["ids"], current][-200:]
        return events, fresh[-200:]

    def _first_start(self, unit: Optional[Mapping[str, Any]]) -> Optional[str]:
        """The first of the starts that systemd made by itself, as far as the journal still has it."""
        if not unit:
            return None
        ids = self.carry["ids"]
        current = unit.get("invocation")
        if current in ids:
            ids = ids[: ids.index(current) + 1]
        chain = ids[-(int(unit.get("n_restarts") or 0) + 1) :]
        return chain[0] if chain else current

    def _asked_to_end(self, unit: Mapping[str, Any]) -> bool:
        lines = self.eyes.lines_of(unit.get("invocation"))
        return any(line.startswith("Stopping ") or (parse_line(line) or {}).get("kind") == "shutdown" for line in lines)

    def _log_cause(self, unit: Optional[Mapping[str, Any]], patient: bool) -> dict[str, Any]:
        first = self._first_start(unit)
        alone = unit is None or first == (unit or {}).get("invocation")
        found: dict[str, Any] = {}
        for attempt in range(3):
            if attempt:
                # The journal is a moment behind systemd.
                self.eyes.sleep(0.7)
            found = find_cause(
                self.eyes.lines_of(first),
                result=(unit or {}).get("result") if alone else None,
                exit_status=(unit or {}).get("exec_status") if alone else None,
                secrets=self.secrets,
            )
            if found["code"] != "unknown" or not patient:
                break
        if first:
            found["invocation"] = first
        return found

    def look(self) -> dict[str, Any]:
        """One observation (see ``_readiness``)."""
        eyes, carry = self.eyes, self.carry
        now = eyes.now() - carry["began"]
        unit = eyes.unit()
        pids = eyes.pids(unit)
        process = eyes.process(pids, unit)
        seen: dict[str, Any] = {"at": round(now, 3), "unit": unit, "process": process, "listener": eyes.listener(pids)}
        seen["events"], seen["templates"] = self._read_log(unit)
        self._probe(seen, now)
        flight = carry["flight"]
        if flight:
            seen["in_flight"] = {"kind": flight["kind"], "seconds": round(eyes.now() - flight["began"], 1)}
        self._count(seen, now)
        memory = carry["memory"]
        fatal = memory.get("fatal") or any(event["kind"] == "fatal" for event in seen["events"])
        gone = (unit is None and not process["alive"]) or bool(
            unit
            and (
                unit.get("active_state") in ("failed", "inactive", "deactivating")
                or unit.get("sub_state") in ("auto-restart", "auto-restart-queued")
                or (memory["restarts"] is not None and (unit.get("n_restarts") or 0) > memory["restarts"])
            )
        )
        if fatal or gone:
            seen["log_cause"] = self._log_cause(unit, patient=bool(gone) and not self.settings.verify)
            if unit and unit.get("active_state") == "inactive":
                seen["asked_to_end"] = self._asked_to_end(unit)
        elif memory["restarts"] is None and unit and (unit.get("n_restarts") or 0) > 0:
            uptime = unit.get("uptime")
            if uptime is not None and uptime < 600:
                seen["earlier_cause"] = self._log_cause(unit, patient=False)
        seen["tail"] = carry["tail"]
        self.seen = seen
        return seen

    def _count(self, seen: dict[str, Any], now: float) -> None:
        carry = self.carry
        flight = seen.get("in_flight") or {}
        listening = (seen["listener"] or {}).get("owned") is not False and seen["listener"] is not None
        slow = float(flight.get("seconds") or 0.0) > 3.0 or bool(carry["memory"]["misses"])
        due = carry["counters_at"] is None or now - carry["counters_at"] >= 5.0
        if listening and slow and due and not carry["no_metrics"]:
            carry["counters_at"] = now
            counters = self.eyes.counters()
            carry["no_metrics"] = counters is None
            if counters:
                seen["counters"] = counters
        due = carry["gpu_at"] is None or now - carry["gpu_at"] >= 15.0
        if not listening and due:
            carry["gpu_at"] = now
            used = self.eyes.gpu_memory()
            if used is not None:
                seen["process"]["gpu_memory_mib"] = used

    # -- asking

    def _probe(self, seen: dict[str, Any], now: float) -> None:
        carry, eyes = self.carry, self.eyes
        listener = seen["listener"]
        if carry.get("held"):
            return
        if carry["flight"]:
            answer = eyes.collect(carry["flight"])
            if answer is None:
                return
            kind = carry["flight"]["kind"]
            carry["flight"] = None
            self._take(kind, answer, seen)
            probe = seen.get("probe")
            carry["probe_after"] = now + (2.0 if probe and not probe["ok"] else 0.5)
            if probe and probe["ok"] and self._enough_after(probe["kind"]):
                return
        if now < carry["probe_after"] or (listener and listener.get("owned") is False):
            return
        if (seen["unit"] or {}).get("active_state") in ("failed", "inactive"):
            return
        if listener is None:
            # Nobody is seen: an occasional look, in case that /proc does not show it.
            carry["probe_after"] = now + 5.0
        if seen.get("probe"):
            # Judge this one first.
            return
        kind = self._next_kind()
        carry["folder"] = carry["folder"] or eyes.folder()
        carry["flight"] = eyes.begin(kind, carry["facts"], carry["folder"])
        if kind in GENERATIONS:
            carry["counts"]["generations"] += 1
        else:
            carry["counts"]["other"] += 1

    def _enough_after(self, kind: str) -> bool:
        memory = self.carry["memory"]
        return memory["streak"] + 1 >= self.settings.needed

    def _next_kind(self) -> str:
        facts, memory = self.carry["facts"], self.carry["memory"]
        kind = next_probe(memory, self.settings)
        if kind in GENERATIONS and self.settings.node_rank == 0:
            for name in ("models", "info"):
                if name not in facts:
                    return name
            if kind in ("short", "long") and facts.get("is_generation") is False:
                return "embedding"
        return kind

    def _take(self, kind: str, answer: Mapping[str, Any], seen: dict[str, Any]) -> None:
        facts = self.carry["facts"]
        if kind == "models":
            body = observe.json_body(answer) if answer.get("status") == 200 else None
            cards = body.get("data") if isinstance(body, dict) else None
            cards = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
            facts["models"] = [card["id"] for card in cards]
            if cards:
                facts["name"] = cards[0]["id"]
                facts["max_model_len"] = cards[0].get("max_model_len")
            if answer.get("status") in (401, 403):
                seen["probe"] = observe.judge_answer(kind, answer)
        elif kind == "info":
            body = observe.json_body(answer) if answer.get("status") == 200 else None
            facts["info"] = True
            if isinstance(body, dict):
                facts["is_generation"] = body.get("is_generation")
                facts["model_path"] = body.get("model_path")
                names = [body.get("served_model_name"), body.get("model_path")]
                facts["models"] = [*facts.get("models", []), *(n for n in names if isinstance(n, str) and n)]
        else:
            seen["probe"] = observe.judge_answer(kind, answer)
            facts.setdefault("paths", {})[kind] = seen["probe"].get("path")
        if facts.get("models"):
            seen["models"] = facts["models"]

    # -- the slice

    def run(self, slice_seconds: float, once: bool) -> tuple[Verdict, bool]:
        """Look until the verdict is done or the slice is over: ``(verdict, done)``. ``once`` waits for the verdict."""
        began = self.eyes.now()
        while True:
            verdict = judge(self.carry["memory"], self.look(), self.settings)
            if verdict.done:
                return verdict, True
            if not once and (verdict.ready or self.eyes.now() - began >= slice_seconds):
                return verdict, False
            self.eyes.sleep(INTERVAL)


def _public(seen: Mapping[str, Any], secrets: Sequence[str]) -> dict[str, Any]:
    """The last observation without what is bulky or secret."""
    out = {
        name: seen.get(name) for name in ("at", "unit", "listener", "probe", "in_flight", "counters") if name in seen
    }
    process = dict(seen.get("process") or {})
    if process.get("argv"):
        process["argv"] = redact_argv(process["argv"], secrets)
    out["process"] = process
    out["events"] = list(seen.get("events") or ())[-10:]
    out["tail"] = list(seen.get("tail") or ())
    return out


def run_slice(
    eyes: Eyes,
    options: Options,
    settings: Settings,
    carry: Optional[Carry],
    slice_seconds: float,
    once: bool = False,
    secrets: Sequence[str] = (),
    redact_info: Callable[[dict[str, Any]], dict[str, Any]] = lambda info: info,
) -> dict[str, Any]:
    """One slice of the wait, as the module's result (without ``changed`` and ``failed``).

    ``{ready, state, cause, observation, history, server, evidence, elapsed, deadline, slice}``; in verify mode also
    ``server_info`` (redacted), ``maps`` and ``maps_complete`` for ``_verify.verdict``.
    """
    watch = Watch(eyes, options, settings, carry, secrets)
    verdict, done = watch.run(slice_seconds, once)
    kept = watch.carry
    memory = kept["memory"]
    result: dict[str, Any] = {
        "ready": verdict.ready,
        "state": verdict.state,
        "progress": verdict.progress,
        "cause": verdict.cause,
        "observation": _public(watch.seen, secrets),
        "history": memory["history"],
        "elapsed": round(eyes.now() - kept["began"], 1),
        "deadline": round(deadline(memory, settings), 1),
        "server": {},
        "evidence": {
            "successes": memory["streak"],
            "generations": memory["generations"],
            "requests": dict(kept["counts"]),
            "paths": dict(kept["facts"].get("paths") or {}),
            "models": kept["facts"].get("models") or [],
            "listener": watch.seen.get("listener"),
            "argv_checked": settings.expected_argv is not None,
        },
        "unseen": [kept["log_error"]] if kept["log_error"] else [],
    }
    answers = verdict.ready or (settings.verify and memory["streak"] > 0)
    if done and answers and settings.node_rank == 0:
        info = eyes.server_info()
        if info is not None:
            result["server"] = {
                name: info.get(name)
                for name in (
                    "version",
                    "model_path",
                    "served_model_name",
                    "tp_size",
                    "ep_size",
                    "dp_size",
                    "pp_size",
                    "moe_a2a_backend",
                    "disaggregation_mode",
                )
                if name in info
            }
            if settings.verify:
                result["server_info"] = redact_info(info)
    if done and settings.verify:
        pids = (watch.seen.get("process") or {}).get("pids") or []
        result["maps"], result["maps_complete"] = eyes.libraries(pids)
        names = [
            event["name"]
            for event in map(parse_line, eyes.startup_lines(watch.seen.get("unit")))
            if event and event["kind"] == "backend"
        ]
        result["log_backends"] = sorted(set(names))
    if done or verdict.ready:
        # A rank that is held has answered enough: from now on only its process is watched.
        eyes.remove(kept["folder"])
        kept.update(held=verdict.ready, flight=None, folder=None)
    result["slice"] = {
        "done": done,
        "state": verdict.state,
        "progress": verdict.progress or "",
        "carry": {} if done else kept,
    }
    return result
