"""Communicators after `Free`: each of their calls raises an error that is both mpicomm's and MPI's.

A freed communicator changes its class, because a test in each call would take time from small calls.
"""

from __future__ import annotations

import functools
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError


class FreedError(InvalidUsageError, MPI.Exception):
    """The error for a call of a communicator that was freed; mpi4py raises ``MPI.Exception`` for it."""

    def __init__(self, call: str) -> None:
        InvalidUsageError.__init__(self, f"{call}: the communicator was freed; create another")
        MPI.Exception.__init__(self, MPI.ERR_COMM)
        self._call = call

    def __str__(self) -> str:
        return f"{self._call}: the communicator was freed; create another"

    def __reduce__(self) -> Any:
        return FreedError, (self._call,)


def mark_freed(comm: Any) -> None:
    """Let every attribute of ``comm``, which MPI has freed, raise `FreedError` where MPI raises ERR_COMM. Local."""
    cls: Any = type(comm)
    comm.__class__ = _freed_class(cls)


@functools.cache
def _freed_class(cls: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("_"):
            return cls.__getattribute__(self, name)
        value = _translated(name, cls.__getattribute__, self, name)
        return functools.partial(_translated, name, value) if callable(value) else value

    return type(cls.__name__, (cls,), {"__getattribute__": __getattribute__, "__doc__": cls.__doc__})


def _translated(call: str, function: Any, *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except MPI.Exception as error:
        if isinstance(error, FreedError) or error.Get_error_class() != MPI.ERR_COMM:
            raise
        raise FreedError(call) from error
