# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: which communication backend a plan uses, and why each other one was not taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _plan_constraints, _rules
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_draft import Draft
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_sizes import Sizes

# A variable is the user's to set: the probe looks with the variables of the inventory, so a plan that added one of its
# own would not find the backend mended, and would mend it again at every run.
MENDABLE = ("install", "replace", "system_package")
_USABLE = ("ok", "suspect")
# Where one of these holds, nothing else about the backend is worth saying.
_FINAL = ("backend_not_in_this_sglang", "model_has_no_experts", "device_is_cpu", "one_rank")


class Reason(NamedTuple):
    """Why a backend is not taken. ``hard``: no remedy of ours changes it. ``change``: what would."""

    code: str
    text: str
    change: str
    hard: bool


class Verdict(NamedTuple):
    """What came of looking at one candidate."""

    name: str
    library: Optional[str]
    state: dict[str, Any]
    reasons: list[Reason]

    @property
    def usable(self) -> bool:
        return not self.reasons

    @property
    def hard(self) -> list[Reason]:
        return [reason for reason in self.reasons if reason.hard]

    def why(self) -> str:
        """All reasons, with the backend's name at the first one only."""
        texts = [reason.text for reason in self.reasons]
        named = f"{self.name} "
        return "; ".join(
            text[len(named) :] if position and text.startswith(named) else text for position, text in enumerate(texts)
        )

    def sentence(self) -> str:
        """What it lacks, and what would bring it; short where nothing on this host could."""
        text = self.why().rstrip(". ") + "."
        if self.changes() and not any(reason.code in _FINAL for reason in self.reasons):
            text += f" To have it: {self.changes()}."
        return text

    def changes(self) -> str:
        return "; ".join(dict.fromkeys(reason.change for reason in self.reasons if reason.change))


def _state_reason(draft: Draft, library: str, use: str) -> tuple[dict[str, Any], list[Reason]]:
    state = dict(draft.backend(library, use))
    found = state.get("state") or "unknown"
    if found in _USABLE:
        if found == "suspect":
            draft.warn(
                "backend_suspect",
                f"{library} is suspect for {use}: {state.get('message')}",
                variable="sglang_backends",
                value=library,
            )
        version = draft.version_of(library)
        row = _rules.match(library, use, version, draft.sglang_version)
        if row is not None and not row.works:
            return state, [
                Reason(
                    "backend_version_does_not_work",
                    f"{library} {version} imports but does not work with SGLang {draft.sglang_version}: {row.because}",
                    f"another version of {library} ({row.source})",
                    True,
                )
            ]
        if row is None and use != "kv_transfer":
            draft.warn(
                "backend_version_unverified",
                f"nothing says whether {library} {version or 'of unknown version'} works as {use} with SGLang "
                f"{draft.sglang_version or 'of unknown version'}: importing is not working, readiness will tell",
                value=library,
            )
        return state, []
    remedy = state.get("remedy") or {}
    summary = remedy.get("summary") or state.get("message") or ""
    text = f"{library} is {found}"
    if found not in ("absent", "venv_absent"):
        if state.get("code") and state.get("code") != found:
            text += f" ({state['code']})"
        if state.get("message"):
            text += ": " + first_line(state["message"])
    summary = first_line(summary)
    kind = remedy.get("kind")
    if kind in (None, "none", "driver"):
        change = summary or f"{library} made to work by hand"
    elif kind == "env_var":
        change = f"{summary} (sglang_env_vars)"
    elif kind == "rebuild":
        change = f"{summary} (sglang_on_missing_backend: build)"
    else:
        change = f"{summary} (sglang_on_missing_backend: install)"
    return state, [Reason(f"backend_{found}", text, change, False)]


