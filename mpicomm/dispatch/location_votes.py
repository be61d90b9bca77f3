"""The location of a collective: how the ranks of a node agree on GPUs or host, although each may pass either memory.

Kernels carry a call out on the GPUs, or MPI or mapped memory carries it out on the host. Ranks that decided differently
would wait for each other for ever. So a rank decides only by facts that are the same on all ranks, or that the ranks
publish:

* The operation, the root, ``algorithm=``, the ranks and their nodes are the same. So are the count, the element type
  and the operation of a reduction, and the bytes of a call with equal counts.
* Datatypes, counts, addresses, contiguity and known plans may differ. They change how a rank packs and launches, and
  never its location. Kernels move elements of every datatype, as bytes if only two ranks know the lengths.
* The memory may differ, too. A rank decides by both buffers, or in a rooted call by the buffer that every rank passes,
  because other ranks do not see the root's second buffer (`is_on_gpus`). One array on a GPU of any rank makes it a
  call on GPUs. An empty buffer at address 0 belongs to no kind of memory.

If MPI carries out a call wherever its arrays are, each rank stages its own device arrays on the host, and makes the
same call of MPI as the others: see `mpicomm.dispatch.rewrites.stage_device_arrays`.

On a communicator of GPUs each rank casts a vote in every collective call: its buffers lie on its GPU, or in host
memory, or nowhere. One vote for GPUs makes it a call on GPUs. Votes are words in shared memory, in the order of the
calls, which is the same on all ranks. So the number of a vote is the number of its call.

* A rank with a device array votes and goes on. It waits for nobody: a vote costs a store.
* Any other rank waits until a rank votes for GPUs, or all ranks have voted. It joins a call on GPUs with pinned
  copies of its arrays: see `mpicomm.dispatch.rewrites.stage_host_arrays`. Other calls go to MPI or mapped memory.
* Such a wait lets MPI make progress. Before a call of MPI it has no limit either: all ranks make the call, so it ends.
  Before a call in mapped memory it ends after ``timeout_s``, as that call would.
* A nonblocking call votes at its start and waits for nobody. If votes are missing, `start` queues it. The queue begins
  calls in their order, because kernels of several ranks meet in the order of their launches. The progress thread
  advances it, so that a rank in another call of MPI still joins the call of its peers.
* MPI matches nonblocking collectives by their order on a communicator. Queued calls begin at other times on each rank,
  and the program makes other calls of MPI meanwhile. So on GPUs they go over a communicator of their own (`comm_for`).
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
from mpicomm.mpi.requests import DeferredRequest, ProgressThread
from mpicomm.session import Session
from mpicomm.waiting import wait_until

Begin = Callable[[CallLocation], MPI.Request]
"""Begins a nonblocking call at its location."""
_POLLS = 8  # for the votes of a start, together some microseconds


def needs_votes(placement: Placement) -> bool:
    """Return whether ranks may pass different kinds of memory. The same on all ranks."""
    return isinstance(placement.here.device, int) and any(len(node) > 1 for node in placement.nodes)


class LocationVotes:
    """The votes of the ranks of this node in the collectives of the communicator ``comm``."""

    def __init__(self, comm: MPI.Intracomm, session: Session, engines: Engines) -> None:
        placement = session.placement
        self._comm = comm
        self._session = session
        self._engines = engines
        self._log: CallLog | None = None
        self.are_needed = needs_votes(placement)
        self.queue: deque[tuple[int, CallLocation, Callable[[CallLocation], None]]] = deque()
        """The started calls that have not begun yet: the arguments of `start`."""
        self._lock = threading.Lock()  # `Wait`, the next call and the progress thread all begin queued calls
        self._beginning_thread: int | None = None
        session.begin_deferred = self._begin_started
        self.progress_thread = ProgressThread()
        """It completes the requests of MPI's calls, and begins queued calls."""

    def comm_for(self, operation: Operation) -> MPI.Intracomm:
        """Return the communicator for nonblocking calls of MPI. Only the given one has a topology."""
        return self._session.private if self.are_needed and not operation.of_neighbors else self._comm

    def vote(self, operation: Operation, *, on_host: bool) -> int:
        """Vote on the next call; return the number of the vote, 0 if the ranks need none.

        Local, but the first vote sets up the log, collectively.
        """
        if not self.are_needed:
            return 0
        return self._open_log(operation, patient=on_host).vote(FOR_HOST if on_host else FOR_GPUS)

    def vote_for_gpus(self) -> None:
        """As `vote`, in a call that was made before."""
        if self._log is not None:
            self._log.vote(FOR_GPUS)

    def withdraw(self) -> None:
        """Take back the vote of a call that MPI has refused before it communicated. Local."""
        if self._log is not None and not self.queue:  # later calls may have voted after a call of the queue
            self._log.withdraw_vote()

    def agree(self, operation: Operation, time_out: Callable[[list[int]], None] | None = None) -> CallLocation:
        """Vote for the host, and return the location of the call. Collective over the node, blocking.

        ``time_out`` is for a call with a time limit. It raises the error, and gets the indices in the node of the ranks
        that have not voted in time.
        """
        if not self.are_needed:
            return "host"
        log = self._log or self._open_log(operation, patient=True)
        number = log.vote(FOR_HOST)
        if self.queue:
            self.drain()
        location = log.location(number)
        if location is not None:
            return location
        row, found = self._session.row.words, list[CallLocation]()

        def poll() -> bool:
            location = log.location(number)
            if location is not None:
                found.append(location)
            return location is not None

        begin_mpi_call(row, operation.number)  # the doctor finds the rank in the call while it waits
        limit_s = self._session.placement.here.timeout_s if time_out else math.inf
        in_time = wait_until(poll, limit_s, self._session.node.progress)
        # Before `time_out`, which may set up the engine, because a late rank that votes meanwhile is still late.
        late = [] if in_time else log.missing_votes(number)
        row[CALLS_BY_MPI] -= 1
        if late and time_out:
            time_out(late)
        if not found:
            poll()  # the last vote has come after the wait
        return found[0]

    def _open_log(self, operation: Operation, *, patient: bool) -> CallLog:
        if self._log is None:
            with self._session.without_deadline() if patient else nullcontext():
                self._log = self._engines.node_log(operation.name)
        return self._log

    def vote_and_poll(self, operation: Operation) -> int:
        """Vote for the host in a start; return 0 if the call may begin on the host, else the number of the vote. Local.

        It polls a few times, because the other ranks mostly start the call soon, and a queued call takes longer.
        """
        log = self._log or self._open_log(operation, patient=True)
        number = log.vote(FOR_HOST)
        if not self.queue:
            for _ in range(_POLLS):
                location = log.location(number)
                if location is not None:
                    return 0 if location == "host" else number
        return number

    def start(self, number: int, begin: Begin, known: CallLocation) -> MPI.Request:
        """Call ``begin`` as soon as all started calls before have begun and the votes of this number are there. Local.

        Return the request of the call. The number is 0 if the call needs no votes, because its location is ``known``.
        """
        if not self.queue and (location := self._location(number, known)):
            return begin(location)
        begun: list[MPI.Request] = []
        errors: list[BaseException] = []  # the wait for the request raises the first one

        def begin_queued(location: CallLocation) -> None:
            try:
                begun.append(begin(location))
            except BaseException as error:
                errors.append(error)

        def done() -> bool:
            if not begun and not errors:
                self.begin_known()
            if errors:
                raise errors[0]
            return bool(begun) and begun[0].Test()

        self.queue.append((number, known, begin_queued))
        return self.progress_thread.add(DeferredRequest.of(done, lambda: None), self._session.backend.prepare_thread)

    def drain(self) -> None:
        """Begin all queued calls. Blocking: the other ranks start them too, before they come to this rank's call."""
        wait_until(self.begin_known, math.inf, self._session.node.progress)

    def _begin_started(self) -> None:
        """Drain the queue, unless this thread is beginning one of its calls, which may set up memory."""
        if self.queue and self._beginning_thread != threading.get_ident():
            self.drain()

    def begin_known(self) -> bool:
        """Begin the queued calls whose location is known, in order. Return whether none is left."""
        with self._lock:
            while self.queue:
                number, known, begin_queued = self.queue[0]
                location = self._location(number, known)
                if location is None:
                    return False
                self._beginning_thread = threading.get_ident()
                try:
                    begin_queued(location)
                finally:
                    self._beginning_thread = None
                self.queue.popleft()  # last: another thread that finds the queue empty launches its call at once
        return True

    def _location(self, number: int, known: CallLocation) -> CallLocation | None:
        if number == 0:
            return known
        assert self._log is not None
        return self._log.location(number)
