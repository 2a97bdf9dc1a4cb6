# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Children that misbehave: whatever they do, there is a result, in time, and nothing is left."""

from __future__ import annotations

import glob
import os
import sys
import tempfile
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _import_child as child

MODULES = {
    "good": "import sys\nprint('{\"ok\": false}')\nBuffer = 1\n",
    "aborts": "import os\nos.abort()\n",
    "segfaults": "import ctypes\nctypes.string_at(0)\n",
    "exits": "import os\nos._exit(7)\n",
    "leaves": "import sys\nsys.exit('bye')\n",
    "hangs": "import time\nprint('before', flush=True)\ntime.sleep(600)\n",
    "floods": "import os\nfor i in range(2000):\n    os.write(1, b'x' * 65536)\n",
    "raises": "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd()\n",
    "chained": (
        "try:\n    import nothing_here\nexcept ImportError as e:\n    raise ImportError('please install it') from e\n"
    ),
    "closes": "import os\nos.closerange(3, 200)\n",
    "breaks": "import json, os\njson.dumps = os.write = os._exit = None\n",
    "forks": "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n",
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.setsid()\n"
        "        os.execvp('sleep', ['sleep', '%d'])\n    os._exit(0)\n"
    ),
    "kills": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nBuffer = 1\n",
    "looks": (
        "import os\nBuffer = 1\nassert os.listdir('.') == [], os.listdir('.')\nassert os.environ['ONLY'] == 'this'\n"
    ),
}


@pytest.fixture
def modules(tmp_path):
    mark = 100_000 + os.getpid()
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text % mark if name == "daemon" else text)
    return tmp_path


def run(modules, *names, timeout=20.0, **environment):
    groups = [child.Group(name, name, {name: ["Buffer"]}) for name in names]
    environment = {"PYTHONPATH": str(modules), **environment}
    return child.run_imports(sys.executable, groups, child.Account(), environment, timeout, with_torch=False)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("good", "ok"), ("aborts", "signal"), ("segfaults", "signal"), ("exits", "exit"), ("leaves", "exit"),
        ("floods", "ok"), ("raises", "error"), ("chained", "error"), ("closes", "exit"), ("breaks", "ok"),
        ("forks", "ok"), ("daemon", "ok"),
    ],
)  # fmt: skip
def test_each_is_a_result(modules, tmp_path_factory, monkeypatch, name, outcome):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    before = child._own_children()
    assert run(modules, name)[name].outcome == outcome
    assert child._own_children() == before
    assert not glob.glob(os.path.join(tempfile.gettempdir(), "gpufleet-probe-*"))


def test_details(modules):
    found = run(modules, "good", "aborts", "exits", "chained", "raises", "floods")
    assert found["good"].attributes == {"good.Buffer": True}
    assert '{"ok": false}' in found["good"].output
    assert found["good"].modules["good"]["file"] == str(modules / "good.py")
    assert found["aborts"].signal == "SIGABRT"
    assert found["exits"].status == 7
    assert found["chained"].error["message"] == "please install it"
    assert found["chained"].error["chain"][0]["name"] == "nothing_here"
    assert "ValueError" in found["raises"].error["message"]
    assert len(found["floods"].output) <= child.OUTPUT_HEAD + child.OUTPUT_TAIL + 20


def test_a_hang_costs_the_limit_and_hides_nothing(modules):
    started = time.monotonic()
    found = run(modules, "good", "hangs", "aborts", timeout=1.5)
    assert [found[name].outcome for name in ("good", "hangs", "aborts")] == ["ok", "timeout", "signal"]
    assert found["hangs"].output == "before\n"
    # The limit, not the 600 s of the hang.
    assert time.monotonic() - started < 60


def test_a_daemon_that_left_its_session_is_ended(modules):
    run(modules, "daemon", "forks")
    mark = str(100_000 + os.getpid())
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as stream:
                    assert mark.encode() not in stream.read().split(b"\0")
            except OSError:
                continue


@pytest.mark.parametrize("names", [("kills", "good"), ("good", "kills"), ("kills", "aborts", "good")])
def test_the_first_child_may_be_killed_and_costs_no_time(modules, names):
    session = []

    class Watched(child._Session):
        def __init__(self, *given):
            super().__init__(*given)
            session.append(self)

    child_session, child._Session = child._Session, Watched
    try:
        found = run(modules, *names, timeout=300.0)
    finally:
        child._Session = child_session
    assert not session[0].timed_out
    assert found["kills"].outcome in ("ok", "exit"), found
    # One that was never forked has no result, and is not said to have hung.
    assert found[names[0]].outcome != "timeout" and found[names[-1]].outcome != "timeout"


def test_python_that_does_not_come_up_is_not_taken_for_a_bad_torch(modules, tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    groups = [child.Group("good", "good", {"good": ()})]
    for text, signal_name in (("import os; os.abort()", "SIGABRT"), ("import time; time.sleep(600)", None)):
        (start / "sitecustomize.py").write_text(text)
        found = child.run_imports(sys.executable, groups, child.Account(), {"PYTHONPATH": f"{start}:{modules}"}, 2.0)
        assert (found["good"].outcome, found["good"].signal) == ("interpreter", signal_name)


def test_environment_and_directory(modules):
    assert run(modules, "looks", ONLY="this")["looks"].outcome == "ok"
    assert run(modules, "looks", ONLY="that")["looks"].error["type"] == "AssertionError"


def test_without_a_service_the_interpreter_is_isolated(modules, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(modules))
    group = child.Group("good", "good", {"good": ()})
    found = child.run_imports(sys.executable, [group], child.Account(), None, 20.0, with_torch=False)
    assert found["good"].error["name"] == "good"


def test_torch_is_imported_first_and_its_failure_told(modules):
    (modules / "torch.py").write_text("raise RuntimeError('libcudnn is odd')\n")
    groups = [child.Group("good", "good", {"good": ()})]
    found = child.run_imports(sys.executable, groups, child.Account(), {"PYTHONPATH": str(modules)}, 20.0)
    assert found["good"].outcome == "ok"
    assert found["good"].torch["error"]["message"] == "libcudnn is odd"
    (modules / "torch.py").write_text("import os\nos.abort()\n")
    found = child.run_imports(sys.executable, groups, child.Account(), {"PYTHONPATH": str(modules)}, 20.0)
    assert (found["good"].outcome, found["good"].signal) == ("torch", "SIGABRT")


def test_an_interpreter_that_cannot_start(tmp_path):
    group = child.Group("x", "x", {"x": ()})
    for path in (tmp_path / "absent", tmp_path):
        found = child.run_imports(str(path), [group], child.Account(), {}, 5.0)
        assert found["x"].outcome == "not_started" and found["x"].message
    found = child.run_imports("/bin/false", [group], child.Account(), {}, 5.0)["x"]
    assert (found.outcome, found.status) == ("interpreter", 1)


def test_the_environment_is_what_systemd_gives(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_LOGIN", "x")
    account = child.Account(1, 1, [], "sglang", "/var/lib/sglang")
    made = child.service_environment({"HOME": "/srv", "A=B": "x", "CUDA_HOME": "/opt/cuda"}, account)
    assert (made["HOME"], made["USER"], made["CUDA_HOME"]) == ("/srv", "sglang", "/opt/cuda")
    assert "SECRET_OF_THE_LOGIN" not in made and "A=B" not in made
