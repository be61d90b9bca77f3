"""The engine posts and enqueues calls, and goes on with little memory, over a CUDA that launches nothing."""

from __future__ import annotations

import importlib
import logging
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import FEWEST_LAPS, OVERSEERS, QUANTIZED_OF_PACKET
from mpicomm.collectives.gpu.decision import usual_kernels
from mpicomm.collectives.operations import ALLREDUCE, ALLTOALLV, OPERATIONS
from mpicomm.collectives.signature import Signature
from mpicomm.collectives.wire import Wire
from mpicomm.devices.handle import MemoryUse
from mpicomm.epilogues import Elementwise, rms_norm
from mpicomm.errors import HandleError, InvalidUsageError, PeerError
from mpicomm.kernels.team import ABSENT
from mpicomm.log import log_once
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mappings
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.fakes.fake_driver import DeviceArray, read_device_arrays
from tests.helpers.inputs import patterns
from tests.helpers.inputs.tuning import row, table
from tests.helpers.rigs.fake_engines import BYTE, STREAM, Rig

MIB = 1 << 20


@pytest.fixture
def rig(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(cuda, monkeypatch)


def allreduce(rig: Rig, count: int, asked: str = "auto", result: str = "f4", **how: Any) -> Any:
    """Run an all-reduce of floats of three ranks; return its plan, and the arguments and shapes of its launches."""
    x, y = (DeviceArray(at << 44, count, np.dtype(dtype)) for at, dtype in ((1, "f4"), (2, result)))
    return rig.run(Call(ALLREDUCE, Arguments(x, y, MPI.SUM, **how), 0, 3, asked), asked)


@pytest.fixture
def three(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """One of three ranks, whose table takes two shots from 100 bytes on, and copies from 1000 bytes on."""
    read_device_arrays(monkeypatch)
    log_once.cache_clear()
    rig = Rig(cuda, monkeypatch, size=3)
    rig.engine.tuning = table(row("Allreduce", 3, (100, "two_shot"), (1000, "copy_engine")))
    rig.tried.clear()
    return rig


def test_an_epilogue_is_applied_by_the_kernel_that_reduces_or_by_the_next_one(three: Rig) -> None:
    epilogue, output = Elementwise("v * i"), 2 << 44
    for asked in ("one_shot", "two_shot"):
        _, (fused,), (shape,) = allreduce(three, 100, asked, epilogue=epilogue)
        assert (shape["variant"].entry, fused.finish.operands.count) == ("mpicomm_packets", 100)
        _, (converts,), (shape,) = allreduce(three, 100, asked, "f8", epilogue=epilogue)
        assert "-DMPICOMM_RESULT=float64" in shape["variant"].options
        assert converts.finish.finished == output != converts.finish.reduced
    for asked, result, entry in (
        ("ring", "f8", "mpicomm_epilogue"),
        ("auto", "f4", "mpicomm_packets"),  # the table has copy_engine, which needs one more kernel
        ("copy_engine", "f4", "mpicomm_epilogue"),
    ):
        _, launched, shapes = allreduce(three, 1000, asked, result, epilogue=epilogue)
        assert shapes[-1]["variant"].entry == entry
        if entry == "mpicomm_epilogue":
            assert launched[-1].output == output
            assert (launched[-1].source == output) == (result == "f4")


@pytest.mark.parametrize(
    ("rows", "hidden", "asked", "steps", "memory"),
    [
        (32, 1024, "one_shot", 4, []),
        (900, 1028, "one_shot", 226, ["collectives: large messages"]),  # 257 packets of a row take 2 steps
        (32, 1024, "two_shot", 2, []),  # each of the ranks has 11 rows
        (22, 1024, "two_shot", 1, []),  # a row of each rank for each of 8 blocks
        *((*rest, 0, []) for rest in ((21, 1024, "two_shot"), (3, 33, "two_shot"), (3, 33, "one_shot"))),
        *((1, 8192, "one_shot", 8, []), (7, 8196, "one_shot", 0, [])),  # a row has at most 8 steps, or each block one
    ],
)
def test_rows_are_normalised_by_the_kernel_that_reduces_or_by_the_next_one(
    three: Rig, rows: int, hidden: int, asked: str, steps: int, memory: list[str]
) -> None:
    three.engine.domain = replace(three.engine.domain, multiprocessors=8)
    x, weight = (DeviceArray(at << 44, count, np.dtype("f4")) for at, count in ((3, rows * hidden), (4, hidden)))
    _, launched, shapes = allreduce(three, rows * hidden, asked, epilogue=rms_norm(x, weight))
    assert three.tried == memory
    last, variant = launched[-1], shapes[-1]["variant"]
    if not steps:
        assert variant.entry == "mpicomm_norm"
        return
    assert variant.entry == "mpicomm_packets" and "-DMPICOMM_WEIGHT=float32" in variant.options
    assert len(launched) == 1 and last.steps == steps
    assert last.finish.rows_of_shard == -(-rows // 3) if asked == "two_shot" else last.finish.rows == rows


def choices(rig: Rig, *asked: str, count: int = 1000) -> list[str]:
    """Return the algorithms of calls."""
    return [allreduce(rig, count, each)[0].choice.algorithm for each in asked]


COPIES, LARGE = "collectives: copies", "collectives: large messages"


def test_without_memory_another_algorithm_is_taken_and_said_once(three: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mpicomm")
    assert choices(three, "auto", "one_shot", count=300) == ["copy_engine", "one_shot"]
    three.failures[COPIES] = HandleError("rank 1: out of memory", ranks=[1])
    for _ in range(2):
        assert choices(three, "auto", count=1 << 20) == ["two_shot"]
    three.failures.clear()
    # The second choice stays, also if there is memory later: a rank that repeats the call does not prepare it again.
    assert choices(three, "auto", count=1 << 20) == choices(three, "auto", count=1 << 21) == ["two_shot"]
    assert three.tried.count(COPIES) == 2  # for the first call, and for the one that fails
    with pytest.raises(HandleError, match="rank 1: out of memory") as caught:
        choices(three, "copy_engine", count=1 << 20)
    assert list(caught.value.ranks) == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "Allreduce runs slower, without algorithm 'copy_engine', because memory is short: rank 1: out of memory"
    ]


def test_an_error_that_does_not_concern_memory_is_raised(three: Rig) -> None:
    three.failures[COPIES] = PeerError("x")
    with pytest.raises(PeerError, match="x"):
        choices(three, "auto")


@pytest.mark.parametrize("asked", ["auto", "one_shot"])
def test_what_one_shot_lacks_memory_for_goes_in_the_arena_and_is_never_tried_again(
    three: Rig, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    caplog.set_level(logging.WARNING, "mpicomm")
    three.failures |= dict.fromkeys((COPIES, LARGE), HandleError("x"))
    for _ in range(2):
        _, (launch,), _ = allreduce(three, 10 << 20, asked)
        assert launch.inbox_nbytes == 2 * three.engine.domain.arena.sentinels.nbytes and launch.laps >= FEWEST_LAPS
    # Two hops need twice the memory of one.
    assert three.tried.count(LARGE) == (2 if asked == "auto" else 1)
    assert len(caplog.records) == (3 if asked == "auto" else 1)
    assert "runs slower, only in the inboxes of the arena" in caplog.text
    count = 18 * three.engine.domain.arena.sentinels.nbytes
    _, (launch,), (shape,) = allreduce(three, count, wire=Wire("int8"))
    assert {"-DMPICOMM_WIRE=int8", "-DMPICOMM_LAPS"} <= {*shape["variant"].options}
    assert launch.inbox_nbytes == 2 * three.engine.domain.arena.sentinels.nbytes and launch.laps >= FEWEST_LAPS
    assert launch.steps * shape["blocks"] * (shape["threads"] - OVERSEERS) * QUANTIZED_OF_PACKET >= count


def test_without_room_below_the_bound_another_algorithm_is_taken_before_the_ranks_are_told(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, three: Rig
) -> None:
    rig = Rig(cuda, monkeypatch, MIB, size=3)
    rig.engine.tuning = three.engine.tuning
    rig.tried.clear()
    assert choices(rig, "auto") == ["two_shot"]
    assert len({*rig.posted}) == 1  # as on a rank that keeps the plan of the other way
    with pytest.raises(InvalidUsageError) as caught:
        choices(rig, "copy_engine")
    assert str(caught.value) == (
        f'MPICOMM_MEMORY leaves {MIB} bytes for shared memory of this communicator, and "{COPIES}" takes {2 * MIB}: '
        f"raise MPICOMM_MEMORY by {MIB} bytes or more, or unset it"
    )
    assert len({*rig.posted}) == 1 and not rig.tried


def test_the_first_call_of_a_kind_expects_the_usual_kernels(rig: Rig) -> None:
    for nbytes in (4096, 8192):
        rig.alltoallv(nbytes)
        assert rig.expected == [*usual_kernels(None, 2, host_slots=False)]


def test_the_call_log_gets_each_enqueue_of_a_plan_once(rig: Rig) -> None:
    said: list[str] = []
    log: Any = rig.engine._call_log
    log.post = lambda text, count=0, offset=None, *, ready=False: said.append("launches" if ready else "plans")
    log.publish_ready = lambda: said.append("goes on")
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
    counts = rig.run(call)[1][0].device_counts
    assert (counts.itemsize, counts.send.buffer, counts.send.room) == (4, 1 << 44, 16 * MIB)
    assert (counts.send.counts, counts.send.wide_counts, counts.send.follows) == (3 << 44, 0, 1)
    assert (counts.receive.counts, counts.receive.wide_counts, counts.receive.follows) == (4 << 44, 1, 0)
    assert [*counts.receive.known][:2] == [0, 5]


@pytest.mark.parametrize(
    ("name", "nbytes", "launched"),
    [
        *((name, MIB, ["StridedPacketArguments"]) for name in ("Allgather", "Alltoall", "Gather", "Scatter", "Bcast")),
        ("Allgather", 64 * MIB, ["StridedPacketArguments"]),
        ("Gather", 64 * MIB, ["StridedPacketArguments"]),
        ("Scatter", 64 * MIB, ["StridedPacketArguments"]),
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
    assert [type(each).__name__ for each in rig.run(Call(row, arguments, 0, 2))[1]] == launched
    for datatype in (first, column):
        datatype.Free()


@pytest.mark.parametrize("name", ["Allgather", "Alltoall", "Gather", "Scatter"])
def test_rows_stay_in_place_on_copy_engines_and_where_these_lack_memory(three: Rig, name: str) -> None:
    table_of_rows = table(row(name, 3, (0, "one_shot"), (1 << 27, "copy_engine")))
    three.engine.tuning, count = table_of_rows, 1 << 16
    rows = MPI.DOUBLE.Create_vector(count, 128, 256).Create_resized(0, 1024)
    x, y = ([DeviceArray(address << 44, 3 * 256 * count, np.dtype("f8")), 1, rows] for address in (1, 2))
    launches = []
    for _ in range(2):
        plan, launched, _ = three.run(Call(OPERATIONS[name], Arguments(x, y), 0, 3))
        launches.append((plan.choice.algorithm, {type(each).__name__ for each in launched}))
        three.failures[COPIES] = HandleError("x")
        x[1] = y[1] = 2  # needs more memory
    assert launches == [("copy_engine", {"DirectArguments"}), ("one_shot", {"StridedPacketArguments"})]
    rows.Free()


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
            launched = zip(*rig.run(Call(row, arguments, rank, size))[1:], strict=True)
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
    nothing = rig.engine.plan("a call without work", [], collective=False)
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


def test_a_request_takes_the_smallest_region_of_its_purpose_that_it_fits_into(rig: Rig) -> None:
    arena, large, small = rig.engine.domain.arena, Request("copies", 8 * MIB), Request("copies", 2 * MIB)
    for request in (large, small):
        arena.set_up(request)
    for nbytes, request in ((1, small), (3 * MIB, large)):
        assert arena.region(Request("copies", nbytes)).slots_nbytes == request.slots_nbytes
    for other in (Request("copies", 9 * MIB), Request("chain", MIB), Request("copies", MIB, words_nbytes=128)):
        assert not arena.has(other)


def test_a_suspension_keeps_messages_and_makes_other_memory_as_at_first(rig: Rig) -> None:
    for what, protocol in (("messages", {"holds_messages": True}), ("chain", {"sentinel": True})):
        rig.engine.domain.arena.set_up(Request(what, 2 * MIB, words_nbytes=128, **protocol))
    # Slots of the sentinel protocol have escapes.
    assert [use.device_nbytes for use in rig.engine.memory_use()][1:3] == [2 * MIB + 128, 2 * MIB + 128 + MIB // 8]
    arena, messages, chain = (memory.content for memory in rig.engine.memories())
    assert (messages.kept_nbytes, messages.fill) == (2 * MIB + 128, None)
    assert arena.kept_nbytes == chain.kept_nbytes == 0
    filled: list[tuple[int, int, int]] = []
    rig.engine._backend.fill = rig.engine._backend.fill_words = lambda *given: filled.append(given)
    chain.fill(1 << 40)
    slots = (1 << 40) + 128
    assert filled == [(1 << 40, 128, 0), (slots, 2 * MIB, ABSENT), (slots + 2 * MIB, 2 * MIB // 16, 0)]


def test_messages_in_stream_order_that_exceed_the_bound_are_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Rig(cuda, monkeypatch, 8 * MIB).engine
    text = r"MPICOMM_MEMORY leaves 8388608 bytes .* \"messages in the order of streams\" takes \d+: raise MPICOMM"
    for _ in range(2):
        with pytest.raises(InvalidUsageError, match=text):
            engine.prepare_messages("Send", Message(1, Span(1 << 50, 8), 0), None)


@pytest.mark.parametrize(
    ("service", "ranks_per_device", "most_blocks"), [(False, 2, 128), (True, 2, 66), (True, 4, 33)]
)
def test_ranks_that_run_side_by_side_on_a_gpu_share_its_multiprocessors(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    service: bool,
    ranks_per_device: int,
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
    rig = Rig(cuda, monkeypatch, ranks_per_device=ranks_per_device)
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
    backend.check, backend.prepare_thread, backend.completes = lambda: None, lambda: None, False
    backend.stream = lambda stream, array: stream
    session: Any = SimpleNamespace(backend=backend, mappings=Mappings(), require_usable=lambda plan: None)
    cache = importlib.import_module("mpicomm.collectives.gpu.plan_cache").PlanCache(session, rig.engine)
    request = cache.start(plan, FIRST, None, None)
    cuda.finish()
    request.Wait()

    collective: list[Any] = []
    cuda.enqueue(SIDE, int, lambda: bool(collective) and cuda.is_over(collective[0]))
    arrived = backend.completion(SIDE)
    rig.engine.enqueue(plan, LATER)
    collective.append(cuda.end_of(LATER))
    cuda.finish()  # it fails if the work of the streams waits in a circle
    assert arrived()
