# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: look into a built wheel, and take the builder's paths out of it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _elf

_NAME = re.compile(
    r"^(?P<name>[^-]+)-(?P<version>[^-]+)(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl$"
)


def inspect(path: str, private: Iterable[str] = ()) -> dict[str, Any]:
    """Say what a wheel holds.

    Returns ``{name, version, tag, sha256, size, requires: [str], modules: [top level names], extensions: [{path,
    machine, needed, runpath, sm: [90], ptx: [], undefined_cuda: [symbol]}], private_paths: [{member, path}]}``.
    ``private`` are folders whose name must not be found in any member. Raises ValueError for what is no wheel.
    """
    match = _NAME.match(os.path.basename(path))
    if not match:
        raise ValueError(f"{os.path.basename(path)} is no wheel's file name")
    about: dict[str, Any] = {
        "name": match["name"].replace("_", "-"),
        "version": match["version"],
        "tag": f"{match['python']}-{match['abi']}-{match['platform']}",
        "sha256": sha256(path),
        "size": os.path.getsize(path),
        "requires": [],
        "modules": [],
        "extensions": [],
        "private_paths": [],
    }
    wanted = [item.rstrip("/").encode() for item in private if len(item.rstrip("/")) > 4]
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                data = archive.read(info)
                for item in wanted:
                    if item in data:
                        about["private_paths"].append({"member": info.filename, "path": item.decode()})
                if info.filename.endswith(".dist-info/METADATA"):
                    about["requires"] = re.findall(r"^Requires-Dist:\s*(.+)$", data.decode("utf-8", "replace"), re.M)
                if ".so" in os.path.basename(info.filename) and data[:4] == b"\x7fELF":
                    about["extensions"].append(_extension(info.filename, data))
            about["modules"] = sorted(
                {
                    re.split(r"[./]", name)[0]
                    for name in archive.namelist()
                    if ".dist-info/" not in name and ".data/" not in name
                }
            )
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: {error}") from None
    return about


def _extension(name: str, data: bytes) -> dict[str, Any]:
    elf = _elf.parse(data, name)
    archs: Mapping[str, Iterable[int]] = {"sm": [], "ptx": []}
    if not elf.problem:
        with tempfile.NamedTemporaryFile(suffix=".so") as stream:
            stream.write(data)
            stream.flush()
            archs = _elf.gpu_archs([stream.name])
    return {
        "path": name,
        "problem": elf.problem,
        "machine": elf.machine,
        "needed": elf.needed,
        "runpath": elf.runpath or elf.rpath,
        "sm": sorted(archs["sm"]),
        "ptx": sorted(archs["ptx"]),
        "undefined_cuda": [symbol for symbol in elf.undefined if symbol.startswith("__cudaRegisterLinkedBinary")],
    }


def judge(
    about: Mapping[str, Any],
    archs: Sequence[str],
    machine: str,
    cuda_major: str,
    extensions: Sequence[str],
    python_tag: str,
) -> list[dict[str, str]]:
    """Return ``[{code, message, mend}]``: why this wheel is not what was wanted. Nothing is imported here."""
    problems: list[dict[str, str]] = []

    def add(code: str, message: str, mend: str) -> None:
        problems.append({"code": code, "message": message, "mend": mend})

    names = [item["path"] for item in about["extensions"]]
    for extension in extensions:
        stem = extension.replace(".", "/") + "."
        if not any(name.startswith(stem) for name in names):
            add("extension_missing", f"the wheel holds no {extension}", "read the log: the build left it out")
    if not about["tag"].startswith(python_tag) and "abi3" not in about["tag"]:
        add(
            "built_for_other_python",
            f"the wheel is for {about['tag']}, the venv is {python_tag}",
            "build with the venv's Python",
        )
    wanted = {int(arch.rstrip("af").replace(".", "")) for arch in archs}
    for item in about["extensions"]:
        if item["problem"]:
            add("not_elf", f"{item['path']}: {item['problem']}", "build again")
            continue
        if item["machine"] and item["machine"] != machine:
            add(
                "wrong_machine",
                f"{item['path']} is for {item['machine']}, the host is {machine}",
                "build on such a host",
            )
        if item["undefined_cuda"]:
            add(
                "device_link_missing",
                f"{item['path']} lacks its device link ({item['undefined_cuda'][0]})",
                "build again from clean",
            )
        runtimes = [need for need in item["needed"] if re.match(r"libcudart\.so\.\d+", need)]
        for need in runtimes:
            if need != f"libcudart.so.{cuda_major}":
                add(
                    "cuda_major_mismatch",
                    f"{item['path']} needs {need}, torch has CUDA {cuda_major}",
                    "use torch's toolkit",
                )
        if item["sm"] or item["ptx"]:
            lacking = sorted(wanted - set(item["sm"]) - set(item["ptx"]))
            extra = sorted(set(item["sm"]) - wanted)
            if lacking:
                add(
                    "arch_missing",
                    f"{item['path']} has no code for sm_{lacking[0]} (it has {item['sm']})",
                    "rebuild for it",
                )
            elif extra:
                add(
                    "device_link_wrong_arch",
                    f"{item['path']} holds sm_{extra[0]}, not asked for: its device link used another architecture",
                    "use a newer revision",
                )
        elif wanted:
            add("arch_missing", f"{item['path']} holds no GPU code at all", "read the log")
    return problems


def sha256(path: str) -> str:
    """Return the SHA-256 of a file in hex."""
    total = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()


