"""Messages of a process to itself, by which MPI takes once more what it has already handed over."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

Content = npt.NDArray[np.uint8]

_lock = threading.Lock()  # else one thread could get what another has sent
_comm: list[MPI.Intracomm] = []


def unpack(content: Content, spec: Any) -> None:
    """Put packed bytes where a buffer specification says. Raises `MPI.Exception` where they are too many."""
    with _lock:
        _own_comm().Sendrecv([content, content.size, MPI.PACKED], 0, 0, spec, 0, 0)


def match(content: Content) -> tuple[MPI.Message, MPI.Request]:
    """Return a message with that content, matched and to be received, and the request of its sender, to be kept."""
    with _lock:
        request = _own_comm().Isend([content, content.size, MPI.PACKED], 0, 0)
        return _own_comm().Mprobe(0, 0), request


def start_unpickling(content: Content) -> MPI.Request:
    """Return mpi4py's request for a Python object."""
    with _lock:
        request = _own_comm().irecv(bytearray(content.size), 0, 0)
        _own_comm().Send([content, content.size, MPI.PACKED], 0, 0)
        return request


def _own_comm() -> MPI.Intracomm:
    if not _comm:
        _comm.append(MPI.COMM_SELF.Dup())  # on MPI.COMM_SELF itself the program may receive
    return _comm[0]
