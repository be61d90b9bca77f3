"""The bench's arithmetic: bandwidths, sizes, layouts, data, expected results; its table, footer and JSON rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.bench.__main__ import FACTS, row_of
from mpicomm.bench.measure import Measured, Outcome
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
from mpicomm.bench.report import Report, ResultRow
from mpicomm.mpi.types import covered_dtype
from tests.helpers.references.reductions import reduced

FLOAT = np.dtype(np.float32)


def case(name: str, *, rank: int = 0, size: int = 4, block: int = 12, in_place: bool = False) -> Case:
    return Case(OPERATIONS[name], FLOAT, "sum", block, in_place, rank, size)


@pytest.mark.parametrize(
    ("name", "factor"),  # as nccl-tests' PERFORMANCE.md has them, for 4 ranks
    [
        ("allreduce", 2 * 3 / 4),
        *((name, 3 / 4) for name in ("reduce_scatter", "allgather", "allgatherv", "gather", "scatter")),
        *((name, 3 / 4) for name in ("alltoall", "alltoallv")),
        *((name, 1) for name in ("bcast", "reduce", "sendrecv")),
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
        for piece in expected(one):  # write what a case receives, in the plainest way
            data = np.empty(piece.offset + piece.count, FLOAT)
            content.write(data.view(np.uint8), piece.period)
            place.receive.view(FLOAT)[piece.start : piece.start + piece.count] = data[piece.offset :]
        assert [content.count_wrong(one, place, exact=exact) for exact in (True, False)] == [0, 0]
        if expected(one):
            place.receive.view(np.uint32)[expected(one)[-1].start] ^= 1 << 30
            assert [content.count_wrong(one, place, exact=exact) for exact in (True, False)] == [1, 1]


@pytest.mark.parametrize(("op", "allowed"), [("sum", 0.3), ("avg", 0.1)])
def test_quantized_results_may_differ_by_their_error(op: str, allowed: float) -> None:
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


PLACES = ("out-of-place", "in-place")
CASE = Case(OPERATIONS["allreduce"], np.dtype(np.float32), "sum", 1 << 28, False, 0, 4)


def outcome(time_us: float, wrong: int | None = 0, eager: str = "", issue_us: float | None = None) -> Outcome:
    return Outcome(time_us, issue_us, wrong, eager, "", 0.25)


def results() -> Report:
    small, large = {"mpi": "not in place"}, {"mpi": "too large"}
    out_of_place = {"mpicomm": outcome(3.0), "nccl": outcome(9.0), "mpi": outcome(30.0, eager="held")}
    in_place = {"mpicomm": outcome(4200.0, wrong=5), "nccl": outcome(4620.0, wrong=2)}
    first = Measured(out_of_place, {}), Measured({"mpicomm": outcome(4.0), "nccl": outcome(2.0)}, small)
    last = Measured({"mpicomm": outcome(4200.0), "nccl": outcome(4100.0)}, large), Measured(in_place, large)
    found = report(PLACES, ["nccl", "mpi"])
    for case, measured in ((dataclasses.replace(CASE, block=256), first), (CASE, last)):
        found.rows.append(row_of(case, dict(zip(PLACES, measured, strict=True))))
    return found


def report(places: Sequence[str] = PLACES[:1], peers: Sequence[str] = (), *, issue: bool = False) -> Report:
    return Report(FACTS, places, peers, ("algbw", "busbw"), issue=issue)


def one_row(case: Case, found: Outcome) -> ResultRow:
    return row_of(case, {"out-of-place": Measured({"mpicomm": found}, {})})


def test_table_has_nccl_tests_columns_and_a_pair_for_each_peer() -> None:
    both_peers = results()
    head = both_peers.head()
    first, last = map(both_peers.line, both_peers.rows)
    own, peers = ["time", "+-", "algbw", "busbw", "#wrong"], ["time", "ratio"] * 2
    assert head[1].split() == ["#", "size", "count", "type", "redop", "root", *(own + peers) * 2]
    assert head[0].split() == ["#", "out-of-place", "nccl", "mpi", "in-place", "nccl", "mpi"]
    out_of_place = "3.00 25 0.34 0.51 0 9.00 3.00 30.00* 10.00"
    assert " ".join(first.split()) == f"1024 256 float32 sum - {out_of_place} 4.00 25 0.26 0.38 0 2.00 0.50 - -"
    both = ("4200.00 25 255.65 383.48 0 4100.00 0.98 - -", "4200.00 25 255.65 383.48 5 4620.00 1.10 - -")
    assert " ".join(last.split()) == f"1073741824 268435456 float32 sum - {' '.join(both)}"
    assert len({len(line) for line in (head[0].ljust(len(first)), head[1].ljust(len(first)), first, last)}) == 1


def test_cells_of_calls_one_by_one_of_a_barrier_and_of_a_broadcast() -> None:
    with_issue = report(issue=True)
    assert "issue" in with_issue.head()[1]  # what the caller waits
    assert with_issue.line(one_row(CASE, outcome(5.5, issue_us=4.0))).split()[5:7] == ["4.00", "5.50"]
    barrier = dataclasses.replace(CASE, operation=OPERATIONS["barrier"], block=1)
    cells = report().line(one_row(barrier, outcome(2.0, None))).split()
    assert cells == ["0", "0", "float32", "-", "-", "2.00", "25", "0.00", "0.00", "N/A"]
    bcast = dataclasses.replace(CASE, operation=OPERATIONS["bcast"])
    assert report().line(one_row(bcast, outcome(2.0))).split()[3:5] == ["-", "0"]


def test_geometric_means_and_lines_below_the_table() -> None:
    found = results()
    assert {
        name: {place: round(mean, 3) for place, mean in of.items()} for name, of in found.geometric_means().items()
    } == {"nccl": {"out-of-place": 1.711, "in-place": 0.742}, "mpi": {"out-of-place": 10.0}}
    assert found.wrong() == {"mpicomm": 5, "nccl": 2}
    lines = found.footer()
    assert "nccl / mpicomm, geometric mean: out-of-place 1.711 (2 rows), in-place 0.742 (2 rows)" in lines
    assert "* mpi is timed call by call: held" in lines
    assert lines.count("- mpi: too large") == 1
    assert "nccl: 2 wrong" in lines
    assert found.document()[0]["missing"] == {"in-place": {"mpi": "not in place"}}
