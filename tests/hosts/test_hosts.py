"""Jobs over two hosts: checks, what the commands say, and ranks that die or stop, or lose their network."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.hosts import Hosts, hosts, why_not
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.jobs.survivors import KILLED, Call, calls_of
from tests.helpers.programs.across_hosts import CHECKS
from tests.helpers.programs.deaths import CALLS, PROGRAM, ROW


@pytest.fixture(scope="session", autouse=True)
def hosts_are_possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Hosts]:
    directory = tmp_path / "hosts"
    directory.mkdir()
    with hosts(directory, 2) as made:
        yield made


def test_a_rank_that_fails_makes_the_job_fail(two_hosts: Hosts) -> None:
    with pytest.raises(AssertionError, match=r"(?s)the job ended with .*ValueError: here"):
        two_hosts.run((0, 1), "-c", "from mpi4py import MPI\nif MPI.COMM_WORLD.rank: raise ValueError('here')")


# One host with more ranks than the other, and ranks of one host that do not follow each other.
PLACEMENTS = {"2+1": "0,0,1", "round-robin": "0,1,0,1"}


@dataclass
class Outcomes:
    """The report of each rank about each check, and the output of the job."""

    ranks: list[dict[str, str]]
    job: str


@pytest.fixture(scope="module", params=PLACEMENTS)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """The reports of one job, which runs all checks."""
    placement = PLACEMENTS[request.param]
    results = tmp_path_factory.mktemp("results")
    with hosts(tmp_path_factory.mktemp("hosts"), 2) as two_hosts:
        places = [int(host) for host in placement.split(",")]
        try:
            job = two_hosts.run(places, "-m", "tests.helpers.programs.across_hosts", str(results), placement)
        except AssertionError as error:
            job = str(error)
    files = [results / f"rank-{rank}" for rank in range(len(places))]
    said = [path.read_text().splitlines() if path.exists() else [] for path in files]
    yield Outcomes([dict(map(json.loads, lines)) for lines in said], job)


@pytest.mark.parametrize("check", CHECKS)
def test_over_two_hosts(outcomes: Outcomes, check: str) -> None:
    said = [rank.get(check, "this rank did not come to the end of it") for rank in outcomes.ranks]
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    assert not problems, "\n".join([*problems, outcomes.job])


def test_info_shows_the_hosts_and_which_memory_is_out_of_reach(two_hosts: Hosts) -> None:
    placement = (0, 1, 0)
    found = json.loads(two_hosts.run(placement, "-m", "mpicomm.info", "--device", "cpu", "--json"))
    assert [info["host"] for info in found["ranks"]] == [f"host{host}" for host in placement]
    assert [info["node"] for info in found["ranks"]] == list(placement)
    for rank, info in enumerate(found["ranks"]):
        here = placement[rank]
        expected = ["host memory" if host == here else "other node" for host in placement]
        expected[rank] = "self"
        assert [link["path"] for link in info["links"]] == expected


PLACEMENT = (0, 0, 1, 1)
DISTANT = 3  # a rank of the other host than the first rank's


def timeout_s() -> float:
    return stretched(0.6)  # the set-up of all ranks has to come in time, too


class Job:
    """Ranks that lose some peers."""

    def __init__(self, hosts: Hosts, directory: Path, how: str, victim: int, *calls: str) -> None:
        self._results, self._output = directory / "results", directory / "output"
        self._results.mkdir()
        arguments = (*PROGRAM, str(self._results), "lost", how, str(victim))
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
