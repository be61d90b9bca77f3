"""A GPU of this process: a stream for timed work, and the kernels of p2p.cu."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np

from mpicomm.cli.pattern import Pattern
from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.load import kernels_of
from mpicomm.p2p.kernels import (
    COPY,
    COPY_THREADS,
    GATE,
    PING_PONG,
    POINTER_CHASE,
    Copying,
    Gate,
    PingPong,
    PointerChase,
)

_GATE_NS = 500_000_000  # far longer than the host takes to enqueue the work
_BLOCKS = 4  # on each multiprocessor, so that it has as many threads as it holds
_ROUNDS = 1000
_LOADS = 1000
_BUDGET_NS = 100_000_000  # ranks that share a GPU take turns, some milliseconds each
_LIMIT_NS = 5_000_000_000


class Gpu:
    """A GPU. All methods are local. Methods with ``stream`` are stream-ordered, others block."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._context = PrimaryContext(info)  # as long as the process
        with self.current():
            self.stream = self.new_stream()
            # All kernels are loaded before one can spin, because a load may wait for the whole device.
            kernels = kernels_of(info)
            self._gate, self._copy, self._ping_pong, self._pointer_chase = map(
                kernels.load, (GATE, COPY, PING_PONG, POINTER_CHASE)
            )
            self.start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
            self.pattern = Pattern(cupy)
            self._blocks = _BLOCKS * cupy.cuda.Device().attributes["MultiProcessorCount"]
        self._released = pinned(1, np.uint32)
        self._result = pinned(2, np.uint64)

    def current(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which this GPU is the current GPU."""
        return self._context.current()

    def new_stream(self) -> Any:
        """Return a CuPy stream of this GPU that waits for no other stream."""
        with self.current():
            return cupy.cuda.Stream(non_blocking=True)

    def synchronize(self) -> None:
        """Wait for all work of the GPU."""
        with self.current():
            cupy.cuda.Device().synchronize()

    def time_us(self, enqueue: Callable[[], object], meet: Callable[[], object] = lambda: None) -> float:
        """Return the time of the work that ``enqueue`` gives to `stream`.

        The work starts after all of it is enqueued and ``meet`` has returned. `start` is recorded before ``enqueue``.
        """
        with self.current():
            self._released[0] = 0
            self._gate.launch_structure(
                self.stream.ptr, Gate(self._released.ctypes.data, _GATE_NS), blocks=1, threads=1
            )
            try:
                self.start.record(self.stream)
                enqueue()
                self._stop.record(self.stream)
                meet()
            finally:
                self._released[0] = 1
            self._stop.synchronize()
            milliseconds: float = cupy.cuda.get_elapsed_time(self.start, self._stop)
        return milliseconds * 1e3

    def copy(self, stream: Any, target: int, source: int, nbytes: int) -> None:
        """Let a kernel of this GPU copy between two addresses that it can access."""
        with self.current():
            self._copy.launch_structure(
                stream.ptr, Copying(target, source, nbytes), blocks=self._blocks, threads=COPY_THREADS
            )

    def serve(self, stream: Any, mine: int, theirs: int) -> None:
        """Start the ping-pong of words with a kernel that `answer` launches, before or after; see `ping_pong_us`."""
        self._result[:] = 0
        self._play(stream, PingPong(mine, theirs, self._result.ctypes.data, _BUDGET_NS, _LIMIT_NS, _ROUNDS, 1))

    def answer(self, stream: Any, mine: int, theirs: int) -> None:
        """Answer the ping-pong of a kernel that `serve` launches."""
        self._play(stream, PingPong(mine, theirs, 0, _BUDGET_NS, _LIMIT_NS, _ROUNDS, 0))

    def ping_pong_us(self) -> float | None:
        """Return the time from a store of a word until the other side sees it. The stream of `serve` must be done.

        Return None if the two kernels did not run at the same time.
        """
        elapsed_ns, rounds = map(int, self._result)
        return elapsed_ns / rounds / 2e3 if rounds else None

    def load_us(self, word: int) -> float:
        """Return the time in which this GPU loads a word. The word is 0."""
        with self.current():
            self._pointer_chase.launch_structure(
                self.stream.ptr, PointerChase(word, self._result.ctypes.data, _LOADS), blocks=1, threads=1
            )
            self.stream.synchronize()
        elapsed_ns, loads = map(int, self._result)
        return elapsed_ns / loads / 1e3

    def _play(self, stream: Any, ping_pong: PingPong) -> None:
        with self.current():
            self._ping_pong.launch_structure(stream.ptr, ping_pong, blocks=1, threads=1)


def pinned(count: int, dtype: Any) -> Any:
    """Return a NumPy array of host memory that all GPUs of the process access at its address."""
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count)
