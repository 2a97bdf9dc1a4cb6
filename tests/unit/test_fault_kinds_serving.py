# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of plans, units and readiness in shapes that no report has: each is told, and what is right is not."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import describe, parse_line
from ansible_collections.gpufleet.sglang.plugins.module_utils._readiness import Settings, judge, new_memory
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_file import (
    parse_size,
    parse_unit,
    review_environment,
    review_unit,
)

from tests.unit.plan_support import codes, decision, make, probe, rejection

BASE = "LimitMEMLOCK=infinity\nExecStart=/opt/v/bin/python -m sglang.launch_server --model-path /models/x\n"
WAITS = "[Unit]\nAfter=nvidia-persistenced.service\n"

H200, B300, RTX = "nvlink-h200-no-rdma", "nvlink-b300", "pcie-rtxpro6000"


def found(service: str, unit: str = "", env: dict[str, str] | None = None, base: str = BASE) -> dict[str, str]:
    """``{code: severity}`` of a unit made by others; its PATH is in order unless ``env`` says otherwise."""
    environment = {"PATH": "/opt/v/bin:/usr/local/cuda/bin:/usr/bin:/bin"} if env is None else env
    text = f"{WAITS}{unit}\n[Service]\n{base}{service}\n"
    return {row["code"]: row["severity"] for row in review_unit(parse_unit(text), environment)}


def test_a_unit_in_order_has_no_fault() -> None:
    assert found("Type=exec\nKillMode=mixed") == {}


@pytest.mark.parametrize(
    ("service", "code", "severity"),
    [
        ("LimitMEMLOCK=64K", "memlock_too_low", "error"),
        ("LimitMEMLOCK=65536", "memlock_too_low", "error"),
        ("LimitMEMLOCK=8M:infinity", "memlock_too_low", "error"),
        ("LimitMEMLOCK=0", "memlock_too_low", "error"),
        ("LimitMEMLOCK=64k", "memlock_word_ignored", "error"),
        ("LimitMEMLOCK=8GB", "memlock_word_ignored", "error"),
        ("WatchdogSec=60", "watchdog_kills_service", "error"),
        ("RuntimeMaxSec=1d", "runtime_max_ends_service", "error"),
        ("TimeoutStopSec=5", "stop_timeout_too_short", "warning"),
        ("OOMPolicy=continue", "oom_policy_leaves_half", "warning"),
        ("StandardOutput=null", "log_not_in_journal", "warning"),
        ("StandardOutput=append:/var/log/sglang.log", "log_not_in_journal", "warning"),
        ("LimitAS=64G", "address_space_limited", "error"),
        ("LimitNPROC=256", "tasks_max_too_low", "error"),
        ("MemoryMax=4G", "memory_max_too_low", "warning"),
        ("CPUQuota=50%", "cpu_quota_too_low", "warning"),
        ("IPAddressDeny=any", "private_network_hides_port", "error"),
        ("DynamicUser=yes", "protect_system_hides_caches", "error"),
        ("DevicePolicy=closed\nDeviceAllow=char-nvidia* r", "device_policy_hides_gpus", "error"),
        ("DevicePolicy=closed\nDeviceAllow=char-nvidia* rw", "device_policy_hides_rdma", "warning"),
        ("ExecStartPre=/bin/sleep 300", "start_pre_killed_by_timeout", "error"),
        ("ExecStartPre=/usr/local/bin/wait-gpus --timeout 10m", "start_pre_killed_by_timeout", "error"),
        ("ExecStartPre=/opt/v/bin/python -m sglang.compile_deep_gemm --tp 8", "start_pre_killed_by_timeout", "error"),
        ("ExecStartPost=/bin/sh -c 'until curl -sf localhost:30000/health; do sleep 5; done'",
         "start_post_killed_by_timeout", "error"),
        ("ExecStartPost=/x --timeout=30m\nTimeoutStartSec=60", "start_post_killed_by_timeout", "error"),
        ("InaccessiblePaths=/dev/shm", "paths_hidden_from_service", "error"),
        ("TemporaryFileSystem=/models", "paths_hidden_from_service", "error"),
        ("NoExecPaths=/", "paths_hidden_from_service", "error"),
        ("ProtectHome=yes\nWorkingDirectory=/home/ml", "working_directory_hidden_by_ProtectHome", "error"),
        ("Environment=HF_TOKEN=x", "secret_in_unit", "warning"),
    ],
)  # fmt: skip
def test_a_setting_that_harms(service: str, code: str, severity: str) -> None:
    assert found(service).get(code) == severity


