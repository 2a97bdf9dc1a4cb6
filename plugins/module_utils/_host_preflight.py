# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what on a host would keep an instance from starting, found before anything changes.

Each check returns problems ``{code, message, severity, ...}``; severity ``error`` stops a deploy, ``warning`` is told.
"""

from __future__ import annotations

import csv
import grp
import io
import ipaddress
import json
import os
import pwd
import re
import stat
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run

Problem = dict[str, Any]
# A context without weights (monitoring, a desktop) takes less; a server's first process takes more.
FOREIGN_GPU_MIB = 512


def problem(code: str, message: str, severity: str = "error", **extra: Any) -> Problem:
    """One problem, in the shape that all parts of the collection use."""
    return dict({"code": code, "message": message, "severity": severity}, **extra)


class Listener(NamedTuple):
    """A listening TCP socket: its address as text, port and inode."""

    address: str
    port: int
    inode: int


def parse_listeners(text: str) -> list[Listener]:
    """Listening sockets of the text of /proc/net/tcp or /proc/net/tcp6."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or fields[3] != "0A":
            continue
        address, _colon, port = fields[1].partition(":")
        words = [bytes.fromhex(address[index : index + 8]) for index in range(0, len(address), 8)]
        if sys.byteorder == "little":
            words = [word[::-1] for word in words]
        found.append(Listener(str(ipaddress.ip_address(b"".join(words))), int(port, 16), int(fields[9])))
    return found


def addresses_collide(wanted: str, listening: str) -> bool:
    """Whether binding ``wanted`` fails while ``listening`` is bound to the same port; names count as any address."""
    try:
        mine = ipaddress.ip_address(wanted)
    except ValueError:
        return True
    other = ipaddress.ip_address(listening)
    if isinstance(other, ipaddress.IPv6Address) and other.ipv4_mapped:
        other = other.ipv4_mapped
    if mine.is_unspecified or other.is_unspecified:
        # :: takes IPv4 too, unless somebody switched that off
        return mine.version == other.version or (mine if mine.version == 6 else other).is_unspecified
    return mine == other


def cgroup_of(pid: int, proc: str = "/proc") -> str:
    """The cgroup path of a process (v2 or systemd's own v1 hierarchy), "" when it is gone.

    Both lines can be there, and in a container only one of them is systemd's: the other one says ``/``.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return ""
    best = ""
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (number == "0" or controllers == "name=systemd") and len(path) > len(best):
            best = path
    return best


def in_unit(cgroup: str, unit: str) -> bool:
    """Whether a cgroup path is a unit's own or below it."""
    return unit in cgroup.split("/")


def unit_of(cgroup: str) -> str | None:
    """The innermost unit of a cgroup path, None when there is none."""
    units = [part for part in cgroup.split("/") if part.endswith((".service", ".scope"))]
    return units[-1] if units else None


def _pids(proc: str) -> list[int]:
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def socket_owners(inodes: set[int], proc: str = "/proc") -> dict[int, int]:
    """Which process has each socket open: ``{inode: pid}``."""
    targets = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[int, int] = {}
    for pid in _pids(proc):
        try:
            handles = os.listdir(f"{proc}/{pid}/fd")
        except OSError:
            continue
        for handle in handles:
            try:
                inode = targets.get(os.readlink(f"{proc}/{pid}/fd/{handle}"))
            except OSError:
                continue
            if inode is not None:
                owners[inode] = pid
        if len(owners) == len(targets):
            break
    return owners


def process_name(pid: int, proc: str = "/proc") -> str:
    """Short name of a process, "?" when it is gone."""
    try:
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return "?"


def check_port(host: str, port: int, own_units: Sequence[str], proc: str = "/proc") -> list[Problem]:
    """The port is free, or held by one of ``own_units`` (this unit, and one that is taken over)."""
    listeners: list[Listener] = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{name}", encoding="ascii") as stream:
                listeners += parse_listeners(stream.read())
        except FileNotFoundError:
            continue
    held = [item for item in listeners if item.port == port and addresses_collide(host, item.address)]
    owners = socket_owners({item.inode for item in held}, proc) if held else {}
    problems = []
    for item in held:
        pid = owners.get(item.inode)
        cgroup = cgroup_of(pid, proc) if pid else ""
        if any(in_unit(cgroup, unit) for unit in own_units):
            continue
        who = (
            f"pid {pid} ({process_name(pid, proc)}, {unit_of(cgroup) or cgroup or 'no unit'})" if pid else "the kernel"
        )
        problems.append(
            problem(
                "port_taken",
                f"port {port} on {item.address} is held by {who}; stop it, or choose another sglang_port",
                port=port,
                pid=pid,
                unit=unit_of(cgroup),
            )
        )
    # One stranger on IPv4 and IPv6 is one problem.
    return list({item["pid"]: item for item in problems}.values())


