# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans of recorded hosts: what is decided and why, and what is refused with which numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _launch_plan, _plan_draft, _plan_text
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan_support import after, broken, codes, decision, make, probe, rejection

PCIE, B300, H200 = "pcie-rtxpro6000", "nvlink-b300", "nvlink-h200-no-rdma"
LL = {"deepep_mode": "low_latency"}


def test_the_story_of_the_readme() -> None:
    plan = make(
        probe(PCIE),
        parallelism="ep8",
        moe_a2a_backend="deepep",
        flags={"num_continuous_decode_steps": 8, "max-running-requests": 256},
    )
    assert plan["rejections"] == []
    assert plan["argv"] == [
        "/opt/sglang/venv/bin/python",
        "-m",
        "sglang.launch_server",
        *("--model-path", "/models/Kimi-K2.6"),
        *("--tp-size", "8", "--ep-size", "8"),
        *("--moe-a2a-backend", "none"),
        *("--host", "127.0.0.1", "--port", "30000"),
        *("--num-continuous-decode-steps", "8", "--max-running-requests", "256"),
    ]
    told = decision(plan, "moe_a2a_backend")
    assert told["answer"] == "none"
    assert "deep_ep is absent" in told["because"]
    assert "install sgl-deep-ep 0.1.2.post1" in told["because"]
    assert "mooncake is absent too" in told["because"] and "nixl is absent too" in told["because"]
    assert told["evidence"]["backends"] == {"deep_ep": "absent", "mooncake": "absent", "nixl": "absent"}
    assert plan["effective"]["ep_size"] == 8
    assert plan["remedies"] == []
    assert "backend_fallback" in codes(plan["warnings"])


@pytest.mark.parametrize(
    ("named", "sizes"),
    [
        ("auto", (8, 1, 1, 1)),
        ("tp8", (8, 1, 1, 1)),
        ("pp8", (1, 8, 1, 1)),
        ("ep8", (8, 1, 8, 1)),
        ("ep4", (8, 1, 4, 1)),
        ("tp4", (4, 1, 1, 1)),
        ("tp4pp2", (4, 2, 1, 1)),
        ("dp2tp4", (4, 1, 1, 2)),
        ("pp2ep4", (4, 2, 4, 1)),
        ({"tp_size": 8, "ep_size": 2}, (8, 1, 2, 1)),
    ],
)
def test_named_parallelism(named: Any, sizes: tuple[int, ...]) -> None:
    plan = make(probe(PCIE), parallelism=named)
    assert plan["rejections"] == []
    assert tuple(plan["effective"][f"{name}_size"] for name in ("tp", "pp", "ep", "dp")) == sizes
    for name, size in zip(("tp", "pp", "ep", "dp"), sizes):
        flag = f"--{name}-size"
        assert (flag not in plan["argv"] and size == 1) or plan["argv"][plan["argv"].index(flag) + 1] == str(size)


@pytest.mark.parametrize(
    ("variables", "code", "numbers"),
    [
        ({"parallelism": "ep8", "gpus": [0, 1, 2, 3]}, "parallelism_does_not_fit", {"ep_size": 8, "gpus": 4}),
        ({"parallelism": "ep3"}, "parallelism_does_not_fit", {"ep_size": 3, "gpus": 8}),
        ({"parallelism": "tp16"}, "not_enough_gpus", {"needed": 16, "gpus": 8, "nnodes": 1}),
        ({"parallelism": "tp4pp4"}, "not_enough_gpus", {"needed": 16, "gpus": 8, "nnodes": 1}),
        ({"parallelism": {"tp_size": 8, "ep_size": 3}}, "ep_not_dividing_tp", {"ep_size": 3, "tp_size": 8}),
        ({"parallelism": "tp3"}, "heads_not_divisible", {"heads": 64, "attention_tp": 3, "remainder": 1}),
        ({"parallelism": "tp8", "flags": {"tp_size": 4}}, "contradiction", {"parallelism": 8, "flags": 4}),
        ({"flags": {"tp_size": 0}}, "size_below_one", {}),
        ({"port": 31000, "flags": {"port": 31001}}, "contradiction", {}),
        ({"gpus": [7, 8]}, "gpu_index_unknown", {"gpus": 8}),
    ],
)
def test_contradictions_have_numbers_and_a_suggestion(variables: dict[str, Any], code: str, numbers: Any) -> None:
    row = rejection(make(probe(PCIE), **variables), code)
    assert row["numbers"] == numbers
    assert row["suggestion"]
    assert row["host"] == "gpu-01"


def test_everything_wrong_is_told_at_once() -> None:
    plan = make(
        probe(PCIE, model={"weights": "missing"}),
        parallelism={"tp_size": 3, "ep_size": 2},
        port=70000,
        prot=1,
        flags={"nonsense": 1, "attention_backend": "trtllm_mla", "stream_interval": "often", "load_format": "dumy"},
    )
    assert set(codes(plan["rejections"])) >= {
        "model_weights_missing",
        "port_out_of_range",
        "unknown_variable",
        "unknown_flag",
        "flag_not_supported_on_arch",
        "flag_type",
        "flag_choice",
        "heads_not_divisible",
        "ep_not_dividing_tp",
    }


