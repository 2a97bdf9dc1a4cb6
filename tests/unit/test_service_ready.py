# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slices of a wait: over a scripted host with a clock of its own, and over real sockets and processes."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _observe as observe
from ansible_collections.gpufleet.sglang.plugins.module_utils._readiness import Settings
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult, run
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_ready import (
    HostEyes,
    Options,
    failure_text,
    redact_server_info,
    run_slice,
    usable,
)

from tests.stand_ins.scripted_server import serve

SPAWNED = "scripted_server.py"
TOKEN = {"text": "x", "meta_info": {"completion_tokens": 1}}
CARDS = {"data": [{"id": "m", "max_model_len": 2048}]}
OPTIONS = Options(unit="sglang-default.service", foreground_pid=None, log_file=None, host="127.0.0.1", port=30000)


class Script:
    """A host that follows a script, and a clock that moves only when somebody waits.

    ``routes``: path → ``[(until, status, seconds, body)]``; ``seconds`` None: hangs until the step ends.
    """

    def __init__(
        self, routes=None, log=(), unit=None, listens=(0, None), owned=True, tokens=None, process=None, key=None
    ):
        self.clock = 0.0
        self.routes, self.log_lines, self.key = routes or {}, list(log), key
        self.unit_at = unit or (lambda t: {})
        self.listens, self.owned, self.tokens = listens, owned, tokens
        self.process_at = process or (lambda t: {})
        self.asked = []
        self.at_once = 0

    def now(self):
        return self.clock

    def sleep(self, seconds):
        self.clock += seconds

    def unit(self):
        state = {"load_state": "loaded", "active_state": "active", "sub_state": "running", "result": "success",
                 "n_restarts": 0, "invocation": "i0", "main_pid": 7, "uptime": self.clock}  # fmt: skip
        return {**state, **self.unit_at(self.clock)}

    def pids(self, unit):
        return [7]

    def process(self, pids, unit):
        return {"alive": True, "pids": pids, "argv": ["python"], **self.process_at(self.clock)}

    def listener(self, pids):
        begin, end = self.listens
        if self.clock < begin or (end is not None and self.clock >= end):
            return None
        return {"pids": [7] if self.owned else [99], "owned": self.owned, "name": "python"}

    def log(self, mark):
        now = [(at, i, text) for at, i, text in self.log_lines if (mark or -1) < at <= self.clock]
        return [observe.Entry(i, text) for _at, i, text in now], self.clock, ""

    def lines_of(self, invocation):
        return [text for at, i, text in self.log_lines if i == invocation and at <= self.clock]

    def _step(self, path, at):
        return next((step for step in self.routes.get(path, ()) if step[0] is None or at < step[0]), None)

    def begin(self, kind, facts, folder):
        limit = 600 if kind in ("short", "long", "disaggregated", "embedding") else 30
        return {"kind": kind, "began": self.clock, "limit": limit, "asks": [
            [ask.method, ask.path] for ask in observe.requests_for(kind, "m", "u:")]}  # fmt: skip

    def collect(self, handle):
        at = handle["began"]
        if at < self.listens[0]:
            return {"status": None, "error": "connection refused", "refused": True, "body": "", "seconds": 0}
        for _method, path in handle["asks"]:
            step = self._step(path, at)
            if step is None:
                continue
            until, status, seconds, body = step
            end = until if seconds is None else at + seconds
            if end is None or end > handle["began"] + handle["limit"]:
                if self.clock < handle["began"] + handle["limit"]:
                    return None
                self.asked.append((handle["began"], path, None))
                return {"status": None, "error": "no answer", "body": "", "path": path}
            if self.clock < end:
                return None
            if seconds is None:
                _until, status, _seconds, body = self._step(path, end) or (None, 404, 0, {})
            self.asked.append((handle["began"], path, status))
            return {"status": status, "error": None, "body": json.dumps(body), "path": path, "seconds": end - at}
        return {"status": 404, "error": None, "body": "{}", "path": path, "seconds": 0}

    def folder(self):
        return "/nowhere"

    def remove(self, folder):
        pass

    def counters(self):
        return None if self.tokens is None else {"tokens": self.tokens(self.clock)}

    def gpu_memory(self):
        return None

    def server_info(self):
        return {"version": "0.5.23", "tp_size": 8, "api_key": "tops3cret"}

    def libraries(self, pids):
        return [], True

    def startup_lines(self, unit):
        return [text for _at, _i, text in self.log_lines]


