# SPDX-License-Identifier: GPL-3.0-or-later
"""One venv with the real nixl-cu13 1.4.1 on a real H200, probed with the driver and with the driver taken away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _launch_plan

PROBES = Path(__file__).parents[1] / "fixtures" / "probes"


def recorded(name):
    return json.loads((PROBES / f"{name}.json").read_text())


def plan(probe, use):
    return _launch_plan.make_plan(None, probe, {"nixl": [use]}, {}, [], "gpu-01")


@pytest.mark.parametrize("use", ["kv_transfer", "a2a", "elastic_ep"])
def test_with_the_driver_every_use_imports(use):
    probe = recorded("h200-nixl")
    assert probe["backends"]["nixl"]["uses"][use]["state"] == "ok"
    assert probe["backends"]["nixl"]["uses"][use]["level"] == "import"
    assert plan(probe, use)["remedies"] == [] and plan(probe, use)["warnings"] == []


def test_without_it_gpu_code_needs_the_driver_and_no_wheel_is_touched():
    probe = recorded("h200-nixl-no-driver")
    seen = probe["backends"]["nixl"]["uses"]
    assert (seen["a2a"]["state"], seen["a2a"]["code"]) == ("needs_gpu", "no_driver")
    assert seen["a2a"]["remedy"]["kind"] == "driver"
    made = plan(probe, "a2a")
    assert made["remedies"] == []
    assert [warning["code"] for warning in made["warnings"]] == ["wanted_backend_not_mendable"]


def test_kv_transfer_does_not_need_it():
    probe = recorded("h200-nixl-no-driver")
    assert probe["backends"]["nixl"]["uses"]["kv_transfer"]["state"] == "ok"
    assert plan(probe, "kv_transfer")["warnings"] == []
