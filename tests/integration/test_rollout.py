# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollouts over six real hosts: two run the real SGLang behind the real router, four a stand-in that says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.tools.rollouts import CPU_FLAGS, Load, ask, install_stand_ins, real_router, served_revision

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ["roll-c", "roll-d", "roll-e", "roll-f"]
VARIABLES = {
    "sglang_venv": "/opt/sglang/venv",
    "sglang_model_path": "/models/tiny-llama",
    "sglang_host": "0.0.0.0",
    "sglang_waves": [1],
    "sglang_flags": CPU_FLAGS,
    "sglang_ready_interval": 1,
    "sglang_ready_successes": 2,
    "sglang_ready_stall_timeout": 120,
}


class Rollout:
    """The hosts, and runs of site.yml over some of them."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder

    def command(self, limit, revision, playbook="site", **more):
        values = {**VARIABLES, "sglang_env_vars": {"STAND_IN_REVISION": revision}, **more}
        values["sglang_artifacts_dir"] = str(self.folder)
        extra = self.folder / "vars.json"
        extra.write_text(json.dumps(values))
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        return [program, "-i", str(self.hosts.inventory), f"gpufleet.sglang.{playbook}", "--limit", ",".join(limit),
                "-e", f"@{extra}"]  # fmt: skip

    def env(self):
        return {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_FORCE_COLOR": "0",
                "ANSIBLE_TIMEOUT": "4"}  # fmt: skip

    def run(self, limit, revision, **more):
        return subprocess.run(
            self.command(limit, revision, **more), cwd=ROOT, env=self.env(), capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip

    def serves(self, host, instance="default"):
        """The revision of the running process."""
        return served_revision(self.hosts, host, instance)

    def fails(self, host, revision):
        self.hosts.shell(host, f"echo '{revision}' > /etc/stand-in-fails")


@pytest.fixture(scope="module")
def hosts(fleet):
    return fleet("roll", "--subnet", "10.91.8.0/24", *(
        f"{name}:env=sglang:models" + (":ops" if name == "roll-d" else "") for name in ["roll-a", "roll-b", *STAND_INS]
    ))  # fmt: skip


@pytest.fixture(scope="module")
def rollout(hosts, tmp_path_factory):
    """Four hosts that run revision one."""
    install_stand_ins(hosts, STAND_INS)
    rollout = Rollout(hosts, tmp_path_factory.mktemp("rollout"))
    done = rollout.run(STAND_INS, "one", sglang_waves=[4])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return rollout


def test_verify_says_which_host_is_not_as_planned_and_changes_nothing(rollout):
    done = rollout.run(STAND_INS, "one", playbook="verify")
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout[-3000:] + done.stderr
    rollout.hosts.shell("roll-f", "systemctl stop sglang-default")
    done = rollout.run(STAND_INS, "one", playbook="verify")
    rollout.hosts.shell("roll-f", "systemctl start sglang-default")
    assert done.returncode == 2
    assert "roll-f: default" in done.stdout and "roll-c: default" not in done.stdout, done.stdout[-3000:]
    done = rollout.run(["roll-c"], "other", playbook="verify")
    assert done.returncode == 2 and "STAND_IN_REVISION" in done.stdout, done.stdout[-3000:]
    assert [rollout.serves(host) for host in STAND_INS] == ["one"] * 4


def test_a_canary_that_fails_goes_back_and_nobody_else_is_touched(rollout):
    rollout.fails("roll-c", "two")
    done = rollout.run(STAND_INS, "two", sglang_waves=[1, "50%"])
    assert done.returncode == 2
    assert "Rollout STOPPED" in done.stdout and "1 FAILED, serves its last good revision: roll-c" in done.stdout
    assert "3 untouched: roll-d, roll-e, roll-f" in done.stdout
    assert done.stdout.index("3 untouched") < done.stdout.index("TASK [Stop at a failed wave]")
    assert "the stand-in was told to fail" in done.stdout
    assert [rollout.serves(host) for host in STAND_INS] == ["one"] * 4


def test_the_third_wave_fails_and_the_next_run_goes_on_without_an_unreachable_host(rollout):
    rollout.fails("roll-c", "none")
    rollout.fails("roll-e", "three")
    done = rollout.run(STAND_INS, "three")
    assert done.returncode == 2 and "Wave 3 of 4: roll-e" in done.stdout and "Wave 4" not in done.stdout
    assert "2 done: roll-c, roll-d" in done.stdout and "1 untouched: roll-f" in done.stdout
    assert [rollout.serves(host) for host in STAND_INS] == ["three", "three", "one", "one"]

    rollout.fails("roll-e", "none")
    away = rollout.folder / "away.yml"
    away.write_text("sglang:\n  hosts:\n    roll-z:\n      ansible_host: 10.91.8.99\n")
    command = rollout.command([*STAND_INS, "roll-z"], "three", sglang_on_unreachable="skip")
    done = subprocess.run(
        [*command, "-i", str(away)], cwd=ROOT, env=rollout.env(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 4, "Ansible's own status for an unreachable host"
    assert "2 done: roll-e, roll-f" in done.stdout and "2 as it should be: roll-c, roll-d" in done.stdout
    assert "1 left out: roll-z" in done.stdout
    assert [rollout.serves(host) for host in STAND_INS] == ["three"] * 4


def hook(rollout, name, script):
    """A task file of the user's that runs a script on the controller."""
    program = rollout.folder / f"{name}.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    tasks = rollout.folder / f"{name}.yml"
    tasks.write_text(
        f"---\n- name: {name}\n  ansible.builtin.command: {program} {{{{ inventory_hostname }}}}\n"
        "  delegate_to: localhost\n  vars:\n    ansible_connection: local\n"
    )
    return str(tasks)


