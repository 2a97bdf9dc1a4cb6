# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every code that serving tells is in the table that the documentation is made from, and no code is made up there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._causes import CAUSES
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES
from ansible_collections.gpufleet.sglang.plugins.module_utils._host_preflight import _ACCESS_CODES
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_codes import CAUSE_SOURCES, PREFLIGHT, READINESS

UTILS = Path(__file__).resolve().parents[2] / "plugins" / "module_utils"


def texts(node: ast.AST) -> Iterator[str]:
    """The strings that an expression may be: itself, or either side of a condition."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "*" + "".join(part.value for part in node.values if isinstance(part, ast.Constant))


def told(names: tuple[str, ...], functions: tuple[str, ...]) -> set[str]:
    """Codes in calls of ``functions``, in ``code = …`` and in ``{"code": …}`` of the named files."""
    found: set[str] = set()
    for name in names:
        for node in ast.walk(ast.parse((UTILS / name).read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in functions and node.args:
                    found.update(texts(node.args[0]))
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        found.update(texts(value))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id == "code":
                        found.update(texts(node.value))
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        for part, value in zip(target.elts, node.value.elts):
                            if isinstance(part, ast.Name) and part.id == "code":
                                found.update(texts(value))
    return found


def test_every_code_of_service_unit_is_documented() -> None:
    files = (
        "_unit_file.py", "_host_preflight.py", "_service_unit.py", "_unit_store.py", "_unit_host.py", "_unit_runs.py",
        "_unit_deploy.py", "_unit_back.py",
    )  # fmt: skip
    assert told(files, ("problem", "_problem")) | {c for pair in _ACCESS_CODES.values() for c in pair} == set(PREFLIGHT)


def test_every_code_of_readiness_is_documented() -> None:
    assert told(("_readiness.py",), ("_cause",)) == set(READINESS)


def test_sources_are_of_known_causes() -> None:
    assert set(CAUSE_SOURCES) <= {row.code for row in CAUSES}


def test_one_code_means_one_fault() -> None:
    """A code in several tables is one fault, seen at another time; each such pair was looked at."""
    causes = {row.code for row in CAUSES}
    assert causes & set(PREFLIGHT) == {
        "port_taken", "port_privileged", "shm_small", "memory_low", "model_path_absent",
        "cache_not_writable", "cache_noexec",
    }  # fmt: skip
    assert set(CODES) & set(PREFLIGHT) == {"venv_absent", "venv_unreadable_by_user"}
    assert causes & set(READINESS) == set()


@pytest.mark.parametrize("code", sorted({row.code for row in CAUSES} & set(CODES)))
def test_a_mend_is_given_in_both(code: str) -> None:
    assert CODES[code].mend and next(row for row in CAUSES if row.code == code).mend
