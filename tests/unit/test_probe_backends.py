# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole probes of venvs on disk: real interpreters, real imports, ELF files that the loader really refuses."""

from __future__ import annotations

import json
import os
import platform
import subprocess

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _probe
from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import BACKENDS
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult

from tests.tools.fake_venv import FakeVenv
from tests.tools.make_so import So

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the ELF files are for x86_64")

DEBIAN = "ID=debian\n"
REDHAT = 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'


@pytest.fixture
def venv(tmp_path):
    return FakeVenv(tmp_path / "venv")


@pytest.fixture
def root(tmp_path):
    """A host with an operating system, libraries of its own and no GPU."""
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    (folder / "dev").mkdir()
    (folder / "etc/os-release").write_text(DEBIAN)
    library = folder / "usr/lib/x86_64-linux-gnu"
    library.mkdir(parents=True)
    for name in ("libstdc++.so.6", "libgcc_s.so.1"):
        (library / name).write_bytes(So(soname=name).build())
    return folder


def no_commands(argv, timeout):
    raise AssertionError(f"no command was expected: {argv}")


def look(venv, root="/", level="auto", environment=None, results=None, run=no_commands, **more):
    more.setdefault("import_timeout", 30.0)
    request = _probe.Request(
        str(venv.path if isinstance(venv, FakeVenv) else venv), ["backends"], level, environment=environment, **more
    )
    context = Context(run=run, root=str(root), results=dict(results or {}))
    result = _probe.probe(request, context)
    json.dumps(result)
    return result


def use_of(venv, backend, use, **more):
    return look(venv, **more)["backends"][backend]["uses"][use]


def gpus(*capabilities):
    return {"gpus": {"state": "ok", "devices": [{"compute_capability": c} for c in capabilities]}}


def mooncake(venv, name="mooncake-transfer-engine-cuda13", version="0.3.13.post1", engine=None, **files):
    contents = {
        "mooncake/__init__.py": "",
        "mooncake/engine.so": engine or So(needed=["libcudart.so.13"], pyinit="engine"),
        **files,
    }
    return venv.dist(name, version, contents)


DEEP_EP = "from deep_ep._C import *\nBuffer = Config = 1\n"


def deep_ep(venv, version="0.1.2.post1", init=DEEP_EP, name="sgl-deep-ep", so=None, requires=("torch==2.14.1",)):
    return venv.dist(
        name, version,
        {"deep_ep/__init__.py": init, f"deep_ep/_C{venv.suffix}": so or So(pyinit="_C", sm=[90, 100, 103])}, requires,
    )  # fmt: skip


def packages(remedy, action):
    return [name for step in remedy["steps"] if step["action"] == action for name in step["packages"]]


# --- nothing there -----------------------------------------------------------------------------------------------


def test_absent_backends_start_no_child(venv):
    venv.torch()

    def forbidden(*_args):
        raise AssertionError("nothing is there to import")

    context = Context(run=no_commands)
    result = _probe.probe(_probe.Request(str(venv.path), ["backends"]), context, imports=forbidden)
    assert {name: data["state"] for name, data in result["backends"].items()} == {
        "deep_ep": "absent", "mooncake": "absent", "nixl": "absent",
    }  # fmt: skip
    remedies = {name: packages(data["remedy"], "pip_install") for name, data in result["backends"].items()}
    assert remedies == {
        "deep_ep": ["sgl-deep-ep==0.1.2.post1"],
        "mooncake": ["mooncake-transfer-engine-cuda13==0.3.13.post1"],
        "nixl": ["nixl==1.5.1", "nixl-cu13==1.5.1"],
    }


@pytest.mark.parametrize(
    ("torch", "cuda", "mooncake_package", "nixl_packages"),
    [
        ("2.12.0+cu128", "12.8", "mooncake-transfer-engine==0.3.13.post1", ["nixl==1.5.1", "nixl-cu12==1.5.1"]),
        ("2.13.0+cpu", None, "mooncake-transfer-engine-non-cuda==0.3.13.post1", ["nixl==1.5.1", "nixl-cu12==1.5.1"]),
    ],
)
def test_the_variant_follows_torch(venv, torch, cuda, mooncake_package, nixl_packages):
    venv.torch(torch, cuda)
    result = look(venv, level="static")["backends"]
    assert packages(result["mooncake"]["remedy"], "pip_install") == [mooncake_package]
    assert packages(result["nixl"]["remedy"], "pip_install") == nixl_packages


def test_without_torch_no_variant_is_guessed(venv, root):
    result = look(venv, root, level="static")["backends"]
    assert {data["remedy"]["kind"] for data in result.values()} == {"none"}
    assert "torch" in result["mooncake"]["remedy"]["summary"]


def test_sglangs_own_pin_wins(venv):
    venv.torch("2.13.0+cu130")
    venv.sglang("0.5.20", ["sgl-deep-ep==0.1.2", "torch==2.13.0", "nothing==1; extra == 'all'"])
    result = look(venv)
    assert result["sglang"]["requires"] == {"sgl-deep-ep": "==0.1.2", "torch": "==2.13.0"}
    assert packages(result["backends"]["deep_ep"]["remedy"], "pip_install") == ["sgl-deep-ep==0.1.2"]


def test_deep_ep_is_built_where_no_wheel_is_for_this_torch(venv):
    venv.torch("2.9.1+cu128", "12.8")
    remedy = look(venv)["backends"]["deep_ep"]["remedy"]
    assert [step["action"] for step in remedy["steps"]] == ["build"]


