"""Communicators whose devices are threads, for tests of messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import mpicomm
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from tests.helpers.fakes.message_devices import (
    LONGEST_FOR_KERNELS,
    DeviceArray,
    ThreadDevice,
    on_threads,
    small_messages,
)
from tests.helpers.faults.leaks import nothing_leaks

Array = npt.NDArray[Any]

LARGE = LONGEST_FOR_KERNELS  # int32: four times the bytes that kernels copy
SIZES = (0, 1, HEADER_NBYTES // 4, LARGE // 4, LARGE // 4 + 1, LARGE, 5 * LARGE + 3)


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
def rig_on(parent: mpicomm.Communicator) -> Iterator[Rig]:
    with nothing_leaks(), small_messages():
        comm, device = on_threads(parent)
        yield Rig(comm, device)
        comm.Free()
        assert device.closed


def same(array: DeviceArray, expected: Array) -> None:
    assert array.get()[: expected.size].tobytes() == expected.tobytes()
