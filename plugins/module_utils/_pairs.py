# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what prefill and decode instances of a group must have in common (pure).

Every rule is one that SGLang's own source has (``srt/disaggregation/common/conn.py`` of 0.5.4 to 0.5.23): the decode
instance asks the prefill instance for its settings at the first request, and fails each request when they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _rules, _versions

# The question that a decode instance asks (``GET /route``) has other fields from this version on.
NEW_HANDSHAKE = ">=0.5.10"
# What of a model's configuration lays out its KV cache.
SHAPE = ("architecture", "layers", "kv_heads", "hidden_size")


class Part(NamedTuple):
    """One prefill or decode instance. ``version`` is its SGLang, ``model`` the probe's, both as far as known."""

    group: str
    role: str
    instance: str
    hosts: tuple[str, ...]
    plan: Mapping[str, Any]
    version: Optional[str] = None
    model: Mapping[str, Any] = {}

    def flag(self, name: str) -> Optional[str]:
        """The value of a flag in the argv that will run, None where it is not given."""
        argv = [str(word) for word in self.plan.get("argv") or []]
        return argv[argv.index(name) + 1] if name in argv[:-1] else None

    def size(self, name: str) -> int:
        """One of the plan's sizes; 1 where it does not say."""
        return int((self.plan.get("effective") or {}).get(name) or 1)


class Difference(NamedTuple):
    """``code`` and what ``parts`` do not have in common with the others; ``refused`` where no request can succeed."""

    code: str
    refused: bool
    message: str
    parts: tuple[Part, ...]
    values: tuple[str, ...]
    about: Optional[str] = None
    suggestion: str = ""


def group_of(intent: Mapping[str, Any]) -> str:
    """The name of the group that a prefill or decode instance belongs to; without one, those of a model are one."""
    return str(intent.get("replica_group") or intent.get("served_model_name") or intent.get("model_path") or "")


def role_of(intent: Mapping[str, Any], plan: Mapping[str, Any]) -> Optional[str]:
    """``prefill``, ``decode`` or None; the plan knows it also where ``sglang_flags`` says it."""
    role = (plan.get("unit") or {}).get("role") or intent.get("role")
    return str(role) if role in ("prefill", "decode") else None


