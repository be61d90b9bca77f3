"""WindowMemory: the parts of a window on all ranks, and the boards by which the ranks synchronise."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomm.activity.page import CommunicatorRow
from mpicomm.devices.base import Segment
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.window import BOARD_NBYTES, WINDOW_RANKS
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.session import Session
from mpicomm.sharing.segments import SharedMemory, SharedSegments, SuspendedContent, share
from mpicomm.symmetric.array import require_contiguous, require_writable

BYTES = np.dtype(np.uint8)


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
        self.row.open(owner.placement.heading, owner.placement.heading.count(window=True), window=True)
        self._allocated = allocated

    def view(self, rank: int) -> Any:
        """Return the part of a rank: a NumPy or CuPy array of bytes, mapped on this rank. Local."""
        return self.owner.backend.view(self._segments[0][rank], (self.parts[rank].nbytes,), BYTES)

    @property
    def own_board(self) -> Segment:
        """The board of this rank."""
        return self._segments[1].own

    def locate(self, rank: int, disp: int, ends: tuple[int, int], what: str) -> int:
        """Return the address on this rank of the displacement ``disp`` in the part of ``rank``. Local.

        ``ends`` are the ends of the elements there, in bytes from the displacement. Raises `RefusedByMpiError` for
        elements outside of the part.
        """
        return self.pointers[rank] + require_inside(what, self.parts[rank], rank, disp, ends)

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's part, unless the caller owns it, and of the board; local."""
        own = self.parts[self.owner.node.rank].nbytes if self._allocated else 0
        return (MemoryUse.of_kind("windows", self.owner.kind, own + self.own_board.nbytes),)

    def memories(self) -> Iterable[SharedSegments]:
        return self._segments[::-1] if self._allocated else self._segments[1:]

    def close_peers(self) -> None:
        self.closed = True
        self.row.close()
        super().close_peers()


def require_inside(what: str, part: Part, rank: int, disp: int, ends: tuple[int, int]) -> int:
    """Return the byte of the part of ``rank`` at a displacement. Raise `RefusedByMpiError` for elements outside of it.

    ``ends`` are the ends of the elements, in bytes from the displacement.
    """
    if disp < 0:
        raise RefusedByMpiError(f"{what}: target: displacement {disp} is negative: pass 0 or more", MPI.ERR_DISP)
    start = disp * part.disp_unit
    begin, end = start + ends[0], start + ends[1]
    if begin != end and (begin < 0 or end > part.nbytes):
        raise RefusedByMpiError(
            f"{what}: target: displacement {disp} reaches from byte {begin} to byte {end} of the window on rank "
            f"{rank}, which has {part.nbytes} bytes (disp_unit={part.disp_unit}): pass another displacement or count",
            MPI.ERR_RMA_RANGE,
        )
    return start


def require_one_node(owner: Session, what: str) -> None:
    """Raise `InvalidUsageError` unless all ranks map each other's memory. It raises on all ranks alike. Local."""
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
    part = Part(_whole(nbytes, "size", what), _whole(disp_unit, "disp_unit", what))
    if part.nbytes < 0:
        raise InvalidUsageError(f"{what}: size={nbytes} is negative: pass 0 or more")
    if part.disp_unit <= 0:
        raise InvalidUsageError(f"{what}: disp_unit={disp_unit} is not positive: pass 1 or more")
    return part


def _whole(value: Any, name: str, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidUsageError(f"{what}: {name}={value!r} is no int") from None


def adopted(owner: Session, array: Any) -> tuple[int, Provider]:
    """Return the bytes of an array of the caller, and a provider of its memory. Raises for unusable memory. Local."""
    backend = owner.backend
    view = backend.asarray(array, "memory")
    require_contiguous(view, "memory")
    require_writable(view, "memory")
    return view.nbytes, lambda: backend.adopt(view)


def allocated(owner: Session, nbytes: int) -> Provider:
    """Return a provider of new memory."""
    return lambda: owner.backend.allocate(owner.kind, nbytes)


def share_window(owner: Session, what: str, parts: list[Part], provide: Provider, *, allocated: bool) -> WindowMemory:
    """Let all ranks open each other's parts. Collective, blocking; a failure raises the same error on all ranks."""
    owner.require_usable(what)
    segments = share(owner.node, owner.backend, what, provide, lambda: what, sealed=allocated)
    if allocated:
        segments.content = SuspendedContent(parts[owner.node.rank].nbytes, of_user=True)
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
            # Before the exchange that tells the peers of the board, because it could wipe out a peer's first signal.
            backend.zero(segment.pointer, BOARD_NBYTES)
        except Exception:
            segment.close()
            raise
        return segment

    boards = share(owner.node, owner.backend, f"{what}: boards", board, lambda: what)
    boards.content = SuspendedContent(BOARD_NBYTES)
    return boards
