"""Backend and GpuBackend: the Protocols of a device, which devices/host.py and devices/cuda/backend.py fulfil."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import Kind, MemoryHandle
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.kernels.team import Faults


@dataclass(frozen=True)
class Link:
    """How a rank reaches a peer's memory; ``None`` where the machine does not say."""

    path: Literal["self", "same device", "NVLink", "PCIe", "staged", "host memory", "other node", "unknown"]
    performance_rank: int | None = None
    """CUDA's rank of the link among those of the machine: 0 is the fastest."""
    access: bool | None = None
    """Whether the driver says that one device can address the other's memory."""
    native_atomics: bool | None = None
    """Whether atomics on the peer's memory are carried out by the link."""
    gb_s: float | None = None
    """What it carries each way by its standard, in GB/s."""


def slowest_gb_s(links: Iterable[Link]) -> float | None:
    """Return what the slowest of the links carries; None where nothing is known of any."""
    return min((link.gb_s for link in links if link.gb_s is not None), default=None)


@dataclass(frozen=True)
class Scratch:
    """Private memory of a device; ``owner`` keeps it allocated, where its backend does not until it is closed."""

    pointer: int
    nbytes: int
    owner: Any


class Segment(Protocol):
    """Memory mapped into this process: its own, or a peer's that was opened."""

    @property
    def pointer(self) -> int:
        """Address of the first byte, as kernels and copies on this backend use it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def close(self) -> None:
        """Unmap, and free where this process owns the memory. A second call does nothing."""


class Event(Protocol):
    """A point in a stream of work that other processes can wait for."""

    def export(self) -> bytes:
        """Return what a peer needs to open the event."""

    def record(self, stream: int) -> None:
        """Mark the work enqueued on ``stream`` so far."""

    def wait(self, stream: int) -> None:
        """Make ``stream`` wait for the latest `record`."""

    def close(self) -> None:
        """Release the event. A second call does nothing."""


class Backend(Protocol):
    """Memory of one device, and what can be done with it. Everything here is local: no call waits for a peer.

    Failures raise `HandleError` (memory), `InvalidUsageError` (arguments) or `BackendUnavailableError`.
    """

    device: int | str
    """Device ordinal, or "cpu"."""
    kinds: tuple[Kind, ...]
    """The handle kinds it can allocate, best first."""

    def make_current(self) -> None:
        """Make the device the calling thread's current one, on which other libraries then allocate and launch."""

    def prepare_thread(self) -> None:
        """As `make_current`, on a thread of this package's own, which works beside whatever those of the user do."""

    def allocate(self, kind: Kind, nbytes: int) -> Segment:
        """Allocate at least ``nbytes`` bytes that can be exported as ``kind``; contents are undefined."""

    def adopt(self, array: Any) -> Segment:
        """Return the memory of an existing array as a segment; its ``close`` leaves the array alone."""

    def export(self, segment: Segment) -> tuple[MemoryHandle, Descriptor | None]:
        """Return the handle of a segment of this process, and for `FD_KINDS` a descriptor the caller closes."""

    def open(self, handle: MemoryHandle, fd: int | None) -> Segment:
        """Map a peer's memory. ``fd`` stays the caller's; it may be closed afterwards."""

    def asarray(self, array: Any) -> Any:
        """Return ``array`` as this backend's ndarray without copying, or raise `InvalidUsageError`."""

    def view(self, segment: Segment, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an ndarray over the start of a segment, zero copy. It is valid until the segment is closed."""

    def pointer_table(self, pointers: list[int]) -> Any:
        """Return a uint64 ndarray on the device that holds ``pointers``."""

    def stream(self, stream: Any, array: Any = None) -> int:
        """Resolve a ``stream=`` argument; ``None`` is the current stream of the library ``array`` comes from."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between two addresses, stream-ordered where there are streams."""

    def zero(self, pointer: int, nbytes: int) -> None:
        """Set bytes to zero; they are zero when this returns."""

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for the work of one stream, or of the whole device."""

    def signal(self, sent: int, inbox: int, stream: int) -> None:
        """Add 1 to the counter at ``sent`` and publish it at ``inbox``, after all earlier work of the stream."""

    def wait_signal(self, expected: int, inbox: int, peer: int, stream: int) -> None:
        """Add 1 to the counter at ``expected`` and hold the stream until ``inbox`` has reached it, or time runs out."""

    def check(self) -> None:
        """Raise `CollectiveTimeoutError` if an earlier wait ran out of time."""

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory that is fast to copy from and to the device."""

    def scratch(self, nbytes: int) -> Scratch:
        """Return memory of the device that is this process's alone."""

    def completion(self, stream: int) -> Callable[[], bool]:
        """Return a function that says whether the work enqueued on ``stream`` so far is done.

        What a stream captures is not run: it counts as done.
        """

    def create_event(self) -> Event:
        """Return an event other processes can open."""

    def open_event(self, exported: bytes) -> Event:
        """Open a peer's event."""

    def link(self, device: bytes, kind: Kind) -> Link:
        """Say how this device reaches memory of the device with that UUID, opened as ``kind``."""

    def close(self) -> None:
        """Release what the backend itself holds. A second call does nothing."""


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU as this process sees it."""

    ordinal: int
    """Its number here, which CUDA_VISIBLE_DEVICES changes; other processes may count differently."""
    name: str
    uuid: bytes
    """16 bytes that name the device (or MIG instance) in every process."""
    pci_bus_id: str
    """For example ``0000:1b:00.0``."""
    numa_node: int
    """NUMA node of the host the device is attached to; -1 where the machine does not say."""
    compute_capability: tuple[int, int]


class SideStreams(Protocol):
    """Streams beside the user's, for work that waits for other ranks. All methods are local and do not block."""

    def mark(self, stream: int) -> Any:
        """Return the point in ``stream`` that its work so far has come to."""

    def passed(self, mark: Any) -> bool:
        """Return whether the work up to a mark is done."""

    def follow(self, stream: int, mark: Any) -> None:
        """Let later work on ``stream`` wait for a mark."""

    def take(self, after: Any = None) -> int:
        """Return a stream that nobody else uses until `give_back`, and on which work follows the mark ``after``."""

    def give_back(self, stream: int) -> None:
        """Let the stream be taken again, once the work on it is done."""


Calls = Callable[[], Sequence[str]]
"""Returns what each rank called, in words, where they called different things; else nothing."""


class GpuBackend(Backend, Protocol):
    """A `Backend` whose streams run kernels, and can wait for memory that other processes write.

    All methods are local. Those that load kernels may block.
    """

    info: DeviceInfo
    timeout_ns: int
    """How long a kernel waits for a peer before it gives up."""
    calls: Calls | None
    """What `check` asks for what each rank called, where they called different things."""

    @property
    def side_streams(self) -> SideStreams:
        """Streams for messages."""

    @property
    def multiprocessors(self) -> int:
        """How many blocks of any size can certainly run at once."""

    @property
    def total_nbytes(self) -> int:
        """How much memory the device has."""

    @property
    def faults(self) -> Faults:
        """Where kernels say that they cannot go on."""

    def fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        """Let `check` raise what ``error`` says from now on."""

    def current(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which the device's context is current on the calling thread."""

    def loading(self) -> AbstractContextManager[None]:
        """Return a ``with`` block, of one thread at a time, that may load kernels even while it captures a graph."""

    def fill(self, pointer: int, nbytes: int, byte: int) -> None:
        """Set bytes to ``byte`` and wait for that, and for nothing else on the device."""

    def fill_words(self, pointer: int, nbytes: int, word: int) -> None:
        """As `fill`, with a word of four bytes each."""

    def publish(self, word: int, count: int, stream: int) -> None:
        """Store ``count`` at ``word``, visible to all, after all earlier work of the stream."""

    def await_count(self, word: int, target: int, number: int, peer: int, stream: int) -> None:
        """Hold the stream until ``word`` has come to ``target``; after the time-out `check` names message and peer."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether what is enqueued on ``stream`` becomes part of a graph."""
