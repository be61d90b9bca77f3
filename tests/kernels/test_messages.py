"""The counts of messages in signal.cu, around kernels that copy into the sender's memory and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64

import numpy as np
import pytest

from tests.kernels.build import Builds, Change
from tests.kernels.machine import CAUGHT, RunFailedError
from tests.kernels.words_rig import WordsRig

ROUNDS = 30


class Outboxes(WordsRig):
    """Every rank writes into its own memory, from which the next rank adds up; the place is used again and again."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
        super().__init__(builds, size, ("mpicomm_publish", "mpicomm_await"), changes)
        self.lines = [self.machine.allocate(rank, 2 * 8) for rank in range(size)]  # ready, done
        self._publish, self._await = self.signals

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        previous, following = (rank - 1) % self.size, (rank + 1) % self.size
        own, line = self.lines[rank].address, self.machine.address(previous, self.lines[previous], rank)
        self.wait(rank, own + 8, number, following)  # what the host does: the receiver of the last message is done
        self.write(rank, self.words[rank].address, number)
        self.publish(rank, own, number + 1, nap_us=nap_us)
        self.wait(rank, line, number + 1, previous)
        self.add(rank, self.machine.address(previous, self.words[previous], rank))
        self.publish(rank, line + 8, number + 1)

    def publish(self, rank: int, word: int, count: int, *, nap_us: int = 0) -> None:
        parameters = (c_uint64(word), c_uint64(count), self.failed(rank))
        self.machine.launch(rank, self._publish, parameters, blocks=1, threads=1, nap_us=nap_us)

    def wait(self, rank: int, word: int, target: int, peer: int, *, timeout_s: float = 20) -> None:
        record, limit = c_uint64(self.machine.faults[rank].record), c_uint64(int(timeout_s * 1e9))
        parameters = (c_uint64(word), c_uint64(target), c_uint64(77), c_uint32(peer), limit, record, self.failed(rank))
        self.machine.launch(rank, self._await, parameters, blocks=1, threads=1)


def run(builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
    outboxes = Outboxes(builds, size, changes)
    outboxes.run(ROUNDS)
    for rank in range(size):
        assert list(outboxes.lines[rank].view(np.uint64)) == [ROUNDS, ROUNDS]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_data_is_there_after_the_count(builds: Builds, size: int) -> None:
    run(builds, size)


def test_no_race(watched_builds: Builds) -> None:
    run(watched_builds, 3)


@pytest.mark.parametrize(
    "change",
    [
        Change("signal.cu", "mpicomm::store_release(word, count);", "mpicomm::store_relaxed(word, count);"),
        Change("signal.cu", "mpicomm::load_acquire(word)", "mpicomm::load_relaxed(word)"),
        Change("signal.cu", "(void)mpicomm::spin_until(reached, watch);", "(void)watch; (void)reached;"),
    ],
    ids=["release turned relaxed", "acquire turned relaxed", "no wait"],
)
def test_race_is_seen(watched_builds: Builds, change: Change) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        run(watched_builds, 3, [change])


def test_sender_that_is_missing_is_named_and_nothing_more_is_said(builds: Builds) -> None:
    outboxes = Outboxes(builds, 2)
    outboxes.wait(0, outboxes.machine.address(1, outboxes.lines[1], 0), 5, 1, timeout_s=0.2)
    outboxes.publish(0, outboxes.lines[0].address, 3)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=4, sequence=77, block=0, peer=1"):
        outboxes.machine.run(limit_s=10)
    assert not outboxes.lines[0].bytes.any()
