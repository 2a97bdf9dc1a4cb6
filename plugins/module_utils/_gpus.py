# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the GPUs of a host as nvidia-smi tells them, and what follows from choosing some."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _fabric
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run, RunResult

FIELDS = (
    "index",
    "uuid",
    "name",
    "compute_cap",
    "memory.total",
    "memory.used",
    "driver_version",
    "pci.bus_id",
    "mig.mode.current",
)
# Without these a row says nothing; nvidia-smi of every age has them.
_ESSENTIAL = ("index", "name", "uuid", "driver_version")
_APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
_PATHS = ("/usr/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/opt/bin/nvidia-smi")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NOTHING = re.compile(r"\[?(?:N/A|Not Supported|Not Found|Not Available|Unknown|Unknown Error|ERR!|None)?\]?\Z", re.I)
_LOST = re.compile(r"GPU is lost|requires? reset|fallen off the bus|Unknown Error|GPU access blocked", re.I)
_HANDLE = re.compile(r"Unable to determine the device handle for (?:GPU|gpu)\s*(?P<id>[^\n]*?): *(?P<why>[A-Z][^\n]*)")
_PCI = re.compile(r"(?:([0-9A-Fa-f]{4,8}):)?([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])")
_MIG = re.compile(r"^\s+MIG\s+(?P<profile>\S+)\s+Device\s+(?P<number>\d+):\s+\(UUID:\s*(?P<uuid>MIG-[^)\s]+)\)")
_GPU_LINE = re.compile(r"^GPU (?P<index>\d+): (?P<name>.*?) \(UUID: (?P<uuid>GPU-[^)\s]+)\)")
_UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')
_FAILURES = (
    # pattern, state, code; first match wins
    (re.compile(r"Driver/library version mismatch", re.I), "error", "driver_library_mismatch"),
    (re.compile(r"couldn't communicate with the NVIDIA driver", re.I), "error", "driver_not_loaded"),
    (re.compile(r"No devices were found", re.I), "absent", "no_devices"),
    (re.compile(r"Failed to initialize NVML", re.I), "error", "nvml_not_initialized"),
    (re.compile(r"Insufficient Permissions", re.I), "error", "gpu_permission"),
    (_LOST, "error", "gpu_lost"),
)
# Only for drivers older than 510, whose nvidia-smi has no compute_cap; models sold since then are not in it. Values:
# NVIDIA's table of compute capabilities by product ("CUDA GPU compute capability", developer documentation).
_OLD_MODELS = (
    (re.compile(r"\bP100\b"), "6.0"),
    (re.compile(r"\bP4(?:0)?\b"), "6.1"),
    (re.compile(r"\bV100"), "7.0"),
    (re.compile(r"\bT4\b"), "7.5"),
    (re.compile(r"\bA(?:100|30)\b"), "8.0"),
    (re.compile(r"\bA(?:10|10G|16|40|2)\b"), "8.6"),
)


def plain(text: str) -> str:
    """Text without ANSI escapes, byte order marks and carriage returns."""
    return _ANSI.sub("", text).replace("\ufeff", "").replace("\r", "")


def _value(cell: Optional[str]) -> Optional[str]:
    cell = (cell or "").strip()
    return None if _NOTHING.match(cell) or _LOST.search(cell) else cell