@pytest.mark.parametrize(
    "service",
    [
        "LimitMEMLOCK=1.5G", "LimitMEMLOCK=8G:infinity", "WatchdogSec=0", "RuntimeMaxSec=infinity",
        "TimeoutStopSec=2min", "LimitAS=infinity", "MemoryMax=infinity", "MemoryMax=512G", "CPUQuota=1600%",
        "IPAddressDeny=any\nIPAddressAllow=localhost", "DynamicUser=yes\nCacheDirectory=sglang",
        "DevicePolicy=closed\nDeviceAllow=char-nvidia* rw\nDeviceAllow=char-infiniband rw",
        "ExecStartPre=/bin/sleep 30", "ExecStartPre=/bin/sleep 300\nTimeoutStartSec=6min",
        "ExecStartPost=/x --timeout 1800\nTimeoutStartSec=0", "ExecStartPost=/x --timeout=30m\nTimeoutStartSec=31min",
        "NoExecPaths=/\nExecPaths=/opt /usr",
        "ProtectHome=tmpfs\nBindReadOnlyPaths=/home/ml\nWorkingDirectory=/home/ml",
        "StandardOutput=journal", "OOMPolicy=kill", "Environment=TOKENIZERS_PARALLELISM=false",
    ],
)  # fmt: skip
def test_a_setting_that_does_not(service: str) -> None:
    assert found(service) == {}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("/opt/v/bin/python -m sglang.launch_server --model-path /m > /var/log/x.log 2>&1", "exec_start_needs_a_shell"),
        ("source /opt/v/bin/activate && python -m sglang.launch_server", "exec_start_needs_a_shell"),
        ("/usr/bin/nohup /opt/v/bin/python -m sglang.launch_server", "exec_start_in_background"),
        ("/bin/bash -c 'nohup python -m sglang.launch_server &'", "exec_start_in_background"),
        ('/opt/v/bin/python -m sglang.launch_server --x "open', "exec_start_bad_quoting"),
        ("/opt/v/bin/python -m sglang.launch_server --api-key abc", "secret_in_unit"),
        ("/opt/v/bin/python -m sglang.launch_server --api-key=abc", "secret_in_unit"),
    ],
)
def test_a_command_that_systemd_reads_otherwise(command: str, code: str) -> None:
    assert code in found("", base=f"LimitMEMLOCK=infinity\nExecStart={command}\n")


def test_the_venv_of_a_hidden_home() -> None:
    base = "LimitMEMLOCK=infinity\nExecStart=/home/ml/venv/bin/python -m sglang.launch_server\nProtectHome="
    env = {"PATH": "/home/ml/venv/bin:/usr/bin"}
    assert found("", base=base + "yes", env=env) == {"exec_start_hidden_by_ProtectHome": "error"}
    assert found("", base=base + "read-only", env=env) == {}


@pytest.mark.parametrize(
    ("unit", "service", "codes"),
    [
        ("StartLimitIntervalSec=60\nStartLimitBurst=3", "RestartSec=10",
         {"start_limit_misses_slow_failures": "warning"}),
        ("StartLimitIntervalSec=15\nStartLimitBurst=3", "RestartSec=5", {"start_limit_never_triggers": "error"}),
        ("StartLimitIntervalSec=3600\nStartLimitBurst=4", "RestartSec=30", {}),
        ("StartLimitIntervalSec=infinity", "RestartSec=30", {}),
        ("StartLimitIntervalSec=3600\nStartLimitBurst=4\nStartLimitAction=reboot", "RestartSec=15",
         {"failure_takes_the_host": "error"}),
        ("StartLimitIntervalSec=3600\nStartLimitBurst=4\nFailureAction=poweroff-force", "RestartSec=15",
         {"failure_takes_the_host": "error"}),
    ],
)  # fmt: skip
def test_start_limits(unit: str, service: str, codes: dict[str, str]) -> None:
    assert found(f"Restart=on-failure\n{service}", unit) == codes


