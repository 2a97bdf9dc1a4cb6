# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: from a source to a proven DeepEP wheel in the host's cache, in steps that can be resumed.

Folders below the state folder: ``sources/<key>`` (fetched git trees), ``builds/<fingerprint>`` (a detached job and its
work), ``wheels/<fingerprint>`` (the product: wheel, manifest.json, build.log). Everything is decided again on each
call from what lies there, so that any call can be the first one after a crash.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _build_log,
    _deepep_preflight,
    _deepep_source,
    _detached,
    _distributions,
    _drop,
    _fingerprint,
    _gpus,
    _toolkits,
    _venv,
    _wheel_inspect,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run, run

DEFAULT_REPOSITORY = "https://github.com/deepseek-ai/DeepEP"
MANIFEST_SCHEMA = 1
PROOF_MARK = "GPUFLEET_PROOF "
POLL = 0.3

# Runs in the target venv's interpreter, as its owner: what a build needs to know of it, without importing torch.
_ASK_VENV = r"""
import importlib.machinery, importlib.metadata as m, importlib.util, json, os, sys, sysconfig
versions = {}
for name in ("setuptools", "wheel", "ninja", "pip", "sglang"):
    try:
        versions[name] = m.version(name)
    except m.PackageNotFoundError:
        versions[name] = None
try:
    import ensurepip
    bundled = [os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", f)
               for f in os.listdir(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled")) if
               f.startswith("pip-")]
except (ImportError, OSError):
    bundled = []
include = sysconfig.get_paths()["include"]
print(json.dumps({
    "tag": "cp%d%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""),
    "include": include, "headers": os.path.exists(os.path.join(include, "Python.h")),
    "site": [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]],
    "versions": versions, "ensurepip": bundled[:1],
}))
"""

# Runs as the owner: an own clean copy of the source, and the links that old revisions need.
_PREPARE = r"""
import json, os, shutil, sys, tarfile
job = json.loads(sys.argv[1])
work, source = job["work"], job["source"]
target = os.path.join(work, "src")
if os.path.isdir(target):
    shutil.rmtree(target)
if job["kind"] == "tarball":
    os.makedirs(target)
    with tarfile.open(source) as archive:
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        for member in archive.getmembers():
            name = os.path.normpath(member.name)
            if job["top"]:
                if name == job["top"]:
                    continue
                name = os.path.relpath(name, job["top"])
            if name.startswith(("..", "/")):
                raise SystemExit("the archive holds a path outside itself: " + member.name)
            member.name = name
            archive.extract(member, target, **options)
else:
    skipped = {"build", "dist", "__pycache__"} | (set() if job["kind"] == "git" else {".git"})
    def ignore(folder, names):
        top = os.path.normpath(folder) == os.path.normpath(source)
        made = (".egg-info", ".so", ".pyc")
        return [n for n in names if n == "__pycache__" or n.endswith(made) or (top and n in skipped)]
    shutil.copytree(source, target, symlinks=True, ignore=ignore)
lib = os.path.join(work, "overlay", "lib")
os.makedirs(lib, exist_ok=True)
for link in job["links"]:
    path = os.path.join(lib, link["name"])
    if os.path.lexists(path):
        os.unlink(path)
    os.symlink(link["target"], path)
    print("link", path, "->", link["target"])
for name in ("tmp", "home", "out"):
    os.makedirs(os.path.join(work, name), exist_ok=True)
print("source copied to", target)
"""

_FETCH = r"""
rm -rf "$3" && mkdir -p "$3" && cd "$3"
git init -q . && git remote add origin "$1"
if git fetch -q --depth 1 origin "$2"; then
    git checkout -q --detach FETCH_HEAD
else
    git fetch -q --tags origin '+refs/heads/*:refs/remotes/origin/*'
    git checkout -q --detach "$2"
fi
if [ -e .gitmodules ]; then
    git submodule update -q --init --recursive --depth 1 || echo "submodules could not be fetched" >&2
fi
git rev-parse HEAD
"""

# Runs as the owner, in the environment of the service: does the wheel's content import, from outside the source tree?
_PROVE = r"""
import json, os, sys, zipfile
job = json.loads(sys.argv[1])
site = job["site"]
if not os.path.isdir(site):
    os.makedirs(site)
    with zipfile.ZipFile(job["wheel"]) as archive:
        archive.extractall(site)
    for root in job["site_packages"]:
        # RUNPATHs are relative to site-packages: give the copy the neighbours that it will have there.
        if os.path.isdir(os.path.join(root, "nvidia")) and not os.path.lexists(os.path.join(site, "nvidia")):
            os.symlink(os.path.join(root, "nvidia"), os.path.join(site, "nvidia"))
os.chdir(job["empty"])
sys.path[:] = [site] + [entry for entry in sys.path if entry not in ("", job["empty"])]
result = {"ok": False, "error": None, "type": None, "name": None, "origin": None}
try:
    import importlib
    import torch
    import deep_ep
    result["origin"] = os.path.realpath(deep_ep.__file__)
    result["torch"] = torch.__version__
    for extension in job["extensions"]:
        importlib.import_module(extension)
    names = [name for name in ("Buffer", "ElasticBuffer", "HybridEPBuffer") if hasattr(deep_ep, name)]
    if not result["origin"].startswith(os.path.realpath(site) + os.sep):
        result["error"] = "deep_ep came from " + result["origin"]
    elif not names:
        result["error"] = "deep_ep has no Buffer"
    else:
        result["ok"] = True
        result["names"] = names
except BaseException as error:
    result["error"], result["type"], result["name"] = str(error)[:2000], type(error).__name__, getattr(error, "name",
    None)
print("GPUFLEET_PROOF " + json.dumps(result), flush=True)
"""

