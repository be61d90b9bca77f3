"""CUDA events: events that processes share, events of this process, and a pool of them that tells when work is done."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from cuda.bindings import driver
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.context import CurrentContext, PrimaryContext
from mpicomm.devices.cuda.driver import DriverShutDownError, call, is_over
from mpicomm.errors import HandleError
from mpicomm.waiting import soon

EVENT_HANDLE_NBYTES = 64  # sizeof(CUipcEventHandle)


class CudaEvent:
    """An `Event` of CUDA, of this process or of a peer."""

    def __init__(self, context: PrimaryContext, event: Any) -> None:
        self._context = context
        self._event = event

    def export(self) -> bytes:
        """Return the key that a peer needs to open the event."""
        with self._context.current():
            handle = call(driver.cuIpcGetEventHandle, self._event)
        # The bindings offer an address of the handle, but no accessor for its bytes.
        return ctypes.string_at(handle.getPtr(), EVENT_HANDLE_NBYTES)

    def record(self, stream: int) -> None:
        """Mark the work enqueued on ``stream`` so far."""
        with self._context.current():
            call(driver.cuEventRecord, self._event, stream)

    def wait(self, stream: int) -> None:
        """Make ``stream`` wait for the latest `record`."""
        with self._context.current():
            call(driver.cuStreamWaitEvent, stream, self._event, 0)

    def close(self) -> None:
        """Release the event. A second call does nothing."""
        event, self._event = self._event, None
        if event is not None:
            with suppress(DriverShutDownError), self._context.current():
                call(driver.cuEventDestroy, event)


class LocalEvent:
    """An event whose address is ``ptr``, with a time only if it is ``timed``. Local.

    The device must be current at construction. The last reference destroys the event, in the context of its
    construction. The garbage collector may do this on a thread without a device. There the CUDA runtime would make a
    context on the first GPU: half a GiB of memory for each rank that has another GPU.
    """

    __slots__ = ("_context", "ptr")

    def __init__(self, *, timed: bool = False) -> None:
        self.ptr: int = 0
        self._context: int = cupy_driver.ctxGetCurrent()
        self.ptr = runtime.eventCreateWithFlags(runtime.eventDefault if timed else runtime.eventDisableTiming)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.ptr and not is_finalizing():
            # An error means that CUDA has ended in this process, or that this is a fork: the event is gone, too.
            with suppress(HandleError, runtime.CUDARuntimeError), CurrentContext(self._context, cupy_driver):
                runtime.eventDestroy(self.ptr)


class Completion(LocalEvent):
    """An event of the pool ``idle``."""

    __slots__ = ("_idle",)

    def __init__(self, idle: list[Completion]) -> None:
        super().__init__()
        self._idle = idle

    def passed(self) -> bool:
        """Return whether the work before the recorded event is done; for any thread.

        Callers do not call it again after it has returned true, because the event is then back in the pool.
        """
        # It raises if the device has failed, because work of a failed device is never done.
        if not is_over(driver.cuEventQuery, self.ptr):
            return False
        self._idle.append(self)
        return True

    def wait(self) -> None:
        """Block until the work before the recorded event is done. The event is then back in the pool."""
        # Most collectives end within these queries, which see the end some microseconds before the driver's wait does.
        if not soon(self.passed):
            call(driver.cuEventSynchronize, self.ptr)
            self._idle.append(self)


class Completions:
    """A pool of events of one device, because the driver takes longer to create an event than to record it.

    ``current`` makes the device current in a ``with`` block.
    """

    def __init__(self, current: Callable[[], AbstractContextManager[None]]) -> None:
        self._current = current
        self._idle: list[Completion] = []

    def take(self) -> Completion:
        """Return an event for the caller to record."""
        try:
            return self._idle.pop()
        except IndexError:  # a test beforehand is not enough: a thread that completes requests may take the last event
            with self._current():
                return Completion(self._idle)

    def give_back(self, event: Completion) -> None:
        """Let `take` return an event again that nobody has recorded."""
        self._idle.append(event)

    def close(self) -> None:
        """Destroy the events of the pool."""
        self._idle.clear()
