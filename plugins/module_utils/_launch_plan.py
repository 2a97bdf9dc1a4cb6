# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: evidence in, flags out, bad plans refused. Pure; the shapes are in contracts.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _flags,
    _intents,
    _plan_backends,
    _plan_constraints,
    _plan_gpus,
    _plan_sizes,
    _rules,
    _unit_file,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_draft import Draft

# Flags that the plan writes itself; the user's value of one is taken into account where it is decided.
_DECIDED = (
    "tp_size",
    "pp_size",
    "ep_size",
    "dp_size",
    "attn_dp_size",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "disaggregation_mode",
    "moe_a2a_backend",
    "elastic_ep_backend",
)
# Values of --load-format that read weights from the model's folder.
_READS_FILES = (None, "auto", "pt", "safetensors", "npcache", "fastsafetensors", "mistral", "gguf")
_MAY_LACK = ("attn_dp_size", "elastic_ep_backend", "disaggregation_transfer_backend")
_VENV_REMEDY = {
    "venv_absent": "make it, or set sglang_venv to the virtualenv that has SGLang (or sglang_environment)",
    "not_a_venv": "set sglang_venv to the folder of a virtualenv, or to its bin/python",
    "unreadable": "let the service's user read it",
}


def make_plan(
    intent: Optional[Mapping[str, Any]],
    probe: Optional[Mapping[str, Any]],
    wanted: Optional[Mapping[str, Sequence[str]]] = None,
    settings: Optional[Mapping[str, Any]] = None,
    problems: Optional[Sequence[Mapping[str, Any]]] = None,
    host: Optional[str] = None,
) -> dict[str, Any]:
    """Plan one instance of a host from what is wanted and what is there.

    ``intent`` is one of ``intents.instances`` (None: a host without a service, whose ``wanted`` backends are mended),
    ``probe`` the result of ``probe_info``, ``wanted`` the ``intents.backends``, ``settings`` and ``problems`` those of
    ``intents``, ``host`` the inventory name. Returns ``plan`` as in contracts.md. Never raises on what a user can write
    or a host can be like: what must not be applied has ``rejections``, all of them at once.
    """
    probe = probe or {}
    draft = Draft(intent or {}, probe, settings or {}, host)
    _take_problems(draft, problems or [], (intent or {}).get("instance"))
    usable = _check_venv(draft)
    if usable:
        _want_backends(draft, wanted or {})
    if not intent:
        return _result(draft, wanted or {}, service=False, unit={"venv": (probe.get("venv") or {}).get("path")})
    return _plan_service(draft, wanted or {}, usable)


