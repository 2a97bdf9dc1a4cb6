# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what every part of a probe is given. ``gather(context)`` of each subset takes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run, run


@dataclass
class Context:
    """What a probe knows and may use.

    ``root`` is ``/`` on a host and a folder in tests; files are reached with :meth:`path`. ``venv``, ``torch`` and
    ``sglang`` are the parts of the probe with the same names (contracts.md), there before any ``gather`` is called.
    ``environment`` is exactly the environment that the service has, or None where no service is known;
    ``user`` the service's user, or None. ``results`` holds the subsets gathered so far, by name, in the order of
    ``_probe.SUBSETS``: a subset may read an earlier one that was asked for, and must do without it.
    Times are seconds.
    """

    run: Run = run
    root: str = "/"
    venv: dict[str, Any] = field(default_factory=dict)
    torch: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, Any] = field(default_factory=dict)
    environment: Optional[Mapping[str, str]] = None
    user: Optional[str] = None
    model_path: Optional[str] = None
    instance: str = "default"
    command_timeout: float = 20.0
    import_timeout: float = 120.0
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """The systemd unit of the instance."""
        return f"sglang-{self.instance}.service"

    def path(self, absolute: str) -> str:
        """Where ``absolute`` (a path of the host) lies under :attr:`root`."""
        if self.root in ("", "/"):
            return absolute
        return os.path.join(self.root, absolute.lstrip("/"))

    def read(self, absolute: str, limit: int = 1 << 20) -> Optional[str]:
        """At most ``limit`` bytes of a file of the host as text, or None where it is absent or unreadable."""
        try:
            with open(self.path(absolute), "rb") as stream:
                return stream.read(limit).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None
