# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the first real error of a build log, and how far a build has come (pure)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple


class Cause(NamedTuple):
    """A row of the table. ``retryable``: the same build can succeed later without anybody changing anything."""

    code: str
    pattern: str
    text: str
    mend: str
    retryable: bool = False


# Order matters only inside one line: the earliest matching line wins, and there the first row.
CAUSES: tuple[Cause, ...] = (
    Cause(
        "cccl_headers_not_on_host_path",
        r"(?<![\w.-])(?:cuda/[a-z_]+(?:/[\w./]+)?|nv/target|cub/[\w./]+|thrust/[\w./]+): No such file",
        "the host compiler does not find the CCCL headers, which CUDA 13 moved to include/cccl",
        "put the toolkit's targets/<arch>/include/cccl (or include/cccl) on CPATH",
    ),
    Cause(
        "rdma_headers_missing",
        r"(?:infiniband|rdma)/\w+\.h: No such file",
        "the RDMA headers are missing",
        "install libibverbs-dev (Debian) or rdma-core-devel (RHEL), or give a folder with them in extra_include_dirs",
    ),
    Cause(
        "cuda_headers_missing",
        r"(?:cusparse|cublas\w*|cusolver\w*|curand\w*|cufft|nvrtc|nvToolsExt|cuda_runtime_api"
        r"|cuda_profiler_api|cuda_runtime|cuda_fp8|cuda_fp16|cuda_bf16|cooperative_groups|driver_types|vector_types"
        r"|nvml|cuda)\.h: No such file",
        "the toolkit lacks CUDA library headers (it is the compiler only)",
        "put site-packages/nvidia/cu13/include of the venv on CPATH, or install the toolkit's development packages",
    ),
    Cause(
        "nccl_headers_missing",
        r"nccl(?:_device(?:/\w+)?)?\.h: No such file"
        r"|['\"\u2018]nccl\w+['\"\u2019] (?:is undefined|was not declared|has not been declared|does not name a type)",
        "NCCL's headers are missing or too old",
        "use the venv's nvidia-nccl package (2.30.4 or newer for DeepEP 2)",
    ),
    Cause(
        "nvshmem_headers_missing",
        r"(?:nvshmemx?|device_host_transport/\w+|non_abi/[\w/]+)\.(?:h|cuh): No such file",
        "NVSHMEM's headers are missing",
        "install nvidia-nvshmem-cu12 or -cu13 to match torch, or give nvshmem_dir",
    ),
    Cause(
        "nvshmem_too_old",
        r"['\"\u2018]nvshmemx?i?_?\w+['\"\u2019] (?:is undefined|was not declared|has not been declared|has no member)"
        r"|has no member ['\"\u2018]?nvshmem\w*",
        "NVSHMEM's headers lack what this revision uses",
        "install nvidia-nvshmem 3.4.5 for torch's CUDA, or give nvshmem_dir",
    ),
    Cause(
        "torch_headers_missing",
        r"(?:ATen|c10|torch|pybind11|caffe2)/[\w./]+\.(?:h|hpp): No such file",
        "the headers of the venv's torch are not there",
        "install torch again in the target venv: its wheel brings them",
    ),
    Cause(
        "transport_headers_missing",
        r"(?:gdrapi|doca_\w+|ucp/api/\w+|ucs/\w+/\w+|nixl\w*)\.h: No such file",
        "the headers of a transport library are missing",
        "install the development package of the header that is named, or build without that transport",
    ),
    Cause(
        "submodule_missing",
        r"(?:fmt/(?:base|format|core)\.h: No such file|third-party/\w+.*(?:No such file|does not exist|not found))",
        "a git submodule of the source is empty",
        "clone with --recurse-submodules, or unpack the submodule into the source folder",
    ),
    Cause(
        "python_headers_missing",
        r"Python\.h: No such file",
        "the headers of the venv's Python are missing",
        "install the development package of that Python (python3-dev, python3.x-devel)",
    ),
    Cause(
        "toolkit_major_mismatch",
        r"The detected CUDA version \(.*\) mismatches the version that was used to compile",
        "nvcc belongs to another CUDA than torch",
        "use a toolkit whose major version equals torch.version.cuda",
    ),
    Cause(
        "torch_is_cpu_build",
        r"CUDA_HOME environment variable is not set|Torch not compiled with CUDA",
        "torch in the target venv is a CPU build, or no toolkit is set: no CUDA extension can be built with it",
        "install a CUDA build of torch in the target venv",
    ),
    Cause(
        "build_isolation",
        r"ModuleNotFoundError: No module named '(?:torch|numpy)'",
        "the build did not see the target venv's packages",
        "build with the target venv's interpreter and without build isolation",
    ),
    Cause(
        "build_tools_missing",
        r"ModuleNotFoundError: No module named '(?:setuptools|wheel|packaging|ninja|pkg_resources|distutils|pybind11)\b"
        r"|error: invalid command 'bdist_wheel'"
        r"|Ninja is required to load C\+\+ extensions|Cannot find CMake executable",
        "Python build tools are missing",
        "let the build overlay be filled (an index or a wheelhouse with setuptools, wheel and ninja)",
    ),
    Cause(
        "build_tools_unavailable",
        r"(?:ERROR: )?No matching distribution found for|Could not find a version that satisfies the requirement",
        "the build tools could not be had from the package index",
        "give a wheelhouse that holds setuptools, wheel and ninja",
    ),
    Cause(
        "nvcc_missing",
        r"(?:nvcc: (?:command )?not found|(?:No such file or|Not a) directory: '[^']*nvcc'|/nvcc: not found"
        r"|command '[^']*nvcc' failed: No such file|No CMAKE_CUDA_COMPILER could be found)",
        "nvcc is not where it was",
        "install the CUDA toolkit that matches torch",
    ),
    Cause(
        "host_compiler_unsupported",
        r"unsupported GNU version|#error -- unsupported|not supported by nvcc.*host compiler"
        r"|The current installed version of \S+ .* is (?:greater|less) than"
        r"|C\+\+(?:17|20) or later compatible compiler is required|unrecognized command[- ]line option '-std=c\+\+\d\w"
        r"|only available with -std=c\+\+|std::filesystem\S* has not been declared",
        "nvcc does not accept this host compiler",
        "install a compiler that the toolkit supports and give it in compiler (CC/CXX, NVCC_CCBIN)",
    ),
    Cause(
        "cxx_compiler_missing",
        r"(?:command '?(?:/\S+/)?(?:gcc|g\+\+|c\+\+|cc"
        r"|\w+-linux-gnu-\w+\+*)'? (?:failed: )?No such file|(?:g|c)\+\+: (?:command )?not found|cannot find 'ld'"
        r"|(?:cannot execute|error trying to exec) 'cc1plus'|Failed to preprocess host compiler"
        r"|nvcc fatal\s*:\s*Failed to)",
        "there is no C++ compiler",
        "install g++ (Debian) or gcc-c++ (RHEL)",
    ),
    Cause(
        "arch_unsupported_by_toolkit",
        r"Unsupported gpu architecture|Unknown CUDA arch \(|Value '(?:sm|compute)_\w+' is not defined",
        "this toolkit or torch does not know the GPU architecture",
        "use a newer toolkit, or leave the architecture out of gpu_archs",
    ),
    Cause(
        "deepep_unsupported_arch",
        r"Disable SM90 features|assert False, 'Not implemented'|AssertionError: Not implemented"
        r"|Instruction '[\w.]+' (?:not supported|cannot be compiled)|Modifier '[\w.:]+' requires \.target"
        r"|Feature '[^']+' (?:requires|not supported)",
        "this DeepEP needs instructions that the architecture lacks",
        "build for the GPUs that this revision supports, or use another a2a backend",
    ),
    Cause(
        "toolkit_too_old",
        r"nvcc fatal\s*:\s*Unknown option|ptxas\b.*(?:Not a name of any known instruction|Unknown symbol 'st\."
        r"|Unexpected instruction types|Unknown modifier|Unsupported \.version)|identifier \"__nv_fp\w+\" is undefined"
        r"|namespace \"cuda(?:::\w+)?\" has no member",
        "this CUDA toolkit is too old for the source",
        "use a newer toolkit of torch's CUDA major (DeepEP 2 on Blackwell needs 13.1)",
    ),
    Cause(
        "library_newer_than_toolkit",
        r"nvlink\b.*(?:newer than toolkit|Uncompress failed)|fatbinary\b.*newer than",
        "NVSHMEM's device library was made by a newer toolkit than this one",
        "install the NVSHMEM of torch's CUDA major, or use a newer toolkit",
    ),
    Cause(
        "nvshmem_without_ibgda",
        r"[Uu]ndefined reference to '?`?nvshmemi_ibgda_device_state_d",
        "this NVSHMEM was built without IBGDA",
        "use the NVSHMEM wheel, or build NVSHMEM with NVSHMEM_IBGDA_SUPPORT=1",
    ),
    Cause(
        "nvshmem_too_new",
        r"[Mm]ultiple definition of '?`?nvshmemi?_ibgda_device_state_d",
        "this revision does not work with NVSHMEM 3.5 and newer",
        "pin nvidia-nvshmem to 3.4.5, or build DeepEP 29d31c0 or newer",
    ),
    Cause(
        "nvshmem_device_library_missing",
        r"nvlink\b.*[Cc]ould not open input file '[^']*nvshmem|nvlink\b.*[Uu]ndefined reference to '?_?\w*nvshmem"
        r"|Unresolved extern function '\w*nvshmem",
        "NVSHMEM's device library (libnvshmem_device.a) was not linked, or lacks a function",
        "install nvidia-nvshmem 3.4.5 for torch's CUDA, or give an nvshmem_dir that has it",
    ),
    Cause(
        "nvshmem_mismatch",
        r"undefined reference to [`'\u2018]?\w*nvshmem",
        "NVSHMEM's library and its headers are of different versions",
        "leave one NVSHMEM: the package of torch's CUDA major in the venv, or nvshmem_dir",
    ),
    Cause(
        "libstdcxx_mismatch",
        r"undefined reference to .*@@?(?:GLIBCXX|CXXABI)_",
        "a library was built with a newer C++ library than the one that is linked",
        "use the host compiler of the system, not of another environment, or a newer one",
    ),
    Cause(
        "wrong_machine_library",
        r"error adding symbols: file in wrong format|incompatible with \w+:\S+ output"
        r"|unknown architecture of input file",
        "a library is for another machine than this host",
        "install the library for this machine (x86_64, or sbsa for Arm servers)",
    ),
    Cause(
        "nccl_library_not_found",
        r"cannot find -l:?(?:libnccl\.so\S*|nccl)\b|libnccl\.so not found",
        "the linker does not find NCCL",
        "put site-packages/nvidia/nccl/lib on LIBRARY_PATH",
    ),
    Cause(
        "libcuda_stub_not_found",
        r"cannot find -lcuda(?!\w)|undefined reference to [`'\u2018]?cu[A-Z]\w+",
        "the linker does not find libcuda, or an older one than the source needs",
        "put the toolkit's lib64/stubs on LIBRARY_PATH",
    ),
    Cause(
        "nvshmem_library_not_found",
        r"cannot find -l:?(?:libnvshmem\w*\.\S+|nvshmem\w*)|libnvshmem_host\.so not found",
        "the linker does not find NVSHMEM (the wheel ships libnvshmem_host.so.3 only)",
        "use a revision with DeepEP #627, or a link libnvshmem_host.so in a folder on LIBRARY_PATH",
    ),
    Cause(
        "cuda_library_not_found",
        r"cannot find -l:?(?:lib)?(cudart(?:_static)?|cudadevrt|nvtx3interop|nvrtc|cublas\w*|mlx5|ibverbs)\b"
        r"|undefined reference to symbol '(?:ibv_|mlx5dv_)",
        "the linker does not find a library of the toolkit or of rdma-core",
        "install the toolkit's development libraries (mlx5, ibverbs: rdma-core), or add their folder to LIBRARY_PATH",
    ),
    Cause(
        "torch_library_not_found",
        r"cannot find -l:?(?:lib)?(?:c10|torch)\w*"
        r"|ImportError: lib(?:c10|torch|cudart|cublas|cudnn|nccl|cusparse|cufft)\w*\.so\S*: cannot open",
        "the libraries of the venv's torch are not found",
        "mend torch in the target venv first: import it there",
    ),
    Cause(
        "library_not_found",
        r"cannot find -l:?(?:lib)?[\w.+-]+",
        "the linker does not find a library of the operating system",
        "install the development package of the library that is named",
    ),
    Cause(
        "out_of_memory",
        r"Killed\s+signal|\bKilled\b(?: {2,}|$)|fatal error: Killed signal|died due to signal 9|signal 9"
        r"|virtual memory exhausted|Cannot allocate memory|cc1plus.*out of memory|compiler error: Killed|Error 137\b"
        r"|LLVM ERROR: out of memory|std::bad_alloc|^MemoryError\b",
        "the compiler was killed: not enough memory for this many jobs",
        "lower max_jobs (about 2.6 GB a job) or use a larger builder",
        True,
    ),
    Cause(
        "process_limit",
        r"(?:posix_spawn|fork|vfork|pthread_create|clone)\w*:? .*Resource temporarily unavailable"
        r"|can't start new thread",
        "the host lets the build start no more processes",
        "lower max_jobs, or raise the limit of processes",
        True,
    ),
    Cause(
        "compiler_crashed",
        r"died due to signal (?:11|6|4|7)\b|internal compiler error|died with status 0x",
        "the compiler crashed",
        "build again with fewer jobs; if it crashes at the same file, use another toolkit or host compiler",
        True,
    ),
    Cause(
        "disk_full",
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free space in the state folder's file system, or set state_dir to another",
        True,
    ),
    Cause(
        "network_unreachable",
        r"Could not resolve host|Connection (?:timed out|refused)|unable to access 'http"
        r"|Network is unreachable|Failed to connect to|SSL certificate problem|RPC failed|early EOF|index-pack failed"
        r"|unexpected disconnect|clone of '[^']*' into submodule path '[^']*' failed",
        "a download failed",
        "use a folder or a tarball as the source and a wheelhouse for the build tools",
        True,
    ),
    Cause(
        "revision_not_found",
        r"(?:pathspec '[^']+' did not match|couldn't find remote ref|not our ref"
        r"|Remote branch \S+ not found|unadvertised object)",
        "the git repository has no such revision",
        "check revision (a full commit hash is safest)",
    ),
    Cause(
        "git_access_denied",
        r"Permission denied \(publickey|Authentication failed for|could not read Username"
        r"|Repository not found|does not appear to be a git repository",
        "the git repository does not let the host in",
        "use a URL that the host can read, or a folder or tarball",
    ),
    Cause(
        "git_dubious_ownership",
        r"detected dubious ownership in repository",
        "git refuses a repository that belongs to another user",
        "give the source to the owner of the venv, or use a tarball",
    ),
    Cause(
        "package_not_found_by_setup",
        r"AssertionError: Cannot find package: (\w+)|NVSHMEM directory does not exist"
        r"|No module named 'nvidia(?:\.(?:nvshmem|nccl))?'",
        "setup.py finds no NVSHMEM or NCCL",
        "install the nvidia-nvshmem and nvidia-nccl packages of torch's CUDA major, or give nvshmem_dir and nccl_dir",
    ),
    Cause(
        "permission_denied",
        r"PermissionError: \[Errno 13\]|: Permission denied$|\[Errno (?:13|30)\]|Read-only file system",
        "the build's user (the owner of the venv) may not read or write something",
        "make the source readable for that user",
    ),
    Cause(
        "source_incomplete",
        r"missing and no known rule to make it|error: can't copy '",
        "a file of the source is not there",
        "unpack the source again, with its submodules",
    ),
    Cause(
        "python_unsupported",
        r"requires a different Python|python_requires",
        "this revision does not support the venv's Python",
        "use a venv with a newer Python, or another revision",
    ),
    Cause(
        "not_a_venv",
        r"externally-managed-environment",
        "the Python that builds is the system's",
        "give a virtualenv",
    ),
    Cause(
        "nvlink_error",
        r"nvlink (?:error|fatal)\s*:",
        "device linking failed",
        "see the log: symbols of the device code do not fit together",
    ),
    Cause(
        "compile_error",
        r"(?:\berror\s*:|: error\b|\bfatal error\b|\berror #?\d+|ptxas fatal|nvcc fatal|^#error\b)",
        "the compiler reports an error",
        "see the log",
    ),
    Cause(
        "link_error",
        r"(?:undefined reference to|ld returned \d+ exit status|collect2: error|multiple definition of"
        r"|recompile with -fPIC|relocation truncated to fit)",
        "linking failed",
        "see the log",
    ),
    Cause("python_error", r"^(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)", "the build script failed", "see the log"),
)

