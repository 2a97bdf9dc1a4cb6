# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: why a start failed, out of its log.

The log of a failed start is a cascade: the first rank's traceback, then signals, closed sockets and watchdogs of the
others. ``find_cause`` cuts the log into error blocks, in the order of their first lines, and names the first block that
a row of ``CAUSES`` knows; rows marked ``symptom`` (what the other processes say about it) count only when no block
tells more. A block that no row knows is shown as ``unknown``: an invented cause costs more than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import (
    body,
    clean,
    parse_line,
    redact,
    shown,
)

CONTEXT_BEFORE = 3
MAX_SHOWN = 24
MAX_LINES = 6000
MAX_SINGLE = 400

Cause = dict[str, Any]


class Row(NamedTuple):
    """One known failure. ``pattern`` is searched in a block; named groups go into the cause and into the texts.

    ``permanent``: the same start fails again. ``symptom``: it is never the first cause while something else is known.
    """

    code: str
    pattern: str
    message: str
    mend: str
    permanent: bool = True
    symptom: bool = False


# The order matters inside one block only: the more specific row first.
CAUSES: tuple[Row, ...] = (
    # flags
    Row(
        "argument_removed",
        r"Removed server argument\(s\): (?P<argument>[\w.-]+)\s*->\s*(?P<replacement>[^\n;]+)",
        "this SGLang no longer has the argument {argument}; it names as replacement: {replacement}",
        "put the replacement into sglang_flags, and take {argument} out",
    ),
    Row(
        "argument_removed",
        r"Removed server argument\(s\): (?P<argument>[^\n]+)",
        "this SGLang no longer has the argument {argument}",
        "take it out of sglang_flags",
    ),
    Row(
        "flag_unknown",
        r"error: unrecognized arguments: (?P<argument>[^\n]+)",
        "this SGLang does not know the arguments {argument}",
        "take them out of sglang_flags, or write the name that the installed version has",
    ),
    Row(
        "flag_ambiguous",
        r"error: ambiguous option: (?P<argument>\S+) could match (?P<replacement>[^\n]+)",
        "{argument} is not a flag of this SGLang and abbreviates several: {replacement}",
        "write the full name of the flag",
    ),
    Row(
        "flag_choice",
        r"error: argument (?P<argument>[^\n:]+): invalid choice: (?P<value>[^\n(]+?) \((?P<choices>choose "
        r"from [^\n]+)\)",
        "{argument} does not take {value} in this SGLang ({choices})",
        "choose one of the values that the installed version takes",
    ),
    Row(
        "flag_type",
        r"error: argument (?P<argument>[^\n:]+): (?P<value>invalid [^\n]+|expected [^\n]+|not allowed with [^\n]+)",
        "{argument}: {value}",
        "correct the value in sglang_flags",
    ),
    Row(
        "flag_missing",
        r"error: the following arguments are required: (?P<argument>[^\n]+)",
        "required arguments are missing: {argument}",
        "set them",
    ),
    # the plan's arithmetic, refused by SGLang itself
    Row(
        "dispatch_limit_config",
        r"(?:per-rank prefill budget|prefill (?:token )?budget) exceeds (?P<variable>SGLANG_\w+): "
        r"required=(?P<required>\d+), "
        r"capacity=(?P<capacity>\d+)",
        "a prefill may bring {required} tokens to a rank, {variable} allows {capacity}",
        "raise {variable}, or lower --chunked-prefill-size or --max-prefill-tokens",
    ),
    Row(
        "dispatch_limit_exceeded",
        r"num_max_dispatch_tokens_per_rank|NUM_MAX_DISPATCH_TOKENS_PER_RANK|x\.size\(0\) <= num_max_dispatch|"
        r"num_tokens <= num_max_dispatch",
        "a batch was larger than the a2a backend's dispatch limit, which kills the whole server",
        "raise SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK (at most 1024) or lower --chunked-prefill-size below it",
    ),
    Row(
        "deepep_needs_low_latency",
        r"Unquantized DeepEP MoE currently supports low_latency mode only",
        "an unquantised model runs on DeepEP in low_latency mode only",
        "set deepep_mode: low_latency and a dispatch limit above the chunked prefill size, or take another a2a backend",
    ),
    Row(
        "a2a_topology",
        r"(?P<text>(?:Flashinfer MoE A2A|moe_a2a_backend='?\w+'?)[^\n]*(?:requires|only supported)[^\n]*)",
        "the a2a backend does not go with these sizes: {text}",
        "change sglang_parallelism or the a2a backend",
    ),
    Row(
        "mooncake_mode",
        r"mooncake\.py\", line \d+[\s\S]*NotImplementedError",
        "mooncake as a2a backend does not work in this mode; it needs --deepep-mode low_latency",
        "set deepep_mode: low_latency, or take another a2a backend",
    ),
    Row(
        "version_incompatible_with_sglang",
        r"module 'mooncake\.\w+' has no attribute|'?active_ranks'? (?:is|must)[^\n]*None|has no attribute "
        r"'set_host_ip'|"
        r"topk_idx[^\n]*(?:dtype|type|int32|int64)|Incompatible (?:mooncake|nixl|deep_ep)",
        "the backend imports, but its interface is not the one that this SGLang calls",
        "install the version of the backend that goes with this SGLang",
    ),
    Row(
        "quantization_shape",
        r"[Ww]eight (?:output|input)_(?:partition_)?size[\s\S]{0,200}not divisible|block_[nk] ?= ?\d+|"
        r"not aligned with the quantized weight shape|"
        r"Marlin[^\n]*(?:not supported|shape)",
        "the quantised blocks cannot be cut by this tensor parallel size",
        "lower tp_size, or raise ep_size so that an expert stays whole",
    ),
    Row(
        "parallel_sizes",
        r"(?P<text>(?:tp_size|ep_size|dp_size|pp_size|tensor parallel size|expert parallel size)[^\n]{0,120}"
        r"(?:divisible|must be|should be|greater|at least)[^\n]*)|_compute_parallelism_ranks[\s\S]*ZeroDivisionError|"
        r"is not divisible by|are not divisible|must be divisible by|"
        # Bare assertions of the models and of EPLB: the line is all that a traceback tells.
        r"(?:assert|AssertionError:) [^\n]*%[^\n]*\b(?:\w*(?:tp|ep|dp|pp|cp)_(?:size|rank)|num_(?:gpus|nodes|groups)|"
        r"world_size)\b"
        r"[^\n]*== 0",
        "the parallel sizes do not fit together or do not fit the model",
        "check tp_size, ep_size, dp_size and pp_size of sglang_parallelism",
    ),
    Row(
        "context_length_too_long",
        r"context_length \((?P<given>\d+)\) is greater than the derived context_length \((?P<derived>\d+)\)",
        "--context-length {given} is more than the {derived} that the model's configuration gives",
        "lower context_length, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if the model was made for it",
    ),
    Row(
        "quantization_contradicts_model",
        r"[Qq]uantization method specified in the model config \((?P<model>[\w-]+)\) does not match[^\n]*?"
        r"\((?P<given>[\w-]+)\)|(?:Unknown|Invalid|Unsupported) quantization method:? (?P<given2>[\w-]+)",
        "the quantisation that is asked for is not the checkpoint's, or not known to this SGLang",
        "take quantization out of sglang_flags: SGLang takes the checkpoint's; or use a newer SGLang",
    ),
    # host checks and libraries of the backends
    Row(
        "duplicate_nccl_runtime",
        r"Duplicate NCCL runtime",
        "deep_ep finds two NCCL libraries in the service's process, and refuses",
        "one NCCL only in the service's environment; set EP_NCCL_ROOT_DIR to it",
    ),
    Row(
        "invalid_nccl_version",
        r"Invalid NCCL versions?|NCCL version[^\n]*(?:mismatch|required)",
        "deep_ep checks the NCCL version when it is imported, and refuses",
        "install the NCCL that this deep_ep was built with; set EP_NCCL_ROOT_DIR to it",
    ),
    Row(
        "nccl_root_not_discoverable",
        r"Cannot find package: nccl",
        "deep_ep looks for an nvidia-nccl distribution or EP_NCCL_ROOT_DIR, and finds neither",
        "set EP_NCCL_ROOT_DIR to the folder of NCCL that the venv uses",
    ),
    Row(
        "nvshmem_mismatch",
        r"NVSHMEM device library version does not match",
        "the NVSHMEM on the device side is not the one on the host side",
        "install the NVSHMEM version that deep_ep was built with",
    ),
    Row(
        "torch_abi_mismatch",
        r"(?<![^\s:])(?P<file>[^\s:]{1,300}\.so[\w.]*): undefined symbol: (?P<symbol>_?_?Z?\S*(?:c10|torch|"
        r"at[0-9A-Z]|aten)\S*)",
        "{file} was built for another torch (undefined symbol {symbol})",
        "install the build that goes with this torch, or rebuild it",
    ),
    Row(
        "undefined_symbol",
        r"undefined symbol: (?P<symbol>\S+)",
        "a library was built against another version of what it uses (undefined symbol {symbol})",
        "run probe.yml: it names the backend, its layer and the mend",
    ),
    Row(
        "missing_system_lib",
        r"(?P<file>lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "the system library {file} is missing in the service's environment",
        "install it (libcuda belongs to the driver; libcudart to the CUDA variant of the wheel; libibverbs, "
        "libmlx5: rdma-core)",
    ),
    Row(
        "libstdcxx_mismatch",
        r"version [`'](?:GLIBCXX|CXXABI)_[\d.]+' not found",
        "the libstdc++ that is found is older than the library needs",
        "install a newer libstdc++, or take an old one out of LD_LIBRARY_PATH",
    ),
    Row(
        "glibc_too_old",
        r"version [`']GLIBC_(?P<version>[\d.]+)' not found",
        "the host's glibc is older than the library needs ({version})",
        "use a wheel for this operating system, or a newer one",
    ),
    Row(
        "static_tls",
        r"cannot allocate memory in static TLS block",
        "the loader has no room left for static thread-local storage",
        "load the named library first (LD_PRELOAD in sglang_env_vars)",
    ),
    Row(
        "backend_missing",
        r"ImportError: (?P<backend>DeepEP|Mooncake EP|Mori EP|NIXL EP|[\w ]{1,30}?) is not installed",
        "SGLang could not import {backend}: it is absent or broken in the service's environment",
        "run remediate.yml, or choose another backend",
    ),
    Row(
        "backend_missing",
        r"(?:ModuleNotFoundError|ImportError): No module named '?(?P<backend>(?:deep_ep|mooncake|nixl|nixl_ep|"
        r"mori|pplx_kernels|"
        r"deep_ep_v25|flashinfer|deep_gemm|sgl_kernel)(?:\.\w+)*)",
        "the Python module {backend} is missing in the venv",
        "run remediate.yml, or choose another backend",
    ),
    Row(
        "backend_missing",
        r"Please install (?P<backend>mooncake|nixl|NIXL|Mooncake|DeepEP|deep_ep)[^\n]*",
        "SGLang could not import {backend}: it is absent or broken in the service's environment",
        "run remediate.yml, or choose another backend",
    ),
    Row(
        "dependency_missing",
        r"(?:ImportError|RuntimeError): [^\n]*(?:[Pp]lease install|Install it with: pip install|requires the)"
        r" ['`\"]?(?P<module>[\w.-]+)",
        "the Python package {module} is missing in the venv, or too old",
        "install it into the venv",
    ),
    Row(
        "dependency_missing",
        r"requires the (?P<module>[\w.-]+) library but it was not found",
        "the Python package {module} is missing in the venv",
        "install it into the venv",
    ),
    Row(
        "dependency_missing",
        r"ModuleNotFoundError: No module named '?(?P<module>[\w.]+)|"
        r"PackageNotFoundError: No package metadata was found for (?P<package>[\w.-]+)",
        "the Python module {module} is missing in the venv",
        "install what SGLang requires into the venv (pip check names it)",
    ),
    Row(
        "dependency_broken",
        r"cannot import name '(?P<symbol>[^']{1,80})' from (?:partially initialized module "
        r")?'(?P<module>[\w.]{1,120})'|"
        r"(?P<package>[\w.-]{1,60}) is installed with version (?P<have>\S{1,40}),? which is less than|"
        r"numpy\.dtype size changed|compiled using NumPy 1\.x cannot be run|CuDNN Compatibility Issue",
        "a Python package of the venv has another version than SGLang needs ({module})",
        "install the versions that this SGLang requires (pip check names them)",
    ),
    Row(
        "deep_ep_timeout",
        r"DeepEP[^\n]{0,60}(?:[Tt]imeout|timed out)|timeout \((?:dispatch|combine)",
        "ranks waited for each other in DeepEP until its time limit: one of them is gone, stuck, or still compiling",
        "look at the first error of the other ranks and hosts; then at NVLink, RDMA and IBGDA of this one",
        permanent=False,
    ),
    Row(
        "gpu_peer_access",
        r"peer access is not supported between|mapping of buffer object failed|cudaIpcOpenMemHandle|"
        r"[Pp]eer[- ]to[- ]peer[^\n]{0,40}not supported|"
        r"(?:custom_all_reduce|deep_?ep|intranode)[^\n]*'(?:invalid argument|invalid resource handle)'",
        "GPUs of this instance cannot use each other's memory",
        "look at nvidia-smi topo -p2p r, IOMMU and ACS, and which GPUs the instance has; without peer access take "
        "disable_custom_all_reduce: true and no a2a backend that needs NVLink",
    ),
    Row(
        "nvls_unavailable",
        r"cuMulticast\w+[^\n]*|CUDA driver error: 801|[Mm]ulticast[^\n]{0,60}not supported|"
        r"NVLS[^\n]{0,60}(?:not supported|fail)",
        "NVLink multicast (NVLS) is not there",
        "start nvidia-fabricmanager in the driver's version; or NCCL_NVLS_ENABLE=0 and no symmetric memory",
    ),
    # GPU memory before the general CUDA rows
    Row(
        "kv_cache_too_small",
        r"(?P<text>(?:[Ii]ncrease|[Rr]aise) (?:the )?[`'\"]?--mem-fraction-static[^\n]*)",
        "the weights leave no room for the KV cache (SGLang: {text})",
        "spread over more GPUs, raise --mem-fraction-static, or lower --context-length or --max-running-requests",
    ),
    Row(
        "gpu_out_of_memory",
        r"(?:CUDA|HIP|XPU|NPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA driver error: out of memory|"
        r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|[Ff]ree memory on device[^\n]*less than|"
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
        r"out of memory[^\n]{0,40}GPU|"
        r"CUDA error: out of memory|The memory capacity is unbalanced",
        "the GPU's memory does not suffice",
        "free the GPUs of other processes, lower --mem-fraction-static or --max-running-requests, or spread "
        "over more GPUs",
    ),
    # CUDA, driver, architecture
    Row(
        "arch_mismatch",
        r"no kernel image is available|named symbol not found|cudaErrorNoKernelImageForDevice|"
        r"(?:sm_\d+|compute capability[^\n]{0,40}) is not (?:supported|compatible)|CUDA_ERROR_NO_BINARY_FOR_GPU|"
        r"is not supported for the current GPU|Minimum capability: \d+|"
        r"not supported on sm_?\d+|sm_?\d+[^\n]{0,40} (?:is )?not (?:supported|compatible)|"
        r"Value 'sm_\w+' is not defined for option|"
        r"Only SM ?\d+|expected sm_?\d+|[Rr]equires SM ?[<>=]|no kernel for SM ?\d+|arch_major == \d+|"
        r"No implemented \w+ for current compute capability|[Uu]nsupported compute capability|"
        r"[Ff]mha\w*[^\n]{0,300}Unsupported arch|Unsupported arch(?:itecture)?:? ?(?:sm_?)?\d{2,3}\b|"
        r"[Oo]nly [^\n]{0,120}\bsupported on (?:Blackwell|Hopper|Ampere|Ada)\b|"
        r"(?:requires|only supports?|needs)[^\n]{0,60}(?:SM|sm_?)\d{2,3}|compute capability[^\n]{0,60}(?:or (?:above|"
        r"higher|newer)|at least)",
        "a library has no code for this GPU's architecture",
        "install or build it for the compute capability of these GPUs",
    ),
    Row(
        "kernel_too_large_for_gpu",
        r"out of resource: (?:shared memory|threads|registers)[^\n]*",
        "a kernel asks for more shared memory or registers than this GPU has: it was tuned for another one",
        "another attention_backend or moe_runner_backend, or a newer SGLang with a configuration for these GPUs",
    ),
    Row(
        "driver_too_old",
        r"CUDA driver version is insufficient|driver on your system is too old|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|"
        r"forward compatibility was attempted|unsupported display driver|"
        r"Error 803|API version mismatch|Driver/library version mismatch|"
        r"PTX was compiled with an unsupported toolchain",
        "the NVIDIA driver is too old for this CUDA",
        "update the driver, or use a torch for the older CUDA",
    ),
    Row(
        "fabricmanager_not_running_or_version_mismatch",
        r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady|\berr(?:or)?:? 802\b",
        "the NVSwitch fabric is not initialised",
        "start nvidia-fabricmanager in the driver's version",
        permanent=False,
    ),
    Row(
        "torch_is_cpu_build",
        r"Torch not compiled with CUDA enabled",
        "the venv's torch is a CPU build",
        "install the CUDA build of torch that this SGLang requires",
    ),
    Row(
        "no_driver",
        r"Found no NVIDIA driver|CUDA_ERROR_STUB_LIBRARY|CUDA driver is a stub library",
        "the service finds no NVIDIA driver",
        "install the driver; nvidia-smi must work as the service's user",
    ),
    Row(
        "no_gpu_visible",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE|invalid device ordinal|"
        r"CUDA_ERROR_INVALID_DEVICE|No accelerator .{0,60}(?:available|found)|CUDA unknown error - this may be due to|"
        r"cudaErrorDevicesUnavailable|CUDA-capable device\(s\) is/are busy or unavailable|cudaErrorNoDevice",
        "the service sees no GPU, or fewer than it needs",
        "check /dev/nvidia*, CUDA_VISIBLE_DEVICES, sglang_gpus, MIG, and that no GPU was lost (nvidia-smi -L)",
    ),
    Row(
        "gpu_fault",
        r"illegal memory access|device-side assert|uncorrectable ECC|\bXid\b|unspecified launch failure|GPU is lost|"
        r"cudaErrorECCUncorrectable|misaligned address|CUDA_ERROR_ILLEGAL",
        "a kernel failed on the GPU",
        "look for Xid lines in the kernel log; without any, suspect the backend's build or version",
        permanent=False,
    ),
    # JIT
    Row(
        "jit_compiler_missing",
        r"(?:nvcc|ninja|gcc|g\+\+|cc1plus|c\+\+|x86_64-linux-gnu-g(?:cc|\+\+))['\"]?: (?:command )?not found|"
        r"No such file or directory: '[^']*(?:nvcc|ninja|g\+\+|gcc|ptxas)'|Ninja is required|"
        r"Failed to find C compiler|NVCC[^\n]{0,60}not found|Could not find nvcc|Cannot find NVCC|"
        r"InvalidCxxCompiler|[Cc]ould not find nvcc|No working C\+\+ compiler|CUDA_HOME (?:environment "
        r"variable )?is not set|"
        r"Please specify via CC environment variable|nvcc[^\n]{0,60}(?:does not exist|is required)|"
        r"Python\.h: No such file",
        "kernels are compiled when the service runs, and the compiler (nvcc, ninja, gcc or the Python "
        "headers) is missing",
        "put CUDA_HOME and the compilers' folders into the unit's PATH, install the missing one",
    ),
    Row(
        "jit_compile_failed",
        r"Ninja build (?:failed|stopped)|ninja: build stopped|nvcc fatal|ptxas (?:fatal|error)|CompilationError|"
        r"NVRTC_ERROR|PTXASError|NVCC compilation failed|"
        r"returned non-zero exit status 1[^\n]*nvcc|nvcc[^\n]{0,2000}returned non-zero exit status|"
        r"cannot find -l\w+|collect2: error|"
        r"/(?:gcc|g\+\+|cc|c\+\+|clang)['\"][^\n]{0,2000}returned non-zero exit status|"
        r"DeepGEMM[^\n]*(?:compil)[^\n]*fail|Error building extension|"
        r"(?:Assertion|assert)[^\n]*(?:jit|compiler\.hpp)",
        "a kernel did not compile on this host",
        "read the compiler's first error in the lines; toolkit and torch must have one CUDA major",
    ),
    Row(
        "kernel_refused",
        r"Assertion error \(?(?P<file>[^\s)]*(?:[Dd]eep_?(?:EP|ep|GEMM|gemm)|csrc/(?:apis|kernels))[^\s)]*?)"
        r"(?::\d+)?\)?:? ['\"]?(?P<text>[^\n]{1,200}?)['\"]?(?:$|\n)",
        "a kernel library refuses what it is given: {text} ({file})",
        "the model's shapes, their quantisation or the library's version do not fit: take the version that this "
        "SGLang names, or another backend",
    ),
    # communication
    Row(
        "shm_small",
        r"insufficient shared memory|failed to extend /dev/shm/|/dev/shm[^\n]{0,80}(?:too small|No space left)|"
        r"shared memory object[^\n]*No space left|out of shared memory\b",
        "/dev/shm is too small or full",
        "make /dev/shm larger (mount -o remount,size=…), and remove what dead processes left in it",
    ),
    Row(
        "rdma_device_permission",
        r"cannot allocate mlx5dv_devx_uar|mlx5dv_devx_\w+[^\n]*(?:not permitted|[Pp]ermission denied)",
        "the service may not use the RDMA devices",
        "let the unit reach them (no PrivateDevices; DeviceAllow=char-infiniband_verbs rw for a closed DevicePolicy) "
        "and lock memory (LimitMEMLOCK=infinity); running as root is not needed",
    ),
    Row(
        "mooncake_not_built_for_torch",
        r"Mooncake (?P<part>PG|EP) was not built",
        "the installed Mooncake has no {part} extension for this torch",
        "run probe.yml: it names the Mooncake version whose wheel has it, or takes another backend",
    ),
    Row(
        "jit_cache_corrupt",
        r"Corrupted JIT cache directory",
        "the cache of compiled kernels holds half a kernel",
        "stop the service and remove the folder that EP_JIT_CACHE_DIR or the message names; it is filled again",
    ),
    Row(
        "ucx_without_cuda",
        r"VRAM memory is detected as host by UCX",
        "the UCX that NIXL loaded does not know GPU memory: its CUDA module was not found",
        "set UCX_MODULE_DIR to the folder nixl_cuNN.libs/ucx in the venv's site-packages (sglang_env_vars)",
    ),
    Row(
        "nvshmem_init",
        r"nvshmem\w*[^\n]*(?:init(?:ialization)? failed|status:? 7|non-zero status|ERROR|abort|setup "
        r"connections failed)|"
        r"connect EPS failed|nvshmem[^\n]{0,200}non-zero status|transport map failed|"
        r"NVSHMEM API called before NVSHMEM initialization|transport create connect failed|"
        r"nvshmemi?_\w+ failed|unable to (?:create|init)[^\n]*nvshmem|"
        r"ib(?:gda|rc|devx)\.cpp:\d+:[^\n]*(?:NULL value|non-zero|[Uu]nable)|"
        r"Unable to create ah\b|create DCT share err",
        "NVSHMEM could not start",
        "IBGDA needs an mlx5 NIC, nvidia_peermem and EnableStreamMemOPs/PeerMappingOverride or gdrdrv; "
        "otherwise deepep_mode: normal inside one NVLink host",
    ),
    Row(
        "memlock_limit",
        r"(?:[Rr]egister(?:ing)? (?:memory|mr)|reg_mr|[Mm]emory registration)[^\n]*(?:Cannot allocate memory|\[12\]|"
        r"errno:? ?12\b)|Cannot allocate memory[^\n]*(?:mlock|reg_mr)",
        "memory could not be locked for RDMA: the limit of locked memory is too low",
        "LimitMEMLOCK=infinity in the unit (not 'unlimited'; limits.conf does not apply to services)",
    ),
    Row(
        "rdma_device",
        r"No (?:RDMA|IB|InfiniBand) devices? (?:found|available)|ibv_(?:open_device|create_qp|reg_mr|"
        r"get_device_list)[^\n]*|"
        r"transport retry counter exceeded|local protection error|(?:Context|Device) (?:\d+ )?is not active|"
        r"[Mm]emory registration failed|register memory failed|NIXL_ERR_\w+|"
        r"(?:Mooncake )?Transfer Engine initialization failed|\[Handshake\] Failed|"
        r"Failed to (?:register memory|open (?:rdma )?device|modify QP|create (?:QP|CQ|PD))|"
        r"libibverbs: Warning: couldn't|No available RNIC|UCX +ERROR[^\n]*|Cannot allocate memory[^\n]*ibv",
        "RDMA does not work for the service",
        "check ibv_devinfo as the service's user, LimitMEMLOCK=infinity, and the device's name and link",
    ),
    Row(
        "network_interface",
        r"Unable to find interface for: (?P<interface>\S+)|Unable to resolve hostname to a \(local\) address|"
        r"(?:ifa|rp) [!=]= nullptr|[Nn]o socket interface found",
        "the network interface that the ranks shall use is not there, or this host does not know its own name",
        "correct GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and the host's name in /etc/hosts",
    ),
    Row(
        "duplicate_gpu",
        r"Duplicate GPU detected",
        "two ranks were given the same GPU",
        "check sglang_gpus, CUDA_VISIBLE_DEVICES, base_gpu_id, gpu_id_step, and that each host has its own node_rank",
    ),
    Row(
        "nccl_failed",
        r"NCCL WARN (?!.*(?:closed by|remote process|Call to recv|connection reset))[^\n]*|"
        r"unhandled (?:cuda|system) error|ncclSystemError|ncclInvalidUsage|"
        r"ncclUnhandledCudaError|"
        r"ncclInternalError|NCCL error(?: in)?:|NCCL Error \d",
        "NCCL could not set up or use the connection between ranks",
        "set NCCL_DEBUG=INFO, check NCCL_SOCKET_IFNAME, NCCL_IB_HCA, /dev/shm, and that all ranks have one version",
    ),
    Row(
        "rendezvous_failed",
        r"The server socket has failed to (?:listen|bind)(?![^\n]*(?:EADDRINUSE|address already in use))|"
        r"DistNetworkError(?![^\n]*(?:EADDRINUSE|address already in use))|"
        r"(?:client socket|TCPStore)[^\n]*(?:timed out|failed to connect)|connectFullMesh failed|"
        r"DistStoreError|rendezvous[^\n]*(?:timeout|timed out|fail)|failed to connect to[^\n]*dist",
        "the ranks did not find each other",
        "check --dist-init-addr (address and free port of rank 0), the firewall, and that every rank is started",
        permanent=False,
    ),
    # model
    Row(
        "tokenizer_absent",
        r"Can't load tokenizer for|[Cc]ouldn't instantiate the backend tokenizer|"
        r"(?:No such file or directory|does not exist)[^\n]*(?:tokenizer\w*\.(?:json|model)|tiktoken\.model)",
        "the tokenizer's files are missing beside the model, or cannot be read",
        "copy tokenizer.json or tokenizer.model and tokenizer_config.json too, or set tokenizer_path",
    ),
    Row(
        "model_config_absent",
        r"does not appear to have a file named (?:config|configuration)\.json|Unrecognized model in |"
        r"Can't load (?:the )?config(?:uration)? (?:of|for)[^\n]*|"
        r"(?:No such file or directory|does not exist)[^\n]*[/'\"]config\.json",
        "the folder of --model-path has no usable config.json",
        "check sglang_model_path on this host: it names the folder that holds config.json",
    ),
    Row(
        "model_weights_missing",
        r"No model weights found in|Cannot find any (?:of the )?model weights|shard file\(s\) missing from|"
        r"(?:No|Cannot find) .{0,40}(?:safetensors|weight)[^\n]*(?:files?)?[^\n]*found|"
        r"(?:No such file or directory|does not exist)[^\n]*\.(?:safetensors|bin|gguf|pt)\b",
        "weight files of the model are missing",
        "download or copy the model again, and compare with its index file",
    ),
    Row(
        "chat_template",
        r"Chat template (?P<path>\S+) is not|[Cc]hat template[^\n]{0,80}(?:not found|does not exist|invalid)|"
        r"jinja2\.exceptions\.\w+",
        "the chat template cannot be used",
        "check chat_template in sglang_flags: a built-in name, or a readable Jinja file on this host",
    ),
    Row(
        "model_path_absent",
        r"Repo id must be in the form[^\n]*'(?P<path>/[^']*)'|HFValidationError[^\n]*'(?P<path2>/[^']*)'|"
        r"(?:No such file or directory|does not exist|not a valid (?:path|folder|directory))[^\n]*model",
        "the model is not where --model-path says",
        "check sglang_model_path on this host, its mounts, and that the service's user may read it",
    ),
    Row(
        "model_hub",
        r"LocalEntryNotFoundError|couldn't connect to '?https?://[^\n]*|"
        r"HTTPSConnectionPool\(host='[^']*(?:hugging|modelscope)|"
        r"Max retries exceeded with url: (?!/(?:route|bootstrap|metadata)\b)[^\n]*|"
        r"offline mode is enabled|OfflineModeIsEnabled|"
        r"Temporary failure in name resolution|Name or service not known",
        "the model is a hub name, and the hub cannot be reached",
        "use a local path for sglang_model_path, or give the service a way to the hub",
    ),
    Row(
        "model_access",
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error|403 Client Error|is not a local folder and "
        r"is not a valid model",
        "the hub does not give this model to the service",
        "check the model's name and the token in sglang_secrets",
    ),
    Row(
        "model_unsupported",
        r"Model architectures? \[?[^\n]{0,120} (?:are|is) not supported|Unsupported architectures?|"
        r"does not recognize this architecture|Cannot find model module|"
        r"(?:trust_remote_code|contains custom code)[^\n]*",
        "this SGLang does not know the model's architecture",
        "use a newer SGLang, or allow trust_remote_code if you trust the model's code",
    ),
    Row(
        "weights_broken",
        r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|incomplete "
        r"metadata|invalid header|size "
        r"mismatch for|UnpicklingError|"
        r"Error while deserializing header",
        "a weight file is damaged or does not belong to this model",
        "compare the files' checksums with the source",
    ),
    # host
    Row(
        "storage_error",
        r"Stale file handle|Input/output error|Transport endpoint is not connected|\[Errno (?:5|107|116)\]",
        "the disk or the network file system of the model or a cache does not answer as it should",
        "look into the kernel log and at the mount; mount it again",
        permanent=False,
    ),
    Row(
        "bus_error",
        r"Bus error|SIGBUS",
        "a mapped file went away under a process: /dev/shm is full, or a file was cut off while it was read",
        "make /dev/shm larger, and compare the model's files with their source",
        permanent=False,
    ),
    Row(
        "port_privileged",
        r"error while attempting to bind on address[^\n]*permission denied",
        "the service's user may not bind this port",
        "choose a sglang_port of 1024 or higher",
    ),
    Row(
        "bad_address",
        r"error while attempting to bind on address \(?'?(?P<address>[^')\n]+)[^\n]*cannot assign requested address|"
        r"Cannot assign requested address|ZMQError: No such device[^\n]*//(?P<address2>[^:/'\s]+)",
        "the address to listen on is not one of this host's ({address})",
        "correct sglang_host",
    ),
    Row(
        "tls_files",
        r"ssl\.SSLError[^\n]*(?:PEM|KEY_VALUES_MISMATCH|X509|NO_CERTIFICATE|NO_START_LINE|BAD_)[^\n]*|load_cert_chain|"
        r"No such file or directory: '(?P<path>[^']*\.(?:pem|crt|key|cer))'",
        "the certificate or the key for TLS cannot be used",
        "check ssl_certfile and ssl_keyfile in sglang_flags, and that the service's user may read both",
    ),
    Row(
        "port_taken",
        r"error while attempting to bind on address \(?'?(?P<address>[^')\n]+)'?,? ?(?P<port>\d+)?\)?: "
        r"address already in use|"
        r"Address already in use|EADDRINUSE|errno 98|[Pp]ort[^\n]{0,60} (?:is )?already in use|"
        r"is not available in \d+ seconds",
        "another process holds the port; SGLang says so only after the full load",
        "stop the other process, or change sglang_port (and --nccl-port, --dist-init-addr, the bootstrap port)",
    ),
    Row(
        "files_limit",
        r"Too many open files",
        "the limit of open files is too low",
        "raise LimitNOFILE of the unit",
    ),
    Row(
        "threads_limit",
        r"can't start new thread|pthread_create failed|Resource temporarily unavailable[^\n]*(?:fork|thread)|"
        r"libgomp: Thread creation failed",
        "the service may not start more threads or processes",
        "raise TasksMax of the unit, and the host's pid limit",
    ),
    Row(
        "memory_low",
        r"(?m)^MemoryError\b|DefaultCPUAllocator: (?:can't|not enough)|Not enough host memory|"
        r"\[Errno 12\] Cannot allocate memory(?![^\n]*(?:mlock|reg_mr|ibv))|std::bad_alloc",
        "the host's memory (not the GPU's) does not suffice",
        "lower --hicache-size or the number of instances on this host, or give it more memory",
        permanent=False,
    ),
    Row(
        "disk_full",
        r"No space left on device|Disk quota exceeded|ENOSPC",
        "a disk or /dev/shm is full",
        "make room (caches, /dev/shm, the model's disk)",
    ),
    Row(
        "memlock_limit",
        r"(?:RLIMIT_MEMLOCK|memlock|locked memory)[^\n]*|mlock[^\n]*(?:Cannot allocate memory|failed)",
        "the limit of locked memory is too low",
        "LimitMEMLOCK=infinity in the unit (not 'unlimited')",
    ),
    Row(
        "cache_not_writable",
        r"(?:Permission denied|Read-only file system|No such file or directory): '(?P<path>[^']*/\.(?:cache|triton|"
        r"config|local|nv|deep_gemm|deep_ep|flashinfer|tilelang|sglang|inductor|huggingface|keras)\b[^']*)'|"
        r"no locator available for file|Could not determine home directory|"
        r"getpwuid\(\): uid not found",
        "a cache in the home folder of the service's user cannot be written ({path})",
        "HOME and the cache variables (XDG_CACHE_HOME, HF_HOME, TRITON_CACHE_DIR, …) to a folder that the service may "
        "write, as CacheDirectory= makes it",
    ),
    Row(
        "cache_noexec",
        r"failed to map segment from shared object",
        "a compiled kernel cannot be loaded: its cache lies on a file system mounted noexec",
        "mount it with exec, or move the cache variables to another folder",
    ),
    Row(
        "permission_denied",
        r"PermissionError[^\n]*|Permission denied[^\n]*|EACCES|[Oo]peration not permitted[^\n]*|Read-only file "
        r"system[^\n]*",
        "the service's user may not read, write or execute something it needs",
        "give the service's user access (model, caches, /dev/nvidia*, /dev/infiniband), or correct the "
        "unit's protections",
    ),
    Row(
        "exec_failed",
        r"Failed (?:to execute|at step EXEC)|status=203/EXEC|status=200/CHDIR|status=217/USER|status=226/NAMESPACE|"
        r"Failed to (?:determine user credentials|set up mount namespacing|locate executable)|"
        r"status=243/CREDENTIALS|Failed to set up credentials",
        "systemd could not start the process at all",
        "check the interpreter's path, the user, the folders and the credentials that the unit names",
    ),
    Row(
        "oom_killed",
        r"killed by the OOM killer|Out of memory: Killed process|invoked oom-killer|oom-kill:|oom_reaper|"
        r"Failed with result 'oom-kill'",
        "the kernel's OOM killer ended it: the host's memory (not the GPU's) was short",
        "raise MemoryMax, lower --hicache-size, the loader's threads or the number of instances on the host",
        permanent=False,
    ),
    Row(
        "cuda_graph_failed",
        r"Capture (?:prefill )?(?:cuda|CUDA) graph failed: (?P<text>[^\n]*)",
        "the CUDA graphs could not be captured: {text}",
        "lower --mem-fraction-static or --cuda-graph-max-bs-decode; --disable-cuda-graph shows whether it is only that",
    ),
    Row(
        "flags_rejected",
        r"(?:arg_groups/[\w/]+\.py|server_args\.py|launch_server\.py)[\s\S]*"
        r"\n(?P<text>(?:AssertionError|ValueError|NotImplementedError|TypeError|KeyError)[^\n]*)",
        "SGLang refuses its own arguments: {text}",
        "correct the flags that the message and the lines name",
    ),
    Row(
        "flags_rejected",
        # The frames are out of the window; the message names the flag.
        r"(?m)^(?:\w+\.)*(?P<text>(?:AssertionError|ValueError|NotImplementedError|KeyError)(?=: )[^\n]*(?:"
        r"(?<![\w-])--[a-z][a-z0-9-]{3,}|\b(?:moe_dense_tp_size|context_length|kv_cache_dtype|page_size|"
        r"chunked_prefill_size|mem_fraction_static|attention_backend|moe_runner_backend|moe_a2a_backend|"
        r"(?:speculative|disaggregation|hicache|mamba)_\w+)\b|(?:tool[-_ ]call|reasoning)[-_ ]parser)[^\n]*)",
        "SGLang refuses its own arguments: {text}",
        "correct the flags that the message and the lines name",
    ),
    Row(
        "dependency_broken",
        r"Could not load any common_ops library",
        "sgl_kernel finds no library that it can load on this host ({module})",
        "install the sgl-kernel that goes with this torch, its CUDA and these GPUs",
    ),
    Row(
        "warmup_failed",
        r"Initialization failed\. warmup error|Initialization failed\. Please see",
        "the server's own first request failed",
        "read the lines: the first error of the scheduler is the cause",
        symptom=True,
    ),
    Row(
        "disaggregation_peer",
        r"Could not fetch prefill (?:parallel )?info|KVTransferError|Failed to send kv chunk|Decode transfer failed|"
        r"[Bb]ootstrap[^\n]{0,120}(?:refused|timed? ?out|unreachable|failed)",
        "the prefill and the decode instance do not reach each other",
        "check the bootstrap port and address of the prefill instance, the firewall, and RDMA between the hosts",
        permanent=False,
        symptom=True,
    ),
    # what the others say about it
    Row(
        "scheduler_silent",
        r"Health check failed\. Server couldn't get a response from detokenizer for last (?P<seconds>[\d.]+) seconds",
        "the schedulers gave no sign for {seconds} s: a long prefill, a kernel that compiles, or a hang",
        "one such line is no death: wait for progress; raise SGLANG_HEALTH_CHECK_TIMEOUT where prompts are long",
        permanent=False,
        symptom=True,
    ),
    Row(
        "watchdog_timeout",
        r"[Ww]atchdog (?:[Tt]imeout|TimeoutError|caught)(?![^\n]*soft=True)|"
        r"Watchdog caught collective operation timeout|"
        r"collective operation timeout",
        "a step took longer than the watchdog allows: a hang, or a kernel that was still compiling",
        "compile first (sglang.compile_deep_gemm) or raise --watchdog-timeout; if it repeats with warm "
        "caches, look at the fabric",
        permanent=False,
        symptom=True,
    ),
    Row(
        "scheduler_killed",
        r"scheduler (?:is dead|died)[^\n]*\(exit code: -9\)|[Ss]cheduler[^\n]*terminated with -9|Exit code: -9\b",
        "a scheduler process was killed (SIGKILL); SGLang itself does not do that: most often the kernel's "
        "OOM killer does",
        "look for OOM lines in the kernel log; the host's memory, not the GPU's, is then too small",
        permanent=False,
        symptom=True,
    ),
    Row(
        "scheduler_died",
        r"Rank \d+ scheduler died during initialization|Scheduler or DataParallelController \d+ terminated with|"
        r"terminated with -?\d+",
        "a scheduler process ended and did not say why",
        "look at the first error of the other ranks and hosts of this instance, and into the kernel log",
        permanent=False,
        symptom=True,
    ),
    Row(
        "peer_died",
        r"Connection (?:closed|reset) by (?:remote )?peer|gloo/transport/tcp/pair\.cc|remote process exited|"
        r"Broken pipe|EOFError|"
        r"Rank \d+ scheduler (?:is dead|died)",
        "another rank or process went away first",
        "look at the first error of the other ranks and hosts of this instance",
        permanent=False,
        symptom=True,
    ),
    Row(
        "scheduler_died",
        r"Received sigquit from a child process|SIGQUIT received|Segmentation fault|Fatal Python error|core dumped|"
        r"Aborted|SIGABRT|SIGSEGV|terminate called",
        "a child process of SGLang died without saying why",
        "look into the kernel log (OOM, Xid, segfault) at that time",
        permanent=False,
        symptom=True,
    ),
)

