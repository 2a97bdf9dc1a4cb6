# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: run one long piece of work as a chain of short module calls ("slices").

A module cannot speak while it runs, and a controller that is silent for half an hour is ended (AWX). So a long
action calls its module again and again; each call lasts at most C(slice_seconds), and what changed in between is
printed.

The protocol is one key of the module's result::

    slice:
      done: bool            # true: this result is the final one
      carry: {…}            # plain JSON, handed to the next slice as the module's argument `carry`
      state: loading        # a change of it is always printed
      progress: "loading weights 41 % (20 of 46)"   # one line for a human

A result without ``slice`` is final. The module detaches whatever must outlive a slice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Callable, Optional

MAX_SLICE_SECONDS = 45.0
SPEAK_EVERY_SECONDS = 60.0

Call = Callable[[Mapping[str, Any], float], dict[str, Any]]


class SliceReport:
    """Decides which progress lines are printed: a changed state always, anything else at least every ``every`` seconds.

    ``next_slice`` is how long the caller will be silent after this decision.
    """

    def __init__(self, every: float = SPEAK_EVERY_SECONDS) -> None:
        self.every = every
        self._state: Optional[str] = None
        self._text: Optional[str] = None
        self._spoken_at: Optional[float] = None

    def line(self, state: str, text: str, now: float, next_slice: float) -> Optional[str]:
        """The line to print now, or None."""
        due = self._spoken_at is None or now - self._spoken_at + next_slice > self.every
        if state == self._state and not due and text == self._text:
            return None
        self._state, self._text, self._spoken_at = state, text, now
        return f"{state}: {text}" if text and state else (text or state)


def run_slices(
    call: Call,
    speak: Callable[[str], None],
    hard_limit: float,
    slice_seconds: float = 30.0,
    once: bool = False,
    carry: Optional[Mapping[str, Any]] = None,
    transient: tuple[type[BaseException], ...] = (),
    transient_retries: int = 3,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    speak_every: float = SPEAK_EVERY_SECONDS,
    between: Callable[[dict[str, Any]], Optional[dict[str, Any]]] = lambda result: None,
) -> dict[str, Any]:
    """Call ``call(carry, seconds)`` until it is done, and return its last result without the key ``slice``.

    ``once`` (check mode) makes exactly one call. After ``hard_limit`` seconds the last result is returned with
    ``failed`` true and a ``msg``. ``transient`` exceptions (a dropped connection) are tried again up to
    ``transient_retries`` times in a row, from the last ``carry``; then the exception is raised.
    ``between`` is given the result of each slice that is not the last; what it returns instead of None is the end.
    """
    seconds = max(1.0, min(float(slice_seconds), MAX_SLICE_SECONDS))
    report = SliceReport(speak_every)
    begun = clock()
    kept: Mapping[str, Any] = dict(carry or {})
    failures = 0
    while True:
        try:
            result = call(kept, seconds)
        except transient as error:
            failures += 1
            if failures > transient_retries or clock() - begun >= hard_limit:
                raise
            speak(f"the connection failed ({error}); trying again, {failures} of {transient_retries}")
            sleep(min(5.0 * failures, 15.0))
            continue
        failures = 0
        part = result.pop("slice", None)
        if not isinstance(part, dict):
            return result
        elapsed = clock() - begun
        finished = bool(part.get("done")) or bool(result.get("failed")) or bool(result.get("unreachable"))
        line = report.line(str(part.get("state") or ""), str(part.get("progress") or ""), clock(), seconds)
        if line:
            speak(line)
        if finished or once:
            return result
        ended = between(result)
        if ended is not None:
            return ended
        if elapsed >= hard_limit:
            result["failed"] = True
            seen = part.get("progress") or part.get("state") or "nothing"
            result["msg"] = f"gave up after {elapsed:.0f} s (hard limit {hard_limit:.0f} s); last seen: {seen}"
            return result
        kept = part.get("carry") or {}
