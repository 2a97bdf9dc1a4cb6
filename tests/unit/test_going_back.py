# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which revisions and packages go back, and what is left to another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _libraries, _rollout

HOSTS = ["h1", "h2"]
SERVICES = {
    "a": {"unit": {"venv": "/v", "hosts": []}},
    "b": {"unit": {"venv": "/v", "hosts": []}},
    "big": {"unit": {"venv": "/w", "hosts": HOSTS}},
}
OVERTAKEN = {"code": "overtaken", "revision": "x"}


def claim(run: str | None, deployed_by: str | None = "old", is_open: bool = True, **more: Any) -> dict[str, Any]:
    return {"run": run, "open": is_open, "deployed": {"run": deployed_by, "revision": "cur"}, **more}


def unit(name: str = "a", **more: Any) -> dict[str, Any]:
    return {"instance": name, "current": "cur", "last_good": "cur", **more}


@pytest.mark.parametrize(
    ("found", "is_held"),
    [
        (None, False),
        ({}, False),
        (claim("me"), False),
        (claim("other"), True),
        (claim("other", is_open=False), False),
        (claim("other", deployed_by="other"), False),
    ],
)
def test_only_a_change_that_is_still_to_come_is_another_runs(found: Any, is_held: bool) -> None:
    assert _rollout.held(found, "me") is is_held


def test_of_several_results_of_an_instance_the_last_one_counts() -> None:
    results = [unit(claim=claim("other")), {"skipped": True}, unit(claim=claim("me")), unit("b", cause=OVERTAKEN)]
    assert _rollout.held_elsewhere(results, "me") == ["b"]
    assert _rollout.held_elsewhere([unit(overtaken="another run …")], "me") == ["a"]


def test_what_is_changed_or_was_left_by_another_run_is_claimed() -> None:
    previews = [unit("a"), unit("b", claim=claim("dead")), unit("big", claim=claim("dead", "dead")), unit("gone")]
    calls = _rollout.to_claim({"start": ["a"], "stop": []}, previews, SERVICES, "h1", {})
    assert [call["instance"] for call in calls] == ["a", "b"]
    assert calls[0] == {"instance": "a", "current": "cur", "proven": False}


@pytest.mark.parametrize(
    ("good", "deployed_by", "last_good", "proven"),
    [
        ("r1", "r1", "before", True),
        ("r0", "r1", "before", False),
        ("r1", "r1", "cur", False),
        (None, None, "before", False),
    ],
)
def test_a_rank_is_proven_by_another_one_of_the_same_deployment(
    good: str | None, deployed_by: str | None, last_good: str, proven: bool
) -> None:
    mine = unit("big", last_good=last_good, claim=claim("r1", deployed_by))
    theirs = {"results": [unit("big", claim=claim("r1", deployed_by, good=good)), unit("a", claim={"good": "r1"})]}
    facts = {"h1": {"rollout_preview": {"results": [mine]}}, "h2": {"rollout_preview": theirs}}
    (call,) = _rollout.to_claim({"start": ["big"]}, [mine], SERVICES, "h1", facts)
    assert call["proven"] is proven


def test_accepted_is_what_is_new_and_what_has_an_open_claim() -> None:
    results = [unit("a", claim=claim("old", "old")), unit("b", claim=claim("other")), unit("big", claim=None)]
    assert _rollout.to_accept(SERVICES, ["a", "b", "big"], {"start": []}, results, "me") == ["a"]
    assert _rollout.to_accept(SERVICES, ["a", "b"], {"start": ["b"]}, results, "me") == ["a", "b", "big"]
    mine = [*results, unit("b", claim=claim("me"))]
    assert "b" in _rollout.to_accept(SERVICES, ["a", "b", "big"], {"start": []}, mine, "me")


def test_what_shares_changed_packages_goes_back_with_the_one_that_failed() -> None:
    services = {**SERVICES, "big": {"unit": {"venv": "/v", "hosts": HOSTS}}}
    facts = {"h1": {"rollout_stage": "proven"}, "h2": {"rollout_failure": {"task": "t"}}}
    work = {"start": ["a", "big"], "remedies": {"/v": []}}
    assert _rollout.to_roll_back(services, work, "h1", facts) == ["a", "big"]
    assert _rollout.to_roll_back(services, {**work, "remedies": {}}, "h1", facts) == ["big"]


