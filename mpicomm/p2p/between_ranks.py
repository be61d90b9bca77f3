"""Bandwidth and latency between each two ranks, through the memory that they have opened for each other."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.content import Content
from mpicomm.cli import options as command_line
from mpicomm.p2p.report import (
    COPY_ENGINES,
    LOADS,
    NBYTES_ON_GPUS,
    NBYTES_ON_HOST,
    POISON,
    STORES,
    Pairs,
    Transfer,
    ending,
    link_matrices,
    parser,
    record,
    report,
)


class BetweenRanks(Pairs):
    """Measures all pairs of ranks. All public methods are collective."""

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        super().__init__(comm.size, options, shows=comm.rank == 0)
        self._comm = comm
        self._data, self._window = comm.empty(options.bytes, np.uint8), comm.empty(options.bytes, np.uint8)
        self._zero = comm.zeros(1, np.uint64)
        self._gpu: Any = None
        xp: Any = np
        if comm.device == "cpu":
            self.ways = {"copies to the target": False, "copies from the source": True}
            self.small_ways = tuple(self.ways)
        else:
            import cupy

            from mpicomm.devices.cuda.driver import visible_devices
            from mpicomm.p2p.gpu import Gpu

            self.ways = {COPY_ENGINES: False, STORES: False, LOADS: True}
            self.small_ways = (COPY_ENGINES,)
            self._gpu = Gpu(visible_devices()[int(comm.device)])
            xp = cupy
        self._content = Content(xp, np.dtype(np.uint8), "sum", comm.size, options.bytes, reduces=False)
        self._content.write(self._data.local, comm.rank)

    def move_us(self, way: str, transfers: Sequence[Transfer], nbytes: int, copies: int) -> float:
        rank, by_target = self._comm.rank, self.ways[way]
        source = next((source for source, target in transfers if target == rank), None)
        peer = next((pair[not by_target] for pair in transfers if pair[by_target] == rank), None)
        window = self._window.local[:nbytes]
        if source is not None:
            window[:] = POISON
        self._meet()
        times: list[float] = []
        if peer is not None:

            def meet() -> None:
                if len(transfers) == 2:  # the peer moves bytes, too
                    self._comm.sendrecv(None, peer, source=peer)

            self.round_us(way, peer, nbytes, 1, lambda: None)  # warms up
            times = [self.round_us(way, peer, nbytes, copies, meet) for _ in range(self.rounds)]
        self._meet()
        wrong = 0 if source is None else self._content.count_differing(window, source)
        results: list[tuple[list[float], int]] = self._comm.allgather((times, wrong))
        self.wrong += sum(of_rank[1] for of_rank in results)
        slowest: list[float] = [max(rounds) for rounds in zip(*(found for found, _ in results if found), strict=True)]
        return statistics.median(slowest)

    def round_us(self, way: str, peer: int, nbytes: int, copies: int, meet: Callable[[], object]) -> float:
        """Return the time of this rank's copies to or from a peer. They start when ``meet`` returns. Local."""
        to, from_ = self._window.peer(peer), self._data.local
        if self.ways[way]:
            to, from_ = self._window.local, self._data.peer(peer)
        to, from_ = to[:nbytes], from_[:nbytes]
        if self._gpu is None:
            meet()
            start = time.perf_counter()
            for _ in range(copies):
                np.copyto(to, from_)
            return (time.perf_counter() - start) * 1e6

        def enqueue() -> None:
            for _ in range(copies):
                if way == COPY_ENGINES:
                    self._window.put(from_, peer, stream=self._gpu.stream)
                else:
                    self._gpu.copy(to.data.ptr, from_.data.ptr, nbytes)

        measured: float = self._gpu.time_us(enqueue, meet)
        return measured

    def load_us(self, source: int, target: int) -> float | None:
        self._meet()
        found = self._gpu.load_us(self._zero.peer(source).data.ptr) if self._comm.rank == target else None
        told: float | None = self._comm.bcast(found, root=target)
        return told

    def _meet(self) -> None:
        """Wait for the work of all ranks."""
        self._comm.check()
        self._comm.barrier()


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser(), one_node="the matrices are of mapped memory and need all ranks on one node")
    options, comm = run.options, run.comm
    options.bytes = options.bytes or (NBYTES_ON_HOST if comm.device == "cpu" else NBYTES_ON_GPUS)
    job = BetweenRanks(comm, options)
    matrices = chain(link_matrices([info.links for info in run.ranks]), job.matrices())
    measured = report("rank", command_line.header("p2p", run.ranks, options.handle), matrices, shows=comm.rank == 0)
    command_line.save(options.json, {**run.setting(), **record(measured, job.wrong)})
    comm.Free()
    command_line.show(*ending(job.wrong))
    return int(job.wrong > 0)
