#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make real hosts for the tests: systemd as PID 1, an address of their own, sshd. Debian, root, amd64.

  hosts.py setup [--release bookworm]
  hosts.py up --prefix P [--subnet 10.90.7.0/24] [--backend podman|nspawn] NAME[:OPTION...]...
  hosts.py exec NAME CMD...      hosts.py wait --prefix P      hosts.py list
  hosts.py inventory --prefix P  hosts.py ssh-config --prefix P
  hosts.py down --prefix P | --all      hosts.py clean [--caches]

NAME is a host's name, or PREFIX/NAME where several have it. README.md lists the options of a host.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sglang_cpu"))
import layers

CG2 = HERE / "cg2"
IMAGE = "localhost/gpufleet-host"
BASE = "localhost/gpufleet-debian"
TOOLS = {
    "podman": "podman",
    "crun": "crun",
    "conmon": "conmon",
    "iptables": "iptables",
    "nft": "nftables",
    "mmdebstrap": "mmdebstrap",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "systemd-nspawn": "systemd-container",
    "/usr/lib/podman/netavark": "netavark",
}
NAME_RE = re.compile(r"[a-z][a-z0-9-]{0,30}")
FLAGS = ("ops", "models", "offline")
VALUES = ("env", "ip", "release", "mount", "overlay")


class UserError(Exception):
    """Something that the caller can mend; printed as one line."""


def say(message: str) -> None:
    """One line for the person who waits."""
    print(f"[hosts] {message}", file=sys.stderr, flush=True)


