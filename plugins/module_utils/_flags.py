# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the user's flags as the command line of the installed SGLang takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents, _rules, _server_args, _versions

_NO_VALUE = ("store_true", "store_false", "store_const", "append_const", "boolean_optional")
_HUMAN_INT = re.compile(r"-?[0-9]+(?:\.[0-9]+)?[kKmMgG]?[iI]?[bB]?\Z")
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_FIELDS = ("tp_size", "pp_size", "dp_size", "ep_size", "attn_cp_size", "attn_dp_size", "moe_dp_size", "dcp_size")
_SHOWN = {"<tp_size>": "the tp size", "<dp_size>": "the dp size"}
# Declared as text and read as JSON by SGLang after the arguments.
JSON_TEXT = ("--json-model-override-args", "--model-loader-extra-config", "--preferred-sampling-params")
PLACEHOLDERS = ("<tp_size>", "<dp_size>")


class Given(NamedTuple):
    """A flag that the user gave, under SGLang's own name. ``value`` may be one of ``PLACEHOLDERS``."""

    key: str
    flag: str
    value: Any
    name: str  # as the user wrote it
    entry: Optional[dict[str, Any]]  # None where the definitions are not known
    translated: bool = False


def key_of(name: str) -> str:
    """``tp_size`` of ``--tp-size``, ``tp-size`` or ``tp_size``."""
    return name.strip().lstrip("-").replace("-", "_")


class Catalogue:
    """The arguments that the installed SGLang accepts (``probe.server_args``), indexed once a plan."""

    def __init__(self, server_args: Optional[Mapping[str, Any]], sglang_version: Optional[str] = None) -> None:
        self.server_args = dict(server_args or {})
        self.state = self.server_args.get("state") or "unknown"
        self.version = self.server_args.get("sglang_version") or sglang_version
        self._raw: Mapping[str, Any] = self.server_args.get("flags") or {}
        self._options: dict[str, str] = {}
        if self.state == "ok":
            for key, entry in self._raw.items():
                self._options[entry.get("flag") or "--" + key.replace("_", "-")] = key
                for option in entry.get("aliases") or ():
                    self._options.setdefault(option, key)
            self._own_names()

    def _own_names(self) -> None:
        """Put sizes under SGLang's own names, where they are listed under argparse's (``tensor_parallel_size``)."""
        renamed: dict[str, Any] = {}
        for key in _FIELDS:
            option = "--" + key.replace("_", "-")
            owner = self._options.get(option)
            if key in self._raw or owner is None:
                continue
            entry = self._raw[owner]
            options = [entry.get("flag") or "--" + owner.replace("_", "-"), *(entry.get("aliases") or ())]
            renamed[owner] = (key, {**entry, "flag": option, "aliases": [item for item in options if item != option]})
        if renamed:
            self._raw = dict(renamed.get(key, (key, entry)) for key, entry in self._raw.items())
            self.server_args["flags"] = self._raw
            moved = {owner: key for owner, (key, _entry) in renamed.items()}
            self._options = {option: moved.get(key, key) for option, key in self._options.items()}

    @property
    def known(self) -> bool:
        return self.state == "ok"

    def entry(self, key: str) -> Optional[dict[str, Any]]:
        raw = self._raw.get(key) if self.known else None
        if raw is None:
            return None
        entry: dict[str, Any] = _server_args.expand({"flags": {key: raw}})["flags"][key]
        return entry

    def has(self, key: str) -> Optional[bool]:
        """Whether the flag is there and not deprecated; None when the definitions could not be read."""
        if not self.known:
            return None
        raw = self._raw.get(key)
        return raw is not None and not raw.get("deprecated")

    def choices(self, key: str) -> Optional[list[str]]:
        entry = self.entry(key)
        if not entry or not entry.get("choices") or entry.get("uncertain"):
            return None
        return [str(choice) for choice in entry["choices"]]

    def flag(self, key: str) -> str:
        raw = self._raw.get(key) or {}
        return raw.get("flag") or "--" + key.replace("_", "-")

    def resolve(self, name: str) -> dict[str, Any]:
        """What ``name`` means, in the terms of ``_server_args.resolve_flag``."""
        option = "--" + key_of(name).replace("_", "-")
        key = self._options.get(option)
        raw = self._raw.get(key) if key else None
        if key and raw is not None and not raw.get("deprecated") and not option.startswith("--no-"):
            flag = self.flag(key)
            return {"kind": "exact" if flag == option else "alias", "key": key, "flag": flag}
        return _server_args.resolve_flag(self.server_args, name)


