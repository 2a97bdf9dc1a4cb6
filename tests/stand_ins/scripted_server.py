#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for an SGLang server: it follows a script of answers, and generates nothing.

It exists for what a real server cannot be made to show on demand (a lying /health, a hung generation, a warm-up of
minutes). It counts what it was asked, how many requests ran at once, and how many clients went away before their
answer. Every answer carries the header ``X-Stand-In: scripted``.

The script is JSON: ``{"port": 31000, "routes": {"/health": [step, …]}, "log": [[at, "line"], …], "log_file": path}``.
A step is ``{"until": seconds, "status": 200, "delay": 0, "hang": false, "body": {…}}``; the first step whose
``until`` (since the start; absent: for ever) lies ahead answers. A hanging request is answered when its step ends.
``"after_disconnects": {"count": 3, "status": 500}`` at the top level breaks the server for good.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional

GENERATED = {"text": "x", "output_ids": [1], "meta_info": {"completion_tokens": 1}}


class Script:
    """The script, the clock, and what was counted."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.routes: dict[str, list[dict[str, Any]]] = script.get("routes", {})
        self.breaks: Optional[dict[str, Any]] = script.get("after_disconnects")
        self.key: Optional[str] = script.get("key")
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.counts: dict[str, int] = {}
        self.running = 0
        self.most_at_once = 0
        self.disconnects = 0

    def step(self, path: str) -> Optional[dict[str, Any]]:
        """The step that answers ``path`` now."""
        now = time.monotonic() - self.began
        for step in self.routes.get(path, ()):
            if step.get("until") is None or now < step["until"]:
                return step
        return None

    def report(self) -> dict[str, Any]:
        """What was counted."""
        return {"counts": dict(self.counts), "most_at_once": self.most_at_once, "disconnects": self.disconnects}


class Handler(BaseHTTPRequestHandler):
    """Answers as the script says."""

    script: Script

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _gone(self) -> bool:
        readable, _w, _x = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _wait(self, until: float) -> bool:
        while time.monotonic() < until:
            if self._gone():
                return False
            time.sleep(0.02)
        return True

    def _send(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("X-Stand-In", "scripted")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self) -> None:
        script = self.script
        path = self.path.partition("?")[0]
        length = int(self.headers.get("Content-Length") or 0)
        if length:
            self.rfile.read(length)
        if path == "/__report":
            self._send(200, script.report())
            return
        with script.lock:
            script.counts[path] = script.counts.get(path, 0) + 1
            if path != "/metrics":
                script.running += 1
                script.most_at_once = max(script.most_at_once, script.running)
        try:
            self._follow(path)
        finally:
            with script.lock:
                if path != "/metrics":
                    script.running -= 1

    def _follow(self, path: str) -> None:
        script = self.script
        if script.breaks and script.disconnects >= script.breaks["count"]:
            self._send(script.breaks["status"], {})
            return
        open_paths = ("/health", "/health_generate", "/metrics", "/ready")
        if script.key and path not in open_paths and self.headers.get("Authorization") != f"Bearer {script.key}":
            self._send(401, {"error": "Unauthorized"})
            return
        step = script.step(path)
        if step is None:
            self._send(404, {"detail": "Not Found"})
            return
        alive = self._wait(time.monotonic() + step.get("delay", 0))
        while alive and step and step.get("hang"):
            end = step.get("until")
            alive = self._wait(script.began + end if end is not None else time.monotonic() + 3600)
            step = script.step(path)
        if not alive:
            with script.lock:
                script.disconnects += 1
            return
        step = step or {"status": 404}
        body = step.get("body", GENERATED if self.command == "POST" else {})
        self._send(step.get("status", 200), body)

    do_GET = _answer
    do_POST = _answer


def serve(
    script: dict[str, Any], host: str = "127.0.0.1", port: int = 0, tls: Optional[ssl.SSLContext] = None
) -> tuple[ThreadingHTTPServer, Script]:
    """Start the stand-in in a thread; ``server.server_address[1]`` is its port, ``server.shutdown()`` ends it."""
    state = Script(script)
    handler = type("ScriptedHandler", (Handler,), {"script": state})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server, state


def main() -> None:
    """Serve a script from the command line, with its log on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="a JSON file")
    parser.add_argument("--bind-after", type=float, default=0.0, help="seconds before the port is bound")
    args, _rest = parser.parse_known_args()
    with open(args.script, encoding="utf-8") as handle:
        script = json.load(handle)
    began = time.monotonic()
    lines = sorted((float(at), str(line)) for at, line in script.get("log", ()))
    server = None
    while True:
        now = time.monotonic() - began
        while lines and lines[0][0] <= now:
            print(lines.pop(0)[1], flush=True)
        if server is None and now >= args.bind_after and script.get("port"):
            server, state = serve(script, script.get("host", "127.0.0.1"), int(script["port"]))
            state.began = began
        if script.get("exit") and now >= script["exit"]["at"]:
            sys.exit(script["exit"]["status"])
        time.sleep(0.05)


if __name__ == "__main__":
    main()
