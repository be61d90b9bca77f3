"""The kernels of exchange.cu: their arguments, and one compiled kernel per reduction."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.compile import KERNELS, compile_kernel
from mpicomm.kernels.load import Kernel, Module
from mpicomm.kernels.reductions import options_for

# Constants and structures of exchange.cu; a test compares them.
MAX_RANKS = 8
THREADS = 512
SLOTS = 2
SLOT_NBYTES = 32 * 1024
LINE_NBYTES = 128
PACKET_NBYTES = 16  # kPacketNbytes in bytes.cuh


class Link(ctypes.Structure):
    """What goes to, or comes from, one rank."""

    _fields_ = [
        ("pointer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("tag", ctypes.c_uint32),
        ("overlaps", ctypes.c_uint32),
    ]


class ExchangeArguments(ctypes.Structure):
    """The host's copy of ``Exchange`` in exchange.cu."""

    _fields_ = [
        ("arenas", ctypes.c_uint64 * MAX_RANKS),
        ("sends", Link * MAX_RANKS),
        ("receives", Link * MAX_RANKS),
        ("own", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("credits", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("channels", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("num_sources", ctypes.c_uint32),
        ("sources", ctypes.c_uint32 * MAX_RANKS),
        ("names", ctypes.c_uint32 * MAX_RANKS),
    ]


class ExchangeKernels:
    """The variants of one device: ``(dtype, op)``, or None for the one that does not reduce."""

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._compute_capability = compute_capability
        self._modules: list[Module] = []
        self._kernels: dict[tuple[str, str] | None, Kernel] = {}

    def find(self, reduction: tuple[str, str] | None) -> Kernel | None:
        """Return the kernel if it is loaded."""
        return self._kernels.get(reduction)

    def load(self, reduction: tuple[str, str] | None) -> Kernel:
        """Return the kernel, compiled and loaded if need be; the device's context must be current.

        Local, blocking. Raises `InvalidUsageError` for a reduction that does not exist, `KernelCompileError`.
        """
        if reduction not in self._kernels:
            image = compile_kernel(KERNELS / "exchange.cu", self._compute_capability, options_for(reduction))
            self._modules.append(Module(image))
            self._kernels[reduction] = self._modules[-1].kernel("mpicomm_exchange", (ExchangeArguments,))
        return self._kernels[reduction]

    def unload(self) -> None:
        """Unload all; none of them may be running. A second call does nothing."""
        self._kernels.clear()
        while self._modules:
            self._modules.pop().unload()
