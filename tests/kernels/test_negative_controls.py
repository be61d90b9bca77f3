"""Kernels with one deliberate mistake each: if one of them passes, the other tests here prove nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.build import Builds, Change
from tests.kernels.channel_rigs import ExchangeRig
from tests.kernels.kernel_calls import Calls
from tests.kernels.machine import Machine, require_seen

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")


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


def run(builds: Builds, seed: int, change: Change | None) -> None:
    """Reductions of all kinds of sizes between three ranks, past the end of the epochs.

    If all send to all, flags keep the ranks in step; in a scan the first rank learns of others by credit.
    """
    rng = np.random.default_rng(seed)
    rig = ExchangeRig(Machine(builds, 3), 2, threads=(64, 96), changes=[change] if change else (), timeout_s=2)
    rig.start_at(2**32 - 20)
    calls = Calls(rig, rng, nap_us=1000)
    counts = [*rng.integers(1, 6000, 40), 60000]
    rng.shuffle(counts)
    checks = [calls.allreduce("float32", "sum", int(count)) for count in counts]
    checks += [calls.scan("float32", "sum", int(count)) for count in (1, 2, 3, 4000, 80000)]
    rig.machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


@pytest.mark.parametrize("name", RACES)
def test_race_is_seen(watched_builds: Builds, name: str) -> None:
    require_seen(lambda seed: run(watched_builds, seed, RACES[name]))


@pytest.mark.parametrize("name", FAILURES)
def test_failure_is_seen(builds: Builds, name: str) -> None:
    require_seen(lambda seed: run(builds, seed, FAILURES[name]))


def test_without_a_mistake_the_same_run_passes(builds: Builds, watched_builds: Builds) -> None:
    for seed in range(3):
        run(builds, seed, None)
    run(watched_builds, 0, None)


def test_change_that_fits_nowhere_is_no_control(builds: Builds) -> None:
    with pytest.raises(ValueError, match=r"exchange\.cu has 0 of: no such text"):
        run(builds, 0, Change("exchange.cu", "no such text", ""))
