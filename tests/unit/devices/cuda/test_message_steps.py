"""Copies of messages that are made again and again get a graph, which makes the same copy on any stream."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.kernels.message import MESSAGE_STEP, MessageStep
from tests.helpers.fakes.fake_cuda import FakeCuda

PLACE, READY, DONE, PEER = 1 << 20, 2 << 20, 3 << 20, 5


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
    return module.MessageSteps(context, SimpleNamespace(load=lambda variant: kernel), faults, 10**9)


def test_the_same_copy_becomes_a_graph(cuda: FakeCuda, kernel: Launches, steps: Any) -> None:
    copy = steps.copy_in(PLACE, ready=READY)
    for stream in range(10):
        copy(stream, 4096, 100)
    made = [stream for stream, *_ in kernel.made if stream not in cuda.streams]  # and not into the graph
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
    copy = steps.copy_out(PLACE, ready=READY, done=DONE, peer=PEER)
    for number in range(1, 30):
        copy(0, 4096, 100 * number)
        copy(0, 4096, 100 * number)
    assert not cuda.launched and "cuGraphInstantiate" not in cuda.calls
    assert [fields["nbytes"] for *_, fields in kernel.made] == [100 * (number // 2 + 1) for number in range(58)]


def test_a_step_has_the_words_and_the_counts_of_its_side(kernel: Launches, steps: Any) -> None:
    steps.copy_in(PLACE, ready=READY)(1, 4096, 100)
    steps.copy_out(PLACE, ready=READY, done=DONE, peer=PEER)(1, 4096, 100)
    steps.wait(1, ready=READY, done=DONE, count=3, blocks=2, peer=PEER)
    steps.announce(1, ready=READY, count=3)
    steps.release(1, done=DONE, count=3)
    names = ("target", "source", "nbytes", "ready", "done", "awaits", "sent", "taken", "peer")
    assert [tuple(fields[name] for name in names) for *_, fields in kernel.made] == [
        (PLACE, 4096, 100, READY, 0, 0, 1, 0, 0),
        (4096, PLACE, 100, READY, DONE, 1, 0, 1, PEER),
        (0, 0, 0, READY, DONE, 3, 0, 0, PEER),
        (0, 0, 0, READY, 0, 0, 3, 0, 0),
        (0, 0, 0, 0, DONE, 0, 0, 3, 0),
    ]


def test_only_few_blocks_wait(kernel: Launches, steps: Any) -> None:
    steps.copy_out(PLACE, ready=READY, done=DONE, peer=PEER)(1, 4096, 1 << 20)
    (_, first, wait), (_, blocks, copy) = kernel.made
    assert (first, wait["nbytes"], wait["awaits"], wait["taken"]) == (1, 0, 1, 0)
    assert (blocks, copy["nbytes"], copy["taken"]) == (32, 1 << 20, 1)
