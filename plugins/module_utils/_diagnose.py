# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: decides from evidence what is wrong with a backend and what mends it. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import (
    DRIVER_LIBRARIES,
    MODULE_DISTRIBUTIONS,
    OS_PACKAGES,
    TORCH_LIBRARIES,
    VENDOR_LIBRARIES,
    WHEEL_LIBRARIES,
    Backend,
    Use,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES, STATES
from ansible_collections.gpufleet.sglang.plugins.module_utils._distributions import canonical, version_in
from ansible_collections.gpufleet.sglang.plugins.module_utils._outcome import Outcome


@dataclass
class Installed:
    """One installed distribution of a backend. ``files_ok`` is None where it has no RECORD."""

    name: str
    version: str
    variant: str
    path: str
    files_ok: Optional[bool] = None
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    tag_mismatch: Optional[str] = None
    editable: bool = False
    egg: bool = False
    commit: Optional[str] = None
    torch_pin: Optional[str] = None
    tags: list[str] = field(default_factory=list)
    requires: list[str] = field(default_factory=list)


@dataclass
class Extension:
    """What became of one :class:`~_backends.Built`.

    ``path`` is the file that counts, or None; ``siblings`` torch versions that there are files for; ``foreign`` files
    for another Python; ``missing``/``wrong``/``versions`` of its closure; ``private`` ``{soname: path}`` of missing
    libraries that lie inside the package; ``undefined`` symbols that nothing defines.
    """

    names: tuple[str, ...]
    path: Optional[str] = None
    siblings: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    problem: Optional[str] = None
    machine: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    undefined: list[str] = field(default_factory=list)
    cudart: list[int] = field(default_factory=list)
    needs_driver: bool = False
    family: Optional[str] = None
    torch_code: Optional[str] = None
    optional: bool = False
    absent_code: str = "extension_missing"


@dataclass
class Facts:
    """What holds for the host and the venv, for every backend.

    ``venv_cuda`` are the CUDA majors whose runtime is in the venv, ``cuda_majors`` those or else the host's.
    ``lacking`` are those of the table's system libraries that the loader does not find. ``nvidia`` are the installed
    NCCL, NVSHMEM and CUDA runtime distributions, ``{name: version}``.
    """

    venv: Mapping[str, Any]
    torch: Mapping[str, Any]
    sglang: Mapping[str, Any]
    os_family: str = "other"
    capabilities: Sequence[str] = ()
    gpu_nodes: Optional[bool] = None
    cuda_majors: Sequence[int] = ()
    venv_cuda: Sequence[int] = ()
    best_toolkit: Optional[str] = None
    nccl_root: Optional[str] = None
    guard: Optional[str] = None
    environment: Optional[Mapping[str, str]] = None
    lacking: Sequence[str] = ()
    nvidia: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """The static evidence of one use of a backend."""

    top: str = "absent"
    origin: Optional[str] = None
    outside: Optional[str] = None
    hidden: Optional[str] = None
    modules: dict[str, Optional[str]] = field(default_factory=dict)
    installed: list[Installed] = field(default_factory=list)
    wrong: list[Installed] = field(default_factory=list)
    foreign_owner: Optional[str] = None
    shared: list[str] = field(default_factory=list)
    shared_owners: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    archs: dict[str, list[int]] = field(default_factory=dict)
    lacking_archs: list[str] = field(default_factory=list)
    other_ucx: Optional[str] = None
    baked: dict[str, str] = field(default_factory=dict)
    revision: Optional[str] = None


@dataclass
class Finding:
    """One cause with what it rests on; ``state`` overrides the code's own."""

    code: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)
    state: Optional[str] = None

    @property
    def verdict(self) -> str:
        return self.state or CODES[self.code].state


# The first of these that was found is the cause; what stands later follows from it or matters less.
PRIORITY = (
    "not_installed", "namespace_leftover", "backend_without_meta", "wrong_distribution", "meta_without_backend",
    "shadowed", "wrong_machine", "wrong_python", "wrong_vendor_variant", "cuda_major_mismatch", "variant_needs_cuda",
    "variant_without_cuda", "files_missing", "corrupt_file", "torch_is_cpu_build", "mooncake_ep_not_built_for_torch",
    "mooncake_pg_not_built_for_torch", "nixl_ep_not_built_for_torch", "extension_missing", "torch_absent",
    "torch_broken", "missing_cuda_runtime", "private_lib_not_on_loader_path", "missing_system_lib",
    "missing_wheel_lib", "device_link_missing", "incomplete_build", "libstdcxx_mismatch", "glibc_too_old",
    "rdma_core_too_old", "system_lib_too_old", "torch_abi_mismatch", "nvshmem_mismatch", "nccl_mismatch",
    "python_abi_mismatch", "cuda_runtime_mismatch", "driver_too_old", "undefined_symbol", "no_driver",
    "no_gpu_visible", "arch_mismatch",
    "version_incompatible_with_sglang", "torch_pin_mismatch", "file_owned_by_two_distributions", "wrong_revision",
    "version_differs_from_pin", "files_changed", "install_interrupted", "ucx_conflict", "builder_path_baked_in",
    "egg_install", "editable_install",
)  # fmt: skip

# Static signs that an import which works disproves.
_DISPROVED = frozenset(
    [
        "wrong_machine", "wrong_python", "corrupt_file", "mooncake_ep_not_built_for_torch", "meta_without_backend",
        "mooncake_pg_not_built_for_torch", "nixl_ep_not_built_for_torch", "extension_missing", "torch_absent",
        "torch_is_cpu_build", "torch_broken", "missing_cuda_runtime", "private_lib_not_on_loader_path",
        "missing_system_lib", "missing_wheel_lib", "device_link_missing", "incomplete_build", "libstdcxx_mismatch",
        "glibc_too_old", "rdma_core_too_old", "system_lib_too_old", "torch_abi_mismatch", "nvshmem_mismatch",
        "nccl_mismatch", "python_abi_mismatch",
        "cuda_runtime_mismatch", "driver_too_old", "undefined_symbol", "no_driver", "no_gpu_visible", "not_installed",
        "namespace_leftover", "backend_without_meta",
    ]
)  # fmt: skip

# Static causes that explain an exception better than its own text does.
_EXPLAINS = frozenset(
    [
        "not_installed", "namespace_leftover", "backend_without_meta", "wrong_distribution", "meta_without_backend",
        "shadowed", "wrong_machine", "wrong_python", "wrong_vendor_variant", "cuda_major_mismatch",
        "variant_needs_cuda", "files_missing", "corrupt_file", "torch_is_cpu_build", "mooncake_ep_not_built_for_torch",
        "mooncake_pg_not_built_for_torch", "nixl_ep_not_built_for_torch", "extension_missing", "torch_absent",
        "private_lib_not_on_loader_path", "version_incompatible_with_sglang",
    ]
)  # fmt: skip

# Exceptions whose text names the cause itself: a static sign does not outrank them.
_SELF_EVIDENT = frozenset(
    [
        "duplicate_nccl_runtime", "invalid_nccl_version", "nccl_root_not_discoverable", "deleted_mapping",
        "cuda_home_not_found", "import_crashed", "import_timeout", "import_exited", "assertion_at_import",
        "permission_denied", "interpreter_does_not_start", "storage_error", "cannot_write", "driver_mismatch",
        "fabric_not_ready", "rdma_device_permission", "nccl_not_loaded", "toolkit_unusable", "bad_environment_value",
    ]
)  # fmt: skip


_BUNDLED = re.compile(r"-[0-9a-f]{8}\.so(?:\.|$)")
_LIBPYTHON = re.compile(r"^libpython(\d\.\d{1,3})[a-z]?\.so")


def _stem(soname: str) -> str:
    return soname.split(".so", 1)[0] + ".so"


def library_owner(soname: str) -> str:
    """Who provides a shared library: ``driver``, ``cudart``, ``torch``, ``wheel``, ``bundled``, ``python``, ``vendor``,
    ``system``.

    ``bundled``: of the wheel itself, so that nobody else can have it. Either renamed by the tool that puts libraries
    into wheels, or without a version in its name: what an operating system offers to programs always has one.
    ``vendor``: the runtime of another vendor's accelerators.
    """
    stem = _stem(soname)
    if _BUNDLED.search(soname):
        return "bundled"
    if _LIBPYTHON.match(soname):
        return "python"
    if stem in DRIVER_LIBRARIES:
        return "driver"
    if stem == "libcudart.so":
        return "cudart"
    if stem in TORCH_LIBRARIES:
        return "torch"
    if stem in WHEEL_LIBRARIES:
        return "wheel"
    if stem in VENDOR_LIBRARIES:
        return "vendor"
    return "bundled" if soname.endswith(".so") and stem not in OS_PACKAGES else "system"


def cudart_major(soname: str) -> Optional[int]:
    """13 for ``libcudart.so.13``; None for anything else."""
    matched = re.match(r"^libcudart\.so\.(\d{1,4})", soname)
    return int(matched.group(1)) if matched else None


def classify_symbol(symbol: str) -> str:
    """The code for an undefined symbol."""
    rules = (
        (r"^__cudaRegisterLinkedBinary|^__fatbinwrap|^__nv_", "device_link_missing"),
        (r"exception_ptr|GLIBCXX|CXXABI|^_ZNSt7__cxx11.*@", "libstdcxx_mismatch"),
        (r"nvshmem", "nvshmem_mismatch"),
        (r"^p?nccl[A-Z]", "nccl_mismatch"),
        (r"^_Z\w*?(7deep_ep|8deep_ep|8mooncake|9mooncake|7nixl_ep|\d+nixl)|^nixl", "incomplete_build"),
        (r"^(ucp|uct|ucs|ucm)_[a-z]", "ucx_conflict"),
        (r"^_Z(N|NK|TI|TV|TS)?2de\b|^_ZN7de", "incomplete_build"),
        (r"^_?Py[A-Z_]", "python_abi_mismatch"),
        (r"3c10|4c10d|2at\d|^_ZNK?2at|5torch|THP|6caffe2|^aoti_torch|^torch_|c10_cuda", "torch_abi_mismatch"),
        (r"^cu[A-Z]", "driver_too_old"),
        (r"^(__)?cuda[A-Z]|libcudart", "cuda_runtime_mismatch"),
        (r"^(ibv_|mlx5dv_|efadv_|rdma_)", "rdma_core_too_old"),
        (r"^(numa_|GOMP_|omp_|curl_|nl_|fi_)[a-z]", "system_lib_too_old"),
        (r"^_ZNSt|^_ZSt|^_ZNKSt", "libstdcxx_mismatch"),
    )
    for pattern, code in rules:
        if re.search(pattern, symbol):
            return code
    return "undefined_symbol"


