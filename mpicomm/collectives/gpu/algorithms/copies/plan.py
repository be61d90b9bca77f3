"""Collectives on copy engines, which leave the multiprocessors to compute.

The ranks meet in barriers (direct.cu), which know a rank that does not come or calls something else. Between them each
rank copies straight into the memory of the others, to one at a time and each to another: that keeps every link full.
Few large copies are best: between two of them an engine rests for some microseconds.

What lands in staging memory is moved, or reduced, from there while the next part is on its way. Its regions are used
again, so that it need not be as large as the message: a part goes where the one three before was, which a rank has left
before it comes to the barrier that says that the last but one has arrived.

A barrier that fails holds nothing back: the copies behind it are made, where a kernel would store nothing any more.
They land in the output of the same collective, which has failed on its owner too, or in staging memory, which its owner
may have freed by then. What is mapped here lasts as long as that where it came as a descriptor; where it came as an IPC
handle, CUDA does not promise so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal, NamedTuple

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import GpuCall, Node
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.copies.arguments import (
    REDUCTION_THREADS,
    LocalReductionArguments,
    local_reduction_kernel,
)
from mpicomm.collectives.gpu.algorithms.copies.landing import (
    ALIGNED_NBYTES,
    REGIONS,
    InOutput,
    InStaging,
    Landing,
    Parts,
    aligned,
)
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectPlanner
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.steps import Copy, Fork, Join, Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction

_RELAYED_NBYTES = 4 << 20
"""What a link carries in the time of a barrier with the copies around it, which a part costs more."""
_MOST_RELAYED_PARTS = 16
_SMALLEST_NBYTES = 24 << 20
"""To copy a smaller part to another and to move it alone, at the end, is more work than it saves. In an all-reduce that
is so of all others together: each reduces its own, of which the last is done with when all have copied theirs."""
_REDUCING_BLOCKS = 48
"""Enough to reduce a part in the time that another's contributions, and its results, are copied: others are free."""
_MOST_REDUCING_BLOCKS = 128
"""Where nothing but contributions is copied, and the last reduction is what is left to do at the end."""


@dataclass(frozen=True)
class Barrier:
    """All ranks meet."""


@dataclass(frozen=True)
class Reduce:
    """A reduction of this rank's memory, sources in order."""

    sources: tuple[int, ...]
    output: int
    nbytes: int
    most_blocks: int = _REDUCING_BLOCKS


Action = Barrier | Fork | Join | Copy | Reduce
"""A `Step`, or one that `CopyEngines` turns into a launch."""


Then = Literal["nothing", "relay", "gather"]
"""What follows an exchange: ranks send on what they have received, or what they have reduced."""


class Copying(NamedTuple):
    """How copy engines carry a call out: its exchanges, and the memory in which data is staged."""

    exchange: Exchange
    following: Exchange | None
    """The exchange in which ranks send on the data of the first."""
    then: Then
    parts: Parts
    contributions_nbytes: int
    """Staging memory of each rank for the contributions of others to a reduction."""
    staging_nbytes: int
    """The same, and behind it the staging memory for results that cannot go straight to their place."""


class CopyEngines:
    """Copy engines move the data between barriers of the ranks, and leave most multiprocessors to other kernels."""

    name = "copy_engine"
    in_rank_order = True
    into_memory = True

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return bool(operation.copies)

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        return None

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        nbytes = _copying(call, node).staging_nbytes
        return (_request(nbytes),) if nbytes else ()

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        planner, barriers = DirectPlanner.of(node), 0  # counted, because ranks without a part have fewer actions
        for action in _actions(call, node):
            if isinstance(action, Barrier):
                yield planner.barrier(call.tag(barriers, into_memory=True), after_copies=True)
                barriers += 1
            elif isinstance(action, Reduce):
                assert call.reduction is not None
                yield local_reduction(action, call.reduction)
            else:
                yield action


