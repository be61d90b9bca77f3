"""The kernel of p2p.cu, which copies bytes between any two addresses that a GPU can access."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from mpicomm.devices.base import DeviceInfo
from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import Variant, u64

COPY_THREADS = 512
_BLOCKS = 4  # on each multiprocessor, so that it has as many threads as it holds
COPY = Variant(Path(__file__).with_name("p2p.cu"), "mpicomm_p2p_copy", options_for(None))


class Copying(ctypes.Structure):
    """The host's copy of ``Copying`` in p2p.cu."""

    _fields_ = [*u64("target", "source", "nbytes")]


def copier(info: DeviceInfo, stream: int) -> Callable[[int, int, int], None]:
    """Return the kernel, for the current GPU: it takes a target, a source and a number of bytes. Stream-ordered."""
    import cupy  # not above, because tests compile the kernel without CuPy

    from mpicomm.devices.cuda.load import kernels_of

    kernel = kernels_of(info).load(COPY)
    blocks = _BLOCKS * cupy.cuda.Device().attributes["MultiProcessorCount"]

    def copy(target: int, source: int, nbytes: int) -> None:
        kernel.launch_structure(stream, Copying(target, source, nbytes), blocks=blocks, threads=COPY_THREADS)

    return copy
