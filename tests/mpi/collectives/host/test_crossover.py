"""The crossover between MPI and mapped memory, which two ranks measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.host import crossover
from mpicomm.collectives.host.engine import HostEngine
from tests.helpers.rigs.host_engines import engine_of

KIB = 1 << 10


@pytest.fixture
def pair(comm_world: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """This rank and a neighbour, or only this rank if there is none."""
    pair = comm_world.Split(comm_world.rank // 2)
    assert isinstance(pair, MPI.Intracomm)
    yield pair
    pair.Free()


@pytest.mark.mpi(min_size=2)
def test_both_ranks_measure_the_same_size(pair: MPI.Intracomm) -> None:
    if pair.size == 2:
        with engine_of(pair) as (engine, _, _):
            found = crossover.measure(pair, engine)
        assert found in [256 * KIB << step for step in range(6)]
        assert pair.allgather(found) == [found, found]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("least_nbytes", [256 * KIB, 2048 * KIB])
def test_calls_go_by_one_measurement(pair: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, least_nbytes: int) -> None:
    measured: list[int] = []
    mapped: list[object] = []
    run = HostEngine.run

    def counted(engine: HostEngine, *call: Any) -> None:
        mapped.append(call)
        run(engine, *call)

    def measure(comm: MPI.Intracomm, engine: HostEngine) -> int:
        measured.append(comm.size)
        return least_nbytes

    monkeypatch.setattr(crossover, "measure", measure)
    monkeypatch.setattr(crossover, "_known", {})
    monkeypatch.setattr(HostEngine, "run", counted)
    if pair.size == 2:
        with mpicomm.Communicator(pair, device="cpu", timeout_s=20) as comm:
            for nbytes in (256 * KIB, 1024 * KIB, 2048 * KIB, 8192 * KIB):
                received = np.zeros(nbytes // 4, np.float32)
                mapped.clear()
                comm.Allreduce(np.full(nbytes // 4, comm.rank + 1, np.float32), received)
                assert (received == 3).all()
                assert bool(mapped) == (nbytes >= least_nbytes)
                mapped.clear()
                comm.Allreduce(MPI.IN_PLACE, received, MPI.MAX)  # its NaNs do not depend on the machine
                assert bool(mapped) == (nbytes >= 1024 * KIB)
            with comm.Dup() as other:
                other.Allreduce(MPI.IN_PLACE, np.zeros(1024 * KIB // 4, np.float32))
        assert measured == [2]
