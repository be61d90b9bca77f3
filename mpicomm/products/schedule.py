"""The actions of one rank in a product that overlaps with a collective. They know no device, so tests need none.

Copy engines carry the data on a stream beside the products. A barrier says that all copies before it have landed, and
detects a rank that does not come or calls something else.

Products run on a side stream, beside the barriers. A product leaves multiprocessors free in its last wave, so the
barrier after its copies is over before the product ends. If all multiprocessors are at work, the barrier waits until
the product is over, as it would on the stream of the product. No copy that is to run beside a product waits for a
barrier that runs beside the same product: such a copy could begin too late.

At any time all ranks copy to different peers: in turn d each rank copies to the rank at distance d. If the number of
ranks is a power of two, the distance is the exclusive or of both ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mpicomm.collectives.gpu.algorithms.base import Copy, Fork, Join
from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier, Reduce


@dataclass(frozen=True)
class Multiply:
    """The product of ``rows`` rows: rows of ``left`` from ``begin`` on give rows of ``into`` from ``at`` on.

    It waits for all steps before it, except copies. Steps after it do not wait for it before `JoinProducts`.
    """

    left: Literal["a", "gathered"]
    begin: int
    into: Literal["out", "partial", "pulled"]
    at: int
    rows: int


@dataclass(frozen=True)
class JoinProducts:
    """The main stream joins the stream of the products: later steps, and copies after the next fork, wait for them."""


@dataclass(frozen=True)
class AddBias:
    """The bias is added to ``rows`` rows of the result from ``begin`` on."""

    begin: int
    rows: int


Action = Barrier | Fork | Join | Copy | Reduce | Multiply | JoinProducts | AddBias


@dataclass(frozen=True)
class RowCut:
    """How the rows of a product are cut into products. It is the same on all ranks."""

    nested: tuple[int, ...] = ()
    """The rows that a rank has multiplied after each product of an all-gather: see `pieces_of`. () if each shard has a
    product."""
    merged: bool = False
    """Whether a reduce-scatter multiplies the rows of all peers together, and not the rows of each peer at its turn."""
    pairs: bool = False
    """Whether a reduce-scatter multiplies the rows of two ranks at once, the own pair last.

    A product of few rows leaves multiprocessors free, so two ranks' rows take as long as one rank's rows."""
    parts: int = 1
    """The parts of an all-reduce. A part is reduced and sent back while the next part is multiplied."""


@dataclass(frozen=True)
class PeerOrder:
    """The peers of a rank by its turns. ``rows`` are those of a shard, or of the product in an all-reduce."""

    rank: int
    size: int
    rows: int

    def to(self, distance: int) -> int:
        """Return the rank to which this rank copies in a turn."""
        return self.rank ^ distance if self._in_pairs else (self.rank + distance) % self.size

    def source(self, distance: int) -> int:
        """Return the rank whose data comes in a turn."""
        return self.rank ^ distance if self._in_pairs else (self.rank - distance) % self.size

    @property
    def _in_pairs(self) -> bool:
        """Whether two ranks send to each other in a turn. Then shards that lie side by side come in turns that follow
        each other."""
        return self.size & (self.size - 1) == 0

    def turn_of(self, begin: int, end: int) -> int:
        """Return the turn that brings the last of these rows of the whole product; 0 if the rank has all of them."""
        sources = range(begin // self.rows, -(-end // self.rows))
        return max(turn for turn in range(self.size) if self.source(turn) in sources)


def allgather(
    order: PeerOrder, cut: RowCut, row_nbytes: int, a: int, gathered: Sequence[int], gathered_out: int = 0
) -> Iterator[Action]:
    """Yield the actions of an all-gather with its product.

    ``a`` is the address of this rank's shard. ``gathered`` has the address of each rank's memory for all shards.
    ``gathered_out`` is the address of an array of the caller that receives all shards, too, or 0.
    """
    rank, size, rows = order.rank, order.size, order.rows
    nbytes = rows * row_nbytes
    products: list[list[Multiply]] = [[] for _ in range(size)]  # by the turn after which they begin
    own_rows: list[tuple[int, int]] = []
    for turn, begin, end in pieces_of(order, cut):
        if turn == 0:
            products[0].append(Multiply("a", begin - rank * rows, "out", begin, end - begin))
        else:
            products[turn].append(Multiply("gathered", begin, "out", begin, end - begin))
            own_rows.append((max(begin, rank * rows), min(end, (rank + 1) * rows)))
    # The barrier: before it, a product of an earlier call of a peer may still read the memory that these copies
    # overwrite. The fork: no copy overtakes the barrier, which is on another stream.
    yield from (Barrier(), Fork(), Copy(gathered[order.to(1)] + rank * nbytes, a, nbytes))
    for begin, end in own_rows:
        # Rows of the own shard join other shards in a product, so all of them have to lie in one array.
        if begin < end:
            place_nbytes = begin * row_nbytes
            yield Copy(gathered[rank] + place_nbytes, a + place_nbytes - rank * nbytes, (end - begin) * row_nbytes)
    yield from products[0]
    for distance in range(1, size):
        # The join pairs with the barrier. Without the join, a rank could come to the barrier before its copy is over,
        # and the peer would multiply a shard that has not come. The copy of the next turn runs beside the product.
        yield Join()
        if distance + 1 < size:
            yield Copy(gathered[order.to(distance + 1)] + rank * nbytes, a, nbytes)
        yield Barrier()
        if gathered_out:
            # These copies run beside the product, too. The fork makes them wait for the barrier.
            source = order.source(distance) * nbytes
            yield from (Fork(), Copy(gathered_out + source, gathered[rank] + source, nbytes))
            if distance == 1:
                yield Copy(gathered_out + rank * nbytes, a, nbytes)
        yield from products[distance]
    yield JoinProducts()
    if gathered_out:
        yield Join()


def pieces_of(order: PeerOrder, cut: RowCut) -> list[tuple[int, int, int]]:
    """Return the products of a rank after an all-gather: the turn that brings the last rows, and the rows, from and to.

    Rows that are multiplied together lie side by side. A nested cut has a region of rows for 1, 2, 4 and so on shards,
    up to all rows. Each region lies at an edge of the next region, at the side of this rank, and within these shards.
    The first product has the rows of the first region. Each further product has the other rows of the next region.
    """
    if not cut.nested:
        sources = [order.source(turn) for turn in range(order.size)]
        return [(turn, source * order.rows, (source + 1) * order.rows) for turn, source in enumerate(sources)]
    begin, end, pieces = 0, cut.nested[-1], list[tuple[int, int]]()
    for level in range(len(cut.nested) - 2, -1, -1):
        rows = cut.nested[level]
        if order.rank >> level & 1:
            pieces.append((begin, end - rows))
            begin = end - rows
        else:
            pieces.append((begin + rows, end))
            end = begin + rows
    pieces.append((begin, end))
    return [(order.turn_of(*piece), *piece) for piece in reversed(pieces) if piece[0] < piece[1]]


def is_possible(cut: RowCut, size: int, rows: int) -> bool:
    """Return whether the products of a nested cut need no rows that come later; ``rows`` are the rows of a shard."""
    if list(cut.nested) != sorted(cut.nested):
        return False
    for rank in range(size):
        regions = pieces_of(PeerOrder(rank, size, rows), cut)
        if any(turn >= 1 << level for level, (turn, _, _) in enumerate(regions)):
            return False
    return True


def reduce_scatter(
    order: PeerOrder, cut: RowCut, row_nbytes: int, partial: int, inboxes: Sequence[int], out: int, *, bias: bool
) -> Iterator[Action]:
    """Yield the actions of a product with its reduce-scatter.

    ``partial`` is the address of private memory for the whole product of this rank. ``inboxes`` has the address of each
    rank's memory for the contributions of the other ranks. ``out`` is the address of this rank's result.

    If two ranks' rows are multiplied at once, the number of ranks is a power of two. ``inboxes`` also has memory for
    the product of the own pair then, behind the contributions. The reduction of the other rank of the pair reads its
    contribution there. It needs no copy, which would begin when no product runs any more.
    """
    rank, size, rows = order.rank, order.size, order.rows
    nbytes, width = rows * row_nbytes, 2 if cut.pairs else 1
    if cut.merged:
        for begin, end in ((0, rank), (rank + 1, size)):
            if begin < end:
                yield Multiply("a", begin * rows, "partial", begin * rows, (end - begin) * rows)
    for distance in range(width, size, width):
        if not cut.merged:
            first = order.to(distance) & -width
            yield Multiply("a", first * rows, "partial", first * rows, width * rows)
        if distance == width:
            # Before it, a reduction of an earlier call of a peer may still read the memory that the copies, and the
            # last product of a pair, overwrite.
            yield Barrier()
        # They make the copies wait for their product and for the barrier.
        yield from (JoinProducts(), Fork())
        for peer in map(order.to, range(distance, distance + width)):
            yield Copy(inboxes[peer] + slot(rank, peer, size) * nbytes, partial + peer * nbytes, nbytes)
    # The joins pair with the barrier, as in `allgather`. After the barrier all contributions have come, and
    # both products of a pair are over.
    if cut.pairs:
        yield Multiply("a", (rank & -width) * rows, "pulled", 0, width * rows)
        yield from (Join(), JoinProducts(), Barrier())
        of_pair = (size - 1 + (rank & 1)) * nbytes  # from the begin of the memory, also of the other rank's
        contributions = [*sources(order, inboxes[rank], nbytes, inboxes[rank] + of_pair)]
        contributions[rank ^ 1] = inboxes[rank ^ 1] + of_pair
    else:
        yield Multiply("a", rank * rows, "out", 0, rows)
        yield from (Join(), Barrier(), JoinProducts())
        contributions = [*sources(order, inboxes[rank], nbytes, out)]
    yield Reduce(tuple(contributions), out, nbytes, most_blocks=_REDUCING_BLOCKS)
    if bias:
        yield AddBias(0, rows)


_REDUCING_BLOCKS = 128
"""No product runs beside the reduction."""


def slot(source: int, owner: int, size: int) -> int:
    """Return the place of a rank's contribution among the contributions to ``owner``."""
    return (source - owner - 1) % size


