"""HostEngine on real ranks: random sequences of calls, stragglers, ranks far ahead, counters that wrap."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.channels import Channels
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.host.selection import algorithms_for
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs import patterns
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, Case, Prepared, may_be_in_place
from tests.helpers.rigs.host_engines import CALL, FLOAT32, SMALL, engine_of, meet, span

EDGES = (0, 1, 511, 512, 513, 1023, 1024, 1025, 2049)  # around the elements of a slot


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with two shots go in several pieces."""
    monkeypatch.setattr(selection, "_SHARD_NBYTES", 2 * SMALL)


def random_call(
    comm: MPI.Intracomm, rng: np.random.Generator, largest: int
) -> tuple[Callable[[HostEngine], None], Callable[[], None]]:
    """Draw a collective of blocks of up to so many elements from a generator that has the same state on all ranks.

    Return what carries it out, and the check of its result.
    """
    row = OPERATIONS[OF_ONE_TYPE[int(rng.integers(len(OF_ONE_TYPE)))]]
    algorithms = algorithms_for(row)
    algorithm = algorithms[int(rng.integers(len(algorithms)))]
    root, seed, in_place, number = (int(rng.integers(most)) for most in (comm.size, 2**31, 2, 9))
    count = EDGES[number] if largest > EDGES[-1] and rng.integers(3) == 0 else int(rng.integers(0, largest))
    case = Case(
        row.name,
        FLOAT32 if rng.integers(3) == 0 else np.dtype(np.int64),
        count,
        root=root,
        form="any",
        in_place=bool(in_place) and may_be_in_place(row),
        algorithm=algorithm,
        seed=seed,
        wild=algorithm != "ring",
        derived=False,
    )
    prepared = Prepared(case, comm.rank, comm.size, np)
    send, receive = prepared.arguments()
    op = MPI.SUM if row.reduces else None
    call = Call(row, Arguments(send, receive, op, root, prepared.counts), comm.rank, comm.size, algorithm)
    return lambda engine: selection.carry_out(engine, comm.size, call, algorithm), prepared.check


MOMENTS: dict[str, tuple[Any, str]] = {
    "before the flag": (Channels, "_announce"),
    "while reading": (ctypes, "memmove"),
    "after reading": (Channels, "release"),
}


@pytest.mark.parametrize("what", ["many", "stragglers", *MOMENTS, "1", "2", "5"])
def test_random_calls(comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A rank that runs ahead must not see data that is not there yet, nor write over data that others still read.

    Ranks stop between calls, or at a bad moment. With few slots the numbers of epochs begin again.
    """
    shared, mine = np.random.default_rng(len(what)), np.random.default_rng([22, comm_world.rank])

    def napping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if mine.random() < 0.1:
                time.sleep(1e-3)
            return function(*arguments)

        return wrapped

    if what in MOMENTS:
        owner, name = MOMENTS[what]
        monkeypatch.setattr(owner, name, napping(getattr(owner, name)))
    first, slots = (2**32 - 5, int(what)) if what.isdigit() else (0, 2)
    with engine_of(comm_world, first=first, slots=slots) as (engine, _, _):
        for number in range(1000 if what == "many" else 100):
            carry_out, check = random_call(comm_world, shared, 40 if what == "many" and number % 10 else 4000)
            if what == "stragglers" and shared.integers(comm_world.size) == comm_world.rank:
                time.sleep(mine.choice([0, 1e-4, 2e-3, 1e-2]))
            carry_out(engine)
            if first:
                meet(comm_world, engine)
            check()


def test_one_rank_far_ahead_waits_for_slots(comm_world: MPI.Intracomm) -> None:
    """The root of a broadcast waits only for slots: it must not write over data that a slow rank has yet to read."""
    rank, size = comm_world.rank, comm_world.size
    with engine_of(comm_world) as (engine, _, _):
        for number in range(20):
            buffer = np.full(20_000, number if rank == 0 else -1, np.int64)
            if rank == size - 1:
                time.sleep(0.002)
            engine.run(patterns.bcast(rank, size, buffer.dtype, span(buffer), 0), CALL)
            assert (buffer == number).all()
