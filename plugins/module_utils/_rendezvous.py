# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: whether the ranks of an instance can meet where they will meet."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Optional

GREETING = b"gpufleet-sglang %s rank %d\n"


def check_interfaces(wanted: Sequence[str], folder: str = "/sys/class/net") -> list[dict[str, str]]:
    """Problems of interfaces, named as for NCCL and Gloo: prefixes, after ``=`` exact names, after ``^`` all others."""
    present = {name: _state(folder, name) for name in sorted(os.listdir(folder))} if os.path.isdir(folder) else {}
    problems = []
    for text in wanted:
        if text.startswith("^"):
            continue
        exact, names = text.startswith("="), [part.partition(":")[0] for part in text.lstrip("=").split(",") if part]
        found = [name for name in present if any(name == one if exact else name.startswith(one) for one in names)]
        if not found:
            problems.append(
                _problem("interface_absent", f"no interface {text}; there are: {', '.join(present) or 'none'}")
            )
        elif all(present[name] in ("down", "lowerlayerdown", "notpresent") for name in found):
            problems.append(_problem("interface_down", f"{', '.join(found)} is down"))
    return problems


def _state(folder: str, name: str) -> str:
    try:
        with open(f"{folder}/{name}/operstate", encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return "unknown"


def _problem(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}


def resolve(address: str, port: int) -> Optional[tuple[int, Any]]:
    """``(family, socket address)``, None when the name is not known."""
    try:
        found = socket.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return (int(found[0][0]), found[0][4]) if found else None


def listen(address: str, port: int) -> tuple[Optional[socket.socket], Optional[dict[str, str]]]:
    """A listener on rank 0's address, or the problem that keeps rank 0 from having one."""
    target = resolve(address, port)
    if target is None:
        return None, _problem("rendezvous_unknown", f"{address} is not known by name here")
    listener = socket.socket(target[0], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(target[1])
        listener.listen(64)
        return listener, None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None, _problem("rendezvous_not_here", f"{address} is not an address of rank 0")
        if error.errno == errno.EADDRINUSE:
            return None, _problem("rendezvous_port_taken", f"port {port} of {address} is in use")
        return None, _problem("rendezvous_unusable", f"{address}:{port} cannot be listened on: {error.strerror}")


def receive(listener: socket.socket, token: str, ranks: set[int], seconds: float) -> set[int]:
    """The ranks, of those wanted, that did not greet within the time."""
    missing, end = set(ranks), time.monotonic() + seconds
    while missing and time.monotonic() < end:
        listener.settimeout(max(0.05, end - time.monotonic()))
        try:
            peer, _from = listener.accept()
        except OSError:
            break
        with peer:
            peer.settimeout(3.0)
            try:
                line = peer.recv(200)
                for rank in list(missing):
                    if line == GREETING % (token.encode(), rank):
                        peer.sendall(b"welcome\n")
                        missing.discard(rank)
            except OSError:
                continue
    return missing


def greet(address: str, port: int, token: str, rank: int, seconds: float) -> Optional[dict[str, str]]:
    """Reach rank 0; the problem when that was not possible within the time."""
    end, last = time.monotonic() + seconds, "no answer"
    while True:
        target = resolve(address, port)
        if target is None:
            return _problem("rendezvous_unknown", f"{address} is not known by name here")
        with socket.socket(target[0], socket.SOCK_STREAM) as link:
            link.settimeout(3.0)
            try:
                link.connect(target[1])
                link.sendall(GREETING % (token.encode(), rank))
                if link.recv(20) == b"welcome\n":
                    return None
                last = "something else answers there"
            except OSError as error:
                last = error.strerror or str(error)
        if time.monotonic() >= end:
            return _problem("rendezvous_unreachable", f"{address}:{port} is not reached from here: {last}")
        time.sleep(0.3)


def route(address: str, port: int) -> Optional[dict[str, str]]:
    """The problem when there is no way from here to the address; nothing is sent."""
    target = resolve(address, port)
    if target is None:
        return _problem("rendezvous_unknown", f"{address} is not known by name here")
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target[1])
        except OSError as error:
            return _problem("rendezvous_unreachable", f"no route to {address}: {error.strerror}")
    return None


def meet(
    address: str, port: int, rank: int, hosts: Sequence[str], token: str, seconds: float, really: bool
) -> list[dict[str, str]]:
    """Problems of one rank. ``really`` false: the others do not try now, so only this side is looked at."""
    if rank:
        problem = greet(address, port, token, rank, seconds) if really else route(address, port)
        return [problem] if problem else []
    listener, problem = listen(address, port)
    if listener is None:
        return [problem] if problem else []
    with listener:
        missing = receive(listener, token, set(range(1, len(hosts))), seconds) if really else set()
    return [
        _problem("rendezvous_unreachable", f"{hosts[late]} (rank {late}) did not reach {address}:{port}")
        for late in sorted(missing)
    ]
