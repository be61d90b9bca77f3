"""The hosts that these tests make: jobs on them end with them, and failures of jobs are seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.hosts import Hosts, hosts
from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.jobs.pace import HANG_S

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
