# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of a host, and that dashboard and rules ask for metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import report_support as fake
import yaml
from ansible_collections.gpufleet.sglang.plugins.module_utils import _metrics, _report

SAMPLE = re.compile(r'(gpufleet_sglang_[a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)+\})? (\d+)')
MONITORING = Path("extensions/monitoring")


def entry(**facts):
    made = fake.facts(**facts)
    return _report.document(_report.records({"a": made}, {"a": made}))["hosts"]["a"]


def parsed(text):
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    return samples


def test_a_verified_host_has_both_files_and_a_probed_one_keeps_its_verification():
    files = _metrics.metrics(entry(ready_results=fake.ready()), 1700000000)
    assert set(files) == {_metrics.HOST_FILE, _metrics.SERVICE_FILE}
    assert 'gpufleet_sglang_service_ready{sglang_instance="default"} 1' in files[_metrics.SERVICE_FILE]
    assert (
        'gpufleet_sglang_verify_timestamp_seconds{sglang_instance="default"} 1700000000' in files[_metrics.SERVICE_FILE]
    )
    assert set(_metrics.metrics(entry(), 1700000000)) == {_metrics.HOST_FILE}
    for text in files.values():
        parsed(text)


def test_a_broken_wanted_backend_and_a_dead_service_read_zero():
    files = _metrics.metrics(
        entry(seen=fake.broken("mooncake", **fake.MISSING), ready_results=fake.ready("failed", code="oom")), 5
    )
    assert 'backend="mooncake",wanted="true"} 0' in files[_metrics.HOST_FILE]
    assert 'backend="mooncake",state="broken",code="missing_system_lib"} 1' in files[_metrics.HOST_FILE]
    assert 'state="failed",code="oom"} 1' in files[_metrics.SERVICE_FILE]
    assert 'service_ready{sglang_instance="default"} 0' in files[_metrics.SERVICE_FILE]


def test_drift_is_told_only_when_units_were_compared():
    def text(**more):
        return _metrics.metrics(entry(ready_results=fake.ready(), **more), 5)[_metrics.SERVICE_FILE]

    preview = {"results": [{"instance": "default", "current": "aa", "last_good": "bb", "needs": {"write": True}}]}
    assert "service_drift" not in text()
    assert 'service_drift{sglang_instance="default"} 1' in text(rollout_preview=preview)
    assert 'revision="aa",last_good="bb"' in text(rollout_preview=preview)


def test_labels_are_escaped():
    bad = fake.probe(torch='2"\\\n')
    parsed(_metrics.metrics(entry(seen=bad), 5)[_metrics.HOST_FILE])


def test_unreached_hosts_have_no_metrics():
    made = _report.document(_report.records({"a": {}}, {"a": {}}))["hosts"]["a"]
    assert _metrics.metrics(made, 5) == {}


def test_dashboard_and_rules_use_metrics_that_exist_and_docs_name_them_all():
    known = {_metrics.PREFIX + name for name in _metrics.METRICS}
    for path in (MONITORING / "grafana-dashboard.json", MONITORING / "alert-rules.yml"):
        used = set(re.findall(r"gpufleet_sglang_[a-z_]+", path.read_text()))
        assert used and used <= known, (path, used - known)
    page = Path("docs/metrics.md").read_text()
    assert all(f"`{name}`" in page for name in known)


def test_every_alert_says_what_to_do():
    rules = [r for g in yaml.safe_load((MONITORING / "alert-rules.yml").read_text())["groups"] for r in g["rules"]]
    assert rules and all(
        r["annotations"]["summary"] and r["annotations"]["action"] and r["labels"]["severity"] for r in rules
    )
