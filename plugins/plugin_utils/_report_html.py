# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: a report as one self-contained page."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _codes, _report
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = os.path.join(os.path.dirname(__file__), "..", "..", "roles", "report", "templates")
# What the state asks of the reader; the page shows each with a word and a shape, never by colour alone.
TONES = {
    **dict.fromkeys(("ok", "ready", "busy", "active"), "good"),
    **dict.fromkeys(("suspect", "needs_gpu", "unknown", "attention", "starting", "loading", "warming"), "warn"),
    **dict.fromkeys(("activating", "reloading", "degraded"), "warn"),
    **dict.fromkeys(
        ("absent", "wrong_distribution", "variant_mismatch", "broken", "unsupported", "venv_absent"), "bad"
    ),
    **dict.fromkeys(("failed", "stuck", "crash_loop", "refused"), "bad"),
}
WORDS = {"attention": "to mend", "unreachable": "not reached"}
TITLES = {
    "probe": "Probe",
    "site": "Rollout",
    "remediate": "Remediation",
    "verify": "Verification",
    "rollback": "Rollback",
}


def tone(state: Any) -> str:
    """``good``, ``warn``, ``bad`` or ``idle``."""
    return TONES.get(str(state), "idle")


def _script_data(value: Any) -> Markup:
    """JSON for a script element: nothing in it can end the element or start a comment."""
    text = json.dumps(value, separators=(",", ":"), default=str)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def render(report: Mapping[str, Any], templates: str = TEMPLATES) -> str:
    """Return the page of a report of ``_report.document``. Only this page's own script and style may run in it."""
    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tone"] = tone
    environment.filters["word"] = lambda state: WORDS.get(str(state), str(state).replace("_", " "))
    environment.filters["named"] = lambda hosts: _report.named(hosts, 220)
    environment.filters["fold"] = _report.fold
    environment.filters["shell"] = lambda argv: shlex.join(map(str, argv or []))
    environment.globals["service_text"] = _report.service_text
    script = _read(os.path.join(templates, "report.js"))
    style = _read(os.path.join(templates, "report.css"))
    backends = list(
        dict.fromkeys(name for e in report["hosts"].values() for v in e["venvs"].values() for name in v["backends"])
    )
    causes = sorted(
        {
            backend["after"]["code"]
            for entry in report["hosts"].values()
            for venv in entry["venvs"].values()
            for backend in venv["backends"].values()
            if backend["after"]["code"]
        }
    )
    states = [
        state for state in _codes.STATES if any(state in counts for counts in report["summary"]["backends"].values())
    ]
    users: dict[str, list[str]] = {}
    for host, entry in report["hosts"].items():
        for item in entry["instances"].values():
            users.setdefault(item["plan"], []).append(host)
    hosts = {
        host: {key: value for key, value in entry.items() if key != "seen"} for host, entry in report["hosts"].items()
    }
    mends = {
        code: {"text": _codes.CODES[code].text, "mend": _codes.CODES[code].mend}
        for code in causes
        if code in _codes.CODES
    }
    return environment.get_template("report.html.j2").render(
        report=report,
        title=TITLES.get(report["kind"], report["kind"]),
        backends=backends,
        causes=causes,
        states=states,
        users_of=users,
        script=Markup(script),
        style=Markup(style),
        policy="default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_digest(script)}; style-src {_digest(style)}",
        data=_script_data({"hosts": hosts, "causes": mends, "tones": TONES}),
    )


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as handle:
        return handle.read()
