"""HostEngine on real ranks: every pattern, chunk boundaries, in place, stragglers, and what can go wrong."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

from mpicomm.backend.host import HostBackend
from mpicomm.bootstrap import Group
from mpicomm.collectives import patterns
from mpicomm.collectives.board import Board
from mpicomm.collectives.exchange import Exchange, Reduction, Span
from mpicomm.collectives.host_channels import Channels
from mpicomm.collectives.host_engine import HostEngine
from mpicomm.collectives.host_reduction import OPERATIONS, is_supported
from mpicomm.collectives.host_verdict import Verdict
from mpicomm.collectives.signature import Signature
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.shared_segments import share
from tests.helpers.leaks import nothing_leaks
from tests.helpers.raising import raises_everywhere
from tests.helpers.reductions import NARROW, dtype_named, reduced, require_same, samples

Array = npt.NDArray[Any]

SMALL = 4096  # bytes per slot: many chunks without many bytes
CALL = Signature("Test", "any")
FLOAT32 = np.dtype(np.float32)


@contextlib.contextmanager
def engine_of(
    comm: MPI.Intracomm, *, slot_nbytes: int = SMALL, slots: int = 2, first: int = 0, timeout_s: float = 20.0
) -> Iterator[tuple[HostEngine, Board, Group]]:
    """An engine of all ranks; given back in two steps, as a communicator does it, also if it is broken."""
    private = comm.Dup()
    node = Group(private, range(comm.size), timeout_s)
    board = Board(node)
    engine = HostEngine(node, board, slot_nbytes=slot_nbytes, slots=slots, first=first)
    try:
        yield engine, board, node
    finally:
        for part in (engine, board):
            part.close_peers()
            comm.Barrier()
            part.close_own()
        private.Free()


@pytest.fixture
def engine(comm_world: MPI.Intracomm) -> Iterator[HostEngine]:
    with engine_of(comm_world) as (engine, _, _):
        yield engine


def span(array: Array) -> Span:
    assert array.flags.c_contiguous
    return Span(array.ctypes.data, array.size)


def spans(array: Array, counts: Sequence[int]) -> list[Span]:
    displs = [sum(counts[:index]) for index in range(len(counts))]
    return patterns.blocks(array.ctypes.data, counts, displs, array.itemsize)


def parts_of(comm: MPI.Intracomm, dtype: np.dtype[Any], count: int, seed: object) -> list[Array]:
    """What every rank sends, known to all."""
    entropy = zlib.crc32(repr(seed).encode())  # hash() differs between processes
    return [samples(dtype, count, np.random.default_rng([entropy, rank])) for rank in range(comm.size)]


def dtype_or_skip(name: str) -> np.dtype[Any]:
    try:
        return dtype_named(name)
    except ImportError:
        pytest.skip("needs ml_dtypes")


def wanted(op: str, parts: Sequence[Array]) -> Array:
    if op == "prod" and parts[0].dtype.kind == "c":
        result = parts[0]
        with np.errstate(all="ignore"):
            for part in parts[1:]:
                result = np.multiply(result, part)
        return result
    return parts[0] if len(parts) == 1 else reduced(op, parts)


COUNTS = [0, 1, 2, 1023, 1024, 1025, 2048, 2049, 5 * 1024 + 7]  # a slot has 1024 float32


@pytest.mark.parametrize("piece_nbytes", [None, 4, 3000, 1 << 20])
@pytest.mark.parametrize("in_place", [False, True])
def test_allreduce(comm_world: MPI.Intracomm, engine: HostEngine, in_place: bool, piece_nbytes: int | None) -> None:
    for count in COUNTS if piece_nbytes != 4 else (0, 1, 2, 50):
        parts = parts_of(comm_world, FLOAT32, count, count)
        send = parts[comm_world.rank].copy()
        out = send if in_place else np.zeros_like(send)
        steps = patterns.allreduce(
            comm_world.rank, comm_world.size, FLOAT32, span(send), span(out), "sum", piece_nbytes=piece_nbytes
        )
        engine.run(steps, CALL)
        require_same(out, wanted("sum", parts))
        if not in_place:
            assert send.tobytes() == parts[comm_world.rank].tobytes()


@pytest.mark.parametrize("name", [*"?bBhHiIqQfdFD", *NARROW])
def test_every_operation_on_every_dtype(comm_world: MPI.Intracomm, engine: HostEngine, name: str) -> None:
    dtype = dtype_or_skip(name)
    at = (comm_world.rank, comm_world.size, dtype)
    for op, (index, count) in itertools.product(OPERATIONS, enumerate([1, 777, 5000])):
        if not is_supported(op, dtype):
            with pytest.raises(InvalidUsageError):
                engine.run(patterns.scan(*at, Span(0, 0), Span(0, 0), op), CALL)
            continue
        parts = parts_of(comm_world, dtype, count, (op, name, index))
        expected = wanted(op, parts)
        send, out, shot = parts[comm_world.rank].copy(), np.zeros(count, dtype), np.zeros(count, dtype)
        engine.run(patterns.allreduce(*at, span(send), span(out), op), CALL)
        engine.run(patterns.allreduce(*at, span(send), span(shot), op, piece_nbytes=1500), CALL)
        require_same(out, expected)
        require_same(shot, expected)


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("name", ["f", "d", "F", "D", "float16", "bfloat16"])
def test_result_is_bitwise_the_same_on_every_rank_however_it_is_computed(
    comm_world: MPI.Intracomm, engine: HostEngine, name: str, op: str
) -> None:
    dtype = dtype_or_skip(name)
    at = (comm_world.rank, comm_world.size, dtype)
    rng = np.random.default_rng(comm_world.rank)
    for count in (1, 2, 511, 513, 1025, 9999):
        send = rng.standard_normal(2 * count)[:count].astype(dtype)
        results = []
        for shift, piece in [(0, None), (3, None), (0, 900), (1, 4000), (5, 1 << 20)]:
            raw = np.zeros(2 * count * dtype.itemsize + 8, np.uint8)
            # Where the arrays lie in memory must not matter either.
            out = raw[shift : shift + send.nbytes].view(dtype)
            out[:] = send
            engine.run(patterns.allreduce(*at, span(out), span(out), op, piece_nbytes=piece), CALL)
            results.append(out.tobytes())
        assert len(set(itertools.chain(*comm_world.allgather(results)))) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_reduce(comm_world: MPI.Intracomm, engine: HostEngine, in_place: bool) -> None:
    rank, size = comm_world.rank, comm_world.size
    for root, count, piece in itertools.product(range(size), COUNTS, [None, 5000]):
        parts = parts_of(comm_world, FLOAT32, count, (root, count))
        send = parts[rank].copy()
        out = send if in_place and rank == root else np.full(count, -1, np.float32)
        scratch = np.zeros(patterns.reduce_scratch_count(count, size, FLOAT32, piece) if piece else 0, np.float32)
        steps = patterns.reduce(
            rank,
            size,
            FLOAT32,
            span(send),
            span(out) if rank == root else None,
            "sum",
            root,
            scratch=span(scratch),
            piece_nbytes=piece,
        )
        engine.run(steps, CALL)
        if rank == root:
            require_same(out, wanted("sum", parts))
        else:
            assert (out == -1).all() and send.tobytes() == parts[rank].tobytes()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", ["equal", "ragged", "one"])
def test_reduce_scatter(comm_world: MPI.Intracomm, engine: HostEngine, shape: str, in_place: bool) -> None:
    rank, size = comm_world.rank, comm_world.size
    for base in (0, 1, 1024, 3333):
        counts = {
            "equal": [base] * size,
            "ragged": [base * (size - index) % 3500 + index for index in range(size)],
            "one": [base if index == size - 1 else 0 for index in range(size)],
        }[shape]
        parts = parts_of(comm_world, FLOAT32, sum(counts), (shape, base))
        send = parts[rank].copy()
        out = send[: counts[rank]] if in_place else np.zeros(counts[rank], np.float32)
        output = Span(send.ctypes.data if in_place else out.ctypes.data, counts[rank])
        scratch = np.zeros(counts[rank], np.float32)
        steps = patterns.reduce_scatter(rank, size, FLOAT32, spans(send, counts), output, "sum", scratch=span(scratch))
        engine.run(steps, CALL)
        start = sum(counts[:rank])
        require_same(out, wanted("sum", parts)[start : start + counts[rank]])
        assert send[counts[rank] :].tobytes() == parts[rank][counts[rank] :].tobytes()


RAGGED = [[5, 1024, 0, 2500], [0, 0, 3000, 1], [1025, 7, 1, 0], [4097, 4096, 4095, 4096], [0, 0, 0, 0]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("counts", RAGGED, ids=str)
def test_gathering_and_scattering(
    comm_world: MPI.Intracomm, engine: HostEngine, counts: list[int], in_place: bool
) -> None:
    rank, size = comm_world.rank, comm_world.size
    counts = counts[:size]
    dtype = np.dtype("i2")
    values = [((np.arange(count) + 1000 * index) % 32768).astype(dtype) for index, count in enumerate(counts)]
    whole, start = np.concatenate(values), sum(counts[:rank])
    mine = slice(start, start + counts[rank])

    out = np.full(sum(counts), -1, dtype)
    send = out[mine] if in_place else values[rank].copy()
    send[:] = values[rank]
    engine.run(patterns.allgather(rank, size, dtype, span(send), spans(out, counts)), CALL)
    assert out.tolist() == whole.tolist()

    for root in range(size):
        out = np.full(sum(counts), -1, dtype)
        send = out[mine] if in_place and rank == root else values[rank].copy()
        send[:] = values[rank]
        blocks = spans(out, counts)
        engine.run(patterns.gather(rank, size, dtype, span(send), blocks if rank == root else None, root), CALL)
        assert out.tolist() == (whole.tolist() if rank == root else [-1] * out.size)

        source = whole + root
        target = source[mine] if in_place and rank == root else np.full(counts[rank], -1, dtype)
        blocks = spans(source, counts)
        engine.run(patterns.scatter(rank, size, dtype, blocks if rank == root else None, span(target), root), CALL)
        assert target.tolist() == (values[rank] + root).tolist()
        assert source.tolist() == (whole + root).tolist()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scale", [0, 1, 700, 1024, 5000])
def test_alltoall(comm_world: MPI.Intracomm, engine: HostEngine, scale: int, in_place: bool) -> None:
    rank, size = comm_world.rank, comm_world.size
    dtype = np.dtype("u4")

    def count(source: int, target: int) -> int:
        low, high = sorted((source, target)) if in_place else (source, target)
        return scale * ((3 * low + high) % 4)

    def value(source: int, target: int) -> Array:
        return (np.arange(count(source, target)) + 10**6 * source + 10**5 * target).astype(dtype)

    send = np.concatenate([value(rank, peer) for peer in range(size)])
    incoming = [count(peer, rank) for peer in range(size)]
    out = send if in_place else np.zeros(sum(incoming), dtype)
    send_blocks = spans(send, [count(rank, peer) for peer in range(size)])
    engine.run(patterns.alltoall(rank, size, dtype, send_blocks, spans(out, incoming)), CALL)
    assert out.tolist() == np.concatenate([value(peer, rank) for peer in range(size)]).tolist()


@pytest.mark.parametrize("piece_nbytes", [None, 100, 6000])
def test_bcast(comm_world: MPI.Intracomm, engine: HostEngine, piece_nbytes: int | None) -> None:
    rank, size = comm_world.rank, comm_world.size
    dtype = np.dtype([("x", "<f4"), ("n", "u1")])  # what is moved need be nothing NumPy can reduce
    for root, count in itertools.product(range(size), [0, 1, 819, 820, 5000]):
        expected = np.frombuffer(np.random.default_rng(root).bytes(5 * count), dtype)
        buffer = expected.copy() if rank == root else np.zeros(count, dtype)
        if count < 5000 or piece_nbytes != 100:
            engine.run(patterns.bcast(rank, size, dtype, span(buffer), root, piece_nbytes=piece_nbytes), CALL)
            assert buffer.tobytes() == expected.tobytes()


def test_elements_larger_than_a_slot(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    dtype = np.dtype(f"V{2 * SMALL + 3}")
    expected = np.frombuffer(np.random.default_rng(1).bytes(3 * dtype.itemsize), dtype)
    buffer = expected.copy() if comm_world.rank == 0 else np.zeros(3, dtype)
    engine.run(patterns.bcast(comm_world.rank, comm_world.size, dtype, span(buffer), 0), CALL)
    assert buffer.tobytes() == expected.tobytes()


@pytest.mark.parametrize("in_place", [False, True])
def test_scan_and_exscan(comm_world: MPI.Intracomm, engine: HostEngine, in_place: bool) -> None:
    rank, size = comm_world.rank, comm_world.size
    for count in COUNTS:
        parts = parts_of(comm_world, FLOAT32, count, count)
        for pattern, before in ((patterns.scan, rank + 1), (patterns.exscan, rank)):
            send = parts[rank].copy()
            out = send if in_place else np.full(count, -1, np.float32)
            untouched = out.copy()
            engine.run(pattern(rank, size, FLOAT32, span(send), span(out), "sum"), CALL)
            require_same(out, wanted("sum", parts[:before]) if before else untouched)


def test_barrier_holds_until_all_have_come(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    for slow in range(comm_world.size):
        comm_world.Barrier()
        arrived = 0.0
        if comm_world.rank == slow:
            time.sleep(0.05)
            arrived = time.monotonic()  # one clock for all processes of the machine
        engine.barrier(CALL)
        left = time.monotonic()
        assert left >= comm_world.bcast(arrived, slow)


def random_call(comm: MPI.Intracomm, rng: np.random.Generator, largest: int) -> tuple[list[Exchange], list[Any], Any]:
    """A collective drawn from a generator that is in the same state on all ranks.

    Returns its exchanges, the array they fill with what is to be in it, and what must stay alive.
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
            engine.barrier(CALL)


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
    """Whoever runs ahead meanwhile must not see what is not there yet, nor write over what is still read."""
    rng = np.random.default_rng([23, comm_world.rank])

    def napping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if rng.random() < 0.1:
                time.sleep(1e-3)
            return function(*arguments)

        return wrapped

    if moment == "before the flag":
        monkeypatch.setattr(Channels, "post", napping(Channels.post))
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
            engine.barrier(CALL)
            assert out.tolist() == expected.tolist(), f"call {number}"


