# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what SGLang itself refuses at its start, told before the unit is written.

Each row is one of SGLang's own assertions, with the versions whose wheels have it. In a version newer than all that
were read the row warns and does not refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _plan_sizes, _rules, _versions
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_draft import Draft

READ = ">=0.4.9,<=0.5.23"


class Fault(NamedTuple):
    """What is wrong: ``key`` is the flag to name, ``numbers`` the figures, ``suggestion`` the way out."""

    key: str
    message: str
    suggestion: str
    numbers: dict[str, Any] = {}


class View:
    """The user's flags with the plan's sizes and choices in place of them, as SGLang will see them."""

    def __init__(
        self,
        draft: Draft,
        sizes: _plan_sizes.Sizes,
        ep: int,
        a2a: str,
        role: Optional[str] = None,
        elastic: Optional[str] = None,
    ) -> None:
        self.draft = draft
        self.sizes = sizes
        self.ep = ep
        self.a2a = a2a
        self.role = role
        self.elastic = elastic

    def text(self, key: str) -> Optional[str]:
        """A flag's value as text; None where it is not given or is SGLang's word for nothing."""
        value = self.draft.flag(key)
        if value is None or value is False or str(value).strip().casefold() in ("", "none", "null", "auto"):
            return None
        return str(value).strip()

    def number(self, key: str, default: Optional[int] = None) -> Optional[int]:
        return self.draft.number(key, default)

    def on(self, key: str) -> bool:
        return self.draft.truth(key)

    def flag(self, key: str) -> str:
        return self.draft.catalogue.flag(key)

    @property
    def quantization(self) -> Optional[str]:
        """The method that the layers will have: the user's, else the checkpoint's."""
        given = self.text("quantization")
        return given.casefold() if given else model_method(self.draft.config.get("quantization"))

    @property
    def quantization_known(self) -> bool:
        return self.text("quantization") is not None or "quantization" in self.draft.config

    @property
    def mla(self) -> Optional[bool]:
        """Whether the model has latent attention; None where its configuration was not read so far."""
        if "kv_lora_rank" not in self.draft.config:
            return None
        return bool(self.draft.config["kv_lora_rank"])


def model_method(quantization: Any) -> Optional[str]:
    """SGLang's name of a checkpoint's quantisation (``probe.model.quantization``)."""
    method = (quantization or {}).get("method")
    if not method:
        return None
    algorithm = str((quantization or {}).get("algorithm") or "").casefold()
    if method == "modelopt" and "nvfp4" in algorithm:
        return "modelopt_fp4"
    if method == "modelopt" and "mixed" in algorithm:
        return "modelopt_mixed"
    if method == "modelopt" and "fp8" in algorithm:
        return "modelopt_fp8"
    return str(method).casefold()


class Constraint(NamedTuple):
    """``check`` yields faults; the row holds for SGLang ``sglang`` (``_versions.within``)."""

    code: str
    sglang: str
    check: Callable[[View], Iterator[Fault]]
    source: str


# Bounds that hold in every version: flag, smallest, largest, and whether the bounds themselves are allowed.
BOUNDS: tuple[tuple[str, float, Optional[float], bool], ...] = (
    ("mem_fraction_static", 0, 1, False),
    ("context_length", 1, None, True),
    ("max_running_requests", 1, None, True),
    ("max_total_tokens", 1, None, True),
    ("max_prefill_tokens", 1, None, True),
    ("page_size", 1, None, True),
    ("stream_interval", 1, None, True),
    ("num_continuous_decode_steps", 1, None, True),
    ("pp_max_micro_batch_size", 1, None, True),
    ("schedule_conservativeness", 0, None, True),
    ("tokenizer_worker_num", 1, None, True),
    ("detokenizer_worker_num", 1, None, True),
    ("base_gpu_id", 0, None, True),
    ("gpu_id_step", 1, None, True),
    ("nnodes", 1, 65536, True),
    ("node_rank", 0, 65535, True),
    ("attn_cp_size", 1, 65536, True),
    ("moe_dp_size", 1, 65536, True),
    ("ep_num_redundant_experts", 0, None, True),
    ("eplb_rebalance_num_iterations", 1, None, True),
    ("cpu_offload_gb", 0, None, True),
    ("max_loras_per_batch", 1, None, True),
    ("nccl_port", 1, 65535, True),
    ("disaggregation_bootstrap_port", 1, 65535, True),
)


