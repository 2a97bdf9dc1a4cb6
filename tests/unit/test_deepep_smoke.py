"""The smoke test's verdict, from what two H200s really answered, and from everything that can go wrong."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _deepep_wheel, _smoke

RANK = {
    "baseline_correct": True, "bytes": 117053440, "baseline_dispatch_gbps": 392.585, "baseline_combine_gbps": 145.887,
    "origin": "/opt/sglang/venv/lib/python3.12/site-packages/deep_ep/__init__.py", "layout_correct": True,
    "dispatch_correct": True, "combine_error": 0.0, "combine_correct": True, "dispatch_gbps": 254.539,
    "combine_gbps": 238.103,
}  # fmt: skip
SAID: dict[str, Any] = {
    "ranks": [dict(RANK, rank=0), dict(RANK, rank=1)],
    "world": 2,
    "torch": "2.11.0+cu130",
    "exit": [0, 0],
}


def said(change=None, **more):
    base = copy.deepcopy(SAID)
    if change:
        base["ranks"][1].update(change)
    return dict(base, **more)


def test_two_h200s_answer_whether_deepep_helps():
    found = _smoke.judge(said())
    assert (found["state"], found["correct"], found["ranks"]) == ("ok", True, 2)
    assert (found["dispatch_gbps"], found["combine_gbps"]) == (254.5, 238.1)
    assert (found["baseline_dispatch_gbps"], found["baseline_combine_gbps"]) == (392.6, 145.9)
    # Slower on the way there, faster on the way back: only the round trip says whether it helps.
    assert found["gain"] == 1.16


@pytest.mark.parametrize("name", ["baseline_correct", "layout_correct", "dispatch_correct", "combine_correct"])
def test_one_wrong_rank_makes_it_incorrect(name):
    found = _smoke.judge(said({name: False}))
    assert (found["state"], found["correct"]) == ("incorrect", False) and name in found["message"]


def test_a_rank_that_fails_or_is_silent_is_told():
    failed = _smoke.judge(said({"error": "RuntimeError: CUDA error", "traceback": "…"}))
    assert (failed["state"], failed["correct"]) == ("failed", False) and "rank 1: RuntimeError" in failed["message"]
    silent = _smoke.judge(dict(SAID, ranks=[dict(RANK, rank=0)], exit=[0, -11]))
    assert silent["state"] == "failed" and "-11" in silent["message"] and silent["dispatch_gbps"] is None


@pytest.mark.parametrize("gpus, memory, wanted, code", [
    (0, 0, None, "needs_two_gpus"), (1, 0, None, "needs_two_gpus"), (8, 0, 1, "needs_two_gpus"),
    (2, 100_000, None, "gpus_in_use"), (2, 500, None, None), (8, 0, 4, None), (2, None, None, None),
])  # fmt: skip
def test_it_refuses_politely(gpus, memory, wanted, code):
    devices = [{"index": number, "memory_used_mib": memory} for number in range(gpus)]
    found = _smoke.refusal(devices, _smoke.busy_gpus(devices), wanted)
    assert (found["code"] if found else None) == code
    assert found is None or (found["state"] == "refused" and found["message"])


def test_fewer_gpus_than_torch_sees_is_refused_too():
    assert _smoke.judge({"ranks": [], "world": 1, "torch": "2.11.0"})["code"] == "needs_two_gpus"


@pytest.mark.parametrize("script", [
    _smoke.SCRIPT, _deepep_wheel._ASK_VENV, _deepep_wheel._PREPARE, _deepep_wheel._PROVE,
])  # fmt: skip
def test_the_scripts_for_the_venv_are_python_39(script):
    ast.parse(script, feature_version=(3, 9))


@pytest.mark.parametrize("error, code", [
    ("libcuda.so.1: cannot open shared object file: No such file or directory", "needs_gpu"),
    ("libnuma.so.1: cannot open shared object file: No such file or directory", "missing_system_lib"),
    ("x.so: undefined symbol: _Z14THPStream_WrapRKN3c106StreamE", "torch_abi_mismatch"),
    ("x.so: undefined symbol: _ZN3c104cuda20getCurrentCUDAStreamEa", "torch_abi_mismatch"),
    ("x.so: undefined symbol: _ZN7deep_ep9internode8dispatchEv", "kernels_missing"),
    ("x.so: undefined symbol: __cudaRegisterLinkedBinary_1f", "device_link_missing"),
    ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found", "libstdcxx_mismatch"),
    ("x.so: undefined symbol: _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv", "libstdcxx_mismatch"),
    ("x.so: undefined symbol: nvshmemx_init_attr", "nvshmem_mismatch"),
    ("Cannot find package: nccl", "nccl_root_not_discoverable"),
    ("Duplicate NCCL runtime found in the current system", "host_check_failed"),
    (None, "import_failed"),
])  # fmt: skip
def test_why_an_import_failed(error, code):
    assert _deepep_wheel.import_cause(error, "ImportError")["code"] == code
