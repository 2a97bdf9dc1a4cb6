# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: is an SGLang service ready, dead, or still on its way? Pure functions over observations.

An *observation* is what was seen at one moment (all keys optional; absent means "not looked at", never "no")::

    at: 12.5                    # seconds since the wait began
    unit: {load_state, active_state, sub_state, result, exec_status, main_pid, n_restarts, invocation, uptime}
                                # null: a process that is no systemd unit
    process: {alive: bool, pids: [..], argv: [..], compilers: [..], read_bytes: n, gpu_memory_mib: n}
    listener: {pids: [..], owned: true|false|null, name: "python"}     # null: nobody listens
    probe: {kind, ok, status, seconds, error, model, tokens}           # the probe that ended since the last observation
    in_flight: {kind, seconds}  # the probe that is still waiting for its answer
    events: [..]                # new events of the log (see _log_events), of the running invocation
    log_cause: {..}             # the cause out of the log, once a fatal event was seen or the process is gone
    asked_to_end: bool          # the log of the ended start shows that somebody asked for its end
    counters: {tokens: n, requests: n}                                  # out of /metrics

``memory`` is what the judge knows from before: plain JSON, so that it travels between the slices of a wait.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import (
    LOADING,
    WARMING,
    describe,
    redact_argv,
)

STATES = ("starting", "loading", "warming", "ready", "busy", "degraded", "stuck", "crash_loop", "failed", "stopped")
FINAL = frozenset(("ready", "stuck", "crash_loop", "failed", "stopped"))
GENERATIONS = frozenset(("short", "long", "embedding", "disaggregated"))

Memory = dict[str, Any]
Observation = Mapping[str, Any]

# The signs that move the deadline; everything else that is new only holds off "stuck".
MEASURED = frozenset(
    (
        "download",
        "weights",
        "weights_end",
        "jit",
        "graph_capture",
        "graph_capture_end",
        "memory_pool",
        "dist_init_end",
        "engine_ready",
        "http_up",
        "served",
        "batch",
    )
)
_READ_STEP = 64 * 1024 * 1024
_GPU_STEP_MIB = 64
_MAX_TEMPLATES = 400
_MAX_HISTORY = 100


class Settings(NamedTuple):
    """How a service is judged; all times in seconds."""

    successes: int = 3
    timeout: float = 1800.0
    stall_timeout: float = 600.0
    hard_timeout: float = 7200.0
    was_ready_before: bool = False
    tolerated_restarts: int = 0
    node_rank: int = 0
    role: Optional[str] = None
    model: Optional[str] = None
    expected_argv: Optional[Sequence[str]] = None
    verify: bool = False
    patience: float = 60.0
    hold: bool = False

    @property
    def generations(self) -> int:
        """How many real generations belong to the proof."""
        if self.verify or self.was_ready_before:
            return 1
        return 2

    @property
    def needed(self) -> int:
        """How many successes in a row make ready."""
        if self.verify:
            return 2
        return max(self.successes, self.generations + 1)


class Verdict(NamedTuple):
    """``done`` ends the wait. ``cause`` is ``{code, message, mend, lines}`` when the state is not good."""

    state: str
    ready: bool
    done: bool
    progress: str
    cause: Optional[dict[str, Any]]


def new_memory() -> Memory:
    """What the judge knows before the first observation."""
    return {
        "streak": 0,
        "generations": [],
        "phase": None,
        "progress": None,
        "progress_at": 0.0,
        "life_at": 0.0,
        "restarts": None,
        "stranger": 0,
        "wrong_argv": 0,
        "unauthorized": 0,
        "ever_served": False,
        "last": {},
        "templates": [],
        "compilers": [],
        "history": [],
        "state": None,
        "misses": {},
    }


# ---- predicates over one observation ---------------------------------------------------------------------------------


def unit_missing(seen: Observation) -> bool:
    """systemd does not know the unit."""
    return (seen.get("unit") or {}).get("load_state") in ("not-found", "masked", "bad-setting", "error")


