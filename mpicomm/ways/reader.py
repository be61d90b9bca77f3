"""Reader: reads and checks the calls of one communicator."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.call_log import CallLocation
from mpicomm.collectives.host import selection
from mpicomm.collectives.neighborhood import Neighborhood, neighborhood_of
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.collectives.patterns import ring_refusal
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import parse, refuse_stream
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.host_calls import BESIDE, require_no_graph
from mpicomm.mpi.ops import TREE, Op, op_name
from mpicomm.session import Session


class Reader:
    """Reads the calls of the communicator ``comm``."""

    def __init__(self, comm: MPI.Intracomm, session: Session) -> None:
        self._comm = comm
        self.session = session
        placement = session.placement
        self._on_gpus = isinstance(placement.here.device, int) and len(placement.places) > 1

    def read(self, operation: Operation, arguments: Arguments, algorithm: str) -> Call:
        """Return a call of which all ranks know that it lies where this rank's arrays lie. See `look` and `placed`."""
        call = self.look(operation, arguments, algorithm, None)
        return self.placed(call, "gpu" if call.on_device else "host")

    def look(
        self,
        operation: Operation,
        arguments: Arguments,
        algorithm: str,
        stream: Any,
        *,
        place: CallLocation | None = None,
    ) -> Call:
        """Return a call that was read. ``place`` is its location, if that is known."""
        given = arguments
        if algorithm != "auto":
            _require_known(operation, algorithm)
        if operation.send == "counted" and arguments.counts is None and arguments.send is not MPI.IN_PLACE:
            mine = parse(arguments.receive, writable=True, name="recvbuf").total
            arguments = replace(arguments, counts=MPI.Intracomm.allgather(self._comm, mine))  # as mpi4py does
        try:
            call = self.call(operation, arguments, algorithm, place)
        except RefusedByMpiError as error:
            self._comm.Call_errhandler(error.Get_error_class())  # as MPI does, which may end the program
            raise
        if call.device_array is None:
            refuse_stream(operation.name, stream)  # before this rank waits for the votes of others
        elif self._on_gpus and not call.on_device:
            # The root's other buffer: a capture is refused here, because the vote after it waits for other ranks.
            device = self.session.gpu(operation.name)
            require_no_graph(operation.name, device, device.stream(stream, call.device_array), BESIDE)
        call.given, call.stream = given, stream
        return call

    def placed(self, call: Call, place: CallLocation) -> Call:
        """Return a call at its location, on which all ranks agree, after the checks that depend on the location."""
        if place == "gpu" and not call.on_device:
            given, stream = call.given, call.stream
            arguments = replace(given, counts=call.arguments.counts)
            call = self.call(call.operation, arguments, call.algorithm, place)
            call.given, call.stream = given, stream
        if call.algorithm != "auto":
            _require_possible(call)
        return call

    @cached_property
    def neighbors(self) -> Neighborhood:
        """The neighbours of this rank, which the first call checks. Raises as `neighborhood_of`."""
        assert isinstance(self._comm, MPI.Topocomm)
        return neighborhood_of(self._comm)

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
        placement = self.session.placement
        leaves, domains, size = placement.here.leaves, placement.domains, len(placement.places)
        if leaves % size:
            return f"{size} ranks cannot hold {leaves} leaves in equal blocks: use 1, 2, 4, ... or {leaves} ranks"
        if [rank for ranks in domains for rank in ranks] != list(range(size)) or len({*map(len, domains)}) > 1:
            return f"each peer domain needs equally many ranks that follow each other, and the domains are {domains}"
        return ""

    def call(
        self,
        operation: Operation,
        arguments: Arguments,
        algorithm: str = "auto",
        place: CallLocation | None = None,
    ) -> Call:
        """Return a call as `Call` reads it. Local."""
        neighborhood, places = self.neighbors if operation.of_neighbors else None, self.session.placement
        rank, size = places.rank, len(places.places)
        return Call(operation, arguments, rank, size, algorithm, neighborhood, place=place)


def _require_known(operation: Operation, algorithm: str) -> None:
    """Raise for an algorithm that does not exist, or that does not serve this collective."""
    from mpicomm.collectives.gpu import decision  # here, because few programs name an algorithm

    known = ("auto", "mpi", *decision.NAMES)
    if algorithm not in known:
        raise InvalidUsageError(f"algorithm={algorithm!r} is unknown: use one of {', '.join(known)}")
    if algorithm != "mpi" and algorithm not in decision.names_for(operation):
        possible = ", ".join(row.name for row in OPERATIONS.values() if algorithm in decision.names_for(row))
        raise InvalidUsageError(f'algorithm="{algorithm}" is for {possible}, not {operation}: use "one_shot"')


def _require_possible(call: Call) -> None:
    """Raise if the named algorithm does not support the type, the operation, or the location of the buffers."""
    operation, algorithm, wire = call.operation, call.algorithm, call.arguments.wire
    if wire is not None and algorithm not in ("one_shot", "two_shot"):
        raise InvalidUsageError(
            f'algorithm="{algorithm}" of {operation} sends no codes of 8 bits for wire_dtype="{wire}": use "auto"'
        )
    if algorithm == "mpi":
        if call.op in ("avg", "tree"):
            lacking = "AVG" if call.op == "avg" else 'order="tree"'
            raise InvalidUsageError(
                f'algorithm="mpi": MPI has no {lacking} for {operation}: leave algorithm= out, or use SUM'
            )
        if call.epilogue is not None and call.on_device:
            raise InvalidUsageError(
                f'algorithm="mpi": MPI applies no epilogue to device arrays of {operation}: use "auto"'
            )
        if operation.reduces and call.dtype is not None and types.mpi_datatype(call.dtype) is None:
            raise InvalidUsageError(
                f'algorithm="mpi": MPI has no type for the {call.dtype} of {operation}: leave algorithm= out'
            )
    elif (operation.of_neighbors or operation.send == "typed") and not call.on_device:
        raise InvalidUsageError(
            f"algorithm={algorithm!r} of {operation} is for device arrays, and MPI carries it out on host arrays: "
            "leave algorithm= out"
        )
    elif call.dtype is None:
        return  # only MPI can carry it out, as with algorithm="auto"
    elif algorithm == "ring" and isinstance(op := call.arguments.op, Op) and not op.commute:
        raise InvalidUsageError(
            f'algorithm="ring" of {operation}: the ring does not reduce in rank order, and {op!r} does not commute: '
            'use "two_shot", or commute=True'
        )
    elif algorithm == "ring" and (refusal := ring_refusal(call.op or "")):
        raise InvalidUsageError(f'algorithm="ring" of {operation}: {refusal}: use "auto"')
    elif not call.on_device and algorithm not in selection.algorithms_for(operation):
        raise InvalidUsageError(f'algorithm="{algorithm}" of {operation} is for device arrays: use "one_shot"')
