# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what one call of ``deepep_wheel`` does; each call starts from what lies on the host."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _deepep_wheel, _detached, _smoke
from ansible_collections.gpufleet.sglang.plugins.module_utils._deepep_wheel import Builder, Refused


def step(want: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    """Go on with what is wanted for at most ``slice_seconds``; return the module's result (``failed`` inside)."""
    deadline = time.monotonic() + float(want["slice_seconds"])
    carry = dict(want.get("carry") or {})
    running = carry.get("job")
    if running and not check_mode and want["state"] in ("present", "fetched", "smoke"):
        # The common call of a long build: nothing to decide, only to watch.
        status = _watch(running, deadline)
        if status["state"] == "running":
            return _goes_on(carry, running, status)
    try:
        if want["state"] == "smoke":
            return _smoke_step(want, check_mode, carry, deadline)
        return _step(want, check_mode, carry, deadline)
    except Refused as refused:
        cause = {"code": refused.code, "message": str(refused), "mend": refused.mend}
        result: dict[str, Any] = {
            "changed": False,
            "build_state": "blocked",
            "cause": cause,
            "cached": False,
            "usable": False,
        }
        if want["state"] == "observed":
            problem = dict(cause, packages=[])
            return dict(result, preflight={"problems": [problem], "warnings": [], "decisions": []}, fingerprint=None)
        return dict(result, failed=True, msg=f"{refused.code}: {refused}. {refused.mend}")


def _step(want: Mapping[str, Any], check_mode: bool, carry: dict[str, Any], deadline: float) -> dict[str, Any]:
    builder = Builder(want)
    builder.look()
    only_look = check_mode or want["state"] == "observed"
    if builder.identity is None:
        raise Refused(str(builder.venv["code"]), str(builder.venv["message"]), "name an existing venv in venv")
    builder.source = builder.resolve_source()
    if not builder.source["ready"] and not only_look and want["state"] in ("present", "fetched"):
        waiting = _fetch(builder, carry, deadline)
        if waiting:
            return waiting
        builder.source = builder.resolve_source()
    builder.decide()
    result = _base(builder)
    if want["state"] == "cancelled":
        return _cancel(builder, result, check_mode)
    if want["state"] == "fetched":
        waits = not builder.source["ready"]
        return dict(
            result, changed=waits or bool(carry.get("fetched")), build_state="would_fetch" if waits else "fetched"
        )
    manifest = None if want["force"] and not carry.get("finished") else builder.cached()
    if manifest and not (want["force"] and only_look):
        return _present(builder, manifest, result, carry, deadline, only_look)
    if builder.plan["problems"]:
        return _blocked(builder, result, want["state"] == "observed")
    if only_look:
        busy = _detached.is_locked(builder.build_dir)
        state = "building" if busy else ("would_build" if builder.source["ready"] else "would_fetch")
        return dict(result, changed=check_mode and want["state"] == "present", build_state=state)
    if not want.get("compile", True):
        cause = {
            "code": "wheel_not_here",
            "message": f"the cache holds no wheel {builder.fingerprint}",
            "mend": "see why its builder failed, or let this host compile",
            "log": None,
        }
        return _failed(result, cause)
    return _build(builder, result, carry, deadline)


def _base(builder: Builder) -> dict[str, Any]:
    plan = builder.plan
    return {
        "changed": False,
        "fingerprint": builder.fingerprint,
        "parts": builder.parts,
        "cached": False,
        "usable": not plan["problems"],
        "preflight": {name: plan[name] for name in ("problems", "warnings", "decisions", "links", "overlay")},
        "source": {name: builder.source.get(name) for name in ("kind", "location", "revision", "wanted", "why")},
        "jobs": plan["jobs"],
    }


def _blocked(builder: Builder, result: dict[str, Any], info: bool) -> dict[str, Any]:
    problems = builder.plan["problems"]
    packages = sorted({name for problem in problems for name in problem["packages"]})
    text = "; ".join(f"{item['code']}: {item['message']} ({item['mend']})" for item in problems)
    result.update(build_state="blocked", cause=dict(problems[0], all=[item["code"] for item in problems]))
    if info:
        return result
    more = f". Packages: {', '.join(packages)}" if packages else ""
    return dict(result, failed=True, msg=f"DeepEP cannot be built here, nothing was started: {text}{more}")


def _fetch(builder: Builder, carry: dict[str, Any], deadline: float) -> Optional[dict[str, Any]]:
    folder, spec = builder.fetch_job()
    status = _detached.observe(folder)
    if not carry.get("fetching") and status["state"] != "running":
        os.makedirs(folder, mode=0o755, exist_ok=True)
        if builder.user and builder.identity:
            # The tree is made by the venv's owner, the lock beside it stays ours.
            os.makedirs(os.path.join(folder, "tree"), mode=0o755, exist_ok=True)
            os.chown(folder, builder.identity.uid, builder.identity.gid)
        _detached.start(folder, spec)
    status = _watch(folder, deadline)
    if status["state"] == "running":
        return _goes_on(dict(carry, fetching=True), folder, status)
    if status["state"] != "succeeded":
        return _failed({"changed": False, "build_state": "failed"}, _deepep_wheel.describe_failure(folder, status))
    carry.pop("job", None)
    carry["fetched"] = True
    builder.finish_fetch()
    return None


def _build(builder: Builder, result: dict[str, Any], carry: dict[str, Any], deadline: float) -> dict[str, Any]:
    folder = builder.build_dir
    status = _detached.observe(folder)
    ours = carry.get("building") == builder.fingerprint
    if not ours and (status["state"] != "succeeded" or builder.want["force"] or not builder.products()):
        begun = builder.start_build()
        carry.update(building=builder.fingerprint, attached=begun["attached"])
    elif not ours:
        # An earlier run's controller went away after the build and before the wheel was proven.
        carry.update(building=builder.fingerprint, attached=True)
    status = _watch(folder, deadline)
    if status["state"] == "running":
        return dict(result, **_goes_on(carry, folder, status))
    if status["state"] != "succeeded":
        return _failed(result, _deepep_wheel.describe_failure(folder, status))
    staged = builder.collect()
    suspect = _deepep_wheel._build_log.diagnose(_detached.log_lines(folder), 0)
    if suspect and suspect["code"] != "nvshmem_disabled":
        staged["problems"].insert(0, suspect)
    if staged["problems"]:
        return _failed(result, dict(staged["problems"][0], log=os.path.join(folder, "log"), all=staged["problems"]))
    if not carry.get("proving"):
        builder.start_proof(staged["staged"])
        carry["proving"] = True
    proof_dir = builder.proof_job(staged["staged"])[0]
    status = _watch(proof_dir, deadline)
    if status["state"] == "running":
        return dict(result, **_goes_on(carry, proof_dir, status))
    proof = builder.proof_result()
    if not proof["ok"]:
        cause = dict(proof, mend="the wheel was not kept; see the log", log=os.path.join(proof_dir, "log"))
        return _failed(result, cause)
    if staged["about"]["private_paths"]:
        # Worth knowing, and no reason to throw an hour of compiling away.
        found = sorted({item["member"] for item in staged["about"]["private_paths"]})
        result["preflight"]["warnings"].append(
            {"code": "private_path_in_wheel", "message": f"paths of the builder are in {', '.join(found)}"}
        )
    manifest = builder.publish(staged["staged"], staged["about"], staged["runpaths"], proof)
    return _final(builder, manifest, result, True, "built", proof)


def _present(
    builder: Builder,
    manifest: dict[str, Any],
    result: dict[str, Any],
    carry: dict[str, Any],
    deadline: float,
    only_look: bool,
) -> dict[str, Any]:
    proof = builder.proof(manifest)
    wheel = os.path.join(builder.wheel_dir, manifest["wheel"]["file"])
    changed = bool(carry.get("finished"))
    if proof is None and not only_look:
        if not carry.get("proving"):
            builder.start_proof(wheel)
            carry["proving"] = True
        proof_dir = builder.proof_job(wheel)[0]
        status = _watch(proof_dir, deadline)
        if status["state"] == "running":
            return dict(result, **_goes_on(carry, proof_dir, status))
        proof = builder.proof_result()
        if not proof["ok"]:
            return _failed(
                dict(result, cached=True),
                dict(proof, mend="the venv differs from the one it was built for", log=os.path.join(proof_dir, "log")),
            )
        builder.note_proof(manifest, proof)
    return _final(builder, manifest, result, changed, "present", proof)


def _final(
    builder: Builder,
    manifest: dict[str, Any],
    result: dict[str, Any],
    changed: bool,
    state: str,
    proof: Optional[Mapping[str, Any]],
) -> dict[str, Any]:
    lacking = builder.lacking(manifest["wheel"].get("requires") or [])
    if lacking:
        message = f"the venv has no {', '.join(lacking)}, which the wheel asks for (it goes in without dependencies)"
        result["preflight"]["warnings"].append({"code": "runtime_dependency_missing", "message": message})
    return dict(
        result,
        changed=changed,
        cached=True,
        usable=True,
        build_state=state,
        wheel=os.path.join(builder.wheel_dir, manifest["wheel"]["file"]),
        sha256=manifest["wheel"]["sha256"],
        manifest=manifest,
        proof=dict(proof) if proof else None,
        remedy=builder.remedy(manifest),
        service_env=manifest.get("service_env") or {},
    )


def _cancel(builder: Builder, result: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    busy = _detached.is_locked(builder.build_dir)
    if busy and not check_mode:
        _detached.cancel(builder.build_dir)
    return dict(result, changed=busy, build_state="cancelled" if busy else "idle")


def _smoke_step(want: Mapping[str, Any], check_mode: bool, carry: dict[str, Any], deadline: float) -> dict[str, Any]:
    builder = Builder(want)
    builder.look()
    if builder.identity is None:
        raise Refused(str(builder.venv["code"]), str(builder.venv["message"]), "name an existing venv in venv")
    gpus = builder.facts.get("gpus") or []
    refusal = _smoke.refusal(gpus, _smoke.busy_gpus(gpus), want.get("smoke_gpus"))
    if refusal or check_mode:
        smoke = refusal or {"state": "skipped", "code": "check_mode", "message": "nothing is run in check mode"}
        return {"changed": False, "build_state": "smoke", "smoke": smoke}
    folder = os.path.join(builder.state_dir, "builds", "smoke")
    if not carry.get("smoking"):
        _smoke.start(builder, folder, want)
        carry["smoking"] = True
    status = _watch(folder, deadline)
    if status["state"] == "running":
        return _goes_on(carry, folder, status)
    return {"changed": False, "build_state": "smoke", "smoke": _smoke.result(folder, status)}


def _watch(folder: str, deadline: float) -> dict[str, Any]:
    status = _detached.observe(folder)
    while status["state"] == "running" and time.monotonic() < deadline:
        time.sleep(min(_deepep_wheel.POLL, max(0.0, deadline - time.monotonic())))
        status = _detached.observe(folder)
    return status


def _goes_on(carry: Mapping[str, Any], folder: str, status: Mapping[str, Any]) -> dict[str, Any]:
    step_name = str(status.get("step") or "starting")
    line = _deepep_wheel.progress_line(folder, status)
    return {
        "changed": True,
        "build_state": "building",
        "elapsed": status["elapsed"],
        "log": status["log"],
        "slice": {"done": False, "carry": dict(carry, job=folder), "state": step_name, "progress": line},
    }


def _failed(result: dict[str, Any], cause: Mapping[str, Any]) -> dict[str, Any]:
    said = f" ({cause['text']})" if cause.get("text") else ""
    where = f" Log: {cause['log']}" if cause.get("log") else ""
    message = f"{cause['code']}: {cause['message']}{said}. {cause.get('mend')}.{where}"
    return dict(result, failed=True, build_state="failed", cause=dict(cause), msg=message)
