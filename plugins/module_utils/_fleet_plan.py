# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the gate, the waves and the builders of a run, over the plans of all its hosts (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _fingerprint, _pairs


class Unit(NamedTuple):
    """Hosts that roll together, because instances over several hosts join them; ``names`` are their instances."""

    hosts: tuple[str, ...]
    names: tuple[tuple[str, tuple[str, ...]], ...]  # (instance, its hosts among these)
    keys: frozenset[tuple[str, ...]]  # redundancy groups that it is a member of


def fleet_plan(
    hosts: Mapping[str, Mapping[str, Any]],
    settings: Optional[Mapping[str, Any]] = None,
    outside: Iterable[str] = (),
) -> dict[str, Any]:
    """Judge the plans of a run together; returns ``fleet`` as in contracts.md, with ``message`` for people.

    ``hosts`` are those of the play, in order: ``{name: {intents, plans: {instance: plan}, probe, fingerprint,
    seen: {instance: {sglang, model}}, unreachable: bool, reason: str}}``. ``outside`` are inventory hosts that the run
    does not reach (``--limit``). ``settings``: ``waves``, ``on_rejection`` and ``on_unreachable`` for the whole run;
    without them what each host's own intents say. Nothing is changed, nothing raises on bad plans.
    """
    settings = settings or {}
    rejections: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}

    def choice(name: str, key: str) -> Any:
        return settings.get(key) or (hosts[name].get("intents") or {}).get("settings", {}).get(key)

    away = {name: str(host.get("reason") or "unreachable") for name, host in hosts.items() if host.get("unreachable")}
    for name, reason in away.items():
        if choice(name, "on_unreachable") == "skip":
            skipped[name] = reason
        else:
            rejections.append(
                _row(name, None, "host_unreachable", f"{name} was not probed: {reason}", "sglang_on_unreachable: skip")
            )
    refused = []
    for name, host in hosts.items():
        if name in away:
            continue
        for instance, plan in (host.get("plans") or {}).items():
            for row in plan.get("rejections") or []:
                refused.append({**row, "host": name, "instance": instance})
    members = _members(hosts)
    refused += _membership(hosts, members, set(outside), away)
    warnings: list[dict[str, Any]] = []
    _compare(hosts, away, refused, warnings)
    refused = _unique(refused)
    units, alone = _units(hosts, members, away)
    for row in refused:
        if choice(row["host"], "on_rejection") == "skip":
            skipped.setdefault(row["host"], f"plan refused: {row['code']}")
        else:
            rejections.append(row)
    kept = []
    for unit in units:
        out = [name for name in unit.hosts if name in skipped]
        if not out:
            kept.append(unit)
            continue
        for name in unit.hosts:
            skipped.setdefault(name, f"rolls together with {out[0]}, which is left out")
    accepted = not rejections
    cut: list[list[Unit]] = []
    if accepted:
        cut = _waves(hosts, kept, settings.get("waves"), warnings)
        warnings += _redundancy(units, kept)
    order = [name for wave in cut for unit in wave for name in unit.hosts]
    fleet = {
        "accepted": accepted,
        "rejections": rejections,
        "refused": refused,
        "warnings": warnings,
        "skipped": [{"host": name, "reason": skipped[name]} for name in hosts if name in skipped],
        "waves": [[{"instance": name, "hosts": list(on)} for unit in wave for name, on in unit.names] for wave in cut],
        "serial": [sum(len(unit.hosts) for unit in wave) for wave in cut],
        "order": order,
        "idle": alone,
        "builders": builders(
            {name: hosts[name] for name in (order or hosts) if name not in away and name not in skipped}
        ),
    }
    if fleet["builders"]:
        fleet["wheels"] = keepers({name: host for name, host in hosts.items() if name not in away})
    fleet["message"] = fleet_text(fleet, len(hosts))
    return fleet


def _row(host: str, instance: Optional[str], code: str, message: str, suggestion: str, **more: Any) -> dict[str, Any]:
    return {
        "host": host,
        "instance": instance,
        "code": code,
        "message": message,
        "flag": None,
        "variable": None,
        "value": None,
        "numbers": {},
        "suggestion": suggestion,
        **more,
    }


