# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Installed distributions, search paths and versions, from files."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _distributions as dists
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.fake_venv import FakeVenv
from tests.tools.make_so import So


@pytest.fixture
def venv(tmp_path):
    return FakeVenv(tmp_path / "venv")


def test_scan_finds_every_kind(venv):
    venv.dist("Sgl_Deep.EP", "0.1.2.post1", {"deep_ep/__init__.py": ""})
    venv.put("old-1.0-py3.12.egg/EGG-INFO/PKG-INFO", "Name: old\nVersion: 1.0\n")
    venv.put("flat-2.0.egg-info", "Name: flat\nVersion: 2.0\n")
    venv.put("linked.egg-link", "/somewhere/tree\n.\n")
    venv.put("~ooncake_transfer_engine-0.3.dist-info/METADATA", "Name: x\n")
    found = {(dists.canonical(d.name), d.version, d.kind) for d in dists.scan([str(venv.site)])}
    assert found == {
        ("sgl-deep-ep", "0.1.2.post1", "wheel"), ("old", "1.0", "egg"), ("flat", "2.0", "egg-info"),
        ("linked", "", "egg-link"),
    }  # fmt: skip
    assert [d.name for d in dists.scan([str(venv.site)], ["old"])] == ["old"]
    assert len(dists.leftovers([str(venv.site)])) == 1


def test_metadata_that_is_missing_leaves_the_folders_name(venv):
    info = venv.dist("nixl", "1.5.1", {})
    (info / "METADATA").unlink()
    assert [(d.name, d.version) for d in dists.scan([str(venv.site)])] == [("nixl", "1.5.1")]


def test_verify(venv):
    venv.dist("x", "1", {"x/__init__.py": "a = 1\n", "x/gone.py": "", "x/big.so": So(), "x/data.json": "{}"})
    dist = dists.scan([str(venv.site)])[0]
    assert dists.verify(dist, str(venv.path))["ok"] is True
    (venv.site / "x/gone.py").unlink()
    (venv.site / "x/__init__.py").write_text("a = 2\n")
    result = dists.verify(dist, str(venv.path))
    assert (result["ok"], result["missing"], result["changed"]) == (False, ["x/gone.py"], ["x/__init__.py"])
    assert dists.verify(dist, str(venv.path), hashes=False)["changed"] == []


def test_verify_reads_nothing_outside_the_venv(venv):
    info = venv.dist("x", "1", {})
    (info / "RECORD").write_text("../../../../../../etc/passwd,sha256=AAAA,1\nx.py,,\n")
    result = dists.verify(dists.scan([str(venv.site)])[0], str(venv.path))
    assert result["files"] == 1


def test_no_record_is_neither_good_nor_bad(venv):
    info = venv.dist("x", "1", {})
    (info / "RECORD").unlink()
    assert dists.verify(dists.scan([str(venv.site)])[0], str(venv.path))["ok"] is None


def test_shared_paths(venv):
    venv.dist("one", "1", {"m/__init__.py": "", "m/a.py": ""})
    venv.dist("two", "1", {"m/__init__.py": "", "m/b.py": ""})
    shared = dists.shared_paths(dists.scan([str(venv.site)]))
    assert shared == {str(venv.site / "m/__init__.py"): ["one", "two"]}


@pytest.mark.parametrize(
    ("tags", "python", "machine", "expected"),
    [
        (["cp312-cp312-manylinux_2_28_x86_64"], (3, 12), "x86_64", None),
        (["cp311-cp311-manylinux_2_28_x86_64"], (3, 12), "x86_64", "python"),
        (["cp312-cp312-manylinux_2_28_aarch64"], (3, 12), "x86_64", "machine"),
        (["cp39-abi3-manylinux1_x86_64"], (3, 12), "x86_64", None),
        (["cp313-abi3-manylinux1_x86_64"], (3, 12), "x86_64", "python"),
        (["py3-none-any"], (3, 12), "aarch64", None),
        (["py2.py3-none-any"], (3, 9), "x86_64", None),
        (["cp311-cp311-linux_x86_64", "cp312-cp312-linux_x86_64"], (3, 12), "x86_64", None),
        (["cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64"], (3, 12), "x86_64", None),
        ([], (3, 12), "x86_64", None),
        (["odd"], (3, 12), "x86_64", None),
    ],
)
def test_tags(tags, python, machine, expected):
    assert dists.tag_mismatch(tags, python, machine) == expected


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("0.3.13", "0.3.13.post1"), ("0.3.13.post1", "0.3.14"), ("1.0rc1", "1.0"), ("1.0.dev3", "1.0a1"),
        ("1.9", "1.10"), ("0.3.0b2", "0.3.0"), ("0.3.10.post2", "0.3.13.post1"), ("1.0.post1.dev2", "1.0.post1"),
    ],
)  # fmt: skip
def test_order_of_versions(lower, higher):
    assert dists.version_key(lower) < dists.version_key(higher)


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.5.15.post1", "<0.5.16", True), ("0.5.16", "<0.5.16", False), ("1.5.1", ">=1.4.1", True),
        ("0.3.13.post1", ">=0.3.10.post2,<=0.3.13.post1", True), ("2.14.1", "==2.14.1", True),
        ("2.14.1+cu130", "==2.14.1", True), ("2.14.2", "==2.14.*", True), ("2.15", "==2.14.*", False),
        ("2.14", "~=2.13", True), ("3.0", "~=2.13", False), ("1.2.0", "", True), ("2.0", "!=2.0", False),
        ("1.0", "==1", True), ("garbage", ">1", None), ("1.0", "about 1", None), ("1.2.1+a", "==1.2.1+b", False),
    ],
)  # fmt: skip
def test_specifiers(version, specifier, expected):
    assert dists.version_in(version, specifier) is expected


