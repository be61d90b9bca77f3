"""The kernels of pack.cu and combine.cu against NumPy, and the kernel of ``python -m mpicomm.p2p``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives import packed
from mpicomm.collectives.packed import PackJob, table_of_jobs
from mpicomm.kernels import packing, reductions
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS
from mpicomm.kernels.reductions import COMBINE_THREADS, CombineArguments, combine_kernel
from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.mpi.types import is_narrow
from mpicomm.p2p.__main__ import COPY, Copying
from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples
from tests.helpers.references.reference_packing import layout as in_turn
from tests.helpers.references.reference_packing import pack, region, unpack
from tests.kernels.build import Builds, one_build_of_many
from tests.kernels.machine import Machine, kernel_of
from tests.kernels.mistakes import Change, Changes, Mistake

_rng = np.random.default_rng(9)
_ANYWHERE = (64 * _rng.permutation(100)).tolist()
_NEAR = (20 * _rng.permutation(5)).tolist()

LAYOUTS = {
    "a run": in_turn(region(3, (), 1000)),
    "columns of doubles": in_turn(region(8, ((50, 80),), 8)),
    "columns of halves": in_turn(region(2, ((333, 6),), 2)),
    "a block of four dimensions": in_turn(region(16, ((2, 4096), (3, 1024), (4, 256), (5, 48)), 16)),
    "more loops than the kernel has": in_turn(region(0, ((2, 4000), (2, 2000), (2, 1000), (2, 500), (3, 40)), 12)),
    "runs that are no multiple of 16": in_turn(region(5, ((20, 100),), 37)),
    "backwards": in_turn(region(4000, ((30, -100),), 24)),
    "many regions": in_turn(*(region(64 * number + number % 7, (), 1 + number % 50) for number in range(60))),
    "regions with loops": in_turn(region(8, ((10, 64),), 4), region(2048, ((3, 400), (2, 100)), 40)),
    "a list": in_turn(region(8, (_ANYWHERE,), 24)),
    "a list of long runs": in_turn(region(3, ([900, 0, -1, 3000],), 900)),
    "several lists": in_turn(
        region(8, (_ANYWHERE,), 24),
        region(32, (_ANYWHERE,), 8),
        region(40, (_ANYWHERE[::-1],), 5),
        region(45, (_NEAR,), 1),
    ),
    "a list within a loop": in_turn(region(8, ((20, 112), _NEAR), 16)),
    "a list around loops": in_turn(region(8, ([1000, 0, 5200], (2, 400), (3, 96)), 40)),
    "a list between loops": in_turn(region(8, ((3, 2000), [700, 300, 0, 40], (2, 20)), 16)),
    "an array of structures": DatatypeLayout(
        (
            region(0, ((100, 64),), 24, 0, (44,)),
            region(32, ((100, 64),), 16, 24, (44,)),
            region(51, ((100, 64),), 4, 40, (44,)),
        ),
        0,
        None,
    ),
    "listed structures of columns": DatatypeLayout(
        (
            region(0, ((2, 40), _ANYWHERE[:50]), 8, 0, (1200, 24)),
            region(16, ((2, 40), _ANYWHERE[:50], (2, 16)), 8, 8, (1200, 24, 8)),
        ),
        0,
        None,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_packs_and_unpacks(builds: Builds, name: str, offset: int) -> None:
    check(builds, LAYOUTS[name], offset)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", ["columns of doubles", "many regions", "several lists", "an array of structures"])
def test_any_number_of_blocks_moves_all(builds: Builds, name: str, blocks: int) -> None:
    check(builds, LAYOUTS[name], 0, blocks=blocks)


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_a_small_launch_has_a_thread_for_each_unit_and_a_large_one_fills_the_device(multiprocessors: int) -> None:
    full = 8 * multiprocessors
    for units in (1, 255, 256, 257, PACK_THREADS * full - 1, PACK_THREADS * full, 1 << 40):
        blocks = packing.blocks_for(units, multiprocessors)
        assert 1 <= blocks <= full
        assert blocks == full or (blocks - 1) * PACK_THREADS < units <= blocks * PACK_THREADS


def test_several_jobs_go_in_one_launch(builds: Builds) -> None:
    machine, rng = Machine(builds, 1), np.random.default_rng(7)
    layouts = [LAYOUTS[name] for name in ("columns of doubles", "many regions", "a run")]
    memory = [rng.integers(0, 256, 8192, np.uint8) for _ in layouts]
    places = [machine.place(0, each) for each in memory]
    starts = np.cumsum([0, *(layout.nbytes for layout in layouts)])
    target = machine.place(0, np.zeros(starts[-1], np.uint8))
    jobs = [PackJob(place.address, layout, int(at)) for place, layout, at in zip(places, layouts, starts, strict=False)]
    _launch(builds, machine, jobs, target.address, unpacks=False)
    expected = [pack(layout, each, 0) for layout, each in zip(layouts, memory, strict=True)]
    assert np.array_equal(target.bytes, np.concatenate(expected))


MISTAKES = one_build_of_many(
    Change(*texts)
    for texts in (
        ("regions.cuh", "round * region.packed_strides[loop]", "round * region.run_units"),
        ("regions.cuh", "region.strides[loop]", "region.strides[0]"),
        ("regions.cuh", "region.packed_strides[loop]", "region.packed_strides[0]"),
        ("regions.cuh", "list_of(x, region)[round]", "list_of(x, region)[0]"),
        ("regions.cuh", "loop == region.listed", "loop == 0"),
        ("regions.cuh", "(x.regions) + region.list", "(x.regions) + x.regions->list"),
        ("regions.cuh", "left < kPacketNbytes ? left : kPacketNbytes", "kPacketNbytes"),
        ("regions.cuh", "first_unit <= number", "first_unit < number"),
        ("pack.cu", "x.structures == 1", "true"),
        ("pack.cu", "x.num_regions == 1", "true"),
        ("regions.cuh", "rest -= units;", ""),
        ("regions.cuh", "x.regions[++index]", "x.regions[1]"),
        ("pack.cu", "second = words[1]", "second = 0"),
    )
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(builds: Builds, mistake: Change | Mistake) -> None:
    with pytest.raises(AssertionError):
        for layout in LAYOUTS.values():
            check(builds, layout, 0, [mistake])


@pytest.mark.parametrize("most_units", [1, 5, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_regions_beyond_the_limits_of_the_kernel_are_cut(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, name: str, most_units: int
) -> None:
    whole = table_of_jobs([PackJob(0, LAYOUTS[name], 0)])
    monkeypatch.setattr(packed, "_MOST_UNITS", most_units + 1)
    monkeypatch.setattr(packed, "_MOST_RUN_NBYTES", 16 * most_units)
    cut = table_of_jobs([PackJob(0, LAYOUTS[name], 0)])
    assert cut.units == whole.units and cut.num_regions >= -(-whole.units // most_units)
    check(builds, LAYOUTS[name], 0)


def test_nothing_is_unpacked_after_a_failure_and_packing_goes_on(builds: Builds) -> None:
    def run(*changes: Change) -> None:
        for layout in LAYOUTS.values():
            check(builds, layout, 0, changes, failed=True, unpacked=False)

    run()
    with pytest.raises(AssertionError):
        run(Change("pack.cu", "if (failed != kClear) return;", ""))


def check(
    builds: Builds,
    layout: DatatypeLayout,
    offset: int,
    changes: Changes = (),
    *,
    blocks: int = 2,
    failed: bool = False,
    unpacked: bool = True,
) -> None:
    machine, rng = Machine(builds, 1), np.random.default_rng(5)
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


def _launch(
    builds: Builds,
    machine: Machine,
    jobs: Sequence[PackJob],
    packed: int,
    *,
    unpacks: bool,
    changes: Changes = (),
    blocks: int = 2,
) -> None:
    table = table_of_jobs(jobs)
    entries = machine.place(0, np.frombuffer(table.content, np.uint8))
    arguments = table.arguments(entries.address, 0, packed, machine.failed[0].address, unpacks=unpacks)
    machine.launch(0, kernel_of(builds, PACK_KERNEL, changes), [arguments], blocks=blocks, threads=32)
    machine.run()


# Combining.

CASES = [
    *(("float32", "sum", result) for result in ("float32", "bfloat16", "float8_e4m3fn")),
    *(("float32", "tree", "float32"), ("float32", "prod", "float16"), ("float32", "a * 2 - b", "bfloat16")),
    *((dtype, op, dtype) for dtype, op in (("bfloat16", "max"), ("float64", "min"), ("complex64", "sum"))),
    *((dtype, op, dtype) for dtype, op in (("complex128", "prod"), ("int8", "sum"))),
    *((dtype, op, dtype) for dtype, op in (("bool", "lor"), ("uint16", "lxor"))),
]


def run(
    builds: Builds,
    case: tuple[str, str, str],
    *,
    count: int,
    sources: int,
    offset: int = 0,
    divisor: int = 1,
    in_place: bool = False,
    changes: tuple[Change, ...] = (),
) -> None:
    """Combine arrays, and compare with a reduction in the wider type that is rounded once."""
    machine, rng = Machine(builds, 1), np.random.default_rng(5)
    dtype, result = dtype_named(case[0]), dtype_named(case[2])
    parts = [samples(dtype, count, rng) for _ in range(sources)]
    gap = -count * dtype.itemsize % 16 + (dtype.itemsize if offset else 0)
    stride = count * dtype.itemsize + gap
    content = b"".join(part.tobytes() + bytes(gap) for part in parts)
    place = machine.place(0, np.frombuffer(content, np.uint8), offset=offset)
    output = place if in_place else machine.place(0, np.zeros(count, result), offset=offset)
    arguments = CombineArguments(place.address, stride, output.address, count, sources, divisor)
    kernel = kernel_of(builds, combine_kernel((case[0], case[1]), case[2]), changes)
    machine.launch(0, kernel, [arguments], blocks=3, threads=64)
    machine.run()
    wide = np.dtype(np.float32) if is_narrow(dtype) or is_narrow(result) else dtype
    with np.errstate(all="ignore"):
        expected = reduced(case[1], [part.astype(wide) for part in parts])
        if divisor != 1:
            expected = expected / wide.type(divisor)
        expected = expected.astype(result)
    require_same(output.bytes[: count * result.itemsize].copy().view(result), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduces_in_order_and_rounds_once(builds: Builds, case: tuple[str, str, str]) -> None:
    for count, sources, offset in ((1, 2, 0), (1000, 3, 0), (4099, 2, 0), (501, 5, 8)):
        run(builds, case, count=count, sources=sources, offset=offset)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
def test_one_array_is_converted(builds: Builds, dtype: str) -> None:
    for count in (1, 16, 999):
        run(builds, (dtype, "sum", "float32"), count=count, sources=1)


@pytest.mark.parametrize("case", [("float32", "sum", "float16"), ("complex128", "sum", "complex128")], ids=str)
def test_the_result_is_divided(builds: Builds, case: tuple[str, str, str]) -> None:
    run(builds, case, count=777, sources=2, divisor=6)


def test_the_output_may_be_the_first_array(builds: Builds) -> None:
    run(builds, ("int32", "sum", "int32"), count=1003, sources=4, in_place=True)


def test_a_wrong_order_is_noticed(builds: Builds) -> None:
    change = Change("combine.cu", "place == 0 ? Op::first", "place != 1 ? Op::first")
    with pytest.raises(AssertionError):
        run(builds, ("float32", "sum", "float32"), count=100, sources=3, changes=(change,))


def test_a_small_launch_has_few_blocks_and_a_large_one_fills_the_device() -> None:
    assert reductions.blocks_for(1, 132) == 1
    assert reductions.blocks_for(16 * COMBINE_THREADS + 1, 132) == 2
    assert reductions.blocks_for(1 << 40, 132) == 4 * 132


def test_bytes_are_copied_into_memory_of_another_rank(builds: Builds) -> None:
    machine, rng = Machine(builds, 2), np.random.default_rng(1)
    kernel = builds.kernel(COPY.source, COPY.entry)
    arrived = []
    for nbytes, offset in ((1, 0), (16, 0), (100_003, 0), (100_003, 5), (4096, 16)):
        content = rng.integers(0, 256, nbytes, np.uint8)
        source = machine.place(0, content, offset=offset)
        target = machine.allocate(1, nbytes)
        copying = Copying(machine.address(1, target, 0), source.address, nbytes)
        machine.launch(0, kernel, [copying], blocks=3, threads=96)
        arrived.append((target, content))
    machine.run()
    assert all((target.bytes == content).all() for target, content in arrived)
