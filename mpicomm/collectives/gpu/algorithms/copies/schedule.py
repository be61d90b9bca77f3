"""The actions of one rank in a collective on copy engines: barriers, copies, and reductions of parts.

A copy engine carries the blocks of a call as rows of bytes that lie equally far apart, in one copy.

Data lands in symmetric output at once, or in staging memory, from where its rank copies it to the output later. Every
barrier, fork and join guards memory that two ranks use. The comments name the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Copy, Fork, Join
from mpicomm.collectives.packed import Gaps
from mpicomm.kernels.team import PACKET_NBYTES
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mapped

_LEAST_ROW_NBYTES = 256
"""Copy engines of H200s carry such rows as fast as one run of bytes, and rows of 64 bytes at half the speed."""
_MOST_ROWS = 8  # of a block, because an engine rests for some microseconds between two copies
_MOST_PITCH = (1 << 31) - 1  # of CUDA's copies


class Rows(NamedTuple):
    """Rows of ``nbytes`` bytes, ``pitch`` bytes from one to the next, which follow each other in a message."""

    place: int
    nbytes: int
    number: int
    pitch: int

    @property
    def total(self) -> int:
        """The bytes of all rows."""
        return self.nbytes * self.number

    def part(self, begin: int, end: int) -> Iterator[Rows]:
        """Yield the rows of the bytes from ``begin`` up to ``end``: the rest of a row, whole rows, the start of one."""
        while begin < end:
            row, offset = divmod(begin, self.nbytes)
            rest = end - begin
            number = rest // self.nbytes if offset == 0 else 0
            nbytes = self.nbytes if number else min(self.nbytes - offset, rest)
            yield Rows(self.place + row * self.pitch + offset, nbytes, max(number, 1), self.pitch)
            begin += nbytes * max(number, 1)

    def narrowed(self, nbytes: int) -> Rows:
        """Return as many first rows of ``nbytes`` bytes, at most those of a row, as lie equally far apart."""
        return self if nbytes == self.nbytes else Rows(self.place, nbytes, self.nbytes // nbytes, nbytes)


def fits_copy_engines(gaps: Gaps | None) -> bool:
    """Return whether copy engines carry a block with these gaps as fast as one without."""
    if gaps is None:
        return True
    number = sum(prod(region.counts[1:]) for region in gaps.regions)
    fits = all(
        region.run_nbytes >= _LEAST_ROW_NBYTES
        and (region.counts[0] == 1 or region.run_nbytes <= region.strides[0] <= _MOST_PITCH)
        for region in gaps.regions
    )
    return fits and number <= _MOST_ROWS and gaps.grain == PACKET_NBYTES


def in_few_copies(gaps: Gaps | None, others: Gaps | None) -> bool:
    """Return whether a block with these gaps goes to a place with others in few copies, and not in one for each row."""
    rows = [region.run_nbytes for each in (gaps, others) if each for region in each.regions]
    return gaps is None or others is None or len({*rows}) == 1


def rows_of(place: int, nbytes: int, gaps: Gaps | None = None) -> list[Rows]:
    """Return the rows of a block at an address."""
    if gaps is None:
        return [Rows(place, nbytes, 1, nbytes)]
    found = []
    for region in gaps.regions:
        outer = list(zip(region.counts, region.strides, strict=True))[:0:-1]
        for rounds in itertools.product(*(range(count) for count, _ in outer)):
            offset = sum(each * stride for each, (_, stride) in zip(rounds, outer, strict=True))
            first = place + region.offset + offset
            found.append(Rows(first, region.run_nbytes, region.counts[0], region.strides[0]))
    return found


def cut(rows: list[Rows], begin: int, nbytes: int) -> list[Rows]:
    """Return the rows of ``nbytes`` bytes of a message, from byte ``begin`` on."""
    found, end = list[Rows](), begin + nbytes
    for each in rows:
        found += each.part(max(begin, 0), min(end, each.total))
        begin, end = begin - each.total, end - each.total
    return found


def copies_of(targets: list[Rows], sources: list[Rows], *, local: bool = False) -> Iterator[Copy]:
    """Yield the copies from rows to other rows of as many bytes."""
    while sources:
        nbytes = min(targets[0].nbytes, sources[0].nbytes)
        target, source = targets[0].narrowed(nbytes), sources[0].narrowed(nbytes)
        number = min(target.number, source.number)
        if number == 1 or target.pitch == source.pitch == nbytes:
            yield Copy(target.place, source.place, nbytes * number, local)
        else:
            yield Copy(target.place, source.place, nbytes, local, number, target.pitch, source.pitch)
        targets, sources = ([*rows[0].part(nbytes * number, rows[0].total), *rows[1:]] for rows in (targets, sources))


REGIONS = 3
"""One region in which a part arrives, one region that is read, and one region that some rank may still read."""
ALIGNED_NBYTES = 256


@dataclass(frozen=True)
class Parts:
    """The cut of the messages of an exchange into parts.

    ``bounds`` has the offsets in the longest message at which parts begin, and the end of that message.
    """

    bounds: tuple[int, ...]

    @staticmethod
    def equal(longest_nbytes: int, number: int) -> Parts:
        """Return ``number`` parts, or fewer."""
        step = aligned(-(-longest_nbytes // number))
        return Parts((*range(0, longest_nbytes, step), longest_nbytes))

    @staticmethod
    def tapered(longest_nbytes: int, largest_nbytes: int, smallest_nbytes: int) -> Parts:
        """Return parts of up to ``largest_nbytes``. The last parts shrink: each is two thirds of the rest."""
        bounds = [0]
        last = max(min(largest_nbytes, smallest_nbytes), 3 * ALIGNED_NBYTES)  # two thirds of more, rounded up, are less
        while (rest := longest_nbytes - bounds[-1]) > last:
            bounds.append(bounds[-1] + min(aligned(largest_nbytes), aligned(rest * 2 // 3)))
        return Parts((*bounds, longest_nbytes))

    @property
    def number(self) -> int:
        """The number of parts."""
        return len(self.bounds) - 1

    @cached_property
    def largest_nbytes(self) -> int:
        """The size of the largest part, rounded up."""
        return aligned(max(end - begin for begin, end in itertools.pairwise(self.bounds)))

    @cached_property
    def peer_nbytes(self) -> int:
        """The staging memory for one peer: as large as the message, or `REGIONS` regions that parts reuse."""
        return min(aligned(self.bounds[-1]), REGIONS * self.largest_nbytes)

    def cut(self, span: Span | None, part: int, itemsize: int) -> tuple[int, int]:
        """Return the offset in ``span`` at which a part begins, and its bytes; 0 bytes if ``span`` ends before it."""
        if span is None or not 0 <= part < self.number:
            return 0, 0
        begin, end = (min(bound, span.count * itemsize) for bound in self.bounds[part : part + 2])
        return begin, end - begin


@dataclass(frozen=True)
class OutputDestination:
    """The output of all ranks, which is symmetric memory: data lands where it belongs."""

    rank: int
    memory: Mapped

    def target(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        """Return the address, as mapped here, at which a part for ``peer`` lands; ``begin`` is as in `Parts.cut`."""
        assert exchange.targets is not None
        span, pointers = exchange.targets[peer], self.memory.pointers
        assert span is not None
        return pointers[peer] + span.pointer - pointers[self.rank] + begin

    def received_at(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        """Return the address at which a part from ``peer`` has landed on this rank."""
        received = exchange.receives[peer]
        assert received is not None
        return received.pointer + begin


@dataclass(frozen=True)
class StagingDestination:
    """Staging memory, with the methods of `OutputDestination`. Every rank has a part of this memory for each peer.

    ``pointers`` has the address of each rank's staging memory.
    """

    rank: int
    pointers: Sequence[int]
    parts: Parts

    def target(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        return self._place(self.rank, peer, part)

    def received_at(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        return self._place(peer, self.rank, part)

    def _place(self, source: int, owner: int, part: int) -> int:
        size, parts = len(self.pointers), self.parts
        room = (source - owner - 1) % size
        whole = parts.bounds[-1] <= parts.peer_nbytes
        offset = parts.bounds[part] if whole else part % REGIONS * parts.largest_nbytes
        return self.pointers[owner] + room * parts.peer_nbytes + offset


Destination = OutputDestination | StagingDestination


def aligned(nbytes: int) -> int:
    """Return the next multiple of `ALIGNED_NBYTES`."""
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES


_REDUCING_BLOCKS = 48
"""They reduce a part in the time in which copy engines copy the contributions to another part and its results. Other
multiprocessors stay free."""
_MOST_REDUCING_BLOCKS = 128
"""For exchanges that copy only contributions, because there no copy runs beside the last reduction."""


@dataclass(frozen=True)
class Barrier:
    """All ranks meet."""


@dataclass(frozen=True)
class Reduce:
    """A reduction within this rank's memory, sources in order."""

    sources: tuple[int, ...]
    output: int
    nbytes: int
    most_blocks: int = _REDUCING_BLOCKS


