# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: versions compared the way pip does it, with ranges that can be unknown."""

from __future__ import annotations

import re
from typing import Any, Optional

_VERSION = re.compile(
    r"""\s*v?(?:(?P<epoch>[0-9]+)!)?(?P<release>[0-9]+(?:\.[0-9]+)*)
    (?:[-_.]?(?P<pre>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<pre_n>[0-9]*))?
    (?:-(?P<post_bare>[0-9]+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>[0-9]*))?
    (?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>[0-9]*))?
    (?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?\s*\Z""",
    re.VERBOSE | re.IGNORECASE,
)
_CLAUSE = re.compile(r"\s*(==|!=|<=|>=|<|>)\s*(\S+?)\s*\Z")
_PRE = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}


def parse(version: Optional[str]) -> Optional[tuple[Any, ...]]:
    """A key that orders like the version, or None for what is no version. Local parts (``+cu130``) do not count."""
    match = _VERSION.match(version or "")
    if not match:
        return None
    release = [int(part) for part in match["release"].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    dev = int(match["dev_n"] or 0) if match["dev"] else None
    if match["pre"]:
        pre: tuple[int, int] = (_PRE[match["pre"].lower()], int(match["pre_n"] or 0))
    elif dev is not None and not match["post"] and not match["post_bare"]:
        pre = (-1, 0)
    else:
        pre = (9, 0)
    post = -1
    if match["post"] or match["post_bare"]:
        post = int(match["post_n"] or match["post_bare"] or 0)
    return (int(match["epoch"] or 0), tuple(release), pre, post, float("inf") if dev is None else dev)


def within(version: Optional[str], wanted: str) -> Optional[bool]:
    """Whether ``version`` is in the range ``wanted`` (``>=0.5.6,<0.5.13``, ``==0.5.15.*``; empty means every version).

    None when the version cannot be told, so that a rule can say "unknown" and does not guess.
    """
    if not wanted:
        return True
    key = parse(version)
    if key is None:
        return None
    for clause in wanted.split(","):
        match = _CLAUSE.match(clause)
        if not match:
            raise ValueError(f"not a version range: {wanted!r}")
        operator, bound = match.groups()
        if bound.endswith(".*"):
            prefix = tuple(int(part) for part in bound[:-2].split("."))
            given = (key[1] + (0,) * len(prefix))[: len(prefix)]
            if (given == prefix) != (operator == "=="):
                return False
            continue
        other = parse(bound)
        if other is None:
            raise ValueError(f"not a version range: {wanted!r}")
        holds = {
            "==": key == other,
            "!=": key != other,
            "<=": key <= other,
            ">=": key >= other,
            "<": key < other,
            ">": key > other,
        }[operator]
        if not holds:
            return False
    return True
