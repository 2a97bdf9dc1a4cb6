#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Speed as ratios, each taken in one run: plays alternate on the same ssh hosts, so that a busy machine is in both.

    make bench
    python tests/bench/bench.py [--rounds N] [--hosts N] [--keep]

Every play has one task, become, and as many forks as there are hosts. A ratio is the median over the rounds of one
play's time against that of ``ansible.builtin.ping`` in the same round. The last line is all figures as JSON; the exit
status says whether the limits were kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "collections"), str(ROOT)]

from ansible_collections.gpufleet.sglang.plugins.module_utils import _server_args

from tests.bench import plan_1000_hosts

HOSTS = ROOT / "tests" / "hosts" / "hosts.py"
PREFIX = "bench"
LIMIT_RATIO = 1.3
BARE, FULL = "/opt/bare/venv", "/opt/sglang/venv"
NAIVE = (
    "for module in deep_ep mooncake.engine nixl._api; do timeout 120 {venv}/bin/python -c \"import $module\" "
    "&& echo $module yes || echo $module no; done"
)  # fmt: skip


def task(module: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A play of one task."""
    return [{"hosts": "all", "gather_facts": False, "become": True, "tasks": [{module: options}]}]


def probe(venv: str, level: str) -> list[dict[str, Any]]:
    """The play of the probe, of backends only."""
    options = {"venv": venv, "gather_subset": ["backends"], "gather_level": level, "probe_environment": {}}
    return task("gpufleet.sglang.probe_info", options)


def naive(venv: str) -> list[dict[str, Any]]:
    """What one writes without this collection: a task that imports the three, and says no for every reason."""
    return task("ansible.builtin.shell", {"cmd": NAIVE.format(venv=venv)})


PLAYS = {
    "ping": task("ansible.builtin.ping", {}),
    "naive, three absent": naive(BARE),
    "probe, three absent": probe(BARE, "auto"),
    "naive, installed": naive(FULL),
    "probe static, installed": probe(FULL, "static"),
    "probe, installed": probe(FULL, "auto"),
}


class Fleet:
    """The hosts of the benchmark. Every one has an empty venv and one with a real torch and a real mooncake."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.folder = tempfile.TemporaryDirectory(prefix="gpufleet-bench-")
        self.inventory = Path(self.folder.name) / "inventory.yml"
        for name, play in PLAYS.items():
            self.path(name).write_text(json.dumps(play))

    def path(self, name: str) -> Path:
        return Path(self.folder.name) / (name.replace(" ", "_").replace(",", "") + ".yml")

    def tool(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(HOSTS), *arguments], check=False, stdout=subprocess.PIPE, text=True, timeout=900
        )
        if done.returncode:
            raise SystemExit(f"tests/hosts/hosts.py {' '.join(arguments[:2])} failed")
        return done.stdout

    def up(self) -> None:
        names = [f"bench-{number}" for number in range(1, self.count + 1)]
        self.tool("up", "--prefix", PREFIX, *(f"{name}:ops:env=gpu-c" for name in names))
        self.inventory.write_text(self.tool("inventory", "--prefix", PREFIX))
        for name in names:
            script = f"test -e {BARE} || python3 -m venv --without-pip {BARE}"
            self.tool("exec", f"{PREFIX}/{name}", "sh", "-c", script)

    def down(self) -> None:
        self.tool("down", "--prefix", PREFIX)
        self.folder.cleanup()

    def play(self, name: str) -> dict[str, float]:
        """Wall seconds of a play, and CPU seconds of the controller's processes."""
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(self.inventory), "-f",
                str(self.count), str(self.path(name)),
            ],
            capture_output=True, text=True, check=False, cwd=ROOT, timeout=600,
            env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")},
        )  # fmt: skip
        wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"wall": wall, "cpu": cpu}


def measure(fleet: Fleet, rounds: int) -> dict[str, dict[str, float]]:
    """Medians by play; the order turns from round to round, and one round beforehand opens the connections."""
    names = list(PLAYS)
    fleet.play("ping")
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(fleet.play(name))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        name: {
            "wall_s": round(statistics.median(run["wall"] for run in runs), 2),
            "controller_cpu_s": round(statistics.median(run["cpu"] for run in runs), 2),
            "ratio": round(statistics.median(a["wall"] / b["wall"] for a, b in zip(runs, taken["ping"])), 2),
            "ratio_least": round(min(a["wall"] / b["wall"] for a, b in zip(runs, taken["ping"])), 2),
            "ratio_most": round(max(a["wall"] / b["wall"] for a, b in zip(runs, taken["ping"])), 2),
        }
        for name, runs in taken.items()
    }


def flag_reading() -> Optional[dict[str, Any]]:
    """CPU seconds to read every flag of each SGLang whose environment is in the cache of the test hosts."""
    cache = os.environ.get("GPUFLEET_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gpufleet-sglang"
    )
    found = {}
    for site in sorted(Path(cache, "env").glob("sglang-0*/tree/lib/python3*/site-packages")):
        version = site.parents[3].name.split("-")[1]
        started = time.process_time()
        read = _server_args.read_server_args(str(site), version)
        found[version] = {
            "cpu_s": round(time.process_time() - started, 2),
            "flags": len(read.get("flags") or {}),
            "bytes": len(json.dumps(_server_args.compact(read))),
        }
    return found or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--keep", action="store_true", help="leave the hosts running")
    given = parser.parse_args()
    fleet = Fleet(given.hosts)
    figures: dict[str, Any] = {"hosts": given.hosts, "rounds": given.rounds, "cpus": os.cpu_count()}
    try:
        fleet.up()
        figures["load_before"] = round(os.getloadavg()[0], 1)
        figures["plays"] = measure(fleet, given.rounds)
        figures["load_after"] = round(os.getloadavg()[0], 1)
    finally:
        if not given.keep:
            fleet.down()
    figures["plan_1000_hosts"] = plan_1000_hosts.measure(1000)
    figures["flag_reading"] = flag_reading()
    print(f"{'play':28}{'median s':>10}{'ratio':>8}{'least':>8}{'most':>8}{'controller CPU s':>18}")
    for name, row in figures["plays"].items():
        print(f"{name:28}{row['wall_s']:10.2f}{row['ratio']:8.2f}{row['ratio_least']:8.2f}{row['ratio_most']:8.2f}"
              f"{row['controller_cpu_s']:18.2f}")  # fmt: skip
    print(f"planning 1000 hosts: {figures['plan_1000_hosts']['total_seconds']} CPU s")
    for version, row in (figures["flag_reading"] or {}).items():
        print(f"flags of SGLang {version}: {row['flags']} in {row['cpu_s']} CPU s, {row['bytes']} bytes on the wire")
    print(json.dumps(figures))
    kept = figures["plays"]["probe, three absent"]["ratio"] <= LIMIT_RATIO
    return 0 if kept and figures["plan_1000_hosts"]["total_seconds"] <= plan_1000_hosts.LIMIT_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
