# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the kinds that the field knows, in shapes that no report has: each gets its cause, owner and mend."""

from __future__ import annotations

import platform

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _diagnose as diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import BACKENDS
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES
from ansible_collections.gpufleet.sglang.plugins.module_utils._import_child import Outcome

from tests.tools.fake_venv import FakeVenv
from tests.tools.make_so import So
from tests.unit.test_probe_backends import DEEP_EP, deep_ep, gpus, look, mooncake, nixl, packages, root, use_of

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the ELF files are for x86_64")

TORCH = {"version": "2.14.1+cu130", "cuda": "13.0", "cuda_major": 13, "hip": None}
CPU = {"version": "2.13.0+cpu", "cuda": None, "cuda_major": None, "hip": None}
VENV = {"path": "/v", "soabi": "cpython-312-x86_64-linux-gnu", "machine": "x86_64", "python_version": "3.12.1"}
REINSTALLS = {"pip_install", "pip_uninstall", "build"}

__all__ = ["root"]


@pytest.fixture
def venv(tmp_path):
    return FakeVenv(tmp_path / "venv")


def actions(remedy):
    return [step["action"] for step in (remedy or {"steps": []})["steps"]]


def raised(text, kind="ImportError", backend="deep_ep", use="a2a", torch=TORCH, seen=None, chain=(), **more):
    """The decision on an import that raised, where the files show nothing."""
    bases = {"ImportError": ["ImportError", "Exception"], "FileNotFoundError": ["FileNotFoundError", "OSError"]}
    error = {"type": kind, "bases": bases.get(kind, [kind, "Exception"]), "message": text, "chain": list(chain), **more}
    facts = diagnose.Facts(VENV, torch, {}, "debian")
    seen = seen or diagnose.Seen(top="package", origin="/v/x/__init__.py", installed=[
        diagnose.Installed("sgl-deep-ep", "0.1.2.post1", "any", "/v/x")])  # fmt: skip
    return diagnose.decide_use(BACKENDS[backend], use, seen, facts, Outcome("error", error=error))


