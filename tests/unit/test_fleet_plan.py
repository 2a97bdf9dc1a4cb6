# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gate, the waves and the builders of a run."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fleet_plan, _intents
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan_support import codes


def host(
    *rejections: str, build: bool = False, instances: dict[str, Any] | None = None, **intent: Any
) -> dict[str, Any]:
    instances = instances if instances is not None else {"default": intent}
    rows = [
        {
            "code": code,
            "message": f"sglang_port: 0 is bad ({code})",
            "variable": "sglang_port",
            "value": 0,
            "suggestion": "30000",
        }
        for code in rejections
    ]
    steps = [{"action": "build", "packages": [], "args": {"backend": "deep_ep"}}]
    remedies = [{"backend": "deep_ep", "required": True, "steps": steps}] if build else []
    return {
        "intents": {"instances": instances},
        "plans": {name: {"rejections": rows, "remedies": remedies, "effective": {}, "unit": {}} for name in instances},
    }


def fleet(count: int, **intent: Any) -> dict[str, Any]:
    return {f"g{number:03}": host(**intent) for number in range(count)}


def test_one_rejection_stops_everything_and_every_one_is_told() -> None:
    hosts = {**fleet(2), "bad": host("port_out_of_range", "unknown_flag"), "worse": host("gpu_absent")}
    judged = _fleet_plan.fleet_plan(hosts)
    assert judged["accepted"] is False
    assert judged["waves"] == judged["order"] == judged["serial"] == []
    assert [(row["host"], row["code"]) for row in judged["rejections"]] == [
        ("bad", "port_out_of_range"),
        ("bad", "unknown_flag"),
        ("worse", "gpu_absent"),
    ]
    for word in ("bad", "worse", "sglang_port", "0", "instead: 30000", "[gpu_absent]", "Nothing is changed"):
        assert word in judged["message"]


def test_a_thousand_hosts_with_the_same_fault_are_one_line() -> None:
    hosts = {f"g{number:03}": host("unknown_flag") for number in range(412)}
    hosts.update({f"ok{number:03}": host() for number in range(588)})
    message = _fleet_plan.fleet_plan(hosts)["message"]
    assert message.startswith("Nothing is changed: 1 reason on 412 hosts of 1000.\n")
    assert "on 412 hosts (g000, g001, g002, g003, g004, …): " in message
    assert message.count("[unknown_flag]") == 1
    assert len(message.splitlines()) <= 3


def test_a_fault_with_other_figures_on_each_host_is_folded() -> None:
    hosts = {}
    for number in range(300):
        row = host("gpu_busy")
        row["plans"]["default"]["rejections"][0]["message"] = f"GPU 0 is in use by others: pid {number}"
        hosts[f"g{number:03}"] = row
    hosts["one"] = host("port_out_of_range")
    lines = _fleet_plan.fleet_plan(hosts)["message"].splitlines()
    assert lines[0] == "Nothing is changed: 301 reasons on 301 hosts."
    assert lines[1] == "  on 300 hosts (g000, g001, g002, g003, g004, …): gpu_busy, in 300 forms; the first of them:"
    assert len(lines) <= 9
    assert any(line.startswith("  one: ") for line in lines)


def test_refused_hosts_can_be_left_out() -> None:
    judged = _fleet_plan.fleet_plan({**fleet(2), "bad": host("gpu_absent")}, {"on_rejection": "skip"})
    assert judged["accepted"]
    assert judged["order"] == ["g000", "g001"]
    assert judged["skipped"] == [{"host": "bad", "reason": "plan refused: gpu_absent"}]
    assert codes(judged["refused"]) == ["gpu_absent"]
    assert "Left out: 1 host." in judged["message"]


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_unreachable_hosts(choice: str) -> None:
    hosts = {**fleet(2), "gone": {"unreachable": True, "reason": "no route", "plans": {}, "intents": {}}}
    judged = _fleet_plan.fleet_plan(hosts, {"on_unreachable": choice})
    assert judged["accepted"] is (choice == "skip")
    if choice == "stop":
        assert codes(judged["rejections"]) == ["host_unreachable"]
    else:
        assert judged["skipped"] == [{"host": "gone", "reason": "no route"}]
        assert judged["order"] == ["g000", "g001"]


