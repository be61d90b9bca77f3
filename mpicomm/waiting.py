"""Wait for another process: with low latency at first, and later without keeping a core busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SPINS = 64  # polls before the first yield: many answers come within microseconds
_YIELD_S = 1e-3
_LONGEST_PAUSE_S = 1e-3


def soon(ready: Callable[[], bool]) -> bool:
    """Call ``ready`` until it returns true, for some microseconds; return whether it did."""
    return any(ready() for _ in range(_SPINS))


def wait_until(ready: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], object] | None = None) -> bool:
    """Call ``ready`` until it returns true, and return True; return False after ``timeout_s`` seconds.

    The wait spins for some microseconds. Then it yields the core between polls, because ranks may outnumber cores and
    the peer needs a core. After a millisecond it sleeps between polls, longer and longer. From the first yield on, it
    calls ``meanwhile`` between polls.
    """
    if soon(ready):
        return True
    start = now = time.monotonic()
    while now < start + _YIELD_S:
        os.sched_yield()
        if meanwhile is not None:
            meanwhile()
        if ready():
            return True
        now = time.monotonic()
    pause_s = 1e-5
    while not ready():
        if time.monotonic() > start + timeout_s:
            return False
        if meanwhile is not None:
            meanwhile()
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    return True
