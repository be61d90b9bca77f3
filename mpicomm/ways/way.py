"""Way: the interface of all that carries out collective calls: MPI, mapped memory, GPUs, and ways on top of others."""

from __future__ import annotations

from typing import Protocol

from mpi4py import MPI

from mpicomm.collectives.call import Call

Begun = MPI.Request | None
"""A call that was enqueued: MPI's request, or a `DeferredRequest`; None if no rank has to wait for it."""


class Way(Protocol):
    """Carries out calls of one communicator. All ranks take the same way for a call."""

    def enqueue(self, call: Call, *, blocking: bool) -> Begun:
        """Enqueue a call that was read. Collective.

        When this returns, a ``blocking`` call has to be over, or in the order of its stream. The answer is None then.
        Blocking, nonblocking and persistent calls differ in their use of the answer, see `dispatch`.
        """


class Carry(Protocol):
    """Carries out another call, for a way on top of others: the way of that call enqueues it."""

    def __call__(self, call: Call, *, blocking: bool) -> Begun:
        """See `Way.enqueue`."""