def _unique(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # A problem of the host stands in the plan of each of its instances: once is enough.
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        seen.setdefault((row["host"], row["code"], row["message"]), row)
    return list(seen.values())


def _intents_of(host: Mapping[str, Any]) -> Mapping[str, Any]:
    instances = (host.get("intents") or {}).get("instances") or {}
    return instances if isinstance(instances, Mapping) else {}


def _members(hosts: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """``{(instance, its hosts): [hosts of the play that have it]}`` of the instances over several hosts."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, host in hosts.items():
        for instance, intent in _intents_of(host).items():
            wanted = tuple(intent.get("hosts") or ())
            if len(wanted) > 1:
                found.setdefault((instance, wanted), []).append(name)
    return found


def _membership(
    hosts: Mapping[str, Mapping[str, Any]],
    members: Mapping[tuple[str, tuple[str, ...]], Sequence[str]],
    outside: set[str],
    away: Mapping[str, str],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (instance, wanted), having in members.items():
        where = ", ".join(wanted)
        limited = [name for name in wanted if name not in hosts and name in outside]
        unknown = [name for name in wanted if name not in hosts and name not in outside]
        without = [name for name in wanted if name in hosts and name not in having and name not in away]
        for name in having:
            if limited:
                rows.append(
                    _row(
                        name,
                        instance,
                        "limit_covers_part_of_instance",
                        f"instance {instance} is over {where}, and the limit leaves out {', '.join(limited)}",
                        f"--limit {','.join(wanted)}, or no limit",
                        variable="sglang_hosts",
                        value=list(wanted),
                    )
                )
            if unknown:
                rows.append(
                    _row(
                        name,
                        instance,
                        "instance_host_unknown",
                        f"instance {instance} names {', '.join(unknown)}, which the group does not have",
                        "names of hosts as in the inventory",
                        variable="sglang_hosts",
                        value=list(wanted),
                    )
                )
            if without:
                rows.append(
                    _row(
                        name,
                        instance,
                        "instance_hosts_disagree",
                        f"instance {instance} names {', '.join(without)}, where it is not defined with the same hosts",
                        "define the instance in a group that has all its hosts",
                        variable="sglang_hosts",
                        value=list(wanted),
                    )
                )
        rows += _ranks(hosts, instance, [name for name in wanted if name in having and name not in away])
    return rows


def _ranks(hosts: Mapping[str, Mapping[str, Any]], instance: str, having: Sequence[str]) -> list[dict[str, Any]]:
    """Ranks of one instance whose plans do not fit together."""
    plans = [(name, (hosts[name].get("plans") or {}).get(instance)) for name in having]
    known = [(name, plan) for name, plan in plans if plan]
    rows = []
    for name, plan in known[1:]:
        first, leader = known[0]
        ours = {key: value for key, value in (plan.get("effective") or {}).items() if key != "node_rank"}
        theirs = {key: value for key, value in (leader.get("effective") or {}).items() if key != "node_rank"}
        differing = sorted(key for key in set(ours) | set(theirs) if ours.get(key) != theirs.get(key))
        if (plan.get("unit") or {}).get("rendezvous") != (leader.get("unit") or {}).get("rendezvous"):
            differing.append("rendezvous")
        if differing:
            told = ", ".join(f"{key} {theirs.get(key)} there and {ours.get(key)} here" for key in differing)
            rows.append(
                _row(
                    name,
                    instance,
                    "ranks_disagree",
                    f"{name} and {first} are ranks of instance {instance} and differ: {told}",
                    "the same variables, GPUs and packages on all hosts of the instance",
                    numbers={key: [theirs.get(key), ours.get(key)] for key in differing},
                )
            )
    return rows


def _units(
    hosts: Mapping[str, Mapping[str, Any]],
    members: Mapping[tuple[str, tuple[str, ...]], Sequence[str]],
    away: Mapping[str, str],
) -> tuple[list[Unit], list[str]]:
    """Units in the order of the play, and hosts without anything to roll."""
    root = {name: name for name in hosts}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    ranks: dict[str, tuple[int, ...]] = {}
    place = {name: position for position, name in enumerate(hosts)}
    for (_instance, wanted), having in members.items():
        group = [name for name in wanted if name in hosts]
        for position, name in enumerate(group):
            ranks[name] = (place[group[0]], position)
            root[find(name)] = find(group[0])
        del having
    grouped: dict[str, list[str]] = {}
    for name in hosts:
        grouped.setdefault(find(name), []).append(name)
    units = []
    alone = []
    for names in grouped.values():
        names.sort(key=lambda name: ranks.get(name, (place[name], 0)))
        has: dict[str, list[str]] = {}
        keys: set[tuple[str, ...]] = set()
        for name in names:
            instances = _intents_of(hosts[name])
            for instance, intent in instances.items():
                has.setdefault(instance, []).append(name)
                keys |= _keys(instance, intent, (hosts[name].get("plans") or {}).get(instance) or {})
            if not instances and name not in away:
                plans = hosts[name].get("plans") or {}
                if any(plan.get("remedies") or plan.get("rejections") for plan in plans.values()):
                    has.setdefault("default", []).append(name)
                else:
                    alone.append(name)
        if not has and all(name in alone for name in names):
            continue
        units.append(Unit(tuple(names), tuple((name, tuple(on)) for name, on in has.items()), frozenset(keys)))
    return units, alone


def _keys(instance: str, intent: Mapping[str, Any], plan: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Redundancy groups of an instance: a wave never takes all members of one that has several."""
    group = str(intent.get("replica_group") or "")
    role = _pairs.role_of(intent, plan)
    keys: set[tuple[str, ...]] = set()
    if intent.get("failure_domain"):
        keys.add(("domain", group or instance, str(intent["failure_domain"])))
    if role:
        keys.add(("role", _pairs.group_of(intent), role))
    elif group:
        keys.add(("group", group))
    return keys


def _compare(
    hosts: Mapping[str, Mapping[str, Any]],
    away: Mapping[str, str],
    refused: list[dict[str, Any]],
    warnings: list[dict[str, Any]],
) -> None:
    """Add what prefill and decode instances of a group do not have in common to the rows that it belongs to."""
    parts = []
    for name, host in hosts.items():
        for instance, intent in _intents_of(host).items():
            plan = (host.get("plans") or {}).get(instance) or {}
            role, on = _pairs.role_of(intent, plan), tuple(intent.get("hosts") or [name])
            if role and name not in away and on[0] == name:
                seen = (host.get("seen") or {}).get(instance) or {}
                parts.append(
                    _pairs.Part(
                        _pairs.group_of(intent), role, instance, on, plan, seen.get("sglang"), seen.get("model") or {}
                    )
                )
    for found in _pairs.differences(parts):
        about = {"flag" if str(found.about).startswith("--") else "variable": found.about} if found.about else {}
        for part, value in zip(found.parts, found.values):
            row = _row(part.hosts[0], part.instance, found.code, found.message, found.suggestion, value=value, **about)
            (refused if found.refused else warnings).append(row)


def _redundancy(units: Sequence[Unit], kept: Sequence[Unit]) -> list[dict[str, Any]]:
    """A warning for each group of which the run takes the only member, or for which nothing of a role is left."""
    rows = []
    all_of: dict[tuple[str, ...], list[Unit]] = {}
    for unit in units:
        for key in unit.keys:
            all_of.setdefault(key, []).append(unit)
    roles: dict[str, set[str]] = {}
    for kind, group, *role in all_of:
        if kind == "role":
            roles.setdefault(group, set()).update(role)
    for key in sorted(all_of):
        kind, group, *role = key
        what = f"{role[0]} instance" if role else "instance"
        rolled = [unit for unit in all_of[key] if unit in kept]
        out = [name for unit in all_of[key] if unit not in kept for name in unit.hosts]
        if kind == "domain":
            continue
        if not rolled:
            message = f"every {what} of group {group} is left out: {_where(out)}; what they serve is not looked after"
            rows.append(_row(out[0], None, "group_left_out", message, "mend them, then the same command again"))
        elif len(rolled) == 1:
            left = f"; left out: {_where(out)}" if out else ""
            message = (
                f"group {group} has one {what} in this run ({_where(rolled[0].hosts)}{left}): "
                "its requests fail while it restarts"
            )
            rows.append(
                _row(rolled[0].hosts[0], None, "no_redundancy", message, "a second one, or a time without load")
            )
        if role and len(roles[group]) == 1:
            other = "decode" if role[0] == "prefill" else "prefill"
            message = f"group {group} has no {other} instance in this run: {role[0]} only, on {len(all_of[key])} hosts"
            on = all_of[key][0].hosts[0]
            rows.append(_row(on, None, "pair_incomplete", message, "the same sglang_replica_group for both roles"))
    return rows


def _waves(
    hosts: Mapping[str, Mapping[str, Any]], kept: Sequence[Unit], given: Any, warnings: list[dict[str, Any]]
) -> list[list[Unit]]:
    """The waves; where hosts ask for different ones, the way that takes the most waves, and a warning."""
    asked: dict[str, tuple[list[Any], list[str]]] = {}
    for name in [name for unit in kept for name in unit.hosts]:
        own = given or (hosts[name].get("intents") or {}).get("settings", {}).get("waves") or [1, "10%"]
        asked.setdefault(str(own), (list(own), []))[1].append(name)
    if not asked:
        return []
    cuts = {told: _cut(kept, sizes) for told, (sizes, _on) in asked.items()}
    slowest = max(cuts, key=lambda told: len(cuts[told]))
    if len(cuts) > 1:
        told = "; ".join(f"{sizes} on {_where(on)}" for sizes, on in asked.values())
        warnings.append(
            _row(
                next(name for told, (_s, on) in asked.items() if told != slowest for name in on),
                None,
                "waves_disagree",
                f"sglang_waves differs between the hosts of this run: {told}; {slowest} is used, with the most waves",
                "one value for the group, or a run for each with --limit",
                variable="sglang_waves",
            )
        )
    return cuts[slowest]


def _size(size: Any, total: int) -> int:
    if isinstance(size, str) and size.endswith("%"):
        return max(1, int(total * float(size[:-1]) / 100))
    return max(1, int(size))


def _cut(units: Sequence[Unit], waves: Sequence[Any]) -> list[list[Unit]]:
    total = len(units)
    all_of: dict[tuple[str, ...], int] = {}
    for unit in units:
        for key in unit.keys:
            all_of[key] = all_of.get(key, 0) + 1
    cut: list[list[Unit]] = []
    waiting = list(units)
    while waiting:
        size = _size(waves[min(len(cut), len(waves) - 1)], total)
        wave: list[Unit] = []
        later: list[Unit] = []
        taken: dict[tuple[str, ...], int] = {}
        for unit in waiting:
            if len(wave) == size:
                later.append(unit)
                continue
            whole = [key for key in unit.keys if all_of[key] > 1 and taken.get(key, 0) + 1 >= all_of[key]]
            if wave and whole:
                later.append(unit)
                continue
            wave.append(unit)
            for key in unit.keys:
                taken[key] = taken.get(key, 0) + 1
        cut.append(wave)
        waiting = later
    return cut


def builders(hosts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One builder a fingerprint, of the hosts whose plan has a build among its required remedies."""
    wanted = []
    for name, host in hosts.items():
        steps = [
            step
            for plan in (host.get("plans") or {}).values()
            for remedy in plan.get("remedies") or []
            if remedy.get("required")
            for step in remedy.get("steps") or []
        ]
        if any(step.get("action") == "build" for step in steps):
            wanted.append({"host": name, "fingerprint": host.get("fingerprint") or provisional_fingerprint(host)})
    return _fingerprint.share_builds(wanted)


def keepers(hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """``{fingerprint: host}``: who keeps a DeepEP wheel of an earlier run (``wheels`` of the host)."""
    found: dict[str, str] = {}
    for name, host in hosts.items():
        for print_ in host.get("wheels") or []:
            found.setdefault(str(print_), name)
    return found


def provisional_fingerprint(host: Mapping[str, Any]) -> str:
    """The fingerprint as far as a probe tells it; the build role replaces it with the one of the real build."""
    probe = host.get("probe") or {}
    settings = (host.get("intents") or {}).get("settings") or {}
    venv, torch = probe.get("venv") or {}, probe.get("torch") or {}
    toolkits = probe.get("toolkits") or {}
    best: Mapping[str, Any] = next(
        (kit for kit in toolkits.get("toolkits") or [] if kit.get("path") == toolkits.get("best")), {}
    )
    version = str(venv.get("python_version") or "").split(".")
    devices = (probe.get("gpus") or {}).get("devices") or []
    return _fingerprint.fingerprint(
        {
            "revision": settings.get("deepep_revision"),
            "python_tag": "cp" + "".join(version[:2]) if len(version) > 1 else None,
            "torch": torch.get("version"),
            "torch_cuda": torch.get("cuda"),
            "toolkit": best.get("version"),
            "archs": settings.get("deepep_archs")
            or [gpu["compute_capability"] for gpu in devices if gpu.get("compute_capability")],
            "machine": venv.get("machine"),
            "libc": venv.get("libc"),
        }
    )


# So many texts of one code are told in full: pids and figures differ from host to host, the fault does not.
_ALIKE = 5


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def fleet_text(fleet: Mapping[str, Any], total: Optional[int] = None) -> str:
    """What the run will do, or every reason why it does nothing, with host, variable, value and remedy."""
    lines = []
    if not fleet["accepted"]:
        rows = fleet["rejections"]
        names = list(dict.fromkeys(row["host"] for row in rows))
        # Equal reasons on many hosts are one line: a fleet with one misspelt variable must stay readable.
        same: dict[tuple[str, str, Optional[str]], list[str]] = {}
        for row in rows:
            same.setdefault((str(row["code"]), *_told(row)), []).append(row["host"])
        lines.append(
            f"Nothing is changed: {_count(len(same), 'reason')} on {_count(len(names), 'host')}"
            + (f" of {total}" if total and total > len(names) else "")
            + "."
        )
        # What stops most hosts comes first.
        by_code: dict[str, list[tuple[str, Optional[str]]]] = {}
        for told in sorted(same, key=lambda told: -len(set(same[told]))):
            by_code.setdefault(told[0], []).append(told[1:])
        for code, texts in by_code.items():
            folded = len(texts) > _ALIKE
            if folded:
                on = [name for text in texts for name in same[(code, *text)]]
                lines.append(f"  {_where(on)}: {code}, in {len(texts)} forms; the first of them:")
            for text, suggestion in texts[: 2 if folded else None]:
                lines.append(f"  {_where(same[(code, text, suggestion)])}: {text}")
                if suggestion:
                    lines.append(f"    instead: {suggestion}")
    else:
        sizes = ", ".join(str(len(wave)) for wave in fleet["waves"][:8]) + (", …" if len(fleet["waves"]) > 8 else "")
        waves = _count(len(fleet["waves"]), "wave")
        lines.append(f"{_count(len(fleet['order']), 'host')} in {waves} (instances: {sizes or 'none'}).")
    if fleet["skipped"]:
        lines.append(f"Left out: {_count(len(fleet['skipped']), 'host')}.")
        why: dict[str, list[str]] = {}
        for row in fleet["skipped"]:
            why.setdefault(row["reason"], []).append(row["host"])
        lines += [f"  {_where(on)}: {reason}" for reason, on in why.items()]
    warned: dict[str, Optional[str]] = {}
    for row in fleet.get("warnings") or []:
        warned.setdefault(f"{row['message']} [{row['code']}]", row.get("suggestion"))
    for text, suggestion in warned.items():
        lines.append(f"Warning: {text}" + (f"; instead: {suggestion}" if suggestion else ""))
    for row in fleet["builders"]:
        lines.append(
            f"DeepEP is built on {row['builder']} for {_count(len(row['peers']) + 1, 'host')}, "
            "unless its wheel is there already."
        )
    return "\n".join(lines)


def _told(row: Mapping[str, Any]) -> tuple[str, Optional[str]]:
    text = f"{row['message']} [{row['code']}]"
    about = row.get("variable") or row.get("flag")
    if about and str(about) not in str(row["message"]):
        text += f" ({about}{'' if row.get('value') is None else '=' + str(row['value'])})"
    return text, row.get("suggestion")


def _where(names: Sequence[str]) -> str:
    """``h1, h2``; many hosts by their number and the first of them."""
    shown = list(dict.fromkeys(names))
    if len(shown) <= 10:
        return ", ".join(shown)
    return f"on {len(shown)} hosts ({', '.join(shown[:5])}, …)"
