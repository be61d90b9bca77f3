"""Collectives on copy engines, carried out in every order that streams, events and barriers allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives.gpu.algorithms.copies import schedule as device_landing
from mpicomm.collectives.gpu.algorithms.copies.plan import Then, parts_of
from mpicomm.collectives.gpu.algorithms.copies.schedule import (
    Action,
    Barrier,
    InOutput,
    InStaging,
    Landing,
    Parts,
    Reduce,
    allreduce,
    movement,
)
from mpicomm.collectives.gpu.algorithms.steps import Copy, Fork, Join
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mapped
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.inputs import patterns

Array = npt.NDArray[Any]
RANK_NBYTES = 1 << 20
OUTPUT, INPUT, CONTRIBUTIONS, STAGING = (RANK_NBYTES * quarter // 4 for quarter in range(4))
FLOAT32 = np.dtype(np.float32)
SUM = "sum"


def run(programs: Sequence[Sequence[Action]], memory: Array, seed: int) -> None:
    cuda = FakeCuda(seed)
    barriers = [0] * len(programs)  # each rank has come to it
    for rank, program in enumerate(programs):
        enqueue(cuda, rank, program, memory, barriers)
    cuda.finish()


def enqueue(cuda: FakeCuda, rank: int, program: Sequence[Action], memory: Array, barriers: list[int]) -> None:
    """Enqueue a rank's work on its two streams, one of kernels and one of copies."""
    kernels, copies = 2 * rank, 2 * rank + 1
    event = cuda.eventCreateWithFlags(cuda.eventDisableTiming)
    number = 0

    def come() -> None:
        barriers[rank] += 1

    def all_came(number: int) -> bool:
        return min(barriers) >= number

    for action in program:
        if isinstance(action, Fork | Join):
            ahead, behind = (kernels, copies) if isinstance(action, Fork) else (copies, kernels)
            cuda.eventRecord(event, ahead)
            cuda.streamWaitEvent(behind, event)
        elif isinstance(action, Barrier):
            number += 1
            cuda.enqueue(kernels, come)
            cuda.enqueue(kernels, lambda: None, partial(all_came, number))
        else:
            beside = isinstance(action, Copy) and not action.local
            cuda.enqueue(copies if beside else kernels, partial(carry_out, action, memory))


def carry_out(action: Copy | Reduce, memory: Array) -> None:
    if isinstance(action, Copy):
        memory[action.target :][: action.nbytes] = memory[action.source :][: action.nbytes].copy()
    else:
        parts = [memory[source:][: action.nbytes].view(np.float32) for source in action.sources]
        memory[action.output :][: action.nbytes] = reduced(parts).view(np.uint8)


def base(rank: int, place: int) -> int:
    return rank * RANK_NBYTES + place


def staging(rank: int, size: int, place: int, parts: Parts) -> InStaging:
    assert (size - 1) * parts.room_nbytes <= RANK_NBYTES // 4
    return InStaging(rank, [base(peer, place) for peer in range(size)], parts)


def landing_of(rank: int, size: int, parts: Parts, *, staged: bool) -> Landing:
    if staged:
        return staging(rank, size, STAGING, parts)
    return InOutput(rank, Mapped(1, 0, tuple(base(peer, OUTPUT) for peer in range(size))))


def require_balanced(programs: Sequence[Sequence[Action]]) -> None:
    """All ranks meet equally often, and streams that a capture has forked are joined."""
    assert len({sum(isinstance(action, Barrier) for action in program) for program in programs}) == 1
    for program in programs:
        order = [action for action in program if isinstance(action, Fork | Join)]
        assert isinstance(order[-1], Join)
        last = max(place for place, action in enumerate(program) if isinstance(action, Join))
        assert all(action.local for action in program[last:] if isinstance(action, Copy))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("count", "number"), [(1, 2), (3, 1), (1000, 2), (4099, 3), (4099, 8)])
