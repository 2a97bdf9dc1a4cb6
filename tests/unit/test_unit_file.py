# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The unit that is rendered, and the judgement of units made by others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_file import (
    UnitError,
    UnitSpec,
    build_unit,
    compare_argv,
    default_environment,
    format_unit,
    gpu_wait_command,
    parse_span,
    parse_unit,
    review_environment,
    review_unit,
    setting,
    settings,
    unit_argv,
    unit_name,
    unit_revision,
)

ARGV = ["/opt/sglang/venv/bin/python", "-m", "sglang.launch_server", "--served-model-name", "m$$x%20y a"]


def spec(**changes: Any) -> UnitSpec:
    given: dict[str, Any] = {
        "instance": "default",
        "argv": ARGV,
        "user": "sglang",
        "group": "sglang",
        "env_file": "/etc/gpufleet-sglang/default/@REVISION@.env",
        "venv": "/opt/sglang/venv",
        "model_path": "/models/x",
    }
    return UnitSpec(**{**given, **changes})


def value(key: str, section: str = "Service", **changes: Any) -> str | None:
    return setting(build_unit(spec(**changes)), section, key)


def codes(text: str, env: dict[str, str] | None = None) -> set[str]:
    return {item["code"] for item in review_unit(parse_unit(text), env) if item["severity"] == "error"}


def test_the_unit_reads_back() -> None:
    text = format_unit(build_unit(spec()), "default").replace("@REVISION@", "0123456789abcdef")
    assert unit_argv(text) == ARGV
    assert unit_revision(text) == "0123456789abcdef"


def test_our_own_unit_has_none_of_the_faults_that_we_tell_others() -> None:
    for changes in ({}, {"expected_gpus": 8}, {"sglang_version": "0.5.23"}):
        assert [item for item in review_unit(build_unit(spec(**changes))) if item["severity"] == "error"] == []


def test_order_limits_and_start_limit() -> None:
    unit = build_unit(spec())
    after = setting(unit, "Unit", "After")
    assert after and {"nvidia-persistenced.service", "nvidia-fabricmanager.service"} <= set(after.split())
    assert setting(unit, "Service", "LimitMEMLOCK") == "infinity"
    assert (setting(unit, "Unit", "StartLimitBurst"), setting(unit, "Service", "StartLimitBurst")) == ("4", None)


@pytest.mark.parametrize(("version", "old"), [("0.5.18", True), ("0.5.23", False), ("0.6.0.dev1", False), (None, True)])
def test_a_clean_stop_of_old_versions_is_a_success_and_a_crash_still_restarts(version: str | None, old: bool) -> None:
    unit = build_unit(spec(sglang_version=version))
    assert (setting(unit, "Service", "SuccessExitStatus") is not None) is old
    # Without this, a scheduler that kills its launcher would count as a clean end.
    assert (setting(unit, "Service", "RestartForceExitStatus") is not None) is old


@pytest.mark.parametrize(
    ("changes", "protection"),
    [
        ({}, "yes"),
        ({"venv": "/home/ml/venv"}, "read-only"),
        ({"model_path": "/root/models/x"}, "read-only"),
        ({"env": {"HF_HOME": "/home/ml/.cache/huggingface"}}, "read-only"),
        ({"argv": [*ARGV, "--extra", '{"path": "/home/ml/x"}']}, "read-only"),
        ({"venv": "/homestead/venv"}, "yes"),
    ],
)
def test_home_is_hidden_unless_the_service_needs_it(changes: dict[str, Any], protection: str) -> None:
    assert value("ProtectHome", **changes) == protection


def test_log_filter_where_systemd_can() -> None:
    assert value("LogFilterPatterns", secret_flags=["api_key"], systemd_version=253) == "~(api[-_]key)"
    assert value("LogFilterPatterns", secret_flags=["api_key"], systemd_version=252) is None
    assert value("LogFilterPatterns", systemd_version=255) is None
    assert value("LogNamespace", log_namespace="sglang-default") == "sglang-default"