GONE = ": cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("text", "code", "layer"),
    [
        ("libefa.so.1" + GONE, "missing_system_lib", "system_library"),
        ("/lib/libefa.so.1: version `EFA_1.3' not found (required by /v/x.so)", "rdma_core_too_old", "system_library"),
        ("/lib/libcrypto.so.3: version `OPENSSL_3.3.0' not found (required by /v/x.so)", "system_lib_too_old",
         "system_library"),
        ("/lib/libcurl.so.4: version `CURL_OPENSSL_4' not found (required by /v/x.so)", "system_lib_too_old",
         "system_library"),
        ("/lib/libm.so.6: version `GLIBC_2.38' not found (required by /v/_C.so)", "glibc_too_old", "system_library"),
        ("/v/x.so: undefined symbol: __cxa_call_terminate, version CXXABI_1.3.15", "libstdcxx_mismatch", "libstdcxx"),
        ("/v/x.so: symbol ncclCommWindowRegister, version X not defined in file libnccl.so.2 with link time reference",
         "nccl_mismatch", "nccl"),
        ("/lib/libmlx5.so.1: symbol x_new, version MLX5_1.25 not defined in file libmlx5.so.1 with link time reference",
         "rdma_core_too_old", "system_library"),
        ("/v/x.so: undefined symbol: _Z14THPStream_WrapRKN3c106StreamE", "torch_abi_mismatch", "torch"),
        ("/v/x.so: undefined symbol: nvshmem_team_split_2d", "nvshmem_mismatch", "nvshmem"),
        ("libcublasLt.so.13" + GONE, "missing_wheel_lib", "wheel"),
        ("libcudart.so.13" + GONE, "missing_wheel_lib", "wheel"),
        ("libcudart.so.12" + GONE, "cuda_major_mismatch", "wheel"),
        ("libnvidia-ml.so.1" + GONE, "no_driver", "driver"),
        ("/v/_C.so: cannot open shared object file: Permission denied", "permission_denied", "permission"),
        ("libibverbs.so.1: cannot open shared object file: Permission denied", "permission_denied", "permission"),
        ("/v/_C.so: cannot open shared object file: Stale file handle", "storage_error", "environment"),
        ("/v/_C.so: cannot read file data: Input/output error", "storage_error", "environment"),
        ("[Errno 28] No space left on device", "storage_error", "environment"),
        ("/v/_C.so: only ET_DYN and ET_EXEC can be loaded", "corrupt_file", "wheel"),
        ("source code string cannot contain null bytes", "corrupt_file", "wheel"),
        ("dlopen: cannot load any more object with static TLS", "static_tls", "environment"),
        ("libpython3.11.so.1.0" + GONE, "wrong_python", "wheel"),
        ("libpython3.12.so.1.0" + GONE, "missing_system_lib", "system_library"),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver_mismatch", "driver"),
        ("Error 803: system has unsupported display driver / cuda driver combination", "driver_mismatch", "driver"),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "fabric_not_ready",
         "fabric"),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "no_gpu_visible", "driver"),
        ("CUDA error: no kernel image is available for execution on the device", "arch_mismatch", "wheel"),
        ("ibv_create_cq failed: Operation not permitted", "rdma_device_permission", "permission"),
        ("ibv_reg_mr: Cannot allocate memory", "rdma_device_permission", "permission"),
        ("Failed to make directory", "cannot_write", "permission"),
        ("[Errno 30] Read-only file system: '/.deep_ep'", "cannot_write", "permission"),
        ("numpy.core.multiarray failed to import", "dependency_broken", "wheel"),
        ("numpy.dtype size changed, may indicate binary incompatibility. Expected 96", "dependency_broken",
         "wheel"),
        ("cannot import name '_C' from partially initialized module 'deep_ep' (most likely due to a circular import)",
         "extension_missing", "wheel"),
        ("Please make sure NVSHMEM is installed", "missing_wheel_lib", "wheel"),
        ("Cannot re-initialize CUDA in forked subprocess", "not_probed", "venv"),
    ],
)  # fmt: skip
def test_the_words_of_an_import(text, code, layer):
    found = raised(text)
    assert (found["code"], found["layer"]) == (code, layer)
    assert found["state"] not in ("ok", "suspect", "absent")
    if layer in ("driver", "fabric", "permission", "environment", "system_library", "libstdcxx"):
        assert not set(actions(found["remedy"])) & REINSTALLS, found["remedy"]


@pytest.mark.parametrize("text", ["'nvcc'", "'/usr/local/cuda/bin/nvcc'", "/opt/cuda/bin/nvcc"])
def test_a_compiler_that_is_not_there_is_no_deleted_library(text):
    found = raised(f"[Errno 2] No such file or directory: {text}", "FileNotFoundError")
    assert found["code"] == "cuda_home_not_found"


def test_a_library_that_only_its_wheel_can_have_brought():
    found = raised("libgflags-8aee0f6c.so.2.1.2" + GONE, backend="mooncake", use="kv_transfer")
    assert found["code"] == "files_missing"
    assert "os_install" not in actions(found["remedy"])


def test_a_path_that_does_not_exist_is_not_of_another_machine():
    text = "/v/lib/python3.12/site-packages/deep_ep/_C.so" + GONE
    assert raised(text, exists=True)["code"] == "wrong_machine"
    assert raised(text, exists=False)["code"] == "files_missing"
    assert raised("/usr/lib/libnuma.so.1" + GONE, exists=False)["code"] == "missing_system_lib"


@pytest.mark.parametrize("library", ["libnccl.so.2", "libtorch_cuda.so", "libnvshmem_host.so.3", "libcudart.so.13"])
def test_what_a_cpu_torch_does_not_bring(library):
    found = raised(library + GONE, torch=CPU)
    assert (found["state"], found["code"]) == ("unsupported", "torch_is_cpu_build")
    assert not set(actions(found["remedy"])) & REINSTALLS


def test_symbols_of_another_ucx_break_what_files_only_suspect():
    found = raised("/v/x.so: undefined symbol: ucp_ep_close_nbx", backend="nixl", use="kv_transfer")
    assert (found["state"], found["code"]) == ("broken", "ucx_conflict")
    assert "pip_install" not in actions(found["remedy"])