def differences(parts: Iterable[Part]) -> list[Difference]:
    """What the prefill and decode instances of each group do not have in common, the groups in their order."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        # The fake transfer moves nothing: a decode instance with it is a benchmark, and nobody's partner.
        if (part.plan.get("effective") or {}).get("kv_transfer_backend") != "fake":
            groups.setdefault(part.group, []).append(part)
    found: list[Difference] = []
    for group, members in groups.items():
        if len({part.role for part in members}) == 2:
            for rule in (_backend, _version, _model, _page_size, _dtype, _policy, _pipeline, _tensor):
                found += rule(group, members)
    return found


def _odd(members: Sequence[Part], value: Callable[[Part], Any]) -> tuple[tuple[Part, ...], dict[Any, list[Part]]]:
    """The members that have another value than most (the first, where as many), and who has what; None is no value."""
    having: dict[Any, list[Part]] = {}
    for part in members:
        if value(part) is not None:
            having.setdefault(value(part), []).append(part)
    usual = max(having, key=lambda key: len(having[key]), default=None)
    return tuple(part for key, have in having.items() if key != usual for part in have), having


def _differ(
    group: str,
    members: Sequence[Part],
    what: str,
    value: Callable[[Part], Any],
    suggestion: str,
    *,
    refused: bool = True,
    about: Optional[str] = None,
    more: str = "",
) -> list[Difference]:
    odd, having = _odd(members, value)
    if not odd:
        return []
    told = "; ".join(f"{key} {_on(have)}" for key, have in having.items())
    message = f"prefill and decode of group {group} differ in their {what}: {told}{more}"
    values = tuple(str(value(part)) for part in odd)
    return [Difference("prefill_decode_differ", refused, message, odd, values, about, suggestion)]


def _on(parts: Sequence[Part]) -> str:
    """``on h1, h2 (prefill)``."""
    names = [part.hosts[0] for part in parts]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"on {shown} ({', '.join(sorted({part.role for part in parts}, reverse=True))})"


def _backend(group: str, members: Sequence[Part]) -> list[Difference]:
    def named(part: Part) -> Optional[str]:
        return (part.plan.get("effective") or {}).get("kv_transfer_backend")

    def library(part: Part) -> Optional[str]:
        name = named(part)
        return _rules.KV_LIBRARIES.get(name) or name if name else None

    suggestion = "the same sglang_kv_transfer_backend on all of them"
    about = "sglang_kv_transfer_backend"
    return _differ(group, members, "transfer backend", library, suggestion, about=about) or _differ(
        group, members, "transport", named, suggestion, about=about, refused=False
    )


def _version(group: str, members: Sequence[Part]) -> list[Difference]:
    def handshake(part: Part) -> Optional[str]:
        new = _versions.within(part.version, NEW_HANDSHAKE)
        return None if new is None else f"SGLang {'0.5.10 or newer' if new else 'older than 0.5.10'}"

    suggestion = "the same SGLang on all of them"
    return _differ(group, members, "handshake", handshake, suggestion) or _differ(
        group, members, "SGLang", lambda part: part.version, suggestion, refused=False,
        more="; SGLang does not promise that they understand each other",
    )  # fmt: skip


def _model(group: str, members: Sequence[Part]) -> list[Difference]:
    def shape(part: Part) -> Optional[str]:
        if part.model.get("state") != "ok" or any(part.model.get(key) is None for key in SHAPE):
            return None
        return ", ".join(f"{key} {part.model[key]}" for key in SHAPE)

    def name(part: Part) -> Optional[str]:
        path = str((part.plan.get("unit") or {}).get("model_path") or "").rstrip("/")
        return path.rpartition("/")[2] or None

    suggestion = "the same model, or sglang_replica_group to tell the groups apart"
    return _differ(group, members, "model", shape, suggestion, about="sglang_model_path") or _differ(
        group, members, "model's name", name, suggestion, about="sglang_model_path", refused=False
    )


def _given(group: str, members: Sequence[Part], flag: str, what: str) -> list[Difference]:
    """A flag whose default is decided at run time: two given values are compared, a missing one is not known."""
    about, suggestion = flag, f"the same {flag} on all of them"
    found = _differ(group, members, what, lambda part: part.flag(flag), suggestion, about=about)
    if found or not any(part.flag(flag) for part in members):
        return found
    return _differ(
        group, members, what, lambda part: part.flag(flag) or "SGLang's choice", suggestion, about=about, refused=False
    )


def _page_size(group: str, members: Sequence[Part]) -> list[Difference]:
    return _given(group, members, "--page-size", "page size")


def _dtype(group: str, members: Sequence[Part]) -> list[Difference]:
    return _given(group, members, "--kv-cache-dtype", "KV cache dtype")


def _policy(group: str, members: Sequence[Part]) -> list[Difference]:
    flag = "--disaggregation-decode-allocation-policy"
    return _differ(
        group, members, "allocation policy", lambda part: part.flag(flag) or "early",
        f"the same {flag} on all of them", about=flag,
    )  # fmt: skip


def _mismatched(
    members: Sequence[Part], size: Callable[[Part], int], fits: Callable[[int, int], bool], what: str,
    suggestion: str,
) -> list[Difference]:  # fmt: skip
    """Decode instances whose size does not fit one of the prefill instances."""
    found = []
    for part in members:
        if part.role == "decode":
            other = next((one for one in members if one.role == "prefill" and not fits(size(one), size(part))), None)
            if other:
                message = (
                    f"the decode instance on {part.hosts[0]} cannot take from the prefill instance on "
                    f"{other.hosts[0]}: {what} are {size(part)} and {size(other)}"
                )
                found.append(
                    Difference(
                        "prefill_decode_differ", True, message, (part,), (str(size(part)),), "sglang_parallelism",
                        suggestion,
                    )
                )  # fmt: skip
    return found


def _pipeline(_group: str, members: Sequence[Part]) -> list[Difference]:
    return _mismatched(
        members, lambda part: part.size("pp_size"), lambda prefill, decode: decode in (1, prefill),
        "pp sizes", "pp 1 for decode, or that of the prefill instances",
    )  # fmt: skip


def _tensor(_group: str, members: Sequence[Part]) -> list[Difference]:
    def attention(part: Part) -> int:
        return max(1, part.size("tp_size") // part.size("attn_dp_size") // int(part.flag("--attn-cp-size") or 1))

    return _mismatched(
        members, attention, lambda prefill, decode: max(prefill, decode) % min(prefill, decode) == 0,
        "attention TP sizes", "sizes of which one divides the other",
    )  # fmt: skip