GapsByPeer = Sequence[Gaps | None]

Action = Barrier | Fork | Join | Copy | Reduce
"""A `Step`, or a barrier or reduction that becomes a launch."""


def movement(
    rank: int,
    exchange: Exchange,
    parts: Parts,
    destination: Destination,
    relay: Exchange | None = None,
    gaps: tuple[GapsByPeer, GapsByPeer] | None = None,
) -> list[Action]:
    """Return the actions of a rank in an exchange that moves data, or reduces data that has landed in staging memory.

    ``relay`` is an exchange in which ranks send on the data that they have received. They send on one part while they
    receive the next part. ``gaps`` are those in the sends and in the receives, for data that lands in staging memory
    or whose receives have none. A call with a relay has none.
    """
    of_sends, of_receives = gaps or ([None] * len(exchange.sends),) * 2
    send, receive = exchange.sends[rank], exchange.receives[rank]
    turns = parts.number + (relay is not None)
    # The barrier: before it, an earlier kernel or call of a peer may still read the memory that these copies overwrite.
    # This is the peer's output or its staging memory. The fork: no copy overtakes the barrier, which is on another
    # stream.
    actions: list[Action] = [Barrier(), Fork(), *_copies(rank, exchange, 0, parts, destination, of_sends)]
    if send is not None and receive is not None and send.count and send.pointer != receive.pointer:
        nbytes = send.count * exchange.dtype.itemsize
        places = rows_of(receive.pointer, nbytes, of_receives[rank]), rows_of(send.pointer, nbytes, of_sends[rank])
        actions += copies_of(*places, local=True)
    for turn in range(turns):
        # The join pairs with the barrier. Without the join, a rank could come to the barrier before its copies are
        # over, and its peers would read data that has not come. After the barrier this part has come, and also the
        # previous part that ranks sent on. The copies of the next part follow the join, so they run meanwhile.
        actions += [Join(), *_copies(rank, exchange, turn + 1, parts, destination, of_sends), Barrier()]
        if turn + 1 < turns:
            # The fork makes two kinds of copies wait for this barrier. A copy that sends data on must not read the data
            # earlier. The copy of part turn + 2 overwrites the region of part turn - 1. All ranks have left that region
            # when they come to this barrier. The join of the next turn pairs with the fork, because a capture must not
            # end with a forked stream.
            actions.append(Fork())
            if relay is not None:
                actions += _copies(rank, relay, turn, parts, destination, received=exchange)
        actions += _copies_out(rank, exchange, turn, parts, destination, of_receives)
        actions += _reductions(rank, exchange, turn, parts, destination, _MOST_REDUCING_BLOCKS)
        if relay is not None:
            actions += _copies_out(rank, relay, turn - 1, parts, destination)
    return actions


