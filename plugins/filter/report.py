# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of the reports; the logic is in ``_report.py``, ``_saved_report.py`` and ``_metrics.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _backends,
    _codes,
    _intents,
    _metrics,
    _report,
    _saved_report,
)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _intents.plain(values[name]) for name in _report.KEPT if name in values}


def records(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """Hosts → their records; see ``_report.records``."""
    names = [str(host) for host in hosts]
    return _report.records(names, {host: _kept(hostvars[host]) for host in names})


def report_metrics(values: Mapping[str, Any], now: int) -> dict[str, str]:
    """The variables of a host → its files for node_exporter."""
    found = _report.records(["host"], {"host": _kept(values)})
    return _metrics.metrics(_report.document(found)["hosts"]["host"], int(now))


def apply_report(
    values: Mapping[str, Any], path: Optional[str] = None, host: str = "", codes: Any = None, backends: Any = None
) -> dict[str, Any]:
    """The variables of a host → ``{plans, refused}``: what may be carried out, and why nothing may be."""
    try:
        report = None
        if path:
            report = _saved_report.load(_read(str(path)), str(path))
        return _saved_report.apply_host(
            report,
            str(host),
            _intents.plain(values.get("probe_results") or {}),
            _intents.plain(values.get("probe_plans") or {}),
            _saved_report.choices(_intents.plain(codes), "sglang_remediate_codes", _codes.CODES),
            _saved_report.choices(_intents.plain(backends), "sglang_remediate_backends", _backends.BACKENDS),
        )
    except ValueError as error:
        return {"plans": {}, "refused": [f"{host}: {error}"]}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except OSError as error:
        raise _saved_report.ReportError(
            f"sglang_apply_report: {path}: {error.strerror}; name the report.json of a run"
        ) from None


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "apply_report": apply_report,
            "records": records,
            "report_metrics": report_metrics,
            "report_table": _report.report_table,
        }