def run(*argv: str | Path, check: bool = True, stdin: str | None = None) -> str:
    """Run a command and return its standard output; a failure carries its standard error."""
    done = subprocess.run([str(a) for a in argv], input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise UserError(f"{' '.join(map(str, argv[:6]))}: rc {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout.strip()


def ok(*argv: str | Path) -> bool:
    """Whether a command succeeds."""
    return subprocess.run([str(a) for a in argv], capture_output=True, check=False).returncode == 0


# --- what a host is ---------------------------------------------------------------------------------------------------


@dataclass
class Bind:
    """A folder or file of this machine that a host sees."""

    source: str
    target: str
    writable: bool = False


@dataclass
class Spec:
    """A host as the command line asks for it."""

    name: str
    ops: bool = False
    models: bool = False
    offline: bool = False
    env: str = ""
    ip: int = 0
    release: str = "bookworm"
    mount: list[str] = field(default_factory=list)
    overlay: list[str] = field(default_factory=list)


def parse_spec(text: str) -> Spec:
    """Read ``NAME[:OPTION...]``; ``mount=SRC@DEST[@rw]`` and ``overlay=SRC@DEST`` may repeat."""
    name, *options = text.split(":")
    if not NAME_RE.fullmatch(name):
        raise UserError(f"host name {name!r}: lower-case letters, digits and dashes, at most 31, a letter first")
    spec = Spec(name)
    for option in options:
        key, eq, value = option.partition("=")
        if key in FLAGS and not eq:
            setattr(spec, key, True)
        elif key in ("mount", "overlay") and re.fullmatch(r"/[^@,]+@/[^@,]+(@rw)?", value):
            getattr(spec, key).append(value)
        elif key == "ip" and value.isdigit() and 2 <= int(value) <= 254:
            spec.ip = int(value)
        elif key in ("env", "release") and value:
            setattr(spec, key, value)
        else:
            known = ", ".join([*FLAGS, *(f"{v}=…" for v in VALUES)])
            raise UserError(f"host {name}: option {option!r} is not understood; options: {known}")
    return spec


@dataclass
class Host:
    """A host that was made, as the state file keeps it."""

    name: str
    prefix: str
    address: str
    backend: str
    user: str
    spec: Spec
    pid: int = 0

    @property
    def unit(self) -> str:
        """The name of its container, machine, netns and cgroup."""
        return f"{self.prefix}-{self.name}"

    def folder(self) -> Path:
        """Where its writable layers lie."""
        return state_dir(self.prefix) / self.name


def assign(prefix: str, subnet: ipaddress.IPv4Network, backend: str, specs: Sequence[Spec]) -> list[Host]:
    """Give every host its address: the wanted last octet, else the next free one from .11."""
    taken = {s.ip for s in specs if s.ip}
    if len({s.name for s in specs}) != len(specs) or len(taken) != sum(bool(s.ip) for s in specs):
        raise UserError("two hosts share a name or an address")
    free = (n for n in range(11, 255) if n not in taken)
    hosts = []
    for spec in specs:
        address = str(subnet.network_address + (spec.ip or next(free)))
        hosts.append(Host(spec.name, prefix, address, backend, "ops" if spec.ops else "root", spec))
    return hosts


# --- state ------------------------------------------------------------------------------------------------------------


def root_dir() -> Path:
    """The folder of all hosts' state."""
    return layers.cache_dir() / "hosts"


def state_dir(prefix: str) -> Path:
    """The folder of one prefix."""
    return root_dir() / prefix


def load(prefix: str) -> dict[str, Host]:
    """The hosts of one prefix by name; empty where there are none."""
    path = state_dir(prefix) / "state.json"
    if not path.is_file():
        return {}
    data = json.loads(path.read_text())
    return {h["name"]: Host(**{**h, "spec": Spec(**h["spec"])}) for h in data["hosts"]}


def load_subnet(prefix: str) -> str | None:
    """The subnet that a prefix was made with."""
    path = state_dir(prefix) / "state.json"
    return str(json.loads(path.read_text())["subnet"]) if path.is_file() else None


def store(prefix: str, subnet: str, hosts: dict[str, Host]) -> None:
    """Write state, inventory and ssh configuration of a prefix."""
    folder = state_dir(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "state.json": json.dumps({"subnet": subnet, "hosts": [asdict(h) for h in hosts.values()]}, indent=1),
        "inventory.yml": inventory(list(hosts.values())),
        "ssh_config": ssh_config(list(hosts.values())),
    }
    for name, text in texts.items():
        part = folder / f".{name}.part"
        part.write_text(text + "\n")
        part.replace(folder / name)


def prefixes() -> list[str]:
    """All prefixes that have state."""
    return sorted(p.parent.name for p in root_dir().glob("*/state.json"))


def resolve(name: str) -> Host:
    """Find a host by NAME, PREFIX/NAME or its container's name."""
    prefix, slash, short = name.rpartition("/")
    found = [
        host
        for p in prefixes()
        for host in load(p).values()
        if (slash and p == prefix and host.name == short) or (not slash and name in (host.name, host.unit))
    ]
    if len(found) != 1:
        names = ", ".join(f"{h.prefix}/{h.name}" for p in prefixes() for h in load(p).values()) or "none"
        raise UserError(f"{'no' if not found else 'more than one'} host named {name!r}; there are: {names}")
    return found[0]


def key_file() -> Path:
    """The key by which all hosts are reached; made on first use."""
    key = layers.cache_dir() / "ssh" / "id_ed25519"
    if not key.is_file():
        key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpufleet-test-hosts", "-f", key)
    return key


def inventory(hosts: Sequence[Host]) -> str:
    """An Ansible inventory with literal addresses (testinfra does not template)."""
    lines = ["---", "sglang:", "  vars:"]
    lines += [
        f"    ansible_ssh_private_key_file: {key_file()}",
        "    ansible_ssh_common_args: >-",
        "      -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
        "    ansible_python_interpreter: /usr/bin/python3",
        "  hosts:",
    ]
    lines += [f"    {h.name}:\n      ansible_host: {h.address}\n      ansible_user: {h.user}" for h in hosts]
    return "\n".join(lines)


def ssh_config(hosts: Sequence[Host]) -> str:
    """An ssh_config by which ``ssh -F FILE NAME`` reaches every host."""
    lines = []
    for h in hosts:
        lines += [f"Host {h.name} {h.address}", f"  HostName {h.address}", f"  User {h.user}"]
    lines += [
        "Host *",
        f"  IdentityFile {key_file()}",
        "  IdentitiesOnly yes",
        "  StrictHostKeyChecking no",
        "  UserKnownHostsFile /dev/null",
        "  LogLevel ERROR",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let only one call at a time change a prefix (or set the machine up)."""
    root_dir().mkdir(parents=True, exist_ok=True)
    with (root_dir() / f".{name}.lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another call is busy with {name}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- what the hosts take from this machine ----------------------------------------------------------------------------


def pip_settings(listing: str) -> tuple[str, list[str]]:
    """Turn ``pip config list`` into a pip.conf for the hosts, and name the local paths that it refers to."""
    values: dict[str, str] = {}
    for line in listing.splitlines():
        key, eq, value = line.partition("=")
        if not eq or not key.startswith(("global.", "install.", ":env:.")):
            continue
        option = key.rsplit(".", 1)[1]
        if option in ("disable-pip-version-check", "config-file", "cache-dir", "no-cache-dir", "user"):
            continue
        values[option] = value.strip().strip("'\"").replace("\\n", " ")
    text = "[global]\n" + "".join(f"{k} = {v}\n" for k, v in values.items())
    words = [w for v in values.values() for w in v.split()]
    paths = [w.removeprefix("file://") for w in words if w.startswith(("/", "file:///"))]
    return text, paths


def minimal(paths: Sequence[str]) -> list[str]:
    """Drop paths that lie inside another of them."""
    ordered = sorted({os.path.normpath(p) for p in paths})
    return [p for p in ordered if not any(p != q and p.startswith(q + "/") for q in ordered)]


def registry_binds(prefix: str) -> list[Bind]:
    """The machine's own ways to its package registries: pip and apt settings and the CA bundle, read at run time."""
    folder = state_dir(prefix) / "registry"
    folder.mkdir(parents=True, exist_ok=True)
    pip = shutil.which("pip") or shutil.which("pip3")
    listing = run(pip, "config", "list", check=False) if pip else ""
    text, paths = pip_settings(listing)
    (folder / "pip.conf").write_text(text)
    binds = [Bind(str(folder / "pip.conf"), "/etc/pip.conf")]
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    # a simple index on disk points with ../files at its neighbour: the folder above it is mounted
    wanted = [str(Path(p).parent) if p.rstrip("/").endswith("/simple") else p for p in paths]
    binds += [Bind(p, p) for p in minimal([str(bundle), *wanted]) if os.path.exists(p)]
    for conf in sorted(Path("/etc/apt/apt.conf.d").glob("*")):
        if re.search(r"^\s*Acquire::(?!Languages|Gzip)", conf.read_text(errors="replace"), re.M | re.I):
            binds.append(Bind(str(conf), str(conf)))
    return binds


def uplink_mtu() -> str:
    """The MTU of the default route's device: a bridge with a larger one loses large packets silently."""
    found = re.search(r"dev (\S+)", run("ip", "-4", "route", "show", "default", check=False))
    device = Path(f"/sys/class/net/{found[1]}/mtu") if found else None
    return device.read_text().strip() if device and device.is_file() else "1500"


def free_subnet() -> ipaddress.IPv4Network:
    """A /24 that no other prefix and no interface of this machine uses."""
    used = [ipaddress.ip_network(s) for s in map(load_subnet, prefixes()) if s]
    routes = run("ip", "-4", "route", "show", check=False)
    used += [ipaddress.ip_network(n) for n in re.findall(r"^(\d+\.\d+\.\d+\.\d+/\d+)", routes, re.M)]
    for n in range(1, 255):
        net = ipaddress.IPv4Network(f"10.90.{n}.0/24")
        if not any(net.overlaps(u) for u in used):
            return net
    raise UserError("no free subnet in 10.90.0.0/16; give --subnet")


def overlay_mount(lower: str, folder: Path) -> str:
    """Mount ``lower`` with a writable layer kept in ``folder``; returns the merged path."""
    for name in ("upper", "work", "merged"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    merged = folder / "merged"
    if not os.path.ismount(merged):
        # the merged root shows the upper's own attributes
        top = os.stat(lower.split(":", 1)[0])
        os.chown(folder / "upper", top.st_uid, top.st_gid)
        os.chmod(folder / "upper", top.st_mode & 0o7777)
        options = f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", options, merged)
    return str(merged)


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder, deepest first."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((m for m in mounts if m == str(folder) or m.startswith(f"{folder}/")), reverse=True):
        if not ok("umount", point):
            run("umount", "--lazy", point)


def binds_of(host: Host) -> list[Bind]:
    """Make the mounts of one host and say where they go."""
    spec = host.spec
    binds = [] if spec.offline else registry_binds(host.prefix)
    key = key_file().with_suffix(".pub")
    home = "/home/ops" if spec.ops else "/root"
    binds.append(Bind(str(key), f"{home}/.ssh/authorized_keys"))
    if spec.ops:
        conf = state_dir(host.prefix) / "no-root-login.conf"
        conf.write_text("PermitRootLogin no\nPasswordAuthentication no\n")
        binds.append(Bind(str(conf), "/etc/ssh/sshd_config.d/10-no-root.conf"))
    if spec.env:
        merged = overlay_mount(layers.find(spec.env).lowerdir(), host.folder() / "env")
        binds.append(Bind(merged, layers.VENV, writable=True))
    if spec.models:
        models = layers.cache_dir() / "models"
        binds += [Bind(str(m), f"/models/{m.name}") for m in sorted(models.iterdir()) if m.is_dir()]
    for i, text in enumerate(spec.overlay):
        source, target = text.split("@")[:2]
        binds.append(Bind(overlay_mount(source, host.folder() / f"overlay{i}"), target, writable=True))
    for text in spec.mount:
        source, target, *rw = text.split("@")
        binds.append(Bind(source, target, writable=bool(rw)))
    for bind in binds:
        if not os.path.exists(bind.source):
            raise UserError(f"host {host.name}: {bind.source} does not exist")
    return binds


# --- backends ---------------------------------------------------------------------------------------------------------


class Podman:
    """Hosts as privileged podman containers."""

    name = "podman"

    @staticmethod
    def networks(prefix: str) -> list[str]:
        """The networks of a prefix: one, or more after a crash."""
        return run("podman", "network", "ls", "-q", "--filter", f"label=gpufleet={prefix}", check=False).split()

    def network(self, prefix: str, subnet: str) -> None:
        """Make the prefix's own bridge."""
        existing = self.networks(prefix)
        if len(existing) == 1 and subnet in run("podman", "network", "inspect", existing[0]):
            return
        self.network_down(prefix, subnet)
        # a new name each time: podman keeps the addresses of killed hosts as taken, by network name
        name = f"gpufleet-{prefix}-{time.time_ns() // 1000000 % 0xFFFFFF:06x}"
        options = ("--disable-dns", "--opt", f"mtu={uplink_mtu()}", "--subnet", subnet, "--label", f"gpufleet={prefix}")
        run("podman", "network", "create", *options, name)

    def network_down(self, prefix: str, subnet: str) -> None:
        """Remove the bridge, also where its containers were killed."""
        for name in self.networks(prefix):
            found = re.search(r'"network_interface": "(\S+)"', run("podman", "network", "inspect", name, check=False))
            run("podman", "network", "rm", "-f", name, check=False)
            if found and ok("ip", "link", "show", found[1]):
                run("ip", "link", "del", found[1], check=False)

    def alive(self, host: Host) -> bool:
        """Whether the host runs."""
        # podman believes in a container whose monitor was killed; its process decides
        pid = run("podman", "inspect", "-f", "{{.State.Pid}}", host.unit, check=False)
        with contextlib.suppress(OSError):
            return pid.isdigit() and b"systemd" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def start(self, host: Host, binds: Sequence[Bind], peers: Sequence[Host]) -> None:
        """Start one host; returns before its systemd is ready."""
        argv = ["podman", "run", "-d", "--name", host.unit, "--hostname", host.name, "--privileged", "--systemd=always"]
        argv += ["--network", self.networks(host.prefix)[0], "--ip", host.address, "--label", f"gpufleet={host.prefix}"]
        argv += [f"--add-host={p.name}:{p.address}" for p in peers]
        argv += [f"--volume={b.source}:{b.target}:{'rw' if b.writable else 'ro'}" for b in binds]
        run(*argv, f"{IMAGE}:{host.spec.release}")
        if host.spec.offline:
            run("podman", "exec", host.unit, "ip", "route", "del", "default", check=False)

    def argv(self, host: Host, command: Sequence[str], interactive: bool = False) -> list[str]:
        """The command line that runs a command in the host."""
        flags = ["-i"] if interactive else []
        if interactive and sys.stdin.isatty():
            flags.append("-t")
        return ["podman", "exec", *flags, host.unit, *command]

    def stop(self, host: Host) -> None:
        """Stop and remove the host."""
        if ok("podman", "container", "exists", host.unit):
            run("podman", "rm", "-f", "-t", "3" if self.alive(host) else "0", host.unit, check=False)


class Nspawn:
    """Hosts by systemd-nspawn on an overlay: here ``LoadCredential=`` works."""

    name = "nspawn"

    @staticmethod
    def bridge(prefix: str) -> str:
        """Interface names have at most 15 characters."""
        return "gf" + hashlib.sha256(prefix.encode()).hexdigest()[:8]

    @staticmethod
    def rule(prefix: str, subnet: str) -> list[str]:
        """The NAT rule of the prefix, as iptables takes it."""
        return ["POSTROUTING", "-s", subnet, "!", "-o", Nspawn.bridge(prefix), "-j", "MASQUERADE"]

    @staticmethod
    def cgroup(host: Host) -> Path:
        """A cgroup of its own per host, or all hosts fight over one system.slice."""
        return Path("/sys/fs/cgroup") / f"gpufleet-{host.unit}"

    @staticmethod
    def base(release: str) -> Path:
        """The host image as a folder, unpacked once per image."""
        image = run("podman", "image", "inspect", "-f", "{{.Id}}", f"{IMAGE}:{release}")
        folder = layers.cache_dir() / "nspawn" / image[:12]
        if not folder.is_dir():
            say(f"unpacking {IMAGE}:{release} for nspawn")
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            box = run("podman", "create", f"{IMAGE}:{release}")
            try:
                with subprocess.Popen(["podman", "export", box], stdout=subprocess.PIPE) as export:
                    subprocess.run(["tar", "-x", "-C", str(part)], stdin=export.stdout, check=True)
            finally:
                run("podman", "rm", "-f", box, check=False)
            part.rename(folder)
        return folder

    def network(self, prefix: str, subnet: str) -> None:
        """Make the prefix's own bridge, with NAT to the outside."""
        bridge, net = self.bridge(prefix), ipaddress.IPv4Network(subnet)
        if not ok("ip", "link", "show", bridge):
            run("ip", "link", "add", bridge, "mtu", uplink_mtu(), "type", "bridge")
            run("ip", "addr", "add", f"{net.network_address + 1}/{net.prefixlen}", "dev", bridge)
            run("ip", "link", "set", bridge, "up")
        run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        if not ok("iptables", "-t", "nat", "-C", *self.rule(prefix, subnet)):
            run("iptables", "-t", "nat", "-A", *self.rule(prefix, subnet))

    def network_down(self, prefix: str, subnet: str) -> None:
        """Remove bridge and NAT."""
        run("iptables", "-t", "nat", "-D", *self.rule(prefix, subnet), check=False)
        run("ip", "link", "del", self.bridge(prefix), check=False)

    def leader(self, host: Host) -> int:
        """The host's PID 1 as this machine sees it; 0 where there is none."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            if host.unit.encode() in Path(f"/proc/{host.pid}/cmdline").read_bytes():
                return int(Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()[0])
        return 0

    def alive(self, host: Host) -> bool:
        """Whether the host runs."""
        return bool(host.pid and self.leader(host))

    def start(self, host: Host, binds: Sequence[Bind], peers: Sequence[Host]) -> None:
        """Start one host; returns before its systemd is ready."""
        folder, unit = host.folder(), host.unit
        root = Path(overlay_mount(str(self.base(host.spec.release)), folder / "root"))
        (root / "etc/machine-id").write_text("")
        (root / "etc/hostname").write_text(host.name + "\n")
        lines = [f"{p.address} {p.name}" for p in peers]
        (root / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        gateway = str(ipaddress.IPv4Network(f"{host.address}/24", strict=False).network_address + 1)
        veth = "gv" + hashlib.sha256(unit.encode()).hexdigest()[:8]
        run("ip", "netns", "del", unit, check=False)
        run("ip", "netns", "add", unit)
        run("ip", "link", "add", veth, "mtu", uplink_mtu(), "type", "veth", "peer", "name", "eth0", "netns", unit)
        run("ip", "link", "set", veth, "master", self.bridge(host.prefix), "up")
        run("ip", "-n", unit, "link", "set", "lo", "up")
        run("ip", "-n", unit, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("ip", "-n", unit, "link", "set", "eth0", "mtu", uplink_mtu(), "up")
        if not host.spec.offline:
            run("ip", "-n", unit, "route", "add", "default", "via", gateway)
        self.cgroup(host).mkdir(exist_ok=True)
        argv = ["systemd-nspawn", "-q", f"--directory={root}", f"--machine={unit}", f"--hostname={host.name}", "--boot"]
        argv += ["--register=no", "--keep-unit", f"--network-namespace-path=/run/netns/{unit}"]
        argv += ["--resolv-conf=copy-host", "--link-journal=no", "--console=pipe", "--timezone=off"]
        argv += [f"--bind{'' if b.writable else '-ro'}={b.source}:{b.target}" for b in binds]
        join = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(self.cgroup(host)), *argv]
        with (folder / "console.log").open("wb") as log:
            child = subprocess.Popen(
                join, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        host.pid = child.pid
        deadline = time.monotonic() + 10
        while not self.leader(host):
            if child.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"host {host.name} did not start: {(folder / 'console.log').read_text()[-400:]}")
            time.sleep(0.05)

    def argv(self, host: Host, command: Sequence[str], interactive: bool = False) -> list[str]:
        """The command line that runs a command in the host, with a clean environment."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        inside = ["env", "-i", path, "HOME=/root", "LANG=C.UTF-8", *command]
        return ["nsenter", "-t", str(self.leader(host)), "-a", "--", *inside]

    def stop(self, host: Host) -> None:
        """Power the host off and remove all that was made for it."""
        leader = self.leader(host)
        if leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGRTMIN + 4)
            for pid, sig in ((host.pid, None), (leader, signal.SIGKILL), (host.pid, signal.SIGKILL)):
                if sig is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sig)
                for _ in range(60 if sig is None else 20):
                    if not self.leader(host):
                        break
                    time.sleep(0.1)
        run("ip", "netns", "del", host.unit, check=False)
        group = self.cgroup(host)
        if group.is_dir():
            for path in [*sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True), group]:
                for _ in range(20):
                    try:
                        path.rmdir()
                        break
                    except OSError:
                        time.sleep(0.05)


Backend = Podman | Nspawn
BACKENDS: dict[str, Backend] = {"podman": Podman(), "nspawn": Nspawn()}


# --- commands ---------------------------------------------------------------------------------------------------------


def recipe(release: str) -> str:
    """Hash of what goes into the host image."""
    return hashlib.sha256(release.encode() + (HERE / "Containerfile").read_bytes()).hexdigest()[:12]


def apt_sources(release: str) -> str | None:
    """The machine's own Debian sources, for the wanted release; None lets mmdebstrap use its default."""
    os_release = Path("/etc/os-release").read_text()
    own = re.search(r"^VERSION_CODENAME=(\w+)", os_release, re.M)
    if not own or not re.search(r"^ID=debian$", os_release, re.M):
        return None
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if path.is_file() and re.search(r"^(deb|URIs:)", path.read_text(), re.M):
            lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
            return "\n".join(lines).replace(own[1], release) + "\n"
    return None


def setup(release: str = "bookworm") -> None:
    """Install the tools and build the image, where they are missing."""
    with locked("setup"):
        missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
        if missing:
            if not shutil.which("apt-get"):
                raise UserError(f"these are needed and apt-get is not here to install them: {', '.join(missing)}")
            say(f"installing {', '.join(missing)}")
            env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
            extra = ["uidmap", "aardvark-dns"] if "podman" in missing else []
            for argv in (["update", "-qq"], ["install", "-yqq", "--no-install-recommends", *missing, *extra]):
                done = subprocess.run(["apt-get", *argv], env=env, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise UserError(f"apt-get {argv[0]}: {done.stderr.strip()[-600:]}")
        label = run(
            "podman", "image", "inspect", "-f", '{{index .Labels "gpufleet.recipe"}}', f"{IMAGE}:{release}", check=False
        )
        if label == recipe(release):
            return
        if not ok("podman", "image", "exists", f"{BASE}:{release}"):
            say(f"making a Debian {release} base image with mmdebstrap (about half a minute)")
            bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"]
            bootstrap += ['--aptopt=Acquire::Languages "none"', release, "-"]
            sources = apt_sources(release)
            with subprocess.Popen(
                [*bootstrap, "-"] if sources else bootstrap, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as made:
                assert made.stdin and made.stdout
                made.stdin.write((sources or "").encode())
                made.stdin.close()
                argv = ["podman", "import", "--quiet", "-", f"{BASE}:{release}"]
                taken = subprocess.run(argv, stdin=made.stdout, capture_output=True, text=True, check=False)
            if made.returncode or taken.returncode:
                run("podman", "rmi", "-f", f"{BASE}:{release}", check=False)
                raise UserError(
                    f"no base image: mmdebstrap rc {made.returncode}; podman: {taken.stderr.strip()[-400:]}"
                )
        say("building the host image (about 20 s)")
        argv = ["podman", "build", "--quiet", "--pull=never", "--isolation=chroot", "--network=host"]
        argv += ["--label", f"gpufleet.recipe={recipe(release)}", "--build-arg", f"BASE={BASE}:{release}"]
        run(*argv, "-t", f"{IMAGE}:{release}", "-f", HERE / "Containerfile", HERE)


def ready(host: Host) -> bool:
    """Whether systemd is through its start and sshd answers with its banner."""
    backend = BACKENDS[host.backend]
    state = run(*backend.argv(host, ["systemctl", "is-system-running"]), check=False)
    if state not in ("running", "degraded"):
        return False
    return ok(*backend.argv(host, ["bash", "-c", 'exec 3<>/dev/tcp/127.0.0.1/22 && read -t2 -r b <&3 && [ -n "$b" ]']))


def wait(hosts: Sequence[Host], timeout: float = 90) -> None:
    """Wait until all hosts are ready; polls, since ``--wait`` fails before the bus exists."""
    deadline = time.monotonic() + timeout
    pending = list(hosts)
    while pending:
        pending = [h for h in pending if not ready(h)]
        if not pending:
            return
        for host in pending:
            if not BACKENDS[host.backend].alive(host):
                raise UserError(f"host {host.name} is not running")
        if time.monotonic() > deadline:
            raise UserError(f"not ready after {timeout:.0f} s: {', '.join(h.name for h in pending)}")
        time.sleep(0.15)


def remove(host: Host) -> None:
    """Stop one host and remove its layers."""
    BACKENDS[host.backend].stop(host)
    unmount_below(host.folder())
    shutil.rmtree(host.folder(), ignore_errors=True)


def up(prefix: str, subnet_text: str | None, backend_name: str, specs: Sequence[Spec]) -> None:
    """Bring the prefix to exactly these hosts: those already as asked stay, others are replaced or removed."""
    if not NAME_RE.fullmatch(prefix):
        raise UserError(f"prefix {prefix!r}: lower-case letters, digits and dashes, a letter first")
    for release in sorted({s.release for s in specs}):
        setup(release)
    environments = sorted({s.env for s in specs if s.env})
    if environments or any(s.models for s in specs):
        import build_env

        build_env.ensure(environments)
    backend = BACKENDS[backend_name]
    start = time.monotonic()
    with locked(prefix):
        with locked("subnets"):
            old = load(prefix)
            known = load_subnet(prefix)
            subnet = ipaddress.IPv4Network(subnet_text or known or str(free_subnet()))
            if subnet.prefixlen != 24:
                raise UserError(f"subnet {subnet}: a /24 is needed")
            if known and known != str(subnet):
                down_locked(prefix)
                old = {}
            for other in prefixes():
                taken = load_subnet(other)
                if other != prefix and taken and subnet.overlaps(ipaddress.IPv4Network(taken)):
                    raise UserError(f"subnet {subnet} is used by prefix {other} (hosts.py down --prefix {other})")
            hosts = assign(prefix, subnet, backend_name, specs)
            store(prefix, str(subnet), old)
        current: dict[str, Host] = {}
        made: list[Host] = []
        try:
            for host in old.values():
                wanted = any(replace(h, pid=host.pid) == host for h in hosts)
                if wanted and BACKENDS[host.backend].alive(host):
                    current[host.name] = host
                else:
                    remove(host)
            if old and not current:
                BACKENDS["podman"].network_down(prefix, str(subnet))
            backend.network(prefix, str(subnet))
            for host in hosts:
                if host.name in current:
                    continue
                remove(host)  # what a killed call may have left
                made.append(host)
                backend.start(host, binds_of(host), hosts)
                current[host.name] = host
                store(prefix, str(subnet), current)
            ordered = {h.name: current[h.name] for h in hosts}
            store(prefix, str(subnet), ordered)
            wait(list(ordered.values()))
        except BaseException:
            say("cleaning up what this call made")
            for host in made:
                remove(host)
                current.pop(host.name, None)
            if current:
                store(prefix, str(subnet), current)
            else:
                down_locked(prefix)
            raise
    for host in ordered.values():
        kept = "" if host in made else " (was up)"
        print(f"{host.name} {host.address} {host.user}{kept}")
    say(f"{len(made)} made in {time.monotonic() - start:.1f} s; inventory: {state_dir(prefix) / 'inventory.yml'}")


def down_locked(prefix: str) -> None:
    """Remove all of a prefix; the caller holds its lock."""
    subnet = load_subnet(prefix)
    hosts = list(load(prefix).values())
    for host in hosts:
        remove(host)
    if shutil.which("podman"):
        # containers without state: a call that was killed between run and store
        left = run("podman", "ps", "-aq", "--filter", f"label=gpufleet={prefix}", check=False).split()
        if left:
            run("podman", "rm", "-f", "-t", "3", *left)
        BACKENDS["podman"].network_down(prefix, subnet or "")
    if subnet:
        BACKENDS["nspawn"].network_down(prefix, subnet)
    unmount_below(state_dir(prefix))
    shutil.rmtree(state_dir(prefix), ignore_errors=True)


def down(prefix: str) -> None:
    """Remove all of a prefix."""
    with locked(prefix):
        down_locked(prefix)
    (root_dir() / f".{prefix}.lock").unlink(missing_ok=True)


def clean(caches: bool) -> None:
    """Remove all hosts and images, and on request the caches."""
    for prefix in prefixes():
        say(f"removing the hosts of {prefix}")
        down(prefix)
    if shutil.which("podman"):
        images = run("podman", "images", "-q", "--filter", f"reference={IMAGE}", "--filter", f"reference={BASE}")
        if images:
            run("podman", "rmi", "-f", *sorted(set(images.split())), check=False)
    if caches and layers.cache_dir().is_dir():
        say(f"removing {layers.cache_dir()}")
        unmount_below(layers.cache_dir())
        shutil.rmtree(layers.cache_dir())


def listing() -> None:
    """Print a line per host."""
    for prefix in prefixes():
        for host in load(prefix).values():
            alive = "up" if BACKENDS[host.backend].alive(host) else "dead"
            print(f"{prefix}/{host.name} {host.address} {host.user} {host.backend} {alive} {host.spec.env}".rstrip())


def enter_cg2(may_end: bool) -> None:
    """Start again under cg2: all mounts and containers live in its namespace."""
    if os.geteuid() != 0:
        raise UserError("root is needed to make hosts (mount, network and cgroup work)")
    if os.environ.get("GPUFLEET_IN_CG2") == "1":
        return
    env = dict(os.environ, GPUFLEET_IN_CG2="1", CONTAINERS_CONF=str(HERE / "containers.conf"))
    argv = [str(CG2), sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    if not may_end:
        os.execve(CG2, argv, env)
    # the namespace can only be given up from outside
    with subprocess.Popen(argv, env=env) as child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: child.send_signal(got))
        rc = child.wait()
    if not prefixes():
        ok(CG2, "--end")
    sys.exit(rc)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = top.add_subparsers(dest="command", required=True)
    p = sub.add_parser("setup", help="install the tools, build the image")
    p.add_argument("--release", default="bookworm")
    p = sub.add_parser("up", help="make the hosts of a prefix")
    p.add_argument("--prefix", required=True)
    p.add_argument("--subnet", help="a /24; default: the prefix's own, else a free one")
    p.add_argument("--backend", choices=sorted(BACKENDS), default="podman")
    p.add_argument("specs", nargs="+", metavar="NAME[:OPTION...]")
    p = sub.add_parser("exec", help="run a command in a host as root")
    p.add_argument("name")
    p.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD")
    for name, text in (
        ("wait", "wait until all hosts of a prefix are ready"),
        ("inventory", "print the prefix's Ansible inventory"),
        ("ssh-config", "print the prefix's ssh configuration"),
    ):
        p = sub.add_parser(name, help=text)
        p.add_argument("--prefix", required=True)
    p = sub.add_parser("down", help="remove the hosts of a prefix and all that belongs to them")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--prefix")
    which.add_argument("--all", action="store_true")
    sub.add_parser("list", help="a line per host")
    p = sub.add_parser("clean", help="remove all hosts and images")
    p.add_argument("--caches", action="store_true", help="and the cache folder with the built environments")
    return top


def main() -> int:
    """Run one command."""
    args = parser().parse_args()
    if args.command in ("inventory", "ssh-config"):
        if args.prefix not in prefixes():
            raise UserError(f"no hosts with prefix {args.prefix!r}")
        file = "inventory.yml" if args.command == "inventory" else "ssh_config"
        print((state_dir(args.prefix) / file).read_text(), end="")
        return 0
    enter_cg2(may_end=args.command in ("up", "down", "clean"))
    if args.command == "setup":
        setup(args.release)
    elif args.command == "up":
        up(args.prefix, args.subnet, args.backend, [parse_spec(s) for s in args.specs])
    elif args.command == "exec":
        command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
        if not command:
            raise UserError("exec: which command?")
        host = resolve(args.name)
        if not BACKENDS[host.backend].alive(host):
            raise UserError(f"host {host.name} is not running")
        argv = BACKENDS[host.backend].argv(host, command, interactive=True)
        os.execvp(argv[0], argv)
    elif args.command == "wait":
        wait(list(load(args.prefix).values()))
    elif args.command == "down":
        for prefix in prefixes() if args.all else [args.prefix]:
            down(prefix)
    elif args.command == "list":
        listing()
    elif args.command == "clean":
        clean(args.caches)
    return 0


def interrupted(number: int, _frame: object) -> None:
    """Raise once; a second Ctrl-C must not stop the cleaning up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


if __name__ == "__main__":
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, interrupted)
    try:
        sys.exit(main())
    except UserError as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
