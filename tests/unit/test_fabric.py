# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Topology, RDMA and driver settings from recorded and from hostile outputs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fabric
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parents[1] / "fixtures"
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def sample(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "count", "kind", "bad", "numa"),
    [
        ("topo_1gpu.txt", 1, "single", [], [[0]]),
        ("topo_2gpu_phb_workstation.txt", 2, "pcie_only", [], [[0, 1]]),
        ("topo_b200_gpu2_nvlink_lost.txt", 8, "degraded_nvlink", [2], HALVES),
        ("topo_gb200_4gpu_arm.txt", 4, "nvlink_full", [], [[0, 1], [2, 3]]),
        ("topo_h200_nvlink_8gpu_10nic.txt", 8, "nvlink_full", [], HALVES),
        ("topo_h200_nvlink_8gpu_10nic_tty_ansi.txt", 8, "nvlink_full", [], HALVES),
        ("topo_h800_nv8_8gpu_spaces.txt", 8, "nvlink_full", [], HALVES),
        ("topo_l40s_4gpu_1numa.txt", 4, "pcie_only", [], [[0, 1, 2, 3]]),
        ("topo_mixed_nvlink_pairs_8gpu.txt", 8, "nvlink_pairs", [], HALVES),
        ("topo_mp_nvlink_hidden_8gpu.txt", 8, "pcie_only", [], HALVES),
        ("topo_old_driver_named_nics_16gpu.txt", 16, "nvlink_full", [], [list(range(8)), list(range(8, 16))]),
        ("topo_pcie_8gpu_2numa_no_nic.txt", 8, "pcie_only", [], HALVES),
        ("topo_rtxpro6000_pcie_8gpu_2numa_4nic.txt", 8, "pcie_only", [], HALVES),
    ],
)
def test_topology_samples(name: str, count: int, kind: str, bad: list[int], numa: list[list[int]]) -> None:
    parsed = _fabric.parse_matrix(sample(f"topo/{name}"))
    found = _fabric.classify(parsed["gpus"], parsed["matrix"])
    assert parsed["gpus"] == list(range(count))
    assert [len(row) for row in parsed["matrix"]] == [count] * count
    assert (found["class"], found["bad_gpus"]) == (kind, bad)
    assert _fabric.numa_groups(parsed) == numa


def test_every_sample_is_in_the_tests() -> None:
    told = Path(__file__).read_text(encoding="utf-8")
    names = [path.name for folder in ("topo", "ibv") for path in (FIXTURES / folder).iterdir()]
    assert [name for name in names if name not in told] == []


def test_nics_are_not_gpus_and_have_their_devices() -> None:
    parsed = _fabric.parse_matrix(sample("topo/topo_h200_nvlink_8gpu_10nic.txt"))
    assert parsed["nics"]["NIC9"] == {"device": "mlx5_bond_0", "gpus": ["SYS"] * 4 + ["NODE"] * 4}
    old = _fabric.parse_matrix(sample("topo/topo_old_driver_named_nics_16gpu.txt"))
    assert list(old["nics"]) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert old["nics"]["mlx5_3"]["gpus"][12:] == ["PIX"] * 4


def test_affinities_with_and_without_the_empty_cell() -> None:
    arm = _fabric.parse_matrix(sample("topo/topo_gb200_4gpu_arm.txt"))
    assert arm["numa_affinity"] == {0: "0,2-17", 1: "0,2-17", 2: "1,18-33", 3: "1,18-33"}
    one = _fabric.parse_matrix(sample("topo/topo_1gpu.txt"))
    assert (one["numa_affinity"], one["cpu_affinity"]) == ({}, {})


def test_the_kernels_numa_nodes_win() -> None:
    parsed = _fabric.parse_matrix(sample("topo/topo_l40s_4gpu_1numa.txt"))
    assert _fabric.numa_groups(parsed, {0: 0, 1: 0, 2: 1, 3: 1}) == [[0, 1], [2, 3]]
    assert _fabric.numa_groups(parsed, {0: 0, 1: None, 2: 1, 3: 1}) == [[0, 1, 2, 3]]


