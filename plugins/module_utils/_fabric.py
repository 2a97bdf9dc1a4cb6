# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: how the GPUs of a host reach each other and the network, from evidence on the host.

The class of a host comes from the matrix of ``nvidia-smi topo -m`` alone, never from a model's name; ``topo -mp`` is
never used, since it hides NVLink.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d{1,3})\Z")
_NVLINK = re.compile(r"NV(\d{1,3})\Z")
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_CELL = re.compile(r"(?:X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A|ERR!?|\?|Unknown|OK|CNS|GNS|TNS|NS|DR|U)\Z")
_CPUS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\Z")
# Seven or more GPUs that all reach each other over NVLink are joined by switches: no baseboard wires so many directly.
_SWITCHED_FROM = 7
_NVSWITCH_PATHS = ("/dev/nvidia-nvswitchctl", "/proc/driver/nvidia-nvswitch/devices")
_MELLANOX = 0x02C9
_MLX5_FIRST_PART = 4113  # Connect-IB; smaller numbers are mlx4 (PCI ID database, vendor 15b3)
_EMPTY_MATRIX: dict[str, Any] = {"gpus": [], "matrix": [], "nics": {}, "cpu_affinity": {}, "numa_affinity": {}}


def _lines(text: str) -> list[str]:
    return _ANSI.sub("", text).replace("\ufeff", "").replace("\r", "").split("\n")


def _header(line: str) -> list[str]:
    """The labels of a header: GPUs, NICs and what follows them; an empty list for any other line.

    The header is told by what its first label is followed by: another label, where a row has a cell.
    """
    labels = line.split()
    if not labels or not _GPU.match(labels[0]):
        return []
    second = labels[1] if len(labels) > 1 else "CPU"
    return labels if not _CELL.match(second) or _GPU.match(second) else []


def parse_matrix(text: str) -> dict[str, Any]:
    """The matrix of ``nvidia-smi topo -m`` (or ``-p2p``), with tabs or blanks between its columns.

    Returns ``{gpus: [index], matrix: [[cell]], nics: {nic: {device, gpus: [cell]}}, cpu_affinity: {index: text},
    numa_affinity: {index: text}}``; empty where there is no matrix. Cells are as nvidia-smi writes them.
    """
    out: dict[str, Any] = {"gpus": [], "matrix": [], "nics": {}, "cpu_affinity": {}, "numa_affinity": {}}
    columns: list[str] = []
    rows: dict[str, list[str]] = {}
    legend: dict[str, str] = {}
    tails: dict[int, list[str]] = {}
    for line in _lines(text):
        if not columns:
            labels = _header(line)
            if labels:
                stop = next((i for i, label in enumerate(labels) if label in ("CPU", "NUMA")), len(labels))
                columns = labels[:stop]
            continue
        named = re.match(r"\s+(NIC\d+):\s+(\S+)\s*\Z", line)
        if named:
            legend[named.group(1)] = named.group(2)
            continue
        cells = line.split()
        if len(cells) < 2 or cells[0] not in columns or cells[0] in rows:
            continue
        label, values = cells[0], cells[1:]
        cut = next((i for i, value in enumerate(values[: len(columns)]) if not _CELL.match(value)), len(columns))
        rows[label] = values[:cut]
        gpu = _GPU.match(label)
        if gpu:
            # The empty cell before "GPU NUMA ID" is only there with tabs.
            tails[int(gpu.group(1))] = _tail(line, len(columns), values[cut:])
    gpu_columns = [label for label in columns if _GPU.match(label)]
    out["gpus"] = [int(label[3:]) for label in gpu_columns if label in rows]
    kept = [columns.index(f"GPU{index}") for index in out["gpus"]]
    for index in out["gpus"]:
        row = rows[f"GPU{index}"]
        out["matrix"].append([row[i] if i < len(row) else "?" for i in kept])
        tail = tails.get(index, [])
        if tail and _CPUS.match(tail[0]):
            out["cpu_affinity"][index] = tail[0]
        if len(tail) > 1 and _CPUS.match(tail[1]):
            out["numa_affinity"][index] = tail[1]
    for label in columns:
        if not _GPU.match(label):
            position = columns.index(label)
            cells_to = [rows[f"GPU{i}"][position] if position < len(rows[f"GPU{i}"]) else "?" for i in out["gpus"]]
            out["nics"][label] = {"device": legend.get(label, label), "gpus": cells_to}
    return out


