"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

`PacketOneShot` sends all data straight to the ranks that need it. `PacketTwoShot` sends a shard to each rank. In the
same kernel that rank reduces or takes the shard and sends the result on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from mpicomm.collectives.exchange import TwoShot
from mpicomm.collectives.gpu.algorithms.base import ALL_LENGTHS, Algorithm, GpuCall, Lengths, Node, Template, moved
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.calls import PacketBlocks, PacketCalls
from mpicomm.collectives.gpu.algorithms.packets.coded import coding_of
from mpicomm.collectives.gpu.algorithms.packets.geometry import most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.rows import RowGeometry, row_geometry
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.gpu.algorithms.packets.ways import (
    PacketWay,
    ProtocolLimits,
    large_inboxes,
    one_shot_limits,
    packet_protocol,
    sized_ways,
    two_shot_limits,
)
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues.base import Fused, Rows


class PacketOneShot(Algorithm):
    """All data goes straight to the ranks that need it."""

    name = "one_shot"
    codes = True

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return True

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        if node.size == 1:
            return "there is one rank"
        if call.wire is not None:
            return None
        protocol = packet_protocol(call.one_shot.longest_nbytes, self._limits(call, node))
        return None if protocol else "the inboxes are smaller than the data that goes one way"

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        """See `Algorithm`."""
        if form.wire is not None:
            return 1, inf
        return 1, max(one_shot_limits(form.operation, form.reduction, node))

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        coding = coding_of(call)
        if coding is not None:
            return coding.memory(call.one_shot.longest_nbytes, node)
        finish = _Finish.of(call, node)
        if finish.rows:
            return finish.rows_memory(node)
        return _memory(node, self._limits(call, node), call.one_shot.longest_nbytes)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """See `Algorithm`."""
        return _Finish.of(call, node).fused is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        exchange, coding, finish = call.one_shot, coding_of(call), _Finish.of(call, node)
        if coding is not None:
            template = PacketTemplate(node, exchange, call.reduction, even=call.operation.is_even, coding=coding)
            yield template.launch(call.tag(), coding.way(exchange.longest_nbytes, node), exchange.longest_nbytes)
            yield from moved(exchange)
            return
        way, nbytes = finish.way(self._limits(call, node), exchange.longest_nbytes, node)
        template = PacketTemplate(node, exchange, call.reduction, even=call.operation.is_even, finish=finish.fused)
        yield template.launch(call.tag(), way, nbytes)
        yield from moved(exchange)

    def template(self, form: Form, node: Node) -> Template:
        """See `Algorithm`."""
        coding = coding_of(form)
        if coding is not None:
            return PacketCalls(form, node, coding.ways(node), two_shot=False)
        ways = sized_ways(one_shot_limits(form.operation, form.reduction, node), node)
        return PacketCalls(form, node, ways, two_shot=False) if form.is_even else PacketBlocks(form, node, ways)

    def _limits(self, call: GpuCall, node: Node) -> ProtocolLimits:
        return one_shot_limits(call.operation, call.reduction, node)


class PacketTwoShot(Algorithm):
    """Each rank reduces or receives a shard, and sends it on to all ranks that need it."""

    name = "two_shot"
    codes = True

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return operation.two_shot is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        if call.wire is not None and not call.wire[0].again:
            return "its results travel as codes"
        return None

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        """See `Algorithm`."""
        return None if form.wire is not None and not form.wire[0].again else ALL_LENGTHS

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        coding = coding_of(call)
        if coding is not None:
            return coding.memory(call.two_shot.longest_nbytes, node)
        finish = _Finish.of(call, node, shards=node.size)
        if finish.rows:
            return finish.rows_memory(node)
        return _memory(node, two_shot_limits(call.reduction, node), call.two_shot.longest_nbytes)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """See `Algorithm`."""
        return _Finish.of(call, node, shards=node.size).fused is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        coding = coding_of(call)
        if coding is not None:
            schedule = call.two_shot
            template = PacketTemplate(node, schedule.first, call.reduction, fan_out=schedule.second, coding=coding)
            way = coding.way(schedule.longest_nbytes, node, fan_out=True)
            yield template.launch(call.tag(), way, schedule.longest_nbytes)
            return
        finish = _Finish.of(call, node, shards=node.size)
        schedule, limits = finish.two_shot(call), two_shot_limits(call.reduction, node)
        way, nbytes = finish.way(limits, schedule.longest_nbytes, node, fan_out=True)
        template = PacketTemplate(node, schedule.first, call.reduction, fan_out=schedule.second, finish=finish.fused)
        yield template.launch(call.tag(), way, nbytes)

    def template(self, form: Form, node: Node) -> Template:
        """See `Algorithm`."""
        coding = coding_of(form)
        if coding is not None:
            return PacketCalls(form, node, coding.ways(node, fan_out=True), two_shot=True)
        ways = sized_ways(two_shot_limits(form.reduction, node), node, fan_out=True)
        return PacketCalls(form, node, ways, two_shot=True)


