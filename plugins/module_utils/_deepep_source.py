# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: say from a DeepEP source tree what it is and what its build needs."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

# What upstream's own files say about the revisions that SGLang has used. Read 2026-11-30; the tree decides, this table
# only serves where no tree is at hand yet (check mode before a first fetch) and as the default.
KNOWN_REVISIONS: dict[str, dict[str, str]] = {
    "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee": {
        "generation": "v1",
        "source": "tag v1.2.1 of deepseek-ai/DeepEP; docker image of SGLang 0.5.5",
    },
    "567632dd59810d77b3cc05553df953cc0f779799": {
        "generation": "v1",
        "source": "last commit of DeepEP before 2.0; accepts NVSHMEM 3.5",
    },
    "dd758caf451848bd150e1046af3d0a73e5fff38d": {
        "generation": "v2",
        "source": "main of deepseek-ai/DeepEP on 2026-11-30, __version__ 2.1.0",
    },
    "94a9f8f6b146c07d97ec58f67cd6d303296d6098": {"generation": "hybrid", "source": "branch hybrid-ep on 2026-11-30"},
    "d28bd676c2120573c9f1425f0c16c39faa4117e6": {
        "generation": "hybrid",
        "source": "branch hybrid-ep as SGLang's Blackwell CI pins it",
    },
}

# (first SGLang version, revision, why). 0.5.19 is the first release that was seen to depend on a DeepEP wheel
# (sglang#33932), and that wheel is DeepEP 2; what came before was built from v1.
PINS: tuple[tuple[tuple[int, int, int], str, str], ...] = (
    ((0, 5, 19), "dd758caf451848bd150e1046af3d0a73e5fff38d", "SGLang's own wheel is built from DeepEP 2.1.0"),
    ((0, 0, 0), "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee", "SGLang's images up to then pin DeepEP v1.2.1"),
)

DEFAULT_ARCHS = {"v1": "9.0", "v2": "9.0", "hybrid": "10.0"}
EXTENSIONS = {"v1": ("deep_ep_cpp",), "v2": ("deep_ep._C",), "hybrid": ("deep_ep_cpp", "hybrid_ep_cpp")}


class Tree(Protocol):
    """A source tree: the names of its files, relative with ``/``, and the text of one (None where there is none)."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> str | None: ...


class FolderTree:
    """A tree on disk. ``.git`` and ``build`` folders are not part of it."""

    skipped = frozenset({".git", "build", "dist", "__pycache__"})

    def __init__(self, root: str) -> None:
        self.root = root

    def names(self) -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if name not in self.skipped and not name.endswith(".egg-info"))
            for name in sorted(files):
                if not name.endswith((".pyc", ".so")):
                    found.append(os.path.relpath(os.path.join(folder, name), self.root).replace(os.sep, "/"))
        return found

    def read(self, name: str) -> str | None:
        try:
            with open(os.path.join(self.root, name), encoding="utf-8", errors="replace") as stream:
                return stream.read(1 << 20)
        except OSError:
            return None

    def digest(self) -> str:
        """Return the SHA-256 over names, executable bits and contents: equal trees give equal digests on every host."""
        total = hashlib.sha256()
        for name in self.names():
            path = os.path.join(self.root, name)
            if os.path.islink(path):
                total.update((f"l {name} {os.readlink(path)}\n").encode("utf-8", "surrogateescape"))
                continue
            content = hashlib.sha256()
            with open(path, "rb") as stream:
                for block in iter(lambda: stream.read(1 << 20), b""):
                    content.update(block)
            executable = "x" if os.access(path, os.X_OK) else "-"
            total.update((f"{executable} {name} {content.hexdigest()}\n").encode("utf-8", "surrogateescape"))
        return total.hexdigest()


class TarTree:
    """The tree inside an archive; a single top folder is left out of the names."""

    def __init__(self, path: str) -> None:
        self.members: dict[str, str] = {}
        self.path = path
        with tarfile.open(path) as archive:
            names = [member.name for member in archive.getmembers() if member.isfile()]
        names = [re.sub(r"^(\./)+", "", name) for name in names]
        tops = {name.split("/", 1)[0] for name in names}
        cut = len(tops) == 1 and all("/" in name for name in names)
        for name in names:
            self.members[name.split("/", 1)[1] if cut else name] = name
        self.top = tops.pop() if cut else ""

    def names(self) -> list[str]:
        return sorted(self.members)

    def read(self, name: str) -> str | None:
        inside = self.members.get(name)
        if inside is None:
            return None
        with tarfile.open(self.path) as archive:
            for member in archive.getmembers():
                if re.sub(r"^(\./)+", "", member.name) == inside:
                    stream = archive.extractfile(member)
                    return stream.read(1 << 20).decode("utf-8", "replace") if stream else None
        return None


def pinned_revision(sglang_version: str | None) -> tuple[str, str]:
    """Return ``(revision, why)`` for an SGLang version; without one, the revision for the oldest."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", sglang_version or "0")[:3])
    padded = ((*numbers, 0, 0, 0))[:3]
    for first, revision, why in PINS:
        if padded >= first:
            return revision, why
    return PINS[-1][1], PINS[-1][2]