def relative_runpath(runpath: str, member: str, site_packages: Sequence[str]) -> Optional[str]:
    """Return a RUNPATH that holds in every venv: folders of the builder's site-packages relative to the file itself.

    Folders of the system stay; None when there is nothing to change.
    """
    up = "/".join([".."] * member.count("/"))
    changed = []
    for folder in runpath.split(":"):
        for root in sorted((item.rstrip("/") for item in site_packages), key=len, reverse=True):
            if folder == root or folder.startswith(root + "/"):
                inside = folder[len(root) :].strip("/")
                changed.append("/".join(part for part in ("$ORIGIN", up, inside) if part))
                break
        else:
            changed.append(folder)
    new = ":".join(dict.fromkeys(changed))
    return new if new != runpath else None


def set_runpath(data: bytes, new: str) -> Optional[bytes]:
    """Return the ELF file with its RUNPATH replaced, or None where that cannot be done in place.

    The string is overwritten where it stands: the new one must not be longer, and no other name may share its bytes
    (linkers let one string be the tail of another).
    """
    view = _Dynamic.of(data)
    if view is None or view.runpath_offset is None:
        return None
    start = view.strtab + view.runpath_offset
    end = data.index(b"\0", start)
    encoded = new.encode()
    if len(encoded) > end - start:
        return None
    if any(start < view.strtab + offset <= end for offset in view.other_offsets):
        return None
    return data[:start] + encoded + b"\0" * (end - start - len(encoded)) + data[end:]


class _Dynamic:
    """The dynamic section of a 64-bit little-endian file: where names are, and who refers to them."""

    def __init__(self) -> None:
        self.strtab = 0
        self.runpath_offset: Optional[int] = None
        self.other_offsets: list[int] = []

    @classmethod
    def of(cls, data: bytes) -> Optional[_Dynamic]:
        if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
            return None
        try:
            return cls._read(data)
        except (struct.error, IndexError, ValueError):
            return None

    @classmethod
    def _read(cls, data: bytes) -> Optional[_Dynamic]:
        view = cls()
        section_offset = struct.unpack_from("<Q", data, 40)[0]
        size, count = struct.unpack_from("<HH", data, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + index * size) for index in range(count)]
        dynamic = next((item for item in sections if item[1] == 6), None)
        if dynamic is None:
            return None
        view.strtab = sections[dynamic[6]][4]
        for position in range(dynamic[4], dynamic[4] + dynamic[5], 16):
            tag, value = struct.unpack_from("<qQ", data, position)
            if tag == 0:
                break
            if tag in (15, 29):
                view.runpath_offset = value
            elif tag in (1, 14):
                view.other_offsets.append(value)
        for item in sections:
            if item[1] == 11 and sections[item[6]][4] == view.strtab:
                view.other_offsets.extend(
                    struct.unpack_from("<I", data, position)[0] for position in range(item[4], item[4] + item[5], 24)
                )
            elif item[1] == 0x6FFFFFFE:
                view.other_offsets.extend(_version_names(data, item[4], item[7]))
            elif item[1] == 0x6FFFFFFD:
                return None
        return view


def _version_names(data: bytes, offset: int, count: int) -> list[int]:
    names = []
    for _unused in range(count):
        _version, entries, file_name, first, following = struct.unpack_from("<HHIII", data, offset)
        names.append(file_name)
        position = offset + first
        for _entry in range(entries):
            _hash, _flags, _other, name, after = struct.unpack_from("<IHHII", data, position)
            names.append(name)
            position += after
        offset += following
    return names


def scrub(data: bytes, site_packages: Sequence[str]) -> bytes:
    """Overwrite the builder's site-packages, in place, where nvcc noted its link options in the GPU code's notes.

    nvlink's options (``-L <folder>``) are kept there for people; nothing reads them. The length stays, slashes fill it.
    """
    for root in sorted((item.rstrip("/").encode() for item in site_packages), key=len, reverse=True):
        if len(root) > len(b"site-packages"):
            data = data.replace(root, b"site-packages".ljust(len(root), b"/"))
    return data


def relocate(source: str, target: str, site_packages: Sequence[str]) -> list[dict[str, Any]]:
    """Copy a wheel without the builder's paths: RUNPATHs made relative, link notes overwritten, RECORD corrected.

    Returns ``[{member, old, new, changed: bool}]``, one for each extension with a RUNPATH into ``site_packages``.
    """
    changes: list[dict[str, Any]] = []
    hashes: dict[str, tuple[str, int]] = {}
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        record = None
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                record = (info, data)
                continue
            if data[:4] == b"\x7fELF":
                elf = _elf.parse(data, info.filename)
                before = ":".join(elf.runpath or elf.rpath)
                after = relative_runpath(before, info.filename, site_packages) if before else None
                patched = set_runpath(data, after) if after is not None else data
                if after is not None:
                    changes.append(
                        {"member": info.filename, "old": before, "new": after, "changed": patched is not None}
                    )
                if patched is not None:
                    patched = scrub(patched, site_packages)
                    if patched != data:
                        data = patched
                        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                        hashes[info.filename] = (f"sha256={digest}", len(data))
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
        if record is not None:
            lines = []
            for line in record[1].decode("utf-8").splitlines():
                member = line.rsplit(",", 2)[0].strip('"')
                lines.append(
                    ",".join((line.rsplit(",", 2)[0], *map(str, hashes[member]))) if member in hashes else line
                )
            new.writestr(record[0], "\n".join(lines) + "\n", zipfile.ZIP_DEFLATED)
    return changes