@pytest.mark.parametrize(
    ("model", "parallelism", "code"),
    [
        ({"heads": 64, "kv_heads": 3}, "tp8", "kv_heads_not_divisible"),
        ({"heads": 64, "kv_heads": 4}, "tp8", None),
        ({"layers": 4}, "pp8", "more_stages_than_layers"),
        ({"experts": 60}, "ep8", "experts_not_divisible"),
        ({"experts": 0, "moe_intermediate_size": None}, "ep8", "model_has_no_experts"),
        (
            {"moe_intermediate_size": 1408, "quantization": {"method": "fp8", "block": [128, 128]}},
            "tp8",
            "quant_block_not_divisible",
        ),
        ({"moe_intermediate_size": 1408, "quantization": {"method": "fp8", "block": [128, 128]}}, "ep8", None),
        ({"moe_intermediate_size": 1410}, "tp8", "intermediate_not_divisible"),
        ({"intermediate_size": 18434}, "tp8", "intermediate_not_divisible"),
    ],
)
def test_the_models_arithmetic(model: dict[str, Any], parallelism: str, code: str | None) -> None:
    plan = make(probe(PCIE, model=model), parallelism=parallelism)
    assert codes(plan["rejections"]) == ([code] if code else [])


def test_uneven_stages_are_a_warning() -> None:
    assert "stages_uneven" in codes(make(probe(PCIE), parallelism="pp8")["warnings"])


def test_auto_takes_the_gpus_that_divide_the_model() -> None:
    plan = make(
        probe(PCIE, model={"heads": 12, "kv_heads": 4, "intermediate_size": None, "moe_intermediate_size": None})
    )
    assert plan["effective"]["tp_size"] == 4
    assert "gpus_unused" in codes(plan["warnings"])
    assert plan["rejections"] == []


# Field cases, each with its control.


@pytest.mark.parametrize("capability", ["12.0", "10.0", "10.3"])
def test_c01_sm100_kernels_follow_the_capability_and_not_the_name(capability: str) -> None:
    host = probe(PCIE)
    for gpu in host["gpus"]["devices"]:
        gpu.update(compute_capability=capability, sm="sm_" + capability.replace(".", ""))
    plan = make(
        host, flags={"tp-size": 8, "attention-backend": "trtllm_mla", "moe_runner_backend": "flashinfer_trtllm"}
    )
    if capability == "12.0":
        rows = [row for row in plan["rejections"] if row["code"] == "flag_not_supported_on_arch"]
        assert [row["items"] for row in rows] == [
            ["--attention-backend=trtllm_mla"],
            ["--moe-runner-backend=flashinfer_trtllm"],
        ]
        assert {row["arch"] for row in rows} == {"sm_120"}
    else:
        assert plan["rejections"] == []


def test_c03_an_importable_deep_ep_is_not_a_usable_backend() -> None:
    host = probe("pcie-l40s")
    plan = make(host, flags={"moe_a2a_backend": "deepep", "tp_size": 4})
    assert host["backends"]["deep_ep"]["state"] == "ok"
    row = rejection(plan, "a2a_backend_needs_sm90_or_sm100")
    assert row["suggestion"].startswith("--moe-a2a-backend none")
    assert make(host, flags={"moe_a2a_backend": "none", "tp_size": 4})["rejections"] == []


def test_c04_eplb_reads_the_default_ep_size() -> None:
    flags = {"tp_size": 16, "nnodes": 2, "node_rank": 0, "dist_init_addr": "10.0.0.1:20000", "enable_eplb": True}
    plan = make(probe(H200), flags={**flags, "ep_num_redundant_experts": 16})
    row = rejection(plan, "eplb_ep_size_not_multiple_of_nnodes")
    assert row["numbers"] == {"ep_size": 1, "nnodes": 2}
    assert row["suggestion"] == "--ep-size 16"
    assert make(probe(H200), flags={**flags, "ep_num_redundant_experts": 16, "ep_size": 16})["rejections"] == []


@pytest.mark.parametrize(
    ("version", "redundant", "a2a", "rejected", "warned"),
    [
        ("0.5.12", 48, "none", True, False),
        ("0.5.15.post1", 48, "none", True, False),
        ("0.5.16", 48, "none", False, True),
        ("0.5.18", 48, "none", False, False),
        ("0.5.23", 48, "none", False, False),
        ("0.5.12", 0, "none", False, False),
        ("0.5.12", 48, "deepep", False, False),
    ],
)
def test_c05_redundant_experts_without_a2a_corrupt_output(
    version: str, redundant: int, a2a: str, rejected: bool, warned: bool
) -> None:
    flags = {
        "tp_size": 2,
        "ep_size": 2,
        "enable_eplb": True,
        "ep_num_redundant_experts": redundant,
        "moe_a2a_backend": a2a,
    }
    host = probe(H200, version if version != "0.5.16" else "0.5.18")
    host["sglang"]["version"] = version
    plan = make(host, flags=flags)
    assert ("eplb_redundant_without_a2a_corrupts_output" in codes(plan["rejections"])) is rejected
    assert ("eplb_redundant_without_a2a_unknown" in codes(plan["warnings"])) is warned
    assert len(plan["rejections"]) == rejected


