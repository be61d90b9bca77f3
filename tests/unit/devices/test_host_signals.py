"""Signals and fences between threads of a host backend."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpicomm.devices.host import HostBackend, fence
from mpicomm.errors import CollectiveTimeoutError


class Signals:
    """The counters of one direction between two ranks."""

    def __init__(self) -> None:
        self.words = np.zeros(3, np.uint64)
        self.sent, self.inbox, self.expected = (self.words.ctypes.data + 8 * index for index in range(3))


def test_a_signal_tells_the_other_thread_that_the_data_is_there(backend: HostBackend) -> None:
    rounds = 200
    there, back = Signals(), Signals()
    box = np.zeros(1, np.int64)

    def echo() -> None:
        for _ in range(rounds):
            backend.wait_signal(there.expected, there.inbox, 0, 0)
            box[0] *= 2
            backend.signal(back.sent, back.inbox, 0)

    with ThreadPoolExecutor(1) as pool:
        echoing = pool.submit(echo)
        for number in range(rounds):
            box[0] = number
            backend.signal(there.sent, there.inbox, 0)
            backend.wait_signal(back.expected, back.inbox, 1, 0)
            assert box[0] == 2 * number
        echoing.result()


def test_signals_are_counted_ahead_of_their_waits() -> None:
    backend, signals = HostBackend(0.05), Signals()
    for _ in range(3):
        backend.signal(signals.sent, signals.inbox, 0)
    for _ in range(3):
        backend.wait_signal(signals.expected, signals.inbox, 7, 0)
    backend.check()
    with pytest.raises(CollectiveTimeoutError, match=r"number 4 from rank 7 did not come within 0\.05 s") as timeout:
        backend.wait_signal(signals.expected, signals.inbox, 7, 0)
    assert timeout.value.ranks == (7,)
    assert signals.words.tolist() == [3, 3, 3]
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="number 4 from rank 7 did not come") as timeout:
            backend.check()
        assert timeout.value.ranks == (7,)


def test_fences_of_many_threads_do_not_stop_each_other() -> None:
    def fence_often(thread: int) -> int:
        for _ in range(1000):
            fence()
        return thread

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(fence_often, range(8))) == list(range(8))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**63 - 2])
def test_signals_go_on_counting_beyond_32_bits(backend: HostBackend, start: int) -> None:
    sent, expected, inbox = (np.full(1, start, np.uint64) for _ in range(3))
    for _ in range(5):
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        for _ in range(2):
            backend.wait_signal(expected.ctypes.data, inbox.ctypes.data, 0, 0)
    assert [int(word[0]) for word in (sent, expected, inbox)] == [start + 10] * 3
