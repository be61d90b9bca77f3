"""Random sequences of collectives, blocking, nonblocking and persistent, on communicators that share ranks.

Hypothesis chooses, the same on all ranks: from a fixed seed, and from how the sequences before went, on which the ranks
agree. So it can also make one that fails smaller, on all ranks at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from tests.helpers.inputs.communicator_calls import compile_reductions
from tests.helpers.inputs.random_collectives import REDUCED, Family, Player, known
from tests.helpers.rigs.communicators import array_module

# Runs on 2 and 4 ranks repeat the first sequences of the run on 3, because the seed is the same.
SEQUENCES = int(os.environ.get("TEST_SEQUENCES", "40" if MPI.COMM_WORLD.size in (2, 4) else "80"))
LONGEST = 40
NBYTES = 16
DIGITS = st.binary(min_size=NBYTES, max_size=NBYTES)


class Choices:
    """Hypothesis as a generator of random numbers; the smaller ones it tries are the plainer calls.

    It draws many digits at a time, because each draw takes as long as a short call.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[bytes]], bytes]) -> None:
        self._draw, self._left, self._room = draw, 0, 1

    def integers(self, low: int, high: int | None = None) -> int:
        low, high = (0, low) if high is None else (low, high)
        if self._room >> 16 < high - low:  # so that no choice is much likelier than another one
            self._left, self._room = int.from_bytes(self._draw(DIGITS), "big"), 1 << 8 * NBYTES
        self._room //= high - low
        self._left, chosen = divmod(self._left, high - low)
        return low + chosen

    def random(self) -> float:
        return 1 - self.integers(100) / 100


class Families:
    """The communicators, and new ones after a sequence that failed."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.now = Family(device)

    def renew(self) -> None:
        self.now.free()
        self.now = Family(self._device)


@pytest.fixture(scope="module", params=["memory", "threads"])
def families(device: str, request: pytest.FixtureRequest) -> Iterator[Families]:
    if request.param == "threads" and (device != "cpu" or MPI.COMM_WORLD.size == 1):
        pytest.skip("threads stand for GPUs where none are, and one rank has no others that pass other buffers")
    families = Families(request.param if request.param == "threads" else device)
    with array_module(families.now.world):
        compile_reductions(families.now.world, known(REDUCED))
    yield families
    families.now.free()


# Choices that depend on time, or on the memory of one rank, would take the ranks apart.
@settings(
    max_examples=SEQUENCES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(calls=st.integers(1, LONGEST), data=st.data())
def test_random_sequences(families: Families, calls: int, data: st.DataObject) -> None:
    """Each rank draws where its buffers lie, what lies between their blocks, and how it names them."""
    if families.now.device == "threads":
        calls = calls // 3 + 1  # they take longer
    with array_module(families.now.world) as xp:
        player = Player(families.now, calls, xp, Choices(data.draw))
        try:
            player.play(calls)
        except Exception:
            player.complete()
            families.renew()
            raise
        except BaseException:  # Hypothesis gives a sequence up that it cannot make smaller in this way
            player.complete()
            raise