@pytest.mark.parametrize("capability", ["8.0", "8.6"])
def test_deep_ep_is_not_built_for_gpus_without_kernels(venv, capability):
    venv.torch()
    use = use_of(venv, "deep_ep", "a2a", results=gpus(capability))
    assert (use["state"], use["code"]) == ("unsupported", "deepep_unsupported_arch")
    assert not [step for step in use["remedy"]["steps"] if step["action"] in ("build", "pip_install")]


def test_missing_venv_and_no_venv(tmp_path):
    result = look(tmp_path / "nowhere")
    assert result["venv"]["state"] == "venv_absent"
    assert {use["state"] for data in result["backends"].values() for use in data["uses"].values()} == {"venv_absent"}
    file = tmp_path / "file"
    file.write_text("")
    assert look(file)["venv"]["state"] == "not_a_venv"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert look(empty)["venv"]["state"] == "not_a_venv"
    (empty / "bin").mkdir()
    (empty / "bin/python").symlink_to("/nonexistent/python3.12")
    result = look(empty)
    assert result["venv"]["code"] == "venv_python_dangling"
    assert "/nonexistent/python3.12" in result["venv"]["message"]


def test_the_interpreter_is_taken_for_its_venv(venv):
    assert look(venv.path / "bin/python")["venv"]["path"] == str(venv.path)


# --- wrong and half distributions (C45, C47) ----------------------------------------------------------------------


def test_wrong_distributions_by_name(venv):
    venv.torch()
    venv.dist("mooncake", "0.0.1", {"mooncake/__init__.py": ""}, tag="py3-none-any")
    venv.dist("deep-ep", "1.0.0", {"deep_ep/__init__.py": ""}, tag="py3-none-any")
    result = look(venv)["backends"]
    for name, right in (("mooncake", "mooncake-transfer-engine-cuda13"), ("deep_ep", "sgl-deep-ep")):
        assert result[name]["state"] == "wrong_distribution"
        remedy = result[name]["remedy"]
        assert packages(remedy, "pip_uninstall") == [{"mooncake": "mooncake", "deep_ep": "deep-ep"}[name]]
        assert packages(remedy, "pip_install")[0].startswith(right + "==")


def test_a_wrong_distribution_that_does_not_own_the_module_stays(venv):
    venv.torch()
    venv.dist("mooncake", "0.0.1", {"core/__init__.py": ""}, tag="py3-none-any")
    remedy = look(venv)["backends"]["mooncake"]["remedy"]
    assert packages(remedy, "pip_uninstall") == []
    assert packages(remedy, "pip_install") == ["mooncake-transfer-engine-cuda13==0.3.13.post1"]


def test_deep_ep_layouts(venv, tmp_path):
    venv.torch()
    venv.dist("deep_ep", "1.2.1+9af0e0d", {
        "deep_ep/__init__.py": "import deep_ep_cpp\nBuffer = Config = 1\n",
        f"deep_ep_cpp{venv.suffix}": So(pyinit="deep_ep_cpp"),
    })  # fmt: skip
    data = look(venv, revisions={"deep_ep": "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee"})["backends"]["deep_ep"]
    assert (data["state"], data["level"]) == ("ok", "import")
    assert data["distributions"][0]["version"] == "1.2.1+9af0e0d"

    second = FakeVenv(tmp_path / "second")
    second.torch()
    deep_ep(second)
    assert look(second)["backends"]["deep_ep"]["state"] == "ok"

    third = FakeVenv(tmp_path / "third")
    third.torch()
    third.put("deep_ep/__init__.py", "import deep_ep_cpp\n")
    use = use_of(third, "deep_ep", "a2a")
    assert (use["state"], use["code"]) == ("broken", "extension_missing")

    fourth = FakeVenv(tmp_path / "fourth")
    fourth.torch()
    egg = "deep_ep-1.2.1+9af0e0d-py3.12-linux-x86_64.egg"
    fourth.put(f"{egg}/deep_ep/__init__.py", "import deep_ep_cpp\nBuffer = Config = 1\n")
    fourth.put(f"{egg}/deep_ep_cpp{fourth.suffix}", So(pyinit="deep_ep_cpp"))
    fourth.put(f"{egg}/EGG-INFO/PKG-INFO", "Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1+9af0e0d\n")
    fourth.put("easy-install.pth", f"./{egg}\n")
    use = use_of(fourth, "deep_ep", "a2a")
    assert (use["state"], use["code"], use["level"]) == ("ok", "egg_install", "import")


def test_another_revision_than_the_pinned_one(venv):
    venv.torch()
    deep_ep(venv, version="1.2.1+af9a040", name="deep_ep", requires=())
    use = use_of(venv, "deep_ep", "a2a", revisions={"deep_ep": "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee"})
    assert (use["state"], use["code"]) == ("suspect", "wrong_revision")
    assert use["evidence"]["has"] == "af9a040"
    assert [step["action"] for step in use["remedy"]["steps"]] == ["build"]


@pytest.mark.parametrize("version", ["2.1.0+local", "0.1.2.post1"])
def test_a_version_without_a_revision_proves_no_other_one(venv, version):
    venv.torch()
    deep_ep(venv, version=version, name="deep_ep", requires=())
    use = use_of(venv, "deep_ep", "a2a", revisions={"deep_ep": "9af0e0d0"})
    assert use["code"] != "wrong_revision"


