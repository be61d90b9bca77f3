"""Collectives on copy engines, carried out in every order that streams, events and barriers allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives import device_copies, patterns
from mpicomm.collectives.device_copies import Action, Barrier, Copy, Fork, Join, Reduce, allreduce, movement
from mpicomm.collectives.exchange import Span
from mpicomm.mappings import Mapped

Array = npt.NDArray[Any]
RANK_NBYTES = 1 << 20
OUTPUT, STAGING, INPUT = 0, RANK_NBYTES // 2, RANK_NBYTES // 4
FLOAT32 = np.dtype(np.float32)
SUM = "sum"


class Device:
    """A rank: a stream of kernels, one of copies, and what each of their entries waits for."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.kernels: deque[tuple[Action, int]] = deque()  # with how many copies must be over
        self.copies: deque[tuple[Copy, int]] = deque()  # with how many entries of the kernels' stream must be over
        forked = joined = 0
        for action in actions:
            if isinstance(action, Fork):
                forked = len(self.kernels)
            elif isinstance(action, Join):
                joined = len(self.copies)
            elif isinstance(action, Copy) and not action.local:
                self.copies.append((action, forked))
            else:
                self.kernels.append((action, joined))
        self.run_kernels = self.run_copies = self.barriers = 0
        self.waiting = False

    def next(self, everyone: Sequence[Device], rng: random.Random) -> Action | None:
        """Return something that may run now."""
        ready: list[deque[Any]] = []
        if self.copies and self.copies[0][1] <= self.run_kernels:
            ready.append(self.copies)
        if self.kernels and self.kernels[0][1] <= self.run_copies:
            action = self.kernels[0][0]
            if isinstance(action, Barrier):  # has come; goes on when all others have
                self.barriers += not self.waiting
                self.waiting = True
                if all(other.barriers >= self.barriers for other in everyone):
                    ready.append(self.kernels)
            else:
                ready.append(self.kernels)
        if not ready:
            return None
        queue = rng.choice(ready)
        taken: Action = queue.popleft()[0]
        if queue is self.copies:
            self.run_copies += 1
        else:
            self.run_kernels += 1
            self.waiting = False
        return taken


def run(programs: Sequence[Sequence[Action]], memory: Array, seed: int) -> None:
    rng = random.Random(seed)
    devices = [Device(program) for program in programs]
    idle = 0
    while any(device.kernels or device.copies for device in devices):
        device = rng.choice(devices)
        action = device.next(devices, rng)
        idle = 0 if action is not None else idle + 1
        assert idle < 1000, "nothing can go on"
        if isinstance(action, Copy):
            memory[action.target : action.target + action.nbytes] = memory[
                action.source : action.source + action.nbytes
            ].copy()
        elif isinstance(action, Reduce):
            parts = [memory[source : source + action.nbytes].view(np.float32) for source in action.sources]
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            memory[action.output : action.output + action.nbytes] = total.view(np.uint8)


def base(rank: int, place: int) -> int:
    return rank * RANK_NBYTES + place


def symmetric(size: int) -> Mapped:
    return Mapped(1, 0, tuple(base(rank, OUTPUT) for rank in range(size)))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 1000, 4099])
def test_allreduce(size: int, count: int, in_place: bool) -> None:
    for seed in range(30):
        rng = np.random.default_rng([size, count, seed])
        parts = [rng.standard_normal(count, np.float32) for _ in range(size)]
        memory = rng.integers(0, 256, size * RANK_NBYTES).astype(np.uint8)
        programs: list[list[Action]] = []
        staging = [base(rank, STAGING) for rank in range(size)]
        for rank, part in enumerate(parts):
            source = base(rank, OUTPUT if in_place else INPUT)
            memory[source : source + part.nbytes] = part.view(np.uint8)
            send, output = Span(source, count), Span(base(rank, OUTPUT), count)
            program: list[Action] = []
            for _ in range(2):  # two calls, of which the second must not disturb the first
                exchanges = patterns.allreduce(
                    rank, size, FLOAT32, send, output, SUM, piece_nbytes=max(4, (2 * count + 3) // 4 * 4)
                )
                for scattered, gathered in zip(exchanges[::2], exchanges[1::2], strict=True):
                    program += allreduce(rank, scattered, gathered, symmetric(size), staging, 1 << 16)
            programs.append(program)
        run(programs, memory, seed)
        expected = parts[0].copy()
        for part in parts[1:]:
            expected += part
        if in_place:
            again = expected.copy()
            for _ in parts[1:]:
                again += expected
            expected = again
        for rank in range(size):
            got = memory[base(rank, OUTPUT) :][: expected.nbytes].view(np.float32)
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("operation", ["Allgather", "Alltoall"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements(operation: str, size: int) -> None:
    count = 1001
    for seed in range(20):
        rng = np.random.default_rng([size, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES).astype(np.uint8)
        before = memory.copy()
        programs: list[list[Action]] = []
        for rank in range(size):
            starts = [index * count for index in range(size)]
            blocks = patterns.blocks(base(rank, OUTPUT), [count] * size, starts, FLOAT32.itemsize)
            if operation == "Allgather":
                send = Span(base(rank, INPUT), count)
                (exchange,) = patterns.allgather(rank, size, FLOAT32, send, blocks)
            else:
                sends = patterns.blocks(base(rank, INPUT), [count] * size, starts, FLOAT32.itemsize)
                (exchange,) = patterns.alltoall(rank, size, FLOAT32, sends, blocks)
            programs.append(movement(rank, exchange, symmetric(size)))
        run(programs, memory, seed)
        nbytes = count * FLOAT32.itemsize
        for rank in range(size):
            for source in range(size):
                block = rank if operation == "Alltoall" else 0
                sent = before[base(source, INPUT) + block * nbytes :][:nbytes]
                assert (memory[base(rank, OUTPUT) + source * nbytes :][:nbytes] == sent).all()


@pytest.mark.parametrize("relayed_nbytes", [1 << 20, 256, 1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_broadcast(monkeypatch: pytest.MonkeyPatch, size: int, relayed_nbytes: int) -> None:
    """In one part, in some, and in more than a shard has pieces."""
    monkeypatch.setattr(device_copies, "_RELAYED_NBYTES", relayed_nbytes)
    count = 2003
    for seed in range(20):
        rng = np.random.default_rng([size, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES).astype(np.uint8)
        root = int(rng.integers(size))
        content = memory[base(root, OUTPUT) :][: 4 * count].copy()
        programs: list[list[Action]] = []
        for rank in range(size):
            first, second = patterns.relayed_bcast(rank, size, FLOAT32, Span(base(rank, OUTPUT), count), root)
            programs.append(movement(rank, first, symmetric(size), second if size > 2 else None))
        barriers = [sum(isinstance(action, Barrier) for action in program) for program in programs]
        assert barriers == barriers[:1] * size
        run(programs, memory, seed)
        for rank in range(size):
            assert (memory[base(rank, OUTPUT) :][: 4 * count] == content).all()


def test_each_rank_writes_to_one_at_a_time_and_each_to_another() -> None:
    size, count = 4, 1000
    targets = []
    for rank in range(size):
        blocks = patterns.blocks(base(rank, OUTPUT), [count] * size, [index * count for index in range(size)], 4)
        (exchange,) = patterns.allgather(rank, size, FLOAT32, Span(base(rank, INPUT), count), blocks)
        copies = [action for action in movement(rank, exchange, symmetric(size)) if isinstance(action, Copy)]
        targets.append([copy.target // RANK_NBYTES for copy in copies])
    for turn in zip(*targets, strict=True):
        assert len(set(turn)) == size
