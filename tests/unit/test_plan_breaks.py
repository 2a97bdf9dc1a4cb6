# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inputs that break plans: each fault with a control that is almost the same and is fine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _plan_constraints, _rules

from tests.unit.plan_support import after, codes, decision, dumps, make, probe, rejection

PCIE, B300, H200 = "pcie-rtxpro6000", "nvlink-b300", "nvlink-h200-no-rdma"
BF16 = {"quantization": {"method": None, "block": None}}
NVFP4 = {"quantization": {"method": "modelopt", "algorithm": "NVFP4", "block": [1, 16]}}
MLA, PLAIN = {"kv_lora_rank": 512}, {"kv_lora_rank": None}


def capability(host: dict[str, Any], number: str, *indexes: int) -> dict[str, Any]:
    for gpu in host["gpus"]["devices"]:
        if not indexes or gpu["index"] in indexes:
            gpu.update(compute_capability=number, sm="sm_" + number.replace(".", ""))
    return host


# name, SGLang, model, flags, code; and flags that are fine
FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], Optional[str], dict[str, Any]]] = [
    ("0.5.9", {}, {"tp_size": 8, "attn_cp_size": 3}, "size_not_multiple_of_context_parallelism", {"attn_cp_size": 2}),
    ("0.5.18", {}, {"tp_size": 8, "moe_dp_size": 3}, "moe_dp_does_not_fit", {"moe_dp_size": 2, "ep_size": 1}),
    ("0.5.18", {}, {"tp_size": 8, "ep_size": 8, "moe_dp_size": 2}, "moe_dp_does_not_fit", {"ep_size": 4}),
    ("0.5.9", {}, {"tp_size": 4, "pp_size": 2, "moe_dp_size": 2}, "context_parallelism_needs_pp_1", {"pp_size": 1}),
    ("0.5.9", {}, {"tp_size": 4, "dp_size": 2, "enable_dp_lm_head": True}, "dp_lm_head_needs_attention_dp",
     {"enable_dp_attention": True}),
    ("0.5.23", {}, {"nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, "node_rank_not_below_nnodes",
     {"node_rank": 1}),
    ("0.5.23", {}, {"tp_size": 4, "base_gpu_id": 6}, "gpu_ids_beyond_gpus", {"base_gpu_id": 4}),
    ("0.5.23", {}, {"tp_size": 4, "gpu_id_step": 4}, "gpu_ids_beyond_gpus", {"gpu_id_step": 2}),
    ("0.5.23", {}, {"tp_size": 4, "pp_size": 2, "speculative_algorithm": "NGRAM"}, "speculation_with_pp",
     {"pp_size": 1}),
    ("0.5.9", {}, {"tp_size": 4, "pp_size": 2, "enable_mixed_chunk": True}, "mixed_chunk_with_pp",
     {"enable_mixed_chunk": False}),
    ("0.5.23", {}, {"enable_mixed_chunk": True, "speculative_algorithm": "EAGLE"}, "mixed_chunk_with_speculation",
     {"speculative_algorithm": None}),
    ("0.5.23", {}, {"chunked_prefill_size": 1000, "page_size": 64}, "chunk_not_multiple_of_page",
     {"chunked_prefill_size": 1024}),
    ("0.5.9", MLA, {"chunked_prefill_size": 2000, "attention_backend": "flashmla"}, "chunk_not_multiple_of_page",
     {"chunked_prefill_size": 2048}),
    ("0.5.9", {}, {"chunked_prefill_size": 256, "page_size": 64, "dp_size": 8, "enable_dp_attention": True},
     "chunk_not_multiple_of_page", {"chunked_prefill_size": 512}),
    ("0.5.23", {}, {"enable_priority_scheduling": True, "schedule_policy": "lpm"}, "priority_needs_fcfs_or_lof",
     {"schedule_policy": "fcfs"}),
    ("0.5.23", {}, {"served_model_name": "kimi:k2"}, "served_model_name_with_colon", {"served_model_name": "kimi-k2"}),
    ("0.5.23", {}, {"disable_cuda_graph_padding": True, "enable_torch_compile": True},
     "padding_off_with_torch_compile", {"enable_torch_compile": False}),
    ("0.5.23", {}, {"enable_pdmux": True, "disable_overlap_schedule": True}, "pdmux_needs",
     {"chunked_prefill_size": -1, "moe_a2a_backend": "none"}),
    ("0.5.18", {}, {"moe_runner_backend": "flashinfer_cutlass"}, "moe_runner_not_for_quantization",
     {"moe_runner_backend": "auto"}),
    ("0.5.18", BF16, {"moe_runner_backend": "flashinfer_cutlass", "tp_size": 8, "ep_size": 4},
     "moe_runner_not_for_quantization", {"ep_size": 8}),
    ("0.5.12", {}, {"moe_runner_backend": "cutlass", "tp_size": 8, "ep_size": 2}, "fp8_cutlass_needs_ep_1",
     {"ep_size": 1, "moe_a2a_backend": "none"}),
    ("0.5.9", {}, {"moe_a2a_backend": "none", "enable_two_batch_overlap": True}, "two_batch_overlap_needs_a2a",
     {"moe_a2a_backend": "deepep"}),
    ("0.5.23", {}, {"enable_waterfill": True, "moe_a2a_backend": "none"}, "waterfill_needs_deepep",
     {"moe_a2a_backend": "deepep"}),
    ("0.5.23", {}, {"ep_dispatch_algorithm": "static", "moe_a2a_backend": "none"}, "eplb_dispatch_needs_a2a",
     {"ep_dispatch_algorithm": "dynamic"}),
    ("0.5.12", {}, {"tp_size": 8, "ep_size": 8, "ep_num_redundant_experts": 8, "init_expert_location": "/x.json",
                    "moe_a2a_backend": "none"}, "eplb_redundant_without_a2a_corrupts_output",
     {"init_expert_location": "trivial"}),
    ("0.5.9", PLAIN, {"attention_backend": "flashmla"}, "attention_backend_not_for_model",
     {"attention_backend": "fa3"}),
    ("0.5.23", {}, {"quantization": "awq"}, "quantization_contradicts_model", {"quantization": "fp8"}),
    ("0.5.9", BF16, {"quantization": "mxfp8"}, "quantization_not_supported_on_arch", {"quantization": "fp8"}),
    ("0.5.9", NVFP4, {}, "quantization_not_supported_on_arch", {"quantization": None}),
    ("0.5.18", BF16, {"quantization": "nvfp4_online"}, "quantization_not_supported_on_arch", {"quantization": "fp8"}),
    ("0.5.18", {}, {"kv_cache_dtype": "nvfp4"}, "flag_not_supported_on_arch", {"kv_cache_dtype": "fp8_e4m3"}),
    ("0.5.18", {}, {"kv_cache_dtype": "mxfp8"}, "flag_not_supported_on_arch", {"kv_cache_dtype": "fp8_e5m2"}),
    ("0.5.18", {}, {"fp8_gemm_backend": "flashinfer_cutlass"}, "flag_not_supported_on_arch",
     {"fp8_gemm_backend": "flashinfer_deepgemm"}),
    ("0.5.18", {}, {"fp8_gemm_backend": "cutlass"}, "flag_not_supported_on_arch", {"fp8_gemm_backend": "triton"}),
    ("0.5.18", PLAIN, {"attention_backend": "trtllm_mha"}, "flag_not_supported_on_arch",
     {"attention_backend": None, "decode_attention_backend": "trtllm_mha"}),
    ("0.5.9", PLAIN, {"decode_attention_backend": "trtllm_mha"}, "flag_not_supported_on_arch",
     {"decode_attention_backend": "fa3"}),
    ("0.5.23", {}, {"mem_fraction_static": 1.5}, "flag_out_of_range", {"mem_fraction_static": "0.9"}),
    ("0.5.23", {}, {"mem_fraction_static": 0}, "flag_out_of_range", {"mem_fraction_static": 0.5}),
    ("0.5.23", {}, {"max_running_requests": "-1"}, "flag_out_of_range", {"max_running_requests": "1"}),
    ("0.5.23", {}, {"ep_num_redundant_experts": -8}, "flag_out_of_range", {"ep_num_redundant_experts": 0}),
    ("0.5.23", {}, {"nnodes": 0}, "flag_out_of_range", {"nnodes": 1}),
    ("0.5.23", {}, {"tp_size": True}, "flag_type", {"tp_size": "8"}),
    ("0.5.23", {}, {"tp_size": 8, "tensor-parallel-size": 4}, "flag_given_twice", {"tensor-parallel-size": 8}),
    ("0.5.6", {}, {"tp_size": 8, "--tensor-parallel-size": 4}, "flag_given_twice", {"--tensor-parallel-size": "8"}),
    ("0.5.23", {}, {"disable_radix_cache": "maybe"}, "flag_type", {"disable_radix_cache": "False"}),
    ("0.5.23", {}, {"json_model_override_args": "{'a': 1}"}, "flag_type", {"json_model_override_args": {"a": 1}}),
    ("0.5.23", {}, {"max_running_requests": [1, 2]}, "flag_type", {"max_running_requests": [256]}),
    ("0.5.23", {}, {"chat_template": "a\nb"}, "flag_type", {"chat_template": "/opt/my templates/a b.jinja"}),
    ("0.5.23", {}, {"disaggregation_decode_tp": 8}, "flag_removed", {"disaggregation_decode_tp": None}),
    ("0.5.23", {}, {"--tp-size=8": True}, "invalid_flag", {"--tp-size=8": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "model", "flags", "code", "control"),
    FAULTS,
    ids=[f"{row[0]}-{row[3]}-{i}" for i, row in enumerate(FAULTS)],
)
def test_a_fault_is_refused_and_its_control_is_not(
    version: str, model: dict[str, Any], flags: dict[str, Any], code: str, control: dict[str, Any]
) -> None:
    row = rejection(make(probe(H200, version, model=model), flags=flags), code)
    assert row["suggestion"] and row["message"]
    fine = {key: value for key, value in {**flags, **control}.items() if key != "--tp-size=8"}
    if model is NVFP4:
        assert code not in codes(make(probe(B300, version, model=model), flags=fine)["rejections"])
        return
    assert code not in codes(make(probe(H200, version, model=model), flags=fine)["rejections"])


def test_every_constraint_is_a_rejection_of_some_test() -> None:
    tested = {row[3] for row in FAULTS} | {
        "attention_dp_needs_dp", "fake_transfer_for_prefill", "moe_runner_not_for_a2a", "deepep_v2_does_not_take",
        "elastic_ep_needs_elastic_eplb", "kv_cache_dtype_not_for_backend",
    }  # fmt: skip
    assert {row.code for row in _plan_constraints.CONSTRAINTS} <= tested


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0.dev1", "main-20261120"])
def test_a_version_that_nobody_read_is_warned_of_and_not_refused(version: str) -> None:
    host = probe(H200, "0.5.23")
    host["sglang"]["version"] = host["server_args"]["sglang_version"] = version
    plan = make(host, flags={"chunked_prefill_size": 1000, "page_size": 64})
    assert plan["rejections"] == []
    told = next(row for row in plan["warnings"] if row["code"] == "chunk_not_multiple_of_page")
    assert f"whether in {version} is not known" in told["message"]


def test_what_a_version_does_not_check_is_not_refused() -> None:
    flags = {"tp_size": 4, "pp_size": 2, "enable_mixed_chunk": True}
    assert "mixed_chunk_with_pp" in codes(make(probe(H200, "0.5.9"), flags=flags)["rejections"])
    assert "mixed_chunk_with_pp" not in codes(make(probe(H200, "0.5.18"), flags=flags)["rejections"])
    assert "served_model_name_with_colon" not in codes(
        make(probe(H200, "0.5.4"), served_model_name="a:b")["rejections"]
    )


@pytest.mark.parametrize(
    ("flags", "variables", "code"),
    [
        ({"disaggregation_transfer_backend": "fake"}, {"role": "prefill"}, "fake_transfer_for_prefill"),
        (
            {"moe_runner_backend": "triton", "moe_a2a_backend": "flashinfer", "attn_dp_size": 8},
            {},
            "moe_runner_not_for_a2a",
        ),
        ({"moe_a2a_backend": "deepep_v2", "enable_two_batch_overlap": True}, {}, "deepep_v2_does_not_take"),
        (
            {"eplb_algorithm": "deepseek", "enable_eplb": True},
            {"elastic_ep_backend": "mooncake"},
            "elastic_ep_needs_elastic_eplb",
        ),
        ({"attention_backend": "trtllm_mla", "kv_cache_dtype": "fp8_e5m2"}, {}, "kv_cache_dtype_not_for_backend"),
    ],
)  # fmt: skip
def test_choices_that_do_not_go_together(flags: dict[str, Any], variables: dict[str, Any], code: str) -> None:
    assert code in codes(make(probe(B300, "0.5.23"), flags=flags, **variables)["rejections"])


# The words of each version


@pytest.mark.parametrize("version", ["0.4.9", *sorted(dumps())])
def test_sizes_are_sizes_under_every_name_in_every_version(version: str) -> None:
    for flags in ({"tp_size": 4}, {"tensor-parallel-size": "4"}, {"--tp-size": 4}, ["--tp-size", "4"], "--tp-size=4"):
        plan = make(probe(H200, version), flags=flags, moe_a2a_backend="none")
        assert plan["effective"]["tp_size"] == 4, flags
        assert plan["argv"].count("--tp-size") == 1 and "--tensor-parallel-size" not in plan["argv"]
        assert plan["rejections"] == []


def test_sglang_0_4_9_has_its_own_words_for_expert_parallelism() -> None:
    plan = make(probe(H200, "0.4.9"), flags={"tp_size": 8, "enable_deepep_moe": True})
    assert plan["rejections"] == []
    assert plan["effective"]["moe_a2a_backend"] == "deepep" and plan["effective"]["ep_size"] == 8
    assert plan["argv"].count("--enable-deepep-moe") == 1 and "--moe-a2a-backend" not in plan["argv"]
    named = make(probe(H200, "0.4.9"), moe_a2a_backend="deepep")
    assert "--enable-deepep-moe" in named["argv"] and "--moe-a2a-backend" not in named["argv"]
    spread = make(probe(H200, "0.4.9"), parallelism="ep8", moe_a2a_backend="none")
    assert "--enable-ep-moe" in spread["argv"] and "--moe-a2a-backend" not in spread["argv"]
    other = make(probe(H200, "0.4.9"), moe_a2a_backend="mooncake")
    assert other["effective"]["moe_a2a_backend"] == "none"
    assert "has no --moe-a2a-backend" in decision(other, "moe_a2a_backend")["because"]


def test_enable_ep_moe_becomes_an_ep_size() -> None:
    plan = make(probe(H200, "0.5.4"), flags={"enable_ep_moe": True, "tp_size": 8}, moe_a2a_backend="none")
    assert after(plan["argv"], "--ep-size")[:2] == ["--ep-size", "8"]
    assert "--enable-ep-moe" not in plan["argv"]
    message = next(row["message"] for row in plan["warnings"] if row["code"] == "flag_renamed")
    assert "--ep-size the tp size" in message and "<" not in message


def test_warmup_is_told_its_replacement_where_it_is_gone() -> None:
    host = probe(H200, "0.5.23")
    del host["server_args"]["flags"]["warmups"]
    row = rejection(make(host, flags={"warmup": True}), "flag_removed")
    assert row["suggestion"] == "warmup_mode: request, or warmup_mode: off"


def test_dp_attention_of_a_model_with_latent_attention() -> None:
    old = make(probe(H200, "0.5.9", model=MLA), flags={"dp_size": 8, "enable_dp_attention": True})
    assert old["rejections"] == [] and old["effective"]["attn_dp_size"] == 8
    row = rejection(make(probe(H200, "0.5.9"), flags={"tp_size": 8, "dp_size": 8}), "not_enough_gpus")
    assert "attention data parallelism" in row["suggestion"]
    uneven = make(probe(H200, "0.5.9"), flags={"tp_size": 8, "dp_size": 3, "enable_dp_attention": True})
    assert rejection(uneven, "dp_not_dividing_tp")["numbers"] == {"tp_size": 8, "attn_dp_size": 3}


# The GPUs


def _mixed(host: dict[str, Any]) -> None:
    capability(host, "8.9", 6, 7)


def _unequal(host: dict[str, Any]) -> None:
    host["gpus"]["devices"][3]["memory_mib"] //= 2


def _lost_without_index(host: dict[str, Any]) -> None:
    host["gpus"]["devices"].append({"index": None, "uuid": None, "name": None, "lost": True, "pci": "0000:9d:00.0"})


def _mig(host: dict[str, Any]) -> None:
    host["gpus"]["devices"][0]["mig"] = True


def _mig_alone(host: dict[str, Any]) -> None:
    host["gpus"]["devices"] = host["gpus"]["devices"][:1]
    host["gpus"]["devices"][0].update(mig=True, mig_devices=[])


def _busy(host: dict[str, Any]) -> None:
    host["service"] = {"pids": [100], "main_pid": 100}
    host["gpus"]["devices"][1]["processes"] = [
        {"pid": 4711, "name": "python", "memory_mib": 120000, "user": "ml"},
        {"pid": 100, "name": "sglang", "memory_mib": 9, "user": "sglang"},
    ]


def _fabric_stopped(host: dict[str, Any]) -> None:
    host["fabric"]["fabric_manager"] = {"needed": True, "active": False, "state": "inactive", "ok": False}


def _fabric_version(host: dict[str, Any]) -> None:
    host["gpus"]["driver"] = "570.86.15"
    host["fabric"]["fabric_manager"] = {
        "needed": True,
        "active": True,
        "state": "active",
        "version": "570.86.16",
        "version_matches": False,
        "ok": False,
    }


def _large(host: dict[str, Any]) -> None:
    host["model"].update(weights="complete", bytes=2000 * 1024**3)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_mixed, "gpus_of_different_archs", ("sm_90 (GPU 0, 1, 2, 3, 4, 5)", "sm_89 (GPU 6, 7)")),
        (_unequal, "gpus_of_unequal_memory", ("MiB",)),
        (_lost_without_index, "gpu_lost", ("0000:9d:00.0",)),
        (_mig, "gpu_in_mig_mode", ("GPU 0",)),
        (_mig_alone, "mig_without_slices", ("no slices",)),
        (_busy, "gpu_busy", ("pid 4711 python of ml, 120000 MiB",)),
        (_fabric_stopped, "fabricmanager_not_running_or_version_mismatch", ("inactive", "802")),
        (_fabric_version, "fabricmanager_not_running_or_version_mismatch", ("570.86.16", "570.86.15")),
        (_large, "model_larger_than_gpu_memory", ("2000 GiB",)),
    ],
)
def test_gpus_that_cannot_carry_the_plan(
    change: Callable[[dict[str, Any]], None], code: str, words: tuple[str, ...]
) -> None:
    host = probe(H200)
    assert code not in codes(make(host)["rejections"])
    change(host)
    row = rejection(make(host), code)
    assert row["suggestion"]
    for word in words:
        assert word in row["message"]


