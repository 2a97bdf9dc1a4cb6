# SPDX-License-Identifier: GPL-3.0-or-later
"""Cool-down and cap of event-driven runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

PATH = Path("extensions/eda/plugins/event_filter/budget.py")
SPEC = importlib.util.spec_from_file_location("budget", PATH)
budget = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(budget)

HOUR = 3600


def alert(host, name="SGLangNotReady", status="firing"):
    return {"status": status, "labels": {"alertname": name, "instance": host}}


def ask(state, now, *hosts, monkeypatch, **more):
    monkeypatch.setattr(budget.time, "time", lambda: now)
    event = {"payload": {"alerts": [alert(host) for host in hosts]}, "meta": {"hosts": ["all"]}}
    return budget.main(event, events=["SGLangNotReady"], state_file=str(state), **more)


def test_a_host_runs_once_in_its_cooldown_also_after_a_restart(tmp_path, monkeypatch):
    state = tmp_path / "s/events.json"
    assert ask(state, 1000, "gpu-1:9100", monkeypatch=monkeypatch)["meta"]["hosts"] == ["gpu-1"]
    held = ask(state, 1000 + HOUR - 1, "gpu-1:9100", monkeypatch=monkeypatch)
    assert held["sglang"] == {"hosts": [], "limit": "", "held": "gpu-1: remediated 59 min ago, cool-down is 60 min"}
    assert "hosts" not in held["meta"]
    assert ask(state, 1000 + HOUR, "gpu-1", monkeypatch=monkeypatch)["sglang"]["limit"] == "gpu-1"


def test_the_cap_counts_hosts_within_a_day_and_not_the_same_host_twice(tmp_path, monkeypatch):
    state = tmp_path / "events.json"
    first = ask(state, 0, "a", "b", "c", monkeypatch=monkeypatch, hosts_per_day=2)
    assert first["sglang"]["limit"] == "a,b" and first["sglang"]["held"] == "c: 2 hosts within 24 h, the cap is 2"
    assert ask(state, 2 * HOUR, "a", "c", monkeypatch=monkeypatch, hosts_per_day=2)["sglang"]["limit"] == "a"
    assert ask(state, 25 * HOUR, "c", monkeypatch=monkeypatch, hosts_per_day=2)["sglang"]["limit"] == "c"


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from("abcdefgh")), max_size=60),
    st.integers(0, 3),
    st.integers(1, 30 * HOUR),
)
def test_no_history_breaks_the_cap_or_the_cooldown(arrivals, cap, cooldown):
    runs = []
    for now, host in sorted(arrivals):
        allowed, held = budget.judge([host], runs, now, cooldown, cap, ".*")
        assert set(allowed) | set(held) == {host}
        runs += [[now, name] for name in allowed]
    for now, _ in runs:
        assert len({host for at, host in runs if now - budget.DAY < at <= now}) <= cap
    for host in "abcdefgh":
        times = [at for at, name in runs if name == host]
        assert all(later - sooner >= cooldown for sooner, later in zip(times, times[1:]))


@pytest.mark.parametrize(
    "host",
    [
        "all",
        "sglang",
        "gpu-*",
        "!gpu-1",
        "@/etc/hosts",
        "a,b",
        "",
        "gpu-1\n",
        "~.*",
        "a:b",
        "a&b",
        "-e x",
        "[0-9]",
        "x" * 400,
    ],
)
def test_nothing_but_the_name_of_one_host_becomes_a_limit(tmp_path, monkeypatch, host):
    found = ask(tmp_path / "e.json", 5, host, monkeypatch=monkeypatch)
    assert found["sglang"]["limit"] == "" and "not the name of a host" in found["sglang"]["held"]
    assert "hosts" not in found["meta"]


def test_a_pattern_keeps_other_machines_out(tmp_path, monkeypatch):
    found = ask(tmp_path / "e.json", 5, "db-1", "gpu-1", monkeypatch=monkeypatch, host_pattern=r"gpu-\d+")
    assert found["sglang"]["limit"] == "gpu-1"


@pytest.mark.parametrize(
    ("payload", "hosts"),
    [
        ({"alerts": [alert("a", status="resolved")]}, []),
        ({"alerts": [alert("a", name="Other")]}, []),
        ({"alerts": [alert("a"), alert("a"), alert("b:1")]}, ["a", "b"]),
        ({"event": "drift", "host": "a"}, ["a"]),
        ({"event": "something", "host": "a"}, []),
        ({"alerts": "x"}, []),
        ({"alerts": [{"status": "firing", "labels": None}, None]}, []),
        ("text", []),
        (None, []),
    ],
)
def test_payloads(payload, hosts):
    assert budget.named_hosts(payload, ("SGLangNotReady", "drift"), "instance") == hosts


@pytest.mark.parametrize("content", ["", "{}", '{"runs": 5}', "not json", '{"runs": [[1]]}'])
def test_an_unusable_record_lets_nothing_through(tmp_path, monkeypatch, content):
    state = tmp_path / "e.json"
    state.write_text(content)
    found = ask(state, 5, "a", monkeypatch=monkeypatch)
    assert found["sglang"]["limit"] == "" and "is not usable" in found["sglang"]["held"]
    assert state.read_text() == content


def test_the_record_stays_small(tmp_path, monkeypatch):
    state = tmp_path / "e.json"
    for day in range(5):
        ask(state, day * 25 * HOUR, "a", monkeypatch=monkeypatch)
    assert len(json.loads(state.read_text())["runs"]) == 1


def test_rulebooks_count_the_alerts_that_the_rules_raise():
    rules = yaml.safe_load(Path("extensions/monitoring/alert-rules.yml").read_text())
    raised = {
        rule["alert"]
        for group in rules["groups"]
        for rule in group["rules"]
        if rule["labels"].get("remediate") == "auto"
    }
    for path in Path("extensions/eda/rulebooks").glob("*.yml"):
        settings = yaml.safe_load(path.read_text())[0]["sources"][0]["filters"][0]["gpufleet.sglang.budget"]
        assert {name for name in settings["events"] if name.startswith("SGLang")} == raised
