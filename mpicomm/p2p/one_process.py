"""All GPUs of this process in pairs: links, and bandwidth and latency between each two, without MPI."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.links import link_to
from mpicomm.errors import HandleError
from mpicomm.kernels.team import LINE_NBYTES
from mpicomm.p2p.gpu import Gpu
from mpicomm.p2p.report import Cell, Matrix, fill

_POISON = 0xA5
_WORDS = LINE_NBYTES // 4  # from one line to the next, because words of two kernels must not share a line


class End:
    """A GPU with data that it sends, a window that others write, words for latencies, and streams."""

    def __init__(self, info: DeviceInfo, nbytes: int) -> None:
        self.gpu = Gpu(info)
        self.ordinal = info.ordinal
        with self.gpu.current():
            try:
                self.data, self.window = cupy.empty(nbytes, np.uint8), cupy.empty(nbytes, np.uint8)
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise HandleError(
                    f"GPU {info.ordinal} has no room for twice {nbytes} bytes: pass a smaller -b"
                ) from error
            self._words = cupy.zeros(3 * _WORDS, np.uint32)
            self.gpu.pattern.write(self.data, self.ordinal, 0)
        self.zero = self._words[2 * _WORDS :].data.ptr
        self.streams = [self.gpu.stream, self.gpu.new_stream()]  # for transfers number 0 and 1
        self.gpu.synchronize()

    def poison(self) -> None:
        """Make all bytes of the window wrong."""
        with self.gpu.current():
            self.window.fill(_POISON)
        self.gpu.synchronize()

    def count_wrong(self, source: End, nbytes: int) -> int:
        """Return how many of the first bytes of the window differ from the data of ``source``."""
        with self.gpu.current():
            return self.gpu.pattern.count_wrong(self.window[:nbytes], source.ordinal, 0)

    def cleared_word(self, line: int) -> int:
        """Set both words of this GPU to 0, and return the address of the word number ``line``, 0 or 1."""
        with self.gpu.current():
            self._words[: 2 * _WORDS] = 0
        self.gpu.synchronize()
        pointer: int = self._words[line * _WORDS :].data.ptr
        return pointer


@dataclass(frozen=True)
class Transfer:
    """The first ``nbytes`` of the data of ``source``, on their way into the window of ``target``."""

    source: End
    target: End
    nbytes: int
    number: int = 0
    """0 or 1. Two transfers at once that the same GPU carries out have different numbers."""


@dataclass(frozen=True)
class CopyWay:
    """A way of bytes from one GPU to another."""

    name: str
    by_target: bool
    """Whether the target's GPU does the work, which means that it loads. Otherwise the source's GPU does."""
    copy: Callable[[Transfer, Any], None]
    """Enqueues the transfer on a stream of the GPU that does the work."""

    def worker(self, transfer: Transfer) -> End:
        """Return the end with the GPU that does the work."""
        return transfer.target if self.by_target else transfer.source

    def time_us(self, transfers: Sequence[Transfer], count: int) -> float:
        """Return the time in which all transfers are carried out ``count`` times, side by side."""
        lead = self.worker(transfers[0]).gpu

        def enqueue() -> None:
            for transfer in transfers:
                worker = self.worker(transfer)
                stream = worker.streams[transfer.number]
                if stream is not lead.stream:
                    stream.wait_event(lead.start)
                with worker.gpu.current():
                    for _ in range(count):
                        self.copy(transfer, stream)
            for transfer in transfers:
                worker = self.worker(transfer)
                stream = worker.streams[transfer.number]
                if stream is not lead.stream:
                    lead.stream.wait_event(_mark(worker, stream))

        return lead.time_us(enqueue)


def copy_engine(transfer: Transfer, stream: Any) -> None:
    """Enqueue a copy. Without peer access the driver carries it through host memory."""
    source, target = transfer.source, transfer.target
    runtime.memcpyPeerAsync(
        target.window.data.ptr, target.ordinal, source.data.data.ptr, source.ordinal, transfer.nbytes, stream.ptr
    )


def store_or_load(transfer: Transfer, stream: Any, *, loads: bool) -> None:
    """Enqueue a kernel of the source, which stores, or of the target, which loads."""
    worker = transfer.target if loads else transfer.source
    worker.gpu.copy(stream, transfer.target.window.data.ptr, transfer.source.data.data.ptr, transfer.nbytes)


COPY_ENGINES = CopyWay("copy engines", False, copy_engine)
STORES = CopyWay("kernels that store", False, lambda transfer, stream: store_or_load(transfer, stream, loads=False))
LOADS = CopyWay("kernels that load", True, lambda transfer, stream: store_or_load(transfer, stream, loads=True))


def store_us(source: End, target: End) -> float | None:
    """Return the time from a store of a word by a kernel of the source until a kernel of the target sees it.

    A word lies on the GPU with the kernel that polls it. Return None if the kernels did not meet.
    """
    mine, theirs = source.cleared_word(0), target.cleared_word(1)
    target.gpu.answer(target.streams[1], theirs, mine)
    source.gpu.serve(source.streams[0], mine, theirs)
    for end in (source, target):
        end.gpu.synchronize()
    return source.gpu.ping_pong_us()


def load_us(source: End, target: End) -> float:
    """Return the time in which a kernel of the target loads a word of the source."""
    return target.gpu.load_us(source.zero)


@contextmanager
def peer_access(one: End, other: End) -> Iterator[None]:
    """Let two GPUs access each other's memory inside a ``with`` block. Raises `HandleError`."""
    both = [(one.ordinal, other.ordinal), (other.ordinal, one.ordinal)] if one is not other else []
    with ExitStack() as enabled:
        for own, peer in both:
            try:
                with cupy.cuda.Device(own):
                    runtime.deviceEnablePeerAccess(peer)
            except runtime.CUDARuntimeError as error:
                raise HandleError(f"GPU {own} gets no access to memory of GPU {peer}: {error}") from None
            enabled.callback(_disable, own, peer)
        yield


