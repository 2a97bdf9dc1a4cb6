# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The running service from systemd's words and from /proc, without its secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _service_state
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult
from hypothesis import given
from hypothesis import strategies as st

SHOWN = """\
LoadState=loaded
ActiveState=active
SubState=running
MainPID=4711
Result=success
ExecMainStatus=0
NRestarts=2
UnitFileState=enabled
FragmentPath=/etc/systemd/system/sglang-default.service
ControlGroup=/system.slice/sglang-default.service
User=sglang
"""
UNIT = """\
[Service]
Environment="GPUFLEET_SGLANG_REVISION=0123456789abcdef"
ExecStart="/v/bin/python" "-m" "sglang.launch_server"
"""
SITE = "/v/lib/python3.12/site-packages"
MAPS = f"""\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 123 /usr/bin/python3.12
7f0000000000-7f0000001000 r-xp 00000000 08:01 124 {SITE}/deep_ep/_C.cpython-312-x86_64-linux-gnu.so
7f0000001000-7f0000002000 r--p 00001000 08:01 124 {SITE}/deep_ep/_C.cpython-312-x86_64-linux-gnu.so
7f0000002000-7f0000003000 r--p 00000000 08:01 125 {SITE}/nvidia/nccl/lib/libnccl.so.2
7f0000003000-7f0000004000 r--p 00000000 08:01 126 {SITE}/nvidia/nvshmem/lib/libnvshmem_host.so.3
7f0000004000-7f0000005000 r--p 00000000 08:01 127 /opt/a b/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so (deleted)
7f0000005000-7f0000006000 rw-p 00000000 00:00 0 [heap]
7f0000006000-7f0000007000 r--p 00000000 08:01 128 {SITE}/torch/lib/libtorch.so
"""


class Systemctl:
    def __init__(self, answer: RunResult) -> None:
        self.answer = answer
        self.calls: list[list[str]] = []

    def __call__(self, argv, timeout):
        self.calls.append(list(argv))
        return self.answer


def process(root: Path, pid: int, maps: str, argv: list[str], environ: str = "") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "maps").write_text(maps)
    (folder / "cmdline").write_text("\0".join(argv) + "\0")
    (folder / "environ").write_text(environ)


def cgroup(root: Path, top: str, pids: dict[str, list[int]]) -> None:
    for name, numbers in pids.items():
        folder = root / top / "system.slice/sglang-default.service" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in numbers))


