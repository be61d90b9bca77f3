"""mpicomm as a peer of the bench: its public calls, on symmetric or ordinary arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import mpicomm
from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.mpi_calls import mpi_call
from mpicomm.bench.operations import Case, CaseBuffers
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS
from mpicomm.collectives.wire import Wire

_IN_RANK_ORDER = {algorithm.name for algorithm in ALGORITHMS if algorithm.in_rank_order}


class Mpicomm:
    """mpicomm as a `Peer`. ``symmetric`` says whether its arrays come from ``comm.empty``."""

    version = mpicomm.__version__
    capturable = True
    result_at_front = True

    def __init__(
        self, comm: Communicator, machine: Machine, *, symmetric: bool, algorithm: str, wire: Wire | None = None
    ) -> None:
        self._comm = comm
        self._machine = machine
        self._symmetric = symmetric
        # On the host "auto" may leave a call to MPI, which reduces in any order.
        self.exact = machine.stream is not None if algorithm == "auto" else algorithm in _IN_RANK_ORDER
        self._options: dict[str, Any] = {}
        if machine.stream is not None:
            self._options["stream"] = machine.stream
        if algorithm != "auto":
            self._options["algorithm"] = algorithm
        if wire is not None:
            self._options["wire_dtype"] = wire.codes

    def allocate(self, nbytes: int) -> Any:
        """Return an array. A symmetric array lives until the communicator is freed."""
        return self._comm.empty(nbytes, np.uint8).local if self._symmetric else self._machine.empty(nbytes)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        return {"": mpi_call(self._comm, case, buffers, self._options)}

    def close(self) -> None:
        """Do nothing, because the communicator frees its memory."""
