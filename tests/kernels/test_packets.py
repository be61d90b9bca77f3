"""Packets that tell whether they have come, with LL flags and without: between processes, and under ThreadSanitizer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol, carried_nbytes
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import SENTINELS
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import BOTH, Calls, random_counts, sizes_around
from tests.kernels.late_resets import LATE, LOST
from tests.kernels.machine import Array, Machine, RunFailedError, controls
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import INBOX_NBYTES, SMALL, STARTS, packet_rig

_STEP_NBYTES = SMALL.threads * 16


# Each number of ranks is another kernel; the next test has the others of them.
@pytest.mark.parametrize(("protocol", "size"), [("flagged", 4), ("sentinel", 3)])
def test_every_size_at_which_something_changes(builds: Builds, protocol: Protocol, size: int) -> None:
    rig = packet_rig(Machine(builds, size), protocol)
    calls = Calls(rig, np.random.default_rng(size), nap_us=2000)
    room = carried_nbytes(INBOX_NBYTES, protocol)
    most = room - 4 if protocol == "flagged" else INBOX_NBYTES * 4
    limits = [nbytes for nbytes in (8, 16, _STEP_NBYTES // 2, _STEP_NBYTES, INBOX_NBYTES, most) if nbytes <= most]
    checks = []
    for count in sizes_around(*limits, itemsize=4):
        if 0 < count * 4 <= most:
            checks += [calls.allreduce("float32", "sum", count, way) for way in BOTH]
            checks += [calls.reduce("float32", "sum", count, "two_shot", in_place=False)]
            checks += [calls.scan("float32", "sum", count), calls.allgather(4 * count)]
            checks.append(calls.bcast(4 * count - 1, "two_shot"))
    rig.machine.run(checks, seed=size, jitter_us=300)


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
    if protocol == "flagged" and seed > 0:  # the round of numbers ends soon, and inboxes are wiped
        rig.fill_with_old_flags(rng)
    calls = Calls(rig, rng, nap_us=1000)
    for batch in range(batches):
        machine.clear()
        checks = []
        if "short" in kinds:
            checks += [calls.allreduce("float32", "sum", int(count)) for count in rng.integers(1, 600, 150)]
            checks += [calls.scan("float32", "sum", int(count)) for count in rng.integers(1, 600, 50)]
        if protocol != "flagged":
            ways = zip(("long", "relayed"), BOTH, strict=True)
            checks += [calls.allreduce("float32", "sum", 5000, way) for kind, way in ways if kind in kinds]
            if "moves" in kinds:
                checks += [calls.allgather(12000), calls.bcast(20000, "two_shot"), calls.allgather(12000)]
        machine.run(checks, seed=batch, jitter_us=(300, 0)[batch % 2], limit_s=30)


def run_both_stages(builds: Builds, *, seed: int = 0, changes: Changes = ()) -> None:
    """Calls with one inbox for each source share memory with calls that have two."""
    rig = packet_rig(Machine(builds, 3), in_one_stage=True, changes=changes, timeout_s=10 if changes else None)
    calls = Calls(rig, np.random.default_rng(3), nap_us=1000)
    checks = []
    for count in (1, 600, 5000, 12000) * 6:
        checks += [calls.allreduce("float32", "sum", count, way) for way in (*BOTH, "one_shot", "one_shot")]
        checks.append(calls.bcast(4 * count, "two_shot"))
    rig.machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


def test_calls_with_one_stage_and_with_two_share_inboxes(builds: Builds) -> None:
    run_both_stages(builds)


PROTOCOLS: list[Protocol] = ["flagged", "sentinel"]


# Only flags have 30 bits of a number.
@pytest.mark.parametrize(("protocol", "start"), [*(("flagged", start) for start in STARTS), ("sentinel", "2^32")])
def test_hundreds_of_launches_while_numbers_begin_again(builds: Builds, protocol: Protocol, start: str) -> None:
    run_long(builds, protocol, seed=STARTS[start])


def run_reductions(
    builds: Builds,
    reduction: tuple[str, str],
    ways: Sequence[str] = BOTH,
    *,
    seed: int = 1,
    changes: Changes = (),
) -> None:
    """All-reduces in one hop and in two."""
    rig = packet_rig(Machine(builds, 3), changes=changes)
    calls = Calls(rig, np.random.default_rng(seed))
    checks = [calls.allreduce(*reduction, 5 if way == "one_shot" else 3001, way) for way in ways]
    rig.machine.run(checks, jitter_us=100)


TYPES = (
    *(("float8_e4m3fn", "max"), ("bfloat16", "avg"), ("float32", "min"), ("complex64", "sum"), ("complex128", "sum")),
    *(("int16", "sum"), ("float16", "a * 2 - b"), ("int64", "a * 2 - b")),
)


@pytest.mark.parametrize(("reduction", "way"), [*zip(TYPES, itertools.cycle(BOTH), strict=False)], ids=str)
def test_types_of_every_width(builds: Builds, reduction: tuple[str, str], way: str) -> None:
    run_reductions(builds, reduction, [way])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bytes_are_moved(builds: Builds, protocol: Protocol) -> None:
    rig = packet_rig(Machine(builds, 4), protocol)
    calls = Calls(rig, np.random.default_rng(4))
    for nbytes in (1, 8, 100, 2000):
        checks = [calls.bcast(nbytes), calls.bcast(nbytes, "two_shot"), calls.allgather(nbytes)]
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


def test_five_ranks_with_no_more_than_six_steps_of_room(builds: Builds) -> None:
    rig = packet_rig(Machine(builds, 5))
    calls = Calls(rig, np.random.default_rng(5), nap_us=1000)
    checks = [calls.allreduce("int32", "sum", 3001, way) for way in BOTH]
    checks.append(calls.reduce_scatter("int32", "sum", [3001] * rig.size, in_place=True))
    checks += [calls.allgather(9001), calls.bcast(30001, "two_shot"), calls.allgather(9001)]
    rig.machine.run(checks, seed=5, jitter_us=300)


def test_a_rank_that_does_not_come_is_missed(builds: Builds) -> None:
    rig = packet_rig(Machine(builds, 3), timeout_s=0.3)
    Calls(rig, np.random.default_rng(0), ranks=(0, 1)).allreduce("float32", "sum", 700)
    with pytest.raises(RunFailedError, match=r"operation=2, sequence=1, block=\d, peer=12"):
        rig.machine.run(limit_s=20)


def test_a_rank_with_nothing_to_take_learns_in_the_next_launch_that_others_were_in_another_call(builds: Builds) -> None:
    machine, size = Machine(builds, 3), 3
    rig = packet_rig(machine, "flagged")
    for rank in range(size):
        root = min(rank, 1)  # rank 2 takes from rank 1, which agrees with it; no rank takes from rank 0
        buffer = Span(machine.allocate(rank, 8).address, 8)
        exchanges = patterns.bcast(rank, size, np.dtype(np.uint8), buffer, root)
        rig.run(rank, exchanges)
    machine.run()
    Calls(rig, np.random.default_rng(0)).allreduce("float32", "sum", 100)
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        machine.run()


@pytest.mark.parametrize("expected", [0, 99, 101])
def test_two_ranks_that_disagree_on_what_one_sends_notice(builds: Builds, expected: int) -> None:
    machine = Machine(builds, 3)
    rig = packet_rig(machine, timeout_s=5)
    nothing = [Span(0, 0)] * 3
    sent, taken = (Span(machine.allocate(rank, nbytes).address, nbytes) for rank, nbytes in ((0, 100), (1, expected)))
    sends = [[nothing[0], sent, Span(sent.pointer, 5)], nothing, nothing]
    receives = [nothing, [taken, *nothing[1:]], [Span(machine.allocate(2, 5).address, 5), *nothing[1:]]]
    for rank in range(3):
        exchanges = patterns.alltoall(rank, 3, np.dtype(np.uint8), sends[rank], receives[rank])
        rig.run(rank, exchanges)
    if expected == 0:  # no rank waits
        machine.run()
        Calls(rig, np.random.default_rng(0)).allreduce("float32", "sum", 100)
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        machine.run()


def test_two_ranks_that_cut_the_same_bytes_differently_notice(builds: Builds) -> None:
    machine = Machine(builds, 2)
    rig = packet_rig(machine, timeout_s=5)
    for rank, cut in ((0, (0, 7)), (1, (8, 0))):
        own, other = ([Span(machine.allocate(rank, 100).address, 100), Span(0, 0)][:: 1 - 2 * rank] for _ in range(2))
        exchanges = patterns.alltoall(rank, 2, np.dtype(np.uint8), own[::-1], other[::-1], cuts=[cut, cut])
        rig.run(rank, exchanges)
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        machine.run()


def test_a_rank_that_gives_up_keeps_the_earlier_report_of_another(builds: Builds) -> None:
    machine = Machine(builds, 3)
    rig = packet_rig(machine, "flagged")
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


def test_what_is_put_back_may_arrive_as_late_as_the_next_fence(builds: Builds) -> None:
    run_long(builds, "sentinel", changes=LATE, timeout_s=20)
    for laps in (6, 7):
        run_uneven(builds, 3, laps, changes=LATE, timeout_s=20)


SOURCE, WORKER = "packets.cu", "packet_worker.cuh"
ONE_SET = Change(WORKER, "((launch % 2) * x.stages + stage)", "(stage)")
SHORT = ("short",)
MISTAKES = {
    "one set of inboxes": ("flagged", SHORT, ONE_SET),
    "one set of inboxes of sentinels": ("sentinel", SHORT, ONE_SET),
    "no wait for the last launch": ("flagged", SHORT, Change(SOURCE, "ok = await_ranks(team, launch, absent);", "")),
    "old flags not wiped": ("flagged", SHORT, Change("ll_flags.cuh", "wipe_flags(inboxes, launch);", ";")),
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
    "not said": Change(SOURCE, "worker.pace(a_at, a_place);", ";"),
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
            "(turn + slack_of(x) == paces_at) {\n        fences.say(thread, turn);",
            "(turn + slack_of(x) + 1 == paces_at) {\n        fences.say(thread, turn + 1);",
        ),
    ],
}
OF_TWO_HOPS = {name: ("sentinel", FENCES[name]) for name in ("not waited for", "a turn too seldom")}
NO_BARRIER = {"barrier": ("flagged", 1, Change(SOURCE, "if (!__syncthreads_and(ok)) return;", "if (!ok) return;"))}


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
