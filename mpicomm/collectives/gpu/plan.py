"""Plan: the steps of a collective on GPUs, ready to be enqueued again and again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.collectives.gpu.choose import NO_CHOICE, AlgorithmChoice
from mpicomm.devices.cuda.load import Kernel
from mpicomm.devices.cuda.stream_order import Enqueue

if TYPE_CHECKING:
    import cupy


class Plan:
    """The steps of one call, ready to be enqueued.

    ``text`` is the call in words, for errors. ``choice`` says its algorithm, for records. ``collective`` is whether all
    ranks make the call, so that the ranks' calls can be compared.
    """

    def __init__(
        self, text: str, steps: Sequence[Enqueue], choice: AlgorithmChoice = NO_CHOICE, *, collective: bool = True
    ) -> None:
        self.text = self.words = text
        self.count = 0
        """The words and the count of the call for `CallLog.post`."""
        self.choice = choice
        self.collective = collective
        self.private_nbytes: int | None = None
        """This rank's longest message, where only the two ranks of a message know its length; else None."""
        self.is_old = False
        """Whether the call has to be planned again, because ranks may change the memory that it uses."""
        self.steps = tuple(steps)
        self.launch: Enqueue | None = None
        """Enqueues the steps as a graph, once there is one."""
        self._graph: Any = None

    def __str__(self) -> str:
        return self.text

    def enqueue(self, stream: int) -> None:
        """Enqueue the steps one by one; the device's context must be current."""
        for step in self.steps:
            step(stream)

    def make_graph(self, stream: cupy.cuda.Stream) -> None:
        """Make `launch` by a capture on ``stream``, which is idle. A graph is enqueued faster than its steps.

        An exception, also a Ctrl-C, leaves neither a capture nor a graph behind.
        """
        try:
            stream.begin_capture(runtime.streamCaptureModeRelaxed)
            self.enqueue(stream.ptr)
        except BaseException:
            # CUDA refuses to end a capture between a fork and its join, or one that has not begun. Its error must not
            # replace the exception that is being handled, which may be a Ctrl-C.
            with suppress(runtime.CUDARuntimeError):
                stream.end_capture()
            raise
        self._graph = stream.end_capture()
        self.launch = partial(runtime.graphLaunch, self._graph.graphExec)

    def drop_graph(self) -> None:
        """Destroy the graph, if there is one."""
        self.launch = self._graph = None


def launching(kernel: Kernel, launch: Launch) -> Enqueue:
    """Return the step that launches a loaded kernel."""
    launcher = kernel.launcher(launch.arguments, early=launch.early)
    return partial(launcher.launch, blocks=launch.blocks, threads=launch.threads)
