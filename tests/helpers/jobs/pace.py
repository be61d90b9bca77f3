"""Limits of tests that hold on a busy machine, too: they end a hang, or stretch with the time of a reference run."""

from __future__ import annotations

import time

HANG_S = 600.0
"""Ends a step of a test that hangs. No step takes so long, however busy the machine is."""

_REFERENCE_S = 0.02  # of the processor
_stretch: float | None = None


def measured() -> float:
    """Return how many times longer than alone this process computes now, and at least 2.

    The deadlines of tests are wide enough for twice the time.
    """
    start, begun = time.monotonic(), time.thread_time()
    while time.thread_time() - begun < _REFERENCE_S:
        pass
    return max(2.0, (time.monotonic() - start) / _REFERENCE_S)


def set_pace(times_longer: float | None) -> None:
    """Let `stretched` take this for `measured`, so that ranks agree; None to measure when it is called next."""
    global _stretch
    _stretch = times_longer and times_longer / 2


def stretched(seconds: float) -> float:
    """Return the time in which a busy machine does what this one does alone in ``seconds``."""
    if _stretch is None:
        set_pace(measured())
    assert _stretch is not None
    return round(seconds * _stretch, 1)
