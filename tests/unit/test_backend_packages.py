# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remedies on real venvs with a real pip, and wheels small enough to try every moment for a kill."""

from __future__ import annotations

import json
import os
import pathlib
import pwd
import signal
import stat
import subprocess
import sys

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _backend_packages as bp
from ansible_collections.gpufleet.sglang.plugins.module_utils import _journal, _lockfile
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult
from small_wheels import make_wheel

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the venv's owner")


def engine(variant):
    return {
        "moon/__init__.py": "",
        "moon/engine.py": f"VARIANT = {variant!r}\n",
        f"moon/{variant}.so": f"\x7fELF {variant}",
        "moon/lib/shared.so": f"lib {variant}",
    }


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "house"
    make_wheel(folder, "moon-cu12", "1.0", engine("cu12"))
    make_wheel(folder, "moon-cu13", "1.0", engine("cu13"))
    make_wheel(folder, "moon-cu13", "1.1", engine("cu13-newer"))
    make_wheel(folder, "torch", "2.14.1", {"torch/__init__.py": "1"})
    make_wheel(folder, "torch", "2.15.0", {"torch/__init__.py": "2"})
    make_wheel(folder, "helper", "1", {"helper.py": ""})
    make_wheel(folder, "greedy", "1", {"greedy.py": ""}, requires=["torch==2.15.0", "helper"])
    return folder