# These follow from an earlier error, or are no error.
_CONSEQUENCE = re.compile(
    r"ninja: build stopped|subcommand failed|Error compiling objects for extension|CalledProcessError|\[\d+/\d+\]"
    r"|fatal: not a git repository|warning:|Werror|-Wno-|FAILED: (?:\[code|/|\S+\.o)"
    r"|error: subprocess-exited-with-error"
    r"|SetuptoolsDeprecationWarning|metadata-generation-failed|note: This error originates|ERROR: Failed building wheel"
)
# rc 0, and yet the product is wrong.
_SUSPECT = (
    Cause(
        "device_link_wrong_arch",
        r"nvlink warning\s*:\s*(?:SM Arch \('(sm_\w+)'\) not found|[Ss]kipping incompatible|incompatible SM arch)",
        "the device link used an architecture that the objects do not have, so kernels will be missing at run time",
        "use a newer revision, which passes the architecture to the device link",
    ),
    Cause(
        "nvshmem_disabled",
        r"All internode and low-latency features are disabled",
        "NVSHMEM was not found, and the extension was built without its kernels",
        "install nvidia-nvshmem in the target venv, or give nvshmem_dir",
    ),
)
# Docker and pip write something before each line; three compilers have three ways to say that a header is missing.
_PREFIX = re.compile(r"^(?:#\d+ +)?\d+\.\d+ +(?=\S)")
_NO_HEADER = re.compile(r"cannot open source file \"([^\"]+)\"|'([^']+)' file not found")
_ROWS = tuple((cause, re.compile(cause.pattern)) for cause in CAUSES)
_SUSPECT_ROWS = tuple((cause, re.compile(cause.pattern)) for cause in _SUSPECT)
_GENERIC = frozenset({"compile_error", "link_error", "python_error", "nvlink_error"})
_PROGRESS = re.compile(r"^\[(\d+)/(\d+)\]\s+(.*)$")


