# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: how a model is spread over GPUs and hosts, as SGLang will compute it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _rules
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_draft import Draft

_LARGEST = 65536
_PART = re.compile(r"(tp|pp|ep|dp)([0-9]+)")


class Sizes(NamedTuple):
    """Sizes before an all-to-all backend changes them. ``given`` are the names that the user wrote a size for."""

    tp: int
    pp: int
    ep: int
    dp: int  # replicas
    attn_dp: int  # attention groups inside of a replica
    nnodes: int
    node_rank: int
    given: tuple[str, ...]
    known: bool  # False when nothing tells how many GPUs there are


def nodes_of(draft: Draft) -> tuple[int, int]:
    """Number of hosts of the instance, and this host's rank."""
    hosts = list(draft.intent.get("hosts") or [])
    if len(hosts) > 1:
        rank = hosts.index(draft.host) if draft.host in hosts else 0
        if draft.host is not None and draft.host not in hosts:
            draft.reject(
                "host_not_in_instance",
                f"{draft.host} has the instance but is not among its hosts {', '.join(hosts)}",
                variable="sglang_hosts",
                value=hosts,
                suggestion=f"add {draft.host} to hosts, or take the instance off this host",
            )
        for key, wanted in (("nnodes", len(hosts)), ("node_rank", rank)):
            given = draft.number(key)
            if given is not None and given != wanted:
                draft.reject(
                    "contradiction",
                    f"sglang_flags.{key} is {given}, and the position among hosts says {wanted}",
                    flag=draft.catalogue.flag(key),
                    variable="sglang_hosts",
                    value=given,
                    numbers={key: given, "hosts": len(hosts)},
                    suggestion=f"remove {key} from sglang_flags",
                )
        return len(hosts), rank
    return (
        min(_LARGEST, max(1, draft.number("nnodes", 1) or 1)),
        min(_LARGEST, max(0, draft.number("node_rank", 0) or 0)),
    )


