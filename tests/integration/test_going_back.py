# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Revisions in rollouts on two real hosts: two runs at once, packages that go back, ranks that stay on one revision.

The server is the stand-in of tests/stand_ins/rollout_server.py; units, revisions and journals of packages are real. The
hooks of a run wait for files of the test, so that the order of two runs is always the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.rollouts import install_stand_ins, served_revision

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
VENV = "/opt/sglang/venv"
STATE = "/var/lib/gpufleet-sglang"
HOSTS = ("bk-a", "bk-b")
VARIABLES = {
    "sglang_venv": VENV,
    "sglang_model_path": "/models/tiny-llama",
    "sglang_flags": {"device": "cpu", "load_format": "dummy"},
    "sglang_ready_interval": 1,
    "sglang_ready_successes": 2,
    "sglang_ready_stall_timeout": 20,
}
BIG = {
    "sglang_instances": {
        "big": {
            "hosts": list(HOSTS),
            "rendezvous": {"address": "10.91.42.11", "port": 20000},
            "parallelism": "tp2",
            "port": 30001,
        }
    }
}


class Site:
    """The hosts, runs over them, and what is seen of them from outside."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.runs = hosts, folder, 0

    def shell(self, host, script, check=True):
        return self.hosts.shell(host, script, check=check).strip()

    def command(self, revision, limit=("bk-a",), playbook="site", **more):
        self.runs += 1
        values = {**VARIABLES, "sglang_env_vars": {"STAND_IN_REVISION": revision}, **more}
        values["sglang_artifacts_dir"] = str(self.folder / "artifacts")
        extra = self.folder / f"vars-{self.runs}.json"
        extra.write_text(json.dumps(values))
        ansible = str(Path(sys.executable).with_name("ansible-playbook"))
        return [ansible, "-i", str(self.hosts.inventory), f"gpufleet.sglang.{playbook}", "--limit", ",".join(limit),
                "-e", f"@{extra}"]  # fmt: skip

    def begin(self, revision, **more):
        """A run in a process group of its own, still running."""
        env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_FORCE_COLOR": "0"}
        return subprocess.Popen(
            self.command(revision, **more), cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, revision, **more):
        return self.end(self.begin(revision, **more))

    @staticmethod
    def end(running):
        """(exit status, output) of a run."""
        try:
            out, _none = running.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
        return running.returncode, out

    def converge(self, revision, **more):
        status, out = self.run(revision, **more)
        assert status == 0, out[-5000:]
        return out

    def serves(self, host="bk-a", instance="default"):
        return served_revision(self.hosts, host, instance)

    def stored(self, pointer, host="bk-a", instance="default"):
        return self.shell(host, f"cat {STATE}/instances/{instance}/{pointer} 2>/dev/null", check=False)

    def revision_of(self, word, host="bk-a", instance="default"):
        """The stored revision with this STAND_IN_REVISION."""
        return self.shell(
            host, f"grep -l 'STAND_IN_REVISION=\"{word}\"$' {STATE}/instances/{instance}/revisions/*/env | cut -d/ -f8"
        )

    def fails(self, host, words):
        self.shell(host, f"echo '{words}' > /etc/stand-in-fails")

    def gate(self, name):
        """A task file whose task says that it is reached, and waits until the test lets it through."""
        program = self.folder / f"{name}.sh"
        program.write_text(
            f"#!/bin/sh\ntouch {self.folder}/{name}.reached\n"
            f"while test ! -e {self.folder}/{name}.go; do sleep 0.2; done\n"
        )
        program.chmod(0o755)
        tasks = self.folder / f"{name}.yml"
        tasks.write_text(
            f"---\n- name: Wait at {name}\n  ansible.builtin.command: {program}\n"
            "  delegate_to: localhost\n  vars:\n    ansible_connection: local\n"
        )
        return str(tasks)

    def log(self, name, file):
        """A task file whose task writes a line to a file of the test, and when it ran for which host."""
        program = self.folder / f"{name}.sh"
        program.write_text(f"#!/bin/sh\necho {name} $1 >> {self.folder}/{file}\n")
        program.chmod(0o755)
        tasks = self.folder / f"{name}.yml"
        tasks.write_text(
            f"---\n- name: Note {name}\n  ansible.builtin.command: {program} {{{{ inventory_hostname }}}}\n"
            "  delegate_to: localhost\n  vars:\n    ansible_connection: local\n"
        )
        return str(tasks)

    def reached(self, name, running):
        self.until(lambda: (self.folder / f"{name}.reached").exists() or running.poll() is not None)
        assert (self.folder / f"{name}.reached").exists(), running.communicate()[0][-5000:]

    def go(self, name):
        (self.folder / f"{name}.go").touch()

    @staticmethod
    def until(true, seconds=150):
        limit = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < limit
            time.sleep(0.3)


@pytest.fixture(scope="module")
def site(fleet, tmp_path_factory):
    hosts = fleet("bk", "--subnet", "10.91.42.0/24", *(f"{name}:env=sglang:models" for name in HOSTS))
    install_stand_ins(hosts, HOSTS)
    return Site(hosts, tmp_path_factory.mktemp("back"))


@pytest.fixture
def first(site):
    """The host serves revision one, and nobody fails."""
    site.fails("bk-a", "none")
    site.converge("one")
    assert site.serves() == "one" and site.stored("current") == site.stored("last_good")
    return site


def test_the_run_that_drained_first_is_overtaken_before_it_stops_anything(first):
    slow = first.begin("two-a", sglang_drain_tasks=first.gate("drain-a"))
    first.reached("drain-a", slow)
    first.converge("two-b")
    first.go("drain-a")
    status, out = first.end(slow)
    assert status == 2 and "1 OVERTAKEN by another run, left to it: bk-a" in out, out[-4000:]
    assert f"revision {first.revision_of('two-b')} is current" in out and "run the same command again" in out
    assert first.serves() == "two-b" and first.stored("last_good") == first.revision_of("two-b")


def test_a_run_whose_new_revision_was_replaced_leaves_the_other_one_alone(first):
    """The other run deploys while this one waits for readiness: it neither accepts nor goes back."""
    first.shell("bk-a", "rm -f /etc/stand-in-waits")
    slow = first.begin("three-a", sglang_undrain_tasks=first.gate("never"), sglang_ready_successes=40)
    first.until(lambda: first.stored("current") and first.serves() == "three-a")
    first.converge("three-b")
    pid = first.shell("bk-a", "systemctl show -P MainPID sglang-default")
    status, out = first.end(slow)
    assert status == 2 and "1 OVERTAKEN by another run, left to it: bk-a" in out, out[-4000:]
    assert first.revision_of("three-b") in out
    assert first.shell("bk-a", "systemctl show -P MainPID sglang-default") == pid
    assert first.serves() == "three-b" and first.stored("last_good") == first.revision_of("three-b")


def test_a_run_that_fails_goes_back_although_another_one_waits_to_change_the_host(first):
    first.fails("bk-a", "four-a")
    slow = first.begin("four-b", sglang_drain_tasks=first.gate("drain-b"))
    first.reached("drain-b", slow)
    status, out = first.run("four-a")
    assert status == 2 and "1 FAILED, serves its last good revision: bk-a" in out, out[-4000:]
    first.go("drain-b")
    status, out = first.end(slow)
    assert status == 2 and "1 OVERTAKEN by another run" in out, out[-4000:]
    assert first.serves() == "one" and first.stored("last_good") == first.stored("current")
    first.fails("bk-a", "none")
    assert "1 done: bk-a" in first.converge("four-b") and first.serves() == "four-b"


def test_what_one_run_drained_another_one_undrains_only_when_it_holds_the_host(first):
    """A run without work finds the host in the hands of one that drained it: it takes it over, and undrains."""
    hooks = {"sglang_undrain_tasks": first.log("undrain", "order")}
    slow = first.begin("five", sglang_drain_tasks=first.gate("drain-five"), **hooks)
    first.reached("drain-five", slow)
    first.converge("one", **hooks)
    assert (first.folder / "order").read_text() == "undrain bk-a\n"
    first.go("drain-five")
    status, out = first.end(slow)
    assert status == 2 and "1 OVERTAKEN" in out, out[-4000:]
    assert first.serves() == "one" and (first.folder / "order").read_text() == "undrain bk-a\n"


def kill_at(site, gate, running):
    """Kill the controller where it waits."""
    site.reached(gate, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def test_a_killed_run_hinders_nobody(first):
    out = first.log("drained", "killed")
    running = first.begin("six", sglang_drain_tasks=first.gate("drain-six"), sglang_undrain_tasks=out)
    kill_at(first, "drain-six", running)
    first.converge("six", sglang_undrain_tasks=out)
    assert first.serves() == "six" and (first.folder / "killed").read_text() == "drained bk-a\n"
    said = first.converge("six", sglang_undrain_tasks=out)
    assert re.search(r"bk-a\s*: ok=\d+\s+changed=0\s", said)


# ---- packages --------------------------------------------------------------------------------------------------------


def module(site, name, *arguments, **options):
    """One module call on the first host, with its result."""
    command = [str(Path(sys.executable).with_name("ansible")), "-i", str(site.hosts.inventory), "bk-a", "-b", "-m",
               f"gpufleet.sglang.{name}", "-a", json.dumps(options), *arguments]  # fmt: skip
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_FORCE_COLOR": "0",
           "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1", "ANSIBLE_STDOUT_CALLBACK": "minimal",
           "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert "=>" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("=>")[2])


def nixl(site, version):
    """Swap the small nixl wheel, as a remedy does, while nothing uses the venv."""
    made = f"/tmp/nixl-{version}"
    site.shell(
        "bk-a",
        f"""set -e; rm -rf {made}; install -d {made}/nixl-{version}.dist-info
