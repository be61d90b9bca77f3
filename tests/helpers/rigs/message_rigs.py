"""Communicators whose devices are threads, for tests of messages and of windows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpicomm
from mpicomm.cluster.placement import Placement
from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.session import Session
from tests.helpers.fakes.message_devices import (
    LONGEST_FOR_KERNELS,
    DeviceArray,
    ThreadDevice,
)
from tests.helpers.fakes.window_devices import WindowDevice
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.rigs.communicators import communicator

Array = npt.NDArray[Any]

LARGE = LONGEST_FOR_KERNELS  # int32: four times the bytes that kernels copy


class Rig:
    """A communicator whose device is made of threads, and its neighbours."""

    def __init__(self, comm: mpicomm.Communicator, device: ThreadDevice) -> None:
        self.comm, self.device = comm, device
        self.rank, self.size = comm.rank, comm.size
        self.right, self.left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def empty(self, count: int, dtype: Any = np.int32) -> DeviceArray:
        return DeviceArray(self.device, np.zeros(count, dtype))

    def of(self, rank: int, count: int, key: int = 0) -> DeviceArray:
        return DeviceArray(self.device, content(rank, count, key))


def content(rank: int, count: int, key: int = 0) -> Array:
    return np.random.default_rng([rank, key]).integers(-(2**31), 2**31, count).astype(np.int32)


@contextlib.contextmanager
def rig_on(parent: mpicomm.Communicator, handle: str = "ipc", **options: Any) -> Iterator[Rig]:
    with nothing_leaks(), small_messages():
        comm, device = on_threads(parent, handle, **options)
        yield Rig(comm, device)
        comm.Free()
        assert device.closed


def same(array: DeviceArray, expected: Array) -> None:
    assert array.get()[: expected.size].tobytes() == expected.tobytes()


def on_threads(
    comm: mpicomm.Communicator, handle: str = "ipc", **options: Any
) -> tuple[mpicomm.Communicator, ThreadDevice]:
    """Return a duplicate of a cpu communicator that uses a `ThreadDevice` as its GPU. Collective."""
    child = comm.Dup()
    return child, take_for_gpu(child, handle, **options)


def take_for_gpu(
    comm: mpicomm.Communicator,
    handle: str = "ipc",
    *,
    timeout_s: float | None = None,
    made_by: Callable[..., ThreadDevice] = ThreadDevice,
    **options: Any,
) -> ThreadDevice:
    """Let a communicator that is not set up use a `ThreadDevice` as its GPU. Local."""
    was = comm._session.placement
    device = made_by(comm.rank, timeout_s or was.here.timeout_s, **options)
    places = [
        replace(place, device=0, devices=(DeviceInfo(0, "GPU", bytes([rank]), "", -1, (9, 0)),), handle=handle)
        for rank, place in enumerate(was.places)
    ]
    placement = Placement(places, was.rank)
    comm._begin(Session(MPI.Intracomm(comm), placement, cast(GpuBackend, device), tracer=comm._session.tracer))
    return device


@contextlib.contextmanager
def small_messages() -> Iterator[None]:
    """Let messages of some hundred KiB go in several pieces, and the outbox grow by small blocks."""
    from mpicomm.messages import outbox, rendezvous_header

    with (
        mock.patch.object(rendezvous_header, "KERNEL_NBYTES", LONGEST_FOR_KERNELS),
        mock.patch.object(rendezvous_header, "LEAST_PIECE_NBYTES", 48 << 10),
        mock.patch.object(outbox, "FIRST_BLOCK_NBYTES", 2 << 20),
    ):
        yield


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
    *,
    timeout_s: float = 20,
    atomics: Callable[[int], bool] = lambda rank: True,
    made_by: Callable[[int, float], WindowDevice] = WindowDevice,
    handle: str = "ipc",
) -> Iterator[tuple[mpicomm.Communicator, WindowDevice]]:
    """Give a communicator whose device is a `WindowDevice`. The block frees its windows."""
    with communicator("cpu", timeout_s=timeout_s) as parent:
        comm = parent.Dup()
        device = cast(WindowDevice, take_for_gpu(comm, handle, made_by=made_by))
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