_COMPILED = tuple((row, re.compile(row.pattern)) for row in CAUSES)

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w]*\.)*(?:[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Failure|Refused|NotFound|Warning)|"
    r"KeyboardInterrupt|StopIteration|[A-Z]\w+Error\w*)(?::|$|\b)|"
    r"^(?:[A-Za-z_]\w*\.)*(?:\w{0,80}(?:Error|Exception))(?::|$)|"
    # A dotted name is a class in a module: triton.runtime.errors.OutOfResources
    r"^(?:[a-z_]\w{0,60}\.){1,8}[A-Z]\w{1,60}(?:: |$)"
)
_CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_LOOKS_BAD = re.compile(
    r"\berror\b|\bError\b|ERROR|FATAL|[Ff]atal|\bfailed\b|Failed|NCCL WARN|not found|denied|killed|Killed|"
    r"oom-kill|aborted|Aborted|"
    r"[Ww]atchdog|Segmentation|SIGQUIT|sigquit|terminate called|address already in use|\bXid\b|status=2\d\d/|"
    r"No space left|"
    r"exceeds|does not match|NULL value|non-zero status|[Uu]nable to|[Cc]ould not|\berr:|out of resource|"
    r"Address already in use|DeepEP timeout|^E\d{4} \d\d:\d\d:\d\d"
)
_MANAGER = re.compile(r"^[\w@.:\\-]{1,200}\.service: |^terminate called|^\[?rank\d+\]?:|^\S+:\d+:\d+ \[\d+\] ")
_FATAL_HEAD = re.compile(r"hit an exception|<frozen runpy>|Exception in (?:thread|callback)")
# Said by SGLang or its libraries while all is well.
_HARMLESS = re.compile(
    r"^\s*\[--|^usage: |server_args=|kill_process_tree called|Gracefully exiting|allreduce_fusion API is not available|"
    r"NCCL INFO |^\s*(?:\[rank\d+\]:)?\[?[IW]\d{4} \d\d:\d\d:\d\d|^\s*(?:WARN(?:ING)?|Warning|INFO|DEBUG)\b|"
    r"^(?:(?!NCCL )[^\n]){0,60}\bWARN(?:ING)?\b"
)
# A log line that tells what was done instead: its process went on.
_HANDLED = re.compile(
    r"[Ff]all(?:ing|s)? ?back|\b[Ii]gnor(?:ed|ing)\b|\b[Ss]kipp(?:ed|ing)\b|\b(?:is|will be|has been|are) disabled\b|"
    r"\bdisabled:\s|\b[Dd]isabling\b|\busing default|\b[Uu]sing [^\n]{1,60} instead\b|\bretry(?:ing)?\b|"
    r"[Rr]etries left|\boptional\b|\bnon-fatal\b|[Tt]o silence this warning|is not available, (?:not|use|using)"
)


