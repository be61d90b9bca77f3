"""Ranks that call different things or do not come, freed communicators, and threads that compute meanwhile."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, PeerError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.communicator_calls import Case, Prepared, require_works
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import array_module, communicator, patience_s

FLOAT32 = np.dtype(np.float32)
LARGE = 1 << 20  # elements: mapped memory in any case


def test_a_freed_communicator_says_so(device: str) -> None:
    """Also to known calls and requests. mpi/api/test_errors.py has all calls on the host."""
    comm = communicator(device)
    with array_module(comm) as xp:
        half, large = (Placed(xp, np.ones(count, name)).array for count, name in ((3, np.float16), (LARGE, FLOAT32)))
        request = comm.Allreduce_init(MPI.IN_PLACE, half)
        require_works(comm, xp)
        comm.Allreduce(MPI.IN_PLACE, half)
        comm.Free()
        calls: list[Callable[[], Any]] = [request.Start, comm.check, comm.Barrier]
        for array in (half, large):
            calls += [partial(each, MPI.IN_PLACE, array) for each in (comm.Allreduce, comm.Iallreduce)]
        calls.append(lambda: comm.Allreduce_init(MPI.IN_PLACE, half).Start())
        for each in calls:
            with pytest.raises(InvalidUsageError, match=r"the communicator was freed; create another"):
                each()


def test_a_thread_computes_while_another_one_is_in_collectives(comm: mpicomm.Communicator, xp: Any) -> None:
    stop, sums = threading.Event(), []

    def compute() -> None:
        with array_module(comm) as module:
            stream = module.cuda.Stream(non_blocking=True) if module is not np else None
            while True:
                if stream is None:
                    sums.append(float((module.arange(20_000.0) * 2).sum()))
                else:
                    with stream:
                        sums.append(float((module.arange(20_000.0) * 2).sum()))
                if stop.is_set():
                    return

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for number in range(60):
            count, algorithm = (5, 4097, 70_001)[number % 3], ("one_shot", "auto")[number % 2]
            case = Case("Allreduce", FLOAT32, count, algorithm=algorithm, seed=number)
            prepared = Prepared(case, comm.rank, comm.size, xp)
            prepared.run(comm)
            comm.check()
            prepared.check()
    finally:
        stop.set()
        thread.join()
    assert sums and set(sums) == {20_000.0 * 19_999.0}


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    # The difference: what rank 0 passes, what the others pass, and what the error says of both.
    "operation": ({"operation": "Allreduce"}, {"operation": "Scan"}, ("Allreduce", "Scan")),
    "count": ({"count": 5}, {"count": 7}, ("count=5", "count=7")),
    "large count": ({"count": 5}, {"count": LARGE}, ("count=5", f"count={LARGE}")),
    "dtype": ({"dtype": np.dtype(np.int32)}, {"dtype": FLOAT32}, ("int32", "float32")),
    "bytes of movement": (
        {"operation": "Allgather", "dtype": np.dtype(np.float64), "count": 4},
        {"operation": "Allgather", "dtype": FLOAT32, "count": 9},
        ("count=32", "count=36"),
    ),
    "op": ({"op": "sum"}, {"op": "max"}, ("op=sum", "op=max")),
    "expression": ({"op": "sum"}, {"op": "a * 2 - b"}, ("op=sum", "op=a * 2 - b")),
    "algorithm": ({}, {"algorithm": "two_shot"}, ("algorithm=one_shot", "algorithm=two_shot")),
    "ring": ({}, {"algorithm": "ring"}, ("algorithm=one_shot", "algorithm=ring")),
    "order": ({"more": {"order": "tree"}}, {}, ("op=tree", "op=sum")),
    "operand": (
        {"more": {"epilogue": "v * n", "n": 0}},
        {"more": {"epilogue": "v * n", "n": 1}},
        ("epilogue='v * n', n=0", "epilogue='v * n', n=1"),
    ),
    "epilogue": ({"more": {"epilogue": "v * n", "n": 0}}, {}, ("epilogue='v * n', n=0", "op=sum, algorithm")),
    "codes": ({"wire": "int8"}, {"wire": "float8_e4m3fn"}, ("wire_dtype=int8", "wire_dtype=float8_e4m3fn")),
    "codes of results": ({"wire": "int8"}, {"more": {"wire_dtype": ("int8", None)}}, ("wire_dtype=int8", "None")),
    **{
        f"root of {name}": ({"operation": name}, {"operation": name, "root": 1}, ("root=0", "root=1"))
        for name in ("Bcast", "Gather", "Reduce", "Scatter")
    },
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told_who_said_what(device: str, what: str) -> None:
    if "order" in str(DIFFERENT[what]) and 64 % MPI.COMM_WORLD.size:
        pytest.skip("so many ranks have no tree")
    # Some ranks wait for each other, until their time is up, or until another rank tells them.
    comm = communicator(device, timeout_s=HANG_S if what.startswith("root") else stretched(10.0))
    first, others, said = DIFFERENT[what]
    same: dict[str, Any] = {"operation": "Allreduce", "dtype": FLOAT32, "count": 5, "algorithm": "one_shot"}
    case = Case(**same | (others if comm.rank else first))
    with array_module(comm) as xp:
        prepared = Prepared(case, comm.rank, comm.size, xp)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), comm.rank, comm.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError, match=r"ranks called different things: rank 0: ") as info:
            prepared.run(comm)
            comm.check()
            after.run(comm)  # a rank that had nothing to wait for is told at its next call
            comm.check()
        require_unusable(comm, after, PeerError)
    text = str(info.value)
    for rank in range(comm.size):
        assert re.search(rf"rank {rank}: [^;]*{re.escape(said[rank > 0])}", text), text
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("expected", [4, 6, 10**7])
def test_two_ranks_that_disagree_on_counts_are_told(device: str, expected: int) -> None:
    comm = communicator(device, timeout_s=stretched(10.0))
    rank, size = comm.rank, comm.size
    sent, received = [5] * size, [5] * size
    if rank == size - 1:
        received[0] = expected
    with array_module(comm) as xp:
        blocks, target = xp.zeros(sum(sent), FLOAT32), xp.zeros(sum(received), FLOAT32)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), rank, size, xp)
        told = "rank . sent data of another call|rank 0 sends 20 bytes, but"
        with pytest.raises(PeerError, match=told):
            comm.Alltoallv([blocks, sent], [target, received], algorithm="one_shot")
            comm.check()
            after.run(comm)  # as above
            comm.check()
        require_unusable(comm, after, PeerError)
    comm.Free()
    require_a_new_one_works(device)


def require_unusable(comm: mpicomm.Communicator, prepared: Prepared, error: type[Exception]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            prepared.run(comm)
            comm.check()


def require_a_new_one_works(device: str) -> None:
    with communicator(device) as new, array_module(new) as xp:
        require_works(new, xp)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["Allreduce", "Alltoall"])
def test_a_rank_that_does_not_come_is_named(device: str, operation: str) -> None:
    comm = communicator(device, timeout_s=patience_s(device))
    missing = 0
    with array_module(comm) as xp:
        require_works(comm, xp)
        prepared = Prepared(Case(operation, FLOAT32, 1001, algorithm="one_shot"), comm.rank, comm.size, xp)
        if comm.rank != missing:
            with pytest.raises(CollectiveTimeoutError, match=f"rank {missing}") as info:
                prepared.run(comm)
                comm.check()
            assert info.value.ranks == (missing,)
        MPI.COMM_WORLD.Barrier()
        # The rank that comes too late learns it, and so do the others again.
        with pytest.raises(CollectiveTimeoutError, match=f"rank {missing}") as info:
            prepared.run(comm)
            comm.check()
        assert info.value.ranks == (missing,)
        require_unusable(comm, prepared, CollectiveTimeoutError)
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
def test_the_other_way_that_a_peer_may_have_taken_is_named() -> None:
    """The ranks pass counts on both sides of the size from which calls go through mapped memory."""
    comm, few = communicator("cpu", timeout_s=patience_s("cpu")), (np.ones(10), np.zeros(10))
    if comm.rank == 1:
        comm.Allreduce(*few)
        with pytest.raises(CollectiveTimeoutError, match="this is rank 1, which came later"):
            comm.Free()
        return
    text = "^Allreduce: .*rank 1 did not arrive within .* may be in MPI's Allreduce"
    with pytest.raises(CollectiveTimeoutError, match=text) as info:
        comm.Allreduce(np.ones(LARGE), np.zeros(LARGE))
    assert info.value.ranks == (1,)
    MPI.Intracomm.Allreduce(comm, *few)  # for which rank 1 waits
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_other_communicators_go_on_when_one_is_unusable(device: str) -> None:
    with communicator(device) as good, array_module(good) as xp:
        child = good.Dup()
        require_works(child, xp)
        case = Case("Allreduce", FLOAT32, 5 + good.rank, algorithm="one_shot")
        prepared = Prepared(case, good.rank, good.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError):
            prepared.run(child)
            child.check()
        require_works(good, xp)
        child.Free()
        require_works(good, xp)
