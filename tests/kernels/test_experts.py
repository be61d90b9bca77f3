"""The kernels of a mixture of experts: random routings, late ranks, races, faults in routes, mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ml_dtypes = pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the rig reads fault records by a module that needs cuda-bindings")

from tests.helpers.inputs.routings import Routing, require_laid_by_token, require_laid_out, require_same  # noqa: E402
from tests.helpers.references.experts import Laid  # noqa: E402
from tests.kernels.build import Builds, Change  # noqa: E402
from tests.kernels.experts_rig import ExpertsRig, Result  # noqa: E402
from tests.kernels.machine import CAUGHT, SEEDS, Array, Place, RunFailedError  # noqa: E402

BY_BLOCKS = Change("experts_counts.cuh", "kFewPairs = 8192", "kFewPairs = 0")
"""As if there were many pairs: each block counts only its own pairs."""
TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
ONE_TYPE = (np.float32,)
"""Each type of the results is one more build of the kernel."""


class Round:
    """One dispatch of random tokens, and its combines."""

    def __init__(self, rig: ExpertsRig, rng: np.random.Generator, *, none: float = 0.2) -> None:
        self.rig = rig
        shape = rig.shape
        experts = shape.experts_per_rank
        self.routing = Routing(rng, experts, shape.hidden, shape.max_tokens, shape.top_k, shape.dtype, none=none)
        self.results: list[Result] = []
        self.sums: list[tuple[list[tuple[Place, Place]], np.dtype[Any], bool]] = []
        of_rows = (shape.capacity, shape.top_k) if shape.by_token else (shape.capacity,)
        self.values = [rng.random(of_rows, dtype=np.float32) for _ in experts]

    def dispatch(self, ranks: Iterable[int], naps: Sequence[int] | None = None) -> None:
        x = self.routing
        for rank in ranks:
            nap_us = naps[rank] if naps else 0
            self.results.append(self.rig.dispatch(rank, x.xs[rank], x.ids[rank], x.weights[rank], nap_us=nap_us))

    def combine(
        self, ranks: Iterable[int], dtype: Any, naps: Sequence[int] | None = None, *, weighted: bool = True
    ) -> None:
        places = []
        for rank in ranks:
            nap_us, result = naps[rank] if naps else 0, self.results[rank]
            values = None if weighted else self.values[rank]
            places.append(self.rig.combine(rank, result.rows, result, dtype, values, weighted=weighted, nap_us=nap_us))
        self.sums.append((places, np.dtype(dtype), weighted))

    def check(self) -> None:
        shape = self.rig.shape
        laid = self.routing.laid(shape.alignment)
        if shape.by_token:
            self._check_by_token(laid)
            return
        for rank, (expected, result) in enumerate(zip(laid, self.results, strict=True)):
            experts = shape.experts_per_rank[rank]
            rows = result.rows.view(shape.dtype).reshape(-1, shape.hidden)
            counts, offsets = result.counts.view(np.int32)[:experts], result.offsets.view(np.int32)
            sources = result.sources.view(np.int32).reshape(-1, 3)
            require_laid_out(expected, rows, counts, offsets, sources, result.weights.view(np.float32))
            rest = rows[expected.offsets[-1] :]
            require_same("rows that no pair has", rest, np.zeros_like(rest))
        for places, dtype, weighted in self.sums:
            for rank, (place, slots) in enumerate(places):
                expected_sums = self.routing.sums(laid, [each.rows for each in laid], rank, dtype, weighted=weighted)
                require_same("sums", place.view(dtype).reshape(expected_sums.shape), expected_sums)
                if not weighted:
                    of_slots = self.routing.of_slots(laid, self.values, rank)
                    require_same("values", slots.view(np.float32).reshape(of_slots.shape), of_slots)

    def _check_by_token(self, places: list[Laid]) -> None:
        shape = self.rig.shape
        laid = self.routing.laid_by_token()
        for rank, (expected, result) in enumerate(zip(laid, self.results, strict=True)):
            words = {name: place.view(np.int32) for name, place in result.of_tokens.items()}
            found = {
                **words,
                "x": result.rows.view(shape.dtype).reshape(-1, shape.hidden),
                "counts": result.counts.view(np.int32)[: shape.experts_per_rank[rank]],
                "offsets": result.offsets.view(np.int32),
                "sources": result.sources.view(np.int32).reshape(-1, 3),
                "weights": result.weights.view(np.float32),
                "tokens": result.tokens.view(np.int32),
                "topk_ids": words["topk_ids"].reshape(-1, shape.top_k),
                "topk_weights": words["topk_weights"].view(np.float32).reshape(-1, shape.top_k),
                "token_rows": words["token_rows"].reshape(shape.size, -1),
            }
            require_laid_by_token(expected, places[rank], found)
        for sums, dtype, has_values in ((places, dtype, not weighted) for places, dtype, weighted in self.sums):
            for rank, (place, slots) in enumerate(sums):
                expected_sums = self.routing.sums_by_token(laid, [each.rows for each in laid], rank, dtype)
                require_same("sums", place.view(dtype).reshape(expected_sums.shape), expected_sums)
                if has_values:
                    of_slots = self.routing.slots_by_token(laid, self.values, rank)
                    require_same("values", slots.view(np.float32).reshape(of_slots.shape), of_slots)


def play(
    rig: ExpertsRig,
    seed: int,
    rounds: int,
    *,
    types: Sequence[Any] = TYPES,
    jitter_us: int = 200,
    napping: bool = True,
    limit_s: float = 60,
) -> None:
    """Random dispatches, each with no combine, one or two."""
    rng = np.random.default_rng([rig.size, seed])
    played, everyone = [], range(rig.size)
    for _ in range(rounds):
        each = Round(rig, rng)
        played.append(each)
        naps = rng.choice((0, 0, 500), rig.size) if napping else [0] * rig.size
        each.dispatch(everyone, [int(nap) for nap in naps])
        for _ in range(int(rng.choice((0, 1, 1, 2)))):
            naps = rng.choice((0, 0, 500), rig.size) if napping else [0] * rig.size
            dtype = types[int(rng.integers(len(types)))]
            each.combine(everyone, dtype, [int(nap) for nap in naps], weighted=bool(rng.integers(2)))
    rig.machine.run(seed=seed, jitter_us=jitter_us, limit_s=limit_s)
    for each in played:
        each.check()


def rig_of(builds: Builds, size: int, changes: Sequence[Change] = (), **options: Any) -> ExpertsRig:
    """Return ranks with 3, 0, 2, ... experts, and rows of two parts of odd length."""
    experts = [3, 0, 2, 1][:size] if size > 1 else [4]
    dtype = options.pop("dtype", np.float32)
    hidden = 4112 // np.dtype(dtype).itemsize
    options.setdefault("capacity", 96)
    return ExpertsRig(builds, experts, hidden, 7, options.pop("top_k", 3), dtype, changes=changes, **options)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_routings(builds: Builds, size: int, by_token: bool) -> None:
    cases = zip(((1, 1), (2, 3), (3, 2)), TYPES, (1, 4, 3), ((), (BY_BLOCKS,), (BY_BLOCKS,)), strict=True)
    for seed, (blocks, dtype, alignment, changes) in enumerate(cases):
        options = {"dtype": dtype, "alignment": alignment, "by_token": by_token, "all_threads": size == 2}
        play(rig_of(builds, size, changes, blocks=blocks, **options), seed, 6)


def test_launches_past_the_end_of_32_bits(builds: Builds) -> None:
    rig = rig_of(builds, 3, blocks=(2, 2))
    rig.start_at(2**32 - 5)
    play(rig, 0, 8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_routing(builds: Builds, data: st.DataObject) -> None:
    experts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any), "experts of each rank")
    top_k = data.draw(st.integers(1, 5), "top_k")
    alignment = data.draw(st.integers(1, 9), "alignment")
    blocks = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3)), "blocks")
    rig = ExpertsRig(builds, experts, 8, 6, top_k, ml_dtypes.bfloat16, capacity=200, alignment=alignment, blocks=blocks)
    play(rig, data.draw(st.integers(0, 2**32 - 1), "seed"), 2, napping=False)


def quantised(rows: Array) -> tuple[Array, Array]:
    """Return rows as floats of 8 bits, and the scale of each 128 elements."""
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
        require_same("rows", result.rows.view(wire).reshape(-1, 512)[:used], values)
        require_same("scales", result.scales.view(np.float32).reshape(-1, 4)[:used], scales)


def test_no_race(watched_builds: Builds) -> None:
    for changes, by_token in (((), True), ((BY_BLOCKS,), False), ((BY_BLOCKS,), True)):
        play(rig_of(watched_builds, 3, changes, blocks=(1, 2), by_token=by_token), 0, 3, types=ONE_TYPE)


@pytest.mark.parametrize("wrong", [-2, 5, 2**40])
def test_id_that_is_no_expert_is_a_fault_on_all_ranks(builds: Builds, wrong: int) -> None:
    rig = rig_of(builds, 3, blocks=(1, 2))
    ids = np.zeros((4, 3), np.int64)
    for rank in range(3):
        mine = ids.copy()
        if rank == 1:
            mine[2, 1] = wrong
        rig.dispatch(rank, np.ones((4, rig.shape.hidden), np.float32), mine, None)
    with pytest.raises(RunFailedError) as error:
        rig.machine.run(limit_s=20)
    for rank in range(3):
        assert f"fault on rank {rank}: state=2, operation=11, sequence=2" in str(error.value)
    assert str(error.value).count("peer=11") == 3


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
    for rank in range(3):
        assert f"fault on rank {rank}: state=2, operation=12, sequence=12" in str(error.value)
    assert str(error.value).count("peer=10") == 3
    assert not any(each.rows.bytes.any() for each in results)


@pytest.mark.parametrize("combines", [False, True])
def test_rank_that_does_not_come_is_named(builds: Builds, combines: bool) -> None:
    rig = rig_of(builds, 3, blocks=(1, 2), timeout_s=0.3)
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
    "flag of a part turned relaxed": Change("experts_runs.cuh", "store_release(flag, turn", "store_relaxed(flag, turn"),
    "flag of a part loaded relaxed": Change(
        "experts.cuh", "return load_acquire(flag_in(x, flags", "return load_relaxed(flag_in(x, flags"
    ),
    "flag before all lanes have stored": Change(
        "experts_runs.cuh",
        "    // Orders the stores of all lanes before the releases.\n    __syncwarp();",
        "",
    ),
    "flag of a block turned relaxed": Change(
        "experts_runs.cuh", "store_release(flags[threadIdx.x], turn", "store_relaxed(flags[threadIdx.x], turn"
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
    "no wait for peers": Change("experts.cuh", "turn.again && tokens > x.few_tokens ?", "false ?"),
    "one group of seats for few tokens": Change(
        "experts.cuh", "(tokens <= x.few_tokens ? turn.parity() : 2)", "(tokens <= x.few_tokens ? 0 : 2)"
    ),
    "counts turned relaxed": Change("experts_counts.cuh", "store_release_on_device(counted", "store_relaxed(counted"),
    "counts loaded relaxed": Change("experts_counts.cuh", "load_acquire_on_device(flag)", "load_relaxed(flag)"),
    "counts published before they are written": Change(
        "experts_counts.cuh",
        "    __syncthreads();\n    if (thread == 0) store_release_on_device",
        "    if (thread == 0) store_release_on_device",
    ),
    "places read before they are written": Change(
        "experts_receiver.cuh",
        "if (!__syncthreads_and(place_pairs(packet))) return;",
        "if (!place_pairs(packet)) return;",
    ),
}
FAILURES = {
    "no wait for counts": Change(
        "experts_counts.cuh", "return load_acquire_on_device(flag) == turn.number;", "return true;"
    ),
    "no wait for a part": Change(
        "experts.cuh",
        "return load_acquire(flag_in(x, flags, x.team.rank, peer, seat, part)) == turn.number;",
        "return true;",
    ),
    "packet of an earlier launch": Change(
        "experts_counts.cuh",
        "return FlagProtocol::has_come(packet, epoch());",
        "return packet.first >> 32 != 0;",
    ),
    "launch not counted": Change(
        "experts.cuh", "  count_launch(team, turn.number << 1", "  if (false) count_launch(team, turn.number << 1"
    ),
    "numbers compared as if they had no end": Change(
        "experts.cuh",
        "static_cast<i32>(last - static_cast<u32>(begun)) >= 0",
        "last >= static_cast<u32>(begun)",
    ),
    "runs taken in an earlier launch": Change(
        "experts.cuh", "*tickets(x, 1 - turn.parity(), static_cast<Ticket>(thread)) = 0", "(void)x"
    ),
    "two pairs in one place": Change("experts_receiver.cuh", "next[pair.expert] + lower", "next[pair.expert]"),
}


FAILURES_BY_TOKEN = {
    "two tokens in one row": Change("experts_receiver.cuh", "__popc(rows & earlier_tokens())", "0"),
    "a row for each pair": Change("experts_dispatch.cu", " && is_new ?", " ?"),
    "rows of earlier steps forgotten": Change("experts_receiver.cuh", "if (lane == 0) next += __popc(rows);", ""),
    "rows not counted": Change("experts_counts.cuh", "if (lane == 0) mine[num_experts", "if (false) mine[num_experts"),
}


@pytest.mark.parametrize("name", RACES)
def test_race_is_seen(watched_builds: Builds, name: str) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        for seed in SEEDS:
            rig = rig_of(watched_builds, 3, [BY_BLOCKS, RACES[name]], blocks=(1, 2), timeout_s=5)
            play(rig, seed, 3, types=ONE_TYPE)


@pytest.mark.parametrize("name", [*FAILURES, *FAILURES_BY_TOKEN])
def test_failure_is_seen(builds: Builds, name: str) -> None:
    change, by_token = {**FAILURES, **FAILURES_BY_TOKEN}[name], name in FAILURES_BY_TOKEN
    # A kernel that takes an old packet for a route also stores outside of all memory.
    with pytest.raises(AssertionError, match=CAUGHT):
        for seed in SEEDS:
            # With a top_k of 12 a warp takes more than one step.
            top_k = 12 if by_token else 3
            rig = rig_of(builds, 3, [BY_BLOCKS, change], blocks=(2, 2), timeout_s=1, by_token=by_token, top_k=top_k)
            rig.start_at(2**32 - 3)
            play(rig, seed, 5, types=ONE_TYPE)
