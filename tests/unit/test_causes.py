# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pathlib
import random
import re

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._causes import (
    CAUSES,
    MAX_SHOWN,
    _bounded,
    blocks,
    find_cause,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_cause_tails import TAILS

LOGS = pathlib.Path(__file__).parent.parent / "fixtures" / "logs"


def log(name):
    return (LOGS / name).read_text(encoding="utf-8", errors="replace").splitlines()


RECORDED = [
    ("sglang/unknown_flag.txt", "flag_unknown", {"argument": "--no-such-flag 3"}),
    ("sglang/23_unknown_flag.txt", "flag_unknown", {"argument": "--no-such-flag 3"}),
    ("sglang/bad_choice.txt", "flag_choice", {"argument": "--moe-a2a-backend", "value": "'deepepp'"}),
    ("sglang/23_bad_choice.txt", "flag_choice", {"argument": "--moe-a2a-backend", "value": "'deepepp'"}),
    ("sglang/bad_int.txt", "flag_type", {"argument": "--tp-size/--tensor-parallel-size"}),
    ("sglang/23_model_missing.txt", "model_path_absent", {"path": "/nonexistent/model"}),
    ("sglang/model_hub.txt", "model_hub", {}),
    ("sglang/port_taken.txt", "port_taken", {"port": "31000"}),
    ("sglang/a2a_deepep.txt", "backend_missing", {"backend": "DeepEP"}),
    ("sglang/a2a_mooncake.txt", "backend_missing", {"backend": "Mooncake EP"}),
    ("sglang/a2a_mori.txt", "backend_missing", {"backend": "Mori EP"}),
    ("sglang/disagg_mori.txt", "backend_missing", {"backend": "mori"}),
    ("sglang/a2a_flashinfer.txt", "a2a_topology", {}),
    ("sglang/23_a2a_flashinfer.txt", "a2a_topology", {}),
    ("sglang/a2a_pplx.txt", "a2a_topology", {}),
    ("sglang/23_a2a_deepep_v2.txt", "dispatch_limit_config", {"required": "4096", "capacity": "128"}),
    ("sglang/ep2tp1.txt", "parallel_sizes", {}),
    ("gpu/deepep_missing.log", "backend_missing", {"backend": "DeepEP"}),
    ("gpu/deepep_bf16_auto.log", "deepep_needs_low_latency", {}),
    ("gpu/mooncake_auto.log", "mooncake_mode", {}),
]


@pytest.mark.parametrize(("name", "code", "told"), RECORDED)
def test_recorded_failures(name, code, told):
    cause = find_cause(log(name))
    assert cause["code"] == code
    for key, value in told.items():
        assert cause[key] == value
    assert "{" not in cause["message"] + cause["mend"]
    assert cause["lines"] and len(cause["lines"]) <= MAX_SHOWN


@pytest.mark.parametrize("name", [name for name, code, told in RECORDED if name.startswith("sglang/")])
def test_the_last_line_of_the_cascade_is_never_the_message(name):
    assert "sigquit" not in find_cause(log(name))["message"].lower()


WENT_WELL = (
    *("gpu/none.log", "gpu/deepep_auto.log", "gpu/deepep_normal.log", "gpu/mc_import.txt", "gpu/nx_import.txt"),
    *("sglang/elastic.txt", "sglang/disagg_mooncake.txt", "sglang/disagg_nixl.txt"),
    *("sglang/23_a2a_deepep.txt", "sglang/23_a2a_mori.txt", "sglang/23_a2a_nixl.txt"),
)


def test_every_recorded_log_is_judged():
    there = {str(path.relative_to(LOGS)) for kind in ("*/*.txt", "*/*.log") for path in LOGS.glob(kind)}
    assert there == {name for name, code, told in RECORDED} | set(WENT_WELL)


@pytest.mark.parametrize("name", WENT_WELL)
def test_no_cause_is_invented_for_a_start_that_went_well(name):
    cause = find_cause(log(name))
    assert cause["code"] == "unknown" and "no error" in cause["message"]


# One text for each kind of failure, as the projects write it, each inside of a scheduler's traceback or alone.
TEXTS = [
    ("nccl_failed", "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ("nvshmem_init", "/x/nvshmem/src/host/transport/transport.cpp:400: non-zero status: 7 connect EPS failed"),
    ("nvshmem_init", "NVSHMEM API called before NVSHMEM initialization has completed: error"),
    ("rdma_device", "E0325 09:33:41.563210  8274 rdma_context.cpp:319] Context is not active: mlx5_9 failed"),
    ("rdma_device", "Exception: NIXL memory registration failed for aux tensors"),
    ("rdma_device", "RuntimeError: Mooncake Transfer Engine initialization failed."),
    (
        "arch_mismatch",
        "ValueError: The quantization method fp8 is not supported for the current GPU. "
        "Minimum capability: 80. Current capability: 75.",
    ),
    (
        "model_weights_missing",
        "RuntimeError: model.safetensors.index.json references 3 shard file(s) missing from "
        "/m (incomplete download?): ['a']",
    ),
    ("model_weights_missing", "RuntimeError: No model weights found in: `/models/x`"),
    ("dependency_missing", "ImportError: Please install gguf via `pip install gguf` to use gguf quantizer."),
    ("port_taken", "ValueError: Port is already in use. dist_init_port=30001"),
    ("cuda_graph_failed", "Exception: Capture cuda graph failed: something odd"),
    ("argument_removed", "ValueError: Removed server argument(s): warmup -> warmup_mode=request or warmup_mode=off"),
    (
        "flag_ambiguous",
        "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match "
        "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill",
    ),
    ("flag_type", "launch_server.py: error: argument --tp-size: expected one argument"),
    (
        "gpu_out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        "a total capacity of 79.10 GiB",
    ),
    ("kv_cache_too_small", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    (
        "gpu_out_of_memory",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    ),
    ("arch_mismatch", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("arch_mismatch", "RuntimeError: Failed: CUDA error csrc/kernels/runtime.cu:43 'named symbol not found'"),
    ("driver_too_old", "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."),
    ("driver_too_old", "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
    (
        "fabricmanager_not_running_or_version_mismatch",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ),
    ("no_gpu_visible", "RuntimeError: No CUDA GPUs are available"),
    ("no_gpu_visible", "RuntimeError: CUDA error: invalid device ordinal"),
    ("gpu_fault", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("jit_compiler_missing", "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"),
    ("jit_compiler_missing", "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'"),
    ("jit_compiler_missing", "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"),
    (
        "jit_compiler_missing",
        "RuntimeError: Failed to find C compiler. Please specify via CC environment "
        "variable or set triton.knobs.build.impl.",
    ),
    ("jit_compiler_missing", "/bin/sh: 1: nvcc: not found"),
    (
        "jit_compiler_missing",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    ),
    ("jit_compile_failed", "RuntimeError: Ninja build failed. Ninja output: FAILED: batch_decode.cuda.o"),
    ("nvshmem_mismatch", "NVSHMEM device library version does not match with NVSHMEM host library version"),
    ("nvshmem_init", "nvshmem/src/host/init/init.cu:nvshmemi_common_init:1025: nvshmem initialization failed, exiting"),
    ("memlock_limit", "RuntimeError: Failed to register memory 0x7f20 len 4096: Cannot allocate memory"),
    ("rdma_device", "E1130 rdma_context.cpp:64] No RDMA devices found, check your device installation: error"),
    (
        "nccl_failed",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled "
        "system error, NCCL version 2.28.9\nncclSystemError: System call (e.g. socket, malloc) "
        "or external library call failed",
    ),
    (
        "rendezvous_failed",
        "torch.distributed.DistNetworkError: The client socket has timed out after "
        "600000ms while trying to connect to (10.0.0.1, 5000).",
    ),
    (
        "duplicate_nccl_runtime",
        "AssertionError: Duplicate NCCL runtime: /usr/lib/libnccl.so.2 and /opt/venv/lib/libnccl.so.2",
    ),
    ("invalid_nccl_version", "AssertionError: Invalid NCCL versions: 22809 and 23004"),
    ("nccl_root_not_discoverable", "AssertionError: Cannot find package: nccl"),
    (
        "torch_abi_mismatch",
        "ImportError: /opt/venv/lib/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
    ),
    ("undefined_symbol", "ImportError: /opt/venv/lib/x.so: undefined symbol: ncclDevCommCreate"),
    ("missing_system_lib", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("libstdcxx_mismatch", "ImportError: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x.so)"),
    ("backend_missing", "ModuleNotFoundError: No module named 'deep_ep'"),
    (
        "backend_missing",
        "ImportError: Please install NIXL by following the instructions at the project's "
        "page to run SGLang with NixlTransferEngine.",
    ),
    ("dependency_missing", "ModuleNotFoundError: No module named 'outlines'"),
    ("version_incompatible_with_sglang", "AttributeError: module 'mooncake.ep' has no attribute 'set_host_ip'"),
    (
        "dispatch_limit_exceeded",
        "RuntimeError: Failed: Assertion error csrc/deep_ep.cpp:1105 'x.size(0) <= num_max_dispatch_tokens_per_rank'",
    ),
    (
        "port_taken",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
    ),
    ("port_taken", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:20000')"),
    ("permission_denied", "PermissionError: [Errno 13] Permission denied: '/var/cache/sglang/deep_gemm'"),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/dev/shm/x'"),
    ("weights_broken", "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    (
        "model_config_absent",
        "OSError: /models/x does not appear to have a file named config.json. Checkout 'https://hub/x' for files.",
    ),
    ("model_access", "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo"),
    (
        "model_unsupported",
        "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: x",
    ),
    (
        "exec_failed",
        "sglang-default.service: Failed at step EXEC spawning /opt/sglang/venv/bin/python: No such file or directory",
    ),
    ("oom_killed", "sglang-default.service: A process of this unit has been killed by the OOM killer."),
]

CASCADE = [
    "[2026-11-30 20:00:36] Received sigquit from a child process. It usually means the child failed.",
    "[rank1]:[E1130 20:00:37] [PG ID 2 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    "[2026-11-30 20:00:38] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:6363",
    "[2026-11-30 20:00:39] kill_process_tree called: parent_pid=17166, include_parent=True, pid=17166",
]


@pytest.mark.parametrize(("code", "text"), TEXTS)
def test_alone_and_before_a_cascade(code, text):
    assert find_cause([*text.splitlines(), *CASCADE])["code"] == code


@pytest.mark.parametrize(("code", "text"), [(c, t) for c, t in TEXTS if re.match(r"[\w.]+(Error|Exception): ", t)])
def test_inside_of_a_schedulers_traceback(code, text):
    lines = [
        "[2026-11-30 20:00:35 TP1 EP1] Load weight begin. avail mem=138.25 GB",
        "[2026-11-30 20:00:36 TP1 EP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/opt/sglang/site/sglang/srt/managers/scheduler.py", line 4325, in run_scheduler_process',
        "    scheduler = Scheduler(",
        "                ^^^^^^^^^^",
        *text.splitlines(),
        "",
        "[2026-11-30 20:00:36 TP0 EP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/opt/sglang/site/sglang/srt/managers/scheduler.py", line 1, in x',
        "RuntimeError: Connection closed by peer",
        *CASCADE,
    ]
    cause = find_cause(lines)
    assert cause["code"] == code
    assert any(text.splitlines()[0][:60] in line for line in cause["lines"])


def test_every_code_of_the_table_is_shown_by_a_log():
    seen = {code for code, text in [*TEXTS, *TAILS]} | {code for name, code, told in RECORDED}
    rest = {
        "flag_missing": "x: error: the following arguments are required: --model-path",
        "quantization_shape": "ValueError: Weight output_partition_size = 704 is not divisible by weight "
        "quantization block_n = 128.",
        "static_tls": "ImportError: /x/libgomp.so.1: cannot allocate memory in static TLS block",
        "memlock_limit": "ERROR: RLIMIT_MEMLOCK is 65536, which is too small",
        "warmup_failed": "[2026-11-30 20:00:00] Initialization failed. warmup error: None",
        "scheduler_killed": "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If "
        "exit code is -9 "
        "(SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
        "flags_rejected": 'Traceback (most recent call last):\n  File "/x/arg_groups/a.py", line 1, in '
        "f\nAssertionError",
        "watchdog_timeout": "[2026-11-30 20:00:00] Watchdog timeout (self.watchdog_timeout=300, soft=False)",
        "peer_died": "EOFError",
        "scheduler_silent": "[2026-11-30 20:00:00] Health check failed. Server couldn't get a response from "
        "detokenizer for last 20 seconds. tic start time: 20:00:00. last_heartbeat time: 19:59:30",
        "disaggregation_peer": "KVTransferError(bootstrap_room=12): Failed to send kv chunk of 12 to 10.0.0.2:4444",
        "scheduler_died": "Fatal Python error: Segmentation fault",
    }
    for code, text in rest.items():
        assert find_cause(text.splitlines())["code"] == code
    assert {row.code for row in CAUSES} == seen | set(rest)


def test_a_scheduler_that_died_is_no_oom_kill():
    died = "RuntimeError: Rank 0 scheduler died during initialization (exit code: 255). If exit code is -9 (SIGKILL), "
    died += "a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
    lines = ["Traceback (most recent call last):", '  File "<frozen runpy>", line 198, in _run_module_as_main', died]
    assert find_cause(lines)["code"] == "scheduler_died"
    first = [
        "[2026-11-30 20:00:36 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x.py", line 1',
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    assert find_cause([*first, *lines])["code"] == "gpu_out_of_memory"


def test_an_error_without_words_is_shown_with_its_place():
    lines = [
        "[2026-11-30 20:00:36] kill_process_tree called: parent_pid=1, include_parent=False, pid=1",
        "Traceback (most recent call last):",
        '  File "<frozen runpy>", line 198, in _run_module_as_main',
        '  File "/x/sglang/srt/arg_groups/moe_hook.py", line 77, in handle_eplb',
        "    assert server_args.ep_size > 1",
        "AssertionError",
    ]
    cause = find_cause(lines)
    assert cause["code"] == "flags_rejected" and any("ep_size > 1" in line for line in cause["lines"])


def test_what_nccl_informs_about_is_no_error():
    info = "h:1:2 [3] NCCL INFO NET/Plugin: Failed: libnccl-net.so: cannot open shared object file: No such file"
    assert find_cause([info, "torch.OutOfMemoryError: CUDA out of memory."])["code"] == "gpu_out_of_memory"


def test_a_removed_argument_brings_its_replacements():
    cause = find_cause(["ValueError: Removed server argument(s): warmup -> warmup_mode=request or warmup_mode=off"])
    assert cause["code"] == "argument_removed"
    assert cause["argument"] == "warmup"
    assert cause["replacement"] == ["warmup_mode=request", "warmup_mode=off"]
    assert cause["permanent"]


def test_an_unknown_fatal_error_is_shown_and_not_guessed():
    lines = [
        "[2026-11-30 20:00:36 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x.py", line 1, in run',
        "FrobnicationError: the frobs are out of phase",
        *CASCADE,
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    cause = find_cause(lines)
    assert cause["code"] == "unknown"
    assert "FrobnicationError: the frobs are out of phase" in cause["message"]
    assert any("frobs" in line for line in cause["lines"])


def test_a_handled_traceback_does_not_hide_the_cause():
    lines = [
        "[2026-11-30 20:00:01] Failed to import a plugin: Traceback (most recent call last):",
        '  File "/x.py", line 1, in run',
        "PluginOddity: nobody cares",
        "[2026-11-30 20:00:02] Load weight begin. avail mem=18.07 GB",
        "[2026-11-30 20:00:03 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/y.py", line 1, in load',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    assert find_cause(lines)["code"] == "gpu_out_of_memory"


@pytest.mark.parametrize(
    "harmless",
    [
        ["[2026-11-30 20:00:01] Cache not written: Permission denied: '/x'"],
        # SGLang 0.5.23 beside an older openai package: the server serves, without this API.
        [
            "[2026-11-30 20:00:01] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed "
            "(ImportError: cannot import name 'ResponseFunctionShellToolCall' from 'openai.types.responses' (/x.py))"
        ],
        [
            "[2026-11-30 20:00:01] No deep_gemm:",
            "Traceback (most recent call last):",
            '  File "/x.py", line 1, in y',
            "ModuleNotFoundError: No module named 'deep_gemm'",
        ],
    ],
)
def test_what_the_start_survived_is_not_its_cause(harmless):
    lines = [
        *harmless,
        "[2026-11-30 20:00:02] Load weight begin. avail mem=18.07 GB",
        "[2026-11-30 20:00:03 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/y.py", line 1, in load',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    assert find_cause(lines)["code"] == "gpu_out_of_memory"
    lines[-1] = "FrobnicationError: x"
    assert find_cause(lines)["code"] == "unknown"


def test_lines_of_another_rank_inside_of_a_traceback():
    lines = [
        "[2026-11-30 20:00:36 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x.py", line 1, in run',
        "[2026-11-30 20:00:36 TP0] Load weight begin. avail mem=18.07 GB",
        "    f()",
        "ImportError: DeepEP is not installed. Please install DeepEP package.",
    ]
    assert find_cause(lines)["code"] == "backend_missing"


def test_the_oom_killer_leaves_no_word_in_the_log_but_in_systemd():
    cause = find_cause(["[2026-11-30 20:00:35 TP1] Load weight begin. avail mem=138.25 GB"], result="oom-kill")
    assert cause["code"] == "oom_killed"
    assert "Load weight begin" in cause["lines"][-1]


def test_without_any_error_the_exit_is_told():
    cause = find_cause(["hello"], result="exit-code", exit_status=7)
    assert cause["code"] == "unknown" and "exit-code" in cause["message"] and "7" in cause["message"]
    assert cause["lines"] == ["hello"]


def test_secrets_are_not_quoted():
    lines = [
        "[2026-11-30 20:00:35] server_args=ServerArgs(model_path='x', api_key='tops3cret', tp_size=1)",
        "ValueError: bad --api-key tops3cret near api-key: 'tops3cret' and tops3cret",
    ]
    cause = find_cause(lines, secrets=["tops3cret"])
    assert "tops3cret" not in str(cause)


HOSTILE = st.lists(
    st.one_of(
        st.text(max_size=200),
        st.sampled_from(
            ["Traceback (most recent call last):", '  File "x", line 1', "Error: {0} %s \\", "ImportError: ", "]" * 500]
            + [
                "error: argument (((",
                "100%|" + "#" * 300 + "| 9/9 [",
                "\x1b[31m\r\r%",
                "During handling of the above exception",
            ]
            + [text for code, text in TEXTS]
        ),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(lines=HOSTILE, result=st.sampled_from([None, "oom-kill", "exit-code", "signal", "x"]))
def test_hostile_text_never_raises(lines, result):
    cause = find_cause(lines, result=result)
    assert set(cause) >= {"code", "message", "mend", "lines", "permanent"}
    assert len(cause["lines"]) <= MAX_SHOWN + 1


@pytest.mark.parametrize("seed", range(5))
def test_a_shuffled_log_never_raises(seed):
    lines = [line for name, code, told in RECORDED for line in log(name)]
    random.Random(seed).shuffle(lines)
    assert find_cause(lines)["code"]


def test_a_monstrous_traceback_is_searched_in_part_only():
    middle = ['  File "x' + "server_args.py " * 200] * 500
    lines = ["Traceback (most recent call last):", *middle, "torch.OutOfMemoryError: CUDA out of memory."]
    block = blocks(lines)[0]
    assert len(block.text) > 1_000_000 and len(_bounded(block.text)) <= 24_001
    assert find_cause(lines)["code"] == "gpu_out_of_memory"


def test_long_lines_cost_little():
    assert find_cause(["x" * 5_000_000 + " error", "a " * 100_000, "1%" * 50_000])["code"] == "unknown"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ibgda.cpp:1874: NULL value cannot allocate mlx5dv_devx_uar with Non-Cache mapping", "rdma_device_permission"),
        ("RuntimeError: Mooncake EP was not built against torch 2.14", "mooncake_not_built_for_torch"),
        ("RuntimeError: Corrupted JIT cache directory (missing kernel.cubin)", "jit_cache_corrupt"),
        (
            "E0101 10:00:00 nixl_agent.cpp:9] VRAM memory is detected as host by UCX, NIXL_ERR_BACKEND",
            "ucx_without_cuda",
        ),
    ],
)
def test_what_is_narrower_wins_over_the_library_that_says_it(line, code):
    log = ["Scheduler hit an exception: Traceback (most recent call last):", '  File "/y.py", line 1, in load', line]
    if not line.startswith("Runtime"):
        log = [line, *log[:2], "RuntimeError: failed to start"]
    assert find_cause(log)["code"] == code
