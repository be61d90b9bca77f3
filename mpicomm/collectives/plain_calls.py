"""Plain calls: collectives on NumPy arrays that are MPI's beyond doubt, recognised in a fraction of a microsecond.

MPI takes about a microsecond for 8 bytes: to read the arguments as `Call` does would take longer than the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import may_share_memory, ndarray

from mpicomm.collectives.calls import FORMS, Arguments
from mpicomm.collectives.host_selection import mapped_from, use_mapped
from mpicomm.collectives.ops import AVG

_MPI_TYPES = frozenset(np.dtype(code) for code in "?bBhHiIlLqQfdFD")  # with which MPI does what mpicomm promises

_ONE_BLOCK = ("Gather", "Reduce_scatter_block", "Scatter")
"""Operations of which `is_plain` sees one of as many blocks as there are ranks."""


class Limit(dict[np.dtype[Any], int]):
    """Per element type, from how many bytes of the buffer that `is_plain` looks at a call may not be MPI's."""

    def __missing__(self, dtype: object) -> int:
        """Return 0 for types with which a call is never plain."""
        return 0


def limits(size: int) -> dict[str, Limit]:
    """Return the limit of each operation; local."""
    return {
        operation: Limit(
            dict.fromkeys(_MPI_TYPES, -(-mapped_from(operation, size) // (size if operation in _ONE_BLOCK else 1)))
        )
        for operation in FORMS
    }


def is_plain(other: Any, buffer: Any, limit: Limit) -> bool:
    """Whether a call with these buffers is MPI's; ``buffer`` is one that every rank has, of as many bytes on all."""
    return (
        type(buffer) is ndarray
        and buffer.nbytes < limit[buffer.dtype]
        and (other is None or other is MPI.IN_PLACE or (type(other) is ndarray and are_apart(other, buffer)))
    )


def are_apart(a: Any, b: Any) -> bool:
    """Whether two NumPy arrays surely have no memory in common: MPICH 5 ends the program where they overlap."""
    # What owns its memory shares none; the first half takes a fifth of the time of the second.
    return (a.base is b.base is None and a is not b) or not may_share_memory(a, b)


def is_plainly_mpis(operation: str, arguments: Arguments, size: int) -> bool:
    """Whether a call on plain NumPy arrays is below the switch point, of those too that `is_plain` does not tell.

    It has to be what is decided on ranks that pass their buffers in other forms.
    """
    send, receive = arguments.send, arguments.receive
    if arguments.op is AVG:
        return False
    if operation == "Reduce_scatter" and (arguments.counts is None or type(send) is not ndarray):
        return False  # the counts have to be found out, or MPI cannot be trusted with it
    for buffer in (send, receive):
        if type(buffer) is not ndarray and buffer is not MPI.IN_PLACE and buffer is not None:
            return False
    if type(send) is type(receive) is ndarray and not are_apart(send, receive):
        return False
    # A buffer that every rank has: what others than the root pass for the root's alone may be anything.
    blocks = 1
    if operation == "Allgatherv" or type(send) is not ndarray:
        array = receive
    elif operation in ("Allgather", "Gather"):
        array, blocks = send, size
    else:
        array = send
    if operation in ("Scatter", "Scatterv") and type(receive) is ndarray:
        array, blocks = receive, size
    if type(array) is not ndarray or array.dtype not in _MPI_TYPES:
        return False
    return not use_mapped(operation, blocks * array.nbytes, size)