@pytest.mark.parametrize(
    ("count", "waves", "serial"),
    [
        (1, None, [1]),
        (5, None, [1, 1, 1, 1, 1]),
        (25, None, [1, *[2] * 12]),
        (100, None, [1, *[10] * 9, 9]),
        (6, [1, 2], [1, 2, 2, 1]),
        (6, ["50%"], [3, 3]),
        (6, ["100%"], [6]),
        (7, [2, "30%", 100], [2, 2, 3]),
        (3, ["1%"], [1, 1, 1]),
    ],
)
def test_sizes_of_waves(count: int, waves: list[Any] | None, serial: list[int]) -> None:
    judged = _fleet_plan.fleet_plan(fleet(count), {"waves": waves} if waves else {})
    assert judged["serial"] == serial
    assert judged["order"] == sorted(fleet(count))


def pair(*names: str, **more: Any) -> dict[str, Any]:
    return {name: host(hosts=list(names), rendezvous={"address": "a", "port": 1}, **more) for name in names}


def test_an_instance_over_hosts_is_never_split_and_ranks_stay_in_order() -> None:
    hosts = {"b": pair("c", "b")["b"], **fleet(2), "c": pair("c", "b")["c"]}
    judged = _fleet_plan.fleet_plan(hosts, {"waves": [1]})
    assert judged["waves"] == [
        [{"instance": "default", "hosts": ["c", "b"]}],
        [{"instance": "default", "hosts": ["g000"]}],
        [{"instance": "default", "hosts": ["g001"]}],
    ]
    assert judged["serial"] == [2, 1, 1]


def test_a_limit_that_covers_a_part_is_refused() -> None:
    judged = _fleet_plan.fleet_plan({"a": pair("a", "b")["a"]}, outside=["b", "z"])
    (row,) = judged["rejections"]
    assert (row["host"], row["code"], row["suggestion"]) == (
        "a",
        "limit_covers_part_of_instance",
        "--limit a,b, or no limit",
    )
    assert codes(_fleet_plan.fleet_plan({"a": pair("a", "b")["a"]})["rejections"]) == ["instance_host_unknown"]
    assert _fleet_plan.fleet_plan(pair("a", "b"), outside=["z"])["accepted"]


def test_members_that_do_not_agree() -> None:
    hosts = {**pair("a", "b"), "b": host()}
    assert codes(_fleet_plan.fleet_plan(hosts)["rejections"]) == ["instance_hosts_disagree"]
    hosts = pair("a", "b")
    hosts["a"]["plans"]["default"]["effective"] = {"tp_size": 16, "node_rank": 0}
    hosts["b"]["plans"]["default"]["effective"] = {"tp_size": 8, "node_rank": 1}
    (row,) = _fleet_plan.fleet_plan(hosts)["rejections"]
    assert (row["code"], row["numbers"]) == ("ranks_disagree", {"tp_size": [16, 8]})


def test_the_others_of_an_instance_are_left_out_with_a_refused_member() -> None:
    hosts = {**pair("a", "b"), **fleet(1)}
    hosts["b"]["plans"]["default"]["rejections"] = [{"code": "gpu_lost", "message": "GPU 1"}]
    judged = _fleet_plan.fleet_plan(hosts, {"on_rejection": "skip"})
    assert judged["order"] == ["g000"]
    assert [row["host"] for row in judged["skipped"]] == ["a", "b"]


def test_a_wave_never_takes_a_whole_domain() -> None:
    hosts = {f"r{rack}-{n}": host(failure_domain=f"rack{rack}") for rack in (1, 2) for n in (1, 2)}
    judged = _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})
    assert [[row["hosts"][0] for row in wave] for wave in judged["waves"]] == [["r1-1", "r2-1"], ["r1-2", "r2-2"]]