def wait(eyes, judged=None, once=False, slice_seconds=30.0, secrets=()):
    """All slices of a wait; what travels between them is JSON."""
    carry, slices = None, 0
    while True:
        slices += 1
        result = run_slice(eyes, OPTIONS, judged or Settings(), carry, slice_seconds, once, secrets, redact_server_info)
        part = json.loads(json.dumps(result))["slice"]
        if part["done"]:
            result["slices"] = slices
            return result
        carry = part["carry"]
        eyes.sleep(1.5)  # what a module call costs


# ---- field cases


def test_c69_models_listed_is_not_ready():
    eyes = Script(
        {
            "/v1/models": [(None, 200, 0, CARDS)],
            "/health": [(300, 503, 0, {}), (None, 200, 1, {})],
            "/v1/completions": [(300, 503, None, {}), (None, 200, 1, {"choices": [{"text": "x"}]})],
        },
        listens=(5, None),
    )
    result = wait(eyes, Settings(model="m"))
    assert result["ready"] and 300 <= result["elapsed"] < 330
    assert result["evidence"]["models"] == ["m"] and result["evidence"]["paths"]["short"] == "/v1/completions"


def test_c70_a_health_generate_that_lies():
    eyes = Script(
        {
            "/health": [(None, 200, 0, {})],
            "/health_generate": [(None, 200, 0, {})],
            "/generate": [(240, 200, None, TOKEN), (None, 200, 1, TOKEN)],
        }
    )
    result = wait(eyes)
    assert result["ready"] and 240 <= result["elapsed"] < 260
    # One request waited all the time; none was given up.
    assert [status for _at, path, status in eyes.asked if path == "/generate"] == [200, 200]


def test_c67_a_generation_that_never_answers():
    eyes = Script({"/health": [(None, 200, 0, {})], "/generate": [(None, 200, None, TOKEN)]})
    result = wait(eyes, Settings(timeout=900, stall_timeout=300))
    assert not result["ready"] and result["cause"]["code"] == "generation_unavailable"
    assert result["elapsed"] >= 300


def test_c75_a_second_run_costs_one_generation():
    eyes = Script(
        {"/v1/models": [(None, 200, 0, CARDS)], "/health": [(None, 200, 1, {})], "/v1/chat/completions": [
            (360, 200, None, {}), (None, 200, 1, {"choices": [{"message": {"content": "hi"}}]})]},
        listens=(4, None),
    )  # fmt: skip
    result = wait(eyes, Settings(model="m"))
    assert result["ready"] and 360 <= result["elapsed"] < 380
    eyes.asked.clear()
    again = wait(eyes, Settings(model="m", was_ready_before=True))
    assert again["ready"] and again["evidence"]["requests"]["generations"] == 1


def test_c72_a_first_200_while_kernels_compile_later():
    eyes = Script(
        {"/health": [(30, 503, 0, {}), (60, 200, 1, {}), (400, 503, 20, {}), (None, 200, 1, {})],
         "/generate": [(400, 503, 25, {}), (None, 200, 2, TOKEN)]},
        log=[(60, "i0", "[...] Entering DeepGEMM JIT Pre-Compile session. It may take a long time")]
        + [(t, "i0", f"DeepGEMM warmup:  {t // 5}%|##  | {t * 30}/16384") for t in range(61, 400, 20)],
    )  # fmt: skip
    result = wait(eyes, Settings(timeout=120, stall_timeout=60))
    assert result["ready"] and result["elapsed"] >= 400
    assert any("jit_precompile" in entry.get("progress", "") for entry in result["history"])


