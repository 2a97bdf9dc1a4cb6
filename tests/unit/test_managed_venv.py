# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A lock gives one whole environment or none."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import signal
import subprocess
import sys

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _managed_venv as mv
from hypothesis import given
from hypothesis import strategies as st
from small_wheels import make_wheel

FACTS = {"version": "3.12.1", "soabi": "cpython-312", "machine": "x86_64", "libc": "glibc-2.36"}


@pytest.fixture(autouse=True)
def no_site_policy(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "house"
    make_wheel(folder, "moon", "1.0", {"moon.py": "X = 1\n"})
    make_wheel(folder, "sun", "1.0", {"sun.py": "import no_such_thing\n"}, requires=["moon==2.0"])
    return folder


def make(tmp_path, lock, **kwargs):
    given = {
        "base": str(tmp_path / "base"),
        "python": sys.executable,
        "wheelhouse": str(tmp_path / "house"),
        **kwargs,
    }
    return mv.work(mv.Options(lock=lock, **given))


def name_of(text, **facts):
    return mv.content_hash(mv.parse_lock(text), {**FACTS, **facts})


def test_the_name_follows_the_content_and_the_interpreter_only():
    one = name_of("a==1\nb==2\n")
    assert one == name_of("# generated\nb==2   # why\n\na==1")
    assert name_of("a==1 --hash=sha256:aa --hash=sha256:bb") == name_of(
        "a==1 \\\n --hash=sha256:bb \\\n --hash=sha256:aa"
    )
    others = {
        name_of("a==1\nb==3"),
        name_of("a==1\nb==2", soabi="cpython-313"),
        name_of("a==1\nb==2", machine="aarch64"),
    }
    assert len(others | {one}) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("# only words\n", "empty"),
        ("torch>=2", "line 1: 'torch>=2' is not pinned"),
        ("a==1\ntorch", "line 2: 'torch' is not pinned"),
        ("-e ./x\na==1", "not allowed"),
        ("--index-url https://u:s3cret@h/simple\na==1", r"\*\*\*@h"),
        ("a @ https://h/a-1-py3-none-any.whl", "has no hash"),
        ("a==1 --hash=sha256:aa\nb==1", "hashes for 1 of 2"),
        ("a==1 --global-option=x", "unknown option"),
    ],
)
def test_a_lock_that_is_none(text, said):
    with pytest.raises(mv.Failure, match=said) as failure:
        mv.parse_lock(text)
    assert failure.value.fields["code"] == "bad_lock"
    assert "s3cret" not in str(failure.value)


def test_markers_and_extras_are_pins():
    lock = mv.parse_lock('sglang[all]==0.5.23\ncolorama==1 ; sys_platform == "win32"\nx @ file:///w/x.whl#sha256=aa\n')
    assert lock.names == {"sglang": "0.5.23", "colorama": "1", "x": ""}


@given(st.text())
def test_hostile_lock(text):
    try:
        mv.parse_lock(text)
    except mv.Failure as failure:
        assert failure.fields["code"] == "bad_lock"


