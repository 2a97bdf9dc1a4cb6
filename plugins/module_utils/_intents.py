# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what the user wants of a host, read from the host's ``sglang_*`` variables.

``VARIABLES`` is the one list of the user's variables: names, types, defaults and descriptions of the
documentation, the near-miss check and the coercion of survey answers are all made from it.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

PREFIX = "sglang_"
USES = ("a2a", "kv_transfer", "elastic_ep")
KNOWN_BACKENDS = ("deep_ep", "mooncake", "nixl")
# Flags of SGLang whose value is a secret, and the only ones that --config is used for.
# With the shortest abbreviation that argparse takes for each.
SECRET_FLAGS = {"api_key": "api_", "admin_api_key": "admin", "ssl_keyfile_password": "ssl_keyfile_"}
# Secrets that SGLang or its libraries take from the environment.
SECRET_ENV = {"hf_token": "HF_TOKEN"}
# Of the router in front of the service; the service never sees it.
ROUTER_SECRET = "router_api_key"
_SECRET_ENV_NAME = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|SECRET_ACCESS_KEY|API_KEY|CREDENTIALS)$")
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}\Z")
_ACCOUNT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PARALLELISM = re.compile(r"((tp|pp|ep|dp)[1-9][0-9]*)+\Z")
_PARALLELISM_PART = re.compile(r"(tp|pp|ep|dp)([1-9][0-9]*)")
SIZES = ("tp_size", "pp_size", "ep_size", "dp_size")


class Variable(NamedTuple):
    """One variable of the user's inventory.

    ``key`` is its name without the prefix, ``scope`` is ``instance`` (may stand in ``sglang_instances.<name>``),
    ``host`` (kept under ``settings``) or ``top`` (handled by name). ``type`` names the coercion.
    """

    key: str
    type: str
    default: Any
    scope: str
    description: str
    choices: tuple[str, ...] = ()
    minimum: Optional[int] = None
    maximum: Optional[int] = None

    @property
    def name(self) -> str:
        return PREFIX + self.key


def _instance(key: str, kind: str, default: Any, description: str, **kwargs: Any) -> Variable:
    return Variable(key, kind, default, "instance", description, **kwargs)


def _host(key: str, kind: str, default: Any, description: str, **kwargs: Any) -> Variable:
    return Variable(key, kind, default, "host", description, **kwargs)


