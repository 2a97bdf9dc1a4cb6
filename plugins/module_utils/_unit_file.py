# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: renders the unit of an instance and judges units; pure, reads and runs nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd_quote import (
    QuoteError,
    parse_command,
    quote_command,
    quote_setting,
    specifier_escape,
    split_words,
)

MARK = "# Made by gpufleet.sglang.service_unit for the instance"
REVISION_VARIABLE = "GPUFLEET_SGLANG_REVISION"
SECRETS_VARIABLE = "GPUFLEET_SGLANG_SECRETS"
REVISION_PLACEHOLDER = "@REVISION@"
EMPTY_DIR = "/var/lib/gpufleet-sglang/empty"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}\Z")

# Sections as ordered pairs: systemd allows a key several times, and the order of Exec lines counts.
Section = list[tuple[str, str]]
Unit = dict[str, Section]


class UnitError(ValueError):
    """A unit that cannot be rendered; the message names the value and the remedy."""


def check_instance(instance: str) -> str:
    """The name of an instance, or UnitError when it cannot be part of a unit's and a folder's name."""
    if not _INSTANCE.match(instance):
        raise UnitError(
            f"the instance name {instance!r} is not usable: letters, digits, - and _ (first a letter or digit), "
            "at most 48 characters"
        )
    return instance


def unit_name(instance: str) -> str:
    """``sglang-<instance>.service``."""
    return f"sglang-{check_instance(instance)}.service"


@dataclass
class UnitSpec:
    """Everything the text of a unit depends on."""

    instance: str
    argv: list[str]
    user: str
    group: str
    env_file: str  # may contain REVISION_PLACEHOLDER
    venv: str
    model_path: str | None = None  # None when it is a hub name
    read_only_paths: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    systemd_version: int = 252
    sglang_version: str | None = None
    supplementary_groups: list[str] = field(default_factory=list)
    expected_gpus: int = 0
    gpu_wait_seconds: int = 120
    nvidia_modprobe: str | None = None
    credentials: dict[str, str] = field(default_factory=dict)  # name -> file on the host
    secret_env_file: str | None = None
    secrets_stamp_file: str | None = None
    secret_flags: list[str] = field(default_factory=list)
    log_namespace: str | None = None
    private_tmp: bool = True
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)


def _version_tuple(version: str | None) -> tuple[int, ...]:
    match = re.match(r"(\d+(?:\.\d+)*)", version or "")
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def stops_by_sigkill(sglang_version: str | None) -> bool:
    """Whether a clean stop of this SGLang ends with SIGKILL by its own hand (rc 137): seen on 0.5.15 and 0.5.18,
    and no longer on 0.5.23; versions between were not seen and unknown ones are taken as old."""
    return _version_tuple(sglang_version) < (0, 5, 23)


def default_environment(
    instance: str, argv: Sequence[str], env: Mapping[str, str], system_path: str = SYSTEM_PATH
) -> dict[str, str]:
    """The service's environment: homes and caches of this instance, PATH for the JIT compilers, then ``env`` (wins).

    PATH is the interpreter's folder, then ``$CUDA_HOME/bin`` when ``env`` names one, then the system's folders;
    a PATH in ``env`` is taken as it is.
    """
    state = f"/var/lib/sglang/{instance}"
    cache = f"/var/cache/sglang/{instance}"
    full = {
        "HOME": state,
        "XDG_CACHE_HOME": cache,
        "HF_HOME": f"{cache}/huggingface",
        "SGLANG_CACHE_DIR": f"{cache}/sglang",
        "SGLANG_DG_CACHE_DIR": f"{cache}/deep_gemm",
        "DG_JIT_CACHE_DIR": f"{cache}/deep_gemm",
        "EP_JIT_CACHE_DIR": f"{cache}/deep_ep",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch_extensions",
        "TILELANG_CACHE_DIR": f"{cache}/tilelang",
        "FLASHINFER_WORKSPACE_BASE": cache,
        "CUDA_CACHE_PATH": f"{cache}/cuda",
        "PYTHONUNBUFFERED": "1",
    }
    path = [os.path.dirname(argv[0])]
    cuda_home = env.get("CUDA_HOME", "")
    if cuda_home and ":" not in cuda_home:
        path.append(cuda_home.rstrip("/") + "/bin")
    full["PATH"] = ":".join([*path, system_path])
    full.update(env)
    return full


def gpu_wait_command(count: int, seconds: int) -> list[str]:
    """A bounded wait for ``count`` GPUs, each look with its own time limit (nvidia-smi hangs on sick hosts)."""
    script = (
        f"tries={max(1, seconds // 2)}; "
        "while :; do "
        "found=$(timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU '); "
        f'[ "$found" -ge {count} ] && exit 0; '
        'tries=$((tries - 1)); [ "$tries" -gt 0 ] || break; sleep 2; done; '
        f'echo "{count} GPUs expected, $found found" >&2; exit 1'
    )
    return ["/bin/sh", "-c", script]


