# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what no host can tell, as rows with version range and source.

Evidence comes first: a row is used only where the installed SGLang's own definitions do not say it. ``sglang`` and
``backend`` are version ranges (``_versions.within``); outside of every row the answer is "unknown".
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _versions


class A2A(NamedTuple):
    """A value of ``--moe-a2a-backend``: what it needs of host and arguments."""

    name: str
    library: Optional[str]  # key of probe.backends; None: nothing that the probe knows
    sets_ep: bool  # SGLang overwrites ep_size with tp_size
    archs: tuple[str, ...]  # SM families that it runs on; empty: not known
    vendor: str  # cuda, hip or npu
    nvlink: bool  # needs NVLink between the GPUs of a node
    dispatch_env: Optional[str]  # capacity in tokens a rank
    dispatch_default: Optional[int]
    dispatch_maximum: Optional[int]
    source: str


_SPANNING = "SGLang 0.5.15.post1 and 0.5.23, argument hooks of the MoE group"
A2A_BACKENDS: dict[str, A2A] = {
    row.name: row
    for row in (
        A2A("none", None, False, (), "any", False, None, None, None, _SPANNING),
        A2A(
            "deepep",
            "deep_ep",
            True,
            ("sm_90", "sm_100", "sm_103"),
            "cuda",
            True,
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            128,
            1024,
            "the MoE layer needs DeepGEMM (SM90, SM100 families); DeepEP's normal mode needs NVLink inside a node",
        ),
        A2A(
            "deepep_v2",
            "deep_ep",
            True,
            ("sm_90", "sm_100", "sm_103"),
            "cuda",
            True,
            "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            128,
            None,
            "SGLang 0.5.23: deep_gemm is the only runner of deepep_v2",
        ),
        A2A(
            "mooncake",
            "mooncake",
            True,
            ("sm_90", "sm_100", "sm_103"),
            "cuda",
            False,
            "SGLANG_MOONCAKE_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            128,
            None,
            "seen on SM90 with peer-to-peer; the expert layer is the one of deepep",
        ),
        A2A(
            "nixl",
            "nixl",
            True,
            ("sm_90", "sm_100", "sm_103"),
            "cuda",
            False,
            "SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            128,
            None,
            "the expert layer is the one of deepep",
        ),
        A2A(
            "pplx",
            None,
            True,
            ("sm_90",),
            "cuda",
            False,
            "SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            128,
            None,
            _SPANNING,
        ),
        A2A(
            "flashinfer",
            None,
            True,
            (),
            "cuda",
            False,
            "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            None,
            None,
            _SPANNING,
        ),
        A2A("megamoe", None, True, ("sm_100", "sm_103"), "cuda", False, None, None, None, _SPANNING),
        A2A("flashinfer_megamoe", None, True, ("sm_100", "sm_103"), "cuda", False, None, None, None, _SPANNING),
        A2A(
            "mori", None, True, (), "hip", False, "SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 4096, None, _SPANNING
        ),
        A2A("ascend_fuseep", None, True, (), "npu", False, None, None, None, _SPANNING),
        A2A("ascend_tp", None, False, (), "npu", False, None, None, None, _SPANNING),
    )
}
# In what order "auto" looks for an all-to-all backend: the ones that are there for speed, not for elasticity.
A2A_AUTO = ("deepep",)
A2A_AUTO_METHODS = ("fp8",)  # expert formats that were seen served with it, on two H200
A2A_AUTO_RUNNERS = ("deep_gemm",)  # the expert runner that "auto" was seen to take with it, on two H200

# --disaggregation-transfer-backend and --elastic-ep-backend: value -> key of probe.backends.
KV_LIBRARIES = {
    "mooncake": "mooncake",
    "mooncake_tcp": "mooncake",
    "nixl": "nixl",
    "mori": None,
    "ascend": None,
    "fake": None,
}
KV_AUTO = ("mooncake", "nixl")
ELASTIC_LIBRARIES = {"mooncake": "mooncake", "nixl": "nixl", "none": None}
ELASTIC_AUTO = ("mooncake", "nixl")
QP_DEPTH_DEFAULT = 1024


class ArchRule(NamedTuple):
    """A flag's value that only some SM families have kernels for."""

    flags: tuple[str, ...]
    values: tuple[str, ...]
    archs: tuple[str, ...]
    sglang: str
    instead: str
    source: str


