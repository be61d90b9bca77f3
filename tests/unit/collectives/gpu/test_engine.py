"""The engine posts its calls, says its memory and shares a GPU, over a CUDA that launches nothing."""

from __future__ import annotations

import importlib
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.checks import Signature
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.decision import usual_kernels
from mpicomm.collectives.operations import ALLTOALLV, OPERATIONS
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mappings
from mpicomm.ways.dispatch import OnGpus
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.inputs import patterns
from tests.helpers.rigs.fake_engines import BYTE, STREAM, Rig

MIB = 1 << 20


@pytest.fixture
def rig(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(cuda, monkeypatch)


def test_the_first_call_of_a_kind_expects_the_usual_kernels(rig: Rig) -> None:
    for nbytes in (4096, 8192):
        rig.alltoallv(nbytes)
        assert rig.expected == [*usual_kernels(None, 2, host_slots=False)]


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


@pytest.mark.parametrize(
    ("name", "nbytes", "launched"),
    [
        *((name, MIB, ["StridedPacketArguments"]) for name in ("Allgather", "Alltoall", "Gather", "Scatter", "Bcast")),
        ("Allgather", 64 * MIB, ["StridedPacketArguments"]),
        ("Gather", 64 * MIB, ["PackArguments", "ExchangeArguments", "PackArguments"]),
        ("Bcast", 64 * MIB, ["PackArguments", "ExchangeArguments"]),  # the root does not receive
    ],
)
def test_only_kernels_that_need_blocks_without_gaps_get_packed_blocks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, nbytes: int, launched: list[str]
) -> None:
    read_device_arrays(monkeypatch)
    row, rows = OPERATIONS[name], nbytes // 8
    column = MPI.DOUBLE.Create_vector(rows, 1, 2)
    first = column.Create_resized(0, 8)
    x, y = ([DeviceArray(address << 44, 2 * rows, np.dtype("f8")), 1, first] for address in (1, 2))
    arguments = Arguments(None, y) if row.rooted == "bcast" else Arguments(x, y)
    rig.enqueue(rig.engine.prepare_call(Call(row, arguments, 0, 2), Mappings(), "auto"))
    assert [type(each).__name__ for each in rig.launched] == launched
    for datatype in (first, column):
        datatype.Free()


@pytest.mark.parametrize("name", ["Allgather", "Allgatherv", "Alltoall", "Bcast", "Gather", "Scatter"])
def test_ranks_with_and_without_gaps_launch_alike(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each rank draws its datatypes: without gaps, with gaps, and with gaps that a kernel has to pack."""
    read_device_arrays(monkeypatch)
    row, size, unit, calls = OPERATIONS[name], 4, 32, 24
    rng, double = np.random.default_rng(size), MPI.DOUBLE
    places = (16 * rng.permutation(unit)).tolist()
    made = [double.Create_contiguous(unit), double.Create_vector(unit, 1, 2), double.Create_hindexed_block(1, places)]
    kinds = [each.Create_resized(0, 16 * unit if number else 8 * unit) for number, each in enumerate(made)]
    counts = [rng.integers(0, each, size).tolist() for each in rng.choice([2, 30, 3000, 100_000], calls)]
    launches = []
    for rank in range(size):
        rig = Rig(cuda, monkeypatch, rank=rank, size=size)
        for number, of_ranks in enumerate(counts):
            own, same, most, root = np.random.default_rng([number, rank]), of_ranks[0], max(of_ranks), number % size
            arrays = [DeviceArray(side << 44, 2 * unit * size * (most + 1), np.dtype("f8")) for side in (1, 2)]
            sent, received = (kinds[each] for each in own.integers(len(kinds), size=2))
            send, receive = [arrays[0], same, sent], [arrays[1], same, received]
            if row.receive == "vector":
                send[1], receive[1:] = of_ranks[rank], [of_ranks, [most * peer for peer in range(size)], received]
            arguments = Arguments(
                None if row.rooted == "bcast" or (row.rooted == "send" and rank != root) else send,
                None if row.rooted == "receive" and rank != root else receive,
                root=root,
            )
            begin = len(rig.launched)
            rig.enqueue(rig.engine.prepare_call(Call(row, arguments, rank, size), Mappings(), "auto"))
            launched = [*zip(rig.launched, rig.shapes, strict=True)][begin:]
            launches.append([each for each in launched if hasattr(each[0], "team")])
    for number in range(calls):
        of_call = launches[number::calls]
        for of_launch in zip(*of_call, strict=True):
            facts = {
                (
                    type(x).__name__.removeprefix("Strided"),
                    *(getattr(x, name, None) for name in ("steps", "laps", "inbox_nbytes")),
                    shape["blocks"],
                    shape["threads"],
                )
                for x, shape in of_launch
            }
            assert len(facts) == 1
            tags = [[*x.team.tags][:size] for x, _ in of_launch]
            assert all(tags[one][other] == tags[other][one] for one in range(size) for other in range(size))
    for datatype in (*made, *kinds):
        datatype.Free()


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


FIRST, SIDE, LATER = 3, 4, 5


def test_a_collective_does_not_wait_for_a_message_that_comes_only_after_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer sends the message behind the same collective, which this rank enqueues after its receive."""
    rig = Rig(cuda, monkeypatch)
    plan = rig.alltoallv(4096)
    context = SimpleNamespace(current=nullcontext, device=SimpleNamespace(ordinal=0))
    backend: Any = importlib.import_module("mpicomm.devices.cuda.streams").StreamsOfGpu(0, context)
    backend.check = backend.prepare_thread = lambda: None

    def enqueue(known: Any, stream: int, send: Any, receive: Any, event: Any, vote: Any) -> bool:
        return rig.engine.enqueue(plan, stream, event)  # type: ignore[no-any-return]

    gpu = SimpleNamespace(engine=rig.engine, find=lambda *call: plan, enqueue=enqueue)
    session: Any = SimpleNamespace(backend=backend)
    engines: Any = SimpleNamespace(gpu=gpu)
    votes: Any = SimpleNamespace(vote_for_gpus=lambda: None)
    way = OnGpus(session, engines, votes)
    request = way.start_known(ALLTOALLV, FIRST, "auto", (None, None, None, 0, None, None, None))
    assert request is not None
    cuda.finish()
    request.Wait()

    collective: list[Any] = []
    cuda.enqueue(SIDE, int, lambda: bool(collective) and cuda.is_over(collective[0]))
    arrived = backend.completion(SIDE)
    rig.engine.enqueue(plan, LATER)
    collective.append(cuda.end_of(LATER))
    cuda.finish()  # it fails if the work of the streams waits in a circle
    assert arrived()
