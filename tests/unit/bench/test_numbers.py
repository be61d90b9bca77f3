"""The bench's arithmetic: bandwidths, sizes, layouts, data, and expected results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.bench.operations import (
    BARRIER,
    OPERATIONS,
    OPS,
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


def fill(content: Content, one: Case, place: CaseBuffers) -> None:
    """Write what a case receives, in the plainest way."""
    for piece in expected(one):
        data = np.empty(piece.offset + piece.count, FLOAT)
        content.write(data.view(np.uint8), piece.period)
        place.receive.view(FLOAT)[piece.start : piece.start + piece.count] = data[piece.offset :]


@pytest.mark.parametrize("front", [True, False])
@pytest.mark.parametrize(
    ("name", "in_place"),
    [(name, place == "in-place") for name in OPERATIONS if name != "barrier" for place in OPERATIONS[name].places],
)
def test_a_right_result_is_right_and_a_wrong_element_is_found(name: str, in_place: bool, front: bool) -> None:
    block = 8001  # both ends and a middle
    for rank in range(3):
        one = case(name, rank=rank, size=3, block=block, in_place=in_place)
        content = Content(np, FLOAT, "sum", 3, one.count, reduces=OPERATIONS[name].reduces)
        place = buffers(one, *np.zeros((2, one.nbytes), np.uint8), result_at_front=front)
        content.prepare(one, place)
        if expected(one) and not (name in ("bcast", "scatter") and in_place and rank == 0):  # it has its part already
            assert content.count_wrong(one, place, exact=True) > block // 2, "poison passed for a result"
        fill(content, one, place)
        assert [content.count_wrong(one, place, exact=exact) for exact in (True, False)] == [0, 0]
        if expected(one):
            place.receive.view(np.uint32)[expected(one)[-1].start] ^= 1 << 30
            assert [content.count_wrong(one, place, exact=exact) for exact in (True, False)] == [1, 1]


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


PERIOD = 1_000_003
BYTES = Content(np, np.dtype(np.uint8), "sum", 3, 3 * PERIOD, reduces=False)


@given(nbytes=st.sampled_from([1, 2, 7, 4099, PERIOD - 1, PERIOD, PERIOD + 1, 2 * PERIOD + 3]), data=st.data())
def test_a_flipped_bit_anywhere_is_one_wrong_byte(nbytes: int, data: st.DataObject) -> None:
    whole = np.full(nbytes + 2, 0x5A, np.uint8)
    array = whole[1:-1]  # at an odd address
    BYTES.write(array, 1)
    assert whole[0] == whole[-1] == 0x5A and BYTES.count_differing(array, 1) == 0
    # The data of another rank, and data from elsewhere in an array, also as far as a power of two.
    elsewhere = [BYTES.count_differing(array, *of) for of in ((2,), (1, 1), (1, 1 << 20))]
    assert nbytes < 100 or min(elsewhere) > 0.98 * nbytes
    array[data.draw(st.sampled_from([0, nbytes - 1]) | st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert BYTES.count_differing(array, 1) == 1


TYPES = ("float16", "bfloat16", "float8_e4m3fn", "float32", "float64", "int32")


@pytest.mark.parametrize(("name", "op"), [(name, op) for name in TYPES for op in OPS if (name, op) != ("int32", "avg")])
def test_the_reference_takes_ranks_in_order_and_rounds_once(name: str, op: str) -> None:
    dtype = covered_dtype(name)
    data = [random_data(dtype, 1000, rank) for rank in range(3)]
    found = reduce_in_order(op, data)
    assert found.dtype == dtype
    assert found.tobytes() == reduced(op, data).tobytes()
    assert name != "int32" or np.bitwise_or.reduce(data[0].view(np.uint32)) == 0xFFFFFFFF


def test_sums_in_another_order_are_near_but_not_the_same() -> None:
    data = [random_data(FLOAT, 5000, rank) for rank in range(4)]
    one = case("allreduce", block=5000)
    content = Content(np, FLOAT, "sum", 4, 5000, reduces=True)
    other = (data[3] + data[2]) + (data[1] + data[0])
    place = CaseBuffers(data[0].view(np.uint8), other.view(np.uint8))
    assert content.count_wrong(one, place, exact=True) > 0
    assert content.count_wrong(one, place, exact=False) == 0