def test_c05_an_unknown_version_is_a_warning_and_not_silence() -> None:
    host = probe(H200, "0.5.12", sglang={"version": "main-20260901"})
    host["server_args"]["sglang_version"] = None
    flags = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 48, "moe_a2a_backend": "none"}
    assert "eplb_redundant_without_a2a_unknown" in codes(make(host, flags=flags)["warnings"])


@pytest.mark.parametrize(("redundant", "rejected"), [(4, True), (8, False)])
def test_c07_the_effective_ep_counts(redundant: int, rejected: bool) -> None:
    flags = {"tp_size": 8, "ep_size": 4, "moe_a2a_backend": "deepep", "enable_eplb": True}
    plan = make(probe(H200), flags={**flags, "ep_num_redundant_experts": redundant})
    assert plan["effective"]["ep_size"] == 8
    assert any("ep_size_overridden(4->8)" in row["message"] for row in plan["warnings"])
    if rejected:
        row = rejection(plan, "experts_plus_redundant_not_divisible_by_effective_ep")
        assert row["numbers"] == {"experts": 256, "redundant": 4, "ep_size": 8, "remainder": 4}
        assert "(256+4) % 8 = 4" in row["message"]
        assert row["suggestion"] == "--ep-num-redundant-experts 8"
    else:
        assert plan["rejections"] == []


@pytest.mark.parametrize(("dense", "rejected"), [(8, True), (1, False), (None, False)])
def test_c08_moe_dense_tp_size(dense: int | None, rejected: bool) -> None:
    plan = make(probe(H200), flags={"tp_size": 1, "moe_dense_tp_size": dense})
    assert ("moe_dense_tp_size_must_be_1_or_unset" in codes(plan["rejections"])) is rejected


@pytest.mark.parametrize(
    ("name", "variables", "value"),
    [
        (H200, {}, "none"),
        (B300, {}, None),
        (B300, {"hosts": ["gpu-01", "gpu-02"], "rendezvous": {"address": "10.0.0.1"}}, None),
    ],
)
def test_c09_remote_transport_of_one_node_without_rdma(name: str, variables: dict[str, Any], value: str | None) -> None:
    plan = make(probe(name), moe_a2a_backend="deepep", **variables)
    assert plan["rejections"] == []
    assert plan["env"].get("NVSHMEM_REMOTE_TRANSPORT") == value


def test_c09_never_none_on_many_nodes() -> None:
    plan = make(
        probe(B300),
        moe_a2a_backend="deepep",
        hosts=["gpu-01", "gpu-02"],
        rendezvous={"address": "10.0.0.1"},
        env_vars={"NVSHMEM_REMOTE_TRANSPORT": "none"},
    )
    assert codes(plan["rejections"]) == ["remote_transport_none_on_many_nodes"]


@pytest.mark.parametrize("how", ["gpus", "env"])
def test_c12_one_gpu_outside_of_nvlink(how: str) -> None:
    flags = {"tp_size": 8, "moe_a2a_backend": "deepep"}
    row = rejection(make(probe("b200-gpu2-lost-nvlink"), flags=flags), "nvlink_degraded")
    assert "GPU 2" in row["message"]
    others = [0, 1, 3, 4, 5, 6, 7]
    control = {"gpus": others} if how == "gpus" else {"env_vars": {"CUDA_VISIBLE_DEVICES": "0,1,3,4,5,6,7"}}
    host = probe(
        "b200-gpu2-lost-nvlink",
        model={
            "heads": 7,
            "kv_heads": 7,
            "experts": 70,
            "intermediate_size": 7 * 128,
            "moe_intermediate_size": 7 * 128,
        },
    )
    plan = make(host, flags={"tp_size": 7, "moe_a2a_backend": "deepep"}, **control)
    assert plan["rejections"] == []
    assert decision(plan, "parallelism")["evidence"]["fabric"] == "nvlink_full"


def test_c13_topology_and_not_the_name_decides() -> None:
    plan = make(probe("pcie-l20"), flags={"moe_a2a_backend": "deepep"})
    row = rejection(plan, "nvlink_required_within_node")
    assert "PCIe only" in row["message"]


