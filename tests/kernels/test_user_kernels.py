"""Kernels of users: of two examples, of mpicomm/docs/kernels.md, and with each function of mpicomm.cuh."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.references.reductions import reduced, require_same
from tests.kernels.build import Builds
from tests.kernels.device_functions_rig import (
    FUNCTIONS,
    GROUPS,
    IN_TIME,
    SOURCE,
    Messages,
    Rig,
    exchange,
    hand_over,
    reduce_all,
)
from tests.kernels.machine import Machine, Place, controls, require_seen, without_mistake
from tests.kernels.mistakes import Change, Changes

CALLS, COUNT = 60, 300
ROWS, COLUMNS, BLOCKS, THREADS, STEPS = 11, 37, 3, 40, 20
Run = Callable[..., list[int]]


class Ranks:
    """Ranks of a kernel of a user, each with a word that says whether a rank was missing. ``absent`` does not come."""

    def __init__(
        self, builds: Builds, size: int, source: Path, entry: str, *, changes: Changes = (), absent: int | None = None
    ) -> None:
        self.machine, self.ranks = Machine(builds, size), range(size)
        self.rng = np.random.default_rng(size)
        self.failed = self.allocate(4)
        self._kernel = builds.kernel(source, entry, changes=changes)
        self._absent = absent

    def allocate(self, nbytes: int) -> list[Place]:
        return [self.machine.allocate(rank, nbytes) for rank in self.ranks]

    def table(self, places: Sequence[Place], rank: int) -> c_uint64:
        return c_uint64(self.machine.table(places, rank))

    def launch(self, rank: int, *parameters: Any, blocks: int = 1, threads: int = 96) -> None:
        if rank != self._absent:
            nap_us = int(self.rng.choice((0, 0, 0, 0, 300)))
            given = (*parameters, c_uint64(self.failed[rank].address))
            self.machine.launch(rank, self._kernel, given, blocks=blocks, threads=threads, nap_us=nap_us)

    def run(self) -> list[int]:
        """Return each rank's report of a missing rank."""
        self.machine.run(seed=len(self.ranks), jitter_us=200, limit_s=30)
        return [int(each.view(np.uint32)[0]) for each in self.failed]


def ring_sum(builds: Builds, size: int, *, seed: int = 0, timeout_s: float = 20, **how: Any) -> list[int]:
    """All ranks add the values of all, many times."""
    ranks = Ranks(builds, size, ROOT / "examples/ring_sum.cu", "ring_sum", **how)
    inboxes, flags = ranks.allocate(2 * size * COUNT * 4), ranks.allocate(8)
    tables = [[ranks.table(each, rank) for each in (inboxes, flags)] for rank in ranks.ranks]
    values = [[ranks.rng.integers(0, 1000, COUNT).astype(np.float32) for _ in ranks.ranks] for _ in range(CALLS)]
    sums = [ranks.allocate(COUNT * 4) for _ in range(CALLS)]
    for call in range(CALLS):
        for rank in ranks.ranks:
            places = (sums[call][rank], ranks.machine.place(rank, values[call][rank]))
            numbers = (c_uint32(rank), c_uint32(size), c_uint64(call), c_uint64(int(timeout_s * 1e9)))
            addresses = (c_uint64(place.address) for place in places)
            ranks.launch(rank, *addresses, c_uint32(COUNT), *tables[rank], *numbers)
    said = ranks.run()
    for call in range(CALLS if not any(said) else 0):
        for rank in ranks.ranks:
            require_same(sums[call][rank].bytes.view(np.float32), reduced("sum", values[call]))
    return said


