"""The processor of the arrays, host or GPU, and the timing of calls on it. All times are in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator

Call = Callable[[], object]


@dataclass(frozen=True)
class CallTimes:
    """The time of a call, and the time for which it held the caller. The second is None for calls of a graph."""

    complete: float
    issue: float | None = None


class Machine:
    """One rank's processor, here the host: calls block, the wall clock times them, and there are no graphs."""

    xp: Any = np
    """The array library."""
    stream: Any = None
    """The stream of the calls; None on the host."""

    def current(self) -> AbstractContextManager[object]:
        """Return a ``with`` block in which array expressions go to the stream, too."""
        return nullcontext()

    def empty(self, nbytes: int) -> Any:
        """Return an array of bytes."""
        return self.xp.empty(nbytes, np.uint8)

    def finish(self) -> None:
        """Wait for the stream."""

    def capture(self, call: Call, count: int) -> Any:
        """Capture ``count`` calls into a CUDA graph, for `launch` and `time_graph`. Return None without graphs."""
        return None

    def launch(self, graph: Any) -> None:
        """Launch a graph on the stream."""
        raise NotImplementedError

    def time_graph(self, graph: Any) -> CallTimes:
        """Return the time of one call of a graph."""
        raise NotImplementedError

    def time_calls(self, call: Call, count: int) -> CallTimes:
        """Time ``count`` calls that the host issues one by one. Return the share of one call."""
        start = time.perf_counter()
        for _ in range(count):
            call()
        issued = time.perf_counter()
        self.finish()
        finished = time.perf_counter()
        return CallTimes((finished - start) / count, (issued - start) / count)


class GpuMachine(Machine):
    """A GPU: calls go to one stream, which waits for no other stream, and CUDA events time them."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.stream
        return context

    def finish(self) -> None:
        self.stream.synchronize()

    def capture(self, call: Call, count: int) -> Any:
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


def machine_of(comm: Communicator) -> Machine:
    """Return the machine with the arrays of a communicator."""
    return Machine() if comm.device == "cpu" else GpuMachine()
