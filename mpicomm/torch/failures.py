"""Errors of calls with the classes that programs expect of PyTorch's own backends."""

from __future__ import annotations

from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, PeerError

WAITS = CollectiveTimeoutError, PeerError
"""The errors of waits for other ranks."""


class TensorError(InvalidUsageError, RuntimeError):
    """The error for a tensor on a device that groups do not serve, and for split sizes that do not fit a tensor."""


class ElementTypeError(InvalidUsageError, TypeError, RuntimeError):
    """The error for elements that cannot be reduced, and for tensors of one call that differ in type or device.

    PyTorch's backends raise TypeError or RuntimeError for it.
    """


class GroupTimeoutError(CollectiveTimeoutError, RuntimeError):
    """The error if ranks of the group did not come in time."""


class GroupPeerError(PeerError, RuntimeError):
    """The error if a rank of the group failed or called something else."""


def translated(error: BaseException, name: str) -> BaseException:
    """Return an error of the call ``name``. The error of a wait for other ranks becomes a class above. Local."""
    expected: BaseException
    if isinstance(error, CollectiveTimeoutError):
        expected = GroupTimeoutError(f"{name}: the timeout is over: {error}", ranks=error.ranks)
    elif isinstance(error, PeerError):
        expected = GroupPeerError(f"{name}: {error}", ranks=error.ranks)
    else:
        return error
    expected.__cause__ = error
    return expected
