# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: takes a worker out of SGLang's router until it is idle, and puts it back.

Two dialects of the router are spoken, and found out by asking: ``/workers`` (0.2.0 and later; removal and addition are
accepted and done in the background) and ``/list_workers``, ``/add_worker?url=``, ``/remove_worker?url=`` (0.1.5 to
0.1.9; addition lasts until the worker is healthy). Before 0.1.5 a router does not tell its workers.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import secrets
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Protocol

MAX_BODY = 4 << 20
POLL_SECONDS = 1.0
# A router that restarts must not stop a rollout.
AWAY_SECONDS = 30.0
# Clients' requests are watched for so long, then own ones are sent.
WATCH_SECONDS = 10.0
WATCH_POLL = 0.25
OWN_POLL = 0.05
OWN_TOKENS = (32, 64, 128)
# A router that picks at random has, after 6 requests for each worker, left one out with a probability of 0.25 %.
FAIR = 6
# An idle router with the policy cache_aware (its default) gives all to the first worker that has nothing to do: so
# many own requests at once as it has workers reach every one, but more than these are no small matter.
MOST_AT_ONCE = 16
PARTNER = {"prefill": "decode", "decode": "prefill"}
# /metrics of SGLang lags behind its scheduler: zero must be read for longer there.
LOOKS = {"loads": 2, "metrics": 8}
RUNNING = ("sglang:num_running_reqs", "sglang_num_running_reqs")
QUEUED = ("sglang:num_queue_reqs", "sglang_num_queue_reqs")
SENDING = ("sglang:num_prefill_inflight_queue_reqs", "sglang_num_prefill_inflight_queue_reqs")


class RouterError(Exception):
    """The router cannot do what is asked; the message says which URL answered what."""


class RouterAway(RouterError):
    """The router does not answer now; it may be starting."""


class Answer(NamedTuple):
    """An HTTP answer; ``status`` 0 means that there was none, and ``body`` says why."""

    status: int
    body: str

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


