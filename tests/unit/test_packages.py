# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remedies as operations, and pip's words as causes."""

from __future__ import annotations

import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _packages as packages
from hypothesis import given
from hypothesis import strategies as st

SWAP = [
    {"action": "pip_uninstall", "packages": ["mooncake-transfer-engine", "mooncake_transfer_engine.cuda13"]},
    {
        "action": "pip_install",
        "packages": ["mooncake-transfer-engine-cuda13==0.3.14"],
        "args": {"flags": ["--no-deps", "--force-reinstall"]},
    },
]


def remedy(*steps, backend="mooncake"):
    return {"backend": backend, "kind": "replace", "steps": list(steps)}


def install(*names, **args):
    return {"action": "pip_install", "packages": list(names), "args": args or None}


def test_two_uses_of_one_backend_are_mended_once_and_system_packages_come_first():
    rdma = {"action": "os_install", "packages": ["libibverbs1"], "args": {"manager": "apt"}}
    work = packages.order([remedy(*SWAP, rdma), remedy(*SWAP), remedy(rdma, install("nixl==1.5.1"), backend="nixl")])
    assert [step.packages for step in work.os_steps] == [("libibverbs1",)]
    assert [group.backend for group in work.groups] == ["mooncake", "nixl"]
    swap = work.groups[0]
    assert swap.absent == {"mooncake-transfer-engine"}
    assert {name: item.version for name, item in swap.present.items()} == {"mooncake-transfer-engine-cuda13": "0.3.14"}
    assert [step.flags for step in swap.steps] == [(), ()] and all(step.no_deps for step in swap.steps)


def test_no_deps_is_the_default_and_only_given_flags_lift_it():
    steps = packages.order([remedy(install("a==1"), install("b==1", flags=["--pre"]))]).groups[0].steps
    assert [(step.no_deps, step.flags) for step in steps] == [(True, ()), (False, ("--pre",))]


def test_steps_of_others_are_handed_back_once():
    steps = [
        {"action": "set_env", "args": {"EP_DISABLE_GIN": "1"}},
        {"action": "build", "args": {"backend": "deep_ep"}},
        {"action": "manual", "args": {"text": "load nvidia_peermem"}},
    ]
    work = packages.order([remedy(*steps), remedy(*steps)])
    assert [step["action"] for step in work.not_executed] == ["set_env", "build", "manual"]
    assert not work.groups and not work.os_steps


@pytest.mark.parametrize(
    ("remedies", "said"),
    [
        ([remedy(install("nixl==1.5.1")), remedy(install("nixl==1.5.0"))], "different versions of nixl"),
        ([remedy(install("nixl==1")), remedy({"action": "pip_uninstall", "packages": ["NIXL"]})], "removes nixl"),
        ([remedy({"action": "reboot"})], "step 0: unknown action 'reboot'"),
        ([remedy(install("nixl>=1.5"))], "not an exact requirement"),
        ([remedy(install("--index-url=x"))], "not an exact requirement"),
        ([remedy(install("/tmp/nixl.tar.gz"))], "not the path of a wheel"),
        ([remedy(install("nixl @ https://me:hunter2@index/nixl.whl"))], r"\*\*\*@index"),
        ([remedy({"action": "pip_install", "packages": "nixl"})], "a list of names"),
        ([remedy({"action": "os_install", "packages": ["-o=x"]})], "not the name of a system package"),
        ([remedy({"action": "os_install", "packages": ["x"], "args": {"manager": "brew"}})], "brew"),
        (["nixl"], r"remedies\[0\] is not a dictionary"),
    ],
)
def test_bad_remedy_is_named(remedies, said):
    with pytest.raises(packages.BadRemedy, match=said):
        packages.order(remedies)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nixl", ("nixl", None, None)),
        ("NIXL_cu13 == 1.5.1", ("nixl-cu13", "1.5.1", None)),
        ("sglang[all]==0.5.23", ("sglang", "0.5.23", None)),
        ("deep_ep==1.2.1+9af0e0d", ("deep-ep", "1.2.1+9af0e0d", None)),
        (
            "/w/deep_ep-1.2.1+9af0e0d-cp312-cp312-linux_x86_64.whl",
            ("deep-ep", "1.2.1+9af0e0d", "/w/deep_ep-1.2.1+9af0e0d-cp312-cp312-linux_x86_64.whl"),
        ),
    ],
)
def test_requirement(text, expected):
    assert packages.parse_requirement(text)[1:] == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1.0", "1.0", True),
        ("1.2.1+9AF-0", "1.2.1+9af.0", True),
        ("0.3.13.post1", "0.3.13", False),
        ("1.2.1+9af0e0d", "1.2.1+af9a040", False),
        ("1.2.1+9af0e0d", "1.2.1", False),
    ],
)
def test_same_version(one, other, same):
    assert packages.same_version(one, other) is same


def report(**versions):
    return json.dumps(
        {
            "version": "1",
            "install": [{"metadata": {"name": name, "version": version}} for name, version in versions.items()],
        }
    )


