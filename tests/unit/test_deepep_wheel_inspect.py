"""A wheel's inside: RUNPATHs, the builder's paths, architectures; with a shared object of the machine's linker."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import subprocess
import zipfile

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _elf
from ansible_collections.gpufleet.sglang.plugins.module_utils import _wheel_inspect as wi
from hypothesis import given
from hypothesis import strategies as st

SITE = "/opt/sglang/venv/lib/python3.12/site-packages"
NAME = "deep_ep-1.2.1-cp312-cp312-linux_x86_64.whl"


@pytest.fixture(scope="module")
def shared_object(tmp_path_factory):
    """A library that needs another one, has a RUNPATH into a venv, and names the venv in its data too."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("so")
    (folder / "a.c").write_text(
        f'const char *note = "-arch sm_90 -L {SITE}/nvidia/nvshmem/lib";\n'
        "int strlen_(void);\nint f(void) { return strlen_(); }\n"
    )
    (folder / "b.c").write_text("int strlen_(void) { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libb.so", "b.c"], cwd=folder, check=True)
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-o",
            "a.so",
            "a.c",
            "-L.",
            "-lb",
            "-Wl,--enable-new-dtags",
            f"-Wl,-rpath,{SITE}/nvidia/nvshmem/lib",
        ],
        cwd=folder,
        check=True,
    )
    return (folder / "a.so").read_bytes()


def make_wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        record = []
        for name, data in members.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(
            "deep_ep-1.2.1.dist-info/RECORD", "\n".join([*record, "deep_ep-1.2.1.dist-info/RECORD,,"]) + "\n"
        )


@pytest.mark.parametrize("runpath, member, new", [
    (f"{SITE}/nvidia/nvshmem/lib", "deep_ep_cpp.so", "$ORIGIN/nvidia/nvshmem/lib"),
    (f"{SITE}/nvidia/a/lib:{SITE}/nvidia/b/lib", "deep_ep/_C.so", "$ORIGIN/../nvidia/a/lib:$ORIGIN/../nvidia/b/lib"),
    (f"/opt/nccl/lib:{SITE}/nvidia/nccl/lib", "deep_ep/_C.so", "/opt/nccl/lib:$ORIGIN/../nvidia/nccl/lib"),
    (SITE, "x.so", "$ORIGIN"),
    (f"{SITE}-other/lib", "x.so", None),
    ("/usr/lib/x", "x.so", None),
    ("$ORIGIN/nvidia/nccl/lib", "x.so", None),
])  # fmt: skip
def test_runpaths_into_the_venv_become_relative_to_the_file(runpath, member, new):
    assert wi.relative_runpath(runpath, member, [SITE]) == new


def test_a_runpath_is_replaced_in_place_and_the_rest_stays(shared_object):
    patched = wi.set_runpath(shared_object, "$ORIGIN/nvidia/nvshmem/lib")
    assert patched is not None and len(patched) == len(shared_object)
    before, after = _elf.parse(shared_object), _elf.parse(patched)
    assert before.runpath == [f"{SITE}/nvidia/nvshmem/lib"]
    assert after.runpath == ["$ORIGIN/nvidia/nvshmem/lib"]
    assert (after.needed, after.undefined, after.soname) == (before.needed, before.undefined, before.soname)


def test_a_longer_runpath_is_not_forced_in(shared_object):
    assert wi.set_runpath(shared_object, "/x" * 200) is None


@given(st.binary(max_size=200))
def test_no_bytes_break_the_patcher(data):
    assert wi.set_runpath(data, "x") is None
    assert wi.set_runpath(b"\x7fELF\x02\x01" + data, "x") is None


def test_a_name_that_shares_the_bytes_is_left_alone(shared_object, monkeypatch):
    """Linkers store one name as the tail of another; overwriting the RUNPATH would rename a symbol."""
    view = wi._Dynamic.of(shared_object)
    assert view is not None and view.runpath_offset is not None
    assert wi.set_runpath(shared_object, "$ORIGIN") is not None
    view.other_offsets.append(view.runpath_offset + 5)
    monkeypatch.setattr(wi._Dynamic, "of", staticmethod(lambda data: view))
    assert wi.set_runpath(shared_object, "$ORIGIN") is None