def test_allreduce(size: int, count: int, number: int, in_place: bool, staged: bool) -> None:
    for seed in range(6):
        rng = np.random.default_rng([size, count, seed])
        parts = [rng.standard_normal(count, np.float32) for _ in range(size)]
        memory = rng.integers(0, 256, size * RANK_NBYTES, np.uint8)
        programs: list[list[Action]] = []
        for rank, part in enumerate(parts):
            source = base(rank, OUTPUT if in_place else INPUT)
            memory[source : source + part.nbytes] = part.view(np.uint8)
            send, output = Span(source, count), Span(base(rank, OUTPUT), count)
            scattered, gathered = patterns.allreduce(
                rank, size, FLOAT32, send, output, SUM, piece_nbytes=max(4, part.nbytes)
            )
            assert scattered.sends[rank - 1] is not None
            cut = Parts.equal(4 * patterns.split(send, size, 4)[0].count, number)
            contributions = staging(rank, size, CONTRIBUTIONS, cut)
            results = landing_of(rank, size, cut, staged=staged)
            # Two calls; the second must not disturb the first.
            programs.append([*allreduce(rank, scattered, gathered, cut, contributions, results)] * 2)
        require_balanced(programs)
        run(programs, memory, seed)
        expected = reduced(parts)
        if in_place:
            expected = reduced([expected] * size)
        for rank in range(size):
            got = memory[base(rank, OUTPUT) :][: expected.nbytes].view(np.float32)
            assert got.tobytes() == expected.tobytes()


def reduced(parts: Sequence[Array]) -> Array:
    total: Array = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


