"""The primary context of a device, which calls make current on their thread while they run."""

from __future__ import annotations

import contextlib
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.base import DeviceInfo, Segment
from mpicomm.devices.cuda.driver import DriverShutDownError, call
from mpicomm.errors import HandleError


class PrimaryContext:
    """The context of one device that CuPy, PyTorch and the CUDA runtime use, too. It lives until `release`."""

    def __init__(self, device: DeviceInfo) -> None:
        from cupy.cuda import driver as cupy_driver  # not above: faults.py imports this module without CuPy, too

        self.device = device
        self.segments: set[Segment] = set()
        """The open segments. A Ctrl-C may leave the last reference to a segment here: see `CudaBackend.close`."""
        self._driver = cupy_driver
        self._context = int(call(driver.cuDevicePrimaryCtxRetain, device.ordinal))
        self._released = False

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block in which this context is current on the calling thread."""
        return CurrentContext(self._context, self._driver)

    def is_current(self) -> bool:
        """Return whether this context is current on the calling thread."""
        try:
            return bool(self._driver.ctxGetCurrent() == self._context)
        except self._driver.CUDADriverError:  # a thread that has not used CUDA
            return False

    def release(self) -> None:
        """Release the context; it lives on while others use it. A second call does nothing."""
        if not self._released:
            self._released = True
            with contextlib.suppress(DriverShutDownError):
                call(driver.cuDevicePrimaryCtxRelease, self.device.ordinal)


class CurrentContext(contextlib.AbstractContextManager[None]):
    """A ``with`` block in which a context is current on the calling thread. Its end restores the previous context.

    ``cupy_driver`` is ``cupy.cuda.driver``.
    """

    # Every device call goes through here, so speed counts. A generator takes longer than all this code, and the
    # driver's binding takes ten times as long as CuPy's functions.
    __slots__ = ("_before", "_context", "_driver")

    def __init__(self, context: int, cupy_driver: Any) -> None:
        self._driver = cupy_driver
        self._context = context
        self._before = context

    def __enter__(self) -> None:
        try:
            self._before = self._driver.ctxGetCurrent()  # 0 on a thread that has not used CUDA
            if self._before != self._context:
                self._driver.ctxSetCurrent(self._context)
        except self._driver.CUDADriverError as error:
            if int(error.status) == int(driver.CUresult.CUDA_ERROR_DEINITIALIZED):
                raise DriverShutDownError(str(error)) from None
            raise HandleError(f"the context of a GPU cannot be made current: {error}") from None

    def __exit__(self, *_: object) -> None:
        if self._before != self._context:
            self._driver.ctxSetCurrent(self._before)
