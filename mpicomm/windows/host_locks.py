"""The locks of windows of host memory: the algorithm of window_lock.cuh, under the mutex of the lock's owner.

NumPy has no atomics. So the ranks of a window of host memory carry out atomic operations under the mutex of the target.
It is a robust mutex of POSIX threads, which the death of its holder does not lock for ever. The critical sections are a
few operations of NumPy, and wait for no rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator

from mpicomm.errors import HandleError
from mpicomm.interrupts import uninterrupted
from mpicomm.kernels.window import EXCLUSIVE_SHIFT, MUTEX_ROW, ROW_WORDS, WORD_NBYTES, LockWords, lock_of

_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_ATTRIBUTES_NBYTES = 64  # more than a pthread_mutexattr_t of any machine
# Not PyDLL: a thread that waits for the mutex must let another thread of this process give it up.
_libc = ctypes.CDLL(None)


def make_mutex(board: int) -> None:
    """Make the mutex of a board. Local; no other rank may use the board yet."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_NBYTES)
    _require(_libc.pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
    _require(_libc.pthread_mutexattr_setpshared(attributes, _SHARED), "pthread_mutexattr_setpshared")
    _require(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST), "pthread_mutexattr_setrobust")
    _require(_libc.pthread_mutex_init(_mutex(board), attributes), "pthread_mutex_init")


@contextlib.contextmanager
def holding_mutex(board: int) -> Iterator[None]:
    """Hold the mutex of a board in a ``with`` block. It orders all accesses in blocks of all ranks."""
    mutex = _mutex(board)
    with uninterrupted():  # a Ctrl-C between the lock and the block would leave the mutex locked
        status = _libc.pthread_mutex_lock(mutex)
        if status == errno.EOWNERDEAD:
            # The holder has died in its block. The elements that it was writing may be old or new, as after the death
            # of a rank in a Put. All other elements are right, so the others go on.
            _require(_libc.pthread_mutex_consistent(mutex), "pthread_mutex_consistent")
        else:
            _require(status, "pthread_mutex_lock")
        try:
            yield
        finally:
            _require(_libc.pthread_mutex_unlock(mutex), "pthread_mutex_unlock")


def _mutex(board: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(board + MUTEX_ROW * ROW_WORDS * WORD_NBYTES)


def _require(status: int, call: str) -> None:
    if status:
        raise HandleError(f"{call} failed: {os.strerror(status)}")


Wait = Callable[[Callable[[], bool]], bool]
"""Calls a function until it returns true, and returns whether it did in time."""


class LateError(Exception):
    """A lock was not free in time. ``peer`` holds it, or has its turn before this rank (``comes_first``)."""

    def __init__(self, peer: int, *, comes_first: bool) -> None:
        super().__init__()
        self.peer = peer
        self.comes_first = comes_first


class HostLocks:
    """The locks of all ranks; window_lock.cuh says why no rank starves.

    The mutex around each change of a lock is also the acquire and the release.
    """

    def __init__(self, boards: list[int], rank: int) -> None:
        self._boards = boards
        self._locks = [lock_of(board) for board in boards]
        self._rank = rank
        self._me = 1 << rank

    def take(self, owners: Iterable[int], wait: Wait, *, exclusive: bool, yields: bool) -> None:
        """Take locks. Raises `LateError`."""
        owners = list(owners)
        if yields:
            # No lock is taken before this rank has let others pass at all locks. Otherwise it could hold a lock for
            # which a rank waits that it lets pass at another lock.
            for owner in owners:
                self._yield_to_waiting(self._locks[owner], wait)
        try:
            for owner in owners:
                (self._take_exclusive if exclusive else self._take_shared)(owner, wait)
        except BaseException:
            # No later call would give up what this rank holds or awaits. It may hold the last lock, too, because a
            # Ctrl-C comes at the end of the critical section that has taken it.
            self.give(owners)
            raise

    def give(self, owners: Iterable[int]) -> None:
        """Give locks up, and the turn to take them."""
        for owner in owners:
            lock = self._locks[owner]
            with holding_mutex(self._boards[owner]):
                lock.waiting &= ~self._me
                lock.holders &= ~self._me
                if lock.holders >> EXCLUSIVE_SHIFT == self._rank + 1:
                    lock.holders &= (1 << EXCLUSIVE_SHIFT) - 1

    def _yield_to_waiting(self, lock: LockWords, wait: Wait) -> None:
        ahead, turns = lock.waiting, lock.turns
        count = ahead.bit_count()

        def passed() -> bool:
            nonlocal ahead
            ahead &= lock.waiting
            return not ahead or lock.turns - turns >= count

        if not wait(passed):
            raise _obstacle(lock, first_of(ahead))

    def _take_exclusive(self, owner: int, wait: Wait) -> None:
        board, lock, first = self._boards[owner], self._locks[owner], 0
        with holding_mutex(board):
            lock.waiting |= self._me

        def taken() -> bool:
            nonlocal first
            with holding_mutex(board):
                first = first_after(lock.waiting, lock.last)
                if lock.holders or first != self._rank:
                    return False
                lock.holders = (self._rank + 1) << EXCLUSIVE_SHIFT
                lock.waiting &= ~self._me
                lock.last = self._rank
                lock.turns += 1
                return True

        if not wait(taken):
            raise _obstacle(lock, first)

    def _take_shared(self, owner: int, wait: Wait) -> None:
        board, lock = self._boards[owner], self._locks[owner]
        with holding_mutex(board):
            lock.holders |= self._me

        def taken() -> bool:
            with holding_mutex(board):
                return not lock.holders >> EXCLUSIVE_SHIFT

        if not wait(taken):
            raise _obstacle(lock, 0)


def first_of(ranks: int) -> int:
    """Return the first rank of a set that is not empty; 0 of an empty set."""
    return max((ranks & -ranks).bit_length() - 1, 0)


def first_after(ranks: int, last: int) -> int:
    """Return the rank of a set that has the first turn after rank ``last``, in the circle of ranks."""
    return first_of(ranks >> (last + 1) << (last + 1) or ranks)


def _obstacle(lock: LockWords, first: int) -> LateError:
    holders = lock.holders
    if not holders:
        return LateError(first, comes_first=True)
    alone = holders >> EXCLUSIVE_SHIFT
    return LateError(alone - 1 if alone else first_of(holders), comes_first=False)
