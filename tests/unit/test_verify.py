# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _verify
from ansible_collections.gpufleet.sglang.plugins.module_utils._verify import (
    flag_drift,
    flags_of,
    loaded_backends,
    verdict,
)

PYTHON = ["/opt/sglang/venv/bin/python", "-m", "sglang.launch_server"]
ARGV = [*PYTHON, "--model-path", "/m/x", "--tp-size", "8", "--moe-a2a-backend", "deepep", "--enable-eplb"]
INFO = {"model_path": "/m/x", "tp_size": 8, "moe_a2a_backend": "deepep", "enable_eplb": True}
DEEP_EP = "/opt/sglang/venv/lib/python3.12/site-packages/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"
OBSERVED = {"process": {"argv": ARGV}}


def test_what_runs_as_planned():
    found = verdict({"argv": ARGV}, OBSERVED, INFO, [DEEP_EP], log_backends=["deep_ep"])
    assert found["ok"] and found["ready"] and found["revision_ok"] and found["drift"] == []
    used = found["backend_in_use"]
    assert used["name"] == "deep_ep" and used["certain"]
    assert any(DEEP_EP in text for text in used["evidence"]) and any("log" in text for text in used["evidence"])


def test_the_setting_alone_is_no_evidence():
    """ "DeepEP MoE is enabled" is said, and /server_info shows the setting, when deep_ep is missing."""
    found = verdict({"argv": ARGV}, OBSERVED, INFO, ["/usr/lib/libc.so.6"])
    assert found["backend_in_use"]["name"] is None
    assert [one["what"] for one in found["drift"]] == ["backend"] and not found["ok"]


def test_maps_that_could_not_be_read_accuse_nobody():
    found = verdict({"argv": ARGV}, OBSERVED, INFO, [], maps_complete=False)
    assert found["backend_in_use"]["name"] is None and found["backend_in_use"]["missing"] == []
    assert found["ok"] and not found["backend_in_use"]["certain"]


def test_another_revision():
    found = verdict({"argv": ARGV}, {"process": {"argv": [*ARGV, "--x"]}}, INFO, [DEEP_EP])
    assert found["revision_ok"] is False and not found["ok"]
    assert found["drift"][0]["what"] == "argv" and "--x" in found["drift"][0]["message"]


def test_secrets_in_an_argv_do_not_differ_by_being_hidden():
    argv = [*ARGV, "--api-key", "tops3cret"]
    found = verdict({"argv": argv}, {"process": {"argv": [*ARGV, "--api-key", "********"]}}, INFO, [DEEP_EP])
    assert found["revision_ok"] is True and "tops3cret" not in str(found)


def test_without_a_process_nothing_is_claimed():
    found = verdict({"argv": ARGV}, {"process": {}}, None, [], maps_complete=True, state="stopped")
    assert found["revision_ok"] is None and not found["ready"] and not found["ok"]


@pytest.mark.parametrize(
    ("argv", "info", "drifted"),
    [
        (["--tp-size", "8"], {"tp_size": 4}, ["--tp-size"]),
        (["--tp-size=8"], {"tp_size": 8}, []),
        (["--tensor-parallel-size", "8"], {"tp_size": 4}, ["--tp-size"]),
        (["--model-path", "/m/x/"], {"model_path": "/m/x"}, []),
        (["--mem-fraction-static", "0.80"], {"mem_fraction_static": 0.8}, []),
        (["--enable-eplb"], {"enable_eplb": False}, ["--enable-eplb"]),
        (["--served", "a", "b"], {"served": ["a", "b"]}, []),
        (["--cuda-graph-bs", "1", "2"], {"cuda_graph_bs": [1, 2]}, []),
        (["--api-key", "a"], {"api_key": "b"}, []),
        (["--unreported", "1"], {}, []),
        (["--speculative-num-steps", "3"], {"speculative_num_steps": None}, ["--speculative-num-steps"]),
    ],
)
def test_drift_of_flags(argv, info, drifted):
    assert [one["flag"] for one in flag_drift([*PYTHON, *argv], info)] == drifted


def test_flags_of_a_command_line():
    assert flags_of([*PYTHON, "--a-b", "1", "--flag", "--list", "x", "y", "--neg", "-1", "--eq=z"]) == {
        "a_b": "1", "flag": True, "list": ["x", "y"], "neg": "-1", "eq": "z"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v/site-packages/deep_ep/_C.cpython-312-x86_64-linux-gnu.so", "deep_ep"),
        (DEEP_EP, "deep_ep"),
        ("/v/site-packages/mooncake/engine.so", "mooncake"),
        ("/v/site-packages/nixl_cu13/_bindings.cpython-312.so", "nixl"),
        ("/v/site-packages/nixl_ep_cu13/nixl_ep_cpp.so", "nixl"),
        ("/v/site-packages/pplx_kernels/x.so", "pplx"),
        ("/usr/lib/libnccl.so.2", None),
        ("/models/deep_ep_notes.txt", None),
    ],
)
def test_libraries(path, name):
    assert list(loaded_backends([path])) == ([name] if name else [])


def test_a_prefill_server_uses_its_transfer_backend():
    argv = [*PYTHON, "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake"]
    found = verdict({"argv": argv}, {"process": {"argv": argv}}, {}, ["/v/mooncake/engine.so"])
    assert found["backend_in_use"]["name"] == "mooncake"
    # Its default stands in every server's arguments; without a role nobody uses it.
    found = verdict(
        {"argv": PYTHON}, {"process": {"argv": PYTHON}}, {"disaggregation_transfer_backend": "mooncake"}, []
    )
    assert found["backend_in_use"]["expected"] == {} and found["drift"] == []


SERVED = {
    "item": {"key": "a"},
    "state": "ready",
    "observation": {"process": {"argv": ["py", "-m", "sglang.launch_server", "--port", "1"]}},
    "maps_complete": True,
}
PLANNED = {"a": {"argv": ["py", "-m", "sglang.launch_server", "--port", "1"], "effective": {}}}


def test_an_instance_that_serves_its_plan_is_ok():
    unit = {"instance": "a", "argv": PLANNED["a"]["argv"], "needs": {"write": False, "restart": False, "start": False}}
    found = _verify.verdicts(PLANNED, [SERVED], [unit])
    assert found["a"]["ok"] and _verify.verdict_text(found) == ""


def test_a_unit_that_site_would_change_is_drift_though_it_serves():
    unit = {
        "instance": "a",
        "argv": PLANNED["a"]["argv"],
        "needs": {"write": False, "restart": True, "start": False},
        "differences": [{"what": "library", "name": "torch"}],
    }
    found = _verify.verdicts(PLANNED, [SERVED], [unit])
    assert found["a"]["ready"] and not found["a"]["ok"]
    assert _verify.verdict_text(found) == "a is not as it should be: site.yml would change it (library torch)"


def test_an_instance_that_nobody_saw_is_not_ok():
    found = _verify.verdicts(PLANNED, [], [])
    assert not found["a"]["ok"] and "unknown" in _verify.verdict_text(found)


def test_the_cause_of_a_dead_instance_is_told():
    dead = {**SERVED, "state": "failed", "cause": {"code": "port_taken", "message": "the port is taken"}}
    text = _verify.verdict_text(_verify.verdicts(PLANNED, [dead], []))
    assert "a is not as it should be: failed (port_taken: the port is taken)" in text