def test_numa_from_the_matrix_alone() -> None:
    parsed = _fabric.parse_matrix(sample("topo/topo_pcie_8gpu_2numa_no_nic.txt"))
    assert _fabric.numa_groups({**parsed, "numa_affinity": {}, "cpu_affinity": {}}) == HALVES


@pytest.mark.parametrize(
    ("name", "state", "groups", "reasons"),
    [
        ("topo/topo_p2p_full.txt", "full", [list(range(8))], []),
        ("topo/topo_p2p_none_2gpu.txt", "none", [], ["GNS"]),
        ("topo/topo_p2p_partial.txt", "partial", HALVES, ["CNS"]),
        ("h200x2/topo-p2p-r.txt", "full", [[0, 1]], []),
        ("h200x2/topo-p2p-n.txt", "full", [[0, 1]], []),
    ],
)
def test_peer_to_peer(name: str, state: str, groups: list[list[int]], reasons: list[str]) -> None:
    found = _fabric.peer_to_peer(_fabric.parse_matrix(sample(name)))
    assert found == {"state": state, "groups": groups, "reasons": reasons}


def matrix(count: int, links: dict[tuple[int, int], str], other: str = "SYS") -> list[list[str]]:
    cells = {**links, **{(b, a): cell for (a, b), cell in links.items()}}
    return [["X" if i == j else cells.get((i, j), other) for j in range(count)] for i in range(count)]


def mesh(members: list[int], cell: str = "NV18") -> dict[tuple[int, int], str]:
    return dict.fromkeys(itertools.combinations(members, 2), cell)


@pytest.mark.parametrize(
    ("count", "links", "kind", "bad"),
    [
        (8, mesh([0, 1, 3, 4, 6, 7]), "degraded_nvlink", [2, 5]),
        (3, mesh([0, 1]), "degraded_nvlink", [2]),
        (8, {**mesh([0, 1, 2, 3, 4, 5]), **mesh([6, 7])}, "degraded_nvlink", [6, 7]),
        (4, mesh([0, 1]), "degraded_nvlink", [2, 3]),
        (8, {**mesh([0, 1]), **mesh([2, 3]), **mesh([4, 5])}, "degraded_nvlink", [6, 7]),
        (4, {**mesh([0, 1]), **mesh([2, 3])}, "nvlink_pairs", []),
        (8, {**mesh([0, 1, 2, 3]), **mesh([4, 5, 6, 7])}, "nvlink_pairs", []),
        (2, {}, "pcie_only", []),
        (2, mesh([0, 1], "ERR!"), "unknown", []),
        (2, mesh([0, 1], "NV12"), "nvlink_full", []),
        (8, {**mesh(list(range(8))), **{(a, b): "NV9" for a, b in mesh(list(range(8))) if 5 in (a, b)}},
         "degraded_nvlink", [5]),
        (4, {**mesh([0, 1, 2, 3], "NV1"), (0, 1): "NV2", (2, 3): "NV2"}, "nvlink_full", []),
    ],
)  # fmt: skip
def test_classes_of_made_up_hosts(count: int, links: dict, kind: str, bad: list[int]) -> None:
    found = _fabric.classify(list(range(count)), matrix(count, links))
    assert (found["class"], found["bad_gpus"]) == (kind, bad)


def test_gpus_of_a_model_without_nvlink_are_not_bad() -> None:
    links = matrix(4, mesh([0, 1]))
    names = {0: "NVIDIA H100 NVL", 1: "NVIDIA H100 NVL", 2: "NVIDIA L40S", 3: "NVIDIA L40S"}
    assert _fabric.classify([0, 1, 2, 3], links, names)["class"] == "nvlink_pairs"
    assert _fabric.classify([0, 1, 2, 3], links, dict.fromkeys(range(4), "NVIDIA H100 NVL"))["bad_gpus"] == [2, 3]


