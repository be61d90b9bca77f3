"""The way of calls on host arrays that MPI carries out."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALLS_BY_MPI
from mpicomm.activity.page import begin_by_mpi
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.checks import is_in_place
from mpicomm.collectives.operations import Operation
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.host_calls import out_of_place
from mpicomm.mpi.ops import AVG, TREE
from mpicomm.mpi.request_lists import holding
from mpicomm.session import Session
from mpicomm.ways.location_votes import LocationVotes
from mpicomm.ways.reader import REFUSALS, Reader


class MpiWay:
    """MPI itself, for host arrays: its calls, its requests, and its persistent requests."""

    def __init__(self, comm: MPI.Intracomm, session: Session, reader: Reader, votes: LocationVotes) -> None:
        self._comm = comm
        self._session = session
        self._reader = reader
        self._votes = votes

    def enqueue(self, call: Call, *, blocking: bool) -> MPI.Request | None:
        """See `Way.enqueue`."""
        return self.carry_out(call.operation, call.arguments, blocking=blocking)

    def carry_out(self, operation: Operation, arguments: Arguments, *, blocking: bool) -> MPI.Request | None:
        """Like `enqueue`, for a call that is certainly MPI's, so that only MPI reads its arguments."""
        if operation.send == "counted" and arguments.counts is not None and is_in_place(arguments.send):
            # MPICH 5 ends the program if a block overlaps its result, so MPI gets a copy of the input. Ranks that
            # receive nothing need not be in place, so all ranks must still take MPI's way.
            send, receive = out_of_place(arguments.receive, arguments.counts, self._comm.rank)
            arguments = replace(arguments, send=send, receive=receive)
        if blocking:
            self.call(operation, arguments, operation.name)
            return None
        comm = self._votes.comm(operation)
        request: MPI.Request = self.call(operation, arguments, operation.nonblocking, comm=comm)
        return holding(request, arguments)  # MPI uses the buffers until the request is complete

    def prepare(self, operation: Operation, arguments: Arguments, info: MPI.Info) -> MPI.Prequest:
        """Return MPI's persistent request. The input must not be in place if MPI needs a copy of such an input."""
        prepared: MPI.Prequest = self.call(operation, arguments, operation.persistent, info)
        return holding(prepared, arguments)

    def call(
        self,
        operation: Operation,
        arguments: Arguments,
        method: str,
        *more: MPI.Info,
        comm: MPI.Intracomm | None = None,
    ) -> Any:
        """Call mpi4py's ``method``. The method of the Communicator has called this method."""
        if arguments.op is AVG or arguments.op is TREE:  # `in` would find each operation that was freed
            lacking, way_out = (
                ("AVG", "use MPI.SUM and divide") if arguments.op is AVG else ('order="tree"', "convert it")
            )
            raise RefusedByMpiError(
                f"{operation}: MPI, which carries out calls of this element type, has no {lacking}: {way_out}",
                MPI.ERR_OP,
            )
        if operation.of_neighbors:
            form = operation.methods.index(method)
            operation, arguments = self._reader.crossed(operation, arguments, form)
            method = operation.methods[form]
        begin_by_mpi(self._session.row.words, operation.number)
        try:
            return getattr(operation.mpi_class, method)(comm or self._comm, *operation.passed(arguments), *more)
        except REFUSALS as error:
            return self.again(error, operation, arguments, method, *more, comm=comm)

    def again(
        self,
        error: BufferError | KeyError | ValueError | MPI.Exception,
        operation: Operation,
        arguments: Arguments,
        method: str,
        *more: MPI.Info,
        comm: MPI.Intracomm | None = None,
    ) -> Any:
        """Call mpi4py's ``method`` once more after ``error``, or raise the error of `Reader.refused`.

        mpi4py may refuse the format of a buffer, such as an unaligned NumPy array, before it communicates. Other ranks
        may be in MPI with aligned arrays. So this rank gives MPI the same memory with a datatype. In a reduction mpi4py
        also refuses two names of one type.
        """
        if not isinstance(error, MPI.Exception):
            with contextlib.suppress(BufferError, KeyError, ValueError):  # `refused` finds the words for them
                named = self._reader.for_mpi(operation, arguments)
                return getattr(operation.mpi_class, method)(comm or self._comm, *operation.passed(named), *more)
        refused = self._reader.refused(error, operation, arguments)  # raises errors that MPI has while it communicates
        self._session.row.words[CALLS_BY_MPI] -= 1  # the other ranks' counts do not have this call before it is made
        self._votes.withdraw()
        raise refused from error
