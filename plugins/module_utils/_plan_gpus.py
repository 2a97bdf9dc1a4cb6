# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: whether the GPUs of a host can carry a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _plan_constraints,
    _plan_sizes,
    _rules,
    _versions,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_draft import Draft

_CODES = {"absent": "no_devices", "timeout": "nvidia_smi_timeout", "error": "nvidia_smi_failed"}
_MENDS = {
    "nvidia_smi_absent": "install the NVIDIA driver with its tools",
    "nvidia_smi_timeout": "look for Xid lines in dmesg; a GPU that hangs needs a reset or a reboot",
    "nvidia_smi_failed": "run nvidia-smi on the host and mend what it says",
    "driver_not_loaded": "load the NVIDIA driver (modprobe nvidia), or mend its DKMS build",
    "driver_library_mismatch": "reboot, or reload the driver: the libraries were updated under it",
    "no_devices": "check that the host has GPUs and that its driver sees them (lspci, dmesg)",
    "nvml_not_initialized": "run nvidia-smi on the host and mend what it says",
    "gpu_permission": "let the service's user open /dev/nvidia*",
    "gpu_lost": "reset or repair the GPU",
}
# What SGLang leaves free without a mem_fraction_static is about this share, and a process of others may take it.
_FREE_SHARE = 0.12


def check_gpus(draft: Draft) -> None:
    """Refuse what the GPUs of the instance cannot do; all of it."""
    _check_device(draft)
    if draft.on_cpu:
        return
    torch = draft.probe.get("torch") or {}
    if torch.get("version") and not torch.get("cuda") and not torch.get("hip") and not draft.flag("device"):
        draft.reject(
            "torch_is_cpu_build",
            f"torch {torch['version']} of the venv is a CPU build",
            flag="--device",
            variable="sglang_flags.device",
            value=None,
            suggestion="sglang_flags: {device: cpu}, or a CUDA build of torch",
        )
    if torch.get("hip") and not torch.get("cuda"):
        draft.reject(
            "torch_is_rocm_build",
            f"torch {torch.get('version') or ''} of the venv is a build for AMD GPUs (ROCm {torch['hip']}), "
            "and these plans are for NVIDIA's",
            variable="sglang_venv",
            value=draft.intent.get("venv"),
            suggestion="a CUDA build of torch on a host with NVIDIA GPUs, or sglang_flags: {device: cpu}",
        )
        return
    gpus = draft.probe.get("gpus")
    if gpus is None:
        return
    state = gpus.get("state")
    if state != "ok":
        code = str(gpus.get("code") or _CODES.get(str(state), "nvidia_smi_failed"))
        draft.reject(
            code,
            f"no usable GPU: {str(gpus.get('message') or state).rstrip('. ')}",
            variable="sglang_gpus",
            value=draft.intent.get("gpus"),
            suggestion=f"{_MENDS.get(code, 'mend the driver')}; or sglang_flags: {{device: cpu}}",
        )
        return
    _check_selection(draft, gpus.get("devices") or [])
    _check_mig(draft)
    _check_alike(draft)
    _check_busy(draft)
    _check_fabric_manager(draft)
    fabric = draft.fabric()
    if fabric["class"] == "degraded_nvlink":
        bad = ", ".join(str(gpu) for gpu in fabric["bad_gpus"])
        draft.warn(
            "nvlink_degraded", f"GPU {bad} is outside of NVLink: repair or leave it out", value=fabric["bad_gpus"]
        )


_DEVICES = ("cuda", "cpu", "xpu", "hpu", "npu", "musa", "mps")


def _check_device(draft: Draft) -> None:
    device = draft.flag("device")
    if device is None or str(device) in _DEVICES:
        return
    kind = str(device).casefold().split(":")[0]
    draft.reject(
        "flag_choice",
        f"--device is {device}, and SGLang compares it with the words {', '.join(_DEVICES)}",
        flag="--device",
        variable="sglang_flags.device",
        value=device,
        suggestion=(kind if kind in _DEVICES else "cuda")
        + ("; a GPU is chosen with sglang_gpus" if ":" in kind else ""),
    )


