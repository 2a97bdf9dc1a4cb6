# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: run a command with a time limit, so that callers take the runner as an argument."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, Optional


class RunResult(NamedTuple):
    """What a command did. ``rc`` is 127 when it could not be started, -9 (with ``timed_out``) when it was ended."""

    rc: int
    stdout: str
    stderr: str
    timed_out: bool = False


Run = Callable[[Sequence[str], float], RunResult]


def run(argv: Sequence[str], timeout: float, env: Optional[Mapping[str, str]] = None) -> RunResult:
    """Run ``argv`` (no shell, LC_ALL=C, no standard input) for at most ``timeout`` seconds; never raises.

    The command gets its own process group, and the whole group is ended when the time is over.
    """
    full_env = dict(os.environ if env is None else env, LC_ALL="C", LANGUAGE="C")
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=full_env,
            start_new_session=True,
        )
    except OSError as error:
        return RunResult(127, "", str(error))
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        try:
            # A child that left the group can hold the pipes open: do not wait for it.
            out, err = process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            out, err = b"", b""
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        return RunResult(-9, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), True)
    return RunResult(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
