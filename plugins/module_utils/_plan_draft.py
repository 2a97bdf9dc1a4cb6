# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: a plan while it is being made, and the evidence that its parts look at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _fabric, _flags, _gpus, _rules

_STOPS = re.compile(r"(?<!\.)\.+\s*(?=[.;,:](?:\s|$))")


def tidy(text: Any) -> str:
    """A sentence that was put together of others, without doubled stops and without one at its end."""
    return _STOPS.sub("", str(text)).strip().rstrip(". ")


class Draft:
    """Collects decisions, warnings, rejections and remedies; the questions about the host are answered here.

    ``intent``, ``probe`` and ``settings`` have the shapes of contracts.md and are not changed.
    """

    def __init__(
        self,
        intent: Mapping[str, Any],
        probe: Mapping[str, Any],
        settings: Mapping[str, Any],
        host: Optional[str],
    ) -> None:
        self.intent = intent
        self.probe = probe
        self.settings = settings
        self.host = host
        self.decisions: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Any]] = []
        self.rejections: list[dict[str, Any]] = []
        self.remedies: list[dict[str, Any]] = []
        self.assumes: list[dict[str, Any]] = []
        self.env: dict[str, str] = {}
        self._fabric: Optional[dict[str, Any]] = None
        own = (probe.get("instances") or {}).get(intent.get("instance")) or {}
        self.model: Mapping[str, Any] = own.get("model") or probe.get("model") or {}
        # A model that could not be read has every size, all of them None: that is not "no experts".
        self.config: Mapping[str, Any] = self.model if self.model.get("state") in (None, "ok") else {}
        sglang = probe.get("sglang") or {}
        self.sglang_version: Optional[str] = sglang.get("version")
        self.catalogue = _flags.Catalogue(probe.get("server_args"), self.sglang_version)
        self.reading = _flags.read_flags(intent.get("flags") or {}, self.catalogue)
        self.user_env, env_warnings = _flags.read_env(intent.get("env_vars") or {}, self.catalogue)
        self.rejections += self.reading.rejections
        self.warnings += self.reading.warnings + env_warnings

    # What is collected

    def reject(
        self,
        code: str,
        message: str,
        flag: Optional[str] = None,
        variable: Optional[str] = None,
        value: Any = None,
        numbers: Optional[Mapping[str, Any]] = None,
        suggestion: Optional[str] = None,
        **more: Any,
    ) -> None:
        row = {
            "code": code,
            "message": tidy(message),
            "flag": flag,
            "variable": variable,
            "value": value,
            "numbers": dict(numbers or {}),
            "suggestion": suggestion,
            **more,
        }
        if row not in self.rejections:
            self.rejections.append(row)

    def warn(
        self,
        code: str,
        message: str,
        flag: Optional[str] = None,
        variable: Optional[str] = None,
        value: Any = None,
        **more: Any,
    ) -> None:
        row = {"code": code, "message": tidy(message), "flag": flag, "variable": variable, "value": value, **more}
        if row not in self.warnings:
            self.warnings.append(row)

    def decide(self, question: str, answer: Any, because: str, evidence: Optional[Mapping[str, Any]] = None) -> None:
        self.decisions.append(
            {"question": question, "answer": answer, "because": tidy(because), "evidence": dict(evidence or {})}
        )

    def want(
        self,
        backend: str,
        use: str,
        state: Mapping[str, Any],
        remedy: Optional[Mapping[str, Any]],
        required: bool = True,
    ) -> None:
        """Note that ``remedy`` is needed so that ``backend`` works for ``use``."""
        if not remedy:
            return
        for row in self.remedies:
            if row["backend"] == backend and row["steps"] == list(remedy.get("steps") or []):
                row["required"] = row["required"] or required
                break
        else:
            self.remedies.append(
                {
                    "backend": backend,
                    "use": use,
                    "state": state.get("state"),
                    "code": state.get("code"),
                    "kind": remedy.get("kind"),
                    "summary": remedy.get("summary"),
                    "steps": list(remedy.get("steps") or []),
                    "required": required,
                }
            )

    def assume(self, backend: str, use: str, after: Any) -> None:
        row = {"backend": backend, "use": use, "state": "ok", "after": after}
        if row not in self.assumes:
            self.assumes.append(row)

    # What the host is like

    def flag(self, key: str, default: Any = None) -> Any:
        """The user's value of a flag, under SGLang's own name."""
        return self.reading.value(key, default)

    def truth(self, key: str) -> bool:
        value = self.flag(key)
        return value is True or (isinstance(value, str) and value.strip().casefold() in ("true", "yes", "on", "1"))

    def number(self, key: str, default: Optional[int] = None) -> Optional[int]:
        value = self.flag(key)
        if isinstance(value, bool) or value is None:
            return default
        match = re.fullmatch(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([kKmM]?)[iI]?[bB]?\s*", str(value))
        if not match:
            return default
        scale = {"": 1, "k": 1000, "m": 1000000}[match[2].casefold()]
        return int(float(match[1]) * scale)

    @property
    def on_cpu(self) -> bool:
        return str(self.flag("device") or "").casefold() == "cpu"

    @property
    def gpus_known(self) -> bool:
        return (self.probe.get("gpus") or {}).get("state") == "ok"

    def gpu_indexes(self) -> Optional[list[int]]:
        """The indexes that the instance is limited to, or None for all."""
        if self.intent.get("gpus"):
            return [int(index) for index in self.intent["gpus"]]
        devices = (self.probe.get("gpus") or {}).get("devices") or []
        return _gpus.visible_indices(self.user_env.get("CUDA_VISIBLE_DEVICES"), devices) if devices else None

    def gpus(self) -> list[Mapping[str, Any]]:
        """The GPUs that the instance can use: selected, there and not lost."""
        devices = (self.probe.get("gpus") or {}).get("devices") or []
        indexes = self.gpu_indexes()
        chosen = devices if indexes is None else [gpu for gpu in devices if gpu.get("index") in indexes]
        return [gpu for gpu in chosen if not gpu.get("lost")]

    def archs(self) -> list[str]:
        """SM families of the GPUs, from the compute capability and never from the name."""
        found = []
        for gpu in self.gpus():
            family = _rules.sm_family(gpu.get("compute_capability")) or gpu.get("sm")
            if family and family not in found:
                found.append(family)
        return found

    def fabric(self) -> Mapping[str, Any]:
        """``fabric`` of the usable GPUs only: one that is left out does not degrade the others."""
        if self._fabric is None:
            fabric = self.probe.get("fabric") or {}
            self._fabric = {"class": "unknown", "bad_gpus": [], **fabric}
            lost = any(gpu.get("lost") for gpu in (self.probe.get("gpus") or {}).get("devices") or [])
            if (lost or self.gpu_indexes() is not None) and fabric.get("matrix"):
                names = {int(gpu["index"]): gpu.get("name") for gpu in self.gpus() if gpu.get("index") is not None}
                self._fabric.update(_fabric.subset(fabric, list(names), names))
        return self._fabric

    def rdma_devices(self) -> Optional[list[Mapping[str, Any]]]:
        """RDMA devices with an active port; None when nobody looked."""
        rdma = (self.probe.get("fabric") or {}).get("rdma")
        if not isinstance(rdma, Mapping) or rdma.get("state") == "unknown":
            return None
        return [
            device
            for device in rdma.get("devices") or []
            if str(device.get("state") or "").casefold() in ("active", "port_active", "up")
        ]

    def backend(self, name: str, use: str) -> Mapping[str, Any]:
        """State of a backend for a use; the backend's own state where the use was not probed."""
        backend = (self.probe.get("backends") or {}).get(name) or {}
        found = (backend.get("uses") or {}).get(use)
        if found:
            return {"remedy": backend.get("remedy"), "distributions": backend.get("distributions") or [], **found}
        if backend:
            return backend
        return {"state": "unknown", "code": None, "message": f"{name} was not probed", "distributions": []}

    def version_of(self, backend: str) -> Optional[str]:
        """Version of the distribution that provides a backend."""
        found = (self.probe.get("backends") or {}).get(backend) or {}
        for distribution in found.get("distributions") or []:
            if distribution.get("version"):
                return str(distribution["version"])
        return None
