# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that carry plain data between the steps of a host's journey; the logic is in ``_journey.py``."""

from __future__ import annotations

from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _journey


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            name: getattr(_journey, name)
            for name in (
                "accepted_instances",
                "applied_journals",
                "collect_probes",
                "failure",
                "further_remedies",
                "host_work",
                "instance_probe",
                "plan_names",
                "probe_calls",
                "ready_targets",
                "restored_targets",
                "secrets_by_instance",
                "to_roll_back",
                "unmended",
            )
        }
