"""The kernels of signal.cu around kernels that write into a peer's memory, as users enqueue them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.build import KERNELS, Builds, Change, Kernel
from tests.kernels.machine import CAUGHT, Machine, RunFailedError

WRITE = Path(__file__).parent / "write_words.cu"
WORDS = 500
ROUNDS = 40


class Ring:
    """Every rank writes into the next rank's memory, signals, waits for the one before, adds up, and signals back."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
        self.machine = Machine(builds, size)
        self.size = size
        ranks = range(size)
        self.words = [self.machine.allocate(rank, WORDS * 8) for rank in ranks]
        self.sums = [self.machine.allocate(rank, 8) for rank in ranks]
        # As in a SignalPad, for each of two signals (data and "taken"): sent, expected, inbox.
        self.pads = [[self.machine.allocate(rank, 3 * 8) for rank in ranks] for _ in range(2)]
        self._signal, self._wait = (
            builds.kernel(KERNELS / "signal.cu", name, changes=changes)
            for name in ("mpicomm_signal", "mpicomm_wait_signal")
        )
        self._write, self._add = (builds.kernel(WRITE, name) for name in ("write_words", "add_words"))

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = (rank + 1) % self.size, (rank - 1) % self.size
        target = self.machine.address(following, self.words[following], rank)
        self._launch(rank, self._write, c_uint64(target), c_uint64(rank + number * 10**6), c_uint32(WORDS), blocks=2)
        self.signal(rank, following, pad=0, nap_us=nap_us)
        self.wait(rank, previous, pad=0)
        mine = self.sums[rank], self.words[rank]
        self._launch(rank, self._add, *(c_uint64(place.address) for place in mine), c_uint32(WORDS))
        self.signal(rank, previous, pad=1)
        self.wait(rank, following, pad=1)

    def signal(self, rank: int, peer: int, *, pad: int, nap_us: int = 0) -> None:
        inbox = self.machine.address(peer, self.pads[pad][peer], rank) + 16
        parameters = (c_uint64(self.pads[pad][rank].address), c_uint64(inbox), self._failed(rank))
        self.machine.launch(rank, self._signal, parameters, blocks=1, threads=1, nap_us=nap_us)

    def wait(self, rank: int, peer: int, *, pad: int, timeout_s: float = 20) -> None:
        own = self.pads[pad][rank].address
        addresses = (c_uint64(own + 8), c_uint64(own + 16))
        record = c_uint64(self.machine.faults[rank].record)
        parameters = (*addresses, c_uint32(peer), c_uint64(int(timeout_s * 1e9)), record, self._failed(rank))
        self.machine.launch(rank, self._wait, parameters, blocks=1, threads=1)

    def _launch(self, rank: int, kernel: Kernel, *parameters: c_uint64 | c_uint32, blocks: int = 1) -> None:
        self.machine.launch(rank, kernel, parameters, blocks=blocks, threads=64)

    def _failed(self, rank: int) -> c_uint64:
        return c_uint64(self.machine.faults[rank].failed)


def run(builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
    ring = Ring(builds, size, changes)
    rng = np.random.default_rng(size)
    for number in range(ROUNDS):
        for rank in range(size):
            ring.enqueue(rank, number, nap_us=int(rng.choice((0, 0, 0, 500))))
    ring.machine.run(seed=size, jitter_us=200, limit_s=30)
    for rank in range(size):
        firsts = [(rank - 1) % size + number * 10**6 for number in range(ROUNDS)]
        assert int(ring.sums[rank].view(np.uint64)[0]) == sum(WORDS * first + sum(range(WORDS)) for first in firsts)
        assert [list(pad[rank].view(np.uint64)) for pad in ring.pads] == [[ROUNDS] * 3] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_data_is_there_after_the_signal(builds: Builds, size: int) -> None:
    run(builds, size)


def test_no_race(watched_builds: Builds) -> None:
    run(watched_builds, 3)


@pytest.mark.parametrize(
    "change",
    [
        Change("signal.cu", "mpicomm::store_release(inbox, count);", "mpicomm::store_relaxed(inbox, count);"),
        Change("signal.cu", "mpicomm::load_acquire(inbox)", "mpicomm::load_relaxed(inbox)"),
        Change("signal.cu", "if (mpicomm::spin_until(reached, watch)) *expected = target;", "*expected = target;"),
    ],
    ids=["release turned relaxed", "acquire turned relaxed", "no wait"],
)
def test_race_is_seen(watched_builds: Builds, change: Change) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        run(watched_builds, 3, [change])


def test_rank_that_does_not_signal_is_named(builds: Builds) -> None:
    ring = Ring(builds, 2)
    ring.wait(0, 1, pad=0, timeout_s=0.2)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=1, sequence=1, block=0, peer=1"):
        ring.machine.run(limit_s=10)


def test_rank_that_has_failed_does_not_signal(builds: Builds) -> None:
    ring = Ring(builds, 2)
    ring.wait(0, 1, pad=0, timeout_s=0.1)
    ring.signal(0, 1, pad=0)
    with pytest.raises(RunFailedError, match="fault on rank 0"):
        ring.machine.run(limit_s=10)
    assert not ring.pads[0][1].bytes.any()
