"""Plan: the steps of a collective on GPUs, ready to be enqueued again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy

from mpicomm.collectives.device_launch import Launch
from mpicomm.kernels.load import Kernel

Enqueue = Callable[[int], object]
"""Enqueues one thing on a stream, or on another that is in order with it."""


class Plan:
    """Steps with all that they need, and the call they carry out in words."""

    def __init__(self, text: str, steps: Sequence[Enqueue]) -> None:
        self.text = text
        self.steps = tuple(steps)
        self.graph: int | None = None
        """The address of the plan as an executable graph, once there is one."""
        self._owner: Any = None

    def enqueue(self, stream: int) -> None:
        """Enqueue the steps one by one; the device's context must be current."""
        for step in self.steps:
            step(stream)

    def make_graph(self, stream: cupy.cuda.Stream) -> None:
        """Make `graph` by a capture on ``stream``, which is idle: it is launched in a third of the time."""
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            self.enqueue(stream.ptr)
        finally:
            self._owner = stream.end_capture()
        self.graph = int(self._owner.graphExec)


def launching(kernel: Kernel, launch: Launch) -> Enqueue:
    """Return the step that launches a loaded kernel."""
    return lambda stream: kernel.launch_structure(
        stream, launch.arguments, blocks=launch.blocks, threads=launch.threads, early=launch.early
    )
