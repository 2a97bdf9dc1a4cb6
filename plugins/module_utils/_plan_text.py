# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: a plan in words, and its difference from what is running."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents

# Other names under which SGLang has taken these settings in all versions: a unit of others is full of them.
_ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "pipeline_parallel_size": "pp_size",
}


def plan_text(plan: Mapping[str, Any], host: Optional[str] = None) -> str:
    """The plan as a person reads it: command line, decisions, what changes first, warnings, and what was refused."""
    name = plan.get("instance") or "no service"
    lines = [f"{host}: {name}" if host else str(name)]
    if plan.get("argv"):
        lines += ["", "Command", *_command_lines(plan["argv"], plan.get("env") or {})]
    if plan.get("decisions"):
        lines += ["", "Decided"]
        for row in plan["decisions"]:
            answer = "nothing" if row["answer"] is None else row["answer"]
            lines.append(f"  {row['question']}: {answer}; {_sentence(row['because'])}")
    if plan.get("remedies"):
        lines += ["", "Mended first"]
        for row in plan["remedies"]:
            lines.append(f"  {row['backend']} for {row['use']} ({row['state']}): {row['summary'] or row['kind']}")
    if plan.get("warnings"):
        lines += ["", "Mind"]
        lines += [f"  {row['message']} [{row['code']}]" for row in plan["warnings"]]
    if plan.get("rejections"):
        lines += ["", "Refused"]
        lines += _rejection_lines(plan["rejections"])
    return "\n".join(lines)


def rejections_text(plan: Mapping[str, Any], host: Optional[str] = None) -> str:
    """All rejections of a plan as one message."""
    rows = plan.get("rejections") or []
    where = f"{host}: " if host else ""
    return f"{where}the plan of {plan.get('instance')} is refused, {len(rows)} reasons:\n" + "\n".join(
        _rejection_lines(rows)
    )


def _rejection_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        about = row.get("variable") or row.get("flag")
        text = f"  {row['message']} [{row['code']}]"
        if about and str(about) not in str(row["message"]):
            text += f" ({about}{'' if row.get('value') is None else '=' + str(row['value'])})"
        lines.append(text)
        if row.get("suggestion"):
            lines.append(f"    instead: {row['suggestion']}")
    return lines


def _sentence(text: str) -> str:
    return text.strip().rstrip(".") + "." if text else ""


def _command_lines(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    lines = [f"  {name}={shlex.quote(value)}" for name, value in env.items()]
    line = "  "
    for position, word in enumerate(argv):
        starts_flag = word.startswith("--")
        if starts_flag and position:
            lines.append(line.rstrip() + " \\")
            line = "    "
        line += shlex.quote(word) + " "
    return [*lines, line.rstrip()]


def read_argv(argv: Sequence[str]) -> dict[str, Any]:
    """``{key: value}`` of a command line, under canonical names: True for a bare flag, a list for several values."""
    found: dict[str, Any] = {}
    key = None
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            key = _ALIASES.get(key, key)
            found[key] = value if equals else True
            if equals:
                key = None
        elif key is not None:
            present = found[key]
            found[key] = word if present is True else [*([present] if isinstance(present, str) else present), word]
    return found


def running_of(probe: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """``{argv}`` of the running service that a probe saw, None where none runs or its command line is not known."""
    service = probe.get("service") or {}
    argv = service.get("argv")
    return {"argv": list(argv)} if argv and service.get("main_pid") else None


def plan_drift(
    plan: Mapping[str, Any],
    running_argv: Optional[Sequence[str]] = None,
    server_info: Optional[Mapping[str, Any]] = None,
) -> list[dict[str, Any]]:
    """How a running service differs from its plan: ``[{setting, planned, running, source}]``, empty when it does not.

    ``running_argv`` is ``/proc/<pid>/cmdline``, ``server_info`` the answer of ``/server_info``. Values of secrets are
    never shown. ``source`` says where the running value was seen (``argv`` or ``server_info``).
    """
    differences: list[dict[str, Any]] = []
    planned = read_argv(plan.get("argv") or [])
    if running_argv:
        running = read_argv(running_argv)
        if list(running_argv)[:1] != list(plan.get("argv") or [])[:1]:
            differences.append(_difference("interpreter", (plan.get("argv") or [None])[0], running_argv[0], "argv"))
        for key in [*planned, *[key for key in running if key not in planned]]:
            if key == "config":
                continue
            if planned.get(key) != running.get(key):
                differences.append(_difference(key, planned.get(key), running.get(key), "argv"))
    if server_info:
        inner = server_info.get("server_args")
        settings: Mapping[str, Any] = inner if isinstance(inner, Mapping) else server_info
        told = {row["setting"] for row in differences}
        effective = plan.get("effective") or {}
        for key, value in planned.items():
            # What SGLang makes of a setting counts, where the plan knows it.
            wanted = effective.get(key, value)
            name = key if key in settings else next((old for old, new in _ALIASES.items() if new == key), key)
            if key in told or name not in settings:
                continue
            if not _same(wanted, settings[name]):
                differences.append(_difference(key, wanted, settings[name], "server_info"))
    return differences


def _difference(setting: str, planned: Any, running: Any, source: str) -> dict[str, Any]:
    if _intents.secret_flag(setting):
        planned = "(not shown)" if planned is not None else None
        running = "(not shown)" if running is not None else None
    return {"setting": setting, "planned": planned, "running": running, "source": source}


def _same(planned: Any, running: Any) -> bool:
    if running is None:
        return planned in (None, "none", False)
    if isinstance(running, bool):
        return planned is running or str(planned).casefold() == str(running).casefold()
    if isinstance(running, (int, float)) and not isinstance(planned, (bool, list)):
        try:
            return float(planned) == float(running)
        except (TypeError, ValueError):
            return False
    if isinstance(running, list):
        return [str(item) for item in running] == [
            str(item) for item in (planned if isinstance(planned, list) else [planned])
        ]
    if isinstance(running, Mapping):
        return True
    return str(planned) == str(running)


def drift_text(differences: Sequence[Mapping[str, Any]]) -> str:
    """``differences`` as lines, ``-`` running and ``+`` planned."""
    lines = []
    for row in differences:
        lines += [f"-{row['setting']}: {row['running']}"] if row["running"] is not None else []
        lines += [f"+{row['setting']}: {row['planned']}"] if row["planned"] is not None else []
    return "\n".join(lines)


def drift_diff(plan: Mapping[str, Any], differences: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """``differences`` as Ansible shows them with ``--diff``: running before, planned after."""

    def line(setting: str, value: Any) -> str:
        return "" if value is None else f"{setting}: {value}\n"

    return {
        "before_header": f"sglang-{plan.get('instance')} (running)",
        "after_header": f"sglang-{plan.get('instance')} (planned)",
        "before": "".join(line(row["setting"], row["running"]) for row in differences),
        "after": "".join(line(row["setting"], row["planned"]) for row in differences),
    }