VARIABLES: tuple[Variable, ...] = (
    # What is served
    _instance("venv", "path", None, "Virtualenv that runs SGLang, or its interpreter; mended in place."),
    _instance(
        "environment",
        "dict",
        None,
        "Managed environment that environment.yml makes: lock, base, python, owner; and the path it told.",
    ),
    _instance("model_path", "str", None, "Model folder on the host, or a Hugging Face repository name."),
    _instance("served_model_name", "str", None, "Name under which the API serves the model."),
    _instance(
        "parallelism",
        "parallelism",
        "auto",
        "How the model is spread over the GPUs: auto, tp8, pp8, ep8, ep4 (expert groups), tp4pp2, or explicit sizes.",
    ),
    _instance("moe_a2a_backend", "backends", "auto", "MoE all-to-all backend: auto, a name, or names by preference."),
    _instance("kv_transfer_backend", "backends", None, "KV transfer backend, like sglang_moe_a2a_backend."),
    _instance("elastic_ep_backend", "backends", None, "Elastic EP backend, like sglang_moe_a2a_backend."),
    _instance("role", "choice", None, "Part in disaggregated serving.", choices=("prefill", "decode")),
    _instance(
        "on_missing_backend",
        "choice",
        "fallback",
        "When the wanted backend does not work: do without it, install it, build it, or refuse the plan.",
        choices=("fallback", "install", "build", "fail"),
    ),
    _instance("flags", "flags", {}, "Any flag of the installed SGLang, as YAML types; names with - or _."),
    _instance("env_vars", "env", {}, "Environment variables of the service; never secrets."),
    _instance(
        "secrets",
        "secrets",
        {},
        "Secrets: api_key, admin_api_key, ssl_keyfile_password, hf_token, router_api_key, UPPER_CASE names.",
    ),
    _instance("eplb", "eplb", None, "Expert load balancing: true, or its settings, such as redundant_experts."),
    _instance("host", "str", "127.0.0.1", "Address that the server listens on."),
    _instance("port", "int", 30000, "Port that the server listens on.", minimum=1, maximum=65535),
    _instance("user", "account", "sglang", "System user that runs the service."),
    _instance("group", "account", None, "System group that runs the service; by default the user's name."),
    _instance("gpus", "ints", None, "Indexes of the GPUs that the instance uses; all when not set."),
    _instance("hosts", "strs", [], "Members of an instance over several hosts; position is rank."),
    _instance("rendezvous", "rendezvous", None, "Address and port of rank 0 of an instance over several hosts."),
    _instance("failure_domain", "str", None, "Rack or zone; a wave never takes all replicas of one."),
    _instance(
        "replica_group",
        "str",
        None,
        "Instances that serve the same traffic; by default those of a name (with a role: a model).",
    ),
    _instance(
        "router", "dict", None, "SGLang router in front: url, worker_url, worker, …; see docs/rollout.md, Drain."
    ),
    _instance("drain_tasks", "path", None, "Task file that takes the instance out of another load balancer."),
    _instance("undrain_tasks", "path", None, "Task file that puts the instance back into another load balancer."),
    _instance("drain_timeout", "int", 300, "Seconds to wait until running and queued requests are zero.", minimum=0),
    _instance("takeover", "str", None, "Existing unit that the instance replaces."),
    _instance(
        "ready_timeout", "int", 1800, "Seconds until an instance without visible progress counts as failed.", minimum=1
    ),
    _instance(
        "ready_stall_timeout", "int", 600, "Seconds without progress after which an instance is stuck.", minimum=1
    ),
    _instance("ready_hard_timeout", "int", 7200, "Seconds after which waiting ends whatever the progress.", minimum=1),
    _instance("ready_successes", "int", 3, "Successes in a row that make an instance ready.", minimum=1),
    _instance("ready_generation", "bool", True, "Real generations are part of readiness."),
    _instance("ready_interval", "int", 5, "Seconds between two looks at an instance.", minimum=1),
    _instance(
        "ready_request_timeout", "int", 45, "Seconds that one health or generation request may take.", minimum=20
    ),
    _instance(
        "ready_long_prompt_tokens",
        "int",
        512,
        "Approximate length of the long prompt of the readiness check.",
        minimum=1,
    ),
    # Beside the instances
    Variable(
        "instances", "instances", {}, "top", "Instances by name, each with the instance variables without the prefix."
    ),
    Variable("backends", "uses", {}, "top", "Backends wanted without or beside a service, with their uses."),
    # The run
    _host(
        "wheelhouse", "str", None, "Folder on the target hosts, or URL, that packages come from in a closed network."
    ),
    _host("manage_system_packages", "bool", False, "May install OS packages that a remedy names."),
    _host("waves", "waves", [1, "10%"], "Sizes of the rollout's waves, counts and percentages; the last one repeats."),
    _host(
        "on_rejection",
        "choice",
        "stop",
        "When a plan is rejected: stop the run, or leave the host out.",
        choices=("stop", "skip"),
    ),
    _host(
        "on_unreachable",
        "choice",
        "stop",
        "When a host cannot be reached: stop the run, or leave it out.",
        choices=("stop", "skip"),
    ),
    _host(
        "artifacts_dir",
        "path",
        None,
        "Folder on the controller for reports and caches; by default the working directory.",
    ),
    _host(
        "gather_level",
        "choice",
        "auto",
        "How far the probe goes: auto imports unless the service runs.",
        choices=("auto", "static", "import"),
    ),
    _host("import_timeout", "int", 90, "Seconds that one import in the target venv may take.", minimum=1),
    _host("show_plan", "bool", False, "Prints command line, decisions and refusals of every host."),
    _host("apply_report", "path", None, "Saved report whose plans are applied, refused when hosts have changed since."),
    _host("remediate_codes", "strs", [], "Causes that the playbook remediate mends; all when empty."),
    _host("remediate_backends", "strs", [], "Backends that the playbook remediate mends; all when empty."),
    _host("backend_smoke", "bool", False, "Runs a small dispatch and combine over the local GPUs."),
    _host("metrics_textfile", "path", None, "Folder of node_exporter's textfile collector on the hosts."),
    _host("allow_drift", "bool", False, "Reports drift of a running service without a failure."),
    _host("allow_static_evidence", "bool", True, "Plans may rest on static evidence where imports cannot be tried."),
    # DeepEP builds
    _host(
        "deepep_source",
        "str",
        None,
        "DeepEP's source: git URL (a path ending in .git is one), or tar archive or folder on the host.",
    ),
    _host(
        "deepep_revision", "str", None, "Revision of a git source; by default the one pinned for the installed SGLang."
    ),
    _host(
        "deepep_build",
        "bool",
        False,
        "Builds a missing DeepEP that is asked for by name, also where a published wheel would fit.",
    ),
    _host(
        "deepep_archs",
        "strs",
        None,
        "GPU architectures to build for, such as 9.0; by default those of the GPUs present.",
    ),
    _host("deepep_max_jobs", "int", None, "Compile jobs at a time; by default from cores and memory.", minimum=1),
    _host("deepep_timeout", "int", 5400, "Seconds that a build may take.", minimum=1),
    _host(
        "deepep_cuda_home", "path", None, "CUDA toolkit of the build; by default the one that matches the venv's torch."
    ),
    _host("deepep_nvshmem_dir", "path", None, "NVSHMEM of the build; by default the venv's package."),
    _host("deepep_nccl_dir", "path", None, "NCCL of DeepEP 2, for build and service; by default the venv's package."),
    _host("deepep_wheel_url", "str", None, "URL of a copy of a host's or controller's folder wheels, by HTTP."),
    # Tuning
    _host(
        "tune_candidates", "list", [], "Variants that the tuning run compares, each a mapping of instance variables."
    ),
    _host("tune_load", "dict", {}, "Load of the tuning run: prompts, input and output lengths, concurrency."),
    _host(
        "tune_goal",
        "choice",
        "output_throughput",
        "What the tuning run optimises.",
        choices=("output_throughput", "request_throughput", "ttft", "tpot"),
    ),
    _host("tune_repeats", "int", 3, "Measurements per variant.", minimum=1),
    _host("tune_timeout", "int", 1800, "Seconds that one measurement may take.", minimum=1),
)

