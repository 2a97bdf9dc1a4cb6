# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pathlib

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import (
    HIDDEN,
    SHOWN_LINE,
    clean,
    describe,
    is_secret_name,
    parse_line,
    redact,
    redact_argv,
    shown,
    template,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LOGS = pathlib.Path(__file__).parent.parent / "fixtures" / "logs"


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            "Loading safetensors checkpoint shards:  41% Completed | 20/46 [00:12<00:10,  1.20s/it]",
            {"kind": "weights", "percent": 41, "done": 20, "total": 46, "rate": "1.20s/it"},
        ),
        ("DeepGEMM warmup:  41%|####      | 6720/16384", {"kind": "jit", "percent": 41, "done": 6720, "total": 16384}),
        (
            "Multi-thread loading shards:   3% Completed | 5/163 [00:04<02:09,  1.22it/s]",
            {"kind": "weights", "percent": 3},
        ),
        (
            "\rCapturing batches (bs=8):  25%|##5   | 2/8 [00:01<00:03,  1.55it/s]",
            {"kind": "graph_capture", "percent": 25},
        ),
        ("Fetching 20 files:  10%|#  | 2/20 [00:01<00:03,  1.55it/s]", {"kind": "download", "percent": 10}),
        (
            "[2026-11-30 21:20:32.250 TP1 EP1] Load weight begin. avail mem=138.25 GB",
            {"kind": "weights", "rank": "TP1 EP1"},
        ),
        ("[...] Entering DeepGEMM JIT Pre-Compile session. It may take a long time", {"kind": "jit"}),
        ("[2026-11-30 21:21:53.042] The server is fired up and ready to roll!", {"kind": "served"}),
        ('[2026-11-30 21:18:59] INFO:     127.0.0.1:55794 - "GET /health HTTP/1.1" 503', {"kind": "access"}),
        (
            "[2026-11-30 21:20:32.250 TP1 EP1] Scheduler hit an exception: Traceback (most recent call last):",
            {"kind": "fatal"},
        ),
        (
            "[2026-11-30 21:20:32] Received sigquit from a child process. It usually means the child failed.",
            {"kind": "fatal"},
        ),
        (
            "[2026-11-30 21:20:32] Ignore import error when loading sglang.srt.models.x: No module named 'y'",
            {"kind": "noise"},
        ),
        ("[2026-11-30 21:22:18.935] SIGTERM received. signum=None frame=None. Draining requests", {"kind": "shutdown"}),
        (
            "[2026-11-30 21:21:40 TP0 EP0] Only use 20 SMs for DeepEP communication.",
            {"kind": "backend", "name": "deep_ep"},
        ),
        ("[2026-11-30 21:20:53] DeepEP MoE is enabled. The expert parallel size is adjusted", None),
        (
            "[2026-11-30 20:00:00] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
            {"kind": "fatal"},
        ),
        ("[2026-11-30 20:00:00] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)", None),
        ("    --disable-torch-compile [--x]", None),
        ("", None),
    ],
)
def test_lines(line, event):
    found = parse_line(line)
    if event is None:
        assert found is None
    else:
        assert found is not None and {key: found.get(key) for key in event} == event


@pytest.mark.parametrize(
    ("log", "kinds", "absent"),
    [
        (
            "gpu/deepep_normal.log",
            {
                "start",
                "weights",
                "weights_end",
                "memory_pool",
                "engine_ready",
                "http_up",
                "backend",
                "served",
                "batch",
                "shutdown",
            },
            {"fatal"},
        ),
        ("gpu/none.log", {"served"}, {"fatal", "backend"}),
        ("gpu/deepep_bf16_auto.log", {"fatal", "core_dump_wait"}, {"served", "shutdown"}),
        ("sglang/port_taken.txt", {"fatal", "served"}, set()),
        ("sglang/unknown_flag.txt", set(), {"fatal", "jit", "weights", "graph_capture"}),
    ],
)
def test_recorded_logs(log, kinds, absent):
    lines = (LOGS / log).read_text(encoding="utf-8").splitlines()
    found = {event["kind"] for event in map(parse_line, lines) if event}
    assert kinds <= found
    assert not absent & found


