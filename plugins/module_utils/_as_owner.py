# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: run a program of a probed host as the one who owns it, never somebody else's as root."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _drop
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult


def run_as_owner(
    context: Context,
    argv: Sequence[str],
    timeout: float,
    owned: Sequence[str],
    environment: Optional[Mapping[str, str]] = None,
) -> RunResult:
    """Run ``argv`` as the owner of the real paths ``owned``; with the context's runner where that is root or oneself.

    rc 127 where nobody can be told (a path is gone, several owners) or this process may not act as the owner.
    """
    try:
        owner = _drop.owner_of(owned)
        if os.geteuid() == 0 and owner.uid != 0:
            return _drop.run_as(owner, argv, timeout, _drop.environment(owner, extra=environment))
    except (OSError, _drop.CannotDrop) as error:
        return RunResult(127, "", str(error))
    return context.run(argv, timeout)