_ATTENTION = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
_SPARSE = ("nsa_prefill_backend", "nsa_decode_backend", "dsa_prefill_backend", "dsa_decode_backend")
_RUNNERS = ("moe_runner_backend", "speculative_moe_runner_backend")
_SM100 = ("sm_100", "sm_103")
_BLACKWELL = (*_SM100, "sm_110", "sm_120", "sm_121")
_MHA_DECODE = ("sm_90", *_SM100, "sm_120", "sm_121")
_GEMM8 = ("fp8_gemm_runner_backend", "fp8_gemm_backend")
_GEMM4 = ("fp4_gemm_runner_backend", "fp4_gemm_backend")
_MLA_OTHER = "flashinfer or triton"
_PREFILL = ("attention_backend", "prefill_attention_backend", "speculative_draft_attention_backend")
ARCH_RULES = (
    ArchRule(_ATTENTION, ("trtllm_mla", "cutlass_mla"), _SM100, "", _MLA_OTHER, "sglang#24047, sglang#30272"),
    ArchRule(_ATTENTION, ("cutedsl_mla",), _SM100, "", _MLA_OTHER, "check in the wheels of 0.5.13 to 0.5.23"),
    ArchRule(_PREFILL, ("trtllm_mha",), _SM100, "<0.5.19", _MLA_OTHER, "check in the wheels of 0.5.4 to 0.5.18"),
    ArchRule(
        ("decode_attention_backend",),
        ("trtllm_mha",),
        _SM100,
        "<0.5.10",
        _MLA_OTHER,
        "check in the wheels of 0.5.4 to 0.5.9",
    ),
    ArchRule(
        ("decode_attention_backend",),
        ("trtllm_mha",),
        _MHA_DECODE,
        ">=0.5.10",
        _MLA_OTHER,
        "check in the wheels of 0.5.10 to 0.5.23",
    ),
    ArchRule(_PREFILL, ("trtllm_mha",), _MHA_DECODE, ">=0.5.19", _MLA_OTHER, "check in the wheels of 0.5.19 to 0.5.23"),
    ArchRule(
        _ATTENTION,
        ("fa3",),
        ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90"),
        "",
        _MLA_OTHER,
        "FlashAttention 3 has no SM100 and SM120 kernels; assertion in SGLang's registry of backends",
    ),
    ArchRule(
        _ATTENTION,
        ("fa4",),
        ("sm_90", *_SM100, "sm_110"),
        "",
        _MLA_OTHER,
        "sglang#23985, sglang#18748: FlashAttention 4 takes compute capability 9.x, 10.x and 11.x",
    ),
    ArchRule(_ATTENTION, ("tokenspeed_mla",), _SM100, "", _MLA_OTHER, "tokenspeed_mla's kernels are SM100"),
    ArchRule(
        _SPARSE,
        ("flashmla_sparse", "flashmla_kv", "flashmla_auto", "trtllm"),
        ("sm_90", *_SM100),
        "",
        "flashinfer or tilelang",
        "sglang#30272: sparse attention of FlashMLA and TensorRT-LLM is SM90 and SM100",
    ),
    ArchRule(_SPARSE, ("fa3",), ("sm_90",), "", "flashmla_sparse or tilelang", "FlashAttention 3 with MLA is SM90"),
    ArchRule(_ATTENTION, ("flashmla",), ("sm_90", *_SM100), "", _MLA_OTHER, "FlashMLA's kernels are SM90 and SM100"),
    ArchRule(
        _RUNNERS,
        ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm"),
        _SM100,
        "",
        "auto, triton or flashinfer_cutlass",
        "sglang#24047, sglang#30272",
    ),
    ArchRule(_RUNNERS, ("flashinfer_cutedsl", "flashinfer_megamoe"), _SM100, "", "auto", "SM100 kernels of FlashInfer"),
    ArchRule(_RUNNERS, ("megamoe",), ("sm_90", *_SM100), "", "auto", "check in the wheel of 0.5.23 (mega_moe_hook)"),
    ArchRule(
        _RUNNERS,
        ("deep_gemm",),
        ("sm_90", *_SM100),
        "",
        "auto, triton or cutlass",
        "DeepGEMM has SM90 and SM100 kernels",
    ),
    ArchRule(_GEMM8, ("flashinfer_trtllm",), _SM100, "", "auto", "sglang#30272; wheels of 0.5.12 to 0.5.23"),
    ArchRule(_GEMM8, ("flashinfer_cutlass",), _BLACKWELL, "", "auto", "wheels of 0.5.12 to 0.5.23"),
    ArchRule(_GEMM8, ("flashinfer_deepgemm",), ("sm_90",), "", "auto", "wheels of 0.5.9 to 0.5.23"),
    ArchRule(_GEMM8, ("cutlass",), ("sm_120", "sm_121"), ">=0.5.16", "auto", "wheels of 0.5.16 to 0.5.23"),
    ArchRule(_GEMM8, ("deep_gemm",), ("sm_90", *_SM100), "", "auto", "DeepGEMM has SM90 and SM100 kernels"),
    ArchRule(
        _GEMM4,
        ("flashinfer_trtllm", "flashinfer_cutedsl"),
        _SM100,
        "",
        "auto",
        "FlashInfer's FP4 kernels of these kinds are SM100",
    ),
    ArchRule(
        ("kv_cache_dtype",),
        ("nvfp4",),
        (*_SM100, "sm_120", "sm_121"),
        "",
        "fp8_e4m3 or auto",
        "check in the wheels of 0.5.16 to 0.5.23",
    ),
    ArchRule(
        ("kv_cache_dtype",), ("mxfp8",), _BLACKWELL, "", "fp8_e4m3 or auto", "check in the wheels of 0.5.16 to 0.5.23"
    ),
)