def allreduce(
    rank: int,
    scattered: Exchange,
    gathered: Exchange,
    parts: Parts,
    contributions: StagingDestination,
    results: Destination,
) -> list[Action]:
    """Return the actions of a rank in the two exchanges of a two-shot all-reduce.

    Each rank reduces the ``contributions`` to its shard, and copies the results to its peers.
    """
    # As in `movement`: the barrier guards memory that an earlier call may still use, and the fork makes the copies wait
    # for it.
    actions: list[Action] = [Barrier(), Fork(), *_copies(rank, scattered, 0, parts, contributions), Join()]
    for turn in range(parts.number + 2):
        # The barrier pairs with the last join of every rank. After it, the contributions to part turn and the results
        # of part turn - 2 have come, and ranks may read them. In place, results overwrite a rank's input only after
        # this barrier, because the copies out of that input are over then.
        actions += [Barrier(), *_reductions(rank, scattered, turn, parts, contributions, _REDUCING_BLOCKS)]
        actions += _copies_out(rank, gathered, turn - 2, parts, results)
        actions += _copies(rank, scattered, turn + 1, parts, contributions)
        if turn <= parts.number:
            # The join comes before the next barrier, which says that these contributions and the previous part's
            # results have come.
            actions.append(Join())
        if turn < parts.number:
            # The fork makes the copies of results wait for their reduction. It also makes the contributions of the next
            # turn wait. They overwrite a region that all ranks have left when they come to this turn's barrier.
            actions += [Fork(), *_copies(rank, gathered, turn, parts, results)]
    return actions


