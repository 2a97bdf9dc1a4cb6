# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: would DeepEP help here? A dispatch and a combine over the local GPUs, checked and
measured.

The script runs in the target venv: one process a GPU, with DeepEP's normal mode and, for the same tokens and the same
routing, the all-to-all of torch.distributed. GB/s count the bytes that a rank receives in a dispatch (bf16, itself
included), so that both are figures for the same work.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _detached

MARK = "GPUFLEET_SMOKE "
# A desktop or a monitoring agent holds some memory; a served model holds far more.
BUSY_MIB = 2048

SCRIPT = r"""
import json, os, sys, traceback

JOB = json.loads(sys.argv[1])

def measure(torch, dist, work, rounds=20, warm=5):
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / rounds

def worker(rank, world, port, queue):
    out = {"rank": rank}
    try:
        import torch
        import torch.distributed as dist
        torch.cuda.set_device(rank)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
        torch.manual_seed(7 + rank)
        tokens, hidden, topk, experts = JOB["tokens"], JOB["hidden"], JOB["topk"], JOB["experts"]
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        scores = torch.rand(tokens, experts, device="cuda")
        weights, chosen = torch.topk(scores, topk, dim=-1)
        weights = weights.float()
        target = chosen // (experts // world)
        in_rank = torch.stack([(target == r).any(dim=1) for r in range(world)], dim=1)
        # A combine without any expert adds up one copy for each rank that a token went to.
        expected = x.float() * in_rank.sum(dim=1, keepdim=True)

        # The baseline: the same tokens to the same ranks, with torch.distributed alone.
        order = [torch.nonzero(in_rank[:, r]).flatten() for r in range(world)]
        send_counts = torch.tensor([len(o) for o in order], device="cuda")
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts)
        send_list, recv_list = send_counts.tolist(), recv_counts.tolist()
        index = torch.cat(order)
        received = torch.empty(sum(recv_list), hidden, dtype=x.dtype, device="cuda")
        returned = torch.empty(sum(send_list), hidden, dtype=x.dtype, device="cuda")
        def base_dispatch():
            dist.all_to_all_single(received, x.index_select(0, index), recv_list, send_list)
        def base_combine():
            dist.all_to_all_single(returned, received, send_list, recv_list)
            total = torch.zeros(tokens, hidden, dtype=torch.float32, device="cuda")
            total.index_add_(0, index, returned.float())
            return total
        base_dispatch()
        out["baseline_correct"] = bool(torch.allclose(base_combine(), expected, rtol=2e-2, atol=2e-2))
        moved = sum(recv_list) * hidden * x.element_size()
        out["bytes"] = moved
        out["baseline_dispatch_gbps"] = moved / measure(torch, dist, base_dispatch) / 1e9
        out["baseline_combine_gbps"] = moved / measure(torch, dist, base_combine) / 1e9

        import deep_ep
        out["origin"] = deep_ep.__file__
        group = dist.group.WORLD
        buffer = deep_ep.Buffer(group, num_nvl_bytes=JOB["nvl_bytes"], num_rdma_bytes=0)
        per_rank, _rdma, per_expert, is_in, _event = buffer.get_dispatch_layout(chosen, experts)
        out["layout_correct"] = bool(torch.equal(is_in, in_rank))
        arguments = dict(num_tokens_per_rank=per_rank, is_token_in_rank=is_in, num_tokens_per_expert=per_expert)
        got, _idx, _w, counts, handle, _event = buffer.dispatch(x, topk_idx=chosen, topk_weights=weights, **arguments)
        back, _w, _event = buffer.combine(got, handle)
        torch.cuda.synchronize()
        same_rows = got.shape[0] == received.shape[0]
        # Both hold the same rows, in an order of their own.
        sums = [rows.float().sum(1).sort().values for rows in (got, received)]
        out["dispatch_correct"] = bool(same_rows and torch.equal(*sums))
        error = (back.float() - expected).abs().max().item()
        out["combine_error"] = error
        out["combine_correct"] = bool(torch.allclose(back.float(), expected, rtol=2e-2, atol=5e-2))
        out["dispatch_gbps"] = moved / measure(torch, dist, lambda: buffer.dispatch(x, handle=handle)) / 1e9
        out["combine_gbps"] = moved / measure(torch, dist, lambda: buffer.combine(got, handle)) / 1e9
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        out["error"] = "%s: %s" % (type(error).__name__, error)
        out["traceback"] = traceback.format_exc()[-1500:]
    queue.put(out)
    queue.close()
    queue.join_thread()
    if "error" in out:
        # The others wait for us in a collective: end hard, so that they are ended too.
        os._exit(1)
    os._exit(0)

def main():
    import socket
    from queue import Empty
    if JOB.get("site"):
        import zipfile
        os.makedirs(JOB["site"], exist_ok=True)
        with zipfile.ZipFile(JOB["wheel"]) as archive:
            archive.extractall(JOB["site"])
        for root in JOB["site_packages"]:
            if os.path.isdir(os.path.join(root, "nvidia")) and not os.path.lexists(os.path.join(JOB["site"], "nvidia")):
                os.symlink(os.path.join(root, "nvidia"), os.path.join(JOB["site"], "nvidia"))
        os.environ["PYTHONPATH"] = JOB["site"]
        sys.path.insert(0, JOB["site"])
    import torch
    import torch.multiprocessing as mp
    found = torch.cuda.device_count()
    world = min(JOB["gpus"] or found, found)
    if world < 2:
        print(JOB["mark"] + json.dumps({"ranks": [], "world": world, "torch": torch.__version__}), flush=True)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, world, port, queue)) for rank in range(world)]
    for process in processes:
        process.start()
    answers = []
    while len(answers) < world:
        try:
            answers.append(queue.get(timeout=1))
        except Empty:
            if all(process.exitcode is not None for process in processes) and queue.empty():
                break
            continue
        if "error" in answers[-1]:
            break
    for process in processes:
        process.join(10 if "error" not in (answers or [{}])[-1] else 1)
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in processes]
    said = {"ranks": answers, "world": world, "torch": torch.__version__, "exit": codes}
    print(JOB["mark"] + json.dumps(said), flush=True)

if __name__ == "__main__":
    main()
"""


