# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""service_unit on real systemd hosts, by a user that has nothing but sudo; what happened is read from outside.

Most tests run a stand-in for SGLang: a venv whose ``sglang.launch_server`` binds its port, starts a child that ignores
SIGTERM, and waits. The tests of secrets run the real one.
"""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "tests" / "hosts" / "hosts.py"
PREFIX = "svcunit"
VENV = "/opt/standin/venv"
KEY = "tEst-k%s$1-key"

pytestmark = pytest.mark.hosts

REAL: tuple[str, ...] = ("--device", "cpu", "--load-format", "dummy", "--attention-backend", "torch_native")
REAL += ("--max-total-tokens", "4096", "--max-running-requests", "8", "--model-path", "/models/tiny-llama")

LAUNCHER = """
import os, signal, socket, sys, time
argv = sys.argv
if "--crash" in argv:
    sys.exit(1)
port = int(argv[argv.index("--port") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener.close()
    while True:
        time.sleep(60)
while True:
    time.sleep(60)
"""

SETUP = f"""
set -e
python3 -m venv --without-pip {VENV}
cd {VENV}/lib/python3*/site-packages
mkdir -p sglang sglang-0.5.23.dist-info torch-2.14.1.dist-info
: > sglang/__init__.py
cat > sglang/launch_server.py
echo 'sglang/launch_server.py,sha256=aaaa,1' > sglang-0.5.23.dist-info/RECORD
echo 'torch/version.py,sha256=bbbb,1' > torch-2.14.1.dist-info/RECORD
mkdir -p /srv/model && echo '{{}}' > /srv/model/config.json
"""


def on_host(host: str, *command: str, stdin: str | None = None, check: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, str(HOSTS), "exec", host, *command], input=stdin, capture_output=True, text=True, timeout=120
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{command}: rc {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def shell(host: str, script: str, **kwargs: Any) -> str:
    return on_host(host, "sh", "-c", script, **kwargs)


class Fleet:
    """The hosts, and the module as a user runs it."""

    def __init__(self, inventory: Path) -> None:
        self.inventory = inventory
        self.said: list[str] = []

    def raw(self, host: str, arguments: dict[str, Any], *options: str) -> str:
        env = dict(
            os.environ,
            ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"),
            ANSIBLE_CALLBACK_RESULT_FORMAT="json",
            ANSIBLE_NOCOLOR="1",
        )
        command = [
            str(Path(sys.executable).parent / "ansible"),
            *("-i", str(self.inventory), host, "--become", *options),
            *("-m", "gpufleet.sglang.service_unit", "-a", json.dumps(arguments)),
        ]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=180)
        self.said.append(done.stdout + done.stderr)
        return done.stdout

    def __call__(self, host: str, *options: str, **arguments: Any) -> dict[str, Any]:
        text = self.raw(host, arguments, *options)
        _head, found, body = text.partition(" => ")
        assert found, text + self.said[-1]
        result: dict[str, Any] = json.loads(body)
        return result


def make_plan(port: int = 30000, instance: str = "default", extra: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
    return {
        "instance": instance,
        "argv": [f"{VENV}/bin/python", "-m", "sglang.launch_server", "--port", str(port), *extra],
        "env": env,
        "unit": {
            "user": "sglang",
            "group": "sglang",
            "host": "127.0.0.1",
            "port": port,
            "venv": VENV,
            "model_path": "/srv/model",
        },
    }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("test hosts need root")
    # What a killed run left in the hosts would decide the first tests.
    subprocess.run([sys.executable, str(HOSTS), "down", "--prefix", PREFIX], check=True)
    subprocess.run(
        [sys.executable, str(HOSTS), "up", "--prefix", PREFIX, "s1:ops", "s2:ops:env=sglang:models"], check=True
    )
    shown = subprocess.run(
        [sys.executable, str(HOSTS), "inventory", "--prefix", PREFIX], check=True, capture_output=True, text=True
    ).stdout
    inventory = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    inventory.write_text(shown)
    try:
        shell("s1", SETUP, stdin=LAUNCHER)
        yield Fleet(inventory)
    finally:
        subprocess.run([sys.executable, str(HOSTS), "down", "--prefix", PREFIX], check=True)


@pytest.fixture
def s1(fleet: Fleet) -> Iterator[Fleet]:
    yield fleet
    shell(
        "s1",
        "systemctl disable --now sglang-default sglang-other 2>/dev/null; cd /etc/systemd/system; "
        "rm -rf sglang-* old.service /etc/gpufleet-sglang /var/lib/gpufleet-sglang /var/*/sglang /run/go; "
        "systemctl daemon-reload; systemctl reset-failed",
    )


def argv_of(pid: int, host: str = "s1") -> list[str]:
    return decode(shell(host, f"base64 -w0 /proc/{pid}/cmdline"))


def decode(text: str) -> list[str]:
    return [item.decode() for item in base64.b64decode(text).split(b"\0")[:-1]]


def test_state_started_four_times(s1: Fleet) -> None:
    plan = make_plan()
    checked = s1("s1", "--check", "--diff", plan=plan)
    assert checked["changed"] and checked["needs"] == {"write": True, "start": True, "restart": False}
    assert (
        shell("s1", "ls -d /etc/systemd/system/sglang-* /etc/gpufleet-sglang/* 2>&1; true").count("No such file") == 2
    )
    applied = s1("s1", plan=plan)
    assert applied["changed"] and applied["active_state"] == "active" and applied["enabled"]
    assert applied["running_revision"] == applied["revision"] == checked["revision"]
    for options in (("--check",), ()):
        again = s1("s1", *options, plan=plan)
        assert not again["changed"], again
        assert again["pid"] == applied["pid"]


def test_argv_and_environment_arrive_byte_for_byte(s1: Fleet) -> None:
    extra = (
        "--chat-template",
        "/srv/t%s/a b.jinja",
        "--json",
        '{"enable": true, "path": "C:\\\\x\\n"}',
        "",
        ";",
        "$HOME ${HOME} $$ $",
        "%h%%%",
        "'single' \"double\"",
        "trailing\\",
        "\ttab\x01\x7f",
        "größe 😀 \u2028 \ufeff \x85",
        "#no comment",
        "-",
    )
    env: dict[str, Any] = {
        "SOME_JSON": '{"a": "$b`c`\\\\n"}',
        "BLANKS": "  x  ",
        "QUOTES": "'\"",
        "EMPTY": "",
        "HASH": "#x;y",
    }
    plan = make_plan(extra=extra, **env)
    result = s1("s1", plan=plan)
    assert argv_of(result["pid"]) == plan["argv"]
    seen = dict(item.split("=", 1) for item in decode(shell("s1", f"base64 -w0 /proc/{result['pid']}/environ")))
    assert {name: seen[name] for name in env} == env
    assert seen["PATH"].startswith(f"{VENV}/bin:") and seen["HOME"] == "/var/lib/sglang/default"
    assert shell("s1", "stat -c '%a %U' /etc/gpufleet-sglang/default/*.env").split() == ["600", "root"]


@pytest.mark.parametrize(("value", "said"), [("a\nb", "a line break"), ("\ufdd0", "a Unicode noncharacter")])
def test_what_systemd_cannot_carry_is_refused_before_anything_changes(s1: Fleet, value: str, said: str) -> None:
    result = s1("s1", plan=make_plan(extra=("--x", value)))
    assert result["msg"].startswith(f"the unit of default cannot be written: argument contains {said}")
    assert "No such file" in shell("s1", "ls /etc/systemd/system/sglang-default.service 2>&1; true")


def test_changed_library_restarts_once(s1: Fleet) -> None:
    plan = make_plan()
    first = s1("s1", plan=plan)
    shell("s1", f"cd {VENV}/lib/python3*/site-packages; echo 'x.py,sha256=cccc,1' >> torch-2.14.1.dist-info/RECORD")
    checked = s1("s1", "--check", plan=plan)
    assert checked["needs"] == {"write": True, "start": False, "restart": True}
    assert [item["name"] for item in checked["differences"]] == ["torch"]
    second = s1("s1", plan=plan)
    assert second["pid"] != first["pid"] and second["revision"] != first["revision"]
    assert not s1("s1", plan=plan)["changed"]


def test_rollback_goes_to_the_accepted_revision(s1: Fleet) -> None:
    good, bad = make_plan(), make_plan(extra=("--crash",))
    first = s1("s1", plan=good)
    assert s1("s1", state="accepted", revision=first["revision"])["changed"]
    assert not s1("s1", state="accepted")["changed"]
    second = s1("s1", plan=bad)
    assert second["last_good"] == first["revision"] != second["revision"]
    refused = s1("s1", state="accepted")
    assert "not accepted" in refused["msg"]
    checked = s1("s1", "--check", state="rolled_back")
    assert checked["changed"] and checked["revision"] == first["revision"]
    back = s1("s1", state="rolled_back")
    assert (back["current"], back["active_state"]) == (first["revision"], "active")
    assert argv_of(back["pid"]) == good["argv"]
    assert not s1("s1", state="rolled_back")["changed"]
    listed = {item["revision"]: item["last_good"] for item in s1("s1", state="observed")["revisions"]}
    assert listed == {first["revision"]: True, second["revision"]: False}
    assert not s1("s1", "--check", plan=good)["changed"]


def test_first_deploy_that_fails_is_stopped_and_disabled(s1: Fleet) -> None:
    s1("s1", plan=make_plan(extra=("--crash",)))
    back = s1("s1", state="rolled_back")
    assert (back["active_state"], back["enabled"], back["restored"]) == ("inactive", False, None)
    again = s1("s1", plan=make_plan())
    assert again["active_state"] == "active" and again["enabled"]


def test_takeover_and_back(s1: Fleet) -> None:
    key = KEY.replace("%", "%%").replace("$", "$$")
    unit = (
        f"[Service]\nExecStart={VENV}/bin/python -m sglang.launch_server --port 30000 --api-key {key}\n"
        "KillMode=process\n[Install]\nWantedBy=multi-user.target\n"
    )
    shell(
        "s1", "cat > /etc/systemd/system/old.service; systemctl daemon-reload; systemctl enable --now old", stdin=unit
    )
    result = s1("s1", plan=make_plan(extra=("--tp-size", "8")), takeover="old.service")
    assert {"flag": "--tp-size", "old": None, "new": "8"} in result["taken_over"]["differences"]
    assert "kill_mode_leaves_schedulers" in [item["code"] for item in result["taken_over"]["problems"]]
    assert KEY not in json.dumps(result)
    assert shell("s1", "systemctl is-active old; systemctl is-enabled old; true").split() == ["inactive", "disabled"]
    assert not s1("s1", plan=make_plan(extra=("--tp-size", "8")), takeover="old.service")["changed"]
    back = s1("s1", state="rolled_back")
    assert back["restored"] == "old.service" and not back["enabled"]
    assert shell("s1", "systemctl is-active old; systemctl is-enabled old").split() == ["active", "enabled"]
    shell("s1", "systemctl disable --now old; systemctl kill -s KILL --kill-who=all old; true", check=False)


def test_two_instances_do_not_touch_each_other(s1: Fleet) -> None:
    one = s1("s1", plan=make_plan())
    two = s1("s1", instance="other", plan=make_plan(30001, "other"))
    shell("s1", "touch /var/cache/sglang/other/kernel")
    assert s1("s1", instance="other", state="absent")["changed"]
    assert not s1("s1", instance="other", state="absent")["changed"]
    assert shell("s1", "ls /var/cache/sglang/other").split() == ["kernel"]
    left = shell("s1", "ls /etc/systemd/system /etc/gpufleet-sglang /var/lib/gpufleet-sglang/instances")
    assert "other" not in left and "sglang-default.service" in left
    assert s1("s1", state="observed")["pid"] == one["pid"] != two["pid"]


def test_stop_leaves_no_process(s1: Fleet) -> None:
    pid = s1("s1", plan=make_plan(), unit_overrides={"Service": {"TimeoutStopSec": "3s"}})["pid"]
    assert len(shell("s1", f"pgrep -g {pid} -f launch_server; true").split()) == 2
    assert s1("s1", "--check", state="stopped")["changed"]
    stopped = s1("s1", state="stopped")
    assert stopped["changed"] and stopped["active_state"] == "inactive" and stopped["enabled"]
    assert shell("s1", "pgrep -f launch_serve[r]; true") == ""
    assert not s1("s1", state="stopped")["changed"]


def test_port_taken_by_a_stranger_is_told_and_nothing_is_written(s1: Fleet) -> None:
    shell("s1", f"systemd-run --unit=stranger {VENV}/bin/python -m sglang.launch_server --port 30000")
    try:
        result = s1("s1", plan=make_plan())
        assert "port_taken" in result["msg"] and "stranger.service" in result["msg"]
        assert "No such file" in shell("s1", "ls /etc/systemd/system/sglang-default.service 2>&1; true")
        checked = s1("s1", "--check", plan=make_plan())
        assert [item["code"] for item in checked["problems"] if item["severity"] == "error"] == ["port_taken"]
    finally:
        # The stand-in's child ignores SIGTERM.
        shell("s1", "systemctl kill -s KILL --kill-who=all stranger; systemctl stop stranger", check=False)


def test_unreadable_model_and_low_port_are_told_together(s1: Fleet) -> None:
    shell("s1", "install -d -m 700 /srv/private; install -d /srv/private/model")
    plan = make_plan(port=443)
    plan["unit"]["model_path"] = "/srv/private/model"
    message = s1("s1", plan=plan)["msg"]
    assert "port_privileged" in message and "may not enter /srv/private" in message


def test_two_runs_at_once(s1: Fleet) -> None:
    slow = {"Service": {"ExecStartPre": "/bin/sh -c 'until [ -e /run/go ]; do sleep 0.1; done'"}}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(s1, "s1", plan=make_plan(), unit_overrides=slow)
        deadline = time.monotonic() + 30
        while "start-pre" not in shell("s1", "systemctl show -P SubState sglang-default"):
            assert time.monotonic() < deadline, first.result()
        second = s1("s1", state="stopped")
        shell("s1", "touch /run/go")
        assert "another run works on this instance: pid" in second["msg"], second
        assert first.result()["active_state"] == "active"


def test_full_disk_while_staging_leaves_the_service_as_it_was(s1: Fleet) -> None:
    before = s1("s1", plan=make_plan())
    shell("s1", "mount -t tmpfs -o size=4k,mode=700 full /var/lib/gpufleet-sglang/instances/default/revisions")
    try:
        result = s1("s1", plan=make_plan(extra=("--tp-size", "8")))
        assert "No space left on device" in result["msg"] and "unchanged" in result["msg"]
    finally:
        shell("s1", "umount /var/lib/gpufleet-sglang/instances/default/revisions")
    after = s1("s1", state="observed")
    assert (after["pid"], after["current"]) == (before["pid"], before["revision"])
    assert s1("s1", plan=make_plan(extra=("--tp-size", "8")))["active_state"] == "active"


def test_crash_loop_ends_and_the_next_run_converges(s1: Fleet) -> None:
    quick = {"Service": {"RestartSec": "100ms"}}
    s1("s1", plan=make_plan(extra=("--crash",)), unit_overrides=quick)
    deadline = time.monotonic() + 60
    while "repeated too quickly" not in shell("s1", "journalctl -u sglang-default --no-pager"):
        assert time.monotonic() < deadline
    assert s1("s1", plan=make_plan())["active_state"] == "active"


def test_damaged_store_is_told_and_mended(s1: Fleet) -> None:
    plan = make_plan()
    first = s1("s1", plan=plan)
    s1("s1", state="accepted")
    store = "/var/lib/gpufleet-sglang/instances/default"
    shell("s1", f"echo garbage > {store}/revisions/{first['revision']}/env; echo nonsense > {store}/current")
    told = s1("s1", state="observed")
    assert [item["code"] for item in told["problems"] if item["code"] == "store_damaged"]
    assert "not stored or damaged" in s1("s1", state="rolled_back")["msg"]
    mended = s1("s1", plan=plan)
    assert mended["changed"] and mended["pid"] == first["pid"]
    assert not [item for item in mended["problems"] if item["code"] == "store_damaged"]
    assert not s1("s1", plan=plan)["changed"]
    assert s1("s1", state="rolled_back")["current"] == first["revision"]


def test_exposure(s1: Fleet) -> None:
    assert s1("s1", plan=make_plan())["active_state"] == "active"
    shell("s1", "systemd-analyze security --no-pager --threshold=40 sglang-default.service >/dev/null")


def real_plan() -> dict[str, Any]:
    plan = make_plan()
    plan["argv"] = ["/opt/sglang/venv/bin/python", "-m", "sglang.launch_server", "--port", "30000", *REAL]
    plan["env"] = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    plan["unit"].update(venv="/opt/sglang/venv", model_path="/models/tiny-llama")
    return {**plan, "secret_flags": ["api_key"]}


def answers(host: str, key: str | None = None) -> str:
    url = "http://127.0.0.1:30000/v1/models"
    header = "" if key is None else "-H @-"
    stdin = None if key is None else f"Authorization: Bearer {key}\n"
    return shell(host, f"curl -s -o /dev/null -w '%{{http_code}}' {header} {url}; true", stdin=stdin)


def serves_with_the_key_only(fleet: Fleet, host: str, by_credential: bool) -> None:
    secrets = {"api_key": KEY, "hf_token": "hf_tEsTtOkEn"}
    passed = json.dumps({"plan": real_plan(), "secrets": secrets})
    text = fleet.raw(host, {"plan": real_plan(), "secrets": secrets}, "--diff", "-vvv")
    assert '"active_state": "active"' in text, text.replace(passed, "")
    result = fleet(host, state="observed")
    told = {item["code"] for item in fleet(host, "--check", plan=real_plan(), secrets=secrets)["problems"]}
    assert ("credentials_not_passed" in told) is not by_credential
    deadline = time.monotonic() + 200
    while answers(host) != "401":
        assert time.monotonic() < deadline, shell(host, "journalctl --namespace='*' -n 40 --no-pager")
        time.sleep(1)
    assert answers(host, KEY) == "200"
    environment = decode(shell(host, f"base64 -w0 /proc/{result['pid']}/environ"))
    path = next(item for item in environment if item.startswith("HF_TOKEN_PATH=")).partition("=")[2]
    assert shell(host, f"cat {path}").strip() == secrets["hf_token"]
    for secret in secrets.values():
        assert not [said for said in fleet.said if secret in said]
        found = shell(
            host,
            "cat > /root/needle; grep -rlFf /root/needle /etc /var/lib /var/log /run /tmp /home 2>/dev/null; "
            "for p in /proc/[0-9]*/cmdline /proc/[0-9]*/environ; do grep -qFf /root/needle $p 2>/dev/null && echo $p; "
            "done; journalctl --no-pager | grep -Ff /root/needle; rm /root/needle",
            stdin=secret,
        ).splitlines()
        folders = (
            "/etc/gpufleet-sglang/default/secrets/",
            "/etc/gpufleet-sglang/default/service/",
            "/run/credentials/",
        )
        own_log = [line for line in found if line.startswith("/var/log/journal/") and ".sglang-default/" in line]
        assert not [line for line in found if not line.startswith(folders) and line not in own_log], found
        for line in found:
            closed = shell(host, f"runuser -u nobody -- cat '{line}' 2>&1; true")
            assert "Permission denied" in closed, line


def test_secrets_with_the_real_sglang_where_credentials_do_not_work(fleet: Fleet) -> None:
    serves_with_the_key_only(fleet, "s2", by_credential=False)
    level = shell("s2", "systemd-analyze security --no-pager sglang-default.service | tail -1")
    assert float(level.split(":")[1].split()[0]) <= 4.0
    assert fleet("s2", state="stopped")["active_state"] == "inactive"
    assert shell("s2", "systemctl show -P Result sglang-default").strip() == "success"


@pytest.mark.slow
def test_secrets_with_an_old_sglang_by_credential(tmp_path: Path) -> None:
    prefix = f"{PREFIX}n"
    up = [sys.executable, str(HOSTS), "up", "--prefix", prefix, "--backend", "nspawn", "n1:ops:env=sglang-0.5.9:models"]
    subprocess.run(up, check=True)
    try:
        inventory = tmp_path / "hosts.yml"
        command = [sys.executable, str(HOSTS), "inventory", "--prefix", prefix]
        inventory.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        old = Fleet(inventory)
        serves_with_the_key_only(old, "n1", by_credential=True)
        assert old("n1", state="stopped")["active_state"] == "inactive"
        # SGLang of that age ends itself with SIGKILL when it is asked to stop.
        assert shell("n1", "systemctl show -P Result sglang-default").strip() == "success"
    finally:
        subprocess.run([sys.executable, str(HOSTS), "down", "--prefix", prefix], check=True)
