"""What a source tree is, from trees that have the shape of upstream's (their files are not copied)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _deepep_source as source

FIXTURE = Path(__file__).parents[1] / "fixtures" / "cuda_ext"


class Files(dict):
    def names(self):
        return sorted(self)

    def read(self, name):
        return self.get(name)


def setup_py(names, *, nvshmem="wheel_only", nccl=None, libcuda=False, version="1.2.1"):
    links = {
        "wheel_only": "nvshmem_host_lib = 'libnvshmem_host.so'\nlink = [f'-l:{nvshmem_host_lib}']",
        "unversioned": "link = [f'-l:libnvshmem_host.so', '-l:libnvshmem_device.a']",
        "versioned": "nvshmem_host_lib = find('libnvshmem_host')\nlink = [f'-l:{nvshmem_host_lib}']",
        "none": "link = []",
    }
    text = "from torch.utils.cpp_extension import CUDAExtension\n" + links[nvshmem] + "\n"
    if nccl:
        text += {"versioned": "link += [f'-l:{nccl_lib}']\n", "unversioned": "link += [f'-l:libnccl.so']\n"}[nccl]
    if libcuda:
        text += "link += ['-lcuda']\n"
    text += "sources = ['csrc/a.cpp', 'csrc/kernels/b.cu', 'csrc/kernels/c.cu']\n"
    text += f"setup(name='deep_ep', version='{version}' + revision, ext_modules=["
    return text + ", ".join(f"CUDAExtension(name='{name}', sources=sources)" for name in names) + "])\n"


V1 = Files({"setup.py": setup_py(["deep_ep_cpp"]), "deep_ep/__init__.py": "import torch\n"})
V2 = Files(
    {
        "setup.py": setup_py(["deep_ep._C"], nvshmem="versioned", nccl="versioned", libcuda=True, version="x"),
        "deep_ep/__init__.py": "__version__ = '2.1.0'\n",
        ".gitmodules": '[submodule "third-party/fmt"]\n\tpath = third-party/fmt\n\turl = https://example.org/fmt\n',
        "csrc/a.cu": "#define __CUDACC_RDC__ 1\n#include <nccl_device.h>\n",
    }
)
HYBRID = Files(
    {
        "setup.py": setup_py(["deep_ep_cpp", "hybrid_ep_cpp"]),
        "deep_ep/__init__.py": "",
        ".gitmodules": '[submodule "third-party/nccl"]\n\tpath = third-party/nccl\n',
    }
)


@pytest.mark.parametrize("tree, generation, extensions", [
    (V1, "v1", ["deep_ep_cpp"]),
    (V2, "v2", ["deep_ep._C"]),
    (HYBRID, "hybrid", ["deep_ep_cpp", "hybrid_ep_cpp"]),
])  # fmt: skip
def test_the_generation_follows_from_the_extensions(tree, generation, extensions):
    about = source.recognise(tree)
    assert (about["generation"], about["extensions"]) == (generation, extensions)


def test_versions_come_from_the_package_else_from_setup():
    assert source.recognise(V1)["version"] == "1.2.1"
    assert source.recognise(V2)["version"] == "2.1.0"


@pytest.mark.parametrize("files, words", [
    ({}, "no setup.py"),
    (
        {"setup.py": "import setuptools\nsetuptools.setup(name='deep_ep')", "deep_ep/__init__.py": ""},
        "sdist without headers",
    ),
    ({"setup.py": "CUDAExtension(name='other', sources=['a.cu'])"}, "builds none of"),
])  # fmt: skip
def test_what_is_no_deepep_is_said_to_be_none(files, words):
    about = source.recognise(Files(files))
    assert about["generation"] == "unknown"
    assert words in about["message"]


@pytest.mark.parametrize("style", ["wheel_only", "unversioned", "versioned", "none"])
def test_how_the_nvshmem_host_library_is_named(style):
    assert source.recognise(Files({"setup.py": setup_py(["deep_ep_cpp"], nvshmem=style)}))["nvshmem_host_link"] == style


def test_submodules_are_present_or_not():
    assert source.missing_submodules(source.recognise(V2)) == ["third-party/fmt"]
    whole = Files(V2, **{"third-party/fmt/include/fmt/base.h": ""})
    assert source.missing_submodules(source.recognise(whole)) == []


def test_hybrid_needs_its_nccl_for_several_nodes_only():
    about = source.recognise(HYBRID)
    assert source.missing_submodules(about) == []
    assert source.missing_submodules(about, multinode=True) == ["third-party/nccl"]


def test_readiness_for_nvshmem_35_is_read_from_the_code():
    assert source.recognise(V2)["nvshmem_35_ready"] is True
    assert source.recognise(V1)["nvshmem_35_ready"] is False


@pytest.mark.parametrize("version, begins", [
    ("0.5.5", "9af0e0d"), ("0.5.17.post1", "9af0e0d"), (None, "9af0e0d"), ("nonsense", "9af0e0d"),
    ("0.5.18", "9af0e0d"), ("0.5.19", "dd758ca"), ("0.5.23", "dd758ca"), ("0.6.0rc1", "dd758ca"), ("1.0", "dd758ca"),
])  # fmt: skip
def test_each_sglang_has_a_pinned_revision_with_a_reason(version, begins):
    revision, why = source.pinned_revision(version)
    assert revision.startswith(begins) and len(revision) == 40 and why
    assert revision in source.KNOWN_REVISIONS


def test_the_fixture_counts_as_v1_from_a_folder_and_from_an_archive(tmp_path):
    folder = source.recognise(source.FolderTree(str(FIXTURE)))
    for name, top in (("with-top.tar.gz", "DeepEP-1.2.1"), ("flat.tar.gz", ".")):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.add(FIXTURE, arcname=top)
        assert source.recognise(source.TarTree(str(tmp_path / name))) == folder
    assert folder["generation"] == "v1" and folder["compile_units"] == 3 and folder["includes"] == ["cuda/std/tuple"]


def test_equal_trees_have_equal_digests_and_build_products_do_not_count(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "csrc").mkdir(parents=True)
        (folder / "csrc" / "a.cu").write_text("x")
    assert source.FolderTree(str(one)).digest() == source.FolderTree(str(two)).digest()
    for name in ("build", ".git", "deep_ep.egg-info", "__pycache__"):
        (two / name).mkdir()
        (two / name / "f").write_text("y")
    assert source.FolderTree(str(one)).digest() == source.FolderTree(str(two)).digest()
    (two / "csrc" / "a.cu").write_text("z")
    assert source.FolderTree(str(one)).digest() != source.FolderTree(str(two)).digest()
