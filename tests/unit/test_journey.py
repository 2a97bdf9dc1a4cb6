# SPDX-License-Identifier: GPL-3.0-or-later
"""What the playbooks hand from step to step."""

from __future__ import annotations

from ansible_collections.gpufleet.sglang.plugins.module_utils import _journey

INTENTS = {
    "instances": {
        "a": {
            "instance": "a",
            "venv": "/v",
            "model_path": "/m/a",
            "user": "sglang",
            "env_vars": {"X": "1"},
            "moe_a2a_backend": ["deepep", "nixl"],
        },
        "b": {"instance": "b", "venv": "/v", "model_path": "/m/b", "user": "sglang", "moe_a2a_backend": "auto"},
    },
    "backends": {"mooncake": ["kv_transfer"]},
    "venvs": {"/v": {}, "/other": {"user": "u", "environment": {"Y": "2"}}},
}


def test_one_full_call_a_venv_and_a_small_one_for_a_further_instance():
    calls = _journey.probe_calls(INTENTS)
    assert [
        (call["venv"], call["instance"], "backends" in call["subset"], "service" in call["subset"]) for call in calls
    ] == [
        ("/v", "a", True, True),
        ("/v", "b", False, True),
        ("/other", None, True, False),
    ]
    assert calls[0]["environment"] == {"X": "1"}
    assert calls[2]["user"] == "u"


def test_preferences_become_wanted_uses():
    assert _journey.probe_calls(INTENTS)[0]["wanted"] == {
        "mooncake": ["kv_transfer"],
        "deep_ep": ["a2a"],
        "nixl": ["a2a"],
    }


def test_each_instance_sees_its_own_model_and_service():
    results = [
        {
            "probe": {
                "venv": {"state": "ok"},
                "backends": {"nixl": {}},
                "model": {"path": "/m/a"},
                "service": {"state": "active"},
            }
        },
        {"probe": {"venv": {"state": "ok"}, "model": {"path": "/m/b"}, "service": {"state": "inactive"}}},
        {"probe": {"venv": {"state": "venv_absent"}}},
    ]
    probes = _journey.collect_probes(results, INTENTS)
    first = _journey.instance_probe(probes, INTENTS, "a")
    second = _journey.instance_probe(probes, INTENTS, "b")
    assert first["model"]["path"] == "/m/a" and second["model"]["path"] == "/m/b"
    assert second["backends"] == {"nixl": {}} and "instances" not in second
    assert probes["/other"]["venv"]["state"] == "venv_absent"


def test_a_host_without_a_service_gets_one_plan():
    assert _journey.plan_names({"instances": {}, "backends": {"nixl": ["kv_transfer"]}}) == ["default"]
    assert _journey.plan_names({"instances": {}, "problems": [{"code": "unknown_variable"}]}) == ["default"]
    assert _journey.plan_names({"instances": {"x": {}}}) == ["x"]
    assert _journey.plan_names({"instances": {}}) == []


REMEDY = {
    "backend": "mooncake",
    "use": "kv_transfer",
    "required": True,
    "summary": "install it",
    "state": "absent",
    "code": "not_installed",
}


def plan(**more):
    return {"service": True, "argv": ["p"], "unit": {"venv": "/v"}, "remedies": [], **more}


def test_nothing_to_do_is_nothing():
    work = _journey.host_work(
        {"a": plan()}, [{"instance": "a", "needs": {"write": False, "restart": False, "start": False}}], {}
    )
    assert work["needed"] is False and work["start"] == [] and work["stop"] == []


def test_a_swap_stops_every_running_instance_of_the_venv_and_starts_it_again():
    plans = {"a": plan(remedies=[REMEDY]), "b": plan(), "c": plan(unit={"venv": "/else"})}
    previews = [{"instance": name, "needs": {}} for name in plans]
    running = {"service": {"state": "active"}}
    probes = {"/v": {"instances": {"a": running, "b": running}}, "/else": {"instances": {"c": running}}}
    work = _journey.host_work(plans, previews, probes)
    assert work["stop"] == ["a", "b"] and work["start"] == ["a", "b"]
    assert work["remedies"] == {"/v": [REMEDY]}


def test_an_optional_remedy_is_not_carried_out():
    work = _journey.host_work({"a": plan(remedies=[{**REMEDY, "required": False}])}, [], {})
    assert work["needed"] is False


def test_a_changed_unit_is_started_without_a_stop():
    work = _journey.host_work({"a": plan()}, [{"instance": "a", "needs": {"write": True}, "differences": ["argv"]}], {})
    assert work["start"] == ["a"] and work["stop"] == [] and work["changes"] == {"a": ["argv"]}


