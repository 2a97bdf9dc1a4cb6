# SPDX-License-Identifier: GPL-3.0-or-later
"""Decisions inside a wave, and what is said of it."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _rollout

FLEET = {
    "order": ["h1", "h2", "h3", "h4", "h5"],
    "serial": [1, 2, 2],
    "waves": [
        [{"instance": "default", "hosts": ["h1"]}],
        [{"instance": "big", "hosts": ["h2", "h3"]}],
        [{"instance": "default", "hosts": ["h4"]}, {"instance": "default", "hosts": ["h5"]}],
    ],
    "skipped": [{"host": "h6", "reason": "it could not be reached"}],
}
BIG = {"big": {"unit": {"hosts": ["h2", "h3"]}}}


def test_a_rank_that_must_restart_restarts_all_ranks_and_all_stop_first():
    hostvars = {"h2": {"rollout_own_work": {"start": []}}, "h3": {"rollout_own_work": {"start": ["big"]}}}
    work = _rollout.shared_work({"needed": False, "start": [], "stop": []}, BIG, "h2", hostvars)
    assert work["start"] == ["big"] and work["stop"] == ["big"] and work["needed"] is True
    alone = _rollout.shared_work({"start": ["x"], "stop": []}, {"x": {"unit": {"hosts": []}}}, "h9", {})
    assert alone["stop"] == [], "one host swaps and restarts in one step"


@pytest.mark.parametrize(("theirs", "told"), [("drained", 0), ("started", 0), ("seen", 1), (None, 1)])
def test_a_member_that_did_not_come_along_is_named(theirs, told):
    behind = _rollout.members_behind(BIG, "h2", {"h2": {}, "h3": {"rollout_stage": theirs}}, "drained")
    assert len(behind) == told and all("h3" in text and "big" in text for text in behind)


def test_only_what_was_changed_goes_back_and_all_members_do():
    hostvars = {
        "h2": {"rollout_stage": "started"},
        "h3": {"rollout_stage": "changing", "rollout_failure": {"task": "t"}},
    }
    assert _rollout.to_roll_back(BIG, {"start": ["big"]}, "h2", hostvars) == ["big"]
    hostvars["h2"]["rollout_stage"] = "drained"
    assert _rollout.to_roll_back(BIG, {"start": ["big"]}, "h2", hostvars) == []
    hostvars = {"h2": {"rollout_stage": "proven", "rollout_failure": {}}, "h3": {"rollout_stage": "proven"}}
    assert _rollout.to_roll_back(BIG, {"start": ["big"]}, "h2", hostvars) == []


@pytest.mark.parametrize(
    ("failure", "stage", "back", "names"),
    [
        ({}, "proven", {}, ["a", "b"]),
        ({"task": "t"}, "seen", {}, ["a"]),
        ({"task": "t"}, "started", {"a": "last_good", "b": "stopped"}, ["a"]),
        ({"task": "t", "going_back": True}, "started", {"a": "last_good"}, []),
    ],
)
def test_only_what_serves_gets_requests_again(failure, stage, back, names):
    assert _rollout.serving({"a": {}, "b": {}}, {"running": ["a"]}, failure, stage, back) == names


def test_a_host_that_went_away_is_seen_in_a_loop_too():
    assert _rollout.went_away([{}, {"results": [{"changed": False}, {"unreachable": True}]}])
    assert not _rollout.went_away([{}, {"results": [{"failed": True}]}, {"unreachable": False}])


@pytest.mark.parametrize(("choice", "stops"), [("stop", True), ("skip", False)])
def test_a_lost_host_stops_the_rollout_by_choice(choice, stops):
    facts = {"h1": {"rollout_failure": {"task": "t", "lost": True}}, "h2": {"rollout_failure": {}}}
    assert _rollout.wave_failed(facts, ["h1", "h2"], choice) is stops
    facts["h2"]["rollout_failure"] = {"task": "t", "lost": False}
    assert _rollout.wave_failed(facts, ["h1", "h2"], choice) is True


@pytest.mark.parametrize(
    ("failure", "back", "state"),
    [
        ({}, {}, "done"),
        ({"task": "t", "message": "m"}, {"a": "last_good"}, "went_back"),
        ({"task": "t", "message": "m"}, {"a": "last_good", "b": "stopped"}, "stopped"),
        ({"task": "t", "message": "m"}, {}, "failed"),
        ({"task": "t", "message": "m", "lost": True}, {}, "lost"),
        ({"task": "t", "message": "m", "lost": True, "going_back": True}, {}, "lost"),
        ({"task": "t", "message": "m", "going_back": True}, {"a": "last_good"}, "down"),
    ],
)
def test_outcomes(failure, back, state):
    assert _rollout.outcome(failure, {"needed": True}, back)["state"] == state


def test_what_a_wave_says():
    first = _rollout.wave_text(FLEET, "h1", 100.0, 101.0, {})
    assert first.startswith("Wave 1 of 3: h1 ") and "to go" not in first
    hostvars = {"h1": {"rollout_outcome": {"state": "done"}}}
    second = _rollout.wave_text(FLEET, "h3", 100.0, 400.0, hostvars)
    assert "Wave 2 of 3: h2, h3 (instance big)" in second and "1 of 5 hosts (1 done)" in second
    assert "Elapsed 5:00; about 10:00 to go" in second and "after this wave: 2 hosts" in second


def test_the_end_names_every_host_the_worst_first():
    hostvars = {
        "h1": {"rollout_stage": "proven", "rollout_outcome": {"state": "done", "text": ""}},
        "h2": {"rollout_stage": "started", "rollout_outcome": {"state": "went_back", "text": "Wait: it crashed"}},
        "h3": {"rollout_stage": "started"},
    }
    text = _rollout.rollout_text(FLEET, hostvars, 61.0)
    lines = text.splitlines()
    assert lines[0] == "Rollout STOPPED in wave 2 of 3 after 1:01"
    assert "last good revision: h2" in lines[1] and lines[2].strip() == "h2: Wait: it crashed"
    assert "1 LOST, cannot be reached: h3" in text and "2 untouched: h4, h5" in text and "1 left out: h6" in text
    assert "same command again" in lines[4]
    done = {host: {"rollout_stage": "proven", "rollout_outcome": {"state": "unchanged"}} for host in FLEET["order"]}
    assert _rollout.rollout_text({**FLEET, "skipped": []}, done).startswith("Rollout complete\n  5 as it should be")


def calls(router, **unit):
    intents = {
        "instances": {"a": {"router": router, "drain_timeout": 9, "flags": {"disaggregation-bootstrap-port": 9001}}}
    }
    services = {"a": {"unit": {"host": "0.0.0.0", "port": 30000, **unit}}}
    return _rollout.router_calls(["a", "gone"], services, intents, "10.0.0.5")


def test_a_worker_is_known_by_the_address_that_the_router_reaches():
    (call,) = calls({"url": "http://r"})
    assert call["worker_url"] == "http://10.0.0.5:30000" and call["server_url"] == "http://127.0.0.1:30000"
    assert call["router_url"] == ["http://r"] and call["worker"] == {}
    assert calls({"url": ["http://r", "http://s"]})[0]["router_url"] == ["http://r", "http://s"]
    (call,) = calls({"url": "http://r", "worker_url": "https://w:1"}, host="127.0.0.1", role="prefill")
    assert call["worker_url"] == "https://w:1" and call["server_url"] == "https://127.0.0.1:30000"
    assert call["worker"] == {"worker_type": "prefill", "bootstrap_port": 9001}
    assert calls({"url": "http://r"}, node_rank=1) == [], "rank 0 speaks for the instance"
    (call,) = calls({"url": "http://r"}, host="fd00::1")
    assert call["worker_url"] == "http://[fd00::1]:30000"


@pytest.mark.parametrize(
    ("router", "unit", "word"),
    [
        ({}, {}, None),
        ({"worker_url": "http://w"}, {}, "url"),
        ({"url": "http://r"}, {"host": "127.0.0.1"}, "worker_url"),
        ({"url": []}, {}, "url"),
        ({"url": "http://r", "own_request": False}, {}, "unknown own_request"),
        ({"url": "http://r", "worker": {"api_key": "k"}}, {}, "sglang_secrets"),
    ],
)
def test_routers_that_cannot_be_used(router, unit, word):
    if word is None:
        assert calls(router, **unit) == []
        return
    with pytest.raises(ValueError, match=word):
        calls(router, **unit)


def test_a_worker_without_a_request_is_told_at_the_end():
    unseen = {"seen": False, "how": None, "reason": "no client sent one in 60 s, and own requests are turned off"}
    results = [{"item": {"instance": "a"}, "traffic": unseen}, {"item": {"instance": "b"}, "traffic": None}]
    hostvars = {"h1": {"rollout_stage": "proven", "rollout_outcome": {"state": "done"}}}
    fleet = {**FLEET, "order": ["h1"], "skipped": []}
    seen = {"results": [{"item": {"instance": "a"}, "traffic": {"seen": True, "how": "worker"}}]}
    hostvars["h1"]["rollout_joined"] = seen
    assert "WITHOUT A REQUEST" not in _rollout.rollout_text(fleet, hostvars)
    hostvars["h1"]["rollout_joined"] = {"results": results}
    lines = _rollout.rollout_text(fleet, hostvars).splitlines()
    assert lines[1] == "  1 WITHOUT A REQUEST from the router so far: h1"
    assert lines[2] == "    h1: instance a: no client sent one in 60 s, and own requests are turned off"
    failed = [{**results[0], "failed": True}]
    assert _rollout.unseen_traffic({"results": failed}) == [], "told as the host's failure"


def test_plans_without_a_probe_are_enough_to_go_back():
    intents = {"instances": {"big": {"hosts": ["h2", "h3"], "port": 1, "host": "x", "venv": "/v", "model_path": "/m"}}}
    plan = _rollout.bare_plans(intents, "h3")["big"]
    assert plan["unit"]["node_rank"] == 1 and plan["unit"]["hosts"] == ["h2", "h3"] and plan["rejections"] == []
    work = _rollout.back_work(
        [{"instance": "big", "changed": False, "needs": {"restart": True}, "active_state": "active"}]
    )
    assert work["start"] == ["big"] and work["running"] == ["big"]