_IMPORT_CAUSES = (
    (
        "needs_gpu",
        r"libcuda\.so\.1: cannot open|no CUDA-capable device|CUDA driver version is insufficient|No CUDA GPUs",
        "driver",
    ),
    ("device_link_missing", r"undefined symbol: __cudaRegisterLinkedBinary", "wheel"),
    ("libstdcxx_mismatch", r"GLIBCXX_|CXXABI_|__exception_ptr|undefined symbol: _ZNSt15__exception_ptr", "libstdc++"),
    ("torch_abi_mismatch", r"undefined symbol: \S*(?:c10|at\d|torch|THP|2at)", "torch ABI"),
    ("nvshmem_mismatch", r"undefined symbol: nvshmem", "NVSHMEM"),
    ("kernels_missing", r"undefined symbol: _ZN7deep_ep", "wheel"),
    ("torch_abi_mismatch", r"undefined symbol", "torch ABI"),
    ("missing_system_lib", r"cannot open shared object file", "system library"),
    ("nccl_root_not_discoverable", r"Cannot find package: nccl", "NCCL"),
    ("host_check_failed", r"Duplicate NCCL|Invalid NCCL", "NCCL"),
)


class Refused(Exception):
    """The input cannot be used; ``code`` and the text say why, ``mend`` what to do."""

    def __init__(self, code: str, message: str, mend: str) -> None:
        super().__init__(message)
        self.code, self.mend = code, mend


def import_cause(error: Optional[str], kind: Optional[str]) -> dict[str, str]:
    """Return ``{code, layer, message}`` for a failed proof."""
    for code, pattern, layer in _IMPORT_CAUSES:
        if re.search(pattern, error or ""):
            return {"code": code, "layer": layer, "message": str(error)}
    return {
        "code": "import_failed",
        "layer": "wheel",
        "message": f"{kind or 'no result'}: {error or 'the interpreter ended'}",
    }


# --- looking ---------------------------------------------------------------------------------------------------------


def find_toolkits(context: Context, given: Optional[str], machine: str) -> list[dict[str, Any]]:
    """Return the CUDA toolkits of this host (``plan_build``'s ``toolkits``); ``given`` alone when it is set."""
    paths = [given] if given else _toolkits.candidates(context)
    if not given and shutil.which("nvcc"):
        home = os.path.dirname(os.path.dirname(os.path.realpath(str(shutil.which("nvcc")))))
        # A wrapper in /usr/local/bin is no toolkit: nothing lies beside it.
        if any(os.path.isdir(os.path.join(home, name)) for name in ("nvvm", "targets")):
            paths.append(home)
    toolkits = []
    for path in dict.fromkeys(paths):
        found = _toolkits.read_toolkit(context, path)
        found.update(_toolkit_parts(path, machine))
        # A wrapper beside nothing (/usr/local/bin/nvcc): its version says something, its folder does not.
        if given or found["headers"] or path == "/usr":
            toolkits.append(found)
    return toolkits


def _toolkit_parts(root: str, machine: str) -> dict[str, Any]:
    include = os.path.join(root, "include")
    target = os.path.dirname(os.path.dirname(_deepep_preflight.cccl_candidates(root, machine)[0]))
    cccl: Optional[str] = None
    if any(
        os.path.exists(os.path.join(folder, "cuda", "std", "tuple"))
        for folder in (include, os.path.join(target, "include"))
    ):
        cccl = ""
    else:
        for folder in _deepep_preflight.cccl_candidates(root, machine):
            if os.path.exists(os.path.join(folder, "cuda", "std", "tuple")):
                cccl = folder
                break
    folders = [os.path.join(root, "lib64"), os.path.join(root, "lib"), os.path.join(target, "lib")]
    stubs = [os.path.join(folder, "stubs") for folder in folders]
    return {
        "cccl": cccl,
        "cusparse": any(
            os.path.exists(os.path.join(f, "cusparse.h")) for f in (include, os.path.join(target, "include"))
        ),
        "stubs": next((folder for folder in stubs if os.path.exists(os.path.join(folder, "libcuda.so"))), None),
        "nvtx3interop": any(os.path.exists(os.path.join(folder, "libnvtx3interop.so")) for folder in folders),
    }


def find_package(name: str, site_packages: Sequence[str], given: Optional[str]) -> Optional[dict[str, Any]]:
    """Return NVSHMEM or NCCL as ``plan_build`` wants it: the given folder, else the wheel in the venv, else None."""
    root, version, major, origin = given, None, None, "given"
    if not root:
        for dist in _distributions.scan(site_packages):
            match = re.fullmatch(rf"nvidia-{name}-cu(\d+)", _distributions.canonical(dist.name))
            folder = os.path.join(os.path.dirname(dist.path), "nvidia", name)
            if match and os.path.isdir(os.path.join(folder, "lib")):
                root, version, major, origin = folder, dist.version, match.group(1), "venv"
                break
    if not root or not os.path.isdir(os.path.join(root, "lib")):
        return None
    libs = sorted(os.path.basename(item) for item in glob.glob(os.path.join(root, "lib", f"lib{name}*")))
    header = os.path.join(root, "include", "device_host_transport", "nvshmem_common_ibgda.h")
    return {
        "root": root,
        "version": version or _header_version(name, root),
        "cuda_major": major,
        "origin": origin,
        "libs": libs,
        "device_lib": "libnvshmem_device.a" in libs,
        "device_header": os.path.exists(os.path.join(root, "include", "nccl_device.h")) if name == "nccl" else True,
        "needs_mlx5dv": "mlx5dv.h" in (_read(header) or ""),
    }


