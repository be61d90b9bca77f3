"""Whether the two buffers of a call share memory."""

from __future__ import annotations

from mpi4py import MPI

from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.faults import RefusedByMpiError


def overlaps(a: Operand, b: Operand) -> bool:
    """Return whether two operands share memory.

    It is False if only MPI can handle one of them, because MPI checks it.
    """
    first, second = _extents(a), _extents(b)
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][1] <= second[j][0]:
            i += 1
        elif second[j][1] <= first[i][0]:
            j += 1
        else:
            return True
    return False


def require_separate(send: Operand, receive: Operand, *, reduction: bool = False) -> None:
    """Raise `RefusedByMpiError` if the two share memory. In a reduction both may be exactly the same memory."""
    if not overlaps(send, receive):
        return
    if reduction and send.pointer == receive.pointer and send.total == receive.total and send.dtype == receive.dtype:
        return
    raise RefusedByMpiError(
        f"{send.name} and {receive.name} overlap: pass MPI.IN_PLACE if the receive buffer already holds the data, or "
        "copy one of them",
        MPI.ERR_BUFFER,
    )


def _extents(operand: Operand) -> list[tuple[int, int]]:
    """Return the bytes of an operand, as sorted pairs of start and end."""
    if operand.dtype is None or operand.total == 0:
        return []
    itemsize = operand.dtype.itemsize
    if operand.counts is None or operand.displs is None:
        return [(operand.pointer, operand.pointer + operand.total * itemsize)]
    return sorted(
        (operand.pointer + place * itemsize, operand.pointer + (place + n) * itemsize)
        for n, place in zip(operand.counts, operand.displs, strict=True)
        if n > 0
    )
