"""The kernels of signal.cu, message.cu and window.cu, around kernels that write words and add them up."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path

import numpy as np
import pytest

from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_WORDS, SIGNAL_KERNEL, MessageStep, SignalArguments
from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import (
    BOARD_NBYTES,
    COMES_FIRST,
    EXCLUSIVE_SHIFT,
    FENCE,
    LOCK,
    LOCK_KERNEL,
    START,
    SYNCHRONISE_KERNEL,
    WAIT,
    WINDOW_THREADS,
    LockWords,
    SynchronisationArguments,
    lock_of,
)
from tests.kernels.build import Builds
from tests.kernels.machine import Machine, RunFailedError, controls, kernel_of, without_mistake
from tests.kernels.mistakes import Change, Changes

_SOURCE = Path(__file__).parent / "write_words.cu"
WORDS = 500
ROUNDS = 25


class WordsRig:
    """Words of every rank, and the sum of words that a neighbour has written; subclasses order the two."""

    ranks = 3  # of which mistakes are tried

    def __init__(self, builds: Builds, size: int, changes: Changes = (), timeout_s: float = 20) -> None:
        self.machine, self.size, self._timeout_s = Machine(builds, size), size, timeout_s
        self.words = [self.machine.allocate(rank, WORDS * 8) for rank in range(size)]
        self.sums = [self.machine.allocate(rank, 8) for rank in range(size)]
        self._write, self._add = (builds.kernel(_SOURCE, name) for name in ("write_words", "add_words"))

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        """Enqueue one round of a rank, which naps before it says that it has written."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the sums, and words of the kernels, after all rounds."""
        for rank in range(self.size):
            self.require_sum(rank, [self.neighbours(rank)[1]])

    def require_sum(self, rank: int, writers: Sequence[int]) -> None:
        """Require that the sum of a rank is that of all words that some ranks have written."""
        firsts = [writer + number * 10**6 for writer in writers for number in range(ROUNDS)]
        expected, found = sum(WORDS * first + sum(range(WORDS)) for first in firsts), self.sums[rank].view(np.uint64)[0]
        assert found == expected, f"sums differ, first at rank {rank}: {found} instead of {expected}"

    def run(self, seed: int = 0) -> None:
        """Enqueue and run rounds in which ranks nap at random, and check the sums."""
        rng = np.random.default_rng([self.size, seed])
        for number in range(ROUNDS):
            for rank in range(self.size):
                self.enqueue(rank, number, nap_us=int(rng.choice((0, 0, 0, 500))))
        self.machine.run(seed=seed, jitter_us=200, limit_s=30)
        self.check()

    def neighbours(self, rank: int) -> tuple[int, int]:
        """Return the ranks after and before one."""
        return (rank + 1) % self.size, (rank - 1) % self.size

    def limits(self, rank: int, timeout_s: float = 0) -> tuple[int, int, int]:
        """Return the timeout of a kernel that waits, and where it reports a fault."""
        faults = self.machine.faults[rank]
        return int((timeout_s or self._timeout_s) * 1e9), faults.record, faults.failed

    def write(self, rank: int, address: int, number: int) -> None:
        parameters = (c_uint64(address), c_uint64(rank + number * 10**6), c_uint32(WORDS))
        self.machine.launch(rank, self._write, parameters, blocks=2, threads=64)

    def add(self, rank: int, address: int, total: int | None = None) -> None:
        """Enqueue the addition of a rank's words to its sum, or to the one at ``total``."""
        total = self.sums[rank].address if total is None else total
        parameters = (c_uint64(total), c_uint64(address), c_uint32(WORDS))
        self.machine.launch(rank, self._add, parameters, blocks=1, threads=64)


