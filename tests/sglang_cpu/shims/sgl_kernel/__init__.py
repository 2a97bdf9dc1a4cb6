# SPDX-License-Identifier: GPL-3.0-or-later
"""Test stand-in for the CUDA-only package sgl_kernel, so that a real SGLang starts on CPU.

It is not sgl_kernel and contains nothing of it: every name exists, calling one raises.
"""

__version__ = "0.0.0+gpufleet.test.stand.in"


def _stand_in(module):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise RuntimeError(f"{module}.{name} was called, but this sgl_kernel is a test stand-in")

        missing.__name__ = name
        return missing

    return __getattr__


__getattr__ = _stand_in("sgl_kernel")