def test_resolve_follows_pythons_order(venv, tmp_path):
    suffixes = [venv.suffix, ".abi3.so", ".so"]
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "pkg").mkdir(parents=True)
    (second / "pkg").mkdir(parents=True)
    assert dists.resolve("pkg", [str(first), str(second)], suffixes).kind == "namespace"
    (second / "pkg/__init__.py").write_text("")
    spec = dists.resolve("pkg", [str(first), str(second)], suffixes)
    assert (spec.kind, spec.entry) == ("package", str(second))
    (second / f"pkg/_C{venv.suffix}").write_bytes(b"")
    (second / "pkg/_C.py").write_text("")
    assert dists.resolve("pkg._C", [str(second)], suffixes).kind == "extension"
    (second / "pkg/other.cpython-37m-x86_64-linux-gnu.so").write_bytes(b"")
    other = dists.resolve("pkg.other", [str(second)], suffixes)
    assert other.kind == "absent" and other.foreign[0].endswith("other.cpython-37m-x86_64-linux-gnu.so")
    assert dists.resolve("pkg._C.deeper", [str(second)], suffixes).kind == "absent"
    assert dists.resolve("nothing.at.all", [str(second)], suffixes).kind == "absent"


def test_pth_files_and_editable_finders(venv, tmp_path):
    (tmp_path / "tree/deep_ep").mkdir(parents=True)
    (tmp_path / "tree/deep_ep/__init__.py").write_text("")
    venv.put("a.pth", f"# comment\nimport os; os.system('false')\n{tmp_path}/tree\n/does/not/exist\n")
    venv.put("__editable___x_1_0_finder.py",
             f"MAPPING: dict[str, str] = {{'mapped': '{tmp_path}/tree/deep_ep'}}\n")  # fmt: skip
    hooks = dists.path_hooks([str(venv.site)])
    assert hooks.paths == [str(tmp_path / "tree")]
    assert dists.resolve("mapped", [], [], hooks.mapping).kind == "package"
    assert dists.finder_mapping("MAPPING = {__import__('os').system('false'): 1}") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.14.1+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
         ("2.14.1+cu130", "13.0", None, 13)),
        ("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n", ("2.13.0+cpu", None, None, None)),
        ("__version__ = \"2.9.0+rocm6.4\"\ncuda = None\nhip = '6.4.43482'\n",
         ("2.9.0+rocm6.4", None, "6.4.43482", None)),
        ("", (None, None, None, None)),
    ],
)  # fmt: skip
def test_torch_version_file(text, expected):
    found = dists.parse_torch_version(text)
    assert (found["version"], found["cuda"], found["hip"], found["cuda_major"]) == expected


@pytest.mark.parametrize(
    ("version", "requires", "cuda"),
    [
        ("2.13.0+cu130", [], "13.0"), ("2.13.0+cpu", [], None), ("2.13.0+cu126", [], "12.6"),
        ("2.14.1", ["nvidia-cuda-runtime==13.0.96; platform_system == 'Linux'"], "13.0"),
        ("2.9.1", ["nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'"], "12.8"), ("2.9.1", [], None),
    ],
)  # fmt: skip
def test_torch_from_its_metadata(venv, version, requires, cuda):
    venv.dist("torch", version, {}, requires)
    assert dists.torch_version([str(venv.site)])["cuda"] == cuda


HOSTILE = st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode("latin-1"))


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_hostile_text_never_raises(text):
    dists.parse_metadata(text)
    dists.parse_metadata("Name: " + text + "\nRequires-Dist: " + text)
    dists.parse_record(text)
    dists.parse_record('a,"' + text)
    dists.parse_requirement(text)
    dists.parse_torch_version(text)
    dists.finder_mapping("MAPPING = {" + text + "}")
    dists.version_key(text)
    dists.version_in(text, text)
    dists.version_in("1.0", ">=" + text)
    dists.tag_mismatch([text], (3, 12), "x86_64")


@settings(max_examples=60, deadline=None)
@given(record=HOSTILE, metadata=HOSTILE, wheel=HOSTILE, url=HOSTILE)
def test_hostile_files_never_raise(tmp_path_factory, record, metadata, wheel, url):
    venv = FakeVenv(tmp_path_factory.mktemp("hostile") / "venv")
    info = venv.dist("x", "1", {"x.py": ""})
    for name, text in (("RECORD", record), ("METADATA", metadata), ("WHEEL", wheel), ("direct_url.json", url)):
        (info / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    dist = dists.scan([str(venv.site)])[0]
    dists.verify(dist, str(venv.path))
    dists.shared_paths([dist, dist])
    dists.tags(dist)
    assert isinstance(dists.direct_url(dist), dict)
