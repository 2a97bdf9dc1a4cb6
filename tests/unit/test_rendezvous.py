# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks that meet over real sockets of the loopback, and what keeps them from it."""

from __future__ import annotations

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
    assert problem["code"] == code


def test_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (problem,) = _rendezvous.meet("127.0.0.1", server.getsockname()[1], 0, HOSTS, "big", 0.1, True)
    assert problem["code"] == "rendezvous_port_taken"


@pytest.mark.parametrize(
    ("wanted", "codes"),
    [
        (["eth"], []),
        (["=eth0"], []),
        (["=eth"], ["interface_absent"]),
        (["ib0"], ["interface_down"]),
        (["ib0,eth0"], []),
        (["^docker"], []),
        (["enp"], ["interface_absent"]),
        ([], []),
    ],
)
def test_interfaces_are_named_as_nccl_names_them(tmp_path, wanted, codes):
    for name, state in (("eth0", "up"), ("ib0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
    assert [item["code"] for item in _rendezvous.check_interfaces(wanted, str(tmp_path))] == codes
