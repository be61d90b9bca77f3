"""Random sequences of collectives, blocking, nonblocking and persistent, on communicators that share ranks.

Hypothesis chooses, the same on all ranks: from a fixed seed, and from how the sequences before went, on which the ranks
agree. So it can also make one that fails smaller, on all ranks at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.inputs.communicator_calls import compile_reductions
from tests.helpers.inputs.random_collectives import REDUCED, Family, Player, known
from tests.helpers.rigs.communicators import array_module

SEQUENCES = int(os.environ.get("TEST_SEQUENCES", "120"))
LONGEST = 40


class Choices:
    """Hypothesis as a generator of random numbers; the smaller ones it tries are the plainer calls."""

    def __init__(self, source: Random) -> None:
        self._source = source

    def integers(self, low: int, high: int | None = None) -> int:
        return self._source.randrange(low) if high is None else self._source.randrange(low, high)

    def random(self) -> float:
        return 1 - self._source.randrange(100) / 100

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(self.integers(1 << 16)).permutation(count)


class Families:
    """The communicators, and new ones after a sequence that failed."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.now = Family(device)

    def renew(self) -> None:
        self.now.free()
        self.now = Family(self._device)


@pytest.fixture(scope="module")
def families(device: str) -> Iterator[Families]:
    families = Families(device)
    with array_module(families.now.world):
        compile_reductions(families.now.world, known(REDUCED))
    yield families
    families.now.free()


# Choices that depend on time, or on the memory of one rank, would take the ranks apart.
@settings(
    max_examples=SEQUENCES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(calls=st.integers(1, LONGEST), random=st.randoms(use_true_random=False))
def test_random_sequences(families: Families, calls: int, random: Random) -> None:
    with array_module(families.now.world) as xp:
        player = Player(families.now, calls, xp, Choices(random))
        try:
            player.play(calls)
        except Exception:
            player.complete()
            families.renew()
            raise
        except BaseException:  # Hypothesis gives a sequence up that it cannot make smaller in this way
            player.complete()
            raise
