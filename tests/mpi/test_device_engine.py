from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives import patterns
from mpicomm.collectives.board import Board
from mpicomm.collectives.exchange import Exchange, Span
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.reductions import REDUCTIONS
from tests.helpers.communicators import communicator
from tests.helpers.compiling import compile_kernels
from tests.helpers.raising import raises_everywhere
from tests.helpers.reductions import dtype_named, reduced, require_same, samples

Array = npt.NDArray[Any]

SIZES = (1, 3, 4097, 1000003)
OFFSETS = (0, 16, 4, 1, 2, 8)
SUM = Signature("Allreduce", "int64", 4097, "sum")


class Memory:
    """Elements on the GPU, at any address."""

    def __init__(self, content: Array, offset: int = 0) -> None:
        import cupy

        self.dtype = content.dtype
        self.count = content.size
        self._bytes = cupy.zeros(offset + content.nbytes + 32, np.uint8)[offset : offset + content.nbytes]
        self._bytes.set(np.ascontiguousarray(content).reshape(-1).view(np.uint8))
        cupy.cuda.get_current_stream().synchronize()  # the engine works on a stream that waits for no other
        self.span = Span(int(self._bytes.data.ptr), content.size)

    def get(self) -> Array:
        return np.asarray(self._bytes.get()).view(self.dtype)


class Rig:
    """An engine on a communicator, with a stream."""

    def __init__(self, comm: mpicomm.Communicator) -> None:
        import cupy

        from mpicomm.backend.cuda import CudaBackend
        from mpicomm.collectives.device_engine import DeviceEngine

        domain = comm._set_up("test")
        assert isinstance(domain.backend, CudaBackend)
        self.backend = domain.backend
        self.comm = comm
        self.node = domain.node
        self.rank, self.size = self.node.rank, self.node.size
        self._board = Board(domain.node)
        self.engine = DeviceEngine(domain.node, domain.backend, domain.kind, self._board)
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def run(self, exchanges: Sequence[Exchange], signature: Signature = SUM, stream: Any = None) -> None:
        self.engine.enqueue(self.engine.prepare(exchanges, signature), (stream or self.stream).ptr)

    def finish(self) -> None:
        self.backend.synchronize()
        self.backend.check()

    def close(self) -> None:
        self.backend.synchronize()
        for each in (self.engine, self._board):
            each.close_peers()
        MPI.COMM_WORLD.Barrier()
        for each in (self.engine, self._board):
            each.close_own()


@contextlib.contextmanager
def rig_of(comm: mpicomm.Communicator) -> Iterator[Rig]:
    import cupy

    with cupy.cuda.Device(comm.device):
        rig = Rig(comm)
        if rig.size < comm.size:
            pytest.skip("the ranks are not on one node")
        yield rig
        rig.close()


@pytest.fixture
def rig(device: str) -> Iterator[Rig]:
    if device == "cpu":
        pytest.skip("the engine of GPUs")
    comm = communicator(device)
    with rig_of(comm) as rig:
        yield rig
    comm.Free()


def contributions(rig: Rig, dtype: np.dtype[Any], count: int, *seed: int) -> list[Array]:
    """What each rank contributes; all ranks know it all."""
    return [samples(dtype, count, np.random.default_rng([*seed, rank])) for rank in range(rig.size)]


def allreduce(
    rig: Rig, parts: Sequence[Array], op: str, offset: int, *, in_place: bool, two_shot: bool
) -> Callable[[], None]:
    """Enqueue it, and return the check."""
    source = Memory(parts[rig.rank], offset)
    target = source if in_place else Memory(np.zeros_like(parts[0]), OFFSETS[(OFFSETS.index(offset) + 1) % 6])
    piece_nbytes = max(1, parts[0].nbytes) if two_shot else None
    exchanges = patterns.allreduce(
        rig.rank, rig.size, source.dtype, source.span, target.span, op, piece_nbytes=piece_nbytes
    )
    rig.run(exchanges, Signature("Allreduce", source.dtype.name, source.count, op))

    def check() -> None:
        require_same(target.get(), reduced(op, parts) if rig.size > 1 else parts[0])
        source.get()  # not freed, and its memory not used for something else, until here

    return check


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_operation_on_every_type(rig: Rig, name: str) -> None:
    try:
        dtype = dtype_named(name)
    except ImportError:
        pytest.skip("there is no ml_dtypes")
    capability = rig.backend.info.compute_capability
    compile_kernels(capability, [(name, op) for op in REDUCTIONS[name]], MPI.COMM_WORLD)
    checks = []
    for number, (op, count) in enumerate(itertools.product(REDUCTIONS[name], (3, 4097, 100001))):
        parts = contributions(rig, dtype, count, number)
        offset = (0, dtype.itemsize % 16, 1)[number % 3]
        checks.append(
            allreduce(rig, parts, op, offset, in_place=number % 2 == 0, two_shot=number % 4 > 1)
            if offset in OFFSETS
            else lambda: None
        )
    rig.finish()
    for check in checks:
        check()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_allreduce_of_any_size_anywhere(rig: Rig, count: int, offset: int) -> None:
    checks = []
    for number, (in_place, two_shot) in enumerate(itertools.product((False, True), repeat=2)):
        parts = contributions(rig, np.dtype(np.float32), count, number)
        checks.append(allreduce(rig, parts, "sum", offset, in_place=in_place, two_shot=two_shot))
    rig.finish()
    for check in checks:
        check()


