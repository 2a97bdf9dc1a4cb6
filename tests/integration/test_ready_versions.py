# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""service_ready and a clean stop on real servers of several versions, one of them with a key and with TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = "vErsions-k%s$1-key"
TLS = "/etc/ssl/sglang-test"

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


def module(fleet: Any, name: str, **arguments: Any) -> dict[str, Any]:
    """Run a module of the collection on the host as a user does; returns its result."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible")), "-i", str(fleet.inventory), "ver-a", "--become",
         "-m", f"gpufleet.sglang.{name}", "-a", json.dumps(arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_NOCOLOR": "1",
             "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
    )  # fmt: skip
    assert KEY not in done.stdout + done.stderr
    start = done.stdout.find("=> {")
    assert start >= 0, done.stdout + done.stderr
    result: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout[start + 3 :])[0]
    return result


@pytest.mark.parametrize(("version", "tls"), [("0.5.9", False), ("0.5.12", False), ("0.5.18", True), ("0.5.23", True)])
def test_ready_verified_and_stopped_cleanly(fleet: Callable[..., Any], version: str, tls: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("test hosts need root")
    made = fleet("ver", "--subnet", "10.91.14.0/24", f"ver-a:ops:env=sglang-{version}:models")
    argv = ["/opt/sglang/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/tiny-llama"]
    argv += ["--device", "cpu", "--load-format", "dummy", "--attention-backend", "torch_native", "--sleep-on-idle"]
    argv += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--port", "31000"]
    if tls:
        made.shell(
            "ver-a",
            f"install -d -m 755 {TLS}; cd {TLS}; "
            "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost; "
            "groupadd --system sglang; chgrp sglang key.pem; chmod 640 key.pem",
        )
        argv += ["--ssl-certfile", f"{TLS}/cert.pem", "--ssl-keyfile", f"{TLS}/key.pem"]
    about = {"user": "sglang", "group": "sglang", "host": "127.0.0.1", "port": 31000}
    about |= {"venv": "/opt/sglang/venv", "model_path": "/models/tiny-llama"}
    plan = {"instance": "default", "argv": argv, "unit": about, "secret_flags": ["api_key"]}
    plan["env"] = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    started = module(made, "service_unit", instance="default", plan=plan, secrets={"api_key": KEY})
    assert started["active_state"] == "active", started

    asked = {"instance": "default", "port": 31000, "model": "/models/tiny-llama", "expected_argv": started["argv"]}
    asked |= {"api_key_file": started["api_key_file"], "timeout": 280, "stall_timeout": 200, "hard_timeout": 300}
    ready = module(made, "service_ready", **asked)
    assert ready["ready"], ready
    assert ready["evidence"]["generations"] == ["short", "long"] and ready["evidence"]["listener"]["owned"]
    assert ready["server"]["version"].startswith(version), ready["server"]
    verified = module(made, "service_ready", mode="verify", **asked)
    assert verified["ready"] and KEY not in json.dumps(verified)

    refused = module(made, "service_ready", **{**asked, "api_key_file": "/etc/hostname", "timeout": 60})
    assert refused["cause"]["code"] == "api_key_refused", refused["cause"]

    began = time.monotonic()
    stopped = module(made, "service_unit", instance="default", state="stopped")
    print(f"stop of {version}: {time.monotonic() - began:.1f} s")
    assert stopped["active_state"] == "inactive"
    assert made.shell("ver-a", "systemctl show -P Result sglang-default").strip() == "success"
    assert made.shell("ver-a", "pgrep -f 'sglang[:.]'; true").strip() == ""