cd {made}; echo 'VERSION = "{version}"' > nixl_stand_in.py
printf 'Metadata-Version: 2.1\\nName: nixl\\nVersion: {version}\\n' > nixl-{version}.dist-info/METADATA
printf 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' > nixl-{version}.dist-info/WHEEL
{VENV}/bin/python - <<'END'
import base64, hashlib, zipfile, pathlib
info = "nixl-{version}.dist-info"
rows = []
with zipfile.ZipFile("nixl-{version}-py3-none-any.whl", "w") as wheel:
    for name in ("nixl_stand_in.py", info + "/METADATA", info + "/WHEEL"):
        data = pathlib.Path(name).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{{name}},sha256={{digest}},{{len(data)}}")
        wheel.writestr(name, data)
    wheel.writestr(info + "/RECORD", "\\n".join([*rows, info + "/RECORD,,"]) + "\\n")
END
chmod -R a+rX {made}""",
    )
    wheel = f"{made}/nixl-{version}-py3-none-any.whl"
    steps = [{"action": "pip_install", "packages": [wheel], "args": {"flags": ["--no-deps"]}}]
    done = module(
        site, "backend_packages", venv=VENV, remedies=[{"backend": "nixl", "kind": "install", "steps": steps}]
    )
    assert done["changed"] and done["journal_id"], done
    return done["journal_id"]


def has_nixl(site):
    return site.shell("bk-a", f"ls -d {VENV}/lib/python3.11/site-packages/nixl-*.dist-info 2>/dev/null", check=False)


def journals(site):
    return site.shell("bk-a", f"ls {STATE}/journal 2>/dev/null", check=False).split()


def rollback(site, **more):
    return site.run("any", playbook="rollback", **more)


def test_by_hand_the_packages_come_back_with_the_revision(first):
    nixl(first, "1.0")
    first.converge("seven-old")
    swapped = nixl(first, "2.0")
    first.fails("bk-a", "none")
    first.converge("seven-new")
    old = first.revision_of("seven-old")
    status, out = rollback(first, rollback_revision=old)
    assert status == 0 and "1 done: bk-a" in out, out[-4000:]
    assert "nixl-1.0.dist-info" in has_nixl(first) and first.serves() == "seven-old"
    seen = module(first, "service_unit", "--check", state="rolled_back", revision=old)
    assert seen["libraries_differ"] == [] and swapped not in seen["packages"]["journals"]


def test_a_failed_run_takes_back_the_packages_of_a_killed_one(first):
    """Killed between the swap of packages and that of the unit: the host reboots on the old unit with new packages."""
    nixl(first, "3.0")
    first.converge("eight")
    nixl(first, "4.0")
    first.shell("bk-a", "systemctl restart sglang-default")
    first.fails("bk-a", "nine")
    status, out = first.run("nine")
    assert status == 2 and "1 FAILED, serves its last good revision: bk-a" in out, out[-4000:]
    assert "nixl-3.0.dist-info" in has_nixl(first) and first.serves() == "eight"


def test_packages_that_somebody_changed_by_hand_stay_and_this_is_told(first):
    nixl(first, "5.0")
    first.converge("ten")
    nixl(first, "6.0")
    first.converge("eleven")
    site = f"{VENV}/lib/python3.11/site-packages"
    first.shell("bk-a", f"mv {site}/nixl-6.0.dist-info {site}/nixl-6.1.dist-info")
    status, out = rollback(first, rollback_revision=first.revision_of("ten"))
    assert status == 0 and f"the packages of {VENV} stay as they are" in out, out[-4000:]
    assert "nixl is not as journal" in out and first.serves() == "ten"
    assert "nixl-6.1.dist-info" in has_nixl(first)
    first.shell("bk-a", f"mv {site}/nixl-6.1.dist-info {site}/nixl-6.0.dist-info")


def two(old_or_new):
    """Two instances from one venv."""
    return {
        "sglang_instances": {
            "default": {"port": 30000, "env_vars": {"STAND_IN_REVISION": f"{old_or_new}-default"}},
            "second": {"port": 30002, "env_vars": {"STAND_IN_REVISION": f"{old_or_new}-second"}},
        }
    }


def test_instances_that_share_a_venv_go_back_together_or_the_packages_stay(first):
    nixl(first, "7.0")
    first.converge("-", **two("old"))
    nixl(first, "8.0")
    first.fails("bk-a", "new-second")
    status, out = first.run("-", **two("new"))
    assert status == 2 and "1 FAILED, serves its last good revision: bk-a" in out, out[-4000:]
    assert "nixl-7.0.dist-info" in has_nixl(first)
    assert [first.serves(instance=name) for name in ("default", "second")] == ["old-default", "old-second"]

    nixl(first, "9.0")
    first.fails("bk-a", "none")
    first.converge("-", **two("good"))
    revision = first.revision_of("old-default")
    pid = first.shell("bk-a", "systemctl show -P MainPID sglang-second")
    status, out = rollback(first, rollback_revision=revision, **two("good"))
    assert status == 2 and "set rollback_instance to one of default, second" in out and "Wave" not in out
    status, out = rollback(first, rollback_revision=revision, rollback_instance="default", **two("good"))
    assert status == 0 and "instance second runs from this venv, too" in out, out[-4000:]
    assert first.serves() == "old-default" and "nixl-9.0.dist-info" in has_nixl(first)
    assert first.shell("bk-a", "systemctl show -P MainPID sglang-second") == pid, "not touched"
    module(first, "service_unit", instance="second", state="absent")


# ---- ranks -----------------------------------------------------------------------------------------------------------


def big(site, revision, **more):
    return site.run(revision, limit=HOSTS, **{**BIG, **more})


@pytest.fixture
def ranks(site):
    for host in HOSTS:
        site.fails(host, "none")
    module(site, "service_unit", instance="default", state="stopped")
    status, out = big(site, "r-one")
    assert status == 0, out[-5000:]
    return site


def on(site, pointer):
    return [site.stored(pointer, host, "big") for host in HOSTS]


def test_a_rank_that_was_accepted_goes_back_with_the_one_that_was_not(ranks):
    """The second rank's record cannot be written, as with a full disk or a broken one."""
    good = on(ranks, "last_good")
    ranks.shell("bk-b", f"chattr +i {STATE}/instances/big/last_good")
    try:
        status, out = big(ranks, "r-two")
    finally:
        ranks.shell("bk-b", f"chattr -i {STATE}/instances/big/last_good")
    assert status == 2 and "2 FAILED, serves its last good revision: bk-a, bk-b" in out, out[-5000:]
    assert [ranks.serves(host, "big") for host in HOSTS] == ["r-one", "r-one"]
    assert on(ranks, "last_good") == good == on(ranks, "current")