def classify_version(version: str) -> str:
    """The code for a symbol version that a library does not offer (``GLIBCXX_3.4.32``)."""
    if version.startswith(("GLIBCXX_", "CXXABI_")):
        return "libstdcxx_mismatch"
    if version.startswith("GLIBC_"):
        return "glibc_too_old"
    if version.startswith(("IBVERBS_", "MLX5_", "EFA_", "RDMACM_")):
        return "rdma_core_too_old"
    if version.startswith("libcudart"):
        return "cuda_runtime_mismatch"
    if re.match(r"^(openssl|curl|libnuma|libnl|ucx|fabric|gomp|omp|gcc|zlib)[a-z_.\d-]", version, re.IGNORECASE):
        return "system_lib_too_old"
    return "undefined_symbol"


_CANNOT_OPEN = re.compile(r"([^\s:'\"]+\.so[^\s:'\"]*): cannot open shared object file(?:: ([^\n]*))?")
_UNDEFINED = re.compile(r"undefined symbol: ([^\s,]+)(?:, version ([^\s,()]+))?")
_UNRESOLVED = re.compile(r"symbol ([^\s,]+),? version ([^\s,]+) not defined in file (\S+)")
_VERSION = re.compile(r"version [`']([^'`]+)' not found")
_LITERAL = re.compile(r"(?:invalid literal for int\(\)[^:]*|could not convert string to float): '([^'\n]*)'")

# In this order: what says more comes first.
_TEXTS: tuple[tuple[str, str], ...] = (
    (r"Cannot re-initialize CUDA in forked subprocess", "not_probed"),
    (r"Duplicate NCCL runtime", "duplicate_nccl_runtime"),
    (r"Invalid NCCL versions", "invalid_nccl_version"),
    (r"Cannot find package: nccl|No libnccl\.so found", "nccl_root_not_discoverable"),
    (r"NCCL compile-time and runtime versions must be the same|NCCL runtime[^\n]{0,40}older than", "nccl_mismatch"),
    (r"Cannot find package: nvshmem|NVSHMEM (is|was) not found|make sure NVSHMEM is installed", "missing_wheel_lib"),
    (r"NVCC version should be|Failed to (get|parse) NVCC version|compiler\.hpp:\d+ 'return_code == 0'|"
     r"compiler\.hpp:\d+ 'std::regex_search", "toolkit_unusable"),
    (r"std::filesystem::exists\(nvcc_path\)|not (cuda_home|cuobjdump_path)\.empty\(\)|cuobjdump: (command )?not found",
     "cuda_home_not_found"),
    (r"not nccl_root\.empty\(\)", "nccl_root_not_discoverable"),
    (r"Failed to load CUDA driver", "no_driver"),
    (r"CUDA_HOME|CUDA installation path|find_cuda_home|No such file or directory: '?([^'\s]*/)?nvcc\b",
     "cuda_home_not_found"),
    (r"Mooncake PG was not built", "mooncake_pg_not_built_for_torch"),
    (r"Mooncake EP was not built", "mooncake_ep_not_built_for_torch"),
    (r"Python version mismatch|compiled for Python|bad magic number", "wrong_python"),
    (r"does not define module export function", "wrong_python"),
    (r"numpy\.(core|_core)\.\S+ failed to import|compiled using NumPy \d|numpy\.\w+ size changed|"
     r"compiled against (API|ABI) version", "dependency_broken"),
    (r"wrong ELF class|cannot open shared object file: Exec format|[Ee]xec format error", "wrong_machine"),
    (r"No space left on device|Input/output error|Stale (NFS )?file handle|Too many open files|"
     r"Transport endpoint is not connected|Structure needs cleaning", "storage_error"),
    (r"invalid ELF header|file too short|ELF file's phentsize|ELF load command|section header|"
     r"cannot dynamically load executable|only ET_DYN|ELF file (OS )?ABI|ELF file version|object file has no |"
     r"cannot contain null bytes|bad marshal data|marshal data too short", "corrupt_file"),
    (r"static TLS", "static_tls"),
    (r"mlx5dv_devx_uar|(ibv_|uverbs|RDMA|mlx5)[^\n]{0,200}(not permitted|[Pp]ermission denied|Cannot allocate memory)",
     "rdma_device_permission"),
    (r"NVSHMEM device library version does not match", "nvshmem_mismatch"),
    (r"NIXL_ERR_BACKEND", "nixl_backend_unusable"),
    (r"requires CUDA \d+, but PyTorch uses CUDA|detected CUDA \d+ but nixl-cu\d+ is not installed",
     "cuda_major_mismatch"),
    (r"No NIXL (CUDA )?backend found|No usable nixl_ep CUDA backend|Could not find CUDA-specific NIXL",
     "meta_without_backend"),
    (r"does not provide CUDA|Torch not compiled with CUDA", "torch_is_cpu_build"),
    (r"PyTorch is not installed", "torch_absent"),
    (r"system not yet initialized|SYSTEM_NOT_READY|[Ee]rror 802\b", "fabric_not_ready"),
    (r"Driver/library version mismatch|unsupported display driver|SYSTEM_DRIVER_MISMATCH|[Ee]rror 80[34]\b|"
     r"forward compatibility was attempted|COMPAT_NOT_SUPPORTED", "driver_mismatch"),
    (r"driver version is insufficient|driver on your system is too old", "driver_too_old"),
    (r"does not expose a usable CUDA device|Found no NVIDIA driver|[Nn]o CUDA-capable device|no CUDA GPUs|"
     r"No CUDA GPUs are available|CUDA_ERROR_NO_DEVICE|cuInit|NVML.*(not found|driver)|CUDA unknown error|"
     r"CUDA error: (initialization error|invalid device ordinal|unknown error)|CUDA_ERROR_NOT_INITIALIZED|"
     r"CUDA_ERROR_UNKNOWN|CUDA-capable device\(s\) is/are busy", "no_gpu_visible"),
    (r"named symbol not found|no kernel image is available", "arch_mismatch"),
    (r"Failed to make directory|Read-only file system", "cannot_write"),
    (r"failed to map segment from shared object: Cannot allocate", "storage_error"),
    (r"[Pp]ermission denied|Operation not permitted|failed to map segment", "permission_denied"),
)  # fmt: skip


def classify_library(name: str) -> tuple[str, dict[str, Any]]:
    """(code, details) for a library that the loader does not find."""
    details: dict[str, Any] = {"library": name}
    owner = library_owner(name)
    if owner == "driver":
        return "no_driver", details
    if owner == "cudart":
        return "cuda_major_mismatch", {**details, "needs": cudart_major(name)}
    if owner == "python":
        return "wrong_python", details
    if owner == "bundled":
        return "files_missing", {**details, "missing": [name]}
    if owner == "vendor":
        return "wrong_vendor_variant", {**details, "variant": VENDOR_LIBRARIES[_stem(name)]}
    if owner in ("torch", "wheel"):
        return ("torch_absent" if owner == "torch" else "missing_wheel_lib"), details
    return "missing_system_lib", details


