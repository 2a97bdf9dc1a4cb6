# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the live tests of rollouts share: stand-ins on hosts, the real router, and clients that count what they get."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpufleet-sglang"
# What the real SGLang needs to serve a tiny model on few shared cores.
CPU_FLAGS = {
    "device": "cpu",
    "load_format": "dummy",
    "attention_backend": "torch_native",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "sleep_on_idle": True,
}
TOKENS = 16


def install_stand_ins(fleet: Any, hosts: Iterable[str]) -> None:
    """Put the stand-in in the place of SGLang's server on the hosts; nobody is told to fail."""
    site = "/opt/sglang/venv/lib/python3.11/site-packages/sglang"
    for host in hosts:
        for source, name in (("rollout_server", "launch_server"), ("scripted_server", "scripted_server")):
            text = (ROOT / "tests" / "stand_ins" / f"{source}.py").read_text()
            fleet.shell(host, f"cat > {site}/{name}.py <<'END_OF_FILE'\n{text}END_OF_FILE\nrm -f /etc/stand-in-fails")


def served_revision(fleet: Any, host: str, instance: str = "default", variable: str = "STAND_IN_REVISION") -> str:
    """The revision of the running process, by a variable of its environment."""
    script = f"tr '\\0' '\\n' < /proc/$(systemctl show -p MainPID --value sglang-{instance})/environ"
    return str(fleet.shell(host, f"{script} | sed -n s/^{variable}=//p")).strip()


def ask(url: str, body: Any = None) -> Any:
    """The JSON that a URL answers with."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def generate(router: str) -> int:
    """How many tokens a router's workers made of a request for ``TOKENS``."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    return int(ask(router + "/generate", body)["meta_info"]["completion_tokens"])


class Threads:
    """Threads that run while the block does; they look at ``over``."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Any:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


class Load(Threads):
    """Clients that ask a router for generations one after another: how many were ``good``, and what was ``bad``."""

    def __init__(self, router: str, clients: int) -> None:
        super().__init__()
        self.router, self.lock = router, threading.Lock()
        self.good = 0
        self.bad: list[str] = []
        self.threads = [threading.Thread(target=self.client) for _ in range(clients)]

    def client(self) -> None:
        while not self.over.wait(0.3):
            try:
                made = generate(self.router)
                problem = None if made == TOKENS else f"{made} tokens"
            except (OSError, ValueError, KeyError) as error:
                problem = repr(error)
            with self.lock:
                self.good += problem is None
                self.bad += [problem] if problem else []


def router_python(version: str) -> str:
    """The interpreter of an environment with that version of the real router; made once a machine."""
    folder = CACHE / f"router-{version}"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=240)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", f"sglang-router=={version}"]
        subprocess.run(pip, check=True, timeout=300)
        (folder / "complete").touch()
    return str(folder / "bin" / "python")


@contextlib.contextmanager
def real_router(folder: Path, address: str, port: int, *options: str) -> Iterator[str]:
    """The real router 0.3.2 without workers; yields its URL."""
    argv = [router_python("0.3.2"), "-m", "sglang_router.launch_router", "--host", address, "--port", str(port),
            "--prometheus-port", str(port + 1), "--policy", "round_robin", *options]  # fmt: skip
    with (folder / "router.log").open("w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            yield f"http://{address}:{port}"
        finally:
            process.terminate()
