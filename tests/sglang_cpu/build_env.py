#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build, once and into the cache, the real environments that the tests mount into their hosts (needs root).

usage: build_env.py [NAME...]   NAME: sglang (0.5.23), sglang-0.5.9, …, torch, gpu-b, gpu-c, models; default: sglang

A layer is built at the path that it will have inside the hosts, by pip, in a mount namespace of its own where the
layers below are mounted read-only there: nothing of it is seen outside, and killing the build leaves no mount.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import make_tiny_model
from layers import HERE, OWNER_UID, PYTHON, SGLANG_VERSIONS, VENV, Layer, cache_dir, environments, find

# $1 scratch, $2 lowerdir or "", $3 upper, $4 work; the rest is the command
NAMESPACE = r"""
set -e
s=$1 lower=$2 upper=$3 work=$4; shift 4
mkdir -p /opt
mount -t tmpfs -o mode=755 tmpfs "$s"
mkdir "$s/u" "$s/w" "$s/hold"
mount --bind "$(dirname "$upper")" "$s/hold"
mount -t overlay overlay -o "lowerdir=/opt,upperdir=$s/u,workdir=$s/w" /opt
mkdir -p "$VENV"
if [ -n "$lower" ]; then mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work" "$VENV"
else mount --bind "$upper" "$VENV"; fi
exec "$@"
"""


def say(message: str) -> None:
    """One line for the person who waits."""
    print(f"[env] {message}", flush=True)


def need_root_and_python() -> None:
    """Stop with one clear line where nothing can be built; install the venv module where apt can."""
    if os.geteuid() != 0:
        sys.exit("build_env.py needs root (it mounts overlay file systems)")
    if (
        not Path(PYTHON).exists()
        or subprocess.run([PYTHON, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode
    ):
        if not shutil.which("apt-get"):
            sys.exit(f"build_env.py needs {PYTHON} with its venv module")
        say("installing python3.11-venv from the machine's apt sources")
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=env)
        subprocess.run(
            ["apt-get", "install", "-yqq", "--no-install-recommends", "python3.11-venv"], check=True, env=env
        )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; a second builder waits, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_logged(command: list[str], log: Path, what: str) -> None:
    """Run a command into a log, with a sign of life every 20 s; its process group dies with us."""
    env = dict(os.environ, VENV=VENV, PIP_DISABLE_PIP_VERSION_CHECK="1")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        start = time.monotonic()
        try:
            while True:
                try:
                    rc = child.wait(timeout=20)
                    break
                except subprocess.TimeoutExpired:
                    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
                    say(f"{what}: {time.monotonic() - start:.0f} s, {last[0].strip()[:90] if last else '…'}")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    if rc:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        sys.exit(f"{what} failed (rc {rc}); the end of {log}:\n{tail}")


def steps(layer: Layer) -> list[list[str]]:
    """The commands that fill one layer, seen from inside the namespace."""
    pip = [f"{VENV}/bin/python", "-m", "pip", "install", "--progress-bar", "off"]
    commands: list[list[str]] = []
    if layer.parent is None:
        commands.append([PYTHON, "-m", "venv", VENV])
    if layer.requirements:
        # without torch in the resolution's reach a dependency could replace the CPU build by the CUDA one
        commands.append([*pip, "-r", str(HERE / layer.requirements), "torch==2.13.0"])
    commands += [[*pip, *args] for args in layer.pip]
    if layer.shims:
        target = f"{VENV}/lib/python3.11/site-packages"
        commands.append(["cp", "-r", f"{HERE}/shims/sgl_kernel", f"{HERE}/shims/torchvision", target])
        commands.append(["chmod", "-R", "u+rwX,go+rX", f"{target}/sgl_kernel", f"{target}/torchvision"])
    return commands


def build(layer: Layer) -> None:
    """Build one layer whose parent is finished: into a scratch folder, renamed when whole."""
    final = layer.path()
    part = final.with_name(final.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "tree").mkdir(parents=True)
    (part / "work").mkdir()
    log = final.with_name(final.name + ".log")
    log.write_bytes(b"")
    lower = layer.parent.lowerdir() if layer.parent else ""
    say(f"building {layer.name} (log: {log})")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpufleet-env-") as scratch:
        for command in steps(layer):
            inside = ["sh", "-c", NAMESPACE, "sh", scratch, lower, str(part / "tree"), str(part / "work"), *command]
            run_logged(["unshare", "--mount", "--propagation", "private", *inside], log, layer.name)
    for path in [part / "tree", *(part / "tree").rglob("*")]:
        os.chown(path, OWNER_UID, OWNER_UID, follow_symlinks=False)
    shutil.rmtree(part / "work", ignore_errors=True)
    seconds = round(time.monotonic() - start, 1)
    (part / "done.json").write_text(json.dumps({"layer": layer.name, "seconds": seconds}) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    say(f"{layer.name} is ready: {seconds} s")


def ensure(names: list[str]) -> None:
    """Build what is missing of the named environments, and the tiny models beside them (``models``: only these)."""
    wanted = [find(name) for name in names if name != "models"]
    missing = [env for env in wanted if not env.built()]
    if missing:
        need_root_and_python()
        with locked(cache_dir() / "env" / ".lock"):
            for env in missing:
                for layer in env.stack():
                    if not (layer.path() / "done.json").is_file():
                        build(layer)
    for name, kind in make_tiny_model.MODELS.items():
        make_tiny_model.ensure(cache_dir() / "models" / name, kind)


def prune() -> None:
    """Remove the layers that no recipe names any more."""
    current = {layer.path().name for env in environments().values() for layer in env.stack()}
    with locked(cache_dir() / "env" / ".lock"):
        for path in sorted((cache_dir() / "env").iterdir()):
            if path.is_dir() and path.name not in current:
                say(f"removing {path.name}")
                shutil.rmtree(path)
                path.with_name(f"{path.name}.log").unlink(missing_ok=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments to build (default: sglang)")
    parser.add_argument("--prune", action="store_true", help="remove layers of older recipes (no host may use them)")
    parser.add_argument("--list", action="store_true", help="show the environments and whether they are built")
    parser.add_argument(
        "--sglang", choices=SGLANG_VERSIONS, action="append", default=[], help="another way to name a SGLang version"
    )
    args = parser.parse_args()
    if args.list:
        for name, env in environments().items():
            print(f"{name:16} {'built' if env.built() else 'missing':8} {env.path()}")
        return
    if args.prune:
        prune()
        return
    names = args.names + [f"sglang-{v}" for v in args.sglang]
    ensure(names or ["sglang"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
