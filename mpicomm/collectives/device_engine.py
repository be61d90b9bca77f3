"""DeviceEngine: carries out exchanges between the GPUs of a node with a kernel each, in stream order."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import cupy
from cupy.cuda import runtime

from mpicomm.backend.cuda import CudaBackend
from mpicomm.backend.cuda_driver import DriverShutDownError
from mpicomm.backend.cuda_faults import called_differently
from mpicomm.bootstrap import Group
from mpicomm.collectives.device_arena import ArenaLayout, DeviceArena
from mpicomm.collectives.device_channels import ChannelPlanner, reduction_of, relays
from mpicomm.collectives.device_launch import Launch
from mpicomm.collectives.device_packets import MAX_BLOCKS, PacketPlanner, Wire, fans_out
from mpicomm.collectives.device_plan import Plan
from mpicomm.collectives.device_selection import COUNTS_DIFFER, keeps_step, packet_wire
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.signature import Signature
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.handle import Kind
from mpicomm.kernels.load import KernelCache
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.waiting import wait_until

MAX_CHANNELS = 64
"""Blocks of a kernel of exchange.cu: enough to keep the links of an H200 full, half of its multiprocessors."""
_LATE_S = 0.5  # how long an error waits for what ranks call that are about to


class Board(Protocol):
    """Where each rank of the node writes what it calls."""

    def post(self, text: str) -> None:
        """Write this rank's line."""

    def read(self) -> list[str]:
        """Return what each rank of the node has posted last."""

    def differ(self) -> bool:
        """Return whether ranks have called different things of late."""

    def all_differ(self) -> bool:
        """Return whether they have, and each has said what it called instead."""


