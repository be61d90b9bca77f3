"""Packets that carry codes of 8 bits: the bits of the host's arithmetic, on all ranks; mistakes are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives import operations
from mpicomm.collectives.gpu.algorithms.packets.arguments import CODES_OF_PACKET, parts_of
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.signature import Signature
from mpicomm.collectives.wire import BLOCK, Wire
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs.patterns import Pattern, blocks
from tests.helpers.references.coded import coded_sum, through_codes
from tests.helpers.references.reductions import Array, dtype_named
from tests.kernels.build import Builds, Change
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Machine, Place, RunFailedError, require_seen
from tests.kernels.packet_rig import SMALL, PacketRig

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

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


class CodedCalls:
    """Calls with codes between the ranks of a rig."""

    def __init__(self, rig: PacketRig, rng: np.random.Generator, wire: Wire, dtype: str) -> None:
        self._rig = rig
        self._rng = rng
        self._wire = wire
        self._dtype = dtype_named(dtype)
        self._checks: list[tuple[str, list[Place], list[Array]]] = []

    def allreduce(self, count: int, op: str, *, two_shot: bool) -> None:
        size, dtype = self._rig.size, self._dtype
        parts = [numbers(dtype, count, self._rng) for _ in range(size)]
        sources = [self._place(rank, part) for rank, part in enumerate(parts)]
        in_place = bool(self._rng.integers(2))
        targets = sources if in_place else [self._place(rank, np.zeros_like(part)) for rank, part in enumerate(parts)]
        for rank in range(size):
            send, output = Span(sources[rank].address, count), Span(targets[rank].address, count)
            buffers = Buffers(rank, size, dtype, send=send, output=output, op=op, whole=BLOCK)
            self._run(rank, operations.ALLREDUCE, buffers, "two_shot" if two_shot else "one_shot", op)
        expected = coded_sum(parts, self._wire.codes, op, again=self._wire.again)
        self._checks.append((f"allreduce of {count}", targets, [expected] * size))

    def reduce_scatter(self, count: int, op: str) -> None:
        size, dtype = self._rig.size, self._dtype
        parts = [[numbers(dtype, count, self._rng) for _ in range(size)] for _ in range(size)]
        targets = [self._place(rank, np.zeros(count, dtype)) for rank in range(size)]
        for rank in range(size):
            source = self._place(rank, np.concatenate(parts[rank]))
            sends = blocks(source.address, [count] * size, [each * count for each in range(size)], dtype.itemsize)
            buffers = Buffers(
                rank, size, dtype, send_blocks=sends, output=Span(targets[rank].address, count), op=op, whole=BLOCK
            )
            self._run(rank, operations.REDUCE_SCATTER_BLOCK, buffers, "one_shot", op)
        expected = [
            coded_sum([parts[rank][block] for rank in range(size)], self._wire.codes, op, again=False)
            for block in range(size)
        ]
        self._checks.append((f"reduce_scatter of {count}", targets, expected))

    def allgather(self, count: int) -> None:
        size, dtype = self._rig.size, self._dtype
        parts = [numbers(dtype, count, self._rng) for _ in range(size)]
        nbytes, targets = count * dtype.itemsize, []
        for rank, part in enumerate(parts):
            target = self._place(rank, np.zeros(count * size, dtype))
            received = blocks(target.address, [nbytes] * size, [each * nbytes for each in range(size)], 1)
            if self._rng.integers(2):
                target.bytes[rank * nbytes : (rank + 1) * nbytes] = part.view(np.uint8)
                send = received[rank]
            else:
                send = Span(self._place(rank, part).address, nbytes)
            buffers = Buffers(rank, size, np.dtype(np.uint8), send=send, blocks=received, whole=BLOCK)
            self._run(rank, operations.ALLGATHER, buffers, "one_shot", None)
            targets.append(target)
        expected = np.concatenate([through_codes(part, self._wire.codes).astype(dtype) for part in parts])
        self._checks.append((f"allgather of {count}", targets, [expected] * size))

    def check(self) -> None:
        for words, targets, expected in self._checks:
            for rank, (target, right) in enumerate(zip(targets, expected, strict=True)):
                got = target.bytes.view(right.dtype)
                np.testing.assert_array_equal(
                    got.astype(np.float32),
                    right.astype(np.float32),
                    err_msg=f"{words}: results differ, first at rank {rank}",
                )
                numbers_of = right.astype(np.float32) == right.astype(np.float32)
                assert (np.signbit(got) == np.signbit(right))[numbers_of].all(), f"{words}: zeros differ, first at "

    def _run(self, rank: int, operation: Operation, buffers: Buffers, algorithm: str, op: str | None) -> None:
        signature = Signature(operation.name, self._dtype.name, None, op, wire_dtype=str(self._wire))
        pattern = Pattern(operation, buffers, algorithm)
        self._rig.run(rank, pattern, signature, nap_us=int(self._rng.integers(500)), wire=(self._wire, self._dtype))

    def _place(self, rank: int, content: Array) -> Place:
        offset = int(self._rng.choice([0, content.dtype.itemsize, 16]))
        return self._rig.machine.place(rank, content, offset=offset)


def counts_of(step: int) -> tuple[int, ...]:
    """Return counts around the ends of parts, blocks and steps, and a count for which slots are used again."""
    return 1, 15, 16, 127, 128, 129, 1000, step // 2, step - 1, step + 513, 2 * step + 128, 8 * step + 77


BOTH = ("two_shot", "one_shot")
ALL = (*BOTH, "plain", "scatter", "gather")


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
    changes: Sequence[Change] = (),
    limit_s: float = 60,
    kinds: Sequence[str] = ALL,
) -> None:
    """Calls with codes of these ``kinds``, with inboxes of ``laps`` steps. The compiler takes most of the time."""
    machine = Machine(builds, size)
    step = elements_of_step(size)
    rig = PacketRig(machine, inbox_nbytes=laps * step, changes=changes, timeout_s=2)
    rng = np.random.default_rng([size, seed])
    calls = CodedCalls(rig, rng, Wire(codes), dtype)
    plain = CodedCalls(rig, rng, Wire(codes, again=False), dtype)
    make: dict[str, Callable[[int], None]] = {
        "two_shot": partial(calls.allreduce, op=op, two_shot=True),
        "one_shot": partial(calls.allreduce, op=op, two_shot=False),
        "plain": partial(plain.allreduce, op=op, two_shot=False),
        "scatter": partial(calls.reduce_scatter, op=op),
        "gather": calls.allgather,
    }
    for count in counts or counts_of(step):
        for kind in kinds:
            make[kind](count)
    machine.run(seed=seed, jitter_us=300, limit_s=limit_s)
    calls.check()
    plain.check()


@pytest.mark.parametrize(
    ("size", "codes", "dtype", "op", "kinds"),
    [
        (2, "float8_e4m3fn", "bfloat16", "sum", ALL),
        (3, "int8", "float32", "avg", ALL),
        (2, "int8", "float16", "avg", BOTH),
        (4, "float8_e4m3fn", "float32", "sum", BOTH),
    ],
)
def test_results_have_the_bits_of_the_host(
    builds: Builds, size: int, codes: str, dtype: str, op: str, kinds: tuple[str, ...]
) -> None:
    run_all(builds, size, codes, dtype, op=op, kinds=kinds)


def test_no_race(watched_builds: Builds) -> None:
    run_all(watched_builds, 2, "int8", "bfloat16", counts=(129, 8 * STEP + 77), kinds=(*BOTH, "gather"))


def test_a_rank_that_does_not_come_is_missed(builds: Builds) -> None:
    machine = Machine(builds, 3)
    step = elements_of_step(3)
    rig = PacketRig(machine, inbox_nbytes=FEWEST_LAPS * step, timeout_s=0.3)
    dtype, count = np.dtype(np.float32), 9 * step
    for rank in range(2):
        source = machine.allocate(rank, 4 * count)
        span = Span(source.address, count)
        buffers = Buffers(rank, 3, dtype, send=span, output=span, op="sum", whole=BLOCK)
        signature = Signature("Allreduce", "float32", count, "sum", wire_dtype="int8")
        rig.run(rank, Pattern(operations.ALLREDUCE, buffers, "two_shot"), signature, wire=(Wire("int8"), dtype))
    with pytest.raises(RunFailedError, match=r"operation=2, sequence=1, block=\d, peer=12"):
        machine.run(limit_s=20)


def test_ranks_with_other_codes_notice_it(builds: Builds) -> None:
    machine = Machine(builds, 2)
    rig = PacketRig(machine, inbox_nbytes=FEWEST_LAPS * STEP, timeout_s=5)
    dtype, count = np.dtype(np.float32), 700
    for rank, codes in enumerate(("int8", "float8_e4m3fn")):
        span = Span(machine.allocate(rank, 4 * count).address, count)
        buffers = Buffers(rank, 2, dtype, send=span, output=span, op="sum", whole=BLOCK)
        signature = Signature("Allreduce", "float32", count, "sum", wire_dtype=codes)
        rig.run(rank, Pattern(operations.ALLREDUCE, buffers, "two_shot"), signature, wire=(Wire(codes), dtype))
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        machine.run()


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


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_with_scales_is_seen(builds: Builds, name: str) -> None:
    require_seen(
        lambda seed: run_all(
            builds,
            2,
            "int8",
            "bfloat16",
            counts=(300, *LAPS),
            seed=seed,
            changes=[MISTAKES[name]],
            limit_s=20,
            kinds=("two_shot",),
        )
    )


def test_fence_that_is_not_waited_for_is_seen(builds: Builds) -> None:
    mistake = Change(SOURCE, "fences.await(thread, turn - slack_of(x));", "")
    require_seen(
        lambda seed: run_all(
            builds,
            2,
            "int8",
            "bfloat16",
            counts=LAPS[2:],
            laps=7,
            kinds=("two_shot",),
            seed=seed,
            changes=[*LATER, mistake],
            limit_s=20,
        ),
        match=LOST,
    )
