"""PyTorch's current stream. The same functions of `torch.cuda` take three to ten times as long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 0)
"""Returns the address of the current stream of a GPU. Local. PyTorch without CUDA has no such function."""


class CurrentStream(AbstractContextManager[None]):
    """A ``with`` block in which ``stream`` is the current stream of its GPU, and its GPU is the current device.

    Only one thread at a time may use it.
    """

    __slots__ = ("_before", "_device", "_gpu", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = self._before = stream.stream_id, stream.device_index, stream.device_type
        self._device = self._gpu = stream.device_index

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(self._gpu)
        torch._C._cuda_setStream(*self._stream)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._before)
        if self._device != self._gpu:  # the line above has made the GPU of the streams the current device
            torch._C._cuda_setDevice(self._device)
