"""The facts of a call for its record, which its arguments tell."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpicomm.api.communicator import Communicator
from mpicomm.mpi import buffers
from mpicomm.observation import reader_of
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays


def test_counts_on_the_device_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)

    class Counts(DeviceArray):
        def __len__(self) -> int:
            raise AssertionError("the host would wait for the device")

    x, y = (DeviceArray(address, 100, np.dtype("f4")) for address in (0x1000, 0x2000))
    counts, came = (Counts(address, 2, np.dtype("i8")) for address in (0x3000, 0x4000))
    monkeypatch.setitem(buffers._readers, Counts, buffers._readers[DeviceArray])
    facts_of = reader_of("Alltoallv", Communicator.Alltoallv)
    nbytes, dtype, _ = facts_of(SimpleNamespace(size=2), ([x, counts], [y, (came, [0, 50])]), {})
    assert (nbytes, dtype) == (400, "float32")
