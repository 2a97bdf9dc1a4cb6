# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prefill and decode on four hosts: the real SGLang, Mooncake over TCP and the real router; then waves of stand-ins."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tools.rollouts import (
    CPU_FLAGS,
    TOKENS,
    Load,
    Threads,
    ask,
    generate,
    install_stand_ins,
    real_router,
    served_revision,
)

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"pd-a": "prefill", "pd-b": "decode", "pd-c": "prefill", "pd-d": "decode"}
ADDRESSES = {name: f"10.91.43.{11 + number}" for number, name in enumerate(ROLES)}
ROUTER = "http://10.91.43.1:31943"
# Without a GPU SGLang cannot pin memory and has no CUDA events; these settings go around the places that want them.
OF_ROLE = {
    "prefill": {**CPU_FLAGS, "disable_radix_cache": True},
    "decode": {**CPU_FLAGS, "disaggregation_decode_retraction_backup": "cpu_tensor"},
}
WITHOUT_GPU = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}
VARIABLES = {
    "sglang_venv": "/opt/sglang/venv",
    "sglang_model_path": "/models/tiny-llama",
    "sglang_host": "0.0.0.0",
    "sglang_replica_group": "chat",
    "sglang_kv_transfer_backend": "mooncake_tcp",
    "sglang_ready_interval": 1,
    "sglang_ready_successes": 2,
    "sglang_ready_stall_timeout": 240,
}


class Pairs:
    """The hosts with their roles, and runs of site.yml over them."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder

    def roles(self, **changed):
        """Write who is what; returns the inventory file."""
        rows = {
            name: {"sglang_role": role, "sglang_flags": OF_ROLE[role]} for name, role in {**ROLES, **changed}.items()
        }
        path = self.folder / "roles.yml"
        path.write_text(json.dumps({"sglang": {"hosts": rows}}))
        return path

    def run(self, revision, *, limit=tuple(ROLES), roles=None, more_hosts=None, **more):
        """Take the hosts to a revision; returns the finished process."""
        values = {**VARIABLES, "sglang_env_vars": {**WITHOUT_GPU, "STAND_IN_REVISION": revision}, **more}
        values["sglang_artifacts_dir"] = str(self.folder)
        extra = self.folder / "vars.json"
        extra.write_text(json.dumps(values))
        return subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                *("-i", str(self.hosts.inventory), "-i", str(self.roles(**(roles or {})))),
                *(("-i", str(more_hosts)) if more_hosts else ()),
                *("gpufleet.sglang.site", "--limit", ",".join(limit), "-e", f"@{extra}"),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
                "ANSIBLE_FORCE_COLOR": "0",
                "ANSIBLE_TIMEOUT": "10",
            },
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )

    def serves(self, host):
        """The revision of the running process."""
        return served_revision(self.hosts, host)


class Watcher(Threads):
    """One thread a host notes when its port opens and closes; ``gaps`` are the roles that nobody had at some moment."""

    def __init__(self, roles=None):
        super().__init__()
        self.roles = {**ROLES, **(roles or {})}
        self.events = []
        self.threads = [threading.Thread(target=self.watch, args=(name,)) for name in self.roles]

    def watch(self, name):
        before = True
        while not self.over.wait(0.04):
            try:
                socket.create_connection((ADDRESSES[name], 30000), timeout=10).close()
                now = True
            except ConnectionRefusedError:
                now = False
            if now != before:
                self.events.append((time.monotonic(), name, now))
            before = now

    @property
    def seen_down(self):
        return sorted({name for _when, name, is_up in self.events if not is_up})

    @property
    def gaps(self):
        up, gaps = set(self.roles), set()
        for _when, name, is_up in sorted(self.events):
            (up.add if is_up else up.discard)(name)
            gaps |= set(self.roles.values()) - {self.roles[one] for one in up}
        return gaps


@pytest.fixture(scope="module")
def pairs(fleet, tmp_path_factory):
    hosts = fleet("pd", "--subnet", "10.91.43.0/24", *(f"{name}:env=sglang:models" for name in ROLES))
    return Pairs(hosts, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    with real_router(tmp_path_factory.mktemp("router"), "10.91.43.1", 31943, "--pd-disaggregation"):
        yield


def kinds():
    """The router's healthy workers, by kind."""
    found: dict[str, list[str]] = {}
    for row in ask(ROUTER + "/workers")["workers"]:
        if row["is_healthy"]:
            found.setdefault(row["worker_type"], []).append(row["url"].split(":")[1].strip("/"))
    return {kind: sorted(urls) for kind, urls in found.items()}


def test_without_its_transfer_library_nothing_is_touched(pairs):
    done = pairs.run("one")
    assert done.returncode == 2 and "Nothing is changed: 1 reason on 4 hosts" in done.stdout
    assert "mooncake is absent" in done.stdout and "[kv_transfer_backend_missing]" in done.stdout
    assert pairs.hosts.shell("pd-a", "ls /etc/systemd/system/sglang-* 2>/dev/null; true") == ""


