# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action part of launch_plan: plans an instance on the controller, without a connection."""

from __future__ import annotations

from typing import Any, Optional

from ansible.plugins.action import ActionBase
from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents, _launch_plan, _plan_text


class ActionModule(ActionBase):
    """See the documentation of the module of this name."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        del tmp
        arguments = self.validate_argument_spec(
            {
                "intent": {"type": "dict"},
                "probe": {"type": "dict", "required": True},
                "backends": {"type": "dict", "default": {}},
                "settings": {"type": "dict", "default": {}},
                "problems": {"type": "list", "elements": "dict", "default": []},
                "host": {"type": "str"},
                "running": {"type": "dict"},
                "fail_on_rejection": {"type": "bool", "default": False},
            }
        )[1]
        given = _intents.plain(arguments)
        host = given["host"] or str((task_vars or {}).get("inventory_hostname") or "") or None
        plan = _launch_plan.make_plan(
            given["intent"] or None, given["probe"], given["backends"], given["settings"], given["problems"], host
        )
        result.update(changed=False, plan=plan)
        running = given["running"] or _plan_text.running_of(given["probe"])
        if running and plan["service"]:
            result["drift"] = _plan_text.plan_drift(plan, running.get("argv"), running.get("server_info"))
            if self._task.diff and result["drift"]:
                result["diff"] = _plan_text.drift_diff(plan, result["drift"])
                # Callbacks show the diff of what has changed something only, and a plan never does.
                self._display.display(f"{host}: drift of {plan['instance']}\n{_plan_text.drift_text(result['drift'])}")
        if plan["rejections"] and given["fail_on_rejection"]:
            result.update(failed=True, msg=_plan_text.rejections_text(plan, host))
        return result
