"""Packets that carry codes of 8 bits: the bits of the host's arithmetic, on all ranks; mistakes are found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from mpicomm.collectives.wire import Wire
from tests.helpers.references.reductions import dtype_named
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import CodedCalls, elements_of_step, play
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Machine, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import packet_rig

STEP = elements_of_step(2)
BOTH = "allreduce:two_shot allreduce"


def counts_of(step: int) -> tuple[int, ...]:
    """Return counts around the ends of parts, blocks and steps, and a count for which slots are used again."""
    return 1, 15, 16, 127, 128, 129, 1000, step // 2, step - 1, step + 513, 2 * step + 128, 8 * step + 77


def run_all(
    builds: Builds,
    size: int,
    wire: Wire,
    dtype: str,
    kinds: str,
    *,
    op: str = "sum",
    counts: Sequence[int] | None = None,
    laps: int = 6,
    seed: int = 0,
    changes: Changes = (),
    limit_s: float = 60,
) -> None:
    """Calls with codes, with inboxes of ``laps`` steps. The compiler takes most of the time."""
    step = elements_of_step(size)
    rig = packet_rig(Machine(builds, size), inbox_nbytes=laps * step, changes=changes)
    sizes = [count * dtype_named(dtype).itemsize for count in counts or counts_of(step)]
    of = partial(CodedCalls, wire=wire, dtype=dtype)
    play(rig, kinds, sizes, reduction=(dtype, op), seed=seed, of=of, nap_us=500, limit_s=limit_s)


@pytest.mark.parametrize(
    ("size", "wire", "dtype", "op", "kinds"),
    [
        (2, Wire("float8_e4m3fn"), "bfloat16", "sum", BOTH),
        (3, Wire("int8"), "float32", "avg", "allreduce:two_shot allgather"),
        (2, Wire("int8", again=False), "float16", "avg", "allreduce"),
        (4, Wire("float8_e4m3fn"), "float32", "sum", "reduce_scatter"),
    ],
    ids=str,
)
def test_results_have_the_bits_of_the_host(
    builds: Builds, size: int, wire: Wire, dtype: str, op: str, kinds: str
) -> None:
    run_all(builds, size, wire, dtype, kinds, op=op)


INT8 = Wire("int8")


def test_no_race(watched_builds: Builds) -> None:
    run_all(watched_builds, 2, INT8, "bfloat16", "allreduce:two_shot", counts=(129, 8 * STEP + 77))
    run_all(watched_builds, 2, INT8, "bfloat16", "allreduce allgather", counts=(8 * STEP + 77,))


LAPS = (9 * STEP, 8 * STEP + 77, 30 * STEP)
"""Counts for which inboxes of six or seven steps are used again, also after two shots between two ranks."""


# Threads of a warp wait for each other in each turn, so the overseer has to be later for a mistake to be seen.
LATER = [Change(late.file, late.old, late.new.replace("turn < 20;", "turn < 600;")) for late in LATE]


SOURCE, SCALES = "packets.cu", "scales.cuh"
MISTAKES = {
    "not put back": Change(
        SCALES,
        "store_volatile(worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), place), 0);",
        "",
    ),
    "put back before all threads have it": Change(
        SCALES, "if (!__all_sync(kWarp, took)) return false;", "if (!took) return false;"
    ),
    "not waited for": Change(SCALES, "if (took && missing() != 0) took = await_ranks", "if (false) took = await_ranks"),
    "of one thread": Change(
        "eight_bits.cuh", "distance < kThreadsOfBlock; distance *= 2", "distance < 2; distance *= 2"
    ),
}


run_mistake = partial(run_all, size=2, wire=INT8, dtype="bfloat16", limit_s=20, kinds="allreduce:two_shot")
test_mistake_with_scales_is_seen = controls(partial(run_mistake, counts=(300, *LAPS)), MISTAKES)
NO_FENCE = {"fence": [*LATER, Change(SOURCE, "fences.await(thread, turn - slack_of(x));", "")]}
test_fence_that_is_not_waited_for_is_seen = controls(
    partial(run_mistake, counts=LAPS[2:], laps=7), NO_FENCE, match=LOST
)


def test_scales_may_be_put_back_as_late_as_the_next_fence(builds: Builds) -> None:
    run_all(builds, 2, INT8, "bfloat16", BOTH, counts=LAPS[:2], laps=7, changes=without_mistake(NO_FENCE))
