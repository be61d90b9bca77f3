"""The engine counts calls with private lengths, says its memory and shares a GPU, over a CUDA that launches nothing."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.team import Faults
from mpicomm.mpi.span import Span
from tests.helpers import patterns
from tests.helpers.fake_cuda import FakeCuda

MIB = 1 << 20
BYTE = np.dtype(np.uint8)
STREAM = 7


class Rig:
    """The engine of the first of two ranks. The other one sends and knows as much."""

    def __init__(
        self,
        cuda: FakeCuda,
        monkeypatch: pytest.MonkeyPatch,
        most_nbytes: int | None = None,
        *,
        on_a_device: int = 1,
    ) -> None:
        engine, arena = map(
            importlib.import_module, ("mpicomm.collectives.gpu.engine", "mpicomm.collectives.gpu.arena")
        )
        self.launched: list[Any] = []
        self.told: list[str] = []
        self.shapes: list[dict[str, Any]] = []

        def launcher(x: Any, early: bool) -> Any:
            def launch(stream: int, **shape: Any) -> None:
                self.launched.append(x)
                self.shapes.append({**shape, "early": early})

            return SimpleNamespace(launch=launch)

        kernel = SimpleNamespace(launcher=launcher)
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
        self.longest: list[int] = []
        """What both ranks have written at each checkpoint."""
        board: Any = SimpleNamespace(
            post=lambda text, count=0: None,
            differ=lambda: False,
            behind=list,
            write_longest=lambda checkpoint, nbytes: self.longest.append(nbytes),
            without_longest=lambda checkpoint: [1] * (checkpoint >= len(self.longest)),
            longest=lambda checkpoint: self.longest[checkpoint],
        )
        self.engine = engine.DeviceEngine(node, backend, "ipc", board, on_a_device, most_nbytes)

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


def test_calls_with_private_lengths_are_planned_again_when_inboxes_have_changed(rig: Rig) -> None:
    short, long = rig.alltoallv(4096), rig.alltoallv(64 * MIB)
    rig.enqueue(short)
    rig.enqueue(short, again=True)
    rig.enqueue(long)
    assert rig.longest == [4096, 4096, 64 * MIB] and not short.is_old
    rig.enqueue(long, again=True)
    assert short.is_old and long.is_old
    again = rig.alltoallv(4096)
    for _ in range(20):
        rig.enqueue(again)
    assert not again.is_old
    sizes = [x.inbox_nbytes for x in rig.launched]
    assert sizes == [4 * MIB] * 4 + [16 * MIB] * 20


def test_plans_of_other_calls_stay_and_do_not_count(rig: Rig) -> None:
    span = Span(1 << 50, 1000)
    plan = rig.engine.prepare(patterns.allreduce(0, 2, BYTE, span, span, "sum").call(Signature("Allreduce", "uint8")))
    for _ in range(3):
        rig.enqueue(plan)
    assert not rig.longest
    rig.enqueue(rig.alltoallv(64 * MIB))
    assert not plan.is_old


def test_the_engine_says_its_memory(rig: Rig) -> None:
    def held() -> list[MemoryUse]:
        return [use for use in rig.engine.memory_use() if use.device_nbytes]

    (arena,) = held()
    assert arena.purpose == "collectives: arena" and 40 * MIB < arena.device_nbytes < 48 * MIB
    rig.enqueue(rig.alltoallv(4096))
    assert held() == [arena]
    for _ in range(2):
        rig.enqueue(rig.alltoallv(64 * MIB))
    assert held() == [arena, MemoryUse("collectives: large messages", device_nbytes=136 * MIB)]


def test_messages_in_stream_order_that_exceed_the_bound_are_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Rig(cuda, monkeypatch, 8 * MIB).engine
    text = r"MPICOMM_MEMORY leaves 8388608 bytes .* \"messages in the order of streams\" takes \d+: raise MPICOMM"
    for _ in range(2):
        with pytest.raises(InvalidUsageError, match=text):
            engine.prepare_messages("Send", Message(1, Span(1 << 50, 8), 0), None)


@pytest.mark.parametrize(("service", "on_a_device", "most_blocks"), [(False, 2, 128), (True, 2, 66), (True, 4, 33)])
def test_ranks_that_run_side_by_side_on_a_gpu_share_its_multiprocessors(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: bool, on_a_device: int, most_blocks: int
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if service:
        (tmp_path / "control").touch()
    # Both ranks have the same GPU, of 132 multiprocessors, and two more ranks may have it that count to another node.
    rig = Rig(cuda, monkeypatch, on_a_device=on_a_device)
    rig.enqueue(rig.alltoallv(64 * MIB))
    (shape,) = rig.shapes
    assert shape["blocks"] == most_blocks
    assert shape["early"] == (not service)  # blocks that wait early would keep out those of the other rank
