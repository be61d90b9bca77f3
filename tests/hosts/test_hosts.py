"""Jobs over two hosts: the checks of `across_hosts`, and what the commands say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.jobs.hosts import Hosts, hosts
from tests.helpers.programs.across_hosts import CHECKS


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
    yield Outcomes([_read(results / f"rank-{rank}") for rank in range(len(places))], job)


def _read(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


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