def unit_failed(seen: Observation) -> bool:
    """systemd has given the unit up."""
    return (seen.get("unit") or {}).get("active_state") == "failed"


def unit_stopped(seen: Observation) -> bool:
    """The unit is inactive, or on its way there, without systemd calling it failed."""
    unit = seen.get("unit")
    if unit is not None:
        return unit.get("active_state") in ("inactive", "deactivating")
    return False


def restart_pending(seen: Observation) -> bool:
    """The process has died and systemd waits to start it again."""
    return (seen.get("unit") or {}).get("sub_state") in ("auto-restart", "auto-restart-queued")


def process_gone(seen: Observation) -> bool:
    """A process that is no unit has ended."""
    process = seen.get("process")
    return seen.get("unit") is None and process is not None and process.get("alive") is False


def has_fatal_event(seen: Observation) -> bool:
    """The log says that the server is lost, whatever its process still does (core dumps take a minute)."""
    return any(event.get("kind") == "fatal" for event in seen.get("events") or ())


def shutting_down(seen: Observation) -> bool:
    """The log says that somebody asked the server to end."""
    return any(event.get("kind") == "shutdown" for event in seen.get("events") or ())


def held_by_other(seen: Observation) -> bool:
    """Somebody listens on the port, and it is no process of this service."""
    return (seen.get("listener") or {}).get("owned") is False


def argv_difference(argv: Optional[Sequence[str]], expected: Optional[Sequence[str]]) -> Optional[str]:
    """Where a process's argv leaves the expected one, in words without secrets; None when equal or not comparable."""
    if expected is None or not argv:
        return None
    have, want = list(argv), list(expected)
    if have == want:
        return None
    shown_have, shown_want = redact_argv(have), redact_argv(want)
    for index in range(max(len(have), len(want))):
        one = have[index] if index < len(have) else None
        two = want[index] if index < len(want) else None
        if one != two:
            return "argument {} is {}, expected {}".format(
                index,
                "missing" if one is None else repr(shown_have[index]),
                "none" if two is None else repr(shown_want[index]),
            )
    return None


def model_matches(served: Optional[Sequence[str]], expected: Optional[str]) -> Optional[bool]:
    """Is the expected name served? A path matches with or without its trailing slash. None: not known."""
    if not expected or not served:
        return None
    want = expected.rstrip("/") or expected
    return any((name.rstrip("/") or name) == want for name in served)


# ---- progress --------------------------------------------------------------------------------------------------------


def _note_progress(memory: Memory, seen: Observation, now: float) -> None:
    """Take over what moved since the last observation."""
    last = memory["last"]
    measured = False
    life = False
    for event in seen.get("events") or ():
        kind = event.get("kind")
        if kind in LOADING or kind in WARMING or kind in ("start", "served"):
            if kind in LOADING:
                memory["phase"] = "loading"
            elif kind in WARMING or kind == "served":
                memory["phase"] = "warming"
            memory["progress"] = describe(event)
        if kind in MEASURED:
            key = f"{kind}:{event.get('rank', '')}:{event.get('label', '')}"
            value = event.get("done")
            if kind == "batch":
                memory["counted_at"] = now
            if value is None:
                # A begin or an end counts once for a rank, batches each time.
                if kind == "batch" or last.get(key) is None:
                    measured = True
                    last[key] = True
            elif last.get(key) != value:
                measured = True
                last[key] = value
        elif kind not in ("noise", "access", "fatal", "shutdown"):
            life = True
    for text in seen.get("templates") or ():
        code = zlib.crc32(str(text).encode("utf-8", "replace"))
        if code not in memory["templates"]:
            life = True
            memory["templates"] = [*memory["templates"], code][-_MAX_TEMPLATES:]
    counters = seen.get("counters") or {}
    for name, value in counters.items():
        if isinstance(value, (int, float)):
            before = last.get("counter:" + name)
            if before is not None and value != before:
                measured = True
                memory["counted_at"] = now
            last["counter:" + name] = value
    process = seen.get("process") or {}
    for name, step in (("read_bytes", _READ_STEP), ("gpu_memory_mib", _GPU_STEP_MIB)):
        value = process.get(name)
        if isinstance(value, (int, float)):
            before = last.get(name)
            if before is None or abs(value - before) >= step:
                life = life or before is not None
                last[name] = value
    compilers = process.get("compilers")
    if compilers is not None:
        fresh = [pid for pid in compilers if pid not in memory["compilers"]]
        if fresh:
            measured = True
            memory["phase"] = "warming"
            memory["progress"] = "compiling kernels (jit_precompile)"
        memory["compilers"] = list(compilers)[-64:]
    if measured:
        memory["progress_at"] = now
    if measured or life:
        memory["life_at"] = now


