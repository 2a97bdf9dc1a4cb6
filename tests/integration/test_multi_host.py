# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One instance over two real hosts: the real SGLang with TP 2, its all-reduce over Gloo, from deploy to rollback."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.tools.rollouts import CPU_FLAGS, served_revision

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

HEAD, OTHER = "mh-a", "mh-b"
ADDRESS = {HEAD: "10.91.41.11", OTHER: "10.91.41.12"}
ENV = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
}
# The file is a mount: it cannot be replaced, only written.
FORGET = "grep -v rank-zero /etc/hosts > /tmp/hosts; cat /tmp/hosts > /etc/hosts"
BODY = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}}


class Pair:
    """The two hosts, and runs of playbooks over them."""

    def __init__(self, hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        self.address = ADDRESS[HEAD]

    def play(self, playbook, revision, env=None, **more):
        values = {
            "sglang_venv": "/opt/sglang/venv",
            "sglang_model_path": "/models/tiny-llama",
            "sglang_env_vars": {**ENV, "GPUFLEET_TEST_REVISION": revision, **(env or {})},
            "sglang_flags": CPU_FLAGS,
            "sglang_instances": {
                "big": {
                    "hosts": [HEAD, OTHER],
                    "rendezvous": {"address": self.address, "port": 20000},
                    "parallelism": "tp2",
                }
            },
            "sglang_ready_successes": 2,
            "sglang_artifacts_dir": str(self.folder),
            **more,
        }
        extra = self.folder / "vars.json"
        extra.write_text(json.dumps(values))
        return self.hosts.play(playbook, "-e", f"@{extra}")

    def serves(self, host):
        """The revision of the running process."""
        return served_revision(self.hosts, host, "big", "GPUFLEET_TEST_REVISION")

    def pid(self, host):
        return self.hosts.shell(host, "systemctl show -p MainPID --value sglang-big").strip()

    def generates(self):
        """Tokens of one generation by rank 0."""
        out = self.hosts.shell(
            HEAD,
            "curl -sS -m 90 -H 'Content-Type: application/json' http://127.0.0.1:30000/generate "
            f"-d '{json.dumps(BODY)}'",
        )
        return len(json.loads(out)["output_ids"])

    def both_serve(self, revision):
        return [self.serves(HEAD), self.serves(OTHER), self.generates()] == [revision, revision, 8]


@pytest.fixture(scope="module")
def pair(fleet, tmp_path_factory):
    hosts = fleet("mh", "--subnet", "10.91.41.0/24", *(f"{name}:env=sglang:models" for name in (HEAD, OTHER)))
    pair = Pair(hosts, tmp_path_factory.mktemp("multi-host"))
    done = pair.play("site", "one")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "rank 1 is alive" in done.stdout and "2 done: mh-a, mh-b" in done.stdout
    return pair


def test_rank_0_generates_over_two_hosts_and_a_second_run_changes_nothing(pair):
    assert pair.both_serve("one")
    link = f"{ADDRESS[HEAD]}:20000"
    peers = pair.hosts.shell(HEAD, "ss -Htn state established | awk '{print $4}' || true")
    assert ADDRESS[OTHER] in peers, f"no connection between the ranks; rendezvous {link}"
    pids = [pair.pid(host) for host in (HEAD, OTHER)]
    done = pair.play("site", "one")
    assert done.returncode == 0 and "2 as it should be: mh-a, mh-b" in done.stdout, done.stdout[-3000:]
    assert [pair.pid(host) for host in (HEAD, OTHER)] == pids


def test_a_rank_that_dies_while_the_others_load_is_told_by_host_and_both_go_back(pair):
    """Rank 0 alone would wait for its stall timeout, which is longer than this test's patience."""
    before, over = pair.pid(OTHER), threading.Event()

    def kill():
        while not over.wait(0.5):
            pid = pair.pid(OTHER)
            if pid not in ("0", before):
                pair.hosts.shell(OTHER, f"kill -KILL {pid}", check=False)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        done = pair.play("site", "two", sglang_ready_stall_timeout=3000, sglang_ready_timeout=3000)
    finally:
        over.set()
        killer.join()
    assert done.returncode == 2, done.stdout[-3000:]
    assert "rank 1 on mh-b is dead" in done.stdout
    assert "2 FAILED, serves its last good revision: mh-a, mh-b" in done.stdout, done.stdout[-3000:]
    told = done.stdout[done.stdout.index("Rollout FAILED") :]
    assert "mh-a: Wait until it serves: big: rank 1 on mh-b is dead" in told
    assert pair.both_serve("one")


def test_what_keeps_the_ranks_apart_is_told_while_the_old_revision_serves(pair):
    pids = [pair.pid(host) for host in (HEAD, OTHER)]
    cases = (
        ({"env": {"GLOO_SOCKET_IFNAME": "ens9"}}, "mh-b: ", "interface_absent", "sglang_env_vars"),
        ({"address": "10.91.41.77"}, "mh-a: ", "rendezvous_not_here", "sglang_rendezvous"),
        ({"address": "no-such-host.invalid"}, "mh-b: ", "rendezvous_unknown", "sglang_rendezvous"),
    )
    for change, host, code, mend in cases:
        pair.address = change.get("address", ADDRESS[HEAD])
        done = pair.play("site", "three", env=change.get("env"))
        pair.address = ADDRESS[HEAD]
        told = done.stdout[done.stdout.index("Rollout FAILED") :]
        assert done.returncode == 2 and code in told and mend in told and host in told, told
        assert [pair.pid(one) for one in (HEAD, OTHER)] == pids, f"{code} cost a restart"
    assert pair.both_serve("one")


@pytest.mark.parametrize("fault", ["blackhole", "port", "name"])
def test_what_shows_only_when_the_ranks_meet_brings_the_old_revision_back(pair, fault):
    undo, codes = {
        "blackhole": ((OTHER, "ip route del blackhole 10.91.41.11/32"), ["rendezvous_unreachable"]),
        "port": ((HEAD, "kill $(cat /run/taker.pid)"), ["rendezvous_port_taken"]),
        "name": ((OTHER, FORGET), ["rendezvous_unreachable", "rank-zero (10.91.41.99 here)"]),
    }[fault]
    if fault == "blackhole":
        pair.hosts.shell(OTHER, "ip route add blackhole 10.91.41.11/32")
    elif fault == "port":
        taker = "import socket, time; s = socket.create_server(('0.0.0.0', 20001)); time.sleep(900)"
        pair.hosts.shell(
            HEAD, f'setsid python3 -c "{taker}" >/dev/null 2>&1 </dev/null & echo $! > /run/taker.pid', check=True
        )
    else:
        pair.hosts.shell(OTHER, "echo 10.91.41.99 rank-zero >> /etc/hosts")
        pair.hosts.shell(HEAD, f"echo {ADDRESS[HEAD]} rank-zero >> /etc/hosts")
        pair.address = "rank-zero"
    try:
        instances = {
            "big": {
                "hosts": [HEAD, OTHER],
                "rendezvous": {"address": pair.address, "port": 20001 if fault == "port" else 20000},
                "parallelism": "tp2",
            }
        }
        done = pair.play("site", "four", sglang_instances=instances)
    finally:
        pair.address = ADDRESS[HEAD]
        pair.hosts.shell(*undo)
        if fault == "name":
            pair.hosts.shell(HEAD, FORGET)
    assert done.returncode == 2, done.stdout[-3000:]
    if fault != "blackhole":
        # Without a way back rank 1 cannot join the old revision either: the next run converges it.
        assert "2 FAILED, serves its last good revision: mh-a, mh-b" in done.stdout, done.stdout[-3000:]
    told = done.stdout[done.stdout.index("Rollout FAILED") :]
    assert all(code in told for code in codes), told
    if fault == "blackhole":
        assert pair.play("site", "one").returncode == 0
    assert pair.both_serve("one")


def test_a_rank_that_is_down_is_seen_by_verify_and_the_next_run_starts_all(pair):
    # Alone, a rank above 0 of SGLang 0.5.23 does not end on SIGTERM while its peer lives.
    pair.hosts.shell(OTHER, "systemctl stop --no-block sglang-big; systemctl kill -s KILL sglang-big; sleep 2")
    seen = pair.play("verify", "one")
    assert seen.returncode == 2 and "mh-b" in seen.stdout.partition("PLAY RECAP")[0]
    old = pair.pid(HEAD)
    done = pair.play("site", "one")
    assert done.returncode == 0 and "2 done: mh-a, mh-b" in done.stdout, done.stdout[-3000:]
    assert pair.pid(HEAD) != old and pair.both_serve("one")


def test_rank_0_that_comes_back_alone_brings_rank_1_down_and_systemd_brings_both_back(pair):
    """Gloo's ranks end with their peer; systemd starts each again, and they meet again without anybody's help."""
    pids = [pair.pid(host) for host in (HEAD, OTHER)]
    pair.hosts.shell(HEAD, f"kill -KILL {pids[0]}")
    limit = time.monotonic() + 240
    while time.monotonic() < limit:
        try:
            if pair.pid(OTHER) not in (pids[1], "0") and pair.both_serve("one"):
                break
        except (AssertionError, ValueError, KeyError, subprocess.TimeoutExpired):
            time.sleep(3)
    assert pair.pid(OTHER) != pids[1] and pair.both_serve("one")
    assert pair.play("verify", "one").returncode == 0


def test_an_upgrade_is_rolled_as_one(pair):
    done = pair.play("site", "five")
    assert done.returncode == 0 and "2 done: mh-a, mh-b" in done.stdout, done.stdout[-3000:]
    assert pair.both_serve("five")
