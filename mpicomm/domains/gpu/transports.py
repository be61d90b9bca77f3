"""The transports that move device memory between peer domains in stream order and in CUDA graphs, and their choice.

The ranks agree on a transport that works on all of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from mpicomm import environment
from mpicomm.cluster.agreement import Group, require_same
from mpicomm.cluster.process import query_cuda_aware
from mpicomm.collectives.signature import Signature
from mpicomm.devices.cuda import nccl
from mpicomm.devices.cuda.events import Mark
from mpicomm.devices.cuda.side_streams import ForkedStream
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.domains.mapped import MappedChannels
from mpicomm.domains.mpi_transfers import CudaAwareTransport, PinnedTransport, Transfers
from mpicomm.domains.steps import NetworkStep, Transport, TransportName
from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError, MpicommError, PeerError
from mpicomm.log import logger
from mpicomm.session import Session

T = TypeVar("T")

_POLL_S = 0.05  # the time between two polls of the work in flight
_ERROR_POLL_S = 0.5


@dataclass
class _Watched:
    """A network step in flight: between its two marks NCCL waits for other ranks."""

    call: Signature
    ranks: tuple[int, ...]
    begin: Mark
    end: Mark
    began_s: float = 0.0


class NcclTransport(Transport):
    """The `Transport` by sends and receives of one NCCL communicator. Construction is collective over ``group``.

    NCCL's kernels wait for their peers without a limit. So a watchdog thread polls the network steps. If a step takes
    longer than ``timeout_s`` from its begin on the stream, or if NCCL reports that a peer is gone, it calls
    ``on_failure`` with the error, and aborts the communicator, which ends the kernels. Replays of a graph have no
    marks: in them only NCCL's report of a peer that is gone ends the wait.
    """

    name: TransportName = "nccl"

    def __init__(
        self, group: Group, backend: GpuBackend, on_failure: Callable[[CollectiveTimeoutError | PeerError], None]
    ) -> None:
        self._backend = backend
        self._timeout_s = group.timeout_s
        self._on_failure = on_failure
        ids = group.allgather("NCCL: id", lambda: nccl.unique_id() if group.rank == 0 else b"")

        def create() -> nccl.NcclCommunicator:
            with backend.current():
                return nccl.NcclCommunicator(group.size, ids[0], group.rank)

        # With a timeout, because NCCL waits without a limit for missing ranks.
        self._nccl = run_with_timeout(create, group.timeout_s, "NCCL: not all ranks came to create a communicator")
        self._peers: set[int] = set()
        self._lock = threading.Lock()
        self._failed = False
        self._closed = threading.Event()
        self._watched: deque[_Watched] = deque()
        with backend.current():
            self._side_stream = ForkedStream()
        self._thread = threading.Thread(target=self._watch, name="mpicomm-nccl", daemon=True)
        self._thread.start()

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; it does not block, except for the first network messages between two ranks."""
        if not network_step.sends and not network_step.receives:
            return lambda: None
        side, backend = self._backend.side_streams, self._backend
        capturing = backend.is_capturing(stream)
        with backend.current():
            side_stream = self._side_stream.of(stream)
        side.wait_event(side_stream, begin := side.mark(stream))
        ranks = tuple(sorted({message.rank for message in (*network_step.sends, *network_step.receives)}))

        def exchange() -> None:
            with backend.current():
                self._nccl.exchange(network_step.sends, network_step.receives, side_stream)

        with self._lock:
            if self._failed:
                backend.check()
            if self._peers.issuperset(ranks):
                exchange()
            else:
                what = f"{call}: not all of the ranks {', '.join(map(str, ranks))} came to connect"
                run_with_timeout(exchange, self._timeout_s, what)
                self._peers.update(ranks)
        end = side.mark(side_stream)
        if not capturing:
            self._watched.append(_Watched(call, ranks, begin, end))
        return lambda: side.wait_event(stream, end)

    def close(self, *, aborts: bool = False) -> None:
        """See `Transport`. With ``aborts`` other ranks could not start the transport, and NCCL would wait for them."""
        self._closed.set()
        self._thread.join()  # so that the watchdog does not abort NCCL's communicator, too
        if not self._failed and aborts:
            with self._backend.current():
                self._nccl.abort()
        elif not self._failed:
            self._nccl.destroy()
        with self._backend.current():
            self._side_stream.close()

    def _watch(self) -> None:
        self._backend.prepare_thread()
        next_error_poll_s = time.monotonic() + _ERROR_POLL_S
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            if now > next_error_poll_s:
                next_error_poll_s = now + _ERROR_POLL_S
                if problem := self._nccl.problem():
                    self._fail(PeerError(f"NCCL reports that a rank is gone: {problem}"))
                    return
            overdue = self._overdue(now)
            if overdue is not None:
                names = ", ".join(map(str, overdue.ranks))
                text = (
                    f"{overdue.call}: not all of the ranks {names} came within {self._timeout_s:g} s; the communicator "
                    "is unusable: create another"
                )
                self._fail(CollectiveTimeoutError(text, ranks=overdue.ranks))
                return

    def _overdue(self, now: float) -> _Watched | None:
        passed = self._backend.side_streams.is_done
        while self._watched and passed(self._watched[0].end):
            self._watched.popleft()
        if not self._watched:
            return None
        first = self._watched[0]
        if not first.began_s and passed(first.begin):
            first.began_s = now
        return first if first.began_s and now - first.began_s > self._timeout_s else None

    def _fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        # Before the abort: the abort ends the waiting kernels, and later work runs on with data that never came. Then
        # the next `check` must raise, also the `check` of `start`.
        self._on_failure(error)
        self._failed = True
        with self._backend.current():
            self._nccl.abort()


