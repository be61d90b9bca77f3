"""What clients with streams of their own, such as `mpicomm.torch`, use of a Communicator beside its methods."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.collectives.gpu.algorithms.base import AnyPlan
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.host.selection import best_mapped as mapped_algorithm
from mpicomm.devices.cuda.types import SideStreams
from mpicomm.dispatch.engines import Engines
from mpicomm.session import Session

__all__ = ["AnyPlan", "Internals", "PlanCache", "mapped_algorithm"]


class Internals:
    """The known calls, the device and the end of the communicator ``comm``. All methods but `free_within` are local."""

    def __init__(self, comm: MPI.Intracomm, session: Session, engines: Engines) -> None:
        self._comm: Any = comm
        self._session: Any = session
        self._engines = engines

    @property
    def known(self) -> PlanCache | None:
        """The calls on device arrays that were made before; None before the first of them. The cache never changes.

        It is also None if the communicator records its calls, because it records only calls of its methods.
        """
        return None if self._session.tracer is not None else self._engines.gpu

    def expect_alike(self) -> None:
        """Make no votes, because all ranks pass the same kind of memory in each call, as PyTorch requires.

        A client that enqueues known calls itself calls this before its first collective, because it makes no votes.
        """
        self._comm._collectives.expect_alike()

    def use_stream(self, what: str, stream: int) -> SideStreams:
        """Return the marks of this rank's GPU, for a stream that lasts as long as the process.

        Raises as `SetUp.gpu`; ``what`` names the call in errors.
        """
        backend = self._session.gpu(what)
        backend.lasting_streams.add(stream)
        marks: SideStreams = backend.side_streams
        return marks

    def check_at_once(self) -> None:
        """Raise as `Communicator.check` does, but wait for no stream. Do nothing on a freed communicator."""
        if self._comm != MPI.COMM_NULL:
            self._session.require_intact("check")

    def prepare_thread(self) -> None:
        """Prepare the calling thread, which a client has started, for work on this device beside the user's threads."""
        self._session.backend.prepare_thread()

    def free_within(self, limit_s: float) -> None:
        """Free the communicator, but wait at most ``limit_s`` seconds for a rank. Collective, blocking."""
        if self._comm != MPI.COMM_NULL:
            self._session.hasten(limit_s)
            self._comm.Free()

    def abandon(self) -> None:
        """Leave the memory of the communicator to the end of the process, without the warning that nobody freed it."""
        self._comm._unfreed = False
