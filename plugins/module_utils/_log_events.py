# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: typed events out of SGLang's log, and log lines that are safe to show.

Nothing here raises on any text: a log is whatever a broken process wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Optional

MAX_LINE = 4000
SHOWN_LINE = 400
HIDDEN = "********"

Event = dict[str, Any]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
_PREFIX = re.compile(
    r"^\s*(?:\(?[\w.:-]{0,64}?pid=\d+[^)]{0,80}\)?\s*)?"
    r"\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?P<rank>(?: [A-Z]{2,5}\d+)*)\]\s?"
)

# The names under which a secret may stand in a log, an argv or a dict.
_SECRET_NAME = (
    r"(?:(?:admin|openai|hf|hugging[-_]?face|hub|wandb|aws|ssl|keyfile)[-_])*"
    r"(?:api[-_ ]?keys?|access[-_]?key(?:[-_]?id)?|secret(?:[-_]?(?:access)?[-_]?key)?|"
    r"(?:hf|hub|hugging_?face(?:_hub)?|auth|access|bearer|refresh)[-_]token|password|passwd|passphrase|"
    r"ssl[-_]keyfile[-_]password|credentials?)"
)
_SECRETS = (
    # 'api_key': 'x'   "api-key": "x"   api_key='x'
    re.compile(
        r"(?P<keep>['\"]?\b"
        + _SECRET_NAME
        + r"['\"]?\s*[:=]\s*)(?P<value>b?'(?:\\.|[^'\\])*'?|b?\"(?:\\.|[^\"\\])*\"?)",
        re.I,
    ),
    # --api-key x   --api-key=x
    re.compile(
        r"(?P<keep>(?<![\w-])--" + _SECRET_NAME + r"(?:\s*=\s*|['\"]?,?\s+['\"]?))(?P<value>[^\s'\",\])}]+)", re.I
    ),
    # api_key=x   API_KEY: x   api-key: x
    re.compile(
        r"(?P<keep>\b" + _SECRET_NAME + r"\s*[:=]\s*)(?P<value>(?!None\b|null\b|True\b|False\b)[^\s'\",\])}]+)", re.I
    ),
    re.compile(r"(?P<keep>\b(?:bearer|basic)\s+)(?P<value>[A-Za-z0-9._~+/=-]{6,})", re.I),
    re.compile(r"(?P<keep>\b)(?P<value>(?:hf_|sk-)[A-Za-z0-9_-]{16,})"),
    re.compile(r"(?P<keep>://[^/\s:@]{1,64}:)(?P<value>[^@\s/]{1,200})(?=@)"),
)


_WHOLE_NAME = re.compile(r"(?:.*[-_])?(?:" + _SECRET_NAME + r")$", re.I)


def is_secret_name(name: str) -> bool:
    """Is this the name (of a flag, a variable, a key) of a secret's value?"""
    return bool(_WHOLE_NAME.match(name.strip("'\"- "))) and not name.endswith(("_file", "-file"))


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with asterisks for the values of secret-looking names, bearer tokens and the given ``secrets``."""
    for secret in secrets:
        if secret and len(secret) >= 4:
            text = text.replace(secret, HIDDEN)
    for pattern in _SECRETS:
        text = pattern.sub(lambda match: match.group("keep") + HIDDEN, text)
    return text


def redact_argv(argv: Iterable[str], secrets: Iterable[str] = ()) -> list[str]:
    """An argv whose secret values are asterisks (``--api-key X`` and ``--api-key=X``)."""
    out: list[str] = []
    hide = False
    flag = re.compile(r"^--?" + _SECRET_NAME + r"$", re.I)
    for token in argv:
        if hide and not token.startswith("--"):
            out.append(HIDDEN)
        else:
            out.append(redact(token, secrets))
        hide = bool(flag.match(token))
    return out


def clean(line: str) -> str:
    """One log line without ANSI codes; of a progress bar's redrawings only the last; never longer than ``MAX_LINE``."""
    line = _ANSI.sub("", line).rstrip("\r\n")
    if "\r" in line:
        parts = [part for part in line.split("\r") if part.strip()]
        line = parts[-1] if parts else ""
    line = line.replace("\x00", "")
    return line if len(line) <= MAX_LINE else line[:MAX_LINE]


def shown(line: str, secrets: Iterable[str] = ()) -> str:
    """A line that may be shown: clean, without secrets, at most ``SHOWN_LINE`` characters."""
    line = redact(clean(line), secrets)
    return line if len(line) <= SHOWN_LINE else line[: SHOWN_LINE - 1] + "…"


def body(line: str) -> tuple[str, str]:
    """``(rank, text)`` of a clean line: ``("TP0 EP0", "Load weight begin.")``; rank is empty when none is named."""
    match = _PREFIX.match(line)
    if not match:
        return "", line
    return match.group("rank").strip(), line[match.end() :]


_ACCESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+ - \"[A-Z]+ |\[[0-9a-f:]+\]:\d+ - \"[A-Z]+ ")
_NOISE = re.compile(
    r"Ignore import error when|UserWarning|FutureWarning|DeprecationWarning|^\s*warnings\.warn\(|is deprecated|"
    r"Failed to load generation config|falling back to standard implementation|destroy_process_group\(\) was "
    r"not called|"
    r"Using default MoE kernel config|Using MoE kernel config|Fail to set RLIMIT|Pyspy failed|init failed for "
    r"transport: IBGDA|"
    r"^\s*\[-{1,2}[a-z]|^usage: |CUDA coredump pipe not found|^\s*Example: sglang serve"
)
_BAR = re.compile(
    r"(?P<label>[A-Za-z][^|%]{0,120}?)[:\s]*?(?P<percent>\d{1,3})%\s*(?:Completed)?\s*\|.{0,200}?"
    r"(?P<done>\d+(?:\.\d+)?)(?P<unit>[kKMGT]?)i?B?/(?P<total>\d+(?:\.\d+)?)(?P<whole>[kKMGT]?)i?B?(?![\w.])"
    r"(?:\s*\[(?P<times>[^\]]{0,80})\])?"
)
# What ninja prints while it compiles an extension.
_NINJA = re.compile(
    r"^\[(?P<done>\d{1,6})/(?P<total>\d{1,6})\] "
    r"(?:[^\n]{0,200}?(?:nvcc|c\+\+|g\+\+|gcc|clang|cicc|ptxas))(?:\s|$)"
)
_SCALE = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_RATE = re.compile(r"([\d.]+\s*(?:s/it|it/s|[kMG]?i?B/s))")

_PLAIN: tuple[tuple[str, Any], ...] = (
    ("start", re.compile(r"server_args=")),
    (
        "fatal",
        re.compile(
            r"(?:Scheduler|TpModelWorkerClient|TokenizerManager|DetokenizerManager|Data parallel controller|"
            r"DataParallelController) hit an exception"
        ),
    ),
    ("fatal", re.compile(r"(?:Received sigquit from a child process|SIGQUIT received\.)", re.I)),
    ("fatal", re.compile(r"Initialization failed\. (?:warmup|Please see)")),
    (
        "fatal",
        re.compile(r"Rank \d+ scheduler (?:is dead|died)|Scheduler process .{0,60}(?:exited|died|terminated)", re.I),
    ),
    ("fatal", re.compile(r"watchdog timeout(?!.*soft=True)|Watchdog TimeoutError", re.I)),
    ("fatal", re.compile(r"error while attempting to bind on address")),
    ("core_dump_wait", re.compile(r"Waiting [\d.]+ seconds for CUDA coredumps")),
    ("shutdown", re.compile(r"SIGTERM received|Gracefully exiting|Received signal SIGTERM")),
    ("dist_init", re.compile(r"Init torch distributed begin")),
    ("dist_init_end", re.compile(r"Init torch distributed ends")),
    ("weights", re.compile(r"Load weight begin|Loading weights|Loading safetensors")),
    ("weights_end", re.compile(r"Load weight end|Loading weights took")),
    ("memory_pool", re.compile(r"KV Cache is allocated|Memory pool end|Allocating KV")),
    (
        "jit",
        re.compile(
            r"DeepGEMM JIT|JIT Pre-?Compil|JIT Compil|Torch adapter (?:with JIT|JIT build)|Building the Torch "
            r"adapter|(?:Compiling|Building|Warming up).{0,60}kernel|[Aa]utotun|torch\.compile|Inductor|"
            r"precompil|DeepGEMM warmup|[Bb]egins? to compile|flashinfer\.jit: (?:Building|Compil)|cute\.compile",
            re.I,
        ),
    ),
    (
        "graph_capture",
        re.compile(
            r"Capture (?:cuda|CPU|prefill|decode|piecewise|draft|target)[\w -]*(?:graph)?[\w -]* begin|"
            r"Capturing (?:batches|num tokens|cuda graph)|Registering \d+ cuda graph addresses",
            re.I,
        ),
    ),
    ("graph_capture_end", re.compile(r"Capture .{0,40}graph.{0,20} end", re.I)),
    ("engine_ready", re.compile(r"max_total_num_tokens=|Dummy health check server started")),
    (
        "http_up",
        re.compile(
            r"Uvicorn running on|Application startup complete|Start of (?:pd |\w+ )?disaggregation .{0,20}warmup"
        ),
    ),
    (
        "served",
        re.compile(
            r"The server is fired up and ready to roll|End of \w+ disaggregation .{0,20}warmup with status 200", re.I
        ),
    ),
    ("batch", re.compile(r"(?:Prefill|Decode) batch[,.\[ ]")),
    ("download", re.compile(r"Fetching \d+ files|Downloading (?:shards|bytes)|download.{0,20}\bweights", re.I)),
)

