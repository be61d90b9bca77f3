"""All GPUs of this process in pairs: links, and bandwidth and latency between each two, without MPI."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicomm.bench.content import Content
from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.links import link_to
from mpicomm.errors import HandleError
from mpicomm.p2p.gpu import Gpu
from mpicomm.p2p.report import COPY_ENGINES, LOADS, POISON, STORES, Pairs, Transfer

_THROUGH_HOST = "copy engines through host memory"


class _End(Gpu):
    """A GPU with data that it sends, a window that others write, and a word that is 0."""

    def __init__(self, info: DeviceInfo, nbytes: int, size: int) -> None:
        super().__init__(info)
        with self.current():
            try:
                self.data, self.window = cupy.empty(nbytes, np.uint8), cupy.empty(nbytes, np.uint8)
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise HandleError(
                    f"GPU {info.ordinal} has no room for twice {nbytes} bytes: pass a smaller -b"
                ) from error
            self.zero = cupy.zeros(1, np.uint64)
            self.content = Content(cupy, np.dtype(np.uint8), "sum", size, nbytes, reduces=False)
            self.content.write(self.data, self.ordinal)
        self.synchronize()


class OneProcess(Pairs):
    """Measures all pairs of GPUs."""

    ways = {COPY_ENGINES: False, STORES: False, LOADS: True, _THROUGH_HOST: False}
    small_ways = (COPY_ENGINES, _THROUGH_HOST)

    def __init__(self, devices: Sequence[DeviceInfo], options: argparse.Namespace) -> None:
        super().__init__(len(devices), options, shows=True)
        self._ends = [_End(device, options.bytes, len(devices)) for device in devices]
        self.links = [[link_to(own, peer.uuid, "ipc", devices) for peer in devices] for own in devices]

    def move_us(self, way: str, transfers: Sequence[Transfer], nbytes: int, copies: int) -> float | None:
        if way != _THROUGH_HOST and not self._reachable(*transfers[0]):
            return None
        pairs = [(self._ends[source], self._ends[target]) for source, target in transfers]
        for _, target in pairs:
            with target.current():
                target.window.fill(POISON)
            target.synchronize()
        with ExitStack() as access:
            if way != _THROUGH_HOST:
                access.enter_context(_peer_access(*pairs[0]))
            self._round_us(way, pairs, nbytes, 1)  # warms up
            time_us = statistics.median(self._round_us(way, pairs, nbytes, copies) for _ in range(self.rounds))
        for source, target in pairs:
            with target.current():
                self.wrong += target.content.count_differing(target.window[:nbytes], source.ordinal)
        return time_us

    def load_us(self, source: int, target: int) -> float | None:
        if not self._reachable(source, target):
            return None
        with _peer_access(self._ends[source], self._ends[target]):
            return self._ends[target].load_us(self._ends[source].zero.data.ptr)

    def _reachable(self, one: int, other: int) -> bool:
        return bool(self.links[one][other].access and self.links[other][one].access)

    def _round_us(self, way: str, pairs: Sequence[tuple[_End, _End]], nbytes: int, copies: int) -> float:
        """Return the time from the common start of the pairs to the end of the last one."""
        lead = pairs[0][self.ways[way]]

        def enqueue() -> None:
            for source, target in pairs:
                worker = target if self.ways[way] else source
                if worker is not lead:
                    worker.stream.wait_event(lead.start)
                to, from_ = target.window.data.ptr, source.data.data.ptr
                with worker.current():
                    for _ in range(copies):
                        if way in (STORES, LOADS):
                            worker.copy(to, from_, nbytes)
                        else:  # without peer access the driver carries the bytes through host memory
                            runtime.memcpyPeerAsync(
                                to, target.ordinal, from_, source.ordinal, nbytes, worker.stream.ptr
                            )
            for pair in pairs:
                worker = pair[self.ways[way]]
                if worker is not lead:
                    with worker.current():
                        lead.stream.wait_event(worker.stream.record(cupy.cuda.Event(disable_timing=True)))

        return lead.time_us(enqueue)


@contextmanager
def _peer_access(one: Gpu, other: Gpu) -> Iterator[None]:
    """Let two GPUs access each other's memory inside a ``with`` block. Raises `HandleError`."""
    both = [(one.ordinal, other.ordinal), (other.ordinal, one.ordinal)] if one is not other else []

    def disable(own: int, peer: int) -> None:
        with cupy.cuda.Device(own):
            cupy.cuda.Device().synchronize()
            runtime.deviceDisablePeerAccess(peer)

    with ExitStack() as enabled:
        for own, peer in both:
            try:
                with cupy.cuda.Device(own):
                    runtime.deviceEnablePeerAccess(peer)
            except runtime.CUDARuntimeError as error:
                raise HandleError(f"GPU {own} gets no access to memory of GPU {peer}: {error}") from None
            enabled.callback(disable, own, peer)
        yield
