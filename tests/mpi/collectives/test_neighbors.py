"""Calls of neighbours on device arrays as exchanges, which the engine of the host carries out in the place of kernels.

Memory of the host stands for memory of GPUs, so that the order in which blocks match is compared with MPI's own.
"""

from __future__ import annotations

import pytest
from mpi4py import MPI

from mpicomm.collectives.neighborhood import neighborhood_of
from tests.helpers.references.simulated_neighbors import OnDevice, Part
from tests.helpers.rigs.host_engines import CALL, engine_of
from tests.helpers.rigs.topologies import CALLS, TOPOLOGIES, NeighborCall, fails_in_open_mpi, result_of_mpi


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_same_result_as_mpi(comm_world: MPI.Intracomm, topology: str) -> None:
    comm = TOPOLOGIES[topology](comm_world)
    with engine_of(comm_world) as (engine, _, _):
        for turn, name in enumerate(CALLS):
            if fails_in_open_mpi(comm, name):
                continue
            call = NeighborCall(name, comm)
            expected = result_of_mpi(comm, call, turn)
            sent, received = OnDevice(call.sent(turn)), OnDevice(call.nothing())
            given = call.arguments(sent, received)
            part = Part.of(f"Neighbor_{call.name}", given, comm.rank, comm.size, neighborhood_of(comm))
            part.pack()
            engine.run([part.exchange], CALL)
            part.unpack()
            assert received.memory.tolist() == expected.tolist(), name
            assert sent.memory.tolist() == call.sent(turn).tolist()
            call.free()
    comm.Free()
