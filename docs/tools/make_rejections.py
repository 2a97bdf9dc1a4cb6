#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes docs/rejections.md from the table of a plan's codes; with ``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpufleet.sglang.plugins.module_utils import _rules
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_codes import GROUPS
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_constraints import CONSTRAINTS

TARGET = ROOT / "docs" / "rejections.md"

INTRO = """# What a plan refuses, and what it warns of

Made by `docs/tools/make_rejections.py` from `plugins/module_utils/_plan_codes.py`, `_plan_constraints.py` and
`_rules.py`; do not edit.

A rejection stops the run before anything is changed, and all of them are told at once, each with the variable or flag,
its value, the figures and a way out. A warning lets the plan pass. Where both are possible the evidence decides: what
nobody has read or seen about a version is a warning. How plans are made: [plan.md](plan.md); codes of backends:
[causes.md](causes.md).
"""


def cell(text: str) -> str:
    """``text`` as the cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, codes in GROUPS.items():
        parts += [f"## {title}\n", "| code | | meaning | mend |", "|---|---|---|---|"]
        parts += [
            f"| `{code}` | {entry.kind} | {cell(entry.text)} | {cell(entry.mend)} |" for code, entry in codes.items()
        ]
        parts.append("")
    parts += ["## Which versions refuse what\n", "| code | SGLang | source |", "|---|---|---|"]
    parts += [f"| `{row.code}` | {cell(row.sglang) or 'all'} | {cell(row.source)} |" for row in CONSTRAINTS]
    parts += ["", "## Which architectures have the kernels\n", "| flags | values | architectures | SGLang | source |"]
    parts.append("|---|---|---|---|---|")
    for rule in _rules.ARCH_RULES:
        flags, values = (", ".join(f"`{item}`" for item in items) for items in (rule.flags, rule.values))
        parts.append(
            f"| {flags} | {values} | {', '.join(rule.archs)} | {cell(rule.sglang) or 'all'} | {cell(rule.source)} |"
        )
    parts += ["", f"Smallest compute capability of a quantisation ({_rules.MIN_CAPABILITY_SOURCE}):\n"]
    parts += ["| method | SM | SGLang |", "|---|---|---|"]
    parts += [f"| `{row.method}` | {row.minimum} | {row.sglang or 'all'} |" for row in _rules.MIN_CAPABILITY]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != text:
            print(f"{TARGET.relative_to(ROOT)} is out of date: run {Path(__file__).name}", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
