# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision from evidence: texts of loaders and libraries, merging, mends, and the table behind them."""

from __future__ import annotations

import json
import re

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _diagnose as diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import BACKENDS, OS_PACKAGES
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES, LAYERS, STATES
from ansible_collections.gpufleet.sglang.plugins.module_utils._import_child import Outcome
from hypothesis import given, settings
from hypothesis import strategies as st

TORCH = {"version": "2.14.1+cu130", "cuda": "13.0", "cuda_major": 13, "hip": None}
VENV = {"path": "/v", "soabi": "cpython-312-x86_64-linux-gnu", "machine": "x86_64", "python_version": "3.12.1"}


def facts(**more):
    return diagnose.Facts(**{"venv": VENV, "torch": TORCH, "sglang": {}, "os_family": "debian", **more})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("libibverbs.so.1: cannot open shared object file: No such file or directory", "missing_system_lib"),
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "no_driver"),
        ("libcudart.so.12: cannot open shared object file: No such file or directory", "cuda_major_mismatch"),
        ("libnccl.so.2: cannot open shared object file: No such file or directory", "missing_wheel_lib"),
        ("libnvshmem_host.so.3: cannot open shared object file: No such file or directory", "missing_wheel_lib"),
        ("libc10.so: cannot open shared object file: No such file or directory", "torch_absent"),
        ("/v/site-packages/x/_C.so: cannot open shared object file: No such file or directory", "wrong_machine"),
        ("/v/x.so: wrong ELF class: ELFCLASS32", "wrong_machine"),
        ("/v/x.so: invalid ELF header", "corrupt_file"),
        ("/v/x.so: file too short", "corrupt_file"),
        ("/v/x.so: undefined symbol: _ZN3c104cuda20CUDACachingAllocator9allocatorE", "torch_abi_mismatch"),
        ("/v/x.so: undefined symbol: _ZNK5torch8autograd4Node4nameEv", "torch_abi_mismatch"),
        ("/v/x.so: undefined symbol: _ZN2at4_ops5zeros4callEv", "torch_abi_mismatch"),
        ("/v/x.so: undefined symbol: __cudaRegisterLinkedBinary_abc", "device_link_missing"),
        ("/v/x.so: undefined symbol: _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv", "libstdcxx_mismatch"),
        ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /v/x.so)", "libstdcxx_mismatch"),
        ("/lib/libstdc++.so.6: version `CXXABI_1.3.15' not found (required by /v/x.so)", "libstdcxx_mismatch"),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found (required by /v/x.so)", "glibc_too_old"),
        ("/lib/libmlx5.so.1: version `MLX5_1.25' not found (required by /v/x.so)", "rdma_core_too_old"),
        ("/v/x.so: undefined symbol: mlx5dv_devx_create_event_channel", "rdma_core_too_old"),
        ("/v/x.so: undefined symbol: ncclGetUniqueId", "nccl_mismatch"),
        ("/v/x.so: undefined symbol: nvshmemi_ibgda_device_state_d", "nvshmem_mismatch"),
        ("/v/x.so: undefined symbol: cuMulticastCreate", "driver_too_old"),
        ("/v/x.so: undefined symbol: cudaGetDriverEntryPointByVersion, version libcudart.so.13",
         "cuda_runtime_mismatch"),
        ("/v/x.so: undefined symbol: PyUnicode_AsUTF8AndSize2", "python_abi_mismatch"),
        ("/v/x.so: undefined symbol: something_else", "undefined_symbol"),
        ("ImportError: ...deep_ep_cpp...so: undefined symbol: _ZN7de", "incomplete_build"),
        ("Python version mismatch: module was compiled for Python 3.11, but the interpreter version is 3.12",
         "wrong_python"),
        ("dynamic module does not define module export function (PyInit__C)", "wrong_python"),
        ("cannot allocate memory in static TLS block", "static_tls"),
        ("Duplicate NCCL runtime found in the current system: a and b", "duplicate_nccl_runtime"),
        ("Invalid NCCL versions: a (loaded) v.s. b (expected)", "invalid_nccl_version"),
        ("Cannot find package: nccl", "nccl_root_not_discoverable"),
        ("No libnccl.so found in /usr/lib/", "nccl_root_not_discoverable"),
        ("Mooncake PG was not built against torch==2.13.0.", "mooncake_pg_not_built_for_torch"),
        ("Mooncake EP was not built. Please rebuild Mooncake with WITH_EP=ON.", "mooncake_ep_not_built_for_torch"),
        ("The NVIDIA driver does not expose a usable CUDA device. See x for host prerequisites", "no_gpu_visible"),
        ("Found no NVIDIA driver on your system.", "no_gpu_visible"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver_too_old"),
        ("This wheel requires CUDA 13, but PyTorch uses CUDA 12", "cuda_major_mismatch"),
        ("The installed PyTorch build does not provide CUDA", "torch_is_cpu_build"),
        ("detected CUDA 13 but nixl-cu13 is not installed", "cuda_major_mismatch"),
        ("No NIXL backend found (tried nixl_cu13, nixl_cu12, nixl_rocm)", "meta_without_backend"),
        ("NIXL_ERR_BACKEND", "nixl_backend_unusable"),
        ("NVSHMEM device library version does not match with NVSHMEM host library version", "nvshmem_mismatch"),
        ("named symbol not found", "arch_mismatch"),
        ("ibgda.cpp:1889: NULL value cannot allocate mlx5dv_devx_uar", "rdma_device_permission"),
    ],
)  # fmt: skip
def test_what_texts_mean(text, code):
    hit = diagnose.classify_text(text)
    assert hit is not None and hit[0] == code


