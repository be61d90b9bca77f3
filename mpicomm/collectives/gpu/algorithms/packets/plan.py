"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

`PacketOneShot` sends all data straight to the ranks that need it. `PacketTwoShot` sends a shard to each rank. In the
same kernel that rank reduces or takes the shard and sends the result on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import ClassVar

from mpicomm.collectives.exchange import Exchange, TwoShot
from mpicomm.collectives.gpu.algorithms.base import ALL_LENGTHS, Algorithm, GpuCall, Lengths, Node, Template, moved
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.geometry import most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.rows import fewest_rows
from mpicomm.collectives.gpu.algorithms.packets.template import PacketBlocks, PacketCalls, PacketTemplate
from mpicomm.collectives.gpu.algorithms.packets.ways import (
    ProtocolLimits,
    WayOf,
    coding_of,
    large_inboxes,
    one_shot_limits,
    packet_protocol,
    row_ways,
    rows_of,
    sized_ways,
    two_shot_limits,
)
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues.base import BoundEpilogue


class _Packets(Algorithm):
    """One launch of packets.cu carries the whole call."""

    codes = True
    fan_out: ClassVar[bool]
    """Whether ranks send on the data that they have reduced or received."""

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        coding, finish = coding_of(call), self._finish(call, node)
        _, _, nbytes = self._exchanges(call, finish)
        if coding is not None:
            return coding.memory(nbytes, node)
        protocol = packet_protocol(nbytes, self._limits(call, node))
        if finish is not None and finish.row_nbytes:
            protocol, nbytes = "sentinel", rows_of(finish.row_nbytes, nbytes, node, fan_out=self.fan_out).nbytes
        if nbytes <= node.arena.sentinels.nbytes or protocol != "sentinel":
            return ()
        return (large_inboxes(node.arena.layout, nbytes),)

    def finishes_from(self, epilogue: BoundEpilogue, node: Node) -> float:
        row_nbytes = epilogue.row_nbytes
        return row_nbytes and row_nbytes * fewest_rows(row_nbytes, most_blocks_of(node), self._shards(node))

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        finish, output = self._finish(call, node), call.buffers.output
        exchange, following, nbytes = self._exchanges(call, finish)
        template = PacketTemplate(
            node,
            exchange,
            call.reduction,
            fan_out=following,
            finish=None if finish is None or output is None else finish.fused(output.pointer, self._shards(node)),
            even=call.operation.is_even,
            coding=coding_of(call),
        )
        way = self._ways(call, finish, node)(nbytes)
        assert way is not None
        yield template.launch(call.tag(), way, way.row_nbytes or nbytes)
        yield from moved(exchange)

    def template(self, form: Form, node: Node) -> Template:
        ways = self._ways(form, form.epilogue, node)
        if form.is_even:
            return PacketCalls(form, node, ways, two_shot=self.fan_out)
        return PacketBlocks(form, node, ways)

    def _ways(self, call: GpuCall | Form, finish: BoundEpilogue | None, node: Node) -> WayOf:
        coding = coding_of(call)
        if coding is not None:
            return coding.ways(node, fan_out=self.fan_out)
        if finish is not None and finish.row_nbytes:
            return row_ways(finish.row_nbytes, node, fan_out=self.fan_out)
        return sized_ways(self._limits(call, node), node, fan_out=self.fan_out)

    def _shards(self, node: Node) -> int:
        return node.size if self.fan_out else 1

    def _finish(self, call: GpuCall, node: Node) -> BoundEpilogue | None:
        """Return the epilogue that the kernel applies."""
        return call.epilogue if self.finishes(call, node) else None

    @abstractmethod
    def _exchanges(self, call: GpuCall, finish: BoundEpilogue | None) -> tuple[Exchange, Exchange | None, int]:
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

    def _exchanges(self, call: GpuCall, finish: BoundEpilogue | None) -> tuple[Exchange, Exchange | None, int]:
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

    def _exchanges(self, call: GpuCall, finish: BoundEpilogue | None) -> tuple[Exchange, Exchange | None, int]:
        schedule = two_shot_of_rows(call, finish.row_nbytes) if finish and finish.row_nbytes else call.two_shot
        return schedule.first, schedule.second, schedule.longest_nbytes

    def _limits(self, call: GpuCall | Form, node: Node) -> ProtocolLimits:
        return two_shot_limits(call.reduction, node)


def two_shot_of_rows(call: GpuCall, row_nbytes: int) -> TwoShot:
    """Return a call as two exchanges whose shards have whole rows."""
    assert call.operation.two_shot is not None
    buffers = replace(call.buffers, whole=row_nbytes // call.buffers.dtype.itemsize)
    return call.operation.two_shot(buffers)