def test_subset_keeps_physical_indices() -> None:
    fabric = {
        "gpus": [0, 1, 2, 3],
        "matrix": matrix(4, {**mesh([0, 1]), **mesh([2, 3])}),
        "numa_groups": [[0, 1, 2, 3]],
    }
    part = _fabric.subset(fabric, [2, 3])
    assert (part["class"], part["gpus"], part["nvlink_groups"]) == ("nvlink_full", [2, 3], [[2, 3]])
    assert part["numa_groups"] == [[2, 3]]
    assert _fabric.subset(fabric, [1, 2])["class"] == "pcie_only"


@pytest.mark.parametrize(
    ("name", "state", "devices"),
    [
        ("ibv_8x_cx7_ib.txt", "present", [(f"mlx5_{i}", True, "InfiniBand", "active") for i in range(8)]),
        ("ibv_8x_cx8_b300_ib.txt", "present", [(f"mlx5_{i}", True, "InfiniBand", "active") for i in range(8)]),
        ("ibv_efa.txt", "present", [("rdmap16s27", False, "Unspecified", "active")]),
        ("ibv_erdma.txt", "present", [("erdma_0", False, "Ethernet", "active")]),
        ("ibv_err_no_kernel_support.txt", "no_kernel_support", []),
        ("ibv_no_devices.txt", "none", []),
        (
            "ibv_renamed_azure.txt",
            "present",
            [("rdmaP23800p0s2", True, "Ethernet", "active"), ("ibP57247p0s2", True, "InfiniBand", "active")],
        ),
        (
            "ibv_roce_mixed_down.txt",
            "present",
            [
                ("mlx5_0", True, "InfiniBand", "down"),
                ("mlx5_1", True, "Ethernet", "active"),
                ("mlx5_2", True, "Ethernet", "down"),
                ("mlx5_bond_0", True, "Ethernet", "active"),
            ],
        ),
    ],
)
def test_ibv_devinfo_samples(name: str, state: str, devices: list[tuple]) -> None:
    found = _fabric.parse_ibv_devinfo(sample(f"ibv/{name}"))
    assert found["state"] == state
    assert [(d["name"], d["mlx5"], d["link_layer"], d["state"]) for d in found["devices"]] == devices


def test_an_mlx4_device_of_the_same_vendor_is_not_mlx5() -> None:
    text = sample("ibv/ibv_8x_cx7_ib.txt").replace("4129", "4099")
    assert {device["mlx5"] for device in _fabric.parse_ibv_devinfo(text)["devices"]} == {False}


def rdma_device(root: Path, name: str, driver: str, state: str, layer: str) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")
    device = port.parents[1] / "device"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    target = root / "sys/bus/pci/drivers" / driver
    target.mkdir(parents=True, exist_ok=True)
    os.symlink(target, device / "driver")


class Tools:
    """Commands by their joined argv; every other one is not installed."""

    def __init__(self, answers: dict[str, RunResult]) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def __call__(self, argv, timeout):
        line = " ".join(argv)
        self.calls.append(line)
        return self.answers.get(line, RunResult(127, "", "not found"))


def test_rdma_from_sysfs_is_told_by_driver_not_by_name(tmp_path: Path) -> None:
    rdma_device(tmp_path, "ibp0", "mlx5_core", "4: ACTIVE", "InfiniBand")
    rdma_device(tmp_path, "mlx5_9", "erdma", "1: DOWN", "Ethernet")
    (tmp_path / "sys/module/gdrdrv").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/modules").write_text("nvidia_peermem 16384 0 - Live 0x0\nnvidia_peermem_other 1 0 - Live 0x0\n")
    tools = Tools({})
    rdma = _fabric.read_rdma(Context(run=tools, root=str(tmp_path)))
    assert [(d["name"], d["mlx5"], d["state"], d["numa"]) for d in rdma["devices"]] == [
        ("ibp0", True, "active", 1),
        ("mlx5_9", False, "down", 1),
    ]
    assert (rdma["state"], rdma["source"], rdma["nvidia_peermem"], rdma["gdrdrv"]) == ("present", "sysfs", True, True)
    assert tools.calls == []


