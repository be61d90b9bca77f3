"""Windows of GPUs on ranks whose devices are made of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpicomm
from mpicomm.devices.base import Link
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.fakes.window_devices import WindowDevice
from tests.helpers.rigs.communicators import communicator
from tests.helpers.rigs.message_rigs import take_for_gpu

COUNT = 40


class WindowRig:
    """A window of int64 on every rank, whose parts hold -1."""

    def __init__(self, comm: mpicomm.Communicator, device: WindowDevice, dtype: Any) -> None:
        self.comm, self.device, self.dtype = comm, device, np.dtype(dtype)
        self.rank, self.size = comm.rank, comm.size
        self.right, self.left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        nbytes = COUNT * self.dtype.itemsize
        self.win = mpicomm.Win.Allocate(nbytes, self.dtype.itemsize, MPI.INFO_NULL, comm)
        self.part = self.win.tomemory().view(self.dtype)
        self.part[:] = -1
        MPI.Intracomm.Barrier(comm)

    def of(self, values: Any, dtype: Any = None) -> DeviceArray:
        return DeviceArray(self.device, np.array(values, self.dtype if dtype is None else dtype))

    def mine(self) -> list[Any]:
        """Return this rank's part after all work of the device."""
        self.device.synchronize()
        self.device.check()
        found: list[Any] = self.part.tolist()
        return found

    def barrier(self) -> None:
        """Wait for the work of all ranks."""
        self.device.synchronize()
        MPI.Intracomm.Barrier(self.comm)


@contextlib.contextmanager
def on_window_device(
    *, timeout_s: float = 20, atomics: Callable[[int], bool] = lambda rank: True
) -> Iterator[tuple[mpicomm.Communicator, WindowDevice]]:
    """Give a communicator whose device is a `WindowDevice`. The block frees its windows."""
    with communicator("cpu", timeout_s=timeout_s) as parent:
        comm = parent.Dup()
        device = cast(WindowDevice, take_for_gpu(comm, made_by=WindowDevice))
        links = [Link("NVLink" if atomics(rank) else "PCIe", native_atomics=atomics(rank)) for rank in range(comm.size)]
        comm._session.links = lambda: tuple(links)  # type: ignore[method-assign]
        yield comm, device
        comm.Free()
        assert device.closed


@contextlib.contextmanager
def window_rig(
    dtype: Any = np.int64, *, timeout_s: float = 20, atomics: Callable[[int], bool] = lambda rank: True
) -> Iterator[WindowRig]:
    with on_window_device(timeout_s=timeout_s, atomics=atomics) as (comm, device):
        rig = WindowRig(comm, device, dtype)
        yield rig
        if device.missed is None:
            rig.barrier()
            rig.win.Free()


def placed(rig: WindowRig, values: npt.NDArray[Any]) -> Any:
    """Return a device buffer that does not begin at a multiple of its elements' size."""
    holder = DeviceArray(rig.device, np.zeros(values.nbytes + 1, np.uint8))
    holder.memory[1:] = values.view(np.uint8)
    return MPI.memory.fromaddress(holder.memory.ctypes.data + 1, values.nbytes), holder
