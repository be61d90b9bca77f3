"""Bandwidth and latency between each two ranks, through the memory that they have opened for each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

from mpicomm.api.communicator import Communicator
from mpicomm.cli import options as command_line
from mpicomm.cli.report import header, setting
from mpicomm.p2p.matrix import Cell, Matrix, fill, link_matrices
from mpicomm.p2p.movers import GET, PUT, GpuMover, Memory, mover_of
from mpicomm.p2p.options import NBYTES_ON_GPUS, NBYTES_ON_HOST, parser
from mpicomm.p2p.report import NOTES, Report

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
