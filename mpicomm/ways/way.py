"""Way: the face of all that carries out collective calls: MPI, mapped memory, GPUs, and ways on top of others."""

from __future__ import annotations

from typing import Protocol

from mpi4py import MPI

from mpicomm.collectives.call import Call
from mpicomm.mpi.requests import DeferredWork

Begun = MPI.Request | DeferredWork | None
"""A call that was enqueued: MPI's request, or work that MPI does not know; None where nobody has to wait for it."""


class Way(Protocol):
    """Carries out calls of one communicator. All ranks take the same way for a call."""

    def enqueue(self, call: Call, *, blocking: bool) -> Begun:
        """Enqueue a call that was read. Collective.

        A ``blocking`` call has to be over when this returns, or in the order of its stream; the answer is None then.
        Blocking, nonblocking and persistent calls differ in what they do with the answer, see `dispatch`.
        """


class Carry(Protocol):
    """Carries out another call, for a way on top of others: the way that the call goes enqueues it."""

    def __call__(self, call: Call, *, blocking: bool) -> Begun:
        """See `Way.enqueue`."""
