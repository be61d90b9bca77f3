"""The bench's arithmetic: bandwidths, sizes, layouts, data, and expected results."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.bench.operations import (
    BARRIER,
    OPERATIONS,
    Case,
    CaseBuffers,
    Content,
    blocks_of,
    buffers,
    expected,
    random_data,
    reduce_in_order,
)
from mpicomm.mpi.types import covered_dtype
from tests.helpers.references.reductions import reduced

FLOAT = np.dtype(np.float32)


def case(name: str, *, rank: int = 0, size: int = 4, block: int = 12, in_place: bool = False) -> Case:
    return Case(OPERATIONS[name], FLOAT, "sum", block, in_place, rank, size)


@pytest.mark.parametrize(
    ("name", "factor"),  # as nccl-tests' PERFORMANCE.md has them, for 4 ranks
    [
        ("allreduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("allgather", 3 / 4),
        ("allgatherv", 3 / 4),
        ("bcast", 1),
        ("reduce", 1),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("alltoall", 3 / 4),
        ("alltoallv", 3 / 4),
        ("sendrecv", 1),
    ],
)
def test_bandwidths_are_defined_as_in_nccl_tests(name: str, factor: float) -> None:
    operation = OPERATIONS[name]
    (block,) = blocks_of(operation, [1 << 30], FLOAT, 4)
    one = case(name, block=block)
    assert one.nbytes == 1 << 30
    algbw = (1 << 30) / 4200e-6 / 1e9
    assert one.rates(4200.0) == pytest.approx({"algbw": algbw, "busbw": factor * algbw})


def test_bandwidths_of_calls_that_vary_count_their_mean_size() -> None:
    one = case("allreduce", block=1000)
    assert dataclasses.replace(one, share=0.75).rates(10.0)["busbw"] == pytest.approx(0.75 * one.rates(10.0)["busbw"])


def test_each_size_has_an_element_in_every_block_and_is_measured_once() -> None:
    for name, block, nbytes in (("allreduce", 2, 8), ("allgather", 1, 16), ("alltoall", 1, 16)):
        assert blocks_of(OPERATIONS[name], [8], FLOAT, 4) == [block]
        assert case(name, block=block).nbytes == nbytes
    assert blocks_of(OPERATIONS["allgather"], [1, 2, 16, 31, 32, 1 << 20], FLOAT, 4) == [1, 2, 1 << 16]
    assert blocks_of(BARRIER, [8, 1 << 20], FLOAT, 4) == [1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_alltoallv_sends_and_receives_equally_much(size: int) -> None:
    cases = [case("alltoallv", rank=rank, size=size, block=8 * size) for rank in range(size)]
    table = np.array([one.sent()[0] for one in cases])
    assert (table == table.T).all()
    assert (table.sum(axis=1) == cases[0].count).all()
    assert size == 1 or len(set(table[0])) > 1
    assert all(one.received() == one.sent() for one in cases)


def test_what_allgatherv_receives_lies_in_the_order_of_the_ranks() -> None:
    for rank in range(4):
        one = case("allgatherv", rank=rank)
        assert one.received() == ([3, 9, 15, 21], [0, 3, 12, 27])
        assert one.sent()[0] == 4 * [one.received()[0][rank]]


def world(name: str, size: int, block: int, in_place: bool, front: bool) -> list[tuple[Case, CaseBuffers]]:
    """Return the case of each rank, and its buffers in two arrays of that rank."""
    found = []
    for rank in range(size):
        one = case(name, rank=rank, size=size, block=block, in_place=in_place)
        first, second = np.zeros((2, max(16, one.nbytes)), np.uint8)
        found.append((one, buffers(one, first, second, result_at_front=front)))
    return found


def carry_out(ranks: list[tuple[Case, CaseBuffers]]) -> None:
    """Carry out a collective in the plainest way, on copies of all inputs."""
    name, size, block = ranks[0][0].operation.name, ranks[0][0].size, ranks[0][0].block
    sent = [None if place.send is None else place.send.view(FLOAT).copy() for _, place in ranks]
    whole = [part for part in sent if part is not None]
    for one, place in ranks:
        own = slice(one.rank * block, (one.rank + 1) * block)
        result: Any = None
        if name in ("allreduce", "reduce"):
            result = sum(whole[1:], whole[0])
        elif name == "reduce_scatter":
            result = sum(whole[1:], whole[0])[own]
        elif name in ("allgather", "allgatherv", "gather"):
            result = np.concatenate(whole)
        elif name == "bcast":
            result = whole[0]
        elif name == "scatter":
            result = whole[0][own]
        elif name == "alltoall":
            result = np.concatenate([part[own] for part in whole])
        elif name == "alltoallv":
            parts = []
            for peer in range(size):
                counts, displs = ranks[peer][0].sent()
                parts.append(whole[peer][displs[one.rank] : displs[one.rank] + counts[one.rank]])
            result = np.concatenate(parts)
        elif name == "sendrecv":
            result = whole[one.sources[0]]
        if place.receive is not None:
            place.receive.view(FLOAT)[: result.size] = result


@pytest.mark.parametrize("front", [True, False])
@pytest.mark.parametrize(
    ("name", "in_place"),
    [(name, place == "in-place") for name in OPERATIONS if name != "barrier" for place in OPERATIONS[name].places],
)
def test_a_right_result_is_right_and_a_wrong_element_is_found(name: str, in_place: bool, front: bool) -> None:
    block = 8001  # both ends and a middle
    ranks = world(name, 3, block, in_place, front)
    content = Content(np, FLOAT, "sum", 3, ranks[0][0].count, reduces=OPERATIONS[name].reduces)
    for one, place in ranks:
        content.prepare(one, place)
    receivers = [(one, place) for one, place in ranks if expected(one)]
    for one, place in receivers:
        if not (name in ("bcast", "scatter") and in_place and one.rank == 0):  # it has its part already
            assert content.count_wrong(one, place, exact=True) > block // 2, "poison passed for a result"
    carry_out(ranks)
    for exact in (True, False):
        assert [content.count_wrong(one, place, exact=exact) for one, place in ranks] == [0, 0, 0]
    for one, place in receivers:
        place.receive.view(np.uint32)[expected(one)[-1].start] ^= 1 << 30
        assert content.count_wrong(one, place, exact=True) == 1
        assert content.count_wrong(one, place, exact=False) == 1


@pytest.mark.parametrize(("op", "allowed"), [("sum", 0.3), ("avg", 0.1)])
def test_codes_may_differ_by_their_error(op: str, allowed: float) -> None:
    content = Content(np, FLOAT, op, 3, 1000, reduces=True)
    one = dataclasses.replace(case("allreduce", rank=0, size=3, block=1000), op=op)
    place = CaseBuffers(np.empty(one.nbytes, np.uint8), np.empty(one.nbytes, np.uint8))
    right = reduce_in_order(op, [random_data(FLOAT, 1000, rank) for rank in range(3)])
    for factor, wrong in ((0.9, 0), (1.1, 1)):
        place.receive.view(FLOAT)[:] = right
        place.receive.view(FLOAT)[7] += factor * allowed
        assert content.count_wrong(one, place, exact=True, error=0.1) == wrong
        assert content.count_wrong(one, place, exact=True) == 1


def test_data_from_elsewhere_in_the_array_is_found() -> None:
    count = 1_300_000  # beyond one period
    content = Content(np, FLOAT, "sum", 2, count, reduces=False)
    one = case("sendrecv", rank=1, size=2, block=count)
    place = CaseBuffers(np.empty(one.nbytes, np.uint8), np.empty(one.nbytes, np.uint8))
    content.prepare(dataclasses.replace(one, rank=0), CaseBuffers(place.receive, None))
    assert content.count_wrong(one, place, exact=True) == 0
    words = place.receive.view(np.uint32)
    words[:] = np.roll(words, 1 << 20)
    assert content.count_wrong(one, place, exact=True) > count // 2


PERIOD = 1_000_003
BYTES = Content(np, np.dtype(np.uint8), "sum", 3, 3 * PERIOD, reduces=False)


@given(nbytes=st.sampled_from([1, 2, 7, 4099, PERIOD - 1, PERIOD, PERIOD + 1, 2 * PERIOD + 3]), data=st.data())
def test_a_flipped_bit_anywhere_is_one_wrong_byte(nbytes: int, data: st.DataObject) -> None:
    whole = np.full(nbytes + 2, 0x5A, np.uint8)
    array = whole[1:-1]  # at an odd address
    BYTES.write(array, 1)
    assert whole[0] == whole[-1] == 0x5A and BYTES.count_differing(array, 1) == 0
    assert nbytes < 100 or min(BYTES.count_differing(array, 2), BYTES.count_differing(array, 1, 1)) > 0.98 * nbytes
    array[data.draw(st.sampled_from([0, nbytes - 1]) | st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert BYTES.count_differing(array, 1) == 1


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float32", "float64"])
def test_the_reference_takes_ranks_in_order_and_rounds_once(name: str, op: str) -> None:
    dtype = covered_dtype(name)
    data = [random_data(dtype, 1000, rank) for rank in range(3)]
    found = reduce_in_order(op, data)
    assert found.dtype == dtype
    assert found.tobytes() == reduced(op, data).tobytes()


def test_sums_in_another_order_are_near_but_not_the_same() -> None:
    data = [random_data(FLOAT, 5000, rank) for rank in range(4)]
    one = case("allreduce", block=5000)
    content = Content(np, FLOAT, "sum", 4, 5000, reduces=True)
    other = (data[3] + data[2]) + (data[1] + data[0])
    place = CaseBuffers(data[0].view(np.uint8), other.view(np.uint8))
    assert content.count_wrong(one, place, exact=True) > 0
    assert content.count_wrong(one, place, exact=False) == 0


def test_integers_wrap_and_have_all_bits() -> None:
    data = [random_data(np.dtype(np.int32), 1000, rank) for rank in range(2)]
    assert not np.array_equal(data[0], data[1])
    assert np.bitwise_or.reduce(data[0].view(np.uint32)) == 0xFFFFFFFF
    assert (
        reduce_in_order("sum", data).tolist()
        == (data[0].view(np.uint32) + data[1].view(np.uint32)).view(np.int32).tolist()
    )
