# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of the reports; the logic is in ``_report.py``."""

from __future__ import annotations

from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _report


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"records": _report.records, "report_table": _report.report_table}
