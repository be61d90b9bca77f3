from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.engine import SLOT_NBYTES
from mpicomm.collectives.host.selection import NEVER, algorithms_for, mapped_from, schedule
from mpicomm.collectives.operations import ALLREDUCE, BCAST, OPERATIONS, REDUCE, Operation

MIB = 1 << 20


def test_switch_points_are_of_operations_that_there_are() -> None:
    assert set(selection._MAPPED_FROM) | set(selection._TWO_SHOT_FROM) <= set(OPERATIONS)


def test_large_reductions_go_through_mapped_memory() -> None:
    for size in (2, 8):
        assert 1024 < mapped_from(ALLREDUCE, size, 1) <= 64 * MIB
        assert mapped_from(ALLREDUCE, size, 2) == mapped_from(ALLREDUCE, 1, 1) == NEVER
        for name in ("Allgather", "Alltoall", "Alltoallv", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv"):
            assert mapped_from(OPERATIONS[name], size, 1) == NEVER


def exchanges(operation: Operation, nbytes: int, size: int, algorithm: str = "auto") -> int:
    """The number of exchanges of a call."""
    array = np.zeros(nbytes, np.uint8)
    call = Call(operation, Arguments(array, array.copy(), MPI.SUM if operation.reduces else None), 0, size, algorithm)
    return len(schedule(call, algorithm, size, None))


def test_large_allreduces_take_two_shots_of_pieces_whose_shards_fit_a_slot() -> None:
    assert selection._SHARD_NBYTES <= SLOT_NBYTES
    for size in (2, 3):
        assert exchanges(ALLREDUCE, 6 * MIB, size) == 2 * -(-6 // size)
    assert exchanges(ALLREDUCE, 1000, 2) == exchanges(ALLREDUCE, 6 * MIB, 2, "one_shot") == 1
    assert exchanges(ALLREDUCE, 1000, 2, "two_shot") == exchanges(BCAST, 1000, 2, "two_shot") == 2
    assert exchanges(BCAST, 6 * MIB, 2) == exchanges(ALLREDUCE, 6 * MIB, 1) == 1
    assert exchanges(ALLREDUCE, 1000, 3, "ring") == 4


def test_two_shots_of_a_reduce_are_for_gpus() -> None:
    assert algorithms_for(REDUCE) == ("one_shot",)
    assert algorithms_for(BCAST) == ("one_shot", "two_shot")
    assert algorithms_for(ALLREDUCE) == ("one_shot", "two_shot", "ring")
