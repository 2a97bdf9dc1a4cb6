# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml builds DeepEP in a wave: real nvcc on one of two real hosts, the other one has no compiler at all.

Slow: it needs nvcc and a venv with a CUDA torch (see docs/deepep.md). What is compiled is our own extension of the same
shape.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("GPUFLEET_CUDA_VENV", ROOT / ".cache" / "cuda-torch-venv"))
PYTHON = VENV / "bin" / "python"
# nvcc on the path may be a script that calls the one of the toolkit.
TOOLKIT = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda").resolve()
SITE = "/opt/sglang/venv/lib/python*/site-packages"
WHEELS = "/var/lib/gpufleet-sglang/wheels"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no CUDA torch in {VENV} (see docs/deepep.md)"),
    pytest.mark.skipif(not (TOOLKIT / "bin" / "nvcc").exists(), reason=f"no nvcc in {TOOLKIT}"),
]


def counts(done: Any, host: str) -> dict[str, int]:
    line = re.search(rf"^{host} +: (.*)$", done.stdout, re.MULTILINE)
    assert line, done.stdout[-3000:]
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", line.group(1))}


def test_the_first_wave_compiles_and_nobody_ever_again(fleet: Any, tmp_path: Path) -> None:
    home = PYTHON.resolve().parents[1]
    options = (
        f"overlay={VENV}@/opt/sglang/venv:mount={home}@{home}:mount={TOOLKIT}@{TOOLKIT}"
        f":overlay={ROOT}/tests/fixtures/cuda_ext@/srv/src"
    )
    two = fleet("bld", f"bld-a:{options}", f"bld-b:{options}")
    artifacts = tmp_path / "artifacts"
    wanted = tmp_path / "wanted.yml"
    variables = {
        "sglang_venv": "/opt/sglang/venv",
        "sglang_backends": {"deep_ep": ["a2a"]},
        "sglang_deepep_build": True,
        "sglang_deepep_source": "/srv/src",
        "sglang_deepep_archs": ["9.0"],
        "sglang_deepep_cuda_home": str(TOOLKIT),
        "sglang_waves": [1, 1],
        "sglang_artifacts_dir": str(artifacts),
    }
    wanted.write_text(yaml.safe_dump({"sglang": {"vars": variables}}))

    def site(*arguments: str) -> Any:
        return two.play("site", "-i", str(wanted), *arguments)

    # What cannot be built fails with its first real error, and nothing was touched.
    failed = site("--limit", "bld-b")
    assert failed.returncode and "cxx_compiler_missing" in failed.stdout, failed.stdout[-3000:]
    assert counts(failed, "bld-b")["changed"] == 0
    assert two.shell("bld-b", f"ls {WHEELS} 2>/dev/null || true") == ""

    two.shell("bld-a", "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++ >/dev/null")
    checked = site("--check")
    assert checked.returncode == 0, checked.stdout[-3000:]
    assert re.search(r"builds DeepEP \w{16} for", checked.stdout)
    assert re.search(r"copies DeepEP \w{16} from bld-a", checked.stdout)
    assert two.shell("bld-a", f"ls {WHEELS} 2>/dev/null || true") == ""

    first = site()
    assert first.returncode == 0, first.stdout[-3000:]
    hosts = json.loads((artifacts / "report.json").read_text())["hosts"]
    builds = {name: host["venvs"]["/opt/sglang/venv"]["build"] for name, host in hosts.items()}
    assert {name: build["state"] for name, build in builds.items()} == {"bld-a": "built", "bld-b": "present"}
    assert builds["bld-a"]["sha256"] == builds["bld-b"]["sha256"]
    for host in ("bld-a", "bld-b"):
        assert "deep_ep" in two.shell(host, f"ls -d {SITE}/deep_ep-*.dist-info")
        assert hosts[host]["venvs"]["/opt/sglang/venv"]["backends"]["deep_ep"]["after"]["state"] == "ok"

    again = site()
    assert again.returncode == 0, again.stdout[-3000:]
    assert {counts(again, host)["changed"] for host in ("bld-a", "bld-b")} == {0}

    # As in AWX: the controller has forgotten the wheel; a host without a compiler gets it from one that kept it.
    shutil.rmtree(artifacts / "wheels")
    two.shell("bld-b", f"rm -rf {WHEELS} {SITE}/deep_ep*")
    kept = site()
    assert kept.returncode == 0, kept.stdout[-3000:]
    assert "bld-b -> bld-a" in kept.stdout
    assert counts(kept, "bld-a")["changed"] == 0
    assert "deep_ep" in two.shell("bld-b", f"ls -d {SITE}/deep_ep-*.dist-info")
