"""Requests of MPI that keep the buffers of their calls."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from mpi4py import MPI

# Looked up once, because `super()` and attributes add their time to each request.
_wait = MPI.Request.Wait
_test = MPI.Request.Test
_new_holding = MPI.Request.__new__

_MpiRequest = TypeVar("_MpiRequest", bound=MPI.Request)


def holding(request: _MpiRequest, held: object) -> _MpiRequest:
    """Return ``request``, which keeps ``held`` until its Wait or Test has completed it, or until it dies. Local.

    mpi4py keeps the buffers of only some calls, and a caller may drop them, as in ``Iallreduce(x + 1, y)``.
    """
    # `__new__` by itself is quicker than the class.
    prequest = isinstance(request, MPI.Prequest)
    held_by: Any = _HoldingPrequest(request) if prequest else _new_holding(_HoldingRequest, request)
    held_by._held = held
    return held_by  # type: ignore[no-any-return]


class _HoldingRequest(MPI.Request):
    """A request of MPI that keeps the memory which MPI uses."""

    __slots__ = ("_held",)  # a dictionary takes as long as the look-up of a plain call

    _held: object

    def __repr__(self) -> str:
        return f"<mpicomm.Request {'active' if self else 'inactive'}>"

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        _wait(self, status)
        self._held = None
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        done = _test(self, status)
        if done:
            self._held = None
        return done


class _HoldingPrequest(MPI.Prequest):
    """A persistent request of MPI that keeps the memory which each start uses."""

    __slots__ = ("_held",)

    _held: object
