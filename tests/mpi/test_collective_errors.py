"""What goes wrong in collectives: bad arguments, ranks that call different things, ranks that do not come, threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.collectives.types import COVERED
from tests.helpers.buffers import Placed
from tests.helpers.collective_calls import OPS, REDUCTIONS, Case, Prepared, legal_ops
from tests.helpers.communicators import array_module, communicator
from tests.helpers.raising import raises_everywhere
from tests.helpers.reductions import dtype_named

FLOAT32 = np.dtype(np.float32)
LARGE = 1 << 20  # elements: mapped memory in any case
WAYS = ("one_shot", "large", "nonblocking", "persistent")


@pytest.fixture(scope="module")
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    """One for all bad arguments: none of them may leave anything behind."""
    with communicator(device) as shared:
        yield shared
        with array_module(shared) as xp:
            require_works(shared, xp)


@pytest.fixture
def xp(comm: mpicomm.Communicator) -> Iterator[Any]:
    with array_module(comm) as module:
        yield module


def require_works(comm: mpicomm.Communicator, xp: Any) -> None:
    for algorithm in ("auto", "one_shot"):
        prepared = Prepared(Case("Allreduce", FLOAT32, 1001, algorithm=algorithm), comm.rank, comm.size, xp)
        prepared.run(comm)
        comm.check()
        prepared.check()


def call(comm: mpicomm.Communicator, way: str, operation: str, *arguments: Any, **keywords: Any) -> Any:
    """Call an operation in one of the ways that mpicomm checks, and MPI does not before it."""
    if way == "nonblocking":
        return getattr(comm, "I" + operation.lower())(*arguments, **keywords)
    if way == "persistent":
        return getattr(comm, operation + "_init")(*arguments, **keywords)
    if way == "one_shot":
        keywords["algorithm"] = "one_shot"
    return getattr(comm, operation)(*arguments, **keywords)


@pytest.mark.parametrize("way", WAYS)
def test_reductions_that_are_not_defined(comm: mpicomm.Communicator, xp: Any, way: str) -> None:
    for name, op in itertools.product(COVERED, OPS):
        try:
            dtype = dtype_named(name)
        except ImportError:
            continue
        if op in legal_ops(name):
            continue
        operation = REDUCTIONS[len(name + op) % len(REDUCTIONS)]
        content = np.ones(LARGE if way == "large" and (name, op) == ("float32", "band") else 4 * comm.size, dtype)
        send, receive = Placed(xp, content), Placed(xp, np.zeros_like(content))
        counts = {"recvcounts": [content.size // comm.size] * comm.size} if operation == "Reduce_scatter" else {}
        part = content.size // comm.size if "scatter" in operation else content.size
        with pytest.raises(InvalidUsageError, match=f"op={op} is not defined for {name}"):
            call(
                comm,
                "one_shot" if content.size < LARGE and way == "large" else way,
                operation,
                send.array,
                [receive.array, part],
                op=OPS[op],
                **counts,
            )
        assert not receive.get().astype(bool).any()


def test_small_host_arrays_are_checked_by_mpi(comm: mpicomm.Communicator, xp: Any) -> None:
    send, receive = Placed(xp, np.ones(4, np.float32)), Placed(xp, np.zeros(4, np.float32))
    with pytest.raises((InvalidUsageError, MPI.Exception)):
        comm.Allreduce(send.array, receive.array, MPI.BAND)
    with pytest.raises((InvalidUsageError, MPI.Exception)):
        comm.Bcast(send.array, root=comm.size)
    assert not receive.get().any()


def bad_arguments(xp: Any, size: int, count: int) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    """Calls by what is wrong with them: operation, arguments, and what the error has to say."""
    send, receive = Placed(xp, np.ones(count, np.float32)).array, Placed(xp, np.zeros(count, np.float32)).array
    double, longer = Placed(xp, np.zeros(count)).array, Placed(xp, np.zeros(count + 1, np.float32)).array
    both = Placed(xp, np.zeros(2 * count, np.float32)).array
    return {
        "types differ": ("Allreduce", (send, double), {}, "element types differ: sendbuf float32 and recvbuf float64"),
        "counts differ": (
            "Allreduce",
            (send, longer),
            {},
            f"sendbuf holds {count} .* recvbuf has room for {count + 1}",
        ),
        "Scan counts": ("Scan", ([send, count - 1], receive), {}, f"sendbuf holds {count - 1}"),
        "blocks do not fit": ("Allgather", (send, [send, 0]), {}, "sendbuf holds"),
        "overlap": ("Allreduce", (both[:count], both[count - 1 : 2 * count - 1]), {}, "sendbuf and recvbuf overlap"),
        "overlap of a scan": ("Scan", (both[1 : count + 1], both[:count]), {}, "overlap"),
        "overlap of a gather": ("Allgather", (both[:1], both[:size]), {}, "overlap"),
        "count too large": ("Allreduce", ([send, count + 1], receive), {}, "elements 0 to .* are asked for"),
        "negative count": ("Bcast", ([send, -1],), {}, "count -1 is negative"),
        "root too large": ("Bcast", (send,), {"root": size}, f"root={size} is no rank: use 0 to {size - 1}"),
        "root negative": ("Reduce", (send, receive), {"root": -1}, "root=-1 is no rank"),
        "unknown algorithm": ("Allreduce", (send, receive), {"algorithm": "ring-a-ring"}, "'ring-a-ring' is unknown"),
        "no two_shot": ("Scan", (send, receive), {"algorithm": "two_shot"}, "two_shot.* is for Allreduce and Bcast"),
        "in place receive": ("Allreduce", (send, MPI.IN_PLACE), {}, "recvbuf=.*IN_PLACE.* has no meaning"),
    }


@pytest.mark.parametrize("way", WAYS)
def test_bad_arguments_are_refused_before_anything_moves(comm: mpicomm.Communicator, xp: Any, way: str) -> None:
    count = LARGE if way == "large" else 2 * comm.size
    for name, (operation, arguments, keywords, text) in bad_arguments(xp, comm.size, count).items():
        if "algorithm" in keywords and way == "one_shot":
            continue
        if way == "large" and xp is np and (operation not in ("Allreduce", "Reduce", "Scan") or comm.size == 1):
            continue  # of any size these are MPI's
        try:
            with pytest.raises(InvalidUsageError, match=text):
                call(comm, way, operation, *arguments, **keywords)
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    require_works(comm, xp)


@pytest.mark.parametrize("way", WAYS)
def test_receive_buffers_that_are_read_only(comm: mpicomm.Communicator, xp: Any, way: str) -> None:
    if xp is not np:
        pytest.skip("GPU arrays cannot be read-only")
    count = LARGE if way == "large" else 3
    send, receive = np.ones(count, np.float32), np.zeros(count, np.float32)
    receive.flags.writeable = False
    with pytest.raises((InvalidUsageError, BufferError), match=r"read-only|not writable"):
        call(comm, way, "Allreduce", send, receive)
    if comm.size > 1:
        with pytest.raises((InvalidUsageError, BufferError), match=r"read-only|not writable"):
            call(comm, way, "Bcast", receive, root=(comm.rank + 1) % comm.size)
        # The root only reads its buffer.
        send.flags.writeable = False
        comm.Bcast(send if comm.rank == 0 else np.zeros(count, np.float32), algorithm="one_shot")


def test_streams_of_host_arrays(comm: mpicomm.Communicator) -> None:
    for count, dtype in itertools.product((1, LARGE), (np.float32, np.float16)):
        send, receive = np.ones(count, dtype), np.zeros(count, dtype)
        for method in (comm.Allreduce, comm.Iallreduce, comm.Allreduce_init):
            with pytest.raises(InvalidUsageError, match=r"stream=5 is for device arrays"):
                method(send, receive, stream=5)
        assert not receive.any()


def test_objects_that_are_no_buffers(comm: mpicomm.Communicator, xp: Any) -> None:
    receive = Placed(xp, np.zeros(3, np.float32)).array
    for bad in (3, "text", object(), {}):
        with pytest.raises(TypeError):
            comm.Allreduce(bad, receive, algorithm="one_shot")
    with pytest.raises(TypeError, match="op="):
        comm.Allreduce(MPI.IN_PLACE, receive, op="sum", algorithm="one_shot")  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [False, True])
def test_a_freed_communicator_says_so(device: str, used: bool) -> None:
    comm = communicator(device)
    with array_module(comm) as xp:
        buffer, half = Placed(xp, np.ones(3, np.float32)).array, Placed(xp, np.ones(3, np.float16)).array
        large = Placed(xp, np.ones(LARGE, np.float32)).array
        request = comm.Allreduce_init(MPI.IN_PLACE, half)
        if used:
            require_works(comm, xp)
        comm.Free()
        of_mpicomm: list[Callable[[], Any]] = [
            lambda: comm.Allreduce(MPI.IN_PLACE, buffer, algorithm="one_shot"),
            lambda: comm.Allreduce(MPI.IN_PLACE, half),
            lambda: comm.Iallreduce(MPI.IN_PLACE, half),
            lambda: comm.Allreduce_init(MPI.IN_PLACE, half).Start(),
            request.Start,
            comm.check,
        ]
        for each in of_mpicomm:
            with pytest.raises(InvalidUsageError, match=r"the communicator was freed; create another"):
                each()
        of_either: list[Callable[[], Any]] = [
            lambda: comm.Allreduce(MPI.IN_PLACE, buffer),
            lambda: comm.Allreduce(MPI.IN_PLACE, large),
            lambda: comm.Iallreduce(MPI.IN_PLACE, buffer),
            lambda: comm.Allreduce_init(MPI.IN_PLACE, buffer).Start(),
            lambda: comm.Send(buffer, MPI.PROC_NULL),
            lambda: comm.Irecv(buffer, MPI.PROC_NULL),
            comm.Barrier,
        ]
        for each in of_either:
            with pytest.raises((InvalidUsageError, MPI.Exception), match=r"(?i)was freed|invalid communicator"):
                each()


DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # What differs: operation, the arguments of rank 0, those of the others.
    "operation": ("", {"operation": "Allreduce"}, {"operation": "Scan"}),
    "count": ("Allreduce", {"count": 5}, {"count": 7}),
    "large count": ("Allreduce", {"count": 5}, {"count": LARGE}),
    "dtype": ("Allreduce", {"dtype": np.dtype(np.int32)}, {"dtype": FLOAT32}),
    "dtype of movement": ("Allgather", {"dtype": np.dtype(np.int32)}, {"dtype": FLOAT32}),
    "op": ("Allreduce", {"op": "sum"}, {"op": "max"}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told_who_said_what(device: str, what: str) -> None:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("needs several ranks")
    operation, first, others = DIFFERENT[what]
    comm = communicator(device, timeout_s=10)
    arguments = {"operation": operation, "dtype": FLOAT32, "count": 5, **(first if comm.rank == 0 else others)}
    case = Case(**arguments, algorithm="one_shot")
    with array_module(comm) as xp:
        prepared = Prepared(case, comm.rank, comm.size, xp)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), comm.rank, comm.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError, match=r"ranks called different things: rank 0: ") as info:
            prepared.run(comm)
            comm.check()
            after.run(comm)  # a rank that had nothing to wait for is told at its next call
            comm.check()
        said = {
            f"{name}={value}" for name, value in (*first.items(), *others.items()) if name in ("count", "op", "root")
        }
        said |= {str(each[name]) for each in (first, others) for name in each if name in ("operation", "dtype")}
        assert all(word in str(info.value) for word in said), f"{said} are not all in: {info.value}"
        assert all(f"rank {rank}: " in str(info.value) for rank in range(comm.size)), str(info.value)
        require_unusable(comm, after, PeerError)
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.parametrize("operation", ["Bcast", "Gather", "Reduce", "Scatter"])
def test_different_roots_are_an_error_on_all_ranks(device: str, operation: str) -> None:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("needs several ranks")
    comm = communicator(device, timeout_s=2)
    case = Case(operation, FLOAT32, 5, root=min(comm.rank, 1), algorithm="one_shot")
    with array_module(comm) as xp:
        prepared = Prepared(case, comm.rank, comm.size, xp)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), comm.rank, comm.size, xp)
        # Where two ranks wait for each other, or nobody waits, the ranks cannot see at once who is wrong.
        with pytest.raises((PeerError, CollectiveTimeoutError)) as info:
            prepared.run(comm)
            comm.check()
            after.run(comm)
            comm.check()
        assert len({error.__name__ for error in MPI.COMM_WORLD.allgather(info.type)}) == 1
        require_unusable(comm, after, info.type)
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


@pytest.mark.parametrize("operation", ["Allreduce", "Alltoall"])
def test_a_rank_that_does_not_come_is_named(device: str, operation: str) -> None:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("needs several ranks")
    comm = communicator(device, timeout_s=1.0)
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


def test_other_communicators_go_on_when_one_is_unusable(device: str) -> None:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("needs several ranks")
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
