"""Work that waits for peers beside a stream that several threads use: stream_threads.py says why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpicomm.devices.base import GpuBackend


@contextlib.contextmanager
def beside(backend: GpuBackend, stream: int) -> Iterator[int]:
    """Give a side stream for work that waits for peers; wait for this work at the end of the ``with`` block.

    The work follows the work that ``stream`` has at this call. Raises as `check` does.
    """
    streams = backend.side_streams
    side = streams.take(streams.mark(stream))
    try:
        yield side
        backend.synchronize(side)
    finally:
        streams.give_back(side)
    backend.check()
