# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action part of report: it all happens on the controller, in one process for all hosts."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from ansible import constants as C
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.color import stringc
from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents, _report
from ansible_collections.gpufleet.sglang.plugins.plugin_utils import _report_html

COLOURS = {"good": C.COLOR_OK, "warn": C.COLOR_CHANGED, "bad": C.COLOR_ERROR}


def write(path: str, text: str) -> None:
    """Replace the file whole, so that whoever reads it never sees half of one."""
    folder = os.path.dirname(path)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".report-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o640)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def secret_values(variables: Mapping[str, Any]) -> Iterator[str]:
    """The values of a host's secrets, its own and those of its instances."""
    sources = [variables.get("sglang_secrets")]
    instances = variables.get("sglang_instances")
    if isinstance(instances, Mapping):
        sources += [item.get("secrets") for item in instances.values() if isinstance(item, Mapping)]
    for source in sources:
        if isinstance(source, Mapping):
            yield from (str(value) for value in source.values() if value)


class ActionModule(ActionBase):
    """See the documentation of the module of this name."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        arguments = self.validate_argument_spec(
            {
                "hosts": {"type": "list", "elements": "str", "required": True},
                "kind": {
                    "type": "str",
                    "choices": ["probe", "site", "remediate", "verify", "rollback"],
                    "default": "probe",
                },
                "directory": {"type": "str"},
                "width": {"type": "int", "default": 140},
            }
        )[1]
        hostvars = (task_vars or {})["hostvars"]
        values: dict[str, Any] = {}
        secrets: set[str] = set()
        for host in arguments["hosts"]:
            host = str(host)
            known = hostvars[host]
            values[host] = {name: _intents.plain(known[name]) for name in _report.KEPT if name in known}
            secrets.update(
                secret_values(
                    {n: _intents.plain(known[n]) for n in ("sglang_secrets", "sglang_instances") if n in known}
                )
            )
        report = _report.document(
            _report.records(values, values),
            kind=str(arguments["kind"]),
            generated=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            version=self._version(),
            secrets=secrets,
        )
        width = max(100, arguments["width"])
        self._display.display("\n" + _report.report_table(report, width, self._paint) + "\n")
        files = self._write(str(arguments["directory"] or ""), report)
        for path in files:
            self._display.display(f"written: {path}")
        result.update(changed=False, summary=report["summary"], next_steps=report["next_steps"], files=files)
        return result

    def _paint(self, text: str, state: str) -> str:
        colour = COLOURS.get(_report_html.tone(state.split(":")[0].split(" ")[0]))
        return str(stringc(text, colour)) if colour and text.strip() else text

    def _write(self, directory: str, report: Mapping[str, Any]) -> list[str]:
        if not directory:
            return []
        directory = os.path.abspath(os.path.expanduser(directory))
        texts = {"report.json": json.dumps(report, indent=1) + "\n", "report.html": _report_html.render(report)}
        try:
            os.makedirs(directory, mode=0o750, exist_ok=True)
            for name, text in texts.items():
                write(os.path.join(directory, name), text)
        except OSError as error:
            raise AnsibleActionFail(
                f"sglang_artifacts_dir: the report cannot be written to {directory}: {error.strerror}; "
                "name a folder on the controller that the user of this run may write to"
            ) from None
        return [os.path.join(directory, name) for name in texts]

    def _version(self) -> Optional[str]:
        # An installed collection has the one, a checkout the other.
        for name, key in (("MANIFEST.json", "collection_info"), ("galaxy.yml", "")):
            path = os.path.join(os.path.dirname(__file__), "..", "..", name)
            if os.path.isfile(path):
                found: Any = self._loader.load_from_file(os.path.realpath(path))
                return str((found[key] if key else found)["version"])
        return None
