# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: whether the ranks of an instance can meet where they will meet."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

GREETING = b"gpufleet-sglang %s rank %d\n"
WELCOME = b"welcome "
DOWN = ("down", "lowerlayerdown", "notpresent")
_SIOCGIFADDR = 0x8915
_NO_PORT = 9


def find_interfaces(variable: str, text: str, present: Iterable[str]) -> Optional[list[str]]:
    """The interfaces that a variable's value names: exactly, for NCCL by prefix where no ``=`` stands before it.

    None for what only excludes (``^docker``).
    """
    if text.startswith("^"):
        return None
    exact = text.startswith("=") or not variable.startswith("NCCL_")
    names = [part.partition(":")[0] for part in text.lstrip("=").split(",") if part]
    return [name for name in present if any(name == one if exact else name.startswith(one) for one in names)]


def check_interfaces(wanted: Mapping[str, str], folder: str = "/sys/class/net") -> list[dict[str, str]]:
    """Problems of interfaces, ``wanted`` is ``{variable: value}``."""
    present = interface_states(folder)
    problems = []
    for variable, text in wanted.items():
        found = find_interfaces(variable, text, present)
        if found is None:
            continue
        if not found:
            told = f"{variable}={text} names no interface of this host; it has {', '.join(present) or 'none'}"
            problems.append(_problem("interface_absent", told, f"correct {variable} in sglang_env_vars"))
        elif all(present[name] in DOWN for name in found):
            told = f"{', '.join(found)}, named by {variable}, is down"
            problems.append(_problem("interface_down", told, f"set it up, or correct {variable} in sglang_env_vars"))
    return problems


def interface_states(folder: str = "/sys/class/net") -> dict[str, str]:
    """``{interface: its operstate}``."""
    return {name: _state(folder, name) for name in sorted(os.listdir(folder))} if os.path.isdir(folder) else {}