def busy_gpus(devices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``[{index, used_mib}]`` of GPUs (contracts.md) whose memory somebody holds: a served model, most
    likely."""
    return [
        {"index": device.get("index"), "used_mib": device["memory_used_mib"]}
        for device in devices
        if (device.get("memory_used_mib") or 0) > BUSY_MIB
    ]


def refusal(
    gpus: Sequence[Mapping[str, Any]], busy: Sequence[Mapping[str, Any]], wanted: Optional[int]
) -> Optional[dict[str, Any]]:
    """Say why the smoke test does not run, or None."""
    if len(gpus) < 2 or (wanted or 2) < 2:
        return {
            "state": "refused",
            "code": "needs_two_gpus",
            "message": f"{len(gpus)} GPUs here (smoke_gpus {wanted or 'all'}); a dispatch needs two",
        }
    if busy:
        held = ", ".join(f"GPU {item['index']}: {item['used_mib']} MiB" for item in busy)
        return {
            "state": "refused",
            "code": "gpus_in_use",
            "message": f"a service holds the GPUs ({held}); stop it first",
        }
    return None


def start(builder: Any, folder: str, want: Mapping[str, Any]) -> dict[str, Any]:
    """Start the smoke test as a detached job in ``folder``; ``builder`` has looked at the host."""
    os.makedirs(folder, mode=0o755, exist_ok=True)
    if _detached.is_locked(folder):
        return {"attached": True}
    scratch = os.path.join(folder, "work")
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(os.path.join(scratch, "empty"), mode=0o755)
    if builder.user and builder.identity:
        for path in (scratch, os.path.join(scratch, "empty")):
            os.chown(path, builder.identity.uid, builder.identity.gid)
    wheel = want.get("smoke_wheel")
    job = {
        "mark": MARK,
        "wheel": wheel,
        "site": os.path.join(scratch, "site") if wheel else None,
        "site_packages": builder.facts["site_packages"],
        "gpus": want.get("smoke_gpus"),
        "tokens": int(want.get("smoke_tokens") or 4096),
        "hidden": 7168,
        "topk": 8,
        "experts": 64 * max(1, len(builder.facts.get("gpus") or [])),
        "nvl_bytes": 1 << 30,
    }
    # A script in a file, not -c: the processes that it spawns import it again.
    script = os.path.join(scratch, "smoke.py")
    with open(script, "w", encoding="utf-8") as stream:
        stream.write(SCRIPT)
    os.chmod(script, 0o644)
    extra = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": scratch,
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    env = builder.environment({**extra, **builder._service_environment()})
    log = os.path.join(folder, "log")
    if os.path.exists(log):
        os.unlink(log)
    return _detached.start(
        folder,
        {
            "id": "smoke",
            "time_limit": float(want.get("proof_timeout") or 300),
            "heartbeat": 2,
            "steps": [
                {
                    "name": "smoke",
                    "argv": [builder.venv["python"], "-s", script, json.dumps(job)],
                    "env": env,
                    "cwd": os.path.join(scratch, "empty"),
                    "user": builder.user,
                }
            ],
        },
    )


def result(folder: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smoke test's outcome from its finished job."""
    said: Optional[dict[str, Any]] = None
    lines = _detached.log_lines(folder)
    for line in lines:
        if line.startswith(MARK):
            said = json.loads(line[len(MARK) :])
    log = os.path.join(folder, "log")
    if said is None:
        tail = " | ".join(line for line in lines if line.strip() and not line.startswith("==="))[-600:]
        message = status.get("message") or f"rc {status.get('rc')}: {tail}"
        return {"state": "failed", "code": f"smoke_{status['state']}", "message": message, "log": log}
    return dict(judge(said), log=log)


def judge(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{state: ok|incorrect|failed|refused, code, message, ranks, correct, dispatch_gbps, combine_gbps,
    baseline_dispatch_gbps, baseline_combine_gbps, verdict}`` from the ranks' answers; GB/s are means over the ranks."""
    ranks = list(said.get("ranks") or [])
    world = int(said.get("world") or 0)
    base: dict[str, Any] = {"ranks": world, "torch": said.get("torch"), "correct": False}
    if world < 2:
        return dict(
            base, state="refused", code="needs_two_gpus", message=f"torch sees {world} GPUs; a dispatch needs two"
        )
    errors = [f"rank {item.get('rank')}: {item['error']}" for item in ranks if item.get("error")]
    figures = ("dispatch_gbps", "combine_gbps", "baseline_dispatch_gbps", "baseline_combine_gbps")
    for name in figures:
        values = [float(item[name]) for item in ranks if name in item]
        base[name] = round(sum(values) / len(values), 1) if len(values) == world else None
    if errors or len(ranks) < world:
        text = "; ".join(errors) or f"only {len(ranks)} of {world} processes answered (exit {said.get('exit')})"
        trace = next((item["traceback"] for item in ranks if item.get("traceback")), None)
        return dict(base, state="failed", code="smoke_error", message=text, traceback=trace)
    checks = ("baseline_correct", "layout_correct", "dispatch_correct", "combine_correct")
    wrong = sorted({name for item in ranks for name in checks if not item.get(name)})
    if wrong:
        return dict(base, state="incorrect", code="smoke_incorrect", message=f"wrong results: {', '.join(wrong)}")
    # Of the whole round trip, since a model always pays for both ways.
    ours = 1 / base["dispatch_gbps"] + 1 / base["combine_gbps"]
    theirs = 1 / base["baseline_dispatch_gbps"] + 1 / base["baseline_combine_gbps"]
    gain = round(theirs / ours, 2)
    verdict = (
        f"dispatch and combine: DeepEP {base['dispatch_gbps']} and {base['combine_gbps']} GB/s, torch.distributed "
        f"{base['baseline_dispatch_gbps']} and {base['baseline_combine_gbps']} GB/s; "
        f"round trip {gain} times as fast"
    )
    return dict(
        base, state="ok", code=None, message=verdict, correct=True, gain=gain, origin=ranks[0].get("origin"),
        combine_error=max(float(item.get("combine_error") or 0) for item in ranks),
    )  # fmt: skip
