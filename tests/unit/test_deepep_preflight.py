"""Everything that stands in the way of a build, from facts alone (field cases C16, C21, C23, C26, C33)."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _deepep_preflight as pre
from hypothesis import given
from hypothesis import strategies as st

GB = 10**9
V1 = {
    "generation": "v1", "version": "1.2.1", "extensions": ["deep_ep_cpp"], "compile_units": 6, "submodules": [],
    "includes": ["device_host_transport/nvshmem_common_ibgda.h", "infiniband/mlx5dv.h", "nvshmem.h"],
    "nvshmem_host_link": "wheel_only", "nccl_link": "none", "links_libcuda": False, "nvshmem_35_ready": False,
    "revision": "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee",
}  # fmt: skip
V2 = dict(
    V1, generation="v2", version="2.1.0", extensions=["deep_ep._C"], nvshmem_host_link="versioned",
    nccl_link="versioned", links_libcuda=True, nvshmem_35_ready=True,
    submodules=[{"path": "third-party/fmt", "present": True}],
)  # fmt: skip


def toolkit(path="/usr/local/cuda-13.0", version="13.0", **more):
    base = {
        "path": path, "version": version, "build": version + ".88", "nvcc_works": True, "message": "",
        "cccl": f"{path}/targets/x86_64-linux/include/cccl" if version.startswith("13") else "", "cusparse": True,
        "stubs": f"{path}/lib64/stubs", "nvtx3interop": True,
    }  # fmt: skip
    return dict(base, **more)


def facts(**more):
    site = "/opt/sglang/venv/lib/python3.12/site-packages"
    base = {
        "venv": {"state": "ok", "path": "/opt/sglang/venv"},
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None},
        "python": {"tag": "cp312", "headers": True, "include": "/usr/include/python3.12"},
        "toolkits": [toolkit()],
        "gpus": [{"name": "NVIDIA H200", "compute_capability": "9.0"}] * 8,
        "source": V1,
        "nvshmem": {
            "root": f"{site}/nvidia/nvshmem", "version": "3.4.5", "cuda_major": "13", "origin": "venv",
            "libs": ["libnvshmem_device.a", "libnvshmem_host.so.3"], "device_lib": True, "needs_mlx5dv": True,
        },
        "nccl": {
            "root": f"{site}/nvidia/nccl", "version": "2.30.7", "cuda_major": "13", "origin": "venv",
            "libs": ["libnccl.so.2"], "device_header": True,
        },
        "wheel_include": [],
        "headers": {"infiniband/mlx5dv.h": True, "infiniband/verbs.h": True},
        "compiler": {"path": "/usr/bin/g++", "version": "13.3.0"},
        "tools": {"setuptools": "80.0.0", "wheel": None, "ninja": "1.12"},
        "pip": "venv",
        "git": True,
        "libcuda": {"link": "/usr/lib64", "library": "/usr/lib64/libcuda.so.1"},
        "memory": 500 * GB, "cpus": 64, "disk": 200 << 30, "machine": "x86_64", "libc": "glibc 2.39",
        "os_family": "debian",
    }  # fmt: skip
    return dict(copy.deepcopy(base), **more)


def codes(plan):
    return [problem["code"] for problem in plan["problems"]]


def warned(plan):
    return [warning["code"] for warning in plan["warnings"]]


def test_a_healthy_h200_host_builds_v1_with_the_measured_environment():
    plan = pre.plan_build(facts(), {})
    assert plan["problems"] == [] and plan["warnings"] == []
    assert plan["archs"] == ["9.0"]
    assert plan["jobs"] == 6
    assert plan["env"]["TORCH_CUDA_ARCH_LIST"] == "9.0" and plan["env"]["MAX_JOBS"] == "6"
    assert plan["env"]["CUDA_HOME"] == "/usr/local/cuda-13.0"
    assert plan["cpath"] == ["/usr/local/cuda-13.0/targets/x86_64-linux/include/cccl"]
    assert "NVSHMEM_DIR" not in plan["env"] and plan["links"] == [] and plan["overlay"] == []


def test_all_that_is_missing_comes_at_once_with_packages():
    plan = pre.plan_build(
        facts(
            torch={"version": "2.13.0+cpu", "cuda": None, "hip": None},
            compiler=None,
            headers={},
            nvshmem=None,
            gpus=[],
            memory=1 * GB,
            disk=1 << 29,
            tools={"setuptools": None, "wheel": None, "ninja": None},
            pip=None,
            python={"tag": "cp312", "headers": False, "include": "/usr/include/python3.12"},
        ),
        {},
    )
    assert set(codes(plan)) == {
        "torch_is_cpu_build", "python_headers_missing", "gpu_archs_unknown", "nvshmem_missing", "cxx_compiler_missing",
        "build_tools_missing", "rdma_headers_missing", "not_enough_memory", "not_enough_disk",
    }  # fmt: skip
    packages = {name for problem in plan["problems"] for name in problem["packages"]}
    assert {"g++", "libibverbs-dev", "python3-dev", "ninja", "setuptools"} <= packages
    assert all(problem["message"] and problem["mend"] for problem in plan["problems"])


@pytest.mark.parametrize("family, package", [("debian", "libibverbs-dev"), ("redhat", "rdma-core-devel")])
def test_packages_have_the_names_of_the_distribution(family, package):
    plan = pre.plan_build(facts(headers={}, os_family=family), {})
    assert codes(plan) == ["rdma_headers_missing"] and package in plan["problems"][0]["packages"]


# --- C33: the toolkit ---

THREE = [toolkit("/usr", "11.5"), toolkit("/usr/local/cuda-12.8", "12.8"), toolkit("/usr/local/cuda-13.0", "13.0")]


@pytest.mark.parametrize("torch_cuda, toolkits, chosen, code", [
    ("12.8", THREE, "/usr/local/cuda-12.8", None),
    ("13.0", THREE, "/usr/local/cuda-13.0", None),
    ("12.6", THREE, "/usr/local/cuda-12.8", None),
    ("12.8", THREE[2:], None, "toolkit_major_mismatch"),
    ("13.0", THREE[:2], None, "toolkit_major_mismatch"),
    ("12.8", [], None, "toolkit_missing"),
    ("12.8", [toolkit("/a", "12.8", nvcc_works=False, message="rc 127"), toolkit("/b", "12.6")], "/b", None),
    ("12.8", [toolkit("/a", "12.8", nvcc_works=False, message="rc 127")], None, "nvcc_broken"),
    ("12.1", [toolkit("/a", "12.1")], None, "toolkit_too_old"),
    ("13.0", [toolkit("/a", "13.2"), toolkit("/b", "13.1")], "/b", None),
])  # fmt: skip
def test_the_toolkit_follows_torch(torch_cuda, toolkits, chosen, code):
    found, because, problems = pre.choose_toolkit(toolkits, torch_cuda, ["9.0"])
    assert (found["path"] if found else None) == chosen
    assert [problem["code"] for problem in problems] == ([code] if code else [])
    assert bool(because) == bool(chosen)


def test_another_minor_is_a_warning_and_the_reason_names_what_was_not_taken():
    plan = pre.plan_build(
        facts(
            torch={"version": "2.8.0+cu126", "cuda": "12.6"},
            toolkits=THREE,
            nvshmem=dict(facts()["nvshmem"], cuda_major="12"),
        ),
        {},
    )
    assert codes(plan) == [] and warned(plan) == ["toolkit_minor_mismatch"]
    because = next(item["because"] for item in plan["decisions"] if item["question"] == "toolkit")
    assert "/usr (11.5)" in because and "/usr/local/cuda-13.0 (13.0)" in because


def test_an_architecture_can_ask_for_a_newer_toolkit():
    both = [toolkit("/a", "12.6"), toolkit("/b", "12.9")]
    assert pre.choose_toolkit(both, "12.6", ["10.3"])[0] == both[1]
    assert pre.choose_toolkit(both[:1], "12.6", ["10.0"])[2][0]["code"] == "toolkit_too_old"


# --- C16: CCCL ---


@pytest.mark.parametrize("machine, first", [
    ("x86_64", "/opt/cuda-13.0/targets/x86_64-linux/include/cccl"),
    ("aarch64", "/opt/cuda-13.0/targets/sbsa-linux/include/cccl"),
])  # fmt: skip
def test_cccl_lies_in_the_toolkit_of_the_machine(machine, first):
    found = pre.cccl_candidates("/opt/cuda-13.0", machine)
    assert found[0] == first and found[-1] == "/opt/cuda-13.0/include/cccl"
    assert not any("usr/local" in path for path in found)


def test_cuda_12_needs_no_cpath_and_a_toolkit_without_cccl_is_refused():
    twelve = facts(torch={"version": "2.8.0+cu128", "cuda": "12.8"}, toolkits=[toolkit("/opt/cuda-12.8", "12.8")])
    twelve["nvshmem"]["cuda_major"] = "12"
    assert pre.plan_build(twelve, {})["cpath"] == []
    assert codes(pre.plan_build(facts(toolkits=[toolkit(cccl=None)]), {})) == ["cccl_headers_missing"]
    wheels = [{"path": "/v/nvidia/cu13/include", "has": ["cccl"]}]
    plan = pre.plan_build(facts(toolkits=[toolkit(cccl=None)], wheel_include=wheels), {})
    assert codes(plan) == [] and plan["cpath"] == ["/v/nvidia/cu13/include/cccl"]


def test_a_compiler_only_toolkit_takes_the_headers_of_the_venv():
    assert codes(pre.plan_build(facts(toolkits=[toolkit(cusparse=False)]), {})) == ["cuda_headers_missing"]
    wheels = [{"path": "/v/nvidia/cu13/include", "has": ["cusparse", "cublas"]}]
    plan = pre.plan_build(facts(toolkits=[toolkit(cusparse=False)], wheel_include=wheels), {})
    assert codes(plan) == [] and plan["cpath"][-1] == "/v/nvidia/cu13/include"


# --- C21, C26: architectures ---


def gpu(name, capability):
    return {"name": name, "compute_capability": capability}


@pytest.mark.parametrize("source", [V1, V2])
@pytest.mark.parametrize("name, capability, code", [
    ("NVIDIA RTX A6000", "8.6", "deepep_unsupported_arch"),
    ("NVIDIA A100-SXM4-80GB", "8.0", "deepep_unsupported_arch"),
    ("NVIDIA L40S", "8.9", "deepep_unsupported_arch"),
    ("NVIDIA RTX PRO 6000", "12.0", "deepep_unsupported_arch"),
    ("NVIDIA H200", "9.0", None),
    ("NVIDIA B200", "10.0", None),
    ("NVIDIA B300", "10.3", None),
])  # fmt: skip
def test_architectures_that_cannot_work_are_refused_with_the_gpu_named(source, name, capability, code):
    plan = pre.plan_build(facts(gpus=[gpu(name, capability)], source=source, toolkits=[toolkit("/a", "13.0")]), {})
    assert codes(plan) == ([code] if code else [])
    if code:
        assert name in plan["problems"][0]["message"]
    else:
        assert plan["env"]["TORCH_CUDA_ARCH_LIST"] == capability


def test_unproven_is_not_impossible():
    plan = pre.plan_build(facts(gpus=[gpu("NVIDIA RTX PRO 6000", "12.0")]), {"allow_unproven_archs": True})
    assert codes(plan) == []
    plan = pre.plan_build(facts(gpus=[gpu("NVIDIA A100", "8.0")]), {"allow_unproven_archs": True})
    assert codes(plan) == ["deepep_unsupported_arch"]


def test_without_gpus_the_variable_decides_and_with_gpus_it_is_compared():
    assert codes(pre.plan_build(facts(gpus=[]), {})) == ["gpu_archs_unknown"]
    assert pre.plan_build(facts(gpus=[]), {"gpu_archs": ["sm_90", "10.0"]})["archs"] == ["9.0", "10.0"]
    plan = pre.plan_build(facts(gpus=[gpu("NVIDIA B200", "10.0")]), {"gpu_archs": "9.0"})
    assert codes(plan) == [] and warned(plan) == ["gpu_not_covered"]
    assert codes(pre.plan_build(facts(), {"gpu_archs": ["hopper"]})) == ["gpu_archs_invalid"]


def test_mixed_gpus_get_all_their_architectures():
    plan = pre.plan_build(facts(gpus=[gpu("NVIDIA B200", "10.0"), gpu("NVIDIA H200", "9.0")]), {})
    assert plan["env"]["TORCH_CUDA_ARCH_LIST"] == "9.0;10.0"


def test_v2_on_blackwell_says_what_the_serving_host_needs():
    plan = pre.plan_build(facts(gpus=[gpu("NVIDIA B200", "10.0")], source=V2), {})
    assert "jit_needs_newer_nvcc" in warned(plan)
    newer = [toolkit(), toolkit("/usr/local/cuda-13.1", "13.1")]
    assert "jit_needs_newer_nvcc" not in warned(
        pre.plan_build(facts(gpus=[gpu("B200", "10.0")], source=V2, toolkits=newer), {})
    )


@pytest.mark.parametrize("text, arch", [
    ("9.0", "9.0"), ("90", "9.0"), ("sm_90", "9.0"), ("SM_90a", "9.0a"), ("compute_100", "10.0"), ("10.3", "10.3"),
    (" 12.0 ", "12.0"), ("9.0+PTX", "9.0"), ("hopper", None), ("", None), ("9", None), (None, None), ("9.0.1", None),
])  # fmt: skip
def test_architectures_in_all_their_spellings(text, arch):
    assert pre.normalise_arch(text) == arch


@given(st.text(max_size=12))
def test_no_text_breaks_the_reader_of_architectures(text):
    archs, bad = pre.split_archs(text)
    assert all(pre.normalise_arch(arch) == arch for arch in archs)
    assert isinstance(bad, list)


# --- C23, C17: NVSHMEM and NCCL ---


@pytest.mark.parametrize("style, origin, linked", [
    ("unversioned", "venv", True), ("unversioned", "given", True), ("wheel_only", "venv", False),
    ("wheel_only", "given", True), ("versioned", "venv", False), ("versioned", "given", False),
])  # fmt: skip
def test_only_old_revisions_get_a_link_and_it_points_into_the_package(style, origin, linked):
    base = facts(source=dict(V1, nvshmem_host_link=style))
    base["nvshmem"]["origin"] = origin
    plan = pre.plan_build(base, {})
    assert codes(plan) == []
    assert [link["name"] for link in plan["links"]] == (["libnvshmem_host.so"] if linked else [])
    if linked:
        assert plan["links"][0]["target"].endswith("/nvidia/nvshmem/lib/libnvshmem_host.so.3")
    assert ("NVSHMEM_DIR" in plan["env"]) == (origin == "given")


def test_a_tarball_of_nvshmem_needs_no_link():
    base = facts(source=dict(V1, nvshmem_host_link="unversioned"))
    base["nvshmem"]["libs"].append("libnvshmem_host.so")
    assert pre.plan_build(base, {})["links"] == []


@pytest.mark.parametrize("version, source, code", [
    ("3.4.5", V1, None), ("3.3.20", V1, None), ("3.3.8", V1, "nvshmem_too_old"), ("3.5.19", V1, "nvshmem_too_new"),
    ("3.6.0", V1, "nvshmem_too_new"), ("3.5.19", V2, None), ("3.4.5", V2, None), (None, V1, None),
])  # fmt: skip
def test_nvshmem_versions(version, source, code):
    base = facts(source=source)
    base["nvshmem"]["version"] = version
    plan = pre.plan_build(base, {})
    assert codes(plan) == ([code] if code else [])
    assert ("nvshmem_legacy_timeout" in warned(plan)) == (version == "3.5.19" and source is V2)


def test_nvshmem_of_another_cuda_is_not_taken():
    base = facts()
    base["nvshmem"]["cuda_major"] = "12"
    plan = pre.plan_build(base, {})
    assert codes(plan) == ["nvshmem_variant_mismatch"] and plan["problems"][0]["packages"] == ["nvidia-nvshmem-cu13"]


def test_v2_needs_a_new_nccl_and_v1_none():
    old = dict(facts()["nccl"], version="2.28.9")
    assert codes(pre.plan_build(facts(source=V2, nccl=old), {})) == ["nccl_too_old"]
    assert codes(pre.plan_build(facts(source=V2, nccl=None), {})) == ["nccl_missing"]
    assert codes(pre.plan_build(facts(source=V1, nccl=None), {})) == []
    assert codes(pre.plan_build(facts(source=V2), {})) == []


def test_a_given_nccl_reaches_the_service_but_is_never_written_into_the_wheel():
    given_nccl = dict(facts()["nccl"], origin="given", root="/opt/nccl")
    plan = pre.plan_build(facts(source=V2, nccl=given_nccl), {})
    assert plan["service_env"] == {"EP_NCCL_ROOT_DIR": "/opt/nccl"}
    assert plan["env"]["NCCL_DIR"] == "/opt/nccl" and not [name for name in plan["env"] if name.startswith("EP_")]


def test_libcuda_comes_from_the_driver_the_stub_or_a_link():
    assert pre.plan_build(facts(source=V2), {})["links"] == []
    none = {"link": None, "library": None}
    plan = pre.plan_build(facts(source=V2, libcuda=none), {})
    assert codes(plan) == [] and plan["library_path"][-1].endswith("/stubs")
    bare = [toolkit(stubs=None)]
    assert codes(pre.plan_build(facts(source=V2, libcuda=none, toolkits=bare), {})) == ["libcuda_stub_missing"]
    driver = {"link": None, "library": "/usr/lib64/libcuda.so.1"}
    plan = pre.plan_build(facts(source=V2, libcuda=driver, toolkits=bare), {})
    assert plan["links"] == [{"name": "libcuda.so", "target": "/usr/lib64/libcuda.so.1"}]


# --- source, tools, size ---


def test_an_empty_submodule_and_an_unknown_source_are_told():
    empty = dict(V2, submodules=[{"path": "third-party/fmt", "present": False}])
    assert codes(pre.plan_build(facts(source=empty), {})) == ["submodule_missing"]
    unknown = {"generation": "unknown", "message": "no setup.py"}
    assert codes(pre.plan_build(facts(source=unknown), {})) == ["source_not_recognised"]


@pytest.mark.parametrize("torch, source, code", [
    ({"version": None, "cuda": None}, V1, "torch_missing"),
    ({"version": "2.11.0+rocm7", "cuda": None, "hip": "7.0"}, V1, "torch_is_rocm_build"),
    ({"version": "2.9.1+cu130", "cuda": "13.0"}, V2, "torch_too_old"),
    ({"version": "2.9.1+cu130", "cuda": "13.0"}, V1, None),
])  # fmt: skip
def test_torch_has_to_fit(torch, source, code):
    assert codes(pre.plan_build(facts(torch=torch, source=source), {})) == ([code] if code else [])


@pytest.mark.parametrize("tools, overlay", [
    ({"setuptools": "80.0", "wheel": None, "ninja": "1.12"}, []),
    ({"setuptools": "69.0", "wheel": "0.45", "ninja": "1.12"}, []),
    ({"setuptools": "69.0", "wheel": None, "ninja": "1.12"}, ["wheel"]),
    ({"setuptools": None, "wheel": None, "ninja": None}, ["ninja", "setuptools>=70.1"]),
])  # fmt: skip
def test_only_what_is_missing_comes_into_the_overlay(tools, overlay):
    plan = pre.plan_build(facts(tools=tools), {})
    assert plan["overlay"] == overlay and codes(plan) == []


def test_a_wheelhouse_has_to_hold_the_tools():
    tools = {"setuptools": None, "wheel": None, "ninja": None}
    plan = pre.plan_build(facts(tools=tools), {"wheelhouse": "/srv/wheels", "wheelhouse_has": ["ninja"]})
    assert codes(plan) == ["build_tools_missing"] and plan["problems"][0]["packages"] == ["setuptools"]


@pytest.mark.parametrize("cpus, memory, disk, units, limit, jobs", [
    (64, 500 * GB, 200 << 30, 6, None, 6),
    (2, 500 * GB, 200 << 30, 6, None, 2),
    (64, 8 * GB, 200 << 30, 6, None, 3),
    (64, 500 * GB, 2 << 30, 6, None, 4),
    (64, 500 * GB, 200 << 30, 6, 1, 1),
    (64, 2 * GB, 200 << 30, 6, None, 0),
    (64, 500 * GB, 1 << 29, 6, None, 0),
])  # fmt: skip
def test_jobs_follow_from_the_tightest_of_all(cpus, memory, disk, units, limit, jobs):
    found, because = pre.count_jobs(cpus, memory, disk, units, limit)
    assert found == jobs and because


def test_the_environment_of_the_user_wins_and_is_part_of_the_fingerprint():
    plan = pre.plan_build(facts(), {"environment": {"MAX_JOBS": 3, "X": "y"}})
    assert plan["env"]["MAX_JOBS"] == "3"
    assert plan["fingerprint_facts"]["options"] == {"env:MAX_JOBS": 3, "env:X": "y"}


def test_hybrid_over_several_nodes_has_its_own_environment():
    hybrid = dict(V1, generation="hybrid", submodules=[{"path": "third-party/nccl", "present": True}])
    plan = pre.plan_build(facts(source=hybrid), {"multinode": "nixl"})
    assert (plan["env"]["HYBRID_EP_MULTINODE"], plan["env"]["USE_NIXL"]) == ("1", "1")
    assert "HYBRID_EP_MULTINODE" not in pre.plan_build(facts(source=hybrid), {})["env"]
