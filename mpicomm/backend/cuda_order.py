"""The order of work that is enqueued on several streams but must not overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from mpicomm.backend.cuda_driver import DriverShutDownError, call


class StreamOrder:
    """Makes each piece of work wait for the one enqueued before it, whichever streams they are on.

    While a stream captures a graph, that holds among the pieces of the same capture. Between a graph and anything else
    it does not: an event recorded outside a capture cannot be waited for inside (the driver refuses it, as the graph
    would wait for something that happened once), nor the other way round. When a graph runs is for whoever launches it
    to say, in the usual way: on one stream, or with events of their own.
    """

    def __init__(self) -> None:
        # Two, since an event that was last recorded in a capture can no longer be waited for outside it.
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._eager: Any = call(driver.cuEventCreate, int(flags))
        self._captured: Any = call(driver.cuEventCreate, int(flags))
        self._capture: int | None = None  # the one that `_captured` was recorded in

    @contextlib.contextmanager
    def turn(self, stream: int) -> Iterator[None]:
        """Give a ``with`` block whose work on ``stream`` follows that of the blocks before. Local, does not block."""
        capture = _capture_of(stream)
        event = self._eager if capture is None else self._captured
        if capture is None or capture == self._capture:
            # Without a look at which stream was used last: a new one may have the address of one that was destroyed
            # with work pending. Waiting for an event that was never recorded, or on the same stream, costs nothing.
            call(driver.cuStreamWaitEvent, stream, event, 0)
        yield
        call(driver.cuEventRecord, event, stream)
        if capture is not None:
            self._capture = capture

    def close(self) -> None:
        """Destroy the events. A second call does nothing."""
        for event in (self._eager, self._captured):
            if event is not None:
                with contextlib.suppress(DriverShutDownError):
                    call(driver.cuEventDestroy, event)
        self._eager = self._captured = None


def _capture_of(stream: int) -> int | None:
    """Return the number of the capture that ``stream`` takes part in; numbers are not used again."""
    if int(call(driver.cuStreamIsCapturing, stream)) == 0:
        return None
    return int(call(driver.cuStreamGetCaptureInfo, stream)[1])
