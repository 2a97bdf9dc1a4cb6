# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the host has against a service: ports, access, GPUs, limits; on recorded text and a made-up /proc."""

from __future__ import annotations

import getpass
import grp
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._host_preflight import (
    access_as,
    addresses_collide,
    cgroup_of,
    cgroup_processes,
    check_access,
    check_gpus,
    check_memory,
    check_noexec,
    check_port,
    check_privileged_port,
    limits_not_granted,
    parse_compute_apps,
    parse_listeners,
    unit_of,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult

ORPHANS = """\
gpu_uuid, pid, process_name, used_gpu_memory [MiB]
GPU-00000000-0000-0000-0000-000000000000, 2505781, sglang::scheduler_DP0_TP0_EP0, 100998 MiB
GPU-00000000-0000-0000-0000-000000000001, 2505782, sglang::scheduler_DP1_TP1_EP1, 100999 MiB
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            20000                20000                files
Max locked memory         67108864             67108864             bytes
"""


def make_process(proc: Path, pid: int, cgroup: str, comm: str = "python") -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "comm").write_text(comm + "\n")


def test_listeners_of_the_running_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [item for item in parse_listeners(Path("/proc/net/tcp").read_text()) if item.port == port]
        assert [item.address for item in found] == ["127.0.0.1"]
        mine = cgroup_of(os.getpid())
        told = check_port("127.0.0.1", port, ["sglang-default.service"])
        assert [(item["code"], item["pid"]) for item in told] == [("port_taken", os.getpid())], mine
        assert check_port("127.0.0.2", port, []) == []
    assert check_port("127.0.0.1", port, []) == []


def test_port_held_by_this_unit_is_fine(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000   999        0 4242 1\n"
    (tmp_path / "net" / "tcp").write_text(header + row)
    make_process(tmp_path, 77, "0::/system.slice/sglang-default.service\n")
    (tmp_path / "77" / "fd" / "5").symlink_to("socket:[4242]")
    assert check_port("127.0.0.1", 30000, ["sglang-default.service"], str(tmp_path)) == []
    told = check_port("0.0.0.0", 30000, ["sglang-other.service"], str(tmp_path))
    assert [(item["pid"], item["unit"]) for item in told] == [(77, "sglang-default.service")]
    assert check_port("127.0.0.1", 30001, [], str(tmp_path)) == []


@pytest.mark.parametrize(
    ("wanted", "listening", "collide"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "10.0.0.1", True),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "::", True),
        ("::", "127.0.0.1", True),
        ("127.0.0.1", "::1", False),
        ("127.0.0.1", "::ffff:127.0.0.1", True),
        ("gpu-01", "10.0.0.1", True),
    ],
)
def test_addresses(wanted: str, listening: str, collide: bool) -> None:
    assert addresses_collide(wanted, listening) is collide


@pytest.mark.parametrize(
    ("text", "cgroup"),
    [
        ("0::/system.slice/sglang-default.service\n", "/system.slice/sglang-default.service"),
        ("9:name=systemd:/\n4:memory:/\n0::/system.slice/x.service\n", "/system.slice/x.service"),
        ("4:memory:/docker/1\n1:name=systemd:/system.slice/x.service\n0::/\n", "/system.slice/x.service"),
        ("0::/\n", "/"),
    ],
)
def test_cgroup_on_every_hierarchy(tmp_path: Path, text: str, cgroup: str) -> None:
    make_process(tmp_path, 5, text)
    assert cgroup_of(5, str(tmp_path)) == cgroup
    assert cgroup_of(6, str(tmp_path)) == ""


def test_unit_of() -> None:
    assert unit_of("/user.slice/user-0.slice/session-3.scope") == "session-3.scope"
    assert unit_of("/") is None


def test_low_ports(tmp_path: Path) -> None:
    assert check_privileged_port(443, "sglang", str(tmp_path))[0]["code"] == "port_privileged"
    assert check_privileged_port(443, "root", str(tmp_path)) == []
    folder = tmp_path / "sys" / "net" / "ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_unprivileged_port_start").write_text("80\n")
    assert check_privileged_port(443, "sglang", str(tmp_path)) == []