def test_gpus_left_out_do_not_count() -> None:
    host = probe(H200)
    _mixed(host)
    _unequal(host)
    plan = make(host, gpus=[0, 1, 4, 5])
    assert plan["rejections"] == [] and plan["effective"]["tp_size"] == 4


def test_processes_of_our_own_services_and_small_ones_do_not_refuse_a_plan() -> None:
    host = probe(H200)
    _busy(host)
    host["service"] = {"pids": [100, 4711], "main_pid": 100}
    assert "gpu_busy" not in codes(make(host)["warnings"]) + codes(make(host)["rejections"])
    host["service"] = {"pids": [], "main_pid": None}
    host["gpus"]["devices"][1]["processes"] = [{"pid": 7, "name": "dcgm", "memory_mib": 500, "user": "root"}]
    plan = make(host)
    assert plan["rejections"] == []
    assert "pid 7 dcgm of root" in next(row["message"] for row in plan["warnings"] if row["code"] == "gpu_busy")


def test_the_fabric_manager_is_no_matter_on_a_pcie_host() -> None:
    host = probe(PCIE)
    host["fabric"]["fabric_manager"] = {"needed": False, "active": None, "ok": None}
    assert make(host)["rejections"] == []


def test_quantising_while_loading_makes_a_model_smaller() -> None:
    host = probe(H200, model={**BF16, "weights": "complete", "bytes": 1500 * 1024**3})
    assert "model_larger_than_gpu_memory" in codes(make(host)["rejections"])
    assert "model_larger_than_gpu_memory" not in codes(make(host, flags={"quantization": "fp8"})["rejections"])