class Block(NamedTuple):
    """An error block: lines ``first`` to ``last`` (inclusive), ``text`` without prefixes; ``fatal`` by its form.

    ``handled``: the line that brought the traceback says that it was dealt with.
    """

    first: int
    last: int
    text: str
    traceback: bool
    fatal: bool
    handled: bool = False


def blocks(lines: Sequence[str]) -> list[Block]:
    """Cut clean lines into error blocks: whole chains of tracebacks, and single lines that look like an error."""
    found: list[Block] = []
    index = singles = 0
    total = len(lines)
    while index < total:
        text = body(lines[index])[1]
        if _TRACEBACK.search(text):
            block = _traceback_block(lines, index)
            found.append(block)
            index = block.last + 1
            continue
        if _EXCEPTION.match(text) and "Warning" not in text[:60]:
            # The head of the traceback is out of the window; frames right before belong to it.
            last = _end_of_words(lines, index)
            first = index
            floor = max(found[-1].last + 1 if found else 0, index - 60)
            while text == lines[index] and first > floor and lines[first - 1][:1].isspace():
                first -= 1
            words = [*lines[first:index], text, *lines[index + 1 : last + 1]]
            found.append(Block(first, last, "\n".join(words), True, False))
            index = last + 1
            continue
        if (
            text.strip()
            and not _HARMLESS.search(text[:300])
            and not _HANDLED.search(text[:600])
            and _LOOKS_BAD.search(text[:1500])
        ):
            event = parse_line(lines[index]) if singles < MAX_SINGLE else {"kind": "noise"}
            if event is None or event["kind"] in ("fatal", "core_dump_wait", "jit"):
                singles += 1
                found.append(Block(index, index, text, False, False))
        index += 1
    return found


