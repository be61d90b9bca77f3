"""Launches of the backend: graphs of launches, and the kernel of message.cu."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.load import Kernel
from mpicomm.devices.cuda.memory import PrimaryContext
from mpicomm.errors import HandleError
from mpicomm.kernels.message import MESSAGE_STEP, MESSAGE_THREADS, blocks_of_message
from mpicomm.kernels.team import LANES, Faults


class LaunchGraph:
    """The graph of the work that ``enqueue`` enqueues on ``stream``, which is idle. The device must be current.

    The driver launches a graph in about half the time of a kernel launch. It runs a graph once at a time. The last
    reference destroys the graph, after its launches are over. All kernels are loaded before the construction.
    """

    executable = 0
    """The address of the executable graph."""

    def __init__(self, context: PrimaryContext, stream: int, enqueue: Callable[[int], object]) -> None:
        self._context = context
        try:
            call(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            enqueue(stream)
        except BaseException:
            # Also after a Ctrl-C, so that the stream can run other work. CUDA refuses to end a capture that has not
            # begun, or that has a fork without its join. This error must not replace the exception in flight.
            with suppress(HandleError):
                driver.cuGraphDestroy(call(driver.cuStreamEndCapture, stream))
            raise
        graph = call(driver.cuStreamEndCapture, stream)
        try:
            self.executable = int(call(driver.cuGraphInstantiate, graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self, stream: int) -> None:
        """Enqueue the launches, in any context. Local; raises `HandleError`."""
        if self._context.is_current():
            self.launch_here(stream)
        else:
            with self._context.current():
                self.launch_here(stream)

    def launch_here(self, stream: int) -> None:
        """Enqueue the launches in the context of the graph. Local; raises `HandleError`."""
        try:
            runtime.graphLaunch(self.executable, stream)
        except runtime.CUDARuntimeError as error:
            raise HandleError(f"cudaGraphLaunch failed: {error}") from None

    def __del__(self) -> None:
        if self.executable:
            driver.cuGraphExecDestroy(self.executable)  # its status may say that the driver shut down with the process


_MOST_WAITING_BLOCKS = 4
"""The most blocks of a kernel that waits. Receives on several streams wait at once, and a device full of waiting blocks
could not begin the send for which another rank waits. So a larger kernel follows a kernel of one block that waits."""
_CAPTURE_AT = 4
"""A copy that repeats so often gets a graph. Making the graph takes about as long as it saves in ten copies."""


class MessageSteps:
    """Enqueues steps of messages; local, stream-ordered, not capturable. ``kernel`` is the loaded `MESSAGE_KERNEL`.
    ``capture`` is that of the backend.

    A message has `MESSAGE_WORDS` words from ``ready`` on, and as many from ``done`` on. Its sender adds to the first
    ones when the data is there. Its receiver adds to the others after it has read the data. After a timeout no step
    copies or adds anything, and `check` of the backend names rank ``peer``.
    """

    def __init__(
        self,
        context: PrimaryContext,
        kernel: Kernel,
        faults: Faults,
        timeout_ns: int,
        capture: Callable[[Callable[[int], object]], LaunchGraph],
    ) -> None:
        self._context = context
        self._capture = capture
        self.ordinal = context.device.ordinal
        self._launch_at = kernel.launch_at
        self._limits = timeout_ns, faults.record, faults.failed

    def copy_in(self, slot: int, *, ready: int) -> SlotCopy:
        """Return the copy into the slot at address ``slot``. After the copy, it announces 1."""
        return SlotCopy(self, slot, self.argument(ready=ready, sent=1), None)

    def copy_out(self, slot: int, *, ready: int, done: int, peer: int) -> SlotCopy:
        """Return the copy out of the slot at address ``slot``. It first waits for 1, and then releases 1."""
        copy = self.argument(ready=ready, done=done, awaits=1, taken=1, peer=peer)
        return SlotCopy(self, slot, copy, self.argument(ready=ready, done=done, awaits=1, peer=peer))

    def wait(self, stream: int, *, ready: int, done: int, count: int, blocks: int, peer: int) -> None:
        """Wait until the first ``blocks`` words from ``ready`` on are ``count`` ahead of the words from ``done`` on."""
        argument = self.argument(ready=ready, done=done, awaits=count, peer=peer)
        if blocks > _MOST_WAITING_BLOCKS:
            self.enqueue(stream, [(1, LANES, argument)])
        self.enqueue(stream, [(blocks, LANES, argument)])

    def announce(self, stream: int, *, ready: int, count: int) -> None:
        """Add ``count`` to the words from ``ready`` on, after all earlier work of the stream."""
        self.enqueue(stream, [(1, LANES, self.argument(ready=ready, sent=count))])

    def release(self, stream: int, *, done: int, count: int) -> None:
        """Add ``count`` to the words from ``done`` on, after all earlier work of the stream."""
        self.enqueue(stream, [(1, LANES, self.argument(done=done, taken=count))])

    def argument(
        self, *, ready: int = 0, done: int = 0, awaits: int = 0, sent: int = 0, taken: int = 0, peer: int = 0
    ) -> Argument:
        """Return the argument of a step without a copy."""
        return Argument(0, 0, 0, ready, done, *self._limits, awaits, sent, taken, peer)

    def enqueue(self, stream: int, launches: Sequence[MessageLaunch]) -> None:
        """Enqueue launches. For any thread."""
        if runtime.getDevice() != self.ordinal:  # see StreamsOfGpu
            with self._context.current():
                self.enqueue(stream, launches)
            return
        for blocks, threads, argument in launches:
            self._launch_at(stream, argument.address, blocks, threads)

    def graph(self, launches: Sequence[MessageLaunch]) -> LaunchGraph:
        """Return a graph of launches."""
        return self._capture(lambda stream: self.enqueue(stream, launches))


class Argument:
    """The memory of a launch's argument, a ``MessageStep`` of message.cu. The driver copies it at each launch."""

    __slots__ = ("_pointer", "address", "memory")

    def __init__(self, *fields: int) -> None:
        self.memory = ctypes.create_string_buffer(MESSAGE_STEP.pack(*fields), MESSAGE_STEP.size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.memory))
        self.address = ctypes.addressof(self._pointer)
        """The address of the launch's parameters: of one pointer to the argument."""


