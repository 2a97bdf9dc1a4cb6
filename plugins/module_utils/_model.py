# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what a plan must know of a model, from its config.json and the names of its files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _drop
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context

# Where models of several parts keep the language model's sizes.
_NESTED = ("text_config", "language_config", "llm_config", "language_model_config", "thinker_config", "decoder_config")
_KEYS: dict[str, tuple[str, ...]] = {
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_hidden_dim", "moe_ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    "nextn_layers": ("num_nextn_predict_layers",),
    "kv_lora_rank": ("kv_lora_rank",),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions", "seq_length"),
}
_LIMIT = 1 << 24
_HUB = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z")
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<total>\d{5,6})(?P<end>\.safetensors|\.bin|\.gguf)\Z")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")
_LFS = b"version https://git-lfs"
_SHOWN = 5


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration over the whole's: inner values win, at any depth."""
    out = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    if isinstance(config.get("quantization_config"), Mapping):
        out["quantization_config"] = config["quantization_config"]
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            out.update({k: v for k, v in language_part(inner).items() if v is not None})
            break
    return out


def _count(value: Any) -> Optional[int]:
    """A count; of a list (one for each layer) the largest."""
    if isinstance(value, (list, tuple)):
        counts = [item for item in map(_count, value) if item is not None]
        return max(counts) if counts else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if not math.isnan(value) and abs(value) < 1 << 53 and int(value) == value else None


