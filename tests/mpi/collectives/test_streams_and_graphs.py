"""Collectives on GPU arrays in stream order: current and explicit streams, CUDA graphs, PyTorch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.inputs.checked_on_device import DTYPES, IN_PLACE, OPERATIONS, Call, CheckedSequence, checked
from tests.helpers.rigs.communicators import communicator

COUNTS = (1, 4097, 1 << 20)
REPLAYS = 1000
SPIN_CYCLES = 5_000_000  # a few milliseconds, in which unordered work would come too early
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    if device == "cpu":
        pytest.skip("streams and graphs are a GPU's")
    with communicator(device) as comm:
        yield comm


@pytest.fixture
def stream(xp: Any) -> Any:
    """A stream that waits for no other."""
    return xp.cuda.Stream(non_blocking=True)


def spin(xp: Any) -> None:
    """Keep the current stream busy."""
    xp.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(SPIN_CYCLES),))


def settled(xp: Any, count: int, value: int = 0) -> Any:
    """An array that is there before any stream goes on."""
    array = xp.full(count, value, np.int64)
    xp.cuda.Device().synchronize()
    return array


def total(comm: mpicomm.Communicator, value: int) -> int:
    """Return the sum over all ranks of ``value`` plus the rank."""
    return sum(value + rank for rank in range(comm.size))


class StreamOfAnotherLibrary:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._stream.ptr)


@pytest.mark.parametrize("algorithm", ["auto", "one_shot", "two_shot"])
@pytest.mark.parametrize("count", COUNTS)
def test_results_are_there_for_later_work_on_the_current_stream(
    comm: mpicomm.Communicator, xp: Any, stream: Any, count: int, algorithm: str
) -> None:
    send, receive, seen = (settled(xp, count) for _ in range(3))
    for number in range(5):
        with stream:
            spin(xp)
            send.fill(number + comm.rank)
            comm.Allreduce(send, receive, algorithm=algorithm)
            send.fill(-1)  # after it was read
            seen[:] = receive
        stream.synchronize()
        assert (seen == total(comm, number)).all()
    comm.check(stream)


@pytest.mark.parametrize("form", ["cupy", "int", "protocol"])
def test_explicit_streams(comm: mpicomm.Communicator, xp: Any, stream: Any, form: str) -> None:
    passed = {"cupy": stream, "int": stream.ptr, "protocol": StreamOfAnotherLibrary(stream)}[form]
    send, gathered, seen = settled(xp, 1000), settled(xp, 1000 * comm.size), settled(xp, 1000 * comm.size)
    with stream:
        spin(xp)
        send.fill(comm.rank + 5)
    comm.Allgather(send, gathered, stream=passed)
    with stream:
        seen[:] = gathered
    stream.synchronize()
    assert seen.reshape(comm.size, 1000).get().tolist() == [[rank + 5] * 1000 for rank in range(comm.size)]
    comm.check(passed)


def test_two_streams_on_one_communicator(comm: mpicomm.Communicator, xp: Any, stream: Any) -> None:
    streams = (stream, xp.cuda.Stream(non_blocking=True), xp.cuda.Stream.null)
    arrays = [settled(xp, 50_001) for _ in streams]
    expected = [0] * len(streams)
    for number in range(60):
        which = (number * 7) % 3
        with streams[which]:
            if number % 10 == 0:
                spin(xp)
            arrays[which] += number + comm.rank
            comm.Allreduce(MPI.IN_PLACE, arrays[which])
        expected[which] = expected[which] * comm.size + total(comm, number)
    for each in streams:
        comm.check(each)
    # Modulo 2**64, as the arrays are.
    wrapped = np.array([value % 2**64 for value in expected], np.uint64).view(np.int64).tolist()
    assert [int(array[0]) for array in arrays] == wrapped
    assert all(bool((array == array[0]).all()) for array in arrays)


def test_a_request_is_complete_when_its_stream_has_come_there(comm: mpicomm.Communicator, xp: Any, stream: Any) -> None:
    comm.Allreduce(MPI.IN_PLACE, settled(xp, 1, comm.rank), stream=stream)  # the first one sets up, which may block
    array = settled(xp, 4097, comm.rank)
    may_go_on = threading.Event()
    stream.launch_host_func(lambda _: may_go_on.wait(10), None)
    request = comm.Iallreduce(MPI.IN_PLACE, array, stream=stream)
    assert not request.Test()
    may_go_on.set()
    request.Wait()
    assert array.get().tolist() == [total(comm, 0)] * 4097


def test_a_barrier_of_streams(comm: mpicomm.Communicator, xp: Any, stream: Any) -> None:
    with comm.zeros(1, np.int64) as array:
        for number in range(1, 4):
            with stream:
                if comm.rank == 0:
                    spin(xp)
                    for peer in range(comm.size):
                        array.peer(peer)[...] = number
                comm.Barrier(stream=stream)
                seen = array.local.copy()
                comm.Barrier(stream=stream)
            stream.synchronize()
            assert seen.get().tolist() == [number]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_tensors_of_pytorch(comm: mpicomm.Communicator, name: str) -> None:
    torch: Any = pytest.importorskip("torch")
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    dtype, place = getattr(torch, name), f"cuda:{comm.device}"
    side = torch.cuda.Stream(place)
    for stream in (torch.cuda.current_stream(place), side):
        with torch.cuda.stream(stream):
            send = torch.full((1000,), comm.rank + 1, dtype=dtype, device=place)
            receive, gathered = torch.zeros_like(send), torch.zeros((comm.size, 1000), dtype=dtype, device=place)
            comm.Allreduce(send, receive)
            comm.Allgather(send, gathered)
            seen = receive.clone()
        stream.synchronize()
        assert seen.cpu().tolist() == [sum(range(1, comm.size + 1))] * 1000
        assert gathered.cpu().tolist() == [[rank + 1] * 1000 for rank in range(comm.size)]
        comm.check(stream)
    with torch.cuda.stream(side):
        by_name = torch.full((7,), float(comm.rank), dtype=dtype, device=place)
    comm.Bcast(by_name, root=comm.size - 1, stream=side)
    side.synchronize()
    assert by_name.cpu().tolist() == [comm.size - 1] * 7


def every_collective(count: int) -> list[Call]:
    """All operations, into ordinary and into symmetric memory, out of place and in place."""
    calls = [Call("Sendrecv", "int32", count, algorithm="one_shot")]
    for number, operation in enumerate(OPERATIONS[:-1]):
        places = (False, True) if operation in IN_PLACE else (False,)
        for in_place, symmetric in itertools.product(places, (False, True)):
            dtype = DTYPES[(number + symmetric) % len(DTYPES)]
            calls.append(Call(operation, dtype, count, 0, "auto", in_place, symmetric))
    return calls


@pytest.mark.parametrize("count", COUNTS)
def test_a_graph_of_every_collective_with_new_values_in_each_replay(
    comm: mpicomm.Communicator, xp: Any, stream: Any, count: int
) -> None:
    with checked(comm, every_collective(count), xp) as sequence, stream:
        stream.begin_capture()
        sequence.run()
        graph = stream.end_capture()
        for _ in range(REPLAYS // 5):
            graph.launch()


def test_what_a_replay_leaves_undone_is_seen(
    comm: mpicomm.Communicator, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = CheckedSequence(comm, [Call("Allreduce", "float32", 1000), Call("Allgather", "int64", 1000)], xp)
    sequence.run()
    sequence.check()
    monkeypatch.setattr(mpicomm.Communicator, "Allgather", lambda *arguments, **keywords: None)
    sequence.run()
    with pytest.raises(AssertionError, match=r"wrong were \d+ elements of Call\(operation='Allgather'"):
        sequence.check()
