"""The engine counts calls with private lengths and says its memory, over a CUDA that launches nothing."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.kernels.team import Faults
from mpicomm.mpi.span import Span
from tests.helpers import patterns
from tests.helpers.fake_cuda import FakeCuda

MIB = 1 << 20
BYTE = np.dtype(np.uint8)
STREAM = 7


class Rig:
    """The engine of the first of two ranks. The other one sends and knows as much."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, arena = map(
            importlib.import_module, ("mpicomm.collectives.gpu.engine", "mpicomm.collectives.gpu.arena")
        )
        self.launched: list[Any] = []
        self.told: list[str] = []
        kernel = SimpleNamespace(launch_structure=lambda stream, x, **shape: self.launched.append(x))
        kernels = SimpleNamespace(find=lambda variant: kernel, load=lambda variant: kernel)
        monkeypatch.setattr(cuda, "getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(engine, "kernels_of", lambda info: kernels)
        monkeypatch.setattr(arena, "share", self._share)
        monkeypatch.setenv("MPICOMM_TUNING", "off")
        node: Any = SimpleNamespace(rank=0, size=2, ranks=[0, 1], timeout_s=5.0, exchange=self._exchange)
        backend: Any = SimpleNamespace(
            info=DeviceInfo(0, "NVIDIA H200", b"0" * 16, "", -1, (9, 0)),
            multiprocessors=132,
            total_nbytes=140 << 30,
            faults=Faults(),
            timeout_ns=10**9,
            link=lambda uuid, kind: Link("NVLink", gb_s=478.0),
            loading=contextlib.nullcontext,
            current=contextlib.nullcontext,
        )
        board: Any = SimpleNamespace(post=lambda text: None, differ=lambda: False, behind=list)
        self.engine = engine.DeviceEngine(node, backend, "ipc", board)

    def alltoallv(self, nbytes: int) -> Any:
        """Return the plan of a call in which each rank sends so much to each."""
        spans = [Span(1 << 50, nbytes), Span(1 << 51, nbytes)]
        pattern = patterns.alltoall(0, 2, BYTE, spans, [Span(1 << 52, nbytes), Span(1 << 53, nbytes)])
        return self.engine.prepare(pattern.call(Signature("Alltoallv", "uint8")))

    def enqueue(self, plan: Any, *, again: bool = False) -> None:
        self.engine.enqueue(plan, STREAM, again=again)

    def _exchange(self, what: str, work: Any) -> list[Any]:
        self.told.append(what)
        return [work()] * 2

    def _share(self, node: Any, backend: Any, what: str, produce: Any, signature: Any) -> Any:
        segments = [SimpleNamespace(pointer=(rank + 1) << 40, nbytes=signature()) for rank in range(2)]
        return _Segments(segments)


class _Segments(list[Any]):
    @property
    def own(self) -> Any:
        return self[0]


@pytest.fixture
def rig(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(cuda, monkeypatch)


def test_plans_with_private_lengths_are_old_before_the_ranks_tell_each_other_lengths(rig: Rig) -> None:
    old: list[bool] = []
    plan = rig.alltoallv(4096)
    for number in range(1, 33):
        rig.enqueue(plan, again=number > 1 and not old[-1])
        old.append(plan.is_old)
        if plan.is_old:
            plan = rig.alltoallv(4096)
    assert [number for number, is_old in enumerate(old, 1) if is_old] == [1, 3, 7, 15, 31]
    assert rig.told.count("collectives: longest message") == 6


def test_plans_of_other_calls_stay(rig: Rig) -> None:
    span = Span(1 << 50, 1000)
    plan = rig.engine.prepare(patterns.allreduce(0, 2, BYTE, span, span, "sum").call(Signature("Allreduce", "uint8")))
    for _ in range(3):
        rig.enqueue(plan)
        rig.enqueue(rig.alltoallv(4096))
    assert not plan.is_old and rig.told.count("collectives: longest message") == 2  # of calls 1 and 2


def test_the_engine_says_its_memory(rig: Rig) -> None:
    (arena,) = (use for use in rig.engine.memory_use() if use.device_nbytes)
    assert arena.purpose == "collectives: arena" and 40 * MIB < arena.device_nbytes < 48 * MIB
    rig.enqueue(rig.alltoallv(4096))
    assert [use for use in rig.engine.memory_use() if use.device_nbytes] == [arena]
    rig.enqueue(rig.alltoallv(64 * MIB))
    assert [use for use in rig.engine.memory_use() if use.device_nbytes] == [
        arena,
        MemoryUse("collectives: large messages", device_nbytes=136 * MIB),
    ]
    assert rig.launched[0].inbox_nbytes < rig.launched[1].inbox_nbytes
