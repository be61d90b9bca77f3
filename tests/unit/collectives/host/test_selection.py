from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.engine import SLOT_NBYTES
from mpicomm.collectives.host.selection import algorithms_for, schedule, use_mapped
from mpicomm.collectives.operations import ALLREDUCE, BCAST, OPERATIONS, REDUCE, Operation

LARGE = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)
@pytest.mark.parametrize("crossover", [0, MIB, 8 * MIB])
def test_operations_have_one_switch_point(operation: Operation, crossover: int) -> None:
    for size in (2, 3, 8):
        chosen = [use_mapped(operation, "sum", 1 << power, size, 1, crossover) for power in range(31)]
        assert chosen == sorted(chosen)
        assert not chosen[0]
    assert not use_mapped(operation, "sum", LARGE, 1, 1, 0)


def test_switch_points_are_of_operations_that_there_are() -> None:
    assert set(selection._MAPPED_FROM) | set(selection._TWO_SHOT_FROM) <= set(OPERATIONS)


def test_the_crossover_counts_only_between_two_ranks() -> None:
    scatter = OPERATIONS["Reduce_scatter"]
    assert not use_mapped(ALLREDUCE, "sum", 2 * MIB - 1, 2, 1, 2 * MIB) and use_mapped(
        ALLREDUCE, "sum", 2 * MIB, 2, 1, 2 * MIB
    )
    assert not use_mapped(scatter, "sum", 8 * MIB - 1, 2, 1, 2 * MIB) and use_mapped(
        scatter, "sum", 8 * MIB, 2, 1, 2 * MIB
    )
    for size in (3, 8):
        assert use_mapped(ALLREDUCE, "sum", MIB, size, 1, 8 * MIB)
    for crossover in (0, 8 * MIB):
        assert not use_mapped(ALLREDUCE, "max", MIB - 1, 2, 1, crossover)
        assert use_mapped(ALLREDUCE, "max", MIB, 2, 1, crossover)
    for operation in (REDUCE, OPERATIONS["Scan"]):
        assert use_mapped(operation, "sum", 256 * 1024, 2, 1, 8 * MIB)


def test_what_is_chosen_where_it_matters_most() -> None:
    assert use_mapped(ALLREDUCE, "sum", 64 * MIB, 2, 1, 0) and use_mapped(ALLREDUCE, "sum", 64 * MIB, 8, 1, 0)
    assert not use_mapped(ALLREDUCE, "sum", 1024, 2, 1, 0)
    for name in ("Allgather", "Alltoall", "Alltoallv", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv"):
        assert not use_mapped(OPERATIONS[name], "sum", LARGE, 2, 1, 0) and not use_mapped(
            OPERATIONS[name], "sum", LARGE, 4, 1, 0
        )


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
