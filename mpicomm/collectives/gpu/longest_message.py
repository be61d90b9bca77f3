"""LongestMessage: the longest message of all calls in which only the two ranks of a message know its length."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.mismatch import LoggedCalls

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.plan import Plan

_MOST_CALLS_BETWEEN = 1024


class LongestMessage:
    """Counts the calls with private lengths. After some of them, the checkpoints, ranks read all longest messages.

    All ranks count alike, because each rank takes part in every such call, with data or without. So all ranks have the
    same checkpoints, and the calls in between cost nothing more.

    At checkpoint n a rank reads the longest message that each rank has written at checkpoint n-1, and then writes its
    own. It overwrites its message of checkpoint n-2. All ranks read the same numbers: this rank has seen that each rank
    wrote at n-1, and each rank reads n-2 before it writes at n-1. A rank waits only for a rank that has not come to
    checkpoint n-1. The work that it has enqueued since then waits for that rank, too.
    """

    def __init__(self, call_log: CallLog, calls: LoggedCalls) -> None:
        self._call_log = call_log
        self._ranks = calls
        self._calls = 0
        self._next = 1
        self._checkpoints = 0
        self._nbytes = 0
        self._plans: WeakSet[Plan] = WeakSet()

    def keep(self, plan: Plan, nbytes: int) -> None:
        """Count a plan from now on. The longest message of its call has ``nbytes`` on this rank. Local."""
        plan.private_nbytes = nbytes
        self._plans.add(plan)

    def count(self, nbytes: int) -> bool:
        """Count a call with a longest message of ``nbytes`` on this rank; return whether `agree` follows. Local.

        Checkpoints become rarer and rarer. So a program of a few calls soon sets up the memory that it needs, and a
        long program hardly ever waits. The distance between checkpoints has a limit, so that no program has slow calls
        for long.
        """
        self._calls += 1
        if nbytes > self._nbytes:
            self._nbytes = nbytes
        if self._calls < self._next:
            return False
        self._next += max(1, min(self._calls // 4, _MOST_CALLS_BETWEEN))
        return True

    def agree(self) -> int:
        """Return the longest message of all ranks in all calls up to the previous checkpoint, the same on all ranks.

        The first checkpoint has no previous checkpoint, so its own messages count. Ranks wait there, as in every first
        call. Raises as `LoggedCalls.wait_for`.
        """
        call_log, number = self._call_log, self._checkpoints
        self._checkpoints = number + 1
        if number == 0:
            call_log.write_longest(0, self._nbytes)
        before = max(0, number - 1)
        if call_log.without_longest(before):
            self._ranks.wait_for(lambda: call_log.without_longest(before))
        longest = call_log.longest(before)
        if number:
            call_log.write_longest(number, self._nbytes)
        return longest

    def make_plans_old(self) -> None:
        """Mark all plans of calls with private lengths as old. Local; all ranks call it after the same call.

        A rank that kept a plan for other inboxes would not meet its peers.
        """
        for plan in self._plans:
            plan.is_old = True
        self._plans.clear()
