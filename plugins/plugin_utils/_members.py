# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what the ranks of one instance tell each other while their hosts wait in one task.

Each host's wait runs in a worker of its own, and all workers of a run share one folder of the controller. A rank's note
is a small file there, replaced at once, never half written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

# What the survivors of a lost rank say: the higher, the less it can be the first cause.
FOLLOWS = {
    "scheduler_killed": 1,
    "scheduler_died": 1,
    "nccl_failed": 2,
    "watchdog_timeout": 2,
    "scheduler_silent": 2,
    "stopped": 2,
    "peer_died": 3,
}
# How much later a start must be, and how long the others must have answered, to be no matter of seconds.
APART_SECONDS = 45.0
Note = dict[str, Any]


class Members:
    """The notes of one wait: ``folder`` is the wait's own, ``rank`` the position of this host in ``hosts``.

    A note is ``{host, rank, end: "" | dying | dead | followed | ready, state, cause, up, started}``; ``up``: it
    answers, so that it was in a process group with all others; ``started``: of its process, on the controller's clock.
    """

    def __init__(
        self,
        folder: str,
        hosts: Sequence[str],
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.hosts, self.rank = folder, list(hosts), rank
        self.clock, self.sleep = clock, sleep
        self.own: Note = {}
        self.apart_since: Optional[float] = None

    def tell(
        self,
        end: str = "",
        state: str = "",
        cause: Optional[Mapping[str, Any]] = None,
        up: bool = False,
        uptime: Optional[float] = None,
    ) -> None:
        """Replace this rank's note."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self.own = {
            "host": self.hosts[self.rank],
            "rank": self.rank,
            "end": end,
            "state": state,
            "cause": dict(cause or {}),
            "up": up,
            "started": None if uptime is None else self.clock() - uptime,
        }
        part = os.path.join(self.folder, f".{self.rank}.{os.getpid()}")
        with open(part, "w", encoding="utf-8") as handle:
            json.dump(self.own, handle)
        os.replace(part, self._path(self.rank))

    def _path(self, rank: int) -> str:
        return os.path.join(self.folder, f"{rank}.json")

    def notes(self) -> list[Note]:
        """The notes of the other ranks that have begun to wait."""
        found = []
        for rank in range(len(self.hosts)):
            if rank != self.rank:
                try:
                    with open(self._path(rank), encoding="utf-8") as handle:
                        found.append(json.load(handle))
                except FileNotFoundError:
                    continue
        return found

    def lost(self) -> Optional[Note]:
        """The rank whose end ends the others: of those that are dead, the one that most likely was the first."""
        return min((note for note in self.notes() if note["end"] == "dead"), key=lateness, default=None)

    def apart(self) -> Optional[dict[str, Any]]:
        """The cause when this rank waits in vain for others that are still in the process group of an earlier start.

        A rank answers only after all have joined, so that one that was started later and does not answer a while after
        the others do is in no group with them.
        """
        started = self.own.get("started")
        older = [
            note
            for note in self.notes()
            if note["up"] and note["started"] is not None and started and started - note["started"] > APART_SECONDS
        ]
        if self.own.get("up") or not older:
            self.apart_since = None
            return None
        self.apart_since = self.clock() if self.apart_since is None else self.apart_since
        if self.clock() - self.apart_since < APART_SECONDS:
            return None
        other = older[0]
        later = started - other["started"]
        return {
            "code": "ranks_apart",
            "message": f"it was started {later:.0f} s after rank {other['rank']} on {other['host']}, which is in the "
            "process group of its own start: a rank cannot come back alone",
            "mend": f"stop the unit on {other['host']}; the next site.yml then starts all ranks together",
            "lines": [],
        }

    def watched(self) -> bool:
        """Whether a rank that is up goes on watching: rank 0 waits still, and no rank is left that needs this fork."""
        notes = self.notes()
        return len(notes) == len(self.hosts) - 1 and any(note["rank"] == 0 and not note["end"] for note in notes)

    def pause(self, seconds: float) -> None:
        """Wait while there is nothing new for a rank that is up."""
        end = self.clock() + seconds
        while self.watched() and not self.lost() and self.clock() < end:
            self.sleep(0.5)

    def first(self, state: str, cause: Mapping[str, Any], seconds: float) -> Optional[Note]:
        """Tell that this rank is dead. The note of the rank that died before it, None where this one was the first.

        A rank that only says that it lost another one waits up to ``seconds`` until the other was looked at.
        """
        own, _rank = lateness({"rank": self.rank, "cause": cause})
        self.tell("dying" if own else "dead", state, cause)
        end = self.clock() + seconds
        while True:
            notes = self.notes()
            before = [note for note in notes if note["end"] in ("dying", "dead") and lateness(note)[0] < own]
            waiting = any(not note["end"] for note in notes)
            if not own or not waiting or self.clock() >= end or any(not lateness(note)[0] for note in before):
                break
            self.sleep(0.5)
        if own:
            self.tell("dead", state, cause)
        return min(before, key=lateness, default=None)


def lateness(note: Mapping[str, Any]) -> tuple[int, int]:
    """The order of the dead: who may be the first cause, then the ranks."""
    return FOLLOWS.get(str((note.get("cause") or {}).get("code")), 0), int(note["rank"])


def death_text(note: Mapping[str, Any]) -> str:
    """``rank 1 on gpu-02 is dead: <its cause>``."""
    cause = note.get("cause") or {}
    words = {"failed": "dead", "crash_loop": "dead", "stopped": "dead", "unreachable": "unreachable", "apart": "apart"}
    word = words.get(str(note.get("state")), "not ready")
    text = f"rank {note['rank']} on {note['host']} is {word}"
    text += f": {cause.get('message') or note.get('state')}"
    text += f" [{cause['code']}]" if cause.get("code") else ""
    return text + (f"; mend: {cause['mend']}" if cause.get("mend") else "")
