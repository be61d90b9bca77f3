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
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import require_same, ring_reduced
from tests.helpers.rigs.host_engines import CALL, FLOAT32, engine_of, meet, parts_of, span, spans, wanted


@pytest.fixture
def engine(comm_world: MPI.Intracomm) -> Iterator[HostEngine]:
    with engine_of(comm_world) as (engine, _, _):
        yield engine


KINDS = (
    "allreduce", "two shots", "ring", "scan", "exscan", "reduce", "reduce_scatter", "allgather", "gather", "scatter",
    "alltoall", "bcast",
)  # fmt: skip
EDGES = (0, 1, 511, 512, 513, 1023, 1024, 1025, 2049)  # around the elements of a slot


def random_call(
    comm: MPI.Intracomm, rng: np.random.Generator, largest: int
) -> tuple[Sequence[Exchange], Callable[[], None]]:
    """Draw a collective of blocks of up to so many elements from a generator that has the same state on all ranks.

    Return its exchanges, and the check of its result. The check keeps the buffers alive.
    """
    rank, size, kind = comm.rank, comm.size, KINDS[int(rng.integers(len(KINDS)))]
    root, seed, piece, in_place = (int(rng.integers(most)) for most in (size, 2**31, 9000, 2))
    at_edges = largest > EDGES[-1] and rng.integers(3) == 0
    counts = (rng.choice(EDGES, size) if at_edges else rng.integers(0, largest, size)).tolist()
    dtype = FLOAT32 if rng.integers(3) == 0 else np.dtype("i8")
    if dtype == FLOAT32:
        parts = parts_of(comm, dtype, sum(counts), seed)
    else:
        parts = [np.random.default_rng([seed, index]).integers(-99, 99, sum(counts)) for index in range(size)]
    cuts = [slice(sum(counts[:index]), sum(counts[: index + 1])) for index in range(size)]
    at, mine, at_root = (rank, size, dtype), cuts[rank], rank == root
    send: Any = parts[rank].copy()
    out: Any = send if in_place else np.full_like(send, -1)
    before, scratch = out.copy(), np.zeros(counts[rank], dtype)
    steps: Sequence[Exchange]
    if kind in ("allreduce", "two shots"):
        nbytes = 8 + piece if kind == "two shots" else None
        steps, expected = (
            patterns.allreduce(*at, span(send), span(out), "sum", piece_nbytes=nbytes),
            wanted("sum", parts),
        )
    elif kind == "ring":
        steps, expected = patterns.ring_allreduce(*at, span(send), span(out), "sum"), ring_reduced("sum", parts)
    elif kind == "scan":
        steps, expected = patterns.scan(*at, span(send), span(out), "sum"), wanted("sum", parts[: rank + 1])
    elif kind == "exscan":
        steps = patterns.exscan(*at, span(send), span(out), "sum")
        expected = wanted("sum", parts[:rank]) if rank else before
    elif kind == "reduce":
        steps = patterns.reduce(*at, span(send), span(out) if at_root else None, "sum", root)
        expected = wanted("sum", parts) if at_root else before
    elif kind == "reduce_scatter":
        out = send[: counts[rank]] if in_place else out[: counts[rank]].copy()
        output, room = Span(out.ctypes.data, counts[rank]), scratch.ctypes.data if in_place else 0
        steps = patterns.reduce_scatter(*at, spans(send, counts), output, "sum", scratch=room)
        expected = wanted("sum", parts)[mine]
    elif kind in ("allgather", "gather"):
        out = np.full_like(send, -1)
        here = in_place and (at_root or kind == "allgather")
        send = out[mine] if here else parts[rank][mine].copy()
        send[:] = parts[rank][mine]
        expected = np.concatenate([part[cut] for part, cut in zip(parts, cuts, strict=True)])
        if kind == "allgather":
            steps = patterns.allgather(*at, span(send), spans(out, counts))
        else:
            expected = expected if at_root else out.copy()
            steps = patterns.gather(*at, span(send), spans(out, counts) if at_root else None, root)
    elif kind == "scatter":
        send = parts[root].copy()
        out = send[mine] if in_place and at_root else scratch
        steps = patterns.scatter(*at, spans(send, counts) if at_root else None, span(out), root)
        expected = parts[root][mine]
    elif kind == "alltoall":
        lengths = [[counts[(one + other) % size] for other in range(size)] for one in range(size)]  # [from][to]
        blocks = [
            [np.roll(np.resize(parts[one], n), other) for other, n in enumerate(of_one)]
            for one, of_one in enumerate(lengths)
        ]
        send = np.concatenate(blocks[rank]).astype(dtype)
        out = send if in_place else np.full_like(send, -1)
        steps = patterns.alltoall(*at, spans(send, lengths[rank]), spans(out, lengths[rank]))
        expected = np.concatenate([of_one[rank] for of_one in blocks]).astype(dtype)
    else:
        out = parts[rank].copy()
        steps = patterns.bcast(*at, span(out), root, piece_nbytes=8 + piece if in_place else None)
        expected = parts[root]
    given = send.copy()

    def check(alive: Any = (send, out, scratch)) -> None:
        require_same(out, expected)
        if not in_place:
            require_same(send, given)

    return steps, check


def test_thousands_of_random_calls_in_sequence(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    rng = np.random.default_rng(20)
    for number in range(1500):
        steps, check = random_call(comm_world, rng, 40 if number % 10 else 3000)
        engine.run(steps, CALL)
        check()
        if number % 7 == 0:
            meet(comm_world, engine)


def test_stragglers(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    rng = np.random.default_rng(21)
    mine = np.random.default_rng([22, comm_world.rank])
    for _ in range(150):
        steps, check = random_call(comm_world, rng, 4000)
        if rng.integers(comm_world.size) == comm_world.rank:
            time.sleep(mine.choice([0, 1e-4, 2e-3, 1e-2]))
        engine.run(steps, CALL)
        check()


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
    for _ in range(60):
        steps, check = random_call(comm_world, shared, 5000)
        engine.run(steps, CALL)
        check()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_epochs_wrap(comm_world: MPI.Intracomm, slots: int) -> None:
    rng = np.random.default_rng(25)
    with engine_of(comm_world, first=2**32 - 5, slots=slots) as (engine, _, _):
        for _ in range(100):
            steps, check = random_call(comm_world, rng, 2000)
            engine.run(steps, CALL)
            meet(comm_world, engine)
            check()


def test_one_rank_far_ahead_waits_for_slots(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    """The root of a broadcast waits only for slots: it must not write over data that a slow rank has yet to read."""
    rank, size = comm_world.rank, comm_world.size
    for number in range(20):
        buffer = np.full(20_000, number if rank == 0 else -1, np.int64)
        if rank == size - 1:
            time.sleep(0.002)
        engine.run(patterns.bcast(rank, size, buffer.dtype, span(buffer), 0), CALL)
        assert (buffer == number).all()