def classify_text(text: str) -> Optional[tuple[str, dict[str, Any]]]:
    """(code, details) for what a loader or library says, or None where the text names no known cause."""
    matched = _CANNOT_OPEN.search(text)
    if matched and "No such file" in (matched.group(2) or "No such file"):
        if "/" in matched.group(1):
            # The loader says this of a file that exists when its machine is another.
            return "wrong_machine", {"library": matched.group(1)}
        return classify_library(matched.group(1))
    matched = _UNDEFINED.search(text) or _UNRESOLVED.search(text)
    if matched:
        symbol, version = matched.group(1), matched.group(2)
        code = classify_symbol(symbol)
        if code == "undefined_symbol" and version:
            code = classify_version(version)
        return code, {"symbol": symbol[:300], **({"version": version[:100]} if version else {})}
    matched = _VERSION.search(text)
    if matched:
        return classify_version(matched.group(1)), {"version": matched.group(1)[:100]}
    for pattern, code in _TEXTS:
        if re.search(pattern, text):
            return code, {"library": "libnvshmem_host.so.3"} if code == "missing_wheel_lib" else {}
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _errors(error: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The exception and what it came from; a child's word is not trusted to have the right types."""
    items = [error, *[item for item in _list(error.get("chain")) if isinstance(item, Mapping)]]
    return [{**item, "bases": _list(item.get("bases")), "frames": _list(item.get("frames"))} for item in items]


def classify_error(error: Mapping[str, Any], backend: Backend, wanted: Iterable[str]) -> Finding:
    """The cause of an exception that a child reported (``type``, ``bases``, ``name``, ``message``, ``chain``).

    The whole chain is read: libraries hide the loader's message behind "please install …".
    """
    known: Optional[Finding] = None
    missing: Optional[Finding] = None
    for item in _errors(error):
        kind, text = str(item.get("type", "")), str(item.get("message", ""))
        bases, frames = item["bases"], item["frames"]
        data: dict[str, Any] = {"text": text[:600]}
        if kind == "FileNotFoundError" and "(deleted)" in text + str(item.get("filename", "")):
            return Finding("deleted_mapping", text, data)
        hit = classify_text(text)
        if hit is not None and hit[0] == "wrong_machine" and item.get("exists") is False:
            hit = _gone(str(hit[1].get("library", "")))
        if hit is None and kind == "PermissionError":
            hit = ("permission_denied", {"path": str(item.get("filename", ""))[:300]})
        if hit is None and "AssertionError" in bases and any("find_cuda_home" in str(frame) for frame in frames):
            hit = ("cuda_home_not_found", {})
        if hit is None and "not NoneType" in text and any("check_nccl_so" in str(frame) for frame in frames):
            hit = ("nccl_not_loaded", {})
        literal = _LITERAL.search(text) if hit is None and "ValueError" in bases else None
        if literal:
            hit = ("bad_environment_value", {"value": literal.group(1)[:100]})
        if hit is not None and known is None:
            known = Finding(hit[0], text, {**data, **hit[1]})
        if "ModuleNotFoundError" in bases and missing is None:
            missing = _missing_module(str(item.get("name") or ""), text, data, backend, set(wanted))
    if known is not None and (missing is None or known.code != "cuda_home_not_found"):
        return known
    if missing is not None:
        return missing
    kind, text = str(error.get("type", "")), str(error.get("message", ""))
    data = {"text": text[:600]}
    if "AssertionError" in _list(error.get("bases")):
        return Finding("assertion_at_import", f"AssertionError: {text}", data)
    if "partially initialized module" in text or "circular import" in text:
        return Finding("extension_missing", text, data)
    return Finding("exception_at_import", f"{kind}: {text}", data)


def _gone(path: str) -> tuple[str, dict[str, Any]]:
    """What it means that a library is opened by its full path, and is not there."""
    if "/site-packages/" in path or "/dist-packages/" in path:
        return "files_missing", {"library": path, "missing": [path]}
    return classify_library(path.rsplit("/", 1)[-1])


def _missing_module(name: str, text: str, data: dict[str, Any], backend: Backend, wanted: set[str]) -> Finding:
    top = name.split(".", 1)[0]
    data = {**data, "name": name}
    if name == backend.module:
        return Finding("not_installed", text, data)
    if top == "torch":
        return Finding("torch_absent", text, data)
    own = {backend.module, *[module.split(".", 1)[0] for module in wanted]}
    extensions = {
        entry.split("/", 1)[0].split("{", 1)[0] for use in backend.uses.values() for built in use.extensions
        for entry in built.names
    }  # fmt: skip
    if top in own or any(top.startswith(prefix) for prefix in extensions if prefix):
        return Finding("extension_missing", text, data)
    return Finding("dependency_missing", text, data)


def variant_for(torch: Mapping[str, Any], backend: Backend, venv_cuda: Sequence[int] = ()) -> Optional[str]:
    """The variant of a backend that fits the venv's torch, or None where nothing says which.

    ``any`` for backends that have one variant only. Without torch, the one CUDA major whose runtime the venv has: the
    host's toolkit and driver say nothing about it.
    """
    variants = set(backend.install)
    if variants == {"any"}:
        return "any"
    if torch.get("version"):
        major = torch.get("cuda_major")
        if major:
            return f"cu{major}" if f"cu{major}" in variants else None
        if torch.get("hip"):
            return "rocm" if "rocm" in variants else None
        return "non-cuda" if "non-cuda" in variants else None
    majors = sorted(set(venv_cuda))
    if len(majors) == 1 and f"cu{majors[0]}" in variants:
        return f"cu{majors[0]}"
    return None


def _pin(name: str, facts: Facts) -> Optional[str]:
    specifier = str((facts.sglang.get("requires") or {}).get(name) or "")
    matched = re.match(r"^==\s*([^,;\s*]+)$", specifier)
    return matched.group(1) if matched else None


def _torch_release(facts: Facts) -> str:
    return str(facts.torch.get("version") or "").partition("+")[0]


def requirements(
    backend: Backend, variant: Optional[str], facts: Facts, version: Optional[str] = None, specifier: str = ""
) -> list[str]:
    """Exact requirements that provide ``backend`` in ``variant``: SGLang's own pin, else ``version``, else the table's.

    Empty where no published wheel fits.
    """
    names = backend.install.get(variant or "", ())
    result = []
    for name in names:
        chosen = _pin(name, facts) or version or backend.pins.get(name)
        if specifier and (chosen is None or not version_in(chosen, specifier)):
            exact = re.match(r"^==(\S+)$", specifier)
            last = re.search(r"<=\s*([^,\s]+)", specifier)
            chosen = exact.group(1) if exact else last.group(1) if last else None
        result.append(f"{name}=={chosen}" if chosen else name)
    return result


def _step(action: str, packages: Sequence[str] = (), **args: Any) -> dict[str, Any]:
    return {"action": action, "packages": list(packages), "args": args}


def _remedy(kind: str, summary: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "summary": summary, "steps": list(steps)}


def _manual(kind: str, text: str) -> dict[str, Any]:
    return _remedy(kind, text, _step("manual", text=text))


def _build(backend: Backend, facts: Facts, why: str) -> dict[str, Any]:
    if not backend.buildable:
        return _manual("none", why)
    archs = sorted(set(facts.capabilities))
    return _remedy("rebuild", why, _step("build", backend=backend.name, **({"archs": archs} if archs else {})))


def _below(capability: str, bound: str) -> bool:
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".") if part.isdigit())

    return number(capability) < number(bound)


def unsupported_gpus(backend: Backend, facts: Facts) -> list[str]:
    """The compute capabilities present for which the backend has no kernels at all and cannot be built."""
    if not backend.min_capability:
        return []
    return sorted({c for c in facts.capabilities if _below(c, backend.min_capability)})


def _wheel_fits(backend: Backend, facts: Facts) -> Optional[str]:
    """Why no published wheel of the backend fits, or None where one does."""
    if backend.torch_of:
        versions = [_pin(name, facts) or pin for name, pin in backend.pins.items()]
        torch = _torch_release(facts)
        wanted = {backend.torch_of.get(version or "") for version in versions}
        if torch and torch not in wanted and None not in wanted:
            return f"the published wheels are for torch {', '.join(sorted(filter(None, wanted)))}, not {torch}"
    lacking = [
        c for c in facts.capabilities
        if backend.archs and not any(c.split(".")[0] == a.split(".")[0] and not _below(c, a) for a in backend.archs)
    ]  # fmt: skip
    if lacking:
        return f"the published wheels have no code for compute capability {', '.join(sorted(set(lacking)))}"
    return None


def remedy_install(backend: Backend, facts: Facts) -> dict[str, Any]:
    """The mend for a backend that is not there."""
    variant = variant_for(facts.torch, backend, facts.venv_cuda)
    unsupported = unsupported_gpus(backend, facts)
    if unsupported:
        return _manual(
            "none",
            f"{backend.name} has no kernels for compute capability {', '.join(unsupported)}: use another backend.",
        )
    wanted = requirements(backend, variant, facts)
    why = _wheel_fits(backend, facts)
    if wanted and not why:
        flags = ["--no-deps"] if backend.no_deps else []
        first = _system_steps(backend, variant, facts)
        return _remedy("install", f"Install {' '.join(wanted)}.", *first, _step("pip_install", wanted, flags=flags))
    if not facts.torch.get("version") and not variant:
        return _manual("none", "The venv has no torch that says which variant is right: install torch first.")
    if facts.torch.get("version") and not facts.torch.get("cuda_major") and not facts.torch.get("hip"):
        return _manual("none", f"{backend.name} needs a CUDA build of torch; this one is a CPU build.")
    return _build(backend, facts, f"Build {backend.name}: {why or 'no published wheel fits this torch'}.")


def _system_steps(backend: Backend, variant: Optional[str], facts: Facts) -> list[dict[str, Any]]:
    """What the operating system lacks of the libraries that a variant's wheel will need: so that one round mends."""
    libraries = [name for name in backend.system.get(variant or "", ()) if name in facts.lacking]
    return _os_remedy(libraries, facts)["steps"] if libraries else []


def _owners(seen: Seen) -> list[str]:
    return sorted({canonical(item.name) for item in seen.installed if item.variant != "meta" and not item.egg})


def _variant_name(
    backend: Backend, variant: Optional[str], present: Sequence[Installed] = ()
) -> Optional[str]:  # fmt: skip
    """The distribution of a variant; of the flavour that all of ``present`` have, where they have one."""
    flavours = {backend.flavours.get(canonical(item.name)) for item in present}
    if len(flavours) == 1 and None not in flavours:
        for name, flavour in backend.flavours.items():
            if flavour in flavours and backend.variants.get(name) == variant:
                return name
    names = [name for name in backend.install.get(variant or "", ()) if name != backend.meta]
    return names[0] if names else None