def _end_of_words(lines: Sequence[str], first: int) -> int:
    """The last line of an exception's words: they may go on over several lines, and blank ones in between."""
    last = first
    for index in range(first + 1, min(first + 25, len(lines))):
        line = lines[index]
        if not line.strip():
            continue
        text = body(line)[1]
        if (
            text != line
            or _TRACEBACK.search(line)
            # NCCL's own words follow those of torch: ncclUnhandledCudaError: …
            or (_EXCEPTION.match(line) and not line.startswith("nccl"))
            or parse_line(line)
            or _MANAGER.match(line)
        ):
            break
        last = index
    return last


def _traceback_block(lines: Sequence[str], first: int) -> Block:
    """The chain of tracebacks that begins at ``first``; log lines of other processes in between do not end it."""
    texts = [body(lines[first])[1]]
    index = first + 1
    last = first
    inside = True
    interleaved = 0
    after_exception = 0
    while index < len(lines) and index - first < 600:
        line = lines[index]
        rank_text = body(line)[1]
        prefixed = rank_text is not line and rank_text != line
        if not line.strip():
            index += 1
            continue
        if _CHAIN.match(line):
            inside, last, after_exception = True, index, 0
            texts.append(line)
        elif _TRACEBACK.search(rank_text) and inside and not prefixed:
            last = index
            texts.append(line)
        elif _TRACEBACK.search(rank_text):
            break
        elif prefixed:
            if not inside:
                break
            interleaved += 1
            if interleaved > 40:
                break
        elif line[:1].isspace():
            if not inside and after_exception > 20:
                break
            last = index
            texts.append(line)
        elif inside:
            # The exception line itself; or anything else at the margin, which a broken traceback may bring.
            last = index
            texts.append(line)
            if _EXCEPTION.match(line):
                inside = False
        elif after_exception < 20 and parse_line(line) is None:
            # An exception's text may go on over several lines (a compiler's output).
            after_exception += 1
            last = index
            texts.append(line)
        else:
            break
        index += 1
    text = "\n".join(texts)
    fatal = bool(_FATAL_HEAD.search(text))
    return Block(first, last, text, True, fatal, not fatal and _is_handled(lines, first))


