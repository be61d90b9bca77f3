"""Groups, locks and flushes of windows of device memory, and ranks that do not come."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError
from tests.helpers.rigs.communicators import array_module, communicator, patience_s, to_host
from tests.helpers.rigs.window_rigs import on_window_device
from tests.mpi.windows.conftest import MakeWindow


def group_of(win: mpicomm.Win, *ranks: int) -> MPI.Group:
    everyone = win.Get_group()
    some = everyone.Incl(sorted(set(ranks)))
    everyone.Free()
    return some


def test_test_says_when_a_group_has_handed_its_data_on(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, right, left = window(3), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine = win.tomemory().view(np.int64)
    sources, targets = group_of(win, left), group_of(win, right)
    for turn in range(10):
        win.Post(sources)
        win.Start(targets)
        win.Put(xp.array([turn, comm.rank]), right, 1)
        win.Complete()
        while not win.Test():
            pass
        assert to_host(mine).tolist() == [0, turn, left]
    sources.Free()
    targets.Free()


def test_one_rank_accesses_many_and_none(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(comm.size)
    everyone, first = group_of(win, *range(comm.size)), group_of(win, 0)
    win.Post(first)
    if comm.rank == 0:
        win.Start(everyone)
        for rank in range(comm.size):
            win.Put(xp.array([7 + rank]), rank, rank)
        win.Complete()
    win.Wait()
    assert int(to_host(win.tomemory().view(np.int64))[comm.rank]) == 7 + comm.rank
    win.Start(MPI.GROUP_EMPTY)
    win.Complete()


@pytest.mark.parametrize("everyone", [False, True])
def test_target_of_a_lock_takes_no_part(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, everyone: bool
) -> None:
    win = window(comm.size)
    comm.check()
    comm.Barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.05)  # neither in MPI nor in mpicomm
    else:
        for _ in range(10):
            if everyone:
                win.Lock_all()
            else:
                win.Lock(comm.size - 1, MPI.LOCK_SHARED)
            win.Put(xp.array([1 + comm.rank]), comm.size - 1, comm.rank)
            win.Flush(comm.size - 1)
            seen = xp.zeros(1, np.int64)
            win.Get(seen, comm.size - 1, comm.rank)
            win.Flush_local_all()
            win.Unlock_all() if everyone else win.Unlock(comm.size - 1)
            assert int(to_host(seen)[0]) == 1 + comm.rank
    comm.check()
    comm.Barrier()
    win.Lock(comm.rank)
    win.Sync()
    mine = to_host(win.tomemory().view(np.int64)).tolist()
    win.Unlock(comm.rank)
    if comm.rank == comm.size - 1:
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
        monkeypatch.setattr(win._steps, "meet" if call == "Fence" else "lock", torn)
        with pytest.raises(Alarm):
            win.Fence() if call == "Fence" else getattr(win, call)(comm.rank)
        for again in (win.Fence, win.Lock_all, win.Sync):
            with pytest.raises(mpicomm.InvalidUsageError, match="a signal handler, has ended a synchronisation"):
                again()
        win.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["Fence", "Start", "Wait", "Lock"])
def test_rank_that_does_not_come_is_named(device: str, call: str) -> None:
    if device == "cpu":
        pytest.skip("doubles of GPUs have no records of faults")
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


EXAMPLES = int(os.environ.get("TEST_EPOCHS", "10"))
COUNT = 24
KINDS = ("Fence", "Lock", "Lock_all", "Post")
BUFFERS = ("device", "host", "derived on device", "derived on host")
FORMS = ("place", "counted", "typed", "vector")
Combine = Callable[[Any, Any], Any]
UPDATES: dict[str, tuple[MPI.Op, Combine]] = {
    "SUM": (MPI.SUM, np.add),
    "MAX": (MPI.MAX, np.maximum),
    "BXOR": (MPI.BXOR, np.bitwise_xor),
}
FETCHES: dict[str, tuple[MPI.Op, Combine]] = {
    **UPDATES,
    "REPLACE": (MPI.REPLACE, lambda old, new: new),
    "NO_OP": (MPI.NO_OP, lambda old, new: old),
}
Act = Callable[[str], None]
"""A call of a rank in an epoch of a kind."""


class Player:
    """Plays epochs on a window and on ``model``, the parts of all ranks. The choices are the same on all ranks.

    In an epoch an element is either put or fetched by one rank, or updated by any ranks with one operation that has no
    order, or read. MPI allows no more.
    """

    def __init__(self, comm: mpicomm.Communicator, xp: Any, random: Random) -> None:
        self.comm, self.xp, self.random = comm, xp, random
        self.win = mpicomm.Win.Allocate(COUNT * 8, 8, comm=comm, place="device")
        self.mine = self.win.tomemory().view(np.int64)
        self.mine[...] = 0
        self.model = np.zeros((comm.size, COUNT), np.int64)
        self.reads: list[tuple[Any, int, list[int]]] = []
        self.every_second = [MPI.INT64_T.Create_vector(count, 1, 2).Commit() for count in range(9)]
        self.win.Fence(MPI.MODE_NOSUCCEED)  # no rank accesses a part that its rank has yet to fill

    def play(self, epochs: int) -> None:
        for _ in range(epochs):
            kind = self.random.choice(KINDS)
            calls = [call for target in range(self.comm.size) for call in self.calls(target)]
            self.random.shuffle(calls)
            self.begin(kind)
            for origin, call in calls:
                if origin == self.comm.rank:
                    call(kind)
            self.end(kind)
            for seen, step, expected in self.reads:
                assert to_host(seen)[::step].tolist() == expected
                assert step == 1 or not to_host(seen)[1::2].any()
            assert to_host(self.mine).tolist() == self.model[self.comm.rank].tolist()
            self.reads.clear()
            self.comm.Barrier()  # after the comparison, before the next rank takes a lock
        self.win.Free()
        for each in self.every_second:
            each.Free()

    def calls(self, target: int) -> list[tuple[int, Act]]:
        """Return calls on disjoint pieces of a part, and carry them out on the model."""
        calls, start = [], 0
        while start < COUNT:
            count = min(self.random.randint(1, 8), COUNT - start)
            step = self.random.choice((1, 1, 2))
            calls += self.piece(target, range(start, start + count, step))
            start += count
        return calls

    def piece(self, target: int, places: range) -> list[tuple[int, Act]]:
        what = self.random.choice(("Put", "Get", "Fetch", *UPDATES))
        origins = [self.random.randrange(self.comm.size)]
        if what in UPDATES:
            origins = [rank for rank in range(self.comm.size) if self.random.random() < 0.7]
        part = self.model[target][places.start : places.stop : places.step]
        made = []
        for origin in origins:
            buffers = self.random.choice(BUFFERS), self.random.choice(BUFFERS)
            form, asks = self.random.choice(FORMS), self.random.random() < 0.3
            if form in ("place", "counted") and any(kind.startswith("derived") for kind in buffers):
                form = "typed"  # else the target would have the datatype of the buffer
            values = np.array([self.random.randint(-1000, 1000) for _ in places])
            op = self.random.choice([*FETCHES]) if what == "Fetch" else what
            before = part.tolist() if what in ("Get", "Fetch") else None
            if what == "Put":
                part[:] = values
            elif what != "Get":
                part[:] = FETCHES[op][1](part.copy(), values)
            made.append((origin, self.act(what, op, target, places, buffers, form, values, before, asks=asks)))
        return made

    def act(
        self,
        what: str,
        op: str,
        target: int,
        places: range,
        buffers: tuple[str, str],
        form: str,
        values: Any,
        before: list[int] | None,
        *,
        asks: bool,
    ) -> Act:
        """Return the call: what it does with which buffers, and whether it asks for a request if MPI allows that."""

        def call(kind: str) -> None:
            (_, origin, _), (seen, result, step) = self.local(buffers[0], values), self.local(buffers[1], 0 * values)
            there, datatype = self.spec(places, form)
            name = {"Put": "Put", "Get": "Get", "Fetch": "Get_accumulate"}.get(what, "Accumulate")
            arguments = [origin, target, there]
            if what == "Get":
                arguments[0] = result
            elif what != "Put":
                arguments = [origin, *([result] if what == "Fetch" else []), target, there, FETCHES[op][0]]
            if what == "Fetch" and len(places) == 1 and form == "place" and not asks:
                name, arguments[3] = "Fetch_and_op", places.start
            if kind == "Lock":
                self.win.Lock(target, MPI.LOCK_SHARED if (target + self.comm.rank) % 2 else MPI.LOCK_EXCLUSIVE)
            if asks and kind in ("Lock", "Lock_all"):
                getattr(self.win, "R" + name.lower())(*arguments).Wait()
            else:
                getattr(self.win, name)(*arguments)
            if kind == "Lock":
                self.win.Unlock(target)
            if before is not None:
                self.reads.append((seen, step, before))
            if datatype is not None:
                datatype.Free()

        return call

    def spec(self, places: range, form: str) -> tuple[Any, MPI.Datatype | None]:
        """Return a target in a form of mpi4py, and the datatype that it needs."""
        if places.step == 1 and form != "vector":
            found: Any = places.start
            if form != "place":
                counted = [places.start, len(places), MPI.INT64_T][: FORMS.index(form) + 1]
                found = tuple(counted) if len(places) % 2 else counted
            return found, None
        datatype = MPI.INT64_T.Create_vector(len(places), 1, places.step).Commit()
        return (places.start, 1, datatype), datatype

    def local(self, kind: str, values: Any) -> tuple[Any, Any, int]:
        """Return an array with ``values``, the buffer argument, and the distance of its elements."""
        module, step = np if kind.endswith("host") else self.xp, 2 if kind.startswith("derived") else 1
        content = np.zeros(step * len(values), np.int64)
        content[::step] = values
        array = module.asarray(content)
        return array, array if step == 1 else [array, 1, self.every_second[len(values)]], step

    def begin(self, kind: str) -> None:
        if kind == "Fence":
            self.win.Fence()
        elif kind == "Lock_all":
            self.win.Lock_all()
        elif kind == "Post":
            self.group = self.win.Get_group()
            self.win.Post(self.group)
            self.win.Start(self.group)

    def end(self, kind: str) -> None:
        if kind == "Fence":
            self.win.Fence(MPI.MODE_NOSUCCEED)
            return
        if kind == "Lock_all":
            self.win.Unlock_all()
        elif kind == "Post":
            self.win.Complete()
            self.win.Wait()
            self.group.Free()
            return
        self.comm.check()
        self.comm.Barrier()


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_random_epochs(comm: mpicomm.Communicator, xp: Any, seed: int) -> None:
    Player(comm, xp, Random(seed)).play(1 + seed % 6)
