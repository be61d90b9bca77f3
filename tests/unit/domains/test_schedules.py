"""Schedules over several peer domains, on arrays: every collective, any domains, order and rounding of reductions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.collectives import operations as table
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.patterns import Buffers
from mpicomm.domains import schedules
from mpicomm.domains.schedules import schedule_of
from mpicomm.domains.steps import DomainLayout
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs.patterns import buffers_of
from tests.helpers.references.schedule_simulator import Cluster

Array = npt.NDArray[Any]
F32 = np.dtype(np.float32)
LAYOUTS = (
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0], [1]],
    [[0], [1], [2]],
    [[0, 1, 2], [3]],
    [[1, 4], [0, 2, 3, 5, 6], [7, 8, 9]],
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
)
REDUCING = ("Allreduce", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan")
MOVING = ("Bcast", "Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Gather", "Gatherv", "Scatter", "Scatterv")
DTYPES = (F32, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.int32), np.dtype(np.complex64))


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Values for which the order and the rounding of a sum show."""
    rng = np.random.default_rng(rank + 1)
    wide = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)
    if dtype.kind == "i":
        wide = rng.integers(-(1 << 30), 1 << 30, count)
    result: Array = wide.astype(dtype)
    return result


def in_order(parts: Sequence[Array], op: str, dtype: np.dtype[Any]) -> Array:
    """The reduction of arrays in their order."""
    out: Array = np.empty(parts[0].size, dtype)
    Reducer(op, dtype).reduce([part.astype(dtype) for part in parts], out)
    return out


def expected(parts: Sequence[Array], domains: Sequence[Sequence[int]], op: str) -> Array:
    """Reduce each domain in the order of its ranks, then the domains in their order; round once."""
    dtype = parts[0].dtype
    wide = F32 if dtype.itemsize < 4 and op in ("sum", "prod", "avg") else dtype
    inner = "sum" if op == "avg" else op
    total = in_order([in_order([parts[rank] for rank in ranks], inner, wide) for ranks in domains], inner, wide)
    if op == "avg":
        total = total / wide.type(len(parts))
    return total.astype(dtype)


@st.composite
def domains_of_ranks(draw: st.DrawFn) -> list[list[int]]:
    """The ranks of each domain; the domains follow each other by their first ranks."""
    if draw(st.booleans()):
        return draw(st.sampled_from(LAYOUTS))
    numbers = draw(st.lists(st.integers(0, 3), min_size=2, max_size=9).filter(lambda drawn: len({*drawn}) > 1))
    return [[rank for rank, other in enumerate(numbers) if other == number] for number in dict.fromkeys(numbers)]


