"""The kernels of a mixture of experts, also with rows as packets: any routing, late ranks, races, faults, mistakes."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpicomm.kernels.team import ABSENT
from tests.helpers.inputs.routings import require_same
from tests.kernels.build import Builds
from tests.kernels.experts_rig import (
    BY_BLOCKS,
    IN_PACKETS,
    ONE_TYPE,
    TYPES,
    WAYS,
    ExpertsRig,
    Result,
    Round,
    play,
    play_rounds,
    require_fault_everywhere,
    rig_of,
)
from tests.kernels.machine import Array, RunFailedError, controls
from tests.kernels.mistakes import Change, Changes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 4])  # the controls are between three
def test_random_routings(builds: Builds, size: int, way: str) -> None:
    # Of five receivers that take packets two give places, of two one does, and one does all. The cases take turns.
    of_cases = ((1, 1), (2, 5), (3, 2)) if way == "in packets" else ((1, 1), (2, 3), (3, 2))
    seed = (size // 2 + list(WAYS).index(way)) % 3
    # Each pair of types is a build of one size of blocks, and so are blocks that count only their own pairs.
    number = (list(WAYS).index(way) + (size == 2)) % 3
    types, changes = (TYPES[number], TYPES[number - 1]), (BY_BLOCKS,) if size == 4 else ()
    options = {"dtype": types[0], "alignment": (1, 4, 3)[seed], "all_threads": size == 2, **WAYS[way]}
    play(rig_of(builds, size, changes, blocks=of_cases[seed], **options), seed, 6, types=types)


@pytest.mark.parametrize("way", ["by expert", "in packets"])
def test_launches_past_the_end_of_32_bits(builds: Builds, way: str) -> None:
    rig = rig_of(builds, 3, blocks=(2, 2), **WAYS[way])
    rig.start_at(2**32 - 5)
    play(rig, 0, 8)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_routing(builds: Builds, data: st.DataObject) -> None:
    experts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any), "experts of each rank")
    top_k = data.draw(st.integers(1, 5), "top_k")
    alignment = data.draw(st.integers(1, 9), "alignment")
    blocks = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3)), "blocks")
    options = {"alignment": alignment, "blocks": blocks, **WAYS[data.draw(st.sampled_from(list(WAYS)), "way")]}
    rig = ExpertsRig(builds, experts, 8, 6, top_k, ml_dtypes.bfloat16, capacity=200, **options)
    play(rig, data.draw(st.integers(0, 2**32 - 1), "seed"), 2, napping=False)


def quantised(rows: Array) -> tuple[Array, Array]:
    """Return rows as fp8, and the scale of each 128 elements."""
    values = np.zeros(rows.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((len(rows), rows.shape[1] // 128), np.float32)
    for row, numbers in enumerate(rows.astype(np.float32)):
        for group in range(scales.shape[1]):
            part = slice(128 * group, 128 * (group + 1))
            largest = max(np.float32(1e-4), np.abs(numbers[part]).max())
            values[row, part] = (numbers[part] * (np.float32(448) / largest)).astype(values.dtype)
            scales[row, group] = largest / np.float32(448)
    return values, scales


@pytest.mark.parametrize("dtype", TYPES)
def test_tokens_are_quantised_on_the_way(builds: Builds, dtype: Any) -> None:
    wire = np.dtype(ml_dtypes.float8_e4m3fn)
    rig = ExpertsRig(builds, [2, 0, 3], 512, 7, 3, dtype, capacity=96, alignment=4, blocks=(2, 2), wire=wire)
    each = Round(rig, np.random.default_rng(3))
    each.routing.xs[0][:1] = 0  # groups of small elements
    each.dispatch(range(3))
    rig.machine.run()
    for result, laid in zip(each.results, each.routing.laid(4), strict=True):
        used = laid.offsets[-1]
        values, scales = quantised(laid.rows)
        there = np.array([source >= 0 for source, _, _ in laid.sources], bool)
        scales[~there] = 0
        require_same("rows", result.places["x"].view(wire).reshape(-1, 512)[:used], values)
        require_same("scales", result.places["scales"].view(np.float32).reshape(-1, 4)[:used], scales)


def test_no_race(watched_builds: Builds) -> None:
    for changes, ways in (((), ("in packets",)), ((BY_BLOCKS,), tuple(WAYS))):
        for way in ways:
            play(rig_of(watched_builds, 3, changes, blocks=(1, 2), **WAYS[way]), 0, 2, types=ONE_TYPE)


@pytest.mark.parametrize("way", ["by expert", "in packets"])
@pytest.mark.parametrize("wrong", [-2, 5, 2**40])
def test_id_that_is_no_expert_is_a_fault_on_all_ranks(builds: Builds, wrong: int, way: str) -> None:
    rig = rig_of(builds, 3, blocks=(1, 2), **WAYS[way])
    ids = np.zeros((4, 3), np.int64)
    for rank in range(3):
        mine = ids.copy()
        if rank == 1:
            mine[2, 1] = wrong
        rig.dispatch(rank, np.ones((4, rig.shape.hidden), np.float32), mine, None)
    with pytest.raises(RunFailedError) as error:
        rig.machine.run(limit_s=20)
    require_fault_everywhere(str(error.value), 3, operation=11, sequence=2, peer=1)


def test_rank_without_room_is_a_fault_on_all_ranks_and_nothing_is_written(builds: Builds) -> None:
    ids = np.array([[0, 1, 2], [0, 3, -1]])  # 4 rows of each source are for rank 0, and 1 for rank 2

    def dispatch(capacity: int) -> tuple[ExpertsRig, list[Result]]:
        rig = rig_of(builds, 3, blocks=(1, 2), capacity=capacity)
        x = np.ones((2, rig.shape.hidden), np.float32)
        return rig, [rig.dispatch(rank, x, ids, None) for rank in range(3)]

    rig, results = dispatch(12)
    rig.machine.run(limit_s=20)
    rig, results = dispatch(11)
    with pytest.raises(RunFailedError) as error:
        rig.machine.run(limit_s=20)
    require_fault_everywhere(str(error.value), 3, operation=12, sequence=12, peer=0)
    assert not any(each.places["x"].bytes.any() for each in results)


@pytest.mark.parametrize("way", ["by expert", "in packets"])
@pytest.mark.parametrize("combines", [False, True])
def test_rank_that_does_not_come_is_named(builds: Builds, combines: bool, way: str) -> None:
    rig = rig_of(builds, 3, blocks=(1, 2), timeout_s=0.3, **WAYS[way])
    rounds = Round(rig, np.random.default_rng(0), none=0)
    if combines:
        rounds.dispatch(range(3))
        rig.machine.run()
        rounds.combine((0, 1), np.float32)
    else:
        rounds.dispatch((0, 1))
    with pytest.raises(RunFailedError) as error:
        rig.machine.run(limit_s=20)
    operation = 10 if combines else 9
    for rank in (0, 1):
        assert f"fault on rank {rank}: state=2, operation={operation}, sequence={1 + combines}" in str(error.value)
    assert str(error.value).count("peer=12") == 2


def test_ranks_in_different_calls_notice(builds: Builds) -> None:
    rig = rig_of(builds, 2, blocks=(1, 2))
    rounds = Round(rig, np.random.default_rng(1), none=0)
    rounds.dispatch(range(2))
    rig.machine.run()
    rounds.dispatch([0])
    rounds.combine([1], np.float32)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=3, sequence=2"):
        rig.machine.run(limit_s=20)


RACES = {
    "flag of a part turned relaxed": Change(
        "experts_runs.cuh", "store_release(flag, launch", "store_relaxed(flag, launch"
    ),
    "flag of a part loaded relaxed": Change(
        "experts.cuh", "return load_acquire(flag_in(x, flags", "return load_relaxed(flag_in(x, flags"
    ),
    "flag before all lanes have stored": Change(
        "experts_runs.cuh",
        "    // Orders the stores of all lanes before the releases.\n    __syncwarp();",
        "",
    ),
    "flag of a block turned relaxed": Change(
        "experts_runs.cuh", "store_release(flags[threadIdx.x], launch", "store_relaxed(flags[threadIdx.x], launch"
    ),
    "flags before all warps have stored": Change(
        "experts_runs.cuh", "before the releases.\n    __syncthreads();", "before the releases.\n"
    ),
    "row read before its flag": Change(
        "experts_receiver.cuh",
        "        // Orders the loads of all lanes after the acquires.\n        __syncwarp();",
        "",
    ),
    "sums read before their flags": Change(
        "experts_combine.cu", "  // Orders the loads of all lanes after the acquires.\n  __syncwarp();", ""
    ),
    "announcement turned relaxed": Change("experts.cuh", "announce_all_before(team, thread,", "announce(team, thread,"),
    "announcement loaded relaxed": Change(
        "experts.cuh", "acquire_announcements(x.team, peer).last", "load_announcements(x.team, peer).last"
    ),
    "stores before the announcement of a peer": Change(
        "experts.cuh", "  return __syncthreads_and(ok);", "  return ok;"
    ),
    "routes before the announcement of a peer": Change(
        "experts.cuh",
        "  if (!__syncthreads_and(ok)) return false;\n  // A release",
        "  if (!ok) return false;\n  // A release",
    ),
    "no wait for peers": Change("experts.cuh", "launch.same_kind && tokens > x.few_tokens ?", "false ?"),
    "one group of receive slots for few tokens": Change(
        "experts.cuh", "(tokens <= x.few_tokens ? launch.parity() : 2)", "(tokens <= x.few_tokens ? 0 : 2)"
    ),
    "counts turned relaxed": Change(
        "experts_counts.cuh", "store_release_on_device(histogram_flag", "store_relaxed(histogram_flag"
    ),
    "counts loaded relaxed": Change("experts_counts.cuh", "load_acquire_on_device(flag)", "load_relaxed(flag)"),
    "counts published before they are written": Change(
        "experts_counts.cuh",
        "    __syncthreads();\n    if (thread == 0) store_release_on_device",
        "    if (thread == 0) store_release_on_device",
    ),
    "places read before they are written": Change(
        "experts_receiver.cuh",
        "if (!__syncthreads_and(place_pairs(packet))) return false;",
        "if (!place_pairs(packet)) return false;",
    ),
}
FAILURES = {
    "no wait for counts": Change(
        "experts_counts.cuh", "return load_acquire_on_device(flag) == launch.number;", "return true;"
    ),
    "no wait for a part": Change(
        "experts.cuh",
        "return load_acquire(flag_in(x, flags, x.team.rank, peer, recv_slot, part)) == launch.number;",
        "return true;",
    ),
    "packet of an earlier launch": Change(
        "experts_dispatch.cuh",
        "return LLProtocol::has_arrived(packet, static_cast<u32>(launch.number));",
        "return packet.first >> 32 != 0;",
    ),
    "launch not counted": Change(
        "experts.cuh", "  count_launch(team, launch.number << 1", "  if (false) count_launch(team, launch.number << 1"
    ),
    "numbers compared as if they had no end": Change(
        "experts.cuh",
        "static_cast<i32>(last - static_cast<u32>(begun)) >= 0",
        "last >= static_cast<u32>(begun)",
    ),
    "runs taken in an earlier launch": Change(
        "experts.cuh", "*tickets(x, 1 - launch.parity(), static_cast<Ticket>(thread)) = 0", "(void)x"
    ),
    "two pairs in one place": Change("experts_receiver.cuh", "next[pair.expert] + lower", "next[pair.expert]"),
}


FAILURES_BY_TOKEN = {
    "two tokens in one row": Change("experts_receiver.cuh", "__popc(rows & earlier_tokens())", "0"),
    "a row for each pair": Change("experts_routes.cuh", " && is_new ?", " ?"),
    "rows of earlier steps forgotten": Change("experts_receiver.cuh", "if (lane == 0) next += __popc(rows);", ""),
    "rows not counted": Change("experts_counts.cuh", "if (lane == 0) mine[num_experts", "if (false) mine[num_experts"),
}


def run_race(builds: Builds, *, seed: int, changes: Changes) -> None:
    play(rig_of(builds, 3, [BY_BLOCKS, *changes], blocks=(1, 2), timeout_s=5), seed, 3, types=ONE_TYPE)


def run_failure(builds: Builds, *, seed: int, changes: Changes, top_k: int = 3, by_token: bool = False) -> None:
    # Without a mistake all takes less than 0.01 s.
    options: dict[str, Any] = {"blocks": (2, 2), "timeout_s": 0.2, "by_token": by_token, "top_k": top_k}
    rig = rig_of(builds, 3, [BY_BLOCKS, *changes], **options)
    rig.start_at(2**32 - 3)
    play(rig, seed, 5, types=ONE_TYPE, limit_s=1)


test_race_is_seen = controls(run_race, RACES, watched=True)
test_failure_is_seen = controls(run_failure, FAILURES)
# With a top_k of 12 a warp takes more than one step.
test_failure_by_token_is_seen = controls(partial(run_failure, top_k=12, by_token=True), FAILURES_BY_TOKEN)


@pytest.mark.parametrize("tokens", [(70, 70, 70), (70, 0, 33), (1, 64, 65)])
def test_rows_of_many_headers(builds: Builds, tokens: tuple[int, ...]) -> None:
    rig = ExpertsRig(builds, [3, 0, 2], 8, 70, 3, capacity=210, blocks=(2, 4), **IN_PACKETS)
    play_rounds(rig, [Round(rig, np.random.default_rng(seed), tokens=tokens) for seed in range(3)], (1, 1, 1))


@pytest.mark.parametrize("late", range(3))
def test_rank_that_is_late_by_calls_gets_all_packets(builds: Builds, late: int) -> None:
    rig = rig_of(builds, 3, blocks=(2, 3), **IN_PACKETS)
    naps = [30_000 if rank == late else 0 for rank in range(3)]
    play_rounds(rig, [Round(rig, np.random.default_rng(seed)) for seed in range(4)], (0, 2, 1, 3), naps)


UNCHANGED = Change("sentinels.cuh", "!kEscapes && upper(packet.first)", "false && upper(packet.first)")


def test_number_that_looks_like_an_empty_slot_stays_no_number(builds: Builds) -> None:
    ids = np.array([[0, 1], [1, -1], [0, 1]])

    def dispatch(dtype: Any, *changes: Change) -> None:
        rig = ExpertsRig(builds, [1, 1], 16, 3, 2, dtype, changes=changes, timeout_s=1, **IN_PACKETS)
        x = np.ones((len(ids), 16), dtype)
        x.view(np.uint32)[:, 1::6] = ABSENT
        results = [rig.dispatch(rank, x, ids, None) for rank in range(2)]
        sums = [rig.combine(rank, result, dtype)[0] for rank, result in enumerate(results)]
        rig.machine.run(limit_s=20)
        assert np.isnan(x).any()
        for rank, (result, places) in enumerate(zip(results, sums, strict=True)):
            expected = x[np.repeat([0, 2] if rank == 0 else [0, 1, 2], 2)]
            times = np.array([[2], [1], [2]], dtype)
            found = result.places["x"].view(dtype).reshape(-1, 16)[: len(expected)]
            for rows, wanted in ((found, expected), (places.view(dtype).reshape(-1, 16), times * x)):
                require_same("no numbers", np.isnan(rows), np.isnan(wanted))
                require_same("numbers", rows[~np.isnan(rows)], wanted[~np.isnan(wanted)])

    for dtype in TYPES:
        dispatch(dtype)
    with pytest.raises(RunFailedError, match="state=2, operation=9"):
        dispatch(np.float32, UNCHANGED)


EVERY_ROW = Change("experts_headers.cuh", "row < x.capacity ?", "true ?")


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


def test_rank_that_dies_between_its_headers_and_its_rows_is_named(builds: Builds) -> None:
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
    play_rounds(rig, rounds, (0, 0, 0, 4), [int(nap) for nap in rng.choice((0, 500), 2)], seed=seed)


def one_way(builds: Builds, changes: Changes = ()) -> ExpertsRig:
    changes = [*WATCHED_SLOTS, *changes]
    return ExpertsRig(builds, [2, 0], 1028, 7, 2, blocks=(1, 3), changes=changes, timeout_s=5, **IN_PACKETS)


def test_no_packet_comes_to_a_slot_before_its_reset(watched_builds: Builds) -> None:
    for seed in range(3):
        play_one_way(one_way(watched_builds), seed)


RACES_IN_PACKETS = {
    **{name: RACES[name] for name in ("announcement turned relaxed", "announcement loaded relaxed")},
    "one group of slots": RACES["one group of receive slots for few tokens"],
    "packets before the announcement of a peer": RACES["routes before the announcement of a peer"],
    "sums before the announcement of a peer": RACES["stores before the announcement of a peer"],
}
FAILURES_IN_PACKETS = {
    "slots not reset": Change("sentinels.cuh", "store_volatile(slot, {absent, absent});", "(void)slot;"),
    "packets taken before they have come": Change("experts_packets.cuh", "all &= Pushed::has_arrived(packet, {});", ""),
    "half of a packet taken": Change("sentinels.cuh", " && upper(packet.second) != kAbsent", ""),
    "header of an earlier launch": FAILURES["packet of an earlier launch"],
    "one slot for headers of all launches": Change("experts_headers.cuh", "2 * header + launch.parity()", "2 * header"),
    "a token comes before itself": Change("experts_headers.cuh", "(bit - 1 | ", "(bit | bit - 1 | "),
    "tokens of one number in one row": Change("experts_headers.cuh", "(other < source ? bit : 0)", "0"),
    "bitmaps of headers not cleared": Change("experts_headers.cuh", "% kMaxHeaders] = 0;", "% kMaxHeaders] |= 1;"),
    "places given by all": Change("experts_dispatch_few.cu", "blocks = placers == 0 ? 1 : placers;", ""),
    "rows of this rank left out": Change("experts_dispatch_few.cu", "if (row >= 0) loaded", "if (false) loaded"),
    "only the first part": Change(
        "experts_dispatch_few.cu", "    loaded = load_part(x, unit, lane);\n    push();", "    break;"
    ),
    "values without a flag": Change("experts_combine.cu", "(part == 0 && x.values != nullptr)", "false"),
}


def run_race_of_packets(builds: Builds, *, seed: int, changes: Changes) -> None:
    play_one_way(one_way(builds, changes), seed)


def run_failure_of_packets(builds: Builds, *, seed: int, changes: Changes) -> None:
    # Without a mistake all takes less than 0.01 s.
    rig = rig_of(builds, 3, changes, blocks=(2, 5), timeout_s=0.2, **IN_PACKETS)
    rig.start_at(2**32 - 3)
    play(rig, seed, 5, types=ONE_TYPE, limit_s=1)


test_race_of_packets_is_seen = controls(run_race_of_packets, RACES_IN_PACKETS, watched=True)
test_failure_of_packets_is_seen = controls(run_failure_of_packets, FAILURES_IN_PACKETS)
