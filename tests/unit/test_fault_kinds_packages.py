# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Siblings of the field's faults of packages and builds: other words, other versions, other libraries."""

from __future__ import annotations

import platform

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _backends, _build_log
from ansible_collections.gpufleet.sglang.plugins.module_utils import _diagnose as diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import _variant

from tests.tools.fake_venv import FakeVenv
from tests.tools.make_so import So
from tests.unit.plan_support import broken, codes, make, probe, rejection
from tests.unit.test_fault_kinds import TORCH, VENV, raised
from tests.unit.test_probe_backends import deep_ep, gpus, look, mooncake, nixl, packages, root, use_of

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the ELF files are for x86_64")

__all__ = ["root"]


def facts(**more):
    return diagnose.Facts({**VENV}, dict(TORCH), {"version": "0.5.23"}, "debian", **more)


def installed(name, version, variant, **more):
    return diagnose.Installed(name, version, variant, "/v/lib/x", **more)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('nvcc.cu(3): error: cannot open source file "cuda/std/tuple"', "cccl_headers_not_on_host_path"),
        ("csrc/x.hpp:4:10: fatal error: cuda/atomic: No such file or directory", "cccl_headers_not_on_host_path"),
        ("x.cpp:1:10: fatal error: 'infiniband/verbs.h' file not found", "rdma_headers_missing"),
        ("x.cpp:1:10: fatal error: rdma/rdma_cma.h: No such file or directory", "rdma_headers_missing"),
        ("x.cu:1:10: fatal error: torch/extension.h: No such file or directory", "torch_headers_missing"),
        ("x.cu:1:10: fatal error: gdrapi.h: No such file or directory", "transport_headers_missing"),
        ("x.cu(12): error: identifier 'ncclDevComm' is undefined", "nccl_headers_missing"),
        ("x.cu(12): error: identifier 'nvshmemi_ibgda_put_nbi_warp' is undefined", "nvshmem_too_old"),
        ("/usr/bin/ld: cannot find -luring: No such file or directory", "library_not_found"),
        ("/usr/bin/ld: libx.so: undefined reference to `foo@GLIBCXX_3.4.32'", "libstdcxx_mismatch"),
        ("#12 41.7 c++: fatal error: Killed signal terminated program cc1plus", "out_of_memory"),
        ("make: *** [all] Error 137", "out_of_memory"),
        ("RuntimeError: can't start new thread", "process_limit"),
        ("nvcc error   : 'cicc' died due to signal 11 (Invalid memory reference)", "compiler_crashed"),
        ("fatal: detected dubious ownership in repository at '/src'", "git_dubious_ownership"),
        ("error: externally-managed-environment", "not_a_venv"),
        ("OSError: [Errno 30] Read-only file system: '/src/build'", None),
    ],
)
def test_the_words_of_a_build_that_failed(line, code):
    found = _build_log.diagnose(["running build_ext", line], 1)
    assert found is not None and found["code"] not in ("unknown", "python_error")
    assert code is None or found["code"] == code


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("NVCC version should be >= 12.3", "RuntimeError", "toolkit_unusable"),
        ("invalid literal for int() with base 10: 'true'", "ValueError", "bad_environment_value"),
        ("Assertion error (nccl.hpp:12): not nccl_root.empty()", "RuntimeError", "nccl_root_not_discoverable"),
        ("/v/nixl_ep/_C.so: undefined symbol: efadv_query_device", "ImportError", "rdma_core_too_old"),
        ("libamdhip64.so.6: cannot open shared object file: No such file or directory", "ImportError",
         "wrong_vendor_variant"),
    ],
)  # fmt: skip
def test_the_words_of_an_import_that_failed(text, kind, code):
    assert raised(text, kind)["code"] == code


