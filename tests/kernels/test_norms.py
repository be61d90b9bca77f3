"""Norms of rows, also quantized with scales: in the kernels that reduce and in the kernel after them, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.configs import most_groups, row_geometry
from mpicomm.epilogues import Epilogue, layer_norm, rms_norm
from tests.helpers.references.reductions import Array, dtype_named, require_same
from tests.kernels.build import Builds
from tests.kernels.epilogue_rig import FusedCalls, bound, finished, normal, run_after
from tests.kernels.kernel_calls import BOTH
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Machine, RunFailedError, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
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
    weight: str = ""
    """The type of the weights; float32 of many magnitudes if it is empty."""


CASES = [
    Case("float32", "float32", 1040, norm="layer", bias=True, linear_bias=True),
    Case("bfloat16", "bfloat16", 2101, norm="layer"),
    Case("float64", "float32", 3, linear_bias=True),
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
    if case.weight:
        weight = row(case.weight)
    else:
        weight = row("float32") * np.float32(10) ** rng.integers(-6, 3, case.hidden).astype(np.float32)
    if case.norm == "rms":
        return rms_norm(residual, weight, 1e-3, **more), residual, scales
    return layer_norm(residual, weight, row("float32") if case.bias else None, 1e-3, **more), residual, scales


# A tile of scales has 128 rows, in four groups of 32.
AFTER = [*((case, 5) for case in CASES), (CASES[7], 161)]


@pytest.mark.parametrize(("case", "rows"), AFTER, ids=str)
def test_the_kernel_after_the_reduction(builds: Builds, case: Case, rows: int) -> None:
    machine, rng = Machine(builds, 1), np.random.default_rng(case.hidden)
    epilogue, residual, scales = epilogue_of(case, rows, rng)
    values = normal(dtype_named(case.dtype), rows * case.hidden, rng)
    count = values.size // (2 if case.result == "uint8" else 1)
    in_place = case.dtype == case.result
    target, places = run_after(machine, epilogue, values, case.result, in_place=in_place, blocks=2)
    expected = finished(bound(epilogue, case.dtype, case.result, count), values)  # it changes the others, too
    require_same(target.view(expected.dtype).copy(), expected)
    require_same(places["residual"].view(residual.dtype).copy(), residual)
    if scales is not None:
        require_same(places["scales"].view(scales.dtype).copy(), scales)


STEP_NBYTES = 256 * 16  # of a row
SHAPES = ((1, 16), (5, 272), (2, STEP_NBYTES), (9, STEP_NBYTES + 16), (3, 3 * STEP_NBYTES - 16))
"""Numbers of rows and their bytes, for one step and for more. The last packets of a row fill a step or not."""


PLAIN = Case("float32", "float32", 0, weight="float32")


def run_norms(
    builds: Builds,
    algorithm: str,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    laps: int = 40,
    *,
    case: Case = PLAIN,
    size: int = 3,
    seed: int = 0,
    changes: Changes = (),
    timeout_s: float | None = None,
    limit_s: float = 60,
    anywhere: bool = False,
) -> None:
    """Sums whose rows are normalised by two blocks, or by one; the inboxes hold ``laps`` steps.

    ``shapes`` are the numbers of rows and their bytes, for which 0 stands for the case's.
    """
    blocks = 1 if builds.sanitize else SMALL.blocks  # each thread more takes ThreadSanitizer a while
    threads = blocks * 256 * most_groups(size, fan_out=algorithm == "two_shot")
    # With one hop the large inboxes of the rig, for several steps, are twice as long as the ordinary inboxes.
    inbox_nbytes = laps * threads * 16 // (1 if algorithm == "two_shot" else 2)
    options: dict[str, Any] = {"blocks": blocks, "changes": changes, "timeout_s": timeout_s}
    rig = packet_rig(Machine(builds, size), inbox_nbytes=inbox_nbytes, **options)
    rng = np.random.default_rng([size, seed])
    calls = FusedCalls(rig, rng, anywhere=anywhere)
    for rows, nbytes in shapes:
        made = case._replace(hidden=nbytes // dtype_named(case.dtype).itemsize) if nbytes else case
        epilogue, residual, scales = epilogue_of(made, rows, rng)
        written = {"residual": residual, **({} if scales is None else {"scales": scales})}
        more: dict[str, Any] = {"algorithm": algorithm, "written": written, "values": normal}
        calls.allreduce(epilogue, (made.dtype, "sum"), made.result, rows * made.hidden, **more)
    calls.run(seed=seed, limit_s=limit_s)


# The way decides which rank makes a row, and the types decide how the row is made. The kernel after the reduction has
# all types. These are each quantized type and type of scales, and each norm.
# Arrays that may lie anywhere take twice as many kernels.
FUSED = [
    (Case("bfloat16", "bfloat16", 0, weight="bfloat16"), 3, "one_shot", True),
    (Case("bfloat16", "float8_e5m2", 0, weight="float16"), 4, "two_shot", True),
    (Case("float64", "float32", 0, weight="float64"), 3, "two_shot", False),
    *((CASES[number], 2, way, True) for number, way in ((0, "two_shot"), (4, "two_shot"), (9, "one_shot"))),
    *((CASES[number], 3, "two_shot", False) for number in (5, 8)),
    *((CASES[number], 3, "one_shot", False) for number in (3, 6, 10)),
]
FEW = ((1, 0), (5, 0), (13, 0))


@pytest.mark.parametrize(("case", "size", "algorithm", "anywhere"), FUSED, ids=str)
def test_the_kernel_that_reduces(builds: Builds, case: Case, size: int, algorithm: str, anywhere: bool) -> None:
    shapes, laps = (FEW, 8) if case.hidden else (SHAPES, 40)
    run_norms(builds, algorithm, shapes, laps, case=case, size=size, anywhere=anywhere)


LONG = ((13, 3 * STEP_NBYTES - 16), (40, STEP_NBYTES), (9, 5 * STEP_NBYTES))
both = pytest.mark.parametrize("algorithm", BOTH)


@both
@pytest.mark.parametrize(("size", "laps"), [(2, 7), (3, 9)])
def test_slots_are_used_again(builds: Builds, size: int, laps: int, algorithm: str) -> None:
    run_norms(builds, algorithm, LONG, laps, size=size)


@both
def test_no_race(watched_builds: Builds, algorithm: str) -> None:
    run_norms(watched_builds, algorithm, [SHAPES[1], SHAPES[3], (7, LONG[0][1])], 8)


# In every third step only the first thread has a unit. With 8 laps some fences fall on such a step. On every second
# rank, which its addresses tell, the first thread's fence is over long before the other threads' fences.
GAPS, LAPS = ((18, 2 * STEP_NBYTES + 16),), 8
SLOW = "(overseer == 0 || (reinterpret_cast<u64>(this) >> 32) % 2 == 1 ? 0 : 150)"
LATER = [*LATE, Change("fences.cuh", "turn < 20;", f"turn < {SLOW};")]


TOO_LATE = [*LATER, Change("packets.cu", "x.laps - (kRows ? 4 : 3)", "x.laps - 2")]
# Two shots have as many rows in each shard.
OF_FENCES = {way: (way, [(rows, GAPS[0][1])], LAPS, TOO_LATE) for way, rows in (("one_shot", 18), ("two_shot", 54))}
test_fences_that_come_too_late_for_rows_are_found = controls(run_norms, OF_FENCES, match=LOST)


@both
def test_what_is_put_back_may_arrive_as_late_as_the_next_fence(builds: Builds, algorithm: str) -> None:
    right = without_mistake(OF_FENCES)
    run_norms(builds, algorithm, GAPS, LAPS, changes=right)
    run_norms(builds, algorithm, LONG[2:], 7, changes=right)


READ_EARLY = Change("norm.cuh", "{ return named_barrier(barrier, kNormThreads, ok); }", "{ return ok; }")
SHORT = ((40, 272), (7, STEP_NBYTES + 16))
SUMS = {
    "read before they are there": ("one_shot", SHORT, READ_EARLY),
    "of another group": ("one_shot", SHORT, Change("rows.cuh", "barrier(1 + worker / kNormThreads)", "barrier(1)")),
}
RACES = {
    "read before they are there": ("one_shot", SHORT[:1], READ_EARLY),
    "in one place instead of two": ("two_shot", SHORT[:1], Change("rows.cuh", "turn ^= 1", "turn = 0")),
}
test_mistake_with_sums_is_seen = controls(partial(run_norms, size=2, limit_s=10), SUMS)
test_race_with_sums_is_seen = controls(run_norms, RACES, watched=True)


# One thread of a rank sends nothing from its third packet on. One thread of each other rank gives up, while the others
# of its group go on to the end of the row.
SILENT = Change(
    "packet_worker.cuh",
    "if (at >= m.send_nbytes[to]) continue;",
    "if (at >= m.send_nbytes[to] || (rank == 1 && threadIdx.x == 5 && blockIdx.x == 0 && at >= 8192)) continue;",
)
WORD = "if constexpr (kLaps) fences.publish(thread, fences.kLeft);"
ALONE = {  # with slots for all steps, and with laps
    "without the others": (8, Change("packets.cu", "if (!took) leave();", "")),
    "with no word to the overseer": (7, Change("packets.cu", f"{WORD}\n    row_barrier", "row_barrier")),
}
LEAVES = {f"{name}-{way}": (way, laps, [SILENT, each]) for name, (laps, each) in ALONE.items() for way in BOTH}
ROW = 8 * STEP_NBYTES
SOON: dict[str, Any] = {"timeout_s": 0.5, "limit_s": 5}  # without a mistake all takes less than 0.1 s
NAMED, HANGS = "operation=2, sequence=1, block=., peer=1", "hang: not over|threads wait at barriers"


RIGHT = without_mistake(LEAVES, "with no word to the overseer-one_shot")


def run_silent(builds: Builds, algorithm: str, laps: int, *, seed: int = 0, changes: Changes) -> None:
    run_norms(builds, algorithm, [(6 if algorithm == "two_shot" else 2, ROW)], laps, seed=seed, changes=changes, **SOON)


@pytest.mark.parametrize("name", LEAVES)
def test_a_thread_that_gives_up_in_a_row_leaves_with_its_group(builds: Builds, name: str) -> None:
    algorithm, laps, _ = LEAVES[name]
    with pytest.raises(RunFailedError, match=NAMED):
        run_silent(builds, algorithm, laps, changes=RIGHT)


test_a_thread_that_leaves_alone_is_seen = controls(run_silent, LEAVES, match=HANGS)


# One thread of a rank does not send on h from a step on, or the statistics of its row.
FORGETS = "!(rank == 1 && blockIdx.x == 0 && rows.course.thread == {} && b_at >= {}) &&"
H = "if (x.targets >> to & 1) worker.send(to, 1"
STATISTICS = "if (kFanOut && reduces && rows.course.thread == 0)"
NO_MORE = {
    "h of two steps": Change("packets.cu", H, H.replace("if (", f"if ({FORGETS.format(5, ROW - 2 * STEP_NBYTES)} ")),
    "h of the last step": Change("packets.cu", H, H.replace("if (", f"if ({FORGETS.format(5, ROW - STEP_NBYTES)} ")),
    "statistics": Change("packets.cu", STATISTICS, STATISTICS.replace("if (", f"if ({FORGETS.format(0, 0)} ")),
}
MEETS = "[&] { if (others_meet) leave(); }"


@pytest.mark.parametrize(
    ("name", "leaves"),
    [*((name, MEETS) for name in NO_MORE), ("h of two steps", "[] {}"), ("h of the last step", "leave")],
)
def test_a_thread_that_gets_no_more_of_a_row_leaves_with_its_group(builds: Builds, name: str, leaves: str) -> None:
    changes = [NO_MORE[name], Change("packets.cu", MEETS, leaves)]
    for laps in (7, 8):
        with pytest.raises(RunFailedError, match=NAMED if leaves == MEETS else HANGS):
            run_norms(builds, "two_shot", [(6, ROW)], laps, changes=changes, **SOON)


def test_two_groups_of_threads_share_rows_only_between_two_ranks_in_one_shot() -> None:
    for count, nbytes, size, fan_out, blocks, workers, steps in (
        (1, 16, 2, False, 1, 256, 1),
        (128, 4096, 2, False, 128, 256, 1),
        (129, 4112, 2, False, 128, 512, 2),
        (129, 4112, 2, True, 128, 256, 4),
        (129, 4112, 3, False, 128, 256, 4),
        (1000, 32768, 2, False, 128, 512, 32),
        (128, 65536, 2, False, 128, 256, 16),
    ):
        assert row_geometry(count, nbytes, 128, size, fan_out=fan_out) == ((blocks, workers), steps)


def no_barrier(comment: str) -> Change:
    return Change("norm.cuh", f"{comment}\n    named_barrier(barrier, kNormThreads, true);", "\n")


BARRIERS = {
    "before the squares are there": (CASES[0], no_barrier("as in `row_barrier`.")),
    "before the magnitudes are there": (CASES[-1], no_barrier("a smaller scale.")),
}


def run_rows(builds: Builds, case: Case, *, seed: int = 0, changes: Changes) -> None:
    run_norms(builds, "two_shot", [(40, 0)], 8, case=case, seed=seed, changes=changes)


test_a_row_that_ends = controls(run_rows, BARRIERS, watched=True)


# What the threads of a row share is the same in one shot and in two.
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=["squares", "magnitudes"])
def test_no_race_of_scales(watched_builds: Builds, case: Case) -> None:
    run_rows(watched_builds, case, changes=without_mistake(BARRIERS))
