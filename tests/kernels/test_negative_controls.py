"""Exchanges through exchange.cu: every size at which the kernel changes its behaviour, types, long runs, rings, races.

The controls are kernels with one deliberate mistake each: if one of them passes, the other tests prove nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from mpicomm.collectives.gpu.algorithms.memory import CHUNK_SLOTS
from tests.kernels.build import Builds, one_build_of_many
from tests.kernels.kernel_calls import BOTH, Calls, random_counts, sizes_around
from tests.kernels.machine import Machine, controls
from tests.kernels.mistakes import Change, Changes, Mistake
from tests.kernels.rig import Rig, exchange_rig

# Types of each size, of each kind of state of a reduction, and of each way to read an element.
REDUCTIONS = [
    ("bool", "land"),
    ("float8_e4m3fn", "avg"),
    ("float32", "sum"),
    ("complex128", "prod"),
    ("float32", "a * 2 - b"),
]


def limits(rig: Rig) -> tuple[int, ...]:
    """Bytes at which a message gets a further block, a further chunk, or chunks that reuse a slot."""
    channels, slots_nbytes = rig.layout.channels, rig.layout.channels * rig.layout.slot_nbytes
    return (16, CHANNEL_NBYTES, channels * CHANNEL_NBYTES, slots_nbytes, slots_nbytes * CHUNK_SLOTS)


@pytest.mark.parametrize(("size", "channels"), [(1, 2), (3, 1), (4, 2)])
def test_every_size_at_which_something_changes(builds: Builds, size: int, channels: int) -> None:
    rng = np.random.default_rng([size, channels])
    rig = exchange_rig(Machine(builds, size), channels, threads=(None, 64, 96, 512))
    calls = Calls(rig, rng, nap_us=2000)
    sizes = sizes_around(*limits(rig))
    checks = [calls.alltoallv(random_counts(rng, size, sizes)) for _ in range(12)]
    checks += [calls.bcast(nbytes) for nbytes in sizes]
    for count, way in itertools.product(sizes_around(*limits(rig), itemsize=4), BOTH):
        checks.append(calls.allreduce("float32", "sum", count, way))
    rig.machine.run(checks, seed=size, jitter_us=300)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: "-".join(reduction))
def test_every_class_of_types(builds: Builds, reduction: tuple[str, str]) -> None:
    rig = exchange_rig(Machine(builds, 3), 2, threads=(None, 160))
    calls = Calls(rig, np.random.default_rng([ord(letter) for letter in reduction[0]]))
    checks = []
    for count in (1, 2, 15, 1021, 9001):
        checks += [calls.allreduce(*reduction, count, in_place=in_place) for in_place in (False, True)]
        checks += [calls.allreduce(*reduction, count, "two_shot"), calls.scan(*reduction, count)]
    rig.machine.run(checks, seed=1, jitter_us=100)


def test_thousands_of_chunks_across_the_end_of_32_bits(builds: Builds) -> None:
    size = 3
    rng = np.random.default_rng(size)
    rig = exchange_rig(Machine(builds, size), 2, threads=(64,))
    rig.channels().start_at(2**32 - 300)
    calls = Calls(rig, rng, nap_us=3000)
    for batch in range(2):
        rig.machine.clear()
        checks = [calls.bcast(9_830_400)]  # dozens of chunks at once
        for _ in range(200):
            checks.append(calls.allreduce("float32", "sum", int(rng.integers(1, 300))))
            checks.append(calls.alltoallv(random_counts(rng, size, (0, 0, 1, 200, 20000))))
        rig.machine.run(checks, seed=batch, jitter_us=(0, 500)[batch % 2])
    # The first channel has gone past the end, and both sides have counted alike.
    sent, received = ([rig.channels().epoch(rank, 1 - rank, sent=way) for rank in (0, 1)] for way in (True, False))
    assert sent == received[::-1]
    assert all(0 < epoch < 2**31 for epoch in sent)


# The results have the bits of the ring's order.
@pytest.mark.parametrize(("size", "in_place"), [(3, True), (2, False)])
def test_rings_of_every_size_at_which_something_changes(builds: Builds, size: int, in_place: bool) -> None:
    rig = exchange_rig(Machine(builds, size), 2)
    calls = Calls(rig, np.random.default_rng([size, in_place]), nap_us=2000)
    # The bytes of the whole array, and of a shard.
    limits = [128, CHANNEL_NBYTES, 2 * CHANNEL_NBYTES, 2 * rig.layout.slot_nbytes]
    counts = sizes_around(4 * size, *limits, *(size * limit for limit in limits), itemsize=4)
    checks = [calls.allreduce("float32", "sum", count, "ring", in_place=in_place) for count in counts]
    rig.machine.run(checks, seed=size, jitter_us=300)


@pytest.mark.parametrize("reduction", [("bool", "land"), ("bfloat16", "sum"), ("complex128", "prod")], ids="-".join)
def test_rings_of_every_class_of_types(builds: Builds, reduction: tuple[str, str]) -> None:
    rig = exchange_rig(Machine(builds, 3), 2)
    calls = Calls(rig, np.random.default_rng([ord(letter) for letter in reduction[0]]), nap_us=2000)
    each = itertools.product((1, 2, 15, 1021, 9001), (False, True))
    checks = [calls.allreduce(*reduction, count, "ring", in_place=in_place) for count, in_place in each]
    rig.machine.run(checks, seed=1, jitter_us=100)


def test_no_race(watched_builds: Builds) -> None:
    size = 2  # `run`, of which the controls are, is between three
    rng = np.random.default_rng(size)
    rig = exchange_rig(Machine(watched_builds, size), 2, threads=(64,))
    calls = Calls(rig, rng, nap_us=2000)
    slots_nbytes = 2 * rig.layout.slot_nbytes
    sizes = sizes_around(16, CHANNEL_NBYTES, slots_nbytes, 3 * slots_nbytes)
    checks = [calls.alltoallv(random_counts(rng, size, sizes)) for _ in range(8)]
    checks += [calls.bcast(nbytes) for nbytes in sizes[::2]]
    for count in (1, 5, 1000, 4097, 40000):
        checks += [calls.allreduce("float32", "sum", count, way) for way in BOTH]
        checks.append(calls.reduce_scatter("float32", "sum", [count] * size, in_place=True))
    checks += [calls.allreduce("float32", "sum", int(count)) for count in rng.integers(1, 2000, 40)]
    rig.machine.run(checks, seed=size, jitter_us=200)


# Each is a race, which ThreadSanitizer sees whatever order the threads happen to run in.
RACES = {
    "release turned relaxed": Change("exchange.cu", "mpicomm::store_release(word,", "mpicomm::store_relaxed(word,"),
    "acquire turned relaxed": Change("channel_words.cuh", "value = load_acquire(word)", "value = load_relaxed(word)"),
    "flag before the block has written": Change(
        "exchange.cu", "if (!__syncthreads_and(healthy)) return;", "if (!healthy) return;"
    ),
    "slot read before the flag": Change("exchange.cu", "if (!__syncthreads_and(ok)) return;", "if (!ok) return;"),
    "parts read before they are written": Change(
        "exchange.cu", "  __syncthreads();\n\n  u32 steps = 0;", "  u32 steps = 0;"
    ),
    "one slot instead of two": Change(
        "exchange.cu",
        "* kSlots + epoch % kSlots;\n  return exchange.slots",
        "* kSlots;\n  return exchange.slots",
    ),
    "stride of the message": Change(
        "exchange.cu",
        "exchange.slots[owner] + number * exchange.slot_nbytes;",
        "exchange.slots[owner] + number *\n"
        "(owner == exchange.team.rank ? exchange.receives[sender] : exchange.sends[owner]).stride;",
    ),
    "credit for one chunk too many": Change("exchange.cu", "sends ? epoch - kSlots :", "sends ? epoch - kSlots - 1 :"),
}

# Each gives wrong results, or makes ranks wait until time is up.
FAILURES = {
    "flag before the block has written": RACES["flag before the block has written"],
    "slot read before the flag": RACES["slot read before the flag"],
    "one slot instead of two": RACES["one slot instead of two"],
    "epoch not advanced": Change("exchange.cu", "if (remote) *count = mine.epoch + mine.chunks;", ""),
    "epochs compared as if they had no end": Change(
        "channel_words.cuh", "static_cast<i32>(epoch_of(value) - epoch) >= 0", "epoch_of(value) >= epoch"
    ),
}


def run(builds: Builds, *, seed: int = 0, changes: Changes = ()) -> None:
    """Reductions of all kinds of sizes between three ranks, past the end of the epochs.

    If all send to all, flags keep the ranks in step; in a scan the first rank learns of others by credit.
    """
    rng = np.random.default_rng(seed)
    rig = exchange_rig(Machine(builds, 3), 2, threads=(64,) if builds.sanitize else (64, 96), changes=changes)
    rig.channels().start_at(2**32 - 20)
    calls = Calls(rig, rng, nap_us=1000)
    counts = [*rng.integers(1, 6000, 40), 60000]
    rng.shuffle(counts)
    checks = [calls.allreduce("float32", "sum", int(count)) for count in counts]
    checks += [calls.scan("float32", "sum", int(count)) for count in (1, 2, 3, 4000, 80000)]
    rig.machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


test_race_is_seen = controls(run, RACES, watched=True)
test_failure_is_seen = controls(run, FAILURES)


def test_without_a_mistake_the_same_run_passes(builds: Builds, watched_builds: Builds) -> None:
    """Also in builds with all mistakes, of which none is switched on."""
    for mistakes, of in ((RACES, watched_builds), (FAILURES, builds)):
        mistake, *_ = one_build_of_many(mistakes.values())
        assert isinstance(mistake, Mistake)
        for changes in ([], [replace(mistake, number=0)]):
            run(of, changes=changes)


def test_change_that_fits_nowhere_is_no_control(builds: Builds) -> None:
    with pytest.raises(ValueError, match=r"exchange\.cu has 0 of: no such text"):
        run(builds, changes=[Change("exchange.cu", "no such text", "")])
