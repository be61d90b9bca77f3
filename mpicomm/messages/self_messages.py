"""Messages of this process to itself. They let MPI receive once more a message that it has already received."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

Content = npt.NDArray[np.uint8]

_lock = threading.Lock()  # so that no thread receives the message of another thread
_comm: list[MPI.Intracomm] = []


def unpack(content: Content, spec: Any) -> None:
    """Receive packed bytes into a buffer specification. Raises `MPI.Exception` for more bytes than the buffer takes."""
    with _lock:
        _self_comm().Sendrecv([content, content.size, MPI.PACKED], 0, 0, spec, 0, 0)


def match(content: Content) -> tuple[MPI.Message, MPI.Request]:
    """Return a matched message with that content, and the request of its send.

    The caller keeps the request until it receives.
    """
    with _lock:
        request = _self_comm().Isend([content, content.size, MPI.PACKED], 0, 0)
        return _self_comm().Mprobe(0, 0), request


def start_unpickling(content: Content) -> MPI.Request:
    """Return mpi4py's request for the Python object that is pickled in ``content``."""
    with _lock:
        request = _self_comm().irecv(bytearray(content.size), 0, 0)
        _self_comm().Send([content, content.size, MPI.PACKED], 0, 0)
        return request


def _self_comm() -> MPI.Intracomm:
    if not _comm:
        # This is a duplicate, because the program itself may receive on MPI.COMM_SELF, which may be a Communicator.
        _comm.append(MPI.Intracomm(MPI.COMM_SELF).Dup())
    return _comm[0]
