# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what a shared object needs and defines, read from its bytes and never loaded."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

MACHINES = {3: "i386", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}

# Part of glibc itself: a host that runs Python has them, and newer glibc has merged them into libc.so.6.
GLIBC_SONAMES = frozenset(
    ["libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libresolv.so.2"]
)

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ = 1, 4, 5, 6, 10
_DT_SONAME, _DT_RPATH, _DT_RUNPATH = 14, 15, 29
_DT_GNU_HASH, _DT_VERNEED, _DT_VERNEEDNUM, _DT_VERDEF, _DT_VERDEFNUM = (
    0x6FFFFEF5, 0x6FFFFFFE, 0x6FFFFFFF, 0x6FFFFFFC, 0x6FFFFFFD,
)  # fmt: skip
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_MAX_SYMBOLS = 2_000_000
_MAX_ENTRIES = 65_536


class ElfError(ValueError):
    """The bytes are no ELF file that can be read; the text says why."""


@dataclass
class Elf:
    """One file. ``problem`` is set, and the rest empty, where it could not be read as ELF.

    ``undefined`` are the strong undefined symbols, ``versions_needed`` is ``{library: [version, ...]}``.
    """

    path: str
    problem: Optional[str] = None
    bits: int = 0
    machine: str = ""
    soname: Optional[str] = None
    needed: list[str] = field(default_factory=list)
    rpath: list[str] = field(default_factory=list)
    runpath: list[str] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)
    versions_needed: dict[str, list[str]] = field(default_factory=dict)
    versions_defined: list[str] = field(default_factory=list)