def diagnose(lines: Iterable[str], rc: int) -> dict[str, Any] | None:
    """Return what went wrong, or None for a build that looks well.

    ``{state: build_failed|build_suspect, code, message, mend, retryable, line: int (1-based), text, lines: [str]}``.
    The cause is the first real error: what follows from it ("ninja: build stopped") is never the cause, and of the
    linker's and Python's general complaints only the first is kept while a known one is looked for further down.
    ``rc`` 0 can still be ``build_suspect``.
    """
    text = [_PREFIX.sub("", line.rstrip("\n")) for line in lines]
    if rc == 0:
        for number, line in enumerate(text, 1):
            for cause, pattern in _SUSPECT_ROWS:
                if pattern.search(line):
                    return _finding("build_suspect", cause, number, line, text)
        return None
    fallback: dict[str, Any] | None = None
    depth: int | None = None
    quoted = ""
    for number, written in enumerate(text, 1):
        # The frames of a traceback quote source code; what was raised stands on its last line. pip indents the whole.
        line = written.strip()
        indent = len(written) - len(written.lstrip())
        if line.startswith("Traceback (most recent call last)"):
            depth = indent
            continue
        if depth is not None and indent > depth:
            quoted = line
            continue
        depth = None
        line = _NO_HEADER.sub(lambda found: f"{found.group(1) or found.group(2)}: No such file", line)
        if _CONSEQUENCE.search(line) and not _carries_cause(line):
            continue
        for cause, pattern in _ROWS:
            if pattern.search(line):
                found = _finding("build_failed", cause, number, written, text)
                if re.fullmatch(r"[\w.]+", line) and quoted:
                    found["text"] = f"{line}: {quoted}"[:500]
                # A Python traceback ends in the error that counts; a linker says what it lacks before it gives up.
                if cause.code not in _GENERIC:
                    return found
                fallback = fallback or found
                break
        if fallback and fallback["code"] == "compile_error":
            return fallback
    if fallback:
        return fallback
    tail = [line for line in text if line.strip()][-5:]
    return {
        "state": "build_failed",
        "code": "build_failed",
        "message": f"the build ended with rc {rc} and no known error",
        "mend": "see the log",
        "retryable": rc in (-9, 137),
        "line": len(text),
        "text": tail[-1] if tail else "",
        "lines": tail,
    }


