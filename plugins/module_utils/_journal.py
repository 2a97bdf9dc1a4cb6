# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: a journal of changes to a venv that survives a kill at any moment.

One folder an entry::

    <root>/<id>/entry.json     state, steps, what was there: written whole, synced, renamed
    <root>/<id>/manifest.json  what was kept: [{path, kind, store, mode, mtime_ns, target}]
    <root>/<id>/files/         the kept files, by number
    <root>/<id>/{work}         wheels and temporary files, removed at the end

States: ``preparing`` (nothing has changed yet) → ``changing`` → ``done``; from ``changing`` or ``done`` →
``restoring`` → ``restored``. An entry that is ``changing`` or ``restoring`` and has no living writer was interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from typing import Any, Optional

PREPARING, CHANGING, DONE, RESTORING, RESTORED = "preparing", "changing", "done", "restoring", "restored"
INTERRUPTED = (CHANGING, RESTORING)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GONE, _BEGUN = ".gone", ".begun"
_FICLONE = 0x40049409


class JournalError(Exception):
    """The journal cannot be read or written; the text says where and why."""


def valid_id(text: str) -> bool:
    """Whether ``text`` may name an entry (one path component, no surprises)."""
    return _ID.fullmatch(text) is not None and not text.endswith((_GONE, _BEGUN))