def test_a_start_before_the_gpus() -> None:
    text = f"[Unit]\nAfter=network.target\n[Service]\n{BASE}"
    env = {"PATH": "/opt/v/bin:/usr/bin"}
    assert "starts_before_gpus" in {row["code"] for row in review_unit(parse_unit(text), env)}
    text += "ExecStartPre=/usr/local/bin/wait-for-gpus 8\n"
    assert review_unit(parse_unit(text), env) == []


@pytest.mark.parametrize(
    ("settings", "name", "path", "severity"),
    [
        ("ProtectSystem=strict\nCacheDirectory=sglang", "TRITON_CACHE_DIR", "/data/triton", "error"),
        ("ProtectSystem=strict\nCacheDirectory=sglang", "HF_HOME", "/data/hf", "warning"),
        ("ProtectSystem=strict\nCacheDirectory=sglang", "TRITON_CACHE_DIR", "/var/cache/sglang/triton", None),
        ("ProtectSystem=strict\nCacheDirectory=sglang\nReadWritePaths=-/data", "TRITON_CACHE_DIR", "/data/t", None),
        ("ProtectSystem=strict\nCacheDirectory=sglang", "TRITON_CACHE_DIR", "/dev/shm/t", None),
        ("ProtectSystem=strict\nCacheDirectory=sglang", "TRITON_CACHE_DIR", "/tmp/t", "error"),
        ("ProtectSystem=strict\nCacheDirectory=sglang\nPrivateTmp=yes", "TRITON_CACHE_DIR", "/tmp/t", None),
        ("ProtectSystem=full", "DG_JIT_CACHE_DIR", "/usr/local/cache", "error"),
        ("ProtectSystem=full", "DG_JIT_CACHE_DIR", "/opt/cache", None),
        ("ProtectHome=read-only", "XDG_CACHE_HOME", "/home/ml/.cache", "error"),
        ("DynamicUser=yes\nCacheDirectory=sglang", "TRITON_CACHE_DIR", "/opt/cache", "error"),
    ],
)
def test_caches_that_the_sandbox_makes_read_only(settings: str, name: str, path: str, severity: str | None) -> None:
    env = {"PATH": "/opt/v/bin:/usr/bin", name: path}
    assert found(settings, env=env).get("cache_read_only_in_unit") == severity


@pytest.mark.parametrize(
    ("value", "code", "suggestion"),
    [
        (":/usr/local/cuda-12.8", "cuda_home_is_a_path_list", "/usr/local/cuda-12.8"),
        ("/usr/local/cuda-12.8;/usr/local/cuda", "cuda_home_is_a_path_list", "/usr/local/cuda"),
        ("$CUDA_HOME:/usr/local/cuda", "cuda_home_is_a_path_list", "/usr/local/cuda"),
        ("/usr/local/cuda:$CUDA_HOME", "cuda_home_is_a_path_list", "/usr/local/cuda"),
        ("/usr/local/cuda/bin", "cuda_home_is_inside_toolkit", "/usr/local/cuda"),
        ("/usr/local/cuda/bin/nvcc", "cuda_home_is_inside_toolkit", "/usr/local/cuda"),
        ("/usr/local/cuda/lib64/", "cuda_home_is_inside_toolkit", "/usr/local/cuda"),
        ('"/usr/local/cuda"', "cuda_home_relative", "/usr/local/cuda"),
        (" /usr/local/cuda", "cuda_home_relative", "/usr/local/cuda"),
        ("cuda-12.8", "cuda_home_relative", None),
        ("${CUDA_ROOT}", "environment_not_expanded", None),
        ("~/cuda", "environment_not_expanded", None),
        ("/usr/local/cuda-12.8", None, None),
        ("/opt/nvidia/hpc_sdk/cuda/12.8", None, None),
        ("", None, None),
    ],
)
def test_texts_of_cuda_home(value: str, code: str | None, suggestion: str | None) -> None:
    rows = review_environment({"CUDA_HOME": value})
    assert [(row["code"], row.get("suggestion")) for row in rows] == ([(code, suggestion)] if code else [])


