"""The kernels of signal.cu on one device."""

from __future__ import annotations

import ctypes

from mpicomm.devices.cuda.load import KernelCache
from mpicomm.kernels.variant import SHARED


class SignalKernels:
    """Construction loads both kernels, before a kernel can spin, because loading may wait for the whole device."""

    def __init__(self, kernels: KernelCache) -> None:
        pointer = ctypes.c_void_p
        module = kernels.module(SHARED / "signal.cu")
        self.signal = module.kernel("mpicomm_signal", (pointer, pointer, pointer))
        self.wait = module.kernel(
            "mpicomm_wait_signal", (pointer, pointer, ctypes.c_uint32, ctypes.c_uint64, pointer, pointer)
        )
