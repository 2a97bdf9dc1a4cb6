# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans of the worked inventories on recorded hosts, as files that a reader can look at.

``GOLDEN_WRITE=1 pytest tests/unit/test_golden_plans.py`` writes them anew; the diff is then reviewed like code.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible.vars.manager import VariableManager
from ansible_collections.gpufleet.sglang.plugins.filter import intents as intents_filter
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fleet_plan, _intents, _launch_plan, _plan_text

from tests.unit.plan_support import FIXTURES, probe

ROOT = FIXTURES.parent.parent
PLANS = FIXTURES / "plans"


def inventory(name: str, **extra: Any) -> dict[str, dict[str, Any]]:
    """Variables of every host of a worked inventory, resolved the way Ansible resolves them."""
    loader = DataLoader()
    hosts = InventoryManager(loader=loader, sources=[str(ROOT / "inventories" / name / "hosts.yml")])
    manager = VariableManager(loader=loader, inventory=hosts)
    manager.extra_vars.update(extra)
    result = {}
    for host in hosts.get_hosts("sglang"):
        variables = manager.get_vars(host=host)
        templar = Templar(loader=loader, variables=variables)
        own = {key: value for key, value in variables.items() if key.startswith("sglang_")}
        result[host.name] = _intents.plain(templar.template(own))
    return result


def plans(name: str, recorded: str, **extra: Any) -> dict[str, dict[str, Any]]:
    result = {}
    for host, variables in inventory(name, **extra).items():
        wanted = intents_filter.intents(variables)
        result[host] = {
            "intents": wanted,
            "plans": {
                instance: _launch_plan.make_plan(
                    intent, probe(recorded), wanted["backends"], wanted["settings"], wanted["problems"], host
                )
                for instance, intent in wanted["instances"].items()
            },
        }
    return result


def golden(path: str, text: str) -> None:
    file = PLANS / path
    if os.environ.get("GOLDEN_WRITE"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{path} differs; GOLDEN_WRITE=1 writes it anew"


def both(path: str, host: str, plan: dict[str, Any]) -> None:
    golden(f"{path}.txt", _plan_text.plan_text(plan, host) + "\n")
    golden(f"{path}.json", json.dumps(plan, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("choice", ["tp8", "pp8", "ep8", "ep4"])
def test_kimi_on_eight_rtx_pro_6000(choice: str) -> None:
    told = plans("pcie-rtxpro6000", "pcie-rtxpro6000", choice=choice)
    assert sorted(told) == ["rtx-01", "rtx-02"]
    plan = told["rtx-01"]["plans"]["default"]
    assert plan["rejections"] == []
    assert plan["effective"]["moe_a2a_backend"] == "none"
    both(f"pcie-rtxpro6000/{choice}", "rtx-01", plan)


@pytest.mark.parametrize("host", ["b300-01", "b300-02", "b300-03"])
def test_kimi_on_b300(host: str) -> None:
    told = plans("nvlink-b300", "nvlink-b300", vault_sglang_api_key="not-a-secret-of-anybody")
    plan = told[host]["plans"]["default"]
    assert plan["rejections"] == []
    assert plan["effective"]["moe_a2a_backend"] == "deepep"
    assert plan["effective"]["nnodes"] == (1 if host == "b300-01" else 2)
    both(f"nvlink-b300/{host}", host, plan)
    assert "not-a-secret-of-anybody" not in json.dumps(told)


def test_the_waves_of_the_b300_fleet() -> None:
    fleet = _fleet_plan.fleet_plan(plans("nvlink-b300", "nvlink-b300", vault_sglang_api_key="x"))
    assert fleet["accepted"], fleet["message"]
    assert fleet["waves"] == [
        [{"instance": "default", "hosts": ["b300-01"]}],
        [{"instance": "default", "hosts": ["b300-02", "b300-03"]}],
    ]
    assert fleet["serial"] == [1, 2]


@pytest.mark.parametrize(
    ("name", "recorded", "variables", "a2a"),
    [
        ("auto", "h200x2", {}, "deepep"),
        (
            "low-latency",
            "h200x2",
            {"sglang_moe_a2a_backend": "deepep", "sglang_flags": {"deepep_mode": "low_latency"}},
            "deepep",
        ),
        (
            "before-deepep-fallback",
            "h200x2-before-deepep",
            {"sglang_moe_a2a_backend": ["deepep", "mooncake", "nixl"]},
            None,
        ),
        (
            "before-deepep-build",
            "h200x2-before-deepep",
            {"sglang_moe_a2a_backend": "deepep", "sglang_on_missing_backend": "build"},
            "deepep",
        ),
    ],
)
def test_plans_from_what_the_module_saw_on_two_real_h200(
    name: str, recorded: str, variables: dict[str, Any], a2a: str | None
) -> None:
    host = json.loads((FIXTURES / "probes" / f"{recorded}.json").read_text())
    own = {"sglang_venv": host["venv"]["path"], "sglang_model_path": host["model"]["path"], **variables}
    # The model of the recording has no weights: it was served with made-up ones.
    own["sglang_flags"] = {"load_format": "dummy", **own.get("sglang_flags", {})}
    wanted = intents_filter.intents(own)
    plan = _launch_plan.make_plan(
        wanted["instances"]["default"], host, wanted["backends"], wanted["settings"], wanted["problems"], "h200"
    )
    assert plan["rejections"] == []
    assert plan["effective"]["tp_size"] == 2
    assert a2a is None or plan["effective"]["moe_a2a_backend"] == a2a
    both(f"h200x2/{name}", "h200", plan)


def test_what_the_b300_hosts_would_do_without_their_backends() -> None:
    host = probe("nvlink-b300")
    host["backends"] = probe("pcie-rtxpro6000")["backends"]
    variables = inventory("nvlink-b300", vault_sglang_api_key="x")["b300-01"]
    wanted = intents_filter.intents(variables)
    plan = _launch_plan.make_plan(
        wanted["instances"]["default"], host, wanted["backends"], wanted["settings"], wanted["problems"], "b300-01"
    )
    assert plan["rejections"] == []
    assert plan["assumes"] == [{"backend": "deep_ep", "use": "a2a", "state": "ok", "after": "install"}]
    both("nvlink-b300/without-backends", "b300-01", plan)
