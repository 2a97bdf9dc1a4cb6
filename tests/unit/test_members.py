# SPDX-License-Identifier: GPL-3.0-or-later
"""What the ranks of an instance tell each other while they wait; time passes only when told."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._rollout import too_few_forks
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._members import Members, death_text

HOSTS = ["gpu-01", "gpu-02", "gpu-03"]
OWN = {"code": "gpu_memory", "message": "out of memory", "mend": "take less"}
PEER = {"code": "peer_died", "message": "another rank went away first", "mend": "look there"}


class Clock:
    """``then`` is called after that many seconds of sleep."""

    def __init__(self, after=None, then=None):
        self.now, self.after, self.then = 0.0, after, then

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.then and self.now >= self.after:
            then, self.then = self.then, None
            then()


@pytest.fixture
def ranks(tmp_path):
    clock = Clock()
    made = [Members(str(tmp_path / "wait"), HOSTS, rank, clock, clock.sleep) for rank in range(3)]
    made[0].time = clock
    return made


def test_a_rank_that_is_up_is_watched_until_rank_0_ends(ranks):
    for rank in ranks:
        rank.tell()
    assert ranks[1].watched() and ranks[2].watched()
    ranks[2].tell("ready", "ready")
    assert ranks[1].watched(), "rank 0 waits still"
    ranks[0].tell("ready", "ready")
    assert not ranks[1].watched() and ranks[1].lost() is None


def test_with_fewer_forks_than_ranks_nobody_holds_the_fork_that_another_needs(ranks):
    ranks[0].tell()
    ranks[1].tell()
    assert not ranks[1].watched(), "rank 2 has not begun"
    assert ranks[2].watched(), "all have begun, rank 2 as the last"


def test_a_pause_ends_as_soon_as_there_is_news(ranks):
    for rank in ranks:
        rank.tell()
    clock = ranks[0].time
    ranks[1].pause(10.0)
    assert clock.now == 10.0
    clock.after, clock.then = 12.0, lambda: ranks[2].tell("dead", "failed", OWN)
    ranks[1].pause(10.0)
    assert clock.now == 12.0 and ranks[1].lost()["host"] == "gpu-03"


def test_the_death_of_a_rank_is_told_by_host(ranks):
    ranks[0].tell()
    assert ranks[1].first("crash_loop", OWN, 20.0) is None, "its own cause needs no other"
    assert ranks[0].time.now == 0.0
    assert death_text(ranks[0].lost()) == "rank 1 on gpu-02 is dead: out of memory [gpu_memory]; mend: take less"


def test_a_survivor_waits_for_the_rank_that_died_first(ranks):
    for rank in ranks:
        rank.tell()
    clock = ranks[0].time
    clock.after, clock.then = 3.0, lambda: ranks[1].tell("dead", "failed", OWN)
    first = ranks[0].first("failed", PEER, 20.0)
    assert (first["host"], first["cause"]["code"], clock.now) == ("gpu-02", "gpu_memory", 3.0)


def test_while_it_waits_it_does_not_end_the_others(ranks):
    for rank in ranks:
        rank.tell()
    clock, seen = ranks[0].time, []
    clock.after, clock.then = 5.0, lambda: seen.append(ranks[1].lost())
    assert ranks[0].first("failed", PEER, 20.0) is None and clock.now == 20.0
    assert seen == [None] and ranks[1].lost()["rank"] == 0, "nobody else told of a death, so this is the first"


def test_two_survivors_do_not_wait_for_each_other(ranks):
    for rank in ranks:
        rank.tell()
    ranks[2].tell("ready", "ready")
    ranks[1].tell("dying", "failed", PEER)
    assert ranks[0].first("failed", PEER, 20.0) is None and ranks[0].time.now == 0.0


def test_a_rank_that_was_only_killed_comes_before_one_that_lost_its_peer(ranks):
    for rank in ranks:
        rank.tell()
    ranks[2].tell("ready", "ready")
    ranks[1].tell("dying", "failed", {"code": "scheduler_died", "message": "a child died"})
    assert ranks[0].first("failed", PEER, 20.0)["host"] == "gpu-02"
    assert ranks[1].first("failed", {"code": "scheduler_died", "message": "a child died"}, 20.0) is None


def test_a_host_that_went_away_is_not_called_dead(ranks):
    ranks[1].tell("dead", "unreachable", {"message": "no route"})
    assert death_text(ranks[0].lost()) == "rank 1 on gpu-02 is unreachable: no route"


def test_a_rank_that_followed_is_no_cause(ranks):
    ranks[1].tell("followed", "loading")
    assert ranks[0].lost() is None and ranks[0].first("failed", OWN, 1.0) is None


@pytest.mark.parametrize(("forks", "told"), [(5, True), (15, True), (16, False)])
def test_too_few_forks_for_the_ranks_of_a_wave_are_told_before_it(forks, told):
    fleet = {
        "waves": [
            [{"instance": "small", "hosts": ["a"]}],
            [{"instance": "big", "hosts": [f"h{n}" for n in range(16)]}],
        ],
        "serial": [1, 16],
    }
    text = too_few_forks(fleet, forks)
    assert bool(text) is told and (not told or ("--forks 16" in text and "big" in text and "small" not in text))
    assert too_few_forks({"waves": [fleet["waves"][0] * 9], "serial": [9]}, 5) == "", "hosts by themselves need none"


def test_a_rank_that_came_back_alone_is_apart_from_the_group_that_the_others_are_in(ranks):
    clock = ranks[0].time
    clock.now = 5000.0
    ranks[1].tell("", "ready", up=True, uptime=4000.0)
    ranks[0].tell("", "loading", up=False, uptime=300.0)
    assert ranks[0].apart() is None, "seen once is not seen for a while"
    clock.now += 44.0
    assert ranks[0].apart() is None
    clock.now += 2.0
    cause = ranks[0].apart()
    assert cause["code"] == "ranks_apart" and "3700 s after rank 1 on gpu-02" in cause["message"]
    assert "gpu-02" in cause["mend"] and ranks[1].apart() is None, "the one that came back later tells"


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ({"up": True, "uptime": 4000.0}, {"up": True, "uptime": 300.0}),
        ({"up": False, "uptime": 4000.0}, {"up": False, "uptime": 300.0}),
        ({"up": True, "uptime": 300.0}, {"up": False, "uptime": 290.0}),
        ({"up": True, "uptime": 300.0}, {"up": False, "uptime": 4000.0}),
        ({"up": True, "uptime": None}, {"up": False, "uptime": 300.0}),
        ({"up": True, "uptime": 4000.0}, {"up": False, "uptime": None}),
    ],
    ids=["answers", "others load too", "started together", "the other came later", "unknown there", "unknown here"],
)
def test_ranks_that_may_be_together_are_not_apart(ranks, other, own):
    clock = ranks[0].time
    clock.now = 5000.0
    for _look in range(3):
        ranks[1].tell("", "x", **other)
        ranks[0].tell("", "x", **own)
        assert ranks[0].apart() is None
        clock.now += 100.0
        for name in (other, own):
            name.update(uptime=name["uptime"] and name["uptime"] + 100.0)


def test_a_rank_that_only_takes_too_long_is_not_called_dead(ranks):
    ranks[0].tell("dead", "stuck", {"code": "never_listened", "message": "nothing listens"})
    assert death_text(ranks[1].lost()) == "rank 0 on gpu-01 is not ready: nothing listens [never_listened]"