def recognise(tree: Tree) -> dict[str, Any]:
    """Say what ``tree`` is.

    Returns ``{generation: v1|v2|hybrid|unknown, version, extensions, compile_units: int, submodules: [{path, present}],
    includes: [header], hardcoded_cccl: bool, nvshmem_host_link: versioned|wheel_only|unversioned|none,
    nccl_link: versioned|unversioned|none, links_libcuda: bool, nvshmem_35_ready: bool, message}``.
    ``nvshmem_host_link`` is how setup.py names the host library: by the version that it finds, by the version only when
    it finds NVSHMEM itself, or by a name that wheels do not ship.
    """
    names = tree.names()
    known = set(names)
    setup = tree.read("setup.py") or ""
    package = tree.read("deep_ep/__init__.py") or ""
    about: dict[str, Any] = {
        "generation": _generation(setup),
        "version": _version(setup, package),
        "extensions": re.findall(
            r"""(?:name\s*=\s*|CUDAExtension\(\s*)['"](deep_ep\._C|deep_ep_cpp|hybrid_ep_cpp)['"]""", setup
        ),
        "compile_units": len(set(re.findall(r"""['"]([\w./-]+\.(?:cu|cpp|cc))['"]""", setup))),
        "submodules": _submodules(tree.read(".gitmodules"), known),
        "includes": _includes(tree, names),
        "hardcoded_cccl": bool(re.search(r"""['"]/usr/local/cuda[^'"]*/cccl['"]""", setup)),
        "nvshmem_host_link": _nvshmem_link(setup),
        "nccl_link": _nccl_link(setup),
        "links_libcuda": "'-lcuda'" in setup
        or '"-lcuda"' in setup
        or bool(re.search(r"""libraries\s*=\s*\[[^\]]*['"]cuda['"]""", setup)),
        "nvshmem_35_ready": _defines(tree, names, "__CUDACC_RDC__"),
        "message": None,
    }
    if about["generation"] == "unknown":
        about["message"] = (
            "no setup.py" if not setup else "setup.py builds none of deep_ep_cpp, deep_ep._C and hybrid_ep_cpp"
        )
        if setup and "deep_ep" in package + setup and not about["compile_units"]:
            about["message"] = "setup.py names no CUDA sources: an sdist without headers cannot be built"
    return about


def _generation(setup: str) -> str:
    if "CUDAExtension" not in setup:
        return "unknown"
    if "hybrid_ep_cpp" in setup:
        return "hybrid"
    if re.search(r"""['"]deep_ep\._C['"]""", setup):
        return "v2"
    if re.search(r"""['"]deep_ep_cpp['"]""", setup):
        return "v1"
    return "unknown"


def _version(setup: str, package: str) -> str | None:
    for text, pattern in (
        (package, r"""^__version__\s*=\s*['"]([^'"]+)"""),
        (setup, r"""version\s*=\s*['"](\d[^'"]*)['"]"""),
    ):
        match = re.search(pattern, text, re.M)
        if match:
            return match.group(1)
    return None


def _submodules(gitmodules: str | None, names: set[str]) -> list[dict[str, Any]]:
    paths = re.findall(r"^\s*path\s*=\s*(\S+)", gitmodules or "", re.M)
    return [{"path": path, "present": any(name.startswith(path + "/") for name in names)} for path in paths]


def _sources(names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if name.endswith((".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp"))
        and not name.startswith(("third-party/", "tests/"))
    ]


def _includes(tree: Tree, names: list[str]) -> list[str]:
    wanted = (
        "infiniband/mlx5dv.h",
        "infiniband/verbs.h",
        "device_host_transport/nvshmem_common_ibgda.h",
        "nvshmem.h",
        "nccl.h",
        "nccl_device.h",
        "nvml.h",
        "nvtx3/nvToolsExt.h",
        "cuda/std/tuple",
    )
    found: set[str] = set()
    for name in _sources(names):
        text = tree.read(name) or ""
        found.update(re.findall(r"""^\s*#\s*include\s*[<"]([^>"]+)[>"]""", text, re.M))
    return sorted(header for header in wanted if header in found)


def _defines(tree: Tree, names: list[str], macro: str) -> bool:
    return any(re.search(rf"#\s*define\s+{macro}\b", tree.read(name) or "") for name in _sources(names))


def _nvshmem_link(setup: str) -> str:
    if "nvshmem" not in setup.lower():
        return "none"
    if re.search(r"""-l:libnvshmem_host\.so['"]""", setup):
        return "unversioned"
    if re.search(r"""nvshmem_host_lib\s*=\s*['"]libnvshmem_host\.so['"]""", setup):
        return "wheel_only"
    if "nvshmem_host" in setup:
        return "versioned"
    return "none"


def _nccl_link(setup: str) -> str:
    if re.search(r"""-l:libnccl\.so['"]""", setup):
        return "unversioned"
    return "versioned" if "nccl_lib" in setup else "none"


def missing_submodules(about: Mapping[str, Any], multinode: bool = False) -> list[str]:
    """Return the submodules that this build needs and the tree lacks; hybrid-ep needs its NCCL for several nodes."""
    if about.get("generation") == "hybrid" and not multinode:
        return []
    return [item["path"] for item in about.get("submodules") or [] if not item["present"]]
