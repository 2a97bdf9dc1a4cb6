"""DeepEP's build, for real: nvcc and a CUDA torch compile our own extension of the same shape; real failures are named.

Slow: it needs a venv with a CUDA torch (5.5 GB). GPUFLEET_CUDA_VENV names it; the default is in .cache.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _build_log,
    _deepep_steps,
    _deepep_wheel,
    _detached,
    _wheel_inspect,
)

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "cuda_ext"
VENV = Path(os.environ.get("GPUFLEET_CUDA_VENV", ROOT / ".cache" / "cuda-torch-venv"))
NVCC = shutil.which("nvcc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (VENV / "bin" / "python").exists(), reason=f"no CUDA torch in {VENV} (see docs/deepep.md)"),
    pytest.mark.skipif(NVCC is None, reason="no nvcc"),
]

# A module without torch's headers compiles in a second instead of a minute.
TINY_CPP = """
#include <Python.h>
#include "config.hpp"
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "deep_ep_cpp", 0, -1, 0};
PyMODINIT_FUNC PyInit_deep_ep_cpp(void) {
    PyObject* module = PyModule_Create(&def);
    PyModule_AddIntConstant(module, "layout", (long)(void*)&layout::launch != 0);
    PyModule_AddIntConstant(module, "intranode", (long)(void*)&intranode::launch != 0);
    return module;
}
"""
TINY_INIT = "import torch\nimport deep_ep_cpp\n\n\nclass Buffer:\n    pass\n"


@pytest.fixture
def source(tmp_path):
    """A small variant of the fixture: ``source(setup=[(old, new)], cpp=…, init=…)``."""

    def make(setup=(), cpp=TINY_CPP, init=TINY_INIT, name="source", extra=()):
        folder = tmp_path / name
        shutil.copytree(FIXTURE, folder)
        (folder / "csrc" / "deep_ep.cpp").write_text(cpp)
        (folder / "deep_ep" / "__init__.py").write_text(init)
        text = (folder / "setup.py").read_text()
        for old, new in setup:
            assert old in text
            text = text.replace(old, new)
        (folder / "setup.py").write_text(text)
        for path, content in extra:
            (folder / path).write_text(content)
        return folder

    return make


@pytest.fixture
def want(tmp_path):
    def make(folder, **more):
        options = {
            "venv": str(VENV), "state": "present", "source_path": str(folder), "gpu_archs": ["9.0"],
            "state_dir": str(tmp_path / "state"), "slice_seconds": 5, "carry": {}, "time_limit": 600,
            "proof_timeout": 200, "extra_include_dirs": [], "environment": {}, "service_environment": {},
            "force": False,
        }  # fmt: skip
        return dict(options, **more)

    return make


def go(options, check=False):
    """Call the module's step until it is done, as the action plugin does; return (result, lines for people)."""
    carry: dict[str, object] = {}
    said: list[str] = []
    while True:
        result = _deepep_steps.step(dict(options, carry=carry), check)
        if "slice" not in result:
            return result, said
        carry = json.loads(json.dumps(result["slice"]["carry"]))
        said.append(result["slice"]["progress"])


def worker_of(job):
    holder = _detached.holder(job)
    assert holder is not None
    return holder["pid"]


def built(result):
    assert not result.get("failed"), result.get("msg")
    return result