@pytest.mark.parametrize(
    ("env", "codes"),
    [
        ({"TRITON_CACHE_DIR": "$HOME/triton"}, ["environment_not_expanded"]),
        ({"XDG_CACHE_HOME": "~/.cache"}, ["environment_not_expanded"]),
        ({"LD_LIBRARY_PATH": "/a:~/lib"}, ["environment_not_expanded"]),
        ({"HF_HOME": "~/hf"}, []),
        ({"OTHER": "costs $FIVE"}, []),
        ({"PATH": "/opt/v/bin"}, ["path_lacks_system_folders"]),
        ({"PATH": "/opt/v/bin:/usr/bin/"}, []),
    ],
)
def test_variables_that_only_a_shell_would_expand(env: dict[str, str], codes: list[str]) -> None:
    assert [row["code"] for row in review_environment(env)] == codes


def test_a_shells_path_is_not_the_services() -> None:
    assert found("", env={}) == {"path_lacks_compilers": "warning"}
    assert found("", env={"PATH": "/usr/bin:/bin"}) == {"path_lacks_compilers": "warning"}
    # What an EnvironmentFile that was not read brings is not known.
    unread = f"{WAITS}[Service]\n{BASE}EnvironmentFile=/etc/default/sglang\n"
    assert review_unit(parse_unit(unread)) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("64K", 65536), ("1 G", 1 << 30), ("1.5G", 1.5 * (1 << 30)), ("infinity", float("inf")), ("unlimited", None),
     ("8GB", None), ("64k", None), ("-1", None), ("100%", None)],
)  # fmt: skip
def test_sizes_as_systemd_reads_them(text: str, size: Any) -> None:
    assert parse_size(text) == size


# ---- readiness


@pytest.mark.parametrize(
    ("line", "kind", "done"),
    [
        ("model.safetensors:  35%|###       | 1.23G/3.50G [00:10<00:20, 100MB/s]", "download", 1230),
        ("model.safetensors:  12%|#         | 512M/4.30G [00:10<00:20, 100MB/s]", "download", 512),
        ("Fetching 30 files:  33%|###       | 10/30 [00:14<00:26,  1.4s/it]", "download", 10),
        ("[2/7] /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o", "jit", 2),
        ("[1/4] c++ -MMD -MF x.o.d", "jit", 1),
        ("[3/3] hello world", None, None),
        ("tilelang: TileLang begins to compile kernel `main`", "jit", None),
        ("[2026-06-01 10:00:00] Start of pd disaggregation warmup ...", "http_up", None),
        ("[2026-06-01 10:00:00] End of prefill disaggregation mode warmup with status 200, resp: {}", "served", None),
        ("[2026-06-01 10:00:00] End of prefill disaggregation mode warmup with status 500, resp: {}", None, None),
    ],
)
def test_signs_of_progress(line: str, kind: str | None, done: int | None) -> None:
    event = parse_line(line)
    assert (event or {}).get("kind") == kind
    assert (event or {}).get("done") == done
    assert kind is None or "{" not in describe(event or {})


