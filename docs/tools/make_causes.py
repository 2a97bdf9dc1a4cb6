#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes docs/causes.md from the tables of codes and backends; with ``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import BACKENDS
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES, STATES

TARGET = ROOT / "docs" / "causes.md"

INTRO = """# Causes and mends

Made by `docs/tools/make_causes.py` from `plugins/module_utils/_codes.py` and `_backends.py`; do not edit.

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