def test_one_rank_far_ahead_waits_for_slots(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    """The root of a broadcast waits for nothing but slots: it must not write over what a slow rank has yet to read."""
    rank, size = comm_world.rank, comm_world.size
    for number in range(20):
        buffer = np.full(20_000, number if rank == 0 else -1, np.int64)
        if rank == size - 1:
            time.sleep(0.002)
        engine.run(patterns.bcast(rank, size, buffer.dtype, span(buffer), 0), CALL)
        assert (buffer == number).all()


def different_calls(comm: MPI.Intracomm, engine: HostEngine) -> Callable[[], None]:
    rank, size = comm.rank, comm.size
    a, b = np.ones(100, np.float32), np.ones(100, np.float32)
    if rank == size - 1:
        return lambda: engine.run(
            patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "max"),
            Signature("Allreduce", "float32", 100, "max"),
        )
    return lambda: engine.run(
        patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "sum"), Signature("Allreduce", "float32", 100, "sum")
    )


def test_ranks_that_call_different_things_all_say_who_called_what(comm_world: MPI.Intracomm) -> None:
    if comm_world.size == 1:
        pytest.skip("needs two ranks")
    size = comm_world.size
    with engine_of(comm_world) as (engine, _, _):
        engine.barrier(CALL)
        start = time.monotonic()
        with raises_everywhere(comm_world, PeerError, match="ranks called different things") as raised:
            different_calls(comm_world, engine)()
        assert time.monotonic() - start < 10
        text = str(raised.value)
        assert f"rank {size - 1}: Allreduce(float32, count=100, op=max)" in text
        assert f"rank {max(size - 2, 0)}: " in text
        assert raised.value.ranks == tuple(range(size))
        with raises_everywhere(comm_world, PeerError, match="unusable since an earlier error.*different things"):
            engine.barrier(CALL)
        assert isinstance(engine.broken, PeerError)


