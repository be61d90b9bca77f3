"""Directory: the memory that each rank has attached to a dynamic window, in host memory that all ranks have mapped.

A rank attaches memory without the others. A rank that accesses the memory finds its handle here, and opens it.

    owner                                  another rank
    entry.content = address, handle (A)    read entry.number
    fence                                  fence
    entry.number = a new number            read entry.content (A), fence, read entry.number again

The fences publish the content with the number. Without them the other rank could see the number with an older content.
The second look finds an entry that its owner changes meanwhile. Each entry has one writer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpicomm.cluster.agreement import Group
from mpicomm.devices.handle import PACKET_NBYTES
from mpicomm.devices.host import HostBackend, array_at, fence
from mpicomm.errors import InvalidUsageError
from mpicomm.sharing.segments import share

_ENTRIES = 256
_ENTRY_NBYTES = 256
_CONTENT = struct.Struct(f"<QQQQ{PACKET_NBYTES}s")
_NUMBER_NBYTES = 8


@dataclass(frozen=True)
class Attached:
    """Memory that a rank has attached. ``number`` tells it from earlier memory in the same ``slot``."""

    slot: int
    number: int
    address: int
    """Its address on its rank."""
    nbytes: int
    pid: int
    """The process of its rank."""
    fd: int
    """The descriptor of host memory in that process; 0 for memory of a GPU."""
    packet: bytes
    """The handle of the memory."""


class Directory:
    """The entries of all ranks. Construction is collective; all other methods are local."""

    def __init__(self, node: Group, timeout_s: float, what: str) -> None:
        self._own = node.rank
        backend = HostBackend(timeout_s)
        nbytes = _ENTRIES * _ENTRY_NBYTES
        # New memory of the host is all zero, and so all entries are free.
        self._segments = share(node, backend, what, lambda: backend.allocate("memfd", nbytes), lambda: nbytes)
        bytes_ = np.dtype(np.uint8)
        self._entries = [
            array_at(self._segments[rank].pointer, nbytes, bytes_).reshape(_ENTRIES, _ENTRY_NBYTES)
            for rank in range(node.size)
        ]
        self._made = 0

    def add(self, address: int, nbytes: int, pid: int, fd: int, packet: bytes) -> None:
        """Add memory of this rank. Raises `InvalidUsageError` if it overlaps other memory, or if there is no entry."""
        for other in self.of(self._own):
            if address < other.address + other.nbytes and other.address < address + nbytes:
                raise InvalidUsageError(
                    f"Win.Attach: memory overlaps {other.nbytes} bytes that are attached at address {other.address:#x}"
                )
        entries = self._entries[self._own]
        slot = next((slot for slot in range(_ENTRIES) if not self._number(entries[slot])[0]), None)
        if slot is None:
            raise InvalidUsageError(f"Win.Attach: {_ENTRIES} arrays are attached: call Detach before it")
        content = _CONTENT.pack(address, nbytes, pid, fd, packet)
        entries[slot, _NUMBER_NBYTES : _NUMBER_NBYTES + len(content)] = np.frombuffer(content, np.uint8)
        fence()
        self._made += 1
        self._number(entries[slot])[0] = self._made

    def remove(self, address: int) -> None:
        """Remove memory of this rank. Raises `InvalidUsageError` if it is not attached."""
        for each in self.of(self._own):
            if each.address == address:
                self._number(self._entries[self._own][each.slot])[0] = 0
                fence()
                return
        raise InvalidUsageError(f"Win.Detach: no memory is attached at address {address:#x}")

    def find(self, rank: int, begin: int, end: int) -> Attached | None:
        """Return the memory of a rank that holds the bytes from ``begin`` to ``end``."""
        return next(
            (each for each in self.of(rank) if each.address <= begin and end <= each.address + each.nbytes), None
        )

    def of(self, rank: int) -> list[Attached]:
        """Return all memory that a rank has attached."""
        found = []
        for slot, entry in enumerate(self._entries[rank]):
            number = int(self._number(entry)[0])
            if number:
                fence()
                content = _CONTENT.unpack(entry[_NUMBER_NBYTES : _NUMBER_NBYTES + _CONTENT.size].tobytes())
                fence()
                if int(self._number(entry)[0]) == number:
                    found.append(Attached(slot, number, *content))
        return found

    def close_peers(self) -> None:
        """Unmap the entries of the peers."""
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free the entries of this rank."""
        self._segments.close_own()

    @staticmethod
    def _number(entry: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        return entry[:_NUMBER_NBYTES].view(np.uint64)