def test_a_wave_never_takes_all_prefill_or_all_decode() -> None:
    hosts = {f"{role[0]}{n}": host(role=role) for n in (1, 2, 3) for role in ("prefill", "decode")}
    judged = _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})
    assert [[row["hosts"][0] for row in wave] for wave in judged["waves"]] == [["p1", "d1", "p2", "d2"], ["p3", "d3"]]
    alone = {"p": host(role="prefill"), "d": host(role="decode")}
    assert _fleet_plan.fleet_plan(alone, {"waves": ["100%"]})["serial"] == [2]


def part(role: str, *argv: Any, group: str | None = "chat", seen: Any = None, **effective: Any) -> dict[str, Any]:
    """A host with one prefill or decode instance."""
    made = host(role=role, replica_group=group, model_path="/models/m")
    plan = made["plans"]["default"]
    plan["argv"] = ["python", *map(str, argv)]
    plan["effective"] = {"kv_transfer_backend": "mooncake", **effective}
    plan["unit"] = {"role": role, "model_path": "/models/m"}
    made["seen"] = {"default": seen or {}}
    return made


def two_and_two(**changed: dict[str, Any]) -> dict[str, Any]:
    return {**{f"{role[0]}{n}": part(role) for n in (1, 2) for role in ("prefill", "decode")}, **changed}


def shape(layers: int) -> dict[str, Any]:
    config = {"state": "ok", "architecture": "A", "layers": layers, "kv_heads": 8, "hidden_size": 64}
    return {"sglang": "0.5.23", "model": config}


def test_pairs_that_fit_are_accepted_without_a_word() -> None:
    judged = _fleet_plan.fleet_plan(two_and_two(), {"waves": ["100%"]})
    assert judged["accepted"] and judged["warnings"] == [] and judged["serial"] == [2, 2]
    different = two_and_two(d1=part("decode", "--attn-dp-size", 2, tp_size=8, attn_dp_size=2, pp_size=1))
    different["p1"] = part("prefill", tp_size=4, pp_size=2)
    different["p2"] = part("prefill", "--page-size", 64, "--kv-cache-dtype", "fp8_e4m3", tp_size=4, pp_size=2)
    different["d1"]["plans"]["default"]["argv"] += ["--page-size", "64", "--kv-cache-dtype", "fp8_e4m3"]
    assert _fleet_plan.fleet_plan(different)["accepted"]


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            part("decode", kv_transfer_backend="nixl"),
            "transfer backend: mooncake on p1, d1, p2 (prefill, decode); nixl",
        ),
        (part("decode", pp_size=2), "pp sizes are 2 and 1"),
        (part("decode", tp_size=3), "attention TP sizes are 3 and 2"),
        (
            part("decode", "--disaggregation-decode-allocation-policy", "prefill_complete"),
            "allocation policy: early on",
        ),
    ],
)
def test_pairs_that_cannot_work_are_refused_by_the_odd_host(odd: dict[str, Any], told: str) -> None:
    hosts = two_and_two(d2=odd)
    for name in ("p1", "p2"):
        hosts[name]["plans"]["default"]["effective"]["tp_size"] = 2
    judged = _fleet_plan.fleet_plan(hosts)
    rows = [(row["host"], row["code"]) for row in judged["rejections"]]
    assert rows == [("d2", "prefill_decode_differ")] and told in judged["message"]
    left = _fleet_plan.fleet_plan(hosts, {"on_rejection": "skip"})
    assert left["accepted"] and sorted(left["order"]) == ["d1", "p1", "p2"]
    assert "group chat has one decode instance in this run (d1; left out: d2)" in left["message"]