def _carries_cause(line: str) -> bool:
    return any(pattern.search(line) for cause, pattern in _ROWS if cause.code not in _GENERIC) and not _PROGRESS.match(
        line
    )


def _finding(state: str, cause: Cause, number: int, line: str, text: list[str]) -> dict[str, Any]:
    return {
        "state": state,
        "code": cause.code,
        "message": cause.text,
        "mend": cause.mend,
        "retryable": cause.retryable,
        "line": number,
        "text": line.strip()[:500],
        "lines": [entry[:300] for entry in text[max(0, number - 3) : number + 2]],
    }


def progress(lines: Iterable[str]) -> dict[str, Any] | None:
    """Return how far ninja has come: ``{done, total, item: "internode.cu"}`` of the last ``[n/m]`` line, or None."""
    last: dict[str, Any] | None = None
    for line in lines:
        match = _PROGRESS.match(line)
        if match:
            last = {"done": int(match.group(1)), "total": int(match.group(2)), "item": compile_item(match.group(3))}
    return last


def compile_item(command: str) -> str | None:
    """Return the base name of what a compiler's command line works on (``internode.cu``, ``device link``)."""
    words = command.split()
    compiles = "-c" in words
    if "-dlink" in words or (words and os.path.basename(words[0]) == "nvcc" and not compiles):
        return "device link"
    for index, word in enumerate(words[:-1]):
        if word == "-c" and re.search(r"\.(?:cu|cpp|cc|cxx|c)$", words[index + 1].strip("'\"")):
            return os.path.basename(words[index + 1].strip("'\""))
    for word in words:
        if re.search(r"\.(?:cu|cpp|cc|cxx)$", word.strip("'\"")):
            return os.path.basename(word.strip("'\""))
    return "link" if "-shared" in words else None
