"""Dispatcher: chooses the carrier of each collective call: GPUs, mapped host memory, or MPI.

Kernels carry out collectives on device arrays. Between peer domains an engine of room `domains` moves the data. Host
arrays go through mapped memory if mapped memory is faster than MPI, or if MPI lacks the element type or the operation.
Otherwise host arrays go to MPI itself, and so do all collectives of neighbours on host arrays. All other calls on
device arrays go to MPI on pinned host copies. `mpicomm.dispatch.location_votes` says how all ranks find the same
location, and so the same carrier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from mpi4py import MPI
from numpy import ndarray

from mpicomm.cluster.placement import Placement
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.call_log import CallLocation
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.selection import FastPathCheck, mpi_fast_path, with_votes
from mpicomm.collectives.operations import ALLREDUCE, BLOCKING, NONBLOCKING, PERSISTENT, Operation
from mpicomm.dispatch.engines import Engines
from mpicomm.dispatch.location_votes import LocationVotes
from mpicomm.dispatch.reader import MpiCarrier, Reader
from mpicomm.dispatch.rewrites import (
    Rewrite,
    apply_epilogue,
    copy_to_host,
    pack,
    quantize,
    stage_device_arrays,
    stage_host_arrays,
    start_exchange,
)
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import require_same_device
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest
from mpicomm.session import Session


def checks_of(placement: Placement) -> dict[str, FastPathCheck]:
    """Return the checks of the calls that go straight to MPI if the ranks need no votes. Local."""
    ordered = placement.here.reductions == "ordered"
    return mpi_fast_path(len(placement.places), placement.rank, len(placement.nodes), ordered=ordered)


class Dispatcher:
    """The collectives of the communicator ``comm``.

    The first call that goes through kernels or mapped memory sets ``session`` up, collectively.
    """

    def __init__(self, comm: MPI.Intracomm, session: Session) -> None:
        placement = session.placement
        self._session = session
        self._size = len(placement.places)
        self._nodes = len(placement.nodes)
        self.engines = engines = Engines(session)
        self._votes = votes = LocationVotes(comm, session, engines)
        self._vote = votes.vote_for_gpus if votes.are_needed else None
        self._reader = reader = Reader(comm, session)
        self.ordered_op = reader.ordered_op
        self._mpi = mpi = MpiCarrier(comm, reader, votes)
        self.retry = mpi.retry
        """Carries out a call whose arguments mpi4py has refused, or raises: see `MpiCarrier.retry`."""
        self._ordered = placement.here.reductions == "ordered"
        self._unvoted_fast_path = checks = checks_of(placement)
        self.fast_path = checks
        if votes.are_needed:
            self.fast_path = with_votes(checks, self._agree_on_host, self._may_start_on_host)
        """For each method, whether a call goes straight to MPI. If not, the method calls `run` or `start`."""
        self.nonblocking_comm = partial(votes.comm_for, ALLREDUCE)
        """Returns the communicator for nonblocking calls that go straight to MPI."""
        # What the votes of a check have told, for the call of `run` or `start` that follows.
        self._joins = False
        self._voted = 0

    def run(self, operation: Operation, stream: Any, algorithm: str, given: tuple[Any, ...]) -> None:
        """Carry out a blocking collective; on device arrays, enqueue it."""
        votes, joins = self._votes, self._joins
        if votes.queue:
            votes.drain()
        gpu = self.engines.gpu
        if gpu and not joins and type(given[1]) is not ndarray:  # no call into a host array is known
            known = gpu.find(operation, algorithm, *given)
            if known:
                gpu.enqueue(known, stream, given[0], given[1], blocking=True, vote=self._vote)
                return
        arguments = Arguments._make(given)
        certain = not joins and self._is_for_mpi(operation, operation.name, arguments, stream, algorithm)
        if certain and votes.agree(operation) == "host":
            self._mpi.call(operation, arguments, BLOCKING)
            return
        self._joins = False
        call = self._reader.read(operation, arguments, algorithm, stream)
        call = self._reader.at_location(call, "gpu") if joins or certain else self._locate(call, blocking=True)
        self._post(call, blocking=True)

    def start(self, operation: Operation, stream: Any, algorithm: str, given: tuple[Any, ...]) -> MPI.Request:
        """Start a nonblocking collective."""
        votes, gpu, request = self._votes, self.engines.gpu, None
        if gpu and not votes.queue and type(given[1]) is not ndarray:
            known = gpu.find(operation, algorithm, *given)
            if known:
                request = gpu.start(known, stream, given[0], given[1], self._vote)
        if request is None:
            arguments, number, self._voted = Arguments._make(given), self._voted, 0
            if not number and not self._is_for_mpi(operation, operation.nonblocking, arguments, stream, algorithm):
                begun = self._start(self._reader.read(operation, arguments, algorithm, stream))
            else:
                number = number or votes.vote(operation, on_host=True)
                begun = votes.start(number, partial(self._begin_by_mpi, operation, arguments), "host")
            if not isinstance(begun, DeferredRequest):
                return begun
            request = begun
        if not request.over:  # after its end nothing reads the buffers
            request.kept = given
        return request

    def prepare(
        self, operation: Operation, arguments: Arguments, info: MPI.Info, stream: Any, algorithm: str
    ) -> MPI.Prequest:
        """Return a persistent collective."""
        if self._votes.queue:
            # Started calls of neighbours go over the same communicator of MPI, which matches its calls by their order.
            self._votes.drain()
        call = self._reader.read(operation, arguments, algorithm, stream)
        if call.on_device and not call.needs_mpi:
            self._votes.vote(operation, on_host=False)
        return self._prepare(self._locate(call, blocking=False), info)

    def barrier(self, stream: Any) -> None:
        """Hold a stream of this rank's GPU until the streams of all ranks have come here."""
        session = self._session.set_up("Barrier")
        if not isinstance(session.backend.device, int):
            raise InvalidUsageError(
                f"Barrier: stream={stream!r} is for GPUs, and this communicator is on the cpu: call Barrier() without "
                "stream"
            )
        session.require_usable("Barrier")
        engine = self.engines.on_gpu("Barrier").engine
        engine.enqueue(engine.prepare_barrier(), session.backend.stream(stream))

    def disable_votes(self) -> None:
        """Skip the votes, because all ranks pass the same kind of memory in each call. Local, before the first call."""
        self._votes.are_needed, self._vote, self.fast_path = False, None, self._unvoted_fast_path

    # The location of a call, and its carrier there.

    def _is_for_mpi(self, operation: Operation, method: str, given: Arguments, stream: Any, algorithm: str) -> bool:
        """Return whether MPI carries a call on host arrays out, without an exchange of counts before. Local."""
        if algorithm != "auto" or stream is not None or given.epilogue is not None or given.wire is not None:
            return False
        has_counts = operation.send != "by_recvcounts" or given.counts is not None
        return has_counts and self._unvoted_fast_path[method](given.send, given.receive, given.op, given.root)

    def _agree_on_host(self, operation: Operation) -> bool:
        """Vote in a call on host arrays; return whether all ranks have host arrays. Blocking."""
        self._joins = self._votes.agree(operation) == "gpu"
        return not self._joins

    def _may_start_on_host(self, operation: Operation) -> bool:
        """As `_agree_on_host`, for a start, which waits for no votes: return whether the host is certain. Local."""
        self._voted = self._votes.vote_and_poll(operation)
        return not self._voted

    def _locate(self, call: Call, *, blocking: bool) -> Call:
        """Vote, wait for the votes of all ranks, and return the call at its location. Collective, blocking."""
        location: CallLocation = "gpu" if call.on_device else "host"
        if call.needs_mpi:
            self._votes.vote(call.operation, on_host=True)
        elif not call.on_device:
            name, time_out = call.operation.name, None
            # Mapped memory alone limits the time of calls on host arrays, and has no nonblocking calls.
            if blocking and self._carrier(call, blocking=True) not in ("mpi", stage_device_arrays):

                def time_out(late: list[int]) -> None:
                    self.engines.on_host(name).time_out(call.signature, late)

            location = self._votes.agree(call.operation, time_out)
        return self._reader.at_location(call, location)

    def _carrier(self, call: Call, *, blocking: bool) -> Literal["gpu", "mpi", "mapped", "exchange"] | Rewrite:
        """Return the carrier of a call at its location, or the function that rewrites it as a simpler call. Local.

        The answer depends only on facts that all ranks share, so that no rank waits elsewhere for the others.
        """
        if call.on_device and call.dtype is not None and call.algorithm != "mpi":
            return stage_host_arrays if call.host_operands else "gpu"
        if call.device_array is not None:
            return stage_device_arrays
        if call.epilogue is not None:
            return apply_epilogue
        if call.wire is not None:
            return quantize
        moves = not (call.operation.reduces or call.operation.of_neighbors or call.operation.send == "typed")
        if (
            moves
            and call.algorithm not in ("auto", "mpi")
            and any(each.dtype is None and each.mpi_type is not None for each in call.operands)
        ):
            return pack
        if selection.goes_to_mpi(call, self._size, self._nodes, blocking=blocking, ordered=self._ordered):
            return "mpi"
        return "mapped" if blocking else "exchange"

    def _post(self, call: Call, *, blocking: bool) -> MPI.Request | None:
        """Carry out a call at its location, or enqueue it. Collective.

        A ``blocking`` call returns None once it is finished (host) or enqueued (stream).
        """
        carrier = self._carrier(call, blocking=blocking)
        begun: MPI.Request | None = None
        if callable(carrier):
            part, finish = carrier(self._reader, call)
            begun = self._post(part, blocking=blocking)
            if begun is None:
                finish()
            else:
                begun = self._deferred(begun.Test, finish, uses_device=call.on_device or call.device_array is not None)
        elif carrier == "gpu":
            begun = self._enqueue(call, blocking=blocking)
        elif carrier == "mpi":
            begun = self._mpi.call(call.operation, call.arguments, BLOCKING if blocking else NONBLOCKING)
        elif carrier == "exchange":
            begun = self._deferred(*start_exchange(call, self._votes.comm_for(call.operation), self._session))
        else:
            engines = self.engines
            if engines.tracer is not None:
                name, why = call.algorithm, f'algorithm="{call.algorithm}"'
                if name == "auto":
                    name = selection.mapped_algorithm(call.operation, call.nbytes or 0)
                    why = "by size, on mapped memory"
                engines.tracer.set_algorithm(name if self._nodes == 1 else "groups, mpi", why)
            engines.of_hosts(call.operation.name)(call, call.algorithm)
        return begun

    def _enqueue(self, call: Call, *, blocking: bool) -> DeferredRequest | None:
        """Enqueue a call on GPUs; return its request, None if it is ``blocking``. Collective."""
        operation, given, session = call.operation, call.given, self._session
        session.require_gpu(operation.name)  # before anything looks at device memory
        session.set_up(operation.name)
        for operand in call.operands:
            require_same_device(f"{operation}: {operand.name}", operand.device, session.backend.device)
        session.require_usable(operation.name)
        if not (call.has_voted or call.joins):
            self._votes.vote(operation, on_host=False)  # first, because ranks with host arrays take part in the set-up
        gpu, backend = self.engines.on_gpu(operation.name), session.gpu(operation.name)
        plan = gpu.engine.prepare_call(call, session.mappings, call.algorithm)
        if not call.joins:  # other ranks may pass other memory the next time
            key = (operation, call.algorithm, *given)
            gpu.add(plan, key, by_output=call.device_array is not array_of(given.send), read=call)
        array = call.device_array
        if not blocking:
            return gpu.start(plan, call.stream, array, array)
        gpu.enqueue(plan, call.stream, array, array, blocking=True)
        if call.synchronizes:
            backend.complete(backend.stream(call.stream, array))
        return None

    def _deferred(
        self, done: Callable[[], bool], finish: Callable[[], None], *, uses_device: bool = False
    ) -> DeferredRequest:
        """Return the request of a call that MPI carries out until ``done``, and that ``finish`` completes."""
        prepare_thread = self._session.backend.prepare_thread if uses_device else None
        return self._votes.progress_thread.add(DeferredRequest.of(done, finish), prepare_thread)

    def _start(self, call: Call) -> MPI.Request:
        votes, number = self._votes, 0
        location: CallLocation = "gpu" if call.on_device else "host"
        if not call.on_device or call.needs_mpi:
            number = votes.vote(call.operation, on_host=True)
            if call.needs_mpi:
                call, number = self._reader.at_location(call, location), 0
        elif votes.queue:
            device = self._session.gpu(call.operation.name)
            # The thread in which its turn comes may have another current stream.
            call.stream = device.stream(call.stream, call.device_array)
            if device.is_capturing(call.stream):
                votes.drain()
            else:
                votes.vote(call.operation, on_host=False)
                call.has_voted = True
        return votes.start(number, partial(self._begin, call), location)

    def _begin(self, call: Call, location: CallLocation) -> MPI.Request:
        begun = self._post(self._reader.at_location(call, location), blocking=False)
        assert begun is not None
        return begun

    def _begin_by_mpi(self, operation: Operation, arguments: Arguments, location: CallLocation) -> MPI.Request:
        if location == "gpu":
            return self._begin(self._reader.read(operation, arguments, "auto", None), location)
        begun: MPI.Request = self._mpi.call(operation, arguments, NONBLOCKING)
        return begun

    def _prepare(self, call: Call, info: MPI.Info) -> MPI.Prequest:
        operation, arguments, stream, algorithm = call.operation, call.given, call.stream, call.algorithm
        if stream is not None and call.device_array is not None:
            self._session.gpu(operation.name).stream(stream, call.device_array)  # raises for what is no stream
        carrier = self._carrier(call, blocking=False)
        if carrier == stage_device_arrays:  # the other ranks have MPI's request
            copies, made = copy_to_host(self._reader, call)
            prepared = self._prepare(self._reader.make_call(operation, made, algorithm), info)
            backend = self._session.backend

            def begin_on_copies() -> DeferredRequest:
                copies.refresh(backend.stream(stream, call.device_array))
                copies.wait()
                prepared.Start()
                return self._deferred(prepared.Test, copies.copy_back, uses_device=True)

            return PersistentRequest.of(begin_on_copies, prepared.Free)
        # For an input in place that recvcounts cut, MPI would get a copy with the content of this moment.
        if carrier == "mpi" and not (operation.send == "by_recvcounts" and call.in_place):
            request: MPI.Prequest = self._mpi.call(operation, call.arguments, PERSISTENT, info)
            return request
        if call.on_device:
            self._session.require_gpu(operation.name)
        location: CallLocation = "gpu" if call.on_device else "host"

        def begin() -> DeferredRequest:
            votes, gpu = self._votes, self.engines.gpu
            if gpu and not votes.queue:
                known = gpu.find(operation, algorithm, *arguments)
                if known:
                    return gpu.start(known, stream, arguments.send, arguments.receive)
            # This reads the arguments again, because symmetric memory among them may have been closed.
            restarted = self._reader.read(operation, arguments, algorithm, stream, location=location)
            restarted.has_voted = True
            begun = votes.start(0, partial(self._begin, restarted), location)
            return begun if isinstance(begun, DeferredRequest) else self._deferred(begun.Test, lambda: None)

        return PersistentRequest.of(begin)
