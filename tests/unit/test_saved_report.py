# SPDX-License-Identifier: GPL-3.0-or-later
"""Applying a saved report: only to hosts that are as they were seen, and only what was chosen."""

from __future__ import annotations

import copy
import json

import pytest
import report_support as fake
from ansible_collections.gpufleet.sglang.plugins.module_utils import _report, _saved_report

BROKEN = fake.broken("mooncake", **fake.MISSING)
PLAN = fake.plan(remedies=[fake.remedy(), fake.remedy("deep_ep", "a2a", code="torch_abi_mismatch", summary="rebuild")])


def saved(seen=BROKEN, plan=PLAN):
    facts = {"a": fake.facts(seen, plan), "gone": {}}
    return json.loads(json.dumps(_report.document(_report.records(facts, facts))))


def changed(path, value):
    now = copy.deepcopy(BROKEN)
    target = now
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return {fake.VENV: now}


def test_an_unchanged_host_is_accepted():
    assert _saved_report.differences(saved(), "a", {fake.VENV: BROKEN}, {"default": PLAN}) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("torch", "version"), "2.15.0", "torch was 2.14.1+cu130, is 2.15.0"),
        (("sglang", "version"), "0.5.24", "sglang was 0.5.23, is 0.5.24"),
        (
            ("backends", "mooncake", "uses", "kv_transfer", "state"),
            "ok",
            "mooncake kv_transfer was broken missing_system_lib",
        ),
        (("backends", "nixl", "distributions"), [], "nixl distributions was nixl-cu13 1.5.1, is none"),
        (("gpus", "driver"), "600", "driver was 580.95.05, is 600"),
        (("gpus", "devices"), [], "gpus was 8 x NVIDIA H200"),
        (("fabric", "class"), "pcie_only", "fabric was nvlink_full"),
    ],
)
def test_a_change_that_plans_rest_on_is_refused_and_named(path, value, said):
    found = _saved_report.differences(saved(), "a", changed(path, value), {"default": PLAN})
    assert len(found) == 1 and said in found[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("backends", "nixl", "level"), "static"),
        (("backends", "nixl", "message"), "prose"),
        (("instances", "default", "service", "state"), "inactive"),
        (("gpus", "devices", 0, "memory_used_mib"), 9),
    ],
)
def test_what_changes_while_a_host_works_is_no_change(path, value):
    assert _saved_report.differences(saved(), "a", changed(path, value), {"default": PLAN}) == []


def test_another_plan_is_refused_although_the_host_is_the_same():
    other = {**PLAN, "argv": [*PLAN["argv"], "--ep-size", "8"], "remedies": PLAN["remedies"][:1]}
    found = _saved_report.differences(saved(), "a", {fake.VENV: BROKEN}, {"default": other})
    assert found == [
        "default: the report's remedy 'rebuild' is no longer planned",
        "default: the planned command line is another",
    ]


@pytest.mark.parametrize(("host", "said"), [("new", "not in the report"), ("gone", "not probed")])
def test_a_host_that_the_report_did_not_see_is_refused(host, said):
    assert said in _saved_report.differences(saved(), host, {fake.VENV: BROKEN}, {"default": PLAN})[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not a report"),
        ('{"schema": 7, "hosts": {}, "plans": {}}', "has schema 7, this version reads 1"),
    ],
)
def test_another_file_is_told_with_the_remedy(text, said):
    with pytest.raises(_saved_report.ReportError, match=said):
        _saved_report.load(text, "x.json")


PROBES = {fake.VENV: BROKEN}


def test_only_chosen_remedies_stay_and_their_assumptions():
    plan = fake.plan(remedies=[fake.remedy("nixl", code="not_installed"), fake.remedy()])
    row = _saved_report.narrow({"default": plan}, PROBES, backends=["nixl"])["default"]
    assert [r["backend"] for r in row["remedies"]] == ["nixl"]
    assert [a["backend"] for a in row["assumes"]] == ["nixl"]


def test_leaving_out_what_the_service_needs_is_refused():
    row = _saved_report.narrow({"default": PLAN}, PROBES, codes=["missing_system_lib"])["default"]
    assert [r["code"] for r in row["rejections"]] == ["remedy_left_out"]
    assert "torch_abi_mismatch" in row["rejections"][0]["suggestion"]


def test_a_plan_without_a_chosen_remedy_is_left_alone_and_cannot_stop_the_run():
    plan = fake.plan(rejections=[{"code": "gpus_lost", "message": "m"}])
    row = _saved_report.narrow({"default": plan}, PROBES)["default"]
    assert row["service"] is False and row["rejections"] == [] and row["left_alone"]["service"] is True
    facts = fake.facts(planned=row)
    entry = _report.document(_report.records({"a": facts}, {"a": facts}))["hosts"]["a"]
    assert entry["status"] == "failed" and entry["instances"]["default"]["rejected"][0]["code"] == "gpus_lost"


@pytest.mark.parametrize(("state", "serves"), [("absent", False), ("failed", True), ("active", True)])
def test_a_service_that_was_never_deployed_is_not_started(state, serves):
    probes = changed(("instances", "default", "service", "state"), state)
    row = _saved_report.narrow({"default": PLAN}, probes)["default"]
    assert row["service"] is serves and len(row["remedies"]) == 2


def test_a_neighbour_in_the_mended_venv_is_stopped_with_it():
    probes = changed(("instances", "other"), {"service": {"state": "active"}})
    rows = _saved_report.narrow({"default": PLAN, "other": fake.plan()}, probes)
    assert rows["other"]["service"] is True


@pytest.mark.parametrize(
    "value",
    ["missing_system_lib, not_installed", "missing_system_lib not_installed", ["missing_system_lib", "not_installed"]],
)
def test_choices_of_surveys_and_lists(value):
    assert _saved_report.choices(value, "v", {"missing_system_lib", "not_installed"}) == [
        "missing_system_lib",
        "not_installed",
    ]


def test_a_wrong_choice_names_the_near_one():
    with pytest.raises(
        ValueError, match="sglang_remediate_codes: 'not_instaled' is not known; did you mean not_installed"
    ):
        _saved_report.choices("not_instaled", "sglang_remediate_codes", {"not_installed"})
