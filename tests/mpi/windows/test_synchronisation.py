"""Groups, locks and flushes of windows of device memory, and ranks that do not come."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.fakes.window_devices import WindowDevice
from tests.helpers.rigs.communicators import array_module, communicator, patience_s, to_host
from tests.helpers.rigs.message_rigs import on_window_device
from tests.mpi.windows.conftest import MakeWindow


def group_of(win: mpicomm.Win, *ranks: int) -> MPI.Group:
    everyone = win.Get_group()
    some = everyone.Incl(sorted(set(ranks)))
    everyone.Free()
    return some


def test_target_of_a_lock_takes_no_part(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, last = window(comm.size), comm.size - 1
    comm.Barrier()
    if comm.rank == last:
        time.sleep(0.1)  # neither in MPI nor in mpicomm
    else:
        for turn in range(20):
            win.Lock_all() if turn % 2 else win.Lock(last, MPI.LOCK_SHARED)
            win.Put(xp.array([1 + comm.rank]), last, comm.rank)
            win.Flush(last)
            seen = xp.zeros(1, np.int64)
            win.Get(seen, last, comm.rank)
            win.Flush_local_all()
            win.Unlock_all() if turn % 2 else win.Unlock(last)
            assert int(to_host(seen)[0]) == 1 + comm.rank
    comm.check()
    comm.Barrier()
    win.Lock(comm.rank)
    win.Sync()
    mine = to_host(win.tomemory().view(np.int64)).tolist()
    win.Unlock(comm.rank)
    if comm.rank == last:
        assert mine[:-1] == list(range(1, comm.size))


def test_exclusive_lock_keeps_others_out(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, rounds = window(1), 30
    number = xp.zeros(1, np.int64)
    comm.Barrier()
    for _ in range(rounds):  # a read and a write that no rank may come between
        win.Lock(0)
        win.Get(number, 0)
        win.Flush(0)
        number += 1
        win.Put(number, 0)
        win.Unlock(0)
    comm.check()
    comm.Barrier()
    if comm.rank == 0:
        assert int(to_host(win.tomemory().view(np.int64))[0]) == rounds * comm.size


def test_rank_that_takes_a_lock_again_and_again_keeps_no_rank_out(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow
) -> None:
    win, turns, one, seen = window(2), 20, xp.ones(1, np.int64), xp.zeros(1, np.int64)
    comm.Barrier()
    for number in range(1 << 30 if comm.rank == 0 else turns):
        alone = (number + comm.rank) % 2 == 0
        win.Lock(0, MPI.LOCK_EXCLUSIVE if alone else MPI.LOCK_SHARED)
        if comm.rank == 0:
            win.Get(seen, 0)
        else:
            win.Accumulate(one, 0)
        win.Unlock(0)
        comm.check()
        if comm.rank == 0 and int(to_host(seen)[0]) == turns * (comm.size - 1):
            break
    comm.Barrier()


def test_assertions_of_mpi_are_taken(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(1)
    group = group_of(win, *range(comm.size))
    win.Fence(MPI.MODE_NOPRECEDE)
    win.Fence(MPI.MODE_NOSUCCEED | MPI.MODE_NOSTORE | MPI.MODE_NOPUT)
    win.Lock(0, MPI.LOCK_SHARED, MPI.MODE_NOCHECK)
    win.Unlock(0)
    win.Lock_all(MPI.MODE_NOCHECK)
    win.Unlock_all()
    win.Post(group, MPI.MODE_NOCHECK)
    win.Start(group, MPI.MODE_NOCHECK)
    win.Complete()
    win.Wait()
    with pytest.raises(MPI.Exception, match=r"Win\.Fence: assertion=") as caught:
        win.Fence(MPI.MODE_NOCHECK)
    assert caught.value.Get_error_class() == MPI.ERR_ASSERT


class Alarm(Exception):
    """The exception of the handler of SIGALRM in these tests."""


@pytest.fixture
def completing(comm: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls be complete on return, as under `mpicomm.install`, so that the host waits in them."""
    monkeypatch.setattr(comm._session.backend, "completes", True)


def require_alarm(call: Callable[..., object], *arguments: Any) -> None:
    """Require that an exception of a signal handler leaves a call that waits."""

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Alarm):
            call(*arguments)
            time.sleep(10)  # a wait of CUDA runs handlers only when it ends, and may have ended before the alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["Fence", "Start", "Lock"])
