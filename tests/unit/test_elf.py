# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ELF reader: made files, the host's own libraries, and files that want to break it."""

from __future__ import annotations

import ctypes.util
import os
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _elf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.make_so import So, make_so


def test_reads_what_the_file_says(tmp_path):
    path = make_so(
        tmp_path / "x.so", needed=["liba.so.1", "libb.so"], runpath="$ORIGIN/../lib:/opt/x", soname="x.so.2",
        undefined=["missing_one"], defined=["here"], sm=[90, 100], ptx=[80],
    )  # fmt: skip
    elf = _elf.read(str(path))
    assert (elf.problem, elf.bits, elf.machine, elf.soname) == (None, 64, "x86_64", "x.so.2")
    assert elf.needed == ["liba.so.1", "libb.so"]
    assert elf.runpath == ["$ORIGIN/../lib", "/opt/x"]
    assert elf.rpath == []
    assert elf.undefined == ["missing_one"]
    assert _elf.gpu_archs([str(path)]) == {"sm": [90, 100], "ptx": [80]}
    assert _elf.exported([str(path)], ["here", "missing_one", "nowhere"]) == {"here"}


def test_machine_and_damage(tmp_path):
    assert _elf.read(str(make_so(tmp_path / "a.so", machine="aarch64"))).machine == "aarch64"
    data = So(needed=["liba.so"]).build()
    for cut in (0, 3, 19, 63, 200, len(data) // 2):
        path = tmp_path / "cut.so"
        path.write_bytes(data[:cut])
        assert _elf.read(str(path)).problem, cut
    assert _elf.read(str(tmp_path / "absent")).problem
    assert _elf.read(str(tmp_path)).problem


def host_cache():
    path = Path("/etc/ld.so.cache")
    return _elf.parse_ld_cache(path.read_bytes()) if path.exists() else {}


def _libc():
    return host_cache().get("libc.so.6", [None])[0]


@pytest.mark.skipif(not _libc(), reason="no glibc cache")
def test_the_hosts_own_c_library():
    path = _libc()
    assert _elf.exported([path], ["malloc", "printf", "no_such_symbol_at_all"]) == {"malloc", "printf"}
    elf = _elf.read(path)
    assert "GLIBC_2.2.5" in elf.versions_defined or elf.machine != "x86_64"
    loaded = ctypes.CDLL(path)
    for name in ("qsort", "strtol", "getaddrinfo"):
        assert hasattr(loaded, name) and _elf.exported([path], [name]) == {name}


@pytest.mark.skipif(not _libc(), reason="no glibc cache")
def test_the_closure_of_a_real_extension_is_whole():
    import _ctypes

    cache = host_cache()
    machine = _elf.read(os.path.realpath(sys.executable)).machine
    closure = _elf.Loader(machine, cache).closure(_ctypes.__file__)
    assert closure.missing == {} and closure.wrong == {} and closure.versions == {}


def loader(tmp_path, **more):
    return _elf.Loader("x86_64", more.pop("cache", {}), root=str(tmp_path / "root"), **more)


def test_search_order_and_origin(tmp_path):
    user = make_so(tmp_path / "pkg/mod.so", needed=["libp.so", "libc2.so", "libgone.so"], runpath="$ORIGIN/../pkg.libs")
    own = make_so(tmp_path / "pkg.libs/libp.so", soname="libp.so")
    make_so(tmp_path / "env/libp.so", soname="libp.so")
    cached = make_so(tmp_path / "root/usr/lib/libc2.so")
    found = loader(tmp_path, cache={"libc2.so": ["/usr/lib/libc2.so"]}).closure(str(user))
    assert os.path.normpath(found.files["libp.so"]) == str(own)
    assert found.files["libc2.so"] == str(cached)
    assert found.missing == {"libgone.so": str(user)}
    # LD_LIBRARY_PATH comes before RUNPATH, and after RPATH.
    env = loader(tmp_path, library_path=[str(tmp_path / "env")])
    assert env.closure(str(user)).files["libp.so"] == str(tmp_path / "env/libp.so")
    with_rpath = make_so(tmp_path / "pkg/old.so", needed=["libp.so"], rpath="$ORIGIN/../pkg.libs")
    assert os.path.normpath(env.closure(str(with_rpath)).files["libp.so"]) == str(own)


def test_rpath_is_inherited_and_runpath_is_not(tmp_path):
    make_so(tmp_path / "libs/libone.so", needed=["libtwo.so"])
    make_so(tmp_path / "libs/libtwo.so")
    for tag, missing in (("rpath", {}), ("runpath", {"libtwo.so": str(tmp_path / "libs/libone.so")})):
        user = make_so(tmp_path / f"{tag}.so", needed=["libone.so"], **{tag: str(tmp_path / "libs")})
        assert loader(tmp_path).closure(str(user)).missing == missing


def test_a_library_for_another_machine_is_passed_over(tmp_path):
    user = make_so(tmp_path / "m.so", needed=["libx.so"])
    wrong = make_so(tmp_path / "a/libx.so", machine="aarch64")
    assert loader(tmp_path, library_path=[str(tmp_path / "a")]).closure(str(user)).wrong == {"libx.so": str(wrong)}
    right = make_so(tmp_path / "b/libx.so")
    both = loader(tmp_path, library_path=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert both.closure(str(user)).files == {"libx.so": str(right)}


def test_what_torch_has_loaded_satisfies_a_need_in_spite_of_the_runpath(tmp_path):
    user = make_so(tmp_path / "_C.so", needed=["libnccl.so.2"], runpath="/the/build/host")
    make_so(tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    assert loader(tmp_path).closure(str(user)).missing
    assert not loader(tmp_path, preloaded=[str(tmp_path / "nvidia/nccl/lib")]).closure(str(user)).missing


@pytest.mark.parametrize(
    ("sm", "ptx", "capabilities", "missing"),
    [
        ([90], [], ["9.0"], []), ([90], [], ["10.0"], ["10.0"]), ([80], [], ["8.6"], []), ([86], [], ["8.0"], ["8.0"]),
        ([], [80], ["12.0"], []), ([], [90], ["8.0"], ["8.0"]), ([90], [], ["9.0", "10.3"], ["10.3"]),
        ([90], [], ["[N/A]", ""], []),
    ],
)  # fmt: skip
def test_missing_archs(sm, ptx, capabilities, missing):
    assert _elf.missing_archs({"sm": sm, "ptx": ptx}, capabilities) == missing


def test_ldconfig_listing():
    text = (
        "2 libs found in cache\n\tlibnuma.so.1 (libc6,x86-64) => /lib/libnuma.so.1\n\tlibx.so (libc6) => /b/libx.so\n"
    )
    assert _elf.parse_ldconfig(text) == {"libnuma.so.1": ["/lib/libnuma.so.1"], "libx.so": ["/b/libx.so"]}


GOOD = So(needed=["liba.so"], runpath="/x", undefined=["u"], defined=["d"], sm=[90], pyinit="m").build()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_raise(data):
    for candidate in (data, b"\x7fELF" + data, b"\x7fELF\x02\x01\x01" + data, b"\x7fELF\x01\x02" + data):
        assert isinstance(_elf.parse(candidate), _elf.Elf)
        _elf.parse_ld_cache(b"glibc-ld.so.cache1.1" + candidate)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=12))
def test_a_good_file_with_flipped_bytes_never_raises(flips):
    data = bytearray(GOOD)
    for offset, value in flips:
        data[offset] = value
    assert isinstance(_elf.parse(bytes(data)), _elf.Elf)
    try:
        reader = _elf.Reader(bytes(data))
        reader.gpu_archs()
        reader.defines("d")
    except _elf.ElfError as error:
        assert str(error)
