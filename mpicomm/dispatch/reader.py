"""Reader: reads and checks the calls of one communicator. MpiCarrier: makes MPI's calls, and explains its refusals."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALLS_BY_MPI
from mpicomm.activity.page import begin_mpi_call
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.call_log import CallLocation
from mpicomm.collectives.checks import is_in_place
from mpicomm.collectives.host import selection
from mpicomm.collectives.neighborhood import Neighborhood, crossed_by_displacements, mpi_crosses, neighborhood_of
from mpicomm.collectives.operations import BLOCKING, NONBLOCKING, OPERATIONS, PERSISTENT, Operation
from mpicomm.collectives.patterns import ring_refusal
from mpicomm.devices.host import array_at
from mpicomm.dispatch.location_votes import LocationVotes
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, parse, refuse_stream
from mpicomm.mpi.errors import BufferRefusedError, RefusedByMpiError
from mpicomm.mpi.host_calls import NEEDS_HOST_COPY, out_of_place, require_no_capture
from mpicomm.mpi.ops import AVG, TREE, Op, op_name
from mpicomm.mpi.request_lists import holding
from mpicomm.mpi.spec import typed_blocks
from mpicomm.session import Session


class Reader:
    """Reads the calls of the communicator ``comm``."""

    def __init__(self, comm: MPI.Intracomm, session: Session) -> None:
        self._comm = comm
        self.session = session
        placement = session.placement
        self._on_gpus = isinstance(placement.here.device, int) and len(placement.places) > 1

    def read(
        self,
        operation: Operation,
        arguments: Arguments,
        algorithm: str,
        stream: Any,
        *,
        location: CallLocation | None = None,
    ) -> Call:
        """Read and check a call. ``location`` is its location, if that is known.

        Local, but the ranks exchange the counts of a Reduce_scatter without ``recvcounts``.
        """
        given = arguments
        if algorithm != "auto":
            _require_algorithm(operation, algorithm)
        if operation.send == "by_recvcounts" and arguments.counts is None and arguments.send is not MPI.IN_PLACE:
            mine = parse(arguments.receive, writable=True, name="recvbuf").total
            arguments = arguments._replace(counts=MPI.Intracomm.allgather(self._comm, mine))  # as mpi4py does
        try:
            call = self.make_call(operation, arguments, algorithm, location)
        except RefusedByMpiError as error:
            self._comm.Call_errhandler(error.Get_error_class())  # as MPI does, which may end the program
            raise
        if call.device_array is None:
            refuse_stream(operation.name, stream)  # before this rank waits for votes
        elif self._on_gpus and not call.on_device:
            # The root's other buffer. A capture is refused here, because the vote after this waits for other ranks.
            device = self.session.gpu(operation.name)
            require_no_capture(operation.name, device, device.stream(stream, call.device_array), NEEDS_HOST_COPY)
        call.given, call.stream = given, stream
        return call

    def at_location(self, call: Call, location: CallLocation) -> Call:
        """Return a call at the location on which all ranks agree, after the checks that depend on the location."""
        if location == "gpu" and not call.on_device:
            given, stream = call.given, call.stream
            arguments = given._replace(counts=call.arguments.counts)
            call = self.make_call(call.operation, arguments, call.algorithm, location)
            call.given, call.stream = given, stream
        if call.algorithm != "auto" and (refusal := _refusal(call)):
            raise InvalidUsageError(refusal)
        return call

    @cached_property
    def neighbors(self) -> Neighborhood:
        """The neighbours of this rank, which the first call checks. Raises as `neighborhood_of`."""
        assert isinstance(self._comm, MPI.Topocomm)
        return neighborhood_of(self._comm)

    def ordered_op(self, operation: Operation, op: MPI.Op, order: str) -> MPI.Op:
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
        if self._tree_refusal:
            raise InvalidUsageError(f'order="tree" of {operation}: {self._tree_refusal}')
        return TREE

    @cached_property
    def _tree_refusal(self) -> str:
        """Why the ranks cannot hold the leaves of a tree in equal blocks; "" if they can."""
        placement = self.session.placement
        leaves, domains, size = placement.here.leaves, placement.domains, len(placement.places)
        if leaves % size:
            return f"{size} ranks cannot hold {leaves} leaves in equal blocks: use 1, 2, 4, ... or {leaves} ranks"
        if [rank for ranks in domains for rank in ranks] != list(range(size)) or len({*map(len, domains)}) > 1:
            return f"each peer domain needs equally many ranks that follow each other, and the domains are {domains}"
        return ""

    def make_call(
        self, operation: Operation, arguments: Arguments, algorithm: str = "auto", location: CallLocation | None = None
    ) -> Call:
        """Return the `Call` of this rank. Local."""
        neighborhood, placement = self.neighbors if operation.of_neighbors else None, self.session.placement
        rank, size = placement.rank, len(placement.places)
        return Call(operation, arguments, rank, size, algorithm, neighborhood, location=location)


def _require_algorithm(operation: Operation, algorithm: str) -> None:
    from mpicomm.collectives.gpu import decision  # here, because few programs name an algorithm

    known = ("auto", "mpi", *decision.NAMES)
    if algorithm not in known:
        raise InvalidUsageError(f"algorithm={algorithm!r} is unknown: use one of {', '.join(known)}")
    if algorithm != "mpi" and algorithm not in decision.names_for(operation):
        possible = ", ".join(row.name for row in OPERATIONS.values() if algorithm in decision.names_for(row))
        raise InvalidUsageError(f'algorithm="{algorithm}" is for {possible}, not {operation}: use "one_shot"')


def _refusal(call: Call) -> str:
    """Return why the named algorithm does not support the type, the operation or the location of a call; else ""."""
    operation, algorithm, wire = call.operation, call.algorithm, call.arguments.wire
    named = f'algorithm="{algorithm}" of {operation}'
    if wire is not None and algorithm not in ("one_shot", "two_shot"):
        return f'{named} does not support wire_dtype="{wire}": use "auto"'
    if algorithm == "mpi":
        if call.op in ("avg", "tree"):
            lacking = "AVG" if call.op == "avg" else 'order="tree"'
            return f'algorithm="mpi": MPI has no {lacking} for {operation}: leave algorithm= out, or use SUM'
        if call.epilogue is not None and call.on_device:
            return f'algorithm="mpi": MPI applies no epilogue to device arrays of {operation}: use "auto"'
        if operation.reduces and call.dtype is not None and types.mpi_datatype(call.dtype) is None:
            return f'algorithm="mpi": MPI has no type for the {call.dtype} of {operation}: leave algorithm= out'
    elif (operation.of_neighbors or operation.send == "typed") and not call.on_device:
        return f"{named} is for device arrays, and MPI carries it out on host arrays: leave algorithm= out"
    elif call.dtype is None:
        return ""  # only MPI can carry it out, as with algorithm="auto"
    elif algorithm == "ring" and isinstance(op := call.arguments.op, Op) and not op.commute:
        return (
            f'{named}: the ring does not reduce in rank order, and {op!r} does not commute: use "two_shot", or '
            "commute=True"
        )
    elif algorithm == "ring" and (refusal := ring_refusal(call.op or "")):
        return f'{named}: {refusal}: use "auto"'
    elif not call.on_device and algorithm not in selection.algorithms_for(operation):
        return f'{named} is for device arrays: use "one_shot"'
    return ""


REFUSALS = (BufferError, KeyError, ValueError, MPI.Exception)
"""The errors with which mpi4py and MPI refuse the arguments of a call. `MpiCarrier.retry` explains them."""
_ARGUMENT_ERRORS = (MPI.ERR_ARG, MPI.ERR_BUFFER, MPI.ERR_COUNT, MPI.ERR_OP, MPI.ERR_ROOT, MPI.ERR_TYPE)


class MpiCarrier:
    """MPI's collectives on host arrays of ``comm``. ``mode`` is `BLOCKING`, `NONBLOCKING` or `PERSISTENT`."""

    def __init__(self, comm: MPI.Intracomm, reader: Reader, votes: LocationVotes) -> None:
        self._comm = comm
        self._row = reader.session.row
        self._reader = reader
        self._votes = votes

    def call(self, operation: Operation, arguments: Arguments, mode: int, *info: MPI.Info) -> Any:
        """Call mpi4py's method of a mode; return its request, None if it blocks. Only MPI reads the arguments.

        A persistent Reduce_scatter must not be in place, because MPI gets a copy of such an input.
        """
        op = arguments.op
        if (
            operation.send == "by_recvcounts"
            and mode != PERSISTENT
            and arguments.counts is not None
            and is_in_place(arguments.send)
        ):
            # MPICH 5 ends the program if a block overlaps its result, so MPI gets a copy of the input. Ranks that
            # receive nothing need not be in place, so all ranks must still go to MPI.
            send, receive = out_of_place(arguments.receive, arguments.counts, self._comm.rank)
            arguments = arguments._replace(send=send, receive=receive)
        if op is AVG or op is TREE:  # `in` would find each operation that was freed
            lacking, way_out = ("AVG", "use MPI.SUM and divide") if op is AVG else ('order="tree"', "convert it")
            raise RefusedByMpiError(
                f"{operation}: MPI, which carries out calls of this element type, has no {lacking}: {way_out}",
                MPI.ERR_OP,
            )
        if operation.of_neighbors:
            operation, arguments = self._cross(operation, arguments, mode)
        begin_mpi_call(self._row.words, operation.number)
        try:
            return self._invoke(operation, arguments, mode, info, arguments)
        except REFUSALS as error:
            return self.retry(error, operation, arguments, mode, *info)

    def retry(
        self,
        error: BufferError | KeyError | ValueError | MPI.Exception,
        operation: Operation,
        arguments: Arguments,
        mode: int,
        *info: MPI.Info,
    ) -> Any:
        """Retry mpi4py's method after ``error`` with a datatype for the same memory, or explain the error.

        mpi4py may refuse the format of a buffer, such as an unaligned NumPy array, before it communicates, while other
        ranks are in MPI with aligned arrays. In a reduction it also refuses two names of one type.

        Only mpi4py reads the buffers of small calls, because that takes the least time. So this reads them, and raises
        the error that larger buffers raise. An error of MPI that is no fault of this rank's arguments stays as it is.
        """
        try:
            call = self._reader.make_call(operation, arguments)
            if not isinstance(error, MPI.Exception):
                with contextlib.suppress(BufferError, KeyError, ValueError):  # explained below
                    return self._invoke(operation, self._with_mpi_types(call), mode, info, arguments)
            if operation.send == "typed":
                self._require_blocks(call)
            text = f"{operation}: MPI refuses an argument: {error}"
            refused = BufferRefusedError(text) if isinstance(error, BufferError) else InvalidUsageError(text)
            if isinstance(error, MPI.Exception):
                if error.Get_error_class() not in _ARGUMENT_ERRORS:
                    raise error  # MPI raises it while it communicates
                refused = RefusedByMpiError(text, error.Get_error_class())
        except InvalidUsageError as named:
            refused = named
        self._row.words[CALLS_BY_MPI] -= 1  # the other ranks' counts do not have this call before it is made
        self._votes.withdraw()
        raise refused from error

    def _invoke(
        self, operation: Operation, arguments: Arguments, mode: int, info: tuple[MPI.Info, ...], held: Arguments
    ) -> Any:
        comm = self._votes.comm_for(operation) if mode == NONBLOCKING else self._comm
        request = getattr(operation.mpi_class, operation.methods[mode])(comm, *operation.passed(arguments), *info)
        return (
            None if mode == BLOCKING else holding(request, held)
        )  # MPI uses the buffers until the request is complete

    def _with_mpi_types(self, call: Call) -> Arguments:
        """Return the arguments of a call on host arrays with MPI's datatypes for their elements. Local.

        In a reduction MPI wants one name for one type, and a program may name it ``LONG`` here and ``INT64_T`` there.
        """
        given = call.arguments
        if not call.operation.reduces:
            return given

        def with_type(operand: Operand | None, argument: Any) -> Any:
            if operand is None or operand.dtype is None:
                return argument
            dtype = operand.dtype if call.dtype is None else call.dtype  # an empty buffer may have another type
            datatype = types.mpi_datatype(dtype)
            if datatype is None:
                return argument
            return [array_at(operand.pointer, operand.total, dtype, operand.memory.owner), datatype]

        send = given.send if call.in_place else with_type(call.send, given.send)
        return given._replace(send=send, receive=with_type(call.receive, given.receive))

    def _require_blocks(self, call: Call) -> None:
        """Check the counts, displacements and datatypes of an Alltoallw, which otherwise only MPI reads."""
        sends = receives = self._comm.size
        peer = "rank"
        if call.neighborhood is not None:
            sends, receives, peer = len(call.neighborhood.destinations), len(call.neighborhood.sources), "neighbour"
        for operand, size in ((call.send, sends), (call.receive, receives)):
            if operand is not None:
                typed_blocks(operand.spec, size=size, name=operand.name, peer=peer)

    def _cross(self, operation: Operation, arguments: Arguments, mode: int) -> tuple[Operation, Arguments]:
        """Return a call of neighbours whose blocks cross a grid as MPI defines, with an MPI that errs. Local."""
        neighborhood = self._reader.neighbors
        if not neighborhood.crossed or operation.send == "one" or mpi_crosses(mode):
            return operation, arguments
        call = self._reader.make_call(operation, arguments)
        assert call.send is not None and call.receive is not None
        operation, send, receive = crossed_by_displacements(operation, call.send, call.receive, neighborhood.sources)
        return operation, arguments._replace(send=send, receive=receive)
