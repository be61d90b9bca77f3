"""How a collective on GPUs is carried out: functions of what is the same on all ranks, as measured on H200s."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicomm.collectives.device_packets import Wire
from mpicomm.collectives.exchange import Exchange
from mpicomm.kernels.packets import flags_can_carry, sentinels_can_carry

COUNTS_DIFFER = ("Alltoallv", "Gatherv", "Scatterv")
"""No rank knows what the others send to each other, so they cannot choose alike."""
_IN_STEP = ("Allreduce", "Reduce_scatter", "Reduce_scatter_block")  # all send to all, and reduce what they take
_EVEN_NBYTES = 4096  # less than a step of packets.cu in any launch that uses inboxes again
_MOST_MOVED_NBYTES = 128 << 10
"""Packets with flags take twice the bytes on the links: from here on exchange.cu is faster where nothing is reduced."""
_MOST_REDUCED_FLAGGED_NBYTES = 16 << 10
"""From here on those without flags are faster, where there is a choice."""
_ONE_SHOT_NBYTES = {"flagged": 384 << 10, "sentinel": 768 << 10}
"""How much a rank sends in a one-shot all-reduce at most, before it is two-shot."""
_RELAYED_BCAST_NBYTES = 512 << 10
_RELAYED_REDUCE_NBYTES = 1 << 20


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
    if flags and (nbytes <= _MOST_REDUCED_FLAGGED_NBYTES or (not sentinels and nbytes <= flagged_nbytes)):
        return "flagged"
    return "sentinel" if sentinels and (nbytes <= sentinel_nbytes or in_step) else None


def use_two_shot(operation: str, nbytes: int, size: int, dtype: np.dtype[Any]) -> bool:
    """Whether a message of ``nbytes`` takes two hops: less traffic through one rank's links, but the time of a hop."""
    sentinels = sentinels_can_carry(dtype.name)
    if operation == "Allreduce":
        if size == 2 and sentinels:  # one hop has no more traffic
            return False
        return nbytes * (size - 1) > _ONE_SHOT_NBYTES["sentinel" if sentinels else "flagged"]
    if size == 2:
        return False
    if operation == "Bcast":
        return nbytes >= _RELAYED_BCAST_NBYTES
    return operation == "Reduce" and sentinels and nbytes >= _RELAYED_REDUCE_NBYTES