def _under(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _home_protection(spec: UnitSpec) -> str:
    """``yes`` hides /home, /root and /run/user, which breaks a venv, model or cache that lies there."""
    paths = [spec.venv, spec.model_path or "", *spec.read_only_paths, *spec.argv]
    for value in spec.env.values():
        paths.extend(value.split(":"))
    for argument in spec.argv:
        paths.extend(re.findall(r"/(?:home|root|run/user)(?:/[^\s\"',}]*)?", argument))
    return "read-only" if any(_under(path, ("/home", "/root", "/run/user")) for path in paths) else "yes"


def build_unit(spec: UnitSpec) -> Unit:
    """The unit as data. Raises UnitError for what systemd cannot carry or what must not be overridden."""
    name = check_instance(spec.instance)
    try:
        exec_start = quote_command(spec.argv, " \\\n    ")
        readable = [spec.venv, *([spec.model_path] if spec.model_path else []), *spec.read_only_paths]
        # "-": a path that vanished must show as SGLang's own message, not as 226/NAMESPACE.
        read_only = " ".join(quote_setting("-" + path) for path in dict.fromkeys(readable) if path.startswith("/"))
        unit: Section = [
            ("Description", specifier_escape(f"SGLang instance {name}")),
            ("Wants", "network-online.target"),
            ("After", "network-online.target nvidia-persistenced.service nvidia-fabricmanager.service"),
            ("StartLimitIntervalSec", "3600"),
            ("StartLimitBurst", "4"),
        ]
        mounts = [path for path in dict.fromkeys(readable) if path.startswith("/")]
        if mounts:
            unit.append(("RequiresMountsFor", " ".join(quote_setting(path) for path in mounts)))
        service: Section = [("Type", "exec")]
        if spec.nvidia_modprobe:
            # NoNewPrivileges keeps the driver's setuid helper from making /dev/nvidia-uvm on first use.
            service.append(("ExecStartPre", "-+" + quote_command([spec.nvidia_modprobe, "-u", "-c", "0"])))
        if spec.expected_gpus > 0:
            service.append(("ExecStartPre", quote_command(gpu_wait_command(spec.expected_gpus, spec.gpu_wait_seconds))))
        service.append(("ExecStart", exec_start))
        service += [
            ("User", specifier_escape(spec.user)),
            ("Group", specifier_escape(spec.group)),
        ]
        if spec.supplementary_groups:
            service.append(("SupplementaryGroups", " ".join(spec.supplementary_groups)))
        service += [
            ("WorkingDirectory", EMPTY_DIR),
            ("Environment", f"{REVISION_VARIABLE}={REVISION_PLACEHOLDER}"),
            ("EnvironmentFile", specifier_escape(spec.env_file)),
        ]
        for extra in (spec.secret_env_file, spec.secrets_stamp_file):
            if extra:
                service.append(("EnvironmentFile", specifier_escape(extra)))
        for credential in sorted(spec.credentials):
            service.append(("LoadCredential", f"{credential}:{specifier_escape(spec.credentials[credential])}"))
        service += [
            ("StateDirectory", f"sglang/{name}"),
            ("StateDirectoryMode", "0750"),
            ("CacheDirectory", f"sglang/{name}"),
            ("CacheDirectoryMode", "0750"),
            ("UMask", "0077"),
            ("Restart", "on-failure"),
            ("RestartSec", "15"),
            # 2 is argparse's: a bad flag does not heal by trying again.
            ("RestartPreventExitStatus", "2"),
        ]
        if stops_by_sigkill(spec.sglang_version):
            service += [("SuccessExitStatus", "SIGKILL 137"), ("RestartForceExitStatus", "SIGKILL 137")]
        service += [
            ("KillMode", "mixed"),
            ("TimeoutStopSec", "120"),
            ("TimeoutStartSec", str(spec.gpu_wait_seconds * 11 + 60) if spec.expected_gpus > 0 else "90"),
            ("OOMPolicy", "kill"),
            ("LimitMEMLOCK", "infinity"),
            ("LimitNOFILE", "1048576"),
            ("LimitCORE", "0"),
        ]
        if spec.secret_flags and spec.systemd_version >= 253:
            # SGLang prints its resolved arguments, the key among them, when it starts.
            names = "|".join(re.sub(r"[-_]", "[-_]", name) for name in sorted(spec.secret_flags))
            service.append(("LogFilterPatterns", f"~({names})"))
        if spec.log_namespace:
            service.append(("LogNamespace", spec.log_namespace))
        service += [
            ("NoNewPrivileges", "yes"),
            ("CapabilityBoundingSet", ""),
            ("ProtectSystem", "strict"),
            ("ProtectHome", _home_protection(spec)),
            ("PrivateTmp", "yes" if spec.private_tmp else "no"),
            ("ProtectKernelTunables", "yes"),
            ("ProtectKernelModules", "yes"),
            ("ProtectKernelLogs", "yes"),
            ("ProtectControlGroups", "yes"),
            ("ProtectHostname", "yes"),
            ("ProtectProc", "invisible"),
            ("LockPersonality", "yes"),
            ("RestrictRealtime", "yes"),
            ("RestrictSUIDSGID", "yes"),
            ("RestrictNamespaces", "yes"),
            ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
            ("SystemCallArchitectures", "native"),
            ("SystemCallFilter", "@system-service pidfd_getfd"),
            ("SystemCallErrorNumber", "EPERM"),
        ]
        if read_only:
            service.append(("ReadOnlyPaths", read_only))
        sections: Unit = {"Unit": unit, "Service": service, "Install": [("WantedBy", "multi-user.target")]}
        return _override(sections, spec.overrides)
    except QuoteError as error:
        raise UnitError(str(error)) from error


_FIXED = {
    "ExecStart": "it is the plan's argv",
    "User": "set sglang_user",
    "Group": "set sglang_group",
    "WorkingDirectory": "a folder with files in it can shadow the libraries",
    "StateDirectory": "it belongs to the instance",
    "CacheDirectory": "it belongs to the instance",
}


def _override(unit: Unit, overrides: Mapping[str, Mapping[str, Any]]) -> Unit:
    result = {section: list(pairs) for section, pairs in unit.items()}
    for section, settings in overrides.items():
        if section not in result:
            raise UnitError(f"unit override: no section [{section}]; known: {', '.join(result)}")
        for key, value in settings.items():
            if not re.match(r"[A-Z][A-Za-z0-9]*\Z", key):
                raise UnitError(f"unit override: {key!r} is not the name of a systemd setting")
            if key in _FIXED:
                raise UnitError(f"unit override: {key} cannot be overridden: {_FIXED[key]}")
            values = value if isinstance(value, (list, tuple)) else [value]
            texts = [("yes" if item else "no") if isinstance(item, bool) else str(item) for item in values]
            if any("\n" in text or "\0" in text or text.endswith("\\") for text in texts):
                raise UnitError(f"unit override: {key} must be one line and not end with a backslash")
            kept = [pair for pair in result[section] if pair[0] != key]
            if key in ("Environment", "EnvironmentFile", "LoadCredential", "ExecStartPre"):
                kept = result[section]
            result[section] = kept + [(key, text) for text in texts]
    return result


def format_unit(unit: Unit, instance: str) -> str:
    """The text of the unit file, REVISION_PLACEHOLDER still in it."""
    lines = [f"{MARK} {instance}. Changes here are replaced; use a drop-in or unit_overrides."]
    for section, pairs in unit.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key}={value}" for key, value in pairs]
    return "\n".join(lines) + "\n"


