"""Exchanges through exchange.cu, and chains: long runs, races, mistakes; test_collectives.py has all sizes and types.

The controls are kernels with one deliberate mistake each: if one of them passes, the other tests prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chain.plan import BATCH_NBYTES, CHAIN_SLOTS
from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import SUM, Calls, play, random_counts, sizes_around
from tests.kernels.machine import Machine, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import chain_rig, exchange_rig


def test_hundreds_of_calls_across_the_end_of_32_bits(builds: Builds) -> None:
    rng = np.random.default_rng(3)
    rig = exchange_rig(Machine(builds, 3), 2, threads=(64,))
    rig.start_at(2**32 - 150)
    calls = Calls(rig, rng, nap_us=3000)
    for batch in range(2):
        rig.machine.clear()
        checks = [calls.bcast(9_830_400)]  # dozens of chunks at once
        for _ in range(100):
            checks.append(calls.allreduce(*SUM, int(rng.integers(1, 300))))
            checks.append(calls.alltoallv(random_counts(rng, 3, (0, 0, 1, 200, 20000))))
        rig.machine.run(checks, seed=batch, jitter_us=(0, 500)[batch % 2])


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

# These give wrong results, or make ranks wait until time is up.
FAILURES = {
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
    rig.start_at(2**32 - 20)
    calls = Calls(rig, rng, nap_us=1000)
    counts = [*rng.integers(1, 6000, 20), 60000]
    rng.shuffle(counts)
    checks = [calls.allreduce("float32", "sum", int(count)) for count in counts]
    checks += [calls.scan("float32", "sum", int(count)) for count in (1, 2, 3, 4000, 80000)]
    rig.machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


test_race_is_seen = controls(run, RACES, watched=True)
test_failure_is_seen = controls(run, FAILURES)


def test_no_race(watched_builds: Builds) -> None:
    # `run`, of which the controls are, has three ranks.
    rig = exchange_rig(Machine(watched_builds, 2), 2, threads=(64,), changes=without_mistake(RACES))
    slots_nbytes = 2 * rig.layout.slot_nbytes
    play(rig, "alltoallv bcast", sizes_around(16, CHANNEL_NBYTES, slots_nbytes, 3 * slots_nbytes)[::2])
    sizes = [4 * count for count in (*range(1, 2000, 50), 4097, 40000)]
    play(rig, "allreduce", sizes)
    play(rig, "allreduce:two_shot reduce_scatter", sizes[::7])


def test_without_a_mistake_the_same_run_passes(builds: Builds, watched_builds: Builds) -> None:
    """In builds with all mistakes, of which none is switched on."""
    run(watched_builds, changes=without_mistake(RACES))
    run(builds, changes=without_mistake(FAILURES))


def test_change_that_fits_nowhere_is_no_control(builds: Builds) -> None:
    with pytest.raises(ValueError, match=r"exchange\.cu has 0 of: no such text"):
        run(builds, changes=[Change("exchange.cu", "no such text", "")])


# Chains.

CHANNELS = 8  # one block has as many warps
SLOTS_NBYTES = CHANNELS * 32 * 1024  # one of each channel, the largest there are


def run_chain(
    builds: Builds,
    sizes: Sequence[int],
    *,
    seed: int = 0,
    changes: Changes = (),
    limit_s: float = 60,
    **options: Any,
) -> None:
    """Broadcasts and reductions between three ranks, past the end of 32 bits."""
    rig = chain_rig(Machine(builds, 3), changes=changes, **options)
    rig.start_at(2**32 - 3)
    order = np.random.default_rng(seed).permutation(sizes).tolist()
    play(rig, "bcast:chain reduce:chain", order, reduction=("int32", "sum"), seed=seed, limit_s=limit_s)


def test_flags_of_all_slots_are_written(builds: Builds) -> None:
    """Slots that no launch begins with need flags, too: flags that are 2**31 slots old are ahead of awaited ones."""
    rig = chain_rig(Machine(builds, 3))
    play(rig, "bcast:chain", [(CHAIN_SLOTS + 2) * SLOTS_NBYTES])
    assert rig.words is not None
    memory, all_words = rig.words.memory, rig.words.words
    received = [words[: memory.channels * 4].view(np.uint32).tolist() for words in all_words]
    assert sorted(received) == [[0] * CHANNELS] + [[CHAIN_SLOTS + 2] * CHANNELS] * 2
    for words, counts in zip(all_words, received, strict=True):
        lines = words[memory.flags : memory.slots].view(np.uint64).reshape(memory.channels, -1)
        epochs = np.sort(lines[:, :CHAIN_SLOTS] >> np.uint64(32), axis=1)
        last = max(counts)
        assert (epochs == [last - 1, last] if last else epochs == 0).all()


def test_no_race_in_chains(watched_builds: Builds) -> None:
    run_chain(watched_builds, [5, 700, SLOTS_NBYTES // 4, SLOTS_NBYTES + 700])


IN_CHAINS = {
    "credit for one slot too many": Change(
        "chain.cu", "awaited = sent - kChainSlots;", "awaited = sent - kChainSlots - 1;"
    ),
    "credit for a slot of which there is more": Change(
        "chain.cu", "    if (batch == 0) passing.end_slot();", "    if (batch == 1) passing.end_slot();"
    ),
    "a batch more than a slot holds": Change("chain.cu", "if (++batch == x.batches)", "if (++batch > x.batches)"),
    "ones not put back": Change("chain.cu", "Protocol::give_back(incoming + row * kLanes);", ""),
    "packets looked at once": Change(
        "chain.cu",
        "if (!await_together(x.team, x.watch(x.previous, received), lane, have_come)) return false;",
        "have_come();",
    ),
    "own contribution of the next batch": Change(
        "chain.cu",
        "    Rows<Packet> out = own;\n",
        "    load_own(begin + x.stride());\n    Rows<Packet> out = own;\n",
    ),
    "count not advanced": Change("chain.cu", "if (lane == 0 && place.sends) *x.count", "if (false) *x.count"),
    "no credit for a slot that is not full": Change("chain.cu", "  if (batch != 0) passing.end_slot();\n", ""),
}


# Without a mistake all of this takes a third of the timeout.
FEW_BATCHES = CHANNELS * 4 * BATCH_NBYTES  # in small slots, all of which are used again
OF_FEW = [700, (CHAIN_SLOTS + 1) * FEW_BATCHES + 12, 5, 5, 5, 5]


def run_few(builds: Builds, *, seed: int, changes: Changes) -> None:
    run_chain(builds, OF_FEW, seed=seed, changes=changes, nbytes=FEW_BATCHES, timeout_s=0.3, limit_s=1)


test_failure_of_chains_is_seen = controls(run_few, IN_CHAINS)