def sources(order: PeerOrder, inbox: int, stride: int, own: int) -> tuple[int, ...]:
    """Return the addresses of all contributions to this rank, in the order of ranks."""
    return tuple(
        own if source == order.rank else inbox + slot(source, order.rank, order.size) * stride
        for source in range(order.size)
    )


def bounds(rows: int, parts: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the rows, from and to, of each rank in each part of an all-reduce."""
    blocks = parts * size
    edges = [rows * block // blocks for block in range(blocks + 1)]
    return [
        [(edges[part * size + rank], edges[part * size + rank + 1]) for rank in range(size)] for part in range(parts)
    ]


def allreduce(
    order: PeerOrder,
    cut: RowCut,
    row_nbytes: int,
    inboxes: Sequence[int],
    results: Sequence[int],
    out: int,
    *,
    bias: bool,
) -> Iterator[Action]:
    """Yield the actions of a product with its all-reduce.

    ``inboxes`` has the address of each rank's memory for the contributions to its blocks: for each part a
    slot for each other rank. ``results`` has the address of each rank's memory for the whole result. A rank multiplies
    into ``out``, its result.
    """
    rank, size = order.rank, order.size
    parts = bounds(order.rows, cut.parts, size)
    stride = max(end - begin for blocks in parts for begin, end in blocks) * row_nbytes
    part_stride = (size - 1) * stride

    def unload(part: int) -> Iterator[Copy]:
        for peer, (begin, end) in enumerate(parts[part]):
            if peer != rank and begin < end:
                at, nbytes = begin * row_nbytes, (end - begin) * row_nbytes
                yield Copy(out + at, results[rank] + at, nbytes, local=True)

    for part, blocks in enumerate(parts):
        for distance in range(1, size):
            peer = order.to(distance)
            begin, end = blocks[peer]
            if begin < end:
                yield Multiply("a", begin, "out", begin, end - begin)
            if part == 0 and distance == 1:
                # As in `reduce_scatter`. An earlier call of another kind may still use the memory.
                yield Barrier()
            yield from (JoinProducts(), Fork())
            if begin < end:
                target = inboxes[peer] + part * part_stride + slot(rank, peer, size) * stride
                yield Copy(target, out + begin * row_nbytes, (end - begin) * row_nbytes)
        begin, end = blocks[rank]
        at, nbytes = begin * row_nbytes, (end - begin) * row_nbytes
        if nbytes:
            yield Multiply("a", begin, "out", begin, end - begin)
        # After the barrier the contributions to this part have come, and the results of the previous part.
        yield from (Join(), Barrier(), JoinProducts())
        if nbytes:
            contributions = sources(order, inboxes[rank] + part * part_stride, stride, out + at)
            yield Reduce(contributions, out + at, nbytes, most_blocks=_REDUCING_BLOCKS)
            if bias:
                yield AddBias(begin, end - begin)
        # The fork makes the copies of the results wait for their reduction.
        yield Fork()
        for distance in range(1, size if nbytes else 1):
            yield Copy(results[order.to(distance)] + at, out + at, nbytes)
        if part > 0:
            # A peer's block of `out` held this rank's contribution. Its copy is over since the join of that part.
            yield from unload(part - 1)
    yield from (Join(), Barrier())
    yield from unload(len(parts) - 1)
