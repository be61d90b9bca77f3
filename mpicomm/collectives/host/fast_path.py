"""Plain calls: collectives on NumPy arrays that are certainly MPI's: small ones, and all between nodes.

They are recognised in a fraction of a microsecond, because MPI takes about a microsecond for 8 bytes. `Call` would take
longer to read the arguments than MPI takes for the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import may_share_memory, ndarray

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.host.selection import least_mapped, use_mapped
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.mpi.buffers import is_host_view
from mpicomm.mpi.types import numpy_dtype

MPI_TYPES = frozenset(np.dtype(code) for code in "?bBhHiIlLqQfdFD")
"""Element types for which MPI keeps all promises of mpicomm."""

_FACTS = {row: (row.send == "counted", row.rooted == "send", row.counts == "vector") for row in OPERATIONS.values()}
"""Of each collective: whether ``recvcounts`` cuts its input; whether its input is the root's alone; whether its blocks
differ."""


def limits(nodes: int, *, on_gpus: bool) -> dict[str, int]:
    """Return the bytes below which a collective of `MPI_TYPES` is MPI's without further ado, by its name; local.

    On GPUs no call is in which ranks may have no data: there a rank tells such ranks where the call is, see `witness`.
    """
    return {
        name: 0 if on_gpus and operation.counts != "same" else least_mapped(operation, nodes)
        for name, operation in OPERATIONS.items()
    }


def is_plain(other: Any, buffer: Any, limit: int) -> bool:
    """Return whether a call with these buffers is certainly MPI's; local.

    ``buffer`` is the buffer that every rank has, with the same number of bytes on all. ``limit`` is from `limits`.
    """
    return (
        type(buffer) is ndarray
        and buffer.nbytes < limit
        and buffer.dtype in MPI_TYPES
        and (
            # The first half of are_apart comes first, because it nearly always answers.
            (
                type(other) is ndarray
                and ((other.base is buffer.base is None and other is not buffer) or are_apart(other, buffer))
            )
            or (
                (other is None or other is MPI.IN_PLACE)
                and (
                    (base := buffer.base) is None
                    or (type(base) is ndarray and base.base is None)
                    or is_host_view(buffer)
                )
            )
        )
    )


def are_apart(a: Any, b: Any) -> bool:
    """Return whether two NumPy arrays certainly lie in host memory and share none; MPICH 5 ends the program if they do.

    A NumPy array may be a view of device memory.
    """
    x, y = a.base, b.base
    if x is None:
        x = a
    if y is None:
        y = b
    if type(x) is type(y) is ndarray and x.base is y.base is None:  # x and y own the memory of a and b
        return x is not y or not may_share_memory(a, b)
    return (x is a or is_host_view(a)) and (y is b or is_host_view(b)) and not may_share_memory(a, b)


def is_plainly_mpis(operation: Operation, arguments: Arguments, size: int, nodes: int, crossover: int) -> bool:
    """Return whether a call on NumPy arrays is certainly MPI's, also of more bytes than `is_plain` decides; local.

    The answer agrees with `selection.is_mpis`, which decides on ranks that pass their buffers in other forms.
    """
    array = plain_array(operation, arguments)
    return array is not None and not use_mapped(operation, array.nbytes, size, nodes, crossover)


def plain_array(operation: Operation, arguments: Arguments) -> ndarray[Any, Any] | None:
    """Return the buffer that every rank has if all buffers are NumPy arrays that MPI certainly takes; else None. Local.

    MPI starts such a call of any size as a request.
    """
    send, receive = _array(arguments.send), _array(arguments.receive)
    if arguments.op is not None and type(arguments.op) is not MPI.Op:
        return None  # `AVG`, or an operation of the user
    counted, of_root, is_vector = _FACTS[operation]
    if counted and (arguments.counts is None or type(send) is not ndarray):
        return None  # the ranks have to exchange their counts, or MPI must get a copy of an input in place
    if operation.of_neighbors and not (type(send) is type(receive) is ndarray):
        return None  # it has to be refused, because MPI may take MPI.IN_PLACE for an address
    for buffer in (send, receive):
        if type(buffer) is ndarray:
            if buffer.base is not None and not is_host_view(buffer):
                return None
        elif buffer is not MPI.IN_PLACE and buffer is not None:
            return None
    if type(send) is type(receive) is ndarray and not are_apart(send, receive):
        return None
    # A buffer that every rank has decides, because a root's buffer may be anything on other ranks.
    array = send
    if is_vector or type(send) is not ndarray or (of_root and type(receive) is ndarray):
        array = receive
    return array if type(array) is ndarray and array.dtype in MPI_TYPES else None


def _array(spec: Any) -> Any:
    """Return the array of ``[array, type]`` if the type is the array's own, which adds nothing; else ``spec``."""
    if type(spec) is ndarray or not isinstance(spec, (list, tuple)) or len(spec) != 2:
        return spec
    array, datatype = spec
    if type(array) is not ndarray or not isinstance(datatype, MPI.Datatype):
        return spec
    dtype = numpy_dtype(datatype)
    return array if dtype is not None and dtype == array.dtype else spec  # NumPy takes None for float64