def choose_sizes(draft: Draft, wants_experts_spread: bool) -> Sizes:
    """Sizes from ``sglang_parallelism`` and the user's flags; what is left open follows the GPUs and the model.

    ``wants_experts_spread``: something that needs expert parallelism (EPLB, a named all-to-all backend) was asked for.
    """
    nnodes, rank = nodes_of(draft)
    local = len(draft.gpus())
    known = draft.gpus_known or draft.on_cpu
    total = nnodes if draft.on_cpu else nnodes * max(local, 1) if known else 0
    wanted = _wanted(draft, total, known)
    sizes: dict[str, int] = dict(wanted)
    placeholders = {}
    for key in ("tp_size", "pp_size", "ep_size", "dp_size", "attn_dp_size"):
        value = draft.flag(key)
        if isinstance(value, str) and value in ("<tp_size>", "<dp_size>"):
            placeholders[key] = value
            continue
        number = draft.number(key)
        if number is None:
            continue
        if number > _LARGEST:
            draft.reject(
                "flag_out_of_range",
                f"{draft.catalogue.flag(key)} is {value}, and no fleet has so many GPUs",
                flag=draft.catalogue.flag(key),
                value=str(value),
                numbers={"maximum": _LARGEST},
                suggestion="the number of GPUs",
            )
            continue
        if number < 1:
            draft.reject(
                "size_below_one",
                f"{draft.catalogue.flag(key)} is {number}",
                flag=draft.catalogue.flag(key),
                value=number,
                suggestion="1 or more",
            )
            continue
        if key in wanted and wanted[key] != number:
            draft.reject(
                "contradiction",
                f"sglang_parallelism {_named(draft)} means {key} {wanted[key]}, and sglang_flags says {number}",
                flag=draft.catalogue.flag(key),
                variable="sglang_parallelism",
                value=number,
                numbers={"parallelism": wanted[key], "flags": number},
                suggestion="keep one of the two",
            )
        sizes[key] = number
    given = tuple(key for key in ("tp_size", "pp_size", "ep_size", "dp_size", "attn_dp_size") if key in sizes)
    pp, dp = sizes.get("pp_size", 1), sizes.get("dp_size", 1)
    attn_dp = sizes.get("attn_dp_size", 1)
    if draft.truth("enable_dp_attention") or placeholders.get("attn_dp_size"):
        attn_dp, dp = dp, 1
    if "tp_size" in sizes:
        tp = sizes["tp_size"]
    elif known:
        tp, pp = _auto_tp(draft, max(1, total // (pp * dp)), attn_dp, pp, nnodes, bool(given))
    else:
        tp = sizes.get("ep_size", 1)
    if draft.truth("enable_ep_moe") or draft.truth("enable_deepep_moe"):
        ep = tp
    elif "ep_size" in sizes:
        ep = sizes["ep_size"]
    elif placeholders.get("ep_size") or (wants_experts_spread and draft.config.get("experts") and not given):
        ep = tp
    else:
        ep = 1
    if not known and not given:
        draft.warn(
            "gpus_unknown", "the number of GPUs is not known, so the plan uses one", variable="sglang_parallelism"
        )
    _explain(draft, Sizes(tp, pp, ep, dp, attn_dp, nnodes, rank, given, known), local)
    return Sizes(tp, pp, ep, dp, attn_dp, nnodes, rank, given, known)


def _named(draft: Draft) -> Any:
    return draft.intent.get("parallelism") or "auto"


def _wanted(draft: Draft, total: int, known: bool) -> dict[str, int]:
    named = _named(draft)
    if named == "auto":
        return {}
    if isinstance(named, Mapping):
        sizes = {str(key): int(value) for key, value in named.items()}
    else:
        sizes = {f"{kind}_size": int(size) for kind, size in _PART.findall(str(named))}
    spread = sizes.get("pp_size", 1) * sizes.get("dp_size", 1)
    if "ep_size" in sizes and "tp_size" not in sizes and known and total:
        ep = sizes["ep_size"]
        per_replica = max(1, total // spread)
        if ep > per_replica or per_replica % ep:
            draft.reject(
                "parallelism_does_not_fit",
                f"{named} needs a number of GPUs that is a multiple of {ep}, and there are {per_replica}"
                + (" for each pipeline stage or replica" if spread > 1 else ""),
                variable="sglang_parallelism",
                value=named,
                numbers={"ep_size": ep, "gpus": per_replica},
                suggestion="ep" + str(largest_divisor(per_replica, ep)),
            )
            sizes["tp_size"] = ep
        else:
            sizes["tp_size"] = per_replica
    elif "ep_size" in sizes and "tp_size" not in sizes:
        sizes["tp_size"] = sizes["ep_size"]
    if "tp_size" not in sizes and ("pp_size" in sizes or "dp_size" in sizes):
        sizes["tp_size"] = 1
    return sizes


def largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


def _auto_tp(draft: Draft, most: int, attn_dp: int, pp: int, nnodes: int, given: bool) -> tuple[int, int]:
    """The largest tp that divides the model and can be spread over the hosts, and pp.

    Where no tp over all hosts can (24 GPUs of three hosts and 64 heads), each host becomes a pipeline stage.
    """
    model = dict(draft.config)
    if draft.number("moe_dense_tp_size") == 1:
        # Dense layers are then whole on every rank.
        model.pop("intermediate_size", None)
    fits = [size for size in range(most, 0, -1) if size % attn_dp == 0 and not _tp_faults(model, size, attn_dp)]
    spread = [size for size in fits if (size * pp) % nnodes == 0]
    if spread and (nnodes == 1 or spread[0] > most // nnodes):
        return spread[0], pp
    stages = [size for size in fits if size <= most // nnodes]
    if nnodes > 1 and not given and stages and (draft.config.get("layers") or nnodes) >= nnodes:
        return stages[0], nnodes
    return (spread or [most])[0], pp


def _kv_heads(model: Mapping[str, Any]) -> Optional[int]:
    # Latent attention (MLA) keeps one latent head on every rank, whatever the configuration calls key-value heads.
    return None if model.get("kv_lora_rank") else model.get("kv_heads")


def _tp_faults(model: Mapping[str, Any], tp: int, attn_dp: int) -> list[str]:
    attn_tp = max(1, tp // attn_dp)
    faults = []
    heads, kv = model.get("heads"), _kv_heads(model)
    if heads and heads % attn_tp:
        faults.append(f"{heads} heads % {attn_tp} = {heads % attn_tp}")
    if kv and (kv % attn_tp if kv >= attn_tp else attn_tp % kv):
        faults.append(f"{kv} key-value heads over {attn_tp}")
    for key in ("intermediate_size", "moe_intermediate_size"):
        if model.get(key) and model[key] % tp:
            faults.append(f"{key} {model[key]} % {tp} = {model[key] % tp}")
    return faults


def _explain(draft: Draft, sizes: Sizes, local: int) -> None:
    named = _named(draft)
    parts = f"tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}, dp {sizes.dp}"
    if draft.on_cpu:
        because = "the device is cpu"
    elif not sizes.known:
        because = "the GPUs are not known"
    elif named == "auto" and not sizes.given:
        because = f"auto: all {local} GPUs" + (f" of each of {sizes.nnodes} hosts" if sizes.nnodes > 1 else "")
        if sizes.pp > 1:
            because += ", each host a stage: no tp over all of them divides the model"
        if sizes.tp * sizes.pp * sizes.dp < local * sizes.nnodes:
            faults = "; ".join(_tp_faults(draft.config, local * sizes.nnodes, sizes.attn_dp))
            because = f"auto: {local * sizes.nnodes} GPUs do not divide the model ({faults}), {sizes.tp} do"
            draft.warn("gpus_unused", because, variable="sglang_parallelism", value=sizes.tp)
    else:
        because = f"asked for {named}" if named != "auto" else "asked for in sglang_flags"
        if isinstance(named, str) and re.fullmatch(r"ep[0-9]+", named) and sizes.ep and sizes.tp > sizes.ep:
            because += f": {sizes.ep} expert groups of TP {sizes.tp // sizes.ep} on {sizes.tp} GPUs"
    draft.decide(
        "parallelism",
        parts,
        because,
        {"gpus": local, "nnodes": sizes.nnodes, "fabric": draft.fabric()["class"], "attn_dp": sizes.attn_dp},
    )


def redundant_experts(draft: Draft) -> int:
    """Redundant experts that the plan asks for, of ``sglang_eplb`` or the user's flags."""
    eplb = draft.intent.get("eplb")
    flags = draft.number("ep_num_redundant_experts")
    if isinstance(eplb, Mapping) and eplb.get("redundant_experts") is not None:
        wanted = int(eplb["redundant_experts"])
        if flags is not None and flags != wanted:
            draft.reject(
                "contradiction",
                f"sglang_eplb asks for {wanted} redundant experts, and sglang_flags for {flags}",
                flag="--ep-num-redundant-experts",
                variable="sglang_eplb",
                value=flags,
                numbers={"eplb": wanted, "flags": flags},
                suggestion="keep one of the two",
            )
        return wanted
    return flags or 0


def eplb_wanted(draft: Draft) -> bool:
    eplb = draft.intent.get("eplb")
    if isinstance(eplb, Mapping):
        return bool(eplb.get("enabled", True))
    return bool(eplb) or draft.truth("enable_eplb")


def check_sizes(draft: Draft, sizes: Sizes, ep: int, a2a: str) -> None:
    """Refuse what SGLang, or the arithmetic of the model, would refuse later; all of it, with the numbers."""
    tp, pp, dp, nnodes = sizes.tp, sizes.pp, sizes.dp, sizes.nnodes
    local = len(draft.gpus())
    if sizes.known and not draft.on_cpu:
        need = tp * pp * dp
        none_left = not local and any(row["code"] in ("no_gpu_visible", "gpu_lost") for row in draft.rejections)
        if need > local * nnodes and not none_left:
            draft.reject(
                "not_enough_gpus",
                f"tp {tp} x pp {pp} x dp {dp} needs {need} GPUs, and the instance has {local * nnodes}",
                variable="sglang_parallelism",
                value=_named(draft),
                numbers={"needed": need, "gpus": local * nnodes, "nnodes": nnodes},
                suggestion=f"tp{max(1, (local * nnodes) // (pp * dp))}"
                + (", or attention data parallelism, which divides tp" if dp > 1 and tp % dp == 0 else ""),
            )
    if (tp * pp) % nnodes:
        draft.reject(
            "size_not_multiple_of_nnodes",
            f"tp {tp} x pp {pp} cannot be spread over {nnodes} hosts: {tp * pp} % {nnodes} = {(tp * pp) % nnodes}",
            flag="--tp-size",
            variable="sglang_parallelism",
            value=tp,
            numbers={"tp_size": tp, "pp_size": pp, "nnodes": nnodes},
            suggestion=f"a multiple of {nnodes}",
        )
    if dp > 1 and nnodes > 1:
        draft.reject(
            "replicas_over_nodes",
            f"{dp} data-parallel replicas cannot be spread over {nnodes} hosts",
            flag="--dp-size",
            value=dp,
            numbers={"dp_size": dp, "nnodes": nnodes},
            suggestion="one instance a host, or attention data parallelism",
        )
    if tp % sizes.attn_dp:
        draft.reject(
            "dp_not_dividing_tp",
            f"attention data parallelism {sizes.attn_dp} does not divide tp {tp}: remainder {tp % sizes.attn_dp}",
            flag="--attn-dp-size" if draft.catalogue.has("attn_dp_size") else "--dp-size",
            value=sizes.attn_dp,
            numbers={"tp_size": tp, "attn_dp_size": sizes.attn_dp},
            suggestion=f"{largest_divisor(tp, sizes.attn_dp)}",
        )
    if ep > tp or tp % ep:
        draft.reject(
            "ep_not_dividing_tp",
            f"ep {ep} does not divide tp {tp}" + (f": {tp} % {ep} = {tp % ep}" if ep <= tp else ""),
            flag="--ep-size",
            variable="sglang_parallelism",
            value=ep,
            numbers={"ep_size": ep, "tp_size": tp},
            suggestion=f"ep{largest_divisor(tp, ep)}",
        )
    _check_model(draft, sizes, ep)
    _check_experts(draft, sizes, ep, a2a)
    dense = draft.number("moe_dense_tp_size")
    if dense not in (None, 1):
        may_be_tp = _rules.holds(_rules.DENSE_TP_MAY_BE_TP, draft.sglang_version)
        if dense != tp or may_be_tp is not True:
            draft.reject(
                "moe_dense_tp_size_must_be_1_or_unset",
                f"--moe-dense-tp-size is {dense}; SGLang takes 1 or nothing"
                + (f" (or the tp size, {tp})" if may_be_tp else ""),
                flag="--moe-dense-tp-size",
                value=dense,
                numbers={"moe_dense_tp_size": dense, "tp_size": tp},
                suggestion="remove it, or 1",
            )


def _check_model(draft: Draft, sizes: Sizes, ep: int) -> None:
    model, tp, pp = draft.config, sizes.tp, sizes.pp
    attn_tp = max(1, tp // sizes.attn_dp)
    heads, kv, layers = model.get("heads"), _kv_heads(model), model.get("layers")
    if heads and heads % attn_tp:
        fit = next(size for size in range(attn_tp, 0, -1) if heads % size == 0)
        draft.reject(
            "heads_not_divisible",
            f"the model's {heads} attention heads cannot be split over {attn_tp} ranks: "
            f"{heads} % {attn_tp} = {heads % attn_tp}",
            flag="--tp-size",
            variable="sglang_parallelism",
            value=tp,
            numbers={"heads": heads, "attention_tp": attn_tp, "remainder": heads % attn_tp},
            suggestion=f"tp{fit * sizes.attn_dp}",
        )
    if kv and (kv % attn_tp if kv >= attn_tp else attn_tp % kv):
        fit = next(s for s in range(attn_tp, 0, -1) if not (heads or 0) % s and not (kv % s if kv >= s else s % kv))
        draft.reject(
            "kv_heads_not_divisible",
            f"the model's {kv} key-value heads can be neither split over nor replicated to {attn_tp} ranks",
            flag="--tp-size",
            variable="sglang_parallelism",
            value=tp,
            numbers={"kv_heads": kv, "attention_tp": attn_tp},
            suggestion=f"tp{fit * sizes.attn_dp}",
        )
    if layers and pp > layers:
        draft.reject(
            "more_stages_than_layers",
            f"pp {pp} is more than the model's {layers} layers",
            flag="--pp-size",
            variable="sglang_parallelism",
            value=pp,
            numbers={"layers": layers, "pp_size": pp},
            suggestion=f"pp{layers}",
        )
    elif layers and layers % pp:
        draft.warn(
            "stages_uneven",
            f"{layers} layers over pp {pp} make uneven stages: {layers} % {pp} = {layers % pp}",
            flag="--pp-size",
            value=pp,
        )
    moe_tp = max(1, tp // ep) if ep <= tp else 1
    dense_tp = draft.number("moe_dense_tp_size") or tp
    for key, ranks, label in (("moe_intermediate_size", moe_tp, "tp/ep"), ("intermediate_size", dense_tp, "tp")):
        size = model.get(key)
        if not size or (key == "moe_intermediate_size" and not model.get("experts")):
            continue
        if size % ranks:
            draft.reject(
                "intermediate_not_divisible",
                f"{key} {size} cannot be split over {ranks} ranks ({label}): {size} % {ranks} = {size % ranks}",
                flag="--ep-size" if key.startswith("moe") else "--tp-size",
                variable="sglang_parallelism",
                value=ranks,
                numbers={key: size, "ranks": ranks, "remainder": size % ranks},
                suggestion=f"{'ep' if key.startswith('moe') else 'tp'}{largest_divisor(size, ranks)}",
            )
            continue
        _check_block(draft, key, size, ranks, sizes)


def _check_block(draft: Draft, key: str, size: int, ranks: int, sizes: Sizes) -> None:
    quantization = draft.config.get("quantization") or {}
    block = [int(part) for part in quantization.get("block") or [] if part]
    if ranks == 1 or not block:
        return
    largest = max(block)
    shard = size // ranks
    if largest > 1 and shard % largest:
        fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and (size // n) % largest == 0]
        best = max(fits) if fits else 1
        draft.reject(
            "quant_block_not_divisible",
            f"{key} {size} over {ranks} ranks is {shard}, which is no multiple of the quantisation block "
            f"{largest}: {shard} % {largest} = {shard % largest}",
            flag="--ep-size" if key.startswith("moe") else "--tp-size",
            variable="sglang_parallelism",
            value=ranks,
            numbers={key: size, "ranks": ranks, "shard": shard, "block": largest, "remainder": shard % largest},
            suggestion=f"ep{sizes.tp // best}" if key.startswith("moe") else f"tp{best}",
        )


def _check_experts(draft: Draft, sizes: Sizes, ep: int, a2a: str) -> None:
    experts, redundant = draft.config.get("experts"), redundant_experts(draft)
    eplb = eplb_wanted(draft)
    if ep > 1 and "experts" in draft.config and not experts:
        draft.reject(
            "model_has_no_experts",
            f"ep {ep} needs experts, and {draft.config.get('architecture') or 'this model'} has none",
            flag="--ep-size",
            variable="sglang_parallelism",
            value=ep,
            numbers={"experts": experts or 0, "ep_size": ep},
            suggestion=f"tp{sizes.tp}",
        )
    if experts and ep >= 1 and (experts + redundant) % ep:
        more = (-(experts + redundant)) % ep + redundant
        draft.reject(
            "experts_plus_redundant_not_divisible_by_effective_ep" if redundant else "experts_not_divisible",
            f"({experts}+{redundant}) % {ep} = {(experts + redundant) % ep}: "
            f"the experts cannot be spread evenly over the effective ep {ep}",
            flag="--ep-num-redundant-experts" if redundant else "--ep-size",
            variable="sglang_eplb" if redundant else "sglang_parallelism",
            value=redundant if redundant else ep,
            numbers={
                "experts": experts,
                "redundant": redundant,
                "ep_size": ep,
                "remainder": (experts + redundant) % ep,
            },
            suggestion=f"--ep-num-redundant-experts {more}"
            if redundant or eplb
            else f"ep{largest_divisor(experts, ep)}",
        )
    located = str(draft.flag("init_expert_location") or "trivial") != "trivial"
    if a2a == "none" and (eplb or located):
        _check_eplb_without_a2a(draft, redundant)
    if not eplb:
        return
    if sizes.nnodes > 1 and ep % sizes.nnodes:
        draft.reject(
            "eplb_ep_size_not_multiple_of_nnodes",
            f"EPLB spreads ep {ep} over {sizes.nnodes} hosts: {ep} % {sizes.nnodes} = {ep % sizes.nnodes}",
            flag="--ep-size",
            variable="sglang_eplb",
            value=ep,
            numbers={"ep_size": ep, "nnodes": sizes.nnodes},
            suggestion=f"--ep-size {sizes.tp}",
        )
    if ep <= 1:
        draft.reject(
            "eplb_needs_expert_parallelism",
            f"EPLB needs an ep size above 1, and the effective one is {ep}",
            flag="--enable-eplb",
            variable="sglang_eplb",
            value=ep,
            numbers={"ep_size": ep, "tp_size": sizes.tp},
            suggestion=f"--ep-size {sizes.tp}" if sizes.tp > 1 else "drop EPLB: one rank has nothing to balance",
        )


def _check_eplb_without_a2a(draft: Draft, redundant: int) -> None:
    corrupts = _rules.holds(_rules.EPLB_REPLICAS_CORRUPT, draft.sglang_version)
    version = draft.sglang_version or "of unknown version"
    if redundant > 0 and corrupts is True:
        draft.reject(
            "eplb_redundant_without_a2a_corrupts_output",
            f"SGLang {version} gives wrong output with {redundant} redundant experts and no all-to-all backend",
            flag="--ep-num-redundant-experts",
            variable="sglang_eplb",
            value=redundant,
            numbers={"redundant": redundant},
            suggestion="0 redundant experts, an all-to-all backend, or SGLang 0.5.18 or newer",
            source=_rules.EPLB_REPLICAS_CORRUPT.source,
        )
    elif redundant > 0 and corrupts is None:
        draft.warn(
            "eplb_redundant_without_a2a_unknown",
            f"whether SGLang {version} has the fix for wrong output with redundant experts and no all-to-all backend "
            "is not known: check accuracy, or use no redundant experts",
            flag="--ep-num-redundant-experts",
            value=redundant,
            source=_rules.EPLB_REPLICAS_CORRUPT.source,
        )


def eplb_flags(draft: Draft) -> dict[str, Any]:
    """The flags of ``sglang_eplb``, under SGLang's names."""
    if not eplb_wanted(draft):
        return {}
    flags: dict[str, Any] = {"enable_eplb": True}
    eplb: Optional[Any] = draft.intent.get("eplb")
    redundant = redundant_experts(draft)
    if redundant:
        flags["ep_num_redundant_experts"] = redundant
    names = {
        "algorithm": "eplb_algorithm",
        "dispatch_algorithm": "ep_dispatch_algorithm",
        "init_expert_location": "init_expert_location",
        "rebalance_num_iterations": "eplb_rebalance_num_iterations",
        "rebalance_layers_per_chunk": "eplb_rebalance_layers_per_chunk",
        "min_rebalancing_utilization_threshold": "eplb_min_rebalancing_utilization_threshold",
    }
    for key, flag in names.items():
        if isinstance(eplb, Mapping) and eplb.get(key) is not None:
            flags[flag] = eplb[key]
    return flags
