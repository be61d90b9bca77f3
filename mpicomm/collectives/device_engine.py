"""DeviceEngine: carries out exchanges between the GPUs of a node with one kernel each, in stream order."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from mpicomm.backend.base import Segment
from mpicomm.backend.cuda import CudaBackend
from mpicomm.backend.cuda_driver import DriverShutDownError
from mpicomm.bootstrap import Group
from mpicomm.collectives.exchange import Exchange, Reduction, Span
from mpicomm.collectives.signature import Signature
from mpicomm.errors import InvalidUsageError
from mpicomm.handle import Kind
from mpicomm.kernels.exchange import (
    LINE_NBYTES,
    MAX_RANKS,
    PACKET_NBYTES,
    SLOT_NBYTES,
    SLOTS,
    THREADS,
    ExchangeArguments,
    ExchangeKernels,
    Link,
)
from mpicomm.kernels.reductions import options_for
from mpicomm.shared_segments import share
from mpicomm.waiting import wait_until

MAX_CHANNELS = 64
"""Blocks of a kernel, at most: enough to keep the links of an H200 full, half of its multiprocessors."""
CHANNEL_NBYTES = 8 * 1024
"""What one block moves at least before a message is given another one."""
_STRIDE_NBYTES = 128  # parts of channels begin at whole cache lines of the message, hence at whole elements
_LATE_S = 1.0  # how long an error waits for what ranks call that are about to
_FEWEST_THREADS = 64  # the kernel needs two warps
_PLANS = 256  # that are kept


class Board(Protocol):
    """Where each rank of the node writes what it calls."""

    def post(self, text: str) -> None:
        """Write this rank's line."""

    def read(self) -> list[str]:
        """Return what each rank of the node has posted last."""

    def behind(self) -> list[int]:
        """Return the indices of the ranks that have posted less often than this one."""