def test_a_relocated_wheel_holds_no_path_of_the_builder_and_its_record_is_right(tmp_path, shared_object):
    (tmp_path / "in").mkdir()
    source, target = tmp_path / "in" / NAME, tmp_path / NAME
    make_wheel(source, {"deep_ep_cpp.so": shared_object, "deep_ep/__init__.py": b"import torch\n"})
    assert wi.inspect(str(source), [SITE])["private_paths"] == [{"member": "deep_ep_cpp.so", "path": SITE}]
    changes = wi.relocate(str(source), str(target), [SITE])
    assert changes == [
        {
            "member": "deep_ep_cpp.so",
            "old": f"{SITE}/nvidia/nvshmem/lib",
            "new": "$ORIGIN/nvidia/nvshmem/lib",
            "changed": True,
        }
    ]
    about = wi.inspect(str(target), [SITE, "/opt/sglang"])
    assert about["private_paths"] == []
    assert (about["name"], about["version"], about["tag"]) == ("deep-ep", "1.2.1", "cp312-cp312-linux_x86_64")
    with zipfile.ZipFile(target) as archive:
        rows = list(csv.reader(io.StringIO(archive.read("deep_ep-1.2.1.dist-info/RECORD").decode())))
        for name, digest, size in rows[:-1]:
            data = archive.read(name)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert int(size) == len(data)
    assert rows[-1] == ["deep_ep-1.2.1.dist-info/RECORD", "", ""]


def test_what_cannot_be_patched_is_not_scrubbed_either(tmp_path, shared_object, monkeypatch):
    (tmp_path / "in").mkdir()
    source, target = tmp_path / "in" / NAME, tmp_path / NAME
    make_wheel(source, {"deep_ep_cpp.so": shared_object})
    monkeypatch.setattr(wi, "set_runpath", lambda data, new: None)
    assert wi.relocate(str(source), str(target), [SITE])[0]["changed"] is False
    with zipfile.ZipFile(target) as archive:
        assert archive.read("deep_ep_cpp.so") == shared_object


@pytest.mark.parametrize("name, content", [("x.whl", b""), (NAME, b"no zip")])
def test_what_is_no_wheel_is_said_to_be_none(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError):
        wi.inspect(str(tmp_path / name))


def extension(**more):
    base = {
        "path": "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so", "problem": None, "machine": "x86_64",
        "needed": ["libcudart.so.13", "libnvshmem_host.so.3"], "runpath": [], "sm": [90], "ptx": [],
        "undefined_cuda": [],
    }  # fmt: skip
    return dict(base, **more)


@pytest.mark.parametrize("archs, more, codes", [
    (["9.0"], {}, []),
    (["9.0", "10.0"], {"sm": [90, 100]}, []),
    (["10.0"], {}, ["arch_missing"]),
    (["9.0"], {"sm": [75, 90]}, ["device_link_wrong_arch"]),
    (["9.0"], {"sm": []}, ["arch_missing"]),
    (["9.0"], {"sm": [], "ptx": [90]}, []),
    (["9.0a"], {}, []),
    (["9.0"], {"machine": "aarch64"}, ["wrong_machine"]),
    (["9.0"], {"needed": ["libcudart.so.12"]}, ["cuda_major_mismatch"]),
    (["9.0"], {"undefined_cuda": ["__cudaRegisterLinkedBinary_1"]}, ["device_link_missing"]),
    (["9.0"], {"problem": "too short"}, ["not_elf"]),
    (["9.0"], {"path": "other.so"}, ["extension_missing"]),
])  # fmt: skip
def test_the_verdict_on_a_wheel(archs, more, codes):
    about = {"tag": "cp312-cp312-linux_x86_64", "extensions": [extension(**more)]}
    found = wi.judge(about, archs, "x86_64", "13", ["deep_ep_cpp"], "cp312")
    assert [problem["code"] for problem in found] == codes
    assert all(problem["message"] and problem["mend"] for problem in found)


def test_a_wheel_for_another_python_is_told():
    about = {"tag": "cp311-cp311-linux_x86_64", "extensions": [extension()]}
    found = wi.judge(about, ["9.0"], "x86_64", "13", ["deep_ep_cpp"], "cp312")
    assert [problem["code"] for problem in found] == ["built_for_other_python"]