def test_a_rank_with_nothing_to_wait_for_learns_it_at_its_next_call(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    if size == 1:
        pytest.skip("needs two ranks")
    with engine_of(comm_world) as (engine, _, _):
        buffer = np.zeros(10, np.float32)
        root = patterns.bcast(rank, size, FLOAT32, span(buffer), 0)
        if rank == 0:
            engine.run(root, Signature("Bcast", "float32", 10, root=0))
        comm_world.Barrier()
        with raises_everywhere(comm_world, PeerError, match="Bcast.*root=1"):
            if rank == 0:
                while engine.broken is None:
                    time.sleep(1e-3)
                # It has not raised here yet, so here too the error is told, not that there was one.
                engine.run(root, Signature("Bcast", "float32", 10, root=0))
            else:
                engine.run(patterns.bcast(rank, size, FLOAT32, span(buffer), 0), Signature("Bcast", "f", 10, root=1))


def test_ranks_that_disagree_on_counts_say_so(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    if size == 1:
        pytest.skip("needs two ranks")
    with engine_of(comm_world) as (engine, _, _):
        buffer = np.zeros(1000, np.float32)
        counts = [10] * size
        if rank == size - 1:
            counts[0] = 11  # rank 0 sends 10
        send = span(buffer[:10])
        with raises_everywhere(comm_world, PeerError, match=f"rank 0 sends 40 bytes where rank {size - 1} expects 44"):
            engine.run(patterns.allgather(rank, size, FLOAT32, send, spans(buffer, counts)), CALL)
            engine.barrier(CALL)


@pytest.mark.parametrize("what", ["run", "barrier"])
@pytest.mark.parametrize("missing", ["first", "last"])
def test_a_rank_that_does_not_come_is_named(comm_world: MPI.Intracomm, missing: str, what: str) -> None:
    rank, size = comm_world.rank, comm_world.size
    if size == 1:
        pytest.skip("needs two ranks")
    absent = 0 if missing == "first" else size - 1
    with engine_of(comm_world, timeout_s=1.0) as (engine, _, _):
        engine.barrier(CALL)
        comm_world.Barrier()
        start = time.monotonic()
        if rank == absent:
            time.sleep(2.5)
        a, b = np.ones(3000, np.float32), np.zeros(3000, np.float32)
        with raises_everywhere(
            comm_world, CollectiveTimeoutError, match=rf"^Test\(any\): rank {absent} did not"
        ) as info:
            if what == "run":
                engine.run(patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "sum"), CALL)
            else:
                engine.barrier(CALL)
        assert info.value.ranks == (absent,)
        assert time.monotonic() - start < 8
        begun = time.monotonic()
        with raises_everywhere(comm_world, CollectiveTimeoutError, match="unusable since an earlier error"):
            engine.barrier(CALL)
        assert time.monotonic() - begun < 0.5


def test_the_missing_rank_is_named_and_not_who_waits_for_it(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    if size < 3:
        pytest.skip("needs three ranks")
    with engine_of(comm_world, timeout_s=1.0) as (engine, _, _):
        buffer = np.zeros(10, np.float32)
        chain = []
        for source in reversed(range(1, size)):  # the last rank to the one before, that to the one before it, ...
            sends = tuple(span(buffer) if rank == source and peer == source - 1 else None for peer in range(size))
            receives = tuple(span(buffer) if rank == source - 1 and peer == source else None for peer in range(size))
            chain.append(Exchange(FLOAT32, sends, receives))
        comm_world.Barrier()
        # Rank 0 begins to wait first, and so it gives up first.
        time.sleep(2.5 if rank == size - 1 else 0.2 * rank)
        with raises_everywhere(
            comm_world, CollectiveTimeoutError, match=f": rank {size - 1} did not arrive within 1 s"
        ):
            engine.run(chain, CALL)


def test_ranks_that_give_up_at_once_give_the_same_verdict(comm_world: MPI.Intracomm) -> None:
    rank, size, rounds = comm_world.rank, comm_world.size, 200
    node = Group(comm_world, range(size), 20.0, tag=79)
    backend = HostBackend(20.0)
    nbytes = Verdict.nbytes(size)
    segments = share(node, backend, "verdicts", lambda: backend.allocate("memfd", rounds * nbytes), lambda: None)
    memory = backend.view(segments[0], (rounds * nbytes,), np.dtype(np.uint8)).data
    rng = np.random.default_rng(rank)
    for number in range(rounds):
        verdict = Verdict(node, memory[number * nbytes : (number + 1) * nbytes])
        assert not verdict.there() and verdict.read() is None
        comm_world.Barrier()
        if rng.random() < 0.5:
            time.sleep(1e-5 * rng.random())
        mine = (PeerError if rank % 2 else CollectiveTimeoutError)(f"{number} by {rank} " + "x" * 200, ranks=[rank])
        given = verdict.give(mine)
        told = verdict.read()
        assert told is not None and verdict.there()
        texts = comm_world.allgather([(type(error).__name__, str(error), error.ranks) for error in (given, told)])
        assert len(set(itertools.chain(*texts))) == 1, texts
        verdict.close()
        assert not verdict.there()
    del memory
    segments.close("verdicts")


def test_a_verdict_that_is_too_long_is_cut(comm_world: MPI.Intracomm) -> None:
    node = Group(MPI.COMM_SELF, [0], 20.0, tag=80)
    verdict = Verdict(node, memoryview(bytearray(Verdict.nbytes(1))))
    given = verdict.give(PeerError("ä" * 10_000, ranks=[3]))
    told = verdict.read()
    assert told is not None and str(told) == str(given) and str(told).startswith("ä" * 100)
    assert told.ranks == (3,)


def test_ranks_wait_as_long_as_something_comes(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    with engine_of(comm_world, timeout_s=1.0) as (engine, _, _):
        buffer = np.zeros(10, np.float32)
        for _ in range(4):
            if rank == 0:
                time.sleep(0.5)
            engine.run(patterns.bcast(rank, size, FLOAT32, span(buffer), 0), CALL)


def test_a_rank_that_is_interrupted_takes_the_others_with_it(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size = comm_world.rank, comm_world.size
    if size == 1:
        pytest.skip("needs two ranks")
    with engine_of(comm_world) as (engine, _, _):
        a, b = np.ones(30_000, np.float32), np.zeros(30_000, np.float32)
        steps = patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "sum")
        start = time.monotonic()
        if rank == 1:

            def interrupt(*arguments: object) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(Channels, "release", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.run(steps, CALL)
        else:
            with pytest.raises(PeerError, match="rank 1 left in the middle: KeyboardInterrupt"):
                engine.run(steps, CALL)
        assert time.monotonic() - start < 10  # of the 20 that they would wait


def test_an_undefined_reduction_is_refused_before_anything_is_sent(
    comm_world: MPI.Intracomm, engine: HostEngine
) -> None:
    rank, size = comm_world.rank, comm_world.size
    a, b = np.ones(3, np.float32), np.zeros(3, np.float32)
    with raises_everywhere(comm_world, InvalidUsageError, match="op='band' is not defined on float32"):
        engine.run(patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "band"), CALL)
    engine.run(patterns.allreduce(rank, size, FLOAT32, span(a), span(b), "sum"), CALL)
    assert b.tolist() == [size] * 3


def test_messages_beyond_any_pattern(comm_world: MPI.Intracomm, engine: HostEngine) -> None:
    """An exchange may reduce from some ranks and keep what comes from others, and leave this rank out."""
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


def test_real_slots(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    private = comm_world.Dup()
    node = Group(private, range(size), 20.0)
    board = Board(node)
    engine = HostEngine(node, board)
    count = 3_000_001
    parts = [np.random.default_rng(peer).integers(0, 1000, count).astype(np.int32) for peer in range(size)]
    out = np.zeros(count, np.int32)
    steps = patterns.allreduce(rank, size, out.dtype, span(parts[rank]), span(out), "sum", piece_nbytes=size << 20)
    engine.run(steps, CALL)
    np.testing.assert_array_equal(out, np.sum(parts, 0, dtype=np.int32))
    for part in (engine, board):
        part.close_peers()
        comm_world.Barrier()
        part.close_own()
    private.Free()


def test_closing_gives_everything_back(comm_world: MPI.Intracomm) -> None:
    with engine_of(comm_world):
        pass  # what MPI itself opens at first
    comm_world.Barrier()
    with nothing_leaks():
        with engine_of(comm_world) as (engine, board, _):
            a = np.ones(3000, np.float32)
            at = (comm_world.rank, comm_world.size, FLOAT32)
            engine.run(patterns.allreduce(*at, span(a), span(a), "sum"), CALL)
        with pytest.raises(InvalidUsageError, match="Test: the communicator was freed"):
            engine.run([], CALL)
        with pytest.raises(InvalidUsageError, match="freed"):
            board.post("x")
        assert engine.broken is None


def test_ranks_must_ask_for_the_same_slots(comm_world: MPI.Intracomm) -> None:
    if comm_world.size == 1:
        pytest.skip("needs two ranks")
    node = Group(comm_world, range(comm_world.size), 20.0, tag=77)
    board = Board(node)
    with raises_everywhere(comm_world, InvalidUsageError, match="host arena: the ranks differ"):
        HostEngine(node, board, slots=2 + 2 * comm_world.size + comm_world.rank)
    board.close_peers()
    comm_world.Barrier()
    board.close_own()


def test_board(comm_world: MPI.Intracomm) -> None:
    rank, size = comm_world.rank, comm_world.size
    node = Group(comm_world, range(size), 20.0, tag=78)
    board = Board(node)
    assert board.read() == ["nothing yet"] * size and board.behind() == []
    comm_world.Barrier()
    board.post(f"first of {rank}")
    comm_world.Barrier()
    assert board.read() == [f"first of {peer}" for peer in range(size)]
    comm_world.Barrier()
    if rank == 0:
        board.post("ä" * 300)
        board.post("ä" * 300)
        assert board.behind() == list(range(1, size))
        assert board.read()[0] == "ä" * 124
    comm_world.Barrier()
    # One rank writes all the time, the others never see half a text.
    texts = [letter * length for letter, length in (("a", 200), ("b", 30), ("c", 248))]
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        if rank == 0:
            for text in texts:
                board.post(text)
            time.sleep(1e-5)
        else:
            assert board.read()[0] in [*texts, "ä" * 124]
    board.close_peers()
    comm_world.Barrier()
    board.close_own()