def remedy_replace(backend: Backend, seen: Seen, facts: Facts, specifier: str = "") -> dict[str, Any]:
    """Uninstalls every owner and installs the right variant with --force-reinstall --no-deps."""
    variant = variant_for(facts.torch, backend, facts.venv_cuda)
    present = [item for item in seen.installed if item.variant != "meta"]
    if any(item.egg for item in seen.installed):
        return _manual("none", "It is an egg, which pip cannot remove: remove it by hand and install a wheel.")
    if any(item.editable for item in present):
        return _manual("none", "It is an editable install: mend the working tree it comes from.")
    right = _variant_name(backend, variant, present)
    if variant == "any" or right is None:
        known = [item for item in present if backend.install and canonical(item.name) in backend.variants]
        if not known or (right is None and variant is None and len(known) > 1):
            return _build(backend, facts, f"No published {backend.name} fits this torch: build it.")
        right = canonical(known[0].name)
    same = [item for item in present if canonical(item.name) == right]
    split = [item for item in present if canonical(item.name) != backend.meta]
    keep = same[0].version if same else (split[0].version if split and backend.meta else None)
    version = keep if keep and "+" not in keep else None
    pin = _pin(right, facts)
    chosen = pin or version or backend.pins.get(right) or _plain_pin(backend, variant)
    if specifier and (chosen is None or version_in(chosen, specifier) is not True):
        exact = requirements(backend, variant, facts, specifier=specifier)
        chosen = (exact[-1].partition("==")[2] if exact else "") or None
    if keep and "+" in keep and not pin:
        return _build(backend, facts, f"{right} {keep} was built for this fleet: build it again.")
    wanted = [f"{right}=={chosen}" if chosen else right]
    if backend.meta and not any(item.variant == "meta" and item.version == chosen for item in seen.installed):
        wanted.insert(0, f"{backend.meta}=={chosen}" if chosen else backend.meta)
    remove = [
        name for name in _owners(seen)
        if name != backend.meta and (name != right or len(_owners(seen)) > 1 or seen.shared)
    ] if _clobbers(backend, present) else []  # fmt: skip
    steps = [] if same else _system_steps(backend, variant, facts)
    if remove:
        steps.append(_step("pip_uninstall", remove))
    steps.append(_step("pip_install", wanted, flags=["--force-reinstall", "--no-deps"]))
    gone = f"Uninstall {', '.join(remove)}, then install" if remove else "Reinstall"
    return _remedy("replace", f"{gone} {' '.join(wanted)} with --force-reinstall --no-deps.", *steps)


def _plain_pin(backend: Backend, variant: Optional[str]) -> Optional[str]:
    """The version of a variant without a flavour: a project publishes its flavours together."""
    name = _variant_name(backend, variant)
    return backend.pins.get(name) if name else None


def _clobbers(backend: Backend, present: Sequence[Installed]) -> bool:
    """Whether variants of this backend write the same files, so that owners must go before one is installed."""
    if backend.clobber_below is None:
        return True
    if not backend.clobber_below:
        return False
    return any(version_in(item.version, "<" + backend.clobber_below) for item in present)


def os_package(soname: str, family: str) -> Optional[str]:
    """The operating system's package that holds a library, or None where the table does not know it."""
    python = _LIBPYTHON.match(soname)
    abi = soname.partition(".so.")[2]
    names = OS_PACKAGES.get(f"{_stem(soname)}.{abi.split('.')[0]}") or OS_PACKAGES.get(_stem(soname))
    if python:
        names = (f"libpython{python.group(1)}", f"python{python.group(1)}-libs")
    index = {"debian": 0, "redhat": 1}.get(family)
    if not names or index is None or ("{abi}" in names[index] and not abi):
        return None
    return names[index].replace("{abi}", abi)


def _os_remedy(libraries: Sequence[str], facts: Facts) -> dict[str, Any]:
    packages = sorted({p for p in (os_package(name, facts.os_family) for name in libraries) if p})
    unknown = [name for name in libraries if not os_package(name, facts.os_family)]
    if not packages:
        return _manual("system_package", f"Install the operating system's package that has {', '.join(libraries)}.")
    steps = [
        _step("os_install", packages, manager="apt" if facts.os_family == "debian" else "dnf"),
        *([_step("manual", text=f"Install what has {', '.join(unknown)}.")] if unknown else []),
    ]
    return _remedy("system_package", f"Install {', '.join(packages)}.", *steps)


def _nvidia_wheel(soname: str, facts: Facts) -> Optional[str]:
    names = WHEEL_LIBRARIES.get(_stem(soname))
    major = facts.torch.get("cuda_major")
    return names[1 if major == 13 else 0] if names and major in (12, 13) else None


# What these say of a wheel can be right of a file that is as its wheel brought it; what is installed is another build.
_OTHER_WHEEL = frozenset(
    ["wrong_python", "wrong_machine", "python_abi_mismatch", "wrong_vendor_variant", "install_interrupted"]
)


def remedy_for(finding: Finding, backend: Backend, use: str, seen: Seen, facts: Facts) -> Optional[dict[str, Any]]:
    """The smallest mend for a finding, or None where there is nothing to mend.

    The same version of a distribution whose files are all right is never installed again: it would change nothing.
    """
    remedy = _mend(finding, backend, use, seen, facts)
    gone = finding.code == "files_missing" and "library" not in finding.data
    if remedy is None or gone or finding.code in _OTHER_WHEEL:
        return remedy
    whole = {
        f"{canonical(item.name)}=={item.version}" for item in seen.installed
        if item.files_ok is True and not item.tag_mismatch and not seen.shared
    }  # fmt: skip
    touched = [step for step in remedy["steps"] if step["action"] in ("pip_install", "pip_uninstall")]
    if touched and all(step["action"] == "pip_install" and set(step["packages"]) <= whole for step in touched):
        other = _other_version(backend, use, seen, facts) if finding.code in _OF_THE_VERSION else None
        if other:
            return remedy_replace(backend, seen, facts, "==" + other)
        if backend.buildable and finding.code in _OF_THE_VERSION:
            return _build(backend, facts, f"What is installed is as it was published: build {backend.name}.")
        names = " ".join(sorted({name for step in touched for name in step["packages"]}))
        return _manual("none", f"{names} is as it was published, so installing it again changes nothing: "
                       f"{finding.message}")  # fmt: skip
    return remedy


# Faults that a published wheel can have of its own, so that another version is a mend.
_OF_THE_VERSION = frozenset(
    [
        "device_link_missing", "incomplete_build", "extension_missing", "files_missing", "api_missing",
        "variant_needs_cuda",
    ]
)  # fmt: skip


def _other_version(backend: Backend, use: str, seen: Seen, facts: Facts) -> Optional[str]:
    """SGLang's or the table's version of what is installed, where it is another one and fits."""
    right = _variant_name(backend, variant_for(facts.torch, backend, facts.venv_cuda), seen.installed)
    version = _pin(right, facts) or backend.pins.get(right) if right else None
    if version is None or any(item.version == version for item in seen.installed) or _wheel_fits(backend, facts):
        return None
    return version if not _incompatible(backend, use, version, facts) else None


def _incompatible(backend: Backend, use: str, version: str, facts: Facts) -> list[Any]:
    """The rows of the table that say that ``version`` does not work with the installed SGLang."""
    sglang = str(facts.sglang.get("version") or "")
    return [
        row for row in backend.incompatible
        if sglang and use in row.uses and version_in(version, row.versions) and version_in(sglang, row.sglang)
    ]  # fmt: skip


def _mend(finding: Finding, backend: Backend, use: str, seen: Seen, facts: Facts) -> Optional[dict[str, Any]]:
    code, data = finding.code, finding.data
    entry = CODES[code]
    if code in ("not_installed", "namespace_leftover", "wrong_distribution"):
        remedy = remedy_install(backend, facts)
        owner = [item.name for item in seen.wrong] or list(data.get("distributions") or [])
        owner = [name.partition(" ")[0] for name in owner if data.get("owns_module")]
        if owner and remedy["kind"] == "install":
            at = next(i for i, step in enumerate(remedy["steps"]) if step["action"] == "pip_install")
            remedy["steps"].insert(at, _step("pip_uninstall", sorted(owner)))
            remedy["kind"] = "replace"
            remedy["summary"] = f"Uninstall {', '.join(sorted(owner))}. " + remedy["summary"]
        return remedy
    if code == "backend_without_meta":
        return _meta_remedy(backend, seen, facts)
    if code == "meta_without_backend":
        version = next((item.version for item in seen.installed if item.variant == "meta"), None)
        name = _variant_name(backend, variant_for(facts.torch, backend, facts.venv_cuda))
        if name is None:
            return _manual("none", entry.mend)
        wanted = f"{name}=={version or backend.pins.get(name)}"
        return _remedy("install", f"Install {wanted}.", _step("pip_install", [wanted], flags=["--no-deps"]))
    if code == "missing_system_lib":
        return _os_remedy(data.get("libraries") or [data.get("library", "")], facts)
    if code in ("libstdcxx_mismatch", "rdma_core_too_old", "system_lib_too_old"):
        # It is installed, and what the package manager offers may be no newer: nothing to be carried out unseen.
        return _manual("system_package", entry.mend)
    if code == "ucx_conflict" and data.get("path"):
        parts = str((facts.environment or {}).get("LD_LIBRARY_PATH", "")).split(":")
        value = ":".join(part for part in parts if part and part.rstrip("/") != str(data["path"]).rstrip("/"))
        return _remedy("env_var", f"Set LD_LIBRARY_PATH={value}.", _step("set_env", LD_LIBRARY_PATH=value))
    if code == "cannot_write":
        if backend.name == "deep_ep":
            folder = f"/var/cache/sglang/{backend.name}"
            return _remedy("env_var", f"Set EP_JIT_CACHE_DIR={folder}.", _step("set_env", EP_JIT_CACHE_DIR=folder))
        return _manual("env_var", entry.mend)
    if code == "missing_wheel_lib":
        wheel = _nvidia_wheel(str(data.get("library", "")), facts)
        text = f"Install {wheel} at the version that this torch requires." if wheel else entry.mend
        pin = (facts.torch.get("requires") or {}).get(wheel) if wheel else None
        exact = re.match(r"^==\s*([^,;\s*]+)$", str(pin or ""))
        if wheel and exact:
            return _remedy("install", text, _step("pip_install", [f"{wheel}=={exact.group(1)}"], flags=["--no-deps"]))
        return _manual("install", text)
    if code == "private_lib_not_on_loader_path":
        folder = str(data.get("folder", ""))
        old = str((facts.environment or {}).get("LD_LIBRARY_PATH", ""))
        value = ":".join([folder, *[part for part in old.split(":") if part and part != folder]])
        return _remedy("env_var", f"Set LD_LIBRARY_PATH={value}.", _step("set_env", LD_LIBRARY_PATH=value))
    if code == "nccl_root_not_discoverable":
        if facts.nccl_root:
            return _remedy(
                "env_var", f"Set EP_NCCL_ROOT_DIR={facts.nccl_root}.",
                _step("set_env", EP_NCCL_ROOT_DIR=facts.nccl_root),
            )  # fmt: skip
        return _manual("env_var", "Set EP_NCCL_ROOT_DIR to a prefix that has lib/libnccl.so*.")
    if code == "static_tls":
        return _preload(data, facts)
    if code in ("cuda_home_not_found", "toolkit_unusable"):
        if facts.best_toolkit and facts.best_toolkit != (facts.environment or {}).get("CUDA_HOME"):
            return _remedy(
                "env_var", f"Set CUDA_HOME={facts.best_toolkit}.", _step("set_env", CUDA_HOME=facts.best_toolkit)
            )
        return _manual("env_var", entry.mend)
    if code == "builder_path_baked_in":
        return _baked_remedy(list(data.get("variables", {})), backend, facts)
    if code in ("version_incompatible_with_sglang", "version_differs_from_pin", "api_missing"):
        if seen.outside:
            return _manual("none", entry.mend)
        return remedy_replace(backend, seen, facts, str(data.get("good", "")))
    if code == "dependency_missing":
        return _dependency_remedy(str(data.get("name", "")), seen)
    if code == "wrong_vendor_variant" and variant_for(facts.torch, backend, facts.venv_cuda) is None:
        return _manual("none", entry.mend)
    if code == "torch_pin_mismatch" and backend.buildable and _wheel_fits(backend, facts):
        return _build(backend, facts, f"Build {backend.name} for torch {_torch_release(facts)}.")
    if code == "cuda_major_mismatch" and variant_for(facts.torch, backend, facts.venv_cuda) is None:
        if backend.buildable:
            return _build(backend, facts, f"Build {backend.name} for CUDA {facts.torch.get('cuda')}.")
        return _manual("none", "No published variant fits this torch's CUDA.")
    if code == "variant_needs_cuda" and variant_for(facts.torch, backend) is None:
        return _manual("none", f"{backend.name} has no variant without CUDA.")
    if code == "nixl_ep_not_built_for_torch" or (
        code == "extension_missing" and backend.torch_builds and backend.uses[use].gpu_code
    ):
        return _remedy_for_torch(backend, use, seen, facts)
    if code in ("nccl_mismatch", "nvshmem_mismatch", "cuda_runtime_mismatch"):
        return _runtime_remedy(code, backend, use, seen, facts)
    if entry.kind == "replace":
        return remedy_replace(backend, seen, facts)
    if entry.kind == "rebuild":
        return _rebuild(code, backend, use, seen, facts)
    if entry.kind in ("driver", "env_var", "system_package", "install"):
        return _manual(entry.kind, entry.mend)
    return None if entry.state == "ok" else _manual("none", entry.mend)


