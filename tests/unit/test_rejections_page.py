# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every code that a plan can carry is in the table, and docs/rejections.md is what the table says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _gpus,
    _plan_codes,
    _plan_constraints,
    _plan_gpus,
)

ROOT = Path(__file__).resolve().parents[2]
UTILS = ROOT / "plugins" / "module_utils"
# Function, and the position of the code among its arguments.
CALLS = {"reject": 0, "warn": 0, "tell": 0, "Reason": 0, "_problem": 0, "problem": 0, "_row": 2}
SOURCES = (
    "_intents", "_launch_plan", "_plan_backends", "_plan_sizes", "_plan_gpus", "_plan_constraints", "_flags",
    "_fleet_plan",
)  # fmt: skip


def codes_in(source: str) -> Iterator[str]:
    """The literal codes of a util's calls."""
    for node in ast.walk(ast.parse((UTILS / f"{source}.py").read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        position = CALLS.get(name)
        if position is None or len(node.args) <= position:
            continue
        argument = node.args[position]
        branches = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
        for part in branches:
            if (
                isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                and re.fullmatch(r"[a-z0-9_]+", part.value)
            ):
                yield part.value


@pytest.mark.parametrize("source", SOURCES)
def test_every_code_of_the_planner_is_in_the_table(source: str) -> None:
    found = set(codes_in(source))
    assert found <= set(_plan_codes.CODES), sorted(found - set(_plan_codes.CODES))


def test_codes_of_tables_and_of_the_evidence_are_in_the_table() -> None:
    found = {row.code for row in _plan_constraints.CONSTRAINTS} | set(_plan_gpus._MENDS)
    found |= {code for _pattern, _state, code in _gpus._FAILURES}
    assert found <= set(_plan_codes.CODES), sorted(found - set(_plan_codes.CODES))


def test_no_code_stands_in_two_groups() -> None:
    assert sum(len(group) for group in _plan_codes.GROUPS.values()) == len(_plan_codes.CODES)


def test_the_page_is_up_to_date() -> None:
    tool = ROOT / "docs/tools/make_rejections.py"
    result = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
