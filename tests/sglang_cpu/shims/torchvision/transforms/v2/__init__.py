# SPDX-License-Identifier: GPL-3.0-or-later
"""Test stand-in for torchvision.transforms.v2."""

from ... import _stand_in
from .. import InterpolationMode as InterpolationMode

__getattr__ = _stand_in(__name__)
