"""Random epochs of puts, gets and accumulates from all ranks, against a sequential model."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from tests.helpers.rigs.communicators import to_host

EXAMPLES = int(os.environ.get("TEST_EPOCHS", "10"))
COUNT = 24
KINDS = ("Fence", "Lock", "Lock_all", "Post")
BUFFERS = ("device", "host", "derived on device", "derived on host")
UPDATES = {"SUM": (MPI.SUM, np.add), "MAX": (MPI.MAX, np.maximum), "BXOR": (MPI.BXOR, np.bitwise_xor)}


class Player:
    """Plays epochs on a window and on ``model``, the parts of all ranks. The choices are the same on all ranks.

    In an epoch an element is either put by one rank, or updated by any ranks with one operation that has no order, or
    read. MPI allows no more.
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
            try:
                kind = self.random.choice(KINDS)
                calls = [call for target in range(self.comm.size) for call in self.calls(target)]
                self.random.shuffle(calls)
            except BaseException:  # Hypothesis gives a sequence up that becomes too long, between two epochs
                self.free()
                raise
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
        self.free()

    def free(self) -> None:
        self.win.Free()
        for each in self.every_second:
            each.Free()

    def calls(self, target: int) -> list[tuple[int, Any]]:
        """Return calls on disjoint pieces of a part, and carry them out on the model."""
        calls, start = [], 0
        while start < COUNT:
            count = min(self.random.randint(1, 8), COUNT - start)
            step = self.random.choice((1, 1, 2))
            places = range(start, start + count, step)
            calls += self.piece(target, places)
            start += count
        return calls

    def piece(self, target: int, places: range) -> list[tuple[int, Any]]:
        what, origins = self.random.choice(("Put", "Get", *UPDATES)), [self.random.randrange(self.comm.size)]
        part = self.model[target]
        where = slice(places.start, places.stop, places.step)
        if what in UPDATES:
            origins = [rank for rank in range(self.comm.size) if self.random.random() < 0.7]
        made = []
        for origin in origins:
            kind = self.random.choice(BUFFERS)
            values = np.array([self.random.randint(-1000, 1000) for _ in places])
            if what == "Get":
                expected = part[where].tolist()
                made.append((origin, self.getting(target, places, kind, expected)))
                continue
            part[where] = values if what == "Put" else UPDATES[what][1](part[where], values)
            made.append((origin, self.writing(what, target, places, kind, values)))
        return made

    def spec(self, places: range) -> tuple[Any, MPI.Datatype]:
        datatype = MPI.INT64_T.Create_vector(len(places), 1, places.step).Commit()
        return (places.start, 1, datatype), datatype

    def local(self, kind: str, values: Any) -> tuple[Any, Any, int]:
        """Return an array with ``values``, the buffer argument, and the distance of its elements."""
        module, step = np if kind.endswith("host") else self.xp, 2 if kind.startswith("derived") else 1
        content = np.zeros(step * len(values), np.int64)
        content[::step] = values
        array = module.asarray(content)
        return array, array if step == 1 else [array, 1, self.every_second[len(values)]], step

    def locked(self, kind: str, target: int, call: Any) -> None:
        """Call inside a lock, if each call of the epoch has a separate one."""
        if kind == "Lock":
            self.win.Lock(target, self.random_type(target))
        call()
        if kind == "Lock":
            self.win.Unlock(target)

    def random_type(self, target: int) -> int:
        return MPI.LOCK_SHARED if (target + self.comm.rank) % 2 else MPI.LOCK_EXCLUSIVE

    def getting(self, target: int, places: range, buffer: str, expected: list[int]) -> Any:
        def call(kind: str) -> None:
            seen, spec, step = self.local(buffer, np.zeros(len(places)))
            there, datatype = self.spec(places)
            self.locked(kind, target, lambda: self.win.Get(spec, target, there))
            self.reads.append((seen, step, expected))
            datatype.Free()

        return call

    def writing(self, what: str, target: int, places: range, buffer: str, values: Any) -> Any:
        def call(kind: str) -> None:
            there, datatype = self.spec(places)
            _, given, _ = self.local(buffer, values)
            if what == "Put":
                self.locked(kind, target, lambda: self.win.Put(given, target, there))
            else:
                self.locked(kind, target, lambda: self.win.Accumulate(given, target, there, UPDATES[what][0]))
            datatype.Free()

        return call

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


# Choices that depend on time, or on the memory of one rank, would take the ranks apart.
@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(epochs=st.integers(1, 6), random=st.randoms(use_true_random=False))
def test_random_epochs(comm: mpicomm.Communicator, xp: Any, epochs: int, random: Random) -> None:
    Player(comm, xp, random).play(epochs)
