"""PyTorch's current stream. The same functions of `torch.cuda` take three to ten times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 0)
"""Returns the address of the current stream of a GPU. Local. PyTorch without CUDA has no such function."""


def call_on(stream: torch.cuda.Stream, call: Callable[..., T], *arguments: Any) -> T:
    """Return ``call(*arguments)``, with ``stream`` as the current stream of its GPU, and its GPU as current device."""
    gpu = stream.device_index
    device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(gpu)
    torch._C._cuda_setStream(stream.stream_id, gpu, stream.device_type)
    try:
        return call(*arguments)
    finally:
        torch._C._cuda_setStream(*before)
        if device != gpu:  # the line above has made the GPU of the streams the current device
            torch._C._cuda_setDevice(device)
