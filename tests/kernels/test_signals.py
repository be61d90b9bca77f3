"""The kernels of signal.cu around kernels that write into a peer's memory, as users enqueue them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from functools import partial

import numpy as np
import pytest

from tests.kernels.build import Builds, Change
from tests.kernels.machine import RunFailedError, controls
from tests.kernels.words_rig import WordsRig

ROUNDS = 40


class Ring(WordsRig):
    """Every rank writes into the next rank's memory, signals, waits for the rank before, adds up, and signals back."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
        super().__init__(builds, size, ("mpicomm_signal", "mpicomm_wait_signal"), changes)
        # As in a SignalPad, for each of two signals (data and "taken"): sent, expected, inbox.
        self.pads = [[self.machine.allocate(rank, 3 * 8) for rank in range(size)] for _ in range(2)]
        self._signal, self._wait = self.signals

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = (rank + 1) % self.size, (rank - 1) % self.size
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.signal(rank, following, pad=0, nap_us=nap_us)
        self.wait(rank, previous, pad=0)
        self.add(rank, self.words[rank].address)
        self.signal(rank, previous, pad=1)
        self.wait(rank, following, pad=1)

    def signal(self, rank: int, peer: int, *, pad: int, nap_us: int = 0) -> None:
        inbox = self.machine.address(peer, self.pads[pad][peer], rank) + 16
        parameters = (c_uint64(self.pads[pad][rank].address), c_uint64(inbox), self.failed(rank))
        self.machine.launch(rank, self._signal, parameters, blocks=1, threads=1, nap_us=nap_us)

    def wait(self, rank: int, peer: int, *, pad: int, timeout_s: float = 20) -> None:
        own = self.pads[pad][rank].address
        addresses = (c_uint64(own + 8), c_uint64(own + 16))
        record = c_uint64(self.machine.faults[rank].record)
        parameters = (*addresses, c_uint32(peer), c_uint64(int(timeout_s * 1e9)), record, self.failed(rank))
        self.machine.launch(rank, self._wait, parameters, blocks=1, threads=1)


def run(builds: Builds, size: int, *, seed: int = 0, changes: Sequence[Change] = ()) -> None:
    ring = Ring(builds, size, changes)
    ring.run(ROUNDS)
    for rank in range(size):
        assert [list(pad[rank].view(np.uint64)) for pad in ring.pads] == [[ROUNDS] * 3] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_data_is_there_after_the_signal(builds: Builds, size: int) -> None:
    run(builds, size)


def test_no_race(watched_builds: Builds) -> None:
    run(watched_builds, 3)


MISTAKES = {
    "release turned relaxed": Change(
        "signal.cu", "mpicomm::store_release(inbox, count);", "mpicomm::store_relaxed(inbox, count);"
    ),
    "acquire turned relaxed": Change("signal.cu", "mpicomm::load_acquire(inbox)", "mpicomm::load_relaxed(inbox)"),
    "no wait": Change(
        "signal.cu", "if (mpicomm::spin_until(reached, watch)) *expected = target;", "*expected = target;"
    ),
}
test_race_is_seen = controls(partial(run, size=3), MISTAKES, watched=True)


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
