# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: turn what a run kept of its hosts into the report and its terminal form (pure).

``records`` keeps a host's facts, ``document`` makes the stable shape of docs/schemas/report.schema.json from them,
``report_table`` prints that. Nothing here knows what the backends are called: they come from the probes.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _codes, _saved_report

SCHEMA = 1
GOOD_SERVICE = ("ready", "busy", "active")
# States of a backend that need somebody's hand when the backend is wanted.
BAD = frozenset(state for state in _codes.STATES if state != "ok")
FOLD_FROM = 12
Paint = Callable[[str, str], str]


# What a run kept

# The facts of a host that a report is made of; nothing else is read, since templating all of them is slow.
KEPT = (
    "probe_before",
    "probe_results",
    "probe_plans",
    "rollout_assumed",
    "rollout_preview",
    "rollout_failure",
    "rollout_work",
    "rollout_builds",
    "rollout_smoke",
    "ready_results",
    "service_units",
)


def records(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{host: record}``.

    A record holds ``before`` and ``after`` (venv → probe), ``plans`` (what was planned) and ``plans_after`` (what the
    last look planned; instance → plan), ``builds`` (venv → {fingerprint, state, sha256} of its DeepEP wheel), ``smoke``
    (venv → what ``deepep_wheel`` measured), ``ready`` (instance → {ready, state, cause}), ``units`` (instance →
    {current, last_good, needs, differences}), ``failure`` ({task, message, cause} or {}), ``reached`` and ``changed``
    (the run may have changed the host: before and after can differ).
    """
    found = {}
    for host in hosts:
        values = hostvars[host]
        found[host] = {
            "before": values.get("probe_before") or {},
            "after": values.get("probe_results") or {},
            "plans": values.get("rollout_assumed") or values.get("probe_plans") or {},
            "plans_after": values.get("probe_plans") or {},
            "ready": _ready(values),
            "units": _units(values),
            "failure": values.get("rollout_failure") or {},
            "builds": values.get("rollout_builds") or {},
            "smoke": values.get("rollout_smoke") or {},
            "reached": "probe_results" in values,
            "changed": "rollout_work" in values,
        }
    return found


def _ready(values: Mapping[str, Any]) -> dict[str, Any]:
    results = (values.get("ready_results") or {}).get("results") or []
    return {
        item["item"]["key"]: {key: item.get(key) for key in ("ready", "state", "cause")}
        for item in results
        if item.get("item")
    }


def _units(values: Mapping[str, Any]) -> dict[str, Any]:
    units = {}
    for name in ("rollout_preview", "service_units"):
        for item in (values.get(name) or {}).get("results") or []:
            if item.get("instance"):
                keys = ("current", "last_good", "needs", "differences")
                units[item["instance"]] = {key: item.get(key) for key in keys}
    return units


# The report


def document(
    found: Mapping[str, Any],
    kind: str = "probe",
    generated: Optional[str] = None,
    version: Optional[str] = None,
    secrets: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the report of ``records``, as docs/schemas/report.schema.json describes it.

    ``generated`` is an ISO 8601 time in UTC. ``secrets`` are values that must not appear anywhere: each is replaced
    by ``***``, also inside log lines.
    """
    plans: dict[str, Any] = {}
    hosts = {host: _host(host, record, plans) for host, record in found.items()}
    report = {
        "schema": SCHEMA,
        "kind": kind,
        "generated": generated,
        "collection_version": version,
        "summary": {},
        "next_steps": _next_steps(found, hosts),
        "notes": _notes(found),
        "groups": _groups(hosts),
        "plans": plans,
        "hosts": hosts,
    }
    report["summary"] = _summary(report)
    values = sorted({str(value) for value in secrets if len(str(value)) >= 4}, key=len, reverse=True)
    return _redact(report, values) if values else report


def _redact(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            if secret in value:
                value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {_redact(key, secrets): _redact(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, secrets) for item in value]
    return value


def _host(host: str, record: Mapping[str, Any], plans: dict[str, Any]) -> dict[str, Any]:
    # The last look, or, where a probe was not made again, the first.
    entry: dict[str, Any] = {
        "reached": record["reached"],
        "status": "",
        "hardware": _hardware(next(iter(record["after"].values()), {})),
        "venvs": {},
        "instances": {},
        "failure": dict(record["failure"]) or None,
        "fingerprint": _saved_report.fingerprint(record["after"]) if record["reached"] else None,
        "seen": _saved_report.seen(record["after"]) if record["reached"] else {},
    }
    for venv, after in (record["after"] or record["before"]).items():
        before = record["before"].get(venv, after)
        entry["venvs"][venv] = _venv(venv, before, after, record)
        for key, kept in (("build", "builds"), ("smoke", "smoke")):
            if (record.get(kept) or {}).get(venv):
                entry["venvs"][venv][key] = dict(record[kept][venv])
    for name, plan in record["plans"].items():
        entry["instances"][name] = _instance(host, name, plan, record, plans)
    entry["status"] = _status(entry)
    return entry


def _venv(venv: str, before: Mapping[str, Any], after: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    about = after.get("venv") or {}
    torch = after.get("torch") or {}
    wanted = _wanted(record, venv)
    backends = {}
    for name in _union(before.get("backends"), after.get("backends")):
        first, last = (_backend((probe.get("backends") or {}).get(name)) for probe in (before, after))
        backends[name] = {
            "wanted": wanted.get(name, []),
            "before": first,
            "after": last,
            "expected": _expected(record, venv, name),
            "remedy": _remedy(record["plans"], venv, name),
            "serves_without": any(plan.get("service") for plan in _of_venv(record["plans"], venv)),
            "passed_over": _passed_over(record, venv, name),
        }
    return {
        "state": about.get("state"),
        "code": about.get("code"),
        "message": about.get("message"),
        "owner": about.get("owner"),
        "python": about.get("python_version"),
        "torch": torch.get("version"),
        "torch_cuda": torch.get("cuda"),
        "sglang": (after.get("sglang") or {}).get("version"),
        "backends": backends,
    }


def _union(*mappings: Optional[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in (mapping or {})))


def _backend(backend: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    found = backend or {}
    distributions = found.get("distributions") or []
    return {
        "state": found.get("state") or "unknown",
        "code": found.get("code"),
        "message": found.get("message"),
        "level": found.get("level"),
        "layer": found.get("layer"),
        "distributions": [{key: item.get(key) for key in ("name", "version", "variant")} for item in distributions],
        "uses": {
            name: {key: use.get(key) for key in ("state", "code", "message", "level")}
            for name, use in (found.get("uses") or {}).items()
        },
    }


def _of_venv(plans: Mapping[str, Any], venv: str) -> list[Mapping[str, Any]]:
    """The plans that concern ``venv``; a plan that names none concerns each."""
    return [plan for plan in plans.values() if ((plan.get("unit") or {}).get("venv") or venv) == venv]


def _wanted(record: Mapping[str, Any], venv: str) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for plan in _of_venv(record["plans"], venv):
        for name, uses in (plan.get("wanted") or {}).items():
            kept = wanted.setdefault(name, [])
            kept.extend(use for use in uses if use not in kept)
    return wanted


def _remedy(plans: Mapping[str, Any], venv: str, backend: str) -> Optional[dict[str, Any]]:
    """The remedy of ``backend`` that the plans name; one that is required goes first."""
    found = [r for plan in _of_venv(plans, venv) for r in plan.get("remedies") or [] if r.get("backend") == backend]
    for remedy in sorted(found, key=lambda r: not r.get("required")):
        keys = ("kind", "summary", "steps", "use", "code", "state", "required")
        return {key: remedy.get(key) for key in keys}
    return None


def _expected(record: Mapping[str, Any], venv: str, backend: str) -> Optional[str]:
    """The state that the plan counts on after its remedy, None when it counts on none."""
    for plan in _of_venv(record["plans_after"], venv):
        for assumed in plan.get("assumes") or []:
            if assumed.get("backend") == backend:
                return str(assumed.get("state"))
    return None


def _hardware(probe: Mapping[str, Any]) -> dict[str, Any]:
    gpus = probe.get("gpus") or {}
    devices = gpus.get("devices") or []
    host = probe.get("host") or {}
    fabric = probe.get("fabric") or {}
    rdma = (fabric.get("rdma") or {}).get("devices") if fabric.get("rdma") else None
    names = Counter(str(device.get("name")) for device in devices)
    return {
        "gpus": len(devices) if gpus else None,
        "gpu": " + ".join(sorted(names)) or None,
        "gpu_state": gpus.get("state"),
        "gpu_message": gpus.get("message"),
        "gpus_lost": [device.get("index") for device in devices if device.get("lost")],
        "gpu_memory_mib": sorted({d["memory_mib"] for d in devices if d.get("memory_mib")}),
        "driver": gpus.get("driver"),
        "cuda_driver": gpus.get("cuda_driver"),
        "fabric": fabric.get("class"),
        "bad_gpus": fabric.get("bad_gpus") or [],
        "rdma_devices": len(rdma) if rdma is not None else None,
        "os_family": host.get("os_family"),
        "machine": host.get("machine"),
        "cpus": host.get("cpus"),
        "memory_bytes": host.get("memory_bytes"),
    }


PLAN_KEYS = ("service", "argv", "env", "effective", "remedies", "decisions", "warnings", "rejections", "wanted", "unit")


def plan_id(plan: Mapping[str, Any]) -> str:
    """The same for plans that do the same: prose and evidence, which may name a host's own numbers, do not count."""
    essence = {key: plan.get(key) for key in ("service", "argv", "env", "effective", "remedies", "wanted", "unit")}
    essence["decisions"] = [(item.get("question"), item.get("answer")) for item in plan.get("decisions") or []]
    for key in ("warnings", "rejections"):
        essence[key] = [(i.get("code"), i.get("flag"), i.get("variable")) for i in plan.get(key) or []]
    return hashlib.sha256(json.dumps(essence, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _instance(
    host: str, name: str, plan: Mapping[str, Any], record: Mapping[str, Any], plans: dict[str, Any]
) -> dict[str, Any]:
    identity = plan_id(plan)
    if identity not in plans:
        plans[identity] = {"instance": name, "seen_on": host, **{key: plan.get(key) for key in PLAN_KEYS}}
    seen: dict[str, Any] = {}
    for probe in record["after"].values():
        seen = (probe.get("instances") or {}).get(name, {}).get("service") or seen
    ready = record["ready"].get(name)
    alone = plan.get("left_alone") or {}
    unit = record["units"].get(name) or {}
    return {
        "plan": identity,
        "service": bool(plan.get("service") or alone.get("service")),
        "rejected": [dict(item) for item in _rejections(plan)],
        "state": ready["state"] if ready else seen.get("state"),
        "ready": ready["ready"] if ready else None,
        "cause": ready["cause"] if ready else None,
        "revision": unit.get("current") or seen.get("revision"),
        "last_good": unit.get("last_good"),
        "drift": _drift(unit),
    }


def _rejections(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Also those that do not stop this run, because it leaves the instance alone."""
    return [*(plan.get("rejections") or []), *((plan.get("left_alone") or {}).get("rejections") or [])]


def _drift(unit: Mapping[str, Any]) -> Optional[bool]:
    """Whether the unit differs from the plan; None when they were not compared."""
    return any(unit["needs"].values()) if unit.get("needs") is not None else None


def _unmet(backend: Mapping[str, Any]) -> bool:
    """A wanted backend whose wanted uses are not all ok."""
    if not backend["wanted"]:
        return False
    uses = backend["after"]["uses"]
    states = [uses[use]["state"] for use in backend["wanted"] if use in uses] or [backend["after"]["state"]]
    return any(state in BAD for state in states)


def _status(entry: Mapping[str, Any]) -> str:
    """``ok``, ``attention`` (something is left to mend), ``failed`` (refused, failed, not serving), ``unreachable``."""
    if not entry["reached"]:
        return "unreachable"
    instances = entry["instances"].values()
    if entry["failure"] or any(i["rejected"] or i["ready"] is False for i in instances):
        return "failed"
    if any(venv["state"] not in (None, "ok") for venv in entry["venvs"].values()):
        return "failed"
    if entry["hardware"].get("gpus_lost") or entry["hardware"].get("bad_gpus"):
        return "attention"
    if any(_unmet(backend) for venv in entry["venvs"].values() for backend in venv["backends"].values()):
        return "attention"
    return "ok"


# What to do next


def _next_steps(found: Mapping[str, Any], hosts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One step for all hosts that it mends, those that mend most hosts first."""
    steps: dict[tuple[Any, ...], dict[str, Any]] = {}

    def add(host: str, source: str, code: Any, summary: Any, **more: Any) -> None:
        text = str(summary or "").strip()
        if not text:
            return
        step = {"source": source, "code": code, "backend": None, "kind": "none", "summary": text, **more}
        key = tuple(str(step.get(name)) for name in ("source", "code", "summary", "backend", "kind"))
        row = steps.setdefault(key, {**step, "required": False, "hosts": []})
        row["required"] = row["required"] or step.get("required", True)
        if host not in row["hosts"]:
            row["hosts"].append(host)

    for host, entry in hosts.items():
        record = found[host]
        if not entry["reached"]:
            text = "make the host reachable, or see in the run's output why the probe failed"
            add(host, "host", "not_probed", text)
            continue
        for venv in entry["venvs"].values():
            if venv["state"] not in (None, "ok"):
                known = _codes.CODES.get(venv["code"] or venv["state"] or "")
                add(host, "venv", venv["code"] or venv["state"], known.mend if known else venv["message"])
        for name, plan in record["plans_after"].items():
            for rejection in _rejections(plan):
                mend = rejection.get("suggestion") or rejection.get("message")
                add(host, "rejection", rejection.get("code"), mend)
            for remedy in plan.get("remedies") or []:
                add(
                    host,
                    "remedy",
                    remedy.get("code"),
                    remedy.get("summary") or remedy.get("kind"),
                    kind=remedy.get("kind"),
                    backend=remedy.get("backend"),
                    required=bool(remedy.get("required")),
                )
            ready = record["ready"].get(name) or {}
            cause = ready.get("cause") or {}
            if ready.get("ready") is False:
                text = cause.get("mend") or cause.get("message") or f"state {ready.get('state')}"
                add(host, "service", cause.get("code"), text)
        _add_unplanned(host, entry, record, add)
        failure = entry["failure"] or {}
        if failure and not (failure.get("cause") or {}).get("code"):
            add(host, "failure", "task_failed", f"{failure.get('task')}: {failure.get('message')}")
    rows = sorted(steps.values(), key=lambda row: (-len(row["hosts"]), not row["required"], row["summary"]))
    for row in rows:
        row["count"] = len(row["hosts"])
        row["command"] = _command(row)
    return rows


def _add_unplanned(host: str, entry: Mapping[str, Any], record: Mapping[str, Any], add: Callable[..., None]) -> None:
    """A wanted backend that is not ok and has no remedy in the plan: say what its cause's table says."""
    for venv_path, venv in entry["venvs"].items():
        if venv["state"] not in (None, "ok"):
            continue
        for name, backend in venv["backends"].items():
            known = _codes.CODES.get(backend["after"]["code"] or "")
            if known and _unmet(backend) and not _remedy(record["plans_after"], venv_path, name):
                add(
                    host,
                    "backend",
                    backend["after"]["code"],
                    known.mend,
                    backend=name,
                    required=not backend["serves_without"],
                )


def _command(step: Mapping[str, Any]) -> Optional[str]:
    if step["source"] != "remedy" or not step["required"]:
        return None
    return f"ansible-playbook gpufleet.sglang.remediate -e sglang_remediate_codes={step['code']}"


def _notes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Warnings, and decisions about backends in which something was done without, each once with its hosts."""
    notes: dict[tuple[str, str, str], dict[str, Any]] = {}

    def add(host: str, kind: str, code: str, text: str) -> None:
        row = notes.setdefault((kind, code, text), {"kind": kind, "code": code, "text": text, "hosts": []})
        if host not in row["hosts"]:
            row["hosts"].append(host)

    for host, record in found.items():
        for plan in (record["plans_after"] or record["plans"]).values():
            for decision in plan.get("decisions") or []:
                question, because = str(decision.get("question")), str(decision.get("because") or "")
                if (
                    question.endswith("_backend")
                    and decision.get("answer") in (None, "none")
                    and because != "asked for"
                ):
                    add(host, "decision", question, f"{decision.get('answer')}: {because}")
            # Said by the decision already.
            for warning in plan.get("warnings") or []:
                if warning.get("code") != "backend_fallback":
                    add(host, "warning", str(warning.get("code")), str(warning.get("message")))
    return sorted(notes.values(), key=lambda row: (-len(row["hosts"]), row["kind"], row["code"]))


# Hosts that should be alike

ATTRIBUTES = ("gpus", "gpu_memory_mib", "gpu_state", "driver", "cuda_driver", "fabric", "rdma_devices")
HOST_ATTRIBUTES = ("os_family", "machine", "cpus")
VERSIONS = ("python", "torch", "torch_cuda", "sglang")


def _groups(hosts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hosts with the same GPU model form a group; in each, what most have, and who differs in what."""
    members: dict[str, list[str]] = {}
    for host, entry in hosts.items():
        if entry["reached"]:
            hardware = entry["hardware"]
            unreadable = hardware.get("gpu_state") in ("error", "timeout")
            name = hardware.get("gpu") or ("GPUs not readable" if unreadable else "no GPU")
            members.setdefault(name, []).append(host)
    groups = []
    for name, names in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        found = {host: _attributes(hosts[host]) for host in names}
        attributes: list[dict[str, Any]] = []
        for attribute in dict.fromkeys(key for own in found.values() for key in own):
            # Not having something is a value too: the one host that has it differs as much as the one that lacks it.
            values: dict[str, list[str]] = {}
            for host in names:
                values.setdefault(found[host].get(attribute, "none"), []).append(host)
            ranked = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
            others = [{"value": value, "hosts": who} for value, who in ranked[1:]]
            attributes.append({"name": attribute, "common": ranked[0][0], "count": len(ranked[0][1]), "others": others})
        attributes.sort(key=lambda row: not row["others"])
        outliers = sorted({host for row in attributes for other in row["others"] for host in other["hosts"]})
        groups.append({"name": name, "hosts": names, "attributes": attributes, "outliers": outliers})
    return groups


def _attributes(entry: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key in ATTRIBUTES + HOST_ATTRIBUTES:
        value = entry["hardware"].get(key)
        if value not in (None, "", []):
            found[key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    versions: dict[str, set[str]] = {}
    for venv in entry["venvs"].values():
        for key in VERSIONS:
            if venv[key]:
                versions.setdefault(key, set()).add(str(venv[key]))
        for name, backend in venv["backends"].items():
            for item in backend["after"]["distributions"]:
                versions.setdefault(name, set()).add(f"{item['name']} {item['version']}")
    found.update({key: ", ".join(sorted(values)) for key, values in versions.items()})
    return found


def _summary(report: Mapping[str, Any]) -> dict[str, Any]:
    hosts = report["hosts"].values()
    statuses = Counter(entry["status"] for entry in hosts)
    backends: dict[str, Counter[str]] = {}
    for entry in hosts:
        for venv in entry["venvs"].values():
            for name, backend in venv["backends"].items():
                backends.setdefault(name, Counter())[backend["after"]["state"]] += 1
    services = [i for entry in hosts for i in entry["instances"].values() if i["service"]]
    summary = {
        "hosts": len(report["hosts"]),
        "ok": statuses["ok"],
        "attention": statuses["attention"],
        "failed": statuses["failed"],
        "unreachable": statuses["unreachable"],
        "services": len(services),
        "services_ready": sum(1 for i in services if i["ready"]),
        "services_asked": sum(1 for i in services if i["ready"] is not None),
        "plans_refused": sum(1 for entry in hosts for i in entry["instances"].values() if i["rejected"]),
        "backends": {name: dict(counts) for name, counts in backends.items()},
        "next_steps": len(report["next_steps"]),
    }
    summary["text"] = summary_text(summary)
    return summary


def summary_text(summary: Mapping[str, Any]) -> str:
    """The report in one line."""
    parts = [f"{summary['hosts']} host{'' if summary['hosts'] == 1 else 's'}: {summary['ok']} ok"]
    words = (("attention", "to mend"), ("failed", "failed"), ("unreachable", "not reached"))
    parts += [f"{summary[key]} {word}" for key, word in words if summary[key]]
    if summary["services_asked"]:
        parts.append(f"{summary['services_ready']} of {summary['services_asked']} services ready")
    if summary["plans_refused"]:
        parts.append(f"{summary['plans_refused']} plans refused")
    return ", ".join(parts)


# The terminal

COLUMNS = ("host", "backend", "before", "cause", "remedy", "after", "service")
HEADINGS = {"before": "state", "after": "after"}


def rows(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row a host and backend, columns as in ``COLUMNS``; ``after`` is empty where nothing was changed."""
    table = []
    for host, entry in report["hosts"].items():
        empty = dict.fromkeys(COLUMNS, "")
        if not entry["reached"]:
            table.append({**empty, "host": host, "before": "not probed", "cause": "not_probed"})
            continue
        service = service_text(entry)
        several = len(entry["venvs"]) > 1
        done = False
        for path, venv in entry["venvs"].items():
            for name, backend in venv["backends"].items():
                done = True
                before, after = backend["before"], backend["after"]
                moved = after["state"] != before["state"]
                expected = f"{backend['expected']} (expected)" if backend["expected"] else ""
                cause = before["code"] or ""
                table.append(
                    {
                        "host": host,
                        "backend": f"{name} ({path})" if several else name,
                        "before": before["state"],
                        "cause": "" if cause == before["state"] else cause,
                        "remedy": _remedy_text(backend),
                        "after": after["state"] if moved else expected,
                        "service": service,
                    }
                )
            if not venv["backends"]:
                done = True
                state = str(venv["state"] or "unknown")
                code = venv["code"] or ""
                cause = path if code in ("", state) else f"{code}: {path}"
                table.append(
                    {**empty, "host": host, "backend": "-", "before": state, "cause": cause, "service": service}
                )
        if not done:
            table.append({**empty, "host": host, "before": "-", "service": service})
    return table


def _passed_over(record: Mapping[str, Any], venv: str, backend: str) -> Optional[str]:
    """What a plan took instead of a backend that it looked at and could not use."""
    for plan in _of_venv(record["plans"], venv):
        for decision in plan.get("decisions") or []:
            candidates = (decision.get("evidence") or {}).get("candidates") or {}
            for name, seen in candidates.items():
                if name.replace("_", "") == backend.replace("_", "") and not seen.get("usable"):
                    return str(decision.get("answer"))
    return None


def _remedy_text(backend: Mapping[str, Any]) -> str:
    remedy = backend["remedy"]
    if remedy and remedy["required"]:
        return str(remedy["summary"] or remedy["kind"] or "")
    if backend["before"]["state"] == "ok":
        return ""
    if not backend["wanted"]:
        return f"(plan falls back: {backend['passed_over']})" if backend["passed_over"] else "(not wanted)"
    return "(the service does without)" if backend["serves_without"] else "(by hand, see below)"


def service_text(entry: Mapping[str, Any]) -> str:
    """The instances' states in a few words."""
    texts = []
    named = [(name, item) for name, item in entry["instances"].items() if item["service"] or item["rejected"]]
    for name, item in named:
        code = (item["cause"] or {}).get("code")
        if item["rejected"]:
            text = f"refused: {item['rejected'][0].get('code')}"
        elif item["ready"] is not None:
            text = f"{item['state']}: {code}" if code and not item["ready"] else str(item["state"])
        else:
            text = str(item["state"] or "no unit")
        texts.append(text if len(named) == 1 else f"{name} {text}")
    if entry["failure"]:
        texts.append(f"failed: {entry['failure'].get('task')}")
    return ", ".join(texts) or "-"


def fold(hosts: Sequence[str]) -> str:
    """Shorten names that differ in one number: ``gpu-[001-004,007].example``."""
    numbers: dict[Any, list[int]] = {}
    for host in hosts:
        match = _NUMBERED.match(host)
        if match:
            digits = match.group(2)
            # Only numbers written with zeros have a fixed width; 9 and 10 belong together as much as 09 and 10.
            numbers.setdefault((match.group(1), match.group(3), len(digits)), []).append(int(digits))
        else:
            numbers.setdefault(host, [])
    padded = {
        (head, tail, width)
        for (head, tail, width), found in ((key, value) for key, value in numbers.items() if isinstance(key, tuple))
        if any(len(str(number)) < width for number in found)
    }
    merged: dict[Any, list[int]] = {}
    for key, found in numbers.items():
        if isinstance(key, tuple) and key not in padded:
            key = (key[0], key[1], 0)
        merged.setdefault(key, []).extend(found)
    texts = []
    for key, found in merged.items():
        if not isinstance(key, tuple):
            texts.append(str(key))
            continue
        head, tail, width = key
        spans = _spans(sorted(set(found)))
        shown = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in spans]
        body = f"[{','.join(shown)}]" if len(set(found)) > 1 else shown[0]
        texts.append(f"{head}{body}{tail}")
    return ", ".join(texts)


# The last number of the first label, or of an address.
_NUMBERED = re.compile(r"([\d.]*\.|[^.]*?)(\d{1,8})((?:[^\d.][^.\d]*)?(?:\.[^\n]*[A-Za-z][^\n]*)?)\Z")


def named(hosts: Sequence[str], longest: int) -> str:
    """Name hosts in about ``longest`` characters: folded, or the first and how many more."""
    text = fold(hosts)
    if len(text) > longest:
        return f"{hosts[0]} and {len(hosts) - 1} more"
    return text if text == hosts[0] else f"{text} ({len(hosts)})"


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def _folded(table: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows that say the same of many hosts become one, in the order of the first host."""
    blocks: dict[str, list[Mapping[str, str]]] = {}
    for row in table:
        blocks.setdefault(row["host"], []).append(row)
    alike: dict[Any, list[str]] = {}
    for host, mine in blocks.items():
        alike.setdefault(tuple(tuple(row[c] for c in COLUMNS[1:]) for row in mine), []).append(host)
    folded = []
    for hosts in alike.values():
        name = hosts[0] if len(hosts) == 1 else named(hosts, 100)
        folded += [{**row, "host": name} for row in blocks[hosts[0]]]
    return folded


def report_table(found: Mapping[str, Any], width: int = 140, paint: Optional[Paint] = None) -> str:
    """Return a report, or the report of ``records``, as text of at most ``width`` (100 or more) columns.

    ``paint(text, state)`` colours a cell.
    """
    report = found if "hosts" in found and "schema" in found else document(found)
    paint = paint or (lambda text, state: text)
    table = rows(report)
    if len(report["hosts"]) >= FOLD_FROM:
        table = _folded(table)
    lines = _table_lines(table, width, paint)
    lines += _step_lines(report, width)
    lines += _note_lines(report, width)
    lines += ["", report["summary"]["text"]]
    return "\n".join(lines)


def _table_lines(table: Sequence[Mapping[str, str]], width: int, paint: Paint) -> list[str]:
    columns = [
        c for c in COLUMNS if c in ("host", "backend", "before") or any(row[c] not in ("", "-") for row in table)
    ]
    limits = {"host": 34, "backend": 40, "before": 20, "cause": 34, "after": 20, "service": 34}
    widths = {c: max([len(HEADINGS.get(c, c))] + [len(row[c]) for row in table]) for c in columns}
    widths = {c: min(w, limits.get(c, w)) for c, w in widths.items()}
    gaps = 2 * (len(columns) - 1)
    # The remedy is prose: it takes what is left, then the widest of the others gives way.
    over = sum(widths.values()) + gaps - width
    for column, least in (
        ("remedy", 24),
        ("service", 14),
        ("cause", 14),
        ("host", 14),
        ("backend", 9),
        ("after", 10),
        ("before", 10),
        ("remedy", 18),
    ):
        if column in widths and over > 0:
            given = min(over, max(0, widths[column] - least))
            widths[column] -= given
            over -= given
    lines = ["  ".join(HEADINGS.get(c, c).upper().ljust(widths[c]) for c in columns).rstrip()]
    blocks: list[list[Mapping[str, str]]] = []
    for row in table:
        if not blocks or blocks[-1][0]["host"] != row["host"]:
            blocks.append([])
        blocks[-1].append(row)
    roomy = len(table) > 8
    for number, block in enumerate(blocks):
        if number and roomy:
            lines.append("")
        lines += _block_lines(block, columns, widths, paint)
    return lines


def _block_lines(
    block: Sequence[Mapping[str, str]], columns: Sequence[str], widths: Mapping[str, int], paint: Paint
) -> list[str]:
    """The rows of one host. Its name and service stand once and may run on beside the rows below."""
    cells: list[dict[str, tuple[str, str]]] = []
    for row in block:
        own = {c: _wrap(row[c], widths[c]) for c in columns if c not in ("host", "service")}
        for index in range(max(len(cell) for cell in own.values())):
            cells.append({c: (cell[index] if index < len(cell) else "", row[c]) for c, cell in own.items()})
    for column in ("host", "service"):
        if column in columns:
            for index, text in enumerate(_wrap(block[0][column], widths[column])):
                if index == len(cells):
                    cells.append({})
                cells[index][column] = (text, block[0][column])
    lines = []
    for line in cells:
        parts = []
        for column in columns:
            text, whole = line.get(column, ("", ""))
            text = text.ljust(widths[column])
            parts.append(paint(text, whole) if column in ("before", "after", "service") else text)
        lines.append("  ".join(parts).rstrip())
    return lines


def _wrap(text: str, width: int) -> list[str]:
    # Names of packages and causes are broken at their own joints before anywhere else.
    return textwrap.wrap(" ".join(text.split()), max(width, 4), break_on_hyphens=False) or [""]


def _step_lines(report: Mapping[str, Any], width: int, most: int = 12) -> list[str]:
    steps = report["next_steps"]
    if not steps:
        return []
    lines = ["", "WHAT TO DO NEXT"]
    for number, step in enumerate(steps[:most], 1):
        subject = " ".join(str(step[key]) for key in ("backend", "code") if step.get(key))
        hosts = f"{step['count']} host{'' if step['count'] == 1 else 's'}"
        optional = "" if step["required"] else ", optional"
        text = f"{hosts}{optional}: {subject + ': ' if subject else ''}{step['summary']} [{named(step['hosts'], 120)}]"
        lines += textwrap.wrap(text, width, initial_indent=f"{number:>3}. ", subsequent_indent="     ")
    if len(steps) > most:
        lines.append(f"     and {len(steps) - most} more: see the report's files")
    return lines


def _note_lines(report: Mapping[str, Any], width: int, most: int = 12) -> list[str]:
    notes = report["notes"]
    if not notes:
        return []
    lines = ["", "WARNINGS AND WHAT PLANS DO WITHOUT"]
    for note in notes[:most]:
        text = f"{note['code']}: {note['text']} [{named(note['hosts'], 120)}]"
        lines += textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
    if len(notes) > most:
        lines.append(f"    and {len(notes) - most} more: see the report's files")
    return lines