def _check_selection(draft: Draft, devices: list[Mapping[str, Any]]) -> None:
    there = {gpu.get("index") for gpu in devices if gpu.get("index") is not None}
    indexes = draft.gpu_indexes()
    missing = [index for index in indexes or [] if index not in there]
    if missing:
        draft.reject(
            "gpu_index_unknown",
            f"GPU {', '.join(map(str, missing))} is not there; the host has {len(devices)}",
            variable="sglang_gpus",
            value=indexes,
            numbers={"gpus": len(devices)},
            suggestion=f"indexes from 0 to {len(devices) - 1}",
        )
    visible = draft.user_env.get("CUDA_VISIBLE_DEVICES")
    beyond = [part.strip() for part in str(visible or "").split(",")]
    beyond = [part for part in beyond if part.isdigit() and int(part) not in there]
    if beyond and indexes:
        draft.reject(
            "gpu_index_unknown",
            f"CUDA_VISIBLE_DEVICES={visible} names GPU {', '.join(beyond)}, which is not there: CUDA hides it and all "
            "that stand behind it",
            variable="sglang_env_vars.CUDA_VISIBLE_DEVICES",
            value=visible,
            numbers={"gpus": len(devices)},
            suggestion="sglang_gpus, a list of indexes",
        )
    if visible is not None and indexes == [] and devices:
        draft.reject(
            "no_gpu_visible",
            f"CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU visible",
            variable="sglang_env_vars.CUDA_VISIBLE_DEVICES",
            value=visible,
            numbers={"gpus": len(devices)},
            suggestion="sglang_gpus, a list of indexes",
        )
    lost = [gpu for gpu in devices if gpu.get("lost") and (indexes is None or gpu.get("index") in indexes)]
    if lost:
        # A lost GPU has no index any more where the driver has let go of it: then its address names it.
        names = [str(gpu["index"]) if gpu.get("index") is not None else str(gpu.get("pci") or "?") for gpu in lost]
        draft.reject(
            "gpu_lost",
            f"GPU {', '.join(names)} fell off the bus",
            variable="sglang_gpus",
            value=[gpu.get("index") for gpu in lost],
            suggestion="reset or repair it, or leave it out with sglang_gpus",
        )


def _check_mig(draft: Draft) -> None:
    mig = [gpu for gpu in draft.gpus() if gpu.get("mig")]
    if not mig:
        return
    indexes = [gpu.get("index") for gpu in mig]
    named = ", ".join(map(str, indexes))
    visible = str(draft.user_env.get("CUDA_VISIBLE_DEVICES") or "")
    slices = [entry for entry in visible.split(",") if entry.strip().startswith("MIG-")]
    if len(draft.gpus()) > 1 or len(slices) > 1:
        draft.reject(
            "gpu_in_mig_mode",
            f"GPU {named} is in MIG mode: its slices cannot work together",
            variable="sglang_gpus",
            value=indexes,
            suggestion="turn MIG off, or one instance a slice (CUDA_VISIBLE_DEVICES: MIG-…)",
        )
        return
    found = [row.get("profile") for row in mig[0].get("mig_devices") or []]
    if "mig_devices" in mig[0] and not found:
        draft.reject(
            "mig_without_slices",
            f"GPU {named} is in MIG mode and has no slices: CUDA sees no device",
            variable="sglang_gpus",
            value=indexes,
            suggestion="make a slice (nvidia-smi mig -cgi), or turn MIG off",
        )
        return
    draft.warn(
        "gpu_in_mig_mode",
        f"GPU {named} is in MIG mode"
        + (f" with slices {', '.join(map(str, found))}" if found else "")
        + (": the service gets the first one" if not slices else ": the service gets the named one"),
        variable="sglang_gpus",
        value=indexes,
    )


def _check_alike(draft: Draft) -> None:
    gpus = draft.gpus()
    names = sorted({str(gpu.get("name")) for gpu in gpus})
    archs = draft.archs()
    if len(archs) > 1:
        by_arch: dict[str, list[str]] = {}
        for gpu in gpus:
            family = _rules.sm_family(gpu.get("compute_capability")) or str(gpu.get("sm"))
            by_arch.setdefault(family, []).append(str(gpu.get("index")))
        largest = max(by_arch.values(), key=len)
        draft.reject(
            "gpus_of_different_archs",
            "the ranks of an instance need GPUs of one architecture, and these are "
            + ", ".join(f"{arch} (GPU {', '.join(on)})" for arch, on in by_arch.items()),
            variable="sglang_gpus",
            value=draft.intent.get("gpus"),
            numbers={arch: len(on) for arch, on in by_arch.items()},
            suggestion=f"sglang_gpus: [{', '.join(largest)}]",
        )
    elif len(names) > 1:
        draft.warn("gpus_mixed", f"different GPUs in one instance: {', '.join(names)}", variable="sglang_gpus")


