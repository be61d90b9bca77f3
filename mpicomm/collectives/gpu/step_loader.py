"""StepLoader: makes steps ready to be enqueued. It loads their kernels."""

from __future__ import annotations

from collections.abc import Sequence

from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.steps import Copy, Fork, Launch, LibraryWork, Step
from mpicomm.devices.cuda.load import Kernel, KernelCache
from mpicomm.devices.cuda.side_streams import ForkedStream
from mpicomm.devices.cuda.stream_order import Enqueue
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.kernels.variant import Variant


class CopyStream:
    """The stream on which a communicator's copies run beside its kernels. The device must be current."""

    def __init__(self) -> None:
        self._stream = ForkedStream()
        self._forked = 0  # the copies after a fork use it
        self.join = self._stream.join
        """Lets a stream wait for all enqueued copies."""

    def fork(self, stream: int) -> None:
        """Let all later copies wait for all work that is enqueued on ``stream``."""
        self._forked = self._stream.fork(stream)

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._stream.close()

    def copying(self, copy: Copy) -> Enqueue:
        """Return the copy as a step of a plan."""
        return lambda stream: runtime.memcpyAsync(
            copy.target, copy.source, copy.nbytes, runtime.memcpyDeviceToDevice, stream if copy.local else self._forked
        )


class StepLoader:
    """Makes the steps of one communicator ready. If a kernel is not loaded, the device's context must be current."""

    def __init__(self, backend: GpuBackend, kernels: KernelCache, copies: CopyStream) -> None:
        self._backend = backend
        self._kernels = kernels
        self._copies = copies

    def enqueuers(self, steps: Sequence[Step]) -> list[Enqueue]:
        """Return for each step a function that enqueues it, each time with the content of its arguments then."""
        # All kernels are loaded before any of them can run. Loading may wait for the device, and a kernel that runs
        # there may wait for the peers.
        self._load([step.variant for step in steps if isinstance(step, Launch)])
        return [self._enqueuer(step) for step in steps]

    def _load(self, variants: Sequence[Variant]) -> None:
        # `find` comes first, because `load` takes a lock, and another thread may hold the lock while it waits for the
        # device.
        missing = [variant for variant in variants if self._kernels.find(variant) is None]
        if missing:
            with self._backend.loading():
                for variant in missing:
                    self._kernels.load(variant)

    def _enqueuer(self, step: Step) -> Enqueue:
        if isinstance(step, Launch):
            kernel = self._kernels.find(step.variant)
            assert kernel is not None
            return launching(kernel, step)
        if isinstance(step, Copy):
            return self._copies.copying(step)
        if isinstance(step, LibraryWork):
            return step.enqueue
        return self._copies.fork if isinstance(step, Fork) else self._copies.join


def launching(kernel: Kernel, launch: Launch) -> Enqueue:
    """Return the step that launches a loaded kernel."""
    return kernel.launcher(launch.arguments, launch.blocks, launch.threads, early=launch.early).launch
