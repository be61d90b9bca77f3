"""Errors of calls as PyTorch's programs expect them: `RuntimeError`, as all of PyTorch's own backends raise."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.errors import CollectiveTimeoutError, PeerError


class GroupTimeoutError(CollectiveTimeoutError, RuntimeError):
    """Ranks of the group did not come in time."""


class GroupPeerError(PeerError, RuntimeError):
    """A rank of the group failed or called something else."""


def expected(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return ``call`` with the errors of waits for other ranks as the classes above. Local."""

    def call_or_raise() -> None:
        try:
            call()
        except CollectiveTimeoutError as error:
            raise GroupTimeoutError(f"{name}: the timeout is over: {error}", ranks=error.ranks) from error
        except PeerError as error:
            raise GroupPeerError(f"{name}: {error}", ranks=error.ranks) from error

    return call_or_raise
