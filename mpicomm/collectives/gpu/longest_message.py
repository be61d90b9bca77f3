"""LongestMessage: the longest message of calls whose lengths are private to the two ranks of each message."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.exchange import Exchange

_MOST_CALLS_BETWEEN = 1024


class CountedPlan(Protocol):
    """The plan of a call with private lengths."""

    private_nbytes: int | None
    """This rank's longest message."""
    is_old: bool
    """Whether the call has to be planned again."""


class LongestMessage:
    """Counts the calls with private lengths, and says when the ranks tell each other their longest message.

    All ranks count alike, because each rank takes part in every such call, with data or without. So all tell each other
    behind the same calls, and the calls in between cost nothing more.
    """

    def __init__(self, node: Group) -> None:
        self._node = node
        self._calls = 0
        self._next = 1
        self._nbytes = 0
        self._plans: WeakSet[CountedPlan] = WeakSet()

    def keep(self, plan: CountedPlan, nbytes: int) -> None:
        """Let a plan be counted, of a call whose longest message has ``nbytes`` on this rank. Local."""
        plan.private_nbytes = nbytes
        self._plans.add(plan)

    def count(self, nbytes: int) -> bool:
        """Count a call whose longest message has ``nbytes`` on this rank; return whether `agree` follows. Local.

        It follows more and more seldom: a program of a few calls sets up what it needs soon, and a long one hardly ever
        waits. The steps have a limit, so that no program has slow calls for long.
        """
        self._calls += 1
        self._nbytes = max(self._nbytes, nbytes)
        if self._calls < self._next:
            return False
        self._next += max(1, min(self._calls // 4, _MOST_CALLS_BETWEEN))
        return True

    def agree(self) -> int:
        """Return the longest message of all ranks in all calls so far. Collective, blocking."""
        self._nbytes = max(self._node.exchange("collectives: longest message", lambda: self._nbytes))
        return self._nbytes

    def make_plans_old(self) -> None:
        """Let all calls with private lengths be planned again; local, after the same call on all ranks.

        A rank that went on with a plan for other inboxes would not meet the others.
        """
        for plan in self._plans:
            plan.is_old = True
        self._plans.clear()


def longest_with_peers(exchange: Exchange, rank: int) -> int:
    """Return the most bytes that go one way between ``rank``, whose exchange it is, and another rank."""
    peers = (peer for peer in range(len(exchange.sends)) if peer != rank)
    return max((max(exchange.nbytes_with(peer)) for peer in peers), default=0)