def parse_unit(text: str) -> Unit:
    """A unit file as sections of pairs, in order (comments dropped, continuation lines joined)."""
    unit: Unit = {}
    section: str | None = None
    pending = ""
    for raw in text.split("\n"):
        line = raw.strip()
        if line[:1] in ("#", ";"):
            continue
        if pending:
            line = pending + " " + line
            pending = ""
        if line.endswith("\\") and (len(line) - len(line.rstrip("\\"))) % 2:
            pending = line[:-1]
            continue
        if not line:
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            unit.setdefault(section, [])
        elif section is not None and "=" in line:
            key, value = line.split("=", 1)
            unit[section].append((key.strip(), value.strip()))
    return unit


def setting(unit: Unit, section: str, key: str) -> str | None:
    """The last value of a setting, None when it is not there."""
    values = [value for name, value in unit.get(section, []) if name == key]
    return values[-1] if values else None


def settings(unit: Unit, section: str, key: str) -> list[str]:
    """All values of a setting; an empty assignment forgets those before it, as in systemd."""
    values: list[str] = []
    for name, value in unit.get(section, []):
        if name == key:
            values = [*values, value] if value else []
    return values


def unit_environment(unit: Unit) -> dict[str, str]:
    """``Environment=`` of the unit as a dict (not its EnvironmentFiles)."""
    env: dict[str, str] = {}
    for value in settings(unit, "Service", "Environment"):
        for word, _quoted in split_words(value):
            name, found, text = word.partition("=")
            if found:
                env[name] = text.replace("%%", "%")
    return env


def unit_argv(text: str) -> list[str]:
    """The argv that systemd makes of the unit's ExecStart; UnitError when there is not exactly one."""
    unit = parse_unit(text)
    commands = settings(unit, "Service", "ExecStart")
    if len(commands) != 1:
        raise UnitError(f"the unit has {len(commands)} ExecStart commands, one is expected")
    try:
        return parse_command(commands[0], unit_environment(unit))
    except QuoteError as error:
        raise UnitError(f"ExecStart: {error}") from error


def unit_revision(text: str) -> str | None:
    """The revision that the unit carries, None when it carries none (made by hand) or cannot be read."""
    try:
        return unit_environment(parse_unit(text)).get(REVISION_VARIABLE)
    except QuoteError:
        return None


# A judgement, not a measurement: one rank alone has hundreds of threads, and each client and weight file is open.
MIN_TASKS = 1024
MIN_FILES = 4096
MIN_MEMLOCK = 1 << 30
MIN_MEMORY = 8 << 30
MIN_STOP = 10.0
# SGLang reads its arguments for this long before it can refuse them (8 s and more were measured), so no start that it
# ends itself is faster. A load that fails takes minutes.
FASTEST_FAILURE = 5.0
SLOW_FAILURE = 120.0

_SPAN_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "": 1,
    "s": 1,
    "sec": 1,
    "second": 1,
    "seconds": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "minutes": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86400,
    "day": 86400,
    "days": 86400,
    "w": 604800,
    "week": 604800,
    "weeks": 604800,
}


def parse_span(text: Any) -> float | None:
    """Seconds of a systemd time span (``90``, ``2min 30s``, ``infinity``), None when it is not one."""
    text = str(text).strip()
    if text == "infinity":
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*", "", text):
        return None
    if any(word not in _SPAN_UNITS for _number, word in parts):
        return None
    return sum(float(number) * _SPAN_UNITS[word] for number, word in parts)


def parse_size(text: Any) -> float | None:
    """Bytes of a systemd size (``64K``, ``1.5G``, ``infinity``; powers of 1024), None when systemd ignores it."""
    text = str(text).strip()
    if text == "infinity":
        return float("inf")
    match = re.match(r"(\d+(?:\.\d+)?)\s*([KMGTPE]?)\Z", text)
    return float(match.group(1)) * 1024.0 ** " KMGTPE".index(match.group(2) or " ") if match else None


def _start_timeout(unit: Unit) -> float | None:
    """Seconds of TimeoutStartSec; systemd takes 0 for "no limit"."""
    value = setting(unit, "Service", "TimeoutStartSec") or setting(unit, "Service", "TimeoutSec") or "90"
    return parse_span(value) or (float("inf") if parse_span(value) == 0 else None)


def _restart_delays(unit: Unit, count: int) -> float | None:
    """Seconds that systemd waits between ``count`` + 1 starts: RestartSec, or growing up to RestartMaxDelaySec."""
    delay = parse_span(setting(unit, "Service", "RestartSec") or "0.1")
    steps, longest = setting(unit, "Service", "RestartSteps"), setting(unit, "Service", "RestartMaxDelaySec")
    largest = parse_span(longest) if longest else None
    if delay is None or not (steps and steps.isdigit() and int(steps)) or not largest or largest == float("inf"):
        return None if delay is None else delay * count
    ratio = largest / delay if delay else 1.0
    return sum(min(largest, delay * ratio ** (min(turn, int(steps)) / int(steps))) for turn in range(count))


def _yes(value: str | None) -> bool:
    return str(value).lower() in ("yes", "y", "true", "t", "on", "1")


def _no(value: str | None) -> bool:
    return str(value).lower() in ("no", "n", "false", "f", "off", "0")


def _problem(code: str, message: str, severity: str = "error", **extra: Any) -> dict[str, Any]:
    return dict({"code": code, "message": message, "severity": severity}, **extra)


