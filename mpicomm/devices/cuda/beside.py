"""Work on a side stream, and work that waits for peers beside a stream of several threads: see stream_threads.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mpicomm.devices.cuda.types import GpuBackend, SideStreams


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


@contextlib.contextmanager
def beside(backend: GpuBackend, stream: int, after: Any = None) -> Iterator[int]:
    """Give a side stream for work that waits for peers; wait for this work at the end of the ``with`` block.

    The work follows the mark ``after``, or the work that ``stream`` has at this call. Raises as `check` does.
    """
    streams = backend.side_streams
    with SideStream(streams, streams.mark(stream) if after is None else after) as side:
        yield side
        backend.synchronize(side)
    backend.check()
