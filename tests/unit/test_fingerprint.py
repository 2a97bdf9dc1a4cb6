"""Equal hosts give equal fingerprints, whatever the spelling; any difference that matters gives another."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.filter import deepep
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fingerprint as fp
from hypothesis import given
from hypothesis import strategies as st

FACTS: dict[str, Any] = {
    "generation": "v1", "revision": "9af0e0d0", "python_tag": "cp312", "torch": "2.11.0+cu130", "torch_cuda": "13.0",
    "toolkit": "13.0.88", "nvshmem": "3.4.5", "nccl": None, "archs": ["9.0"], "machine": "x86_64", "libc": "glibc 2.39",
    "options": {},
}  # fmt: skip


@pytest.mark.parametrize("part, value", [
    ("generation", "v2"), ("revision", "9af0e0d1"), ("python_tag", "cp313"), ("torch", "2.11.1+cu130"),
    ("torch_cuda", "12.9"), ("toolkit", "13.1.20"), ("nvshmem", "3.3.20"), ("nccl", "2.30.7"), ("archs", ["10.0"]),
    ("machine", "aarch64"), ("libc", "glibc 2.36"), ("options", {"num_topk_idx_bits": 32}),
])  # fmt: skip
def test_every_part_makes_a_difference_and_is_told(part, value):
    other = dict(FACTS, **{part: value})
    assert fp.fingerprint(FACTS) != fp.fingerprint(other)
    assert [item["part"] for item in fp.differences(FACTS, other)] == [part]


@given(st.permutations(["9.0", "10.0", "10.3"]), st.sampled_from([";", ",", " "]))
def test_order_and_separator_of_archs_do_not_matter(archs, separator):
    expected = fp.fingerprint(dict(FACTS, archs=["9.0", "10.0", "10.3"]))
    assert fp.fingerprint(dict(FACTS, archs=separator.join(archs))) == expected
    assert fp.fingerprint_parts(dict(FACTS, archs=archs))["archs"] == ["9.0", "10.0", "10.3"]


def test_canonical_parts_are_a_fixed_point_and_unknown_facts_do_not_count():
    parts = fp.fingerprint_parts(dict(FACTS, hostname="a", options={"x": 64}))
    assert fp.fingerprint_parts(parts) == parts
    assert fp.fingerprint(parts) == fp.fingerprint(dict(FACTS, options={"x": "64"}))


def host(name, print_, cached=False, usable=True):
    return {"host": name, "fingerprint": print_, "cached": cached, "usable": usable}


def test_six_hosts_with_two_fingerprints_compile_twice():
    shares = fp.share_builds([host(f"h{i}", "AB"[i % 2]) for i in range(6)])
    assert [(s["fingerprint"], s["builder"], s["peers"]) for s in shares] == [
        ("A", "h0", ["h2", "h4"]),
        ("B", "h1", ["h3", "h5"]),
    ]
    assert sum(share["compiles"] for share in shares) == 2


def test_whoever_has_the_wheel_is_asked_and_nothing_is_compiled():
    shares = fp.share_builds([host("h0", "A"), host("h1", "A", cached=True)])
    assert (shares[0]["builder"], shares[0]["compiles"], shares[0]["peers"]) == ("h1", False, ["h0"])


def test_what_the_controller_holds_is_copied_from_there():
    shares = fp.share_builds([host("h0", "A"), host("h1", "B")], cached=["A"])
    assert [(s["builder"], s["compiles"]) for s in shares] == [(None, False), ("h1", True)]


def test_a_host_that_cannot_build_is_no_builder():
    shares = fp.share_builds(
        [host("h0", "A", usable=False), host("h1", "A"), host("h2", "B", usable=False), host("h3", None)]
    )
    assert [(s["fingerprint"], s["builder"]) for s in shares] == [("A", "h1"), ("B", None)]


def test_the_filters_read_what_the_role_registers(tmp_path):
    hostvars = {
        "h0": {"deepep_info": {"fingerprint": "A", "cached": False, "usable": True}},
        "h1": {"deepep_info": {"fingerprint": "A", "cached": False, "usable": True}},
        "h2": {},
    }
    shares = deepep.deepep_builds(hostvars, hostvars, str(tmp_path))
    assert deepep.deepep_builds_here(shares, "h0") and not deepep.deepep_builds_here(shares, "h1")
    assert deepep.deepep_role(shares, "h0") == "builds DeepEP A for 2 host(s)"
    assert deepep.deepep_role(shares, "h1") == "copies DeepEP A from h0"
    assert "preflight" in deepep.deepep_role(shares, "h2")
    (tmp_path / "wheels" / "A").mkdir(parents=True)
    (tmp_path / "wheels" / "A" / "manifest.json").write_text("{}")
    shares = deepep.deepep_builds(hostvars, hostvars, str(tmp_path))
    assert deepep.deepep_role(shares, "h0") == "copies DeepEP A from the controller"


def test_a_wheel_that_another_host_keeps_is_brought_once_and_never_compiled(tmp_path):
    hostvars = {name: {"deepep_info": {"fingerprint": "A", "usable": True}} for name in ("h0", "h1")}
    hostvars["h2"] = {"deepep_info": {"fingerprint": "B", "usable": True}}
    keepers = {"A": "old", "C": "old"}
    shares = deepep.deepep_builds(hostvars, hostvars, str(tmp_path), keepers)
    assert [(share["builder"], share["compiles"]) for share in shares] == [(None, False), ("h2", True)]
    brings = {host: deepep.deepep_brings(shares, host, keepers, str(tmp_path)) for host in hostvars}
    assert brings == {"h0": [{"fingerprint": "A", "keeper": "old"}], "h1": [], "h2": []}
    (tmp_path / "wheels" / "A").mkdir(parents=True)
    (tmp_path / "wheels" / "A" / "manifest.json").write_text("{}")
    assert deepep.deepep_brings(shares, "h0", keepers, str(tmp_path)) == []


def test_a_host_that_takes_its_wheel_from_the_store_builds_nothing():
    info = {"fingerprint": "A", "usable": True, "cached": False}
    hostvars = {"h0": {"deepep_info": info, "deepep_stored": {"status": 404}}}
    assert deepep.deepep_builds(hostvars, hostvars)[0]["compiles"]
    hostvars["h0"]["deepep_stored"] = {"status": 200}
    assert not deepep.deepep_builds(hostvars, hostvars)[0]["compiles"]


def test_nobody_is_said_to_copy_what_nobody_has_or_can_build():
    hostvars = {"h0": {"deepep_info": {"fingerprint": "A", "usable": False}}}
    assert "no host of its group can build it" in deepep.deepep_role(deepep.deepep_builds(hostvars, hostvars), "h0")
    shares = deepep.deepep_builds(hostvars, hostvars, "", {"A": "old"})
    assert deepep.deepep_role(shares, "h0") == "copies DeepEP A from the controller"
