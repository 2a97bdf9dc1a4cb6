# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs from recorded and from hostile outputs of nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _fabric, _gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parents[1] / "fixtures"
SMI = FIXTURES / "smi"
# The order in which the samples without a header were asked for.
ASKED = ("index", "name", "compute_cap", "memory.total", "memory.used", "driver_version")
ASKED += ("pci.bus_id", "mig.mode.current")


def sample(name: str) -> str:
    return (SMI / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "count", "model", "sm", "memory", "driver"),
    [
        ("smi_b200_8.csv", 8, "NVIDIA B200", "sm_100", 183359, "580.95.05"),
        ("smi_b300_8.csv", 8, "NVIDIA B300 SXM6 AC", "sm_103", 275040, "580.95.05"),
        ("smi_column_order_other.csv", 8, "NVIDIA B300 SXM6 AC", "sm_103", None, "610.57.04"),
        ("smi_gb10_1_na_memory.csv", 1, "NVIDIA GB10", "sm_121", None, "580.126.09"),
        ("smi_gb200_4.csv", 4, "NVIDIA GB200", "sm_100", 189471, "580.126.20"),
        ("smi_h100_8.csv", 8, "NVIDIA H100 80GB HBM3", "sm_90", 81559, "580.95.05"),
        ("smi_h100_mig_enabled.csv", 1, "NVIDIA H100 80GB HBM3", "sm_90", 81559, "580.95.05"),
        ("smi_h100_nvl_2.csv", 2, "NVIDIA H100 NVL", "sm_90", 95830, "580.95.05"),
        ("smi_h200_8.csv", 8, "NVIDIA H200", "sm_90", 143771, "580.95.05"),
        ("smi_h200_8_nounits_noheader.csv", 8, "NVIDIA H200", "sm_90", 143771, "580.95.05"),
        ("smi_h20_8.csv", 8, "NVIDIA H20", "sm_90", 97871, "570.133.20"),
        ("smi_l20_8.csv", 8, "NVIDIA L20", "sm_89", 46068, "550.144.03"),
        ("smi_l40s_4.csv", 4, "NVIDIA L40S", "sm_89", 46068, "570.172.08"),
        ("smi_mixed_h100nvl_rtxpro6000.csv", 4, "NVIDIA H100 NVL", "sm_90", 95830, "580.95.05"),
        ("smi_one_gpu_lost.csv", 8, "NVIDIA H200", "sm_90", 143771, "580.95.05"),
        ("smi_rtx6000d_8.csv", 8, "NVIDIA RTX 6000D", "sm_120", 85651, "580.105.08"),
        (
            "smi_rtxpro6000_maxq_4.csv", 4, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "sm_120", 97887,
            "580.95.05",
        ),
        (
            "smi_rtxpro6000_server_8.csv", 8, "NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120", 97887,
            "580.105.08",
        ),
        (
            "smi_rtxpro6000_workstation_2.csv", 2, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 97887,
            "595.71.05",
        ),
    ],
)  # fmt: skip
def test_samples(name: str, count: int, model: str, sm: str, memory: int | None, driver: str) -> None:
    devices = _gpus.parse_gpus(sample(name), ASKED)
    first = devices[0]
    assert [device["index"] for device in devices] == list(range(count))
    assert (first["name"], first["sm"], first["memory_mib"], first["driver"]) == (model, sm, memory, driver)
    assert first["compute_capability_source"] == "nvidia-smi"


def test_every_sample_is_in_the_tests() -> None:
    told = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in SMI.iterdir() if path.name not in told] == []


def test_a_mixed_host_keeps_each_model() -> None:
    devices = _gpus.parse_gpus(sample("smi_mixed_h100nvl_rtxpro6000.csv"))
    assert [device["sm"] for device in devices] == ["sm_90", "sm_90", "sm_120", "sm_120"]


def test_mig_and_lost_gpus() -> None:
    assert [device["mig"] for device in _gpus.parse_gpus(sample("smi_h100_mig_enabled.csv"))] == [True]
    lost = _gpus.parse_gpus(sample("smi_one_gpu_lost.csv"))
    assert [device["index"] for device in lost if device["lost"]] == [7]
    assert (lost[7]["name"], lost[7]["memory_mib"], lost[7]["sm"]) == (None, None, None)
    assert (lost[6]["pci"], lost[6]["memory_used_mib"]) == ("0000:7e:00.0", 4)


