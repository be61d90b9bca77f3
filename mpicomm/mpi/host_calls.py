"""MPI's calls on host memory with elements that mpi4py may not know: bfloat16 and the floats of 8 bits go as bytes.

The functions ask MPI first, because mpi4py refuses such elements before it sends, and a look at every type would take
longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicomm.devices.host import array_at
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, parse

Result = TypeVar("Result")

_BYTES = np.dtype(np.uint8)
REFUSALS = (BufferError, KeyError)
"""mpi4py's errors for elements and formats that it does not know."""


def for_mpi(operand: Operand) -> Any:
    """Return an operand as the argument for a movement by MPI: as bytes if mpi4py has no type for its elements.

    Device memory becomes a buffer that names its address, which `HostCopies` takes.
    """
    dtype = operand.dtype
    if dtype is None:
        return operand.spec
    by_name = operand.mpi_type is None and isinstance(operand.spec, (list, tuple)) and type(operand.spec[-1]) is str
    if types.mpi_datatype(dtype) is not None and not by_name:  # mpi4py does not know names such as "float64"
        return operand.spec
    counts, displs, size = operand.counts, operand.displs, dtype.itemsize
    if counts is None or displs is None:
        return [_bytes_of(operand, operand.nbytes), MPI.BYTE]
    reach = max((place + n for n, place in zip(counts, displs, strict=True) if n), default=0)
    memory = _bytes_of(operand, reach * size)
    return [memory, [n * size for n in counts], [place * size for place in displs], MPI.BYTE]


def _bytes_of(operand: Operand, nbytes: int) -> Any:
    if operand.on_device:
        return MPI.memory.fromaddress(operand.pointer, nbytes)
    return array_at(operand.pointer, nbytes, _BYTES, operand.owner)


def as_bytes(spec: Any, writable: bool, name: str) -> Any:
    """Return the host argument ``name``, which MPI has refused, as bytes if MPI lacks its type; else as it is. Local.

    Raises the errors of `parse`.
    """
    return for_mpi(parse(spec, writable=writable, name=name))


def both_as_bytes(sendbuf: Any, dest: int, recvbuf: Any, source: int) -> tuple[Any, Any]:
    """As `as_bytes`, for a send buffer and a receive buffer.

    A buffer for MPI.PROC_NULL becomes None, because MPI ignores it.
    """
    sent = None if dest == MPI.PROC_NULL else as_bytes(sendbuf, False, "sendbuf")
    return sent, None if source == MPI.PROC_NULL else as_bytes(recvbuf, True, "recvbuf")


def call(
    method: Callable[..., Result], called: MPI.Intracomm | MPI.Message, buf: Any, *rest: Any, writable: bool = False
) -> Result:
    """Call MPI's ``method`` of ``called`` on a host buffer.

    Raises MPI's errors, and the errors of `as_bytes` for a buffer that MPI refuses.
    """
    try:
        return method(called, buf, *rest)
    except REFUSALS:
        spec = as_bytes(buf, writable, "buf")
    return method(called, spec, *rest)


def call_on_two(
    method: Callable[..., Result],
    comm: MPI.Intracomm,
    sendbuf: Any,
    dest: int,
    sendtag: int,
    recvbuf: Any,
    source: int,
    *rest: Any,
) -> Result:
    """As `call`, for a send buffer and a receive buffer."""
    try:
        return method(comm, sendbuf, dest, sendtag, recvbuf, source, *rest)
    except REFUSALS:
        sent, received = both_as_bytes(sendbuf, dest, recvbuf, source)
    return method(comm, sent, dest, sendtag, received, source, *rest)