def test_two_ucx_and_an_agent_that_cannot_be_made(venv, tmp_path):
    ucx = tmp_path / "ucx"
    ucx.mkdir()
    (ucx / "libucp.so.0").write_bytes(So().build())
    venv.torch()
    nixl(venv)
    venv.put("nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0", So())
    venv.put("nixl_cu13/_api.py", "raise RuntimeError('nixlBackendError: NIXL_ERR_BACKEND')\n")
    environment = {"LD_LIBRARY_PATH": f"/opt/more:{ucx}/"}
    found = use_of(venv, "nixl", "kv_transfer", environment=environment)
    assert (found["state"], found["code"], found["evidence"]["path"]) == ("broken", "ucx_conflict", f"{ucx}/")
    assert found["remedy"]["steps"] == [{"action": "set_env", "packages": [], "args": {"LD_LIBRARY_PATH": "/opt/more"}}]


def test_symbols_of_another_nixl_are_mended_by_one_nixl():
    seen = diagnose.Seen(top="package", installed=[
        diagnose.Installed("nixl", "1.5.1", "meta", "/v/n"),
        diagnose.Installed("nixl-cu13", "1.5.1", "cu13", "/v/m"),
    ])  # fmt: skip
    found = raised(
        "/v/x.so: undefined symbol: _ZN9nixlAgent10getXferReqEv", backend="nixl", use="kv_transfer", seen=seen
    )
    assert found["code"] == "incomplete_build"
    assert packages(found["remedy"], "pip_install") == ["nixl-cu13==1.5.1"]


# --- on disk ------------------------------------------------------------------------------------------------------


def test_an_empty_folder_of_nixl_that_pip_left(venv):
    venv.torch()
    venv.put("nixl/__pycache__/x.pyc", b"")
    found = use_of(venv, "nixl", "kv_transfer")
    assert (found["state"], found["code"]) == ("absent", "namespace_leftover")
    assert packages(found["remedy"], "pip_install") == ["nixl==1.5.1", "nixl-cu13==1.5.1"]


def test_a_folder_of_nixl_beside_its_cuda_package_only(venv):
    venv.torch()
    venv.put("nixl/__pycache__/x.pyc", b"")
    venv.dist("nixl-cu13", "1.5.1", {f"nixl_cu13/_bindings{venv.suffix}": So(pyinit="_bindings")})
    found = use_of(venv, "nixl", "kv_transfer")
    assert (found["state"], found["code"]) == ("absent", "backend_without_meta")


@pytest.mark.parametrize("level", ["static", "import"])
def test_without_a_record_what_imports_is_good(venv, level):
    venv.torch()
    info = deep_ep(venv)
    (info / "RECORD").unlink()
    found = look(venv, level=level, results=gpus("9.0"))["backends"]["deep_ep"]
    assert found["state"] == "ok", found
    assert found["distributions"][0]["files_ok"] is None


def test_metadata_that_names_no_module_and_none_is_there(venv):
    venv.torch()
    info = mooncake(venv)
    for path in (venv.site / "mooncake").iterdir():
        path.unlink()
    (venv.site / "mooncake").rmdir()
    (info / "RECORD").write_text("")
    found = use_of(venv, "mooncake", "kv_transfer")
    assert (found["state"], found["code"]) == ("broken", "files_missing")
    assert packages(found["remedy"], "pip_install") == ["mooncake-transfer-engine-cuda13==0.3.13.post1"]
    assert "--force-reinstall" in found["remedy"]["steps"][-1]["args"]["flags"]


def test_an_empty_dist_info_is_no_distribution_and_no_error(venv):
    venv.torch()
    (venv.site / "sgl_deep_ep-0.1.2.post1.dist-info").mkdir()
    found = use_of(venv, "deep_ep", "a2a")
    assert found["state"] in ("absent", "broken")
    assert packages(found["remedy"], "pip_install") == ["sgl-deep-ep==0.1.2.post1"]


