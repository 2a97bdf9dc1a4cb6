# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was kept comes back exactly, as often as one likes."""

from __future__ import annotations

import os
import stat

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _journal


def picture(root):
    """Everything of a tree that a restore must bring back."""
    return {
        str(path.relative_to(root)): (
            stat.S_IMODE(path.lstat().st_mode),
            path.lstat().st_mtime_ns if not path.is_symlink() else 0,
            os.readlink(path) if path.is_symlink() else path.read_bytes(),
        )
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "site"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "engine.so").write_bytes(b"\x7fELF old")
    (root / "pkg" / "engine.so").chmod(0o755)
    os.utime(root / "pkg" / "engine.so", ns=(10**18, 10**18 + 7))
    (root / "pkg" / "link").symlink_to("engine.so")
    return root


def test_files_modes_times_links_and_absence_come_back(tree, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    before = picture(tree)
    paths = [str(tree / "pkg" / name) for name in ("engine.so", "link", "new.so", "deep/new.py")]
    manifest = _journal.keep(paths, str(files))
    assert [row["kind"] for row in manifest] == ["absent", "file", "link", "absent"]
    for damage in range(3):
        os.unlink(tree / "pkg" / "engine.so")
        (tree / "pkg" / "engine.so").write_text(f"new {damage}")
        os.unlink(tree / "pkg" / "link")
        (tree / "pkg" / "link").mkdir()
        (tree / "pkg" / "new.so").write_text("added")
        _journal.put_back(manifest, str(files))
        assert picture(tree) == before


def test_a_write_in_place_after_a_restore_does_not_reach_what_is_kept(tree, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    target = tree / "pkg" / "engine.so"
    manifest = _journal.keep([str(target)], str(files))
    target.unlink()
    _journal.put_back(manifest, str(files))
    with open(target, "r+b") as stream:
        stream.write(b"patched")
    _journal.put_back(manifest, str(files))
    assert target.read_bytes() == b"\x7fELF old"


def test_special_files_are_refused(tree, tmp_path):
    os.mkfifo(tree / "pkg" / "pipe")
    with pytest.raises(_journal.JournalError, match="neither a file nor a link"):
        _journal.keep([str(tree / "pkg" / "pipe")], str(tmp_path))


def test_entries_are_ordered_and_numbered(tmp_path):
    journal = _journal.Journal(str(tmp_path))
    ids = [journal.begin("run", "/venv", {}).id for _unused in range(11)]
    journal.begin("run", "/other", {})
    assert ids[:3] == ["run", "run-2", "run-3"]
    assert [entry.id for entry in journal.entries("/venv")] == ids


def test_a_torn_write_leaves_the_old_entry_and_a_spoilt_one_is_an_error(tmp_path):
    journal = _journal.Journal(str(tmp_path))
    entry = journal.begin("run", "/venv", {})
    (tmp_path / "run" / "entry.json.new").write_text('{"half')
    assert journal.entries("/venv")[0].state == _journal.PREPARING
    (tmp_path / "run" / "entry.json").write_text('{"half')
    with pytest.raises(_journal.JournalError, match=r"entry\.json cannot be read"):
        journal.entries("/venv")
    entry.save(_journal.DONE)
    assert journal.entries("/venv")[0].state == _journal.DONE


def test_an_interrupted_begin_is_no_entry_and_is_swept_once_its_writer_is_gone(tmp_path, monkeypatch):
    journal = _journal.Journal(str(tmp_path))

    def killed(_source, _target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.begin("one", "/v", {})
    (left,) = tmp_path.iterdir()
    assert journal.entries("/v") == []
    # Another run may be about to finish it.
    journal.sweep()
    assert left.is_dir()
    dead = left.with_name(left.name.replace(str(os.getpid()), "4194305"))
    left.rename(dead)
    journal.sweep()
    assert list(tmp_path.iterdir()) == []
    assert journal.begin("one", "/v", {}).id == "one"


def test_an_interrupted_discard_is_no_entry_and_is_swept(tmp_path):
    journal = _journal.Journal(str(tmp_path))
    entry = journal.begin("run", "/venv", {})
    os.rename(entry.folder, entry.folder + ".gone")
    assert journal.entries("/venv") == []
    journal.sweep()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "x" * 129, "run.gone"])
def test_names_that_are_no_names(tmp_path, name):
    with pytest.raises(_journal.JournalError):
        _journal.Journal(str(tmp_path)).begin(name, "/venv", {})
