"""Packets that tell whether they have come, with LL flags and without, and quantized packets."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol
from mpicomm.collectives.wire import Wire
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import SENTINELS, dtype_named
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import BOTH, Calls, QuantizedCalls, elements_of_step, play, random_counts
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Array, Machine, RunFailedError, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import SMALL, STARTS, packet_rig

_STEP_NBYTES = SMALL.threads * 16


def run_uneven(
    builds: Builds,
    size: int = 3,
    laps: int = 6,
    *,
    moves_only: bool = False,
    seed: int = 0,
    changes: Changes = (),
    timeout_s: float | None = None,
) -> None:
    """Calls that use inboxes again, between two ranks; one of them sends more than the other, or only it sends.

    With ``moves_only`` there are fewer kernels to compile.
    """
    machine, inbox_nbytes = Machine(builds, size), laps * _STEP_NBYTES
    rig = packet_rig(machine, inbox_nbytes=inbox_nbytes, changes=changes, timeout_s=timeout_s)
    rng = np.random.default_rng((size, seed))
    calls = Calls(rig, rng, nap_us=1000)
    lengths = (0, 5, _STEP_NBYTES - 1, inbox_nbytes, inbox_nbytes + 1, 2 * inbox_nbytes + 100, 5 * inbox_nbytes - 7)
    checks = []
    for turn in range(3):
        checks += [calls.alltoallv(random_counts(rng, size, lengths)) for _ in range(3)]
        checks.append(calls.bcast(20_000 + turn))
        if not moves_only:
            checks.append(calls.scan("float32", "sum", 5000 + turn))
            counts = [int(length) // 4 for length in rng.choice(lengths, size)]
            checks.append(calls.reduce_scatter("float32", "sum", counts))
    machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


@pytest.mark.parametrize(("size", "laps"), [(2, 7), (3, 6), (4, 10)])
def test_one_rank_sends_more_than_the_other(builds: Builds, size: int, laps: int) -> None:
    run_uneven(builds, size, laps)


def run_long(
    builds: Builds,
    protocol: Protocol,
    batches: int = 2,
    *,
    kinds: Sequence[str] = ("short", "long", "relayed", "moves"),
    seed: int = 0,
    changes: Changes = (),
    timeout_s: float | None = None,
) -> None:
    """Hundreds of small reductions between three ranks, from launch ``seed`` on.

    If all send to all, packets keep the ranks in step; in scans the first rank takes none. Each of the ``kinds`` of
    calls takes one or two kernels. All kinds but the short one are several times as long as inboxes of sentinels.
    """
    rng = np.random.default_rng(seed)
    machine = Machine(builds, 3)
    rig = packet_rig(machine, protocol, changes=changes, timeout_s=timeout_s)
    rig.start_at(seed)
    if protocol == "ll" and seed > 0:  # the round of numbers ends soon, and inboxes are wiped
        rig.fill_with_old_flags(rng)
    calls = Calls(rig, rng, nap_us=1000)
    for batch in range(batches):
        machine.clear()
        checks = []
        if "short" in kinds:
            checks += [calls.allreduce("float32", "sum", int(count)) for count in rng.integers(1, 600, 150)]
            checks += [calls.scan("float32", "sum", int(count)) for count in rng.integers(1, 600, 50)]
        if protocol != "ll":
            ways = zip(("long", "relayed"), BOTH, strict=True)
            checks += [calls.allreduce("float32", "sum", 5000, way) for kind, way in ways if kind in kinds]
            if "moves" in kinds:
                checks += [calls.allgather(12000), calls.bcast(20000, "two_shot"), calls.allgather(12000)]
        machine.run(checks, seed=batch, jitter_us=(300, 0)[batch % 2], limit_s=30)


def run_both_stages(builds: Builds, *, seed: int = 0, changes: Changes = ()) -> None:
    """Calls with one inbox for each source share memory with calls that have two."""
    rig = packet_rig(Machine(builds, 3), in_one_stage=True, changes=changes, timeout_s=2 if changes else None)
    calls = Calls(rig, np.random.default_rng(3), nap_us=1000)
    checks = []
    for count in (1, 600, 5000, 12000) * 6:
        checks += [calls.allreduce("float32", "sum", count, way) for way in (*BOTH, "one_shot", "one_shot")]
        checks.append(calls.bcast(4 * count, "two_shot"))
    rig.machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


def test_calls_with_one_stage_and_with_two_share_inboxes(builds: Builds) -> None:
    run_both_stages(builds)


PROTOCOLS: list[Protocol] = ["ll", "sentinel"]


# Only flags have 30 bits of a number.
@pytest.mark.parametrize(("protocol", "start"), [*(("ll", start) for start in STARTS), ("sentinel", "2^32")])
def test_hundreds_of_launches_while_numbers_begin_again(builds: Builds, protocol: Protocol, start: str) -> None:
    run_long(builds, protocol, seed=STARTS[start])


def run_reductions(
    builds: Builds, reduction: tuple[str, str], ways: Sequence[str] = BOTH, *, seed: int = 1, changes: Changes = ()
) -> None:
    """All-reduces in one hop and in two."""
    rig = packet_rig(Machine(builds, 3), changes=changes)
    calls = Calls(rig, np.random.default_rng(seed))
    checks = [calls.allreduce(*reduction, 5 if way == "one_shot" else 3001, way) for way in ways]
    rig.machine.run(checks, jitter_us=100)


class SentinelCalls(Calls):
    """Calls whose words all need escapes."""

    def _bytes(self, nbytes: int) -> Array:
        return self._rng.choice(SENTINELS, -(-nbytes // 4)).astype(np.uint32).view(np.uint8)[:nbytes]


def run_escapes(builds: Builds, sizes: Sequence[int] = (64, 20_000), *, seed: int = 3, changes: Changes = ()) -> None:
    """Movements of only words that need escapes."""
    rig = packet_rig(Machine(builds, 3), changes=changes)
    calls = SentinelCalls(rig, np.random.default_rng(seed), nap_us=1000)
    checks = []
    for nbytes in (*sizes,) * 3:
        checks += [calls.bcast(nbytes, "two_shot"), calls.allgather(nbytes)]
    rig.machine.run(checks, jitter_us=100)


def test_all_words_of_the_data_need_escapes(builds: Builds) -> None:
    run_escapes(builds)


def test_a_rank_that_gives_up_keeps_the_earlier_report_of_another(builds: Builds) -> None:
    machine = Machine(builds, 3)
    rig = packet_rig(machine, "ll")
    told = [arena.bytes[:8].view(np.uint64) for arena in rig.arenas]
    told[2][0] = mismatch = 3 << 56 | 11 << 32 | 1
    machine.failed[0].view(np.uint32)[0] = 1  # a wait of an earlier kernel of rank 0 has failed
    source, target = machine.allocate(0, 8), machine.allocate(0, 8)
    exchanges = patterns.allreduce(0, 3, np.dtype(np.float32), Span(source.address, 2), Span(target.address, 2), "sum")
    rig.run(0, exchanges)
    with contextlib.suppress(RunFailedError):  # a late block reads the report of another block
        machine.run()
    assert told[1][0] >> 56 == 2
    assert told[2][0] == mismatch


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_race(watched_builds: Builds, protocol: Protocol) -> None:
    run_long(watched_builds, protocol, 1)


def test_no_race_between_ranks_that_send_unevenly(watched_builds: Builds) -> None:
    run_uneven(watched_builds)


SOURCE, WORKER = "packets.cu", "packet_worker.cuh"
ONE_SET = Change(WORKER, "((launch % 2) * x.stages + stage)", "(stage)")
SHORT = ("short",)
MISTAKES = {
    "one set of inboxes": ("ll", SHORT, ONE_SET),
    "one set of inboxes of sentinels": ("sentinel", SHORT, ONE_SET),
    "no wait for the last launch": ("ll", SHORT, Change(SOURCE, "ok = await_ranks(team, launch, absent);", "")),
    "old flags not wiped": ("ll", SHORT, Change("ll_protocol.cuh", "wipe_flags(inboxes, launch);", ";")),
    "sentinels not put back": (
        "sentinel",
        ("long",),
        Change("sentinels.cuh", "store_volatile(slot, {absent, absent});", "(void)slot;"),
    ),
    "a source that goes on before the relays": (
        "sentinel",
        ("moves",),
        Change(SOURCE, "has_c ? worker", "has_c && (!kRelays || x.sources != 0) ? worker"),
    ),
}
ESCAPES = {
    "not put back": Change(WORKER, "store_volatile(escape, 0);", ""),
    "looked at once": Change(WORKER, "return code == 0 ? 1u << rank : 0u;", "return 0u;"),
    "left out": Change("sentinels.cuh", "return kEscapes && (is_special", "return kEscapes && false && (is_special"),
}
NANS = {
    "a number changed with them": Change("sentinels.cuh", "kSign = 1ull << 63", "kSign = 1ull << 32"),
    "sent as they are": Change("sentinels.cuh", "packet.second ^= kSign;\n    return", ";\n    return"),
}
PACES = {
    "not said": Change(SOURCE, "worker.pace(a_at, a_slot);", ";"),
    "not heard": Change(SOURCE, "b_ranks |= m.paced", "b_ranks |= 0"),
    "a third as often": Change(SOURCE, "return sum_of_both(x) - slack_of(x);", "return 2 * sum_of_both(x);"),
}
FENCES = {
    "not waited for": [*LATE, Change(SOURCE, "fences.await(thread, turn - slack_of(x));", "")],
    "a turn too seldom": [
        *LATE,
        Change(SOURCE, "return sum_of_both(x) - slack_of(x);", "return sum_of_both(x) + 1 - slack_of(x);"),
    ],
    "asked for too soon": [
        *LATE,
        Change(
            SOURCE,
            "(turn + slack_of(x) == paces_at) {\n        fences.publish(thread, turn);",
            "(turn + slack_of(x) + 1 == paces_at) {\n        fences.publish(thread, turn + 1);",
        ),
    ],
}
OF_TWO_HOPS = {name: ("sentinel", FENCES[name]) for name in ("not waited for", "a turn too seldom")}
NO_BARRIER = {"barrier": ("ll", 1, Change(SOURCE, "if (!__syncthreads_and(ok)) return;", "if (!ok) return;"))}


def run_to_the_end_of_a_round(
    builds: Builds, protocol: Protocol, kinds: Sequence[str], *, seed: int, changes: Changes
) -> None:
    run_long(builds, protocol, 4, kinds=kinds, seed=2**30 - 1, changes=changes)


test_mistake_is_seen = controls(run_to_the_end_of_a_round, MISTAKES)
test_mistake_with_escapes_is_seen = controls(partial(run_escapes, sizes=(64,)), ESCAPES)
test_mistake_with_nan_is_seen = controls(
    partial(run_reductions, reduction=("float16", "prod"), ways=("two_shot",)), NANS
)
test_mistake_with_ranks_that_send_unevenly_is_seen = controls(partial(run_uneven, moves_only=True), PACES)
test_mistake_with_fences_is_seen = controls(partial(run_uneven, laps=7, moves_only=True), FENCES, match=LOST)
test_mistake_with_fences_in_two_hops_is_seen = controls(
    partial(run_long, kinds=("relayed", "moves")), OF_TWO_HOPS, match=LOST
)
test_mistake_with_both_stages_is_seen = controls(
    run_both_stages,
    {"one set for one stage": Change(WORKER, "(launch % 2) * x.stages", "(launch % 2) * 2 * (x.stages - 1)")},
)
test_race_is_seen = controls(partial(run_long), NO_BARRIER, watched=True)


def test_what_is_put_back_may_arrive_as_late_as_the_next_fence(builds: Builds) -> None:
    two_hops, uneven = without_mistake(OF_TWO_HOPS), without_mistake(FENCES)
    run_long(builds, "sentinel", kinds=("long", "relayed", "moves"), changes=two_hops, timeout_s=20)
    for laps in (6, 7):
        run_uneven(builds, 3, laps, moves_only=True, changes=uneven, timeout_s=20)


# Packets that carry quantized elements.

STEP = elements_of_step(2)
BOTH_WAYS = "allreduce:two_shot allreduce"


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
    """Quantized calls, with inboxes of ``laps`` steps. The compiler takes most of the time."""
    step = elements_of_step(size)
    rig = packet_rig(Machine(builds, size), inbox_nbytes=laps * step, changes=changes)
    sizes = [count * dtype_named(dtype).itemsize for count in counts or counts_of(step)]
    of = partial(QuantizedCalls, wire=wire, dtype=dtype)
    play(rig, kinds, sizes, reduction=(dtype, op), seed=seed, of=of, nap_us=500, limit_s=limit_s)


@pytest.mark.parametrize(
    ("size", "wire", "dtype", "op", "kinds"),
    [
        (2, Wire("float8_e4m3fn"), "bfloat16", "sum", BOTH_WAYS),
        (3, Wire("int8"), "float32", "avg", "allreduce:two_shot allgather"),
        (2, Wire("int8", quantizes_result=False), "float16", "avg", "allreduce"),
        (4, Wire("float8_e4m3fn"), "float32", "sum", "reduce_scatter"),
    ],
    ids=str,
)
def test_results_have_the_bits_of_the_host(
    builds: Builds, size: int, wire: Wire, dtype: str, op: str, kinds: str
) -> None:
    run_all(builds, size, wire, dtype, kinds, op=op)


INT8 = Wire("int8")


def test_no_race_if_quantized(watched_builds: Builds) -> None:
    run_all(watched_builds, 2, INT8, "bfloat16", "allreduce:two_shot", counts=(129, 8 * STEP + 77))
    run_all(watched_builds, 2, INT8, "bfloat16", "allreduce allgather", counts=(8 * STEP + 77,))


LAPS = (9 * STEP, 8 * STEP + 77, 30 * STEP)
"""Counts for which inboxes of six or seven steps are used again, also after two shots between two ranks."""


# Threads of a warp wait for each other in each turn, so the overseer has to be later for a mistake to be seen.
LATER = [Change(late.file, late.old, late.new.replace("turn < 20;", "turn < 600;")) for late in LATE]


SCALES = "scales.cuh"
WITH_SCALES = {
    "not put back": Change(
        SCALES,
        "store_volatile(worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), slot_index), 0);",
        "",
    ),
    "put back before all threads have it": Change(
        SCALES, "if (!__all_sync(kWarp, took)) return false;", "if (!took) return false;"
    ),
    "not waited for": Change(SCALES, "if (took && missing() != 0) took = await_ranks", "if (false) took = await_ranks"),
    "of one thread": Change(
        "wire_quantization.cuh", "distance < kThreadsOfBlock; distance *= 2", "distance < 2; distance *= 2"
    ),
}


run_mistake = partial(run_all, size=2, wire=INT8, dtype="bfloat16", limit_s=20, kinds="allreduce:two_shot")
test_mistake_with_scales_is_seen = controls(partial(run_mistake, counts=(300, *LAPS)), WITH_SCALES)
NO_FENCE = {"fence": [*LATER, Change(SOURCE, "fences.await(thread, turn - slack_of(x));", "")]}
test_fence_that_is_not_waited_for_is_seen = controls(
    partial(run_mistake, counts=LAPS[2:], laps=7), NO_FENCE, match=LOST
)


def test_scales_may_be_put_back_as_late_as_the_next_fence(builds: Builds) -> None:
    run_all(builds, 2, INT8, "bfloat16", BOTH_WAYS, counts=LAPS[:2], laps=7, changes=without_mistake(NO_FENCE))
