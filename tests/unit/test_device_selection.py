from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives import patterns
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chain.arguments import BATCH_NBYTES, CHAIN_SLOTS, CHAIN_THREADS
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainPlanner
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Inboxes
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    SLOT_NBYTES,
    flags_can_carry,
    most_workers,
)
from mpicomm.collectives.gpu.algorithms.packets.plan import MAX_BLOCKS, PacketPlanner, geometry_of
from mpicomm.collectives.gpu.choose import (
    Room,
    Way,
    can_chain,
    choose_algorithm,
    choose_ways,
    packet_wire,
)
from mpicomm.collectives.signature import Signature
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import HOST_SLOTS, REDUCTIONS
from mpicomm.kernels.team import LANES, Team
from mpicomm.mpi.span import Span
from tests.helpers.reductions import dtype_named
from tests.helpers.tuning import row, table

SIZES = st.integers(2, 8)
KIB, MIB = 1 << 10, 1 << 20


@given(
    nbytes=st.integers(0, 1 << 34),
    dtype=st.sampled_from([None, *REDUCTIONS]),
    flagged=st.floats(0, 1 << 34),
    sentinel=st.floats(0, 1 << 34),
)
def test_a_wire_carries_the_type_and_as_much_as_it_may(
    nbytes: int, dtype: str | None, flagged: float, sentinel: float
) -> None:
    wire = packet_wire(nbytes, (dtype, "sum") if dtype else None, flagged, sentinel)
    if wire == "flagged":
        assert 0 < nbytes <= flagged
        assert dtype is None or flags_can_carry(dtype)
    if wire == "sentinel":
        assert 0 < nbytes <= sentinel
    if wire is None:
        assert nbytes == 0 or nbytes > sentinel


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("multiprocessors", [16, 60, 132])
@pytest.mark.parametrize("fan_out", [False, True])
def test_inboxes_that_are_used_again_hold_enough_steps(size: int, multiprocessors: int, fan_out: bool) -> None:
    layout = ArenaLayout(size, 64)
    for exponent in range(3, 31):
        share = -(-(1 << exponent) // size)
        for nbytes in (1 << exponent, (1 << exponent) + 16, share, share - share % 16 or 16):
            geometry = geometry_of(-(-nbytes // 16), min(MAX_BLOCKS, multiprocessors), size, fan_out=fan_out)
            inbox = layout.sentinel_inbox_nbytes
            if nbytes > inbox:
                inbox = layout.large_inbox_nbytes(nbytes)
            assert nbytes <= inbox or inbox // SLOT_NBYTES // geometry.threads >= FEWEST_LAPS
            assert (nbytes <= inbox) == (nbytes <= layout.most_inbox_nbytes)


@given(units=st.integers(1, 1 << 32), blocks=st.integers(1, MAX_BLOCKS), size=SIZES, fan_out=st.booleans())
def test_a_launch_keeps_its_limits(units: int, blocks: int, size: int, fan_out: bool) -> None:
    geometry = geometry_of(units, blocks, size, fan_out=fan_out)
    most = most_workers(size, fan_out=fan_out, one_step=units <= geometry.threads)
    assert 1 <= geometry.blocks <= blocks
    assert 32 <= geometry.workers <= most and geometry.workers % 32 == 0
    assert geometry.threads < units + 2 * geometry.workers  # none is idle but in the last block


@given(nbytes=st.integers(1, 1 << 30), multiprocessors=st.sampled_from([1, 16, 60, 100, 132]), hops=st.integers(2, 3))
def test_a_slot_of_a_chain_holds_what_a_channel_carries(nbytes: int, multiprocessors: int, hops: int) -> None:
    planner = ChainPlanner(Team(size=3), multiprocessors)
    layout = planner.layout(nbytes, hops)
    slot_nbytes = layout.channel_nbytes // CHAIN_SLOTS
    assert slot_nbytes in (BATCH_NBYTES, 4 * BATCH_NBYTES, 32 * KIB)
    blocks, batch_nbytes = planner._cut(nbytes, hops)
    carried = -(-nbytes // (blocks * CHAIN_THREADS // LANES * batch_nbytes)) * BATCH_NBYTES
    assert slot_nbytes >= min(carried, 32 * KIB)
    assert slot_nbytes < 4 * carried


def test_slots_of_a_chain_grow_with_its_messages() -> None:
    planner = ChainPlanner(Team(size=4), 132)

    def nbytes_of(nbytes: int, hops: int) -> int:
        layout = planner.layout(nbytes, hops)
        return layout.nbytes - layout.slots

    assert [nbytes_of(size * MIB, 3) // MIB for size in (1, 2, 3, 8, 9, 1024)] == [4, 4, 16, 16, 64, 64]
    assert [nbytes_of(size * MIB, 4) // MIB for size in (1, 2, 4, 5)] == [4, 16, 16, 64]


@pytest.mark.parametrize("host_slots", [False, True])
def test_kernels_that_use_slots_again_know_whether_these_lie_in_memory_of_the_host(host_slots: bool) -> None:
    layout, tag = ArenaLayout(2, 64), 1
    inboxes = Inboxes((4096, 8192), layout.sentinel_inbox_nbytes)
    arena = cast(Any, SimpleNamespace(layout=layout, sentinels=inboxes, large_inboxes=lambda nbytes: inboxes))
    planner = PacketPlanner(Team(size=2), arena, 8, host_slots=host_slots)
    for nbytes, again in ((KIB, False), (64 * MIB, True)):
        span = Span(4096, nbytes)
        (exchange,) = patterns.alltoall(0, 2, np.dtype(np.uint8), [span] * 2, [span] * 2)
        options = planner.launch(exchange, None, tag, "sentinel", nbytes=nbytes).variant.options
        assert (HOST_SLOTS[0] in options) == (host_slots and again)
    chains = ChainPlanner(Team(size=2), 8, host_slots=host_slots)
    chain = patterns.chained_bcast(0, 2, np.dtype(np.uint8), Span(4096, MIB), 0)
    options = chains.launch(chain, None, tag, chains.layout(MIB, 1), [4096, 8192]).variant.options
    assert (HOST_SLOTS[0] in options) == host_slots


def test_an_arena_takes_no_more_than_it_says() -> None:
    for size in range(2, 5):
        assert ArenaLayout(size, 64).nbytes <= 64 * MIB


def exchanges_of(operation: str, rank: int, count: int, *, two_shot: bool) -> list[Exchange]:
    dtype, span = np.dtype(np.int32), Span(4096, count)
    if operation == "Bcast":
        if two_shot:
            return patterns.relayed_bcast(rank, 4, dtype, span, 1)
        return patterns.bcast(rank, 4, dtype, span, 1)
    if operation == "Allreduce":
        return patterns.allreduce(rank, 4, dtype, span, span, "sum", piece_nbytes=4 * count if two_shot else None)
    if operation == "Reduce":
        pattern = patterns.relayed_reduce if two_shot else patterns.reduce
        return pattern(rank, 4, dtype, span, span if rank == 1 else None, "sum", 1)
    if operation == "Allgatherv":
        counts = [count, 0, 5, count]
        uneven = patterns.blocks(span.pointer, counts, [0, count, count, count + 5], dtype.itemsize)
        return patterns.allgather(rank, 4, dtype, uneven[rank], uneven)
    blocks = patterns.blocks(span.pointer, [count] * 4, [index * count for index in range(4)], dtype.itemsize)
    if operation == "Allgather":
        return patterns.allgather(rank, 4, dtype, blocks[rank], blocks)
    sends = patterns.blocks(1 << 40, [count] * 4, [index * count for index in range(4)], dtype.itemsize)
    return patterns.alltoall(rank, 4, dtype, sends, blocks)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("operation", ["Allgather", "Allgatherv", "Allreduce", "Alltoall", "Bcast", "Reduce"])
@pytest.mark.parametrize("count", [1, 1000, 100_000, 10_000_000])
def test_all_ranks_choose_alike(operation: str, two_shot: bool, symmetric: bool, count: int) -> None:
    signature = Signature(operation, "int32", count, "sum" if operation in ("Allreduce", "Reduce") else None)
    chosen = []
    for rank in range(4):
        exchanges = exchanges_of(operation, rank, count, two_shot=two_shot)
        ways = choose_ways(exchanges, signature, rank, 4 * count, Room(MIB // 4, 8 * MIB), symmetric=symmetric)
        chosen.append([(way.step, way.merged is not None, way.reduction, way.wire, way.direct) for way in ways])
        assert not any(way.direct for way in ways) or symmetric
    assert chosen == [chosen[0]] * 4
    if operation == "Allgather":
        assert chosen[0][0][-1] == (symmetric and 4 * count > 4 * MIB)


@pytest.mark.parametrize("operation", ["Alltoallv", "Gatherv", "Scatterv"])
@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 2 * MIB, 6 * MIB], [MIB, 60 * MIB, 300 * MIB]])
def test_what_only_two_ranks_know_goes_in_packets(counts: list[int], operation: str) -> None:
    """In one kernel, of which nothing but the messages themselves depends on their lengths."""
    dtype = np.dtype(np.int32)
    blocks = patterns.blocks(0, counts, [0, 10**4, 2 * 10**4], dtype.itemsize)
    exchanges = patterns.alltoall(0, 3, dtype, blocks, blocks[::-1])
    (way,) = choose_ways(exchanges, Signature(operation, "int32"), 0, 4 * max(counts), Room(400, 8), symmetric=False)
    assert way.exchange is exchanges[0]
    assert (way.step, way.merged, way.reduction, way.wire, way.direct) == (0, None, None, "sentinel", False)
    assert way.nbytes == 1 << 62


@pytest.mark.parametrize("largest", [10**6, 100 * MIB])
@pytest.mark.parametrize("least", [0, 5, 10**6])
def test_parts_of_any_lengths_go_in_packets(least: int, largest: int) -> None:
    dtype, room, counts = np.dtype(np.float32), Room(400, 8 * MIB), [largest, least, least]
    blocks = patterns.blocks(0, counts, [0, largest, largest + least], dtype.itemsize)
    for rank in range(3):
        output = Span(1 << 40, counts[rank])
        scattered = patterns.reduce_scatter(rank, 3, dtype, blocks, output, "sum")
        gathered = patterns.allgather(rank, 3, dtype, output, blocks)
        for operation, op, exchanges in (("Reduce_scatter", "sum", scattered), ("Allgatherv", None, gathered)):
            signature = Signature(operation, "float32", sum(counts), op)
            (way,) = choose_ways(exchanges, signature, rank, 4 * largest, room, symmetric=False)
            assert way.wire == "sentinel"


@pytest.mark.parametrize("link_speed", [0.1, 1, 1.5])
def test_sizes_are_scaled_by_the_speed_of_the_links(link_speed: float) -> None:
    signature = Signature("Allgather", "int32", 1)

    def way(nbytes: float) -> Way:
        exchanges = exchanges_of("Allgather", 0, int(nbytes) // 4, two_shot=False)
        room = Room(1 << 40, 1 << 40)
        (found,) = choose_ways(exchanges, signature, 0, int(nbytes), room, symmetric=True, link_speed=link_speed)
        return found

    assert way(32 * KIB * link_speed).wire == "flagged"
    assert way(32 * KIB * link_speed + 8).wire == "sentinel"
    assert way(4 * MIB * link_speed).wire == "sentinel"
    assert way(4 * MIB * link_speed + 8).direct


def test_what_goes_along_a_chain() -> None:
    float32 = np.dtype(np.float32)
    for root in range(4):
        assert can_chain(dtype_named("float16"), None, root, 4)
        assert can_chain(float32, "sum", root, 4) == (root in (0, 3))
    assert not can_chain(float32, "avg", 0, 4)
    rounded = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    for name in REDUCTIONS:
        assert can_chain(dtype_named(name), "lor", 0, 4) == (name not in rounded)


def test_a_chain_is_chosen_where_it_is_possible() -> None:
    tuning = table(row("Reduce", 4, (100, "two_shot"), (1000, "chain"), (9000, "copy_engine")))

    def chosen(asked: str, nbytes: int, *, chainable: bool) -> str:
        which = {"registered": False, "chainable": chainable}
        return choose_algorithm(tuning, asked, "Reduce", nbytes, 4, **which)

    for nbytes, expected in ((99, "one_shot"), (100, "two_shot"), (1000, "chain"), (9000, "copy_engine")):
        assert chosen("auto", nbytes, chainable=True) == expected
        assert chosen("auto", nbytes, chainable=False) == ("two_shot" if expected == "chain" else expected)
    assert chosen("chain", 1, chainable=True) == "chain"
    assert chosen("chain", 0, chainable=True) == "one_shot"
    with pytest.raises(InvalidUsageError, match=r'algorithm="chain" of Reduce is for .*: use "two_shot"'):
        chosen("chain", 1, chainable=False)
