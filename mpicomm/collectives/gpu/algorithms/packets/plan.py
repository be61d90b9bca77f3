"""Packets: every rank stores packets into inboxes of its peers, and a packet says itself whether it has arrived.

`OneShot` sends all data straight to the ranks that need it. `TwoShot` sends a shard to each rank, which reduces or
takes it and sends the result on, in the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node, moved
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import Wire, carried_nbytes, flags_can_carry
from mpicomm.collectives.gpu.algorithms.packets.launches import PacketPlanner, large_inboxes, most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.rows import RowGeometry, row_geometry
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.operations import Operation
from mpicomm.finishes.base import Fused
from mpicomm.kernels.reductions import Reduction


class OneShot(Algorithm):
    """All data goes straight to the ranks that need it."""

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return True

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        if node.size == 1:
            return "there is one rank"
        return None if self._wire(call, node) else "the inboxes are smaller than the data that goes one way"

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        rows = _rows(call, node)
        return _memory(node, self._wire(call, node), rows.nbytes if rows else call.one_shot.longest_nbytes)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """See `Algorithm`."""
        return self._fused(call, node) is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        wire, rows = self._wire(call, node), _rows(call, node)
        assert wire is not None
        exchange, planner = call.one_shot, PacketPlanner.of(node)
        yield planner.launch(
            exchange,
            call.reduction,
            call.tag(),
            wire,
            nbytes=rows.nbytes if rows else exchange.longest_nbytes,
            geometry=rows.threads if rows else None,
            finish=self._fused(call, node),
        )
        yield from moved(exchange)

    def _fused(self, call: GpuCall, node: Node) -> Fused | None:
        fused = fused_in(call)
        return None if fused and fused.rows and not _rows(call, node) else fused

    def _wire(self, call: GpuCall, node: Node) -> Wire | None:
        if _rows(call, node) is not None:
            return "sentinel"  # the order in which squares are added is one of packets of 16 bytes
        to_all = call.operation.traffic != "one-way"
        # Where inboxes would be used again within a launch, chunks are faster for data that only goes one way.
        most_nbytes = inf if to_all else node.arena.layout.most_inbox_nbytes
        return _wire_for(call.one_shot.longest_nbytes, call.reduction, node, to_all=to_all, most_nbytes=most_nbytes)


class TwoShot(Algorithm):
    """Each rank reduces or receives a shard, and sends it on to all ranks that need it."""

    name = "two_shot"

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return operation.two_shot is not None

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return _memory(node, self._wire(call, node), call.two_shot.longest_nbytes)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """See `Algorithm`."""
        return self._fused(call) is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        wire, schedule = self._wire(call, node), call.two_shot
        assert wire is not None
        yield PacketPlanner.of(node).launch(
            schedule.first,
            call.reduction,
            call.tag(),
            wire,
            nbytes=schedule.longest_nbytes,
            fan_out=schedule.second,
            finish=self._fused(call),
        )

    def _fused(self, call: GpuCall) -> Fused | None:
        fused = fused_in(call)
        return None if fused and fused.rows else fused  # several ranks may reduce parts of a row

    def _wire(self, call: GpuCall, node: Node) -> Wire | None:
        return _wire_for(call.two_shot.longest_nbytes, call.reduction, node, to_all=True, most_nbytes=inf)


def packet_wire(
    nbytes: int, reduction: Reduction | None, most_flagged_nbytes: float, most_sentinel_nbytes: float
) -> Wire | None:
    """Return the wire for an exchange in which a rank sends another at most ``nbytes``; None if no wire fits.

    LL packets are the fastest up to ``most_flagged_nbytes``, sentinel packets up to ``most_sentinel_nbytes``.
    """
    if nbytes == 0:
        return None
    if (reduction is None or flags_can_carry(reduction[0])) and nbytes <= most_flagged_nbytes:
        return "flagged"
    return "sentinel" if nbytes <= most_sentinel_nbytes else None


def fused_in(call: GpuCall) -> Fused | None:
    """Return the epilogue of a call as a part of a kernel that reduces, None if the call has none."""
    if call.epilogue is None or call.buffers.output is None:
        return None
    return call.epilogue.epilogue.fused(call.buffers.output.pointer, call.epilogue.pointer)


def _rows(call: GpuCall, node: Node) -> RowGeometry | None:
    """Return how the kernel of one hop normalises the rows of a call, None if it does not."""
    fused = fused_in(call)
    return row_geometry(fused.rows, most_blocks_of(node), node.size) if fused and fused.rows else None


def _memory(node: Node, wire: Wire | None, nbytes: int) -> Sequence[Request]:
    if wire != "sentinel" or nbytes <= node.arena.sentinels.nbytes:
        return ()
    return (large_inboxes(node.arena.layout, nbytes),)


def _wire_for(nbytes: int, reduction: Reduction | None, node: Node, *, to_all: bool, most_nbytes: float) -> Wire | None:
    most_flagged = _most_flagged_nbytes(node.size, to_all, reduces=reduction is not None) * node.link_speed
    room = carried_nbytes(node.arena.flagged.nbytes, "flagged")
    return packet_wire(nbytes, reduction, min(room, most_flagged), most_nbytes)


def _most_flagged_nbytes(size: int, to_all: bool, *, reduces: bool) -> int:
    """Return up to how many bytes LL packets are faster than sentinel packets, which take half the bytes on links."""
    if reduces:
        return 16 << 10
    # With to_all each rank sends to all and receives from all; else a rank mostly does either.
    return (96 << 10 if to_all else 192 << 10) // (size - 1)
