"""Plan: the steps of a collective on GPUs, which can be enqueued again and again. StepLoader: prepares steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.base import NO_CHOICE, AlgorithmChoice, AnyPlan, Copy, Fork, LibraryWork, Step
from mpicomm.devices.cuda.load import KernelCache
from mpicomm.devices.cuda.side_streams import ForkedStream
from mpicomm.devices.cuda.stream_order import Enqueue
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.kernels.variant import Launch

if TYPE_CHECKING:
    from mpicomm.devices.cuda.launches import LaunchGraph


class Plan(AnyPlan):
    """The steps of one call. ``text`` names the call in errors, and ``choice`` its algorithm in records."""

    def __init__(
        self, text: str, steps: Sequence[Enqueue], choice: AlgorithmChoice = NO_CHOICE, *, collective: bool = True
    ) -> None:
        self.text_format = text
        self.choice = choice
        self.collective = collective
        self.is_new = True
        """Whether the plan was not enqueued yet. Then the call log has the call already."""
        self.steps = tuple(steps)
        self.launch: Enqueue | None = None
        """Enqueues the steps as a graph; None until there is a graph."""
        self._graph: LaunchGraph | None = None

    def enqueue(self, stream: int) -> None:
        """Enqueue the steps one by one; the device's context must be current."""
        for step in self.steps:
            step(stream)

    def launch_graph(self, backend: GpuBackend, stream: int) -> None:
        """Make `launch`, and enqueue the graph on ``stream``. A graph is faster to enqueue than its steps."""
        self._graph = backend.capture(self.enqueue)
        self.launch = partial(runtime.graphLaunch, self._graph.executable)
        self.launch(stream)

    def drop_graph(self) -> None:
        """Destroy the graph, if there is one."""
        self.launch = self._graph = None


class StepLoader:
    """Prepares the steps of one communicator. If a kernel is not loaded, the device's context must be current.

    Copies run on a side stream. The device must be current for their steps.
    """

    def __init__(self, backend: GpuBackend, kernels: KernelCache) -> None:
        self._backend = backend
        self._kernels = kernels
        self._copies = ForkedStream()
        self._forked = 0  # the copies after a fork use it

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._copies.close()

    def enqueuers(self, steps: Sequence[Step]) -> list[Enqueue]:
        """Return for each step a function that enqueues it, each time with the content of its arguments then."""
        # All kernels are loaded before any of them can run. Loading may wait for the device, and a kernel that runs
        # there may wait for the peers.
        # `find` comes before `load`, because `load` takes a lock, and another thread may hold the lock while it waits
        # for the device.
        variants = [step.variant for step in steps if isinstance(step, Launch)]
        missing = [variant for variant in variants if self._kernels.find(variant) is None]
        if missing:
            self._kernels.expect(missing)
            with self._backend.loading():
                for variant in missing:
                    self._kernels.load(variant)
        return [self._enqueuer(step) for step in steps]

    def _enqueuer(self, step: Step) -> Enqueue:
        if isinstance(step, Launch):
            kernel = self._kernels.find(step.variant)
            assert kernel is not None
            return kernel.launcher(step.arguments, step.blocks, step.threads, early=step.early).launch
        if isinstance(step, Copy):
            return partial(self._copy, step)
        if isinstance(step, LibraryWork):
            return step.enqueue
        return self._fork if isinstance(step, Fork) else self._copies.join

    def _fork(self, stream: int) -> None:
        self._forked = self._copies.fork(stream)

    def _copy(self, copy: Copy, stream: int) -> None:
        where = stream if copy.local else self._forked
        target, source, nbytes, kind = copy.target, copy.source, copy.nbytes, runtime.memcpyDeviceToDevice
        if copy.rows == 1:
            runtime.memcpyAsync(target, source, nbytes, kind, where)
        else:
            runtime.memcpy2DAsync(target, copy.target_pitch, source, copy.source_pitch, nbytes, copy.rows, kind, where)