def jacobi(builds: Builds, dims: tuple[int, int], *, seed: int = 0, timeout_s: float = 20, **how: Any) -> list[int]:
    """Blocks of neighbours meet from one launch to the next. The heat is that of one rank."""
    size = dims[0] * dims[1]
    ranks = Ranks(builds, size, ROOT / "examples/jacobi.cu", "relax_all", **how)
    plate = ranks.rng.random((dims[0] * ROWS + 2, dims[1] * COLUMNS + 2))
    places = [divmod(rank, dims[1]) for rank in ranks.ranks]
    tiles = [np.s_[i * ROWS : (i + 1) * ROWS + 2, j * COLUMNS : (j + 1) * COLUMNS + 2] for i, j in places]
    planes = [ranks.machine.place(rank, np.array([plate[tiles[rank]]] * 2)) for rank in ranks.ranks]
    flags, steps = ranks.allocate(4 * BLOCKS * 8), ranks.allocate(BLOCKS * 8)
    around = [
        [places.index(place) if place in places else -2 for place in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1))]
        for i, j in places
    ]
    for rank in ranks.ranks:
        neighbours = ranks.machine.place(rank, np.array(around[rank], np.int32))
        parameters = (
            *(ranks.table(each, rank) for each in (planes, flags)),
            *(c_uint32(rank), c_uint64(neighbours.address), c_uint64(steps[rank].address)),
            *(c_uint32(ROWS), c_uint32(COLUMNS), c_uint64(int(timeout_s * 1e9))),
        )
        for _ in range(STEPS):
            ranks.launch(rank, *parameters, blocks=BLOCKS, threads=THREADS)
    said = ranks.run()
    if not any(said):
        for _ in range(STEPS):
            plate = heat(plate)
        for rank in ranks.ranks:
            computed = planes[rank].view(np.float64).reshape(2, ROWS + 2, COLUMNS + 2)[STEPS % 2]
            require_same(np.ascontiguousarray(computed[1:-1, 1:-1]), plate[tiles[rank]][1:-1, 1:-1].copy())
    return said