def test_c93_old_flags_are_translated_by_version() -> None:
    flags = {"tp_size": 8, "enable_deepep_moe": True}
    plan = make(probe(H200), flags=flags)
    assert plan["effective"]["moe_a2a_backend"] == "deepep"
    assert "--enable-deepep-moe" not in plan["argv"]
    assert "flag_renamed" in codes(plan["warnings"])
    both = make(probe(H200), flags={**flags, "moe_a2a_backend": "deepep"})
    assert both["argv"] == plan["argv"]
    old = probe(H200)
    old["sglang"]["version"] = "0.4.9"
    old["server_args"] = {"state": "unknown", "sglang_version": "0.4.9", "flags": {}, "env_vars": []}
    assert "--enable-deepep-moe" in make(old, flags=flags)["argv"]


def test_c94_yaml_types_and_underscores() -> None:
    flags = {
        "reasoning_parser": "kimi_k2",
        "trust_remote_code": True,
        "disable_radix_cache": False,
        "context_length": None,
    }
    argv = make(probe(PCIE), flags=flags)["argv"]
    assert after(argv, "--reasoning-parser") == ["--reasoning-parser", "kimi_k2", "--trust-remote-code"]


def test_c99_a_flag_of_a_newer_sglang_is_refused_before_anything_is_written() -> None:
    plan = make(probe(PCIE, "0.5.6"), flags={"max_running_requests": 8, "kv_canary": "none"})
    row = rejection(plan, "unknown_flag")
    assert row["flag"] == "--kv-canary"
    assert "0.5.6" in row["message"]
    assert make(probe(PCIE, "0.5.23"), flags={"max_running_requests": 8, "kv_canary": "none"})["rejections"] == []


# Backends


def test_deepep_is_auto_where_everything_speaks_for_it() -> None:
    plan = make(probe(H200))
    assert plan["effective"]["moe_a2a_backend"] == "deepep"
    assert plan["effective"]["ep_size"] == 8
    assert plan["argv"][plan["argv"].index("--ep-size") + 1] == "8"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"experts": 0}}, "model_has_no_experts"),
        ({"model": {"quantization": {"method": "compressed-tensors"}}}, "experts_format_unverified"),
        ({"fabric": {"class": "pcie_only"}}, "nvlink_required_within_node"),
        ({"fabric": {"class": "unknown"}}, "fabric_unknown"),
        ({"toolkits": {"toolkits": [], "best": None}}, "jit_needs_nvcc"),
        (
            {"backends": {"deep_ep": broken("deep_ep", "a2a", "broken", "torch_abi_mismatch", "rebuild")}},
            "backend_broken",
        ),
        (
            {"backends": {"deep_ep": broken("deep_ep", "a2a", "needs_gpu", "no_visible_gpu", "driver")}},
            "backend_needs_gpu",
        ),
    ],
)
def test_auto_does_without_and_says_why(changes: dict[str, Any], reason: str) -> None:
    plan = make(probe(H200, **changes))
    assert plan["effective"]["moe_a2a_backend"] == "none"
    candidate = decision(plan, "moe_a2a_backend")["evidence"]["candidates"]["deepep"]
    assert reason in [row["code"] for row in candidate["reasons"]]
    assert plan["rejections"] == []


def test_a_named_choice_of_expert_groups_is_not_overridden_by_auto() -> None:
    plan = make(probe(H200), parallelism="ep4")
    assert plan["effective"]["moe_a2a_backend"] == "none"
    assert plan["effective"]["ep_size"] == 4


ABSENT = {"deep_ep": json.loads(json.dumps(probe(PCIE)["backends"]["deep_ep"]))}


@pytest.mark.parametrize(
    ("policy", "answer", "kind", "rejected"),
    [
        ("fallback", "none", None, []),
        ("install", "deepep", "install", []),
        ("build", "deepep", "rebuild", []),
        ("fail", "deepep", None, ["backend_missing"]),
    ],
)
def test_on_missing_backend(policy: str, answer: str, kind: str | None, rejected: list[str]) -> None:
    plan = make(probe(H200, backends=ABSENT), moe_a2a_backend="deepep", on_missing_backend=policy)
    assert plan["effective"]["moe_a2a_backend"] == answer
    assert codes(plan["rejections"]) == rejected
    assert [row["kind"] for row in plan["remedies"]] == ([kind] if kind else [])
    assert plan["assumes"] == ([{"backend": "deep_ep", "use": "a2a", "state": "ok", "after": kind}] if kind else [])
    assert all(row["required"] for row in plan["remedies"])


def test_preferences_are_tried_in_order() -> None:
    backends = {**ABSENT, "mooncake": broken("mooncake", "a2a", "variant_mismatch", "cuda_major", "replace")}
    plan = make(probe(H200, backends=backends), moe_a2a_backend=["deepep", "mooncake", "nixl", "none"])
    assert plan["effective"]["moe_a2a_backend"] == "nixl"
    because = decision(plan, "moe_a2a_backend")["because"]
    assert "deep_ep is absent. To have it: install" in because
    assert "mooncake is variant_mismatch (cuda_major): mooncake says cuda_major. To have it: mend it" in because
    installed = make(probe(H200, backends=backends), moe_a2a_backend=["mooncake", "nixl"], on_missing_backend="install")
    assert installed["effective"]["moe_a2a_backend"] == "mooncake"
    assert [row["kind"] for row in installed["remedies"]] == ["replace"]
    assert installed["effective"]["deepep_mode"] == "low_latency"


