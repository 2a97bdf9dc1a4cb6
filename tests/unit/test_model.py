# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What config.json and the names of files tell of a model; permissions are those of the service's user."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _model
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from hypothesis import given
from hypothesis import strategies as st

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "torch_dtype": "bfloat16",
    "quantization_config": FP8,
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
    "text_config": {
        **DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "quantization_config": INT4,
    },
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
}
QWEN_VL = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "thinker_config": {"text_config": {"num_experts": 128, "moe_intermediate_size": 768, "num_attention_heads": 32}},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "hidden_size": 4096,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            DEEPSEEK,
            {"architecture": "DeepseekV3ForCausalLM", "experts": 256, "shared_experts": 1, "experts_per_token": 8,
             "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "heads": 128,
             "kv_heads": 128, "layers": 61, "dense_layers": 3, "nextn_layers": 1, "kv_lora_rank": 512,
             "dtype": "bfloat16"},
        ),
        (
            KIMI,
            {"architecture": "KimiK25ForConditionalGeneration", "model_type": "kimi_k25", "experts": 384, "heads": 64,
             "hidden_size": 7168, "layers": 61, "dense_layers": 1},
        ),
        (MIXTRAL, {"experts": 8, "moe_intermediate_size": 14336, "kv_heads": 8, "quantization": None}),
        (QWEN_VL, {"experts": 128, "moe_intermediate_size": 768, "heads": 32, "kv_heads": 32}),
        (LLAMA, {"experts": None, "moe_intermediate_size": None, "heads": 32, "kv_heads": 32}),
        ({"model_type": "gpt_bigcode", "n_head": 16, "multi_query": True, "n_layer": 24},
         {"kv_heads": 1, "heads": 16, "layers": 24, "architecture": None}),
        ({"moe_num_experts": [64, 64], "num_attention_heads": 20}, {"experts": 64}),
        ({"num_experts": 0, "num_attention_heads": True, "hidden_size": "x"},
         {"experts": None, "heads": None, "hidden_size": None}),
    ],
)  # fmt: skip
def test_configs(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= _model.parse_config(config).items()


@pytest.mark.parametrize(
    ("config", "method", "block", "bits"),
    [
        (FP8, "fp8", [128, 128], None),
        (INT4, "compressed-tensors", [1, 32], 4),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": "128x128"}}}},
            "compressed-tensors", [128, 128], 8,
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
         "compressed-tensors", None, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", [1, 128], 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq", None, 4),
        ({"quant_method": "fp8"}, "fp8", None, None),
        ({"quant_method": "mxfp4"}, "mxfp4", [1, 32], None),
        ({"quant_algo": "NVFP4", "group_size": 16}, "modelopt", [1, 16], None),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "modelopt", None, None),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "modelopt", [1, 16], None),
    ],
)  # fmt: skip
def test_quantisation(config: dict[str, Any], method: str, block: list[int] | None, bits: int | None) -> None:
    found = _model.parse_quantization(config)
    assert found is not None
    assert (found["method"], found["block"], found["bits"]) == (method, block, bits)


@pytest.mark.parametrize("config", [None, {}, [], "fp8", {"quant_method": 4}])
def test_no_quantisation(config: Any) -> None:
    assert _model.parse_quantization(config) is None


def test_quantisation_of_the_language_part_counts() -> None:
    assert _model.parse_config(KIMI)["quantization"]["block"] == [1, 32]
    outer = {"quantization_config": FP8, "text_config": {"num_attention_heads": 4}}
    assert _model.parse_config(outer)["quantization"]["block"] == [128, 128]