def interface_addresses(wanted: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """``{variable: [(interface, its IPv4 address)]}`` of the interfaces that are up and have one."""
    states = interface_states()
    found: dict[str, list[tuple[str, str]]] = {}
    for variable, text in wanted.items():
        for name in find_interfaces(variable, text, states) or []:
            address = None if states[name] in DOWN else _address(name)
            if address:
                found.setdefault(variable, []).append((name, address))
    return found


def _address(interface: str) -> Optional[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(packed[20:24])


def _state(folder: str, name: str) -> str:
    try:
        with open(f"{folder}/{name}/operstate", encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return "unknown"


def _problem(code: str, message: str, mend: str = "correct sglang_rendezvous") -> dict[str, str]:
    return {"code": code, "message": message, "mend": mend}


def resolve(address: str, port: int) -> Optional[tuple[int, Any]]:
    """``(family, socket address)``, None when the name is not known."""
    try:
        found = socket.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return (int(found[0][0]), found[0][4]) if found else None


def _shown(address: str, target: Any) -> str:
    """The address, and for a name what it is here: hosts may know it differently."""
    return address if address.strip("[]") == target[0] else f"{address} ({target[0]} here)"


def _unknown(address: str) -> dict[str, str]:
    mend = "write rank 0's address into sglang_rendezvous, or make the name known on this host"
    return _problem("rendezvous_unknown", f"{address} is not known by name here", mend)


def listen(address: str, port: int) -> tuple[Optional[socket.socket], Optional[dict[str, str]]]:
    """A listener on rank 0's address (``port`` 0: on any port), or the problem that keeps rank 0 from having one."""
    target = resolve(address, port)
    if target is None:
        return None, _unknown(address)
    shown = _shown(address, target[1])
    listener = socket.socket(target[0], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(target[1])
        listener.listen(64)
        return listener, None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            mend = "write an address of rank 0, the first of the instance's hosts, into sglang_rendezvous"
            return None, _problem("rendezvous_not_here", f"{shown} is not an address of rank 0", mend)
        if error.errno == errno.EADDRINUSE:
            mend = "choose another port in sglang_rendezvous, or end what listens there"
            return None, _problem("rendezvous_port_taken", f"port {port} of {shown} is in use", mend)
        return None, _problem("rendezvous_unusable", f"{shown}:{port} cannot be listened on: {error.strerror}")


def is_loopback(address: str) -> Optional[str]:
    """The loopback address that a name or address is on this host, else None."""
    target = resolve(address, _NO_PORT)
    found = str(target[1][0]) if target else ""
    return found if found.startswith("127.") or found == "::1" else None


def check_loopback(address: str, wanted: Mapping[str, str], hostname: str) -> list[dict[str, str]]:
    """Problems of addresses that only this host reaches: the rendezvous, and where Gloo listens by itself."""
    problems = []
    found = is_loopback(address)
    if found:
        mend = "write the address by which the other hosts reach rank 0 into sglang_rendezvous"
        problems.append(
            _problem("rendezvous_loopback", f"{address} is {found} here, which no other host reaches", mend)
        )
    found = None if wanted.get("GLOO_SOCKET_IFNAME") else is_loopback(hostname)
    if found:
        told = f"the name of this host, {hostname}, is {found} here, and without GLOO_SOCKET_IFNAME Gloo listens there"
        mend = "set GLOO_SOCKET_IFNAME in sglang_env_vars, or correct /etc/hosts"
        problems.append(_problem("gloo_on_loopback", told, mend))
    return problems


def receive(listener: socket.socket, token: str, ranks: set[int], seconds: float, offer: Mapping[str, Any]) -> set[int]:
    """The ranks, of those wanted, that did not greet within the time. Each is told ``offer``, and may try it."""
    missing, end, peers = set(ranks), time.monotonic() + seconds, []
    while missing and time.monotonic() < end:
        listener.settimeout(max(0.05, end - time.monotonic()))
        try:
            peer, _from = listener.accept()
        except OSError:
            break
        peers.append(peer)
        peer.settimeout(3.0)
        try:
            line = peer.recv(200)
            for rank in list(missing):
                if line == GREETING % (token.encode(), rank):
                    peer.sendall(WELCOME + json.dumps(offer).encode() + b"\n")
                    missing.discard(rank)
        except OSError:
            continue
    for peer in peers:
        # A rank hangs up when it has tried everything.
        peer.settimeout(15.0)
        with peer:
            try:
                peer.recv(1)
            except OSError:
                continue
    return missing


def greet(
    address: str, port: int, token: str, rank: int, seconds: float, own: Mapping[str, Sequence[tuple[str, str]]]
) -> list[dict[str, str]]:
    """Reach rank 0, and then what it offers; the problems when that was not possible within the time."""
    end, last, shown = time.monotonic() + seconds, "no answer", address
    while True:
        target = resolve(address, port)
        if target is None:
            return [_unknown(address)]
        shown = _shown(address, target[1])
        with socket.socket(target[0], socket.SOCK_STREAM) as link:
            link.settimeout(3.0)
            try:
                link.connect(target[1])
                link.sendall(GREETING % (token.encode(), rank))
                answer = b""
                while not answer.endswith(b"\n"):
                    got = link.recv(4096)
                    if not got:
                        break
                    answer += got
                if answer.startswith(WELCOME) and answer.endswith(b"\n"):
                    return _try(json.loads(answer[len(WELCOME) :]), own, target)
                last = "something else answers there"
            except OSError as error:
                last = error.strerror or str(error)
        if time.monotonic() >= end:
            mend = "see that the firewalls of both hosts let it through, and that sglang_rendezvous is rank 0's address"
            return [_problem("rendezvous_unreachable", f"{shown}:{port} is not reached from here: {last}", mend)]
        time.sleep(0.3)


def _try(
    offer: Mapping[str, Any], own: Mapping[str, Sequence[tuple[str, str]]], rendezvous: tuple[int, Any]
) -> list[dict[str, str]]:
    """NCCL and Gloo connect on ports of their own choice, over the interfaces that their variables name."""
    port = int(offer["port"])
    there = str(rendezvous[1][0])
    blocked = _knock(rendezvous[0], there, port, None)
    if blocked:
        told = f"port {port} of {there} is not reached from here, though the rendezvous is: {blocked}"
        mend = "NCCL and Gloo connect on any port: let all traffic between the hosts of an instance through"
        return [_problem("ports_blocked", told, mend)]
    problems = []
    for variable, mine in own.items():
        why, tried = None, ""
        for (name, _own), (_name, there) in list(itertools.product(mine, offer["addresses"].get(variable) or []))[:4]:
            tried, why = f"{there} of rank 0 is not reached over {name}", _knock(socket.AF_INET, there, port, name)
            if why is None:
                break
        if why:
            mend = f"correct {variable} in sglang_env_vars of the host that it is wrong on"
            problems.append(_problem("interface_apart", f"{tried} ({variable}): {why}", mend))
    return problems


def _knock(family: int, address: str, port: int, interface: Optional[str]) -> Optional[str]:
    """Why a connection is not possible; ``interface`` is the one it must go over."""
    with socket.socket(family, socket.SOCK_STREAM) as link:
        link.settimeout(3.0)
        try:
            if interface:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
            link.connect((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def route(address: str) -> list[dict[str, str]]:
    """The problem when there is no way from here to the address; nothing is sent."""
    target = resolve(address, _NO_PORT)
    if target is None:
        return [_unknown(address)]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target[1])
        except OSError as error:
            told = f"no route to {_shown(address, target[1])}: {error.strerror}"
            return [_problem("rendezvous_unreachable", told, "correct the routes of this host, or sglang_rendezvous")]
    return []


def meet(
    address: str,
    port: int,
    rank: int,
    hosts: Sequence[str],
    token: str,
    seconds: float,
    really: bool,
    running: bool = False,
    wanted: Optional[Mapping[str, str]] = None,
) -> list[dict[str, str]]:
    """Problems of one rank. ``really`` false: the others do not try now, so only this side is looked at.

    ``running``: the instance's present revision may hold the port. ``wanted``: see ``check_interfaces``.
    """
    own = interface_addresses(wanted or {})
    if rank:
        return greet(address, port, token, rank, seconds, own) if really else route(address)
    listener, problem = listen(address, 0 if running else port)
    if listener is None:
        return [problem] if problem else []
    if not really:
        listener.close()
        return []
    with listener, socket.socket(listener.family, socket.SOCK_STREAM) as door:
        door.bind(("", 0))
        door.listen(64)
        offer = {"port": door.getsockname()[1], "addresses": own}
        missing = receive(listener, token, set(range(1, len(hosts))), seconds, offer)
    mend = "see what that host says of it, and at the firewalls of both hosts"
    return [
        _problem("rendezvous_unreachable", f"{hosts[late]} (rank {late}) did not reach {address}:{port}", mend)
        for late in sorted(missing)
    ]
