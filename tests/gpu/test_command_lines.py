"""The bench, tune and p2p on GPUs, with all libraries for comparison: small runs, which check every element."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.operations import ALLREDUCE
from tests.gpu import DEVICES
from tests.helpers.jobs.mpiexec import run_job

RANKS = max(2, len(DEVICES))
PEERS = ("nccl", "nccl-symmetric", "torch", "nvshmem", "mpi")
BENCH = ("-m", "mpicomm.bench", "allreduce", "-b", "1K", "-e", "1M", "-f", "32", "-n", "3", "-w", "1")


@pytest.mark.parametrize("how", [("-G", "1"), ("--eager",)])
def test_the_bench_compares_with_what_is_installed(how: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    job = run_job(RANKS, *BENCH, *how, "--compare", ",".join(PEERS), "-J", str(path))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr
    report = json.loads(path.read_text())
    assert {*report["peers"], *report["missing"]} == {*PEERS}
    assert [row["nbytes"] for row in report["results"]] == [1 << 10, 1 << 15, 1 << 20]


# The last case has a name, because pytest-mpi takes "mpi" for its marker and skips the test.
@pytest.mark.parametrize("algorithm", [*names_for(ALLREDUCE), "mpi"], ids="algorithm={}".format)
def test_nothing_is_wrong_with_any_algorithm(algorithm: str) -> None:
    job = run_job(RANKS, *BENCH, "-G", "1", "--algorithm", algorithm)
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr


def test_tune_writes_a_table_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ("-b", "1K", "-e", "64K", "-f", "8", "-n", "3", "--operations", "allreduce,allgather")
    job = run_job(RANKS, "-m", "mpicomm.tune", *options, "--output", str(path))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr
    told = run_job(RANKS, "-m", "mpicomm.info", MPICOMM_TUNING=str(path))
    assert (told.returncode, str(path) in told.stdout) == (0, True), told.stdout + told.stderr


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_p2p_measures_every_pair(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "p2p.json"
    job = run_job(ranks, "-m", "mpicomm.p2p", "-b", "4M", "-n", "2", "-r", "1", "--json", str(path))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr
    found = json.loads(path.read_text())
    assert all(len(matrix["cells"]) == len(matrix["cells"][0]) == ranks for matrix in found["matrices"])