def test_c71_long_prompts_make_it_busy_and_not_dead():
    health = [(100, 200, 1, {}), (700, 503, 20, {}), (None, 200, 1, {})]
    eyes = Script({"/health": health, "/generate": [(700, 200, None, TOKEN), (None, 200, 1, TOKEN)]},
                  tokens=lambda t: int(t) * 900)  # fmt: skip
    result = wait(eyes, Settings(stall_timeout=200, was_ready_before=True))
    assert result["ready"] and "busy" in [entry["state"] for entry in result["history"]]
    flat = Script({"/health": [(None, 503, 20, {})]}, tokens=lambda t: 5)
    result = wait(flat, Settings(stall_timeout=300, was_ready_before=True))
    assert result["state"] == "stuck" and 300 <= result["elapsed"] < 340


def test_c87_crash_loop_with_the_first_error_of_the_first_start():
    rows = [(12, {}), (42, {"active_state": "activating", "sub_state": "auto-restart", "result": "exit-code"}),
            (None, {"n_restarts": 1, "invocation": "i1"})]  # fmt: skip
    log = [
        (5, "i0", "ImportError: DeepEP is not installed. Please install DeepEP package"),
        (11, "i0", "[2026-11-30 20:00:36] Received sigquit from a child process. It usually means the child failed."),
        (45, "i1", "torch.OutOfMemoryError: CUDA out of memory."),
    ]
    eyes = Script(
        unit=lambda t: next(row for until, row in rows if until is None or t < until), log=log, listens=(999, None)
    )
    result = wait(eyes)
    assert result["state"] in ("failed", "crash_loop") and result["elapsed"] <= 14
    assert result["cause"]["code"] == "backend_missing"
    # A wait that begins later looks at the first start, too.
    log = [(-0.5, name, text) for _at, name, text in [*log, (0, "i2", "torch.OutOfMemoryError: CUDA out of memory.")]]
    waiting = {"n_restarts": 2, "invocation": "i2", "active_state": "activating", "sub_state": "auto-restart"}
    later = Script(unit=lambda t: waiting, listens=(999, None), log=log)
    result = wait(later)
    assert result["state"] == "crash_loop" and result["cause"]["code"] == "backend_missing"
    assert result["cause"]["invocation"] == "i0"


def test_c96_a_removed_argument_with_its_replacement():
    text = "ValueError: Removed server argument(s): warmup -> warmup_mode=request or warmup_mode=off"
    eyes = Script(unit=lambda t: {"active_state": "failed", "result": "exit-code", "exec_status": 1} if t > 5 else {},
                  log=[(5, "i0", text)], listens=(999, None))  # fmt: skip
    result = wait(eyes)
    assert result["state"] == "failed" and result["cause"]["code"] == "argument_removed"
    assert result["cause"]["replacement"] == ["warmup_mode=request", "warmup_mode=off"]


def test_c10_a_compilation_of_twenty_minutes():
    log = [(20, "i0", "[...] Entering DeepGEMM JIT Pre-Compile session. It may take a long time")]
    log += [(t, "i0", f"DeepGEMM warmup:  {t * 100 // 1260}%|####      | {t * 13}/16384") for t in range(30, 1250, 30)]
    eyes = Script(
        {"/health": [(None, 200, 1, {})], "/generate": [(None, 200, 1, TOKEN)]}, log=log, listens=(1250, None)
    )
    result = wait(eyes, Settings(timeout=300, stall_timeout=120))
    assert result["ready"] and result["elapsed"] > 1250
    assert {entry["state"] for entry in result["history"]} <= {"starting", "warming", "ready"}


# ---- the slice


def test_a_failure_is_told_while_a_generation_hangs():
    eyes = Script({"/health": [(None, 200, 0, {})], "/generate": [(None, 200, None, TOKEN)]},
                  unit=lambda t: {"active_state": "failed", "result": "signal"} if t >= 50 else {})  # fmt: skip
    result = wait(eyes)
    assert result["state"] == "failed" and result["elapsed"] <= 53 + 2.5


def test_nothing_is_asked_of_a_stranger():
    eyes = Script({"/health": [(None, 200, 0, {})], "/generate": [(None, 200, 0, TOKEN)]}, owned=False)
    result = wait(eyes)
    assert result["cause"]["code"] == "port_held_by_other" and not eyes.asked and result["elapsed"] <= 3