def own_pids(draft: Draft) -> Optional[set[int]]:
    """Processes of the services that this collection runs on the host; None when nobody looked."""
    services = [draft.probe.get("service")]
    services += [(part or {}).get("service") for part in (draft.probe.get("instances") or {}).values()]
    known = [service for service in services if service]
    if not known:
        return None
    pids: set[int] = set()
    for service in known:
        pids.update(int(pid) for pid in service.get("pids") or [])
        if service.get("main_pid"):
            pids.add(int(service["main_pid"]))
    return pids


def _check_busy(draft: Draft) -> None:
    """Processes of others on the GPUs: SGLang ends with "out of memory" or "memory capacity is unbalanced"."""
    ours = own_pids(draft)
    fraction = _plan_constraints.as_float(draft.flag("mem_fraction_static"))
    for gpu in draft.gpus():
        others = [row for row in gpu.get("processes") or [] if ours is None or row.get("pid") not in ours]
        if not others:
            continue
        held = sum(row.get("memory_mib") or 0 for row in others)
        memory = gpu.get("memory_mib") or 0
        told = ", ".join(
            f"pid {row.get('pid')}"
            + (f" {row['name']}" if row.get("name") else "")
            + (f" of {row['user']}" if row.get("user") else "")
            + (f", {row['memory_mib']} MiB" if row.get("memory_mib") else "")
            for row in others[:4]
        )
        told += f" and {len(others) - 4} more" if len(others) > 4 else ""
        free_share = 1 - fraction if fraction and 0 < fraction < 1 else _FREE_SHARE
        numbers = {
            "gpu": gpu.get("index"),
            "held_mib": held,
            "memory_mib": memory,
            "pids": [r.get("pid") for r in others],
        }
        message = f"GPU {gpu.get('index')} is in use by others: {told}"
        if ours is not None and memory and held > memory * free_share:
            draft.reject(
                "gpu_busy",
                message,
                variable="sglang_gpus",
                value=draft.intent.get("gpus"),
                numbers=numbers,
                suggestion="stop them, take other GPUs with sglang_gpus, or lower sglang_flags.mem_fraction_static",
            )
        else:
            draft.warn("gpu_busy", message, variable="sglang_gpus", value=numbers["pids"])


def _check_fabric_manager(draft: Draft) -> None:
    manager = (draft.probe.get("fabric") or {}).get("fabric_manager") or {}
    if not manager.get("needed") or manager.get("ok") is not False:
        return
    driver = (draft.probe.get("gpus") or {}).get("driver")
    if manager.get("version_matches") is False:
        what = f"nvidia-fabricmanager is {manager.get('version')}, and the driver is {driver}"
    elif manager.get("active") is False:
        what = f"nvidia-fabricmanager is {manager.get('state') or 'not running'}"
    else:
        what = f"the GPUs' fabric is {', '.join(manager.get('gpu_states') or ['not set up'])}"
    draft.reject(
        "fabricmanager_not_running_or_version_mismatch",
        f"{what}: CUDA cannot start on GPUs that NVSwitches join (error 802)",
        variable="sglang_gpus",
        value=manager.get("version") or manager.get("state"),
        suggestion=f"install and start nvidia-fabricmanager {driver or 'of the version of the driver'}",
    )