def test_a_remedy_that_did_not_hold_is_told():
    told = _journey.unmended({"a": plan(remedies=[REMEDY])}, {"a": plan(remedies=[REMEDY])})
    assert told == ["a: mooncake is still absent (not_installed) after its remedy; next: install it"]
    assert _journey.unmended({"a": plan(remedies=[REMEDY])}, {"a": plan()}) == []


def test_a_rejection_after_remediation_is_told():
    fresh = {"a": plan(rejections=[{"code": "bad", "message": "no"}])}
    assert _journey.unmended({"a": plan()}, fresh) == ["a: bad: no"]


def test_failure_of_a_loop_names_the_item_that_failed():
    found = _journey.failure(
        {"msg": "One or more items failed", "results": [{"failed": False}, {"failed": True, "msg": "port taken"}]},
        "Start",
    )
    assert found == {"task": "Start", "message": "port taken", "cause": {}}


def test_accepted_is_current_equal_to_last_good():
    previews = [
        {"instance": "a", "current": "r1", "last_good": "r1"},
        {"instance": "b", "current": "r2", "last_good": "r1"},
        {"instance": "c"},
    ]
    assert _journey.accepted_instances(previews) == ["a"]


def test_readiness_is_judged_by_the_argv_of_the_unit():
    units = [{"instance": "a", "argv": ["p", "--config", "f"], "revision": "r1", "api_key_file": "/f"}]
    intents = {"instances": {"a": {"ready": {"timeout": 60, "successes": 2}}}}
    target = _journey.ready_targets(
        {"a": plan(unit={"host": "127.0.0.1", "port": 1, "model_path": "/m"})}, units, intents
    )["a"]
    assert target == {
        "instance": "a",
        "host": "127.0.0.1",
        "port": 1,
        "model": "/m",
        "node_rank": 0,
        "expected_argv": ["p", "--config", "f"],
        "revision": "r1",
        "api_key_file": "/f",
        "successes": 2,
        "timeout": 60,
    }


def test_a_rollback_is_judged_by_the_argv_it_went_back_to():
    units = [
        {"instance": "a", "last_good": "r1", "argv": ["old"]},
        {"instance": "b", "last_good": None, "current": "r2"},
        {"instance": "c", "last_good": "r0"},
    ]
    targets = _journey.restored_targets({"a": plan(), "b": plan(), "c": plan()}, units, {})
    assert list(targets) == ["a", "c"] and targets["a"]["expected_argv"] == ["old"]
    assert "expected_argv" not in targets["c"]


def test_only_what_this_run_changed_is_taken_back():
    results = [
        {"changed": True, "journal_id": "j1", "item": {"key": "/v"}},
        {"changed": False, "journal_id": "j0", "item": {"key": "/w"}},
    ]
    assert _journey.applied_journals(results, {}) == {"/v": ["j1"]}
    assert _journey.applied_journals(results, {"/v": ["j0"], "/x": ["j2"]}) == {"/v": ["j0", "j1"], "/x": ["j2"]}


def test_secrets_of_an_instance_win_over_the_shared_ones():
    variables = {
        "sglang_secrets": {"api_key": "shared", "hf_token": "t"},
        "sglang_instances": {"a": {"secrets": {"api_key": "own"}}},
    }
    assert _journey.secrets_by_instance(["a", "b"], variables) == {
        "a": {"api_key": "own", "hf_token": "t"},
        "b": {"api_key": "shared", "hf_token": "t"},
    }


def test_what_shows_only_after_a_remedy_is_mended_too_and_nothing_twice():
    first = {**REMEDY, "steps": [{"action": "pip_install", "packages": ["m==1"]}]}
    second = {**REMEDY, "steps": [{"action": "os_install", "packages": ["libibverbs1"]}]}
    assert _journey.further_remedies({"a": plan(remedies=[second])}, {"/v": [first]}) == {"/v": [second]}
    assert _journey.further_remedies({"a": plan(remedies=[first])}, {"/v": [first]}) == {}


def test_the_key_of_the_router_reaches_no_service():
    variables = {
        "sglang_secrets": {"api_key": "a", "router_api_key": "r"},
        "sglang_instances": {"x": {"secrets": {"api_key": "b"}}},
    }
    assert _journey.secrets_by_instance(["x", "y"], variables) == {"x": {"api_key": "b"}, "y": {"api_key": "a"}}
    assert _journey.router_keys(["x", "y"], variables) == {"x": "r", "y": "r"}
    assert _journey.router_keys(["x"], {}) == {}
