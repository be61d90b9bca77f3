"""Where a collective is, and how the ranks of a node agree on that, although each may pass host or device arrays.

Kernels carry a call out on the GPUs, or MPI or mapped memory carries it out on the host. Ranks that decided differently
would wait for each other for ever. So a rank decides only by facts that are the same on all ranks, or that all ranks
learn:

* The operation, the root, ``algorithm=``, the ranks and their nodes are the same. So are the count, the element type
  and the operation of a reduction, and the bytes of a call with equal counts.
* Datatypes, counts, addresses, contiguity and known plans may differ. They change how a rank packs and launches, and
  never where the call is. Kernels move elements of every datatype, as bytes if only two ranks know the lengths.
* The memory may differ, too. A rank decides by both buffers, or in a rooted call by the buffer that every rank passes,
  because other ranks do not see the root's second buffer (`is_on_gpus`). One array on a GPU of any rank makes it a
  call on GPUs. A buffer without elements at address 0 belongs to no kind of memory.

If MPI carries out a call wherever its arrays are, each rank copies its own device arrays, and makes the same call of
MPI as the others: see `mpicomm.dispatch.rewrites.on_copies`.

On a communicator of GPUs every collective call is one vote of each rank: its buffers lie on its GPU, or in host memory,
or nowhere. One vote for GPUs makes it a call on GPUs. Votes are words in shared memory, in the order of the calls,
which is the same on all ranks. So a vote says to which call it belongs.

* A rank with a device array votes and goes on. It waits for nobody, and pays a store.
* Any other rank waits until a rank votes for GPUs, or all ranks have voted. In a call on GPUs it takes part with pinned
  copies of its arrays: see `mpicomm.dispatch.rewrites.on_pinned`. Otherwise the call goes to MPI or mapped memory.
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
from contextlib import nullcontext

from mpi4py import MPI

from mpicomm.activity.layout import CALLS_BY_MPI
from mpicomm.activity.page import begin_mpi_call
from mpicomm.cluster.placement import Placement
from mpicomm.collectives.call_log import FOR_GPUS, FOR_HOST, CallLocation, CallLog
from mpicomm.collectives.operations import Operation
from mpicomm.dispatch.engines import Engines
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.session import Session
from mpicomm.waiting import wait_until

Begin = Callable[[CallLocation], MPI.Request]
"""Begins a nonblocking call at its location."""
_LOOKS = 8  # for the votes of a start, together some microseconds


def needs_votes(placement: Placement) -> bool:
    """Return whether ranks may pass different kinds of memory. The same on all ranks."""
    return isinstance(placement.here.device, int) and any(len(node) > 1 for node in placement.nodes)


class LocationVotes:
    """The votes of the ranks of this node in the collectives of the communicator ``given``."""

    def __init__(self, given: MPI.Intracomm, session: Session, engines: Engines) -> None:
        placement = session.placement
        self._given = given
        self._session = session
        self._engines = engines
        self._log: CallLog | None = None
        self.are_needed = needs_votes(placement)
        self.queue: deque[tuple[int, CallLocation, Callable[[CallLocation], None]]] = deque()
        """The started calls that have not begun yet: what `start` got, and what begins them."""
        self._turn = threading.Lock()  # `Wait`, the next call and the completer's thread all advance the queue
        self._taker: int | None = None  # the thread that has the turn
        session.begin_deferred = self._begin_started
        self.completer = Completer()
        """It completes requests that MPI serves, and advances the queue."""

    def comm(self, operation: Operation) -> MPI.Intracomm:
        """Return the communicator for nonblocking calls of MPI. Only the given one has a topology."""
        return self._session.private if self.are_needed and not operation.of_neighbors else self._given

    def vote(self, operation: Operation, *, on_host: bool) -> int:
        """Vote on the next call; return the number of the vote, 0 if the ranks need none.

        Local, except that the first vote sets up the log.
        """
        if not self.are_needed:
            return 0
        return self._opened(operation, patient=on_host).vote(FOR_HOST if on_host else FOR_GPUS)

    def vote_for_gpus(self) -> None:
        """As `vote`, in a call that was made before."""
        if self._log is not None:
            self._log.vote(FOR_GPUS)

    def withdraw(self) -> None:
        """Take back the vote of a call that MPI has refused before it communicated."""
        if self._log is not None and not self.queue:  # later calls may have voted after a call of the queue
            self._log.withdraw_vote()

    def agree(self, operation: Operation, time_out: Callable[[list[int]], None] | None = None) -> CallLocation:
        """Vote for the host, and return where the call is. Collective over the node, blocking.

        ``time_out`` is for a call that has a time limit. It raises the error of the ranks that have not voted in time,
        which it gets as indices in the node.
        """
        if not self.are_needed:
            return "host"
        log = self._log or self._opened(operation, patient=True)
        number = log.vote(FOR_HOST)
        if self.queue:
            self.settle()
        place = log.location(number)
        if place is not None:
            return place
        row, found = self._session.row.words, list[CallLocation]()

        def look() -> bool:
            place = log.location(number)
            if place is not None:
                found.append(place)
            return place is not None

        begin_mpi_call(row, operation.number)  # the doctor finds the rank in the call while it waits
        limit_s = self._session.placement.here.timeout_s if time_out else math.inf
        came = wait_until(look, limit_s, self._session.node.progress)
        # Before `time_out`, which may set up the engine, because a late rank that votes meanwhile is still late.
        late = [] if came else log.missing_votes(number)
        row[CALLS_BY_MPI] -= 1
        if late and time_out:
            time_out(late)
        if not found:
            look()  # the last vote has come after the wait
        return found[0]

    def _opened(self, operation: Operation, *, patient: bool) -> CallLog:
        if self._log is None:
            with self._session.without_deadline() if patient else nullcontext():
                self._log = self._engines.node_log(operation.name)
        return self._log

    def vote_and_look(self, operation: Operation) -> int:
        """Vote for the host in a start; return 0 if the call may begin on the host, else the number of the vote. Local.

        The other ranks mostly start the call within these looks, and a request of MPI is the cheapest.
        """
        log = self._log or self._opened(operation, patient=True)
        number = log.vote(FOR_HOST)
        if not self.queue:
            for _ in range(_LOOKS):
                place = log.location(number)
                if place is not None:
                    return 0 if place == "host" else number
        return number

    def start(self, number: int, begin: Begin, here: CallLocation) -> MPI.Request:
        """Call ``begin`` when all started calls before have begun and the votes of this number are there. Local.

        The number is 0 for a call that needs no votes, because it is ``here``. Return the request of the call.
        """
        if not self.queue and (place := self._place(number, here)):
            return begin(place)
        begun: list[MPI.Request] = []
        errors: list[BaseException] = []  # the wait for the request raises the first one

        def turn(place: CallLocation) -> None:
            try:
                begun.append(begin(place))
            except BaseException as error:
                errors.append(error)

        def done() -> bool:
            if not begun and not errors:
                self.advance()
            if errors:
                raise errors[0]
            return bool(begun) and begun[0].Test()

        self.queue.append((number, here, turn))
        return self.completer.add(DeferredRequest.of(done, lambda: None), self._session.backend.prepare_thread)

    def settle(self) -> None:
        """Begin all started calls. Blocking: the other ranks start them too, before they come to this rank's call."""
        wait_until(self.advance, math.inf, self._session.node.progress)

    def _begin_started(self) -> None:
        """Begin all started calls, unless this thread is beginning one of them, which may set up memory."""
        if self.queue and self._taker != threading.get_ident():
            self.settle()

    def advance(self) -> bool:
        """Begin the started calls whose location is known, in order. Return whether none is left."""
        with self._turn:
            while self.queue:
                number, here, turn = self.queue[0]
                place = self._place(number, here)
                if place is None:
                    return False
                self._taker = threading.get_ident()
                try:
                    turn(place)
                finally:
                    self._taker = None
                self.queue.popleft()  # last: another thread that finds the queue empty launches its call at once
        return True

    def _place(self, number: int, here: CallLocation) -> CallLocation | None:
        if number == 0:
            return here
        assert self._log is not None
        return self._log.location(number)