def test_nixl_without_its_meta_package(venv):
    venv.torch()
    venv.dist("nixl-cu13", "1.3.1", {"nixl_cu13/__init__.py": "", f"nixl_cu13/_bindings{venv.suffix}": So()})
    use = use_of(venv, "nixl", "kv_transfer")
    assert use["code"] == "backend_without_meta"
    assert packages(use["remedy"], "pip_install") == ["nixl==1.3.1", "nixl-cu13==1.3.1"]
    assert use["remedy"]["steps"][0]["args"]["flags"] == ["--no-deps"]


NIXL = "import importlib, sys\nm = importlib.import_module('nixl_cu13._api')\nsys.modules['nixl._api'] = m\n"
NIXL_EP = (
    "import importlib, torch\nversion = ''.join(torch.__version__.split('.')[:2])\n"
    "importlib.import_module('.nixl_ep_cpp_torch' + version, __package__)\nBuffer = 1\n"
)
API = "from nixl_cu13 import _bindings\nnixl_agent = nixl_agent_config = 1\n"


def nixl(venv, version="1.5.1", variants=("cu12", "cu13")):
    venv.dist("nixl", version, {"nixl/__init__.py": NIXL, "nixl_ep/__init__.py": "from nixl_ep_cu13 import *\n"},
              tag="py3-none-any")  # fmt: skip
    for variant in variants:
        venv.dist(f"nixl-{variant}", version, {
            f"nixl_{variant}/__init__.py": "", f"nixl_{variant}/_api.py": API,
            f"nixl_{variant}/_bindings{venv.suffix}": So(pyinit="_bindings"),
            f"nixl_ep_{variant}/__init__.py": NIXL_EP,
            f"nixl_ep_{variant}/nixl_ep_cpp_torch214{venv.suffix}": So(
                pyinit="nixl_ep_cpp_torch214", needed=[f"libcudart.so.{variant[2:]}"]
            ),
        })  # fmt: skip


def test_both_nixl_variants_are_normal_from_1_3(venv):
    venv.torch()
    nixl(venv)
    data = look(venv)["backends"]["nixl"]
    assert {name: use["state"] for name, use in data["uses"].items()} == {
        "kv_transfer": "ok", "a2a": "ok", "elastic_ep": "ok",
    }  # fmt: skip
    assert data["remedy"] is None


def test_nixl_ep_for_another_torch_leaves_kv_transfer_alone(venv):
    venv.torch("2.15.0+cu130")
    nixl(venv)
    uses = look(venv)["backends"]["nixl"]["uses"]
    assert uses["kv_transfer"]["state"] == "ok"
    assert (uses["a2a"]["state"], uses["a2a"]["code"]) == ("broken", "nixl_ep_not_built_for_torch")
    assert uses["a2a"]["evidence"]["has"] == ["2.14"]


def test_nixl_with_the_variant_of_another_cuda_only(venv):
    venv.torch()
    nixl(venv, variants=("cu12",))
    use = use_of(venv, "nixl", "kv_transfer")
    assert (use["state"], use["code"]) == ("variant_mismatch", "cuda_major_mismatch")
    assert packages(use["remedy"], "pip_install") == ["nixl-cu13==1.5.1"]


def test_nixl_before_1_3_clobbers_itself(venv):
    venv.torch()
    venv.dist("nixl", "1.2.0", {"nixl/__init__.py": ""}, tag="py3-none-any")
    files = {"nixl_ep/__init__.py": "from nixl_ep import nixl_ep_cpp\nBuffer = 1\n",
             "nixl_ep/nixl_ep_cpp.so": So(needed=["libcudart.so.12"], pyinit="nixl_ep_cpp")}  # fmt: skip
    venv.dist("nixl-cu13", "1.2.0", files)
    venv.dist("nixl-cu12", "1.2.0", files)
    use = use_of(venv, "nixl", "a2a")
    assert (use["state"], use["code"]) == ("variant_mismatch", "file_owned_by_two_distributions")
    steps = use["remedy"]["steps"]
    assert [step["action"] for step in steps] == ["pip_uninstall", "pip_install"]
    assert "nixl-cu12" in steps[0]["packages"]
    assert steps[1]["packages"] == ["nixl-cu13==1.2.0"]
    assert steps[1]["args"]["flags"] == ["--force-reinstall", "--no-deps"]


def test_nixl_ep_that_find_spec_would_take_for_good(venv):
    venv.torch()
    venv.put("nixl_ep/__init__.py", "from . import nixl_ep_cpp\nBuffer = 1\n")
    venv.put("nixl_ep/nixl_ep_cpp.so", So(needed=["libcudart.so.12"], pyinit="nixl_ep_cpp"))
    venv.put("nixl/__init__.py", "")
    use = use_of(venv, "nixl", "a2a")
    assert (use["state"], use["code"]) == ("variant_mismatch", "cuda_major_mismatch")


# --- mooncake variants (C35, C41, C44, C40) ------------------------------------------------------------------------


