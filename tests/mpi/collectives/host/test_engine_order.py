"""HostEngine on real ranks: random sequences of calls, stragglers, ranks far ahead, counters that wrap."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.channels import Channels
from mpicomm.collectives.host.engine import HostEngine
from tests.helpers.inputs import patterns
from tests.helpers.rigs.host_engines import CALL, engine_of, meet, span, spans


@pytest.fixture
def engine(comm_world: MPI.Intracomm) -> Iterator[HostEngine]:
    with engine_of(comm_world) as (engine, _, _):
        yield engine


def random_call(
    comm: MPI.Intracomm, rng: np.random.Generator, largest: int
) -> tuple[Sequence[Exchange], list[Any], Any]:
    """Draw a collective from a generator that has the same state on all ranks.

    Returns its exchanges, the array that they fill with its right content, and the objects that must stay alive.
    """
    rank, size = comm.rank, comm.size
    kind, root, seed = int(rng.integers(6)), int(rng.integers(size)), int(rng.integers(2**31))
    counts = rng.integers(0, largest, size).tolist()
    dtype = np.dtype("i8")
    parts = [np.random.default_rng([seed, index]).integers(-99, 99, sum(counts)) for index in range(size)]
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    send, out = parts[rank].copy(), np.zeros(sum(counts), dtype)
    at = (rank, size, dtype)
    if kind == 0:
        return patterns.allreduce(*at, span(send), span(out), "sum"), [out, sum(parts)], send
    if kind == 1:
        piece = int(rng.integers(8, 9000))
        return patterns.allreduce(*at, span(send), span(out), "max", piece_nbytes=piece), [out, np.max(parts, 0)], send
    if kind == 2:
        out = out[: counts[rank]].copy()
        steps = patterns.reduce_scatter(*at, spans(send, counts), span(out), "sum")
        return steps, [out, sum(parts)[mine]], send
    if kind == 3:
        send = send[mine].copy()
        expected = [parts[index][sum(counts[:index]) : sum(counts[: index + 1])] for index in range(size)]
        return patterns.allgather(*at, span(send), spans(out, counts)), [out, np.concatenate(expected)], send
    if kind == 4:
        out = parts[rank].copy()
        return patterns.bcast(*at, span(out), root), [out, parts[root]], None
    return patterns.scan(*at, span(send), span(out), "sum"), [out, sum(parts[: rank + 1])], send


def test_thousands_of_random_calls_in_sequence(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    rng = np.random.default_rng(20)
    for number in range(1500):
        steps, (out, expected), _alive = random_call(comm_world, rng, 40 if number % 10 else 2000)
        engine.run(steps, CALL)
        assert out.tolist() == expected.tolist(), f"call {number}"
        if number % 7 == 0:
            meet(comm_world, engine)


def test_stragglers(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    rng = np.random.default_rng(21)
    mine = np.random.default_rng([22, comm_world.rank])
    for number in range(150):
        steps, (out, expected), _alive = random_call(comm_world, rng, 4000)
        if rng.integers(comm_world.size) == comm_world.rank:
            time.sleep(mine.choice([0, 1e-4, 2e-3, 1e-2]))
        engine.run(steps, CALL)
        assert out.tolist() == expected.tolist(), f"call {number}"


@pytest.mark.parametrize("moment", ["before the flag", "while reading", "after reading"])
def test_a_rank_that_stops_at_a_bad_moment(
    comm_world: MPI.Intracomm, engine: HostEngine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A rank that runs ahead must not see data that is not there yet, nor write over data that others still read."""
    rng = np.random.default_rng([23, comm_world.rank])

    def napping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if rng.random() < 0.1:
                time.sleep(1e-3)
            return function(*arguments)

        return wrapped

    if moment == "before the flag":
        monkeypatch.setattr(Channels, "_announce", napping(Channels._announce))
    elif moment == "after reading":
        monkeypatch.setattr(Channels, "release", napping(Channels.release))
    else:
        monkeypatch.setattr(ctypes, "memmove", napping(ctypes.memmove))
    shared = np.random.default_rng(24)
    for number in range(60):
        steps, (out, expected), _alive = random_call(comm_world, shared, 5000)
        engine.run(steps, CALL)
        assert out.tolist() == expected.tolist(), f"call {number}"


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_epochs_wrap(comm_world: MPI.Intracomm, slots: int) -> None:
    rng = np.random.default_rng(25)
    with engine_of(comm_world, first=2**32 - 5, slots=slots) as (engine, _, _):
        for number in range(100):
            steps, (out, expected), _alive = random_call(comm_world, rng, 2000)
            engine.run(steps, CALL)
            meet(comm_world, engine)
            assert out.tolist() == expected.tolist(), f"call {number}"


def test_one_rank_far_ahead_waits_for_slots(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    """The root of a broadcast waits only for slots: it must not write over data that a slow rank has yet to read."""
    rank, size = comm_world.rank, comm_world.size
    for number in range(20):
        buffer = np.full(20_000, number if rank == 0 else -1, np.int64)
        if rank == size - 1:
            time.sleep(0.002)
        engine.run(patterns.bcast(rank, size, buffer.dtype, span(buffer), 0), CALL)
        assert (buffer == number).all()
