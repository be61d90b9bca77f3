"""Signals of a SymmetricArray: their order, their counts, and waits that time out; and shared events."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, SharedEvent
from mpicomm.sharing import segments as shared_memory
from tests.helpers.rigs.communicators import (
    array_module,
    communicator,
    patience_s,
    require_memory_works,
    settle,
    to_host,
)

Missing = tuple[mpicomm.SymmetricArray, int, int]
"""An array, and the rank and the number of a signal that does not come."""


def test_ring_hands_over_200_times(comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    rounds, count = 200, 100
    with comm.zeros(count, np.int64) as array:
        seen = xp.zeros((rounds, count), np.int64)
        for turn in range(rounds):
            array.put(xp.full(count, 1000 * turn + comm.rank), right)
            array.signal(right)
            array.wait_signal(left)
            seen[turn] = array.local
            # This rank has read: its left neighbour may write again.
            array.signal(left)
            array.wait_signal(right)
        comm.check()
        expected = np.repeat(1000 * np.arange(rounds) + left, count).reshape(rounds, count)
        assert np.array_equal(to_host(seen), expected)


def five_of_five(comm: mpicomm.Communicator) -> Missing:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    array, other = comm.zeros(1), comm.zeros(1)
    for _ in range(5):
        array.signal(right)
    settle(comm)
    other.signal(right)
    for _ in range(5):
        array.wait_signal(left)
    comm.check()
    other.wait_signal(left)
    return array, left, 6


def of_another_array_or_rank(comm: mpicomm.Communicator) -> Missing:
    array, other = comm.zeros((2, 3), np.float32), comm.zeros(1)
    for peer in range(comm.size):
        if peer != 0:
            array.signal(peer)
        other.signal(peer)
    settle(comm)
    for peer in range(comm.size):
        other.wait_signal(peer)
        if comm.rank != 0:
            array.wait_signal(peer)
    return array, comm.size - 1, 1 if comm.rank == 0 else 2


def of_a_closed_array(comm: mpicomm.Communicator) -> Missing:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    array = comm.zeros(1)
    for _ in range(3):
        array.signal(right)
    array.wait_signal(left)
    pad = array._pad
    array.close()
    array = comm.zeros(1)
    assert array._pad == pad  # else the array has other counters, and the test shows nothing
    array.signal(right)
    array.wait_signal(left)
    settle(comm)
    return array, left, 2


@pytest.mark.parametrize("before", [five_of_five, of_another_array_or_rank, of_a_closed_array])
def test_a_signal_that_no_rank_sent_does_not_come_and_the_communicator_is_unusable_then(
    device: str, before: Callable[[mpicomm.Communicator], Missing]
) -> None:
    with communicator(device, timeout_s=patience_s(device)) as comm:
        array, peer, number = before(comm)
        comm.check()
        said = f"number {number} from rank {peer} did not come within"
        with pytest.raises(CollectiveTimeoutError, match=f"wait_signal: {said}") as excinfo:
            array.wait_signal(peer)
            comm.check()
        assert excinfo.value.ranks == (peer,)
        if device == "cpu":
            shape = f"shape={array.shape!r} dtype={array.dtype}"
            excinfo.match(f"create another; rank {peer} must call signal on the same array, .* {re.escape(shape)}")
        for use in (comm.check, lambda: comm.empty(3), lambda: array.signal(0), lambda: array.local):
            with pytest.raises(CollectiveTimeoutError, match=said):
                use()
        comm.Barrier()
    assert array.closed
    with communicator(device) as comm:
        require_memory_works(comm)


def test_signals_work_in_every_chunk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_CHUNK_NBYTES", 2 * shared_memory._LINE_NBYTES)  # two arrays in each
    with communicator(device) as comm, array_module(comm) as xp:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def ring(arrays: list[mpicomm.SymmetricArray]) -> None:
            for number, array in enumerate(arrays):
                array.put(xp.asarray([10 * number + comm.rank]), right)
                array.signal(right)
            for array in reversed(arrays):
                array.wait_signal(left)
            comm.check()
            assert [int(array.local[0]) for array in arrays] == [10 * each + left for each in range(len(arrays))]
            comm.Barrier()

        arrays = [comm.zeros(1, np.int64) for _ in range(7)]
        ring(arrays)
        for number in (5, 0, 3):
            arrays[number].signal(right)  # no rank waits for it
            arrays[number].close()
            arrays[number] = comm.zeros(1, np.int64)
        ring(arrays)


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


def test_events_wait_for_nothing_before_a_record_and_are_closed_by_free(device: str) -> None:
    with communicator(device) as comm:
        event, open_to_the_end = comm.shared_event(), comm.shared_event()
        for peer in range(comm.size):
            event.wait(peer)
        comm.check()
        event.close()
        event.close()
    for each in (event, open_to_the_end):
        assert each.closed
        each.close()
        for use in (each.record, lambda each=each: each.wait(0)):
            with pytest.raises(InvalidUsageError, match="this SharedEvent is closed; create another"):
                use()


def test_stream_is_refused_on_the_host(host_comm: mpicomm.Communicator) -> None:
    event = host_comm.shared_event()
    with pytest.raises(InvalidUsageError, match="has no streams"):
        event.record(0)
    with pytest.raises(InvalidUsageError, match="has no streams"):
        event.wait(host_comm.rank, 0)
    event.close()
