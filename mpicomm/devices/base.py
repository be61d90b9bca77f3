"""Backend and GpuBackend: the Protocols of a device, which devices/host.py and devices/cuda/backend.py fulfil."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mpicomm.devices.handle import Exported, Kind, MemoryUse
from mpicomm.devices.stream_threads import StreamThreads
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError
from mpicomm.kernels.packing import PackTable
from mpicomm.kernels.team import Faults
from mpicomm.kernels.variant import Variant


@dataclass(frozen=True)
class Link:
    """The way from a rank to a peer's memory. A field is ``None`` if the machine does not say."""

    path: Literal["self", "same device", "NVLink", "PCIe", "staged", "host memory", "other node", "unknown"]
    performance_rank: int | None = None
    """CUDA's rank of the link among the links of the machine: 0 is the fastest."""
    access: bool | None = None
    """Whether one device can address the other's memory, as the driver says."""
    native_atomics: bool | None = None
    """Whether the link carries out atomics on the peer's memory."""
    gb_s: float | None = None
    """The link's bandwidth each way by its standard, in GB/s."""


def slowest_gb_s(links: Iterable[Link]) -> float | None:
    """Return the bandwidth of the slowest link; None if no bandwidth is known."""
    return min((link.gb_s for link in links if link.gb_s is not None), default=None)


@dataclass(frozen=True)
class Scratch:
    """Private memory of a device. ``owner`` keeps it allocated; it is None if the backend keeps it until `close`."""

    pointer: int
    nbytes: int
    owner: Any


class Segment(Protocol):
    """Memory that is mapped into this process: memory of this process, or memory of a peer that it has opened."""

    @property
    def pointer(self) -> int:
        """Address of the first byte, for kernels and copies on this backend."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def close(self) -> None:
        """Unmap the memory, and free it if this process owns it. A second call does nothing."""


class VirtualMemory(Segment, Protocol):
    """A segment of `VIRTUAL_KINDS` whose memory can go and come back at the same addresses. All methods are local."""

    def suspend(self) -> None:
        """Give the memory back, and keep its addresses. A second call does nothing."""

    def resume(self) -> None:
        """Take new memory of this process, with undefined contents. A second call does nothing."""

    def reopen(self, parts: Exported) -> None:
        """Map a peer's new memory. The caller still owns the descriptors, and may close them afterwards."""


class Event(Protocol):
    """A point in a stream of work that other processes can wait for."""

    def export(self) -> bytes:
        """Return the key that a peer needs to open the event."""

    def record(self, stream: int) -> None:
        """Mark the work enqueued on ``stream`` so far."""

    def wait(self, stream: int) -> None:
        """Make ``stream`` wait for the latest `record`."""

    def close(self) -> None:
        """Release the event. A second call does nothing."""


