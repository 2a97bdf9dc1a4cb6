# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Venvs for tests: a real interpreter, and distributions laid out as installers do, in milliseconds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from tests.tools.make_so import So

Content = Union[str, bytes, So]


def _bytes(content: Content) -> bytes:
    if isinstance(content, So):
        return content.build()
    return content.encode() if isinstance(content, str) else content


def _row(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(data)}"


class FakeVenv:
    """A venv at ``path`` of the interpreter that runs the tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        self.tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        self.site = path / "lib" / f"python{version}" / "site-packages"
        self.site.mkdir(parents=True)
        (path / "bin").mkdir()
        base = os.path.realpath(sys.executable)
        (path / "bin" / "python").symlink_to(base)
        (path / "pyvenv.cfg").write_text(
            f"home = {os.path.dirname(base)}\ninclude-system-site-packages = false\nversion = {version}.0\n"
        )
        self.suffix = f".cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu.so"

    def put(self, relative: str, content: Content = "") -> Path:
        """A file in site-packages that no distribution owns."""
        target = self.site / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(_bytes(content))
        return target

    def dist(
        self,
        name: str,
        version: str,
        files: Optional[Mapping[str, Content]] = None,
        requires: Sequence[str] = (),
        tag: Optional[str] = None,
        direct_url: Optional[Mapping[str, Any]] = None,
    ) -> Path:
        """Installs a distribution as a wheel installer does; returns its dist-info folder."""
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        info = {
            "METADATA": "\n".join(lines) + "\n\nText.\n",
            "WHEEL": f"Wheel-Version: 1.0\nTag: {tag or f'{self.tag}-{self.tag}-manylinux_2_28_x86_64'}\n",
        }
        if direct_url is not None:
            info["direct_url.json"] = json.dumps(direct_url)
        rows = []
        for path, content in {**(files or {}), **{f"{folder}/{key}": value for key, value in info.items()}}.items():
            data = _bytes(content)
            self.put(path, data)
            rows.append(_row(path, data))
        rows.append(f"{folder}/RECORD,,")
        self.put(f"{folder}/RECORD", "\n".join(rows) + "\n")
        return self.site / folder

    def torch(self, version: str = "2.14.1+cu130", cuda: Optional[str] = "13.0", usable: bool = True) -> None:
        """A torch that says its version, and that it sees a GPU if ``usable``."""
        self.put("torch/version.py", f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n")
        self.put("torch/__init__.py", "from torch import version, cuda\n__version__ = version.__version__\n")
        self.put("torch/cuda.py", f"def is_available():\n    return {usable}\n")
        major = cuda.split(".")[0] if cuda else None
        if major:
            self.put(f"nvidia/cu{major}/lib/libcudart.so.{major}", So(soname=f"libcudart.so.{major}"))
        self.put("torch/lib/libtorch.so", So(soname="libtorch.so"))

    def sglang(self, version: str = "0.5.23", requires: Sequence[str] = (), guard: Optional[str] = None) -> None:
        """SGLang's metadata, and with ``guard`` its file that imports deep_ep unasked."""
        files: dict[str, Content] = {"sglang/__init__.py": ""}
        if guard is not None:
            files["sglang/srt/layers/moe/token_dispatcher/deepep.py"] = (
                f"try:\n    from deep_ep import Buffer, Config\n    use_deepep = True\nexcept {guard}:\n    pass\n"
            )
        self.dist("sglang", version, files, requires, tag="py3-none-any")
