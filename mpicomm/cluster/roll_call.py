"""Roll calls: all ranks of a communicator come to a call of MPI, or a missing rank is named.

In a roll call the first rank calls the other ranks, hears a word of each of them, and tells all words to all. A rank
that has given up before the call says so. So a first rank that comes late does not take ranks that have left for ranks
that are here. An exchange of a `Group` does the same with results and errors, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.process import ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, name_ranks
from mpicomm.waiting import wait_until, without_sleep

GRACE_S = 0.5  # the other ranks wait this much longer than the first rank, because its answer names the missing rank

_HERE, _LEFT = 1, 2  # words of a rank; 0 stands for a rank that has said nothing


def did_not_arrive(step: str, ranks: list[int], timeout_s: float, reason: str) -> CollectiveTimeoutError:
    """Return the error for ranks that are missing; ``reason`` may be ""."""
    text = f"{step}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s"
    return CollectiveTimeoutError(f"{text}: {reason or 'let every rank make this call'}", ranks=ranks)


abandoned: list[object] = []
"""Requests that may never complete, with their buffers, to which MPI may still write. So they stay."""


def roll_call(
    comm: MPI.Intracomm,
    step: str,
    timeout_s: float,
    absence_reason: Callable[[Sequence[int]], str] = lambda ranks: "",
) -> None:
    """Return when all ranks of ``comm`` have called it. Collective, blocking.

    If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
    `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
    MPI, so they can call again. After an error messages of this call may remain in ``comm``.

    The error may be imprecise: without the first rank no rank hears of the others, so the error names only the first
    rank, also if more ranks are missing.

    Words travel by collectives, because ``comm`` may belong to the user, whose receives may take any message. With a
    separate count for each rank MPICH and Open MPI send each word straight to its rank, and not along a tree.
    """
    require_own_process(step)
    rank, size = comm.rank, comm.size
    if size == 1:
        return
    call, said, answer = bytearray(1), bytearray(size), bytearray(size)  # `said` has the words that rank 0 hears
    begun: list[object] = []  # requests and their buffers

    def scatter(text: bytearray) -> MPI.Request:
        everywhere = None if rank else [text * size, [len(text)] * size, MPI.BYTE]
        request = comm.Iscatterv(everywhere, [text, MPI.BYTE] if rank else MPI.IN_PLACE)
        begun.append((request, everywhere, text))
        return request

    def gather() -> MPI.Request:
        own: Any = [memoryview(said)[rank:], 1, MPI.BYTE] if rank else MPI.IN_PLACE
        request = comm.Igatherv(own, None if rank else [said, [1] * size, MPI.BYTE])
        begun.append((request, said))
        return request

    def wait(limit_s: float, *requests: MPI.Request) -> bool:
        for request in requests:
            if not (request.Test() or without_sleep(request.Test)):
                with page().step(step, ranks_in_world(comm, range(size))):
                    return wait_until(lambda: all(each.Test() for each in requests), limit_s)
        return True

    try:
        if rank == 0:
            said[0] = _HERE
            called = scatter(call)
            # This waits for the words alone. MPI may report an error for a send to a dead rank, and its error would
            # take the place of the error that names the silent rank.
            wait(timeout_s, gather())
            answer[:] = words = bytes(said)  # some may not have arrived
            told = scatter(answer)
            if 0 not in words and _LEFT not in words:
                wait(timeout_s, called)
                wait(timeout_s, told)
        else:
            came = wait(timeout_s + GRACE_S, scatter(call))
            said[rank] = _HERE if came else _LEFT
            asked = gather(), scatter(answer)
            answered = came and wait(timeout_s + GRACE_S, *asked)
            words = bytes(answer) if answered else b"\0" + bytes((_HERE,)) * (size - 1)
        if 0 in words or _LEFT in words:
            # If a rank has left, the first rank was late; else the silent ranks are late.
            missing = [0] if _LEFT in words else [each for each, word in enumerate(words) if not word]
            way_out = absence_reason(missing) or "let every rank make this call, or raise timeout_s="
            raise did_not_arrive(step, missing, timeout_s, way_out)
    except BaseException:  # also after a Ctrl-C
        abandoned.extend(begun)
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
