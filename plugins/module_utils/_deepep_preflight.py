# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: everything that a build of DeepEP lacks, told before any compiler runs (pure).

``plan_build`` takes what was seen on the host (``_deepep_wheel.gather``) and what is wanted, and decides toolkit,
architectures, jobs and the whole build environment. It stops at nothing: all problems come back at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _deepep_source, _versions

GIB = 1 << 30
# Measured: 2.2 GB (v1) and 2.6 GB (v2) of resident memory for the largest compiler process.
BYTES_PER_JOB = int(2.6 * 10**9)
# Objects, wheel and source; and what nvcc keeps in its temporary folder for each job.
DISK_BASE = 1 * GIB
DISK_PER_JOB = GIB // 4

# First CUDA toolkit that compiles for an architecture.
ARCH_NEEDS_CUDA = {"9.0": "12.3", "10.0": "12.8", "10.3": "12.9", "11.0": "13.0", "12.0": "12.8", "12.1": "12.9"}
# What upstream supports; everything below 9.0 is refused by v2 and never imports with v1 (DeepEP#481).
SUPPORTED_ARCHS = ("9.0", "10.0", "10.3")
CUDA_NEEDS = {"v1": "12.3", "v2": "12.3", "hybrid": "12.8"}
TORCH_NEEDS = {"v1": "2.1", "v2": "2.10", "hybrid": "2.1"}
NVSHMEM_NEEDS = {"v1": "3.3.9", "v2": "3.3.9", "hybrid": "3.3.9"}
NCCL_NEEDS = {"v2": "2.30.4"}
NVSHMEM_SAFE = "3.4.5"
SETUPTOOLS_WITH_BDIST_WHEEL = "70.1"

PACKAGES = {
    "debian": {
        "compiler": ["g++"],
        "rdma": ["libibverbs-dev"],
        "git": ["git"],
        "python": ["python3-dev"],
    },
    "redhat": {
        "compiler": ["gcc-c++"],
        "rdma": ["rdma-core-devel"],
        "git": ["git-core"],
        "python": ["python3-devel"],
    },
}


def normalise_arch(text: Any) -> Optional[str]:
    """Return ``9.0`` for ``9.0``, ``90``, ``sm_90``, ``compute_90``; ``9.0a`` for ``sm_90a``; None for anything
    else."""
    match = re.fullmatch(
        r"(?:sm_|compute_)?(\d+)(?:\.(\d))?([af]?)(?:\+ptx)?", str(text).strip().lower().replace("real", "").rstrip("-")
    )
    if not match:
        return None
    major, minor, suffix = match.groups()
    if minor is None:
        if len(major) < 2:
            return None
        major, minor = major[:-1], major[-1]
    return f"{int(major)}.{minor}{suffix}"


def split_archs(value: Any) -> tuple[list[str], list[str]]:
    """Return ``(archs, not understood)`` of a list or of a string with ``;``, ``,`` or spaces."""
    words = re.split(r"[;,\s]+", value) if isinstance(value, str) else [str(item) for item in value or []]
    archs: list[str] = []
    bad: list[str] = []
    for word in filter(None, words):
        arch = normalise_arch(word)
        if arch is None:
            bad.append(word)
        elif arch not in archs:
            archs.append(arch)
    return sorted(archs, key=_number), bad


def cccl_candidates(toolkit: str, machine: str) -> list[str]:
    """Return where a toolkit of CUDA 13 keeps CCCL, best first. Servers on Arm are ``sbsa``, Jetson is ``aarch64``."""
    targets = {"aarch64": ["sbsa-linux", "aarch64-linux"], "x86_64": ["x86_64-linux"]}.get(
        machine, [f"{machine}-linux"]
    )
    folders = [os.path.join(toolkit, "targets", target, "include", "cccl") for target in targets]
    return [*folders, os.path.join(toolkit, "include", "cccl")]


