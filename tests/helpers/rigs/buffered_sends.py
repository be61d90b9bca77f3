"""Memory for buffered sends, whichever version of MPI there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpi4py import MPI


@contextlib.contextmanager
def room_for_buffered_sends(comm: MPI.Comm, nbytes: int) -> Iterator[None]:
    """Give ``comm`` a buffer of ``nbytes``; if MPI is older than 4.1, give it to the whole process."""
    memory = bytearray(nbytes)
    try:
        comm.Attach_buffer(memory)
        detach = comm.Detach_buffer
    except NotImplementedError:
        MPI.Attach_buffer(memory)
        detach = MPI.Detach_buffer
    try:
        yield
    finally:
        detach()
