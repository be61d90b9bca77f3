"""Scratch memory without a GPU: large memory goes and comes back at its addresses if the communicator's memory does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpicomm.devices.host import array_at
from tests.helpers.fakes.fake_cuda import ADDRESS, imported_over
from tests.helpers.fakes.virtual_memory import VirtualCuda
from tests.helpers.faults.leaks import nothing_leaks

LARGE = 2 << 20


@pytest.fixture
def cuda() -> Iterator[VirtualCuda]:
    with imported_over(cuda := VirtualCuda()), nothing_leaks():
        yield cuda
        assert not cuda.mapped
        assert not cuda.reserved


def test_large_memory_comes_back_at_its_addresses(cuda: VirtualCuda, backend: Any) -> None:
    backend.kind = "fd"
    places = [backend.scratch(nbytes).pointer for nbytes in (LARGE, 3 * LARGE + 1)]
    free = cuda.free_nbytes
    backend.suspend()
    assert not cuda.mapped
    assert cuda.free_nbytes == free + 5 * LARGE
    backend.resume()
    for place in places:
        array_at(place, LARGE, np.dtype(np.uint8))[:] = 1
    assert sorted(cuda.mapped) == sorted(places)
    backend.suspend()


@pytest.mark.parametrize(("nbytes", "kind"), [(LARGE - 1, "fd"), (LARGE, "ipc"), (LARGE, None), (0, "fabric")])
def test_other_memory_stays(cuda: VirtualCuda, backend: Any, nbytes: int, kind: Any) -> None:
    backend.kind = kind
    assert backend.scratch(nbytes).pointer == ADDRESS
    cuda.calls.clear()
    backend.suspend()
    backend.resume()
    assert not cuda.calls
    backend.close()
    assert cuda.calls.count("cuMemFree") == 1
