# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: does what runs equal what was planned, and which backend does it really use?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._log_events import HIDDEN, is_secret_name, redact_argv
from ansible_collections.gpufleet.sglang.plugins.module_utils._readiness import argv_difference

# Which mapped files prove that a process has loaded a backend's compiled part.
LIBRARIES: tuple[tuple[str, str], ...] = (
    ("deep_ep", r"/(?:deep_ep|deep_ep_v25)/[^/]*\.so|/deep_ep_cpp[^/]*\.so|/hybrid_ep_cpp[^/]*\.so"),
    ("mooncake", r"/mooncake/[^/]*\.so|/mooncake[^/]*\.libs/"),
    ("nixl", r"/(?:nixl|nixl_cu\d+|nixl_ep|nixl_ep_cu\d+)/[^/]*\.so|/libnixl[^/]*\.so|/nixl[^/]*\.libs/"),
    ("mori", r"/mori/[^/]*\.so|/mori_\w+\.so|/libmori[^/]*\.so"),
    ("pplx", r"/pplx_kernels/[^/]*\.so"),
    ("flashinfer", r"/flashinfer/[^/]*\.so"),
)

# Values of SGLang's flags, and the backend whose library carries them.
USES: Mapping[str, Mapping[str, str]] = {
    "moe_a2a_backend": {
        "deepep": "deep_ep",
        "deepep_v2": "deep_ep",
        "mooncake": "mooncake",
        "nixl": "nixl",
        "mori": "mori",
        "pplx": "pplx",
        "flashinfer": "flashinfer",
    },
    "disaggregation_transfer_backend": {
        "mooncake": "mooncake",
        "mooncake_tcp": "mooncake",
        "nixl": "nixl",
        "mori": "mori",
    },
    "elastic_ep_backend": {"mooncake": "mooncake", "nixl": "nixl"},
}
_ALIASES = {
    "tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size", "pipeline_parallel_size": "pp_size",
    "ep": "ep_size", "expert_parallel_size": "ep_size", "dp": "dp_size", "data_parallel_size": "dp_size",
    "model": "model_path",
}  # fmt: skip


def loaded_backends(maps: Iterable[str]) -> dict[str, list[str]]:
    """The backends whose compiled parts are mapped: ``{name: [paths]}``."""
    paths = list(maps)
    found: dict[str, list[str]] = {}
    for name, pattern in LIBRARIES:
        hits = sorted({path for path in paths if re.search(pattern, path)})
        if hits:
            found[name] = hits
    return found


def flags_of(argv: Sequence[str]) -> dict[str, Any]:
    """The flags of an SGLang command line: ``{"tp_size": "8", "enable_eplb": True, "x": ["1", "2"]}``."""
    flags: dict[str, Any] = {}
    name: Optional[str] = None
    values: list[str] = []

    def close() -> None:
        if name is not None:
            flags[_ALIASES.get(name, name)] = True if not values else values[0] if len(values) == 1 else list(values)

    for token in argv:
        if token.startswith("--") and len(token) > 2:
            close()
            word, sep, value = token[2:].partition("=")
            name, values = word.replace("-", "_"), [value] if sep else []
        elif name is not None:
            values.append(token)
    close()
    return flags


def _same(want: Any, have: Any) -> bool:
    if isinstance(have, bool) or isinstance(want, bool):
        return str(want).lower() == str(have).lower()
    if isinstance(have, (int, float)) and not isinstance(want, (list, dict)):
        try:
            return float(want) == float(have)
        except (TypeError, ValueError):
            return False
    if isinstance(have, list):
        wanted = want if isinstance(want, list) else [want]
        return [str(one) for one in wanted] == [str(one) for one in have]
    if isinstance(want, str) and isinstance(have, str):
        return want == have or (want.startswith("/") and want.rstrip("/") == have.rstrip("/"))
    return str(want) == str(have)


