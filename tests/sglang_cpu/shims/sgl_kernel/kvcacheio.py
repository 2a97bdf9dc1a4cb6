# SPDX-License-Identifier: GPL-3.0-or-later
"""Test stand-in for sgl_kernel.kvcacheio: every name exists, calling one raises."""

from . import _stand_in

__getattr__ = _stand_in(__name__)
