"""The detached worker, with real processes: lock, attach, kill, resume, time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _detached


def spec(*steps, limit=60, **more):
    return dict(
        {
            "id": "t",
            "time_limit": limit,
            "heartbeat": 0.2,
            "steps": [
                {"name": f"s{number}", "argv": list(argv), "env": dict(os.environ)} for number, argv in enumerate(steps)
            ],
        },
        **more,
    )


def sh(text):
    return ["/bin/sh", "-c", text]


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def finished(job):
    status = _detached.observe(job)
    return status if status["state"] not in ("running",) else None


def the_holder(job):
    found = _detached.holder(job)
    assert found is not None
    return found


def pids_in(path):
    return [int(word) for word in Path(path).read_text().split()] if Path(path).exists() else []


def alive(pid):
    return _detached.process_start_time(pid) is not None


@pytest.fixture
def job(tmp_path):
    folder = str(tmp_path / "job")
    yield folder
    if os.path.isdir(folder):
        _detached.cancel(folder)


def test_runs_the_steps_in_order_and_keeps_the_log(job):
    assert _detached.observe(job)["state"] == "absent"
    begun = _detached.start(job, spec(sh("echo one"), sh("echo two >&2")))
    assert begun["attached"] is False
    status = wait_for(lambda: finished(job))
    assert (status["state"], status["rc"]) == ("succeeded", 0)
    assert [step["name"] for step in status["steps"]] == ["s0", "s1"]
    lines = _detached.log_lines(job)
    assert lines.index("one") < lines.index("two")
    wait_for(lambda: not _detached.is_locked(job))  # the status is written before the worker is gone


def test_a_failing_step_ends_the_job(job):
    _detached.start(job, spec(sh("exit 3"), sh("echo never")))
    status = wait_for(lambda: finished(job))
    assert (status["state"], status["rc"]) == ("failed", 3)
    assert "never" not in _detached.log_lines(job)
    # At once again: the worker may still be on its way out, and the result that it left is no run to attach to.
    assert _detached.start(job, spec(sh("true")))["attached"] is False
    assert wait_for(lambda: finished(job))["state"] == "succeeded"


def test_a_program_that_is_not_there_is_a_failure_not_a_lost_worker(job):
    _detached.start(job, spec(["/no/such/program"]))
    status = wait_for(lambda: finished(job))
    assert (status["state"], status["rc"]) == ("failed", 127)
    assert "/no/such/program" in status["message"]


def test_a_second_start_attaches_and_starts_nothing(job, tmp_path):
    _detached.start(job, spec(sh(f"echo run >> {tmp_path}/count; sleep 100")))
    wait_for(lambda: (tmp_path / "count").exists())
    second = _detached.start(job, spec(sh(f"echo other >> {tmp_path}/count")))
    assert second["attached"] is True
    assert second["holder"]["alive"] is True
    assert (tmp_path / "count").read_text() == "run\n"


def test_two_starters_at_once_give_one_worker(job, tmp_path):
    code = (
        "import json,sys; sys.path.insert(0, {!r})\n"
        "from ansible_collections.gpufleet.sglang.plugins.module_utils import _detached\n"
        "print(json.dumps(_detached.start({!r}, json.loads({!r}))['attached']))"
    ).format(str(Path("collections").resolve()), job, json.dumps(spec(sh(f"echo run >> {tmp_path}/count; sleep 100"))))
    starters = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    answers = [json.loads(starter.communicate()[0]) for starter in starters]
    assert sorted(answers) == [False] + [True] * 5
    wait_for(lambda: (tmp_path / "count").exists())
    assert (tmp_path / "count").read_text() == "run\n"


def test_survives_the_death_of_whoever_started_it(job, tmp_path):
    code = (
        "import json,os,sys,time; sys.path.insert(0, {!r})\n"
        "from ansible_collections.gpufleet.sglang.plugins.module_utils import _detached\n"
        "_detached.start({!r}, json.loads({!r})); print('up', flush=True); time.sleep(100)"
    ).format(
        str(Path("collections").resolve()),
        job,
        json.dumps(spec(sh(f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo done"))),
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert starter.stdout is not None and starter.stdout.readline() == "up\n"
    # As sshd does it when a connection drops: the whole session gets SIGHUP, then SIGKILL.
    os.killpg(starter.pid, signal.SIGHUP)
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    assert _detached.observe(job)["state"] == "running"
    (tmp_path / "go").touch()
    assert wait_for(lambda: finished(job))["state"] == "succeeded"
    assert "done" in _detached.log_lines(job)


# One child, one that left the session and does not listen to SIGTERM, and the shell itself.
TREE = (
    "echo $$ >> {0}/pids; "
    "(setsid sh -c 'echo $$ >> {0}/pids; trap \"\" TERM; while :; do sleep 1; done' &) ; "
    "sh -c 'echo $$ >> {0}/pids; sleep 1000'"
)


def test_the_time_limit_ends_the_whole_tree_even_what_left_the_session(job, tmp_path):
    _detached.start(job, spec(sh(TREE.format(tmp_path)), limit=8))
    wait_for(lambda: len(pids_in(tmp_path / "pids")) == 3)
    pids = pids_in(tmp_path / "pids")
    status = wait_for(lambda: finished(job))
    assert status["state"] == "timed_out"
    assert [pid for pid in pids if alive(pid)] == []
    wait_for(lambda: not _detached.is_locked(job))  # the status is written before the worker is gone


def test_cancel_ends_the_whole_tree(job, tmp_path):
    _detached.start(job, spec(sh(TREE.format(tmp_path))))
    wait_for(lambda: len(pids_in(tmp_path / "pids")) == 3)
    assert _detached.cancel(job) is True
    assert _detached.observe(job)["state"] == "cancelled"
    assert [pid for pid in pids_in(tmp_path / "pids") if alive(pid)] == []
    assert _detached.cancel(job) is False


def test_a_killed_worker_is_told_and_its_leftovers_end_before_the_next_attempt(job, tmp_path):
    _detached.start(job, spec(sh(TREE.format(tmp_path))))
    wait_for(lambda: len(pids_in(tmp_path / "pids")) == 3)
    worker = the_holder(job)["pid"]
    os.kill(worker, signal.SIGKILL)
    status = wait_for(lambda: finished(job))
    assert status["state"] == "lost"
    assert str(worker) in status["message"]
    # The kernel ends the worker's own child with it; what that child had started stays.
    wait_for(lambda: not alive(pids_in(tmp_path / "pids")[0]))
    stubborn = [pid for pid in pids_in(tmp_path / "pids") if alive(pid)]
    assert stubborn, "the leftovers must outlive the worker, or this test proves nothing"
    again = _detached.start(job, spec(sh("echo second")))
    assert again["attached"] is False
    assert set(again["ended"]) >= set(stubborn)
    assert wait_for(lambda: finished(job))["state"] == "succeeded"
    assert [pid for pid in stubborn if alive(pid)] == []


def test_a_lock_file_of_a_dead_or_recycled_pid_is_stale(job):
    os.makedirs(job)
    # Our own pid, alive, but with another start time: a recycled pid must not look like the worker.
    Path(job, "lock").write_text(json.dumps({"pid": os.getpid(), "start_time": 1, "boot_id": _detached.boot_id()}))
    Path(job, "status.json").write_text(json.dumps({"state": "running", "started_at": 1, "heartbeat_at": 2}))
    assert the_holder(job)["alive"] is False
    assert _detached.observe(job)["state"] == "lost"
    assert _detached.start(job, spec(sh("true")))["attached"] is False


def test_the_same_pid_of_another_boot_is_stale(job):
    os.makedirs(job)
    start_time = _detached.process_start_time(os.getpid())
    Path(job, "lock").write_text(json.dumps({"pid": os.getpid(), "start_time": start_time, "boot_id": "another"}))
    assert the_holder(job)["alive"] is False


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null"])
def test_a_torn_status_or_lock_is_not_a_traceback(job, text):
    os.makedirs(job)
    Path(job, "lock").write_text(text)
    Path(job, "status.json").write_text(text)
    assert _detached.observe(job)["state"] == "absent"
    assert _detached.holder(job) is None


def test_heartbeats_tell_what_is_compiled(job, tmp_path):
    fake = tmp_path / "nvcc"
    fake.symlink_to("/bin/sleep")
    # exec -a gives the process a compiler's command line, without a compiler.
    _detached.start(
        job,
        spec(
            ["/bin/bash", "-c", f"exec -a /opt/cuda/bin/nvcc /bin/sh -c 'read x < {tmp_path}/fifo' csrc/internode.cu"]
        ),
    )
    os.mkfifo(tmp_path / "fifo")
    assert wait_for(lambda: _detached.observe(job)["running"]) == ["internode.cu"]


def test_the_worker_is_a_copy_that_needs_nothing_of_the_collection(job):
    _detached.start(job, spec(sh("true")))
    wait_for(lambda: finished(job))
    source = Path(job, "worker.py").read_text()
    assert source == Path(_detached.__file__).read_text()
    assert "import ansible" not in source


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to drop")
def test_steps_run_as_the_named_user(job):
    job_spec = spec(sh("id -un; id -Gn"))
    job_spec["steps"][0]["user"] = "nobody"
    _detached.start(job, job_spec)
    assert wait_for(lambda: finished(job))["state"] == "succeeded"
    assert _detached.log_lines(job).count("nobody") == 1
