# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: brings a plan onto a host: judged beforehand, staged, verified, swapped, started."""

from __future__ import annotations

import datetime
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _host_preflight as preflight
from ansible_collections.gpufleet.sglang.plugins.module_utils import _journal
from ansible_collections.gpufleet.sglang.plugins.module_utils import _unit_file as unit_file
from ansible_collections.gpufleet.sglang.plugins.module_utils._libraries import library_versions
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
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_host import (
    ETC,
    RUN,
    UNITS,
    ServiceError,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_runs import Runs
from ansible_collections.gpufleet.sglang.plugins.module_utils._unit_store import (
    Revision,
    make_dir,
    revision_id,
    write_file,
)

_SENSITIVE = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
_WRITABLE_ENV = re.compile(
    r"(_CACHE_DIR|_CACHE|_CACHE_ROOT|_CACHE_PATH|_CACHE_HOME|_RECORDER_DIR|_PROFILER_DIR|_STORAGE_DIR|_WORKSPACE_BASE)\Z"
)
_WRITABLE_NAMES = ("HOME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME")
_WRITABLE_FLAGS = ("--download-dir", "--crash-dump-folder", "--file-storage-path", "--export-metrics-to-file-dir")


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


class Deploy(Runs):
    """The state started."""

    # -- what should be there --------------------------------------------------------------------------------------

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

    # -- users -----------------------------------------------------------------------------------------------------

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

    # -- preflight -------------------------------------------------------------------------------------------------

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

    # -- takeover --------------------------------------------------------------------------------------------------

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

    def _takeover_pending(self, name: str) -> bool:
        show = self.systemd.show(name)
        return show.get("ActiveState") not in ("inactive", "failed") or show.get("UnitFileState") == "enabled"

    # -- deploying -------------------------------------------------------------------------------------------------

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