def deadline(memory: Mapping[str, Any], settings: Settings) -> float:
    """When the wait ends, as far as is known now: it moves with measured progress, up to the hard limit."""
    moved = float(memory["progress_at"]) + settings.stall_timeout if memory["progress_at"] > 0 else 0.0
    return min(settings.hard_timeout, max(settings.timeout, moved))


# ---- probes ----------------------------------------------------------------------------------------------------------


def next_probe(memory: Mapping[str, Any], settings: Settings) -> str:
    """Which probe comes next: ``health`` opens, then the generations, then health again until there are enough."""
    if settings.node_rank > 0:
        return "health"
    if memory["streak"] == 0:
        return "health"
    done = memory["generations"]
    if settings.role in ("prefill", "decode"):
        return "disaggregated" if len(done) < settings.generations else "health"
    if len(done) == 0:
        return "short"
    if len(done) < settings.generations:
        return "long"
    return "health"


def _take_probe(memory: Memory, probe: Mapping[str, Any], settings: Settings) -> None:
    kind = str(probe.get("kind"))
    if probe.get("ok"):
        memory["streak"] += 1
        memory["misses"] = {}
        memory["ever_ok"] = True
        if kind in GENERATIONS:
            memory["generations"] = [*memory["generations"], kind]
            memory["ever_served"] = True
        return
    memory["streak"] = 0
    memory["generations"] = []
    if probe.get("status") in (401, 403):
        memory["unauthorized"] += 1
    misses = dict(memory["misses"])
    misses[kind] = misses.get(kind, 0) + 1
    memory["misses"] = misses
    memory["last_miss"] = {name: probe.get(name) for name in ("kind", "status", "error", "seconds")}


# ---- the judge -------------------------------------------------------------------------------------------------------


def _cause(code: str, message: str, mend: str, lines: Sequence[str] = ()) -> dict[str, Any]:
    return {"code": code, "message": message, "mend": mend, "lines": list(lines)}


def _log_cause(seen: Observation, message: str) -> dict[str, Any]:
    found = seen.get("log_cause")
    if found:
        return dict(found)
    return _cause("unknown", message, "read the unit's journal")


def judge(memory: Memory, seen: Observation, settings: Settings) -> Verdict:
    """Take one observation into ``memory`` (changed in place) and say what the service is."""
    now = float(seen.get("at") or 0.0)
    if seen.get("probe"):
        _take_probe(memory, seen["probe"], settings)
    _note_progress(memory, seen, now)
    verdict = _decide(memory, seen, settings, now)
    # Numbers move all the time; another state, or another kind of work, is news.
    kind = verdict.state + ":" + re.sub(r"[\d.]+", "#", str(memory["progress"] or ""))[:80]
    if kind != memory["state"]:
        memory["state"] = kind
        entry = {"at": round(now, 1), "state": verdict.state}
        if verdict.progress:
            entry["progress"] = verdict.progress
        memory["history"] = [*memory["history"], entry][-_MAX_HISTORY:]
    return verdict


