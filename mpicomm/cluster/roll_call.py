"""The roll call of a communicator of the user: it names a missing rank before there is a `Group` of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.agreement import GRACE_S, abandoned, did_not_arrive, ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError
from mpicomm.waiting import soon, wait_until


def duplicate(comm: MPI.Intracomm, step: str, timeout_s: float) -> MPI.Intracomm:
    """Return a duplicate of ``comm`` after all ranks have come. Collective, blocking; raises as `roll_call` does."""
    roll_call(comm, step, timeout_s)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        copy, request = comm.Idup()
        if not wait_until(request.Test, timeout_s):  # a rank has left since the roll call; only a `Group` could name it
            abandoned.append(request)
            raise CollectiveTimeoutError(f"{step}: not all ranks arrived within {timeout_s:g} s")
        return copy


def private_copy(comm: MPI.Intracomm, step: str, timeout_s: float) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` in their order, after all ranks have come. Collective, blocking.

    The copy has no attributes of the user: a duplicate would have them, and would call their copy and delete functions.
    Raises as `roll_call` does. If a rank dies after the roll call, the other ranks hang in MPI, because MPI has no
    nonblocking `Split`.
    """
    roll_call(comm, step, timeout_s)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        return cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.rank))


_HERE, _LEFT = 1, 2  # words of a rank in a roll call; 0 stands for a rank that has said nothing


def roll_call(comm: MPI.Intracomm, step: str, timeout_s: float) -> None:
    """Return when all ranks of ``comm`` have called it. Collective, blocking.

    If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
    `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
    MPI, so ``comm`` stays usable.

    ``comm`` belongs to the user, and a receive of the user may take any message. So the ranks speak through nonblocking
    collectives of MPI, which no receive can take. As in `Group`, the first rank hears all ranks and tells them who is
    there.

    The error may be imprecise in two cases. Without the first rank no rank hears of the others, so the error names only
    the first rank, also if more ranks are missing. And MPI may send the words of ranks along a tree. Then the error may
    also name ranks whose words pass through the missing rank. MPICH and Open MPI send each word straight to the first
    rank.
    """
    require_own_process(step)
    if comm.size == 1:
        return
    requests: list[MPI.Request] = []

    def wait(ready: Callable[[], bool], limit_s: float) -> bool:
        if soon(ready):
            return True
        with page().step(step, ranks_in_world(comm, range(comm.size))):
            return wait_until(ready, limit_s)

    try:
        words = (_call_the_roll if comm.rank == 0 else _answer_the_roll)(comm, timeout_s, wait, requests)
    finally:
        # Also after a Ctrl-C, because an open request, which is true, keeps its buffers.
        abandoned.extend(filter(None, requests))
    if words != _all_here(comm.size):
        # If a rank has left, the first rank was late; else the silent ranks are late.
        missing = [0] if _LEFT in words else [rank for rank, word in enumerate(words) if not word]
        raise did_not_arrive(step, missing, timeout_s, "let every rank make this call, or raise timeout_s=")


def _all_here(size: int) -> bytes:
    return bytes([_HERE]) * size


_Wait = Callable[[Callable[[], bool], float], bool]


def _call_the_roll(comm: MPI.Intracomm, timeout_s: float, wait: _Wait, requests: list[MPI.Request]) -> bytes:
    """Play the first rank: return the word of each rank."""
    size = comm.size
    words = bytearray(size)
    words[0] = _HERE
    # This message tells ranks that may have come long before: the first rank is here, and their deadlines restart.
    requests.append(calling := comm.Iscatterv([bytes(size), [1] * size, MPI.BYTE], MPI.IN_PLACE))
    requests.append(hearing := comm.Igatherv(MPI.IN_PLACE, [words, [1] * size, MPI.BYTE]))
    wait(hearing.Test, timeout_s)
    heard = bytes(words)  # the words that have arrived so far, also if some have not
    requests.append(telling := comm.Iscatterv([heard * size, [size] * size, MPI.BYTE], MPI.IN_PLACE))
    if heard == _all_here(size):
        wait(lambda: calling.Test() and telling.Test(), timeout_s)
    return heard


def _answer_the_roll(comm: MPI.Intracomm, timeout_s: float, wait: _Wait, requests: list[MPI.Request]) -> bytes:
    """Play another rank: return the word of each rank as the first rank has heard it."""
    words = bytearray(comm.size)
    requests.append(calling := comm.Iscatterv(None, [bytearray(1), MPI.BYTE]))
    called = wait(calling.Test, timeout_s + GRACE_S)
    requests.append(answering := comm.Igatherv([bytes([_HERE if called else _LEFT]), MPI.BYTE], None))
    requests.append(listening := comm.Iscatterv(None, [words, MPI.BYTE]))
    if called and wait(lambda: listening.Test() and answering.Test(), timeout_s + GRACE_S):
        return bytes(words)
    return b"\0" + _all_here(comm.size - 1)