def folder(base: Path, config: Any = LLAMA, **files: bytes) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (base / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (base / name).write_bytes(content)
    return base


def index(names: list[str], total: int | None = None) -> bytes:
    data: dict[str, Any] = {"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    if total is not None:
        data["metadata"] = {"total_size": total}
    return json.dumps(data).encode()


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
POINTER = b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("files", "weights", "missing"),
    [
        ({**dict.fromkeys(SHARDS, b"w" * 100), "model.safetensors.index.json": index(SHARDS, 290)}, "complete", []),
        ({SHARDS[0]: b"w", SHARDS[2]: b"w", "model.safetensors.index.json": index(SHARDS)}, "missing", [SHARDS[1]]),
        ({**dict.fromkeys(SHARDS, b"w"), SHARDS[1]: b"", "model.safetensors.index.json": index(SHARDS)},
         "missing", [SHARDS[1]]),
        ({**dict.fromkeys(SHARDS, b"w"), SHARDS[1]: POINTER, "model.safetensors.index.json": index(SHARDS)},
         "missing", [SHARDS[1]]),
        ({**dict.fromkeys(SHARDS, b"w" * 10), "model.safetensors.index.json": index(SHARDS, 300)}, "missing", []),
        ({SHARDS[0]: b"w", SHARDS[2]: b"w"}, "missing", [SHARDS[1]]),
        (dict.fromkeys(SHARDS, b"w"), "complete", []),
        ({"model.safetensors": b"w"}, "complete", []),
        ({"model.safetensors": POINTER}, "missing", ["model.safetensors"]),
        ({"pytorch_model.bin": b"w"}, "complete", []),
        ({"training_args.bin": b"w"}, "none", []),
        ({"model.safetensors.index.json": index(SHARDS)}, "missing", SHARDS),
        ({"model.safetensors.index.json": b"{", "model.safetensors": b"w"}, "complete", []),
        ({}, "none", []),
    ],
)  # fmt: skip
def test_weights(files: dict[str, bytes], weights: str, missing: list[str], tmp_path: Path) -> None:
    found = _model.read_model(Context(), str(folder(tmp_path / "m", LLAMA, **files)))
    assert (found["state"], found["weights"], found["missing"]) == ("ok", weights, missing)
    assert found["missing_count"] == len(missing)
    assert bool(found["message"]) == (weights == "missing")


def test_many_missing_files_are_counted_and_few_are_named(tmp_path: Path) -> None:
    names = [f"model-{i:05d}-of-00064.safetensors" for i in range(1, 65)]
    where = folder(tmp_path / "m", LLAMA, **{"model.safetensors.index.json": index(names)})
    found = _model.read_model(Context(), str(where))
    assert (found["missing_count"], len(found["missing"])) == (64, 5)


def test_a_link_that_leads_nowhere_is_a_missing_file(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", LLAMA, **{"model.safetensors.index.json": index(["a.safetensors"])})
    (where / "a.safetensors").symlink_to("../blobs/gone")
    assert _model.read_model(Context(), str(where))["missing"] == ["a.safetensors"]


def test_absent_empty_and_damaged(tmp_path: Path) -> None:
    nothing = _model.read_model(Context(), str(tmp_path / "nothing"))
    assert (nothing["state"], nothing["code"]) == ("absent", "model_path_absent")
    empty = _model.read_model(Context(), str(folder(tmp_path / "empty", None)))
    assert (empty["state"], empty["code"]) == ("absent", "model_config_absent")
    for text in (b"{", b"[]", b'"x"', b"\xff\xfe"):
        damaged = _model.read_model(Context(), str(folder(tmp_path / "damaged", None, **{"config.json": text})))
        assert (damaged["state"], damaged["code"]) == ("unreadable", "model_config_invalid")
        assert "config.json" in damaged["message"]
    assert _model.gather(Context())["code"] == "model_path_unset"


def test_a_byte_order_mark_and_a_modelopt_file(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + json.dumps(LLAMA).encode()
    quant = json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}).encode()
    where = folder(
        tmp_path / "m", None, **{"config.json": text, "hf_quant_config.json": quant, "model.safetensors": b"w"}
    )
    found = _model.read_model(Context(model_path=str(where)), str(where))
    assert (found["state"], found["heads"], found["quantization"]["block"]) == ("ok", 32, [1, 16])


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    found = _model.read_model(Context(), str(path))
    assert (found["state"], found["format"], found["weights"], found["architecture"]) == (
        "ok",
        "gguf",
        "complete",
        None,
    )


def open_up(path: Path) -> None:
    """Let everybody reach a folder below pytest's own, which is closed."""
    while str(path) not in ("/", "/tmp"):
        path.chmod(path.stat().st_mode | 0o055)
        path = path.parent


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("closed", "named"), [("m", "/m"), ("m/config.json", "/m/config.json"), ("m/a.safetensors", "/m/a.safetensors")]
)
def test_what_the_services_user_may_not_read_is_unreadable(closed: str, named: str, tmp_path: Path) -> None:
    where = folder(tmp_path / "m", LLAMA, **{"a.safetensors": b"w"})
    open_up(where)
    context = Context(user="nobody", model_path=str(where))
    allowed = _model.gather(context)
    assert (allowed["state"], allowed["checked_as"], allowed["weights"]) == ("ok", "nobody", "complete")
    (tmp_path / closed).chmod(0o700 if closed == "m" else 0o600)
    found = _model.gather(context)
    assert (found["state"], found["code"]) == ("unreadable", "model_unreadable")
    assert found["message"].startswith("nobody may not read ")
    assert named in found["message"]
    assert os.geteuid() == 0


