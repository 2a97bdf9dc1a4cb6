# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the decisions inside a wave, and what a rollout says of itself (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

# How far a host came in its wave; the fact ``rollout_stage``.
STAGES = ("begun", "seen", "built", "drained", "changing", "meeting", "started", "proven")
LOCAL = ("127.0.0.1", "localhost", "::1")
ANY = ("0.0.0.0", "::", "")


def _members(plan: Mapping[str, Any], host: str) -> list[str]:
    return list((plan.get("unit") or {}).get("hosts") or [host])


def _fact(hostvars: Mapping[str, Any], host: str, name: str) -> Any:
    return hostvars[host].get(name) if host in hostvars else None


def shared_work(
    work: Mapping[str, Any], services: Mapping[str, Any], host: str, hostvars: Mapping[str, Any]
) -> dict[str, Any]:
    """``work`` of a host, with what its instances over several hosts need because another member needs it.

    Their ranks cannot be replaced one by one: all are stopped before any is started. Reads ``rollout_own_work`` of the
    members.
    """
    start, stop = list(work.get("start") or []), list(work.get("stop") or [])
    for name, plan in services.items():
        members = _members(plan, host)
        if len(members) < 2:
            continue
        needs = any(
            name in ((_fact(hostvars, member, "rollout_own_work") or {}).get("start") or []) for member in members
        )
        if needs:
            start += [name] if name not in start else []
            stop += [name] if name not in stop else []
    return {**work, "needed": bool(work.get("needed") or start), "start": start, "stop": stop}


def members_behind(services: Mapping[str, Any], host: str, hostvars: Mapping[str, Any], stage: str) -> list[str]:
    """A sentence for each other member of the host's instances that did not come as far as ``stage``."""
    told = []
    for name, plan in services.items():
        for member in _members(plan, host):
            reached = _fact(hostvars, member, "rollout_stage")
            if member != host and (reached not in STAGES or STAGES.index(reached) < STAGES.index(stage)):
                told.append(f"{member}, a member of instance {name}, failed")
    return told


def went_away(registers: Iterable[Any]) -> bool:
    """Whether one of the registered results says that the host could not be reached."""
    for result in registers:
        if isinstance(result, Mapping) and (result.get("unreachable") or went_away(result.get("results") or [])):
            return True
    return False


def held(claim: Optional[Mapping[str, Any]], run: str) -> bool:
    """Whether another run claimed the instance for a change that it has not made yet (and perhaps never will)."""
    return bool(
        claim
        and claim.get("open")
        and claim.get("run") != str(run)
        and (claim.get("deployed") or {}).get("run") != claim.get("run")
    )


def held_elsewhere(results: Iterable[Mapping[str, Any]], run: str) -> list[str]:
    """The instances that this run must not undrain; of the ``service_unit`` results of one, the last counts."""
    taken = {}
    for unit in results:
        if unit.get("instance"):
            overtaken = unit.get("overtaken") or (unit.get("cause") or {}).get("code") == "overtaken"
            taken[unit["instance"]] = bool(overtaken or held(unit.get("claim"), run))
    return [name for name, is_taken in taken.items() if is_taken]


