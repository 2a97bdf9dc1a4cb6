# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The published wheels, installed by pip into bare venvs of two Pythons.

torch is not among them: it weighs 5 GB and says nothing more here. Where a test needs one, ``torch/version.py`` and a
package that answers ``cuda.is_available()`` with False are put there by hand, so that every state below is one of a
host without a usable GPU. What else this host lacks (rdma-core, a driver) is read from its loader cache, and the
expectation follows it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _elf, _probe

pytestmark = [pytest.mark.slow]

CACHE = Path(os.environ.get("GPUFLEET_CACHE") or Path.home() / ".cache" / "gpufleet-sglang") / "wheels"
PYTHONS = ("3.11", "3.12")
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1")
CU12, CU13 = "mooncake-transfer-engine==0.3.13.post1", "mooncake-transfer-engine-cuda13==0.3.13.post1"
NON_CUDA = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
DEEP_EP = "sgl-deep-ep==0.1.2.post1"
MANYLINUX = [f"manylinux_2_{minor}_x86_64" for minor in (17, 27, 28, 34, 35, 39)]


def interpreter(version: str) -> str | None:
    found = shutil.which(f"python{version}")
    candidates = [found] if found else []
    candidates += [str(p) for p in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))]
    for path in candidates:
        if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    return None


def fetch(version: str, *requirements: str) -> None:
    """Downloads what the cache lacks."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for requirement in requirements:
        name, _equals, number = requirement.partition("==")
        tag = f"cp{version.replace('.', '')}"
        stem = f"{name.replace('-', '_')}-{number}-"
        if any(p.name.startswith(stem) and (tag in p.name or "none-any" in p.name) for p in CACHE.glob("*.whl")):
            continue
        platforms = [word for tag in (*MANYLINUX, "any") for word in ("--platform", tag)]
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                "--python-version", version, *platforms, "-d", str(CACHE), requirement]  # fmt: skip
        result = subprocess.run(argv, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"{requirement} cannot be fetched here: {result.stderr.strip()[-200:]}")


class Venv:
    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version = path, version
        python = interpreter(version)
        if python is None:
            pytest.skip(f"no Python {version} here")
        subprocess.run([python, "-m", "venv", str(path)], check=True)
        self.site = path / "lib" / f"python{version}" / "site-packages"

    def pip(self, *words: str) -> None:
        subprocess.run([str(self.path / "bin/pip"), "-q", *words], check=True, capture_output=True)

    def install(self, *requirements: str) -> Venv:
        fetch(self.version, *requirements)
        self.pip("install", "--no-deps", "--no-compile", "--no-index", "--find-links", str(CACHE), *requirements)
        return self

    def torch(self, version: str, cuda: str | None) -> Venv:
        folder = self.site / "torch"
        folder.mkdir()
        (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n")
        (folder / "__init__.py").write_text(
            "from torch import cuda, version\n__version__ = version.__version__\nint64 = 0\n"
        )
        (folder / "cuda.py").write_text("def is_available():\n    return False\n")
        return self

    def look(self, level: str = "auto") -> dict:
        result = _probe.probe(_probe.Request(str(self.path), ["backends"], level, import_timeout=120.0))
        return result["backends"]


@pytest.fixture(params=PYTHONS)
def make(request, tmp_path):
    made: list[Venv] = []

    def create() -> Venv:
        made.append(Venv(tmp_path / f"venv{len(made)}", request.param))
        return made[-1]

    yield create
    for venv in made:
        shutil.rmtree(venv.path, ignore_errors=True)


def has(*sonames: str) -> bool:
    cache = Path("/etc/ld.so.cache")
    known = _elf.parse_ld_cache(cache.read_bytes()) if cache.exists() else {}
    return all(name in known for name in sonames)


def packages(remedy, action):
    return [name for step in remedy["steps"] if step["action"] == action for name in step["packages"]]


def test_the_right_variants(make):
    venv = make().torch("2.14.1+cu130", "13.0").install(CU13, *NIXL, DEEP_EP)
    venv.pip("install", "numpy")
    found = venv.look()
    assert all(item["files_ok"] for data in found.values() for item in data["distributions"])

    kv = found["mooncake"]["uses"]["kv_transfer"]
    if not has("libibverbs.so.1", "libmlx5.so.1", "libnuma.so.1", "libcurl.so.4"):
        assert (kv["state"], kv["code"], kv["remedy"]["kind"]) == ("broken", "missing_system_lib", "system_package")
    elif not has("libcuda.so.1"):
        assert (kv["state"], kv["code"]) == ("needs_gpu", "no_driver")
    # The wheel has it for torch 2.11 to 2.13.
    elastic = found["mooncake"]["uses"]["elastic_ep"]
    assert (elastic["state"], elastic["code"]) == ("broken", "mooncake_pg_not_built_for_torch")
    assert elastic["evidence"]["needs"] == "2.14.1" and "2.13.0" in elastic["evidence"]["has"]

    assert (found["nixl"]["state"], found["nixl"]["level"]) == ("ok", "import")
    if not has("libcuda.so.1"):
        assert found["nixl"]["uses"]["a2a"]["state"] == "needs_gpu"
    deep_ep = found["deep_ep"]
    assert (deep_ep["state"], deep_ep["level"]) == ("needs_gpu", "import")
    assert deep_ep["uses"]["a2a"]["evidence"]["archs"]["sm"] == [90, 100, 103]
    assert packages(deep_ep["remedy"], "pip_install") == []


def test_the_cuda_12_build_beside_a_cuda_13_torch(make):
    venv = make().torch("2.13.0+cu130", "13.0").install(CU12)
    for level in ("static", "auto"):
        for use in venv.look(level)["mooncake"]["uses"].values():
            assert (use["state"], use["code"]) == ("variant_mismatch", "cuda_major_mismatch")
            assert packages(use["remedy"], "pip_install") == [CU13]
            assert packages(use["remedy"], "pip_uninstall") == ["mooncake-transfer-engine"]


def test_without_cuda(make):
    venv = make().torch("2.13.0+cpu", None).install(NON_CUDA)
    uses = venv.look()["mooncake"]["uses"]
    if has("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"):
        assert (uses["kv_transfer"]["state"], uses["kv_transfer"]["level"]) == ("ok", "import")
    else:
        assert uses["kv_transfer"]["code"] == "missing_system_lib"
        assert "libibverbs1" in packages(uses["kv_transfer"]["remedy"], "os_install") or not has("libc.so.6")
    assert (uses["a2a"]["state"], uses["a2a"]["code"]) == ("unsupported", "torch_is_cpu_build")
    (venv.site / "torch/version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\nhip = None\n")
    uses = venv.look("static")["mooncake"]["uses"]
    assert {use["code"] for use in uses.values()} == {"variant_without_cuda"}


def test_both_variants_then_one_removed_then_mended(make):
    venv = make().torch("2.13.0+cu130", "13.0").install(CU13).install(CU12)
    use = venv.look("static")["mooncake"]["uses"]["kv_transfer"]
    assert (use["state"], use["code"]) == ("variant_mismatch", "file_owned_by_two_distributions")
    assert packages(use["remedy"], "pip_uninstall") == ["mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"]

    venv.pip("uninstall", "-y", "mooncake-transfer-engine")
    use = venv.look()["mooncake"]["uses"]["kv_transfer"]
    assert (use["state"], use["code"]) == ("broken", "files_missing")
    remedy = use["remedy"]
    assert packages(remedy, "pip_install") == [CU13]

    venv.pip("install", *remedy["steps"][-1]["args"]["flags"], "--no-compile", "--no-index", "--find-links", str(CACHE),
             *packages(remedy, "pip_install"))  # fmt: skip
    use = venv.look("static")["mooncake"]["uses"]["kv_transfer"]
    assert use["code"] in (None, "missing_system_lib", "no_driver")


def test_half_and_wrong_distributions(make):
    venv = make().torch("2.14.1+cu130", "13.0").install("nixl-cu13==1.5.1", "mooncake==0.0.1")
    found = venv.look()
    assert found["nixl"]["code"] == "backend_without_meta"
    assert packages(found["nixl"]["remedy"], "pip_install") == ["nixl==1.5.1", "nixl-cu13==1.5.1"]
    assert found["mooncake"]["state"] == "wrong_distribution"
    # It owns no module that SGLang asks for: it may stay.
    assert packages(found["mooncake"]["remedy"], "pip_uninstall") == []


def test_the_meta_package_alone(make):
    found = make().torch("2.14.1+cu130", "13.0").install("nixl==1.5.1").look()["nixl"]
    assert (found["state"], found["code"]) == ("broken", "meta_without_backend")
    assert packages(found["remedy"], "pip_install") == ["nixl-cu13==1.5.1"]


def test_a_wheel_for_another_python(make, tmp_path):
    venv = make()
    other = next(version for version in PYTHONS if version != venv.version)
    venv.torch("2.14.1+cu130", "13.0")
    fetch(other, CU13)
    tag = f"cp{other.replace('.', '')}"
    wheel = next(p for p in CACHE.glob("mooncake_transfer_engine_cuda13-0.3.13.post1-*.whl") if tag in p.name)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(venv.site)], check=True)
    use = venv.look()["mooncake"]["uses"]["kv_transfer"]
    assert (use["state"], use["code"]) == ("broken", "wrong_python")
    assert packages(use["remedy"], "pip_install") == [CU13]