def _tail(line: str, columns: int, rest: list[str]) -> list[str]:
    if "\t" in line.strip():
        return [cell.strip() for cell in line.strip("\n").split("\t")][columns + 1 :]
    return rest


def _linked(cell: str) -> int:
    match = _NVLINK.match(cell)
    return int(match.group(1)) if match else 0


def nvlink_groups(gpus: Sequence[int], matrix: Sequence[Sequence[str]]) -> list[list[int]]:
    """GPUs that all reach each other over NVLink, greedily the largest groups first; single GPUs are left out."""
    count = len(gpus)
    links = [[_linked(matrix[i][j]) > 0 and _linked(matrix[j][i]) > 0 for j in range(count)] for i in range(count)]
    left = list(range(count))
    groups: list[list[int]] = []
    while left:
        best: list[int] = []
        for first in left:
            clique = [first]
            for other in left:
                if other != first and all(links[other][member] for member in clique):
                    clique.append(other)
            if len(clique) > len(best):
                best = clique
        if len(best) < 2:
            break
        groups.append(sorted(gpus[i] for i in best))
        left = [i for i in left if i not in best]
    return sorted(groups)


def classify(
    gpus: Sequence[int], matrix: Sequence[Sequence[str]], names: Optional[Mapping[int, Optional[str]]] = None
) -> dict[str, Any]:
    """``{class, bad_gpus, nvlink_groups, reason}`` of a matrix.

    ``degraded_nvlink``: all but a minority of the GPUs reach each other over NVLink (``nvlink_lost``), or a minority
    has fewer links to all others than the rest (``fewer_links``). GPUs of another model (``names`` by index) than the
    linked ones are not bad: they never had NVLink. ``unknown`` where cells cannot be read.
    """
    count = len(gpus)
    out: dict[str, Any] = {"class": "unknown", "bad_gpus": [], "nvlink_groups": [], "reason": None}
    if count == 0 or len(matrix) != count or any(len(row) != count for row in matrix):
        return dict(out, reason="no_matrix")
    if count == 1:
        return dict(out, **{"class": "single"})
    groups = nvlink_groups(gpus, matrix)
    out["nvlink_groups"] = groups
    cells = [matrix[i][j] for i in range(count) for j in range(count) if i != j]
    if not groups:
        known = all(cell in _PCIE for cell in cells)
        return dict(out, **{"class": "pcie_only" if known else "unknown", "reason": None if known else "cells"})
    largest = max(groups, key=len)
    outside = [gpu for gpu in gpus if gpu not in largest]
    if not outside:
        weak = _weak(gpus, matrix)
        if weak:
            return dict(out, **{"class": "degraded_nvlink", "bad_gpus": weak, "reason": "fewer_links"})
        return dict(out, **{"class": "nvlink_full"})
    kinds = {(names or {}).get(gpu) for gpu in largest}
    other_model = bool(names) and all((names or {}).get(gpu) not in kinds for gpu in outside)
    if len(outside) < len(largest) and not other_model and (len(largest) > 2 or count == 3):
        return dict(out, **{"class": "degraded_nvlink", "bad_gpus": outside, "reason": "nvlink_lost"})
    lone = [gpu for gpu in gpus if not any(gpu in group for group in groups)]
    if lone and not other_model:
        # Some pairs are joined and others are not: bridges are missing or broken.
        return dict(out, **{"class": "degraded_nvlink", "bad_gpus": lone, "reason": "nvlink_lost"})
    return dict(out, **{"class": "nvlink_pairs"})


