"""Wrong use of windows of device memory: an error that names the argument and the rank, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.rigs.communicators import to_host
from tests.mpi.windows.conftest import MakeWindow

Act = Callable[[mpicomm.Win, Any], object]
USERS = MPI.Op.Create(lambda a, b, datatype: None)
REFUSED: dict[str, tuple[int, str, Act]] = {
    "displacement outside": (
        MPI.ERR_RMA_RANGE,
        r"Win.Put: target: displacement 3 reaches from byte 24 to byte 40 of the window on rank 0",
        lambda win, xp: win.Put(xp.ones(2, np.int64), 0, 3),
    ),
    "displacement negative": (
        MPI.ERR_DISP,
        "Win.Get: target: displacement -1 is negative",
        lambda win, xp: win.Get(xp.ones(2, np.int64), 0, -1),
    ),
    "target longer than the origin": (
        MPI.ERR_TRUNCATE,
        "Win.Put: target has 24 bytes, and origin has 16",
        lambda win, xp: win.Put(xp.ones(2, np.int64), 0, (0, 3)),
    ),
    "target shorter than the origin": (
        MPI.ERR_COUNT,
        "Win.Accumulate: target has 8 bytes, and origin has 16",
        lambda win, xp: win.Accumulate(xp.ones(2, np.int64), 0, (0, 1)),
    ),
    "count negative": (
        MPI.ERR_COUNT,
        "Win.Put: target: count -2 is negative",
        lambda win, xp: win.Put(xp.ones(2, np.int64), 0, (0, -2)),
    ),
    "no such rank": (
        MPI.ERR_RANK,
        "Win.Rput: target_rank=9: use 0 to",
        lambda win, xp: win.Rput(xp.ones(2, np.int64), 9),
    ),
    "types that differ": (
        MPI.ERR_TYPE,
        "Win.Accumulate: origin has elements of int64, and target of float64",
        lambda win, xp: win.Accumulate(xp.ones(2, np.int64), 0, (0, 2, MPI.DOUBLE)),
    ),
    "results that differ": (
        MPI.ERR_TYPE,
        "Win.Get_accumulate: result has elements of float64, and target of int64",
        lambda win, xp: win.Get_accumulate(xp.ones(2, np.int64), xp.ones(2), 0),
    ),
    "result too short": (
        MPI.ERR_COUNT,
        "Win.Get_accumulate: result has 8 bytes, and origin has 16",
        lambda win, xp: win.Get_accumulate(xp.ones(2, np.int64), xp.ones(1, np.int64), 0),
    ),
    "operation of pairs": (
        MPI.ERR_OP,
        "Win.Accumulate: op=maxloc is not defined for int64",
        lambda win, xp: win.Accumulate(xp.ones(2, np.int64), 0, op=MPI.MAXLOC),
    ),
    "sum of pairs": (
        MPI.ERR_OP,
        "Win.Accumulate: op=sum is not defined for",
        lambda win, xp: win.Accumulate([xp.ones(2, np.int64), 2, MPI.TWOINT], 0),
    ),
    "operation of the program": (
        MPI.ERR_OP,
        "Win.Accumulate: op=<mpi4py.MPI.Op object",
        lambda win, xp: win.Accumulate(xp.ones(2, np.int64), 0, op=USERS),
    ),
    "fetch outside": (
        MPI.ERR_RMA_RANGE,
        "Win.Get_accumulate: target: displacement 3 reaches from byte 24 to byte 40",
        lambda win, xp: win.Get_accumulate(xp.ones(2, np.int64), xp.ones(2, np.int64), 0, 3),
    ),
    "number outside": (
        MPI.ERR_RMA_RANGE,
        "Win.Fetch_and_op: target: displacement 4 reaches from byte 32 to byte 40",
        lambda win, xp: win.Fetch_and_op(xp.ones(1, np.int64), xp.ones(1, np.int64), 0, 4),
    ),
    "update at a negative displacement": (
        MPI.ERR_DISP,
        "Win.Accumulate: target: displacement -1 is negative",
        lambda win, xp: win.Accumulate(xp.ones(2, np.int64), 0, -1),
    ),
    "other elements": (
        MPI.ERR_COUNT,
        "pass as many elements",
        lambda win, xp: win.Put(xp.ones(2, np.int64), 0, (0, 2, MPI.INT32_T)),
    ),
    "average": (
        MPI.ERR_OP,
        "Win.Accumulate: op=mpicomm.AVG cannot update",
        lambda win, xp: win.Accumulate(xp.ones(2), 0, op=mpicomm.AVG),
    ),
    "operation that the type lacks": (
        MPI.ERR_OP,
        "op=band is not defined for float64",
        lambda win, xp: win.Accumulate(xp.ones(2), 0, op=MPI.BAND),
    ),
    "several elements fetched": (
        MPI.ERR_COUNT,
        "Win.Fetch_and_op: result has 2 elements",
        lambda win, xp: win.Fetch_and_op(xp.ones(1, np.int64), xp.ones(2, np.int64), 0),
    ),
    "several origins of one element": (
        MPI.ERR_COUNT,
        "Win.Fetch_and_op: origin has 2 elements",
        lambda win, xp: win.Fetch_and_op(xp.ones(2, np.int64), xp.ones(1, np.int64), 0, op=MPI.NO_OP),
    ),
    "swap of types that differ": (
        MPI.ERR_TYPE,
        "Win.Compare_and_swap: compare has elements of int32",
        lambda win, xp: win.Compare_and_swap(xp.ones(1, np.int64), xp.ones(1, np.int32), xp.ones(1, np.int64), 0),
    ),
    "swap of wide elements": (
        MPI.ERR_TYPE,
        "Win.Compare_and_swap: elements of complex128 have 16 bytes",
        lambda win, xp: win.Compare_and_swap(xp.ones(1, complex), xp.ones(1, complex), xp.ones(1, complex), 0),
    ),
    "second lock": (MPI.ERR_RMA_SYNC, "Win.Lock_all: the epoch of Lock", lambda win, xp: win.Lock_all()),
    "lock of no type": (MPI.ERR_LOCKTYPE, "Win.Lock: lock_type=7", lambda win, xp: win.Lock(0, 7)),
    "fence under a lock": (MPI.ERR_RMA_SYNC, "Win.Fence: the epoch of Lock", lambda win, xp: win.Fence()),
    "unlock of another rank": (MPI.ERR_RANK, "Win.Unlock: rank=9: use 0 to", lambda win, xp: win.Unlock(9)),
    "complete without start": (MPI.ERR_RMA_SYNC, "Win.Complete: no Start", lambda win, xp: win.Complete()),
    "wait without post": (MPI.ERR_RMA_SYNC, "Win.Wait: no Post", lambda win, xp: win.Wait()),
    "test without post": (MPI.ERR_RMA_SYNC, "Win.Test: no Post", lambda win, xp: win.Test()),
    "start under a lock": (MPI.ERR_RMA_SYNC, "Win.Start: the epoch", lambda win, xp: win.Start(MPI.GROUP_EMPTY)),
    "no group": (MPI.ERR_GROUP, "Win.Post: group=", lambda win, xp: win.Post(MPI.GROUP_NULL)),
}


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
    win = window(4, fill=6)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Lock(0, MPI.LOCK_SHARED)
    for known in (False, True):
        if known:
            make_known(win, xp)
        for name, (error_class, words, act) in REFUSED.items():
            with pytest.raises(InvalidUsageError, match=words) as caught:
                act(win, xp)
            assert isinstance(caught.value, MPI.Exception), name
            assert caught.value.Get_error_class() == error_class, name
        for bad in (1.5, (0, 1)):
            with pytest.raises(TypeError, match="is no integer"):
                win.Fetch_and_op(xp.ones(1, np.int64), xp.ones(1, np.int64), 0, bad)  # type: ignore[arg-type]
    win.Unlock(0)
    win.Fence()
    assert to_host(win.tomemory().view(np.int64)).tolist() == [6] * 4


CALLS: dict[str, Act] = {
    "Put": lambda win, xp: win.Put(xp.ones(1, np.int64), 0),
    "Get": lambda win, xp: win.Get(xp.ones(1, np.int64), 0),
    "Accumulate": lambda win, xp: win.Accumulate(xp.ones(1, np.int64), 0),
    "Fetch_and_op": lambda win, xp: win.Fetch_and_op(xp.ones(1, np.int64), xp.ones(1, np.int64), 0),
    "Compare_and_swap": lambda win, xp: win.Compare_and_swap(
        xp.ones(1, np.int64), xp.ones(1, np.int64), xp.ones(1, np.int64), 0
    ),
    "Flush": lambda win, xp: win.Flush(0),
    "Flush_all": lambda win, xp: win.Flush_all(),
    "Unlock": lambda win, xp: win.Unlock(0),
    "Unlock_all": lambda win, xp: win.Unlock_all(),
}


def test_calls_outside_of_an_epoch_are_refused(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(4, fill=6)
    for _ in range(2):
        for name, call in CALLS.items():
            with pytest.raises(MPI.Exception, match=rf"Win\.{name}: ") as caught:
                call(win, xp)
            assert caught.value.Get_error_class() == MPI.ERR_RMA_SYNC, name
        win.Fence()
        make_known(win, xp)
        win.Fence(MPI.MODE_NOSUCCEED)  # also after a fence epoch that is over
    assert to_host(win.tomemory().view(np.int64)).tolist() == [6] * 4


def test_calls_on_a_freed_window_are_refused(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(2, fill=6)
    win.Fence()
    make_known(win, xp)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Free()
    others: list[Act] = [lambda win, _: win.Fence(), lambda win, _: win.Lock(0), lambda win, _: win.Shared_query(0)]
    for call in (*CALLS.values(), *others):
        with pytest.raises(MPI.Exception, match="the window was freed") as caught:
            call(win, xp)
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
