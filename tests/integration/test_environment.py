# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""environment.yml on a real host: made once, the same again, and a lock that cannot be fulfilled leaves nothing."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def hosts(fleet):
    return fleet("env", "--subnet", "10.91.44.0/24", "env-a:ops")


def play(hosts, folder, lock, **more):
    path = folder / "lock.txt"
    path.write_text(lock)
    wanted = {"lock": str(path), "prove_imports": ["packaging"], **more}
    extra = folder / "vars.json"
    extra.write_text(json.dumps({"sglang_environment": wanted, "sglang_model_path": "/m"}))
    return hosts.play("environment", "-e", f"@{extra}")


def test_an_environment_is_made_once_and_named_by_its_content(hosts, tmp_path):
    first = play(hosts, tmp_path, "packaging==24.1\n")
    assert first.returncode == 0 and "changed=1" in first.stdout, first.stdout[-3000:] + first.stderr
    (venv,) = {line.partition("set sglang_venv: ")[2].strip(" '\"") for line in first.stdout.splitlines()
               if "set sglang_venv: " in line}  # fmt: skip
    assert venv.startswith("/opt/sglang/environments/")
    told = hosts.shell("env-a", f"{venv}/bin/python -c 'import packaging; print(packaging.__version__)'")
    assert told.strip() == "24.1"
    again = play(hosts, tmp_path, "packaging==24.1\n")
    assert again.returncode == 0 and "changed=0" in again.stdout and venv in again.stdout

    # A second one beside it; one that cannot be made leaves both alone.
    assert play(hosts, tmp_path, "packaging==24.0\n").returncode == 0
    broken = play(hosts, tmp_path, "packaging==0.0.0.1\n")
    assert broken.returncode == 2 and "packaging==0.0.0.1" in broken.stdout
    names = hosts.shell("env-a", "ls /opt/sglang/environments").split()
    assert len(names) == 2, names


def test_without_a_lock_the_variable_is_named(hosts):
    done = hosts.play("environment", "-e", "sglang_model_path=/m")
    assert done.returncode == 2 and "sglang_environment" in done.stdout and "lock" in done.stdout
    assert "env-a" in done.stdout and "is undefined" not in done.stdout, done.stdout
