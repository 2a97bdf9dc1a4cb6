# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Calls the module of the same name in slices and prints how far a build has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.plugin_utils._sliced_action import SlicedActionBase


class ActionModule(SlicedActionBase):
    """The build keeps its own time limit on the host; ours only ends the waiting when the host cannot say so any
    more."""

    MODULE = "gpufleet.sglang.deepep_wheel"

    def hard_limit(self, args: Mapping[str, Any]) -> float:
        return self.number(args, "time_limit", 7200) + 2 * self.number(args, "proof_timeout", 300) + 2100

    def label(self, args: Mapping[str, Any]) -> str:
        return "DeepEP"
