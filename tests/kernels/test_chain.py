"""Chains: broadcasts and reductions of any size and type, races, mistakes, ranks that are missing or disagree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chain.plan import BATCH_NBYTES, CHAIN_SLOTS
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import Calls, sizes_around
from tests.kernels.machine import Machine, RunFailedError, controls
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import Rig, chain_rig

UNIT_NBYTES = 512  # of a batch
CHANNELS = 8  # one block has as many warps
LIMITS = (16, UNIT_NBYTES, CHANNELS * UNIT_NBYTES, CHANNELS * BATCH_NBYTES)
SLOTS_NBYTES = CHANNELS * 32 * 1024  # one of each channel, the largest there are
LARGE = SLOTS_NBYTES * (CHAIN_SLOTS + 1) + 12  # every slot is used again
TYPES = (
    ("int8", "sum"),
    ("uint16", "max"),
    ("float64", "sum"),
    ("complex128", "prod"),
    ("float32", "a * 2 - b"),
)


def play(
    builds: Builds,
    size: int,
    sizes: list[int],
    *,
    blocks: int = 1,
    room: int = 1 << 30,
    seed: int = 0,
    changes: Changes = (),
    timeout_s: float | None = None,
    limit_s: float = 60,
) -> None:
    rng = np.random.default_rng([size, seed])
    rig, channels = chain_rig(Machine(builds, size), blocks, nbytes=room, changes=changes, timeout_s=timeout_s)
    channels.start_at(2**32 - 3)
    calls = Calls(rig, rng, nap_us=1000)
    # ThreadSanitizer does not know that a store which depends on a load comes after it: see chain.cu.
    in_place = False if builds.sanitize else None
    checks = []
    for nbytes in rng.permutation(sizes).tolist():
        checks.append(calls.bcast(nbytes, "chain"))
        checks.append(calls.reduce("int32", "sum", -(-nbytes // 4), "chain", in_place=in_place))
    rig.machine.run(checks, seed=seed, jitter_us=200, limit_s=limit_s)


@pytest.mark.parametrize(("size", "blocks"), [(2, 2), (3, 1), (4, 2)])
def test_every_size_at_which_something_changes_past_the_end_of_32_bits(builds: Builds, size: int, blocks: int) -> None:
    limits = (*LIMITS, blocks * LIMITS[-1])
    play(builds, size, [nbytes for nbytes in sizes_around(*limits) if nbytes], blocks=blocks)
    play(builds, size, [SLOTS_NBYTES, 5, SLOTS_NBYTES + 4, 5, LARGE, 5], blocks=1)


@pytest.mark.parametrize("batches", [1, 4])
def test_slots_of_few_batches(builds: Builds, batches: int) -> None:
    slots_nbytes = CHANNELS * batches * BATCH_NBYTES
    sizes = [slots_nbytes - 4, slots_nbytes, slots_nbytes + 4, 5, (CHAIN_SLOTS + 1) * slots_nbytes + 12, 5]
    play(builds, 3, sizes, room=slots_nbytes, seed=batches)


def test_flags_of_all_slots_are_written(builds: Builds) -> None:
    """Slots that no launch begins with need flags, too: flags that are 2**31 slots old are ahead of awaited ones."""
    rig, channels = chain_rig(Machine(builds, 3))
    check = Calls(rig, np.random.default_rng(0)).bcast((CHAIN_SLOTS + 2) * SLOTS_NBYTES, "chain")
    rig.machine.run([check], seed=1)
    memory = channels.memory
    received = [words[: memory.channels * 4].view(np.uint32).tolist() for words in channels.words]
    assert sorted(received) == [[0] * CHANNELS] + [[CHAIN_SLOTS + 2] * CHANNELS] * 2
    for words, counts in zip(channels.words, received, strict=True):
        lines = words[memory.flags : memory.slots].view(np.uint64).reshape(memory.channels, -1)
        epochs = np.sort(lines[:, :CHAIN_SLOTS] >> np.uint64(32), axis=1)
        last = max(counts)
        assert (epochs == [last - 1, last] if last else epochs == 0).all()


@pytest.mark.parametrize("reduction", TYPES, ids="-".join)
def test_every_class_of_types(builds: Builds, reduction: tuple[str, str]) -> None:
    rig, _ = chain_rig(Machine(builds, 3))
    calls = Calls(rig, np.random.default_rng(len(reduction[0])))
    checks = [calls.reduce(*reduction, count, "chain") for count in (1, 15, 1021, 9001) for _ in range(3)]
    rig.machine.run(checks, seed=1, jitter_us=100)


def test_no_race(watched_builds: Builds) -> None:
    play(watched_builds, 3, [5, 700, SLOTS_NBYTES // 4, SLOTS_NBYTES + 700])


MISTAKES = {
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
test_failure_is_seen = controls(
    partial(play, size=3, sizes=OF_FEW, room=FEW_BATCHES, timeout_s=0.3, limit_s=1), MISTAKES
)


def reduce_to_last(rig: Rig, count: int, ranks: Sequence[int]) -> None:
    """Enqueue a sum for the last rank on these ranks."""
    dtype, root = np.dtype(np.float32), rig.size - 1
    for rank in ranks:
        span = Span(rig.machine.allocate(rank, count * dtype.itemsize).address, count)
        pattern = patterns.reduce(rank, rig.size, dtype, span, span if rank == root else None, "sum", root, "chain")
        rig.run(rank, pattern)


@pytest.mark.parametrize("counts", [(100, 99), (1, 100)], ids=["same packets", "fewer packets"])
def test_ranks_that_disagree_notice(builds: Builds, counts: tuple[int, int]) -> None:
    rig, _ = chain_rig(Machine(builds, 2))
    for rank, count in enumerate(counts):
        reduce_to_last(rig, count, [rank])
    with pytest.raises(RunFailedError, match=r"fault on rank 1: state=2, operation=3, sequence=1, block=0, peer=10"):
        rig.machine.run(limit_s=10)


@pytest.mark.parametrize(
    ("size", "count", "rank", "peer"), [(3, 100, 1, 10), (2, 1 << 18, 0, 11)], ids=["is missing", "does not take"]
)
def test_rank_that_is_missing_is_named(builds: Builds, size: int, count: int, rank: int, peer: int) -> None:
    rig, _ = chain_rig(Machine(builds, size), timeout_s=0.2)
    reduce_to_last(rig, count, [rank])  # 2^18 elements are more than the slots of a block hold
    said = rf"fault on rank {rank}: state=2, operation=2, sequence=1, block=\d, peer={peer}"
    with pytest.raises(RunFailedError, match=said):
        rig.machine.run(limit_s=10)
