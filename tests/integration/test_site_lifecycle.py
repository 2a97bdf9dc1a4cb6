# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The life of a service under site.yml, by a user that has nothing but sudo: deploys, upgrades, and what breaks a run.

The venv is that of a real SGLang whose launch_server is a stand-in that says so (tests/stand_ins/launch_server.py).
After each fault the service runs on a known revision, the next run converges, and nothing is lost.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOST = "life-a"
SITE = "/opt/sglang/venv/lib/python3.11/site-packages"
STORE = "/var/lib/gpufleet-sglang/instances/default"
GOOD = {"max_running_requests": 8}

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


class Site:
    """One host, what its inventory says, and what is seen of it from outside."""

    def __init__(self, fleet: Any, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.variables: dict[str, Any] = {}

    def shell(self, script: str, check: bool = True) -> str:
        return str(self.fleet.shell(HOST, script, check=check)).strip()

    def want(self, **variables: Any) -> None:
        """What the inventory says from now on."""
        base = {
            "sglang_venv": "/opt/sglang/venv",
            "sglang_model_path": "/models/tiny-llama",
            "sglang_artifacts_dir": str(self.folder / "artifacts"),
            "sglang_ready_timeout": 60,
            "sglang_ready_interval": 1,
        }
        self.variables = {**base, **variables}
        if "sglang_instances" not in variables:
            self.variables["sglang_flags"] = {
                "device": "cpu",
                "load_format": "dummy",
                **variables.get("sglang_flags", GOOD),
            }
        (self.folder / "wanted.yml").write_text(yaml.safe_dump({"sglang": {"vars": self.variables}}))

    def run(self, *arguments: str) -> Any:
        return self.fleet.play("site", "-i", str(self.folder / "wanted.yml"), *arguments)

    def converge(self) -> Any:
        done = self.run()
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done

    def at_rest(self) -> None:
        """A further run changes nothing, and what runs stays."""
        before = self.pid()
        done = self.converge()
        assert re.search(rf"{HOST}\s*: ok=\d+\s+changed=0\s", done.stdout), done.stdout[-3000:]
        assert self.pid() == before

    def begin(self) -> subprocess.Popen[str]:
        """The same run in a process group of its own, still running."""
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(self.fleet.inventory)]
        command += ["-i", str(self.folder / "wanted.yml"), "gpufleet.sglang.site"]
        env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_FORCE_COLOR": "0"}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def until(self, script: str, seconds: float = 150) -> None:
        """Wait until a script succeeds on the host."""
        deadline = time.monotonic() + seconds
        while self.shell(f"{script} && echo yes", check=False) != "yes":
            assert time.monotonic() < deadline, script
            time.sleep(0.5)

    def pid(self, instance: str = "default") -> int:
        return int(self.shell(f"systemctl show -P MainPID sglang-{instance}"))

    def starts(self) -> int:
        """How often the stand-in was started since the host was made."""
        return int(self.shell("journalctl -u sglang-default --no-pager | grep -c 'generates nothing, started'; true"))

    def pointer(self, name: str) -> str:
        return self.shell(f"cat {STORE}/{name} 2>/dev/null; true")

    def running(self) -> str:
        """The revision that the running process was started with."""
        variable = "GPUFLEET_SGLANG_REVISION"
        return self.shell(f"tr '\\0' '\\n' < /proc/{self.pid()}/environ | sed -n 's/^{variable}=//p'")

    def served(self) -> bool:
        return "completion_tokens" in self.shell("curl -s -m 5 -d '{}' http://127.0.0.1:30000/generate; true")

    def known(self) -> bool:
        """What runs is a stored revision, and the one that boots."""
        unit = self.shell("grep -o 'REVISION=[0-9a-f]*' /etc/systemd/system/sglang-default.service | head -1")
        running = self.running()
        stored = self.shell(f"ls {STORE}/revisions").split()
        return running in stored and unit == f"REVISION={running}"