class DeviceEngine:
    """Collectives on GPU memory that need not be shared: everything goes through the ranks' arenas.

    Small and middle-sized messages go in packets (kernels/packets.cu), the others chunk by chunk (kernels/exchange.cu).

    Construction is collective over ``node`` and raises as ``share`` does. What was enqueued and could not be done is
    raised by the backend's `check`: `CollectiveTimeoutError` naming the rank that did not come, `PeerError` with what
    each rank called. The communicator is unusable then.

    How the ranks meet, and why they cannot wait for each other in a circle, is told at the top of the two.
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
        layout = ArenaLayout(node.size, min(MAX_CHANNELS, smallest))
        self._arena = DeviceArena(node, backend, kind, layout)
        self._order = backend.stream_order()
        team = Team(faults=backend.faults, timeout_ns=backend.timeout_ns, size=node.size, rank=node.rank)
        for index, rank in enumerate(node.ranks):
            team.arenas[index] = self._arena.pointers[index]
            team.names[index] = rank
        self._channels = ChannelPlanner(team, layout)
        # Older devices cannot begin a kernel before the last has ended.
        early = backend.info.compute_capability >= (9, 0)
        self._packets = PacketPlanner(team, self._arena, min(MAX_BLOCKS, smallest), early=early)
        self._kernels = KernelCache(backend.info.compute_capability)
        self._open = True
        self._ordinal = backend.info.ordinal
        with backend.current():
            self._capturing = cupy.cuda.Stream(non_blocking=True)
        backend.calls = self._calls

    def prepare(self, exchanges: Sequence[Exchange], signature: Signature) -> Plan:
        """Return this rank's part of ``exchanges``, to be enqueued as often as wanted.

        Collective where a message is larger than all before and needs more memory, else local; all ranks prepare with
        as many exchanges each. The board is told of it: it counts as the first time that the plan is enqueued. Raises
        `InvalidUsageError` for a reduction that is not defined, and as ``share`` does; the first use of a reduction
        compiles its kernel, about a second once per machine.
        """
        self._require_open(signature.operation)
        self._board.post(str(signature))  # before anything waits for others, who may be in something else
        try:
            launches = self._launches(exchanges, signature)
        except CollectiveTimeoutError as error:
            calls = self._calls()
            if not calls:
                raise
            self._node.broken = called_differently(calls, error.ranks)
            raise self._node.broken from error
        # Before any of them can run: loading may wait for the device, and a kernel that runs there for the peers.
        if any(self._kernels.find(launch.variant) is None for launch in launches):
            with self._backend.loading():
                for launch in launches:
                    self._kernels.load(launch.variant)
        return Plan(str(signature), [(self._kernels.load(launch.variant), launch) for launch in launches])

    def enqueue(self, plan: Plan, stream: int, *, again: bool = False) -> None:
        """Enqueue a plan of this engine on ``stream``. Local, does not block; capturable in a graph.

        With ``again``, for a plan that was enqueued before, it is made a graph, which is cheaper from the next time on.

        All ranks enqueue the same calls in the same order. What is enqueued on different streams, or on different
        streams of one capture, follows each other; when a captured graph runs, beside other work of the communicator,
        is for the caller to order (see `StreamOrder`). The board is told of this, not of replays of a graph.
        """
        self._require_open(plan.text)
        if again:
            self._board.post(plan.text)
        if not plan.kernels:
            return
        # Cheaper than a change of context, and nearly always true: creating a Communicator makes its GPU the current.
        if runtime.getDevice() == self._ordinal:
            self._enqueue(plan, stream, again)
        else:
            with self._backend.current():
                self._enqueue(plan, stream, again)

    def _enqueue(self, plan: Plan, stream: int, again: bool) -> None:
        capture = self._order.begin(stream)
        if capture is None and again and plan.graph is None:
            with self._backend.loading():
                plan.make_graph(self._capturing)
        if capture is None and plan.graph is not None:
            runtime.graphLaunch(plan.graph, stream)
        else:
            plan.enqueue(stream)
        self._order.end(stream, capture)

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local. This rank's work must be over; the engine cannot be used any more."""
        self._open = False
        self._backend.calls = None
        self._arena.close_peers()

    def close_own(self) -> None:
        """Free this rank's arena, kernels and events; local, after every peer's `close_peers`."""
        with suppress(DriverShutDownError), self._backend.current():
            self._kernels.unload()
            self._order.close()
        self._arena.close_own()

    def _require_open(self, what: str) -> None:
        if not self._open:
            raise InvalidUsageError(f"{what}: the communicator was freed; create another")

    def _calls(self) -> list[str]:
        # A rank whose first data arrived may not have looked yet at what the others call; most are only a little late.
        wait_until(self._board.all_differ, _LATE_S)
        if not self._board.differ():
            return []
        return [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, self._board.read(), strict=True)]

    def _launches(self, exchanges: Sequence[Exchange], signature: Signature) -> list[Launch]:
        launches: list[Launch | None] = []
        nbytes = max((_longest_nbytes(exchange) for exchange in exchanges), default=0)
        pending = list(enumerate(exchanges))
        while pending:
            step, exchange = pending.pop(0)
            # In every pattern the first exchange alone reduces, on whichever ranks: the kernel is the same on all.
            reduction = reduction_of(exchange.dtype, signature.op) if signature.op and step == 0 else None
            assert reduction is not None or exchange.reduction is None
            merges = fans_out if reduction else relays
            following = pending[0][1] if pending and merges(self._node.rank, exchange, pending[0][1]) else None
            wire = self._wire(signature.operation, nbytes, reduction, exchange, following)
            # Packets fan out what they reduce; exchange.cu relays what it moves.
            merged = following if (wire is not None) == (reduction is not None) else None
            if wire is None:
                launches.append(self._channels.launch(exchange, (signature.hash32, step), merged))
            else:
                tag = zlib.crc32(struct.pack("<II", signature.hash32, step))
                launches.append(self._packets.launch(exchange, reduction, tag, wire, nbytes=nbytes, fan_out=merged))
            if merged is not None:
                pending.pop(0)
        return [launch for launch in launches if launch is not None]

    def _wire(
        self,
        operation: str,
        nbytes: int,
        reduction: tuple[str, str] | None,
        exchange: Exchange,
        following: Exchange | None,
    ) -> Wire | None:
        if self._node.size == 1 or operation in COUNTS_DIFFER:
            return None
        in_step = reduction is not None and keeps_step(operation, exchange, following)
        # Half of an inbox of the LL wire is flags.
        return packet_wire(in_step, nbytes, reduction, self._arena.flagged.nbytes // 2, self._arena.sentinels.nbytes)


def _longest_nbytes(exchange: Exchange) -> int:
    """Return the most that one rank sends to another, as far as this one can know."""
    spans = [*exchange.sends, *exchange.receives, exchange.reduction.output if exchange.reduction else None]
    return max((span.count for span in spans if span is not None), default=0) * exchange.dtype.itemsize