def test_tp_over_pairs_is_told() -> None:
    host = probe(H200, fabric={"class": "nvlink_pairs", "nvlink_groups": [[0, 1], [2, 3], [4, 5], [6, 7]]})
    assert "tp 8 crosses pairs, tp2pp4 would not" in decision(make(host), "fabric")["because"]
    assert "crosses" not in decision(make(host, parallelism="tp2pp4"), "fabric")["because"]


# Low latency between hosts

TWO: dict[str, Any] = {
    "hosts": ["gpu-01", "gpu-02"],
    "rendezvous": {"address": "10.0.0.1"},
    "moe_a2a_backend": "deepep",
}


@pytest.mark.parametrize(
    ("params", "rdma", "mode", "taken"),
    [
        ({"EnableStreamMemOPs": 1, "RegistryDwords": "PeerMappingOverride=1;"}, {}, None, "deepep"),
        ({"EnableStreamMemOPs": 0, "RegistryDwords": ""}, {}, None, "none"),
        ({"EnableStreamMemOPs": 1, "RegistryDwords": ""}, {}, "low_latency", "none"),
        ({"EnableStreamMemOPs": 0, "RegistryDwords": ""}, {"gdrdrv": True}, "low_latency", "deepep"),
        ({"EnableStreamMemOPs": 0, "RegistryDwords": ""}, {}, "normal", "deepep"),
    ],
)
def test_ibgda_needs_driver_options_or_gdrcopy(
    params: dict[str, Any], rdma: dict[str, Any], mode: Optional[str], taken: str
) -> None:
    host = probe(B300)
    host["fabric"]["driver_params"] = params
    host["fabric"]["rdma"].update(rdma)
    plan = make(host, flags={"deepep_mode": mode}, **TWO)
    assert plan["effective"]["moe_a2a_backend"] == taken
    if taken == "none":
        assert "NVreg_RegistryDwords" in decision(plan, "moe_a2a_backend")["because"]
    one = make(host, moe_a2a_backend="deepep", flags={"deepep_mode": mode})
    assert one["effective"]["moe_a2a_backend"] == "deepep"


