"""NetworkWaits: for each rank of this domain the rank of another domain for which it waits, in shared host memory."""

from __future__ import annotations

import numpy as np

from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import HostBackend
from mpicomm.sharing.segments import share
from mpicomm.symmetric.owner import SharedMemory
from mpicomm.waiting import wait_until

_LINE_NBYTES = 64
_ALIVE_S = 0.25  # in this time a waiting rank shows that it is alive, even if ranks take turns on cores and on a GPU


class NetworkWaits(SharedMemory):
    """The `SharedMemory` of a domain: for each rank the rank of another domain for which it waits, and a count.

    If a rank waits too long for a rank of its domain, another rank may be the missing one: the awaited rank may itself
    wait for a rank of another domain. A rank that has stopped in such a wait does not count on, so it is missing
    itself. Construction is collective over ``domain`` and raises as `share` does.
    """

    def __init__(self, domain: Group) -> None:
        backend = HostBackend(domain.timeout_s)
        segments = share(
            domain, backend, "waits", lambda: backend.allocate("memfd", _LINE_NBYTES), lambda: _LINE_NBYTES
        )
        super().__init__("waits", "memfd", segments)
        views = [backend.view(segments[index], (2,), np.dtype(np.int64)) for index in range(domain.size)]
        self._lines = [view.data.cast("B").cast("q") for view in views]
        self._own = domain.rank

    def waits_for(self, rank: int) -> None:
        """Say that this rank waits for ``rank``, and is alive; local and cheap. The caller repeats it."""
        # Pairs with the reads in `awaited`. The words need no order between them, because a reader only asks whether
        # the count goes on, and names the rank that it finds.
        line = self._lines[self._own]
        line[0] = rank + 1
        line[1] += 1

    def waits_no_more(self) -> None:
        """Say that this rank waits for no other domain; local."""
        if self._lines:
            self._lines[self._own][0] = 0

    def awaited(self) -> list[int]:
        """Return the ranks of other domains for which living ranks of this domain wait.

        Local. It returns after all waiting ranks have counted on. If a rank has stopped or no rank waits, it returns
        after `_ALIVE_S`.
        """
        counts = [line[1] for line in self._lines]

        def waiting() -> list[tuple[int, bool]]:
            lines = zip(self._lines, counts, strict=True)
            return [(line[0] - 1, line[1] != count) for line, count in lines if line[0]]

        wait_until(lambda: bool(found := waiting()) and all(alive for _, alive in found), _ALIVE_S)
        return sorted({rank for rank, alive in waiting() if alive})

    def close_peers(self) -> None:
        self._lines.clear()
        super().close_peers()
