# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes what a run keeps of its hosts, for the tests of reports, in the shapes of contracts.md."""

from __future__ import annotations

from typing import Any

VENV = "/opt/sglang/venv"


def backend(
    state="ok", code=None, version="1.5.1", name="nixl-cu13", uses=("kv_transfer",), message=None, level="import"
):
    return {
        "state": state,
        "code": code,
        "message": message,
        "level": level,
        "layer": None,
        "distributions": [{"name": name, "version": version, "variant": "cu13"}] if version else [],
        "uses": {use: {"state": state, "code": code, "message": message, "level": level} for use in uses},
    }


def probe(
    gpus=8, gpu="NVIDIA H200", torch="2.14.1+cu130", sglang="0.5.23", driver="580.95.05", fabric="nvlink_full", **more
):
    return {
        "schema": 1,
        "venv": {
            "path": VENV,
            "state": "ok",
            "code": None,
            "message": None,
            "owner": "root",
            "python_version": "3.12.3",
        },
        "torch": {"version": torch, "cuda": "13.0", "cuda_major": 13},
        "sglang": {"version": sglang},
        "backends": {
            "deep_ep": backend(name="sgl-deep-ep", version="0.1.2.post1", uses=("a2a",)),
            "mooncake": backend(name="mooncake-transfer-engine-cuda13", version="0.3.13.post1"),
            "nixl": backend(),
        },
        "gpus": {
            "state": "ok",
            "driver": driver,
            "cuda_driver": "13.0",
            "devices": [{"index": n, "name": gpu, "memory_mib": 143771, "lost": False} for n in range(gpus)],
        },
        "fabric": {"class": fabric, "bad_gpus": [], "rdma": {"devices": [{"name": f"mlx5_{n}"} for n in range(8)]}},
        "host": {"os_family": "debian", "machine": "x86_64", "cpus": 192, "memory_bytes": 2 << 40},
        "instances": {
            "default": {"service": {"state": "active", "revision": "5f0c9a1be27d44e3"}, "model": {"state": "ok"}}
        },
        **more,
    }


def remedy(name="mooncake", use="kv_transfer", state="broken", code="missing_system_lib", **more):
    return {
        "backend": name,
        "use": use,
        "state": state,
        "code": code,
        "kind": "system_package",
        "summary": "install libnuma1 and libibverbs1",
        "steps": [{"action": "os_install", "packages": ["libnuma1"], "args": {"manager": "apt"}}],
        "required": True,
        **more,
    }


def plan(service=True, remedies=(), **more):
    return {
        "instance": "default",
        "service": service,
        "argv": [
            f"{VENV}/bin/python",
            "-m",
            "sglang.launch_server",
            "--model-path",
            "/models/Kimi-K2.6",
            "--tp-size",
            "8",
        ],
        "env": {"NCCL_DEBUG": "WARN"},
        "effective": {"tp_size": 8, "moe_a2a_backend": "deepep", "kv_transfer_backend": "mooncake"},
        "remedies": list(remedies),
        "assumes": [{"backend": r["backend"], "use": r["use"], "state": "ok", "after": r["kind"]} for r in remedies],
        "decisions": [
            {"question": "parallelism", "answer": "tp8", "because": "8 GPUs with full NVLink", "evidence": {"gpus": 8}},
            {
                "question": "moe_a2a_backend",
                "answer": "deepep",
                "because": "first of the wanted that is ok",
                "evidence": {},
            },
        ],
        "warnings": [],
        "rejections": [],
        "wanted": {"deep_ep": ["a2a"], "mooncake": ["kv_transfer"]},
        "unit": {"user": "sglang", "port": 30000, "venv": VENV, "model_path": "/models/Kimi-K2.6"},
        **more,
    }


def ready(state="ready", **cause):
    item = {"item": {"key": "default", "value": {}}, "ready": state == "ready", "state": state, "cause": cause or None}
    return {"results": [item]}


def facts(seen=None, planned=None, before=None, **more) -> dict[str, Any]:
    """The facts of one host after the roles ran."""
    now = {VENV: seen or probe()}
    return {
        "probe_before": {VENV: before} if before else now,
        "probe_results": now,
        "probe_plans": {"default": planned or plan()},
        **more,
    }


def broken(which, **more):
    seen = probe()
    seen["backends"][which] = backend(uses=tuple(seen["backends"][which]["uses"]), **more)
    return seen


MISSING = {
    "state": "broken",
    "code": "missing_system_lib",
    "message": "libibverbs.so.1, which libtransfer_engine.so needs",
}
ABI = {
    "state": "broken",
    "code": "torch_abi_mismatch",
    "name": "deep-ep",
    "version": "1.2.1+73b6ea4",
    "message": "undefined symbol: _ZN3c104cuda9SetDeviceEa",
}
FALLBACK = {
    "question": "moe_a2a_backend",
    "answer": "none",
    "because": "deep_ep is broken (torch_abi_mismatch) and sglang_on_missing_backend is fallback",
    "evidence": {},
}


def fleet(count: int) -> dict[str, dict[str, Any]]:
    """Facts of ``count`` hosts: mostly good, and every 7th, 11th, … with a fault of its own."""
    hosts = {}
    for number in range(1, count + 1):
        host = f"gpu-{number:04d}.dc1.example"
        if number % 97 == 0:
            hosts[host] = {}
        elif number % 31 == 0:
            line = "RuntimeError: CUDA error: out of memory"
            cause = {
                "code": "cuda_out_of_memory",
                "message": line,
                "mend": "lower mem_fraction_static",
                "lines": [line],
            }
            hosts[host] = facts(ready_results=ready("crash_loop", **cause))
        elif number % 23 == 0:
            rejection = {
                "code": "gpus_lost",
                "message": "tp_size 8 needs 8 GPUs, 7 are visible",
                "flag": "tp_size",
                "value": 8,
                "suggestion": "reset or replace GPU 3 (Xid 79)",
                "numbers": {"visible": 7},
            }
            hosts[host] = facts(probe(gpus=7), plan(rejections=[rejection]))
        elif number % 13 == 0:
            hosts[host] = facts(
                broken("deep_ep", **ABI), plan(decisions=[FALLBACK], effective={"moe_a2a_backend": "none"})
            )
        elif number % 7 == 0:
            hosts[host] = facts(broken("mooncake", **MISSING), plan(remedies=[remedy()]))
        elif number % 59 == 0:
            hosts[host] = facts(probe(driver="570.86.15", torch="2.13.0+cu129"), ready_results=ready())
        else:
            hosts[host] = facts(ready_results=ready())
    return hosts