@pytest.mark.parametrize(
    ("seen", "given", "code", "where"),
    [
        ({}, "/usr/local/cuda:/opt/cuda", "cuda_home_is_a_path_list", "rejections"),
        ({}, "cuda-13", "cuda_home_relative", "rejections"),
        (
            {"value": "/opt/cuda", "problem": "cuda_home_absent", "message": "there is no such folder."},
            "/opt/cuda",
            "cuda_home_absent",
            "rejections",
        ),
        (
            {"value": "/opt/cuda", "problem": "cuda_home_without_nvcc", "message": "it has no bin/nvcc."},
            "/opt/cuda",
            "cuda_home_without_nvcc",
            "warnings",
        ),
        ({"value": "/opt/cuda", "problem": None}, "/opt/cuda", None, "rejections"),
    ],
)
def test_cuda_home_as_the_probe_saw_it(seen: dict[str, Any], given: str, code: Optional[str], where: str) -> None:
    host = probe(H200)
    host["toolkits"]["cuda_home"] = seen
    plan = make(host, env_vars={"CUDA_HOME": given})
    found = [name for name in codes(plan[where]) if name.startswith("cuda_home")]
    assert found == ([code] if code else [])
    assert plan["env"]["CUDA_HOME"] == given


def test_rules_of_archs_and_capabilities_do_not_overlap_for_one_version() -> None:
    for version in ("0.4.9", *dumps()):
        methods = [row.method for row in _rules.MIN_CAPABILITY if _rules._versions.within(version, row.sglang)]
        assert len(methods) == len(set(methods)), version