def check_privileged_port(port: int, user: str, proc: str = "/proc") -> list[Problem]:
    """An unprivileged user cannot bind low ports, and the unit keeps no capability that could."""
    try:
        with open(f"{proc}/sys/net/ipv4/ip_unprivileged_port_start", encoding="ascii") as stream:
            first = int(stream.read())
    except (OSError, ValueError):
        first = 1024
    if port >= first or user == "root":
        return []
    return [
        problem(
            "port_privileged",
            f"port {port} needs privileges that {user} does not have (the first free one is {first}); "
            "choose a higher sglang_port",
            port=port,
        )
    ]


def identity(user: str, group: str) -> tuple[int, int, list[int]]:
    """(uid, gid, groups) of the service; those of a user that does not exist yet are nobody's."""
    try:
        gid = grp.getgrnam(group).gr_gid
    except KeyError:
        gid = 65534
    try:
        uid = pwd.getpwnam(user).pw_uid
        return uid, gid, os.getgrouplist(user, gid)
    except KeyError:
        return 65534, gid, [gid]


def _blocked(path: str, need: str) -> tuple[str, str] | None:
    parts = [part for part in path.split("/") if part]
    for index in range(len(parts)):
        parent = "/" + "/".join(parts[:index])
        if not os.access(parent, os.X_OK):
            return (path, "absent") if not os.path.isdir(parent) and not os.path.lexists(parent) else (parent, "enter")
    if not os.path.exists(path):
        return path, "absent"
    mode = {"read": os.R_OK, "run": os.R_OK | os.X_OK, "write": os.W_OK | os.X_OK}[need]
    if os.path.isdir(path):
        mode |= os.X_OK
    return None if os.access(path, mode) else (path, need)


def access_as(
    user: str, group: str, wanted: Sequence[tuple[str, str]], extra_groups: Sequence[str] = ()
) -> list[tuple[str, str] | None]:
    """What the user cannot reach: for each (path, ``read``|``run``|``write``) None, or (path that stops it, why).

    A child takes the user's ids and asks the kernel, so that ACLs, mounts and root squash count. It is forked, not
    run, since this process's own interpreter may be hidden from that user. Raises OSError when that fails.
    """
    uid, gid, groups = identity(user, group)
    for name in extra_groups:
        try:
            groups.append(grp.getgrnam(name).gr_gid)
        except KeyError:
            continue
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            if os.geteuid() == 0:
                os.setgroups(groups)
                os.setresgid(gid, gid, gid)
                os.setresuid(uid, uid, uid)
            with os.fdopen(writer, "w") as stream:
                json.dump([_blocked(path, need) for path, need in wanted], stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _pid, status = os.waitpid(child, 0)
    if status != 0:
        raise OSError(f"the access check as {user} failed")
    return [(item[0], item[1]) if item else None for item in json.loads(text)]


# (not there, out of reach) by the first word of what is looked for; the plan and the probe use the same codes.
_ACCESS_CODES = {
    "venv": ("venv_absent", "venv_unreadable_by_user"),
    "model": ("model_path_absent", "model_unreadable"),
    "cache": ("cache_absent", "cache_not_writable"),
}


def check_access(
    user: str, group: str, wanted: Sequence[tuple[str, str, str]], extra_groups: Sequence[str] = ()
) -> list[Problem]:
    """Paths the service must reach: ``wanted`` is (what, path, need)."""
    try:
        found = access_as(user, group, [(path, need) for _what, path, need in wanted], extra_groups)
    except OSError as error:
        return [problem("access_unknown", str(error), "warning")]
    problems = []
    for (what, path, need), blocked in zip(wanted, found):
        if blocked is None:
            continue
        at, why = blocked
        if why == "absent":
            message, code = f"{what} {path} is not there", _ACCESS_CODES[what.split()[0]][0]
        elif why == "enter":
            message, code = f"{what} {path}: {user} may not enter {at}", _ACCESS_CODES[what.split()[0]][1]
        else:
            verb = {"read": "read", "run": "execute", "write": "write"}[need]
            message, code = f"{what} {path}: {user} may not {verb} it", _ACCESS_CODES[what.split()[0]][1]
        if why != "absent":
            message += f"; allow it (setfacl -m u:{user}:{'rwx' if need == 'write' else 'rx'} {at})"
        problems.append(problem(code, message, path=path, at=at))
    return problems


def check_interpreter(run: Run, user: str, group: str, python: str) -> list[Problem]:
    """The venv's interpreter starts as the service's user (a venv whose base Python is hidden does not)."""
    uid, gid, _groups = identity(user, group)
    if os.geteuid() != 0:
        return []
    prefix = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]
    result = run([*prefix, python, "-I", "-S", "-c", "pass"], 20)
    if result.rc == 127 and "setpriv" in result.stderr:
        return []
    if result.rc == 0:
        return []
    text = (result.stderr.strip().splitlines() or [f"rc {result.rc}"])[-1]
    return [problem("venv_python_does_not_run", f"{python} does not start as {user}: {text[-300:]}", path=python)]


