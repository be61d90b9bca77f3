"""DynamicMemory: the memory of a window to which each rank attaches arrays, without the other ranks."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.devices.base import Segment
from mpicomm.devices.handle import PACKET_NBYTES, MemoryHandle
from mpicomm.devices.host import HostBackend, array_at, fence
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.session import Session
from mpicomm.sharing.segments import SharedMemory, SharedSegments, share
from mpicomm.symmetric.array import require_contiguous, require_writable
from mpicomm.windows.memory import Part, WindowMemory, share_boards

_ENTRIES = 256
_ENTRY = np.dtype([("number", "u8"), ("address", "u8"), ("nbytes", "u8"), ("packet", f"V{PACKET_NBYTES}")], align=True)


class Attached(NamedTuple):
    """Memory that a rank has attached. ``number`` tells it from earlier memory in the same ``slot``."""

    slot: int
    number: int
    address: int
    """Its address on its rank."""
    nbytes: int
    packet: bytes
    """The handle of the memory."""


class Directory(SharedMemory):
    """The memory that each rank has attached, in host memory that all ranks have mapped: a `SharedMemory`.

    A rank attaches memory without the others. A rank that accesses the memory finds its handle here, and opens it.

        owner                                  another rank
        entry.content = address, handle (A)    read entry.number
        fence                                  fence
        entry.number = a new number            read entry.content (A), fence, read entry.number again

    The fences publish the content with the number. Without them the other rank could see the number with an older
    content. The second look finds an entry that its owner changes meanwhile. Each entry has one writer.

    Construction is collective; all other methods are local.
    """

    def __init__(self, node: Group, timeout_s: float, what: str) -> None:
        self._own = node.rank
        backend = HostBackend(timeout_s)
        nbytes = _ENTRIES * _ENTRY.itemsize
        # New memory of the host is all zero, and so all entries are free.
        segments = share(node, backend, what, lambda: backend.allocate("memfd", nbytes), lambda: nbytes)
        super().__init__("directories of windows", "memfd", segments)
        self._entries = [array_at(pointer, _ENTRIES, _ENTRY) for pointer in self.pointers]
        self._made = 0

    def add(self, address: int, nbytes: int, packet: bytes) -> None:
        """Add memory of this rank. Raises `InvalidUsageError` if it overlaps other memory, or if there is no entry."""
        for other in self.of(self._own):
            if address < other.address + other.nbytes and other.address < address + nbytes:
                raise InvalidUsageError(
                    f"Win.Attach: memory overlaps {other.nbytes} bytes that are attached at address {other.address:#x}"
                )
        entries = self._entries[self._own]
        free = np.flatnonzero(entries["number"] == 0)
        if not free.size:
            raise InvalidUsageError(f"Win.Attach: {_ENTRIES} arrays are attached: call Detach before it")
        entries[free[0]] = 0, address, nbytes, packet
        fence()
        self._made += 1
        entries["number"][free[0]] = self._made

    def remove(self, address: int) -> None:
        """Remove memory of this rank. Raises `InvalidUsageError` if it is not attached."""
        for each in self.of(self._own):
            if each.address == address:
                self._entries[self._own]["number"][each.slot] = 0
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
        found, entries = [], self._entries[rank]
        numbers = entries["number"]
        for slot in np.flatnonzero(numbers).tolist():
            number = int(numbers[slot])
            fence()
            _, *content = entries[slot].item()
            fence()
            if number and numbers[slot] == number:
                found.append(Attached(slot, number, *content))
        return found


class DynamicMemory(WindowMemory):
    """The attached memory of all ranks. A displacement is an address on its rank, as ``MPI.Get_address`` says it.

    A rank opens memory of another rank at its first access. So memory must stay allocated until the window is freed, or
    until no rank accesses it again.
    """

    def __init__(self, owner: Session, boards: SharedSegments, directory: Directory) -> None:
        super().__init__(owner, [Part(0, 1)] * owner.node.size, boards, boards, allocated=False)
        self._directory = directory
        self._attached: dict[int, Segment] = {}  # by address
        self._opened: dict[tuple[int, int], tuple[int, Segment]] = {}  # by rank and slot: the number, and the memory

    def attach(self, array: Any) -> None:
        """Let other ranks access an array of this rank's device; local. It stays the caller's."""
        backend = self.owner.backend
        view = backend.asarray(array, "memory")
        require_contiguous(view, "memory")
        require_writable(view, "memory")
        segment = backend.adopt(view)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(segment.close)
            parts = backend.export(segment)
            for _, each in parts:
                if each is not None:
                    on_failure.callback(each.close)
            handle, descriptor = parts[0]
            if descriptor is not None:
                # A descriptor of GPU memory opens only in a process to which a message has carried it.
                raise InvalidUsageError(
                    "Win.Attach: memory lies in virtual memory or in a stream-ordered pool, which ranks can open only "
                    "together: attach memory of cudaMalloc, such as of CuPy's default pool, or pass the array to "
                    "Win.Create"
                )
            self._directory.add(segment.pointer, view.nbytes, handle.pack())
            on_failure.pop_all()
        self._attached[segment.pointer] = segment

    def detach(self, array: Any) -> None:
        """Let other ranks access an array no more; local. Their accesses must be over."""
        view: Any = self.owner.backend.asarray(array, "memory")
        address = int(view.ctypes.data if hasattr(view, "ctypes") else view.data.ptr)
        self._directory.remove(address)
        self._attached.pop(address).close()

    def locate(self, rank: int, disp: int, ends: tuple[int, int], what: str) -> int:
        """Return the address on this rank of the address ``disp`` of ``rank``; see `WindowMemory.locate`."""
        begin, end = (disp + each for each in ends)
        found = self._directory.find(rank, begin, end)
        if found is None:
            raise RefusedByMpiError(
                f"{what}: target: rank {rank} has attached no memory that holds bytes {begin:#x} to {end:#x}: pass the "
                "address that MPI.Get_address returns on that rank, and call Attach there before it",
                MPI.ERR_RMA_RANGE,
            )
        if rank == self.owner.node.rank:
            return disp
        return self._mapped(rank, found).pointer + disp - found.address

    def _mapped(self, rank: int, found: Attached) -> Segment:
        number, segment = self._opened.get((rank, found.slot), (0, None))
        if segment is None or number != found.number:
            if segment is not None:
                self.owner.backend.synchronize()  # accesses of this rank to the earlier memory may be in flight
                segment.close()
                del self._opened[rank, found.slot]
            try:
                segment = self.owner.backend.open(((MemoryHandle.unpack(found.packet), None),))
            except HandleError as error:
                raise HandleError(f"memory that rank {rank} has attached: {error}", ranks=[rank]) from error
            self._opened[rank, found.slot] = found.number, segment
        return segment

    def close_peers(self) -> None:
        super().close_peers()
        while self._opened:
            self._opened.popitem()[1][1].close()
        self._directory.close_peers()

    def close_own(self) -> None:
        super().close_own()
        while self._attached:
            self._attached.popitem()[1].close()
        self._directory.close_own()


def share_dynamic_window(owner: Session, what: str) -> DynamicMemory:
    """Make a window without memory. Collective, blocking; a failure raises the same error on all ranks."""
    boards = share_boards(owner, what)
    try:
        directory = Directory(owner.node, owner.placement.here.timeout_s, f"{what}: directory")
    except Exception:
        boards.undo(f"{what}: undo directory")
        raise
    return owner.keep(DynamicMemory(owner, boards, directory))