def test_an_embedding_model_is_asked_for_an_embedding():
    eyes = Script({"/health": [(None, 200, 0, {})], "/model_info": [(None, 200, 0, {"is_generation": False})],
                   "/v1/embeddings": [(None, 200, 0, {"data": [{"embedding": [0.1]}]})]})  # fmt: skip
    result = wait(eyes)
    assert result["ready"] and result["evidence"]["generations"] == ["embedding", "embedding"]


def test_an_old_server_has_only_the_old_names():
    eyes = Script({"/health": [(None, 200, 0, {})], "/get_model_info": [(None, 200, 0, {"model_path": "/m/x"})],
                   "/generate": [(None, 200, 0, TOKEN)]})  # fmt: skip
    assert wait(eyes, Settings(model="/m/x"))["ready"]
    assert wait(eyes, Settings(model="/m/y"))["cause"]["code"] == "wrong_model"


@pytest.mark.parametrize("body", [{}, {"text": ""}, {"error": {"message": "x"}}, [], {"choices": []}, "<html>"])
def test_a_200_without_a_token_is_no_generation(body):
    eyes = Script({"/health": [(None, 200, 0, {})], "/generate": [(None, 200, 0, body)]})
    result = wait(eyes, Settings(timeout=60, stall_timeout=40))
    assert not result["ready"] and result["cause"]["code"] == "generation_unavailable"


def test_a_random_model_may_generate_an_empty_text():
    body = {"text": "", "output_ids": [2], "meta_info": {"completion_tokens": 1}}
    eyes = Script({"/health": [(None, 200, 0, {})], "/generate": [(None, 200, 0, body)]})
    assert wait(eyes)["ready"]


def test_verify_looks_once_and_brings_what_a_comparison_needs():
    eyes = Script({"/health": [(None, 200, 0, {})], "/generate": [(None, 200, 0, TOKEN)]},
                  log=[(0, "i0", "[2026-11-30 21:21:40 TP0] Only use 20 SMs for DeepEP communication.")])  # fmt: skip
    result = wait(eyes, Settings(verify=True))
    assert result["ready"] and result["evidence"]["generations"] == ["short"]
    assert result["log_backends"] == ["deep_ep"]
    assert "tops3cret" not in json.dumps(result)
    assert result["server_info"]["tp_size"] == 8


def test_once_waits_for_its_own_probe_in_one_call():
    eyes = Script({"/health": [(None, 200, 20, {})], "/generate": [(None, 200, 40, TOKEN)]})
    result = run_slice(eyes, OPTIONS, Settings(verify=True), None, 5.0, once=True)
    assert result["slice"]["done"] and result["ready"]


def test_secrets_stay_on_the_host():
    line = "[2026-11-30 20:00:00] server_args=ServerArgs(api_key='tops3cret') odd:tops3cret"
    eyes = Script(
        log=[(1, "i0", line)],
        process=lambda t: {"argv": ["python", "--api-key", "tops3cret"]},
        unit=lambda t: {"active_state": "failed", "result": "exit-code"} if t > 4 else {},
        listens=(99, None),
    )
    result = wait(eyes, Settings(expected_argv=["python", "--api-key", "other"]), secrets=["tops3cret"])
    assert "tops3cret" not in json.dumps(result)


def test_a_failure_is_one_message():
    eyes = Script(unit=lambda t: {"load_state": "not-found", "active_state": "inactive"})
    text = failure_text("default", wait(eyes))
    assert "default is failed" in text and "[unit_missing]" in text and "mend:" in text and "\n" not in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"port": 0}, "sglang_port"),
        ({"port": 70000}, "sglang_port"),
        ({"successes": 0}, "successes"),
        ({"stall_timeout": 0}, "stall_timeout"),
        ({"hard_timeout": 10}, "hard_timeout"),
        ({}, None),
    ],
)
def test_bad_input_is_one_message(change, word):
    params = {
        "port": 30000,
        "successes": 3,
        "timeout": 1800.0,
        "stall_timeout": 600.0,
        "hard_timeout": 7200.0,
        **change,
    }
    text = usable(params)
    assert (word in text) if word else text is None


