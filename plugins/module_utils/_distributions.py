# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what is installed in a venv, from the files that installers leave."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

_NAME = re.compile(r"[-_.]+")
_READ_LIMIT = 8 << 20
_HASH_BUDGET = 512 << 20
_HASH_FILE = 32 << 20


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return _NAME.sub("-", name).strip().lower()


def _text(path: str, limit: int = _READ_LIMIT) -> Optional[str]:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


@dataclass
class Metadata:
    """The headers of a METADATA or PKG-INFO file; ``requires`` are its Requires-Dist lines."""

    name: str = ""
    version: str = ""
    requires: list[str] = field(default_factory=list)


def parse_metadata(text: str) -> Metadata:
    """Name, version and requirements from METADATA; missing ones are empty. Never raises."""
    result = Metadata()
    for line in text.splitlines():
        if not line.strip():
            break
        key, separator, value = line.partition(":")
        if not separator or key[:1].isspace():
            continue
        key, value = key.strip().lower(), value.strip()
        if key == "name" and not result.name:
            result.name = value
        elif key == "version" and not result.version:
            result.version = value
        elif key == "requires-dist":
            result.requires.append(value)
    return result


_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")


def parse_requirement(text: str) -> Optional[tuple[str, str, str]]:
    """(canonical name, specifier, marker) of a Requires-Dist line, or None."""
    matched = _REQUIREMENT.match(text)
    if not matched:
        return None
    return canonical(matched.group(1)), matched.group(2).strip(), (matched.group(3) or "").strip()


_RELEASE = re.compile(
    r"^\s*v?(?:\d+!)?(\d+(?:\.\d+)*)(?:[-_.]?(a|b|c|rc|alpha|beta|pre|preview)[-_.]?(\d*))?"
    r"(?:[-_.]?(post|rev|r)[-_.]?(\d*)|-(\d+))?(?:[-_.]?(dev)[-_.]?(\d*))?(?:\+([a-z0-9._-]+))?\s*$",
    re.IGNORECASE,
)
_PRE = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}


