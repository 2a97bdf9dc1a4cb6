# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The store of revisions: whole or not there, and damage is told."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _unit_store
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Lock,
    StoreError,
    StoreLocked,
    UnitStore,
    make_dir,
    revision_id,
    write_file,
)

A, B = "a" * 16, "b" * 16
META: dict[str, Any] = {"argv": ["/x"], "created": "2026-01-01T00:00:00Z"}


@pytest.fixture
def store(tmp_path: Path) -> UnitStore:
    return UnitStore(str(tmp_path / "instances" / "default"))


def test_revision_depends_on_what_runs_only() -> None:
    base = revision_id("unit", "env", ["/x"], {"A": "1"}, {"torch": "2"})
    assert base == revision_id("unit", "env", ["/x"], {"A": "1"}, {"torch": "2"})
    others = {
        revision_id("unit2", "env", ["/x"], {"A": "1"}, {"torch": "2"}),
        revision_id("unit", "env2", ["/x"], {"A": "1"}, {"torch": "2"}),
        revision_id("unit", "env", ["/x", "y"], {"A": "1"}, {"torch": "2"}),
        revision_id("unit", "env", ["/x"], {"A": "2"}, {"torch": "2"}),
        revision_id("unit", "env", ["/x"], {"A": "1"}, {"torch": "3"}),
    }
    assert len(others) == 5 and base not in others


def test_stage_and_read(store: UnitStore) -> None:
    assert store.revisions() == [] and store.pointer("current") is None
    store.stage(A, "unit a", "env a", META)
    found = store.read(A)
    assert found and (found.unit, found.env, found.meta["argv"]) == ("unit a", "env a", ["/x"])
    store.point("current", A)
    assert store.pointer("current") == A
    store.point("current", None)
    assert store.pointer("current") is None and store.problems == []
    assert os.stat(os.path.join(store.path, "revisions", A, "env")).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["unit", "env", "meta.json"])
@pytest.mark.parametrize("content", ["", "other", None, "[]", '{"files": 3}'])
def test_damage_is_told_never_raised(store: UnitStore, name: str, content: str | None) -> None:
    store.stage(A, "unit a", "env a", META)
    path = Path(store.path) / "revisions" / A / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert store.read(A) is None and store.revisions() == []
    assert [item["code"] for item in store.problems] == ["store_damaged"]
    store.stage(A, "unit a", "env a", META)
    assert store.read(A) is not None and store.problems == []


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe", b"../../etc", B.encode()])
def test_damaged_pointer_is_told(store: UnitStore, content: bytes) -> None:
    store.stage(A, "unit a", "env a", META)
    (Path(store.path) / "last_good").write_bytes(content)
    assert store.pointer("last_good") is None
    assert [item["code"] for item in store.problems] == ["store_damaged"]


def test_a_revision_of_another_name_is_not_taken(store: UnitStore) -> None:
    store.stage(A, "unit a", "env a", META)
    os.rename(os.path.join(store.path, "revisions", A), os.path.join(store.path, "revisions", B))
    assert store.read(B) is None and store.problems
    with pytest.raises(StoreError):
        store.read("../../etc")


def test_prune_keeps_the_newest_and_the_good_one(store: UnitStore) -> None:
    names = [f"{index:016x}" for index in range(8)]
    for index, name in enumerate(names):
        store.stage(name, "unit", "env", dict(META, created=f"2026-01-0{index + 1}"))
    assert store.prune(3, [names[0]]) == names[1:5]
    assert [item.revision for item in store.revisions()] == [names[0], *names[5:]]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_file(str(path), "old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_unit_store.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(str(path), "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_interrupted_staging_is_cleaned(store: UnitStore) -> None:
    store.stage(A, "unit a", "env a", META)
    (Path(store.path) / "revisions" / f".{B}.xyz").mkdir()
    (Path(store.path) / "revisions" / f".{B}.xyz" / "unit").write_text("half")
    (Path(store.path) / ".gpufleet-half").write_text("half")
    store.stage(B, "unit b", "env b", META)
    assert sorted(os.listdir(os.path.join(store.path, "revisions"))) == [A, B]
    assert not [name for name in os.listdir(store.path) if name.startswith(".")]


def test_records(store: UnitStore) -> None:
    assert store.read_json("takeover.json") is None
    store.write_json("takeover.json", {"unit": "old.service"})
    assert store.read_json("takeover.json") == {"unit": "old.service"}
    (Path(store.path) / "takeover.json").write_text("[1")
    assert store.read_json("takeover.json") is None and store.problems
    store.write_json("takeover.json", None)
    store.write_json("takeover.json", None)


def test_make_dir_sets_the_mode(tmp_path: Path) -> None:
    make_dir(str(tmp_path / "a" / "b"), 0o700)
    make_dir(str(tmp_path / "a" / "b"), 0o711)
    assert os.stat(tmp_path / "a" / "b").st_mode & 0o777 == 0o711
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is in the way"):
        make_dir(str(tmp_path / "file"), 0o700)


def _hold(path: str, ready: Connection) -> None:
    with Lock(path):
        ready.send("held")
        ready.recv()


def test_second_run_is_told_who_works(tmp_path: Path) -> None:
    path = str(tmp_path / "default.lock")
    here, there = multiprocessing.Pipe()
    holder = multiprocessing.Process(target=_hold, args=(path, there))
    holder.start()
    assert here.recv() == "held"
    with pytest.raises(StoreLocked, match=f"pid {holder.pid}"), Lock(path):
        pass
    holder.kill()
    holder.join()
    with Lock(path):
        assert json.loads(Path(path).read_text())["pid"] == os.getpid()
    with Lock(path):
        pass