def sync_directory(path: str) -> None:
    """Make renames and removals in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, data: Any) -> None:
    """Replace ``path`` with ``data`` as JSON: after a crash it holds the old text or the new one, never a part."""
    fresh = path + ".new"
    with open(fresh, "w", encoding="utf-8") as stream:
        json.dump(data, stream, ensure_ascii=True, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, path)
    sync_directory(os.path.dirname(path))


def copy_file(source: str, target: str, link: bool = False) -> str:
    """Copy a regular file with mode and times, by reflink where the file system can, else by hard link if ``link``.

    Returns ``reflink``, ``hardlink`` or ``copy``. A hard link shares later writes in place: only for files that
    are about to be unlinked.
    """
    with open(source, "rb") as reader:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as writer:
            try:
                fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
                how = "reflink"
            except OSError:
                how = "copy"
            if how == "copy" and link:
                try:
                    os.unlink(target)
                    os.link(source, target, follow_symlinks=False)
                    return "hardlink"
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.ENOTSUP):
                        raise
                    return copy_file(source, target)
            if how == "copy":
                shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
    shutil.copystat(source, target, follow_symlinks=False)
    return how


def keep(paths: Iterable[str], files: str) -> list[dict[str, Any]]:
    """Keep ``paths`` (absolute) under the folder ``files`` and return the manifest.

    Kinds: ``file``, ``link`` (with its target), ``absent`` (to be removed by a restore). Folders and special
    files raise JournalError: no distribution owns one.
    """
    manifest = []
    for number, path in enumerate(sorted(set(paths))):
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            manifest.append({"path": path, "kind": "absent"})
            continue
        row: dict[str, Any] = {"path": path, "mode": stat.S_IMODE(status.st_mode), "mtime_ns": status.st_mtime_ns}
        if stat.S_ISLNK(status.st_mode):
            row.update(kind="link", target=os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            row.update(kind="file", store=f"{number:06d}", size=status.st_size)
            try:
                copy_file(path, os.path.join(files, row["store"]), link=True)
            except OSError as error:
                raise JournalError(f"{path} cannot be kept for rollback in {files}: {error.strerror}") from error
        else:
            raise JournalError(f"{path} is neither a file nor a link: it cannot be kept for rollback")
        manifest.append(row)
    sync_directory(files)
    return manifest


def put_back(manifest: Sequence[dict[str, Any]], files: str) -> list[str]:
    """Bring the paths of ``manifest`` back to what they were; may be repeated. Returns the paths that were absent.

    The absent ones are removed here too; empty folders are left to the caller, who knows where to stop.
    """
    touched = set()
    for row in manifest:
        path = row["path"]
        if row["kind"] == "absent":
            remove(path)
            continue
        parent = os.path.dirname(path)
        os.makedirs(parent, exist_ok=True)
        fresh = os.path.join(parent, ".gpufleet-" + os.path.basename(path)[:200])
        remove(fresh)
        if row["kind"] == "link":
            os.symlink(row["target"], fresh)
        else:
            copy_file(os.path.join(files, row["store"]), fresh)
            os.chmod(fresh, row["mode"])
            os.utime(fresh, ns=(row["mtime_ns"], row["mtime_ns"]))
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        os.replace(fresh, path)
        touched.add(parent)
    for parent in sorted(touched):
        sync_directory(parent)
    return [row["path"] for row in manifest if row["kind"] == "absent"]


def remove(path: str) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path):
            raise
        shutil.rmtree(path)


class Entry:
    """One entry. ``data``: ``{id, sequence, state, venv, site, steps, groups, stashes, problem}``."""

    def __init__(self, folder: str, data: dict[str, Any]) -> None:
        self.folder = folder
        self.data = data

    @property
    def id(self) -> str:
        """The entry's name."""
        return str(self.data["id"])

    @property
    def state(self) -> str:
        """Where it stands, see the module's text."""
        return str(self.data["state"])

    @property
    def files(self) -> str:
        """The folder of kept files."""
        return os.path.join(self.folder, "files")

    @property
    def work(self) -> str:
        """The folder of what is needed only while changing."""
        return os.path.join(self.folder, "work")

    def save(self, state: Optional[str] = None) -> None:
        """Write the entry, durably, with another state if one is given."""
        if state is not None:
            self.data["state"] = state
        write_whole(os.path.join(self.folder, "entry.json"), self.data)

    def save_manifest(self, manifest: Sequence[dict[str, Any]]) -> None:
        """Write what was kept; before the state becomes ``changing``."""
        write_whole(os.path.join(self.folder, "manifest.json"), list(manifest))

    def manifest(self) -> list[dict[str, Any]]:
        """What was kept. Raises JournalError when it cannot be read."""
        path = os.path.join(self.folder, "manifest.json")
        try:
            with open(path, encoding="utf-8") as stream:
                rows = json.load(stream)
        except (OSError, ValueError) as error:
            raise JournalError(f"{path} cannot be read: {error}") from error
        return [dict(row) for row in rows]

    def discard(self) -> None:
        """Forget the entry and what it kept."""
        gone = self.folder + _GONE
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(self.folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


class Journal:
    """The entries under ``root``."""

    def __init__(self, root: str) -> None:
        self.root = root

    def entries(self, venv: str) -> list[Entry]:
        """The entries of a venv, oldest first. An entry that cannot be read raises JournalError, unless it has none."""
        found = []
        try:
            names = sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JournalError(f"{self.root} cannot be read: {error.strerror}") from error
        for name in names:
            if not valid_id(name):
                continue
            path = os.path.join(self.root, name, "entry.json")
            try:
                with open(path, encoding="utf-8") as stream:
                    data = json.load(stream)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError) as error:
                raise JournalError(f"{path} cannot be read: {error}") from error
            if data.get("venv") == venv:
                found.append(Entry(os.path.join(self.root, name), data))
        return sorted(found, key=lambda entry: int(entry.data["sequence"]))

    def sweep(self) -> None:
        """Remove what an interrupted ``discard`` or ``begin`` left."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return
        for name in names:
            writer = name[: -len(_BEGUN)].rpartition(".")[2] if name.endswith(_BEGUN) else ""
            if name.endswith(_GONE) or (writer and not os.path.exists(f"/proc/{writer}")):
                shutil.rmtree(os.path.join(self.root, name), ignore_errors=True)

    def begin(self, wanted_id: str, venv: str, data: dict[str, Any]) -> Entry:
        """A new entry in state ``preparing``; its name gets a number when ``wanted_id`` is taken."""
        if not valid_id(wanted_id):
            raise JournalError(f"journal_id {wanted_id!r}: letters, digits, '.', '_' and '-', at most 128")
        sequence = 1 + max((int(entry.data["sequence"]) for entry in self.entries(venv)), default=0)
        # Made beside and renamed: a folder of an entry always has its entry.json.
        stage = os.path.join(self.root, f"{wanted_id}.{os.getpid()}{_BEGUN}")
        shutil.rmtree(stage, ignore_errors=True)
        os.mkdir(stage, 0o711)
        for number in range(1, 10000):
            name = wanted_id if number == 1 else f"{wanted_id}-{number}"
            folder = os.path.join(self.root, name)
            if os.path.lexists(folder):
                continue
            entry = Entry(stage, {**data, "id": name, "venv": venv, "sequence": sequence, "state": PREPARING})
            entry.save()
            try:
                os.rename(stage, folder)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    continue
                raise
            entry.folder = folder
            break
        else:
            shutil.rmtree(stage, ignore_errors=True)
            raise JournalError(f"{self.root} is full of entries named {wanted_id}")
        sync_directory(self.root)
        return entry
