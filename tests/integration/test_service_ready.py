# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""service_ready against a real SGLang on CPU under a real systemd, and against what goes wrong there."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS = ROOT / "tests" / "hosts" / "hosts.py"
PREFIX, SUBNET, HOST = "ready", "10.91.4.0/24", "ready-a"
CACHE = pathlib.Path(
    os.environ.get("GPUFLEET_CACHE")
    or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "gpufleet-sglang"
)
ARGV = (
    "/opt/sglang/venv/bin/python -m sglang.launch_server --device cpu --model-path {model} --load-format dummy "
    "--attention-backend torch_native --max-total-tokens 4096 --max-running-requests 8 --port {port}"
)
UNIT = """[Unit]
StartLimitIntervalSec=0
[Service]
Environment=SGLANG_USE_CPU_ENGINE=1 PATH=/opt/sglang/venv/bin:/usr/bin:/bin HOME=/tmp
ExecStart={argv}
Restart=on-failure
RestartSec=20
SuccessExitStatus=137
"""


def sh(command, check=True, stdin=None):
    done = subprocess.run(
        ["ssh", "-F", str(CACHE / "hosts" / PREFIX / "ssh_config"), HOST, command],
        input=stdin, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def host():
    made = subprocess.run(
        [sys.executable, str(HOSTS), "up", "--prefix", PREFIX, "--subnet", SUBNET, f"{HOST}:env=sglang:models"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    yield HOST
    subprocess.run([sys.executable, str(HOSTS), "down", "--prefix", PREFIX], check=True, timeout=120)


class Service:
    """One unit on the host."""

    def __init__(self, instance, model="/models/tiny-llama", extra="", port=30000):
        self.instance, self.port, self.model = instance, port, model
        self.argv = (ARGV.format(model=model, port=port) + extra).split()
        self.unit = f"sglang-{instance}.service"

    def __enter__(self):
        sh(f"cat > /run/systemd/system/{self.unit} && systemctl daemon-reload && systemctl start {self.unit}",
           stdin=UNIT.format(argv=" ".join(self.argv)))  # fmt: skip
        return self

    def __exit__(self, *_exception):
        sh(f"systemctl kill -s KILL {self.unit}; systemctl stop {self.unit}; rm -f /run/systemd/system/{self.unit};"
           "systemctl daemon-reload; systemctl reset-failed", check=False)  # fmt: skip

    def ready(self, check=False, **more):
        """Run service_ready; its result, its output, and how long it took."""
        args = {"instance": self.instance, "port": self.port, "model": self.model, "expected_argv": self.argv,
                "timeout": 240, "stall_timeout": 180, "hard_timeout": 280, "slice_seconds": 10, **more}  # fmt: skip
        ansible = pathlib.Path(sys.executable).with_name("ansible")
        began = time.monotonic()
        done = subprocess.run(
            [str(ansible), "-i", str(CACHE / "hosts" / PREFIX / "inventory.yml"), HOST, "-m",
             "gpufleet.sglang.service_ready", "-a", json.dumps(args), *(["--check"] if check else [])],
            capture_output=True, text=True, timeout=400,
            env=dict(os.environ, ANSIBLE_COLLECTIONS_PATH=str(ROOT / "collections"), ANSIBLE_PIPELINING="1",
                     ANSIBLE_HOST_KEY_CHECKING="0", ANSIBLE_NOCOLOR="1",
                     ANSIBLE_CALLBACK_RESULT_FORMAT="json"),
        )  # fmt: skip
        took = time.monotonic() - began
        start = done.stdout.find("=> {")
        assert start >= 0, done.stdout + done.stderr
        result, _end = json.JSONDecoder().raw_decode(done.stdout[start + 3 :])
        return result, done.stdout, took


def test_the_true_timeline_and_a_killed_scheduler(host):
    with Service("default") as service:
        result, said, _took = service.ready()
        assert result["ready"], result
        states = [entry["state"] for entry in result["history"]]
        assert (
            states[0] == "starting"
            and states[-1] == "ready"
            and set(states) <= {"starting", "loading", "warming", "ready"}
        )
        assert result["evidence"]["generations"] == ["short", "long"]
        assert result["evidence"]["listener"]["owned"] is True
        assert result["server"]["version"].startswith("0.5.")
        assert f"{HOST} | default | ready" in said

        again, _said, _took = service.ready(was_ready_before=True)
        assert again["ready"] and again["evidence"]["requests"]["generations"] == 1 and not again["changed"]

        looked, _said, _took = service.ready(mode="verify")
        assert looked["ready"] and looked["server_info"]["tp_size"] == 1 and looked["maps_complete"]

        other, _said, _took = service.ready(mode="verify", expected_argv=[*service.argv, "--tp-size", "2"])
        assert other["state"] == "failed" and other["cause"]["code"] == "revision_mismatch"
        other, _said, _took = service.ready(mode="verify", model="kimi")
        assert other["cause"]["code"] == "wrong_model"

        sh("pkill -9 -f '^sglang::scheduler'")
        dead, _said, _took = service.ready()
        assert dead["state"] in ("failed", "crash_loop", "stopped") and not dead["ready"]
        assert not sh("ls -d /run/gpufleet-ready-* 2>/dev/null", check=False)


def test_a_stranger_on_the_port_is_told_before_the_load(host):
    sh("systemd-run --unit=stranger python3 -m http.server 30001 --bind 127.0.0.1; sleep 1")
    try:
        with Service("taken", port=30001) as service:
            result, _said, _took = service.ready()
            assert result["state"] == "failed" and result["cause"]["code"] == "port_held_by_other"
            assert result["evidence"]["requests"] == {"generations": 0, "other": 0}
            assert result["elapsed"] < 10
    finally:
        sh("systemctl stop stranger")


@pytest.mark.parametrize(
    ("instance", "model", "extra", "code"),
    [
        ("flag", "/models/tiny-llama", " --no-such-flag 3", "flag_unknown"),
        ("model", "/models/nowhere", "", "model_path_absent"),
        ("a2a", "/models/tiny-moe", " --moe-a2a-backend deepep", "backend_missing"),
    ],
)
def test_a_failed_start_is_told_with_its_first_error(host, instance, model, extra, code):
    with Service(instance, model, extra, port=30002) as service:
        result, _said, _took = service.ready()
        assert result["state"] in ("crash_loop", "failed")
        assert result["cause"]["code"] == code, result["cause"]
        assert result["cause"]["lines"]
        died = float(sh(f"systemctl show -p InactiveEnterTimestampMonotonic --value {service.unit}").strip() or 0) / 1e6
        seen = result["observation"]["at"]
        active = float(sh(f"systemctl show -p ActiveEnterTimestampMonotonic --value {service.unit}").strip() or 0) / 1e6
        if died > active > 0:
            # systemd knew it `died - active` seconds after the start, and the wait began after the start.
            assert seen <= died - active + 3

        stopped, _said, _took = service.ready(check=True)
        assert not stopped["ready"] and not stopped.get("failed")


def test_a_unit_that_is_not_there(host):
    service = Service("nobody")
    result, _said, _took = service.ready()
    assert result["state"] == "failed" and result["cause"]["code"] == "unit_missing"
    result, _said, _took = service.ready(check=True)
    assert not result.get("failed") and result["state"] == "failed"
