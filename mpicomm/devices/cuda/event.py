"""CUDA events that processes share."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.driver import DriverShutDownError, call

EVENT_HANDLE_NBYTES = 64  # sizeof(CUipcEventHandle)


class CudaEvent:
    """An `Event` of CUDA, of this process or of a peer."""

    def __init__(self, context: PrimaryContext, event: Any) -> None:
        self._context = context
        self._event = event

    def export(self) -> bytes:
        with self._context.current():
            handle = call(driver.cuIpcGetEventHandle, self._event)
        # The bindings offer an address of the handle, but no accessor for its bytes.
        return ctypes.string_at(handle.getPtr(), EVENT_HANDLE_NBYTES)

    def record(self, stream: int) -> None:
        with self._context.current():
            call(driver.cuEventRecord, self._event, stream)

    def wait(self, stream: int) -> None:
        with self._context.current():
            call(driver.cuStreamWaitEvent, stream, self._event, 0)

    def close(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            with suppress(DriverShutDownError), self._context.current():
                call(driver.cuEventDestroy, event)
