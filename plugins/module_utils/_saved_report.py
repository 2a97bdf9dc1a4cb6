# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: apply a saved report where hosts are still as it saw them (pure)."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

# SGLang's word for a backend, where it is not the backend's name.
_FLAG_NAMES = {"deepep": "deep_ep"}


class ReportError(ValueError):
    """The file is no report that can be applied."""


def seen(probes: Mapping[str, Any]) -> dict[str, str]:
    """Return what the plans of a host rest on, flat: ``{"<venv> torch": "2.14.1+cu130", "gpus": "8 x NVIDIA H200"}``.

    Left out is what changes while a host just works: memory in use, processes, the level of the evidence, prose.
    """
    found: dict[str, str] = {}
    for venv, probe in probes.items():
        about = probe.get("venv") or {}
        found[f"{venv} state"] = _text(about.get("state"))
        for name, value in (
            ("python", about.get("python_version")),
            ("torch", (probe.get("torch") or {}).get("version")),
            ("sglang", (probe.get("sglang") or {}).get("version")),
        ):
            found[f"{venv} {name}"] = _text(value)
        for name, backend in (probe.get("backends") or {}).items():
            uses = dict(backend.get("uses") or {}) or {"": backend}
            for use, item in uses.items():
                key = " ".join(part for part in (venv, name, use) if part)
                found[key] = " ".join(part for part in (_text(item.get("state")), _text(item.get("code"), "")) if part)
            versions = sorted(f"{d.get('name')} {d.get('version')}" for d in backend.get("distributions") or [])
            found[f"{venv} {name} distributions"] = ", ".join(versions) or "none"
        gpus = probe.get("gpus")
        if gpus:
            devices = gpus.get("devices") or []
            names = sorted(str(device.get("name")) for device in devices)
            found["gpus"] = ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or _text(
                gpus.get("state")
            )
            found["driver"] = _text(gpus.get("driver"))
        if probe.get("fabric"):
            found["fabric"] = _text(probe["fabric"].get("class"))
    return found


def _text(value: Any, empty: str = "unknown") -> str:
    return empty if value is None else str(value)


def fingerprint(probes: Mapping[str, Any]) -> str:
    """Return one word for ``seen(probes)``."""
    return hashlib.sha256(json.dumps(seen(probes), sort_keys=True).encode()).hexdigest()[:16]


def load(text: str, path: str) -> dict[str, Any]:
    """Return the report in ``text``. ReportError says what is wrong with the file at ``path`` and what to do."""
    try:
        report = json.loads(text)
    except ValueError as error:
        raise ReportError(f"sglang_apply_report: {path} is not JSON ({error}); name the report.json of a run") from None
    if not isinstance(report, dict) or "hosts" not in report or "plans" not in report:
        raise ReportError(
            f"sglang_apply_report: {path} is not a report of this collection; name the report.json of a run"
        )
    if report.get("schema") != 1:
        raise ReportError(
            f"sglang_apply_report: {path} has schema {report.get('schema')!r}, this version reads 1; "
            "run the probe playbook again and name its report.json"
        )
    return report


def differences(report: Mapping[str, Any], host: str, probes: Mapping[str, Any], plans: Mapping[str, Any]) -> list[str]:
    """Return a sentence for everything because of which the saved report must not be applied to ``host``.

    ``probes`` (venv → probe) and ``plans`` (instance → plan) are of now.
    """
    saved = report["hosts"].get(host)
    if saved is None:
        return ["it is not in the report"]
    if not saved.get("reached"):
        return ["it was not probed when the report was made"]
    problems = []
    if saved.get("fingerprint") != fingerprint(probes):
        before, now = saved.get("seen") or {}, seen(probes)
        for key in dict.fromkeys([*before, *now]):
            if before.get(key) != now.get(key):
                problems.append(f"{key} was {before.get(key, 'not there')}, is {now.get(key, 'not there')}")
    for name in dict.fromkeys([*saved.get("instances", {}), *plans]):
        planned = report["plans"].get((saved["instances"].get(name) or {}).get("plan"))
        if planned is None or name not in plans:
            problems.append(f"instance {name} is {'new' if planned is None else 'gone'}")
            continue
        problems += _plan_differences(name, planned, plans[name])
    return problems


