"""The life of a Communicator: parts made at their first use, the table by MPI's handle, and errors after `Free`."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI

from mpicomm.mpi.errors import RefusedByMpiError

Part = TypeVar("Part")
_lock = threading.RLock()

handle_of = MPI.Comm.handle.__get__  # type: ignore[attr-defined]  # MPI's, which a Communicator hides
# A WeakValueDictionary would take several times as long. MPI uses handles again, so the entries do not become many.
_known: dict[int, weakref.ref[MPI.Comm]] = {}

_WORKING = frozenset(("Compare", "Disconnect", "Free", "free", "handle", "py2f", "toint"))
"""The attributes that work on a freed communicator."""


class Lazy(functools.cached_property[Part]):
    """An attribute that is made at its first use, because many communicators of a program carry no call.

    All threads get the same object, even if their first calls come at once.
    """

    def __get__(self, owner: object, cls: type | None = None) -> Part:  # type: ignore[override]
        """Return the part of ``owner``. Python asks here only until the object has the attribute."""
        with _lock:
            return super().__get__(owner, cls)


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


def mark_freed(comm: Any) -> None:
    """Let every call of ``comm``, which MPI has freed, raise an error that is both mpicomm's and MPI's. Local.

    The communicator changes its class, because a test in each call would slow down small calls. The class does not ask
    MPI, because Open MPI ends the program at a call on a null communicator.
    """
    cls: Any = type(comm)
    comm.__class__ = _freed_class(cls)


@functools.cache
def _freed_class(cls: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("_") or name in _WORKING or not hasattr(cls, name):
            return cls.__getattribute__(self, name)

        def refuse(*arguments: Any, **keywords: Any) -> NoReturn:
            raise RefusedByMpiError(f"{name}: the communicator was freed; create another", MPI.ERR_COMM)

        return refuse if callable(getattr(cls, name)) else refuse()

    members = {"__getattribute__": __getattribute__, "__del__": lambda self: None, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members)
