"""Receives into plain NumPy arrays on communicators of GPUs, where a rendezvous header may arrive in place of data.

The length of most messages shows that they are data, so these receives need no endpoint.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.messages.reader import parse_any
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.shown import sendrecv

_address = MPI.Get_address  # a tenth of the time of NumPy's `ctypes`
_byte = MPI.BYTE


class ArrayLanding:
    """The memory that MPI gets for an array, ``spec``: the array, or memory for a header if the array is shorter.

    ``name`` is the argument of ``operation``. Raises the errors of `parse_any` for an array that cannot receive.
    """

    __slots__ = ("array", "operation", "saved", "spec", "staging")

    def __init__(self, operation: str, array: Any, name: str) -> None:
        flags = array.flags
        if not (flags.forc and flags.writeable):
            parse_any(array, True, name)  # raises
        self.operation = operation
        self.array = self.spec = array
        self.staging: Any = None
        self.saved = b""
        """What a header in the array overwrites: the message may be shorter than the header."""
        if array.nbytes < HEADER_NBYTES:
            self.staging = np.empty(HEADER_NBYTES, np.uint8)
            self.spec = [self.staging, HEADER_NBYTES, MPI.PACKED]
        else:
            self.saved = ctypes.string_at(_address(array), HEADER_NBYTES)

    def has_data(self, status: MPI.Status) -> bool:
        """Return whether MPI has received data, which then is in the array; False if the length is that of a header.

        Raises `MPI.Exception` if the data is longer than the array.
        """
        nbytes = status.Get_count(_byte)
        if nbytes == HEADER_NBYTES:
            return False
        if self.staging is not None:
            if nbytes > self.array.nbytes:
                raise MPI.Exception(MPI.ERR_TRUNCATE)
            ctypes.memmove(_address(self.array), _address(self.staging), nbytes)
        return True


Side = tuple[Any, int, int]
"""A buffer, the rank to which it goes, and the tag."""


class Exchanged:
    """The message that a `Sendrecv` receives. MPI sends the other message beside it."""

    __slots__ = ("_comm", "_posted", "_sent")

    def __init__(self, comm: MPI.Intracomm, sent: Side, posted: tuple[int, int]) -> None:
        self._comm, self._sent, self._posted = comm, sent, posted

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Send and receive."""
        sendrecv(self._comm, *self._sent, spec, *self._posted, status)
