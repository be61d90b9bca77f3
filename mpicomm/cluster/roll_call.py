"""Roll calls: all ranks of a communicator come to a call of MPI, or a missing rank is named.

In a roll call the first rank calls the other ranks, hears a word of each of them, and tells all words to all. A rank
that has given up before the call says so. So a first rank that comes late does not take ranks that have left for ranks
that are here. An exchange of a `Group` does the same with results and errors, by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.process import ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, name_ranks
from mpicomm.waiting import soon, wait_until

GRACE_S = 0.5  # the other ranks wait this much longer than the first rank, because its answer names the missing rank

_HERE, _LEFT = 1, 2  # words of a rank; 0 stands for a rank that has said nothing


def did_not_arrive(step: str, ranks: list[int], timeout_s: float, reason: str) -> CollectiveTimeoutError:
    """Return the error for ranks that are missing; ``reason`` may be ""."""
    text = f"{step}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s"
    return CollectiveTimeoutError(f"{text}: {reason or 'let every rank make this call'}", ranks=ranks)


abandoned: list[object] = []
"""Requests that may never complete. MPI may still write to their buffers, so the requests stay and keep them."""


def roll_call(
    comm: MPI.Intracomm,
    step: str,
    timeout_s: float,
    absence_reason: Callable[[Sequence[int]], str] = lambda ranks: "",
) -> None:
    """Return when all ranks of ``comm`` have called it. Collective, blocking.

    It speaks through collectives of MPI, because ``comm`` may belong to the user, whose receives may take any message.
    If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
    `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
    MPI, so the communicator stays usable.

    The error may be imprecise in two cases. Without the first rank no rank hears of the others, so the error names
    only the first rank, also if more ranks are missing. And MPI may send the words of ranks along a tree. Then the
    error may also name ranks whose words pass through the missing rank. MPICH and Open MPI send each word straight
    to the first rank.
    """
    require_own_process(step)
    rank, size = comm.rank, comm.size
    if size == 1:
        return
    words = bytearray(size)
    requests: list[MPI.Request] = []

    def wait(ready: Callable[[], bool], limit_s: float) -> bool:
        if soon(ready):
            return True
        with page().step(step, ranks_in_world(comm, range(size))):
            return wait_until(ready, limit_s)

    def all_done() -> bool:
        return bool(MPI.Request.Testall(requests))

    try:
        if rank == 0:
            words[0] = _HERE
            ones = [1] * size
            call = comm.Iscatterv([bytes(size), ones, MPI.BYTE], MPI.IN_PLACE)
            hears = comm.Igatherv(MPI.IN_PLACE, [words, ones, MPI.BYTE])
            requests += call, hears
            # This waits for the words alone. MPI may report an error for a send to a dead rank, and its error would
            # take the place of the error that names the silent rank.
            wait(hears.Test, timeout_s)
            said = bytes(words)  # some may not have arrived
            requests.append(comm.Iscatterv([said * size, [size] * size, MPI.BYTE], MPI.IN_PLACE))
            if said.count(_HERE) == size:
                wait(all_done, timeout_s)
        else:
            call = comm.Iscatterv(None, [bytearray(1), MPI.BYTE])
            requests.append(call)
            called = wait(call.Test, timeout_s + GRACE_S)
            requests.append(comm.Igatherv([bytes((_HERE if called else _LEFT,)), MPI.BYTE], None))
            requests.append(comm.Iscatterv(None, [words, MPI.BYTE]))
            answered = called and wait(all_done, timeout_s + GRACE_S)
            said = bytes(words) if answered else b"\0" + bytes((_HERE,)) * (size - 1)
        if said.count(_HERE) != size:
            # If a rank has left, the first rank was late; else the silent ranks are late.
            missing = [0] if _LEFT in said else [each for each, word in enumerate(said) if not word]
            way_out = absence_reason(missing) or "let every rank make this call, or raise timeout_s="
            raise did_not_arrive(step, missing, timeout_s, way_out)
    except BaseException:  # also after a Ctrl-C
        abandoned.extend(requests)
        raise


def private_copy(
    comm: MPI.Intracomm,
    step: str,
    timeout_s: float,
    absence_reason: Callable[[Sequence[int]], str] = lambda ranks: "",
) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` in their order, after all ranks have come. Collective, blocking.

    The copy has no attributes of the user: a duplicate would have them, and would call their copy and delete functions.
    Raises as `roll_call` does. If a rank dies after the roll call, the other ranks hang in MPI, because MPI has no
    nonblocking `Split`.
    """
    roll_call(comm, step, timeout_s, absence_reason)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        return cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.rank))