@pytest.mark.parametrize("flag", ["--page-size", "--kv-cache-dtype"])
def test_settings_that_sglang_compares_at_the_first_request(flag: str) -> None:
    def judged(**values: Any) -> dict[str, Any]:
        return _fleet_plan.fleet_plan(
            {name: part(role, *([flag, values[name]] if name in values else []))
             for name, role in (("p", "prefill"), ("d", "decode"))}
        )  # fmt: skip

    assert judged(p="1", d="1")["accepted"]
    refused = judged(p="64", d="32")
    assert (
        codes(refused["rejections"]) == ["prefill_decode_differ"] and "64 on p (prefill); 32 on d" in refused["message"]
    )
    unsure = judged(d="64")
    assert unsure["accepted"] and "prefill_decode_differ" in codes(unsure["warnings"])
    assert "SGLang's choice on p (prefill); 64 on d (decode)" in unsure["message"]


def test_models_and_versions_of_a_pair() -> None:
    hosts = {"p": part("prefill", seen=shape(60)), "d": part("decode", seen=shape(61))}
    judged = _fleet_plan.fleet_plan(hosts)
    assert codes(judged["rejections"]) == ["prefill_decode_differ"] and "layers 61" in judged["message"]
    hosts["d"]["seen"]["default"] = {"sglang": "0.5.9", "model": {}}
    (row,) = _fleet_plan.fleet_plan(hosts)["rejections"]
    assert row["host"] == "d" and "older than 0.5.10 on d (decode)" in row["message"]
    hosts["d"]["seen"]["default"]["sglang"] = "0.5.22"
    judged = _fleet_plan.fleet_plan(hosts)
    assert judged["accepted"] and "SGLang: 0.5.23 on p (prefill); 0.5.22 on d (decode)" in judged["message"]
    hosts["d"]["plans"]["default"]["unit"]["model_path"] = "/mnt/m/"
    assert "name" not in _fleet_plan.fleet_plan(hosts)["message"], "the folder above may differ"
    hosts["d"]["plans"]["default"]["unit"]["model_path"] = "/models/m-v2"
    assert "model's name: m on p (prefill); m-v2 on d (decode)" in _fleet_plan.fleet_plan(hosts)["message"]


def test_other_groups_and_fake_transfers_are_no_partners() -> None:
    hosts = {
        "p": part("prefill"), "d": part("decode"), "bench": part("decode", kv_transfer_backend="fake"),
        "p2": part("prefill", group="other", kv_transfer_backend="nixl"),
        "d2": part("decode", group="other", kv_transfer_backend="nixl"),
    }  # fmt: skip
    assert _fleet_plan.fleet_plan(hosts)["accepted"]


def test_the_only_instance_of_a_role_is_told_and_rolled() -> None:
    hosts = {"p1": part("prefill"), "d1": part("decode"), "d2": part("decode")}
    judged = _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})
    assert judged["accepted"] and sorted(judged["order"]) == ["d1", "d2", "p1"]
    assert codes(judged["warnings"]) == ["no_redundancy"]
    assert (
        "group chat has one prefill instance in this run (p1): its requests fail while it restarts" in judged["message"]
    )
    alone = _fleet_plan.fleet_plan({"p1": part("prefill"), "p2": part("prefill")})
    assert codes(alone["warnings"]) == ["pair_incomplete"] and "no decode instance" in alone["message"]


def test_without_a_group_the_models_are_the_groups() -> None:
    hosts = {f"{model}{role[0]}{n}": part(role, group=None) for model in "ab" for role in ("prefill", "decode")
             for n in (1, 2)}  # fmt: skip
    for name, row in hosts.items():
        row["intents"]["instances"]["default"]["model_path"] = f"/models/{name[0]}"
    cut = _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})["waves"]
    assert [[row["hosts"][0] for row in wave] for wave in cut] == [
        ["ap1", "ad1", "bp1", "bd1"],
        ["ap2", "ad2", "bp2", "bd2"],
    ]


def test_a_role_that_only_the_flags_say_counts() -> None:
    hosts = two_and_two()
    for row in hosts.values():
        del row["intents"]["instances"]["default"]["role"]
    assert _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})["serial"] == [2, 2]


