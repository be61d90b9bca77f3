"""A rank that has left one collective out: it is in another one than the others, or makes one call fewer."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import CollectiveTimeoutError, PeerError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.communicator_calls import Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module, communicator, patience_s

WORLD = MPI.COMM_WORLD
FLOAT32 = np.dtype(np.float32)
CALLED_BEFORE = 3
LEFT_OUT = Case("Allreduce", FLOAT32, 7, algorithm="one_shot")
NEXT = Case("Allgather", FLOAT32, 5, algorithm="one_shot")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("culprit", sorted({0, WORLD.size - 1}))
def test_different_calls_are_shown_of_every_rank(device: str, culprit: int) -> None:
    comm = communicator(device, timeout_s=stretched(10.0))
    with array_module(comm) as xp:
        calls = [LEFT_OUT] * CALLED_BEFORE + [LEFT_OUT, NEXT]
        if comm.rank == culprit:
            calls.remove(LEFT_OUT)
        prepared = [Prepared(case, comm.rank, comm.size, xp) for case in calls]
        with raises_everywhere(WORLD, PeerError, match="ranks called different things: rank 0: ") as info:
            for each in prepared:
                each.run(comm)
            comm.check()
    for rank in range(comm.size):
        said = "Allgather(bytes, count=20" if rank == culprit else "Allreduce(float32, count=7"
        assert f"rank {rank}: {said}" in str(info.value)
    comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("culprit", sorted({0, WORLD.size - 1}))
def test_equal_calls_name_the_rank_and_the_number_of_the_call(culprit: int) -> None:
    limit_s = patience_s("cpu")
    comm = communicator("cpu", timeout_s=limit_s)
    prepared = Prepared(LEFT_OUT, comm.rank, comm.size, np)
    for _ in range(CALLED_BEFORE):
        prepared.run(comm)
    if comm.rank != culprit:
        said = rf"did not arrive within {limit_s:g} s \(collective number {CALLED_BEFORE + 1} "
        with pytest.raises(CollectiveTimeoutError, match=f"^Allreduce.*: rank {culprit} {said}") as info:
            prepared.run(comm)
        assert info.value.ranks == (culprit,)
    WORLD.Barrier()
    comm.Free()
