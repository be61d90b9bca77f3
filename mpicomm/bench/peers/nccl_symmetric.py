"""NCCL on its own memory, registered as a symmetric window, because NCCL has faster kernels for such memory."""

from __future__ import annotations

import ctypes
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Machine
from mpicomm.bench.peers.base import view_bytes
from mpicomm.bench.peers.nccl import Nccl
from mpicomm.devices.cuda import nccl
from mpicomm.devices.cuda.driver import cuda_major

_GRANULARITY = 2 << 20
_COLLECTIVE_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


def missing() -> str | None:
    """Return the package to install, or None. Local."""
    reason = nccl.missing()
    if reason is None and not nccl.has("ncclCommWindowRegister"):
        package = f"nvidia-nccl-cu{cuda_major()}>=2.27"
        return f"NCCL {nccl.version()} has no symmetric windows: pip install '{package}'"
    return reason


class SymmetricNccl(Nccl):
    """An NCCL communicator with windows."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self._windows: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []

    def allocate(self, nbytes: int) -> Any:
        """Return registered memory of ncclMemAlloc."""
        memory, window = ctypes.c_void_p(), ctypes.c_void_p()
        whole = -(-nbytes // _GRANULARITY) * _GRANULARITY
        nccl.call("ncclMemAlloc", ctypes.byref(memory), whole)
        nccl.call(
            "ncclCommWindowRegister",
            self._comm.handle,
            memory,
            whole,
            ctypes.byref(window),
            _COLLECTIVE_SYMMETRIC,
        )
        self._windows.append((memory, window))
        assert memory.value is not None
        return view_bytes(memory.value, nbytes, self)

    def close(self) -> None:
        for memory, window in self._windows:
            nccl.call("ncclCommWindowDeregister", self._comm.handle, window)
            nccl.call("ncclMemFree", memory)
        super().close()
