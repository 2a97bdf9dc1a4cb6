# SPDX-License-Identifier: GPL-3.0-or-later
"""Test stand-in for torchvision, which does not import beside a CPU build of torch 2.13.0.

It is not torchvision and contains nothing of it: every name is an empty class, so that ``import`` and annotations work.
"""

__version__ = "0.0.0+gpufleet.test.stand.in"


def _stand_in(module):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": module})

    return __getattr__
