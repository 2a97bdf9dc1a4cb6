# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._slices import run_slices


class Clock:
    """Time that passes only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def scripted(clock, results, lasts=30.0):
    calls = []
    todo = list(results)

    def call(carry, seconds):
        calls.append((dict(carry), seconds))
        clock.now += lasts
        result = todo.pop(0) if len(todo) > 1 else todo[0]
        if isinstance(result, Exception):
            raise result
        return dict(result)

    return call, calls


def part(state="loading", progress="", done=False, **carry):
    return {"changed": False, "slice": {"done": done, "state": state, "progress": progress, "carry": carry}}


def test_the_carry_of_a_slice_reaches_the_next_and_the_last_result_is_returned():
    clock, said = Clock(), []
    call, calls = scripted(clock, [part(n=1), part(n=2), dict(part(done=True), ready=True)])
    result = run_slices(call, said.append, hard_limit=1000, clock=clock, sleep=clock.sleep)
    assert result == {"changed": False, "ready": True}
    assert [carry for carry, seconds in calls] == [{}, {"n": 1}, {"n": 2}]


def test_a_result_outside_the_protocol_is_final():
    clock = Clock()
    call, calls = scripted(clock, [{"failed": True, "msg": "bad argument"}])
    assert run_slices(call, [].append, hard_limit=1000, clock=clock)["msg"] == "bad argument"
    assert len(calls) == 1


def test_check_mode_calls_once():
    clock = Clock()
    call, calls = scripted(clock, [part()])
    result = run_slices(call, [].append, hard_limit=1000, once=True, clock=clock)
    assert len(calls) == 1 and "failed" not in result


def test_never_done_is_given_up_at_the_hard_limit_with_what_was_last_seen():
    clock = Clock()
    call, calls = scripted(clock, [part(progress="weights 41 %")])
    result = run_slices(call, [].append, hard_limit=300, clock=clock, sleep=clock.sleep)
    assert result["failed"] and "weights 41 %" in result["msg"]
    assert len(calls) == 10


def test_silence_lasts_at_most_a_minute_and_repetition_is_rare():
    clock, said = Clock(), []

    def speak(line):
        said.append((clock.now, line))

    call, calls = scripted(clock, [part(progress="compiling")], lasts=25.0)
    run_slices(call, speak, hard_limit=1000, slice_seconds=25, clock=clock, sleep=clock.sleep)
    gaps = [b[0] - a[0] for a, b in zip(said, said[1:])]
    assert gaps and max(gaps) <= 60 and len(said) < len(calls)


def test_a_change_is_said_at_once():
    clock, said = Clock(), []
    call, _calls = scripted(
        clock, [part("starting"), part("loading", "1 %"), part("loading", "9 %"), part("ready", done=True)], lasts=1
    )
    run_slices(call, said.append, hard_limit=1000, clock=clock)
    assert said == ["starting", "loading: 1 %", "loading: 9 %", "ready"]


def test_a_dropped_connection_goes_on_from_the_last_carry():
    clock, said = Clock(), []
    call, calls = scripted(clock, [part(n=1), ConnectionError("gone"), part(n=2, done=True)])
    run_slices(call, said.append, hard_limit=1000, transient=(ConnectionError,), clock=clock, sleep=clock.sleep)
    assert [carry for carry, seconds in calls] == [{}, {"n": 1}, {"n": 1}]
    assert any("gone" in line for line in said)


def test_a_host_that_stays_away_is_unreachable():
    clock = Clock()
    call, calls = scripted(clock, [ConnectionError("gone")])
    with pytest.raises(ConnectionError):
        run_slices(call, [].append, hard_limit=1000, transient=(ConnectionError,), clock=clock, sleep=clock.sleep)
    assert len(calls) == 4


def test_slices_never_exceed_the_longest_allowed():
    clock = Clock()
    call, calls = scripted(clock, [part(done=True)])
    run_slices(call, [].append, hard_limit=1000, slice_seconds=600, clock=clock)
    assert calls[0][1] == 45.0


def test_what_is_decided_between_two_slices_ends_the_chain():
    clock, said = Clock(), []
    call, calls = scripted(clock, [part(n=1), part(n=2), part(n=3)])

    def between(result):
        return dict(result, failed=True, msg="another rank is dead") if len(calls) == 2 else None

    result = run_slices(call, said.append, hard_limit=1000, between=between, clock=clock, sleep=clock.sleep)
    assert result["msg"] == "another rank is dead" and len(calls) == 2 and "slice" not in result
