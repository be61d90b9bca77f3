"""The backend of a GPU over a driver without one: rights of threads while another captures, tables, scratch memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.devices.base import Scratch
from mpicomm.devices.host import array_at
from mpicomm.kernels.packing import PackTable
from mpicomm.mpi.requests import Completer, DeferredRequest
from tests.helpers.fakes.fake_cuda import ADDRESS, FakeCuda, imported_over
from tests.helpers.fakes.virtual_memory import VirtualCuda
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.jobs.pace import HANG_S

LARGE = 2 << 20


@pytest.fixture
def cuda() -> Iterator[VirtualCuda]:
    with imported_over(cuda := VirtualCuda()), nothing_leaks():
        yield cuda
        assert not cuda.mapped
        assert not cuda.reserved


def test_requests_are_completed_whatever_other_threads_capture(cuda: FakeCuda, backend: Any) -> None:
    seen: list[Any] = []

    def look() -> bool:
        seen.append(cuda.mode)
        return len(seen) == 3

    backend.make_current()  # as the creation of a communicator does
    work = DeferredRequest.of(look, lambda: seen.append(cuda.mode))
    request = MPI.Request.fromhandle(Completer().add(work, backend.prepare_thread).handle)
    until = time.monotonic() + HANG_S
    while not request.Test():
        assert time.monotonic() < until
        time.sleep(1e-3)
    assert seen == [cuda.relaxed] * 4
    assert cuda.mode == cuda.default


def test_a_user_s_thread_is_relaxed_only_while_it_loads(cuda: FakeCuda, backend: Any) -> None:
    backend.make_current()
    with backend.loading():
        assert cuda.mode == cuda.relaxed
    assert cuda.mode == cuda.default


def test_equal_tables_are_copied_once_and_again_into_new_memory(
    cuda: FakeCuda, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, int]] = []
    places = iter((1000, 2000))

    def scratch(nbytes: int) -> Scratch:
        with backend.loading():  # a thread that holds this already would wait for itself
            return Scratch(next(places), nbytes, None)

    monkeypatch.setattr(backend, "scratch", scratch)
    monkeypatch.setattr(backend, "copy", lambda target, source, nbytes, stream: copied.append((target, nbytes)))
    small, large = PackTable(b"a" * 80, 1, 3, 1), PackTable(b"b" * (2 << 20), 2, 4, 2)
    assert backend.pack_table(small) == backend.pack_table(PackTable(b"a" * 80, 1, 3, 1)) == 1000
    assert backend.pack_table(large) == 2000
    assert copied == [(1000, 80), (2000, 2 << 20)]
    backend.resume()
    assert copied[2:] == [(2000, 2 << 20)]


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
