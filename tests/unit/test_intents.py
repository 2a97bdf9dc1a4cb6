# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the user's variables mean, and what is said when they mean nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.filter import intents as intents_filter
from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents
from hypothesis import given, settings
from hypothesis import strategies as st

PARSE = intents_filter._parse
LEAST = {"sglang_venv": "/opt/sglang/venv", "sglang_model_path": "/models/x"}


def read(**variables: Any) -> dict[str, Any]:
    given_ = {f"sglang_{key}": value for key, value in variables.items()}
    return _intents.intents({**LEAST, **given_}, PARSE)


def errors(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["code"], row["variable"]) for row in result["problems"] if row["severity"] == "error"]


def test_the_least_inventory_is_one_instance_named_default() -> None:
    result = read()
    assert list(result["instances"]) == ["default"]
    assert result["problems"] == []
    default = result["instances"]["default"]
    assert (default["venv"], default["model_path"], default["port"]) == ("/opt/sglang/venv", "/models/x", 30000)
    assert default["user"] == default["group"] == "sglang"
    assert result["venvs"] == {"/opt/sglang/venv": {"user": "sglang", "environment": {}}}


def test_a_host_with_backends_and_no_model_has_no_service() -> None:
    result = _intents.intents({"sglang_venv": "/v", "sglang_backends": {"mooncake": ["kv_transfer"], "nixl": None}})
    assert result["instances"] == {}
    assert result["backends"] == {"mooncake": ["kv_transfer"], "nixl": ["kv_transfer"]}
    assert list(result["venvs"]) == ["/v"]


def test_a_forgotten_model_is_an_instance_without_one_so_that_the_plan_refuses_it() -> None:
    assert _intents.intents({"sglang_venv": "/v"})["instances"]["default"]["model_path"] is None


def test_flat_variables_are_the_defaults_of_instances_and_flags_are_merged() -> None:
    result = read(
        port=31000,
        flags={"a": 1, "b": 2},
        instances={"x": {"flags": {"b": 3}, "gpus": [0]}, "y": {"port": 31001, "gpus": [1]}},
    )
    x, y = result["instances"]["x"], result["instances"]["y"]
    assert (x["port"], y["port"]) == (31000, 31001)
    assert x["flags"] == {"a": 1, "b": 3}
    assert y["flags"] == {"a": 1, "b": 2}
    assert result["problems"] == []