BY_NAME = {variable.name: variable for variable in VARIABLES}
INSTANCE_KEYS = {variable.key: variable for variable in VARIABLES if variable.scope == "instance"}
_EPLB_KEYS = {
    "enabled": "bool",
    "redundant_experts": "int",
    "algorithm": "str",
    "dispatch_algorithm": "str",
    "init_expert_location": "str",
    "rebalance_num_iterations": "int",
    "rebalance_layers_per_chunk": "int",
    "min_rebalancing_utilization_threshold": "float",
}
_UNSET = ("", "null", "~")
# Facts that our own playbooks set.
_OWN_FACTS = ("sglang_resolved", "sglang_report")


def plain(value: Any) -> Any:
    """``value`` as plain JSON types: tagged, lazy and vaulted values of any ansible-core become str, list, dict."""
    if value is None or isinstance(value, bool):
        return None if value is None else bool(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {str(plain(key)) if not isinstance(key, str) else str.__str__(key): plain(value[key]) for key in value}
    if hasattr(value, "vault") or hasattr(value, "_ciphertext"):
        # The encrypted strings of ansible-core up to 2.18 are sequences, and decrypt on str().
        return str.__str__(str(value))
    if isinstance(value, (Sequence, set, frozenset)):
        return [plain(item) for item in value]
    return str.__str__(str(value))


def distance(left: str, right: str) -> int:
    """Edits (insert, delete, replace, swap of neighbours) between two short words."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        older, before = before, row
        row = [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]


def near_miss(word: str, known: Sequence[str]) -> Optional[str]:
    """The one of ``known`` that ``word`` is most likely a misspelling of, else None.

    Counts as a misspelling: one edit, two in words from eight letters, the same parts in another order or
    without underscores, and a very similar word.
    """
    folded = word.casefold().replace("-", "_")
    if folded in known:
        return folded
    best: Optional[tuple[float, str]] = None
    parts = sorted(folded.split("_"))
    for name in known:
        if parts == sorted(name.split("_")) or folded.replace("_", "") == name.replace("_", ""):
            return name
        if abs(len(name) - len(folded)) > 3:
            continue
        edits = distance(folded, name)
        allowed = 0 if len(name) < 4 else 1 if len(name) < 8 else 2
        ratio = difflib.SequenceMatcher(None, folded, name).ratio()
        if edits <= allowed or (len(name) >= 8 and ratio >= 0.9):
            score = edits - ratio
            if best is None or score < best[0]:
                best = (score, name)
    return best[1] if best else None


class _Bad(ValueError):
    """A value that cannot be used; ``suggestion`` says what would do."""

    def __init__(self, message: str, suggestion: Optional[str] = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.suggestion = suggestion
        self.code = code


Parse = Callable[[str], Any]


def _text(value: str, parse: Parse) -> Any:
    try:
        return plain(parse(value))
    except ValueError as error:
        raise _Bad(f"is neither JSON nor YAML: {str(error).splitlines()[0]}") from None


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().casefold()
        if word in ("true", "yes", "on", "1", "y", "t"):
            return True
        if word in ("false", "no", "off", "0", "n", "f"):
            return False
    raise _Bad("must be true or false")


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise _Bad("must be a whole number, not a boolean")
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+", value.strip()):
        return int(value)
    raise _Bad("must be a whole number")


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise _Bad("must be a number, not a boolean")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _Bad("must be a number") from None


def _word(value: Any) -> str:
    if isinstance(value, str):
        word = value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        word = str(value)
    else:
        raise _Bad("must be text")
    if "\n" in word or "\0" in word:
        raise _Bad("must be one line")
    return word.strip()


def _dict(value: Any, parse: Parse) -> dict[str, Any]:
    if isinstance(value, str):
        value = _text(value, parse)
    # An empty list is how inventories write "nothing more" for either kind.
    if value is None or value == []:
        return {}
    if not isinstance(value, dict):
        raise _Bad("must be a mapping (or its JSON or YAML text)")
    return value


def _list(value: Any, parse: Parse) -> list[Any]:
    if isinstance(value, str):
        text = value.strip()
        if text.startswith(("[", "- ")):
            value = _text(text, parse)
        else:
            value = [part.strip() for part in text.split(",") if part.strip()]
    elif not isinstance(value, (list, dict)):
        value = [value]
    if not isinstance(value, list):
        raise _Bad("must be a list (or its JSON or YAML text)")
    return value


def _parallelism(value: Any, parse: Parse) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("{") or ":" in text:
            value = _text(text, parse)
        else:
            word = re.sub(r"[\s_,+x-]", "", text.casefold())
            if word == "auto":
                return "auto"
            if not _PARALLELISM.match(word):
                raise _Bad("is not a parallelism", "auto, tp8, pp8, ep8, ep4, tp4pp2, or {tp_size: 8, ep_size: 4}")
            names = [part[0] for part in _PARALLELISM_PART.findall(word)]
            if len(set(names)) != len(names):
                raise _Bad("names a size twice", "each of tp, pp, ep, dp once")
            return word
    if not isinstance(value, dict) or not value:
        raise _Bad("is not a parallelism", "auto, tp8, pp8, ep8, ep4, tp4pp2, or {tp_size: 8, ep_size: 4}")
    sizes = {}
    for key, size in value.items():
        name = str(key).casefold().replace("-", "_").lstrip("_")
        name = name if name.endswith("_size") else name + "_size"
        if name not in SIZES:
            raise _Bad(f"has an unknown size {key!r}", ", ".join(SIZES))
        try:
            number = _int(size)
        except _Bad as error:
            raise _Bad(f"{name} {error}") from None
        if number < 1:
            raise _Bad(f"{name} must be at least 1")
        sizes[name] = number
    return sizes


def _backend_name(value: str) -> str:
    name = value.strip().casefold().replace("-", "_")
    return {"deep_ep": "deepep"}.get(name, name)


def _backends(value: Any, parse: Parse) -> Any:
    if isinstance(value, str) and not value.strip().startswith(("[", "- ")) and "," not in value:
        return _backend_name(value)
    names = []
    for item in _list(value, parse):
        if not isinstance(item, str):
            raise _Bad("must hold names")
        name = _backend_name(item)
        if name not in names:
            names.append(name)
    if not names:
        raise _Bad("is an empty list", "auto, a name, or names in order of preference")
    if "auto" in names and len(names) > 1:
        raise _Bad("has auto among names", "auto alone, or names in order of preference")
    return names if len(names) > 1 or isinstance(value, list) else names[0]


def _eplb(value: Any, parse: Parse) -> Any:
    if isinstance(value, str) and value.strip().startswith("{"):
        value = _text(value, parse)
    if not isinstance(value, dict):
        return _bool(value)
    result: dict[str, Any] = {}
    for key, item in value.items():
        kind = _EPLB_KEYS.get(key.replace("-", "_"))
        if kind is None:
            raise _Bad(f"has an unknown key {key!r}", near_miss(key, list(_EPLB_KEYS)) or ", ".join(_EPLB_KEYS))
        if item is None:
            continue
        convert: Callable[[Any], Any] = {"bool": _bool, "int": _int, "float": _float}.get(kind, _word)
        try:
            result[key.replace("-", "_")] = convert(item)
        except _Bad as error:
            raise _Bad(f"{key} {error}") from None
    return result


def _rendezvous(value: Any, parse: Parse) -> dict[str, Any]:
    if isinstance(value, str) and not value.strip().startswith("{"):
        address, _colon, port = value.strip().rpartition(":")
        value = {"address": address.strip("[]"), "port": port} if address else {"address": port}
    value = _dict(value, parse)
    unknown = sorted(set(value) - {"address", "port", "interface"})
    if unknown:
        raise _Bad(f"has unknown keys {', '.join(unknown)}", "address, port, interface")
    if not value.get("address"):
        raise _Bad("has no address", "{address: 10.0.0.1, port: 20000}")
    number = _int(value.get("port") or 20000)
    if not 1 <= number <= 65535:
        raise _Bad(f"port {number} is outside 1 to 65535", code="port_out_of_range")
    result: dict[str, Any] = {"address": _word(value["address"]), "port": number}
    if value.get("interface"):
        result["interface"] = _word(value["interface"])
    return result


_WAVES = '[1, "10%"]'


def _waves(value: Any, parse: Parse) -> list[Any]:
    waves: list[Any] = []
    if isinstance(value, Mapping):
        raise _Bad("must be a list of counts and percentages", _WAVES)
    for item in _list(value, parse):
        if isinstance(item, str) and item.strip().endswith("%"):
            try:
                percent = float(item.strip()[:-1])
            except ValueError:
                percent = 0
            if not 0 < percent <= 100:
                raise _Bad(f"holds {item!r}, which is no percentage above 0 and up to 100", _WAVES)
            waves.append(f"{percent:g}%")
            continue
        try:
            count = _int(item)
        except _Bad:
            raise _Bad(f"holds {item!r}, which is neither a count of instances nor a percentage", _WAVES) from None
        if count < 1:
            raise _Bad(f"holds {count}; a wave has at least one instance", _WAVES)
        waves.append(count)
    if not waves:
        raise _Bad("is empty", _WAVES)
    return waves


def _uses(value: Any, parse: Parse) -> dict[str, list[str]]:
    if isinstance(value, str) and not value.strip().startswith("{") and ":" not in value:
        value = _list(value, parse)
    if isinstance(value, list):
        value = {str(name): [] for name in value}
    result: dict[str, list[str]] = {}
    for name, uses in _dict(value, parse).items():
        backend = name.casefold().replace("-", "_")
        backend = "deep_ep" if backend in ("deepep", "deep_ep") else backend
        chosen = ["a2a" if backend == "deep_ep" else "kv_transfer"] if uses in (None, [], True) else _list(uses, parse)
        for use in chosen:
            if use not in USES:
                hint = near_miss(str(use), USES)
                raise _Bad(f"wants {name} for {use!r}, which is no use", hint or ", ".join(USES))
        result[backend] = list(dict.fromkeys(chosen))
    return result


def _flags(value: Any, parse: Parse) -> dict[str, Any]:
    """Flags as a mapping; the words of a command line (a list or text that begins with a dash) are taken too."""
    words: Optional[list[str]] = None
    if isinstance(value, str) and value.lstrip().startswith("--"):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise _Bad(f"cannot be split into words: {error}") from None
    elif isinstance(value, list) and value and str(value[0]).startswith("--"):
        words = [str(word) for word in value]
    if words is None:
        return _dict(value, parse)
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            given: Any = text if equals else True
            if name in found:
                raise _Bad(f"gives {name} twice", f"{name} once")
            found[name] = given
            name = None if equals else name
        elif name is None:
            raise _Bad("has a word that belongs to no flag")
        else:
            present = found[name]
            found[name] = word if present is True else [*(present if isinstance(present, list) else [present]), word]
    return found


def _env(value: Any, parse: Parse) -> dict[str, str]:
    result = {}
    for name, item in _dict(value, parse).items():
        if not _ENV_NAME.match(name):
            raise _Bad(f"holds {name!r}, which is no name of an environment variable")
        if item is None:
            continue
        if isinstance(item, bool):
            result[name] = "1" if item else "0"
        elif isinstance(item, (str, int, float)):
            result[name] = str(item)
        else:
            result[name] = json.dumps(item, separators=(",", ":"), ensure_ascii=False)
        if "\n" in result[name] or "\0" in result[name]:
            raise _Bad(f"{name} must be one line")
    return result


def coerce(variable: Variable, value: Any, parse: Parse = json.loads) -> Any:
    """``value`` as the variable's type; raises ``ValueError`` with a reason that reads after the variable's name."""
    kind = variable.type
    result: Any
    if kind == "bool":
        return _bool(value)
    if kind == "int":
        number = _int(value)
        if variable.minimum is not None and variable.maximum is not None:
            if not variable.minimum <= number <= variable.maximum:
                raise _Bad(
                    f"is outside {variable.minimum} to {variable.maximum}",
                    code="port_out_of_range" if variable.key == "port" else "invalid_value",
                )
        elif variable.minimum is not None and number < variable.minimum:
            raise _Bad(f"is less than {variable.minimum}")
        return number
    if kind == "choice":
        word = _word(value)
        folded = word.casefold()
        if folded not in variable.choices:
            hint = near_miss(folded, variable.choices)
            raise _Bad("is not one of " + ", ".join(variable.choices), hint or ", ".join(variable.choices))
        return folded
    if kind == "path":
        word = _word(value)
        if not word.startswith("/") and variable.key == "venv":
            raise _Bad("is not an absolute path")
        return word.rstrip("/") or "/"
    if kind == "account":
        word = _word(value)
        if not _ACCOUNT_NAME.match(word):
            raise _Bad("is no name of an account")
        return word
    if kind == "str":
        return _word(value)
    if kind == "parallelism":
        return _parallelism(value, parse)
    if kind == "backends":
        return _backends(value, parse)
    if kind == "eplb":
        return _eplb(value, parse)
    if kind == "rendezvous":
        return _rendezvous(value, parse)
    if kind == "waves":
        return _waves(value, parse)
    if kind == "uses":
        return _uses(value, parse)
    if kind == "env":
        return _env(value, parse)
    if kind == "flags":
        return _flags(value, parse)
    if kind == "ints":
        result = [_int(item) for item in _list(value, parse)]
        if any(item < 0 for item in result) or len(set(result)) != len(result) or not result:
            raise _Bad("must hold different indexes from 0", "[0, 1, 2, 3]")
        return result
    if kind == "strs":
        result = [_word(item) for item in _list(value, parse)]
        if len(set(result)) != len(result):
            raise _Bad("holds a name twice")
        return result
    if kind == "list":
        return _list(value, parse)
    return _dict(value, parse)


class _Reader:
    """Collects what a host's variables say, and what is wrong with them."""

    def __init__(self, parse: Parse) -> None:
        self.parse = parse
        self.problems: list[dict[str, Any]] = []

    def problem(
        self,
        code: str,
        variable: str,
        value: Any,
        message: str,
        suggestion: Optional[str] = None,
        severity: str = "error",
        instance: Optional[str] = None,
    ) -> None:
        self.problems.append(
            {
                "code": code,
                "variable": variable,
                "value": value,
                "message": message,
                "suggestion": suggestion,
                "severity": severity,
                "instance": instance,
            }
        )

    def value(self, variable: Variable, name: str, given: Any, instance: Optional[str] = None) -> tuple[bool, Any]:
        """Whether ``given`` says something usable, and what."""
        if given is None or (isinstance(given, str) and given.strip() in _UNSET):
            return False, None
        if variable.type == "secrets":
            return True, self.secrets(name, given, instance)
        try:
            result = coerce(variable, given, self.parse)
        except _Bad as error:
            shown = "(not shown)" if variable.type in ("flags", "env") else given
            self.problem(
                error.code, name, shown, f"{name}: {_quoted(shown)} {error}", error.suggestion, instance=instance
            )
            return False, None
        if variable.type == "flags":
            result = self.flags(name, result, instance)
        elif variable.type == "env":
            result = self.env(name, result, instance)
        return True, result

    def secrets(self, name: str, given: Any, instance: Optional[str]) -> list[str]:
        if isinstance(given, str):
            try:
                given = plain(self.parse(given))
            except ValueError:
                given = None
        if isinstance(given, list) and all(isinstance(item, str) for item in given):
            given = dict.fromkeys(given, "named")
        if not isinstance(given, dict):
            self.problem(
                "invalid_value", name, "(not shown)", f"{name} must be a mapping of names to secrets", instance=instance
            )
            return []
        names = []
        for key, secret in given.items():
            known = key.replace("-", "_")
            if known == ROUTER_SECRET:
                continue
            if known in SECRET_FLAGS or known in SECRET_ENV or re.fullmatch(r"[A-Z_][A-Z0-9_]*", key):
                if secret in (None, ""):
                    self.problem("secret_empty", f"{name}.{key}", None, f"{name}.{key} is empty", instance=instance)
                elif isinstance(secret, str) and ("\n" in secret.strip() or "\0" in secret):
                    self.problem(
                        "secret_not_one_line",
                        f"{name}.{key}",
                        "(not shown)",
                        f"{name}.{key} must be one line",
                        instance=instance,
                    )
                else:
                    names.append(known if known in SECRET_FLAGS or known in SECRET_ENV else key)
                continue
            hint = near_miss(key, [*SECRET_FLAGS, *SECRET_ENV])
            self.problem(
                "unknown_secret",
                f"{name}.{key}",
                "(not shown)",
                f"{name} has no secret {key!r}",
                hint or "api_key, admin_api_key, ssl_keyfile_password, hf_token, or an UPPER_CASE environment variable",
                instance=instance,
            )
        return sorted(set(names))

    def flags(self, name: str, given: dict[str, Any], instance: Optional[str]) -> dict[str, Any]:
        kept = {}
        for key, value in given.items():
            secret = secret_flag(key)
            if secret and value not in (None, False, ""):
                self.problem(
                    "secret_in_flags",
                    f"{name}.{key}",
                    "(not shown)",
                    f"{name}.{key} is a secret: it would stand in the process list, the unit and the logs",
                    f"sglang_secrets: {{{secret}: …}}",
                    instance=instance,
                )
                continue
            kept[key] = value
        return kept

    def env(self, name: str, given: dict[str, str], instance: Optional[str]) -> dict[str, str]:
        kept = {}
        for key, value in given.items():
            if _SECRET_ENV_NAME.search(key) and value:
                self.problem(
                    "secret_in_env_vars",
                    f"{name}.{key}",
                    "(not shown)",
                    f"{name}.{key} looks like a secret: it would stand in plans, diffs and logs",
                    f"sglang_secrets: {{{key}: …}}",
                    instance=instance,
                )
                continue
            kept[key] = value
        return kept


def secret_flag(key: str) -> Optional[str]:
    """The secret flag that ``key`` means (dashes, underscores or an abbreviation that argparse takes), else None."""
    name = key.strip().lstrip("-").replace("-", "_").casefold()
    for secret, shortest in SECRET_FLAGS.items():
        if name.startswith(shortest) and secret.startswith(name):
            return secret
    return None


def _quoted(value: Any) -> str:
    return value if value == "(not shown)" else json.dumps(value, ensure_ascii=False)


def _check_names(variables: Mapping[str, Any], reader: _Reader) -> None:
    known = [variable.key for variable in VARIABLES]
    for name in variables:
        if not isinstance(name, str) or name in BY_NAME or name in _OWN_FACTS:
            continue
        folded = name.casefold()
        prefix, _underscore, rest = folded.partition("_")
        if prefix == PREFIX[:-1]:
            hint = near_miss(rest, known) if rest else None
            if hint:
                reader.problem(
                    "unknown_variable",
                    name,
                    _shown(variables, name),
                    f"{name} is not a variable of gpufleet.sglang; did you mean {PREFIX}{hint}?",
                    PREFIX + hint,
                )
            elif not rest.startswith("_"):
                reader.problem(
                    "unknown_variable",
                    name,
                    _shown(variables, name),
                    f"{name} is not a variable of gpufleet.sglang and is ignored",
                    severity="warning",
                )
        elif rest in known and prefix.startswith("s") and distance(prefix, PREFIX[:-1]) == 1:
            reader.problem(
                "unknown_variable",
                name,
                _shown(variables, name),
                f"{name} looks like a misspelt {PREFIX}{rest}",
                PREFIX + rest,
            )


def _shown(variables: Mapping[str, Any], name: str) -> Any:
    if re.search(r"secret|key|token|passw", name.casefold()):
        return "(not shown)"
    value = plain(variables[name])
    return value if not isinstance(value, (dict, list)) else f"({type(value).__name__} of {len(value)})"


def _defaults(variables: dict[str, Any], reader: _Reader) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for variable in INSTANCE_KEYS.values():
        if variable.name in variables:
            usable, value = reader.value(variable, variable.name, variables[variable.name])
            if usable:
                defaults[variable.key] = value
    return defaults


def _instances(variables: dict[str, Any], defaults: dict[str, Any], reader: _Reader) -> dict[str, dict[str, Any]]:
    given = variables.get("sglang_instances")
    if isinstance(given, str) and given.strip() not in _UNSET:
        try:
            given = _text(given, reader.parse)
        except _Bad as error:
            reader.problem("invalid_value", "sglang_instances", "(not shown)", f"sglang_instances {error}")
            return {}
    if isinstance(given, str) or given is None or given in ({}, []):
        wants_backends_only = bool(variables.get("sglang_backends")) and not defaults.get("model_path")
        return {} if wants_backends_only else {"default": _complete("default", defaults, reader)}
    if not isinstance(given, dict):
        reader.problem(
            "invalid_value", "sglang_instances", given, "sglang_instances must be a mapping of names to instances"
        )
        return {}
    result = {}
    for name, keys in given.items():
        where = f"sglang_instances.{name}"
        if not _INSTANCE_NAME.match(name):
            reader.problem(
                "invalid_instance_name",
                "sglang_instances",
                name,
                f"{where}: the name must be letters, digits, - and _, and at most 48 characters",
                re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:48] or "default",
            )
            continue
        own = dict(defaults)
        if keys is not None and not isinstance(keys, dict):
            reader.problem("invalid_value", where, keys, f"{where} must be a mapping", instance=name)
            continue
        for key, value in (keys or {}).items():
            found = INSTANCE_KEYS.get(key)
            if found is None:
                bare = key[len(PREFIX) :] if key.startswith(PREFIX) else key
                hint = bare if bare in INSTANCE_KEYS else near_miss(bare, list(INSTANCE_KEYS))
                if hint is None and PREFIX + bare in BY_NAME:
                    message, hint = f"{where}.{key} belongs to the host, not to an instance", PREFIX + bare
                else:
                    message = f"{where}.{key} is not a key of an instance"
                reader.problem(
                    "unknown_variable",
                    f"{where}.{key}",
                    _shown(keys or {}, key),
                    message,
                    hint,
                    instance=name,
                )
                continue
            usable, converted = reader.value(found, f"{where}.{key}", value, name)
            if usable:
                merged = key in ("flags", "env_vars") and isinstance(own.get(key), dict)
                own[key] = {**own[key], **converted} if merged else converted
            elif value is None:
                own.pop(key, None)
        result[name] = _complete(name, own, reader)
    return result


