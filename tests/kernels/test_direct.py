"""Stores straight into symmetric memory of the peers, and barriers, between processes and under ThreadSanitizer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.copies.plan import local_reduction
from mpicomm.collectives.gpu.algorithms.copies.schedule import Reduce, landing_place
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectTemplate
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mapped
from tests.helpers.inputs import patterns
from tests.helpers.inputs.launch_numbers import begin_after
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds, Change
from tests.kernels.kernel_calls import Calls
from tests.kernels.machine import Machine, RunFailedError, kernel_of, require_seen
from tests.kernels.packet_rig import SmallLayout

_PARITIES = 2
_INBOX_NBYTES = 512  # of packets, whose old flags this kernel wipes


class DirectRig:
    """An arena, symmetric memory of ``nbytes`` and a template for each rank."""

    def __init__(
        self,
        machine: Machine,
        nbytes: int,
        *,
        blocks: int = 3,
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        self.machine = machine
        self.size = machine.size
        layout = SmallLayout(self.size, 1, flagged_inbox_nbytes=_INBOX_NBYTES)
        self._layout = layout
        self.arenas = [machine.allocate(rank, layout.sentinels) for rank in range(self.size)]
        self.outputs = [machine.allocate(rank, nbytes) for rank in range(self.size)]
        machine.keep()
        self._changes = changes
        arena: Any = SimpleNamespace(layout=layout)
        self._templates = [
            DirectTemplate(Domain(machine.team(self.arenas, rank, timeout_s), arena, blocks, early=False))
            for rank in range(self.size)
        ]

    def start_at(self, launch: int, *, moved: int | None = None) -> None:
        """Let all ranks have begun and ended this launch; ``moved`` is the last that moved data, if not the same."""
        arrived = launch if moved is None else moved
        for arena in self.arenas:
            begin_after(launch, arena.bytes, self.size)
            arena.bytes[self._layout.arrivals : self._layout.flagged].view(np.uint64)[:] = arrived

    def flags(self, rank: int) -> np.ndarray:
        """Return the inboxes of the LL protocol of a rank, of either parity, as words."""
        words = self.arenas[rank].bytes[self._layout.flagged : self._layout.sentinels].view(np.uint64)
        return words.reshape(_PARITIES, -1)

    def run(
        self, rank: int, pattern: Pattern, signature: object = None, *, nap_us: int = 0, symmetric: bool = True
    ) -> None:
        """Enqueue a rank's part of an exchange into the symmetric memory; all calls have the tag 1."""
        memory = Mapped(1, 0, tuple(self.machine.addresses(self.outputs, rank)))
        (exchange,) = pattern
        sends, targets, going, coming = ([0] * self.size for _ in range(4))
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            if send is not None and send.count:
                target = receive.pointer if receive is not None else 0
                if peer != rank:
                    target = landing_place(exchange, peer, memory, memory.pointers[rank])
                if target not in (0, send.pointer):
                    sends[peer], targets[peer] = send.pointer, target
                    going[peer] = send.count * exchange.dtype.itemsize
            if receive is not None and peer != rank:
                coming[peer] = receive.count * exchange.dtype.itemsize
        template = self._templates[rank]
        (launch,) = template.steps_of(template.write(sends, targets, going, coming, exchange.longest_nbytes, 1))
        assert isinstance(launch, Launch)
        self._enqueue(rank, launch, nap_us)

    def barrier(self, rank: int, *, tag: int = 1) -> None:
        """Enqueue a rank's part of a barrier."""
        self._enqueue(rank, self._templates[rank].barrier(tag, after_copies=False), 0)

    def _enqueue(self, rank: int, launch: Launch, nap_us: int) -> None:
        # Each thread more takes ThreadSanitizer a while.
        threads = min(launch.threads, 96) if self.machine.builds.sanitize else launch.threads
        self.machine.enqueue(rank, launch, changes=self._changes, threads=threads, nap_us=nap_us)


BYTES = np.dtype(np.uint8)
NBYTES = 64 << 10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_size_at_which_something_changes(builds: Builds, size: int) -> None:
    rig = DirectRig(Machine(builds, size), NBYTES * size)
    calls = Calls(rig, np.random.default_rng(size), nap_us=2000, symmetric_at=0)
    for nbytes in (1, 15, 16, 1000, 3 * 64 * 16, 3 * 64 * 16 + 1, 3 * 256 * 16 - 1, 4 * 3 * 256 * 16, NBYTES):
        for call in (calls.allgather, calls.alltoall, calls.bcast):
            check = call(nbytes)
            rig.machine.run(seed=nbytes, jitter_us=300)
            check()
            rig.machine.clear()


