"""Types and operations of windows of host memory: what MPI gets wrong raises before the call, and all else is MPI's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.rigs.communicators import settle

NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
PAIR = np.dtype([("value", "f8"), ("index", "i4")], align=True)


@pytest.fixture
def win(host_comm: mpicomm.Communicator) -> Iterator[mpicomm.Win]:
    win = mpicomm.Win.Allocate(64, 1, comm=host_comm, place="mpi")
    win.tomemory()[:] = 0
    win.Lock_all()
    settle(host_comm)
    yield win
    win.Unlock_all()
    win.Free()


def element_type(name: str) -> np.dtype[Any]:
    return np.dtype(name if name == "float16" else getattr(pytest.importorskip("ml_dtypes"), name))


def accumulate(win: mpicomm.Win, call: str, origin: Any, op: MPI.Op) -> None:
    """Carry out one of the calls that combine elements on the memory of this rank."""
    array = origin[0] if isinstance(origin, list) else origin
    result = [np.zeros_like(array), *origin[1:]] if isinstance(origin, list) else np.zeros_like(array)
    results = () if call in ("Accumulate", "Raccumulate") else (result,)
    done = getattr(win, call)(origin, *results, win.group_rank, 0, op)
    if done is not None:
        done.Wait()
    win.Flush(win.group_rank)


@pytest.mark.parametrize("name", NARROW)
def test_sums_of_narrow_floats_name_the_way_out(win: mpicomm.Win, name: str) -> None:
    origin = np.ones(1, element_type(name))
    calls = ("Accumulate", "Raccumulate", "Get_accumulate", "Rget_accumulate", "Fetch_and_op")
    for call, op in itertools.product(calls, (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)):
        with pytest.raises(InvalidUsageError, match=f"Win.{call}: op=.* of {name}: .*place='device'") as caught:
            accumulate(win, call, origin, op)
        assert caught.value.Get_error_class() == MPI.ERR_TYPE  # type: ignore[attr-defined]
    assert not win.tomemory().any()


@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats_move(win: mpicomm.Win, name: str) -> None:
    dtype, rank = element_type(name), win.group_rank
    there = win.tomemory().view(dtype)
    given, got = np.array([1.5, -2.0, 3.0], dtype), np.zeros(2, dtype)
    steps: list[tuple[Callable[[], Any], list[float]]] = [
        (lambda: win.Put(given, rank, dtype.itemsize), [0, 1.5, -2, 3]),
        (lambda: win.Put((given, 2), rank, (0, 2)), [1.5, -2, -2, 3]),
        (lambda: win.Rput(given[2:], rank).Wait(), [3, -2, -2, 3]),
        (lambda: win.Accumulate(given[:1], rank, 0, MPI.REPLACE), [1.5, -2, -2, 3]),
        (lambda: win.Get(got, rank, dtype.itemsize * 2), [1.5, -2, -2, 3]),
    ]
    for step, expected in steps:
        step()
        win.Flush(rank)
        assert there[:4].astype(float).tolist() == expected
    assert got.astype(float).tolist() == [-2, 3]


@pytest.mark.parametrize(
    ("op", "origin"),
    [
        (MPI.SUM, np.ones(1, bool)),  # MPICH takes it, and Open MPI ends the process
        (MPI.BAND, np.ones(1)),  # MPICH ends the process
        (MPI.MAX, np.ones(1, complex)),
        (MPI.MAXLOC, np.ones(1)),
        (MPI.SUM, [np.zeros(1, PAIR), 1, MPI.DOUBLE_INT]),
        (MPI.SUM, [np.ones(4, "u1"), MPI.BYTE]),
        (MPI.SUM, [np.ones(4, "u1"), 1, MPI.LOGICAL]),
        (MPI.LAND, [np.ones(4, "u1"), MPI.PACKED]),
        (MPI.Op.Create(lambda a, b, datatype: None), np.ones(1)),
        (mpicomm.Op("a + b"), np.ones(1)),
        (mpicomm.AVG, np.ones(1)),
    ],
)
def test_undefined_operations_raise_before_mpi(win: mpicomm.Win, op: MPI.Op, origin: Any) -> None:
    for call in ("Accumulate", "Get_accumulate", "Fetch_and_op"):
        with pytest.raises(InvalidUsageError, match=r"op=|elements of several types"):
            accumulate(win, call, origin, op)
    assert not win.tomemory().any()


def test_defined_operations_are_mpis(win: mpicomm.Win) -> None:
    win.Accumulate(np.ones(1, np.float16), MPI.PROC_NULL)
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    pair = np.array([(2.0, 1)], PAIR)
    cases = [
        (MPI.SUM, np.full(2, 1.5), np.full(2, 1.5)),
        (MPI.LOR, np.ones(2, bool), np.ones(2, bool)),
        (MPI.BOR, [np.full(2, 3, "u1"), MPI.BYTE], np.full(2, 3, "u1")),
        (MPI.MAXLOC, [pair, 1, MPI.DOUBLE_INT], pair),
        (MPI.SUM, [np.arange(1.0, 5), 1, vector], np.array([1.0, 0, 3])),
        (MPI.REPLACE, np.ones(2, np.float16), np.ones(2, np.float16)),
        (MPI.SUM, [np.ones(1, "u1"), 0, MPI.BYTE], np.zeros(1, "u1")),
    ]
    for op, origin, expected in cases:
        win.tomemory()[:] = 0
        win.Sync()
        accumulate(win, "Accumulate", origin, op)
        assert (win.tomemory()[: expected.nbytes].view(expected.dtype) == expected).all()
    vector.Free()
