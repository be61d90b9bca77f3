"""The calls of a window of device memory, which all ranks have mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.api.window_on_host import HostWindowCalls
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.session import Session
from mpicomm.windows.dynamic import DynamicMemory
from mpicomm.windows.memory import WindowMemory
from mpicomm.windows.window import WindowCalls

_free = MPI.Win.Free
_get_attr = MPI.Win.Get_attr


class DeviceWindowCalls(WindowCalls, HostWindowCalls):
    """The calls of ``MPI.Win`` on device memory. ``stream=`` is as in the collectives of a Communicator."""

    _session: Session
    _flavor: int

    def _open(self, session: Session, memory: WindowMemory, array: Any, flavor: int, group: MPI.Group) -> None:
        self._session = session
        self._flavor = flavor
        self._begin(memory, array, group, session.links)

    def Free(self) -> None:
        """Free the window after a wait for this rank's device. Collective, blocking.

        ``Free`` of the communicator frees the memory of its windows, too. After a timeout this call frees only this
        rank's part.
        """
        memory, session = self._memory, self._session
        if not memory.closed:
            if session.intact:
                session.group.agree("Win.Free", lambda: _as_usage(self._epochs.require_none, "Win.Free"))
            session.close_shared(memory, "Win")
            self._array = None  # the caller may free its memory now
        if self:
            _free(self)
            self._group.Free()

    def free(self) -> None:
        """Free as `Free` does; do nothing after it."""
        if self:
            self.Free()

    def Attach(self, memory: Any) -> None:
        """Let all ranks access ``memory`` through a window of `Create_dynamic`. Local.

        It is an array of the place of the window, which ``comm.register`` takes. Displacements are addresses on its
        rank: ``MPI.Get_address(memory)``. It must stay allocated until no rank accesses it again.
        """
        self._dynamic("Win.Attach").attach(memory)

    def Detach(self, memory: Any) -> None:
        """Let no rank access ``memory`` any more. Local; all accesses must be over."""
        self._dynamic("Win.Detach").detach(memory)

    def _dynamic(self, what: str) -> DynamicMemory:
        self._require_usable(what)
        memory = self._memory
        if not isinstance(memory, DynamicMemory):
            raise RefusedByMpiError(f"{what}: the window has its memory: make it by Create_dynamic", MPI.ERR_RMA_FLAVOR)
        return memory

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return the part of ``rank``, an array of bytes that this rank has mapped, and its displacement unit. Local.

        The array is a NumPy or CuPy array. ``MPI.PROC_NULL`` is the first rank with memory.
        """
        self._require_usable("Win.Shared_query")
        if isinstance(self._memory, DynamicMemory):
            raise RefusedByMpiError(
                "Win.Shared_query: ranks attach the memory of this window: make a window by Allocate",
                MPI.ERR_RMA_FLAVOR,
            )
        parts = self._memory.parts
        if rank == MPI.PROC_NULL:
            rank = next((number for number, part in enumerate(parts) if part.nbytes), 0)
        self._require_rank("Win.Shared_query", "rank", rank)
        return self._memory.view(rank), parts[rank].disp_unit

    def tomemory(self) -> Any:
        """Return this rank's part: a NumPy or CuPy array of bytes. Local."""
        return self.Shared_query(self._rank)[0]

    def Get_group(self) -> MPI.Group:
        """Return the group of the ranks of the window; see mpi4py."""
        return self._group.Dup()

    @property
    def group_size(self) -> int:  # type: ignore[override]
        """The number of the ranks."""
        return self._group.size

    @property
    def group_rank(self) -> int:  # type: ignore[override]
        """The number of this rank."""
        return self._group.rank

    @property
    def attrs(self) -> tuple[int, int, int]:  # type: ignore[override]
        """The address, the bytes and the displacement unit of this rank's part."""
        memory, rank = self._memory, self._rank
        if isinstance(memory, DynamicMemory):
            return 0, 0, 1
        return memory.pointers[rank], memory.parts[rank].nbytes, memory.parts[rank].disp_unit

    @property
    def flavor(self) -> int:  # type: ignore[override]
        """The call that made the window, such as ``MPI.WIN_FLAVOR_CREATE``."""
        return self._flavor

    @property
    def model(self) -> int:  # type: ignore[override]
        """``MPI.WIN_UNIFIED``, because there is one copy of the memory."""
        return MPI.WIN_UNIFIED

    def Get_attr(self, keyval: int) -> Any:
        """Return an attribute of the window; see mpi4py."""
        base, nbytes, disp_unit = self.attrs
        own = {
            MPI.WIN_BASE: base,
            MPI.WIN_SIZE: nbytes,
            MPI.WIN_DISP_UNIT: disp_unit,
            MPI.WIN_CREATE_FLAVOR: self._flavor,
            MPI.WIN_MODEL: MPI.WIN_UNIFIED,
        }
        return own[keyval] if keyval in own else _get_attr(self, keyval)


def _as_usage(check: Callable[[str], None], what: str) -> None:
    """Raise the error of ``check`` in the class in which an exchange hands it to all ranks."""
    try:
        check(what)
    except RefusedByMpiError as error:
        raise InvalidUsageError(str(error)) from None