@contextlib.contextmanager
def in_pieces_of(nbytes: int) -> Iterator[None]:
    """Let long calls go in pieces of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "PIECE_NBYTES", nbytes)
        patch.setattr(schedules, "MIN_PIECE_NBYTES", min(schedules.MIN_PIECE_NBYTES, nbytes // 16))
        yield


ALGORITHMS = st.sampled_from(("one_shot", "two_shot"))
PIECES = st.sampled_from((schedules.PIECE_NBYTES, 8 << 10, 256))
COUNTS = st.sampled_from((0, 1, 19, 37, 300, 333)) | st.integers(0, 60)


@pytest.mark.parametrize("name", REDUCING)
@settings(max_examples=60)
@given(domains_of_ranks(), st.sampled_from(DTYPES), ALGORITHMS, PIECES, COUNTS, st.data())
def test_reductions_keep_the_order_of_ranks_and_domains_and_round_once(
    name: str,
    domains: list[list[int]],
    dtype: np.dtype[Any],
    algorithm: str,
    piece_nbytes: int,
    count: int,
    data: st.DataObject,
) -> None:
    op = data.draw(st.sampled_from(("sum", "prod") if dtype.kind in "ic" else ("sum", "avg", "max")))
    in_place = name not in ("Reduce_scatter", "Scan", "Exscan") and data.draw(st.booleans())
    operation, cluster = table.OPERATIONS[name], Cluster(domains)
    size, root = len(cluster.layouts), len(cluster.layouts) // 2
    counts = [count] * size
    if operation.send == "by_recvcounts":
        counts = [(count + 3 * rank) % 17 for rank in range(size)]
    total = sum(counts) if operation.send in ("by_recvcounts", "blocks") else count
    inputs = [values(rank, total, dtype) for rank in range(size)]
    outputs: list[Span | None] = []

    def buffers(rank: int) -> Buffers:
        memory = cluster.memories[rank]
        send = memory.place(inputs[rank]).pointer
        receive = send if in_place else memory.place(np.zeros(counts[rank], dtype)).pointer
        made = buffers_of(operation, rank, counts, dtype, send, receive, op=op, root=root, in_place=in_place)
        outputs.append(made.receives[0] if made.receives else None)
        return made

    nbytes = total * dtype.itemsize
    with in_pieces_of(piece_nbytes):
        cluster.run(schedule_of(operation, nbytes, cluster.layouts[0], algorithm), buffers)
    starts = np.cumsum([0, *counts])
    for rank, output in enumerate(outputs):
        if output is None or (name == "Exscan" and rank == 0):
            continue
        if name in ("Scan", "Exscan"):
            parts = inputs[: rank + (name == "Scan")]
            want = in_order(parts, op, dtype)
        else:
            want = expected(inputs, domains, op)
            if operation.send in ("by_recvcounts", "blocks"):
                want = want[starts[rank] : starts[rank + 1]]
        got = cluster.memories[rank].view(output.pointer, output.count, dtype)
        assert got.tobytes() == want.tobytes(), (rank, got, want)


@pytest.mark.parametrize("name", MOVING)
@settings(max_examples=25)
@given(domains_of_ranks(), ALGORITHMS, PIECES, COUNTS, st.data())
def test_movements_bring_each_block_to_its_place(
    name: str, domains: list[list[int]], algorithm: str, piece_nbytes: int, count: int, drawn: st.DataObject
) -> None:
    root = drawn.draw(st.integers(0, sum(map(len, domains)) - 1))
    operation, cluster, dtype = table.OPERATIONS[name], Cluster(domains), np.dtype(np.uint16)
    size = len(cluster.layouts)

    def counts(source: int, target: int) -> int:
        if operation.counts == "same":
            return count
        return (count + 5 * source + (7 * target if operation.receive == operation.send else 0)) % 23

    def data(source: int, target: int) -> Array:
        block: Array = np.arange(counts(source, target)).astype(dtype) + np.uint16(1000 * source + 50 * target)
        return block

    to_all = operation.send == "one"
    wanted: list[list[Array]] = []
    places: list[list[Span]] = []

    def buffers(rank: int) -> Buffers:
        memory = cluster.memories[rank]
        if operation.rooted == "bcast":
            span = memory.place(data(root, 0) if rank == root else np.zeros(counts(root, 0), dtype))
            wanted.append([data(root, 0)])
            places.append([span])
            return Buffers(rank, size, dtype, (), [span], root=root)
        sends = [memory.place(data(rank, 0 if to_all else peer)) for peer in range(1 if to_all else size)]
        if operation.rooted == "send":
            span = memory.place(np.zeros(counts(root, rank), dtype))
            wanted.append([data(root, rank)])
            places.append([span])
            return Buffers(rank, size, dtype, sends if rank == root else (), [span], root=root)
        incoming = [data(peer, 0 if to_all else rank) for peer in range(size)]
        blocks = [memory.place(np.zeros_like(block)) for block in incoming]
        receives = not operation.rooted or rank == root
        wanted.append(incoming if receives else [])
        places.append(blocks if receives else [])
        return Buffers(rank, size, dtype, sends, blocks if receives else (), root=root)

    with in_pieces_of(piece_nbytes):
        cluster.run(schedule_of(operation, count * 2, cluster.layouts[0], algorithm), buffers)
    for memory, spans, arrays in zip(cluster.memories, places, wanted, strict=True):
        for span, array in zip(spans, arrays, strict=True):
            assert memory.view(span.pointer, span.count, dtype).tolist() == array.tolist()


LINE_NBYTES = 128  # shards and parts end at whole cache lines


@pytest.mark.parametrize(
    ("name", "algorithm", "sizes", "count", "network", "local", "most_nbytes"),
    [
        ("Allreduce", "auto", [2, 2], 4, (1, 1), None, None),
        ("Bcast", "auto", [2, 2], 4, (1, 1), None, None),
        # A large call sends little over each network card: two thirds of a shard in two steps.
        ("Allreduce", "two_shot", [4] * 3, 1200, (2, 2), None, 2 * 1200 * 2 // 3 + 4 * LINE_NBYTES),
        # Each card carries the data of a broadcast about once, in four pieces. The first domain begins.
        ("Bcast", "two_shot", [2] * 4, 16 << 10, (4, 5), 4, (32 << 10) + 4 * 3 * LINE_NBYTES),
        # Steps in a domain do not grow with the number of domains.
        ("Allgather", "auto", [2] * 3, 3, (1, 1), 2, None),
        ("Allgather", "auto", [2] * 20, 3, (1, 1), 2, None),
        ("Reduce_scatter_block", "auto", [2] * 3, 3, (1, 1), 2, None),
        ("Reduce_scatter_block", "auto", [2] * 20, 3, (1, 1), 2, None),
    ],
)
def test_steps_and_bytes_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    algorithm: str,
    sizes: list[int],
    count: int,
    network: tuple[int, int],
    local: int | None,
    most_nbytes: int | None,
) -> None:
    """``network`` are the network steps of the ranks of the first domain and of others, at most."""
    monkeypatch.setattr(schedules, "MIN_PIECE_NBYTES", 4 << 10)
    ends = [0, *itertools.accumulate(sizes)]
    cluster, size = Cluster([[*range(*each)] for each in itertools.pairwise(ends)]), ends[-1]
    of_blocks = name in ("Allgather", "Reduce_scatter_block")

    operation = table.OPERATIONS[name]

    def buffers(rank: int) -> Buffers:
        send, receive = (cluster.memories[rank].place(np.ones(size * count, F32)).pointer for _ in range(2))
        return buffers_of(operation, rank, [count] * size, F32, send, receive)

    nbytes = 4 * count * (size if of_blocks else 1)
    cluster.run(schedule_of(operation, nbytes, cluster.layouts[0], algorithm), buffers)
    for rank in range(size):
        assert cluster.network_steps[rank] <= network[rank >= sizes[0]]
        assert local is None or cluster.locals[rank] == local
        assert most_nbytes is None or cluster.sent_nbytes[rank] <= most_nbytes


@pytest.mark.parametrize("sizes", [[8] * 2, [8] * 40, [1] * 40, [5, 1, 8]], ids=str)
@pytest.mark.parametrize("dtype", [F32, np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["Allgather", "Reduce_scatter_block", "Bcast", "Scan"])
def test_scratch_memory_does_not_grow_with_the_data(name: str, dtype: np.dtype[Any], sizes: list[int]) -> None:
    ends = [0, *itertools.accumulate(sizes)]
    layout, size = DomainLayout([range(*each) for each in itertools.pairwise(ends)], 0), ends[-1]
    taken = [0]

    def memory(nbytes: int) -> int:
        taken.append(nbytes)
        return 0

    operation = table.OPERATIONS[name]
    for block_nbytes in (4 << 10, 1 << 20, 16 << 20):
        counts = [block_nbytes // dtype.itemsize * (size if name == "Bcast" else 1)] * size
        buffers = buffers_of(operation, 0, counts, dtype, 1 << 40, 1 << 50)
        schedule = schedule_of(operation, size * block_nbytes, layout, "two_shot")
        list(schedules.pieces_of(schedule, buffers, layout, [memory] * schedules.DEPTH))
    # Two arrays of partial results and converted blocks, all in twice as many bytes, and packed blocks.
    assert max(taken) <= 7 * schedules.PIECE_NBYTES


@pytest.mark.parametrize("algorithm", ["ring", "chain"])
def test_algorithms_of_one_domain_are_refused(algorithm: str) -> None:
    with pytest.raises(InvalidUsageError, match=f'algorithm="{algorithm}" of Allreduce'):
        schedule_of(table.ALLREDUCE, 8, DomainLayout([[0], [1]], 0), algorithm)