class _Finish(NamedTuple):
    """The part that the epilogue of a call has in the reducing kernel."""

    fused: Fused | None = None
    """None if the call has no epilogue, or if a later kernel applies it."""
    rows: RowGeometry | None = None
    """How the kernel normalises rows; None if the epilogue has no rows."""

    @classmethod
    def of(cls, call: GpuCall, node: Node, shards: int = 1) -> _Finish:
        """Return the part in a kernel in which ``shards`` ranks each reduce a shard."""
        fused = fused_in(call, shards)
        if fused is None or fused.rows is None:
            return cls(fused)
        if shards > 1 and fused.rows.count < most_blocks_of(node):
            # Some blocks would end a row of each shard, after the last packet, and others none. A later kernel has
            # blocks for all rows at once.
            return cls()
        rows = row_geometry(fused.rows, most_blocks_of(node), node.size, fan_out=shards > 1)
        return cls() if rows is None else cls(fused, rows)

    def way(self, limits: ProtocolLimits, nbytes: int, node: Node, *, fan_out: bool = False) -> tuple[PacketWay, int]:
        """Return the way of messages of at most ``nbytes``, and the most bytes to one rank."""
        if self.rows is not None:
            # A thread may have no unit in a step, so the bytes count all slots.
            limits, nbytes = _OF_ROWS, self.rows.nbytes
        way = sized_ways(limits, node, fan_out=fan_out)(nbytes)
        assert way is not None
        if self.rows is not None:
            way = PacketWay.of(way.protocol, way.inboxes, self.rows.threads)
        return way, nbytes

    def two_shot(self, call: GpuCall) -> TwoShot:
        """Return the call as two exchanges. Their shards have whole rows."""
        if self.fused is None or self.fused.rows is None:
            return call.two_shot
        return two_shot_of_rows(call, self.fused.rows)

    def rows_memory(self, node: Node) -> Sequence[Request]:
        """See `Algorithm.memory`."""
        assert self.rows is not None
        return _memory(node, _OF_ROWS, self.rows.nbytes)


_OF_ROWS = ProtocolLimits(0, inf)  # the sum of squares has the order of packets of 16 bytes


def fused_in(call: GpuCall, shards: int = 1) -> Fused | None:
    """Return the epilogue of a call as a part of a reducing kernel; None if the call has no epilogue."""
    if call.epilogue is None or call.buffers.output is None:
        return None
    return call.epilogue.epilogue.fused(call.buffers.output.pointer, call.epilogue.pointer, shards)


def two_shot_of_rows(call: GpuCall, rows: Rows) -> TwoShot:
    """Return a call as two exchanges whose shards have whole rows."""
    assert call.operation.two_shot is not None
    buffers = replace(call.buffers, whole=rows.nbytes // call.buffers.dtype.itemsize)
    return call.operation.two_shot(buffers)


def _memory(node: Node, limits: ProtocolLimits, nbytes: int) -> Sequence[Request]:
    if nbytes <= node.arena.sentinels.nbytes or packet_protocol(nbytes, limits) != "sentinel":
        return ()
    return (large_inboxes(node.arena.layout, nbytes),)
