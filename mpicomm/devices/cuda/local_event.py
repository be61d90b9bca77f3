"""LocalEvent: a CUDA event of this process alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from cupy.cuda import driver, runtime

from mpicomm.devices.cuda.context import CurrentContext
from mpicomm.errors import HandleError


class LocalEvent:
    """An event whose address is ``ptr``, with a time only if it is ``timed``. Local.

    The device must be current when it is made. Its last reference destroys it, in the context in which it was made.
    That may happen on a thread without a device, where the garbage collector happens to run: the CUDA runtime, left
    alone, would make a context on the first GPU there, half a GiB of memory for each of the ranks whose GPU is another.
    """

    __slots__ = ("_context", "ptr")

    def __init__(self, *, timed: bool = False) -> None:
        self.ptr: int = 0
        self._context: int = driver.ctxGetCurrent()
        self.ptr = runtime.eventCreateWithFlags(runtime.eventDefault if timed else runtime.eventDisableTiming)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.ptr and not is_finalizing():
            # An error means that CUDA is over in this process, or that a fork made it: the event is gone, too.
            with suppress(HandleError, runtime.CUDARuntimeError), CurrentContext(self._context, driver):
                runtime.eventDestroy(self.ptr)