def test_a_gpu_without_handle_is_lost_and_told() -> None:
    text = sample("smi_h100_nvl_2.csv") + "Unable to determine the device handle for GPU0000:3A:00.0: Unknown Error\n"
    devices = _gpus.parse_gpus(text)
    assert [(device["index"], device["lost"]) for device in devices] == [(0, False), (1, False), (None, True)]
    assert devices[2]["pci"] == "0000:3a:00.0"


def test_warnings_before_the_header_ansi_and_carriage_returns() -> None:
    text = "WARNING: infoROM is corrupted at gpu 0000:18:00.0\r\n\x1b[4m" + sample("smi_h100_nvl_2.csv")
    devices = _gpus.parse_gpus(text.replace("\n", "\r\n"))
    assert [device["sm"] for device in devices] == ["sm_90", "sm_90"]


@pytest.mark.parametrize(
    ("cell", "mib"),
    [("143771 MiB", 143771), ("143771", 143771), ("80 GiB", 81920), ("[N/A]", None), ("lots", None), ("", None)],
)
def test_memory_with_and_without_units(cell: str, mib: int | None) -> None:
    text = f"index, name, memory.total [MiB]\n0, NVIDIA X, {cell}\n"
    assert _gpus.parse_gpus(text)[0]["memory_mib"] == mib


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("name, compute_cap", "NVIDIA RTX PRO 6000 Blackwell, 12.0", ("12.0", "nvidia-smi")),
        ("name, driver_version", "NVIDIA A100-SXM4-80GB, 470.1", ("8.0", "table")),
        ("name, driver_version", "NVIDIA RTX PRO 6000 Blackwell, 470.1", (None, None)),
        ("name, compute_cap", "NVIDIA A100-SXM4-80GB, [N/A]", (None, None)),
    ],
)
def test_compute_capability_is_not_guessed_from_names(header: str, row: str, expected: tuple) -> None:
    device = _gpus.parse_gpus(f"{header}\n{row}\n")[0]
    assert (device["compute_capability"], device["compute_capability_source"]) == expected


def test_processes() -> None:
    orphans = _gpus.parse_processes(sample("smi_compute_apps_orphans.csv"))
    assert [app["pid"] for app in orphans] == [2505781, 2505782, 2505783, 2505784]
    assert orphans[0]["name"] == "sglang::scheduler_DP0_TP0_EP0"
    assert orphans[0]["memory_mib"] == 100998
    nameless = _gpus.parse_processes(sample("smi_compute_apps_container_noname.csv"))
    assert nameless == [
        {"gpu_uuid": "GPU-00000000-0000-0000-0000-000000000000", "pid": 4711, "name": None, "memory_mib": None}
    ]
    assert _gpus.parse_processes("GPU-0, 12, python a, b, 5 MiB")[0]["name"] == "python a, b"


def test_list_with_mig_devices() -> None:
    text = (FIXTURES / "h200x2" / "L.txt").read_text(encoding="utf-8")
    assert [entry["index"] for entry in _gpus.parse_list(text)] == [0, 1]
    text += "  MIG 1g.18gb     Device  0: (UUID: MIG-aaaa-1)\n  MIG 2g.35gb     Device  1: (UUID: MIG-aaaa-2)\n"
    assert _gpus.parse_list(text)[1]["mig_devices"] == [
        {"profile": "1g.18gb", "uuid": "MIG-aaaa-1"},
        {"profile": "2g.35gb", "uuid": "MIG-aaaa-2"},
    ]


class Smi:
    """An nvidia-smi: answers by the first matching start of the joined arguments."""

    def __init__(self, answers: dict[str, RunResult], path: str = "nvidia-smi") -> None:
        self.answers, self.path = answers, path
        self.calls: list[list[str]] = []

    def __call__(self, argv, timeout):
        self.calls.append(list(argv))
        if argv[0] == self.path:
            line = " ".join(argv[1:])
            for start, answer in self.answers.items():
                if line.startswith(start):
                    return answer
        return RunResult(127, "", "No such file or directory")


def h200x2(name: str) -> RunResult:
    return RunResult(0, (FIXTURES / "h200x2" / name).read_text(encoding="utf-8"), "")


def two_h200() -> dict[str, RunResult]:
    apps = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
    apps += "GPU-00000001-0000-0000-0000-000000000000, 4711, [Not Found], 1000 MiB\n"
    return {
        "--query-gpu": h200x2("query-gpu.csv"),
        "--query-compute-apps": RunResult(0, apps, ""),
        "-L": h200x2("L.txt"),
        "": h200x2("nvidia-smi.txt"),
    }


