# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: turn what a run kept of its hosts into records and a terminal table (pure)."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

COLUMNS = ("host", "backend", "before", "cause", "remedy", "after", "service")


def records(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{host: record}``; a record holds the probes before and after, plans, readiness and failure of a host."""
    found = {}
    for host in hosts:
        values = hostvars[host]
        found[host] = {
            "before": values.get("probe_before") or {},
            "after": values.get("probe_results") or {},
            "plans": values.get("rollout_assumed") or values.get("probe_plans") or {},
            "ready": _ready(values),
            "failure": values.get("rollout_failure") or {},
            "reached": "probe_results" in values,
        }
    return found


def _ready(values: Mapping[str, Any]) -> dict[str, Any]:
    results = (values.get("ready_results") or {}).get("results") or []
    return {
        item["item"]["key"]: {key: item.get(key) for key in ("ready", "state", "cause")} for item in results if item.get("item")
    }


def rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row a host and backend, columns as in ``COLUMNS``."""
    table = []
    for host, record in found.items():
        if not record["reached"]:
            table.append(dict.fromkeys(COLUMNS, "") | {"host": host, "before": "unreachable"})
            continue
        service = _service_text(record)
        for venv, before in (record["before"] or {"": {}}).items():
            if not before.get("backends"):
                state = before.get("venv") or {}
                table.append(dict.fromkeys(COLUMNS, "") | {"host": host, "before": state.get("state", "-"), "cause": state.get("message", ""), "service": service})
            for name, backend in (before.get("backends") or {}).items():
                after = (record["after"].get(venv, {}).get("backends") or {}).get(name, {})
                table.append(
                    {
                        "host": host,
                        "backend": name,
                        "before": backend.get("state", ""),
                        "cause": backend.get("code") or "",
                        "remedy": _remedy_text(record["plans"], name, backend),
                        "after": after.get("state", ""),
                        "service": service,
                    }
                )
    return table


def _remedy_text(plans: Mapping[str, Any], name: str, backend: Mapping[str, Any]) -> str:
    for plan in plans.values():
        for remedy in plan.get("remedies", []):
            if remedy.get("backend") == name and remedy.get("required"):
                return remedy.get("summary") or remedy.get("kind") or ""
    if backend.get("state") == "ok":
        return "-"
    return "(not wanted)"


def _service_text(record: Mapping[str, Any]) -> str:
    if record["failure"]:
        return "failed: " + str(record["failure"].get("task", ""))
    if record["ready"]:
        return ", ".join(f"{name}: {result['state']}" for name, result in record["ready"].items())
    if not any(plan.get("service") for plan in record["plans"].values()):
        return "-"
    return "not started"


def report_table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned text with a heading."""
    table = [dict(zip(COLUMNS, COLUMNS)), *rows(found)]
    widths = {column: max(len(row[column]) for row in table) for column in COLUMNS}
    return "\n".join(_line(row, widths) for row in table)


def _line(row: Mapping[str, str], widths: Mapping[str, int], columns: Sequence[str] = COLUMNS) -> str:
    return "  ".join(row[column].ljust(widths[column]) for column in columns).rstrip()
