"""Whole collectives of any size as the package carries them out, with the kernels that it chooses."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import reduced, require_same, samples
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import BOTH, Calls, random_counts
from tests.kernels.machine import Machine, RunFailedError
from tests.kernels.rig import LARGE_INBOX_NBYTES as INBOX_NBYTES
from tests.kernels.rig import ProgramRig

COUNTS = (1, 700, 4096, INBOX_NBYTES // 4 - 1, INBOX_NBYTES // 4 + 1, 3 * INBOX_NBYTES // 4)  # of 4 bytes each


def test_messages_of_nothing_need_neither_kernels_nor_memory(builds: Builds) -> None:
    rig, nothing = ProgramRig(Machine(builds, 2)), Span(0, 0)
    dtype = np.dtype(np.int32)
    reduced, told = patterns.allreduce(0, 2, dtype, nothing, nothing, "sum"), patterns.bcast(0, 2, dtype, nothing, 1)
    rig.run(0, reduced)
    rig.run(0, told)
    rig.machine.run()
    assert not rig.requests


# test_filled_calls.py has the same calls between three ranks, which make no tree of their own.
def test_collectives_of_any_size(builds: Builds) -> None:
    size, name = 4, "float32"
    rig = ProgramRig(Machine(builds, size))
    rng = np.random.default_rng(size)
    calls = Calls(rig, rng, nap_us=1000)
    for count in (1, 4096, INBOX_NBYTES // 4 - 1, INBOX_NBYTES // 2):
        checks = [calls.allreduce(name, "sum", count, way) for way in BOTH]
        checks += [calls.scan(name, "sum", count), calls.bcast(4 * count), calls.bcast(4 * count, "two_shot")]
        checks.append(calls.alltoallv(random_counts(rng, size, (0, 1, 4 * count))))
        checks.append(calls.allgather(4 * count))
        checks.append(calls.reduce_scatter(name, "sum", [count] * size, in_place=True))
        checks.append(calls.reduce(name, "sum", count, "two_shot", in_place=False))
        checks += [calls.allreduce("float32", "tree", count, way) for way in BOTH]
        checks.append(calls.reduce_scatter("float32", "tree", [count] * size))
        rig.machine.run(checks, seed=count, jitter_us=200)
        rig.machine.clear()


def run_with_new_memory(builds: Builds, ranks: list[int], timeout_s: float = 20) -> None:
    """Run calls of all kernels, let the memory of these ranks be as at first, and run calls again."""
    rig = ProgramRig(Machine(builds, 2), timeout_s=timeout_s)
    rng = np.random.default_rng(2)
    calls = Calls(rig, rng, nap_us=100)
    for turn in range(2):
        checks = [calls.allreduce("float32", "sum", count) for count in (1, 700, INBOX_NBYTES // 2)]
        checks += [calls.allreduce("float32", "sum", 40_000, "two_shot"), calls.allgather(2 * INBOX_NBYTES)]
        checks += [
            calls.bcast(INBOX_NBYTES),
            calls.bcast(2 * INBOX_NBYTES, "chain"),
            calls.alltoallv(random_counts(rng, 2, (0, 1, INBOX_NBYTES))),
        ]
        rig.machine.run(checks, seed=turn, jitter_us=100)
        rig.machine.clear()
        rig.renew(ranks)


def test_calls_go_on_if_the_memory_of_all_ranks_is_as_at_first(builds: Builds) -> None:
    run_with_new_memory(builds, [0, 1])


def test_calls_fail_if_the_memory_of_one_rank_is_as_at_first(builds: Builds) -> None:
    with pytest.raises((RunFailedError, AssertionError)):
        run_with_new_memory(builds, [0], 1)


def test_collectives_without_memory_beyond_the_arena(builds: Builds) -> None:
    """Also messages that inboxes do not hold; more of them go one way."""
    size, name = 3, "float32"
    rig = ProgramRig(Machine(builds, size), bare=True)
    rng = np.random.default_rng(size)
    calls = Calls(rig, rng, nap_us=1000)
    for count in (1, INBOX_NBYTES // 4 + 1, 3 * INBOX_NBYTES // 4):
        checks = [calls.allreduce(name, "sum", count), calls.scan(name, "sum", count), calls.bcast(4 * count)]
        checks.append(calls.alltoallv(random_counts(rng, size, (0, 1, 4 * count))))
        checks.append(calls.reduce(name, "sum", count, "one_shot", in_place=False))
        checks.append(calls.reduce_scatter(name, "sum", [count, 0, 5]))
        rig.machine.run(checks, seed=count, jitter_us=200, limit_s=30)
        rig.machine.clear()
        assert not rig.requests


def test_reduce_scatter_of_parts_of_any_size(builds: Builds) -> None:
    rig = ProgramRig(Machine(builds, 3))
    calls = Calls(rig, np.random.default_rng(5), nap_us=1000)
    large = 2 * INBOX_NBYTES // 4
    for counts in ([1, 1, large], [large, 0, 5], [large, large, large - 3], [large, large // 2, 7], [3, 4, 5]):
        checks = [calls.reduce_scatter("float32", "sum", counts) for _ in range(3)]
        rig.machine.run(checks, seed=counts[0], jitter_us=300, limit_s=30)
        rig.machine.clear()


@pytest.mark.parametrize("first", [100, 6000])
def test_counts_of_a_reduce_scatter_that_differ_between_ranks_are_noticed(builds: Builds, first: int) -> None:
    """Their sum is the same. Data that is sent and not taken would be left for a later call."""
    rig = ProgramRig(Machine(builds, 2))
    for rank, counts in enumerate(([first, 6100 - first], [6100 - first, first])):
        source = rig.machine.place(rank, np.ones(6100, np.int32))
        output = Span(rig.machine.allocate(rank, 4 * counts[rank]).address, counts[rank])
        blocks = patterns.blocks(source.address, counts, [0, counts[0]], 4)
        exchanges = patterns.reduce_scatter(rank, 2, np.dtype(np.int32), blocks, output, "sum")
        rig.run(rank, exchanges)
    with pytest.raises(RunFailedError, match="operation=3"):
        rig.machine.run()


@pytest.mark.parametrize("count", [5, 3 * INBOX_NBYTES // 4])
def test_only_some_ranks_are_in_place_in_a_reduce_scatter(builds: Builds, count: int) -> None:
    rig = ProgramRig(Machine(builds, 3))
    dtype, counts = np.dtype(np.int32), [0, count, 0]
    parts = [samples(dtype, count, np.random.default_rng(rank)) for rank in range(3)]
    sources = [rig.machine.place(rank, part) for rank, part in enumerate(parts)]
    for rank, source in enumerate(sources):
        blocks = patterns.blocks(source.address, counts, [0, 0, count], 4)
        scratch = rig.machine.allocate(rank, 4 * count).address if rank == 1 else 0
        output = Span(source.address, counts[rank])
        exchanges = patterns.reduce_scatter(rank, 3, dtype, blocks, output, "sum", scratch=scratch)
        rig.run(rank, exchanges)
    rig.machine.run()
    for rank, source in enumerate(sources):
        require_same(source.view(dtype), reduced("sum", parts) if rank == 1 else parts[rank])


def test_uneven_messages_of_any_length_go_in_packets(builds: Builds) -> None:
    rig, rng = ProgramRig(Machine(builds, 3)), np.random.default_rng(0)
    calls = Calls(rig, rng, nap_us=1000)
    lengths = (0, 1, INBOX_NBYTES, INBOX_NBYTES + 1, 5 * INBOX_NBYTES)
    checks = [calls.alltoallv(random_counts(rng, 3, lengths)) for _ in range(6)]
    rig.machine.run(checks, jitter_us=300)


@pytest.mark.parametrize(("sent", "expected"), [(0, 400_000), (100, 400_000), (400_000, 0), (400_000, 100)])
def test_two_ranks_that_disagree_on_a_long_message_notice(builds: Builds, sent: int, expected: int) -> None:
    rig = ProgramRig(Machine(builds, 2), timeout_s=5)
    nothing = Span(0, 0)
    source, target = rig.machine.allocate(0, sent), rig.machine.allocate(1, expected)
    sends = [[nothing, Span(source.address, sent)], [nothing] * 2]
    receives = [[nothing] * 2, [Span(target.address, expected), nothing]]
    for rank in range(2):
        exchanges = patterns.alltoall(rank, 2, np.dtype(np.uint8), sends[rank], receives[rank])
        rig.run(rank, exchanges)
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        rig.machine.run(limit_s=20)


@pytest.mark.parametrize(
    ("size", "algorithm", "symmetric"),
    [
        *((2, "one_shot", True), (3, "two_shot", True), (3, "ring", True)),
        *((2, "copy_engine", True), (3, "copy_engine", False)),
    ],
)
def test_straight_into_memory(builds: Builds, size: int, algorithm: str, symmetric: bool) -> None:
    rig = ProgramRig(Machine(builds, size), 4 * max(COUNTS) * size)
    at = 0 if symmetric else None
    calls = Calls(rig, np.random.default_rng(size), symmetric_at=at, algorithm=algorithm)
    for count in COUNTS:
        check = [calls.allreduce("int32", "sum", count)]
        rig.machine.run(check, seed=count, jitter_us=200)
        if algorithm in ("one_shot", "copy_engine"):
            rig.machine.run([calls.allgather(4 * count)], seed=count, jitter_us=200)
        for each in {"two_shot": ("chain", "two_shot"), "ring": ()}.get(algorithm, (algorithm,)):
            rig.machine.run([calls.bcast(4 * count, each)], seed=count, jitter_us=200)
        rig.machine.clear()
