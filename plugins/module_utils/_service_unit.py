# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: brings the unit of one instance into a state; the logic of the module service_unit."""

from __future__ import annotations

import datetime
import glob
import grp
import hashlib
import hmac
import os
import pwd
import re
import secrets as random_source
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight as preflight
from ansible_collections.gpufleet.sglang.plugins.module_utils import _journal, _libraries
from ansible_collections.gpufleet.sglang.plugins.module_utils import _unit_file as unit_file
from ansible_collections.gpufleet.sglang.plugins.module_utils._libraries import library_versions
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import Run, RunResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._secrets_files import (
    CONFIG_NAME,
    HF_TOKEN_NAME,
    SecretError,
    SecretFiles,
    plan_secret_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd_quote import (
    QuoteError,
    format_environment_file,
    parse_environment_file,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Lock,
    Revision,
    StoreError,
    StoreLocked,
    UnitStore,
    make_dir,
    process_start,
    revision_id,
    write_file,
)

STORE = "/var/lib/gpufleet-sglang"
ETC = "/etc/gpufleet-sglang"
RUN = "/run/gpufleet-sglang"
UNITS = "/etc/systemd/system"
KEPT_REVISIONS = 5
_SENSITIVE = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
_WRITABLE_ENV = re.compile(
    r"(_CACHE_DIR|_CACHE|_CACHE_ROOT|_CACHE_PATH|_CACHE_HOME|_RECORDER_DIR|_PROFILER_DIR|_STORAGE_DIR|_WORKSPACE_BASE)\Z"
)
_WRITABLE_NAMES = ("HOME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME")
_WRITABLE_FLAGS = ("--download-dir", "--crash-dump-folder", "--file-storage-path", "--export-metrics-to-file-dir")


class ServiceError(Exception):
    """What keeps the module from doing what was asked; ``details`` are returned with the message."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


@dataclass
class Request:
    """The module's parameters."""

    instance: str
    state: str
    plan: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, Any] = field(default_factory=dict)
    takeover: str | None = None
    revision: str | None = None
    purge: bool = False
    wait_for_gpus: int | None = None
    unit_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    read_only_paths: list[str] = field(default_factory=list)
    read_write_paths: list[str] = field(default_factory=list)
    accept_problems: list[str] = field(default_factory=list)
    run: str | None = None
    proven: bool = False
    check_mode: bool = False


@dataclass
class Host:
    """Where the module works; ``root`` and ``run`` are replaced in tests."""

    run: Run
    root: str = ""
    proc: str = "/proc"
    sys_cgroup: str = "/sys/fs/cgroup"
    make_users: bool = True
    sleep: Callable[[float], None] = time.sleep

    def path(self, path: str) -> str:
        """A path of the host as this process sees it."""
        return self.root + path

    def read(self, path: str) -> str | None:
        """Text of a file, None when it is not there."""
        try:
            with open(self.path(path), encoding="utf-8", errors="surrogateescape") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_proc(self, pid: int, name: str) -> bytes | None:
        """Content of /proc/<pid>/<name>, None when the process is gone."""
        try:
            with open(f"{self.proc}/{pid}/{name}", "rb") as stream:
                return stream.read()
        except OSError:
            return None


class Systemd:
    """systemctl, with errors that say what was asked."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def call(self, *argv: str, timeout: float = 60) -> RunResult:
        """Run systemctl and return what it said."""
        return self._run(["systemctl", "--no-pager", "--no-ask-password", *argv], timeout)

    def must(self, *argv: str, timeout: float = 60) -> None:
        """Run systemctl; ServiceError when it fails."""
        result = self.call(*argv, timeout=timeout)
        if result.rc != 0:
            reason = (result.stderr or result.stdout).strip()[-1000:]
            if result.timed_out:
                reason = f"no end within {timeout:g} s"
            raise ServiceError(f"systemctl {' '.join(argv)}: {reason or f'rc {result.rc}'}")

    def show(self, unit: str) -> dict[str, str]:
        """Properties of a unit; ``LoadState=not-found`` when there is none. ServiceError without systemd."""
        names = (
            "LoadState,ActiveState,SubState,MainPID,ControlGroup,UnitFileState,Result,NRestarts,FragmentPath,"
            "DropInPaths,NeedDaemonReload,ExecMainStatus"
        )
        result = self.call("show", "-p", names, unit, timeout=30)
        if result.rc != 0:
            reason = (result.stderr or result.stdout).strip() or f"rc {result.rc}"
            raise ServiceError(f"systemd does not answer on this host: {reason[-500:]}")
        found = {}
        for line in result.stdout.splitlines():
            name, _equals, value = line.partition("=")
            found[name] = value
        return found

    def version(self) -> int:
        """Major version of systemd; ServiceError without systemd."""
        result = self.call("--version", timeout=20)
        match = re.match(r"systemd (\d+)", result.stdout)
        if result.rc != 0 or not match:
            raise ServiceError("this host has no systemd (systemctl --version failed); service_unit needs it")
        return int(match.group(1))


def mask_environment(text: str) -> str:
    """An EnvironmentFile's text for a diff: values of variables that sound like secrets are hidden."""
    lines = []
    for line in text.splitlines(keepends=True):
        name, equals, _value = line.partition("=")
        lines.append(f"{name}=********\n" if equals and _SENSITIVE.search(name) else line)
    return "".join(lines)


def _venv_of(plan: Mapping[str, Any]) -> str:
    venv = str(plan.get("unit", {}).get("venv") or "")
    argv = plan.get("argv") or [""]
    if not venv or os.path.basename(os.path.dirname(venv)) == "bin":
        venv = os.path.dirname(os.path.dirname(str(argv[0])))
    return venv.rstrip("/")


def check_plan(plan: Mapping[str, Any], instance: str) -> None:
    """ServiceError when a plan cannot be applied; the message says what is wrong with it."""
    if not plan:
        raise ServiceError("state started needs plan (what launch_plan returned)")
    if plan.get("rejections"):
        first = plan["rejections"][0]
        raise ServiceError(
            f"the plan of {instance} is rejected and will not be applied: {first.get('message', first.get('code'))}",
            rejections=plan["rejections"],
        )
    if plan.get("service") is False:
        raise ServiceError(f"the plan of {instance} has no service (it only lists remedies)")
    if plan.get("instance", instance) != instance:
        raise ServiceError(f"the plan is of instance {plan['instance']!r}, not of {instance!r}")
    argv = plan.get("argv")
    if not isinstance(argv, list) or not argv or not all(isinstance(item, str) for item in argv):
        raise ServiceError("plan.argv must be a list of strings that begins with the venv's interpreter")
    env = plan.get("env") or {}
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ServiceError("plan.env must be a dict of strings")
    reserved = [name for name in env if name.startswith("GPUFLEET_SGLANG_")]
    if reserved:
        raise ServiceError(f"plan.env: {reserved[0]} is reserved; remove it from sglang_env_vars")


@dataclass
class Desired:
    """What the host should have for a plan."""

    revision: str
    unit: str
    env: str
    argv: list[str]
    meta: dict[str, Any]
    secrets: SecretFiles
    user: str
    group: str
    log_namespace: str | None
    by_credential: bool