def flag_drift(argv: Sequence[str], info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Flags of the planned argv that the server resolved to another value: ``{what, flag, planned, running}``.

    A flag that the server does not report is no drift; one that SGLang itself adjusts is told with both values.
    """
    drift = []
    for name, want in flags_of(argv).items():
        if name in ("config", "help") or name not in info:
            continue
        have = info[name]
        if is_secret_name(name):
            continue
        if not _same(want, have):
            drift.append({"what": "flag", "flag": "--" + name.replace("_", "-"), "planned": want, "running": have})
    return drift


def backend_in_use(
    wanted: Mapping[str, str], maps: Iterable[str], maps_complete: bool, log_backends: Iterable[str], served: bool
) -> dict[str, Any]:
    """Which backend really works: ``{name, evidence: [..], certain, expected, missing: [..]}``.

    ``name`` is the a2a backend if one is wanted, else the KV transfer's; None when nothing is wanted or seen. The
    setting in the arguments is no evidence; a mapped library, and the log line of its first use, are.
    """
    loaded = loaded_backends(maps)
    logged = set(log_backends)
    expected = {flag: USES.get(flag, {}).get(value) for flag, value in wanted.items()}
    names = [name for name in expected.values() if name]
    evidence = [f"loaded: {paths[0]}" for name, paths in loaded.items() if name in names or not names]
    evidence += [f"log: {name} told that it is in use" for name in sorted(logged)]
    missing = sorted({name for name in names if name not in loaded and name not in logged}) if maps_complete else []
    name = next((one for one in names if one in loaded or one in logged), None)
    if name and served:
        evidence.append("a generation was served")
    return {
        "name": name,
        "evidence": evidence,
        "certain": bool(name) and served and (name in logged or name in loaded),
        "expected": {flag: value for flag, value in expected.items() if value},
        "missing": missing,
    }


def verdict(
    plan: Mapping[str, Any],
    observation: Mapping[str, Any],
    server_info: Optional[Mapping[str, Any]],
    maps: Iterable[str],
    maps_complete: bool = True,
    log_backends: Iterable[str] = (),
    state: str = "ready",
) -> dict[str, Any]:
    """Compare what runs with the plan.

    :param plan: ``{argv, effective}`` of ``launch_plan`` (``argv`` as it stands in the unit).
    :param observation: ``observation`` of ``service_ready``.
    :param server_info: its ``server_info`` (None when the server told nothing).
    :param maps: its ``maps``; ``log_backends`` likewise.
    :returns: ``{ready, state, revision_ok, drift: [{what, …}], backend_in_use: {name, evidence, …}, ok}``;
        ``revision_ok`` is None when no argv could be compared. ``ok`` is what a monitor wants to know.
    """
    argv = list(plan.get("argv") or ())
    running = (observation.get("process") or {}).get("argv")
    drift: list[dict[str, Any]] = []
    revision_ok: Optional[bool] = None
    if argv and running:
        planned = redact_argv(argv)
        difference = argv_difference(running, argv if HIDDEN not in running else planned)
        revision_ok = difference is None
        if difference:
            drift.append({"what": "argv", "message": difference})
    if argv and server_info:
        drift += flag_drift(argv, server_info)
    wanted: dict[str, str] = {}
    source = dict(flags_of(argv))
    for flag, value in (server_info or {}).items():
        source.setdefault(flag, value)
    for flag in USES:
        value = source.get(flag)
        if isinstance(value, str) and value not in ("none", "null", ""):
            wanted[flag] = value
    if source.get("disaggregation_mode") in (None, "null"):
        wanted.pop("disaggregation_transfer_backend", None)
    ready = state == "ready"
    used = backend_in_use(wanted, maps, maps_complete, log_backends, ready)
    for name in used["missing"]:
        drift.append({"what": "backend", "backend": name, "message": f"{name} is wanted, and no process has loaded it"})
    return {
        "ready": ready,
        "state": state,
        "revision_ok": revision_ok,
        "drift": drift,
        "backend_in_use": used,
        "ok": ready and revision_ok is not False and not drift,
    }


def verdicts(
    plans: Mapping[str, Any], results: Iterable[Mapping[str, Any]], units: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return ``{instance: verdict}`` from what ``service_ready`` (verify) and the dry run of ``service_unit`` told.

    A verdict also has ``cause`` (of ``service_ready``), and a drift of the kind ``unit`` when the unit on the host, its
    environment or the libraries it runs on are not those of the plan.
    """
    by_unit = {unit["instance"]: unit for unit in units if unit.get("instance")}
    by_result = {result["item"]["key"]: result for result in results if result.get("item")}
    found = {}
    for name, plan in plans.items():
        result, unit = by_result.get(name) or {}, by_unit.get(name) or {}
        seen = verdict(
            {**plan, "argv": unit.get("argv") or plan.get("argv")},
            result.get("observation") or {},
            result.get("server_info"),
            result.get("maps") or (),
            bool(result.get("maps_complete")),
            result.get("log_backends") or (),
            str(result.get("state") or "unknown"),
        )
        if any((unit.get("needs") or {}).values()):
            changes = unit.get("differences") or []
            told = ", ".join(f"{item.get('what')} {item.get('name') or ''}".strip() for item in changes[:5])
            seen["drift"].append({"what": "unit", "message": f"site.yml would change it ({told or 'restart'})"})
            seen["ok"] = False
        found[name] = {**seen, "cause": result.get("cause")}
    return found


def verdict_text(found: Mapping[str, Any]) -> str:
    """Say in one line what is wrong with the instances that are not ok."""
    parts = []
    for name, seen in found.items():
        if seen["ok"]:
            continue
        reasons = [item["message"] for item in seen["drift"]]
        if not seen["ready"]:
            cause = seen.get("cause") or {}
            told = f"{cause['code']}: {cause['message']}" if cause.get("code") else ""
            reasons.insert(0, f"{seen['state']}" + (f" ({told})" if told else ""))
        parts.append(f"{name} is not as it should be: " + "; ".join(reasons))
    return ". ".join(parts)