class Boards(WordsRig):
    """Ranks with boards; subclasses say how the ranks synchronise."""

    def __init__(self, builds: Builds, size: int, changes: Changes = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, changes, timeout_s)
        self.boards = [self.machine.allocate(rank, BOARD_NBYTES) for rank in range(size)]
        self.tables = [self.machine.table(self.boards, rank) for rank in range(size)]
        self._kernels = {each: kernel_of(builds, each, changes) for each in (SYNCHRONISE_KERNEL, LOCK_KERNEL)}

    def step(
        self,
        kernel: Variant,
        rank: int,
        operation: int,
        *,
        signals: Sequence[int] = (),
        waits: Sequence[int] = (),
        timeout_s: float = 0,
        nap_us: int = 0,
        **what: int,
    ) -> None:
        """Enqueue a step; ``what`` are further fields of its argument."""
        where = self.tables[rank], set_of(*signals), set_of(*waits), *self.limits(rank, timeout_s), rank
        arguments = SynchronisationArguments(*where, operation=operation, **what)
        self.machine.launch(rank, self._kernels[kernel], [arguments], blocks=1, threads=WINDOW_THREADS, nap_us=nap_us)

    def lock(self, rank: int) -> LockWords:
        """Return the lock of a rank's memory."""
        return lock_of(self.boards[rank].bytes.ctypes.data)


BLOCKS = 3  # of a message


class Signals(WordsRig):
    """Every rank writes into the next rank's memory, signals, waits for the rank before, adds up, and signals back."""

    def __init__(self, builds: Builds, size: int, changes: Changes = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, changes, timeout_s)
        # As in a SignalPad, for each of two signals (data and "taken"): sent, expected, inbox.
        self.pads = [[self.machine.allocate(rank, 3 * 8) for rank in range(size)] for _ in range(2)]
        self._signal = kernel_of(builds, SIGNAL_KERNEL, changes)

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = self.neighbours(rank)
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.signal(rank, following, pad=0, nap_us=nap_us)
        self.wait(rank, previous, pad=0)
        self.add(rank, self.words[rank].address)
        self.signal(rank, previous, pad=1)
        self.wait(rank, following, pad=1)

    def signal(self, rank: int, peer: int, *, pad: int, nap_us: int = 0) -> None:
        inbox = self.machine.address(peer, self.pads[pad][peer], rank) + 16
        arguments = SignalArguments(self.pads[pad][rank].address, inbox, *self.limits(rank))
        self.machine.launch(rank, self._signal, [arguments], blocks=1, threads=1, nap_us=nap_us)

    def wait(self, rank: int, peer: int, *, pad: int, timeout_s: float = 0) -> None:
        own = self.pads[pad][rank].address
        arguments = SignalArguments(own + 8, own + 16, *self.limits(rank, timeout_s), peer, waits=True)
        self.machine.launch(rank, self._signal, [arguments], blocks=1, threads=1)

    def check(self) -> None:
        super().check()
        for rank in range(self.size):
            assert [list(pad[rank].view(np.uint64)) for pad in self.pads] == [[ROUNDS] * 3] * 2


class Outboxes(WordsRig):
    """Every rank sends words to the next rank through one place of its memory, again and again."""

    def __init__(self, builds: Builds, size: int, changes: Changes = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, changes, timeout_s)
        self.places, self.targets = ([self.machine.allocate(rank, WORDS * 8) for rank in range(size)] for _ in range(2))
        self.ready, self.done, self.seen = (
            [self.machine.allocate(rank, MESSAGE_WORDS * 8) for rank in range(size)] for _ in range(3)
        )
        for seen in self.seen:
            seen.view(np.int64)[:] = -1  # no receiver has to be done with the place before the first message
        self._step = builds.kernel(MESSAGE_KERNEL.source, MESSAGE_KERNEL.entry, changes=changes)

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = self.neighbours(rank)
        blocks = BLOCKS - number % BLOCKS  # the blocks differ between messages of one place
        words, place, ready, target = (
            each[rank].address for each in (self.words, self.places, self.ready, self.targets)
        )
        # The host does this: the receiver of the last message is done.
        self.step(rank, following, ready=self.done[rank].address, done=self.seen[rank].address, awaits=1, taken=1)
        self.write(rank, words, number)
        self.step(rank, rank, place, words, ready=ready, sent=1, blocks=blocks, nap_us=nap_us)
        place, ready, done = (
            self.machine.address(previous, each[previous], rank) for each in (self.places, self.ready, self.done)
        )
        self.step(rank, previous, target, place, ready=ready, done=done, awaits=1, taken=1, blocks=blocks)
        self.add(rank, target)

    def step(
        self,
        rank: int,
        peer: int,
        target: int = 0,
        source: int = 0,
        *,
        blocks: int = BLOCKS,
        timeout_s: float = 0,
        nap_us: int = 0,
        **words: int,
    ) -> None:
        """Enqueue a step; ``words`` are further fields of its argument."""
        step = MessageStep(target, source, WORDS * 8 if target else 0, peer=peer, **words)
        step.timeout_ns, step.record, step.failed = self.limits(rank, timeout_s)
        self.machine.launch(rank, self._step, [step], blocks=blocks, threads=64, nap_us=nap_us)

    def check(self) -> None:
        super().check()
        for place in (*self.ready, *self.done):
            assert list(place.view(np.uint64)) == [ROUNDS] * MESSAGE_WORDS