@pytest.mark.parametrize("reason", ["unreachable", "refused"])
def test_all_of_a_role_left_out_is_told(reason: str) -> None:
    hosts = two_and_two()
    for name in ("p1", "p2"):
        if reason == "unreachable":
            hosts[name].update(unreachable=True, plans={})
        else:
            hosts[name]["plans"]["default"]["rejections"] = [{"code": "gpu_lost", "message": "GPU 1"}]
    judged = _fleet_plan.fleet_plan(hosts, {"on_rejection": "skip", "on_unreachable": "skip"})
    assert judged["accepted"] and sorted(judged["order"]) == ["d1", "d2"]
    assert codes(judged["warnings"]) == ["group_left_out"]
    assert "every prefill instance of group chat is left out: p1, p2" in judged["message"]


def test_half_of_an_instance_unreachable_leaves_all_of_it_out() -> None:
    hosts = {**pair("a", "b"), **fleet(2)}
    hosts["b"] = {**hosts["b"], "unreachable": True, "reason": "no route", "plans": {}}
    judged = _fleet_plan.fleet_plan(hosts, {"on_unreachable": "skip"})
    assert judged["order"] == ["g000", "g001"]
    assert judged["skipped"] == [
        {"host": "a", "reason": "rolls together with b, which is left out"},
        {"host": "b", "reason": "no route"},
    ]
    everything = _fleet_plan.fleet_plan(pair("a", "b") | {"b": hosts["b"]}, {"on_unreachable": "skip"})
    assert everything["accepted"] and everything["serial"] == [] and "0 hosts in 0 waves" in everything["message"]


def test_each_host_decides_for_itself_whether_it_may_be_left_out() -> None:
    hosts = {**fleet(1), "bad": host("gpu_absent"), "worse": host("gpu_lost")}
    hosts["bad"]["intents"]["settings"] = {"on_rejection": "skip"}
    judged = _fleet_plan.fleet_plan(hosts)
    assert [row["host"] for row in judged["rejections"]] == ["worse"]
    hosts["worse"]["intents"]["settings"] = {"on_rejection": "skip"}
    assert _fleet_plan.fleet_plan(hosts)["order"] == ["g000"]


def test_hosts_that_ask_for_different_waves_get_the_most_waves_and_are_told() -> None:
    hosts = fleet(6)
    for name, row in hosts.items():
        row["intents"]["settings"] = {"waves": ["100%"] if name == "g000" else [2]}
    judged = _fleet_plan.fleet_plan(hosts)
    assert judged["serial"] == [2, 2, 2]
    (row,) = judged["warnings"]
    assert (row["host"], row["code"], row["variable"]) == ("g000", "waves_disagree", "sglang_waves")
    assert "['100%'] on g000; [2] on g001, g002, g003, g004, g005; [2] is used" in judged["message"]
    assert _fleet_plan.fleet_plan(hosts, {"waves": [3]})["serial"] == [3, 3]


def test_domains_of_one_and_of_instances_over_racks() -> None:
    hosts = {"a": host(failure_domain="r1"), "b": host(failure_domain="r2"), "c": host()}
    assert _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})["serial"] == [3], "a rack of one has no other replica"
    hosts = {name: row for names in (("a", "b"), ("c", "d")) for name, row in pair(*names).items()}
    for name, row in hosts.items():
        row["intents"]["instances"]["default"]["failure_domain"] = "r1" if name in "ac" else "r2"
    assert _fleet_plan.fleet_plan(hosts, {"waves": ["100%"]})["serial"] == [2, 2], "each of them is in both racks"
    assert _fleet_plan.fleet_plan(fleet(2), {"waves": [1, 1, 1, "50%"]})["serial"] == [1, 1]


def test_hosts_without_anything_to_do_are_in_no_wave() -> None:
    hosts = {
        "idle": host(instances={}),
        "mend": {**host(instances={}), "plans": host(build=True)["plans"]},
        "run": host(),
    }
    judged = _fleet_plan.fleet_plan(hosts)
    assert judged["order"] == ["mend", "run"]
    assert judged["idle"] == ["idle"]