def _complete(name: str, keys: dict[str, Any], reader: _Reader) -> dict[str, Any]:
    instance: dict[str, Any] = {"instance": name, "ready": {}}
    for variable in INSTANCE_KEYS.values():
        value = keys.get(variable.key, plain(variable.default))
        if variable.key.startswith("ready_"):
            instance["ready"][variable.key[len("ready_") :]] = value
        elif variable.key == "secrets":
            instance["secrets"] = value or []
        else:
            instance[variable.key] = value
    if instance["group"] is None:
        instance["group"] = instance["user"]
    environment = instance["environment"]
    if environment and not instance["venv"]:
        # The path holds the hash of lock and interpreter, which only the host knows: environment.yml tells it.
        instance["venv"] = environment.get("path")
    if len(instance["hosts"]) > 1 and instance["rendezvous"] is None:
        reader.problem(
            "rendezvous_missing",
            "sglang_rendezvous",
            None,
            f"instance {name} is over {len(instance['hosts'])} hosts, and rank 0 has no address",
            "sglang_rendezvous: {address: <address of " + instance["hosts"][0] + ">, port: 20000}",
            instance=name,
        )
    return instance


def _check_instances(instances: dict[str, dict[str, Any]], reader: _Reader) -> None:
    ports: dict[int, str] = {}
    gpus: dict[int, str] = {}
    for name, instance in instances.items():
        port = instance["port"]
        if port in ports:
            reader.problem(
                "port_used_twice",
                "sglang_port",
                port,
                f"instances {ports[port]} and {name} both listen on port {port}",
                f"sglang_instances.{name}.port: {max(ports) + 1 if max(ports) < 65535 else 30001}",
                instance=name,
            )
        ports.setdefault(port, name)
        for gpu in instance["gpus"] or []:
            if gpu in gpus:
                reader.problem(
                    "gpu_used_twice",
                    "sglang_gpus",
                    gpu,
                    f"instances {gpus[gpu]} and {name} both use GPU {gpu}",
                    "give each instance its own sglang_gpus",
                    instance=name,
                )
            gpus.setdefault(gpu, name)
    sharing = [
        name
        for name, instance in instances.items()
        if instance["gpus"] is None and str(instance["flags"].get("device", "")).casefold() != "cpu"
    ]
    if sharing and len(instances) > 1:
        reader.problem(
            "gpus_shared_by_instances",
            "sglang_gpus",
            None,
            f"instances {', '.join(sharing)} use all GPUs of a host with {len(instances)} instances",
            "sglang_instances.<name>.gpus: [0, 1, …]",
            severity="warning",
        )