def _copying(call: GpuCall, node: Node) -> Copying:
    reduces, staged = call.operation.reduces, call.memory is None
    following: Exchange | None = None
    if call.operation.copies == "two_shot":
        exchange, second = call.two_shot.first, call.two_shot.second
        longest_nbytes = call.two_shot.longest_nbytes
        # Between two ranks no third rank is left to send a broadcast on to.
        following = second if reduces or node.size > 2 else None
    else:
        exchange = call.one_shot
        longest_nbytes = exchange.longest_nbytes
    then: Then = "nothing" if following is None else "gather" if reduces else "relay"
    parts = parts_of(longest_nbytes, node.size, node.most_staged_nbytes, reduces=reduces, then=then, staged=staged)
    all_rooms = (node.size - 1) * parts.room_nbytes
    contributions_nbytes = (then == "gather") * all_rooms
    return Copying(exchange, following, then, parts, contributions_nbytes, contributions_nbytes + staged * all_rooms)


def _request(nbytes: int) -> Request:
    return Request("collectives: copies", 1 << (nbytes - 1).bit_length())  # few sizes are ever asked for


def _actions(call: GpuCall, node: Node) -> list[Action]:
    rank, copying = node.rank, _copying(call, node)
    exchange, following, parts = copying.exchange, copying.following, copying.parts
    pointers: Sequence[int] = ()
    if copying.staging_nbytes:
        pointers = node.arena.region(_request(copying.staging_nbytes)).pointers
    landing: Landing
    if call.memory is not None:
        landing = InOutput(rank, call.memory)
    else:
        landing = InStaging(rank, [pointer + copying.contributions_nbytes for pointer in pointers], parts)
    if following is None or copying.then == "relay":
        return movement(rank, exchange, parts, landing, following)
    return allreduce(rank, exchange, following, parts, InStaging(rank, pointers, parts), landing)