def test_two_publishers_of_deep_ep(venv):
    venv.torch()
    deep_ep(venv)
    venv.dist("tokenspeed-deepep", "2.1.0.post1", {
        "deep_ep/__init__.py": DEEP_EP + "other = 1\n", f"deep_ep/_C{venv.suffix}": So(pyinit="_C", sm=[90]),
    })  # fmt: skip
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"))
    assert found["state"] == "suspect"
    assert found["code"] == "file_owned_by_two_distributions"
    assert sorted(packages(found["remedy"], "pip_uninstall")) == ["sgl-deep-ep", "tokenspeed-deepep"]
    assert packages(found["remedy"], "pip_install") == ["sgl-deep-ep==0.1.2.post1"]


def test_a_wheel_for_another_machine_by_its_tag(venv):
    venv.torch()
    files = {"mooncake/__init__.py": "", "mooncake/engine.so": So(pyinit="engine", machine="aarch64")}
    venv.dist(
        "mooncake-transfer-engine-cuda13", "0.3.13.post1", files, tag=f"{venv.tag}-{venv.tag}-manylinux_2_28_aarch64"
    )
    found = use_of(venv, "mooncake", "kv_transfer")
    assert (found["state"], found["code"]) == ("broken", "wrong_machine")
    assert packages(found["remedy"], "pip_install") == ["mooncake-transfer-engine-cuda13==0.3.13.post1"]
    assert "os_install" not in actions(found["remedy"])


def test_an_extension_named_for_another_python(venv):
    venv.torch()
    venv.dist("sgl-deep-ep", "0.1.2.post1", {
        "deep_ep/__init__.py": DEEP_EP, "deep_ep/_C.cpython-36m-x86_64-linux-gnu.so": So(pyinit="_C")})  # fmt: skip
    found = use_of(venv, "deep_ep", "a2a")
    assert (found["state"], found["code"]) == ("broken", "wrong_python")
    assert packages(found["remedy"], "pip_install") == ["sgl-deep-ep==0.1.2.post1"]


def test_a_pinned_version_against_a_build_of_ones_own(venv):
    venv.torch()
    venv.sglang("0.5.23", ["sgl-deep-ep==0.1.2.post1", "torch==2.14.1"])
    deep_ep(venv, version="1.2.1+567632d", name="deep-ep", requires=())
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"), revisions={"deep_ep": "9af0e0d0dead"})
    assert (found["state"], found["code"]) == ("suspect", "wrong_revision")
    assert actions(found["remedy"]) == ["build"]


def test_a_libstdcxx_without_the_version(venv, root):
    venv.torch()
    library = root / "usr/lib/x86_64-linux-gnu"
    (library / "libibverbs.so.1").write_bytes(So(soname="libibverbs.so.1", needed=["libmissing-of-ours.so.7"]).build())
    mooncake(venv, engine=So(needed=["libibverbs.so.1"], pyinit="engine"))
    found = use_of(venv, "mooncake", "kv_transfer", root=root, level="static")
    assert (found["code"], found["evidence"]["library"]) == ("missing_system_lib", "libmissing-of-ours.so.7")
    assert found["remedy"]["kind"] == "system_package"


def test_a_module_that_needs_numpy(venv):
    venv.torch()
    mooncake(venv, **{"mooncake/__init__.py": "import numpy\n"}, engine=So(pyinit="engine"))
    found = use_of(venv, "mooncake", "kv_transfer")
    assert (found["state"], found["code"], found["evidence"]["name"]) == ("broken", "dependency_missing", "numpy")
    assert packages(found["remedy"], "pip_install") == ["numpy"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os\nos._exit(134)\n", "import_exited"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "import_crashed"),
        ("import os\nos.mkdir('/proc/deep_ep')\n", None),
        ("from . import buffer\n", "extension_missing"),
        ("assert False\n", "assertion_at_import"),
        ("raise KeyboardInterrupt\n", "exception_at_import"),
        ("open('/usr/lib/x.so (deleted)')\n", "deleted_mapping"),
        ("import torch\ntorch.no_such_thing\n", "exception_at_import"),
    ],
)
def test_host_checks_of_deep_ep(venv, text, code):
    venv.torch()
    deep_ep(venv, init=text)
    found = use_of(venv, "deep_ep", "a2a", results=gpus("9.0"))
    assert found["state"] == "broken", found
    assert code is None or found["code"] == code


