"""The Communicators of this process by MPI's handle, for programs that pass communicators as numbers."""

from __future__ import annotations

import weakref
from typing import Any

from mpi4py import MPI

_handle_of = MPI.Comm.handle.__get__  # type: ignore[attr-defined]  # MPI's, which a Communicator hides
_known: weakref.WeakValueDictionary[int, MPI.Comm] = weakref.WeakValueDictionary()


def remember(comm: MPI.Intracomm) -> None:
    """Let `communicator_of` find the Communicator as long as the Communicator exists. Local."""
    _known[_handle_of(comm)] = comm


def communicator_of(plain: Any) -> Any:
    """Return the Communicator with the handle of ``plain``, a communicator of mpi4py; without one, ``plain``. Local."""
    if plain == MPI.COMM_NULL:
        return plain
    # MPI may give the handle of a freed communicator to another communicator. The two are not equal.
    found = _known.get(plain.handle)
    return plain if found is None or found != plain else found