Http = Callable[[str, str, Optional[str], Optional[Mapping[str, Any]]], Answer]


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the API key is for this address only."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def http_request(
    method: str,
    url: str,
    key: Optional[str] = None,
    body: Optional[Mapping[str, Any]] = None,
    verify: bool = True,
    timeout: float = 10.0,
) -> Answer:
    """One request, without proxies and redirects. Never raises on what the network or the server does."""
    headers = {"Accept": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    context = None
    if url.startswith("https:"):
        context = ssl.create_default_context()
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    handlers: list[Any] = [urllib.request.ProxyHandler({}), _Stay]
    if context:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with opener.open(request, timeout=timeout) as answer:
            return Answer(answer.status, answer.read(MAX_BODY).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(MAX_BODY).decode("utf-8", "replace")
            return Answer(error.code, error.headers.get("Location") or text if 300 <= error.code < 400 else text)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Answer(0, str(getattr(error, "reason", error)))


def same_worker(url: str, wanted: str) -> bool:
    """Whether a router's worker is the wanted one; ``url@rank`` is a part of it (routers that know of dp ranks)."""
    url, wanted = _normal(url), _normal(wanted)
    return url == wanted or (url.startswith(wanted + "@") and url[len(wanted) + 1 :].isdigit())


def resolve(host: str) -> set[str]:
    """Addresses of a host name, as this host knows them; none where it knows none."""
    try:
        return {str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def other_spelling(urls: Iterable[str], wanted: str, lookup: Callable[[str], set[str]] = resolve) -> Optional[str]:
    """The URL by which a router knows the wanted worker under another name, None where it does not know it at all."""
    host, port = _place(wanted)
    mine: set[str] = set()
    for url in urls:
        theirs, their_port = _place(url)
        if not theirs or their_port != port or theirs == "localhost":
            continue
        mine = mine or lookup(host) | {host}
        found = lookup(theirs)
        # On many systems a host's own name is 127.0.1.1 on the host itself.
        if theirs in mine or found & mine or (found and not _literal(theirs) and all(map(_loops, found))):
            return url
    return None


def _place(url: str) -> tuple[str, Optional[int]]:
    parts = urllib.parse.urlsplit(url.strip().partition("@")[0])
    try:
        return (parts.hostname or "").lower(), parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "", None


def _literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _normal(url: str) -> str:
    parts = urllib.parse.urlsplit(url.strip())
    return f"{parts.scheme.lower()}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


class Router:
    """One router. ``key`` is the router's own API key."""

    def __init__(self, url: str, http: Http, key: Optional[str] = None) -> None:
        self.url = url.rstrip("/")
        self.http = http
        self.key = key
        self.dialect: Optional[str] = None

    def _ask(self, method: str, path: str, body: Optional[Mapping[str, Any]] = None) -> Answer:
        return self.http(method, self.url + path, self.key, body)

    def _refuse(self, method: str, path: str, answer: Answer) -> RouterError:
        text = " ".join(answer.body.split())[:300]
        if not answer.status:
            return RouterAway(f"the router {self.url} does not answer: {text}; check sglang_router.url")
        if answer.status in (401, 403):
            return RouterError(
                f"the router {self.url} wants its API key ({answer.status}): sglang_secrets: {{router_api_key: …}}"
            )
        if 300 <= answer.status < 400:
            return RouterError(
                f"{self.url} redirects ({answer.status}) to {text}; write the router's own sglang_router.url"
            )
        kind = RouterAway if answer.status in (502, 503, 504) else RouterError
        return kind(f"the router answered {method} {self.url}{path} with {answer.status}: {text}")

    def workers(self) -> list[dict[str, Any]]:
        """The router's workers, each with ``url``, ``id``, ``is_healthy`` and ``load`` (None where it does not say)."""
        if self.dialect != "urls":
            answer = self._ask("GET", "/workers")
            found = answer.json()
            rows = found.get("workers") if isinstance(found, dict) else found
            if answer.status == 200 and isinstance(rows, list):
                self.dialect = "workers"
                return [self._row(row) for row in rows if isinstance(row, dict) and row.get("url")]
            if answer.status != 404 or self.dialect:
                raise self._refuse("GET", "/workers", answer)
        answer = self._ask("GET", "/list_workers")
        if answer.status == 404:
            raise RouterError(
                f"{self.url} has neither /workers nor /list_workers: it is no SGLang router, or one before 0.1.5, "
                "which does not tell its workers; check sglang_router.url"
            )
        found = answer.json()
        urls = found.get("urls") if isinstance(found, dict) else found
        if answer.status != 200 or not isinstance(urls, list):
            raise self._refuse("GET", "/list_workers", answer)
        self.dialect = "urls"
        return [{"id": url, "url": url, "is_healthy": None, "load": None} for url in map(str, urls)]

    @staticmethod
    def _row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **row,
            "id": str(row.get("id") or row["url"]),
            "url": str(row["url"]),
            "is_healthy": row.get("is_healthy"),
            "load": row.get("load"),
        }

    def remove(self, row: Mapping[str, Any]) -> None:
        """Take a worker out; one that is gone already is fine."""
        if self.dialect == "urls":
            path = "/remove_worker?" + urllib.parse.urlencode({"url": row["url"]})
            method = "POST"
        else:
            path, method = "/workers/" + urllib.parse.quote(str(row["id"]), safe=""), "DELETE"
        answer = self._ask(method, path)
        if answer.status not in (200, 202, 204, 404):
            raise self._refuse(method, path, answer)

    def add(self, worker: Mapping[str, Any]) -> None:
        """Put a worker in. ``worker`` is ``{url, api_key?, worker_type?, bootstrap_port?, …}``."""
        path, body = "/workers", worker
        if self.dialect == "urls":
            path, body = "/add_worker?" + urllib.parse.urlencode({"url": worker["url"]}), {}
        answer = self._ask("POST", path, body)
        there = answer.status == 409 or (answer.status == 400 and "already exists" in answer.body)
        # The older dialect answers only once the worker is healthy: no answer in time is none yet.
        slow = self.dialect == "urls" and not answer.status
        if not there and not slow and answer.status not in (200, 201, 202):
            raise self._refuse("POST", path.partition("?")[0], answer)


class Load(NamedTuple):
    """Requests that a worker has; ``source`` is where that was read."""

    running: int
    queued: int
    source: str


def read_load(url: str, http: Http, key: Optional[str] = None) -> Optional[Load]:
    """What a worker has to do, from /v1/loads, /get_load (older SGLang) or /metrics; None where none can be read."""
    for path in ("/v1/loads?include=core,disagg", "/get_load"):
        answer = http("GET", url + path, key, None)
        found = answer.json() if answer.status == 200 else None
        rows = found.get("loads") if isinstance(found, dict) else found
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            waiting = sum(int(row.get("num_waiting_reqs") or 0) for row in rows)
            if all("num_running_reqs" in row for row in rows):
                # What a prefill instance is still sending to a decode instance is neither running nor waiting there.
                parts = [row.get("disaggregation") or {} for row in rows]
                sending = sum(int(part.get("prefill_inflight_queue_reqs") or 0) for part in parts)
                return Load(sum(int(row["num_running_reqs"]) for row in rows) + sending, waiting, "loads")
            if all("num_reqs" in row for row in rows):
                return Load(max(0, sum(int(row["num_reqs"]) for row in rows) - waiting), waiting, "loads")
        if not answer.status:
            return None
    answer = http("GET", url + "/metrics", key, None)
    if answer.status != 200:
        return None
    running, queued = _metric(answer.body, RUNNING), _metric(answer.body, QUEUED)
    inflight = _metric(answer.body, SENDING) or 0
    return None if running is None else Load(int(running + inflight), int(queued or 0), "metrics")


def _metric(text: str, names: tuple[str, ...]) -> Optional[float]:
    values = []
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            try:
                values.append(float(line.rsplit(" ", 1)[-1]))
            except ValueError:
                continue
    return sum(values) if values else None


class Clock(Protocol):
    """Time, so that tests need none."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Sent(Protocol):
    """A request on its way; ``answer`` is None until it is there."""

    answer: Optional[Answer]


class Background:
    """One request, sent in a thread of its own."""

    def __init__(self, url: str, key: Optional[str], body: Mapping[str, Any]) -> None:
        self.answer: Optional[Answer] = None
        self._args = (url, key, body)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        url, key, body = self._args
        self.answer = http_request("POST", url, key, body, timeout=30.0)


Send = Callable[[str, Optional[str], Mapping[str, Any]], Sent]


class Wanted(NamedTuple):
    """``worker`` is what the router is told when it is added; ``server`` is where this host asks it for its load."""

    worker: dict[str, Any]
    server: str
    key: Optional[str]
    timeout: float
    traffic_timeout: float = 60.0
    own_requests: bool = True
    allow_last: bool = False


class _Seen(NamedTuple):
    """The workers of one router: the wanted one's rows, and those of the same kind and model."""

    router: Router
    rows: list[dict[str, Any]]
    mine: list[dict[str, Any]]

    def peers(self, kind: Optional[str]) -> list[dict[str, Any]]:
        return [row for row in self.rows if row not in self.mine and kind in (None, _kind(row))]


def _kind(row: Mapping[str, Any]) -> str:
    return str(row.get("worker_type") or "")


def _look(routers: Sequence[Router], url: str) -> list[_Seen]:
    looked = []
    for router in routers:
        rows = router.workers()
        looked.append(_Seen(router, rows, [row for row in rows if same_worker(row["url"], url)]))
    return looked


def _refuse_other_spelling(looked: Iterable[_Seen], url: str) -> None:
    for seen in looked:
        other = None if seen.mine else other_spelling((row["url"] for row in seen.rows), url)
        if other:
            raise RouterError(
                f"the router {seen.router.url} knows this worker as {other}, not as {url}; write that into "
                "sglang_router.worker_url, or it would be there twice"
            )


def _refuse_last(looked: Iterable[_Seen], url: str) -> None:
    for seen in looked:
        if not any(row["is_healthy"] for row in seen.mine):
            continue
        peers = seen.peers(_kind(seen.mine[0]))
        if peers and not any(row["is_healthy"] is not False for row in peers):
            raise RouterError(
                f"{url} is the only healthy worker of {len(peers) + len(seen.mine)} that the router {seen.router.url} "
                f"has: without it no request is served; mend {peers[0]['url']} first, or write "
                "sglang_router: {allow_last: true}"
            )


def drain(
    routers: Sequence[Router],
    wanted: Wanted,
    http: Http,
    clock: Clock,
    carry: Mapping[str, Any],
    seconds: float,
    check: bool,
) -> dict[str, Any]:
    """One slice: take the worker out of all routers, then wait until it is idle or the time is over.

    ``{changed, drained, running, queued, others, warnings, slice}``; ``others`` are the healthy workers of its
    kind that remain. The end of the time is no failure. Raises ``RouterError`` before it changes anything: where a
    router cannot be used, knows the worker under another name, or has no other healthy worker although it should.
    """
    began = clock.now()
    spent, changed, idle = float(carry.get("spent", 0)), bool(carry.get("changed")), int(carry.get("idle", 0))
    url, kind, away = wanted.worker["url"], carry.get("kind"), float(carry.get("away", -1))
    looked_once = bool(carry.get("looked"))
    while True:
        elapsed = spent + clock.now() - began
        try:
            looked = _look(routers, url)
            away = -1.0
        except RouterAway as error:
            away = elapsed if away < 0 else away
            if check or elapsed - away >= AWAY_SECONDS:
                raise
            text, done, late = str(error), False, False
            result: dict[str, Any] = {"changed": changed, "others": [], "warnings": []}
            load: Optional[Load] = None
        else:
            if not looked_once:
                _refuse_other_spelling(looked, url)
                if not wanted.allow_last:
                    _refuse_last(looked, url)
                looked_once = True
            mine = [(seen.router, row) for seen in looked for row in seen.mine]
            # Decode workers are no replacement for a prefill worker.
            kind = _kind(mine[0][1]) if mine else kind
            lists = [[row["url"] for row in seen.peers(kind) if row["is_healthy"] is not False] for seen in looked]
            others = sorted({url for urls in lists for url in urls})
            result = {"changed": changed or bool(mine), "others": others, "warnings": []}
            if check:
                return dict(result, drained=not mine, running=None, queued=None)
            load = None
            if mine:
                for router, row in mine:
                    router.remove(row)
                changed, idle, text = True, 0, "the router is taking it out"
            else:
                load = read_load(wanted.server, http, wanted.key)
                idle = idle + 1 if load and not load.running + load.queued else 0
                text = f"{load.running} running, {load.queued} queued" if load else "its load cannot be read"
            done = not mine and (load is None or idle >= LOOKS[load.source])
            late = elapsed >= wanted.timeout
            if done or late:
                if changed and not all(lists):
                    what = f"{kind} worker" if kind in PARTNER else "worker"
                    result["warnings"].append(
                        f"{url} was the router's only healthy {what}: requests fail until it is back"
                    )
                if late and not done:
                    result["warnings"].append(f"{url} is stopped although it is not idle after {elapsed:.0f} s: {text}")
                elif load is None and changed:
                    result["warnings"].append(f"{url} does not tell its load; the unit's own grace ends its requests")
        result.update(
            drained=done, running=load.running if load else None, queued=load.queued if load else None,
            slice={"done": done or late, "state": "drained" if done else "draining", "progress": text,
                   "carry": {"spent": elapsed, "changed": changed, "idle": idle, "kind": kind, "away": away,
                             "looked": looked_once}},
        )  # fmt: skip
        if done or late or clock.now() - began >= seconds:
            return result
        clock.sleep(POLL_SECONDS)


def join(
    routers: Sequence[Router],
    wanted: Wanted,
    http: Http,
    send: Send,
    clock: Clock,
    carry: Mapping[str, Any],
    seconds: float,
    check: bool,
) -> dict[str, Any]:
    """One slice: add the worker to the routers that lack it, wait until they find it healthy, see requests arrive.

    ``{changed, healthy, traffic, warnings, slice}``; ``failed`` and ``msg`` when a router does not find it healthy
    within the time, or gives it no request. ``traffic`` is None where nothing was added, or nothing is to be seen.
    """
    began = clock.now()
    spent, changed = float(carry.get("spent", 0)), bool(carry.get("changed"))
    asked, traffic = float(carry.get("asked", -1)), carry.get("traffic")
    url = wanted.worker["url"]
    while True:
        elapsed = spent + clock.now() - began
        looked: list[_Seen] = []
        try:
            looked = _look(routers, url)
            if check:
                _refuse_other_spelling(looked, url)
                healthy = all(seen.mine and all(row["is_healthy"] for row in seen.mine) for seen in looked)
                return {"changed": not all(seen.mine for seen in looked), "healthy": healthy, "traffic": None}
            lack = [seen for seen in looked if not seen.mine]
            # A router tries in the background and may give up without a word: it is asked again now and then.
            if lack and (asked < 0 or elapsed - asked >= 30):
                if asked < 0:
                    _refuse_other_spelling(lack, url)
                for seen in lack:
                    seen.router.add(wanted.worker)
                changed, asked = True, elapsed
            healthy = not lack and all(row["is_healthy"] is not False for seen in looked for row in seen.mine)
            text = "healthy" if healthy else "being added" if lack else "not healthy yet"
        except RouterAway as error:
            if check:
                raise
            healthy, text = False, str(error)
        state: dict[str, Any] = {"spent": elapsed, "changed": changed, "asked": asked, "traffic": traffic}
        result: dict[str, Any] = {"changed": changed, "healthy": healthy, "traffic": None, "warnings": []}
        if healthy and changed and wanted.traffic_timeout > 0:
            traffic = _follow(looked, wanted, http, send, clock, dict(traffic or {}), seconds - (clock.now() - began))
            state.update(spent=spent + clock.now() - began, traffic=traffic)
            result["traffic"] = {key: traffic[key] for key in ("seen", "how", "own_requests", "seconds")}
            text = traffic["text"]
            if traffic["done"] and not traffic["seen"]:
                told = f"{url} is ready and healthy in the router, but no request was seen to arrive: {text}"
                result["traffic"]["reason"] = text
                if traffic["failed"]:
                    result.update(failed=True, msg=told)
                else:
                    result["warnings"].append(told)
            result["slice"] = {"done": traffic["done"], "state": "joined", "progress": text, "carry": state}
            return result
        late = elapsed >= wanted.timeout
        result["slice"] = {
            "done": healthy or late,
            "state": "joined" if healthy else "joining",
            "progress": text,
            "carry": state,
        }
        if late and not healthy:
            result["failed"] = True
            result["msg"] = (
                f"the service is ready, but the router does not send it requests: after {elapsed:.0f} s {url} is "
                f"{text}; check that {', '.join(router.url for router in routers)} reaches this address "
                "(sglang_router.worker_url). The next run adds it"
            )
        if healthy or late or clock.now() - began >= seconds:
            return result
        clock.sleep(POLL_SECONDS)


# ---- whether requests arrive -----------------------------------------------------------------------------------------


def _follow(
    looked: Sequence[_Seen], wanted: Wanted, http: Http, send: Send, clock: Clock, state: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Watch the worker for a request, then send own ones through the routers, for at most ``seconds``.

    Returns the state: ``{seen, how, own_requests, seconds, done, failed, text, served, refused}``. ``how`` is
    ``router`` (it counts a request that this worker has; only with the policy cache_aware, and for prefill and decode)
    or ``worker`` (it runs one; a health check never counts as running).
    """
    began, before = clock.now(), float(state.get("seconds", 0))
    own, served, rounds = (int(state.get(name, 0)) for name in ("own_requests", "served", "rounds"))
    last, readable = str(state.get("last", "")), bool(state.get("readable"))
    faults, kind = int(state.get("faults", 0)), _kind(looked[0].mine[0])
    models = {str(row.get("model_id") or "") for seen in looked for row in seen.rows}
    model = str(looked[0].mine[0].get("model_id") or "")
    peers = max(len([row for row in seen.peers(kind) if str(row.get("model_id") or "") == model]) for seen in looked)
    lonely = kind in PARTNER and not any(
        row["is_healthy"] for seen in looked for row in seen.rows if _kind(row) == PARTNER[kind]
    )
    others = {_kind(row) for seen in looked for row in seen.rows if row not in seen.mine}
    stray = kind not in PARTNER and bool(others) and others <= set(PARTNER)
    fair, key = FAIR * (peers + 1), looked[0].router.key or wanted.key
    sent: list[Sent] = []
    pause = min(WATCH_SECONDS, wanted.traffic_timeout / 2)
    while True:
        try:
            rows = [row for seen in _look([item.router for item in looked], wanted.worker["url"]) for row in seen.mine]
        except RouterAway as error:
            rows, last = [], str(error)
        how = "router" if any(int(row["load"] or 0) > 0 for row in rows) else None
        load = None if how else read_load(wanted.server, http, wanted.key)
        readable = readable or load is not None
        how = how or ("worker" if load and load.running > 0 else None)
        elapsed = before + clock.now() - began
        for answer in [item.answer for item in sent] if all(item.answer for item in sent) else []:
            if answer is None:
                continue
            last = f"{answer.status or 'no answer'}: {' '.join(answer.body.split())[:200]}"
            served += 200 <= answer.status < 300
            # A router refuses a key with an empty body, a worker says why.
            refused = answer.status in (401, 403) and bool(answer.body.strip())
            fault = refused or answer.status >= 500 or not answer.status
            faults += fault
            pause = elapsed + (POLL_SECONDS if fault else 0)
            sent = []
        late = elapsed >= wanted.traffic_timeout and not sent
        over = late or lonely or stray or (own >= fair and not sent)
        out = {
            "seen": bool(how), "how": how, "own_requests": own, "seconds": round(elapsed, 1), "done": bool(how) or over,
            "rounds": rounds, "served": served, "faults": faults, "last": last, "readable": readable, "failed": False,
            "text": f"a request arrived after {elapsed:.0f} s" if how else "waiting for a request",
        }  # fmt: skip
        if how:
            return out
        if over:
            out.update(_missing(out, wanted, kind, lonely, stray))
            return out
        if not sent and clock.now() - began >= seconds:
            return out
        if not sent and wanted.own_requests and elapsed >= pause:
            router, tokens = looked[rounds % len(looked)].router, OWN_TOKENS[min(rounds, len(OWN_TOKENS) - 1)]
            for _ in range(min(2 ** (rounds // len(looked)), peers + 1, MOST_AT_ONCE, fair - own)):
                # Another beginning each time: a router that is aware of caches sends like to like.
                body: dict[str, Any] = {
                    "text": f"{secrets.token_hex(4)} ping",
                    "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
                }
                sent.append(send(router.url + "/generate", key, {**body, "model": model} if len(models) > 1 else body))
                own += 1
            rounds += 1
        clock.sleep(OWN_POLL if sent else WATCH_POLL)


def _missing(out: Mapping[str, Any], wanted: Wanted, kind: str, lonely: bool, stray: bool) -> dict[str, Any]:
    """``{text, failed}``: why no request was seen, and whether that is a fault that must stop a rollout."""
    own, served, faults = out["own_requests"], out["served"], out["faults"]
    if lonely:
        return {"text": f"the router has no healthy {PARTNER[kind]} worker to go with it", "failed": False}
    if stray:
        text = "the router serves pairs of prefill and decode workers, and this worker is neither: set sglang_role"
        return {"text": text, "failed": True}
    if not wanted.own_requests:
        return {
            "text": f"no client sent one in {out['seconds']:.0f} s, and own requests are turned off",
            "failed": False,
        }
    asked = f"{own} own request{'s' if own != 1 else ''} through the router"
    if own and faults == own:
        return {"text": f"{asked} failed, the last with {out['last']}", "failed": True}
    if not served:
        return {"text": f"{asked} said nothing, the last answer was {out['last'] or 'none'}", "failed": False}
    if not out["readable"] and kind not in PARTNER:
        return {"text": f"{asked} were served, and this worker does not tell its load", "failed": False}
    # Not a fault by itself: own requests may be too few at once to reach all workers of an idle router.
    return {"text": f"{asked} all went to other workers", "failed": False}