def version_key(version: str) -> Optional[tuple[Any, ...]]:
    """A key that orders versions as installers do (the local part left out), or None for what is no version."""
    matched = _RELEASE.match(version or "")
    if not matched:
        return None
    release = [int(part[:18]) for part in matched.group(1).split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    pre_kind, pre_number = matched.group(2), matched.group(3)
    post = matched.group(4) or matched.group(6)
    dev = matched.group(7)
    if pre_kind:
        pre: tuple[int, int] = (_PRE[pre_kind.lower()], int((pre_number or "0")[:18]))
    elif dev and not post:
        pre = (-1, 0)
    else:
        pre = (3, 0)
    post_number = int((matched.group(5) or matched.group(6) or "0")[:18]) if post else -1
    dev_number = int((matched.group(8) or "0")[:18]) if dev else 1 << 60
    return tuple(release), pre, post_number, dev_number


def version_in(version: str, specifier: str) -> Optional[bool]:
    """Whether ``version`` satisfies ``">=1.4,<1.5"``; None where either cannot be read. ``""`` takes everything."""
    key = version_key(version)
    if key is None:
        return None
    for clause in [part.strip() for part in specifier.split(",") if part.strip()]:
        matched = re.match(r"^(===|==|!=|>=|<=|~=|>|<)\s*(\S+)$", clause)
        if not matched:
            return None
        operator, bound = matched.groups()
        if bound.endswith(".*") and operator in ("==", "!="):
            prefix = [int(part) for part in bound[:-2].split(".") if part.isdigit()]
            release = [*key[0], *[0] * len(prefix)]
            hit = release[: len(prefix)] == prefix
            if hit is not (operator == "=="):
                return False
            continue
        other = version_key(bound)
        if other is None:
            return None
        if operator in ("==", "==="):
            good = key == other and ("+" not in bound or bound.partition("+")[2] == version.partition("+")[2])
        elif operator == "~=":
            good = key >= other and key[0][: max(len(other[0]) - 1, 1)] == other[0][: max(len(other[0]) - 1, 1)]
        else:
            good = {"!=": key != other, ">=": key >= other, "<=": key <= other, ">": key > other, "<": key < other}[
                operator
            ]
        if not good:
            return False
    return True


@dataclass
class Distribution:
    """One installed distribution.

    ``kind``: ``wheel`` (dist-info), ``egg`` (a .egg folder), ``egg-info``, ``egg-link``; ``location`` is the folder
    that its modules are found in, ``path`` its metadata (a folder or file).
    """

    name: str
    version: str
    kind: str
    location: str
    path: str
    editable: bool = False

    def metadata(self) -> Metadata:
        """Its METADATA; empty where the file is missing."""
        for name in ("METADATA", "PKG-INFO", os.path.join("EGG-INFO", "PKG-INFO")):
            text = _text(os.path.join(self.path, name) if os.path.isdir(self.path) else self.path)
            if text:
                return parse_metadata(text)
        return Metadata()

    def file(self, name: str) -> Optional[str]:
        """The text of a file of its metadata folder, or None."""
        return _text(os.path.join(self.path, name)) if os.path.isdir(self.path) else None


def _split(stem: str) -> tuple[str, str]:
    parts = stem.split("-")
    if len(parts) >= 2:
        return parts[0], parts[1]
    return stem, ""


def scan(paths: Sequence[str], wanted: Optional[Iterable[str]] = None) -> list[Distribution]:
    """The distributions in the folders ``paths``, in that order; with ``wanted`` (canonical names) only those.

    Reads folder listings, and METADATA only of what is wanted.
    """
    names = None if wanted is None else set(wanted)
    found: list[Distribution] = []
    for folder in paths:
        try:
            entries = sorted(os.listdir(folder))
        except OSError:
            continue
        for entry in entries:
            stem, dot, ending = entry.rpartition(".")
            if not dot or ending not in ("dist-info", "egg-info", "egg", "egg-link") or entry.startswith("~"):
                continue
            name, version = _split(stem)
            if names is not None and canonical(name) not in names:
                continue
            path = os.path.join(folder, entry)
            location, editable = folder, False
            kind = {"dist-info": "wheel"}.get(ending, ending)
            if kind == "egg":
                location = path
            elif kind == "egg-link":
                lines = (_text(path) or "").split("\n")
                location, editable = lines[0].strip() or folder, True
            dist = Distribution(name, version, kind, location, path, editable)
            if kind == "wheel":
                url = direct_url(dist)
                dist.editable = bool(url.get("editable"))
            metadata = dist.metadata() if kind != "egg-link" else Metadata()
            dist.name = metadata.name or dist.name
            dist.version = metadata.version or dist.version
            found.append(dist)
    return found


def leftovers(paths: Sequence[str]) -> list[str]:
    """Folders that an interrupted pip left behind (``~ame``): what it had begun to remove."""
    found = []
    for folder in paths:
        try:
            found += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.startswith("~")]
        except OSError:
            continue
    return found


def direct_url(dist: Distribution) -> dict[str, Any]:
    """direct_url.json as ``{url, editable, commit}``; {} where there is none or it cannot be read."""
    text = dist.file("direct_url.json")
    if not text:
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    folder, vcs = data.get("dir_info"), data.get("vcs_info")
    return {
        "url": data.get("url") if isinstance(data.get("url"), str) else None,
        "editable": bool(isinstance(folder, dict) and folder.get("editable")),
        "commit": vcs.get("commit_id") if isinstance(vcs, dict) else None,
    }


@dataclass
class RecordRow:
    """One line of RECORD: ``path`` relative to the distribution's location, ``digest`` ``sha256=…`` or empty."""

    path: str
    digest: str
    size: Optional[int]


