"""mpicomm as the bench measures it: through its public calls, on symmetric or ordinary arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import mpicomm
from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.mpi_calls import mpi_call
from mpicomm.bench.operations import Buffers, Case
from mpicomm.collectives.gpu import tuning

_OTHER_ORDERS = ("ring", "mpi")
"""The algorithms that do not reduce in rank order."""


class Mpicomm:
    """A peer like the others; ``symmetric``: whether its arrays come from ``comm.empty``."""

    version = mpicomm.__version__
    capturable = True
    result_at_front = True

    def __init__(self, comm: Communicator, machine: Machine, *, symmetric: bool, algorithm: str) -> None:
        self._comm = comm
        self._machine = machine
        self._symmetric = symmetric
        self.exact = _in_rank_order(comm, machine, algorithm)
        self._options: dict[str, Any] = {}
        if machine.stream is not None:
            self._options["stream"] = machine.stream
        if algorithm != "auto":
            self._options["algorithm"] = algorithm

    def allocate(self, nbytes: int) -> Any:
        """Return an array; symmetric ones live until the communicator is freed."""
        return self._comm.empty(nbytes, np.uint8).local if self._symmetric else self._machine.empty(nbytes)

    def prepare(self, case: Case, buffers: Buffers) -> Mapping[str, Call]:
        """Return the call that a user would write."""
        return {"": mpi_call(self._comm, case, buffers, self._options)}

    def close(self) -> None:
        """Do nothing: the communicator frees its memory."""


def _in_rank_order(comm: Communicator, machine: Machine, algorithm: str) -> bool:
    if algorithm != "auto":
        return algorithm not in _OTHER_ORDERS
    if machine.stream is None:
        return False  # MPI may carry out a call
    table = tuning.find(comm.describe().device_name, lambda: None)  # links change its sizes, not its algorithms
    return not any(name in _OTHER_ORDERS for row in table.rows for _, name in row.choices)