@pytest.fixture(autouse=True)
def no_site_policy(monkeypatch):
    """The machine's own constraints and indexes are not what is tested."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture(scope="session")
def pip_copy(tmp_path_factory):
    """A pip with its bytecode, to be linked into venvs: making one for each takes seconds."""
    template = tmp_path_factory.mktemp("template") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(template)], check=True)
    for folder in (template, *list(template.parents)[:3]):
        folder.chmod(0o755)
    return site(template)


@pytest.fixture
def venv(tmp_path, pip_copy):
    path = make_venv(tmp_path / "venv")
    for found in pip_copy.glob("pip*"):
        (site(path) / found.name).symlink_to(found)
    return path


def make_venv(path, python=sys.executable):
    subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
    return path


def site(venv):
    return next((venv / "lib").glob("python3*/site-packages"))


def step(action, *packages, **args):
    return {"action": action, "packages": list(packages), "args": args}


def remedies(*steps):
    return [{"backend": "moon", "kind": "replace", "steps": list(steps)}]


INSTALL_12 = remedies(step("pip_install", "moon-cu12==1.0", flags=["--no-deps"]))
INSTALL_13 = remedies(step("pip_install", "moon-cu13==1.0", flags=["--no-deps"]))
SWAP = remedies(
    step("pip_uninstall", "moon-cu12", "moon-cu13"),
    step("pip_install", "moon-cu13==1.0", flags=["--no-deps", "--force-reinstall"]),
)


def options(tmp_path, venv, **kwargs):
    given = {"wheelhouse": str(tmp_path / "house"), "state_dir": str(tmp_path / "state" / "journal"), **kwargs}
    return bp.Options(venv=str(venv), **given)


def apply(tmp_path, venv, wanted, **kwargs):
    return bp.work(options(tmp_path, venv, remedies=wanted, **kwargs))


def restore(tmp_path, venv, **kwargs):
    return bp.work(options(tmp_path, venv, restore=True, **kwargs))


def picture(root, without=("__pycache__", ".gpufleet-sglang")):
    """Contents, modes and owners of a tree; times too, where a restore must bring them back."""
    result = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if any(part in without for part in path.parts):
            continue
        if stat.S_ISREG(status.st_mode):
            result[str(path.relative_to(root))] = (stat.S_IMODE(status.st_mode), status.st_uid, path.read_bytes())
        elif stat.S_ISDIR(status.st_mode):
            result[str(path.relative_to(root))] = "folder"
    return result


def nothing_left(tmp_path, venv):
    journal = tmp_path / "state" / "journal"
    left = [str(path) for path in journal.rglob("*") if path.name in ("work",) or path.suffix in (".gone", ".new")]
    left += [name for name in os.listdir(site(venv)) if name.startswith(("~", ".gpufleet"))]
    assert left == []
    assert _lockfile.holder_of(str(venv / ".gpufleet-sglang" / "lock")) is None


def test_install_again_and_back(tmp_path, house, venv):
    empty = picture(venv)
    first = apply(tmp_path, venv, INSTALL_12)
    assert first["changed"] and first["restart_needed"]
    assert [(item["action"], item["state"]) for item in first["steps"]] == [("pip_install", "done")]
    assert first["diff"] == {"before": "", "after": "moon-cu12==1.0\n"}
    assert not list(site(venv).glob("*/direct_url.json"))
    second = apply(tmp_path, venv, INSTALL_12)
    assert not second["changed"] and not second["restart_needed"] and second["journal_id"] is None
    assert second["steps"][0]["state"] == "skipped"
    back = restore(tmp_path, venv, journal_id=first["journal_id"])
    assert back["changed"] and back["diff"] == {"before": "moon-cu12==1.0\n", "after": ""}
    assert picture(venv) == empty
    assert not restore(tmp_path, venv)["changed"]
    nothing_left(tmp_path, venv)


def test_check_mode_tells_and_writes_nothing(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    before = picture(tmp_path, without=())
    result = apply(tmp_path, venv, SWAP, check_mode=True)
    assert result["changed"]
    assert [(item["action"], item["state"]) for item in result["steps"]] == [
        ("pip_uninstall", "pending"),
        ("pip_install", "pending"),
    ]
    assert result["diff"] == {"before": "moon-cu12==1.0\n", "after": "moon-cu13==1.0\n"}
    assert restore(tmp_path, venv, check_mode=True)["changed"]
    assert picture(tmp_path, without=()) == before


def test_both_variants_are_swapped_for_one_and_come_back_as_broken_as_they_were(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    pip = ["-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, *pip, str(house / "moon_cu13-1.0-py3-none-any.whl")], check=True)
    clobbered = picture(venv)
    swapped = apply(tmp_path, venv, SWAP)
    assert swapped["steps"][0]["packages"] == ["moon-cu12", "moon-cu13"]
    assert (site(venv) / "moon" / "engine.py").read_text() == "VARIANT = 'cu13'\n"
    assert not (site(venv) / "moon" / "cu12.so").exists()
    assert not apply(tmp_path, venv, SWAP)["changed"]
    restore(tmp_path, venv, journal_id=swapped["journal_id"])
    assert picture(venv) == clobbered


@pytest.mark.parametrize("damage", ["gutted", "clobbered"])
def test_damaged_files_are_repaired(tmp_path, house, venv, damage):
    apply(tmp_path, venv, INSTALL_13)
    whole = picture(venv)
    target = site(venv) / "moon" / "lib" / "shared.so"
    if damage == "gutted":
        target.unlink()
    else:
        target.write_text("of another variant")
    assert apply(tmp_path, venv, INSTALL_13)["changed"]
    assert picture(venv) == whole
    assert not apply(tmp_path, venv, INSTALL_13)["changed"]


def test_an_overwritten_file_of_another_distribution_is_refused(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    before = picture(venv)
    with pytest.raises(bp.Failure, match="overwrite 2 files of moon-cu12") as failure:
        apply(tmp_path, venv, INSTALL_13)
    assert failure.value.fields["code"] == "file_owned_by_two_distributions"
    assert picture(venv) == before
    nothing_left(tmp_path, venv)


def test_a_resolver_that_would_change_torch_is_stopped_before_anything_happens(tmp_path, house, venv):
    apply(tmp_path, venv, remedies(step("pip_install", "torch==2.14.1")))
    before = picture(venv)
    greedy = remedies(step("pip_install", "greedy==1", flags=["--prefer-binary"]))
    with pytest.raises(bp.Failure, match=r"torch 2\.14\.1 → 2\.15\.0") as failure:
        apply(tmp_path, venv, greedy)
    assert {item["name"] for item in failure.value.fields["unwanted"]} == {"torch"}
    assert picture(venv) == before
    assert apply(tmp_path, venv, greedy, allow_changes=["Torch"])["changed"]
    assert (site(venv) / "torch" / "__init__.py").read_text() == "2"
    assert not apply(tmp_path, venv, greedy, allow_changes=["torch"])["changed"]


@pytest.mark.parametrize("wanted", [step("pip_install", "torch==2.15.0"), step("pip_uninstall", "torch")])
def test_torch_is_not_changed_even_when_named(tmp_path, house, venv, wanted):
    apply(tmp_path, venv, remedies(step("pip_install", "torch==2.14.1")))
    for check_mode in (True, False):
        with pytest.raises(bp.Failure) as failure:
            apply(tmp_path, venv, remedies(wanted), check_mode=check_mode)
        assert failure.value.fields["code"] == "would_change_others"


def test_a_step_that_fails_after_the_change_leaves_all_as_it_was(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    before = picture(venv)
    make_wheel(house, "moon-cu13", "1.2", engine("bad"), wrong_hash=["moon/engine.py"])
    bad = remedies(step("pip_uninstall", "moon-cu12"), step("pip_install", "moon-cu13==1.2"))
    with pytest.raises(bp.Failure, match=r"not as its RECORD says.*as it was before") as failure:
        apply(tmp_path, venv, bad)
    assert failure.value.fields["restored"] is True and failure.value.fields["code"] == "not_proven"
    assert picture(venv) == before
    nothing_left(tmp_path, venv)


def test_a_missing_wheel_names_step_line_and_mend(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    before = picture(venv)
    missing = remedies(step("pip_uninstall", "moon-cu12"), step("pip_install", "moon-cu13==9"))
    said = r"fetching moon-cu13==9 failed.*Could not find a version.*wheelhouse"
    with pytest.raises(bp.Failure, match=said) as failure:
        apply(tmp_path, venv, missing, pip_args=["--extra-index-url", "https://bob:s3cret@127.0.0.1:9/simple"])
    assert "s3cret" not in json.dumps(failure.value.fields) + str(failure.value)
    assert picture(venv) == before
    nothing_left(tmp_path, venv)


def test_a_closed_network_is_told(tmp_path, house, venv):
    args = ["--index-url", "http://127.0.0.1:9/simple", "--retries", "1", "--timeout", "1"]
    with pytest.raises(bp.Failure, match="sglang_wheelhouse"):
        apply(tmp_path, venv, INSTALL_12, wheelhouse=None, pip_args=args)


def test_a_rebuilt_wheel_of_the_same_version_is_installed_once(tmp_path, house, venv):
    def wanted(path):
        return remedies(step("pip_install", str(path)))

    first = make_wheel(tmp_path / "one", "deep_ep", "1.2.1+9af0e0d", {"deep_ep.py": "1"})
    other = make_wheel(tmp_path / "two", "deep_ep", "1.2.1+9af0e0d", {"deep_ep.py": "2"})
    other.chmod(0o600)
    assert [apply(tmp_path, venv, wanted(path))["changed"] for path in (first, first, other, other)] == [
        True,
        False,
        True,
        False,
    ]
    assert (site(venv) / "deep_ep.py").read_text() == "2"


def test_a_venv_without_pip_is_served_by_the_bundled_one(tmp_path, house):
    bare = make_venv(tmp_path / "bare")
    before = picture(bare)
    assert apply(tmp_path, bare, SWAP)["changed"]
    restore(tmp_path, bare)
    assert picture(bare) == before


def test_an_egg_is_for_people(tmp_path, house, venv):
    (site(venv) / "moon_cu12-0.9.egg-info").write_text("Metadata-Version: 1.0\nName: moon-cu12\nVersion: 0.9\n")
    with pytest.raises(bp.Failure, match="remove it by hand"):
        apply(tmp_path, venv, SWAP)


def test_going_back_over_two_changes(tmp_path, house, venv):
    empty = picture(venv)
    first = apply(tmp_path, venv, INSTALL_13, journal_id="run-7")
    apply(tmp_path, venv, remedies(step("pip_install", "moon-cu13==1.1")), journal_id="run-7")
    assert restore(tmp_path, venv, journal_id=first["journal_id"])["changed"]
    assert picture(venv) == empty
    with pytest.raises(bp.Failure, match=r"no journal nope .*run-7, run-7-2"):
        restore(tmp_path, venv, journal_id="nope")


def test_old_entries_are_forgotten(tmp_path, house, venv):
    for number in range(3):
        wanted = f"moon-cu13=={'1.0' if number % 2 else '1.1'}"
        apply(tmp_path, venv, remedies(step("pip_install", wanted)), keep_journals=2, journal_id=f"n{number}")
    assert sorted(os.listdir(tmp_path / "state" / "journal")) == ["n1", "n2"]


def test_a_record_that_points_outside_reaches_nothing(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    precious = tmp_path / "precious"
    precious.write_text("keep")
    record = site(venv) / "moon_cu12-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + f"{os.path.relpath(precious, site(venv))},,\n/etc/hostname,,\n")
    swapped = apply(tmp_path, venv, SWAP)
    manifest = (tmp_path / "state" / "journal" / swapped["journal_id"] / "manifest.json").read_text()
    assert "precious" not in manifest and "hostname" not in manifest
    restore(tmp_path, venv)
    assert precious.read_text() == "keep"


def test_files_in_use_are_not_replaced(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    loaded = str(site(venv) / "moon" / "cu12.so")
    script = (
        "import mmap, sys\nf = open(sys.argv[1], 'rb')\nm = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "print(1, flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, loaded], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as service:
        service.stdout.readline()
        with pytest.raises(bp.Failure, match=f"in use by pid {service.pid}") as failure:
            apply(tmp_path, venv, SWAP)
        assert failure.value.fields["code"] == "venv_in_use"
        assert apply(tmp_path, venv, SWAP, check_mode=True)["problems"][0]["code"] == "venv_in_use"
        assert apply(tmp_path, venv, SWAP, refuse_in_use=False)["changed"]
        service.communicate(b"\n")


def test_one_run_at_a_time(tmp_path, house, venv):
    folder = venv / ".gpufleet-sglang"
    folder.mkdir()
    with (
        _lockfile.acquire(str(folder / "lock"), "another run"),
        pytest.raises(bp.Failure, match=rf"another run works on the venv .*pid {os.getpid()}"),
    ):
        apply(tmp_path, venv, INSTALL_12, lock_wait=0)
    assert apply(tmp_path, venv, INSTALL_12)["changed"]


def dead_interpreter(path):
    make_venv(path)
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").symlink_to("/no/such/python")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: None, "venv_absent"),
        (lambda path: path.mkdir(), "not_a_venv"),
        (dead_interpreter, "not_a_venv"),
    ],
)
def test_what_is_no_venv(tmp_path, house, make, code):
    make(tmp_path / "venv")
    with pytest.raises(bp.Failure) as failure:
        apply(tmp_path, tmp_path / "venv", INSTALL_12)
    assert failure.value.fields["code"] == code


def test_the_interpreter_stands_for_its_venv(tmp_path, house, venv):
    assert apply(tmp_path, venv / "bin" / "python", INSTALL_12)["changed"]
    assert not apply(tmp_path, venv, INSTALL_12)["changed"]


# Owners


def give(path, uid, gid):
    for item in [path, *path.rglob("*")]:
        os.chown(item, uid, gid, follow_symlinks=False)


@pytest.fixture
def open_tmp(tmp_path):
    """pytest's folders are closed to other users."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    return tmp_path


