# SPDX-License-Identifier: GPL-3.0-or-later
"""The Molecule scenario ``default``: two real hosts through the whole journey, twice, looked at from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.hosts


def test_the_scenario_converges_once_and_is_then_at_rest():
    log = ROOT / "tests" / "output" / "molecule.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("molecule")), "test", "--scenario-name", "default"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    said = log.read_text()
    assert done.returncode == 0, said[-9000:]
    inventory = yaml.safe_load((ROOT / "molecule/default/inventory/hosts.yml").read_text())
    key = inventory["sglang"]["hosts"]["mol-a"]["sglang_secrets"]["api_key"]
    assert "PLAY RECAP" in said and "--port" in said
    assert key not in said
