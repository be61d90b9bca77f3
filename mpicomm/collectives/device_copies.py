"""Collectives on copy engines, which leave the multiprocessors to compute.

The ranks meet in barriers (direct.cu), which know a rank that does not come or calls something else. Between them each
rank copies straight into the memory of the others, to one at a time and each to another: that keeps every link full.
Few large copies are best: between two of them an engine rests for some microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from mpicomm.collectives.device_direct import landing_place
from mpicomm.collectives.device_launch import Launch
from mpicomm.collectives.exchange import Exchange, Span
from mpicomm.kernels.exchange import PACKET_NBYTES
from mpicomm.kernels.local_reduction import REDUCTION_THREADS, LocalReductionArguments, local_reduction_kernel
from mpicomm.mappings import Mapped

_PARTS = 2
"""Of a piece of an all-reduce: while one is copied, the other is reduced."""
_RELAYED_NBYTES = 4 << 20
"""What a link carries in the time of a barrier with the copies around it, which a part costs more."""
_MOST_RELAYED_PARTS = 16
_ALIGNED_NBYTES = 256
_REDUCING_BLOCKS = 48
"""Enough to reduce a part in the time that the next one is copied; the other multiprocessors are free."""


@dataclass(frozen=True)
class Barrier:
    """All ranks meet."""


@dataclass(frozen=True)
class Fork:
    """Copies that follow wait for all that is ahead."""


@dataclass(frozen=True)
class Join:
    """What follows, but for copies, waits for the copies ahead."""


@dataclass(frozen=True)
class Copy:
    """A copy into a peer's memory; a local one is within this rank's, beside the others."""

    target: int
    source: int
    nbytes: int
    local: bool = False


@dataclass(frozen=True)
class Reduce:
    """A reduction of this rank's memory, sources in order."""

    sources: tuple[int, ...]
    output: int
    nbytes: int


Action = Barrier | Fork | Join | Copy | Reduce


def movement(rank: int, exchange: Exchange, memory: Mapped, relay: Exchange | None = None) -> list[Action]:
    """Return what a rank does in an exchange that moves into symmetric memory.

    With ``relay`` also in that, in which ranks send on what they have received: a part of it, while they receive the
    next one.
    """
    base = memory.pointers[rank]
    parts = 1 if relay is None else _relayed_parts(exchange)

    def copies(moved: Exchange, part: int) -> Iterator[Action]:
        for peer in _in_turn(rank, len(moved.sends)):
            send = moved.sends[peer]
            if send is not None and 0 <= part < parts:
                begin, nbytes = _part(send, part, parts, moved.dtype.itemsize)
                if nbytes:
                    yield Copy(landing_place(moved, peer, memory, base) + begin, send.pointer + begin, nbytes)

    actions: list[Action] = [Barrier(), Fork(), *copies(exchange, 0)]
    send, receive = exchange.sends[rank], exchange.receives[rank]
    if send is not None and receive is not None and send.count and send.pointer != receive.pointer:
        actions.append(Copy(receive.pointer, send.pointer, send.count * exchange.dtype.itemsize, local=True))
    if relay is not None:
        for part in range(parts):
            actions += [Join(), Barrier(), Fork(), *copies(relay, part), *copies(exchange, part + 1)]
    return [*actions, Join(), Barrier()]


def allreduce(
    rank: int, scattered: Exchange, gathered: Exchange, memory: Mapped, staging: Sequence[int], stride: int
) -> list[Action]:
    """Return what a rank does in the two exchanges of a two-shot all-reduce whose output is symmetric memory.

    ``staging`` is where each rank's memory for what the others send begins, ``stride`` what one may send. Each rank's
    shard is reduced by that rank and copied to all others, part by part.
    """
    size, itemsize, base = len(scattered.sends), scattered.dtype.itemsize, memory.pointers[rank]
    reduction = scattered.reduction
    assert reduction is not None and reduction.own is not None

    def reduce(part: int) -> Iterator[Action]:
        assert reduction is not None and reduction.own is not None
        sources = [staging[rank] + _place(source, rank, size) * stride for source in range(size)]
        begin, nbytes = _part(reduction.output, part, _PARTS, itemsize)
        if nbytes:
            addresses = tuple(
                (reduction.own.pointer if source == rank else address) + begin for source, address in enumerate(sources)
            )
            yield Reduce(addresses, reduction.output.pointer + begin, nbytes)

    def scatter(part: int) -> Iterator[Action]:
        for peer in _in_turn(rank, size):
            shard = scattered.sends[peer]
            assert shard is not None
            begin, nbytes = _part(shard, part, _PARTS, itemsize)
            if nbytes:
                target = staging[peer] + _place(rank, peer, size) * stride + begin
                yield Copy(target, shard.pointer + begin, nbytes)

    def gather(part: int) -> Iterator[Action]:
        begin, nbytes = _part(reduction.output, part, _PARTS, itemsize)
        for peer in _in_turn(rank, size):
            if nbytes:
                yield Copy(
                    landing_place(gathered, peer, memory, base) + begin, reduction.output.pointer + begin, nbytes
                )

    # A rank's input is overwritten, in place, only after the barrier that says that it has been copied away.
    actions: list[Action] = [Barrier(), Fork(), *scatter(0), Join()]
    for part in range(_PARTS):
        actions += [Barrier(), *reduce(part)]
        if part + 1 < _PARTS:
            actions += [*scatter(part + 1), Join()]
        actions += [Fork(), *gather(part)]
    return [*actions, Join(), Barrier()]


def local_reduction(action: Reduce, reduction: tuple[str, str]) -> Launch:
    """Return the launch for a reduction of this rank's memory; raises as `local_reduction_kernel`."""
    arguments = LocalReductionArguments(
        output=action.output, nbytes=action.nbytes, num_sources=len(action.sources), sources=action.sources
    )
    blocks = min(_REDUCING_BLOCKS, -(-action.nbytes // (REDUCTION_THREADS * PACKET_NBYTES)))
    return Launch(local_reduction_kernel(reduction), arguments, blocks=blocks, threads=REDUCTION_THREADS)


def _in_turn(rank: int, size: int) -> list[int]:
    return [(rank + distance) % size for distance in range(1, size)]


def _place(source: int, owner: int, size: int) -> int:
    """Return the place of what ``source`` sends in the staging memory of ``owner``."""
    return (source - owner - 1) % size


def _relayed_parts(exchange: Exchange) -> int:
    """Return in how many parts the others send on what they receive in an exchange; the same on all ranks.

    Each part makes what is under way at the end smaller, and costs a barrier: the square root is the least of both.
    """
    assert exchange.lands is not None
    nbytes = sum(span.count for span in exchange.lands if span is not None) * exchange.dtype.itemsize
    return max(1, min(_MOST_RELAYED_PARTS, isqrt(nbytes // _RELAYED_NBYTES)))


def _part(shard: Span, part: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Return where one of the parts of a shard begins, and its bytes."""
    whole = shard.count * itemsize
    step = -(-whole // (parts * _ALIGNED_NBYTES)) * _ALIGNED_NBYTES
    begin = min(part * step, whole)
    return begin, min(step, whole - begin)
