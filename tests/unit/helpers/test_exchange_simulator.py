from __future__ import annotations

import pytest

from mpicomm.collectives.exchange import Exchange
from tests.helpers.references.exchange_simulator import DTYPE, ranks, run


def test_simulator_finds_faults() -> None:
    """The tests of patterns can fail: the simulator finds exchanges that are wrong."""
    memories = ranks(2)
    buffers = [memory.buffer(3, "x") for memory in memories]
    nothing = Exchange(DTYPE, (None, None), (None, None))
    sends = Exchange(DTYPE, (None, buffers[0]), (None, None))
    with pytest.raises(AssertionError, match="does not receive"):
        run(memories, [[sends], [nothing]])
    with pytest.raises(AssertionError, match="does not send"):
        run(memories, [[nothing], [Exchange(DTYPE, (None, None), (buffers[1], None))]])
    with pytest.raises(AssertionError, match="different numbers"):
        run(memories, [[nothing], []])
    with pytest.raises(AssertionError):
        run(memories, [[sends], [Exchange(DTYPE, (None, None), (buffers[1], None))]])  # no rank expects x0@0 there