def test_one_builder_for_each_fingerprint() -> None:
    hosts = {f"g{n}": {**host(build=True), "fingerprint": "f" if n < 3 else "other"} for n in range(4)}
    hosts["no"] = host()
    judged = _fleet_plan.fleet_plan(hosts)
    assert [(row["fingerprint"], row["builder"], row["peers"]) for row in judged["builders"]] == [
        ("f", "g0", ["g1", "g2"]),
        ("other", "g3", []),
    ]


def test_provisional_fingerprints_tell_toolkits_apart() -> None:
    def probed(version: str) -> dict[str, Any]:
        kit = {"path": "/c", "version": version}
        return {**host(build=True), "probe": {"toolkits": {"toolkits": [kit], "best": "/c"}, "torch": {"version": "2"}}}

    judged = _fleet_plan.fleet_plan({"a": probed("13.0"), "b": probed("13.0"), "c": probed("12.8")})
    assert [(row["builder"], row["peers"]) for row in judged["builders"]] == [("a", ["b"]), ("c", [])]


_hosts = st.lists(
    st.tuples(st.sampled_from(["", "prefill", "decode"]), st.sampled_from(["", "r1", "r2", "r3"]), st.integers(0, 3)),
    min_size=1,
    max_size=25,
)
_waves = st.lists(st.integers(1, 4) | st.sampled_from(["10%", "34%", "100%"]), min_size=1, max_size=3)


@settings(deadline=None)
@given(_hosts, _waves)
def test_waves_hold_their_promises(shape: list[tuple[str, str, int]], waves: list[Any]) -> None:
    names = [f"h{number}" for number in range(len(shape))]
    hosts: dict[str, Any] = {}
    for name, (role, domain, partner) in zip(names, shape):
        hosts[name] = host(role=role or None, failure_domain=domain or None)
        if partner == 0 and len(hosts) % 3 == 0:
            both = names[len(hosts) - 2 : len(hosts)]
            for member in both:
                hosts[member]["intents"]["instances"]["default"]["hosts"] = both
    judged = _fleet_plan.fleet_plan(hosts, {"waves": waves})
    if not judged["accepted"]:
        assert set(codes(judged["rejections"])) == {"instance_hosts_disagree"}
        return
    assert sorted(judged["order"]) == sorted(names)
    assert sum(judged["serial"]) == len(names)
    where = {name: number for number, wave in enumerate(judged["waves"]) for row in wave for name in row["hosts"]}
    for name in names:
        for member in hosts[name]["intents"]["instances"]["default"].get("hosts") or []:
            assert where[name] == where[member]
    for key in ("role", "failure_domain"):
        groups: dict[str, set[int]] = {}
        sizes: dict[str, set[int]] = {}
        for name in names:
            intent = hosts[name]["intents"]["instances"]["default"]
            if intent.get(key):
                groups.setdefault(intent[key], set()).add(where[name])
                sizes.setdefault(intent[key], set()).add(min(map(names.index, intent.get("hosts") or [name])))
        for value, seen in groups.items():
            assert len(seen) > 1 or len(sizes[value]) == 1, (key, value)


@pytest.mark.parametrize(
    ("value", "waves"),
    [
        ("10", [10]), ("1,10%", [1, "10%"]), ('[1, "10%"]', [1, "10%"]), (" 25 % ", ["25%"]), (["2", 1.0], [2, 1]),
        ([], None), (0, None), ("0%", None), ("150%", None), (-1, None), (1.5, None), ("half", None), ([[1]], None),
        ([True], None), ("nan%", None), ({"a": 1}, None),
    ],
)  # fmt: skip
def test_what_sglang_waves_may_be(value: Any, waves: Any) -> None:
    read = _intents.intents({"sglang_waves": value}, yaml.safe_load)
    if waves:
        assert read["problems"] == [] and read["settings"]["waves"] == waves
    else:
        (problem,) = read["problems"]
        assert problem["variable"] == "sglang_waves" and problem["suggestion"] == '[1, "10%"]'
