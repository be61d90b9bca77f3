"""Exchanges, chains, stores straight into symmetric memory, and barriers: long runs, races, mistakes.

test_collectives.py has all sizes and types.

The controls are kernels with one deliberate mistake each: if one of them passes, the other tests prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chain.plan import BATCH_NBYTES, CHAIN_SLOTS
from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from mpicomm.collectives.gpu.algorithms.copies.plan import local_reduction
from mpicomm.collectives.gpu.algorithms.copies.schedule import Reduce
from mpicomm.collectives.gpu.algorithms.memory import launch_tag
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mapped
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import SUM, Calls, play, random_counts, sizes_around
from tests.kernels.machine import Machine, RunFailedError, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import chain_rig, direct_rig, exchange_rig


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
    builds: Builds, sizes: Sequence[int], *, seed: int = 0, changes: Changes = (), limit_s: float = 60, **options: Any
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
        "chain.cu", "    if (batch == 0) forwarder.end_slot();", "    if (batch == 1) forwarder.end_slot();"
    ),
    "a batch more than a slot holds": Change("chain.cu", "if (++batch == x.batches)", "if (++batch > x.batches)"),
    "ones not put back": Change("chain.cu", "Protocol::reset_slot(incoming + row * kLanes);", ""),
    "packets looked at once": Change(
        "chain.cu",
        "if (!await_together(x.team, x.watch(x.previous, received), lane, have_arrived)) return false;",
        "have_arrived();",
    ),
    "own contribution of the next batch": Change(
        "chain.cu",
        "    Rows<Packet> out = own;\n",
        "    load_own(begin + x.stride());\n    Rows<Packet> out = own;\n",
    ),
    "count not advanced": Change("chain.cu", "if (lane == 0 && hop.sends) *x.count", "if (false) *x.count"),
    "no credit for a slot that is not full": Change("chain.cu", "  if (batch != 0) forwarder.end_slot();\n", ""),
}


# Without a mistake all of this takes a third of the timeout.
FEW_BATCHES = CHANNELS * 4 * BATCH_NBYTES  # in small slots, all of which are used again
OF_FEW = [700, (CHAIN_SLOTS + 1) * FEW_BATCHES + 12, 5, 5, 5, 5]


def run_few(builds: Builds, *, seed: int, changes: Changes) -> None:
    run_chain(builds, OF_FEW, seed=seed, changes=changes, nbytes=FEW_BATCHES, timeout_s=0.3, limit_s=1)


test_failure_of_chains_is_seen = controls(run_few, IN_CHAINS)


# Stores straight into symmetric memory of the peers, and barriers.

NBYTES = 64 << 10


def run_long(builds: Builds, rounds: int = 40, *, seed: int = 0, changes: Changes = ()) -> None:
    """All-gathers into the same memory, which the next one overwrites. In between a kernel of the owner reads it.

    The kernel reduces the data into other memory. Between two ranks nothing else tells the peer when it may write
    again. The launches are those after number ``seed``.
    """
    machine, count = Machine(builds, 3), 700
    rig = direct_rig(machine, 4 * 3 * count, changes=changes)
    rig.start_at(seed)
    rng = np.random.default_rng(seed)
    expected, results = [], []
    for _ in range(rounds):
        parts = [rng.integers(-1000, 1000, count).astype(np.int32) for _ in range(3)]
        expected.append(parts[0] + parts[1] + parts[2])
        for rank, part in enumerate(parts):
            send, base = Span(machine.place(rank, part).address, count), rig.outputs[rank].address
            blocks = patterns.blocks(base, [count] * 3, [0, count, 2 * count], 4)
            pattern = patterns.allgather(rank, 3, np.dtype(np.int32), send, blocks)
            nap_us = int(rng.integers(2000)) if rng.integers(10) == 0 else 0
            rig.run(rank, pattern, nap_us=nap_us, symmetric=True)
            results.append(machine.allocate(rank, 4 * count))
            action = Reduce(tuple(block.pointer for block in blocks), results[-1].address, 4 * count)
            machine.enqueue(rank, local_reduction(action, ("int32", "sum")), blocks=2, threads=64)
    machine.run(seed=seed, jitter_us=300, limit_s=30)
    for number, result in enumerate(results):
        require_same(result.view(np.int32).copy(), expected[number // 3])


@pytest.mark.parametrize("start", [0, 2**32 - 20])
def test_memory_is_written_again_only_when_its_owner_has_done_with_it(builds: Builds, start: int) -> None:
    run_long(builds, seed=start)


@pytest.mark.parametrize("launch", [2**31 + 8, 2**32 - 3])
def test_data_is_awaited_after_many_launches_that_moved_none(builds: Builds, launch: int) -> None:
    """Barriers and packets count too: the ranks' flags of their data are as old as the first launch."""
    rig = direct_rig(Machine(builds, 3), 3 * NBYTES)
    rig.start_at(launch, moved=0)
    check = Calls(rig, np.random.default_rng(launch), symmetric_at=0).allgather(NBYTES)
    rig.machine.run(seed=1, jitter_us=300)
    check()


@pytest.mark.parametrize("launch", [2**31 + 8, 2**32 - 3])
def test_data_that_does_not_come_is_missed_after_many_launches_that_moved_none(builds: Builds, launch: int) -> None:
    """One rank begins the launch, as a barrier does, and stores nothing."""
    rig = direct_rig(Machine(builds, 2), 2 * NBYTES, timeout_s=1)
    rig.start_at(launch, moved=0)
    Calls(rig, np.random.default_rng(0), symmetric_at=0, ranks=[0]).allgather(NBYTES)
    rig.barrier(1, tag=launch_tag(Signature("Allgather", "uint8").hash32, memory=Mapped(1, 0, ())))
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=2, .* peer=11,"):
        rig.machine.run()