def _is_handled(lines: Sequence[str], first: int) -> bool:
    """The traceback at ``first`` was printed by somebody who caught it, and says so on its line or the one before."""
    head = body(lines[first])[1].partition("Traceback (most recent")[0]
    if head.strip():
        return bool(_HANDLED.search(head[:600]) or "Warning" in head[:120])
    before = lines[first - 1] if first else ""
    text = body(before)[1][:600]
    logged = text != before or before.startswith(("Exception ignored in", "WARN", "[W", "W"))
    return logged and bool(_HANDLED.search(text) or text.startswith(("WARN", "Exception ignored in")))


def _bounded(text: str) -> str:
    """What is searched of a block: no line and no block may cost more than real ones do (some patterns span lines)."""
    lines = [line[:1000] for line in text.split("\n")]
    if len(lines) > 240:
        lines = lines[:80] + lines[-160:]
    text = "\n".join(lines)
    return text if len(text) <= 24_000 else text[:8_000] + "\n" + text[-16_000:]


def _match(text: str) -> Optional[tuple[Row, dict[str, str]]]:
    text = _bounded(text)
    for row, pattern in _COMPILED:
        match = pattern.search(text)
        if match:
            groups = {name: value.strip() for name, value in match.groupdict().items() if value}
            return row, groups
    return None