def test_gpu_wait_is_bounded_and_inside_the_start_timeout() -> None:
    unit = build_unit(spec(expected_gpus=8, gpu_wait_seconds=120))
    timeout = parse_span(setting(unit, "Service", "TimeoutStartSec"))
    # 60 looks of at most 20 s, 2 s apart
    assert timeout is not None and timeout > 60 * 22
    assert any("-ge 8 ]" in command for command in settings(unit, "Service", "ExecStartPre"))


@pytest.mark.parametrize(("listed", "wanted", "rc"), [(2, 2, 0), (3, 2, 0), (1, 2, 1), (0, 1, 1)])
def test_gpu_wait_script(tmp_path: Path, listed: int, wanted: int, rc: int) -> None:
    fake = tmp_path / "nvidia-smi"
    lines = "".join(f"echo 'GPU {index}: X (UUID: GPU-{index})'\n" for index in range(listed))
    fake.write_text(f"#!/bin/sh\n{lines}[ {listed} -gt 0 ]\n")
    fake.chmod(0o755)
    done = subprocess.run(
        gpu_wait_command(wanted, 2), env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == rc
    assert (f"{wanted} GPUs expected, {listed} found" in done.stderr) is bool(rc)


def test_overrides_replace_and_add() -> None:
    unit = build_unit(
        spec(overrides={"Service": {"RestartSec": 60, "Environment": ["A=1", "B=2"], "PrivateTmp": False}})
    )
    assert settings(unit, "Service", "RestartSec") == ["60"]
    assert settings(unit, "Service", "Environment")[-2:] == ["A=1", "B=2"]
    assert unit_revision(format_unit(unit, "default")) == "@REVISION@"
    assert setting(unit, "Service", "PrivateTmp") == "no"


@pytest.mark.parametrize(
    "overrides",
    [
        {"Service": {"ExecStart": "/bin/true"}},
        {"Service": {"User": "root"}},
        {"Nope": {"A": "b"}},
        {"Service": {"RestartSec": "5\nExecStartPre=/bin/evil"}},
        {"Service": {"not a key": "x"}},
        {"Service": {"RestartSec": "5\\"}},
    ],
)
def test_overrides_that_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(UnitError):
        build_unit(spec(overrides=overrides))


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a b", "a.b", "x" * 49, "../x", "ä"])
def test_instance_names_that_cannot_be_a_unit(name: str) -> None:
    with pytest.raises(UnitError):
        unit_name(name)


def test_environment_has_the_compilers_and_the_caches() -> None:
    env = default_environment("a", ARGV, {"CUDA_HOME": "/usr/local/cuda-12.8", "HF_HOME": "/data/hf"})
    assert env["PATH"] == (
        "/opt/sglang/venv/bin:/usr/local/cuda-12.8/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    assert env["HF_HOME"] == "/data/hf"
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert env[name].startswith("/var/cache/sglang/a")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("LimitMEMLOCK=infinity", set()),
        ("", {"memlock_not_set_in_unit"}),
        ("LimitMEMLOCK=unlimited", {"memlock_word_ignored"}),
        ("LimitMEMLOCK=infinity\nKillMode=process", {"kill_mode_leaves_schedulers"}),
        ("LimitMEMLOCK=infinity\nKillMode=none", {"kill_mode_leaves_schedulers"}),
        ("LimitMEMLOCK=infinity\nRestart=always\nRestartSec=10", {"restart_unbounded"}),
        ("LimitMEMLOCK=infinity\nPrivateDevices=yes", {"private_devices_hides_gpus"}),
        ("LimitMEMLOCK=infinity\nDevicePolicy=closed\nDeviceAllow=/dev/nvidia0 rw", {"device_policy_hides_gpus"}),
        ("LimitMEMLOCK=infinity\nDevicePolicy=closed\nDeviceAllow=char-nvidia* rw", set()),
        ("LimitMEMLOCK=infinity\nProtectClock=yes", {"protect_clock_hides_gpus"}),
        ("LimitMEMLOCK=infinity\nPrivateTmp=yes", set()),
        ("LimitMEMLOCK=infinity\nMemoryDenyWriteExecute=yes", {"memory_deny_write_execute_breaks_jit"}),
        ("LimitMEMLOCK=infinity\nType=notify", {"type_never_starts"}),
        ("LimitMEMLOCK=infinity\nType=exec", set()),
        ("LimitMEMLOCK=infinity\nType=exec\nExecStartPost=/x --timeout 1800", {"start_post_killed_by_timeout"}),
        ("LimitMEMLOCK=infinity\nExecStartPost=/x --timeout 1800\nTimeoutStartSec=1860", set()),
        ("LimitMEMLOCK=infinity\nExecStartPost=/x --timeout 1800\nTimeoutStartSec=31min", set()),
        ("LimitMEMLOCK=infinity\nRemoveIPC=yes", {"remove_ipc_hits_other_instances"}),
        ("LimitMEMLOCK=", {"memlock_not_set_in_unit"}),
        ("LimitMEMLOCK=Infinity", {"memlock_word_ignored"}),
        ("LimitMEMLOCK=-1", {"memlock_word_ignored"}),
        ("LimitMEMLOCK=8G:infinity", set()),
        ("LimitMEMLOCK=infinity\nSendSIGKILL=no", {"kill_mode_leaves_schedulers"}),
        ("LimitMEMLOCK=infinity\nPrivateDevices=t", {"private_devices_hides_gpus"}),
        ("LimitMEMLOCK=infinity\nDevicePolicy=strict", {"device_policy_hides_gpus"}),
        ("LimitMEMLOCK=infinity\nDeviceAllow=/dev/nvidiactl rw", {"device_policy_hides_gpus"}),
        ("LimitMEMLOCK=infinity\nDevicePolicy=auto", set()),
        ("LimitMEMLOCK=infinity\nType=oneshot", {"type_never_starts"}),
        ("LimitMEMLOCK=infinity\nType=forking", {"type_never_starts"}),
        ("LimitMEMLOCK=infinity\nType=exec\nRemainAfterExit=yes", {"remain_after_exit_hides_death"}),
        ("LimitMEMLOCK=infinity\nExecStartPost=/bin/sleep 5\nTimeoutStartSec=infinity", set()),
        ("LimitMEMLOCK=infinity\nTasksMax=512", {"tasks_max_too_low"}),
        ("LimitMEMLOCK=infinity\nTasksMax=infinity", set()),
        ("LimitMEMLOCK=infinity\nLimitNOFILE=1024", {"nofile_too_low"}),
        ("LimitMEMLOCK=infinity\nLimitNOFILE=1024:524288", {"nofile_too_low"}),
        ("LimitMEMLOCK=infinity\nRestrictAddressFamilies=AF_INET AF_INET6", {"address_families_missing"}),
        ("LimitMEMLOCK=infinity\nRestrictAddressFamilies=~AF_PACKET", set()),
        ("LimitMEMLOCK=infinity\nPrivateNetwork=yes", {"private_network_hides_port"}),
        ("LimitMEMLOCK=infinity\nProtectSystem=strict", {"protect_system_hides_caches"}),
        ("LimitMEMLOCK=infinity\nProtectSystem=strict\nCacheDirectory=sglang", set()),
        ("LimitMEMLOCK=infinity\nRestart=on-failure\nRestartSec=5min", {"restart_unbounded"}),
        ("LimitMEMLOCK=infinity\nRestart=no\nRestartSec=5min", set()),
    ],
)
def test_units_made_by_others(lines: str, expected: set[str]) -> None:
    assert codes(f"[Service]\n{lines}\n") == expected


