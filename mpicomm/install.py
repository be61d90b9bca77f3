"""A Communicator in the place of MPI.COMM_WORLD, for programs that know mpi4py alone."""

from __future__ import annotations

import copyreg
from typing import Any

from mpi4py import MPI

from mpicomm.api.communicator import (
    CartCommunicator,
    Communicator,
    DistGraphCommunicator,
    GraphCommunicator,
    named,
)
from mpicomm.api.replacements import replacements
from mpicomm.mpi.replace import replace
from mpicomm.session import Session

_replaced: list[tuple[Any, str, Any]] = []
"""The module or class of mpi4py, a name in it, and what the name stood for."""


class InstalledCommunicator(Communicator):
    """A Communicator of a program that knows mpi4py alone. `handle` is MPI's; ``describe().handle`` is mpicomm's."""

    handle = MPI.Intracomm.handle  # type: ignore[assignment]


class InstalledCartCommunicator(InstalledCommunicator, CartCommunicator):
    """An InstalledCommunicator of a Cartesian grid."""


class InstalledGraphCommunicator(InstalledCommunicator, GraphCommunicator):
    """An InstalledCommunicator of a graph."""


class InstalledDistGraphCommunicator(InstalledCommunicator, DistGraphCommunicator):
    """An InstalledCommunicator of a graph of which each rank knows its neighbours."""


InstalledCommunicator._classes = {
    MPI.UNDEFINED: InstalledCommunicator,
    MPI.CART: InstalledCartCommunicator,
    MPI.GRAPH: InstalledGraphCommunicator,
    MPI.DIST_GRAPH: InstalledDistGraphCommunicator,
}


def install(*, device: int | str = "auto", handle: str = "auto", timeout_s: float | None = None) -> Communicator:
    """Put a `Communicator` in the place of ``MPI.COMM_WORLD``, and return it. Collective over all ranks, blocking.

    Call it before other modules are imported: a module that has imported ``COMM_WORLD`` before keeps MPI's own. The
    Communicator has MPI's handle of COMM_WORLD: it equals COMM_WORLD, has its attributes, and cannot be freed. All
    communicators that are made from it are Communicators, too. Their ``handle`` is MPI's, as such programs expect, and
    ``MPI.Comm.fromhandle`` gives them back. ``MPI.COMM_SELF`` is replaced likewise.

    ``MPI.Win`` and ``MPI.File`` then refuse device memory, and ``MPI.Attach_buffer`` takes host memory in the place of
    device memory.

    The arguments are those of `Communicator`, and errors are raised as there. A second call changes nothing.
    """
    if not _replaced:
        world, own = MPI.COMM_WORLD, MPI.COMM_SELF
        session = Session.create(world, device, handle, timeout_s)
        channel = session.channel and session.channel.child([world.rank])
        alone = Session(own, session.placement.subset([world.rank]), channel=channel)
        for owner, name, replacement in (
            (MPI, "COMM_WORLD", InstalledCommunicator.permanent(world, session, "COMM_WORLD")),
            (MPI, "COMM_SELF", InstalledCommunicator.permanent(own, alone, "COMM_SELF")),
            *replacements(),
        ):
            _replaced.append((owner, name, replace(owner, name, replacement)))
        copyreg.pickle(MPI.Intracomm, _reduced)
    installed = MPI.COMM_WORLD
    assert isinstance(installed, Communicator)
    return installed


def uninstall() -> None:
    """Give ``MPI.COMM_WORLD`` and all else that `install` has replaced back. Collective over all ranks, blocking.

    It frees the memory and events of the installed Communicators. Without `install` before it does nothing.
    """
    installed = [comm for comm in (MPI.COMM_SELF, MPI.COMM_WORLD) if isinstance(comm, Communicator)]
    while _replaced:
        replace(*_replaced.pop())
    copyreg.dispatch_table.pop(MPI.Intracomm, None)
    for comm in installed:
        comm._session.close()


def _reduced(comm: MPI.Intracomm) -> Any:
    """Return the name of a predefined communicator of mpi4py's, which pickle would look for in vain: another has it."""
    reduced: Any = comm.__reduce__()
    return (named, (reduced,)) if isinstance(reduced, str) else reduced
