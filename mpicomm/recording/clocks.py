"""The clocks of ranks: the offset of each clock from the clock of the first rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import boot_id, namespace, process_number
from mpicomm.cluster.roll_call import abandoned, did_not_arrive
from mpicomm.waiting import wait_until

_TAG = 3  # messages of other groups of the same communicator have other tags
_ROUNDS = 32


@dataclass(frozen=True)
class Reading:
    """This rank's clock, compared with the clock of another rank."""

    reference: int
    """The number of the process that has the reference clock."""
    time_ns: int
    """The time of the measurement, by this rank's clock."""
    offset_ns: int
    """The nanoseconds by which this rank's clock is late: add them to its times."""
    uncertainty_ns: int


def now_ns() -> int:
    """Return the time of this rank's clock, the monotonic clock of the kernel."""
    return time.perf_counter_ns()


def clock_key() -> str:
    """Return a text that is the same on ranks that read one clock: ranks of one kernel and one time namespace."""
    return f"{boot_id()}/{namespace('time')}"


def read_clocks(group: Group, comm: MPI.Intracomm) -> Reading:
    """Compare this rank's clock with the clock of the first rank of ``group``. Collective, blocking.

    ``comm`` carries the group's messages. Ranks of one kernel have the same clock. Each other rank asks the first rank
    for its time, again and again, and believes the fastest answer. Raises as `Group.exchange`.
    """
    told = group.exchange("clocks: ranks", lambda: (clock_key(), process_number()))
    others = [index for index, (key, _) in enumerate(told) if key != told[0][0]]
    reference = told[0][1]

    def compare() -> Reading:
        if group.rank in others:
            return _ask(group, comm, reference)
        if group.rank == 0:
            question = np.zeros(1, np.int64)
            for rank in [group.ranks[index] for index in others for _ in range(_ROUNDS)]:
                _complete(group, rank, [comm.Irecv(question, rank, _TAG)])
                _complete(group, rank, [comm.Isend(np.array([now_ns()], np.int64), rank, _TAG)])
        return Reading(reference, now_ns(), 0, 0)

    return group.exchange("clocks: times", compare)[group.rank] if others else compare()


def _ask(group: Group, comm: MPI.Intracomm, reference: int) -> Reading:
    answer, question, first = np.zeros(1, np.int64), np.zeros(1, np.int64), group.ranks[0]
    shortest, found = None, Reading(reference, now_ns(), 0, 0)
    for _ in range(_ROUNDS):
        begin = now_ns()
        _complete(group, first, [comm.Isend(question, first, _TAG), comm.Irecv(answer, first, _TAG)])
        taken = now_ns() - begin
        if shortest is None or taken < shortest:
            # The first rank read its clock at some time between the two, and at no other time.
            shortest, middle = taken, begin + taken // 2
            found = Reading(reference, middle, int(answer[0]) - middle, -(-taken // 2))
    return found


def _complete(group: Group, rank: int, requests: list[MPI.Request]) -> None:
    """Wait for messages to and from ``rank``. Raises `CollectiveTimeoutError`."""
    try:
        done = wait_until(lambda: MPI.Request.Testall(requests), group.timeout_s)
    except BaseException:  # above all a Ctrl-C
        abandoned.extend(requests)
        raise
    if not done:
        abandoned.extend(requests)
        raise did_not_arrive("clocks: times", [rank], group.timeout_s, group.absence_reason([rank]))
