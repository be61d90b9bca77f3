"""The steps of messages in message.cu: into memory of the sender, and from there into memory of the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_WORDS, MessageStep
from tests.kernels.build import Builds, Change
from tests.kernels.machine import RunFailedError, controls
from tests.kernels.words_rig import WORDS, WordsRig

ROUNDS = 30
BLOCKS = 3


class Outboxes(WordsRig):
    """Every rank sends words to the next rank through one place of its memory, again and again."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, (), changes)
        self.places, self.targets = ([self.machine.allocate(rank, WORDS * 8) for rank in range(size)] for _ in range(2))
        self.ready, self.done, self.seen = (
            [self.machine.allocate(rank, MESSAGE_WORDS * 8) for rank in range(size)] for _ in range(3)
        )
        for seen in self.seen:
            seen.view(np.int64)[:] = -1  # no receiver has to be done with the place before the first message
        self._timeout_s = timeout_s
        self._step = builds.kernel(MESSAGE_KERNEL.source, MESSAGE_KERNEL.entry, changes=changes)

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        previous, following = (rank - 1) % self.size, (rank + 1) % self.size
        words, place, ready, target = (
            each[rank].address for each in (self.words, self.places, self.ready, self.targets)
        )
        # The host does this: the receiver of the last message is done.
        self.step(rank, following, ready=self.done[rank].address, done=self.seen[rank].address, awaits=1, taken=1)
        self.write(rank, words, number)
        self.step(rank, rank, place, words, ready=ready, sent=1, blocks=self.blocks(number), nap_us=nap_us)
        place, ready, done = (
            self.machine.address(previous, each[previous], rank) for each in (self.places, self.ready, self.done)
        )
        blocks = self.blocks(number)
        self.step(rank, previous, target, place, ready=ready, done=done, awaits=1, taken=1, blocks=blocks)
        self.add(rank, target)

    def blocks(self, number: int) -> int:
        """Return the number of blocks of a message; it differs between messages of one place."""
        return BLOCKS - number % BLOCKS

    def step(
        self,
        rank: int,
        peer: int,
        target: int = 0,
        source: int = 0,
        *,
        ready: int = 0,
        done: int = 0,
        awaits: int = 0,
        sent: int = 0,
        taken: int = 0,
        blocks: int = BLOCKS,
        timeout_s: float = 0,
        nap_us: int = 0,
    ) -> None:
        faults = self.machine.faults[rank]
        nbytes = WORDS * 8 if target else 0
        limits = int((timeout_s or self._timeout_s) * 1e9), faults.record, faults.failed
        step = MessageStep(target, source, nbytes, ready, done, *limits, awaits, sent, taken, peer)
        self.machine.launch(rank, self._step, [step], blocks=blocks, threads=64, nap_us=nap_us)


def run(builds: Builds, size: int, *, seed: int = 0, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
    outboxes = Outboxes(builds, size, changes, timeout_s)
    outboxes.run(ROUNDS)
    for rank in range(size):
        assert list(outboxes.ready[rank].view(np.uint64)) == [ROUNDS] * MESSAGE_WORDS
        assert list(outboxes.done[rank].view(np.uint64)) == [ROUNDS] * MESSAGE_WORDS


@pytest.mark.parametrize("size", [1, 2, 4])
def test_data_is_there_after_the_count(builds: Builds, size: int) -> None:
    run(builds, size)


def test_no_race(watched_builds: Builds) -> None:
    run(watched_builds, 3)


MISTAKES = {
    "release of ready turned relaxed": ("store_release(ready, load_relaxed", "store_relaxed(ready, load_relaxed"),
    "release of done turned relaxed": ("store_release(done, load_relaxed", "store_relaxed(done, load_relaxed"),
    "acquire turned relaxed": ("load_acquire(word)", "load_relaxed(word)"),
    "no wait": ("x.awaits != 0)", "false)"),
    "no barrier after the wait": ("if (!__syncthreads_and(ok)) return;", "if (!ok) return;"),
    "no barrier before the release": ("  __syncthreads();\n", ""),
    "the word of another block": ("const u64* const word = x.ready + block;", "const u64* const word = x.ready;"),
    "words of later messages left out": (
        "threadIdx.x < kMessageWords && threadIdx.x % gridDim.x == block",
        "threadIdx.x == block",
    ),
}
test_race_is_seen = controls(
    partial(run, size=3, timeout_s=1),
    {name: Change("message.cu", *each) for name, each in MISTAKES.items()},
    watched=True,
)


def test_sender_that_is_missing_is_named_and_nothing_more_is_said(builds: Builds) -> None:
    outboxes = Outboxes(builds, 2)
    ready, done = (outboxes.machine.address(1, each[1], 0) for each in (outboxes.ready, outboxes.done))
    target, source = outboxes.targets[0].address, outboxes.machine.address(1, outboxes.places[1], 0)
    outboxes.targets[0].bytes[:] = 9
    outboxes.step(0, 1, target, source, ready=ready, done=done, awaits=5, taken=5, timeout_s=0.2)
    outboxes.step(0, 0, ready=outboxes.ready[0].address, sent=3)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=4, sequence=5, block=\d, peer=1"):
        outboxes.machine.run(limit_s=10)
    assert not outboxes.done[1].bytes.any() and not outboxes.ready[0].bytes.any()
    assert (outboxes.targets[0].bytes == 9).all()
