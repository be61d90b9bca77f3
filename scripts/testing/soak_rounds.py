"""The rounds of soak.py: the calls that all ranks make together, and the checks of their results."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from tests.helpers.inputs.checked_on_device import checked, draw, idle_kernel
from tests.helpers.inputs.communicator_calls import compile_reductions
from tests.helpers.inputs.random_collectives import REDUCED, Family, Player, known
from tests.helpers.rigs.communicators import array_module, communicator, ring_in_host

WORLD = MPI.COMM_WORLD
CALLS = 200
CAPTURED = 10
REPLAYS = 1000
SHARED = 100
MESSAGES = 40
ONE_SIDED = 40
MIB = 1 << 20
CAPTURED_NBYTES = (64, 4 * MIB)
LARGE_NBYTES = (24 * MIB, 512 * MIB)
LATE_NBYTES = (4 * MIB, 240 * MIB)
LATE_CYCLES = 200_000  # the average; a call on 20 MiB between H200s takes as long
LATE_RUNS = 10


class Soak:
    """The work of all ranks; ``done`` counts it. All methods are collective."""

    def __init__(self, device: str, seed: int) -> None:
        self._device, self._seed = device, seed
        self.done: Counter[str] = Counter()
        with communicator(device) as comm, array_module(comm):
            self.device = comm.device
            uuid = comm.describe().device_uuid
            self.sharing = comm.allgather(uuid).count(uuid)  # ranks on one device, because each of them loads all code
            compile_reductions(comm, known(REDUCED))

    def round(self, number: int) -> None:
        """Do all kinds of work once; the same work for the same number."""
        self._rng = np.random.default_rng([self._seed, number])  # draws the same on all ranks
        family = Family(self._device)
        with array_module(family.world) as xp, self._stream(xp):
            Player(family, self._seed + number, xp).play(CALLS)
            self.done["calls"] += CALLS
            if xp is not np:
                if family.world.describe().internode in ("", "nccl", "mapped"):  # others take no graphs
                    self._replay(family.world, xp)
                self._large(family.world, xp)
            self._share(family.world, xp)
            self._messages(family.world, xp)
            if family.world.num_nodes == 1:
                self._windows(family.world, xp)
            if xp is not np:
                self._in_stream_order(family.world, xp)
            self.register(family.world, xp, 2)
        family.free()
        self.done["communicators"] += len(family.members)

    def register(self, comm: mpicomm.Communicator, xp: Any, cycles: int) -> None:
        """Register memory, write into it, read a peer's, and close it."""
        following, previous = ring_in_host(comm)
        with _memory(xp) as memory:
            for number in range(cycles):
                with comm.register(memory) as array:
                    array.local[:] = comm.rank + number
                    array.signal(following)
                    array.wait_signal(previous)
                    comm.check()
                    if int(array.peer(previous)[-1]) != previous + number:
                        raise AssertionError(f"registered memory of rank {previous} does not hold its values")
        self.done["registrations"] += cycles

    def late(self, calls: int) -> None:
        """Call collectives on arrays that fill inboxes many times; before half of them this rank's GPU idles."""
        part = [self._seed, self.done["late calls"]]
        rng, own = np.random.default_rng(part), np.random.default_rng([*part, 1 + WORLD.rank])
        with communicator(self._device) as comm, array_module(comm) as xp:
            idle = idle_kernel(xp)
            for _ in range(-(-calls // (LATE_RUNS + 1))):
                call = draw(rng, comm.size, LATE_NBYTES, ("auto", "one_shot", "two_shot"))
                with checked(comm, [call], xp) as sequence:
                    for _ in range(LATE_RUNS):
                        if own.random() < 0.5:
                            idle((1,), (1,), (int(own.exponential(LATE_CYCLES)),))
                        sequence.run()
                self.done["late calls"] += LATE_RUNS + 1

    def communicators(self, cycles: int) -> None:
        """Make communicators and free them."""
        for _ in range(cycles):
            with communicator(self._device) as comm:
                comm.zeros(1)
        self.done["communicators"] += cycles

    @contextlib.contextmanager
    def _stream(self, xp: Any) -> Iterator[None]:
        """Make one of several streams the current one; at the end wait for its work."""
        choice = int(self._rng.integers(3))
        if xp is np or choice == 0:
            yield
            return
        stream = xp.cuda.Stream(non_blocking=choice == 1)
        with stream:
            yield
        stream.synchronize()

    def _replay(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Capture collectives into a graph, and replay it. Kernels of the graph make and check the values."""
        last = "chain" if comm.num_nodes == 1 else "two_shot"
        calls = [
            draw(self._rng, comm.size, CAPTURED_NBYTES, ("auto", "auto", "one_shot", last)) for _ in range(CAPTURED)
        ]
        with checked(comm, calls, xp) as sequence:
            stream = xp.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                sequence.run()
                graph = stream.end_capture()
                for _ in range(REPLAYS):
                    graph.launch()
        self.done["replays"] += REPLAYS
        self.done["calls replayed"] += REPLAYS * CAPTURED

    def _large(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Call a collective on arrays that are large enough for copy engines."""
        call = draw(self._rng, comm.size, LARGE_NBYTES, ("auto", "copy_engine"))
        with checked(comm, [call], xp) as sequence:
            sequence.run()
        self.done["large calls"] += 2

    def _share(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Pass values around the ring, by put and by get."""
        following, previous = ring_in_host(comm)
        count = int(self._rng.integers(1, 100_000))
        with comm.zeros(count, np.int64) as array:
            for number in range(SHARED):
                array.put(xp.full(count, number * comm.size + comm.rank), following)
                array.signal(following)
                array.wait_signal(previous)
                comm.check()
                if not (array.local == number * comm.size + previous).all():
                    raise AssertionError(f"put {number} of {count} elements brought wrong values")
                if not (array.get(following) == number * comm.size + comm.rank).all():
                    raise AssertionError(f"get {number} of {count} elements brought wrong values")
                comm.check()
                # The peer signals that it has compared, because the next put overwrites its array.
                array.signal(previous)
                array.wait_signal(following)
                comm.check()
        self.done["puts and gets"] += 2 * SHARED

    def _messages(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Send arrays around the ring, several at once, of sizes from eager to rendezvous messages."""
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for _ in range(MESSAGES // 4):
            counts = [int(2 ** self._rng.uniform(0, 22)) for _ in range(4)]
            sent = [xp.full(count, number * comm.size + comm.rank) for number, count in enumerate(counts)]
            received = [xp.zeros_like(each) for each in sent]
            requests = [comm.Irecv(each, previous, tag) for tag, each in enumerate(received)]
            requests += [comm.Isend(sent[tag], following, tag) for tag in self._rng.permutation(4)]
            MPI.Request.Waitall(requests)
            comm.check()
            for number, each in enumerate(received):
                if not (each == number * comm.size + previous).all():
                    raise AssertionError(f"message {number} of {counts[number]} elements brought wrong values")
        self.done["messages"] += MESSAGES

    def _windows(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Put around the ring between fences, and let ranks add to a counter: by atomics, and under a lock."""
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        count = int(self._rng.integers(1, 100_000))
        win = mpicomm.Win.Allocate(8 * (count + 1), 8, MPI.INFO_NULL, comm, place="device")
        part = win.tomemory().view(np.int64)
        part[:] = 0
        one, drawn, seen = xp.ones(1, np.int64), xp.zeros(ONE_SIDED, np.int64), xp.zeros(1, np.int64)
        win.Fence()
        for number in range(ONE_SIDED):
            win.Put(xp.full(count, number * comm.size + comm.rank), following)
            win.Fetch_and_op(one, drawn[number : number + 1], 0, count)
            win.Fence()
            if not (part[:count] == number * comm.size + previous).all():
                raise AssertionError(f"one-sided put {number} of {count} elements brought wrong values")
            win.Fence()
        for _ in range(ONE_SIDED):
            win.Lock(0)
            win.Get(seen, 0, count)
            win.Flush(0)
            seen += 1
            win.Put(seen, 0, count)
            win.Unlock(0)
        comm.check()
        numbers = sorted(number for each in comm.allgather(drawn.tolist()) for number in each)
        if numbers != list(range(ONE_SIDED * comm.size)):
            raise AssertionError(f"ranks have drawn {numbers} from a counter")
        if comm.rank == 0 and int(part[count]) != 2 * ONE_SIDED * comm.size:
            raise AssertionError(f"a counter has {int(part[count])} instead of {2 * ONE_SIDED * comm.size}")
        win.Free()
        self.done["one-sided calls"] += 4 * ONE_SIDED

    def _in_stream_order(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Send arrays around the ring, one after the other, in stream order; kernels match them."""
        following, previous = ring_in_host(comm)
        for number in range(MESSAGES):
            count = int(2 ** self._rng.uniform(0, 22))
            received = xp.zeros(count, np.int64)
            sent = xp.full_like(received, number * comm.size + comm.rank)
            comm.Sendrecv(sent, following, number, received, previous, number, algorithm="stream")
            if not (received == number * comm.size + previous).all():
                raise AssertionError(f"message {number} of {count} elements brought wrong values")
        comm.check()
        self.done["messages in stream order"] += MESSAGES


@contextlib.contextmanager
def _memory(xp: Any) -> Iterator[Any]:
    """Give an array in memory that can be registered."""
    if xp is not np:
        yield xp.zeros(1000, np.int32)
        return
    block = shared_memory.SharedMemory(create=True, size=4000)
    try:
        yield np.ndarray(1000, np.int32, block.buf)
    finally:
        block.unlink()
        with contextlib.suppress(BufferError):  # an array still views the memory; its end unmaps the memory
            block.close()