def _weak(gpus: Sequence[int], matrix: Sequence[Sequence[str]]) -> list[int]:
    """A minority of GPUs whose every link is weaker than the usual one, where the others agree among themselves."""
    count = len(gpus)
    widths = {(i, j): _linked(matrix[i][j]) for i in range(count) for j in range(count) if i != j}
    usual = max(widths.values())
    weak = [i for i in range(count) if all(widths[i, j] < usual for j in range(count) if j != i)]
    strong = [i for i in range(count) if i not in weak]
    if not weak or len(weak) * 2 >= count:
        return []
    if any(widths[i, j] != usual for i in strong for j in strong if i != j):
        return []
    return [gpus[i] for i in weak]


def numa_groups(parsed: Mapping[str, Any], numa: Optional[Mapping[int, Optional[int]]] = None) -> list[list[int]]:
    """GPUs by NUMA node: the kernel's word (``numa`` by index), else the affinities, else the matrix (SYS parts)."""
    gpus = parsed["gpus"]
    if numa and gpus and all(numa.get(gpu) is not None for gpu in gpus):
        return _grouped(gpus, {gpu: numa[gpu] for gpu in gpus})
    for key in ("numa_affinity", "cpu_affinity"):
        known = parsed[key]
        if gpus and all(gpu in known for gpu in gpus):
            return _grouped(gpus, {gpu: known[gpu] for gpu in gpus})
    joined: dict[int, int] = {gpu: gpu for gpu in gpus}
    rows = list(zip(gpus, parsed["matrix"]))
    if any(cell not in ("X", *_PCIE) for dummy, row in rows for cell in row):
        return []
    for gpu, row in rows:
        for other, cell in zip(gpus, row):
            if cell not in ("SYS", "SOC"):
                low, high = sorted((joined[gpu], joined[other]))
                joined = {key: low if value == high else value for key, value in joined.items()}
    return _grouped(gpus, joined)


