# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks that meet over real sockets of the loopback, and what keeps them from it."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _rendezvous

HOSTS = ["h0", "h1", "h2"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def together(ranks, seconds):
    port, found = free_port(), {}

    def run(rank):
        found[rank] = _rendezvous.meet("127.0.0.1", port, rank, HOSTS, "big", seconds, True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_meet():
    assert together([2, 1, 0], 20.0) == {0: [], 1: [], 2: []}


def test_a_rank_that_does_not_come_is_named_by_rank_0():
    found = together([0, 1], 2.0)
    assert found[1] == [] and [item["code"] for item in found[0]] == ["rendezvous_unreachable"]
    assert "h2 (rank 2)" in found[0][0]["message"]


def test_a_rank_that_reaches_nobody_says_so():
    (problem,) = _rendezvous.meet("127.0.0.1", free_port(), 1, HOSTS, "big", 0.1, True)
    assert problem["code"] == "rendezvous_unreachable" and "refused" in problem["message"]
    assert _rendezvous.meet("127.0.0.1", free_port(), 1, HOSTS, "big", 0.1, False) == []


@pytest.mark.parametrize(
    ("address", "code"), [("192.0.2.1", "rendezvous_not_here"), ("no-such-host.invalid", "rendezvous_unknown")]
)
def test_addresses_that_are_not_rank_0s(address, code):
    (problem,) = _rendezvous.meet(address, free_port(), 0, HOSTS, "big", 0.1, True)
    assert problem["code"] == code and problem["mend"]
    assert [item["code"] for item in _rendezvous.meet(address, 1, 0, HOSTS, "big", 0.1, False, True)] == [code]


def test_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = _rendezvous.meet("127.0.0.1", port, 0, HOSTS, "big", 0.1, True)
        assert _rendezvous.meet("127.0.0.1", port, 0, HOSTS, "big", 0.1, False, True) == [], "the old revision runs yet"
    assert problem["code"] == "rendezvous_port_taken"


def rank_0_that_offers(offer):
    """A listener that welcomes one rank with this offer."""
    server = socket.create_server(("127.0.0.1", 0))

    def welcome():
        peer, _from = server.accept()
        with peer:
            peer.recv(200)
            peer.sendall(b"welcome " + json.dumps(offer).encode() + b"\n")
            peer.recv(1)

    threading.Thread(target=welcome, daemon=True).start()
    return server


def test_a_firewall_that_lets_only_the_rendezvous_through():
    with rank_0_that_offers({"port": free_port(), "addresses": {}}) as server:
        (problem,) = _rendezvous.greet("127.0.0.1", server.getsockname()[1], "big", 1, 0.1, {})
    assert problem["code"] == "ports_blocked" and "any port" in problem["mend"]


def test_interfaces_of_two_hosts_that_do_not_reach_each_other(monkeypatch):
    own, asked = {"NCCL_SOCKET_IFNAME": [("docker0", "172.17.0.1"), ("ib0", "10.1.0.2")]}, []
    reached = [("ib0", "10.1.0.1")]

    def knock(_family, address, _port, interface):
        asked.append((interface, address))
        return "timed out" if interface and (interface, address) not in reached else None

    monkeypatch.setattr(_rendezvous, "_knock", knock)
    offer = {"port": 1, "addresses": {"NCCL_SOCKET_IFNAME": [["docker0", "172.17.0.1"], ["ib0", "10.1.0.1"]]}}
    for codes in ([], ["interface_apart"]):
        with rank_0_that_offers(offer) as server:
            found = _rendezvous.greet("127.0.0.1", server.getsockname()[1], "big", 1, 0.1, own)
        assert [item["code"] for item in found] == codes
        assert all("NCCL_SOCKET_IFNAME" in item["mend"] for item in found)
        reached.clear()
    assert (None, "127.0.0.1") in asked and ("docker0", "10.1.0.1") in asked


def test_a_name_that_is_another_address_here_is_told_with_it(monkeypatch):
    monkeypatch.setattr(_rendezvous, "resolve", lambda _name, port: (socket.AF_INET, ("127.0.0.1", port)))
    (problem,) = _rendezvous.meet("head", free_port(), 1, HOSTS, "big", 0.1, True)
    assert "head (127.0.0.1 here)" in problem["message"]


def test_addresses_that_only_the_host_itself_reaches(monkeypatch):
    known = {"head": "127.0.1.1", "10.0.0.1": "10.0.0.1", "gpu-02": "127.0.1.1"}
    monkeypatch.setattr(_rendezvous, "resolve", lambda name, port: (socket.AF_INET, (known[name], port)))
    found = _rendezvous.check_loopback("head", {}, "gpu-02")
    assert [item["code"] for item in found] == ["rendezvous_loopback", "gloo_on_loopback"]
    assert _rendezvous.check_loopback("10.0.0.1", {"GLOO_SOCKET_IFNAME": "eth0"}, "gpu-02") == []


@pytest.mark.parametrize(
    ("variable", "wanted", "codes"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", []),
        ("NCCL_SOCKET_IFNAME", "=eth0", []),
        ("NCCL_SOCKET_IFNAME", "=eth", ["interface_absent"]),
        ("NCCL_SOCKET_IFNAME", "ib0", ["interface_down"]),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0", []),
        ("NCCL_SOCKET_IFNAME", "^docker", []),
        ("NCCL_SOCKET_IFNAME", "enp", ["interface_absent"]),
        ("GLOO_SOCKET_IFNAME", "eth0", []),
        ("GLOO_SOCKET_IFNAME", "eth", ["interface_absent"]),
    ],
)
def test_interfaces_are_named_as_nccl_and_gloo_name_them(tmp_path, variable, wanted, codes):
    for name, state in (("eth0", "up"), ("ib0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
    found = _rendezvous.check_interfaces({variable: wanted}, str(tmp_path))
    assert [item["code"] for item in found] == codes
    assert all(variable in item["message"] and variable in item["mend"] for item in found)
    assert _rendezvous.check_interfaces({}, str(tmp_path)) == []
