# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what makes two hosts' builds of DeepEP interchangeable (pure)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA = 1
PARTS = (
    "generation",
    "revision",
    "python_tag",
    "torch",
    "torch_cuda",
    "toolkit",
    "nvshmem",
    "nccl",
    "archs",
    "machine",
    "libc",
    "options",
)


def fingerprint_parts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts in their canonical form, so that spelling never makes two builds differ.

    ``facts``: ``{generation, revision, python_tag: "cp312", torch: "2.14.1+cu130", torch_cuda: "13.0", toolkit:
    "13.0.88", nvshmem, nccl, archs: ["9.0"] or "9.0;10.0", machine, libc: "glibc 2.36", options: {NAME: value}}``.
    """
    archs = facts.get("archs") or []
    if isinstance(archs, str):
        archs = archs.replace(",", ";").replace(" ", ";").split(";")
    parts: dict[str, Any] = {name: _text(facts.get(name)) for name in PARTS if name not in ("archs", "options")}
    parts["archs"] = sorted({str(arch).strip() for arch in archs if str(arch).strip()}, key=_arch_key)
    parts["options"] = {str(name): _text(value) for name, value in sorted((facts.get("options") or {}).items())}
    return parts


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return 16 hex digits for canonical ``parts``. They name the wheel's folder and the fleet's group of hosts."""
    text = json.dumps({"schema": SCHEMA, "parts": fingerprint_parts(parts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ``[{part, ours, theirs}]``: why two hosts do not share a wheel."""
    left, right = fingerprint_parts(ours), fingerprint_parts(theirs)
    return [{"part": part, "ours": left[part], "theirs": right[part]} for part in PARTS if left[part] != right[part]]


def share_builds(hosts: Iterable[Mapping[str, Any]], cached: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Choose one builder a fingerprint.

    ``hosts``: ``[{host, fingerprint, cached: bool, usable: bool}]`` in the order of the play; ``cached`` the
    fingerprints whose wheel the controller holds. Returns ``[{fingerprint, builder, peers: [host], compiles:
    bool, held: bool}]`` in the order of first appearance. A host that has the wheel is preferred; where the controller
    has it and no host does, ``builder`` is None and everybody copies. A host that cannot build (``usable`` false) is
    a peer only.
    """
    held = set(cached)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for host in hosts:
        if host.get("fingerprint"):
            groups.setdefault(str(host["fingerprint"]), []).append(host)
    shared = []
    for print_, members in groups.items():
        owners = [item for item in members if item.get("cached")]
        able = [item for item in members if item.get("usable", True)]
        builder: str | None = None
        if owners:
            builder = str(owners[0]["host"])
        elif print_ not in held and able:
            builder = str(able[0]["host"])
        shared.append(
            {
                "fingerprint": print_,
                "builder": builder,
                "peers": [str(item["host"]) for item in members if str(item["host"]) != builder],
                "compiles": builder is not None and not owners,
                "held": bool(owners) or print_ in held,
            }
        )
    return shared


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _arch_key(arch: str) -> tuple[float, str]:
    digits = "".join(char for char in arch if char.isdigit() or char == ".")
    try:
        return (float(digits), arch)
    except ValueError:
        return (0.0, arch)