def test_made_once_proven_and_collected_only_when_asked(tmp_path, house):
    digest = hashlib.sha256((house / "moon-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lock = f"moon==1.0 --hash=sha256:{digest}\n"
    told = make(tmp_path, lock, check_mode=True)
    assert told["changed"] and not os.path.exists(tmp_path / "base")
    made = make(tmp_path, lock, prove_imports=["moon"])
    assert made["changed"] and made["path"] == told["path"] and "moon==1.0" in made["distributions"]
    python = os.path.join(made["path"], "bin", "python")
    assert subprocess.run([python, "-I", "-c", "import moon"], check=True, cwd="/").returncode == 0
    assert sorted(set(os.listdir(made["path"])) & {".tmp", ".complete", "lock.txt"}) == [".complete", "lock.txt"]
    before = os.stat(os.path.join(made["path"], ".complete")).st_mtime_ns
    assert not make(tmp_path, lock)["changed"]
    assert os.stat(os.path.join(made["path"], ".complete")).st_mtime_ns == before

    old = tmp_path / "base" / ("0" * 16)
    half = tmp_path / "base" / ("1" * 16)
    other = tmp_path / "base" / "of-somebody"
    for folder in (old, half, other):
        folder.mkdir()
    (old / ".complete").write_text("{}")
    assert make(tmp_path, lock)["removed"] == []
    assert make(tmp_path, lock, keep=1)["removed"] == [str(half)]
    with subprocess.Popen([sys.executable, "-c", "input()", f"{old}/x"], stdin=subprocess.PIPE) as user:
        assert make(tmp_path, lock, keep=0)["removed"] == []
        user.communicate(b"\n")
    assert make(tmp_path, lock, keep=0)["removed"] == [str(old)]
    assert other.exists() and os.path.exists(python)


@pytest.mark.parametrize(
    ("lock", "kwargs", "code", "said"),
    [
        ("moon==9", {}, "build_failed", "wheelhouse"),
        ("moon==1.0 --hash=sha256:" + "0" * 64, {}, "build_failed", "hash"),
        ("moon==1.0\nsun==1.0", {}, "lock_conflicts", r"sun 1\.0 has requirement moon==2\.0"),
        (
            "moon==1.0\nsun==1.0",
            {"prove_imports": ["sun"], "prove_consistent": False},
            "import_failed",
            "No module named 'no_such_thing'",
        ),
    ],
)
def test_a_build_that_fails_leaves_nothing(tmp_path, house, lock, kwargs, code, said):
    with pytest.raises(mv.Failure, match=said) as failure:
        make(tmp_path, lock, **kwargs)
    assert failure.value.fields["code"] == code
    assert os.listdir(tmp_path / "base") == [".lock"]


DRIVER = """
import json, os, signal, sys
sys.path[:0] = json.loads(sys.argv[2])
from ansible_collections.gpufleet.sglang.plugins.module_utils import _managed_venv as mv, _drop
real = _drop.run_as
def run_as(identity, argv, *rest, **more):
    result = real(identity, argv, *rest, **more)
    if sys.argv[3] in argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
_drop.run_as = run_as
mv.work(mv.Options(**json.loads(sys.argv[1])))
"""


@pytest.mark.parametrize("after", ["venv", "freeze"])
def test_an_interrupted_build_is_built_anew(tmp_path, house, after):
    given = {"lock": "moon==1.0", "base": str(tmp_path / "base"), "python": sys.executable, "wheelhouse": str(house)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(given), json.dumps(sys.path), after], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert make(tmp_path, "moon==1.0", check_mode=True)["changed"]
    made = make(tmp_path, "moon==1.0")
    assert made["changed"] and not os.path.exists(os.path.join(made["path"], ".tmp"))
    assert not make(tmp_path, "moon==1.0")["changed"]


@pytest.mark.parametrize(
    ("kwargs", "code"),
    [
        ({"python": "/no/python"}, "no_python"),
        ({"owner": "no-such-user"}, "owner"),
        ({"base": "relative"}, "bad_base"),
        ({"prove_imports": ["os; x"]}, "bad_import"),
    ],
)
def test_bad_input(tmp_path, kwargs, code):
    with pytest.raises(mv.Failure) as failure:
        make(tmp_path, "moon==1.0", **kwargs)
    assert failure.value.fields["code"] == code


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="needs root, a system Python")
def test_all_of_it_belongs_to_the_owner_and_no_link_is_followed(tmp_path, house):
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    nobody = pwd.getpwnam("nobody")
    maker = mv.Maker(mv.Options("moon==1.0", str(tmp_path / "base"), "/usr/bin/python3", owner="nobody"))
    precious = tmp_path / "precious"
    precious.mkdir()
    os.mkdir(tmp_path / "base")
    os.symlink(precious, maker.path)
    try:
        made = make(tmp_path, "moon==1.0", python="/usr/bin/python3", owner="nobody")
    except mv.Failure as failure:
        if "ensurepip" in str(failure.fields):
            pytest.skip("the system Python has no ensurepip")
        raise
    assert precious.exists() and os.listdir(precious) == []
    owners = {
        os.lstat(os.path.join(folder, name)).st_uid for folder, _names, files in os.walk(made["path"]) for name in files
    }
    assert owners == {nobody.pw_uid}