def test_server_info_loses_its_secrets_and_keeps_the_rest():
    info = {"api_key": "k1", "admin_api_key": None, "tp_size": 8, "launch_command": "x --api-key k2 --tp 8",
            "argv": ["x", "--api-key", "k3"], "nested": [{"hf_token": "k4"}], "tokenizer_path": "/m"}  # fmt: skip
    out = redact_server_info(info)
    assert not any(f"k{n}" in json.dumps(out) for n in range(1, 5))
    assert out["tp_size"] == 8 and out["tokenizer_path"] == "/m" and out["admin_api_key"] is None


# ---- what is read from the host


def test_systemctl_show():
    text = (
        "LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nResult=exit-code\nExecMainStatus=2\nMainPID=0\n"
        "NRestarts=3\nInvocationID=abc\nControlGroup=/x\nActiveEnterTimestampMonotonic=2500000\n"
    )
    unit = observe.show_unit(lambda argv, timeout: RunResult(0, text, ""), "u")
    assert unit["sub_state"] == "auto-restart" and unit["n_restarts"] == 3 and unit["exec_status"] == 2
    assert unit["active_enter"] == 2.5 and unit["main_pid"] == 0
    assert observe.show_unit(lambda argv, timeout: RunResult(1, "", "no bus"), "u") is None


def test_journal_records():
    records = [
        {"__CURSOR": "c1", "MESSAGE": "Started.", "_PID": "1", "INVOCATION_ID": "a"},
        {"__CURSOR": "c2", "MESSAGE": [27, 91, 49, 109, 120], "_SYSTEMD_INVOCATION_ID": "a"},
        {"__CURSOR": "c3", "MESSAGE": "two\nlines", "_SYSTEMD_INVOCATION_ID": "b"},
        {"__CURSOR": "c4", "MESSAGE": None},
    ]
    text = "\n".join(map(json.dumps, records)) + "\nnot json\n[1]\n"
    entries, cursor = observe.parse_journal(text)
    assert cursor == "c4"
    assert [tuple(entry) for entry in entries] == [
        ("a", "Started."), ("a", "\x1b[1mx"), ("b", "two"), ("b", "lines"), (None, "")
    ]  # fmt: skip


def test_a_log_file_that_was_begun_anew(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\ntwo\nhal", encoding="utf-8")
    lines, offset, error = observe.read_log_file(str(path), 0)
    assert (lines, offset, error) == (["one", "two"], 8, "")
    path.write_text("one\ntwo\nhalf\n", encoding="utf-8")
    assert observe.read_log_file(str(path), offset)[0] == ["half"]
    path.write_text("new\n", encoding="utf-8")
    assert observe.read_log_file(str(path), 13)[0] == ["new"]
    assert observe.read_log_file(str(tmp_path / "none"), 0)[2]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("k-1\n", "k-1"),
        ('api-key: "a\\"b"\n', 'a"b'),
        ("tp-size: 8\napi-key: 'it''s'\n", "it's"),
        ("api_key: bare\n", "bare"),
    ],
)
def test_keys(tmp_path, text, key):
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    assert observe.read_key(str(path)) == key


