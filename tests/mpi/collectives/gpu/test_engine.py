from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.reductions import REDUCTIONS
from mpicomm.mpi.arguments import Span
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs import launch_numbers, patterns
from tests.helpers.references.reductions import dtype_named, reduced, require_same
from tests.helpers.rigs.communicators import communicator
from tests.helpers.rigs.compiling import compile_kernels
from tests.helpers.rigs.device_engines import Array, Memory, Rig, contributions, in_place_sum, rig_of

SIZES = (1, 3, 4097, 1000003)
OFFSETS = (0, 16, 4, 1, 2, 8)


@pytest.fixture
def rig(device: str) -> Iterator[Rig]:
    if device == "cpu":
        pytest.skip("the engine of GPUs")
    comm = communicator(device)
    with rig_of(comm) as rig:
        yield rig
    comm.Free()


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
    choices = (0, 0, 1, 3, 4097, 70001, 300007, 1_400_003)
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


def test_more_long_messages_go_one_way(rig: Rig) -> None:
    """Longer than the inboxes, in packets, and too long for packets."""
    dtype, rank, size = np.dtype(np.int32), rig.rank, rig.size
    lengths = (5, 3_000_001, 5_000_003, 9_000_007, 13_000_001)
    for call in range(3):
        counts = [[lengths[(2 * a + b + call) % 5] for b in range(size)] for a in range(size)]  # [from][to]
        sends = [Memory(np.arange(rank + to, rank + to + counts[rank][to], dtype=dtype)) for to in range(size)]
        receives = [Memory(np.zeros(counts[frm][rank], dtype)) for frm in range(size)]
        sent, taken = ([each.span for each in memories] for memories in (sends, receives))
        rig.run(patterns.alltoall(rank, size, dtype, sent, taken), Signature("Alltoallv", "int32"))
        shares = counts[0]
        starts = [0, *itertools.accumulate(shares)]
        source = Memory(np.arange(starts[-1], dtype=dtype))
        blocks = patterns.blocks(source.span.pointer, shares, starts[:-1], 4)
        result = Memory(np.zeros(shares[rank], dtype))
        exchanges = patterns.reduce_scatter(rank, size, dtype, blocks, result.span, "sum")
        rig.run(exchanges, Signature("Reduce_scatter", "int32", starts[-1], "sum"))
        whole = Memory(np.zeros(starts[-1], dtype))
        blocks = patterns.blocks(whole.span.pointer, shares, starts[:-1], 4)
        rig.run(patterns.allgather(rank, size, dtype, result.span, blocks), Signature("Allgatherv", "int32"))
        rig.finish()
        for frm, received in enumerate(receives):
            require_same(received.get(), np.arange(frm + rank, frm + rank + counts[frm][rank], dtype=dtype))
        require_same(whole.get(), size * source.get())


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
def test_reduce_scatter_in_place_changes_only_the_result(rig: Rig, largest: int) -> None:
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


def summed(rig: Rig, parts: Sequence[Array], times: int) -> Array:
    """The values after so many sums in place, modulo 2**64."""
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


def begin_after_with_old_flags(rig: Rig, launch: int) -> None:
    """Let it be the last launch, and let the inboxes of packets with flags hold the flags of earlier launches."""
    import cupy

    arena = rig.engine._arena
    layout = arena.layout
    memory = cupy.cuda.UnownedMemory(arena.pointers[rig.rank], layout.nbytes, arena)
    head_and_flags = cupy.ndarray((layout.sentinels,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
    content = head_and_flags.get()
    launch_numbers.begin_after(launch, content, rig.size)
    flagged = content[layout.flagged :]
    flagged[:] = launch_numbers.old_flags(flagged.nbytes, np.random.default_rng(launch)).view(np.uint8)
    head_and_flags.set(content)
    rig.finish()
    MPI.COMM_WORLD.Barrier()


@pytest.mark.parametrize("barriers", [0, 4])
@pytest.mark.parametrize("launch", [2**30 - 2, 2**32 - 2])
def test_old_flags_are_not_taken_for_new_when_numbers_of_launches_come_again(
    rig: Rig, launch: int, barriers: int
) -> None:
    begin_after_with_old_flags(rig, launch)
    for _ in range(barriers):
        rig.engine.enqueue(rig.engine.prepare_barrier(), rig.stream.ptr)
    checks = []
    for number in range(110):
        parts = contributions(rig, np.dtype(np.int32), 1 + 7 * number, number)
        checks.append(allreduce(rig, parts, "sum", 0, in_place=False, two_shot=False))
    rig.finish()
    for check in checks:
        check()


def test_a_reduction_that_does_not_exist_is_refused_before_anything_runs(rig: Rig) -> None:
    memory = Memory(np.ones(4, np.float32))
    exchanges = patterns.allreduce(rig.rank, rig.size, memory.dtype, memory.span, memory.span, "band")
    if rig.size > 1:
        with raises_everywhere(MPI.COMM_WORLD, mpicomm.InvalidUsageError, match="not defined for float32"):
            rig.run(exchanges, Signature("Allreduce", "float32", 4, "band"))
    rig.finish()
