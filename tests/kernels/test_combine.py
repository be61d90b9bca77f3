"""The kernels of combine.cu, and the kernel of ``python -m mpicomm.p2p`` on the processor."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomm.kernels.reductions import COMBINE_THREADS, CombineArguments, blocks_for, combine_kernel
from mpicomm.mpi.types import is_narrow
from mpicomm.p2p.gpu import COPY, Copying
from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds
from tests.kernels.machine import Machine, kernel_of
from tests.kernels.mistakes import Change

CASES = [
    ("float32", "sum", "float32"),
    ("float32", "sum", "bfloat16"),
    ("float32", "tree", "float32"),
    ("float32", "prod", "float16"),
    ("float32", "sum", "float8_e4m3fn"),
    ("bfloat16", "max", "bfloat16"),
    ("float64", "min", "float64"),
    ("complex64", "sum", "complex64"),
    ("complex128", "prod", "complex128"),
    ("int8", "sum", "int8"),
    ("bool", "lor", "bool"),
    ("uint16", "lxor", "uint16"),
    ("float32", "a * 2 - b", "bfloat16"),
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
    assert blocks_for(1, 132) == 1
    assert blocks_for(16 * COMBINE_THREADS + 1, 132) == 2
    assert blocks_for(1 << 40, 132) == 4 * 132


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
