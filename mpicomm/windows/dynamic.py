"""DynamicMemory: the memory of a window to which each rank attaches arrays, without the other ranks."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from mpi4py import MPI

from mpicomm.devices.base import Segment
from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import MemoryHandle
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.sharing.segments import SharedSegments
from mpicomm.symmetric.array import require_contiguous, require_writable
from mpicomm.symmetric.owner import Owner
from mpicomm.windows.directory import Attached, Directory
from mpicomm.windows.memory import Part, WindowMemory, share_boards


class DynamicMemory(WindowMemory):
    """The attached memory of all ranks. A displacement is an address on its rank, as ``MPI.Get_address`` says it.

    A rank opens memory of another rank at its first access. So memory must stay allocated until the window is freed, or
    until no rank accesses it again.
    """

    def __init__(self, owner: Owner, boards: SharedSegments, directory: Directory) -> None:
        super().__init__(owner, [Part(0, 1)] * owner.node.size, boards, boards, allocated=False)
        self._directory = directory
        self._attached: dict[int, tuple[Segment, Descriptor | None]] = {}
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
            handle, fd = parts[0]
            if fd is not None and backend.device != "cpu":
                # A descriptor of GPU memory opens only in a process to which a message has carried it.
                raise InvalidUsageError(
                    "Win.Attach: memory lies in virtual memory or in a stream-ordered pool, which ranks can open only "
                    "together: attach memory of cudaMalloc, such as of CuPy's default pool, or pass the array to "
                    "Win.Create"
                )
            number = 0 if fd is None else int(fd)
            self._directory.add(segment.pointer, view.nbytes, os.getpid(), number, handle.pack())
            on_failure.pop_all()
        self._attached[segment.pointer] = segment, fd

    def detach(self, array: Any) -> None:
        """Let other ranks access an array no more; local. Their accesses must be over."""
        view = self.owner.backend.asarray(array, "memory")
        address = int(view.ctypes.data if hasattr(view, "ctypes") else view.data.ptr)
        self._directory.remove(address)
        self._close_attached(address)

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
            segment = _opened(self.owner, rank, found)
            self._opened[rank, found.slot] = found.number, segment
        return segment

    def close_peers(self) -> None:
        super().close_peers()
        while self._opened:
            self._opened.popitem()[1][1].close()
        self._directory.close_peers()

    def close_own(self) -> None:
        super().close_own()
        for address in list(self._attached):
            self._close_attached(address)
        self._directory.close_own()

    def _close_attached(self, address: int) -> None:
        segment, fd = self._attached.pop(address)
        segment.close()
        if fd is not None:
            fd.close()


def share_dynamic_window(owner: Owner, what: str) -> DynamicMemory:
    """Make a window without memory. Collective, blocking; a failure raises the same error on all ranks."""
    boards = share_boards(owner, what)
    try:
        directory = Directory(owner.node, owner.placement.here.timeout_s, f"{what}: directory")
    except Exception:
        boards.undo(f"{what}: undo directory")
        raise
    return owner.keep(DynamicMemory(owner, boards, directory))


def _opened(owner: Owner, rank: int, found: Attached) -> Segment:
    try:
        handle = MemoryHandle.unpack(found.packet)
        if not found.fd:
            return owner.backend.open(((handle, None),))
        # The kernel lets processes of one user open each other's descriptors, so the owner takes no part.
        fd = Descriptor.of(os.open, f"/proc/{found.pid}/fd/{found.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return owner.backend.open(((handle, fd),))
        finally:
            fd.close()
    except (HandleError, OSError) as error:
        raise HandleError(f"memory that rank {rank} has attached: {error}", ranks=[rank]) from error
