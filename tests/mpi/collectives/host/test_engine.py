"""HostEngine on real ranks: odd messages, and its life. test_engine_order.py has every pattern."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.exchange import Exchange, Reduction
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.errors import InvalidUsageError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs import patterns
from tests.helpers.rigs.host_engines import CALL, FLOAT32, SMALL, engine_of, meet, span


@pytest.fixture(scope="module")
def engine() -> Iterator[HostEngine]:
    """One for all tests that do not look at its beginning or end: a call must not depend on those before it."""
    with engine_of(MPI.COMM_WORLD) as (engine, _, _):
        yield engine
        meet(MPI.COMM_WORLD, engine)


def test_messages_that_lie_differently_in_cache_lines(comm_world: MPI.Intracomm) -> None:
    """In any place, a message that fills its slot does not change the slot beside it, which no rank has read."""
    memory = np.zeros(10 * SMALL, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: 9 * SMALL]
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.size)
    with engine_of(comm_world) as (engine, _, _):  # its first message goes into the first slot
        for first, second in itertools.product((0, 1, 16, 47, 48, 63), repeat=2):
            sources = memory[first:][:SMALL], memory[5 * SMALL + second :][:SMALL]
            outputs = [np.zeros(SMALL, np.uint8) for _ in sources]
            buffers = sources if comm_world.rank == 0 else outputs
            if comm_world.rank > 0:
                time.sleep(2e-3)  # the root has filled both slots by then
            steps = [patterns.bcast(comm_world.rank, comm_world.size, each.dtype, span(each), 0) for each in buffers]
            engine.run([*steps[0], *steps[1]], CALL)
            if comm_world.rank > 0:
                assert [out.tolist() for out in outputs] == [source.tolist() for source in sources]


def test_elements_larger_than_a_slot(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    dtype = np.dtype(f"V{2 * SMALL + 3}")
    expected = np.frombuffer(np.random.default_rng(1).bytes(3 * dtype.itemsize), dtype)
    buffer = expected.copy() if comm_world.rank == 0 else np.zeros(3, dtype)
    engine.run(patterns.bcast(comm_world.rank, comm_world.size, dtype, span(buffer), 0), CALL)
    assert buffer.tobytes() == expected.tobytes()


def test_messages_beyond_any_pattern(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    """An exchange may reduce the data of some ranks, keep the data of others, and leave this rank out."""
    rank, size = comm_world.rank, comm_world.size
    if size < 3:
        pytest.skip("needs three ranks")
    send = np.full(2000, rank + 1, np.float32)
    kept, out = np.zeros(2000, np.float32), np.zeros(2000, np.float32)
    nothing = (None,) * size
    if rank == 0:
        receives = tuple(span(kept) if peer == size - 1 else None for peer in range(size))
        reduction = Reduction("sum", tuple(range(1, size - 1)), None, span(out))
        steps = [Exchange(FLOAT32, nothing, receives, reduction)]
    else:
        steps = [Exchange(FLOAT32, tuple(span(send) if peer == 0 else None for peer in range(size)), nothing)]
    for _ in range(10):
        engine.run(steps, CALL)
    if rank == 0:
        assert set(kept.tolist()) == {size}
        assert set(out.tolist()) == {sum(range(2, size))}


def test_ranks_must_ask_for_the_same_slots(comm_world: MPI.Intracomm) -> None:
    if comm_world.size == 1:
        pytest.skip("needs two ranks")
    node = Group(comm_world, range(comm_world.size), 20.0, tag=77)
    call_log = CallLog(node)
    with raises_everywhere(comm_world, InvalidUsageError, match="host arena differs between ranks"):
        HostEngine(node, call_log, slots=2 + 2 * comm_world.size + comm_world.rank)
    call_log.close_peers()
    comm_world.Barrier()
    call_log.close_own()
