#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make docs/variables.md and docs/modules.md from the one place where each thing is defined.

make_reference.py [--check]   --check compares and fails when a page is not what would be made.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents


def variables_page() -> str:
    """The user's inventory variables, in the order of their definition."""
    lines = [
        "<!-- Made by docs/tools/make_reference.py from plugins/module_utils/_intents.py; do not edit. -->",
        "# Inventory variables",
        "",
        "The flat variables describe one instance named `default`, or the defaults of every entry of",
        "`sglang_instances`, where the same keys stand without the prefix.",
        "Variables marked *host* hold for the host or the run.",
        "Values of `-e` and AWX surveys may be strings: they are turned into the type.",
        "",
        "| variable | type | default | scope | meaning |",
        "|---|---|---|---|---|",
    ]
    for variable in _intents.VARIABLES:
        kind = " · ".join(f"`{choice}`" for choice in variable.choices) or variable.type
        default = "none" if variable.default is None else f"`{json.dumps(variable.default)}`"
        text = variable.description.replace("|", "\\|")
        lines.append(f"| `{variable.name}` | {kind} | {default} | {variable.scope} | {text} |")
    return "\n".join(lines) + "\n"


def constant(path: Path, name: str) -> str:
    """The string bound to ``name`` at the top of a module, read without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return str(ast.literal_eval(node.value))
    return ""


def sentence(text: object) -> str:
    """Documentation text (a string or a list of strings) as one line of a table."""
    parts = text if isinstance(text, list) else [text]
    return " ".join(str(part).strip().replace("\n", " ").replace("|", "\\|") for part in parts if part)


def fields(entries: dict, depth: int = 0) -> list[str]:
    """Table rows of options or return values, nested ones indented."""
    rows = []
    for name, about in (entries or {}).items():
        about = about or {}
        kind = about.get("type", "")
        if about.get("elements"):
            kind += f" of {about['elements']}"
        if about.get("choices"):
            kind += ": " + ", ".join(map(str, about["choices"]))
        flag = " **required**" if about.get("required") else ""
        default = f" (default `{about['default']}`)" if about.get("default") is not None else ""
        rows.append(
            f"| {'&nbsp;' * 4 * depth}`{name}` | {kind} | {sentence(about.get('description'))}{flag}{default} |"
        )
        rows += fields(about.get("suboptions") or about.get("contains") or {}, depth + 1)
    return rows


def modules_page() -> str:
    """Options, return values and an example of every module."""
    lines = ["<!-- Made by docs/tools/make_reference.py from plugins/modules; do not edit. -->", "# Modules", ""]
    for path in sorted((ROOT / "plugins/modules").glob("*.py")):
        docs = yaml.safe_load(constant(path, "DOCUMENTATION"))
        returns = yaml.safe_load(constant(path, "RETURN")) or {}
        lines += [
            f"## {path.stem}",
            "",
            sentence(docs["short_description"]) + ".",
            "",
            sentence(docs["description"]),
            "",
        ]
        lines += ["| option | type | meaning |", "|---|---|---|", *fields(docs.get("options") or {}), ""]
        lines += ["| returned | type | meaning |", "|---|---|---|", *fields(returns), ""]
        example = constant(path, "EXAMPLES").strip()
        if example:
            lines += ["```yaml", example, "```", ""]
    return "\n".join(lines)


def main() -> int:
    """Write the pages, or compare them."""
    stale = []
    for name, text in (("variables.md", variables_page()), ("modules.md", modules_page())):
        path = ROOT / "docs" / name
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"docs/{', docs/'.join(stale)}: not what would be made; run: make docs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
