# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action part of fleet_plan: runs once for the whole play and reads what every host's plan said."""

from __future__ import annotations

from typing import Any, Optional

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fleet_plan, _intents, _pairs, _rollout


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
        settings = {key: arguments.get(key) for key in ("waves", "on_rejection", "on_unreachable")}
        if settings["waves"] is not None:
            settings["waves"] = self._checked_waves(settings["waves"])
        fleet = _fleet_plan.fleet_plan(hosts, settings, [name for name in group if name not in hosts])
        result.update(changed=False, msg=fleet["message"])
        short = _rollout.too_few_forks(fleet, int(variables.get("ansible_forks") or 5))
        if short:
            result.update(msg=f"{fleet['message']}\n{short}", warnings=[short])
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
                "intents": _intents.plain(intents) if intents else {},
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
        return {
            "plans": plans,
            "intents": intents,
            "probe": probe,
            "wheels": wheels,
            "seen": {
                instance: ActionModule._seen(facts.get(arguments["probes_fact"]) or {}, intents, instance)
                for instance, plan in plans.items()
                if (plan.get("unit") or {}).get("role")
            },
            "unreachable": False,
        }

    @staticmethod
    def _seen(probes: Any, intents: dict[str, Any], instance: str) -> dict[str, Any]:
        """What prefill and decode instances are compared by; no more of the large probe is made plain."""
        venv = ((intents.get("instances") or {}).get(instance) or {}).get("venv")
        probe = probes.get(venv) or {}
        own = (probe.get("instances") or {}).get(instance) or probe
        model = own.get("model") or {}
        return {
            "sglang": _intents.plain((probe.get("sglang") or {}).get("version")),
            "model": {key: _intents.plain(model.get(key)) for key in ("state", *_pairs.SHAPE)},
        }

    @staticmethod
    def _checked_waves(waves: Any) -> Any:
        read = _intents.intents({"sglang_waves": waves}, yaml.safe_load)
        for problem in read["problems"]:
            if problem.get("variable") == "sglang_waves":
                told = problem["message"].replace("sglang_waves", "waves", 1)
                raise AnsibleActionFail(f"{told}; write {problem['suggestion']}")
        return read["settings"]["waves"]
