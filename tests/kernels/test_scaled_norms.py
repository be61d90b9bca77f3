"""Norms to codes with scales, layer norms and biases: in the kernels that reduce, and in the kernel after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.configs import most_groups
from mpicomm.epilogues import Epilogue, layer_norm, rms_norm
from tests.helpers.references.reductions import Array, dtype_named, require_same
from tests.kernels.build import Builds, Change
from tests.kernels.epilogue_rig import FusedCalls, bound, finished, run_after
from tests.kernels.machine import Machine, controls
from tests.kernels.rig import SMALL, packet_rig


class Case(NamedTuple):
    """A norm of rows of ``hidden`` elements of ``dtype`` to ``result``."""

    dtype: str
    result: str
    hidden: int
    scales: str = ""
    group: int = 0
    """The elements for each scale; 0 for a row."""
    norm: str = "rms"
    bias: bool = False
    linear_bias: bool = False
    scale: Any = None
    tiled: bool = False


CASES = [
    Case("float32", "float32", 1040, norm="layer", bias=True, linear_bias=True),
    Case("bfloat16", "bfloat16", 2056, norm="layer"),
    Case("float64", "float32", 48, linear_bias=True),
    Case("bfloat16", "float8_e4m3fn", 264, scale=100.0),
    Case("float16", "float8_e5m2", 2056, "float32", norm="layer", bias=True),
    Case("float32", "float8_e4m3fn", 1152, "float32", 128, scale=np.array([0.25], np.float32)),
    Case("bfloat16", "float8_e4m3fn", 2112, "uint8", 32, linear_bias=True),
    Case("bfloat16", "float8_e4m3fn", 160, "uint8", 32, tiled=True),
    Case("bfloat16", "uint8", 2064, "float8_e4m3fn", 16, scale=3.0),
    Case("float32", "uint8", 1104, "float8_e4m3fn", 16, scale=1e4, tiled=True, norm="layer", bias=True),
    Case("float8_e5m2", "uint8", 4112, "float8_e4m3fn", 16),
    Case("bfloat16", "float8_e4m3fn", 264, "float32"),
]


def scales_for(case: Case, rows: int) -> Array | None:
    """Return the array of scales, with a value that shows which elements a kernel has stored."""
    if not case.scales:
        return None
    columns = case.hidden // (case.group or case.hidden)
    count = -(-rows // 128) * 128 * (-(-columns // 4) * 4) if case.tiled else rows * columns
    return np.full(count, 7, np.uint8 if case.scales == "uint8" else np.float32).astype(dtype_named(case.scales))


def epilogue_of(case: Case, rows: int, rng: np.random.Generator) -> tuple[Epilogue, Array, Array | None]:
    """Return the epilogue, its residual and its scales."""
    dtype = dtype_named(case.dtype)

    def row(name: str) -> Array:
        return rng.standard_normal(case.hidden).astype(dtype_named(name))

    residual = rng.standard_normal(rows * case.hidden).astype(dtype)
    # The magnitudes of rows differ much. One row is all zeros, and one has a NaN.
    by_row = residual.reshape(rows, case.hidden)
    if rows > 3:
        by_row[1] = 0
        by_row[2, case.hidden // 2] = np.nan
    scales = scales_for(case, rows)
    more: dict[str, Any] = {"linear_bias": row(case.dtype)} if case.linear_bias else {}
    if case.scale is not None:
        more["scale"] = case.scale
    if scales is not None:
        more |= {"scales": scales, "scale_layout": "128x4" if case.tiled else "linear"}
    weight = row("float32") * np.float32(10) ** rng.integers(-6, 3, case.hidden).astype(np.float32)
    if case.norm == "rms":
        return rms_norm(residual, weight, 1e-3, **more), residual, scales
    return layer_norm(residual, weight, row("float32") if case.bias else None, 1e-3, **more), residual, scales


def numbers(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal(count).astype(dtype)


# A tile of scales has 128 rows, in four groups of 32.
AFTER = [*((case, 5) for case in CASES), (CASES[7], 161)]


@pytest.mark.parametrize(("case", "rows"), AFTER, ids=str)
def test_the_kernel_after_the_reduction(builds: Builds, case: Case, rows: int) -> None:
    machine, rng = Machine(builds, 1), np.random.default_rng(case.hidden)
    epilogue, residual, scales = epilogue_of(case, rows, rng)
    values = numbers(dtype_named(case.dtype), rows * case.hidden, rng)
    count = values.size // (2 if case.result == "uint8" else 1)
    target, places = run_after(machine, epilogue, values, case.result, blocks=2)
    expected = finished(bound(epilogue, case.dtype, case.result, count), values)  # it changes the others, too
    require_same(target.view(expected.dtype).copy(), expected)
    require_same(places["residual"].view(residual.dtype).copy(), residual)
    if scales is not None:
        require_same(places["scales"].view(scales.dtype).copy(), scales)


def run_fused(
    builds: Builds,
    case: Case,
    algorithm: str,
    rows: Sequence[int] = (1, 5, 13),
    *,
    size: int = 3,
    seed: int = 0,
    changes: Sequence[Change] = (),
) -> None:
    threads = SMALL.blocks * 256 * most_groups(size, fan_out=algorithm == "two_shot")
    rig = packet_rig(Machine(builds, size), inbox_nbytes=8 * threads * 16, changes=changes)
    rng = np.random.default_rng([size, seed])
    calls = FusedCalls(rig, rng)
    for number in rows:
        epilogue, residual, scales = epilogue_of(case, number, rng)
        written = {"residual": residual, **({} if scales is None else {"scales": scales})}
        more: dict[str, Any] = {"algorithm": algorithm, "written": written, "values": numbers}
        calls.allreduce(epilogue, (case.dtype, "sum"), case.result, number * case.hidden, **more)
    calls.run(seed=seed)


# Each kind of codes and scales, and each norm. The test above has all types.
WAYS = [(CASES[number], "two_shot") for number in (0, 4, 5, 8)]
WAYS += [(CASES[number], "one_shot") for number in (3, 6, 9, 10)]


@pytest.mark.parametrize(("case", "algorithm"), WAYS, ids=str)
def test_the_kernel_that_reduces(builds: Builds, case: Case, algorithm: str) -> None:
    run_fused(builds, case, algorithm, size=2 if case.norm == "layer" else 3)


# What the threads of a row share is the same in one shot and in two.
@pytest.mark.parametrize(("number", "algorithm"), [(0, "one_shot"), (-1, "two_shot")], ids=["squares", "magnitudes"])
def test_no_race(watched_builds: Builds, number: int, algorithm: str) -> None:
    run_fused(watched_builds, CASES[number], algorithm)


def no_barrier(comment: str) -> Change:
    return Change("norm.cuh", f"{comment}\n    meet(barrier, kNormThreads, true);", "\n")


BARRIERS = {
    "before the squares are there": (CASES[0], "two_shot", (40,), no_barrier("as in `meet_at_end`.")),
    "before the magnitudes are there": (CASES[-1], "two_shot", (40,), no_barrier("a smaller scale.")),
}
test_a_row_that_ends = controls(run_fused, BARRIERS, watched=True)