def _dead(memory: Memory, seen: Observation, settings: Settings) -> Optional[Verdict]:
    """The verdict when there is nothing left to wait for."""
    unit = seen.get("unit")
    if unit_missing(seen):
        return Verdict(
            "failed",
            False,
            True,
            "",
            _cause(
                "unit_missing",
                f"systemd does not know the unit ({unit.get('load_state')})" if unit else "",
                "deploy the service first (site.yml), or name the right unit",
            ),
        )
    if unit is not None:
        restarts = int(unit.get("n_restarts") or 0)
        if memory["restarts"] is None:
            memory["restarts"] = restarts
        risen = restarts - memory["restarts"]
        if restart_pending(seen) or risen > 0:
            count = max(risen, restarts, 1)
            if max(risen, 1 if restart_pending(seen) else 0) > settings.tolerated_restarts:
                found = _log_cause(seen, f"the process ended and systemd starts it again (restart {count})")
                return Verdict("crash_loop", False, True, f"crashed, restart {count}", found)
        earlier = seen.get("earlier_cause")
        if (
            earlier
            and earlier.get("permanent")
            and restarts > settings.tolerated_restarts
            and not memory["ever_served"]
            # A start that listens has come further than the one that failed.
            and (seen.get("listener") or {}).get("owned") is not True
        ):
            return Verdict("crash_loop", False, True, f"crashed before, restart {restarts}", dict(earlier))
        if unit_failed(seen):
            return Verdict(
                "failed",
                False,
                True,
                f"systemd: failed ({unit.get('result')})",
                _log_cause(seen, f"systemd: {unit.get('result')}, status {unit.get('exec_status')}"),
            )
        if unit_stopped(seen):
            return _ended(seen, unit, settings)
    if has_fatal_event(seen) or memory.get("fatal"):
        memory["fatal"] = True
        # The first line of a traceback is not its last: wait a moment for the words, but not for the process.
        found = seen.get("log_cause") or {}
        noticed = memory.setdefault("fatal_at", float(seen.get("at") or 0.0))
        told = found.get("code") not in (None, "unknown", "scheduler_died", "peer_died", "warmup_failed")
        if told or settings.verify or float(seen.get("at") or 0.0) - noticed >= 2.0:
            return Verdict(
                "failed", False, True, "the log says that it crashed", _log_cause(seen, "the log says that it crashed")
            )
    if process_gone(seen):
        if memory.get("shutting_down") or shutting_down(seen):
            return Verdict(
                "stopped",
                False,
                True,
                "it was asked to end, and did",
                _cause("stopped", "the process ended on request", "start it"),
            )
        return Verdict("failed", False, True, "the process is gone", _log_cause(seen, "the process is gone"))
    if shutting_down(seen):
        memory["shutting_down"] = True
    return None


def _ended(seen: Observation, unit: Mapping[str, Any], settings: Settings) -> Verdict:
    """A unit that is not running, without being failed: stopped on request, or dead in a way that systemd was told to
    call success (SIGKILL of SGLang by itself, where a clean stop has the same status)."""
    if unit.get("result") not in (None, "", "success"):
        return Verdict(
            "failed", False, True, f"ended ({unit['result']})", _log_cause(seen, f"systemd: {unit['result']}")
        )
    if unit.get("active_state") == "deactivating" and not settings.verify:
        # Its last word is yet to come.
        return Verdict("stopped", False, False, "the unit is stopping", None)
    cause = seen.get("log_cause") or {}
    asked = bool(seen.get("asked_to_end")) or shutting_down(seen)
    known = cause.get("code") not in (None, "unknown")
    if not asked and (known or unit.get("exec_status") not in (None, 0)):
        return Verdict(
            "failed",
            False,
            True,
            "it ended without being asked to",
            _log_cause(seen, f"it ended with status {unit.get('exec_status')}"),
        )
    return Verdict(
        "stopped",
        False,
        True,
        "the unit is not running",
        _cause("stopped", f"the unit is {unit.get('active_state')}", "start it, or deploy it"),
    )