@pytest.mark.parametrize(
    ("unit", "service", "expected"),
    [
        ("StartLimitIntervalSec=10\nStartLimitBurst=5", "RestartSec=30", {"start_limit_never_triggers"}),
        ("StartLimitIntervalSec=3600\nStartLimitBurst=4", "RestartSec=30", set()),
        ("StartLimitIntervalSec=1h\nStartLimitBurst=4", "RestartSec=5min", set()),
        ("", "RestartSec=30\nStartLimitIntervalSec=3600", {"start_limit_in_service_section", "restart_unbounded"}),
        ("StartLimitIntervalSec=0", "RestartSec=1", {"restart_unbounded"}),
        # The defaults are five starts in ten seconds, and SGLang alone imports for longer.
        ("", "", {"restart_unbounded"}),
        ("StartLimitIntervalSec=300\nStartLimitBurst=5", "", set()),
        (
            "StartLimitIntervalSec=60\nStartLimitBurst=10",
            "RestartSec=1\nRestartSteps=5\nRestartMaxDelaySec=5min",
            {"start_limit_never_triggers"},
        ),
    ],
)
def test_start_limits_that_trigger(unit: str, service: str, expected: set[str]) -> None:
    text = f"[Unit]\n{unit}\n[Service]\nLimitMEMLOCK=infinity\nRestart=on-failure\n{service}\n"
    assert codes(text) == expected


