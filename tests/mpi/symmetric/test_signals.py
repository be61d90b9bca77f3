"""Signals of a SymmetricArray: their order, their counts, and waits that time out; and shared events."""

from __future__ import annotations

import re
from collections import Counter
from random import Random
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


@pytest.mark.parametrize("seed", range(3))
def test_a_signal_that_no_rank_sent_does_not_come_and_the_communicator_is_unusable_then(device: str, seed: int) -> None:
    """Not instead of a signal of another array or rank, nor of a closed array whose place the array has taken."""
    random = Random(seed)  # the same on all ranks
    with communicator(device, timeout_s=patience_s(device)) as comm:
        arrays = [comm.zeros(1), comm.zeros((2, 3), np.float32)]
        sent: Counter[tuple[int, int, int]] = Counter()
        waited = sent.copy()
        for turn in range(60):
            which, sender, receiver = random.randrange(2), random.randrange(comm.size), random.randrange(comm.size)
            key = which, sender, receiver
            if turn == 40:
                pad = arrays[which]._pad
                arrays[which].close()
                arrays[which] = comm.zeros((4, 1), np.int8)
                assert arrays[which]._pad == pad  # else it has other counters, and the test shows nothing
                for count in (sent, waited):
                    count.update({each: -count[each] for each in count if each[0] == which})
            elif random.random() < 0.6:
                sent[key] += 1
                if comm.rank == sender:
                    arrays[which].signal(receiver)
            elif sent[key] > waited[key]:
                waited[key] += 1
                if comm.rank == receiver:
                    arrays[which].wait_signal(sender)
        settle(comm)
        for which, sender, _ in (key for key in (sent - waited).elements() if key[2] == comm.rank):
            arrays[which].wait_signal(sender)
        which, peer = random.randrange(2), (comm.rank + seed) % comm.size
        array, number = arrays[which], sent[which, peer, comm.rank] + 1
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
