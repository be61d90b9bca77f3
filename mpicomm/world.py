"""A Communicator in the place of MPI.COMM_WORLD, for programs that know only mpi4py.

`install` also replaces the methods of mpi4py that know neither Communicators nor device arrays.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

from mpicomm import environment
from mpicomm.api.calls_by_mpi import Wrapped, buffers_of, diverted, on_host_copies, refuse, wrap
from mpicomm.api.communicator import Communicator, predefined
from mpicomm.api.lifetime import communicator_of
from mpicomm.api.window import Win
from mpicomm.mpi.arguments import is_on_device
from mpicomm.mpi.buffers import array_of, read
from mpicomm.mpi.host_calls import log_host_staging
from mpicomm.mpi.request_lists import replace
from mpicomm.session import Session

_attach = MPI.Attach_buffer
_detach = MPI.Detach_buffer
_create = MPI.Intracomm.Create_intercomm
_attached: list[Any] = []


def replacements(*, by_program: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield each replacement: the module or the class, the name, and the new method.

    ``by_program`` is whether the program has started MPI itself.
    """
    yield from _initialization(by_program=by_program)
    yield MPI, "Attach_buffer", _attach_buffer
    yield MPI, "Detach_buffer", _detach_buffer
    yield MPI.Message, "Probe", classmethod(_matched_probe("Mprobe", MPI.Message.Probe))
    yield MPI.Message, "Iprobe", classmethod(_matched_probe("Improbe", MPI.Message.Iprobe))
    yield MPI.Intracomm, "Create_intercomm", _create_intercomm
    for name in ("fromhandle", "fromint", "f2py"):
        yield MPI.Comm, name, classmethod(_from_handle(getattr(MPI.Comm, name)))
    # These use buffers only during the call, so that host copies can stand for the buffers.
    yield MPI.Op, "Reduce_local", diverted(MPI.Op.Reduce_local, _on_copies)
    for name in ("Pack", "Unpack", "Pack_external", "Unpack_external"):
        yield MPI.Datatype, name, diverted(getattr(MPI.Datatype, name), _on_copies)
    yield MPI.Session, "Attach_buffer", diverted(MPI.Session.Attach_buffer, refuse)
    yield MPI.Win, "Create", classmethod(_create_window)
    for cls in (MPI.Win, MPI.File):
        for name in sorted({*cls.__dict__} - {"Create"}):
            method = getattr(cls, name)
            if name[0].isupper() and callable(method) and buffers_of(method):
                yield cls, name, diverted(method, refuse)


