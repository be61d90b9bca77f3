"""HostEngine on real ranks: odd messages, random sequences of calls, stragglers, ranks that fail, and its life."""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.exchange import Exchange, Reduction
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.channels import AgreedError, Channels
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.host.selection import algorithms_for
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.signature import Signature
from mpicomm.devices.host import HostBackend, fence
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.sharing.segments import share
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs import patterns
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, Case, Prepared, may_be_in_place
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import patience_s
from tests.helpers.rigs.device_calls import CALL, FLOAT32, SMALL, engine_of, meet, span


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
    return lambda engine: selection.run_mapped(engine, call, algorithm), prepared.check


MOMENTS: dict[str, tuple[Any, str]] = {
    "before the flag": (Channels, "_publish"),
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
            run, check = random_call(comm_world, shared, 40 if what == "many" and number % 10 else 4000)
            if what == "stragglers" and shared.integers(comm_world.size) == comm_world.rank:
                time.sleep(mine.choice([0, 1e-4, 2e-3, 1e-2]))
            run(engine)
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


def test_ranks_that_fail_at_once_raise_the_same_agreed_error(
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
        assert not agreed_error.is_set() and agreed_error.read() is None
        comm_world.Barrier()
        if rng.random() < 0.5:
            time.sleep(1e-5 * rng.random())
        mine = (PeerError if rank % 2 else CollectiveTimeoutError)(f"{number} by {rank} " + "x" * 200, ranks=[rank])
        given = agreed_error.publish(mine)
        told = agreed_error.read()
        assert told is not None and agreed_error.is_set()
        texts = comm_world.allgather([(type(error).__name__, str(error), error.ranks) for error in (given, told)])
        assert len(set(itertools.chain(*texts))) == 1, texts
        agreed_error.close()
        assert not agreed_error.is_set()
    del memory
    segments.close("agreed_errors")


def test_an_agreed_error_that_is_too_long_is_cut(comm_world: MPI.Intracomm) -> None:
    node = Group(MPI.COMM_SELF, [0], 20.0, tag=80)
    agreed_error = AgreedError(node, memoryview(bytearray(AgreedError.nbytes(1))))
    given = agreed_error.publish(PeerError("ä" * 10_000, ranks=[3]))
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
