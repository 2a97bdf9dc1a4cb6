# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that say what is wanted of a host, and explain a plan. Documented in the .yml files next to this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from ansible.errors import AnsibleError, AnsibleFilterError
from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents, _plan_text
from jinja2.exceptions import TemplateError


def _parse(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(str(problem)) from None


def intents(variables: Any) -> dict[str, Any]:
    """What a host's variables want of it; see ``_intents.intents``."""
    if not isinstance(variables, Mapping):
        raise AnsibleFilterError("gpufleet.sglang.intents takes the variables of a host: hostvars[inventory_hostname]")
    own = {}
    broken = []
    for name in variables:
        # Only our own names are looked at: templating every variable of a host is slow, and none of our business.
        if not isinstance(name, str) or "_" not in name or not name.casefold().startswith("s"):
            continue
        if name not in _intents.BY_NAME and not name.casefold().partition("_")[0].endswith("lang"):
            continue
        try:
            own[name] = _intents.plain(variables[name])
        except (AnsibleError, TemplateError) as problem:
            broken.append((name, str(problem)))
    result = _intents.intents(own, _parse)
    for name, error in broken:
        result["problems"].append(
            {
                "code": "variable_not_resolved",
                "variable": name,
                "value": None,
                "message": f"{name} cannot be resolved: {error}",
                "suggestion": None,
                "severity": "error" if name in _intents.BY_NAME else "warning",
                "instance": None,
            }
        )
    return result


def plan_text(plan: Any, host: Any = None) -> str:
    """A plan in words; see ``_plan_text.plan_text``."""
    if not isinstance(plan, Mapping) or "decisions" not in plan:
        raise AnsibleFilterError("gpufleet.sglang.plan_text takes the plan that launch_plan returned")
    return _plan_text.plan_text(_intents.plain(plan), _intents.plain(host))


def plan_drift(plan: Any, argv: Any = None, server_info: Any = None) -> list[dict[str, Any]]:
    """How a running service differs from its plan; see ``_plan_text.plan_drift``."""
    if not isinstance(plan, Mapping):
        raise AnsibleFilterError("gpufleet.sglang.plan_drift takes the plan that launch_plan returned")
    return _plan_text.plan_drift(_intents.plain(plan), _intents.plain(argv), _intents.plain(server_info))


class FilterModule:
    """Filters of intents and plans."""

    def filters(self) -> dict[str, Any]:
        return {"intents": intents, "plan_text": plan_text, "plan_drift": plan_drift}
