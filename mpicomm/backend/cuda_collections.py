"""Garbage collections on threads without a device: they get one for as long as they take.

The collector runs on whatever thread happens to allocate, among them ones that have just begun and never touched CUDA.
If it finds streams, graphs or events there, their destruction makes a context on the first GPU, as whatever the CUDA
runtime is asked on such a thread does: half a GiB of it for each of the ranks whose GPU is another.
"""

from __future__ import annotations

from typing import Any


class CollectionContext:
    """A callback of the garbage collector, for good: ``context`` stays as long as the process.

    ``cupy_driver`` is ``cupy.cuda.driver``.
    """

    def __init__(self, cupy_driver: Any, context: int) -> None:
        self._driver = cupy_driver
        self._context = context
        self._lent = False  # one suffices: there is one collection at a time

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        """Make the context current before a collection if none is, and none again after it."""
        try:
            if phase == "start":
                if self._driver.ctxGetCurrent() == 0:
                    self._driver.ctxSetCurrent(self._context)
                    self._lent = True
            elif self._lent:
                self._lent = False
                self._driver.ctxSetCurrent(0)
        except self._driver.CUDADriverError:
            pass  # CUDA is over in this process, or it is the child of a fork: nothing can be destroyed, or made
