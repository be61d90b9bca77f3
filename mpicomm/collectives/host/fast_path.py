"""Plain calls: collectives on NumPy arrays that are MPI's beyond doubt, recognised in a fraction of a microsecond.

MPI takes about a microsecond for 8 bytes: to read the arguments as `Call` does would take longer than the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import may_share_memory, ndarray

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.host.selection import least_mapped, use_mapped
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.mpi.ops import AVG
from mpicomm.mpi.types import numpy_dtype

MPI_TYPES = frozenset(np.dtype(code) for code in "?bBhHiIlLqQfdFD")  # with which MPI does what mpicomm promises

LIMITS = {name: least_mapped(operation) for name, operation in OPERATIONS.items()}
"""Of fewer bytes of `MPI_TYPES` in the whole call a collective is MPI's, with any number of ranks."""


_FACTS = {
    row: (row.send == "counted", row.rooted == "send", row.counts == "vector", row.receive == "blocks" != row.send)
    for row in OPERATIONS.values()
}
"""Of each collective: whether ``recvcounts`` cuts its input; whether its input is the root's alone; whether its blocks
differ; whether each rank sends one of the blocks that others receive."""


def is_plain(other: Any, buffer: Any, limit: int) -> bool:
    """Whether a call with these buffers is MPI's; ``buffer`` is one that every rank has, of as many bytes on all.

    ``limit`` is that of `LIMITS`, shared out among the ranks where ``buffer`` is one of as many blocks as they are.
    """
    return (
        type(buffer) is ndarray
        and buffer.nbytes < limit
        and buffer.dtype in MPI_TYPES
        and (
            # The first half of are_apart, which nearly always answers.
            (
                type(other) is ndarray
                and ((other.base is buffer.base is None and other is not buffer) or are_apart(other, buffer))
            )
            or other is None
            or other is MPI.IN_PLACE
        )
    )


def are_apart(a: Any, b: Any) -> bool:
    """Whether two NumPy arrays surely have no memory in common: MPICH 5 ends the program where they overlap."""
    # What owns its memory shares none; the first half takes a fifth of the time of the second.
    return (a.base is b.base is None and a is not b) or not may_share_memory(a, b)


def is_plainly_mpis(operation: Operation, arguments: Arguments, size: int) -> bool:
    """Return whether a call on NumPy arrays is surely MPI's, also where `is_plain` does not tell.

    The answer is the one that `selection.is_mpis` gives on ranks that pass their buffers in other forms.
    """
    send, receive = _array(arguments.send), _array(arguments.receive)
    if arguments.op is AVG:
        return False
    counted, of_root, is_vector, gathers = _FACTS[operation]
    if counted and (arguments.counts is None or type(send) is not ndarray):
        return False  # the ranks have to tell each other the counts, or MPI cannot be trusted with the call
    for buffer in (send, receive):
        if type(buffer) is not ndarray and buffer is not MPI.IN_PLACE and buffer is not None:
            return False
    if type(send) is type(receive) is ndarray and not are_apart(send, receive):
        return False
    # A buffer that every rank has: a buffer of the root alone may be anything on other ranks.
    array, blocks = send, 1
    if of_root and type(receive) is ndarray:
        array, blocks = receive, size
    elif is_vector or type(send) is not ndarray:
        array = receive
    elif gathers:
        blocks = size
    if type(array) is not ndarray or array.dtype not in MPI_TYPES:
        return False
    return not use_mapped(operation, blocks * array.nbytes, size)


def _array(spec: Any) -> Any:
    """Return the array of ``[array, type]`` where that is the array's own type, which says nothing; else ``spec``."""
    if type(spec) is ndarray or not isinstance(spec, (list, tuple)) or len(spec) != 2:
        return spec
    array, datatype = spec
    if type(array) is not ndarray or not isinstance(datatype, MPI.Datatype):
        return spec
    dtype = numpy_dtype(datatype)
    return array if dtype is not None and dtype == array.dtype else spec  # to NumPy None is float64