@pytest.fixture
def users_venv(open_tmp, pip_copy):
    """A venv whose interpreter everybody may run (one under a closed home is none)."""
    found = [path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)]
    if not found:
        pytest.skip("there is no system Python")
    path = make_venv(open_tmp / "venv", found[0])
    for item in pip_copy.glob("pip*"):
        (site(path) / item.name).symlink_to(item)
    return path


@needs_root
def test_a_venv_of_another_user_is_worked_on_as_that_user(open_tmp, house, users_venv):
    nobody = pwd.getpwnam("nobody")
    give(users_venv, nobody.pw_uid, nobody.pw_gid)
    assert apply(open_tmp, users_venv, INSTALL_12)["changed"]
    swapped = apply(open_tmp, users_venv, SWAP)
    restore(open_tmp, users_venv, journal_id=swapped["journal_id"])
    assert {path.lstat().st_uid for path in users_venv.rglob("*")} == {nobody.pw_uid}
    nothing_left(open_tmp, users_venv)
    entry = open_tmp / "state" / "journal" / swapped["journal_id"]
    assert (entry.stat().st_uid, (entry / "entry.json").stat().st_uid) == (0, 0)
    assert (os.geteuid(), os.getegid()) == (0, 0)


@needs_root
def test_a_link_of_the_owner_does_not_lead_root_out_of_the_venv(open_tmp, house, users_venv):
    nobody = pwd.getpwnam("nobody")
    apply(open_tmp, users_venv, INSTALL_12)
    secret = open_tmp / "rootonly"
    secret.mkdir(mode=0o700)
    (secret / "shared.so").write_text("secret of root")
    (site(users_venv) / "moon" / "lib" / "shared.so").unlink()
    (site(users_venv) / "moon" / "lib").rmdir()
    (site(users_venv) / "moon" / "lib").symlink_to(secret)
    give(users_venv, nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(bp.Failure):
        apply(open_tmp, users_venv, SWAP)
    assert (secret / "shared.so").read_text() == "secret of root"
    kept = [path for path in (open_tmp / "state").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert kept == []


@needs_root
def test_what_root_left_in_a_users_venv_is_told_before_the_change(open_tmp, house, users_venv):
    nobody = pwd.getpwnam("nobody")
    apply(open_tmp, users_venv, INSTALL_12)
    give(users_venv, nobody.pw_uid, nobody.pw_gid)
    os.chown(site(users_venv) / "moon" / "lib", 0, 0)
    before = picture(users_venv)
    with pytest.raises(bp.Failure, match=r"chown -R nobody") as failure:
        apply(open_tmp, users_venv, SWAP)
    assert failure.value.fields["code"] == "not_writable"
    assert picture(users_venv) == before


CHILD = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
from ansible_collections.gpufleet.sglang.plugins.module_utils import _backend_packages as bp
print(json.dumps(bp.work(bp.Options(**json.loads(sys.argv[1])))))
"""


@needs_root
def test_the_owner_needs_no_root(open_tmp, house, users_venv):
    nobody = pwd.getpwnam("nobody")
    give(users_venv, nobody.pw_uid, nobody.pw_gid)
    given = options(open_tmp, users_venv, remedies=INSTALL_12)._asdict()
    roots = [str(pathlib.Path(__file__).resolve().parents[2] / "collections")]
    done = subprocess.run(
        ["/usr/bin/python3", "-c", CHILD, json.dumps(given), json.dumps(roots)],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        stdout=subprocess.PIPE,
        check=True,
        cwd="/",
    )
    result = json.loads(done.stdout)
    assert result["changed"]
    assert (users_venv / ".gpufleet-sglang" / "journal" / result["journal_id"] / "entry.json").exists()
    assert not (open_tmp / "state").exists()


# System packages


class Host:
    """A host's package manager, as it answers."""

    def __init__(self, installed=(), known=(), install=None):
        self.installed, self.known, self.calls = set(installed), set(known), []
        self.answers = list(install or [RunResult(0, "", "")])

    def __call__(self, argv, timeout):
        self.calls.append(" ".join(argv))
        package = argv[-1]
        if argv[0] == "dpkg-query":
            there = package in self.installed
            return RunResult(0 if there else 1, "installed\n" if there else "", "")
        if argv[0] == "rpm":
            return RunResult(0 if package in self.installed else 1, "", "")
        if argv[0] == "apt-cache":
            return RunResult(0 if package in self.known else 100, "", "")
        if "update" in argv:
            return RunResult(0, "", "")
        return self.answers.pop(0)


def test_apt_lists_are_fetched_only_for_an_unknown_package():
    host = Host(installed=["libnuma1"], known=["libibverbs1"])
    system = bp.SystemPackages(60, host)
    assert system.missing("apt", ["libnuma1", "libibverbs1"]) == ["libibverbs1"]
    system.install("apt", ["libibverbs1"])
    assert host.calls[-1] == (
        "apt-get -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 -y --no-install-recommends --no-remove"
        " install libibverbs1"
    )
    assert not [call for call in host.calls if call.endswith(" update")]
    host = Host()
    bp.SystemPackages(60, host).install("apt", ["libibverbs1"])
    assert [call.split()[-1] for call in host.calls] == ["libibverbs1", "update", "libibverbs1"]


def test_apt_with_stale_lists_fetches_them_and_tries_once_more():
    host = Host(known=["x"], install=[RunResult(100, "", "E: Failed to fetch x  404  Not Found"), RunResult(0, "", "")])
    bp.SystemPackages(60, host).install("apt", ["x"])
    assert [call.split()[-1] for call in host.calls] == ["x", "x", "update", "x"]


def test_apt_failure_names_the_line():
    said = "W: noise\nE: Packages need to be removed but remove is disabled."
    host = Host(known=["x"], install=[RunResult(100, "", said)])
    with pytest.raises(bp.Failure, match="E: Packages need to be removed"):
        bp.SystemPackages(60, host).install("apt", ["x"])


def test_dnf_argv():
    host = Host(installed=["numactl-libs"])
    system = bp.SystemPackages(60, host)
    assert system.missing("dnf", ["numactl-libs", "libibverbs"]) == ["libibverbs"]
    system.install("dnf", ["libibverbs"])
    assert host.calls[-1] == "dnf -y --setopt=install_weak_deps=False install libibverbs"


def test_system_packages_are_only_reported_when_not_managed(tmp_path, house, venv, monkeypatch):
    monkeypatch.setattr(bp.SystemPackages, "manager", staticmethod(lambda wanted: "apt"))
    monkeypatch.setattr(bp.SystemPackages, "missing", lambda self, manager, packages: list(packages))
    monkeypatch.setattr(bp.SystemPackages, "install", lambda *given: pytest.fail("must not install"))
    wanted = remedies(step("os_install", "libibverbs1", manager="apt"), {"action": "manual", "args": {"text": "x"}})
    result = apply(tmp_path, venv, wanted)
    assert not result["changed"]
    assert result["problems"][0]["code"] == "system_packages_not_managed"
    assert result["steps"][0]["state"] == "skipped"
    assert [item["action"] for item in result["not_executed"]] == ["manual"]


def test_a_failing_system_package_leaves_the_venv_alone(tmp_path, house, venv, monkeypatch):
    def fail(*_unused):
        raise bp.Failure("no", code="os_install_failed")

    monkeypatch.setattr(bp.SystemPackages, "manager", staticmethod(lambda wanted: "apt"))
    monkeypatch.setattr(bp.SystemPackages, "missing", lambda self, manager, packages: list(packages))
    monkeypatch.setattr(bp.SystemPackages, "install", fail)
    before = picture(venv)
    wanted = remedies(step("os_install", "libibverbs1"), *INSTALL_12[0]["steps"])
    with pytest.raises(bp.Failure):
        bp.apply(mender_of(tmp_path, venv, wanted))
    assert picture(venv) == before
    nothing_left(tmp_path, venv)


def mender_of(tmp_path, venv, wanted):
    mender = bp.Mender(options(tmp_path, venv, remedies=wanted, manage_system_packages=True))
    mender.privileged = True
    return mender


# Kills

# Counts what changes files, in this process or in pip, and dies at the wanted one.
KILLER = """
import json, os, signal, sys
where, at, scope = sys.argv[1], int(sys.argv[2]), sys.argv[3]
seen = 0
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def hook(event, args):
    global seen
    if event == "open":
        if not isinstance(args[2], int) or not args[2] & WRITES:
            return
    elif event not in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod"):
        return
    if not any(isinstance(arg, (str, bytes)) and os.fsdecode(arg).startswith(scope) for arg in args):
        return
    seen += 1
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)
"""
PIP = (
    KILLER
    + """
sys.argv = sys.argv[4:]
sys.addaudithook(hook)
import runpy
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
)
DRIVER = (
    KILLER
    + """
given = json.loads(sys.argv[4])
sys.path[:0] = json.loads(sys.argv[5])
pip_script = sys.argv[6]
from ansible_collections.gpufleet.sglang.plugins.module_utils import _backend_packages as bp, _drop
real = _drop.run_as
def run_as(identity, argv, *rest, **more):
    command = next((word for word in ("uninstall", "install") if word in argv), None)
    if where != command or "-c" in argv:
        return real(identity, argv, *rest, **more)
    result = real(identity, [argv[0], "-I", "-c", pip_script, where, str(at), scope, *argv[3:]], *rest, **more)
    if result.rc == -9:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
_drop.run_as = run_as
if where == "module":
    sys.addaudithook(hook)
bp.work(bp.Options(**given))
print(seen)
"""
)


def killed(tmp_path, venv, where, at, **more):
    """Run the swap in a child that is killed at a moment; False when it came to its end first."""
    given = options(tmp_path, venv, **{"remedies": SWAP, **more})._asdict()
    command = [
        sys.executable,
        "-c",
        DRIVER,
        where,
        str(at),
        str(tmp_path),
        json.dumps(given),
        json.dumps(sys.path),
        PIP,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def sweep(tmp_path, venv, where, moments):
    """At each moment: kill, then finish; and kill, then go back. Returns how many kills happened."""
    apply(tmp_path, venv, INSTALL_12)
    old = picture(venv)
    apply(tmp_path, venv, SWAP)
    new = picture(venv)
    restore(tmp_path, venv)
    assert picture(venv) == old
    kills = 0
    for moment in moments:
        if not killed(tmp_path, venv, where, moment):
            break
        kills += 1
        was_done = newest_state(tmp_path, venv) == _journal.DONE
        result = apply(tmp_path, venv, [] if result_is_interrupted(tmp_path, venv) else SWAP)
        # A kill after the last step, while tidying, leaves nothing to change.
        assert result["changed"] is not was_done, moment
        assert picture(venv) == new, moment
        nothing_left(tmp_path, venv)
        assert not apply(tmp_path, venv, SWAP)["changed"]
        restore(tmp_path, venv)
        assert picture(venv) == old, moment

        assert killed(tmp_path, venv, where, moment)
        if result_is_interrupted(tmp_path, venv):
            # Going back is killed too, early, and then comes to its end.
            killed(tmp_path, venv, "module", 3 + moment % 7, restore=True)
            restore(tmp_path, venv)
        elif newest_state(tmp_path, venv) == _journal.DONE:
            restore(tmp_path, venv)
        assert picture(venv) == old, moment
        apply(tmp_path, venv, [])
        nothing_left(tmp_path, venv)
    return kills


def newest_state(tmp_path, venv):
    entries = _journal.Journal(str(tmp_path / "state" / "journal")).entries(os.path.realpath(venv))
    return entries[-1].state if entries else None


def result_is_interrupted(tmp_path, venv):
    entries = _journal.Journal(str(tmp_path / "state" / "journal")).entries(os.path.realpath(venv))
    return any(entry.state in _journal.INTERRUPTED for entry in entries)


@pytest.mark.parametrize(
    ("where", "moments"),
    [("uninstall", (4,)), ("install", (9, 31)), ("module", (2, 24, 40, 63))],
)
def test_a_kill_at_some_moments(tmp_path, house, venv, where, moments):
    assert sweep(tmp_path, venv, where, moments) == len(moments)


def test_what_a_killed_pip_was_writing_goes_with_it(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    old = picture(venv)
    apply(tmp_path, venv, SWAP)
    new = picture(venv)
    restore(tmp_path, venv)
    info = site(venv) / "moon_cu13-1.0.dist-info"
    for back in (False, True):
        assert next(moment for moment in range(12, 60, 6) if killed(tmp_path, venv, "install", moment) and _half(info))
        (info / "INSTALLER8ehlnm_e.tmp").write_text("pip")
        cache = site(venv) / "moon" / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / "engine.cpython-311.pyc.140234").write_bytes(b"half")
        restore(tmp_path, venv) if back else apply(tmp_path, venv, [])
        assert picture(venv) == (old if back else new)
        if not back:
            restore(tmp_path, venv)


def _half(info):
    return info.is_dir() and not (info / "RECORD").exists()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["uninstall", "install", "module"])
def test_a_kill_at_every_moment(tmp_path, house, venv, where):
    assert sweep(tmp_path, venv, where, range(1, 1000)) >= 5


def test_what_a_killed_run_left_running_is_ended_first(tmp_path, house, venv):
    apply(tmp_path, venv, INSTALL_12)
    assert killed(tmp_path, venv, "uninstall", 3)
    entry = _journal.Journal(str(tmp_path / "state" / "journal")).entries(os.path.realpath(venv))[-1]
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={"TMPDIR": f"{entry.work}/run-0.tmp"}
    ) as orphan:
        assert apply(tmp_path, venv, [])["recovered"] == [entry.id]
        assert orphan.wait(10) == -signal.SIGKILL
    assert (site(venv) / "moon" / "engine.py").read_text() == "VARIANT = 'cu13'\n"


def test_exactly_the_named_journals_go_back_or_none(tmp_path, house, venv):
    first = apply(tmp_path, venv, INSTALL_13)["journal_id"]
    second = apply(tmp_path, venv, remedies(step("pip_install", "moon-cu13==1.1")))["journal_id"]
    there = picture(venv)
    with pytest.raises(bp.Failure, match=f"was changed since by {second}") as refused:
        restore(tmp_path, venv, journal_ids=[first])
    assert refused.value.fields["code"] == "journal_not_newest" and picture(venv) == there
    with pytest.raises(bp.Failure, match="no journal nope"):
        restore(tmp_path, venv, journal_ids=["nope"])
    assert restore(tmp_path, venv, journal_ids=[second, first])["changed"]
    assert not restore(tmp_path, venv, journal_ids=[second, first])["changed"], "when it was interrupted, once more"
    nothing_left(tmp_path, venv)


def test_packages_changed_by_hand_are_not_taken_back_by_name(tmp_path, house, venv):
    entry = apply(tmp_path, venv, INSTALL_13)["journal_id"]
    pip = ["-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, *pip, str(house / "moon_cu13-1.1-py3-none-any.whl")], check=True)
    there = picture(venv)
    with pytest.raises(bp.Failure, match=f"moon-cu13 is not as journal {entry} left it") as refused:
        restore(tmp_path, venv, journal_ids=[entry])
    assert refused.value.fields["code"] == "changed_since" and picture(venv) == there


@pytest.mark.skipif(os.geteuid() != 0, reason="stored revisions are root's")
def test_entries_that_lead_back_to_a_stored_revision_are_kept(tmp_path, house, venv):
    meta = tmp_path / "state" / "instances" / "default" / "revisions" / ("0" * 16) / "meta.json"
    meta.parent.mkdir(parents=True)
    for number in range(4):
        meta.write_text(json.dumps({"venv": str(venv), "journals": ["n0"]}))
        wanted = f"moon-cu13=={'1.0' if number % 2 else '1.1'}"
        apply(tmp_path, venv, remedies(step("pip_install", wanted)), keep_journals=1, journal_id=f"n{number}")
    assert sorted(os.listdir(tmp_path / "state" / "journal")) == ["n1", "n2", "n3"], "the revision ran with n0"
