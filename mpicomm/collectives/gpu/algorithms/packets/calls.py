"""PacketCalls: the calls of a form whose blocks are equal, as launches of packets.cu."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.packets.arguments import OVERSEERS, PacketArguments
from mpicomm.collectives.gpu.algorithms.packets.launches import (
    PacketPlanner,
)
from mpicomm.collectives.gpu.algorithms.packets.template import Kernel
from mpicomm.collectives.gpu.algorithms.packets.ways import WayOf
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.collectives.patterns import shard_count
from mpicomm.kernels.variant import Variant


class PacketCalls:
    """Calls of ``form`` in one exchange, or with ``two_shot`` in two."""

    def __init__(self, form: Form, node: Node, way_of: WayOf, *, two_shot: bool) -> None:
        planner = PacketPlanner.of(node)
        first, second = (form.two_shot.first, form.two_shot.second) if two_shot else (form.one_shot, None)
        self._template = planner.template(first, form.reduction, fan_out=second, alike=not two_shot)
        own = first.reduction.own if first.reduction is not None else None
        pieces = [form.piece(span, own) for span in self._template.places]
        self._parts = parts = form.shards if two_shot else 1 + max(piece.part for piece in pieces)
        # The values of a call: 0, the lengths of all parts, and their addresses in the first and the second buffer.
        addresses = [1 + buffer * parts + part if buffer else 0 for buffer, part in pieces]
        self._template.bind(addresses, [1 + piece.part for piece in pieces], 1 + 3 * parts)
        self._two_shot = two_shot
        self._way_of = way_of
        self._itemsize = form.itemsize
        self.arguments: PacketArguments = self._template.arguments
        self.early = planner.early

    def fill(self, send: int, receive: int, nbytes: int, hash32: int) -> Filled | None:
        """See `EvenTemplate`."""
        parts, longest, end = self._parts, nbytes, nbytes
        if self._two_shot:
            longest = min(nbytes, shard_count(nbytes // self._itemsize, parts, self._itemsize) * self._itemsize)
        else:
            end *= parts
        way = self._way_of(longest)
        if way is None:
            return None
        begins, others = range(send, send + end, longest), range(receive, receive + end, longest)
        number = len(begins)
        if number == parts:
            values = [0, *[longest] * number, *begins, *others]
        else:  # shards behind the last element are empty
            empty = [0] * (parts - number)
            values = [0, *[longest] * number, *empty, *begins, *empty, *others, *empty]
        values[number] = end - (number - 1) * longest
        kernel = self._template.fill(values, longest, hash32, *way)
        _, _, (blocks, workers), _ = way
        return kernel, blocks, workers + OVERSEERS

    def variant(self, kernel: Kernel) -> Variant:
        """See `Template`."""
        return self._template.variant(kernel)
