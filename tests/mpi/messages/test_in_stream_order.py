"""Messages in stream order: the messages that are enqueued, and the kernels that match them, on GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.collectives.exchange import Message
from mpicomm.dispatch.engines import Engines
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.message_rigs import Rig

COUNTS = (1, 1000, 8192, 100_003, 5_000_001)  # int32; the last one is longer than the slots
STREAM: dict[str, Any] = {"algorithm": "stream"}


Messages = list[tuple[str, Any, Message | None, Message | None]]


@pytest.fixture
def enqueued(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Messages:
    """The messages that are enqueued: operation, stream, sent and received data."""
    messages: Messages = []

    class Gpu:
        """An engine that notes messages and knows none."""

        def __init__(self) -> None:
            self.engine = self

        def prepare_messages(self, *message: Any) -> Any:
            return SimpleNamespace(message=message)

        def add_message(self, *message: Any) -> None:
            pass

        def enqueue(self, plan: Any, stream: Any, send: Any, receive: Any) -> None:
            operation, sent, received = plan.message
            assert plan.by_output == (send is None)
            messages.append((operation, stream, sent, received))

    monkeypatch.setattr(Engines, "on_gpu", lambda engines, operation: Gpu())
    return messages


@pytest.mark.parametrize("algorithm", ["stream", "one_shot"])
def test_what_is_enqueued(rig: Rig, enqueued: Messages, algorithm: str) -> None:
    out, into = rig.empty(5), rig.empty(9, np.int16)
    rig.comm.Send(out, rig.right, 7, stream=3, algorithm=algorithm)
    rig.comm.Recv([into, 4], rig.left, algorithm=algorithm)
    rig.device.capturing = True
    status = MPI.Status()
    rig.comm.Sendrecv(out, rig.right, 1, into, rig.left, 2, status)
    rig.comm.Sendrecv(None, MPI.PROC_NULL, 0, into, rig.left)
    rig.device.capturing = False
    rig.comm.Sendrecv(out, rig.right, 1, into, rig.left, 2, algorithm=algorithm)
    said = [
        (operation, stream, *((m.peer, m.span.count, m.tag) if m else None for m in messages))
        for operation, stream, *messages in enqueued
    ]
    assert said == [
        ("Send", 3, (rig.right, 20, 7), None),
        ("Recv", None, None, (rig.left, 8, None)),
        ("Sendrecv", None, (rig.right, 20, 1), (rig.left, 18, 2)),
        ("Sendrecv", None, None, (rig.left, 18, None)),
        ("Sendrecv", None, (rig.right, 20, 1), (rig.left, 18, 2)),
    ]
    assert (status.source, status.tag, status.Get_count(MPI.INT16_T)) == (rig.left, 2, 9)
    assert enqueued[0][2].span.pointer == out.memory.ctypes.data  # type: ignore[union-attr]


def test_outside_of_captures_mpi_matches(rig: Rig, enqueued: Messages) -> None:
    for algorithm in ("auto", "copy_engine"):
        received = rig.empty(3)
        rig.comm.Sendrecv(rig.of(rig.rank, 3), rig.right, 0, received, rig.left, 0, algorithm=algorithm)
        assert received.get().any()
    rig.device.capturing = True
    with pytest.raises(InvalidUsageError, match="cannot be part of a CUDA graph"):
        rig.comm.Send(rig.empty(3), rig.right, algorithm="copy_engine")
    rig.device.capturing = False
    assert not enqueued


def test_what_kernels_cannot_match(rig: Rig, enqueued: Messages) -> None:
    comm, array, host = rig.comm, rig.empty(8), np.zeros(8, np.int32)
    right, left = rig.right, rig.left
    for call, match in [
        (lambda: comm.Recv(array, **STREAM), r"Recv: source=MPI.ANY_SOURCE .* name the rank"),
        (lambda: comm.Sendrecv(array, right, 0, host, left, **STREAM), "Sendrecv: recvbuf is a host array"),
        (lambda: comm.Send(host, right, **STREAM), "Send: buf is a host array"),
        (lambda: comm.Recv(host, left, algorithm="copy_engine"), 'Recv: algorithm="copy_engine" is for device arrays'),
        (lambda: comm.Sendrecv(array, right, 0, array, left, **STREAM), "sendbuf and recvbuf overlap"),
        (lambda: comm.Send(array, right, -3, **STREAM), "Send: tag=-3 is negative"),
        (lambda: comm.Sendrecv(array, right, -1, rig.empty(1), left, **STREAM), "Sendrecv: sendtag=-1 is negative"),
        (lambda: comm.Send(array, 99, **STREAM), f"Send: dest=99 is no rank .* 0 to {rig.size - 1}"),
        (lambda: comm.Recv(array, 99, **STREAM), "Recv: source=99 is no rank"),
        (
            lambda: comm.Send(array, right, algorithm="ring"),
            "Send: algorithm='ring': use one of auto, stream, copy_engine",
        ),
    ]:
        with pytest.raises(InvalidUsageError, match=match):
            call()  # type: ignore[no-untyped-call]
    assert not enqueued


def test_host_arrays_have_no_streams() -> None:
    with communicator("cpu") as comm:
        for call, algorithm in itertools.product((comm.Send, comm.Recv), ("stream", "one_shot")):
            with pytest.raises(InvalidUsageError, match='algorithm="stream" is for device arrays'):
                call(np.zeros(1), 0, algorithm=algorithm)


@pytest.fixture
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    if device == "cpu":
        pytest.skip("kernels run on GPUs")
    with communicator(device) as comm:
        yield comm


def neighbours(comm: mpicomm.Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.parametrize("offset", [0, 1])
def test_ring_on_gpus(comm: mpicomm.Communicator, xp: Any, offset: int) -> None:
    following, previous = neighbours(comm)
    for count in COUNTS:
        out, into = xp.zeros(count + 1, np.int32)[offset:], xp.zeros(count + 1, np.int32)[offset:]
        for number in range(4):
            out[...] = xp.arange(out.size, dtype=np.int32) * (number + 1) + comm.rank
            comm.Sendrecv(out, following, 5, into, previous, 5, algorithm="stream")
            out[...] = -1  # later work: the message must not have it
            assert (into == xp.arange(into.size, dtype=np.int32) * (number + 1) + previous).all()
    comm.check()


def test_send_and_receive_apart_on_gpus(comm: mpicomm.Communicator, xp: Any) -> None:
    """Every rank sends to all ranks before it receives: a message that fits into the slots does not wait."""
    for count in COUNTS[:-1]:
        arrays = [xp.full(count, 10 * comm.rank + other, np.float32) for other in range(comm.size)]
        into = xp.zeros(count, np.float32)
        for other in range(comm.size):
            comm.Send(arrays[other], other, 3, algorithm="stream")
        for other in range(comm.size):
            comm.Recv(into, other, algorithm="stream")
            assert (into == 10 * other + comm.rank).all()
    comm.check()


def test_graphs_on_gpus(comm: mpicomm.Communicator, xp: Any) -> None:
    following, previous = neighbours(comm)
    stream = xp.cuda.Stream(non_blocking=True)
    for count in COUNTS:
        ring, into = xp.full(count, comm.rank, np.int32), xp.zeros(count, np.int32)
        xp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            comm.Sendrecv(ring, following, recvbuf=into, source=previous)  # the first message of the communicator
            ring[...] = into
            if count < COUNTS[-1]:  # else all ranks would wait in Send for the others to receive
                comm.Send(ring, following, 1)
                comm.Recv(into, previous, 1)
            else:
                comm.Sendrecv(ring, following, 1, into, previous, 1)
            ring[...] = into
            graph = stream.end_capture()
            for _ in range(200):
                graph.launch(stream)
        stream.synchronize()
        comm.check(stream)
        assert (ring == (comm.rank - 400) % comm.size).all()


def test_pairs_know_nothing_of_each_other_on_gpus(comm: mpicomm.Communicator, xp: Any) -> None:
    """After the set-up only the two ranks of a message take part."""
    array = xp.full(5000, comm.rank, np.int64)
    comm.Sendrecv(None, MPI.PROC_NULL, recvbuf=None, source=MPI.PROC_NULL, algorithm="stream")
    if comm.rank < 2 <= comm.size:
        other, into = 1 - comm.rank, xp.zeros(5000, np.int64)
        for _ in range(50):
            comm.Sendrecv(array, other, 0, into, other, 0, algorithm="stream")
        assert (into == other).all()
    comm.Allreduce(MPI.IN_PLACE, array)  # ranks that have sent more or fewer messages are in step
    assert (array == sum(range(comm.size))).all()


@pytest.mark.parametrize("what", ["length", "tag", "missing"])
def test_ranks_that_disagree_on_gpus(device: str, what: str) -> None:
    if device == "cpu":
        pytest.skip("kernels run on GPUs")
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("a rank does not disagree with itself")
    with communicator(device, timeout_s=stretched(2.0)) as comm, array_module(comm) as xp:
        array = xp.zeros(100, np.uint8)
        comm.Sendrecv(None, MPI.PROC_NULL, recvbuf=None, source=MPI.PROC_NULL, algorithm="stream")
        if comm.rank == 0 and what != "missing":
            comm.Send(array, 1, 5, algorithm="stream")
        error: Any = CollectiveTimeoutError if what == "missing" else PeerError
        if comm.rank == 1:
            comm.Recv(array[: 99 if what == "length" else 100], 0, 6 if what == "tag" else 5, algorithm="stream")
            with pytest.raises(
                error, match=r"message: number 1 from rank 0" if what == "missing" else "rank 0"
            ) as said:
                comm.check()
            assert said.value.ranks == (0,)
        MPI.COMM_WORLD.Barrier()