def test_a_text_that_means_nothing_known():
    assert diagnose.classify_text("the moon is full") is None


def error(kind, message, bases=(), **more):
    return {"type": kind, "message": message, "bases": [kind, *bases, "Exception"], **more}


def module_error(name):
    return error("ModuleNotFoundError", f"No module named '{name}'", ["ImportError"], name=name)


@pytest.mark.parametrize(
    ("backend", "name", "code"),
    [
        ("deep_ep", "deep_ep", "not_installed"), ("deep_ep", "deep_ep._C", "extension_missing"),
        ("deep_ep", "deep_ep_cpp", "extension_missing"), ("deep_ep", "numpy", "dependency_missing"),
        ("deep_ep", "torch", "torch_absent"), ("mooncake", "mooncake.engine", "extension_missing"),
        ("nixl", "nixl_cu13._bindings", "extension_missing"), ("nixl", "numpy", "dependency_missing"),
    ],
)  # fmt: skip
def test_module_not_found_is_about_the_name(backend, name, code):
    wanted = [module for use in BACKENDS[backend].uses.values() for module in use.modules]
    assert diagnose.classify_error(module_error(name), BACKENDS[backend], wanted).code == code


def test_the_loaders_words_behind_please_install():
    outer = error("ImportError", "Please install mooncake by following the instructions")
    outer["chain"] = [error("ImportError", "libibverbs.so.1: cannot open shared object file: No such file")]
    finding = diagnose.classify_error(outer, BACKENDS["mooncake"], ["mooncake.engine"])
    assert (finding.code, finding.data["library"]) == ("missing_system_lib", "libibverbs.so.1")


def test_a_bare_assertion_is_told_by_its_function():
    bare = error("AssertionError", "", frames=[["/v/deep_ep/__init__.py", 50, "find_cuda_home"]])
    assert diagnose.classify_error(bare, BACKENDS["deep_ep"], ["deep_ep"]).code == "cuda_home_not_found"


DRIVER_AND_SYSTEM = ["no_driver", "no_gpu_visible", "driver_too_old", "missing_system_lib", "permission_denied",
                     "rdma_device_permission", "nixl_backend_unusable", "rdma_core_too_old"]  # fmt: skip


@pytest.mark.parametrize("code", DRIVER_AND_SYSTEM)
@pytest.mark.parametrize("name", list(BACKENDS))
def test_faults_of_driver_fabric_and_permission_reinstall_nothing(code, name):
    backend = BACKENDS[name]
    item = diagnose.Installed("x", "1", "cu13", "/p")
    finding = diagnose.Finding(code, "text", {"library": "libibverbs.so.1"})
    remedy = diagnose.remedy_for(finding, backend, next(iter(backend.uses)), diagnose.Seen(installed=[item]), facts())
    assert not {step["action"] for step in remedy["steps"]} & {"pip_install", "pip_uninstall", "build"}


@pytest.mark.parametrize("code", list(CODES))
@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("torch", [TORCH, {"version": None}, {"version": "2.13.0+cpu", "cuda_major": None}])
def test_every_code_has_a_remedy_of_the_contract(code, name, torch):
    backend = BACKENDS[name]
    variant = next(iter(backend.variants.values()))
    seen = diagnose.Seen(installed=[diagnose.Installed(next(iter(backend.variants)), "1.0", variant, "/p")])
    remedy = diagnose.remedy_for(diagnose.Finding(code, "text"), backend, "a2a", seen, facts(torch=torch))
    if CODES[code].state == "ok":
        assert remedy is None
        return
    assert set(remedy) == {"kind", "summary", "steps"} and remedy["summary"] and remedy["steps"]
    assert remedy["kind"] in {"install", "replace", "rebuild", "system_package", "env_var", "driver", "none"}
    for step in remedy["steps"]:
        assert set(step) == {"action", "packages", "args"}
        if step["action"] == "pip_install":
            for package in step["packages"]:
                assert "torch" not in re.split(r"[=\-]", package) and not package.startswith(("sglang", "nvidia-nccl"))
    json.dumps(remedy)


