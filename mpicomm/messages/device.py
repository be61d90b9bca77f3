"""SideStream, and the protocol of a GPU under the name that the modules of messages use."""

from __future__ import annotations

from typing import Any

from mpicomm.devices.base import GpuBackend as MessageDevice
from mpicomm.devices.base import SideStreams
from mpicomm.devices.wait_beside import beside

__all__ = ["MessageDevice", "SideStream", "SideStreams", "beside"]


class SideStream:
    """A ``with`` block that has a side stream to itself. If ``after`` is given, the work follows that mark."""

    __slots__ = ("_after", "_stream", "_streams")

    def __init__(self, streams: SideStreams, after: Any = None) -> None:
        self._streams = streams
        self._after = after

    def __enter__(self) -> int:
        self._stream = self._streams.take(self._after)
        return self._stream

    def __exit__(self, *exception: object) -> None:
        self._streams.give_back(self._stream)
