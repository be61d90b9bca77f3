"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

`PacketOneShot` sends all data straight to the ranks that need it. `PacketTwoShot` sends a shard to each rank. In the
same kernel that rank reduces or takes the shard and sends the result on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node, moved
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.calls import PacketBlocks, PacketCalls
from mpicomm.collectives.gpu.algorithms.packets.coded import coding_of
from mpicomm.collectives.gpu.algorithms.packets.geometry import most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.protocols import (
    ProtocolLimits,
    one_shot_limits,
    packet_protocol,
    two_shot_limits,
)
from mpicomm.collectives.gpu.algorithms.packets.rows import RowGeometry, row_geometry
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.gpu.algorithms.packets.ways import PacketWay, large_inboxes, sized_ways
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.gpu.algorithms.template import ALL_LENGTHS, Lengths, Template
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues.base import Fused


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
        coding, rows = coding_of(call), _rows(call, node)
        if coding is not None:
            return coding.memory(call.one_shot.longest_nbytes, node)
        return _memory(node, self._limits(call, node), rows.nbytes if rows else call.one_shot.longest_nbytes)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """See `Algorithm`."""
        return self._fused(call, node) is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        exchange, coding, rows = call.one_shot, coding_of(call), _rows(call, node)
        if coding is not None:
            template = PacketTemplate(node, exchange, call.reduction, coding=coding)
            yield template.launch(call.tag(), coding.way(exchange.longest_nbytes, node), exchange.longest_nbytes)
            yield from moved(exchange)
            return
        # With rows a thread may have no unit in a step. Then the bytes count all slots.
        nbytes = rows.nbytes if rows else exchange.longest_nbytes
        way = sized_ways(self._limits(call, node), node)(nbytes)
        assert way is not None
        if rows:
            way = PacketWay.of(way.protocol, way.inboxes, rows.threads)
        template = PacketTemplate(node, exchange, call.reduction, finish=self._fused(call, node))
        yield template.launch(call.tag(), way, nbytes)
        yield from moved(exchange)

    def template(self, form: Form, node: Node) -> Template:
        """See `Algorithm`."""
        coding = coding_of(form)
        if coding is not None:
            return PacketCalls(form, node, coding.ways(node), two_shot=False)
        ways = sized_ways(one_shot_limits(form.operation, form.reduction, node), node)
        return PacketCalls(form, node, ways, two_shot=False) if form.is_even else PacketBlocks(form, node, ways)

    def _fused(self, call: GpuCall, node: Node) -> Fused | None:
        fused = fused_in(call)
        return None if fused and fused.rows and not _rows(call, node) else fused

    def _limits(self, call: GpuCall, node: Node) -> ProtocolLimits:
        if _rows(call, node) is not None:
            return ProtocolLimits(0, inf)  # the sum of squares has the order of packets of 16 bytes
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
        return _memory(node, two_shot_limits(call.reduction, node), call.two_shot.longest_nbytes)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """See `Algorithm`."""
        return self._fused(call) is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        schedule, coding, limits = call.two_shot, coding_of(call), two_shot_limits(call.reduction, node)
        if coding is not None:
            template = PacketTemplate(node, schedule.first, call.reduction, fan_out=schedule.second, coding=coding)
            way = coding.way(schedule.longest_nbytes, node, fan_out=True)
            yield template.launch(call.tag(), way, schedule.longest_nbytes)
            return
        sized = sized_ways(limits, node, fan_out=True)(schedule.longest_nbytes)
        assert sized is not None
        finish = self._fused(call)
        template = PacketTemplate(node, schedule.first, call.reduction, fan_out=schedule.second, finish=finish)
        yield template.launch(call.tag(), sized, schedule.longest_nbytes)

    def template(self, form: Form, node: Node) -> Template:
        """See `Algorithm`."""
        coding = coding_of(form)
        if coding is not None:
            return PacketCalls(form, node, coding.ways(node, fan_out=True), two_shot=True)
        ways = sized_ways(two_shot_limits(form.reduction, node), node, fan_out=True)
        return PacketCalls(form, node, ways, two_shot=True)

    def _fused(self, call: GpuCall) -> Fused | None:
        fused = fused_in(call)
        return None if fused and fused.rows else fused  # several ranks may reduce parts of one row


def fused_in(call: GpuCall) -> Fused | None:
    """Return the epilogue of a call as a part of a reducing kernel; None if the call has no epilogue."""
    if call.epilogue is None or call.buffers.output is None:
        return None
    return call.epilogue.epilogue.fused(call.buffers.output.pointer, call.epilogue.pointer)


def _rows(call: GpuCall, node: Node) -> RowGeometry | None:
    """Return how the kernel of one hop normalises the rows of a call; None if it does not."""
    fused = fused_in(call)
    return row_geometry(fused.rows, most_blocks_of(node), node.size) if fused and fused.rows else None


def _memory(node: Node, limits: ProtocolLimits, nbytes: int) -> Sequence[Request]:
    if nbytes <= node.arena.sentinels.nbytes or packet_protocol(nbytes, limits) != "sentinel":
        return ()
    return (large_inboxes(node.arena.layout, nbytes),)