def tell_fabric(draft: Draft, sizes: _plan_sizes.Sizes) -> None:
    """The decision about how the GPUs reach each other, and what a size that crosses a boundary costs."""
    fabric = draft.fabric()
    if len(draft.gpus()) < 2 or fabric["class"] == "unknown":
        return
    groups = [group for group in fabric.get("numa_groups") or [] if group]
    pairs = [group for group in fabric.get("nvlink_groups") or [] if len(group) > 1]
    text = {
        "nvlink_full": "all GPUs reach each other over NVLink",
        "nvlink_pairs": "NVLink joins pairs only, the rest is PCIe",
        "degraded_nvlink": f"GPU {', '.join(map(str, fabric['bad_gpus']))} is outside of NVLink",
        "pcie_only": "the GPUs reach each other over PCIe only",
    }.get(fabric["class"], fabric["class"])
    local_tp = max(1, sizes.tp // max(1, sizes.nnodes // max(1, sizes.pp)))
    if fabric["class"] == "nvlink_pairs" and pairs and local_tp > max(len(group) for group in pairs):
        width = max(len(group) for group in pairs)
        text += f"; tp {sizes.tp} crosses pairs, tp{width}pp{max(1, len(draft.gpus()) // width)} would not"
    elif fabric["class"] != "nvlink_full" and len(groups) > 1:
        widest = max(len(group) for group in groups)
        text += f", in {len(groups)} NUMA groups of {', '.join(str(len(group)) for group in groups)}"
        if local_tp > widest:
            text += f"; tp {sizes.tp} crosses the sockets, tp{widest}pp{len(groups)} would not"
    draft.decide("fabric", fabric["class"], text, {"numa_groups": groups, "bad_gpus": list(fabric["bad_gpus"])})


def _check_is_off(env: Mapping[str, str]) -> bool:
    def says(name: str, words: tuple[str, ...]) -> bool:
        return str(env.get(name, "")).strip().casefold() in words

    return says("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", ("0", "false", "no", "n")) or any(
        says(name, ("1", "true", "yes", "y"))
        for name in ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")
    )


def check_memory(draft: Draft, sizes: _plan_sizes.Sizes) -> None:
    """Relate the weights to the memory of the GPUs that share them."""
    if draft.on_cpu or not sizes.known:
        return
    memories = sorted(int(gpu["memory_mib"]) for gpu in draft.gpus() if gpu.get("memory_mib"))
    if not memories:
        return
    if sizes.tp > 1 and memories[0] < memories[-1] * 0.9:
        text = f"the GPUs of an instance must have equal memory, and these have {memories[0]} to {memories[-1]} MiB"
        if _check_is_off(draft.user_env):
            draft.warn("gpus_of_unequal_memory", text + "; SGLang's own check is off", variable="sglang_gpus")
        else:
            draft.reject(
                "gpus_of_unequal_memory",
                text,
                variable="sglang_gpus",
                value=draft.intent.get("gpus"),
                numbers={"smallest_mib": memories[0], "largest_mib": memories[-1]},
                suggestion="choose equal ones with sglang_gpus",
            )
    weights = draft.model.get("bytes") if draft.model.get("weights") == "complete" else None
    if not isinstance(weights, int) or weights <= 0 or any(gpu.get("mig") for gpu in draft.gpus()):
        return
    ranks = sizes.tp * sizes.pp
    gib = 1024.0**3
    room = memories[0] / 1024.0 * ranks
    need = weights / gib
    numbers = {"weights_gib": round(need, 1), "gpu_memory_gib": round(room, 1), "gpus": ranks}
    text = f"the weights are {need:.0f} GiB, and tp {sizes.tp} x pp {sizes.pp} has {room:.0f} GiB of GPU memory"
    # Weights that are quantised while they load, or that stay in main memory, are smaller on the GPU than on disk.
    smaller = draft.flag("cpu_offload_gb") or (
        draft.flag("quantization") and not (draft.config.get("quantization") or {}).get("method")
    )
    fraction = _plan_constraints.as_float(draft.flag("mem_fraction_static")) or 1 - _FREE_SHARE
    if need > room * 0.97 and not smaller:
        more = -(-need // max(1.0, memories[0] / 1024.0 * (1 - _FREE_SHARE)))
        draft.reject(
            "model_larger_than_gpu_memory",
            text,
            variable="sglang_parallelism",
            value=draft.intent.get("parallelism") or "auto",
            numbers=numbers,
            suggestion=f"at least {int(more)} such GPUs for the weights alone, or a quantised model",
        )
    elif need > room * fraction * 0.95:
        draft.warn(
            "little_memory_for_kv_cache",
            f"{text}: little is left for the KV cache",
            variable="sglang_parallelism",
            value=draft.intent.get("parallelism") or "auto",
        )


def check_arch(draft: Draft) -> None:
    """Refuse flags and quantisation methods for which the GPUs' architecture has no kernels."""
    archs = draft.archs()
    if draft.on_cpu:
        return
    for rule in _rules.ARCH_RULES:
        wrong = [arch for arch in archs if arch not in rule.archs]
        applies = _versions.within(draft.sglang_version, rule.sglang)
        if not wrong or applies is False:
            continue
        for key in rule.flags:
            value = draft.flag(key)
            if value not in rule.values:
                continue
            flag = draft.catalogue.flag(key)
            if applies is None or not set(wrong) & set(_rules.KNOWN_ARCHS):
                draft.warn(
                    "flag_on_arch_unknown",
                    f"whether this SGLang takes {flag}={value} on {', '.join(wrong)} is not known",
                    flag=flag,
                    value=value,
                    source=rule.source,
                )
                continue
            draft.reject(
                "flag_not_supported_on_arch",
                f"{flag}={value} has kernels for {', '.join(rule.archs)}, and the GPUs are {', '.join(wrong)}",
                flag=flag,
                variable="sglang_flags",
                value=value,
                suggestion=f"{flag} {rule.instead}",
                arch=", ".join(wrong),
                items=[f"{flag}={value}"],
                source=rule.source,
            )
    _check_other_devices(draft)
    _check_quantization(draft, archs)
    _check_fp8_cache(draft, archs)


def _check_other_devices(draft: Draft) -> None:
    if not (draft.probe.get("torch") or {}).get("cuda"):
        return
    for rule in _rules.OTHER_DEVICES:
        for key in rule.flags:
            value = draft.flag(key)
            if value not in rule.values:
                continue
            flag = draft.catalogue.flag(key)
            draft.reject(
                "flag_for_other_device",
                f"{flag}={value} is for {rule.device}, and the venv's torch is for CUDA",
                flag=flag,
                variable="sglang_flags",
                value=value,
                suggestion=f"{flag} {rule.instead}",
            )


def capability_number(arch: str) -> Optional[int]:
    """90 of ``sm_90``, 120 of ``sm_120``."""
    match = re.fullmatch(r"sm_([0-9]{2,3})", arch)
    return int(match[1]) if match else None


def _check_quantization(draft: Draft, archs: list[str]) -> None:
    given = draft.flag("quantization")
    method = str(given).casefold() if given else _plan_constraints.model_method(draft.config.get("quantization"))
    if not method:
        return
    row = next(
        (
            row
            for row in _rules.MIN_CAPABILITY
            if row.method == method and _versions.within(draft.sglang_version, row.sglang)
        ),
        None,
    )
    only = _rules.ONLY_ON.get(method)
    numbered = [(arch, capability_number(arch)) for arch in archs]
    wrong = [
        arch
        for arch, number in numbered
        if number is not None and ((row is not None and number < row.minimum) or (only and arch not in only))
    ]
    if not wrong:
        return
    minimum = row.minimum if row else 0
    needs = f"one of {', '.join(only)}" if only else f"SM{minimum} or newer"
    flag = draft.catalogue.flag("quantization")
    draft.reject(
        "quantization_not_supported_on_arch",
        f"{flag}={method} needs {needs} in SGLang {draft.sglang_version}, and the GPUs are {', '.join(wrong)}"
        if given
        else f"the model is quantised with {method}, which needs {needs} in SGLang {draft.sglang_version}, "
        f"and the GPUs are {', '.join(wrong)}",
        flag=flag,
        variable="sglang_flags" if given else "sglang_model_path",
        value=method,
        numbers={"minimum": minimum},
        suggestion="another quantisation, a newer SGLang or newer GPUs",
        arch=", ".join(wrong),
        items=[f"{flag}={method}"],
        source=_rules.MIN_CAPABILITY_SOURCE,
    )


def _check_fp8_cache(draft: Draft, archs: list[str]) -> None:
    old = [arch for arch in archs if (capability_number(arch) or 89) < 89]
    dtype = draft.flag("kv_cache_dtype")
    if dtype != "fp8_e4m3" or not old:
        return
    flag = draft.catalogue.flag("kv_cache_dtype")
    triton = [draft.flag(key) for key in ("attention_backend", "decode_attention_backend", "prefill_attention_backend")]
    text = f"{flag}=fp8_e4m3 has no Triton kernels below SM89, and the GPUs are {', '.join(old)}"
    if "triton" in triton:
        draft.reject(
            "flag_not_supported_on_arch",
            text,
            flag=flag,
            variable="sglang_flags",
            value=dtype,
            suggestion=f"{flag} fp8_e5m2 or auto",
            arch=", ".join(old),
            items=[f"{flag}={dtype}"],
            source="Triton: type fp8e4nv not supported in this architecture",
        )
    else:
        draft.warn("flag_on_arch_unknown", f"{text}: another attention backend may take it", flag=flag, value=dtype)