@pytest.mark.parametrize("seed", range(6))
def test_alltoallv_of_odd_and_zero_counts(rig: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(("u1", "i2", "f4", "f8", "c16", "V3")[seed])
    choices = (0, 0, 1, 3, 4097, 70001, 300007)
    for _ in range(3):
        counts = rng.choice(choices, (rig.size, rig.size))  # [from][to]
        data = [
            [np.frombuffer(rng.bytes(int(counts[a, b]) * dtype.itemsize), dtype) for b in range(rig.size)]
            for a in range(rig.size)
        ]
        sends = [Memory(data[rig.rank][to], OFFSETS[to % 6]) for to in range(rig.size)]
        receives = [Memory(np.zeros_like(data[frm][rig.rank]), OFFSETS[(frm + 3) % 6]) for frm in range(rig.size)]
        exchanges = patterns.alltoall(
            rig.rank, rig.size, dtype, [each.span for each in sends], [each.span for each in receives]
        )
        rig.run(exchanges, Signature("Alltoallv", dtype.name))
        rig.finish()
        for frm, received in enumerate(receives):
            assert received.get().tobytes() == data[frm][rig.rank].tobytes()


@pytest.mark.parametrize("count", SIZES)
def test_the_other_patterns(rig: Rig, count: int) -> None:
    dtype = np.dtype(np.int32)
    rank, size, root = rig.rank, rig.size, rig.size - 1
    parts = contributions(rig, dtype, count, 7)

    def signature(name: str, op: str | None = None) -> Signature:
        return Signature(name, "int32", count, op)

    def room(count: int = count) -> Memory:
        return Memory(np.zeros(count, dtype), 4)

    buffers = [Memory(parts[rank], 8) for _ in range(2)]
    rig.run(patterns.bcast(rank, size, dtype, buffers[0].span, root), signature("Bcast"))
    rig.run(patterns.bcast(rank, size, dtype, buffers[1].span, root, piece_nbytes=100000), signature("Bcast"))

    source, gathered, everything = Memory(parts[rank]), room(size * count), room(size * count)
    blocks = [Span(gathered.span.pointer + r * count * 4, count) for r in range(size)]
    rig.run(patterns.gather(rank, size, dtype, source.span, blocks, root), signature("Gather"))
    blocks = [Span(everything.span.pointer + r * count * 4, count) for r in range(size)]
    rig.run(patterns.allgather(rank, size, dtype, source.span, blocks), signature("Allgather"))
    in_place = Memory(np.concatenate([part if r == rank else 0 * part for r, part in enumerate(parts)]))
    blocks = [Span(in_place.span.pointer + r * count * 4, count) for r in range(size)]
    rig.run(patterns.allgather(rank, size, dtype, blocks[rank], blocks), signature("Allgather"))

    scattered = room()
    blocks = [Span(everything.span.pointer + r * count * 4, count) for r in range(size)]
    rig.run(patterns.scatter(rank, size, dtype, blocks, scattered.span, root), signature("Scatter"))

    scanned, before, result = Memory(parts[rank]), Memory(np.full(count, -1, dtype)), room()
    rig.run(patterns.scan(rank, size, dtype, scanned.span, scanned.span, "sum"), signature("Scan", "sum"))
    rig.run(patterns.exscan(rank, size, dtype, source.span, before.span, "sum"), signature("Exscan", "sum"))
    rig.run(patterns.reduce(rank, size, dtype, source.span, result.span, "max", root), signature("Reduce", "max"))
    rig.finish()

    for buffer in buffers:
        require_same(buffer.get(), parts[root])
    require_same(gathered.get(), np.concatenate(parts) if rank == root else np.zeros(size * count, dtype))
    for memory in (everything, in_place):
        require_same(memory.get(), np.concatenate(parts))
    require_same(scattered.get(), parts[rank])
    require_same(scanned.get(), reduced("sum", parts[: rank + 1]))
    require_same(before.get(), reduced("sum", parts[:rank]) if rank else np.full(count, -1, dtype))
    require_same(result.get(), reduced("max", parts) if rank == root else np.zeros(count, dtype))


@pytest.mark.parametrize("largest", [5, 30011])
def test_reduce_scatter_in_place_leaves_the_rest_alone(rig: Rig, largest: int) -> None:
    dtype = np.dtype(np.float64)
    counts = [3 + (largest if rank == rig.size - 1 else 0) for rank in range(rig.size)]
    parts = contributions(rig, dtype, sum(counts), 3)
    memory = Memory(parts[rig.rank])
    starts = [0, *itertools.accumulate(counts)]
    blocks = [Span(memory.span.pointer + 8 * start, count) for start, count in zip(starts[:-1], counts, strict=True)]
    output = Span(memory.span.pointer, counts[rig.rank])
    scratch = Memory(np.zeros(counts[rig.rank]))
    steps = patterns.reduce_scatter(rig.rank, rig.size, dtype, blocks, output, "sum", scratch=scratch.span)
    rig.run(steps, Signature("Reduce_scatter", "f8", op="sum"))
    rig.finish()
    expected = reduced("sum", parts)[starts[rig.rank] : starts[rig.rank + 1]]
    require_same(memory.get()[: counts[rig.rank]], expected)
    require_same(memory.get()[counts[rig.rank] :], parts[rig.rank][counts[rig.rank] :])


def in_place_sum(rig: Rig, memory: Memory, *, two_shot: bool) -> list[Exchange]:
    piece = memory.count * 8 if two_shot else None
    return patterns.allreduce(rig.rank, rig.size, memory.dtype, memory.span, memory.span, "sum", piece_nbytes=piece)


def summed(rig: Rig, parts: Sequence[Array], times: int) -> Array:
    """What is there after so many sums in place, modulo 2**64."""
    total = reduced("sum", [part.view(np.uint64) for part in parts])
    result: Array = (total * np.uint64(pow(rig.size, times - 1, 1 << 64))).view(np.int64)
    return result


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_graph_whose_capture_is_the_first_use(rig: Rig, two_shot: bool) -> None:
    import cupy

    parts = contributions(rig, np.dtype(np.int64), 4097, 11)
    memory = Memory(parts[rig.rank])
    rig.stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    rig.run(in_place_sum(rig, memory, two_shot=two_shot))
    graph = rig.stream.end_capture()
    for _ in range(1000):
        graph.launch(rig.stream)
    rig.run(in_place_sum(rig, memory, two_shot=two_shot))
    rig.finish()
    require_same(memory.get(), summed(rig, parts, 1001))


def test_two_streams_take_turns(rig: Rig) -> None:
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    parts = contributions(rig, np.dtype(np.int64), 50001, 12)
    memory = Memory(parts[rig.rank])
    for number in range(100):
        rig.run(in_place_sum(rig, memory, two_shot=True), stream=(rig.stream, other)[number % 2])
    rig.finish()
    require_same(memory.get(), summed(rig, parts, 100))


def test_two_streams_of_one_capture_take_turns(rig: Rig) -> None:
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    parts = contributions(rig, np.dtype(np.int64), 50001, 13)
    memory = Memory(parts[rig.rank])
    rig.run(in_place_sum(rig, memory, two_shot=False), stream=other)
    other.synchronize()
    rig.stream.begin_capture()
    fork, join = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
    rig.run(in_place_sum(rig, memory, two_shot=True))
    fork.record(rig.stream)
    other.wait_event(fork)
    for number in range(4):
        rig.run(in_place_sum(rig, memory, two_shot=True), stream=(other, rig.stream)[number % 2])
    join.record(other)
    rig.stream.wait_event(join)
    graph = rig.stream.end_capture()
    for _ in range(10):
        graph.launch(rig.stream)
    rig.stream.synchronize()
    rig.run(in_place_sum(rig, memory, two_shot=False), stream=other)
    rig.finish()
    require_same(memory.get(), summed(rig, parts, 52))


def test_many_calls_of_changing_sizes(rig: Rig) -> None:
    rng = np.random.default_rng(14)
    checks = []
    for number in range(60):
        parts = contributions(rig, np.dtype(np.int32), int(rng.integers(1, 200000)), number)
        checks.append(allreduce(rig, parts, "sum", 0, in_place=bool(number % 2), two_shot=number % 3 == 0))
    rig.finish()
    for check in checks:
        check()


@pytest.fixture
def device_name(device: str) -> str:
    if device == "cpu" or MPI.COMM_WORLD.size == 1:
        pytest.skip("several ranks with GPUs are needed")
    return device


def test_different_calls_are_an_error_on_all_ranks(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=20)
    with rig_of(comm) as rig:
        memory = Memory(np.ones(4097, np.int64))
        name = "Allreduce" if rig.rank == 0 else "Allgather"
        start = time.monotonic()
        rig.run(in_place_sum(rig, memory, two_shot=False), Signature(name, "int64", 4097, "sum"))
        rig.backend.synchronize()
        assert time.monotonic() - start < 10
        with pytest.raises(mpicomm.PeerError, match=r"called different things: rank 0: Allreduce.*rank 1: Allgather"):
            rig.backend.check()
    comm.Free()


def test_different_counts_are_an_error_on_all_ranks(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=20)
    with rig_of(comm) as rig:
        count = 100 if rig.rank == 0 else 300000
        rig.run(
            in_place_sum(rig, Memory(np.ones(count, np.int64)), two_shot=False),
            Signature("Allreduce", "int64", count, "sum"),
        )
        rig.backend.synchronize()
        with pytest.raises(mpicomm.PeerError, match=r"rank 0: .*count=100, .*rank 1: .*count=300000"):
            rig.backend.check()
    comm.Free()


def test_a_rank_that_does_not_come_is_named(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=1.0)
    late = MPI.COMM_WORLD.size - 1
    with rig_of(comm) as rig:
        memory = Memory(np.ones(1000003, np.int64))
        rig.run(in_place_sum(rig, memory, two_shot=True))
        rig.finish()
        MPI.COMM_WORLD.Barrier()
        start = time.monotonic()
        if rig.rank != late:
            rig.run(in_place_sum(rig, memory, two_shot=True))
            rig.backend.synchronize()
            assert time.monotonic() - start < 4
        MPI.COMM_WORLD.Barrier()
        if rig.rank == late:  # it learns at once that the others have given up
            rig.run(in_place_sum(rig, memory, two_shot=True))
            rig.backend.synchronize()
        with raises_naming(late):
            rig.backend.check()
        # The device is free for others.
        start = time.monotonic()
        memory.get()
        assert time.monotonic() - start < 1
    comm.Free()


def test_a_rank_whose_signal_did_not_come_tells_the_others(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=20)
    with rig_of(comm) as rig:
        memory = Memory(np.ones(1000, np.int64))
        words = Memory(np.zeros(2, np.uint64))
        if rig.rank == 0:
            rig.backend.timeout_ns = 300_000_000
            rig.backend.wait_signal(words.span.pointer, words.span.pointer + 8, 0, rig.stream.ptr)
        start = time.monotonic()
        rig.run(in_place_sum(rig, memory, two_shot=False))
        rig.backend.synchronize()
        assert time.monotonic() - start < 5
        with raises_naming(0):
            rig.backend.check()
        words.get()
    comm.Free()


@contextlib.contextmanager
def raises_naming(late: int) -> Iterator[None]:
    with pytest.raises(mpicomm.CollectiveTimeoutError, match=f"from rank {late} did not come") as info:
        yield
    assert info.value.ranks == (late,)


def test_a_reduction_that_does_not_exist_is_refused_before_anything_runs(rig: Rig) -> None:
    memory = Memory(np.ones(4, np.float32))
    exchanges = patterns.allreduce(rig.rank, rig.size, memory.dtype, memory.span, memory.span, "band")
    if rig.size > 1:
        with raises_everywhere(MPI.COMM_WORLD, mpicomm.InvalidUsageError, match="not defined for float32"):
            rig.run(exchanges, Signature("Allreduce", "float32", 4, "band"))
    rig.finish()
