"""How the ranks of a node agree where a collective is, although each may pass host arrays or device arrays.

On a communicator of GPUs every collective call is one vote of each rank: its buffers lie on its GPU, or in host memory,
or nowhere. One vote for GPUs makes it a call on GPUs. Votes are words in shared memory, in the order of the calls,
which is the same on all ranks. So a vote says to which call it belongs.

* A rank with a device array votes and goes on. It waits for nobody, and pays a store.
* Any other rank waits until a rank votes for GPUs, or all ranks have voted. In a call on GPUs it takes part with pinned
  copies of its arrays: see `mpicomm.collectives.beside`. Otherwise the call goes to MPI or mapped memory.
* Such a wait lets MPI make progress. Before a call of MPI it has no limit either: all ranks make the call, so it ends.
  Before a call in mapped memory it ends after ``timeout_s``, as that call would.
* A nonblocking call votes at its start and waits for nobody. If votes are missing, `start` queues it. The queue begins
  calls in their order, because kernels of several ranks meet in the order of their launches. The completer's thread
  advances it, so that a rank in another call of MPI still joins the call of its peers.
* MPI matches nonblocking collectives by their order on a communicator. Queued calls begin at other times on each rank,
  and the program makes other calls of MPI meanwhile. So on GPUs they go over a communicator of their own (`comm`).
* A persistent call votes once, at its initialization, because ranks may start persistent calls in other orders.

The ranks of another node see no votes. If all ranks of one node pass host arrays, and a rank of another node passes a
device array, that rank raises `CollectiveTimeoutError`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALLS_BY_MPI
from mpicomm.activity.page import begin_by_mpi
from mpicomm.collectives.call_location import CallLocation
from mpicomm.collectives.call_log import FOR_GPUS, FOR_HOST, CallLog
from mpicomm.collectives.operations import Operation
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.session import Session
from mpicomm.waiting import wait_until
from mpicomm.ways.engines import Engines

Begin = Callable[[CallLocation], MPI.Request]
"""Begins a nonblocking call at its location."""


class LocationVotes:
    """The votes of the ranks of this node in the collectives of the communicator ``given``."""

    def __init__(self, given: MPI.Intracomm, session: Session, engines: Engines) -> None:
        placement = session.placement
        self._given = given
        self._session = session
        self._engines = engines
        self._log: CallLog | None = None
        self.are_needed = isinstance(placement.here.device, int) and any(len(node) > 1 for node in placement.nodes)
        """Whether ranks may pass different kinds of memory. The same on all ranks."""
        self.queue: deque[_Start] = deque()
        """The started calls that have not begun yet."""
        self._turn = threading.Lock()  # `Wait`, the next call and the completer's thread all advance the queue
        self._completer = Completer()

    def comm(self, operation: Operation) -> MPI.Intracomm:
        """Return the communicator for nonblocking calls of MPI. Only the given one has a topology."""
        return self._session.private if self.are_needed and not operation.of_neighbors else self._given

    def vote(self, operation: Operation, *, on_host: bool) -> int:
        """Vote on the next call; return the number of the vote. Local, except that the first one sets up the log."""
        return self._opened(operation, patient=on_host).vote(FOR_HOST if on_host else FOR_GPUS)

    def vote_for_gpus(self) -> None:
        """As `vote`, in a call that was made before."""
        if self._log is not None:
            self._log.vote(FOR_GPUS)

    def withdraw(self) -> None:
        """Take back the vote of a call that MPI has refused before it communicated."""
        if self._log is not None and not self.queue:  # later calls may have voted after a call of the queue
            self._log.withdraw_vote()

    def agree(self, operation: Operation, give_up: Callable[[int], None] | None = None) -> CallLocation:
        """Vote for the host, and return where the call is. Collective over the node, blocking.

        ``give_up`` raises the error of a call that has a time limit, whose votes with this number do not come in time.
        """
        if not self.are_needed:
            return "host"
        log = self._log or self._opened(operation, patient=True)
        number = log.vote(FOR_HOST)
        if self.queue:
            self.settle()
        return log.location(number) or self._await(number, operation, give_up)

    def _await(self, number: int, operation: Operation, give_up: Callable[[int], None] | None) -> CallLocation:
        row, found = self._session.row.words, list[CallLocation]()

        def look() -> bool:
            place = self._place(number)
            if place is not None:
                found.append(place)
            return place is not None

        begin_by_mpi(row, operation.number)  # the doctor finds the rank in the call while it waits
        limit_s = self._session.placement.here.timeout_s if give_up else math.inf
        came = wait_until(look, limit_s, self._session.node.progress)
        row[CALLS_BY_MPI] -= 1
        if give_up and not came:
            give_up(number)
        return found[0]

    def _opened(self, operation: Operation, *, patient: bool) -> CallLog:
        if self._log is None:
            self._log = self._engines.node_log(operation.name, patient=patient)
        return self._log

    def start(self, number: int, begin: Begin) -> MPI.Request:
        """Call ``begin`` when all started calls before have begun and the votes of this number are there. Local.

        The number is 0 for a call on GPUs. Return the request of the call.
        """
        if not self.queue and (place := self._place(number)):
            return begin(place)
        start = _Start(self, number, begin)
        self.queue.append(start)
        return self._completer.add(DeferredRequest.of(start.done, lambda: None), self._session.backend.prepare_thread)

    def settle(self) -> None:
        """Begin all started calls. Blocking: the other ranks start them too, before they come to this rank's call."""
        wait_until(self.advance, math.inf, self._session.node.progress)

    def advance(self) -> bool:
        """Begin the started calls whose location is known, in order. Return whether none is left."""
        with self._turn:
            while self.queue and (place := self._place(self.queue[0].number)):
                self.queue[0].begin(place)
                self.queue.popleft()  # last: another thread that finds the queue empty launches its call at once
        return not self.queue

    def _place(self, number: int) -> CallLocation | None:
        if number == 0:
            return "gpu"
        assert self._log is not None
        return self._log.location(number)


class _Start:
    """A nonblocking call in the queue, and its request after it has begun."""

    def __init__(self, votes: LocationVotes, number: int, begin: Begin) -> None:
        self._votes = votes
        self.number = number
        self._begin = begin
        self._begun: Any = None
        self._error: BaseException | None = None

    def begin(self, place: CallLocation) -> None:
        try:
            self._begun = self._begin(place)
        except BaseException as error:  # the wait for the request raises it
            self._error = error

    def done(self) -> bool:
        if self._begun is None and self._error is None:
            self._votes.advance()
        if self._error is not None:
            raise self._error
        return self._begun is not None and bool(self._begun.Test())
