"""A rank of another host dies or stops, or a host loses its network: the other ranks get an error in time."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.hosts import Hosts
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.jobs.survivors import KILLED, Call, calls_of
from tests.helpers.programs.lost_ranks import CALLS, ROW

PLACEMENT = (0, 0, 1, 1)
DISTANT = 3  # a rank of the other host than the first rank's


def timeout_s() -> float:
    return stretched(0.6)  # the set-up of all ranks has to come in time, too


class Job:
    """Ranks that lose some peers."""

    def __init__(self, hosts: Hosts, directory: Path, how: str, victim: int, *calls: str) -> None:
        self._results, self._output = directory / "results", directory / "output"
        self._results.mkdir()
        arguments = ("-m", "tests.helpers.programs.lost_ranks", str(self._results), how, str(victim))
        self._job = hosts.start(PLACEMENT, self._output, *arguments, str(timeout_s()), *calls)
        self._wait_for("ready", range(len(PLACEMENT)), HANG_S)
        if how == "kill":
            # Over libfabric MPICH ends the job if a rank dies while a message to it is in flight.
            assert wait_until((self._results / KILLED).exists, HANG_S)

    def begin_calls(self) -> None:
        """Let the ranks make their calls."""
        (self._results / "lost").touch()

    def outcomes(self, ranks: list[int]) -> dict[int, list[Call]]:
        """Let the ranks make their calls, and return the results."""
        self.begin_calls()
        self._wait_for("end", ranks, HANG_S)
        return {rank: calls_of(self._results, rank) for rank in ranks}

    def _wait_for(self, what: str, ranks: range | list[int], limit_s: float) -> None:
        """Wait until each rank has left a file, or the job has ended."""
        files = [self._results / f"{what}-{rank}" for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files) or self._job.poll() is not None, limit_s)
        missing = [file.name for file in files if not file.exists()]
        assert not missing, f"there is no {', '.join(missing)}:\n{self._output.read_text()[-5000:]}"


def require_in_time(outcomes: dict[int, list[Call]], *lost: int) -> None:
    """Assert that every call raised in time, and named one of ``lost``, or the first rank, if its answer is missing."""
    for rank, calls in outcomes.items():
        for call in calls:
            call.require_in_time(timeout_s())
            if call.errors[:1] == ["PeerError"] and "MPI reports that a rank is gone" in call.text:
                continue
            assert call.errors[:1] == ["CollectiveTimeoutError"], f"rank {rank}: {call}"
            assert set(call.ranks) & {0, *lost}, f"rank {rank}: {call}"


def require_lost(job: Job, victim: int) -> None:
    """Assert that all calls of all other ranks raise in time, and that the first rank names the victim.

    The error may also name ranks of the victim's host, because these wait for the victim before they answer.
    """
    outcomes = job.outcomes([rank for rank in range(len(PLACEMENT)) if rank != victim])
    require_in_time(outcomes, victim)
    heard = [call for call in outcomes.get(0, []) if call.name != "Allreduce"]
    assert all(victim in call.ranks and PLACEMENT[call.ranks[0]] == 1 for call in heard)


# Each call has its own job, because MPICH aborts a rank whose collective sends to a rank that it knows to be dead. MPI
# knows nothing of a rank that stops, so the test of these has every call without either victim.
@pytest.mark.parametrize(
    ("call", "victim"), [*zip(CALLS, itertools.cycle((0, DISTANT)), strict=False), (CALLS[-1], DISTANT)]
)
def test_a_rank_dies(two_hosts: Hosts, tmp_path: Path, victim: int, call: str) -> None:
    require_lost(Job(two_hosts, tmp_path, "kill", victim, call), victim)


# The collective has its own job, because the ranks come out of the other calls at different times.
@pytest.mark.parametrize("calls", [CALLS[:-1], CALLS[-1:]], ids=["set-up", "collective"])
@pytest.mark.parametrize("victim", [0, DISTANT])
def test_a_rank_stops(two_hosts: Hosts, tmp_path: Path, victim: int, calls: tuple[str, ...]) -> None:
    require_lost(Job(two_hosts, tmp_path, "stop", victim, *calls), victim)


def test_a_host_loses_its_network(two_hosts: Hosts, tmp_path: Path) -> None:
    job = Job(two_hosts, tmp_path, "cut", 0, *CALLS)
    two_hosts.cut_off("host0")
    outcomes = job.outcomes([0, 1, 2, 3])
    for rank, calls in outcomes.items():
        beyond = [2, 3] if rank < 2 else [0, 1]
        require_in_time({rank: calls}, *beyond)
        for call in calls:
            expected = [2, 3] if rank < 2 else [0]
            assert call.ranks == expected or (call.name == "Allreduce" and set(call.ranks) <= set(beyond)), call


def test_a_host_loses_its_network_in_the_middle_of_collectives(two_hosts: Hosts, tmp_path: Path) -> None:
    job = Job(two_hosts, tmp_path, "cut", 0, ROW)
    job.begin_calls()
    time.sleep(0.3)
    two_hosts.cut_off("host1")
    outcomes = job.outcomes([0, 1, 2, 3])
    for rank, (call,) in outcomes.items():
        assert call.errors[:1] == ["CollectiveTimeoutError"], call
        call.require_in_time(timeout_s())
        assert set(call.ranks) <= ({2, 3} if rank < 2 else {0, 1}), f"rank {rank}: {call}"