@dataclass(frozen=True)
class _Layout:
    """Where things are in every rank's arena; a pure function of ranks and channels, so all have the same.

    The abort word, this rank's counts of chunks received from and sent to each rank, the credit of each rank, the flags
    of each rank, and the slots: each per channel.
    """

    size: int
    channels: int

    @property
    def credits(self) -> int:
        """The offset of the credits."""
        counts = 2 * self.size * self.channels * 4
        return LINE_NBYTES + -(-counts // LINE_NBYTES) * LINE_NBYTES

    @property
    def flags(self) -> int:
        """The offset of the flags."""
        return self.credits + self.size * self.channels * LINE_NBYTES

    @property
    def slots(self) -> int:
        """The offset of the slots."""
        return self.flags + self.size * self.channels * LINE_NBYTES

    @property
    def nbytes(self) -> int:
        """The size of an arena."""
        return self.slots + self.size * self.channels * SLOTS * SLOT_NBYTES


@dataclass(frozen=True)
class Launch:
    """One kernel."""

    arguments: ExchangeArguments
    reduction: tuple[str, str] | None
    blocks: int
    threads: int


@dataclass(frozen=True)
class Plan:
    """Kernels that are ready to be enqueued, and the call they carry out in words."""

    text: str
    launches: tuple[Launch, ...]


class DeviceEngine:
    """Collectives on GPU memory that need not be shared: everything goes through the ranks' arenas, chunk by chunk.

    Construction is collective over ``node`` and raises as ``share`` does. What was enqueued and could not be done is
    raised by the backend's `check`: `CollectiveTimeoutError` naming the rank that did not come, `PeerError` with what
    each rank called. The communicator is unusable then.

    How the ranks meet, and why they cannot wait for each other in a circle, is told at the top of kernels/exchange.cu.
    """

    def __init__(self, node: Group, backend: CudaBackend, kind: Kind, board: Board) -> None:
        if node.size > MAX_RANKS:
            raise InvalidUsageError(
                f"collectives on GPUs work between up to {MAX_RANKS} ranks of a node, this one has {node.size}"
            )
        self._node = node
        self._backend = backend
        self._board = board
        # All blocks of all ranks must run at once: as many as the smallest of the devices can hold.
        smallest = min(node.exchange("collectives: multiprocessors", lambda: backend.multiprocessors))
        layout = _Layout(node.size, min(MAX_CHANNELS, smallest))

        def allocate() -> Segment:
            self._order = backend.stream_order()
            segment = backend.allocate(kind, layout.nbytes)
            # Before the exchange that tells the peers of this memory: their first flags could be zeroed away.
            backend.zero(segment.pointer, layout.nbytes)
            return segment

        self._arenas = share(node, backend, "collectives", allocate, lambda: layout.nbytes)
        self._channels = layout.channels
        self._common = ExchangeArguments(
            timeout_ns=backend.timeout_ns,
            fault=backend.fault_pointer,
            credits=layout.credits,
            flags=layout.flags,
            slots=layout.slots,
            channels=layout.channels,
            size=node.size,
            rank=node.rank,
        )
        for index, rank in enumerate(node.ranks):
            self._common.arenas[index] = self._arenas[index].pointer
            self._common.names[index] = rank
        self._template = bytes(self._common)
        self._kernels = ExchangeKernels(backend.info.compute_capability)
        self._open = True
        self._plan = lru_cache(maxsize=_PLANS)(self.prepare)  # programs call the same again and again
        backend.calls = self._calls

    def run(self, exchanges: Sequence[Exchange], signature: Signature, stream: int) -> None:
        """Enqueue this rank's part of ``exchanges`` on ``stream``. Local, does not block; capturable in a graph.

        All ranks enqueue the same calls in the same order, with as many exchanges each. Runs on different streams, or
        on different streams of one capture, follow each other; when a captured graph runs, beside other work of the
        communicator, is for the caller to order (see `StreamOrder`). The board is told when a run is enqueued, not when
        a graph is replayed. Raises `InvalidUsageError` for a reduction that is not defined, before anything is
        enqueued; the first use of a reduction compiles its kernel, about a second once per machine.
        """
        self.enqueue(self._plan(tuple(exchanges), signature), stream)

    def prepare(self, exchanges: Sequence[Exchange], signature: Signature) -> Plan:
        """Return what `enqueue` needs to run these exchanges, as often as wanted. Local; raises as `run` does."""
        self._require_open(signature.operation)
        launches = [self._prepare(exchange, (signature.hash32, step)) for step, exchange in enumerate(exchanges)]
        wanted = tuple(launch for launch in launches if launch is not None)
        # Before any of them can run: loading may wait for the device, and a kernel that runs there for the peers.
        if any(self._kernels.find(launch.reduction) is None for launch in wanted):
            with self._backend.loading():
                for launch in wanted:
                    self._kernels.load(launch.reduction)
        return Plan(str(signature), wanted)

    def enqueue(self, plan: Plan, stream: int) -> None:
        """Enqueue a plan of this engine as `run` does; cheaper where the same is run again and again."""
        self._require_open(plan.text)
        self._board.post(plan.text)
        if plan.launches:
            with self._backend.current(), self._order.turn(stream):
                for launch in plan.launches:
                    kernel = self._kernels.load(launch.reduction)
                    kernel.launch_structure(stream, launch.arguments, blocks=launch.blocks, threads=launch.threads)

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local. This rank's work must be over; the engine cannot be used any more."""
        self._open = False
        self._backend.calls = None
        self._arenas.close_peers()

    def close_own(self) -> None:
        """Free this rank's arena, kernels and events; local, after every peer's `close_peers`."""
        with suppress(DriverShutDownError), self._backend.current():
            self._kernels.unload()
            self._order.close()
        self._arenas.close_own()

    def _require_open(self, what: str) -> None:
        if not self._open:
            raise InvalidUsageError(f"{what}: the communicator was freed; create another")

    def _calls(self) -> list[str]:
        # A rank whose first data arrived may not have looked yet at what the others call; most are only a little late.
        wait_until(lambda: not self._board.behind(), _LATE_S)
        return [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, self._board.read(), strict=True)]

    def _prepare(self, exchange: Exchange, call: tuple[int, int]) -> Launch | None:
        """Return what to launch, None where this rank has nothing to send, receive or reduce."""
        rank, itemsize = self._node.rank, exchange.dtype.itemsize
        sends, receives, reduction = list(exchange.sends), list(exchange.receives), exchange.reduction
        if reduction is not None and len(reduction.sources) == 1:
            # The result is what the one source sends, as it is.
            (source,) = reduction.sources
            receives[source] = reduction.output
            if source == rank:
                sends[rank] = reduction.own
            reduction = None
        if reduction is not None and reduction.output.count == 0:
            reduction = None
        if receives[rank] is None or receives[rank] == sends[rank]:
            sends[rank] = receives[rank] = None  # nothing to copy

        arguments = ExchangeArguments.from_buffer_copy(self._template)
        for peer in range(self._node.size):
            self._fill(arguments.sends[peer], sends[peer], itemsize, call)
            self._fill(arguments.receives[peer], receives[peer], itemsize, call)
        if reduction is not None:
            self._fill_reduction(arguments, reduction, itemsize, call)
        self._keep_together_if_overlapping(arguments)
        links = [*arguments.sends, *arguments.receives]
        longest = max(link.stride for link in links)
        if longest == 0:
            return None
        # The same blocks on both sides of each pair; how many threads a block has is this rank's own affair.
        packets = -(-min(longest, SLOT_NBYTES) // PACKET_NBYTES)
        return Launch(
            arguments,
            _kernel_of(exchange.dtype, reduction.op) if reduction else None,
            blocks=max(-(-link.nbytes // link.stride) for link in links if link.nbytes),
            threads=min(THREADS, max(_FEWEST_THREADS, 1 << (packets - 1).bit_length())),
        )

    def _fill(
        self, link: Link, span: Span | None, itemsize: int, call: tuple[int, int], *, reduced: bool = False
    ) -> None:
        if span is None or span.count == 0:
            return
        link.pointer = 0 if reduced else span.pointer
        link.nbytes = nbytes = span.count * itemsize
        # A pure function of the bytes and the arena, as both sides must cut alike.
        channels = min(self._channels, -(-nbytes // CHANNEL_NBYTES))
        link.stride = -(-nbytes // (channels * _STRIDE_NBYTES)) * _STRIDE_NBYTES
        # With the bytes, so that two ranks which disagree on them notice, whatever MPI lets them pass to the call.
        link.tag = zlib.crc32(struct.pack("<IIQ", *call, nbytes))

    def _fill_reduction(
        self, arguments: ExchangeArguments, reduction: Reduction, itemsize: int, call: tuple[int, int]
    ) -> None:
        for place, source in enumerate(reduction.sources):
            self._fill(arguments.receives[source], reduction.output, itemsize, call, reduced=True)
            arguments.sources[place] = source
        arguments.num_sources = len(reduction.sources)
        arguments.output = reduction.output.pointer
        arguments.own = reduction.own.pointer if reduction.own else 0

    def _keep_together_if_overlapping(self, arguments: ExchangeArguments) -> None:
        """Let one block copy what this rank sends itself where the two places overlap."""
        source, target = arguments.sends[self._node.rank], arguments.receives[self._node.rank]
        if target.pointer < source.pointer < target.pointer + target.nbytes and target.pointer:
            source.stride = target.stride = target.nbytes
            target.overlaps = 1


def _kernel_of(dtype: np.dtype[Any], op: str) -> tuple[str, str]:
    """Return the reduction's name among the kernels; raises `InvalidUsageError` where there is none."""
    name = "uint8" if dtype == np.dtype("V1") else dtype.name  # MPI.BYTE
    options_for((name, op))
    return name, op
