"""Errors of calls as PyTorch's programs expect them: `RuntimeError`, as all of PyTorch's own backends raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpicomm.errors import CollectiveTimeoutError, PeerError


class GroupTimeoutError(CollectiveTimeoutError, RuntimeError):
    """Ranks of the group did not come in time."""


class GroupPeerError(PeerError, RuntimeError):
    """A rank of the group failed or called something else."""


@contextmanager
def as_expected(name: str) -> Iterator[None]:
    """Raise the errors of waits for other ranks in a ``with`` block as the classes above. Local."""
    try:
        yield
    except CollectiveTimeoutError as error:
        raise GroupTimeoutError(f"{name}: the timeout is over: {error}", ranks=error.ranks) from error
    except PeerError as error:
        raise GroupPeerError(f"{name}: {error}", ranks=error.ranks) from error


def expected(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return ``call`` with the errors of waits for other ranks as the classes above. Local."""

    def call_or_raise() -> None:
        with as_expected(name):
            call()

    return call_or_raise
