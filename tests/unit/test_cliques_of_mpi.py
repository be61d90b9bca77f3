"""Ranks of one machine that MPICH takes for several machines, as MPIR_CVAR_NUM_CLIQUES says."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.jobs.mpiexec import run_job

PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpicomm

world = MPI.COMM_WORLD
assert world.Split_type(MPI.COMM_TYPE_SHARED).size < world.size, "MPI takes all ranks for ranks of one machine"


def results(comm):
    rank, size = comm.rank, comm.size
    found = []
    for count in (3, 200_000):  # MPI's own and, of a Communicator, those through mapped memory
        values = np.arange(count) * 3.0 + rank
        out = np.zeros(count)
        comm.Allreduce(values, out)
        found.append(out.copy())
        comm.Bcast(out, size - 1)
        found.append(out.copy())
        gathered = np.zeros(size * count)
        comm.Allgather(values, gathered)
        found.append(gathered)
        exchanged = np.zeros(size * count)
        comm.Alltoall(gathered + rank, exchanged)
        found.append(exchanged)
        reduced = np.zeros(count)
        comm.Reduce(values, reduced if rank == 0 else None, MPI.MAX, 0)
        found.append(reduced)
        received = np.zeros(count)
        comm.Sendrecv(values, (rank + 1) % size, 5, received, (rank - 1) % size, 5)
        found.append(received)
        request = comm.Irecv(received, (rank + 1) % size)
        comm.Isend(values * 2, (rank - 1) % size).Wait()
        request.Wait()
        found.append(received.copy())
    comm.Barrier()
    found.append(comm.allgather(str(rank)))
    return found


with mpicomm.Communicator(device="cpu") as comm:
    half, plain_half = (each.Split(each.rank % 2, -each.rank) for each in (comm, world))
    assert isinstance(half, mpicomm.Communicator)
    for ours, plain in ((comm, world), (half, plain_half)):
        for number, (got, expected) in enumerate(zip(results(ours), results(plain), strict=True)):
            assert np.array_equal(got, expected), (ours, number)
    with comm.zeros(4) as array:
        array.put(np.full(4, comm.rank + 1.0), (comm.rank + 1) % comm.size)
        comm.Barrier()
        assert (array.local == (comm.rank - 1) % comm.size + 1.0).all()
    nodes = comm.allgather(comm.num_nodes)
    half.Free()
if world.rank == 0:
    print(nodes)
"""


@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="only MPICH has the variable")
def test_calls_give_the_results_of_mpi4py(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_job(3, str(program), MPIR_CVAR_NUM_CLIQUES="2")
    assert (result.returncode, result.stdout) == (0, "[1, 1, 1]\n"), result.stdout + result.stderr
