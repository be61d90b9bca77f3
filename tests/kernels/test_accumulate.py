"""The kernel of accumulate.cu on the processor: updates of all types, from several ranks at once, in any layout."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpicomm.collectives.packed import PackJob, table_of_jobs
from mpicomm.kernels.reductions import REDUCTIONS
from mpicomm.kernels.window import (
    LOCATING,
    MOVING,
    SWAPPED_SIZES,
    AccumulateArguments,
    SwapArguments,
    accumulate_kernel,
    swap_kernel,
)
from mpicomm.mpi.layout import DatatypeLayout, byte_run
from mpicomm.mpi.types import covered_dtype
from mpicomm.windows.buffers import kernel_types
from tests.helpers.fakes.window_devices import combine_pairs
from tests.helpers.references.reductions import reduced
from tests.helpers.references.reference_packing import layout, pack, region, unpack
from tests.kernels.build import Builds
from tests.kernels.machine import Machine, controls, kernel_of
from tests.kernels.mistakes import Change, Changes

Array = npt.NDArray[Any]
COUNT = 40
CONTRIBUTIONS = 30

# Each type once, with operations in turns.
PAIRS = [(dtype, ops[number % len(ops)]) for number, (dtype, ops) in enumerate(REDUCTIONS.items())]
# The types with instructions of the GPU, and small elements that share a word.
PAIRS += [(dtype, "sum") for dtype in ("int32", "uint64", "float32", "float64", "int8", "float16", "complex128")]
PAIRS += [("uint32", "band"), ("int64", "bor"), ("uint32", "bxor")]
PAIRS = sorted({(dtype, op) for dtype, op in PAIRS if op not in ("avg", "tree")})


class Updates:
    """Ranks that update the memory of rank 0, and their contributions."""

    def __init__(
        self, builds: Builds, size: int, name: str, changes: Changes = (), *, dtype: np.dtype[Any] | None = None
    ) -> None:
        self.machine = Machine(builds, size)
        self.size, self.name, self.changes = size, name, changes
        self.dtype = covered_dtype(name) if dtype is None else dtype

    def update(
        self, rank: int, target: Any, values: Array, op: str, form: DatatypeLayout | None = None, *, fetch: bool = False
    ) -> Any:
        """Enqueue an update. Return the place of the previous elements."""
        machine = self.machine
        form = form or byte_run(values.nbytes)
        given, result = machine.place(rank, values), machine.place(rank, np.zeros_like(values))
        table = table_of_jobs([PackJob(0, form, 0)])
        regions = machine.place(rank, np.frombuffer(table.content, np.uint8))
        address = machine.address(0, target, rank)
        failed = machine.faults[rank].failed
        walk = table.arguments(regions.address, address, given.address, failed, unpacks=True)
        variant = accumulate_kernel((self.name, op), values.dtype.itemsize)
        arguments = AccumulateArguments(walk, result.address if fetch else 0)
        kernel = kernel_of(machine.builds, variant, self.changes)
        machine.launch(rank, kernel, [arguments], blocks=2, threads=32)
        return result


def contributions(dtype: np.dtype[Any], *shape: int) -> Array:
    rng = np.random.default_rng(1)
    return rng.integers(1, 3, shape).astype(dtype)


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_updates_of_several_ranks_are_atomic(builds: Builds, dtype: str, op: str) -> None:
    several_ranks(builds, dtype, op)


def several_ranks(builds: Builds, dtype: str, op: str = "sum", *, seed: int = 3, changes: Changes = ()) -> None:
    updates = Updates(builds, 3, dtype, changes)
    numbers = contributions(updates.dtype, 3, CONTRIBUTIONS, COUNT)
    if op == "prod":  # powers of two that every type holds
        numbers[:, 2:] = 1
    start = np.ones(COUNT, updates.dtype)
    target = updates.machine.place(0, start)
    for number in range(CONTRIBUTIONS):
        for rank in range(3):
            updates.update(rank, target, numbers[rank, number], op)
    updates.machine.run(seed=seed, jitter_us=100, limit_s=60)
    expected = reduced(op, [start, *numbers.reshape(-1, COUNT)])
    different = np.flatnonzero(target.view(updates.dtype) != expected)
    assert not different.size, f"elements differ, first at {different[0]}"


_ADD = "add_to(reinterpret_cast<Word*>(p), static_cast<Word>(x));"
NOT_ATOMIC = {
    "store instead of a swap": (
        "int16",
        Change(
            "accumulate.cu",
            "const u32 before = compare_and_swap(word, seen, wanted);",
            "const u32 before = seen; store_relaxed(word, wanted);",
        ),
    ),
    "swap that is not repeated": (
        "complex64",
        Change("accumulate.cu", "if (is_equal(before, seen)) return", "if (true) return"),
    ),
}
PLAIN = {
    "integers": ("int64", Change("accumulate.cu", _ADD, "*p += x;")),
    "floats": ("float64", Change("accumulate.cu", "add_to(p, x);", "*p += x;")),
}
test_update_that_is_not_atomic_is_seen = controls(several_ranks, NOT_ATOMIC)
test_plain_update_is_a_race = controls(several_ranks, PLAIN, watched=True)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_no_race(watched_builds: Builds, dtype: str) -> None:
    several_ranks(watched_builds, dtype)


@pytest.mark.parametrize("dtype", ["int32", "int8", "float16", "complex128"])
def test_each_previous_element_comes_once(builds: Builds, dtype: str) -> None:
    updates = Updates(builds, 3, dtype)
    target = updates.machine.place(0, np.zeros(4, updates.dtype))
    one = np.ones(4, updates.dtype)
    results = [updates.update(rank, target, one, "sum", fetch=True) for _ in range(20) for rank in range(3)]
    updates.machine.run(seed=1, jitter_us=100, limit_s=60)
    found = np.sort(np.array([result.view(updates.dtype).astype(complex).real for result in results]), axis=0)
    assert (found == np.arange(60)[:, None]).all()


FORMS = {
    "columns": region(8, ((12, 48),), 8),
    "runs": region(16, ((5, 64),), 32),
    "a list": region(0, ([800, 0, 1600, 160],), 24),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_elements_of_any_layout_are_updated(builds: Builds, dtype: str, name: str) -> None:
    updates = Updates(builds, 2, dtype)
    form = layout(FORMS[name])
    memory = contributions(updates.dtype, 2048 // updates.dtype.itemsize)
    target = updates.machine.place(0, memory)
    values = contributions(updates.dtype, form.nbytes // updates.dtype.itemsize) * 3
    results = [updates.update(rank, target, values, "sum", form, fetch=True) for rank in range(2)]
    updates.machine.run(limit_s=30)
    packed = pack(form, memory.view(np.uint8), 0).view(updates.dtype)
    expected = memory.copy()
    unpack(form, (packed + 2 * values).view(np.uint8), expected.view(np.uint8), 0)
    assert np.array_equal(target.view(updates.dtype), expected)
    found = np.sort([result.view(updates.dtype) for result in results], axis=0)  # each element has its order of updates
    assert np.array_equal(found, [packed, packed + values])


@pytest.mark.parametrize(
    ("dtype", "op"), [*zip(("uint8", "uint16", "float32", "complex64", "complex128"), cycle(MOVING), strict=False)]
)
def test_elements_are_replaced_and_read_as_wholes(builds: Builds, dtype: str, op: str) -> None:
    updates = Updates(builds, 3, dtype)
    memory = np.full(COUNT, 7, updates.dtype)
    target = updates.machine.place(0, memory)
    given = [np.full(COUNT, 10 + rank, updates.dtype) for rank in range(3)]
    results = [updates.update(rank, target, given[rank], op, fetch=True) for rank in range(3)]
    updates.machine.run(seed=2, jitter_us=100, limit_s=30)
    seen = np.array([result.view(updates.dtype) for result in results])
    now = target.view(updates.dtype)
    if op == "no_op":
        assert (seen == 7).all() and (now == 7).all()
    else:  # each of the four values of an element was either seen once, or is there now
        assert (np.sort(np.vstack([seen, now[None]]), axis=0) == np.array([7, 10, 11, 12])[:, None]).all()


@pytest.mark.parametrize(("name", "op"), [*zip(("pair_f4", "pair_f8", "pair_i2"), cycle(LOCATING), strict=False)])
def test_pairs_are_compared(builds: Builds, name: str, op: str) -> None:
    dtype = next(dtype for dtype, named in kernel_types().items() if named == name)
    made, rng = Updates(builds, 3, name, dtype=dtype), np.random.default_rng(4)
    parts = np.zeros((3, 5, 12), dtype)
    parts["value"] = rng.integers(0, 3, parts.shape)
    parts["index"] = rng.permutation(parts.size).reshape(parts.shape)
    target = made.machine.place(0, parts[0, 0])
    for part, rank in ((part, rank) for part in range(5) for rank in range(3)):
        made.update(rank, target, parts[rank, part], op)
    made.machine.run(seed=5, jitter_us=100, limit_s=30)
    expected = parts[0, 0].copy()
    for row in parts.reshape(-1, 12):
        combine_pairs(op, expected, row)
    found = target.view(dtype)
    assert [found[field].tolist() for field in ("value", "index")] == [
        expected[field].tolist() for field in ("value", "index")
    ]


@pytest.mark.parametrize("nbytes", SWAPPED_SIZES)
def test_one_rank_wins_each_compare_and_swap(builds: Builds, nbytes: int) -> None:
    machine = Machine(builds, 3)
    dtype = np.dtype(f"u{nbytes}")
    target = machine.place(0, np.array([5, 0, 5, 0], dtype))
    kernel = kernel_of(builds, swap_kernel(nbytes))
    results = []
    for rank in range(3):
        value, compare, result = (machine.place(rank, np.array([each], dtype)) for each in (10 + rank, 0, 99))
        results.append(result)
        at = machine.address(0, target, rank) + nbytes
        swap = SwapArguments(at, value.address, compare.address, result.address, machine.faults[rank].failed)
        machine.launch(rank, kernel, [swap], blocks=1, threads=1)
    machine.run(seed=nbytes, jitter_us=100, limit_s=30)
    before = [int(result.view(dtype)[0]) for result in results]
    winner = before.index(0)
    assert target.view(dtype).tolist() == [5, 10 + winner, 5, 0]
    assert [each for rank, each in enumerate(before) if rank != winner] == [10 + winner] * 2


def test_nothing_is_updated_after_a_failure(builds: Builds) -> None:
    updates = Updates(builds, 1, "int32")
    updates.machine.failed[0].view(np.uint32)[:] = 1
    target = updates.machine.place(0, np.zeros(4, np.int32))
    updates.update(0, target, np.ones(4, np.int32), "sum")
    updates.machine.run(limit_s=10)
    assert not target.bytes.any()
