"""Calls on host arrays that MPI carries out, and in words why MPI has refused a call."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALLS_BY_MPI
from mpicomm.activity.page import begin_by_mpi
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.checks import is_in_place
from mpicomm.collectives.neighborhood import crossed_by_places, mpi_crosses
from mpicomm.collectives.operations import Operation
from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, typed_blocks
from mpicomm.mpi.faults import BufferRefusedError, RefusedByMpiError
from mpicomm.mpi.host_calls import out_of_place
from mpicomm.mpi.ops import AVG, TREE
from mpicomm.mpi.request_lists import holding
from mpicomm.ways.location_votes import LocationVotes
from mpicomm.ways.reader import Reader

REFUSALS = (BufferError, KeyError, ValueError, MPI.Exception)
"""The errors with which mpi4py and MPI refuse the arguments of a call. `ByMpi.again` puts them in words."""
_FAULTS_OF_ARGUMENTS = (MPI.ERR_ARG, MPI.ERR_BUFFER, MPI.ERR_COUNT, MPI.ERR_OP, MPI.ERR_ROOT, MPI.ERR_TYPE)


class ByMpi:
    """MPI's collectives on the communicator ``comm``. A ``form`` is an index of `Operation.methods`."""

    def __init__(self, comm: MPI.Intracomm, reader: Reader, votes: LocationVotes) -> None:
        self._comm = comm
        self._row = reader.session.row
        self._reader = reader
        self._votes = votes

    def call(self, operation: Operation, arguments: Arguments, form: int, *info: MPI.Info) -> Any:
        """Call mpi4py's method of a form; return its request, None if it blocks. Only MPI reads the arguments.

        In a persistent call the input must not be in place if MPI needs a copy of such an input.
        """
        op = arguments.op
        if operation.send == "counted" and form < 2 and arguments.counts is not None and is_in_place(arguments.send):
            # MPICH 5 ends the program if a block overlaps its result, so MPI gets a copy of the input. Ranks that
            # receive nothing need not be in place, so all ranks must still go to MPI.
            send, receive = out_of_place(arguments.receive, arguments.counts, self._comm.rank)
            arguments = replace(arguments, send=send, receive=receive)
        if op is AVG or op is TREE:  # `in` would find each operation that was freed
            lacking, way_out = ("AVG", "use MPI.SUM and divide") if op is AVG else ('order="tree"', "convert it")
            raise RefusedByMpiError(
                f"{operation}: MPI, which carries out calls of this element type, has no {lacking}: {way_out}",
                MPI.ERR_OP,
            )
        if operation.of_neighbors:
            operation, arguments = self._crossed(operation, arguments, form)
        begin_by_mpi(self._row.words, operation.number)
        try:
            return self._made(operation, arguments, form, info, arguments)
        except REFUSALS as error:
            return self.again(error, operation, arguments, form, *info)

    def again(
        self,
        error: BufferError | KeyError | ValueError | MPI.Exception,
        operation: Operation,
        arguments: Arguments,
        form: int,
        *info: MPI.Info,
    ) -> Any:
        """Call mpi4py's method once more after ``error``, or raise the error in words.

        mpi4py may refuse the format of a buffer, such as an unaligned NumPy array, before it communicates. Other ranks
        may be in MPI with aligned arrays. So this rank gives MPI the same memory with a datatype. In a reduction mpi4py
        also refuses two names of one type.
        """
        if not isinstance(error, MPI.Exception):
            with contextlib.suppress(BufferError, KeyError, ValueError):  # `_refused` finds the words for them
                return self._made(operation, self._named(operation, arguments), form, info, arguments)
        refused = self._refused(error, operation, arguments)  # raises errors that MPI has while it communicates
        self._row.words[CALLS_BY_MPI] -= 1  # the other ranks' counts do not have this call before it is made
        self._votes.withdraw()
        raise refused from error

    def _made(
        self, operation: Operation, arguments: Arguments, form: int, info: tuple[MPI.Info, ...], held: Arguments
    ) -> Any:
        comm = self._votes.comm(operation) if form == 1 else self._comm
        request = getattr(operation.mpi_class, operation.methods[form])(comm, *operation.passed(arguments), *info)
        return holding(request, held) if form else None  # MPI uses the buffers until the request is complete

    def _named(self, operation: Operation, arguments: Arguments) -> Arguments:
        """Return the arguments with the datatypes that MPI has for host arrays. Local. Raises as `Call`.

        In a reduction MPI wants one name for one type, and a program may name it ``LONG`` here and ``INT64_T`` there.
        """
        call = self._reader.call(operation, arguments)
        given = call.arguments
        if not operation.reduces:
            return given

        def named(operand: Operand | None, argument: Any) -> Any:
            if operand is None or operand.dtype is None:
                return argument
            dtype = operand.dtype if call.dtype is None else call.dtype  # an empty buffer may have another type
            datatype = types.mpi_datatype(dtype)
            if datatype is None:
                return argument
            return [array_at(operand.pointer, operand.total, dtype, operand.owner), datatype]

        send = given.send if call.in_place else named(call.send, given.send)
        return replace(given, send=send, receive=named(call.receive, given.receive))

    def _refused(
        self, error: BufferError | KeyError | ValueError | MPI.Exception, operation: Operation, arguments: Arguments
    ) -> InvalidUsageError:
        """Return the error for arguments that mpi4py has refused with ``error``: the same error as for larger buffers.

        Local. Only mpi4py looks at the buffers of small calls, because that takes the least time. If ``error`` is MPI's
        and no fault of this rank's arguments, this raises ``error`` itself.
        """
        try:
            call = self._reader.call(operation, arguments)
            if operation.send == "typed":
                self._require_blocks(call)
        except InvalidUsageError as named:
            return named
        if isinstance(error, MPI.Exception):
            if error.Get_error_class() not in _FAULTS_OF_ARGUMENTS:
                raise error
            return RefusedByMpiError(f"{operation}: MPI refuses an argument: {error}", error.Get_error_class())
        cls = BufferRefusedError if isinstance(error, BufferError) else InvalidUsageError
        return cls(f"{operation}: MPI refuses an argument: {error}")

    def _require_blocks(self, call: Call) -> None:
        """Raise the error of counts, displacements and datatypes in host memory, which otherwise only MPI reads."""
        sends = receives = self._comm.size
        peer = "rank"
        if call.neighborhood is not None:
            sends, receives, peer = len(call.neighborhood.destinations), len(call.neighborhood.sources), "neighbour"
        for operand, size in ((call.send, sends), (call.receive, receives)):
            if operand is not None:
                typed_blocks(operand.spec, size=size, name=operand.name, peer=peer)

    def _crossed(self, operation: Operation, arguments: Arguments, form: int) -> tuple[Operation, Arguments]:
        """Return a call of neighbours on host arrays that crosses the blocks of a grid as MPI defines. Local."""
        neighborhood = self._reader.neighbors
        if not neighborhood.crossed or operation.send == "one" or mpi_crosses(form):
            return operation, arguments
        call = self._reader.call(operation, arguments)
        assert call.send is not None and call.receive is not None
        operation, send, receive = crossed_by_places(operation, call.send, call.receive, neighborhood.sources)
        return operation, replace(arguments, send=send, receive=receive)
