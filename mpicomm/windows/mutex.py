"""A mutex of several processes in shared host memory, which the death of its holder does not lock for ever.

NumPy has no atomics. So the ranks of a window of host memory carry out atomic operations under the mutex of the target.
It is a robust mutex of POSIX threads. The critical sections are a few operations of NumPy, and wait for no rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator

from mpicomm.errors import HandleError
from mpicomm.interrupts import uninterrupted
from mpicomm.kernels.window import MUTEX_ROW, ROW_WORDS, WORD_NBYTES

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
