# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: which revision is the last good one, and going back to it."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight as preflight
from ansible_collections.gpufleet.sglang.plugins.module_utils._libraries import library_versions
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_host import (
    ServiceError,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_runs import Runs
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Revision,
    write_file,
)

KEPT_REVISIONS = 5


class GoingBack(Runs):
    """The states accepted and rolled_back."""

    # -- accepted --------------------------------------------------------------------------------------------------

    def _accepted(self) -> dict[str, Any]:
        current, record = self.current(), self._runs()
        if current is None or self.store.read(current) is None:
            raise ServiceError(
                f"{self.unit} is on no stored revision, so there is nothing to accept; run state started"
            )
        if self.request.revision and self.request.revision != current:
            raise self._overtaken(f"revision {self.request.revision} was to be accepted, {current} is current; ")
        seen = self.observe()
        if seen["state"] != "active" or seen["revision"] != current:
            told = f"{self.unit} is {seen['state']} on revision {seen['revision']}, not running {current}: not accepted"
            if self.request.run is not None and record.get("open") and not self._holds(record):
                raise self._overtaken(told + "; ")
            raise ServiceError(told)
        changes = self.store.pointer("last_good") != current
        if self.request.check_mode:
            self.changed = changes
            return self._result()
        if changes:
            self.store.point("last_good", current)
            self.changed = True
        deployed = record.get("deployed") or {}
        if deployed.get("revision") == current:
            record["good"] = deployed.get("run")
        if self._holds(record) or deployed.get("run") == record.get("run"):
            record["open"] = False
        if record != self._runs():
            self.store.write_json("run.json", record)
        self.store.prune(KEPT_REVISIONS, [current, (record.get("before") or {}).get("revision")])
        self._remove_stale_files(current)
        self._forget_journals(str((self.store.read(current) or Revision("", "", "", {})).meta.get("venv") or ""))
        return self._result()

    def _remove_stale_files(self, current: str) -> None:
        """Environment of removed revisions, and secrets that no kept revision reads."""
        kept = self.store.revisions()
        names = {f"{item.revision}.env" for item in kept}
        for path in glob.glob(glob.escape(self.host.path(self.etc)) + "/*.env"):
            if os.path.basename(path) not in names:
                os.unlink(path)
        if not any(self.etc in line for item in kept for line in self._secret_lines(item.unit)):
            for folder in (self.secrets_dir, self.service_dir):
                if os.path.isdir(self.host.path(folder)):
                    shutil.rmtree(self.host.path(folder))

    def _secret_lines(self, text: str) -> list[str]:
        return [line for line in text.splitlines() if f"{self.etc}/secrets/" in line or f"{self.etc}/service/" in line]

    # -- rolled_back -----------------------------------------------------------------------------------------------

    def _target(self, record: Mapping[str, Any], current: str | None) -> tuple[str | None, bool]:
        """The revision to go back to, and whether ``last_good`` has to move back with it.

        After a run accepted what it deployed, the last good revision is the one that it found: another rank of the
        instance may have failed at this.
        """
        last_good = self.store.pointer("last_good")
        if self.request.revision:
            return self.request.revision, False
        deployed = {"run": self.request.run, "revision": current}
        mine = self.request.run is not None and record.get("deployed") == deployed
        if mine and self._holds(record) and last_good == current and "before" in record:
            return record["before"]["revision"], True
        return last_good, False

    def _leave_good(self, record: dict[str, Any], target: str | None) -> None:
        """``last_good`` as it was before this run accepted its own revision; first of all, a cut may follow."""
        self.store.point("last_good", target)
        record["good"] = (record.get("before") or {}).get("good")
        self.store.write_json("run.json", record)

    def _rolled_back(self) -> dict[str, Any]:
        record, current, seen = self._runs(), self.current(), self.observe()
        none = {"write": False, "restart": False, "start": False}
        if not self._may_leave(record, current):
            return self._result(needs=none, overtaken=self._overtaken_text())
        target, leaves_good = self._target(record, current)
        if leaves_good and not self.request.check_mode:
            self._leave_good(record, target)
        if target is None:
            if not leaves_good and self.store.problems and os.path.lexists(f"{self.store.path}/last_good"):
                raise ServiceError(
                    f"last_good of {self.request.instance} is damaged: {self.store.problems[-1]['message']}; "
                    "name a revision (state observed lists them)"
                )
            return self._give_up_first(none)
        stored = self.store.read(target)
        if stored is None:
            sound = [item.revision for item in self.store.revisions()]
            raise ServiceError(
                f"revision {target} of {self.request.instance} is not stored or damaged; "
                f"stored: {', '.join(sound) or 'none'}"
            )
        present = library_versions(self.host.path(str(stored.meta.get("venv") or "")))
        libraries = stored.meta.get("libraries") or {}
        changed_libraries = [
            {"name": name, "wanted": libraries.get(name), "present": present.get(name)}
            for name in sorted({*libraries, *present})
            if libraries.get(name) != present.get(name)
        ]
        packages = self._way_back(stored)
        if changed_libraries:
            mend = packages["reason"] or (
                f"restore them (backend_packages, state restored, journal_ids {', '.join(packages['journals'])})"
            )
            self.problems.append(
                preflight.problem(
                    "libraries_differ",
                    "the venv has other libraries than when this revision ran: "
                    + ", ".join(str(item["name"]) for item in changed_libraries)
                    + f"; {mend}",
                    "warning",
                )
            )
        before = self.host.read(self.unit_path) or ""
        self._note_diff(self.unit_path, before, stored.unit)
        active = seen["state"] in ("active", "reloading") and bool(seen["pid"])
        needs = {
            "write": before != stored.unit or self.host.read(self.env_path(target)) != stored.env,
            "start": not active,
            "restart": active and seen["revision"] != target,
        }
        extra = {
            "needs": needs,
            "revision": target,
            "argv": [str(item) for item in stored.meta["argv"]],
            "api_key_file": f"{self.secrets_dir}/api_key"
            if os.path.exists(self.host.path(f"{self.secrets_dir}/api_key"))
            else None,
            "rolled_back_from": current if current != target else None,
            "libraries_differ": changed_libraries,
            "packages": packages,
            "log_namespace": stored.meta.get("log_namespace"),
        }
        if self.request.check_mode:
            self.changed = any(needs.values())
            return self._result(**extra)
        if self.request.run is not None:
            # What runs from here on is this run's again, whoever claimed the instance meanwhile.
            self.store.write_json("run.json", {**self._runs(), "run": self.request.run, "open": True})
        if any(needs.values()):
            self._note_deployed(target)
        if needs["write"]:
            self._swap(stored)
            self.changed = True
        elif self.store.pointer("current") != target:
            self.store.point("current", target)
        self.systemd.must("daemon-reload")
        self._enable()
        if needs["start"] or needs["restart"]:
            self._end_leftovers(f"/system.slice/{self.unit}") if not active else None
            self._start("restart" if needs["restart"] or seen["state"] == "activating" else "start")
            self._prove_argv([str(item) for item in stored.meta["argv"]])
        return self._result(**extra)

    def _give_up_first(self, none: dict[str, bool]) -> dict[str, Any]:
        """No revision was ever good: stop and disable what was started, put back what was taken over."""
        text = self.host.read(self.unit_path)
        ours = text is not None and self._is_ours(text)
        record = self.store.read_json("takeover.json")
        seen = self.observe()
        if self.request.check_mode:
            self.changed = bool(record) or (ours and (seen["enabled"] or seen["state"] not in ("inactive", "failed")))
            return self._result(needs=none, restored=record["unit"] if record else None)
        if ours:
            self._stop()
            self._disable(self.unit)
            self.systemd.call("reset-failed", self.unit)
        restored = self._give_back()
        return self._result(needs=none, restored=restored)

    def _give_back(self) -> str | None:
        """Put a taken-over unit back as it was; returns its name."""
        record = self.store.read_json("takeover.json")
        if not record:
            return None
        name = str(record["unit"])
        if name == self.unit and record.get("text"):
            write_file(self.host.path(self.unit_path), str(record["text"]), 0o644)
        self.systemd.must("daemon-reload")
        if record.get("was_enabled"):
            self.systemd.must("enable", name)
        if record.get("was_active"):
            self.systemd.must("restart" if name == self.unit else "start", name, timeout=300)
        self.store.write_json("takeover.json", None)
        self.changed = True
        return name
