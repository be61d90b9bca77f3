"""Types that the methods of devices take and return. `mpicomm.devices.cuda.types` has the classes of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Link:
    """The link from a rank to a peer's memory. A field is ``None`` if it is unknown."""

    path: Literal["self", "same device", "NVLink", "PCIe", "staged", "host memory", "other node", "unknown"]
    performance_rank: int | None = None
    """CUDA's rank of the link among the links of the machine: 0 is the fastest."""
    access: bool | None = None
    """Whether the driver reports that one device can access the other's memory."""
    native_atomics: bool | None = None
    """Whether the link supports atomics on the peer's memory."""
    gb_s: float | None = None
    """The link's nominal bandwidth each way, in GB/s."""


def slowest_gb_s(links: Iterable[Link]) -> float | None:
    """Return the bandwidth of the slowest link; None if no bandwidth is known."""
    return min((link.gb_s for link in links if link.gb_s is not None), default=None)


class GrowingScratch:
    """Scratch memory of a device that grows by powers of two. The backend keeps all of it until `close`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.pointer = 0
        """The address of the largest allocation, which the next calls use."""
        self.nbytes = 0
        """The bytes of that allocation; 0 before the first."""
        self.total_nbytes = 0

    def of(self, nbytes: int) -> int:
        """Return the address of at least ``nbytes`` bytes; 0 for 0 bytes. Local."""
        if nbytes == 0:
            return 0
        if self.nbytes < nbytes:
            # Smaller allocations stay, because a captured graph may use them. Sizes are powers of two, so all together
            # have at most twice the bytes of the largest.
            grown = 1 << (nbytes - 1).bit_length()
            # The address first, because another thread may find that the bytes suffice, and then take the address.
            self.pointer = self._backend.scratch(grown)
            self.nbytes = grown
            self.total_nbytes += grown
        return self.pointer


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU that is visible to this process."""

    ordinal: int
    """Its number in this process. It depends on CUDA_VISIBLE_DEVICES, so it may differ in other processes."""
    name: str
    uuid: bytes
    """16 bytes that identify the device, or MIG instance, in every process."""
    pci_bus_id: str
    """For example ``0000:1b:00.0``."""
    numa_node: int
    """The host's NUMA node of the device; -1 if it is unknown."""
    compute_capability: tuple[int, int]


MessageCopy = Callable[[int, int, int], None]
"""Enqueues the copy of a message into one slot of an outbox, or out of it, as `MessageSteps` says: ``(stream, pointer,
nbytes)``. It copies ``nbytes`` bytes from ``pointer``, which is device memory, into the slot, or out of it to
``pointer``. One thread calls it at a time, and only when the previous message of the slot is done."""


Launch = Callable[[int, int, int], None]
"""Enqueues a kernel: ``(stream, blocks, threads)``. One thread calls it at a time."""

DifferingCalls = Callable[..., Sequence[str]]
"""Returns the call of each rank as text, if the ranks made different calls; else an empty sequence. With ``wait=True``
it gives the ranks some time to publish their calls."""
