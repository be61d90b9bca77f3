"""A Communicator in the place of MPI.COMM_WORLD, for programs that know only mpi4py."""

from __future__ import annotations

import copyreg
from typing import Any

import mpi4py
from mpi4py import MPI

from mpicomm import environment
from mpicomm.api.communicator import Communicator, named
from mpicomm.api.replacements import replacements
from mpicomm.mpi.request_lists import replace
from mpicomm.session import Session

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
        channel = session.channel and session.channel.child([world.rank])
        alone = Session(own, session.placement.subset([world.rank]), channel=channel)
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
    return (named, (reduced,)) if isinstance(reduced, str) else reduced
