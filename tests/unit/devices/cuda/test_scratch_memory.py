"""Scratch memory without a GPU: large memory goes and comes back at its addresses if the communicator's memory does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
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
    with imported_over(cuda := VirtualCuda()):
        yield cuda


@pytest.fixture
def scratch(cuda: VirtualCuda) -> Iterator[Any]:
    module = importlib.import_module("mpicomm.devices.cuda.segments")
    with nothing_leaks():
        scratch = module.ScratchMemory(module.PrimaryContext(SimpleNamespace(ordinal=0, uuid=bytes(16))))
        yield scratch
        scratch.close()
        assert not cuda.mapped
        assert not cuda.reserved


def test_large_memory_comes_back_at_its_addresses(cuda: VirtualCuda, scratch: Any) -> None:
    places = [scratch.allocate(nbytes, "fd") for nbytes in (LARGE, 3 * LARGE + 1)]
    free = cuda.free_nbytes
    scratch.suspend()
    assert not cuda.mapped
    assert cuda.free_nbytes == free + 5 * LARGE
    scratch.resume()
    for place in places:
        array_at(place, LARGE, np.dtype(np.uint8))[:] = 1
    assert sorted(cuda.mapped) == sorted(places)
    scratch.suspend()


@pytest.mark.parametrize(("nbytes", "kind"), [(LARGE - 1, "fd"), (LARGE, "ipc"), (LARGE, None), (0, "fabric")])
def test_other_memory_stays(cuda: VirtualCuda, scratch: Any, nbytes: int, kind: Any) -> None:
    assert scratch.allocate(nbytes, kind) == ADDRESS
    cuda.calls.clear()
    scratch.suspend()
    scratch.resume()
    assert not cuda.calls
    scratch.close()
    assert cuda.calls == ["cuMemFree"]