def intents(variables: Mapping[str, Any], parse: Parse = json.loads) -> dict[str, Any]:
    """What ``variables`` (a host's variables) want of the host; the shape is in docs/development/contracts.md.

    ``parse`` turns JSON or YAML text into data and raises ``ValueError``. Nothing that a user can write raises:
    what is wrong is in ``problems``, each ``{code, variable, value, message, suggestion, severity, instance}``.
    Values of secrets never leave this function.
    """
    reader = _Reader(parse)
    _check_names(variables, reader)
    own = {name: plain(variables[name]) for name in variables if isinstance(name, str) and name in BY_NAME}
    settings = {}
    for variable in VARIABLES:
        if variable.scope == "host":
            usable, value = False, None
            if variable.name in own:
                usable, value = reader.value(variable, variable.name, own[variable.name])
            settings[variable.key] = value if usable else plain(variable.default)
    wanted: dict[str, list[str]] = {}
    if "sglang_backends" in own:
        usable, value = reader.value(BY_NAME["sglang_backends"], "sglang_backends", own["sglang_backends"])
        wanted = value if usable else {}
        for name in list(wanted):
            if name not in KNOWN_BACKENDS:
                hint = near_miss(name, KNOWN_BACKENDS)
                reader.problem(
                    "unknown_backend",
                    "sglang_backends",
                    name,
                    f"sglang_backends names {name!r}, which is no backend",
                    hint or ", ".join(KNOWN_BACKENDS),
                )
                del wanted[name]
    defaults = _defaults(own, reader)
    instances = _instances(own, defaults, reader)
    _check_instances(instances, reader)
    venvs: dict[str, dict[str, Any]] = {}
    for instance in instances.values():
        if instance["venv"] and instance["venv"] not in venvs:
            venvs[instance["venv"]] = {"user": instance["user"], "environment": instance["env_vars"]}
    if not instances and defaults.get("venv"):
        venvs[defaults["venv"]] = {
            "user": defaults.get("user", INSTANCE_KEYS["user"].default),
            "environment": defaults.get("env_vars", {}),
        }
    return {
        "instances": instances,
        "backends": wanted,
        "venvs": venvs,
        "settings": settings,
        "problems": reader.problems,
    }