class Reading:
    """The user's flags, read against a catalogue: ``given`` by key in the user's order, and what is wrong with them."""

    def __init__(self) -> None:
        self.given: dict[str, Given] = {}
        self.rejections: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Any]] = []

    def value(self, key: str, default: Any = None) -> Any:
        return self.given[key].value if key in self.given else default

    def reject(self, code: str, message: str, flag: str, value: Any = None, suggestion: Optional[str] = None) -> None:
        self.rejections.append(
            {
                "code": code,
                "message": message,
                "flag": flag,
                "variable": "sglang_flags",
                "value": value,
                "numbers": {},
                "suggestion": suggestion,
            }
        )

    def warn(self, code: str, message: str, flag: str, value: Any = None) -> None:
        self.warnings.append(
            {"code": code, "message": message, "flag": flag, "variable": "sglang_flags", "value": value}
        )


def read_flags(flags: Mapping[str, Any], catalogue: Catalogue) -> Reading:
    """Read ``sglang_flags``: canonical long names, deprecated ones translated, and everything wrong in one go."""
    reading = Reading()
    for name, value in flags.items():
        if not isinstance(name, str) or not re.fullmatch(r"-{0,2}[A-Za-z][A-Za-z0-9_-]*", name.strip()):
            words = re.findall(r"[A-Za-z][A-Za-z0-9_-]*", str(name))
            reading.reject(
                "invalid_flag",
                f"sglang_flags: {name!r} is no name of a flag",
                str(name),
                suggestion=f"{key_of(words[0])}: <value>"
                if words
                else "a name such as tp_size, with its value after it",
            )
            continue
        secret = _intents.secret_flag(name)
        if secret:
            if value not in (None, False, ""):
                reading.reject(
                    "secret_in_flags",
                    f"sglang_flags.{name} is a secret: it would stand in the process list, the unit and the logs",
                    "--" + secret.replace("_", "-"),
                    "(not shown)",
                    f"sglang_secrets: {{{secret}: …}}",
                )
            continue
        _read_one(reading, catalogue, name.strip(), value)
    return reading


def _read_one(reading: Reading, catalogue: Catalogue, name: str, value: Any) -> None:
    found = catalogue.resolve(name)
    kind = found["kind"]
    version = catalogue.version or "of this venv"
    if kind == "unverified":
        _unverified(reading, catalogue, name, value)
        return
    if kind == "ambiguous" or kind == "unknown":
        row = _rename(key_of(name), catalogue)
        if row is not None:
            _translate(reading, catalogue, name, value, row.becomes, f"SGLang {version} has no --{_dashed(name)}")
            return
        if kind == "ambiguous":
            reading.reject(
                "ambiguous_flag",
                f"--{_dashed(name)} is ambiguous in SGLang {version}: {', '.join(found['candidates'])}",
                "--" + _dashed(name),
                value,
                _best(found["candidates"], name),
            )
        elif value is None:
            reading.warn(
                "unknown_flag", f"SGLang {version} has no --{_dashed(name)}; null leaves it out", "--" + _dashed(name)
            )
        else:
            near = found.get("near") or []
            removed = _rules.REMOVED.get(key_of(name))
            reading.reject(
                "flag_removed" if removed else "unknown_flag",
                f"SGLang {version} has no flag --{_dashed(name)}"
                + (f"; did you mean {near[0]}?" if near and not removed else ""),
                "--" + _dashed(name),
                value,
                removed or (near[0] if near else "remove it, or install the SGLang that has it"),
            )
        return
    key = found["key"]
    if kind == "deprecated":
        _deprecated(reading, catalogue, name, value, found)
        return
    if kind == "abbreviation":
        reading.warn(
            "flag_abbreviated",
            f"--{_dashed(name)} is an abbreviation that a later SGLang may refuse; written as {found['flag']}",
            found["flag"],
            value,
        )
    if found.get("negated"):
        wanted = _boolean(value)
        if wanted is None:
            _mistyped(reading, found["flag"], value, "true or false")
            return
        value = not wanted
    _add(reading, catalogue, key, value, name)


def _unverified(reading: Reading, catalogue: Catalogue, name: str, value: Any) -> None:
    key = key_of(name)
    key = _rules.SHORTHANDS.get(key, key)
    row = next((row for row in _rules.RENAMES if row.flag == key), None)
    if row is not None and _versions.within(catalogue.version, row.sglang):
        _translate(reading, catalogue, name, value, row.becomes, f"SGLang {catalogue.version} has no --{_dashed(name)}")
        return
    _add(reading, catalogue, key, value, name)


