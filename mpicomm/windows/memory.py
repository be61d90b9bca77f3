"""WindowMemory: the parts of a window on all ranks, and the boards by which the ranks synchronise.

DynamicMemory has memory that each rank attaches, without the other ranks.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomm.activity.page import CommunicatorRow
from mpicomm.cluster.agreement import Group
from mpicomm.devices.cuda.types import Segment
from mpicomm.devices.handle import PACKET_NBYTES, MemoryHandle, MemoryUse
from mpicomm.devices.host import HostBackend, array_at, fence
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.kernels.window import BOARD_NBYTES, WINDOW_RANKS
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.session import Session
from mpicomm.sharing.segments import SharedMemory, SharedSegments, SuspendedContent, share
from mpicomm.symmetric.array import address_of, shareable_array

BYTES = np.dtype(np.uint8)
_ENTRIES = 256
_ENTRY = np.dtype([("number", "u8"), ("address", "u8"), ("nbytes", "u8"), ("packet", f"V{PACKET_NBYTES}")], align=True)


class Part(NamedTuple):
    """The size of a rank's part in bytes, and the bytes of a displacement into it."""

    nbytes: int
    disp_unit: int


Provider = Callable[[], Segment]
"""Returns the segment of this rank's part, or raises."""


class WindowMemory(SharedMemory):
    """The `SharedMemory` of the parts of all ranks. The session of the communicator keeps it."""

    def __init__(
        self, owner: Session, parts: list[Part], segments: SharedSegments, boards: SharedSegments, *, allocated: bool
    ) -> None:
        super().__init__("windows", owner.kind, segments, boards)
        self.owner = owner
        self.parts = parts
        self.boards = boards.pointers
        """The address of every rank's board on this rank."""
        self.row = CommunicatorRow()
        self.row.publish(owner.placement.row_header, owner.placement.row_header.next_number(window=True), window=True)
        self._allocated = allocated

    def view(self, rank: int) -> Any:
        """Return the part of a rank: a NumPy or CuPy array of bytes, mapped on this rank. Local."""
        return self.owner.backend.view(self._segments[0][rank], (self.parts[rank].nbytes,), BYTES)

    @property
    def local_board(self) -> Segment:
        """The board of this rank."""
        return self._segments[1].own

    def locate(self, rank: int, disp: int, bounds: tuple[int, int], what: str) -> int:
        """Return the address on this rank of the displacement ``disp`` in the part of ``rank``. Local.

        ``bounds`` are the ends of the elements there, in bytes from the displacement. Raises `RefusedByMpiError` for
        elements outside of the part.
        """
        return self.pointers[rank] + require_inside(what, self.parts[rank], rank, disp, bounds)

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's part, unless the caller owns it, and of the board; local."""
        own = self.parts[self.owner.node.rank].nbytes if self._allocated else 0
        return (MemoryUse.of_kind("windows", self.owner.kind, own + self.local_board.nbytes),)

    def memories(self) -> Iterable[SharedSegments]:
        return self._segments[::-1] if self._allocated else self._segments[1:]

    def close_peers(self) -> None:
        self.closed = True
        self.row.hide()
        super().close_peers()


def require_inside(what: str, part: Part, rank: int, disp: int, bounds: tuple[int, int]) -> int:
    """Return the byte of the part of ``rank`` at a displacement. Raise `RefusedByMpiError` for elements outside of it.

    ``bounds`` are the ends of the elements, in bytes from the displacement.
    """
    if disp < 0:
        raise RefusedByMpiError(f"{what}: target: displacement {disp} is negative: pass 0 or more", MPI.ERR_DISP)
    start = disp * part.disp_unit
    begin, end = start + bounds[0], start + bounds[1]
    if begin != end and (begin < 0 or end > part.nbytes):
        raise RefusedByMpiError(
            f"{what}: target: displacement {disp} reaches from byte {begin} to byte {end} of the window on rank "
            f"{rank}, which has {part.nbytes} bytes (disp_unit={part.disp_unit}): pass another displacement or count",
            MPI.ERR_RMA_RANGE,
        )
    return start


def require_one_node(owner: Session, what: str) -> None:
    """Raise `InvalidUsageError` unless all ranks map each other's memory. All ranks raise, or none does. Local."""
    if owner.node is not owner.group:
        raise InvalidUsageError(
            f"{what}: the communicator has ranks of {len(owner.placement.nodes)} nodes, and memory of a device is open "
            "only to the ranks of its node: create the window on comm.Split_type(MPI.COMM_TYPE_SHARED)"
        )
    if owner.node.size > WINDOW_RANKS:
        raise InvalidUsageError(
            f"{what}: the communicator has {owner.node.size} ranks, and a window of device memory at most "
            f"{WINDOW_RANKS}: split the communicator"
        )