_BACKENDS = (
    ("deep_ep", re.compile(r"Only use \d+ SMs for DeepEP communication")),
    (
        "mooncake",
        re.compile(
            r"Mooncake Transfer Engine (?:initialized|started)|Installing TCP transport|Transfer Engine RPC "
            r"using|installTransport",
            re.I,
        ),
    ),
    (
        "nixl",
        re.compile(
            r"NIXL.{0,40}(?:[Bb]ackend|agent).{0,40}(?:instantiated|created|initialized)|Initialized NIXL agent", re.I
        ),
    ),
)

WARMING = frozenset(("jit", "graph_capture", "graph_capture_end", "http_up", "engine_ready"))
LOADING = frozenset(("dist_init", "dist_init_end", "weights", "weights_end", "memory_pool", "download"))


def _count(number: str, unit: str) -> int:
    """A bar's figure; bytes in millions of them."""
    value = float(number[:12])
    return int(value * 1000.0 ** (_SCALE[unit] - 2)) if unit else int(value)


def _bar(text: str) -> Optional[Event]:
    if "/" not in text:
        return None
    ninja = _NINJA.match(text[:400])
    if ninja:
        done, total = int(ninja.group("done")), int(ninja.group("total"))
        percent = done * 100 // total if total else 101
        return (
            {"kind": "jit", "label": "ninja", "percent": percent, "done": done, "total": total}
            if percent <= 100
            else None
        )
    if "%" not in text:
        return None
    match = _BAR.search(text[:1000])
    if not match:
        return None
    percent = int(match.group("percent"))
    sized = bool(match.group("unit") or match.group("whole"))
    done, total = _count(match.group("done"), match.group("unit")), _count(match.group("total"), match.group("whole"))
    label = match.group("label").strip().rstrip(":")
    if percent > 100 or done > total:
        return None
    low = label.lower()
    if sized:
        # Bytes are counted where something comes over the network; a file's name may say anything.
        kind = "download"
    elif "shard" in low or "weight" in low or "checkpoint" in low or "loading" in low:
        kind = "weights"
    elif "captur" in low or "graph" in low:
        kind = "graph_capture"
    elif "fetch" in low or "download" in low:
        kind = "download"
    else:
        kind = "jit"
    event: Event = {"kind": kind, "label": label[-60:], "percent": percent, "done": done, "total": total}
    rate = _RATE.search(match.group("times") or "")
    if rate:
        event["rate"] = rate.group(1)
    return event


def parse_line(line: str) -> Optional[Event]:
    """The event that one log line tells, or None.

    Shapes: ``{kind, rank}``; a progress bar adds ``{label, percent, done, total, rate}``, a backend ``name``.
    Kinds: start, dist_init, dist_init_end, download, weights, weights_end, memory_pool, jit, graph_capture,
    graph_capture_end, engine_ready, http_up, served, batch, backend, shutdown, core_dump_wait, fatal, access, noise.
    """
    line = clean(line)
    if not line.strip():
        return None
    if _ACCESS.search(line[:400]):
        return {"kind": "access", "rank": ""}
    rank, text = body(line)
    if _NOISE.search(text[:600]):
        return {"kind": "noise", "rank": rank}
    for name, pattern in _BACKENDS:
        if pattern.search(text[:600]):
            return {"kind": "backend", "rank": rank, "name": name}
    progress = _bar(text)
    if progress:
        progress["rank"] = rank
        return progress
    for kind, pattern in _PLAIN:
        if pattern.search(text[:600]):
            return {"kind": kind, "rank": rank}
    return None


def template(line: str) -> str:
    """The line without what varies (numbers, addresses, ranks): two lines of one kind have one template."""
    text = body(clean(line))[1][:200]
    return re.sub(r"0x[0-9a-f]+|\d+(?:\.\d+)?", "#", text)


def describe(event: Event) -> str:
    """What a progress event says to a human: ``loading weights 41 % (20 of 46, 1.2 s/it)``."""
    words = {
        "start": "started with its arguments resolved",
        "dist_init": "joining the other ranks",
        "dist_init_end": "joined the other ranks",
        "download": "downloading",
        "weights": "loading weights",
        "weights_end": "weights loaded",
        "memory_pool": "allocating the KV cache",
        "jit": "compiling kernels (jit_precompile)",
        "graph_capture": "capturing CUDA graphs",
        "graph_capture_end": "CUDA graphs captured",
        "engine_ready": "the engine is up",
        "http_up": "the HTTP server is up, warm-up request running",
        "served": "the warm-up request was answered",
        "batch": "working on requests",
    }.get(str(event.get("kind")), str(event.get("kind")))
    if "percent" in event:
        rate = f", {event['rate']}" if event.get("rate") else ""
        words += f" {event['percent']} % ({event['done']} of {event['total']}{rate})"
    return words
