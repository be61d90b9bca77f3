"""Collectives: which way each collective call of one communicator goes.

Kernels carry collectives on device arrays, and between cliques an engine of room `internode`. Host arrays go through
mapped memory where that is faster than MPI, or where MPI lacks the element type or the operation; else to MPI itself,
as do all collectives of neighbours. All other calls on device arrays go through pinned host copies and MPI. `place` has
the rule of the choice, and why all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomm.activity.layout import by_mpi
from mpicomm.activity.page import begin_mpis
from mpicomm.collectives.algorithm_argument import require_known, require_possible
from mpicomm.collectives.beside import PinnedCopies
from mpicomm.collectives.call import Arguments, Call, is_in_place
from mpicomm.collectives.engines import Engines
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.crossover import measure
from mpicomm.collectives.host.fast_path import is_plainly_mpis, plain_array
from mpicomm.collectives.neighborhood import Neighborhood, neighborhood_of
from mpicomm.collectives.operations import ALLREDUCE, Operation
from mpicomm.collectives.place import Place
from mpicomm.collectives.root_copies import copies_on_host
from mpicomm.collectives.witness import Witness
from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import parse
from mpicomm.mpi.buffers import BufferRefusedError, array_of
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.host_copies import announce, out_of_place, through_host
from mpicomm.mpi.location import refuse_stream, require_here
from mpicomm.mpi.ops import AVG, op_name
from mpicomm.mpi.requests import Completer, DeferredRequest, PersistentRequest, Work, holding
from mpicomm.session import Session

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.plan_cache import KnownCall, PlanCache

_BYTE = np.dtype(np.uint8)


class MessageCall(NamedTuple):
    """The arguments of a message in stream order, in the order in which `PlanCache.find` takes them."""

    operation: str
    algorithm: str
    send: Any
    receive: Any
    op: None
    route: tuple[int, int, int, int]
    """The destination and its tag, the source and its tag."""
    counts: None = None


REFUSALS = (BufferError, KeyError, ValueError, MPI.Exception)
"""The errors with which mpi4py and MPI refuse the arguments of a call, and which `Collectives.refused` puts in words.
"""
_FAULTS_OF_ARGUMENTS = (MPI.ERR_ARG, MPI.ERR_BUFFER, MPI.ERR_COUNT, MPI.ERR_OP, MPI.ERR_ROOT, MPI.ERR_TYPE)


class Collectives:
    """The collectives of the communicator ``comm``.

    The first call that goes through kernels or mapped memory sets ``session`` up, collectively.
    """

    def __init__(self, comm: MPI.Intracomm, session: Session) -> None:
        placement = session.placement
        self._comm = comm
        self._session = session
        self._rank = placement.rank
        self._size = len(placement.places)
        self._nodes = len(placement.nodes)
        self._completer = Completer()
        self._crossover = 0
        self._neighborhood: Neighborhood | None = None
        self.engines = Engines(session)
        self._witness = Witness(session, self.engines.board)

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
    ) -> None:
        """Carry out a blocking collective; on device arrays, enqueue it.

        It takes `Arguments` one by one, because making one would take a tenth of the time of a known call.
        """
        gpu = self.engines.gpu
        if gpu:
            known = gpu.find(operation, algorithm, send, receive, op, root, counts)
            if known:
                gpu.run(known, stream, send, receive)
                return
        arguments = Arguments(send, receive, op, root, counts)
        crossover = self._crossover and self._crossover_of(op)
        automatic = algorithm == "auto" and stream is None
        if automatic and is_plainly_mpis(operation, arguments, self._size, self._nodes, crossover):
            if operation.of_neighbors:
                self._neighbors()
            if self._witness.is_needed:
                self._witness.tell(operation, on_host=True)
            self._mpi(operation, arguments)
            return
        call = self._read(operation, arguments, algorithm, stream)
        if call.on_device:
            self._complete_copies(call, self._enqueue(call, arguments, stream, algorithm))
            return
        if call.device_array is not None:
            copies, given = copies_on_host(self._session, call, stream)
            self.run(operation, None, algorithm, given.send, given.receive, op, root, given.counts)
            copies.back()
            return
        refuse_stream(operation.name, stream)
        if selection.is_mpis(call, algorithm, self._size, self._nodes, crossover):
            self._witness.tell(operation, on_host=True)
            self._mpi(operation, call.arguments)
        elif (
            algorithm == "auto"
            and not self._crossover
            and self._nodes == 1
            and selection.depends_on_crossover(call, self._size)
        ):
            self._crossover = measure(self._comm, self.engines.on_host(operation.name))
            self.run(operation, stream, algorithm, send, receive, op, root, counts)
        else:
            self._witness.tell(operation, on_host=True)
            self._run_on_host(call, algorithm)

    def run_with_epilogue(self, arguments: Arguments, stream: Any, algorithm: str) -> None:
        """Carry out a blocking all-reduce with an epilogue; on device arrays, enqueue it."""
        gpu, known = self.engines.gpu, self._find(ALLREDUCE, arguments, algorithm)
        if gpu and known:
            gpu.run(known, stream, arguments.send, arguments.receive)
            return
        call = self._read(ALLREDUCE, arguments, algorithm, stream)
        if call.on_device:
            self._complete_copies(call, self._enqueue(call, arguments, stream, algorithm))
        else:
            refuse_stream(ALLREDUCE.name, stream)
            self._finish_on_host(call, algorithm)

    def refused(
        self,
        error: BufferError | KeyError | ValueError | MPI.Exception,
        operation: Operation,
        send: Any,
        receive: Any,
        op: MPI.Op | None = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
    ) -> InvalidUsageError:
        """Return the error for arguments that mpi4py has refused with ``error``: the one that larger buffers get.

        Local. mpi4py looks at the buffers of small calls alone, because that takes least time. Raises ``error`` itself
        if it is MPI's and no fault of this rank's arguments.
        """
        try:
            self._call(operation, Arguments(send, receive, op, root, counts), "auto")
        except InvalidUsageError as named:
            return named
        if isinstance(error, MPI.Exception):
            if error.Get_error_class() not in _FAULTS_OF_ARGUMENTS:
                raise error
            return RefusedByMpiError(f"{operation}: MPI refuses an argument: {error}", error.Get_error_class())
        cls = BufferRefusedError if isinstance(error, BufferError) else InvalidUsageError
        return cls(f"{operation}: MPI refuses an argument: {error}")

    def start(self, operation: Operation, arguments: Arguments, stream: Any, algorithm: str) -> MPI.Request:
        """Start a nonblocking collective."""
        work = self._begin_known(operation, arguments, stream, algorithm)
        automatic = algorithm == "auto" and stream is None and operation.in_mpi and arguments.epilogue is None
        if work is None and automatic and plain_array(operation, arguments) is not None:
            return self._start_mpis(operation, arguments)
        if work is None:
            call = self._read(operation, arguments, algorithm, stream)
            if self._is_mpis_request(call, algorithm):
                refuse_stream(operation.name, stream)
                return self._start_mpis(operation, self._out_of_place(operation, call.arguments))
            work = self._begin(call, arguments, stream, algorithm)
        if not work.over:  # else nothing reads the buffers any more
            work.kept = arguments
        return DeferredRequest(work)

    def _start_mpis(self, operation: Operation, arguments: Arguments) -> MPI.Request:
        if operation.of_neighbors:
            self._neighbors()
        if self._witness.is_needed:
            self._witness.tell(operation, on_host=True)
        request: MPI.Request = self._mpi(operation, arguments, operation.nonblocking)
        return holding(request, arguments)  # MPI uses the buffers until the request is complete

    def prepare(
        self, operation: Operation, arguments: Arguments, info: MPI.Info, stream: Any, algorithm: str
    ) -> MPI.Prequest:
        """Return a persistent collective."""
        call = self._read(operation, arguments, algorithm, stream, only_to_check=True)
        if not call.on_device and call.device_array is not None:
            return self._prepare_on_copies(call, info, stream, algorithm)
        self._witness.tell(operation, on_host=not call.on_device)
        if call.on_device:
            self._session.require_gpu(operation.name)
        else:
            refuse_stream(operation.name, stream)
            # `_mpi` would give MPI a copy of the input in place, as the input is when the request is prepared.
            with_copy = operation.send == "counted" and call.in_place
            if not with_copy and self._is_mpis_request(call, algorithm):
                prepared: MPI.Prequest = self._mpi(operation, call.arguments, operation.persistent, info)
                return holding(prepared, call.arguments)

        def begin() -> Work:
            known = self._begin_known(operation, arguments, stream, algorithm)
            # The arguments are read again, because symmetric memory among them may have been closed.
            again = known or self._read(operation, arguments, algorithm, stream, place=call.place)
            return again if isinstance(again, Work) else self._begin(again, arguments, stream, algorithm)

        return PersistentRequest.of(begin)

    def barrier(self, stream: Any) -> None:
        """Hold a stream of this rank's GPU until the streams of all ranks have come here."""
        session = self._session.set_up("Barrier")
        if not isinstance(session.backend.device, int):
            refuse_stream("Barrier", stream)
        engine = self.engines.on_gpu("Barrier").engine
        engine.enqueue(engine.prepare_barrier(), session.backend.stream(stream))

    def repeat_message(self, call: MessageCall, stream: Any) -> bool:
        """Enqueue a message in stream order again; local. Return whether such a call was made before."""
        gpu = self.engines.gpu
        known = gpu and gpu.find(*call)
        if not gpu or not known:
            return False
        gpu.enqueue(known, stream, call.send, call.receive)
        return True

    def enqueue_message(self, call: MessageCall, stream: Any, sent: Message | None, received: Message | None) -> None:
        """Enqueue a message to one rank and a message from another, in stream order.

        The first message of a communicator of GPUs is collective, the others are local.
        """
        session = self._session.set_up(call.operation)
        session.require_usable(call.operation)
        gpu = self.engines.on_gpu(call.operation)
        plan = gpu.engine.prepare_messages(call.operation, sent, received)
        by_output = call.send is None
        gpu.add(plan, call, by_output=by_output)
        gpu.engine.enqueue(plan, session.backend.stream(stream, array_of(call.receive if by_output else call.send)))

    def _read(
        self,
        operation: Operation,
        arguments: Arguments,
        algorithm: str,
        stream: Any,
        *,
        place: Place | None = None,
        only_to_check: bool = False,
    ) -> Call:
        """Return a call that was read and checked, with pinned copies of host arrays beside device arrays.

        ``place`` is where the call is, if that is known. A call that is read ``only_to_check`` it copies nothing.
        """
        if algorithm != "auto":
            require_known(operation, algorithm)
        if operation.send == "counted" and arguments.counts is None and arguments.send is not MPI.IN_PLACE:
            mine = parse(arguments.receive, writable=True, name="recvbuf").total
            arguments = replace(arguments, counts=MPI.Intracomm.allgather(self._comm, mine))  # as mpi4py does
        copies = None
        if self._witness.is_needed and algorithm != "mpi" and not only_to_check:
            copies = PinnedCopies(self._session, operation.name, (arguments.send, arguments.receive), stream)
        try:
            call = self._call(operation, arguments, algorithm, place, copies)
        except RefusedByMpiError as error:
            self._comm.Call_errhandler(error.Get_error_class())  # as MPI does, which may end the program
            raise
        if call.place == "anywhere":
            where = self._witness.learn(call, algorithm, kernels=self.engines.gpu is not None)
            call = self._call(operation, arguments, algorithm, where, copies)
            call.was_undecided = True
        if algorithm != "auto":
            require_possible(call, algorithm)
        if not operation.in_mpi and (call.dtype is None or algorithm == "mpi"):
            raise InvalidUsageError(
                f"{operation} is not MPI's: it takes plain element types and predefined operations, and no "
                'algorithm="mpi"'
            )
        return call

    def _call(
        self,
        operation: Operation,
        arguments: Arguments,
        algorithm: str,
        place: Place | None = None,
        copies: PinnedCopies | None = None,
    ) -> Call:
        neighborhood = self._neighbors() if operation.of_neighbors else None
        return Call(operation, arguments, self._rank, self._size, algorithm, neighborhood, place=place, copies=copies)

    def _prepare_on_copies(self, call: Call, info: MPI.Info, stream: Any, algorithm: str) -> MPI.Prequest:
        """Return a persistent call on the host with the root's device array; the other ranks have MPI's request."""
        copies, given = copies_on_host(self._session, call, stream)
        prepared = self.prepare(call.operation, given, info, None, algorithm)
        backend = self._session.backend

        def begin() -> Work:
            copies.again(backend.stream(stream, call.device_array))
            copies.ready()
            prepared.Start()
            return self._completer.add(Work(prepared.Test, copies.back), backend.prepare_thread)

        return PersistentRequest.of(begin, prepared.Free)

    def _complete_copies(self, call: Call, stream: int) -> None:
        """Wait for a call with host arrays beside device arrays, and bring its results to them."""
        if call.copies:
            backend = self._session.backend
            backend.synchronize(stream)
            backend.check()
            call.copies.back()

    def _is_mpis_request(self, call: Call, algorithm: str) -> bool:
        """Return whether MPI's own request carries a call out."""
        plain = not call.on_device and call.device_array is None and call.epilogue is None
        return plain and selection.is_mpis_request(call, algorithm)

    def _neighbors(self) -> Neighborhood:
        """Return the neighbours of this rank, which the first call checks. Raises as `neighborhood_of`."""
        if self._neighborhood is None:
            assert isinstance(self._comm, MPI.Topocomm)
            self._neighborhood = neighborhood_of(self._comm)
        return self._neighborhood

    def _find(self, operation: Operation, given: Arguments, algorithm: str) -> KnownCall | None:
        """Return a call on device arrays that was made before; None if it was not."""
        gpu = self.engines.gpu
        if gpu is None:
            return None
        root = _root_of(gpu, given)
        return gpu.find(operation, algorithm, given.send, given.receive, given.op, root, given.counts)

    def _begin_known(self, operation: Operation, given: Arguments, stream: Any, algorithm: str) -> Work | None:
        """Begin a call on device arrays that was made before; None if it was not."""
        gpu, found = self.engines.gpu, self._find(operation, given, algorithm)
        if gpu is None or found is None:
            return None
        return self._until(operation, gpu.begin(found, stream, given.send, given.receive))

    def _begin(self, call: Call, arguments: Arguments, stream: Any, algorithm: str) -> Work:
        """Begin a call that is not MPI's and was made with ``arguments``."""
        operation = call.operation
        if call.on_device:
            resolved = self._enqueue(call, arguments, stream, algorithm, blocking=False)
            done = self._session.set_up(operation.name).backend.completion(resolved)
            return self._until(operation, done, call.copies)
        if call.device_array is not None:
            copies, given = copies_on_host(self._session, call, stream)
            request = self.start(operation, given, None, algorithm)
            return self._completer.add(Work(request.Test, copies.back), self._session.backend.prepare_thread)
        refuse_stream(operation.name, stream)
        self._witness.tell(operation, on_host=True)
        # It is done when this returns, because the engine of the host has no thread.
        if call.epilogue is not None:
            self._finish_on_host(call, algorithm)
        elif selection.is_mpis_request(call, algorithm):  # in place, where MPI has to be given a copy each time
            self._mpi(operation, call.arguments)
        else:
            self._run_on_host(call, algorithm)
        work = Work(lambda: True, lambda: None)
        # MPICH ends a program that waits for an open generalized request beside a null one, so this one is complete.
        work.advance()
        return work

    def _until(self, operation: Operation, done: Callable[[], bool], copies: PinnedCopies | None = None) -> Work:
        """Return a call that was begun as work, which is over when ``done`` says so and ``copies`` are back."""
        backend = self._session.set_up(operation.name).backend

        def finish() -> None:
            backend.check()
            if copies:
                copies.back()

        return self._completer.add(Work(done, finish), backend.prepare_thread)

    def _enqueue(self, call: Call, arguments: Arguments, stream: Any, algorithm: str, *, blocking: bool = True) -> int:
        """Carry out a call on device arrays that was made with ``arguments``; return the stream it is on."""
        operation = call.operation
        self._session.require_gpu(operation.name)  # before device memory is looked at
        session = self._session.set_up(operation.name)
        for operand in call.operands:
            require_here(f"{operation.name}: {operand.name}", operand.device, session.backend.device)
        session.require_usable(operation.name)
        if call.dtype is None or algorithm == "mpi":
            resolved = session.backend.stream(stream, call.device_array)
            call.copies = None  # MPI gets the host arrays themselves
            self._witness.tell(operation, on_host=True)
            self._through_host(call, session, resolved)
            return resolved
        if self.engines.gpu is None:  # an undecided rank takes part in the set-up, so it has to know of it before
            self._witness.tell(operation, on_host=False)
        gpu = self.engines.on_gpu(operation.name)
        plan = gpu.engine.prepare_call(call, session.mappings, algorithm)
        root = _root_of(gpu, arguments)
        # Other ranks may pass other memory the next time, and this rank would not ask.
        if root is not None and not call.was_undecided:
            key = (operation, algorithm, arguments.send, arguments.receive, arguments.op, root, arguments.counts)
            by_output = call.device_array is not array_of(arguments.send)
            gpu.add(plan, key, by_output=by_output, read=call)
        resolved = session.backend.stream(stream, call.device_array)
        if blocking:
            gpu.carry_out(plan, resolved, call.device_array)
        else:
            gpu.engine.enqueue(plan, resolved)
        if stream is None and any(operand.by_address for operand in call.operands):
            # The caller's later work may be on any stream, because no library says on which.
            backend = session.gpu(operation.name)
            if not backend.is_capturing(resolved):
                backend.synchronize(resolved)
        return resolved

    def _through_host(self, call: Call, session: Session, stream: int) -> None:
        """Give MPI host copies of device arrays; blocking."""
        announce(call.operation.name, "only MPI can carry it out, or algorithm= asks for it")
        arguments = call.arguments
        buffers = [(arguments.send, False, "sendbuf"), (arguments.receive, True, "recvbuf")]
        through_host(
            session.backend,
            stream,
            lambda send, receive: self._mpi(call.operation, replace(arguments, send=send, receive=receive)),
            buffers,
        )

    def _mpi(self, operation: Operation, arguments: Arguments, method: str = "", info: MPI.Info | None = None) -> Any:
        """Call mpi4py's ``method``, by default the blocking one. The Communicator's own method has called this one."""
        if arguments.op is AVG:
            raise RefusedByMpiError(
                f"{operation}: MPI, which carries out calls of this element type, has no AVG: use MPI.SUM and divide",
                MPI.ERR_OP,
            )
        passed = operation.passed(self._out_of_place(operation, arguments))
        if info is not None:
            passed = (*passed, info)
        begin_mpis(self._session.row.words, by_mpi(operation.name))
        try:
            return getattr(operation.mpi_class, method or operation.name)(self._comm, *passed)
        except REFUSALS as error:
            given = arguments.send, arguments.receive, arguments.op, arguments.root, arguments.counts
            raise self.refused(error, operation, *given) from error

    def _out_of_place(self, operation: Operation, arguments: Arguments) -> Arguments:
        """Return the arguments for MPI: an input in place that ``recvcounts`` cuts is copied.

        MPICH 5 ends the program where a block overlaps its result. Ranks that receive nothing need not be in place, so
        all ranks must still take MPI's way.
        """
        if operation.send != "counted" or arguments.counts is None or not is_in_place(arguments.send):
            return arguments
        send, receive = out_of_place(arguments.receive, arguments.counts, self._rank)
        return replace(arguments, send=send, receive=receive)

    def _run_on_host(self, call: Call, algorithm: str) -> None:
        """Carry out a call on host arrays through mapped memory; blocking."""
        if self._nodes > 1:
            self.engines.between_hosts(call.operation.name).run(call, algorithm)
            return
        engine = self.engines.on_host(call.operation.name)
        scratch = engine.scratch(call.scratch_nbytes)
        engine.run(selection.schedule(call, algorithm, self._size, scratch), call.signature)

    def _finish_on_host(self, call: Call, algorithm: str) -> None:
        """Carry out an all-reduce on host arrays, then its epilogue; blocking."""
        epilogue, receive, given = call.epilogue, call.receive, call.arguments
        assert epilogue is not None and receive is not None
        made = array_at(receive.pointer, receive.nbytes, _BYTE).view(epilogue.result)
        reduced, target = made, given.receive
        if epilogue.converts:
            reduced = np.empty(receive.total, epilogue.dtype)
            target = reduced
        self.run(call.operation, None, algorithm, given.send, target, given.op)
        epilogue.on_host(reduced, made)

    def _crossover_of(self, op: MPI.Op | None) -> int:
        return self._crossover if op is not None and op_name(op) in selection.OPS_OF_CROSSOVER else 0


def _root_of(gpu: PlanCache, arguments: Arguments) -> Hashable:
    """Return the root of a call as a key of plans; of a call with an epilogue, which has no root, the epilogue.

    None where the epilogue has an array that cannot be recognised.
    """
    return arguments.root if arguments.epilogue is None else arguments.epilogue.key(gpu.identity_of)
