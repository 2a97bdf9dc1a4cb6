# SPDX-License-Identifier: GPL-3.0-or-later
"""Draining a worker, against a router and a worker that answer from memory."""

from __future__ import annotations

import json
import urllib.parse

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _router
from ansible_collections.gpufleet.sglang.plugins.module_utils._router import Answer, Router, RouterError, Wanted

URL, ROUTER = "http://w1:30000", "http://r"
# As sglang-router 0.3.2 answers.
ROW = {"id": "5f-uuid", "url": URL, "worker_type": "regular", "is_healthy": True, "load": 0, "connection_mode": "HTTP"}
OTHER = {**ROW, "id": "6a-uuid", "url": "http://w2:30000"}


class Clock:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class World:
    """A router of either dialect, which does what it is told after ``lag`` further questions, and a worker."""

    def __init__(self, rows, loads=(), dialect="workers", lag=0, healthy=True):
        self.rows, self.loads, self.dialect, self.lag = list(rows), list(loads), dialect, lag
        self.healthy, self.pending, self.asked = healthy, [], []

    def __call__(self, method, url, key=None, body=None):
        self.asked.append((method, url, key, body))
        parts = urllib.parse.urlsplit(url)
        if parts.netloc == "r":
            return self.router(method, parts, body)
        if not self.loads:
            return Answer(404, "")
        path, answer = self.loads[0] if len(self.loads) == 1 else self.loads.pop(0)
        return Answer(200, answer) if parts.path == path else Answer(404, "")

    def router(self, method, parts, body):
        query = dict(urllib.parse.parse_qsl(parts.query))
        if method == "GET":
            for item in list(self.pending):
                item[0] -= 1
                if item[0] < 0:
                    item[1]()
                    self.pending.remove(item)
        if self.dialect == "workers":
            if (method, parts.path) == ("GET", "/workers"):
                return Answer(200, json.dumps({"workers": self.rows, "total": len(self.rows)}))
            if method == "DELETE":
                name = urllib.parse.unquote(parts.path.rpartition("/")[2])
                self.pending.append([self.lag, lambda: self.drop(name)])
                return Answer(202, "{}")
            if (method, parts.path) == ("POST", "/workers"):
                self.pending.append([self.lag, lambda: self.put(body["url"])])
                return Answer(202, "{}")
        elif parts.path == "/list_workers":
            return Answer(200, json.dumps({"urls": [row["url"] for row in self.rows]}))
        elif parts.path == "/remove_worker":
            self.drop(query["url"])
            return Answer(200, "removed")
        elif parts.path == "/add_worker":
            self.put(query["url"])
            return Answer(200, "added")
        return Answer(404, "")

    def drop(self, name):
        self.rows = [row for row in self.rows if name not in (row.get("id"), row["url"])]

    def put(self, url):
        self.rows.append({**ROW, "url": url, "is_healthy": self.healthy})


def loads(*counts):
    return [("/v1/loads", json.dumps({"loads": [{"num_running_reqs": n, "num_waiting_reqs": 0}]})) for n in counts]


def drain(world, timeout=300.0, carry=None, seconds=600.0, check=False):
    wanted = Wanted({"url": URL}, "http://local", "key", timeout)
    return _router.drain(Router(ROUTER, world, "rk"), wanted, world, Clock(), carry or {}, seconds, check)


def join(world, timeout=120.0, check=False):
    wanted = Wanted({"url": URL, "api_key": "key"}, "http://local", "key", timeout)
    return _router.join(Router(ROUTER, world, "rk"), wanted, Clock(), {}, 600.0, check)


@pytest.mark.parametrize("dialect", ["workers", "urls"])
def test_removed_then_waited_for(dialect):
    world = World([ROW, OTHER], loads(3, 1, 0, 2, 0, 0), dialect, lag=2)
    result = drain(world)
    assert result["drained"] and result["changed"] and result["slice"]["done"] and result["running"] == 0
    assert result["others"] == ["http://w2:30000"] and result["warnings"] == []
    assert [row["url"] for row in world.rows] == ["http://w2:30000"]
    assert world.asked[0][2] == "rk", "the router is asked with its own key"
    assert all(key == "key" for _method, url, key, _body in world.asked if url.startswith("http://local"))


