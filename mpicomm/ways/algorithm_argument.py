"""The checks of the argument ``algorithm`` of a collective call."""

from __future__ import annotations

from mpicomm.collectives.call import Call
from mpicomm.collectives.host import selection
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import ring_refusal
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.ops import Op


def require_known(operation: Operation, algorithm: str) -> None:
    """Raise for an algorithm that does not exist, or that does not serve this collective."""
    from mpicomm.collectives.gpu.algorithms import registry  # here, because few programs name an algorithm

    known = ("auto", "mpi", *registry.NAMES)
    if algorithm not in known:
        raise InvalidUsageError(f"algorithm={algorithm!r} is unknown: use one of {', '.join(known)}")
    if algorithm != "mpi" and algorithm not in registry.names_for(operation):
        possible = ", ".join(registry.operations_for(algorithm))
        raise InvalidUsageError(f'algorithm="{algorithm}" is for {possible}, not {operation}: use "one_shot"')


def require_possible(call: Call) -> None:
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
