"""Wait for something that another process does: with low latency at first, without burning a core later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SPINS = 64  # polls without giving up the core: an answer that is nearly there comes within microseconds
_YIELD_S = 1e-3
_LONGEST_PAUSE_S = 1e-3


def wait_until(ready: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], object] | None = None) -> bool:
    """Call ``ready`` until it is true, and return True, or until ``timeout_s`` seconds are over, and return False.

    ``meanwhile`` is called between polls, once the wait is longer than the first spin.
    After a short spin it yields the core between polls, for ranks may outnumber cores and the one that is waited for
    needs one; after a millisecond it sleeps, longer and longer.
    """
    for _ in range(_SPINS):
        if ready():
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
