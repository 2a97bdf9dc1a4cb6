# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input on a real host: one clear message a fault, exit status not zero, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.hosts

CPU = {
    "device": "cpu",
    "load_format": "dummy",
    "attention_backend": "torch_native",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
}
GOOD = {"sglang_venv": "/opt/sglang/venv", "sglang_model_path": "/models/tiny-llama", "sglang_flags": CPU}

# host alias → (what is wrong, words that its message must hold)
CASES = {
    "no-venv": ({"sglang_venv": "/opt/nowhere/venv"}, ["sglang_venv", "/opt/nowhere/venv"]),
    "file-as-venv": ({"sglang_venv": "/etc/hostname"}, ["sglang_venv", "/etc/hostname"]),
    "no-model": ({"sglang_model_path": "/models/nothing-here"}, ["sglang_model_path", "/models/nothing-here"]),
    "misspelt": ({"sglang_prot": 30001}, ["sglang_prot", "sglang_port"]),
    "unknown-flag": (
        {"sglang_flags": {**CPU, "max_runing_requests": 8}},
        ["max-runing-requests", "sglang_flags", "--max-running-requests"],
    ),
    "bad-choice": ({"sglang_flags": {**CPU, "load_format": "dumy"}}, ["load", "dumy", "dummy"]),
    "port-range": ({"sglang_port": 70000}, ["sglang_port", "70000"]),
    "unreadable-venv": ({"sglang_venv": "/srv/private/venv"}, ["/srv/private", "sglang"]),
}


@pytest.fixture(scope="module")
def refused(fleet):
    hosts = fleet("bad", "target:ops:models:env=sglang")
    hosts.shell(
        "target", "mkdir -p /srv/private && python3 -m venv --without-pip /srv/private/venv && chmod 700 /srv/private"
    )
    inventory = yaml.safe_load(hosts.inventory.read_text())
    target = inventory["sglang"]["hosts"].pop("target")
    for alias, (wrong, _words) in CASES.items():
        inventory["sglang"]["hosts"][alias] = {**target, **GOOD, **wrong}
    path = Path(hosts.inventory).with_name("bad-input.yml")
    path.write_text(yaml.safe_dump(inventory))
    return hosts, hosts.play("site", inventory=path)


def test_the_run_ends_not_zero_and_reaches_no_wave(refused):
    _hosts, done = refused
    assert done.returncode != 0, done.stdout[-3000:]
    assert "PLAY [Change what needs changing]" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("alias", CASES)
def test_each_fault_is_told_with_host_variable_value_and_remedy(refused, alias):
    _hosts, done = refused
    told = [line for line in done.stdout.splitlines() if alias in line]
    for word in CASES[alias][1]:
        assert any(word in line for line in told), (word, told)


def test_nothing_is_written(refused):
    hosts, _done = refused
    places = "/etc/systemd/system/sglang-* /etc/gpufleet-sglang /var/lib/gpufleet-sglang"
    written = f"ls -d {places} 2>/dev/null; getent passwd sglang"
    assert hosts.shell("target", written, check=False) == ""
