"""Communicators after `Free`: each of their calls raises an error that is both mpicomm's and MPI's.

A freed communicator changes its class, because a test in each call would slow down small calls.
"""

from __future__ import annotations

import functools
from typing import Any

from mpi4py import MPI

from mpicomm.mpi.faults import RefusedByMpiError

_WORKING = frozenset(("Compare", "Disconnect", "Free", "free", "handle", "py2f", "toint"))
"""The attributes that work on a freed communicator."""


def mark_freed(comm: Any) -> None:
    """Let every call of ``comm``, which MPI has freed, raise `RefusedByMpiError`. Local.

    A freed class does not ask MPI, because Open MPI ends the program at a call on a null communicator.
    """
    cls: Any = type(comm)
    comm.__class__ = _freed_class(cls)


@functools.cache
def _freed_class(cls: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("_") or name in _WORKING or not hasattr(cls, name):
            return cls.__getattribute__(self, name)
        if callable(getattr(cls, name)):
            return functools.partial(_refuse, name)
        raise _error(name)

    members = {"__getattribute__": __getattribute__, "__del__": lambda self: None, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members)


def _refuse(call: str, *arguments: Any, **keywords: Any) -> Any:
    raise _error(call)


def _error(call: str) -> RefusedByMpiError:
    return RefusedByMpiError(f"{call}: the communicator was freed; create another", MPI.ERR_COMM)
