"""A meeting of the ranks of a call on host arrays, before MPI moves data of the call.

MPI would wait for ever for a rank that is not there, and would return parts of the result if ranks called different
things.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.agreement import abandoned, did_not_arrive
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError
from mpicomm.session import Session
from mpicomm.waiting import wait_until

_NAMING_S = 0.5


def meet(session: Session, kind: str, act: Callable[[], str]) -> None:
    """Act on all ranks, and return if ``act`` returns the same text on all ranks. Else raise on all ranks.

    If ``act`` raises an error that is not mpicomm's, this rank raises the error itself, and the others `PeerError`.
    """
    session.group.require_whole(kind)
    failure: Exception | None = None
    text, digest = "", 0
    try:
        text = act()
        digest = zlib.crc32(text.encode()) + 1
    except Exception as error:
        failure = error
    mine, most = np.array([digest, -digest]), np.empty(2, int)
    request = session.private.Iallreduce(mine, most, MPI.MAX)  # it takes a tenth of the time of an exchange
    if not wait_until(request.Test, session.group.timeout_s):
        abandoned.append(request)
        _name_missing(session, kind)
    elif failure is None and most[0] == -most[1]:
        return

    def say() -> str:
        if isinstance(failure, MpicommError):
            raise failure
        if failure is not None:
            raise PeerError(f"{type(failure).__name__}: {failure}")
        return text

    try:
        texts = session.group.exchange(kind, say)
    except PeerError:
        if failure is None or isinstance(failure, MpicommError):
            raise
        raise failure from None
    said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    raise InvalidUsageError(f"ranks called different things: {said}: pass the same shapes and dtypes on all ranks")


def _name_missing(session: Session, kind: str) -> None:
    """Raise `CollectiveTimeoutError` with the ranks that have not come in time. The communicator is then broken."""
    timeout_s = session.group.timeout_s
    session.hasten(_NAMING_S)
    try:
        session.group.barrier(kind)
    except CollectiveTimeoutError as error:
        missing = [*error.ranks]
        raise did_not_arrive(kind, missing, timeout_s, session.group.absence_reason(missing)) from None
    raise CollectiveTimeoutError(f"{kind}: the ranks came one after the other, within twice {timeout_s:g} s")