def _disable(own: int, peer: int) -> None:
    with cupy.cuda.Device(own):
        cupy.cuda.Device().synchronize()
        runtime.deviceDisablePeerAccess(peer)


def _mark(end: End, stream: Any) -> Any:
    """Return an event after the work that a stream of this end has got so far."""
    with end.gpu.current():
        return stream.record(cupy.cuda.Event(disable_timing=True))


_SMALL_NBYTES = 16
_SMALL_COPIES = 100
WITH, WITHOUT = "peer access", "through host memory"


class OneProcess:
    """Measures all pairs of GPUs. ``wrong`` counts the wrong bytes so far."""

    def __init__(self, devices: Sequence[DeviceInfo], options: argparse.Namespace) -> None:
        self._nbytes: int = options.bytes
        self._copies: int = options.iters
        self._rounds: int = options.rounds
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
        count, nbytes = self._copies, self._nbytes

        def measure(source: End, target: End) -> float:
            transfers = [Transfer(source, target, nbytes, 0), Transfer(target, source, nbytes, 1)][:directions]
            time_us = self._measure(way, transfers, count)
            return directions * count * nbytes / time_us * 1e-3

        return measure

    def _copy_us(self, source: End, target: End) -> float:
        transfer = Transfer(source, target, min(_SMALL_NBYTES, self._nbytes))
        return self._measure(COPY_ENGINES, [transfer], _SMALL_COPIES) / _SMALL_COPIES

    def _measure(self, way: CopyWay, transfers: Sequence[Transfer], copies: int) -> float:
        """Return the median time of a round in microseconds, and count the wrong bytes after it."""
        for transfer in transfers:
            transfer.target.poison()
        way.time_us(transfers, 1)  # warms up
        time_us = statistics.median(way.time_us(transfers, copies) for _ in range(self._rounds))
        self.wrong += sum(transfer.target.count_wrong(transfer.source, transfer.nbytes) for transfer in transfers)
        return time_us
