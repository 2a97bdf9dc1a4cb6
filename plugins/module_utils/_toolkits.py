# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the CUDA toolkits of a host, and which one fits the venv's torch."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._as_owner import run_as_owner
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult

_PARENTS = ("/usr/local", "/opt", "/opt/nvidia", "/usr/lib")
_NAME = re.compile(r"cuda(?:-?\d+(?:\.\d+)*)?\Z")
_RELEASE = re.compile(r"release (\d{1,3}\.\d{1,3})(?:, V(\d{1,3}(?:\.\d{1,5}){1,3}))?")
_HEADER = "cuda/std/tuple"


def parse_nvcc(text: str) -> dict[str, Optional[str]]:
    """``{version: "13.0", build: "13.0.88"}`` of ``nvcc --version``; both None where it is not nvcc that speaks."""
    match = _RELEASE.search(text) if "Cuda compilation tools" in text else None
    return {"version": match.group(1) if match else None, "build": match.group(2) if match else None}


def parse_version_file(text: str) -> Optional[str]:
    """``12.8`` from a toolkit's ``version.json`` or ``version.txt``."""
    version: Any = None
    try:
        data = json.loads(text)
        version = (data.get("cuda_nvcc") or data.get("cuda") or {}).get("version") if isinstance(data, dict) else None
    except (ValueError, AttributeError, RecursionError):
        match = re.search(r"CUDA Version (\d+\.\d+)", text)
        version = match.group(1) if match else None
    match = re.match(r"(\d{1,3}\.\d{1,3})(?:\.|\Z)", version) if isinstance(version, str) else None
    return match.group(1) if match else None


def follow(context: Context, path: str) -> Optional[str]:
    """The place that ``path`` leads to over symbolic links, below the context's root; None for links in a circle."""
    for _step in range(40):
        parts = path.split("/")
        for end in range(2, len(parts) + 1):
            link = "/".join(parts[:end])
            try:
                target = os.readlink(context.path(link))
            except (OSError, ValueError):
                continue
            path = os.path.normpath(os.path.join(os.path.dirname(link), target, *parts[end:]))
            break
        else:
            return path
    return None


def candidates(context: Context) -> list[str]:
    """Folders with ``bin/nvcc``: of CUDA_HOME, the usual places, the PATH, and the venv's ``nvidia`` packages."""
    environment = context.environment or {}
    found: list[str] = [part for part in str(environment.get("CUDA_HOME") or "").split(":") if part]
    for parent in _PARENTS:
        try:
            names = sorted(os.listdir(context.path(parent)), key=_by_version)
        except OSError:
            continue
        found += [f"{parent}/{name}" for name in names if _NAME.match(name)]
    for folder in [*str(environment.get("PATH") or "").split(":"), "/usr/bin", "/usr/local/bin"]:
        if os.path.basename(folder) == "bin" and os.path.isabs(folder):
            found.append(os.path.dirname(folder))
    for packages in context.venv.get("site_packages") or []:
        for name in ("cuda_nvcc", "cu13", "cu12"):
            found.append(os.path.join(packages, "nvidia", name))
    out: list[str] = []
    seen: set[str] = set()
    for path in map(os.path.normpath, found):
        if not os.path.isabs(path):
            continue
        real = follow(context, os.path.join(path, "bin", "nvcc"))
        if real is None or not _is(stat.S_ISREG, context, real):
            continue
        home = os.path.dirname(os.path.dirname(real))
        # /usr/local/cuda is a link that the next package moves: the folder that it leads to is told.
        shown = home if os.path.basename(real) == "nvcc" and os.path.basename(os.path.dirname(real)) == "bin" else path
        if real not in seen and shown not in out:
            seen.add(real)
            out.append(shown)
    return out


def _by_version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", name))


def _execute(context: Context, path: str) -> RunResult:
    program = context.path(path)
    owned = list(dict.fromkeys((program, os.path.realpath(program))))
    return run_as_owner(context, [program, "--version"], context.command_timeout, owned)


def read_toolkit(context: Context, path: str) -> dict[str, Any]:
    """One toolkit: ``{path, version, build, nvcc_works, message, headers, cccl, source, wrapper}``.

    ``wrapper``: an nvcc on the PATH (such as /usr/local/bin/nvcc) whose folder is no toolkit and cannot be CUDA_HOME.
    ``version`` is nvcc's own word where nvcc runs, else the version file's. ``cccl`` is the folder to add to CPATH
    where ``cuda/std`` is not on the usual include path (CUDA 13 and later), else None.
    """
    nvcc = f"{path}/bin/nvcc"
    told = _execute(context, nvcc)
    parsed = parse_nvcc(told.stdout + told.stderr)
    works = told.rc == 0 and parsed["version"] is not None
    message = ""
    if not works:
        first = next((line for line in (told.stderr + "\n" + told.stdout).split("\n") if line.strip()), "")
        ending = f"no answer in {context.command_timeout:g} s" if told.timed_out else f"rc {told.rc}"
        message = f"{nvcc} does not run ({ending}): {first.strip()}".rstrip(": ")
    version, source = parsed["version"] if works else None, "nvcc"
    for name in ("version.json", "version.txt") if not works else ():
        version, source = parse_version_file(context.read(f"{path}/{name}") or ""), name
        if version:
            break
    headers = _is(stat.S_ISREG, context, f"{path}/include/cuda_runtime.h")
    pip = os.path.basename(os.path.dirname(path)) == "nvidia"
    return {
        "path": path,
        "version": version,
        "build": parsed["build"] if works else None,
        "nvcc_works": works,
        "message": message,
        "source": source if version else None,
        "headers": headers,
        "cccl": _cccl(context, path),
        "wrapper": not headers
        and path != "/usr"
        and not any(_NAME.match(part) for part in path.split("/"))
        and not pip,
    }