def first_line(text: Any, length: int = 200) -> str:
    """The first line of a message without its full stop, cut at ``length``: the evidence has all of it."""
    line = next((line.strip() for line in str(text or "").splitlines() if line.strip()), "").rstrip(". ")
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def build_remedy(published: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """DeepEP from source, in place of a ``published`` wheel; what that would uninstall goes here too."""
    removes = [step for step in (published or {}).get("steps") or [] if step.get("action") == "pip_uninstall"]
    return {
        "kind": "rebuild",
        "summary": "build DeepEP against the host's CUDA toolkit and install the wheel",
        "steps": [*removes, {"action": "build", "packages": [], "args": {"backend": "deep_ep"}}],
    }


def policy_for(draft: Draft, library: Optional[str]) -> str:
    """``sglang_on_missing_backend``; ``sglang_deepep_build`` makes it ``build`` for DeepEP, short of ``fail``."""
    policy = draft.intent.get("on_missing_backend") or "fallback"
    return "build" if library == "deep_ep" and draft.settings.get("deepep_build") and policy != "fail" else str(policy)


def may_mend(draft: Draft, verdict: Verdict) -> Optional[dict[str, Any]]:
    """The remedy that ``sglang_on_missing_backend`` allows for a backend whose only fault is its state, else None."""
    policy = policy_for(draft, verdict.library)
    if policy not in ("install", "build") or verdict.hard or not verdict.reasons or not verdict.library:
        return None
    remedy = verdict.state.get("remedy") or {}
    kind = remedy.get("kind")
    if policy == "build" and verdict.library == "deep_ep" and kind in ("install", "rebuild", "replace"):
        return build_remedy(remedy)
    if kind in MENDABLE:
        if kind == "system_package" and not draft.settings.get("manage_system_packages"):
            draft.warn(
                "system_packages_not_managed",
                f"{verdict.library}: {remedy.get('summary')}; sglang_manage_system_packages is false",
                variable="sglang_manage_system_packages",
                value=False,
            )
            return None
        return dict(remedy)
    return None


def judge_a2a(draft: Draft, name: str, sizes: Sizes, keeps_ep: bool) -> Verdict:
    """Look at one value of ``--moe-a2a-backend``; ``keeps_ep``: the user's ep size must not be overwritten."""
    row = _rules.A2A_BACKENDS.get(name)
    reasons: list[Reason] = []
    choices = draft.catalogue.choices("moe_a2a_backend")
    version = draft.sglang_version or "of this venv"
    lacks_flag = draft.catalogue.has("moe_a2a_backend") is False
    if lacks_flag and not (name == "deepep" and draft.catalogue.has("enable_deepep_moe")):
        what = "deepep only, by --enable-deepep-moe" if draft.catalogue.has("enable_deepep_moe") else "none"
        reasons.append(
            Reason(
                "backend_not_in_this_sglang",
                f"SGLang {version} has no --moe-a2a-backend ({what})",
                "a newer SGLang",
                True,
            )
        )
        return Verdict(name, None, {}, reasons)
    if (choices is not None and name not in choices) or (row is None and choices is None):
        known = ", ".join(choices or sorted(_rules.A2A_BACKENDS))
        reasons.append(
            Reason("backend_not_in_this_sglang", f"SGLang {version} has no a2a backend {name}", f"one of {known}", True)
        )
        return Verdict(name, None, {}, reasons)
    if row is None:
        draft.warn(
            "backend_not_probed", f"nothing is known about the a2a backend {name}", flag="--moe-a2a-backend", value=name
        )
        return Verdict(name, None, {}, [])
    reasons += _a2a_arguments(draft, row, sizes, keeps_ep)
    final = [reason for reason in reasons if reason.code in _FINAL]
    if final:
        # What is missing is told beside it: the reader asks for the backend, not for the device.
        found, missing = _state_reason(draft, row.library, "a2a") if row.library else ({}, [])
        return Verdict(name, row.library, found, final[:1] + missing)
    reasons += _a2a_hardware(draft, row, sizes)
    state: dict[str, Any] = {}
    if row.library:
        state, missing = _state_reason(draft, row.library, "a2a")
        reasons += missing
    elif not reasons:
        draft.warn(
            "backend_not_probed",
            f"what the a2a backend {name} needs is not probed: readiness will tell",
            flag="--moe-a2a-backend",
            value=name,
        )
    return Verdict(name, row.library, state, reasons)


def _a2a_arguments(draft: Draft, row: _rules.A2A, sizes: Sizes, keeps_ep: bool) -> list[Reason]:
    reasons = []
    name = row.name
    if "experts" in draft.config and not draft.config.get("experts"):
        reasons.append(
            Reason(
                "model_has_no_experts",
                f"{name} is for experts, and the model has none",
                "a mixture-of-experts model",
                True,
            )
        )
    if draft.on_cpu:
        reasons.append(Reason("device_is_cpu", f"{name} needs GPUs, and the device is cpu", "GPUs", True))
    elif sizes.tp == 1:
        reasons.append(Reason("one_rank", f"{name} is for several ranks, and tp is 1", "tp of at least 2", True))
    if keeps_ep and row.sets_ep and "ep_size" in sizes.given and sizes.ep != sizes.tp:
        reasons.append(
            Reason(
                "would_override_ep_size",
                f"{name} would set ep_size to {sizes.tp}, and {sizes.ep} is asked for",
                f"ep{sizes.tp}",
                True,
            )
        )
    if name == "pplx" and sizes.attn_dp < 2:
        reasons.append(
            Reason("needs_attention_dp", "pplx needs attention data parallelism of at least 2", "attn_dp_size: 2", True)
        )
    if name == "flashinfer" and sizes.attn_dp != sizes.tp:
        reasons.append(
            Reason(
                "needs_attention_dp",
                f"flashinfer needs attention data parallelism equal to tp {sizes.tp}, and it is {sizes.attn_dp}",
                f"attn_dp_size: {sizes.tp}",
                True,
            )
        )
    return reasons


def _a2a_hardware(draft: Draft, row: _rules.A2A, sizes: Sizes) -> list[Reason]:
    reasons: list[Reason] = []
    name = row.name
    torch = draft.probe.get("torch") or {}
    if (row.vendor == "npu" and (torch.get("cuda") or torch.get("hip"))) or (row.vendor == "hip" and torch.get("cuda")):
        reasons.append(
            Reason("backend_for_other_hardware", f"{name} is for {row.vendor} devices", "another backend", True)
        )
    archs = draft.archs()
    wrong = [arch for arch in archs if row.archs and arch not in row.archs]
    if wrong:
        code = (
            "a2a_backend_needs_sm90_or_sm100"
            if "sm_100" in row.archs and "sm_90" in row.archs
            else "a2a_backend_not_on_arch"
        )
        reasons.append(
            Reason(
                code,
                f"{name} has kernels for {', '.join(row.archs)}, and the GPUs are {', '.join(wrong)}",
                f"GPUs of {', '.join(row.archs)}",
                True,
            )
        )
    if row.nvlink and len(draft.gpus()) > 1:
        fabric = draft.fabric()
        if fabric["class"] == "degraded_nvlink":
            bad = ", ".join(str(gpu) for gpu in fabric["bad_gpus"])
            reasons.append(
                Reason(
                    "nvlink_degraded",
                    f"{name} needs NVLink between all GPUs, and GPU {bad} is outside of it",
                    f"repair GPU {bad}, or leave it out with sglang_gpus",
                    True,
                )
            )
        elif fabric["class"] in ("pcie_only", "nvlink_pairs"):
            how = "are connected by PCIe only" if fabric["class"] == "pcie_only" else "have NVLink in pairs only"
            reasons.append(
                Reason(
                    "nvlink_required_within_node",
                    f"{name} needs NVLink between all GPUs of a node, and these {how}",
                    "hosts with NVLink between all GPUs",
                    True,
                )
            )
        elif fabric["class"] == "unknown":
            draft.warn("fabric_unknown", f"{name} needs NVLink, and the topology is not known", value=name)
    if row.library == "deep_ep" and sizes.nnodes > 1:
        rdma = draft.rdma_devices()
        if rdma is not None and not any(device.get("mlx5") for device in rdma):
            reasons.append(
                Reason(
                    "rdma_required_between_nodes",
                    f"{name} over {sizes.nnodes} hosts needs an active mlx5 device, and there is none",
                    "an InfiniBand or RoCE adapter that is up",
                    True,
                )
            )
    if name == "deepep" and sizes.nnodes > 1:
        reasons += _ibgda(draft, name)
    toolkits = draft.probe.get("toolkits")
    method = (draft.config.get("quantization") or {}).get("method")
    if row.library == "deep_ep" and method == "fp8" and toolkits is not None and archs:
        working = [kit for kit in toolkits.get("toolkits") or [] if kit.get("nvcc_works")]
        if not working:
            reasons.append(
                Reason(
                    "jit_needs_nvcc",
                    f"{name} with fp8 experts compiles kernels at run time (DeepGEMM), and no nvcc works here",
                    f"a CUDA {torch.get('cuda') or ''} toolkit on the host".replace("  ", " "),
                    True,
                )
            )
    return reasons


def _ibgda(draft: Draft, name: str) -> list[Reason]:
    """What low latency between hosts needs of driver and kernel, where the mode may become low latency."""
    fabric = draft.probe.get("fabric") or {}
    rdma, params = fabric.get("rdma") or {}, fabric.get("driver_params") or {}
    role = draft.intent.get("role")
    if not rdma or (draft.flag("deepep_mode") or ("normal" if role == "prefill" else "auto")) == "normal":
        return []
    if rdma.get("nvidia_peermem") is False:
        draft.warn(
            "nvidia_peermem_absent",
            f"nvidia_peermem is not loaded: {name} between hosts then needs DMA-BUF, which not every driver has",
            flag="--moe-a2a-backend",
            value=name,
        )
    if rdma.get("gdrdrv_state", "ok" if rdma.get("gdrdrv") else "absent") == "ok":
        return []
    if not params:
        draft.warn(
            "ibgda_unknown",
            f"{name} between hosts needs IBGDA, and the driver's parameters could not be read",
            flag="--moe-a2a-backend",
            value=name,
        )
        return []
    override = "peermappingoverride=1" in str(params.get("RegistryDwords") or "").replace(" ", "").casefold()
    lacks = [] if str(params.get("EnableStreamMemOPs")) == "1" else ["NVreg_EnableStreamMemOPs=1"]
    lacks += [] if override else ['NVreg_RegistryDwords="PeerMappingOverride=1;"']
    if not lacks:
        return []
    return [
        Reason(
            "ibgda_not_ready",
            f"{name} in low latency between hosts needs IBGDA, and the driver runs without {' and '.join(lacks)}, "
            "and without a gdrdrv that can be opened",
            "these options of the nvidia module and a reboot, gdrdrv, or deepep_mode: normal",
            True,
        )
    ]


def choose_a2a(draft: Draft, sizes: Sizes) -> str:
    """The value of ``--moe-a2a-backend``; decisions, remedies, assumptions and rejections go to the draft."""
    literal = draft.flag("moe_a2a_backend")
    literal = str(literal) if literal not in (None, False) else None
    if literal is None and draft.truth("enable_deepep_moe"):
        # SGLang before 0.5.3: the name of the flag is the name of the backend.
        literal = "deepep"
    wanted = draft.intent.get("moe_a2a_backend") or "auto"
    if literal is not None and wanted not in ("auto", literal, [literal]):
        draft.reject(
            "contradiction",
            f"sglang_moe_a2a_backend is {_listed(wanted)}, and sglang_flags says {literal}",
            flag="--moe-a2a-backend",
            variable="sglang_moe_a2a_backend",
            value=literal,
            suggestion="keep one of the two",
        )
    if literal is not None:
        return _one(draft, literal, sizes, literal=True)
    if isinstance(wanted, str) and wanted != "auto":
        return _one(draft, wanted, sizes, literal=False)
    if wanted == "auto" and draft.truth("enable_ep_moe"):
        draft.decide("moe_a2a_backend", "none", "--enable-ep-moe is expert parallelism without an all-to-all backend")
        return "none"
    if wanted == "auto":
        return _auto(draft, sizes)
    return _preferred(draft, list(wanted), sizes)


def _listed(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _one(draft: Draft, name: str, sizes: Sizes, literal: bool) -> str:
    if name == "none":
        draft.decide("moe_a2a_backend", "none", "asked for")
        return "none"
    verdict = judge_a2a(draft, name, sizes, keeps_ep=False)
    evidence = _evidence(draft, [verdict])
    if verdict.usable:
        draft.decide("moe_a2a_backend", name, f"asked for, and nothing speaks against it ({_level(verdict)})", evidence)
        return _taken(draft, verdict, sizes)
    remedy = may_mend(draft, verdict)
    if remedy is not None:
        _mend(draft, verdict, "a2a", remedy)
        draft.decide(
            "moe_a2a_backend", name, f"asked for; {verdict.why()}, which is mended first: {remedy['summary']}", evidence
        )
        return _taken(draft, verdict, sizes)
    policy = draft.intent.get("on_missing_backend") or "fallback"
    if policy == "fallback" and not (literal and verdict.hard):
        draft.decide("moe_a2a_backend", "none", _fallback_text(draft, [verdict]), evidence)
        draft.warn(
            "backend_fallback",
            f"{name} was asked for, and the plan does without: {verdict.reasons[0].text}",
            flag="--moe-a2a-backend",
            variable="sglang_moe_a2a_backend",
            value=name,
        )
        return "none"
    _refuse(draft, verdict, "--moe-a2a-backend", "sglang_moe_a2a_backend", "none")
    draft.decide("moe_a2a_backend", name, f"asked for and refused: {verdict.why()}", evidence)
    return name


def _refuse(draft: Draft, verdict: Verdict, flag: str, variable: str, instead: Optional[str]) -> None:
    for reason in verdict.reasons:
        suggestion = reason.change
        if instead and reason.hard and reason.code != "backend_not_in_this_sglang":
            suggestion = f"{flag} {instead}, or {reason.change}"
        draft.reject(
            reason.code if reason.hard else "backend_missing",
            f"{flag} {verdict.name}: {reason.text}",
            flag=flag,
            variable="sglang_flags" if draft.flag(flag[2:].replace("-", "_")) else variable,
            value=verdict.name,
            suggestion=suggestion,
            arch=", ".join(draft.archs()) or None,
        )


def _auto(draft: Draft, sizes: Sizes) -> str:
    verdicts = []
    for name in _rules.A2A_AUTO:
        before = len(draft.warnings)
        verdict = judge_a2a(draft, name, sizes, keeps_ep=True)
        reasons = list(verdict.reasons)
        method = (draft.config.get("quantization") or {}).get("method")
        if "experts" in draft.config and method not in _rules.A2A_AUTO_METHODS:
            reasons.append(
                Reason(
                    "experts_format_unverified",
                    f"whether {name} serves {method or 'unquantised'} experts well is not known",
                    f"ask for {name} by name",
                    True,
                )
            )
        if not draft.catalogue.known:
            reasons.append(
                Reason("flags_unknown", "the flags of this SGLang are not known", f"ask for {name} by name", True)
            )
        if draft.gpus_known and len(draft.archs()) == 0:
            reasons.append(
                Reason("arch_unknown", "the GPUs' architecture is not known", f"ask for {name} by name", True)
            )
        if "experts" not in draft.config:
            reasons.append(
                Reason("model_unknown", "the model's experts are not known", f"ask for {name} by name", True)
            )
        if draft.fabric()["class"] == "unknown" and not draft.on_cpu:
            reasons.append(Reason("fabric_unknown", "the topology is not known", f"ask for {name} by name", True))
        against = _plan_constraints.clash(draft, sizes, name)
        if against:
            reasons.append(Reason("clashes_with_flags", against, f"ask for {name} by name", True))
        verdict = verdict._replace(reasons=reasons)
        verdicts.append(verdict)
        if verdict.usable:
            draft.decide(
                "moe_a2a_backend", name, f"auto: it works here ({_level(verdict)})", _evidence(draft, verdicts)
            )
            return _taken(draft, verdict, sizes)
        # What is to be minded about a backend is of no use where it is not taken.
        del draft.warnings[before:]
    draft.decide("moe_a2a_backend", "none", "auto: " + _fallback_text(draft, verdicts), _evidence(draft, verdicts))
    return "none"


def _preferred(draft: Draft, names: Sequence[str], sizes: Sizes) -> str:
    verdicts: list[Verdict] = []
    for name in names:
        if name == "none":
            draft.decide("moe_a2a_backend", "none", _fallback_text(draft, verdicts), _evidence(draft, verdicts))
            return "none"
        before = len(draft.warnings)
        verdict = judge_a2a(draft, name, sizes, keeps_ep=True)
        verdicts.append(verdict)
        remedy = None if verdict.usable else may_mend(draft, verdict)
        if verdict.usable or remedy is not None:
            passed = " ".join(other.sentence() for other in verdicts[:-1])
            because = f"the first of {', '.join(names)} that " + ("works here" if remedy is None else "can be had")
            if remedy is not None:
                _mend(draft, verdict, "a2a", remedy)
                because += f": {verdict.why()}, which is mended first ({first_line(remedy['summary'])})"
            if passed:
                because += f". {passed}"
            draft.decide("moe_a2a_backend", name, because, _evidence(draft, verdicts))
            return _taken(draft, verdict, sizes)
        del draft.warnings[before:]
    if (draft.intent.get("on_missing_backend") or "fallback") == "fallback":
        draft.decide("moe_a2a_backend", "none", _fallback_text(draft, verdicts), _evidence(draft, verdicts))
        return "none"
    for verdict in verdicts:
        _refuse(draft, verdict, "--moe-a2a-backend", "sglang_moe_a2a_backend", "none")
    draft.decide("moe_a2a_backend", names[0], "none of the wanted backends can be used", _evidence(draft, verdicts))
    return "none"


def _level(verdict: Verdict) -> str:
    if not verdict.library:
        return "not probed"
    return f"{verdict.library} is {verdict.state.get('state')} at level {verdict.state.get('level') or 'unknown'}"


def _fallback_text(draft: Draft, verdicts: Sequence[Verdict]) -> str:
    """One sentence a candidate, and one for the other libraries that are not there either."""
    if not verdicts:
        return "asked for"
    text = " ".join(verdict.sentence() for verdict in verdicts)
    if all(any(reason.code in _FINAL for reason in verdict.reasons) for verdict in verdicts):
        return text
    looked_at = {verdict.library for verdict in verdicts}
    others = []
    for library in draft.probe.get("backends") or {}:
        state = draft.backend(library, "a2a")
        if library not in looked_at and state.get("state") not in _USABLE:
            others.append(f"{library} is {state.get('state')} too")
    return text + (f" {', '.join(others)}." if others else "")


def _evidence(draft: Draft, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "archs": draft.archs(),
        "fabric": {key: draft.fabric().get(key) for key in ("class", "bad_gpus")},
        "candidates": {
            verdict.name: {
                "usable": verdict.usable,
                "state": verdict.state.get("state"),
                "code": verdict.state.get("code"),
                "level": verdict.state.get("level"),
                "reasons": [reason._asdict() for reason in verdict.reasons],
            }
            for verdict in verdicts
        },
        "backends": {
            name: (backend or {}).get("state") for name, backend in (draft.probe.get("backends") or {}).items()
        },
    }


def _mend(draft: Draft, verdict: Verdict, use: str, remedy: dict[str, Any]) -> None:
    if verdict.library:
        draft.want(verdict.library, use, verdict.state, remedy)
        draft.assume(verdict.library, use, remedy.get("kind"))


def _taken(draft: Draft, verdict: Verdict, sizes: Sizes) -> str:
    row = _rules.A2A_BACKENDS.get(verdict.name)
    if row is not None and row.sets_ep and "ep_size" in sizes.given and sizes.ep != sizes.tp:
        draft.warn(
            "ep_size_overridden",
            f"ep_size_overridden({sizes.ep}->{sizes.tp}): {verdict.name} sets ep_size to tp_size",
            flag="--ep-size",
            value=sizes.ep,
        )
    if row is not None and row.sets_ep and sizes.ep != sizes.tp:
        draft.decide("ep_size", sizes.tp, f"{verdict.name} sets it to the tp size")
    return verdict.name


def choose_simple(
    draft: Draft,
    use: str,
    variable: str,
    key: str,
    libraries: dict[str, Optional[str]],
    auto: Sequence[str],
    needed: bool,
) -> Optional[str]:
    """KV transfer and elastic EP: the value of the flag ``key``, or None to leave it out.

    ``needed``: the instance cannot work without one, so there is no fallback.
    """
    flag = draft.catalogue.flag(key)
    literal = draft.flag(key)
    wanted = draft.intent.get(variable)
    if literal and wanted not in (None, "auto", literal, [literal]):
        draft.reject(
            "contradiction",
            f"sglang_{variable} is {_listed(wanted)}, and sglang_flags says {literal}",
            flag=flag,
            variable=f"sglang_{variable}",
            value=literal,
            suggestion="keep one of the two",
        )
    if literal:
        wanted = str(literal)
    if not wanted:
        if not needed:
            return None
        wanted = "auto"
    names = list(auto) if wanted == "auto" else [wanted] if isinstance(wanted, str) else list(wanted)
    if names == ["none"]:
        return None
    choices = draft.catalogue.choices(key)
    verdicts: list[Verdict] = []
    for name in names:
        if name == "none" and not needed:
            break
        library = libraries.get(name)
        reasons: list[Reason] = []
        state: dict[str, Any] = {}
        if (choices is not None and name not in choices) or (choices is None and name not in libraries):
            known = ", ".join(choices or sorted(libraries))
            version = draft.sglang_version or "of this venv"
            reasons.append(
                Reason(
                    "backend_not_in_this_sglang",
                    f"SGLang {version} has no {use} backend {name}",
                    f"one of {known}",
                    True,
                )
            )
        elif library:
            state, reasons = _state_reason(draft, library, use)
        verdict = Verdict(name, library, state, reasons)
        verdicts.append(verdict)
        # "auto" means what is there: it does not install, unless nothing works and the instance needs one.
        remedy = None if verdict.usable or wanted == "auto" else may_mend(draft, verdict)
        if verdict.usable or remedy is not None:
            because = ("auto: " if wanted == "auto" else "asked for; ") + (
                f"it works here ({_level(verdict)})"
                if remedy is None
                else f"{verdict.why()}, which is mended first: {remedy['summary']}"
            )
            if remedy is not None:
                _mend(draft, verdict, use, remedy)
            draft.decide(variable, name, because, _evidence(draft, verdicts))
            if use == "kv_transfer" and library and draft.rdma_devices() == [] and name != "mooncake_tcp":
                draft.warn(
                    "kv_transfer_without_rdma",
                    f"{name} finds no active RDMA device on this host and falls back to slower transports",
                    flag=flag,
                    value=name,
                )
            return name
    if needed and wanted == "auto":
        for verdict in verdicts:
            remedy = may_mend(draft, verdict)
            if remedy is not None:
                _mend(draft, verdict, use, remedy)
                draft.decide(
                    variable,
                    verdict.name,
                    f"auto: {verdict.why()}, which is mended first: {remedy['summary']}",
                    _evidence(draft, verdicts),
                )
                return verdict.name
    policy = draft.intent.get("on_missing_backend") or "fallback"
    text = _fallback_text(draft, verdicts)
    if needed or policy != "fallback":
        for verdict in verdicts:
            for reason in verdict.reasons:
                draft.reject(
                    reason.code if reason.hard else f"{use}_backend_missing",
                    f"{flag} {verdict.name}: {reason.text}"
                    + ("; the instance cannot work without it" if needed else ""),
                    flag=flag,
                    variable=f"sglang_{variable}",
                    value=verdict.name,
                    suggestion=reason.change,
                )
        draft.decide(variable, names[0], text, _evidence(draft, verdicts))
        return names[0]
    draft.decide(variable, None, text, _evidence(draft, verdicts))
    draft.warn(
        "backend_fallback",
        f"{_listed(wanted)} was asked for, and the plan does without: {text}",
        flag=flag,
        variable=f"sglang_{variable}",
        value=wanted,
    )
    return None


def dispatch_settings(draft: Draft, a2a: str, sizes: Sizes) -> dict[str, Any]:
    """Mode, dispatch capacity and variables that go with an all-to-all backend; returns flags to add.

    A prompt beyond the capacity kills a low_latency server long after it was ready, so the capacity is related to the
    prefill chunk here.
    """
    flags: dict[str, Any] = {}
    row = _rules.A2A_BACKENDS.get(a2a)
    if row is None or a2a == "none":
        return flags
    mode = _mode(draft, a2a, flags)
    if row.dispatch_env and row.dispatch_default:
        _capacity(draft, row, mode, sizes, flags)
    if row.library == "deep_ep":
        _nvshmem(draft, sizes)
        nccl = draft.settings.get("deepep_nccl_dir")
        if nccl and "EP_NCCL_ROOT_DIR" not in draft.user_env:
            draft.env["EP_NCCL_ROOT_DIR"] = str(nccl)
            draft.decide("EP_NCCL_ROOT_DIR", str(nccl), "DeepEP 2 looks for the NCCL of its build when it is imported")
    alone = sizes.nnodes == 1 and draft.rdma_devices() == []
    if a2a == "deepep_v2" and alone and "EP_DISABLE_GIN" not in draft.user_env:
        draft.env["EP_DISABLE_GIN"] = "1"
        draft.decide("EP_DISABLE_GIN", "1", "one node without an active RDMA device: NCCL's GIN has nothing to use")
    if mode == "normal" and a2a == "deepep":
        draft.warn(
            "cuda_graph_off",
            "--deepep-mode normal turns CUDA graphs off: decoding is slower",
            flag="--deepep-mode",
            value=mode,
        )
    return flags


def _mode(draft: Draft, a2a: str, flags: dict[str, Any]) -> str:
    asked = draft.flag("deepep_mode")
    asked = str(asked) if asked else None
    role = draft.intent.get("role")
    if a2a in ("mooncake", "pplx"):
        if asked == "normal" or (a2a == "mooncake" and asked == "auto"):
            draft.reject(
                "deepep_mode_not_for_backend",
                f"--moe-a2a-backend {a2a} works in low_latency mode only, and {asked} is asked for",
                flag="--deepep-mode",
                value=asked,
                suggestion="--deepep-mode low_latency",
            )
            return asked or "auto"
        if asked is None:
            flags["deepep_mode"] = "low_latency"
            draft.decide(
                "deepep_mode", "low_latency", f"{a2a} knows no other mode, and auto ends in NotImplementedError"
            )
        return "low_latency"
    if a2a != "deepep":
        return asked or "auto"
    quantization = draft.config.get("quantization")
    by_flag = draft.flag("quantization")
    unquantised = "quantization" in draft.config and not (quantization or {}).get("method") and not by_flag
    if unquantised:
        needs = _rules.holds(_rules.UNQUANTIZED_DEEPEP_NEEDS_LOW_LATENCY, draft.sglang_version)
        if needs and asked in ("auto", "normal"):
            draft.reject(
                "deepep_mode_needs_quantised_model",
                f"an unquantised model with deepep in {asked} mode dies in its warm-up",
                flag="--deepep-mode",
                value=asked,
                suggestion="--deepep-mode low_latency, or a quantised model",
                source=_rules.UNQUANTIZED_DEEPEP_NEEDS_LOW_LATENCY.source,
            )
            return asked
        if asked is None:
            flags["deepep_mode"] = "low_latency"
            draft.decide(
                "deepep_mode",
                "low_latency",
                "the model is not quantised"
                + (
                    ", and other modes die in the warm-up"
                    if needs
                    else "; whether this SGLang takes other modes is not known"
                ),
                {"source": _rules.UNQUANTIZED_DEEPEP_NEEDS_LOW_LATENCY.source},
            )
            return "low_latency"
        if needs is None and asked != "low_latency":
            draft.warn(
                "deepep_unquantised_unknown",
                f"whether SGLang {draft.sglang_version} serves an unquantised model in {asked} mode is not known",
                flag="--deepep-mode",
                value=asked,
            )
    if asked is None and role in ("prefill", "decode"):
        mode = "normal" if role == "prefill" else "low_latency"
        flags["deepep_mode"] = mode
        draft.decide("deepep_mode", mode, f"a {role} instance")
        return mode
    return asked or "auto"


def _capacity(draft: Draft, row: _rules.A2A, mode: str, sizes: Sizes, flags: dict[str, Any]) -> None:
    name = str(row.dispatch_env)
    if mode == "normal" and row.name == "deepep":
        return
    given = draft.user_env.get(name)
    capacity: Optional[int] = None
    if given is not None:
        if not given.strip().isdigit() or int(given) < 1:
            draft.reject(
                "invalid_value",
                f"{name} is {given!r}, which is no number of tokens",
                variable=f"sglang_env_vars.{name}",
                value=given,
                suggestion=str(row.dispatch_default),
            )
            return
        capacity = int(given)
        if row.dispatch_maximum and capacity > row.dispatch_maximum:
            draft.reject(
                "dispatch_tokens_above_maximum",
                f"{name} is {capacity}, and at most {row.dispatch_maximum} is possible",
                variable=f"sglang_env_vars.{name}",
                value=capacity,
                numbers={"tokens": capacity, "maximum": row.dispatch_maximum},
                suggestion=str(row.dispatch_maximum),
            )
            return
    running = draft.number("max_running_requests")
    decode = -(-running // sizes.attn_dp) if running else 0
    prefills = draft.intent.get("role") != "decode" and mode != "auto"
    if row.name in ("deepep_v2", "mori", "nixl") and draft.intent.get("role") != "decode":
        prefills = True
    chunk = draft.number("chunked_prefill_size")
    if prefills and chunk is not None and chunk <= 0:
        draft.reject(
            "chunked_prefill_off_with_dispatch_limit",
            f"chunked prefill is off, so one long prompt exceeds {row.name}'s dispatch limit and kills the server",
            flag="--chunked-prefill-size",
            value=chunk,
            numbers={"chunked_prefill_size": chunk, "limit": capacity or row.dispatch_maximum or row.dispatch_default},
            suggestion=f"--chunked-prefill-size {capacity or row.dispatch_maximum or row.dispatch_default}",
        )
        return
    prefill = -(-chunk // sizes.attn_dp) if prefills and chunk else 0
    need = max(decode, prefill)
    maximum = row.dispatch_maximum
    if capacity is None:
        capacity = _round_up(max(need, row.dispatch_default or 0))
        if prefills and not chunk:
            # Room for prompts: as much as the backend can take, and a chunk that fits into it.
            capacity = max(capacity, maximum or 1024)
        if maximum:
            capacity = min(capacity, maximum)
        if capacity != row.dispatch_default:
            draft.env[name] = str(capacity)
            what = (
                f"prefill chunk {prefill} and {decode} running requests a rank"
                if prefill
                else f"{decode} running requests a rank"
            )
            draft.decide(
                name, capacity, what if need else "room for prompts in low_latency mode", {"mode": mode, "needed": need}
            )
    if prefills and not chunk:
        flags["chunked_prefill_size"] = capacity * sizes.attn_dp
        draft.decide(
            "chunked_prefill_size",
            capacity * sizes.attn_dp,
            f"{row.name} in {mode} mode dispatches at most {capacity} tokens a rank; a longer prompt kills the server",
            {"capacity": capacity, "attention_dp": sizes.attn_dp},
        )
        prefill = capacity
    for what, tokens, flag, total in (
        ("chunked_prefill_exceeds_dispatch", prefill, "--chunked-prefill-size", chunk),
        ("running_requests_exceed_dispatch", decode, "--max-running-requests", running),
    ):
        spread = -(-(total or 0) // sizes.tp)
        if tokens > capacity >= spread and total == running:
            draft.warn(
                what,
                f"{flag} {total} is {tokens} tokens a rank if not spread evenly, and {name} allows {capacity}",
                flag=flag,
                value=total,
            )
        elif tokens > capacity:
            raised = _round_up(tokens)
            can = maximum is None or raised <= maximum
            suggestion = f"{name}: {raised}" if can else f"{flag} {(maximum or capacity) * sizes.attn_dp}"
            draft.reject(
                what,
                f"{flag} {total} is {tokens} tokens a rank, and {name} allows {capacity}: {row.name} dies",
                flag=flag,
                variable=f"sglang_env_vars.{name}",
                value=total,
                numbers={"tokens_per_rank": tokens, "limit": capacity, "maximum": maximum},
                suggestion=suggestion,
            )
    if row.library == "deep_ep" and row.name == "deepep":
        _qp_depth(draft, capacity)


def _round_up(tokens: int) -> int:
    size = 128
    while size < tokens:
        size *= 2
    return size


def _qp_depth(draft: Draft, capacity: int) -> None:
    need = (capacity + 1) * 2
    given = draft.user_env.get("NVSHMEM_QP_DEPTH", "").strip()
    if given.isdigit():
        if int(given) < need:
            draft.reject(
                "qp_depth_too_small",
                f"NVSHMEM_QP_DEPTH is {given}, and {capacity} dispatch tokens need at least {need}",
                variable="sglang_env_vars.NVSHMEM_QP_DEPTH",
                value=int(given),
                numbers={"qp_depth": int(given), "needed": need},
                suggestion=str(_round_up(need)),
            )
        return
    if need > _rules.QP_DEPTH_DEFAULT:
        draft.env["NVSHMEM_QP_DEPTH"] = str(_round_up(need))
        draft.decide(
            "NVSHMEM_QP_DEPTH",
            _round_up(need),
            f"{capacity} dispatch tokens need a queue of {need}, and the default is {_rules.QP_DEPTH_DEFAULT}",
        )


def _nvshmem(draft: Draft, sizes: Sizes) -> None:
    given = draft.user_env.get("NVSHMEM_REMOTE_TRANSPORT")
    if sizes.nnodes > 1:
        if given is not None and given.strip().casefold() == "none":
            draft.reject(
                "remote_transport_none_on_many_nodes",
                f"NVSHMEM_REMOTE_TRANSPORT=none cuts the {sizes.nnodes} hosts of the instance off from each other",
                variable="sglang_env_vars.NVSHMEM_REMOTE_TRANSPORT",
                value=given,
                numbers={"nnodes": sizes.nnodes},
                suggestion="remove it",
            )
        return
    rdma = draft.rdma_devices()
    # NVSHMEM's transports use mlx5 devices only; what else is there (eRDMA, EFA) it skips, and then has none.
    if given is None and rdma is not None and not any(device.get("mlx5") for device in rdma):
        draft.env["NVSHMEM_REMOTE_TRANSPORT"] = "none"
        kind = "RDMA device" if not rdma else "mlx5 device, and NVSHMEM knows no other"
        draft.decide("NVSHMEM_REMOTE_TRANSPORT", "none", f"one node without an active {kind}")