def parse_record(text: str) -> list[RecordRow]:
    """The rows of a RECORD file; lines that are none are left out. Never raises."""
    rows = []
    try:
        for row in csv.reader(line for line in text.replace("\0", "").splitlines()):
            if row and row[0]:
                digest = row[1] if len(row) > 1 else ""
                size = row[2] if len(row) > 2 else ""
                rows.append(RecordRow(row[0], digest, int(size) if size.isascii() and size[:18].isdigit() else None))
    except csv.Error:
        return rows
    return rows


def record(dist: Distribution) -> Optional[list[RecordRow]]:
    """The distribution's RECORD, or None where it has none (eggs, and broken installs)."""
    text = dist.file("RECORD")
    return None if text is None else parse_record(text)


def _digest(path: str, algorithm: str) -> Optional[str]:
    try:
        state = hashlib.new(algorithm)
    except ValueError:
        return None
    try:
        with open(path, "rb") as stream:
            while True:
                block = stream.read(1 << 20)
                if not block:
                    break
                state.update(block)
    except OSError:
        return None
    return base64.urlsafe_b64encode(state.digest()).decode().rstrip("=")


def _hashed(path: str) -> bool:
    return path.endswith(".py") or (path.endswith(".so") and ".libs/" not in path and "/lib" not in path)


