"""The kernels of window.cu around kernels that write into the memory of other ranks: fences, groups and locks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import (
    BOARD_NBYTES,
    EXCLUSIVE_SHIFT,
    FENCE,
    LOCK,
    LOCK_KERNEL,
    LOCK_ROW,
    MEET_KERNEL,
    ROW_WORDS,
    START,
    WAIT,
    WINDOW_THREADS,
    SynchronisationArguments,
)
from tests.kernels.build import Builds, Change
from tests.kernels.launches import kernel_of
from tests.kernels.machine import CAUGHT, RunFailedError
from tests.kernels.words_rig import WORDS, WordsRig

ROUNDS = 25


class Boards(WordsRig):
    """Ranks with boards; subclasses say how the ranks synchronise."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, (), changes)
        self.boards = [self.machine.allocate(rank, BOARD_NBYTES) for rank in range(size)]
        self.tables = [
            self.machine.place(rank, np.array(self.machine.addresses(self.boards, rank), np.uint64))
            for rank in range(size)
        ]
        self._timeout_s = timeout_s
        self._kernels = {each: kernel_of(builds, each, changes) for each in (MEET_KERNEL, LOCK_KERNEL)}

    def step(
        self,
        kernel: Variant,
        rank: int,
        operation: int,
        *,
        signals: Sequence[int] = (),
        waits: Sequence[int] = (),
        kind: int = 0,
        exclusive: bool = False,
        timeout_s: float = 0,
        nap_us: int = 0,
    ) -> None:
        sets = (sum(1 << each for each in ranks) for ranks in (signals, waits))
        faults = self.machine.faults[rank]
        limits = int((timeout_s or self._timeout_s) * 1e9), faults.record, faults.failed
        arguments = SynchronisationArguments(
            self.tables[rank].address, *sets, *limits, rank, kind, operation, exclusive
        )
        self.machine.launch(rank, self._kernels[kernel], [arguments], blocks=1, threads=WINDOW_THREADS, nap_us=nap_us)

    def lock_word(self, rank: int) -> int:
        return int(self.boards[rank].view(np.uint64)[LOCK_ROW * ROW_WORDS])


class Fences(Boards):
    """Every rank writes into the next rank's memory between two fences, and adds up its own."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following = (rank + 1) % self.size
        others = [each for each in range(self.size) if each != rank]
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        for act in ("write", "read"):
            self.step(MEET_KERNEL, rank, FENCE, signals=others, waits=others, nap_us=nap_us)
            if act == "write":
                self.add(rank, self.words[rank].address)


class Groups(Boards):
    """The same with Post, Start, Complete and Wait, between neighbours only."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = (rank + 1) % self.size, (rank - 1) % self.size
        self.step(MEET_KERNEL, rank, START, kind=1, signals=[previous])
        self.step(MEET_KERNEL, rank, START, kind=1, waits=[following], nap_us=nap_us)
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.step(MEET_KERNEL, rank, WAIT, kind=2, signals=[following], nap_us=nap_us)
        self.step(MEET_KERNEL, rank, WAIT, kind=2, waits=[previous])
        self.add(rank, self.words[rank].address)


