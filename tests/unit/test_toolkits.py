# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CUDA toolkits in trees that look like hosts: every one found once, and the right one chosen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkits
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import run
from hypothesis import given
from hypothesis import strategies as st

NVCC = Path(__file__).parents[1] / "fixtures" / "nvcc"


def sample(name: str) -> str:
    return (NVCC / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "version", "build"),
    [
        ("nvcc_11.5_distro.txt", "11.5", "11.5.119"),
        ("nvcc_12.4.txt", "12.4", "12.4.99"),
        ("nvcc_12.8.txt", "12.8", "12.8.93"),
        ("nvcc_13.0.txt", "13.0", "13.0.88"),
        ("nvcc_9.0_old_no_build_line.txt", "9.0", "9.0.225"),
        ("nvcc_err_wrapper.txt", None, None),
        ("../h200x2/nvcc.txt", "13.0", "13.0.88"),
    ],
)
def test_nvcc_samples(name: str, version: str | None, build: str | None) -> None:
    assert _toolkits.parse_nvcc(sample(name)) == {"version": version, "build": build}


def test_every_sample_is_in_the_tests() -> None:
    told = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in NVCC.iterdir() if path.name not in told] == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}, "cuda_nvcc": {"version": "12.8.93"}}', "12.8"),
        ('{"cuda": {"version": "13.0.0"}}', "13.0"),
        ("CUDA Version 10.2.89\n", "10.2"),
        ('{"cuda": {"version": 13}}', None),
        ('{"cuda": "13.0"}', None),
        ("[]", None),
        ("", None),
    ],
)
def test_version_files(text: str, version: str | None) -> None:
    assert _toolkits.parse_version_file(text) == version


def put_nvcc(root: Path, path: str, name: str, rc: int = 0) -> None:
    """An executable nvcc that prints a sample, as a real nvcc (or a broken wrapper) does."""
    program = root / path.lstrip("/") / "bin" / "nvcc"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\ncat {NVCC / name}\nexit {rc}\n")
    program.chmod(0o755)


def host(root: Path, torch_cuda: str | None = None, **more: object) -> Context:
    return Context(run=run, root=str(root), torch={"cuda": torch_cuda}, **more)  # type: ignore[arg-type]