def test_progress_in_words():
    event = parse_line("Loading safetensors checkpoint shards:  41% Completed | 20/46 [00:12<00:10,  1.20s/it]")
    assert describe(event) == "loading weights 41 % (20 of 46, 1.20s/it)"
    assert "jit_precompile" in describe(parse_line("Entering DeepGEMM JIT Pre-Compile session."))


SECRET = "hunter2-Ab.Cd"


@pytest.mark.parametrize(
    "text",
    [
        f"server_args=ServerArgs(model_path='x', api_key='{SECRET}', tp_size=1)",
        f"server_args={{'model_path': 'x', 'api_key': '{SECRET}', 'tp_size': 1}}",
        f'{{"admin_api_key": "{SECRET}", "x": 1}}',
        f"launch_server.py --api-key {SECRET} --tp-size 2",
        f"launch_server.py --api-key={SECRET}",
        f"launch_command: ['python', '--api-key', '{SECRET}', '--tp-size']",
        f'api-key: "{SECRET}"',
        f"api-key: {SECRET}",
        f"ssl_keyfile_password='{SECRET}'",
        f"Authorization: Bearer {SECRET}",
        f"OPENAI_API_KEY={SECRET}",
        f"HF_TOKEN={SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"https://user:{SECRET}@host/x",
        f"password = {SECRET}",
    ],
)
def test_secrets_are_hidden(text):
    hidden = redact(text)
    assert SECRET not in hidden and HIDDEN in hidden
    assert SECRET not in shown("[2026-11-30 20:00:00] " + text)


@pytest.mark.parametrize(
    "text",
    [
        "max_total_num_tokens=4096, context_len=2048",
        "server_args=ServerArgs(api_key=None, tp_size=1)",
        "generation_tokens: 17",
        "--tokenizer-path /models/x --max-total-tokens 4096",
        "undefined symbol: _ZN3c105ErrorC2E",
        "http://127.0.0.1:30000/health",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_given_secrets_are_hidden_wherever_they_stand():
    assert redact("odd place: xx12345678yy", ["12345678"]) == f"odd place: xx{HIDDEN}yy"


def test_argv():
    argv = ["python", "--api-key", SECRET, "--admin-api-key=" + SECRET, "--tp-size", "2", "--api-key"]
    assert redact_argv(argv) == [
        "python",
        "--api-key",
        HIDDEN,
        "--admin-api-key=" + HIDDEN,
        "--tp-size",
        "2",
        "--api-key",
    ]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key", True),
        ("--api-key", True),
        ("admin_api_key", True),
        ("api_key_file", False),
        ("max_tokens", False),
        ("hf_token", True),
        ("tokenizer_path", False),
        ("ssl_keyfile_password", True),
    ],
)
def test_names(name, secret):
    assert is_secret_name(name) is secret


def test_lines_of_one_kind_have_one_template():
    one = template("[2026-11-30 20:00:00 TP0] Decode batch. #running-req: 1, gen throughput: 12.5")
    two = template("[2026-11-30 20:00:09 TP3] Decode batch. #running-req: 77, gen throughput: 0.25")
    assert one == two and one != template("something else")


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=500),
        st.lists(
            st.sampled_from(["%", "|", "/", "[", "1", "api_key", "=", "'", "\\", "\x1b[", "\r", ":", " ", "--"]),
            max_size=200,
        ).map("".join),
    )
)
def test_no_text_raises_and_shown_lines_are_short(text):
    event = parse_line(text)
    if event:
        assert describe(event)
    template(text)
    redact_argv(text.split())
    assert len(shown(text)) <= SHOWN_LINE + len(HIDDEN)
    assert "\x1b[3" not in clean("\x1b[31mx\x1b[0m")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_.", min_size=8, max_size=40))
def test_no_secret_survives_in_its_usual_places(secret):
    secret = "Q" + secret
    for text in (f"api_key='{secret}'", f"--api-key {secret} -x", f'"api_key": "{secret}"', f"api-key: {secret}"):
        assert secret not in redact(text)
