"""StreamsOfGpu: the streams of one GPU, as a `GpuBackend` shows them: their threads, their captures and their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
from cupy.cuda import get_current_stream, runtime

from mpicomm.devices.cuda.completion import Completions
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.streams import is_tensor, resolve_stream, threads_of
from mpicomm.devices.stream_threads import StreamThreads


class StreamsOfGpu:
    """The part of a `GpuBackend` for the streams of GPU ``ordinal``, in the context that the backend holds."""

    def __init__(self, ordinal: int, context: PrimaryContext) -> None:
        self._ordinal = ordinal
        self._context = context
        self._threads = threads_of(ordinal)
        self.lasting_streams = {0}
        self.note = self._threads.note
        """Counts the calling thread among the users of a stream: see `ThreadsOfStreams.note`."""
        self.completions = Completions(context.current)
        """The events after nonblocking work."""

    def stream(self, stream: Any, array: Any = None) -> int:
        """Return the address of a ``stream=`` argument."""
        # The usual cases are quick, because every call comes here.
        if stream is None and type(array) is cupy.ndarray:
            resolved: int = get_current_stream(self._ordinal).ptr
        elif type(stream) is cupy.cuda.Stream:
            resolved = stream.ptr
        else:
            resolved = resolve_stream(stream, array, self._ordinal)
        self._threads.note(resolved)
        return resolved

    def threads(self, stream: int) -> StreamThreads:
        """Return the threads that use a stream which this backend has resolved."""
        return self._threads.of(stream)

    def waits_beside(self, stream: int, array: Any) -> bool:
        """Return whether a blocking call on ``array`` and its thread wait for peers beside ``stream``."""
        # PyTorch itself calls from several threads: the threads of the program and of autograd. It keeps their order,
        # and expects that no call waits for the GPU.
        return self._threads.of(stream).are_several and not (is_tensor(array) or self.is_capturing(stream))

    def meets(self, stream: int, array: Any) -> bool:
        """Return whether the ranks meet on the host before a blocking collective on ``array`` begins."""
        # Tensors do not count the threads: backward passes have a separate thread, and a count takes long.
        several = self._threads.have_been_several and not is_tensor(array) and self._threads.are_several
        return several and not self.is_capturing(stream)

    def is_capturing(self, stream: int) -> bool:
        # This look is cheaper than a change of context, and the device is nearly always this device, because a new
        # Communicator makes its GPU current.
        if runtime.getDevice() == self._ordinal:
            return bool(runtime.streamIsCapturing(stream))
        with self._context.current():
            return bool(runtime.streamIsCapturing(stream))

    def completion(self, stream: int) -> Callable[[], bool]:
        """Return a function that says whether the work that ``stream`` has at this call is done; for any thread.

        A stream that captures a graph runs nothing, so its work counts as done.
        """
        if runtime.getDevice() != self._ordinal:  # as in `is_capturing`
            with self._context.current():
                return self._completion(stream)
        return self._completion(stream)

    def _completion(self, stream: int) -> Callable[[], bool]:
        if runtime.streamIsCapturing(stream):
            return lambda: True
        event = self.completions.take()
        runtime.eventRecord(event.ptr, stream)
        return event.passed
