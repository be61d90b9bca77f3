"""Dispatch: the way of each collective call of one communicator, and three forms in which a caller waits for it.

Kernels carry out collectives on device arrays. Between peer domains an engine of room `domains` moves the data. Host
arrays go through mapped memory if mapped memory is faster than MPI, or if MPI lacks the element type or the operation.
Otherwise host arrays go to MPI itself, and so do all collectives of neighbours on host arrays. All other calls on
device arrays go through pinned host copies and MPI. `mpicomm.collectives.call_location` has the rule of the choice, and
says why all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call, in_order
from mpicomm.collectives.call_location import CallLocation
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.fast_path import after_votes, plain_calls
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues.base import Epilogue
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.ops import TREE, op_name
from mpicomm.mpi.request_lists import holding
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest
from mpicomm.session import Session
from mpicomm.ways.around import around, copied, is_for_kernels, on_copies
from mpicomm.ways.by_mpi import MpiWay
from mpicomm.ways.engines import Engines
from mpicomm.ways.location_votes import LocationVotes
from mpicomm.ways.on_gpus import OnGpus
from mpicomm.ways.on_host import Begun, Deferred, InMappedMemory, Way
from mpicomm.ways.reader import Reader


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
        self._mpi = MpiWay(comm, session, reader, votes)
        self._gpus = OnGpus(session, engines, votes)
        self._mapped = InMappedMemory(engines)
        self._deferred = Deferred(votes, session)
        facts = self._size, placement.rank, self._nodes
        self._ordered = ordered = placement.here.reductions == "ordered"
        self._plain = checks = plain_calls(*facts, ordered=ordered)
        self.at_once = after_votes(checks, self._is_on_host) if votes.are_needed else checks
        """The checks of the calls that methods hand to MPI without this class."""
        self._joins = False

    def run(
        self,
        operation: Operation,
        stream: Any,
        algorithm: str,
        send: Any,
        receive: Any,
        op: MPI.Op | None = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        epilogue: Epilogue | None = None,
        wire: Wire | None = None,
    ) -> None:
        """Carry out a blocking collective; on device arrays, enqueue it.

        It takes the fields of `Arguments` one by one, because making an `Arguments` takes a tenth of a known call.
        """
        votes, joins = self._votes, self._joins
        if votes.queue:
            votes.settle()
        gpu = self.engines.gpu
        if gpu and not joins:
            known = gpu.find(operation, algorithm, send, receive, op, root, counts, epilogue, wire)
            if known:
                gpu.enqueue(known, stream, send, receive, blocking=True, vote=self._vote)
                return
        arguments = Arguments(send, receive, op, root, counts, epilogue, wire)
        if joins or self._is_plain(operation, operation.name, arguments, stream, algorithm):
            self._joins = False
            if not joins and votes.agree(operation) == "host":
                self._mpi.carry_out(operation, arguments, blocking=True)
                return
            call = self._reader.placed(self._reader.look(operation, arguments, algorithm, stream), "gpu")
        else:
            call = self._located(self._reader.look(operation, arguments, algorithm, stream), blocking=True)
        self._carry(call, blocking=True)

    def expect_alike(self) -> None:
        """Make no votes, because all ranks pass the same kind of memory in each call. Local, before the first call."""
        self._votes.are_needed, self._vote, self.at_once = False, None, self._plain

    def in_order(self, operation: Operation, op: MPI.Op, order: str) -> MPI.Op:
        """Return the operation of a reduction with ``order``, which is not "auto". Local.

        Raises `InvalidUsageError` for another order than "tree", for another operation than SUM, and on all ranks if
        they make no tree.
        """
        if order != "tree":
            raise InvalidUsageError(f'order={order!r} of {operation}: use "auto" or "tree"')
        if op != MPI.SUM:
            raise InvalidUsageError(
                f'order="tree" of {operation} is for op=MPI.SUM, and op is {op_name(op)}: leave order= out'
            )
        if self._no_tree:
            raise InvalidUsageError(f'order="tree" of {operation}: {self._no_tree}')
        return TREE

    @cached_property
    def _no_tree(self) -> str:
        """Why the ranks do not hold the leaves of a tree in equal blocks; "" if they do."""
        leaves, domains = self._session.placement.here.leaves, self._session.placement.domains
        if leaves % self._size:
            return f"{self._size} ranks cannot hold {leaves} leaves in equal blocks: use 1, 2, 4, ... or {leaves} ranks"
        if [rank for ranks in domains for rank in ranks] != list(range(self._size)) or len({*map(len, domains)}) > 1:
            return f"each peer domain needs equally many ranks that follow each other, and the domains are {domains}"
        return ""

    def _is_on_host(self, operation: Operation) -> bool:
        """Vote in a call on host arrays; return whether it is on the host. If not, `run` is called for it next."""
        self._joins = self._votes.agree(operation) == "gpu"
        return not self._joins

    def _located(self, call: Call, *, blocking: bool) -> Call:
        """Vote in a call that waits for the votes of all ranks; return it at its location. Collective, blocking."""
        place: CallLocation = "gpu" if call.on_device else "host"
        if not call.is_mpis:
            if not call.on_device:
                # Mapped memory alone limits the time of calls on host arrays, and has no nonblocking calls.
                steps = around(call)
                by_mpi = self._way_of(call, blocking=True) is self._mpi if steps is None else steps is on_copies
                limited = blocking and not by_mpi
                place = self._votes.agree(call.operation, partial(self._mapped.give_up, call) if limited else None)
        elif self._votes.are_needed:
            self._votes.vote(call.operation, on_host=True)
        return self._reader.placed(call, place)

    def start(
        self,
        operation: Operation,
        stream: Any,
        algorithm: str,
        send: Any,
        receive: Any,
        op: MPI.Op | None = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        epilogue: Epilogue | None = None,
        wire: Wire | None = None,
    ) -> MPI.Request:
        """Start a nonblocking collective, with the arguments of `run`."""
        given = send, receive, op, root, counts, epilogue, wire
        votes = self._votes
        request = None if votes.queue else self._gpus.start_known(operation, stream, algorithm, given)
        if request is None:
            arguments = Arguments(*given)
            if self._is_plain(operation, operation.nonblocking, arguments, stream, algorithm):
                begin = partial(self._begin_plain, operation, arguments)
                begun = votes.start(votes.vote(operation, on_host=True), begin) if votes.are_needed else begin("host")
            else:
                begun = self._start(self._reader.look(operation, arguments, algorithm, stream))
            if not isinstance(begun, DeferredRequest):
                return begun
            request = begun
        if not request.over:  # after its end nothing reads the buffers
            request.kept = given
        return request

    def _start(self, call: Call) -> MPI.Request:
        """Start a nonblocking call that was read, after a vote if the ranks vote."""
        votes = self._votes
        here: CallLocation = "gpu" if call.on_device else "host"
        if not votes.are_needed:
            return self._begin(call, here)
        if call.is_mpis:
            votes.vote(call.operation, on_host=True)
            call = self._reader.placed(call, here)
            return votes.start(0, lambda place: self._begin(call, here))
        if not call.on_device:
            return votes.start(votes.vote(call.operation, on_host=True), partial(self._begin, call))
        if votes.queue:
            device = self._session.gpu(call.operation.name)
            # The thread in which its turn comes may have another current stream.
            call.stream = device.stream(call.stream, call.device_array)
            if device.is_capturing(call.stream):
                votes.settle()
            else:
                votes.vote(call.operation, on_host=False)
                call.has_voted = True
        return votes.start(0, partial(self._begin, call))

    def _begin(self, call: Call, place: CallLocation) -> MPI.Request:
        begun = self._carry(self._reader.placed(call, place), blocking=False)
        assert begun is not None
        return begun

    def _begin_plain(self, operation: Operation, arguments: Arguments, place: CallLocation) -> MPI.Request:
        if place == "gpu":
            return self._begin(self._reader.look(operation, arguments, "auto", None), place)
        begun = self._mpi.carry_out(operation, arguments, blocking=False)
        assert begun is not None
        return begun

    def prepare(
        self, operation: Operation, arguments: Arguments, info: MPI.Info, stream: Any, algorithm: str
    ) -> MPI.Prequest:
        """Return a persistent collective."""
        call = self._reader.look(operation, arguments, algorithm, stream, only_to_check=True)
        if self._votes.are_needed and call.on_device and not call.is_mpis:
            self._votes.vote(operation, on_host=False)
        return self._prepare(self._located(call, blocking=False), info)

    def _prepare(self, call: Call, info: MPI.Info) -> MPI.Prequest:
        """Return a persistent collective that was read, at its location."""
        operation, arguments, stream, algorithm = call.operation, call.given, call.stream, call.algorithm
        steps = around(call)
        if steps is on_copies:
            return self._prepare_on_copies(call, info)
        # For an input in place that recvcounts cut, MPI would get a copy with the content of this moment.
        whole = not (operation.send == "counted" and call.in_place)
        if steps is None and whole and self._way_of(call, blocking=False) is self._mpi:
            return self._mpi.prepare(operation, call.arguments, info)
        if call.on_device:
            self._session.require_gpu(operation.name)
        place: CallLocation = "gpu" if call.on_device else "host"
        given = in_order(arguments)

        def begin() -> DeferredRequest:
            votes = self._votes
            known = None
            if not votes.queue:
                known = self._gpus.start_known(operation, stream, algorithm, given, votes=False)
            if known is not None:
                return known
            # This reads the arguments again, because symmetric memory among them may have been closed.
            again = self._reader.look(operation, arguments, algorithm, stream, place=place)
            again.has_voted = True
            begun = votes.start(0, lambda _: self._begin(again, place))
            return begun if isinstance(begun, DeferredRequest) else self._deferred.add(begun.Test, lambda: None)

        return PersistentRequest.of(begin)

    def _prepare_on_copies(self, call: Call, info: MPI.Info) -> MPI.Prequest:
        """Return a persistent call that makes its copies at each start. The other ranks have MPI's request."""
        copies, given = copied(self._reader, call)
        prepared = self._prepare(self._reader.read(call.operation, given, call.algorithm, None), info)
        backend = self._session.backend

        def begin() -> DeferredRequest:
            copies.again(backend.stream(call.stream, call.device_array))
            copies.ready()
            prepared.Start()
            return self._deferred.add(prepared.Test, copies.back, backend.prepare_thread)

        return PersistentRequest.of(begin, prepared.Free)

    def barrier(self, stream: Any) -> None:
        """Hold a stream of this rank's GPU until the streams of all ranks have come here."""
        session = self._session.set_up("Barrier")
        if not isinstance(session.backend.device, int):
            raise InvalidUsageError(
                f"Barrier: stream={stream!r} is for GPUs, and this communicator is on the cpu: call Barrier() without "
                "stream"
            )
        engine = self.engines.on_gpu("Barrier").engine
        engine.enqueue(engine.prepare_barrier(), session.backend.stream(stream))

    def again(
        self,
        error: BufferError | KeyError | ValueError | MPI.Exception,
        operation: Operation,
        arguments: Arguments,
        method: str,
    ) -> Any:
        """Carry out a call whose arguments mpi4py has refused with ``error``, or raise; see `MpiWay.again`."""
        result = self._mpi.again(error, operation, arguments, method)
        return result if method == operation.name else holding(result, arguments)

    def _carry(self, call: Call, *, blocking: bool) -> Begun:
        """Enqueue a call that was read, with the steps around it. Collective."""
        steps = around(call)
        if steps is None:
            return self._way_of(call, blocking=blocking).enqueue(call, blocking=blocking)
        part, finish = steps(self._reader, call)
        begun = self._carry(part, blocking=blocking)
        if begun is None:
            finish()
            return None
        if call.device_array is None:
            return self._deferred.add(begun.Test, finish)
        return self._deferred.add(begun.Test, finish, self._session.backend.prepare_thread)

    def _way_of(self, call: Call, *, blocking: bool) -> Way:
        """Return the way of a call without steps around it. Local."""
        if is_for_kernels(call):
            return self._gpus
        if selection.goes_to_mpi(call, self._size, self._nodes, blocking=blocking, ordered=self._ordered):
            return self._mpi
        return self._mapped if blocking else self._deferred

    def _is_plain(self, operation: Operation, method: str, given: Arguments, stream: Any, algorithm: str) -> bool:
        """Return whether a call is certainly MPI's, and needs no exchange of counts before. Local."""
        if algorithm != "auto" or stream is not None or given.epilogue is not None or given.wire is not None:
            return False
        told = operation.send != "counted" or given.counts is not None
        return told and self._plain[method](given.send, given.receive, given.op, given.root)
