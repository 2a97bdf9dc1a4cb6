# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks that wait in one task of a real ansible-playbook, each in a worker of its own; processes stand for ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: all
  gather_facts: false
  strategy: "{{ strategy }}"
  tasks:
    - name: Wait
      gpufleet.sglang.service_ready:
        instance: big
        foreground_pid: "{{ pids[inventory_hostname] }}"
        log_file: "{{ folder }}/{{ inventory_hostname }}.log"
        port: 1
        node_rank: "{{ ['a', 'b'].index(inventory_hostname) }}"
        members: [a, b]
        timeout: "{{ patience }}"
        stall_timeout: "{{ patience }}"
      ignore_errors: true  # how it fails is what is looked at
      register: waited

    - name: Keep what was said
      ansible.builtin.copy:
        content: "{{ {'msg': waited.msg | default(''), 'ready': waited.ready, 'followed': followed} | to_json }}"
        dest: "{{ folder }}/{{ inventory_hostname }}.json"
      vars:
        followed: "{{ waited.followed | default({}) }}"
"""
UP = "[2026-11-30 20:00:00 TP1] max_total_num_tokens=4096, context_len=2048\n"


@pytest.fixture
def wait(tmp_path):
    """``wait(pids, logs, …)`` → what each rank's wait said."""

    def run(pids, logs, patience, strategy="linear", forks=5):
        (tmp_path / "play.yml").write_text(PLAY)
        for host in "ab":
            (tmp_path / f"{host}.log").write_text(logs.get(host, ""))
        values = {"pids": pids, "patience": patience, "strategy": strategy, "folder": str(tmp_path)}
        values.update(ansible_connection="local", ansible_python_interpreter=sys.executable)
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "a,b,", "--forks", str(forks),
             str(tmp_path / "play.yml"), "-e", json.dumps(values)],
            capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
            env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_FORCE_COLOR": "0"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return {host: json.loads((tmp_path / f"{host}.json").read_text()) for host in "ab"}

    return run


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running.pid
        running.kill()


@pytest.fixture
def ended():
    with subprocess.Popen(["true"]) as running:
        running.wait()
    return running.pid


def test_a_dead_rank_ends_the_wait_of_one_that_would_go_on(wait, process, ended):
    said = wait({"a": process, "b": ended}, {"b": "ValueError: no such thing\n"}, patience=3000)
    assert "rank 1 on b is dead" in said["a"]["msg"] and said["a"]["followed"]["host"] == "b"
    assert not said["b"]["ready"] and not said["b"]["followed"]


@pytest.mark.slow
def test_a_rank_that_is_up_does_not_end_well_where_rank_0_does_not(wait, process):
    said = wait({"a": process, "b": process}, {"b": UP}, patience=12)
    assert "rank 0 on a is not ready" in said["b"]["msg"] and not said["b"]["ready"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "forks"), [("free", 5), ("linear", 1)])
def test_where_ranks_cannot_wait_together_each_waits_for_itself(wait, process, strategy, forks):
    """No rank waits for one that cannot run beside it."""
    said = wait({"a": process, "b": process}, {"b": UP}, patience=12, strategy=strategy, forks=forks)
    assert not said["a"]["ready"] and not said["a"]["followed"]
    if strategy == "linear":
        assert said["b"]["followed"]["host"] == "a", "rank 0 has ended before rank 1 begins"