@pytest.fixture(scope="module")
def site(fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("test hosts need root")
    made = fleet("life", "--subnet", "10.91.12.0/24", f"{HOST}:ops:env=sglang-0.5.12:models")
    found = Site(made, tmp_path_factory.mktemp("life"))
    found.shell(f": > {SITE}/sglang/__init__.py; install -d /run/standin")
    for name in ("launch_server.py", "scripted_server.py"):
        text = (ROOT / "tests/stand_ins" / name).read_text()
        subprocess.run(
            [sys.executable, str(ROOT / "tests/hosts/hosts.py"), "exec", f"life/{HOST}",
             "sh", "-c", f"cat > {SITE}/sglang/{name}"],
            input=text, text=True, check=True, timeout=60,
        )  # fmt: skip
    yield found


@pytest.fixture
def deployed(site: Site) -> Site:
    """The host at its good state, whatever the test before left behind."""
    site.shell("rm -f /run/standin/hold")
    site.want()
    if not (site.pid() and site.served() and site.pointer("last_good") == site.running()):
        site.converge()
    assert site.served() and site.known()
    return site


def test_first_deploy_and_a_second_run_that_does_nothing(site: Site) -> None:
    site.want()
    site.converge()
    assert site.served() and site.known()
    assert site.pointer("last_good") == site.pointer("current") == site.running()
    assert site.starts() == 1
    site.at_rest()
    assert site.shell("ps -o user= -p " + str(site.pid())) == "sglang"


def test_an_upgrade_of_flag_and_library_is_one_restart_and_becomes_the_last_good(deployed: Site) -> None:
    before, starts = deployed.pointer("last_good"), deployed.starts()
    record = deployed.shell(f"ls -d {SITE}/torch-*.dist-info") + "/RECORD"
    deployed.shell(f"cp {record} /root/RECORD; echo 'torch/x.so,sha256=cccc,1' >> {record}")
    deployed.want(sglang_flags={"max_running_requests": 16})
    deployed.converge()
    assert deployed.starts() == starts + 1
    assert deployed.pointer("last_good") == deployed.running() != before
    deployed.shell(f"cp /root/RECORD {record}")
    deployed.converge()
    assert deployed.starts() == starts + 2 and deployed.known()


def test_a_failing_upgrade_goes_back_and_the_play_fails_with_the_cause(deployed: Site) -> None:
    good = deployed.pointer("last_good")
    deployed.want(sglang_flags={"mem_fraction_static": 0.99})
    done = deployed.run()
    assert done.returncode != 0
    assert "kv_cache_too_small" in done.stdout, done.stdout[-6000:]
    assert deployed.running() == deployed.pointer("last_good") == good
    assert deployed.served() and deployed.known()
    deployed.want(sglang_flags={"max_running_requests": 24})
    deployed.converge()
    assert deployed.pointer("last_good") == deployed.running() != good


def test_of_two_instances_one_is_stopped_and_removed_without_the_other(site: Site) -> None:
    flags = {"device": "cpu", "load_format": "dummy", **GOOD}
    site.want(sglang_instances={"default": {"flags": flags}, "other": {"port": 30001, "flags": flags}})
    site.converge()
    kept = site.pid()
    assert kept and site.pid("other")
    for state in ("stopped", "absent"):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ansible")), "-i", str(site.fleet.inventory), HOST, "--become",
             "-m", "gpufleet.sglang.service_unit", "-a", json.dumps({"instance": "other", "state": state})],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
            env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")},
        )  # fmt: skip
        assert done.returncode == 0 and "CHANGED" in done.stdout, done.stdout + done.stderr
        assert site.pid() == kept and not site.pid("other")
    assert "No such file" in site.shell("ls /etc/systemd/system/sglang-other.service 2>&1; true")


def test_a_controller_killed_between_swap_and_ready(deployed: Site) -> None:
    before = deployed.running()
    deployed.shell("touch /run/standin/hold")
    deployed.want(sglang_flags={"max_running_requests": 32})
    run = deployed.begin()
    deployed.until(f"! grep -q {before} /etc/systemd/system/sglang-default.service && test -S /run/systemd/private")
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    deployed.until("test $(systemctl show -P ActiveState sglang-default) = active")
    assert deployed.pointer("last_good") == before
    deployed.shell("rm /run/standin/hold")
    deployed.converge()
    assert deployed.known() and deployed.pointer("last_good") == deployed.running() != before
    deployed.at_rest()


def test_a_module_killed_between_stage_and_swap(deployed: Site) -> None:
    before, pid = deployed.running(), deployed.pid()
    # The module asks systemd-analyze about what it staged before it swaps: here it has to wait for the answer.
    wrapper = "#!/bin/sh\ntouch /run/standin/staged\nwhile [ -e /run/standin/wait ]; do sleep 0.1; done\n"
    wrapper += 'exec /usr/bin/systemd-analyze.real "$@"\n'
    deployed.shell(
        "mv /usr/bin/systemd-analyze /usr/bin/systemd-analyze.real; touch /run/standin/wait; "
        f"printf '%s' '{wrapper}' > /usr/bin/systemd-analyze; chmod 755 /usr/bin/systemd-analyze"
    )
    try:
        deployed.want(sglang_flags={"max_running_requests": 40})
        run = deployed.begin()
        deployed.until("test -e /run/standin/staged")
        holder = json.loads(deployed.shell("cat /run/gpufleet-sglang/default.lock"))["pid"]
        deployed.shell(f"kill -9 {holder}")
        deployed.shell("rm -f /run/standin/wait")
        said, _none = run.communicate(timeout=300)
        assert run.returncode != 0, said[-3000:]
    finally:
        deployed.shell("rm -f /run/standin/wait; mv /usr/bin/systemd-analyze.real /usr/bin/systemd-analyze")
    assert deployed.running() == before and deployed.served() and deployed.known()
    assert deployed.pid() == pid or deployed.pointer("last_good") == before
    deployed.converge()
    assert deployed.known() and deployed.pointer("last_good") == deployed.running() != before
    assert not deployed.shell(f"ls -A {STORE}/revisions | grep '^[.]'; true")


