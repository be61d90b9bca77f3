"""The regions of an arena: requests that share a region, and requests without memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="the arena is memory of a GPU")

from mpicomm.collectives.gpu import call_memory as device_arena
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Request
from mpicomm.collectives.gpu.call_memory import DeviceArena, NoMemoryError, OverBoundError
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.kernels.team import ABSENT

MIB = 1 << 20


class Segments(list[Any]):
    @property
    def pointers(self) -> list[int]:
        return [each.pointer for each in self]

    content: Any


class Machine:
    """An arena of two ranks on a machine that has ``free`` bytes for each region."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_nbytes: int | None = None) -> None:
        self.free = 1 << 40
        self.asked: list[int] = []
        monkeypatch.setattr(device_arena, "share", self._share)
        node, self.backend = SimpleNamespace(size=2), SimpleNamespace(loading=contextlib.nullcontext)
        self.arena = DeviceArena(node, self.backend, "ipc", ArenaLayout(2, 8), most_nbytes)  # type: ignore[arg-type]
        self.asked.clear()

    def _share(self, node: Any, backend: Any, what: str, produce: Any, signature: Any) -> Any:
        self.asked.append(signature())
        if signature() > self.free:
            raise HandleError("rank 1: out of memory", ranks=[1])
        return Segments(SimpleNamespace(pointer=100 * len(self.asked) + rank) for rank in range(node.size))


def test_a_request_takes_the_smallest_region_of_its_purpose_that_it_fits_into(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    large, small = Request("copies", 8 * MIB), Request("copies", 2 * MIB)
    for request in (large, small):
        machine.arena.set_up(request)
    assert machine.arena.region(Request("copies", MIB)) == machine.arena.region(small)
    assert machine.arena.region(Request("copies", 3 * MIB)) == machine.arena.region(large)
    assert machine.arena.region(large).slots_nbytes == 8 * MIB
    assert not machine.arena.has(Request("copies", 9 * MIB))
    assert not machine.arena.has(Request("chain", MIB))
    assert not machine.arena.has(Request("copies", MIB, words_nbytes=128))


def test_slots_of_the_sentinel_protocol_have_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.arena.set_up(Request("chain", 32 * MIB, words_nbytes=MIB, sentinel=True))
    machine.arena.set_up(Request("slots", 32 * MIB, words_nbytes=MIB))
    assert machine.asked == [35 * MIB, 33 * MIB]


def test_a_region_that_cannot_be_set_up_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.free = MIB
    with pytest.raises(NoMemoryError, match="rank 1: out of memory") as caught:
        machine.arena.set_up(Request("copies", 2 * MIB))
    assert list(caught.value.ranks) == [1]
    assert not machine.arena.has(Request("copies", 2 * MIB))


def test_regions_stay_below_the_bound_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10 * MIB)
    machine.arena.require_room(Request("copies", 10 * MIB))
    machine.arena.set_up(Request("copies", 5 * MIB))  # which takes 6
    machine.arena.require_room(Request("chain", 4 * MIB))
    with pytest.raises(OverBoundError) as caught:
        machine.arena.require_room(Request("chain", 4 * MIB, words_nbytes=1))
    assert isinstance(caught.value, InvalidUsageError)
    assert str(caught.value) == (
        f'MPICOMM_MEMORY leaves {4 * MIB} bytes for shared memory of this communicator, and "chain" takes {6 * MIB}: '
        f"raise MPICOMM_MEMORY by {2 * MIB} bytes or more, or unset it"
    )


def test_without_a_bound_there_is_room_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch).arena.require_room(Request("copies", 1 << 60))


def test_a_suspension_keeps_messages_and_makes_other_memory_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.arena.set_up(Request("messages", 2 * MIB, words_nbytes=128, holds_messages=True))
    machine.arena.set_up(Request("chain", 2 * MIB, words_nbytes=128, sentinel=True))
    arena, messages, chain = (segments.content for segments in machine.arena.memories())
    assert arena is not None and messages is not None and chain is not None
    assert (messages.kept_nbytes, messages.fill) == (2 * MIB + 128, None)
    assert arena.kept_nbytes == chain.kept_nbytes == 0
    filled: list[tuple[int, int, int]] = []
    machine.backend.fill = lambda *given: filled.append(given)
    machine.backend.fill_words = lambda *given: filled.append(given)
    assert chain.fill is not None
    chain.fill(1 << 40)
    slots = (1 << 40) + 128
    assert filled == [(1 << 40, 128, 0), (slots, 2 * MIB, ABSENT), (slots + 2 * MIB, 2 * MIB // 16, 0)]
