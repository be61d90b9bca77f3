"""Ranks with the boards of a window, whose steps are kernels of window.cu."""

from __future__ import annotations

from collections.abc import Sequence

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
from tests.kernels.launches import kernel_of
from tests.kernels.words_rig import WordsRig


class Boards(WordsRig):
    """Ranks with boards; subclasses say how the ranks synchronise."""

    def __init__(self, builds: Builds, size: int, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
        super().__init__(builds, size, (), changes)
        self.boards = [self.machine.allocate(rank, BOARD_NBYTES) for rank in range(size)]
        self.tables = [
            self.machine.place(rank, np.array(self.machine.addresses(self.boards, rank), np.uint64))
            for rank in range(size)
        ]
        self._timeout_s = timeout_s
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
        faults = self.machine.faults[rank]
        limits = int((timeout_s or self._timeout_s) * 1e9), faults.record, faults.failed
        arguments = SynchronisationArguments(
            self.tables[rank].address, *sets, *limits, rank, kind, operation, exclusive, yields
        )
        self.machine.launch(rank, self._kernels[kernel], [arguments], blocks=1, threads=WINDOW_THREADS, nap_us=nap_us)

    def lock(self, rank: int) -> LockWords:
        """Return the lock of a rank's memory."""
        return lock_of(self.boards[rank].bytes.ctypes.data)