def _initialization(*, by_program: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield ``Init`` and the like for a program that sets ``mpi4py.rc.initialize = False`` and then starts MPI itself.

    MPI runs since `install`, and can start only once. So the first Init of such a program has nothing to do, and a
    second one raises MPI's error.
    """
    init, init_thread, is_initialized = MPI.Init, MPI.Init_thread, MPI.Is_initialized

    def is_first() -> bool:
        nonlocal by_program
        started, by_program = by_program or mpi4py.rc.initialize, True
        return not started

    yield MPI, "Init", functools.wraps(init)(lambda: None if is_first() else init())

    @functools.wraps(init_thread)
    def start(required: int = MPI.THREAD_MULTIPLE) -> int:
        return MPI.Query_thread() if is_first() else init_thread(required)

    yield MPI, "Init_thread", start
    runs = functools.wraps(is_initialized)(lambda: is_initialized() and (by_program or mpi4py.rc.initialize))
    yield MPI, "Is_initialized", runs


def _attach_buffer(buf: Any) -> None:
    """Attach a buffer for sends in buffered mode; see mpi4py. For device memory MPI gets host memory of its size."""
    if buf is None or isinstance(buf, int) or not is_on_device(buf):
        _attach(buf)
        return
    _attach(np.empty(read(array_of(buf), True, "buf").nbytes, np.uint8))
    _attached.append(buf)


def _detach_buffer() -> Any:
    """Remove the attached buffer; see mpi4py."""
    detached = _detach()
    return _attached.pop() if _attached else detached


def _matched_probe(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def probe(cls: type[MPI.Message], comm: MPI.Comm, *arguments: Any, **keywords: Any) -> Any:
        return getattr(comm, method)(*arguments, **keywords)

    return probe


def _from_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def communicator(cls: type[MPI.Comm], handle: int) -> Any:
        return communicator_of(original(handle))

    return communicator


@functools.wraps(_create)
def _create_intercomm(self: MPI.Intracomm, *arguments: Any, **keywords: Any) -> Any:
    made = _create(self, *arguments, **keywords)
    return wrap(made, self._gpu) if isinstance(self, Wrapped) else made


def _create_window(cls: type[MPI.Win], *arguments: Any, **keywords: Any) -> MPI.Win:
    """Make a window; see mpi4py. Device memory makes a window of mapped memory: see `Win`."""
    make: Any = Win.Create.__func__  # type: ignore[attr-defined]
    made: MPI.Win = make(_ProgramsWin if cls is MPI.Win else cls, *arguments, **keywords)
    return made


class _ProgramsWin(Win):
    """A window of host memory, whose memory has mpi4py's class as in windows of ``MPI.Win.Allocate``."""

    Shared_query = MPI.Win.Shared_query
    tomemory = MPI.Win.tomemory


def _on_copies(method: Callable[..., Any], given: dict[str, Any], on_device: list[str]) -> Any:
    """Call a method of MPI with host copies of device arrays."""
    called, buffers = given.pop("self"), buffers_of(method)

    def on_copies(**arguments: Any) -> Any:
        if isinstance(called, MPI.Datatype):  # the datatype is the type of its buffers
            arguments.update({name: array_of(arguments[name]) for name in buffers if name in arguments})
        return method(called, **arguments)

    world = MPI.COMM_WORLD
    assert isinstance(world, Wrapped)
    log_host_staging(method.__name__, "only MPI has the call")
    return on_host_copies(on_copies, method.__name__, given, buffers, world._gpu(method.__name__))


_replaced: list[tuple[Any, str, Any]] = []
"""The module or class of mpi4py, a name in it, and the original object of that name."""


def install(
    *,
    device: int | str = "auto",
    handle: str = "auto",
    timeout_s: float | None = None,
    stream_order: bool | None = None,
) -> Communicator:
    """Put a `Communicator` in the place of ``MPI.COMM_WORLD``, and return it. Collective over all ranks, blocking.

    Call it before other modules are imported: a module that has imported ``COMM_WORLD`` before keeps the COMM_WORLD of
    MPI. The Communicator has MPI's handle of COMM_WORLD. So it equals COMM_WORLD, has its attributes, and cannot be
    freed. All communicators that are made from it are Communicators, too. Their ``handle`` is MPI's handle, because
    such programs expect it, and ``MPI.Comm.fromhandle`` returns the Communicators. `install` replaces ``MPI.COMM_SELF``
    in the same way.

    After this call ``MPI.Win.Create`` takes device memory as `Win` does. Windows of host memory and ``MPI.File`` refuse
    device arrays. ``MPI.Attach_buffer`` takes host memory in the place of device memory. If ``mpi4py.rc.initialize`` is
    false and MPI does not run yet, this starts MPI, and the program's own ``MPI.Init`` or ``Init_thread`` returns at
    once.

    Blocking calls on device memory, ``Wait``, ``Test`` that returns true, and synchronisation of windows are complete
    on return: every stream and the host may use the buffers. Programs for a CUDA-aware MPI rely on this. With
    ``stream_order=True`` (or MPICOMM_ORDER=stream) the calls are stream-ordered, as on a `Communicator` that the
    program makes itself. Calls that mpi4py does not have, and messages with ``algorithm="stream"``, always are, and so
    are calls in a stream that captures a CUDA graph.

    The other arguments and the errors are as in `Communicator`. A second call changes nothing.
    """
    if not _replaced:
        is_running = MPI.Is_initialized()
        if not is_running:  # mpi4py.rc.initialize is false, perhaps by MPI4PY_RC_INITIALIZE
            MPI.Init_thread()
        world, own = MPI.COMM_WORLD, MPI.COMM_SELF
        session = Session.create(world, device, handle, timeout_s, lambda: not environment.stream_order(stream_order))
        tracer = session.tracer and session.tracer.child([world.rank])
        alone = Session(own, session.placement.subset([world.rank]), tracer=tracer)
        for owner, name, replacement in (
            (MPI, "COMM_WORLD", Communicator.installed(world, session, "COMM_WORLD")),
            (MPI, "COMM_SELF", Communicator.installed(own, alone, "COMM_SELF")),
            *replacements(by_program=is_running and not mpi4py.rc.initialize),
        ):
            _replaced.append((owner, name, replace(owner, name, replacement)))
        copyreg.pickle(MPI.Intracomm, _reduced)
    installed = MPI.COMM_WORLD
    assert isinstance(installed, Communicator)
    return installed


def uninstall() -> None:
    """Undo all replacements of `install`, such as ``MPI.COMM_WORLD``. Collective over all ranks, blocking.

    It frees the memory and events of the installed Communicators. Without an earlier `install` it does nothing.
    """
    installed = [comm for comm in (MPI.COMM_SELF, MPI.COMM_WORLD) if isinstance(comm, Communicator)]
    while _replaced:
        replace(*_replaced.pop())
    copyreg.dispatch_table.pop(MPI.Intracomm, None)
    for comm in installed:
        comm._session.close()


def _reduced(comm: MPI.Intracomm) -> Any:
    """Return the name of a predefined communicator of mpi4py. Pickle would not find it: another object has the name."""
    reduced: Any = comm.__reduce__()
    return (predefined, (reduced,)) if isinstance(reduced, str) else reduced