def test_an_instance_can_take_a_default_back() -> None:
    assert read(role="prefill", instances={"x": {"role": None}})["instances"]["x"]["role"] is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "30001", 30001),
        ("show_plan", "true", True),
        ("show_plan", "no", False),
        ("flags", '{"tp_size": 8, "trust-remote-code": true}', {"tp_size": 8, "trust-remote-code": True}),
        ("flags", "{tp_size: 8}", {"tp_size": 8}),
        ("gpus", "[0, 1]", [0, 1]),
        ("gpus", "0,1", [0, 1]),
        ("waves", '[1, "25%"]', [1, "25%"]),
        ("waves", "2, 50%", [2, "50%"]),
        ("waves", "10%", ["10%"]),
        ("moe_a2a_backend", "deepep, none", ["deepep", "none"]),
        ("moe_a2a_backend", "DeepEP", "deepep"),
        ("eplb", "true", True),
        ("eplb", "{redundant_experts: '32'}", {"redundant_experts": 32}),
        ("parallelism", "EP8", "ep8"),
        ("parallelism", "tp4 pp2", "tp4pp2"),
        ("parallelism", '{"tp_size": "8", "ep": 4}', {"tp_size": 8, "ep_size": 4}),
        ("rendezvous", "10.0.0.1:20000", {"address": "10.0.0.1", "port": 20000}),
        ("rendezvous", "[fe80::1]:20000", {"address": "fe80::1", "port": 20000}),
        ("env_vars", "{A: 1, B: true, C: x}", {"A": "1", "B": "1", "C": "x"}),
        ("role", "", None),
        ("kv_transfer_backend", "null", None),
    ],
)
def test_survey_answers_are_strings_and_become_their_types(name: str, text: str, value: Any) -> None:
    result = read(**{name: text})
    assert errors(result) == []
    holder = result["settings"] if name in result["settings"] else result["instances"]["default"]
    assert holder[name] == value
    assert type(holder[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("port", 0, "port_out_of_range"),
        ("port", "65536", "port_out_of_range"),
        ("port", True, "invalid_value"),
        ("port", "http", "invalid_value"),
        ("parallelism", "tp", "invalid_value"),
        ("parallelism", "xp8", "invalid_value"),
        ("parallelism", "tp0", "invalid_value"),
        ("parallelism", "tp2tp4", "invalid_value"),
        ("parallelism", {"tp_sise": 8}, "invalid_value"),
        ("role", "prefil", "invalid_value"),
        ("on_missing_backend", "ignore", "invalid_value"),
        ("waves", [], "invalid_value"),
        ("waves", ["0%"], "invalid_value"),
        ("waves", [0], "invalid_value"),
        ("gpus", [0, 0], "invalid_value"),
        ("moe_a2a_backend", ["auto", "deepep"], "invalid_value"),
        ("moe_a2a_backend", [], "invalid_value"),
        ("eplb", {"redundant": 3}, "invalid_value"),
        ("flags", "{not json", "invalid_value"),
        ("flags", [1], "invalid_value"),
        ("env_vars", {"A B": 1}, "invalid_value"),
        ("venv", "opt/venv", "invalid_value"),
        ("user", "a b", "invalid_value"),
        ("backends", {"nixl": ["kv"]}, "invalid_value"),
        ("backends", {"nxil": ["kv_transfer"]}, "unknown_backend"),
        ("instances", {"a b": {}}, "invalid_instance_name"),
        ("instances", {"../x": {}}, "invalid_instance_name"),
        ("instances", [1], "invalid_value"),
        ("rendezvous", {"address": "a", "port": 70000}, "port_out_of_range"),
    ],
)
def test_bad_values_are_problems_that_name_the_variable(name: str, value: Any, code: str) -> None:
    found = [row for row in read(**{name: value})["problems"] if row["severity"] == "error"]
    assert [row["code"] for row in found] == [code]
    assert found[0]["variable"].startswith(f"sglang_{name}")
    assert f"sglang_{name}" in found[0]["message"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sglang_prot", "sglang_port"),
        ("sglang_model", None),
        ("sglang_modelpath", "sglang_model_path"),
        ("sglang_path_model", "sglang_model_path"),
        ("sglang_flag", "sglang_flags"),
        ("sglang_instance", "sglang_instances"),
        ("sglang_paralellism", "sglang_parallelism"),
        ("sglang_moe_a2a_backends", "sglang_moe_a2a_backend"),
        ("sglang_on_missing_backends", "sglang_on_missing_backend"),
        ("SGLANG_PORT", "sglang_port"),
        ("slang_port", "sglang_port"),
        ("sglang_owner_team", None),
        ("sglang_release", None),
        ("sglang_cluster", None),
    ],
)
def test_near_misses_are_fatal_and_other_names_are_the_fleets_own(name: str, meant: str | None) -> None:
    result = _intents.intents({**LEAST, name: 3})
    (row,) = result["problems"]
    assert row["code"] == "unknown_variable"
    assert row["variable"] == name
    assert row["suggestion"] == meant
    assert row["severity"] == ("error" if meant else "warning")


def test_every_known_name_is_known() -> None:
    assert len(_intents.BY_NAME) == len(_intents.VARIABLES)
    for variable in _intents.VARIABLES:
        rows = _intents.intents({**LEAST, variable.name: variable.default})["problems"]
        assert rows == [], variable.name
        assert variable.description.endswith(".")


def test_unknown_key_of_an_instance_is_fatal_whatever_it_is() -> None:
    result = read(instances={"x": {"prot": 1, "wholly_other": 2, "sglang_port": 3, "waves": [1]}})
    rows = {row["variable"]: row["suggestion"] for row in result["problems"]}
    assert rows == {
        "sglang_instances.x.prot": "port",
        "sglang_instances.x.wholly_other": None,
        "sglang_instances.x.sglang_port": "port",
        "sglang_instances.x.waves": "sglang_waves",
    }


def test_variables_of_others_are_not_looked_at() -> None:
    assert (
        _intents.intents({**LEAST, "ansible_host": "x", "port": 1, "lang_user": "y", "sglang_resolved": {}})["problems"]
        == []
    )


SECRET = "do-not-tell-4711"