def parts_of(
    longest_nbytes: int, size: int, most_staged_nbytes: int, *, reduces: bool, then: Then, staged: bool
) -> Parts:
    """Return in which parts ranks send each other up to ``longest_nbytes``; the same on all ranks.

    ``staged`` is whether what comes, at last, lands in staging memory, of which a rank has ``most_staged_nbytes``.
    """
    rooms = ((then == "gather") + staged) * (size - 1)
    # There is room for all of it, or for regions that are used again and again.
    largest = longest_nbytes
    if rooms * aligned(longest_nbytes) > most_staged_nbytes:
        largest = most_staged_nbytes // (REGIONS * rooms * ALIGNED_NBYTES) * ALIGNED_NBYTES
    number = 1
    if then == "relay":
        # Each part makes what is left to do at the end smaller, and costs time: the square root is the least of both.
        number = max(1, min(_MOST_RELAYED_PARTS, isqrt(longest_nbytes * (size - 1) // _RELAYED_NBYTES)))
    elif reduces:
        number = 2  # one is reduced while the other is copied
    if staged and then != "relay":
        # What is left to do at the end is to move the last part; to move any other takes as long as to copy a third.
        smallest = _SMALLEST_NBYTES * (size - 1 if then == "gather" else 1)
        return Parts.tapered(longest_nbytes, min(largest, -(-longest_nbytes // number)), smallest)
    return Parts.equal(longest_nbytes, max(number, -(-longest_nbytes // largest)))


def movement(
    rank: int, exchange: Exchange, parts: Parts, landing: Landing, relay: Exchange | None = None
) -> list[Action]:
    """Return what a rank does in an exchange that moves, or reduces what has landed in staging memory.

    With ``relay`` also in that, in which ranks send on what they have received: a part of it, while they receive the
    next one.
    """
    send, receive = exchange.sends[rank], exchange.receives[rank]
    turns = parts.number + (relay is not None)
    # The barrier: before it, another rank's earlier work may still read the memory that these copies overwrite: its
    # output, or staging memory of an earlier call. The fork: a copy does not pass the barrier on the other stream.
    actions: list[Action] = [Barrier(), Fork(), *_copies(rank, exchange, 0, parts, landing)]
    if send is not None and receive is not None and send.count and send.pointer != receive.pointer:
        actions.append(Copy(receive.pointer, send.pointer, send.count * exchange.dtype.itemsize, local=True))
    for turn in range(turns):
        # The join pairs with the barrier: a rank that came to it before its copies were over would let the others read
        # what has not come. After it this part is there, and what was sent on of the one before. The next part is
        # behind the join, and copied meanwhile.
        actions += [Join(), *_copies(rank, exchange, turn + 1, parts, landing), Barrier()]
        if turn + 1 < turns:
            # What is sent on must not be read before this barrier; and the part after the next, which goes where the
            # one before this was, must not be copied before all have left that, as they have when they come here. The
            # join of the next turn pairs with it: a capture must not end with a forked stream.
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
    """Return what a rank does in the two exchanges of a two-shot all-reduce.

    Each rank's shard of the ``contributions`` is reduced by that rank, and the results copied to all others.
    """
    # As in `movement`: the barrier guards memory that an earlier call may still use, the fork keeps copies behind it.
    actions: list[Action] = [Barrier(), Fork(), *_copies(rank, scattered, 0, parts, contributions), Join()]
    for turn in range(parts.number + 2):
        # Pairs with the last join of every rank: the contributions to this part have come, and the results of the last
        # but one, neither of which may be read before. In place, a rank's input is overwritten only now, when it says
        # that it has been copied away.
        actions += [Barrier(), *_reducing(rank, scattered, turn, parts, contributions, _REDUCING_BLOCKS)]
        actions += _unloading(rank, gathered, turn - 2, parts, results)
        actions += _copies(rank, scattered, turn + 1, parts, contributions)
        if turn <= parts.number:
            # Before the next barrier, which says that these contributions, and the results of the last part, have come.
            actions.append(Join())
        if turn < parts.number:
            # Results are copied when they are reduced. The fork also holds the contributions of the next turn, which go
            # into a region again: all ranks had left it when they came to this turn's barrier.
            actions += [Fork(), *_copies(rank, gathered, turn, parts, results)]
    return actions


def local_reduction(action: Reduce, reduction: Reduction) -> Launch:
    """Return the launch for a reduction of this rank's memory; raises as `local_reduction_kernel`."""
    arguments = LocalReductionArguments(
        output=action.output, nbytes=action.nbytes, num_sources=len(action.sources), sources=action.sources
    )
    blocks = min(action.most_blocks, -(-action.nbytes // (REDUCTION_THREADS * PACKET_NBYTES)))
    return Launch(local_reduction_kernel(reduction), arguments, blocks=blocks, threads=REDUCTION_THREADS)


def _copies(
    rank: int, exchange: Exchange, part: int, parts: Parts, landing: Landing, *, received: Exchange | None = None
) -> Iterator[Copy]:
    """Yield the copies of a part to all others; of what this rank has ``received``, from where that has landed."""
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
    """Yield the copies of a part from where it has landed to where it belongs, if that is elsewhere."""
    for peer, receive in enumerate(exchange.receives):
        if receive is not None and peer != rank:
            begin, nbytes = parts.cut(receive, part, exchange.dtype.itemsize)
            landed = landing.landed(exchange, peer, part, begin)
            if nbytes and landed != receive.pointer + begin:
                yield Copy(receive.pointer + begin, landed, nbytes, local=True)


def _reducing(
    rank: int, exchange: Exchange, part: int, parts: Parts, landing: Landing, most_blocks: int
) -> Iterator[Reduce]:
    """Yield the reduction of a part of what this rank reduces, if it does."""
    reduction = exchange.reduction
    begin, nbytes = parts.cut(reduction.output if reduction else None, part, exchange.dtype.itemsize)
    if reduction is not None and nbytes:
        assert reduction.own is not None
        sources = tuple(
            reduction.own.pointer + begin if source == rank else landing.landed(exchange, source, part, begin)
            for source in reduction.sources
        )
        yield Reduce(sources, reduction.output.pointer + begin, nbytes, most_blocks)
