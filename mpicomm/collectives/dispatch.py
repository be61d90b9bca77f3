"""Collectives: which way each collective call of one communicator goes, and the engines for it.

Device arrays on one node go through the kernels of `DeviceEngine`. Host arrays go through the mapped memory of
`HostEngine` where that is faster than MPI or MPI lacks the element type or operation, else to MPI itself. The rest of
what device arrays can be in goes through pinned host copies and MPI. The choice depends only on what MPI requires to be
the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicomm.collectives.board import Board
from mpicomm.collectives.call import FORMS, Arguments, Call, is_in_place
from mpicomm.collectives.exchange import Exchange, Message
from mpicomm.collectives.gpu import tuning
from mpicomm.collectives.gpu.plan_cache import KnownCalls
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.host.fast_path import is_plainly_mpis
from mpicomm.collectives.host.selection import piece_nbytes, use_mapped
from mpicomm.devices.base import Scratch
from mpicomm.devices.host import HostBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.buffers import array_of, read
from mpicomm.mpi.host_copies import announce, out_of_place, through_host
from mpicomm.mpi.ops import AVG
from mpicomm.mpi.requests import Completer, DeferredRequest, PersistentRequest, Work
from mpicomm.mpi.span import Span
from mpicomm.session import Session

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine

ALGORITHMS = ("auto", "mpi", "one_shot", "two_shot", "ring", "chain", "copy_engine")
_TWO_SHOT = ("Allreduce", "Bcast")  # on the host

End = tuple[Any, int, int]
"""A buffer, the rank that it goes to or that fills it, and the tag; plain, as it is on the way of every message."""


class Collectives:
    """The collectives of the communicator ``comm``.

    ``session`` is set up, collectively, by the first call that goes through kernels or mapped memory.
    """

    def __init__(self, comm: MPI.Intracomm, session: Session) -> None:
        self._comm = comm
        self._session = session
        self._set_up = session.set_up
        self._rank = session.placement.rank
        self._size = len(session.placement.places)
        self._completer = Completer()
        self._board: Board | None = None
        self._host_engine: HostEngine | None = None
        self._device_engine: DeviceEngine | None = None
        self._scratch: dict[bool, list[Scratch]] = {}
        self._known: KnownCalls | None = None  # to the engine of devices

    def run(
        self,
        operation: str,
        stream: Any,
        algorithm: str,
        send: Any,
        receive: Any,
        op: MPI.Op | None = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Carry out a blocking collective; on device arrays, enqueue it.

        It takes `Arguments` one by one: to make one would be a tenth of the time of a known call.
        """
        known = self._known
        if known:
            found = known.find(operation, algorithm, send, receive, op, root, counts)
            if found:
                known.enqueue(found, stream, send, receive)
                return
        arguments = Arguments(send, receive, op, root, counts)
        if algorithm == "auto" and stream is None and is_plainly_mpis(operation, arguments, self._size):
            self._mpi(operation, arguments)
            return
        call = self._read(operation, arguments, algorithm)
        if call.on_device:
            self._enqueue(call, arguments, stream, algorithm)
        elif self._mapped(call, algorithm):
            refuse_stream(operation, stream)
            self._on_host(operation).run(self._exchanges(call, algorithm), call.signature)
        else:
            refuse_stream(operation, stream)
            self._mpi(operation, call.arguments)

    def start(self, operation: str, arguments: Arguments, stream: Any, algorithm: str) -> MPI.Request:
        """Start a nonblocking collective."""
        work = self._begin_known(operation, arguments, stream, algorithm)
        if work is None:
            call = self._read(operation, arguments, algorithm)
            if not call.on_device and _is_mpis(call, algorithm):
                refuse_stream(operation, stream)
                request: MPI.Request = self._mpi(operation, call.arguments, f"I{operation.lower()}")
                return request
            work = self._begin(call, arguments, stream, algorithm)
        work.kept = arguments
        return DeferredRequest(work)

    def _begin_known(self, operation: str, given: Arguments, stream: Any, algorithm: str) -> Work | None:
        """Begin a call on device arrays that was made before; None if it was not."""
        known = self._known
        if known is None:
            return None
        found = known.find(operation, algorithm, given.send, given.receive, given.op, given.root, given.counts)
        if found is None:
            return None
        return self._until(operation, known.begin(found, stream, given.send, given.receive))

    def _begin(self, call: Call, arguments: Arguments, stream: Any, algorithm: str) -> Work:
        """Begin a call that is not MPI's, which was made with ``arguments``."""
        if call.on_device:
            resolved = self._enqueue(call, arguments, stream, algorithm)
            return self._until(call.operation, self._set_up(call.operation).backend.completion(resolved))
        refuse_stream(call.operation, stream)
        # Done when this returns: the host engine has no thread of its own.
        if algorithm == "mpi":  # in place, where MPI has to be given a copy each time
            self._mpi(call.operation, call.arguments)
        else:
            self._on_host(call.operation).run(self._exchanges(call, algorithm), call.signature)
        return self._completer.add(
            Work(lambda: True, lambda: None), self._set_up(call.operation).backend.prepare_thread
        )

    def _until(self, operation: str, done: Callable[[], bool]) -> Work:
        """Return as work what was enqueued, which is over when ``done`` says so."""
        backend = self._set_up(operation).backend
        return self._completer.add(Work(done, backend.check), backend.prepare_thread)

    def prepare(
        self, operation: str, arguments: Arguments, info: MPI.Info, stream: Any, algorithm: str
    ) -> MPI.Prequest:
        """Return a persistent collective."""
        call = self._read(operation, arguments, algorithm)
        if call.on_device:
            self._session.require_gpu(operation)
        else:
            refuse_stream(operation, stream)
            # A copy of the input, which `_mpi` then gives it, would be one of what was there when it was prepared.
            with_copy = call.operation == "Reduce_scatter" and call.in_place
            if not with_copy and _is_mpis(call, algorithm):
                prepared: MPI.Prequest = self._mpi(operation, call.arguments, f"{operation}_init", info)
                return prepared

        def begin() -> Work:
            known = self._begin_known(operation, arguments, stream, algorithm)
            # The arguments are read again: memory that was symmetric when they were prepared may have been closed.
            return known or self._begin(self._read(operation, arguments, algorithm), arguments, stream, algorithm)

        return PersistentRequest.of(begin)

    def barrier(self, stream: Any) -> None:
        """Hold a stream of this rank's GPU until the streams of all ranks of the node have come here."""
        session = self._set_up("Barrier")
        if not isinstance(session.backend.device, int):
            refuse_stream("Barrier", stream)
        _require_one_node(session, "Barrier(stream=)")
        engine = self._on_device("Barrier")
        engine.enqueue(engine.prepare_barrier(), session.backend.stream(stream))

    def message(
        self,
        operation: str,
        stream: Any,
        send: End,
        receive: End,
        read: Callable[[str, End, End, Session], tuple[Message | None, Message | None]],
    ) -> None:
        """Enqueue what goes out of one device array and what comes into another, in the order of the stream.

        ``read`` understands and checks the arguments. The communicator is one of GPUs.
        """
        (sendbuf, dest, sendtag), (recvbuf, source, recvtag) = send, receive
        route, known = (dest, sendtag, source, recvtag), self._known
        if known:
            found = known.find(operation, "one_shot", sendbuf, recvbuf, None, route, None)
            if found:
                known.enqueue(found, stream, sendbuf, recvbuf)
                return
        session = self._set_up(operation)
        sent, received = read(operation, send, receive, session)
        session.require_usable(operation)
        engine = self._on_device(operation)
        plan = engine.prepare_messages(operation, sent, received)
        assert self._known is not None
        by_output = sendbuf is None
        self._known.add(plan, (operation, "one_shot", sendbuf, recvbuf, None, route, None), by_output=by_output)
        engine.enqueue(plan, session.backend.stream(stream, array_of(recvbuf if by_output else sendbuf)))

    def _read(self, operation: str, arguments: Arguments, algorithm: str) -> Call:
        if algorithm not in ALGORITHMS:
            raise InvalidUsageError(f"algorithm={algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}")
        if algorithm not in ("auto", "mpi", *tuning.algorithms_of(operation)):
            possible = ", ".join(tuning.operations_of(algorithm))
            raise InvalidUsageError(f'algorithm="{algorithm}" is for {possible}, not {operation}: use "one_shot"')
        if operation == "Reduce_scatter" and arguments.counts is None and arguments.send is not MPI.IN_PLACE:
            mine = parse(arguments.receive, writable=True, name="recvbuf").total
            arguments = replace(arguments, counts=MPI.Intracomm.allgather(self._comm, mine))  # as mpi4py does
        call = Call(operation, arguments, self._rank, self._size, algorithm)
        if algorithm not in ("auto", "mpi") and call.dtype is None:
            raise InvalidUsageError(
                f"algorithm={algorithm!r}: only MPI can carry out {operation} with this operation or datatype"
            )
        if algorithm == "mpi" and call.op == "avg":
            raise InvalidUsageError(
                f'algorithm="mpi": MPI has no AVG for {operation}: leave algorithm= out, or use SUM'
            )
        if algorithm == "mpi" and call.dtype is not None and types.mpi_datatype(call.dtype) is None:
            raise InvalidUsageError(
                f'algorithm="mpi": MPI has no type for the {call.dtype} of {operation}: leave algorithm= out, or move '
                "it as bytes with [buffer, MPI.BYTE]"
            )
        if algorithm in ("chain", "copy_engine") and not call.on_device:
            raise InvalidUsageError(f'algorithm="{algorithm}" is for device arrays: use "one_shot"')
        if algorithm == "two_shot" and operation == "Reduce" and not call.on_device:
            raise InvalidUsageError('algorithm="two_shot" of Reduce is for device arrays: use "one_shot"')
        return call

    def _mapped(self, call: Call, algorithm: str) -> bool:
        """Whether a call on host arrays goes through mapped memory; the same on all ranks."""
        if call.dtype is None or algorithm == "mpi":
            return False
        if algorithm == "auto" and _mpi_knows(call):
            nbytes = call.nbytes
            if nbytes is None or not use_mapped(call.operation, nbytes, self._size):
                return False
            return len(self._set_up(call.operation).placement.nodes) == 1
        _require_one_node(self._set_up(call.operation), f"{call.operation} of {call.dtype}")
        return True

    def _enqueue(self, call: Call, arguments: Arguments, stream: Any, algorithm: str) -> int:
        """Carry a call on device arrays out, which was made with ``arguments``; return the stream it is on."""
        operation = call.operation
        self._session.require_gpu(operation)  # before anything looks at device memory
        session = self._set_up(operation)
        for operand in call.operands:
            require_here(operation, operand, session)
        session.require_usable(operation)
        array = array_of(call.operands[0].spec) if call.operands else None
        one_node = len(session.placement.nodes) == 1
        if call.dtype is not None and algorithm != "mpi" and one_node:
            from mpicomm.collectives.gpu.preparation import prepare

            engine = self._on_device(operation)
            plan = prepare(engine, session.mappings, call, self._size, algorithm, self._scratch_for)
            assert self._known is not None
            send, receive, op = arguments.send, arguments.receive, arguments.op
            known = (operation, algorithm, send, receive, op, arguments.root, arguments.counts)
            self._known.add(plan, known, by_output=bool(call.operands) and call.operands[0] is call.receive)
            resolved = session.backend.stream(stream, array)
            engine.enqueue(plan, resolved)
            return resolved
        resolved = session.backend.stream(stream, array)
        announce(operation, "only MPI can carry it out" if one_node else "the ranks are on several nodes")
        arguments = call.arguments
        buffers = [(arguments.send, False, "sendbuf"), (arguments.receive, True, "recvbuf")]
        through_host(
            session.backend,
            resolved,
            lambda send, receive: self._mpi(operation, replace(arguments, send=send, receive=receive)),
            buffers,
        )
        return resolved

    def _exchanges(self, call: Call, algorithm: str) -> list[Exchange]:
        """Return a call on host arrays as exchanges."""
        piece = None
        if self._size > 1 and call.operation in _TWO_SHOT and algorithm in ("auto", "two_shot"):
            piece = piece_nbytes(call.operation, call.nbytes or 0, self._size, forced=algorithm == "two_shot")
        return call.exchanges(piece, self._scratch_for(call), algorithm=algorithm)

    def _scratch_for(self, call: Call) -> Span | None:
        """Return scratch memory; kept until the communicator is freed, as a captured graph goes on using it."""
        nbytes = call.scratch_nbytes
        if nbytes == 0:
            return None
        kept = self._scratch.setdefault(call.on_device, [])
        if not kept or kept[-1].nbytes < nbytes:
            allocate = self._set_up(call.operation).backend.scratch if call.on_device else HostBackend.scratch
            kept.append(allocate(1 << (nbytes - 1).bit_length()))  # so that in all it is twice the largest at most
        return Span(kept[-1].pointer, 0)

    def _mpi(self, operation: str, arguments: Arguments, method: str = "", info: MPI.Info | None = None) -> Any:
        """Call MPI's ``method``, by default the blocking one, and not the Communicator's, which has called this one."""
        if arguments.op is AVG:
            raise InvalidUsageError(f"{operation}: MPI has no AVG; use MPI.SUM and divide, or one node")
        form = FORMS[operation]
        if operation == "Reduce_scatter" and is_in_place(arguments.send) and arguments.counts is not None:
            # MPICH 5 ends the program where a block overlaps its result. No other way than MPI's can be taken for that:
            # ranks that receive nothing need not be in place.
            send, receive = out_of_place(arguments.receive, arguments.counts, self._rank)
            arguments = replace(arguments, send=send, receive=receive)
        passed: list[Any] = [arguments.receive] if operation == "Bcast" else [arguments.send, arguments.receive]
        if operation == "Reduce_scatter":
            passed.append(arguments.counts)
        if form.reduces:
            passed.append(arguments.op)
        if form.rooted:
            passed.append(arguments.root)
        if info is not None:
            passed.append(info)
        return getattr(MPI.Intracomm, method or operation)(self._comm, *passed)

    def _on_host(self, operation: str) -> HostEngine:
        if self._host_engine is None:
            session = self._set_up(operation)
            session.require_usable(operation)
            self._host_engine = session.keep(HostEngine(session.node, self._shared_board(session)))
        return self._host_engine

    def _on_device(self, operation: str) -> DeviceEngine:
        if self._device_engine is None:
            from mpicomm.collectives.gpu.engine import DeviceEngine

            session = self._set_up(operation)
            backend = session.gpu(operation)
            board = self._shared_board(session)
            with backend.loading():  # it allocates and waits, which a thread that captures a graph may not otherwise
                self._device_engine = session.keep(DeviceEngine(session.node, backend, session.kind, board))
            self._known = KnownCalls(session, self._device_engine)
        return self._device_engine

    def _shared_board(self, session: Session) -> Board:
        if self._board is None:
            self._board = session.keep(Board(session.node))
        return self._board