def test_cuda_12_build_beside_cuda_13_torch(venv):
    venv.torch("2.13.0+cu130")
    mooncake(venv, "mooncake-transfer-engine", engine=So(needed=["libcudart.so.12"], pyinit="engine"))
    use = use_of(venv, "mooncake", "kv_transfer")
    assert (use["state"], use["code"], use["level"]) == ("variant_mismatch", "cuda_major_mismatch", "import")
    assert (use["evidence"]["needs"], use["evidence"]["host"]) == ("12", "13")
    assert packages(use["remedy"], "pip_uninstall") == ["mooncake-transfer-engine"]
    assert packages(use["remedy"], "pip_install") == ["mooncake-transfer-engine-cuda13==0.3.13.post1"]


def test_torch_is_told_from_its_metadata_where_that_is_all_there_is(venv):
    venv.dist("torch", "2.13.0+cu130", {})
    mooncake(venv, "mooncake-transfer-engine", engine=So(needed=["libcudart.so.12"], pyinit="engine"))
    use = use_of(venv, "mooncake", "kv_transfer", level="static")
    assert (use["state"], use["level"]) == ("variant_mismatch", "static")


def test_a_runtime_put_there_by_hand_does_not_make_the_variant_right(venv):
    venv.torch()
    mooncake(venv, "mooncake-transfer-engine", engine=So(needed=["libcudart.so.12"], pyinit="engine"))
    venv.put("nvidia/cuda_runtime/lib/libcudart.so.12", So(soname="libcudart.so.12"))
    assert use_of(venv, "mooncake", "kv_transfer", level="static")["code"] == "cuda_major_mismatch"


def test_variants_without_and_with_cuda(venv, tmp_path):
    venv.torch("2.13.0+cpu", None)
    mooncake(venv, "mooncake-transfer-engine-non-cuda", engine=So(pyinit="engine"))
    init = "class TransferEngine: pass\n"
    venv.put("mooncake/engine.py", init)
    uses = look(venv)["backends"]["mooncake"]["uses"]
    assert uses["kv_transfer"]["state"] != "variant_mismatch"
    assert uses["a2a"]["state"] != "ok"

    other = FakeVenv(tmp_path / "other")
    other.torch("2.13.0+cpu", None)
    mooncake(other)
    use = use_of(other, "mooncake", "kv_transfer", level="static")
    assert use["code"] == "variant_needs_cuda"
    assert packages(use["remedy"], "pip_install") == ["mooncake-transfer-engine-non-cuda==0.3.13.post1"]

    third = FakeVenv(tmp_path / "third")
    third.torch()
    mooncake(third, "mooncake-transfer-engine-non-cuda", engine=So(pyinit="engine"))
    use = use_of(third, "mooncake", "kv_transfer", level="static")
    assert (use["state"], use["code"]) == ("variant_mismatch", "variant_without_cuda")


def test_the_need_depends_on_the_use(venv):
    venv.torch("2.13.0+cu130")
    pg = (
        "import importlib, re, torch\n"
        "v = re.match(r'[0-9.]*[0-9]', torch.__version__).group()\n"
        "try:\n    importlib.import_module('mooncake.pg_' + v.replace('.', '_'))\n"
        "except ModuleNotFoundError:\n    raise ImportError(f'Mooncake PG was not built against torch=={v}.')\n"
    )
    venv.dist("mooncake-transfer-engine-cuda13", "0.3.13.post1", {
        "mooncake/__init__.py": "", "mooncake/engine.py": "class TransferEngine: pass\n",
        "mooncake/engine_impl.so": So(), "mooncake/pg.py": pg,
        f"mooncake/pg_2_9_1{venv.suffix}": So(pyinit="pg_2_9_1"),
    })  # fmt: skip
    uses = look(venv)["backends"]["mooncake"]["uses"]
    assert uses["elastic_ep"]["code"] == "mooncake_pg_not_built_for_torch"
    assert uses["elastic_ep"]["state"] == "broken"
    assert (uses["elastic_ep"]["evidence"]["has"], uses["elastic_ep"]["evidence"]["needs"]) == (["2.9.1"], "2.13.0")
    assert uses["a2a"]["code"] == "mooncake_ep_not_built_for_torch"
    assert uses["kv_transfer"]["state"] == "ok"


@pytest.mark.parametrize(("release", "package"), [(DEBIAN, "libibverbs1"), (REDHAT, "libibverbs")])
def test_missing_system_library(venv, root, release, package):
    (root / "etc/os-release").write_text(release)
    venv.torch()
    mooncake(venv, engine=So(needed=["libibverbs.so.1", "libcudart.so.13"], pyinit="engine"))
    use = use_of(venv, "mooncake", "kv_transfer", root=root, level="static")
    assert (use["state"], use["code"], use["layer"]) == ("broken", "missing_system_lib", "system_library")
    assert use["evidence"]["library"] == "libibverbs.so.1"
    assert packages(use["remedy"], "os_install") == [package]
    assert {step["action"] for step in use["remedy"]["steps"]} == {"os_install"}


def test_missing_system_library_as_the_loader_says_it(venv):
    venv.torch()
    mooncake(venv, engine=So(needed=["libdoes_not_exist.so.7"], pyinit="engine"))
    use = use_of(venv, "mooncake", "kv_transfer")
    assert (use["code"], use["level"]) == ("missing_system_lib", "import")
    assert "libdoes_not_exist.so.7" in use["evidence"]["exception"]["message"]
    assert {step["action"] for step in use["remedy"]["steps"]} == {"manual"}


