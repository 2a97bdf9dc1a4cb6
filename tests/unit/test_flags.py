# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The user's flags against the real definitions of six SGLang versions."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _flags, _server_args

from tests.unit.plan_support import VERSIONS, codes, dumps, server_args


def read(version: str, **flags: Any) -> _flags.Reading:
    return _flags.read_flags(flags, _flags.Catalogue(server_args(version)))


def words(version: str, **flags: Any) -> list[str]:
    reading = read(version, **flags)
    assert reading.rejections == []
    return [word for given in reading.given.values() for word in _flags.tokens(given)[0]]


def real_parser(version: str) -> argparse.ArgumentParser:
    """A parser with the real names, numbers of values, choices and types of a version."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    convert: dict[Any, Any] = {"int": int, "float": float, "loads": json.loads, "json_list_type": json.loads}
    convert["human_readable_int"] = lambda text: int(text) if text.isdigit() else text
    for action in dumps()[version]:
        options = action["option_strings"]
        if action["action"] == "BooleanOptionalAction":
            parser.add_argument(options[0], dest=action["dest"], action=argparse.BooleanOptionalAction)
        elif action.get("nargs") == 0 or "StoreConst" in action["action"]:
            parser.add_argument(*options, dest=action["dest"], action="store_true")
        else:
            parser.add_argument(
                *options,
                dest=action["dest"],
                nargs=action.get("nargs"),
                choices=action.get("choices"),
                type=convert.get(action.get("type"), str),
            )
    return parser


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_of_every_version_is_known_by_all_its_names(version: str) -> None:
    catalogue = _flags.Catalogue(server_args(version))
    for key, entry in server_args(version)["flags"].items():
        for name in (entry["flag"], *entry["aliases"]):
            found = catalogue.resolve(name)
            assert found["kind"] == ("deprecated" if entry["deprecated"] else found["kind"]), name
            assert found["key"] == key, name
            assert found["kind"] in ("exact", "alias", "deprecated"), name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_index_says_what_the_host_side_says(version: str) -> None:
    definitions = server_args(version)
    catalogue = _flags.Catalogue(definitions)
    names = [
        *definitions["flags"],
        "tp",
        "pp",
        "dp",
        "ep",
        "model",
        "cuda_graph_max_bs",
        "nonsense",
        "max-running",
        "no-x",
    ]
    for name in names:
        assert catalogue.resolve(name) == _server_args.resolve_flag(definitions, name), name


def test_sizes_have_one_name_where_the_definitions_list_them_under_argparses_name() -> None:
    definitions = {
        "state": "ok",
        "flags": {"tensor_parallel_size": {"flag": "--tensor-parallel-size", "aliases": ["--tp-size"], "type": "int"}},
    }
    catalogue = _flags.Catalogue(definitions, "0.5.6")
    for name in ("tp_size", "--tensor-parallel-size", "tensor_parallel_size"):
        reading = _flags.read_flags({name: 4}, catalogue)
        assert reading.value("tp_size") == 4
        assert _flags.tokens(reading.given["tp_size"])[0] == ["--tp-size", "4"]
    assert "tensor_parallel_size" in definitions["flags"]


def sample(entry: dict[str, Any]) -> Any:
    if entry["action"] != "store":
        return True
    if entry["flag"] in _flags.JSON_TEXT and entry["type"] != "json":
        return '{"a": [1, "x y"]}'
    value: Any = entry["choices"][0] if entry["choices"] else None
    if value is None:
        value = {"int": 3, "float": 0.5, "json": {"a": [1, "x y"]}}.get(entry["type"], "-a b%$")
    if entry["nargs"] in ("+", "*") and str(value).startswith("-"):
        value = "a b"
    return [value, value] if entry["nargs"] in ("+", "*") else value


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_is_taken_by_the_real_parser_with_the_value_that_was_given(version: str) -> None:
    parser = real_parser(version)
    definitions = server_args(version)["flags"]
    for key, entry in definitions.items():
        if entry["deprecated"] or key in _flags._intents.SECRET_FLAGS:
            continue
        value = sample(entry)
        argv = words(version, **{key: value})
        parsed = parser.parse_args(argv)
        dest = next(action.dest for action in parser._actions if entry["flag"] in action.option_strings)
        assert getattr(parsed, dest) == value, key


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("0.5.23", {"cuda_graph_max_bs": 64}, ["--cuda-graph-max-bs-decode", "64"]),
        ("0.5.18", {"cuda_graph_max_bs": 64}, ["--cuda-graph-max-bs-decode", "64"]),
        ("0.5.12", {"cuda_graph_max_bs": 64}, ["--cuda-graph-max-bs", "64"]),
        ("0.5.18", {"stream_output": True}, ["--incremental-streaming-output"]),
        ("0.5.6", {"stream_output": True}, ["--stream-output"]),
        ("0.5.23", {"enable_deepep_waterfill": True}, ["--enable-waterfill"]),
        ("0.5.18", {"enable_breakable_cuda_graph": True}, ["--cuda-graph-backend-prefill", "breakable"]),
        (
            "0.5.23",
            {"disable_cuda_graph": True},
            ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"],
        ),
        ("0.5.23", {"disable_cuda_graph": False}, []),
        ("0.5.15.post1", {"nsa_prefill_backend": "fa3"}, ["--dsa-prefill-backend", "fa3"]),
    ],
)
def test_renamed_flags_are_written_under_their_new_name(
    version: str, given: dict[str, Any], expected: list[str]
) -> None:
    assert words(version, **given) == expected


@pytest.mark.parametrize(
    ("version", "given", "code", "suggestion"),
    [
        ("0.5.23", {"pp": 2}, "ambiguous_flag", "--pp-size"),
        ("0.5.23", {"max_runing_requests": 2}, "unknown_flag", "--max-running-requests"),
        ("0.5.18", {"enable_expert_distribution_metrics": True}, "flag_removed", None),
        ("0.5.23", {"load_format": "safetensor"}, "flag_choice", "safetensors"),
        ("0.5.23", {"tp_size": True}, "flag_type", "a whole number"),
        ("0.5.23", {"tp_size": "eight"}, "flag_type", "a whole number"),
        ("0.5.23", {"tp_size": [4, 8]}, "flag_type", "one value"),
        ("0.5.23", {"tp_size": 4, "tensor-parallel-size": 8}, "flag_given_twice", None),
        ("0.5.23", {"trust_remote_code": "maybe"}, "flag_type", "true or false"),
        ("0.5.23", {"mem_fraction_static": "most"}, "flag_type", "a number"),
        ("0.5.23", {"cuda_graph_bs_decode": []}, "flag_type", "at least one value"),
        ("0.5.23", {"cuda_graph_bs_decode": [1, "x"]}, "flag_type", "a whole number"),
        ("0.5.23", {"mm_process_config": "{not json"}, "flag_type", None),
        ("0.5.23", {"served_model_name": "a\nb"}, "flag_type", None),
        ("0.5.23", {"context_length": "long"}, "flag_type", "a whole number"),
        ("0.5.23", {"a b": 1}, "invalid_flag", None),
        ("0.5.23", {"api_key": "x"}, "secret_in_flags", None),
        ("0.5.23", {"api-k": "x"}, "secret_in_flags", None),
    ],
)
def test_bad_flags_are_refused(version: str, given: dict[str, Any], code: str, suggestion: str | None) -> None:
    reading = read(version, **given)
    assert codes(reading.rejections) == [code]
    if suggestion:
        assert reading.rejections[0]["suggestion"] == suggestion
    assert reading.rejections[0]["message"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tp": 8}, ["--tp-size", "8"]),
        ({"--tp-size": "8"}, ["--tp-size", "8"]),
        ({"tensor_parallel_size": 8}, ["--tp-size", "8"]),
        ({"tp_size": 8, "tp-size": 8}, ["--tp-size", "8"]),
        ({"tp_size": 8.0}, ["--tp-size", "8"]),
        ({"context_length": "128k"}, ["--context-length", "128k"]),
        ({"trust_remote_code": "true"}, ["--trust-remote-code"]),
        ({"trust_remote_code": False, "context_length": None}, []),
        ({"reasoning_parser": False}, []),
        ({"dllm_fdfo": False}, ["--no-dllm-fdfo"]),
        ({"dllm_fdfo": True}, ["--dllm-fdfo"]),
        ({"no_dllm_fdfo": True}, ["--no-dllm-fdfo"]),
        ({"cuda_graph_bs_decode": [1, 2, 4]}, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ({"cuda_graph_bs_decode": "1 2 4"}, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ({"cuda_graph_bs_decode": 4}, ["--cuda-graph-bs-decode", "4"]),
        ({"lora_paths": {"a": "/x", "b": "/y"}}, ["--lora-paths", "a=/x", "b=/y"]),
        ({"mm_process_config": {"image": {"max": 1}}}, ["--mm-process-config", '{"image":{"max":1}}']),
        ({"json_model_override_args": {"a": None, "b": "ü"}}, ["--json-model-override-args", '{"a":null,"b":"ü"}']),
        ({"chat_template": "-x"}, ["--chat-template=-x"]),
        ({"chunked_prefill_size": -1}, ["--chunked-prefill-size", "-1"]),
        ({"model_checksum": True}, ["--model-checksum"]),
    ],
)
def test_yaml_types_become_what_argparse_takes(given: dict[str, Any], expected: list[str]) -> None:
    assert words("0.5.23", **given) == expected
    real_parser("0.5.23").parse_args(expected)


def test_abbreviations_are_written_out_and_told() -> None:
    assert codes(read("0.5.23", tp=8).warnings) == ["flag_abbreviated"]


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("--x-y", {"x_y": "="}),
        ("--x=breakable", {"x": "breakable"}),
        ("--attn-dp-size <dp-size>", {"attn_dp_size": "<dp_size>"}),
        ("--a-{b,c}=off", {"a_b": "off", "a_c": "off"}),
        ("--x <whatever>", {}),
        ("use something else", {}),
        ("", {}),
    ],
)
def test_words_for_replacements(text: str, targets: dict[str, Any]) -> None:
    assert _flags._replacement(text) == targets


def test_environment_variables_unknown_and_renamed() -> None:
    catalogue = _flags.Catalogue(
        {**server_args("0.5.23"), "env_vars_deprecated": {"SGLANG_OLD": {"replacement": "SGLANG_PORT", "message": ""}}}
    )
    env, warnings = _flags.read_env(
        {
            "SGLANG_OLD": "1",
            "SGLANG_WARMUP_TIMEOT": "9",
            "SGLANG_WARMUP_TIMEOUT": "9",
            "SGLANG_MOONCAKE_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "128",
            "NCCL_DEBUG": "INFO",
        },
        catalogue,
    )
    assert env["SGLANG_PORT"] == "1" and "SGLANG_OLD" not in env
    assert env["SGLANG_WARMUP_TIMEOT"] == "9"
    assert [row["code"] for row in warnings] == ["env_var_renamed", "env_var_unknown"]
    assert "SGLANG_WARMUP_TIMEOUT" in warnings[1]["message"]


def test_without_definitions_the_version_decides_about_renames() -> None:
    old = _flags.Catalogue({"state": "unknown", "sglang_version": "0.5.9"})
    new = _flags.Catalogue({"state": "unknown", "sglang_version": "0.5.23"})
    none = _flags.Catalogue({"state": "unknown", "sglang_version": None})
    keys = [list(_flags.read_flags({"cuda_graph_max_bs": 8}, which).given) for which in (old, new, none)]
    assert keys == [["cuda_graph_max_bs"], ["cuda_graph_max_bs_decode"], ["cuda_graph_max_bs"]]


@pytest.mark.parametrize(
    ("old", "new", "transform", "value", "wanted"),
    [
        ("SGLANG_DISABLE_X_CHECK", "SGLANG_ENABLE_X_CHECK", "_invert_bool", "1", "0"),
        ("SGLANG_DISABLE_X_CHECK", "SGLANG_ENABLE_X_CHECK", "_invert_bool", "false", "1"),
        ("SGL_DISABLE_X_CHECK", "SGLANG_ENABLE_X_CHECK", None, "true", "0"),
        ("SGLANG_QUEUED_TIMEOUT_MS", "SGLANG_REQ_WAITING_TIMEOUT", "_ms_to_s", "1500", "1.5"),
        ("SGLANG_QUEUED_TIMEOUT_MS", "SGLANG_REQ_WAITING_TIMEOUT", None, "1500", "1.5"),
        ("SGLANG_A", "SGLANG_B", None, "1500", "1500"),
        ("SGLANG_A", "SGLANG_B", "_some_other_change", "1500", None),
        ("SGLANG_QUEUED_TIMEOUT_MS", "SGLANG_REQ_WAITING_TIMEOUT", "_ms_to_s", "soon", None),
    ],
)
def test_a_renamed_variable_keeps_its_meaning(
    old: str, new: str, transform: Any, value: str, wanted: str | None
) -> None:
    row = {"replacement": new, "message": "", **({"transform": transform} if transform else {})}
    catalogue = _flags.Catalogue(
        {"state": "ok", "flags": {}, "env_vars": [new], "env_vars_deprecated": {old: row}}, "0.5.18"
    )
    env, warnings = _flags.read_env({old: value}, catalogue)
    assert env == ({new: wanted} if wanted is not None else {old: value})
    assert codes(warnings) == (["env_var_renamed"] if wanted is not None else ["env_var_deprecated"])
    assert _flags.read_env({old: value, new: "9"}, catalogue)[0] == {new: "9"}