def _review_restart(unit: Unit) -> list[dict[str, Any]]:
    restart = setting(unit, "Service", "Restart") or "no"
    if restart == "no":
        return []
    delay = parse_span(setting(unit, "Service", "RestartSec") or "0.1")
    misplaced = [
        key
        for key in ("StartLimitIntervalSec", "StartLimitInterval", "StartLimitBurst")
        if setting(unit, "Service", key) is not None
    ]
    problems = []
    # systemd still reads the two old spellings in [Service]; StartLimitIntervalSec there is ignored.
    if misplaced:
        problems.append(
            _problem(
                "start_limit_in_service_section", f"{', '.join(misplaced)} belongs in [Unit]", setting=misplaced[0]
            )
        )
    interval_text = setting(unit, "Unit", "StartLimitIntervalSec") or setting(unit, "Unit", "StartLimitInterval")
    burst_text = setting(unit, "Unit", "StartLimitBurst")
    interval = parse_span(interval_text) if interval_text is not None else 10.0
    burst = int(burst_text) if burst_text and burst_text.isdigit() else 5
    if interval is None or delay is None:
        bad = "StartLimitIntervalSec" if interval is None else "RestartSec"
        problems.append(_problem("bad_time_span", f"{bad} is not a time span", setting=bad))
    elif interval == 0 or burst == 0:
        problems.append(
            _problem("restart_unbounded", "the start limit is switched off: a bad start is repeated for ever")
        )
    else:
        waits = _restart_delays(unit, burst - 1) or 0.0
        needed = waits + FASTEST_FAILURE * (burst - 1)
        given = interval_text is not None or burst_text is not None
        if needed >= interval:
            imports = "" if waits >= interval else f" of waiting, and SGLang's own {FASTEST_FAILURE:g} s each"
            problems.append(
                _problem(
                    "start_limit_never_triggers" if given else "restart_unbounded",
                    f"{burst} starts need at least {waits:g} s{imports}, the window is {interval:g} s: "
                    "a bad start is repeated for ever; set StartLimitIntervalSec in [Unit] above that",
                    setting="StartLimitIntervalSec",
                )
            )
        elif waits + SLOW_FAILURE * (burst - 1) >= interval:
            bearable = (interval - waits) / max(1, burst - 1)
            problems.append(
                _problem(
                    "start_limit_misses_slow_failures",
                    f"a start that fails after more than {bearable:.0f} s, as one that loads weights does, is repeated "
                    f"for ever: {burst} of them do not fit into {interval:g} s",
                    "warning",
                    setting="StartLimitIntervalSec",
                )
            )
    return problems


def _review_actions(unit: Unit) -> list[dict[str, Any]]:
    """Settings that end the service, or the host, though nothing is wrong with it."""
    problems = []
    for section, key in (("Unit", "StartLimitAction"), ("Unit", "FailureAction"), ("Service", "FailureAction"),
                         ("Service", "StartLimitAction")):  # fmt: skip
        value = setting(unit, section, key) or ""
        if re.match(r"(?:soft-)?(?:reboot|poweroff|halt|kexec|exit)", value):
            problems.append(
                _problem(
                    "failure_takes_the_host",
                    f"{key}={value}: a bad flag then takes the host down, and every other service with it",
                    setting=key,
                )
            )
    for key, what in (
        ("WatchdogSec", "SGLang sends no WATCHDOG=1, so systemd kills it when the time is over"),
        ("RuntimeMaxSec", "systemd ends a healthy service when the time is over"),
    ):
        span = parse_span(setting(unit, "Service", key) or "0")
        if span and span != float("inf"):
            code = "watchdog_kills_service" if key == "WatchdogSec" else "runtime_max_ends_service"
            problems.append(_problem(code, f"{key}={setting(unit, 'Service', key)}: {what}", setting=key))
    stop = setting(unit, "Service", "TimeoutStopSec") or setting(unit, "Service", "TimeoutSec")
    seconds = parse_span(stop) if stop else None
    if seconds and seconds < MIN_STOP:
        problems.append(
            _problem(
                "stop_timeout_too_short",
                f"TimeoutStopSec={stop}: SGLang takes about 7 s to end; systemd kills it among requests",
                "warning",
                setting="TimeoutStopSec",
            )
        )
    if setting(unit, "Service", "OOMPolicy") == "continue":
        problems.append(
            _problem(
                "oom_policy_leaves_half",
                "OOMPolicy=continue: after the kernel killed one scheduler the others stay, and nothing restarts",
                "warning",
                setting="OOMPolicy",
            )
        )
    output = setting(unit, "Service", "StandardOutput") or ""
    if re.match(r"null|file:|append:|truncate:|tty", output):
        problems.append(
            _problem(
                "log_not_in_journal",
                f"StandardOutput={output}: the journal has no log, so no cause of a failed start can be told",
                "warning",
                setting="StandardOutput",
            )
        )
    ordered = " ".join(value for key in ("After", "Requires", "BindsTo") for value in settings(unit, "Unit", key))
    if (
        "nvidia" not in ordered
        and not settings(unit, "Service", "ExecStartPre")
        and "ExecStart" in dict(unit.get("Service", []))
    ):
        problems.append(
            _problem(
                "starts_before_gpus",
                "nothing waits for the GPUs at boot: After=nvidia-persistenced.service nvidia-fabricmanager.service, "
                "and an ExecStartPre that waits for their number",
                "warning",
                setting="After",
            )
        )
    return problems


def _wait_of(command: str) -> float | None:
    """How long a command of ExecStartPre or ExecStartPost waits, as far as it says so."""
    if re.search(r"\b(?:until|while)\b|compile_deep_gemm", command):
        return float("inf")
    match = re.search(
        r"--?(?:timeout|deadline|wait|max-time)[= ](\d+(?:\.\d+)?\s?[a-z]*)|\bsleep (\d+[smhd]?)\b", command
    )
    if not match:
        return None
    text = (match.group(1) or match.group(2)).strip()
    return parse_span(text) or parse_span(text.split()[0])