def test_a_resolver_may_change_only_what_was_named():
    installed = {"torch": "2.14.1", "numpy": "1.26.4", "nixl": "1.3.0"}
    changes = packages.parse_report(
        "noise\n" + report(NIXL="1.5.1", torch="2.15.0", numpy="2.0", uvloop="1", triton="3"), installed
    )
    bad = packages.unwanted(changes, {"nixl"}, [])
    assert [(item.name, item.before, item.version) for item in bad] == [
        ("torch", "2.14.1", "2.15.0"),
        ("numpy", "1.26.4", "2.0"),
        ("triton", None, "3"),
    ]
    assert [item.name for item in packages.unwanted(changes, {"nixl"}, ["Torch", "numpy"])] == ["triton"]


@pytest.mark.parametrize("name", ["torch", "nvidia-nccl-cu13", "sglang", "triton"])
def test_protected_even_when_named_unless_allowed_or_repaired(name):
    change = packages.Change(name, "2", "1")
    assert packages.unwanted([change], {name}, []) == [change]
    assert packages.unwanted([change], {name}, [name.upper()]) == []
    assert packages.unwanted([change._replace(version="1")], {name}, []) == []
    assert packages.unwanted([change._replace(before=None)], {name}, []) == []


def test_a_dependency_that_is_not_there_may_come_along_unless_it_is_protected():
    changes = [packages.Change("aiohttp", "3", None), packages.Change("torch", "2.15.0", None)]
    assert [item.name for item in packages.unwanted(changes, {"mooncake"}, [])] == ["torch"]


@pytest.mark.parametrize("text", ["", "{", '{"install": 3}', '{"install": [{}]}', "[]"])
def test_no_report(text):
    with pytest.raises(ValueError):
        packages.parse_report(text, {})


def test_wheel_targets():
    names = [
        "mooncake/engine.so",
        "mooncake/",
        "m-1.data/scripts/mooncake_master",
        "m-1.data/purelib/mooncake/x.py",
        "m-1.data/headers/x.h",
        "m-1.dist-info/RECORD",
    ]
    points = "[console_scripts]\n# no\ntransfer_bench = mooncake.cli:bench\n[other]\nx = y\n"
    assert packages.wheel_targets(names, points) == {
        "mooncake/engine.so": "mooncake/engine.so",
        "bin:mooncake_master": "m-1.data/scripts/mooncake_master",
        "mooncake/x.py": "m-1.data/purelib/mooncake/x.py",
        "m-1.dist-info/RECORD": "m-1.dist-info/RECORD",
        "bin:transfer_bench": None,
    }


@pytest.mark.parametrize(
    ("stderr", "line", "mend"),
    [
        (
            "WARNING: Retrying (total=0) after connection broken by 'NewConnectionError(\"Connection refused\")'\n"
            "ERROR: Could not find a version that satisfies the requirement nixl==1 (from versions: none)",
            "connection broken",
            "sglang_wheelhouse",
        ),
        ("ERROR: No matching distribution found for nixl==9", "No matching distribution", "index has no such version"),
        (
            "ERROR: 401 Client Error: Unauthorized for url: https://bob:s3cret@x.example/simple?token=abc",
            "https://***@x.example/simple?token=***",
            "credentials",
        ),
        (
            "WARNING: noise\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "Errno 28",
            "make room",
        ),
        ("error: externally-managed-environment", "externally", "virtualenv"),
        (
            "  error: subprocess-exited-with-error\n  x Getting requirements to build wheel\nERROR: Failed to build",
            "subprocess-exited",
            "",
        ),
        (
            "ERROR: Cannot install greedy==1 because these package versions have conflicting dependencies.\n\n"
            "The conflict is caused by:\n    greedy 1 depends on torch==2.15.0\n"
            "    The user requested (constraint) torch<=2.14.1\n\nTo fix this you could try to:\n1. loosen",
            "greedy 1 depends on torch==2.15.0; The user requested (constraint) torch<=2.14.1",
            "",
        ),
        ("", "no output", ""),
    ],
)
def test_first_real_line_and_mend(stderr, line, mend):
    problem = packages.explain("", stderr)
    assert line in problem.line and mend in problem.mend
    assert "s3cret" not in problem.line and "abc" not in problem.line


def test_with_a_wheelhouse_the_network_is_not_blamed():
    problem = packages.explain("", "ERROR: No matching distribution found for nixl==9", wheelhouse="/srv/wheels")
    assert problem.mend.startswith("the wheelhouse /srv/wheels")


@given(st.text(), st.text())
def test_hostile_text_never_raises(one, other):
    packages.parse_record(one)
    packages.explain(one, other)
    packages.parse_wheel_name(one + ".whl")
    packages.wheel_targets([one, other], one)
    assert len(packages.tail(one)) <= 15
    try:
        packages.parse_requirement(one)
    except packages.BadRemedy:
        pass


@given(st.from_regex(r"[A-Za-z0-9._~:@%-]{1,20}", fullmatch=True))
def test_credentials_never_survive(secret):
    assert packages.redact(f"see https://user:{secret}@host/simple and more") == "see https://***@host/simple and more"


def test_record_with_quotes_and_rubbish():
    rows = packages.parse_record('a.py,sha256=x,3\n"b,c.py",,\n\n,,\nd\0.py,md5=1,many\n')
    assert rows == [
        packages.Row("a.py", "sha256=x", 3),
        packages.Row("b,c.py", "", None),
        packages.Row("d.py", "md5=1", None),
    ]