def three(root: Path) -> None:
    put_nvcc(root, "/usr", "nvcc_11.5_distro.txt")
    put_nvcc(root, "/usr/local/cuda-12.8", "nvcc_12.8.txt")
    put_nvcc(root, "/usr/local/cuda-13.0", "nvcc_13.0.txt")
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-13.0")
    (root / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")


def test_the_toolkit_follows_torch_and_not_the_path(tmp_path: Path) -> None:
    three(tmp_path)
    found = _toolkits.gather(host(tmp_path, "12.8", environment={"PATH": "/usr/local/cuda/bin:/usr/bin"}))
    assert [(t["path"], t["version"], t["nvcc_works"], t["matches_torch"]) for t in found["toolkits"]] == [
        ("/usr/local/cuda-13.0", "13.0", True, False),
        ("/usr/local/cuda-12.8", "12.8", True, True),
        ("/usr", "11.5", True, False),
    ]
    assert found["best"] == "/usr/local/cuda-12.8"
    assert found["cuda_home"] == {"value": None, "problem": None, "message": "", "suggestion": None}


@pytest.mark.parametrize(("torch_cuda", "best"), [("13.0", "13.0"), ("12.6", "12.8"), ("12.9", "12.8"), ("11.8", None)])
def test_only_the_same_major_will_do(torch_cuda: str, best: str | None, tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/usr/local/cuda-12.8", "nvcc_12.8.txt")
    put_nvcc(tmp_path, "/usr/local/cuda-13.0", "nvcc_13.0.txt")
    found = _toolkits.gather(host(tmp_path, torch_cuda))
    assert found["best"] == (best and f"/usr/local/cuda-{best}")


@pytest.mark.parametrize("torch_cuda", [None, "", "rocm"])
def test_a_torch_without_cuda_matches_nothing(torch_cuda: str | None, tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/opt/cuda-13.0", "nvcc_13.0.txt")
    found = _toolkits.gather(host(tmp_path, torch_cuda))
    assert [(t["path"], t["matches_torch"]) for t in found["toolkits"]] == [("/opt/cuda-13.0", None)]
    assert found["best"] is None


@pytest.mark.parametrize(
    ("versions", "torch_cuda", "best"),
    [
        (["12.4", "12.8", "12.9"], "12.6", "12.8"),
        (["12.4", "12.1"], "12.6", "12.4"),
        (["12.6", "12.9"], "12.6", "12.6"),
        (["13.0"], "12.6", None),
        ([], "12.6", None),
    ],
)
def test_choose(versions: list[str], torch_cuda: str, best: str | None) -> None:
    toolkits = [{"path": version, "version": version, "nvcc_works": True} for version in versions]
    assert _toolkits.choose(toolkits, torch_cuda) == best
    assert _toolkits.choose([dict(t, nvcc_works=False) for t in toolkits], torch_cuda) is None


def test_a_broken_nvcc_is_told_with_the_version_of_its_folder(tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/usr/local/cuda-12.8", "nvcc_err_wrapper.txt", rc=127)
    version = tmp_path / "usr/local/cuda-12.8/version.json"
    version.write_text(json.dumps({"cuda": {"version": "12.8.1"}}))
    found = _toolkits.gather(host(tmp_path, "12.8"))
    toolkit = found["toolkits"][0]
    assert (toolkit["version"], toolkit["nvcc_works"], toolkit["matches_torch"]) == ("12.8", False, True)
    assert toolkit["source"] == "version.json"
    assert "rc 127" in toolkit["message"]
    assert "not found" in toolkit["message"]
    assert found["best"] is None


def test_a_wrapper_on_the_path_is_no_toolkit(tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/usr/local", "nvcc_13.0.txt")
    found = _toolkits.gather(host(tmp_path, "13.0"))
    assert [(t["path"], t["nvcc_works"], t["wrapper"]) for t in found["toolkits"]] == [("/usr/local", True, True)]
    assert found["best"] is None
    put_nvcc(tmp_path, "/usr", "nvcc_13.0.txt")
    assert _toolkits.gather(host(tmp_path, "13.0"))["best"] == "/usr"
    header = tmp_path / "usr/local/include/cuda_runtime.h"
    header.parent.mkdir()
    header.touch()
    assert _toolkits.gather(host(tmp_path, "13.0", environment={"PATH": "/usr/local/bin"}))["best"] == "/usr/local"


def test_an_nvcc_that_says_something_else_does_not_work(tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/usr/local/cuda", "nvcc_err_wrapper.txt", rc=0)
    assert [t["nvcc_works"] for t in _toolkits.gather(host(tmp_path, "12.8"))["toolkits"]] == [False]


def test_a_hanging_nvcc_is_told(tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/usr/local/cuda", "nvcc_13.0.txt")
    (tmp_path / "usr/local/cuda/bin/nvcc").write_text("#!/bin/sh\nexec sleep 60\n")
    toolkit = _toolkits.read_toolkit(host(tmp_path, command_timeout=0.3), "/usr/local/cuda")
    assert (toolkit["nvcc_works"], toolkit["version"]) == (False, None)
    assert "no answer in 0.3 s" in toolkit["message"]


def test_the_pip_toolkit_of_the_venv_is_found(tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/v/lib/python3.12/site-packages/nvidia/cu13", "nvcc_13.0.txt")
    context = host(tmp_path, "13.0", venv={"site_packages": ["/v/lib/python3.12/site-packages"]})
    assert _toolkits.gather(context)["best"] == "/v/lib/python3.12/site-packages/nvidia/cu13"


@pytest.mark.parametrize(
    ("machine", "headers", "cccl"),
    [
        ("x86_64", ["targets/x86_64-linux/include/cccl"], "targets/x86_64-linux/include/cccl"),
        ("aarch64", ["targets/sbsa-linux/include/cccl"], "targets/sbsa-linux/include/cccl"),
        (
            "aarch64",
            ["targets/aarch64-linux/include/cccl", "targets/sbsa-linux/include/cccl"],
            "targets/sbsa-linux/include/cccl",
        ),
        ("x86_64", ["include/cccl", "targets/x86_64-linux/include/cccl"], "include/cccl"),
        ("x86_64", ["include"], None),
        ("x86_64", [], None),
    ],
)
def test_cccl_headers(machine: str, headers: list[str], cccl: str | None, tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/opt/cuda-13.0", "nvcc_13.0.txt")
    for folder in headers:
        header = tmp_path / "opt/cuda-13.0" / folder / "cuda/std/tuple"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    toolkit = _toolkits.read_toolkit(host(tmp_path, venv={"machine": machine}), "/opt/cuda-13.0")
    assert toolkit["cccl"] == (cccl and f"/opt/cuda-13.0/{cccl}")


@pytest.mark.parametrize(
    ("value", "problem", "suggestion"),
    [
        (None, None, None),
        ("/usr/local/cuda-12.8", None, None),
        (":/usr/local/cuda-12.8", "cuda_home_is_a_path_list", "/usr/local/cuda-12.8"),
        ("/nowhere:/usr/local/cuda-12.8", "cuda_home_is_a_path_list", "/usr/local/cuda-12.8"),
        (":", "cuda_home_is_a_path_list", "/usr/local/cuda-12.8"),
        ("/nowhere", "cuda_home_absent", "/usr/local/cuda-12.8"),
        ("/usr/local", "cuda_home_without_nvcc", "/usr/local/cuda-12.8"),
        ("cuda", "cuda_home_relative", "/usr/local/cuda-12.8"),
    ],
)
def test_cuda_home(value: str | None, problem: str | None, suggestion: str | None, tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/usr/local/cuda-12.8", "nvcc_12.8.txt")
    environment = {} if value is None else {"CUDA_HOME": value}
    home = _toolkits.gather(host(tmp_path, "12.8", environment=environment))["cuda_home"]
    assert (home["value"], home["problem"], home["suggestion"]) == (value, problem, suggestion)
    assert bool(home["message"]) == bool(problem)
    if problem:
        assert repr(value) in home["message"]


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "usr/local").mkdir(parents=True)
    (tmp_path / "usr/local/cuda").symlink_to("/usr/local/cuda-1")
    (tmp_path / "usr/local/cuda-1").symlink_to("/usr/local/cuda")
    assert _toolkits.gather(host(tmp_path, "12.8"))["toolkits"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_somebody_elses_nvcc_is_not_run_as_root(tmp_path: Path) -> None:
    put_nvcc(tmp_path, "/opt/cuda", "nvcc_13.0.txt")
    program = tmp_path / "opt/cuda/bin/nvcc"
    program.write_text("#!/bin/sh\nid -u\n")
    os.chown(program, 65534, 65534)
    folder = tmp_path
    while str(folder) not in ("/", "/tmp"):
        folder.chmod(folder.stat().st_mode | 0o055)
        folder = folder.parent
    assert "65534" in _toolkits.read_toolkit(host(tmp_path), "/opt/cuda")["message"]


@given(st.text(max_size=200))
def test_hostile_text_never_raises(text: str) -> None:
    _toolkits.parse_nvcc("Cuda compilation tools, release " + text)
    _toolkits.parse_version_file(text)
    _toolkits.parse_version_file('{"cuda": ' + text)
    _toolkits.check_cuda_home(Context(root="/nonexistent"), text)
    _toolkits.choose([{"path": "/x", "version": text, "nvcc_works": True}], text)