def _plan_service(draft: Draft, wanted: Mapping[str, Sequence[str]], usable: bool) -> dict[str, Any]:
    intent = draft.intent
    _check_definitions(draft)
    _check_model_path(draft)
    _plan_gpus.check_gpus(draft)
    _plan_gpus.check_arch(draft)
    _plan_constraints.check_bounds(draft)
    if usable:
        _check_fatal_backends(draft)
    sizes = _plan_sizes.choose_sizes(draft, _plan_sizes.eplb_wanted(draft))
    _plan_gpus.tell_fabric(draft, sizes)
    _plan_gpus.check_memory(draft, sizes)
    a2a = _plan_backends.choose_a2a(draft, sizes)
    row = _rules.A2A_BACKENDS.get(a2a)
    ep = sizes.tp if row is not None and row.sets_ep else sizes.ep
    _plan_sizes.check_sizes(draft, sizes, ep, a2a)
    extra = _plan_backends.dispatch_settings(draft, a2a, sizes)
    role = intent.get("role")
    if intent.get("kv_transfer_backend") and not role and not draft.flag("disaggregation_mode"):
        draft.warn(
            "kv_transfer_without_role",
            "sglang_kv_transfer_backend does nothing without sglang_role",
            variable="sglang_kv_transfer_backend",
            value=intent["kv_transfer_backend"],
        )
    said = _role_of_flags(draft)
    if role and said and role != said:
        draft.reject(
            "contradiction",
            f"sglang_role is {role}, and sglang_flags.disaggregation_mode is {said}",
            flag=draft.catalogue.flag("disaggregation_mode"),
            variable="sglang_role",
            value=said,
            suggestion="keep sglang_role",
        )
    role = role or said
    kv = None
    if role:
        kv = _plan_backends.choose_simple(
            draft,
            "kv_transfer",
            "kv_transfer_backend",
            "disaggregation_transfer_backend",
            _rules.KV_LIBRARIES,
            _rules.KV_AUTO,
            True,
        )
    elastic = _plan_backends.choose_simple(
        draft,
        "elastic_ep",
        "elastic_ep_backend",
        "elastic_ep_backend",
        _rules.ELASTIC_LIBRARIES,
        _rules.ELASTIC_AUTO,
        False,
    )
    if elastic and sizes.pp > 1:
        draft.reject(
            "elastic_ep_needs_pp_1",
            f"elastic expert parallelism works with pp 1, and pp is {sizes.pp}",
            flag="--pp-size",
            variable="sglang_elastic_ep_backend",
            value=sizes.pp,
            numbers={"pp_size": sizes.pp},
            suggestion="tp instead of pp, or no elastic EP",
        )
    _plan_constraints.check_constraints(_plan_constraints.View(draft, sizes, ep, a2a, role, elastic))
    argv, unit = _command(draft, sizes, ep, a2a, role, kv, elastic, extra)
    _environment(draft)
    mode = draft.flag("deepep_mode") or extra.get("deepep_mode")
    effective = {
        "tp_size": sizes.tp,
        "pp_size": sizes.pp,
        "ep_size": ep,
        "dp_size": sizes.dp if sizes.attn_dp == 1 else max(sizes.dp, sizes.attn_dp),
        "attn_dp_size": sizes.attn_dp,
        "moe_a2a_backend": a2a,
        "deepep_mode": (mode or "auto") if a2a != "none" else None,
        "kv_transfer_backend": kv,
        "elastic_ep_backend": elastic,
        "redundant_experts": _plan_sizes.redundant_experts(draft),
        "nnodes": sizes.nnodes,
        "node_rank": sizes.node_rank,
    }
    return _result(draft, wanted, service=True, argv=argv, effective=effective, unit=unit)


