# SPDX-License-Identifier: GPL-3.0-or-later
"""Which real Python environments the tests have, and as which stack of overlay layers each one lies in the cache.

A layer's folder is named by the content of its recipe and of those below it, so that a changed recipe is a new folder
and a finished one is never written again. Hosts mount a stack read-only with a writable upper of their own.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = "/opt/sglang/venv"  # where every environment appears, while it is built and inside the hosts
PYTHON = "/usr/bin/python3.11"
OWNER_UID = 1500  # user venvowner of the host image
SGLANG_VERSIONS = ("0.5.9", "0.5.12", "0.5.18", "0.5.23")
DEFAULT_SGLANG = "0.5.23"


def cache_dir() -> Path:
    """The folder of all caches: outside the checkout, so that a clean clone finds what is there."""
    given = os.environ.get("GPUFLEET_CACHE")
    if given:
        return Path(given).resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "gpufleet-sglang"


@dataclass(frozen=True)
class Layer:
    """One step of an environment: a name, the layer below it, and the arguments of the pip calls that make it."""

    name: str
    parent: Layer | None
    pip: tuple[tuple[str, ...], ...]
    requirements: str | None = None
    shims: bool = False

    def key(self) -> str:
        """Hash of everything that goes into this layer and those below it."""
        h = hashlib.sha256()
        h.update(repr((self.name, self.pip, VENV, PYTHON, OWNER_UID)).encode())
        if self.parent:
            h.update(self.parent.key().encode())
        if self.requirements:
            h.update((HERE / self.requirements).read_bytes())
        if self.shims:
            for path in sorted((HERE / "shims").rglob("*.py")):
                h.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
        return h.hexdigest()[:12]

    def path(self) -> Path:
        """Where the finished layer lies."""
        return cache_dir() / "env" / f"{self.name}-{self.key()}"

    def stack(self) -> list[Layer]:
        """This layer and those below it, lowest first."""
        return [*(self.parent.stack() if self.parent else []), self]

    def built(self) -> bool:
        """Whether this layer and all below it are finished."""
        return all((layer.path() / "done.json").is_file() for layer in self.stack())

    def lowerdir(self) -> str:
        """The value of overlayfs' ``lowerdir`` for the whole stack, topmost first."""
        return ":".join(str(layer.path() / "tree") for layer in reversed(self.stack()))


def environments() -> dict[str, Layer]:
    """All environments by name."""
    torch = Layer("torch", None, (("torch==2.13.0", "numpy"),))
    deps = Layer("sglang-deps", torch, (), requirements="requirements.txt", shims=True)
    envs = {f"sglang-{v}": Layer(f"sglang-{v}", deps, (("--no-deps", f"sglang=={v}"),)) for v in SGLANG_VERSIONS}
    envs["torch"] = torch
    envs["gpu-b"] = Layer("gpu-b", torch, (("mooncake==0.0.1",), ("--no-deps", "nixl-cu13==1.5.1")))
    envs["gpu-c"] = Layer("gpu-c", torch, (("mooncake-transfer-engine-non-cuda==0.3.13.post1",),))
    return envs


def find(name: str) -> Layer:
    """The environment of that name; ``sglang`` is the default version."""
    envs = environments()
    if name == "sglang":
        name = f"sglang-{DEFAULT_SGLANG}"
    if name not in envs:
        sys.exit(f"no environment named {name!r}; there are: sglang, {', '.join(sorted(envs))}")
    return envs[name]