class Locks(Boards):
    """Every rank adds its words to one sum of rank 0, in plain loads and stores under the lock of rank 0."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        self.write(rank, self.words[rank].address, number)
        self.step(LOCK_KERNEL, rank, LOCK, waits=[0], exclusive=True, nap_us=nap_us)
        total = self.machine.address(0, self.sums[0], rank)
        self.add_to(rank, total)
        self.step(LOCK_KERNEL, rank, LOCK, signals=[0], exclusive=True)

    def add_to(self, rank: int, total: int) -> None:
        own, self.sums[rank] = self.sums[rank], self.sums[rank].__class__(total, self.sums[rank].bytes)
        self.add(rank, self.words[rank].address)
        self.sums[rank] = own

    def check(self) -> None:
        rng = np.random.default_rng(self.size)
        for number in range(ROUNDS):
            for rank in range(self.size):
                self.enqueue(rank, number, nap_us=int(rng.choice((0, 0, 200))))
        self.machine.run(seed=self.size, jitter_us=200, limit_s=30)
        firsts = [rank + number * 10**6 for rank in range(self.size) for number in range(ROUNDS)]
        expected = sum(WORDS * first + sum(range(WORDS)) for first in firsts)
        found = int(self.sums[0].view(np.uint64)[0])
        assert found == expected, f"sums differ, first at 0: {found} instead of {expected}"
        assert self.lock_word(0) == 0


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rig", [Fences, Groups])
def test_data_is_there_after_the_synchronisation(builds: Builds, rig: type[Boards], size: int) -> None:
    rig(builds, size).run(ROUNDS)


@pytest.mark.parametrize("rig", [Fences, Groups])
def test_no_race(watched_builds: Builds, rig: type[Boards]) -> None:
    rig(watched_builds, 3).run(ROUNDS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_rank_at_a_time_holds_an_exclusive_lock(builds: Builds, size: int) -> None:
    Locks(builds, size).check()


def test_lock_orders_the_accesses_of_its_holders(watched_builds: Builds) -> None:
    Locks(watched_builds, 3).check()


@pytest.mark.parametrize(
    "change",
    [
        Change("window.cu", "store_release(row(x, peer, 0)", "store_relaxed(row(x, peer, 0)"),
        Change("window.cu", "load_acquire(inbox)", "load_relaxed(inbox)"),
        Change("window.cu", "if (spin_until(reached, watch)) *expected", "*expected"),
    ],
    ids=["release turned relaxed", "acquire turned relaxed", "no wait"],
)
@pytest.mark.parametrize("rig", [Fences, Groups])
def test_race_is_seen(watched_builds: Builds, rig: type[Boards], change: Change) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        rig(watched_builds, 3, [change]).run(ROUNDS)


@pytest.mark.parametrize(
    "change",
    [
        Change("window.cu", "compare_and_swap_release(lock", "compare_and_swap(lock"),
        Change("window.cu", "compare_and_swap_acquire(lock", "compare_and_swap(lock"),
        Change("window.cu", "spin_until(taken, watch);", "taken();"),
        Change("window.cu", "x.exclusive != 0 ? seen != 0 :", "x.exclusive != 0 ? false :"),
    ],
    ids=["release turned relaxed", "acquire turned relaxed", "no wait", "lock taken that another rank holds"],
)
def test_broken_lock_is_seen(watched_builds: Builds, change: Change) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        Locks(watched_builds, 3, [change], timeout_s=2).check()


def test_ranks_share_a_lock_and_keep_an_exclusive_holder_out(builds: Builds) -> None:
    boards = Boards(builds, 3)
    for rank in range(2):
        boards.step(LOCK_KERNEL, rank, LOCK, waits=range(3))
    boards.machine.run(limit_s=10)
    assert [boards.lock_word(rank) for rank in range(3)] == [0b11] * 3
    boards.step(LOCK_KERNEL, 0, LOCK, signals=range(3))
    boards.step(LOCK_KERNEL, 2, LOCK, waits=[1], exclusive=True, timeout_s=0.3)
    with pytest.raises(RunFailedError, match=r"fault on rank 2: state=2, operation=8, sequence=0, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert boards.lock_word(1) == 0b10


def test_rank_that_holds_a_lock_for_ever_is_named(builds: Builds) -> None:
    boards = Boards(builds, 3)
    boards.boards[0].view(np.uint64)[LOCK_ROW * ROW_WORDS] = 2 << EXCLUSIVE_SHIFT
    boards.step(LOCK_KERNEL, 2, LOCK, waits=[0], timeout_s=0.2)
    boards.step(LOCK_KERNEL, 2, LOCK, signals=[0])  # a rank that has failed gives no lock up
    with pytest.raises(RunFailedError, match=r"fault on rank 2: state=2, operation=8, sequence=0, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert boards.lock_word(0) == 2 << EXCLUSIVE_SHIFT


def test_rank_that_does_not_come_is_named_and_is_sent_nothing_more(builds: Builds) -> None:
    boards = Boards(builds, 2)
    boards.step(MEET_KERNEL, 0, WAIT, kind=2, waits=[1], timeout_s=0.2)
    boards.step(MEET_KERNEL, 0, FENCE, signals=[1], waits=[1])
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=7, sequence=1, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert not boards.boards[1].bytes.any()
