# SPDX-License-Identifier: GPL-3.0-or-later
"""The rollout's drain and undrain against real routers of many versions; the workers are stand-ins that say so."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "stand_ins"))

import scripted_server

from tests.tools.rollouts import router_python

BIN = Path(sys.executable).parent
WORKER_KEY, ROUTER_KEY = "key-of-the-worker", "key-of-the-router"
GENERATED = {
    "text": "x",
    "output_ids": [1],
    "meta_info": {
        "id": "a",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "weight_version": "default",
        "e2e_latency": 0.2,
    },
}
INFO = {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "is_generation": True}


class Routes(dict):
    """Answers like SGLang's, with the generations that run in the load."""

    SECONDS = 0.3

    def __init__(self):
        ok = [{"status": 200, "body": INFO}]
        super().__init__(dict.fromkeys(("/server_info", "/get_server_info", "/model_info", "/get_model_info"), ok))
        self["/health"] = [{"status": 200}]
        self["/v1/models"] = [{"status": 200, "body": {"object": "list", "data": [{"id": "m"}]}}]
        self["/generate"] = [{"status": 200, "delay": self.SECONDS, "body": GENERATED}]
        self.began = []

    def get(self, path, default=None):
        if path == "/generate":
            self.began.append(time.monotonic())
        if path == "/v1/loads":
            running = sum(1 for began in self.began if time.monotonic() < began + self.SECONDS)
            body = {"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]}
            return [{"status": 200, "body": body}]
        return super().get(path, default)


class Worker:
    def __init__(self, key=None):
        self.routes = Routes()
        self.server, self.state = scripted_server.serve({"routes": self.routes, "key": key})
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def generations(self):
        return self.state.counts.get("/generate", 0)


@pytest.fixture
def worker():
    workers = []

    def make(key=None):
        workers.append(Worker(key))
        return workers[-1]

    yield make
    for item in workers:
        item.server.shutdown()
        item.server.server_close()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class RealRouter:
    def __init__(self, version, folder, *options, key=None):
        self.version, self.key = version, key
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [router_python(version), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        number = tuple(map(int, version.split(".")))
        argv += ["--prometheus-port", str(free_port())] if number >= (0, 1, 9) else []
        argv += ["--worker-startup-check-interval", "1"] if number >= (0, 1, 4) else []
        argv += ["--api-key", key] if key else []
        self.log = folder / "router.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*argv, *options], stdout=log, stderr=log)
        for _ in range(300):
            if self.ask("GET", "/workers")[0] or self.process.poll() is not None:
                break
            time.sleep(0.1)
        assert self.process.poll() is None, self.log.read_text()[-2000:]

    def ask(self, method, path, body=None, key=None):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key or WORKER_KEY}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def rows(self):
        status, text = self.ask("GET", "/workers")
        if status == 200:
            return json.loads(text)["workers"]
        return [{"url": url} for url in json.loads(self.ask("GET", "/list_workers")[1])["urls"]]

    def urls(self):
        return sorted(row["url"] for row in self.rows())

    def add(self, url, **more):
        status, text = self.ask("POST", "/workers", {"url": url, **more})
        if status == 404:
            status, text = self.ask("POST", f"/add_worker?url={url}", {})
        assert status in (200, 202), text
        for _ in range(200):
            if url in self.urls():
                return
            time.sleep(0.1)
        raise AssertionError(f"{url} was not added: {self.log.read_text()[-2000:]}")

    def generate(self):
        return self.ask("POST", "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}})[0]

    @contextlib.contextmanager
    def clients(self):
        """Two clients that send without a pause; yields the list of the statuses."""
        over, statuses = threading.Event(), []

        def send():
            while not over.is_set():
                statuses.append(self.generate())

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield statuses
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture
def router(tmp_path):
    running = []

    def start(version, *options, key=None):
        running.append(RealRouter(version, tmp_path, *options, key=key))
        return running[-1]

    yield start
    for item in running:
        item.process.terminate()
        try:
            item.process.wait(10)
        except subprocess.TimeoutExpired:
            item.process.kill()
            item.process.wait(10)


@pytest.fixture
def rollout(tmp_path):
    """Runs the rollout's task files on this host: ``rollout(router, worker, "drain")`` → exit status, result."""

    def play(router, worker, *names, keys=True, secret=WORKER_KEY, role=None, router_key=None, check=False, **options):
        settings = {"url": router.url, "worker_url": worker.url, "traffic_timeout": 4, **options}
        register = {"drain": "rollout_drained", "undrain": "rollout_joined"}
        router_key = router_key or router.key
        variables = {
            "rollout_names": ["w"],
            "rollout_services": {"w": {"unit": {"host": "127.0.0.1", "port": worker.port, "role": role}}},
            "rollout_intents": {
                "instances": {
                    "w": {
                        "router": settings,
                        "drain_timeout": 20,
                        "flags": {"disaggregation-bootstrap-port": 9001},
                    }
                }
            },
            "rollout_secrets": {"w": {"api_key": secret}} if keys else {},
            "rollout_router_keys": {"w": router_key} if router_key else {},
            "rollout_address": "127.0.0.1",
            "rollout_undrain_timeout": 30,
        }
        include = [
            {"ansible.builtin.include_role": {"name": "gpufleet.sglang.rollout", "tasks_from": f"{name}.yml"}}
            for name in names
        ]
        keep = {
            "ansible.builtin.copy": {
                "dest": str(tmp_path / "result.json"),
                "content": "{{ %s.results | default([%s]) | to_json }}" % ((register[names[-1]],) * 2),
            },
            "check_mode": False,
        }
        tasks = [{"block": include, "always": [keep]}]
        (tmp_path / "vars.yml").write_text(yaml.safe_dump(variables))
        plays = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}]
        (tmp_path / "play.yml").write_text(yaml.safe_dump(plays))
        argv = [BIN / "ansible-playbook", "-vvv", "-e", f"@{tmp_path / 'vars.yml'}", tmp_path / "play.yml"]
        argv += ["--check"] if check else []
        done = subprocess.run(
            [str(word) for word in argv], capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
            env={**os.environ, "ANSIBLE_FORCE_COLOR": "0"},
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert not [key for key in (WORKER_KEY, ROUTER_KEY) if key in output]
        (result,) = json.loads((tmp_path / "result.json").read_text())
        return done.returncode, result, output

    return play


def mark_slow(versions, fast):
    return [item if item in fast else pytest.param(item, marks=pytest.mark.slow) for item in versions]


@pytest.mark.parametrize(
    "version", mark_slow(["0.1.9", "0.2.0", "0.2.2", "0.2.4", "0.3.0", "0.3.2"], ["0.1.9", "0.3.2"])
)
def test_a_worker_leaves_and_comes_back(version, router, worker, rollout):
    """Both keys are needed; clients' requests and own ones are seen to arrive; nothing is lost meanwhile."""
    old = version < "0.2"
    front, ours, other = (
        router(version, "--policy", "round_robin", key=None if old else ROUTER_KEY),
        *(worker(WORKER_KEY) for _ in range(2)),
    )
    front.add(other.url, **({} if old else {"api_key": WORKER_KEY}))

    status, result, output = rollout(front, ours, "undrain")
    assert status == 0 and result["changed"] and result["healthy"], output[-3000:]
    assert result["traffic"]["seen"] and result["traffic"]["own_requests"] in (1, 2, 3) and ours.generations > 0
    assert front.urls() == sorted([ours.url, other.url])

    with front.clients() as statuses:
        status, result, output = rollout(front, ours, "drain")
        assert status == 0 and result["drained"] and result["changed"] and result["others"] == [other.url], output[
            -3000:
        ]
        assert front.urls() == [other.url]
        before = ours.generations
        status, result, output = rollout(front, ours, "undrain")
        assert status == 0 and result["traffic"]["own_requests"] == 0 and result["traffic"]["how"] == "worker", output[
            -3000:
        ]
    assert ours.generations > before and set(statuses) == {200} and len(statuses) > 10


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.1.0", "0.1.4"])
def test_a_router_that_does_not_tell_its_workers_is_refused(version, router, worker, rollout):
    ours = worker()
    front = router(version, "--worker-urls", ours.url)
    status, result, _output = rollout(front, ours, "drain", keys=False)
    assert status == 2 and "0.1.5" in result["msg"] and front.generate() == 200


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cache_aware", "power_of_two", "random"])
@pytest.mark.parametrize("version", ["0.2.4", "0.3.2"])
def test_own_requests_arrive_whatever_the_policy(version, policy, router, worker, rollout):
    """An idle cache_aware router gives single requests always to one worker, so several are sent at once."""
    front, ours = router(version, "--policy", policy, "--worker-urls", worker().url, worker().url), worker()
    status, result, output = rollout(front, ours, "undrain", keys=False, traffic_timeout=20)
    assert status == 0 and result["traffic"]["seen"] and ours.generations > 0, output[-3000:]


@pytest.mark.slow
def test_wrong_keys(router, worker, rollout):
    """A router's wrong key changes nothing. A worker with a wrong key is healthy for the router, and serves nobody."""
    front, ours = router("0.3.2", "--policy", "round_robin", key=ROUTER_KEY), worker(WORKER_KEY)
    status, result, _output = rollout(front, ours, "drain", router_key="wrong")
    assert status == 2 and "wants its API key (401)" in result["msg"] and "router_api_key" in result["msg"]
    status, result, _output = rollout(front, ours, "undrain", secret="wrong", traffic_timeout=20)
    assert status == 2 and result["healthy"] and "401" in result["msg"] and "Unauthorized" in result["msg"]
    assert front.urls() == [ours.url], "left where it is, for a person to see"


@pytest.mark.slow
def test_an_open_circuit_does_not_outlive_the_drain(router, worker, rollout):
    options = ["--policy", "round_robin", "--cb-failure-threshold", "2", "--disable-retries"]
    front, ours = router("0.3.2", *options), worker()
    front.add(ours.url)
    ours.routes["/generate"] = [{"status": 500, "body": {}}]
    assert [front.generate() for _ in range(3)] == [500, 500, 503]
    assert front.rows()[0]["is_healthy"], "the router's workers do not show an open circuit"
    ours.routes["/generate"] = [{"status": 200, "delay": 0.3, "body": GENERATED}]
    assert front.generate() == 503
    status, result, output = rollout(front, ours, "drain", "undrain", keys=False)
    assert status == 0 and result["traffic"]["seen"] and front.generate() == 200, output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.2.4", "0.3.2"])
def test_prefill_and_decode(version, router, worker, rollout):
    ours, decode = worker(), worker()
    front = router(
        version, "--pd-disaggregation", "--policy", "round_robin", "--prefill", ours.url, "9001", "--decode", decode.url
    )  # fmt: skip
    for _ in range(100):
        if len(front.rows()) == 2:
            break
        time.sleep(0.1)
    before = next(row for row in front.rows() if row["url"] == ours.url)
    status, result, output = rollout(front, ours, "drain", role="prefill", keys=False)
    assert status == 0 and result["drained"] and result["others"] == [] and "only healthy prefill worker" in output
    status, result, output = rollout(front, ours, "undrain", role="prefill", keys=False)
    after = next(row for row in front.rows() if row["url"] == ours.url)
    assert status == 0 and result["traffic"]["seen"], output[-3000:]
    assert (after["worker_type"], after["bootstrap_port"]) == (before["worker_type"], 9001) == ("prefill", 9001)

    for role, item in (("prefill", ours), ("decode", decode)):
        assert rollout(front, item, "drain", role=role, keys=False)[0] == 0
    status, result, output = rollout(front, ours, "undrain", role="prefill", keys=False)
    assert status == 0 and not result["traffic"]["seen"] and "no healthy decode worker" in output
    status, result, _output = rollout(front, decode, "undrain", role="decode", keys=False)
    assert status == 0 and result["traffic"]["seen"] and front.generate() == 200


@pytest.mark.slow
def test_a_worker_of_the_wrong_kind_is_told(router, worker, rollout):
    """A router for prefill and decode takes a regular worker, finds it healthy, and never gives it a request."""
    prefill, decode, ours = worker(), worker(), worker()
    front = router("0.3.2", "--pd-disaggregation", "--prefill", prefill.url, "9001", "--decode", decode.url)
    status, result, _output = rollout(front, ours, "undrain", keys=False, traffic_timeout=30)
    assert status == 2 and result["healthy"] and "set sglang_role" in result["msg"]


@pytest.mark.slow
def test_two_routers_in_front(router, worker, rollout, tmp_path):
    ours, other = worker(), worker()
    first, second = (router("0.3.2", "--worker-urls", ours.url, other.url) for _ in range(2))
    urls = [first.url, second.url]
    status, result, output = rollout(first, ours, "drain", keys=False, url=urls)
    assert status == 0 and result["drained"] and first.urls() == second.urls() == [other.url], output[-3000:]
    status, result, output = rollout(first, ours, "undrain", keys=False, url=urls)
    assert status == 0 and result["traffic"]["seen"], output[-3000:]
    assert first.urls() == second.urls() == sorted([ours.url, other.url])
    second.process.terminate()
    second.process.wait(10)
    status, result, _output = rollout(first, ours, "drain", keys=False, url=urls, check=True)
    assert status == 2 and second.url in result["msg"] and len(first.urls()) == 2
