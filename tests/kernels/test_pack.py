"""The kernel of pack.cu on the processor, against packing by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS, blocks_for
from mpicomm.mpi.layout import Layout, Region
from mpicomm.mpi.packing import PackJob, table_of
from tests.helpers.reference_packing import pack, unpack
from tests.kernels.build import Builds, Change
from tests.kernels.exchange_rig import kernel_of
from tests.kernels.machine import Machine

LAYOUTS = {
    "a run": [Region(3, (), 1000)],
    "columns of doubles": [Region(8, ((50, 80),), 8)],
    "columns of halves": [Region(2, ((333, 6),), 2)],
    "a block of four dimensions": [Region(16, ((2, 4096), (3, 1024), (4, 256), (5, 48)), 16)],
    "more loops than the kernel has": [Region(0, ((2, 4000), (2, 2000), (2, 1000), (2, 500), (3, 40)), 12)],
    "runs that are no multiple of 16": [Region(5, ((20, 100),), 37)],
    "backwards": [Region(4000, ((30, -100),), 24)],
    "many regions": [Region(64 * number + number % 7, (), 1 + number % 50) for number in range(60)],
    "regions with loops": [Region(8, ((10, 64),), 4), Region(2048, ((3, 400), (2, 100)), 40)],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_packs_and_unpacks(builds: Builds, name: str, offset: int) -> None:
    check(builds, LAYOUTS[name], offset)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", ["columns of doubles", "many regions"])
def test_any_number_of_blocks_moves_all(builds: Builds, name: str, blocks: int) -> None:
    check(builds, LAYOUTS[name], 0, blocks=blocks)


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_a_small_launch_has_a_thread_for_each_unit_and_a_large_one_fills_the_device(multiprocessors: int) -> None:
    full = 8 * multiprocessors
    for units in (1, 255, 256, 257, PACK_THREADS * full - 1, PACK_THREADS * full, 1 << 40):
        blocks = blocks_for(units, multiprocessors)
        assert 1 <= blocks <= full
        assert blocks == full or (blocks - 1) * PACK_THREADS < units <= blocks * PACK_THREADS


def test_several_jobs_go_in_one_launch(builds: Builds) -> None:
    machine, rng = Machine(builds, 1), np.random.default_rng(7)
    layouts = [_layout(LAYOUTS[name]) for name in ("columns of doubles", "many regions", "a run")]
    memory = [rng.integers(0, 256, 8192, np.uint8) for _ in layouts]
    places = [machine.place(0, each) for each in memory]
    starts = np.cumsum([0, *(layout.nbytes for layout in layouts)])
    target = machine.place(0, np.zeros(starts[-1], np.uint8))
    jobs = [PackJob(place.address, layout, int(at)) for place, layout, at in zip(places, layouts, starts, strict=False)]
    _launch(builds, machine, jobs, target.address, unpacks=False)
    expected = [pack(layout, each, 0) for layout, each in zip(layouts, memory, strict=True)]
    assert np.array_equal(target.bytes, np.concatenate(expected))


@pytest.mark.parametrize(
    "change",
    [
        Change("pack.cu", "run * region.run_nbytes", "run * region.run_units"),
        Change("pack.cu", "region.strides[loop]", "region.strides[0]"),
        Change("pack.cu", "left < kPacketNbytes ? left : kPacketNbytes", "kPacketNbytes"),
        Change("pack.cu", "first_unit <= number", "first_unit < number"),
    ],
)
def test_a_mistake_is_seen(builds: Builds, change: Change) -> None:
    with pytest.raises(AssertionError):
        for regions in LAYOUTS.values():
            check(builds, regions, 0, [change])


def test_nothing_is_unpacked_after_a_failure(builds: Builds) -> None:
    after_a_failure(builds)


def test_unpacking_after_a_failure_is_seen(builds: Builds) -> None:
    with pytest.raises(AssertionError):
        after_a_failure(builds, [Change("pack.cu", "if (failed != mpicomm::kClear) return;", "")])


def test_packing_goes_on_after_a_failure(builds: Builds) -> None:
    check(builds, LAYOUTS["a run"], 0, failed=True, unpacked=False)


def after_a_failure(builds: Builds, changes: Sequence[Change] = ()) -> None:
    for regions in LAYOUTS.values():
        check(builds, regions, 0, changes, failed=True, unpacked=False)


def check(
    builds: Builds,
    regions: Sequence[Region],
    offset: int,
    changes: Sequence[Change] = (),
    *,
    blocks: int = 2,
    failed: bool = False,
    unpacked: bool = True,
) -> None:
    machine, rng, layout = Machine(builds, 1), np.random.default_rng(5), _layout(regions)
    machine.failed[0].view(np.uint32)[:] = failed
    memory, other = (rng.integers(0, 256, 8192, np.uint8) for _ in range(2))
    source, back = machine.place(0, memory, offset=offset), machine.place(0, other, offset=offset)
    packed = machine.place(0, np.zeros(layout.nbytes, np.uint8), offset=offset)
    how: dict[str, Any] = {"changes": changes, "blocks": blocks}
    _launch(builds, machine, [PackJob(source.address, layout, 0)], packed.address, unpacks=False, **how)
    expected = pack(layout, memory, 0)
    assert np.array_equal(packed.bytes, expected)
    _launch(builds, machine, [PackJob(back.address, layout, 0)], packed.address, unpacks=True, **how)
    if unpacked:
        unpack(layout, expected, other, 0)
    assert np.array_equal(back.bytes, other)


def _layout(regions: Sequence[Region]) -> Layout:
    return Layout(tuple(regions), 0, None)


def _launch(
    builds: Builds,
    machine: Machine,
    jobs: Sequence[PackJob],
    packed: int,
    *,
    unpacks: bool,
    changes: Sequence[Change] = (),
    blocks: int = 2,
) -> None:
    table = table_of(jobs)
    entries = machine.place(0, np.frombuffer(table.content, np.uint8))
    arguments = table.arguments(entries.address, 0, packed, machine.failed[0].address, unpacks=unpacks)
    machine.launch(0, kernel_of(builds, PACK_KERNEL, changes), [arguments], blocks=blocks, threads=32)
    machine.run()