def parse_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of contracts.md's ``model`` from a parsed config.json; None for what it does not say.

    ``experts`` is None for a dense model. A mixture of experts without an intermediate size of its own for them uses
    ``intermediate_size`` (Mixtral's kind), and that is what ``moe_intermediate_size`` then says.
    """
    part = language_part(config)
    out: dict[str, Any] = {}
    for name, keys in _KEYS.items():
        out[name] = next((count for count in (_count(part.get(key)) for key in keys) if count is not None), None)
    if not out["experts"]:
        out["experts"] = None
    elif out["moe_intermediate_size"] is None:
        out["moe_intermediate_size"] = out["intermediate_size"]
    if out["kv_heads"] is None:
        out["kv_heads"] = 1 if part.get("multi_query") is True else out["heads"]
    architectures = config.get("architectures") or part.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    out["architecture"] = first if isinstance(first, str) else None
    out["model_type"] = config["model_type"] if isinstance(config.get("model_type"), str) else None
    dtype = part.get("dtype") or part.get("torch_dtype")
    out["dtype"] = dtype if isinstance(dtype, str) else None
    out["quantization"] = parse_quantization(part.get("quantization_config"))
    return out


def parse_quantization(config: Any) -> Optional[dict[str, Any]]:
    """``{method, block, bits}`` of a ``quantization_config`` (or ``hf_quant_config.json``), None where there is none.

    ``block`` is ``[rows, columns]`` of weights that share a scale, None where scales are per tensor or per channel.
    """
    if not isinstance(config, Mapping):
        return None
    inner = config.get("quantization")
    if isinstance(inner, Mapping) and "quant_method" not in config:
        config = dict(inner, quant_method="modelopt")
    method = config.get("quant_method") or config.get("quantization_method")
    algorithm = config.get("quant_algo")
    if not isinstance(method, str):
        if not isinstance(algorithm, str):
            return None
        method = "modelopt"
    out: dict[str, Any] = {"method": method, "block": None, "bits": _count(config.get("bits"))}
    if isinstance(algorithm, str):
        out["algorithm"] = algorithm
    block: Any = config.get("weight_block_size")
    group: Any = config.get("group_size") or config.get("q_group_size")
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        for entry in groups.values():
            weights = entry.get("weights") if isinstance(entry, Mapping) else None
            if isinstance(weights, Mapping):
                block = block or weights.get("block_structure")
                group = group or weights.get("group_size")
                out["bits"] = out["bits"] or _count(weights.get("num_bits"))
    if isinstance(block, str):
        block = [int(number) for number in re.findall(r"\d{1,6}", block)]
    sizes = [_count(size) for size in block] if isinstance(block, (list, tuple)) else []
    if len(sizes) == 2 and all(size and size > 0 for size in sizes):
        out["block"] = sizes
    elif (_count(group) or 0) > 0:
        out["block"] = [1, _count(group)]
    elif method == "mxfp4" or (isinstance(algorithm, str) and algorithm.upper().startswith("MXFP")):
        out["block"] = [1, 32]
    elif isinstance(algorithm, str) and "NVFP4" in algorithm.upper():
        out["block"] = [1, 16]
    return out


def expected_files(index: Any) -> Optional[dict[str, Any]]:
    """``{files: [name], total_size}`` of a ``*.index.json``, None where it is not one."""
    weights = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weights, Mapping) or not weights:
        return None
    metadata = index.get("metadata")
    total = _count(metadata.get("total_size")) if isinstance(metadata, Mapping) else None
    return {"files": sorted({str(name) for name in weights.values()}), "total_size": total}


def check_shards(names: Mapping[str, int]) -> list[str]:
    """Names of shards that numbered file names (``…-00002-of-00005…``) promise and ``names`` (to size) lacks."""
    missing: set[str] = set()
    for name in names:
        match = _SHARD.match(name)
        if match and int(match.group("total")) <= 10000:
            digits = len(match.group("number"))
            for number in range(1, int(match.group("total")) + 1):
                sibling = f"{match.group('stem')}-{number:0{digits}d}-of-{match.group('total')}{match.group('end')}"
                if sibling not in names:
                    missing.add(sibling)
    return sorted(missing)


def read_weights(folder: str) -> dict[str, Any]:
    """``{weights: complete|missing|none, files, bytes, missing, missing_count, unreadable, message}`` of a folder.

    Files that are still Git LFS pointers count as missing, and so do all shards that the index names and the folder
    lacks. Fewer bytes than the index's total mean that a shard was cut off.
    """
    out: dict[str, Any] = {"weights": "none", "files": 0, "bytes": 0, "missing": [], "missing_count": 0, "message": ""}
    sizes: dict[str, int] = {}
    for entry in os.scandir(folder):
        if entry.name.endswith(_WEIGHTS) and entry.name not in _NOT_WEIGHTS:
            with contextlib.suppress(OSError):  # a link that leads nowhere is a missing file
                sizes[entry.name] = entry.stat().st_size
    pointers = sorted(name for name, size in sizes.items() if size < 1024 and _is_pointer(os.path.join(folder, name)))
    whole = {name: size for name, size in sizes.items() if size > 0 and name not in pointers}
    expected = None
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json", "consolidated.safetensors.index.json"):
        expected = expected_files(_read_json(os.path.join(folder, name)))
        if expected:
            break
    if expected:
        missing = [name for name in expected["files"] if name not in whole]
        used = {name: whole[name] for name in expected["files"] if name in whole}
    else:
        missing, used = sorted({*check_shards(whole), *(name for name in sizes if name not in whole)}), whole
    out.update(files=len(used), bytes=sum(used.values()), missing=missing[:_SHOWN], missing_count=len(missing))
    out["unreadable"] = [name for name in used if not _readable(os.path.join(folder, name))][:_SHOWN]
    if missing:
        out.update(weights="missing", message=f"{len(missing)} weight files are missing, among them {missing[0]}")
        if pointers:
            out["message"] = f"{len(pointers)} weight files are Git LFS pointers, among them {pointers[0]}"
    elif used:
        total = expected["total_size"] if expected else None
        # Quantised tensors can be packed below the index's figure by little; a lost shard is percents.
        if total and out["bytes"] < total * 0.98:
            out.update(weights="missing", message=f"{out['bytes']} bytes of weights, the index says {total}")
        else:
            out["weights"] = "complete"
    return out


def _readable(path: str) -> bool:
    return os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)


def _is_pointer(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(len(_LFS)) == _LFS
    except OSError:
        return False


def _read_json(path: str) -> Any:
    try:
        with open(path, "rb") as stream:
            return json.loads(stream.read(_LIMIT).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return None


def hub_cache(environment: Mapping[str, str], home: Optional[str]) -> Optional[str]:
    """The folder in which the Hugging Face hub keeps models, by the rules of its client."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environment.get(name):
            return os.path.join(environment[name], below).rstrip("/")
    base = environment.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else None)
    return os.path.join(base, "huggingface", "hub") if base else None


def cached_snapshot(context: Context, name: str, cache: str, revision: str = "main") -> Optional[str]:
    """The folder of a hub model's snapshot in the cache (a path of the host), or None."""
    top = f"{cache}/models--{name.replace('/', '--')}"
    commit = (context.read(f"{top}/refs/{revision}") or revision).strip()
    folder = f"{top}/snapshots/{commit}"
    return folder if re.match(r"[\w.-]+\Z", commit) and os.path.isdir(context.path(folder)) else None


