"""The GPUs of this process in pairs: peer access between them, and the ways of bytes from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicomm.devices.base import DeviceInfo
from mpicomm.errors import HandleError
from mpicomm.kernels.team import LINE_NBYTES
from mpicomm.p2p.gpu import Gpu

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
    return source.gpu.rally_us()


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