# Families that these rows were written about: of one that is not here nothing is known.
KNOWN_ARCHS = (
    "sm_60", "sm_61", "sm_70", "sm_72", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_101",
    "sm_103", "sm_110", "sm_120", "sm_121",
)  # fmt: skip


class OtherDevice(NamedTuple):
    """Values of flags that are for devices of another vendor than NVIDIA."""

    flags: tuple[str, ...]
    values: tuple[str, ...]
    device: str
    instead: str


OTHER_DEVICES = (
    OtherDevice(_ATTENTION, ("aiter", "wave"), "AMD GPUs", _MLA_OTHER),
    OtherDevice(_ATTENTION, ("ascend",), "Ascend NPUs", _MLA_OTHER),
    OtherDevice(_ATTENTION, ("intel_amx",), "CPUs", _MLA_OTHER),
    OtherDevice(_ATTENTION, ("intel_xpu",), "Intel GPUs", _MLA_OTHER),
    OtherDevice(_RUNNERS, ("aiter",), "AMD GPUs", "auto or triton"),
    OtherDevice(_RUNNERS, ("ascend",), "Ascend NPUs", "auto or triton"),
    OtherDevice(("sampling_backend",), ("ascend",), "Ascend NPUs", "flashinfer or pytorch"),
    OtherDevice(_SPARSE, ("aiter",), "AMD GPUs", "flashmla_sparse or tilelang"),
)


class MinCapability(NamedTuple):
    """The smallest compute capability (times ten) for which SGLang loads a quantisation method."""

    method: str
    minimum: int
    sglang: str


MIN_CAPABILITY = (
    MinCapability("fp8", 80, ""),
    MinCapability("mxfp8", 100, ""),
    MinCapability("modelopt", 89, ""),
    MinCapability("modelopt_fp8", 89, ""),
    MinCapability("modelopt_fp4", 100, "<0.5.13"),
    MinCapability("modelopt_fp4", 80, ">=0.5.13"),
    MinCapability("modelopt_mixed", 100, "<0.5.13"),
    MinCapability("modelopt_mixed", 80, ">=0.5.13"),
    MinCapability("nvfp4_online", 100, ""),
    MinCapability("w8a8_fp8", 89, ""),
    MinCapability("w4afp8", 90, ""),
    MinCapability("mxfp4", 80, "<0.5.18"),
    MinCapability("fbgemm_fp8", 80, ""),
    MinCapability("petit_nvfp4", 90, ""),
    MinCapability("gptq_marlin", 80, ""),
    MinCapability("awq_marlin", 80, ""),
    MinCapability("marlin", 80, ""),
    MinCapability("qoq", 80, ""),
    MinCapability("blockwise_int8", 80, ""),
    MinCapability("awq", 75, ""),
    MinCapability("w8a8_int8", 75, ""),
    MinCapability("humming", 75, ""),
    MinCapability("auto-round-int8", 75, ""),
    MinCapability("bitsandbytes", 70, ""),
    MinCapability("compressed-tensors", 70, ""),
    MinCapability("moe_wna16", 70, ""),
    MinCapability("quark", 70, ""),
    MinCapability("gptq", 60, ""),
)
MIN_CAPABILITY_SOURCE = "get_min_capability of the quantisation methods in the wheels of 0.4.9 to 0.5.23"
# Only these families have them: nvfp4_online is refused on SM120 although its capability is large enough.
ONLY_ON = {"nvfp4_online": _SM100}


