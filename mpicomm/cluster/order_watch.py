"""Watches for ranks that wait in MPI for each other for ever, because they have called things in different orders.

A rank may leave a collective on GPUs early, as the root of a Bcast does, and wait in MPI in its next call. If a peer
waits in MPI in another call, neither wait ends. MPI notices nothing, and has no call that ends such a wait. A check at
the beginning of each call would find it only on the rank that comes last. So a thread looks at the pages of the ranks.
It costs the calls nothing, and tells the user what the doctor would tell.
"""

from __future__ import annotations

import threading
import time
import weakref

from mpicomm.activity import layout
from mpicomm.activity.order import WAY_OUT, in_different_orders, orders
from mpicomm.activity.page import CommunicatorRow
from mpicomm.activity.reading import RankCalls, calls_of
from mpicomm.cluster.placement import Placement
from mpicomm.log import logger

_PAUSE_S = 0.25


class OrderWatch:
    """The watch of one communicator of GPUs, until `Free` of the communicator or until nothing refers to the watch.

    It logs an error after this rank's last call was one by MPI for ``timeout_s``. That is no error by itself: the rank
    may compute. Two looks at the pages of all ranks of the node must agree.
    """

    def __init__(self, placement: Placement, row: CommunicatorRow, timeout_s: float) -> None:
        self._placement = placement
        self._row = row
        self._timeout_s = timeout_s
        self._counts = (-1, -1)
        self._since = time.monotonic()
        self._before: list[RankCalls] = []
        self._told = False
        _watch(self)

    @property
    def is_over(self) -> bool:
        """Whether the communicator was freed."""
        return not self._row.words[layout.KEY]

    def look(self) -> None:
        """Log an error if the ranks wait for each other. Local; any thread."""
        words, now = self._row.words, time.monotonic()
        counts = words[layout.CALLS_BY_MPI], self._row.posts
        if counts != self._counts or words[layout.CALL] >= 0:
            self._counts, self._since, self._before = counts, now, []
        elif now - self._since >= self._timeout_s and not self._told:
            before, self._before = self._before, self._calls()
            if before:
                if before == self._before:
                    self._tell(in_different_orders(before))
                self._since, self._before = now, []

    def _calls(self) -> list[RankCalls]:
        here, key = self._placement, self._row.words[layout.KEY]
        found = (calls_of(here.places[rank].pid, key) for rank in here.node_ranks)
        return [calls for calls in found if calls is not None]

    def _tell(self, disordered: list[RankCalls]) -> None:
        if disordered:
            self._told = True
            logger.error(
                "ranks have called different things of %s, and wait for each other in MPI: %s. MPI cannot end these "
                "waits: end the job, and %s",
                disordered[0].name,
                orders(disordered),
                WAY_OUT,
            )


_watched: weakref.WeakSet[OrderWatch] = weakref.WeakSet()
_lock = threading.Lock()
_threads: list[threading.Thread] = []


def _watch(watch: OrderWatch) -> None:
    with _lock:  # another thread may make a communicator, and a WeakSet must not change during an iteration
        _watched.add(watch)
        if not _threads:
            _threads.append(threading.Thread(target=_look_at_all, name="mpicomm-order", daemon=True))
            _threads[0].start()


def _look_at_all() -> None:
    """Look from time to time, until no communicator is left."""
    while True:
        time.sleep(_PAUSE_S)
        with _lock:
            _watched.difference_update([watch for watch in _watched if watch.is_over])
            watches = list(_watched)
            if not watches:
                _threads.clear()
                return
        while watches:  # the next pause must not keep a communicator's row
            watches.pop().look()