def _rename(key: str, catalogue: Catalogue) -> Optional[_rules.Rename]:
    for row in _rules.RENAMES:
        if row.flag == key and all(catalogue.has(new) for new in row.becomes):
            return row
    return None


def _deprecated(reading: Reading, catalogue: Catalogue, name: str, value: Any, found: Mapping[str, Any]) -> None:
    targets = _replacement(found.get("replacement") or "")
    version = catalogue.version or "of this venv"
    if not targets or not all(catalogue.has(key) for key in targets):
        row = _rename(found["key"], catalogue)
        targets = row.becomes if row is not None else {}
    if targets and not found.get("removed"):
        _translate(reading, catalogue, name, value, targets, f"deprecated in SGLang {version}")
        return
    if found.get("removed"):
        if value is None or value is False:
            return
        reading.reject(
            "flag_removed",
            f"SGLang {version} refuses {found['flag']}: {found.get('message') or 'it was removed'}",
            found["flag"],
            value,
            found.get("replacement") or "remove it",
        )
        return
    reading.warn(
        "flag_deprecated",
        f"{found['flag']} is deprecated in SGLang {version} and may do nothing"
        + (f": {found['message']}" if found.get("message") else ""),
        found["flag"],
        value,
    )
    _add(reading, catalogue, found["key"], value, name)


def _replacement(text: str) -> dict[str, Any]:
    """``{key: value}`` of SGLang's replacements: ``--x``, ``--x=value``, ``--x-{a,b}=v``, ``--x <dp-size>``."""
    match = re.fullmatch(r"(--[a-z0-9-]*(?:\{[a-z0-9,-]+\})?[a-z0-9-]*)(?:[= ](\S+))?", text.strip().lower())
    if not match:
        return {}
    option, value = match.groups()
    options = [option]
    braces = re.search(r"\{([^}]*)\}", option)
    if braces:
        options = [option[: braces.start()] + part + option[braces.end() :] for part in braces.group(1).split(",")]
    if value is None:
        return {key_of(item): "=" for item in options}
    placeholder = value.replace("-", "_")
    if value.startswith("<"):
        return {key_of(item): placeholder for item in options} if placeholder in PLACEHOLDERS else {}
    return {key_of(item): value for item in options}


def _translate(
    reading: Reading, catalogue: Catalogue, name: str, value: Any, targets: Mapping[str, Any], because: str
) -> None:
    if value is None or _boolean(value) is False:
        return
    written = []
    for key, template in targets.items():
        new = value if template == "=" else template
        shown = _SHOWN.get(new, new) if isinstance(new, str) else _shown(new)
        written.append(catalogue.flag(key) + ("" if new is True else f" {shown}"))
        present = reading.given.get(key)
        if present is not None:
            continue
        _add(reading, catalogue, key, new, name, translated=True)
    reading.warn(
        "flag_renamed", f"--{_dashed(name)} is written as {', '.join(written)}: {because}", "--" + _dashed(name), value
    )


def _add(reading: Reading, catalogue: Catalogue, key: str, value: Any, name: str, translated: bool = False) -> None:
    present = reading.given.get(key)
    if present is not None and not present.translated:
        if present.value != value and tokens(present)[0] != tokens(present._replace(value=value))[0]:
            reading.reject(
                "flag_given_twice",
                f"sglang_flags gives {catalogue.flag(key)} twice: {present.name}={_shown(present.value)} "
                f"and {name}={_shown(value)}",
                catalogue.flag(key),
                value,
                f"keep one of {present.name} and {name}",
            )
        return
    entry = catalogue.entry(key)
    given = Given(key, catalogue.flag(key), value, name, entry, translated)
    if not (isinstance(value, str) and value in PLACEHOLDERS):
        problem = tokens(given)[1]
        if problem:
            reading.reject(
                problem["code"],
                f"sglang_flags.{name}: {_shown(value)} {problem['message']}",
                given.flag,
                value,
                problem.get("suggestion"),
            )
            return
    reading.given[key] = given


def _dashed(name: str) -> str:
    return key_of(name).replace("_", "-")


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _best(candidates: list[str], name: str) -> Optional[str]:
    size = "--" + _dashed(name) + "-size"
    return size if size in candidates else (candidates[0] if candidates else None)


def _mistyped(reading: Reading, flag: str, value: Any, expected: str) -> None:
    reading.reject("flag_type", f"{flag} takes {expected}, not {_shown(value)}", flag, value, expected)


def _boolean(value: Any) -> Optional[bool]:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().casefold() in _TRUE + _FALSE:
        return value.strip().casefold() in _TRUE
    return None


