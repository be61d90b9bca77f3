"""Win: mpi4py's window, whose memory may be device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mpi4py import MPI
from mpi4py.MPI import COMM_SELF, INFO_NULL, Info, Intracomm

from mpicomm.api.communicator import Communicator
from mpicomm.api.lifetime import communicator_of
from mpicomm.api.topologies import allgather
from mpicomm.api.window_on_host import HostWindowCalls, require_on_host
from mpicomm.errors import InvalidUsageError, name_ranks
from mpicomm.mpi.arguments import is_on_device
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.session import Session
from mpicomm.windows.memory import (
    BYTES,
    DynamicMemory,
    Part,
    Provider,
    WindowMemory,
    adopt_memory,
    checked_part,
    require_one_node,
    share_dynamic_window,
    share_window,
)
from mpicomm.windows.window import WindowCalls

_create = MPI.Win.Create.__func__  # type: ignore[attr-defined]  # before `install` replaces it
T = TypeVar("T")
_PLACES = ("auto", "device", "mpi")


class DeviceWindowCalls(WindowCalls, HostWindowCalls):
    """The calls of ``MPI.Win`` on device memory. ``stream=`` is as in the collectives of a Communicator."""

    _flavor: int

    def Free(self) -> None:
        """Free the window after a wait for this rank's device. Collective, blocking.

        ``Free`` of the communicator frees the memory of its windows, too. After a timeout this call frees only this
        rank's part.
        """
        memory, session = self._memory, self._owner
        if not memory.closed:
            if session.intact:
                others = () if self._is_interrupted else ("Start", "Post", "Lock")
                session.group.agree("Win.Free", lambda: self._require_no_epoch("Win.Free", *others))
            session.close_shared(memory, "Win")
            self._array = None  # the caller may free its memory now
        if self:
            super().Free()
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
        return 0 if isinstance(memory, DynamicMemory) else memory.pointers[rank], *memory.parts[rank]

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
        names = MPI.WIN_BASE, MPI.WIN_SIZE, MPI.WIN_DISP_UNIT, MPI.WIN_CREATE_FLAVOR, MPI.WIN_MODEL
        own = dict(zip(names, (*self.attrs, self._flavor, MPI.WIN_UNIFIED), strict=True))
        return own[keyval] if keyval in own else super().Get_attr(keyval)


if TYPE_CHECKING:  # the methods of windows on host memory are made from a table, which type checkers do not read
    _Calls = DeviceWindowCalls
else:
    _Calls = HostWindowCalls


class Win(_Calls):
    """A window for one-sided calls: ``MPI.Win``, whose memory may be device memory of a `Communicator`.

    `Create`, `Allocate`, `Allocate_shared` and `Create_dynamic` make it. All of them are *collective* and blocking.
    ``place`` says whose memory it has:

    - ``"device"``: memory of the GPU of ``comm``, a Communicator. All ranks map it, as the memory of ``comm.register``
      and ``comm.empty``. On a ``"cpu"`` communicator it is MPI's, and `Allocate` does as `Allocate_shared`.
    - ``"mpi"``: host memory. MPI carries out all calls. Accumulates of float16, bfloat16 and fp8, and by an `Op`, raise
      `InvalidUsageError`.
    - ``"auto"``: on a GPU `Create` takes the place where ``memory`` lies, and `Allocate` device memory. Without a GPU
      the memory is MPI's.

    All ranks pass the same ``place``. A window of GPU memory needs ranks of one node. Its calls are stream-ordered,
    take ``stream=``, and can be captured in CUDA graphs. Buffers may be device arrays or host arrays. A wait that lasts
    longer than ``timeout_s`` of the communicator is an error, as in collectives.

        win = mpicomm.Win.Allocate(8 * 10, 8, comm=comm, place="device")
        win.Fence()
        win.Put(cp.ones(3), (comm.rank + 1) % comm.size, 2)  # into elements 2 to 4
        win.Accumulate(cp.ones(1), 0, 9)
        win.Fence()
        win.Free()
    """

    def __repr__(self) -> str:
        place = "device" if isinstance(self, DeviceWindowCalls) else "mpi"
        return f"<mpicomm.Win {f'place={place!r}' if self else 'freed'}>"

    @classmethod
    def Create(
        cls,
        memory: Any,
        disp_unit: int = 1,
        info: Info = INFO_NULL,
        comm: Intracomm = COMM_SELF,
        *,
        place: str = "auto",
    ) -> Win:
        """Make a window of existing memory. None is no memory. Collective, blocking.

        Device memory is memory that ``comm.register`` takes. Raises `InvalidUsageError` on all ranks alike if one rank
        passes device memory and another passes host memory.
        """
        what = "Win.Create"
        provide: Provider | None = None

        def offer(session: Session | None) -> tuple[str, Part]:
            """Return the kind of memory that this rank passes, and its part of the window."""
            nonlocal provide
            if memory is None or memory is MPI.BOTTOM:
                return "no", checked_part(0, disp_unit, what)
            if session is not None and (place == "device" or is_on_device(memory)):
                nbytes, provide = adopt_memory(session, memory)
                return "device", checked_part(nbytes, disp_unit, what)
            require_on_host("Create", None, memory=memory)
            return "host", checked_part(MPI.memory.frombuffer(memory).nbytes, disp_unit, what)

        comm, session, offers = _read_all(what, comm, info, place, offer)
        found = {kind: [rank for rank, each in enumerate(offers) if each[0] == kind] for kind in ("host", "device")}
        if found["host"] and found["device"]:
            raise InvalidUsageError(
                f"{what}: memory is device memory on {name_ranks(found['device'])} and host memory on "
                f"{name_ranks(found['host'])}: pass memory of one kind on all ranks"
            )
        parts = [part for _, part in offers]
        if session is None or not (found["device"] or place == "device"):
            return _with_parts(_create(cls, memory, disp_unit, info, comm), comm, parts)
        require_one_node(session, what)
        shared = share_window(session, what, parts, provide, allocated=False)
        array = memory if offers[comm.rank][0] == "device" else shared.view(comm.rank)
        return _open_on_device(comm, info, shared, array, MPI.WIN_FLAVOR_CREATE)

    @classmethod
    def Allocate(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF, *, place: str = "auto"
    ) -> Win:
        """Make a window of new memory of ``size`` bytes. ``tomemory()`` is its array of bytes. Collective, blocking."""
        return cls._allocated(MPI.WIN_FLAVOR_ALLOCATE, size, disp_unit, info, comm, place)

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF, *, place: str = "auto"
    ) -> Win:
        """Make a window as `Allocate` does. Device memory of several ranks never lies side by side: use `Shared_query`.

        Collective, blocking.
        """
        return cls._allocated(MPI.WIN_FLAVOR_SHARED, size, disp_unit, info, comm, place)

    @classmethod
    def _allocated(cls, flavor: int, size: Any, disp_unit: Any, info: Info, comm: Any, place: str) -> Win:
        shared = flavor == MPI.WIN_FLAVOR_SHARED
        what = "Win.Allocate_shared" if shared else "Win.Allocate"
        comm, session, parts = _read_all(what, comm, info, place, lambda _: checked_part(size, disp_unit, what))
        if session is None:
            by_mpi: Any = super().Allocate_shared if shared or place == "device" else super().Allocate
            return _with_parts(by_mpi(*parts[comm.rank], info, comm), comm, parts)
        require_one_node(session, what)
        memory = share_window(session, what, parts, None, allocated=True)
        return _open_on_device(comm, info, memory, memory.view(comm.rank), flavor)

    @classmethod
    def Create_dynamic(cls, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF, *, place: str = "auto") -> Win:
        """Make a window to which ranks attach memory of this place. Collective, blocking."""
        what = "Win.Create_dynamic"
        comm, session, _ = _read_all(what, comm, info, place, lambda _: None)
        if session is None:
            return _with_parts(super().Create_dynamic(info, comm), comm)
        require_one_node(session, what)
        memory = share_dynamic_window(session, what)
        array = session.backend.view(memory.local_board, (0,), BYTES)
        return _open_on_device(comm, info, memory, array, MPI.WIN_FLAVOR_DYNAMIC)


if TYPE_CHECKING:
    DeviceWin = Win
else:

    class DeviceWin(DeviceWindowCalls, Win):
        """A `Win` of device memory."""


def _read_all(
    what: str, comm: Any, info: Any, place: str, read: Callable[[Session | None], T]
) -> tuple[Any, Session | None, list[T]]:
    """Return the Communicator of ``comm``, its session if GPUs may have the memory, and what ``read`` returns.

    ``read`` gets the session, and its results are of all ranks. Raises its error, and that of a bad place, on all
    ranks: a rank that raised alone would leave the others in MPI, or in the exchange of memory. Raises TypeError, as
    mpi4py does, for arguments of another class. Collective.
    """
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"{what}: comm={comm!r} is no MPI.Intracomm: pass a Communicator, or leave it out for COMM_SELF"
        )
    if comm == MPI.COMM_NULL:
        raise RefusedByMpiError(f"{what}: comm is MPI.COMM_NULL, or was freed: pass another", MPI.ERR_COMM)
    if not isinstance(info, MPI.Info):
        raise TypeError(f"{what}: info={info!r} is no MPI.Info: pass one, or leave it out")
    comm, session = communicator_of(comm), None
    if isinstance(comm, Communicator) and place != "mpi" and comm.device != "cpu":
        session = comm._session.set_up(what)

    def checked() -> T:
        if place not in _PLACES:
            raise InvalidUsageError(f"{what}: place={place!r}: use one of {', '.join(_PLACES)}")
        if place == "device" and not isinstance(comm, Communicator):
            raise InvalidUsageError(f"{what}: comm={comm!r} is no mpicomm.Communicator, which place='device' needs")
        return read(session)

    found = allgather(MPI.Intracomm(comm), what, checked) if session is None else session.group.allgather(what, checked)
    return comm, session, found


def _open_on_device(comm: Any, info: Info, memory: WindowMemory, array: Any, flavor: int) -> DeviceWin:
    """Make a window of shared ``memory``. Collective. ``array`` is this rank's part."""
    session: Session = comm._session
    windows: list[DeviceWin] = []

    def make() -> None:
        # MPI's part of the window has no memory. It carries the name, the attributes and the error handler. It is of
        # this rank alone, because a rank that died before a collective call of MPI would leave the others in MPI.
        windows.append(_create(DeviceWin, None, 1, info, MPI.COMM_SELF))
        windows[0]._flavor = flavor
        windows[0]._begin(memory, array, comm.Get_group())

    try:
        # All ranks together, because a rank whose kernels do not load would raise alone.
        session.group.agree("Win: load kernels", make)
    except Exception:
        session.close_shared(memory, "Win")  # all ranks fail together
        for win in windows:
            MPI.Win.Free(win)
        raise
    return _with_parts(windows[0], comm)


def _with_parts(win: Win, comm: Any, parts: Sequence[Part] = ()) -> Win:
    """Return a window that knows the ``parts`` of all ranks, which MPI does not check, and that records its calls.

    It records them if its communicator does. Local.
    """
    if isinstance(win, HostWindowCalls):  # else of a class of the program
        win._parts = dict(enumerate(parts))
    if isinstance(comm, Communicator) and comm._session.tracer is not None:
        from mpicomm.observation import record_calls  # few programs record

        record_calls(win, comm._session.tracer)
    return win
