#!/usr/bin/env python3
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for ``sglang.launch_server`` in rollouts: it answers like a server, and generates nothing.

Tests put it as launch_server.py, with scripted_server.py beside it, into SGLang's folder in a test host's venv, so that
everything up to the start is real. It ends at once when the file ``/etc/stand-in-fails`` names its
``STAND_IN_REVISION``. The ranks of an instance over several hosts meet at the rendezvous, and all end when one does.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import scripted_server


def ranks_together(args: argparse.Namespace) -> None:
    """Join the other ranks over one connection each; whoever loses it ends."""
    host, _colon, port = args.dist_init_addr.rpartition(":")
    if args.node_rank == 0:
        with socket.create_server((host, int(port))) as listener:
            links = [listener.accept()[0] for _rank in range(1, args.nnodes)]
    else:
        while True:
            try:
                links = [socket.create_connection((host, int(port)), timeout=2)]
                links[0].settimeout(None)
                break
            except OSError:
                time.sleep(0.2)

    def watch(link: socket.socket) -> None:
        link.recv(1)
        print("RuntimeError: Connection closed by peer", flush=True)
        os._exit(1)

    for link in links:
        threading.Thread(target=watch, args=(link,), daemon=True).start()


def main() -> None:
    """Fail or serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr")
    args, _rest = parser.parse_known_args()
    print("stand-in for sglang.launch_server", flush=True)
    try:
        with open("/etc/stand-in-fails", encoding="utf-8") as handle:
            failing = handle.read().split()
    except FileNotFoundError:
        failing = []
    if os.environ.get("STAND_IN_REVISION") in failing:
        print("RuntimeError: the stand-in was told to fail", flush=True)
        sys.exit(1)
    if args.nnodes > 1:
        ranks_together(args)
    model = {"model_path": args.model_path, "served_model_name": args.model_path}
    routes = {path: [{"status": 200}] for path in ("/health", "/health_generate", "/generate")}
    routes["/model_info"] = [{"body": model}]
    routes["/server_info"] = [{"body": {**model, "version": "0.5.23", "tp_size": 1, "dp_size": 1}}]
    routes["/v1/models"] = [{"body": {"object": "list", "data": [{"id": args.model_path, "max_model_len": 2048}]}}]
    routes["/v1/loads"] = [{"body": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}}]
    if args.node_rank:
        # As SGLang does: ranks above 0 answer for their health only.
        routes = {path: routes[path] for path in ("/health", "/health_generate")}
    scripted_server.serve({"routes": routes}, args.host, args.port)
    print("The server is fired up and ready to roll!", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
