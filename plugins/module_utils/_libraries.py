# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: which libraries a venv has, and which journals of packages lead back to those it had."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

_RELEVANT = re.compile(
    r"(torch|sglang|sgl-kernel|sglang-kernel|sgl-deep-ep.*|deep-ep|deepep|tokenspeed-deepep|sgl-deep-gemm|deep-gemm"
    r"|mooncake.*|nixl.*|flashinfer-.*|triton|nvidia-nccl-.*|nvidia-nvshmem-.*)\Z"
)


def site_packages(venv: str) -> list[str]:
    """Folders with the venv's distributions."""
    found = glob.glob(os.path.join(glob.escape(venv), "lib*", "python3*", "site-packages"))
    return sorted({os.path.realpath(path): path for path in found}.values())


def snapshot(sites: Iterable[str], names: Optional[Iterable[str]] = None) -> dict[str, str]:
    """``{distribution: version+digest of its files}`` of those in ``names``, without them of what SGLang depends on.

    The digest is of RECORD's hashes, so a rebuilt wheel of the same version shows.
    """
    wanted = None if names is None else set(names)
    found: dict[str, list[str]] = {}
    for folder in sites:
        for info in sorted(glob.glob(os.path.join(glob.escape(folder), "*.dist-info"))):
            name, _dash, version = os.path.basename(info)[: -len(".dist-info")].partition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            if name not in wanted if wanted is not None else not _RELEVANT.match(name):
                continue
            try:
                with open(os.path.join(info, "RECORD"), encoding="utf-8", errors="replace") as stream:
                    lines = sorted(line for line in stream if "sha256=" in line and ".dist-info/" not in line)
            except OSError:
                lines = []
            digest = hashlib.sha256("".join(lines).encode("utf-8", "replace")).hexdigest()[:12]
            found.setdefault(name, []).append(f"{version} {digest}")
    return {name: " and ".join(sorted(versions)) for name, versions in found.items()}


def library_versions(venv: str) -> dict[str, str]:
    """The snapshot of what an SGLang process of this venv depends on; {} without a venv."""
    return snapshot(site_packages(venv))


class WayBack(NamedTuple):
    """``journals`` to be taken back, newest first. ``reason`` says why there is no way; "" where none is needed."""

    journals: list[str]
    reason: str


def touched(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """The distributions that journal entries are about."""
    return {name for entry in entries for name in entry.get("names") or ()}


def undo(present: Mapping[str, str], entries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], str]:
    """What a venv with ``present`` has once ``entries`` (newest first) are taken back, and why this must not be done.

    An entry may be taken back only where its packages are as it left them; one that was interrupted left nothing sure.
    """
    found = dict(present)
    for entry in entries:
        before, after = entry.get("before"), entry.get("after")
        if before is None or (after is None and entry.get("state") == "done"):
            return found, f"journal {entry['id']} does not say what it changed"
        for name in entry.get("names") or ():
            if entry.get("state") == "done" and after is not None and found.get(name) != after.get(name):
                return found, f"{name} is not as journal {entry['id']} left it: somebody else changed it since"
            if name in before:
                found[name] = before[name]
            else:
                found.pop(name, None)
    return found, ""


def way_back(present: Mapping[str, str], entries: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> WayBack:
    """How a venv gets from ``present`` to the libraries ``wanted`` by taking back the newest of its journal entries.

    ``present`` has the libraries and what the entries are about; ``entries`` are those that can be taken back
    (``{id, state, names, before, after}``), newest first.
    """
    for count in range(len(entries) + 1):
        found, reason = undo(present, entries[:count])
        if reason:
            return WayBack([], reason)
        if {name: version for name, version in found.items() if _RELEVANT.match(name)} == dict(wanted):
            return WayBack([str(entry["id"]) for entry in entries[:count]], "")
    return WayBack([], "no journal leads to the libraries it ran with")


def kept_for_revisions(instances: str, venv: str) -> Optional[list[set[str]]]:
    """The journal entries that each stored revision on ``venv`` ran with, None where no revision is stored.

    An entry is needed as long as a revision is stored that ran without it. ``instances`` is the folder of the stores.
    """
    found = []
    for path in glob.glob(os.path.join(glob.escape(instances), "*", "revisions", "[0-9a-f]*", "meta.json")):
        try:
            with open(path, encoding="utf-8") as stream:
                meta = json.load(stream)
        except (OSError, ValueError):
            # A damaged revision is never gone back to; the store tells of it.
            continue
        if isinstance(meta, dict) and meta.get("venv") == venv:
            found.append(set(meta.get("journals") or []))
    return found or None
