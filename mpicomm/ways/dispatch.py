"""Dispatch: which way each collective call of one communicator goes, and three forms in which a caller waits for it.

Kernels carry collectives on device arrays, and between peer domains an engine of room `internode`. Host arrays go
through mapped memory where that is faster than MPI, or where MPI lacks the element type or the operation; else to MPI
itself, as do all collectives of neighbours. All other calls on device arrays go through pinned host copies and MPI.
`place` has the rule of the choice, and why all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.host import crossover, selection
from mpicomm.collectives.host.fast_path import PlainCheck, at_once, plain_calls
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues.base import Epilogue
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.location import refuse_stream
from mpicomm.mpi.requests import Completer, DeferredRequest, DeferredWork, PersistentRequest
from mpicomm.session import Session
from mpicomm.ways.by_mpi import MpiWay, OnPinnedCopies
from mpicomm.ways.engines import Engines
from mpicomm.ways.on_gpus import OnGpus, root_of
from mpicomm.ways.on_host import InMappedMemory, OnCopies, WithEpilogue
from mpicomm.ways.reader import Reader
from mpicomm.ways.way import Begun, Way
from mpicomm.ways.witness import Witness


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


class Dispatcher:
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
        self.engines = engines = Engines(session)
        self._witness = witness = Witness(session, engines)
        self._reader = reader = Reader(comm, session, witness)
        completer = Completer()
        self._mpi = MpiWay(comm, session, reader, witness)
        self._pinned = OnPinnedCopies(session, self._mpi)
        self._gpus = OnGpus(session, engines, completer, witness)
        self._mapped = InMappedMemory(engines, witness)
        self._epilogue = WithEpilogue(reader, self._carry)
        self._copies = OnCopies(session, reader, completer, self._carry, self.prepare)
        self._processes = frozenset((place.host, place.pid) for place in placement.places)
        self.at_once: dict[str, PlainCheck] = {}
        """The judges of the calls that methods hand to MPI themselves: see `fast_path.at_once`."""
        self._judge_with(crossover.known(self._processes) if self._size == 2 else 0)

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
    ) -> None:
        """Carry out a blocking collective; on device arrays, enqueue it.

        It takes `Arguments` one by one, because making one would take a tenth of the time of a known call.
        """
        gpu = self.engines.gpu
        if gpu:
            key = root if epilogue is None else epilogue.key(gpu.identity_of)
            known = gpu.find(operation, algorithm, send, receive, op, key, counts)
            if known:
                gpu.run(known, stream, send, receive)
                return
        arguments = Arguments(send, receive, op, root, counts, epilogue)
        if self._is_plain(operation, operation.name, arguments, stream, algorithm):
            self._mpi.carry_out(operation, arguments, blocking=True)
        else:
            self._carry(self._reader.read(operation, arguments, algorithm, stream), blocking=True)

    def start(self, operation: Operation, arguments: Arguments, stream: Any, algorithm: str) -> MPI.Request:
        """Start a nonblocking collective."""
        begun: Begun = self._begin_known(operation, arguments, stream, algorithm)
        if begun is None:
            if self._is_plain(operation, operation.nonblocking, arguments, stream, algorithm):
                begun = self._mpi.carry_out(operation, arguments, blocking=False)
            else:
                begun = self._carry(self._reader.read(operation, arguments, algorithm, stream), blocking=False)
        if isinstance(begun, MPI.Request):
            return begun
        work = _work(begun)
        if not work.over:  # else nothing reads the buffers any more
            work.kept = arguments
        return DeferredRequest(work)

    def prepare(
        self, operation: Operation, arguments: Arguments, info: MPI.Info, stream: Any, algorithm: str
    ) -> MPI.Prequest:
        """Return a persistent collective."""
        if self._is_plain(operation, operation.nonblocking, arguments, stream, algorithm):
            return self._mpi.prepare(operation, arguments, info)
        call = self._reader.read(operation, arguments, algorithm, stream, only_to_check=True)
        way = self._way_of(call, blocking=False)
        if way is self._copies:
            return self._copies.prepare(call, info)
        # MPI would get a copy of an input in place that recvcounts cut, as it is when the request is prepared.
        if way is self._mpi and not (operation.send == "counted" and call.in_place):
            return self._mpi.prepare(operation, call.arguments, info)
        self._witness.tell(operation, on_host=not call.on_device)
        if call.on_device:
            self._session.require_gpu(operation.name)

        def begin() -> DeferredWork:
            known = self._begin_known(operation, arguments, stream, algorithm)
            if known is not None:
                return known
            # The arguments are read again, because symmetric memory among them may have been closed.
            return _work(
                self._carry(
                    self._reader.read(operation, arguments, algorithm, stream, place=call.place), blocking=False
                )
            )

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
        """Return the error for arguments that mpi4py has refused; see `Reader.refused`."""
        return self._reader.refused(error, operation, Arguments(send, receive, op, root, counts))

    def _carry(self, call: Call, *, blocking: bool) -> Begun:
        """Enqueue a call that was read, by the way that it goes. Collective."""
        return self._way_of(call, blocking=blocking).enqueue(call, blocking=blocking)

    def _way_of(self, call: Call, *, blocking: bool) -> Way:
        """Return the way of a call. Local but for two ranks that measure their crossover first, which are alike."""
        if call.on_device:
            return self._pinned if call.dtype is None or call.algorithm == "mpi" else self._gpus
        if call.device_array is not None:
            return self._copies
        refuse_stream(call.operation.name, call.stream)
        if call.epilogue is not None:
            return self._epilogue
        if self._is_mpis(call) if blocking else selection.becomes_mpi_request(call, call.algorithm):
            return self._mpi
        return self._mapped

    def _is_mpis(self, call: Call) -> bool:
        def goes_to_mpi() -> bool:
            return selection.goes_to_mpi(call, call.algorithm, self._size, self._nodes, self._crossover)

        measured = self._crossover or self._nodes > 1 or call.algorithm != "auto"
        if goes_to_mpi() or measured or not selection.depends_on_crossover(call, self._size):
            return goes_to_mpi()
        engine = self.engines.on_host(call.operation.name)
        self._judge_with(crossover.learn(self._comm, engine, self._processes))
        return goes_to_mpi()

    def _judge_with(self, crossover: int) -> None:
        """Take the crossover of two ranks, which is 0 while it is not measured. Local."""
        self._crossover = crossover
        facts = self._size, self._rank, self._nodes, crossover
        self._plain = plain_calls(*facts)
        self.at_once.update(at_once(*facts, on_gpus=self._witness.is_needed))

    def _is_plain(self, operation: Operation, method: str, given: Arguments, stream: Any, algorithm: str) -> bool:
        """Return whether a call is certainly MPI's, in which ranks exchange no counts before. Local."""
        if algorithm != "auto" or stream is not None or given.epilogue is not None:
            return False
        told = operation.send != "counted" or given.counts is not None
        return told and self._plain[method](given.send, given.receive, given.op)

    def _begin_known(self, operation: Operation, given: Arguments, stream: Any, algorithm: str) -> DeferredWork | None:
        """Begin a call on device arrays that was made before; None if it was not."""
        gpu = self.engines.gpu
        if gpu is None:
            return None
        root = root_of(gpu, given)
        found = gpu.find(operation, algorithm, given.send, given.receive, given.op, root, given.counts)
        return None if found is None else self._gpus.until(gpu.begin(found, stream, given.send, given.receive))


def _work(begun: Begun) -> DeferredWork:
    """Return a call that was enqueued as work; it is complete where nobody has to wait for it."""
    if isinstance(begun, DeferredWork):
        return begun
    if begun is not None:
        begun.Wait()
    work = DeferredWork(lambda: True, lambda: None)
    # MPICH ends a program that waits for an open generalized request beside a null one, so this one is complete.
    work.advance()
    return work
