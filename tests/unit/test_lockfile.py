# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock is its holder's life, not the file's presence; dropping privileges really drops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _drop, _lockfile
from hypothesis import given
from hypothesis import strategies as st

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop")


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_second_taker_is_told_who_holds_it(tmp_path):
    path = str(tmp_path / "lock")
    with _lockfile.acquire(path, "swap"):
        with pytest.raises(_lockfile.LockHeld) as held:
            _lockfile.acquire(path, "other")
        assert held.value.holder.pid == os.getpid()
        assert "swap" in str(held.value)
        assert _lockfile.holder_of(path).purpose == "swap"
    assert _lockfile.holder_of(path) is None
    _lockfile.acquire(path, "again").release()


def test_dead_holder_holds_nothing_even_as_a_zombie(tmp_path):
    path = str(tmp_path / "lock")
    child = sleeper()
    lock = _lockfile.acquire(path, "build")
    lock.pass_to(child.pid)
    assert _lockfile.holder_of(path).pid == child.pid
    with pytest.raises(_lockfile.LockHeld):
        _lockfile.acquire(path, "second")
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert _lockfile.holder_of(path) is None
    with _lockfile.acquire(path, "third") as third:
        lock.release()  # of somebody who lost it: must not take it from the third
        assert _lockfile.holder_of(path) == third.holder
    child.wait()


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another-boot"}])
def test_recycled_pid_or_reboot_is_not_the_holder(tmp_path, change):
    path = tmp_path / "lock"
    lock = _lockfile.acquire(str(path), "old")
    path.write_text(json.dumps({**lock.holder._asdict(), **change}))
    assert _lockfile.holder_of(str(path)) is None
    assert _lockfile.acquire(str(path), "new").holder.purpose == "new"


def test_pass_to_a_process_that_is_gone(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    lock = _lockfile.acquire(str(tmp_path / "lock"), "x")
    with pytest.raises(ProcessLookupError):
        lock.pass_to(child.pid)
    assert _lockfile.holder_of(lock.path) == lock.holder


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("keep")
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        _lockfile.acquire(str(tmp_path / "lock"), "x")
    assert (tmp_path / "target").read_text() == "keep"


def test_stat_of_a_hostile_command_name():
    assert _lockfile.parse_stat("7 (a) b (c)) S 1" + " 0" * 17 + " 4242 0 0") == ("S", 4242)


@given(st.text())
def test_torn_content_never_raises(text):
    _lockfile.parse_stat(text)
    assert _lockfile.parse_holder(text) is None


@needs_root
def test_child_runs_as_the_other_user_with_its_groups_only(tmp_path):
    nobody = _drop.identity_of_user("nobody")
    result = _drop.run_as(
        nobody, ["/usr/bin/id", "-u"], 10, _drop.environment(nobody, {"SUDO_USER": "x", "PIP_INDEX_URL": "keep"})
    )
    assert result.stdout.strip() == str(nobody.uid)
    env = _drop.environment(nobody, {"SUDO_USER": "x", "PIP_NO_INDEX": "1", "TMPDIR": "/root/tmp"})
    assert "SUDO_USER" not in env and "TMPDIR" not in env and env["PIP_NO_INDEX"] == "1"
    assert env["HOME"] == "/"


@needs_root
def test_acting_as_loses_and_regains_rights(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    nobody = _drop.identity_of_user("nobody")
    with _drop.acting_as(nobody):
        assert not os.access(secret, os.R_OK, effective_ids=True)
        with pytest.raises(PermissionError):
            secret.read_text()
    assert secret.read_text() == "x"
    assert os.geteuid() == 0 and 0 in [*os.getgroups(), os.getegid()]


@needs_root
def test_owner_is_the_one_user_besides_root(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    for path in (a, b, c):
        path.mkdir()
    assert _drop.owner_of([str(a), str(b)]).uid == 0
    os.chown(b, 1234567, 1234567)
    assert _drop.owner_of([str(a), str(b)]).uid == 1234567
    os.chown(c, 1234568, 1234568)
    with pytest.raises(_drop.CannotDrop, match="several owners"):
        _drop.owner_of([str(a), str(b), str(c)])


def test_timeout_ends_the_whole_group_and_output_is_bounded(tmp_path):
    me = _drop.current()
    pid_file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid_file}; yes | head -c 5000000; wait"
    result = _drop.run_as(me, ["/bin/sh", "-c", script], 2, _drop.environment(me), limit=1000)
    assert result.timed_out and result.rc == -9
    assert len(result.stdout) == 1000
    # The orphan was killed with its group; init takes it away a moment later.
    orphan = int(pid_file.read_text())
    deadline = time.monotonic() + 30
    while _lockfile.process_start(orphan) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _lockfile.process_start(orphan) is None


def test_unknown_user_and_missing_program():
    with pytest.raises(_drop.CannotDrop, match="no-such-user"):
        _drop.identity_of_user("no-such-user")
    assert _drop.run_as(_drop.current(), ["/no/such"], 5, {}).rc == 127
