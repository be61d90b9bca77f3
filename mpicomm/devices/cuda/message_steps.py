"""Launches of the kernel of message.cu."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from cupy.cuda import runtime

from mpicomm.devices.cuda.capture import relaxed
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.launch_graph import LaunchGraph
from mpicomm.devices.cuda.load import KernelCache
from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_STEP, MESSAGE_THREADS
from mpicomm.kernels.team import LANES, Faults

_MOST_WAITING_BLOCKS = 4
"""The blocks of a kernel that may wait. Receives on several streams wait at once, and a device full of waiting blocks
could not begin the send that another rank waits for. So a larger kernel follows a kernel of one block that waits."""

Launch = tuple[int, int, bytes]
"""Blocks, threads and the argument of a launch."""


class MessageSteps:
    """The steps of messages on one device. Its kernel is loaded when this is made: that may wait for the device."""

    def __init__(self, context: PrimaryContext, kernels: KernelCache, faults: Faults, timeout_ns: int) -> None:
        self._context = context
        self.ordinal = context.device.ordinal
        with context.current():
            self.kernel = kernels.load(MESSAGE_KERNEL)
        self._arguments = _Arguments()
        self._limits = timeout_ns, faults.record, faults.failed

    def step(self, stream: int, *step: int) -> None:
        """Enqueue a step; see `MessageStep` of devices/base.py. For any thread."""
        self.in_context(self._launch, stream, step)

    def repeated(self) -> RepeatedStep:
        """Return a function as `step` for steps that are mostly the same."""
        return RepeatedStep(self)

    def in_context(self, enqueue: Callable[[int, tuple[int, ...]], None], stream: int, step: tuple[int, ...]) -> None:
        """Call ``enqueue`` with this device's context current."""
        # Cheaper than a change of context, and nearly always true: creating a Communicator makes its GPU the current.
        if runtime.getDevice() == self.ordinal:
            enqueue(stream, step)
        else:
            with self._context.current():
                enqueue(stream, step)

    def launches(self, step: tuple[int, ...]) -> list[Launch]:
        """Return the launches of a step."""
        blocks, target, source, nbytes, ready, done, awaits, sent, taken, peer = step
        argument = MESSAGE_STEP.pack(target, source, nbytes, ready, done, *self._limits, awaits, sent, taken, peer)
        launch = blocks, MESSAGE_THREADS if nbytes else LANES, argument
        if awaits and blocks > _MOST_WAITING_BLOCKS:
            wait = MESSAGE_STEP.pack(0, 0, 0, ready, done, *self._limits, awaits, 0, 0, peer)
            return [(1, LANES, wait), launch]
        return [launch]

    def _launch(self, stream: int, step: tuple[int, ...]) -> None:
        arguments = self._arguments
        for blocks, threads, argument in self.launches(step):
            arguments.memory.raw = argument  # which CUDA copies before the launch returns
            self.kernel.launch_at(stream, arguments.address, blocks, threads)


class RepeatedStep:
    """Enqueues steps that are mostly the same as the last one, by a graph.

    One thread calls it at a time, and only when the last step cannot wait any more: a graph runs once at a time.
    """

    def __init__(self, steps: MessageSteps) -> None:
        self._steps = steps
        self._ordinal = steps.ordinal
        self._last: tuple[int, ...] = ()
        self._graph: LaunchGraph | None = None
        self._launch: Callable[[int], None]

    def __call__(self, stream: int, *step: int) -> None:
        """Enqueue a step; see `MessageStep` of devices/base.py."""
        if step == self._last and runtime.getDevice() == self._ordinal:  # with as few calls of Python as possible
            self._launch(stream)
        else:
            self._steps.in_context(self._enqueue, stream, step)

    def _enqueue(self, stream: int, step: tuple[int, ...]) -> None:
        if step != self._last:
            self._change(step)
        self._launch(stream)

    def _change(self, step: tuple[int, ...]) -> None:
        self._last = ()
        launches = self._steps.launches(step)
        graph = self._graph
        if graph is None or graph.count != len(launches):
            # Relaxed, because another stream of this thread may capture a graph.
            with relaxed():
                self._graph = graph = LaunchGraph(self._steps.kernel, MESSAGE_STEP.size, len(launches))
            self._launch = graph.launch
        for index, launch in enumerate(launches):
            graph.change(index, *launch)
        self._last = step


class _Arguments(threading.local):
    """The argument of a launch; one for each thread that sends."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(MESSAGE_STEP.size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.memory))
        self.address = ctypes.addressof(self._pointer)