def test_from_nothing_to_a_proven_wheel_that_carries_no_path_of_the_builder(want, tmp_path):
    """The whole fixture, with torch's own headers: this is the minute-long one."""
    looked, _said = go(want(FIXTURE, state="observed"))
    assert (looked["build_state"], looked["changed"], looked["cached"]) == ("would_build", False, False)
    assert not (tmp_path / "state").exists()
    checked, _said = go(want(FIXTURE), check=True)
    assert (checked["build_state"], checked["changed"]) == ("would_build", True)
    assert not (tmp_path / "state").exists()

    before = sorted((path, path.stat().st_mtime_ns) for path in VENV.rglob("*.py*") if "deep_ep" in path.name)
    sources = sorted(FIXTURE.rglob("*"))
    result, said = go(want(FIXTURE))
    built(result)
    assert (result["build_state"], result["changed"], result["proof"]["level"]) == ("built", True, "import")
    assert any("deep_ep.cpp" in line for line in said)
    about = _wheel_inspect.inspect(result["wheel"], [str(VENV), str(tmp_path), str(ROOT)])
    assert about["private_paths"] == []
    assert about["extensions"][0]["runpath"] == ["$ORIGIN/nvidia/nvshmem/lib"]
    assert about["extensions"][0]["sm"] == [90]
    assert "libnvshmem_host.so.3" in about["extensions"][0]["needed"]
    assert sorted(FIXTURE.rglob("*")) == sources
    assert sorted((path, path.stat().st_mtime_ns) for path in VENV.rglob("*.py*") if "deep_ep" in path.name) == before
    # pip accepts the rewritten wheel: RECORD and hashes fit.
    target = tmp_path / "installed"
    subprocess.run(
        [
            str(VENV / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
            result["wheel"],
        ],
        check=True,
    )
    with zipfile.ZipFile(result["wheel"]) as archive:
        assert archive.testzip() is None

    again, _said = go(want(FIXTURE))
    assert (again["build_state"], again["changed"], again["fingerprint"]) == ("present", False, result["fingerprint"])
    forced, _said = go(want(FIXTURE, force=True), check=True)
    assert forced["build_state"] == "would_build"
    # A wheel that was tampered with is no wheel.
    with open(result["wheel"], "ab") as stream:
        stream.write(b"x")
    assert go(want(FIXTURE, state="observed"))[0]["cached"] is False


def test_a_moved_venv_and_another_arch_are_other_fingerprints(want):
    one = go(want(FIXTURE, state="observed"))[0]
    two = go(want(FIXTURE, state="observed", gpu_archs=["sm_90", "10.0"]))[0]
    assert one["fingerprint"] != two["fingerprint"]
    assert two["parts"]["archs"] == ["9.0", "10.0"]


TORCH_CPP = "#include <ATen/cuda/CUDAContext.h>\n" + TINY_CPP
CU13 = next((str(path) for path in VENV.glob("lib/python3*/site-packages/nvidia/cu13/include")), "/nowhere")

FAILURES = {
    # name: (setup.py, deep_ep.cpp, environment, code, text that the first error line holds)
    "cccl": ((), TINY_CPP, {"CPATH": CU13}, "cccl_headers_not_on_host_path", "cuda/std/tuple"),
    "cusparse": ((), TORCH_CPP, {"CPATH": "/nowhere"}, "cuda_headers_missing", "cusparse.h"),
    "mlx5dv": (
        (),
        "#define HEADER <infiniband/mlx5dv.h>\n#include HEADER\n" + TINY_CPP,
        {},
        "rdma_headers_missing",
        "infiniband/mlx5dv.h",
    ),
    "nccl": (
        (('link = [f"-L', 'link = ["-l:" + "libnccl.so.2", f"-L'),),
        TINY_CPP,
        {"LIBRARY_PATH": "/nowhere"},
        "nccl_library_not_found",
        "libnccl.so.2",
    ),
    "libcuda": ((('link = [f"-L', 'link = ["-l" + "cuda", f"-L'),), TINY_CPP, {}, "libcuda_stub_not_found", "-lcuda"),
    "nvshmem": (
        (('f"-l:{host_lib}"', '"-l:" + "libnvshmem_host.so"'),),
        TINY_CPP,
        {},
        "nvshmem_library_not_found",
        "libnvshmem_host.so",
    ),
    "arch": ((), TINY_CPP, {"TORCH_CUDA_ARCH_LIST": "13.7"}, "arch_unsupported_by_toolkit", "13.7"),
    "compile": ((), "int broken(\n" + TINY_CPP, {}, "compile_error", "error"),
    "nvlink": ((), TINY_CPP, {}, "nvlink_error", "layout_step"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_real_failure_is_named_by_its_first_error(name, source, want):
    setup, cpp, environment, code, text = FAILURES[name]
    extra = []
    if name == "nvlink":
        lone = (
            (FIXTURE / "csrc" / "kernels" / "layout.cu")
            .read_text()
            .replace("__device__ int layout_step(int value) {", "static __device__ int own_step(int value) {")
            .replace("layout_step(value);", "own_step(value);")
        )
        extra = [("csrc/kernels/layout.cu", lone)]
    result, _said = go(want(source(setup, cpp, extra=extra), environment=environment))
    assert result["failed"] is True and result["changed"] is False
    assert result["cause"]["code"] == code, result["cause"]
    assert text in result["cause"]["text"]
    assert os.path.exists(result["cause"]["log"]) and result["cause"]["log"] in result["msg"]
    assert result["cached"] is False


def test_a_toolkit_of_another_major_is_refused_before_and_told_when_forced(source, want, tmp_path):
    toolkit = tmp_path / "cuda-12.8"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "nvvm").mkdir()
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\necho 'nvcc: NVIDIA (R) Cuda compiler driver'\n"
        "echo 'Cuda compilation tools, release 12.8, V12.8.93'\n"
    )
    nvcc.chmod(0o755)
    folder = source()
    refused, _said = go(want(folder, toolkit=str(toolkit)))
    assert refused["cause"]["code"] == "toolkit_major_mismatch"
    assert not (tmp_path / "state").exists()
    forced, _said = go(want(folder, environment={"CUDA_HOME": str(toolkit)}))
    assert forced["cause"]["code"] == "toolkit_major_mismatch"
    assert "12.8" in forced["cause"]["text"]


def test_a_build_in_isolation_is_named(source):
    answer = subprocess.run(
        [sys.executable, "-I", "setup.py", "bdist_wheel"],
        cwd=source(),
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    found = _build_log.diagnose((answer.stdout + answer.stderr).splitlines(), answer.returncode)
    assert found is not None and found["code"] == "build_isolation"


def test_a_missing_device_link_is_no_success_although_rc_is_0(source, want, tmp_path):
    result, _said = go(want(source([(', "nvcc_dlink": ["-dlink"]', "")])))
    assert result["failed"] is True
    assert result["cause"]["code"] == "device_link_missing", result["cause"]
    assert list((tmp_path / "state").glob("wheels/*/*.whl")) == []


@pytest.mark.parametrize("init, code", [
    ("raise AssertionError('Cannot find package: nccl')\n", "nccl_root_not_discoverable"),
    ("import os\nos.abort()\n", "import_crashed"),
    ("import torch\nimport deep_ep_cpp\n", "import_failed"),
    ("import sys\nsys.exit(0)\n", "import_failed"),
])  # fmt: skip
def test_a_wheel_that_does_not_import_is_not_kept(init, code, source, want, tmp_path):
    result, _said = go(want(source(init=init)))
    assert result["failed"] is True
    assert result["cause"]["code"] == code, result["cause"]
    assert list((tmp_path / "state").glob("wheels/*/*.whl")) == []


def test_an_undefined_symbol_is_told_from_a_missing_module(source, want):
    cpp = TINY_CPP.replace("static PyModuleDef", "namespace deep_ep { int internode(); }\nstatic PyModuleDef").replace(
        "return module;", 'PyModule_AddIntConstant(module, "i", deep_ep::internode());\n    return module;'
    )
    result, _said = go(want(source(cpp=cpp)))
    assert result["cause"]["code"] == "kernels_missing", result["cause"]
    assert "undefined symbol: _ZN7deep_ep" in result["cause"]["message"]


def test_a_killed_compiler_is_memory_and_may_be_tried_again(source, want):
    options = want(source(cpp="#include <torch/extension.h>\n" + TINY_CPP))
    first = _deepep_steps.step(dict(options, slice_seconds=1), False)
    deadline = time.monotonic() + 60
    victims: list[int] = []
    while not victims and time.monotonic() < deadline:
        victims = [
            pid
            for pid in _detached.descendants(worker_of(first["slice"]["carry"]["job"]))
            if "cc1plus" in Path(f"/proc/{pid}/comm").read_text()
            and b"deep_ep.cpp" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        time.sleep(0.05)
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    carry = first["slice"]["carry"]
    result = first
    while "slice" in result:
        result = _deepep_steps.step(dict(options, carry=carry), False)
        carry = result.get("slice", {}).get("carry")
    assert (result["cause"]["code"], result["cause"]["retryable"]) == ("out_of_memory", True), result["cause"]


def test_the_time_limit_ends_the_compilers_and_the_next_run_keeps_finished_objects(source, want, tmp_path):
    folder = source(cpp="#include <torch/extension.h>\n" + TINY_CPP)
    options = want(folder, time_limit=25)
    result, _said = go(options)
    assert result["cause"]["code"] == "build_timed_out", result["cause"]
    objects = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "state").glob("builds/*/*/src/build/temp*/csrc/kernels/*.o")
    }
    leftovers = [
        pid for pid in _detached._processes() if str(tmp_path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert leftovers == []
    assert objects, "nothing was finished within the time limit: the test proves nothing"
    again, _said = go(want(folder))
    built(again)
    log = Path(again["wheel"]).with_name("build.log").read_text()
    assert "=== step source" not in log.split("=== job")[-1]
    assert "[1/2]" in log or "[1/3]" in log


def test_a_second_run_attaches_and_a_killed_worker_is_replaced(source, want):
    folder = source(cpp="#include <torch/extension.h>\n" + TINY_CPP)
    options = want(folder)
    first = _deepep_steps.step(dict(options, slice_seconds=1), False)
    second = _deepep_steps.step(dict(options, slice_seconds=1), False)
    assert second["slice"]["carry"]["attached"] is True
    assert first["slice"]["carry"]["job"] == second["slice"]["carry"]["job"]
    job = first["slice"]["carry"]["job"]
    worker = worker_of(job)
    os.kill(worker, signal.SIGKILL)
    result, _said = go(options)
    built(result)
    assert worker_of(job) != worker


def test_a_controller_that_dies_between_build_and_proof_loses_nothing(source, want):
    options = want(source())
    result = _deepep_steps.step(dict(options, slice_seconds=1), False)
    job = result["slice"]["carry"]["job"]
    deadline = time.monotonic() + 120
    while _detached.observe(job)["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    finished = _detached.observe(job)
    assert finished["state"] == "succeeded"
    fresh, _said = go(options)
    assert built(fresh)["build_state"] == "built"
    assert fresh["manifest"]["build"]["seconds"]["build"] == next(
        s["seconds"] for s in finished["steps"] if s["name"] == "build"
    )


def test_build_tools_come_into_the_overlay_and_the_venv_stays(source, want, tmp_path, monkeypatch):
    """The venv has neither ninja nor (here, hidden) a system ninja: the wheelhouse brings it."""
    house = tmp_path / "house"
    house.mkdir()
    real = shutil.which("ninja")
    stub = tmp_path / "ninja-9.9-py3-none-any.whl"
    with zipfile.ZipFile(stub, "w") as archive:
        archive.writestr("ninja-9.9.data/scripts/ninja", f'#!/bin/sh\nexec {real} "$@"\n')
        archive.writestr("ninja-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: ninja\nVersion: 9.9\n")
        archive.writestr(
            "ninja-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("ninja-9.9.dist-info/RECORD", "")
    shutil.move(stub, house / stub.name)
    before = sorted(path.name for path in (VENV / "bin").iterdir())
    folder = source()
    monkeypatch.setattr(_deepep_wheel.Builder, "_tools", lambda self, versions: dict(versions, ninja=None))
    lacking, _said = go(want(folder, wheelhouse=str(tmp_path)))
    assert lacking["cause"]["code"] == "build_tools_missing" and "ninja" in lacking["msg"]
    result, _said = go(want(folder, wheelhouse=str(house)))
    assert built(result)["preflight"]["overlay"] == ["ninja"]
    assert "Successfully installed ninja-9.9" in Path(result["wheel"]).with_name("build.log").read_text()
    assert sorted(path.name for path in (VENV / "bin").iterdir()) == before


def test_an_old_revision_gets_its_unversioned_name_in_the_overlay(source, want, tmp_path):
    setup = [('f"-l:{host_lib}"', '"-l:libnvshmem_host.so"')]
    folder = source(setup)
    lib = next(VENV.glob("lib/python3*/site-packages/nvidia/nvshmem/lib"))
    before = sorted(path.name for path in lib.iterdir())
    checked, _said = go(want(folder), check=True)
    assert [link["name"] for link in checked["preflight"]["links"]] == ["libnvshmem_host.so"]
    assert not (tmp_path / "state").exists()
    result, _said = go(want(folder))
    assert "libnvshmem_host.so.3" in built(result)["manifest"]["wheel"]["extensions"][0]["needed"]
    assert sorted(path.name for path in lib.iterdir()) == before
    assert go(want(folder))[0]["changed"] is False


def test_a_git_source_is_fetched_and_keeps_its_commit(source, want):
    folder = source()
    git = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    options = want(None, source_path=None, source_url=f"file://{folder}", revision="v1")
    looked, _said = go(options, check=True)
    assert (looked["build_state"], looked["changed"]) == ("would_fetch", True)
    fetched, _said = go(dict(options, state="fetched"))
    assert (built(fetched)["build_state"], fetched["changed"], fetched["parts"]["revision"]) == (
        "fetched",
        True,
        commit,
    )
    assert go(dict(options, state="fetched"))[0]["changed"] is False
    result, _said = go(options)
    assert built(result)["parts"]["revision"] == commit
    assert result["fingerprint"] == fetched["fingerprint"] == go(dict(options, state="observed"))[0]["fingerprint"]
    assert result["manifest"]["wheel"]["version"].startswith("1.2.1+" + commit[:7])
    gone, _said = go(dict(options, revision="no-such-branch"))
    assert gone["failed"] is True and gone["cause"]["code"] == "revision_not_found", gone["cause"]


def test_a_host_that_waits_for_a_wheel_never_compiles(source, want, tmp_path):
    result, _said = go(want(source(), compile=False))
    assert (result["failed"], result["cause"]["code"]) == (True, "wheel_not_here")
    assert not (tmp_path / "state").exists()


def test_a_forced_or_evicted_wheel_is_built_again(source, want, tmp_path):
    folder = source()
    first, _said = go(want(folder))
    built(first)
    forced, _said = go(want(folder, force=True))
    assert built(forced)["build_state"] == "built"
    shutil.rmtree(tmp_path / "state" / "wheels")
    again, _said = go(want(folder))
    assert built(again)["build_state"] == "built" and again["fingerprint"] == first["fingerprint"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to drop")
@pytest.mark.skipif(not Path("/usr/include/python3.11/Python.h").exists(), reason="no system Python 3.11 with headers")
def test_a_venv_of_another_user_is_built_for_as_that_user(source, want):
    """Nothing of that user's venv runs as root, and what it makes is its own; the cache stays root's."""
    base = Path(tempfile.mkdtemp(prefix="deepep-owner-", dir="/var/tmp"))
    try:
        base.chmod(0o755)
        venv = base / "venv"
        subprocess.run(["/usr/bin/python3.11", "-m", "venv", "--without-pip", str(venv)], check=True)
        site = venv / "lib" / "python3.11" / "site-packages"
        site.rmdir()
        site.symlink_to(next(VENV.glob("lib/python3.11/site-packages")))
        spy = base / "whoami"
        folder = base / "source"
        shutil.copytree(source([("import os\n", f"import os\nopen({str(spy)!r} + str(os.getuid()), 'w')\n")]), folder)
        for path in [base, *base.rglob("*")]:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        result, _said = go(want(folder, venv=str(venv), state_dir=str(base / "state")))
        assert built(result)["proof"]["ok"] is True
        assert [path.name for path in base.glob("whoami*")] == ["whoami65534"]
        assert os.stat(result["wheel"]).st_uid == 0
        assert os.stat(result["wheel"]).st_mode & 0o044 == 0o044
    finally:
        shutil.rmtree(base)


PLAY = """
- hosts: all
  connection: local
  gather_facts: false
  vars:
    ansible_python_interpreter: {python}
    deepep_venv: {venv}
    deepep_source_path: {source}
    deepep_state_dir: "{tmp}/hosts/{{{{ inventory_hostname }}}}"
    deepep_artifacts_dir: {tmp}/artifacts
    deepep_gpu_archs: "{{{{ ['9.0'] if inventory_hostname in ['h0', 'h1', 'h2'] else ['9.0', '10.0'] }}}}"
  roles: [gpufleet.sglang.deepep]
"""


def test_six_hosts_with_two_fingerprints_compile_twice_and_a_second_run_never(source, tmp_path):
    play = tmp_path / "play.yml"
    play.write_text(PLAY.format(python=sys.executable, venv=VENV, source=source(), tmp=tmp_path))
    command = [
        sys.executable, "-m", "ansible.cli.playbook", "-i", "h0,h1,h2,h3,h4,h5,", "-f", "3", str(play),
    ]  # fmt: skip

    def run(*more):
        answer = subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT)
        assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-1000:]
        return answer.stdout

    check = run("--check")
    assert check.count("msg: builds DeepEP") == 2 and check.count("msg: copies DeepEP") == 4
    assert not (tmp_path / "hosts").exists() and not (tmp_path / "artifacts").exists()
    run()
    logs = [path for path in (tmp_path / "hosts").glob("*/builds/*/log") if "=== step build" in path.read_text()]
    assert len(logs) == 2
    wheels = {path.read_bytes() for path in (tmp_path / "hosts").glob("*/wheels/*/*.whl")}
    assert len(list((tmp_path / "hosts").glob("*/wheels/*/*.whl"))) == 6 and len(wheels) == 2
    assert len(list((tmp_path / "hosts").glob("*/wheels/*/proof-*.json"))) == 6
    again = run()
    assert "changed=1" not in again and again.count("changed=0") == 6
