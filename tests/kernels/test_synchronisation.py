"""The kernels of signal.cu, message.cu and window.cu, around kernels that write into memory of another rank."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64

import numpy as np
import pytest

from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_WORDS, MessageStep
from mpicomm.kernels.variant import SHARED
from mpicomm.kernels.window import FENCE, MEET_KERNEL, START, WAIT
from tests.kernels.build import Builds, Change
from tests.kernels.machine import RunFailedError, controls
from tests.kernels.words_rig import WORDS, Boards, WordsRig

ROUNDS = 25
BLOCKS = 3  # of a message


class Signals(WordsRig):
    """Every rank writes into the next rank's memory, signals, waits for the rank before, adds up, and signals back."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, changes, timeout_s)
        # As in a SignalPad, for each of two signals (data and "taken"): sent, expected, inbox.
        self.pads = [[self.machine.allocate(rank, 3 * 8) for rank in range(size)] for _ in range(2)]
        names = "mpicomm_signal", "mpicomm_wait_signal"
        self._signal, self._wait = (builds.kernel(SHARED / "signal.cu", name, changes=changes) for name in names)

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = self.neighbours(rank)
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.signal(rank, following, pad=0, nap_us=nap_us)
        self.wait(rank, previous, pad=0)
        self.add(rank, self.words[rank].address)
        self.signal(rank, previous, pad=1)
        self.wait(rank, following, pad=1)

    def signal(self, rank: int, peer: int, *, pad: int, nap_us: int = 0) -> None:
        inbox = self.machine.address(peer, self.pads[pad][peer], rank) + 16
        failed = c_uint64(self.machine.faults[rank].failed)
        parameters = (c_uint64(self.pads[pad][rank].address), c_uint64(inbox), failed)
        self.machine.launch(rank, self._signal, parameters, blocks=1, threads=1, nap_us=nap_us)

    def wait(self, rank: int, peer: int, *, pad: int, timeout_s: float = 0) -> None:
        own, (timeout_ns, record, failed) = self.pads[pad][rank].address, self.limits(rank, timeout_s)
        words = (own + 8, own + 16, timeout_ns, record, failed)
        expected, inbox, *limits = map(c_uint64, words)
        parameters = (expected, inbox, c_uint32(peer), *limits)
        self.machine.launch(rank, self._wait, parameters, blocks=1, threads=1)

    def check(self) -> None:
        for rank in range(self.size):
            assert [list(pad[rank].view(np.uint64)) for pad in self.pads] == [[ROUNDS] * 3] * 2


class Outboxes(WordsRig):
    """Every rank sends words to the next rank through one place of its memory, again and again."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, changes, timeout_s)
        self.places, self.targets = ([self.machine.allocate(rank, WORDS * 8) for rank in range(size)] for _ in range(2))
        self.ready, self.done, self.seen = (
            [self.machine.allocate(rank, MESSAGE_WORDS * 8) for rank in range(size)] for _ in range(3)
        )
        for seen in self.seen:
            seen.view(np.int64)[:] = -1  # no receiver has to be done with the place before the first message
        self._step = builds.kernel(MESSAGE_KERNEL.source, MESSAGE_KERNEL.entry, changes=changes)

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = self.neighbours(rank)
        blocks = BLOCKS - number % BLOCKS  # the blocks differ between messages of one place
        words, place, ready, target = (
            each[rank].address for each in (self.words, self.places, self.ready, self.targets)
        )
        # The host does this: the receiver of the last message is done.
        self.step(rank, following, ready=self.done[rank].address, done=self.seen[rank].address, awaits=1, taken=1)
        self.write(rank, words, number)
        self.step(rank, rank, place, words, ready=ready, sent=1, blocks=blocks, nap_us=nap_us)
        place, ready, done = (
            self.machine.address(previous, each[previous], rank) for each in (self.places, self.ready, self.done)
        )
        self.step(rank, previous, target, place, ready=ready, done=done, awaits=1, taken=1, blocks=blocks)
        self.add(rank, target)

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
        nbytes = WORDS * 8 if target else 0
        step = MessageStep(
            target, source, nbytes, ready, done, *self.limits(rank, timeout_s), awaits, sent, taken, peer
        )
        self.machine.launch(rank, self._step, [step], blocks=blocks, threads=64, nap_us=nap_us)

    def check(self) -> None:
        for place in (*self.ready, *self.done):
            assert list(place.view(np.uint64)) == [ROUNDS] * MESSAGE_WORDS


class Fences(Boards):
    """Every rank writes into the next rank's memory between two fences, and adds up its own."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, _ = self.neighbours(rank)
        others = [each for each in range(self.size) if each != rank]
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        for act in ("write", "read"):
            self.step(MEET_KERNEL, rank, FENCE, signals=others, waits=others, nap_us=nap_us)
            if act == "write":
                self.add(rank, self.words[rank].address)