def test_exception_of_a_handler_ends_only_the_wait_of_the_host(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, completing: None, call: str
) -> None:
    win = window(1)
    first, second = group_of(win, 0), group_of(win, 1)
    mine, plain = win.tomemory().view(np.int64), MPI.Intracomm(comm)
    if call == "Lock" and comm.rank == 1:
        win.Lock(1)
    plain.Barrier()
    if comm.rank == 0:
        if call == "Fence":
            require_alarm(win.Fence)
            win.Put(xp.array([7]), 1)
        else:
            require_alarm(getattr(win, call), second if call == "Start" else 1)
            with pytest.raises(MPI.Exception, match=r"the epoch of Start is open|has locked rank 1 already"):
                getattr(win, call)(second if call == "Start" else 1)
            win.Put(xp.array([7]), 1)
            win.Complete() if call == "Start" else win.Unlock(1)
    else:
        time.sleep(0.5)  # the alarm comes before
        if call == "Fence":
            win.Fence()
        elif comm.rank == 1 and call == "Lock":
            win.Put(xp.array([5]), 1)
            win.Unlock(1)
        elif comm.rank == 1:
            win.Post(first)
            win.Wait()
    if call == "Fence":
        win.Fence()
    plain.Barrier()
    comm.check()
    win.Lock(comm.rank) if call == "Lock" else None
    assert to_host(mine).tolist() == [7 if comm.rank == 1 else 0]
    win.Unlock(comm.rank) if call == "Lock" else None
    first.Free()
    second.Free()


@pytest.mark.mpi(min_size=2)
def test_exception_of_a_handler_ends_the_epoch_of_wait(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, completing: None
) -> None:
    win, plain = window(1), MPI.Intracomm(comm)
    first, second = group_of(win, 0), group_of(win, 1)
    if comm.rank == 0:
        win.Post(second)
        require_alarm(win.Wait)
        with pytest.raises(MPI.Exception, match="no Post came before it"):
            win.Wait()
    plain.Barrier()
    if comm.rank == 1:
        win.Start(first)
        win.Put(xp.array([7]), 0)
        win.Complete()
    plain.Barrier()
    comm.check()
    win.Fence()
    assert to_host(win.tomemory().view(np.int64)).tolist() == [0 if comm.rank else 7]
    first.Free()
    second.Free()


@pytest.mark.parametrize("call", ["Fence", "Lock", "Unlock"])
def test_synchronisation_that_ends_halfway_refuses_later_calls(
    device: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def torn(*_: object, **__: object) -> None:
        raise Alarm

    with contextlib.ExitStack() as stack:
        if device == "cpu":
            comm, _ = stack.enter_context(on_window_device())
        else:
            comm = stack.enter_context(communicator(device))
        win = mpicomm.Win.Allocate(8, 8, comm=comm, place="device")
        if call == "Unlock":
            win.Lock(comm.rank)
        monkeypatch.setattr(win._steps, "signal_and_wait" if call == "Fence" else "lock", torn)
        with pytest.raises(Alarm):
            win.Fence() if call == "Fence" else getattr(win, call)(comm.rank)
        for again in (win.Fence, win.Lock_all, win.Sync):
            with pytest.raises(mpicomm.InvalidUsageError, match="a signal handler, has ended a synchronisation"):
                again()
        win.Free()


@pytest.mark.gpu_alone  # doubles of GPUs have no records of faults
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["Fence", "Start", "Wait", "Lock"])
def test_rank_that_does_not_come_is_named(device: str, call: str) -> None:
    with communicator(device, timeout_s=patience_s(device)) as comm, array_module(comm):
        win = mpicomm.Win.Allocate(8, 8, comm=comm, place="device")
        last, other = comm.size - 1, group_of(win, 0)
        words = {
            "Fence": "Win.Fence: number 1 from rank 0 did not come",
            "Start": "Win.Start: the Post: number 1 from rank 0 did not come",
            "Wait": "Win.Wait: the Complete: number 1 from rank 0 did not come",
            "Lock": "Win.Lock: rank 0 holds the lock, and did not give it up",
        }[call]
        if call == "Lock" and comm.rank == 0:
            win.Lock(last)
            comm.check()
        comm.Barrier()
        if comm.rank == last:
            with pytest.raises(CollectiveTimeoutError, match=words) as caught:
                if call == "Fence":
                    win.Fence()
                elif call == "Start":
                    win.Start(other)
                elif call == "Wait":
                    win.Post(other)
                    win.Wait()
                else:
                    win.Lock(last)
                comm.check()
            assert caught.value.ranks == (0,)
            with pytest.raises(CollectiveTimeoutError, match=words):
                win.Fence()
        comm.Barrier()