def choose_toolkit(
    toolkits: Sequence[Mapping[str, Any]], torch_cuda: str, archs: Sequence[str], needs: str = "12.3"
) -> tuple[Optional[Mapping[str, Any]], str, list[dict[str, Any]]]:
    """Choose the toolkit that compiles for ``torch_cuda``: ``(toolkit or None, because, problems)``.

    ``toolkits``: ``[{path, version: "13.0", nvcc_works, message}]``. nvidia-smi's version and PATH play no part.
    """
    if not toolkits:
        return None, "", [_problem("toolkit_missing", f"there is no CUDA toolkit (nvcc) for torch's CUDA {torch_cuda}",
                                   f"install the CUDA {torch_cuda} toolkit")]  # fmt: skip
    seen = ", ".join(f"{item['path']} ({item.get('version') or 'unknown'})" for item in toolkits)
    major = torch_cuda.split(".")[0]
    same = [item for item in toolkits if str(item.get("version") or "").partition(".")[0] == major]
    if not same:
        return None, "", [_problem("toolkit_major_mismatch", f"torch was built with CUDA {torch_cuda}; found: {seen}",
                                   f"install a toolkit of CUDA {major}; another major never works")]  # fmt: skip
    working = [item for item in same if item.get("nvcc_works")]
    if not working:
        said = "; ".join(f"{item['path']}: {item.get('message') or 'nvcc does not run'}" for item in same)
        return None, "", [_problem("nvcc_broken", said, "repair or reinstall the toolkit")]
    floor = max([needs, *(ARCH_NEEDS_CUDA.get(arch.rstrip("af"), "0") for arch in archs)], key=_number)
    able = [item for item in working if _number(item["version"]) >= _number(floor)]
    if not able:
        return (
            None,
            "",
            [
                _problem(
                    "toolkit_too_old",
                    f"architectures {';'.join(archs) or '(none)'} need CUDA {floor} or newer; found: {seen}",
                    f"install a toolkit of CUDA {major} from {floor} on",
                )
            ],
        )
    # The same minor as torch first; otherwise the nearest newer, then the newest older one.
    best = min(
        able,
        key=lambda item: (
            item["version"] != torch_cuda,
            _number(item["version"]) < _number(torch_cuda),
            abs(_number(item["version"]) - _number(torch_cuda)),
            str(item["path"]),
        ),
    )
    because = f"its CUDA {best['version']} matches torch's {torch_cuda}"
    others = [f"{item['path']} ({item.get('version')})" for item in toolkits if item is not best]
    if others:
        because += "; not taken: " + ", ".join(others)
    return best, because, []