def test_a_user_that_does_not_exist_yet_is_not_an_error(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", LLAMA, **{"a.safetensors": b"w"})
    found = _model.read_model(Context(user="no-such-user-here"), str(where))
    assert (found["state"], found["checked_as"]) == ("ok", None)


@pytest.mark.parametrize(
    ("environment", "home", "cache"),
    [
        ({}, "/home/u", "/home/u/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/home/u", "/c/huggingface/hub"),
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/c"}, "/home/u", "/hf/hub"),
        ({"HF_HUB_CACHE": "/hub", "HF_HOME": "/hf"}, "/home/u", "/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/old"}, None, "/old"),
        ({}, None, None),
    ],
)
def test_hub_cache(environment: dict[str, str], home: str | None, cache: str | None) -> None:
    assert _model.hub_cache(environment, home) == cache


def test_hub_names_in_the_cache_and_not(tmp_path: Path) -> None:
    top = tmp_path / "hf/hub/models--moonshotai--Kimi-K2.6"
    (top / "refs").mkdir(parents=True)
    (top / "refs/main").write_text("abc123")
    folder(top / "snapshots/abc123", KIMI, **{"model.safetensors": b"w"})
    context = Context(root=str(tmp_path), environment={"HF_HOME": "/hf"})
    found = _model.read_model(context, "moonshotai/Kimi-K2.6")
    assert (found["state"], found["experts"], found["weights"]) == ("ok", 384, "complete")
    assert found["snapshot"] == "/hf/hub/models--moonshotai--Kimi-K2.6/snapshots/abc123"
    other = _model.read_model(context, "moonshotai/Other")
    assert (other["state"], other["code"], other["path"]) == ("hub", "model_not_cached", "moonshotai/Other")


@pytest.mark.parametrize(
    ("path", "state", "code"),
    [
        ("s3://bucket/model", "hub", "model_remote"),
        ("./model", "absent", "model_path_relative"),
        ("model", "absent", "model_path_relative"),
        ("a/b/c", "absent", "model_path_relative"),
        ("~/model", "absent", "model_path_relative"),
    ],
)
def test_other_names(path: str, state: str, code: str) -> None:
    found = _model.read_model(Context(environment={}), path)
    assert (found["state"], found["code"]) == (state, code)


def test_every_state_has_every_key(tmp_path: Path) -> None:
    wanted = {
        "state", "path", "architecture", "model_type", "experts", "hidden_size", "intermediate_size",
        "moe_intermediate_size", "heads", "kv_heads", "layers", "quantization", "weights",
    }  # fmt: skip
    for path in (str(folder(tmp_path / "m")), str(tmp_path / "x"), "a/b", "rel"):
        assert wanted <= set(_model.gather(Context(model_path=path, environment={})))
    assert wanted <= set(_model.gather(Context()))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["text_config", "n_routed_experts", "num_experts", "quantization_config", "quant_method", "config_groups",
             "weights", "group_size", "weight_block_size", "architectures", "hidden_size", "weight_map", "metadata"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@given(_JSON)
def test_hostile_configs_never_raise(config: Any) -> None:
    _model.parse_quantization(config)
    _model.expected_files(config)
    if isinstance(config, dict):
        found = _model.parse_config(config)
        assert all(found[key] is None or isinstance(found[key], int) for key in ("experts", "heads", "layers"))
        json.dumps(found)
