"""What clients with streams of their own, such as `mpicomm.torch`, use of a Communicator beside its methods."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.collectives.gpu.algorithms.base import AnyPlan
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.host.selection import mapped_algorithm
from mpicomm.devices.cuda.types import SideStreams
from mpicomm.dispatch.engines import Engines
from mpicomm.session import Session

__all__ = ["AnyPlan", "Internals", "PlanCache", "mapped_algorithm"]


class Internals:
    """The plan cache, the device and the end of the communicator ``comm``. All methods but `free` are local."""

    def __init__(self, comm: MPI.Intracomm, session: Session, engines: Engines) -> None:
        self._comm: Any = comm
        self._session: Any = session
        self._engines = engines

    @property
    def plan_cache(self) -> PlanCache | None:
        """The cache of calls on device arrays; None before the first of them. It is always the same object.

        It is also None if the communicator records its calls, because it records only calls of its methods.
        """
        return None if self._session.tracer is not None else self._engines.gpu

    def disable_votes(self) -> None:
        """Make no votes, because all ranks pass the same kind of memory in each call, as PyTorch requires.

        A client that enqueues plans of the cache calls this before its first collective, because it makes no votes.
        """
        self._comm._collectives.disable_votes()

    def register_stream(self, what: str, stream: int) -> SideStreams:
        """Declare a stream that lasts as long as the process. Return the marks that order it beside other streams.

        Raises as `SetUp.gpu`; ``what`` names the call in errors.
        """
        backend = self._session.gpu(what)
        backend.permanent_streams.add(stream)
        marks: SideStreams = backend.side_streams
        return marks

    def raise_async_error(self) -> None:
        """Raise as `Communicator.check` does, but wait for no stream. Do nothing on a freed communicator."""
        if self._comm != MPI.COMM_NULL:
            self._session.require_intact("check")

    def prepare_thread(self) -> None:
        """Prepare the calling thread, which a client has started, for work on this device beside the user's threads."""
        self._session.backend.prepare_thread()

    def free(self, timeout_s: float) -> None:
        """Free the communicator, but wait at most ``timeout_s`` for a rank. Collective, blocking."""
        if self._comm != MPI.COMM_NULL:
            self._session.shorten_deadline(timeout_s)
            self._comm.Free()

    def abandon(self) -> None:
        """Leave the memory of the communicator to the end of the process, without the warning that nobody freed it."""
        self._comm._unfreed = False
