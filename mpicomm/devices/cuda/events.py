"""CUDA events: events that processes share, events of this process, and marks of streams by pooled events."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from cuda.bindings import driver
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import DriverShutDownError, call, event_is_done
from mpicomm.devices.cuda.memory import CurrentContext, PrimaryContext
from mpicomm.errors import HandleError
from mpicomm.waiting import spin

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


class Mark:
    """A point in the work of a stream. The last reference to the mark gives its event, at ``ptr``, back to the pool."""

    __slots__ = ("_pool", "ptr")

    def __init__(self, pointer: int, pool: EventPool) -> None:
        self.ptr = pointer
        self._pool = pool

    def __del__(self) -> None:
        # A stream that waits for the event waits for the record at that time, whatever comes later.
        self._pool.idle.append(self.ptr)

    def is_done(self) -> bool:
        """Return whether the work before the mark is done; for any thread."""
        # It raises if the device has failed, because work of a failed device is never done.
        return event_is_done(self.ptr)

    def wait(self) -> None:
        """Block until the work before the mark is done."""
        # Most collectives end within these queries, which see the end some microseconds before the driver's wait does.
        if not spin(self.is_done):
            call(driver.cuEventSynchronize, self.ptr)


class EventPool:
    """The events of marks, because the driver takes longer to create an event than to record it.

    ``current`` makes the device current in a ``with`` block. Marks have only the addresses, and the pool keeps the
    events. If a mark had the event, and a cycle of garbage had the mark, the garbage collector would call the
    finalizers of both. The event would be destroyed, and in the pool.
    """

    def __init__(self, current: Callable[[], AbstractContextManager[None]]) -> None:
        self._current = current
        self.events: dict[int, LocalEvent] = {}
        self.idle: list[int] = []

    def acquire(self) -> Mark:
        """Return a mark that the caller records."""
        try:
            return Mark(self.idle.pop(), self)
        except IndexError:  # a test beforehand is not enough: another thread may take the last event
            with self._current():
                event = LocalEvent()
            self.events[event.ptr] = event
            return Mark(event.ptr, self)

    def close(self) -> None:
        """Destroy the events that no mark has. The others end with the pool."""
        while self.idle:
            self.events.pop(self.idle.pop(), None)
