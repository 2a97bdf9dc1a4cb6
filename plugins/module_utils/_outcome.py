# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what goes into an import child and what comes out of it.

Apart from the child's own util, so that a host where nothing can be imported does not compile that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

# What is worth knowing of the libraries that an import has loaded.
LIBRARIES = (
    "libcudart", "libcuda.", "libnccl", "libnvshmem", "libucp", "libibverbs", "libmlx5", "libtorch_cuda", "libstdc++",
    "engine", "_ep", "ep_cpp", "_C.", "_bindings", "nixl", "mooncake", "pg_",
)  # fmt: skip


@dataclass
class Group:
    """What one forked child imports: ``modules`` ``{module: attributes to look for}``, ``top`` the package's name."""

    name: str
    top: str
    modules: Mapping[str, Sequence[str]]


@dataclass
class Outcome:
    """What became of a group.

    ``outcome``: ``ok``, ``error`` (an exception, in ``error``), ``signal``, ``exit``, ``timeout``, ``torch``
    (the child died while importing torch), ``interpreter`` (Python itself died or hung before its first line) or
    ``not_started`` (``message`` says why).
    """

    outcome: str
    error: Optional[dict[str, Any]] = None
    modules: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, bool] = field(default_factory=dict)
    libraries: list[str] = field(default_factory=list)
    version: Optional[str] = None
    top_file: Optional[str] = None
    signal: Optional[str] = None
    status: Optional[int] = None
    output: str = ""
    message: str = ""
    torch: Optional[dict[str, Any]] = None


@dataclass
class Account:
    """Whom the children run as; None for ``uid`` keeps the present user."""

    uid: Optional[int] = None
    gid: Optional[int] = None
    groups: Optional[Sequence[int]] = None
    name: str = ""
    home: str = "/"
