"""The error where ranks take different ways, because they pass counts on both sides of a switch point."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.mpiexec import run_job

PROGRAM = """
import numpy as np
from mpi4py import MPI
import mpicomm
comm = mpicomm.Communicator(device="cpu", timeout_s=1)
count = 40_000 if comm.rank == 0 else 10
try:
    comm.Allreduce(np.ones(count), np.zeros(count))
except mpicomm.CollectiveTimeoutError as error:
    print(error.ranks, error, flush=True)
MPI.COMM_WORLD.Abort(3)
"""


def test_the_call_is_named_and_the_other_way_that_a_peer_may_have_taken(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    output = run_job(2, str(tmp_path / "program.py")).stdout
    assert output.startswith("(1,) Allreduce: ") and "rank 1 did not arrive within 1 s" in output
    assert "may be in MPI's Allreduce" in output