def _review_start(unit: Unit) -> list[dict[str, Any]]:
    problems = []
    timeout = _start_timeout(unit)
    if timeout is None:
        return [_problem("bad_time_span", "TimeoutStartSec is not a time span", setting="TimeoutStartSec")]
    for command in settings(unit, "Service", "ExecStartPost"):
        wait = _wait_of(command)
        if timeout <= (90.0 if wait in (None, float("inf")) else float(wait or 0)):
            problems.append(
                _problem(
                    "start_post_killed_by_timeout",
                    f"ExecStartPost is ended after {timeout:g} s (TimeoutStartSec) while the model still loads; "
                    "set TimeoutStartSec above the load deadline, or leave readiness to the play",
                    setting="TimeoutStartSec",
                )
            )
    for command in settings(unit, "Service", "ExecStartPre"):
        wait = _wait_of(command)
        # A loop that does not say how long it runs may well be bounded; one that compiles for minutes is not.
        endless = wait == float("inf") and "compile_deep_gemm" in command and timeout <= 1800
        if endless or (wait not in (None, float("inf")) and timeout <= float(wait or 0)):
            problems.append(
                _problem(
                    "start_pre_killed_by_timeout",
                    f"ExecStartPre is ended after {timeout:g} s (TimeoutStartSec), before it has waited or compiled; "
                    "set TimeoutStartSec above that",
                    setting="TimeoutStartSec",
                )
            )
    return problems


_SHELL_WORDS = {">", ">>", "<", "|", "&", "&&", "||", "2>&1", "2>", "&>"}
_SECRET_FLAGS = re.compile(r"--(?:api|admin-api)-key(?:=|\Z)|--(?:hf-token|ssl-keyfile-password)(?:=|\Z)")
_SECRET_VARIABLES = re.compile(
    r"(?:\A|_)(?:API_KEY|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|SECRET_ACCESS_KEY|PASSWORD|TOKEN)\Z"
)


def _review_command(unit: Unit, env: Mapping[str, str], complete: bool) -> list[dict[str, Any]]:
    """ExecStart as systemd reads it: no shell, no secrets, no hidden files; ``complete``: ``env`` is all there is."""
    problems: list[dict[str, Any]] = []
    commands = settings(unit, "Service", "ExecStart")
    try:
        argv = parse_command(commands[-1].replace("\\\n", " "), dict(env)) if commands else []
    except QuoteError as error:
        return [_problem("exec_start_bad_quoting", f"ExecStart: {error}", setting="ExecStart")]
    if not argv:
        return []
    program = argv[0].lstrip("-@:+!")
    shell = os.path.basename(program) in ("sh", "bash", "dash", "zsh", "env")
    words = [word for word in argv[1:] if word in _SHELL_WORDS]
    if program in ("source", ".", "cd", "export", "exec") or (words and not shell):
        problems.append(
            _problem(
                "exec_start_needs_a_shell",
                f"ExecStart is no shell line: {program if program[:1] != '/' else words[0]} is taken as a "
                f"{'program' if program[:1] != '/' else 'flag of SGLang'}; write the venv's interpreter and its "
                "arguments, variables into Environment=, output goes to the journal",
                setting="ExecStart",
            )
        )
    background = shell and len(argv) > 2 and re.search(r"(?:\A|\s)nohup\s|(?<![&>])&\s*\Z", argv[-1])
    if background or os.path.basename(program) in ("nohup", "screen", "tmux", "setsid", "daemonize"):
        problems.append(
            _problem(
                "exec_start_in_background",
                "ExecStart puts the server into the background: the main process ends, and systemd ends the rest",
                setting="ExecStart",
            )
        )
    secrets = [word.partition("=")[0] for word in argv if _SECRET_FLAGS.match(word)]
    secrets += [name for name in unit_environment_names(unit) if _SECRET_VARIABLES.search(name)]
    for name in dict.fromkeys(secrets):
        problems.append(
            _problem(
                "secret_in_unit",
                f"{name} stands in the unit, which every user of the host can read (systemctl cat, ps); "
                "sglang_secrets keeps it in a file of root's",
                "warning",
                setting="ExecStart" if name.startswith("--") else "Environment",
            )
        )
    bin_dir = os.path.dirname(program)
    if complete and re.search(r"/python[\d.]*\Z", program) and bin_dir not in ("/usr/bin", "/bin", "/usr/local/bin"):
        path = env.get("PATH")
        if path is None or bin_dir not in path.split(":"):
            lacks = "is not set" if path is None else f"lacks {bin_dir}"
            nvcc = (
                "" if env.get("CUDA_HOME") or "cuda" in (path or "") else ", and neither it nor CUDA_HOME leads to nvcc"
            )
            problems.append(
                _problem(
                    "path_lacks_compilers",
                    f"PATH {lacks}: ninja, which compiles kernels at run time, is in the venv{nvcc}; a shell's PATH is "
                    "not the service's",
                    "warning",
                    setting="Environment",
                )
            )
    return problems + _review_hidden(unit, argv)


def unit_environment_names(unit: Unit) -> list[str]:
    """Names of the variables in ``Environment=``; none where it cannot be read."""
    try:
        return list(unit_environment(unit))
    except QuoteError:
        return []


def _bound(unit: Unit) -> list[str]:
    words = [word.lstrip("-") for key in ("BindPaths", "BindReadOnlyPaths") for word in settings(unit, "Service", key)]
    return [part.split(":")[1] if ":" in part else part for word in words for part in word.split()]