def verify(dist: Distribution, prefix: str, hashes: bool = True, budget: int = _HASH_BUDGET) -> dict[str, Any]:
    """Compares the files of a distribution with its RECORD.

    Returns ``{ok: bool|null, missing: [path], changed: [path], files: n, hashed: bool}``; ``ok`` is null without a
    RECORD. Sizes are always compared; hashes up to ``budget`` bytes, of modules and extensions only: the bundled
    libraries of a wheel are hundreds of MB, and a swap of those shows in their names and sizes. Rows that point out
    of ``prefix`` (the venv) are not read.
    """
    rows = record(dist)
    result: dict[str, Any] = {"ok": None, "missing": [], "changed": [], "files": 0, "hashed": hashes}
    if rows is None:
        return result
    inside = os.path.realpath(prefix) + os.sep
    folders: dict[str, bool] = {}
    for row in rows:
        path = os.path.normpath(os.path.join(dist.location, row.path))
        if row.path.endswith((".pyc", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json")):
            continue
        folder = os.path.dirname(path)
        if folder not in folders:
            folders[folder] = (os.path.realpath(folder) + os.sep).startswith(inside)
        if not folders[folder]:
            continue
        result["files"] += 1
        try:
            size = os.stat(path).st_size
        except OSError:
            result["missing"].append(row.path)
            continue
        if row.size is not None and size != row.size:
            result["changed"].append(row.path)
        elif hashes and "=" in row.digest and _hashed(row.path) and size <= min(budget, _HASH_FILE):
            budget -= size
            algorithm, _equals, expected = row.digest.partition("=")
            actual = _digest(path, algorithm)
            if actual is not None and actual != expected.rstrip("="):
                result["changed"].append(row.path)
        elif hashes and size > min(budget, _HASH_FILE):
            result["hashed"] = False
    result["ok"] = not result["missing"] and not result["changed"]
    return result


def shared_paths(dists: Sequence[Distribution]) -> dict[str, list[str]]:
    """``{path: [names]}`` for the files that more than one of ``dists`` has in its RECORD (metadata left out)."""
    owners: dict[str, list[str]] = {}
    for dist in dists:
        for row in record(dist) or []:
            if ".dist-info/" not in row.path and not row.path.endswith(".pyc"):
                owners.setdefault(os.path.normpath(os.path.join(dist.location, row.path)), []).append(
                    canonical(dist.name)
                )
    return {path: names for path, names in owners.items() if len(set(names)) > 1}


def tags(dist: Distribution) -> list[str]:
    """The tags of its WHEEL file, ``["cp312-cp312-manylinux_2_28_x86_64"]``."""
    text = dist.file("WHEEL") or ""
    return [line.partition(":")[2].strip() for line in text.splitlines() if line.lower().startswith("tag:")]


def tag_mismatch(wheel_tags: Sequence[str], python: tuple[int, int], machine: str) -> Optional[str]:
    """``"python"`` or ``"machine"`` if no tag fits the interpreter, else None (also where there are no tags)."""
    if not wheel_tags or python == (0, 0):
        return None
    worst = "machine"
    for tag in wheel_tags:
        parts = tag.split("-")
        if len(parts) != 3:
            return None
        interpreters, abis, platforms = (part.split(".") for part in parts)
        fits_python = False
        for interpreter in interpreters:
            matched = re.match(r"^(cp|py)(\d)(\d*)$", interpreter)
            if not matched:
                continue
            asked = (int(matched.group(2)), int(matched.group(3) or 0))
            if interpreter.startswith("py") or "abi3" in abis or "none" in abis:
                fits_python = fits_python or (asked[0] == python[0] and asked[1] <= python[1])
            else:
                fits_python = fits_python or asked == python
        fits_machine = any(platform == "any" or platform.endswith("_" + machine) for platform in platforms)
        if fits_python and fits_machine:
            return None
        if not fits_python and fits_machine:
            worst = "python"
    return worst


@dataclass
class PathHooks:
    """What ``.pth`` files add: ``paths`` behind the site folder, ``mapping`` of editable finders, by top-level name."""

    paths: list[str] = field(default_factory=list)
    mapping: dict[str, str] = field(default_factory=dict)


def path_hooks(folders: Sequence[str]) -> PathHooks:
    """Reads the ``.pth`` files of the site folders, and the mappings of setuptools' editable finders."""
    result = PathHooks()
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.endswith(".pth") and not name.startswith("."):
                for line in (_text(os.path.join(folder, name), 1 << 20) or "").splitlines():
                    line = line.strip()
                    if not line or line.startswith(("#", "import ", "import\t")):
                        continue
                    path = os.path.normpath(os.path.join(folder, line))
                    if os.path.exists(path) and path not in result.paths and path not in folders:
                        result.paths.append(path)
            elif name.startswith("__editable__") and name.endswith("finder.py"):
                result.mapping.update(finder_mapping(_text(os.path.join(folder, name)) or ""))
    return result


def finder_mapping(text: str) -> dict[str, str]:
    """``MAPPING`` of a setuptools editable finder, ``{top-level name: path}``; {} where it cannot be read."""
    matched = re.search(r"^MAPPING\b[^=\n]*=\s*(\{[^\n]*\})\s*$", text, re.MULTILINE)
    if not matched:
        return {}
    try:
        value = ast.literal_eval(matched.group(1))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: path for key, path in value.items() if isinstance(key, str) and isinstance(path, str)}


@dataclass
class Spec:
    """Where an import would look.

    ``kind``: ``package``, ``module``, ``extension``, ``namespace`` or ``absent``; ``origin`` is the file (the folder
    of a namespace); ``entry`` the search path entry it was found under; ``foreign`` extension files with the right
    name that are for another Python or platform.
    """

    kind: str = "absent"
    origin: Optional[str] = None
    entry: Optional[str] = None
    foreign: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Optional[str]:
        if self.kind == "package":
            return os.path.dirname(self.origin or "")
        return self.origin if self.kind == "namespace" else None


def resolve(
    module: str, paths: Sequence[str], suffixes: Sequence[str], mapping: Optional[Mapping[str, str]] = None
) -> Spec:
    """Where ``module`` (dotted) would be imported from, as Python's path finder looks; nothing is executed."""
    head, _dot, rest = module.partition(".")
    spec = _resolve_top(head, paths, suffixes, mapping or {})
    while rest and spec.folder:
        head, _dot, rest = rest.partition(".")
        inner = _resolve_top(head, [spec.folder], suffixes, {})
        inner.entry = spec.entry
        spec = inner
    return Spec("absent") if rest and spec.kind != "absent" else spec


def _resolve_top(name: str, paths: Sequence[str], suffixes: Sequence[str], mapping: Mapping[str, str]) -> Spec:
    namespace: Optional[Spec] = None
    foreign: list[str] = []
    for entry in paths:
        folder = os.path.join(entry, name)
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            return Spec("package", os.path.join(folder, "__init__.py"), entry, foreign)
        for suffix in suffixes:
            if os.path.isfile(folder + suffix):
                return Spec("extension", folder + suffix, entry, foreign)
        if os.path.isfile(folder + ".py"):
            return Spec("module", folder + ".py", entry, foreign)
        try:
            names = os.listdir(entry)
        except OSError:
            continue
        foreign += [
            os.path.join(entry, other) for other in names if other.startswith(name + ".") and other.endswith(".so")
        ]
        if namespace is None and os.path.isdir(folder):
            namespace = Spec("namespace", folder, entry)
    if name in mapping:
        target = mapping[name]
        if os.path.isfile(os.path.join(target, "__init__.py")):
            return Spec("package", os.path.join(target, "__init__.py"), target, foreign)
        if os.path.isfile(target):
            return Spec("extension" if target.endswith(".so") else "module", target, os.path.dirname(target), foreign)
    if namespace is not None:
        namespace.foreign = foreign
        return namespace
    return Spec("absent", foreign=foreign)


def torch_version(paths: Sequence[str]) -> dict[str, Any]:
    """torch without importing it: ``{version, cuda, hip, cuda_major, path, source}``; all null when absent.

    torch/version.py first; else the local part of the distribution's version and its CUDA requirements.
    """
    nothing: dict[str, Any] = {"version": None, "cuda": None, "hip": None, "cuda_major": None, "path": None}
    for entry in paths:
        text = _text(os.path.join(entry, "torch", "version.py"), 65_536)
        if text is not None:
            values = parse_torch_version(text)
            return {**nothing, **values, "path": os.path.join(entry, "torch")}
    for dist in scan(paths, ["torch"]):
        cuda, hip = _cuda_of(dist)
        major = int(cuda.split(".")[0]) if cuda else None
        return {**nothing, "version": dist.version or None, "cuda": cuda, "hip": hip, "cuda_major": major,
                "path": os.path.join(dist.location, "torch")}  # fmt: skip
    return nothing


def _cuda_of(dist: Distribution) -> tuple[Optional[str], Optional[str]]:
    local = dist.version.partition("+")[2]
    matched = re.match(r"^cu(\d\d)(\d)$", local)
    if matched:
        return "{}.{}".format(*matched.groups()), None
    if local.startswith("rocm"):
        return None, local[4:]
    if local:
        return None, None
    for line in dist.metadata().requires:
        needed = parse_requirement(line)
        if needed is None:
            continue
        named = re.match(r"^nvidia-cuda-runtime-cu(\d+)$", needed[0])
        pinned = re.match(r"^nvidia-cuda-runtime$|^cuda-toolkit$", needed[0])
        exact = re.search(r"==\s*(\d+)\.(\d+)", needed[1])
        if named or pinned:
            if exact:
                return "{}.{}".format(*exact.groups()), None
            if named:
                return named.group(1) + ".0", None
    return None, None


def parse_torch_version(text: str) -> dict[str, Any]:
    """``{version, cuda, hip, cuda_major}`` from the text of torch/version.py."""
    found: dict[str, Optional[str]] = {}
    for key, value in re.findall(
        r"^(__version__|cuda|hip)\s*(?::[^=\n]*)?=\s*(None|'[^'\n]*'|\"[^\"\n]*\")", text, re.MULTILINE
    ):
        found[key] = None if value == "None" else value[1:-1]
    cuda = found.get("cuda")
    major = re.match(r"^(\d{1,4})", cuda or "")
    return {
        "version": found.get("__version__"), "cuda": cuda or None, "hip": found.get("hip"),
        "cuda_major": int(major.group(1)) if major else None,
    }  # fmt: skip