class Backend(Protocol):
    """The memory and the streams of one device. Every method is local. Only `wait_signal` waits for a peer.

    A failure raises `HandleError` (memory), `InvalidUsageError` (arguments) or `BackendUnavailableError`.
    """

    device: int | str
    """Device ordinal, or "cpu"."""
    kinds: tuple[Kind, ...]
    """The handle kinds that the backend can allocate, best first."""

    def make_current(self) -> None:
        """Make the device current on the calling thread: other libraries then allocate and launch on it."""

    def prepare_thread(self) -> None:
        """Like `make_current`, for a thread of mpicomm that works beside the threads of the user."""

    def allocate(self, kind: Kind, nbytes: int) -> Segment:
        """Allocate at least ``nbytes`` bytes that can be exported as ``kind``; contents are undefined."""

    def adopt(self, array: Any) -> Segment:
        """Return the memory of an existing array as a segment; its ``close`` does not free the array."""

    def export(self, segment: Segment) -> Exported:
        """Return the parts of a segment of this process. The caller closes the descriptors."""

    def open(self, parts: Exported) -> Segment:
        """Map a peer's memory. The caller still owns the descriptors, and may close them afterwards."""

    def asarray(self, array: Any, name: str = "array") -> Any:
        """Return ``array`` as this backend's ndarray without copying; raise `InvalidUsageError` with its ``name``."""

    def view(self, segment: Segment, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an ndarray over the start of a segment, without copying. It is valid until the segment is closed."""

    def pointer_table(self, pointers: list[int]) -> Any:
        """Return a uint64 ndarray on the device that holds ``pointers``."""

    def stream(self, stream: Any, array: Any = None) -> int:
        """Return the address of a ``stream=`` argument; ``None`` is the current stream of ``array``'s library.

        It counts the calling thread among the users of the stream.
        """

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between two addresses; stream-ordered if the device has streams."""

    def zero(self, pointer: int, nbytes: int) -> None:
        """Set bytes to zero. Blocking: the bytes are zero when this returns."""

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for the work of one stream, or of the whole device."""

    def signal(self, sent: int, inbox: int, stream: int) -> None:
        """Add 1 to the counter at ``sent`` and publish it at ``inbox``, after all earlier work of the stream."""

    def wait_signal(self, expected: int, inbox: int, peer: int, stream: int) -> None:
        """Add 1 to the counter at ``expected``, and hold the stream until ``inbox`` has reached it or time is up."""

    def check(self) -> None:
        """Raise `CollectiveTimeoutError` if an earlier wait ran out of time. It does not wait for the device."""

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory that copies to and from the device use at full speed."""

    def scratch(self, nbytes: int) -> Scratch:
        """Return memory of the device that no other process sees."""

    def completion(self, stream: int) -> Callable[[], bool]:
        """Return a function that says whether the work that ``stream`` has at this call is done.

        A stream that captures a graph runs nothing, so its work counts as done.
        """

    def create_event(self) -> Event:
        """Return an event that other processes can open."""

    def open_event(self, exported: bytes) -> Event:
        """Open a peer's event."""

    def link(self, device: bytes, kind: Kind) -> Link:
        """Return the link from this device to memory of the device with that UUID, opened as ``kind``."""

    def suspend(self) -> None:
        """Give large scratch memory of `VIRTUAL_KINDS` back, and keep its addresses. No work may use it."""

    def resume(self) -> None:
        """Take scratch memory again, with undefined contents. Tables of datatypes return with their contents."""

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of the backend itself, without the segments and the scratch memory of others."""

    def close(self) -> None:
        """Release the resources of the backend itself. A second call does nothing."""


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU in the view of this process."""

    ordinal: int
    """Its number in this process. CUDA_VISIBLE_DEVICES changes it, so other processes may count differently."""
    name: str
    uuid: bytes
    """16 bytes that name the device, or MIG instance, in every process."""
    pci_bus_id: str
    """For example ``0000:1b:00.0``."""
    numa_node: int
    """The host's NUMA node of the device; -1 if the machine does not say."""
    compute_capability: tuple[int, int]


class SideStreams(Protocol):
    """Streams beside the user's, for work that waits for other ranks. All methods are local and do not block."""

    def mark(self, stream: int) -> Any:
        """Return a mark after the work that ``stream`` has at this call."""

    def event(self) -> Any:
        """Return a new event, which the caller keeps. An engine records it."""

    def mark_again(self, mark: Any, stream: int) -> Any:
        """Return a mark as `mark` does, and use ``mark`` for it, which the caller gives up; it is cheaper."""

    def wait_stream(self, stream: int, other: int) -> None:
        """Let later work on ``stream`` wait for the work that the stream ``other`` has at this call."""

    def wait_stream_again(self, mark: Any, stream: int, other: int) -> None:
        """As `wait_stream`, by ``mark``, which no other code may use; it is cheaper."""

    def passed(self, mark: Any) -> bool:
        """Return whether the work before a mark is done."""

    def wait(self, mark: Any) -> None:
        """Block until the work before a mark is done."""

    def follow(self, stream: int, mark: Any) -> None:
        """Let later work on ``stream`` wait for a mark."""

    def take(self, after: Any = None) -> int:
        """Return an idle stream that only the caller uses, until `give_back`. Its work follows the mark ``after``."""

    def give_back(self, stream: int) -> None:
        """Let `take` return the stream again after the work on it is done."""


class DifferingCalls(Protocol):
    """Says in words which call each rank made, if the ranks made different calls; else returns an empty sequence."""

    def __call__(self, *, wait: bool) -> Sequence[str]:
        """With ``wait``, a rank has some time to say which call it made."""


MessageCopy = Callable[[int, int, int], None]
"""Enqueues the copy of a message into one slot of an outbox, or out of it, as `MessageSteps` says: ``(stream, pointer,
nbytes)``. It copies ``nbytes`` bytes from ``pointer`` into the slot, or to ``pointer`` out of it. It is device memory.
One thread calls it at a time, and only after the last message of the slot is over."""


class MessageSteps(Protocol):
    """Enqueues steps of messages; local, stream-ordered, not capturable.

    A message has `MESSAGE_WORDS` words from ``ready`` on, and as many from ``done`` on. Its sender adds to the first
    ones when the data is there. Its receiver adds to the others after it has read the data. After a timeout no step
    copies or adds anything, and `check` names rank ``peer``.
    """

    def copy_in(self, place: int, *, ready: int) -> MessageCopy:
        """Return the copy into the slot at address ``place``. After the copy, it announces 1."""

    def copy_out(self, place: int, *, ready: int, done: int, peer: int) -> MessageCopy:
        """Return the copy out of the slot at address ``place``. It first waits for 1, and then releases 1."""

    def wait(self, stream: int, *, ready: int, done: int, count: int, blocks: int, peer: int) -> None:
        """Wait until the first ``blocks`` words from ``ready`` on are ``count`` ahead of the words from ``done`` on."""

    def announce(self, stream: int, *, ready: int, count: int) -> None:
        """Add ``count`` to the words from ``ready`` on, after all earlier work of the stream."""

    def release(self, stream: int, *, done: int, count: int) -> None:
        """Add ``count`` to the words from ``done`` on, after all earlier work of the stream."""


Launch = Callable[[int, int, int], None]
"""Enqueues a kernel: ``(stream, blocks, threads)``. One thread calls it at a time."""


class GpuBackend(Backend, Protocol):
    """A `Backend` whose streams run kernels and can wait for memory that other processes write.

    Every method is local. The first kernel of a kind loads its code, which blocks.
    """

    info: DeviceInfo
    timeout_ns: int
    """The time that a kernel waits for a peer before it gives up."""
    calls: DifferingCalls | None
    """`check` calls it for the text of a `PeerError`."""
    kind: Kind | None
    """The handle kind of the communicator; None before its choice. Large scratch memory is of the same kind."""
    completes: bool
    """Whether blocking calls on device memory are complete on return, so that each of them calls `complete`."""
    lasting_streams: set[int]
    """The addresses of streams that the process never destroys: the default stream, and streams that `mpicomm.torch`
    takes from PyTorch's pool."""

    @property
    def side_streams(self) -> SideStreams:
        """Streams for work of mpicomm that must not delay the work of the user."""

    @property
    def multiprocessors(self) -> int:
        """The number of blocks, of any size, that can always run at once."""

    @property
    def total_nbytes(self) -> int:
        """The size of the device's memory in bytes."""

    @property
    def faults(self) -> Faults:
        """The addresses at which kernels report that they cannot go on."""

    def fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        """Let every later `check` raise an error of the same class and text."""

    def untold(self) -> MpicommError | None:
        """Return the error that `check` would raise, if no check has raised it so far."""

    def current(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which the device's context is current on the calling thread."""

    def loading(self) -> AbstractContextManager[None]:
        """Return a ``with`` block, for one thread at a time, that may load and allocate even during a capture."""

    def fill(self, pointer: int, nbytes: int, byte: int) -> None:
        """Set bytes to ``byte``, and wait only for that, not for other work of the device."""

    def fill_words(self, pointer: int, nbytes: int, word: int) -> None:
        """Like `fill`, with a word of four bytes."""

    def eager_stream(self, stream: Any, array: Any) -> int | None:
        """Like `stream`, but return None for a stream that captures a graph, and raise as `check` does."""

    def threads(self, stream: int) -> StreamThreads:
        """Return the threads that use a stream. `stream` or `eager_stream` has returned this stream."""

    def waits_beside(self, stream: int, array: Any) -> bool:
        """Return whether a blocking call on ``array`` and its thread wait for peers beside ``stream``.

        They do if several threads use the stream: see `mpicomm.devices.stream_threads`.
        """

    def meets(self, stream: int, array: Any) -> bool:
        """Return whether the ranks meet on the host before a blocking collective on ``array`` begins.

        They do if several threads use the device: see `mpicomm.devices.stream_threads`.
        """

    def message_steps(self) -> MessageSteps:
        """Return the steps of messages. The first call loads their kernel, which blocks."""

    def pack_table(self, table: PackTable) -> int:
        """Return the address of a table on the device. The table stays until `close`; blocking for a new table."""

    def pack(self, table: PackTable, memory: int, packed: int, stream: int, *, unpacks: bool) -> None:
        """Pack the regions of a table, which lie from ``memory`` on, to ``packed``, or unpack them; stream-ordered.

        After a wait of this device has run out of time, it unpacks nothing.
        """

    def load(self, variant: Variant) -> object:
        """Compile and load a kernel, unless that is done. Blocking; it may wait for all work of the device."""

    def launch(self, variant: Variant, arguments: ctypes.Structure, stream: int, *, blocks: int, threads: int) -> None:
        """Enqueue a kernel whose one parameter is a structure by value; stream-ordered, capturable. It loads the kernel
        first, unless `load` has done so."""

    def launcher(self, variant: Variant, arguments: ctypes.Structure) -> Launch:
        """Return a function that launches a kernel as `launch` does, each time with the content of ``arguments``.

        It takes a fraction of the time.
        """

    def fixed_launch(
        self, variant: Variant, arguments: ctypes.Structure, *, blocks: int, threads: int
    ) -> Callable[[int], None]:
        """Return a function that launches a kernel with this content of ``arguments`` on a stream; not capturable.

        It takes half the time of a launch by `launcher`. One thread calls it at a time.
        """

    def is_capturing(self, stream: int) -> bool:
        """Return whether ``stream`` captures a graph, so that its work becomes part of the graph."""

    def complete(self, stream: int) -> None:
        """Wait for the work that ``stream`` has at this call, and raise as `check` does; nothing in a capture."""
