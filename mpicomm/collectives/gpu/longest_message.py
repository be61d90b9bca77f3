"""LongestMessage: the longest message of calls whose lengths are private to the two ranks of each message."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.exchange import Exchange


class CountedPlan(Protocol):
    """The plan of a call with private lengths."""

    private_nbytes: int | None
    """This rank's longest message."""
    is_old: bool
    """Whether the call has to be planned again."""


class LongestMessage:
    """Counts the calls with private lengths, and lets the ranks tell each other their longest message at some of them.

    The ranks tell each other at the calls number 1, 2, 4, 8 and so on. All ranks count alike, because each rank takes
    part in every such call, with data or without. So all come to the same exchanges, and the calls between two
    exchanges cost nothing more.

    The ranks may change the inboxes when they tell each other. So all plans are old before that: a rank that went on
    with a plan for the smaller inboxes would not meet the others.
    """

    def __init__(self, node: Group) -> None:
        self._node = node
        self._calls = 0
        self._nbytes = 0
        self._plans: WeakSet[CountedPlan] = WeakSet()

    @property
    def is_due(self) -> bool:
        """Whether the ranks tell each other in the next call. Local, the same on all ranks."""
        return self._calls & (self._calls + 1) == 0

    def keep(self, plan: CountedPlan, nbytes: int) -> None:
        """Let `count` count a plan, of a call whose longest message has ``nbytes`` on this rank. Local."""
        plan.private_nbytes = nbytes
        self._plans.add(plan)

    def count(self, nbytes: int) -> None:
        """Count a call, which is enqueued, whose longest message has ``nbytes`` on this rank. Local."""
        self._calls += 1
        self._nbytes = max(self._nbytes, nbytes)
        if self.is_due:
            for plan in self._plans:
                plan.is_old = True
            self._plans.clear()

    def agree(self, nbytes: int) -> int:
        """Return the longest message of all ranks and calls, with ``nbytes`` of this rank. Collective, blocking."""
        longest = max(self._nbytes, nbytes)
        self._nbytes = max(self._node.exchange("collectives: longest message", lambda: longest))
        return self._nbytes


def longest_with_peers(exchange: Exchange, rank: int) -> int:
    """Return the most bytes that go one way between ``rank``, whose exchange it is, and another rank."""
    peers = (peer for peer in range(len(exchange.sends)) if peer != rank)
    return max((max(exchange.nbytes_with(peer)) for peer in peers), default=0)
