"""The calls of a window of device memory, which all ranks have mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from mpi4py import MPI

from mpicomm.api.window_on_host import HostWindowCalls
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.session import Session
from mpicomm.windows.buffers import LocalBuffer
from mpicomm.windows.dynamic import DynamicMemory
from mpicomm.windows.memory import WindowMemory
from mpicomm.windows.window import Window

_free = MPI.Win.Free
_get_attr = MPI.Win.Get_attr


class DeviceWindowCalls(HostWindowCalls):
    """The calls of ``MPI.Win`` on device memory. ``stream=`` is as in the collectives of a Communicator."""

    _window: Window
    _session: Session
    _flavor: int
    _group: MPI.Group
    _completer: Completer

    def _begin(self, session: Session, memory: WindowMemory, array: Any, flavor: int, group: MPI.Group) -> None:
        self._session = session
        self._flavor = flavor
        self._group = group
        self._window = Window(memory, array, group.Dup, session.links)
        self._completer = Completer(by_itself=True)

    def Free(self) -> None:
        """Free the window after a wait for this rank's device. Collective, blocking.

        ``Free`` of the communicator frees the memory of its windows, too. After a timeout this call frees only this
        rank's part.
        """
        window, session = self._window, self._session
        if not window.memory.closed:
            if session.intact:
                session.group.agree("Win.Free", lambda: _as_usage(window.epochs.require_none, "Win.Free"))
            session.close_shared(window.memory, "Win")
            window.array = None  # the caller may free its memory now
        if self:
            _free(self)
            self._group.Free()

    def free(self) -> None:
        """Free as `Free` does; do nothing after it."""
        if self:
            self.Free()

    # Moving data.

    def Put(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy ``origin`` into the part of ``target_rank``. Local, stream-ordered."""
        self._window.put(origin, target_rank, target, stream)

    def Get(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy from the part of ``target_rank`` into ``origin``. Local, stream-ordered."""
        self._window.get(origin, target_rank, target, stream)

    def Rput(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Put`; return its request."""
        return self._started(self._window.start_put("Win.Rput", origin, target_rank, target, stream), stream)

    def Rget(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Get`; return its request."""
        return self._started(self._window.start_get("Win.Rget", origin, target_rank, target, stream), stream)

    def Accumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = MPI.SUM, *, stream: Any = None
    ) -> None:
        """Combine the part of ``target_rank`` with ``origin``, each element atomically. Local, stream-ordered.

        ``op`` is an operation of MPI on single elements, MPI.REPLACE, MPI.NO_OP, or an `Op`. Sums of float32 on a GPU
        take subnormal numbers for zero. Raises `InvalidUsageError` if the link to the rank carries no atomics.
        """
        self._window.accumulate("Win.Accumulate", origin, None, target_rank, target, op, stream)

    def Raccumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = MPI.SUM, *, stream: Any = None
    ) -> MPI.Request:
        """Start `Accumulate`; return its request."""
        local = self._window.start_accumulate("Win.Raccumulate", origin, None, target_rank, target, op, stream)
        return self._started(local, stream)

    def Get_accumulate(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
    ) -> None:
        """Do as `Accumulate`, and copy the previous elements into ``result``. Local, stream-ordered."""
        self._window.accumulate("Win.Get_accumulate", origin, result, target_rank, target, op, stream)

    def Rget_accumulate(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
    ) -> MPI.Request:
        """Start `Get_accumulate`; return its request."""
        local = self._window.start_accumulate("Win.Rget_accumulate", origin, result, target_rank, target, op, stream)
        return self._started(local, stream)

    def Fetch_and_op(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target_disp: int = 0,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
    ) -> None:
        """Do as `Get_accumulate` with one element. Local, stream-ordered."""
        self._window.fetch_and_op("Win.Fetch_and_op", origin, result, target_rank, target_disp, op, stream)

    def Compare_and_swap(
        self,
        origin: Any,
        compare: Any,
        result: Any,
        target_rank: int,
        target_disp: int = 0,
        *,
        stream: Any = None,
    ) -> None:
        """Store ``origin`` if the element equals ``compare``, bit by bit; copy the previous element into ``result``.

        Local, stream-ordered.
        """
        self._window.compare_and_swap("Win.Compare_and_swap", origin, compare, result, target_rank, target_disp, stream)

    def _started(self, local: LocalBuffer | None, stream: Any) -> MPI.Request:
        window = self._window
        work = DeferredRequest.of(window.completion(local, stream), lambda: None)
        if not work.advance():
            work.kept = local
            self._completer.add(work, window.prepare_thread)
        return work

    # Synchronisation.

    def Fence(self, assertion: int = 0, *, stream: Any = None) -> None:
        """End an epoch of all ranks, and begin the next. Collective. It holds the stream, not the host."""
        self._window.fence(assertion, stream)

    def Post(self, group: MPI.Group, assertion: int = 0, *, stream: Any = None) -> None:
        """Let the ranks of ``group`` access this rank's part, after all earlier work of the stream."""
        self._window.post(group, assertion, stream)

    def Start(self, group: MPI.Group, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the parts of the ranks of ``group``. The stream waits for their `Post`."""
        self._window.start(group, assertion, stream)

    def Complete(self, *, stream: Any = None) -> None:
        """End the epoch of `Start`."""
        self._window.complete(stream)

    def Wait(self, *, stream: Any = None) -> Literal[True]:
        """End the epoch of `Post`. The stream waits for the `Complete` of all ranks of its group."""
        self._window.wait(stream)
        return True

    def Test(self, *, stream: Any = None) -> bool:
        """Return whether all ranks of `Post` have called `Complete`; if so, do as `Wait`. Not capturable."""
        return self._window.test(stream)

    def Lock(self, rank: int, lock_type: int = MPI.LOCK_EXCLUSIVE, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the part of ``rank``, which takes no part. The stream waits for the lock."""
        self._window.lock(rank, lock_type, assertion, stream)

    def Unlock(self, rank: int, *, stream: Any = None) -> None:
        """End the epoch of `Lock`, after all accesses of this rank."""
        self._window.unlock(rank, stream)

    def Lock_all(self, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the parts of all ranks with shared locks."""
        self._window.lock_all(assertion, stream)

    def Unlock_all(self, *, stream: Any = None) -> None:
        """End the epoch of `Lock_all`."""
        self._window.unlock_all(stream)

    def Flush(self, rank: int, *, stream: Any = None) -> None:
        """Let later work of the stream follow all accesses of this rank to the part of ``rank``."""
        self._window.flush("Win.Flush", rank, stream)

    def Flush_all(self, *, stream: Any = None) -> None:
        """Let later work of the stream follow all accesses of this rank."""
        self._window.flush("Win.Flush_all", None, stream)

    def Flush_local(self, rank: int, *, stream: Any = None) -> None:
        """Do as `Flush`."""
        self._window.flush("Win.Flush_local", rank, stream)

    def Flush_local_all(self, *, stream: Any = None) -> None:
        """Do as `Flush_all`."""
        self._window.flush("Win.Flush_local_all", None, stream)

    def Sync(self, *, stream: Any = None) -> None:
        """Let later work of the stream see all that other ranks have published to this rank."""
        self._window.sync(stream)

    # The window itself.

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
        self._window.require_usable(what)
        memory = self._window.memory
        if not isinstance(memory, DynamicMemory):
            raise RefusedByMpiError(f"{what}: the window has its memory: make it by Create_dynamic", MPI.ERR_RMA_FLAVOR)
        return memory

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return the part of ``rank``, an array of bytes that this rank has mapped, and its displacement unit. Local.

        The array is a NumPy or CuPy array. ``MPI.PROC_NULL`` is the first rank with memory.
        """
        window = self._window
        window.require_usable("Win.Shared_query")
        if isinstance(window.memory, DynamicMemory):
            raise RefusedByMpiError(
                "Win.Shared_query: ranks attach the memory of this window: make a window by Allocate",
                MPI.ERR_RMA_FLAVOR,
            )
        parts = window.memory.parts
        if rank == MPI.PROC_NULL:
            rank = next((number for number, part in enumerate(parts) if part.nbytes), 0)
        window.require_rank("Win.Shared_query", "rank", rank)
        return window.memory.view(rank), parts[rank].disp_unit

    def tomemory(self) -> Any:
        """Return this rank's part: a NumPy or CuPy array of bytes. Local."""
        return self.Shared_query(self._window.rank)[0]

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
        memory, rank = self._window.memory, self._window.rank
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
