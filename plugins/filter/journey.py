# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters between the steps of a journey and of a rollout; the logic is in ``_journey.py`` and ``_rollout.py``."""

from __future__ import annotations

from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _journey, _rollout

JOURNEY = (
    "accepted_instances",
    "applied_journals",
    "collect_probes",
    "deepep_options",
    "failure",
    "further_remedies",
    "host_work",
    "instance_probe",
    "plan_names",
    "probe_calls",
    "ready_targets",
    "restored_targets",
    "router_keys",
    "secrets_by_instance",
    "to_build",
    "to_measure",
    "unmended",
    "with_wheels",
)
ROLLOUT = (
    "after_going_back",
    "back_work",
    "bare_plans",
    "failed_going_back",
    "going_back",
    "held_elsewhere",
    "hooked",
    "meetings",
    "members_behind",
    "outcome",
    "revision_refused",
    "rollout_text",
    "router_calls",
    "serving",
    "shared_work",
    "to_accept",
    "to_claim",
    "to_roll_back",
    "wave_failed",
    "wave_text",
    "went_away",
    "went_back",
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            **{name: getattr(_journey, name) for name in JOURNEY},
            **{name: getattr(_rollout, name) for name in ROLLOUT},
        }