def count_jobs(cpus: int, memory: int, disk: int, units: int = 0, limit: Optional[int] = None) -> tuple[int, str]:
    """Return ``(MAX_JOBS, because)``; 0 when not even one job fits. Bytes; ``units`` is the number of sources."""
    bounds = {"cpus": cpus, "memory": memory // BYTES_PER_JOB, "disk": (disk - DISK_BASE) // DISK_PER_JOB}
    if units:
        bounds["sources"] = units
    if limit:
        bounds["max_jobs"] = limit
    jobs = max(0, min(bounds.values()))
    tightest = min(bounds, key=lambda name: bounds[name])
    return jobs, f"{tightest} allows {bounds[tightest]} (" + ", ".join(f"{k} {v}" for k, v in bounds.items()) + ")"


def plan_build(facts: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, Any]:
    """Decide a build, or say everything that stands in its way.

    ``facts``: ``venv``, ``torch`` (contracts), ``python: {tag, headers, include}``, ``toolkits: [{path, version, build,
    nvcc_works, message, cccl: path|""|None, cusparse: bool, cudart: bool, stubs: folder|None, nvtx3interop: bool}]``,
    ``gpus: [{name, compute_capability}]``, ``source`` (``_deepep_source.recognise`` and ``revision``), ``nvshmem`` and
    ``nccl`` (``{root, version, cuda_major, origin: venv|given, libs: [name], device_lib, device_header,
    needs_mlx5dv}`` or None), ``wheel_include``/``wheel_lib`` (folders of torch's CUDA wheels),
    ``headers: {name: bool}``, ``compiler: {path, version} | None``, ``tools: {setuptools, wheel, ninja:
    version|None}``, ``pip: str|None``, ``git: bool``, ``libcuda: {link: folder|None, library: path|None}``,
    ``memory``, ``cpus``, ``disk`` (bytes), ``machine``, ``libc``, ``os_family``.
    ``want``: ``gpu_archs``, ``max_jobs``, ``allow_unproven_archs``, ``wheelhouse``, ``wheelhouse_has: [name]``,
    ``multinode``, ``num_topk_idx_bits``, ``environment``, ``extra_include_dirs``, ``source_kind``.

    Returns ``{problems: [{code, message, mend, packages}], warnings: [{code, message}], decisions: [{question, answer,
    because}], toolkit, archs, jobs, env, cpath, library_path, links: [{name, target}], overlay: [requirement],
    service_env, fingerprint_facts}``. ``links`` and ``overlay`` go into the build's own overlay, never into the venv.
    """
    plan: dict[str, Any] = {
        "problems": [],
        "warnings": [],
        "decisions": [],
        "links": [],
        "overlay": [],
        "service_env": {},
    }
    source = facts.get("source") or {}
    generation = source.get("generation") or "unknown"
    torch = facts.get("torch") or {}
    _check_venv(plan, facts, torch, generation)
    _check_source(plan, source, generation, want)
    plan["archs"] = _archs(plan, facts, want, generation)
    plan["toolkit"] = None
    if torch.get("cuda"):
        toolkit, because, problems = choose_toolkit(
            facts.get("toolkits") or [], str(torch["cuda"]), plan["archs"], CUDA_NEEDS.get(generation, "12.3")
        )
        plan["problems"].extend(problems)
        plan["toolkit"] = toolkit
        if toolkit:
            _decide(plan, "toolkit", toolkit["path"], because)
            if toolkit["version"] != torch["cuda"]:
                _warn(
                    plan,
                    "toolkit_minor_mismatch",
                    f"toolkit {toolkit['version']}, torch {torch['cuda']}: works, untested upstream",
                )
    _check_communication(plan, facts, torch, source, generation)
    _check_tools(plan, facts, want, source)
    _check_headers(plan, facts, source)
    jobs, because = count_jobs(
        int(facts.get("cpus") or 1),
        int(facts.get("memory") or 0),
        int(facts.get("disk") or 0),
        int(source.get("compile_units") or 0),
        want.get("max_jobs"),
    )
    plan["jobs"] = jobs
    _decide(plan, "jobs", jobs, because)
    if jobs < 1:
        _refuse_size(plan, facts)
    plan["cpath"], plan["library_path"] = _paths(plan, facts, source, want)
    plan["env"] = _environment(plan, facts, want, generation)
    plan["fingerprint_facts"] = fingerprint_facts(facts, want, plan)
    return plan


def fingerprint_facts(facts: Mapping[str, Any], want: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``_fingerprint`` hashes."""
    source = facts.get("source") or {}
    generation = source.get("generation")
    options = {}
    if want.get("num_topk_idx_bits"):
        options["num_topk_idx_bits"] = want["num_topk_idx_bits"]
    if generation == "hybrid" and want.get("multinode"):
        options["multinode"] = want["multinode"]
    options.update({f"env:{name}": value for name, value in (want.get("environment") or {}).items()})
    toolkit = plan.get("toolkit") or {}
    return {
        "generation": generation,
        "revision": source.get("revision"),
        "python_tag": (facts.get("python") or {}).get("tag"),
        "torch": (facts.get("torch") or {}).get("version"),
        "torch_cuda": (facts.get("torch") or {}).get("cuda"),
        "toolkit": toolkit.get("build") or toolkit.get("version"),
        "nvshmem": (facts.get("nvshmem") or {}).get("version"),
        "nccl": (facts.get("nccl") or {}).get("version") if generation == "v2" else None,
        "archs": plan.get("archs") or [],
        "machine": facts.get("machine"),
        "libc": facts.get("libc"),
        "options": options,
    }


def _number(text: str) -> float:
    match = re.match(r"(\d+)(?:\.(\d+))?", str(text))
    return int(match.group(1)) * 1000 + int(match.group(2) or 0) if match else 0


def _problem(code: str, message: str, mend: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    return {"code": code, "message": message, "mend": mend, "packages": list(packages)}


def _refuse(plan: dict[str, Any], code: str, message: str, mend: str, packages: Sequence[str] = ()) -> None:
    plan["problems"].append(_problem(code, message, mend, packages))


def _warn(plan: dict[str, Any], code: str, message: str) -> None:
    plan["warnings"].append({"code": code, "message": message})


def _decide(plan: dict[str, Any], question: str, answer: Any, because: str) -> None:
    plan["decisions"].append({"question": question, "answer": answer, "because": because})


def _os_packages(facts: Mapping[str, Any], what: str) -> list[str]:
    return PACKAGES.get(str(facts.get("os_family")), {}).get(what, [])


def _check_venv(plan: dict[str, Any], facts: Mapping[str, Any], torch: Mapping[str, Any], generation: str) -> None:
    venv = facts.get("venv") or {}
    if venv.get("state") != "ok":
        _refuse(plan, str(venv.get("code") or "venv_absent"), str(venv.get("message")), "name an existing venv")
        return
    if not torch.get("version"):
        _refuse(plan, "torch_missing", f"{venv.get('path')} holds no torch", "install a CUDA build of torch first")
    elif torch.get("hip"):
        _refuse(plan, "torch_is_rocm_build", f"torch {torch['version']} is a ROCm build", "DeepEP needs CUDA; use mori")
    elif not torch.get("cuda"):
        _refuse(
            plan,
            "torch_is_cpu_build",
            f"torch {torch['version']} is a CPU build: no CUDA extension can be built with it",
            "install a CUDA build of torch in the target venv",
        )
    elif _versions.within(torch["version"], ">=" + TORCH_NEEDS.get(generation, "2.1")) is False:
        _refuse(
            plan,
            "torch_too_old",
            f"this DeepEP needs torch {TORCH_NEEDS.get(generation)} or newer, the venv has {torch['version']}",
            "use an older DeepEP revision or a newer torch",
        )
    if venv.get("state") == "ok" and not (facts.get("python") or {}).get("headers", True):
        _refuse(
            plan,
            "python_headers_missing",
            f"Python.h of the venv's Python is not in {(facts.get('python') or {}).get('include')}",
            "install the development package of that Python",
            _os_packages(facts, "python"),
        )


def _check_source(plan: dict[str, Any], source: Mapping[str, Any], generation: str, want: Mapping[str, Any]) -> None:
    if generation == "unknown":
        _refuse(
            plan,
            "source_not_recognised",
            f"the source is no DeepEP that this role knows: {source.get('message') or 'nothing to look at'}",
            "give the root of a DeepEP checkout (v1, v2 or hybrid-ep)",
        )
        return
    for path in _deepep_source.missing_submodules(source, bool(want.get("multinode"))):
        _refuse(
            plan,
            "submodule_missing",
            f"the source's {path} is empty",
            f"clone with --recurse-submodules, or unpack the submodule into {path}",
        )


def _archs(plan: dict[str, Any], facts: Mapping[str, Any], want: Mapping[str, Any], generation: str) -> list[str]:
    given, bad = split_archs(want.get("gpu_archs"))
    if bad:
        _refuse(plan, "gpu_archs_invalid", f"gpu_archs: {', '.join(bad)} is no GPU architecture", "write 9.0 or sm_90")
    gpus = facts.get("gpus") or []
    present, _bad = split_archs([item.get("compute_capability") for item in gpus if item.get("compute_capability")])
    names = {normalise_arch(item.get("compute_capability")): item.get("name") for item in gpus}
    if given:
        archs = given
        _decide(plan, "gpu_archs", ";".join(archs), "given")
        uncovered = [arch for arch in present if arch not in [item.rstrip("af") for item in given]]
        if uncovered:
            _warn(plan, "gpu_not_covered", f"gpu_archs leaves out {';'.join(uncovered)}, which this host's GPUs have")
    elif present:
        archs = present
        _decide(
            plan,
            "gpu_archs",
            ";".join(archs),
            "of the GPUs present: " + ", ".join(sorted({str(n) for n in names.values()})),
        )
    else:
        if not bad:
            _refuse(
                plan,
                "gpu_archs_unknown",
                f"this host shows no GPU and gpu_archs is not set{': ' if facts.get('gpus_message') else ''}"
                f"{facts.get('gpus_message') or ''}",
                "set gpu_archs to those of the hosts that will run it, for example 9.0 for H100 and H200",
            )
        return []
    for arch in archs:
        base = arch.rstrip("af")
        what = f"{names[base]} (sm_{base.replace('.', '')})" if base in names else f"sm_{base.replace('.', '')}"
        if _number(base) < _number("9.0"):
            _refuse(
                plan,
                "deepep_unsupported_arch",
                f"{what}: DeepEP needs instructions of sm_90; builds for older GPUs end with rc 0 and do not import",
                "use another a2a backend on these hosts, or set gpu_archs",
            )
        elif base not in SUPPORTED_ARCHS and not want.get("allow_unproven_archs"):
            _refuse(
                plan,
                "deepep_unsupported_arch",
                f"{what}: upstream supports {', '.join(SUPPORTED_ARCHS)}; nobody claims that its kernels run there",
                "use another a2a backend, or set allow_unproven_archs to try",
            )
    if generation == "v2" and any(_number(arch) >= _number("10.0") for arch in archs):
        newest = max((_number(str(item.get("version"))) for item in facts.get("toolkits") or []), default=0.0)
        if newest < _number("13.1"):
            _warn(
                plan,
                "jit_needs_newer_nvcc",
                "DeepEP 2 compiles kernels at run time, and ptxas up to 13.0 rejects its st.bulk on sm_100a and "
                "sm_120a: the serving host needs nvcc 13.1 or newer",
            )
    return archs


def _check_communication(
    plan: dict[str, Any], facts: Mapping[str, Any], torch: Mapping[str, Any], source: Mapping[str, Any], generation: str
) -> None:
    if generation == "unknown":
        return
    major = str(torch.get("cuda") or "").partition(".")[0]
    pip_name = f"nvidia-nvshmem-cu{major or '12'}"
    nvshmem = facts.get("nvshmem")
    if source.get("nvshmem_host_link") == "none" and "nvshmem.h" not in (source.get("includes") or []):
        nvshmem = nvshmem or {"version": None, "libs": [], "root": None, "unused": True}
    if not nvshmem:
        _refuse(
            plan,
            "nvshmem_missing",
            "NVSHMEM is neither in the venv nor given: the build would leave out kernels, end with rc 0 and not import",
            f"install {pip_name}=={NVSHMEM_SAFE} in the venv, or give nvshmem_dir",
            [f"{pip_name}=={NVSHMEM_SAFE}"],
        )
    elif not nvshmem.get("unused"):
        _check_nvshmem(plan, nvshmem, source, generation, major, pip_name)
    if generation != "v2":
        return
    nccl = facts.get("nccl")
    pip_name = f"nvidia-nccl-cu{major or '13'}"
    if not nccl:
        _refuse(
            plan,
            "nccl_missing",
            "NCCL is neither in the venv nor given",
            f"install {pip_name} or give nccl_dir",
            [pip_name],
        )
        return
    if _versions.within(nccl.get("version"), ">=" + NCCL_NEEDS["v2"]) is False:
        _refuse(
            plan,
            "nccl_too_old",
            f"DeepEP 2 needs NCCL {NCCL_NEEDS['v2']} or newer, found {nccl['version']} in {nccl['root']}",
            f"install {pip_name}>={NCCL_NEEDS['v2']} if torch allows it, or use a v1 revision",
            [f"{pip_name}>={NCCL_NEEDS['v2']}"],
        )
    if not nccl.get("device_header", True):
        _refuse(
            plan,
            "nccl_headers_missing",
            f"{nccl['root']} has no nccl_device.h",
            f"use {pip_name} or NCCL's development package",
        )
    if nccl.get("origin") == "given":
        # DeepEP 2 looks for NCCL again when it is imported.
        plan["service_env"]["EP_NCCL_ROOT_DIR"] = nccl["root"]
    if source.get("nccl_link") == "unversioned":
        _link(plan, nccl, "libnccl.so")


def _check_nvshmem(
    plan: dict[str, Any],
    nvshmem: Mapping[str, Any],
    source: Mapping[str, Any],
    generation: str,
    major: str,
    pip_name: str,
) -> None:
    version = nvshmem.get("version")
    if nvshmem.get("cuda_major") and major and str(nvshmem["cuda_major"]) != major:
        _refuse(
            plan,
            "nvshmem_variant_mismatch",
            f"NVSHMEM in {nvshmem['root']} is for CUDA {nvshmem['cuda_major']}, torch for CUDA {major}",
            f"install {pip_name}",
            [pip_name],
        )
    if _versions.within(version, ">=" + NVSHMEM_NEEDS[generation]) is False:
        _refuse(
            plan,
            "nvshmem_too_old",
            f"this DeepEP needs NVSHMEM {NVSHMEM_NEEDS[generation]} or newer, found {version}",
            f"install {pip_name}=={NVSHMEM_SAFE}",
            [f"{pip_name}=={NVSHMEM_SAFE}"],
        )
    elif _versions.within(version, ">=3.5") and not source.get("nvshmem_35_ready"):
        _refuse(
            plan,
            "nvshmem_too_new",
            f"this revision does not link with NVSHMEM {version} (multiple definition of the IBGDA device state)",
            f"pin {pip_name}=={NVSHMEM_SAFE}, or use DeepEP 29d31c0 or newer",
            [f"{pip_name}=={NVSHMEM_SAFE}"],
        )
    elif _versions.within(version, ">=3.5.19") and generation == "v2":
        _warn(
            plan,
            "nvshmem_legacy_timeout",
            f"NVSHMEM {version}: 'timeout (dispatch CPU)' was reported; {NVSHMEM_SAFE} is the safe pin",
        )
    if not nvshmem.get("device_lib", True):
        _refuse(
            plan,
            "nvshmem_device_library_missing",
            f"{nvshmem['root']}/lib has no libnvshmem_device.a",
            f"install {pip_name}",
        )
    style = source.get("nvshmem_host_link")
    if style == "unversioned" or (style == "wheel_only" and nvshmem.get("origin") == "given"):
        _link(plan, nvshmem, "libnvshmem_host.so")


def _link(plan: dict[str, Any], package: Mapping[str, Any], name: str) -> None:
    """Old revisions link the unversioned name, which wheels do not ship: give it to them in the overlay."""
    libs = package.get("libs") or []
    if name in libs:
        return
    versioned = sorted(lib for lib in libs if lib.startswith(name + "."))
    if versioned:
        plan["links"].append({"name": name, "target": os.path.join(package["root"], "lib", versioned[0])})


def _check_tools(
    plan: dict[str, Any], facts: Mapping[str, Any], want: Mapping[str, Any], source: Mapping[str, Any]
) -> None:
    if not facts.get("compiler"):
        _refuse(
            plan, "cxx_compiler_missing", "there is no C++ compiler", "install g++", _os_packages(facts, "compiler")
        )
    if want.get("source_kind") == "git" and not facts.get("git", True):
        _refuse(
            plan,
            "git_missing",
            "the source is a git URL and there is no git",
            "install git",
            _os_packages(facts, "git"),
        )
    tools = facts.get("tools") or {}
    if not tools.get("ninja"):
        plan["overlay"].append("ninja")
    newer = _versions.within(tools.get("setuptools"), ">=" + SETUPTOOLS_WITH_BDIST_WHEEL)
    if not tools.get("setuptools"):
        plan["overlay"].append(f"setuptools>={SETUPTOOLS_WITH_BDIST_WHEEL}")
    elif not newer and not tools.get("wheel"):
        plan["overlay"].append("wheel")
    if not plan["overlay"]:
        return
    names = [re.split(r"[<>=]", item)[0] for item in plan["overlay"]]
    if not facts.get("pip"):
        _refuse(
            plan,
            "build_tools_missing",
            f"the build needs {', '.join(names)}, and there is neither pip nor ensurepip nor uv to bring them",
            "install pip in the venv, or the tools themselves",
            names,
        )
    elif want.get("wheelhouse"):
        lacking = [name for name in names if name not in (want.get("wheelhouse_has") or [])]
        if lacking:
            _refuse(
                plan,
                "build_tools_missing",
                f"wheelhouse {want['wheelhouse']} holds no {', '.join(lacking)}",
                "add them to the wheelhouse",
                lacking,
            )


def _check_headers(plan: dict[str, Any], facts: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    includes = source.get("includes") or []
    headers = facts.get("headers") or {}
    ibgda = "device_host_transport/nvshmem_common_ibgda.h" in includes and (facts.get("nvshmem") or {}).get(
        "needs_mlx5dv"
    )
    for header in ("infiniband/mlx5dv.h", "infiniband/verbs.h"):
        wanted = header in includes or (header == "infiniband/mlx5dv.h" and ibgda)
        if wanted and not headers.get(header):
            _refuse(
                plan,
                "rdma_headers_missing",
                f"the compiler does not find {header}",
                "install the RDMA development package, or give its folder in extra_include_dirs",
                _os_packages(facts, "rdma") or ["libibverbs-dev (Debian)", "rdma-core-devel (RHEL)"],
            )
            break
    toolkit = plan.get("toolkit")
    if not toolkit:
        return
    if toolkit.get("cccl") is None and not _wheel_with(facts, "cccl"):
        _refuse(
            plan,
            "cccl_headers_missing",
            f"{toolkit['path']} has no CCCL (cuda/std/tuple)",
            "install the toolkit's CCCL package",
            [f"cuda-cccl-{str(toolkit['version']).replace('.', '-')}"],
        )
    if not toolkit.get("cusparse", True) and not _wheel_with(facts, "cusparse"):
        major_minor = str(toolkit["version"]).replace(".", "-")
        _refuse(
            plan,
            "cuda_headers_missing",
            f"{toolkit['path']} is the compiler only (no cusparse.h), and the venv holds no CUDA headers either",
            "install the toolkit's library development packages",
            [f"libcusparse-dev-{major_minor}", f"libcublas-dev-{major_minor}", f"libcusolver-dev-{major_minor}"],
        )
    if source.get("generation") == "hybrid" and not toolkit.get("nvtx3interop", True):
        _refuse(plan, "nvtx_missing", f"{toolkit['path']} has no libnvtx3interop", "install cuda-nvtx of this toolkit")
    if source.get("links_libcuda") and not (facts.get("libcuda") or {}).get("link") and not toolkit.get("stubs"):
        library = (facts.get("libcuda") or {}).get("library")
        if library:
            plan["links"].append({"name": "libcuda.so", "target": library})
        else:
            _refuse(
                plan,
                "libcuda_stub_missing",
                "the source links libcuda, and there is neither a driver nor the toolkit's stub",
                "install the toolkit's driver stub",
                [f"cuda-driver-dev-{str(toolkit['version']).replace('.', '-')}"],
            )


def _wheel_with(facts: Mapping[str, Any], what: str) -> Optional[str]:
    for folder in facts.get("wheel_include") or []:
        if what in (folder.get("has") or []):
            return str(folder["path"])
    return None


def _refuse_size(plan: dict[str, Any], facts: Mapping[str, Any]) -> None:
    memory, disk = int(facts.get("memory") or 0), int(facts.get("disk") or 0)
    if memory < BYTES_PER_JOB:
        _refuse(
            plan,
            "not_enough_memory",
            f"{memory / 1e9:.1f} GB of memory are available, one compiler job needs about {BYTES_PER_JOB / 1e9:.1f} GB",
            "stop the service first, or build on a larger host",
        )
    if disk < DISK_BASE + DISK_PER_JOB:
        _refuse(
            plan,
            "not_enough_disk",
            f"{disk / GIB:.1f} GiB are free for the build, it needs {(DISK_BASE + DISK_PER_JOB) / GIB:.2f} GiB or more",
            "free space, or set state_dir to another file system",
        )


def _paths(
    plan: Mapping[str, Any], facts: Mapping[str, Any], source: Mapping[str, Any], want: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    toolkit = plan.get("toolkit") or {}
    cpath: list[str] = []
    if toolkit.get("cccl"):
        cpath.append(toolkit["cccl"])
    elif toolkit and toolkit.get("cccl") is None and _wheel_with(facts, "cccl"):
        cpath.append(os.path.join(str(_wheel_with(facts, "cccl")), "cccl"))
    if toolkit and not toolkit.get("cusparse", True):
        cpath.extend(str(item["path"]) for item in facts.get("wheel_include") or [] if set(item["has"]) - {"cccl"})
    cpath.extend(want.get("extra_include_dirs") or [])
    libraries = []
    for package in ("nvshmem", "nccl"):
        root = (facts.get(package) or {}).get("root")
        if root:
            libraries.append(os.path.join(root, "lib"))
    if source.get("links_libcuda") and not (facts.get("libcuda") or {}).get("link") and toolkit.get("stubs"):
        libraries.append(toolkit["stubs"])
    return list(dict.fromkeys(cpath)), list(dict.fromkeys(libraries))


def _environment(
    plan: Mapping[str, Any], facts: Mapping[str, Any], want: Mapping[str, Any], generation: str
) -> dict[str, str]:
    """Return what is particular to this build; ``_deepep_wheel`` adds PATH, HOME and the folders of the overlay.

    The variables that DeepEP 2 writes into the wheel (EP_JIT_*, EP_NCCL_ROOT_DIR) are never set here: NCCL_DIR and
    NVSHMEM_DIR lead it to the same libraries without travelling to the fleet.
    """
    toolkit = plan.get("toolkit") or {}
    env = {
        "TORCH_CUDA_ARCH_LIST": ";".join(plan.get("archs") or []),
        "MAX_JOBS": str(max(1, int(plan.get("jobs") or 1))),
        "NINJA_STATUS": "[%f/%t] ",
    }
    if toolkit:
        env["CUDA_HOME"] = str(toolkit["path"])
    compiler = (facts.get("compiler") or {}).get("path")
    if compiler and want.get("compiler"):
        env.update(CXX=compiler, NVCC_CCBIN=compiler)
    for package, name in (("nvshmem", "NVSHMEM_DIR"), ("nccl", "NCCL_DIR")):
        found = facts.get(package) or {}
        if found.get("origin") == "given" and (package == "nvshmem" or generation == "v2"):
            env[name] = str(found["root"])
    if want.get("num_topk_idx_bits") and generation == "v2":
        env["EP_NUM_TOPK_IDX_BITS"] = str(want["num_topk_idx_bits"])
    if generation == "hybrid" and want.get("multinode"):
        env["HYBRID_EP_MULTINODE"] = "1"
        if str(want["multinode"]) == "nixl":
            env["USE_NIXL"] = "1"
    env.update({str(name): str(value) for name, value in (want.get("environment") or {}).items()})
    return env
