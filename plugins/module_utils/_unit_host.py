# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: an instance as systemd and the files of a host have it, and the steps that change it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight as preflight
from ansible_collections.gpufleet.sglang.plugins.module_utils import _unit_file as unit_file
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run, RunResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Revision,
    UnitStore,
    make_dir,
    process_start,
    write_file,
)

STORE = "/var/lib/gpufleet-sglang"
ETC = "/etc/gpufleet-sglang"
RUN = "/run/gpufleet-sglang"
UNITS = "/etc/systemd/system"


class ServiceError(Exception):
    """What keeps the module from doing what was asked; ``details`` are returned with the message."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


@dataclass
class Request:
    """The module's parameters."""

    instance: str
    state: str
    plan: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, Any] = field(default_factory=dict)
    takeover: str | None = None
    revision: str | None = None
    purge: bool = False
    wait_for_gpus: int | None = None
    unit_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    read_only_paths: list[str] = field(default_factory=list)
    read_write_paths: list[str] = field(default_factory=list)
    accept_problems: list[str] = field(default_factory=list)
    run: str | None = None
    proven: bool = False
    check_mode: bool = False


@dataclass
class Host:
    """Where the module works; ``root`` and ``run`` are replaced in tests."""

    run: Run
    root: str = ""
    proc: str = "/proc"
    sys_cgroup: str = "/sys/fs/cgroup"
    make_users: bool = True
    sleep: Callable[[float], None] = time.sleep

    def path(self, path: str) -> str:
        """A path of the host as this process sees it."""
        return self.root + path

    def read(self, path: str) -> str | None:
        """Text of a file, None when it is not there."""
        try:
            with open(self.path(path), encoding="utf-8", errors="surrogateescape") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_proc(self, pid: int, name: str) -> bytes | None:
        """Content of /proc/<pid>/<name>, None when the process is gone."""
        try:
            with open(f"{self.proc}/{pid}/{name}", "rb") as stream:
                return stream.read()
        except OSError:
            return None


