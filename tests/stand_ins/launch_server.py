# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for ``sglang.launch_server`` that generates nothing: it starts in a moment where the real one takes 20 s.

It is put into a venv of the real SGLang next to ``scripted_server.py``, so that flags and distributions are real ones.
``--mem-fraction-static 0.99`` makes it fail as SGLang does without room for its KV cache; while ``/run/standin/hold``
exists it loads.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from sglang import scripted_server  # type: ignore[attr-defined]


def say(text: str) -> None:
    """A line as SGLang logs it."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def option(name: str, default: str) -> str:
    """The value of ``--name``."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    say("stand-in for SGLang, which generates nothing, started")
    model = option("--served-model-name", option("--model-path", "m"))
    say("Load weight begin. avail mem=18.07 GB")
    if option("--mem-fraction-static", "") == "0.99":
        say("Scheduler hit an exception: Traceback (most recent call last):")
        print('  File "/x/sglang/srt/mem_cache/memory_pool.py", line 1, in __init__', flush=True)
        print("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n", flush=True)
        say("Received sigquit from a child process. It usually means the child failed.")
        os.kill(os.getpid(), signal.SIGKILL)
    while os.path.exists("/run/standin/hold"):
        say("Loading safetensors checkpoint shards")
        time.sleep(0.5)
    good: list[dict[str, Any]] = [{"status": 200}]
    routes = {
        "/health": good,
        "/health_generate": good,
        "/generate": good,
        "/model_info": [{"status": 200, "body": {"model_path": option("--model-path", "m")}}],
        "/server_info": [{"status": 200, "body": {"version": "0.5.12", "model_path": option("--model-path", "m")}}],
        "/v1/models": [{"status": 200, "body": {"object": "list", "data": [{"id": model, "object": "model"}]}}],
    }
    scripted_server.serve({"routes": routes}, option("--host", "127.0.0.1"), int(option("--port", "30000")))
    say("max_total_num_tokens=4096, context_len=2048")
    say("The server is fired up and ready to roll!")
    signal.signal(signal.SIGTERM, lambda *_ignored: os._exit(0))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
