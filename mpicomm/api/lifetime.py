"""The life of a Communicator: parts made at their first use, the table by MPI's handle, `Free`, and errors after it."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mpi4py import MPI

from mpicomm.cluster import process
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

Part = TypeVar("Part")
_lock = threading.RLock()

handle_of = MPI.Comm.handle.__get__  # type: ignore[attr-defined]  # MPI's, which a Communicator hides
by_handle: weakref.WeakValueDictionary[int, MPI.Comm] = weakref.WeakValueDictionary()
"""The Communicators that exist, by MPI's handle."""

_USABLE = frozenset(("Compare", "Disconnect", "Free", "free", "handle", "py2f", "toint"))
"""The attributes that work on a freed communicator."""


class Lazy(functools.cached_property[Part]):
    """An attribute that is made at its first use, because many communicators of a program carry no call.

    All threads get the same object, even if their first calls come at once.
    """

    def __get__(self, owner: object, cls: type | None = None) -> Part:  # type: ignore[override]
        """Return the part of ``owner``. Python asks here only until the object has the attribute."""
        with _lock:
            return super().__get__(owner, cls)


def communicator_of(plain: Any) -> Any:
    """Return the Communicator with the handle of ``plain``, a communicator of mpi4py; without one, ``plain``. Local."""
    if plain == MPI.COMM_NULL:
        return plain
    # MPI may give the handle of a freed communicator to another communicator. The two are not equal.
    found = by_handle.get(plain.handle)
    return plain if found is None or found != plain else found


class Lifetime(MPI.Intracomm):
    """`Free` and its kin, the ``with`` block, and the warning of a Communicator that was not freed."""

    _session: Session
    _unfreed = False
    _name_in_mpi = ""
    """The name in ``mpi4py.MPI`` of a communicator that MPI frees itself."""

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, is_finalized: Callable[[], bool] = MPI.Is_finalized
    ) -> None:
        """Warn (ResourceWarning) of a lost communicator, because garbage collection cannot make the collective `Free`.

        It does not warn of a communicator that was made from another communicator. It does not warn at the end of the
        program, because MPI_Finalize frees communicators.
        """
        if self._unfreed and not is_finalizing() and not is_finalized() and self != MPI.COMM_NULL:
            warnings.warn(
                f"{self!r} was not freed: call Free, or use a with block", ResourceWarning, stacklevel=2, source=self
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._session.explain_exit(error)
        process.close_after(error, self.Free)

    def Free(self) -> None:
        """Free the communicator with all its arrays and events. Collective, blocking.

        Complete all requests and receive all messages before, because `Free` drops messages that have not left yet. A
        second call does nothing. A call after MPI_Finalize or in a forked process does nothing either. After a timeout
        that leaves the communicator unusable `Free` frees this rank's part, and waits for no other rank. Otherwise, so
        also after a timeout of `Split`, `Dup` and other calls that make communicators, all ranks may still use each
        other's memory, and `Free` waits up to twice ``timeout_s`` for a rank that does not come.

        At the end of a ``with`` block that an exception has left, the exception is raised again also if `Free` fails.
        If the other ranks do not come at once, its traceback is logged before the wait.

        Calls of a freed communicator raise `InvalidUsageError`. The error is also MPI's exception if MPI refuses the
        call.
        """
        self._end(super().Free)

    def free(self) -> None:
        """Free as `Free` does, for mpi4py's clean-up. Do nothing if the communicator is freed or MPI frees it."""
        if self != MPI.COMM_NULL and not self._name_in_mpi:
            self.Free()

    def Disconnect(self) -> None:
        """Free as `Free` does, after MPI has completed pending communication. Collective, blocking."""
        self._end(super().Disconnect)

    def _end(self, by_mpi: Callable[[], None]) -> None:
        self._unfreed = False
        if not self._name_in_mpi:
            if self == MPI.COMM_NULL or MPI.Is_finalized() or process.is_forked:
                return
            self._session.close()
            if not self._session.intact:
                return  # MPI keeps its part of a broken communicator, because only a collective call frees it
        by_mpi()
        # The communicator changes its class, because a test in each call would slow down small calls.
        cls: Any = type(self)
        self.__class__ = _freed_class(cls)


@functools.cache
def _freed_class(cls: Any) -> Any:
    """Return a class whose calls raise an error that is both mpicomm's and MPI's.

    They do not ask MPI, because Open MPI ends the program at a call on a null communicator.
    """

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("_") or name in _USABLE or not hasattr(cls, name):
            return cls.__getattribute__(self, name)

        def refuse(*arguments: Any, **keywords: Any) -> NoReturn:
            raise RefusedByMpiError(f"{name}: the communicator was freed; create another", MPI.ERR_COMM)

        return refuse if callable(getattr(cls, name)) else refuse()

    members = {"__getattribute__": __getattribute__, "__del__": lambda self: None, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members)
