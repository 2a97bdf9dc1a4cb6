#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU seconds that reading the intents of, planning and judging 1000 hosts takes on the controller; at most 10.

PYTHONPATH=collections:. python tests/bench/plan_1000_hosts.py [HOSTS]
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "collections"), str(ROOT)]

from ansible_collections.gpufleet.sglang.plugins.module_utils import _fleet_plan, _intents, _launch_plan

from tests.unit.plan_support import probe

LIMIT_SECONDS = 10.0
RECORDED = ("pcie-rtxpro6000", "nvlink-b300", "nvlink-h200-no-rdma", "b200-gpu2-lost-nvlink")


def measure(count: int) -> dict[str, Any]:
    """Figures of one run; every host has its own copy of the probe, as it comes from the wire."""
    texts = [json.dumps(probe(name)) for name in RECORDED]
    inputs = []
    for number in range(count):
        variables = {
            "sglang_venv": "/opt/sglang/venv",
            "sglang_model_path": "/models/x",
            "sglang_moe_a2a_backend": "deepep, none",
            "sglang_failure_domain": f"rack-{number % 40}",
            "sglang_flags": {"max_running_requests": 256, "trust_remote_code": True, "num_continuous_decode_steps": 8},
        }
        inputs.append((f"gpu-{number:04}", variables, json.loads(texts[number % len(texts)])))
    started = time.process_time()
    hosts: dict[str, Any] = {}
    for host, variables, recorded in inputs:
        wanted = _intents.intents(variables)
        plans = {
            name: _launch_plan.make_plan(
                intent, recorded, wanted["backends"], wanted["settings"], wanted["problems"], host
            )
            for name, intent in wanted["instances"].items()
        }
        hosts[host] = {"intents": wanted, "plans": plans, "probe": recorded}
    planned = time.process_time()
    fleet = _fleet_plan.fleet_plan(hosts)
    judged = time.process_time()
    return {
        "hosts": count,
        "plan_seconds": round(planned - started, 3),
        "fleet_seconds": round(judged - planned, 3),
        "total_seconds": round(judged - started, 3),
        "waves": len(fleet["waves"]),
        "accepted": fleet["accepted"],
    }


def main() -> int:
    figures = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    print(json.dumps(figures))
    return 0 if figures["total_seconds"] <= LIMIT_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