def test_a_host_rebooted_in_the_middle(deployed: Site) -> None:
    before = deployed.running()
    deployed.shell("touch /run/standin/hold")
    deployed.want(sglang_flags={"max_running_requests": 48})
    run = deployed.begin()
    deployed.until(f"! grep -q {before} /etc/systemd/system/sglang-default.service")
    deployed.until("test $(systemctl show -P ActiveState sglang-default) = active")
    podman = [str(ROOT / "tests/hosts/cg2"), "podman", "restart", "--time", "5", f"life-{HOST}"]
    env = {**os.environ, "CONTAINERS_CONF": str(ROOT / "tests/hosts/containers.conf")}
    subprocess.run(podman, check=True, capture_output=True, timeout=120, env=env)
    try:
        run.communicate(timeout=200)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    # /run is new, so nothing holds the stand-in: the unit starts by itself at boot.
    deployed.until("test $(systemctl show -P ActiveState sglang-default) = active", 60)
    deployed.shell("install -d /run/standin")
    assert deployed.known()
    deployed.converge()
    assert deployed.served() and deployed.pointer("last_good") == deployed.running() != before


def test_two_runs_at_once(deployed: Site) -> None:
    starts = deployed.starts()
    deployed.want(sglang_flags={"max_running_requests": 56})
    runs = [deployed.begin(), deployed.begin()]
    said = [run.communicate(timeout=400)[0] for run in runs]
    for run, text in zip(runs, said):
        # The one that finds the other at work goes back to last_good, and takes the other along.
        told = "another run works on this instance" in text or "revision_mismatch" in text
        assert run.returncode == 0 or told, text[-5000:]
    assert deployed.known() and deployed.served() and deployed.starts() - starts in (1, 2, 3)
    deployed.converge()
    assert deployed.served() and deployed.pointer("last_good") == deployed.running()


def test_a_corrupted_store_is_mended_by_the_next_run(deployed: Site) -> None:
    deployed.converge()
    revision, pid = deployed.running(), deployed.pid()
    deployed.shell(f"echo garbage > {STORE}/revisions/{revision}/unit; echo nonsense > {STORE}/last_good")
    deployed.converge()
    assert deployed.pid() == pid and deployed.pointer("last_good") == revision
    assert deployed.shell(f"grep -c ExecStart= {STORE}/revisions/{revision}/unit") == "1"
    deployed.at_rest()


def test_a_full_disk_while_staging(deployed: Site) -> None:
    before, pid = deployed.running(), deployed.pid()
    deployed.shell(f"mount -t tmpfs -o size=4k,mode=700 full {STORE}/revisions")
    try:
        deployed.want(sglang_flags={"max_running_requests": 64})
        done = deployed.run()
        assert done.returncode != 0 and "No space left on device" in done.stdout, done.stdout[-4000:]
    finally:
        deployed.shell(f"umount {STORE}/revisions")
    assert deployed.pid() == pid and deployed.running() == before and deployed.known()
    deployed.converge()
    assert deployed.served() and deployed.pointer("last_good") == deployed.running() != before


def test_a_unit_made_by_hand_is_taken_over_and_comes_back_when_ours_fails(site: Site) -> None:
    site.shell(
        "systemctl disable --now sglang-default; rm -rf /etc/systemd/system/sglang-default.service "
        f"/etc/gpufleet-sglang {STORE}; systemctl daemon-reload; systemctl reset-failed"
    )
    unit = "[Service]\\nExecStart=/opt/sglang/venv/bin/python -m sglang.launch_server --model-path /models/tiny-llama "
    unit += "--port 30000 --tp-size 1\\n[Install]\\nWantedBy=multi-user.target\\n"
    site.shell(
        f"printf '{unit}' > /etc/systemd/system/old.service; systemctl daemon-reload; systemctl enable --now old"
    )
    site.until("curl -s -o /dev/null http://127.0.0.1:30000/health")
    site.want(sglang_takeover="old.service", sglang_flags={"mem_fraction_static": 0.99})
    done = site.run()
    assert done.returncode != 0 and "kv_cache_too_small" in done.stdout, done.stdout[-6000:]
    assert site.shell("systemctl is-active old; systemctl is-enabled old; true").split() == ["active", "enabled"]
    assert not site.pid() and site.served()
    site.want(sglang_takeover="old.service")
    site.converge()
    assert site.shell("systemctl is-active old; systemctl is-enabled old; true").split() == ["inactive", "disabled"]
    assert site.served() and site.known() and site.pointer("last_good") == site.running()
    site.at_rest()


@pytest.mark.skipif(
    "memory" not in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    if Path("/sys/fs/cgroup/cgroup.controllers").exists()
    else True,
    reason="this machine does not enforce memory limits",
)
def test_the_oom_killer_is_named_as_the_cause(deployed: Site) -> None:
    deployed.shell("systemctl set-property --runtime sglang-default MemoryMax=1M; true")
    deployed.until("test $(systemctl show -P Result sglang-default) = oom-kill")
    deployed.want(sglang_flags={"max_running_requests": 72})
    deployed.converge()
    assert deployed.served()


def test_nothing_of_the_runs_is_left(site: Site) -> None:
    left = site.shell("ls -d /run/gpufleet-sglang/verify-* /run/gpufleet-sglang/credential-* 2>/dev/null; true")
    assert not left