def check_bounds(draft: Draft) -> None:
    """Refuse figures outside of what they can be, whatever the version."""
    for key, low, high, inclusive in BOUNDS:
        number = as_float(draft.flag(key))
        if number is None:
            continue
        below = number < low if inclusive else number <= low
        above = high is not None and (number > high if inclusive else number >= high)
        if not below and not above:
            continue
        wanted = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        if not inclusive:
            wanted = f"between {low:g} and {high:g}"
        flag = draft.catalogue.flag(key)
        draft.reject(
            "flag_out_of_range",
            f"{flag} is {number:g}, and must be {wanted}",
            flag=flag,
            variable=f"sglang_flags.{key}",
            value=draft.flag(key),
            numbers={key: number, "minimum": low, **({} if high is None else {"maximum": high})},
            suggestion=wanted,
        )


def as_float(value: Any) -> Optional[float]:
    if value is None or isinstance(value, (bool, list, dict)):
        return None
    try:
        number = float(str(value).strip())
    except ValueError:
        return None
    return None if math.isnan(number) else number


# Parallel sizes


def _size(view: View, key: str) -> int:
    number = view.number(key, 1) or 1
    return number if 1 <= number <= 65536 else 1


def _context_parallelism(view: View) -> Iterator[Fault]:
    tp, attn_dp = view.sizes.tp, view.sizes.attn_dp
    cp = _size(view, "attn_cp_size")
    if cp > 1 and tp % (attn_dp * cp):
        together = f"attention dp {attn_dp} x attention cp {cp}" if attn_dp > 1 else f"attention cp {cp}"
        yield Fault(
            "attn_cp_size",
            f"tp {tp} must be a multiple of {together}: {tp} % {attn_dp * cp} = {tp % (attn_dp * cp)}",
            f"--attn-cp-size {_plan_sizes.largest_divisor(max(1, tp // attn_dp), cp)}",
            {"tp_size": tp, "attn_dp_size": attn_dp, "attn_cp_size": cp},
        )


def _context_parallelism_without_pp(view: View) -> Iterator[Fault]:
    cp, moe_dp, pp = _size(view, "attn_cp_size"), _size(view, "moe_dp_size"), view.sizes.pp
    early = _versions.within(view.draft.sglang_version, "<=0.5.9") is True
    if pp > 1 and (moe_dp > 1 or (cp > 1 and early)):
        key = "moe_dp_size" if moe_dp > 1 else "attn_cp_size"
        yield Fault(key, f"{view.flag(key)} works with pp 1, and pp is {pp}", "pp 1, or without it", {"pp_size": pp})


def _moe_dp(view: View) -> Iterator[Fault]:
    moe_dp, tp, ep = _size(view, "moe_dp_size"), view.sizes.tp, view.ep
    if moe_dp <= 1:
        return
    numbers = {"tp_size": tp, "ep_size": ep, "moe_dp_size": moe_dp}
    if tp % moe_dp:
        yield Fault("moe_dp_size", f"--moe-dp-size {moe_dp} does not divide tp {tp}", "a divisor of tp", numbers)
    elif (ep > 1 and ep * moe_dp != tp) or ep * moe_dp > tp:
        yield Fault(
            "moe_dp_size",
            f"ep {ep} x moe-dp {moe_dp} must be tp {tp}, and is {ep * moe_dp}",
            f"--ep-size {max(1, tp // moe_dp)}",
            numbers,
        )


def _dp_lm_head(view: View) -> Iterator[Fault]:
    if view.on("enable_dp_lm_head") and view.sizes.attn_dp == 1 and view.sizes.dp > 1:
        yield Fault(
            "enable_dp_lm_head",
            f"--enable-dp-lm-head needs attention data parallelism, and dp {view.sizes.dp} are replicas",
            "attention data parallelism (attn_dp_size, or dp_size with enable_dp_attention), or without it",
            {"dp_size": view.sizes.dp},
        )


def _old_dp_attention(view: View) -> Iterator[Fault]:
    if view.on("enable_dp_attention") and view.sizes.attn_dp == 1:
        yield Fault(
            "enable_dp_attention",
            "--enable-dp-attention needs a dp size above 1, and it is 1",
            "dp_size: a divisor of the tp size",
            {"dp_size": 1, "tp_size": view.sizes.tp},
        )


