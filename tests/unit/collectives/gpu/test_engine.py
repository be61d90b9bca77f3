"""The engine posts its calls, says its memory and shares a GPU, over a CUDA that launches nothing."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.operations import ALLTOALLV
from mpicomm.collectives.signature import Signature
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.inputs import patterns
from tests.helpers.rigs.fake_engines import BYTE, STREAM, Rig

MIB = 1 << 20


@pytest.fixture
def rig(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(cuda, monkeypatch)


def test_the_call_log_gets_each_enqueue_of_a_plan_once(rig: Rig) -> None:
    said: list[str] = []
    log: Any = rig.engine._call_log
    log.post = lambda text, count=0, offset=None, *, ready=False: said.append("launches" if ready else "plans")
    log.ready = lambda: said.append("goes on")
    plan, other = rig.alltoallv(4096), rig.alltoallv(8192)
    for each in (plan, plan, other, plan, other):
        rig.enqueue(each)
    assert said == ["plans", "plans", "goes on", "launches", "goes on", "launches", "launches"]


def test_counts_on_the_device_go_to_the_kernel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)
    x, y, one, other = (
        DeviceArray(address << 44, count, np.dtype(dtype))
        for address, count, dtype in ((1, 16 * MIB, "f4"), (2, 8 * MIB, "f4"), (3, 2, "i4"), (4, 2, "i8"))
    )
    call = Call(ALLTOALLV, Arguments([x, one], [y, (other, [0, 5])]), 0, 2)
    plan = rig.engine.prepare_call(call, Mappings(), "auto")
    rig.enqueue(plan)
    counted = rig.launched[0].counted
    assert (counted.itemsize, counted.send.buffer, counted.send.room) == (4, 1 << 44, 16 * MIB)
    assert (counted.send.counts, counted.send.wide_counts, counted.send.follows) == (3 << 44, 0, 1)
    assert (counted.receive.counts, counted.receive.wide_counts, counted.receive.follows) == (4 << 44, 1, 0)
    assert [*counted.receive.known][:2] == [0, 5]
    with pytest.raises(InvalidUsageError, match='algorithm="two_shot" of Alltoallv'):
        rig.engine.prepare_call(call, Mappings(), "two_shot")


def test_only_a_call_with_work_records_the_event_of_the_caller(rig: Rig, cuda: FakeCuda) -> None:
    """Earlier work may be on another stream, so an event there would not follow a call without work."""
    event = importlib.import_module("mpicomm.devices.cuda.events").LocalEvent()
    nothing = rig.engine.prepare_alone("a call without work", [])
    assert not rig.engine.enqueue(nothing, STREAM, event=event)
    assert cuda.events[event.ptr] is None
    assert rig.engine.enqueue(rig.alltoallv(4096), STREAM, event=event)
    assert cuda.events[event.ptr] == cuda.end_of(STREAM)


def test_the_engine_says_its_memory(rig: Rig) -> None:
    def held() -> list[MemoryUse]:
        return [use for use in rig.engine.memory_use() if use.device_nbytes]

    (arena,) = held()
    assert arena.purpose == "collectives: arena" and 40 * MIB < arena.device_nbytes < 48 * MIB
    for nbytes in (4096, 64 * MIB):  # of any length
        rig.enqueue(rig.alltoallv(nbytes))
    assert held() == [arena]
    span, signature = Span(1 << 50, 64 * MIB), Signature("Allreduce", "uint8")
    pattern = patterns.allreduce(0, 2, BYTE, span, span, "sum")
    rig.engine.prepare_step(pattern.operation, pattern.buffers, (str(signature), signature.hash32), "two_shot")
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
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    service: bool,
    on_a_device: int,
    most_blocks: int,
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()  # what anybody can do
    if service:
        (tmp_path / "control").unlink()
        daemon = socket.socket(socket.AF_UNIX)
        request.addfinalizer(daemon.close)
        daemon.bind(str(tmp_path / "control"))
        daemon.listen()
    # Both ranks have the same GPU, of 132 multiprocessors, and two more ranks of another node may have it, too.
    rig = Rig(cuda, monkeypatch, on_a_device=on_a_device)
    rig.enqueue(rig.alltoallv(64 * MIB))
    (shape,) = rig.shapes
    assert shape["blocks"] == most_blocks
    assert shape["early"] == (not service)  # blocks that wait early would keep out the blocks of the other rank