def _mib(cell: Optional[str]) -> Optional[int]:
    """``143771 MiB``, ``143771``, ``80 GiB`` to MiB."""
    match = re.match(r"(\d+(?:[.,]\d+)?)\s*([KMGT]?i?B)?\Z", _value(cell) or "", re.I)
    if not match:
        return None
    factor = {"k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024}.get((match.group(2) or "M")[0].lower(), 1.0)
    return int(float(match.group(1).replace(",", ".")) * factor)


def _int(cell: Optional[str]) -> Optional[int]:
    text = _value(cell) or ""
    return int(text) if re.match(r"[0-9]{1,9}\Z", text) else None


def normal_pci(text: Optional[str]) -> Optional[str]:
    """``00000000:18:00.0`` as the kernel writes it: ``0000:18:00.0``."""
    match = _PCI.search(text or "")
    if not match:
        return None
    domain = (match.group(1) or "0000")[-4:]
    return f"{domain}:{match.group(2)}:{match.group(3)}.{match.group(4)}".lower()


def _rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Lines of nvidia-smi's CSV by field name. The header, where there is one, decides the order of the columns."""
    order: list[str] = list(fields)
    out: list[dict[str, str]] = []
    lines = [line for line in plain(text).split("\n") if line.strip()]
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        bare = [re.sub(r"\s*\[[^\]]*\]$", "", cell) for cell in cells]
        if not out and _HEADER_NAMES.intersection(bare):
            order = bare
        elif len(cells) >= len(order) > 1:
            out.append(dict(zip(order, cells)))
    return out


_HEADER_NAMES = {*FIELDS, "gpu_name", "gpu_uuid", "gpu_bus_id"}


def parse_gpus(text: str, fields: Sequence[str] = FIELDS) -> list[dict[str, Any]]:
    """Devices from ``nvidia-smi --query-gpu=... --format=csv`` with or without header and units, in any column order.

    A lost GPU stays in the list with ``lost`` True and what is known of it.
    """
    devices: list[dict[str, Any]] = []
    for number, row in enumerate(_rows(text, fields)):
        lost = any(_LOST.search(cell) for cell in row.values())
        name = _value(row.get("name") or row.get("gpu_name"))
        capability, source = capability_of(row.get("compute_cap"), name, "compute_cap" in row)
        index = _int(row.get("index"))
        devices.append(
            {
                "index": number if index is None and "index" not in row else index,
                "uuid": _value(row.get("uuid") or row.get("gpu_uuid")),
                "name": name,
                "memory_mib": _mib(row.get("memory.total")),
                "memory_used_mib": _mib(row.get("memory.used")),
                "compute_capability": capability,
                "compute_capability_source": source,
                "sm": "sm_" + capability.replace(".", "") if capability else None,
                "mig": (_value(row.get("mig.mode.current")) or "").lower() == "enabled",
                "lost": lost,
                "pci": normal_pci(row.get("pci.bus_id") or row.get("gpu_bus_id")),
                "numa": None,
                "driver": _value(row.get("driver_version")),
                "processes": [],
            }
        )
    for match in _HANDLE.finditer(plain(text)):
        pci = normal_pci(match.group("id"))
        if not any(pci and device["pci"] == pci for device in devices):
            devices.append(_lost_device(pci))
    return devices


def _lost_device(pci: Optional[str]) -> dict[str, Any]:
    device: dict[str, Any] = dict.fromkeys(
        ("index", "uuid", "name", "memory_mib", "memory_used_mib", "compute_capability", "compute_capability_source")
    )
    device.update(sm=None, mig=False, lost=True, pci=pci, numa=None, driver=None, processes=[])
    return device


def capability_of(cell: Optional[str], name: Optional[str], has_column: bool) -> tuple[Optional[str], Optional[str]]:
    """Compute capability and where it is from: ``nvidia-smi``, ``table`` (old drivers only) or None."""
    text = (_value(cell) or "").replace(",", ".")
    if re.match(r"\d{1,2}\.\d\Z", text):
        return text, "nvidia-smi"
    if not has_column and name:
        for pattern, capability in _OLD_MODELS:
            if pattern.search(name):
                return capability, "table"
    return None, None


def parse_processes(text: str) -> list[dict[str, Any]]:
    """``[{gpu_uuid, pid, name, memory_mib}]`` from ``--query-compute-apps``; a name may contain commas."""
    out = []
    for line in plain(text).split("\n"):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 4 or not cells[1].isdigit() or not cells[1].isascii() or len(cells[1]) > 9:
            continue
        name = _value(", ".join(cells[2:-1]))
        out.append({"gpu_uuid": cells[0], "pid": int(cells[1]), "name": name, "memory_mib": _mib(cells[-1])})
    return out


def parse_list(text: str) -> list[dict[str, Any]]:
    """``[{index, uuid, mig_devices: [{profile, uuid}]}]`` from ``nvidia-smi -L``."""
    out: list[dict[str, Any]] = []
    for line in plain(text).split("\n"):
        gpu, mig = _GPU_LINE.match(line), _MIG.match(line)
        if gpu:
            out.append({"index": int(gpu.group("index")), "uuid": gpu.group("uuid"), "mig_devices": []})
        elif mig and out:
            out[-1]["mig_devices"].append({"profile": mig.group("profile"), "uuid": mig.group("uuid")})
    return out


def parse_cuda_driver(text: str) -> Optional[str]:
    """The newest CUDA that the driver runs, from the head of plain ``nvidia-smi``."""
    match = re.search(r"CUDA[^|\n]*Version\s*:\s*(\d+\.\d+)", plain(text))
    return match.group(1) if match else None


def failure(result: RunResult, timeout: float) -> dict[str, Any]:
    """``{state, code, message}`` of an nvidia-smi that gave no devices."""
    text = plain(result.stdout + "\n" + result.stderr).strip()
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    if result.timed_out:
        message = f"nvidia-smi gave no answer in {timeout:g} s: the driver or a GPU hangs (dmesg shows Xid lines)."
        return {"state": "timeout", "code": "nvidia_smi_timeout", "message": message}
    for pattern, state, code in _FAILURES:
        if pattern.search(text):
            return {"state": state, "code": code, "message": f"nvidia-smi (rc {result.rc}): {first}"}
    if result.rc == 127:
        return {"state": "absent", "code": "nvidia_smi_absent", "message": "nvidia-smi is not installed."}
    return {"state": "error", "code": "nvidia_smi_failed", "message": f"nvidia-smi (rc {result.rc}): {first}"}


def query(run: Run, timeout: float) -> tuple[RunResult, list[str], str]:
    """Run the GPU query; fields that this nvidia-smi does not know are left out. Returns also the fields, the path."""
    fields, path, result = list(FIELDS), "nvidia-smi", RunResult(127, "", "")
    for path in ("nvidia-smi", *_PATHS):
        result = run([path, "--query-gpu=" + ",".join(fields), "--format=csv"], timeout)
        if result.rc != 127 or result.timed_out:
            break
    for _dummy in FIELDS:
        unknown = _UNKNOWN_FIELD.search(result.stdout + result.stderr)
        if not unknown or unknown.group(1) not in fields or unknown.group(1) in _ESSENTIAL:
            break
        fields.remove(unknown.group(1))
        result = run([path, "--query-gpu=" + ",".join(fields), "--format=csv"], timeout)
    return result, fields, path


def read_gpus(run: Run, timeout: float, context: Optional[Context] = None) -> dict[str, Any]:
    """``gpus`` of contracts.md. Every command has the time limit; a hanging one is told and not asked again."""
    result, fields, path = query(run, timeout)
    out: dict[str, Any] = {
        "state": "ok",
        "code": None,
        "message": "",
        "driver": None,
        "cuda_driver": None,
        "nvidia_smi": path if result.rc != 127 else None,
        "devices": [] if result.timed_out else parse_gpus(result.stdout + "\n" + result.stderr, fields),
    }
    if not any(not device["lost"] for device in out["devices"]):
        out.update(failure(result, timeout))
    if out["state"] != "ok":
        _driver_without_smi(out, context)
        return out
    devices = out["devices"]
    out["driver"] = next((device["driver"] for device in devices if device["driver"]), None)
    for device in devices:
        device.pop("driver", None)
    lost = [device for device in devices if device["lost"]]
    if lost:
        out.update(code="gpu_lost", message="lost GPUs: " + ", ".join(_label(device) for device in lost))
    out["cuda_driver"] = parse_cuda_driver(run([path], timeout).stdout)
    apps = run([path, "--query-compute-apps=" + ",".join(_APP_FIELDS), "--format=csv"], timeout)
    _add_processes(devices, parse_processes(apps.stdout), context)
    if any(device["mig"] for device in devices):
        listed = {entry["uuid"]: entry["mig_devices"] for entry in parse_list(run([path, "-L"], timeout).stdout)}
        for device in devices:
            if device["mig"]:
                device["mig_devices"] = listed.get(device["uuid"], [])
    if context is not None:
        for device in devices:
            device["numa"] = numa_of(context, device["pci"])
    return out


def _driver_without_smi(out: dict[str, Any], context: Optional[Context]) -> None:
    for device in out["devices"]:
        device.pop("driver", None)
    if context is None:
        return
    version = re.search(
        r"(?:Kernel Module|for \S+)\s+(\d+\.\d+(?:\.\d+)?)", context.read("/proc/driver/nvidia/version") or ""
    )
    if version:
        out["driver"] = version.group(1)
        if out["code"] == "nvidia_smi_absent":
            out.update(state="error", message="nvidia-smi is not installed, but the NVIDIA driver is loaded.")


def _label(device: Mapping[str, Any]) -> str:
    return str(device["index"] if device["index"] is not None else device["pci"] or "?")


def _add_processes(devices: list[dict[str, Any]], apps: list[dict[str, Any]], context: Optional[Context]) -> None:
    by_uuid = {device["uuid"]: device for device in devices if device["uuid"]}
    for app in apps:
        device = by_uuid.get(app["gpu_uuid"])
        if device is None and len(devices) == 1:
            device = devices[0]
        if device is None:
            continue
        user = None
        if context is not None:
            base = context.path(f"/proc/{app['pid']}")
            user = owner_of(base)
            if app["name"] is None:
                app["name"] = (context.read(f"/proc/{app['pid']}/comm") or "").strip() or None
        device["processes"].append({k: app[k] for k in ("pid", "name", "memory_mib")} | {"user": user})


def owner_of(path: str) -> Optional[str]:
    """The name (or the number, as text) of the user who owns ``path``, or None where it is gone."""
    try:
        uid = os.stat(path).st_uid
    except (OSError, ValueError):
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def numa_of(context: Context, pci: Optional[str]) -> Optional[int]:
    """The NUMA node of a PCI device, or None where the kernel knows none."""
    text = (context.read(f"/sys/bus/pci/devices/{pci}/numa_node") or "").strip() if pci else ""
    return int(text) if text.isdigit() else None


def visible_indices(text: Optional[str], devices: Sequence[Mapping[str, Any]]) -> Optional[list[int]]:
    """Indices that a CUDA_VISIBLE_DEVICES leaves visible, in its order; None where it is not set.

    Like CUDA, everything after the first entry that names no device is invisible, and a repeated entry hides all.
    """
    if text is None:
        return None
    out: list[int] = []
    for entry in (part.strip() for part in str(text).split(",")):
        found = [
            device["index"]
            for device in devices
            if device["index"] is not None
            and ((entry.isdigit() and str(device["index"]) == entry) or _names_uuid(entry, device))
        ]
        if len(found) != 1:
            break
        if found[0] in out:
            return []
        out.append(found[0])
    return out


def _names_uuid(entry: str, device: Mapping[str, Any]) -> bool:
    uuids = [device.get("uuid") or "", *(mig["uuid"] for mig in device.get("mig_devices", []))]
    return entry.startswith(("GPU-", "MIG-")) and any(uuid.startswith(entry) for uuid in uuids)


def select(
    gpus: Mapping[str, Any], fabric: Optional[Mapping[str, Any]], indices: Optional[Iterable[int]]
) -> tuple[dict[str, Any], Optional[dict[str, Any]]]:
    """``gpus`` and ``fabric`` as a service sees them that may use only ``indices`` (None: all of them).

    Devices keep their physical index. The fabric's class, bad GPUs and groups are made anew for the chosen ones.
    """
    if indices is None:
        return dict(gpus), None if fabric is None else dict(fabric)
    wanted = list(dict.fromkeys(int(index) for index in indices))
    by_index = {device["index"]: device for device in gpus.get("devices", [])}
    chosen = dict(gpus, devices=[by_index[index] for index in wanted if index in by_index])
    if chosen.get("code") == "gpu_lost" and not any(device["lost"] for device in chosen["devices"]):
        chosen.update(code=None, message="")
    names = {device["index"]: device["name"] for device in chosen["devices"]}
    return chosen, None if fabric is None else _fabric.subset(fabric, wanted, names)


def gather(context: Context) -> dict[str, Any]:
    """``gpus`` of the probe."""
    return read_gpus(context.run, context.command_timeout, context)
