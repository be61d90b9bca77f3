"""The Communicators of this process by MPI's handle, for programs that pass communicators as numbers."""

from __future__ import annotations

import weakref
from typing import Any

from mpi4py import MPI

_handle_of = MPI.Comm.handle.__get__  # type: ignore[attr-defined]  # MPI's, which a Communicator hides
_known: weakref.WeakValueDictionary[int, MPI.Comm] = weakref.WeakValueDictionary()


def remember(comm: MPI.Intracomm) -> None:
    """Let `communicator_of` find a Communicator as long as it exists. Local."""
    _known[_handle_of(comm)] = comm


def communicator_of(plain: Any) -> Any:
    """Return the Communicator with the handle of a communicator of mpi4py's; the argument itself for others. Local."""
    if plain == MPI.COMM_NULL:
        return plain
    # MPI gives the handle of a communicator that was freed to another one, which then is not equal.
    found = _known.get(plain.handle)
    return plain if found is None or found != plain else found
