"""All GPUs of this process: attributes, a ring, and bandwidth and latency between each two, without MPI."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from mpicomm.devices.base import DeviceInfo
from mpicomm.p2p.attributes import attribute_matrices
from mpicomm.p2p.matrix import Cell, Matrix, fill
from mpicomm.p2p.pairs import (
    COPY_ENGINES,
    LOADS,
    STORES,
    CopyWay,
    End,
    ThroughHost,
    Transfer,
    load_us,
    peer_access,
    store_us,
)
from mpicomm.p2p.report import RingResult

_SMALL_NBYTES = 16
_SMALL_COPIES = 100
WITH, WITHOUT = "peer access", "through host memory"


@dataclass(frozen=True)
class CopyRounds:
    """The effort of a measurement: copies of ``nbytes``, ``copies`` in each of the timed rounds."""

    nbytes: int
    copies: int
    rounds: int


class OneProcess:
    """Measures all pairs of GPUs. ``wrong`` counts the wrong bytes so far."""

    def __init__(self, devices: Sequence[DeviceInfo], options: argparse.Namespace) -> None:
        self._effort = CopyRounds(options.bytes, options.iters, options.rounds)
        self._ends = [End(device, options.bytes) for device in devices]
        self._host = ThroughHost()
        self._through_host = CopyWay("kernels", False, self._host.copy)
        self.attributes = attribute_matrices(len(devices))
        self.wrong = 0

    def rings(self) -> Iterator[RingResult]:
        """Let every GPU write its data into the next GPU's memory, in each way, and check each byte."""
        ends = self._ends
        neighbours = list(zip(ends, [*ends[1:], ends[0]], strict=True))
        missing = [(a.ordinal, b.ordinal) for a, b in neighbours if not self._reachable(a.ordinal, b.ordinal)]
        for access, ways in ((WITH, (COPY_ENGINES, STORES, LOADS)), (WITHOUT, (COPY_ENGINES, self._through_host))):
            if access == WITH and missing:
                yield RingResult(", ".join(f"GPU {a} has no peer access to GPU {b}" for a, b in missing))
                continue
            with peer_access(neighbours) if access == WITH else nullcontext():
                for way in ways:
                    # The slots in host memory hold two transfers at once, so these transfers go one after the other.
                    together = way is not self._through_host
                    transfers = [Transfer(a, b, self._effort.nbytes) for a, b in neighbours]
                    groups = [transfers] if together else [[transfer] for transfer in transfers]
                    wrong, elapsed_us = 0, 0.0
                    for group in groups:
                        time_us, new = self._measure(way, group, copies=1)
                        wrong, elapsed_us = wrong + new, elapsed_us + time_us
                    gb_s = self._effort.nbytes / elapsed_us * 1e-3 * (1 if together else len(transfers))
                    yield RingResult(f"{way.name}, {access}", gb_s, wrong)

    def matrices(self) -> Iterator[Matrix]:
        """Measure bandwidths, then latencies."""
        for title, directions in (("Bandwidth, one way", 1), ("Bandwidth, both ways", 2)):
            for way in (COPY_ENGINES, STORES, LOADS):
                yield self._matrix(f"{title}, {way.name}, {WITH}", "GB/s", self._bandwidth(way, directions))
            for way in (COPY_ENGINES, self._through_host):
                name = f"{title}, {way.name}, {WITHOUT}"
                yield self._matrix(name, "GB/s", self._bandwidth(way, directions, copies=1), access=False)
        for access in (True, False):
            memory, words = (WITH, None) if access else (WITHOUT, self._host)
            yield self._matrix(f"Latency, copy engines, {memory}", "us", self._copy_us, access=access)
            yield self._matrix(f"Latency, a kernel's store, {memory}", "us", partial(store_us, words), access=access)
        yield self._matrix(f"Latency, a kernel's load, {WITH}", "us", load_us)

    def _matrix(self, title: str, unit: str, measure: Callable[[End, End], Cell], *, access: bool = True) -> Matrix:
        def cell(source: int, target: int) -> Cell:
            if access and not self._reachable(source, target):
                return None
            pair = self._ends[source], self._ends[target]
            with peer_access([pair]) if access else nullcontext():
                return measure(*pair)

        return fill(title, unit, len(self._ends), cell)

    def _reachable(self, own: int, peer: int) -> bool:
        access = self.attributes[0].cells
        return own == peer or bool(access[own][peer] and access[peer][own])

    def _bandwidth(self, way: CopyWay, directions: int, copies: int | None = None) -> Callable[[End, End], float]:
        count, nbytes = copies or self._effort.copies, self._effort.nbytes

        def measure(source: End, target: End) -> float:
            transfers = [Transfer(source, target, nbytes, 0), Transfer(target, source, nbytes, 1)][:directions]
            time_us, _ = self._measure(way, transfers, count)
            return directions * count * nbytes / time_us * 1e-3

        return measure

    def _copy_us(self, source: End, target: End) -> float:
        transfer = Transfer(source, target, min(_SMALL_NBYTES, self._effort.nbytes))
        return self._measure(COPY_ENGINES, [transfer], _SMALL_COPIES)[0] / _SMALL_COPIES

    def _measure(self, way: CopyWay, transfers: Sequence[Transfer], copies: int) -> tuple[float, int]:
        """Return the median time of a round in microseconds, and the number of wrong bytes after it."""
        for transfer in transfers:
            transfer.target.poison()
        way.time_us(transfers, 1)  # warms up
        time_us = statistics.median(way.time_us(transfers, copies) for _ in range(self._effort.rounds))
        wrong = sum(transfer.target.count_wrong(transfer.source, transfer.nbytes) for transfer in transfers)
        self.wrong += wrong
        return time_us, wrong
