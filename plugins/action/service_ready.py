# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Optional

from ansible import constants as C
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._members import Members, death_text
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._sliced_action import SlicedActionBase

MEMBER_SLICE_SECONDS = 10.0
# As long as another rank may need to be looked at once more.
PATIENCE = MEMBER_SLICE_SECONDS + 10.0


class ActionModule(SlicedActionBase):
    """Waits for a service in slices, and says what it sees meanwhile; the ranks of an instance wait together."""

    MODULE = "gpufleet.sglang.service_ready"
    members: Optional[Members] = None

    def hard_limit(self, args: Mapping[str, Any]) -> float:
        # The module ends the wait itself; this is for a module that never says so.
        return self.number(args, "hard_timeout", 7200.0) + 180.0

    def slice_args(self, args: dict[str, Any]) -> dict[str, Any]:
        return dict(args, hold=True) if self.members and self.members.rank else args

    def between(self, result: dict[str, Any]) -> Optional[dict[str, Any]]:
        if self.members is None:
            return None
        seen = result.get("observation") or {}
        uptime = (seen.get("unit") or {}).get("uptime")
        up = bool(result.get("ready") or seen.get("listener"))
        self.members.tell("", str(result.get("state")), up=up, uptime=uptime)
        if result.get("ready"):
            self.members.pause(MEMBER_SLICE_SECONDS)
        lost = self.members.lost()
        if lost:
            here = f"rank {self.members.rank} was {result.get('state')}, and is not waited for"
            return dict(result, failed=True, ready=False, cause=lost["cause"], followed=lost, msg=here)
        cause = self.members.apart()
        if cause:
            return dict(result, failed=True, state="apart", cause=cause, msg=self._apart_text(cause))
        return result if result.get("ready") and not self.members.watched() else None

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        args = self._task.args
        hosts = [str(host) for host in args.get("members") or []]
        if len(hosts) < 2 or args.get("mode") == "verify" or self._task.check_mode:
            return super().run(tmp, task_vars)
        rank = int(self.number(args, "node_rank", 0))
        if not 0 <= rank < len(hosts):
            raise AnsibleActionFail(f"node_rank: {rank} is no position in members ({', '.join(hosts)})")
        self.members = Members(self._folder(str(args.get("instance") or "default"), hosts), hosts, rank)
        self.SLICE_SECONDS = MEMBER_SLICE_SECONDS
        self.members.tell()
        try:
            result = super().run(tmp, task_vars)
        except Exception as error:
            away = isinstance(error, AnsibleConnectionFailure)
            self.members.tell("dead", "unreachable" if away else "failed", {"message": str(error)})
            raise
        return self._end(self.members, result, str(args.get("instance") or "default"))

    def _end(self, members: Members, result: dict[str, Any], instance: str) -> dict[str, Any]:
        """Tell the others how it ended, and name the rank that ended first."""
        if result.get("ready"):
            members.tell("ready", "ready")
            return result
        first = result.get("followed")
        if first:
            members.tell("followed", str(result.get("state")))
        else:
            cause = result.get("cause") or {"message": str(result.get("msg"))}
            first = members.first(str(result.get("state") or "failed"), cause, PATIENCE)
        if first:
            result.update(
                cause=first["cause"],
                followed={name: first[name] for name in ("host", "rank", "state")},
                msg=f"{instance}: {death_text(first)}; {result.get('msg')}",
            )
        return result

    def _apart_text(self, cause: Mapping[str, Any]) -> str:
        assert self.members
        rank, host = self.members.rank, self.members.hosts[self.members.rank]
        return death_text({"rank": rank, "host": host, "state": "apart", "cause": cause})

    def _folder(self, instance: str, hosts: list[str]) -> str:
        """Where the ranks of this one wait write: a later wait of the run is another task, or included anew."""
        parts, node = [instance, *hosts], self._task
        while node is not None:
            parts.append(str(node._uuid))
            node = getattr(node, "_parent", None)
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        return os.path.join(C.DEFAULT_LOCAL_TMP, "gpufleet-ready", name)