def to_claim(
    work: Mapping[str, Any],
    previews: Iterable[Mapping[str, Any]],
    services: Mapping[str, Any],
    host: str,
    hostvars: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """``[{instance, current, proven}]`` of what this run takes over before it drains and changes it.

    That is what it will change, and what another run took for a change that it has not made: that run may be dead, and
    who undrains an instance must hold it. ``proven``: another rank of the same deployment was accepted, so this one is
    good, too, and only the record of it is missing.
    """
    changes = {*(work.get("stop") or []), *(work.get("start") or [])}
    return [
        {
            "instance": unit["instance"],
            "current": unit.get("current"),
            "proven": _half_accepted(unit, _members(services[unit["instance"]], host), host, hostvars),
        }
        for unit in previews
        if unit.get("instance") in services and (unit["instance"] in changes or held(unit.get("claim"), ""))
    ]


def _half_accepted(unit: Mapping[str, Any], members: Sequence[str], host: str, hostvars: Mapping[str, Any]) -> bool:
    claim, current = unit.get("claim") or {}, unit.get("current")
    deployed = claim.get("deployed") or {}
    if not deployed.get("run") or deployed.get("revision") != current or unit.get("last_good") == current:
        return False
    others = [
        other
        for member in members
        if member != host
        for other in (_fact(hostvars, member, "rollout_preview") or {}).get("results") or []
        if other.get("instance") == unit["instance"] and other.get("last_good")
    ]
    return any((other.get("claim") or {}).get("good") == deployed["run"] for other in others)


def to_accept(
    services: Mapping[str, Any],
    accepted: Iterable[str],
    work: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    run: str,
) -> list[str]:
    """The instances whose proven revision is to be recorded, or whose claim is to be closed.

    ``results`` are those of ``service_unit``; the last of an instance counts.
    """
    claims = {unit["instance"]: unit.get("claim") or {} for unit in results if unit.get("instance")}
    done = set(accepted) - set(work.get("start") or [])
    return [
        name
        for name in services
        if name not in done or (claims.get(name, {}).get("open") and not held(claims.get(name), run))
    ]


def to_roll_back(
    services: Mapping[str, Any], work: Mapping[str, Any], host: str, hostvars: Mapping[str, Any]
) -> list[str]:
    """The instances of ``host`` that were changed, and of which this host or another member failed.

    With them those that share a venv whose packages this run changed: packages do not go back under a service.
    """
    stage = _fact(hostvars, host, "rollout_stage")
    if stage not in STAGES or STAGES.index(stage) < STAGES.index("changing"):
        return []
    changed = [name for name in services if name in (work.get("start") or [])]
    failed = [
        name
        for name in changed
        if any(_fact(hostvars, member, "rollout_failure") for member in _members(services[name], host))
    ]
    venvs = {_venv(services, name) for name in failed} & set(work.get("remedies") or {})
    return [name for name in changed if name in failed or _venv(services, name) in venvs]


def _venv(services: Mapping[str, Any], name: str) -> str:
    return str((services[name].get("unit") or {}).get("venv") or "")


def going_back(
    previews: Iterable[Mapping[str, Any]],
    services: Mapping[str, Any],
    own: Mapping[str, Sequence[str]],
    host: str,
    hostvars: Mapping[str, Any],
) -> dict[str, Any]:
    """What going back takes: ``{names, stop, journals: {venv: [entry]}, notes, overtaken}``.

    ``previews`` are dry runs of ``service_unit`` with state rolled_back, ``own`` the journals of this run. ``names`` go
    back, of them ``stop`` are stopped first, for their venv's packages; ``notes`` say which packages stay and why.
    ``overtaken`` is ``{instance: sentence}`` of those that another run changed, here or on another member.
    """
    seen = {unit["instance"]: unit for unit in previews if unit.get("instance")}
    overtaken = {name: str(unit["overtaken"]) for name, unit in seen.items() if unit.get("overtaken")}
    for name in seen:
        for member in _members(services[name], host):
            for other in (_fact(hostvars, member, "rollout_return") or {}).get("results") or []:
                if other.get("instance") == name and other.get("overtaken") and name not in overtaken:
                    overtaken[name] = f"{member}: {other['overtaken']}"
    names = [name for name in seen if name not in overtaken]
    stop: list[str] = []
    journals: dict[str, list[str]] = {}
    notes: list[str] = []
    for venv in dict.fromkeys([*own, *(_venv(services, name) for name in seen)]):
        users = {name: seen[name].get("packages") or {} for name in seen if _venv(services, name) == venv}
        if any(name in overtaken for name in users):
            continue
        ways = {name: way for name, way in users.items() if way}
        wanted = {tuple(way["journals"]) for way in ways.values() if not way["reason"]}
        others = sorted({other for way in ways.values() for other in way["others"]} - set(users))
        why = "; ".join(f"{name}: {way['reason']}" for name, way in ways.items() if way["reason"])
        if others:
            why = f"instance {', '.join(others)} runs from this venv, too, and does not go back"
        elif len(wanted) > 1:
            why = f"instances {', '.join(sorted(ways))} share this venv, and go back to different packages"
        if why:
            notes.append(f"the packages of {venv} stay as they are ({why})")
            continue
        found = list(wanted.pop()) if wanted else list(reversed(own.get(venv) or []))
        if found:
            journals[venv] = found
            stop += list(users)
    return {"names": names, "stop": stop, "journals": journals, "notes": notes, "overtaken": overtaken}


def after_going_back(
    failure: Mapping[str, Any],
    back: Mapping[str, Any],
    services: Mapping[str, Any],
    host: str,
    hostvars: Mapping[str, Any],
) -> dict[str, Any]:
    """The failure of a host once its instances went back, or were left to another run.

    A host that was done, and goes back for another member's sake, failed with it.
    """
    if back.get("overtaken"):
        told = "; ".join(f"{name}: {text}" for name, text in back["overtaken"].items())
        begun = f"; before that, {failure.get('task')}: {failure.get('message')}" if failure else ""
        return {**failure, "task": "Go back", "message": told + begun, "cause": {"code": "overtaken"}}
    if failure:
        return dict(failure)
    told = "; ".join(
        f"{member}{FOLLOWS}{name}, failed"
        for name in back.get("names") or []
        for member in _members(services[name], host)
        if member != host and _fact(hostvars, member, "rollout_failure")
    )
    return {"task": "Go back", "message": told, "cause": {}} if told else {}


def back_work(previews: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The work of a host that goes back, like ``_journey.host_work``, from the dry run of its units."""
    seen = [unit for unit in previews if unit.get("instance")]
    start = [
        unit["instance"]
        for unit in seen
        if unit.get("changed")
        or any((unit.get("needs") or {}).values())
        or (unit.get("packages") or {}).get("journals")
    ]
    running = [unit["instance"] for unit in seen if unit.get("active_state") in ("active", "activating", "reloading")]
    return {"needed": bool(start), "remedies": {}, "stop": [], "start": start, "running": running, "changes": {}}


def went_back(units: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """``{instance: last_good | restored | stopped | overtaken}`` of ``service_unit`` results, state rolled_back."""
    return {
        unit["instance"]: "overtaken"
        if unit.get("overtaken")
        else "last_good"
        if unit.get("last_good")
        else "restored"
        if unit.get("restored")
        else "stopped"
        for unit in units
        if unit.get("instance")
    }


def failed_going_back(failure: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The failure of a host that then could not go back either."""
    told = f"going back failed, too: {second.get('task')}: {second.get('message')}"
    if not failure:
        return {**second, "going_back": True}
    merged = {**failure, "message": f"{failure.get('message')}; {told}", "going_back": True}
    return {**merged, "cause": second["cause"]} if is_overtaken(second) else merged


def is_overtaken(failure: Mapping[str, Any]) -> bool:
    """Whether a host failed because another run works on it."""
    return (failure.get("cause") or {}).get("code") == "overtaken"


def serving(
    services: Mapping[str, Any],
    work: Mapping[str, Any],
    failure: Mapping[str, Any],
    stage: str,
    back: Mapping[str, str],
    elsewhere: Iterable[str] = (),
) -> list[str]:
    """The instances that may get requests again: all after a success, else what went back or was never touched.

    Never those ``elsewhere``, in another run's hands: that run may have drained them.
    """
    if failure.get("going_back"):
        return []
    if not failure:
        names = list(services)
    elif stage in STAGES and STAGES.index(stage) < STAGES.index("changing"):
        names = [name for name in services if name in (work.get("running") or [])]
    else:
        names = [name for name, state in back.items() if state not in ("stopped", "overtaken") and name in services]
    taken = set(elsewhere)
    return [name for name in names if name not in taken]


def wave_failed(hostvars: Mapping[str, Any], hosts: Iterable[str], on_unreachable: Optional[str] = None) -> bool:
    """Whether the rollout stops after the wave of ``hosts``; a lost host may be left behind by choice."""
    failures = [_fact(hostvars, host, "rollout_failure") or {} for host in hosts]
    return any(failure and not (failure.get("lost") and on_unreachable == "skip") for failure in failures)


def bare_plans(intents: Mapping[str, Any], host: str, only: str = "") -> dict[str, Any]:
    """Plans of a host's instances, or of one, with only what a rollback needs; nothing was probed for them."""
    plans = {}
    for name, intent in (intents.get("instances") or {}).items():
        if only and name != only:
            continue
        hosts = list(intent.get("hosts") or [])
        unit = {key: intent.get(key) for key in ("user", "group", "host", "port", "venv", "model_path", "role")}
        unit.update(
            served_model_name=intent.get("served_model_name") or intent.get("model_path"),
            hosts=hosts,
            node_rank=hosts.index(host) if host in hosts else 0,
            nnodes=max(1, len(hosts)),
        )
        plans[name] = {"instance": name, "service": True, "unit": unit, "remedies": [], "rejections": []}
    return plans


def revision_refused(plans: Mapping[str, Any], host: str, revision: str) -> str:
    """Why ``revision`` cannot be what the services of ``plans`` go back to; "" when it can."""
    if not revision or not plans:
        return ""
    begin = f"{host}: rollback_revision is {revision}, "
    if len(plans) > 1:
        names = ", ".join(sorted(plans))
        return f"{begin}and a revision is of one instance; set rollback_instance to one of {names}"
    name, plan = next(iter(plans.items()))
    if len(_members(plan, host)) > 1:
        return (
            f"{begin}and instance {name} is over several hosts, each with revisions of its own; "
            "leave rollback_revision out, and all of them go back to the last good one"
        )
    return ""


# ---- load balancers --------------------------------------------------------------------------------------------------


ROUTER_KEYS = ("url", "worker_url", "worker", "traffic_timeout", "own_requests", "allow_last")


def router_calls(
    names: Iterable[str],
    services: Mapping[str, Any],
    intents: Mapping[str, Any],
    address: str,
) -> list[dict[str, Any]]:
    """The options of ``router_worker`` for those of ``names`` that are behind a router; rank 0 speaks for an instance.

    Without the API keys: a verbose run prints what it loops over. ``address`` is how the host is reached, for a
    service that listens on every address. Raises ``ValueError`` on a router that cannot be used.
    """
    calls = []
    for name in names:
        intent = (intents.get("instances") or {}).get(name) or {}
        router, unit = intent.get("router"), (services.get(name) or {}).get("unit") or {}
        if not router or unit.get("node_rank"):
            continue
        unknown = sorted(set(router) - set(ROUTER_KEYS))
        if unknown:
            raise ValueError(f"sglang_router of instance {name}: unknown {unknown[0]}; known: {', '.join(ROUTER_KEYS)}")
        urls = router.get("url") or []
        urls = [str(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not urls:
            raise ValueError(f"sglang_router of instance {name} has no url; write url: http://<router>:<port>")
        host, port = str(unit.get("host") or ""), unit.get("port")
        if host in LOCAL and not router.get("worker_url"):
            raise ValueError(
                f"instance {name} listens on {host}, which no router reaches; set sglang_host, or worker_url"
            )
        worker_url = str(router.get("worker_url") or f"http://{_bracketed(address if host in ANY else host)}:{port}")
        scheme = worker_url.partition("://")[0]
        worker = dict(router.get("worker") or {})
        if "api_key" in worker:
            raise ValueError(f"sglang_router of instance {name}: worker has an api_key; it belongs into sglang_secrets")
        if unit.get("role"):
            worker.setdefault("worker_type", unit["role"])
        flags = {key.replace("-", "_"): value for key, value in (intent.get("flags") or {}).items()}
        if unit.get("role") == "prefill":
            worker.setdefault("bootstrap_port", flags.get("disaggregation_bootstrap_port", 8998))
        calls.append(
            {
                "instance": name,
                "router_url": urls,
                "worker_url": worker_url,
                "server_url": f"{scheme}://{_bracketed('127.0.0.1' if host in ANY else host)}:{port}",
                "worker": worker,
                "drain_timeout": intent.get("drain_timeout", 300),
                "traffic_timeout": router.get("traffic_timeout", 60),
                "own_requests": router.get("own_requests", True),
                "allow_last": router.get("allow_last", False),
            }
        )
    return calls


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def unseen_traffic(joined: Mapping[str, Any]) -> list[str]:
    """A sentence for each worker that is in the router without a request seen there, from ``router_worker``'s loop."""
    return [
        f"instance {result['item']['instance']}: {result['traffic'].get('reason')}"
        for result in (joined or {}).get("results") or []
        if result.get("traffic") and not result["traffic"]["seen"] and not result.get("failed")
    ]


def hooked(names: Iterable[str], intents: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """``[{instance, tasks}]`` of those of ``names`` that have a task file under ``key`` (``drain_tasks``, …)."""
    instances = intents.get("instances") or {}
    return [{"instance": name, "tasks": instances[name][key]} for name in names if (instances.get(name) or {}).get(key)]


def meetings(names: Iterable[str], plans: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of ``rendezvous_info`` for those of ``names`` that are over several hosts."""
    calls = []
    for name in names:
        plan = plans.get(name) or {}
        unit, env = plan.get("unit") or {}, plan.get("env") or {}
        rendezvous = unit.get("rendezvous")
        if len(unit.get("hosts") or []) < 2 or not rendezvous:
            continue
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        calls.append(
            {
                "instance": name,
                "address": str(rendezvous["address"]),
                "port": int(rendezvous["port"]),
                "node_rank": int(unit.get("node_rank") or 0),
                "hosts": list(unit["hosts"]),
                "interfaces": {key: str(env[key]) for key in names if env.get(key)},
            }
        )
    return calls


def too_few_forks(fleet: Mapping[str, Any], forks: int) -> str:
    """A warning where an instance over several hosts has its wave served by fewer forks than it has hosts, else ''."""
    over = {
        item["instance"]: size
        for wave, size in zip(fleet.get("waves") or [], fleet.get("serial") or [])
        for item in wave
        if len(item["hosts"]) > 1 and size > forks
    }
    if not over:
        return ""
    names = ", ".join(sorted(over))
    return (
        f"forks_too_few: {forks} forks for {max(over.values())} hosts of one wave with ranks of {names}: "
        "they cannot try their rendezvous before they start, and while they load a dead rank may be seen only when the "
        f"others have waited for it in vain; run with --forks {max(over.values())}"
    )


# ---- what is said ----------------------------------------------------------------------------------------------------


def wave_of(fleet: Mapping[str, Any], host: str) -> int:
    """Number of the wave that has ``host``, from 0; -1 where none has."""
    begin = 0
    for number, size in enumerate(fleet.get("serial") or []):
        if host in fleet["order"][begin : begin + size]:
            return number
        begin += size
    return -1


def wave_text(fleet: Mapping[str, Any], host: str, began: float, now: float, hostvars: Mapping[str, Any]) -> str:
    """Said before a wave: what is done, what comes, how long it may take."""
    number, count = wave_of(fleet, host), len(fleet.get("serial") or [])
    before = sum(fleet["serial"][:number])
    batch = fleet["order"][before : before + fleet["serial"][number]]
    instances = sorted({item["instance"] for item in fleet["waves"][number]})
    done = fleet["order"][:before]
    states = [str((_fact(hostvars, name, "rollout_outcome") or {}).get("state") or "lost") for name in done]
    known = [(states.count(state), words.partition(",")[0]) for state, words in TOLD if state in states]
    rest = len(fleet["order"]) - before - len(batch)
    lines = [
        f"Wave {number + 1} of {count}: {_shortened(batch)} (instance {', '.join(instances)})",
        f"Behind: {len(done)} of {len(fleet['order'])} hosts"
        + (f" ({', '.join(f'{many} {words}' for many, words in known)})" if known else "")
        + f". Ahead after this wave: {rest} {'host' if rest == 1 else 'hosts'}.",
    ]
    if number:
        each = _usual_wave(fleet, number, began, now, hostvars)
        left = (
            f"about {_duration(each * (count - number))} to go, if every wave has something to change"
            if each is not None
            else "no wave had anything to change yet, so the rest cannot be estimated"
        )
        lines.append(f"Elapsed {_duration(max(0.0, now - began))}; {left}.")
    return "\n".join(lines)


def _usual_wave(
    fleet: Mapping[str, Any], number: int, began: float, now: float, hostvars: Mapping[str, Any]
) -> Optional[float]:
    """The median duration in seconds of the waves before ``number`` that changed something; None where none did."""
    begins, first = [], 0
    for size in fleet["serial"][:number]:
        begins.append(float(_fact(hostvars, fleet["order"][first], "wave_began") or (began if not first else now)))
        first += size
    took, first = [], 0
    for size, begin, end in zip(fleet["serial"], begins, [*begins[1:], now]):
        outcomes = [_fact(hostvars, name, "rollout_outcome") or {} for name in fleet["order"][first : first + size]]
        if any(outcome.get("state") != "unchanged" for outcome in outcomes):
            took.append(max(0.0, end - begin))
        first += size
    return sorted(took)[len(took) // 2] if took else None


def outcome(
    failure: Mapping[str, Any], work: Mapping[str, Any], back: Mapping[str, str], notes: Sequence[str] = ()
) -> dict[str, str]:
    """``{state, text}`` of a host at the end of its wave; ``notes`` are told with it.

    ``done``, ``unchanged``, ``went_back`` (serves its last good revision), ``stopped`` (had none), ``failed`` (was not
    changed, or what was changed still serves), ``lost`` (cannot be reached), ``down`` (could not go back),
    ``overtaken`` (left to another run that works on it).
    """
    if not failure:
        return {"state": "done" if work.get("needed") else "unchanged", "text": "; ".join(notes)}
    if is_overtaken(failure):
        state = "overtaken"
    elif back and not failure.get("going_back"):
        state = "stopped" if "stopped" in back.values() else "went_back"
    elif failure.get("lost"):
        state = "lost"
    else:
        state = "down" if failure.get("going_back") else "failed"
    return {"state": state, "text": "; ".join([f"{failure.get('task')}: {failure.get('message')}", *notes])}


TOLD = (
    ("down", "DOWN, could not go back"),
    ("stopped", "FAILED, stopped: no last good revision"),
    ("went_back", "FAILED, serves its last good revision"),
    ("failed", "FAILED"),
    ("lost", "LOST, cannot be reached"),
    ("overtaken", "OVERTAKEN by another run, left to it"),
    ("done", "done"),
    ("unchanged", "as it should be"),
    ("untouched", "untouched"),
    ("skipped", "left out"),
)


BAD = ("down", "stopped", "went_back", "failed", "lost", "overtaken")
# A host that fails because another member of its instance failed is never the cause.
FOLLOWS = ", a member of instance "


def rollout_text(fleet: Mapping[str, Any], hostvars: Mapping[str, Any], elapsed: Optional[float] = None) -> str:
    """Said at the end: what is broken, where, why and what to do next come first, then every other host."""
    groups: dict[str, list[str]] = {}
    why: dict[str, list[tuple[str, str]]] = {}
    unseen: list[tuple[str, str]] = []
    stopped_in = -1
    for host in fleet.get("order") or []:
        unseen += [(host, text) for text in unseen_traffic(_fact(hostvars, host, "rollout_joined") or {})]
        seen = _fact(hostvars, host, "rollout_outcome") or {}
        entered = _fact(hostvars, host, "rollout_stage")
        state = seen.get("state") or ("lost" if entered else "untouched")
        groups.setdefault(state, []).append(host)
        if state in BAD:
            stopped_in = wave_of(fleet, host)
        if seen.get("text"):
            why.setdefault(state, []).append((host, str(seen["text"])))
    for row in fleet.get("skipped") or []:
        groups.setdefault("skipped", []).append(row["host"])
        why.setdefault("skipped", []).append((row["host"], str(row["reason"])))
    bad = [state for state in BAD if groups.get(state)]
    took = f" after {_duration(elapsed)}" if elapsed is not None else ""
    if bad and groups.get("untouched"):
        title = f"Rollout STOPPED in wave {stopped_in + 1} of {len(fleet['serial'])}{took}"
    elif bad:
        title = f"Rollout FAILED{took}"
    else:
        left = len(groups.get("skipped", []))
        title = f"Rollout complete{took}" + (f", without {left} {'host' if left == 1 else 'hosts'}" if left else "")
    lines = [title]
    for state, words in TOLD:
        if state == "done" and bad:
            lines.append(_what_next(groups))
        if state == "done" and unseen:
            without = list(dict.fromkeys(host for host, _text in unseen))
            lines.append(f"  {len(without)} WITHOUT A REQUEST from the router so far: {_shortened(without, 20)}")
            lines += [f"    {text}" for text in _causes(unseen)]
        hosts = groups.get(state)
        if hosts:
            lines.append(f"  {len(hosts)} {words}: {_shortened(hosts, 20 if state in BAD else 10)}")
            lines += [f"    {text}" for text in _causes(why.get(state, []))]
    return "\n".join(lines)


def _what_next(groups: Mapping[str, Sequence[str]]) -> str:
    down = groups.get("down") or []
    first = ""
    if down:
        limit = ",".join(down) if len(down) <= 10 else "'those hosts'"
        first = (
            f"nothing serves where it is DOWN: go there first (gpufleet.sglang.rollback --limit {limit} tries again); "
        )
    return f"Next: {first}mend the cause, then the same command again; hosts that are as they should be stay untouched."


def _causes(told: Sequence[tuple[str, str]]) -> list[str]:
    """``h1: text`` for each cause, those of most hosts first; texts that differ in names and numbers only are one."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for host, text in told:
        alike.setdefault(re.sub(r"[0-9]+", "#", text.replace(host, "")), []).append((host, text))
    ordered = sorted(alike.values(), key=lambda rows: (FOLLOWS in rows[0][1], -len(rows)))
    lines = []
    for rows in ordered[:5]:
        names = [host for host, _text in rows]
        example = f", such as {names[0]}" if len({text for _host, text in rows}) > 1 else ""
        where = names[0] if len(names) == 1 else f"{len(names)} hosts ({_shortened(names, 3)}){example}"
        lines.append(f"{where}: {_one_line(rows[0][1])}")
    if len(ordered) > 5:
        hosts = sum(len(rows) for rows in ordered[5:])
        lines.append(f"and {len(ordered) - 5} more causes on {hosts} hosts, see the report")
    return lines


def _one_line(text: str) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= 300 else text[:299] + "…"


def _shortened(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