def test_a_host_that_goes_away_in_its_wave_stops_the_rollout(rollout):
    shell = f"{sys.executable} {ROOT}/tests/hosts/hosts.py exec roll/$1"
    stop = "systemctl stop ssh.socket ssh; pkill sshd; true"
    lose = hook(rollout, "lose", f"test $1 != roll-d || {shell} sh -c '{stop}'")
    try:
        done = rollout.run(STAND_INS, "four", sglang_drain_tasks=lose)
    finally:
        rollout.hosts.shell("roll-d", "systemctl start ssh")
    assert done.returncode == 2 and "1 LOST, cannot be reached: roll-d" in done.stdout
    assert "1 done: roll-c" in done.stdout and "2 untouched: roll-e, roll-f" in done.stdout
    assert rollout.serves("roll-d") == "three"


def test_after_a_killed_controller_the_next_run_leaves_nothing_drained(rollout):
    out, hang = rollout.folder / "out", rollout.folder / "hang"
    out.mkdir()
    hang.touch()
    drain = hook(rollout, "drain", f"touch {out}/$1")
    undrain = hook(rollout, "undrain", f"test ! -e {hang} || {{ touch {out}/$1.hangs; exec sleep 60; }}\nrm {out}/$1")
    hooks = {"sglang_drain_tasks": drain, "sglang_undrain_tasks": undrain}
    with subprocess.Popen(
        rollout.command(["roll-d"], "five", **hooks), cwd=ROOT, env=rollout.env(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as controller:  # fmt: skip
        limit = time.monotonic() + 120
        while not (out / "roll-d.hangs").exists() and time.monotonic() < limit and controller.poll() is None:
            time.sleep(0.2)
        os.killpg(controller.pid, signal.SIGKILL)
    assert (out / "roll-d.hangs").exists() and (out / "roll-d").exists(), "drained, and never undrained"
    hang.unlink()
    done = rollout.run(["roll-d"], "five", **hooks)
    assert done.returncode == 0 and "1 as it should be: roll-d" in done.stdout
    assert not (out / "roll-d").exists() and rollout.serves("roll-d") == "five"


BIG = {
    "sglang_instances": {
        "big": {
            "hosts": ["roll-e", "roll-f"],
            "rendezvous": {"address": "10.91.8.15", "port": 20000},
            "parallelism": "tp2",
            "port": 30001,
        }
    }
}


def test_a_limit_that_covers_a_part_of_an_instance_is_refused(rollout):
    done = rollout.run(["roll-e"], "six", **BIG)
    assert done.returncode == 2 and "limit_covers_part_of_instance" in done.stdout and "roll-f" in done.stdout
    assert "Wave 1" not in done.stdout


def test_two_hosts_start_and_go_back_as_one(rollout):
    """The stand-in's ranks: SGLang's own CPU build is not run over two hosts here."""
    done = rollout.run(["roll-e", "roll-f"], "six", **BIG)
    assert done.returncode == 0 and "2 done: roll-e, roll-f" in done.stdout, done.stdout[-3000:]
    assert "rank 1 is alive" in done.stdout
    rollout.fails("roll-f", "seven")
    done = rollout.run(["roll-e", "roll-f"], "seven", sglang_ready_stall_timeout=20, **BIG)
    assert done.returncode == 2 and "2 FAILED, serves its last good revision: roll-e, roll-f" in done.stdout
    assert "roll-f: Wait until it serves" in done.stdout and "the stand-in was told to fail" in done.stdout
    assert [rollout.serves(host, "big") for host in ("roll-e", "roll-f")] == ["six", "six"]


@pytest.mark.slow
def test_going_back_by_hand_to_a_named_revision(rollout):
    def revision():
        return rollout.hosts.shell("roll-c", "cat /var/lib/gpufleet-sglang/instances/default/current").strip()

    assert rollout.run(["roll-c"], "eight").returncode == 0
    before = revision()
    assert rollout.run(["roll-c"], "nine").returncode == 0 and rollout.serves("roll-c") == "nine"
    command = [*rollout.command(["roll-c"], "nine", playbook="rollback"), "-e", f"rollback_revision={before}"]
    done = subprocess.run(command, cwd=ROOT, env=rollout.env(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "1 done: roll-c" in done.stdout, done.stdout[-3000:] + done.stderr
    assert rollout.serves("roll-c") == "eight"


ROUTER = "http://10.91.8.1:31900"


def workers_of_router():
    return ask(ROUTER + "/workers")["workers"]


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    with real_router(tmp_path_factory.mktemp("router"), "10.91.8.1", 31900):
        yield workers_of_router


@pytest.mark.slow
def test_a_rolling_restart_behind_the_real_router_loses_no_request(hosts, router, tmp_path):
    rollout, workers = Rollout(hosts, tmp_path), ["roll-a", "roll-b"]
    behind = {"sglang_router": {"url": ROUTER}}
    done = rollout.run(workers, "one", sglang_waves=[2], **behind)
    assert done.returncode == 0, done.stdout[-3000:]
    urls = ["http://10.91.8.11:30000", "http://10.91.8.12:30000"]
    assert sorted(row["url"] for row in router()) == urls, "added after they were proven"
    with Load(ROUTER, 3) as load:
        done = rollout.run(workers, "two", **behind)
    assert done.returncode == 0 and "2 done: roll-a, roll-b" in done.stdout
    assert load.bad == [] and load.good > 20
    assert [rollout.serves(host) for host in workers] == ["two", "two"]
    assert sorted(row["url"] for row in router() if row["is_healthy"]) == urls

    # What a controller leaves that is killed after the removal: the next run has nothing to change, and adds it.
    gone = next(row["id"] for row in router() if row["url"] == urls[0])
    urllib.request.urlopen(urllib.request.Request(f"{ROUTER}/workers/{gone}", method="DELETE"), timeout=30).close()
    done = rollout.run(workers, "two", **behind)
    assert done.returncode == 0 and "2 as it should be: roll-a, roll-b" in done.stdout
    assert sorted(row["url"] for row in router()) == urls