def test_private_library_of_a_program(venv):
    venv.torch()
    mooncake(venv, **{
        "mooncake/mooncake_master": So(needed=["libetcd_wrapper.so"]), "mooncake/libetcd_wrapper.so": So(),
        "mooncake/engine.py": "",
    })  # fmt: skip
    data = look(venv, level="static")["backends"]["mooncake"]
    tool = data["tools"]["mooncake_master"]
    assert (tool["state"], tool["code"]) == ("broken", "private_lib_not_on_loader_path")
    assert tool["found_at"].endswith("site-packages/mooncake/libetcd_wrapper.so")
    assert tool["remedy"]["steps"][0]["action"] == "set_env"
    assert data["uses"]["kv_transfer"]["state"] == "ok"


def test_two_variants_and_the_one_that_was_left(venv):
    venv.torch()
    mooncake(venv, "mooncake-transfer-engine", engine=So(needed=["libcudart.so.12"], pyinit="engine"))
    mooncake(venv)
    venv.put("mooncake/engine.so", So(needed=["libcudart.so.13"], pyinit="engine"))
    use = use_of(venv, "mooncake", "kv_transfer", level="static")
    assert (use["state"], use["code"]) == ("suspect", "file_owned_by_two_distributions")
    assert packages(use["remedy"], "pip_uninstall") == [
        "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13",
    ]  # fmt: skip
    assert packages(use["remedy"], "pip_install") == ["mooncake-transfer-engine-cuda13==0.3.13.post1"]

    # pip uninstalls the other one: its files are those of both.
    for path in ("__init__.py", "engine.so"):
        (venv.site / "mooncake" / path).unlink()
    for file in (venv.site / "mooncake_transfer_engine-0.3.13.post1.dist-info").iterdir():
        file.unlink()
    (venv.site / "mooncake_transfer_engine-0.3.13.post1.dist-info").rmdir()
    use = use_of(venv, "mooncake", "kv_transfer")
    assert (use["state"], use["code"]) == ("broken", "files_missing")
    assert packages(use["remedy"], "pip_install") == ["mooncake-transfer-engine-cuda13==0.3.13.post1"]
    assert use["remedy"]["steps"][-1]["args"]["flags"] == ["--force-reinstall", "--no-deps"]


def test_an_empty_folder_is_no_package(venv):
    venv.torch()
    (venv.site / "mooncake").mkdir()
    use = use_of(venv, "mooncake", "kv_transfer")
    assert (use["state"], use["code"]) == ("absent", "namespace_leftover")


def test_a_changed_file_is_suspect_although_it_imports(venv):
    venv.torch()
    deep_ep(venv)
    with open(venv.site / "deep_ep/__init__.py", "a") as stream:
        stream.write("# patched\n")
    use = use_of(venv, "deep_ep", "a2a")
    assert (use["state"], use["code"], use["level"]) == ("suspect", "files_changed", "import")


# --- what a build or wheel can be wrong in (C18, C21, C26) ------------------------------------------------------


@pytest.mark.parametrize(
    ("symbol", "code"),
    [
        ("_Z14THPStream_WrapRKN3c106StreamE", "torch_abi_mismatch"),
        ("__cudaRegisterLinkedBinary_8a1_intranode_cu", "device_link_missing"),
        ("_ZN7deep_ep9internode4initEv", "incomplete_build"),
        ("nvshmem_selected_device_transport", "nvshmem_mismatch"),
        ("ncclCommWindowRegister", "nccl_mismatch"),
    ],
)
@pytest.mark.parametrize("level", ["static", "import"])
def test_undefined_symbols(venv, symbol, code, level):
    venv.torch()
    deep_ep(venv, so=So(pyinit="_C", undefined=[symbol]), version="1.2.1+9af0e0d", name="deep_ep", requires=())
    use = use_of(venv, "deep_ep", "a2a", level=level)
    assert (use["state"], use["code"], use["level"]) == ("broken", code, level)
    assert use["remedy"]["kind"] == "rebuild"
    assert packages(use["remedy"], "pip_install") == []


def test_a_symbol_that_torch_has_is_no_fault(venv):
    venv.torch()
    symbol = "_ZN3c106StreamE"
    venv.put("torch/lib/libtorch.so", So(soname="libtorch.so", defined=[symbol]))
    deep_ep(venv, so=So(pyinit="_C", undefined=[symbol], needed=["libtorch.so"]))
    assert use_of(venv, "deep_ep", "a2a", level="static")["state"] == "ok"


def test_another_machine_says_what_a_missing_library_says(venv):
    venv.torch()
    deep_ep(venv, so=So(pyinit="_C", machine="aarch64"))
    for level in ("static", "import"):
        use = use_of(venv, "deep_ep", "a2a", level=level)
        assert (use["state"], use["code"]) == ("broken", "wrong_machine")


def test_built_for_another_python(venv):
    venv.torch()
    venv.dist("sgl-deep-ep", "0.1.2.post1", {
        "deep_ep/__init__.py": "from deep_ep._C import *\n",
        "deep_ep/_C.cpython-38-x86_64-linux-gnu.so": So(pyinit="_C"),
    }, tag="cp38-cp38-manylinux_2_28_x86_64")  # fmt: skip
    use = use_of(venv, "deep_ep", "a2a")
    assert (use["state"], use["code"]) == ("broken", "wrong_python")
    assert packages(use["remedy"], "pip_install") == ["sgl-deep-ep==0.1.2.post1"]


def test_a_library_cut_short(venv):
    venv.torch()
    mooncake(venv, engine=So(pyinit="engine").build()[:300])
    use = use_of(venv, "mooncake", "kv_transfer")
    assert (use["state"], use["code"]) == ("broken", "corrupt_file")


