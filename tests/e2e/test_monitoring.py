# SPDX-License-Identifier: GPL-3.0-or-later
"""promtool judges the metrics of a host, the alert rules and the queries of the dashboard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import report_support as fake
import yaml
from ansible_collections.gpufleet.sglang.plugins.module_utils import _metrics, _report

MONITORING = Path(__file__).parents[2] / "extensions/monitoring"


@pytest.fixture(scope="module")
def promtool():
    if not shutil.which("promtool"):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            pytest.fail("needs promtool (apt-get install prometheus)")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(
            ["apt-get", "install", "-yqq", "--no-install-recommends", "prometheus"], check=True, env=environment
        )

    def call(*args, **more):
        return subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, check=False, **more)

    return call


def test_metrics_of_every_kind_of_host_pass(promtool):
    hosts = fake.fleet(100)
    entries = _report.document(_report.records(hosts, hosts))["hosts"].values()
    for text in {text for entry in entries for text in _metrics.metrics(entry, 1700000000).values()}:
        found = promtool("check", "metrics", input=text)
        # promtool has opinions on names such as *_info and *_timestamp; only errors count.
        assert found.returncode in (0, 3) and "error" not in found.stderr, found.stderr


def test_rules_are_valid_and_fire_when_they_should(promtool):
    for args in (
        ("check", "rules", MONITORING / "alert-rules.yml"),
        ("test", "rules", MONITORING / "alert-rules.test.yml"),
    ):
        found = promtool(*args)
        assert found.returncode == 0, found.stdout + found.stderr


def test_every_query_of_the_dashboard_parses(promtool, tmp_path):
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    found = promtool("check", "rules", path)
    assert found.returncode == 0 and len(queries) > 10, found.stderr
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