def _fill(template: str, groups: dict[str, str], secrets: Iterable[str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: redact(groups.get(m.group(1), "?"), secrets)[:300], template)


def _excerpt(lines: Sequence[str], block: Block, secrets: Iterable[str]) -> list[str]:
    """The lines around a block: what came before it, its head and its end."""
    before = [
        line
        for line in lines[max(0, block.first - 30) : block.first]
        if line.strip() and (parse_line(line) or {}).get("kind") not in ("noise", "access")
    ][-CONTEXT_BEFORE:]
    inside = [
        line for line in lines[block.first : block.last + 1] if line.strip() and not set(line.strip()) <= {"^", "~"}
    ]
    room = MAX_SHOWN - len(before)
    if len(inside) > room:
        head = 3
        inside = [*inside[:head], "[…]", *inside[-(room - head - 1) :]]
    return [shown(line, secrets) for line in [*before, *inside]]


def _cause(row: Row, groups: dict[str, str], lines: list[str], secrets: Iterable[str]) -> Cause:
    for name in ("path2", "given2", "address2"):
        if name in groups:
            groups.setdefault(name[:-1], groups.pop(name))
    cause: Cause = {
        "code": row.code,
        "message": _fill(row.message, groups, secrets),
        "mend": _fill(row.mend, groups, secrets),
        "lines": lines,
        "permanent": row.permanent,
    }
    for name, value in groups.items():
        cause[name] = redact(value, secrets)[:300]
    if row.code == "argument_removed" and "replacement" in groups:
        cause["replacement"] = [
            part.strip() for part in re.split(r"\s+or\s+|,\s*", groups["replacement"]) if part.strip()
        ]
    return cause


_PROGRESS = frozenset(
    ("dist_init_end", "weights", "weights_end", "memory_pool", "graph_capture", "engine_ready", "http_up", "served")
)


def _progress_by_rank(lines: Sequence[str]) -> dict[str, int]:
    """The last line at which each rank got on with its start."""
    last: dict[str, int] = {}
    for index, line in enumerate(lines):
        event = parse_line(line)
        if event and event["kind"] in _PROGRESS:
            last[str(event.get("rank", ""))] = index
    return last


def _survived(lines: Sequence[str], block: Block, progress: dict[str, int]) -> bool:
    """The process that wrote this error went on with its start, so it did not die of it."""
    if block.fatal or (parse_line(lines[block.first]) or {}).get("kind") == "fatal":
        return False
    return progress.get(body(lines[block.first])[0], -1) > block.last


def _exception_words(text: str) -> str:
    for line in reversed(text.splitlines()):
        if _EXCEPTION.match(line):
            return line
    kept = [line for line in text.splitlines() if line.strip()]
    return kept[-1] if kept else ""


def find_cause(
    lines: Iterable[str],
    result: Optional[str] = None,
    exit_status: Optional[int] = None,
    secrets: Iterable[str] = (),
) -> Cause:
    """Why a start failed.

    :param lines: the log of one start, oldest first, as it was written (manager's lines included).
    :param result: systemd's ``Result`` of that start (``oom-kill``, ``exit-code``, ``signal``, …), when known.
    :param exit_status: its exit status, when known.
    :returns: ``{code, message, mend, lines, permanent}`` and what the row tells besides (``argument``, ``replacement``,
        ``backend``, ``file``, …). ``code`` is ``unknown`` when no row knows the failure; ``lines`` then holds the first
        error, or the last lines. Never raises.
    """
    kept_secrets = tuple(secrets)
    log = [clean(str(line)) for line in lines]
    if len(log) > MAX_LINES:
        log = log[: MAX_LINES // 2] + log[-MAX_LINES // 2 :]
    found = blocks(log)
    progress = _progress_by_rank(log)
    survived: Optional[tuple[Row, dict[str, str], Block]] = None
    first_symptom: Optional[tuple[Row, dict[str, str], Block]] = None
    first_unknown: Optional[Block] = None
    for block in found:
        if block.handled:
            continue
        known = _match(block.text)
        if known and not known[0].symptom:
            if _survived(log, block, progress):
                survived = survived or (known[0], known[1], block)
                continue
            return _cause(known[0], known[1], _excerpt(log, block, kept_secrets), kept_secrets)
        if known:
            first_symptom = first_symptom or (known[0], known[1], block)
            continue
        if block.traceback and first_unknown is None:
            first_unknown = block
        if block.traceback and block.fatal:
            first_unknown = block
            break
    if result == "oom-kill":
        row = next(row for row in CAUSES if row.code == "oom_killed")
        return _cause(row, {}, _tail(log, kept_secrets), kept_secrets)
    if first_unknown is not None:
        words = redact(_exception_words(first_unknown.text), kept_secrets)[:300]
        return {
            "code": "unknown",
            "message": f"no known cause; the first error is: {words}",
            "mend": "read the lines; if the error is SGLang's own, its issue tracker may know it",
            "lines": _excerpt(log, first_unknown, kept_secrets),
            "permanent": False,
        }
    if survived is not None or first_symptom is not None:
        row, groups, block = survived or first_symptom  # type: ignore[misc]
        return _cause(row, groups, _excerpt(log, block, kept_secrets), kept_secrets)
    plain = [block for block in found if not block.traceback and not block.handled]
    ended = ""
    if result and result != "success":
        ended = f" (systemd: {result}" + (f", status {exit_status})" if exit_status is not None else ")")
    elif exit_status:
        ended = f" (exit status {exit_status})"
    if plain:
        return {
            "code": "unknown",
            "message": f"no known cause{ended}; the first line that looks like an error: "
            + shown(log[plain[0].first], kept_secrets),
            "mend": "read the lines",
            "lines": _excerpt(log, plain[0], kept_secrets),
            "permanent": False,
        }
    return {
        "code": "unknown",
        "message": f"the log tells no error{ended}; its last lines are shown",
        "mend": "read the lines, and the kernel log of that time",
        "lines": _tail(log, kept_secrets),
        "permanent": False,
    }


def _tail(log: Sequence[str], secrets: Iterable[str]) -> list[str]:
    kept = [line for line in log if line.strip() and (parse_line(line) or {}).get("kind") not in ("noise", "access")]
    return [shown(line, secrets) for line in kept[-MAX_SHOWN:]]
