# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: brings the unit of one instance into a state; the logic of the module service_unit."""

from __future__ import annotations

import os
import shutil
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight as preflight
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_back import GoingBack
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_deploy import Deploy
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_host import (
    RUN,
    STORE,
    UNITS,
    Host,
    Request,
    ServiceError,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Lock,
    StoreError,
    StoreLocked,
)

__all__ = ["Host", "Request", "ServiceError", "ServiceUnit"]


class ServiceUnit(Deploy, GoingBack):
    """One instance on one host. ``apply()`` does what the request asks and returns the module's result."""

    def apply(self) -> dict[str, Any]:
        """Do what the request asks; ServiceError (with details) when it cannot be done."""
        handlers = {
            "started": self._started,
            "stopped": self._stopped,
            "absent": self._absent,
            "claimed": self._claimed,
            "accepted": self._accepted,
            "rolled_back": self._rolled_back,
            "observed": self._info,
        }
        handler = handlers[self.request.state]
        try:
            if self.request.check_mode or self.request.state == "observed":
                result = handler()
            else:
                with Lock(self.host.path(f"{RUN}/{self.request.instance}.lock")):
                    result = handler()
        except StoreLocked as error:
            raise ServiceError(str(error), **self._about_others(), problems=self._all_problems()) from error
        except StoreError as error:
            raise ServiceError(str(error), problems=self._all_problems()) from error
        except OSError as error:
            what = f"state {self.request.state} of {self.request.instance} was not reached"
            raise ServiceError(f"{what}: {error}", problems=self._all_problems()) from error
        except ServiceError as error:
            error.details.setdefault("problems", self._all_problems())
            raise
        return result

    # -- the other states ------------------------------------------------------------------------------------------

    def _stopped(self) -> dict[str, Any]:
        seen = self.observe()
        running = seen["state"] not in ("inactive", "failed") or bool(seen["pid"])
        left = preflight.cgroup_processes(f"/system.slice/{self.unit}", self.host.sys_cgroup)
        if self.request.check_mode:
            self.changed = running or bool(left)
        elif not self._may_leave(self._runs(), self.current()):
            raise self._overtaken()
        else:
            self._stop()
        return self._result(needs={"write": False, "restart": False, "start": False}, stopped_pids=left)

    def _owned_paths(self) -> list[str]:
        paths = [self.unit_path, self.etc, f"{STORE}/instances/{self.request.instance}"]
        namespace = f"sglang-{self.request.instance}"
        paths.append(f"{UNITS}/systemd-journald@{namespace}.service.d")
        if self.request.purge:
            paths += [f"/var/lib/sglang/{self.request.instance}", f"/var/cache/sglang/{self.request.instance}"]
        return [path for path in paths if os.path.lexists(self.host.path(path))]

    def _absent(self) -> dict[str, Any]:
        text = self.host.read(self.unit_path)
        foreign = text is not None and not self._is_ours(text)
        seen = self.observe()
        paths = [path for path in self._owned_paths() if not (foreign and path == self.unit_path)]
        ours = text is not None and not foreign
        if ours:
            self._note_diff(self.unit_path, text or "", "")
        record = self.store.read_json("takeover.json")
        kept = {"unit": record["unit"], "was_enabled": record.get("was_enabled")} if record else None
        if self.request.check_mode:
            self.changed = bool(paths) or (ours and seen["state"] not in ("inactive", "failed"))
            return self._result(
                removed=paths, taken_over=kept, needs={"write": bool(paths), "restart": False, "start": False}
            )
        if ours or (text is None and seen["state"] not in ("inactive", "failed")):
            self._stop()
            self._disable(self.unit)
        for path in paths:
            target = self.host.path(path)
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target)
            else:
                os.unlink(target)
            self.changed = True
        if ours:
            self.systemd.must("daemon-reload")
            self.systemd.call("reset-failed", self.unit)
        return self._result(removed=paths, taken_over=kept, needs={"write": False, "restart": False, "start": False})

    def _info(self) -> dict[str, Any]:
        current, last_good = self.current(), self.store.pointer("last_good")
        if self.store.pointer("current") != current and current is not None:
            self.problems.append(
                preflight.problem(
                    "swap_interrupted",
                    f"the unit file is on revision {current}, the store says {self.store.pointer('current')}: "
                    "a run was interrupted; the unit file counts, and the next run converges",
                    "warning",
                )
            )
        listed = [
            {
                "revision": item.revision,
                "created": item.meta.get("created"),
                "argv": item.meta["argv"],
                "libraries": item.meta.get("libraries"),
                "journals": item.meta.get("journals") or [],
                "sglang_version": item.meta.get("sglang_version"),
                "current": item.revision == current,
                "last_good": item.revision == last_good,
            }
            for item in self.store.revisions()
        ]
        record = self.store.read_json("takeover.json")
        seen = self.observe()
        text = self.host.read(self.unit_path) or ""
        return self._result(
            revisions=listed,
            taken_over={"unit": record["unit"]} if record else None,
            needs={"write": False, "restart": False, "start": False},
            limits_not_granted=self._limits(text, seen["pid"]) if text else [],
        )
