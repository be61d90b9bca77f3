"""LocalEvent: a CUDA event that only this process uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from cupy.cuda import driver, runtime

from mpicomm.devices.cuda.context import CurrentContext
from mpicomm.errors import HandleError


class LocalEvent:
    """An event whose address is ``ptr``, with a time only if it is ``timed``. Local.

    The device must be current at construction. The last reference destroys the event, in the context of its
    construction. The garbage collector may do this on a thread without a device. There the CUDA runtime would make a
    context on the first GPU: half a GiB of memory for each rank that has another GPU.
    """

    __slots__ = ("_context", "ptr")

    def __init__(self, *, timed: bool = False) -> None:
        self.ptr: int = 0
        self._context: int = driver.ctxGetCurrent()
        self.ptr = runtime.eventCreateWithFlags(runtime.eventDefault if timed else runtime.eventDisableTiming)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.ptr and not is_finalizing():
            # An error means that CUDA has ended in this process, or that this is a fork: the event is gone, too.
            with suppress(HandleError, runtime.CUDARuntimeError), CurrentContext(self._context, driver):
                runtime.eventDestroy(self.ptr)