def way(*journals: str, reason: str = "", others: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"venv": "/v", "journals": list(journals), "reason": reason, "others": list(others)}


def back(previews: list[dict[str, Any]], own: Any = None, facts: Any = None) -> dict[str, Any]:
    return _rollout.going_back(previews, SERVICES, own or {}, "h1", facts or {})


def test_packages_go_back_when_all_on_the_venv_agree() -> None:
    found = back([unit("a", packages=way("j2", "j1")), unit("b", packages=way("j2", "j1"))])
    assert found["names"] == found["stop"] == ["a", "b"] and found["journals"] == {"/v": ["j2", "j1"]}
    found = back([unit("a", packages=way())])
    assert found["journals"] == {} and found["stop"] == [] and found["notes"] == [] and found["names"] == ["a"]


@pytest.mark.parametrize(
    ("previews", "word"),
    [
        ([unit("a", packages=way("j1", others=("b",)))], "instance b runs from this venv"),
        ([unit("a", packages=way("j1")), unit("b", packages=way())], "instances a, b share this venv"),
        ([unit("a", packages=way(reason="torch is not as journal j1 left it"))], "a: torch is not as journal j1"),
        ([unit("a", packages=way("j1")), unit("b", packages=way(reason="x"))], "b: x"),
    ],
)
def test_packages_stay_with_the_reason(previews: list[dict[str, Any]], word: str) -> None:
    found = back(previews, own={"/v": ["j1"]})
    assert found["journals"] == {} and found["stop"] == [] and len(found["notes"]) == 1 and word in found["notes"][0]
    assert found["names"] == [item["instance"] for item in previews], "the revisions go back all the same"


def test_without_a_good_revision_the_runs_own_packages_are_taken_back() -> None:
    assert back([unit("a")], own={"/v": ["j1", "j2"], "/x": ["j3"]})["journals"] == {"/v": ["j2", "j1"], "/x": ["j3"]}
    assert back([], own={"/v": ["j1"]})["journals"] == {"/v": ["j1"]}


def test_what_another_run_changed_is_left_to_it_with_its_packages_and_its_ranks() -> None:
    found = back([unit("a", overtaken="another run …"), unit("b", packages=way("j1"))], own={"/v": ["j1"]})
    assert found["names"] == ["b"] and found["journals"] == {} and found["overtaken"] == {"a": "another run …"}
    facts = {"h2": {"rollout_return": {"results": [unit("big", overtaken="another run …")]}}}
    found = back([unit("big", packages=way("j1"))], facts=facts)
    assert found["names"] == [] and found["overtaken"] == {"big": "h2: another run …"}