def test_a_download_of_one_large_file_is_progress_and_a_halted_one_is_not() -> None:
    up = {"load_state": "loaded", "active_state": "active", "sub_state": "running", "n_restarts": 0}

    def wait(moves: bool) -> tuple[str, float]:
        memory, verdict, at = new_memory(), None, 0.0
        judged = Settings(timeout=300, stall_timeout=120, hard_timeout=3600)
        for turn in range(100):
            at = 20.0 * turn
            size = 1 + (turn if moves else 0) * 0.02
            line = f"model.safetensors:  {int(size * 20)}%|#    | {size:.2f}G/5.00G [00:10<00:20, 1MB/s]"
            seen = {"at": at, "unit": up, "process": {"alive": True}, "listener": None, "events": [parse_line(line)]}
            verdict = judge(memory, seen, judged)
            if verdict.done:
                break
        assert verdict is not None
        return verdict.state, at

    assert wait(moves=True) == ("loading", 1980.0)
    state, at = wait(moves=False)
    assert state == "stuck" and at <= 160


# ---- plans


def on(host: str, capability: str, name: str = "NVIDIA GPU") -> dict[str, Any]:
    seen = probe(host)
    for gpu in seen["gpus"]["devices"]:
        gpu.update(compute_capability=capability, sm="sm_" + capability.replace(".", ""), name=name)
    return seen


@pytest.mark.parametrize(
    ("flags", "capability", "refused"),
    [
        ({"attention_backend": "fa4"}, "12.0", True),  # RTX PRO 6000
        ({"attention_backend": "fa4"}, "12.1", True),  # GB10
        ({"attention_backend": "fa4"}, "8.0", True),  # A100
        ({"attention_backend": "fa4"}, "9.0", False),  # H200, GH200
        ({"attention_backend": "fa4"}, "10.0", False),  # B200
        ({"attention_backend": "fa4"}, "10.3", False),  # B300
        ({"attention_backend": "fa3"}, "10.3", True),
        ({"attention_backend": "fa3"}, "8.9", False),  # L40S
        ({"attention_backend": "tokenspeed_mla"}, "9.0", True),
        ({"attention_backend": "tokenspeed_mla"}, "10.0", False),
        ({"dsa_prefill_backend": "flashmla_sparse"}, "12.0", True),
        ({"dsa_prefill_backend": "flashmla_sparse"}, "9.0", False),
        ({"dsa_decode_backend": "fa3"}, "10.0", True),
        ({"moe_runner_backend": "deep_gemm"}, "12.0", True),
    ],
)
def test_kernels_by_compute_capability(flags: dict[str, Any], capability: str, refused: bool) -> None:
    plan = make(on(H200, capability, "NVIDIA Blackwell Hopper Ada"), flags=flags)
    assert ("flag_not_supported_on_arch" in codes(plan["rejections"])) is refused


def test_an_architecture_that_no_row_was_written_about_is_unknown() -> None:
    plan = make(on(H200, "10.7"), flags={"attention_backend": "fa3"})
    assert "flag_not_supported_on_arch" not in codes(plan["rejections"])
    assert "flag_on_arch_unknown" in codes(plan["warnings"])


@pytest.mark.parametrize(
    "flags",
    [{"attention_backend": "aiter"}, {"attention_backend": "wave"}, {"attention_backend": "ascend"},
     {"attention_backend": "intel_amx"}, {"moe_runner_backend": "aiter"}],
)  # fmt: skip
def test_what_is_for_other_vendors(flags: dict[str, str]) -> None:
    (row,) = [row for row in make(probe(H200), flags=flags)["rejections"] if row["code"] == "flag_for_other_device"]
    assert row["value"] == next(iter(flags.values())) and row["suggestion"]


def test_a_rocm_host_is_told_that_it_is_one() -> None:
    seen = probe(H200)
    seen["torch"] = {"version": "2.9.0+rocm7.0", "cuda": None, "hip": "7.0.51831", "cuda_major": None}
    seen["gpus"] = {"state": "absent", "code": "nvidia_smi_absent", "message": "nvidia-smi is not there", "devices": []}
    plan = make(seen)
    assert "torch_is_rocm_build" in codes(plan["rejections"])
    assert "nvidia_smi_absent" not in codes(plan["rejections"])