class Systemd:
    """systemctl, with errors that say what was asked."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def call(self, *argv: str, timeout: float = 60) -> RunResult:
        """Run systemctl and return what it said."""
        return self._run(["systemctl", "--no-pager", "--no-ask-password", *argv], timeout)

    def must(self, *argv: str, timeout: float = 60) -> None:
        """Run systemctl; ServiceError when it fails."""
        result = self.call(*argv, timeout=timeout)
        if result.rc != 0:
            reason = (result.stderr or result.stdout).strip()[-1000:]
            if result.timed_out:
                reason = f"no end within {timeout:g} s"
            raise ServiceError(f"systemctl {' '.join(argv)}: {reason or f'rc {result.rc}'}")

    def show(self, unit: str) -> dict[str, str]:
        """Properties of a unit; ``LoadState=not-found`` when there is none. ServiceError without systemd."""
        names = (
            "LoadState,ActiveState,SubState,MainPID,ControlGroup,UnitFileState,Result,NRestarts,FragmentPath,"
            "DropInPaths,NeedDaemonReload,ExecMainStatus"
        )
        result = self.call("show", "-p", names, unit, timeout=30)
        if result.rc != 0:
            reason = (result.stderr or result.stdout).strip() or f"rc {result.rc}"
            raise ServiceError(f"systemd does not answer on this host: {reason[-500:]}")
        found = {}
        for line in result.stdout.splitlines():
            name, _equals, value = line.partition("=")
            found[name] = value
        return found

    def version(self) -> int:
        """Major version of systemd; ServiceError without systemd."""
        result = self.call("--version", timeout=20)
        match = re.match(r"systemd (\d+)", result.stdout)
        if result.rc != 0 or not match:
            raise ServiceError("this host has no systemd (systemctl --version failed); service_unit needs it")
        return int(match.group(1))


class Instance:
    """One instance on one host: what is there, and single steps."""

    def __init__(self, host: Host, request: Request) -> None:
        self.host = host
        self.request = request
        self.systemd = Systemd(host.run)
        try:
            self.unit = unit_file.unit_name(request.instance)
        except unit_file.UnitError as error:
            raise ServiceError(str(error)) from error
        self.unit_path = f"{UNITS}/{self.unit}"
        self.etc = f"{ETC}/{request.instance}"
        self.secrets_dir = f"{self.etc}/secrets"
        self.service_dir = f"{self.etc}/service"
        self.store = UnitStore(host.path(f"{STORE}/instances/{request.instance}"))
        self.problems: list[dict[str, Any]] = []
        self.diff: list[dict[str, str]] = []
        self.differences: list[dict[str, Any]] = []
        self.changed = False

    # -- what is there ---------------------------------------------------------------------------------------------

    def env_path(self, revision: str) -> str:
        """The EnvironmentFile of a revision."""
        return f"{self.etc}/{revision}.env"

    def current(self) -> str | None:
        """The revision that boots: what the unit file names, as long as the store knows it."""
        text = self.host.read(self.unit_path)
        named = unit_file.unit_revision(text) if text is not None else None
        return named if text is not None and self._is_ours(text) else None

    @staticmethod
    def _is_ours(text: str) -> bool:
        return text.startswith(unit_file.MARK)

    def process_environment(self, pid: int) -> dict[str, str]:
        """Environment that a process was started with; {} when it is gone."""
        raw = self.host.read_proc(pid, "environ") or b""
        env = {}
        for item in raw.split(b"\0"):
            name, equals, value = item.partition(b"=")
            if equals:
                env[name.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        return env

    def process_argv(self, pid: int) -> list[str]:
        """argv of a process, [] when it is gone."""
        raw = self.host.read_proc(pid, "cmdline") or b""
        return [item.decode("utf-8", "surrogateescape") for item in raw.split(b"\0")[:-1]]

    def observe(self) -> dict[str, Any]:
        """State of the unit: ``{state, pid, revision, secrets, enabled, result, cgroup, show}``."""
        show = self.systemd.show(self.unit)
        pid = int(show.get("MainPID") or 0)
        env = self.process_environment(pid) if pid else {}
        return {
            "state": show.get("ActiveState", "unknown"),
            "sub_state": show.get("SubState", ""),
            "pid": pid,
            "revision": env.get(unit_file.REVISION_VARIABLE),
            "secrets": env.get(unit_file.SECRETS_VARIABLE),
            "enabled": show.get("UnitFileState") in ("enabled", "enabled-runtime"),
            "result": show.get("Result", ""),
            "restarts": int(show.get("NRestarts") or 0),
            "cgroup": show.get("ControlGroup", ""),
            "show": show,
        }

    def _limits(self, unit_text: str, pid: int) -> list[dict[str, str]]:
        raw = self.host.read_proc(pid, "limits") if pid else None
        if raw is None:
            return []
        parsed = unit_file.parse_unit(unit_text)
        wanted = {name: unit_file.setting(parsed, "Service", name) or "" for name in ("LimitMEMLOCK", "LimitNOFILE")}
        missing = preflight.limits_not_granted(wanted, raw.decode("utf-8", "replace"))
        for item in missing:
            self.problems.append(
                preflight.problem(
                    item["code"],
                    f"{self.unit} asks for {item['limit']}={item['wanted']}, the kernel granted {item['granted']}",
                    "warning",
                )
            )
        return missing

    def _all_problems(self) -> list[dict[str, Any]]:
        return [*self.problems, *self.store.problems]

    # -- steps -----------------------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        make_dir(self.host.path(STORE), 0o711)
        make_dir(self.host.path(f"{STORE}/instances"), 0o700)
        make_dir(self.host.path(unit_file.EMPTY_DIR), 0o555)

    def _note_diff(self, what: str, before: str, after: str) -> None:
        if before != after:
            self.diff.append({"before_header": what, "after_header": what, "before": before, "after": after})

    def _swap(self, revision: Revision) -> None:
        """Make a stored revision the one that boots: its environment first, then the unit in one rename."""
        make_dir(self.host.path(ETC), 0o755)
        make_dir(self.host.path(self.etc), 0o711)
        env_path = self.env_path(revision.revision)
        if self.host.read(env_path) != revision.env:
            write_file(self.host.path(env_path), revision.env, 0o600)
        if self.host.read(self.unit_path) != revision.unit:
            make_dir(self.host.path(UNITS), 0o755)
            write_file(self.host.path(self.unit_path), revision.unit, 0o644)
        if self.store.pointer("current") != revision.revision:
            self.store.point("current", revision.revision)

    def _enable(self) -> None:
        if self.systemd.show(self.unit).get("UnitFileState") != "enabled":
            self.systemd.must("enable", self.unit)
            self.changed = True

    def _start(self, verb: str) -> None:
        # Counters of an earlier crash loop would refuse the start; a unit that never failed has nothing to reset.
        self.systemd.call("reset-failed", self.unit)
        timeout = 180.0
        text = self.host.read(self.unit_path) or ""
        span = unit_file.parse_span(unit_file.setting(unit_file.parse_unit(text), "Service", "TimeoutStartSec") or "90")
        if span is not None:
            timeout = min(span, 3600.0) + 180.0
        self.systemd.must(verb, self.unit, timeout=timeout)
        self.changed = True

    def _prove_argv(self, argv: Sequence[str]) -> None:
        """The process just started has exactly the plan's argv; one that ended at once is for readiness to tell."""
        pid = self.observe()["pid"]
        if not pid:
            return
        seen = self.process_argv(pid)
        if seen and seen != list(argv):
            raise ServiceError(
                f"the process (pid {pid}) was not started with the plan's argv; a drop-in may change ExecStart",
                argv_expected=list(argv),
                argv_seen=seen,
            )

    def _end_leftovers(self, control_group: str) -> list[int]:
        """End what is still in the cgroup of this unit after it stopped; returns the pids."""
        left = preflight.cgroup_processes(control_group, self.host.sys_cgroup)
        for pid in left:
            born = process_start(pid, self.host.proc)
            if born is not None and preflight.in_unit(preflight.cgroup_of(pid, self.host.proc), self.unit):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
        return left

    def _stop(self) -> None:
        seen = self.observe()
        if seen["state"] not in ("inactive", "failed") or seen["pid"]:
            self.systemd.must("stop", self.unit, timeout=300)
            self.changed = True
        if self._end_leftovers(f"/system.slice/{self.unit}"):
            self.changed = True

    def _disable(self, unit: str) -> None:
        if self.systemd.show(unit).get("UnitFileState") in ("enabled", "enabled-runtime"):
            self.systemd.must("disable", unit)
            self.changed = True
