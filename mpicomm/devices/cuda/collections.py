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
        # Found now, as modules may be gone at the end of the interpreter, when garbage is still collected.
        self._get, self._set = cupy_driver.ctxGetCurrent, cupy_driver.ctxSetCurrent
        self._error = cupy_driver.CUDADriverError
        self._context = context
        self._lent = False  # one suffices: there is one collection at a time

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        """Make the context current before a collection if none is, and none again after it."""
        try:
            if phase == "start":
                if self._get() == 0:
                    self._set(self._context)
                    self._lent = True
            elif self._lent:
                self._lent = False
                self._set(0)
        except self._error:
            pass  # CUDA is over in this process, or it is the child of a fork: nothing can be destroyed, or made