def test_environment_faults() -> None:
    found = review_environment({"CUDA_HOME": ":/usr/local/cuda-12.8"})
    assert [(item["code"], item["suggestion"]) for item in found] == [
        ("cuda_home_is_a_path_list", "/usr/local/cuda-12.8")
    ]
    assert codes("[Service]\nLimitMEMLOCK=infinity\nEnvironment=PATH=/opt/x:$PATH\n") == {"environment_not_expanded"}
    for value in ("/usr/local/cuda-12.8:", "/usr/local/cuda-12.6:/usr/local/cuda-12.8", ":/usr/local/cuda-12.8:"):
        assert [item["suggestion"] for item in review_environment({"CUDA_PATH": value})] == ["/usr/local/cuda-12.8"]
    assert review_environment({"CUDA_HOME": "/usr/local/cuda-12.8", "NVCC_FLAGS": "a:b"}) == []
    assert codes('[Service]\nLimitMEMLOCK=infinity\nEnvironment="LD_LIBRARY_PATH=/x:${LD_LIBRARY_PATH}"\n') == {
        "environment_not_expanded"
    }
    hidden = "[Service]\nLimitMEMLOCK=infinity\nProtectHome=yes\n"
    assert codes(hidden, {"HF_HOME": "/home/ml/.cache/huggingface"}) == {"hf_home_hidden_by_ProtectHome"}
    assert codes(hidden, {"HF_HOME": "/data/hf"}) == set()


def test_parse_unit_joins_lines_and_forgets_on_empty_assignment() -> None:
    unit = parse_unit(
        "[Service]\nExecStart=/bin/a \\\n  # comment\n  b\nExecStartPre=/x\nExecStartPre=\nExecStartPre=/y\n"
    )
    assert setting(unit, "Service", "ExecStart") == "/bin/a  b"
    assert settings(unit, "Service", "ExecStartPre") == ["/y"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("2min 30s", 150), ("1h", 3600), ("infinity", float("inf")), ("soon", None), ("5 parsecs", None)],
)
def test_time_spans(text: str, seconds: float | None) -> None:
    assert parse_span(text) == seconds


def test_compare_argv() -> None:
    old = ["/x", "-m", "s", "--tp=4", "--host", "0.0.0.0", "--trust-remote-code"]
    new = ["/x", "-m", "s", "--tp", "8", "--host", "0.0.0.0"]
    assert compare_argv(old, new) == [
        {"flag": "--tp", "old": "4", "new": "8"},
        {"flag": "--trust-remote-code", "old": True, "new": None},
    ]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_little_exposed(tmp_path: Path) -> None:
    argv = ["/bin/sleep", *ARGV[1:]]
    path = tmp_path / "sglang-default.service"
    path.write_text(format_unit(build_unit(spec(argv=argv, user="daemon", group="daemon", expected_gpus=8)), "default"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    shown = subprocess.run(
        ["systemd-analyze", "security", "--no-pager", "--offline=true", str(path)], capture_output=True, text=True
    ).stdout
    level = re.search(r"exposure level for \S+: ([\d.]+)", shown)
    assert level and float(level.group(1)) <= 4.0
