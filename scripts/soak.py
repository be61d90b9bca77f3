"""Everything at random for a long time: `mpiexec -n N python scripts/soak.py --seconds 3600`, from the project's root.

Random collectives, blocking, nonblocking and persistent, of all types and sizes, on communicators that share ranks,
each round on communicators and streams of its own; arrays, puts, gets and signals; messages; memory that is registered
and closed; on GPUs also graphs of collectives that are replayed, and arrays large enough for copy engines. All results
are checked, the last ones by the GPUs. Prints what was done, how fast, and by how much the process has grown since the
first tenth; exits with 1 where a result is wrong or something grows.

``--repeat N`` begins again with the first round after N, and compares with the time after two times N: what grows then
is not the memory that a device needs for the code of further kernels, some 60 MiB in all.

``--communicators 10000`` and ``--registrations 100000`` make and free so many instead; ``--late 10000`` makes so many
calls on arrays of some MiB and more, to which each rank's GPU comes late at random. ``--device cpu|auto``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from tests.helpers.checked_on_device import checked, draw, idle_kernel
from tests.helpers.collective_calls import compile_reductions
from tests.helpers.communicators import array_module, communicator
from tests.helpers.random_collectives import REDUCED, Family, Player, known

WORLD = MPI.COMM_WORLD
CALLS = 200
CAPTURED = 10
REPLAYS = 1000
SHARED = 100
MESSAGES = 40
MIB = 1 << 20
CAPTURED_NBYTES = (64, 4 * MIB)
LARGE_NBYTES = (24 * MIB, 512 * MIB)
LATE_NBYTES = (4 * MIB, 240 * MIB)
LATE_CYCLES = 200_000  # on average: as long as a call on 20 MiB between H200s
LATE_RUNS = 10
SETTLED_S = 0.3  # after which the threads that complete requests have gone
Rounds = Iterator[tuple[float, Callable[[], object]]]
"""The work of each round, and how much of all is done before it."""
# What may grow: the allocators of Python, NumPy and MPI keep what they have had, in pieces.
ALLOWED = {"descriptors": 0, "mappings": 0, "threads": 0, "RSS MiB": 24, "device MiB": 64}


def resources(soak: Soak) -> dict[str, int]:
    """Return how much of everything this process has; of its device's memory, a rank's share. Collective."""
    gc.collect()
    time.sleep(SETTLED_S)
    with contextlib.suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)  # what is free and was not given back is no growth: tens of MiB, now and then
    maps = Path("/proc/self/maps").read_text().splitlines()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = 0
    if soak.device != "cpu":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
        WORLD.Barrier()  # or others on the device could have blocks of their pools still
        free, total = cupy.cuda.runtime.memGetInfo()
        WORLD.Barrier()  # or they could have more already
        used = total - free
    return {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "mappings": sum("/memfd:mpicomm" in line or "/psm_" in line for line in maps),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "RSS MiB": pages * os.sysconf("SC_PAGESIZE") // MIB,
        "device MiB": used // soak.sharing // MIB,
    }


class Soak:
    """What is done in each round, on all ranks together."""

    def __init__(self, device: str, seed: int) -> None:
        self._device, self._seed = device, seed
        self.done: Counter[str] = Counter()
        with communicator(device) as comm, array_module(comm):
            self.device = comm.device
            uuid = comm.describe().device_uuid
            self.sharing = comm.allgather(uuid).count(uuid)  # ranks on one device, each with its own copy of all code
            compile_reductions(comm, known(REDUCED))

    def round(self, number: int) -> None:
        """Do everything once; the same for the same number. Collective."""
        self._rng = np.random.default_rng([self._seed, number])  # draws the same on all ranks
        family = Family(self._device)
        with array_module(family.world) as xp, self._stream(xp):
            Player(family, self._seed + number, xp).play(CALLS)
            self.done["calls"] += CALLS
            if xp is not np:
                self._replay(family.world, xp)
                self._large(family.world, xp)
            self._share(family.world, xp)
            self._messages(family.world, xp)
            if xp is not np:
                self._in_stream_order(family.world, xp)
            self.registrations(family.world, xp, 2)
        family.free()
        self.done["communicators"] += len(family.members)

    @contextlib.contextmanager
    def _stream(self, xp: Any) -> Iterator[None]:
        """Make one of several streams the current one; what is on it is done at the end."""
        choice = int(self._rng.integers(3))
        if xp is np or choice == 0:
            yield
            return
        stream = xp.cuda.Stream(non_blocking=choice == 1)
        with stream:
            yield
        stream.synchronize()

    def _replay(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Capture collectives into a graph, which makes and checks their values by itself, and replay it."""
        calls = [
            draw(self._rng, comm.size, CAPTURED_NBYTES, ("auto", "auto", "one_shot", "chain")) for _ in range(CAPTURED)
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
        """Hand values on around the ring, by put and by get."""
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        count = int(self._rng.integers(1, 100_000))
        with comm.zeros(count, np.int64) as array:
            for number in range(SHARED):
                array.put(xp.full(count, number * comm.size + comm.rank), following)
                array.signal(following)
                array.wait_signal(previous)
                comm.check()
                if not (array.local == number * comm.size + previous).all():
                    raise AssertionError(f"put {number} of {count} elements brought something else")
                if not (array.get(following) == number * comm.size + comm.rank).all():
                    raise AssertionError(f"get {number} of {count} elements brought something else")
                comm.check()
                # The next put overwrites what the peer may still be comparing.
                array.signal(previous)
                array.wait_signal(following)
                comm.check()
        self.done["puts and gets"] += 2 * SHARED

    def _messages(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Send arrays around the ring, several at once, of all sizes that go different ways."""
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
                    raise AssertionError(f"message {number} of {counts[number]} elements brought something else")
        self.done["messages"] += MESSAGES

    def _in_stream_order(self, comm: mpicomm.Communicator, xp: Any) -> None:
        """Send arrays around the ring that kernels match, one after the other."""
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for number in range(MESSAGES):
            count = int(2 ** self._rng.uniform(0, 22))
            received = xp.zeros(count, np.int64)
            sent = xp.full_like(received, number * comm.size + comm.rank)
            comm.Sendrecv(sent, following, number, received, previous, number, algorithm="one_shot")
            if not (received == number * comm.size + previous).all():
                raise AssertionError(f"message {number} of {count} elements brought something else")
        comm.check()
        self.done["messages in stream order"] += MESSAGES

    def registrations(self, comm: mpicomm.Communicator, xp: Any, cycles: int) -> None:
        """Register memory and close it again. Collective."""
        with _memory(xp) as memory:
            for number in range(cycles):
                with comm.register(memory) as array:
                    array.local[:] = comm.rank + number
                    array.signal((comm.rank + 1) % comm.size)
                    array.wait_signal((comm.rank - 1) % comm.size)
                    comm.check()
                    previous = (comm.rank - 1) % comm.size
                    if int(array.peer(previous)[-1]) != previous + number:
                        raise AssertionError("registered memory of a peer held something else")
        self.done["registrations"] += cycles

    def late(self, calls: int) -> None:
        """Call collectives on arrays that go through inboxes many times over; each rank's GPU comes late at random."""
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
        """Make communicators and free them. Collective."""
        for _ in range(cycles):
            with communicator(self._device) as comm:
                comm.zeros(1)
        self.done["communicators"] += cycles


@contextlib.contextmanager
def _memory(xp: Any) -> Iterator[Any]:
    """Give an array that can be registered."""
    if xp is not np:
        yield xp.zeros(1000, np.int32)
        return
    block = shared_memory.SharedMemory(create=True, size=4000)
    try:
        yield np.ndarray(1000, np.int32, block.buf)
    finally:
        block.unlink()
        with contextlib.suppress(BufferError):  # a view is left; the mapping goes with it
            block.close()


def main() -> None:
    """Run, and print on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--communicators", type=int, default=0)
    parser.add_argument("--registrations", type=int, default=0)
    parser.add_argument("--late", type=int, default=0)
    options = parser.parse_args()
    resource_tracker.ensure_running()  # its descriptor is no growth
    soak = Soak(options.device, options.seed)
    if options.late and soak.device == "cpu":
        parser.error("--late: this is for GPUs, and the ranks have none")
    rounds: Rounds
    if options.communicators:
        rounds = _parts(options.communicators, soak.communicators)
    elif options.late:
        rounds = _parts(options.late, soak.late)
    elif options.registrations:
        comm = communicator(options.device)
        with array_module(comm) as xp:
            rounds = _parts(options.registrations, lambda cycles: soak.registrations(comm, xp, cycles))
            run(soak, rounds)
        return
    else:
        rounds = _timed(soak, options.seconds, options.repeat)
    run(soak, rounds)


def run(soak: Soak, rounds: Rounds) -> None:
    """Run all rounds, print what came of them, and exit with 1 if something has grown since the first tenth."""
    before: dict[str, int] = {}
    start, shown = time.monotonic(), 0.0
    for share, work in rounds:
        if share >= 0.1 and not before:
            WORLD.Barrier()
            before = resources(soak)
        work()
        if share >= shown:
            shown += 0.1
            most = _most(resources(soak))
            if WORLD.rank == 0:
                elapsed = f"{time.monotonic() - start:8.0f} s"
                sys.stdout.write(f"{elapsed}  {dict(soak.done)}, at most on any rank: {most}\n")
                sys.stdout.flush()
    seconds = time.monotonic() - start
    WORLD.Barrier()
    after = resources(soak)
    growth = {name: after[name] - before[name] for name in after}
    most = _most(growth)
    if WORLD.rank == 0:
        rates = {name: f"{count} ({count / seconds:.1f}/s)" for name, count in soak.done.items()}
        sys.stdout.write(f"{seconds:.0f} s on {WORLD.size} ranks, device {soak.device}: {rates}\n")
        sys.stdout.write(f"all results are right; grown by, at most on any rank: {most}\n")
    if any(most[name] > ALLOWED[name] for name in most):
        sys.stdout.write(f"rank {WORLD.rank} has grown: {growth}\n")
        sys.exit(1)


def _most(mine: dict[str, int]) -> dict[str, int]:
    """Return the most of each on any rank. Collective."""
    everybody = WORLD.allgather(mine)
    return {name: max(each[name] for each in everybody) for name in mine}


def _timed(soak: Soak, seconds: float, repeat: int) -> Rounds:
    """Yield rounds until the time is over, on all ranks the same number; two at least, and three times ``repeat``."""
    start = time.monotonic()
    number, share, least = 0, 0.0, max(2, 3 * repeat)
    while share < 1 or number < least:
        which = number % repeat if repeat else number
        settled = number >= 2 * repeat  # before that `run` is told that it is early, and does not compare with it
        yield share if settled else min(share, 0.09), lambda which=which: soak.round(which)  # type: ignore[misc]
        number += 1
        share = WORLD.bcast((time.monotonic() - start) / seconds)


def _parts(count: int, work: Callable[[int], object]) -> Rounds:
    """Yield the same work in twenty parts."""
    for part in range(20):
        cycles = (part + 1) * count // 20 - part * count // 20
        yield part / 20, lambda cycles=cycles: work(cycles)  # type: ignore[misc]


if __name__ == "__main__":
    main()
