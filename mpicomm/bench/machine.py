"""Where the arrays are, host or GPU, and how calls on them are timed there. Seconds throughout."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """What a call took, and what of that the caller waited for; the second is None for calls of a graph."""

    complete: float
    issue: float | None = None


class Machine(Protocol):
    """One rank's processor."""

    xp: Any
    stream: Any

    def current(self) -> AbstractContextManager[object]:
        """Array expressions within go to the stream that the calls are on."""

    def empty(self, nbytes: int) -> Any:
        """Return ordinary memory of this library, as bytes."""

    def finish(self) -> None:
        """Wait for everything that was enqueued."""

    def capture(self, call: Call, count: int) -> Any:
        """Return ``count`` calls as something to launch; None where there is no such thing."""

    def launch(self, graph: Any) -> None:
        """Enqueue what `capture` returned."""

    def time_graph(self, graph: Any) -> Times:
        """Time one launch of what `capture` returned; one call's share of it."""


def time_calls(machine: Machine, call: Call, count: int) -> Times:
    """Time ``count`` calls, each issued by the host: one call's share of it."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    issued = time.perf_counter()
    machine.finish()
    finished = time.perf_counter()
    return Times((finished - start) / count, (issued - start) / count)


class Host:
    """Calls block, and the wall clock tells."""

    xp: Any = np
    stream = None

    def current(self) -> AbstractContextManager[object]:
        """Nothing to do."""
        return nullcontext()

    def empty(self, nbytes: int) -> Any:
        """Return a NumPy array."""
        return np.empty(nbytes, np.uint8)

    def finish(self) -> None:
        """Nothing to do."""

    def capture(self, call: Call, count: int) -> Any:
        """There are no graphs."""
        return None

    def launch(self, graph: Any) -> None:
        """There are no graphs."""

    def time_graph(self, graph: Any) -> Times:
        """There are no graphs."""
        raise NotImplementedError


class Gpu:
    """Calls go to one stream that waits for no other; CUDA events tell."""

    def __init__(self) -> None:
        import cupy

        self.xp: Any = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def current(self) -> AbstractContextManager[object]:
        """Make the stream CuPy's current one."""
        context: AbstractContextManager[object] = self.stream
        return context

    def empty(self, nbytes: int) -> Any:
        """Return a CuPy array."""
        return self.xp.empty(nbytes, np.uint8)

    def finish(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def capture(self, call: Call, count: int) -> Any:
        """Capture the calls into a CUDA graph, which remembers how many they are."""
        self.stream.begin_capture()
        try:
            for _ in range(count):
                call()
        except BaseException:
            # A stream that is left capturing is of no use any more; that the graph is broken is no news.
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

    def time_graph(self, graph: Any) -> Times:
        """Time the second of two launches in a row.

        In the first one the ranks meet, and it gives the host the time to enqueue the rest: what is timed starts on all
        GPUs at once and waits for no host.
        """
        captured, count = graph
        captured.launch(self.stream)
        self._start.record(self.stream)
        captured.launch(self.stream)
        self._stop.record(self.stream)
        self._stop.synchronize()
        milliseconds: float = self.xp.cuda.get_elapsed_time(self._start, self._stop)
        return Times(milliseconds / 1e3 / count)
