"""Variations of a case: calls of other sizes at other addresses, the same on all ranks.

Such calls come from a program with changing batches and an allocator that places arrays anew. Sizes stay within a
factor of two, so that each call has the algorithm and the geometry of the case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SEED = 48
_STEP_NBYTES = 512  # PyTorch and CuPy place arrays of GPUs at multiples of it
_PLACES = 64
ROOM_NBYTES = _STEP_NBYTES * _PLACES
"""The bytes that an array for all variations has in addition to the largest case."""


@dataclass(frozen=True)
class Variation:
    """A call on blocks of ``block`` elements. Its buffers begin ``shift`` bytes into their arrays."""

    block: int
    shift: int


def draw(largest: int, wanted: int) -> list[Variation]:
    """Return ``wanted`` different variations of blocks of at most ``largest`` elements, or all that exist.

    Blocks have more than half of ``largest``. Every rank draws the same variations.
    """
    smallest = largest // 2 + 1
    possible = (largest - smallest + 1) * _PLACES
    drawn = np.random.default_rng([_SEED, largest]).choice(possible, min(wanted, possible), replace=False)
    return [Variation(smallest + number // _PLACES, number % _PLACES * _STEP_NBYTES) for number in drawn.tolist()]


def mean_share(largest: int) -> float:
    """Return the mean block of all variations, divided by ``largest``."""
    return (largest // 2 + 1 + largest) / 2 / largest
