# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""probe_info over ssh, by a user that has nothing but sudo, on venvs with a real torch and real wheels.

The stand-ins here are not for a library but for what a library may do to whoever imports it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).resolve().parents[2]
SITE = "/opt/sglang/venv/lib/python3.11/site-packages"
ENGINE = f"{SITE}/mooncake/engine.so"

# Says who and where it is and what it has, in the exception that ends it: so the answer travels as any other would.
SPY = """
import json, os, sys
import torch
status = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith(("CapEff", "Groups")))
raise RuntimeError(json.dumps({
    "uids": sorted(set(os.getresuid())), "gids": sorted(set(os.getresgid())),
    "groups": sorted(int(g) for g in status["Groups"].split()), "capabilities": int(status["CapEff"], 16),
    "home": os.environ.get("HOME"), "sudo": [n for n in os.environ if n.startswith(("SUDO", "SSH"))],
    "here": os.listdir("."), "isolated": sys.flags.isolated,
    "sum": float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()),
}))
"""


@pytest.fixture(scope="module")
def hosts(fleet: Callable[..., Any]) -> Any:
    made = fleet("det", "probe-c:ops:env=gpu-c", "probe-b:ops:env=gpu-b")
    made.shell("probe-c", "useradd --system --create-home --groups users fresh && loginctl enable-linger fresh || true")
    return made


def ask(hosts: Any, host: str = "probe-c", become: bool = True, **options: Any) -> dict[str, Any]:
    """The probe of a host, as an operator's machine gets it."""
    options = {"venv": "/opt/sglang/venv", "gather_subset": ["backends"], "probe_environment": {}, **options}
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible")), "-i", str(hosts.inventory), host,
            *(["--become"] if become else []), "-m", "gpufleet.sglang.probe_info", "-a", json.dumps(options),
        ],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_FORCE_COLOR": "0",
             "ANSIBLE_STDOUT_CALLBACK": "minimal", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
    )  # fmt: skip
    head, arrow, body = done.stdout.partition(" => ")
    assert done.returncode == 0 and arrow, done.stdout + done.stderr
    answer = json.loads(body)
    assert answer["changed"] is False, head
    return answer["probe"]


def use(probe: dict[str, Any], backend: str, name: str) -> dict[str, Any]:
    return probe["backends"][backend]["uses"][name]


@pytest.fixture
def module(hosts: Any) -> Iterator[Callable[[str, str], None]]:
    """``module(name, text)`` puts a package into the venv for one test."""
    names: list[str] = []

    def put(name: str, text: str) -> None:
        names.append(name)
        hosts.shell("probe-c", f"mkdir -p {SITE}/{name} && cat > {SITE}/{name}/__init__.py <<'END'\n{text}\nEND")

    yield put
    for name in names:
        hosts.shell("probe-c", f"rm -r {SITE}/{name}")


@pytest.fixture(scope="module")
def rdma(hosts: Any) -> dict[str, Any]:
    """The probe before the system libraries were there; installs exactly what its remedy names."""
    before = ask(hosts, probe_user="fresh")
    steps = before["backends"]["mooncake"]["remedy"]["steps"]
    names = [name for step in steps if step["action"] == "os_install" for name in step["packages"]]
    hosts.shell("probe-c", "apt-get update -qq && apt-get install -qq -y --no-install-recommends " + " ".join(names))
    return before


def test_missing_system_libraries_are_named_and_their_packages_mend_it(hosts, rdma):
    broken = use(rdma, "mooncake", "kv_transfer")
    assert (broken["state"], broken["code"], broken["level"]) == ("broken", "missing_system_lib", "import")
    assert broken["evidence"]["libraries"] == ["libibverbs.so.1", "libnuma.so.1"]
    assert broken["remedy"]["steps"] == [
        {"action": "os_install", "packages": ["libibverbs1", "libnuma1"], "args": {"manager": "apt"}}
    ]
    after = ask(hosts, probe_user="fresh")
    good = use(after, "mooncake", "kv_transfer")
    assert (good["state"], good["level"], good["remedy"]) == ("ok", "import", None)
    assert ENGINE in good["evidence"]["loaded"]
    assert any("libibverbs.so.1" in path for path in good["evidence"]["loaded"])
    # The wheel without CUDA is good for one use, and for no other.
    assert use(after, "mooncake", "a2a")["code"] == "torch_is_cpu_build"