def test_a_key_file_that_holds_none(tmp_path):
    (tmp_path / "key").write_text("a: 1\nb: 2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="api_key_file"):
        observe.read_key(str(tmp_path / "key"))
    with pytest.raises(ValueError, match="cannot be read"):
        observe.read_key(str(tmp_path / "none"))


def test_listeners_of_v4_v6_and_mapped():
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {}:7530 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 100 0 0 10 0\n"
    text = (
        header + row.format("0100007F", "0A", 11) + row.format("00000000", "0A", 12) + row.format("0100007F", "01", 13)
    )
    assert observe.parse_listeners(text, 30000) == [("127.0.0.1", 11), ("0.0.0.0", 12)]
    six = header + row.format("0000000000000000FFFF00000100007F", "0A", 14) + row.format("0" * 32, "0A", 15)
    assert observe.parse_listeners(six, 30000) == [("127.0.0.1", 14), ("::", 15)]
    assert observe.parse_listeners("nonsense\n1 2 3\n" + header, 30000) == []


@pytest.mark.parametrize(
    ("address", "host", "same"),
    [("127.0.0.1", "127.0.0.1", True), ("0.0.0.0", "127.0.0.1", True), ("10.0.0.1", "127.0.0.1", False),
     ("10.0.0.1", "0.0.0.0", True), ("::", "127.0.0.1", True)],
)  # fmt: skip
def test_which_sockets_matter(address, host, same):
    assert observe.relevant(address, host) is same


def test_metrics():
    text = (
        '# HELP x\nsglang:prompt_tokens_total{model_name="m"} 10.0\nsglang:generation_tokens_total{a="b"} 5.0\n'
        "sglang:num_requests_total 2\nsglang:num_running_reqs 3\nother_tokens_total 9\nsglang:x_tokens_total nan-s\n"
    )
    assert observe.parse_metrics(text) == {"tokens": 15.0, "requests": 2.0}


# ---- real sockets and processes


@pytest.fixture
def stand_in():
    started = []

    def start(script, tls=None):
        server, state = serve(script, tls=tls)
        started.append(server)
        return server.server_address[1], state

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def real(port, tmp_path, log="", model=None, key=None, scheme="http"):
    path = tmp_path / "log"
    path.write_text(log, encoding="utf-8")
    options = Options(None, os.getpid(), str(path), "127.0.0.1", port)
    return HostEyes(options, observe.Target("127.0.0.1", port, scheme, key), run, model), options


def test_the_listener_is_found_out(stand_in):
    port, _state = stand_in({})
    mine = observe.find_listener("127.0.0.1", port, [os.getpid()])
    assert mine["owned"] is True and mine["pids"] == [os.getpid()]
    other = observe.find_listener("127.0.0.1", port, [1])
    assert other["owned"] is False and os.getpid() in other["pids"]
    assert observe.find_listener("127.0.0.1", 1, [os.getpid()]) is None


def test_a_real_wait_is_patient_and_asks_one_thing_at_a_time(stand_in, tmp_path):
    """C74: probes that are dropped are aborted, and after three of them the server is lost."""
    port, state = stand_in(
        {"routes": {"/health": [{"status": 200, "delay": 0.6}], "/generate": [{"status": 200, "delay": 0.8}],
                    "/v1/models": [{"status": 200, "body": CARDS}]},
         "after_disconnects": {"count": 3, "status": 500}}
    )  # fmt: skip
    eyes, options = real(port, tmp_path, model="m")
    carry, result = None, {}
    for _slice in range(60):
        # Slices much shorter than a request: each one outlives the slice that sent it.
        result = run_slice(eyes, options, Settings(model="m"), carry, 0.1)
        if result["slice"]["done"]:
            break
        carry = json.loads(json.dumps(result["slice"]["carry"]))
    assert result["ready"], result
    assert state.report() == {"counts": state.counts, "most_at_once": 1, "disconnects": 0}
    assert state.counts["/generate"] == 2


def test_a_real_wait_with_a_key(stand_in, tmp_path):
    port, _state = stand_in(
        {"key": "tops3cret", "routes": {"/health": [{"status": 200}], "/generate": [{"status": 200}]}}
    )
    eyes, options = real(port, tmp_path, key="tops3cret")
    assert run_slice(eyes, options, Settings(), None, 30.0, secrets=["tops3cret"])["ready"]
    eyes, options = real(port, tmp_path, key="wrong")
    assert run_slice(eyes, options, Settings(), None, 30.0)["cause"]["code"] == "api_key_refused"


def test_tls(stand_in, tmp_path):
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("no openssl to make a certificate with")
    for name in ("one", "other"):
        made = run(
            [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(tmp_path / f"{name}.key"), "-out",
             str(tmp_path / f"{name}.pem"), "-days", "2", "-subj", "/CN=sglang.test", "-addext",
             "subjectAltName=DNS:sglang.test"], 60.0
        )  # fmt: skip
        assert made.rc == 0, made.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(tmp_path / "one.pem"), str(tmp_path / "one.key"))
    port, _state = stand_in({"routes": {"/health": [{"status": 200}]}}, context)

    def status(ca, name):
        target = observe.Target("127.0.0.1", port, "https", None, ca and str(tmp_path / ca), name)
        return observe.ask(target, observe.Ask("GET", "/health"), 10.0)

    assert status(None, None)["status"] == 200
    assert status("one.pem", None)["status"] == 200
    assert status("one.pem", "sglang.test")["status"] == 200
    assert "CERTIFICATE" in status("one.pem", "else.test")["error"].upper()
    assert "CERTIFICATE" in status("other.pem", "sglang.test")["error"].upper()


