"""Packets that carry codes of 8 bits: the bits of the host's arithmetic, on all ranks; mistakes are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.arguments import CODES_OF_PACKET, parts_of
from mpicomm.collectives.wire import BLOCK, Wire
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.coded import coded_sum, through_codes
from tests.helpers.references.reductions import Array, dtype_named
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import BOTH, Calls, Check
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Machine, Place, RunFailedError, controls
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import SMALL, Rig, packet_rig

FEWEST_LAPS = 6


def elements_of_step(size: int) -> int:
    """Return the elements of a step between ``size`` ranks, and the bytes of its codes."""
    return SMALL.threads * CODES_OF_PACKET * parts_of(size, one_step=False)


STEP = elements_of_step(2)


def numbers(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Return numbers of all magnitudes, some of them zero; some blocks have NaNs or infinities."""
    values = rng.standard_normal(count) * np.exp2(rng.uniform(-12, 12, -(-count // 50)).repeat(50)[:count])
    values[rng.random(count) < 0.1] = rng.choice([0.0, -0.0])
    with np.errstate(all="ignore"):
        made: Array = values.astype(dtype)
    for _ in range(rng.integers(3)):
        made[rng.integers(count)] = rng.choice([np.nan, -np.inf, np.inf])
    return made


class CodedCalls(Calls):
    """Calls with codes between the ranks of a rig."""

    def __init__(
        self,
        rig: Rig,
        rng: np.random.Generator,
        wire: Wire,
        dtype: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rig, rng, nap_us=500, ranks=ranks)
        self._wire = wire
        self._dtype = dtype_named(dtype)

    def _run(self, rank: int, pattern: Pattern, **more: Any) -> None:
        coded = replace(pattern, buffers=replace(pattern.buffers, whole=BLOCK))
        super()._run(rank, coded, wire=(self._wire, self._dtype))

    def _samples(self, dtype: np.dtype[Any], count: int) -> Array:
        return numbers(dtype, count, self._rng)

    def _bytes(self, nbytes: int) -> Array:
        return numbers(self._dtype, nbytes // self._dtype.itemsize, self._rng).view(np.uint8)

    def _reduced(self, op: str, parts: Sequence[Array], *, shards: bool = False) -> Array:
        return coded_sum(parts, self._wire.codes, op, again=self._wire.again and not shards)

    def _moved(self, part: Array) -> Array:
        return through_codes(part.view(self._dtype), self._wire.codes).astype(self._dtype)

    def _require(self, places: Sequence[Place], expected: Sequence[Array]) -> None:
        for rank, (place, right) in enumerate(zip(places, expected, strict=True)):
            got, said = place.bytes.view(right.dtype), f"{right.size} results differ, first at rank {rank}"
            np.testing.assert_array_equal(got.astype(np.float32), right.astype(np.float32), err_msg=said)
            are_numbers = right.astype(np.float32) == right.astype(np.float32)
            assert (np.signbit(got) == np.signbit(right))[are_numbers].all(), f"zeros: {said}"


def counts_of(step: int) -> tuple[int, ...]:
    """Return counts around the ends of parts, blocks and steps, and a count for which slots are used again."""
    return 1, 15, 16, 127, 128, 129, 1000, step // 2, step - 1, step + 513, 2 * step + 128, 8 * step + 77


def run_all(
    builds: Builds,
    size: int,
    codes: str,
    dtype: str,
    *,
    op: str = "sum",
    counts: Sequence[int] | None = None,
    laps: int = FEWEST_LAPS,
    seed: int = 0,
    changes: Changes = (),
    limit_s: float = 60,
    kinds: Sequence[str],
) -> None:
    """Calls with codes of these ``kinds``, with inboxes of ``laps`` steps. The compiler takes most of the time."""
    machine = Machine(builds, size)
    step = elements_of_step(size)
    rig = packet_rig(machine, inbox_nbytes=laps * step, changes=changes)
    rng = np.random.default_rng([size, seed])
    calls = CodedCalls(rig, rng, Wire(codes), dtype)
    plain = CodedCalls(rig, rng, Wire(codes, again=False), dtype)
    itemsize = dtype_named(dtype).itemsize
    make: dict[str, Callable[[int], Check]] = {
        "two_shot": lambda count: calls.allreduce(dtype, op, count, "two_shot"),
        "one_shot": lambda count: calls.allreduce(dtype, op, count),
        "plain": lambda count: plain.allreduce(dtype, op, count),
        "scatter": lambda count: calls.reduce_scatter(dtype, op, [count] * size),
        "gather": lambda count: calls.allgather(count * itemsize),
    }
    checks = [make[kind](count) for count in counts or counts_of(step) for kind in kinds]
    machine.run(checks, seed=seed, jitter_us=300, limit_s=limit_s)


@pytest.mark.parametrize(
    ("size", "codes", "dtype", "op", "kinds"),
    [
        (2, "float8_e4m3fn", "bfloat16", "sum", BOTH),
        (3, "int8", "float32", "avg", ("two_shot", "gather")),
        (2, "int8", "float16", "avg", ("plain",)),
        (4, "float8_e4m3fn", "float32", "sum", ("scatter",)),
    ],
)
def test_results_have_the_bits_of_the_host(
    builds: Builds, size: int, codes: str, dtype: str, op: str, kinds: tuple[str, ...]
) -> None:
    run_all(builds, size, codes, dtype, op=op, kinds=kinds)


def test_no_race(watched_builds: Builds) -> None:
    run_all(watched_builds, 2, "int8", "bfloat16", counts=(129, 8 * STEP + 77), kinds=("two_shot",))
    run_all(watched_builds, 2, "int8", "bfloat16", counts=(8 * STEP + 77,), kinds=("one_shot", "gather"))


def test_a_rank_that_does_not_come_is_missed(builds: Builds) -> None:
    step = elements_of_step(3)
    rig = packet_rig(Machine(builds, 3), inbox_nbytes=FEWEST_LAPS * step, timeout_s=0.3)
    calls = CodedCalls(rig, np.random.default_rng(0), Wire("int8"), "float32", ranks=(0, 1))
    calls.allreduce("float32", "avg", 9 * step, "two_shot")
    with pytest.raises(RunFailedError, match=r"operation=2, sequence=1, block=\d, peer=12"):
        rig.machine.run(limit_s=20)


def test_ranks_with_other_codes_notice_it(builds: Builds) -> None:
    rig = packet_rig(Machine(builds, 2), inbox_nbytes=FEWEST_LAPS * STEP, timeout_s=5)
    for rank, codes in enumerate(("int8", "float8_e4m3fn")):
        calls = CodedCalls(rig, np.random.default_rng(0), Wire(codes), "bfloat16", ranks=[rank])
        calls.allreduce("bfloat16", "sum", 700, "two_shot")
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        rig.machine.run()


LAPS = (9 * STEP, 8 * STEP + 77, 30 * STEP)
"""Counts for which inboxes of six or seven steps are used again, also after two shots between two ranks."""


# Threads of a warp wait for each other in each turn, so the overseer has to be later for a mistake to be seen.
LATER = [Change(late.file, late.old, late.new.replace("turn < 20;", "turn < 600;")) for late in LATE]


def test_scales_may_be_put_back_as_late_as_the_next_fence(builds: Builds) -> None:
    run_all(builds, 2, "int8", "bfloat16", counts=LAPS[:2], laps=7, changes=LATER, kinds=BOTH)


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


run_mistake = partial(run_all, size=2, codes="int8", dtype="bfloat16", limit_s=20, kinds=("two_shot",))
test_mistake_with_scales_is_seen = controls(partial(run_mistake, counts=(300, *LAPS)), MISTAKES)
NO_FENCE = {"fence": [*LATER, Change(SOURCE, "fences.await(thread, turn - slack_of(x));", "")]}
test_fence_that_is_not_waited_for_is_seen = controls(
    partial(run_mistake, counts=LAPS[2:], laps=7), NO_FENCE, match=LOST
)
