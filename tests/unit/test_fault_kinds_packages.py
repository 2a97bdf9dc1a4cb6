# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Siblings of the field's faults of packages and builds: other words, other versions, other libraries."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _backends, _build_log
from ansible_collections.gpufleet.sglang.plugins.module_utils import _diagnose as diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import _variant

from tests.unit.test_fault_kinds import TORCH, VENV, raised


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
