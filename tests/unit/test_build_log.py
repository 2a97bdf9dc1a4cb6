"""The first real error of a build log, and how far a build has come; fixtures/build_logs holds real logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _build_log as log
from hypothesis import given
from hypothesis import strategies as st

LOGS = Path(__file__).parents[1] / "fixtures" / "build_logs"
END = [
    "ninja: build stopped: subcommand failed.",
    "Traceback (most recent call last):",
    "subprocess.CalledProcessError: Command '['ninja', '-v', '-j', '6']' returned non-zero exit status 1.",
    "RuntimeError: Error compiling objects for extension",
]

ROWS = [
    ("csrc/deep_ep.cpp:3:10: fatal error: cuda/std/tuple: No such file or directory", "cccl_headers_not_on_host_path"),
    ("/x/cuda_fp8.hpp:14:10: fatal error: nv/target: No such file or directory", "cccl_headers_not_on_host_path"),
    ("a.cuh:9:10: fatal error: infiniband/mlx5dv.h: No such file or directory", "rdma_headers_missing"),
    ("/x/CUDAContextLight.h:8:10: fatal error: cusparse.h: No such file or directory", "cuda_headers_missing"),
    ("/x/a.h:8:10: fatal error: cublas_v2.h: No such file or directory", "cuda_headers_missing"),
    ("/x/a.h:8:10: fatal error: cusolverDn.h: No such file or directory", "cuda_headers_missing"),
    ("a.hpp:3:10: fatal error: nccl_device.h: No such file or directory", "nccl_headers_missing"),
    ("a.cu:3:10: fatal error: nvshmem.h: No such file or directory", "nvshmem_headers_missing"),
    ("a.hpp:3:10: fatal error: fmt/format.h: No such file or directory", "submodule_missing"),
    ("a.h:12:10: fatal error: Python.h: No such file or directory", "python_headers_missing"),
    ("/usr/bin/ld: cannot find -l:libnccl.so.2: No such file or directory", "nccl_library_not_found"),
    ("/usr/bin/ld: cannot find -lcuda: No such file or directory", "libcuda_stub_not_found"),
    ("/usr/bin/ld: cannot find -lcudart: No such file or directory", "cuda_library_not_found"),
    ("/usr/bin/ld: cannot find -l:libnvshmem_host.so: No such file or directory", "nvshmem_library_not_found"),
    ("ModuleNotFoundError: libnvshmem_host.so not found", "nvshmem_library_not_found"),
    ("ModuleNotFoundError: No module named 'torch'", "build_isolation"),
    ("ModuleNotFoundError: No module named 'setuptools'", "build_tools_missing"),
    ("error: invalid command 'bdist_wheel'", "build_tools_missing"),
    ("ERROR: No matching distribution found for ninja", "build_tools_unavailable"),
    (
        "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile "
        "PyTorch (12.4).",
        "toolkit_major_mismatch",
    ),
    ("OSError: CUDA_HOME environment variable is not set. Please set it.", "torch_is_cpu_build"),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_103'", "arch_unsupported_by_toolkit"),
    ("ValueError: Unknown CUDA arch (13.7) or GPU not supported", "arch_unsupported_by_toolkit"),
    ("nvlink error   : Undefined reference to 'nvshmemi_ibgda_device_state_d' in 'a.o'", "nvshmem_without_ibgda"),
    ("nvlink error   : Multiple definition of 'nvshmemi_ibgda_device_state_d' in 'a.o'", "nvshmem_too_new"),
    ("/usr/bin/ld: a.o: multiple definition of `nvshmemi_ibgda_device_state_d'; b.o: first", "nvshmem_too_new"),
    ("nvlink error   : Undefined reference to '_Z11layout_stepi' in 'a.o'", "nvlink_error"),
    ("g++: fatal error: Killed signal terminated program cc1plus", "out_of_memory"),
    ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "out_of_memory"),
    ("/tmp/x.s: fatal error: error writing to /tmp/cc.s: No space left on device", "disk_full"),
    ("fatal: unable to access 'https://example.org/x/': Could not resolve host: example.org", "network_unreachable"),
    ("error: pathspec 'v9' did not match any file(s) known to git", "revision_not_found"),
    ("git@example.org: Permission denied (publickey).", "git_access_denied"),
    ("AssertionError: Cannot find package: nccl", "package_not_found_by_setup"),
    ("ptxas /tmp/a.ptx, line 5; error   : Feature 'st.bulk' requires .target sm_100", "deepep_unsupported_arch"),
    ("    assert False, 'Not implemented'", "deepep_unsupported_arch"),
    ("PermissionError: [Errno 13] Permission denied: '/srv/src/setup.py'", "permission_denied"),
    ("#error -- unsupported GNU version! gcc versions later than 15 are not supported!", "host_compiler_unsupported"),
    ("error: command 'g++' failed: No such file or directory", "cxx_compiler_missing"),
    ("nvcc fatal   : Failed to preprocess host compiler properties.", "cxx_compiler_missing"),
    ("a.cu(12): error: identifier \"foo\" is undefined", "compile_error"),
]  # fmt: skip


@pytest.mark.parametrize("line, code", ROWS)
def test_each_row_is_the_cause_and_never_what_follows_from_it(line, code):
    noise = ["[1/7] nvcc -c a.cu -o a.o -lcuda", "csrc/a.cu:1: warning: unused", "fatal: not a git repository"]
    found = log.diagnose([*noise, line, *END], 1)
    assert found is not None
    assert (found["state"], found["code"], found["line"]) == ("build_failed", code, 4)
    assert found["text"] == line.strip() and found["message"] and found["mend"]


def test_the_earliest_error_wins_over_a_later_known_one():
    lines = [ROWS[3][0], *END, ROWS[0][0]]
    found = log.diagnose(lines, 1)
    assert found is not None and found["code"] == "cuda_headers_missing"


def test_the_source_code_that_a_traceback_quotes_is_no_error():
    lines = [
        "Traceback (most recent call last):",
        '  File "/x/cpp_extension.py", line 2412, in _get_cuda_arch_flags',
        '    raise ValueError(f"Unknown CUDA arch ({arch}) or GPU not supported")',
        "ValueError: Unknown CUDA arch (13.7) or GPU not supported",
    ]
    found = log.diagnose(lines, 1)
    assert found is not None and (found["code"], found["line"]) == ("arch_unsupported_by_toolkit", 4)


def test_a_linker_says_what_it_lacks_before_it_gives_up():
    lines = [
        "/usr/bin/ld: cannot find -lcuda",
        "collect2: error: ld returned 1 exit status",
        "error: command 'g++' failed with exit code 1",
    ]
    found = log.diagnose(lines, 1)
    assert found is not None and found["code"] == "libcuda_stub_not_found"


def test_rc_0_with_a_device_link_for_another_arch_is_suspect():
    lines = ["nvlink warning : SM Arch ('sm_75') not found in '.../internode.o'", "Successfully built deep_ep"]
    found = log.diagnose(lines, 0)
    assert found is not None and (found["state"], found["code"]) == ("build_suspect", "device_link_wrong_arch")


def test_a_good_build_has_no_cause():
    assert log.diagnose((LOGS / "v1_h200.log").read_text().splitlines(), 0) is None


def test_what_nobody_knows_is_unknown_and_keeps_its_last_lines():
    found = log.diagnose(["all is well", "until here", *END[:1]], 3)
    assert found is not None
    assert (found["code"], found["retryable"]) == ("build_failed", False)
    assert found["lines"][-1] == END[0]


def test_progress_of_a_real_build():
    lines = (LOGS / "v1_h200.log").read_text().splitlines()
    seen = []
    for number in range(len(lines) + 1):
        step = log.progress(lines[:number])
        if step and step not in seen:
            seen.append(step)
    assert [f"[{item['done']}/{item['total']}] {item['item']}" for item in seen] == [
        "[1/7] runtime.cu",
        "[2/7] layout.cu",
        "[3/7] intranode.cu",
        "[4/7] internode_ll.cu",
        "[5/7] deep_ep.cpp",
        "[6/7] internode.cu",
        "[7/7] device link",
    ]


@pytest.mark.parametrize("command, item", [
    ("/usr/local/cuda/bin/nvcc -MD -MF x/internode.o.d -c /a/csrc/kernels/internode.cu -o x.o", "internode.cu"),
    ("g++ -MMD -c '/srv/src/deep_ep.cpp' -o x.o", "deep_ep.cpp"),
    ("nvcc a.o b.o -o dlink.o -dlink -lnvshmem_device", "device link"),
    ("g++ -shared a.o -o x.so", "link"),
    ("", None),
])  # fmt: skip
def test_what_a_command_works_on(command, item):
    assert log.compile_item(command) == item


@given(st.lists(st.text(max_size=80), max_size=30), st.integers(-9, 255))
def test_any_log_gives_a_cause_exactly_when_it_failed(lines, rc):
    found = log.diagnose(lines, rc)
    assert (found is not None) or rc == 0
    json.dumps([found, log.progress(lines)])


@pytest.mark.parametrize("name, code", [
    ("cccl", "cccl_headers_not_on_host_path"),
    ("cusparse", "cuda_headers_missing"),
    ("mlx5dv", "rdma_headers_missing"),
    ("nccl", "nccl_library_not_found"),
    ("libcuda", "libcuda_stub_not_found"),
    ("nvshmem", "nvshmem_library_not_found"),
    ("arch", "arch_unsupported_by_toolkit"),
    ("compile", "compile_error"),
    ("nvlink", "nvlink_error"),
])  # fmt: skip
def test_logs_of_builds_that_really_failed(name, code):
    """Made by tests/integration/test_deepep_build.py with nvcc 13.0 and torch 2.14.1; long lines are cut."""
    found = log.diagnose((LOGS / f"real_{name}.log").read_text().splitlines(), 1)
    assert found is not None and found["code"] == code, found