@pytest.mark.parametrize(
    ("user", "account", "home"),
    [("fresh", "fresh", "/home/fresh"), ("ghost", "venvowner", None)],
)
def test_the_child_is_that_user_and_nothing_more_after_a_real_torch(hosts, module, user, account, home):
    module("deep_ep", SPY)
    probe = ask(hosts, probe_user=user)
    found = use(probe, "deep_ep", "a2a")
    assert found["evidence"]["exception"]["type"] == "RuntimeError", found
    seen = json.loads(found["evidence"]["exception"]["message"])
    ids = {name: int(hosts.shell("probe-c", f"id -{name} {account}")) for name in "ug"}
    groups = sorted(int(number) for number in hosts.shell("probe-c", f"id -G {account}").split())
    assert probe["account"] == account
    assert (seen["uids"], seen["gids"], seen["groups"]) == ([ids["u"]], [ids["g"]], groups)
    assert (seen["capabilities"], seen["sudo"], seen["here"], seen["isolated"]) == (0, [], [], 0)
    assert home is None or seen["home"] == home
    # torch was imported before the fork, and computes after it.
    assert seen["sum"] == 300.0**3
    assert (user == "ghost") == any("does not exist yet" in note for note in probe["notes"])


def test_without_become_it_says_what_it_could_not_see(hosts, module):
    module("deep_ep", SPY)
    probe = ask(hosts, become=False, probe_user="fresh")
    seen = json.loads(use(probe, "deep_ep", "a2a")["evidence"]["exception"]["message"])
    assert probe["account"] == "ops"
    assert seen["uids"] == [int(hosts.shell("probe-c", "id -u ops"))]
    assert any("become" in note for note in probe["notes"])


def test_pythonpath_of_the_service_shadows(hosts, rdma):
    hosts.shell("probe-c", "mkdir -p /opt/shadow/mooncake && echo > /opt/shadow/mooncake/__init__.py")
    found = use(
        ask(hosts, probe_user="fresh", probe_environment={"PYTHONPATH": "/opt/shadow"}), "mooncake", "kv_transfer"
    )
    assert (found["code"], found["evidence"]["path"]) == ("shadowed", "/opt/shadow/mooncake/__init__.py")
    assert found["state"] != "ok"
    assert "pip_install" not in [step["action"] for step in found["remedy"]["steps"]]


def test_a_venv_that_only_its_owner_reads(hosts, rdma):
    hosts.shell("probe-c", "chmod 700 /opt/sglang/venv")
    try:
        probe = ask(hosts, probe_user="fresh")
        own = ask(hosts, probe_user="venvowner")
    finally:
        hosts.shell("probe-c", "chmod 755 /opt/sglang/venv")
    assert (probe["venv"]["state"], probe["venv"]["code"]) == ("unreadable", "venv_unreadable_by_user")
    assert "fresh" in probe["venv"]["message"] and "/opt/sglang/venv" in probe["venv"]["message"]
    assert {data["code"] for data in probe["backends"].values()} == {"venv_unreadable_by_user"}
    assert {data["remedy"]["kind"] for data in probe["backends"].values()} == {"none"}
    assert use(own, "mooncake", "kv_transfer")["state"] == "ok"


DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "86399"])
    os._exit(0)