class Rename(NamedTuple):
    """A flag that went away: from ``sglang`` on, ``flag: value`` means ``becomes``.

    ``becomes`` maps new flags to values; the word ``=`` stands for the old value, ``<dp_size>`` for the plan's size.
    """

    flag: str
    sglang: str
    becomes: dict[str, Any]
    source: str


RENAMES = (
    Rename("enable_deepep_moe", ">=0.5.3", {"moe_a2a_backend": "deepep"}, "sglang#10770, sglang#8658"),
    Rename("enable_ep_moe", ">=0.5.3", {"ep_size": "<tp_size>"}, "sglang#10770, sglang#8658"),
    Rename("enable_dp_attention", ">=0.5.22", {"attn_dp_size": "<dp_size>"}, "deprecated in the definitions of 0.5.22"),
    Rename(
        "cuda_graph_max_bs",
        ">=0.5.15",
        {"cuda_graph_max_bs_decode": "="},
        "SGLang 0.5.15.post1 deprecates it; 0.5.23 calls it ambiguous",
    ),
    Rename("cuda_graph_bs", ">=0.5.15", {"cuda_graph_bs_decode": "="}, "SGLang 0.5.15.post1 deprecates it"),
    Rename("enable_deepep_waterfill", ">=0.5.23", {"enable_waterfill": "="}, "SGLang 0.5.23"),
    Rename("stream_output", ">=0.5.12", {"incremental_streaming_output": "="}, "SGLang 0.5.12 deprecates it"),
    Rename("nsa_prefill_backend", ">=0.5.15", {"dsa_prefill_backend": "="}, "SGLang 0.5.15.post1 deprecates it"),
    Rename("nsa_decode_backend", ">=0.5.15", {"dsa_decode_backend": "="}, "SGLang 0.5.15.post1 deprecates it"),
    Rename(
        "mamba_scheduler_strategy", ">=0.5.15", {"mamba_radix_cache_strategy": "="}, "SGLang 0.5.15.post1 deprecates it"
    ),
    Rename(
        "speculative_dflash_draft_window_size",
        ">=0.5.15",
        {"speculative_draft_window_size": "="},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "enable_gdn_replayssm_spec", ">=0.5.18", {"enable_linear_replayssm_spec": "="}, "SGLang 0.5.18 deprecates it"
    ),
    Rename(
        "enable_nsa_prefill_context_parallel",
        ">=0.5.15",
        {"enable_prefill_cp": "="},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "enable_dsa_prefill_context_parallel",
        ">=0.5.15",
        {"enable_prefill_cp": "="},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "enable_prefill_context_parallel", ">=0.5.15", {"enable_prefill_cp": "="}, "SGLang 0.5.15.post1 deprecates it"
    ),
    Rename(
        "enable_breakable_cuda_graph",
        ">=0.5.15",
        {"cuda_graph_backend_prefill": "breakable"},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "disable_piecewise_cuda_graph",
        ">=0.5.15",
        {"cuda_graph_backend_prefill": "disabled"},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "enforce_piecewise_cuda_graph",
        ">=0.5.15",
        {"cuda_graph_backend_prefill": "tc_piecewise"},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "piecewise_cuda_graph_tokens", ">=0.5.15", {"cuda_graph_bs_prefill": "="}, "SGLang 0.5.15.post1 deprecates it"
    ),
    Rename(
        "piecewise_cuda_graph_max_tokens",
        ">=0.5.15",
        {"cuda_graph_max_bs_prefill": "="},
        "SGLang 0.5.15.post1 deprecates it",
    ),
    Rename(
        "piecewise_cuda_graph_compiler",
        ">=0.5.15",
        {"cuda_graph_tc_compiler": "="},
        "SGLang 0.5.15.post1 deprecates it",
    ),
)
# Flags that went away without one that means the same: what to write instead.
REMOVED = {
    "warmup": "warmup_mode: request, or warmup_mode: off",
    "disaggregation_decode_tp": "remove it: the decode instance tells its size itself",
    "disaggregation_decode_dp": "remove it: the decode instance tells its size itself",
    "enable_flashinfer_moe": "moe_runner_backend: flashinfer_cutlass",
    "enable_flashinfer_cutlass_moe": "moe_runner_backend: flashinfer_cutlass",
    "enable_flashinfer_trtllm_moe": "moe_runner_backend: flashinfer_trtllm",
    "enable_triton_kernel_moe": "moe_runner_backend: triton_kernel",
}
# Written without their ending by everybody; argparse takes some of them as abbreviations, and calls others ambiguous.
SHORTHANDS = {"tp": "tp_size", "dp": "dp_size", "ep": "ep_size"}


