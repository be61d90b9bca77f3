"""Values that the methods of devices take and return. `mpicomm.devices.cuda.types` has the classes of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


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


class GrowingScratch:
    """Memory of a device that grows by powers of two. The backend keeps all of it until `close`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.pointer = 0
        """The address of the largest part, which the next calls use."""
        self.nbytes = 0
        """The bytes of that part; 0 before the first `of`."""
        self.total_nbytes = 0

    def of(self, nbytes: int) -> int:
        """Return the address of at least ``nbytes`` bytes; 0 for 0 bytes. Local."""
        if nbytes == 0:
            return 0
        if self.nbytes < nbytes:
            # Smaller parts stay, because a captured graph may use them. Sizes are powers of two, so all parts together
            # have at most twice the bytes of the largest part.
            grown = 1 << (nbytes - 1).bit_length()
            # The address first, because another thread may look whether the bytes are enough, and then take it.
            self.pointer = self._backend.scratch(grown)
            self.nbytes = grown
            self.total_nbytes += grown
        return self.pointer


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


MessageCopy = Callable[[int, int, int], None]
"""Enqueues the copy of a message into one slot of an outbox, or out of it, as `MessageSteps` says: ``(stream, pointer,
nbytes)``. It copies ``nbytes`` bytes from ``pointer`` into the slot, or to ``pointer`` out of it. It is device memory.
One thread calls it at a time, and only after the last message of the slot is over."""


Launch = Callable[[int, int, int], None]
"""Enqueues a kernel: ``(stream, blocks, threads)``. One thread calls it at a time."""

DifferingCalls = Callable[..., Sequence[str]]
"""Says in words which call each rank made, if the ranks made different calls; else returns an empty sequence. With
``wait=True`` a rank has some time to say which call it made."""
