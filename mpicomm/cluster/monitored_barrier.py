"""A barrier with a timeout that names the missing ranks, for calls in which MPI would wait without a limit.

In the barrier the first rank calls the other ranks, gathers the status of each, and scatters all statuses. A rank that
has given up before the call says so in its status. So a first rank that comes late does not take ranks that have left
for ranks that are here. `Group.allgather` does the same by messages, and carries results and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.process import ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, name_ranks
from mpicomm.waiting import spin_and_yield, wait_until

GRACE_S = 0.5  # the other ranks wait this much longer than the first rank, because its answer names the missing rank

_MISSING, _ARRIVED, _GAVE_UP = range(3)  # the status of a rank


def missing_ranks_error(step: str, ranks: list[int], timeout_s: float, reason: str) -> CollectiveTimeoutError:
    """Return the error for ranks that are missing; ``reason`` may be ""."""
    text = f"{step}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s"
    return CollectiveTimeoutError(f"{text}: {reason or 'let every rank make this call'}", ranks=ranks)


abandoned: list[MPI.Request] = []
"""Requests that may never complete. They stay, because MPI may still write to their buffers."""


def monitored_barrier(
    comm: MPI.Intracomm,
    step: str,
    timeout_s: float,
    absence_reason: Callable[[Sequence[int]], str] = lambda ranks: "",
) -> None:
    """Return when all ranks of ``comm`` have called it. Collective, blocking.

    If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
    `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
    MPI, so the same ranks can call again. After an error messages of this call may remain in ``comm``.

    The error may be imprecise: without the first rank no rank gets the statuses, so the error names only the first
    rank, also if more ranks are missing.

    It uses collectives, because ``comm`` may belong to the user, whose receives may take any message. With a separate
    count for each rank MPICH and Open MPI send each status straight to its rank, and not along a tree.
    """
    require_own_process(step)
    rank, size = comm.rank, comm.size
    if size == 1:
        return
    statuses = bytearray(size)  # on the first rank, where more may arrive at any time; other ranks have only their own
    answer = bytearray(size)  # the statuses as the first rank scatters them
    begun: list[MPI.Request] = []

    def scatter(content: bytearray) -> MPI.Request:
        send = None if rank else [content * size, [len(content)] * size, MPI.BYTE]
        begun.append(comm.Iscatterv(send, [content, MPI.BYTE] if rank else MPI.IN_PLACE))
        return begun[-1]

    def gather() -> MPI.Request:
        send: Any = [memoryview(statuses)[rank:], 1, MPI.BYTE] if rank else MPI.IN_PLACE
        begun.append(comm.Igatherv(send, None if rank else [statuses, [1] * size, MPI.BYTE]))
        return begun[-1]

    def wait(limit_s: float, *requests: MPI.Request) -> bool:
        for request in requests:
            if not (request.Test() or spin_and_yield(request.Test)):
                with page().step(step, ranks_in_world(comm, range(size))):
                    return wait_until(lambda: all(each.Test() for each in requests), limit_s)
        return True

    try:
        if rank == 0:
            statuses[0] = _ARRIVED
            call = scatter(bytearray(1))
            # This waits for the gather alone. MPI may report an error for a send to a dead rank, and its error would
            # take the place of the error that names the silent rank.
            wait(timeout_s, gather())
            answer[:] = known = bytes(statuses)
            answered = scatter(answer)
            if set(known) == {_ARRIVED}:
                wait(timeout_s, call, answered)
        else:
            called = wait(timeout_s + GRACE_S, scatter(bytearray(1)))
            statuses[rank] = _ARRIVED if called else _GAVE_UP
            status, answered = gather(), scatter(answer)
            if called and wait(timeout_s + GRACE_S, answered, status):
                known = bytes(answer)
            else:
                known = bytes([_MISSING] + [_ARRIVED] * (size - 1))
        if set(known) != {_ARRIVED}:
            # If a rank has given up, the first rank was late; else the silent ranks are late.
            missing = [0] if _GAVE_UP in known else [each for each, seen in enumerate(known) if seen == _MISSING]
            way_out = absence_reason(missing) or "let every rank make this call, or raise timeout_s="
            raise missing_ranks_error(step, missing, timeout_s, way_out)
    except BaseException:  # also after a Ctrl-C
        abandoned.extend(begun)
        raise


def private_copy(
    comm: MPI.Intracomm, step: str, timeout_s: float, absence_reason: Callable[[Sequence[int]], str] = lambda ranks: ""
) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` in their order, after all ranks have come. Collective, blocking.

    The copy has no attributes of the user: a duplicate would have them, and would call their copy and delete functions.
    Raises as `monitored_barrier` does. If a rank dies after the barrier, the other ranks hang in MPI, because MPI has
    no nonblocking `Split`.
    """
    monitored_barrier(comm, step, timeout_s, absence_reason)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        return cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.rank))