def heat(plate: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the heat of the whole plate one step later."""
    later: npt.NDArray[np.float64] = plate.copy()
    around = ((plate[:-2, 1:-1] + plate[2:, 1:-1]) + plate[1:-1, :-2]) + plate[1:-1, 2:]
    later[1:-1, 1:-1] = (around * 0.25 + plate[1:-1, 1:-1]) * 0.5
    return later


@pytest.fixture
def guide(tmp_path: Path) -> Run:
    """Each rank gets the numbers of the rank before; the kernel is that of the guide."""
    kernels = re.findall(r'source = r"""\n(.*?)"""', (ROOT / "mpicomm/docs/kernels.md").read_text(), re.DOTALL)
    (kernel,) = (kernel for kernel in kernels if " pass_on(" in kernel)
    path = tmp_path / "pass_on.cu"
    path.write_text(kernel)

    def run(builds: Builds, size: int, changes: Changes = (), *, absent: int | None = None) -> list[int]:
        ranks = Ranks(builds, size, path, "pass_on", changes=changes, absent=absent)
        inboxes, flags, got = ranks.allocate(COUNT * 4), ranks.allocate(8), ranks.allocate(COUNT * 4)
        timeout_ns = 20 * 10**9 if absent is None else 10**6
        for rank in ranks.ranks:
            mine = ranks.machine.place(rank, np.full(COUNT, rank, np.float32))
            ranks.launch(
                rank,
                *(c_uint64(got[rank].address), c_uint64(mine.address), c_uint32(COUNT)),
                *(ranks.table(each, rank) for each in (inboxes, flags)),
                *(c_uint32(rank), c_uint32(size), c_uint64(1), c_uint64(timeout_ns)),
            )
        said = ranks.run()
        for rank in ranks.ranks:
            if rank != absent and not said[rank]:
                assert (got[rank].view(np.float32) == (rank - 1) % size).all()
        return said

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_of_all_ranks(builds: Builds, size: int) -> None:
    assert ring_sum(builds, size) == [0] * size


@pytest.mark.parametrize("dims", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_heat_equals_the_heat_of_one_rank(builds: Builds, dims: tuple[int, int]) -> None:
    assert jacobi(builds, dims) == [0] * dims[0] * dims[1]


def test_rank_that_does_not_come_ends_the_waits(builds: Builds, guide: Run) -> None:
    assert ring_sum(builds, 3, absent=1, timeout_s=0.001) == [1, 0, 1]
    assert jacobi(builds, (2, 2), absent=3, timeout_s=0.001) == [1, 1, 1, 0]
    assert guide(builds, 2, absent=0) == [0, 1]


def test_no_race(watched_builds: Builds, guide: Run) -> None:
    for size in (2, 3):
        assert ring_sum(watched_builds, size) == [0] * size
    assert jacobi(watched_builds, (2, 2)) == [0] * 4
    for size in (1, 3):
        assert guide(watched_builds, size) == [0] * size


# `CONTROLS` has the mistakes with flags.
IN_RING_SUM = {"one buffer": Change("ring_sum.cu", "call % 2 * size", "0 * size")}
IN_JACOBI = {
    "wait for the step before": Change("jacobi.cu", "number), step - 1, timeout_ns)", "number), step - 2, timeout_ns)"),
    "one plane": Change("jacobi.cu", "of_step % 2 * tile", "0 * tile"),
    "signal ahead": Change(
        "jacobi.cu", "(neighbours[kAbove], kBelow, last), step)", "(neighbours[kAbove], kBelow, last), step + 1)"
    ),
    "signal by each thread": Change(
        "jacobi.cu",
        "if (is_edge(kLeft)) mpicomm::signal(block",
        "if (is_edge(kLeft)) mpicomm::signal(mpicomm::Thread()",
        alone=True,
    ),
}


test_race_is_seen = controls(partial(ring_sum, size=3), IN_RING_SUM, watched=True)
test_race_of_neighbours_is_seen = controls(partial(jacobi, dims=(2, 2)), IN_JACOBI, watched=True)


def test_numbers_that_are_read_too_early_are_seen(watched_builds: Builds, guide: Run) -> None:
    wait = "mpicomm::wait(block, mpicomm::part<u64>(flags, rank), number, timeout_ns)"
    require_seen(lambda _: guide(watched_builds, 3, [Change("pass_on.cu", wait, "true")]))


# Functions of mpicomm.cuh, called by threads, warps and blocks.

# Lengths around a unit, a packet and a line, and longer than the bytes that all threads move at once.
SHAPES = [
    *(Messages(nbytes, rounds=2) for nbytes in (0, 1, 16, 1500)),
    Messages(117, 3, 3, rounds=4),  # aligned alike
    Messages(200, 8, 4, rounds=4),
    Messages(333, 5, 12, rounds=2),
    Messages(502, 0, 6, rounds=2),
]
REDUCTIONS = [
    *(("float32", "sum", group, Messages(500, 0, 0)) for group in GROUPS),
    ("float32", "max", "Block", Messages(404, 8, 4)),
    ("float16", "sum", "Warp", Messages(1250, 6, 6)),
    ("bfloat16", "min", "Thread", Messages(34, 0, 14)),
    ("int32", "sum", "Warp", Messages(4, 12, 0)),
]


def require_all_in_time(failed: Sequence[npt.NDArray[np.uint32]]) -> None:
    assert not any(each.any() for each in failed), IN_TIME


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_messages_arrive(builds: Builds, function: str, group: str) -> None:
    for number, messages in enumerate(SHAPES):
        require_all_in_time(exchange(Rig(builds, group, messages, size=1 + number % 4), function))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wait_for_a_rank_that_does_not_come_ends_on_all_threads(builds: Builds, function: str) -> None:
    for group in GROUPS:
        failed = exchange(Rig(builds, group, Messages(100), absent=1), function, timeout_s=0.001)
        assert [each.all() for each in failed] == [True, False, True]
        assert not failed[1].any()


@pytest.mark.parametrize("group", GROUPS)
def test_blocks_of_a_rank_hand_data_over(builds: Builds, group: str) -> None:
    require_all_in_time(hand_over(Rig(builds, group, Messages(200), size=1)))


@pytest.mark.parametrize(("dtype", "op", "group", "messages"), REDUCTIONS, ids=str)
def test_reduction_equals_numpys_in_rank_order(
    builds: Builds, dtype: str, op: str, group: str, messages: Messages
) -> None:
    require_all_in_time(reduce_all(Rig(builds, group, messages), dtype, op))


def run(builds: Builds, name: str, group: str, *, seed: int = 0, changes: Changes = (), timeout_s: float = 20) -> None:
    """Run one kernel of device_functions.cu between three ranks."""
    messages = Messages(200, 4, 8) if name == "reduce_all" else Messages(200, 3, 5)
    rig = Rig(builds, group, messages, changes=changes)
    if name == "reduce_all":
        require_all_in_time(reduce_all(rig, "float32", "sum", timeout_s=timeout_s))
    elif name == "between_blocks":
        require_all_in_time(hand_over(rig, timeout_s=timeout_s))
    else:
        require_all_in_time(exchange(rig, name, timeout_s=timeout_s))


def header(name: str, old: str, new: str) -> Change:
    return Change(f"include/mpicomm/{name}.cuh", old, new)


SYNC = "  group.sync();  // "
CONTROLS: list[tuple[str, str, Change]] = [
    ("put_around", "Block", header("copies", f"{SYNC}a thread copies bytes", "  // ")),
    ("put_around", "Warp", header("copies", f"{SYNC}a thread copies bytes", "  // ")),
    ("put_around", "Block", header("flags", "  group.sync();\n  if (group", "  if (group")),
    ("put_around", "Warp", header("flags", "else store_release(", "else store_relaxed(")),
    ("put_around", "Warp", header("flags", "has_reached(load_acquire(", "has_reached(load_relaxed(")),
    ("put_around", "Block", header("flags", "return group.all(", "return (")),
    ("get_around", "Block", header("copies", f"{SYNC}without it", "  // ")),
    ("get_around", "Warp", header("copies", f"{SYNC}without it", "  // ")),
    ("get_around", "Warp", header("groups", "    __syncwarp(kWarp);  // a vote", "    // ")),
    ("get_around", "Warp", header("groups", "{ __syncwarp(kWarp); }", "{}")),
    ("packets_to_all", "Block", header("packets", f"{SYNC}a thread sends", "  // ")),
    ("packets_to_all", "Block", header("packets", "return group.all(come)", "return come")),
    ("packets_to_all", "Warp", Change("ll_protocol.cuh", "static_cast<u32>(packet.first >> 32) == flag && ", "")),
    ("packets_to_all", "Warp", Change("ll_protocol.cuh", " && static_cast<u32>(packet.second >> 32) == flag", "")),
    ("packets_to_all", "Warp", Change(SOURCE.name, "round % 2 * x.size", "0 * x.size")),
    ("between_blocks", "Warp", header("flags", "store_release_on_device(", "store_relaxed(")),
    ("between_blocks", "Warp", header("flags", "load_acquire_on_device(", "load_relaxed(")),
    ("meet", "Block", header("barrier", "  group.sync();\n", "")),
    ("meet", "Warp", header("barrier", "    store_release(", "    store_relaxed(")),
    ("meet", "Warp", header("barrier", "has_reached(load_acquire(", "has_reached(load_relaxed(")),
    ("meet", "Warp", header("barrier", "return group.all(come)", "return come")),
    ("meet", "Warp", header("barrier", "load_relaxed(counts + rank) + 1;", "1;")),
    ("reduce_all", "Warp", header("reduce_load", f"{SYNC}without it", "  // ")),
    ("reduce_all", "Block", Change("reduce_bytes.cuh", "source(place);", "source(sources - 1 - place);")),
]
MISTAKES = {f"{name}-{group}-{change.old}": (name, group, change) for name, group, change in CONTROLS}
test_mistake_is_seen = controls(partial(run, timeout_s=1), MISTAKES, watched=True)


@pytest.mark.parametrize("name", [*FUNCTIONS, "between_blocks", "reduce_all"])
def test_no_race_in_functions(watched_builds: Builds, name: str) -> None:
    for group in ("Warp", "Block"):
        run(watched_builds, name, group, changes=without_mistake(MISTAKES))
