"""The mutex of windows of host memory: one holder at a time, also between processes, and a holder that dies."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mpicomm.devices.host import array_at
from mpicomm.kernels.window import BOARD_NBYTES
from mpicomm.windows import host_locks
from mpicomm.windows.host_locks import holding_mutex, make_mutex


@pytest.fixture
def board() -> Iterator[int]:
    """Memory that forked processes share."""
    memory = mmap.mmap(-1, BOARD_NBYTES)
    view = (ctypes.c_char * BOARD_NBYTES).from_buffer(memory)
    make_mutex(ctypes.addressof(view))
    yield ctypes.addressof(view)
    del view
    memory.close()


def in_child(act: object) -> int:
    """Start ``act`` in a forked process, and return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            act()  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def test_processes_add_up(board: int) -> None:
    number = array_at(board, 1, np.dtype(np.int64))

    def add() -> None:
        for _ in range(500):
            with holding_mutex(board):
                seen = int(number[0])
                os.sched_yield()
                number[0] = seen + 1

    children = [in_child(add) for _ in range(3)]
    add()
    for child in children:
        os.waitpid(child, 0)
    assert number[0] == 2000


def test_death_of_the_holder_lets_the_others_go_on(board: int) -> None:
    def die() -> None:
        host_locks._libc.pthread_mutex_lock(host_locks._mutex(board))
        os._exit(1)

    os.waitpid(in_child(die), 0)
    for _ in range(2):  # a mutex that were not made consistent would fail at the second time
        with holding_mutex(board):
            pass


def test_error_in_the_block_gives_the_mutex_up(board: int) -> None:
    with pytest.raises(ZeroDivisionError), holding_mutex(board):
        1 / 0  # noqa: B018
    taken = threading.Event()

    def take() -> None:
        with holding_mutex(board):
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert taken.wait(10)
    thread.join(10)  # it gives the mutex up before the memory goes


def test_thread_that_waits_lets_another_thread_go_on(board: int) -> None:
    entered = threading.Event()

    def hold() -> None:
        with holding_mutex(board):
            entered.set()
            time.sleep(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    with holding_mutex(board):  # a wait that kept Python's lock would keep the other thread in its block for ever
        pass
    thread.join(10)
    assert not thread.is_alive()