def test_rdma_falls_back_to_ibv_devinfo(tmp_path: Path) -> None:
    answer = RunResult(0, sample("ibv/ibv_erdma.txt"), "")
    rdma = _fabric.read_rdma(Context(run=Tools({"ibv_devinfo": answer}), root=str(tmp_path)))
    assert (rdma["state"], rdma["source"], len(rdma["devices"])) == ("present", "ibv_devinfo", 1)
    error = RunResult(255, "", sample("ibv/ibv_err_no_kernel_support.txt"))
    assert (
        _fabric.read_rdma(Context(run=Tools({"ibv_devinfo": error}), root=str(tmp_path)))["state"]
        == "no_kernel_support"
    )
    assert _fabric.read_rdma(Context(run=Tools({}), root=str(tmp_path)))["state"] == "none"
    hanging = RunResult(-9, "", "", True)
    assert _fabric.read_rdma(Context(run=Tools({"ibv_devinfo": hanging}), root=str(tmp_path)))["state"] == "unknown"


def test_driver_parameters_with_registry_keys() -> None:
    found = _fabric.parse_driver_params(sample("h200x2/params.txt"))
    assert (found["EnableStreamMemOPs"], found["NvLinkDisable"], found["RegistryDwords"]) == (0, 0, "")
    mended = _fabric.parse_driver_params('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;Other=0x10;"\n')
    assert (mended["PeerMappingOverride"], mended["Other"], mended["EnableStreamMemOPs"]) == (1, 16, 1)


TOPO = "nvidia-smi topo -m"
P2P_READ, P2P_NVLINK = "nvidia-smi topo -p2p r", "nvidia-smi topo -p2p n"
STATE = "nvidia-smi --query-gpu=fabric.state,fabric.status --format=csv"
ACTIVE = "systemctl is-active nvidia-fabricmanager.service"
VERSION = "nv-fabricmanager --version"


def answers(topo: str, **more: str) -> dict[str, RunResult]:
    out = {TOPO: RunResult(0, sample(topo), "")}
    out.update({globals()[name]: RunResult(0, text, "") for name, text in more.items()})
    return out