def test_nothing_is_uninstalled_that_another_variant_does_not_share():
    seen = diagnose.Seen(installed=[
        diagnose.Installed("nixl", "1.5.1", "meta", "/p"), diagnose.Installed("nixl-cu12", "1.5.1", "cu12", "/p"),
    ])  # fmt: skip
    remedy = diagnose.remedy_replace(BACKENDS["nixl"], seen, facts())
    assert [step["action"] for step in remedy["steps"]] == ["pip_install"]


@pytest.mark.parametrize(
    ("soname", "family", "package"),
    [
        ("libibverbs.so.1", "debian", "libibverbs1"), ("libibverbs.so.1", "redhat", "libibverbs"),
        ("libnuma.so.1", "redhat", "numactl-libs"), ("libcurl.so.4", "debian", "libcurl4"),
        ("libibverbs.so.1", "other", None), ("libodd.so", "debian", None),
    ],
)  # fmt: skip
def test_os_packages(soname, family, package):
    assert diagnose.os_package(soname, family) == package


@pytest.mark.parametrize(
    ("version", "commit", "wanted", "expected"),
    [
        ("1.2.1+9af0e0d", None, "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee", True),
        ("1.2.1+af9a040", None, "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee", False),
        ("1.2.1+9af0e0d0e7", None, "9af0e0d", True), ("1.2.1+local", None, "9af0e0d", True),
        ("1.2.1", "9AF0E0D0E74F", "9af0e0d", True), ("1.2.1", "567632d", "9af0e0d", False),
        ("1.2.1", None, "9af0e0d", True), ("1.2.1+g9af0e0d", None, "9af0e0d", True),
    ],
)  # fmt: skip
def test_revisions(version, commit, wanted, expected):
    assert diagnose.revision_matches(version, commit, wanted) is expected


def test_the_worst_state():
    assert diagnose.worst(["ok", "needs_gpu", "suspect"]) == "suspect"
    assert diagnose.worst(["absent", "broken", "ok"]) == "broken"
    assert diagnose.worst([]) == "ok"


def test_an_outcome_that_could_not_start_leaves_the_static_finding():
    seen = diagnose.Seen(top="package", origin="/v/deep_ep/__init__.py")
    decided = diagnose.decide_use(BACKENDS["deep_ep"], "a2a", seen, facts(), Outcome("not_started", message="no exec"))
    assert (decided["state"], decided["code"], decided["level"]) == ("unknown", "not_probed", "static")


def test_the_table_of_codes_is_whole():
    for code, entry in CODES.items():
        assert re.match(r"^[a-z0-9_]+$", code)
        assert entry.state in STATES and entry.layer in LAYERS, code
        assert entry.kind in {"install", "replace", "rebuild", "system_package", "env_var", "driver", "none"}, code
        assert entry.text and entry.told and entry.mend and entry.source, code


def test_every_code_that_the_decision_names_is_in_the_table():
    named = set(diagnose.PRIORITY) | diagnose._DISPROVED | diagnose._EXPLAINS | diagnose._SELF_EVIDENT
    named |= {code for _pattern, code in diagnose._TEXTS}
    named |= {
        code for backend in BACKENDS.values() for use in backend.uses.values() for built in use.extensions
        for code in (built.torch_code, built.absent_code) if code
    }  # fmt: skip
    assert named <= set(CODES)


def test_the_table_of_backends_is_whole():
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert set(backend.pins) <= set(backend.variants)
        for variant, packages in backend.install.items():
            assert set(packages) <= set(backend.variants), (name, variant)
        for row in backend.incompatible:
            assert set(row.uses) <= set(backend.uses) and row.source
        assert not set(backend.wrong) & set(backend.variants) or all(backend.wrong.values())
    assert all(len(names) == 2 for names in OS_PACKAGES.values())


TEXT = st.text(max_size=200)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["type", "message", "bases", "name", "chain", "frames", "filename"]), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_hostile_texts_never_raise(text):
    for candidate in (text, text + ".so: cannot open shared object file", "undefined symbol: " + text,
                      "version `" + text + "' not found"):  # fmt: skip
        hit = diagnose.classify_text(candidate)
        assert hit is None or hit[0] in CODES
    assert diagnose.classify_symbol(text) in CODES


@settings(max_examples=300, deadline=None)
@given(message=TEXT, name=TEXT, kind=TEXT, chain=st.lists(ANYTHING, max_size=3), output=TEXT, status=st.integers())
def test_hostile_outcomes_never_raise(message, name, kind, chain, output, status):
    told = {"type": kind, "message": message, "name": name, "bases": [kind], "chain": chain, "frames": []}
    for backend in BACKENDS.values():
        for use in backend.uses:
            for outcome in (Outcome("error", error=told, output=output), Outcome("exit", status=status, output=output),
                            Outcome("ok", attributes={name: False})):  # fmt: skip
                decided = diagnose.decide_use(backend, use, diagnose.Seen(top="package", origin="/x"), facts(), outcome)
                assert decided["state"] in STATES
                json.dumps(decided)
