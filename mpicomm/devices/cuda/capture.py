"""Captures of CUDA graphs: the capture of a stream, and relaxed threads.

While one thread captures in CUDA's default mode, CUDA forbids all threads most calls that are no stream work. Such a
call spoils the graph. A thread can exempt itself: then it is *relaxed*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cuda.bindings import driver

from mpicomm.devices.cuda.driver import call


def capture_of(stream: int) -> int:
    """Return the number of the capture of ``stream``. The number is unique in this process."""
    return int(call(driver.cuStreamGetCaptureInfo, stream)[1])


def takes_part(stream: int) -> bool:
    """Return whether ``stream`` takes part in a capture. A capture that is invalid and has not ended counts, too.

    CuPy's function takes a third of the time, but raises for an invalid capture.
    """
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return bool(call(driver.cuStreamIsCapturing, stream) != none)


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Make the calling thread relaxed inside a ``with`` block."""
    before = relax()
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, before)


def relax() -> driver.CUstreamCaptureMode:
    """Make the calling thread relaxed from here on; return its previous mode."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return call(driver.cuThreadExchangeStreamCaptureMode, mode)