class EnvRename(NamedTuple):
    name: str
    becomes: str
    source: str


ENV_RENAMES = (EnvRename("SGLANG_NSA_FUSE_TOPK", "SGLANG_DSA_FUSE_TOPK", "SGLang's own table of deprecated names"),)


class Match(NamedTuple):
    """Whether a version of a backend's distribution works with a version of SGLang for a use: seen, not guessed."""

    library: str
    use: str
    backend: str
    sglang: str
    works: bool
    because: str
    source: str


_SEEN = "run on two H200 with SGLang 0.5.15.post1"
MATCHES = (
    Match(
        "nixl",
        "a2a",
        "==1.4.1",
        "==0.5.15.*",
        False,
        "nixl_ep takes another type of topk_idx than SGLang passes",
        _SEEN,
    ),
    Match(
        "mooncake",
        "a2a",
        "==0.3.14",
        "==0.5.15.*",
        False,
        "mooncake.ep has no set_host_ip and active_ranks is None",
        _SEEN,
    ),
    Match(
        "mooncake",
        "elastic_ep",
        "==0.3.14",
        "==0.5.15.*",
        False,
        "mooncake.ep has no set_host_ip and active_ranks is None",
        _SEEN,
    ),
    Match("mooncake", "a2a", ">=0.3.10.post2,<=0.3.13.post1", "==0.5.15.*", True, "mooncake.ep has set_host_ip", _SEEN),
    Match(
        "mooncake",
        "elastic_ep",
        ">=0.3.10.post2,<=0.3.13.post1",
        "==0.5.15.*",
        True,
        "mooncake.ep has set_host_ip",
        _SEEN,
    ),
    Match("deep_ep", "a2a", ">=1.2.1,<2", "==0.5.15.*", True, "served with DeepEP v1.2.1 in three modes", _SEEN),
    Match(
        "deep_ep",
        "a2a",
        "==0.1.2.post1",
        "==0.5.23",
        True,
        "SGLang 0.5.23 requires sgl-deep-ep 0.1.2.post1",
        "metadata of the wheel",
    ),
)


class Behaviour(NamedTuple):
    """SGLang behaves so in the versions ``holds``, does not in ``holds_not``; elsewhere it is unknown."""

    holds: str
    holds_not: str
    source: str


EPLB_REPLICAS_CORRUPT = Behaviour(
    "<=0.5.15.post1", ">=0.5.18", "sglang#32962; read in the wheels of 0.5.9, 0.5.12, 0.5.15.post1, 0.5.18 and 0.5.23"
)
DENSE_TP_MAY_BE_TP = Behaviour(
    ">=0.5.15.post1", "<=0.5.12", "read in the wheels of 0.5.9, 0.5.12, 0.5.15.post1, 0.5.18 and 0.5.23"
)
UNQUANTIZED_DEEPEP_NEEDS_LOW_LATENCY = Behaviour(
    ">=0.5.12,<=0.5.23",
    ">99",
    "run on two H200 with 0.5.15.post1; its message is in the wheels of 0.5.12, 0.5.18 and 0.5.23",
)


def holds(behaviour: Behaviour, sglang_version: Optional[str]) -> Optional[bool]:
    """True or False where a row says so, None where nothing is known about the version."""
    if _versions.within(sglang_version, behaviour.holds):
        return True
    if _versions.within(sglang_version, behaviour.holds_not):
        return False
    return None


def match(library: str, use: str, backend_version: Optional[str], sglang_version: Optional[str]) -> Optional[Match]:
    """The row about this pair of versions, or None when nobody has seen it."""
    for row in MATCHES:
        if row.library != library or row.use != use:
            continue
        if _versions.within(backend_version, row.backend) and _versions.within(sglang_version, row.sglang):
            return row
    return None


def sm_family(compute_capability: Optional[str]) -> Optional[str]:
    """``sm_120`` of ``12.0``; never derived from a marketing name."""
    parts = (compute_capability or "").split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return f"sm_{parts[0]}{parts[1]}"