IN_OUTPUT = ("Allgather", "Alltoall")


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize(
    ("operation", "staged"),
    [*((name, False) for name in IN_OUTPUT), *((name, True) for name in (*IN_OUTPUT, "In place", "Gather", "Scatter"))],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements(operation: str, size: int, staged: bool, number: int) -> None:
    """The output of one rank is never symmetric, nor is an all-to-all in place: others may still read its input."""
    count, root = 2001, size - 1
    cut = Parts.equal(count * FLOAT32.itemsize, number)
    for seed in range(6):
        rng = np.random.default_rng([size, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES, np.uint8)
        before = memory.copy()
        programs: list[list[Action]] = []
        place = OUTPUT if operation == "In place" else INPUT
        for rank in range(size):
            starts = [index * count for index in range(size)]
            blocks = patterns.blocks(base(rank, OUTPUT), [count] * size, starts, FLOAT32.itemsize)
            sends = patterns.blocks(base(rank, place), [count] * size, starts, FLOAT32.itemsize)
            if operation == "Allgather":
                (exchange,) = patterns.allgather(rank, size, FLOAT32, sends[0], blocks)
            elif operation == "Gather":
                (exchange,) = patterns.gather(rank, size, FLOAT32, sends[0], blocks, root)
            elif operation == "Scatter":
                (exchange,) = patterns.scatter(rank, size, FLOAT32, sends, blocks[root], root)
            else:
                (exchange,) = patterns.alltoall(rank, size, FLOAT32, sends, blocks)
            programs.append(movement(rank, exchange, cut, landing_of(rank, size, cut, staged=staged)))
        require_balanced(programs)
        run(programs, memory, seed)

        def block(content: Array, rank: int, place: int, index: int) -> bytes:
            nbytes = count * FLOAT32.itemsize
            return bytes(content[base(rank, place) + index * nbytes :][:nbytes])

        for rank in range(size):
            for source in range(size):
                got = block(memory, rank, OUTPUT, source)
                if operation == "Scatter":
                    sent = block(before, root, INPUT, rank) if source == root else block(before, rank, OUTPUT, source)
                elif operation == "Gather" and rank != root:
                    sent = block(before, rank, OUTPUT, source)
                else:
                    sent = block(before, source, place, 0 if operation.endswith("ather") else rank)
                assert got == sent


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce(size: int, in_place: bool, number: int) -> None:
    """All send to the root, twice."""
    count, root = 2001, size - 1
    cut = Parts.equal(4 * count, number)
    for seed in range(6):
        rng = np.random.default_rng([size, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES, np.uint8)
        values = [rng.standard_normal(count, np.float32) for _ in range(size)]
        programs: list[list[Action]] = []
        for rank, value in enumerate(values):
            source = base(rank, OUTPUT if in_place and rank == root else INPUT)
            memory[source : source + value.nbytes] = value.view(np.uint8)
            send, output = Span(source, count), Span(base(rank, OUTPUT), count)
            (exchange,) = patterns.reduce(rank, size, FLOAT32, send, output if rank == root else None, SUM, root)
            programs.append([*movement(rank, exchange, cut, landing_of(rank, size, cut, staged=True))] * 2)
        require_balanced(programs)
        run(programs, memory, seed)
        expected = reduced(values)
        if in_place:
            expected = reduced([*values[:-1], expected])
        got = memory[base(root, OUTPUT) :][: expected.nbytes].view(np.float32)
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(size: int, in_place: bool, number: int) -> None:
    """In place, the result comes to the front of block 0, and the rest is unchanged."""
    count = 2001
    cut = Parts.equal(4 * count, number)
    for seed in range(6):
        rng = np.random.default_rng([size, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES, np.uint8)
        values = [rng.standard_normal((size, count), np.float32) for _ in range(size)]
        programs: list[list[Action]] = []
        for rank, value in enumerate(values):
            source = base(rank, OUTPUT if in_place else INPUT)
            memory[source : source + value.nbytes] = value.view(np.uint8).ravel()
            blocks = patterns.blocks(source, [count] * size, [index * count for index in range(size)], 4)
            output = Span(base(rank, OUTPUT), count)
            (exchange,) = patterns.reduce_scatter(rank, size, FLOAT32, blocks, output, SUM)
            programs.append(movement(rank, exchange, cut, landing_of(rank, size, cut, staged=True)))
        require_balanced(programs)
        before = memory.copy()
        run(programs, memory, seed)
        for rank in range(size):
            expected = before[base(rank, OUTPUT) :][: 4 * count * size]
            expected[: 4 * count] = reduced([value[rank] for value in values]).view(np.uint8)
            assert memory[base(rank, OUTPUT) :][: 4 * count * size].tobytes() == expected.tobytes()


@pytest.mark.parametrize("number", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_allreduce_keeps_staging_memory_that_the_call_before_still_reads(size: int, number: int) -> None:
    """A reduce-scatter ends with a reduction out of staging memory. The next call's contributions go there, too."""
    count = 2004
    for seed in range(6):
        rng = np.random.default_rng([size, number, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES, np.uint8)
        values = [rng.standard_normal((size, count), np.float32) for _ in range(size)]
        programs: list[list[Action]] = []
        for rank, value in enumerate(values):
            memory[base(rank, INPUT) :][: value.nbytes] = value.view(np.uint8).ravel()
            blocks = patterns.blocks(base(rank, INPUT), [count] * size, [index * count for index in range(size)], 4)
            output = Span(base(rank, OUTPUT), count)
            (scattering,) = patterns.reduce_scatter(rank, size, FLOAT32, blocks, output, SUM)
            cut = Parts.equal(4 * count, number)
            first = movement(rank, scattering, cut, staging(rank, size, CONTRIBUTIONS, cut))
            # Its input is not the output of the first call, because ranks may read either.
            send, output = Span(base(rank, INPUT), count), Span(base(rank, OUTPUT) + 4 * count, count)
            scattered, gathered = patterns.allreduce(rank, size, FLOAT32, send, output, SUM, piece_nbytes=4 * count)
            shards = Parts.equal(4 * patterns.split(send, size, 4)[0].count, number)
            contributions = staging(rank, size, CONTRIBUTIONS, shards)
            results = staging(rank, size, STAGING, shards)
            programs.append([*first, *allreduce(rank, scattered, gathered, shards, contributions, results)])
        require_balanced(programs)
        run(programs, memory, seed)
        for rank in range(size):
            output_bytes = memory[base(rank, OUTPUT) :]
            assert output_bytes[: 4 * count].tobytes() == reduced([value[rank] for value in values]).tobytes()
            assert output_bytes[4 * count :][: 4 * count].tobytes() == reduced([value[0] for value in values]).tobytes()


@pytest.mark.parametrize("number", [1, 2, 3, 9])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_broadcast(size: int, staged: bool, number: int) -> None:
    count = 2003
    for seed in range(6):
        rng = np.random.default_rng([size, seed])
        memory = rng.integers(0, 256, size * RANK_NBYTES, np.uint8)
        root = int(rng.integers(size))
        content = memory[base(root, OUTPUT) :][: 4 * count].copy()
        programs: list[list[Action]] = []
        cut = Parts.equal(4 * patterns.split(Span(0, count), size - 1, 4)[0].count, number)
        for rank in range(size):
            first, second = patterns.bcast(rank, size, FLOAT32, Span(base(rank, OUTPUT), count), root, "two_shot")
            landing = landing_of(rank, size, cut, staged=staged)
            programs.append(movement(rank, first, cut, landing, second if size > 2 else None))
        require_balanced(programs)
        run(programs, memory, seed)
        for rank in range(size):
            assert (memory[base(rank, OUTPUT) :][: 4 * count] == content).all()


@pytest.mark.parametrize("test", [test_broadcast, test_movements, test_allreduce])
def test_two_regions_would_be_too_few(monkeypatch: pytest.MonkeyPatch, test: Any) -> None:
    monkeypatch.setattr(device_landing, "REGIONS", 2)
    with pytest.raises(AssertionError):
        if test is test_movements:
            test_movements("Allgather", 3, True, 7)
        elif test is test_broadcast:
            test_broadcast(3, True, 9)
        else:
            test_allreduce(3, 4099, 8, False, True)


def test_each_rank_writes_to_one_at_a_time_and_each_to_another() -> None:
    size, count = 4, 1000
    targets = []
    for rank in range(size):
        blocks = patterns.blocks(base(rank, OUTPUT), [count] * size, [index * count for index in range(size)], 4)
        (exchange,) = patterns.allgather(rank, size, FLOAT32, Span(base(rank, INPUT), count), blocks)
        parts = Parts.equal(4 * count, 1)
        actions = movement(rank, exchange, parts, landing_of(rank, size, parts, staged=False))
        copies = [action for action in actions if isinstance(action, Copy)]
        targets.append([copy.target // RANK_NBYTES for copy in copies])
    for turn in zip(*targets, strict=True):
        assert len(set(turn)) == size


@given(
    longest_nbytes=st.integers(1, 1 << 36),
    size=st.integers(2, 8),
    then=st.sampled_from(["nothing", "relay", "gather"]),
    staged=st.booleans(),
)
def test_staging_memory_is_bounded(longest_nbytes: int, size: int, then: Then, staged: bool) -> None:
    most = 512 << 20
    for reduces in {"nothing": (False, staged), "relay": (False,), "gather": (True,)}[then]:
        parts = parts_of(longest_nbytes, size, most, reduces=reduces, then=then, staged=staged)
        assert list(parts.bounds) == sorted(set(parts.bounds))
        assert (parts.bounds[0], parts.bounds[-1]) == (0, longest_nbytes)
        assert ((then == "gather") + staged) * (size - 1) * parts.room_nbytes <= most
        if then == "nothing" and not staged:
            assert parts.number == 1  # the copies are fastest in it
        if reduces and longest_nbytes > 1024:
            assert parts.number > 1  # so that there is something to copy while one is reduced
