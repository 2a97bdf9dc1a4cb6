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
        self.own = []

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


class Own:
    """A request through the router that is answered after some looks."""

    def __init__(self, looks, answer):
        self.looks, self.last = looks, answer

    @property
    def answer(self):
        self.looks -= 1
        return self.last if self.looks < 0 else None


def sender(world, answers, arrives=None):
    """Own requests get ``answers``, the last one repeats; the worker has number ``arrives`` while it runs."""

    def send(url, key, body):
        world.own.append((url, key, body))
        number = len(world.own)
        if number == arrives:
            world.loads = loads(1)
        return Own(4, answers[min(number, len(answers)) - 1])

    return send


def drain(world, timeout=300.0, carry=None, seconds=600.0, check=False, **options):
    wanted = Wanted({"url": URL}, "http://local", "key", timeout, **options)
    return _router.drain([Router(ROUTER, world, "rk")], wanted, world, Clock(), carry or {}, seconds, check)


def join(world, timeout=120.0, check=False, send=None, routers=1, worker=None, carry=None, seconds=600.0, **options):
    options.setdefault("traffic_timeout", 0.0)
    wanted = Wanted({"url": URL, "api_key": "key", **(worker or {})}, "http://local", "key", timeout, **options)
    all_routers = [Router(ROUTER + "x" * number, world, "rk") for number in range(routers)]
    return _router.join(all_routers, wanted, world, send, Clock(), carry or {}, seconds, check)


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
    result = drain(World([ROW]))
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
    ("status", "body", "word"),
    [
        (0, "Connection refused", "does not answer"),
        (401, "", "router_api_key"),
        (500, "boom", "500"),
        (503, "starting", "503"),
        (404, "", "neither /workers nor /list_workers"),
        (307, "https://r/workers", "redirects .307. to https://r/workers"),
        (200, "<html>\n <body>Sign in</body></html>", "with 200: <html> <body>Sign in"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_a_router_that_refuses_is_told_and_nothing_is_changed(status, body, word, check):
    asked = []

    def refuse(method, *_args):
        asked.append(method)
        return Answer(status, body)

    with pytest.raises(RouterError, match=word):
        drain(refuse, check=check)
    assert set(asked) == {"GET"} and (len(asked) < 3 or (status in (0, 503) and not check))


class Restarting(World):
    """A router that does not answer the first times."""

    away = 5

    def router(self, method, parts, body):
        self.away -= 1
        return Answer(0, "Connection refused") if self.away >= 0 else super().router(method, parts, body)


def test_a_router_that_restarts_stops_nothing():
    result = drain(Restarting([ROW, OTHER], loads(0)))
    assert result["drained"] and result["changed"]
    first = drain(Restarting([ROW, OTHER], loads(0)), seconds=2.0)
    assert not first["slice"]["done"] and "does not answer" in first["slice"]["progress"]
    assert join(Restarting([OTHER]))["healthy"]


def test_a_router_that_stays_away_leaves_a_proven_service_and_says_what_is_next():
    world = Restarting([OTHER])
    world.away = 10**6
    result = join(world, timeout=9.0)
    assert result["failed"] and "the service is ready" in result["msg"] and "The next run adds it" in result["msg"]
    assert "does not answer: Connection refused" in result["msg"]


def test_the_last_healthy_worker_of_several_is_refused_unless_asked_for():
    world = World([ROW, {**OTHER, "is_healthy": False}], loads(0))
    with pytest.raises(RouterError, match=r"only healthy worker of 2 .*allow_last"):
        drain(world)
    assert {item[0] for item in world.asked} == {"GET"}
    result = drain(world, allow_last=True)
    assert result["drained"] and "only healthy worker" in result["warnings"][0]
    for rows in ([ROW], [{**ROW, "is_healthy": False}, {**OTHER, "is_healthy": False}], [ROW, OTHER]):
        assert drain(World(rows, loads(0)))["drained"]
    rows = [{**ROW, "worker_type": "prefill"}, {**OTHER, "worker_type": "decode"}]
    assert drain(World([*rows, {**rows[0], "url": "http://w3:1"}], loads(0)))["drained"]
    with pytest.raises(RouterError, match="w3"):
        drain(World([*rows, {**rows[0], "url": "http://w3:1", "is_healthy": False}], loads(0)))


NAMES = {"w1": {"10.0.0.1"}, "w1.example": {"10.0.0.1"}, "10.0.0.1": {"10.0.0.1"}, "w2": {"10.0.0.2"},
         "self": {"127.0.1.1"}}  # fmt: skip


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ("http://10.0.0.1:30000", True),
        ("http://W1.example:30000/", True),
        ("http://w1.example:30000@0", True),
        ("https://w1.example:30000", True),
        ("http://self:30000", True),
        ("http://10.0.0.1:30001", False),
        ("http://w2:30000", False),
        ("http://nobody:30000", False),
        ("http://127.0.0.1:30000", False),
        ("http://localhost:30000", False),
        ("nonsense", False),
    ],
)
def test_a_worker_under_another_name(known, other):
    found = _router.other_spelling(["http://w2:30000", known], URL, lambda host: NAMES.get(host, set()))
    assert found == (known if other else None)