def is_on_device(spec: Any) -> bool:
    """Whether a buffer argument is a device array, which MPI must not see."""
    array = array_of(spec)
    if type(array) is np.ndarray or array is None or array is MPI.BOTTOM or array is MPI.IN_PLACE:
        return False
    return read(array, False, "buf").on_device


def _mpi_knows(call: Call) -> bool:
    """Whether MPI has the element type and the operation, and gives what mpicomm promises of it."""
    if call.dtype is None:
        return True
    if call.op == "avg" or (call.reduces and call.dtype == np.float16):  # MPI would round after every step
        return False
    return types.mpi_datatype(call.dtype) is not None


def _is_mpis(call: Call, algorithm: str) -> bool:
    """Whether a call on host arrays that does not block, or is persistent, is MPI's own, which has such requests."""
    return algorithm == "mpi" or (algorithm == "auto" and _mpi_knows(call))


def require_here(operation: str, operand: Operand, session: Session) -> None:
    """Raise for an array of another GPU."""
    if operand.device is not None and operand.on_device and operand.device != session.backend.device:
        raise InvalidUsageError(
            f"{operation}: {operand.name} is on GPU {operand.device}, but this communicator is on GPU "
            f"{session.backend.device}: copy it there"
        )


def _require_one_node(session: Session, what: str) -> None:
    nodes = len(session.placement.nodes)
    if nodes > 1:
        raise InvalidUsageError(f"{what} works between the ranks of one node; these are on {nodes}")


def refuse_stream(operation: str, stream: Any) -> None:
    """Raise for a stream given with host arrays."""
    if stream is not None:
        raise InvalidUsageError(f"{operation}: stream={stream!r} is for device arrays: calls on host arrays block")
