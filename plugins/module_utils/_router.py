# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: takes a worker out of SGLang's router until it is idle, and puts it back.

Two dialects of the router are spoken, and found out by asking: ``/workers`` (removal and addition are accepted and
done in the background) and the older ``/list_workers``, ``/add_worker?url=``, ``/remove_worker?url=``.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional, Protocol

MAX_BODY = 4 << 20
POLL_SECONDS = 1.0
# /metrics of SGLang lags behind its scheduler: zero must be read for longer there.
LOOKS = {"loads": 2, "metrics": 8}
RUNNING = ("sglang:num_running_reqs", "sglang_num_running_reqs")
QUEUED = ("sglang:num_queue_reqs", "sglang_num_queue_reqs")
SENDING = ("sglang:num_prefill_inflight_queue_reqs", "sglang_num_prefill_inflight_queue_reqs")


class RouterError(Exception):
    """The router cannot do what is asked; the message says which URL answered what."""


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


def http_request(
    method: str, url: str, key: Optional[str] = None, body: Optional[Mapping[str, Any]] = None, verify: bool = True
) -> Answer:
    """One request, without proxies. Never raises on what the network or the server does."""
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
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if context:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with opener.open(request, timeout=10) as answer:
            return Answer(answer.status, answer.read(MAX_BODY).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(MAX_BODY).decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        return Answer(0, str(getattr(error, "reason", error)))


def same_worker(url: str, wanted: str) -> bool:
    """Whether a router's worker is the wanted one; ``url@rank`` is a part of it (routers that know of dp ranks)."""
    url, wanted = _normal(url), _normal(wanted)
    return url == wanted or (url.startswith(wanted + "@") and url[len(wanted) + 1 :].isdigit())


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
        if not answer.status:
            return RouterError(f"the router {self.url} does not answer: {answer.body}; check sglang_router.url")
        if answer.status in (401, 403):
            return RouterError(
                f"the router {self.url} wants its API key ({answer.status}): sglang_secrets: {{router_api_key: …}}"
            )
        return RouterError(f"the router answered {method} {self.url}{path} with {answer.status}: {answer.body[:300]}")

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
        # 409: it is there, or on its way.
        if answer.status not in (200, 201, 202, 409):
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
    sending = _metric(answer.body, SENDING) or 0
    return None if running is None else Load(int(running + sending), int(queued or 0), "metrics")


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


class Wanted(NamedTuple):
    """``worker`` is what the router is told when it is added; ``server`` is where this host asks it for its load."""

    worker: dict[str, Any]
    server: str
    key: Optional[str]
    timeout: float


def drain(
    router: Router, wanted: Wanted, http: Http, clock: Clock, carry: Mapping[str, Any], seconds: float, check: bool
) -> dict[str, Any]:
    """One slice: take the worker out, then wait until it is idle or the time is over. The limit is no failure.

    ``{changed, drained, running, queued, others, warnings, slice}``; ``others`` are the healthy workers of its
    kind that remain.
    """
    began = clock.now()
    spent, changed, idle = float(carry.get("spent", 0)), bool(carry.get("changed")), int(carry.get("idle", 0))
    url, kind = wanted.worker["url"], carry.get("kind")
    while True:
        rows = router.workers()
        mine = [row for row in rows if same_worker(row["url"], url)]
        # Decode workers are no replacement for a prefill worker.
        kind = str(mine[0].get("worker_type") or "") if mine else kind
        others = [
            row["url"]
            for row in rows
            if row not in mine and row["is_healthy"] is not False and str(row.get("worker_type") or "") == (kind or "")
        ]
        elapsed = spent + clock.now() - began
        result: dict[str, Any] = {"changed": changed or bool(mine), "others": others, "warnings": []}
        if check:
            return dict(result, drained=not mine, running=None, queued=None)
        load: Optional[Load] = None
        if mine:
            for row in mine:
                router.remove(row)
            changed, idle, text = True, 0, "the router is taking it out"
        else:
            load = read_load(wanted.server, http, wanted.key)
            idle = idle + 1 if load and not load.running + load.queued else 0
            text = f"{load.running} running, {load.queued} queued" if load else "its load cannot be read"
        done = not mine and (load is None or idle >= LOOKS[load.source])
        late = elapsed >= wanted.timeout
        if done or late:
            if changed and not others:
                what = f"{kind} worker" if kind in ("prefill", "decode") else "worker"
                result["warnings"].append(f"{url} was the router's only healthy {what}: requests fail until it is back")
            if late and not done:
                result["warnings"].append(f"{url} is stopped although it is not idle after {elapsed:.0f} s: {text}")
            elif load is None and changed:
                result["warnings"].append(f"{url} does not tell its load; the unit's own grace ends its requests")
        result.update(
            drained=done, running=load.running if load else None, queued=load.queued if load else None,
            slice={"done": done or late, "state": "drained" if done else "draining", "progress": text,
                   "carry": {"spent": elapsed, "changed": changed, "idle": idle, "kind": kind}},
        )  # fmt: skip
        if done or late or clock.now() - began >= seconds:
            return result
        clock.sleep(POLL_SECONDS)


def join(
    router: Router, wanted: Wanted, clock: Clock, carry: Mapping[str, Any], seconds: float, check: bool
) -> dict[str, Any]:
    """One slice: add the worker unless it is there, then wait until the router finds it healthy.

    ``{changed, healthy, slice}``; ``failed`` and ``msg`` when the router does not find it healthy within the time.
    """
    began = clock.now()
    spent, changed = float(carry.get("spent", 0)), bool(carry.get("changed"))
    asked = float(carry.get("asked", -1))
    url = wanted.worker["url"]
    while True:
        mine = [row for row in router.workers() if same_worker(row["url"], url)]
        elapsed = spent + clock.now() - began
        if check:
            return {"changed": not mine, "healthy": bool(mine) and all(row["is_healthy"] for row in mine)}
        # A router tries in the background and may give up without a word: it is asked again now and then.
        if not mine and (asked < 0 or elapsed - asked >= 30):
            router.add(wanted.worker)
            changed, asked = True, elapsed
        healthy = bool(mine) and all(row["is_healthy"] is not False for row in mine)
        text = "healthy" if healthy else "not healthy yet" if mine else "being added"
        late = elapsed >= wanted.timeout
        result: dict[str, Any] = {
            "changed": changed,
            "healthy": healthy,
            "slice": {"done": healthy or late, "state": "joined" if healthy else "joining", "progress": text,
                      "carry": {"spent": elapsed, "changed": changed, "asked": asked}},
        }  # fmt: skip
        if late and not healthy:
            result["failed"] = True
            result["msg"] = (
                f"the service is ready, but the router {router.url} does not send it requests: after {elapsed:.0f} s "
                f"{url} is {text}; check that the router reaches this address (sglang_router.worker_url)"
            )
        if healthy or late or clock.now() - began >= seconds:
            return result
        clock.sleep(POLL_SECONDS)
