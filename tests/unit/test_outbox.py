"""The places of messages: none in two at once, all given back, whatever the order in which receivers are done."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from mpicomm.devices.host import array_at
from mpicomm.messages import outbox
from mpicomm.messages.description import Description
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.outbox import DONE, Outbox, OutboxFullError
from tests.helpers.message_devices import ThreadDevice

MOST = 24 << 20


@pytest.fixture
def device(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    monkeypatch.setattr(outbox, "FIRST_BLOCK_NBYTES", 2 << 20)
    double = ThreadDevice(0, 5.0, total_nbytes=64 * MOST, slowest_s=0)
    yield double
    double.close()


@pytest.fixture
def box(device: ThreadDevice) -> Iterator[Outbox]:
    box = Outbox(cast(MessageDevice, device))
    yield box
    box.close()


def places(box: Outbox, described: Description) -> list[tuple[int, int]]:
    found = []
    for extent in described.extents:
        segment = box.find(extent.packet)
        assert segment is not None and extent.offset + extent.nbytes <= segment.nbytes
        found.append((segment.pointer + extent.offset, segment.pointer + extent.offset + extent.nbytes))
    return found


def finish(box: Outbox, described: Description) -> None:
    """Say, as the receiver would, that it has copied the message."""
    words = box.find(described.words)
    assert words is not None
    array_at(words.pointer + described.line + DONE, 1, np.dtype(np.uint64))[0] = described.last


def test_messages_do_not_overlap_and_nothing_is_lost(box: Outbox, device: ThreadDevice) -> None:
    rng = random.Random(5)
    under_way: list[Description] = []
    for number in range(400):
        nbytes = rng.choice((40_000, 70_000, 1 << 20, 3 << 20, (5 << 20) + 1))
        try:
            described = box.reserve(nbytes)
        except OutboxFullError:
            assert sum(each.nbytes for each in under_way) + nbytes > MOST // 3, "there should have been room"
            described = None
        if described is not None:
            assert sum(stop - start for start, stop in places(box, described)) == nbytes
            taken = sorted(place for each in (*under_way, described) for place in places(box, each))
            ends = [0, *(stop for _, stop in taken)]
            assert all(end <= start for end, (start, _) in zip(ends, taken, strict=False)), number
            under_way.append(described)
        while under_way and (described is None or rng.random() < 0.5):
            finish(box, under_way.pop(rng.randrange(len(under_way))))
            described = under_way[-1] if under_way else None
    for each in under_way:
        finish(box, each)
    assert box.is_drained()
    assert len(box.reserve(MOST).extents) <= 8  # all of it in one piece again
    assert device.allocated <= MOST + (1 << 20)


def test_what_is_not_received_keeps_its_place(box: Outbox) -> None:
    kept = [box.reserve(MOST // 4) for _ in range(4)]
    with pytest.raises(OutboxFullError, match="not received yet"):
        box.reserve(MOST // 4)
    finish(box, kept[2])
    assert places(box, box.reserve(MOST // 4)) == places(box, kept[2])
    assert not box.is_drained()


def test_counts_go_on_where_the_last_message_has_left_them(box: Outbox) -> None:
    seen: dict[int, int] = {}
    for number in range(2000):
        described = box.reserve(100_000)
        assert described.first == seen.get(described.line, 0) and described.number == number + 1
        seen[described.line] = described.last
        finish(box, described)


def test_there_are_only_so_many_messages_under_way(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    box._lines = box._lines[:3]
    under_way: list[Any] = [box.reserve(40_000) for _ in range(3)]
    with pytest.raises(OutboxFullError, match="messages are in flight"):
        box.reserve(40_000)
    finish(box, under_way[0])
    assert box.reserve(40_000).line == under_way[0].line
