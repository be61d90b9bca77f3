"""The primary context of a device, made current for the length of a call."""

from __future__ import annotations

import contextlib

from cuda.bindings import driver
from cupy.cuda import driver as cupy_driver

from mpicomm.backend.cuda_driver import DeviceInfo, DriverShutDownError, call
from mpicomm.errors import HandleError


class PrimaryContext:
    """The context of one device that CuPy, PyTorch and the CUDA runtime use too, kept alive until `release`."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._context = int(call(driver.cuDevicePrimaryCtxRetain, device.ordinal))
        self._released = False

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block in which this context is current on the calling thread; the old one comes back."""
        return _Current(self._context)

    def release(self) -> None:
        """Let the context go; it lives on while others use it. A second call does nothing."""
        if not self._released:
            self._released = True
            with contextlib.suppress(DriverShutDownError):
                call(driver.cuDevicePrimaryCtxRelease, self.device.ordinal)


class _Current(contextlib.AbstractContextManager[None]):
    # A class of its own, and CuPy's functions: every device call goes through here, and a generator costs more than all
    # of this, the driver's binding ten times as much.
    __slots__ = ("_before", "_context")

    def __init__(self, context: int) -> None:
        self._context = context
        self._before = context

    def __enter__(self) -> None:
        try:
            self._before = cupy_driver.ctxGetCurrent()  # may be the null context, of a thread that never touched CUDA
            if self._before != self._context:
                cupy_driver.ctxSetCurrent(self._context)
        except cupy_driver.CUDADriverError as error:
            if error.status == driver.CUresult.CUDA_ERROR_DEINITIALIZED:
                raise DriverShutDownError(str(error)) from None
            raise HandleError(f"the context of a GPU cannot be made current: {error}") from None

    def __exit__(self, *_: object) -> None:
        if self._before != self._context:
            cupy_driver.ctxSetCurrent(self._before)
