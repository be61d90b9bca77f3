"""Rows of few tokens as packets: heads, late ranks, ranks that die, numbers like empty slots, races, mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpicomm.kernels.team import ABSENT
from tests.helpers.inputs.routings import require_same
from tests.kernels.build import Builds, Change
from tests.kernels.experts_rig import (
    IN_PACKETS,
    ONE_TYPE,
    TYPES,
    ExpertsRig,
    Round,
    play,
    require_fault_everywhere,
    rig_of,
)
from tests.kernels.machine import RunFailedError, controls
from tests.kernels.test_experts import FAILURES, RACES


@pytest.mark.parametrize("tokens", [(70, 70, 70), (70, 0, 33), (1, 64, 65)])
def test_rows_of_many_heads(builds: Builds, tokens: tuple[int, ...]) -> None:
    rig = ExpertsRig(builds, [3, 0, 2], 8, 70, 3, capacity=210, blocks=(2, 4), **IN_PACKETS)
    rounds = [Round(rig, np.random.default_rng(seed), tokens=tokens) for seed in range(3)]
    for each in rounds:
        each.dispatch(range(3))
        each.combine(range(3), np.float32)
    rig.machine.run(seed=1, jitter_us=100)
    for each in rounds:
        each.check()


@pytest.mark.parametrize("late", range(3))
def test_rank_that_is_late_by_calls_gets_all_packets(builds: Builds, late: int) -> None:
    rig = rig_of(builds, 3, blocks=(2, 3), **IN_PACKETS)
    naps = [30_000 if rank == late else 0 for rank in range(3)]
    rounds = [Round(rig, np.random.default_rng(seed)) for seed in range(4)]
    for each, combines in zip(rounds, (0, 2, 1, 3), strict=True):
        each.dispatch(range(3), naps)
        for number in range(combines):
            each.combine(range(3), np.float32, naps, weighted=number != 1)
    rig.machine.run()
    for each in rounds:
        each.check()


UNCHANGED = Change("sentinels.cuh", "!kEscapes && upper(packet.first)", "false && upper(packet.first)")


def test_number_that_looks_like_an_empty_slot_stays_no_number(builds: Builds) -> None:
    ids = np.array([[0, 1], [1, -1], [0, 1]])

    def dispatch(dtype: Any, *changes: Change) -> None:
        rig = ExpertsRig(builds, [1, 1], 16, 3, 2, dtype, changes=changes, timeout_s=1, **IN_PACKETS)
        x = np.ones((len(ids), 16), dtype)
        x.view(np.uint32)[:, 1::6] = ABSENT
        results = [rig.dispatch(rank, x, ids, None) for rank in range(2)]
        sums = [rig.combine(rank, result.rows, result, dtype)[0] for rank, result in enumerate(results)]
        rig.machine.run(limit_s=20)
        assert np.isnan(x).any()
        for rank, (result, places) in enumerate(zip(results, sums, strict=True)):
            expected = x[np.repeat([0, 2] if rank == 0 else [0, 1, 2], 2)]
            times = np.array([[2], [1], [2]], dtype)
            found = result.rows.view(dtype).reshape(-1, 16)[: len(expected)]
            for rows, wanted in ((found, expected), (places.view(dtype).reshape(-1, 16), times * x)):
                require_same("no numbers", np.isnan(rows), np.isnan(wanted))
                require_same("numbers", rows[~np.isnan(rows)], wanted[~np.isnan(wanted)])

    for dtype in TYPES:
        dispatch(dtype)
    with pytest.raises(RunFailedError, match="state=2, operation=9"):
        dispatch(np.float32, UNCHANGED)


EVERY_ROW = Change("experts_heads.cuh", "row < x.capacity ?", "true ?")


def test_rows_beyond_the_room_are_not_copied(builds: Builds) -> None:
    ids = np.array([[0, 1], [0, 3], [2, -1]])  # 9 tokens of three sources come to rank 0

    def wrote_beside(seed: int, *changes: Change) -> bool:
        options: dict[str, Any] = {"capacity": 3, "blocks": (1, 2), "changes": changes, **IN_PACKETS}
        rig = ExpertsRig(builds, [3, 0, 2], 1028, 7, 2, **options)
        for rank in range(3):
            rig.dispatch(rank, np.ones((3, rig.shape.hidden), np.float32), ids, None)
        with pytest.raises(RunFailedError) as error:
            rig.machine.run(seed=seed, jitter_us=500, limit_s=20)
        if changes and "-11" in str(error.value):  # a row went over the arguments of a kernel
            return True
        require_fault_everywhere(str(error.value), 3, operation=12, sequence=9, peer=0)
        return rig.machine.wrote_beside()

    # Rows may come before or after the fault.
    assert any(wrote_beside(seed, EVERY_ROW) for seed in range(40))
    assert not any(wrote_beside(seed) for seed in range(10))


def test_rank_that_dies_between_its_heads_and_its_rows_is_named(builds: Builds) -> None:
    dies = Change(
        "experts_dispatch_few.cu",
        "  if (unit < units) push();\n  if",
        "  if (rank == 2) return;\n  if (unit < units) push();\n  if",
    )
    rig = rig_of(builds, 3, [dies], blocks=(1, 2), timeout_s=0.3, **IN_PACKETS)
    Round(rig, np.random.default_rng(0), none=0).dispatch(range(3))
    with pytest.raises(RunFailedError) as error:
        rig.machine.run(limit_s=20)
    assert "fault on rank 0: state=2, operation=9, sequence=1" in str(error.value)
    assert str(error.value).count("peer=12") >= 1
    assert "peer=10" not in str(error.value) and "peer=11" not in str(error.value)


WATCHED_SLOTS = (
    Change("sentinels.cuh", "store_volatile(slot, {absent, absent});", "slot->first = absent, slot->second = absent;"),
    Change("experts_packets.cuh", "= load_volatile(", "= load_acquire("),
    Change(
        "experts_packets.cuh",
        "if (part.has(i)) store_volatile(reinterpret_cast<Pair*>(row + part.at(i)), Pushed::packet(packets.of[i], {}))",
        """if (!part.has(i)) continue;
    Pair* const slot = reinterpret_cast<Pair*>(row + part.at(i));
    const Pair packet = Pushed::packet(packets.of[i], {});
    store_release(&slot->first, packet.first);
    store_release(&slot->second, packet.second)""",
    ),
)
"""ThreadSanitizer sees a race if a packet may come to a slot before the reset. Packets order their own resets."""


def play_one_way(rig: ExpertsRig, seed: int) -> None:
    """Dispatches and combines of rank 1 with the experts of rank 0. So packets order nothing but their own resets."""
    rng = np.random.default_rng(seed)
    rounds = [Round(rig, rng, none=0, tokens=(0, 5)) for _ in range(4)]
    for each in rounds:
        each.dispatch(range(2), [int(nap) for nap in rng.choice((0, 500), 2)])
    for _ in range(4):
        rounds[-1].combine(range(2), np.float32, [int(nap) for nap in rng.choice((0, 500), 2)])
    rig.machine.run(seed=seed, jitter_us=200)
    for each in rounds:
        each.check()


def one_way(builds: Builds, changes: Sequence[Change] = ()) -> ExpertsRig:
    changes = [*WATCHED_SLOTS, *changes]
    return ExpertsRig(builds, [2, 0], 1028, 7, 2, blocks=(2, 3), changes=changes, timeout_s=5, **IN_PACKETS)


def test_no_packet_comes_to_a_slot_before_its_reset(watched_builds: Builds) -> None:
    for seed in range(3):
        play_one_way(one_way(watched_builds), seed)


RACES_IN_PACKETS = {
    **{name: RACES[name] for name in ("announcement turned relaxed", "announcement loaded relaxed")},
    "one group of slots": RACES["one group of seats for few tokens"],
    "packets before the announcement of a peer": RACES["routes before the announcement of a peer"],
    "sums before the announcement of a peer": RACES["stores before the announcement of a peer"],
}
FAILURES_IN_PACKETS = {
    "slots not reset": Change("sentinels.cuh", "store_volatile(slot, {absent, absent});", "(void)slot;"),
    "packets taken before they have come": Change("experts_packets.cuh", "all &= Pushed::has_come(packet, {});", ""),
    "half of a packet taken": Change("sentinels.cuh", " && upper(packet.second) != kAbsent", ""),
    "head of an earlier launch": FAILURES["packet of an earlier launch"],
    "one place for heads": Change("experts_heads.cuh", "2 * head + turn.parity()", "2 * head"),
    "a token comes before itself": Change("experts_heads.cuh", "(bit - 1 | ", "(bit | bit - 1 | "),
    "tokens of one number in one row": Change("experts_heads.cuh", "(other < source ? bit : 0)", "0"),
    "bits of heads not cleared": Change("experts_heads.cuh", "% kMostHeads] = 0;", "% kMostHeads] |= 1;"),
    "places given by all": Change("experts_dispatch_few.cu", "blocks = placers == 0 ? 1 : placers;", ""),
    "rows of this rank left out": Change("experts_dispatch_few.cu", "if (row >= 0) loaded", "if (false) loaded"),
    "only the first part": Change(
        "experts_dispatch_few.cu", "    loaded = load_part(x, unit, lane);\n    push();", "    break;"
    ),
    "values without a flag": Change("experts_combine.cu", "(part == 0 && x.values != nullptr)", "false"),
}


def run_race(builds: Builds, *, seed: int, changes: Sequence[Change]) -> None:
    play_one_way(one_way(builds, changes), seed)


def run_failure(builds: Builds, *, seed: int, changes: Sequence[Change]) -> None:
    # Without a mistake all takes less than 0.01 s.
    rig = rig_of(builds, 3, changes, blocks=(2, 5), timeout_s=0.2, **IN_PACKETS)
    rig.start_at(2**32 - 3)
    play(rig, seed, 5, types=ONE_TYPE)


test_race_of_packets_is_seen = controls(run_race, RACES_IN_PACKETS, watched=True)
test_failure_of_packets_is_seen = controls(run_failure, FAILURES_IN_PACKETS)
