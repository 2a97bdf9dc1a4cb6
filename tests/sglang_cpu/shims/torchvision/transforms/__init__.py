# SPDX-License-Identifier: GPL-3.0-or-later
"""Test stand-in for torchvision.transforms."""

from enum import Enum

from .. import _stand_in


class InterpolationMode(Enum):
    """The one name that is used by value."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = _stand_in(__name__)