def _copies(
    rank: int,
    exchange: Exchange,
    part: int,
    parts: Parts,
    destination: Destination,
    gaps: GapsByPeer = (),
    *,
    received: Exchange | None = None,
) -> Iterator[Copy]:
    """Yield the copies of a part to all peers; with ``received``, from where that exchange has landed the part."""
    size, itemsize = len(exchange.sends), exchange.dtype.itemsize
    for distance in range(1, size):
        peer = (rank + distance) % size
        send = exchange.sends[peer]
        begin, nbytes = parts.cut(send, part, itemsize)
        if send is not None and nbytes:
            sources = cut(rows_of(send.pointer, send.count * itemsize, gaps[peer] if gaps else None), begin, nbytes)
            if received is not None:
                sources = rows_of(destination.received_at(received, received.receives.index(send), part, begin), nbytes)
            yield from copies_of(rows_of(destination.target(exchange, peer, part, begin), nbytes), sources)


def _copies_out(
    rank: int, exchange: Exchange, part: int, parts: Parts, destination: Destination, gaps: GapsByPeer = ()
) -> Iterator[Copy]:
    """Yield the copies of a part from where it has landed to where it belongs, if the two places differ."""
    itemsize = exchange.dtype.itemsize
    for peer, receive in enumerate(exchange.receives):
        if receive is not None and peer != rank:
            begin, nbytes = parts.cut(receive, part, itemsize)
            landed = destination.received_at(exchange, peer, part, begin)
            if nbytes and landed != receive.pointer + begin:
                places = rows_of(receive.pointer, receive.count * itemsize, gaps[peer] if gaps else None)
                yield from copies_of(cut(places, begin, nbytes), rows_of(landed, nbytes), local=True)


def _reductions(
    rank: int, exchange: Exchange, part: int, parts: Parts, destination: Destination, most_blocks: int
) -> Iterator[Reduce]:
    """Yield this rank's reduction of a part, if it reduces."""
    reduction = exchange.reduction
    begin, nbytes = parts.cut(reduction.output if reduction else None, part, exchange.dtype.itemsize)
    if reduction is not None and nbytes:
        assert reduction.own is not None
        sources = tuple(
            reduction.own.pointer + begin if source == rank else destination.received_at(exchange, source, part, begin)
            for source in reduction.sources
        )
        yield Reduce(sources, reduction.output.pointer + begin, nbytes, most_blocks)
