"""The kernel in mpicomm/docs/kernels.md that waits for another rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.jobs.mpiexec import ROOT
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Machine, require_seen

COUNT = 1000
NONE = -1.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    kernels = re.findall(r'source = r"""\n(.*?)"""', (ROOT / "mpicomm/docs/kernels.md").read_text(), re.DOTALL)
    (kernel,) = (kernel for kernel in kernels if " pass_on(" in kernel)
    path = tmp_path / "pass_on.cu"
    path.write_text(kernel)
    return path


def run(
    builds: Builds, source: Path, size: int, changes: Sequence[Change] = (), *, absent: int | None = None
) -> list[float]:
    """Return the number that each rank has got; `NONE` if the previous rank did not come, or if the rank is absent."""
    kernel = builds.kernel(source, "pass_on", changes=changes)
    machine, ranks = Machine(builds, size), range(size)
    inboxes, flags, failed, got = (
        [machine.allocate(rank, nbytes) for rank in ranks] for nbytes in (COUNT * 4, 8, 4, COUNT * 4)
    )
    timeout_ns = 20 * 10**9 if absent is None else 10**6
    for rank in ranks:
        if rank == absent:
            continue
        tables = (
            machine.place(rank, np.array([machine.address(peer, each[peer], rank) for peer in ranks], np.uint64))
            for each in (inboxes, flags)
        )
        mine = machine.place(rank, np.full(COUNT, rank, np.float32))
        parameters = (
            *(c_uint64(got[rank].address), c_uint64(mine.address), c_uint32(COUNT)),
            *(c_uint64(table.address) for table in tables),
            *(c_uint32(rank), c_uint32(size), c_uint64(1), c_uint64(timeout_ns), c_uint64(failed[rank].address)),
        )
        machine.launch(rank, kernel, parameters, blocks=1, threads=96)
    machine.run(seed=size, jitter_us=200, limit_s=30)
    passed = []
    for rank in ranks:
        numbers = got[rank].view(np.float32)
        lost = rank == absent or failed[rank].view(np.uint32)[0]
        assert lost or (numbers == numbers[0]).all()
        passed.append(NONE if lost else float(numbers[0]))
    return passed


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_gets_the_numbers_of_the_rank_before(watched_builds: Builds, source: Path, size: int) -> None:
    assert run(watched_builds, source, size) == [(rank - 1) % size for rank in range(size)]


def test_rank_that_does_not_come_ends_the_wait(builds: Builds, source: Path) -> None:
    assert run(builds, source, 2, absent=0) == [NONE, NONE]


def test_numbers_that_are_read_too_early_are_seen(watched_builds: Builds, source: Path) -> None:
    wait = "mpicomm::wait(block, mpicomm::part<u64>(flags, rank), number, timeout_ns)"
    require_seen(lambda _: run(watched_builds, source, 3, [Change("pass_on.cu", wait, "true")]))