def test_a_worker_under_another_name_is_told_and_not_added_twice(monkeypatch):
    monkeypatch.setattr(_router.socket, "getaddrinfo", lambda *_a, **_k: [(0, 0, 0, "", ("10.0.0.1", 0))])
    for act in (drain, join):
        world = World([{**OTHER, "url": "http://w1.example:30000"}])
        with pytest.raises(RouterError, match=r"knows this worker as http://w1.example:30000.*worker_url"):
            act(world)
        assert {item[0] for item in world.asked} == {"GET"}


def test_every_router_in_front_is_told_before_the_wait():
    worlds = [World([ROW, OTHER], loads(2, 0, 0)), World([{**ROW, "id": "x"}, OTHER])]
    routers = [Router(ROUTER, world) for world in worlds]
    result = _router.drain(
        routers, Wanted({"url": URL}, "http://local", None, 60.0), worlds[0], Clock(), {}, 99.0, False
    )
    assert result["drained"] and [world.rows for world in worlds] == [[OTHER], [OTHER]]
    wanted = Wanted({"url": URL}, "http://local", None, 60.0, 0.0)
    worlds[1].rows.append(ROW)
    assert _router.join(routers, wanted, worlds[0], None, Clock(), {}, 99.0, False)["healthy"]
    assert [len([row for row in world.rows if row["url"] == URL]) for world in worlds] == [1, 1]


def test_an_old_router_that_answers_only_once_the_worker_is_healthy():
    class Slow(World):
        def router(self, method, parts, body):
            answer = super().router(method, parts, body)
            return Answer(0, "timed out") if parts.path == "/add_worker" else answer

    assert join(Slow([OTHER], dialect="urls"))["changed"]

    class There(World):
        def router(self, method, parts, body):
            if parts.path == "/add_worker":
                super().router(method, parts, body)
                return Answer(400, f"Worker {URL} already exists")
            return super().router(method, parts, body)

    assert join(There([OTHER], dialect="urls"))["healthy"]


# ---- whether requests arrive -----------------------------------------------------------------------------------------

GOOD = Answer(200, '{"text": "x"}')


def test_a_clients_request_is_enough():
    world = World([OTHER], loads(0, 0, 0, 1))
    result = join(world, traffic_timeout=60.0)
    assert result["traffic"] == {"seen": True, "how": "worker", "own_requests": 0, "seconds": 0.8}


def test_what_the_router_counts_is_enough():
    world = World([OTHER])
    world.put = lambda url: world.rows.append({**ROW, "url": url, "load": 2})
    assert join(world, traffic_timeout=60.0)["traffic"]["how"] == "router"


def test_a_health_check_that_waits_is_no_request():
    world = World([OTHER], [("/v1/loads", '{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 1}]}')])
    result = join(world, traffic_timeout=5.0, own_requests=False)
    assert not result["traffic"]["seen"]


def test_own_requests_only_when_no_client_comes_and_only_until_one_arrives():
    world = World([OTHER], loads(0))
    result = join(world, traffic_timeout=60.0, send=sender(world, [GOOD], arrives=3))
    assert result["traffic"]["seen"] and result["traffic"]["own_requests"] == 3 and "failed" not in result
    assert result["traffic"]["seconds"] >= _router.WATCH_SECONDS
    urls, keys, bodies = zip(*world.own)
    assert set(urls) == {"http://r/generate"} and set(keys) == {"rk"}
    assert len({body["text"] for body in bodies}) == 3
    assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [32, 64, 64]