def test_one_moment_of_idleness_is_not_enough():
    world = World([], loads(0, 4, 0, 0))
    assert drain(world)["drained"] and len(world.loads) == 1


def test_the_limit_is_a_warning_and_says_what_still_runs():
    result = drain(World([ROW, OTHER], loads(7)), timeout=5.0)
    assert not result["drained"] and result["slice"]["done"] and "7 running" in result["warnings"][0]


def test_slices_carry_on():
    first = drain(World([ROW, OTHER], loads(7)), seconds=3.0)
    assert not first["slice"]["done"] and first["slice"]["carry"]["changed"] is True
    last = drain(World([OTHER], loads(0)), carry=first["slice"]["carry"])
    assert last["drained"] and last["changed"]


def test_the_last_healthy_worker_and_a_worker_that_tells_nothing_are_told():
    result = drain(World([ROW, {**OTHER, "is_healthy": False}]))
    assert result["drained"] and len(result["warnings"]) == 2 and "only healthy worker" in result["warnings"][0]


def test_check_mode_asks_and_changes_nothing():
    world = World([ROW])
    assert drain(world, check=True)["changed"] and {item[0] for item in world.asked} == {"GET"}
    world = World([])
    assert join(world, check=True)["changed"] and {item[0] for item in world.asked} == {"GET"}


def test_parts_of_a_worker_by_rank_go_together():
    world = World([{**ROW, "id": "a", "url": URL + "@0"}, {**ROW, "id": "b", "url": URL + "@1"}, OTHER], loads(0))
    assert drain(world)["drained"] and world.rows == [OTHER]
    assert not _router.same_worker("http://w1:300001", URL) and _router.same_worker("HTTP://W1:30000/", URL)


@pytest.mark.parametrize("dialect", ["workers", "urls"])
def test_joined_once(dialect):
    world = World([OTHER], dialect=dialect, lag=3)
    assert join(world)["changed"] and join(world)["changed"] is False
    assert [row["url"] for row in world.rows] == ["http://w2:30000", URL]
    posted = [body for method, _url, _key, body in world.asked if method == "POST"]
    assert posted == [{"url": URL, "api_key": "key"} if dialect == "workers" else {}]


def test_a_router_that_does_not_find_it_healthy_is_a_failure():
    result = join(World([], healthy=False), timeout=9.0)
    assert result["failed"] and "not healthy yet" in result["msg"] and "key" not in result["msg"]


@pytest.mark.parametrize(
    ("status", "word"), [(0, "does not answer"), (401, "router_api_key"), (500, "500")]
)  # fmt: skip
def test_a_router_that_refuses_is_told(status, word):
    with pytest.raises(RouterError, match=word):
        drain(lambda *_args: Answer(status, "Connection refused"))


def test_decode_workers_do_not_replace_the_only_prefill_worker():
    idle = [("/v1/loads", '{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}')]
    rows = [{**ROW, "worker_type": "prefill"}, {**OTHER, "worker_type": "decode"}]
    result = drain(World(rows, idle))
    assert result["drained"] and result["others"] == []
    assert result["warnings"] == [f"{URL} was the router's only healthy prefill worker: requests fail until it is back"]
    assert drain(World([*rows, {**rows[0], "id": "x", "url": "http://w3:30000"}], idle))["warnings"] == []


@pytest.mark.parametrize(
    ("path", "body", "load"),
    [
        ("/v1/loads", '{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 1}]}', (3, 1)),
        (
            "/v1/loads",
            '{"loads": [{"num_running_reqs": 0, "disaggregation": {"prefill_inflight_queue_reqs": 2}}]}',
            (2, 0),
        ),
        ("/get_load", '[{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2}]', (3, 2)),
        ("/metrics", 'sglang:num_running_reqs{model="m"} 4.0\nsglang:num_queue_reqs{model="m"} 1.0\n', (4, 1)),
        ("/metrics", "sglang:num_running_reqs 0.0\nsglang:num_prefill_inflight_queue_reqs 3.0\n", (3, 0)),
        ("/metrics", "# nothing of ours\n", None),
        ("/v1/loads", "<html>", None),
    ],
)
def test_loads_of_all_versions(path, body, load):
    found = _router.read_load("http://w", World([], [(path, body)]))
    assert (found and (found.running, found.queued)) == load