def test_a_static_tls_block_that_is_full_is_mended_by_loading_the_library_first():
    text = "/v/lib/libgomp-d22c30c5.so.1: cannot allocate memory in static TLS block"
    remedy = raised(text, "ImportError")["remedy"]
    assert (remedy["kind"], remedy["steps"][0]["action"]) == ("env_var", "set_env")
    assert remedy["steps"][0]["args"]["LD_PRELOAD"] == "/v/lib/libgomp-d22c30c5.so.1"


@pytest.mark.parametrize(
    ("soname", "package"),
    [
        ("libjsoncpp.so.25", "libjsoncpp25"),
        ("libjsoncpp.so.26", "libjsoncpp26"),
        ("libssl.so.3", "libssl3"),
        ("libssl.so.1.1", "libssl1.1"),
        ("libglog.so.0", "libgoogle-glog0v5"),
        ("libglog.so.1", "libgoogle-glog0v6"),
        ("libibverbs.so.1", "libibverbs1"),
    ],
)
def test_debian_names_a_package_by_the_abi_that_is_missing(soname, package):
    assert diagnose.os_package(soname, "debian") == package


def test_another_flavour_of_a_backend_is_kept_when_its_variant_changes():
    mooncake = _backends.BACKENDS["mooncake"]
    seen = diagnose.Seen(installed=[installed("mooncake-transfer-engine-efa", "0.3.13.post1", "cu12")])
    remedy = diagnose.remedy_replace(mooncake, seen, facts())
    wanted = [name for step in remedy["steps"] if step["action"] == "pip_install" for name in step["packages"]]
    assert [name.partition("==")[0] for name in wanted] == ["mooncake-transfer-engine-efa-cuda13"]


def test_nixl_was_the_library_itself_before_it_became_a_meta_package():
    class Dist:
        name = "nixl"

    backend = _backends.BACKENDS["nixl"]
    for version, variant in (("0.6.1", "cu12"), ("0.7.0", "cu12"), ("0.7.1", "meta"), ("1.5.1", "meta")):
        Dist.version = version
        assert _variant(backend, Dist) == variant, version


def test_what_is_as_it_was_published_is_not_installed_again():
    nixl = _backends.BACKENDS["nixl"]
    pin = nixl.pins["nixl-cu13"]
    seen = diagnose.Seen(installed=[
        installed("nixl-cu13", pin, "cu13", files_ok=True), installed("nixl", pin, "meta", files_ok=True),
    ])  # fmt: skip
    finding = diagnose.Finding("api_missing", "nixl_agent is not there.")
    remedy = diagnose.remedy_for(finding, nixl, "kv_transfer", seen, facts())
    assert [step["action"] for step in remedy["steps"]] == ["manual"]


def test_an_unknown_module_is_not_installed_by_its_name():
    seen = diagnose.Seen(installed=[installed("nixl-cu13", "1.5.1", "cu13")])
    nixl = _backends.BACKENDS["nixl"]
    found = diagnose.Finding("dependency_missing", "no module", {"name": "frobnicate.core"})
    remedy = diagnose.remedy_for(found, nixl, "kv_transfer", seen, facts())
    assert [step["action"] for step in remedy["steps"]] == ["manual"]
    known = diagnose.Finding("dependency_missing", "no module", {"name": "yaml"})
    steps = diagnose.remedy_for(known, nixl, "kv_transfer", seen, facts())["steps"]
    assert [(step["action"], step["packages"]) for step in steps] == [("pip_install", ["pyyaml"])]


def lost_nccl(fatal=False):
    """A probe on which deep_ep lacks nothing but a variable of the service."""
    host = probe("h200x2", "0.5.23")
    found = broken(
        "deep_ep", "a2a", "broken", "nccl_root_not_discoverable", "env_var", "Set EP_NCCL_ROOT_DIR=/opt/nccl."
    )
    step = {"action": "set_env", "packages": [], "args": {"EP_NCCL_ROOT_DIR": "/opt/nccl"}}
    for part in (found, found["uses"]["a2a"]):
        part["remedy"]["steps"] = [step]
    host["backends"]["deep_ep"] = {**found, "fatal_for_service": fatal}
    return host


