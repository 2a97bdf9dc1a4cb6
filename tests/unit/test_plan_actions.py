# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""launch_plan, fleet_plan and the filters in a real ansible-playbook run, without any connection."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.unit.plan_support import FIXTURES, probe

ROOT = FIXTURES.parent.parent
PLAY = """
- hosts: sglang
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact:
        sglang_resolved: "{{ hostvars[inventory_hostname] | gpufleet.sglang.intents }}"
    - gpufleet.sglang.launch_plan:
        intent: "{{ sglang_resolved.instances[item] | default({}) }}"
        probe: "{{ lookup('ansible.builtin.file', probe_file) | from_json }}"
        backends: "{{ sglang_resolved.backends }}"
        settings: "{{ sglang_resolved.settings }}"
        problems: "{{ sglang_resolved.problems }}"
        running: "{{ running | default(omit) }}"
      loop: "{{ sglang_resolved.instances | list }}"
      register: planned
    - ansible.builtin.set_fact:
        probe_plans: "{{ {planned.results[0].item: planned.results[0].plan} }}"
    - SHOW
- hosts: sglang
  gather_facts: false
  tasks:
    - gpufleet.sglang.fleet_plan:
        group: sglang
      register: judged
    - ansible.builtin.copy:
        dest: "{{ out }}"
        content: "{{ {'fleet': judged.fleet, 'plan': probe_plans.default, 'drift': drift} | to_json }}"
      vars:
        drift: "{{ planned.results[0].drift | default([]) }}"
      delegate_to: localhost
      connection: local
      run_once: true
"""


def show_task() -> str:
    """The task of the real playbook that shows the plans."""
    tasks = yaml.safe_load((ROOT / "playbooks" / "probe.yml").read_text())[0]["tasks"]
    return json.dumps(next(task for task in tasks if task["name"] == "Show the plans"))


def play(
    folder: pathlib.Path, variables: dict[str, Any], *arguments: str, service: Any = None
) -> tuple[subprocess.CompletedProcess[str], Any]:
    (folder / "probe.json").write_text(json.dumps(probe("pcie-rtxpro6000", service=service)))
    (folder / "play.yml").write_text(PLAY.replace("SHOW", show_task()))
    hosts = {name: {"ansible_host": "192.0.2.1"} for name in ("gpu-01", "gpu-02", "gpu-03")}
    out = folder / "out.json"
    given = {"sglang_venv": "/opt/sglang/venv", "sglang_model_path": "/models/Kimi-K2.6", **variables}
    given.update(probe_file=str(folder / "probe.json"), out=str(out), ansible_python_interpreter=sys.executable)
    (folder / "hosts.json").write_text(json.dumps({"sglang": {"hosts": hosts, "vars": given}}))
    ran = subprocess.run(
        ["ansible-playbook", "-i", str(folder / "hosts.json"), str(folder / "play.yml"), *arguments],
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_NOCOLOR": "1",
            "PATH": path(),
        },
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        timeout=180,
    )
    return ran, json.loads(out.read_text()) if out.exists() else None


def path() -> str:
    return os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_strings_of_the_command_line_and_the_waves(tmp_path: pathlib.Path, check: tuple[str, ...]) -> None:
    ran, out = play(
        tmp_path,
        {"sglang_secrets": {"api_key": "4711-secret"}, "running": {"argv": ["/old/python", "--tp-size", "4"]}},
        *("-e", "sglang_port=31000", "-e", "sglang_show_plan=true", "-e", '{"sglang_parallelism": "ep4"}'),
        *(
            "-e",
            '{"sglang_waves": "[1, 2]"}',
            "-e",
            '{"sglang_flags": {"max_running_requests": 256}}',
            "--diff",
            *check,
        ),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 expert groups of TP 2 on 8 GPUs" in ran.stdout
    assert "4711-secret" not in ran.stdout + ran.stderr
    assert "-tp_size: 4" in ran.stdout and "+tp_size: 8" in ran.stdout
    if not check:
        assert out["fleet"]["serial"] == [1, 2]
        assert out["fleet"]["order"] == ["gpu-01", "gpu-02", "gpu-03"]
        assert out["plan"]["argv"][-4:] == ["--port", "31000", "--max-running-requests", "256"]
        assert out["plan"]["secret_flags"] == ["api_key"]
        assert {"setting": "tp_size", "planned": "8", "running": "4", "source": "argv"} in out["drift"]


def test_the_drift_of_a_running_service_is_shown_from_what_the_probe_saw(tmp_path: pathlib.Path) -> None:
    running = ["/opt/sglang/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/Kimi-K2.6"]
    service = {"state": "active", "main_pid": 4242, "argv": [*running, "--tp", "4"]}
    ran, out = play(tmp_path, {}, "--diff", "--limit", "gpu-01", service=service)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "gpu-01: drift of default" in ran.stdout and "-tp_size: 4" in ran.stdout
    assert "Decided" not in ran.stdout
    assert {"setting": "tp_size", "planned": "8", "running": "4", "source": "argv"} in out["drift"]


def test_a_misspelt_variable_stops_the_run_in_one_message(tmp_path: pathlib.Path) -> None:
    ran, out = play(tmp_path, {"sglang_prot": 31000, "sglang_flags": {"tp_size": 3}})
    assert ran.returncode != 0
    assert out is None
    assert ran.stdout.count("fatal:") == 1
    for words in ("gpu-01, gpu-02, gpu-03", "sglang_prot", "sglang_port", "64 % 3 = 1"):
        assert words in ran.stdout


def test_a_limit_that_covers_a_part_of_an_instance(tmp_path: pathlib.Path) -> None:
    variables = {
        "sglang_hosts": ["gpu-01", "gpu-02", "gpu-03"],
        "sglang_rendezvous": {"address": "192.0.2.1", "port": 20000},
    }
    ran, out = play(tmp_path, {**variables, "sglang_flags": {"tp_size": 8, "pp_size": 3}}, "--limit", "gpu-01,gpu-02")
    assert ran.returncode != 0
    assert out is None
    assert "limit_covers_part_of_instance" in ran.stdout and "gpu-03" in ran.stdout
