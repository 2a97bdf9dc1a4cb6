# SPDX-License-Identifier: GPL-3.0-or-later
"""Looks at the converged hosts from outside: systemd, /proc and real HTTP, not the collection's own words."""

from __future__ import annotations

import json
import shlex

import pytest
import testinfra


@pytest.fixture(scope="module")
def served(request):
    return testinfra.get_host("ssh://ops@10.90.8.11", sudo=True, **_ssh(request))


@pytest.fixture(scope="module")
def mended(request):
    return testinfra.get_host("ssh://root@10.90.8.12", **_ssh(request))


def _ssh(request):
    option = request.config.getoption
    return {"ssh_identity_file": option("--ssh-identity-file"), "ssh_extra_args": option("--ssh-extra-args")}


def post(host, path, body):
    command = f"curl -sS -m 60 -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))} http://127.0.0.1:31000{path}"
    return json.loads(host.check_output(command))


def test_the_unit_runs_as_its_user_and_comes_back_after_a_boot(served):
    service = served.service("sglang-default")
    assert service.is_running and service.is_enabled, served.run("journalctl -u sglang-default -n 50 --no-pager").stdout
    pid = served.check_output("systemctl show -P MainPID sglang-default")
    assert served.check_output(f"stat -c %U /proc/{pid}") == "sglang"


def test_the_process_has_the_flags_of_the_inventory(served):
    pid = served.check_output("systemctl show -P MainPID sglang-default")
    argv = served.check_output(f"tr '\\0' '\\n' < /proc/{pid}/cmdline").splitlines()
    for flag, value in (("--port", "31000"), ("--device", "cpu"), ("--max-total-tokens", "4096")):
        assert argv[argv.index(flag) + 1] == value


def test_it_answers_a_generation_and_only_on_loopback(served):
    answer = post(served, "/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
    assert answer["meta_info"]["completion_tokens"] == 4
    assert served.socket("tcp://127.0.0.1:31000").is_listening
    assert not served.socket("tcp://0.0.0.0:31000").is_listening


def test_the_mended_venv_imports_what_sglang_imports(mended):
    python = "/opt/sglang/venv/bin/python"
    mended.check_output(f"cd / && {python} -c 'from nixl._api import nixl_agent'")
    assert mended.check_output(f"{python} -m pip list --format=freeze 2>/dev/null | grep -c '^mooncake-transfer-engine-non-cuda=='") == "1"
    assert not mended.service("sglang-default").is_enabled