def _grouped(gpus: Iterable[int], keys: Mapping[int, Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for gpu in gpus:
        groups.setdefault(keys[gpu], []).append(gpu)
    return list(groups.values())


def peer_to_peer(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """``{state, groups, reasons}`` of a ``topo -p2p`` matrix: ``full``, ``partial``, ``none``, ``single``, ``unknown``.

    ``groups`` are GPUs that all reach each other, ``reasons`` the statuses other than OK that were seen.
    """
    gpus, matrix = parsed["gpus"], parsed["matrix"]
    if not gpus:
        return {"state": "unknown", "groups": [], "reasons": []}
    count = len(gpus)
    cells = [matrix[i][j] for i in range(count) for j in range(count) if i != j]
    links = [["NV1" if cell == "OK" else cell for cell in row] for row in matrix]
    state = "single" if not cells else "full" if set(cells) == {"OK"} else "partial" if "OK" in cells else "none"
    reasons = sorted({cell for cell in cells if cell != "OK"})
    return {"state": state, "groups": nvlink_groups(gpus, links), "reasons": reasons}


def subset(
    fabric: Mapping[str, Any], indices: Sequence[int], names: Optional[Mapping[int, Optional[str]]] = None
) -> dict[str, Any]:
    """The fabric that is left when only the GPUs ``indices`` are used; the class is made anew from the matrix."""
    known = list(fabric.get("gpus") or range(len(fabric.get("matrix") or [])))
    kept = [known.index(index) for index in indices if index in known]
    gpus = [known[i] for i in kept]
    matrix = [[fabric["matrix"][i][j] for j in kept] for i in kept]
    out = dict(fabric, gpus=gpus, matrix=matrix)
    if known:
        out.update(classify(gpus, matrix, names))
    out["numa_groups"] = [g for g in ([i for i in group if i in gpus] for group in fabric.get("numa_groups", [])) if g]
    return out


def parse_driver_params(text: str) -> dict[str, Any]:
    """``/proc/driver/nvidia/params``, numbers as numbers; keys inside ``RegistryDwords`` stand beside the others."""
    out: dict[str, Any] = {}
    for line in _lines(text):
        name, colon, value = line.partition(":")
        name, value = name.strip(), value.strip().strip('"')
        if not colon or not re.match(r"[A-Za-z_]\w*\Z", name):
            continue
        out[name] = int(value) if re.match(r"[0-9]{1,20}\Z", value) else value
    for pair in re.split(r"[;,]", str(out.get("RegistryDwords") or "")):
        key, equals, value = pair.partition("=")
        key, value = key.strip(), value.strip()
        if equals and re.match(r"[A-Za-z_]\w*\Z", key):
            try:
                out[key] = int(value, 0)
            except ValueError:
                out[key] = value
    return out


def parse_ibv_devinfo(text: str) -> dict[str, Any]:
    """``{state, devices}`` of ``ibv_devinfo``: ``present``, ``none``, ``no_kernel_support``, ``unknown``.

    Whether a device is mlx5 is told from its vendor and part number: names are changed by udev and by clouds.
    """
    plain = "\n".join(_lines(text))
    devices: list[dict[str, Any]] = []
    for block in re.split(r"(?m)^(?=hca_id:)", plain):
        named = re.match(r"hca_id:\s*(\S+)", block)
        if not named:
            continue
        head, *ports = re.split(r"(?m)^\s+port:\s*", block)
        values = dict(re.findall(r"(?m)^\s+([a-z_]+):[ \t]+(\S[^\n]*?)\s*$", head))
        vendor, part = _number(values.get("vendor_id")), _number(values.get("vendor_part_id"))
        parsed = []
        for port in ports:
            entry = dict(re.findall(r"(?m)^\s+([a-z_]+):[ \t]+(\S[^\n]*?)\s*$", port))
            number = re.match(r"\d+", port)
            parsed.append(
                {
                    "port": int(number.group()) if number else None,
                    "state": _port_state(entry.get("state")),
                    "link_layer": entry.get("link_layer"),
                }
            )
        devices.append(
            _device(
                named.group(1),
                mlx5=vendor == _MELLANOX and part is not None and part >= _MLX5_FIRST_PART,
                ports=parsed,
                firmware=values.get("fw_ver"),
                vendor_id=vendor,
                part_id=part,
            )
        )
    if devices:
        return {"state": "present", "devices": devices}
    if "No IB devices found" in plain:
        return {"state": "none", "devices": []}
    if "Function not implemented" in plain:
        return {"state": "no_kernel_support", "devices": []}
    return {"state": "unknown", "devices": []}


def _number(text: Optional[str]) -> Optional[int]:
    try:
        return int((text or "").split()[0], 0)
    except (ValueError, IndexError):
        return None


def _port_state(text: Optional[str]) -> str:
    """``PORT_ACTIVE (4)``, ``4: ACTIVE`` to ``active``."""
    match = re.search(r"(?:PORT_)?([A-Z]{3,})", text or "")
    return match.group(1).lower() if match else "unknown"


def _device(name: str, mlx5: bool, ports: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A device; its state and link layer are those of its best port."""
    order = {"active": 0, "init": 1, "armed": 1, "down": 2}
    best = min(ports, key=lambda port: order.get(port["state"], 3)) if ports else {}
    device = {"name": name, "mlx5": mlx5, "link_layer": best.get("link_layer"), "state": best.get("state", "unknown")}
    device.update(more, ports=ports)
    return device


def read_sysfs_rdma(context: Context) -> Optional[list[dict[str, Any]]]:
    """RDMA devices of ``/sys/class/infiniband``, or None where the folder is not there."""
    base = context.path("/sys/class/infiniband")
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return None
    devices = []
    for name in names:
        top = f"/sys/class/infiniband/{name}"
        ports = []
        try:
            numbers = sorted(os.listdir(os.path.join(base, name, "ports")))
        except OSError:
            numbers = []
        for number in numbers:
            at = f"{top}/ports/{number}"
            ports.append(
                {
                    "port": int(number) if number.isdigit() else None,
                    "state": _port_state(_one_line(context, f"{at}/state")),
                    "link_layer": _one_line(context, f"{at}/link_layer"),
                    "rate": _one_line(context, f"{at}/rate"),
                }
            )
        try:
            driver: Optional[str] = os.path.basename(os.readlink(os.path.join(base, name, "device", "driver")))
        except OSError:
            driver = None
        numa = _one_line(context, f"{top}/device/numa_node")
        devices.append(
            _device(
                name,
                mlx5=driver == "mlx5_core" or (driver is None and name.startswith("mlx5_")),
                ports=ports,
                driver=driver,
                firmware=_one_line(context, f"{top}/fw_ver"),
                numa=int(numa) if numa and numa.isdigit() else None,
            )
        )
    return devices


def _one_line(context: Context, path: str) -> Optional[str]:
    return (context.read(path) or "").strip() or None


def module_loaded(context: Context, name: str) -> bool:
    """Whether a kernel module is loaded (or built in and shown in /sys/module)."""
    if os.path.isdir(context.path(f"/sys/module/{name}")):
        return True
    loaded = (context.read("/proc/modules") or "").split("\n")
    return any(line.split(" ", 1)[0] == name for line in loaded)


def read_rdma(context: Context) -> dict[str, Any]:
    """``rdma`` of contracts.md. What sysfs does not tell is asked of ``ibv_devinfo``."""
    devices = read_sysfs_rdma(context)
    state, source = ("present" if devices else "none"), "sysfs"
    if devices is None:
        told = context.run(["ibv_devinfo"], context.command_timeout)
        parsed = parse_ibv_devinfo(told.stdout + "\n" + told.stderr)
        devices, state, source = parsed["devices"], parsed["state"], "ibv_devinfo"
        if told.rc == 127 and not told.timed_out:
            # Neither the kernel nor the tools know of RDMA.
            state, source = "none", "sysfs"
    return {
        "state": state,
        "source": source,
        "devices": devices,
        "nvidia_peermem": module_loaded(context, "nvidia_peermem"),
        "gdrdrv": module_loaded(context, "gdrdrv"),
        "gdrdrv_device": os.path.exists(context.path("/dev/gdrdrv")),
        "gdrdrv_state": read_gdrdrv(context),
    }


def read_gdrdrv(context: Context) -> str:
    """``absent``, ``loaded_but_no_device_major``, ``device_node_missing`` or ``ok``; being loaded opens nothing."""
    if not module_loaded(context, "gdrdrv"):
        return "absent"
    devices = context.read("/proc/devices") or ""
    if not re.search(r"^\s*\d+\s+gdrdrv\s*$", devices, re.MULTILINE):
        return "loaded_but_no_device_major"
    return "ok" if os.path.exists(context.path("/dev/gdrdrv")) else "device_node_missing"


def has_nvswitch(context: Context, fabric: Mapping[str, Any]) -> Optional[bool]:
    """Whether NVSwitches join the GPUs: devices, else the matrix; None where neither can tell."""
    if any(
        os.path.exists(context.path(p)) for p in ("/dev/nvidia-nvswitchctl", "/proc/driver/nvidia-nvswitch/devices")
    ):
        return True
    if fabric["class"] == "pcie_only":
        return False
    if max((len(group) for group in fabric["nvlink_groups"]), default=0) >= _SWITCHED_FROM:
        return True
    return None


def parse_fabric_state(text: str) -> list[dict[str, Optional[str]]]:
    """``[{state, status}]`` for each GPU, from ``--query-gpu=fabric.state,fabric.status``; None for ``[N/A]``."""
    out: list[dict[str, Optional[str]]] = []
    for line in _lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or cells[0] == "fabric.state" or not cells[0]:
            continue
        state, status = (None if re.match(r"\[?(N/A|Not Supported)\]?\Z", cell) else cell for cell in cells)
        out.append({"state": state, "status": status})
    return out


def read_fabric_manager(
    run: Run, timeout: float, driver: Optional[str], nvswitch: Optional[bool], smi: str = "nvidia-smi"
) -> dict[str, Any]:
    """The service that sets up NVSwitches, and what the GPUs say of it.

    Returns ``{needed, active, state, version, version_matches, gpu_states, ok}``. On a host without NVSwitch the check
    is skipped: ``needed`` is False and the rest None. Where nothing tells of switches (``nvswitch`` None) an installed
    manager does. A virtual machine has switches that its host looks after: there ``ok`` follows the GPUs' own word
    (fabric state ``Completed``).
    """
    out: dict[str, Any] = dict.fromkeys(("active", "state", "version", "version_matches", "ok"))
    out.update(needed=False, gpu_states=[])
    if nvswitch is False:
        return out
    told = run([smi, "--query-gpu=fabric.state,fabric.status", "--format=csv"], timeout)
    states = [] if "not a valid field" in told.stdout + told.stderr else parse_fabric_state(told.stdout)
    out["gpu_states"] = sorted({f"{s['state']}/{s['status']}" for s in states if s["state"]})
    known = [s for s in states if s["state"]]
    version = re.search(r"(\d+\.\d+(?:\.\d+)*)", run(["nv-fabricmanager", "--version"], timeout).stdout)
    out["version"] = version.group(1) if version else None
    out["needed"] = bool(nvswitch or known or version)
    if not out["needed"]:
        return out
    active = run(["systemctl", "is-active", "nvidia-fabricmanager.service"], timeout)
    word = (active.stdout.strip().split("\n") or [""])[0].strip()
    out["state"] = word if re.match(r"[a-z-]+\Z", word) else None
    out["active"] = None if out["state"] is None else out["state"] == "active"
    if out["version"] and driver:
        out["version_matches"] = out["version"] == driver
    if known:
        out["ok"] = all(s["state"] == "Completed" and s["status"] in (None, "Success") for s in known)
    else:
        out["ok"] = out["active"]
    if out["version_matches"] is False and out["active"] is not False:
        # The manager of another version gives up at its next start, also where it is running still.
        out["ok"] = False
    return out


def gather(context: Context) -> dict[str, Any]:
    """``fabric`` of the probe; a sick nvidia-smi is not asked again where ``gpus`` has already seen it hang."""
    gpus = context.results.get("gpus") or {}
    devices = gpus.get("devices") or []
    numa = {device["index"]: device.get("numa") for device in devices if device["index"] is not None}
    names = {device["index"]: device.get("name") for device in devices if device["index"] is not None}
    parsed, problem, sick = _EMPTY_MATRIX, None, gpus.get("state") in ("timeout", "absent")
    smi = gpus.get("nvidia_smi") or "nvidia-smi"
    p2p: dict[str, Any] = {}
    if not sick:
        told = context.run([smi, "topo", "-m"], context.command_timeout)
        parsed = parse_matrix(told.stdout)
        if told.timed_out:
            problem, sick = "nvidia-smi topo gave no answer in time", True
        elif not parsed["gpus"]:
            text = (told.stdout + told.stderr).strip().split("\n")
            problem = f"nvidia-smi topo -m (rc {told.rc}): {text[0] if text else ''}".rstrip(": ")
    out: dict[str, Any] = {"gpus": parsed["gpus"], "matrix": parsed["matrix"], "nics": parsed["nics"]}
    out.update(classify(parsed["gpus"], parsed["matrix"], names))
    if out["class"] == "unknown" and len(devices) == 1:
        out["class"] = "single"
    out["numa_groups"] = numa_groups(parsed, numa)
    if len(parsed["gpus"]) > 1 and not sick:
        # Over NVLink is asked only where the matrix shows none: the two must agree.
        for kind, option in (("read", "r"), ("nvlink", "n"))[: 2 if out["class"] == "pcie_only" else 1]:
            told = context.run([smi, "topo", "-p2p", option], context.command_timeout)
            p2p[kind] = peer_to_peer(parse_matrix(told.stdout))
            if told.timed_out:
                break
        if out["class"] == "pcie_only" and p2p.get("nvlink", {}).get("state") in ("full", "partial"):
            out.update({"class": "unknown", "reason": "nvlink_hidden"})
            problem = "the matrix shows no NVLink, but peer-to-peer over NVLink works"
    out["p2p"] = p2p
    out["nvswitch"] = has_nvswitch(context, out)
    run = context.run
    asked = False if sick or (not parsed["gpus"] and not devices) else out["nvswitch"]
    out["fabric_manager"] = read_fabric_manager(run, context.command_timeout, gpus.get("driver"), asked, smi)
    if out["nvswitch"] is None and out["fabric_manager"]["gpu_states"]:
        out["nvswitch"] = True
    out["rdma"] = read_rdma(context)
    out["driver_params"] = parse_driver_params(context.read("/proc/driver/nvidia/params") or "")
    out["problem"] = problem
    return out