class ServiceUnit:
    """One instance on one host. ``apply()`` does what the request asks and returns the module's result."""

    def __init__(self, host: Host, request: Request) -> None:
        self.host = host
        self.request = request
        self.systemd = Systemd(host.run)
        try:
            self.unit = unit_file.unit_name(request.instance)
        except unit_file.UnitError as error:
            raise ServiceError(str(error)) from error
        self.unit_path = f"{UNITS}/{self.unit}"
        self.etc = f"{ETC}/{request.instance}"
        self.secrets_dir = f"{self.etc}/secrets"
        self.service_dir = f"{self.etc}/service"
        self.store = UnitStore(host.path(f"{STORE}/instances/{request.instance}"))
        self.problems: list[dict[str, Any]] = []
        self.diff: list[dict[str, str]] = []
        self.differences: list[dict[str, Any]] = []
        self.changed = False

    # -- what is there -------------------------------------------------------------------------------------------

    def env_path(self, revision: str) -> str:
        """The EnvironmentFile of a revision."""
        return f"{self.etc}/{revision}.env"

    def current(self) -> str | None:
        """The revision that boots: what the unit file names, as long as the store knows it."""
        text = self.host.read(self.unit_path)
        named = unit_file.unit_revision(text) if text is not None else None
        return named if text is not None and self._is_ours(text) else None

    @staticmethod
    def _is_ours(text: str) -> bool:
        return text.startswith(unit_file.MARK)

    def process_environment(self, pid: int) -> dict[str, str]:
        """Environment that a process was started with; {} when it is gone."""
        raw = self.host.read_proc(pid, "environ") or b""
        env = {}
        for item in raw.split(b"\0"):
            name, equals, value = item.partition(b"=")
            if equals:
                env[name.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        return env

    def process_argv(self, pid: int) -> list[str]:
        """argv of a process, [] when it is gone."""
        raw = self.host.read_proc(pid, "cmdline") or b""
        return [item.decode("utf-8", "surrogateescape") for item in raw.split(b"\0")[:-1]]

    def observe(self) -> dict[str, Any]:
        """State of the unit: ``{state, pid, revision, secrets, enabled, result, cgroup, show}``."""
        show = self.systemd.show(self.unit)
        pid = int(show.get("MainPID") or 0)
        env = self.process_environment(pid) if pid else {}
        return {
            "state": show.get("ActiveState", "unknown"),
            "sub_state": show.get("SubState", ""),
            "pid": pid,
            "revision": env.get(unit_file.REVISION_VARIABLE),
            "secrets": env.get(unit_file.SECRETS_VARIABLE),
            "enabled": show.get("UnitFileState") in ("enabled", "enabled-runtime"),
            "result": show.get("Result", ""),
            "restarts": int(show.get("NRestarts") or 0),
            "cgroup": show.get("ControlGroup", ""),
            "show": show,
        }

    # -- what should be there ------------------------------------------------------------------------------------

    def _credentials_work(self, user: str) -> bool:
        """Whether LoadCredential really hands a file over here (in some containers the folder stays empty)."""
        make_dir(self.host.path(RUN), 0o755)
        token = random_source.token_hex(8)
        source = f"{RUN}/credential-{token}"
        write_file(self.host.path(source), token)
        name = f"gpufleet-sglang-credential-{token}"
        try:
            pwd.getpwnam(user)
        except KeyError:
            user = "nobody"
        try:
            result = self.host.run(
                [
                    "systemd-run",
                    "--quiet",
                    "--wait",
                    "--pipe",
                    "--collect",
                    f"--unit={name}",
                    f"--property=User={user}",
                    f"--property=LoadCredential=probe:{source}",
                    "/bin/cat",
                    f"/run/credentials/{name}.service/probe",
                ],
                30,
            )
        finally:
            os.unlink(self.host.path(source))
        return result.rc == 0 and result.stdout == token

    def _writable_paths(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        paths = list(self.request.read_write_paths)
        for name, value in env.items():
            if value.startswith("/") and (name in _WRITABLE_NAMES or _WRITABLE_ENV.search(name)):
                paths.append(value)
        for index, item in enumerate(argv):
            flag, equals, value = item.partition("=")
            if flag in _WRITABLE_FLAGS:
                paths.append(value if equals else "".join(argv[index + 1 : index + 2]))
        own = (
            f"/var/lib/sglang/{self.request.instance}",
            f"/var/cache/sglang/{self.request.instance}",
            "/dev/shm",
            "/tmp",
        )
        return [
            path.rstrip("/")
            for path in dict.fromkeys(paths)
            if path.startswith("/") and path != "/" and not unit_file._under(path.rstrip("/"), own)
        ]

    def desired(self) -> Desired:
        """What the plan means on this host. ServiceError for what cannot be carried out."""
        plan, request = self.request.plan, self.request
        check_plan(plan, request.instance)
        about = plan.get("unit") or {}
        user, group = str(about.get("user") or "sglang"), str(about.get("group") or about.get("user") or "sglang")
        for what, name in (("user", user), ("group", group)):
            if not re.match(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\Z", name):
                raise ServiceError(f"plan.unit.{what}: {name!r} is not the name of a {what}")
        version = self.systemd.version()
        try:
            secret_files = plan_secret_files(request.secrets, plan.get("secret_flags") or [])
        except SecretError as error:
            raise ServiceError(str(error)) from error
        by_credential = bool(secret_files.credentials) and version >= 247 and self._credentials_work(user)
        folder = f"/run/credentials/{self.unit}" if by_credential else self.service_dir
        argv = [str(item) for item in plan["argv"]]
        if secret_files.flags:
            if "--config" in argv or any(item.startswith("--config=") for item in argv):
                raise ServiceError(
                    "the plan already has --config, and SGLang takes only one: move its content to sglang_flags"
                )
            argv += ["--config", f"{folder}/{CONFIG_NAME}"]
        plan_env = {str(name): str(value) for name, value in (plan.get("env") or {}).items()}
        if HF_TOKEN_NAME in secret_files.credentials:
            plan_env["HF_TOKEN_PATH"] = f"{folder}/{HF_TOKEN_NAME}"
        gpus = about.get("gpus")
        if gpus and "CUDA_VISIBLE_DEVICES" not in plan_env and "--base-gpu-id" not in argv:
            plan_env["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in gpus)
        env = unit_file.default_environment(request.instance, argv, plan_env)
        venv = _venv_of(plan)
        libraries = library_versions(self.host.path(venv))
        sglang = libraries.get("sglang", "").split(" ")[0] or None
        model = str(about.get("model_path") or "")
        namespace = None
        if secret_files.flags and version < 253:
            namespace = f"sglang-{request.instance}"
        expected = request.wait_for_gpus
        if expected is None:
            expected = max(gpus) + 1 if gpus else int(about.get("gpu_count") or 0)
        modprobe = next((p for p in ("/usr/bin/nvidia-modprobe",) if os.path.exists(self.host.path(p))), None)
        overrides = {section: dict(values) for section, values in request.unit_overrides.items()}
        writable = self._writable_paths(argv, plan_env)
        if writable:
            service = overrides.setdefault("Service", {})
            given = service.get("ReadWritePaths")
            listed = " ".join(unit_file.quote_setting("-" + path) for path in writable)
            service["ReadWritePaths"] = f"{given} {listed}" if given else listed
        try:
            spec = unit_file.UnitSpec(
                instance=request.instance,
                argv=argv,
                user=user,
                group=group,
                env_file=self.env_path(unit_file.REVISION_PLACEHOLDER),
                venv=venv,
                model_path=model if model.startswith("/") else None,
                read_only_paths=list(request.read_only_paths),
                env=env,
                systemd_version=version,
                sglang_version=sglang,
                supplementary_groups=preflight.device_groups() if not self.host.root else [],
                expected_gpus=int(expected),
                nvidia_modprobe=modprobe,
                credentials={name: f"{self.secrets_dir}/{name}" for name in secret_files.credentials}
                if by_credential
                else {},
                secret_env_file=f"{self.secrets_dir}/secrets.env" if secret_files.env_file else None,
                secrets_stamp_file=None if secret_files.empty else f"{self.secrets_dir}/stamp.env",
                secret_flags=list(secret_files.flags),
                log_namespace=namespace,
                private_tmp=not any(name.startswith("CUDA_MPS_") for name in env),
                overrides=overrides,
            )
            template = unit_file.format_unit(unit_file.build_unit(spec), request.instance)
            env_text = format_environment_file(env)
        except (unit_file.UnitError, QuoteError) as error:
            raise ServiceError(f"the unit of {request.instance} cannot be written: {error}") from error
        revision = revision_id(template, env_text, argv, plan_env, libraries)
        text = template.replace(unit_file.REVISION_PLACEHOLDER, revision)
        if unit_file.unit_argv(text) != argv:
            raise ServiceError("the unit's ExecStart does not read back as the plan's argv; please report this plan")
        if parse_environment_file(env_text) != env:
            raise ServiceError("the environment file does not read back as the plan's environment; please report it")
        meta = {
            "instance": request.instance,
            "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "argv": argv,
            "libraries": libraries,
            "venv": venv,
            "sglang_version": sglang,
            "unit": dict(about),
            "journals": [entry["id"] for entry in self._journals(venv) if entry["state"] == _journal.DONE],
            "log_namespace": namespace,
        }
        return Desired(revision, text, env_text, argv, meta, secret_files, user, group, namespace, by_credential)

    # -- secrets ---------------------------------------------------------------------------------------------------

    def _secret_contents(self, desired: Desired) -> dict[str, str]:
        """Root-only files below the secrets folder: name -> content, the stamp among them."""
        files = dict(desired.secrets.credentials)
        files.update(desired.secrets.plain)
        if desired.secrets.env_file:
            files["secrets.env"] = desired.secrets.env_file
        if not files:
            return {}
        # The stamp tells a process started before a key changed; its salt keeps the key from being guessed from it.
        salt = self.host.read(f"{self.secrets_dir}/salt") or random_source.token_hex(32)
        content = "".join(f"{name}\0{files[name]}\0" for name in sorted(files))
        stamp = hmac.new(salt.encode(), content.encode("utf-8"), hashlib.sha256).hexdigest()[:16]
        files["salt"] = salt
        files["stamp.env"] = f"{unit_file.SECRETS_VARIABLE}={stamp}\n"
        return files

    @staticmethod
    def _stamp(files: Mapping[str, str]) -> str | None:
        return parse_environment_file(files["stamp.env"])[unit_file.SECRETS_VARIABLE] if files else None

    def _service_files(self, desired: Desired) -> dict[str, str]:
        """Files that the service's user reads itself, where credentials do not work."""
        return {} if desired.by_credential else dict(desired.secrets.credentials)

    def _write_secrets(self, desired: Desired, files: Mapping[str, str]) -> None:
        make_dir(self.host.path(ETC), 0o755)
        make_dir(self.host.path(self.etc), 0o711)
        if files:
            make_dir(self.host.path(self.secrets_dir), 0o700)
            for name, text in files.items():
                if self.host.read(f"{self.secrets_dir}/{name}") != text:
                    write_file(self.host.path(f"{self.secrets_dir}/{name}"), text, 0o600)
        service_files = self._service_files(desired)
        if service_files:
            uid, gid = self._ids(desired)
            folder = self.host.path(self.service_dir)
            make_dir(folder, 0o710)
            if uid is not None and gid is not None:
                os.chown(folder, 0, gid)
            for name, text in service_files.items():
                if self.host.read(f"{self.service_dir}/{name}") != text:
                    owner = (uid, gid) if uid is not None and gid is not None else None
                    write_file(f"{folder}/{name}", text, 0o400, owner)

    def _ids(self, desired: Desired) -> tuple[int | None, int | None]:
        try:
            return pwd.getpwnam(desired.user).pw_uid, grp.getgrnam(desired.group).gr_gid
        except KeyError:
            if self.host.make_users:
                raise ServiceError(f"the user {desired.user} or the group {desired.group} is still not there") from None
            return None, None

    def _secret_changes(self, desired: Desired, files: Mapping[str, str]) -> bool:
        if any(self.host.read(f"{self.secrets_dir}/{name}") != text for name, text in files.items()):
            return True
        return any(
            self.host.read(f"{self.service_dir}/{name}") != text for name, text in self._service_files(desired).items()
        )

    def _namespace_dropin(self, namespace: str) -> tuple[str, str]:
        path = f"{UNITS}/systemd-journald@{namespace}.service.d/10-gpufleet-sglang.conf"
        text = (
            "# Made by gpufleet.sglang.service_unit: SGLang prints its key at start: only root reads it.\n"
            "[Service]\nLogsDirectoryMode=0700\nGroup=root\n"
        )
        return path, text

    # -- users and folders -------------------------------------------------------------------------------------

    def _missing_accounts(self, desired: Desired) -> list[list[str]]:
        """Commands that make the service's group and user, where they do not exist."""
        commands = []
        try:
            grp.getgrnam(desired.group)
        except KeyError:
            commands.append(["groupadd", "--system", desired.group])
        try:
            pwd.getpwnam(desired.user)
        except KeyError:
            shell = next((p for p in ("/usr/sbin/nologin", "/sbin/nologin") if os.path.exists(p)), "/bin/false")
            commands.append(
                [
                    "useradd",
                    "--system",
                    f"--gid={desired.group}",
                    "--home-dir=/var/lib/sglang",
                    "--no-create-home",
                    f"--shell={shell}",
                    desired.user,
                ]
            )
        return commands

    def _make_folders(self) -> None:
        make_dir(self.host.path(STORE), 0o711)
        make_dir(self.host.path(f"{STORE}/instances"), 0o700)
        make_dir(self.host.path(unit_file.EMPTY_DIR), 0o555)

    # -- preflight ---------------------------------------------------------------------------------------------------

    def _preflight(self, desired: Desired, seen: dict[str, Any]) -> None:
        host, about = self.host, self.request.plan.get("unit") or {}
        own = [self.unit, *([self.request.takeover] if self.request.takeover else [])]
        add = self.problems.extend
        parsed = unit_file.parse_unit(desired.unit)
        env = parse_environment_file(desired.env)
        add(item for item in unit_file.review_unit(parsed, env) if item["severity"] != "note")
        text = host.read(self.unit_path)
        if text is not None and not self._is_ours(text) and self.request.takeover != self.unit:
            self.problems.append(
                preflight.problem(
                    "unit_made_by_others",
                    f"{self.unit_path} was not made by this module; take it over (sglang_takeover: {self.unit}) "
                    "or remove it",
                )
            )
        for path in shlex.split(seen["show"].get("DropInPaths", "")):
            # system-wide defaults (service.d) are the site's own business
            if f"/{self.unit}.d/" in path:
                self.problems.append(
                    preflight.problem(
                        "drop_in_present", f"{path} changes the unit; its settings win over ours", "warning"
                    )
                )
        takeover = self.request.takeover
        pending = takeover and takeover != self.unit and not self.store.read_json("takeover.json")
        if takeover and pending and self.systemd.show(takeover).get("LoadState") != "loaded":
            self.problems.append(
                preflight.problem(
                    "takeover_unit_missing",
                    f"{takeover} is not a unit of this host; correct sglang_takeover or remove it",
                )
            )
        if "port" in about and not int(about.get("node_rank") or 0):
            add(preflight.check_port(str(about.get("host") or "127.0.0.1"), int(about["port"]), own, host.proc))
            add(preflight.check_privileged_port(int(about["port"]), desired.user, host.proc))
        venv = str(desired.meta["venv"])
        model = str(about.get("model_path") or "")
        groups = unit_file.settings(parsed, "Service", "SupplementaryGroups")
        wanted = [("venv interpreter", host.path(desired.argv[0]), "run")]
        if venv:
            wanted.append(("venv folder", host.path(venv), "read"))
        if model.startswith("/"):
            wanted.append(("model path", host.path(model), "read"))
            config = f"{model.rstrip('/')}/config.json"
            if os.path.exists(host.path(config)):
                wanted.append(("model file", host.path(config), "read"))
        for path in self._writable_paths(desired.argv, self.request.plan.get("env") or {}):
            wanted.append(("cache folder", host.path(path), "write"))
        access = preflight.check_access(desired.user, desired.group, wanted, " ".join(groups).split())
        add(access)
        if not access:
            add(preflight.check_interpreter(host.run, desired.user, desired.group, host.path(desired.argv[0])))
        if seen["state"] not in ("active", "activating", "deactivating"):
            left = preflight.cgroup_processes(f"/system.slice/{self.unit}", host.sys_cgroup)
            if left:
                self.problems.append(
                    preflight.problem(
                        "leftover_processes",
                        f"pids {', '.join(map(str, left))} of an earlier run are still in the cgroup of {self.unit}; "
                        "they are ended before the start",
                        "warning",
                        pids=left,
                    )
                )
            add(preflight.check_memory(host.proc))
        add(preflight.check_gpus(host.run, about.get("gpus"), own, host.proc))
        add(preflight.check_shm())
        add(preflight.check_noexec([f"/var/cache/sglang/{self.request.instance}"], host.proc))
        if desired.log_namespace:
            self.problems.append(
                preflight.problem(
                    "log_in_namespace",
                    "SGLang prints its key when it starts and this systemd cannot filter it (253 could), so the log is "
                    f"in a namespace that root alone reads: journalctl --namespace={desired.log_namespace}",
                    "warning",
                    namespace=desired.log_namespace,
                )
            )
        if desired.secrets.credentials and not desired.by_credential:
            self.problems.append(
                preflight.problem(
                    "credentials_not_passed",
                    f"systemd hands no credentials over on this host; secrets are 0400 files of {desired.user} instead",
                    "warning",
                )
            )

    def _stop_on_problems(self) -> None:
        errors = [
            item
            for item in self.problems
            if item["severity"] == "error" and item["code"] not in self.request.accept_problems
        ]
        if errors:
            text = "; ".join(f"{item['code']}: {item['message']}" for item in errors)
            raise ServiceError(f"instance {self.request.instance} cannot be started here: {text}")

    # -- steps --------------------------------------------------------------------------------------------------------

    def _note_diff(self, what: str, before: str, after: str) -> None:
        if before != after:
            self.diff.append({"before_header": what, "after_header": what, "before": before, "after": after})

    def _compare(self, old: Revision | None, desired: Desired) -> None:
        if old is None:
            return
        for item in unit_file.compare_argv(old.meta["argv"], desired.argv):
            self.differences.append({"what": "flag", "name": item["flag"], "before": item["old"], "after": item["new"]})
        for what, before, after in (
            ("env", parse_environment_file(old.env), parse_environment_file(desired.env)),
            ("library", dict(old.meta.get("libraries") or {}), dict(desired.meta["libraries"])),
        ):
            for name in sorted({*before, *after}):
                if before.get(name) != after.get(name):
                    hide = what == "env" and bool(_SENSITIVE.search(name))
                    self.differences.append(
                        {
                            "what": what,
                            "name": name,
                            "before": "********" if hide and name in before else before.get(name),
                            "after": "********" if hide and name in after else after.get(name),
                        }
                    )

    def _verify(self, revision: Revision) -> None:
        """systemd's own opinion of the staged unit; ServiceError when it would ignore or refuse a line."""
        make_dir(self.host.path(RUN), 0o755)
        folder = tempfile.mkdtemp(prefix="verify-", dir=self.host.path(RUN))
        try:
            staged = f"{folder}/{self.unit}"
            write_file(staged, revision.unit, 0o644)
            result = self.host.run(["systemd-analyze", "verify", "--man=no", staged], 60)
        finally:
            shutil.rmtree(folder)
        if result.rc == 127:
            self.problems.append(
                preflight.problem("unit_not_verified", "systemd-analyze is not installed on this host", "warning")
            )
            return
        said = [
            line.strip()
            for line in (result.stderr + result.stdout).splitlines()
            if line.startswith((staged, self.unit)) or re.search(rf"(^|[/ ]){re.escape(self.unit)}[: ]", line)
        ]
        if said or result.rc != 0:
            text = "; ".join(said) or (result.stderr or result.stdout).strip()[-800:]
            raise ServiceError(f"systemd does not take the unit of {self.request.instance}: {text}")

    def _swap(self, revision: Revision) -> None:
        """Make a stored revision the one that boots: its environment first, then the unit in one rename."""
        make_dir(self.host.path(ETC), 0o755)
        make_dir(self.host.path(self.etc), 0o711)
        env_path = self.env_path(revision.revision)
        if self.host.read(env_path) != revision.env:
            write_file(self.host.path(env_path), revision.env, 0o600)
        if self.host.read(self.unit_path) != revision.unit:
            make_dir(self.host.path(UNITS), 0o755)
            write_file(self.host.path(self.unit_path), revision.unit, 0o644)
        if self.store.pointer("current") != revision.revision:
            self.store.point("current", revision.revision)

    def _enable(self) -> None:
        if self.systemd.show(self.unit).get("UnitFileState") != "enabled":
            self.systemd.must("enable", self.unit)
            self.changed = True

    def _start(self, verb: str) -> None:
        # Counters of an earlier crash loop would refuse the start; a unit that never failed has nothing to reset.
        self.systemd.call("reset-failed", self.unit)
        timeout = 180.0
        text = self.host.read(self.unit_path) or ""
        span = unit_file.parse_span(unit_file.setting(unit_file.parse_unit(text), "Service", "TimeoutStartSec") or "90")
        if span is not None:
            timeout = min(span, 3600.0) + 180.0
        self.systemd.must(verb, self.unit, timeout=timeout)
        self.changed = True

    def _end_leftovers(self, control_group: str) -> list[int]:
        """End what is still in the cgroup of this unit after it stopped; returns the pids."""
        left = preflight.cgroup_processes(control_group, self.host.sys_cgroup)
        for pid in left:
            born = process_start(pid, self.host.proc)
            if born is not None and preflight.in_unit(preflight.cgroup_of(pid, self.host.proc), self.unit):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
        return left

    def _stop(self) -> None:
        seen = self.observe()
        if seen["state"] not in ("inactive", "failed") or seen["pid"]:
            self.systemd.must("stop", self.unit, timeout=300)
            self.changed = True
        if self._end_leftovers(f"/system.slice/{self.unit}"):
            self.changed = True

    def _disable(self, unit: str) -> None:
        if self.systemd.show(unit).get("UnitFileState") in ("enabled", "enabled-runtime"):
            self.systemd.must("disable", unit)
            self.changed = True

    # -- takeover ------------------------------------------------------------------------------------------------------

    def _describe_takeover(self, desired: Desired) -> dict[str, Any] | None:
        """``{unit, argv, env, differences, problems, was_active, was_enabled, text}`` of the unit to take over."""
        name = self.request.takeover
        if not name:
            return None
        known = self.store.read_json("takeover.json")
        if known and known.get("unit") == name:
            known["differences"] = unit_file.compare_argv(known.get("argv") or [], desired.argv)
            return known
        show = self.systemd.show(name)
        if show.get("LoadState") != "loaded":
            return None
        texts = []
        for path in [show.get("FragmentPath", ""), *shlex.split(show.get("DropInPaths", ""))]:
            text = self.host.read(path) if path else None
            if text:
                texts.append(text)
        parsed = unit_file.parse_unit("\n".join(texts))
        pid = int(show.get("MainPID") or 0)
        argv = self.process_argv(pid) if pid else []
        env: dict[str, str] = {}
        try:
            env = unit_file.unit_environment(parsed)
            for path in unit_file.settings(parsed, "Service", "EnvironmentFile"):
                env.update(parse_environment_file(self.host.read(path.lstrip("-")) or ""))
            if not any("sglang" in item for item in argv):
                commands = unit_file.settings(parsed, "Service", "ExecStart")
                argv = unit_file.parse_command(commands[0], env) if commands else []
        except QuoteError as error:
            self.problems.append(
                preflight.problem("takeover_unreadable", f"{name}: {error}; its flags are not compared", "warning")
            )
        return {
            "unit": name,
            "argv": argv,
            "was_active": show.get("ActiveState") in ("active", "activating", "reloading"),
            "was_enabled": show.get("UnitFileState") in ("enabled", "enabled-runtime"),
            "path": show.get("FragmentPath", ""),
            "text": texts[0] if texts and name == self.unit else None,
            "problems": unit_file.review_unit(parsed, env),
            "differences": unit_file.compare_argv(argv, desired.argv),
        }

    def _secret_argument_flags(self) -> list[str]:
        return [
            "--" + name.lstrip("-").replace("_", "-")
            for name in (*self.request.secrets, "api_key", "admin_api_key", "ssl_keyfile_password", "hf_token")
        ]

    def _public_takeover(self, takeover: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if takeover is None:
            return None
        secret = self._secret_argument_flags()
        argv, hide = [], False
        for item in takeover["argv"]:
            flag, equals, _value = item.partition("=")
            argv.append("********" if hide else f"{flag}=********" if equals and flag in secret else item)
            hide = not equals and item in secret
        differences = [
            dict(item, old="********" if item["old"] else item["old"], new="********" if item["new"] else item["new"])
            if item["flag"] in secret
            else item
            for item in takeover.get("differences", [])
        ]
        public = {key: takeover[key] for key in ("unit", "was_active", "was_enabled", "problems")}
        return dict(public, argv=argv, differences=differences)

    def _remember_takeover(self, takeover: Mapping[str, Any]) -> None:
        if self.store.read_json("takeover.json"):
            return
        self.store.write_json("takeover.json", {key: value for key, value in takeover.items() if key != "differences"})

    def _give_back(self) -> str | None:
        """Put a taken-over unit back as it was; returns its name."""
        record = self.store.read_json("takeover.json")
        if not record:
            return None
        name = str(record["unit"])
        if name == self.unit and record.get("text"):
            write_file(self.host.path(self.unit_path), str(record["text"]), 0o644)
        self.systemd.must("daemon-reload")
        if record.get("was_enabled"):
            self.systemd.must("enable", name)
        if record.get("was_active"):
            self.systemd.must("restart" if name == self.unit else "start", name, timeout=300)
        self.store.write_json("takeover.json", None)
        self.changed = True
        return name

    # -- states --------------------------------------------------------------------------------------------------

    def apply(self) -> dict[str, Any]:
        """Do what the request asks; ServiceError (with details) when it cannot be done."""
        handlers = {
            "started": self._started,
            "stopped": self._stopped,
            "absent": self._absent,
            "claimed": self._claimed,
            "accepted": self._accepted,
            "rolled_back": self._rolled_back,
            "observed": self._info,
        }
        handler = handlers[self.request.state]
        try:
            if self.request.check_mode or self.request.state == "observed":
                result = handler()
            else:
                with Lock(self.host.path(f"{RUN}/{self.request.instance}.lock")):
                    result = handler()
        except StoreLocked as error:
            raise ServiceError(str(error), **self._about_others(), problems=self._all_problems()) from error
        except StoreError as error:
            raise ServiceError(str(error), problems=self._all_problems()) from error
        except ServiceError as error:
            error.details.setdefault("problems", self._all_problems())
            raise
        return result

    def _all_problems(self) -> list[dict[str, Any]]:
        return [*self.problems, *self.store.problems]

    def _result(self, **extra: Any) -> dict[str, Any]:
        current = self.current()
        seen = self.observe()
        return dict(
            {
                "changed": self.changed,
                "instance": self.request.instance,
                "unit": self.unit,
                "unit_file": self.unit_path,
                "current": current,
                "last_good": self.store.pointer("last_good"),
                "revision": current,
                "claim": self._public_claim(),
                "running_revision": seen["revision"],
                "active_state": seen["state"],
                "pid": seen["pid"] or None,
                "enabled": seen["enabled"],
                "needs": {"write": False, "restart": False, "start": False},
                "diff": self.diff,
                "differences": self.differences,
                "problems": self._all_problems(),
            },
            **extra,
        )

    # -- runs ----------------------------------------------------------------------------------------------------

    def _runs(self) -> dict[str, Any]:
        """``{run, user, since, open, current, before, deployed, good}``: who claimed the instance, who deployed what.

        ``current`` and ``before`` (the last good revision) are as the claim found them. ``deployed`` is
        ``{run, revision}``, ``good`` the run that deployed the last good revision.
        """
        return self.store.read_json("run.json") or {}

    def _public_claim(self) -> dict[str, Any] | None:
        record = self._runs()
        if not record:
            return None
        return {key: record.get(key) for key in ("run", "user", "since", "open", "deployed", "good")}

    def _about_others(self) -> dict[str, Any]:
        """Details of an error that another run is the cause of."""
        cause = {"code": "overtaken", "revision": self.current()}
        return {"cause": cause, "claim": self._public_claim(), "instance": self.request.instance}

    def _overtaken_text(self) -> str:
        record, current = self._runs(), self.current()
        by = f" by {record['user']}" if record.get("user") else ""
        since = f", which began here at {record['since']}" if record.get("since") else ""
        where = f"revision {current} is current" if current else "no revision is current"
        return (
            f"another run{by}{since}, works on instance {self.request.instance} or has changed it meanwhile: {where}. "
            "This run leaves it as it is; let the other one end, then run the same command again"
        )

    def _overtaken(self, what: str = "") -> ServiceError:
        return ServiceError(what + self._overtaken_text(), **self._about_others())

    def _holds(self, record: Mapping[str, Any]) -> bool:
        """Whether no other run claimed the instance since this one did; always, where no run is named."""
        return self.request.run is None or record.get("run") == self.request.run

    def _may_leave(self, record: Mapping[str, Any], current: str | None) -> bool:
        """Whether the current revision is this run's to leave: it deployed it, or holds the claim that found it."""
        if self.request.run is None:
            return True
        deployed = record.get("deployed") or {}
        mine = deployed.get("run") == self.request.run and deployed.get("revision") == current
        return mine or (self._holds(record) and record.get("current") == current)

    def _note_deployed(self, revision: str | None) -> None:
        """What is deployed from here on is this run's; written before it is, so that a failure half-way is, too."""
        record = self._runs()
        if self.request.run is None:
            # By hand, without a run: whoever had claimed the instance has to see that it was changed.
            record.update(run=None, open=False)
        record["deployed"] = {"run": self.request.run, "revision": revision}
        self.store.write_json("run.json", record)

    def _claimed(self) -> dict[str, Any]:
        current, last_good, record = self.current(), self.store.pointer("last_good"), self._runs()
        if self.request.revision and self.request.revision != current:
            raise self._overtaken()
        if self.request.check_mode:
            return self._result()
        self._make_folders()
        if self.request.proven and current and last_good != current and self.store.read(current):
            self.store.point("last_good", current)
            last_good = current
            record["good"] = (record.get("deployed") or {}).get("run")
            self.changed = True
        if record.get("run") != self.request.run:
            record["before"] = {"revision": last_good, "good": record.get("good")}
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
        record.update(run=self.request.run, user=user, since=now, open=True, current=current)
        self.store.write_json("run.json", record)
        return self._result()

    # -- packages --------------------------------------------------------------------------------------------------

    def _journals(self, venv: str) -> list[dict[str, Any]]:
        """The journal entries of a venv that can be taken back, oldest first; [] and a problem when unreadable."""
        try:
            entries = _journal.Journal(self.host.path(f"{STORE}/journal")).entries(venv)
        except _journal.JournalError as error:
            self.problems.append(preflight.problem("journal_unreadable", str(error), "warning"))
            return []
        return [entry.data for entry in entries if entry.state in (_journal.DONE, *_journal.INTERRUPTED)]

    def _forget_journals(self, venv: str) -> None:
        """Remove the journal entries of a venv that no stored revision needs any more."""
        kept = _libraries.kept_for_revisions(self.host.path(f"{STORE}/instances"), venv)
        if kept is None:
            return
        try:
            entries = _journal.Journal(self.host.path(f"{STORE}/journal")).entries(venv)
        except _journal.JournalError as error:
            self.problems.append(preflight.problem("journal_unreadable", str(error), "warning"))
            return
        for entry in entries:
            if entry.state == _journal.DONE and all(entry.id in journals for journals in kept):
                entry.discard()

    def _way_back(self, stored: Revision) -> dict[str, Any]:
        """``{venv, journals, reason, others}``: how the venv gets the libraries that a revision ran with.

        ``others`` are the further instances on the host that run from the venv or would at boot.
        """
        venv = str(stored.meta.get("venv") or "")
        entries = list(reversed(self._journals(venv)))
        sites = _libraries.site_packages(self.host.path(venv))
        present = {**_libraries.snapshot(sites), **_libraries.snapshot(sites, _libraries.touched(entries))}
        way = _libraries.way_back(present, entries, stored.meta.get("libraries") or {})
        return {"venv": venv, **way._asdict(), "others": self._sharing(venv) if way.journals else []}

    def _sharing(self, venv: str) -> list[str]:
        found = []
        for path in sorted(glob.glob(glob.escape(self.host.path(f"{STORE}/instances")) + "/*")):
            name = os.path.basename(path)
            if name == self.request.instance:
                continue
            other = ServiceUnit(self.host, Request(instance=name, state="observed"))
            current = other.current()
            stored = other.store.read(current) if current else None
            if stored is None or stored.meta.get("venv") != venv:
                continue
            seen = other.observe()
            if seen["enabled"] or seen["state"] not in ("inactive", "failed"):
                found.append(name)
        return found

    def _started(self) -> dict[str, Any]:
        if not self.request.check_mode and not self._holds(self._runs()):
            raise self._overtaken()
        desired = self.desired()
        seen = self.observe()
        takeover = self._describe_takeover(desired)
        self._preflight(desired, seen)
        current = self.current()
        unit_before, env_before = self.host.read(self.unit_path), ""
        old = self.store.read(current) if current else None
        if old:
            env_before = old.env
        self._compare(old, desired)
        self._note_diff(self.unit_path, unit_before or "", desired.unit)
        self._note_diff(f"{self.etc}/<revision>.env", mask_environment(env_before), mask_environment(desired.env))
        secret_files = self._secret_contents(desired)
        secrets_changed = self._secret_changes(desired, secret_files)
        if secrets_changed:
            self._note_diff(self.secrets_dir, "(secrets as before)\n", "(secrets changed)\n")
        extra_files: dict[str, str] = {}
        if desired.log_namespace:
            path, text = self._namespace_dropin(desired.log_namespace)
            extra_files[path] = text
        accounts = self._missing_accounts(desired) if self.host.make_users else []
        stale_extra = [path for path, text in extra_files.items() if self.host.read(path) != text]
        write = bool(
            unit_before != desired.unit
            or self.host.read(self.env_path(desired.revision)) != desired.env
            or self.store.read(desired.revision) is None
            or self.store.pointer("current") != desired.revision
            or secrets_changed
            or stale_extra
            or accounts
        )
        active = seen["state"] in ("active", "reloading") and bool(seen["pid"])
        stamp = self._stamp(secret_files)
        up_to_date = seen["revision"] == desired.revision and seen["secrets"] == stamp
        needs = {"write": write, "start": not active, "restart": active and not up_to_date}
        swap_takeover = bool(
            takeover and takeover["unit"] != self.unit and self._takeover_pending(str(takeover["unit"]))
        )
        result: dict[str, Any] = {
            "needs": needs,
            "taken_over": self._public_takeover(takeover),
            "revision": desired.revision,
            "argv": desired.argv,
            "api_key_file": f"{self.secrets_dir}/api_key" if "api_key" in desired.secrets.plain else None,
            "log_namespace": desired.log_namespace,
            "limits_not_granted": [],
        }
        will_change = any(needs.values()) or not seen["enabled"] or swap_takeover
        if self.request.check_mode:
            self.changed = will_change
            return self._result(**result)
        self._stop_on_problems()
        if not will_change:
            result["limits_not_granted"] = self._limits(desired.unit, seen["pid"])
            return self._result(**result)
        if write:
            for command in accounts:
                made = self.host.run(command, 60)
                if made.rc != 0:
                    raise ServiceError(f"{' '.join(command)}: {made.stderr.strip()[-500:]}")
            self._make_folders()
            try:
                staged = self.store.stage(desired.revision, desired.unit, desired.env, desired.meta)
                self._verify(staged)
                self._write_secrets(desired, secret_files)
                for path in stale_extra:
                    make_dir(os.path.dirname(self.host.path(path)), 0o755)
                    write_file(self.host.path(path), extra_files[path], 0o644)
                if takeover:
                    self._remember_takeover(takeover)
                self._note_deployed(desired.revision)
                self._swap(staged)
            except OSError as error:
                raise ServiceError(
                    f"the unit of {self.request.instance} could not be written ({error}); what runs is unchanged"
                ) from error
            self.changed = True
        elif needs["start"] or needs["restart"]:
            self._note_deployed(desired.revision)
        self.systemd.must("daemon-reload")
        self._enable()
        if takeover and takeover["unit"] != self.unit:
            self._remember_takeover(takeover)
            name = str(takeover["unit"])
            self._disable(name)
            if self.systemd.show(name).get("ActiveState") not in ("inactive", "failed"):
                self.systemd.must("stop", name, timeout=300)
                self.changed = True
        if not active:
            self._end_leftovers(f"/system.slice/{self.unit}")
        if needs["start"] or needs["restart"]:
            # "restart" also ends a unit that waits between two attempts of a crash loop.
            self._start("restart" if needs["restart"] or seen["state"] == "activating" else "start")
            self._prove_argv(desired.argv)
        after = self.observe()
        result["limits_not_granted"] = self._limits(desired.unit, after["pid"])
        return self._result(**result)

    def _takeover_pending(self, name: str) -> bool:
        show = self.systemd.show(name)
        return show.get("ActiveState") not in ("inactive", "failed") or show.get("UnitFileState") == "enabled"

    def _prove_argv(self, argv: Sequence[str]) -> None:
        """The process just started has exactly the plan's argv; one that ended at once is for readiness to tell."""
        pid = self.observe()["pid"]
        if not pid:
            return
        seen = self.process_argv(pid)
        if seen and seen != list(argv):
            raise ServiceError(
                f"the process (pid {pid}) was not started with the plan's argv; a drop-in may change ExecStart",
                argv_expected=list(argv),
                argv_seen=seen,
            )

    def _limits(self, unit_text: str, pid: int) -> list[dict[str, str]]:
        raw = self.host.read_proc(pid, "limits") if pid else None
        if raw is None:
            return []
        parsed = unit_file.parse_unit(unit_text)
        wanted = {name: unit_file.setting(parsed, "Service", name) or "" for name in ("LimitMEMLOCK", "LimitNOFILE")}
        missing = preflight.limits_not_granted(wanted, raw.decode("utf-8", "replace"))
        for item in missing:
            self.problems.append(
                preflight.problem(
                    item["code"],
                    f"{self.unit} asks for {item['limit']}={item['wanted']}, the kernel granted {item['granted']}",
                    "warning",
                )
            )
        return missing

    def _stopped(self) -> dict[str, Any]:
        seen = self.observe()
        running = seen["state"] not in ("inactive", "failed") or bool(seen["pid"])
        left = preflight.cgroup_processes(f"/system.slice/{self.unit}", self.host.sys_cgroup)
        if self.request.check_mode:
            self.changed = running or bool(left)
        elif not self._may_leave(self._runs(), self.current()):
            raise self._overtaken()
        else:
            self._stop()
        return self._result(needs={"write": False, "restart": False, "start": False}, stopped_pids=left)

    def _owned_paths(self) -> list[str]:
        paths = [self.unit_path, self.etc, f"{STORE}/instances/{self.request.instance}"]
        namespace = f"sglang-{self.request.instance}"
        paths.append(f"{UNITS}/systemd-journald@{namespace}.service.d")
        if self.request.purge:
            paths += [f"/var/lib/sglang/{self.request.instance}", f"/var/cache/sglang/{self.request.instance}"]
        return [path for path in paths if os.path.lexists(self.host.path(path))]

    def _absent(self) -> dict[str, Any]:
        text = self.host.read(self.unit_path)
        foreign = text is not None and not self._is_ours(text)
        seen = self.observe()
        paths = [path for path in self._owned_paths() if not (foreign and path == self.unit_path)]
        ours = text is not None and not foreign
        if ours:
            self._note_diff(self.unit_path, text or "", "")
        record = self.store.read_json("takeover.json")
        kept = {"unit": record["unit"], "was_enabled": record.get("was_enabled")} if record else None
        if self.request.check_mode:
            self.changed = bool(paths) or (ours and seen["state"] not in ("inactive", "failed"))
            return self._result(
                removed=paths, taken_over=kept, needs={"write": bool(paths), "restart": False, "start": False}
            )
        if ours or (text is None and seen["state"] not in ("inactive", "failed")):
            self._stop()
            self._disable(self.unit)
        for path in paths:
            target = self.host.path(path)
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target)
            else:
                os.unlink(target)
            self.changed = True
        if ours:
            self.systemd.must("daemon-reload")
            self.systemd.call("reset-failed", self.unit)
        return self._result(removed=paths, taken_over=kept, needs={"write": False, "restart": False, "start": False})

    def _accepted(self) -> dict[str, Any]:
        current, record = self.current(), self._runs()
        if current is None or self.store.read(current) is None:
            raise ServiceError(
                f"{self.unit} is on no stored revision, so there is nothing to accept; run state started"
            )
        if self.request.revision and self.request.revision != current:
            raise self._overtaken(f"revision {self.request.revision} was to be accepted, {current} is current; ")
        seen = self.observe()
        if seen["state"] != "active" or seen["revision"] != current:
            told = f"{self.unit} is {seen['state']} on revision {seen['revision']}, not running {current}: not accepted"
            if self.request.run is not None and record.get("open") and not self._holds(record):
                raise self._overtaken(told + "; ")
            raise ServiceError(told)
        changes = self.store.pointer("last_good") != current
        if self.request.check_mode:
            self.changed = changes
            return self._result()
        if changes:
            self.store.point("last_good", current)
            self.changed = True
        deployed = record.get("deployed") or {}
        if deployed.get("revision") == current:
            record["good"] = deployed.get("run")
        if self._holds(record) or deployed.get("run") == record.get("run"):
            record["open"] = False
        if record != self._runs():
            self.store.write_json("run.json", record)
        self.store.prune(KEPT_REVISIONS, [current, (record.get("before") or {}).get("revision")])
        self._remove_stale_files(current)
        self._forget_journals(str((self.store.read(current) or Revision("", "", "", {})).meta.get("venv") or ""))
        return self._result()

    def _remove_stale_files(self, current: str) -> None:
        """Environment of removed revisions, and secrets that no kept revision reads."""
        kept = self.store.revisions()
        names = {f"{item.revision}.env" for item in kept}
        for path in glob.glob(glob.escape(self.host.path(self.etc)) + "/*.env"):
            if os.path.basename(path) not in names:
                os.unlink(path)
        if not any(self.etc in line for item in kept for line in self._secret_lines(item.unit)):
            for folder in (self.secrets_dir, self.service_dir):
                if os.path.isdir(self.host.path(folder)):
                    shutil.rmtree(self.host.path(folder))

    def _secret_lines(self, text: str) -> list[str]:
        return [line for line in text.splitlines() if f"{self.etc}/secrets/" in line or f"{self.etc}/service/" in line]

    def _target(self, record: Mapping[str, Any], current: str | None) -> tuple[str | None, bool]:
        """The revision to go back to, and whether ``last_good`` has to move back with it.

        After a run accepted what it deployed, the last good revision is the one that it found: another rank of the
        instance may have failed at this.
        """
        last_good = self.store.pointer("last_good")
        if self.request.revision:
            return self.request.revision, False
        deployed = {"run": self.request.run, "revision": current}
        mine = self.request.run is not None and record.get("deployed") == deployed
        if mine and self._holds(record) and last_good == current and "before" in record:
            return record["before"]["revision"], True
        return last_good, False

    def _leave_good(self, record: dict[str, Any], target: str | None) -> None:
        """``last_good`` as it was before this run accepted its own revision; first of all, a cut may follow."""
        self.store.point("last_good", target)
        record["good"] = (record.get("before") or {}).get("good")
        self.store.write_json("run.json", record)

    def _rolled_back(self) -> dict[str, Any]:
        record, current, seen = self._runs(), self.current(), self.observe()
        none = {"write": False, "restart": False, "start": False}
        if not self._may_leave(record, current):
            return self._result(needs=none, overtaken=self._overtaken_text())
        target, leaves_good = self._target(record, current)
        if leaves_good and not self.request.check_mode:
            self._leave_good(record, target)
        if target is None:
            if not leaves_good and self.store.problems and os.path.lexists(f"{self.store.path}/last_good"):
                raise ServiceError(
                    f"last_good of {self.request.instance} is damaged: {self.store.problems[-1]['message']}; "
                    "name a revision (state observed lists them)"
                )
            return self._give_up_first(none)
        stored = self.store.read(target)
        if stored is None:
            sound = [item.revision for item in self.store.revisions()]
            raise ServiceError(
                f"revision {target} of {self.request.instance} is not stored or damaged; "
                f"stored: {', '.join(sound) or 'none'}"
            )
        present = library_versions(self.host.path(str(stored.meta.get("venv") or "")))
        libraries = stored.meta.get("libraries") or {}
        changed_libraries = [
            {"name": name, "wanted": libraries.get(name), "present": present.get(name)}
            for name in sorted({*libraries, *present})
            if libraries.get(name) != present.get(name)
        ]
        packages = self._way_back(stored)
        if changed_libraries:
            mend = packages["reason"] or (
                f"restore them (backend_packages, state restored, journal_ids {', '.join(packages['journals'])})"
            )
            self.problems.append(
                preflight.problem(
                    "libraries_differ",
                    "the venv has other libraries than when this revision ran: "
                    + ", ".join(str(item["name"]) for item in changed_libraries)
                    + f"; {mend}",
                    "warning",
                )
            )
        before = self.host.read(self.unit_path) or ""
        self._note_diff(self.unit_path, before, stored.unit)
        active = seen["state"] in ("active", "reloading") and bool(seen["pid"])
        needs = {
            "write": before != stored.unit or self.host.read(self.env_path(target)) != stored.env,
            "start": not active,
            "restart": active and seen["revision"] != target,
        }
        extra = {
            "needs": needs,
            "revision": target,
            "argv": [str(item) for item in stored.meta["argv"]],
            "api_key_file": f"{self.secrets_dir}/api_key"
            if os.path.exists(self.host.path(f"{self.secrets_dir}/api_key"))
            else None,
            "rolled_back_from": current if current != target else None,
            "libraries_differ": changed_libraries,
            "packages": packages,
            "log_namespace": stored.meta.get("log_namespace"),
        }
        if self.request.check_mode:
            self.changed = any(needs.values())
            return self._result(**extra)
        if self.request.run is not None:
            # What runs from here on is this run's again, whoever claimed the instance meanwhile.
            self.store.write_json("run.json", {**self._runs(), "run": self.request.run, "open": True})
        if any(needs.values()):
            self._note_deployed(target)
        if needs["write"]:
            self._swap(stored)
            self.changed = True
        elif self.store.pointer("current") != target:
            self.store.point("current", target)
        self.systemd.must("daemon-reload")
        self._enable()
        if needs["start"] or needs["restart"]:
            self._end_leftovers(f"/system.slice/{self.unit}") if not active else None
            self._start("restart" if needs["restart"] or seen["state"] == "activating" else "start")
            self._prove_argv([str(item) for item in stored.meta["argv"]])
        return self._result(**extra)

    def _give_up_first(self, none: dict[str, bool]) -> dict[str, Any]:
        """No revision was ever good: stop and disable what was started, put back what was taken over."""
        text = self.host.read(self.unit_path)
        ours = text is not None and self._is_ours(text)
        record = self.store.read_json("takeover.json")
        seen = self.observe()
        if self.request.check_mode:
            self.changed = bool(record) or (ours and (seen["enabled"] or seen["state"] not in ("inactive", "failed")))
            return self._result(needs=none, restored=record["unit"] if record else None)
        if ours:
            self._stop()
            self._disable(self.unit)
            self.systemd.call("reset-failed", self.unit)
        restored = self._give_back()
        return self._result(needs=none, restored=restored)

    def _info(self) -> dict[str, Any]:
        current, last_good = self.current(), self.store.pointer("last_good")
        if self.store.pointer("current") != current and current is not None:
            self.problems.append(
                preflight.problem(
                    "swap_interrupted",
                    f"the unit file is on revision {current}, the store says {self.store.pointer('current')}: "
                    "a run was interrupted; the unit file counts, and the next run converges",
                    "warning",
                )
            )
        listed = [
            {
                "revision": item.revision,
                "created": item.meta.get("created"),
                "argv": item.meta["argv"],
                "libraries": item.meta.get("libraries"),
                "journals": item.meta.get("journals") or [],
                "sglang_version": item.meta.get("sglang_version"),
                "current": item.revision == current,
                "last_good": item.revision == last_good,
            }
            for item in self.store.revisions()
        ]
        record = self.store.read_json("takeover.json")
        seen = self.observe()
        text = self.host.read(self.unit_path) or ""
        return self._result(
            revisions=listed,
            taken_over={"unit": record["unit"]} if record else None,
            needs={"write": False, "restart": False, "start": False},
            limits_not_granted=self._limits(text, seen["pid"]) if text else [],
        )