@pytest.mark.parametrize("policy", ["install", "build", "fail"])
def test_what_only_a_variable_mends_is_told_before_anything_is_touched(policy):
    plan = make(lost_nccl(), moe_a2a_backend="deepep", on_missing_backend=policy)
    found = rejection(plan, "backend_missing")
    assert found["suggestion"] == "Set EP_NCCL_ROOT_DIR=/opt/nccl (sglang_env_vars)"
    assert (plan["remedies"], plan["assumes"]) == ([], [])


def test_what_only_a_variable_mends_lets_a_plan_fall_back():
    plan = make(lost_nccl(), moe_a2a_backend="deepep", on_missing_backend="fallback")
    assert plan["effective"]["moe_a2a_backend"] == "none"
    assert "backend_fallback" in codes(plan["warnings"])


def test_a_backend_that_kills_the_server_for_want_of_a_variable_is_refused():
    plan = make(lost_nccl(fatal=True), on_missing_backend="install")
    found = rejection(plan, "broken_backend_kills_server")
    assert found["suggestion"].endswith("(sglang_env_vars)")
    assert plan["remedies"] == []


def test_a_wanted_backend_that_a_variable_mends_is_no_work_of_ours():
    plan = make(lost_nccl(), backends={"deep_ep": ["a2a"]})
    assert "wanted_backend_not_mendable" in codes(plan["warnings"])
    assert plan["remedies"] == []


# --- on disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path):
    return FakeVenv(tmp_path / "venv")


def lacks(symbol):
    return f"raise ImportError('/v/_C.so: undefined symbol: {symbol}')\n"


def test_a_stranger_that_owns_the_module_goes_first(venv):
    venv.torch()
    venv.dist("pynixl", "1.0", {"nixl/__init__.py": ""}, tag="py3-none-any")
    remedy = use_of(venv, "nixl", "kv_transfer")["remedy"]
    assert packages(remedy, "pip_uninstall") == ["pynixl"]
    assert packages(remedy, "pip_install") == ["nixl==1.5.1", "nixl-cu13==1.5.1"]


def test_a_wheel_that_torch_has_left_behind_is_replaced_by_the_one_for_this_torch(venv):
    venv.torch()
    venv.sglang("0.5.23", ["sgl-deep-ep==0.1.2.post1"])
    deep_ep(venv, version="0.1.2", requires=("torch==2.13.0",), init=lacks("_ZNK4c10d7Backend7getSizeEv"))
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"))
    assert (found["state"], found["code"]) == ("broken", "torch_abi_mismatch")
    assert packages(found["remedy"], "pip_install") == ["sgl-deep-ep==0.1.2.post1"]


@pytest.mark.parametrize(("pin", "told"), [("2.28.9", "2.30.4"), ("2.30.7", "2.30.7"), (None, "2.30.4")])
def test_an_nccl_that_another_package_moved_is_put_back_and_the_wheel_stays(venv, pin, told):
    """deepseek-ai/DeepEP#710: torch's own pin may be the NCCL that is too old."""
    venv.torch("2.11.0+cu130")
    venv.dist("torch", "2.11.0+cu130", {}, [f"nvidia-nccl-cu13=={pin}"] if pin else [])
    venv.dist("nvidia-nccl-cu13", "2.28.9", {"nvidia/nccl/lib/libnccl.so.2": So(soname="libnccl.so.2")})
    deep_ep(venv, requires=(), init=lacks("ncclGetLsaDevicePointer"))
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"))
    assert found["code"] == "nccl_mismatch"
    assert [step["action"] for step in found["remedy"]["steps"]] == ["manual"]
    assert f"nvidia-nccl-cu13=={told}" in found["remedy"]["summary"]


