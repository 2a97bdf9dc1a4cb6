#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes docs/causes.md from the tables of codes and backends; with ``--check`` only says whether it is up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import BACKENDS
from ansible_collections.gpufleet.sglang.plugins.module_utils._causes import CAUSES
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES, STATES
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_codes import (
    CAUSE_SOURCES,
    PREFLIGHT,
    READINESS,
)

TARGET = ROOT / "docs" / "causes.md"

INTRO = """# Causes and mends

Made by `docs/tools/make_causes.py` from `plugins/module_utils/_codes.py`, `_backends.py`, `_service_codes.py` and
`_causes.py`; do not edit. The first part is what the probe tells, the second part what serving tells.

`probe_info` gives each use of each backend a `state` and a `code`. The code says the cause; this page says how it was
told, who owns the fault, and what mends it. The state in a result may be milder or worse than the one here when the
evidence says so: missing files are `broken`, and only `suspect` when the import works all the same.
"""

MEANINGS = {
    "ok": "it works, as far as the level of evidence reaches",
    "needs_gpu": "whole, and there is no driver or GPU to use it with",
    "unknown": "could not be told",
    "suspect": "it imports, and something about it is not as it should be",
    "unsupported": "it cannot work with this GPU, torch, SGLang or host, and no mend of the wheel changes that",
    "absent": "not installed",
    "wrong_distribution": "another project of the same name",
    "variant_mismatch": "the flavour for another CUDA or vendor than the venv's torch",
    "broken": "installed, and it does not work",
    "venv_absent": "there is no venv",
}


def cell(text: str) -> str:
    """``text`` as the cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def words(text: str) -> str:
    """A text of _causes.py for the page: its groups are names in angle brackets."""
    return cell(re.sub(r"\{(\w+)\}", r"`<\1>`", text))


def service_parts() -> list[str]:
    """The codes of service_unit and service_ready."""
    parts = ["\n## Before a start (service_unit)\n"]
    parts.append(
        "In `problems` of `service_unit`. An error keeps the instance from being started, unless it is in "
        "`accept_problems`; a warning is only told.\n"
    )
    parts.append("| code | severity | cause | mend | source |\n|---|---|---|---|---|")
    for code, item in PREFLIGHT.items():
        parts.append(f"| `{code}` | {item.severity} | {cell(item.text)} | {cell(item.mend)} | {cell(item.source)} |")
    parts.append("\n## While waiting (service_ready)\n")
    parts.append("| code | state | cause | mend | source |\n|---|---|---|---|---|")
    for code, item in READINESS.items():
        parts.append(f"| `{code}` | {item.severity} | {cell(item.text)} | {cell(item.mend)} | {cell(item.source)} |")
    parts.append("\n## Found in the log of a start (service_ready)\n")
    parts.append(
        "The first error that matters decides, not the last line of the cascade. *Lasting*: the same start fails "
        "again, so the wait ends at once. *Follows*: other processes say it about the one that failed; it is told only "
        "when nothing else is known.\n"
    )
    parts.append("| code | cause | mend | lasting | follows | source |\n|---|---|---|---|---|---|")
    seen: set[str] = set()
    for row in CAUSES:
        # Several rows of one code differ in how they read the log, not in what it means.
        if row.code in seen:
            continue
        seen.add(row.code)
        source = CAUSE_SOURCES.get(row.code, "the text that SGLang, torch, CUDA or the kernel writes")
        parts.append(
            f"| `{row.code}` | {words(row.message)} | {words(row.mend)} | {'yes' if row.permanent else 'no'} "
            f"| {'yes' if row.symptom else 'no'} | {cell(source)} |"
        )
    return parts


def page() -> str:
    """The whole page."""
    parts = [INTRO, "## States\n", "| state | meaning |\n|---|---|"]
    parts += [f"| `{state}` | {MEANINGS[state]} |" for state in STATES]
    for state in STATES:
        rows = [(code, entry) for code, entry in CODES.items() if entry.state == state]
        if not rows:
            continue
        parts.append(f"\n## `{state}`\n")
        for code, entry in rows:
            parts.append(f"### `{code}`\n")
            parts.append(f"{entry.text}\n")
            parts.append("| | |\n|---|---|")
            parts += [
                f"| layer | {entry.layer} |", f"| told by | {cell(entry.told)} |", f"| mend | {cell(entry.mend)} |",
                f"| remedy | `{entry.kind}` |", f"| source | {cell(entry.source)} |",
            ]  # fmt: skip
            parts.append("")
    parts.append("## Backends\n")
    parts.append("| backend | use | SGLang imports | distributions |\n|---|---|---|---|")
    for name, backend in BACKENDS.items():
        names = ", ".join(f"`{item}` ({variant})" for item, variant in backend.variants.items())
        for use, data in backend.uses.items():
            modules = ", ".join(f"`{module}`" for module in data.modules)
            parts.append(f"| `{name}` | `{use}` | {modules} | {names} |")
    parts.append("\nVersions that import and do not work:\n")
    parts.append("| backend | uses | versions | SGLang | why | source |\n|---|---|---|---|---|---|")
    for name, backend in BACKENDS.items():
        for row in backend.incompatible:
            parts.append(
                f"| `{name}` | {', '.join(row.uses)} | `{row.versions}` | `{row.sglang}` | {cell(row.why)} "
                f"| {cell(row.source)} |"
            )
    parts += service_parts()
    return "\n".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


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