class Fences(Boards):
    """Every rank writes into the next rank's memory between two fences, and adds up its own."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, _ = self.neighbours(rank)
        others = [each for each in range(self.size) if each != rank]
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        for act in ("write", "read"):
            self.step(SYNCHRONISE_KERNEL, rank, FENCE, signals=others, waits=others, nap_us=nap_us)
            if act == "write":
                self.add(rank, self.words[rank].address)


class Groups(Boards):
    """The same with Post, Start, Complete and Wait, between neighbours only."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = self.neighbours(rank)
        self.step(SYNCHRONISE_KERNEL, rank, START, kind=1, signals=[previous])
        self.step(SYNCHRONISE_KERNEL, rank, START, kind=1, waits=[following], nap_us=nap_us)
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.step(SYNCHRONISE_KERNEL, rank, WAIT, kind=2, signals=[following], nap_us=nap_us)
        self.step(SYNCHRONISE_KERNEL, rank, WAIT, kind=2, waits=[previous])
        self.add(rank, self.words[rank].address)


def alone(rank: int) -> int:
    """Return the holders of a lock that a rank holds alone."""
    return rank + 1 << EXCLUSIVE_SHIFT


def set_of(*ranks: int) -> int:
    return sum(1 << rank for rank in ranks)


class Locks(Boards):
    """Every rank adds its words to one sum of rank 0, in plain loads and stores under the lock of rank 0."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        self.write(rank, self.words[rank].address, number)
        self.step(LOCK_KERNEL, rank, LOCK, waits=[0], exclusive=True, nap_us=nap_us)
        self.add(rank, self.words[rank].address, self.machine.address(0, self.sums[0], rank))
        self.step(LOCK_KERNEL, rank, LOCK, signals=[0], exclusive=True)

    def check(self) -> None:
        self.require_sum(0, range(self.size))
        left = self.lock(0).holders, self.lock(0).waiting
        assert left == (0, 0), f"ranks that hold the lock and wait for it differ, first at 0: {left} instead of none"


class SharedLocks(Locks):
    """Odd ranks write words of rank 0 under its lock. Even ranks share the lock, and read the words."""

    ranks = 4

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        exclusive = rank % 2 == 1
        words = self.machine.address(0, self.words[0], rank)
        self.step(LOCK_KERNEL, rank, LOCK, waits=[0], exclusive=exclusive, yields=not exclusive, nap_us=nap_us)
        if exclusive:
            self.write(rank, words, number)
        else:
            self.add(rank, words)
        self.step(LOCK_KERNEL, rank, LOCK, signals=[0], exclusive=exclusive)

    def check(self) -> None:
        """What ranks read depends on their order."""


RIGS = (Signals, Outboxes, Fences, Groups, Locks, SharedLocks)


def run(builds: Builds, rig: type[WordsRig], *, size: int = 0, seed: int = 0, changes: Changes = ()) -> None:
    rig(builds, size or rig.ranks, changes, timeout_s=2 if changes else 20).run(seed)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rig", RIGS)
def test_data_is_there_after_the_synchronisation(builds: Builds, rig: type[WordsRig], size: int) -> None:
    run(builds, rig, size=size)


OF_SIGNALS = {
    "release turned relaxed": ("store_release(x.inbox, count);", "store_relaxed(x.inbox, count);"),
    "acquire turned relaxed": ("load_acquire(inbox)", "load_relaxed(inbox)"),
    "no wait": ("if (spin_until(reached, watch)) *x.count = target;", "*x.count = target;"),
}
OF_MESSAGES = {
    "release of ready turned relaxed": ("store_release(ready, load_relaxed", "store_relaxed(ready, load_relaxed"),
    "release of done turned relaxed": ("store_release(done, load_relaxed", "store_relaxed(done, load_relaxed"),
    "acquire turned relaxed": ("load_acquire(word)", "load_relaxed(word)"),
    "no wait": ("x.awaits != 0)", "false)"),
    "no barrier after the wait": ("if (!__syncthreads_and(ok)) return;", "if (!ok) return;"),
    "no barrier before the release": ("  __syncthreads();\n", ""),
    "the word of another block": ("const u64* const word = x.ready + block;", "const u64* const word = x.ready;"),
    "words of later messages left out": (
        "threadIdx.x < kMessageWords && threadIdx.x % gridDim.x == block",
        "threadIdx.x == block",
    ),
}
OF_WINDOWS = {
    "release turned relaxed": ("store_release(row(x, peer, 0)", "store_relaxed(row(x, peer, 0)"),
    "acquire turned relaxed": ("load_acquire(inbox)", "load_relaxed(inbox)"),
    "no wait": ("if (spin_until(reached, watch)) *expected", "*expected"),
}
TAKE = "compare_and_swap_acquire(&lock->holders"
OF_LOCKS: dict[str, Change | list[Change]] = {
    "release turned relaxed": Change("window_lock.cuh", "fetch_and_release(&lock", "fetch_and(&lock"),
    "acquire turned relaxed": Change("window_lock.cuh", TAKE, TAKE.replace("_acquire", "")),
    "no wait": Change("window_lock.cuh", "if (spin_until(acquired, watch)) {", "if (acquired()) {"),
    "lock taken that another rank holds": [
        Change("window_lock.cuh", "if (holders != 0 || first != rank) {", "if (first != rank) {"),
        Change("window_lock.cuh", "<< kExclusiveShift) == 0;\n  };\n  if", "<< kExclusiveShift) != 1;\n  };\n  if"),
    ],
}
OF_SHARED: dict[str, Change | list[Change]] = {
    "acquires turned relaxed": [
        Change("window_lock.cuh", "fetch_or_acquire(&lock", "fetch_or(&lock"),
        Change("window_lock.cuh", "holders = load_acquire(&lock", "holders = load_relaxed(&lock"),
    ],
    "no wait": Change("window_lock.cuh", "if (!spin_until(acquired, watch)) fetch_and(", "if (false) fetch_and("),
    "no bit": Change("window_lock.cuh", "u64 holders = fetch_or_acquire(&lock->holders, me);", "u64 holders = 0;"),
}
MISTAKES: dict[str, tuple[type[WordsRig], Change | list[Change]]] = {
    f"{rig.__name__}-{name}": (rig, Change(source, *texts))
    for rig, source, mistakes in (
        (Signals, "signal.cu", OF_SIGNALS),
        (Outboxes, "message.cu", OF_MESSAGES),
        (Fences, "window.cu", OF_WINDOWS),
        (Groups, "window.cu", OF_WINDOWS),
    )
    for name, texts in mistakes.items()
}
MISTAKES |= {f"locks-{name}": (Locks, changes) for name, changes in OF_LOCKS.items()}
MISTAKES |= {f"shared locks-{name}": (SharedLocks, changes) for name, changes in OF_SHARED.items()}
test_race_is_seen = controls(run, MISTAKES, watched=True)


@pytest.mark.parametrize("rig", RIGS)
def test_no_race(watched_builds: Builds, rig: type[WordsRig]) -> None:
    run(watched_builds, rig, changes=without_mistake(MISTAKES))


def test_rank_that_does_not_signal_is_named_and_the_waiting_rank_does_not_signal(builds: Builds) -> None:
    signals = Signals(builds, 2)
    signals.wait(0, 1, pad=0, timeout_s=0.2)
    signals.signal(0, 1, pad=0)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=1, sequence=1, block=0, peer=1"):
        signals.machine.run(limit_s=10)
    assert not signals.pads[0][1].bytes.any()


def test_sender_that_is_missing_is_named_and_nothing_more_is_said(builds: Builds) -> None:
    outboxes = Outboxes(builds, 2)
    ready, done = (outboxes.machine.address(1, each[1], 0) for each in (outboxes.ready, outboxes.done))
    target, source = outboxes.targets[0].address, outboxes.machine.address(1, outboxes.places[1], 0)
    outboxes.targets[0].bytes[:] = 9
    outboxes.step(0, 1, target, source, ready=ready, done=done, awaits=5, taken=5, timeout_s=0.2)
    outboxes.step(0, 0, ready=outboxes.ready[0].address, sent=3)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=4, sequence=5, block=\d, peer=1"):
        outboxes.machine.run(limit_s=10)
    assert not outboxes.done[1].bytes.any() and not outboxes.ready[0].bytes.any()
    assert (outboxes.targets[0].bytes == 9).all()


def test_rank_that_does_not_come_is_named_and_is_sent_nothing_more(builds: Builds) -> None:
    boards = Boards(builds, 2)
    boards.step(SYNCHRONISE_KERNEL, 0, WAIT, kind=2, waits=[1], timeout_s=0.2)
    boards.step(SYNCHRONISE_KERNEL, 0, FENCE, signals=[1], waits=[1])
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=7, sequence=1, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert not boards.boards[1].bytes.any()


def test_ranks_share_a_lock_and_keep_an_exclusive_holder_out(builds: Builds) -> None:
    boards = Boards(builds, 3)
    for rank in range(2):
        boards.step(LOCK_KERNEL, rank, LOCK, waits=range(3), yields=True)
    boards.machine.run(limit_s=10)
    assert [boards.lock(rank).holders for rank in range(3)] == [set_of(0, 1)] * 3
    boards.step(LOCK_KERNEL, 0, LOCK, signals=range(3))
    boards.step(LOCK_KERNEL, 2, LOCK, waits=[1], exclusive=True, timeout_s=0.3)
    with pytest.raises(RunFailedError, match=r"fault on rank 2: state=2, operation=8, sequence=0, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert (boards.lock(1).holders, boards.lock(1).waiting) == (set_of(1), 0)


def test_rank_that_holds_a_lock_for_ever_is_named(builds: Builds) -> None:
    for exclusive in (False, True):
        boards = Boards(builds, 3)
        boards.lock(0).holders = alone(1)
        boards.step(LOCK_KERNEL, 2, LOCK, waits=[0], exclusive=exclusive, timeout_s=0.2)
        boards.step(LOCK_KERNEL, 2, LOCK, signals=[0], exclusive=exclusive)  # a rank that has failed gives no lock up
        with pytest.raises(RunFailedError, match=r"fault on rank 2: state=2, operation=8, sequence=0, block=0, peer=1"):
            boards.machine.run(limit_s=10)
        # It waits no longer, so the lock is free for others as soon as its holder gives it up.
        assert (boards.lock(0).holders, boards.lock(0).waiting) == (alone(1), 0)


GIVES_WAY = Change("window_lock.cuh", "if (holders != 0 || first != rank) {", "if (holders != 0) {")
YIELDS = Change("window.cu", "if (acquires && x.yields != 0 &&", "if (false &&")


def gives_way(builds: Builds, last: int, changes: list[Change]) -> bool:
    """Return whether rank 0 lets rank 2 take an exclusive lock first, which rank ``last`` has taken last."""
    boards = Boards(builds, 3, changes)
    boards.lock(1).waiting, boards.lock(1).last = set_of(2), last
    boards.step(LOCK_KERNEL, 0, LOCK, waits=[1], exclusive=True, timeout_s=0.2)
    try:
        boards.machine.run(limit_s=10)
    except RunFailedError as error:
        assert f"fault on rank 0: state=2, operation=8, sequence={COMES_FIRST}, block=0, peer=2" in str(error)
        assert (boards.lock(1).holders, boards.lock(1).waiting) == (0, set_of(2))
        return True
    assert (boards.lock(1).holders, boards.lock(1).waiting) == (alone(0), set_of(2))
    assert (boards.lock(1).turns, boards.lock(1).last) == (1, 0)
    return False


def test_exclusive_lock_goes_around(builds: Builds) -> None:
    assert gives_way(builds, 0, [])  # also to itself: the rank takes the lock again that it has given up
    assert gives_way(builds, 1, [])
    assert not gives_way(builds, 2, [])
    assert not gives_way(builds, 0, [GIVES_WAY])


def lets_pass(builds: Builds, owners: list[int], *, yields: bool, changes: list[Change] | None = None) -> bool:
    """Return whether rank 0, which shares locks, lets rank 2 pass, which waits for the exclusive lock of rank 1."""
    boards = Boards(builds, 3, changes or [])
    boards.lock(1).waiting, boards.lock(1).holders = set_of(2), set_of(1)
    boards.step(LOCK_KERNEL, 0, LOCK, waits=owners, yields=yields, timeout_s=0.2)
    try:
        boards.machine.run(limit_s=10)
    except RunFailedError as error:
        assert "fault on rank 0: state=2, operation=8, sequence=0, block=0, peer=1" in str(error)
        # A rank that holds none of its locks keeps nobody waiting.
        assert [boards.lock(owner).holders for owner in range(3)] == [0, set_of(1), 0]
        return True
    assert [boards.lock(owner).holders & 1 for owner in range(3)] == [owner in owners for owner in range(3)]
    return False


def test_ranks_that_share_a_lock_let_waiting_ranks_pass(builds: Builds) -> None:
    assert lets_pass(builds, [1], yields=True)
    assert lets_pass(builds, [0, 1, 2], yields=True)
    assert not lets_pass(builds, [0, 1, 2], yields=False)
    assert not lets_pass(builds, [0, 2], yields=True)
    assert not lets_pass(builds, [1], yields=True, changes=[YIELDS])


def test_barrier_keeps_a_rank_from_locks_while_it_lets_ranks_pass(builds: Builds) -> None:
    with pytest.raises(AssertionError, match=r"assert \[1, 2, 1\]"):
        lets_pass(builds, [0, 1, 2], yields=True, changes=[Change("window.cu", "  __syncthreads();\n", "")])


def waits_for_one_turn(builds: Builds, changes: list[Change]) -> bool:
    """Return whether rank 1, which shares a lock, waits for one turn although rank 2 waits for ever."""
    boards = Boards(builds, 3, changes)
    boards.lock(0).waiting, boards.lock(0).last = set_of(2), 2
    boards.step(SYNCHRONISE_KERNEL, 1, FENCE, signals=[0])
    boards.step(LOCK_KERNEL, 1, LOCK, waits=[0], yields=True, timeout_s=2)
    boards.step(SYNCHRONISE_KERNEL, 0, FENCE, waits=[1])
    boards.step(LOCK_KERNEL, 0, LOCK, waits=[0], exclusive=True, nap_us=500_000)  # rank 1 waits meanwhile
    boards.step(LOCK_KERNEL, 0, LOCK, signals=[0], exclusive=True)
    with contextlib.suppress(RunFailedError):
        boards.machine.run(limit_s=10)
    return bool(boards.lock(0).holders == set_of(1))


def test_rank_that_lets_others_pass_counts_their_turns(builds: Builds) -> None:
    assert waits_for_one_turn(builds, [])
    assert not waits_for_one_turn(builds, [Change("window_lock.cuh", "- turns >= count", "- turns > count")])


def test_rank_that_waits_for_a_shared_lock_gets_it_before_the_next_exclusive_holder(builds: Builds) -> None:
    boards = Boards(builds, 3)
    boards.lock(0).holders = alone(2) | set_of(1)  # rank 1 waits
    boards.step(LOCK_KERNEL, 2, LOCK, signals=[0], exclusive=True)
    boards.step(LOCK_KERNEL, 2, LOCK, waits=[0], exclusive=True, timeout_s=0.2)
    with pytest.raises(RunFailedError, match=r"fault on rank 2: state=2, operation=8, sequence=0, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert boards.lock(0).holders == set_of(1)


@pytest.mark.parametrize("yields", [True, False])
def test_locks_of_all_ranks_and_of_single_ranks_wait_in_no_circle(builds: Builds, yields: bool) -> None:
    boards = Boards(builds, 4)
    for number in range(ROUNDS):
        for rank in range(4):
            owners = range(4) if rank < 2 else [(rank + number) % 2]
            boards.step(LOCK_KERNEL, rank, LOCK, waits=owners, exclusive=rank >= 2, yields=yields and rank < 2)
            boards.step(LOCK_KERNEL, rank, LOCK, signals=owners, exclusive=rank >= 2)
    boards.machine.run(seed=4, jitter_us=200, limit_s=30)
    assert [(boards.lock(owner).holders, boards.lock(owner).waiting) for owner in range(4)] == [(0, 0)] * 4
    assert [boards.lock(owner).turns for owner in range(4)] == [ROUNDS, ROUNDS, 0, 0]