@pytest.mark.parametrize("top", ["sys/fs/cgroup", "sys/fs/cgroup/systemd", "sys/fs/cgroup/unified"])
def test_a_running_service(top: str, tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/sglang-default.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(UNIT)
    argv = ["/v/bin/python", "-m", "sglang.launch_server", "--tp-size", "8", "--name", "", "--api-key", "hunter22222"]
    process(tmp_path, 4711, "", argv, "PATH=/bin\0GPUFLEET_SGLANG_REVISION=fedcba9876543210\0API_KEY=x\0")
    process(tmp_path, 4712, MAPS, ["sglang::scheduler"])
    cgroup(tmp_path, top, {".": [4711], "child": [4712]})
    systemctl = Systemctl(RunResult(0, SHOWN, ""))
    service = _service_state.gather(Context(run=systemctl, root=str(tmp_path)))
    assert systemctl.calls[0][:3] == ["systemctl", "show", "sglang-default.service"]
    assert (service["unit"], service["state"], service["sub_state"]) == ("sglang-default.service", "active", "running")
    assert (service["main_pid"], service["restarts"], service["enabled"]) == (4711, 2, "enabled")
    assert service["argv"][:7] == argv[:7]
    assert "hunter22222" not in repr(service)
    assert service["pids"] == [4711, 4712]
    assert service["loaded_libraries"] == [
        "/opt/a b/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so (deleted)",
        f"{SITE}/deep_ep/_C.cpython-312-x86_64-linux-gnu.so",
        f"{SITE}/nvidia/nccl/lib/libnccl.so.2",
        f"{SITE}/nvidia/nvshmem/lib/libnvshmem_host.so.3",
    ]
    # The process still runs what it was started with, although the unit has been replaced since.
    assert (service["revision"], service["unit_revision"]) == ("fedcba9876543210", "0123456789abcdef")


def test_a_stopped_service(tmp_path: Path) -> None:
    shown = SHOWN.replace("ActiveState=active", "ActiveState=failed").replace("4711", "0").replace("success", "signal")
    service = _service_state.gather(Context(run=Systemctl(RunResult(0, shown, "")), root=str(tmp_path)))
    assert (service["state"], service["main_pid"], service["result"]) == ("failed", None, "signal")
    assert (service["argv"], service["loaded_libraries"], service["revision"]) == ([], [], None)


def test_another_instance_and_no_such_unit(tmp_path: Path) -> None:
    systemctl = Systemctl(RunResult(0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", ""))
    service = _service_state.gather(Context(run=systemctl, root=str(tmp_path), instance="kimi"))
    assert (service["unit"], service["state"], service["code"]) == ("sglang-kimi.service", "absent", None)
    assert systemctl.calls[0][2] == "sglang-kimi.service"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RunResult(127, "", "No such file"), "rc 127"),
        (RunResult(1, "", "System has not been booted with systemd as init system"), "not been booted"),
        (RunResult(-9, "", "", True), "no answer in 20 s"),
        (RunResult(0, "garbage", ""), "rc 0"),
    ],
)
def test_systemd_that_gives_no_answer_is_unknown_not_stopped(answer: RunResult, said: str, tmp_path: Path) -> None:
    service = _service_state.gather(Context(run=Systemctl(answer), root=str(tmp_path)))
    assert (service["state"], service["code"]) == ("unknown", "systemd_unavailable")
    assert said in service["message"]


def test_libraries_that_cannot_be_read_are_not_told_as_none_loaded(tmp_path: Path) -> None:
    service = _service_state.gather(Context(run=Systemctl(RunResult(0, SHOWN, "")), root=str(tmp_path)))
    assert (service["main_pid"], service["pids"], service["loaded_libraries"]) == (4711, [4711], None)


def test_a_strange_control_group_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/cgroup.procs").write_text("1\n")
    context = Context(root=str(tmp_path))
    assert _service_state.cgroup_pids(context, "/../../etc") == []
    assert _service_state.cgroup_pids(context, "") == []


def test_this_process_for_real() -> None:
    context = Context()
    text = context.read(f"/proc/{os.getpid()}/cmdline") or ""
    assert _service_state.parse_argv(text)[0] == text.split("\0")[0]
    assert _service_state.loaded_libraries(context, [os.getpid()]) == []


def test_copies_of_common_libraries_that_a_wheel_brings_are_left_out() -> None:
    """As nixl 1.5.1 was mapped on an H200: 90 libraries of Abseil and gRPC beside its own."""
    folder = f"{SITE}/nixl_cu13.libs"
    own = [f"{SITE}/.nixl_cu13.mesonpy.libs/libnixl.so", f"{folder}/ucx/libuct_cuda.so.0.0.0",
           f"{SITE}/nixl_cu13/_bindings.cpython-312-x86_64-linux-gnu.so"]  # fmt: skip
    copies = [f"{folder}/libabsl_base-5dc7d7dc.so.2508.0.0", f"{folder}/libgrpc++-95c57f84.so.1.73.0"]
    text = "".join(f"7f00-7f01 r-xp 00000000 08:01 42  {path}\n" for path in own + copies)
    assert _service_state.parse_maps(text) == sorted(own)


@given(st.text(max_size=300))
def test_hostile_text_never_raises(text: str) -> None:
    assert isinstance(_service_state.parse_show(text), dict)
    assert isinstance(_service_state.parse_argv(text), list)
    assert isinstance(_service_state.parse_maps(text), list)
    answer = RunResult(0, "LoadState=loaded\nMainPID=" + text, "")
    context = Context(run=Systemctl(answer), root="/nonexistent")
    assert _service_state.gather(context)["state"] in ("unknown", "absent") or "ActiveState" in text