@pytest.mark.parametrize("runner", ["cutlass", "triton", "marlin", "humming"])
def test_auto_takes_no_backend_that_a_given_runner_does_not_go_with(runner: str) -> None:
    plan = make(probe(H200), flags={"moe_runner_backend": runner})
    assert plan["effective"]["moe_a2a_backend"] == "none"
    assert "fp8_cutlass_needs_ep_1" not in codes(plan["rejections"])
    assert runner in decision(plan, "moe_a2a_backend")["because"]
    for given in ({}, {"moe_runner_backend": "deep_gemm"}, {"moe_runner_backend": "auto"}):
        assert make(probe(H200), flags=given)["effective"]["moe_a2a_backend"] == "deepep"
    # Asked for by name it is taken, and SGLang's own refusal is told.
    named = make(probe(H200), flags={"moe_runner_backend": "cutlass", "moe_a2a_backend": "deepep"})
    assert "fp8_cutlass_needs_ep_1" in codes(named["rejections"])


def test_key_value_heads_suggest_a_size_that_is_there() -> None:
    seen = probe(H200, model={"heads": 48, "kv_heads": 8, "kv_lora_rank": None})
    assert rejection(make(seen, flags={"tp_size": 6}), "kv_heads_not_divisible")["suggestion"] == "tp4"


@pytest.mark.parametrize(
    ("devices", "value"),
    [
        ([], "none"),
        ([{"name": "erdma_0", "mlx5": False, "state": "PORT_ACTIVE"}], "none"),
        ([{"name": "rdmap0s6", "mlx5": False, "state": "PORT_ACTIVE"}], "none"),  # EFA
        ([{"name": "mlx5_0", "mlx5": True, "state": "PORT_DOWN"}], "none"),
        ([{"name": "mlx5_ib0", "mlx5": True, "state": "PORT_ACTIVE"}], None),
        (None, None),
    ],
)
def test_remote_transport_of_one_node_by_what_nvshmem_can_use(devices: Any, value: str | None) -> None:
    seen = probe(H200)
    seen["fabric"]["rdma"] = {"devices": devices} if devices is not None else {"state": "unknown", "devices": []}
    plan = make(seen, moe_a2a_backend="deepep")
    assert plan["effective"]["moe_a2a_backend"] == "deepep"
    assert plan["env"].get("NVSHMEM_REMOTE_TRANSPORT") == value


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("/usr/local/cuda-12.8/bin", "cuda_home_is_inside_toolkit"),
        ("/usr/local/cuda-12.8;/usr/local/cuda", "cuda_home_is_a_path_list"),
        (":/usr/local/cuda-12.8", "cuda_home_is_a_path_list"),
        ("cuda", "cuda_home_relative"),
        ("/usr/local/cuda-12.8", None),
    ],
)
def test_cuda_home_of_the_inventory(value: str, code: str | None) -> None:
    plan = make(probe(B300), env_vars={"CUDA_HOME": value})
    assert [row["code"] for row in plan["rejections"] if row["code"].startswith("cuda_home")] == (
        [code] if code else []
    )


@pytest.mark.parametrize(
    ("visible", "code"),
    [("0,9", "gpu_index_unknown"), ("9", "no_gpu_visible"), ("", "no_gpu_visible"), ("all", "no_gpu_visible"),
     ("-1", "no_gpu_visible"), ("0,1", None), ("0, 1", None)],
)  # fmt: skip
def test_visible_devices_that_are_not_there(visible: str, code: str | None) -> None:
    found = [row["code"] for row in make(probe(B300), env_vars={"CUDA_VISIBLE_DEVICES": visible})["rejections"]]
    assert [name for name in found if "gpu" in name] == ([code] if code else [])


@pytest.mark.parametrize("empty", ["", "[]", [], {}, None, "{}"])
@pytest.mark.parametrize("name", ["flags", "env_vars", "instances"])
def test_nothing_in_every_spelling_is_nothing(name: str, empty: Any) -> None:
    plan = make(probe(B300), **{name: empty})
    assert plan["rejections"] == [] and plan["argv"] == make(probe(B300))["argv"]
