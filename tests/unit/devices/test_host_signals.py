"""Signals and fences between threads of a host backend."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpicomm.devices.host import HostBackend, fence


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