def test_gather_of_the_recorded_host(tmp_path: Path) -> None:
    for pci, node in (("0000:00:06.0", "0"), ("0000:00:07.0", "-1")):
        folder = tmp_path / "sys/bus/pci/devices" / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
    process = tmp_path / "proc/4711"
    process.mkdir(parents=True)
    (process / "comm").write_text("sglang::schedul\n")
    smi = Smi(two_h200())
    gpus = _gpus.gather(Context(run=smi, root=str(tmp_path)))
    assert (gpus["state"], gpus["code"], gpus["driver"], gpus["cuda_driver"]) == ("ok", None, "580.159.04", "13.0")
    assert [device["numa"] for device in gpus["devices"]] == [0, None]
    assert gpus["devices"][0]["processes"] == []
    owner = _gpus.owner_of(str(process))
    assert gpus["devices"][1]["processes"] == [
        {"pid": 4711, "name": "sglang::schedul", "memory_mib": 1000, "user": owner}
    ]
    assert smi.calls[0] == ["nvidia-smi", "--query-gpu=" + ",".join(_gpus.FIELDS), "--format=csv"]
    wanted = {"index", "uuid", "name", "memory_mib", "memory_used_mib", "compute_capability", "sm", "mig", "lost"}
    assert wanted | {"pci", "numa", "processes"} <= set(gpus["devices"][0])


@pytest.mark.parametrize(
    ("name", "rc", "state", "code"),
    [
        ("smi_err_no_devices.txt", 6, "absent", "no_devices"),
        ("smi_err_no_devices.txt", 0, "absent", "no_devices"),
        ("smi_err_no_driver.txt", 9, "error", "driver_not_loaded"),
        ("smi_err_version_mismatch.txt", 18, "error", "driver_library_mismatch"),
    ],
)
def test_error_outputs(name: str, rc: int, state: str, code: str, tmp_path: Path) -> None:
    gpus = _gpus.gather(Context(run=Smi({"": RunResult(rc, sample(name), "")}), root=str(tmp_path)))
    assert (gpus["state"], gpus["code"], gpus["devices"]) == (state, code, [])
    assert sample(name).split("\n")[0] in gpus["message"]


def test_a_hanging_nvidia_smi_is_a_fact_and_is_asked_once(tmp_path: Path) -> None:
    smi = Smi({"": RunResult(-9, "0, NVIDIA", "", True)})
    gpus = _gpus.gather(Context(run=smi, root=str(tmp_path), command_timeout=7))
    assert (gpus["state"], gpus["code"], gpus["devices"]) == ("timeout", "nvidia_smi_timeout", [])
    assert "7 s" in gpus["message"]
    assert len(smi.calls) == 1


def test_all_gpus_lost_is_an_error(tmp_path: Path) -> None:
    lost = "index, name\n0, [GPU is lost]\n1, [GPU is lost]\n"
    gpus = _gpus.gather(Context(run=Smi({"": RunResult(0, lost, "")}), root=str(tmp_path)))
    assert (gpus["state"], gpus["code"]) == ("error", "gpu_lost")
    assert [device["lost"] for device in gpus["devices"]] == [True, True]


def test_nvidia_smi_elsewhere_and_nowhere(tmp_path: Path) -> None:
    smi = Smi(two_h200(), "/usr/local/nvidia/bin/nvidia-smi")
    found = _gpus.gather(Context(run=smi, root=str(tmp_path)))
    assert (found["state"], found["nvidia_smi"]) == ("ok", "/usr/local/nvidia/bin/nvidia-smi")
    absent = _gpus.gather(Context(run=Smi({}, "nowhere"), root=str(tmp_path)))
    assert (absent["state"], absent["code"], absent["driver"]) == ("absent", "nvidia_smi_absent", None)
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text((FIXTURES / "h200x2" / "driver-version.txt").read_text())
    loaded = _gpus.gather(Context(run=Smi({}, "nowhere"), root=str(tmp_path)))
    assert (loaded["state"], loaded["code"], loaded["driver"]) == ("error", "nvidia_smi_absent", "580.159.04")


