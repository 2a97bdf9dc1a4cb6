# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action part of fleet_plan: runs once for the whole play and reads what every host's plan said."""

from __future__ import annotations

from typing import Any, Optional

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fleet_plan, _intents


class ActionModule(ActionBase):
    """See the documentation of the module of this name."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        del tmp
        variables = task_vars or {}
        arguments = _intents.plain(
            self.validate_argument_spec(
                {
                    "group": {"type": "str", "default": "sglang"},
                    "waves": {"type": "list", "elements": "raw"},
                    "on_rejection": {"type": "str", "choices": ["stop", "skip"]},
                    "on_unreachable": {"type": "str", "choices": ["stop", "skip"]},
                    "intents_fact": {"type": "str", "default": "sglang_resolved"},
                    "plans_fact": {"type": "str", "default": "probe_plans"},
                    "probes_fact": {"type": "str", "default": "probe_results"},
                    "fail_on_rejection": {"type": "bool", "default": True},
                }
            )[1]
        )
        groups, hostvars = variables["groups"], variables["hostvars"]
        if arguments["group"] not in groups:
            raise AnsibleActionFail(f"the inventory has no group {arguments['group']}")
        in_play = list(variables.get("ansible_play_hosts_all") or groups[arguments["group"]])
        group = list(groups[arguments["group"]])
        hosts = {name: self._host(hostvars, name, arguments) for name in group if name in in_play}
        fleet = _fleet_plan.fleet_plan(
            hosts, self._settings(hosts, arguments), [name for name in group if name not in hosts]
        )
        result.update(changed=False, msg=fleet["message"])
        if not fleet["accepted"] and arguments["fail_on_rejection"]:
            # The message says it all; the data would print it twice more.
            result["failed"] = True
        else:
            result["fleet"] = fleet
        return result

    @staticmethod
    def _host(hostvars: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        facts = hostvars[name]
        plans = facts.get(arguments["plans_fact"])
        intents = facts.get(arguments["intents_fact"])
        if intents is None or plans is None:
            return {
                "unreachable": True,
                "reason": "it could not be reached or its survey failed",
                "plans": {},
                "intents": {},
            }
        plans, intents = _intents.plain(plans), _intents.plain(intents)
        # The probe is large: it is read only where a build makes its fingerprint matter.
        probe: dict[str, Any] = {}
        if any(
            step.get("action") == "build"
            for plan in plans.values()
            for remedy in plan.get("remedies") or []
            for step in remedy.get("steps") or []
        ):
            probe = next(iter(_intents.plain(facts.get(arguments["probes_fact"]) or {}).values()), {})
        seen: dict[str, Any] = next(iter((facts.get(arguments["probes_fact"]) or {}).values()), {})
        wheels = _intents.plain((seen.get("host") or {}).get("wheels") or [])
        return {"plans": plans, "intents": intents, "probe": probe, "wheels": wheels, "unreachable": False}

    @staticmethod
    def _settings(hosts: dict[str, dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
        """The run's settings: of the task, else of the first host that says something else than the default."""
        settings: dict[str, Any] = {}
        for key in ("waves", "on_rejection", "on_unreachable"):
            default = _intents.plain(_intents.BY_NAME[f"sglang_{key}"].default)
            told = [(host["intents"].get("settings") or {}).get(key) for host in hosts.values()]
            settings[key] = arguments.get(key) or next(
                (value for value in told if value not in (None, default)), default
            )
        return settings
