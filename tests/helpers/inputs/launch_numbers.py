"""Numbers of launches in the head of an arena, as if there had been many launches, and the flags of these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES
from mpicomm.kernels.team import ARENA_HEADER_NBYTES, LINE_NBYTES, MAX_BLOCKS

_PARITIES = 2


def begin_after(launch: int, head: npt.NDArray[np.uint8], size: int) -> None:
    """Let this launch be the last of all ``size`` ranks, which have begun and ended it, in one rank's ``head``."""
    head[ARENA_HEADER_NBYTES - MAX_BLOCKS * 8 : ARENA_HEADER_NBYTES].view(np.uint64)[:] = launch
    announcements = head[LINE_NBYTES : LINE_NBYTES + size * _PARITIES * 8]
    words = announcements.view(np.uint64).reshape(size, _PARITIES)
    for begun in (max(0, launch - 1), launch):
        words[:, begun % _PARITIES] = begun << 32


def old_flags(nbytes: int, rng: np.random.Generator, first: int = 2) -> npt.NDArray[np.uint64]:
    """Return packets of the LL protocol with wrong data and with the flags of launches ``first`` to 98 of a round."""
    flags = rng.integers(first + 1, 100, nbytes // SLOT_NBYTES).astype(np.uint64)
    return np.repeat(flags << np.uint64(32) | np.uint64(0xBAD), SLOT_NBYTES // 8)
