# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the base of the action plugins that call their module in slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.gpufleet.sglang.plugins.module_utils._slices import run_slices


class SlicedActionBase(ActionBase):
    """An action that lasts: set ``MODULE``, and the module follows the protocol of ``_slices``.

    The module takes ``slice_seconds`` (float) and ``carry`` (dict). Override ``hard_limit`` and, where
    needed, ``slice_args``, ``between`` and ``finish``.
    """

    MODULE = ""
    SLICE_SECONDS = 30.0
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def hard_limit(self, args: Mapping[str, Any]) -> float:
        """Seconds after which the action gives up although the module is not done."""
        return 3600.0

    def label(self, args: Mapping[str, Any]) -> str:
        """What a printed line is about, besides the host."""
        return str(args.get("instance") or self.MODULE.rsplit(".", 1)[-1])

    def finish(self, result: dict[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """The last word on the final result."""
        return result

    def slice_args(self, args: dict[str, Any]) -> dict[str, Any]:
        """The module's options for its next slice."""
        return args

    def between(self, result: dict[str, Any]) -> Optional[dict[str, Any]]:
        """Called after a slice that was not the last; what it returns instead of None ends the action."""
        return None

    def number(self, args: Mapping[str, Any], name: str, default: float) -> float:
        """An argument as seconds; a string of a survey counts, anything else is the user's error."""
        value = args.get(name)
        if value is None or value == "":
            return default
        try:
            return float(value)
        except (TypeError, ValueError):
            raise AnsibleActionFail(f"{name}: {value!r} is not a number of seconds") from None

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = dict(self._task.args)
        host = task_vars.get("inventory_hostname", "host")
        label = self.label(args)

        def call(carry: Mapping[str, Any], seconds: float) -> dict[str, Any]:
            return self._execute_module(
                module_name=self.MODULE,
                module_args=dict(self.slice_args(args), carry=dict(carry), slice_seconds=seconds),
                task_vars=task_vars,
            )

        def speak(line: str) -> None:
            self._display.display(f"{host} | {label} | {line}")

        result = run_slices(
            call,
            speak,
            hard_limit=self.hard_limit(args),
            slice_seconds=self.number(args, "slice_seconds", self.SLICE_SECONDS),
            once=bool(self._task.check_mode),
            carry=args.get("carry"),
            transient=(AnsibleConnectionFailure,),
            between=self.between,
        )
        # The state between the slices is of no use to anybody who reads the result.
        sent = (result.get("invocation") or {}).get("module_args")
        if isinstance(sent, dict):
            sent.pop("carry", None)
        return self.finish(result, args)
