"""The model's network, interpolation and schedules against closed forms, and rules for any prediction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mpicomm.bench.model.group import DomainTimes, MeasuredTimes
from mpicomm.bench.model.nccl import ring_us, tree_us
from mpicomm.bench.model.network import Network
from mpicomm.bench.model.schedules import SCHEDULES, System, predict
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.patterns import Buffers
from mpicomm.domains.layout import DomainLayout
from mpicomm.domains.schedules import PIECE_NBYTES, schedule_of, steps_of
from mpicomm.domains.steps import Local
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.span import Span
from tests.unit.bench.model.systems import NETWORK, SIZES, flat_system, recorded_system, timed

KIB, MIB = 1 << 10, 1 << 20
PACKED_US = 1.5 + 4 * MIB / 1800e3  # of the blocks of 2 groups of 3
RECORDED = ("allreduce", "allgather", "reduce_scatter", "bcast", "alltoall", "gather", "scatter")


def test_a_step_shares_the_card_but_not_the_latency() -> None:
    network = Network(gb_s=10, latency_us=3)
    assert network.step_us(1, 20_000) == pytest.approx(3 + 2)
    assert network.step_us(4, 20_000) == pytest.approx(3 + 8)
    assert network.step_us(0, 20_000) == 0


@pytest.mark.parametrize("nbytes", [1, 40_000, 10 * MIB])
def test_a_chain_takes_the_best_number_of_pieces(nbytes: int) -> None:
    network = Network(gb_s=10, latency_us=3)
    cut = [(5 + k - 1) * (3 + nbytes / 1e4 / k) for k in range(1, 1000)]
    assert network.chain_us(5, nbytes) <= min(cut) * (1 + 1e-12)
    assert network.chain_us(5, nbytes) == pytest.approx(min(cut), rel=1e-2)
    assert network.chain_us(1, nbytes) == pytest.approx(3 + nbytes / 1e4)


def test_times_between_sizes_lie_on_a_line_of_logarithms() -> None:
    times = MeasuredTimes([(100, 2.0), (400, 8.0), (1600, 8.0)])
    assert [times.at(size) for size in (100, 400, 1600)] == pytest.approx([2, 8, 8])
    assert times.at(200) == pytest.approx(4)
    assert times.at(800) == pytest.approx(8)


def test_times_outside_the_measured_sizes_are_latency_and_bandwidth() -> None:
    times = MeasuredTimes([(100, 2.0), (200, 3.0), (400, 7.0)])
    assert times.at(1) == 2
    assert times.at(1400) == pytest.approx(7 + 1000 / 50)  # the line through the last two: 200 bytes in 4 us


@pytest.mark.parametrize(
    ("collective", "nbytes", "in_groups_us", "steps", "sent"),
    [  # 3 groups of 4 ranks; each rank sends twice as many bytes as it sends to one of the 2 other groups
        ("allreduce", KIB, 2, 1, 2 * KIB),
        ("allreduce", 6 * MIB, 2 + 2, 2, 2 * 2 * 6 * MIB / 12),
        ("allgather", 6 * MIB, 2 + PACKED_US, 1, 2 * 6 * MIB / 12),
        ("reduce_scatter", 6 * MIB, 2 + PACKED_US, 1, 2 * 6 * MIB / 12),
        ("bcast", KIB, 2, 1, 2 * KIB),
        ("bcast", 4 * MIB, 2 + 2, 2, (1 + 1 / 2) * 4 * MIB / 4),
        ("reduce", 6 * MIB, 2 + 2, 1, 2 * 6 * MIB / 4),
        ("alltoall", 6 * MIB, 2, 1, 8 * 6 * MIB / 12),
        ("gather", 6 * MIB, 2, 1, 8 * 6 * MIB / 12),
        ("scatter", 6 * MIB, 2, 1, 8 * 6 * MIB / 12),
    ],
)
def test_closed_forms(collective: str, nbytes: int, in_groups_us: float, steps: int, sent: float) -> None:
    predicted = predict(flat_system(3), collective, nbytes)
    assert predicted.time_us == pytest.approx(in_groups_us + steps * 5 + sent / 50e3)


def test_pieces_of_a_long_call_overlap_the_network() -> None:
    one = predict(flat_system(2), "reduce", PIECE_NBYTES).time_us
    network_us = 5 + PIECE_NBYTES / 4 / 50e3
    assert one == pytest.approx(2 + 2 + network_us)
    assert predict(flat_system(2), "reduce", 10 * PIECE_NBYTES).time_us == pytest.approx(one + 9 * network_us)
    slow = predict(flat_system(2, us=500), "reduce", 10 * PIECE_NBYTES).time_us
    assert slow == pytest.approx(10 * 1000 + network_us)


def test_a_group_gathers_the_blocks_of_some_groups_while_the_network_carries_others() -> None:
    network_us = 5 + PIECE_NBYTES / 4 / 50e3
    assert predict(flat_system(9), "allgather", 9 * PIECE_NBYTES).time_us == pytest.approx(8 * network_us + 2)
    assert predict(flat_system(9, us=500), "allgather", 9 * PIECE_NBYTES).time_us == pytest.approx(9 * 500)


def test_a_group_reduces_the_blocks_of_some_groups_while_the_network_carries_others() -> None:
    part = PIECE_NBYTES / 9 * 36  # a rank has room for the partial results of 9 groups
    network_us = 5 + 2 * part / 36 / 50e3  # to 2 of the 8 other groups at once; their blocks together are a piece
    last_us = 2 + 1.5 + 2 / 9 * part / 1800e3
    for parts in (1, 3):
        found = predict(flat_system(9), "reduce_scatter", parts * part).time_us
        assert found == pytest.approx(parts * (last_us + 4 * network_us))


@pytest.mark.parametrize("nbytes_of_group", [KIB, MIB, 32 * MIB])
@pytest.mark.parametrize("groups", [2, 3, 9, 33])
@pytest.mark.parametrize("name", ["Allgather", "Reduce_scatter_block"])
def test_a_group_has_as_many_steps_as_in_the_schedule(name: str, groups: int, nbytes_of_group: int) -> None:
    nbytes, size = groups * nbytes_of_group, groups * 4
    layout = DomainLayout([range(first, first + 4) for first in range(0, size, 4)], 0)
    block = Span(1 << 40, nbytes // size)
    buffers = Buffers(0, size, np.dtype(np.int8), send=block, blocks=[block] * size)
    if name == "Reduce_scatter_block":
        buffers = Buffers(0, size, np.dtype(np.int8), send_blocks=[block] * size, output=block, op="max")
    schedule = schedule_of(OPERATIONS[name], nbytes, layout, "auto")
    pieces = (piece for part in schedule(buffers, layout) for piece in steps_of(part, lambda nbytes: 0))
    made = sum(isinstance(step, Local) for piece in pieces for step in piece)
    system = replace(flat_system(groups, us=1e6), network=Network(gb_s=1e9, latency_us=1e-9))
    predicted = predict(system, name.lower().removesuffix("_block"), nbytes).time_us
    assert 0.9e6 * made < predicted < 1.001e6 * made  # a short piece counts for its share


@pytest.mark.parametrize("collective", RECORDED)
def test_one_group_takes_its_measured_time(collective: str) -> None:
    system = recorded_system(1)
    for nbytes in SIZES:
        assert predict(system, collective, nbytes).time_us == system.group.us(collective, nbytes)
    for time_us in (ring_us, tree_us):
        found = time_us(system, "allreduce", MIB)
        assert found == pytest.approx(system.group.nccl["allreduce"].at(MIB))


@pytest.mark.parametrize("collective", SCHEDULES)
def test_more_bytes_and_more_nodes_take_longer(collective: str) -> None:
    # Recorded times do not all grow with the size, because of noise. These are from a formula.
    group = DomainTimes(8, {name: timed(lambda size: 3 + size / 300e3) for name in SCHEDULES}, {})
    nodes, sizes = ([1 << power for power in powers] for powers in (range(1, 11), range(4, 34)))
    times = {
        (count, size): predict(System(group, count, NETWORK), collective, size).time_us
        for count, size in itertools.product(nodes, sizes)
    }
    for (count, size), time_us in times.items():
        assert time_us <= times.get((count, 2 * size), math.inf)
        assert time_us <= times.get((2 * count, size), math.inf)


@pytest.mark.parametrize("collective", SCHEDULES)
def test_a_slower_network_takes_longer(collective: str) -> None:
    system = flat_system(4)
    for slower in (Network(gb_s=25, latency_us=5), Network(gb_s=50, latency_us=10)):
        other = System(system.group, 4, slower)
        for predictor in (lambda *call: predict(*call).time_us, ring_us, tree_us):
            usual, later = (predictor(each, collective, 64 * MIB) for each in (system, other))
            assert usual is None or (later is not None and usual < later)


def test_what_was_not_measured_has_a_stand_in_or_an_error() -> None:
    group = DomainTimes(4, {"allgather": timed(lambda size: 3.0)}, {})
    assert group.us("reduce_scatter", KIB) == 3
    assert "reduce_scatter is taken to last as long as allgather" in group.lines()
    with pytest.raises(
        InvalidUsageError, match=r"--from has no times of bcast, only of allgather: write them with .* bcast"
    ):
        group.us("bcast", KIB)
    assert ring_us(System(group, 2, NETWORK), "allgather", KIB) is None  # NCCL was not measured


def test_a_collective_without_a_schedule_is_refused() -> None:
    with pytest.raises(InvalidUsageError, match="--model has no schedule of sendrecv: use one of allreduce"):
        predict(flat_system(2), "sendrecv", KIB)


def test_ring_of_nccl() -> None:
    # 3 groups of 4: mpicomm's smallest call takes 2 us and NCCL's 8, so that the hops of a group take 6.
    system, sent_us = flat_system(3), 6 * MIB / 4 / 50e3
    assert ring_us(system, "allreduce", 6 * MIB) == pytest.approx(2 + 3 * 6 + 2 * 2 * 5 + 2 * 11 / 12 * sent_us)
    assert ring_us(system, "allgather", 6 * MIB) == pytest.approx(2 + 3 * 6 + 2 * 5 + 11 / 12 * sent_us)
    assert ring_us(system, "bcast", 6 * MIB) == pytest.approx(2 + 3 * 6 + NETWORK.chain_us(2, 6 * MIB / 4))
    assert ring_us(system, "alltoall", 6 * MIB) is None


def test_tree_of_nccl() -> None:
    for groups, steps in ((2, 2), (3, 4), (4, 4), (5, 6), (1024, 20)):
        found = tree_us(flat_system(groups), "allreduce", 6 * MIB)
        assert found == pytest.approx(8 + NETWORK.chain_us(steps, 2 * 6 * MIB / 4))
    assert tree_us(flat_system(2), "allgather", 6 * MIB) is None


@pytest.mark.parametrize(
    ("predictor", "collective"), [(ring_us, "allreduce"), (ring_us, "bcast"), (tree_us, "allreduce")]
)
def test_nccl_is_no_faster_than_in_one_group(
    predictor: Callable[[System, str, float], float | None], collective: str
) -> None:
    slow = DomainTimes(4, {collective: timed(lambda size: 2.0)}, {collective: timed(lambda size: 8 + size / 1e3)})
    found = predictor(System(slow, 2, NETWORK), collective, 64 * MIB)
    assert found is not None and found >= 8 + 64 * MIB / 1e3