def after(failure: dict[str, Any], found: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return _rollout.after_going_back(failure, found, SERVICES, "h1", facts)


def test_a_rank_that_was_done_and_goes_back_for_another_one_failed_with_it() -> None:
    failed = {"rollout_failure": {"task": "t", "message": "m"}}
    told = after({}, {"names": ["a", "big"]}, h1={}, h2=failed)
    assert told["message"] == "h2, a member of instance big, failed"
    assert _rollout.outcome(told, {"needed": True}, {"big": "last_good"})["state"] == "went_back"
    assert after({}, {"names": ["a", "big"]}, h1={}, h2={}) == {}, "a rollback by hand"


def test_the_summary_says_overtaken_and_what_to_do() -> None:
    begun = {"task": "Wait", "message": "revision_mismatch", "cause": {"code": "revision_mismatch"}}
    failure = after(begun, {"overtaken": {"a": "another run: revision x is current"}})
    seen = _rollout.outcome(failure, {"needed": True}, {"a": "overtaken"}, ["the packages stay"])
    assert seen["state"] == "overtaken" and seen["text"].endswith("the packages stay")
    assert seen["text"].startswith("Go back: a: another run: revision x is current; before that, Wait: revision_mism")
    assert after(begun, {"overtaken": {}}) == begun
    assert after({}, {"overtaken": {"a": "x"}})["task"] == "Go back"
    second = _rollout.failed_going_back(begun, {"task": "Go back", "message": "locked", "cause": OVERTAKEN})
    assert _rollout.outcome(second, {}, {})["state"] == "overtaken"
    fleet = {"order": ["h1"], "serial": [1], "waves": []}
    text = _rollout.rollout_text(fleet, {"h1": {"rollout_outcome": seen, "rollout_stage": "started"}})
    assert text.startswith("Rollout FAILED\n  1 OVERTAKEN by another run, left to it: h1\n    h1: Go back: a: ")
    done = _rollout.outcome({}, {"needed": True}, {}, ["the packages stay"])
    assert done == {"state": "done", "text": "the packages stay"}


def test_nothing_in_another_runs_hands_is_undrained() -> None:
    assert _rollout.serving(SERVICES, {}, {}, "proven", {}, ["a"]) == ["b", "big"]
    failure = {"task": "t"}
    assert _rollout.serving(SERVICES, {"running": ["a", "b"]}, failure, "seen", {}, ["a"]) == ["b"]
    assert _rollout.serving(SERVICES, {}, failure, "started", {"a": "overtaken", "b": "last_good"}) == ["b"]


def test_packages_alone_are_work_for_going_back() -> None:
    work = _rollout.back_work([unit("a", needs={}, packages=way("j1")), unit("b", needs={}, packages=way())])
    assert work["start"] == ["a"]


def entry(name: str, before: str | None, after: str | None, state: str = "done") -> dict[str, Any]:
    made: dict[str, Any] = {"id": name, "state": state, "names": ["nixl"], "before": {}, "after": {}}
    made["before"] = {"nixl": before} if before else {}
    made["after"] = {"nixl": after} if after else {}
    return made


def test_the_way_back_takes_as_many_journals_as_it_needs() -> None:
    entries = [entry("j3", "2", "3"), entry("j2", "1", "2"), entry("j1", None, "1")]
    present = {"nixl": "3", "torch": "t", "unrelated": "u"}
    for wanted, ids in (("3", []), ("2", ["j3"]), ("1", ["j3", "j2"])):
        assert _libraries.way_back(present, entries, {"nixl": wanted, "torch": "t"}) == (ids, "")
    assert _libraries.way_back(present, entries, {"torch": "t"}) == (["j3", "j2", "j1"], "")
    assert "no journal leads" in _libraries.way_back(present, entries, {"torch": "other"}).reason
    assert "nixl is not as journal j3" in _libraries.way_back({**present, "nixl": "4"}, entries, {"torch": "t"}).reason


def test_an_interrupted_change_left_nothing_sure_and_is_taken_back_all_the_same() -> None:
    interrupted = {**entry("j1", "1", None, "changing"), "after": None}
    assert _libraries.way_back({"nixl": "half"}, [interrupted], {"nixl": "1"}) == (["j1"], "")
    assert "does not say" in _libraries.way_back({"nixl": "2"}, [{"id": "j0", "state": "done"}], {"nixl": "1"}).reason


def test_a_damaged_revision_holds_no_journal(tmp_path: Path) -> None:
    assert _libraries.kept_for_revisions(str(tmp_path), "/v") is None
    for number, text in enumerate(
        [
            json.dumps({"venv": "/v", "journals": ["j1"]}),
            "garbage",
            json.dumps({"venv": "/v"}),
            json.dumps({"venv": "/w"}),
        ]
    ):
        folder = tmp_path / "a" / "revisions" / f"{number:016x}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(text)
    found = _libraries.kept_for_revisions(str(tmp_path), "/v")
    assert found is not None and sorted(map(sorted, found)) == [[], ["j1"]]


def test_a_named_revision_is_of_one_instance_on_one_host() -> None:
    intents = {"instances": {"a": {}, "b": {}, "big": {"hosts": HOSTS}}}
    assert list(_rollout.bare_plans(intents, "h1")) == ["a", "b", "big"]
    alone = _rollout.bare_plans(intents, "h1", "b")
    assert list(alone) == ["b"] and _rollout.bare_plans(intents, "h1", "gone") == {}
    assert _rollout.revision_refused(alone, "h1", "5f") == "" == _rollout.revision_refused({}, "h1", "5f")
    assert _rollout.revision_refused(_rollout.bare_plans(intents, "h1"), "h1", "") == ""
    told = _rollout.revision_refused(_rollout.bare_plans(intents, "h1"), "h1", "5f")
    assert told.startswith("h1: rollback_revision is 5f") and "rollback_instance to one of a, b, big" in told
    assert "over several hosts" in _rollout.revision_refused(_rollout.bare_plans(intents, "h1", "big"), "h1", "5f")