class Groups(Boards):
    """The same with Post, Start, Complete and Wait, between neighbours only."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = self.neighbours(rank)
        self.step(MEET_KERNEL, rank, START, kind=1, signals=[previous])
        self.step(MEET_KERNEL, rank, START, kind=1, waits=[following], nap_us=nap_us)
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.step(MEET_KERNEL, rank, WAIT, kind=2, signals=[following], nap_us=nap_us)
        self.step(MEET_KERNEL, rank, WAIT, kind=2, waits=[previous])
        self.add(rank, self.words[rank].address)


RIGS = (Signals, Outboxes, Fences, Groups)


def run(builds: Builds, rig: type[WordsRig], *, size: int = 3, seed: int = 0, changes: Sequence[Change] = ()) -> None:
    rig(builds, size, changes, timeout_s=2 if changes else 20).run(ROUNDS, seed)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rig", RIGS)
def test_data_is_there_after_the_synchronisation(builds: Builds, rig: type[WordsRig], size: int) -> None:
    run(builds, rig, size=size)


@pytest.mark.parametrize("rig", RIGS)
def test_no_race(watched_builds: Builds, rig: type[WordsRig]) -> None:
    run(watched_builds, rig)


OF_SIGNALS = {
    "release turned relaxed": ("mpicomm::store_release(inbox, count);", "mpicomm::store_relaxed(inbox, count);"),
    "acquire turned relaxed": ("mpicomm::load_acquire(inbox)", "mpicomm::load_relaxed(inbox)"),
    "no wait": ("if (mpicomm::spin_until(reached, watch)) *expected = target;", "*expected = target;"),
}
OF_MESSAGES = {
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
OF_WINDOWS = {
    "release turned relaxed": ("store_release(row(x, peer, 0)", "store_relaxed(row(x, peer, 0)"),
    "acquire turned relaxed": ("load_acquire(inbox)", "load_relaxed(inbox)"),
    "no wait": ("if (spin_until(reached, watch)) *expected", "*expected"),
}
MISTAKES = {
    f"{rig.__name__}-{name}": (rig, Change(source, *texts))
    for rig, source, mistakes in (
        (Signals, "signal.cu", OF_SIGNALS),
        (Outboxes, "message.cu", OF_MESSAGES),
        (Fences, "window.cu", OF_WINDOWS),
        (Groups, "window.cu", OF_WINDOWS),
    )
    for name, texts in mistakes.items()
}
test_race_is_seen = controls(run, MISTAKES, watched=True)


def test_rank_that_does_not_signal_is_named_and_the_waiting_rank_does_not_signal(builds: Builds) -> None:
    signals = Signals(builds, 2)
    signals.wait(0, 1, pad=0, timeout_s=0.2)
    signals.signal(0, 1, pad=0)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=1, sequence=1, block=0, peer=1"):
        signals.machine.run(limit_s=10)
    assert not signals.pads[0][1].bytes.any()


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


def test_rank_that_does_not_come_is_named_and_is_sent_nothing_more(builds: Builds) -> None:
    boards = Boards(builds, 2)
    boards.step(MEET_KERNEL, 0, WAIT, kind=2, waits=[1], timeout_s=0.2)
    boards.step(MEET_KERNEL, 0, FENCE, signals=[1], waits=[1])
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=7, sequence=1, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert not boards.boards[1].bytes.any()
