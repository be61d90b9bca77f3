"""AccessOrder: the order of accesses and synchronisations of a window that are on several streams."""

from __future__ import annotations

from typing import Any

from mpicomm.devices.cuda.types import GpuBackend

_DEFAULT_STREAMS = (0, 1, 2)  # the null stream, cudaStreamLegacy and cudaStreamPerThread


class AccessOrder:
    """The order of this rank's accesses to a window on its streams. All methods are local, and do not block.

    A synchronisation follows the accesses on all streams since the synchronisation before it. The next accesses on
    other streams follow it. As with collectives, this does not hold between a captured graph and other work, because
    CUDA refuses events across a capture. The program orders launches of its graphs.
    """

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._stream = 0  # the stream of the last synchronisation
        self._mark: Any = None  # the point after the last synchronisation; None if no other work has to follow it
        self._followed: set[int] = set()  # streams that follow the last synchronisation
        self._accesses: dict[int, Any] = {}  # the point after the last access, by stream
        self._accessed_here = False  # whether a default stream has accesses after a synchronisation on it

    def resolve(self, stream: Any, array: Any) -> tuple[int, bool]:
        """Return the address of a ``stream=`` argument, and whether the stream captures a graph; as ``Backend.stream``.

        Raises the error of earlier work, if there is one.
        """
        eager = self._backend.eager_stream(stream, array)  # one call is cheaper than two
        return (self._backend.stream(stream, array), True) if eager is None else (eager, False)

    def before_access(self, stream: int, *, captures: bool) -> None:
        """Let ``stream``, on which an access goes next, follow the last synchronisation."""
        if self._mark is not None and stream != self._stream and stream not in self._followed and not captures:
            self._backend.side_streams.wait_event(stream, self._mark)
            self._followed.add(stream)

    def after_access(self, stream: int, *, captures: bool) -> None:
        """Record an access that is enqueued on ``stream``."""
        if captures:
            return
        # A mark takes a microsecond. It is needed because the program may destroy the stream before the next
        # synchronisation. No program destroys a default stream, so that synchronisation waits for the stream itself.
        if stream in _DEFAULT_STREAMS and stream == self._stream:
            self._accessed_here = True
        else:
            self._accesses[stream] = self._backend.side_streams.mark(stream, self._accesses.get(stream))

    def before_synchronisation(self, stream: int, *, captures: bool) -> None:
        """Let ``stream``, on which a synchronisation goes next, follow all accesses and the last synchronisation."""
        if captures:
            return
        for mark in self._accesses.values():
            self._backend.side_streams.wait_event(stream, mark)
        if stream == self._stream:
            return
        if self._accessed_here:
            self._backend.side_streams.wait_stream(stream, self._stream)
        elif self._mark is not None:
            self._backend.side_streams.wait_event(stream, self._mark)

    def after_synchronisation(self, stream: int, *, captures: bool) -> None:
        """Record a synchronisation that is enqueued on ``stream``."""
        if not captures:
            self._stream, self._mark = stream, self._backend.side_streams.mark(stream)
            self._accesses.clear()
            self._accessed_here = False
            self._followed.clear()