def require_nccl(uuids: Sequence[bytes]) -> None:
    """Raise `BackendUnavailableError` if there is no NCCL, or if it refuses the ranks because two have the same GPU."""
    reason = nccl.missing()
    if reason is not None:
        raise BackendUnavailableError(f"NCCL is {reason}")
    if len(set(uuids)) < len(uuids) and "NCCL_HOSTID" not in os.environ:
        raise BackendUnavailableError(
            "ranks share a GPU, which NCCL refuses: start one rank for each GPU, or give each rank another NCCL_HOSTID"
        )


def run_with_timeout(act: Callable[[], T], timeout_s: float, what: str) -> T:
    """Run ``act`` on another thread, and return its result. Raises `CollectiveTimeoutError` after ``timeout_s``.

    NCCL offers no other way out of a call that waits for a peer. Then the thread stays in the call until the process
    ends.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="mpicomm-nccl-call", daemon=True).start()
    if not wait([outcome], timeout_s).done:
        raise CollectiveTimeoutError(f"{what} within {timeout_s:g} s")
    error = outcome.exception()
    if error is not None:
        raise HandleError(f"NCCL: {error}") from error
    return outcome.result()


class MappedTransport(Transport):
    """The `Transport` for ranks of one node, which map each other's memory. Construction is collective."""

    name: TransportName = "mapped"

    def __init__(self, session: Session, backend: GpuBackend) -> None:
        if len(session.placement.nodes) > 1:
            raise BackendUnavailableError("the ranks are on several nodes, which map no memory of each other")
        self._channels = session.keep(MappedChannels(session.node, backend, session.kind, session.pads))
        self._backend = backend
        with backend.current():
            # Two streams, because a rank must receive while it waits for a slot.
            self._out, self._into = ForkedStream(), ForkedStream()

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        side = self._backend.side_streams
        with self._backend.current():
            out, into = self._out.of(stream), self._into.of(stream)
            behind = side.mark(stream)
            side.wait_event(out, behind)
            side.wait_event(into, behind)
            self._channels.exchange(network_step, out, into)
        marks = side.mark(out), side.mark(into)

        def finish() -> None:
            for mark in marks:
                side.wait_event(stream, mark)

        return finish

    def close(self) -> None:
        with self._backend.current():
            self._out.close()
            self._into.close()


def choose_transport(
    session: Session,
    backend: GpuBackend,
    transfers: Transfers,
    on_failure: Callable[[CollectiveTimeoutError | PeerError], None],
) -> tuple[Transport, dict[str, str]]:
    """Return the best transport that works on all ranks, or that of MPICOMM_INTERNODE, and why not better ones.

    Collective, with the same answer on all ranks. ``transfers`` carry messages of MPI.

    Raises the same on all ranks: `InvalidUsageError` if MPICOMM_INTERNODE is bad or differs, `BackendUnavailableError`
    if the transport that it names does not work.
    """
    group, uuids = session.group, [place.device_uuid for place in session.placement.places]
    requests = group.allgather("MPICOMM_INTERNODE", environment.internode)
    require_same("MPICOMM_INTERNODE", requests)

    def open_transport(name: str) -> Transport:
        if name == "mapped":
            return MappedTransport(session, backend)
        if name == "mpi":
            group.agree("engine mpi", require_cuda_aware)
            return CudaAwareTransport(transfers, backend)
        if name == "pinned":
            return PinnedTransport(transfers, backend)
        group.agree("engine nccl", lambda: require_nccl(uuids))
        made: list[NcclTransport] = []
        try:
            group.agree("engine nccl: start", lambda: made.append(NcclTransport(group, backend, on_failure)))
        except BaseException:
            for transport in made:  # it started on this rank, and failed on another rank
                transport.close(aborts=True)
            raise
        return made[0]

    def require_cuda_aware() -> None:
        answer = query_cuda_aware()
        if not answer.aware:
            raise BackendUnavailableError(f"MPI takes no device pointers ({answer.how})")

    request = requests[0]
    rejected: dict[str, str] = {}
    for name in environment.INTERNODE if request == "auto" else [request]:
        try:
            transport = open_transport(name)
        except MpicommError as error:
            if group.broken is not None:
                raise
            rejected[name] = str(error)
            if request != "auto":
                raise BackendUnavailableError(f"MPICOMM_INTERNODE={name}: {error}", ranks=error.ranks) from error
        else:
            if group.rank == 0:
                why = "; ".join(f"not {name}: {why}" for name, why in rejected.items())
                log = logger.warning if name == "pinned" and rejected else logger.info
                log("between peer domains: engine %s: %s", name, why or "as asked, or the best there is")
            return transport, rejected
    raise AssertionError("the engine pinned works everywhere")
