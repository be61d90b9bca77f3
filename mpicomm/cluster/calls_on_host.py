"""The calls of other ranks on the host, for the errors of a rank that waits for these ranks in another call.

Most calls on the host go to MPI. They tell other ranks nothing, because they take only about a microsecond. But each
process describes them on its page for the doctor. So a rank whose wait is over looks at the pages of the ranks that
have not come.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpicomm.activity.layout import CALLS_BY_MPI, KEY
from mpicomm.cluster.placement import Placement


class CallsOnHost:
    """The calls by MPI of the ranks of a communicator. ``own`` has the words of this rank's row on its page.

    All methods are local. They take milliseconds, and know nothing of ranks of other nodes and containers.
    """

    def __init__(self, placement: Placement, own: memoryview) -> None:
        self._placement = placement
        self._own = own

    def of(self, rank: int) -> str:
        """Return the call by MPI of a rank that has not come to this rank's call; "" if it is only late."""
        placement = self._placement
        if rank not in placement.node_ranks or rank == placement.rank:
            return ""
        from mpicomm.activity.reading import calls_of  # only for errors

        calls = calls_of(placement.places[rank].pid, self._own[KEY])
        # Ranks make the same calls in the same order, and a rank that is only late has begun no more calls by MPI.
        if calls is None or calls.since_ns is not None or calls.by_mpi <= self._own[CALLS_BY_MPI] or not calls.last:
            return ""
        return f"{calls.last} by MPI"

    def absence_reason(self, ranks: Sequence[int]) -> str:
        """Return a text that names the calls by MPI of ``ranks``, which have not come; "" if they are only late."""
        return "; ".join(f"rank {rank} is in {call}, or has left it" for rank in ranks if (call := self.of(rank)))
