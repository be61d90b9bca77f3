"""The locks of window.cu: one holder at a time, an order of accesses, turns for all ranks, and ranks that give up."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest

from mpicomm.kernels.window import COMES_FIRST, EXCLUSIVE_SHIFT, FENCE, LOCK, LOCK_KERNEL, MEET_KERNEL
from tests.kernels.build import Builds, Change
from tests.kernels.machine import RunFailedError, controls
from tests.kernels.words_rig import Boards, sum_of_words

ROUNDS = 25


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

    def play(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        for number in range(ROUNDS):
            for rank in range(self.size):
                self.enqueue(rank, number, nap_us=int(rng.choice((0, 0, 200))))
        self.machine.run(seed=seed, jitter_us=200, limit_s=30)
        self.check()

    def check(self) -> None:
        expected, found = sum_of_words(range(self.size), ROUNDS), int(self.sums[0].view(np.uint64)[0])
        assert found == expected, f"sums differ, first at 0: {found} instead of {expected}"
        left = self.lock(0).holders, self.lock(0).waiting
        assert left == (0, 0), f"ranks that hold the lock and wait for it differ, first at 0: {left} instead of none"


class SharedLocks(Locks):
    """Odd ranks write words of rank 0 under its lock. Even ranks share the lock, and read the words."""

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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_rank_at_a_time_holds_an_exclusive_lock(builds: Builds, size: int) -> None:
    Locks(builds, size).play()


def test_lock_orders_the_accesses_of_its_holders(watched_builds: Builds) -> None:
    Locks(watched_builds, 3).play()


def test_shared_lock_orders_accesses(watched_builds: Builds) -> None:
    SharedLocks(watched_builds, 4).play()


TAKE = "compare_and_swap_acquire(&lock->holders"


MISTAKES = {
    "release turned relaxed": Change("window_lock.cuh", "fetch_and_release(&lock", "fetch_and(&lock"),
    "acquire turned relaxed": Change("window_lock.cuh", TAKE, TAKE.replace("_acquire", "")),
    "no wait": Change("window_lock.cuh", "if (spin_until(taken, watch)) {", "if (taken()) {"),
    "lock taken that another rank holds": [
        Change("window_lock.cuh", "if (holders != 0 || first != rank) {", "if (first != rank) {"),
        Change("window_lock.cuh", "<< kExclusiveShift) == 0;\n  };\n  if", "<< kExclusiveShift) != 1;\n  };\n  if"),
    ],
}
OF_SHARED = {
    "acquires turned relaxed": [
        Change("window_lock.cuh", "fetch_or_acquire(&lock", "fetch_or(&lock"),
        Change("window_lock.cuh", "holders = load_acquire(&lock", "holders = load_relaxed(&lock"),
    ],
    "no wait": Change("window_lock.cuh", "if (!spin_until(taken, watch)) fetch_and(", "if (false) fetch_and("),
    "no bit": Change("window_lock.cuh", "u64 holders = fetch_or_acquire(&lock->holders, me);", "u64 holders = 0;"),
}


def broken(builds: Builds, locks: type[Locks], size: int, *, seed: int, changes: list[Change]) -> None:
    locks(builds, size, changes, timeout_s=2).play(seed)


test_broken_lock_is_seen = controls(partial(broken, locks=Locks, size=3), MISTAKES, watched=True)
test_broken_shared_lock_is_seen = controls(partial(broken, locks=SharedLocks, size=4), OF_SHARED, watched=True)


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
YIELDS = Change("window.cu", "if (takes && x.yields != 0 &&", "if (false &&")


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
    boards.step(MEET_KERNEL, 1, FENCE, signals=[0])
    boards.step(LOCK_KERNEL, 1, LOCK, waits=[0], yields=True, timeout_s=2)
    boards.step(MEET_KERNEL, 0, FENCE, waits=[1])
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
