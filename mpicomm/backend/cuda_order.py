"""The order of work that is enqueued on several streams but must not overlap."""

from __future__ import annotations

import contextlib
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

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
        self._eager_pointer = int(self._eager)
        self._capture: int | None = None  # the one that `_captured` was recorded in

    def begin(self, stream: int) -> int | None:
        """Let what is enqueued on ``stream`` until `end` follow what came before. Local, does not block.

        Returns the capture that the stream takes part in, None if it does not. The device must be current.
        """
        # CuPy's functions where a call is to take few microseconds in all: each takes a third of the driver's binding.
        if not runtime.streamIsCapturing(stream):
            # Without a look at which stream was used last: a new one may have the address of one that was destroyed
            # with work pending. Waiting for an event that was never recorded, or on the same stream, costs nothing.
            runtime.streamWaitEvent(stream, self._eager_pointer)
            return None
        capture = int(call(driver.cuStreamGetCaptureInfo, stream)[1])
        if capture == self._capture:
            call(driver.cuStreamWaitEvent, stream, self._captured, 0)
        return capture

    def end(self, stream: int, capture: int | None) -> None:
        """Mark the end of what `begin` was called for and returned ``capture``. Local, does not block."""
        if capture is None:
            runtime.eventRecord(self._eager_pointer, stream)
        else:
            call(driver.cuEventRecord, self._captured, stream)
            self._capture = capture

    def close(self) -> None:
        """Destroy the events. A second call does nothing."""
        for event in (self._eager, self._captured):
            if event is not None:
                with contextlib.suppress(DriverShutDownError):
                    call(driver.cuEventDestroy, event)
        self._eager = self._captured = None
