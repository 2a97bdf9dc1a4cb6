# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.plugin_utils._sliced_action import SlicedActionBase


class ActionModule(SlicedActionBase):
    """Drains a worker in slices, and says what still runs there."""

    MODULE = "gpufleet.sglang.router_worker"
    SLICE_SECONDS = 20.0

    def hard_limit(self, args: Mapping[str, Any]) -> float:
        # The module ends the wait itself; this is for a module that never says so.
        return self.number(args, "timeout", 300.0) + self.number(args, "traffic_timeout", 60.0) + 120.0
