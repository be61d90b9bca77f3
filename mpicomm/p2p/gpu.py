"""The GPU of this rank: a stream for timed work, and the kernels of p2p.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpicomm.devices.base import DeviceInfo
from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import Variant, u32, u64

COPY_THREADS = 512
_BLOCKS = 4  # on each multiprocessor, so that it has as many threads as it holds
_GATE_NS = 500_000_000  # far longer than the host takes to enqueue the work
_LOADS = 1000


class Gate(ctypes.Structure):
    """The host's copy of ``Gate`` in p2p.cu."""

    _fields_ = [*u64("released", "limit_ns")]


class Copying(ctypes.Structure):
    """The host's copy of ``Copying`` in p2p.cu."""

    _fields_ = [*u64("target", "source", "nbytes")]


class PointerChase(ctypes.Structure):
    """The host's copy of ``PointerChase`` in p2p.cu."""

    _fields_ = [*u64("word", "result"), *u32("loads")]


GATE, COPY, POINTER_CHASE = (
    Variant(Path(__file__).with_name("p2p.cu"), f"mpicomm_p2p_{name}", options_for(None))
    for name in ("gate", "copy", "pointer_chase")
)


class Gpu:
    """The current GPU. All methods are local; `copy` is stream-ordered, the others block."""

    def __init__(self, info: DeviceInfo) -> None:
        import cupy  # not above, because tests compile the kernels without CuPy

        from mpicomm.devices.cuda.load import kernels_of

        self._cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        # All kernels are loaded before one can spin, because a load may wait for the whole device.
        self._gate, self._copy, self._pointer_chase = map(kernels_of(info).load, (GATE, COPY, POINTER_CHASE))
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self._blocks = _BLOCKS * cupy.cuda.Device().attributes["MultiProcessorCount"]
        # Pinned memory, which the GPU accesses at its address.
        self._released = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.uint32, 1)
        self._result = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.uint64, 2)

    def time_us(self, enqueue: Callable[[], object], meet: Callable[[], object]) -> float:
        """Return the time of the work that ``enqueue`` gives to `stream`.

        The work starts after all of it is enqueued and ``meet`` has returned.
        """
        self._released[0] = 0
        gate = Gate(self._released.ctypes.data, _GATE_NS)
        self._gate.launch_structure(self.stream.ptr, gate, blocks=1, threads=1)
        try:
            self._start.record(self.stream)
            enqueue()
            self._stop.record(self.stream)
            meet()
        finally:
            self._released[0] = 1
        self._stop.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(self._start, self._stop)
        return milliseconds * 1e3

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Let a kernel on `stream` copy between two addresses that this GPU can access."""
        copying = Copying(target, source, nbytes)
        self._copy.launch_structure(self.stream.ptr, copying, blocks=self._blocks, threads=COPY_THREADS)

    def load_us(self, word: int) -> float:
        """Return the time in which a kernel of this GPU loads a word of 64 bits. The word is 0."""
        chase = PointerChase(word, self._result.ctypes.data, _LOADS)
        self._pointer_chase.launch_structure(self.stream.ptr, chase, blocks=1, threads=1)
        self.stream.synchronize()
        elapsed_ns, loads = map(int, self._result)
        return elapsed_ns / loads / 1e3
