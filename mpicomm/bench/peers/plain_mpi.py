"""MPI without mpicomm: on host arrays directly, on device arrays through pinned host copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.mpi_calls import mpi_call
from mpicomm.bench.operations import IN_PLACE, Case, CaseBuffers
from mpicomm.bench.peers.base import UnsupportedError
from mpicomm.mpi import types

_LARGEST_STAGED = 64 << 20  # larger sizes take minutes and show nothing new


def missing() -> str | None:
    """Return None, because MPI is always there."""
    return None


class PlainMpi:
    """A `Peer`: mpi4py's own methods."""

    exact = False
    capturable = False
    result_at_front = True

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        self.version = " ".join(MPI.Get_library_version().splitlines()[0].split())
        self._comm = MPI.Intracomm(comm)
        self._machine = machine

    def allocate(self, nbytes: int) -> Any:
        """Return an ordinary array."""
        return self._machine.empty(nbytes)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        if case.operation.reduces and (types.mpi_datatype(case.dtype) is None or case.op == "avg"):
            raise UnsupportedError(f"MPI has no {case.op} of {case.dtype}")
        if case.dtype.isbuiltin != 1:
            raise UnsupportedError(f"MPI has no {case.dtype}")
        if self._machine.stream is None:
            return {"": mpi_call(self._comm, case, buffers, {})}
        if case.nbytes > _LARGEST_STAGED:
            raise UnsupportedError("measured up to 64 MiB")
        return {"": self._staged(case, buffers)}

    def close(self) -> None:
        """Do nothing, because the peer holds nothing."""

    def _staged(self, case: Case, buffers: CaseBuffers) -> Call:
        if case.in_place and case.operation.places != (IN_PLACE,):
            raise UnsupportedError("copies through the host are never in place")
        send = _pinned(buffers.send)
        receive = send if buffers.receive is buffers.send else _pinned(buffers.receive)
        call, stream = mpi_call(self._comm, case, CaseBuffers(send, receive), {}), self._machine.stream

        def run() -> None:
            if send is not None:
                buffers.send.get(out=send, stream=stream, blocking=False)
            stream.synchronize()
            call()
            if receive is not None:
                buffers.receive.set(receive, stream=stream)

        return run


def _pinned(array: Any) -> Any:
    if array is None:
        return None
    import cupyx

    return cupyx.empty_pinned(array.shape, np.uint8)
