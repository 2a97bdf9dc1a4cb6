# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The states of service_unit on a made-up root, /proc and systemd; a power cut at every step of a deploy."""

from __future__ import annotations

import getpass
import grp
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight, _unit_store
from ansible_collections.gpufleet.sglang.plugins.module_utils._libraries import library_versions
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_unit import (
    Host,
    Request,
    ServiceError,
    ServiceUnit,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd_quote import parse_environment_file
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_deploy import mask_environment
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_file import (
    parse_unit,
    settings,
    unit_argv,
    unit_environment,
    unit_revision,
)

UNIT = "sglang-default.service"
UNITS = "etc/systemd/system"
VENV = "/opt/venv"
KEY = "s3cr3t-k%y$"


class FakeSystemd:
    """systemctl and its kin over a folder: units are files, enabled is a link, a process is a folder of ``proc``."""

    def __init__(self, root: Path, version: int = 252, credentials: bool = True) -> None:
        self.root, self.version, self.credentials = root, version, credentials
        self.proc = root / "proc"
        self.running: dict[str, int] = {}
        self.calls: list[str] = []
        self.next_pid = 100
        self.verify = RunResult(0, "", "")

    def _unit_path(self, unit: str) -> Path:
        return self.root / UNITS / unit

    def _link(self, unit: str) -> Path:
        return self.root / UNITS / "multi-user.target.wants" / unit

    def _start(self, unit: str) -> RunResult:
        text = self._unit_path(unit).read_text()
        parsed = parse_unit(text)
        env = unit_environment(parsed)
        for path in settings(parsed, "Service", "EnvironmentFile"):
            env.update(parse_environment_file((self.root / path.lstrip("/")).read_text()))
        self.next_pid += 1
        pid = self.running[unit] = self.next_pid
        folder = self.proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "cmdline").write_text("".join(item + "\0" for item in unit_argv(text)))
        (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in env.items()))
        (folder / "limits").write_text(
            "Max locked memory  65536  65536  bytes\nMax open files  1048576  1048576  files\n"
        )
        return RunResult(0, "", "")

    def _stop(self, unit: str) -> RunResult:
        pid = self.running.pop(unit, None)
        if pid:
            shutil.rmtree(self.proc / str(pid))
        return RunResult(0, "", "")

    def _show(self, unit: str) -> RunResult:
        path = self._unit_path(unit)
        found = {
            "LoadState": "loaded" if path.exists() else "not-found",
            "ActiveState": "active" if unit in self.running else "inactive",
            "MainPID": self.running.get(unit, 0),
            "UnitFileState": "enabled" if self._link(unit).is_symlink() else "disabled",
            "FragmentPath": f"/{UNITS}/{unit}" if path.exists() else "",
        }
        return RunResult(0, "".join(f"{name}={value}\n" for name, value in found.items()), "")

    def __call__(self, argv: Sequence[str], _timeout: float) -> RunResult:
        if argv[0] == "systemd-run":
            source = next(item for item in argv if "LoadCredential" in item).split("probe:")[1]
            return RunResult(0, (self.root / source.lstrip("/")).read_text() if self.credentials else "", "")
        if argv[0] == "systemd-analyze":
            return self.verify
        if argv[0] == "nvidia-smi":
            return RunResult(127, "", "no such file")
        if argv[0] != "systemctl":
            return RunResult(0, "", "")
        words = [item for item in argv[1:] if not item.startswith("--no-")]
        if words[0] == "--version":
            return RunResult(0, f"systemd {self.version} (x)\n", "")
        if words[0] == "show":
            return self._show(words[-1])
        self.calls.append(" ".join(words))
        if words[0] == "enable":
            self._link(words[1]).parent.mkdir(parents=True, exist_ok=True)
            if not self._link(words[1]).is_symlink():
                self._link(words[1]).symlink_to(f"/{UNITS}/{words[1]}")
        elif words[0] == "disable":
            self._link(words[1]).unlink(missing_ok=True)
        elif words[0] == "start" and words[1] not in self.running:
            return self._start(words[1])
        elif words[0] == "restart":
            self._stop(words[1])
            return self._start(words[1])
        elif words[0] == "stop":
            return self._stop(words[1])
        return RunResult(0, "", "")