def _remedy_for_torch(backend: Backend, use: str, seen: Seen, facts: Facts) -> dict[str, Any]:
    """The newest published version that has an extension for this torch and goes with this SGLang."""
    right = _variant_name(backend, variant_for(facts.torch, backend, facts.venv_cuda))
    release = ".".join(_torch_release(facts).split(".")[:2])
    for version, releases in backend.torch_builds.get(right or "", {}).items():
        if release in releases and not _incompatible(backend, use, version, facts):
            return remedy_replace(backend, seen, facts, f"=={version}")
    return _manual("none", f"No published {right or backend.name} is known to have it for torch {release}: use another "
                   "backend, or a torch that it is built for.")  # fmt: skip


_RUNTIMES = {
    "nccl_mismatch": ("NCCL", "nvidia-nccl-cu{cuda}"),
    "nvshmem_mismatch": ("NVSHMEM", "nvidia-nvshmem-cu{cuda}"),
    "cuda_runtime_mismatch": ("the CUDA runtime", "nvidia-cuda-runtime-cu12"),
}


def _runtime_remedy(code: str, backend: Backend, use: str, seen: Seen, facts: Facts) -> dict[str, Any]:
    """A library of NVIDIA's that another package has moved is put back; a build of one's own is made anew.

    It is torch's library too, so the step is for a person; the wheel that misses it is whole.
    """
    entry = CODES[code]
    local = [item for item in seen.installed if "+" in item.version or item.editable or item.egg]
    if not seen.installed or local:
        return _rebuild(code, backend, use, seen, facts)
    what, pattern = _RUNTIMES[code]
    major = facts.torch.get("cuda_major")
    name = pattern.replace("{cuda}", str(major)) if major else ""
    if code == "cuda_runtime_mismatch" and major == 13:
        name = "nvidia-cuda-runtime"
    has = facts.nvidia.get(name)
    pin = re.match(r"^==\s*([^,;\s*]+)$", str((facts.torch.get("requires") or {}).get(name) or ""))
    needs = _pin(name, facts) or (pin.group(1) if pin else None)
    floor = backend.needs.get(name) if backend.needs else None
    if floor and (needs is None or version_in(needs, ">=" + floor) is False):
        needs = floor
    if not name or needs is None or needs == has:
        return _manual("none", f"{entry.mend} {', '.join(sorted(f'{n} {v}' for n, v in facts.nvidia.items()))}".strip())
    have = f"the venv has {has}" if has else "the venv does not have it"
    return _manual("none", f"{what} is not the one that {backend.name} was built with ({have}): pip install --no-deps "
                   f"--force-reinstall {name}=={needs}, and check torch after it.")  # fmt: skip


def _rebuild(code: str, backend: Backend, use: str, seen: Seen, facts: Facts) -> dict[str, Any]:
    entry = CODES[code]
    unsupported = unsupported_gpus(backend, facts)
    if unsupported:
        return _manual(
            "none",
            f"{backend.name} has no kernels for compute capability {', '.join(unsupported)}: use another backend.",
        )
    if backend.buildable:
        local = [item for item in seen.installed if "+" in item.version or item.editable]
        # A published wheel for exactly this torch and these GPUs is nearer than a build.
        published = seen.installed and not local and not any(item.egg for item in seen.installed)
        same = code not in ("arch_mismatch", "torch_abi_mismatch", "wrong_revision")
        if published and same and not _wheel_fits(backend, facts):
            return remedy_replace(backend, seen, facts)
        other = _other_version(backend, use, seen, facts) if published and code == "torch_abi_mismatch" else None
        if other:
            return remedy_replace(backend, seen, facts, "==" + other)
        return _build(backend, facts, entry.mend)
    if code in ("extension_missing", "import_crashed", "corrupt_file", "incomplete_build"):
        return remedy_replace(backend, seen, facts)
    return _manual("rebuild", entry.mend)


def _baked_remedy(names: Sequence[str], backend: Backend, facts: Facts) -> dict[str, Any]:
    values = {name: f"/var/cache/sglang/{backend.name}" for name in names if name.endswith("CACHE_DIR")}
    if "EP_NCCL_ROOT_DIR" in names and facts.nccl_root:
        values["EP_NCCL_ROOT_DIR"] = facts.nccl_root
    steps = [_step("set_env", **values)] if values else []
    left = [name for name in names if name not in values]
    if left or not steps:
        what = ", ".join(left) or "the variable"
        steps.append(_step("manual", text=f"Set {what} in the service's environment to a path of this host."))
    return _remedy("env_var", CODES["builder_path_baked_in"].mend, *steps)


