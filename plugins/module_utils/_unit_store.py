# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the revisions of an instance on a host, written so that a power cut cannot mix them.

Layout of ``<base>/<instance>``::

    revisions/<revision>/{unit,env,meta.json}   complete or not there: made as .<revision>.<random>, then renamed
    current                                     the revision that the unit file was last swapped to
    last_good                                   the revision that was ready last
    takeover.json                               the unit that was replaced, and how to put it back
    run.json                                    which run works on the instance, and which one deployed what is current

The truth about what boots is the unit file itself; it names its revision, and files of a revision never change.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

_REVISION = re.compile(r"[0-9a-f]{16}\Z")
SCHEMA = 1


class StoreError(Exception):
    """The store cannot do what was asked; the message names the path and the remedy."""


class StoreLocked(StoreError):
    """Another run works on the instance; the message says which process and since when."""


class Revision(NamedTuple):
    """One stored revision: its id, the two texts and the meta data."""

    revision: str
    unit: str
    env: str
    meta: dict[str, Any]


def revision_id(unit: str, env: str, argv: list[str], plan_env: Mapping[str, str], libraries: Mapping[str, str]) -> str:
    """16 hex digits for what runs: texts without the revision in them, argv, env and the libraries' versions."""
    content = {"unit": unit, "env": env, "argv": list(argv), "plan_env": dict(plan_env), "libraries": dict(libraries)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def fsync_dir(path: str) -> None:
    """Make renames in a folder last; folders of some file systems refuse it, which is no error."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_file(path: str, data: str, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Replace ``path`` atomically and durably; its old content stays when anything fails (OSError is passed on).

    ``owner`` (uid, gid) and ``mode`` are set before the file has its name.
    """
    folder = os.path.dirname(path)
    handle, temporary = tempfile.mkstemp(prefix=".gpufleet-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode("utf-8"))
            stream.flush()
            if owner is not None:
                os.fchown(stream.fileno(), *owner)
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        raise
    fsync_dir(folder)


def make_dir(path: str, mode: int) -> None:
    """Make a folder with exactly ``mode`` (parents 0755), durably; an existing one gets the mode."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            make_dir(parent, 0o755)
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise StoreError(f"{path} is in the way: it is not a folder") from None
        fsync_dir(parent)
    if os.stat(path).st_mode & 0o7777 != mode:
        os.chmod(path, mode)


def process_start(pid: int, proc: str = "/proc") -> int | None:
    """Start time of a process in clock ticks since boot, None when it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Lock:
    """Exclusive right to change an instance: held by the kernel (gone with the process), described by the file.

    Use as a context manager; entering raises StoreLocked when another run holds it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        make_dir(os.path.dirname(self.path), 0o755)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 4096, 0).decode("utf-8", "replace")
            os.close(handle)
            raise StoreLocked(self._describe(holder)) from None
        os.ftruncate(handle, 0)
        mine = {"pid": os.getpid(), "start": process_start(os.getpid()), "user": os.environ.get("SUDO_USER", "root")}
        os.pwrite(handle, json.dumps(mine).encode(), 0)
        self._handle = handle
        return self

    def _describe(self, text: str) -> str:
        try:
            holder = json.loads(text)
            pid, user = holder["pid"], holder["user"]
            alive = process_start(int(pid)) == holder["start"]
        except (ValueError, KeyError, TypeError):
            return f"another run holds {self.path}; let it end, then run again"
        if alive:
            return f"another run works on this instance: pid {pid}, started by {user} ({self.path}); let it end first"
        return f"a child of pid {pid} (ended, of {user}) still holds {self.path}; let it end, then run again"

    def __exit__(self, *_error: object) -> None:
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None


class UnitStore:
    """Revisions of one instance under ``path``. Reading never fails on damage: it is listed in ``problems``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[dict[str, Any]] = []

    def _damaged(self, what: str, message: str) -> None:
        problem = {"code": "store_damaged", "message": message, "severity": "warning", "path": what}
        if problem not in self.problems:
            self.problems.append(problem)

    def _revision_path(self, revision: str) -> str:
        if not _REVISION.match(revision):
            raise StoreError(f"{revision!r} is not a revision (16 hex digits)")
        return os.path.join(self.path, "revisions", revision)

    def read(self, revision: str) -> Revision | None:
        """A stored revision, None when it is not there or damaged (then told in ``problems``)."""
        folder = self._revision_path(revision)
        if not os.path.isdir(folder):
            return None
        try:
            texts = {}
            for name in ("unit", "env", "meta.json"):
                with open(os.path.join(folder, name), encoding="utf-8") as stream:
                    texts[name] = stream.read()
            meta = json.loads(texts["meta.json"])
            for name in ("unit", "env"):
                if hashlib.sha256(texts[name].encode("utf-8")).hexdigest() != meta["files"][name]:
                    self._damaged(folder, f"revision {revision}: {name} is not what was stored; it will not be used")
                    return None
            if meta["revision"] != revision or not isinstance(meta["argv"], list):
                self._damaged(folder, f"revision {revision}: meta.json belongs to another revision")
                return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._damaged(folder, f"revision {revision} cannot be read ({error}); it will not be used")
            return None
        return Revision(revision, texts["unit"], texts["env"], meta)

    def revisions(self) -> list[Revision]:
        """All sound revisions, oldest first."""
        try:
            names = os.listdir(os.path.join(self.path, "revisions"))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            self._damaged(os.path.join(self.path, "revisions"), "revisions is not a folder")
            return []
        found = [item for item in (self.read(name) for name in names if _REVISION.match(name)) if item]
        return sorted(found, key=lambda item: (str(item.meta.get("created", "")), item.revision))

    def pointer(self, name: str) -> str | None:
        """The revision that ``current`` or ``last_good`` names, None when there is none or it is damaged."""
        path = os.path.join(self.path, name)
        try:
            with open(path, encoding="utf-8") as stream:
                revision = stream.read(256).strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._damaged(path, f"{name} cannot be read ({error})")
            return None
        if not _REVISION.match(revision):
            self._damaged(path, f"{name} does not name a revision")
            return None
        if not os.path.isdir(self._revision_path(revision)):
            self._damaged(path, f"{name} names revision {revision}, which is not stored")
            return None
        return revision

    def stage(self, revision: str, unit: str, env: str, meta: Mapping[str, Any]) -> Revision:
        """Store a revision completely or not at all (OSError, such as a full disk, is passed on)."""
        target = self._revision_path(revision)
        known = self.read(revision)
        if known is not None and (known.unit, known.env) == (unit, env):
            if known.meta.get("journals") != meta.get("journals"):
                # The same libraries by another way.
                known.meta["journals"] = meta.get("journals")
                write_file(os.path.join(target, "meta.json"), json.dumps(known.meta, indent=1, sort_keys=True))
            return known
        make_dir(self.path, 0o700)
        parent = os.path.dirname(target)
        make_dir(parent, 0o700)
        self.clean()
        full = dict(meta, schema=SCHEMA, revision=revision)
        full["files"] = {
            "unit": hashlib.sha256(unit.encode("utf-8")).hexdigest(),
            "env": hashlib.sha256(env.encode("utf-8")).hexdigest(),
        }
        folder = tempfile.mkdtemp(prefix=f".{revision}.", dir=parent)
        try:
            for name, text in (("unit", unit), ("env", env), ("meta.json", json.dumps(full, indent=1, sort_keys=True))):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as stream:
                    os.fchmod(stream.fileno(), 0o600)
                    stream.write(text)
                    stream.flush()
                    os.fsync(stream.fileno())
            fsync_dir(folder)
            if os.path.lexists(target):
                # Damaged, or of another form: out of the way first, since a folder cannot replace a full one.
                os.rename(target, tempfile.mkdtemp(prefix=".damaged.", dir=parent) + "/old")
            os.rename(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        fsync_dir(parent)
        self.problems = [item for item in self.problems if item["path"] != target]
        return Revision(revision, unit, env, full)

    def point(self, name: str, revision: str | None) -> None:
        """Set ``current`` or ``last_good``, or take it away (None)."""
        path = os.path.join(self.path, name)
        if revision is None:
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            fsync_dir(self.path)
            return
        self._revision_path(revision)
        write_file(path, revision + "\n")
        self.problems = [item for item in self.problems if item["path"] != path]

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A small record of the store, None when it is not there or damaged."""
        path = os.path.join(self.path, name)
        try:
            with open(path, encoding="utf-8") as stream:
                value = json.load(stream)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._damaged(path, f"{name} cannot be read ({error})")
            return None
        if not isinstance(value, dict):
            self._damaged(path, f"{name} is not a record")
            return None
        return value

    def write_json(self, name: str, value: Mapping[str, Any] | None) -> None:
        """Write a small record, or take it away (None)."""
        path = os.path.join(self.path, name)
        if value is None:
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            fsync_dir(self.path)
            return
        make_dir(self.path, 0o700)
        write_file(path, json.dumps(value, sort_keys=True))

    def clean(self) -> None:
        """Remove what interrupted runs left behind (names with a dot in front)."""
        for folder in (os.path.join(self.path, "revisions"), self.path):
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                continue
            for name in names:
                path = os.path.join(folder, name)
                if not name.startswith("."):
                    continue
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def prune(self, keep: int, always: list[str | None]) -> list[str]:
        """Remove old revisions beyond the newest ``keep``, never those in ``always``; returns what was removed."""
        old = [item.revision for item in self.revisions()][:-keep]
        removed = [revision for revision in old if revision not in always]
        for revision in removed:
            path = self._revision_path(revision)
            # The rename makes it vanish whole, whatever interrupts the removal.
            away = os.path.join(os.path.dirname(path), f".{revision}.removed")
            os.rename(path, away)
            shutil.rmtree(away)
        return removed
