"""The actions of one rank in a product that overlaps with a collective. They know no device, so tests need none.

Copy engines carry the data on a stream beside the products. A barrier says that all copies before it have landed, and
detects a rank that does not come or calls something else.

Products run on two *lanes* in turns, streams beside the barriers. A product leaves multiprocessors free in its last
wave. The next product takes them, so a cut adds no wave. The barrier after its copies takes them, too, so it is over
before the product ends. If all multiprocessors are at work, the barrier waits until the product is over, as it would on
the stream of the product. No copy that is to run beside a product waits for a barrier that runs beside the same
product: such a copy could begin too late.

At any time all ranks copy to different peers: in turn d each rank copies to the rank at distance d.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier, Reduce
from mpicomm.collectives.gpu.algorithms.steps import Copy, Fork, Join


@dataclass(frozen=True)
class Multiply:
    """The product of ``rows`` rows: rows of ``left`` from ``begin`` on give rows of ``into`` from ``at`` on.

    It waits for all steps before it, except copies and the product before it. Steps after it do not wait for it before
    `JoinLanes`.
    """

    left: Literal["a", "gathered"]
    begin: int
    into: Literal["out", "partial"]
    at: int
    rows: int


@dataclass(frozen=True)
class JoinLanes:
    """All steps after it wait for all products before it. So do copies after the next fork."""

    but_last: bool = False
    """Whether they do not wait for the last product before it."""


@dataclass(frozen=True)
class AddBias:
    """The bias is added to ``rows`` rows of the result from ``begin`` on."""

    begin: int
    rows: int


Action = Barrier | Fork | Join | Copy | Reduce | Multiply | JoinLanes | AddBias


@dataclass(frozen=True)
class RowCut:
    """How the rows of a product are cut into products. It is the same on all ranks."""

    own_rows: int
    """How many rows of its shard a rank multiplies before it waits for another shard."""
    merged: bool
    """Whether the rows of all other shards are multiplied together, and not each shard at its turn."""
    parts: int = 1
    """The parts of an all-reduce. A part is reduced and sent back while the next part is multiplied."""


@dataclass(frozen=True)
class Place:
    """This rank among the ranks of a call. ``rows`` are the rows of a shard, or of the product in an all-reduce."""

    rank: int
    size: int
    rows: int

    def to(self, distance: int) -> int:
        """Return the rank to which this rank copies in a turn."""
        return (self.rank + distance) % self.size

    def source(self, distance: int) -> int:
        """Return the rank whose data comes in a turn."""
        return (self.rank - distance) % self.size


def gathering(
    place: Place, cut: RowCut, row_nbytes: int, a: int, gathered: Sequence[int], kept: int = 0
) -> Iterator[Action]:
    """Yield the actions of an all-gather with its product.

    ``a`` is the address of this rank's shard. ``gathered`` has the address of each rank's memory for all shards.
    ``kept`` is the address of an array that receives all shards, too, or 0.
    """
    rank, size, rows = place.rank, place.size, place.rows
    nbytes = rows * row_nbytes
    first, last = own_piece(place, cut)
    # The barrier: before it, a product of an earlier call of a peer may still read the memory that these copies
    # overwrite. The fork: no copy overtakes the barrier, which is on another stream.
    yield from (Barrier(), Fork(), Copy(gathered[place.to(1)] + rank * nbytes, a, nbytes))
    rest = [(begin, end) for begin, end in ((rank * rows, first), (last, (rank + 1) * rows)) if begin < end]
    for begin, end in rest:
        # The rest of the own shard joins the next shard in one product, so both have to lie in one array.
        yield Copy(
            gathered[rank] + begin * row_nbytes, a + (begin - rank * rows) * row_nbytes, (end - begin) * row_nbytes
        )
    yield Multiply("a", first - rank * rows, "out", first, last - first)
    for distance in range(1, size):
        # The join pairs with the barrier. Without the join, a rank could come to the barrier before its copy is over,
        # and the peer would multiply a shard that has not come. The copy of the next turn runs beside the product.
        yield Join()
        if distance + 1 < size:
            yield Copy(gathered[place.to(distance + 1)] + rank * nbytes, a, nbytes)
        yield Barrier()
        if kept:
            # These copies run beside the product, too. The fork makes them wait for the barrier.
            source = place.source(distance) * nbytes
            yield from (Fork(), Copy(kept + source, gathered[rank] + source, nbytes))
            if distance == 1:
                yield Copy(kept + rank * nbytes, a, nbytes)
        for begin, end in arriving(place, cut, distance):
            yield Multiply("gathered", begin, "out", begin, end - begin)
    yield JoinLanes()
    if kept:
        yield Join()


def own_piece(place: Place, cut: RowCut) -> tuple[int, int]:
    """Return the rows of the whole product, from and to, that a rank multiplies first."""
    begin, end = place.rank * place.rows, (place.rank + 1) * place.rows
    # The rest lies beside the next rank's shard, or beside the previous rank's shard on the last rank.
    return (begin, begin + cut.own_rows) if place.rank + 1 < place.size else (end - cut.own_rows, end)


def arriving(place: Place, cut: RowCut, distance: int) -> list[tuple[int, int]]:
    """Return the pieces, as rows of the whole product, that a rank multiplies after a turn."""
    if cut.merged:
        first, last = own_piece(place, cut)
        pieces = [(0, first), (last, place.size * place.rows)] if distance + 1 == place.size else []
        return [(begin, end) for begin, end in pieces if begin < end]
    source = place.source(distance)
    return [(source * place.rows, (source + 1) * place.rows)]


def scattering(
    place: Place, cut: RowCut, row_nbytes: int, partial: int, landing: Sequence[int], out: int, *, bias: bool
) -> Iterator[Action]:
    """Yield the actions of a product with its reduce-scatter.

    ``partial`` is the address of private memory for the whole product of this rank. ``landing`` has the address of each
    rank's memory for the contributions of the other ranks. ``out`` is the address of this rank's result.
    """
    rank, size, rows = place.rank, place.size, place.rows
    nbytes = rows * row_nbytes
    own = Multiply("a", rank * rows, "out", 0, rows)
    if cut.merged:
        for begin, end in ((0, rank), (rank + 1, size)):
            if begin < end:
                yield Multiply("a", begin * rows, "partial", begin * rows, (end - begin) * rows)
        products = [own]
    else:
        peers = [place.to(distance) for distance in range(1, size)]
        first, *products = [*(Multiply("a", peer * rows, "partial", peer * rows, rows) for peer in peers), own]
        yield first
    # Before it, a reduction of an earlier call of a peer may still read the memory that these copies overwrite.
    yield Barrier()
    if cut.merged:
        yield JoinLanes()
    for distance in range(1, size):
        peer = place.to(distance)
        # The next product takes the multiprocessors that the product of this copy leaves in its last wave.
        yield from products[distance - 1 : distance]
        # They make the copy wait for its product and for the barrier.
        yield from (JoinLanes(but_last=True), Fork())
        yield Copy(landing[peer] + slot(rank, peer, size) * nbytes, partial + peer * nbytes, nbytes)
    # The join pairs with the barrier, as in `gathering`. After the barrier all contributions have come.
    yield from (Join(), Barrier(), JoinLanes())
    yield Reduce(sources(place, landing[rank], nbytes, out), out, nbytes, most_blocks=_REDUCING_BLOCKS)
    if bias:
        yield AddBias(0, rows)


_REDUCING_BLOCKS = 128
"""No product runs beside the reduction."""


def slot(source: int, owner: int, size: int) -> int:
    """Return the place of a rank's contribution among the contributions to ``owner``."""
    return (source - owner - 1) % size


