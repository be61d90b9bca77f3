"""How a collective on GPUs is carried out: functions of what is the same on all ranks, as measured on H200s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpicomm.collectives.device_channels import reduction_of, relays
from mpicomm.collectives.device_packets import Wire, fans_out
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.packets import flags_can_carry
from mpicomm.kernels.reductions import sentinels_can_carry

_COUNTS_DIFFER = ("Alltoallv", "Gatherv", "Scatterv")  # no rank knows what the others send: they cannot choose alike
_IN_STEP = ("Allreduce", "Reduce_scatter", "Reduce_scatter_block")  # all send to all, and reduce what they take
_EVEN_NBYTES = 4096  # less than a step of packets.cu in any launch that uses inboxes again
_MOST_MOVED_NBYTES = 128 << 10
"""Packets with flags take twice the bytes on the links: from here on exchange.cu is faster where nothing is reduced."""
_MOST_REDUCED_FLAGGED_NBYTES = 16 << 10
"""From here on those without flags are faster, where there is a choice."""


@dataclass(frozen=True)
class Way:
    """How one exchange is carried out, or two of which the second sends on what the first has brought.

    By packets.cu if there is a ``wire``, by direct.cu if ``direct``, else by exchange.cu.
    """

    step: int
    exchange: Exchange
    merged: Exchange | None
    reduction: tuple[str, str] | None
    wire: Wire | None
    direct: bool


def choose_ways(
    exchanges: Sequence[Exchange],
    signature: Signature,
    rank: int,
    nbytes: int,
    inboxes: tuple[int, int],
    *,
    symmetric: bool,
    algorithm: str = "one_shot",
) -> list[Way]:
    """Return how a collective's exchanges, those of ``algorithm``, are carried out, on all ranks alike.

    ``nbytes`` is the most that one rank sends to another, ``inboxes`` what inboxes of the LL and of the sentinel wire
    hold of it; ``symmetric`` is whether the output is symmetric memory. Raises `InvalidUsageError` for a reduction that
    is not defined.
    """
    operation, ways, pending = signature.operation, [], list(enumerate(exchanges))
    while pending:
        step, exchange = pending.pop(0)
        # Where not all ranks reduce, it is in the first exchange: the kernel is the same on all.
        reduces = signature.op is not None and (step == 0 or exchange.reduction is not None)
        reduction = reduction_of(exchange.dtype, signature.op) if signature.op and reduces else None
        merges = fans_out if reduction else relays
        following = pending[0][1] if pending and merges(rank, exchange, pending[0][1]) else None
        wire = None
        # The ring has an order of its own, which packets do not know.
        if len(exchange.sends) > 1 and operation not in _COUNTS_DIFFER and algorithm != "ring":
            in_step = reduction is not None and keeps_step(operation, exchange, following)
            wire = packet_wire(in_step, nbytes, reduction, *inboxes)
        # Packets fan out what they reduce; exchange.cu relays what it moves.
        merged = following if (wire is not None) == (reduction is not None) else None
        if merged is not None:
            pending.pop(0)
        moves = [each for each in (exchange, merged) if each is not None]
        direct = symmetric and wire is None and reduction is None and all(each.lands is not None for each in moves)
        ways.append(Way(step, exchange, merged, reduction, wire, direct))
    return ways


def longest_nbytes(exchange: Exchange) -> int:
    """Return the most that one rank sends to another, as far as this one can know."""
    spans = [*exchange.sends, *exchange.receives, exchange.reduction.output if exchange.reduction else None]
    return max((span.count for span in spans if span is not None), default=0) * exchange.dtype.itemsize


def keeps_step(operation: str, exchange: Exchange, following: Exchange | None) -> bool:
    """Return whether all ranks send and take packets of a reduction at the same pace; the same on all ranks.

    With ``following`` the results fan out. A rank that took less than it sends would not learn from what it takes that
    another is behind.
    """
    if following is not None:
        return True
    if operation not in _IN_STEP or exchange.reduction is None:
        return False
    counts = [span.count for span in (*exchange.sends, exchange.reduction.output) if span is not None]
    return (max(counts) - min(counts)) * exchange.dtype.itemsize <= _EVEN_NBYTES


def packet_wire(
    in_step: bool, nbytes: int, reduction: tuple[str, str] | None, flagged_nbytes: int, sentinel_nbytes: int
) -> Wire | None:
    """Return how packets.cu carries out an exchange; None if exchange.cu does.

    ``nbytes`` is the most that one rank sends to another; what inboxes hold of it is ``flagged_nbytes`` or
    ``sentinel_nbytes``. With ``in_step`` all send and take at the same pace, so that inboxes can be used again within
    one launch.
    """
    if nbytes == 0:
        return None
    if reduction is None:
        return "flagged" if nbytes <= min(flagged_nbytes, _MOST_MOVED_NBYTES) else None
    flags, sentinels = flags_can_carry(reduction[0]), sentinels_can_carry(reduction[0])
    if flags and nbytes <= flagged_nbytes and (nbytes <= _MOST_REDUCED_FLAGGED_NBYTES or not sentinels):
        return "flagged"
    return "sentinel" if sentinels and (nbytes <= sentinel_nbytes or in_step) else None


def copied_piece_nbytes(nbytes: int, size: int, most_staged_nbytes: int) -> int:
    """Return in pieces of how many bytes copy engines carry an all-reduce out: as few as the staging memory allows."""
    pieces = -(-nbytes * (size - 1) // (size * most_staged_nbytes))
    step = -(-nbytes // max(1, pieces))
    return -(-step // _EVEN_NBYTES) * _EVEN_NBYTES