def test_gather_of_the_recorded_host(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/params").write_text(sample("h200x2/params.txt"))
    (tmp_path / "proc/modules").write_text(sample("h200x2/proc-modules.txt"))
    tools = Tools(
        answers(
            "h200x2/topo-m.txt",
            P2P_READ=sample("h200x2/topo-p2p-r.txt"),
            STATE="fabric.state, fabric.status\nCompleted, Success\nCompleted, Success\n",
        )
    )
    fabric = _fabric.gather(Context(run=tools, root=str(tmp_path)))
    assert (fabric["class"], fabric["nvlink_groups"], fabric["numa_groups"]) == ("nvlink_full", [[0, 1]], [[0, 1]])
    assert fabric["p2p"] == {"read": {"state": "full", "groups": [[0, 1]], "reasons": []}}
    assert fabric["driver_params"]["EnableStreamMemOPs"] == 0
    assert (fabric["rdma"]["state"], fabric["rdma"]["nvidia_peermem"], fabric["rdma"]["gdrdrv"]) == (
        "none",
        False,
        False,
    )
    # A virtual machine: its host looks after the switches, and the GPUs say that they are set up.
    assert (fabric["nvswitch"], fabric["fabric_manager"]["ok"], fabric["fabric_manager"]["active"]) == (
        True,
        True,
        None,
    )
    assert fabric["problem"] is None
    assert not any("-mp" in call.split() for call in tools.calls)


@pytest.mark.parametrize(
    ("service", "version", "driver", "gpu_state", "ok"),
    [
        ("active", "570.86.15", "570.86.15", None, True),
        ("inactive", "570.86.15", "570.86.15", None, False),
        ("active", "570.86.16", "570.86.15", None, False),
        ("failed", "570.86.16", "570.86.15", "In Progress, N/A", False),
        ("inactive", "570.86.15", "570.86.15", "Completed, Success", True),
        ("active", "570.86.15", "570.86.15", "Completed, Out of resources", False),
    ],
)
def test_fabric_manager(
    service: str, version: str, driver: str, gpu_state: str | None, ok: bool, tmp_path: Path
) -> None:
    state = "fabric.state, fabric.status\n" + "\n".join([gpu_state or "[N/A], [N/A]"] * 8)
    tools = Tools(
        answers(
            "topo/topo_h200_nvlink_8gpu_10nic.txt",
            STATE=state,
            ACTIVE=f"{service}\n",
            VERSION=f"Fabric Manager version is : {version}\n",
        )
    )
    context = Context(run=tools, root=str(tmp_path), results={"gpus": {"state": "ok", "driver": driver, "devices": []}})
    manager = _fabric.gather(context)["fabric_manager"]
    assert (manager["needed"], manager["state"], manager["version"]) == (True, service, version)
    assert manager["version_matches"] == (version == driver)
    assert manager["ok"] is ok


@pytest.mark.parametrize(
    ("version", "needed", "ok"), [("Fabric Manager version is : 570.86.16", True, False), ("", False, None)]
)
def test_an_installed_manager_tells_of_switches_where_nothing_else_does(
    version: str, needed: bool, ok: bool | None, tmp_path: Path
) -> None:
    tools = Tools({ACTIVE: RunResult(3, "inactive\n", ""), VERSION: RunResult(0, version, "")})
    gpus = {"state": "ok", "driver": "570.86.15", "devices": [{"index": i} for i in range(8)]}
    manager = _fabric.gather(Context(run=tools, root=str(tmp_path), results={"gpus": gpus}))["fabric_manager"]
    assert (manager["needed"], manager["ok"]) == (needed, ok)


def test_the_nvidia_smi_that_answered_is_asked_again(tmp_path: Path) -> None:
    gpus = {"state": "ok", "nvidia_smi": "/opt/bin/nvidia-smi", "devices": []}
    tools = Tools({"/opt/bin/nvidia-smi topo -m": RunResult(0, sample("topo/topo_1gpu.txt"), "")})
    assert _fabric.gather(Context(run=tools, root=str(tmp_path), results={"gpus": gpus}))["class"] == "single"


def test_a_single_gpu_can_hang_on_a_switch_too(tmp_path: Path) -> None:
    tools = Tools(
        answers("topo/topo_1gpu.txt", STATE="fabric.state, fabric.status\nIn Progress, N/A\n", ACTIVE="failed\n")
    )
    fabric = _fabric.gather(Context(run=tools, root=str(tmp_path)))
    assert (fabric["class"], fabric["nvswitch"], fabric["fabric_manager"]["ok"]) == ("single", True, False)


def test_fabric_manager_is_not_asked_for_on_a_pcie_host(tmp_path: Path) -> None:
    tools = Tools(answers("topo/topo_rtxpro6000_pcie_8gpu_2numa_4nic.txt", ACTIVE="inactive\n"))
    fabric = _fabric.gather(Context(run=tools, root=str(tmp_path)))
    assert (fabric["nvswitch"], fabric["fabric_manager"]["needed"], fabric["fabric_manager"]["ok"]) == (
        False,
        False,
        None,
    )
    assert ACTIVE not in tools.calls


def test_a_matrix_that_hides_nvlink_is_not_believed(tmp_path: Path) -> None:
    tools = Tools(
        answers("topo/topo_mp_nvlink_hidden_8gpu.txt", P2P_READ=sample("topo/topo_p2p_full.txt"),
                P2P_NVLINK=sample("topo/topo_p2p_full.txt"))
    )  # fmt: skip
    fabric = _fabric.gather(Context(run=tools, root=str(tmp_path)))
    assert (fabric["class"], fabric["reason"]) == ("unknown", "nvlink_hidden")
    tools.answers[P2P_NVLINK] = RunResult(0, sample("topo/topo_p2p_full.txt").replace("OK", "NS"), "")
    assert _fabric.gather(Context(run=tools, root=str(tmp_path)))["class"] == "pcie_only"


def test_a_hanging_nvidia_smi_is_asked_once(tmp_path: Path) -> None:
    tools = Tools({TOPO: RunResult(-9, "", "", True)})
    fabric = _fabric.gather(Context(run=tools, root=str(tmp_path)))
    assert (fabric["class"], fabric["problem"]) == ("unknown", "nvidia-smi topo gave no answer in time")
    assert [call for call in tools.calls if call.startswith("nvidia-smi")] == [TOPO]
    quiet = Tools({})
    seen = {"gpus": {"state": "timeout", "devices": []}}
    assert _fabric.gather(Context(run=quiet, root=str(tmp_path), results=seen))["class"] == "unknown"
    assert [call for call in quiet.calls if call.startswith("nvidia-smi")] == []


def test_a_host_without_gpus(tmp_path: Path) -> None:
    failed = RunResult(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "")
    fabric = _fabric.gather(Context(run=Tools({TOPO: failed}), root=str(tmp_path)))
    assert (fabric["class"], fabric["numa_groups"], fabric["nvlink_groups"]) == ("unknown", [], [])
    assert "rc 9" in fabric["problem"]


_CELLS = [
    "GPU0",
    "GPU1",
    "NIC0",
    "X",
    "NV18",
    "SYS",
    "OK",
    "N/A",
    "CPU",
    "Affinity",
    "\t",
    " ",
    "\n",
    "\x1b[4m",
    "0-3",
    "0",
]
_HOSTILE = st.text(max_size=300) | st.lists(st.sampled_from(_CELLS), max_size=80).map("".join)


@given(_HOSTILE)
def test_hostile_text_never_raises(text: str) -> None:
    parsed = _fabric.parse_matrix(text)
    found = _fabric.classify(parsed["gpus"], parsed["matrix"])
    assert found["class"] in ("nvlink_full", "nvlink_pairs", "degraded_nvlink", "pcie_only", "single", "unknown")
    grouped = sorted(gpu for group in _fabric.numa_groups(parsed) for gpu in group)
    assert grouped in ([], sorted(parsed["gpus"]))
    _fabric.peer_to_peer(parsed)
    _fabric.parse_driver_params(text)
    _fabric.parse_fabric_state(text)
    assert _fabric.parse_ibv_devinfo(text + "\nhca_id:\t" + text)["state"] in (
        "present",
        "none",
        "unknown",
        "no_kernel_support",
    )


@given(st.integers(1, 7), st.data())
def test_every_matrix_of_cells_has_one_class(count: int, data: st.DataObject) -> None:
    cells = st.sampled_from(["NV18", "NV9", "SYS", "PIX", "NODE"])
    links = {pair: data.draw(cells) for pair in itertools.combinations(range(count), 2)}
    found = _fabric.classify(list(range(count)), matrix(count, links))
    assert (found["class"] == "single") == (count == 1)
    assert bool(found["bad_gpus"]) == (found["class"] == "degraded_nvlink")
    if any(cell.startswith("NV") for cell in links.values()):
        assert found["class"] in ("nvlink_full", "nvlink_pairs", "degraded_nvlink")
    for group in found["nvlink_groups"]:
        assert all(links[pair].startswith("NV") for pair in itertools.combinations(group, 2))


@pytest.mark.parametrize(
    ("loaded", "devices", "node", "state"),
    [
        (False, "", False, "absent"),
        (False, "490 gdrdrv", True, "absent"),
        (True, "", False, "loaded_but_no_device_major"),
        (True, "Character devices:\n 490 gdrdrv_other\n", True, "loaded_but_no_device_major"),
        (True, "Character devices:\n490 gdrdrv\n", False, "device_node_missing"),
        (True, "Character devices:\n490 gdrdrv\n", True, "ok"),
    ],
)
def test_a_loaded_gdrdrv_is_of_use_only_with_its_major_and_its_node(tmp_path, loaded, devices, node, state):
    for folder in ("proc", "dev", "sys/module"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/modules").write_text("gdrdrv 28672 0 - Live 0x0\n" if loaded else "")
    (tmp_path / "proc/devices").write_text(devices)
    if node:
        (tmp_path / "dev/gdrdrv").touch()
    assert _fabric.read_gdrdrv(Context(run=Tools({}), root=str(tmp_path))) == state