def test_a_backend_that_this_sglang_does_not_have() -> None:
    plan = make(probe(H200, "0.5.6"), flags={"moe_a2a_backend": "nixl"})
    row = rejection(plan, "flag_choice")
    assert "none, deepep, mooncake, ascend_fuseep" in row["message"]


@pytest.mark.parametrize(("version", "works"), [("0.3.14", False), ("0.3.13.post1", True), ("0.3.10.post2", True)])
def test_importing_is_not_working(version: str, works: bool) -> None:
    host = probe(H200, "0.5.15.post1")
    host["backends"]["mooncake"]["distributions"][0]["version"] = version
    plan = make(host, moe_a2a_backend="mooncake")
    assert plan["effective"]["moe_a2a_backend"] == ("mooncake" if works else "none")
    assert ("set_host_ip" in decision(plan, "moe_a2a_backend")["because"]) is not works


def test_a_pair_of_versions_that_nobody_saw_is_said_to_be_unverified() -> None:
    plan = make(probe(H200), moe_a2a_backend="nixl")
    assert plan["effective"]["moe_a2a_backend"] == "nixl"
    assert "backend_version_unverified" in codes(plan["warnings"])


def test_a_broken_backend_that_kills_every_server() -> None:
    bad = {**broken("deep_ep", "a2a", "broken", "aborts", "install"), "fatal_for_service": True}
    host = probe(H200, backends={"deep_ep": bad})
    assert codes(make(host)["rejections"]) == ["broken_backend_kills_server"]
    assert make(host, on_missing_backend="install")["rejections"] == []


# Dispatch capacity