class Machine:
    """A made-up host with a venv, and the module on it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.systemd = FakeSystemd(root, **options)
        self.systemd.proc.mkdir(exist_ok=True)
        (root / "opt/venv/bin").mkdir(parents=True, exist_ok=True)
        (root / "opt/venv/bin/python").write_text("#!/bin/sh\n")
        (root / "opt/venv/bin/python").chmod(0o755)
        (root / "models/x").mkdir(parents=True, exist_ok=True)
        self.library("torch", "2.14.1", "aaaa")
        self.library("sglang", "0.5.23", "bbbb")

    def library(self, name: str, version: str, digest: str) -> None:
        packages = self.root / "opt/venv/lib/python3.11/site-packages"
        for old in packages.glob(f"{name}-*"):
            shutil.rmtree(old)
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "RECORD").write_text(f"{name}/x.so,sha256={digest},1\n{folder.name}/INSTALLER,sha256=zz,1\n")

    def request(self, state: str = "started", **options: Any) -> ServiceUnit:
        host = Host(run=self.systemd, root=str(self.root), proc=str(self.systemd.proc), make_users=False)
        host.sys_cgroup = str(self.root / "cgroup")
        return ServiceUnit(host, Request(instance="default", state=state, **options))

    def __call__(self, state: str = "started", **options: Any) -> dict[str, Any]:
        return self.request(state, **options).apply()

    def text(self, path: str) -> str:
        return (self.root / path).read_text()

    def reboot(self) -> None:
        shutil.rmtree(self.systemd.proc)
        self.systemd.proc.mkdir()
        shutil.rmtree(self.root / "run", ignore_errors=True)
        self.systemd.running.clear()

    def everything(self) -> str:
        return "".join(
            path.read_text(errors="replace")
            for path in self.root.rglob("*")
            if path.is_file() and "/secrets/" not in str(path) and "/service/" not in str(path)
        )


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unit_store.os, "fsync", lambda _handle: None)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def plan(*extra: str, **changes: Any) -> dict[str, Any]:
    about = {
        "user": getpass.getuser(),
        "group": grp.getgrgid(os.getgid()).gr_name,
        "host": "127.0.0.1",
        "port": 30000,
        "venv": VENV,
        "model_path": "/models/x",
    }
    base = {"instance": "default", "argv": [f"{VENV}/bin/python", "-m", "x", *extra], "env": {"A": "1"}, "unit": about}
    return {**base, **changes}


def test_started_is_idempotent(machine: Machine) -> None:
    checked = machine(plan=plan(), check_mode=True)
    assert checked["changed"] and checked["needs"] == {"write": True, "start": True, "restart": False}
    assert not (machine.root / UNITS).exists()
    first = machine(plan=plan())
    assert (
        first["changed"] and first["current"] == first["revision"] == first["running_revision"] == checked["revision"]
    )
    calls = list(machine.systemd.calls)
    again = machine(plan=plan())
    assert not again["changed"] and machine.systemd.calls == calls
    assert not machine(plan=plan(), check_mode=True)["changed"]


def test_evidence_and_prose_of_a_plan_do_not_make_a_revision(machine: Machine) -> None:
    first = machine(plan=plan())
    other = plan(decisions=[{"question": "x", "evidence": {"level": "smoke"}}], warnings=[{"code": "y"}])
    assert machine(plan=other, check_mode=True)["revision"] == first["revision"]


@pytest.mark.parametrize("version", ["0.5.23", "0.5.24"])
def test_a_replaced_library_restarts_once(machine: Machine, version: str) -> None:
    first = machine(plan=plan())
    machine.library("sglang", version, "cccc")
    changed = machine(plan=plan())
    assert changed["needs"]["restart"] and changed["pid"] != first["pid"]
    assert [item["name"] for item in changed["differences"]] == ["sglang"]
    assert not machine(plan=plan())["changed"]


def test_several_changes_are_one_restart(machine: Machine) -> None:
    machine(plan=plan())
    machine.library("torch", "2.15.0", "dddd")
    machine.systemd.calls.clear()
    machine(plan=plan("--x", "1", env={"A": "2"}))
    assert [call for call in machine.systemd.calls if call.startswith(("start", "restart"))] == [f"restart {UNIT}"]


def test_accept_and_roll_back(machine: Machine) -> None:
    first = machine(plan=plan())
    assert machine("accepted")["last_good"] == first["revision"]
    second = machine(plan=plan("--new"))
    assert second["last_good"] == first["revision"]
    back = machine("rolled_back")
    assert back["changed"] and back["current"] == first["revision"] and back["rolled_back_from"] == second["revision"]
    assert machine.request().process_argv(back["pid"]) == plan()["argv"]
    assert not machine("rolled_back")["changed"]
    forward = machine("rolled_back", revision=second["revision"])
    assert forward["current"] == second["revision"]
    with pytest.raises(ServiceError, match="not stored or damaged; stored: "):
        machine("rolled_back", revision="f" * 16)


def test_a_record_that_cannot_be_written_is_told_in_one_sentence(machine: Machine) -> None:
    machine(plan=plan())
    (machine.root / "var/lib/gpufleet-sglang/instances/default/last_good").mkdir()
    with pytest.raises(ServiceError, match="state accepted of default was not reached: "):
        machine("accepted")


def test_accepting_what_does_not_run_is_refused(machine: Machine) -> None:
    with pytest.raises(ServiceError, match="nothing to accept"):
        machine("accepted")
    first = machine(plan=plan())
    machine.systemd._stop(UNIT)
    with pytest.raises(ServiceError, match="not accepted"):
        machine("accepted")
    machine.systemd._start(UNIT)
    with pytest.raises(ServiceError, match="was to be accepted"):
        machine("accepted", revision="f" * 16)
    assert machine("accepted", revision=first["revision"])["changed"]


def journal(machine: Machine, name: str, **entry: Any) -> Path:
    """A journal entry of packages, as backend_packages leaves it."""
    folder = machine.root / "var/lib/gpufleet-sglang/journal" / name
    folder.mkdir(parents=True)
    made = {"id": name, "venv": VENV, "sequence": len(list(folder.parent.iterdir())), "state": "done", **entry}
    (folder / "entry.json").write_text(json.dumps(made))
    return folder


def swap_library(machine: Machine, entry: str, version: str) -> None:
    """Another torch, with the journal that leads back."""
    before = library_versions(str(machine.root / "opt/venv"))
    machine.library("torch", version, version)
    after = library_versions(str(machine.root / "opt/venv"))
    journal(machine, entry, names=["torch"], before={"torch": before["torch"]}, after={"torch": after["torch"]})


def test_rollback_names_the_journals_that_lead_back(machine: Machine) -> None:
    first = machine(plan=plan())
    machine("accepted")
    swap_library(machine, "j1", "2.15.0")
    swap_library(machine, "j2", "2.16.0")
    machine(plan=plan())
    back = machine("rolled_back", check_mode=True)
    assert [item["name"] for item in back["libraries_differ"]] == ["torch"]
    assert back["packages"] == {"venv": VENV, "journals": ["j2", "j1"], "reason": "", "others": []}
    assert "journal_ids j2, j1" in back["problems"][-1]["message"]
    machine.library("torch", "2.14.1", "aaaa")
    for entry in ("j1", "j2"):
        path = machine.root / "var/lib/gpufleet-sglang/journal" / entry / "entry.json"
        path.write_text(path.read_text().replace('"done"', '"restored"'))
    back = machine("rolled_back")
    assert back["current"] == first["revision"] and back["libraries_differ"] == [] and not back["packages"]["journals"]


def test_packages_that_somebody_else_changed_have_no_way_back(machine: Machine) -> None:
    machine(plan=plan())
    machine("accepted")
    swap_library(machine, "j1", "2.15.0")
    machine(plan=plan())
    machine.library("torch", "2.17.0", "by hand")
    back = machine("rolled_back", check_mode=True)
    assert back["packages"]["journals"] == [] and "torch is not as journal j1 left it" in back["packages"]["reason"]
    journal(machine, "j2", names=["nixl"], before={}, after={})
    machine.library("torch", "2.15.0", "2.15.0")
    machine.library("sglang", "0.6.0", "by hand")
    assert "no journal leads" in machine("rolled_back", check_mode=True)["packages"]["reason"]


def test_a_journal_that_cannot_be_read_keeps_nobody_from_going_back(machine: Machine) -> None:
    good = machine(plan=plan())["revision"]
    machine("accepted")
    swap_library(machine, "j1", "2.15.0")
    machine(plan=plan("--new"))
    (machine.root / "var/lib/gpufleet-sglang/journal/j1/entry.json").write_text("garbage")
    back = machine("rolled_back")
    assert back["current"] == good and back["packages"]["journals"] == [] and back["packages"]["reason"]
    assert "journal_unreadable" in [item["code"] for item in back["problems"]]


def test_another_instance_on_the_venv_is_named(machine: Machine) -> None:
    machine(plan=plan())
    machine("accepted")
    host = machine.request().host
    other = Request(instance="other", state="started", plan=plan(instance="other"), accept_problems=["port_taken"])
    ServiceUnit(host, other).apply()
    swap_library(machine, "j1", "2.15.0")
    machine(plan=plan())
    assert machine("rolled_back", check_mode=True)["packages"]["others"] == ["other"]
    ServiceUnit(host, Request(instance="other", state="absent")).apply()
    assert machine("rolled_back", check_mode=True)["packages"]["others"] == []


def test_journals_are_kept_as_long_as_a_revision_needs_them(machine: Machine) -> None:
    folder = machine.root / "var/lib/gpufleet-sglang/journal"
    machine(plan=plan())
    machine("accepted")
    swap_library(machine, "j1", "2.15.0")
    for number in range(5):
        revision = machine(plan=plan("--step", str(number)))["revision"]
        machine("accepted")
        stored = machine.request().store.read(revision)
        assert stored is not None and stored.meta["journals"] == ["j1"]
        assert (folder / "j1").exists() == (number < 4), "the fifth pushes out the revision from before the change"
    swap_library(machine, "j2", "2.16.0")
    machine("accepted")
    assert (folder / "j2").exists(), "no revision runs with it yet"


def test_the_same_libraries_by_another_journal_are_the_same_revision(machine: Machine) -> None:
    swap_library(machine, "j1", "2.15.0")
    first = machine(plan=plan())
    shutil.rmtree(machine.root / "var/lib/gpufleet-sglang/journal/j1")
    machine.library("torch", "2.14.1", "aaaa")
    machine(plan=plan())
    swap_library(machine, "j3", "2.15.0")
    again = machine(plan=plan())
    stored = machine.request().store.read(again["revision"])
    assert again["revision"] == first["revision"] and stored is not None and stored.meta["journals"] == ["j3"]


def test_a_run_goes_back_only_from_what_it_deployed(machine: Machine) -> None:
    good = machine(plan=plan())["revision"]
    machine("accepted")
    machine("claimed", run="a", revision=good)
    mine = machine(plan=plan("--a"), run="a")["revision"]
    machine("claimed", run="b", revision=mine)
    theirs = machine(plan=plan("--b"), run="b")
    back = machine("rolled_back", run="a")
    assert "another run" in back["overtaken"] and theirs["revision"] in back["overtaken"]
    assert not back["changed"] and back["pid"] == theirs["pid"] and back["current"] == theirs["revision"]
    with pytest.raises(ServiceError, match="was to be accepted") as refused:
        machine("accepted", run="a", revision=mine)
    assert refused.value.details["cause"]["code"] == "overtaken"
    assert machine("rolled_back", run="b")["current"] == good
    assert machine("rolled_back", run="b")["current"] == good, "and again, when it was interrupted"


@pytest.mark.parametrize("state", ["started", "stopped"])
def test_a_run_that_was_overtaken_touches_nothing(machine: Machine, state: str) -> None:
    good = machine(plan=plan())
    machine("accepted")
    machine("claimed", run="a", revision=good["revision"])
    machine("claimed", run="b", revision=good["revision"])
    with pytest.raises(ServiceError, match=r"another run by .* works on instance default") as refused:
        machine(state, run="a", plan=plan("--a"))
    assert refused.value.details["cause"] == {"code": "overtaken", "revision": good["revision"]}
    assert refused.value.details["claim"]["run"] == "b"
    assert machine("observed")["pid"] == good["pid"]
    assert machine("rolled_back", run="a")["overtaken"], "it had deployed nothing, so there is nothing to go back from"
    machine("stopped", run="b")
    assert machine(plan=plan("--b"), run="b")["active_state"] == "active"


def test_a_claim_on_what_was_changed_meanwhile_is_refused(machine: Machine) -> None:
    seen = machine(plan=plan())["revision"]
    machine(plan=plan("--b"), run=None)
    with pytest.raises(ServiceError, match="another run"):
        machine("claimed", run="a", revision=seen)
    assert not machine("observed")["claim"]["open"]


def test_a_run_that_deployed_goes_back_although_another_one_has_claimed_the_host(machine: Machine) -> None:
    """The other one then finds that it was overtaken, and nothing stays on a revision that nobody proved."""
    good = machine(plan=plan())["revision"]
    machine("accepted")
    machine("claimed", run="a", revision=good)
    bad = machine(plan=plan("--a"), run="a")["revision"]
    machine("claimed", run="b", revision=bad)
    assert machine("rolled_back", run="a")["current"] == good
    with pytest.raises(ServiceError, match="another run"):
        machine(plan=plan("--b"), run="b")


def test_going_back_after_an_accept_takes_last_good_along(machine: Machine) -> None:
    good = machine(plan=plan())["revision"]
    machine("accepted")
    machine("claimed", run="a", revision=good)
    new = machine(plan=plan("--a"), run="a")["revision"]
    assert machine("accepted", run="a", revision=new)["last_good"] == new
    back = machine("rolled_back", run="a")
    assert (back["current"], back["last_good"]) == (good, good)
    machine("claimed", run="c", revision=good)
    assert machine("rolled_back", run="c")["current"] == good


def test_going_back_after_the_accept_of_a_first_deploy_stops(machine: Machine) -> None:
    machine("claimed", run="a")
    new = machine(plan=plan(), run="a")["revision"]
    machine("accepted", run="a", revision=new)
    back = machine("rolled_back", run="a")
    assert (back["active_state"], back["enabled"], back["last_good"]) == ("inactive", False, None)


def test_the_revision_from_before_the_claim_outlives_the_accept(machine: Machine) -> None:
    good = machine(plan=plan())["revision"]
    machine("accepted")
    for number in range(6):
        machine(plan=plan("--never-good", str(number)))
    machine("claimed", run="a")
    machine(plan=plan("--a"), run="a")
    machine("accepted", run="a")
    assert machine("rolled_back", run="a")["current"] == good


def test_a_rank_learns_that_another_one_of_its_deployment_was_accepted(machine: Machine) -> None:
    machine(plan=plan())
    machine("accepted")
    machine("claimed", run="a")
    new = machine(plan=plan("--a"), run="a")["revision"]
    machine("claimed", run="b", revision=new, proven=True)
    seen = machine("observed")
    assert seen["last_good"] == new and seen["claim"]["good"] == "a"
    machine(plan=plan("--b"), run="b")
    assert machine("rolled_back", run="b")["current"] == new


def test_accept_closes_a_claim_only_of_the_run_that_deployed(machine: Machine) -> None:
    good = machine(plan=plan())["revision"]
    machine("claimed", run="b", revision=good)
    assert machine("accepted", run="a", revision=good)["claim"]["open"], "b has yet to change it"
    new = machine(plan=plan("--b"), run="b")["revision"]
    assert not machine("accepted", run="a", revision=new)["claim"]["open"]


def test_a_lock_that_another_run_holds_is_told_as_such(machine: Machine) -> None:
    machine(plan=plan())
    lock = _unit_store.Lock(str(machine.root / "run/gpufleet-sglang/default.lock"))
    with lock, pytest.raises(ServiceError, match="another run works on this instance") as refused:
        machine("rolled_back", run="a")
    assert refused.value.details["cause"]["code"] == "overtaken"


def test_first_deploy_that_fails(machine: Machine) -> None:
    machine(plan=plan())
    back = machine("rolled_back")
    assert (back["active_state"], back["enabled"], back["restored"]) == ("inactive", False, None)
    assert machine(plan=plan())["active_state"] == "active"


def old_unit(machine: Machine, name: str = "old.service") -> None:
    folder = machine.root / UNITS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(
        f"[Service]\nExecStart={VENV}/bin/python -m sglang.launch_server --tp 4 --api-key {KEY.replace('%', '%%')}\n"
    )
    machine.systemd(["systemctl", "enable", name], 1)
    machine.systemd(["systemctl", "start", name], 1)


@pytest.mark.parametrize("name", ["old.service", UNIT])
def test_takeover_and_back(machine: Machine, name: str) -> None:
    old_unit(machine, name)
    result = machine(plan=plan("--tp", "8"), takeover=name)
    assert {"flag": "--tp", "old": "4", "new": "8"} in result["taken_over"]["differences"]
    assert KEY not in json.dumps(result)
    assert list(machine.systemd.running) == [UNIT]
    assert not machine(plan=plan("--tp", "8"), takeover=name)["changed"]
    assert machine("rolled_back")["restored"] == name
    assert list(machine.systemd.running) == [name]
    assert "--tp 4" in machine.text(f"{UNITS}/{name}")
    assert machine.systemd._link(name).is_symlink()


def test_a_unit_made_by_others_is_not_overwritten(machine: Machine) -> None:
    old_unit(machine, UNIT)
    with pytest.raises(ServiceError, match="was not made by this module"):
        machine(plan=plan())
    machine("absent")
    assert "--tp 4" in machine.text(f"{UNITS}/{UNIT}") and UNIT in machine.systemd.running


def test_takeover_of_a_unit_that_is_not_there(machine: Machine) -> None:
    with pytest.raises(ServiceError, match=r"nope\.service is not a unit of this host"):
        machine(plan=plan(), takeover="nope.service")


@pytest.mark.parametrize("credentials", [True, False])
def test_secrets_are_in_no_other_file_and_no_result(tmp_path: Path, credentials: bool) -> None:
    machine = Machine(tmp_path, credentials=credentials)
    secrets = {"api_key": KEY, "hf_token": "hf_ABCDEF", "WANDB_API_KEY": "w4ndb"}
    result = machine(plan=plan(secret_flags=["api_key"]), secrets=secrets)
    shown = json.dumps(result) + machine.everything().replace(
        "w4ndb", "", machine.text(f"proc/{result['pid']}/environ").count("w4ndb")
    )
    assert not [value for value in secrets.values() if value in shown]
    assert result["argv"][-2] == "--config" and result["argv"][-1].endswith("/config.yaml")
    unit = parse_unit(machine.text(f"{UNITS}/{UNIT}"))
    assert len(settings(unit, "Service", "LoadCredential")) == (2 if credentials else 0)
    folder = machine.root / "etc/gpufleet-sglang/default"
    assert (folder / "secrets").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "secrets").iterdir())
    assert (folder / "service").exists() is not credentials
    codes = {item["code"] for item in result["problems"]}
    assert ("credentials_not_passed" in codes) is not credentials and "log_in_namespace" in codes
    assert not machine(plan=plan(secret_flags=["api_key"]), secrets=secrets)["changed"]


def test_a_changed_key_restarts_without_a_new_revision(machine: Machine) -> None:
    first = machine(plan=plan(), secrets={"api_key": "one"})
    second = machine(plan=plan(), secrets={"api_key": "two"})
    assert second["revision"] == first["revision"] and second["needs"]["restart"] and second["pid"] != first["pid"]
    assert not machine(plan=plan(), secrets={"api_key": "two"})["changed"]


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ({}, "no value for api_key"),
        ({"api_key": ""}, "api_key is empty"),
        ({"api_key": "a\nb"}, "several lines"),
        ({"api_key": "-x"}, "begins with '-'"),
        ({"api_key": 5}, "must be a string"),
    ],
)
def test_bad_secrets_are_told_by_name(machine: Machine, secrets: dict[str, Any], said: str) -> None:
    with pytest.raises(ServiceError, match=said):
        machine(plan=plan(secret_flags=["api_key"]), secrets=secrets)


def test_absent_keeps_caches_unless_purged(machine: Machine) -> None:
    machine(plan=plan(), secrets={"api_key": KEY})
    (machine.root / "var/cache/sglang/default").mkdir(parents=True)
    (machine.root / "var/cache/sglang/other").mkdir(parents=True)
    assert machine("absent", check_mode=True)["changed"]
    gone = machine("absent")
    assert gone["changed"] and gone["active_state"] == "inactive"
    assert not (machine.root / UNITS / UNIT).exists() and KEY not in machine.everything()
    assert not (machine.root / "etc/gpufleet-sglang/default").exists()
    assert not machine("absent")["changed"]
    assert machine("absent", purge=True)["changed"]
    assert os.listdir(machine.root / "var/cache/sglang") == ["other"]


def test_stopped(machine: Machine) -> None:
    machine(plan=plan())
    assert machine("stopped", check_mode=True)["changed"]
    stopped = machine("stopped")
    assert stopped["changed"] and stopped["active_state"] == "inactive" and stopped["enabled"]
    assert not machine("stopped")["changed"]
    assert machine(plan=plan())["needs"] == {"write": False, "start": True, "restart": False}


def test_limits_that_the_kernel_did_not_grant(machine: Machine) -> None:
    result = machine(plan=plan())
    assert [item["code"] for item in result["limits_not_granted"]] == ["memlock_effective_below_unit"]


def test_what_systemd_does_not_take_is_not_swapped_in(machine: Machine) -> None:
    first = machine(plan=plan())
    machine.systemd.verify = RunResult(
        0, "", f"/run/x/{UNIT}:12: Failed to parse resource value, ignoring: unlimited\n"
    )
    with pytest.raises(ServiceError, match="does not take the unit"):
        machine(plan=plan("--new"))
    assert unit_revision(machine.text(f"{UNITS}/{UNIT}")) == first["revision"]
    assert machine("observed")["pid"] == first["pid"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rejections": [{"code": "x", "message": "tp 3 does not divide"}]}, "tp 3 does not divide"),
        ({"service": False}, "no service"),
        ({"argv": []}, "plan.argv"),
        ({"argv": ["python3"]}, "absolute path"),
        ({"env": {"A": 1}}, "plan.env"),
        ({"env": {"GPUFLEET_SGLANG_REVISION": "x"}}, "reserved"),
        ({"env": {"CUDA_HOME": ":/usr/local/cuda"}}, "cuda_home_is_a_path_list"),
        ({"instance": "other"}, "not of 'default'"),
    ],
)
def test_plans_that_are_not_applied(machine: Machine, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ServiceError, match=said):
        machine(plan=plan(**change))
    assert not (machine.root / UNITS / UNIT).exists()


def test_all_problems_are_told_at_once_and_can_be_accepted(machine: Machine) -> None:
    bad = plan(env={"CUDA_HOME": ":/usr/local/cuda"})
    bad["unit"]["model_path"] = "/models/none"
    with pytest.raises(ServiceError, match=r"cuda_home_is_a_path_list.*model_path_absent"):
        machine(plan=bad)
    checked = machine(plan=bad, check_mode=True)
    assert {"cuda_home_is_a_path_list", "model_path_absent"} <= {item["code"] for item in checked["problems"]}
    assert machine(plan=bad, accept_problems=["cuda_home_is_a_path_list", "model_path_absent"])["changed"]


def test_diff_hides_what_sounds_secret() -> None:
    assert (
        mask_environment('A="1"\nHF_TOKEN="x"\nMY_API_KEY="y"\n') == 'A="1"\nHF_TOKEN=********\nMY_API_KEY=********\n'
    )


def test_library_versions(machine: Machine) -> None:
    machine.library("unrelated", "1", "x")
    found = library_versions(str(machine.root / "opt/venv"))
    assert sorted(found) == ["sglang", "torch"] and found["torch"].startswith("2.14.1 ")
    assert library_versions(str(machine.root / "none")) == {}


CUT = 77
POINTS = ("rename", "fsync", "mkdir", "unlink", "fchmod", "symlink", "open")


def cut_power_at(machine: Machine, step: int, **options: Any) -> bool:
    """Run a deploy in a child that dies at its ``step``-th change of the file system; True when it got through."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            left = [step]

            def dying(name: str) -> Any:
                real = getattr(os, name)

                def call(*args: Any, **kwargs: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(CUT)
                    return real(*args, **kwargs)

                return call

            for name in POINTS:
                setattr(_unit_store.os, name, dying(name))
            machine(**options)
            status = 0
        finally:
            os._exit(status)
    _pid, raw = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(raw)
    assert status in (0, CUT)
    return status == 0


def assert_bootable(machine: Machine, allowed: Sequence[list[str]]) -> None:
    path = machine.root / UNITS / UNIT
    link = machine.systemd._link(UNIT)
    if not path.exists():
        assert not link.is_symlink() and [] in allowed
        return
    text = path.read_text()
    assert unit_argv(text) in allowed
    machine.systemd._start(UNIT)
    env = machine.request().process_environment(machine.systemd.running[UNIT])
    wanted = "2" if "--new" in unit_argv(text) else "1"
    assert env["A"] == wanted, "the unit of one revision with the environment of another"


@pytest.mark.parametrize("deployed", [False, True])
def test_power_cut_at_any_step(tmp_path: Path, deployed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # They change nothing, and their child processes are most of what a run costs here.
    monkeypatch.setattr(_host_preflight, "check_access", lambda *_given: [])
    monkeypatch.setattr(_host_preflight, "check_interpreter", lambda *_given: [])
    pristine = tmp_path / "pristine"
    pristine.mkdir()
    if deployed:
        machine = Machine(pristine)
        machine(plan=plan(), secrets={"api_key": "one"})
        machine("accepted")
        machine.reboot()
    new: dict[str, Any] = {"plan": plan("--new", env={"A": "2"}), "secrets": {"api_key": "two"}}
    old_argv = [plan()["argv"] + ["--config", f"/run/credentials/{UNIT}/config.yaml"]] if deployed else [[]]
    new_argv = plan("--new")["argv"] + ["--config", f"/run/credentials/{UNIT}/config.yaml"]
    step, through = 0, False
    while not through:
        step += 1
        root = tmp_path / f"cut{step}"
        shutil.copytree(pristine, root, symlinks=True)
        machine = Machine(root)
        through = cut_power_at(machine, step, **new)
        machine.reboot()
        assert_bootable(machine, [*old_argv, new_argv])
        machine.reboot()
        after = machine(**new)
        assert after["current"] == after["running_revision"] and after["enabled"], step
        assert not machine(**new)["changed"], step
        assert not [item for item in machine("observed")["problems"] if item["severity"] == "error"], step
        if deployed:
            assert machine("rolled_back")["current"] == after["last_good"], step
        shutil.rmtree(root)
    assert step > 30