@pytest.mark.parametrize(
    "variables",
    [
        {"secrets": {"api_key": SECRET, "hf_token": SECRET, "MY_TOKEN": SECRET}},
        {"secrets": json.dumps({"api_key": SECRET})},
        {"secrets": {"apikey": SECRET}},
        {"secrets": {"api_key": SECRET + "\nsecond"}},
        {"secrets": SECRET},
        {"flags": {"api_key": SECRET}},
        {"flags": {"--api-key": SECRET}},
        {"flags": {"admin-api-key": SECRET}},
        {"flags": json.dumps({"api_key": SECRET})},
        {"flags": "{api_key: " + SECRET},
        {"env_vars": {"HF_TOKEN": SECRET}},
        {"env_vars": {"AWS_SECRET_ACCESS_KEY": SECRET}},
        {"instances": {"x": {"secrets": {"api_key": SECRET}}}},
        {"instances": {"x": {"flags": {"api_key": SECRET}}}},
        {"instances": {"x": {"api_key": SECRET}}},
        {"instances": "{x: {secrets: {api_key: " + SECRET},
        {"secret": {"api_key": SECRET}},
        {"api_key": SECRET},
    ],
)
def test_no_value_of_a_secret_leaves(variables: dict[str, Any]) -> None:
    result = read(**variables)
    assert SECRET not in json.dumps(result)


def test_names_of_secrets_leave() -> None:
    result = read(secrets={"api-key": "x", "hf_token": "y", "S3_SECRET": "z"})
    assert result["instances"]["default"]["secrets"] == ["S3_SECRET", "api_key", "hf_token"]


def test_secret_flags_are_refused_with_the_way_that_works() -> None:
    (row,) = read(flags={"api-key": "x", "tp_size": 2})["problems"]
    assert row["code"] == "secret_in_flags"
    assert "sglang_secrets" in row["suggestion"]


def test_tokens_per_rank_are_no_token() -> None:
    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    assert read(env_vars={name: 512})["instances"]["default"]["env_vars"] == {name: "512"}


def test_instances_that_get_into_each_others_way() -> None:
    result = read(instances={"x": {"gpus": [0, 1]}, "y": {"gpus": [1]}})
    assert sorted(errors(result)) == [("gpu_used_twice", "sglang_gpus"), ("port_used_twice", "sglang_port")]


def test_an_instance_over_hosts_needs_a_rendezvous() -> None:
    assert errors(read(hosts=["a", "b"])) == [("rendezvous_missing", "sglang_rendezvous")]
    assert errors(read(hosts=["a", "b"], rendezvous={"address": "10.0.0.1"})) == []


class Tagged(str):
    """Stands for the tagged and vaulted strings of ansible-core: a str that is not exactly one."""


def test_values_become_plain() -> None:
    value = _intents.plain({Tagged("a"): (Tagged("b"), {Tagged("c")}, 1, True, None, 2.5)})
    assert value == {"a": ["b", ["c"], 1, True, None, 2.5]}
    assert type(next(iter(value))) is str
    assert type(value["a"][0]) is str
    assert json.loads(json.dumps(value)) == value


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.sampled_from([variable.name for variable in _intents.VARIABLES]), _anything)
def test_nothing_that_a_user_writes_raises(name: str, value: Any) -> None:
    result = _intents.intents({**LEAST, name: value}, PARSE)
    json.dumps(result)
    for row in result["problems"]:
        assert row["code"] and row["message"] and row["variable"]


@pytest.mark.parametrize(
    "given_",
    [
        "--tp-size 8 --trust-remote-code --cuda-graph-bs 1 2 --chat-template='a b'",
        ["--tp-size", "8", "--trust-remote-code", "--cuda-graph-bs", "1", "2", "--chat-template=a b"],
    ],
)
def test_a_command_line_is_taken_for_flags(given_: Any) -> None:
    result = read(flags=given_)
    assert result["problems"] == []
    assert result["instances"]["default"]["flags"] == {
        "--tp-size": "8",
        "--trust-remote-code": True,
        "--cuda-graph-bs": ["1", "2"],
        "--chat-template": "a b",
    }


@pytest.mark.parametrize("given_", ["--a 'b", ["--tp-size", "8", "--tp-size", "4"], ["--a=1", "b"]])
def test_a_command_line_that_is_none(given_: Any) -> None:
    assert errors(read(flags=given_)) == [("invalid_value", "sglang_flags")]


def test_secrets_in_a_command_line_do_not_leave() -> None:
    result = read(flags=f"--tp-size 8 --api-key {SECRET}")
    assert SECRET not in json.dumps(result)
    assert errors(result) == [("secret_in_flags", "sglang_flags.--api-key")]


def test_the_librarys_name_is_taken_for_the_backend() -> None:
    assert read(moe_a2a_backend="deep_ep")["instances"]["default"]["moe_a2a_backend"] == "deepep"


def test_a_tls_key_file_is_no_secret_flag() -> None:
    assert read(flags={"ssl_keyfile": "/etc/x.pem", "ssl-certfile": "/etc/x.crt"})["problems"] == []