class GpuProcess(NamedTuple):
    """A compute process on a GPU; ``memory_mib`` None when the driver does not tell."""

    uuid: str
    pid: int
    name: str
    memory_mib: int | None


def parse_compute_apps(text: str) -> list[GpuProcess]:
    """Rows of ``nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory --format=csv``.

    Header, units and order as nvidia-smi gives them; rows that do not fit are left out.
    """
    found = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) < 4 or not row[1].strip().isdigit():
            continue
        memory = re.match(r"(\d+)", row[-1].strip())
        name = ",".join(row[2:-1]).strip()
        found.append(GpuProcess(row[0].strip(), int(row[1]), name, int(memory.group(1)) if memory else None))
    return found


def check_gpus(run: Run, gpus: Sequence[int] | None, own_units: Sequence[str], proc: str = "/proc") -> list[Problem]:
    """GPUs of this instance (None: all) are not held by strangers. Without nvidia-smi there is nothing to say."""
    apps = run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv"], 30)
    if apps.rc == 127:
        return []
    if apps.rc != 0:
        text = (apps.stdout + apps.stderr).strip()[-300:] or ("no answer" if apps.timed_out else f"rc {apps.rc}")
        return [problem("gpus_unknown", f"nvidia-smi does not tell who uses the GPUs: {text}", "warning")]
    index_of: dict[str, int] = {}
    listing = run(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"], 30)
    for line in listing.stdout.splitlines():
        number, _comma, uuid = line.partition(",")
        if number.strip().isdigit():
            index_of[uuid.strip()] = int(number)
    problems = []
    for app in parse_compute_apps(apps.stdout):
        index = index_of.get(app.uuid)
        if gpus is not None and index is not None and index not in gpus:
            continue
        cgroup = cgroup_of(app.pid, proc)
        if any(in_unit(cgroup, unit) for unit in own_units):
            continue
        where = f"GPU {index}" if index is not None else app.uuid
        unit = unit_of(cgroup)
        memory = f"{app.memory_mib} MiB" if app.memory_mib is not None else "an unknown amount"
        heavy = app.memory_mib is not None and app.memory_mib >= FOREIGN_GPU_MIB
        problems.append(
            problem(
                "gpu_held_by_stranger",
                f"{where}: pid {app.pid} ({app.name}, {unit or 'no unit'}) holds {memory} of its memory; "
                "stop it, or give the instance other GPUs (sglang_gpus)",
                "error" if heavy else "warning",
                pid=app.pid,
                gpu=index,
                unit=unit,
            )
        )
    return problems


def check_memory(proc: str = "/proc", minimum: int = 2 << 30) -> list[Problem]:
    """Enough memory is available to start at all."""
    try:
        with open(f"{proc}/meminfo", encoding="ascii") as stream:
            match = re.search(r"^MemAvailable:\s+(\d+) kB", stream.read(), re.MULTILINE)
    except OSError:
        return []
    available = int(match.group(1)) * 1024 if match else minimum
    if available >= minimum:
        return []
    return [
        problem(
            "memory_low",
            f"{available >> 20} MiB of memory are available; the first processes alone take {minimum >> 20} MiB",
            "warning",
            available=available,
        )
    ]


def check_shm(path: str = "/dev/shm", minimum: int = 1 << 30) -> list[Problem]:
    """Shared memory is large enough for NCCL and the tokenizer's queues."""
    try:
        info = os.statvfs(path)
    except OSError as error:
        return [problem("shm_missing", f"{path}: {error.strerror}; NCCL and torch need it", "warning")]
    size = info.f_blocks * info.f_frsize
    if size >= minimum:
        return []
    return [
        problem(
            "shm_small",
            f"{path} has {size >> 20} MiB; NCCL needs some for each pair of GPUs: give it {minimum >> 20} MiB or more",
            "warning",
            size=size,
        )
    ]


def check_noexec(paths: Sequence[str], proc: str = "/proc") -> list[Problem]:
    """JIT caches lie where compiled libraries may be loaded from."""
    try:
        with open(f"{proc}/self/mounts", encoding="utf-8", errors="replace") as stream:
            mounts = [line.split()[1:4:2] for line in stream if len(line.split()) >= 4]
    except OSError:
        return []
    problems = []
    for path in paths:
        best, options = "", ""
        for point, flags in mounts:
            plain = point.replace("\\040", " ")
            if (path + "/").startswith(plain.rstrip("/") + "/") and len(plain) >= len(best):
                best, options = plain, flags
        if "noexec" in options.split(","):
            problems.append(
                problem("cache_noexec", f"{best} is mounted noexec: the JIT cannot load what it compiles in {path}")
            )
    return problems


def cgroup_processes(control_group: str, root: str = "/sys/fs/cgroup") -> list[int]:
    """Pids in a unit's cgroup and below it; [] when it does not exist."""
    if not control_group or control_group == "/":
        return []
    base = ""
    for candidate in (root, f"{root}/unified", f"{root}/systemd"):
        if os.path.isdir(candidate + control_group):
            base = candidate + control_group
            break
    pids: list[int] = []
    for folder, _folders, _files in os.walk(base) if base else ():
        try:
            with open(f"{folder}/cgroup.procs", encoding="ascii") as stream:
                pids += [int(line) for line in stream if line.strip()]
        except OSError:
            continue
    return sorted(set(pids))


_LIMIT_LINES = {"Max locked memory": "LimitMEMLOCK", "Max open files": "LimitNOFILE"}


def parse_limits(text: str) -> dict[str, tuple[str, str]]:
    """Soft and hard limit of /proc/<pid>/limits by the unit's name for it: ``{LimitMEMLOCK: (soft, hard)}``."""
    found = {}
    for line in text.splitlines():
        for title, name in _LIMIT_LINES.items():
            if line.startswith(title):
                soft, hard = line[len(title) :].split()[:2]
                found[name] = (soft, hard)
    return found


def limits_not_granted(wanted: dict[str, str], text: str) -> list[dict[str, str]]:
    """Where the kernel gave the process less than the unit asks for: ``[{limit, wanted, granted, code}]``."""

    def number(value: str) -> float:
        return float("inf") if value in ("infinity", "unlimited") else float(value)

    missing = []
    for name, (soft, _hard) in parse_limits(text).items():
        asked = wanted.get(name)
        if asked is None or not re.match(r"(infinity|\d+)\Z", asked):
            continue
        if number(soft) < number(asked):
            code = "memlock_effective_below_unit" if name == "LimitMEMLOCK" else "nofile_effective_below_unit"
            missing.append({"limit": name, "wanted": asked, "granted": soft, "code": code})
    return missing


def device_groups(patterns: Sequence[str] = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/infiniband")) -> list[str]:
    """Groups a user needs for device nodes that are not open to all."""
    names: set[str] = set()
    for path in patterns:
        nodes = [path]
        if os.path.isdir(path):
            nodes = [os.path.join(path, name) for name in os.listdir(path) if name.startswith("uverbs")]
        for node in nodes:
            try:
                info = os.stat(node)
            except OSError:
                continue
            if stat.S_ISCHR(info.st_mode) and info.st_gid != 0 and not info.st_mode & stat.S_IWOTH:
                try:
                    names.add(grp.getgrgid(info.st_gid).gr_name)
                except KeyError:
                    continue
    return sorted(names)
