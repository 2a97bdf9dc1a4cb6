# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: which run works on an instance, which one deployed it, and its journals of packages."""

from __future__ import annotations

import datetime
import glob
import os
import pwd
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight as preflight
from ansible_collections.gpufleet.sglang.plugins.module_utils import _journal, _libraries
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_host import (
    STORE,
    Instance,
    Request,
    ServiceError,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Revision,
)


class Runs(Instance):
    """One instance, seen by one of several runs."""

    def _result(self, **extra: Any) -> dict[str, Any]:
        current = self.current()
        seen = self.observe()
        return dict(
            {
                "changed": self.changed,
                "instance": self.request.instance,
                "unit": self.unit,
                "unit_file": self.unit_path,
                "current": current,
                "last_good": self.store.pointer("last_good"),
                "revision": current,
                "claim": self._public_claim(),
                "running_revision": seen["revision"],
                "active_state": seen["state"],
                "pid": seen["pid"] or None,
                "enabled": seen["enabled"],
                "needs": {"write": False, "restart": False, "start": False},
                "diff": self.diff,
                "differences": self.differences,
                "problems": self._all_problems(),
            },
            **extra,
        )

    # -- claims ----------------------------------------------------------------------------------------------------

    def _runs(self) -> dict[str, Any]:
        """``{run, user, since, open, current, before, deployed, good}``: who claimed the instance, who deployed what.

        ``current`` and ``before`` (the last good revision) are as the claim found them. ``deployed`` is
        ``{run, revision}``, ``good`` the run that deployed the last good revision.
        """
        return self.store.read_json("run.json") or {}

    def _public_claim(self) -> dict[str, Any] | None:
        record = self._runs()
        if not record:
            return None
        return {key: record.get(key) for key in ("run", "user", "since", "open", "deployed", "good")}

    def _about_others(self) -> dict[str, Any]:
        """Details of an error that another run is the cause of."""
        cause = {"code": "overtaken", "revision": self.current()}
        return {"cause": cause, "claim": self._public_claim(), "instance": self.request.instance}

    def _overtaken_text(self) -> str:
        record, current = self._runs(), self.current()
        by = f" by {record['user']}" if record.get("user") else ""
        since = f", which began here at {record['since']}" if record.get("since") else ""
        where = f"revision {current} is current" if current else "no revision is current"
        return (
            f"another run{by}{since}, works on instance {self.request.instance} or has changed it meanwhile: {where}. "
            "This run leaves it as it is; let the other one end, then run the same command again"
        )

    def _overtaken(self, what: str = "") -> ServiceError:
        return ServiceError(what + self._overtaken_text(), **self._about_others())

    def _holds(self, record: Mapping[str, Any]) -> bool:
        """Whether no other run claimed the instance since this one did; always, where no run is named."""
        return self.request.run is None or record.get("run") == self.request.run

    def _may_leave(self, record: Mapping[str, Any], current: str | None) -> bool:
        """Whether the current revision is this run's to leave: it deployed it, or holds the claim that found it."""
        if self.request.run is None:
            return True
        deployed = record.get("deployed") or {}
        mine = deployed.get("run") == self.request.run and deployed.get("revision") == current
        return mine or (self._holds(record) and record.get("current") == current)

    def _note_deployed(self, revision: str | None) -> None:
        """What is deployed from here on is this run's; written before it is, so that a failure half-way is, too."""
        record = self._runs()
        if self.request.run is None:
            # By hand, without a run: whoever had claimed the instance has to see that it was changed.
            record.update(run=None, open=False)
        record["deployed"] = {"run": self.request.run, "revision": revision}
        self.store.write_json("run.json", record)

    def _claimed(self) -> dict[str, Any]:
        current, last_good, record = self.current(), self.store.pointer("last_good"), self._runs()
        if self.request.revision and self.request.revision != current:
            raise self._overtaken()
        if self.request.check_mode:
            return self._result()
        self._make_folders()
        if self.request.proven and current and last_good != current and self.store.read(current):
            self.store.point("last_good", current)
            last_good = current
            record["good"] = (record.get("deployed") or {}).get("run")
            self.changed = True
        if record.get("run") != self.request.run:
            record["before"] = {"revision": last_good, "good": record.get("good")}
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
        record.update(run=self.request.run, user=user, since=now, open=True, current=current)
        self.store.write_json("run.json", record)
        return self._result()

    # -- packages --------------------------------------------------------------------------------------------------

    def _journals(self, venv: str) -> list[dict[str, Any]]:
        """The journal entries of a venv that can be taken back, oldest first; [] and a problem when unreadable."""
        try:
            entries = _journal.Journal(self.host.path(f"{STORE}/journal")).entries(venv)
        except _journal.JournalError as error:
            self.problems.append(preflight.problem("journal_unreadable", str(error), "warning"))
            return []
        return [entry.data for entry in entries if entry.state in (_journal.DONE, *_journal.INTERRUPTED)]

    def _forget_journals(self, venv: str) -> None:
        """Remove the journal entries of a venv that no stored revision needs any more."""
        kept = _libraries.kept_for_revisions(self.host.path(f"{STORE}/instances"), venv)
        if kept is None:
            return
        try:
            entries = _journal.Journal(self.host.path(f"{STORE}/journal")).entries(venv)
        except _journal.JournalError as error:
            self.problems.append(preflight.problem("journal_unreadable", str(error), "warning"))
            return
        for entry in entries:
            if entry.state == _journal.DONE and all(entry.id in journals for journals in kept):
                entry.discard()

    def _way_back(self, stored: Revision) -> dict[str, Any]:
        """``{venv, journals, reason, others}``: how the venv gets the libraries that a revision ran with.

        ``others`` are the further instances on the host that run from the venv or would at boot.
        """
        venv = str(stored.meta.get("venv") or "")
        entries = list(reversed(self._journals(venv)))
        sites = _libraries.site_packages(self.host.path(venv))
        present = {**_libraries.snapshot(sites), **_libraries.snapshot(sites, _libraries.touched(entries))}
        way = _libraries.way_back(present, entries, stored.meta.get("libraries") or {})
        return {"venv": venv, **way._asdict(), "others": self._sharing(venv) if way.journals else []}

    def _sharing(self, venv: str) -> list[str]:
        found = []
        for path in sorted(glob.glob(glob.escape(self.host.path(f"{STORE}/instances")) + "/*")):
            name = os.path.basename(path)
            if name == self.request.instance:
                continue
            other = Instance(self.host, Request(instance=name, state="observed"))
            current = other.current()
            stored = other.store.read(current) if current else None
            if stored is None or stored.meta.get("venv") != venv:
                continue
            seen = other.observe()
            if seen["enabled"] or seen["state"] not in ("inactive", "failed"):
                found.append(name)
        return found