def test_access_says_what_stops_it(tmp_path: Path) -> None:
    me, group = getpass.getuser(), grp.getgrgid(os.getgid()).gr_name
    (tmp_path / "file").write_text("x")
    found = access_as(me, group, [(str(tmp_path / "file"), "read"), (str(tmp_path / "none"), "read")])
    assert found == [None, (str(tmp_path / "none"), "absent")]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_access_as_another_user(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "model").mkdir(parents=True)
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    closed.chmod(0o700)
    told = check_access("nobody", "nogroup", [("model path", str(closed / "model"), "read")])
    assert [(item["code"], item["at"]) for item in told] == [("model_unreadable", str(closed))]
    assert "setfacl" in told[0]["message"]
    closed.chmod(0o755)
    assert check_access("nobody", "nogroup", [("model path", str(closed / "model"), "read")]) == []
    told = check_access("nobody", "nogroup", [("cache folder", str(closed), "write")])
    assert [item["code"] for item in told] == ["cache_not_writable"]


def nvidia(apps: RunResult) -> object:
    def run(argv: Sequence[str], _timeout: float) -> RunResult:
        if "--query-gpu=index,uuid" in argv:
            rows = [f"{index}, GPU-00000000-0000-0000-0000-{index:012d}\n" for index in range(4)]
            return RunResult(0, "".join(rows), "")
        return apps

    return run


def test_gpus_held_by_strangers(tmp_path: Path) -> None:
    make_process(tmp_path, 2505781, "0::/system.slice/sglang-default.service\n")
    make_process(tmp_path, 2505782, "0::/system.slice/else.service\n")
    run = nvidia(RunResult(0, ORPHANS, ""))
    told = check_gpus(run, None, ["sglang-default.service"], str(tmp_path))  # type: ignore[arg-type]
    assert [(item["pid"], item["gpu"], item["unit"], item["severity"]) for item in told] == [
        (2505782, 1, "else.service", "error")
    ]
    assert check_gpus(run, [0], ["sglang-default.service"], str(tmp_path)) == []  # type: ignore[arg-type]


def test_gpus_without_a_word_from_the_driver(tmp_path: Path) -> None:
    hidden = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-x, 4711, [Not Found], [N/A]\n"
    told = check_gpus(nvidia(RunResult(0, hidden, "")), None, [], str(tmp_path))  # type: ignore[arg-type]
    assert [(item["pid"], item["severity"]) for item in told] == [(4711, "warning")]
    told = check_gpus(nvidia(RunResult(-9, "", "", True)), None, [], str(tmp_path))  # type: ignore[arg-type]
    assert [(item["code"], item["severity"]) for item in told] == [("gpus_unknown", "warning")]
    assert check_gpus(nvidia(RunResult(127, "", "no such file")), None, [], str(tmp_path)) == []  # type: ignore[arg-type]


def test_compute_apps_with_commas_in_names() -> None:
    rows = parse_compute_apps("GPU-1, 12, /opt/a,b/python, 300 MiB\n\nNo running processes found\n")
    assert [(row.pid, row.name, row.memory_mib) for row in rows] == [(12, "/opt/a,b/python", 300)]


def test_limits_that_were_not_granted() -> None:
    missing = limits_not_granted({"LimitMEMLOCK": "infinity", "LimitNOFILE": "20000"}, LIMITS)
    assert missing == [
        {"limit": "LimitMEMLOCK", "wanted": "infinity", "granted": "67108864", "code": "memlock_effective_below_unit"}
    ]
    assert limits_not_granted({"LimitMEMLOCK": "infinity"}, LIMITS.replace("67108864", "unlimited")) == []


def test_memory_and_noexec(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    1024 kB\n")
    assert [item["code"] for item in check_memory(str(tmp_path))] == ["memory_low"]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text("/dev/a / ext4 rw 0 0\n/dev/b /var ext4 rw,noexec 0 0\n")
    assert [item["code"] for item in check_noexec(["/var/cache/sglang/x"], str(tmp_path))] == ["cache_noexec"]
    assert check_noexec(["/variety"], str(tmp_path)) == []


def test_leftovers_by_cgroup(tmp_path: Path) -> None:
    inner = tmp_path / "system.slice" / "sglang-default.service" / "inner"
    inner.mkdir(parents=True)
    (inner / "cgroup.procs").write_text("12\n")
    (inner.parent / "cgroup.procs").write_text("11\n")
    assert cgroup_processes("/system.slice/sglang-default.service", str(tmp_path)) == [11, 12]
    assert cgroup_processes("/system.slice/gone.service", str(tmp_path)) == []
    assert cgroup_processes("/", str(tmp_path)) == []
