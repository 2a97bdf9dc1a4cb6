# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the codes of service_unit and service_ready in words. docs/causes.md is made from this.

A code that the probe or the plan tells of the same fault is the same word. The texts with numbers are where the fault
is found; here is what a reader of the documentation needs.
"""

from __future__ import annotations

from typing import NamedTuple


class ServiceCode(NamedTuple):
    """One code: what it means, what mends it, and where the knowledge comes from; ``severity`` as it is reported."""

    severity: str
    text: str
    mend: str
    source: str


_RUN = "seen by running it"

# What service_unit tells before it starts an instance, of a unit made by others, or afterwards of what runs.
PREFLIGHT: dict[str, ServiceCode] = {
    "port_taken": ServiceCode(
        "error", "Another process listens on the port; its pid and unit are told.",
        "Stop it, or choose another sglang_port.", _RUN),
    "port_privileged": ServiceCode(
        "error", "The service's user may not bind so low a port, and the unit keeps no capability that could.",
        "Choose a sglang_port of 1024 or higher.", _RUN),
    "venv_absent": ServiceCode(
        "error", "The venv or its interpreter is not there.", "Correct sglang_venv, or make the venv.", _RUN),
    "venv_unreadable_by_user": ServiceCode(
        "error", "The service's user cannot reach the venv or its interpreter.",
        "Open the folder that the message names (setfacl).", _RUN),
    "venv_python_does_not_run": ServiceCode(
        "error", "The venv's interpreter does not start as the service's user.",
        "Move the base interpreter out of a private home, or make the venv again.", _RUN),
    "model_path_absent": ServiceCode(
        "error", "The model's folder is not there.", "Correct sglang_model_path, or mount it.", _RUN),
    "model_unreadable": ServiceCode(
        "error", "The service's user may not read the model.", "Open the folder that the message names (setfacl).",
        _RUN),
    "cache_absent": ServiceCode(
        "error", "A cache folder that the environment or the flags name is not there.",
        "Make it for the service's user, or take the variable out.", _RUN),
    "cache_not_writable": ServiceCode(
        "error", "The service's user may not write into a cache folder.", "Give it to the service's user.",
        "vllm-project/vllm#10185"),
    "cache_noexec": ServiceCode(
        "error", "The cache lies on a file system mounted noexec: what the JIT compiles cannot be loaded.",
        "Mount it with exec, or move /var/cache/sglang.", "mount(8)"),
    "access_unknown": ServiceCode(
        "warning", "Whether the service's user reaches its files could not be found out.", "Read the message.",
        "design"),
    "gpu_held_by_stranger": ServiceCode(
        "error", "A process outside this unit holds memory of the instance's GPUs (below 512 MiB: a warning).",
        "Stop it, or give the instance other GPUs (sglang_gpus).", "sgl-project/sglang#23627"),
    "gpus_unknown": ServiceCode(
        "warning", "nvidia-smi does not tell who uses the GPUs.", "Look at the driver (nvidia-smi, dmesg).", _RUN),
    "leftover_processes": ServiceCode(
        "warning", "Processes of an earlier run are still in the unit's cgroup; they are ended before the start.",
        "Nothing; KillMode=process of a unit made by hand leaves them.", "sgl-project/sglang#23627"),
    "memory_low": ServiceCode(
        "warning", "The host has too little free memory to start.", "End other processes, or take another host.", _RUN),
    "shm_missing": ServiceCode("warning", "There is no /dev/shm; NCCL and torch need it.", "Mount it.", "NCCL"),
    "shm_small": ServiceCode(
        "warning", "/dev/shm is smaller than NCCL and the tokenizer's queues need.", "Mount it larger.", "NCCL"),
    "unit_made_by_others": ServiceCode(
        "error", "A unit of this name exists that this collection did not make.",
        "Take it over (sglang_takeover), or remove it.", "design"),
    "drop_in_present": ServiceCode(
        "warning", "A drop-in of the unit wins over what is deployed.", "Move its settings into the inventory.",
        "systemd.unit(5)"),
    "takeover_unit_missing": ServiceCode(
        "error", "The unit that sglang_takeover names is not on this host.", "Correct or remove sglang_takeover.",
        "design"),
    "takeover_unreadable": ServiceCode(
        "warning", "The unit to take over cannot be read, so its flags are not compared.", "Read the message.",
        "design"),
    "credentials_not_passed": ServiceCode(
        "warning", "systemd hands no credentials over here; secrets are files of the service's user instead.",
        "Nothing; systemd 247 or later outside of containers does it.", _RUN),
    "log_in_namespace": ServiceCode(
        "warning", "SGLang prints its key at start, and this systemd cannot filter it: the log is in a namespace "
        "that root alone reads.", "Nothing; systemd 253 or later filters.", _RUN),
    "unit_not_verified": ServiceCode(
        "warning", "systemd-analyze is not installed, so systemd was not asked about the unit.", "Install it.", _RUN),
    "store_damaged": ServiceCode(
        "warning", "Something in the store of revisions is not what was written; it is not used.",
        "Run site.yml again: it writes the current revision anew.", _RUN),
    "swap_interrupted": ServiceCode(
        "warning", "A run was interrupted after the swap of the unit file.", "Run site.yml again.", _RUN),
    "libraries_differ": ServiceCode(
        "warning", "The venv has other libraries than when the revision ran that is gone back to.",
        "rollback.yml restores them where a journal leads back; the message says why none does, or which do.", _RUN),
    "overtaken": ServiceCode(
        "error", "Another run claimed or changed the instance meanwhile; this one left it as it is.",
        "Let that run end, then give the same command again.", _RUN),
    "journal_unreadable": ServiceCode(
        "warning", "The journal of packages cannot be read, so packages cannot go back with a revision.",
        "See what the message names; a journal that is damaged can be removed.", _RUN),
    "memlock_effective_below_unit": ServiceCode(
        "warning", "The kernel granted less locked memory than the unit asks for.",
        "Look at the container's or the manager's own limit, and at systemd 240.", "systemd/systemd#13331"),
    "nofile_effective_below_unit": ServiceCode(
        "warning", "The kernel granted fewer open files than the unit asks for.", "Raise fs.nr_open.", _RUN),
    "memlock_not_set_in_unit": ServiceCode(
        "error", "LimitMEMLOCK is not set; limits.conf does not apply to services.", "LimitMEMLOCK=infinity.",
        "kvcache-ai/Mooncake#1382"),
    "memlock_word_ignored": ServiceCode(
        "error", "systemd ignores the word after LimitMEMLOCK= (unlimited).", "LimitMEMLOCK=infinity.", _RUN),
    "memlock_too_low": ServiceCode(
        "error", "LimitMEMLOCK is less than the buffers that RDMA locks (its first figure counts).",
        "LimitMEMLOCK=infinity.", "kvcache-ai/Mooncake#1382"),
    "kill_mode_leaves_schedulers": ServiceCode(
        "error", "KillMode=process or none leaves schedulers behind that hold GPU memory.",
        "KillMode=mixed or control-group.", "sgl-project/sglang#23627"),
    "restart_unbounded": ServiceCode(
        "error", "A start that always fails is repeated for ever.",
        "StartLimitIntervalSec and StartLimitBurst in [Unit], wide enough for RestartSec.",
        "eugr/spark-vllm-docker#257"),
    "start_limit_never_triggers": ServiceCode(
        "error", "The start limit's window is shorter than its starts take.",
        "StartLimitIntervalSec above RestartSec times the starts.", "eugr/spark-vllm-docker#257"),
    "start_limit_misses_slow_failures": ServiceCode(
        "warning", "A start that fails after it has loaded weights is slower than the start limit's window.",
        "StartLimitIntervalSec=3600 with StartLimitBurst=4.", "eugr/spark-vllm-docker#257"),
    "start_limit_in_service_section": ServiceCode(
        "error", "StartLimit* stands in [Service], where it is ignored.", "Move it to [Unit].", "systemd.unit(5)"),
    "failure_takes_the_host": ServiceCode(
        "error", "StartLimitAction or FailureAction reboots or stops the host when the service fails.", "Take it out.",
        "systemd.unit(5)"),
    "bad_time_span": ServiceCode("error", "A time is not one that systemd reads.", "Correct it.", "systemd.time(7)"),
    "type_never_starts": ServiceCode(
        "error", "SGLang sends no READY=1 and does not fork, so a unit of this Type never becomes active.",
        "Type=exec.", _RUN),
    "watchdog_kills_service": ServiceCode(
        "error", "WatchdogSec: SGLang sends no WATCHDOG=1, so systemd kills it while it serves.", "Take it out.",
        "systemd.service(5)"),
    "runtime_max_ends_service": ServiceCode(
        "error", "RuntimeMaxSec ends a healthy service.", "Take it out.", "systemd.service(5)"),
    "stop_timeout_too_short": ServiceCode(
        "warning", "TimeoutStopSec is shorter than SGLang takes to end (about 7 s were seen).", "TimeoutStopSec=120.",
        _RUN),
    "oom_policy_leaves_half": ServiceCode(
        "warning", "OOMPolicy=continue leaves the other processes when the kernel has killed one.", "OOMPolicy=kill.",
        "systemd.service(5)"),
    "starts_before_gpus": ServiceCode(
        "warning", "Nothing makes the unit wait for the driver and the GPUs at boot.",
        "After=nvidia-persistenced.service nvidia-fabricmanager.service, and an ExecStartPre that counts them.",
        "ggml-org/llama.cpp#27923"),
    "log_not_in_journal": ServiceCode(
        "warning", "StandardOutput leads past the journal, where causes are looked for.", "StandardOutput=journal.",
        "systemd.exec(5)"),
    "exec_start_needs_a_shell": ServiceCode(
        "error", "ExecStart has shell words (>, &&, source), which systemd hands over as arguments.",
        "The venv's interpreter and its arguments, one by one.", "systemd.service(5)"),
    "exec_start_in_background": ServiceCode(
        "error", "ExecStart puts the server into the background, and the unit ends with its main process.",
        "Start it in the foreground; systemd is the background.", "systemd.service(5)"),
    "exec_start_bad_quoting": ServiceCode(
        "error", "ExecStart of the unit cannot be read.", "Correct its quotes.", "systemd.service(5)"),
    "secret_in_unit": ServiceCode(
        "warning", "A key or token stands in the unit, which every user of the host can read.", "sglang_secrets.",
        "systemd.exec(5)"),
    "start_post_killed_by_timeout": ServiceCode(
        "error", "ExecStartPost is ended by TimeoutStartSec while the model still loads.",
        "Raise TimeoutStartSec above the deadline, or leave readiness to the play.", "systemd.service(5)"),
    "start_pre_killed_by_timeout": ServiceCode(
        "error", "ExecStartPre is ended by TimeoutStartSec before it has waited or compiled.",
        "TimeoutStartSec above what it takes.", "systemd.service(5)"),
    "private_devices_hides_gpus": ServiceCode(
        "error", "PrivateDevices=yes hides /dev/nvidia*.", "Take it out.", "NixOS/nixpkgs#331069"),
    "device_policy_hides_gpus": ServiceCode(
        "error", "DevicePolicy with DeviceAllow leaves out device nodes that CUDA needs.",
        "DevicePolicy=auto and no DeviceAllow.", "NixOS/nixpkgs#331069"),
    "device_policy_hides_rdma": ServiceCode(
        "warning", "DeviceAllow leaves out /dev/infiniband and /dev/gdrdrv.", "DevicePolicy=auto and no DeviceAllow.",
        "NixOS/nixpkgs#331069"),
    "protect_clock_hides_gpus": ServiceCode(
        "error", "ProtectClock=yes implies DeviceAllow, which closes every other device.", "Take it out.",
        "systemd.exec(5)"),
    "memory_deny_write_execute_breaks_jit": ServiceCode(
        "error", "MemoryDenyWriteExecute=yes breaks the JIT compilers.", "Take it out.", _RUN),
    "proc_subset_hides_driver": ServiceCode(
        "error", "ProcSubset=pid hides /proc/driver/nvidia.", "Take it out.", _RUN),
    "remove_ipc_hits_other_instances": ServiceCode(
        "error", "RemoveIPC=yes removes shared memory of all of the user's instances when one stops.", "Take it out.",
        "systemd.exec(5)"),
    "remain_after_exit_hides_death": ServiceCode(
        "error", "RemainAfterExit=yes shows the unit active after its process has ended.", "Take it out.",
        "systemd.service(5)"),
    "tasks_max_too_low": ServiceCode(
        "error", "TasksMax is below what SGLang, NCCL and the compilers start.", "TasksMax=infinity.",
        "systemd.resource-control(5)"),
    "nofile_too_low": ServiceCode(
        "error", "LimitNOFILE is below what clients, weight files and queues take.", "LimitNOFILE=1048576.",
        "systemd.exec(5)"),
    "address_space_limited": ServiceCode(
        "error", "LimitAS or LimitDATA: CUDA reserves the addresses of all GPUs' memory.", "Take it out.",
        "setrlimit(2)"),
    "memory_max_too_low": ServiceCode(
        "warning", "MemoryMax is less than a server takes of the host's memory.", "Raise it, or take it out.",
        "systemd.resource-control(5)"),
    "cpu_quota_too_low": ServiceCode(
        "warning", "CPUQuota is less than one core.", "A core for each rank, at least.",
        "systemd.resource-control(5)"),
    "address_families_missing": ServiceCode(
        "error", "RestrictAddressFamilies takes away what NCCL and the server use.",
        "Allow AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK.", "systemd.exec(5)"),
    "private_network_hides_port": ServiceCode(
        "error", "PrivateNetwork=yes: nobody reaches the port.", "Take it out.", "systemd.exec(5)"),
    "protect_system_hides_caches": ServiceCode(
        "error", "ProtectSystem=strict leaves no folder for the JIT caches.",
        "CacheDirectory=, StateDirectory= or ReadWritePaths=.", "vllm-project/vllm#10185"),
    "cache_read_only_in_unit": ServiceCode(
        "error", "The unit's sandbox makes a cache read-only (of the hub's cache a warning: it may be filled).",
        "ReadWritePaths=, or a folder below CacheDirectory=.", "vllm-project/vllm#10185"),
    "paths_hidden_from_service": ServiceCode(
        "error", "InaccessiblePaths, TemporaryFileSystem or NoExecPaths takes away what the service needs.",
        "Take it out.", "systemd.exec(5)"),
    "path_lacks_compilers": ServiceCode(
        "warning", "PATH does not lead to the venv's programs (ninja); a shell's PATH is not a service's.",
        "PATH with the venv's bin and the toolkit's, and CUDA_HOME.", "sgl-project/sglang#11411"),
    "path_lacks_system_folders": ServiceCode(
        "error", "PATH has neither /usr/bin nor /bin, where the shell, the compiler and the linker are.",
        "Add the system's folders.", "systemd.exec(5)"),
    "private_tmp": ServiceCode(
        "note", "Sockets and IPC files in /tmp are not shared with other units.", "Nothing, unless CUDA MPS is used.",
        "systemd.exec(5)"),
    "environment_bad_quoting": ServiceCode(
        "error", "Environment= of the unit cannot be read.", "Correct its quotes.", "systemd.exec(5)"),
    "environment_not_expanded": ServiceCode(
        "error", "A path variable refers to another variable or to ~, which systemd does not expand.",
        "Write the whole value.", "sgl-project/sglang#11411"),
    "cuda_home_is_a_path_list": ServiceCode(
        "error", "CUDA_HOME is not one folder.", "Give one folder; the message suggests it.",
        "vllm-project/vllm#36077"),
    "cuda_home_is_inside_toolkit": ServiceCode(
        "error", "CUDA_HOME is a folder inside of the toolkit (bin, lib64) or nvcc itself.",
        "The folder above bin; the message suggests it.", "vllm-project/vllm#36077"),
    "cuda_home_relative": ServiceCode(
        "error", "CUDA_HOME is no absolute path, or quotes are part of it.", "An absolute path.",
        "vllm-project/vllm#36077"),
    "*_hidden_by_ProtectHome": ServiceCode(
        "error", "A variable (its name is in the code: hf_home_…), ExecStart or WorkingDirectory points below /home "
        "or /root, which is hidden.",
        "Move the folder, or ProtectHome=read-only.", "NixOS/nixpkgs#331069"),
}  # fmt: skip

# What service_ready tells beside what is found in a log.
READINESS: dict[str, ServiceCode] = {
    "unit_missing": ServiceCode(
        "failed", "systemd does not know the unit.", "Run site.yml, or name the right instance.", _RUN),
    "port_held_by_other": ServiceCode(
        "failed", "Another process answers on the port; its answers prove nothing.",
        "Stop it, or change sglang_port.", _RUN),
    "revision_mismatch": ServiceCode(
        "failed", "The running process has another argv or revision than what is deployed.", "Restart the unit.",
        _RUN),
    "wrong_model": ServiceCode(
        "failed", "The server serves another model than expected.",
        "Check sglang_served_model_name and sglang_model_path.", _RUN),
    "api_key_refused": ServiceCode(
        "failed", "The server refuses the key.",
        "The key that the service read and the one in sglang_secrets must be one.", _RUN),
    "listener_unknown": ServiceCode(
        "failed", "Who listens on the port cannot be read.", "Run with become.", _RUN),
    "generation_unavailable": ServiceCode(
        "stuck", "The server answers and does not generate.",
        "Read the lines; look at the schedulers and the GPUs.", "sgl-project/sglang#4191"),
    "health_unavailable": ServiceCode(
        "stuck", "The server listens and does not become healthy.", "Read the lines.", _RUN),
    "never_listened": ServiceCode(
        "stuck", "Nothing listens on the port, and nothing moves.",
        "Read the lines; sglang_ready_stall_timeout says how long silence is borne.", _RUN),
    "not_ready": ServiceCode("stuck", "It is not ready within the time limit.", "Read the lines.", _RUN),
    "busy": ServiceCode(
        "busy", "It works on requests and does not answer in time; only verify, which does not wait, tells this.",
        "Wait, or run service_ready to wait for it.", "sgl-project/sglang#22511"),
    "stopped": ServiceCode("stopped", "The unit is not running, on request.", "Start it, or deploy it.", _RUN),
    "unknown": ServiceCode(
        "failed", "No known cause: the first error, or the last lines, are shown.", "Read the lines.", "design"),
}  # fmt: skip

# Where the rows of _causes.py come from; the others are texts of SGLang, torch, CUDA or the kernel.
CAUSE_SOURCES: dict[str, str] = {
    "flag_unknown": "recorded: SGLang 0.5.18, 0.5.23",
    "flag_choice": "recorded: SGLang 0.5.18, 0.5.23",
    "flag_type": "recorded: SGLang 0.5.18",
    "model_path_absent": "recorded: SGLang 0.5.23",
    "model_hub": "recorded: SGLang 0.5.18",
    "port_taken": "recorded: SGLang 0.5.18",
    "backend_missing": "recorded: SGLang 0.5.18 on CPU, 0.5.15 on H200",
    "a2a_topology": "recorded: SGLang 0.5.18, 0.5.23",
    "dispatch_limit_config": "recorded: SGLang 0.5.23",
    "dispatch_limit_exceeded": "seen on H200",
    "deepep_needs_low_latency": "recorded on H200",
    "mooncake_mode": "recorded on H200",
    "version_incompatible_with_sglang": "seen on H200",
    "jit_compiler_missing": "vllm-project/vllm#36077, sgl-project/sglang#11411",
    "rdma_device": "kvcache-ai/Mooncake#1382",
    "memlock_limit": "kvcache-ai/Mooncake#1382",
    "permission_denied": "systemd.exec(5)",
    "cache_not_writable": "vllm-project/vllm#10185",
    "cache_noexec": "dlopen(3), mount(8)",
    "arch_mismatch": "sgl-project/sglang#28297, #35080, #23985",
    "kernel_too_large_for_gpu": "Triton's compiler",
    "kernel_refused": "deepseek-ai/DeepEP, DeepGEMM",
    "parallel_sizes": "recorded: SGLang 0.5.18; sgl-project/sglang#8253",
    "quantization_shape": "sgl-project/sglang#4791, #10641",
    "context_length_too_long": "SGLang's model configuration",
    "gpu_peer_access": "CUDA, torch symmetric memory, SGLang's custom all-reduce",
    "network_interface": "Gloo, NCCL",
    "scheduler_silent": "sgl-project/sglang#22511",
    "disaggregation_peer": "SGLang's mooncake and nixl connectors",
    "nvshmem_init": "deepseek-ai/DeepEP#307, sgl-project/sglang#7450",
    "fabricmanager_not_running_or_version_mismatch": "ollama/ollama#9031",
    "no_gpu_visible": "ggml-org/llama.cpp#27923",
    "scheduler_killed": "seen by running it",
    "peer_died": "recorded: cascades of all failures",
    "scheduler_died": "recorded: cascades of all failures",
    "exec_failed": "systemd.exec(5)",
    "oom_killed": "systemd.exec(5), the kernel",
}
