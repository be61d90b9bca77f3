"""The processor of the arrays, host or GPU, and the timing of calls on it. All times are in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

Call = Callable[[], object]


@dataclass(frozen=True)
class CallTimes:
    """The time of a call, and the time for which it held the caller. The second is None for calls of a graph."""

    complete: float
    issue: float | None = None


def time_calls(machine: Machine, call: Call, count: int) -> CallTimes:
    """Time ``count`` calls that the host issues one by one. Return the share of one call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    issued = time.perf_counter()
    machine.finish()
    finished = time.perf_counter()
    return CallTimes((finished - start) / count, (issued - start) / count)


class HostMachine:
    """The host: calls block, and the wall clock times them."""

    xp: Any = np
    stream: Any = None

    def current(self) -> AbstractContextManager[object]:
        """Return an empty context, because the host has no streams."""
        return nullcontext()

    def empty(self, nbytes: int) -> Any:
        """Return a NumPy array."""
        return np.empty(nbytes, np.uint8)

    def finish(self) -> None:
        """Do nothing, because calls on the host block."""

    def capture(self, call: Call, count: int) -> Any:
        """Return None, because the host has no graphs."""
        return None

    def launch(self, graph: Any) -> None:
        """Do nothing, because the host has no graphs."""

    def time_graph(self, graph: Any) -> CallTimes:
        """Raise NotImplementedError, because the host has no graphs."""
        raise NotImplementedError


class GpuMachine:
    """A GPU: calls go to one stream, which waits for no other stream, and CUDA events time them."""

    def __init__(self) -> None:
        import cupy

        self.xp: Any = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def current(self) -> AbstractContextManager[object]:
        """Make the stream CuPy's current stream, so that array expressions go there, too."""
        context: AbstractContextManager[object] = self.stream
        return context

    def empty(self, nbytes: int) -> Any:
        """Return a CuPy array."""
        return self.xp.empty(nbytes, np.uint8)

    def finish(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def capture(self, call: Call, count: int) -> Any:
        """Capture the calls into a CUDA graph. Return it with their number."""
        self.stream.begin_capture()
        try:
            for _ in range(count):
                call()
        except BaseException:
            # A stream that still captures is of no use. The error of `end_capture` adds nothing to the raised error.
            with suppress(RuntimeError):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return graph, count

    def launch(self, graph: Any) -> None:
        """Launch a graph on the stream."""
        captured, _ = graph
        captured.launch(self.stream)

    def time_graph(self, graph: Any) -> CallTimes:
        """Time the second of two launches in a row.

        In the first launch the ranks meet, and meanwhile the host enqueues the rest. So the timed launch starts on all
        GPUs at once and waits for no host.
        """
        captured, count = graph
        captured.launch(self.stream)
        self._start.record(self.stream)
        captured.launch(self.stream)
        self._stop.record(self.stream)
        self._stop.synchronize()
        milliseconds: float = self.xp.cuda.get_elapsed_time(self._start, self._stop)
        return CallTimes(milliseconds / 1e3 / count)


Machine = HostMachine | GpuMachine
"""One rank's processor. ``xp`` is its array library, and ``stream`` the stream of the calls, or None."""
