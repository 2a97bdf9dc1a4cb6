# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The judge over recorded and scripted observations; time is a number in them."""

from __future__ import annotations

import ast
import json
import pathlib

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import parse_line
from ansible_collections.gpufleet.sglang.plugins.module_utils._readiness import (
    FINAL,
    STATES,
    Settings,
    argv_difference,
    deadline,
    judge,
    model_matches,
    new_memory,
    next_probe,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LOGS = pathlib.Path(__file__).parent.parent / "fixtures" / "logs"
UP = {"load_state": "loaded", "active_state": "active", "sub_state": "running", "result": "success", "main_pid": 7,
      "n_restarts": 0, "invocation": "a"}  # fmt: skip
MINE = {"pids": [7], "owned": True, "name": "python"}
HEALTH = {"kind": "health", "ok": True, "status": 200}
SICK = {"kind": "health", "ok": False, "status": 503, "error": "/health answered 503"}
SHORT = {"kind": "short", "ok": True, "status": 200}
LONG = {"kind": "long", "ok": True, "status": 200}


def seen(at, **more):
    return {"at": at, "unit": dict(UP), "process": {"alive": True}, "listener": None, "events": [], **more}


def events(*lines):
    return [event for event in map(parse_line, lines) if event]


def run(observations, judged=None, memory=None):
    memory = memory if memory is not None else new_memory()
    verdict = None
    for one in observations:
        verdict = judge(memory, one, judged or Settings())
        # What travels between slices is JSON.
        memory.update(json.loads(json.dumps(memory)))
        if verdict.done:
            break
    return verdict, memory, one["at"]


def test_three_successes_with_a_short_and_a_long_generation_make_ready():
    verdict, memory, at = run(
        [seen(t, listener=MINE, probe=probe) for t, probe in ((1, HEALTH), (2, SHORT), (3, LONG), (4, HEALTH))]
    )
    assert verdict.state == "ready" and verdict.ready and at == 3
    assert memory["generations"] == ["short", "long"]


@pytest.mark.parametrize("successes", [1, 3, 6])
def test_more_successes_are_more_probes_and_never_less_than_the_proof(successes):
    judged, memory, count = Settings(successes=successes), new_memory(), 0
    while True:
        count += 1
        kind = next_probe(memory, judged)
        probe = {"kind": kind, "ok": True, "status": 200}
        verdict = judge(memory, seen(count, listener=MINE, probe=probe), judged)
        if verdict.done:
            break
    assert verdict.ready and count == max(3, successes)


def test_one_that_was_ready_before_needs_one_generation():
    judged, memory, kinds = Settings(was_ready_before=True), new_memory(), []
    for at in range(1, 10):
        kinds.append(next_probe(memory, judged))
        if judge(memory, seen(at, listener=MINE, probe={"kind": kinds[-1], "ok": True, "status": 200}), judged).done:
            break
    assert kinds == ["health", "short", "health"]


def test_health_alone_is_never_ready():
    verdict, _memory, _at = run([seen(t, listener=MINE, probe=HEALTH) for t in range(1, 50)])
    assert not verdict.done and not verdict.ready


def test_a_miss_begins_the_row_anew():
    row = [(1, HEALTH), (2, SHORT), (3, SICK), (4, HEALTH), (5, SHORT), (6, LONG)]
    verdict, _memory, at = run([seen(t, listener=MINE, probe=probe) for t, probe in row])
    assert verdict.ready and at == 6


def test_a_first_200_is_not_final():
    """C72: /health 200 at 30 s, then 503 from 60 s to 400 s while kernels compile."""
    observations = [seen(30, listener=MINE, probe=HEALTH)]
    observations.append(seen(31, listener=MINE, in_flight={"kind": "short", "seconds": 1}))
    observations.append(seen(60, listener=MINE, events=events("Entering DeepGEMM JIT Pre-Compile session"),
                             probe={"kind": "short", "ok": False, "status": 503}))  # fmt: skip
    observations += [seen(t, listener=MINE, probe=SICK) for t in range(80, 400, 20)]
    observations += [seen(401, listener=MINE, probe=HEALTH), seen(402, listener=MINE, probe=SHORT),
                     seen(410, listener=MINE, probe=LONG)]  # fmt: skip
    verdict, memory, at = run(observations)
    assert verdict.ready and at == 410
    assert {entry["state"] for entry in memory["history"]} == {"warming", "ready"}


# ---- who answers


def test_a_strangers_answer_is_a_failure_and_proves_nothing():
    stranger = {"pids": [99], "owned": False, "name": "nginx"}
    verdict, _memory, at = run(
        [seen(t, listener=stranger, probe=probe) for t, probe in ((1, HEALTH), (2, SHORT), (3, LONG))]
    )
    assert verdict.state == "failed" and verdict.cause["code"] == "port_held_by_other" and at == 2
    assert "nginx" in verdict.cause["message"] and "99" in verdict.cause["message"]


def test_a_stranger_is_told_before_the_load_is_over():
    stranger = {"pids": [99], "owned": False, "name": "python"}
    loading = events("Loading safetensors checkpoint shards:  41% Completed | 20/46 [00:12<00:10,  1.20s/it]")
    verdict, _memory, at = run([seen(t, listener=stranger, events=loading) for t in range(1, 9)])
    assert verdict.cause["code"] == "port_held_by_other" and at == 2


def test_an_owner_that_cannot_be_read_is_no_proof():
    blind = {"pids": [], "owned": None, "name": None}
    verdict, _memory, _at = run(
        [seen(t, listener=blind, probe=probe) for t, probe in ((1, HEALTH), (2, SHORT), (3, LONG))]
    )
    assert verdict.done and not verdict.ready and verdict.cause["code"] == "listener_unknown"


def test_another_revision_is_a_failure_without_its_secrets():
    judged = Settings(expected_argv=["python", "-m", "sglang.launch_server", "--tp-size", "8"])
    argv = ["python", "-m", "sglang.launch_server", "--api-key", "tops3cret"]
    verdict, _memory, _at = run(
        [seen(t, listener=MINE, process={"alive": True, "argv": argv}, probe=HEALTH) for t in range(1, 9)], judged
    )
    assert verdict.cause["code"] == "revision_mismatch"
    assert "--tp-size" in verdict.cause["message"]
    assert "tops3cret" not in str(verdict)


@pytest.mark.parametrize(
    ("have", "want", "words"),
    [
        (["a", "b"], ["a", "b"], None),
        (None, ["a"], None),
        (["a"], None, None),
        (["a"], ["a", "b"], "argument 1 is missing, expected 'b'"),
        (["a", "c"], ["a"], "argument 1 is 'c', expected none"),
        (["x", "--api-key", "one"], ["x", "--api-key", "two"], "argument 2 is '********', expected '********'"),
    ],
)
def test_argv_difference(have, want, words):
    assert argv_difference(have, want) == words


def test_another_model_is_a_failure():
    verdict, _memory, _at = run([seen(1, listener=MINE, probe=HEALTH, models=["llama"])], Settings(model="kimi"))
    assert verdict.cause["code"] == "wrong_model" and "llama" in verdict.cause["message"]


@pytest.mark.parametrize(
    ("served", "want", "same"),
    [
        (["/m/x"], "/m/x/", True),
        (["a", "b"], "b", True),
        ([], "b", None),
        (["a"], None, None),
        (["a"], "b", False),
        (["A"], "a", False),
    ],
)
def test_model_names(served, want, same):
    assert model_matches(served, want) is same


def test_a_refused_key_is_told_soon():
    refused = {"kind": "short", "ok": False, "status": 401}
    verdict, _memory, _at = run(
        [seen(t, listener=MINE, probe=p) for t, p in ((1, HEALTH), (2, refused), (3, HEALTH), (4, refused))]
    )
    assert verdict.cause["code"] == "api_key_refused"


# ---- dead


def test_crash_loop_of_a_unit_that_is_active_between_its_crashes():
    """C87."""
    rows = [("active", "running", 0), ("activating", "auto-restart", 1), ("active", "running", 2)]
    cause = {"code": "flag_unknown", "message": "m", "mend": "x", "lines": ["first error"]}
    observations = [
        seen(t, unit=dict(UP, active_state=a, sub_state=s, n_restarts=n), log_cause=cause)
        for t, (a, s, n) in enumerate(rows)
    ]
    verdict, _memory, at = run(observations)
    assert verdict.state == "crash_loop" and verdict.done and at == 1
    assert verdict.cause["lines"] == ["first error"]
    # Seen too seldom to catch it waiting: the counter alone tells.
    verdict, _memory, _at = run([observations[0], observations[2]])
    assert verdict.state == "crash_loop"


def test_an_old_restart_of_a_service_that_serves_is_no_crash_loop():
    unit = dict(UP, n_restarts=3, uptime=400_000)
    row = [seen(t, unit=unit, listener=MINE, probe=p) for t, p in ((1, HEALTH), (2, SHORT), (3, LONG))]
    assert run(row)[0].ready


def test_a_lasting_cause_of_an_earlier_start_ends_the_wait_at_once():
    unit = dict(UP, n_restarts=1, uptime=3)
    cause = {"code": "flag_unknown", "message": "m", "mend": "x", "lines": [], "permanent": True}
    assert run([seen(1, unit=unit, earlier_cause=cause)])[0].state == "crash_loop"
    assert not run([seen(1, unit=unit, earlier_cause=dict(cause, permanent=False))])[0].done


def test_a_start_that_listens_is_judged_by_its_answers_whatever_an_earlier_one_died_of():
    unit = dict(UP, n_restarts=1, uptime=40)
    cause = {"code": "dependency_broken", "message": "m", "mend": "x", "lines": [], "permanent": True}
    row = [
        seen(1, unit=unit, listener=MINE, earlier_cause=cause, probe=SHORT),
        seen(2, unit=unit, listener=MINE, probe=LONG),
    ]
    assert run(row, Settings(successes=2, verify=True))[0].ready
    row = [seen(1, unit=unit, listener=MINE, earlier_cause=cause), seen(2, unit=dict(unit, n_restarts=2))]
    assert run(row)[0].state == "crash_loop"


def test_tolerated_restarts():
    observations = [seen(0), seen(1, unit=dict(UP, n_restarts=1)), seen(9, unit=dict(UP, n_restarts=2))]
    verdict, _memory, at = run(observations, Settings(tolerated_restarts=1))
    assert verdict.state == "crash_loop" and at == 9


@pytest.mark.parametrize(
    ("unit", "state"),
    [
        ({"active_state": "failed", "sub_state": "failed", "result": "exit-code", "exec_status": 2}, "failed"),
        ({"active_state": "failed", "sub_state": "failed", "result": "oom-kill", "exec_status": 9}, "failed"),
        ({"active_state": "inactive", "sub_state": "dead", "result": "success", "exec_status": 0}, "stopped"),
        ({"active_state": "inactive", "sub_state": "dead", "result": "success", "exec_status": 137}, "failed"),
        ({"active_state": "deactivating", "sub_state": "final-sigterm", "result": "exit-code"}, "failed"),
        ({"load_state": "not-found", "active_state": "inactive"}, "failed"),
        ({"load_state": "masked", "active_state": "inactive"}, "failed"),
    ],
)
def test_what_systemd_says(unit, state):
    verdict, _memory, at = run([seen(1, unit={**UP, **unit})])
    assert verdict.state == state and verdict.done and at == 1 and verdict.cause["code"]


def test_a_unit_that_is_stopping_has_its_last_word_before_it():
    stopping = dict(UP, active_state="deactivating", sub_state="stop-sigterm")
    verdict, _memory, _at = run([seen(1, unit=stopping)])
    assert verdict.state == "stopped" and not verdict.done
    assert run([seen(1, unit=stopping)], Settings(verify=True))[0].done


@pytest.mark.parametrize(
    ("asked", "code", "state"),
    [
        (True, "unknown", "stopped"),
        (True, "gpu_fault", "stopped"),
        (False, "scheduler_died", "failed"),
        (False, "unknown", "failed"),
    ],
)
def test_status_137_is_a_clean_stop_only_when_somebody_asked(asked, code, state):
    """SGLang 0.5.18 ends with 137 when it is stopped, and when it has lost a scheduler."""
    unit = dict(UP, active_state="inactive", sub_state="dead", result="success", exec_status=137)
    cause = {"code": code, "message": "m", "mend": "x", "lines": []}
    verdict, _memory, _at = run([seen(1, unit=unit, log_cause=cause, asked_to_end=asked)])
    assert verdict.state == state and verdict.done


def test_a_crash_whose_process_lingers_is_told_from_its_log():
    """Recorded on two H200: the process waited 65 s for core dumps."""
    lines = (LOGS / "gpu/deepep_bf16_auto.log").read_text(encoding="utf-8").splitlines()
    cause = {"code": "deepep_needs_low_latency", "message": "m", "mend": "x", "lines": ["l"]}
    observations = [
        seen(40, listener=MINE, probe=SICK),
        seen(55, listener=MINE, events=events(*lines), log_cause=cause),
    ]
    verdict, _memory, at = run(observations)
    assert verdict.state == "failed" and at == 55 and verdict.cause["code"] == "deepep_needs_low_latency"


def test_the_words_of_a_crash_are_awaited_for_two_seconds_only():
    fatal = events("[2026-11-30 20:00:00] Scheduler hit an exception: Traceback (most recent call last):")
    vague = {"code": "unknown", "message": "m", "mend": "x", "lines": []}
    row = [
        seen(10, events=fatal, log_cause=vague),
        seen(11, log_cause=vague),
        seen(12, log_cause=vague),
        seen(13, log_cause=vague),
    ]
    verdict, _memory, at = run(row)
    assert verdict.state == "failed" and at == 12


def test_a_process_without_a_unit():
    gone = {"at": 5, "unit": None, "process": {"alive": False}, "listener": None, "events": []}
    assert run([dict(gone)])[0].state == "failed"
    asked = dict(gone, events=events("[2026-11-30 21:22:18.935] SIGTERM received. signum=None frame=None. Draining"))
    assert run([asked])[0].state == "stopped"


# ---- slow is not dead


def test_the_deadline_moves_while_kernels_compile():
    """C10: twenty minutes of DeepGEMM."""
    judged = Settings(timeout=300, stall_timeout=120, hard_timeout=3600)
    observations = [
        seen(t, events=events(f"DeepGEMM warmup:  {t * 100 // 1300}%|####      | {t * 12}/16384"))
        for t in range(10, 1300, 30)
    ]
    verdict, memory, _at = run(observations, judged)
    assert verdict.state == "warming" and not verdict.done
    assert "jit_precompile" in verdict.progress and "%" in verdict.progress
    assert deadline(memory, judged) > 1300


def test_a_bar_that_stands_still_is_stuck():
    judged = Settings(timeout=300, stall_timeout=120, hard_timeout=3600)
    same = events("DeepGEMM warmup:  41%|####      | 6720/16384")
    verdict, _memory, at = run([seen(t, events=same) for t in range(10, 1300, 10)], judged)
    assert verdict.state == "stuck" and 130 <= at <= 150


def test_compiler_processes_are_progress_when_the_log_is_silent():
    judged = Settings(timeout=300, stall_timeout=120, hard_timeout=3600)
    row = [seen(t, process={"alive": True, "compilers": [t]}) for t in range(10, 900, 30)]
    verdict, _memory, _at = run(row, judged)
    assert verdict.state == "warming" and not verdict.done


def test_signs_of_life_hold_off_stuck_but_not_the_deadline():
    judged = Settings(timeout=300, stall_timeout=120, hard_timeout=3600)
    row = [seen(t, process={"alive": True, "read_bytes": t * 10**9}) for t in range(10, 900, 30)]
    verdict, _memory, at = run(row, judged)
    assert verdict.done and not verdict.ready and 300 < at <= 340


def test_the_hard_limit_ends_even_what_moves():
    judged = Settings(timeout=300, stall_timeout=120, hard_timeout=900)
    row = [seen(t, events=events(f"DeepGEMM warmup:  1%|#  | {t}/16384")) for t in range(10, 2000, 30)]
    verdict, _memory, at = run(row, judged)
    assert verdict.done and 900 < at <= 940


def test_busy_is_not_dead_and_flat_is():
    """C71: 503 under long prompts while the prefill counter rises; the control is a flat counter."""
    judged = Settings(timeout=600, stall_timeout=300, hard_timeout=7200, was_ready_before=True)
    ok = seen(0, listener=MINE, probe=HEALTH)

    def row(tokens):
        return [
            seen(t, listener=MINE, probe=SICK if t % 60 else HEALTH, counters={"tokens": tokens(t)})
            for t in range(20, 1200, 20)
        ]

    verdict, memory, _at = run([ok, *row(lambda t: t * 1000)], judged)
    assert verdict.state == "busy" and not verdict.done
    assert "failed" not in [entry["state"] for entry in memory["history"]]
    flat = [seen(t, listener=MINE, probe=SICK, counters={"tokens": 5}) for t in range(20, 1200, 20)]
    verdict, _memory, at = run([ok, *flat], judged)
    assert verdict.state == "stuck" and verdict.cause["code"] == "health_unavailable" and 300 <= at <= 340


def test_answers_without_generations_fail_at_the_deadline_and_not_at_once():
    """C67."""
    judged = Settings(timeout=100, stall_timeout=60, hard_timeout=400)
    row = [seen(1, listener=MINE, probe=HEALTH)]
    row += [seen(t, listener=MINE, in_flight={"kind": "short", "seconds": t - 1}) for t in range(2, 400)]
    verdict, _memory, at = run(row, judged)
    assert verdict.cause["code"] == "generation_unavailable" and at > 50


def test_never_listening_is_said_so():
    verdict, _memory, _at = run([seen(t, tail=["last line"]) for t in range(0, 900, 10)], Settings())
    assert verdict.state == "stuck" and verdict.cause["code"] == "never_listened"
    assert verdict.cause["lines"] == ["last line"]


def test_degraded_is_one_that_has_answered_before():
    row = [seen(1, listener=MINE, probe=HEALTH), seen(2, listener=MINE, probe=SHORT),
           seen(3, listener=MINE, probe={"kind": "long", "ok": False, "status": 500})]  # fmt: skip
    assert run(row)[0].state == "degraded"


# ---- ranks and roles


def test_a_rank_above_0_is_judged_by_liveness():
    judged = Settings(node_rank=1)
    row = [seen(t, listener=MINE, probe=HEALTH) for t in (1, 2, 3)]
    verdict, memory, _at = run(row, judged)
    assert verdict.ready and memory["generations"] == []
    fatal = events("[2026-11-30 20:00:00] Received sigquit from a child process. It usually means the child failed.")
    cause = {"code": "nccl_failed", "message": "m", "mend": "x", "lines": []}
    assert run([*row[:2], seen(3, events=fatal, log_cause=cause)], judged)[0].state == "failed"


def test_a_rank_above_0_that_never_listens_is_ready_when_its_engine_is():
    row = [seen(1), seen(2, events=events("[2026-11-30 20:00:00 TP8] max_total_num_tokens=4096, context_len=2048"))]
    row += [seen(t) for t in (3, 4, 5)]
    assert run(row, Settings(node_rank=1))[0].ready
    assert not run([seen(t) for t in range(1, 9)], Settings(node_rank=1))[0].done


def test_a_rank_that_is_held_is_watched_after_it_is_up():
    judged, memory = Settings(node_rank=1, hold=True), new_memory()
    verdict = run([seen(t, listener=MINE, probe=HEALTH) for t in (1, 2, 3)], judged, memory)[0]
    assert verdict.ready and not verdict.done
    verdict = run([seen(900, listener=MINE)], judged, memory)[0]
    assert verdict.ready and not verdict.done, "it does nothing while rank 0 loads, and is alive"
    again = {**UP, "sub_state": "auto-restart"}
    verdict = run([seen(901, unit=again, log_cause={"code": "gpu_lost", "message": "m"})], judged, memory)[0]
    assert (verdict.state, verdict.done, verdict.cause["code"]) == ("crash_loop", True, "gpu_lost")
    assert run([seen(t, listener=MINE, probe=HEALTH) for t in (1, 2, 3)], Settings(hold=True))[0].done is False


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_disaggregated_server_is_asked_in_its_own_way(role):
    judged, memory, kinds = Settings(role=role), new_memory(), []
    for at in range(1, 10):
        kinds.append(next_probe(memory, judged))
        if judge(memory, seen(at, listener=MINE, probe={"kind": kinds[-1], "ok": True, "status": 200}), judged).done:
            break
    assert kinds == ["health", "disaggregated", "disaggregated"]


# ---- verify


def test_verify_ends_with_the_first_miss_or_the_first_generation():
    judged = Settings(verify=True)
    assert run([seen(1, listener=MINE, probe=SICK)], judged)[0].done
    verdict, memory, _at = run([seen(1, listener=MINE, probe=HEALTH), seen(2, listener=MINE, probe=SHORT)], judged)
    assert verdict.ready and memory["generations"] == ["short"]


def test_verify_does_not_wait_for_ever_for_an_answer():
    row = [seen(t, listener=MINE, in_flight={"kind": "short", "seconds": t}) for t in range(1, 200)]
    verdict, _memory, at = run(row, Settings(verify=True))
    assert verdict.done and not verdict.ready and at == 61


# ---- recorded timelines


@pytest.mark.parametrize(
    ("poll", "first_ready"),
    [("gpu/none.poll", 151.3), ("gpu/deepep_auto.poll", 84.4), ("gpu/deepep_normal.poll", 53.2)],
)
def test_recorded_timelines_are_ready_no_earlier_than_health(poll, first_ready):
    observations = []
    for line in (LOGS / poll).read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("+"):
            at, _sep, rest = line[1:].partition("s ")
            polled = ast.literal_eval(rest)
            listener = MINE if polled["models"] == 200 else None
            probe = {"kind": "health", "ok": polled["health"] == 200, "status": polled["health"] or None}
            observations.append(seen(float(at), listener=listener, probe=probe if listener else None))
    verdict, memory, _at = run(observations)
    assert not verdict.done and memory["streak"] == 1
    last = observations[-1]["at"]
    assert last == first_ready
    assert not any(entry["state"] in FINAL for entry in memory["history"])
    verdict, _memory, _at = run(
        [seen(last + 1, listener=MINE, probe=SHORT), seen(last + 15, listener=MINE, probe=LONG)], memory=memory
    )
    assert verdict.ready


# ---- properties

PROBES = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["health", "short", "long", "odd"]),
            "ok": st.booleans(),
            "status": st.sampled_from([None, 200, 401, 500, 503]),
        }
    ),
)
STRANGER = {"pids": [1], "owned": False, "name": "x"}
OBSERVATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "unit": st.one_of(st.none(), st.just({}), st.fixed_dictionaries({
                "active_state": st.sampled_from(["active", "activating", "failed", "inactive", None]),
                "sub_state": st.sampled_from(["running", "auto-restart", "dead", None]),
                "n_restarts": st.integers(0, 3)})),
            "process": st.one_of(st.just({}), st.fixed_dictionaries({"alive": st.booleans()})),
            "listener": st.sampled_from([None, MINE, STRANGER, {"pids": [], "owned": None}]),
            "probe": PROBES,
            "events": st.lists(st.text(max_size=60).map(parse_line).filter(bool), max_size=3),
        }
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(OBSERVATIONS, st.booleans(), st.integers(0, 1))
def test_whatever_is_seen_has_a_state_and_ready_needs_proof(observations, verify, rank):
    memory, judged = new_memory(), Settings(verify=verify, node_rank=rank)
    for number, one in enumerate(observations):
        verdict = judge(memory, dict(one, at=number * 7), judged)
        json.dumps(memory)
        assert verdict.state in STATES
        assert verdict.ready == (verdict.state == "ready")
        if verdict.ready:
            assert (one["listener"] or {}).get("owned") is not False
            assert rank or (one["listener"]["owned"] is True and memory["generations"])
        elif verdict.done:
            assert verdict.cause["code"] and verdict.cause["message"]
            break
