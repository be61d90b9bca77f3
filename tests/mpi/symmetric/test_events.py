from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, SharedEvent
from tests.helpers.rigs.communicators import communicator, to_host


def test_work_before_record_is_seen_after_wait(comm: mpicomm.Communicator, xp: Any) -> None:
    event = comm.shared_event()
    assert isinstance(event, SharedEvent)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    count = 1 << 20
    with comm.zeros(count, np.int64) as array:
        source = xp.empty(count, np.int64)
        for turn in range(20):
            source[...] = 100 * turn + comm.rank
            array.put(source, right)
            event.record()
            comm.Barrier()  # all have recorded
            event.wait(left)
            seen = array.local.copy()
            comm.check()
            assert (to_host(seen) == 100 * turn + left).all()
            comm.Barrier()
    event.close()


def test_wait_without_record_returns(comm: mpicomm.Communicator) -> None:
    event = comm.shared_event()
    for peer in range(comm.size):
        event.wait(peer)
    comm.check()
    event.close()


def test_closed_event_is_refused(comm: mpicomm.Communicator) -> None:
    event = comm.shared_event()
    event.close()
    event.close()
    assert event.closed
    with pytest.raises(InvalidUsageError, match="this SharedEvent is closed; create another"):
        event.record()
    with pytest.raises(InvalidUsageError, match="this SharedEvent is closed; create another"):
        event.wait(0)


def test_free_closes_events(device: str) -> None:
    with communicator(device) as comm:
        event, open_to_the_end = comm.shared_event(), comm.shared_event()
        event.close()
    assert open_to_the_end.closed
    open_to_the_end.close()
    with pytest.raises(InvalidUsageError, match="closed"):
        open_to_the_end.record()


@pytest.mark.mpi(min_size=2)
def test_rank_of_another_host_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = MPI.COMM_WORLD.rank
    monkeypatch.setenv("MPICOMM_HOSTID", f"host {rank % 2}")
    with communicator(device) as comm:
        event = comm.shared_event()
        with pytest.raises(InvalidUsageError, match=f"peer={1 - rank % 2} is on another node"):
            event.wait(1 - rank % 2)
        event.record()
        event.wait(rank)
        comm.check()


def test_stream_is_refused_on_the_host(host_comm: mpicomm.Communicator) -> None:
    event = host_comm.shared_event()
    with pytest.raises(InvalidUsageError, match="has no streams"):
        event.record(0)
    with pytest.raises(InvalidUsageError, match="has no streams"):
        event.wait(host_comm.rank, 0)
    event.close()