def _result(
    draft: Draft,
    wanted: Mapping[str, Sequence[str]],
    service: bool,
    argv: Sequence[str] = (),
    effective: Optional[Mapping[str, Any]] = None,
    unit: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    secrets = list(draft.intent.get("secrets") or [])
    return {
        "instance": draft.intent.get("instance") or "default",
        "service": service,
        "argv": list(argv),
        "env": {**draft.env, **draft.user_env} if service else {},
        "effective": dict(effective or {}),
        "remedies": draft.remedies,
        "assumes": draft.assumes,
        "decisions": draft.decisions,
        "warnings": draft.warnings,
        "rejections": [dict(row, host=draft.host) for row in draft.rejections],
        "secret_flags": [name for name in secrets if name in _intents.SECRET_FLAGS],
        "secret_env": {
            name: _intents.SECRET_ENV.get(name, name) for name in secrets if name not in _intents.SECRET_FLAGS
        },
        "wanted": {name: list(uses) for name, uses in wanted.items()},
        "unit": dict(unit or {}),
    }


def _take_problems(draft: Draft, problems: Sequence[Mapping[str, Any]], instance: Optional[str]) -> None:
    for problem in problems:
        if problem.get("instance") not in (None, instance):
            continue
        known = {key: problem.get(key) for key in ("code", "message", "variable", "value")}
        if problem.get("severity", "error") == "error":
            draft.reject(suggestion=problem.get("suggestion"), **known)  # type: ignore[arg-type]
        else:
            draft.warn(suggestion=problem.get("suggestion"), **known)  # type: ignore[arg-type]


def _check_venv(draft: Draft) -> bool:
    """Whether there is a venv that the rest of the plan can be about."""
    venv = draft.probe.get("venv") or {}
    wanted = draft.intent.get("venv")
    if not wanted and not venv.get("path"):
        draft.reject(
            "venv_not_given",
            "no virtualenv is given",
            variable="sglang_venv",
            suggestion="set sglang_venv to the virtualenv that runs SGLang",
        )
        return False
    path = wanted or venv.get("path")
    state = venv.get("state")
    if state is None:
        draft.reject(
            "not_probed",
            f"{path} was not probed, so nothing is known about it",
            variable="sglang_venv",
            value=path,
            suggestion="run the probe first",
        )
        return False
    if state != "ok":
        draft.reject(
            str(venv.get("code") or state),
            f"sglang_venv {path}: {venv.get('message') or state}",
            variable="sglang_venv",
            value=path,
            suggestion=_VENV_REMEDY.get(str(state), "set sglang_venv to a virtualenv that runs SGLang"),
        )
        return False
    return True


def _want_backends(draft: Draft, wanted: Mapping[str, Sequence[str]]) -> None:
    for backend, uses in wanted.items():
        for use in uses:
            state = draft.backend(backend, use)
            found = state.get("state")
            if found == "ok":
                continue
            remedy = state.get("remedy") or {}
            builds = _plan_backends.policy_for(draft, backend) == "build"
            if backend == "deep_ep" and builds and remedy.get("kind") in ("install", "replace", "rebuild"):
                remedy = _plan_backends.build_remedy(remedy)
            if remedy.get("kind") in (None, "none", "driver", "env_var"):
                draft.warn(
                    "wanted_backend_not_mendable",
                    f"{backend} is wanted for {use} and is {found}: {state.get('message')}"
                    + (f". {remedy['summary']}" if remedy.get("summary") else ""),
                    variable="sglang_backends",
                    value=backend,
                )
                continue
            draft.want(backend, use, state, remedy, required=found != "suspect")
            draft.assume(backend, use, remedy.get("kind"))
            draft.decide(
                f"{backend} for {use}",
                remedy.get("kind"),
                f"wanted by sglang_backends, and {found}: {state.get('message')}. Mend: {remedy.get('summary')}",
                {"state": found, "code": state.get("code"), "level": state.get("level")},
            )


def _check_definitions(draft: Draft) -> None:
    sglang = draft.probe.get("sglang")
    venv_ok = (draft.probe.get("venv") or {}).get("state") == "ok"
    if draft.catalogue.state == "absent" or (venv_ok and sglang is not None and not sglang.get("version")):
        draft.reject(
            "sglang_absent",
            f"{draft.intent.get('venv') or 'the venv'} has no SGLang",
            variable="sglang_venv",
            value=draft.intent.get("venv"),
            suggestion="install sglang there, or set sglang_venv to the virtualenv that has it",
        )
    elif not draft.catalogue.known:
        problem = draft.catalogue.server_args.get("problem")
        text = f"the arguments of SGLang {draft.sglang_version or 'of this venv'} could not be read"
        draft.warn("server_args_unknown", f"{text}: flags are written as given and not checked", value=problem)
        draft.decide("flags", "not checked", text + (f": {problem}" if problem else ""))


def _check_model_path(draft: Draft) -> None:
    given = draft.flag("model_path")
    path = draft.intent.get("model_path")
    if given and path and given != path:
        draft.reject(
            "contradiction",
            f"sglang_model_path is {path}, and sglang_flags.model_path is {given}",
            flag="--model-path",
            variable="sglang_model_path",
            value=given,
            suggestion="keep sglang_model_path",
        )
    path = path or given
    if not path:
        draft.reject(
            "model_path_not_given",
            "no model is given",
            variable="sglang_model_path",
            suggestion="set sglang_model_path to the model's folder on the host",
        )
        return
    state = draft.model.get("state")
    if state in ("absent", "unreadable"):
        code = draft.model.get("code") or {"absent": "model_path_absent", "unreadable": "model_unreadable"}[state]
        what = "is not there" if state == "absent" else f"cannot be read by {draft.intent.get('user')}"
        told = draft.model.get("message")
        suggestions = {
            "model_path_absent": "put the model there, or set sglang_model_path to where it is",
            "model_config_absent": "finish the copy of the model: its config.json is missing",
            "model_config_invalid": "copy the model anew: its config.json cannot be read",
            "model_path_relative": "an absolute path, or owner/name of a hub model",
            "model_unreadable": f"let {draft.intent.get('user') or 'the service user'} read it and its folders",
        }
        draft.reject(
            str(code),
            f"sglang_model_path {path}: {told}" if told else f"sglang_model_path {path} {what}",
            variable="sglang_model_path",
            value=path,
            suggestion=suggestions.get(str(code), "set sglang_model_path to a model that can be read"),
        )
    elif draft.config.get("weights") in ("missing", "none") and draft.flag("load_format") in _READS_FILES:
        draft.reject(
            "model_weights_missing",
            f"sglang_model_path {path} has no complete weights"
            + (f": {draft.model['message']}" if draft.model.get("message") else ""),
            variable="sglang_model_path",
            value=path,
            suggestion="finish the copy of the model, or load_format: dummy for a trial",
        )
    elif state == "hub":
        draft.warn(
            "model_from_hub",
            f"{path} is no folder on the host: the service downloads it at its first start",
            variable="sglang_model_path",
            value=path,
        )


def _check_fatal_backends(draft: Draft) -> None:
    policy = draft.intent.get("on_missing_backend") or "fallback"
    for name, backend in (draft.probe.get("backends") or {}).items():
        if not (backend or {}).get("fatal_for_service"):
            continue
        remedy = backend.get("remedy") or {}
        if policy in ("install", "build") and remedy.get("kind") in _plan_backends.MENDABLE:
            draft.want(name, "a2a", backend, remedy)
            draft.assume(name, "a2a", remedy.get("kind"))
            continue
        if any(row["backend"] == name and row["required"] for row in draft.remedies):
            continue
        draft.reject(
            "broken_backend_kills_server",
            f"{name} is {backend.get('state')} in a way that ends every start of SGLang: {backend.get('message')}",
            variable="sglang_on_missing_backend",
            value=policy,
            suggestion=(remedy.get("summary") or f"mend or uninstall {name}")
            + (" (sglang_env_vars)" if remedy.get("kind") == "env_var" else ""),
        )


def _names_a2a(draft: Draft) -> bool:
    wanted = draft.flag("moe_a2a_backend") or draft.intent.get("moe_a2a_backend") or "auto"
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    return any(name not in ("auto", "none") for name in names)


def _role_of_flags(draft: Draft) -> Optional[str]:
    mode = draft.flag("disaggregation_mode")
    return str(mode) if mode in ("prefill", "decode") else None


def _command(
    draft: Draft,
    sizes: _plan_sizes.Sizes,
    ep: int,
    a2a: str,
    role: Optional[str],
    kv: Optional[str],
    elastic: Optional[str],
    extra: Mapping[str, Any],
) -> tuple[list[str], dict[str, Any]]:
    intent = draft.intent
    catalogue = draft.catalogue
    host = _owned(draft, "host", "127.0.0.1")
    port = _owned(draft, "port", 30000)
    model_path = intent.get("model_path") or draft.flag("model_path")
    own: dict[str, Any] = {"model_path": model_path}
    own["served_model_name"] = intent.get("served_model_name") or draft.flag("served_model_name")
    own["tp_size"] = sizes.tp
    if sizes.pp > 1 or "pp_size" in sizes.given:
        own["pp_size"] = sizes.pp
    legacy_attention_dp = sizes.attn_dp > 1 and "enable_dp_attention" in draft.reading.given
    if sizes.dp > 1 or legacy_attention_dp:
        own["dp_size"] = sizes.attn_dp if legacy_attention_dp else sizes.dp
    if sizes.attn_dp > 1 and not legacy_attention_dp:
        own["attn_dp_size"] = sizes.attn_dp
    if ep > 1 or "ep_size" in sizes.given:
        own["ep_size"] = ep
    if sizes.nnodes > 1:
        own.update(_rendezvous(draft, sizes))
    named = _names_a2a(draft) or draft.flag("moe_a2a_backend")
    if catalogue.has("moe_a2a_backend") is False:
        if a2a == "deepep" and catalogue.has("enable_deepep_moe"):
            own["enable_deepep_moe"] = True
    elif a2a == "deepep" and "enable_deepep_moe" in draft.reading.given:
        pass  # the user's own flag says it, in the words of an SGLang whose flags could not be read
    elif a2a != "none" or named or (catalogue.known and draft.config.get("experts")):
        own["moe_a2a_backend"] = a2a
    if a2a == "none" and ep > 1 and catalogue.has("moe_a2a_backend") is False and catalogue.has("enable_ep_moe"):
        # Before 0.5.3 an ep size counts with this flag only, and is then the tp size.
        own["enable_ep_moe"] = True
    if role:
        own["disaggregation_mode"] = role
        own["disaggregation_transfer_backend"] = kv
    if elastic:
        own["elastic_ep_backend"] = elastic
    own.update(_plan_sizes.eplb_flags(draft))
    own.update(extra)
    own["host"], own["port"] = host, port
    for key in own:
        if key in _MAY_LACK and catalogue.has(key) is False:
            draft.reject(
                "unknown_flag",
                f"SGLang {draft.sglang_version} has no {catalogue.flag(key)}",
                flag=catalogue.flag(key),
                value=own[key],
                suggestion="another SGLang, or do without",
            )
    if draft.flag("config") and any(name in _intents.SECRET_FLAGS for name in intent.get("secrets") or []):
        draft.reject(
            "flag_reserved",
            "sglang_flags.config is given, and --config is needed for the secrets",
            flag="--config",
            variable="sglang_flags",
            value=draft.flag("config"),
            suggestion="put its contents into sglang_flags",
        )
    argv = [_interpreter(draft), "-m", "sglang.launch_server"]
    for key, value in own.items():
        argv += _words(draft, key, value)
    for key, given in draft.reading.given.items():
        if key in own or key in _DECIDED:
            continue
        argv += _flags.tokens(given)[0]
    unit = {
        "user": intent.get("user"),
        "group": intent.get("group"),
        "host": host,
        "port": int(port),
        "gpus": intent.get("gpus"),
        "venv": intent.get("venv") or (draft.probe.get("venv") or {}).get("path"),
        "model_path": model_path,
        "served_model_name": own["served_model_name"],
        "nnodes": sizes.nnodes,
        "node_rank": sizes.node_rank,
        "role": role,
        "hosts": list(intent.get("hosts") or []),
        "rendezvous": intent.get("rendezvous"),
        "ready": dict(intent.get("ready") or {}),
    }
    if intent.get("takeover"):
        unit["takeover"] = intent["takeover"]
    return argv, unit


def _words(draft: Draft, key: str, value: Any) -> list[str]:
    given = _flags.Given(key, draft.catalogue.flag(key), value, key, draft.catalogue.entry(key))
    words, problem = _flags.tokens(given)
    told = any(row["flag"] == given.flag and row["value"] == value for row in draft.rejections)
    if problem and not told:
        draft.reject(
            problem["code"],
            f"{given.flag}: {value} {problem['message']}",
            flag=given.flag,
            value=value,
            suggestion=problem.get("suggestion"),
        )
    return words


def _owned(draft: Draft, key: str, default: Any) -> Any:
    """Value of a flag that has a variable of its own: the variable, or the user's flag where that is not set."""
    variable, flag = draft.intent.get(key), draft.flag(key)
    if flag is None or str(flag) == str(variable):
        return variable if variable is not None else default
    if variable not in (None, default):
        draft.reject(
            "contradiction",
            f"sglang_{key} is {variable}, and sglang_flags.{key} is {flag}",
            flag=draft.catalogue.flag(key),
            variable=f"sglang_{key}",
            value=flag,
            suggestion=f"keep sglang_{key}",
        )
        return variable
    if key == "port":
        number = draft.number("port", 0) or 0
        if not 1 <= number <= 65535:
            draft.reject(
                "port_out_of_range",
                f"sglang_flags.port is {flag}, outside 1 to 65535",
                flag="--port",
                variable="sglang_port",
                value=flag,
                suggestion="sglang_port: 30000",
            )
            return default
        return number
    return flag


def _rendezvous(draft: Draft, sizes: _plan_sizes.Sizes) -> dict[str, Any]:
    rendezvous = draft.intent.get("rendezvous")
    address = draft.flag("dist_init_addr")
    if rendezvous:
        host = str(rendezvous["address"])
        address = f"[{host}]:{rendezvous['port']}" if ":" in host else f"{host}:{rendezvous['port']}"
    if not address:
        draft.reject(
            "rendezvous_missing",
            f"the instance is over {sizes.nnodes} hosts, and rank 0 has no address",
            flag="--dist-init-addr",
            variable="sglang_rendezvous",
            suggestion="sglang_rendezvous: {address: <address of rank 0>, port: 20000}",
        )
    return {"nnodes": sizes.nnodes, "node_rank": sizes.node_rank, "dist_init_addr": address}


def _interpreter(draft: Draft) -> str:
    venv = str(draft.intent.get("venv") or (draft.probe.get("venv") or {}).get("path") or "")
    python = (draft.probe.get("venv") or {}).get("python")
    if venv.rsplit("/", 1)[-1].startswith("python"):
        return venv
    if python and str(python).startswith("/"):
        return str(python)
    return f"{venv}/bin/python"


def _environment(draft: Draft) -> None:
    gpus = draft.intent.get("gpus")
    if gpus:
        visible = ",".join(str(index) for index in gpus)
        given = draft.user_env.get("CUDA_VISIBLE_DEVICES")
        if given is not None and given != visible:
            draft.reject(
                "contradiction",
                f"sglang_gpus is {gpus}, and CUDA_VISIBLE_DEVICES is {given}",
                variable="sglang_gpus",
                value=given,
                suggestion="keep sglang_gpus",
            )
        draft.env["CUDA_VISIBLE_DEVICES"] = visible
        # Without this CUDA numbers GPUs by speed, and the indexes of nvidia-smi mean other devices.
        draft.env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if draft.on_cpu:
        draft.env["SGLANG_USE_CPU_ENGINE"] = "1"
        draft.decide("SGLANG_USE_CPU_ENGINE", "1", "the device is cpu")
        return
    _cuda_home(draft)


_FATAL_CUDA_HOME = (
    "cuda_home_is_a_path_list",
    "cuda_home_is_inside_toolkit",
    "cuda_home_relative",
    "cuda_home_absent",
)


def _cuda_home(draft: Draft) -> None:
    toolkits = draft.probe.get("toolkits") or {}
    given = draft.user_env.get("CUDA_HOME")
    seen = toolkits.get("cuda_home") or {}
    if given is None:
        if toolkits.get("best"):
            draft.env["CUDA_HOME"] = str(toolkits["best"])
            draft.decide("CUDA_HOME", toolkits["best"], "the toolkit that fits torch, for kernels compiled at run time")
        return
    if seen.get("value") != given:
        # The probe looked at another one: what the text alone tells.
        fault = _unit_file.cuda_home_fault("CUDA_HOME", given)
        seen = {"problem": fault["code"], **fault} if fault else {}
    problem = seen.get("problem")
    if not problem:
        return
    suggestion = seen.get("suggestion") or toolkits.get("best") or None
    tell = draft.reject if problem in _FATAL_CUDA_HOME else draft.warn
    tell(
        str(problem),
        str(seen.get("message") or problem).rstrip("."),
        variable="sglang_env_vars.CUDA_HOME",
        value=given,
        suggestion=suggestion,
    )
