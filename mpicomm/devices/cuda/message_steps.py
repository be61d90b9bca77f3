"""Launches of the kernel of message.cu."""

from __future__ import annotations

import ctypes
import threading

from cupy.cuda import runtime

from mpicomm.devices.cuda.capture import relaxed
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.launch_graph import Launch, LaunchGraph
from mpicomm.devices.cuda.load import KernelCache
from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_STEP, MESSAGE_THREADS, blocks_of_message
from mpicomm.kernels.team import LANES, Faults

_MOST_WAITING_BLOCKS = 4
"""The most blocks of a kernel that waits. Receives on several streams wait at once, and a device full of waiting blocks
could not begin the send for which another rank waits. So a larger kernel follows a kernel of one block that waits."""
_TIMES = 4
"""A copy that repeats so often gets a graph. Making the graph takes about as long as it saves in ten copies."""


class CudaMessageSteps:
    """The `MessageSteps` of one device. Construction loads their kernel, which may wait for the device."""

    def __init__(self, context: PrimaryContext, kernels: KernelCache, faults: Faults, timeout_ns: int) -> None:
        self._context = context
        self.ordinal = context.device.ordinal
        with context.current():
            self._kernel = kernels.load(MESSAGE_KERNEL)
        self._arguments = _Arguments()
        self._limits = timeout_ns, faults.record, faults.failed

    def copy_in(self, place: int, *, ready: int) -> PlaceCopy:
        """Return the copy into a slot."""
        return PlaceCopy(self, place, ready, None, 0)

    def copy_out(self, place: int, *, ready: int, done: int, peer: int) -> PlaceCopy:
        """Return the copy out of a slot."""
        return PlaceCopy(self, place, ready, done, peer)

    def wait(self, stream: int, *, ready: int, done: int, count: int, blocks: int, peer: int) -> None:
        """Wait until the words of a message are ``count`` apart."""
        self.enqueue(stream, self.launches(blocks, ready=ready, done=done, awaits=count, peer=peer))

    def announce(self, stream: int, *, ready: int, count: int) -> None:
        """Add to the words of the sender."""
        self.enqueue(stream, self.launches(1, ready=ready, sent=count))

    def release(self, stream: int, *, done: int, count: int) -> None:
        """Add to the words of the receiver."""
        self.enqueue(stream, self.launches(1, done=done, taken=count))

    def launches(
        self,
        blocks: int,
        *,
        target: int = 0,
        source: int = 0,
        nbytes: int = 0,
        ready: int = 0,
        done: int = 0,
        awaits: int = 0,
        sent: int = 0,
        taken: int = 0,
        peer: int = 0,
    ) -> list[Launch]:
        """Return the launches of a step of ``MessageStep`` in message.cu."""
        argument = MESSAGE_STEP.pack(target, source, nbytes, ready, done, *self._limits, awaits, sent, taken, peer)
        launch = blocks, MESSAGE_THREADS if nbytes else LANES, argument
        if awaits and blocks > _MOST_WAITING_BLOCKS:
            wait = MESSAGE_STEP.pack(0, 0, 0, ready, done, *self._limits, awaits, 0, 0, peer)
            return [(1, LANES, wait), launch]
        return [launch]

    def enqueue(self, stream: int, launches: list[Launch]) -> None:
        """Enqueue launches. For any thread."""
        # Cheaper than a change of context, and nearly always true: a new Communicator makes its GPU current.
        if runtime.getDevice() != self.ordinal:
            with self._context.current():
                self._enqueue(stream, launches)
        else:
            self._enqueue(stream, launches)

    def graph(self, launches: list[Launch]) -> LaunchGraph:
        """Return a graph of launches."""
        # Relaxed, because another stream of this thread may capture a graph.
        with self._context.current(), relaxed():
            return LaunchGraph(self._kernel, launches)

    def _enqueue(self, stream: int, launches: list[Launch]) -> None:
        arguments = self._arguments
        for blocks, threads, argument in launches:
            arguments.memory.raw = argument  # CUDA copies it before the launch returns
            self._kernel.launch_at(stream, arguments.address, blocks, threads)


class PlaceCopy:
    """The `MessageCopy` into the slot of a message, or out of it if ``done`` is given."""

    __slots__ = ("_done", "_graph", "_graphed", "_last", "_launches", "_peer", "_place", "_ready", "_steps", "_times")

    def __init__(self, steps: CudaMessageSteps, place: int, ready: int, done: int | None, peer: int) -> None:
        self._steps = steps
        self._place = place
        self._ready = ready
        self._done = done
        self._peer = peer
        self._last = 0, 0  # the address and the bytes of the last copy
        self._times = 0  # the number of such copies, one after the other
        self._launches: list[Launch] = []
        self._graph: LaunchGraph | None = None
        self._graphed = 0, 0  # the address and the bytes of the copy that has the graph

    def __call__(self, stream: int, pointer: int, nbytes: int, /) -> None:
        """Enqueue the copy of a message."""
        copied = pointer, nbytes
        if copied == self._graphed and self._graph is not None and runtime.getDevice() == self._steps.ordinal:
            self._graph.launch(stream)
            return
        if copied != self._last:
            self._launches = self._launches_of(pointer, nbytes)
            self._last, self._times = copied, 0
        self._times += 1
        if self._times == _TIMES:
            self._graph, self._graphed = self._steps.graph(self._launches), copied
        self._steps.enqueue(stream, self._launches)

    def _launches_of(self, pointer: int, nbytes: int) -> list[Launch]:
        blocks, place, ready, done = blocks_of_message(nbytes), self._place, self._ready, self._done
        if done is None:
            return self._steps.launches(blocks, target=place, source=pointer, nbytes=nbytes, ready=ready, sent=1)
        return self._steps.launches(
            blocks,
            target=pointer,
            source=place,
            nbytes=nbytes,
            ready=ready,
            done=done,
            awaits=1,
            taken=1,
            peer=self._peer,
        )


class _Arguments(threading.local):
    """The argument of a launch; each thread that sends has a separate one."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(MESSAGE_STEP.size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.memory))
        self.address = ctypes.addressof(self._pointer)
