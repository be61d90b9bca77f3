"""The error of ranks that take different ways, because they pass counts on both sides of a switch point."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import stretched

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpicomm
comm = mpicomm.Communicator(device="cpu", timeout_s=float(sys.argv[2]))
count = 400_000 if comm.rank == 0 else 10
try:
    comm.Allreduce(np.ones(count), np.zeros(count))
except mpicomm.CollectiveTimeoutError as error:
    Path(sys.argv[1]).write_text(f"{error.ranks} {error}")
MPI.COMM_WORLD.Abort(3)  # mpiexec may end before it has printed the output of an aborted job
"""


def test_the_call_is_named_and_the_other_way_that_a_peer_may_have_taken(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    job = run_job(2, str(tmp_path / "program.py"), str(tmp_path / "error"), str(stretched(1.0)))
    assert (tmp_path / "error").exists(), job.stderr
    output = (tmp_path / "error").read_text()
    assert output.startswith("(1,) Allreduce: ") and f"rank 1 did not arrive within {stretched(1.0):g} s" in output
    assert "may be in MPI's Allreduce" in output
