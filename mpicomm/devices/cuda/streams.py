"""The meaning of a ``stream=`` argument, and the threads that use each stream."""

from __future__ import annotations

import functools
import sys
from typing import Any

import cupy
from cuda.bindings import driver

from mpicomm.devices.cuda.driver import call
from mpicomm.devices.stream_threads import ThreadsOfStreams
from mpicomm.errors import InvalidUsageError

_ACCEPTED = "pass a CuPy or PyTorch stream, an object with __cuda_stream__, an int, or leave stream out"


def resolve_stream(stream: Any, array: Any, ordinal: int) -> int:
    """Return the ``CUstream`` that ``stream`` names.

    ``None`` is the stream that is current on GPU ``ordinal`` in the library of ``array``: PyTorch for its tensors, CuPy
    for everything else. Local; raises `InvalidUsageError`.
    """
    torch = sys.modules.get("torch")  # only a program that has imported torch can pass its objects
    if stream is None:
        current: int
        if torch is not None and isinstance(array, torch.Tensor):
            # The same as torch.cuda.current_stream(ordinal).cuda_stream, without the two objects that this makes.
            current = torch._C._cuda_getCurrentRawStream(ordinal)
        else:
            current = cupy.cuda.get_current_stream(ordinal).ptr
        return current
    if isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
        return int(stream.ptr)
    if torch is not None and isinstance(stream, torch.cuda.Stream):
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        return _from_protocol(stream)
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise InvalidUsageError(f"stream={stream} is no address of a CUDA stream; {_ACCEPTED}")
        return stream
    raise InvalidUsageError(f"stream={stream!r} is a {type(stream).__name__}; {_ACCEPTED}")


def is_tensor(array: Any) -> bool:
    """Return whether ``array`` is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


@functools.cache
def threads_of(ordinal: int) -> ThreadsOfStreams:
    """Return the threads of each stream of GPU ``ordinal``: one object for all communicators of the process."""
    return ThreadsOfStreams(functools.partial(_waits_for_null, ordinal))


def _waits_for_null(ordinal: int, stream: int) -> bool | None:
    with cupy.cuda.Device(ordinal):
        if cupy.cuda.runtime.streamIsCapturing(stream):
            return None  # the query of flags would end the capture
        return not int(call(driver.cuStreamGetFlags, stream)) & driver.CUstream_flags.CU_STREAM_NON_BLOCKING


def _from_protocol(stream: Any) -> int:
    try:
        version, pointer = stream.__cuda_stream__()
    except (TypeError, ValueError) as error:
        raise InvalidUsageError(
            f"stream={stream!r}: __cuda_stream__ must be a method that returns (0, address): {error}"
        ) from error
    if version != 0:
        raise InvalidUsageError(
            f"stream={stream!r} has version {version} of __cuda_stream__, mpicomm reads 0: pass its address as an int"
        )
    return int(pointer)
