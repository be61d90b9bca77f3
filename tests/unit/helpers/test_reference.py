from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.references import reference

ml_dtypes = pytest.importorskip("ml_dtypes")


def arrays(*rows: Sequence[Any], dtype: str = "i4") -> list[Any]:
    return [np.array(row, dtype) for row in rows]


def lists(received: Sequence[Any]) -> list[Any]:
    return [None if array is None else array.tolist() for array in received]


THREE = arrays([1, 2, 3], [10, 20, 30], [100, 200, 300])


def test_data_goes_where_it_should() -> None:
    assert lists(reference.bcast(THREE, 1)) == [[10, 20, 30]] * 3
    assert lists(reference.gather(arrays([1], [2], [3]), 2)) == [None, None, [1, 2, 3]]
    assert lists(reference.scatter(THREE[1], 3)) == [[10], [20], [30]]
    assert lists(reference.allgather(arrays([1, 2], [3, 4]))) == [[1, 2, 3, 4]] * 2
    assert lists(reference.alltoall(THREE)) == [[1, 10, 100], [2, 20, 200], [3, 30, 300]]
    assert lists(reference.alltoall(arrays([1, 2, 3, 4], [5, 6, 7, 8]))) == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_blocks_go_to_their_places() -> None:
    sent = arrays([1, 2], [], [3])
    old = np.array([-1, -2, -3, -4, -5], "i4")
    places = [(2, 3), (0, 99), (1, 0)]
    assert lists(reference.gatherv(sent, places, old, 0)) == [[3, -2, -3, 1, 2], None, None]
    other = [(2, 0), (0, 0), (1, 4)]
    assert lists(reference.allgatherv(sent, [places, other, places], [old] * 3)) == [
        [3, -2, -3, 1, 2],
        [1, 2, -3, -4, 3],
        [3, -2, -3, 1, 2],
    ]
    assert lists(reference.scatterv(old, [(2, 3), (0, 99), (3, 2)])) == [[-4, -5], [], [-3, -4, -5]]
    assert old.tolist() == [-1, -2, -3, -4, -5]


def test_blocks_of_every_pair_go_to_their_places() -> None:
    received = reference.alltoallv(
        arrays([1, 2, 3], [4, 5, 6]),
        [[(1, 2), (2, 0)], [(0, 0), (2, 1)]],  # rank 0 sends [3] and [1, 2], rank 1 nothing and [5, 6]
        [[(1, 1), (0, 0)], [(2, 2), (2, 0)]],
        arrays([0, 0], [0, 0, 0, 0]),
    )
    assert lists(received) == [[0, 3], [5, 6, 1, 2]]


def test_places_that_do_not_fit_are_noticed() -> None:
    with pytest.raises(AssertionError, match="2 elements in a place for 1"):
        reference.gatherv(arrays([1, 2]), [(1, 0)], np.zeros(3, "i4"), 0)
    with pytest.raises(AssertionError, match="2 elements from 2 on"):
        reference.scatterv(np.zeros(3), [(2, 2)])
    with pytest.raises(AssertionError, match="3 elements for 2 ranks"):
        reference.scatter(np.zeros(3), 2)
    with pytest.raises(AssertionError, match="of 3 elements"):
        reference.reduce_scatter(THREE, "sum", [1, 1])


def test_reductions_go_where_they_should() -> None:
    assert lists(reference.allreduce(THREE, "sum")) == [[111, 222, 333]] * 3
    assert lists(reference.reduce(THREE, "max", 1)) == [None, [100, 200, 300], None]
    assert lists(reference.reduce_scatter(THREE, "sum", [0, 2, 1])) == [[], [111, 222], [333]]
    assert lists(reference.reduce_scatter_block(THREE, "sum")) == [[111], [222], [333]]
    assert lists(reference.scan(THREE, "sum")) == [[1, 2, 3], [11, 22, 33], [111, 222, 333]]
    assert lists(reference.exscan(THREE, "sum", np.array([7, 8, 9]))) == [[7, 8, 9], [1, 2, 3], [11, 22, 33]]


FLOAT16, INT = np.dtype("f2"), np.dtype("i4")
REDUCED = [
    *[
        ("sum", (1, 2, 3), INT, 6),
        ("prod", (2, 3, 4), INT, 24),
        ("max", (3, -7, 5), INT, 5),
        ("min", (3, -7, 5), INT, -7),
    ],
    *[
        ("land", (5, 0, 1), INT, 0),
        ("land", (5, 2, 1), INT, 1),
        ("lor", (0, 0, 6), INT, 1),
        ("lxor", (5, 6, 7), INT, 1),
    ],
    *[
        ("lxor", (5, 6, 0), INT, 0),
        ("band", (7, 5, 13), INT, 5),
        ("bor", (1, 2, 8), INT, 11),
        ("bxor", (7, 5, 1), INT, 3),
    ],
    # Integers wrap.
    *[("sum", (127, 1), np.dtype("i1"), -128), ("prod", (2**62, 2), np.dtype("i8"), -(2**63))],
    # In rank order (1 + 2^24) loses the 1; the other way round it would be there.
    *[("sum", (1, 2**24, -(2**24)), np.dtype("f4"), 0), ("sum", (2**24, -(2**24), 1), np.dtype("f4"), 1)],
    # Narrow floats are rounded once: in float16 every step would lose the 1, and float16 does not hold 70000.
    *[("sum", (2048, 1, 1), FLOAT16, 2050), ("sum", (256, 1, 1), np.dtype(ml_dtypes.bfloat16), 258)],
    *[("sum", (16, 1, 1), np.dtype(ml_dtypes.float8_e4m3fn), 18), ("sum", (60000, 10000, -30000), FLOAT16, 40000)],
    *[("sum", (60000, 10000), FLOAT16, np.inf), ("avg", (60000, 60000), FLOAT16, 60000)],
    *[
        ("avg", (1, 1, 2), np.dtype("f4"), np.float32(4) / np.float32(3)),
        ("avg", (1 + 2j, 3 - 4j), np.dtype("c8"), 2 - 1j),
    ],
    ("prod", (1 + 2j, 3 - 1j, 2), np.dtype("c16"), 10 + 10j),
    *[(op, values, np.dtype("f8"), np.nan) for op in ("max", "min") for values in ((np.nan, 1), (1, np.nan))],
]


@pytest.mark.parametrize(("op", "values", "dtype", "result"), REDUCED)
def test_reductions(op: str, values: Sequence[Any], dtype: Any, result: Any) -> None:
    for array in reference.allreduce([np.array([value], dtype) for value in values], op):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, np.array([result], dtype))


def test_what_is_sent_is_not_changed_or_shared() -> None:
    sent = arrays([1, 2], [3, 4])
    for received in (
        reference.allreduce(sent, "sum"),
        reference.scan(sent, "sum"),
        reference.bcast(sent, 0),
        reference.reduce_scatter_block(sent, "sum"),
        reference.allreduce(sent[:1], "sum"),
    ):
        for array in received:
            array[:] = -1
    assert lists(sent) == [[1, 2], [3, 4]]
