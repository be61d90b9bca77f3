"""All GPUs of this process: links, and bandwidth and latency between each two, without MPI."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.links import link_to
from mpicomm.p2p.matrix import Cell, Matrix, fill
from mpicomm.p2p.pairs import (
    COPY_ENGINES,
    LOADS,
    STORES,
    CopyWay,
    End,
    Transfer,
    load_us,
    peer_access,
    store_us,
)

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
        self.links = [[link_to(own, peer.uuid, "ipc", devices) for peer in devices] for own in devices]
        self.wrong = 0

    def matrices(self) -> Iterator[Matrix]:
        """Measure bandwidths, then latencies."""
        for title, directions in (("Bandwidth, one way", 1), ("Bandwidth, both ways", 2)):
            for way in (COPY_ENGINES, STORES, LOADS):
                yield self._matrix(f"{title}, {way.name}, {WITH}", "GB/s", self._bandwidth(way, directions))
            measure = self._bandwidth(COPY_ENGINES, directions)
            yield self._matrix(f"{title}, {COPY_ENGINES.name}, {WITHOUT}", "GB/s", measure, access=False)
        for access, memory in ((True, WITH), (False, WITHOUT)):
            yield self._matrix(f"Latency, copy engines, {memory}", "us", self._copy_us, access=access)
        yield self._matrix(f"Latency, a kernel's store, {WITH}", "us", store_us)
        yield self._matrix(f"Latency, a kernel's load, {WITH}", "us", load_us)

    def _matrix(self, title: str, unit: str, measure: Callable[[End, End], Cell], *, access: bool = True) -> Matrix:
        def cell(source: int, target: int) -> Cell:
            if access and not self._reachable(source, target):
                return None
            pair = self._ends[source], self._ends[target]
            with peer_access(*pair) if access else nullcontext():
                return measure(*pair)

        return fill(title, unit, len(self._ends), cell)

    def _reachable(self, own: int, peer: int) -> bool:
        return bool(self.links[own][peer].access and self.links[peer][own].access)

    def _bandwidth(self, way: CopyWay, directions: int) -> Callable[[End, End], float]:
        count, nbytes = self._effort.copies, self._effort.nbytes

        def measure(source: End, target: End) -> float:
            transfers = [Transfer(source, target, nbytes, 0), Transfer(target, source, nbytes, 1)][:directions]
            time_us = self._measure(way, transfers, count)
            return directions * count * nbytes / time_us * 1e-3

        return measure

    def _copy_us(self, source: End, target: End) -> float:
        transfer = Transfer(source, target, min(_SMALL_NBYTES, self._effort.nbytes))
        return self._measure(COPY_ENGINES, [transfer], _SMALL_COPIES) / _SMALL_COPIES

    def _measure(self, way: CopyWay, transfers: Sequence[Transfer], copies: int) -> float:
        """Return the median time of a round in microseconds, and count the wrong bytes after it."""
        for transfer in transfers:
            transfer.target.poison()
        way.time_us(transfers, 1)  # warms up
        time_us = statistics.median(way.time_us(transfers, copies) for _ in range(self._effort.rounds))
        self.wrong += sum(transfer.target.count_wrong(transfer.source, transfer.nbytes) for transfer in transfers)
        return time_us
