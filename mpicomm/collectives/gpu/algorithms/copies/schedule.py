"""The actions of one rank in a collective on copy engines: barriers, copies, and reductions of parts.

Every barrier, fork and join guards memory that two ranks use. The comments name the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.copies.landing import InStaging, Landing, Parts
from mpicomm.collectives.gpu.algorithms.steps import Copy, Fork, Join

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


Action = Barrier | Fork | Join | Copy | Reduce
"""A `Step`, or a barrier or reduction that becomes a launch."""


def movement(
    rank: int, exchange: Exchange, parts: Parts, landing: Landing, relay: Exchange | None = None
) -> list[Action]:
    """Return the actions of a rank in an exchange that moves data, or reduces data that has landed in staging memory.

    ``relay`` is an exchange in which ranks send on the data that they have received. They send on one part while they
    receive the next part.
    """
    send, receive = exchange.sends[rank], exchange.receives[rank]
    turns = parts.number + (relay is not None)
    # The barrier: before it, an earlier kernel or call of a peer may still read the memory that these copies overwrite.
    # This is the peer's output or its staging memory. The fork: no copy overtakes the barrier, which is on another
    # stream.
    actions: list[Action] = [Barrier(), Fork(), *_copies(rank, exchange, 0, parts, landing)]
    if send is not None and receive is not None and send.count and send.pointer != receive.pointer:
        actions.append(Copy(receive.pointer, send.pointer, send.count * exchange.dtype.itemsize, local=True))
    for turn in range(turns):
        # The join pairs with the barrier. Without the join, a rank could come to the barrier before its copies are
        # over, and its peers would read data that has not come. After the barrier this part has come, and also the
        # previous part that ranks sent on. The copies of the next part follow the join, so they run meanwhile.
        actions += [Join(), *_copies(rank, exchange, turn + 1, parts, landing), Barrier()]
        if turn + 1 < turns:
            # The fork makes two kinds of copies wait for this barrier. A copy that sends data on must not read the data
            # earlier. The copy of part turn + 2 overwrites the region of part turn - 1. All ranks have left that region
            # when they come to this barrier. The join of the next turn pairs with the fork, because a capture must not
            # end with a forked stream.
            actions.append(Fork())
            if relay is not None:
                actions += _copies(rank, relay, turn, parts, landing, received=exchange)
        actions += _unloading(rank, exchange, turn, parts, landing)
        actions += _reducing(rank, exchange, turn, parts, landing, _MOST_REDUCING_BLOCKS)
        if relay is not None:
            actions += _unloading(rank, relay, turn - 1, parts, landing)
    return actions


def allreduce(
    rank: int, scattered: Exchange, gathered: Exchange, parts: Parts, contributions: InStaging, results: Landing
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
        actions += [Barrier(), *_reducing(rank, scattered, turn, parts, contributions, _REDUCING_BLOCKS)]
        actions += _unloading(rank, gathered, turn - 2, parts, results)
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
    rank: int, exchange: Exchange, part: int, parts: Parts, landing: Landing, *, received: Exchange | None = None
) -> Iterator[Copy]:
    """Yield the copies of a part to all peers; with ``received``, from where that exchange has landed the part."""
    size, itemsize = len(exchange.sends), exchange.dtype.itemsize
    for distance in range(1, size):
        peer = (rank + distance) % size
        send = exchange.sends[peer]
        begin, nbytes = parts.cut(send, part, itemsize)
        if send is not None and nbytes:
            source = send.pointer + begin
            if received is not None:
                source = landing.landed(received, received.receives.index(send), part, begin)
            yield Copy(landing.target(exchange, peer, part, begin), source, nbytes)


def _unloading(rank: int, exchange: Exchange, part: int, parts: Parts, landing: Landing) -> Iterator[Copy]:
    """Yield the copies of a part from where it has landed to where it belongs, if the two places differ."""
    for peer, receive in enumerate(exchange.receives):
        if receive is not None and peer != rank:
            begin, nbytes = parts.cut(receive, part, exchange.dtype.itemsize)
            landed = landing.landed(exchange, peer, part, begin)
            if nbytes and landed != receive.pointer + begin:
                yield Copy(receive.pointer + begin, landed, nbytes, local=True)


def _reducing(
    rank: int, exchange: Exchange, part: int, parts: Parts, landing: Landing, most_blocks: int
) -> Iterator[Reduce]:
    """Yield this rank's reduction of a part, if it reduces."""
    reduction = exchange.reduction
    begin, nbytes = parts.cut(reduction.output if reduction else None, part, exchange.dtype.itemsize)
    if reduction is not None and nbytes:
        assert reduction.own is not None
        sources = tuple(
            reduction.own.pointer + begin if source == rank else landing.landed(exchange, source, part, begin)
            for source in reduction.sources
        )
        yield Reduce(sources, reduction.output.pointer + begin, nbytes, most_blocks)
