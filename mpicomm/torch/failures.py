"""Errors of calls as PyTorch's programs expect them: `RuntimeError`, as all of PyTorch's own backends raise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from mpicomm.errors import CollectiveTimeoutError, PeerError


class GroupTimeoutError(CollectiveTimeoutError, RuntimeError):
    """Ranks of the group did not come in time."""


class GroupPeerError(PeerError, RuntimeError):
    """A rank of the group failed or called something else."""


class AsExpected(AbstractContextManager[None]):
    """A ``with`` block of the call ``name`` that raises errors of waits for other ranks as the classes above. Local."""

    # A generator would take twice as long, and every call goes through here.
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, CollectiveTimeoutError):
            raise GroupTimeoutError(f"{self._name}: the timeout is over: {error}", ranks=error.ranks) from error
        if isinstance(error, PeerError):
            raise GroupPeerError(f"{self._name}: {error}", ranks=error.ranks) from error


def expected(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return ``call`` in a block of `AsExpected`. Local."""

    def call_or_raise() -> None:
        with AsExpected(name):
            call()

    return call_or_raise