@pytest.mark.parametrize(
    ("torch", "sglang", "version"),
    [("2.11.0+cu130", "0.5.20", "1.4.1"), ("2.11.0+cu130", "0.5.15", "1.3.1"), ("2.15.0+cu130", "0.5.23", None)],
)
def test_nixl_ep_comes_from_a_version_that_has_it_for_this_torch(venv, torch, sglang, version):
    venv.torch(torch)
    venv.sglang(sglang)
    nixl(venv)
    found = use_of(venv, "nixl", "a2a")
    assert found["code"] == "nixl_ep_not_built_for_torch"
    wanted = [f"nixl=={version}", f"nixl-cu13=={version}"] if version else []
    assert packages(found["remedy"], "pip_install") == wanted


def test_a_program_that_was_linked_with_cuda_in_a_wheel_without_it(venv):
    """kvcache-ai/Mooncake#3314: the module is right, and the program beside it does not start."""
    venv.torch("2.13.0+cpu", None)
    mooncake(venv, "mooncake-transfer-engine-non-cuda", "0.3.12.post1", So(pyinit="engine"),
             **{"mooncake/mooncake_master": So(needed=["libcudart.so.12"])})  # fmt: skip
    found = look(venv, level="static")["backends"]["mooncake"]
    assert found["uses"]["kv_transfer"]["state"] == "ok"
    tool = found["tools"]["mooncake_master"]
    assert tool["code"] == "variant_needs_cuda"
    assert packages(tool["remedy"], "pip_install") == ["mooncake-transfer-engine-non-cuda==0.3.13.post1"]


def test_a_library_that_only_the_wheel_can_bring_and_did_not(venv, root):
    """kvcache-ai/Mooncake#187: no operating system has libetcd_wrapper.so."""
    venv.torch("2.6.0+cu124", "12.4")
    mooncake(venv, "mooncake-transfer-engine", "0.3.0b1", So(needed=["libetcd_wrapper.so"], pyinit="engine"))
    found = use_of(venv, "mooncake", "kv_transfer", root=root, level="static")
    assert (found["state"], found["code"]) == ("broken", "files_missing")
    assert packages(found["remedy"], "pip_install") == ["mooncake-transfer-engine==0.3.13.post1"]
    assert packages(found["remedy"], "os_install") == []


def test_the_nccl_of_the_builder_is_not_replaced_by_a_cache(venv, root):
    venv.torch()
    deep_ep(venv)
    venv.put("deep_ep/envs.py", "persistent_envs = {'EP_NCCL_ROOT_DIR': '/home/builder/nccl'}\n")
    found = use_of(venv, "deep_ep", "a2a", root=root, results=gpus("9.0"))
    assert found["code"] == "builder_path_baked_in"
    assert [step["action"] for step in found["remedy"]["steps"]] == ["manual"]
    (root / "usr/lib/x86_64-linux-gnu/libnccl.so.2").write_bytes(So(soname="libnccl.so.2").build())
    found = use_of(venv, "deep_ep", "a2a", root=root, results=gpus("9.0"))
    assert found["remedy"]["steps"][0]["args"] == {"EP_NCCL_ROOT_DIR": "/usr"}


def test_a_module_that_is_part_of_another_generation_is_no_package_of_an_index(venv):
    venv.torch()
    deep_ep(venv, init="import hybrid_ep_cpp\n")
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"))
    assert found["code"] == "extension_missing"
    assert packages(found["remedy"], "pip_install") == []


def test_a_switch_that_is_no_number_is_named(venv):
    venv.torch()
    deep_ep(venv, init="import os\nint(os.environ['EP_SUPPRESS_NCCL_CHECK'])\n")
    environment = {"EP_SUPPRESS_NCCL_CHECK": "true"}
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"), environment=environment)
    assert (found["code"], found["evidence"]["variables"]) == ("bad_environment_value", ["EP_SUPPRESS_NCCL_CHECK"])