@pytest.mark.parametrize("moves", [False, True])
def test_the_first_launches_of_a_round_wipe_old_flags_of_packets(builds: Builds, moves: bool) -> None:
    """Each launch wipes the set of inboxes of the next launch. It leaves the other set, where packets may be coming."""
    rig = direct_rig(Machine(builds, 3), 3 * NBYTES)
    calls = Calls(rig, np.random.default_rng(0), symmetric_at=0)
    rig.start_at(2**30 - 2, moved=0)
    for rank in range(rig.size):
        rig.flags(rank)[:] = 7
    for wiped in ([], [1], [0, 1], [0, 1]):  # by launches 2^30 - 1, 2^30 and the two after it
        checks = [calls.allgather(1000)] if moves else []
        for rank in range(0 if moves else rig.size):
            rig.barrier(rank)
        rig.machine.run(checks, seed=len(wiped), jitter_us=100)
        for rank in range(rig.size):
            assert [parity for parity in range(2) if not rig.flags(rank)[parity].any()] == wiped
            assert all((rig.flags(rank)[parity] == 7).all() for parity in range(2) if parity not in wiped)


@pytest.mark.parametrize(
    "reduction",
    [
        ("float32", "sum"),
        ("bfloat16", "avg"),
        ("complex128", "prod"),
        ("int8", "max"),
        ("float32", "tree"),
        ("bfloat16", "a * 2 - b"),
    ],
)
def test_local_reductions(builds: Builds, reduction: tuple[str, str]) -> None:
    machine, rng = Machine(builds, 1), np.random.default_rng(3)
    dtype = dtype_named(reduction[0])
    for count, offset in ((1, 0), (1000, 0), (4099, 0), (1001, dtype.itemsize)):
        parts = [samples(dtype, count, rng) for _ in range(5)]  # a tree of three adds in their order
        sources = [machine.place(0, part, offset=offset) for part in parts]
        output = sources[1] if count == 1000 else machine.place(0, np.zeros_like(parts[0]))
        action = Reduce(tuple(source.address for source in sources), output.address, parts[0].nbytes)
        launch = local_reduction(action, reduction)
        machine.enqueue(0, launch, threads=64)
        machine.run()
        require_same(output.bytes.copy().view(dtype), reduced(reduction[1], parts))
        machine.clear()


def test_a_barrier_waits_for_all(builds: Builds) -> None:
    """A late rank holds the others, so that they read the data that it has written before."""
    run_with_barriers(builds)


def run_with_barriers(builds: Builds, *, seed: int = 0, changes: Changes = ()) -> None:
    machine = Machine(builds, 3)
    rig = direct_rig(machine, 16, changes=changes)
    results = []

    def copy(rank: int, source: int, target: int, nap_us: int = 0) -> None:
        launch = local_reduction(Reduce((source,), target, 4), ("int32", "sum"))
        machine.enqueue(rank, launch, blocks=1, threads=64, nap_us=nap_us)

    for number in range(20):
        for rank in range(3):
            source = machine.place(rank, np.array([100 * number + rank], np.int32))
            following = (rank + 1) % 3
            target = machine.address(following, rig.outputs[following], rank)
            copy(rank, source.address, target, nap_us=3000 if rank == number % 3 else 0)
            rig.barrier(rank)
            results.append((machine.allocate(rank, 4), 100 * number + (rank - 1) % 3))
            copy(rank, rig.outputs[rank].address, results[-1][0].address)
            rig.barrier(rank)
    machine.run(seed=seed, limit_s=30)
    for result, value in results:
        require_same(result.view(np.int32).copy(), np.array([value], np.int32))


def test_ranks_in_different_calls_are_told(builds: Builds) -> None:
    machine = Machine(builds, 3)
    rig = direct_rig(machine, 16)
    for rank in range(3):
        rig.barrier(rank, tag=1 + (rank == 2))
    with pytest.raises(RunFailedError, match="operation=3"):
        machine.run()


SOURCE = "direct.cu"
RACES_OF_STORES = {
    "no wait for the peers": Change(SOURCE, "    ok = await_ranks(team, launch, absent);\n", ""),
    "no wait for what comes": Change(SOURCE, "if (x.coming[thread].has_part()) await_arrival(x, count, thread);", ""),
    "arrival turned relaxed": Change(SOURCE, "store_release(arrival_of(x,", "store_relaxed(arrival_of(x,"),
    "announcement turned relaxed": Change(SOURCE, "announce_all_before(team,", "announce(team,"),
    "announcement read relaxed": Change(SOURCE, "= acquire_announcements(team,", "= load_announcements(team,"),
    "acquire turned relaxed": Change(SOURCE, "load_acquire(arrival_of(x,", "load_relaxed(arrival_of(x,"),
    "launch counted before all threads have its number": Change(
        SOURCE, "  __syncthreads();\n  count_launch(", "  count_launch("
    ),
    "arrival before the block has stored": Change(
        SOURCE, "  __syncthreads();\n  if (!has_peer) return;", "  if (!has_peer) return;"
    ),
}


test_race_of_stores_is_seen = controls(partial(run_long, rounds=15), RACES_OF_STORES, watched=True)


def test_no_race_of_stores(watched_builds: Builds) -> None:
    run_long(watched_builds, 15, changes=without_mistake(RACES_OF_STORES))


BARRIER = {"no wait": RACES_OF_STORES["no wait for the peers"]}
test_barrier_without_a_wait_is_seen = controls(run_with_barriers, BARRIER)