def test_a_role_and_a_mode_that_disagree() -> None:
    plan = make(probe(B300), role="decode", flags={"disaggregation_mode": "prefill"})
    assert "sglang_role is decode" in rejection(plan, "contradiction")["message"]
    assert make(probe(B300), role="decode", flags={"disaggregation_mode": "decode"})["rejections"] == []


def test_one_fault_is_told_once() -> None:
    plan = make(probe(B300), role="prefill", kv_transfer_backend="rdma")
    assert codes(plan["rejections"]) == ["backend_not_in_this_sglang"]
    hidden = make(probe(B300), env_vars={"CUDA_VISIBLE_DEVICES": "GPU-0"})
    assert codes(hidden["rejections"]) == ["no_gpu_visible"]


def test_what_is_to_be_minded_about_a_backend_is_silent_where_it_is_not_taken() -> None:
    host = probe(B300)
    host["fabric"]["driver_params"], host["fabric"]["rdma"]["nvidia_peermem"] = {}, False
    told = {"ibgda_unknown", "nvidia_peermem_absent"}
    assert told <= set(codes(make(host, **TWO)["warnings"]))
    listed = make(host, flags={"moe_runner_backend": "auto"}, **{**TWO, "moe_a2a_backend": ["nixl", "none"]})
    assert not told & set(codes(listed["warnings"]))
    auto = make(host, **{**TWO, "moe_a2a_backend": "auto"})
    assert auto["effective"]["moe_a2a_backend"] == "none" and not told & set(codes(auto["warnings"]))