def _review_hidden(unit: Unit, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Files of the command that the unit's own sandbox takes away."""
    problems = []
    paths = [("exec_start", word.partition("=")[2] if word.startswith("--") else word) for word in argv]
    working = setting(unit, "Service", "WorkingDirectory")
    if working:
        paths.append(("working_directory", working.lstrip("-")))
    home = setting(unit, "Service", "ProtectHome") or "no"
    if home in ("yes", "true", "on", "1", "tmpfs"):
        visible = _bound(unit) if home == "tmpfs" else []
        for what in ("exec_start", "working_directory"):
            hidden = [p for kind, p in paths if kind == what and _under(p, ("/home", "/root", "/run/user"))]
            hidden = [path for path in hidden if not _under(path, visible)]
            if hidden:
                problems.append(
                    _problem(
                        f"{what}_hidden_by_ProtectHome",
                        f"{hidden[0]} is under what ProtectHome={home} hides",
                        setting="ProtectHome",
                    )
                )
    for key in ("InaccessiblePaths", "TemporaryFileSystem", "NoExecPaths"):
        folders = [
            word.lstrip("-+").split(":")[0] for value in settings(unit, "Service", key) for word in value.split()
        ]
        needed = [path for _kind, path in paths if path.startswith("/")] + (
            ["/dev/shm"] if key != "NoExecPaths" else []
        )
        free = _bound(unit)
        if key == "NoExecPaths":
            needed = needed[:1]
            free = [w.lstrip("-+") for v in settings(unit, "Service", "ExecPaths") for w in v.split()]
        hits = [path for path in needed if _under(path, [f.rstrip("/") for f in folders]) and not _under(path, free)]
        if hits:
            problems.append(
                _problem("paths_hidden_from_service", f"{key} takes {hits[0]} away from the service", setting=key)
            )
    return problems


# Written at run time, in this order of harm; a model's cache may be filled already.
_WRITTEN = (
    "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "SGLANG_CACHE_DIR",
    "SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR", "EP_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TILELANG_CACHE_DIR",
    "CUDA_CACHE_PATH", "HF_HOME", "HF_HUB_CACHE",
)  # fmt: skip


def _review_written(unit: Unit, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Caches that the sandbox makes read-only, whatever their rights on disk are."""
    service = "Service"
    dynamic = _yes(setting(unit, service, "DynamicUser"))
    system = "strict" if dynamic else (setting(unit, service, "ProtectSystem") or "no")
    home = setting(unit, service, "ProtectHome") or ("read-only" if dynamic else "no")
    writable = ["/dev", "/proc", "/sys"]
    for key, root in (("CacheDirectory", "/var/cache"), ("StateDirectory", "/var/lib"), ("LogsDirectory", "/var/log"),
                      ("RuntimeDirectory", "/run")):  # fmt: skip
        writable += [f"{root}/{word.split(':')[0]}" for v in settings(unit, service, key) for word in v.split()]
    for key in ("ReadWritePaths", "BindPaths"):
        writable += [word.strip("\"'").lstrip("-+").split(":")[-1].rstrip("/") for v in settings(unit, service, key)
                     for word in v.split()]  # fmt: skip
    if _yes(setting(unit, service, "PrivateTmp")) or dynamic or system != "strict":
        writable += ["/tmp", "/var/tmp"]
    closed = {"strict": ("",), "full": ("/usr", "/boot", "/efi", "/etc"), "yes": ("/usr", "/boot", "/efi"),
              "true": ("/usr", "/boot", "/efi")}.get(system, ())  # fmt: skip
    if home == "read-only":
        closed = (*closed, "/home", "/root", "/run/user")
    problems = []
    for name in _WRITTEN:
        path = env.get(name, "").rstrip("/")
        if not path.startswith("/") or not _under(path, closed) or _under(path, writable):
            continue
        problems.append(
            _problem(
                "cache_read_only_in_unit",
                f"{name}={path} is read-only for the service (ProtectSystem={system}, ProtectHome={home}); "
                "add it to ReadWritePaths=, or point it below CacheDirectory=",
                "warning" if name.startswith("HF_") else "error",
                variable=name,
                value=path,
            )
        )
    return problems


def _review_devices(unit: Unit) -> list[dict[str, Any]]:
    problems = []
    if _yes(setting(unit, "Service", "PrivateDevices")):
        problems.append(
            _problem("private_devices_hides_gpus", "PrivateDevices=yes hides /dev/nvidia*", setting="PrivateDevices")
        )
    policy = setting(unit, "Service", "DevicePolicy") or "auto"
    allowed = settings(unit, "Service", "DeviceAllow")
    restricted = policy in ("closed", "strict") or bool(allowed)
    if restricted:
        # Without "w" a device node cannot be used; without anything systemd means rwm.
        text = " ".join(entry for entry in allowed if len(entry.split()) < 2 or {"r", "w"} <= set(entry.split()[1]))
        wanted = {
            "/dev/nvidia0": r"/dev/nvidia\d|/dev/nvidia\*|char-nvidia(-frontend|\*)?(\s|$)|char-\*",
            "/dev/nvidiactl": r"/dev/nvidiactl|/dev/nvidia\*|char-nvidia(-frontend|ctl|\*)?(\s|$)|char-\*",
            "/dev/nvidia-uvm": r"/dev/nvidia-uvm|/dev/nvidia\*|char-nvidia(-uvm|\*)|char-\*",
            "/dev/nvidia-caps": r"/dev/nvidia-caps|char-nvidia(-caps|\*)|char-\*",
        }
        missing = [device for device, pattern in wanted.items() if not re.search(pattern, text)]
        if missing:
            problems.append(
                _problem(
                    "device_policy_hides_gpus",
                    f"DevicePolicy={policy} with DeviceAllow={' '.join(allowed) or 'nothing'} hides "
                    f"{', '.join(missing)}; "
                    "leave DevicePolicy at auto and DeviceAllow empty (RDMA needs /dev/infiniband and /dev/gdrdrv too)",
                    setting="DeviceAllow",
                )
            )
        elif not re.search(r"/dev/infiniband|char-infiniband|char-\*", text):
            problems.append(
                _problem(
                    "device_policy_hides_rdma",
                    "DeviceAllow has no /dev/infiniband (and /dev/gdrdrv): RDMA does not work for the service",
                    "warning",
                    setting="DeviceAllow",
                )
            )
    if _yes(setting(unit, "Service", "ProtectClock")):
        problems.append(
            _problem(
                "protect_clock_hides_gpus",
                "ProtectClock=yes implies DeviceAllow=char-rtc, which closes every other device",
                setting="ProtectClock",
            )
        )
    return problems


def _below(unit: Unit, key: str, least: int) -> str | None:
    """The soft limit of a setting where it is a number below ``least``."""
    value = (setting(unit, "Service", key) or "").split(":")[0]
    return value if value.isdigit() and int(value) < least else None


def _review_limits(unit: Unit) -> list[dict[str, Any]]:
    problems = []
    for key in ("TasksMax", "LimitNPROC"):
        tasks = _below(unit, key, MIN_TASKS)
        if tasks:
            text = f"{key}={tasks}: SGLang, NCCL and the compilers start many threads; leave it at infinity"
            problems.append(_problem("tasks_max_too_low", text, setting=key))
    files = _below(unit, "LimitNOFILE", MIN_FILES)
    if files:
        text = f"LimitNOFILE={files}: each client, weight file and queue takes some; give it {MIN_FILES} or more"
        problems.append(_problem("nofile_too_low", text, setting="LimitNOFILE"))
    for key in ("LimitAS", "LimitDATA"):
        size = parse_size((setting(unit, "Service", key) or "infinity").split(":")[0])
        if size is not None and size != float("inf"):
            problems.append(
                _problem(
                    "address_space_limited",
                    f"{key}={setting(unit, 'Service', key)}: CUDA reserves the addresses of all GPUs' memory, so no "
                    "limit is large enough; take it out",
                    setting=key,
                )
            )
    memory = parse_size(setting(unit, "Service", "MemoryMax") or "infinity")
    if memory is not None and memory < MIN_MEMORY:
        problems.append(
            _problem(
                "memory_max_too_low",
                f"MemoryMax={setting(unit, 'Service', 'MemoryMax')}: weights pass through the host's memory, and each "
                "rank takes some GiB of it",
                "warning",
                setting="MemoryMax",
            )
        )
    quota = (setting(unit, "Service", "CPUQuota") or "").rstrip("%")
    if quota.isdigit() and int(quota) < 100:
        problems.append(
            _problem(
                "cpu_quota_too_low",
                f"CPUQuota={quota}% is less than one core; the scheduler of each rank alone takes one",
                "warning",
                setting="CPUQuota",
            )
        )
    denied = " ".join(settings(unit, "Service", "IPAddressDeny"))
    if "any" in denied.split() and not settings(unit, "Service", "IPAddressAllow"):
        problems.append(
            _problem(
                "private_network_hides_port", "IPAddressDeny=any: nobody reaches the port", setting="IPAddressDeny"
            )
        )
    families = " ".join(settings(unit, "Service", "RestrictAddressFamilies"))
    if families and not families.startswith("~"):
        missing = [name for name in ("AF_UNIX", "AF_INET", "AF_NETLINK") if name not in families.split()]
        if missing:
            problems.append(
                _problem(
                    "address_families_missing",
                    f"RestrictAddressFamilies={families} lacks {', '.join(missing)}, which NCCL or the server uses",
                    setting="RestrictAddressFamilies",
                )
            )
    if _yes(setting(unit, "Service", "PrivateNetwork")):
        problems.append(
            _problem(
                "private_network_hides_port", "PrivateNetwork=yes: nobody reaches the port", setting="PrivateNetwork"
            )
        )
    writable = [
        key
        for key in ("CacheDirectory", "StateDirectory", "ReadWritePaths", "BindPaths")
        if settings(unit, "Service", key)
    ]
    dynamic = _yes(setting(unit, "Service", "DynamicUser"))
    if (setting(unit, "Service", "ProtectSystem") == "strict" or dynamic) and not writable:
        problems.append(
            _problem(
                "protect_system_hides_caches",
                f"{'DynamicUser=yes' if dynamic else 'ProtectSystem=strict'} leaves no folder for the JIT caches; "
                "add CacheDirectory=, StateDirectory= or ReadWritePaths=",
                setting="ProtectSystem",
            )
        )
    return problems


def review_unit(unit: Unit, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What in a unit does not work for SGLang: ``[{code, message, severity, setting}]``; severity error or note.

    ``env`` is the whole environment of the service when it is known (EnvironmentFiles included).
    """
    service = "Service"
    problems: list[dict[str, Any]] = []
    kill = setting(unit, service, "KillMode") or "control-group"
    if kill in ("process", "none"):
        problems.append(
            _problem(
                "kill_mode_leaves_schedulers",
                f"KillMode={kill} leaves schedulers behind that hold GPU memory; use mixed or control-group",
                setting="KillMode",
            )
        )
    if _no(setting(unit, service, "SendSIGKILL")):
        problems.append(
            _problem(
                "kill_mode_leaves_schedulers",
                "SendSIGKILL=no leaves schedulers behind that ignore SIGTERM and hold GPU memory; take it out",
                setting="SendSIGKILL",
            )
        )
    memlock = setting(unit, service, "LimitMEMLOCK")
    if not memlock:
        problems.append(
            _problem(
                "memlock_not_set_in_unit",
                "LimitMEMLOCK is not set; limits.conf does not apply to services",
                setting="LimitMEMLOCK",
            )
        )
    elif any(parse_size(part) is None for part in memlock.split(":")):
        problems.append(
            _problem(
                "memlock_word_ignored",
                f"systemd ignores LimitMEMLOCK={memlock}; the word is infinity",
                setting="LimitMEMLOCK",
            )
        )
    elif (parse_size(memlock.split(":")[0]) or 0.0) < MIN_MEMLOCK:
        problems.append(
            _problem(
                "memlock_too_low",
                f"LimitMEMLOCK={memlock}: RDMA locks its buffers in memory, and they are larger; give it infinity",
                setting="LimitMEMLOCK",
            )
        )
    kind = setting(unit, service, "Type") or "simple"
    if kind in ("notify", "notify-reload", "dbus", "forking", "oneshot"):
        problems.append(
            _problem(
                "type_never_starts",
                f"Type={kind}: SGLang does not announce itself that way, so the start never ends; use exec",
                setting="Type",
            )
        )
    problems += _review_start(unit)
    problems += _review_actions(unit)
    if _yes(setting(unit, service, "RemainAfterExit")):
        problems.append(
            _problem(
                "remain_after_exit_hides_death",
                "RemainAfterExit=yes shows the unit active after its process has ended, and it is not restarted",
                setting="RemainAfterExit",
            )
        )
    problems += _review_restart(unit)
    problems += _review_devices(unit)
    problems += _review_limits(unit)
    if _yes(setting(unit, service, "MemoryDenyWriteExecute")):
        problems.append(
            _problem(
                "memory_deny_write_execute_breaks_jit",
                "MemoryDenyWriteExecute=yes breaks the JIT compilers",
                setting="MemoryDenyWriteExecute",
            )
        )
    if setting(unit, service, "ProcSubset") == "pid":
        problems.append(
            _problem("proc_subset_hides_driver", "ProcSubset=pid hides /proc/driver/nvidia", setting="ProcSubset")
        )
    if _yes(setting(unit, service, "RemoveIPC")):
        problems.append(
            _problem(
                "remove_ipc_hits_other_instances",
                "RemoveIPC=yes removes the shared memory of every instance of this user when one stops",
                setting="RemoveIPC",
            )
        )
    if _yes(setting(unit, service, "PrivateTmp")):
        problems.append(
            _problem(
                "private_tmp",
                "sockets and IPC files in /tmp are not shared with other units",
                "note",
                setting="PrivateTmp",
            )
        )
    try:
        known = unit_environment(unit)
    except QuoteError as error:
        problems.append(_problem("environment_bad_quoting", f"Environment: {error}", setting="Environment"))
        known = {}
    known.update(env or {})
    complete = env is not None or not settings(unit, service, "EnvironmentFile")
    problems += _review_command(unit, known, complete)
    problems += _review_written(unit, known)
    problems += review_environment(known, setting(unit, service, "ProtectHome") or "no")
    return problems


_PATHS = ("PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CPATH", "LIBRARY_PATH")


def cuda_home_fault(name: str, value: str) -> dict[str, Any] | None:
    """What is wrong with the text of CUDA_HOME: it must be one folder, absolute, the one above bin/nvcc.

    ``{code, message, severity, variable, value, suggestion}``, None when nothing is.
    """
    bare = value.strip().strip("\"'")
    code = suggestion = None
    if re.search(r"[:;]", value):
        parts = [part for part in re.split(r"[:;]", bare) if part and "$" not in part]
        code, suggestion = "cuda_home_is_a_path_list", parts[-1] if parts else None
        what = f"is not one folder: the compiler would be looked for in {value}/bin"
    elif re.search(r"/(?:bin|lib|lib64|include|bin/nvcc)/?\Z", bare):
        code, suggestion = "cuda_home_is_inside_toolkit", re.sub(r"/(?:bin/nvcc|bin|lib64|lib|include)/?\Z", "", bare)
        what = f"is inside of the toolkit: the compiler would be looked for in {value}/bin"
    elif value and not re.match(r"[/~$]", value):
        code, suggestion = "cuda_home_relative", bare if bare.startswith("/") else None
        what = "is no absolute path"
    if code is None:
        return None
    return _problem(code, f"{name}={value} {what}", variable=name, value=value, suggestion=suggestion)


def review_environment(env: Mapping[str, str], protect_home: str = "no") -> list[dict[str, Any]]:
    """What in a service's environment does not work: ``[{code, message, severity, variable, suggestion?}]``."""
    problems = []
    for name in ("CUDA_HOME", "CUDA_PATH"):
        fault = cuda_home_fault(name, env.get(name, ""))
        problems += [fault] if fault else []
    for name, value in env.items():
        if name in ("CUDA_HOME", "CUDA_PATH") and ":" in value:
            continue
        # The hub's library expands its own variables.
        if name.startswith("HF_") or not (
            name in _PATHS or name.endswith(("_HOME", "_DIR", "_CACHE", "_BASE", "_PATH"))
        ):
            continue
        if re.search(r"\$\{?[A-Za-z_]|(?:\A|:)~(?:/|:|\Z)", value):
            problems.append(
                _problem(
                    "environment_not_expanded",
                    f"{name}={value}: systemd does not expand variables or ~ here; write the whole value",
                    variable=name,
                    value=value,
                )
            )
    path = env.get("PATH")
    if path and "$" not in path and not {"/usr/bin", "/bin"} & {part.rstrip("/") for part in path.split(":")}:
        problems.append(
            _problem(
                "path_lacks_system_folders",
                f"PATH={path} has neither /usr/bin nor /bin: the shell, the compiler and the linker are not found",
                variable="PATH",
                value=path,
                suggestion=f"{path}:{SYSTEM_PATH}",
            )
        )
    if protect_home in ("yes", "true", "on", "1", "tmpfs"):
        for name, value in env.items():
            if name.endswith(("_HOME", "_DIR", "_CACHE", "_BASE", "_PATH")) or name in ("HOME", "PYTHONPATH"):
                hidden = [part for part in value.split(":") if _under(part, ("/home", "/root", "/run/user"))]
                if hidden:
                    problems.append(
                        _problem(
                            f"{name.lower()}_hidden_by_ProtectHome",
                            f"{name} points to {hidden[0]}, which ProtectHome={protect_home} hides",
                            variable=name,
                            value=value,
                        )
                    )
    return problems


def compare_argv(old: Sequence[str], new: Sequence[str]) -> list[dict[str, Any]]:
    """How the flags of two commands differ: ``[{flag, old, new}]``, None where one side lacks the flag.

    Flags are compared by their long name, whichever of ``--flag value`` and ``--flag=value`` is used.
    """

    def flags(argv: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        current: str | None = None
        for item in argv[1:]:
            if item.startswith("--") and len(item) > 2:
                current, given, value = item.partition("=")
                found[current] = [value] if given else []
            elif current is not None:
                found[current].append(item)
        return {flag: (" ".join(values) if values else True) for flag, values in found.items()}

    before, after = flags(old), flags(new)
    return [
        {"flag": flag, "old": before.get(flag), "new": after.get(flag)}
        for flag in [*before, *(flag for flag in after if flag not in before)]
        if before.get(flag) != after.get(flag)
    ]
