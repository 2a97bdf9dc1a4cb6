#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a tiny model on the spot: a 2-layer config and a byte-level tokenizer, no hub, no weights.

usage: make_tiny_model.py OUTDIR [llama|qwen3moe]      (serve it with ``--load-format dummy``)

The tokenizer file is written directly, so that no library is needed; its vocabulary is the 256 bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

MODELS = {"tiny-llama": "llama", "tiny-moe": "qwen3moe"}
SPECIAL = ("<s>", "</s>", "<unk>")


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes (GPT-2's table), sorted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return sorted([chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))])


def tokenizer() -> dict[str, Any]:
    """A complete ``tokenizer.json``: byte-level BPE without merges."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *byte_alphabet()])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": dict(byte_level, add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def config(kind: str) -> dict[str, Any]:
    """``config.json`` of a dense Llama or of a Qwen3 mixture of experts."""
    base: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    if kind == "llama":
        return {**base, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 128}
    return {
        **base,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def files(kind: str) -> dict[str, str]:
    """All files of the model by name."""
    chat = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 2048,
        "chat_template": chat,
    }
    return {
        "config.json": json.dumps(config(kind), indent=1) + "\n",
        "tokenizer.json": json.dumps(tokenizer(), ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1) + "\n",
    }


def ensure(out: Path, kind: str) -> None:
    """Write the model where it is missing or differs; several callers at once do no harm."""
    wanted = files(kind)
    if all(
        (out / name).is_file() and (out / name).read_text(encoding="utf-8") == text for name, text in wanted.items()
    ):
        return
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, text in wanted.items():
        (part / name).write_text(text, encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        (part / name).replace(out / name)
    part.rmdir()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    ensure(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else "llama")
