"""The Communicators of this process by MPI's handle, for programs that pass communicators as numbers."""

from __future__ import annotations

import weakref
from typing import Any

from mpi4py import MPI

handle_of = MPI.Comm.handle.__get__  # type: ignore[attr-defined]  # MPI's, which a Communicator hides
# A WeakValueDictionary would take several times as long. MPI uses handles again, so the entries do not become many.
_known: dict[int, weakref.ref[MPI.Comm]] = {}


def remember(comm: MPI.Intracomm) -> None:
    """Let `communicator_of` find the Communicator as long as the Communicator exists. Local."""
    _known[handle_of(comm)] = weakref.ref(comm)


def communicator_of(plain: Any) -> Any:
    """Return the Communicator with the handle of ``plain``, a communicator of mpi4py; without one, ``plain``. Local."""
    if plain == MPI.COMM_NULL:
        return plain
    # MPI may give the handle of a freed communicator to another communicator. The two are not equal.
    known = _known.get(plain.handle)
    found = known and known()
    return plain if found is None or found != plain else found
