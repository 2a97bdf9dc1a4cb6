# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module itself, on the field's real wheels and on two Pythons.

Wheels come once from the configured package index and are then kept in the cache.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("GPUFLEET_CACHE") or pathlib.Path.home() / ".cache" / "gpufleet-sglang")
NON_CUDA = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
CUDA12 = "mooncake-transfer-engine==0.3.13.post1"
CUDA13 = "mooncake-transfer-engine-cuda13==0.3.13.post1"


def interpreter(version):
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    found = sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))
    found.append(shutil.which(f"python{version}") or "")
    for path in found:
        if path and subprocess.run([path, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"there is no Python {version} here")


@pytest.fixture(params=["3.11", "3.12"], scope="module")
def target(request, tmp_path_factory):
    """A venv with a real pip, and a folder with the real wheels for it."""
    venv = tmp_path_factory.mktemp(f"py{request.param}") / "venv"
    subprocess.run([interpreter(request.param), "-m", "venv", str(venv)], check=True)
    return venv


def house(target, tmp_path, *requirements):
    """A wheelhouse for this venv, filled from the cache, or once from the index."""
    cached = CACHE / "wheels"
    folder = tmp_path / "house"
    folder.mkdir()
    pip = [str(target / "bin" / "python"), "-m", "pip", "download", "-q", "--no-deps", "-d"]
    for requirement in requirements:
        offline = [*pip, str(folder), "--no-index", "--find-links", str(cached), requirement]
        if subprocess.run(offline, capture_output=True, check=False).returncode:
            cached.mkdir(parents=True, exist_ok=True)
            subprocess.run([*pip, str(cached), requirement], check=True)
            subprocess.run(offline, check=True)
    return folder


def call(tmp_path, target, *steps, check=False, **params):
    """One module call as Ansible makes it; returns its result."""
    given = {"venv": str(target), **params}
    if steps:
        given["remedies"] = [{"backend": "mooncake", "kind": "replace", "steps": list(steps)}]
    tree = tmp_path / "result"
    command = [
        *(str(pathlib.Path(sys.executable).parent / "ansible"), "localhost", "-i", "localhost,", "-c", "local"),
        *("-e", f"ansible_python_interpreter={sys.executable}", "--tree", str(tree)),
        *("-m", "gpufleet.sglang.backend_packages", "-a", json.dumps(given), *(["--check"] if check else [])),
    ]
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    shutil.rmtree(tree, ignore_errors=True)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert (tree / "localhost").exists(), done.stdout + done.stderr
    return json.loads((tree / "localhost").read_text())


def install(*names):
    return {"action": "pip_install", "packages": list(names), "args": {"flags": ["--no-deps", "--force-reinstall"]}}


def uninstall(*names):
    return {"action": "pip_uninstall", "packages": list(names)}


def picture(target):
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in (target / "lib").rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_wrong_distribution_then_both_variants_then_the_right_one_and_back(target, tmp_path):
    folder = house(target, tmp_path, "mooncake==0.0.1", NON_CUDA, CUDA12, CUDA13)
    closed = {"wheelhouse": str(folder)}
    assert call(tmp_path, target, install("mooncake==0.0.1"), **closed)["changed"]
    right = [uninstall("mooncake"), install(NON_CUDA)]
    assert call(tmp_path, target, *right, check=True, **closed)["changed"]
    assert call(tmp_path, target, *right, **closed)["changed"]
    assert not call(tmp_path, target, *right, **closed)["changed"]
    refused = call(tmp_path, target, install(CUDA13), **closed)
    assert refused["code"] == "file_owned_by_two_distributions"

    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "-q", "--no-index", "--no-deps", "-f", str(folder)]
    subprocess.run([*pip, CUDA12], check=True)
    clobbered = picture(target)
    swap = [uninstall("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"), install(CUDA13)]
    swapped = call(tmp_path, target, *swap, **closed)
    assert [step["state"] for step in swapped["steps"]] == ["done", "done"] and swapped["restart_needed"]
    assert not call(tmp_path, target, *swap, **closed)["changed"]
    engine = next((target / "lib").glob("python3*/site-packages/mooncake/engine*.so"))
    assert b"libcudart.so.13" in engine.read_bytes()
    engine.unlink()
    assert call(tmp_path, target, *swap, **closed)["changed"]
    assert engine.exists()
    assert call(tmp_path, target, state="restored", journal_id=swapped["journal_id"])["changed"]
    assert picture(target) == clobbered


@pytest.mark.slow
def test_nixl_meta_package_is_added_to_a_bare_variant(target, tmp_path):
    closed = {"wheelhouse": str(house(target, tmp_path, "nixl==1.5.1", "nixl-cu13==1.5.1"))}
    call(tmp_path, target, install("nixl-cu13==1.5.1"), **closed)
    added = call(tmp_path, target, install("nixl==1.5.1", "nixl-cu13==1.5.1"), **closed)
    assert [step["packages"] for step in added["steps"]] == [["nixl==1.5.1"]]
    assert not call(tmp_path, target, install("nixl==1.5.1", "nixl-cu13==1.5.1"), **closed)["changed"]


def test_a_failure_is_one_message(target, tmp_path):
    (tmp_path / "house").mkdir()
    failed = call(tmp_path, target, install("nixl==9.9"), wheelhouse=str(tmp_path / "house"))
    assert failed["code"] == "pip_failed"
    assert "nixl==9.9" in failed["msg"] and "wheelhouse" in failed["msg"] and len(failed["msg"]) < 600
    assert "Traceback" not in json.dumps(failed)
