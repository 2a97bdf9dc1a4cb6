# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes small ELF shared objects for tests, byte by byte: no compiler, no GPU, and loadable on x86_64.

With ``pyinit`` the result is a real, empty extension module that CPython imports. The undefined symbols are bound at
load time, so that the loader's own words are what the tests see.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

MACHINES = {"x86_64": 62, "aarch64": 183}
R_ABS64, R_GLOB_DAT, R_RELATIVE = 1, 6, 8


@dataclass
class So:
    """What to make. ``sm`` and ``ptx`` are GPU architectures (90) put into a .nv_fatbin section."""

    needed: Sequence[str] = ()
    rpath: Optional[str] = None
    runpath: Optional[str] = None
    soname: Optional[str] = None
    undefined: Sequence[str] = ()
    defined: Sequence[str] = ()
    pyinit: Optional[str] = None
    machine: str = "x86_64"
    sm: Sequence[int] = ()
    ptx: Sequence[int] = ()
    _names: bytearray = field(default_factory=lambda: bytearray(b"\0"))

    def _name(self, text: str) -> int:
        at = len(self._names)
        self._names += text.encode() + b"\0"
        return at

    def build(self) -> bytes:
        """The bytes of the file."""
        undefined = [*self.undefined, *(["PyModuleDef_Init"] if self.pyinit else [])]
        defined = [*self.defined, *([f"PyInit_{self.pyinit}"] if self.pyinit else [])]
        tags = [(1, self._name(name)) for name in self.needed]
        for tag, value in ((14, self.soname), (15, self.rpath), (29, self.runpath)):
            if value is not None:
                tags.append((tag, self._name(value)))
        names = [self._name(name) for name in (*undefined, *defined)]
        module_name = self._name(self.pyinit) if self.pyinit else 0
        count = 1 + len(names)

        fatbin = self._fatbin()
        strings = bytes(self._names)
        relocations = len(undefined) + (1 if self.pyinit else 0)
        at = 64 + 3 * 56
        place: dict[str, int] = {}
        for part, size in (
            ("str", len(strings)), ("sym", count * 24), ("hash", 4 * (3 + count)), ("rela", relocations * 24),
            ("got", 8 * max(len(undefined), 1)), ("def", 104), ("text", 32), ("fatbin", len(fatbin)),
            ("dyn", (len(tags) + 10) * 16),
        ):  # fmt: skip
            at = (at + 15) & ~15
            place[part] = at
            at += size
        end = at

        rela = [(place["got"] + 8 * i, (i + 1) << 32 | R_GLOB_DAT, 0) for i in range(len(undefined))]
        if self.pyinit:
            rela.append((place["def"] + 40, R_RELATIVE, place["str"] + module_name))
        tags += [
            (5, place["str"]), (6, place["sym"]), (10, len(strings)), (11, 24), (4, place["hash"]), (24, 0),
        ]  # fmt: skip
        if rela:
            tags += [(7, place["rela"]), (8, len(rela) * 24), (9, 24)]
        tags.append((0, 0))

        symbols = [struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)]
        symbols += [struct.pack("<IBBHQQ", name, 0x10, 0, 0, 0, 0) for name in names[: len(undefined)]]
        symbols += [struct.pack("<IBBHQQ", name, 0x12, 0, 1, place["text"], 16) for name in names[len(undefined) :]]
        # One bucket that chains every symbol, last to first.
        chain = [0] + [i - 1 for i in range(1, count)]
        hashes = struct.pack("<II", 1, count) + struct.pack("<I", count - 1) + struct.pack(f"<{count}I", *chain)

        text = b"\x31\xc0\xc3"
        if self.pyinit:
            slot = place["got"] + 8 * (len(undefined) - 1)
            text = b"\x48\x8d\x3d" + struct.pack("<i", place["def"] - (place["text"] + 7))
            text += b"\xff\x25" + struct.pack("<i", slot - (place["text"] + 13))

        section_names = b"\0.nv_fatbin\0.shstrtab\0"
        names_at = end
        headers_at = (end + len(section_names) + 7) & ~7
        out = bytearray(headers_at + 3 * 64)
        header = b"\x7fELF\x02\x01\x01" + bytes(9)
        header += struct.pack("<HHIQQQIHHHHHH", 3, MACHINES[self.machine], 1, 0, 64, headers_at, 0, 64, 56, 3, 64, 3, 2)
        dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in tags)
        segments = struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, end, end, 4096)
        segments += struct.pack("<IIQQQQQQ", 2, 6, *[place["dyn"]] * 3, len(dynamic), len(dynamic), 8)
        segments += struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)
        sections = bytes(64)
        sections += struct.pack("<IIQQQQIIQQ", 1, 1, 2, place["fatbin"], place["fatbin"], len(fatbin), 0, 0, 8, 0)
        sections += struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, names_at, len(section_names), 0, 0, 1, 0)
        for offset, data in (
            (0, header), (64, segments), (place["str"], strings), (place["sym"], b"".join(symbols)),
            (place["hash"], hashes), (place["rela"], b"".join(struct.pack("<QQq", *row) for row in rela)),
            (place["def"], struct.pack("<Q", 1)), (place["text"], text), (place["fatbin"], fatbin),
            (place["dyn"], dynamic), (names_at, section_names), (headers_at, sections),
        ):  # fmt: skip
            out[offset : offset + len(data)] = data
        return bytes(out)

    def _fatbin(self) -> bytes:
        entries = b""
        for kind, archs in ((2, self.sm), (1, self.ptx)):
            for arch in archs:
                entry = bytearray(64)
                struct.pack_into("<HHIQ", entry, 0, kind, 0x101, 64, 16)
                struct.pack_into("<I", entry, 28, arch)
                entries += bytes(entry) + bytes(16)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries if entries else b""


def make_so(path: str | Path, **what: object) -> Path:
    """Writes ``So(**what)`` to ``path``, making its folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(So(**what).build())  # type: ignore[arg-type]
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    for option in ("needed", "undefined", "defined"):
        parser.add_argument("--" + option, action="append", default=[])
    for option in ("rpath", "runpath", "soname", "pyinit"):
        parser.add_argument("--" + option)
    parser.add_argument("--machine", default="x86_64", choices=sorted(MACHINES))
    parser.add_argument("--sm", action="append", default=[], type=int)
    parser.add_argument("--ptx", action="append", default=[], type=int)
    values = vars(parser.parse_args())
    make_so(values.pop("out"), **values)


if __name__ == "__main__":
    main()
