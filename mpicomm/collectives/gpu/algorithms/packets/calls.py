"""The calls of a form as launches of packets.cu."""

from __future__ import annotations

from mpicomm.collectives.eight_bits import BLOCK
from mpicomm.collectives.gpu.algorithms.base import Filled, Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.packets.coded import coding_of
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.gpu.algorithms.packets.ways import ANY_NBYTES, WayOf
from mpicomm.collectives.patterns import shard_count
from mpicomm.symmetric.registry import Mapped


class PacketCalls(PacketTemplate):
    """An `EvenTemplate`: calls of a ``form`` in one exchange, or with ``two_shot`` in two exchanges."""

    def __init__(self, form: Form, node: Node, way_of: WayOf, *, two_shot: bool) -> None:
        first, second = (form.two_shot.first, form.two_shot.second) if two_shot else (form.one_shot, None)
        super().__init__(
            node, first, form.reduction, fan_out=second, alike=not two_shot, even=True, coding=coding_of(form)
        )
        self._whole = BLOCK if form.wire else 0
        own = first.reduction.own if first.reduction is not None else None
        pieces = [form.piece(span, own) for span in self.places]
        self._parts = parts = form.shards if two_shot else 1 + max(piece.part for piece in pieces)
        # The values of a call: 0, the lengths of all parts, their addresses in the send buffer, and in the receive
        # buffer.
        addresses = [1 + buffer * parts + part if buffer else 0 for buffer, part in pieces]
        self.bind(addresses, [1 + piece.part for piece in pieces], 1 + 3 * parts)
        self._way_of = way_of
        self._itemsize = form.itemsize

    def fill(self, send: int, receive: int, nbytes: int, hash32: int, memory: Mapped | None) -> Filled | None:
        parts = self._parts
        if not self._fans:
            way = self._way_of(nbytes)
            if way is None:
                return None
            if parts == 1:  # inlined, because ranges take ten times as long
                return self.write([0, nbytes, send, receive], nbytes, nbytes, hash32, way)
            end = nbytes * parts
            begins, others = range(send, send + end, nbytes), range(receive, receive + end, nbytes)
            return self.write([0, *[nbytes] * parts, *begins, *others], nbytes, nbytes, hash32, way)
        count = shard_count(nbytes // self._itemsize, parts, self._itemsize, self._whole)
        longest = min(nbytes, count * self._itemsize)
        way = self._way_of(longest)
        if way is None:
            return None
        begins, others = range(send, send + nbytes, longest), range(receive, receive + nbytes, longest)
        number = len(begins)
        empty = [0] * (parts - number)  # shards after the last element
        values = [0, *[longest] * number, *empty, *begins, *empty, *others, *empty]
        values[number] = nbytes - (number - 1) * longest
        return self.write(values, longest, longest, hash32, way)


class PacketBlocks(PacketTemplate):
    """A `BlocksTemplate`: calls of a ``form`` with blocks of any lengths and places, in one exchange."""

    private_nbytes: int | None = None
    """See `BlocksTemplate`."""

    def __init__(self, form: Form, node: Node, way_of: WayOf) -> None:
        super().__init__(node, form.one_shot, form.reduction)
        parts = form.parts
        pieces = [form.piece(span) for span in self.places]
        # The values of a call: 0, the lengths of all blocks, and their addresses.
        lengths = [1 + (buffer == 2) * parts[0] + part if part >= 0 else 0 for buffer, part in pieces]
        self.bind([index and sum(parts) + index for index in lengths], lengths, 1 + 2 * sum(parts))
        self._way_of = way_of
        self._is_private = form.operation.counts == "private"

    def fill_blocks(self, lengths: list[int], begins: list[int], longest: int, hash32: int) -> Filled | None:
        way = self._way_of(longest)
        if way is None:
            return None
        values = [0, *lengths, *begins]
        if self._is_private:
            self.private_nbytes = max(self._of_others(values))
            # Whatever other ranks send, short messages have the launch of the way.
            nbytes = longest if longest <= way.step_nbytes else ANY_NBYTES
            return self.write(values, longest, nbytes, hash32, way)
        return self.write(values, longest, longest, hash32, way)
