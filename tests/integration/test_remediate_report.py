# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan first, mend later, on a real host: the saved report is applied once, and refused when the host has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def run(fleet, tmp_path_factory):
    hosts = fleet("awx", "--subnet", "10.91.9.0/24", "awx-c:ops:ip=13:env=gpu-c")
    work: Path = tmp_path_factory.mktemp("report")
    # As a survey answers: strings.
    variables = {
        "sglang_venv": "/opt/sglang/venv",
        "sglang_backends": {"mooncake": ["kv_transfer"]},
        "sglang_manage_system_packages": "true",
        "sglang_artifacts_dir": str(work),
        "sglang_metrics_textfile": "/var/lib/textfile",
    }
    (work / "vars.json").write_text(json.dumps(variables))
    hosts.shell("awx-c", "mkdir -p /var/lib/textfile")

    def play(playbook, **more):
        done = hosts.play(playbook, "-e", f"@{work / 'vars.json'}", "-e", json.dumps(more))
        return done, json.loads((work / "report.json").read_text())

    return hosts, work, play


def test_plan_first_mend_later_and_never_twice(run):
    hosts, work, play = run
    done, planned = play("probe")
    assert done.returncode == 0, done.stdout
    step = planned["next_steps"][0]
    assert (step["backend"], step["code"], step["hosts"]) == ("mooncake", "missing_system_lib", ["awx-c"])
    saved = work / "saved.json"
    saved.write_text(json.dumps(planned))

    done, after = play("remediate", sglang_apply_report=str(saved), sglang_remediate_codes="missing_system_lib")
    assert done.returncode == 0, done.stdout
    backend = after["hosts"]["awx-c"]["venvs"]["/opt/sglang/venv"]["backends"]["mooncake"]
    assert (backend["before"]["state"], backend["after"]["state"]) == ("broken", "ok")
    assert after["summary"]["text"] == "1 host: 1 ok"
    metrics = hosts.shell("awx-c", "ls -A /var/lib/textfile && cat /var/lib/textfile/*.prom")
    assert metrics.splitlines()[0] == "gpufleet_sglang_host.prom" and ".part" not in metrics
    assert 'backend="mooncake",wanted="true"} 1' in metrics

    done, _ = play("remediate", sglang_apply_report=str(saved))
    assert done.returncode != 0 and "changed=0" in done.stdout
    text = " ".join(done.stdout.split())
    assert (
        "awx-c is not as the report saw it: /opt/sglang/venv mooncake kv_transfer was broken missing_system_lib, is ok"
        in text
    )

    done, _ = play("remediate")
    assert done.returncode == 0 and "changed=0" in done.stdout
