"""The steps of messages in message.cu: into memory of the sender, and from there into memory of the receiver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mpicomm.kernels.message import MESSAGE_KERNEL, MessageStep
from tests.kernels.build import Builds, Change
from tests.kernels.machine import CAUGHT, RunFailedError
from tests.kernels.words_rig import WORDS, WordsRig

ROUNDS = 30
BLOCKS = 3


class Outboxes(WordsRig):
    """Every rank sends words to the next rank through one place of its own memory, which is used again and again."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
        super().__init__(builds, size, (), changes)
        self.places, self.targets = ([self.machine.allocate(rank, WORDS * 8) for rank in range(size)] for _ in range(2))
        self.ready, self.done = ([self.machine.allocate(rank, BLOCKS * 8) for rank in range(size)] for _ in range(2))
        self._step = builds.kernel(MESSAGE_KERNEL.source, MESSAGE_KERNEL.entry, changes=changes)

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        previous, following = (rank - 1) % self.size, (rank + 1) % self.size
        # What the host does: the receiver of the last message is done.
        self.step(rank, following, number, awaited=self.done[rank].address)
        self.write(rank, self.words[rank].address, number)
        source, place, ready = self.words[rank].address, self.places[rank].address, self.ready[rank].address
        self.step(rank, rank, number + 1, place, source, stored=ready, nap_us=nap_us)
        peers, ready, done = (
            self.machine.address(previous, each[previous], rank) for each in (self.places, self.ready, self.done)
        )
        self.step(rank, previous, number + 1, self.targets[rank].address, peers, awaited=ready, stored=done)
        self.add(rank, self.targets[rank].address)

    def step(
        self,
        rank: int,
        peer: int,
        count: int,
        target: int = 0,
        source: int = 0,
        *,
        awaited: int = 0,
        stored: int = 0,
        timeout_s: float = 20,
        nap_us: int = 0,
    ) -> None:
        faults = self.machine.faults[rank]
        nbytes = WORDS * 8 if target else 0
        step = MessageStep(
            target, source, nbytes, awaited, stored, count, 77, int(timeout_s * 1e9), faults.record, faults.failed, peer
        )
        self.machine.launch(rank, self._step, [step], blocks=BLOCKS, threads=64, nap_us=nap_us)


def run(builds: Builds, size: int, changes: Sequence[Change] = ()) -> None:
    outboxes = Outboxes(builds, size, changes)
    outboxes.run(ROUNDS)
    for rank in range(size):
        assert list(outboxes.ready[rank].view(np.uint64)) == [ROUNDS] * BLOCKS
        assert list(outboxes.done[rank].view(np.uint64)) == [ROUNDS] * BLOCKS


@pytest.mark.parametrize("size", [1, 2, 4])
def test_data_is_there_after_the_count(builds: Builds, size: int) -> None:
    run(builds, size)


def test_no_race(watched_builds: Builds) -> None:
    run(watched_builds, 3)


@pytest.mark.parametrize(
    "change",
    [
        Change("message.cu", "store_release(x.stored + block, x.count);", "store_relaxed(x.stored + block, x.count);"),
        Change("message.cu", "load_acquire(word)", "load_relaxed(word)"),
        Change("message.cu", "x.awaited != nullptr)", "false)"),
        Change("message.cu", "if (!__syncthreads_and(ok)) return;", "if (!ok) return;"),
        Change("message.cu", "  __syncthreads();\n", ""),
        Change("message.cu", "const u64* const word = x.awaited + block;", "const u64* const word = x.awaited;"),
    ],
    ids=[
        "release turned relaxed", "acquire turned relaxed", "no wait", "no barrier behind the wait",
        "no barrier ahead of the release", "the word of another block",
    ],
)  # fmt: skip
def test_race_is_seen(watched_builds: Builds, change: Change) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        run(watched_builds, 3, [change])


def test_sender_that_is_missing_is_named_and_nothing_more_is_said(builds: Builds) -> None:
    outboxes = Outboxes(builds, 2)
    awaited, stored = (outboxes.machine.address(1, each[1], 0) for each in (outboxes.ready, outboxes.done))
    target, source = outboxes.targets[0].address, outboxes.machine.address(1, outboxes.places[1], 0)
    outboxes.targets[0].bytes[:] = 9
    outboxes.step(0, 1, 5, target, source, awaited=awaited, stored=stored, timeout_s=0.2)
    outboxes.step(0, 0, 3, stored=outboxes.ready[0].address)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=4, sequence=77, block=\d, peer=1"):
        outboxes.machine.run(limit_s=10)
    assert not outboxes.done[1].bytes.any() and not outboxes.ready[0].bytes.any()
    assert (outboxes.targets[0].bytes == 9).all()
