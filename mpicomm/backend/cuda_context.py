"""The primary context of a device, made current for the length of a call."""

from __future__ import annotations

import contextlib
from typing import Any

from cuda.bindings import driver

from mpicomm.backend.cuda_driver import DeviceInfo, DriverShutDownError, call


class PrimaryContext:
    """The context of one device that CuPy, PyTorch and the CUDA runtime use too, kept alive until `release`."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._context: Any = call(driver.cuDevicePrimaryCtxRetain, device.ordinal)
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
    # A class of its own: every device call goes through here, and a generator costs more than the two driver calls.
    __slots__ = ("_before", "_context")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._before: Any = None

    def __enter__(self) -> None:
        before = call(driver.cuCtxGetCurrent)
        if int(before) != int(self._context):
            call(driver.cuCtxSetCurrent, self._context)
            self._before = before  # may be the null context, of a thread that never touched CUDA

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            call(driver.cuCtxSetCurrent, self._before)
