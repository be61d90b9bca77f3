"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

`PacketOneShot` sends all data straight to the ranks that need it. `PacketTwoShot` sends a shard to each rank. In the
same kernel that rank reduces or takes the shard and sends the result on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import ClassVar, NamedTuple

from mpicomm.collectives.exchange import Exchange, TwoShot
from mpicomm.collectives.gpu.algorithms.base import ALL_LENGTHS, Algorithm, GpuCall, Lengths, Node, Template, moved
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.geometry import most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.rows import RowGeometry, row_geometry
from mpicomm.collectives.gpu.algorithms.packets.template import PacketBlocks, PacketCalls, PacketTemplate
from mpicomm.collectives.gpu.algorithms.packets.ways import (
    PacketWay,
    ProtocolLimits,
    coding_of,
    large_inboxes,
    one_shot_limits,
    packet_protocol,
    sized_ways,
    two_shot_limits,
)
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues.base import Fused, Rows


class _Packets(Algorithm):
    """One launch of packets.cu carries the whole call."""

    codes = True
    fan_out: ClassVar[bool]
    """Whether ranks send on the data that they have reduced or received."""

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        coding, finish = coding_of(call), self._finish(call, node)
        _, _, longest_nbytes = self._exchanges(call, finish)
        if coding is not None:
            return coding.memory(longest_nbytes, node)
        limits, nbytes = finish.bounds(self._limits(call, node), longest_nbytes)
        if nbytes <= node.arena.sentinels.nbytes or packet_protocol(nbytes, limits) != "sentinel":
            return ()
        return (large_inboxes(node.arena.layout, nbytes),)

    def finishes(self, call: GpuCall, node: Node) -> bool:
        return self._finish(call, node).fused is not None

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        coding, finish = coding_of(call), self._finish(call, node)
        exchange, following, nbytes = self._exchanges(call, finish)
        template = PacketTemplate(
            node,
            exchange,
            call.reduction,
            fan_out=following,
            finish=finish.fused,
            even=call.operation.is_even,
            coding=coding,
        )
        if coding is not None:
            way = coding.way(nbytes, node, fan_out=self.fan_out)
        else:
            way, nbytes = finish.way(self._limits(call, node), nbytes, node, fan_out=self.fan_out)
        yield template.launch(call.tag(), way, nbytes)
        yield from moved(exchange)

    def template(self, form: Form, node: Node) -> Template:
        coding = coding_of(form)
        if coding is not None:
            ways = coding.ways(node, fan_out=self.fan_out)
        else:
            ways = sized_ways(self._limits(form, node), node, fan_out=self.fan_out)
        if form.is_even:
            return PacketCalls(form, node, ways, two_shot=self.fan_out)
        return PacketBlocks(form, node, ways)

    def _finish(self, call: GpuCall, node: Node) -> _Finish:
        return _Finish.of(call, node, node.size if self.fan_out else 1)

    @abstractmethod
    def _exchanges(self, call: GpuCall, finish: _Finish) -> tuple[Exchange, Exchange | None, int]:
        """Return the exchange, the exchange in which ranks send on its data, and the most bytes to one rank."""

    @abstractmethod
    def _limits(self, call: GpuCall | Form, node: Node) -> ProtocolLimits:
        """Return the limits of protocols for a call or a form."""


class PacketOneShot(_Packets):
    """All data goes straight to the ranks that need it."""

    name = "one_shot"
    fan_out = False

    def serves(self, operation: Operation) -> bool:
        return True

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        if node.size == 1:
            return "there is one rank"
        if call.wire is not None:
            return None
        protocol = packet_protocol(call.one_shot.longest_nbytes, self._limits(call, node))
        return None if protocol else "the inboxes are smaller than the data that goes one way"

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        return 1, inf if form.wire is not None else max(self._limits(form, node))

    def _exchanges(self, call: GpuCall, finish: _Finish) -> tuple[Exchange, Exchange | None, int]:
        return call.one_shot, None, call.one_shot.longest_nbytes

    def _limits(self, call: GpuCall | Form, node: Node) -> ProtocolLimits:
        return one_shot_limits(call.operation, call.reduction, node)


class PacketTwoShot(_Packets):
    """Each rank reduces or receives a shard, and sends it on to all ranks that need it."""

    name = "two_shot"
    fan_out = True

    def serves(self, operation: Operation) -> bool:
        return operation.two_shot is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        if call.wire is not None and not call.wire[0].again:
            return "its results travel as codes"
        return None

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        return None if form.wire is not None and not form.wire[0].again else ALL_LENGTHS

    def _exchanges(self, call: GpuCall, finish: _Finish) -> tuple[Exchange, Exchange | None, int]:
        schedule = finish.two_shot(call)
        return schedule.first, schedule.second, schedule.longest_nbytes

    def _limits(self, call: GpuCall | Form, node: Node) -> ProtocolLimits:
        return two_shot_limits(call.reduction, node)


class _Finish(NamedTuple):
    """The part that the epilogue of a call has in the reducing kernel."""

    fused: Fused | None = None
    """None if the call has no epilogue, or if a later kernel applies it."""
    rows: RowGeometry | None = None
    """How the kernel normalises rows; None if the epilogue has no rows."""

    @classmethod
    def of(cls, call: GpuCall, node: Node, shards: int) -> _Finish:
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
        limits, nbytes = self.bounds(limits, nbytes)
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

    def bounds(self, limits: ProtocolLimits, nbytes: int) -> tuple[ProtocolLimits, int]:
        """Return the limits and the bytes of messages of at most ``nbytes``."""
        if self.rows is None:
            return limits, nbytes
        # The sum of squares has the order of packets of 16 bytes. A thread may have no unit in a step, so the bytes
        # count all slots.
        return ProtocolLimits(0, inf), self.rows.nbytes


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
