"""What a process holds: nothing leaks, few descriptors are enough, and GPUs give memory back for a while."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError, InvalidUsageError
from tests.helpers.faults.leaks import shared_files
from tests.helpers.faults.raising import FIRST_AND_LAST, WORLD, raises_everywhere
from tests.helpers.inputs.checked_on_device import Call, CheckedSequence
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module, communicator, require_memory_works, settle, to_host
from tests.helpers.rigs.fd_exchanges import few_free_descriptors

FEW, MANY = 8, 40
"""Rounds of what has memory of its own, and of what shares chunks of memory, of which each holds several."""


def counts() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(shared_files()),
    }


def require_no_growth(cycle: Callable[[], object], rounds: int) -> None:
    def repeat() -> None:
        for _ in range(rounds):
            cycle()

    repeat()
    gc.collect()
    gc.disable()  # nothing is left to the garbage collector, which runs at any time
    try:
        before = counts()
        repeat()
        assert counts() == before
    finally:
        gc.enable()
    logging.disable()  # pytest keeps the warnings, such as the warning about ranks that share a GPU
    try:
        gc.collect()
        objects = len(gc.get_objects())
        repeat()
        gc.collect()
        assert len(gc.get_objects()) - objects < rounds
    finally:
        logging.disable(logging.NOTSET)


def array(comm: mpicomm.Communicator) -> None:
    with comm.zeros(10) as array:
        array.put(array.local, (comm.rank + 1) % comm.size)


def used_child(comm: mpicomm.Communicator) -> None:
    with comm.Dup() as child:
        require_memory_works(child)
        child.zeros(10)  # `Free` closes the rest
        child.empty((2, 3), np.int8).peer((comm.rank + 1) % comm.size)
        child.shared_event()


def whole(comm: mpicomm.Communicator) -> None:
    with communicator("cpu" if comm.device == "cpu" else "cuda") as own, array_module(own) as xp:
        own.zeros(10)
        own.Allreduce(MPI.IN_PLACE, xp.ones(10), algorithm="one_shot")


CYCLES: dict[str, tuple[Callable[[mpicomm.Communicator], object], int]] = {
    "array": (array, MANY),
    "event": (lambda comm: comm.shared_event().close(), MANY),
    "child": (lambda comm: comm.Dup().Free(), FEW),
    "used child": (used_child, FEW),
    "whole": (whole, FEW),
}


@pytest.mark.parametrize(("cycle", "rounds"), CYCLES.values(), ids=CYCLES)
def test_what_is_closed_leaves_nothing(own_comm: mpicomm.Communicator, cycle: Any, rounds: int) -> None:
    require_no_growth(lambda: cycle(own_comm), rounds)


def test_any_number_of_arrays_and_communicators_does_with_few_descriptors() -> None:
    with communicator("cpu") as comm, few_free_descriptors(20):
        arrays = [comm.zeros(10) for _ in range(50)]
        children = [comm.Dup() for _ in range(10)]
        for child in children:
            require_memory_works(child)
            child.Allreduce(MPI.IN_PLACE, np.ones(10), algorithm="one_shot")
            child.Free()
        for array in arrays:
            array.close()


@pytest.mark.parametrize("culprit", FIRST_AND_LAST)
def test_too_few_descriptors_on_one_rank_name_the_limit_on_all(culprit: int) -> None:
    # A rank without a descriptor for a socket sends nothing, for which its peers wait.
    with communicator("cpu", timeout_s=stretched(2.0)) as comm:
        require_memory_works(comm)
        failures = 0
        while said := _failure_with(failures, comm, culprit):
            assert f"rank {culprit}" in said
            assert "files open: raise the limit (ulimit -n)" in said
            failures += 1
        assert 0 < failures < 10 + comm.size
        require_memory_works(comm)


def _failure_with(free: int, comm: mpicomm.Communicator, culprit: int) -> str:
    """Make an array with few free descriptors on one rank; return the text of the error, or ""."""
    with few_free_descriptors(free) if WORLD.rank == culprit else contextlib.nullcontext():
        try:
            comm.zeros(10).close()
        except HandleError as error:
            return str(error)
    return ""


def shared_mappings() -> set[str]:
    fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {each[5] for each in fields if each[1].endswith("s") and len(each) == 6}


def test_shared_memory_has_no_name_by_which_a_stranger_finds_it(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu"):
        pass  # descriptors that MPI opens at first
    before = shared_mappings()
    with communicator("cpu") as comm, comm.zeros(1000):
        comm.Allreduce(MPI.IN_PLACE, np.ones(1000), algorithm="one_shot")
        assert shared_mappings() - before <= {"/memfd:mpicomm (deleted)"}


LARGE = 8 << 20
"""Elements of float32: enough for copy engines and staging memory."""


@pytest.fixture
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    if device == "cpu":
        pytest.skip("memory of the host stays")
    with communicator(device, handle="fd") as comm:
        yield comm


def calls_of_every_algorithm() -> list[Call]:
    """Calls by every algorithm and protocol, with few and many elements, also into symmetric memory."""
    return [
        *(Call("Sendrecv", "int64", count, algorithm="one_shot") for count in (5, 70_001)),
        *(Call("Allreduce", "float32", count) for count in (5, 1001, 70_001, 1 << 20)),
        *(Call("Alltoall", "uint32", count) for count in (5, 70_001, 1 << 20)),
        *(
            Call("Allgather", "uint32", count, symmetric=symmetric)
            for count in (5, 1 << 20)
            for symmetric in (False, True)
        ),
        *(Call("Allreduce", "float32", 70_001, algorithm=algorithm) for algorithm in ("two_shot", "ring")),
        Call("Allreduce", "float32", LARGE, algorithm="copy_engine"),
        Call("Bcast", "uint32", 70_001, algorithm="chain"),
    ]


def free_nbytes(xp: Any) -> int:
    return int(xp.cuda.runtime.memGetInfo()[0])


def test_graphs_and_known_calls_go_on_and_the_memory_is_free_in_between(comm: mpicomm.Communicator, xp: Any) -> None:
    sequence = CheckedSequence(comm, calls_of_every_algorithm(), xp)
    with xp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(12):  # a repeated call gets a plan of its own, and then a graph
            sequence.run()
        sequence.check()
        stream.begin_capture()
        sequence.run()
        graph = stream.end_capture()
        graph.launch(stream)
        sequence.check()
        settle(comm)
        held = sum(use.device_nbytes for use in comm.describe().memory)
        for keep in (True, False):
            before = free_nbytes(xp)
            comm.suspend(keep=keep)
            assert free_nbytes(xp) - before >= 0.95 * held
            with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=r"call resume\(\)"):
                sequence.run()
            comm.resume()
            assert free_nbytes(xp) <= before + held // 20
            for _ in range(3):
                graph.launch(stream)
                sequence.run()
            sequence.check()
    require_memory_works(comm)
    settle(comm)
    sequence.close()


def test_arrays_windows_and_signals_come_back_with_their_contents(comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    array = comm.empty(1 << 20, "f4")
    win = mpicomm.Win.Allocate(8 << 10, 8, MPI.INFO_NULL, comm)
    array.local[...] = xp.arange(1 << 20) + comm.rank
    win.tomemory().view("i8")[...] = comm.rank
    peer = array.peer(right)
    settle(comm)
    array.signal(right)
    win.Lock(right)
    for keep in (True, True, False):
        comm.suspend(keep=keep)
        comm.resume()
        if keep:
            assert (peer == xp.arange(1 << 20) + right).all()
            assert (win.tomemory().view("i8") == comm.rank).all()
    win.Unlock(right)  # the board says who holds the lock
    array.wait_signal(left)
    array.put(xp.full(3, comm.rank, "f4"), right)
    array.signal(right)
    array.wait_signal(left)
    assert to_host(array.local)[:3].tolist() == [left] * 3
    win.Fence()
    win.tomemory().view("i8")[...] = comm.rank
    win.Fence()
    win.Accumulate(xp.ones(4, "i8"), right, 2)
    win.Fence()
    assert to_host(win.tomemory().view("i8"))[:8].tolist() == [comm.rank] * 2 + [comm.rank + 1] * 4 + [comm.rank] * 2
    comm.check()
    win.Free()
    comm.suspend()  # the communicator and the array are freed so


def test_datatypes_epilogues_and_messages_of_before_work_afterwards(comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # The table of the regions is larger than a block of memory, and the packed elements lie in scratch memory.
    places = np.cumsum(np.random.default_rng(0).integers(2, 4, 400_000)).astype(np.int32)
    scattered = MPI.DOUBLE.Create_indexed_block(1, places.tolist()).Commit()
    sent, received = xp.arange(places[-1] + 1, dtype="f8") + comm.rank, xp.empty((comm.size, len(places)))
    x, y, bias = xp.ones(70_001, "f4"), xp.empty(70_001, "f4"), xp.arange(70_001, dtype="f4")
    late, message = xp.empty(1000, "i8"), xp.arange(1000) + comm.rank

    def require_calls() -> None:
        received[...] = 0
        comm.Allgather([sent, 1, scattered], received)
        assert (to_host(received) == places + np.arange(comm.size)[:, None]).all()
        comm.Allreduce(x, y, epilogue="v * scale + bias[i]", scale=0.5, bias=bias)
        assert (y == comm.size * 0.5 + bias).all()
        comm.check()

    require_calls()
    comm.Sendrecv(message, right, 1, late, left, 1, algorithm="stream")
    comm.Send(message, right, 2, algorithm="stream")  # no rank receives it before the suspension
    comm.suspend(keep=False)
    comm.resume()
    comm.Recv(late, left, 2, algorithm="stream")
    assert (late == xp.arange(1000) + left).all()
    for _ in range(2):
        require_calls()
    comm.Sendrecv(message, right, 3, late, left, 3)
    assert (late == xp.arange(1000) + left).all()
    comm.check()
    scattered.Free()
    comm.suspend()


def test_experts_and_products_go_on_after_a_suspension(comm: mpicomm.Communicator, xp: Any) -> None:
    tokens, hidden, top_k = 40, 64, 2
    generator = xp.random.default_rng(comm.rank)
    x = generator.random((tokens, hidden), dtype=np.float32)
    ids = xp.argsort(generator.random((tokens, 2 * comm.size)), axis=1)[:, :top_k].astype(np.int64)
    weights = xp.full((tokens, top_k), 0.5, "f4")
    a, b = xp.ones((2 * comm.size, 3), "f4"), xp.full((3, 4), comm.rank + 1, "f4")
    with mpicomm.Experts(comm, 2 * comm.size, hidden, tokens, top_k, "float32") as experts:
        for _ in range(3):
            for _ in range(2):
                received = experts.dispatch(x, ids, weights)
                assert (experts.combine(received.x, received) == x).all()  # each token has the weight 1 in all
                total = comm.matmul_allreduce(a, b)
                assert (total == 3 * comm.size * (comm.size + 1) / 2).all()
            comm.suspend(keep=False)
            with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=r"call resume\(\)"):
                experts.dispatch(x, ids, weights)
            comm.resume()
        comm.check()
