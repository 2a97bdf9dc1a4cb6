# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ends of logs as fleets see them: the first error that matters, among what is harmless and what only follows from it.

Each tail stands behind the lines that a healthy start writes too, and before what the other processes say about it.
"""

from __future__ import annotations

import pathlib
import re

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._causes import CAUSES, find_cause

LOGS = pathlib.Path(__file__).parent.parent / "fixtures" / "logs"
# Written by servers that go on to serve.
HARMLESS = (LOGS / "harmless.txt").read_text(encoding="utf-8").splitlines()
# What the other processes say when one has died.
CASCADE = (LOGS / "cascade.txt").read_text(encoding="utf-8").splitlines()


def parts(name: str) -> list[tuple[str, str]]:
    """What stands under the lines that begin with ``###`` in a file."""
    found = [part.partition("\n") for part in re.split(r"(?m)^### ", (LOGS / name).read_text(encoding="utf-8"))[1:]]
    return [(head, text.rstrip("\n")) for head, _newline, text in found]


TAILS = parts("tails.txt")
# Warnings, and errors that somebody caught: a start goes on after them.
HANDLED = parts("handled.txt")


def scheduler(text: str) -> list[str]:
    """As a traceback of rank 1, if the text is an exception; as it stands otherwise."""
    head = [
        "[2026-11-30 20:00:36 TP1 EP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/opt/v/lib/sglang/srt/managers/scheduler.py", line 4325, in run_scheduler_process',
        "    scheduler = Scheduler(",
    ]
    return [*head, *text.splitlines(), ""]


@pytest.mark.parametrize(("code", "text"), TAILS)
def test_the_first_error_that_matters(code: str, text: str) -> None:
    cause = find_cause([*HARMLESS, *text.splitlines(), *CASCADE])
    assert cause["code"] == code, (cause["code"], cause["message"])
    assert "{" not in cause["message"] + cause["mend"]
    shown = "\n".join(cause["lines"])
    assert any(line[:80] in shown for line in text.splitlines() if line.strip())


@pytest.mark.parametrize(
    ("code", "text"),
    [(c, t) for c, t in TAILS if c not in ("flags_rejected", "port_taken") and "launch_server.py:" not in t],
)
def test_inside_of_a_ranks_traceback(code: str, text: str) -> None:
    assert find_cause([*HARMLESS, *scheduler(text), *CASCADE])["code"] == code


def test_harmless_lines_name_no_cause() -> None:
    for line in HARMLESS:
        assert "no error" in find_cause([line])["message"], line
    assert find_cause(HARMLESS)["code"] == "unknown"


def test_only_the_cascade_is_told_as_what_it_is() -> None:
    code = find_cause([*HARMLESS, *CASCADE])["code"]
    assert {row.code: row.symptom for row in CAUSES}[code]


@pytest.mark.parametrize(("name", "text"), HANDLED, ids=[name for name, _text in HANDLED])
def test_what_was_dealt_with_is_no_cause(name: str, text: str) -> None:
    assert find_cause(text.splitlines())["code"] == "unknown"
    oom = scheduler("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert find_cause([*text.splitlines(), *oom, *CASCADE])["code"] == "gpu_out_of_memory"
    new = find_cause([*text.splitlines(), *scheduler("FrobnicationError: out of phase"), *CASCADE])
    assert new["code"] == "unknown" and "FrobnicationError" in new["message"]
