# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what the playbooks hand from one step of a host's journey to the next (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._intents import ROUTER_SECRET

HEAVY_SUBSETS = ("backends", "server_args", "gpus", "toolkits", "fabric")
INSTANCE_SUBSETS = ("model", "service")


def probe_calls(intents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of the ``probe_info`` calls that a host needs: one a venv, plus one a further instance.

    The first instance of a venv rides along with the venv's own call, so that the usual host needs one round trip.
    """
    calls: list[dict[str, Any]] = []
    venvs_done: set[str] = set()
    for name, instance in intents.get("instances", {}).items():
        venv = instance.get("venv")
        if not venv:
            continue
        first = venv not in venvs_done
        venvs_done.add(venv)
        calls.append(
            {
                "venv": venv,
                "instance": name,
                "model_path": instance.get("model_path"),
                "user": instance.get("user"),
                "environment": instance.get("env_vars") or {},
                "subset": list(HEAVY_SUBSETS + INSTANCE_SUBSETS) if first else list(INSTANCE_SUBSETS),
                "wanted": _wanted(intents, instance),
            }
        )
    for venv, about in intents.get("venvs", {}).items():
        if venv in venvs_done:
            continue
        calls.append(
            {
                "venv": venv,
                "instance": None,
                "model_path": None,
                "user": (about or {}).get("user"),
                "environment": (about or {}).get("environment") or {},
                "subset": list(HEAVY_SUBSETS),
                "wanted": _wanted(intents, {}),
            }
        )
    return calls


def _wanted(intents: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, list[str]]:
    wanted = {name: list(uses) for name, uses in (intents.get("backends") or {}).items()}
    for key, use in (
        ("moe_a2a_backend", "a2a"),
        ("kv_transfer_backend", "kv_transfer"),
        ("elastic_ep_backend", "elastic_ep"),
    ):
        value = instance.get(key)
        for name in [value] if isinstance(value, str) else list(value or []):
            backend = {"deepep": "deep_ep"}.get(name, name)
            if backend in ("deep_ep", "mooncake", "nixl"):
                uses = wanted.setdefault(backend, [])
                if use not in uses:
                    uses.append(use)
    return wanted


def collect_probes(results: Iterable[Mapping[str, Any]], intents: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{venv: probe}`` from the results; ``probe.instances.<name>`` holds what is an instance's own."""
    probes: dict[str, Any] = {}
    for call, result in zip(probe_calls(intents), results):
        probe = result.get("probe") or {}
        target = probes.setdefault(call["venv"], {})
        own = {key: probe[key] for key in INSTANCE_SUBSETS if key in probe}
        for key, value in probe.items():
            target.setdefault(key, value)
        if call["instance"]:
            target.setdefault("instances", {})[call["instance"]] = own
    return probes


def instance_probe(probes: Mapping[str, Any], intents: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the probe as one instance sees it: its venv's evidence with its own model and service.

    The plan of a host without a service sees the evidence of its only venv.
    """
    instance = (intents.get("instances") or {}).get(name)
    venv = instance.get("venv") if instance else next(iter(intents.get("venvs") or {}), None)
    probe = dict(probes.get(venv or "", {}))
    own = (probe.pop("instances", None) or {}).get(name)
    for key in INSTANCE_SUBSETS:
        probe.pop(key, None)
    probe.update(own or {})
    return probe


def host_work(
    plans: Mapping[str, Any], previews: Iterable[Mapping[str, Any]], probes: Mapping[str, Any]
) -> dict[str, Any]:
    """Say what a host still needs, from its plans and the dry run of its units.

    Returns ``{needed, remedies: {venv: [remedy]}, stop: [instance], start: [instance],
    changes: {instance: [difference]}}``.
    An instance is stopped only when packages of its venv change; a changed unit is swapped and restarted in one step.
    """
    remedies = required_remedies(plans)
    needs = {item["instance"]: item.get("needs") or {} for item in previews if item.get("instance")}
    changes = {item["instance"]: item.get("differences") or [] for item in previews if item.get("instance")}
    services = [name for name, plan in plans.items() if plan.get("service")]
    start = [name for name in services if any(needs.get(name, {}).values()) or plans[name]["unit"]["venv"] in remedies]
    stop = [
        name
        for name in services
        if plans[name]["unit"]["venv"] in remedies and _is_running(probes, plans[name]["unit"]["venv"], name)
    ]
    return {
        "needed": bool(remedies or start),
        "remedies": remedies,
        "stop": stop,
        "start": start,
        "running": [name for name in services if _is_running(probes, plans[name]["unit"]["venv"], name)],
        "changes": {name: found for name, found in changes.items() if found},
    }


def required_remedies(plans: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return ``{venv: [remedy]}`` of what the plans cannot do without, each remedy once."""
    remedies: dict[str, list[dict[str, Any]]] = {}
    for plan in plans.values():
        found = remedies.setdefault(plan.get("unit", {}).get("venv") or "", [])
        for remedy in plan.get("remedies", []):
            if remedy.get("required") and remedy not in found:
                found.append(remedy)
    return {venv: found for venv, found in remedies.items() if found}


def further_remedies(plans: Mapping[str, Any], tried: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the remedies that are required now and were not tried yet; the same steps again would not help."""
    done = [remedy.get("instead_of") or remedy.get("steps") for found in tried.values() for remedy in found]
    left = {
        venv: [remedy for remedy in found if remedy.get("steps") not in done]
        for venv, found in required_remedies(plans).items()
    }
    return {venv: found for venv, found in left.items() if found}


def to_build(remedies: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[str]:
    """Return the venvs of ``{venv: [remedy]}`` that a DeepEP wheel is built for."""
    return [venv for venv, found in remedies.items() if any(_builds(remedy) for remedy in found)]


def _builds(remedy: Mapping[str, Any]) -> bool:
    return any(step.get("action") == "build" for step in remedy.get("steps") or [])


def with_wheels(
    remedies: Mapping[str, Iterable[Mapping[str, Any]]], wheels: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return ``{venv: [remedy]}`` with each build replaced by the steps that install the wheel of that venv.

    ``wheels`` is ``{venv: the remedy that deepep_wheel returned}``. ``instead_of`` keeps the steps as planned, by which
    ``further_remedies`` knows them again. A build without a wheel, as in check mode, stays.
    """
    done: dict[str, list[dict[str, Any]]] = {}
    for venv, found in remedies.items():
        wheel = wheels.get(venv) or {}
        done[venv] = []
        for remedy in found:
            remedy = dict(remedy)
            if wheel and _builds(remedy):
                steps = [
                    made
                    for step in remedy["steps"]
                    for made in (wheel["steps"] if step.get("action") == "build" else [step])
                ]
                remedy.update(steps=steps, instead_of=remedy["steps"], summary=wheel["summary"])
            done[venv].append(remedy)
    return done


def deepep_options(
    settings: Mapping[str, Any], plans: Mapping[str, Any], intents: Mapping[str, Any], venv: str
) -> dict[str, Any]:
    """Return what the role ``deepep`` is told for one venv, by its variables without the prefix.

    The import is proven with the variables of the first service of the venv, as the plans have them. Raises ValueError
    for a revision of a source that has none.
    """
    source = str(settings.get("deepep_source") or "")
    is_url = bool(source) and (not source.startswith("/") or source.rstrip("/").endswith(".git"))
    if source and not is_url and settings.get("deepep_revision"):
        raise ValueError(
            f"sglang_deepep_revision is {settings['deepep_revision']}, and sglang_deepep_source {source} is no git "
            "repository; remove sglang_deepep_revision, or give a git URL"
        )
    services = [plan for plan in plans.values() if plan.get("service") and (plan.get("unit") or {}).get("venv") == venv]
    about = (intents.get("venvs") or {}).get(venv) or {}
    return {
        "venv": venv,
        "source_path": "" if is_url else source,
        "source_url": source if is_url else "",
        "revision": str(settings.get("deepep_revision") or ""),
        "gpu_archs": [str(arch) for arch in settings.get("deepep_archs") or []],
        "toolkit": str(settings.get("deepep_cuda_home") or ""),
        "nvshmem_dir": str(settings.get("deepep_nvshmem_dir") or ""),
        "nccl_dir": str(settings.get("deepep_nccl_dir") or ""),
        "wheelhouse": str(settings.get("wheelhouse") or ""),
        "wheel_url": str(settings.get("deepep_wheel_url") or "").rstrip("/"),
        "max_jobs": int(settings.get("deepep_max_jobs") or 0),
        "time_limit": int(settings.get("deepep_timeout") or 5400),
        "artifacts_dir": str(settings.get("artifacts_dir") or "artifacts"),
        "service_environment": dict(services[0].get("env") or {}) if services else dict(about.get("environment") or {}),
    }


def to_measure(probes: Mapping[str, Any]) -> list[str]:
    """Return the venvs whose DeepEP can be tried on the GPUs: what does not import needs no measuring."""
    return [
        venv
        for venv, probe in probes.items()
        if ((probe.get("backends") or {}).get("deep_ep") or {}).get("state") in ("ok", "suspect")
    ]


def _is_running(probes: Mapping[str, Any], venv: str, instance: str) -> bool:
    service = probes.get(venv, {}).get("instances", {}).get(instance, {}).get("service") or {}
    return service.get("state") in ("active", "activating", "reloading", "deactivating")


def plan_names(intents: Mapping[str, Any]) -> list[str]:
    """Return the instances to plan; a host that only wants backends gets one plan without a service, ``default``."""
    names = list(intents.get("instances") or {})
    if not names and (intents.get("backends") or intents.get("problems") or intents.get("venvs")):
        return ["default"]
    return names


def accepted_instances(previews: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the instances whose current revision is already recorded as the last good one."""
    return [
        item["instance"]
        for item in previews
        if item.get("instance") and item.get("last_good") and item["last_good"] == item.get("current")
    ]


def unmended(assumed: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each remedy that was carried out and did not hold, and for each new rejection."""
    problems = []
    for name, plan in fresh.items():
        before = {(r["backend"], r.get("use")) for r in assumed.get(name, {}).get("remedies", []) if r.get("required")}
        for remedy in plan.get("remedies", []):
            key = (remedy["backend"], remedy.get("use"))
            if remedy.get("required") and key in before:
                problems.append(
                    f"{name}: {remedy['backend']} is still {remedy.get('state')} ({remedy.get('code')}) "
                    "after its remedy; "
                    f"next: {remedy.get('summary')}"
                )
        problems.extend(
            f"{name}: {rejection['code']}: {rejection['message']}" for rejection in plan.get("rejections", [])
        )
    return problems


def failure(result: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return ``{task, message, cause}`` of a failed task's result; of a loop, of its first item that failed."""
    for item in result.get("results") or []:
        if item.get("failed"):
            result = item
            break
    return {"task": str(task), "message": str(result.get("msg") or "failed"), "cause": result.get("cause") or {}}


def _secrets_of(instance: str, variables: Mapping[str, Any]) -> dict[str, str]:
    own = ((variables.get("sglang_instances") or {}).get(instance) or {}).get("secrets") or {}
    return {str(name): str(value) for name, value in {**(variables.get("sglang_secrets") or {}), **own}.items()}


def secrets_by_instance(instances: Iterable[str], variables: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return ``{instance: {name: value}}``: ``sglang_secrets``, then those of the instance's own entry."""
    return {
        name: {key: value for key, value in _secrets_of(name, variables).items() if key != ROUTER_SECRET}
        for name in instances
    }


def router_keys(instances: Iterable[str], variables: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{instance: API key of its router}``: ``router_api_key`` of the secrets, which no service is given."""
    found = {name: _secrets_of(name, variables).get(ROUTER_SECRET) for name in instances}
    return {name: key for name, key in found.items() if key}


def ready_targets(
    plans: Mapping[str, Any], units: Iterable[Mapping[str, Any]], intents: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what ``service_ready`` needs to know of each instance, ``{instance: its options}``.

    The argv is the unit's where there is one, since it also names the file that secrets are handed over in.
    """
    by_instance = {unit["instance"]: unit for unit in units if unit.get("instance")}
    targets = {}
    for name, plan in plans.items():
        unit = by_instance.get(name) or {}
        about = plan.get("unit") or {}
        wait = ((intents.get("instances") or {}).get(name) or {}).get("ready") or {}
        options = {
            "instance": name,
            "host": about.get("host"),
            "port": about.get("port"),
            "model": about.get("served_model_name") or about.get("model_path"),
            "node_rank": about.get("node_rank") or 0,
            "members": about.get("hosts") or None,
            "role": about.get("role"),
            "expected_argv": list(unit.get("argv") or plan.get("argv") or []),
            "revision": unit.get("revision"),
            "api_key_file": unit.get("api_key_file"),
        }
        options.update({key: wait.get(key) for key in ("successes", "timeout", "stall_timeout", "hard_timeout")})
        targets[name] = {key: value for key, value in options.items() if value is not None}
    return targets


def restored_targets(
    services: Mapping[str, Any], units: Iterable[Mapping[str, Any]], intents: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the targets of the instances that went back; their argv is that revision's, not the plan's."""
    back = {
        unit["instance"]: unit
        for unit in units
        if unit.get("instance") and unit.get("last_good") and not unit.get("overtaken")
    }
    targets = ready_targets({name: plan for name, plan in services.items() if name in back}, back.values(), intents)
    for name, target in targets.items():
        if not back[name].get("argv"):
            del target["expected_argv"]
    return targets


def applied_journals(results: Iterable[Mapping[str, Any]], before: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return ``{venv: [journal entry]}`` of what this run changed in venvs, oldest first, for going back.

    ``before`` is what this returned for the run's earlier changes.
    """
    journals = {venv: list(found) for venv, found in before.items()}
    for item in results:
        if item.get("changed") and item.get("journal_id") and item.get("item"):
            journals.setdefault(item["item"]["key"], []).append(item["journal_id"])
    return journals