"""


def nothing_left(hosts: Any) -> bool:
    left = hosts.shell("probe-c", "ps -u fresh -o args= || true; ls -d /tmp/gpufleet-probe-* 2>/dev/null || true")
    return left.strip() == ""


def test_what_an_import_does_stays_in_its_child(hosts, module, rdma):
    module("deep_ep", "import time\ntime.sleep(3600)")
    module("nixl_ep", "import os\nos.abort()")
    module("nixl", "import os\nos._exit(139)")
    module("mori", DAEMON)
    probe = ask(hosts, probe_user="fresh", import_timeout=20, backends=["deep_ep", "mooncake", "nixl", "mori"])
    found = {
        name: use(probe, *name)
        for name in (("deep_ep", "a2a"), ("nixl", "a2a"), ("nixl", "kv_transfer"), ("mori", "a2a"))
    }
    assert {name: data["code"] for name, data in found.items()} == {
        ("deep_ep", "a2a"): "import_timeout",
        ("nixl", "a2a"): "import_crashed",
        ("nixl", "kv_transfer"): "import_exited",
        ("mori", "a2a"): None,
    }
    assert found[("nixl", "a2a")]["evidence"]["signal"] == "SIGABRT"
    assert found[("nixl", "kv_transfer")]["evidence"]["status"] == 139
    assert use(probe, "mooncake", "kv_transfer")["state"] == "ok"
    assert nothing_left(hosts)


def test_an_import_that_kills_the_process_that_imports(hosts, module, rdma):
    module("deep_ep", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.abort()")
    found = use(ask(hosts, probe_user="fresh"), "deep_ep", "a2a")
    assert (found["code"], found["evidence"]["signal"]) == ("import_crashed", "SIGABRT")
    assert nothing_left(hosts)


def test_an_interpreter_that_hangs_before_its_first_line(hosts, module):
    hosts.shell("probe-c", "mkdir -p /opt/slow && echo 'import time; time.sleep(3600)' > /opt/slow/sitecustomize.py")
    probe = ask(hosts, probe_user="fresh", import_timeout=5, probe_environment={"PYTHONPATH": "/opt/slow"})
    found = use(probe, "mooncake", "kv_transfer")
    assert (found["state"], found["code"]) == ("broken", "interpreter_does_not_start"), found
    assert "pip_install" not in [step["action"] for step in found["remedy"]["steps"]]
    assert nothing_left(hosts)


UNIT = """[Unit]
Description=stand-in
[Service]
User=fresh
ExecStart=/opt/sglang/venv/bin/python -c "import mooncake.engine, time; print(1, flush=True); time.sleep(86400)"
"""


def test_a_running_service_is_read_and_not_imported_beside(hosts, module, rdma):
    module("deep_ep", "open('/tmp/deep_ep_was_imported', 'w')")
    hosts.shell("probe-c", f"cat > /etc/systemd/system/sglang-default.service <<'END'\n{UNIT}END\n"
                "systemctl daemon-reload && systemctl start sglang-default && for i in $(seq 100); do "
                "grep -q mooncake/engine.so /proc/$(systemctl show -P MainPID sglang-default)/maps && exit 0; "
                "sleep 0.2; done; exit 1")  # fmt: skip
    try:
        probe = ask(hosts, probe_user="fresh", gather_subset=["backends", "service"])
        found = use(probe, "mooncake", "kv_transfer")
        assert (found["state"], found["level"]) == ("ok", "static")
        assert found["evidence"]["loaded_by_service"] == [ENGINE]
        assert any("nothing was imported" in note for note in probe["notes"])
        assert use(probe, "deep_ep", "a2a")["level"] == "static"
        assert hosts.shell("probe-c", "ls /tmp/deep_ep_was_imported 2>/dev/null || true") == ""
        # Only on request.
        ask(hosts, probe_user="fresh", gather_level="import")
        assert hosts.shell("probe-c", "stat -c %U /tmp/deep_ep_was_imported").strip() == "fresh"
        assert hosts.shell("probe-c", "systemctl is-active sglang-default").strip() == "active"
    finally:
        hosts.shell("probe-c", "systemctl stop sglang-default; rm -f /tmp/deep_ep_was_imported "
                    "/etc/systemd/system/sglang-default.service; systemctl daemon-reload")  # fmt: skip


def test_two_lookalikes(hosts):
    probe = ask(hosts, "probe-b")
    assert {name: (data["state"], data["code"]) for name, data in probe["backends"].items()} == {
        "deep_ep": ("absent", "not_installed"),
        "mooncake": ("wrong_distribution", "wrong_distribution"),
        "nixl": ("absent", "backend_without_meta"),
    }
    # The other project owns no file of ours: it stays.
    assert "pip_uninstall" not in [step["action"] for step in probe["backends"]["mooncake"]["remedy"]["steps"]]
    wanted = [step["packages"] for step in probe["backends"]["nixl"]["remedy"]["steps"]]
    assert wanted == [["nixl==1.5.1", "nixl-cu13==1.5.1"]]