def _preload(data: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    named = re.search(r"(/[^\s:'\"]+\.so[^\s:'\"]*): cannot allocate memory in static TLS", str(data.get("text", "")))
    if named is None:
        return _manual("env_var", CODES["static_tls"].mend)
    old = str((facts.environment or {}).get("LD_PRELOAD", "")).replace(":", " ").split()
    value = ":".join([named.group(1), *[path for path in old if path != named.group(1)]])
    return _remedy("env_var", f"Set LD_PRELOAD={value}.", _step("set_env", LD_PRELOAD=value))


def _meta_remedy(backend: Backend, seen: Seen, facts: Facts) -> dict[str, Any]:
    variant = variant_for(facts.torch, backend, facts.venv_cuda)
    right = _variant_name(backend, variant)
    there = [item for item in seen.installed if item.variant != "meta"]
    if not facts.torch.get("cuda_major") and there:
        # Beside a CPU torch nothing asks for another CUDA major than the one that is there.
        right = None
    same = [item for item in there if right is None or canonical(item.name) == right] or there
    name, version = (canonical(same[0].name), same[0].version) if same else (right or "", "")
    if right and name != right:
        name = right
    wanted = [f"{backend.meta}=={version}", f"{name}=={version}"]
    return _remedy("install", f"Install {' '.join(wanted)}.", _step("pip_install", wanted, flags=["--no-deps"]))


def _dependency_remedy(module: str, seen: Seen) -> dict[str, Any]:
    """Installs what provides a module only where that is known: a name on an index can be anybody's."""
    top = module.split(".", 1)[0]
    required = {name for item in seen.installed for name in item.requires}
    name = MODULE_DISTRIBUTIONS.get(top)
    if name is None and canonical(top) in required and not re.match(r"^(nvidia|cuda|torch)", top):
        name = canonical(top)
    if name is None:
        return _manual("none", f"Install what provides the module {module}; its name on an index may be another's.")
    return _remedy("install", f"Install {name}.", _step("pip_install", [name], flags=[]))


def static_findings(backend: Backend, use_name: str, seen: Seen, facts: Facts) -> list[Finding]:
    """Every cause that the files show for one use, the one that counts first."""
    use = backend.uses[use_name]
    findings: list[Finding] = []
    add = findings.append
    _presence(backend, seen, facts, add)
    if not any(f.code in ("not_installed", "namespace_leftover", "backend_without_meta") for f in findings):
        _packaging(backend, use_name, seen, facts, add)
        for extension in seen.extensions:
            _extension(backend, use, extension, seen, facts, add)
        _versions(backend, use_name, seen, facts, add)
    order = {code: index for index, code in enumerate(PRIORITY)}
    return sorted(findings, key=lambda finding: order.get(finding.code, len(order)))


def _names(items: Iterable[Installed]) -> str:
    return ", ".join(f"{item.name} {item.version}" for item in items)


def _presence(backend: Backend, seen: Seen, facts: Facts, add: Any) -> None:
    variants = [item for item in seen.installed if item.variant != "meta"]
    metas = [item for item in seen.installed if item.variant == "meta"]
    wrong = seen.wrong
    if seen.outside:
        more = f" and hides the copy in {seen.hidden}" if seen.hidden else ""
        add(Finding(
            "shadowed", f"{backend.module} is found at {seen.outside}, outside the venv{more}.",
            {"path": seen.outside, "hides": seen.hidden},
        ))  # fmt: skip
    if wrong and not seen.installed:
        owns = seen.top in ("package", "module", "extension") and not seen.outside
        add(Finding(
            "wrong_distribution",
            f"{_names(wrong)} is another project; SGLang's {backend.name} comes from "
            f"{' or '.join(_install_names(backend, facts))}.",
            {"distributions": [item.name for item in wrong], "owns_module": owns},
        ))  # fmt: skip
        return
    if seen.top == "absent":
        if backend.meta and variants and not metas:
            add(Finding(
                "backend_without_meta", f"{_names(variants)} is installed without {backend.meta}, which provides the "
                "module.", {"installed": [item.name for item in variants]},
            ))  # fmt: skip
        elif seen.installed and not all(item.editable or item.egg for item in seen.installed):
            lost = [path for item in seen.installed for path in item.missing]
            add(Finding(
                "files_missing", f"{_names(seen.installed)} is registered and its files are gone.",
                {"missing": lost[:5], "count": len(lost)},
            ))  # fmt: skip
        elif seen.installed:
            add(
                Finding(
                    "files_missing",
                    f"{_names(seen.installed)} points at a working tree that has no {backend.module}.",
                    {},
                )
            )
        else:
            add(Finding("not_installed", f"{backend.name} is not installed."))
    elif seen.top == "namespace" and not seen.outside:
        if seen.installed and (not backend.meta or metas):
            lost = [path for item in seen.installed for path in item.missing]
            add(Finding(
                "files_missing", f"{seen.origin} has no __init__.py: {backend.module} would import as an empty "
                "namespace package.", {"missing": lost[:5], "count": len(lost)},
            ))  # fmt: skip
        elif backend.meta and variants:
            add(Finding("backend_without_meta", f"{_names(variants)} is installed without {backend.meta}.", {}))
        else:
            add(Finding("namespace_leftover", f"{seen.origin} is a folder without __init__.py that nobody owns."))
    elif backend.meta and metas and not variants and any(not e.path for e in seen.extensions):
        add(Finding("meta_without_backend", f"{_names(metas)} has no CUDA package behind it."))
    elif seen.foreign_owner:
        add(Finding(
            "wrong_distribution", f"{seen.origin} belongs to {seen.foreign_owner}, which is no {backend.name}.",
            {"distributions": [seen.foreign_owner], "owns_module": True},
        ))  # fmt: skip


def _install_names(backend: Backend, facts: Facts) -> list[str]:
    right = backend.install.get(variant_for(facts.torch, backend, facts.venv_cuda) or "")
    return sorted(right or {name for names in backend.install.values() for name in names})


def _packaging(backend: Backend, use_name: str, seen: Seen, facts: Facts, add: Any) -> None:
    use = backend.uses[use_name]
    torch = facts.torch
    variants = [item for item in seen.installed if item.variant != "meta"]
    for item in seen.installed:
        if item.missing:
            add(Finding(
                "files_missing", f"{item.name} {item.version}: {len(item.missing)} of its files are missing, "
                f"{item.missing[0]} first.", {"missing": item.missing[:5], "count": len(item.missing)},
            ))  # fmt: skip
        if item.changed and not seen.shared:
            add(Finding(
                "files_changed", f"{item.name} {item.version}: {len(item.changed)} files differ from RECORD, "
                f"{item.changed[0]} first.", {"changed": item.changed[:5], "count": len(item.changed)},
            ))  # fmt: skip
        if item.tag_mismatch and not item.editable:
            code = "wrong_python" if item.tag_mismatch == "python" else "wrong_machine"
            add(Finding(
                code, f"{item.name} {item.version} was built for {', '.join(item.tags)}; this venv is "
                f"{facts.venv.get('soabi')}.", {"tags": item.tags, "venv": facts.venv.get("soabi")},
            ))  # fmt: skip
        release = _torch_release(facts)
        if item.torch_pin and release and version_in(release, item.torch_pin) is False:
            add(Finding(
                "torch_pin_mismatch", f"{item.name} {item.version} is for torch {item.torch_pin}; the venv has "
                f"{torch.get('version')}.", {"needs": item.torch_pin, "has": torch.get("version")},
            ))  # fmt: skip
        if item.egg:
            add(Finding("egg_install", f"{item.name} {item.version} is an egg at {item.path}.", {"path": item.path}))
        elif item.editable:
            add(
                Finding(
                    "editable_install",
                    f"{item.name} {item.version} is editable, from {seen.origin}.",
                    {"path": seen.origin},
                )
            )
    if seen.shared and len(seen.shared_owners) > 1:
        add(Finding(
            "file_owned_by_two_distributions", f"{' and '.join(seen.shared_owners)} own the same {len(seen.shared)} "
            "files; the one installed last won.",
            {"owners": seen.shared_owners, "shared": seen.shared[:5], "count": len(seen.shared)},
        ))  # fmt: skip
    if seen.leftovers:
        add(Finding("install_interrupted", f"pip was interrupted: {seen.leftovers[0]} is left.", {
            "leftovers": seen.leftovers[:5]}))  # fmt: skip
    present = {item.variant for item in variants}
    vendor = present & {"musa", "rocm", "npu"}
    if vendor and present == vendor and torch.get("version") and not (vendor == {"rocm"} and torch.get("hip")):
        add(Finding("wrong_vendor_variant", f"{_names(variants)} is for other accelerators than torch "
                    f"{torch.get('version')}.", {"variant": sorted(vendor)[0]}))  # fmt: skip
    if present == {"non-cuda"} and torch.get("cuda_major"):
        add(Finding(
            "variant_without_cuda", f"{_names(variants)} cannot move GPU memory; torch is {torch.get('version')}.",
            {"needs": None, "host": torch.get("cuda_major")},
        ))  # fmt: skip
    cpu_build = torch.get("version") and not torch.get("cuda_major") and not torch.get("hip")
    if cpu_build and "non-cuda" in backend.install and present and present <= {"cu12", "cu13"} and not backend.meta:
        add(Finding("variant_needs_cuda", f"{_names(variants)} needs CUDA; torch {torch.get('version')} is a CPU "
                    "build.", {"needs": sorted(present)[0], "host": None}))  # fmt: skip
    if cpu_build and use.cuda and present:
        add(Finding("torch_is_cpu_build", f"{backend.name} {use_name} needs CUDA; torch {torch.get('version')} is a "
                    "CPU build."))  # fmt: skip
    right = f"cu{torch.get('cuda_major')}"
    if backend.meta and right in backend.install and right not in present and present & {"cu12", "cu13"}:
        add(Finding(
            "cuda_major_mismatch", f"{_names(variants)} is for another CUDA than torch {torch.get('version')} "
            f"(CUDA {torch.get('cuda')}).", {"needs": sorted(present)[0][2:], "host": str(torch["cuda_major"])},
        ))  # fmt: skip


def _extension(backend: Backend, use: Use, ext: Extension, seen: Seen, facts: Facts, add: Any) -> None:
    torch = facts.torch
    if ext.path is None:
        _no_extension(backend, use, ext, seen, facts, add)
        return
    if ext.problem:
        add(Finding("corrupt_file", f"{ext.path}: {ext.problem}.", {"path": ext.path, "problem": ext.problem}))
        return
    machine = facts.venv.get("machine")
    if machine and ext.machine and ext.machine != machine:
        add(Finding("wrong_machine", f"{ext.path} is for {ext.machine}; this host is {machine}.", {
            "path": ext.path, "machine": ext.machine}))  # fmt: skip
        return
    major = torch.get("cuda_major")
    lost = [cudart_major(name) for name in ext.missing if cudart_major(name)]
    wrong_major = [m for m in ext.cudart if major and m != major]
    if wrong_major:
        add(Finding(
            "cuda_major_mismatch", f"{ext.path} needs libcudart.so.{wrong_major[0]}; torch {torch.get('version')} "
            f"brings CUDA {torch.get('cuda')}.",
            {"needs": str(wrong_major[0]), "host": str(major), "path": ext.path},
        ))  # fmt: skip
    elif lost and not torch.get("version"):
        others = [m for m in facts.cuda_majors if m != lost[0]]
        if others:
            add(Finding(
                "cuda_major_mismatch", f"{ext.path} needs libcudart.so.{lost[0]}; here is CUDA {others[0]} only.",
                {"needs": str(lost[0]), "host": str(others[0]), "path": ext.path},
            ))  # fmt: skip
        else:
            add(Finding("missing_cuda_runtime", f"{ext.path} needs libcudart.so.{lost[0]}, which is nowhere.", {
                "library": f"libcudart.so.{lost[0]}"}))  # fmt: skip
    elif lost and major:
        add(Finding("missing_wheel_lib", f"libcudart.so.{lost[0]} is missing although torch is a CUDA build.", {
            "library": f"libcudart.so.{lost[0]}"}))  # fmt: skip
    elif lost:
        add(Finding("torch_is_cpu_build", f"{ext.path} needs libcudart.so.{lost[0]}; torch is a CPU build."))
    _missing_libraries(ext, facts, add)
    for version, provider in sorted(ext.versions.items()):
        add(Finding(classify_version(version), f"{provider} does not offer {version}.", {
            "version": version, "library": provider}))  # fmt: skip
    for soname, path in ext.wrong.items():
        add(Finding("wrong_machine", f"{soname} is there for another machine only: {path}.", {"path": path}))
    for symbol in ext.undefined[:20]:
        add(Finding(classify_symbol(symbol), f"{ext.path}: undefined symbol {symbol}.", {
            "symbol": symbol[:300], "count": len(ext.undefined)}))  # fmt: skip
    if ext.needs_driver and use.cuda and "libcuda.so.1" not in ext.missing and facts.gpu_nodes is False:
        add(Finding("no_gpu_visible", "No GPU device node is on this host."))


def _missing_libraries(ext: Extension, facts: Facts, add: Any) -> None:
    system = []
    for soname, user in sorted(ext.missing.items()):
        owner = library_owner(soname)
        if soname in ext.private:
            folder = ext.private[soname].rpartition("/")[0]
            add(Finding(
                "private_lib_not_on_loader_path", f"{user} needs {soname}, which lies at {ext.private[soname]}, where "
                "the loader does not look.", {"library": soname, "found_at": ext.private[soname], "folder": folder},
            ))  # fmt: skip
        elif owner == "driver":
            add(Finding("no_driver", f"{soname} is not on this host: there is no NVIDIA driver.", {"library": soname}))
        elif owner == "torch":
            if not facts.torch.get("version"):
                add(Finding("torch_absent", f"{user} needs {soname}; the venv has no torch.", {"library": soname}))
            elif "cuda" in soname and not facts.torch.get("cuda_major"):
                add(Finding("torch_is_cpu_build", f"{user} needs {soname}; torch is a CPU build.", {}))
            else:
                add(Finding("torch_broken", f"{user} needs {soname}, which the venv's torch does not have.", {
                    "library": soname}))  # fmt: skip
        elif owner == "wheel":
            if facts.torch.get("version") and not facts.torch.get("cuda_major"):
                add(Finding("torch_is_cpu_build", f"{user} needs {soname}; torch is a CPU build.", {}))
            else:
                add(Finding("missing_wheel_lib", f"{user} needs {soname}.", {"library": soname}))
        elif owner == "bundled":
            add(Finding("files_missing", f"{user} needs {soname}, which only its own wheel can bring and which is not "
                        "there.", {"library": soname, "missing": [soname]}))  # fmt: skip
        elif owner == "vendor" and not _has_vendor(soname, facts):
            add(Finding("wrong_vendor_variant", f"{user} needs {soname}, which belongs to other accelerators than "
                        f"torch {facts.torch.get('version')}.", {
                            "library": soname, "variant": VENDOR_LIBRARIES[_stem(soname)]}))  # fmt: skip
        elif owner == "python":
            add(_lost_python(soname, f"{user} needs {soname}", {"library": soname}, facts))
        elif owner in ("system", "vendor"):
            system.append(soname)
    if system:
        add(Finding("missing_system_lib", f"Missing on this host: {', '.join(system)}.", {
            "library": system[0], "libraries": system}))  # fmt: skip


def program_finding(ext: Extension, facts: Facts) -> Optional[Finding]:
    """What keeps a program of a backend from starting, or None; that there is no driver keeps no program."""
    findings: list[Finding] = []
    if ext.problem:
        return Finding("corrupt_file", f"{ext.path}: {ext.problem}.", {"path": ext.path, "problem": ext.problem})
    lost = [m for m in map(cudart_major, ext.missing) if m]
    if lost and facts.torch.get("cuda_major") == lost[0]:
        lost = []
    if lost:
        cuda = facts.torch.get("cuda_major")
        code = "cuda_major_mismatch" if cuda else "missing_cuda_runtime"
        if facts.torch.get("version") and not cuda:
            code = "variant_needs_cuda"
        findings.append(Finding(code, f"{ext.path} needs libcudart.so.{lost[0]}, which is not on "
                                "this host.", {"library": f"libcudart.so.{lost[0]}"}))  # fmt: skip
    _missing_libraries(ext, facts, findings.append)
    for version, provider in sorted(ext.versions.items()):
        findings.append(Finding(classify_version(version), f"{provider} does not offer {version}.", {
            "version": version, "library": provider}))  # fmt: skip
    order = {code: index for index, code in enumerate(PRIORITY)}
    left = [finding for finding in findings if finding.code != "no_driver"]
    return min(left, key=lambda finding: order.get(finding.code, len(order)), default=None)


def _has_vendor(soname: str, facts: Facts) -> bool:
    """Whether a vendor's library is of the accelerators that torch is built for."""
    return bool(facts.torch.get("hip")) and VENDOR_LIBRARIES.get(_stem(soname)) == "rocm"


def _lost_python(soname: str, message: str, data: dict[str, Any], facts: Facts) -> Finding:
    """A libpython that is not there: another Python's, or this one's, which its interpreter does without."""
    matched = _LIBPYTHON.match(soname)
    own = ".".join(str(facts.venv.get("python_version") or "").split(".")[:2])
    if matched and matched.group(1) == own:
        return Finding("missing_system_lib", f"{message}.", {**data, "libraries": [soname]})
    return Finding("wrong_python", f"{message}; this venv is {facts.venv.get('soabi')}.", data)


def _no_extension(backend: Backend, use: Use, ext: Extension, seen: Seen, facts: Facts, add: Any) -> None:
    torch = _torch_release(facts)
    if ext.siblings and ext.torch_code:
        if torch:
            add(Finding(
                ext.torch_code, f"{backend.name} has it for torch {', '.join(ext.siblings)}; the venv has {torch}.",
                {"has": ext.siblings, "needs": torch},
            ))  # fmt: skip
        return
    if ext.foreign:
        add(Finding("wrong_python", f"{ext.foreign[0]} is for another Python than {facts.venv.get('soabi')}.", {
            "found": ext.foreign[:3], "venv": facts.venv.get("soabi")}))  # fmt: skip
        return
    if not ext.optional:
        add(Finding(ext.absent_code, f"None of {', '.join(ext.names)} is there.", {"looked_for": list(ext.names)}))


def _versions(backend: Backend, use_name: str, seen: Seen, facts: Facts, add: Any) -> None:
    sglang = str(facts.sglang.get("version") or "")
    for item in seen.installed:
        for row in _incompatible(backend, use_name, item.version, facts):
            add(Finding(
                "version_incompatible_with_sglang", f"{item.name} {item.version} does not work with SGLang "
                f"{sglang}: {row.why}.", {"good": row.good, "source": row.source},
            ))  # fmt: skip
        pin = _pin(canonical(item.name), facts)
        if pin and version_in(item.version, "==" + pin) is False:
            add(Finding(
                "version_differs_from_pin", f"{item.name} is {item.version}; SGLang {sglang} requires {pin}.",
                {"has": item.version, "needs": pin, "good": "==" + pin},
            ))  # fmt: skip
        if seen.revision and not revision_matches(item.version, item.commit, seen.revision):
            built = item.commit or item.version.partition("+")[2]
            add(Finding(
                "wrong_revision", f"{item.name} {item.version} is not revision {seen.revision[:12]}.",
                {"has": built or None, "needs": seen.revision},
            ))  # fmt: skip
    if seen.lacking_archs:
        built_for = [f"sm_{arch}" for arch in seen.archs.get("sm", [])]
        add(Finding(
            "arch_mismatch", f"{backend.name} has code for {', '.join(built_for) or 'no GPU'}; this host has compute "
            f"capability {', '.join(seen.lacking_archs)}.",
            {"built": [f"{arch // 10}.{arch % 10}" for arch in seen.archs.get("sm", [])],
             "needed": seen.lacking_archs},
        ))  # fmt: skip
    if seen.other_ucx:
        add(Finding("ucx_conflict", f"{seen.other_ucx} comes before the UCX of the wheel.", {"path": seen.other_ucx}))
    if seen.baked:
        add(Finding(
            "builder_path_baked_in", "The wheel carries paths of the host that built it: "
            + ", ".join(f"{name}={value}" for name, value in sorted(seen.baked.items())) + ".",
            {"variables": seen.baked},
        ))  # fmt: skip


def revision_matches(version: str, commit: Optional[str], wanted: str) -> bool:
    """Whether a build is of revision ``wanted``; a local part that is no hash (``+local``) tells nothing, so True."""
    built = (commit or version.partition("+")[2].split(".")[0]).lower().lstrip("g")
    if not re.match(r"^[0-9a-f]{6,40}$", built):
        return True
    wanted = wanted.lower()
    return wanted.startswith(built) or built.startswith(wanted)


def import_finding(backend: Backend, use_name: str, outcome: Outcome) -> Optional[Finding]:
    """The cause that an import shows, or None where it worked."""
    wanted = backend.uses[use_name].modules
    tail = outcome.output.strip()[-600:]
    if outcome.outcome == "ok":
        lacking = [name for name, there in outcome.attributes.items() if not there]
        hollow = [name for name, info in outcome.modules.items() if info.get("namespace")]
        if hollow:
            return Finding(
                "files_missing", f"{hollow[0]} imports as an empty namespace package.", {"module": hollow[0]}
            )
        if lacking:
            return Finding("api_missing", f"{lacking[0]} does not exist.", {"attributes": lacking})
        return None
    if outcome.outcome == "error":
        error = outcome.error or {}
        torch = outcome.torch or {}
        finding = classify_error(error, backend, wanted)
        failed = torch.get("error")
        if isinstance(failed, Mapping) and finding.code in (
            "torch_absent",
            "exception_at_import",
            "dependency_missing",
        ):
            if failed.get("type") == "ModuleNotFoundError" and failed.get("name") == "torch":
                return Finding("torch_absent", str(failed.get("message")), {})
            if failed.get("message") == error.get("message") or finding.code == "torch_absent":
                return Finding("torch_broken", f"torch: {failed.get('message')}", {"torch_error": failed.get("type")})
        return finding
    if outcome.outcome == "signal":
        return Finding("import_crashed", f"The import died by {outcome.signal}.", {
            "signal": outcome.signal, "output": tail})  # fmt: skip
    if outcome.outcome == "exit":
        code = outcome.status if outcome.status is not None else (outcome.error or {}).get("exit")
        return Finding("import_exited", f"The import ended the process (status {code}).", {
            "status": code, "output": tail})  # fmt: skip
    if outcome.outcome == "timeout":
        return Finding("import_timeout", f"The import gave {outcome.message}.", {"output": tail})
    if outcome.outcome == "torch":
        return Finding("torch_broken", f"Importing torch: {outcome.signal or outcome.message}.", {
            "signal": outcome.signal, "output": tail})  # fmt: skip
    if outcome.outcome == "interpreter":
        return Finding("interpreter_does_not_start", f"The venv's Python does not come up: {outcome.message}.", {
            "signal": outcome.signal, "status": outcome.status, "output": tail})  # fmt: skip
    return Finding("not_probed", f"The child could not be started: {outcome.message}.", {"output": tail})


def merge(static: Sequence[Finding], outcome: Optional[Outcome], imported: Optional[Finding]) -> Optional[Finding]:
    """The one cause of a use from what the files show and what the import said; None where nothing is wrong."""
    first = static[0] if static else None
    if outcome is None:
        return first
    if imported is None:
        left = [finding for finding in static if finding.code not in _DISPROVED]
        if not left:
            return None
        finding = left[0]
        if finding.code in ("files_missing", "wrong_distribution") and finding.verdict != "ok":
            return Finding(finding.code, finding.message + " It imports all the same.", finding.data, "suspect")
        return finding
    if imported.code == "not_probed":
        return first or imported
    if imported.code == "import_crashed" and first is not None and first.code == "corrupt_file":
        return Finding(first.code, first.message, {**imported.data, **first.data})
    if imported.code in _SELF_EVIDENT:
        return imported
    for finding in static:
        if finding.code == "ucx_conflict" and imported.code == "nixl_backend_unusable":
            return Finding(finding.code, f"{finding.message} {imported.message}", finding.data, "broken")
        if finding.code in _EXPLAINS and finding.code != imported.code:
            data = {**finding.data, "import_error": imported.message[:600]}
            # What a use looks like while its files are right is no longer enough once the import has failed.
            state = "broken" if finding.verdict in ("ok", "suspect") else None
            return Finding(finding.code, finding.message, data, state)
    for finding in static:
        if finding.code == imported.code:
            return Finding(finding.code, finding.message, {**imported.data, **finding.data})
    if imported.code in ("extension_missing", "undefined_symbol", "torch_abi_mismatch", "exception_at_import"):
        for finding in static:
            if finding.code in ("torch_pin_mismatch", "file_owned_by_two_distributions", "files_changed",
                                "install_interrupted"):  # fmt: skip
                data = {**finding.data, "import_error": imported.message[:600]}
                if imported.code == "torch_abi_mismatch":
                    return Finding(imported.code, imported.message, {**data, **imported.data})
                return Finding(finding.code, finding.message, data, "broken")
    return imported


def decide_use(
    backend: Backend, use_name: str, seen: Seen, facts: Facts, outcome: Optional[Outcome] = None
) -> dict[str, Any]:
    """One entry of ``uses`` (contracts.md): state, code, message, level, layer, remedy, evidence."""
    static = static_findings(backend, use_name, seen, facts)
    imported = import_finding(backend, use_name, outcome) if outcome is not None else None
    if imported is not None:
        imported = _with_torch(imported, facts)
        if imported.verdict in ("ok", "suspect"):
            # What is a suspicion in files is a fault once the import fails of it.
            imported.state = "broken"
    finding = merge(static, outcome, imported)
    reached = outcome is not None and outcome.outcome != "not_started"
    evidence = _evidence(seen, outcome, [other for other in static if finding is None or other.code != finding.code])
    level = "import" if reached else "static"
    if finding is None:
        return {"state": "ok", "code": None, "message": None, "level": level, "layer": None, "remedy": None,
                "evidence": evidence}  # fmt: skip
    # A variant for another CUDA that two owners overwrite is mended like two owners, and is a mismatch all the same.
    clobbered = [f for f in static if f.code == "file_owned_by_two_distributions"]
    if finding.code == "cuda_major_mismatch" and clobbered:
        finding = Finding(
            "file_owned_by_two_distributions", f"{clobbered[0].message} {finding.message}",
            {**finding.data, **clobbered[0].data}, "variant_mismatch",
        )  # fmt: skip
    if finding.code == "not_installed" and unsupported_gpus(backend, facts):
        names = ", ".join(unsupported_gpus(backend, facts))
        finding = Finding("deepep_unsupported_arch", f"{backend.name} has no kernels for compute capability {names}.")
    evidence.update({key: value for key, value in finding.data.items() if value not in (None, [], {})})
    return {
        "state": finding.verdict, "code": finding.code, "message": finding.message, "level": level,
        "layer": CODES[finding.code].layer, "remedy": remedy_for(finding, backend, use_name, seen, facts),
        "evidence": evidence,
    }  # fmt: skip


def _with_torch(finding: Finding, facts: Facts) -> Finding:
    """What an exception says of torch or CUDA, against what the venv has.

    A missing libcudart is a mismatch only where torch's or the host's CUDA is another major.
    """
    library = str(finding.data.get("library", ""))
    if finding.code == "wrong_python" and _LIBPYTHON.match(library):
        return _lost_python(library, finding.message.rstrip("."), finding.data, facts)
    owner = library_owner(library) if library else ""
    cpu_build = facts.torch.get("version") and not facts.torch.get("cuda_major") and not facts.torch.get("hip")
    if cpu_build and (owner == "wheel" or (owner == "torch" and "cuda" in library)):
        return Finding("torch_is_cpu_build", finding.message, finding.data)
    if finding.code == "wrong_vendor_variant" and _has_vendor(library, facts):
        return Finding("missing_system_lib", finding.message, finding.data)
    if finding.code == "bad_environment_value":
        named = [n for n, v in sorted((facts.environment or {}).items()) if v and v == finding.data.get("value")]
        if named:
            text = f"{', '.join(named)}={finding.data['value']}: {finding.message}"
            return Finding(finding.code, text, {**finding.data, "variables": named})
    if finding.code == "torch_absent" and facts.torch.get("version"):
        return Finding("torch_broken", finding.message, finding.data)
    if finding.code != "cuda_major_mismatch":
        return finding
    needs = finding.data.get("needs")
    major = facts.torch.get("cuda_major")
    if needs is None:
        return finding
    if major == needs:
        return Finding("missing_wheel_lib", finding.message, finding.data)
    if major is None and facts.torch.get("version"):
        return Finding("torch_is_cpu_build", finding.message, finding.data)
    if major is None and not [m for m in facts.cuda_majors if m != needs]:
        return Finding("missing_cuda_runtime", finding.message, finding.data)
    host = major or next(m for m in facts.cuda_majors if m != needs)
    return Finding(finding.code, finding.message, {**finding.data, "needs": str(needs), "host": str(host)})


def _evidence(seen: Seen, outcome: Optional[Outcome], others: Sequence[Finding]) -> dict[str, Any]:
    evidence: dict[str, Any] = {"origin": seen.origin} if seen.origin else {}
    files = [ext.path for ext in seen.extensions if ext.path]
    if files:
        evidence["extensions"] = files
    if any(seen.archs.values()):
        evidence["archs"] = seen.archs
    if others:
        evidence["also"] = sorted({finding.code for finding in others})
    if outcome is not None:
        evidence["import"] = outcome.outcome
        if outcome.version:
            evidence["module_version"] = outcome.version
        if outcome.error:
            error = outcome.error
            evidence["exception"] = {
                "type": error.get("type"), "name": error.get("name"), "message": str(error.get("message"))[:600],
                "at": (_list(error.get("frames")) or [None])[-1],
            }  # fmt: skip
        if outcome.outcome in ("signal", "exit", "timeout", "torch", "interpreter", "not_started") and outcome.output:
            evidence["output"] = outcome.output[-800:]
        if outcome.libraries:
            evidence["loaded"] = outcome.libraries[:20]
    return evidence


def worst(states: Iterable[str]) -> str:
    """The worst of several states; ``ok`` for none."""
    return max(states, key=STATES.index, default="ok")


def fatal_for_service(outcome: Optional[Outcome], guard: Optional[str]) -> bool:
    """Whether SGLang dies of this import although no flag asks for the backend.

    ``guard`` is what its ``except`` clause around the import takes: ``ImportError`` or ``Exception``; None where
    SGLang does not import it unasked.
    """
    if outcome is None or guard is None or outcome.outcome in ("ok", "not_started", "torch", "interpreter"):
        return False
    return guard not in _list((outcome.error or {}).get("bases"))


def decide_backend(
    backend: Backend,
    uses: Mapping[str, dict[str, Any]],
    wanted: Sequence[str],
    installed: Sequence[Installed],
    fatal: bool,
) -> dict[str, Any]:
    """One entry of ``backends`` (contracts.md) from its decided uses; ``wanted`` empty: kv_transfer, else a2a."""
    chosen = [use for use in wanted if use in uses]
    if not chosen:
        chosen = ["kv_transfer"] if "kv_transfer" in uses else [next(iter(uses))]
    state = worst(uses[use]["state"] for use in chosen)
    lead = next(uses[use] for use in chosen if uses[use]["state"] == state)
    return {
        **{key: lead[key] for key in ("state", "code", "message", "level", "layer", "remedy", "evidence")},
        "distributions": [
            {"name": item.name, "version": item.version, "variant": item.variant, "path": item.path,
             "files_ok": item.files_ok} for item in installed
        ],
        "fatal_for_service": fatal,
        "uses": dict(uses),
    }  # fmt: skip
