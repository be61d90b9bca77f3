"""Bandwidth and latency between each two ranks, through the memory that they have opened for each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.cli import options as command_line
from mpicomm.cli.options import header, setting
from mpicomm.cli.pattern import Pattern
from mpicomm.kernels.team import LINE_NBYTES
from mpicomm.p2p.report import NBYTES_ON_GPUS, NBYTES_ON_HOST, NOTES, Cell, Matrix, Report, fill, link_matrices, parser
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
        return gpu.ping_pong_us() if self._rank == source else None

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


_POISON = 0xA5
_SMALL_NBYTES = 16
_SMALL_COPIES = 100


class BetweenRanks:
    """Measures all pairs of ranks, pair by pair. All methods are collective. ``wrong`` counts wrong bytes so far."""

    def __init__(self, comm: Communicator, nbytes: int, copies: int, rounds: int) -> None:
        self._comm = comm
        self._nbytes = nbytes
        self._copies = copies
        self._rounds = rounds
        self._memory = Memory(comm, nbytes)
        self._mover = mover_of(comm, self._memory)
        self._mover.pattern.write(self._memory.data.local, comm.rank, 0)
        self.wrong = 0
        self._meet()

    def matrices(self) -> Iterator[Matrix]:
        """Measure bandwidths, then latencies."""
        mover, size = self._mover, self._comm.size
        for title, both in (("Bandwidth, one way", False), ("Bandwidth, both ways", True)):
            for way in mover.ways:
                yield fill(f"{title}, {way}", "GB/s", size, partial(self._bandwidth, way, both=both))
        for way in mover.small_ways:
            yield fill(f"Latency, {way} of {_SMALL_NBYTES} bytes", "us", size, partial(self._small_us, way))
        yield fill(f"Latency, {mover.latency}", "us", size, self._word_us)
        if isinstance(mover, GpuMover):
            yield fill("Latency, a kernel's load", "us", size, self._load_us)

    def _bandwidth(self, way: str, source: int, target: int, *, both: bool) -> Cell:
        if both and source == target:
            return None  # one rank cannot do both at once
        direction = self._mover.ways[way]
        moves = _moves(direction, source, target)
        if both:
            moves |= _moves(direction, target, source)
        time_us = self._time_us(way, moves, self._nbytes, self._copies)
        return len(moves) * self._copies * self._nbytes / time_us * 1e-3

    def _small_us(self, way: str, source: int, target: int) -> Cell:
        moves = _moves(self._mover.ways[way], source, target)
        return self._time_us(way, moves, _SMALL_NBYTES, _SMALL_COPIES) / _SMALL_COPIES

    def _time_us(self, way: str, moves: dict[int, int], nbytes: int, copies: int) -> float:
        """Return the median of the slowest rank's times. ``moves`` has the ranks that move bytes, and their peers."""
        nbytes = min(nbytes, self._nbytes)
        rank, memory, mover = self._comm.rank, self._memory, self._mover
        sources = moves if mover.ways[way] == GET else {peer: own for own, peer in moves.items()}
        if rank in sources:
            memory.window.local[:nbytes] = _POISON
        self._meet()
        times: list[float] = []
        if rank in moves:
            peer = moves[rank]
            mover.time_us(way, peer, nbytes, 1, lambda: None)  # warms up
            times = [
                mover.time_us(way, peer, nbytes, copies, lambda: self._meet_peer(moves, peer))
                for _ in range(self._rounds)
            ]
        self._meet()
        wrong = mover.pattern.count_wrong(memory.window.local[:nbytes], sources[rank], 0) if rank in sources else 0
        results: list[tuple[list[float], int]] = self._comm.allgather((times, wrong))
        self.wrong += sum(of_rank[1] for of_rank in results)
        slowest: list[float] = [max(of_round) for of_round in zip(*(results[own][0] for own in moves), strict=True)]
        return statistics.median(slowest)

    def _word_us(self, source: int, target: int) -> Cell:
        self._meet()
        found: Cell = None
        if self._comm.rank in (source, target):
            pair = {source: target, target: source}
            found = self._mover.word_us(source, target, lambda: self._meet_peer(pair, pair[self._comm.rank]))
        told: Cell = self._comm.bcast(found, root=source)
        return told

    def _load_us(self, source: int, target: int) -> Cell:
        self._meet()
        assert isinstance(self._mover, GpuMover)
        found = self._mover.load_us(source) if self._comm.rank == target else None
        told: Cell = self._comm.bcast(found, root=target)
        return told

    def _meet_peer(self, moves: dict[int, int], peer: int) -> None:
        if peer != self._comm.rank and peer in moves:
            self._comm.sendrecv(None, peer, source=peer)

    def _meet(self) -> None:
        """Wait for the work of all ranks."""
        self._comm.check()
        self._comm.barrier()


def _moves(direction: str, source: int, target: int) -> dict[int, int]:
    return {source: target} if direction == PUT else {target: source}


def main() -> int:
    """Run the command line on this rank. Collective."""
    options = command_line.parse_args(parser())
    comm = command_line.open_communicator(options.device, options.handle)
    command_line.require_one_node(comm, "the matrices are of mapped memory and need all ranks on one node")
    options.bytes = options.bytes or (NBYTES_ON_HOST if comm.device == "cpu" else NBYTES_ON_GPUS)
    report = Report("rank", shows=comm.rank == 0)
    ranks = comm.allgather(comm.describe())
    report.say(*header("p2p", ranks, options.handle))
    for matrix in link_matrices([info.links for info in ranks]):
        report.add(matrix)
    job = BetweenRanks(comm, options.bytes, options.iters, options.rounds)
    for matrix in job.matrices():
        report.add(matrix)
    command_line.save(options.json, {**setting(ranks, options), **report.record(job.wrong)})
    comm.Free()
    report.say(*NOTES, "OK" if job.wrong == 0 else f"FAILED: {job.wrong} wrong bytes")
    return int(job.wrong > 0)
