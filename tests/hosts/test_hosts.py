"""The hosts that these tests make: jobs on them end with them, and failures of jobs are seen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.hosts import Hosts, hosts
from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.programs.across_hosts import CHECKS

FOR_EVER = "import time; time.sleep(600)"
MAKER = """
import sys, time
from pathlib import Path
from tests.helpers.jobs.hosts import hosts
directory, code, mark = sys.argv[1:]
with hosts(Path(directory), 2) as two_hosts:
    two_hosts.start((0, 1), Path(directory, "output"), "-c", code, mark)
    time.sleep(600)
"""


def processes(mark: str) -> list[Path]:
    """Return the processes that have ``mark`` as their last argument."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:  # it has ended
            continue
        if arguments[-1] == mark.encode():
            found.append(file.parent)
    return found


def require(ready: Callable[[], bool]) -> None:
    assert wait_until(ready, HANG_S)


def test_a_job_ends_with_its_hosts(tmp_path: Path) -> None:
    mark = uuid4().hex
    with pytest.raises(KeyError), hosts(tmp_path, 2) as two_hosts:
        two_hosts.start((0, 1), tmp_path / "output", "-c", FOR_EVER, mark)
        require(lambda: len(processes(mark)) == 3)  # two ranks and mpiexec
        raise KeyError
    require(lambda: not processes(mark))


def test_hosts_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    mark = uuid4().hex
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path), FOR_EVER, mark], cwd=ROOT)
    try:
        require(lambda: len(processes(mark)) == 4)  # and the maker
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    require(lambda: not processes(mark))


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
