# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what a run knows of a host, as files for node_exporter's textfile collector (pure).

``METRICS`` is the one list of names; docs, dashboard and alert rules are checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "gpufleet_sglang_"
HOST_FILE = "gpufleet_sglang_host.prom"
SERVICE_FILE = "gpufleet_sglang_service.prom"

# name → help; all are gauges.
METRICS = {
    "probe_timestamp_seconds": "When the host was probed last.",
    "host_info": "Versions on the host, by venv; always 1.",
    "backend_state": "State and cause of a backend in a venv; always 1.",
    "backend_ok": "Whether a backend's wanted uses work; wanted says whether anything asks for it.",
    "gpus": "GPUs that the driver shows.",
    "gpus_lost": "GPUs that fell off the bus.",
    "plan_rejections": "Reasons for which the instance's plan is refused.",
    "service_state": "State of an instance's service as the run saw it; always 1.",
    "service_ready": "Whether the instance served real generations when it was verified last.",
    "service_drift": "Whether the unit or the running process differs from the plan.",
    "service_revision_info": "Revision that runs and the last one proven good; always 1.",
    "verify_timestamp_seconds": "When the instance was verified last.",
}


def _label(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")


class _Page:
    def __init__(self) -> None:
        self.samples: dict[str, list[str]] = {}

    def add(self, name: str, value: Any, **labels: Any) -> None:
        if name not in METRICS:
            raise KeyError(name)
        pairs = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
        self.samples.setdefault(name, []).append(
            f"{PREFIX}{name}{{{pairs}}} {value}" if pairs else f"{PREFIX}{name} {value}"
        )

    def text(self) -> str:
        lines = []
        for name, found in self.samples.items():
            lines += [f"# HELP {PREFIX}{name} {METRICS[name]}", f"# TYPE {PREFIX}{name} gauge", *found]
        return "\n".join(lines) + "\n"


def metrics(entry: Mapping[str, Any], now: int) -> dict[str, str]:
    """Return ``{file name: text}`` for one host of a report; ``now`` in seconds since the epoch.

    The service's file is left out when nothing was verified, so that a probe does not wipe out the last verification.
    A host that was not reached yields no file.
    """
    if not entry["reached"]:
        return {}
    page = _Page()
    page.add("probe_timestamp_seconds", now)
    hardware = entry["hardware"]
    for path, venv in entry["venvs"].items():
        page.add(
            "host_info",
            1,
            venv=path,
            state=venv["state"],
            python=venv["python"],
            torch=venv["torch"],
            sglang=venv["sglang"],
            driver=hardware["driver"],
            gpu=hardware["gpu"],
            fabric=hardware["fabric"],
        )
        for name, backend in venv["backends"].items():
            after = backend["after"]
            page.add("backend_state", 1, venv=path, backend=name, state=after["state"], code=after["code"])
            ok = (
                all((after["uses"].get(use) or after)["state"] == "ok" for use in backend["wanted"])
                if backend["wanted"]
                else (after["state"] == "ok")
            )
            page.add("backend_ok", int(ok), venv=path, backend=name, wanted=str(bool(backend["wanted"])).lower())
    if hardware["gpus"] is not None:
        page.add("gpus", hardware["gpus"])
        page.add("gpus_lost", len(hardware["gpus_lost"]))
    for name, item in entry["instances"].items():
        page.add("plan_rejections", len(item["rejected"]), sglang_instance=name)
    files = {HOST_FILE: page.text()}
    asked = {name: item for name, item in entry["instances"].items() if item["service"] and item["ready"] is not None}
    if asked:
        page = _Page()
        for name, item in asked.items():
            cause = (item["cause"] or {}).get("code")
            page.add("service_state", 1, sglang_instance=name, state=item["state"], code=cause)
            page.add("service_ready", int(bool(item["ready"])), sglang_instance=name)
            if item["drift"] is not None:
                page.add("service_drift", int(item["drift"]), sglang_instance=name)
            page.add(
                "service_revision_info", 1, sglang_instance=name, revision=item["revision"], last_good=item["last_good"]
            )
            page.add("verify_timestamp_seconds", now, sglang_instance=name)
        files[SERVICE_FILE] = page.text()
    return files
