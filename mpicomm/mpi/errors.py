"""Errors that are both `InvalidUsageError` and the class that mpi4py raises, because programs catch that class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError

if TYPE_CHECKING:
    from typing_extensions import Self


class RefusedByMpiError(InvalidUsageError, MPI.Exception):
    """The error for an argument that MPI also refuses. ``error_class`` is MPI's class, such as ``MPI.ERR_OP``.

    So one fault has one class, whether mpicomm or MPI carries the call out.
    """

    def __init__(self, message: str, error_class: int, *, ranks: Iterable[int] = ()) -> None:
        InvalidUsageError.__init__(self, message, ranks=ranks)
        MPI.Exception.__init__(self, error_class)
        self._message = message

    def __str__(self) -> str:
        return self._message  # MPI.Exception would show only MPI's words

    def like(self, message: str, ranks: Iterable[int]) -> Self:
        """See `MpicommError.like`. The error has MPI's class of this error."""
        return type(self)(message, self.Get_error_class(), ranks=ranks)

    def __reduce__(self) -> Any:
        return type(self), (self._message, self.Get_error_class()), {"ranks": self.ranks}


class UnknownTypeError(InvalidUsageError, KeyError):
    """The error for a text that names no datatype. mpi4py raises KeyError for it."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the text in quotes


class BufferRefusedError(InvalidUsageError, BufferError):
    """The error for an object with unusable memory. mpi4py raises BufferError for most such objects."""


class UnknownElementsError(UnknownTypeError, BufferRefusedError):
    """The error for elements of a type that neither MPI nor mpicomm has."""
