"""Fences and groups of window.cu around kernels that write into the memory of other ranks."""

from __future__ import annotations

import pytest

from mpicomm.kernels.window import FENCE, MEET_KERNEL, START, WAIT
from tests.kernels.build import Builds, Change
from tests.kernels.machine import RunFailedError, controls
from tests.kernels.words_rig import Boards

ROUNDS = 25


class Fences(Boards):
    """Every rank writes into the next rank's memory between two fences, and adds up its own."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following = (rank + 1) % self.size
        others = [each for each in range(self.size) if each != rank]
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        for act in ("write", "read"):
            self.step(MEET_KERNEL, rank, FENCE, signals=others, waits=others, nap_us=nap_us)
            if act == "write":
                self.add(rank, self.words[rank].address)


class Groups(Boards):
    """The same with Post, Start, Complete and Wait, between neighbours only."""

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        following, previous = (rank + 1) % self.size, (rank - 1) % self.size
        self.step(MEET_KERNEL, rank, START, kind=1, signals=[previous])
        self.step(MEET_KERNEL, rank, START, kind=1, waits=[following], nap_us=nap_us)
        self.write(rank, self.machine.address(following, self.words[following], rank), number)
        self.step(MEET_KERNEL, rank, WAIT, kind=2, signals=[following], nap_us=nap_us)
        self.step(MEET_KERNEL, rank, WAIT, kind=2, waits=[previous])
        self.add(rank, self.words[rank].address)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rig", [Fences, Groups])
def test_data_is_there_after_the_synchronisation(builds: Builds, rig: type[Boards], size: int) -> None:
    rig(builds, size).run(ROUNDS)


@pytest.mark.parametrize("rig", [Fences, Groups])
def test_no_race(watched_builds: Builds, rig: type[Boards]) -> None:
    rig(watched_builds, 3).run(ROUNDS)


MISTAKES = {
    "release turned relaxed": Change("window.cu", "store_release(row(x, peer, 0)", "store_relaxed(row(x, peer, 0)"),
    "acquire turned relaxed": Change("window.cu", "load_acquire(inbox)", "load_relaxed(inbox)"),
    "no wait": Change("window.cu", "if (spin_until(reached, watch)) *expected", "*expected"),
}
test_race_is_seen = controls(
    lambda builds, rig, seed, changes: rig(builds, 3, changes).run(ROUNDS),
    {f"{rig.__name__}-{name}": (rig, change) for rig in (Fences, Groups) for name, change in MISTAKES.items()},
    watched=True,
)


def test_rank_that_does_not_come_is_named_and_is_sent_nothing_more(builds: Builds) -> None:
    boards = Boards(builds, 2)
    boards.step(MEET_KERNEL, 0, WAIT, kind=2, waits=[1], timeout_s=0.2)
    boards.step(MEET_KERNEL, 0, FENCE, signals=[1], waits=[1])
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=7, sequence=1, block=0, peer=1"):
        boards.machine.run(limit_s=10)
    assert not boards.boards[1].bytes.any()
