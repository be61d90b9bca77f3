"""Plan: the steps of a collective on GPUs, ready to be enqueued again and again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import cupy

from mpicomm.backend.cuda_order import Enqueue
from mpicomm.collectives.device_launch import Launch
from mpicomm.kernels.load import Kernel


class Plan:
    """Steps with all that they need, and the call they carry out in words.

    ``collective`` is whether all ranks make such a call, so that they can be compared.
    """

    def __init__(self, text: str, steps: Sequence[Enqueue], *, collective: bool = True) -> None:
        self.text = text
        self.collective = collective
        self.steps = tuple(steps)
        self.launch: Enqueue | None = None
        """Enqueues the steps as a graph, once there is one."""
        self._graph: Any = None

    def enqueue(self, stream: int) -> None:
        """Enqueue the steps one by one; the device's context must be current."""
        for step in self.steps:
            step(stream)

    def make_graph(self, stream: cupy.cuda.Stream) -> None:
        """Make `launch` by a capture on ``stream``, which is idle: it is enqueued in a third of the time."""
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            self.enqueue(stream.ptr)
        finally:
            self._graph = stream.end_capture()
        self.launch = partial(cupy.cuda.runtime.graphLaunch, self._graph.graphExec)

    def drop_graph(self) -> None:
        """Destroy the graph, if there is one."""
        self.launch = self._graph = None


def launching(kernel: Kernel, launch: Launch) -> Enqueue:
    """Return the step that launches a loaded kernel."""
    return lambda stream: kernel.launch_structure(
        stream, launch.arguments, blocks=launch.blocks, threads=launch.threads, early=launch.early
    )
