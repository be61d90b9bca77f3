"""Wrong use of windows raises an error that names the argument and the rank, and nothing is written.

MPI carries out all else on windows of host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import settle, to_host
from tests.mpi.windows.conftest import MakeWindow

USERS = MPI.Op.Create(lambda a, b, datatype: None)


class Arrays:
    """The buffers of the calls: integers of 8 bytes, if their names say nothing else."""

    def __init__(self, xp: Any) -> None:
        self.one, self.two, self.other = xp.ones(1, np.int64), xp.ones(2, np.int64), xp.ones(2, np.int64)
        self.reals, self.wide, self.short = xp.ones(2), xp.ones(1, complex), xp.ones(1, np.int32)


Act = Callable[[mpicomm.Win, Arrays], object]
REFUSED: list[tuple[int, str, Act]] = [
    (MPI.ERR_RMA_RANGE, "Put: target: displacement 3 reaches from byte 24 to byte 40 of the window on rank 0",
     lambda win, a: win.Put(a.two, 0, 3)),
    (MPI.ERR_DISP, "Get: target: displacement -1 is negative", lambda win, a: win.Get(a.two, 0, -1)),
    (MPI.ERR_TRUNCATE, "Put: target has 24 bytes, and origin has 16", lambda win, a: win.Put(a.two, 0, (0, 3))),
    (MPI.ERR_COUNT, "Accumulate: target has 8 bytes, and origin has 16",
     lambda win, a: win.Accumulate(a.two, 0, (0, 1))),
    (MPI.ERR_COUNT, "Put: target: count -2 is negative", lambda win, a: win.Put(a.two, 0, (0, -2))),
    (MPI.ERR_RANK, "Rput: target_rank=9: use 0 to", lambda win, a: win.Rput(a.two, 9)),
    (MPI.ERR_TYPE, "Accumulate: origin has elements of int64, and target of float64",
     lambda win, a: win.Accumulate(a.two, 0, (0, 2, MPI.DOUBLE))),
    (MPI.ERR_TYPE, "Accumulate: origin has elements of int64, and target of float64",
     lambda win, a: win.Accumulate(a.two, 0, (0, 2, "d"))),
    (MPI.ERR_TYPE, "Get_accumulate: result has elements of float64, and target of int64",
     lambda win, a: win.Get_accumulate(a.two, a.reals, 0)),
    (MPI.ERR_COUNT, "Get_accumulate: result has 8 bytes, and origin has 16",
     lambda win, a: win.Get_accumulate(a.two, a.one, 0)),
    (MPI.ERR_OP, "Accumulate: op=maxloc is not defined for int64",
     lambda win, a: win.Accumulate(a.two, 0, op=MPI.MAXLOC)),
    (MPI.ERR_OP, "Accumulate: op=sum is not defined for", lambda win, a: win.Accumulate([a.two, 2, MPI.TWOINT], 0)),
    (MPI.ERR_OP, "Accumulate: op=<mpi4py.MPI.Op object", lambda win, a: win.Accumulate(a.two, 0, op=USERS)),
    (MPI.ERR_OP, "Accumulate: op=mpicomm.AVG cannot update", lambda win, a: win.Accumulate(a.reals, 0, op=mpicomm.AVG)),
    (MPI.ERR_OP, "op=band is not defined for float64", lambda win, a: win.Accumulate(a.reals, 0, op=MPI.BAND)),
    (MPI.ERR_RMA_RANGE, "Get_accumulate: target: displacement 3 reaches from byte 24 to byte 40",
     lambda win, a: win.Get_accumulate(a.two, a.other, 0, 3)),
    (MPI.ERR_RMA_RANGE, "Fetch_and_op: target: displacement 4 reaches from byte 32 to byte 40",
     lambda win, a: win.Fetch_and_op(a.one, a.one, 0, 4)),
    (MPI.ERR_DISP, "Accumulate: target: displacement -1 is negative", lambda win, a: win.Accumulate(a.two, 0, -1)),
    (MPI.ERR_COUNT, "pass as many elements", lambda win, a: win.Put(a.two, 0, (0, 2, MPI.INT32_T))),
    (MPI.ERR_COUNT, "Fetch_and_op: result has 2 elements", lambda win, a: win.Fetch_and_op(a.one, a.two, 0)),
    (MPI.ERR_COUNT, "Fetch_and_op: origin has 2 elements",
     lambda win, a: win.Fetch_and_op(a.two, a.one, 0, op=MPI.NO_OP)),
    (MPI.ERR_TYPE, "Compare_and_swap: compare has elements of int32",
     lambda win, a: win.Compare_and_swap(a.one, a.short, a.one, 0)),
    (MPI.ERR_TYPE, "Compare_and_swap: elements of complex128 have 16 bytes",
     lambda win, a: win.Compare_and_swap(a.wide, a.wide, a.wide, 0)),
    (MPI.ERR_RMA_SYNC, "Lock_all: the epoch of Lock", lambda win, a: win.Lock_all()),
    (MPI.ERR_LOCKTYPE, "Lock: lock_type=7", lambda win, a: win.Lock(0, 7)),
    (MPI.ERR_RMA_SYNC, "Fence: the epoch of Lock", lambda win, a: win.Fence()),
    (MPI.ERR_RANK, "Unlock: rank=9: use 0 to", lambda win, a: win.Unlock(9)),
    (MPI.ERR_RMA_SYNC, "Complete: no Start", lambda win, a: win.Complete()),
    (MPI.ERR_RMA_SYNC, "Wait: no Post", lambda win, a: win.Wait()),
    (MPI.ERR_RMA_SYNC, "Test: no Post", lambda win, a: win.Test()),
    (MPI.ERR_RMA_SYNC, "Start: the epoch", lambda win, a: win.Start(MPI.GROUP_EMPTY)),
    (MPI.ERR_GROUP, "Post: group=", lambda win, a: win.Post(MPI.GROUP_NULL)),
]  # fmt: skip


def make_known(win: mpicomm.Win, xp: Any) -> None:
    """Make calls that change nothing in a window of sixes, so that later calls of the kind are known."""
    for count in (1, 2):
        win.Put(xp.full(count, 6), 0)
        win.Put(xp.full(count, 6), 0, (0, 2 * count, MPI.INT32_T))
        win.Get(xp.full(count, 6), 0)
        win.Accumulate(xp.zeros(count, np.int64), 0)
        win.Get_accumulate(xp.zeros(count, np.int64), xp.zeros(count, np.int64), 0)
    win.Fetch_and_op(xp.zeros(1, np.int64), xp.zeros(1, np.int64), 0)


def test_wrong_calls_are_refused_and_write_nothing(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, arrays = window(4, fill=6), Arrays(xp)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Lock(0, MPI.LOCK_SHARED)
    for known in (False, True):
        if known:
            make_known(win, xp)
        for error_class, words, act in REFUSED:
            called = "Win." if words[0].isupper() else ""
            with pytest.raises(InvalidUsageError, match=f"{called}{words}") as caught:
                act(win, arrays)
            assert isinstance(caught.value, MPI.Exception), words
            assert caught.value.Get_error_class() == error_class, words
        for bad in (1.5, (0, 1)):
            with pytest.raises(TypeError, match="is no integer"):
                win.Fetch_and_op(arrays.one, arrays.one, 0, bad)  # type: ignore[arg-type]
    win.Unlock(0)
    win.Fence()
    assert to_host(win.tomemory().view(np.int64)).tolist() == [6] * 4


CALLS: dict[str, Act] = {
    "Put": lambda win, a: win.Put(a.one, 0),
    "Get": lambda win, a: win.Get(a.one, 0),
    "Accumulate": lambda win, a: win.Accumulate(a.one, 0),
    "Fetch_and_op": lambda win, a: win.Fetch_and_op(a.one, a.one, 0),
    "Compare_and_swap": lambda win, a: win.Compare_and_swap(a.one, a.one, a.one, 0),
    "Flush": lambda win, a: win.Flush(0),
    "Flush_all": lambda win, a: win.Flush_all(),
    "Unlock": lambda win, a: win.Unlock(0),
    "Unlock_all": lambda win, a: win.Unlock_all(),
}


def test_calls_outside_of_an_epoch_are_refused(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, arrays = window(4, fill=6), Arrays(xp)
    for _ in range(2):
        for name, call in CALLS.items():
            with pytest.raises(MPI.Exception, match=rf"Win\.{name}: ") as caught:
                call(win, arrays)
            assert caught.value.Get_error_class() == MPI.ERR_RMA_SYNC, name
        win.Fence()
        make_known(win, xp)
        win.Fence(MPI.MODE_NOSUCCEED)  # also after a fence epoch that is over
    assert to_host(win.tomemory().view(np.int64)).tolist() == [6] * 4


def test_calls_on_a_freed_window_are_refused(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, arrays = window(2, fill=6), Arrays(xp)
    win.Fence()
    make_known(win, xp)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Free()
    others: list[Act] = [lambda win, _: win.Fence(), lambda win, _: win.Lock(0), lambda win, _: win.Shared_query(0)]
    for call in (*CALLS.values(), *others):
        with pytest.raises(MPI.Exception, match="the window was freed") as caught:
            call(win, arrays)
        assert caught.value.Get_error_class() == MPI.ERR_WIN


def test_access_under_the_lock_of_another_rank_is_refused(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow
) -> None:
    win = window(1)
    win.Lock(comm.rank)
    if comm.size > 1:
        with pytest.raises(MPI.Exception, match="is in no epoch"):
            win.Put(xp.ones(1, np.int64), (comm.rank + 1) % comm.size)
    win.Unlock(comm.rank)


THREE = np.arange(3.0)
COLUMN = MPI.DOUBLE.Create_vector(3, 1, 4)
OUTSIDE: dict[str, Callable[[mpicomm.Win, int], object]] = {
    "Put": lambda win, rank: win.Put(THREE, rank, 8),
    "Put far away": lambda win, rank: win.Put(THREE, rank, 100),
    "Put without a displacement": lambda win, rank: win.Put(np.zeros(11), rank),
    "Put with a type": lambda win, rank: win.Put([THREE, MPI.DOUBLE], rank, (8, 3, MPI.DOUBLE)),
    "Put with a count": lambda win, rank: win.Put(THREE, rank, [8, 3]),
    "Put of a column": lambda win, rank: win.Put(THREE, rank, (2, 1, COLUMN)),
    "Get": lambda win, rank: win.Get(np.zeros(3), rank, 8),
    "Rput": lambda win, rank: win.Rput(THREE, rank, 8),
    "Rget": lambda win, rank: win.Rget(np.zeros(3), rank, 8),
    "Accumulate": lambda win, rank: win.Accumulate(THREE, rank, 8),
    "Raccumulate": lambda win, rank: win.Raccumulate(THREE, rank, 8),
    "Get_accumulate": lambda win, rank: win.Get_accumulate(THREE, np.zeros(3), rank, 8),
    "Rget_accumulate": lambda win, rank: win.Rget_accumulate(THREE, np.zeros(3), rank, 8),
    "Fetch_and_op": lambda win, rank: win.Fetch_and_op(np.ones(1), np.zeros(1), rank, 10),
    "Compare_and_swap": lambda win, rank: win.Compare_and_swap(
        np.ones(1, int), np.ones(1, int), np.ones(1, int), rank, 10
    ),
}


@pytest.mark.parametrize("make", ["Allocate", "Create", "Allocate_shared"])
def test_elements_outside_of_a_window_of_mpi_are_refused(host_comm: mpicomm.Communicator, make: str) -> None:
    rank = (host_comm.rank + 1) % host_comm.size
    memory: Any = np.zeros(10) if make == "Create" else 80
    win = getattr(mpicomm.Win, make)(memory, 8, comm=host_comm)
    win.tomemory()[:] = 0  # MPI's memory has any content
    COLUMN.Commit()
    win.Fence()
    for name, call in OUTSIDE.items():
        text = (
            rf"Win\.{name.split()[0]}: target: displacement \d+ reaches from byte \d+ to byte \d+ of the window on rank"
        )
        with pytest.raises(MPI.Exception, match=text) as caught:
            call(win, rank)
        assert caught.value.Get_error_class() == MPI.ERR_RMA_RANGE
        assert isinstance(caught.value, InvalidUsageError)
    with pytest.raises(MPI.Exception, match="displacement -1 is negative"):
        win.Put(THREE, rank, -1)
    win.Put(THREE, rank, 7)
    win.Put([THREE, 2, MPI.DOUBLE], rank, [1, 2])
    win.Put(THREE, rank, (1, 1, COLUMN))
    win.Put(THREE, MPI.PROC_NULL, 100)
    win.Fence()
    assert win.tomemory().view("d").tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 1, 2]
    win.Free()


WRONG: list[tuple[str, Callable[[Any], object]]] = [
    (r"Win\.Fence: assertion 'x' is no integer", lambda win: win.Fence("x")),
    (r"Win\.Lock: rank 'x' is no integer", lambda win: win.Lock("x")),
    (r"Win\.Put: target_rank 'x' is no integer", lambda win: win.Put(THREE, "x")),
    (r"Win\.Flush: rank None is no integer", lambda win: win.Flush(None)),
    (r"Win\.Shared_query: rank 'x' is no", lambda win: win.Shared_query("x")),
]


@pytest.mark.parametrize("place", ["mpi", "device"])
def test_arguments_of_wrong_classes_are_named(comm: mpicomm.Communicator, place: str) -> None:
    win = mpicomm.Win.Allocate(80, 8, comm=comm, place=place)
    for text, act in WRONG:
        with pytest.raises(TypeError, match=text):
            act(win)
    win.Free()


@pytest.mark.parametrize("place", ["auto", "mpi", "device"])
def test_a_communicator_of_a_wrong_class_is_named(place: str) -> None:
    nobody: Any = None
    for make, arguments in (("Allocate", (8,)), ("Allocate_shared", (8,)), ("Create", (None,)), ("Create_dynamic", ())):
        with pytest.raises(TypeError, match=rf"Win\.{make}: comm=None is no MPI\.Intracomm: pass a Communicator"):
            getattr(mpicomm.Win, make)(*arguments, comm=nobody, place=place)
        with pytest.raises(TypeError, match=rf"Win\.{make}: info=None is no MPI\.Info"):
            getattr(mpicomm.Win, make)(*arguments, info=nobody, place=place)


NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
PAIR_TYPE = np.dtype([("value", "f8"), ("index", "i4")], align=True)


@pytest.fixture
def win(host_comm: mpicomm.Communicator) -> Iterator[mpicomm.Win]:
    win = mpicomm.Win.Allocate(64, 1, comm=host_comm, place="mpi")
    win.tomemory()[:] = 0
    win.Lock_all()
    settle(host_comm)
    yield win
    win.Unlock_all()
    win.Free()


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
    origin = np.ones(1, dtype_or_skip(name))
    calls = ("Accumulate", "Raccumulate", "Get_accumulate", "Rget_accumulate", "Fetch_and_op")
    for call, op in itertools.product(calls, (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)):
        with pytest.raises(InvalidUsageError, match=f"Win.{call}: op=.* of {name}: .*place='device'") as caught:
            accumulate(win, call, origin, op)
        assert caught.value.Get_error_class() == MPI.ERR_TYPE  # type: ignore[attr-defined]
    assert not win.tomemory().any()


@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats_move(win: mpicomm.Win, name: str) -> None:
    dtype, rank = dtype_or_skip(name), win.group_rank
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
        (MPI.SUM, [np.zeros(1, PAIR_TYPE), 1, MPI.DOUBLE_INT]),
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
    pair = np.array([(2.0, 1)], PAIR_TYPE)
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