@pytest.mark.parametrize(
    ("sm", "ptx", "capability", "code"),
    [
        ([90], [], "10.0", "arch_mismatch"),
        ([90], [90], "10.0", None),
        ([90, 100, 103], [], "12.0", "arch_mismatch"),
        ([90, 100], [], "10.3", None),
        ([103], [], "10.0", "arch_mismatch"),
    ],
)
def test_gpu_architectures(venv, sm, ptx, capability, code):
    venv.torch()
    deep_ep(venv, so=So(pyinit="_C", sm=sm, ptx=ptx))
    use = use_of(venv, "deep_ep", "a2a", results=gpus(capability))
    assert use["code"] == code
    if code:
        assert use["state"] == "broken"
        assert use["evidence"]["needed"] == [capability]
        assert use["remedy"]["steps"] == [
            {"action": "build", "packages": [], "args": {"backend": "deep_ep", "archs": [capability]}}
        ]


def test_capabilities_are_asked_of_nvidia_smi_where_there_are_gpus(venv, root):
    (root / "dev/nvidia0").write_text("")
    venv.torch()
    deep_ep(venv, so=So(pyinit="_C", sm=[90]))
    asked = []

    def run(argv, timeout):
        asked.append(list(argv))
        return RunResult(0, "10.0\n10.0\n", "")

    assert use_of(venv, "deep_ep", "a2a", root=root, run=run, level="static")["code"] == "arch_mismatch"
    assert asked == [["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]]


def test_the_wheel_is_for_another_torch(venv):
    venv.torch("2.13.0+cu130")
    deep_ep(venv)
    use = use_of(venv, "deep_ep", "a2a")
    assert (use["state"], use["code"]) == ("suspect", "torch_pin_mismatch")


def test_needs_gpu_is_not_broken(venv, root):
    venv.torch(usable=False)
    init = (
        "import torch\nif not torch.cuda.is_available():\n"
        "    raise ImportError('The NVIDIA driver does not expose a usable CUDA device. See the prerequisites')\n"
    )
    deep_ep(venv, init=init)
    use = use_of(venv, "deep_ep", "a2a", root=root)
    assert (use["state"], use["code"], use["layer"]) == ("needs_gpu", "no_gpu_visible", "driver")
    assert packages(use["remedy"], "pip_install") == []

    mooncake(venv, engine=So(pyinit="engine", needed=["libcuda.so.1"]))
    use = use_of(venv, "mooncake", "kv_transfer", root=root, level="static")
    assert (use["state"], use["code"], use["remedy"]["kind"]) == ("needs_gpu", "no_driver", "driver")


# --- what an import can do (C24, C25) ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "code", "fatal"),
    [
        ("raise AssertionError('Duplicate NCCL runtime found in the current system: a and b')",
         "duplicate_nccl_runtime", True),
        ("raise FileNotFoundError(2, 'No such file', '/usr/lib/libnccl.so.2 (deleted)')", "deleted_mapping", True),
        ("import os\nos.abort()", "import_crashed", True),
        ("import sys\nsys.exit(3)", "import_exited", True),
        ("import os\nos._exit(0)", "import_exited", True),
        ("def find_cuda_home():\n    assert None is not None\nfind_cuda_home()", "cuda_home_not_found", True),
        ("assert 1 == 2, 'something else'", "assertion_at_import", True),
        ("raise ImportError('libnothing.so.3: cannot open shared object file: No such file')",
         "missing_system_lib", False),
        ("import numpy_that_is_not_there", "dependency_missing", False),
        ("raise ValueError('odd')", "exception_at_import", True),
    ],
)  # fmt: skip
def test_what_an_import_does_is_a_result(venv, init, code, fatal):
    venv.torch()
    venv.sglang("0.5.19", guard="ImportError")
    deep_ep(venv, init=init + "\n")
    data = look(venv)["backends"]["deep_ep"]
    assert (data["state"], data["code"]) == ("broken", code)
    assert data["fatal_for_service"] is fatal


def test_a_hang_ends_at_the_limit(venv):
    venv.torch()
    venv.sglang("0.5.19")
    deep_ep(venv, init="import time\ntime.sleep(300)\n")
    data = look(venv, import_timeout=1.0)["backends"]["deep_ep"]
    assert (data["state"], data["code"], data["fatal_for_service"]) == ("broken", "import_timeout", True)


@pytest.mark.parametrize(
    ("guard", "init", "fatal"),
    [
        ("Exception as exc", "assert False", False),
        ("Exception as exc", "import sys; sys.exit(1)", True),
        ("(ImportError, OSError) as exc", "raise ValueError", True),
        ("BaseException", "import sys; sys.exit(1)", False),
    ],
)
def test_the_guard_of_the_installed_sglang_decides_what_is_fatal(venv, guard, init, fatal):
    venv.torch()
    venv.sglang("0.5.23", guard=guard)
    deep_ep(venv, init=init + "\n")
    assert look(venv)["backends"]["deep_ep"]["fatal_for_service"] is fatal


def test_a_crash_hides_no_other_use(venv):
    venv.torch()
    deep_ep(venv, init="import os\nos.abort()\n")
    nixl(venv)
    result = look(venv)["backends"]
    assert result["deep_ep"]["code"] == "import_crashed"
    assert result["nixl"]["state"] == "ok"


def test_nccl_is_not_found_by_deep_ep(venv, root):
    (root / "usr/lib/x86_64-linux-gnu/libnccl.so.2").write_bytes(So().build())
    venv.torch()
    deep_ep(venv, init="raise AssertionError('Cannot find package: nccl')\n")
    use = use_of(venv, "deep_ep", "a2a", root=root)
    assert (use["state"], use["code"]) == ("broken", "nccl_root_not_discoverable")
    assert use["remedy"]["steps"] == [{"action": "set_env", "packages": [], "args": {"EP_NCCL_ROOT_DIR": "/usr"}}]


def test_the_environment_is_the_services_and_nothing_else(venv, monkeypatch):
    monkeypatch.setenv("EP_NCCL_ROOT_DIR", "/opt/of/the/login")
    venv.torch()
    init = "import os\nassert os.environ.get('EP_NCCL_ROOT_DIR') == '/opt/nccl', 'Cannot find package: nccl'\n"
    deep_ep(venv, init=init + "Buffer = Config = 1\n")
    assert use_of(venv, "deep_ep", "a2a", environment={})["code"] == "nccl_root_not_discoverable"
    good = use_of(venv, "deep_ep", "a2a", environment={"EP_NCCL_ROOT_DIR": "/opt/nccl"})
    assert good["state"] == "ok"


def test_a_folder_on_pythonpath_shadows_the_venv(venv, tmp_path):
    other = tmp_path / "checkout"
    (other / "deep_ep").mkdir(parents=True)
    (other / "deep_ep/__init__.py").write_text("import deep_ep._C\n")
    venv.torch()
    deep_ep(venv)
    use = use_of(venv, "deep_ep", "a2a", environment={"PYTHONPATH": str(other)})
    assert (use["state"], use["code"]) == ("broken", "shadowed")
    assert use["evidence"]["path"] == str(other / "deep_ep/__init__.py")
    assert use["evidence"]["hides"].startswith(str(venv.path))
    assert use_of(venv, "deep_ep", "a2a")["state"] == "ok"


def test_a_folder_on_pythonpath_shadows_an_absent_backend(venv, tmp_path):
    other = tmp_path / "checkout"
    (other / "nixl").mkdir(parents=True)
    (other / "nixl/__init__.py").write_text("")
    venv.torch()
    assert use_of(venv, "nixl", "kv_transfer", environment={"PYTHONPATH": str(other)})["code"] == "shadowed"


def test_the_working_directory_is_empty(venv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep/__init__.py").write_text("raise RuntimeError('the working directory')\n")
    venv.torch()
    deep_ep(venv)
    assert use_of(venv, "deep_ep", "a2a", environment={})["state"] == "ok"


def test_imports_but_lacks_what_sglang_calls(venv):
    venv.torch()
    deep_ep(venv, init="import deep_ep._C\nBuffer = 1\n")
    use = use_of(venv, "deep_ep", "a2a")
    assert (use["state"], use["code"]) == ("unsupported", "api_missing")


@pytest.mark.parametrize(("sglang", "code"), [("0.5.15.post1", "version_incompatible_with_sglang"), ("0.5.23", None)])
def test_versions_that_import_and_do_not_work(venv, sglang, code):
    venv.torch()
    venv.sglang(sglang)
    nixl(venv)
    uses = look(venv)["backends"]["nixl"]["uses"]
    assert uses["a2a"]["code"] == code
    assert uses["kv_transfer"]["state"] == "ok"
    if code:
        assert uses["a2a"]["state"] == "unsupported"
        assert "nixl-cu13==1.3.1" in packages(uses["a2a"]["remedy"], "pip_install")


def test_two_ucx(venv, tmp_path):
    ucx = tmp_path / "ucx"
    ucx.mkdir()
    (ucx / "libucp.so.0").write_bytes(So().build())
    venv.torch()
    nixl(venv)
    venv.put("nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0", So())
    use = use_of(venv, "nixl", "kv_transfer", environment={"LD_LIBRARY_PATH": str(ucx)})
    assert (use["state"], use["code"], use["evidence"]["path"]) == ("suspect", "ucx_conflict", str(ucx))


def test_a_path_of_the_builder_in_the_wheel(venv):
    venv.torch()
    deep_ep(venv)
    venv.put("deep_ep/envs.py", "persistent_envs = dict()\npersistent_envs['EP_JIT_CACHE_DIR'] = '/home/builder/x'\n")
    use = use_of(venv, "deep_ep", "a2a")
    assert (use["state"], use["code"]) == ("suspect", "builder_path_baked_in")
    assert use["evidence"]["variables"] == {"EP_JIT_CACHE_DIR": "/home/builder/x"}
    assert use["remedy"]["steps"][0]["args"] == {"EP_JIT_CACHE_DIR": "/var/cache/sglang/deep_ep"}
    assert use_of(venv, "deep_ep", "a2a", environment={"EP_JIT_CACHE_DIR": "/var/x"})["state"] == "ok"


def test_editable(venv, tmp_path):
    tree = tmp_path / "tree"
    (tree / "deep_ep").mkdir(parents=True)
    (tree / "deep_ep/__init__.py").write_text("import deep_ep_cpp\nBuffer = Config = 1\n")
    (tree / f"deep_ep_cpp{venv.suffix}").write_bytes(So(pyinit="deep_ep_cpp").build())
    venv.torch()
    venv.dist("deep_ep", "1.2.1+9af0e0d", {"__editable__.deep_ep.pth": f"{tree}\n"},
              direct_url={"url": f"file://{tree}", "dir_info": {"editable": True}})  # fmt: skip
    use = use_of(venv, "deep_ep", "a2a")
    assert (use["state"], use["code"]) == ("ok", "editable_install")


# --- levels, users, services -----------------------------------------------------------------------------------------


def test_static_imports_nothing(venv, tmp_path):
    venv.torch()
    mark = tmp_path / "imported"
    deep_ep(venv, init=f"open({str(mark)!r}, 'w')\n")
    assert use_of(venv, "deep_ep", "a2a", level="static")["level"] == "static"
    assert not mark.exists()


def test_a_running_service_is_not_disturbed(venv, root, tmp_path):
    venv.torch()
    mark = tmp_path / "imported"
    deep_ep(venv, init=f"open({str(mark)!r}, 'w')\n")
    group = root / "sys/fs/cgroup/system.slice/sglang-default.service"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("4711\n")
    (root / "proc/4711").mkdir(parents=True)
    library = venv.site / f"deep_ep/_C{venv.suffix}"
    (root / "proc/4711/maps").write_text(f"7f00-7f01 r-xp 00000000 08:01 12 {library}\n")
    result = look(venv, root)
    use = result["backends"]["deep_ep"]["uses"]["a2a"]
    assert (use["state"], use["level"]) == ("ok", "static")
    assert use["evidence"]["loaded_by_service"] == [str(library)]
    assert not mark.exists()
    assert any("running" in note for note in result["notes"])
    use_of(venv, "deep_ep", "a2a", root=root, level="import")
    assert mark.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="changes users")
def test_the_probe_is_the_services_user(venv, tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    venv.torch()
    deep_ep(venv, init="import os\nassert os.getuid() == 65534, os.getuid()\nBuffer = Config = 1\n")
    result = look(venv, user="nobody")
    if result["venv"]["code"] == "venv_unreadable_by_user":
        pytest.skip("the interpreter of these tests is not readable by others")
    assert result["account"] == "nobody"
    assert result["backends"]["deep_ep"]["state"] == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_a_venv_of_another_owner_never_runs_as_root(venv):
    subprocess.run(["chown", "-R", "65534", str(venv.path)], check=True)
    ran = []

    def imports(python, groups, account, *_rest):
        ran.append(account.uid)
        return {}

    venv.torch()
    deep_ep(venv)
    venv.path.chmod(0o755)
    for folder in venv.path.parents:
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    result = _probe.probe(_probe.Request(str(venv.path), ["backends"]), Context(), imports=imports)
    assert ran == [65534] or result["venv"]["code"] == "venv_unreadable_by_user"
    assert 0 not in ran


@pytest.mark.skipif(os.geteuid() != 0, reason="changes modes")
def test_a_venv_that_the_service_cannot_read(venv):
    venv.path.chmod(0o700)
    result = look(venv, user="nobody")
    assert result["venv"]["state"] == "unreadable"
    assert result["venv"]["code"] == "venv_unreadable_by_user"
    assert {data["code"] for data in result["backends"].values()} == {"venv_unreadable_by_user"}
    assert "nobody" in result["venv"]["message"]


# --- the request -----------------------------------------------------------------------------------------------------


def test_the_worst_wanted_use_is_the_state(venv):
    venv.torch("2.15.0+cu130")
    nixl(venv)
    assert look(venv)["backends"]["nixl"]["state"] == "ok"
    assert look(venv, wanted={"nixl": ["kv_transfer", "a2a"]})["backends"]["nixl"]["state"] == "broken"


def test_other_backends_are_looked_at_when_asked_for(venv):
    venv.torch()
    assert set(look(venv)["backends"]) == {"deep_ep", "mooncake", "nixl"}
    result = look(venv, wanted={"mori": ["a2a"]}, backends=("flashinfer",))["backends"]
    assert set(result) == {"mori", "flashinfer"}
    assert packages(result["mori"]["remedy"], "pip_install") == ["amd-mori==1.2.4"]


def test_subsets():
    assert _probe.expand_subsets(["all", "!model"]) == [s for s in _probe.SUBSETS if s != "model"]
    assert _probe.expand_subsets([]) == ["backends", "server_args"]
    assert _probe.expand_subsets(["!server_args"]) == ["backends"]
    assert _probe.expand_subsets(["!all", "gpus"]) == ["gpus"]
    with pytest.raises(ValueError, match=r"unknown subset gpu:.*gpus"):
        _probe.expand_subsets(["gpu"])


def test_bad_wishes_are_named():
    with pytest.raises(ValueError, match="unknown backend deepep: choose from deep_ep"):
        _probe.check_wanted({"deepep": ["a2a"]}, ())
    with pytest.raises(ValueError, match="deep_ep has no use kv_transfer: choose from a2a"):
        _probe.check_wanted({"deep_ep": ["kv_transfer"]}, ())
    assert _probe.check_wanted({"mooncake": "a2a"}, ()) == {"mooncake": ["a2a"]}


def test_every_use_of_every_backend_is_in_the_result(venv):
    result = look(venv, backends=tuple(BACKENDS), level="static")["backends"]
    assert {name: set(data["uses"]) for name, data in result.items()} == {
        name: set(backend.uses) for name, backend in BACKENDS.items()
    }