def _header_version(name: str, root: str) -> Optional[str]:
    if name == "nccl":
        text = _read(os.path.join(root, "include", "nccl.h")) or ""
        parts = [re.search(rf"#define NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    else:
        text = "".join(
            _read(item) or ""
            for item in glob.glob(os.path.join(root, "include", "**", "nvshmem_version.h"), recursive=True)
        )
        parts = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(match.group(1) for match in parts if match) or None


def _read(path: str, limit: int = 1 << 20) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(limit)
    except OSError:
        return None


def _wheel_includes(site_packages: Sequence[str]) -> list[dict[str, Any]]:
    """The include folders of torch's CUDA wheels: one folder for CUDA 13, one a library for CUDA 12."""
    found = []
    for root in site_packages:
        for folder in sorted(glob.glob(os.path.join(root, "nvidia", "*", "include"))):
            has = [
                name
                for name, member in (
                    ("cccl", "cccl/cuda/std/tuple"),
                    ("cusparse", "cusparse.h"),
                    ("cublas", "cublas_v2.h"),
                    ("cusolver", "cusolverDn.h"),
                )
                if os.path.exists(os.path.join(folder, member))
            ]
            if has:
                found.append({"path": folder, "has": has})
    return found


def _memory_available() -> int:
    text = _read("/proc/meminfo") or ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    available = int(match.group(1)) * 1024 if match else 0
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        top, now = (_read(limit) or "").strip(), (_read(used) or "").strip()
        if top.isdigit() and now.isdigit() and int(top) < 1 << 60:
            available = min(available, max(0, int(top) - int(now)))
    return available


def _disk_free(path: str) -> int:
    while path and not os.path.isdir(path):
        path = os.path.dirname(path)
    info = os.statvfs(path or "/")
    return info.f_bavail * info.f_frsize


def _libcuda() -> dict[str, Optional[str]]:
    folders = [
        "/usr/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
    ]
    link = next((folder for folder in folders if os.path.exists(os.path.join(folder, "libcuda.so"))), None)
    library = next(
        (os.path.join(f, "libcuda.so.1") for f in folders if os.path.exists(os.path.join(f, "libcuda.so.1"))), None
    )
    return {"link": link, "library": library}


class Builder:
    """One wanted wheel on this host. ``want`` are the module's options; the methods are the steps of its ``main``."""

    def __init__(self, want: Mapping[str, Any], runner: Run = run) -> None:
        self.want = dict(want)
        self.run = runner
        self.state_dir = str(want["state_dir"])
        self.venv = _venv.read_venv(str(want["venv"]))
        self.identity: Optional[_drop.Identity] = None
        self.facts: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.fingerprint = ""
        self.parts: dict[str, Any] = {}
        self.source: dict[str, Any] = {}

    # -- the source

    def source_kind(self) -> str:
        return (
            "git"
            if self.want.get("source_url")
            else ("tarball" if os.path.isfile(str(self.want.get("source_path") or "")) else "folder")
        )

    def resolve_source(self) -> dict[str, Any]:
        """Say which source is meant, without changing anything: ``{kind, location, revision, ready, tree|None, top,
        key}``.

        Raises Refused for a source that cannot be used.
        """
        path, url = self.want.get("source_path"), self.want.get("source_url")
        if path and url:
            raise Refused("source_ambiguous", "source_path and source_url are both set", "set one of them")
        if path:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise Refused(
                    "source_absent",
                    f"source_path: there is no {path} on this host",
                    "give an absolute path on the host",
                )
            if os.path.isdir(path):
                tree = _deepep_source.FolderTree(path)
                return {
                    "kind": "folder",
                    "location": path,
                    "revision": "tree-" + tree.digest()[:16],
                    "ready": True,
                    "tree": tree,
                    "top": "",
                }
            try:
                archive = _deepep_source.TarTree(path)
            except (OSError, EOFError, _deepep_source.tarfile.TarError) as error:
                raise Refused(
                    "source_unreadable",
                    f"source_path: {path} is no tar archive: {error}",
                    "give a tar archive or a folder",
                ) from None
            revision = "tar-" + _wheel_inspect.sha256(path)[:16]
            return {
                "kind": "tarball",
                "location": path,
                "revision": revision,
                "ready": True,
                "tree": archive,
                "top": archive.top,
            }
        return self._resolve_git(str(url or DEFAULT_REPOSITORY))

    def _resolve_git(self, url: str) -> dict[str, Any]:
        if re.match(r"\w+://[^/@]*:[^/@]*@", url):
            raise Refused(
                "source_url_has_password",
                "source_url holds a password, which would end up in logs",
                "use ssh or a credential helper of the venv's owner",
            )
        if url.startswith("-") or (":" not in url and not url.startswith("/")):
            raise Refused(
                "source_url_invalid",
                f"source_url: {url!r} is no git URL",
                "for a folder or a tarball on the host use source_path",
            )
        wanted = self.want.get("revision")
        why = "given"
        if not wanted:
            wanted, why = _deepep_source.pinned_revision((self.facts.get("versions") or {}).get("sglang"))
        wanted = str(wanted)
        if wanted.startswith("-") or not re.fullmatch(r"[\w./+-]+", wanted):
            raise Refused(
                "revision_invalid", f"revision: {wanted!r} is no git revision", "give a commit, tag or branch"
            )
        known = [commit for commit in _deepep_source.KNOWN_REVISIONS if len(wanted) >= 7 and commit.startswith(wanted)]
        revision: Optional[str] = (
            known[0] if len(known) == 1 else (wanted if re.fullmatch(r"[0-9a-f]{40}", wanted) else None)
        )
        if revision is None:
            # A name can move: ask. An abbreviated commit cannot be asked for; the fetch finds it.
            answer = self.run_as(["git", "ls-remote", "--", url, wanted, f"{wanted}^{{}}"], 40, self._git_environment())
            commits = dict(reversed(line.split("\t", 1)) for line in answer.stdout.splitlines() if "\t" in line)
            peeled = [commit for name, commit in commits.items() if name.endswith("^{}")]
            revision = peeled[0] if peeled else next(iter(commits.values()), None)
        key = hashlib.sha256(f"{url}\n{revision or wanted}".encode()).hexdigest()[:16]
        folder = os.path.join(self.state_dir, "sources", key)
        done = _detached.read_json(os.path.join(folder, "source.json"))
        ready = bool(done) and os.path.isdir(os.path.join(folder, "tree"))
        tree = _deepep_source.FolderTree(os.path.join(folder, "tree")) if ready else None
        if done and ready:
            revision = done.get("revision") or revision
        return {
            "kind": "git", "location": url, "revision": revision or wanted, "wanted": wanted, "why": why,
            "ready": ready, "tree": tree, "top": "", "folder": folder,
        }  # fmt: skip

    def _git_environment(self) -> dict[str, str]:
        return {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=15"}

    def fetch_job(self) -> tuple[str, dict[str, Any]]:
        """Return the job folder and spec that bring a git source."""
        folder = self.source["folder"]
        tree = os.path.join(folder, "tree")
        argv = ["/bin/sh", "-euc", _FETCH, "fetch", self.source["location"], self.source["revision"], tree]
        return folder, {
            "id": os.path.basename(folder),
            "time_limit": min(float(self.want["time_limit"]), 1800),
            "heartbeat": 2,
            "steps": [
                {
                    "name": "fetch",
                    "argv": argv,
                    "env": self.environment(self._git_environment()),
                    "cwd": folder,
                    "user": self.user,
                }
            ],
        }

    def finish_fetch(self) -> None:
        """Note the revision that a finished fetch brought."""
        folder = self.source["folder"]
        commits = [line for line in _detached.log_lines(folder) if re.fullmatch(r"[0-9a-f]{40}", line)]
        _detached.write_json(
            os.path.join(folder, "source.json"),
            {"url": self.source["location"], "revision": commits[-1] if commits else None},
        )

    # -- looking

    @property
    def user(self) -> Optional[str]:
        return self.identity.name if self.identity and os.geteuid() == 0 and self.identity.uid != 0 else None

    def owner(self) -> _drop.Identity:
        """The venv's owner; known once the facts are."""
        if self.identity is None:
            raise RuntimeError("the owner of the venv is not known yet")
        return self.identity

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        return _drop.environment(self.owner(), extra=extra)

    def run_as(self, argv: Sequence[str], timeout: float, extra: Mapping[str, str]) -> Any:
        return _drop.run_as(self.owner(), argv, timeout, self.environment(extra))

    def look(self) -> None:
        """Fill ``facts`` and ``identity``. Reads only. Raises Refused where nothing can be said."""
        if self.venv["state"] == "ok":
            self.identity = self._owner()
        self.facts = {"venv": self.venv, "machine": platform.machine(), "libc": _venv.libc(), "os_family": _os_family()}
        if self.identity is None:
            return
        site = list(self.venv["site_packages"])
        about = self._ask_venv()
        self.facts.update(
            torch=_distributions.torch_version(site),
            python={"tag": about["tag"], "headers": about["headers"], "include": about["include"]},
            versions=about["versions"],
            site_packages=site,
            nvshmem=find_package("nvshmem", site, self.want.get("nvshmem_dir")),
            nccl=find_package("nccl", site, self.want.get("nccl_dir")),
            wheel_include=_wheel_includes(site),
            compiler=self._compiler(),
            tools=self._tools(about["versions"]),
            pip=self._pip(about),
            pip_wheel=(about["ensurepip"] or [None])[0],
            git=shutil.which("git") is not None,
            libcuda=_libcuda(),
            memory=_memory_available(),
            cpus=len(os.sched_getaffinity(0)),
            disk=_disk_free(self.state_dir),
        )
        given = {str(name): str(value) for name, value in (self.want.get("environment") or {}).items()}
        context = Context(run=self.run, venv=self.venv, environment={**os.environ, **given})
        self.facts["toolkits"] = find_toolkits(context, self.want.get("toolkit"), self.facts["machine"])
        seen = _gpus.read_gpus(self.run, 30)
        self.facts["gpus"] = [device for device in seen["devices"] if not device["lost"]]
        self.facts["gpus_message"] = seen["message"]

    def _owner(self) -> _drop.Identity:
        try:
            identity = _drop.owner_of(
                [self.venv["path"] if os.path.isdir(self.venv["path"]) else os.path.dirname(self.venv["python"])]
            )
            if identity.uid != os.geteuid() and os.geteuid() != 0:
                raise Refused(
                    "not_the_owner",
                    f"the venv belongs to {identity.name}, this runs as {_drop.current().name}",
                    "use become: true",
                )
            return identity
        except _drop.CannotDrop as error:
            raise Refused("venv_owner", str(error), "give the venv one owner") from None

    def _ask_venv(self) -> dict[str, Any]:
        answer = self.run_as([self.venv["python"], "-I", "-c", _ASK_VENV], 60, {})
        try:
            return dict(json.loads(answer.stdout.splitlines()[-1]))
        except (ValueError, IndexError):
            said = (answer.stderr or answer.stdout).strip()[-300:]
            raise Refused(
                "venv_python_broken", f"{self.venv['python']} does not run: {said}", "repair the venv"
            ) from None

    def _compiler(self) -> Optional[dict[str, str]]:
        for name in (self.want.get("compiler"), "g++", "c++"):
            path = shutil.which(str(name)) if name else None
            if path:
                answer = self.run([path, "-dumpfullversion", "-dumpversion"], 20)
                if answer.rc == 0:
                    return {"path": path, "version": answer.stdout.strip()}
        return None

    def _tools(self, versions: Mapping[str, Optional[str]]) -> dict[str, Optional[str]]:
        ninja = versions.get("ninja")
        if not ninja and shutil.which("ninja"):
            answer = self.run(["ninja", "--version"], 20)
            ninja = answer.stdout.strip() if answer.rc == 0 else None
        return {"setuptools": versions.get("setuptools"), "wheel": versions.get("wheel"), "ninja": ninja}

    @staticmethod
    def _pip(about: Mapping[str, Any]) -> Optional[str]:
        if about["versions"].get("pip"):
            return "venv"
        if about["ensurepip"]:
            return "ensurepip"
        return "uv" if shutil.which("uv") else None

    def headers(self, names: Sequence[str]) -> dict[str, bool]:
        """Ask the compiler itself which headers it finds, with the folders that the build will give it."""
        compiler = (self.facts.get("compiler") or {}).get("path")
        if not compiler:
            return {}
        extra = (
            {"CPATH": ":".join(self.want.get("extra_include_dirs") or [])}
            if self.want.get("extra_include_dirs")
            else {}
        )
        found = {}
        for name in names:
            answer = self.run_as(
                [compiler, "-x", "c++", "-E", "-o", "/dev/null", "-include", name, "/dev/null"], 30, extra
            )
            found[name] = answer.rc == 0
        return found

    def decide(self) -> None:
        """Make the plan and the fingerprint from facts and source."""
        tree = self.source.get("tree")
        if tree is not None:
            about = _deepep_source.recognise(tree)
        else:
            known = _deepep_source.KNOWN_REVISIONS.get(str(self.source.get("revision")))
            about = {
                "generation": known["generation"] if known else "unknown",
                "includes": [],
                "submodules": [],
                "message": "not fetched yet",
            }
        self.facts["source"] = dict(about, revision=self.source.get("revision"))
        self.facts["headers"] = self.headers(["infiniband/mlx5dv.h", "infiniband/verbs.h"])
        want = dict(self.want, source_kind=self.source.get("kind"), wheelhouse_has=self._wheelhouse())
        self.plan = _deepep_preflight.plan_build(self.facts, want)
        if tree is None:
            # Not fetched yet, so nothing can be said against it.
            self.plan["problems"] = [item for item in self.plan["problems"] if item["code"] != "source_not_recognised"]
        self.parts = _fingerprint.fingerprint_parts(self.plan["fingerprint_facts"])
        self.fingerprint = _fingerprint.fingerprint(self.parts)

    def _wheelhouse(self) -> list[str]:
        folder = self.want.get("wheelhouse")
        names = os.listdir(folder) if folder and os.path.isdir(folder) else []
        return sorted(
            {
                re.split(r"-\d", name)[0].lower().replace("_", "-")
                for name in names
                if name.endswith((".whl", ".tar.gz"))
            }
        )

    # -- what is there

    @property
    def build_dir(self) -> str:
        return os.path.join(self.state_dir, "builds", self.fingerprint)

    @property
    def wheel_dir(self) -> str:
        return os.path.join(self.state_dir, "wheels", self.fingerprint)

    def cached(self) -> Optional[dict[str, Any]]:
        """Return the manifest of a whole wheel of this fingerprint, or None (absent, torn, or changed since)."""
        return read_cached(self.wheel_dir)

    def proof_path(self) -> str:
        venv = hashlib.sha256(os.path.realpath(str(self.venv["path"])).encode()).hexdigest()[:12]
        return os.path.join(self.wheel_dir, f"proof-{venv}.json")

    def proof(self, manifest: Mapping[str, Any]) -> Optional[dict[str, Any]]:
        """Return an earlier proof for this venv and this very wheel."""
        noted = _detached.read_json(self.proof_path())
        return noted if noted and noted.get("sha256") == manifest["wheel"]["sha256"] else None

    # -- building

    @property
    def work(self) -> str:
        return os.path.join(self.build_dir, "work")

    def build_job(self) -> tuple[str, dict[str, Any]]:
        """Return the job folder and spec of the build. Nothing is written yet."""
        work, python = self.work, self.venv["python"]
        overlay = os.path.join(work, "overlay")
        bins = [os.path.join(overlay, "bin"), os.path.dirname(python)]
        toolkit = (self.plan.get("toolkit") or {}).get("path")
        if toolkit:
            bins.append(os.path.join(toolkit, "bin"))
        compiler = (self.facts.get("compiler") or {}).get("path")
        if compiler:
            bins.append(os.path.dirname(compiler))
        base = self.environment({})
        prefixes = {
            os.path.join(work, "src"): "deep_ep-src",
            **dict.fromkeys(self.facts["site_packages"], "site-packages"),
        }
        source_map = " ".join(f"-ffile-prefix-map={old}={new}" for old, new in prefixes.items())
        private = {
            "PATH": os.pathsep.join(dict.fromkeys([*bins, *base["PATH"].split(os.pathsep)])),
            "HOME": os.path.join(work, "home"),
            "TMPDIR": os.path.join(work, "tmp"),
            "PYTHONPATH": overlay,
            "PYTHONNOUSERSITE": "1",
            # The target venv stays as it is, compiled caches included.
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "GIT_CEILING_DIRECTORIES": work,
            # Neither debug information nor __FILE__ carries a path of the builder into the wheel.
            "CFLAGS": f"-g0 {source_map}",
            "NVCC_APPEND_FLAGS": " ".join(f"-Xcompiler {flag}" for flag in source_map.split()),
        }
        if self.plan["cpath"]:
            private["CPATH"] = os.pathsep.join(self.plan["cpath"])
        libraries = [*([os.path.join(overlay, "lib")] if self.plan["links"] else []), *self.plan["library_path"]]
        if libraries:
            private["LIBRARY_PATH"] = os.pathsep.join(libraries)
        env = self.environment({**private, **self.plan["env"]})
        for name in ("EP_JIT_CACHE_DIR", "EP_JIT_PRINT_COMPILER_COMMAND", "EP_NCCL_ROOT_DIR"):
            if name not in (self.want.get("environment") or {}):
                env.pop(name, None)
        job = {
            "work": work,
            "kind": self.source["kind"],
            "source": os.path.join(self.source["folder"], "tree")
            if self.source["kind"] == "git"
            else self.source["location"],
            "top": self.source["top"],
            "links": self.plan["links"],
        }
        steps = [
            {
                "name": "source",
                "argv": [python, "-I", "-c", _PREPARE, json.dumps(job)],
                "env": env,
                "cwd": work,
                "user": self.user,
            }
        ]
        if self.plan["overlay"]:
            argv, extra = self._overlay_command(overlay)
            steps.append(
                {
                    "name": "overlay",
                    "argv": argv,
                    "env": {**env, "PYTHONPATH": "", **extra},
                    "cwd": work,
                    "user": self.user,
                }
            )
        steps.append(
            {
                "name": "build",
                "argv": [python, "setup.py", "bdist_wheel", "--dist-dir", os.path.join(work, "out")],
                "env": env,
                "cwd": os.path.join(work, "src"),
                "user": self.user,
            }
        )
        return self.build_dir, {
            "id": self.fingerprint,
            "time_limit": self.want["time_limit"],
            "heartbeat": 2,
            "steps": steps,
        }

    def _overlay_command(self, overlay: str) -> tuple[list[str], dict[str, str]]:
        python, how = self.venv["python"], self.facts["pip"]
        house = self.want.get("wheelhouse")
        offline = ["--no-index", "--find-links", str(house)] if house else []
        if how == "uv":
            return [
                "uv",
                "pip",
                "install",
                "--python",
                python,
                "--target",
                overlay,
                *offline,
                *self.plan["overlay"],
            ], {}
        extra = {"PYTHONPATH": str(self.facts["pip_wheel"])} if how == "ensurepip" else {}
        argv = [
            python,
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
            "--upgrade",
            "--target",
            overlay,
        ]
        return [*argv, *offline, *self.plan["overlay"]], {**extra, "PIP_ROOT_USER_ACTION": "ignore"}

    def start_build(self) -> dict[str, Any]:
        """Start the build or attach to the one that is running; keep finished objects of an equal, interrupted one."""
        folder, spec = self.build_job()
        os.makedirs(folder, mode=0o755, exist_ok=True)
        if _detached.is_locked(folder):
            return {"attached": True, "holder": _detached.holder(folder), "ended": []}
        status = _detached.observe(folder)
        before = _detached.read_json(os.path.join(folder, "spec.json")) or {}
        same = [step for step in before.get("steps") or [] if step["name"] == "build"] == spec["steps"][-1:]
        src = os.path.join(self.work, "src")
        if same and status["state"] in ("lost", "timed_out", "cancelled") and os.path.isdir(os.path.join(src, "build")):
            # ninja knows which objects are whole: only what was under way is compiled again.
            spec = dict(spec, steps=[step for step in spec["steps"] if step["name"] == "build"])
        elif os.path.isdir(self.work) and not _detached.is_locked(folder):
            shutil.rmtree(self.work)
        os.makedirs(self.work, mode=0o755, exist_ok=True)
        if self.user and self.identity:
            os.chown(self.work, self.identity.uid, self.identity.gid)
        if os.path.exists(os.path.join(folder, "log")) and not _detached.is_locked(folder):
            os.replace(os.path.join(folder, "log"), os.path.join(folder, "log.previous"))
        return _detached.start(folder, spec)

    def products(self) -> list[str]:
        """Return the wheels that a build left in its work folder; none once they were published."""
        return sorted(glob.glob(os.path.join(self.work, "out", "*.whl")))

    def collect(self) -> dict[str, Any]:
        """Turn the output of a finished build into a staged wheel; return ``{staged, about, problems, runpaths}``."""
        wheels = self.products()
        if len(wheels) != 1:
            problem = {
                "code": "no_wheel",
                "message": f"the build ended with rc 0 and left {len(wheels)} wheels",
                "mend": "see the log",
            }
            return {"staged": None, "about": {}, "problems": [problem], "runpaths": []}
        staged_dir = os.path.join(self.build_dir, "staged")
        shutil.rmtree(staged_dir, ignore_errors=True)
        os.makedirs(staged_dir, mode=0o755)
        staged = os.path.join(staged_dir, os.path.basename(wheels[0]))
        runpaths = _wheel_inspect.relocate(wheels[0], staged, self.facts["site_packages"])
        os.chmod(staged, 0o644)
        about = _wheel_inspect.inspect(staged, self._private_paths())
        source = self.facts["source"]
        problems = _wheel_inspect.judge(
            about,
            self.plan["archs"],
            self.facts["machine"],
            str(self.facts["torch"]["cuda"]).partition(".")[0],
            source.get("extensions") or list(_deepep_source.EXTENSIONS[source["generation"]]),
            self.facts["python"]["tag"],
        )
        return {"staged": staged, "about": about, "problems": problems, "runpaths": runpaths}

    def _private_paths(self) -> list[str]:
        paths = [self.work, self.venv["path"], str(self.source["location"])]
        if self.identity and self.identity.home not in ("/", "/root"):
            paths.append(self.identity.home)
        return [path for path in paths if path.startswith("/")]

    def proof_job(self, wheel: str) -> tuple[str, dict[str, Any]]:
        """Return the job folder and spec that import the wheel's content in the target venv, as its owner."""
        folder = os.path.join(self.state_dir, "builds", self.fingerprint, "proof")
        scratch = os.path.join(folder, "work")
        source = self.facts["source"]
        job = {
            "wheel": wheel,
            "site": os.path.join(scratch, "site"),
            "empty": os.path.join(scratch, "empty"),
            "site_packages": self.facts["site_packages"],
            "extensions": source.get("extensions") or list(_deepep_source.EXTENSIONS.get(source["generation"], ())),
        }
        env = self.environment(
            {
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": scratch,
                **(self.plan.get("service_env") or {}),
                **self._service_environment(),
            }
        )
        argv = [self.venv["python"], "-s", "-c", _PROVE, json.dumps(job)]
        return folder, {
            "id": self.fingerprint,
            "time_limit": float(self.want.get("proof_timeout") or 300),
            "heartbeat": 2,
            "steps": [
                {"name": "import", "argv": argv, "env": env, "cwd": os.path.join(scratch, "empty"), "user": self.user}
            ],
        }

    def _service_environment(self) -> dict[str, str]:
        given = {str(name): str(value) for name, value in (self.want.get("service_environment") or {}).items()}
        toolkit = (self.plan.get("toolkit") or {}).get("path")
        # DeepEP 2 looks for nvcc when it is imported.
        return {**({"CUDA_HOME": toolkit} if toolkit else {}), **given}

    def start_proof(self, wheel: str) -> dict[str, Any]:
        folder, spec = self.proof_job(wheel)
        os.makedirs(folder, mode=0o755, exist_ok=True)
        if _detached.is_locked(folder):
            return {"attached": True}
        scratch = os.path.join(folder, "work")
        shutil.rmtree(scratch, ignore_errors=True)
        os.makedirs(os.path.join(scratch, "empty"), mode=0o755)
        if self.user and self.identity:
            for path in (scratch, os.path.join(scratch, "empty")):
                os.chown(path, self.identity.uid, self.identity.gid)
        if os.path.exists(os.path.join(folder, "log")):
            os.unlink(os.path.join(folder, "log"))
        return _detached.start(folder, spec)

    def proof_result(self) -> dict[str, Any]:
        """Return ``{ok, level, code, layer, message, names}`` of a finished proof job."""
        folder = os.path.join(self.state_dir, "builds", self.fingerprint, "proof")
        status = _detached.observe(folder)
        said: dict[str, Any] = {}
        for line in _detached.log_lines(folder):
            if line.startswith(PROOF_MARK):
                said = json.loads(line[len(PROOF_MARK) :])
        if said.get("ok"):
            return {
                "ok": True,
                "level": "import",
                "code": None,
                "layer": None,
                "message": None,
                "names": said.get("names"),
                "torch": said.get("torch"),
            }
        if said:
            cause = import_cause(said.get("error"), said.get("type"))
        elif status["state"] == "timed_out":
            cause = {"code": "import_timeout", "layer": "wheel", "message": status["message"]}
        else:
            tail = " | ".join(line for line in _detached.tail(folder) if line.strip() and not line.startswith("==="))[
                -600:
            ]
            cause = {"code": "import_crashed", "layer": "wheel", "message": f"rc {status['rc']}: {tail}"}
        # Without a driver the extension cannot be loaded at all: that says nothing against the wheel.
        return {"ok": cause["code"] == "needs_gpu", "level": "static", "names": None, **cause}

    def publish(
        self, staged: str, about: Mapping[str, Any], runpaths: Sequence[Any], proof: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Put the proven wheel into the cache, whole or not at all; return its manifest."""
        status = _detached.observe(self.build_dir)
        manifest = {
            "schema": MANIFEST_SCHEMA,
            "fingerprint": self.fingerprint,
            "parts": self.parts,
            "source": {name: self.source.get(name) for name in ("kind", "location", "revision", "wanted")},
            "generation": self.facts["source"]["generation"],
            "wheel": dict(about, file=os.path.basename(staged)),
            "runpaths": [{key: item[key] for key in ("member", "new", "changed")} for item in runpaths],
            "service_env": self.plan["service_env"],
            "proof": dict(proof),
            "build": {
                "host": socket.gethostname(),
                "seconds": {step["name"]: step["seconds"] for step in status.get("steps", [])},
                "jobs": self.plan["jobs"],
                "toolkit": (self.plan["toolkit"] or {}).get("path"),
                "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        }
        new = f"{self.wheel_dir}.new"
        os.makedirs(os.path.dirname(new), mode=0o755, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        os.makedirs(new, mode=0o755)
        shutil.copyfile(staged, os.path.join(new, os.path.basename(staged)))
        shutil.copyfile(os.path.join(self.build_dir, "log"), os.path.join(new, "build.log"))
        os.chmod(os.path.join(new, "build.log"), 0o644)
        _detached.write_json(os.path.join(new, "manifest.json"), manifest)
        shutil.rmtree(self.wheel_dir, ignore_errors=True)
        os.rename(new, self.wheel_dir)
        self.note_proof(manifest, proof)
        # The objects are worth gigabytes and nothing any more.
        for folder in (
            self.work,
            os.path.join(self.build_dir, "staged"),
            os.path.join(self.build_dir, "proof", "work"),
        ):
            shutil.rmtree(folder, ignore_errors=True)
        return manifest

    def note_proof(self, manifest: Mapping[str, Any], proof: Mapping[str, Any]) -> None:
        _detached.write_json(self.proof_path(), dict(proof, sha256=manifest["wheel"]["sha256"], venv=self.venv["path"]))

    def lacking(self, requires: Sequence[str]) -> list[str]:
        """Return the wheel's unconditional requirements that the venv has no distribution for."""
        names = [re.split(r"[\s<>=!~;\[(]", text, maxsplit=1)[0] for text in requires if ";" not in text]
        there = {_distributions.canonical(dist.name) for dist in _distributions.scan(self.facts["site_packages"])}
        return [name for name in names if _distributions.canonical(name) not in there]

    def remedy(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``backend_packages`` installs: the wheel, with nothing else touched."""
        path = os.path.join(self.wheel_dir, manifest["wheel"]["file"])
        return {
            "backend": "deep_ep",
            "kind": "rebuild",
            "required": True,
            "summary": f"install the DeepEP wheel {manifest['wheel']['file']} (fingerprint {self.fingerprint})",
            "steps": [
                {"action": "pip_install", "packages": [path], "args": {"flags": ["--no-deps", "--force-reinstall"]}}
            ],
        }


def read_cached(folder: str) -> Optional[dict[str, Any]]:
    """Return the manifest in ``folder`` when its wheel is there, whole and unchanged; else None."""
    manifest = _detached.read_json(os.path.join(folder, "manifest.json"))
    if not manifest or manifest.get("schema") != MANIFEST_SCHEMA or not isinstance(manifest.get("wheel"), dict):
        return None
    path = os.path.join(folder, str(manifest["wheel"].get("file")))
    try:
        whole = os.path.getsize(path) == manifest["wheel"].get("size") and _wheel_inspect.sha256(path) == manifest[
            "wheel"
        ].get("sha256")
    except OSError:
        return None
    return manifest if whole else None


def describe_failure(folder: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{state, code, message, mend, retryable, text, lines, log}`` for a job that did not succeed."""
    log = os.path.join(folder, "log")
    if status["state"] in ("timed_out", "cancelled", "lost"):
        mends = {
            "timed_out": "raise time_limit, or find out from the log what hung",
            "cancelled": "start it again: finished objects are kept",
            "lost": "start it again: finished objects are kept",
        }
        return {
            "state": "build_failed", "code": f"build_{status['state']}", "message": status.get("message"),
            "mend": mends[status["state"]], "retryable": True, "text": None,
            "lines": _detached.tail(folder)[-5:], "log": log,
        }  # fmt: skip
    found = _build_log.diagnose(_detached.log_lines(folder), int(status.get("rc") or 1))
    return dict(found or {}, log=log)


def progress_line(folder: str, status: Mapping[str, Any]) -> str:
    """Return one line for people: ``[4/7] internode.cu, compiling internode_ll.cu, 312 s``."""
    step = str(status.get("step") or "starting")
    words = [step]
    if step == "build":
        seen = _build_log.progress(_detached.tail(folder))
        words = [f"[{seen['done']}/{seen['total']}] {seen['item'] or ''}".rstrip() if seen else "configuring"]
    if status.get("running"):
        words.append("compiling " + ", ".join(status["running"]))
    words.append(f"{status['elapsed']:.0f} s")
    return ", ".join(words)


def _os_family() -> str:
    text = _read("/etc/os-release") or ""
    words = " ".join(re.findall(r'^(?:ID|ID_LIKE)="?([^"\n]*)', text, re.M)).split()
    if {"debian", "ubuntu"} & set(words):
        return "debian"
    return "redhat" if {"rhel", "fedora", "centos", "rocky", "almalinux"} & set(words) else "other"
