# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of verify.yml; the logic is in ``_verify.py``."""

from __future__ import annotations

from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _verify


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"verdicts": _verify.verdicts, "verdict_text": _verify.verdict_text}