def _decide(memory: Memory, seen: Observation, settings: Settings, now: float) -> Verdict:
    dead = _dead(memory, seen, settings)
    if dead is not None:
        return dead

    if held_by_other(seen):
        memory["stranger"] += 1
        memory["streak"], memory["generations"] = 0, []
        if memory["stranger"] >= 2 or settings.verify:
            who = (seen.get("listener") or {}).get("name") or "another process"
            pids = (seen.get("listener") or {}).get("pids") or []
            return Verdict(
                "failed",
                False,
                True,
                "the port is held by another process",
                _cause(
                    "port_held_by_other",
                    f"the port is held by {who} (pid {', '.join(map(str, pids)) or 'unknown'}), not by this service",
                    "stop that process, or change sglang_port; an answer from this port proves nothing",
                ),
            )
    else:
        memory["stranger"] = 0

    difference = argv_difference((seen.get("process") or {}).get("argv"), settings.expected_argv)
    if difference:
        memory["wrong_argv"] += 1
        memory["streak"], memory["generations"] = 0, []
        if memory["wrong_argv"] >= 3 or settings.verify:
            return Verdict(
                "failed",
                False,
                True,
                "another revision is running",
                _cause(
                    "revision_mismatch",
                    f"the running process is not of this revision: {difference}",
                    "restart the unit; it still runs what was deployed before",
                ),
            )
    else:
        memory["wrong_argv"] = 0

    if memory["unauthorized"] >= 2 or (memory["unauthorized"] and settings.verify):
        return Verdict(
            "failed",
            False,
            True,
            "the API key is refused",
            _cause(
                "api_key_refused",
                "the server refuses the request (401 or 403)",
                "check sglang_secrets: the key that the service reads and the one in api_key_file must be one",
            ),
        )

    served = memory.get("served_models")
    if seen.get("models"):
        served = memory["served_models"] = list(seen["models"])
    if memory["streak"] and model_matches(served, settings.model) is False:
        return Verdict(
            "failed",
            False,
            True,
            "another model is served",
            _cause(
                "wrong_model",
                "the server serves {}, expected {}".format(", ".join(served or ()), settings.model),
                "check --served-model-name and --model-path of this instance",
            ),
        )

    owned = (seen.get("listener") or {}).get("owned")
    if settings.node_rank > 0:
        if (memory["streak"] >= settings.needed or memory.get("rank_up", 0) >= settings.needed) and owned is not False:
            # Alive is not served: with ``hold`` the caller goes on watching it until rank 0 is ready.
            return Verdict("ready", True, not settings.hold, f"rank {settings.node_rank} is alive", None)
        if any(event.get("kind") == "engine_ready" for event in seen.get("events") or ()) or memory.get("rank_up"):
            memory["rank_up"] = memory.get("rank_up", 0) + 1
    elif memory["streak"] >= settings.needed and len(memory["generations"]) >= settings.generations:
        if owned is True and not difference:
            return Verdict("ready", True, True, f"{memory['streak']} successes in a row", None)
        if owned is None:
            return Verdict(
                "degraded",
                False,
                True,
                "it answers, but whose answer it is cannot be seen",
                _cause("listener_unknown", "the owner of the port cannot be read in /proc", "run with become: true"),
            )

    flight = float((seen.get("in_flight") or {}).get("seconds") or 0.0)
    missed = seen.get("probe") and not seen["probe"].get("ok")
    if settings.verify and (missed or flight > settings.patience):
        return _not_ready(memory, seen, settings, now, done=True)
    return _waiting(memory, seen, settings, now)


def _miss_words(memory: Mapping[str, Any]) -> str:
    miss = memory.get("last_miss") or {}
    if not miss:
        return ""
    what = miss.get("error") or (f"status {miss['status']}" if miss.get("status") else "no answer")
    return f"{miss.get('kind')}: {what}"