def sources(place: Place, landing: int, stride: int, own: int) -> tuple[int, ...]:
    """Return the addresses of all contributions to this rank, in the order of ranks."""
    return tuple(
        own if source == place.rank else landing + slot(source, place.rank, place.size) * stride
        for source in range(place.size)
    )


def bounds(rows: int, parts: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the rows, from and to, of each rank in each part of an all-reduce."""
    blocks = parts * size
    edges = [rows * block // blocks for block in range(blocks + 1)]
    return [
        [(edges[part * size + rank], edges[part * size + rank + 1]) for rank in range(size)] for part in range(parts)
    ]


def reducing(
    place: Place, cut: RowCut, row_nbytes: int, landing: Sequence[int], results: Sequence[int], out: int, *, bias: bool
) -> Iterator[Action]:
    """Yield the actions of a product with its all-reduce.

    ``landing`` has the address of each rank's memory for the contributions to its blocks: a room for each part, with a
    slot for each other rank. ``results`` has the address of each rank's memory for the whole result. A rank multiplies
    into ``out``, its result.
    """
    rank, size = place.rank, place.size
    parts = bounds(place.rows, cut.parts, size)
    stride = max(end - begin for blocks in parts for begin, end in blocks) * row_nbytes
    room = (size - 1) * stride

    def unload(part: int) -> Iterator[Copy]:
        for peer, (begin, end) in enumerate(parts[part]):
            if peer != rank and begin < end:
                at, nbytes = begin * row_nbytes, (end - begin) * row_nbytes
                yield Copy(out + at, results[rank] + at, nbytes, local=True)

    for part, blocks in enumerate(parts):
        for distance in range(1, size):
            peer = place.to(distance)
            begin, end = blocks[peer]
            if begin < end:
                yield Multiply("a", begin, "out", begin, end - begin)
            if part == 0 and distance == 1:
                yield Barrier()  # as in `scattering`; an earlier call of another kind may still use the memory
            yield from (JoinLanes(), Fork())
            if begin < end:
                target = landing[peer] + part * room + slot(rank, peer, size) * stride
                yield Copy(target, out + begin * row_nbytes, (end - begin) * row_nbytes)
        begin, end = blocks[rank]
        at, nbytes = begin * row_nbytes, (end - begin) * row_nbytes
        if nbytes:
            yield Multiply("a", begin, "out", begin, end - begin)
        # After the barrier the contributions to this part have come, and the results of the previous part.
        yield from (Join(), Barrier(), JoinLanes())
        if nbytes:
            contributions = sources(place, landing[rank] + part * room, stride, out + at)
            yield Reduce(contributions, out + at, nbytes, most_blocks=_REDUCING_BLOCKS)
            if bias:
                yield AddBias(begin, end - begin)
        # The fork makes the copies of the results wait for their reduction.
        yield Fork()
        for distance in range(1, size if nbytes else 1):
            yield Copy(results[place.to(distance)] + at, out + at, nbytes)
        if part > 0:
            # A peer's block of `out` held this rank's contribution. Its copy is over since the join of that part.
            yield from unload(part - 1)
    yield from (Join(), Barrier())
    yield from unload(len(parts) - 1)
