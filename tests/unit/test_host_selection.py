from __future__ import annotations

import pytest
from mpi4py import MPI

from mpicomm.collectives.host import selection as host_selection
from mpicomm.collectives.host.engine import SLOT_NBYTES
from mpicomm.collectives.host.selection import piece_nbytes, use_mapped

LARGE = 1 << 30


@pytest.mark.parametrize("operation", host_selection._MAPPED_FROM)
def test_operations_are_named_as_in_mpi_and_have_one_switch_point(operation: str) -> None:
    assert hasattr(MPI.Intracomm, operation)
    for size in (2, 3, 8):
        chosen = [use_mapped(operation, 1 << power, size) for power in range(31)]
        assert chosen == sorted(chosen)
        assert not chosen[0]
    assert not use_mapped(operation, LARGE, 1)


def test_what_is_chosen_where_it_matters_most() -> None:
    assert use_mapped("Allreduce", 64 << 20, 2) and use_mapped("Allreduce", 64 << 20, 8)
    assert not use_mapped("Allreduce", 1024, 2)
    for operation in ("Allgather", "Alltoall", "Alltoallv", "Barrier", "Bcast", "Gatherv", "Scatterv"):
        assert not use_mapped(operation, LARGE, 2) and not use_mapped(operation, LARGE, 4)


def test_pieces_have_shards_that_fit_a_slot() -> None:
    for size in (2, 3, 8):
        assert piece_nbytes("Allreduce", 64 << 20, size) == size * host_selection._SHARD_NBYTES
    assert host_selection._SHARD_NBYTES <= SLOT_NBYTES
    assert piece_nbytes("Allreduce", 1000, 2) is None
    assert piece_nbytes("Bcast", LARGE, 2) is None
    assert piece_nbytes("Bcast", 1000, 2, forced=True) is not None
