# SPDX-License-Identifier: GPL-3.0-or-later
"""When a plan names a build of DeepEP, and what the service is told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.plan_support import broken, decision, make, probe

H200 = "nvlink-h200-no-rdma"
ABSENT = {"deep_ep": json.loads(json.dumps(probe("pcie-rtxpro6000")["backends"]["deep_ep"]))}


def actions(plan: dict[str, Any]) -> list[str]:
    return [step["action"] for row in plan["remedies"] if row["required"] for step in row["steps"]]


@pytest.mark.parametrize(
    ("policy", "wanted", "builds"),
    [
        ("fallback", "deepep", True),
        ("install", "deepep", True),
        ("fail", "deepep", False),
        ("fallback", "auto", False),
        ("fallback", None, False),
    ],
)
def test_deepep_build_builds_what_is_asked_for_by_name(policy: str, wanted: Any, builds: bool) -> None:
    asked = {} if wanted is None else {"moe_a2a_backend": wanted}
    plan = make(probe(H200, backends=ABSENT), on_missing_backend=policy, deepep_build=True, **asked)
    assert actions(plan) == (["build"] if builds else [])
    assert bool(plan["rejections"]) is (policy == "fail")
    assert plan["effective"]["moe_a2a_backend"] == ("none" if wanted != "deepep" else "deepep")


def test_a_build_takes_away_what_it_would_overwrite() -> None:
    state = broken("deep_ep", "a2a", "broken", "torch_abi_mismatch", "replace")
    remedy = state["uses"]["a2a"]["remedy"]
    remedy["steps"] = [
        {"action": "pip_uninstall", "packages": ["sgl-deep-ep"], "args": {}},
        {"action": "pip_install", "packages": ["sgl-deep-ep==0.1.2.post1"], "args": {"flags": ["--no-deps"]}},
    ]
    plan = make(probe(H200, backends={"deep_ep": state}), moe_a2a_backend="deepep", on_missing_backend="build")
    steps = [step for row in plan["remedies"] for step in row["steps"]]
    assert [step["action"] for step in steps] == ["pip_uninstall", "build"]
    assert steps[0]["packages"] == ["sgl-deep-ep"]


def test_the_service_finds_the_nccl_of_its_deepep_on_every_run() -> None:
    for host in (probe(H200), probe(H200, backends=ABSENT)):
        plan = make(host, moe_a2a_backend="deepep", on_missing_backend="build", deepep_nccl_dir="/opt/nccl")
        assert plan["env"]["EP_NCCL_ROOT_DIR"] == "/opt/nccl"
        assert "NCCL" in decision(plan, "EP_NCCL_ROOT_DIR")["because"]
    given = make(
        probe(H200), moe_a2a_backend="deepep", deepep_nccl_dir="/opt/nccl", env_vars={"EP_NCCL_ROOT_DIR": "/mine"}
    )
    assert given["env"]["EP_NCCL_ROOT_DIR"] == "/mine"
    without = make(probe(H200), moe_a2a_backend="none", deepep_nccl_dir="/opt/nccl")
    assert "EP_NCCL_ROOT_DIR" not in without["env"]
