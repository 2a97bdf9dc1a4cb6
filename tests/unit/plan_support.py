# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recorded probes and the real argparse definitions of SGLang, for the tests of plans."""

from __future__ import annotations

import copy
import functools
import json
import lzma
import pathlib
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.filter import intents as intents_filter
from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents, _launch_plan

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
VERSIONS = ("0.5.6", "0.5.9", "0.5.12", "0.5.15.post1", "0.5.18", "0.5.23")
_FIELDS = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}
_TYPES = {"loads": "json", "json_list_type": "json", "human_readable_int": "int", "int": "int", "float": "float"}


def definition(action: dict[str, Any]) -> dict[str, Any]:
    """An action of the real parser in the shape of ``probe.server_args.flags``."""
    options = action["option_strings"]
    wanted = "--" + action["dest"].replace("_", "-")
    flag = wanted if wanted in options else next(option for option in options if option.startswith("--"))
    kind = {
        "_StoreTrueAction": "store_true",
        "BooleanOptionalAction": "boolean_optional",
        "DeprecatedStoreTrueAction": "store_true",
        "DeprecatedStoreConstAction": "store_const",
        "DeprecatedAction": "store_true",
    }.get(action["action"], "store")
    deprecated = None
    if action["action"].startswith("Deprecated"):
        message = action.get("error_message") or ""
        deprecated = {"replacement": action.get("new_flag"), "message": message, "removed": bool(message)}
    entry: dict[str, Any] = {
        "flag": flag,
        "aliases": [option for option in options if option != flag],
        "type": "bool" if kind != "store" else _TYPES.get(action.get("type") or "str", "str"),
        "nargs": action.get("nargs"),
        "choices": action.get("choices"),
        "action": kind,
        "deprecated": deprecated,
    }
    if action.get("type") == "human_readable_int":
        entry["parser"] = "human_readable_int"
    return entry


@functools.cache
def dumps() -> dict[str, list[dict[str, Any]]]:
    """The arguments of the real parsers, by version of SGLang."""
    packed = lzma.decompress((FIXTURES / "sglang_flags" / "argparse_dumps.json.xz").read_bytes())
    found: dict[str, list[dict[str, Any]]] = json.loads(packed)
    return found


@functools.cache
def _server_args(version: str) -> str:
    read = FIXTURES / "probes" / "argparse" / f"read-{version}.json"
    if read.exists():
        return read.read_text()
    flags = {}
    for dumped in dumps()[version]:
        # SGLang's field is the key, as in what the probe reads; argparse calls it otherwise in old versions.
        dumped["dest"] = _FIELDS.get(dumped["dest"], dumped["dest"])
    for action in sorted(dumps()[version], key=lambda row: row["action"].startswith("Deprecated")):
        entry = definition(action)
        key = (
            action["dest"]
            if action["dest"] not in flags and not entry["deprecated"]
            else entry["flag"][2:].replace("-", "_")
        )
        flags[key] = entry
    names = FIXTURES / "probes" / "argparse" / f"env-{version}.json"
    env_vars = json.loads(names.read_text()) if names.exists() else []
    return json.dumps(
        {"state": "ok", "sglang_version": version, "layout": "dump", "flags": flags, "env_vars": env_vars}
    )


def server_args(version: str) -> dict[str, Any]:
    """``probe.server_args`` of a version, from the dump of its real parser."""
    result: dict[str, Any] = json.loads(_server_args(version))
    return result


@functools.cache
def _probe(name: str) -> str:
    return (FIXTURES / "probes" / f"{name}.json").read_text()


def probe(name: str, release: Optional[str] = None, **changes: Any) -> dict[str, Any]:
    """A recorded probe, with the arguments of SGLang ``release``; ``changes`` are merged into its parts."""
    result: dict[str, Any] = json.loads(_probe(name))
    version = release or result["server_args"].get("$argparse")
    result["server_args"] = server_args(version)
    result["sglang"]["version"] = version
    for part, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(part), dict):
            result[part].update(copy.deepcopy(value))
        else:
            result[part] = copy.deepcopy(value)
    return result


def broken(name: str, use: str, found: str, code: str, kind: Optional[str], summary: str = "mend it") -> dict[str, Any]:
    """A backend in a bad state, in the shape of ``probe.backends``."""
    remedy = {"kind": kind, "summary": summary, "steps": []} if kind else None
    base = {
        "state": found,
        "code": code,
        "message": f"{name} says {code}",
        "level": "import",
        "remedy": remedy,
        "evidence": {},
    }
    return {**base, "distributions": [], "fatal_for_service": False, "uses": {use: dict(base)}}


def make(
    the_probe: dict[str, Any], host: str = "gpu-01", instance: str = "default", **variables: Any
) -> dict[str, Any]:
    """Plan as the roles do: the user's variables through ``intents``, then ``make_plan``."""
    model = (the_probe.get("model") or {}).get("path")
    given = {"sglang_venv": "/opt/sglang/venv", "sglang_model_path": model}
    given.update({f"sglang_{key}": value for key, value in variables.items()})
    wanted = _intents.intents(given, intents_filter._parse)
    return _launch_plan.make_plan(
        wanted["instances"].get(instance),
        the_probe,
        wanted["backends"],
        wanted["settings"],
        wanted["problems"],
        host,
    )


def codes(rows: list[dict[str, Any]]) -> list[str]:
    return [row["code"] for row in rows]


def rejection(plan: dict[str, Any], code: str) -> dict[str, Any]:
    found = [row for row in plan["rejections"] if row["code"] == code]
    assert found, f"no rejection {code} among {codes(plan['rejections'])}"
    return found[0]


def decision(plan: dict[str, Any], question: str) -> dict[str, Any]:
    found = [row for row in plan["decisions"] if row["question"] == question]
    assert found, f"no decision {question} among {[row['question'] for row in plan['decisions']]}"
    return found[0]


def flag_values(argv: list[str], flag: str) -> list[str]:
    """The words after ``flag`` up to the next flag."""
    position = argv.index(flag)
    values = []
    for word in argv[position + 1 :]:
        if word.startswith("--"):
            break
        values.append(word)
    return values


def after(argv: list[str], first: str) -> list[str]:
    return argv[argv.index(first) :]