def test_a_field_that_an_old_nvidia_smi_does_not_know_is_left_out(tmp_path: Path) -> None:
    header = ", ".join(field for field in _gpus.FIELDS if field != "compute_cap")
    row = "0, GPU-1, Tesla V100-SXM2-32GB, 32510 MiB, 0 MiB, 450.51, 00000000:18:00.0, [N/A]"

    def smi(argv, timeout):
        if "compute_cap" in " ".join(argv):
            return RunResult(2, sample("smi_err_field.txt"), "")
        return RunResult(0, f"{header}\n{row}\n" if "--query-gpu" in argv[1] else "", "")

    gpus = _gpus.gather(Context(run=lambda argv, timeout: smi([*argv, ""], timeout), root=str(tmp_path)))
    assert gpus["state"] == "ok"
    assert (gpus["devices"][0]["sm"], gpus["devices"][0]["compute_capability_source"]) == ("sm_70", "table")


def test_mig_devices_are_listed(tmp_path: Path) -> None:
    answers = two_h200()
    rows = "index, uuid, name, mig.mode.current\n0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA H200, Enabled\n"
    answers["--query-gpu"] = RunResult(0, rows, "")
    listed = answers["-L"].stdout.split("\n")
    listed.insert(1, "  MIG 1g.18gb     Device  0: (UUID: MIG-aaaa-1)")
    answers["-L"] = RunResult(0, "\n".join(listed), "")
    gpus = _gpus.gather(Context(run=Smi(answers), root=str(tmp_path)))
    assert gpus["devices"][0]["mig_devices"] == [{"profile": "1g.18gb", "uuid": "MIG-aaaa-1"}]


DEVICES = [{"index": i, "uuid": f"GPU-{i}{i}{i}{i}-x", "name": "N", "lost": False} for i in range(4)]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("0,9,1", [0]),
        ("0,0", []),
        ("GPU-11,GPU-2222-x", [1, 2]),
        ("GPU-", []),
        ("NoDevFiles", []),
        ("٣", []),
    ],
)
def test_visible_devices_by_cuda_rules(text: str | None, indices: list[int] | None) -> None:
    assert _gpus.visible_indices(text, DEVICES) == indices


def test_selecting_leaves_the_bad_gpu_out() -> None:
    parsed = _fabric.parse_matrix((FIXTURES / "topo" / "topo_b200_gpu2_nvlink_lost.txt").read_text(encoding="utf-8"))
    fabric = {
        **parsed,
        **_fabric.classify(parsed["gpus"], parsed["matrix"]),
        "numa_groups": _fabric.numa_groups(parsed),
    }
    gpus = {"state": "ok", "code": None, "devices": _gpus.parse_gpus(sample("smi_b200_8.csv"))}
    chosen, without = _gpus.select(gpus, fabric, [0, 1, 3, 4, 5, 6, 7])
    assert without is not None
    assert [device["index"] for device in chosen["devices"]] == [0, 1, 3, 4, 5, 6, 7]
    assert (without["class"], without["bad_gpus"]) == ("nvlink_full", [])
    assert without["numa_groups"] == [[0, 1, 3], [4, 5, 6, 7]]
    assert fabric["class"] == "degraded_nvlink"
    pair = _gpus.select(gpus, fabric, [2, 3])[1]
    assert pair is not None
    assert pair["class"] == "pcie_only"
    alone = _gpus.select(gpus, fabric, [2])[1]
    assert alone is not None
    assert alone["class"] == "single"
    everything = _gpus.select(gpus, fabric, None)[1]
    assert everything == fabric


def test_selecting_around_a_lost_gpu_clears_the_code() -> None:
    devices = _gpus.parse_gpus(sample("smi_one_gpu_lost.csv"))
    gpus = {"state": "ok", "code": "gpu_lost", "message": "lost GPUs: 7", "devices": devices}
    assert _gpus.select(gpus, None, range(7))[0]["code"] is None
    assert _gpus.select(gpus, None, range(8))[0]["code"] == "gpu_lost"


_HOSTILE = st.text(max_size=300) | st.lists(
    st.sampled_from([", ", "\n", "index", "name", "GPU", "0", "[N/A]", "\x1b[4m", "\x00", "MiB", "9.0", "GPU-1", "-"]),
    max_size=60,
).map("".join)


@given(_HOSTILE)
def test_hostile_text_never_raises(text: str) -> None:
    assert isinstance(_gpus.parse_gpus(text), list)
    assert isinstance(_gpus.parse_processes(text), list)
    assert isinstance(_gpus.parse_list(text), list)
    _gpus.parse_cuda_driver(text)
    _gpus.visible_indices(text, DEVICES)
    assert _gpus.failure(RunResult(1, text, text), 1.0)["state"] in ("absent", "error")
