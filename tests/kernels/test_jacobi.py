"""The kernel of examples/jacobi.cu, in which blocks of neighbours meet from one launch to the next."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.references.reductions import require_same
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Machine, require_seen

SOURCE = ROOT / "examples" / "jacobi.cu"
ROWS, COLUMNS, BLOCKS, THREADS = 11, 37, 3, 40
STEPS = 20


Array = npt.NDArray[np.float64]


def heat(plate: Array) -> Array:
    """Return the heat of the whole plate one step later."""
    later: Array = plate.copy()
    around = ((plate[:-2, 1:-1] + plate[2:, 1:-1]) + plate[1:-1, :-2]) + plate[1:-1, 2:]
    later[1:-1, 1:-1] = (around * 0.25 + plate[1:-1, 1:-1]) * 0.5
    return later


def run(
    builds: Builds,
    dims: tuple[int, int],
    changes: Sequence[Change] = (),
    *,
    absent: int | None = None,
    timeout_s: float = 20,
) -> list[int]:
    """Return the ranks that report a missing rank; if there are none, compare the heat with the heat of one rank."""
    kernel = builds.kernel(SOURCE, "relax_all", changes=changes)
    size = dims[0] * dims[1]
    machine, ranks = Machine(builds, size), range(size)
    rng = np.random.default_rng(size)
    plate = rng.random((dims[0] * ROWS + 2, dims[1] * COLUMNS + 2))
    places = [divmod(rank, dims[1]) for rank in ranks]
    tiles = [np.s_[i * ROWS : (i + 1) * ROWS + 2, j * COLUMNS : (j + 1) * COLUMNS + 2] for i, j in places]
    planes = [machine.place(rank, np.array([plate[tiles[rank]]] * 2)) for rank in ranks]
    flags = [machine.allocate(rank, 4 * BLOCKS * 8) for rank in ranks]
    steps = [machine.allocate(rank, BLOCKS * 8) for rank in ranks]
    failed = [machine.allocate(rank, 4) for rank in ranks]
    around = [
        [places.index(place) if place in places else -2 for place in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1))]
        for i, j in places
    ]
    for rank in ranks:
        if rank == absent:
            continue
        tables = [machine.place(rank, np.array(machine.addresses(each, rank), np.uint64)) for each in (planes, flags)]
        neighbours = machine.place(rank, np.array(around[rank], np.int32))
        parameters = (
            *(c_uint64(table.address) for table in tables),
            c_uint32(rank),
            c_uint64(neighbours.address),
            c_uint64(steps[rank].address),
            *(c_uint32(ROWS), c_uint32(COLUMNS), c_uint64(int(timeout_s * 1e9))),
            c_uint64(failed[rank].address),
        )
        for _ in range(STEPS):
            nap_us = int(rng.choice((0, 0, 0, 300)))
            machine.launch(rank, kernel, parameters, blocks=BLOCKS, threads=THREADS, nap_us=nap_us)
    machine.run(seed=size, jitter_us=200, limit_s=30)
    said = [int(each.view(np.uint32)[0]) for each in failed]
    if not any(said):
        for _ in range(STEPS):
            plate = heat(plate)
        for rank in ranks:
            computed = planes[rank].view(np.float64).reshape(2, ROWS + 2, COLUMNS + 2)[STEPS % 2]
            require_same(np.ascontiguousarray(computed[1:-1, 1:-1]), plate[tiles[rank]][1:-1, 1:-1].copy())
    return said


@pytest.mark.parametrize("dims", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_heat_equals_the_heat_of_one_rank(builds: Builds, dims: tuple[int, int]) -> None:
    assert run(builds, dims) == [0] * dims[0] * dims[1]


def test_rank_that_does_not_come_ends_the_waits(builds: Builds) -> None:
    assert run(builds, (2, 2), absent=3, timeout_s=0.001) == [1, 1, 1, 0]


def test_no_race(watched_builds: Builds) -> None:
    assert run(watched_builds, (2, 2)) == [0] * 4


@pytest.mark.parametrize(
    "change",
    [
        Change("jacobi.cu", "number), step - 1, timeout_ns)", "number), step - 2, timeout_ns)"),
        Change("jacobi.cu", "of_step % 2 * tile", "0 * tile"),
        Change(
            "jacobi.cu", "(neighbours[kAbove], kBelow, last), step)", "(neighbours[kAbove], kBelow, last), step + 1)"
        ),
        Change(
            "jacobi.cu",
            "if (is_edge(kLeft)) mpicomm::signal(block",
            "if (is_edge(kLeft)) mpicomm::signal(mpicomm::Thread()",
        ),
    ],
    ids=["wait for the step before", "one plane", "signal ahead", "signal by each thread"],
)
def test_race_is_seen(watched_builds: Builds, change: Change) -> None:
    require_seen(lambda _: run(watched_builds, (2, 2), [change]))
