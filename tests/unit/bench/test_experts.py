"""``python -m mpicomm.bench experts`` as a user runs it, and with faults planted into the calls that it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ml_dtypes")

from tests.helpers.jobs.mpiexec import run_job

OPTIONS = ("experts", "-D", "cpu", "-n", "1", "--tokens", "5,9", "--hidden", "16", "--experts", "7", "--top-k", "3")


def test_every_row_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    job = run_job(2, "-m", "mpicomm.bench", *OPTIONS, "-J", str(path))
    assert (job.returncode, job.stderr) == (0, "")
    lines = job.stdout.splitlines()
    assert lines[-1] == "# OK"
    shown = [line.split() for line in lines if not line.startswith("#")]
    expected = [("5", "experts"), ("5", "tokens"), ("9", "experts"), ("9", "tokens")]
    assert [(*row[:2], row[-1]) for row in shown] == [(*each, "0") for each in expected]
    report = json.loads(path.read_text())
    assert report["ok"]
    assert [(str(row["tokens"]), row["layout"]) for row in report["experts"]] == expected
    assert all(row["crossing_nbytes"] > 0 and row["dispatch_us"] > 0 for row in report["experts"])


FAULTS = {
    "received.x[2, 3] += 1": "dispatch",
    "received.sources[[0, 1]] = received.sources[[1, 0]]": "dispatch",
    "received.offsets[-1] -= 1": "dispatch",
    "if received.rows is not None: received.rows[[0, 1]] = received.rows[[1, 0]]": "dispatch",
    "if received.rows is not None: received.row_count[0] += 1": "dispatch",
    "received[4, 5] += 8": "combine",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_row_fails_the_run(fault: str, tmp_path: Path) -> None:
    name = FAULTS[fault]
    driver = tmp_path / "driver.py"
    driver.write_text(f"""
from mpi4py import MPI
from mpicomm import Experts
from mpicomm.bench import __main__ as bench
from mpicomm.cli import options as command_line

right = Experts.{name}
def wrong(*arguments, **options):
    received = right(*arguments, **options)
    if MPI.COMM_WORLD.rank == 1:
        {fault}
    return received
Experts.{name} = wrong
command_line.run(bench.main)
""")
    job = run_job(2, str(driver), *OPTIONS)
    assert job.returncode == 1, job.stderr
    assert job.stdout.splitlines()[-1].startswith("# FAILED: ")
