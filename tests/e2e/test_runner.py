# SPDX-License-Identifier: GPL-3.0-or-later
"""The project under ansible-runner, the way AWX starts it.

A copied project, extra vars as strings, events read back.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import ansible_runner
import pytest

ROOT = Path(__file__).parents[2]
SECRET = "sk-9d1f-never-shown"
LEFT_OUT = ("tests/", "molecule/", "docs/", "changelogs/")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A finished probe of two hosts: this machine with an empty venv, and one that does not answer."""
    data = tmp_path_factory.mktemp("job")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in names:
        source = ROOT / name
        if name and not name.startswith(LEFT_OUT) and (source.is_file() or source.is_symlink()):
            target = data / "project" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    venv.create(data / "venv", with_pip=False)
    for folder in ("env", "inventory"):
        (data / folder).mkdir()
    inventory = {
        "sglang": {
            "hosts": {
                "here": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
                "away": {"ansible_host": "127.0.0.1", "ansible_port": 9, "ansible_connection": "ssh"},
            },
            "vars": {"ansible_become": False, "sglang_venv": str(data / "venv"), "sglang_model_path": "/models/none"},
        }
    }
    (data / "inventory/hosts.json").write_text(json.dumps(inventory))
    # A survey's answers and a credential's injected values, as AWX hands them over.
    extra = {
        "sglang_manage_system_packages": "true",
        "sglang_gather_level": "static",
        "sglang_import_timeout": "60",
        "sglang_waves": "1, 50%",
        "sglang_artifacts_dir": str(data / "out"),
        "sglang_secrets": {"api_key": SECRET},
    }
    (data / "env/extravars").write_text(json.dumps(extra))
    (data / "env/envvars").write_text(json.dumps({"ANSIBLE_SSH_TIMEOUT": "2", "ANSIBLE_FORCE_COLOR": "true"}))
    (data / "env/settings").write_text(json.dumps({"idle_timeout": 120, "job_timeout": 300}))
    before = {path for path in (data / "project").rglob("*") if "__pycache__" not in path.parts}
    runner = ansible_runner.run(private_data_dir=str(data), playbook="playbooks/probe.yml", quiet=True, verbosity=1)
    after = {path for path in (data / "project").rglob("*") if "__pycache__" not in path.parts}
    return data, runner, list(runner.events), after - before


def test_progress_is_visible_while_it_runs(job):
    _, runner, events, _ = job
    kinds = [event["event"] for event in events]
    assert kinds.count("runner_on_ok") > 8 and kinds[-1] == "playbook_on_stats"
    assert [event["counter"] for event in events] == sorted(event["counter"] for event in events)
    assert any(event["event"] == "runner_on_unreachable" and event["event_data"]["host"] == "away" for event in events)
    assert runner.stats["ok"]["here"] > 8 and runner.stats["dark"] == {"away": 1}


def test_the_table_is_in_the_output_of_the_job(job):
    _, _, events, _ = job
    text = "".join(event["stdout"] for event in events)
    assert "WHAT TO DO NEXT" in text and "2 hosts:" in text
    assert any(line.startswith("here") and "deep_ep" in line for line in text.splitlines())
    assert "not probed" in text


def test_artifacts_come_by_set_stats(job):
    data, _, events, _ = job
    artifacts = events[-1]["event_data"]["artifact_data"]
    assert artifacts["sglang_report"]["summary"]["hosts"] == 2
    assert artifacts["sglang_report"]["summary"]["unreachable"] == 1
    assert artifacts["sglang_report"]["files"] == [str(data / "out/report.json"), str(data / "out/report.html")]


def test_no_secret_is_in_any_event_or_file_of_the_job(job):
    data, _, events, _ = job
    assert SECRET in (data / "env/extravars").read_text()
    assert SECRET not in json.dumps(events)
    for folder in ("artifacts", "out", "project"):
        for path in (data / folder).rglob("*"):
            assert not path.is_file() or path.is_symlink() or SECRET.encode() not in path.read_bytes(), path


def test_strings_of_surveys_did_not_become_problems(job):
    data, _, _, _ = job
    report = json.loads((data / "out/report.json").read_text())
    rejected = [row for item in report["hosts"]["here"]["instances"].values() for row in item["rejected"]]
    assert [
        row
        for row in rejected
        if str(row.get("variable")).startswith(
            ("sglang_waves", "sglang_import", "sglang_gather", "sglang_manage", "sglang_secrets")
        )
    ] == []


def test_the_project_folder_stays_as_it_was(job):
    assert job[3] == set()