def test_a_process_that_ends_is_told_with_its_log(tmp_path):
    path = tmp_path / "log"
    script = tmp_path / "s.json"
    script.write_text(
        json.dumps({"log": [[0, "x: error: unrecognized arguments: --no-such-flag"]], "exit": {"at": 1, "status": 2}})
    )
    server = os.path.join(os.path.dirname(__file__), "..", "stand_ins", SPAWNED)
    with open(path, "wb") as out:
        process = subprocess.Popen([sys.executable, server, str(script)], stdout=out)
    try:
        options = Options(None, process.pid, str(path), "127.0.0.1", 1)
        eyes = HostEyes(options, observe.Target("127.0.0.1", 1), run, None)
        result = run_slice(eyes, options, Settings(), None, 20.0)
    finally:
        process.kill()
        process.wait()
    assert result["state"] == "failed" and result["cause"]["code"] == "flag_unknown"


def test_a_probe_that_is_killed_is_asked_again(stand_in, tmp_path):
    port, _state = stand_in({"routes": {"/health": [{"until": 3600, "hang": True}]}})
    folder = str(tmp_path)
    handle = observe.begin(observe.Target("127.0.0.1", port), "health", [observe.Ask("GET", "/health")], 30.0, folder)
    assert observe.collect(handle) is None
    os.kill(handle["pid"], 9)
    deadline = time.monotonic() + 10
    answer = None
    while answer is None and time.monotonic() < deadline:
        answer = observe.collect(handle)
    assert answer["status"] is None and "ended from outside" in answer["error"]


def test_the_folder_of_the_answers_is_private(tmp_path):
    folder = observe.private_folder()
    assert os.stat(folder).st_mode & 0o077 == 0
    observe.remove_folder(folder)
    assert not os.path.exists(folder)
    observe.remove_folder(str(tmp_path))
    assert tmp_path.exists()


def test_nobody_listens():
    assert observe.ask(observe.Target("127.0.0.1", 1), observe.Ask("GET", "/"), 5.0)["refused"] is True


@pytest.mark.parametrize(
    ("argv", "scheme"),
    [
        ([], "http"),
        (["python", "-m", "sglang.launch_server", "--ssl-certfile", "/x.pem", "--ssl-keyfile", "/k.pem"], "https"),
        (["python", "--ssl-certfile=/x.pem"], "https"),
        (["python", "--chat-template", "ssl-certfile"], "http"),
    ],
)
def test_a_server_with_a_certificate_is_spoken_to_by_tls(argv, scheme):
    assert observe.scheme_of(argv) == scheme


def test_the_argv_of_what_runs(tmp_path):
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "cmdline").write_bytes(b"python\0--ssl-certfile\0/x.pem\0")
    said = {"a.service": "42\n", "b.service": "0\n", "c.service": ""}

    def show(argv, _limit):
        return RunResult(0, said[argv[-1]], "")

    assert observe.running_argv("a.service", None, show, str(tmp_path)) == ["python", "--ssl-certfile", "/x.pem"]
    assert observe.running_argv("b.service", None, show, str(tmp_path)) == []
    assert observe.running_argv("c.service", None, show, str(tmp_path)) == []
    assert observe.running_argv(None, 42, show, str(tmp_path))[1] == "--ssl-certfile"
