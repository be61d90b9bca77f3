"""The exceptions of mpicomm.

    MpicommError
    +-- InvalidUsageError (ValueError)        an argument, or a call at the wrong time
    +-- HandleError                           memory that could not be allocated, exported, exchanged or opened
    +-- PeerError                             ranks that called different things
    +-- CollectiveTimeoutError (TimeoutError) a rank that did not arrive in time
    +-- BackendUnavailableError               no driver, device or library for the arguments
    +-- KernelCompileError                    NVRTC refused a kernel

All ranks of a communicator raise a set-up error together, with the same class and the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class MpicommError(Exception):
    """Base of every error that mpicomm raises; ``ranks`` are the ranks at fault, if they are known."""

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        # Not by super(): from Python 3.14 on that is the method of another base, such as MPI.Exception, which takes an
        # error code, because ValueError has no such method of its own any more.
        Exception.__init__(self, message)
        self.ranks = tuple(ranks)

    def like(self, message: str, ranks: Iterable[int]) -> Self:
        """Return an error of this class with another text and other ranks, without a traceback. Local.

        A class overrides it if its errors have more than a text and ranks.
        """
        return type(self)(message, ranks=ranks)


class InvalidUsageError(MpicommError, ValueError):
    """An argument has a value that cannot work, or a call came at the wrong time."""


class HandleError(MpicommError):
    """Memory could not be allocated, exported, exchanged, opened or mapped."""


class PeerError(MpicommError):
    """Ranks of one communicator made different calls."""


class CollectiveTimeoutError(MpicommError, TimeoutError):
    """A rank did not arrive in time. After it the communicator is unusable; other communicators go on."""


class BackendUnavailableError(MpicommError):
    """A driver, a device or a library is missing that the arguments ask for."""


class KernelCompileError(MpicommError):
    """NVRTC refused a kernel; the message holds NVRTC's log."""


_Error = TypeVar("_Error", bound=MpicommError)


def equal_error(error: _Error) -> _Error:
    """Return an error of the same class, text and ranks, without a traceback. Local.

    A traceback keeps the frames of the error, and the arrays in them. So code that keeps an error keeps and raises
    equal errors.
    """
    return error.like(str(error), error.ranks)