def tokens(given: Given) -> tuple[list[str], Optional[dict[str, Any]]]:
    """The words of the command line for a flag, and ``{code, message, suggestion}`` when its value cannot be taken."""
    entry, value, flag = given.entry, given.value, given.flag
    if value is None:
        return [], None
    if entry is None:
        return _guessed(flag, value)
    action, nargs = entry.get("action"), entry.get("nargs")
    if action in _NO_VALUE:
        wanted = _boolean(value)
        if wanted is None:
            return [], _problem("flag_type", "is not true or false, and the flag takes no value", "true or false")
        if wanted:
            return [flag], None
        if action == "boolean_optional":
            return ["--no-" + flag[2:]], None
        return [], None
    if value is False:
        return [], None
    if action == "count":
        if isinstance(value, bool) or not isinstance(value, int):
            return [], _problem("flag_type", "is no number of repetitions")
        return [flag] * value, None
    if action in ("append", "extend"):
        words: list[str] = []
        for item in value if isinstance(value, list) else [value]:
            text, problem = _scalar(entry, item)
            if problem:
                return [], problem
            words.extend(_pair(flag, text))
        return words, None
    if nargs in ("+", "*") or (isinstance(nargs, int) and nargs > 1) or (isinstance(nargs, str) and nargs.isdigit()):
        return _several(entry, flag, value, nargs)
    if nargs == "?" and value is True:
        return [flag], None
    if isinstance(value, list) and entry.get("type") != "json":
        if len(value) == 1:
            value = value[0]
        else:
            return [], _problem(
                "flag_type", "is a list, and the flag takes one value (the last one would win)", "one value"
            )
    text, problem = _scalar(entry, value)
    if problem:
        return [], problem
    return _pair(flag, text), None


def _several(entry: Mapping[str, Any], flag: str, value: Any, nargs: Any) -> tuple[list[str], Optional[dict[str, Any]]]:
    if isinstance(value, dict):
        items: list[Any] = [f"{key}={item}" for key, item in value.items()]
    elif isinstance(value, list):
        items = value
    elif isinstance(value, str) and entry.get("type") in ("int", "float"):
        items = [part for part in re.split(r"[\s,]+", value.strip("[] ")) if part]
    else:
        items = [value]
    if not items:
        if nargs == "*":
            return [], None
        return [], _problem("flag_type", "is empty, and the flag takes at least one value", "at least one value")
    if (isinstance(nargs, int) or str(nargs).isdigit()) and len(items) != int(nargs):
        return [], _problem("flag_type", f"has {len(items)} values, and the flag takes {nargs}", f"{nargs} values")
    words = [flag]
    for item in items:
        text, problem = _scalar(entry, item)
        if problem:
            return [], problem
        if _looks_like_a_flag(text):
            return [], _problem("flag_type", f"holds {text!r}, which SGLang would take for a flag")
        words.append(text)
    return words, None


def _scalar(entry: Mapping[str, Any], value: Any) -> tuple[str, Optional[dict[str, Any]]]:
    kind = entry.get("type")
    if kind == "json":
        return _json_text(value)
    if isinstance(value, (dict, list)):
        if kind not in (None, "str") or entry.get("choices"):
            return "", _problem(
                "flag_type", f"is a {'mapping' if isinstance(value, dict) else 'list'}, not a {kind}", kind
            )
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")), None
    if str(entry.get("flag")) in JSON_TEXT:
        return _json_text(value)
    if isinstance(value, bool):
        expected = {"int": "a whole number", "float": "a number"}.get(str(kind), "a value")
        return "", _problem("flag_type", f"is a boolean, and the flag takes {expected}", expected)
    text = str(value).strip() if kind in ("int", "float") else str(value)
    if "\n" in text or "\0" in text:
        return "", _problem(
            "flag_type", "has more than one line", "one line, or the path of a file where the flag takes one"
        )
    if kind == "int":
        if isinstance(value, float) and value.is_integer():
            text = str(int(value))
        if entry.get("parser") == "human_readable_int":
            if not _HUMAN_INT.match(text):
                return "", _problem("flag_type", "is no number of tokens such as 8192 or 8k", "a whole number")
        elif not re.fullmatch(r"[+-]?[0-9]+", text):
            return "", _problem("flag_type", "is no whole number", "a whole number")
    if kind == "float":
        try:
            float(text)
        except ValueError:
            return "", _problem("flag_type", "is no number", "a number")
    choices = entry.get("choices")
    if choices and not entry.get("uncertain"):
        texts = [str(choice) for choice in choices]
        if text not in texts:
            near = _intents.near_miss(text, [item.casefold().replace("-", "_") for item in texts])
            hint = next((item for item in texts if item.casefold().replace("-", "_") == near), None)
            return "", _problem("flag_choice", f"is not one of {', '.join(texts)}", hint or ", ".join(texts))
    return text, None


