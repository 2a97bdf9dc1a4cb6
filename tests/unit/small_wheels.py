# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wheels of a few bytes, for tests that need a real pip and no index."""

from __future__ import annotations

import base64
import hashlib
import zipfile


def make_wheel(folder, name, version, files, requires=(), wrong_hash=()):
    """A wheel as an index would have it. ``wrong_hash`` names members whose RECORD row lies."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {item}\n" for item in requires)
    members = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            data = text.encode()
            archive.writestr(member, data)
            seen = b"something else" if member in wrong_hash else data
            digest = base64.urlsafe_b64encode(hashlib.sha256(seen).digest()).rstrip(b"=").decode()
            rows.append(f"{member},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path
