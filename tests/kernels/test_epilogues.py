"""Epilogues in the kernels that reduce, and in the kernel after them: both give NumPy's bits."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol
from mpicomm.epilogues import Elementwise, Epilogue, fp8, rms_norm
from mpicomm.kernels.team import ABSENT
from tests.helpers.references.reductions import NARROW, dtype_named, require_same, rounded_once, samples
from tests.kernels.build import Builds
from tests.kernels.epilogue_rig import bound, finished, run_after, run_fused
from tests.kernels.machine import Machine, controls
from tests.kernels.mistakes import Change, Changes

RNG = np.random.default_rng(7)
BIAS, ROW = samples(np.dtype(np.float32), 5000, RNG), samples(dtype_named("bfloat16"), 7, RNG)
WORDS = Elementwise("words[i]", words=np.full(5000, ABSENT, np.uint32).view(np.float32))
AFFINE = Elementwise("v * scale + bias[i] - row[i % n]", scale=0.3, n=7, bias=BIAS, row=ROW)


@pytest.mark.parametrize(
    ("epilogue", "dtype", "result"),
    [
        (AFFINE, "float32", "float32"),
        (AFFINE, "bfloat16", "float32"),
        (AFFINE, "float64", "bfloat16"),
        (Elementwise("conj(v) - i"), "complex64", "complex128"),
        (fp8(0.25), "float32", "float8_e4m3fn"),
        (fp8(np.array([3], np.float32), "float8_e5m2"), "bfloat16", "float8_e5m2"),
        (Elementwise("v * 3 + i % k - d[i // 2]", k=5, d=np.arange(5000, dtype=np.uint8)), "int32", "int64"),
        (Elementwise("v and not m[i]", m=RNG.random(5000) < 0.5), "bool", "int16"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_kernel_after_the_reduction(builds: Builds, epilogue: Epilogue, dtype: str, result: str) -> None:
    machine = Machine(builds, 1)
    for count, offset in ((1, 0), (4099, 0), (1001, 1)):
        whole = bound(epilogue, dtype, result, count)
        values = samples(whole.dtype, count, RNG)
        in_place = dtype == result and offset > 0
        target, _ = run_after(machine, epilogue, values, result, in_place=in_place, offset=offset, threads=64)
        require_same(target.view(whole.result).copy(), finished(whole, values))
        machine.clear()


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        *(("float64", result) for result in NARROW),
        *((dtype, "bfloat16") for dtype in ("int64", "uint64", "int32")),
        ("int64", "float8_e4m3fn"),
    ],
)
def test_conversions_to_fewer_bits_round_once(builds: Builds, dtype: str, result: str) -> None:
    """A float32 between would make ties of many of these numbers, which lie beside ties."""
    machine, narrow = Machine(builds, 1), dtype_named(result)
    if dtype == "float64":
        bits = RNG.integers(0, 1 << 8 * narrow.itemsize, 1000).astype(f"u{narrow.itemsize}")
        with np.errstate(all="ignore"):
            below, above = (each.view(narrow).astype(np.float64) for each in (bits, bits + bits.dtype.type(1)))
            middles = (below + above) / 2
        ties = np.concatenate([middles, [0.0, -0.0, 464.0, 65520.0, 61440.0, 3.4e38, 1e300, 1e-300]])
        ties = ties[np.isfinite(ties)]
        values = np.concatenate([ties * (1 + sign * 2.0**-40) for sign in (-1, 0, 1)])
    else:
        info, whole = np.iinfo(dtype), [int(n) << place for n in RNG.integers(-520, 520, 50) for place in range(55)]
        values = np.array([n + d for n in whole for d in (-1, 0, 1) if info.min <= n + d <= info.max], dtype)
    expected = rounded_once(values, narrow)
    require_same(finished(bound(Elementwise("v"), dtype, result, values.size), values), expected)
    target, _ = run_after(machine, Elementwise("v"), values, result, threads=64)
    require_same(target.view(narrow).copy(), expected)


def test_the_kernel_after_a_failed_one_does_nothing(builds: Builds) -> None:
    machine, values = Machine(builds, 1), np.ones(100, np.float32)
    machine.failed[0].bytes[:] = 1
    place, _ = run_after(machine, Elementwise("v + 1"), values, "float32", in_place=True)
    require_same(place.view(np.float32).copy(), values)


def test_the_threads_of_a_row_leave_together_if_some_see_a_failure(builds: Builds) -> None:
    machine, values = Machine(builds, 1), np.ones(64, np.float32)
    epilogue = rms_norm(np.ones(64, np.float32), np.ones(64, np.float32), 0.0)
    # Another stream reports a failure while the block begins: only one thread sees it.
    late = Change("norm.cu", "load_relaxed(x.failed) == kClear", "threadIdx.x != 5")
    target, _ = run_after(machine, epilogue, values, "float32", changes=[late], blocks=1, limit_s=15)
    assert not target.bytes.any()


FUSED: list[tuple[Protocol, Epilogue, tuple[str, str], str, int]] = [
    ("ll", fp8(0.25), ("float32", "sum"), "float8_e4m3fn", 2),
    ("sentinel", fp8(np.array([3], np.float32), "float8_e5m2"), ("bfloat16", "avg"), "float8_e5m2", 3),
    ("sentinel", AFFINE, ("float64", "a * 2 - b"), "bfloat16", 2),
    ("ll", AFFINE, ("float8_e4m3fn", "max"), "float64", 3),
    ("sentinel", Elementwise("conj(v) - i"), ("complex64", "sum"), "complex128", 3),
    ("sentinel", Elementwise("v * 3 + i % k", k=5), ("int32", "sum"), "int64", 4),
    # Of these the threads that reduce send on what the epilogue made.
    ("ll", AFFINE, ("bfloat16", "avg"), "bfloat16", 3),
    ("sentinel", AFFINE, ("float64", "a * 2 - b"), "float64", 3),
]


@pytest.mark.parametrize(
    ("protocol", "epilogue", "reduction", "result", "size"), FUSED, ids=lambda value: str(value)[:40]
)
def test_in_the_kernel_that_reduces(
    builds: Builds, protocol: Protocol, epilogue: Epilogue, reduction: tuple[str, str], result: str, size: int
) -> None:
    run_fused(builds, protocol, epilogue, reduction, result, size=size)


def test_results_that_say_that_no_packet_has_come(builds: Builds) -> None:
    """An epilogue may make the words that stand for empty slots, which no sum of floats does."""
    run_fused(builds, "sentinel", WORDS, ("float32", "sum"), exact=True)


WORD = Change("packet_protocols.cuh", "(defined(MPICOMM_RESULT) || !defined(MPICOMM_EPILOGUE))", "1")
test_results_that_lose_such_a_word_are_found = controls(
    partial(run_fused, protocol="sentinel", epilogue=WORDS, reduction=("float32", "sum"), exact=True), {"word": WORD}
)


def run_places(builds: Builds, result: str, *, seed: int, changes: Changes) -> None:
    run_fused(builds, "ll", Elementwise("v + i"), ("float32", "sum"), result, seed=seed, changes=changes)


PLACES = {
    "before the fan-out": ("float32", Change("finish.cuh", "made = apply(unit, place)", "made = apply(unit, reduced)")),
    "where it is stored": (
        "float64",
        Change("finish.cuh", "(to, apply(unit, array + at)", "(to, apply(unit, reduced + at)"),
    ),
    "to where it is stored": (
        "float64",
        Change("finish.cuh", "finished + index_of(array + at)", "finished + index_of(reduced + at)"),
    ),
    "to ranks that reduce others": ("float64", Change("packet_worker.cuh", "select(units, entry)", "units[1]")),
}
test_an_epilogue_that_forgets_where_its_shard_begins_is_found = controls(run_places, PLACES)