def test_a_worker_that_is_neither_prefill_nor_decode_among_pairs_is_told_at_once():
    pair = [{**OTHER, "worker_type": "prefill"}, {**OTHER, "id": "3", "url": "http://c:1", "worker_type": "decode"}]
    world = World(pair, loads(0))
    world.put = lambda url: world.rows.append({**ROW, "url": url, "worker_type": "regular"})
    result = join(world, traffic_timeout=60.0, send=sender(world, [GOOD]))
    assert result["failed"] and "set sglang_role" in result["msg"] and world.own == []


def test_nothing_is_looked_for_where_nothing_was_added():
    world = World([ROW, OTHER], loads(0))
    assert join(world, traffic_timeout=60.0)["traffic"] is None and world.own == []


@pytest.mark.parametrize(
    ("answers", "options", "failed", "word"),
    [
        # The policy cache_aware of 0.2.4 and 0.3.2 did so now and then with two idle workers.
        ([GOOD], {}, False, "12 own requests through the router all went to other workers"),
        ([Answer(500, "boom")], {}, True, "failed, the last with 500: boom"),
        ([Answer(0, "timed out")], {}, True, "no answer: timed out"),
        # The worker refuses the key that the router has for it; the router itself refuses with an empty body.
        ([Answer(401, '{"error": "Unauthorized"}')], {}, True, "401"),
        ([Answer(401, "")], {}, False, "said nothing"),
        ([Answer(400, "this model does not generate")], {}, False, "does not generate"),
        ([Answer(503, "starting"), GOOD], {}, False, "all went to other workers"),
        ([GOOD], {"own_requests": False}, False, "own requests are turned off"),
        ([GOOD], {"traffic_timeout": 2.0}, False, "went to other workers"),
    ],
)
def test_no_request_arrives(answers, options, failed, word):
    world = World([OTHER], loads(0))
    result = join(world, send=sender(world, answers), **{"traffic_timeout": 60.0, **options})
    assert result["traffic"]["seen"] is False and word in result["traffic"]["reason"]
    assert bool(result.get("failed")) is failed and bool(result["warnings"]) is not failed
    assert word in (result["msg"] if failed else result["warnings"][0])
    assert [row["url"] for row in world.rows] == [OTHER["url"], URL], "it stays in the router"
    assert len(world.own) <= 12 and (options.get("own_requests") is not False or world.own == [])


def test_a_worker_that_tells_no_load_is_no_fault():
    world = World([OTHER])
    result = join(world, traffic_timeout=60.0, send=sender(world, [GOOD]))
    assert "failed" not in result and "does not tell its load" in result["warnings"][0]


def test_a_prefill_worker_without_a_decode_worker_waits_for_nothing():
    world = World([{**OTHER, "worker_type": "decode", "is_healthy": False}], loads(0))
    world.put = lambda url: world.rows.append({**ROW, "url": url, "worker_type": "prefill"})
    result = join(world, traffic_timeout=60.0, worker={"worker_type": "prefill"})
    assert "no healthy decode worker" in result["warnings"][0] and "failed" not in result


def test_looking_for_requests_carries_on_over_slices():
    world, carry, slices = World([OTHER], loads(0)), {}, 0
    send = sender(world, [GOOD], arrives=5)
    while True:
        result = json.loads(json.dumps(join(world, traffic_timeout=60.0, send=send, carry=carry, seconds=3.0)))
        slices += 1
        if result["slice"]["done"]:
            break
        carry = result["slice"]["carry"]
    assert slices > 3 and result["traffic"]["own_requests"] == 5 and result["changed"]


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


def test_own_requests_are_at_once_only_as_many_as_workers():
    rows = [{**OTHER, "id": str(number), "url": f"http://w{number}:30000"} for number in range(2, 5)]
    world, most, flying = World(rows, loads(0)), [], []

    def send(url, key, body):
        world.own.append(body)
        flying[:] = [item for item in flying if item.looks >= 0] + [Own(4, GOOD)]
        most.append(len(flying))
        return flying[-1]

    result = join(world, traffic_timeout=60.0, send=send)
    assert max(most) == 4 and most[:3] == [1, 1, 2] and len(world.own) == 24
    assert "all went to other workers" in result["warnings"][0]