MessageLaunch = tuple[int, int, Argument]
"""Blocks, threads and the argument of a launch."""


class SlotCopy:
    """The `MessageCopy` into the slot of a message, or out of it if ``wait`` is given.

    ``copy`` is the argument of all its copies. Each call writes both addresses and the bytes into it. ``wait`` is the
    argument of a kernel that only waits.
    """

    __slots__ = ("_captured", "_copy", "_graph", "_last", "_slot", "_steps", "_times", "_wait")

    def __init__(self, steps: MessageSteps, slot: int, copy: Argument, wait: Argument | None) -> None:
        self._steps = steps
        self._slot = slot
        self._copy = copy
        self._wait = wait
        self._last = 0, 0  # the address and the bytes of the last copy
        self._times = 0  # the number of such copies, one after the other
        self._graph: LaunchGraph | None = None
        self._captured = 0, 0  # the address and the bytes of the copy that has the graph

    def __call__(self, stream: int, pointer: int, nbytes: int, /) -> None:
        steps, copied = self._steps, (pointer, nbytes)
        if copied == self._captured and self._graph is not None and runtime.getDevice() == steps.ordinal:
            self._graph.launch_here(stream)
            return
        blocks, copy, wait = blocks_of_message(nbytes), self._copy, self._wait
        launches: tuple[MessageLaunch, ...] = ((blocks, MESSAGE_THREADS, copy),)
        if wait is None:
            _FILL(copy.memory, 0, self._slot, pointer, nbytes)
        else:
            _FILL(copy.memory, 0, pointer, self._slot, nbytes)
            if blocks > _MOST_WAITING_BLOCKS:
                launches = (1, LANES, wait), *launches
        if copied != self._last:
            self._last, self._times = copied, 0
        self._times += 1
        if self._times == _CAPTURE_AT:
            self._graph, self._captured = steps.graph(launches), copied
        steps.enqueue(stream, launches)


_FILL = struct.Struct("=QQQ").pack_into
"""Writes the first fields of a ``MessageStep``: both addresses and the bytes."""
