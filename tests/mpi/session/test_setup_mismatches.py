"""Ranks call different things in a set-up: all get an error, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpicomm import PeerError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.faults.setup_failures import EVERY_RANK, FIRST_AND_LAST, WORLD
from tests.helpers.rigs.communicators import communicator, require_memory_works, to_host

DIFFERENT: dict[str, tuple[str, str]] = {
    "empty, zeros": ("empty", "zeros"),
    "zeros, shared_event": ("zeros", "shared_event"),
    "zeros, close": ("zeros", "close first"),
    "close, close": ("close first", "close second"),
    "close, close event": ("close first", "close event"),
    "close, Free": ("close second", "Free"),
    "zeros, Free": ("zeros", "Free"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("of_others", "of_culprit"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_call_different_things_are_told_so(device: str, of_others: str, of_culprit: str) -> None:
    with communicator(device) as comm:
        first, second, event = comm.zeros(1, np.int64), comm.zeros(1, np.int64), comm.shared_event()
        calls: dict[str, tuple[Callable[[], object], str]] = {
            "empty": (lambda: comm.empty(3), "empty"),
            "zeros": (lambda: comm.zeros(3), "zeros"),
            "shared_event": (comm.shared_event, "shared_event"),
            "close first": (first.close, "SymmetricArray 0: close"),
            "close second": (second.close, "SymmetricArray 1: close"),
            "close event": (event.close, "SharedEvent 2: close"),
            "Free": (comm.Free, "Free"),
        }
        for culprit in FIRST_AND_LAST:
            said = [calls[of_culprit if rank == culprit else of_others][1] for rank in EVERY_RANK]
            said = [f"rank {rank}: {each}" for rank, each in enumerate(said)]
            with raises_everywhere(WORLD, PeerError, match="ranks called different things: " + ".*; ".join(said)):
                calls[of_culprit if WORLD.rank == culprit else of_others][0]()
            # Nothing has changed on any rank.
            assert [first.closed, second.closed, event.closed] == [False] * 3
            for array in (first, second):
                array.local[0] = comm.rank
                array.signal((comm.rank + 1) % comm.size)
                array.wait_signal((comm.rank - 1) % comm.size)
                comm.check()
                assert int(to_host(array.peer((comm.rank - 1) % comm.size))[0]) == (comm.rank - 1) % comm.size
            require_memory_works(comm)
        first.close()
        event.close()