@contextlib.contextmanager
def _as_user(user: Optional[str]) -> Iterator[Optional[str]]:
    """Read files with the rights of ``user`` where this process may; yields whose rights they are (None: its own)."""
    identity = None
    if user and os.geteuid() == 0:
        try:
            identity = _drop.identity_of_user(user)
        except _drop.CannotDrop:
            identity = None
    if identity is None or identity.uid == 0:
        yield None
        return
    with _drop.acting_as(identity):
        yield identity.name


_EMPTY: dict[str, Any] = dict.fromkeys(
    (*_KEYS, "architecture", "model_type", "dtype", "quantization", "code", "checked_as", "snapshot", "format")
)


def read_model(context: Context, path: str) -> dict[str, Any]:
    """``model`` of contracts.md for a path or a hub name, seen with the rights of the service's user where possible.

    States: ``ok``; ``absent`` (``model_path_absent``, ``model_config_absent``); ``unreadable``
    (``model_unreadable``: the user may not; ``model_config_invalid``); ``hub``: a name that is not in the cache.
    """
    out = dict(_EMPTY, state="ok", path=path, message="", weights="none", missing=[], missing_count=0)
    folder = path
    if not os.path.isabs(path):
        if not _HUB.match(path) or path.startswith("."):
            if _REMOTE.match(path):
                return dict(out, state="hub", code="model_remote", message=f"{path} is fetched when the service starts")
            return dict(
                out,
                state="absent",
                code="model_path_relative",
                message=f"{path!r} is neither an absolute path nor the name of a hub model (owner/name)",
            )
        cached = _cached(context, path)
        if cached is None:
            return dict(out, state="hub", code="model_not_cached", message=f"{path} is not in the service's hub cache")
        folder = out["snapshot"] = cached
    with _as_user(context.user) as user:
        out["checked_as"] = user
        _read_folder(context.path(folder), folder, out)
    return out


def _cached(context: Context, name: str) -> Optional[str]:
    environment = context.environment or {}
    home = environment.get("HOME")
    if not home and context.user:
        try:
            home = _drop.identity_of_user(context.user).home
        except _drop.CannotDrop:
            home = None
    cache = hub_cache(environment, home)
    return cached_snapshot(context, name, cache) if cache else None


def _read_folder(real: str, shown: str, out: dict[str, Any]) -> None:
    """Fill ``out`` from the folder ``real``, called ``shown`` in messages."""
    config_path = os.path.join(real, "config.json")
    try:
        if os.path.isfile(real) and real.endswith(".gguf"):
            size = os.stat(real).st_size
            open(real, "rb").close()
            out.update(format="gguf", weights="complete" if size else "missing", files=1, bytes=size)
            return
        os.stat(real)
        with open(config_path, "rb") as stream:
            text = stream.read(_LIMIT)
        out.update(read_weights(real), format="folder")
        unreadable = out.pop("unreadable")
        if unreadable:
            raise PermissionError(errno.EACCES, "not readable", os.path.join(real, unreadable[0]))
    except OSError as error:
        who = out["checked_as"] or "this user"
        if error.errno in (errno.EACCES, errno.EPERM):
            where = error.filename if isinstance(error.filename, str) else real
            place = shown + where[len(real) :] if where.startswith(real) else shown
            out.update(state="unreadable", code="model_unreadable", message=f"{who} may not read {place}")
        elif error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.exists(real):
            out.update(state="absent", code="model_path_absent", message=f"there is no {shown}")
        elif error.errno in (errno.ENOENT, errno.ENOTDIR):
            out.update(state="absent", code="model_config_absent", message=f"{shown} has no config.json")
        else:
            out.update(state="unreadable", code="model_unreadable", message=f"{shown}: {error.strerror}")
        return
    try:
        config = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        config, problem = None, f"{type(error).__name__}"
    else:
        problem = "it is no JSON object"
    if not isinstance(config, Mapping):
        message = f"{shown}/config.json cannot be read: {problem}"
        out.update(state="unreadable", code="model_config_invalid", message=message)
        return
    out.update(parse_config(config))
    if out["quantization"] is None:
        out["quantization"] = parse_quantization(_read_json(os.path.join(real, "hf_quant_config.json")))


def gather(context: Context) -> dict[str, Any]:
    """``model`` of the probe; state ``absent`` with code ``model_path_unset`` where no model is asked for."""
    if not context.model_path:
        empty = dict(_EMPTY, state="absent", path=None, weights="none", missing=[], missing_count=0)
        return dict(empty, code="model_path_unset", message="no model path was given")
    return read_model(context, context.model_path)
