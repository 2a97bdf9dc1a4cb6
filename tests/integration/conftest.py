# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests on real hosts share: hosts that live for one module, commands on them, and ansible-playbook."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "tests" / "hosts" / "hosts.py"


class Fleet(NamedTuple):
    """Real hosts under one prefix. ``inventory`` is the file that Ansible takes."""

    prefix: str
    inventory: Path

    def shell(self, host: str, script: str, check: bool = True) -> str:
        """Run a shell script as root on a host; returns its standard output."""
        done = subprocess.run(
            [sys.executable, str(HOSTS), "exec", f"{self.prefix}/{host}", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{host}: {script}: rc {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def play(self, playbook: str, *arguments: str, inventory: Path | None = None, **env: str) -> Any:
        """Run a playbook of the collection; returns the finished process with its output as text."""
        return subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                "-i",
                str(inventory or self.inventory),
                f"gpufleet.sglang.{playbook}",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
                "ANSIBLE_FORCE_COLOR": "0",
                **env,
            },
        )


@pytest.fixture(scope="module")
def fleet() -> Iterator[Callable[..., Fleet]]:
    """``fleet(prefix, spec, …)`` makes hosts as hosts.py takes them; they go with the module's last test."""
    made: list[str] = []

    def make(prefix: str, *specs: str, backend: str = "podman") -> Fleet:
        made.append(prefix)
        up = [sys.executable, str(HOSTS), "up", "--prefix", prefix, "--backend", backend, *specs]
        subprocess.run(up, check=True, timeout=900, capture_output=True, text=True)
        inventory = subprocess.run(
            [sys.executable, str(HOSTS), "inventory", "--prefix", prefix],
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
        ).stdout
        path = ROOT / "tests" / "output" / f"{prefix}.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(inventory)
        return Fleet(prefix, path)

    yield make
    for prefix in made:
        subprocess.run([sys.executable, str(HOSTS), "down", "--prefix", prefix], check=True, timeout=300)
