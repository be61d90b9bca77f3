"""The kernel that reduces rows normalises them, with the bits of the separate kernel; mistakes are found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.configs import fewest_rows, most_groups, row_geometry
from mpicomm.epilogues import rms_norm
from tests.helpers.references.reductions import Array, dtype_named
from tests.kernels.build import Builds, Change
from tests.kernels.epilogue_rig import FusedCalls
from tests.kernels.kernel_calls import BOTH
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Machine, RunFailedError, controls
from tests.kernels.rig import SMALL, packet_rig

STEP_NBYTES = 256 * 16  # of a row
SHAPES = ((1, 16), (5, 272), (2, STEP_NBYTES), (9, STEP_NBYTES + 16), (3, 3 * STEP_NBYTES - 16))
"""Numbers of rows and their bytes, for one step and for more. The last packets of a row fill a step or not."""


def numbers(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Return numbers whose sums of squares are finite."""
    return rng.standard_normal(count).astype(dtype)


def run_norms(
    builds: Builds,
    algorithm: str,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    laps: int = 40,
    *,
    types: tuple[str, str, str] = ("float32", "float32", "float32"),
    size: int = 3,
    seed: int = 0,
    changes: Sequence[Change] = (),
    limit_s: float = 60,
) -> None:
    """Sums whose rows are normalised by two blocks; the inboxes hold ``laps`` steps.

    ``types`` are those of the elements, of the results and of the weights.
    """
    dtype, result, weight = types
    threads = SMALL.blocks * 256 * most_groups(size, fan_out=algorithm == "two_shot")
    rig = packet_rig(Machine(builds, size), inbox_nbytes=laps * threads * 16, changes=changes)
    rng = np.random.default_rng([size, seed])
    calls = FusedCalls(rig, rng)
    for rows, nbytes in shapes:
        hidden = nbytes // dtype_named(dtype).itemsize
        residual = numbers(dtype_named(dtype), rows * hidden, rng)
        epilogue = rms_norm(residual, numbers(dtype_named(weight), hidden, rng), 1e-3)
        more: dict[str, Any] = {"algorithm": algorithm, "written": {"residual": residual}, "values": numbers}
        calls.allreduce(epilogue, (dtype, "sum"), result, rows * hidden, **more)
    calls.run(seed=seed, limit_s=limit_s)


# The way decides which rank makes a row, and the types decide how the row is made.
@pytest.mark.parametrize(
    ("types", "size", "algorithm"),
    [
        (("bfloat16", "bfloat16", "bfloat16"), 3, "one_shot"),
        (("bfloat16", "float8_e5m2", "float16"), 4, "two_shot"),
        (("float64", "float32", "float64"), 3, "two_shot"),
    ],
)
def test_rows_are_normalised(builds: Builds, types: tuple[str, str, str], size: int, algorithm: str) -> None:
    run_norms(builds, algorithm, types=types, size=size)


LONG = ((13, 3 * STEP_NBYTES - 16), (40, STEP_NBYTES), (9, 5 * STEP_NBYTES))
both = pytest.mark.parametrize("algorithm", BOTH)


@both
@pytest.mark.parametrize(("size", "laps"), [(2, 7), (3, 9)])
def test_slots_are_used_again(builds: Builds, size: int, laps: int, algorithm: str) -> None:
    run_norms(builds, algorithm, LONG, laps, size=size)


@both
def test_no_race(watched_builds: Builds, algorithm: str) -> None:
    run_norms(watched_builds, algorithm, [*SHAPES, LONG[0]], 8)


# In every third step only the first thread has a unit. With 8 laps some fences fall on such a step. On every second
# rank, which its addresses tell, the first thread's fence is over long before the other threads' fences.
GAPS, LAPS = ((30, 2 * STEP_NBYTES + 16),), 8
SLOW = "(overseer == 0 || (reinterpret_cast<u64>(this) >> 32) % 2 == 1 ? 0 : 1000)"
LATER = [*LATE, Change("fences.cuh", "turn < 20;", f"turn < {SLOW};")]


@both
def test_what_is_put_back_may_arrive_as_late_as_the_next_fence(builds: Builds, algorithm: str) -> None:
    run_norms(builds, algorithm, GAPS, LAPS, changes=LATER)
    run_norms(builds, algorithm, LONG, 7, changes=LATER)


TOO_LATE = [*LATER, Change("packets.cu", "x.laps - (kRows ? 4 : 3)", "x.laps - 2")]
# Two shots have as many rows in each shard.
OF_FENCES = {way: (way, [(rows, GAPS[0][1])], LAPS, TOO_LATE) for way, rows in (("one_shot", 30), ("two_shot", 90))}
test_fences_that_come_too_late_for_rows_are_found = controls(run_norms, OF_FENCES, match=LOST)

READ_EARLY = Change("norm.cuh", "{ return meet(barrier, kNormThreads, ok); }", "{ return ok; }")
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
WORD = "if constexpr (kLaps) fences.say(thread, fences.kLeft);"
LEAVES: dict[str, tuple[int, list[Change]]] = {
    "with slots for all steps": (8, []),
    "with laps": (7, []),
    "without the others": (8, [Change("packets.cu", "if (!took) leave();", "")]),
    "with no word to the overseer": (7, [Change("packets.cu", f"{WORD}\n    meet", "meet")]),
}
ROW = 8 * STEP_NBYTES
NAMED, HANGS = "operation=2, sequence=1, block=., peer=1", "hang: not over|threads wait at barriers"


@both
@pytest.mark.parametrize("name", LEAVES)
def test_a_thread_that_gives_up_in_a_row_leaves_with_its_group(builds: Builds, name: str, algorithm: str) -> None:
    laps, mistakes = LEAVES[name]
    shapes, changes = [(6 if algorithm == "two_shot" else 2, ROW)], [SILENT, *mistakes]
    with pytest.raises(RunFailedError, match=HANGS if mistakes else NAMED):
        run_norms(builds, algorithm, shapes, laps, changes=changes, limit_s=8)


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
            run_norms(builds, "two_shot", [(6, ROW)], laps, changes=changes, limit_s=8)


def test_which_rows_one_kernel_normalises() -> None:
    for nbytes, shards, fewest in (
        (4104, 1, inf),
        (4104, 2, inf),
        (8 * 4096, 1, 1),
        (8 * 4096 + 16, 1, 128),
        (16, 2, 255),
        (8 * 4096 + 16, 3, 382),
    ):
        assert fewest_rows(nbytes, 128, shards) == fewest
    for count, nbytes, size, fan_out, blocks, workers, steps in (
        (1, 16, 2, False, 1, 256, 1),
        (128, 4096, 2, False, 128, 256, 1),
        (129, 4112, 2, False, 128, 512, 2),
        (129, 4112, 2, True, 128, 256, 4),
        (129, 4112, 3, False, 128, 256, 4),
        (1000, 32768, 2, False, 128, 512, 32),
        (128, 65536, 2, False, 128, 256, 16),
    ):
        geometry = row_geometry(count, nbytes, 128, size, fan_out=fan_out)
        assert (geometry.threads.blocks, geometry.threads.workers, geometry.steps) == (blocks, workers, steps)
        assert geometry.nbytes == steps * blocks * workers * 16
