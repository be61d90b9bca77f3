"""Streams of a GPU: the meaning of a ``stream=`` argument, the threads that use each stream, captures and ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import cupy
from cuda.bindings import driver
from cupy.cuda import get_current_stream, runtime

from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.events import Mark
from mpicomm.devices.cuda.memory import PrimaryContext
from mpicomm.devices.cuda.side_streams import SideStreams
from mpicomm.devices.cuda.stream_threads import StreamThreads, ThreadsOfStreams
from mpicomm.errors import InvalidUsageError

_ACCEPTED = "pass a CuPy or PyTorch stream, an object with __cuda_stream__, an int, or leave stream out"


def resolve_stream(stream: Any, array: Any, ordinal: int) -> int:
    """Return the ``CUstream`` that ``stream`` names.

    ``None`` is the stream that is current on GPU ``ordinal`` in the library of ``array``: PyTorch for its tensors, CuPy
    for everything else. Local; raises `InvalidUsageError`.
    """
    torch = sys.modules.get("torch")  # only a program that has imported torch can pass its objects
    if stream is None:
        if torch is not None and isinstance(array, torch.Tensor):
            # The same as torch.cuda.current_stream(ordinal).cuda_stream, without the two objects that this makes.
            return int(torch._C._cuda_getCurrentRawStream(ordinal))
        return int(get_current_stream(ordinal).ptr)
    if isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
        return int(stream.ptr)
    if torch is not None and isinstance(stream, torch.cuda.Stream):
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        try:
            version, pointer = stream.__cuda_stream__()
        except (TypeError, ValueError) as error:
            raise InvalidUsageError(
                f"stream={stream!r}: __cuda_stream__ must be a method that returns (0, address): {error}"
            ) from error
        if version != 0:
            raise InvalidUsageError(
                f"stream={stream!r} has version {version} of __cuda_stream__, mpicomm reads 0: pass its address as an "
                "int"
            )
        return int(pointer)
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

    def waits_for_null(stream: int) -> bool | None:
        with cupy.cuda.Device(ordinal):
            if runtime.streamIsCapturing(stream):
                return None  # the query of flags would end the capture
            return not int(call(driver.cuStreamGetFlags, stream)) & driver.CUstream_flags.CU_STREAM_NON_BLOCKING

    return ThreadsOfStreams(waits_for_null)


class StreamsOfGpu:
    """The part of `CudaBackend` for the streams of GPU ``ordinal``, in the context that the backend holds."""

    def __init__(self, ordinal: int, context: PrimaryContext) -> None:
        self._ordinal = ordinal
        self._context = context
        self._threads = threads_of(ordinal)
        self.side_streams = SideStreams(context)
        self.permanent_streams = {0}
        """The addresses of streams that the process never destroys: the default stream, and streams that
        `mpicomm.torch` takes from PyTorch's pool."""
        self.add_user = self._threads.add_user
        """Registers the calling thread as a user of a stream: see `ThreadsOfStreams.add_user`."""

    def stream(self, stream: Any, array: Any = None) -> int:
        """Return the address of a ``stream=`` argument; ``None`` is the current stream of ``array``'s library.

        It registers the calling thread as a user of the stream.
        """
        # The usual cases are quick, because every call comes here.
        if stream is None and type(array) is cupy.ndarray:
            resolved: int = get_current_stream(self._ordinal).ptr
        elif type(stream) is cupy.cuda.Stream:
            resolved = stream.ptr
        else:
            resolved = resolve_stream(stream, array, self._ordinal)
        self._threads.add_user(resolved)
        return resolved

    def threads(self, stream: int) -> StreamThreads:
        """Return the threads that use a stream. `stream` or `eager_stream` has returned this stream."""
        return self._threads.of(stream)

    def needs_side_stream(self, stream: int, array: Any) -> bool:
        """Return whether a blocking call on ``array`` must not wait in ``stream``, because several threads use it.

        See `mpicomm.devices.cuda.stream_threads`.
        """
        # PyTorch itself calls from several threads: the threads of the program and of autograd. It keeps their order,
        # and expects that no call waits for the GPU.
        return self._threads.of(stream).is_shared and not (is_tensor(array) or self.is_capturing(stream))

    def needs_host_barrier(self, stream: int, array: Any) -> bool:
        """Return whether a blocking collective needs a barrier on the host, because several threads use the device.

        See `mpicomm.devices.cuda.stream_threads`.
        """
        # Tensors do not count the threads: backward passes have a separate thread, and a count takes long.
        several = self._threads.was_shared and not is_tensor(array) and self._threads.is_shared
        return several and not self.is_capturing(stream)

    def is_capturing(self, stream: int) -> bool:
        """Return whether ``stream`` captures a graph, so that its work becomes part of the graph."""
        # This look is cheaper than a change of context, and the device nearly always is current, because a new
        # Communicator makes its GPU current.
        if runtime.getDevice() != self._ordinal:
            with self._context.current():
                return self.is_capturing(stream)
        return bool(runtime.streamIsCapturing(stream))

    def completion(self, stream: int) -> Callable[[], bool]:
        """Return a function that says whether the work that ``stream`` has at this call is done.

        A stream that captures a graph runs nothing, so its work counts as done.
        """
        mark = self._recorded(stream)
        return (lambda: True) if mark is None else mark.is_done

    def wait(self, stream: int) -> None:
        """Wait for the work that ``stream`` has at this call, unless it captures.

        It waits for an event and not for the stream. Another thread may enqueue more work there, which waits for a peer
        that waits for this thread.
        """
        mark = self._recorded(stream)
        if mark is not None:
            mark.wait()

    def _recorded(self, stream: int) -> Mark | None:
        """Return a mark after the work that ``stream`` has at this call; None if it captures."""
        return None if self.is_capturing(stream) else self.side_streams.mark(stream)
