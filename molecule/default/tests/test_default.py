# SPDX-License-Identifier: GPL-3.0-or-later
"""Looks at the converged hosts from outside: systemd, /proc and real HTTP, not the collection's own words."""

from __future__ import annotations

import json
import shlex

import pytest
import testinfra

KEY = "molecule-k%s$1-key"


@pytest.fixture(scope="module")
def served(request):
    return testinfra.get_host("ssh://ops@10.90.8.11", sudo=True, **_ssh(request))


@pytest.fixture(scope="module")
def mended(request):
    return testinfra.get_host("ssh://root@10.90.8.12", **_ssh(request))


def _ssh(request):
    option = request.config.getoption
    return {"ssh_identity_file": option("--ssh-identity-file"), "ssh_extra_args": option("--ssh-extra-args")}


def curl(host, path, body, *headers):
    words = ["curl", "-sS", "-m", "60", "-w", "\n%{http_code}", "-H", "Content-Type: application/json"]
    for header in headers:
        words += ["-H", header]
    words += ["-d", json.dumps(body), f"http://127.0.0.1:31000{path}"]
    answer, _, status = host.check_output(shlex.join(words)).rpartition("\n")
    return int(status), answer


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


def test_it_answers_a_generation_to_who_has_the_key_and_only_on_loopback(served):
    question = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}
    status, answer = curl(served, "/generate", question, f"Authorization: Bearer {KEY}")
    assert status == 200, answer
    assert json.loads(answer)["meta_info"]["completion_tokens"] == 4
    assert curl(served, "/generate", question)[0] == 401
    assert served.socket("tcp://127.0.0.1:31000").is_listening
    assert not served.socket("tcp://0.0.0.0:31000").is_listening


def test_the_key_is_where_only_root_and_the_service_read(served):
    pid = served.check_output("systemctl show -P MainPID sglang-default")
    assert KEY not in served.file(f"/proc/{pid}/cmdline").content_string
    assert KEY not in served.file("/etc/systemd/system/sglang-default.service").content_string
    assert KEY not in served.run("journalctl -u sglang-default --no-pager").stdout
    told = served.run("runuser -u nobody -- grep -rlF -- %s /etc /var/lib/gpufleet-sglang /run 2>/dev/null", KEY)
    assert told.stdout == ""


def test_the_mended_venv_imports_what_sglang_imports(mended):
    python = "/opt/sglang/venv/bin/python"
    mended.check_output(f"cd / && {python} -c 'from nixl._api import nixl_agent'")
    assert (
        mended.check_output(
            f"{python} -m pip list --format=freeze 2>/dev/null | grep -c '^mooncake-transfer-engine-non-cuda=='"
        )
        == "1"
    )
    assert not mended.service("sglang-default").is_enabled