DTYPES = ("i8", "i1", "i2", "i4", "u1", "u2", "u4", "u8", "f4", "f8", "c8", "?")
EXAMPLES = int(os.environ.get("TEST_EPOCHS", str(len(DTYPES))))
COUNT = 24
KINDS = ("Fence", "Lock", "Lock_all", "Post")
BUFFERS = ("device", "host", "derived on device", "derived on host")
LATE_S = 0.02
FORMS = ("place", "counted", "typed", "vector")
Combine = Callable[[Any, Any], Any]
UPDATES: dict[str, tuple[MPI.Op, Combine, str]] = {
    "SUM": (MPI.SUM, np.add, "iufc"),
    "PROD": (MPI.PROD, np.multiply, "iu"),  # products of floats would not be exact
    "MAX": (MPI.MAX, np.maximum, "iuf"),
    "MIN": (MPI.MIN, np.minimum, "iuf"),
    "LAND": (MPI.LAND, np.logical_and, "iub"),
    "LOR": (MPI.LOR, np.logical_or, "iub"),
    "LXOR": (MPI.LXOR, np.logical_xor, "iub"),
    "BAND": (MPI.BAND, np.bitwise_and, "iu"),
    "BOR": (MPI.BOR, np.bitwise_or, "iu"),
    "BXOR": (MPI.BXOR, np.bitwise_xor, "iu"),
}
"""Operations, and the kinds of types whose elements they may update in any order."""
FETCHES: dict[str, tuple[MPI.Op, Combine, str]] = {
    **UPDATES,
    "REPLACE": (MPI.REPLACE, lambda old, new: new, "iufcb"),
    "NO_OP": (MPI.NO_OP, lambda old, new: old, "iufcb"),
}


@dataclass(frozen=True)
class Access:
    """A call on a part: what it does with which buffers, and whether it asks for a request if MPI allows that."""

    what: str
    op: str
    target: int
    places: range
    buffers: tuple[str, str]
    form: str
    values: Any
    before: list[Any] | None
    asks: bool