def _node_rank(view: View) -> Iterator[Fault]:
    rank, nnodes = view.number("node_rank"), view.sizes.nnodes
    if rank is not None and rank >= nnodes:
        yield Fault(
            "node_rank",
            f"--node-rank {rank} is not below the number of hosts, {nnodes}",
            f"0 to {nnodes - 1}",
            {"node_rank": rank, "nnodes": nnodes},
        )


def _gpu_ids(view: View) -> Iterator[Fault]:
    first, step = view.number("base_gpu_id", 0) or 0, view.number("gpu_id_step", 1) or 1
    if (first, step) == (0, 1) or first < 0 or step < 1 or not view.sizes.known or view.draft.on_cpu:
        return
    sizes = view.sizes
    count = max(1, sizes.tp * sizes.pp * sizes.dp // max(1, sizes.nnodes))
    last, there = first + (count - 1) * step, len(view.draft.gpus())
    if last >= there:
        yield Fault(
            "base_gpu_id",
            f"base_gpu_id {first}, gpu_id_step {step}, {count} ranks: the last is GPU {last}, and there are {there}",
            "sglang_gpus instead of base_gpu_id and gpu_id_step",
            {"base_gpu_id": first, "gpu_id_step": step, "last": last, "gpus": there},
        )


# Pipelines, speculation, scheduling


def _pp_speculation(view: View) -> Iterator[Fault]:
    algorithm = view.text("speculative_algorithm")
    if view.sizes.pp <= 1 or not algorithm:
        return
    later = _versions.within(view.draft.sglang_version, ">=0.5.20")
    if later and view.role == "prefill" and algorithm.upper() in ("EAGLE", "NEXTN", "DSPARK"):
        return
    yield Fault(
        "speculative_algorithm",
        f"--speculative-algorithm {algorithm} does not work with pp {view.sizes.pp}",
        "pp 1, or no speculation",
        {"pp_size": view.sizes.pp},
    )


def _pp_mixed_chunk(view: View) -> Iterator[Fault]:
    if view.sizes.pp > 1 and view.on("enable_mixed_chunk"):
        yield Fault(
            "enable_mixed_chunk",
            f"--enable-mixed-chunk does not work with pp {view.sizes.pp}",
            "pp 1, or without mixed chunks",
            {"pp_size": view.sizes.pp},
        )


def _mixed_chunk_speculation(view: View) -> Iterator[Fault]:
    algorithm = view.text("speculative_algorithm")
    if algorithm and view.on("enable_mixed_chunk"):
        yield Fault(
            "enable_mixed_chunk", f"--enable-mixed-chunk does not work with {algorithm} speculation", "one of the two"
        )


_PAGES = {"flashmla": 64, "cutlass_mla": 128, "trtllm_mla": 64, "cutedsl_mla": 64, "hpc_ops": 64}


def _chunk_and_page(view: View) -> Iterator[Fault]:
    chunk = view.number("chunked_prefill_size")
    if chunk is None or chunk <= 0 or view.role == "decode":
        return
    page = view.number("page_size")
    because = ""
    for key in ("attention_backend", "decode_attention_backend"):
        backend = view.text(key)
        if backend in _PAGES and not (backend in ("trtllm_mla", "cutedsl_mla") and page in (32, 64)):
            page, because = _PAGES[backend], f" ({backend} sets it)"
    share = chunk // max(1, view.sizes.attn_dp)
    if page and share % page:
        fit = max(page, share // page * page) * max(1, view.sizes.attn_dp)
        yield Fault(
            "chunked_prefill_size",
            f"the prefill chunk of a rank, {share}, must be a multiple of the page size {page}{because}: "
            f"{share} % {page} = {share % page}",
            f"--chunked-prefill-size {fit}",
            {"chunked_prefill_size": chunk, "share": share, "page_size": page, "remainder": share % page},
        )


def _priority_policy(view: View) -> Iterator[Fault]:
    policy = view.text("schedule_policy") or "fcfs"
    if view.on("enable_priority_scheduling") and policy not in ("fcfs", "lof"):
        yield Fault(
            "schedule_policy", f"priority scheduling works with fcfs or lof, and the policy is {policy}", "fcfs or lof"
        )


def _served_name(view: View) -> Iterator[Fault]:
    name = view.draft.intent.get("served_model_name") or view.text("served_model_name")
    if name and ":" in str(name) and "://" not in str(name):
        yield Fault(
            "served_model_name",
            f"the served name {name!r} has a colon, which SGLang keeps for model:adapter",
            f"sglang_served_model_name: {str(name).replace(':', '-')}",
        )


def _padding_and_compile(view: View) -> Iterator[Fault]:
    if view.on("disable_cuda_graph_padding") and view.on("enable_torch_compile"):
        yield Fault(
            "disable_cuda_graph_padding",
            "--disable-cuda-graph-padding with --enable-torch-compile compiles every batch size for itself",
            "one of the two",
        )


def _pdmux(view: View) -> Iterator[Fault]:
    if not view.on("enable_pdmux"):
        return
    if view.sizes.pp > 1:
        yield Fault("enable_pdmux", f"--enable-pdmux works with pp 1, and pp is {view.sizes.pp}", "pp 1")
    if view.number("chunked_prefill_size") != -1:
        yield Fault("enable_pdmux", "--enable-pdmux works without chunked prefill only", "chunked_prefill_size: -1")
    if view.role:
        yield Fault("enable_pdmux", f"--enable-pdmux does not work in a {view.role} instance", "without it")
    if not view.on("disable_overlap_schedule") and view.sizes.pp == 1:
        yield Fault("enable_pdmux", "--enable-pdmux works without overlap only", "disable_overlap_schedule: true")


def _fake_prefill(view: View) -> Iterator[Fault]:
    if view.role == "prefill" and view.text("disaggregation_transfer_backend") == "fake":
        yield Fault(
            "disaggregation_transfer_backend", "a prefill instance cannot transfer with 'fake'", "mooncake or nixl"
        )


# Experts


def _cutlass_quantization(view: View) -> Iterator[Fault]:
    if view.text("moe_runner_backend") != "flashinfer_cutlass":
        return
    allowed = ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
    if view.quantization_known and view.quantization not in (*allowed, None):
        yield _runner_fault("flashinfer_cutlass", view.quantization, allowed)
    if view.ep not in (1, view.sizes.tp):
        yield _runner_ep("flashinfer_cutlass", view)


def _trtllm_quantization(view: View) -> Iterator[Fault]:
    runner = view.text("moe_runner_backend")
    allowed: dict[str, tuple[str, ...]] = {
        "flashinfer_trtllm": (
            "modelopt_fp4", "fp8", "modelopt_fp8", "compressed-tensors", "mxfp8", "modelopt_mixed", "nvfp4_online",
        ),
        "flashinfer_trtllm_routed": (
            "fp8", "mxfp8", "modelopt_fp4", "modelopt_mixed", "nvfp4_online", "minimax_m3_nvfp4",
        ),
    }  # fmt: skip
    if runner in allowed and view.quantization_known and view.quantization not in (*allowed[runner], None):
        yield _runner_fault(runner, view.quantization, allowed[runner])


def _cutedsl(view: View) -> Iterator[Fault]:
    if view.text("moe_runner_backend") != "flashinfer_cutedsl":
        return
    allowed = ("modelopt_fp4", "modelopt_mixed", "nvfp4_online")
    if view.quantization_known and view.quantization not in allowed:
        yield _runner_fault("flashinfer_cutedsl", view.quantization, allowed)
    if view.ep not in (1, view.sizes.tp):
        yield _runner_ep("flashinfer_cutedsl", view)
    if view.a2a not in ("none", "deepep", "flashinfer"):
        yield Fault(
            "moe_runner_backend",
            f"flashinfer_cutedsl works with the all-to-all backends none, deepep and flashinfer, not {view.a2a}",
            "another moe_runner_backend",
        )


def _runner_fault(runner: str, method: Optional[str], allowed: tuple[str, ...]) -> Fault:
    return Fault(
        "moe_runner_backend",
        f"the expert runner {runner} takes {', '.join(allowed)}, and the experts are {method or 'not quantised'}",
        "moe_runner_backend: auto",
    )


def _runner_ep(runner: str, view: View) -> Fault:
    return Fault(
        "moe_runner_backend",
        f"{runner} works with ep 1 or ep {view.sizes.tp} (the tp size), and ep is {view.ep}",
        f"ep{view.sizes.tp}, or moe_runner_backend: auto",
        {"ep_size": view.ep, "tp_size": view.sizes.tp},
    )


def _fp8_cutlass_ep(view: View) -> Iterator[Fault]:
    if view.text("moe_runner_backend") == "cutlass" and view.quantization in ("fp8", "mxfp8") and view.ep != 1:
        yield Fault(
            "moe_runner_backend",
            f"the cutlass runner of {view.quantization} experts works with ep 1, and ep is {view.ep}",
            "moe_runner_backend: auto",
            {"ep_size": view.ep},
        )


def _a2a_runner(view: View) -> Iterator[Fault]:
    runner = view.text("moe_runner_backend")
    if view.a2a in ("deepep_v2", "pplx") and runner not in (None, "deep_gemm"):
        yield Fault("moe_runner_backend", f"{view.a2a} works with the deep_gemm runner only, not {runner}", "deep_gemm")
    if (
        view.a2a == "flashinfer"
        and runner is not None
        and not runner.startswith("flashinfer_")
        and (runner != "deep_gemm")
    ):
        yield Fault(
            "moe_runner_backend",
            f"the flashinfer all-to-all works with FlashInfer's expert runners, not {runner}",
            "flashinfer_cutlass",
        )
    if view.a2a == "deepep" and runner == "flashinfer_cutedsl" and view.text("deepep_mode") == "normal":
        yield Fault("deepep_mode", "flashinfer_cutedsl works in deepep's low_latency mode only", "low_latency")


def _deepep_v2(view: View) -> Iterator[Fault]:
    if view.a2a != "deepep_v2":
        return
    for key in ("enable_two_batch_overlap", "enable_single_batch_overlap", "enforce_shared_experts_fusion"):
        if view.on(key):
            yield Fault(key, f"deepep_v2 does not work with {view.flag(key)}", "without it")
    if view.text("deepep_v2_mode") == "direct" and view.sizes.nnodes > 1:
        yield Fault(
            "deepep_v2_mode",
            f"--deepep-v2-mode direct is for NVLink, and the instance is over {view.sizes.nnodes} hosts",
            "--deepep-v2-mode hybrid",
            {"nnodes": view.sizes.nnodes},
        )


def _two_batch_overlap(view: View) -> Iterator[Fault]:
    if not view.on("enable_two_batch_overlap") or view.a2a != "none":
        return
    if _versions.within(view.draft.sglang_version, ">=0.5.15") and view.sizes.attn_dp > 1:
        return
    yield Fault(
        "enable_two_batch_overlap",
        "--enable-two-batch-overlap needs an all-to-all backend (or, from 0.5.15, attention data parallelism)",
        "without it, or moe_a2a_backend: deepep",
    )


def _waterfill(view: View) -> Iterator[Fault]:
    for key in ("enable_waterfill", "enable_deepep_waterfill"):
        if view.on(key) and view.a2a not in ("deepep", "megamoe"):
            yield Fault(
                key,
                f"{view.flag(key)} makes SGLang take deepep, and the plan's all-to-all backend is {view.a2a}",
                "without it, or moe_a2a_backend: deepep",
            )


def _rank_invariant_dispatch(view: View) -> Iterator[Fault]:
    eplb = view.draft.intent.get("eplb")
    named = eplb.get("dispatch_algorithm") if isinstance(eplb, dict) else None
    dispatch = named or view.text("ep_dispatch_algorithm")
    if dispatch in ("static", "lp") and view.a2a == "none":
        yield Fault(
            "ep_dispatch_algorithm",
            f"--ep-dispatch-algorithm {dispatch} picks another replica on each rank, which needs an all-to-all backend",
            "dynamic",
        )


def _elastic_eplb(view: View) -> Iterator[Fault]:
    eplb = view.draft.intent.get("eplb")
    named = eplb.get("algorithm") if isinstance(eplb, dict) else None
    algorithm = named or view.text("eplb_algorithm")
    if view.elastic and _plan_sizes.eplb_wanted(view.draft) and algorithm not in (
        None, "auto", "elasticity_aware", "elasticity_aware_hierarchical",
    ):  # fmt: skip
        yield Fault(
            "eplb_algorithm",
            f"elastic expert parallelism needs the EPLB algorithm elasticity_aware, not {algorithm}",
            "eplb_algorithm: auto",
        )


# Attention

_LATENT = ("trtllm_mla", "cutlass_mla", "flashmla", "cutedsl_mla", "tokenspeed_mla")
_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def _latent_attention(view: View) -> Iterator[Fault]:
    if view.mla is None:
        return
    for key in _ATTENTION:
        backend = view.text(key)
        if backend in _LATENT and not view.mla:
            yield Fault(
                key, f"{backend} is for models with latent attention (MLA), and this one has none", "flashinfer"
            )
        if backend in ("trtllm_mha", "hpc_ops") and view.mla:
            yield Fault(key, f"{backend} is not for models with latent attention (MLA), and this is one", "trtllm_mla")
        old = [arch for arch in view.draft.archs() if arch.startswith("sm_8")]
        if backend == "fa3" and view.mla and old:
            yield Fault(
                key, f"fa3 with latent attention (MLA) needs SM90, and the GPUs are {', '.join(old)}", "flashinfer"
            )
        if key == "prefill_attention_backend" and backend == "cutedsl_mla":
            yield Fault(key, "cutedsl_mla decodes only", "trtllm_mla")


def _trtllm_mla_cache(view: View) -> Iterator[Fault]:
    dtype = view.text("kv_cache_dtype")
    for key in ("attention_backend", "decode_attention_backend"):
        backend = view.text(key)
        if backend in ("trtllm_mla", "cutedsl_mla") and dtype not in (None, "fp8_e4m3", "bf16", "bfloat16"):
            yield Fault(
                "kv_cache_dtype", f"{backend} takes a KV cache of fp8_e4m3, bf16 or auto, not {dtype}", "fp8_e4m3"
            )


_COMPATIBLE = {
    "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt", "fp8"),
    "modelopt_mixed": ("modelopt",),
    "modelopt": ("modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
    "nvfp4_online": ("fp8", "modelopt_fp8"),
    "petit_nvfp4": ("modelopt", "modelopt_fp4"),
    "w8a8_int8": ("compressed-tensors",),
    "w8a8_fp8": ("compressed-tensors",),
    "auto-round-int8": ("compressed-tensors",),
    "quark_mxfp4": ("modelopt_fp4", "modelopt_mixed", "fp8", "mxfp4"),
    "w4afp8": ("fp8",),
    "mxfp8": ("fp8",),
    "moe_wna16": ("gptq", "awq"),
    "gptq_marlin": ("gptq",),
    "awq_marlin": ("awq",),
    "gptq": ("gptq_marlin",),
    "awq": ("awq_marlin",),
    "marlin": ("gptq", "awq"),
    "humming": ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "modelopt_fp4", "modelopt_fp8"),
}


def _quantization_of_checkpoint(view: View) -> Iterator[Fault]:
    given = (view.text("quantization") or "").casefold()
    has = model_method(view.draft.config.get("quantization"))
    if not given or not has or given == has or has in _COMPATIBLE.get(given, ()) or given == "unquant":
        return
    yield Fault(
        "quantization",
        f"--quantization {given} contradicts the checkpoint, which is {has}",
        "remove quantization: SGLang takes the checkpoint's",
    )


_ALL_READ = "read in the wheels of 0.4.9 and 0.5.4 to 0.5.23"
CONSTRAINTS = (
    Constraint("size_not_multiple_of_context_parallelism", ">=0.5.9", _context_parallelism, "wheels 0.5.9 to 0.5.23"),
    Constraint("context_parallelism_needs_pp_1", ">=0.5.9", _context_parallelism_without_pp, "wheels 0.5.9 to 0.5.23"),
    Constraint("moe_dp_does_not_fit", ">=0.5.9", _moe_dp, "wheels 0.5.9 to 0.5.23"),
    Constraint("dp_lm_head_needs_attention_dp", "", _dp_lm_head, _ALL_READ),
    Constraint("attention_dp_needs_dp", "<0.5.4", _old_dp_attention, "wheel 0.4.9; from 0.5.4 it is ignored"),
    Constraint("node_rank_not_below_nnodes", "", _node_rank, _ALL_READ),
    Constraint("gpu_ids_beyond_gpus", "", _gpu_ids, "CUDA: invalid device ordinal"),
    Constraint("speculation_with_pp", "", _pp_speculation, _ALL_READ),
    Constraint("mixed_chunk_with_pp", "<=0.5.9", _pp_mixed_chunk, "wheels 0.4.9 to 0.5.9"),
    Constraint("mixed_chunk_with_speculation", ">=0.5.4", _mixed_chunk_speculation, "wheels 0.5.4 to 0.5.23"),
    Constraint("chunk_not_multiple_of_page", "", _chunk_and_page, _ALL_READ),
    Constraint("priority_needs_fcfs_or_lof", ">=0.5.4", _priority_policy, "wheels 0.5.4 to 0.5.23"),
    Constraint("served_model_name_with_colon", ">=0.5.6", _served_name, "wheels 0.5.6 to 0.5.23"),
    Constraint("padding_off_with_torch_compile", ">=0.5.12", _padding_and_compile, "wheels 0.5.12 to 0.5.23"),
    Constraint("pdmux_needs", ">=0.5.4", _pdmux, "wheels 0.5.4 to 0.5.23"),
    Constraint("fake_transfer_for_prefill", ">=0.5.10", _fake_prefill, "wheels 0.5.10 to 0.5.23"),
    Constraint("moe_runner_not_for_quantization", ">=0.5.6", _cutlass_quantization, "wheels 0.5.6 to 0.5.23"),
    Constraint("moe_runner_not_for_quantization", ">=0.5.7", _trtllm_quantization, "wheels 0.5.7 to 0.5.23"),
    Constraint("moe_runner_not_for_quantization", ">=0.5.12", _cutedsl, "wheels 0.5.12 to 0.5.23"),
    Constraint("fp8_cutlass_needs_ep_1", ">=0.5.9", _fp8_cutlass_ep, "wheels 0.5.9 to 0.5.23"),
    Constraint("moe_runner_not_for_a2a", ">=0.5.9", _a2a_runner, "wheels 0.5.9 to 0.5.23"),
    Constraint("deepep_v2_does_not_take", ">=0.5.19", _deepep_v2, "wheels 0.5.19 to 0.5.23"),
    Constraint("two_batch_overlap_needs_a2a", ">=0.5.7", _two_batch_overlap, "wheels 0.5.7 to 0.5.23"),
    Constraint("waterfill_needs_deepep", ">=0.5.12", _waterfill, "wheels 0.5.12 to 0.5.23"),
    Constraint("eplb_dispatch_needs_a2a", ">=0.5.17", _rank_invariant_dispatch, "wheels 0.5.17 to 0.5.23"),
    Constraint("elastic_ep_needs_elastic_eplb", ">=0.5.4", _elastic_eplb, "wheels 0.5.4 to 0.5.23"),
    Constraint("attention_backend_not_for_model", ">=0.5.4", _latent_attention, "wheels 0.5.6 to 0.5.23"),
    Constraint("kv_cache_dtype_not_for_backend", ">=0.5.4", _trtllm_mla_cache, "wheels 0.5.4 to 0.5.23"),
    Constraint("quantization_contradicts_model", "", _quantization_of_checkpoint, _ALL_READ),
)


def clash(draft: Draft, sizes: _plan_sizes.Sizes, a2a: str) -> Optional[str]:
    """What the user's flags have against an all-to-all backend that nobody asked for, or None.

    An ``auto`` that is refused afterwards would be no help: what is refused without the backend too does not count.
    """
    runner = View(draft, sizes, sizes.ep, a2a).text("moe_runner_backend")
    if runner and runner not in _rules.A2A_AUTO_RUNNERS:
        return f"{a2a} was not seen with the expert runner {runner}, which is asked for"
    with_it = View(draft, sizes, sizes.tp, a2a, draft.intent.get("role"))
    without = View(draft, sizes, sizes.ep, "none", draft.intent.get("role"))
    for row in CONSTRAINTS:
        if _versions.within(draft.sglang_version, row.sglang) is False:
            continue
        before = {fault.key for fault in row.check(without)}
        for fault in row.check(with_it):
            if fault.key not in before:
                return fault.message
    return None


def check_constraints(view: View) -> None:
    """Refuse what the installed SGLang refuses at its start; warn where its version was not read."""
    draft = view.draft
    read = _versions.within(draft.sglang_version, READ)
    for row in CONSTRAINTS:
        applies = _versions.within(draft.sglang_version, row.sglang)
        if applies is False:
            continue
        for fault in row.check(view):
            flag = draft.catalogue.flag(fault.key)
            if applies is None or not read:
                draft.warn(
                    row.code,
                    f"{fault.message} (so it is up to SGLang 0.5.23; whether in "
                    f"{draft.sglang_version or 'this one'} is not known)",
                    flag=flag,
                    value=draft.flag(fault.key),
                    source=row.source,
                )
                continue
            draft.reject(
                row.code,
                fault.message,
                flag=flag,
                variable=f"sglang_flags.{fault.key}" if fault.key in draft.reading.given else "sglang_parallelism",
                value=draft.flag(fault.key),
                numbers=fault.numbers,
                suggestion=fault.suggestion,
                source=row.source,
            )
