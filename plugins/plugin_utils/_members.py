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
Note = dict[str, Any]


class Members:
    """The notes of one wait: ``folder`` is the wait's own, ``rank`` the position of this host in ``hosts``.

    A note is ``{host, rank, end: "" | dying | dead | ready, state, cause}``.
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

    def tell(self, end: str = "", state: str = "", cause: Optional[Mapping[str, Any]] = None) -> None:
        """Replace this rank's note."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        note = {
            "host": self.hosts[self.rank],
            "rank": self.rank,
            "end": end,
            "state": state,
            "cause": dict(cause or {}),
        }
        part = os.path.join(self.folder, f".{self.rank}.{os.getpid()}")
        with open(part, "w", encoding="utf-8") as handle:
            json.dump(note, handle)
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
        own = lateness({"rank": self.rank, "cause": cause})
        self.tell("dying" if own[0] else "dead", state, cause)
        end = self.clock() + seconds
        while True:
            before = [note for note in self.notes() if note["end"] in ("dying", "dead") and lateness(note) < own]
            before = [note for note in before if lateness(note)[0] < own[0]]
            open_notes = [note for note in self.notes() if not note["end"]]
            if not own[0] or not open_notes or self.clock() >= end or any(not lateness(note)[0] for note in before):
                break
            self.sleep(0.5)
        if own[0]:
            self.tell("dead", state, cause)
        return min(before, key=lateness, default=None)


def lateness(note: Mapping[str, Any]) -> tuple[int, int]:
    """The order of the dead: who may be the first cause, then the ranks."""
    return FOLLOWS.get(str((note.get("cause") or {}).get("code")), 0), int(note["rank"])


def death_text(note: Mapping[str, Any]) -> str:
    """``rank 1 on gpu-02 is dead: <its cause>``."""
    cause = note.get("cause") or {}
    text = f"rank {note['rank']} on {note['host']} is {'dead' if note.get('state') != 'unreachable' else 'unreachable'}"
    text += f": {cause.get('message') or note.get('state')}"
    text += f" [{cause['code']}]" if cause.get("code") else ""
    return text + (f"; mend: {cause['mend']}" if cause.get("mend") else "")
