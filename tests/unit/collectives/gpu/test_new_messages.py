"""Messages in stream order of new sizes at new addresses, over a CUDA that launches nothing."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.exchange import Message
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.rigs.fake_engines import STREAM, Rig
from tests.helpers.rigs.plan_caches import Array

PEER, TAG = 1, 7
Route = tuple[int, int, int, int]
BOTH: Route = (PEER, TAG, PEER, MPI.ANY_TAG)


class Messages:
    """The way of messages between two ranks."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        from mpicomm.collectives.gpu.plan_cache import PlanCache

        monkeypatch.setattr(sys.modules["cupy"], "ndarray", Array, raising=False)
        self._rig = rig = Rig(cuda, monkeypatch)
        backend = SimpleNamespace(stream=lambda stream, array: STREAM)
        session: Any = SimpleNamespace(mappings=Mappings(), backend=backend, require_usable=lambda what: None)
        self._cache = PlanCache(session, rig.engine)
        self.planned = 0

    def exchange(self, send: Array | None, receive: Array | None, route: Route = BOTH) -> tuple[tuple[int, ...], ...]:
        """Make a call as the dispatcher does. Return the address, bytes and blocks of both messages in the launch."""
        call = "Sendrecv", send, receive, route
        known = self._cache.find_message(*call)
        if known is None:
            self.planned += 1
            sent = None if send is None else message(send, TAG)
            received = None if receive is None else message(receive, None)
            known = plan = self._rig.engine.prepare_messages("Sendrecv", sent, received)
            plan.by_output = send is None
            self._cache.add_message(plan, *call, sent, received)
        self._cache.enqueue(known, None, send, receive)
        arguments, shape = self._rig.launched[-1], self._rig.shapes[-1]
        sides = arguments.sent, arguments.received
        assert shape["blocks"] == sum(side.blocks for side in sides)
        assert all(side.blocks * side.stride >= side.nbytes for side in sides)
        return tuple((side.pointer, side.nbytes, side.tag) for side in sides)


@pytest.fixture
def messages(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Messages:
    return Messages(cuda, monkeypatch)


def message(array: Array, tag: int | None) -> Message:
    return Message(PEER, Span(array.data.ptr, array.size * array.itemsize), tag)


def array_of(buffer: int, count: int, rng: random.Random) -> Array:
    return Array((buffer << 50) + 256 * rng.randrange(1 << 20), (count,))


def test_new_messages_are_filled_with_their_addresses_and_lengths(messages: Messages) -> None:
    rng, tags = random.Random(1), set()
    counts = [(5, 9), (100_003, 3), (1, 1 << 20), (5_000_001, 4), (12, 0), (0, 12), (3, 3)]
    for number, (sent, received) in enumerate(counts):
        send, receive = array_of(1, sent, rng), array_of(2, received, rng)
        (pointer, nbytes, tag), (into, room, _) = messages.exchange(send, receive)
        assert (pointer, nbytes) == ((send.data.ptr, 4 * sent) if sent else (0, 0)), number
        assert (into, room) == ((receive.data.ptr, 4 * received) if received else (0, 0)), number
        tags.add(tag)
    assert messages.planned == 1
    assert len(tags) == len({sent for sent, _ in counts})  # it contains the length


def test_messages_of_other_ranks_tags_and_kinds_are_planned(messages: Messages) -> None:
    rng = random.Random(3)
    for planned, route in enumerate([BOTH, (PEER, 8, PEER, MPI.ANY_TAG), (PEER, TAG, PEER, 8), (0, TAG, PEER, 8)], 1):
        for _ in range(2):
            messages.exchange(array_of(1, 4, rng), array_of(2, 4, rng), route)
        assert messages.planned == planned
    only_sent: Route = (PEER, TAG, MPI.PROC_NULL, MPI.ANY_TAG)
    for count in (4, 5):
        assert messages.exchange(array_of(1, count, rng), None, only_sent)[1] == (0, 0, 0)
    assert messages.planned == 5
    messages.exchange(Array(1 << 50, (4,), "f8"), array_of(2, 4, rng))
    assert messages.planned == 6


def test_wrong_and_empty_messages_are_not_filled(messages: Messages) -> None:
    rng = random.Random(4)
    messages.exchange(array_of(1, 4, rng), array_of(2, 4, rng))
    overlapping = Array(1 << 50, (8,)), Array((1 << 50) + 16, (8,))
    empty = Array(1 << 50, (0,)), Array(2 << 50, (0,))
    for send, receive in (overlapping, overlapping[::-1], empty):
        assert messages._cache.find_message("Sendrecv", send, receive, BOTH) is None


def test_an_empty_first_message_does_not_tell_the_bytes_of_an_element(messages: Messages) -> None:
    rng = random.Random(5)
    messages.exchange(array_of(1, 0, rng), array_of(2, 4, rng))
    for count in (4, 5):
        send = array_of(1, count, rng)
        assert messages.exchange(send, array_of(2, 4, rng))[0][:2] == (send.data.ptr, 4 * count)
    assert messages.planned == 2


def test_a_repeated_message_gets_a_plan_with_a_graph(messages: Messages) -> None:
    rng = random.Random(6)
    for count in (4, 5):
        messages.exchange(array_of(1, count, rng), array_of(2, count, rng))
    send, receive = array_of(1, 6, rng), array_of(2, 6, rng)
    for _ in range(12):
        messages.exchange(send, receive)
    assert messages.planned == 2


def test_types_have_their_own_lengths(messages: Messages) -> None:
    for dtype in ("f8", "i2"):
        for count in (3, 4):
            send, receive = Array(1 << 50, (count,), dtype), Array(2 << 50, (count,), dtype)
            nbytes = count * np.dtype(dtype).itemsize
            assert [side[1] for side in messages.exchange(send, receive)] == [nbytes, nbytes]
    assert messages.planned == 2
