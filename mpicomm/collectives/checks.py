"""Checks of one rank's call: its root, its ``recvcounts``, its location, its epilogue, and whether its buffers fit."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.collectives.operations import Operation
from mpicomm.collectives.packed import blocks_of
from mpicomm.epilogues.base import BoundEpilogue, Epilogue
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, overlaps
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.layout import Elements
from mpicomm.mpi.spec import Shape


def require_root(operation: Operation, root: Any, size: int) -> None:
    """Raise unless ``root`` is a rank."""
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(f"{operation}: root={root!r} is no rank: pass an integer from 0 to {size - 1}") from None
    if not 0 <= rank < size:
        raise RefusedByMpiError(f"{operation}: root={root} is no rank: use 0 to {size - 1}", MPI.ERR_ROOT)


def is_on_gpus(operation: Operation, send: Operand | None, receive: Operand | None) -> bool:
    """Return whether a call with these buffers is on GPUs, as far as this rank can know. Local.

    A buffer is None if this rank ignores it, or if the input is in place.
    """
    deciding = [send, receive]
    if operation.rooted == "receive" and send is not None:
        deciding = [send]
    elif operation.rooted == "send" and receive is not None:
        deciding = [receive]
    return any(operand.on_device for operand in deciding if operand is not None)


def is_in_place(buffer: Any) -> bool:
    """Return whether a buffer argument means that the other buffer holds the data."""
    return buffer is MPI.IN_PLACE or buffer is None  # mpi4py treats None as MPI.IN_PLACE


def read_recvcounts(
    operation: Operation, recvcounts: Any, send: Operand, receive: Operand, rank: int, size: int
) -> list[int]:
    """Return ``recvcounts`` as Python's integers, because addresses may exceed the 64 bits of NumPy's integers.

    Raise unless they cut the input into a block for each rank, and this rank has room for its own.
    """
    try:
        counts = [operator.index(count) for count in recvcounts]
    except TypeError:
        raise TypeError(f"{operation}: recvcounts={recvcounts!r}: pass a sequence of integers, one per rank") from None
    if len(counts) != size or sum(counts) != send.total or min(counts) < 0:
        raise InvalidUsageError(
            f"{operation}: recvcounts={counts} must be {size} counts that add up to the {send.total} elements of the "
            "input"
        )
    if receive.total < counts[rank]:
        raise InvalidUsageError(
            f"{operation}: recvbuf has room for {receive.total} elements, but this rank receives {counts[rank]}"
        )
    return counts


def require_room(operation: Operation, send: Operand, receive: Operand, rank: int, epilogue: Epilogue | None) -> None:
    """Raise unless this rank's blocks for itself in both buffers have one length."""

    def own_block(operand: Operand, shape: Shape) -> tuple[int, int]:
        """Return the length of a block and the bytes of its unit: an element, or a byte of a derived datatype."""
        index = 0 if shape == "one" else rank
        if operand.derived is None:
            assert operand.dtype is not None
            return operand.block(index).count, operand.dtype.itemsize
        block = blocks_of(operand, index + 1)[index]
        assert isinstance(block, Elements)
        return block.layout.nbytes, 1

    (sent, nbytes), (room, room_nbytes) = own_block(send, operation.send), own_block(receive, operation.receive)
    unit = "elements"
    if epilogue is not None:
        room = epilogue.reduced_capacity(receive)
    elif not operation.reduces and (nbytes != room_nbytes or send.derived or receive.derived):
        unit, sent, room = "bytes", sent * nbytes, room * room_nbytes
    if sent != room:
        raise InvalidUsageError(
            f"{operation}: sendbuf holds {sent} {unit}, but recvbuf has room for {room}: they must be equal"
        )


def bind_epilogue(
    operation: Operation, given: Epilogue | None, dtype: np.dtype[Any] | None, send: Operand | None, receive: Any
) -> BoundEpilogue | None:
    """Return the epilogue of a call with elements of ``dtype``, bound to its output; None if no epilogue is given."""
    if given is None:
        return None
    if dtype is None or receive is None or receive.dtype is None or not types.is_covered(receive.dtype):
        raise InvalidUsageError(
            f"{operation}: epilogue={given!r} is for the element types and operations that mpicomm reduces itself: "
            "leave it out"
        )
    bound = given.bind(operation.name, dtype, receive)
    for written in bound.writes:
        if send is not None and overlaps(written, send):  # a kernel may write it before it has read sendbuf
            raise InvalidUsageError(f"{operation}: {written.name} overlaps {send.name}: copy one of them")
    return bound