def run_long(
    builds: Builds, *, start: int = 0, rounds: int = 40, changes: Sequence[Change] = (), timeout_s: float = 20
) -> None:
    """All-gathers into the same memory, which the next one overwrites. In between a kernel of the owner reads it.

    The kernel reduces the data into other memory. Between two ranks nothing else tells the peer when it may write
    again.
    """
    machine = Machine(builds, 3)
    count = 700
    rig = DirectRig(machine, 4 * 3 * count, changes=changes, timeout_s=timeout_s)
    rig.start_at(start)
    rng = np.random.default_rng(start)
    sums = kernel_of(builds, local_reduction(Reduce((1,), 1, 4), ("int32", "sum")).variant)
    expected, results = [], []
    for _ in range(rounds):
        parts = [rng.integers(-1000, 1000, count).astype(np.int32) for _ in range(3)]
        expected.append(parts[0] + parts[1] + parts[2])
        for rank, part in enumerate(parts):
            send = Span(machine.place(rank, part).address, count)
            base = rig.outputs[rank].address
            blocks = patterns.blocks(base, [count] * 3, [0, count, 2 * count], 4)
            pattern = patterns.allgather(rank, 3, np.dtype(np.int32), send, blocks)
            rig.run(rank, pattern, nap_us=int(rng.integers(2000)) if rng.integers(10) == 0 else 0)
            result = machine.allocate(rank, 4 * count)
            results.append(result)
            action = Reduce(tuple(block.pointer for block in blocks), result.address, 4 * count)
            launch = local_reduction(action, ("int32", "sum"))
            machine.launch(rank, sums, [launch.arguments], blocks=2, threads=64)
    machine.run(seed=start, jitter_us=300, limit_s=30)
    for number, result in enumerate(results):
        require_same(result.view(np.int32).copy(), expected[number // 3])


@pytest.mark.parametrize("start", [0, 2**32 - 20])
def test_memory_is_written_again_only_when_its_owner_has_done_with_it(builds: Builds, start: int) -> None:
    run_long(builds, start=start)


@pytest.mark.parametrize("launch", [2**31 + 8, 2**32 - 3])
def test_data_is_awaited_after_many_launches_that_moved_none(builds: Builds, launch: int) -> None:
    """Barriers and packets count too: the ranks' flags of their data are as old as the first launch."""
    rig = DirectRig(Machine(builds, 3), 3 * NBYTES)
    rig.start_at(launch, moved=0)
    check = Calls(rig, np.random.default_rng(launch), symmetric_at=0).allgather(NBYTES)
    rig.machine.run(seed=1, jitter_us=300)
    check()


@pytest.mark.parametrize("launch", [2**31 + 8, 2**32 - 3])
def test_data_that_does_not_come_is_missed_after_many_launches_that_moved_none(builds: Builds, launch: int) -> None:
    """One rank begins the launch, as a barrier does, and stores nothing."""
    rig = DirectRig(Machine(builds, 2), 2 * NBYTES, timeout_s=1)
    rig.start_at(launch, moved=0)
    Calls(rig, np.random.default_rng(0), symmetric_at=0, ranks=[0]).allgather(NBYTES)
    rig.barrier(1)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=2, .* peer=11,"):
        rig.machine.run()


@pytest.mark.parametrize("moves", [False, True])
def test_the_first_launches_of_a_round_wipe_old_flags_of_packets(builds: Builds, moves: bool) -> None:
    """Each launch wipes the set of inboxes of the next launch. It leaves the other set, where packets may be coming."""
    rig = DirectRig(Machine(builds, 3), 3 * NBYTES)
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


def test_no_race(watched_builds: Builds) -> None:
    run_long(watched_builds, rounds=15)


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


def run_with_barriers(builds: Builds, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
    machine = Machine(builds, 3)
    rig = DirectRig(machine, 16, changes=changes, timeout_s=timeout_s)
    copies = local_reduction(Reduce((1,), 1, 4), ("int32", "sum")).variant
    kernel = kernel_of(builds, copies)
    results = []
    for number in range(20):
        for rank in range(3):
            source = machine.place(rank, np.array([100 * number + rank], np.int32))
            following = (rank + 1) % 3
            target = machine.address(following, rig.outputs[following], rank)
            launch = local_reduction(Reduce((source.address,), target, 4), ("int32", "sum"))
            nap_us = 3000 if rank == number % 3 else 0
            machine.launch(rank, kernel, [launch.arguments], blocks=1, threads=64, nap_us=nap_us)
            rig.barrier(rank)
            result = machine.allocate(rank, 4)
            results.append((result, 100 * number + (rank - 1) % 3))
            launch = local_reduction(Reduce((rig.outputs[rank].address,), result.address, 4), ("int32", "sum"))
            machine.launch(rank, kernel, [launch.arguments], blocks=1, threads=64)
            rig.barrier(rank)
    machine.run(limit_s=30)
    for result, value in results:
        require_same(result.view(np.int32).copy(), np.array([value], np.int32))


def test_ranks_in_different_calls_are_told(builds: Builds) -> None:
    machine = Machine(builds, 3)
    rig = DirectRig(machine, 16)
    for rank in range(3):
        rig.barrier(rank, tag=1 + (rank == 2))
    with pytest.raises(RunFailedError, match="operation=3"):
        machine.run()


SOURCE = "direct.cu"
MISTAKES = {
    "no wait for the peers": Change(SOURCE, "    ok = await_ranks(team, launch, absent);\n", ""),
    "no wait for what comes": Change(SOURCE, "if (x.coming[thread].has_part()) await_arrival(x, count, thread);", ""),
}
RACES = {
    **MISTAKES,
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


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen(builds: Builds, name: str) -> None:
    require_seen(lambda start: run_long(builds, start=start, changes=[MISTAKES[name]], timeout_s=2))


@pytest.mark.parametrize("name", RACES)
def test_race_is_seen(watched_builds: Builds, name: str) -> None:
    require_seen(lambda start: run_long(watched_builds, start=start, rounds=15, changes=[RACES[name]], timeout_s=2))


def test_barrier_without_a_wait_is_seen(builds: Builds) -> None:
    require_seen(lambda _: run_with_barriers(builds, [MISTAKES["no wait for the peers"]], timeout_s=2))