class Reader:
    """Reads one ELF file held in ``data`` (bytes or mmap). Raises :class:`ElfError`, and nothing else."""

    def __init__(self, data: Any) -> None:
        self.data = data
        if len(data) < 20 or data[:4] != b"\x7fELF":
            raise ElfError("not an ELF file")
        self.bits = {1: 32, 2: 64}.get(data[4], 0)
        if not self.bits or data[5] not in (1, 2):
            raise ElfError("unknown ELF class or byte order")
        self.order = "<" if data[5] == 1 else ">"
        (machine,) = self._unpack("H", 18)
        self.machine = MACHINES.get(machine, f"machine {machine}")
        self._symtab_entry = 24 if self.bits == 64 else 16
        self._segments()
        self._dynamic()

    def _unpack(self, layout: str, offset: int) -> tuple[Any, ...]:
        try:
            return struct.unpack_from(self.order + layout, self.data, offset)
        except (struct.error, ValueError, OverflowError, IndexError):
            raise ElfError("the file is cut short") from None

    def _segments(self) -> None:
        if self.bits == 64:
            phoff, self._shoff = self._unpack("QQ", 0x20)
            phentsize, phnum, self._shentsize, self._shnum, self._shstrndx = self._unpack("HHHHH", 0x36)
            layout = "IIQQQQQQ"
        else:
            phoff, self._shoff = self._unpack("II", 0x1C)
            phentsize, phnum, self._shentsize, self._shnum, self._shstrndx = self._unpack("HHHHH", 0x2A)
            layout = "IIIIIIII"
        self._loads: list[tuple[int, int, int]] = []
        self._dynamic_at: Optional[tuple[int, int]] = None
        for index in range(phnum):
            entry = self._unpack(layout, phoff + index * phentsize)
            if self.bits == 64:
                kind, _flags, offset, address, _physical, size = entry[:6]
            else:
                kind, offset, address, _physical, size = entry[:5]
            if kind == _PT_LOAD:
                self._loads.append((address, offset, size))
            elif kind == _PT_DYNAMIC:
                self._dynamic_at = (offset, size)

    def _offset(self, address: int) -> int:
        for start, offset, size in self._loads:
            if start <= address < start + size:
                return address - start + offset
        return address

    def _dynamic(self) -> None:
        self._tags: dict[int, int] = {}
        self._needed_at: list[int] = []
        self._path_at: list[tuple[int, int]] = []
        if self._dynamic_at is None:
            return
        offset, size = self._dynamic_at
        step, layout = (16, "qQ") if self.bits == 64 else (8, "iI")
        for index in range(min(size // step, _MAX_ENTRIES)):
            tag, value = self._unpack(layout, offset + index * step)
            if tag == 0:
                break
            if tag == _DT_NEEDED:
                self._needed_at.append(value)
            elif tag in (_DT_RPATH, _DT_RUNPATH):
                self._path_at.append((tag, value))
            else:
                self._tags[tag & 0xFFFFFFFF] = value
        self._strtab = self._offset(self._tags.get(_DT_STRTAB, 0))
        self._strsize = self._tags.get(_DT_STRSZ, 0)

    def _string(self, offset: int) -> str:
        if not 0 <= offset < max(self._strsize, 1):
            raise ElfError("a name lies outside the string table")
        start = self._strtab + offset
        end = self.data.find(b"\0", start, min(start + 65_536, self._strtab + self._strsize + 1))
        if end < 0:
            raise ElfError("a name has no end")
        return bytes(self.data[start:end]).decode("utf-8", "replace")

    def needed(self) -> list[str]:
        return [self._string(offset) for offset in self._needed_at]

    def paths(self, tag: int) -> list[str]:
        return [
            part for kind, offset in self._path_at if kind == tag for part in self._string(offset).split(":") if part
        ]

    def soname(self) -> Optional[str]:
        return self._string(self._tags[_DT_SONAME]) if _DT_SONAME in self._tags else None

    def _symbol_count(self) -> int:
        if _DT_HASH in self._tags:
            return min(self._unpack("II", self._offset(self._tags[_DT_HASH]))[1], _MAX_SYMBOLS)
        symtab, strtab = self._tags.get(_DT_SYMTAB, 0), self._tags.get(_DT_STRTAB, 0)
        gnu = self._gnu_hash_count()
        # Linkers put the string table behind the symbols: the distance bounds the count when no hash table does.
        by_distance = (strtab - symtab) // self._symtab_entry if strtab > symtab else 0
        return min(gnu or by_distance, _MAX_SYMBOLS)

    def _gnu_table(self) -> Optional[tuple[int, int, int, int, int, int]]:
        if _DT_GNU_HASH not in self._tags:
            return None
        base = self._offset(self._tags[_DT_GNU_HASH])
        buckets, first, bloom, shift = self._unpack("IIII", base)
        if not buckets or not bloom:
            return None
        return base, buckets, first, bloom, shift, base + 16 + bloom * (self.bits // 8)

    def _gnu_hash_count(self) -> int:
        table = self._gnu_table()
        if table is None:
            return 0
        _base, buckets, first, _bloom, _shift, bucket_at = table
        if buckets > _MAX_SYMBOLS:
            raise ElfError("the hash table is not credible")
        last = max(self._unpack(f"{buckets}I", bucket_at))
        if last < first:
            return first
        chain_at = bucket_at + buckets * 4
        while not self._unpack("I", chain_at + (last - first) * 4)[0] & 1:
            last += 1
            if last > _MAX_SYMBOLS:
                raise ElfError("the hash table has no end")
        return last + 1

    def _symbol(self, index: int) -> tuple[int, int, int]:
        """(name offset, binding, section index) of one dynamic symbol."""
        at = self._offset(self._tags[_DT_SYMTAB]) + index * self._symtab_entry
        if self.bits == 64:
            name, info, _other, section = self._unpack("IBBH", at)
        else:
            name, _value, _size, info, _other, section = self._unpack("IIIBBH", at)
        return name, info >> 4, section

    def undefined(self) -> list[str]:
        """Names of the strong undefined symbols, as the dynamic symbol table has them."""
        if _DT_SYMTAB not in self._tags:
            return []
        names = []
        count = self._symbol_count()
        start = self._offset(self._tags[_DT_SYMTAB])
        step = self._symtab_entry
        block = bytes(self.data[start : start + count * step])
        layout = self.order + ("IBBHQQ" if self.bits == 64 else "IIIBBH")
        for entry in struct.iter_unpack(layout, block[: len(block) // step * step]):
            name, info, section = (entry[0], entry[1], entry[3]) if self.bits == 64 else (entry[0], entry[3], entry[5])
            if section == 0 and name and info >> 4 == 1:
                names.append(self._string(name))
        return names

    def defines(self, symbol: str) -> bool:
        """Whether the file exports ``symbol``: one hash look-up, so that libtorch's 500 000 names cost nothing."""
        if _DT_SYMTAB not in self._tags:
            return False
        raw = symbol.encode("utf-8")
        table = self._gnu_table()
        if table is None:
            return self._defines_sysv(symbol, raw)
        base, buckets, first, bloom, shift, bucket_at = table
        value = 5381
        for byte in raw:
            value = (value * 33 + byte) & 0xFFFFFFFF
        word = self.bits
        (bits,) = self._unpack("Q" if word == 64 else "I", base + 16 + (value // word) % bloom * (word // 8))
        if not (bits >> (value % word)) & (bits >> ((value >> shift) % word)) & 1:
            return False
        (index,) = self._unpack("I", bucket_at + value % buckets * 4)
        if index < first:
            return False
        chain_at = bucket_at + buckets * 4
        for _step in range(_MAX_ENTRIES):
            (chain,) = self._unpack("I", chain_at + (index - first) * 4)
            if chain | 1 == value | 1 and self._is_defined(index, symbol):
                return True
            if chain & 1:
                return False
            index += 1
        return False

    def _defines_sysv(self, symbol: str, raw: bytes) -> bool:
        if _DT_HASH not in self._tags:
            return False
        base = self._offset(self._tags[_DT_HASH])
        buckets, chains = self._unpack("II", base)
        if not buckets:
            return False
        value = 0
        for byte in raw:
            value = (value << 4) + byte
            high = value & 0xF0000000
            value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
        (index,) = self._unpack("I", base + 8 + value % buckets * 4)
        for _step in range(min(chains, _MAX_ENTRIES)):
            if not index:
                return False
            if self._is_defined(index, symbol):
                return True
            (index,) = self._unpack("I", base + 8 + (buckets + index) * 4)
        return False

    def _is_defined(self, index: int, symbol: str) -> bool:
        name, _binding, section = self._symbol(index)
        return bool(section) and self._string(name) == symbol

    def versions_needed(self) -> dict[str, list[str]]:
        result: dict[str, list[str]] = {}
        if _DT_VERNEED not in self._tags:
            return result
        at = self._offset(self._tags[_DT_VERNEED])
        for _file in range(min(self._tags.get(_DT_VERNEEDNUM, 0), _MAX_ENTRIES)):
            _version, count, library, first, following = self._unpack("HHIII", at)
            names = result.setdefault(self._string(library), [])
            entry = at + first
            for _entry in range(min(count, 4096)):
                _hash, flags, _other, name, step = self._unpack("IHHII", entry)
                if not flags & 2:  # a weak version reference does not stop the loader
                    names.append(self._string(name))
                if not step:
                    break
                entry += step
            if not following:
                break
            at += following
        return result

    def versions_defined(self) -> list[str]:
        names: list[str] = []
        if _DT_VERDEF not in self._tags:
            return names
        at = self._offset(self._tags[_DT_VERDEF])
        for _entry in range(min(self._tags.get(_DT_VERDEFNUM, 0), _MAX_ENTRIES)):
            _version, _flags, _index, _count, _hash, first, following = self._unpack("HHHHIII", at)
            names.append(self._string(self._unpack("I", at + first)[0]))
            if not following:
                break
            at += following
        return names

    def section(self, wanted: str) -> Optional[tuple[int, int]]:
        """(offset, size) of a section, or None."""
        if not self._shoff or not self._shnum:
            return None
        layout = "IIQQQQ" if self.bits == 64 else "IIIIII"

        def header(index: int) -> tuple[Any, ...]:
            return self._unpack(layout, self._shoff + index * self._shentsize)

        names_at = header(self._shstrndx)[4]
        raw = wanted.encode() + b"\0"
        for index in range(self._shnum):
            name, _kind, _flags, _address, offset, size = header(index)
            if bytes(self.data[names_at + name : names_at + name + len(raw)]) == raw:
                return offset, size
        return None

    def gpu_archs(self) -> dict[str, list[int]]:
        """``{"sm": [90, 100], "ptx": [90]}``: the GPU code embedded in the file; empty lists when there is none."""
        found: dict[str, set[int]] = {"sm": set(), "ptx": set()}
        place = self.section(".nv_fatbin")
        if place is not None:
            start, size = place
            end = min(start + size, len(self.data))
            at = start
            while True:
                at = self.data.find(_FATBIN_MAGIC, at, end)
                if at < 0:
                    break
                at = max(self._one_fatbin(at, end, found), at + 4)
        return {kind: sorted(archs) for kind, archs in found.items()}

    def _one_fatbin(self, at: int, end: int, found: dict[str, set[int]]) -> int:
        if at + 16 > end:
            return end
        header, size = self._unpack("HQ", at + 6)
        entry, last = at + header, min(at + header + size, end)
        while entry + 64 <= last:
            kind, _version, entry_header, entry_size = self._unpack("HHIQ", entry)
            if kind in (1, 2):
                found["ptx" if kind == 1 else "sm"].add(self._unpack("I", entry + 28)[0])
            if entry_header + entry_size == 0:
                break
            entry += entry_header + entry_size
        return last


def parse(data: Any, path: str = "", symbols: bool = True) -> Elf:
    """The :class:`Elf` of ``data``, undefined symbols only with ``symbols``; what is wrong stands in ``problem``."""
    try:
        reader = Reader(data)
        elf = Elf(path, bits=reader.bits, machine=reader.machine)
        elf.needed = reader.needed()
        elf.rpath, elf.runpath = reader.paths(_DT_RPATH), reader.paths(_DT_RUNPATH)
        elf.soname = reader.soname()
        elf.undefined = reader.undefined() if symbols else []
        elf.versions_needed = reader.versions_needed()
        elf.versions_defined = reader.versions_defined()
        return elf
    except ElfError as error:
        return Elf(path, problem=str(error))


class _Open:
    """A file mapped read-only; an empty or unreadable one raises ElfError."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, "rb") as stream:
                self.map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ElfError(str(error)) from None

    def __enter__(self) -> Any:
        return self.map

    def __exit__(self, *_error: object) -> None:
        self.map.close()


def read(path: str, symbols: bool = True) -> Elf:
    """:func:`parse` of a file; never raises."""
    try:
        with _Open(path) as data:
            return parse(data, path, symbols)
    except ElfError as error:
        return Elf(path, problem=str(error))


def gpu_archs(paths: Iterable[str]) -> dict[str, list[int]]:
    """The GPU code embedded in any of ``paths``: ``{"sm": [...], "ptx": [...]}``; unreadable files add nothing."""
    found: dict[str, set[int]] = {"sm": set(), "ptx": set()}
    for path in paths:
        try:
            with _Open(path) as data:
                for kind, archs in Reader(data).gpu_archs().items():
                    found[kind].update(archs)
        except ElfError:
            continue
    return {kind: sorted(archs) for kind, archs in found.items()}


def missing_archs(archs: Mapping[str, Sequence[int]], capabilities: Iterable[str]) -> list[str]:
    """Those compute capabilities (``"9.0"``) for which ``archs`` has neither a usable cubin nor PTX to compile.

    A cubin runs on its own major and the same or a newer minor; PTX compiles for everything newer.
    """
    lacking = []
    for capability in sorted(set(capabilities)):
        major, _dot, minor = capability.partition(".")
        if not major.isdigit() or not minor.isdigit():
            continue
        number = int(major) * 10 + int(minor)
        cubin = any(arch // 10 == int(major) and arch <= number for arch in archs.get("sm", ()))
        if not cubin and not any(arch <= number for arch in archs.get("ptx", ())):
            lacking.append(capability)
    return lacking


def exported(paths: Iterable[str], symbols: Iterable[str]) -> set[str]:
    """Those of ``symbols`` that at least one of the files defines."""
    left = set(symbols)
    found: set[str] = set()
    for path in paths:
        if not left:
            break
        try:
            with _Open(path) as data:
                reader = Reader(data)
                here = {symbol for symbol in left if reader.defines(symbol)}
        except ElfError:
            continue
        found |= here
        left -= here
    return found


def parse_ld_cache(data: bytes) -> dict[str, list[str]]:
    """``/etc/ld.so.cache`` → ``{soname: [path, ...]}`` in the loader's order; {} where the format is unknown."""
    start = data.find(b"glibc-ld.so.cache1.1")
    result: dict[str, list[str]] = {}
    if start < 0:
        return result
    try:
        count, _strings = struct.unpack_from("<II", data, start + 20)
        for index in range(min(count, _MAX_ENTRIES)):
            _flags, key, value = struct.unpack_from("<iII", data, start + 48 + index * 24)
            texts = []
            for offset in (start + key, start + value):
                end = data.find(b"\0", offset, offset + 4096)
                texts.append(data[offset : max(end, offset)].decode("utf-8", "replace"))
            if texts[0] and texts[1]:
                result.setdefault(texts[0], []).append(texts[1])
    except struct.error:
        return result
    return result


def parse_ldconfig(text: str) -> dict[str, list[str]]:
    """Output of ``ldconfig -p`` → ``{soname: [path, ...]}``."""
    result: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and path.startswith("/"):
            result.setdefault(name.split(" ", 1)[0], []).append(path)
    return result


@dataclass
class Closure:
    """The libraries that loading one file would pull in.

    ``files``: ``{soname: path}`` of what was found, ``missing``: ``{soname: path of the file that needs it}``,
    ``wrong``: ``{soname: path}`` found only for another machine, ``versions``: unmet ``{version: library path}``.
    """

    files: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Loader:
    """Finds libraries as the dynamic loader would: RPATH, LD_LIBRARY_PATH, RUNPATH, cache, default folders.

    ``preloaded`` are folders whose libraries are in the process already (torch/lib, nvidia/*/lib): a library with the
    wanted name there satisfies a need, whatever the RUNPATH says.
    """

    def __init__(
        self,
        machine: str,
        cache: Mapping[str, Sequence[str]],
        library_path: Sequence[str] = (),
        preloaded: Sequence[str] = (),
        root: str = "/",
    ) -> None:
        self.machine = machine
        self.cache = cache
        self.library_path = [path for path in library_path if path]
        self.preloaded = list(preloaded)
        self.root = root
        triplet = machine + "-linux-gnu"
        self.defaults = [
            "/lib64", "/usr/lib64", "/lib/" + triplet, "/usr/lib/" + triplet, "/lib", "/usr/lib",
        ]  # fmt: skip
        self._read: dict[str, Elf] = {}

    def searched(self) -> list[str]:
        """The folders that were searched, in order, for the report."""
        return [*self.library_path, *self.preloaded, "ld.so.cache", *self.defaults]

    def elf(self, path: str) -> Elf:
        """One file without its symbols, read once."""
        if path not in self._read:
            self._read[path] = read(path, symbols=False)
        return self._read[path]

    def _host(self, path: str) -> str:
        return path if self.root in ("", "/") else os.path.join(self.root, path.lstrip("/"))

    def find(self, soname: str, user: Elf, inherited: Sequence[str] = ()) -> tuple[Optional[str], Optional[str]]:
        """(path, path of one for another machine) of ``soname`` as needed by ``user``."""
        folder = os.path.dirname(os.path.abspath(user.path))

        def expand(entries: Sequence[str]) -> list[str]:
            return [
                entry.replace("${ORIGIN}", folder).replace("$ORIGIN", folder).replace("$LIB", "lib64")
                for entry in entries
            ]

        if "/" in soname:
            candidates = [soname]
        else:
            rpath = [] if user.runpath else [*expand(user.rpath), *inherited]
            folders = [*rpath, *self.library_path, *expand(user.runpath), *self.preloaded]
            candidates = [os.path.join(entry, soname) for entry in folders]
            candidates += [self._host(path) for path in self.cache.get(soname, ())]
            candidates += [os.path.join(self._host(entry), soname) for entry in self.defaults]
        other = None
        for candidate in candidates:
            if not os.path.isfile(candidate):
                continue
            elf = self.elf(candidate)
            if elf.problem or elf.machine == self.machine:
                return candidate, None
            other = other or candidate
        return None, other

    def closure(self, path: str, limit: int = 400) -> Closure:
        """What loading ``path`` needs, breadth first; at most ``limit`` files are read."""
        result = Closure()
        queue: list[tuple[str, tuple[str, ...]]] = [(path, ())]
        seen: set[str] = set()
        while queue and len(seen) < limit:
            current, inherited = queue.pop(0)
            if current in seen:
                continue
            seen.add(current)
            elf = self.elf(current)
            if elf.problem:
                continue
            folder = os.path.dirname(os.path.abspath(current))
            own = tuple(e.replace("${ORIGIN}", folder).replace("$ORIGIN", folder) for e in elf.rpath)
            chain = () if elf.runpath else (*own, *inherited)
            for soname in elf.needed:
                if soname in result.files or soname in result.missing or soname in result.wrong:
                    continue
                if soname in GLIBC_SONAMES or soname.startswith("ld-linux"):
                    continue
                found, other = self.find(soname, elf, inherited)
                if found:
                    result.files[soname] = found
                    queue.append((found, chain))
                elif other:
                    result.wrong[soname] = other
                else:
                    result.missing[soname] = current
            for library, versions in elf.versions_needed.items():
                provider = result.files.get(library)
                if provider is None:
                    continue
                offered = self.elf(provider).versions_defined
                for version in versions:
                    if offered and version not in offered:
                        result.versions[version] = provider
        return result
