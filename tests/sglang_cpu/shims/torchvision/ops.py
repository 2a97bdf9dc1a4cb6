# SPDX-License-Identifier: GPL-3.0-or-later
"""Test stand-in for torchvision.ops."""

from . import _stand_in

__getattr__ = _stand_in(__name__)