def test_low_latency_gets_a_capacity_and_a_chunk_that_fits_into_it() -> None:
    plan = make(probe(H200), moe_a2a_backend="deepep", flags=LL)
    assert plan["env"]["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == "1024"
    assert plan["env"]["NVSHMEM_QP_DEPTH"] == "4096"
    assert plan["argv"][plan["argv"].index("--chunked-prefill-size") + 1] == "1024"


@pytest.mark.parametrize(
    ("flags", "env", "code"),
    [
        ({"chunked_prefill_size": 8192}, {}, "chunked_prefill_exceeds_dispatch"),
        (
            {"chunked_prefill_size": 512},
            {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": 128},
            "chunked_prefill_exceeds_dispatch",
        ),
        ({"chunked_prefill_size": -1}, {}, "chunked_prefill_off_with_dispatch_limit"),
        ({}, {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": 2048}, "dispatch_tokens_above_maximum"),
        ({}, {"NVSHMEM_QP_DEPTH": 1024}, "qp_depth_too_small"),
        ({"chunked_prefill_size": 512}, {}, None),
        ({"chunked_prefill_size": 128}, {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": 128}, None),
        ({"chunked_prefill_size": 8192, "deepep_mode": "auto"}, {}, None),
        ({"chunked_prefill_size": 8192, "deepep_mode": "normal"}, {}, None),
    ],
)
def test_a_prompt_beyond_the_capacity_is_refused_before_it_kills(
    flags: dict[str, Any], env: dict[str, Any], code: str | None
) -> None:
    plan = make(probe(H200), moe_a2a_backend="deepep", flags={**LL, **flags}, env_vars=env)
    assert codes(plan["rejections"]) == ([code] if code else [])


def test_a_decode_instance_has_no_prompts_to_fear() -> None:
    plan = make(probe(H200), moe_a2a_backend="deepep", role="decode", flags={"chunked_prefill_size": 8192})
    assert plan["rejections"] == []
    assert plan["effective"]["deepep_mode"] == "low_latency"


def test_unquantised_experts_take_low_latency() -> None:
    host = probe(H200, "0.5.15.post1", model={"quantization": {"method": None, "block": None}})
    assert make(host, moe_a2a_backend="deepep")["effective"]["deepep_mode"] == "low_latency"
    refused = make(host, moe_a2a_backend="deepep", flags={"deepep_mode": "auto"})
    assert codes(refused["rejections"]) == ["deepep_mode_needs_quantised_model"]


@pytest.mark.parametrize(
    ("mode", "rejected"), [("auto", True), ("normal", True), ("low_latency", False), (None, False)]
)
def test_mooncake_knows_low_latency_only(mode: str | None, rejected: bool) -> None:
    plan = make(probe(H200), moe_a2a_backend="mooncake", flags={"deepep_mode": mode})
    assert ("deepep_mode_not_for_backend" in codes(plan["rejections"])) is rejected
    assert plan["effective"]["deepep_mode"] == (mode or "low_latency")


# Transfer, elasticity, nodes


def test_a_prefill_instance_transfers_with_what_works() -> None:
    plan = make(probe(B300), role="prefill")
    assert after(plan["argv"], "--disaggregation-mode")[:4] == [
        *("--disaggregation-mode", "prefill"),
        *("--disaggregation-transfer-backend", "mooncake"),
    ]
    without = {"mooncake": broken("mooncake", "kv_transfer", "broken", "missing_system_lib", "system_package")}
    assert make(probe(B300, backends=without), role="prefill")["effective"]["kv_transfer_backend"] == "nixl"


def test_a_prefill_instance_cannot_do_without_transfer() -> None:
    plan = make(probe(PCIE), role="prefill")
    assert set(codes(plan["rejections"])) == {"kv_transfer_backend_missing"}
    assert make(probe(PCIE), role="prefill", on_missing_backend="install")["rejections"] == []


def test_elastic_ep_falls_back_or_is_there() -> None:
    assert "--elastic-ep-backend" not in make(probe(PCIE), elastic_ep_backend="mooncake")["argv"]
    plan = make(probe(B300), elastic_ep_backend="mooncake")
    assert after(plan["argv"], "--elastic-ep-backend")[:2] == ["--elastic-ep-backend", "mooncake"]


def test_ranks_of_an_instance_over_hosts() -> None:
    variables: dict[str, Any] = {"hosts": ["gpu-01", "gpu-02"], "rendezvous": {"address": "10.0.0.1", "port": 20000}}
    for rank, host in enumerate(("gpu-01", "gpu-02")):
        plan = make(probe(B300), host=host, **variables)
        assert plan["rejections"] == []
        assert plan["effective"]["tp_size"] == 16
        assert after(plan["argv"], "--nnodes")[:6] == [
            *("--nnodes", "2", "--node-rank", str(rank)),
            *("--dist-init-addr", "10.0.0.1:20000"),
        ]
    assert "host_not_in_instance" in codes(make(probe(B300), host="gpu-03", **variables)["rejections"])


# The host


@pytest.mark.parametrize(
    ("changes", "code", "variable"),
    [
        ({"venv": {"state": "venv_absent", "message": "no such folder"}}, "venv_absent", "sglang_venv"),
        ({"venv": {"state": "not_a_venv"}}, "not_a_venv", "sglang_venv"),
        ({"sglang": {"version": None}, "server_args": {"state": "absent"}}, "sglang_absent", "sglang_venv"),
        ({"model": {"state": "absent"}}, "model_path_absent", "sglang_model_path"),
        ({"model": {"state": "unreadable"}}, "model_unreadable", "sglang_model_path"),
        ({"model": {"state": "absent", "code": "model_config_absent"}}, "model_config_absent", "sglang_model_path"),
        ({"model": {"weights": "missing"}}, "model_weights_missing", "sglang_model_path"),
        ({"gpus": {"state": "absent", "devices": []}}, "no_devices", "sglang_gpus"),
        ({"gpus": {"state": "absent", "code": "nvidia_smi_absent", "devices": []}}, "nvidia_smi_absent", "sglang_gpus"),
        ({"gpus": {"state": "timeout", "devices": []}}, "nvidia_smi_timeout", "sglang_gpus"),
        (
            {"gpus": {"state": "error", "code": "driver_library_mismatch", "devices": []}},
            "driver_library_mismatch",
            "sglang_gpus",
        ),
        ({"torch": {"cuda": None, "version": "2.9.0+cpu"}}, "torch_is_cpu_build", "sglang_flags.device"),
    ],
)
def test_a_host_that_cannot_serve(changes: dict[str, Any], code: str, variable: str) -> None:
    row = rejection(make(probe(PCIE, **changes)), code)
    assert row["variable"] == variable
    assert row["suggestion"]
    text = _plan_text.plan_text(make(probe(PCIE, **changes)), "gpu-01")
    assert row["message"] in text and str(row["suggestion"]) in text


def test_dummy_weights_need_no_files() -> None:
    assert make(probe(PCIE, model={"weights": "none"}), flags={"load_format": "dummy"})["rejections"] == []


def test_the_cpu_needs_no_gpu_and_gets_its_variable() -> None:
    plan = make(probe("cpu"), flags={"device": "cpu", "load_format": "dummy"})
    assert plan["rejections"] == []
    assert plan["env"] == {"SGLANG_USE_CPU_ENGINE": "1"}
    assert plan["effective"]["tp_size"] == 1


def test_a_cpu_host_says_one_short_sentence_for_each_preference() -> None:
    plan = make(
        probe("cpu"), flags={"device": "cpu", "load_format": "dummy"}, moe_a2a_backend=["deepep", "mooncake", "nixl"]
    )
    assert decision(plan, "moe_a2a_backend")["because"] == (
        "deepep needs GPUs, and the device is cpu; deep_ep is absent. "
        "mooncake needs GPUs, and the device is cpu; is absent. "
        "nixl needs GPUs, and the device is cpu; is absent"
    )
    assert plan["rejections"] == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.. b", "a. b"),
        ("it is absent.. To have it: x..", "it is absent. To have it: x"),
        ("it is absent.; it is.", "it is absent; it is"),
        ("sm_90, 0.5.23: fine…", "sm_90, 0.5.23: fine…"),
    ],
)
def test_sentences_have_one_full_stop(text: str, wanted: str) -> None:
    assert _plan_draft.tidy(text) == wanted


def test_a_lost_gpu_is_refused_until_it_is_left_out() -> None:
    host = probe(PCIE)
    host["gpus"]["devices"][7]["lost"] = True
    assert "gpu_lost" in codes(make(host)["rejections"])
    plan = make(host, gpus=[0, 1, 2, 3])
    assert plan["rejections"] == []
    assert plan["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_nothing_known_is_said_and_not_guessed() -> None:
    host = probe(PCIE, server_args={"state": "unknown", "problem": "unknown layout", "flags": {}})
    for part in ("gpus", "fabric", "model", "toolkits"):
        del host[part]
    plan = make(host, model_path="/m", flags={"anything": [1, 2], "switch": True})
    assert plan["rejections"] == []
    assert {"server_args_unknown", "gpus_unknown"} <= set(codes(plan["warnings"]))
    assert after(plan["argv"], "--anything") == ["--anything", "1", "2", "--switch"]
    assert decision(plan, "flags")["answer"] == "not checked"


def test_wanted_backends_without_a_service() -> None:
    host = probe("cpu")
    plan = _launch_plan.make_plan(None, host, {"mooncake": ["kv_transfer"], "nixl": ["kv_transfer"]}, {}, [], "gpu-b")
    assert plan["service"] is False
    assert plan["argv"] == []
    assert [(row["backend"], row["required"]) for row in plan["remedies"]] == [("mooncake", True), ("nixl", True)]
    assert plan["unit"]["venv"] == "/opt/sglang/venv"


def test_a_wanted_backend_that_nothing_mends_is_told() -> None:
    host = probe(
        PCIE, backends={"nixl": broken("nixl", "kv_transfer", "needs_gpu", "no_driver", "driver", "install a driver")}
    )
    plan = make(host, backends={"nixl": ["kv_transfer"]})
    assert "wanted_backend_not_mendable" in codes(plan["warnings"])
    assert plan["remedies"] == []


def test_the_plan_says_how_each_secret_travels_and_not_what_it_is() -> None:
    plan = make(probe(PCIE), secrets={"api_key": "4711", "hf_token": "4712"})
    assert plan["secret_flags"] == ["api_key"]
    assert plan["secret_env"] == {"hf_token": "HF_TOKEN"}
    assert "4711" not in json.dumps(plan) and "4712" not in json.dumps(plan)
    assert "flag_reserved" in codes(
        make(probe(PCIE), secrets={"api_key": "x"}, flags={"config": "/x.yaml"})["rejections"]
    )


def test_secret_flags_are_refused_also_when_the_plan_is_called_directly() -> None:
    plan = _launch_plan.make_plan({"venv": "/v", "model_path": "/m", "flags": {"api-key": "4711"}}, probe(PCIE))
    assert rejection(plan, "secret_in_flags")["suggestion"].startswith("sglang_secrets")
    assert "4711" not in json.dumps(plan)


# Drift


def test_no_drift_between_a_plan_and_itself() -> None:
    plan = make(probe(H200), flags={"max_running_requests": 256, "trust_remote_code": True})
    assert _plan_text.plan_drift(plan, plan["argv"]) == []
    info = {
        "tp_size": 8,
        "ep_size": 8,
        "max_running_requests": 256,
        "trust_remote_code": True,
        "model_path": plan["unit"]["model_path"],
    }
    assert _plan_text.plan_drift(plan, plan["argv"], info) == []


def test_drift_is_named_with_both_sides() -> None:
    plan = make(probe(H200), flags={"max_running_requests": 256})
    running = [*plan["argv"][:-1], "128", "--api-key", "4711", "--disable-radix-cache"]
    rows = {row["setting"]: (row["planned"], row["running"]) for row in _plan_text.plan_drift(plan, running)}
    assert rows == {
        "max_running_requests": ("256", "128"),
        "api_key": (None, "(not shown)"),
        "disable_radix_cache": (None, True),
    }
    (row,) = _plan_text.plan_drift(plan, None, {"ep_size": 1, "tp_size": 8})
    assert (row["setting"], row["planned"], row["running"], row["source"]) == ("ep_size", 8, 1, "server_info")
    assert _plan_text.drift_diff(plan, [row])["before"] == "ep_size: 1\n"


_value = st.none() | st.booleans() | st.integers(-3, 20) | st.text(max_size=5) | st.lists(st.integers(0, 3), max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "tp_size",
                "pp_size",
                "ep",
                "dp_size",
                "nnodes",
                "moe_a2a_backend",
                "deepep_mode",
                "enable_eplb",
                "port",
                "chunked_prefill_size",
            ]
        ),
        _value,
        max_size=5,
    )
)
def test_no_flag_value_raises(flags: dict[str, Any]) -> None:
    plan = make(probe(H200), flags=flags)
    json.dumps(plan)
    assert all(isinstance(word, str) for word in plan["argv"])


@pytest.mark.parametrize(
    ("release", "argv"),
    [
        ("0.5.18", ["--dp-size", "8"]),
        ("0.5.23", ["--attn-dp-size", "8"]),
    ],
)
def test_attention_data_parallelism_in_the_words_of_each_version(release: str, argv: list[str]) -> None:
    flags = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True, "chunked_prefill_size": 4096, **LL}
    plan = make(probe(H200, release), moe_a2a_backend="deepep", flags=flags)
    assert plan["rejections"] == []
    assert after(plan["argv"], "--tp-size")[2:4] == argv
    assert ("--enable-dp-attention" in plan["argv"]) is (release == "0.5.18")
    assert (plan["effective"]["attn_dp_size"], plan["effective"]["tp_size"]) == (8, 8)
    assert plan["env"]["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == "512"


def test_replicas_need_their_own_gpus() -> None:
    row = rejection(make(probe(H200), flags={"tp_size": 8, "dp_size": 8}), "not_enough_gpus")
    assert row["numbers"]["needed"] == 64


def test_a_build_is_one_remedy_also_when_the_backend_is_wanted_twice() -> None:
    plan = make(
        probe(H200, backends=ABSENT),
        moe_a2a_backend="deepep",
        on_missing_backend="build",
        backends={"deep_ep": ["a2a"]},
    )
    assert [step["action"] for row in plan["remedies"] for step in row["steps"]] == ["build"]


def test_gpus_of_unknown_architecture_are_not_guessed_about() -> None:
    host = probe(H200)
    for gpu in host["gpus"]["devices"]:
        gpu.update(compute_capability=None, sm=None)
    assert make(host)["effective"]["moe_a2a_backend"] == "none"
    assert make(host, moe_a2a_backend="deepep")["effective"]["moe_a2a_backend"] == "deepep"


def test_a_hub_model_that_is_not_there_yet_is_unknown_and_not_dense() -> None:
    sizes = dict.fromkeys(("experts", "heads", "kv_heads", "layers", "intermediate_size", "moe_intermediate_size"))
    host = probe(H200, model={"state": "hub", "code": "model_not_cached", "quantization": None, **sizes})
    plan = make(host, moe_a2a_backend="deepep", parallelism="ep8")
    assert plan["rejections"] == []
    assert plan["effective"]["moe_a2a_backend"] == "deepep"
    assert "deepep_mode" not in [row["question"] for row in plan["decisions"]]
    assert "model_from_hub" in codes(plan["warnings"])
    assert make(host)["effective"]["moe_a2a_backend"] == "none"


@pytest.mark.parametrize(
    ("version", "rejected", "warned"), [("0.5.12", True, False), ("0.5.23", False, False), ("main-1", False, True)]
)
def test_a_rule_about_a_range_says_unknown_outside_of_what_it_can_read(
    version: str, rejected: bool, warned: bool
) -> None:
    host = probe(PCIE, "0.5.12" if version == "0.5.12" else "0.5.23")
    host["sglang"]["version"] = version
    plan = make(host, flags={"attention_backend": "trtllm_mha"})
    assert ("flag_not_supported_on_arch" in codes(plan["rejections"])) is rejected
    assert ("flag_on_arch_unknown" in codes(plan["warnings"])) is warned


def test_other_names_of_a_setting_are_no_drift() -> None:
    plan = make(probe(H200))
    renamed = {"--tp-size": "--tensor-parallel-size", "--ep-size": "--ep", "--model-path": "--model"}
    assert _plan_text.plan_drift(plan, [renamed.get(word, word) for word in plan["argv"]]) == []


def test_deepep_v2_gets_the_capacity_that_its_defaults_lack() -> None:
    plan = make(probe(H200), moe_a2a_backend="deepep_v2")
    assert plan["rejections"] == []
    capacity = int(plan["env"]["SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"])
    assert capacity >= int(plan["argv"][plan["argv"].index("--chunked-prefill-size") + 1])
    assert plan["env"]["EP_DISABLE_GIN"] == "1"
    assert "EP_DISABLE_GIN" not in make(probe(B300), moe_a2a_backend="deepep_v2")["env"]


@pytest.mark.parametrize(("attn_dp", "answer"), [(1, "none"), (2, "pplx")])
def test_pplx_needs_attention_groups(attn_dp: int, answer: str) -> None:
    plan = make(probe(H200), moe_a2a_backend="pplx", flags={"attn_dp_size": attn_dp})
    assert plan["effective"]["moe_a2a_backend"] == answer
    assert plan["rejections"] == []
