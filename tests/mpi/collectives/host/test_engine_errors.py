"""HostEngine on real ranks: ranks that call different things, do not come, or leave in the middle."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.checks import Signature
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.channels import AgreedError, Channels
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.devices.host import HostBackend, fence
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.sharing.segments import share
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs import patterns
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import patience_s
from tests.helpers.rigs.host_engines import CALL, FLOAT32, engine_of, span


@pytest.mark.mpi(min_size=2)
def test_an_engine_that_an_error_has_broken_keeps_no_arrays(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    arrays: list[weakref.ref[Any]] = []

    def fail(engine: HostEngine) -> None:
        given, received = np.ones((2, 100), np.float32)
        arrays.append(weakref.ref(given))
        op = "sum" if rank else "max"
        exchanges = patterns.allreduce(rank, size, FLOAT32, span(given), span(received), op)
        engine.run(exchanges, Signature("Allreduce", "float32", 100, op))

    with engine_of(comm_world) as (engine, _, _):
        with pytest.raises(PeerError):
            fail(engine)
        gc.collect()
        assert arrays[0]() is None


@pytest.mark.mpi(min_size=3)
def test_the_missing_rank_is_named_and_not_who_waits_for_it(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    limit_s = patience_s("cpu")
    with engine_of(comm_world, timeout_s=limit_s) as (engine, _, _):
        buffer = np.zeros(10, np.float32)
        chain = []
        for source in reversed(range(1, size)):  # each rank to the rank before it, the last one first
            sends = tuple(span(buffer) if rank == source and peer == source - 1 else None for peer in range(size))
            receives = tuple(span(buffer) if rank == source - 1 and peer == source else None for peer in range(size))
            chain.append(Exchange(FLOAT32, sends, receives))
        comm_world.Barrier()
        # Rank 0 begins to wait first, and so it gives up first.
        time.sleep(2.5 * limit_s if rank == size - 1 else 0.2 * limit_s * rank)
        with raises_everywhere(
            comm_world, CollectiveTimeoutError, match=f": rank {size - 1} did not arrive within {limit_s:g} s"
        ):
            engine.run(chain, CALL)


def test_ranks_that_give_up_at_once_give_the_same_agreed_error(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size, rounds = comm_world.rank, comm_world.size, 50
    node = Group(comm_world, range(size), 20.0, tag=79)
    backend = HostBackend(20.0)
    nbytes = AgreedError.nbytes(size)
    segments = share(node, backend, "agreed_errors", lambda: backend.allocate("memfd", rounds * nbytes), lambda: None)
    memory = backend.view(segments[0], (rounds * nbytes,), np.dtype(np.uint8)).data
    rng = np.random.default_rng(rank)

    def interrupted_fence() -> None:
        # As if the system gave the core to another rank, between a rank's look and its publication.
        if rng.random() < 0.5:
            time.sleep(2e-3 * rng.random())
        fence()

    monkeypatch.setattr("mpicomm.collectives.host.channels.fence", interrupted_fence)
    for number in range(rounds):
        agreed_error = AgreedError(node, memory[number * nbytes : (number + 1) * nbytes])
        assert not agreed_error.there() and agreed_error.read() is None
        comm_world.Barrier()
        if rng.random() < 0.5:
            time.sleep(1e-5 * rng.random())
        mine = (PeerError if rank % 2 else CollectiveTimeoutError)(f"{number} by {rank} " + "x" * 200, ranks=[rank])
        given = agreed_error.give(mine)
        told = agreed_error.read()
        assert told is not None and agreed_error.there()
        texts = comm_world.allgather([(type(error).__name__, str(error), error.ranks) for error in (given, told)])
        assert len(set(itertools.chain(*texts))) == 1, texts
        agreed_error.close()
        assert not agreed_error.there()
    del memory
    segments.close("agreed_errors")


def test_a_agreed_error_that_is_too_long_is_cut(comm_world: MPI.Intracomm) -> None:
    node = Group(MPI.COMM_SELF, [0], 20.0, tag=80)
    agreed_error = AgreedError(node, memoryview(bytearray(AgreedError.nbytes(1))))
    given = agreed_error.give(PeerError("ä" * 10_000, ranks=[3]))
    told = agreed_error.read()
    assert told is not None and str(told) == str(given) and str(told).startswith("ä" * 100)
    assert told.ranks == (3,)


def test_ranks_wait_as_long_as_something_comes(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    limit_s = stretched(1.0)
    with engine_of(comm_world, timeout_s=limit_s) as (engine, _, _):
        buffer = np.zeros(10, np.float32)
        for _ in range(3):  # which takes longer than the deadline
            if rank == 0:
                time.sleep(limit_s / 2)
            engine.run(patterns.bcast(rank, size, FLOAT32, span(buffer), 0), CALL)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_is_interrupted_takes_the_others_with_it(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size = comm_world.rank, comm_world.size
    with engine_of(comm_world, timeout_s=HANG_S) as (engine, _, _):  # which nobody waits
        a, b = np.ones(30_000, np.float32), np.zeros(30_000, np.float32)
        steps = patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "sum")
        if rank == 1:

            def interrupt(*arguments: object) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(Channels, "release", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.run(steps, CALL)
        else:
            with pytest.raises(PeerError, match="rank 1 left in the middle: KeyboardInterrupt"):
                engine.run(steps, CALL)