def _cccl(context: Context, path: str) -> Optional[str]:
    if os.path.exists(context.path(f"{path}/include/{_HEADER}")):
        return None
    folders = [f"{path}/include/cccl"]
    try:
        targets = sorted(os.listdir(context.path(f"{path}/targets")))
    except OSError:
        targets = []
    # Several targets are there for cross compilation; the host's own comes first.
    machine = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(context.venv.get("machine") or "", "")
    folders += [f"{path}/targets/{name}/include/cccl" for name in sorted(targets, key=lambda name: name != machine)]
    return next((folder for folder in folders if os.path.exists(context.path(f"{folder}/{_HEADER}"))), None)


def choose(toolkits: Iterable[Mapping[str, Any]], torch_cuda: Optional[str]) -> Optional[str]:
    """The path of the toolkit to build with for a torch of CUDA ``torch_cuda``, or None.

    Only the same major will do (torch refuses another); the same minor is best, then the next newer, then the newest
    older one. nvidia-smi's version and the PATH play no part.
    """
    wanted = _pair(torch_cuda)
    if wanted is None:
        return None
    ranked = []
    for order, toolkit in enumerate(toolkits):
        have = _pair(toolkit.get("version"))
        if have is None or not toolkit.get("nvcc_works") or have[0] != wanted[0] or toolkit.get("wrapper"):
            continue
        distance = have[1] - wanted[1]
        ranked.append((0 if distance == 0 else 1 if distance > 0 else 2, abs(distance), order, toolkit["path"]))
    return min(ranked)[3] if ranked else None


def _pair(version: Any) -> Optional[tuple[int, int]]:
    match = re.match(r"(\d{1,3})\.(\d{1,3})", version) if isinstance(version, str) else None
    return (int(match.group(1)), int(match.group(2))) if match else None


def check_cuda_home(context: Context, value: Optional[str]) -> dict[str, Any]:
    """``{value, problem, message, suggestion}`` of a CUDA_HOME; ``problem`` is a code or None.

    ``cuda_home_is_a_path_list``, ``cuda_home_relative``, ``cuda_home_absent``, ``cuda_home_without_nvcc``.
    """
    out: dict[str, Any] = {"value": value, "problem": None, "message": "", "suggestion": None}
    if not value:
        return out
    if ":" in value:
        parts = [part for part in value.split(":") if part]
        fit = [part for part in parts if os.path.isabs(part) and _has_nvcc(context, part)]
        out.update(
            problem="cuda_home_is_a_path_list",
            message=f"CUDA_HOME is {value!r}: it must be one folder, not a list of folders.",
            suggestion=next(iter(fit or parts), None),
        )
    elif not os.path.isabs(value):
        out.update(problem="cuda_home_relative", message=f"CUDA_HOME is {value!r}: it must be an absolute path.")
    elif not _is(stat.S_ISDIR, context, value):
        out.update(problem="cuda_home_absent", message=f"CUDA_HOME is {value!r}, and there is no such folder.")
    elif not _has_nvcc(context, value):
        out.update(problem="cuda_home_without_nvcc", message=f"CUDA_HOME is {value!r}, and it has no bin/nvcc.")
    return out


def _is(kind: Callable[[int], bool], context: Context, path: str) -> bool:
    """Whether ``path``, or what it leads to, is of this kind."""
    real = follow(context, path)
    try:
        return real is not None and kind(os.lstat(context.path(real)).st_mode)
    except (OSError, ValueError):
        return False


def _has_nvcc(context: Context, home: str) -> bool:
    return _is(stat.S_ISREG, context, f"{home}/bin/nvcc")


def gather(context: Context) -> dict[str, Any]:
    """``toolkits`` of the probe. ``matches_torch`` is about the CUDA major; None where torch has no CUDA."""
    torch_cuda = context.torch.get("cuda")
    wanted = _pair(torch_cuda)
    toolkits = [read_toolkit(context, path) for path in candidates(context)]
    for toolkit in toolkits:
        have = _pair(toolkit["version"])
        toolkit["matches_torch"] = None if wanted is None else bool(have and have[0] == wanted[0])
    best = choose(toolkits, torch_cuda)
    home = check_cuda_home(context, (context.environment or {}).get("CUDA_HOME"))
    if home["problem"] and home["suggestion"] is None:
        home["suggestion"] = best
    return {"toolkits": toolkits, "best": best, "cuda_home": home}