# --- one round ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "name", "system"),
    [
        (("2.14.1+cu130", "13.0"), "mooncake-transfer-engine-cuda13",
         ["ibverbs-providers", "libcurl4", "libibverbs1", "libnuma1"]),
        (("2.12.0+cu128", "12.8"), "mooncake-transfer-engine",
         ["ibverbs-providers", "libcurl4", "libibverbs1", "libnuma1"]),
        (("2.13.0+cpu", None), "mooncake-transfer-engine-non-cuda", ["libcurl4", "libibverbs1", "libnuma1"]),
    ],
)  # fmt: skip
def test_what_a_wheel_will_need_of_the_system_comes_first(venv, root, torch, name, system):
    venv.torch(*torch)
    remedy = look(venv, root=root, level="static")["backends"]["mooncake"]["remedy"]
    assert actions(remedy) == ["os_install", "pip_install"]
    assert sorted(packages(remedy, "os_install")) == system
    assert remedy["kind"] == "install"
    assert packages(remedy, "pip_install") == [f"{name}==0.3.13.post1"]


def test_nothing_is_asked_of_a_system_that_has_it(venv, root):
    venv.torch()
    for soname in ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4", "libmlx5.so.1"):
        (root / "usr/lib/x86_64-linux-gnu" / soname).write_bytes(So(soname=soname).build())
    backends = look(venv, root=root, level="static")["backends"]
    assert actions(backends["mooncake"]["remedy"]) == ["pip_install"]
    # nixl brings its own.
    assert actions(backends["nixl"]["remedy"]) == ["pip_install"]


def test_the_wrong_project_goes_after_the_system_and_before_the_right_one(venv, root):
    venv.torch()
    venv.dist("mooncake", "0.0.1", {"mooncake/__init__.py": "", "mooncake/core.py": ""}, tag="py3-none-any")
    remedy = look(venv, root=root, level="static")["backends"]["mooncake"]["remedy"]
    assert actions(remedy) == ["os_install", "pip_uninstall", "pip_install"]
    assert packages(remedy, "pip_uninstall") == ["mooncake"]


def test_another_variant_may_need_more_of_the_system_and_the_same_one_does_not(venv, root):
    venv.torch()
    mooncake(venv, name="mooncake-transfer-engine-non-cuda", engine=So(pyinit="engine"))
    remedy = use_of(venv, "mooncake", "kv_transfer", root=root, level="static")["remedy"]
    assert actions(remedy) == ["os_install", "pip_uninstall", "pip_install"]
    other = FakeVenv(venv.path.parent / "other")
    other.torch()
    info = mooncake(other, engine=So(pyinit="engine"))
    (other.site / "mooncake/__init__.py").unlink()
    assert info.is_dir()
    remedy = use_of(other, "mooncake", "kv_transfer", root=root, level="static")["remedy"]
    assert "os_install" not in actions(remedy)


def test_both_variants_of_nixl_stay_when_one_of_them_is_gutted(venv):
    venv.torch()
    nixl(venv)
    (venv.site / f"nixl_cu13/_bindings{venv.suffix}").unlink()
    remedy = use_of(venv, "nixl", "kv_transfer")["remedy"]
    assert packages(remedy, "pip_install") == ["nixl-cu13==1.5.1"]
    assert "pip_uninstall" not in actions(remedy)


@pytest.mark.parametrize(
    "code", [name for name, code in CODES.items() if code.layer in ("driver", "fabric", "permission")]
)
@pytest.mark.parametrize("backend", ["deep_ep", "mooncake", "nixl"])
def test_no_reinstall_for_what_is_not_the_wheels(code, backend):
    facts = diagnose.Facts(VENV, TORCH, {}, "debian", lacking=["libibverbs.so.1"])
    remedy = diagnose.remedy_for(diagnose.Finding(code, "x"), BACKENDS[backend], "a2a", diagnose.Seen(), facts)
    assert not set(actions(remedy)) & REINSTALLS
