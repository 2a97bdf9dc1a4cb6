# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who compiles DeepEP and who copies, for the role ``deepep``."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _fingerprint


def _on_controller(artifacts_dir: str) -> list[str]:
    manifests = glob.glob(os.path.join(artifacts_dir, "wheels", "*", "manifest.json")) if artifacts_dir else []
    return [os.path.basename(os.path.dirname(str(path))) for path in manifests]


def deepep_builds(
    hosts: Iterable[str],
    hostvars: Mapping[str, Any],
    artifacts_dir: str = "",
    keepers: Optional[Mapping[str, str]] = None,
) -> list[dict[str, Any]]:
    """``[{fingerprint, builder, peers, compiles}]`` from the hosts' ``deepep_info`` and the controller's wheels.

    ``keepers`` is ``{fingerprint: host}``: who else keeps a wheel, which then comes to the controller first.
    """
    found = []
    for host in hosts:
        info = hostvars[host].get("deepep_info") or {}
        found.append(
            {
                "host": str(host),
                "fingerprint": info.get("fingerprint"),
                "cached": bool(info.get("cached") or _stored(hostvars[host])),
                "usable": bool(info.get("usable")),
            }
        )
    return _fingerprint.share_builds(found, [*_on_controller(artifacts_dir), *(keepers or {})])


def _stored(variables: Mapping[str, Any]) -> bool:
    return (variables.get("deepep_stored") or {}).get("status") == 200


def deepep_brings(
    shares: Iterable[Mapping[str, Any]], host: str, keepers: Mapping[str, str], artifacts_dir: str
) -> list[dict[str, str]]:
    """``[{fingerprint, keeper}]`` of the wheels that ``host`` has brought to the controller for its group."""
    there = _on_controller(artifacts_dir)
    return [
        {"fingerprint": share["fingerprint"], "keeper": str(keepers[share["fingerprint"]])}
        for share in shares
        if not share["builder"]
        and share["peers"][:1] == [host]
        and share["fingerprint"] in keepers
        and share["fingerprint"] not in there
    ]


def deepep_builds_here(shares: Iterable[Mapping[str, Any]], host: str) -> bool:
    """Whether ``host`` is the one that builds, or that has the wheel which its group takes."""
    return any(share["builder"] == host for share in shares)


def deepep_role(shares: Iterable[Mapping[str, Any]], host: str) -> str:
    """One sentence for people: builds, has it, or copies from whom."""
    for share in shares:
        if share["builder"] == host:
            does = "builds" if share["compiles"] else "has"
            return f"{does} DeepEP {share['fingerprint']} for {1 + len(share['peers'])} host(s)"
        if host in share["peers"]:
            if not share["builder"] and not share.get("held", True):
                return f"lacks DeepEP {share['fingerprint']}, and no host of its group can build it: see its preflight"
            origin = f"from {share['builder']}" if share["builder"] else "from the controller"
            return f"copies DeepEP {share['fingerprint']} {origin}"
    return "has no fingerprint: see its preflight"


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name → function."""
        return {
            "deepep_brings": deepep_brings,
            "deepep_builds": deepep_builds,
            "deepep_builds_here": deepep_builds_here,
            "deepep_role": deepep_role,
        }