def _plan_differences(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    problems = []
    before, after = _steps(saved), _steps(now)
    gone = [row for row in before if row not in after]
    new = [row for row in after if row not in before]
    problems += [f"{name}: the report's remedy '{row[1]}' is no longer planned" for row in gone]
    problems += [f"{name}: remedy '{row[1]}' is new" for row in new]
    for key in ("argv", "env"):
        if saved.get(key) != now.get(key):
            problems.append(f"{name}: the planned {'command line' if key == 'argv' else 'environment'} is another")
    return problems


def _steps(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (json.dumps([r.get("backend"), r.get("steps")], sort_keys=True), str(r.get("summary") or r.get("kind")))
        for r in plan.get("remedies") or []
        if r.get("required")
    ]


def _chosen(remedy: Mapping[str, Any], codes: Sequence[str], backends: Sequence[str]) -> bool:
    return (not codes or remedy.get("code") in codes) and (not backends or remedy.get("backend") in backends)


def _deployed(probes: Mapping[str, Any], venv: Optional[str], instance: str) -> bool:
    """Whether the host has a unit for the instance."""
    own = (probes.get(venv or "") or {}).get("instances") or {}
    service = (own.get(instance) or {}).get("service") or {}
    return service.get("state") not in (None, "absent", "not-found", "unknown")


def narrow(
    plans: Mapping[str, Any],
    probes: Mapping[str, Any],
    codes: Sequence[str] = (),
    backends: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the plans of a host with only the chosen remedies, for a run that mends and does not deploy.

    A plan that keeps no remedy is left alone: it is no service of this run and cannot be refused. A service that was
    never deployed is not started. Leaving out a remedy that the service itself needs is a rejection, because the
    service could not start after its venv was touched.
    """
    mended = {
        (plan.get("unit") or {}).get("venv")
        for plan in plans.values()
        if any(r.get("required") and _chosen(r, codes, backends) for r in plan.get("remedies") or [])
    }
    narrowed = {}
    for name, plan in plans.items():
        venv = (plan.get("unit") or {}).get("venv")
        required = [r for r in plan.get("remedies") or [] if r.get("required")]
        kept = [r for r in required if _chosen(r, codes, backends)]
        row = {**plan, "remedies": kept}
        if venv not in mended or not _deployed(probes, venv, name):
            row["service"] = False
            row["left_alone"] = {"service": bool(plan.get("service")), "rejections": list(plan.get("rejections") or [])}
            # Packages can be mended for a service that cannot be deployed yet; nothing else is done here.
            row["rejections"] = []
        elif plan.get("service"):
            row["rejections"] = list(plan.get("rejections") or []) + [
                _left_out(name, r) for r in required if r not in kept and _serves(plan, r)
            ]
        left = {(r.get("backend"), r.get("use")) for r in required if r not in kept}
        row["assumes"] = [a for a in plan.get("assumes") or [] if (a.get("backend"), a.get("use")) not in left]
        narrowed[name] = row
    return narrowed


def _serves(plan: Mapping[str, Any], remedy: Mapping[str, Any]) -> bool:
    used = {_FLAG_NAMES.get(str(value), str(value)) for value in (plan.get("effective") or {}).values()}
    return remedy.get("backend") in used


def _left_out(name: str, remedy: Mapping[str, Any]) -> dict[str, Any]:
    backend, code = remedy.get("backend"), remedy.get("code")
    return {
        "code": "remedy_left_out",
        "message": f"{name} needs {backend}, whose remedy ({code}) is not chosen; it would not start",
        "flag": None,
        "variable": "sglang_remediate_codes",
        "value": code,
        "numbers": {},
        "suggestion": f"choose {code} and {backend} too, or set neither sglang_remediate_codes nor _backends",
    }


def choices(value: Any, variable: str, known: Iterable[str] = ()) -> list[str]:
    """Return the words of a list or of a survey's answer (``a, b``). ValueError names variable and word."""
    if value in (None, "", []):
        return []
    words = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    words = [str(word).strip() for word in words if str(word).strip()]
    allowed = set(known)
    for word in words:
        if allowed and word not in allowed:
            near = difflib.get_close_matches(word, allowed, 1)
            hint = f"did you mean {near[0]}?" if near else "the page of causes and the report name what can be given"
            raise ValueError(f"{variable}: {word!r} is not known; {hint}")
    return words


def apply_host(
    report: Optional[Mapping[str, Any]],
    host: str,
    probes: Mapping[str, Any],
    plans: Mapping[str, Any],
    codes: Sequence[str] = (),
    backends: Sequence[str] = (),
) -> dict[str, Any]:
    """Return ``{plans, refused}``: the narrowed plans, and a line when the saved report no longer fits."""
    found = differences(report, host, probes, plans) if report is not None else []
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        text = f"{host} is not as the report saw it: {'; '.join(found[:4])}{more}. Probe again and apply the new report"
        return {"plans": {}, "refused": [text]}
    return {"plans": narrow(plans, probes, codes, backends), "refused": []}
