"""The locks of windows of host memory: turns for all ranks, and ranks that give up."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator

import pytest

from mpicomm.kernels.window import BOARD_NBYTES, EXCLUSIVE_SHIFT, lock_of
from mpicomm.windows.host_locks import HostLocks, LateError, make_mutex

RANKS = 3


@pytest.fixture
def boards() -> Iterator[list[int]]:
    memory = [mmap.mmap(-1, BOARD_NBYTES) for _ in range(RANKS)]
    views = [(ctypes.c_char * BOARD_NBYTES).from_buffer(each) for each in memory]
    addresses = [ctypes.addressof(view) for view in views]
    for address in addresses:
        make_mutex(address)
    yield addresses
    views.clear()


class Ranks:
    """The locks of all ranks in one process. A rank that waits lets ``meanwhile`` act once."""

    def __init__(self, boards: list[int]) -> None:
        self.boards = boards
        self.ranks = [HostLocks(boards, rank) for rank in range(RANKS)]

    def take(
        self,
        rank: int,
        *owners: int,
        exclusive: bool = False,
        yields: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        def wait(ready: Callable[[], bool]) -> bool:
            if ready():
                return True
            meanwhile()
            return ready()

        self.ranks[rank].take(owners, wait, exclusive=exclusive, yields=yields)

    def give(self, rank: int, *owners: int) -> None:
        self.ranks[rank].give(owners)

    def state(self, owner: int) -> tuple[int, int]:
        lock = lock_of(self.boards[owner])
        return lock.holders, lock.waiting


def alone(rank: int) -> int:
    return rank + 1 << EXCLUSIVE_SHIFT


@pytest.mark.parametrize("exclusive", [False, True])
def test_holder_is_named_and_the_rank_waits_no_longer(boards: list[int], exclusive: bool) -> None:
    ranks = Ranks(boards)
    ranks.take(2, 0, exclusive=True)
    with pytest.raises(LateError) as caught:
        ranks.take(1, 0, exclusive=exclusive)
    assert (caught.value.peer, caught.value.comes_first) == (2, False)
    assert ranks.state(0) == (alone(2), 0)
    ranks.give(2, 0)
    assert ranks.state(0) == (0, 0)


def test_first_of_several_holders_is_named(boards: list[int]) -> None:
    ranks = Ranks(boards)
    ranks.take(1, *range(RANKS))
    ranks.take(2, 0)
    with pytest.raises(LateError) as caught:
        ranks.take(0, 0, exclusive=True)
    assert (caught.value.peer, caught.value.comes_first) == (1, False)
    ranks.give(1, *range(RANKS))
    ranks.take(0, 0, exclusive=True, meanwhile=lambda: ranks.give(2, 0))
    assert ranks.state(0) == (alone(0), 0)


def test_exclusive_lock_goes_around(boards: list[int]) -> None:
    ranks = Ranks(boards)
    ranks.take(0, 0, exclusive=True)
    ranks.give(0, 0)
    lock_of(boards[0]).waiting = 1 << 2
    with pytest.raises(LateError) as caught:  # the rank that gave the lock up lets rank 2 go first
        ranks.take(0, 0, exclusive=True)
    assert (caught.value.peer, caught.value.comes_first) == (2, True)
    ranks.take(2, 0, exclusive=True)
    ranks.give(2, 0)
    lock_of(boards[0]).waiting = 1 << 1
    ranks.take(0, 0, exclusive=True)
    assert ranks.state(0) == (alone(0), 1 << 1)


def test_rank_that_shares_a_lock_lets_waiting_ranks_pass(boards: list[int]) -> None:
    ranks, lock = Ranks(boards), lock_of(boards[1])
    lock.waiting = 1 << 2
    with pytest.raises(LateError) as caught:
        ranks.take(0, 0, 1, yields=True)
    assert (caught.value.peer, caught.value.comes_first) == (2, True)
    assert ranks.state(0)[0] == ranks.state(1)[0] == 0  # it holds nothing while it lets a rank pass
    ranks.take(0, 0, 1)
    ranks.give(0, 0, 1)

    def turn() -> None:
        ranks.take(2, 1, exclusive=True)
        ranks.give(2, 1)
        lock.waiting = 1 << 2  # it waits again at once

    ranks.take(0, 0, 1, yields=True, meanwhile=turn)
    assert ranks.state(1) == (1, 1 << 2)


def test_rank_that_waits_for_a_shared_lock_gets_it_before_the_next_exclusive_holder(boards: list[int]) -> None:
    ranks = Ranks(boards)
    ranks.take(2, 0, exclusive=True)

    def again() -> None:
        ranks.give(2, 0)
        with pytest.raises(LateError) as caught:
            ranks.take(2, 0, exclusive=True)
        assert (caught.value.peer, caught.value.comes_first) == (1, False)

    ranks.take(1, 0, meanwhile=again)
    assert ranks.state(0) == (1 << 1, 0)


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_rank_that_is_interrupted_when_it_has_a_lock_gives_all_up(boards: list[int], exclusive: bool) -> None:
    ranks = Ranks(boards)

    def wait(ready: Callable[[], bool]) -> bool:
        taken = ready()
        if ranks.state(1)[0]:  # as a Ctrl-C does at the end of the critical section that has taken the lock
            raise KeyboardInterrupt
        return taken

    with pytest.raises(KeyboardInterrupt):
        ranks.ranks[0].take((0, 1), wait, exclusive=exclusive, yields=False)
    assert [ranks.state(owner) for owner in (0, 1)] == [(0, 0), (0, 0)]
