"""The order of the calls of ranks, as their pages show it. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from mpicomm.activity.reading import RankCalls

WAY_OUT = "make all collective calls on all ranks in one order, with device arrays on every rank or on no rank"


def in_different_orders(ranks: Sequence[RankCalls]) -> list[RankCalls]:
    """Return the ranks with a last call by MPI that have not made their calls in one order; else an empty list.

    ``ranks`` are of one communicator. MPI does not carry out all calls, and ranks make both kinds of call in one order.
    So ranks with equally many calls by MPI have also made equally many other calls before. A rank with more calls by
    MPI than another rank has not made fewer of the other calls.

    Such ranks may wait in MPI for each other. MPI can neither notice it nor end the waits.
    """
    by_mpi = [calls for calls in ranks if calls.last and calls.since_ns is None]
    return by_mpi if any(_differ(one, other) for one, other in combinations(by_mpi, 2)) else []


def orders(ranks: Sequence[RankCalls]) -> str:
    """Return the calls of the ranks of `in_different_orders`, as text."""
    return "; ".join(
        f"rank {calls.rank}: {calls.last} by MPI, its call {calls.by_mpi} by MPI, after {_others(calls)}"
        for calls in ranks
    )


def _differ(one: RankCalls, other: RankCalls) -> bool:
    more, more_others = one.by_mpi - other.by_mpi, _posts(one) - _posts(other)
    return more_others != 0 if more == 0 else more * more_others < 0


def _posts(calls: RankCalls) -> int:
    return calls.made - calls.by_mpi


def _others(calls: RankCalls) -> str:
    posts = _posts(calls)
    last = f" (the last is {calls.last_post})" if calls.last_post else ""
    return f"{posts} other call{'s' * (posts != 1)}{last}"
