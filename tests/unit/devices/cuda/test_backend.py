"""The backend of a GPU over a driver without one: rights of threads while another captures, tables, scratch memory.

Copies of messages that are made again and again get a graph, which makes the same copy on any stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import struct
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.devices.host import array_at
from mpicomm.kernels.message import MESSAGE_STEP, MessageStep
from mpicomm.kernels.packing import PackTable
from mpicomm.mpi.requests import DeferredRequest, ProgressThread
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
    request = MPI.Request.fromhandle(ProgressThread().add(work, backend.prepare_thread).handle)
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


def test_a_stream_captures_again_after_an_interrupt(cuda: VirtualCuda, backend: Any) -> None:
    streams: list[int] = []

    def interrupted(stream: int) -> None:
        assert cuda.mode == cuda.relaxed and stream in cuda.captures
        streams.append(stream)
        if len(streams) == 1:
            raise KeyboardInterrupt

    backend.make_current()
    with pytest.raises(KeyboardInterrupt):
        backend.capture(interrupted)
    backend.capture(interrupted).launch(9)
    assert streams == streams[:1] * 2 and cuda.launched[0][1] == 9
    assert not cuda.captures and not cuda.graphs and cuda.mode == cuda.default


def test_equal_tables_are_copied_once_and_again_into_new_memory(
    cuda: FakeCuda, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, int]] = []
    places = iter((1000, 2000))

    def scratch(nbytes: int) -> int:
        with backend.loading():  # a thread that holds this already would wait for itself
            return next(places)

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
    places = [backend.scratch(nbytes) for nbytes in (LARGE, 3 * LARGE + 1)]
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
    assert backend.scratch(nbytes) == ADDRESS
    cuda.calls.clear()
    backend.suspend()
    backend.resume()
    assert not cuda.calls
    backend.close()
    assert cuda.calls.count("cuMemFree") == 1


SLOT, READY, DONE, PEER, CAPTURING = 1 << 20, 2 << 20, 3 << 20, 5, 99


class Launches:
    """A kernel that notes its launches: the stream, the blocks, and the fields of its argument."""

    address = 77

    def __init__(self) -> None:
        self.made: list[tuple[int, int, dict[str, int]]] = []

    def launch_at(self, stream: int, parameters: int, blocks: int, threads: int) -> None:
        (pointer,) = struct.unpack("P", ctypes.string_at(parameters, 8))
        values = MESSAGE_STEP.unpack(ctypes.string_at(pointer, MESSAGE_STEP.size))
        fields = dict(zip((name for name, *_ in MessageStep._fields_), values, strict=True))
        self.made.append((stream, blocks, fields))


@pytest.fixture
def kernel() -> Launches:
    return Launches()


@pytest.fixture
def steps(cuda: FakeCuda, kernel: Launches) -> Any:
    module = importlib.import_module("mpicomm.devices.cuda.launches")
    context = SimpleNamespace(device=SimpleNamespace(ordinal=0), current=contextlib.nullcontext)
    faults = SimpleNamespace(record=11, failed=12)
    return module.MessageSteps(context, kernel, faults, 10**9, partial(module.LaunchGraph, context, CAPTURING))


def test_the_same_copy_becomes_a_graph(cuda: FakeCuda, kernel: Launches, steps: Any) -> None:
    copy = steps.copy_in(SLOT, ready=READY)
    for stream in range(10):
        copy(stream, 4096, 100)
    made = [stream for stream, *_ in kernel.made if stream != CAPTURING]
    assert made + [stream for _, stream in cuda.launched] == list(range(10))
    assert len(cuda.launched) > 0 and cuda.calls.count("cuGraphInstantiate") == 1
    plain = len(kernel.made)
    copy(3, 8192, 100)
    copy(3, 4096, 99)
    assert [(fields["source"], fields["nbytes"]) for *_, fields in kernel.made[plain:]] == [(8192, 100), (4096, 99)]
    launched = len(cuda.launched)
    copy(4, 4096, 100)
    assert len(cuda.launched) == launched + 1


def test_copies_of_many_lengths_make_no_graph(cuda: FakeCuda, kernel: Launches, steps: Any) -> None:
    copy = steps.copy_out(SLOT, ready=READY, done=DONE, peer=PEER)
    for number in range(1, 30):
        copy(0, 4096, 100 * number)
        copy(0, 4096, 100 * number)
    assert not cuda.launched and "cuGraphInstantiate" not in cuda.calls
    assert [fields["nbytes"] for *_, fields in kernel.made] == [100 * (number // 2 + 1) for number in range(58)]


def test_a_step_has_the_words_and_the_counts_of_its_side(kernel: Launches, steps: Any) -> None:
    steps.copy_in(SLOT, ready=READY)(1, 4096, 100)
    steps.copy_out(SLOT, ready=READY, done=DONE, peer=PEER)(1, 4096, 100)
    steps.wait(1, ready=READY, done=DONE, count=3, blocks=2, peer=PEER)
    steps.announce(1, ready=READY, count=3)
    steps.release(1, done=DONE, count=3)
    names = ("target", "source", "nbytes", "ready", "done", "awaits", "sent", "taken", "peer")
    assert [tuple(fields[name] for name in names) for *_, fields in kernel.made] == [
        (SLOT, 4096, 100, READY, 0, 0, 1, 0, 0),
        (4096, SLOT, 100, READY, DONE, 1, 0, 1, PEER),
        (0, 0, 0, READY, DONE, 3, 0, 0, PEER),
        (0, 0, 0, READY, 0, 0, 3, 0, 0),
        (0, 0, 0, 0, DONE, 0, 0, 3, 0),
    ]


def test_only_few_blocks_wait(kernel: Launches, steps: Any) -> None:
    steps.copy_out(SLOT, ready=READY, done=DONE, peer=PEER)(1, 4096, 1 << 20)
    (_, first, wait), (_, blocks, copy) = kernel.made
    assert (first, wait["nbytes"], wait["awaits"], wait["taken"]) == (1, 0, 1, 0)
    assert (blocks, copy["nbytes"], copy["taken"]) == (32, 1 << 20, 1)