def _state_now(memory: Memory, seen: Observation, now: float) -> tuple[str, str]:
    """The state of a service that is neither ready nor dead, and its progress in words."""
    counted = memory.get("counted_at")
    # Before the first success the only work is the server's own warm-up.
    working = memory.get("ever_ok") and counted is not None and now - float(counted) <= 60.0
    listening = seen.get("listener") is not None
    flight = seen.get("in_flight") or {}
    if memory["streak"]:
        words = f"{memory['streak']} successes, next: " + str(flight.get("kind") or "probe")
        if flight and float(flight.get("seconds") or 0.0) > 5.0:
            words += f" (waiting for its answer for {float(flight['seconds']):.0f} s)"
        if working and float(flight.get("seconds") or 0.0) > 20.0:
            return "busy", words
        return (
            "warming" if not memory["ever_served"] else "degraded" if memory.get("missed_after") else "warming"
        ), words
    miss = _miss_words(memory)
    if working and (memory["misses"] or flight):
        return "busy", f"working on requests; {miss}" if miss else "working on requests"
    if memory["ever_served"] and memory["misses"]:
        memory["missed_after"] = True
        return "degraded", f"it has answered before; {miss}"
    phase = memory["phase"]
    words = memory["progress"] or ""
    if listening:
        return "warming", "; ".join(part for part in (words, miss) if part) or "it listens, and is not ready"
    if phase:
        return phase, words
    return "starting", words or "the process is up"


def _not_ready(memory: Memory, seen: Observation, settings: Settings, now: float, done: bool) -> Verdict:
    state, words = _state_now(memory, seen, now)
    code = "busy" if state == "busy" else "not_ready"
    return Verdict(
        state, False, done, words, _cause(code, f"not ready: {words}", "wait, or run service_ready to wait for it")
    )


def _waiting(memory: Memory, seen: Observation, settings: Settings, now: float) -> Verdict:
    state, words = _state_now(memory, seen, now)
    silent = now - float(memory["life_at"])
    limit = deadline(memory, settings)
    if silent <= settings.stall_timeout and now <= limit:
        return Verdict(state, False, False, words, None)
    waited = f"{now:.0f} s"
    miss = _miss_words(memory)
    flight = seen.get("in_flight") or {}
    kind = flight.get("kind") or (memory.get("last_miss") or {}).get("kind")
    if seen.get("listener") is None and not memory["ever_served"] and kind not in GENERATIONS:
        code, what = "never_listened", "nothing listens on the port yet"
    elif kind in GENERATIONS or (memory.get("last_miss") or {}).get("kind") in GENERATIONS:
        code, what = "generation_unavailable", "the server answers, but does not generate"
    elif miss or flight:
        code, what = "health_unavailable", "the server does not become healthy"
    else:
        code, what = "not_ready", "it is not ready"
    tail = f" (last: {words})" if words else ""
    found = seen.get("log_cause")
    if silent > settings.stall_timeout:
        cause = _cause(
            code,
            f"{what}, and nothing has moved for {silent:.0f} s{tail}",
            "look at the lines and at the GPUs; sglang_ready_stall_timeout says how long silence is borne",
        )
        if found and found.get("code") != "unknown":
            cause = dict(found)
        cause["lines"] = cause["lines"] or list((found or {}).get("lines") or seen.get("tail") or ())
        return Verdict("stuck", False, True, words, cause)
    hard = now > settings.hard_timeout
    cause = _cause(
        code,
        f"{what} after {waited}, {'the hard limit' if hard else 'the time limit'}{tail}",
        "raise {} if this start is only slow".format("sglang_ready_hard_timeout" if hard else "sglang_ready_timeout"),
    )
    if found and found.get("code") != "unknown":
        cause = dict(found)
    cause["lines"] = cause["lines"] or list((found or {}).get("lines") or seen.get("tail") or ())
    return Verdict("stuck" if state not in ("busy", "degraded") else state, False, True, words, cause)
