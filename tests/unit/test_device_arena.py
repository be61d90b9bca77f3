"""What the ranks' arenas give for copy engines, and what becomes of it where there is no memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="the sizes of kernels' memory are in modules that need cuda-bindings")

from mpicomm.collectives.gpu import arena as device_arena
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.collectives.gpu.arena import DeviceArena, NoStagingError
from mpicomm.errors import HandleError

MIB = 1 << 20


class Machine:
    """Memory of which there is so much, in one piece, for what comes after the arena."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1 << 40
        self.asked: list[int] = []
        monkeypatch.setattr(device_arena, "share", self._share)
        node, backend = SimpleNamespace(size=2), SimpleNamespace(loading=contextlib.nullcontext)
        self.arena = DeviceArena(node, backend, "ipc", ArenaLayout(2, 8), lambda: None)  # type: ignore[arg-type]
        self.asked.clear()

    def _share(self, node: Any, backend: Any, what: str, produce: Any, signature: Any) -> Any:
        self.asked.append(signature())
        if signature() > self.free:
            raise HandleError("rank 1: out of memory")
        return [SimpleNamespace(pointer=100 * len(self.asked) + rank) for rank in range(node.size)]


def test_memory_that_was_refused_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.free = 6 * MIB
    small = machine.arena.staging(2 * MIB)
    for again in range(2):
        for nbytes in (5 * MIB, 8 * MIB, 9 * MIB):
            with pytest.raises(NoStagingError, match="rank 1: out of memory"):
                machine.arena.require_staging(nbytes) if again else machine.arena.staging(nbytes)
    assert machine.asked == [2 * MIB, 8 * MIB]
    # Also when there is some again: ranks that keep what they chose then would choose otherwise than the others.
    machine.free = 1 << 40
    with pytest.raises(NoStagingError):
        machine.arena.staging(8 * MIB)
    machine.arena.require_staging(0)
    machine.arena.require_staging(2 * MIB)
    assert machine.arena.staging(2 * MIB) == machine.arena.staging(MIB) == small
    assert machine.arena.staging(3 * MIB) != small and machine.asked == [2 * MIB, 8 * MIB, 4 * MIB]