def checked_part(nbytes: Any, disp_unit: Any, what: str) -> Part:
    """Return the part of these sizes. Raises `InvalidUsageError` for sizes that no memory has."""
    try:
        part = Part(operator.index(nbytes), operator.index(disp_unit))
    except TypeError:
        raise InvalidUsageError(f"{what}: size={nbytes!r}, disp_unit={disp_unit!r}: pass integers") from None
    if part.nbytes < 0:
        raise InvalidUsageError(f"{what}: size={nbytes} is negative: pass 0 or more")
    if part.disp_unit <= 0:
        raise InvalidUsageError(f"{what}: disp_unit={disp_unit} is not positive: pass 1 or more")
    return part


def adopt_memory(owner: Session, array: Any) -> tuple[int, Provider]:
    """Return the bytes of an array of the caller, and a provider of its memory. Raises for unusable memory. Local."""
    view = shareable_array(owner.backend, array, "memory")
    return view.nbytes, lambda: owner.backend.adopt(view)


def share_window(
    owner: Session, what: str, parts: list[Part], provide: Provider | None, *, allocated: bool
) -> WindowMemory:
    """Let all ranks open each other's parts. Collective, blocking; a failure raises the same error on all ranks.

    Without ``provide`` this rank's part is new memory. If the window is ``allocated``, so are the parts of all ranks.
    """
    owner.require_usable(what)
    nbytes = parts[owner.node.rank].nbytes
    provide = provide or (lambda: owner.backend.allocate(owner.kind, nbytes))
    segments = share(owner.node, owner.backend, what, provide, lambda: what, sealed=allocated)
    if allocated:
        segments.content = SuspendedContent(nbytes, of_user=True)
    try:
        boards = share_boards(owner, what)
    except Exception:
        segments.undo(f"{what}: undo boards")
        raise
    return owner.keep(WindowMemory(owner, parts, segments, boards, allocated=allocated))


def share_boards(owner: Session, what: str) -> SharedSegments:
    """Let all ranks open each other's boards. Collective, blocking; a failure raises the same error on all ranks."""
    owner.require_usable(what)

    def board() -> Segment:
        backend = owner.backend
        segment = backend.allocate(owner.kind, BOARD_NBYTES)
        try:
            # Before the exchange publishes the board, because this could overwrite a peer's first signal.
            backend.zero(segment.pointer, BOARD_NBYTES)
        except Exception:
            segment.close()
            raise
        return segment

    boards = share(owner.node, owner.backend, f"{what}: boards", board, lambda: what)
    boards.content = SuspendedContent(BOARD_NBYTES)
    return boards


class AttachedMemory(NamedTuple):
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
    content. The second read detects an entry that its owner changes meanwhile. Each entry has one writer.

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

    def of(self, rank: int) -> list[AttachedMemory]:
        """Return all memory that a rank has attached."""
        attached, entries = [], self._entries[rank]
        numbers = entries["number"]
        for slot in np.flatnonzero(numbers).tolist():
            number = int(numbers[slot])
            fence()
            _, *content = entries[slot].item()
            fence()
            if number and numbers[slot] == number:
                attached.append(AttachedMemory(slot, number, *content))
        return attached


class DynamicMemory(WindowMemory):
    """The attached memory of all ranks. A displacement is an address on its rank, as ``MPI.Get_address`` returns it.

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
        view = shareable_array(backend, array, "memory")
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
        """Let other ranks access an array no more; local. Their accesses must be complete."""
        address = address_of(self.owner.backend.asarray(array, "memory"))
        self._directory.remove(address)
        self._attached.pop(address).close()

    def locate(self, rank: int, disp: int, bounds: tuple[int, int], what: str) -> int:
        """Return the address on this rank of the address ``disp`` of ``rank``; see `WindowMemory.locate`."""
        begin, end = (disp + each for each in bounds)
        attached = self._directory.of(rank)
        found = next((each for each in attached if each.address <= begin and end <= each.address + each.nbytes), None)
        if found is None:
            raise RefusedByMpiError(
                f"{what}: target: rank {rank} has attached no memory that holds bytes {begin:#x} to {end:#x}: pass the "
                "address that MPI.Get_address returns on that rank, and call Attach there before it",
                MPI.ERR_RMA_RANGE,
            )
        if rank == self.owner.node.rank:
            return disp
        return self._mapped(rank, found).pointer + disp - found.address

    def _mapped(self, rank: int, found: AttachedMemory) -> Segment:
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
