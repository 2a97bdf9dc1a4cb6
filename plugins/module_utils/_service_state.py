# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what an instance's service is doing, without disturbing it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _log_events, _unit_file
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context

_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "MainPID", "Result", "ExecMainStatus", "NRestarts", "UnitFileState",
    "FragmentPath", "ControlGroup", "User",
)  # fmt: skip
_BACKEND = re.compile(
    r"(?:^|/)(?:deep_ep|mooncake|nixl|mori|pplx|uccl)[^/]*/|"
    r"/(?:[^/]*(?:deep_ep|hybrid_ep)[^/]*|lib(?:nvshmem|nccl|nixl|mooncake|transfer_engine|ucp|ibverbs|mlx5)[^/]*)\Z"
)
# Wheels bring copies of common libraries, a hash in their names: a hundred of them say nothing about a backend.
VENDORED = re.compile(r"\.libs/(?:[^/]+/)*[^/]*-[0-9a-f]{8}\.so")
_MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s+(/[^\n]*)$", re.MULTILINE)


def parse_show(text: str) -> dict[str, str]:
    """``systemctl show``'s lines ``Name=value``."""
    out = {}
    for line in text.replace("\r", "").split("\n"):
        name, equals, value = line.partition("=")
        if equals and re.match(r"[A-Za-z]+\Z", name):
            out[name] = value.strip()
    return out


def parse_argv(text: str) -> list[str]:
    """``/proc/<pid>/cmdline`` as a list, values of secret flags replaced."""
    if text.endswith("\0"):
        text = text[:-1]
    return _log_events.redact_argv(text.split("\0")) if text else []


def parse_maps(text: str) -> list[str]:
    """Backend libraries that a ``/proc/<pid>/maps`` shows, each once; a replaced file keeps its `` (deleted)``."""
    return sorted({path for path in _MAPPED.findall(text) if _BACKEND.search(path) and not VENDORED.search(path)})


def cgroup_pids(context: Context, group: str) -> list[int]:
    """Processes of a control group and of the groups below it, in either hierarchy; empty where none is seen."""
    if not group.startswith("/") or ".." in group.split("/"):
        return []
    for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        pids: set[int] = set()
        for folder, _names, files in os.walk(context.path(top + group)):
            if "cgroup.procs" in files:
                try:
                    with open(os.path.join(folder, "cgroup.procs"), encoding="ascii", errors="replace") as stream:
                        pids.update(int(line) for line in stream if re.match(r"[0-9]+\s*\Z", line))
                except OSError:
                    continue
        if pids:
            return sorted(pids)
    return []


def loaded_libraries(context: Context, pids: Iterable[int]) -> Optional[list[str]]:
    """Backend libraries over all processes, or None where no process's maps could be read."""
    found: set[str] = set()
    read = False
    for pid in pids:
        text = context.read(f"/proc/{pid}/maps", 1 << 25)
        if text is not None:
            read = True
            found.update(parse_maps(text))
    return sorted(found) if read else None


def running_revision(context: Context, pid: int) -> Optional[str]:
    """The revision in the environment of a running process; nothing else of the environment is looked at."""
    for entry in (context.read(f"/proc/{pid}/environ") or "").split("\0"):
        name, _equals, value = entry.partition("=")
        if name == _unit_file.REVISION_VARIABLE:
            return value
    return None


def read_service(context: Context, unit: str) -> dict[str, Any]:
    """``service`` of contracts.md for ``unit``.

    ``state`` is systemd's ActiveState, ``absent`` where there is no such unit, ``unknown`` where systemd gave no
    answer. ``revision`` is that of the running process, else of the unit file; ``unit_revision`` that of the file.
    ``loaded_libraries`` is None where they could not be read (not root), empty where no backend is loaded.
    """
    out: dict[str, Any] = dict.fromkeys(
        ("sub_state", "main_pid", "result", "exit_status", "restarts", "enabled", "user", "fragment", "revision")
    )
    out.update(unit=unit, state="unknown", code=None, message="", argv=[], loaded_libraries=[], pids=[])
    out.update(unit_revision=None)
    told = context.run(["systemctl", "show", unit, "--property=" + ",".join(_PROPERTIES)], context.command_timeout)
    shown = parse_show(told.stdout)
    if told.rc != 0 or "LoadState" not in shown:
        first = next((line.strip() for line in (told.stderr + "\n" + told.stdout).split("\n") if line.strip()), "")
        ending = f"no answer in {context.command_timeout:g} s" if told.timed_out else f"rc {told.rc}"
        return dict(out, code="systemd_unavailable", message=f"systemctl show ({ending}): {first}".rstrip(": "))
    if shown["LoadState"] == "not-found":
        return dict(out, state="absent")
    pid = _number(shown.get("MainPID"))
    out.update(
        state=shown.get("ActiveState") or "unknown",
        sub_state=shown.get("SubState") or None,
        result=shown.get("Result") or None,
        exit_status=_number(shown.get("ExecMainStatus")),
        restarts=_number(shown.get("NRestarts")),
        enabled=shown.get("UnitFileState") or None,
        user=shown.get("User") or None,
        fragment=shown.get("FragmentPath") or None,
    )
    if out["fragment"]:
        out["unit_revision"] = _unit_file.unit_revision(context.read(out["fragment"]) or "")
    out["revision"] = out["unit_revision"]
    if pid:
        out["main_pid"] = pid
        out["argv"] = parse_argv(context.read(f"/proc/{pid}/cmdline") or "")
        out["pids"] = cgroup_pids(context, shown.get("ControlGroup") or "") or [pid]
        out["loaded_libraries"] = loaded_libraries(context, out["pids"])
        out["revision"] = running_revision(context, pid) or out["unit_revision"]
    return out


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text and re.match(r"[0-9]{1,10}\Z", text) else None


def gather(context: Context) -> dict[str, Any]:
    """``service`` of the probe."""
    return read_service(context, context.unit)
