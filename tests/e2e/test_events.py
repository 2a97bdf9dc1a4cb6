# SPDX-License-Identifier: GPL-3.0-or-later
"""The shipped rulebook in a real ansible-rulebook.

Events by webhook on the loopback, a real remediate with its limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERSION = "1.3.2"
TOKEN = "loopback-token"
PATIENCE = 180


@pytest.fixture(scope="module")
def rulebook():
    """ansible-rulebook in an own environment in the cache; it needs Java 17."""
    cache = Path(
        os.environ.get("GPUFLEET_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpufleet-sglang"
    )
    home = cache / f"ansible-rulebook-{VERSION}"
    if not shutil.which("java"):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            pytest.fail("needs Java 17 (apt-get install openjdk-17-jre-headless)")
        subprocess.run(["apt-get", "install", "-yqq", "--no-install-recommends", "openjdk-17-jre-headless"], check=True)
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/pip", "install", "-q", f"ansible-rulebook=={VERSION}"], check=True)
        (home / "complete").touch()
    return home


@pytest.mark.parametrize("name", ["remediate.yml", "remediate_awx.yml"])
def test_rulebooks_follow_the_schema_of_ansible_rulebook(rulebook, name):
    schema = json.loads(
        next(rulebook.glob("lib/*/site-packages/ansible_rulebook/schema/ruleset_schema.json")).read_text()
    )
    jsonschema.validate(yaml.safe_load((ROOT / "extensions/eda/rulebooks" / name).read_text()), schema)


class Running:
    def __init__(self, process, port):
        self.process, self.port = process, port
        self.lines: list[str] = []
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line))
                self.changed.notify_all()

    def wait_for(self, wanted, start=0):
        """Return when ``wanted(text since start)`` is true; the patience is for a machine that hangs."""
        with self.changed:
            done = self.changed.wait_for(
                lambda: wanted("".join(self.lines[start:])) or self.process.poll() is not None, PATIENCE
            )
            text = "".join(self.lines[start:])
        assert done and wanted(text), text[-4000:]
        return text

    def post(self, payload, token=TOKEN):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/endpoint",
            json.dumps(payload).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture(scope="module")
def running(rulebook, tmp_path_factory):
    work = tmp_path_factory.mktemp("events")
    venv.create(work / "venv", with_pip=False)
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}
    group = {
        "hosts": {f"gpu-{number}": host for number in range(1, 9)},
        "vars": {
            "sglang_venv": str(work / "venv"),
            "sglang_gather_level": "static",
            "sglang_artifacts_dir": str(work / "out"),
        },
    }
    (work / "hosts.json").write_text(json.dumps({"sglang": group}))
    (work / "inventory.yml").write_text(yaml.safe_dump({"sglang": group}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"sglang_webhook_host": "127.0.0.1", "sglang_webhook_port": port, "sglang_webhook_token": TOKEN}
    (work / "vars.yml").write_text(yaml.safe_dump(settings))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{rulebook / 'bin'}:{os.environ['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "XDG_STATE_HOME": str(work / "state"),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [
            str(rulebook / "bin/ansible-rulebook"), "-r", str(ROOT / "extensions/eda/rulebooks/remediate.yml"),
            "-i", str(work / "inventory.yml"), "--vars", str(work / "vars.yml"), "-v",
        ],
        cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    started = Running(process, port)
    try:
        deadline = time.monotonic() + PATIENCE
        while started.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "".join(started.lines)
            time.sleep(0.2)
        assert process.poll() is None, "".join(started.lines)
        yield started, work
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def alerts(*hosts, name="SGLangNotReady"):
    return {
        "alerts": [{"status": "firing", "labels": {"alertname": name, "instance": f"{host}:9100"}} for host in hosts]
    }


def test_without_the_token_nothing_is_heard(running):
    assert running[0].post(alerts("gpu-1"), token="wrong") == 401


def test_an_alert_remediates_its_host_and_no_other(running):
    eda, work = running
    assert eda.post(alerts("gpu-2", "gpu-3")) == 200
    text = eda.wait_for(lambda text: "PLAY RECAP" in text and "gpu-3 " in text.rpartition("PLAY RECAP")[2])
    recap = text.rpartition("PLAY RECAP")[2]
    assert "gpu-2 " in recap and "gpu-1 " not in recap
    report = json.loads((work / "out/report.json").read_text())
    assert report["kind"] == "remediate" and list(report["hosts"]) == ["gpu-2", "gpu-3"]


def test_the_same_alert_again_is_held_back_by_the_cooldown(running):
    eda, _ = running
    start = len(eda.lines)
    assert eda.post(alerts("gpu-2")) == 200
    text = eda.wait_for(lambda text: "held back" in text, start)
    assert "gpu-2: remediated 0 min ago, cool-down is 60 min" in text and "PLAY RECAP" not in text


def test_a_storm_ends_at_the_cap_and_a_group_is_no_host(running):
    eda, work = running
    start = len(eda.lines)
    assert eda.post(alerts("all", *[f"gpu-{number}" for number in range(1, 9)], name="SGLangDrift")) == 200
    text = eda.wait_for(lambda text: "held back" in text and "gpu-5 " in text.rpartition("PLAY RECAP")[2], start)
    assert "all: not the name of a host of this fleet" in text
    assert "gpu-6: 5 hosts within 24 h, the cap is 5" in text
    assert list(json.loads((work / "out/report.json").read_text())["hosts"]) == ["gpu-1", "gpu-4", "gpu-5"]
    assert len(json.loads((work / "state/gpufleet-sglang/events.json").read_text())["runs"]) == 5