@pytest.mark.parametrize(("count", "sizes"), [(1, (8, 1)), (2, (16, 1)), (3, (8, 3)), (4, (32, 1))])
def test_auto_over_hosts_never_makes_sizes_that_it_then_refuses(count: int, sizes: tuple[int, int]) -> None:
    hosts = [f"gpu-{number:02}" for number in range(1, count + 1)]
    plan = make(probe(B300), hosts=hosts, rendezvous={"address": "10.0.0.1"})
    assert plan["rejections"] == []
    assert (plan["effective"]["tp_size"], plan["effective"]["pp_size"]) == sizes


@pytest.mark.parametrize(("device", "suggestion"), [("CPU", "cpu"), ("cuda:0", "cuda"), ("gpu", "cuda")])
def test_the_words_for_devices(device: str, suggestion: str) -> None:
    row = rejection(make(probe(H200), flags={"device": device}), "flag_choice")
    assert row["suggestion"].startswith(suggestion)
    assert make(probe(H200), flags={"device": "cuda"})["rejections"] == []


def test_latent_attention_has_no_key_value_heads_to_split() -> None:
    uneven = {"kv_heads": 3}
    assert "kv_heads_not_divisible" in codes(
        make(probe(H200, model={**uneven, **PLAIN}), parallelism="tp8")["rejections"]
    )
    assert make(probe(H200, model={**uneven, **MLA}), parallelism="tp8")["rejections"] == []


def test_dense_layers_on_every_rank_do_not_bound_tp() -> None:
    host = probe(H200, model={"intermediate_size": 18433})
    assert make(host)["effective"]["tp_size"] == 1
    assert make(host, flags={"moe_dense_tp_size": 1})["effective"]["tp_size"] == 8


def test_unequal_memory_warns_where_sglang_does_not_check() -> None:
    host = probe(H200)
    _unequal(host)
    off = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
    plan = make(host, env_vars=off)
    assert plan["rejections"] == [] and "gpus_of_unequal_memory" in codes(plan["warnings"])


@pytest.mark.parametrize("key", ["tp_size", "pp_size", "ep_size", "nnodes", "attn_cp_size", "moe_dp_size"])
def test_a_monstrous_size_is_refused_and_costs_nothing(key: str) -> None:
    assert "flag_out_of_range" in codes(make(probe(H200), flags={key: 10**30})["rejections"])