class Player:
    """Plays epochs on a window and on ``model``, the parts of all ranks. The choices are the same on all ranks.

    In an epoch an element is either put or fetched by one rank, or updated by any ranks with one operation that has no
    order, or read. MPI allows no more.
    """

    def __init__(self, comm: mpicomm.Communicator, xp: Any, random: Random, dtype: np.dtype[Any]) -> None:
        self.comm, self.xp, self.random, self.dtype = comm, xp, random, dtype
        self.type = MPI.Datatype.fromcode(dtype.char)
        self.win = mpicomm.Win.Allocate(COUNT * dtype.itemsize, dtype.itemsize, comm=comm, place="device")
        self.mine = self.win.tomemory().view(dtype)
        self.mine[...] = 0
        self.model = np.zeros((comm.size, COUNT), dtype)
        self.reads: list[tuple[Any, int, list[Any]]] = []
        self.origins_of_calls: list[Any] = []
        device: Any = comm._session.backend
        self.double = device if isinstance(device, WindowDevice) else None
        self.every_second = [self.type.Create_vector(count, 1, 2).Commit() for count in range(9)]
        self.win.Fence(MPI.MODE_NOSUCCEED)  # no rank accesses a part that its rank has yet to fill

    def play(self, epochs: int) -> None:
        ranks = range(self.comm.size)
        for _ in range(epochs):
            kind = self.random.choice(KINDS)
            # The ranks that access each rank: in an epoch of groups some, else all.
            self.origins = [[rank for rank in ranks if kind != "Post" or self.random.random() < 0.7] for _ in ranks]
            accesses = [each for target in ranks for each in self.accesses(target)]
            self.random.shuffle(accesses)
            self.begin(kind)
            if self.double is not None:
                self.double.enqueue(0, lambda: time.sleep(LATE_S))
            for origin, access in accesses:
                if origin == self.comm.rank:
                    self.carry_out(access, kind)
            self.end(kind)
            for each in self.origins_of_calls:
                self.now(each)[...] = 99  # they are free, for every stream
            for seen, step, expected in self.reads:
                assert self.now(seen)[::step].tolist() == expected
                assert step == 1 or not self.now(seen)[1::2].any()
            assert self.now(self.mine).tolist() == self.model[self.comm.rank].tolist()
            self.reads.clear()
            self.origins_of_calls.clear()
            self.comm.Barrier()  # after the comparison, before the next rank takes a lock
        self.win.Free()
        for each in self.every_second:
            each.Free()

    def now(self, array: Any) -> Any:
        """Return the content of an array. A double does not wait for it, as its calls are complete on return."""
        return array.memory if isinstance(array, DeviceArray) else to_host(array)

    def accesses(self, target: int) -> list[tuple[int, Access]]:
        """Return accesses to disjoint pieces of a part, and carry them out on the model."""
        accesses, start = [], 0
        while start < COUNT and self.origins[target]:
            count = min(self.random.randint(1, 8), COUNT - start)
            step = self.random.choice((1, 1, 2))
            accesses += self.piece(target, range(start, start + count, step))
            start += count
        return accesses

    def piece(self, target: int, places: range) -> list[tuple[int, Access]]:
        what = self.random.choice(("Put", "Get", "Fetch", "Update", "Update"))
        op = self.random.choice([op for op, row in (FETCHES if what == "Fetch" else UPDATES).items() if self.has(row)])
        origins = [self.random.choice(self.origins[target])]
        if what == "Update":
            origins = [rank for rank in self.origins[target] if self.random.random() < 0.7]
        part = self.model[target][places.start : places.stop : places.step]
        made = []
        for origin in origins:
            buffers = self.random.choice(BUFFERS), self.random.choice(BUFFERS)
            form, asks = self.random.choice(FORMS), self.random.random() < 0.3
            if form in ("place", "counted") and any(kind.startswith("derived") for kind in buffers):
                form = "typed"  # else the target would have the datatype of the buffer
            values = np.array([self.random.randint(-1000, 1000) for _ in places]).astype(self.dtype)
            before = part.tolist() if what in ("Get", "Fetch") else None
            if what == "Put":
                part[:] = values
            elif what != "Get":
                part[:] = FETCHES[op][1](part.copy(), values)
            made.append((origin, Access(what, op, target, places, buffers, form, values, before, asks)))
        return made

    def has(self, row: tuple[MPI.Op, Combine, str]) -> bool:
        return self.dtype.kind in row[2]

    def carry_out(self, access: Access, kind: str) -> None:
        what, target, places, before = access.what, access.target, access.places, access.before
        given, origin, _ = self.local(access.buffers[0], access.values)
        seen, result, step = self.local(access.buffers[1], 0 * access.values)
        there, datatype = self.spec(places, access.form)
        name = {"Put": "Put", "Get": "Get", "Fetch": "Get_accumulate"}.get(what, "Accumulate")
        arguments = [origin, target, there]
        if what == "Get":
            arguments[0] = result
        elif what != "Put":
            arguments = [origin, *([result] if what == "Fetch" else []), target, there, FETCHES[access.op][0]]
        if what == "Fetch" and len(places) == 1 and access.form == "place" and not access.asks:
            name, arguments[3] = "Fetch_and_op", places.start
        if kind == "Lock":
            self.win.Lock(target, MPI.LOCK_SHARED if (target + self.comm.rank) % 2 else MPI.LOCK_EXCLUSIVE)
        if access.asks and kind in ("Lock", "Lock_all"):
            getattr(self.win, "R" + name.lower())(*arguments).Wait()
        else:
            getattr(self.win, name)(*arguments)
        if kind == "Lock":
            self.win.Unlock(target)
        self.origins_of_calls.append(given)
        if before is not None:
            self.reads.append((seen, step, before))
        if datatype is not None:
            datatype.Free()

    def spec(self, places: range, form: str) -> tuple[Any, MPI.Datatype | None]:
        """Return a target in a form of mpi4py, and the datatype that it needs."""
        if places.step == 1 and form != "vector":
            found: Any = places.start
            if form != "place":
                counted = [places.start, len(places), self.type][: FORMS.index(form) + 1]
                found = tuple(counted) if len(places) % 2 else counted
            return found, None
        datatype = self.type.Create_vector(len(places), 1, places.step).Commit()
        return (places.start, 1, datatype), datatype

    def local(self, kind: str, values: Any) -> tuple[Any, Any, int]:
        """Return an array with ``values``, the buffer argument, and the distance of its elements."""
        module, step = np if kind.endswith("host") else self.xp, 2 if kind.startswith("derived") else 1
        content = np.zeros(step * len(values), self.dtype)
        content[::step] = values
        array = module.asarray(content)
        return array, array if step == 1 else [array, 1, self.every_second[len(values)]], step

    def begin(self, kind: str) -> None:
        if kind == "Fence":
            self.win.Fence()
        elif kind == "Lock_all":
            self.win.Lock_all()
        elif kind == "Post":
            targets = [rank for rank, origins in enumerate(self.origins) if self.comm.rank in origins]
            for begin, ranks in ((self.win.Post, self.origins[self.comm.rank]), (self.win.Start, targets)):
                group = group_of(self.win, *ranks)
                begin(group)
                group.Free()

    def end(self, kind: str) -> None:
        if kind == "Fence":
            self.win.Fence(MPI.MODE_NOSUCCEED)
            return
        if kind == "Lock_all":
            self.win.Flush(self.random.randrange(self.comm.size))
            self.win.Unlock_all()
        elif kind == "Post":
            self.win.Complete()
            if self.random.random() < 0.5:
                self.win.Wait()
            else:
                while not self.win.Test():
                    pass
            return
        self.comm.check()
        self.comm.Barrier()


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_random_epochs(comm: mpicomm.Communicator, xp: Any, seed: int) -> None:
    Player(comm, xp, Random(seed), np.dtype(DTYPES[seed % len(DTYPES)])).play(1 + seed % 6)
