# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: which files hand an instance its secrets; pure, reads and writes nothing.

Three kinds, told apart by the name in ``secrets``: ``hf_token`` goes by a file whose path is in HF_TOKEN_PATH,
names in CAPITALS are environment variables in a root-only EnvironmentFile, and every other name is a flag in a
YAML that SGLang reads with ``--config``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd_quote import format_environment_file

CONFIG_NAME = "config.yaml"
HF_TOKEN_NAME = "hf_token"
_FLAG = re.compile(r"[a-z][a-z0-9_-]*\Z")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*\Z")


class SecretError(ValueError):
    """A secret that cannot be handed over; the message names it, never its value."""


@dataclass
class SecretFiles:
    """What to write for a set of secrets."""

    credentials: dict[str, str] = field(default_factory=dict)  # name of the file -> content; for the service
    env_file: str = ""  # text of the root-only EnvironmentFile, "" when there is none
    plain: dict[str, str] = field(default_factory=dict)  # flag name -> value; root-only files for readiness checks
    flags: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to hand over."""
        return not (self.credentials or self.env_file)


def yaml_quote(value: str) -> str:
    """A YAML double-quoted scalar that every YAML 1.1 and 1.2 parser reads back as ``value``."""
    out = []
    for char in value:
        code = ord(char)
        if char in '"\\':
            out.append("\\" + char)
        elif 0x20 <= code < 0x7F:
            out.append(char)
        elif code <= 0xFF:
            out.append(f"\\x{code:02x}")
        elif code <= 0xFFFF:
            out.append(f"\\u{code:04x}")
        else:
            out.append(f"\\U{code:08x}")
    return '"' + "".join(out) + '"'


def plan_secret_files(secrets: Mapping[str, Any], secret_flags: Sequence[str]) -> SecretFiles:
    """Sort ``secrets`` (name: value) into files; raises SecretError.

    ``secret_flags`` are those that the plan expects: one without a value is an error, since the service would
    start without its key.
    """
    wanted = {str(name).lstrip("-").replace("-", "_") for name in secret_flags}
    given = {name if _VARIABLE.match(name) else name.lstrip("-").replace("-", "_"): name for name in secrets}
    missing = sorted(name for name in wanted if name not in given)
    if missing:
        raise SecretError(
            f"secrets: no value for {', '.join(missing)}, which the plan hands over; set it in sglang_secrets"
        )
    files = SecretFiles()
    variables: dict[str, str] = {}
    for name in sorted(given):
        value = secrets[given[name]]
        if not isinstance(value, str):
            raise SecretError(f"secrets: {given[name]} must be a string; quote it in YAML")
        value = value.strip("\r\n")
        if not value:
            raise SecretError(f"secrets: {given[name]} is empty")
        if any(char in value for char in "\n\r\0"):
            raise SecretError(f"secrets: {given[name]} has several lines")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise SecretError(f"secrets: {given[name]} is not valid text") from None
        if name == HF_TOKEN_NAME:
            files.credentials[HF_TOKEN_NAME] = value + "\n"
        elif _VARIABLE.match(name):
            variables[name] = value
        elif _FLAG.match(name):
            if value.startswith("-"):
                raise SecretError(
                    f"secrets: {given[name]} begins with '-', which SGLang would take for a flag; choose another value"
                )
            files.flags.append(name)
            files.plain[name] = value + "\n"
        else:
            raise SecretError(f"secrets: {given[name]!r} is neither a flag nor an environment variable")
    if files.flags:
        lines = [
            f"{name.replace('_', '-')}: {yaml_quote(secrets[given[name]].strip(chr(13) + chr(10)))}\n"
            for name in files.flags
        ]
        files.credentials[CONFIG_NAME] = "".join(lines)
    if variables:
        try:
            files.env_file = format_environment_file(variables)
        except ValueError:
            raise SecretError(f"secrets: {', '.join(variables)}: a value has characters that systemd drops") from None
    return files