def test_real_pairs_behind_the_real_router_lose_no_request(pairs, router):
    install = {"sglang_on_missing_backend": "install", "sglang_manage_system_packages": True}
    behind = {"sglang_router": {"url": ROUTER}, **install}
    done = pairs.run("one", limit=("pd-a", "pd-b"), **behind)
    assert done.returncode == 0 and "2 done: pd-a, pd-b" in done.stdout, done.stdout[-3000:]
    assert "group chat has one prefill instance in this run (pd-a)" in done.stdout
    assert kinds() == {"prefill": ["10.91.43.11"], "decode": ["10.91.43.12"]}
    assert generate(ROUTER) == TOKENS, "prefill, transfer and decode"

    done = pairs.run("one", **behind)
    assert done.returncode == 0 and "2 done: pd-c, pd-d" in done.stdout and "[no_redundancy]" not in done.stdout
    assert "2 as it should be: pd-a, pd-b" in done.stdout
    with Load(ROUTER, 2) as load:
        done = pairs.run("two", sglang_waves=["100%"], **behind)
    assert done.returncode == 0 and "4 done: pd-a, pd-b, pd-c, pd-d" in done.stdout, done.stdout[-3000:]
    assert load.bad == [] and load.good > 20
    assert kinds() == {"prefill": ["10.91.43.11", "10.91.43.13"], "decode": ["10.91.43.12", "10.91.43.14"]}
    assert [pairs.serves(host) for host in ROLES] == ["two"] * 4


@pytest.fixture(scope="module")
def stand_ins(pairs):
    """The four hosts with stand-ins for their servers; they run revision three."""
    install_stand_ins(pairs.hosts, ROLES)
    install = {"sglang_on_missing_backend": "install", "sglang_manage_system_packages": True}
    done = pairs.run("three", sglang_waves=["100%"], **install)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return pairs


def test_no_wave_takes_all_of_a_role(stand_ins):
    with Watcher() as watcher:
        done = stand_ins.run("four", sglang_waves=["100%"])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Wave 1 of 2: pd-a, pd-b" in done.stdout and "Wave 2 of 2: pd-c, pd-d" in done.stdout
    assert watcher.seen_down == sorted(ROLES), "the watcher sees a restart"
    assert watcher.gaps == set()


def test_a_failure_in_one_role_stops_before_the_other_half(stand_ins):
    stand_ins.hosts.shell("pd-b", "echo five > /etc/stand-in-fails")
    with Watcher() as watcher:
        done = stand_ins.run("five", sglang_waves=["100%"])
    stand_ins.hosts.shell("pd-b", "rm /etc/stand-in-fails")
    assert done.returncode == 2 and "Rollout STOPPED in wave 1 of 2" in done.stdout
    assert "1 FAILED, serves its last good revision: pd-b" in done.stdout and "2 untouched: pd-c, pd-d" in done.stdout
    assert watcher.gaps == set() and {"pd-c", "pd-d"}.isdisjoint(watcher.seen_down)
    assert [stand_ins.serves(host) for host in ROLES] == ["five", "four", "four", "four"]


def test_the_only_prefill_instance_is_rolled_with_a_warning(stand_ins):
    roles = {"pd-c": "decode"}
    done = stand_ins.run("six", roles=roles, sglang_waves=["100%"])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "group chat has one prefill instance in this run (pd-a): its requests fail while it restarts" in done.stdout
    with Watcher(roles) as watcher:
        done = stand_ins.run("seven", roles=roles, sglang_waves=[1, "100%"])
    assert done.returncode == 0 and watcher.gaps == {"prefill"}, "told, and seen"


def test_pairs_that_cannot_work_together_are_refused_before_anything_changes(stand_ins):
    done = stand_ins.run(
        "eight", sglang_flags="{{ own_flags | combine({'page_size': 32 if sglang_role == 'decode' else 64}) }}",
        own_flags=CPU_FLAGS,
    )  # fmt: skip
    assert done.returncode == 2 and "[prefill_decode_differ]" in done.stdout
    assert "page size: 64 on pd-a, pd-c (prefill); 32 on pd-b, pd-d (decode)" in done.stdout
    left = stand_ins.run(
        "eight", sglang_waves=["100%"], sglang_on_rejection="skip", own_flags=CPU_FLAGS,
        sglang_flags="{{ own_flags | combine({'page_size': 32 if inventory_hostname == 'pd-d' else 64}) }}",
    )  # fmt: skip
    assert left.returncode == 0 and "without 1 host" in left.stdout, left.stdout[-3000:]
    assert "pd-d: plan refused: prefill_decode_differ" in left.stdout
    assert "group chat has one decode instance in this run (pd-b; left out: pd-d)" in left.stdout
    assert [stand_ins.serves(host) for host in ROLES] == ["eight", "eight", "eight", "seven"]


def test_half_of_an_instance_unreachable_leaves_the_other_half_alone(stand_ins):
    before = stand_ins.serves("pd-a")
    big = {"hosts": ["pd-c", "pd-x"], "rendezvous": {"address": ADDRESSES["pd-c"], "port": 20000}, "port": 30001,
           "parallelism": "tp2", "role": ""}  # fmt: skip
    away = stand_ins.folder / "away.yml"
    both = {"sglang_role": "", "sglang_flags": CPU_FLAGS, "sglang_instances": {"big": big}}
    away.write_text(json.dumps({"sglang": {"hosts": {"pd-c": both, "pd-x": {**both, "ansible_host": "10.91.43.99"}}}}))
    done = stand_ins.run(before, limit=("pd-a", "pd-b", "pd-c", "pd-x"), more_hosts=away, sglang_on_unreachable="skip",
                         sglang_waves=["100%"])  # fmt: skip
    assert done.returncode == 4, "Ansible's own status for an unreachable host"
    assert "2 done: pd-a, pd-b" in done.stdout and "without 2 hosts" in done.stdout, done.stdout[-3000:]
    assert "pd-c: rolls together with pd-x, which is left out" in done.stdout
    assert stand_ins.hosts.shell("pd-c", "ls /etc/systemd/system/sglang-big* 2>/dev/null; true") == ""