def test_killed_between_two_accepts_and_then_a_failure_all_ranks_are_on_one_revision(ranks):
    """What a controller leaves that dies when only the first rank was recorded; both hosts reboot then."""
    before = on(ranks, "last_good")
    status, out = big(ranks, "r-three")
    assert status == 0, out[-5000:]
    proven = on(ranks, "last_good")
    ranks.shell("bk-b", f"echo {before[1]} > {STATE}/instances/big/last_good")
    for host in HOSTS:
        ranks.shell(host, "systemctl kill -s KILL sglang-big; systemctl reset-failed sglang-big; true")
    ranks.fails("bk-b", "r-four")
    status, out = big(ranks, "r-four")
    assert status == 2 and "2 FAILED, serves its last good revision" in out, out[-5000:]
    assert [ranks.serves(host, "big") for host in HOSTS] == ["r-three", "r-three"]
    assert on(ranks, "last_good") == proven == on(ranks, "current")


def test_killed_between_two_accepts_the_next_run_records_the_other_rank(ranks):
    before = on(ranks, "last_good")
    status, out = big(ranks, "r-five")
    assert status == 0, out[-5000:]
    proven = on(ranks, "last_good")
    ranks.shell("bk-b", f"echo {before[1]} > {STATE}/instances/big/last_good")
    status, out = big(ranks, "r-five")
    assert status == 0 and on(ranks, "last_good") == proven, out[-5000:]
    assert [ranks.serves(host, "big") for host in HOSTS] == ["r-five", "r-five"]
