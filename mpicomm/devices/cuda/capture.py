"""Captures of CUDA graphs: which of them a stream takes part in, and what threads may do while there are any.

While a thread captures in CUDA's default mode, much that is no stream work is forbidden to it and to all other threads,
and spoils the graph, unless a thread says that it means it: then it is *relaxed*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cuda.bindings import driver

from mpicomm.devices.cuda.driver import call


def capture_of(stream: int) -> int:
    """Return the number of the capture that ``stream`` takes part in; no other in this process has the same."""
    return int(call(driver.cuStreamGetCaptureInfo, stream)[1])


def takes_part(stream: int) -> bool:
    """Return whether ``stream`` takes part in a capture, also in one that was invalidated and has not ended yet.

    For the latter CuPy's function, which takes a third of the time, raises.
    """
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return bool(call(driver.cuStreamIsCapturing, stream) != none)


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let the calling thread be relaxed inside a ``with`` block."""
    before = relax()
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, before)


def relax() -> driver.CUstreamCaptureMode:
    """Let the calling thread be relaxed from here on; return what it was."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return call(driver.cuThreadExchangeStreamCaptureMode, mode)
