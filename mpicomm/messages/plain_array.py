"""Contiguous arrays of CuPy and PyTorch on one GPU, read with few calls of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpicomm.messages.device import MessageDevice
from mpicomm.mpi import types

PlainArray = tuple[int, int, int]
"""The address and the bytes of an array, and the stream of its copies. A named tuple takes four times as long."""


def read_plain(device: MessageDevice, array: Any, stream: Any) -> PlainArray | None:
    """Return a plain array on a GPU whose stream captures no graph; None for all other buffers.

    Local. Raises the error of an earlier call.
    """
    read = READERS.get(type(array)) or _reader_of(type(array))
    found = None if read is None else read(array, device.device)
    resolved = None if found is None else device.eager_stream(stream, array)
    return None if found is None or resolved is None else (*found, resolved)


def read_both(device: MessageDevice, first: Any, second: Any, stream: Any) -> tuple[PlainArray, PlainArray] | None:
    """Return two plain arrays, None unless both are; as `read_plain`."""
    read = READERS.get(type(first))
    if read is None or type(first) is not type(second):
        one = read_plain(device, first, stream)
        other = None if one is None else read_plain(device, second, stream)
        return None if one is None or other is None else (one, other)
    # One class has one current stream.
    ordinal = device.device
    one_place, other_place = read(first, ordinal), read(second, ordinal)
    if one_place is None or other_place is None:
        return None
    resolved = device.eager_stream(stream, first)
    return None if resolved is None else ((*one_place, resolved), (*other_place, resolved))


Reader = Callable[[Any, "int | str"], "tuple[int, int] | None"]
"""Returns the address and the bytes of an array on the GPU with that ordinal, None for any other array."""

READERS: dict[type, Reader] = {}
"""By the class of an array, as programs pass arrays of these classes."""


def _read_cupy(array: Any, ordinal: int | str) -> tuple[int, int] | None:
    data = array.data
    # `array.flags`, which is public, takes eight times as long.
    return (data.ptr, array.nbytes) if array._c_contiguous and data.device_id == ordinal else None


def _read_torch(tensor: Any, ordinal: int | str) -> tuple[int, int] | None:
    plain = (
        tensor.is_cuda
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and tensor.get_device() == ordinal
        and types.torch_dtype(tensor.dtype) is not None
    )
    return (tensor.data_ptr(), tensor.nbytes) if plain else None


def _reader_of(cls: type) -> Reader | None:
    # No object of a library exists before the program has imported the library.
    for module, name, reader in (("cupy", "ndarray", _read_cupy), ("torch", "Tensor", _read_torch)):
        if cls is getattr(sys.modules.get(module), name, None):
            READERS[cls] = reader
    return READERS.get(cls)
