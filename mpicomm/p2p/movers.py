"""Movers: each reads and writes memory of a peer, and times this, on the host or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.cli.pattern import Pattern
from mpicomm.kernels.team import LINE_NBYTES
from mpicomm.symmetric.array import SymmetricArray

Meet = Callable[[], object]
_ROUNDS = 1000
_WORDS = LINE_NBYTES // 8  # from one line to the next

PUT, GET = "put", "get"
"""A put moves this rank's data into the window of a peer. A get moves data of a peer into this rank's window."""


class Memory:
    """The memory of each rank: data, a window that peers write, and words for latencies. Creation is collective."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.data, self.window = comm.empty(nbytes, np.uint8), comm.empty(nbytes, np.uint8)
        self.words = comm.zeros(3 * _WORDS, np.uint64)


class HostMover:
    """Ranks on the host: NumPy copies through shared memory."""

    ways = {"copies to the target": PUT, "copies from the source": GET}
    """Names of ways, each with `PUT` or `GET`."""
    small_ways = tuple(ways)
    """The ways for which small moves are timed."""
    latency = "signal"
    """The name of the way of single words."""

    def __init__(self, comm: Communicator, memory: Memory) -> None:
        self.pattern = Pattern(np)
        self._rank = comm.rank
        self._memory = memory

    def time_us(self, way: str, peer: int, nbytes: int, count: int, meet: Meet) -> float:
        """Return the time of ``count`` moves, one after the other. They start when ``meet`` returns. Local."""
        target, source = _ends(self._memory, peer, self.ways[way])
        meet()
        start = time.perf_counter()
        for _ in range(count):
            np.copyto(target[:nbytes], source[:nbytes])
        return (time.perf_counter() - start) * 1e6

    def word_us(self, source: int, target: int, meet: Meet) -> float | None:
        """Return, on ``source``, the time of a word to ``target``: half of the time of a signal and a signal back.

        Both ranks call it. ``meet`` is their barrier.
        """
        words: SymmetricArray = self._memory.words
        own = source == target
        meet()
        start = time.perf_counter()
        for _ in range(_ROUNDS):
            if self._rank == source:
                words.signal(target)
                words.wait_signal(target)
            else:
                words.wait_signal(source)
                words.signal(source)
        return (time.perf_counter() - start) / _ROUNDS * 1e6 / (1 if own else 2)


class GpuMover:
    """A `HostMover` for ranks on GPUs: copy engines, and kernels that store into memory of a peer or load from it."""

    ways = {"copy engines": PUT, "kernels that store": PUT, "kernels that load": GET}
    small_ways = ("copy engines",)
    latency = "a kernel's store"

    def __init__(self, comm: Communicator, memory: Memory) -> None:
        from mpicomm.devices.cuda.driver import visible_devices
        from mpicomm.p2p.gpu import Gpu

        self._gpu = Gpu(visible_devices()[int(comm.device)])
        self._answering = self._gpu.new_stream()
        self.pattern = self._gpu.pattern
        self._rank = comm.rank
        self._memory = memory

    def time_us(self, way: str, peer: int, nbytes: int, count: int, meet: Meet) -> float:
        memory, gpu = self._memory, self._gpu
        stream = gpu.stream
        step: Callable[[], object]
        if way == "copy engines":
            part = memory.data.local[:nbytes]

            def step() -> None:
                memory.window.put(part, peer, stream=stream)
        else:
            target, source = _ends(memory, peer, self.ways[way])

            def step() -> None:
                gpu.copy(stream, target.data.ptr, source.data.ptr, nbytes)

        return gpu.time_us(lambda: [step() for _ in range(count)], meet)

    def word_us(self, source: int, target: int, meet: Meet) -> float | None:
        """As `HostMover.word_us`: a word of each rank, which a kernel of the other rank stores."""
        words, gpu = self._memory.words, self._gpu
        words.local[:] = 0
        gpu.synchronize()
        meet()
        mine, theirs = words.peer(source).data.ptr, words.peer(target)[_WORDS:].data.ptr
        if self._rank == target:
            gpu.answer(self._answering, theirs, mine)
        if self._rank == source:
            gpu.serve(gpu.stream, mine, theirs)
        gpu.synchronize()
        return gpu.rally_us() if self._rank == source else None

    def load_us(self, peer: int) -> float:
        """Return the time in which a kernel loads a word of a peer. Local."""
        return self._gpu.load_us(self._memory.words.peer(peer)[2 * _WORDS :].data.ptr)


def mover_of(comm: Communicator, memory: Memory) -> HostMover | GpuMover:
    """Return the mover of this rank."""
    return HostMover(comm, memory) if comm.device == "cpu" else GpuMover(comm, memory)


def _ends(memory: Memory, peer: int, direction: str) -> tuple[Any, Any]:
    """Return the arrays to which and from which this rank moves bytes."""
    if direction == PUT:
        return memory.window.peer(peer), memory.data.local
    return memory.window.local, memory.data.peer(peer)