def _json_text(value: Any) -> tuple[str, Optional[dict[str, Any]]]:
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError as error:
            return "", _problem("flag_type", f"is not JSON: {error}", "a mapping, a list, or JSON text")
        return value, None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")), None


def _guessed(flag: str, value: Any) -> tuple[list[str], Optional[dict[str, Any]]]:
    """The words for a flag whose definition is not known: by the YAML type alone."""
    if value is True:
        return [flag], None
    if value is False or value == []:
        return [], None
    if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
        return [flag, *[str(item) for item in value]], None
    if isinstance(value, (dict, list)):
        return [flag, json.dumps(value, ensure_ascii=False, separators=(",", ":"))], None
    text = str(value)
    if "\n" in text or "\0" in text:
        return [], _problem(
            "flag_type", "has more than one line", "one line, or the path of a file where the flag takes one"
        )
    return _pair(flag, text), None


def _pair(flag: str, text: str) -> list[str]:
    # argparse takes a value that begins with a dash for a flag, unless it looks like a number.
    return [f"{flag}={text}"] if _looks_like_a_flag(text) else [flag, text]


def _looks_like_a_flag(text: str) -> bool:
    return text.startswith("-") and not re.fullmatch(r"-(\d+|\d*\.\d+)", text) and text != "-"


def _problem(code: str, message: str, suggestion: Optional[str] = None) -> dict[str, Any]:
    return {"code": code, "message": message, "suggestion": suggestion}


def read_env(env: Mapping[str, str], catalogue: Catalogue) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The user's environment variables, renamed ones under their new name, and warnings about the others."""
    result: dict[str, str] = {}
    warnings: list[dict[str, Any]] = []
    for name, value in env.items():
        found = _server_args.resolve_env_var(catalogue.server_args, name)
        row = next((row for row in _rules.ENV_RENAMES if row.name == name), None)
        known = catalogue.server_args.get("env_vars") or []
        if found["kind"] == "deprecated" and found.get("replacement"):
            new = found["replacement"]
        elif row is not None and row.becomes in known:
            new = row.becomes
        else:
            new = None
        message = code = ""
        translated = translate_env(name, new, value, found.get("transform")) if new else None
        if new and translated is None and new not in env:
            # What the value becomes is not known here; SGLang still takes the old name and says so.
            new, found = None, {**found, "kind": "deprecated", "message": f"{new} takes another value"}
        if new:
            code, message = "env_var_renamed", f"{name} is {new} in SGLang {catalogue.version}, and is written so"
            if new in env:
                message = f"{name} is {new} in SGLang {catalogue.version}, which is given too and counts"
            else:
                result[new] = str(translated)
                if translated != value:
                    message += f", with {translated} in place of {value}"
        else:
            result[name] = value
        if found["kind"] == "deprecated" and not new:
            code = "env_var_deprecated"
            message = f"{name} is deprecated in SGLang {catalogue.version}: {found.get('message') or 'no replacement'}"
        if found["kind"] == "unknown" and not new and not _dispatch_variable(name):
            near = found.get("near") or []
            code = "env_var_unknown"
            message = f"SGLang {catalogue.version} does not declare {name}" + (
                f"; did you mean {near[0]}?" if near else ", and may ignore it"
            )
        if code:
            warnings.append({"code": code, "message": message, "variable": f"sglang_env_vars.{name}", "value": value})
    return result, warnings


def translate_env(old: str, new: str, value: str, transform: Optional[str] = None) -> Optional[str]:
    """The value under its new name, None where that is not known.

    ``transform`` is SGLang's function (``_ms_to_s``, ``_invert_bool``); versions that do not name one turn a
    ``DISABLE`` into an ``ENABLE`` with the same value all the same, which then means the opposite.
    """
    turned = ("_DISABLE_" in old and "_ENABLE_" in new) or ("_ENABLE_" in old and "_DISABLE_" in new)
    if transform == "_invert_bool" or (transform is None and turned):
        wanted = _boolean(value if not value.isdigit() else int(value))
        return None if wanted is None else "0" if wanted else "1"
    if transform == "_ms_to_s" or (transform is None and old.endswith("_MS") and not new.endswith("_MS")):
        try:
            return str(float(value) / 1000.0)
        except ValueError:
            return None
    return value if transform is None else None


def _dispatch_variable(name: str) -> bool:
    # Some are read where they are used and declared nowhere.
    return any(row.dispatch_env == name for row in _rules.A2A_BACKENDS.values())
