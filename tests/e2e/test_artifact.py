# SPDX-License-Identifier: GPL-3.0-or-later
"""The built artifact, installed alone: complete, without test equipment, and able to look at a host."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in argv],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
        env={**os.environ, "ANSIBLE_FORCE_COLOR": "0", **env},
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact")
    built = run(BIN / "ansible-galaxy", "collection", "build", ROOT, "--output-path", folder)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("gpufleet-sglang-*.tar.gz"))


def test_it_holds_what_a_user_needs_and_no_test_equipment(artifact):
    with tarfile.open(artifact) as archive:
        names = archive.getnames()
    tops = {name.split("/")[0] for name in names}
    assert {"meta", "plugins", "roles", "playbooks", "docs", "extensions", "changelogs", "README.md", "LICENSE"} <= tops
    assert not tops & {"tests", "molecule", "collections", ".git", ".venv", ".ci"}
    assert not [name for name in names if name.endswith((".pyc", ".whl", ".so"))]


def test_it_works_alone(artifact, tmp_path):
    collections = tmp_path / "collections"
    installed = run(BIN / "ansible-galaxy", "collection", "install", artifact, "-p", collections, "--offline")
    assert installed.returncode == 0, installed.stderr
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "sglang:\n  hosts:\n    here:\n      ansible_connection: local\n      ansible_become: false\n"
        f"      ansible_python_interpreter: {sys.executable}\n      sglang_venv: {venv}\n"
        f"      sglang_artifacts_dir: {tmp_path}/out\n      sglang_backends: {{nixl: [kv_transfer]}}\n"
    )
    done = run(
        BIN / "ansible-playbook", "-i", inventory, "gpufleet.sglang.probe", ANSIBLE_COLLECTIONS_PATH=str(collections)
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "nixl" in done.stdout and "not_installed" in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()
