"""Kernels that write words and add them up, around kernels that order them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path

import numpy as np

from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import (
    BOARD_NBYTES,
    LOCK_KERNEL,
    MEET_KERNEL,
    WINDOW_THREADS,
    LockWords,
    SynchronisationArguments,
    lock_of,
)
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Machine, kernel_of

_SOURCE = Path(__file__).parent / "write_words.cu"
WORDS = 500


class WordsRig:
    """Words of every rank, and the sum of words that a neighbour has written; subclasses order the two."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        self.machine, self.size, self._timeout_s = Machine(builds, size), size, timeout_s
        self.words = [self.machine.allocate(rank, WORDS * 8) for rank in range(size)]
        self.sums = [self.machine.allocate(rank, 8) for rank in range(size)]
        self._write, self._add = (builds.kernel(_SOURCE, name) for name in ("write_words", "add_words"))

    def enqueue(self, rank: int, number: int, *, nap_us: int) -> None:
        """Enqueue one round of a rank, which naps before it says that it has written."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the words of the kernels after all rounds."""

    def run(self, rounds: int, seed: int = 0) -> None:
        """Enqueue and run rounds in which ranks nap at random, and check the sums."""
        rng = np.random.default_rng([self.size, seed])
        for number in range(rounds):
            for rank in range(self.size):
                self.enqueue(rank, number, nap_us=int(rng.choice((0, 0, 0, 500))))
        self.machine.run(seed=seed, jitter_us=200, limit_s=30)
        for rank in range(self.size):
            assert int(self.sums[rank].view(np.uint64)[0]) == sum_of_words([self.neighbours(rank)[1]], rounds)
        self.check()

    def neighbours(self, rank: int) -> tuple[int, int]:
        """Return the ranks after and before one."""
        return (rank + 1) % self.size, (rank - 1) % self.size

    def limits(self, rank: int, timeout_s: float = 0) -> tuple[int, int, int]:
        """Return the timeout of a kernel that waits, and where it reports a fault."""
        faults = self.machine.faults[rank]
        return int((timeout_s or self._timeout_s) * 1e9), faults.record, faults.failed

    def write(self, rank: int, address: int, number: int) -> None:
        parameters = (c_uint64(address), c_uint64(rank + number * 10**6), c_uint32(WORDS))
        self.machine.launch(rank, self._write, parameters, blocks=2, threads=64)

    def add(self, rank: int, address: int, total: int | None = None) -> None:
        """Enqueue the addition of a rank's words to its sum, or to the one at ``total``."""
        total = self.sums[rank].address if total is None else total
        parameters = (c_uint64(total), c_uint64(address), c_uint32(WORDS))
        self.machine.launch(rank, self._add, parameters, blocks=1, threads=64)


def sum_of_words(ranks: Sequence[int], rounds: int) -> int:
    """Return the sum of the words that ranks write in so many rounds."""
    firsts = [rank + number * 10**6 for rank in ranks for number in range(rounds)]
    return sum(WORDS * first + sum(range(WORDS)) for first in firsts)


class Boards(WordsRig):
    """Ranks with boards; subclasses say how the ranks synchronise."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, changes, timeout_s)
        self.boards = [self.machine.allocate(rank, BOARD_NBYTES) for rank in range(size)]
        self.tables = [self.machine.table(self.boards, rank) for rank in range(size)]
        self._kernels = {each: kernel_of(builds, each, changes) for each in (MEET_KERNEL, LOCK_KERNEL)}

    def step(
        self,
        kernel: Variant,
        rank: int,
        operation: int,
        *,
        signals: Sequence[int] = (),
        waits: Sequence[int] = (),
        kind: int = 0,
        exclusive: bool = False,
        yields: bool = False,
        timeout_s: float = 0,
        nap_us: int = 0,
    ) -> None:
        sets = (sum(1 << each for each in ranks) for ranks in (signals, waits))
        what = rank, kind, operation, exclusive, yields
        arguments = SynchronisationArguments(self.tables[rank], *sets, *self.limits(rank, timeout_s), *what)
        self.machine.launch(rank, self._kernels[kernel], [arguments], blocks=1, threads=WINDOW_THREADS, nap_us=nap_us)

    def lock(self, rank: int) -> LockWords:
        """Return the lock of a rank's memory."""
        return lock_of(self.boards[rank].bytes.ctypes.data)
