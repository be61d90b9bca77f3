"""Bad arguments of collectives, freed communicators, and threads that compute meanwhile."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.types import COVERED
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.communicator_calls import OPS, REDUCTIONS, Case, Prepared, legal_ops, require_works
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.references.reductions import OWN, dtype_named
from tests.helpers.rigs.call_forms import FORMS, method_name
from tests.helpers.rigs.communicators import array_module, communicator, patience_s

FLOAT32 = np.dtype(np.float32)
LARGE = 1 << 20  # elements: mapped memory in any case
WAYS = ("one_shot", "large", "nonblocking", "persistent")


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
        if op in legal_ops(name) or op == "a and (not b)":  # which is defined for all types
            continue
        said = repr(op) if op in OWN else op
        operation = REDUCTIONS[len(name + op) % len(REDUCTIONS)]
        content = np.ones(LARGE if way == "large" and (name, op) == ("float32", "band") else 4 * comm.size, dtype)
        send, receive = Placed(xp, content), Placed(xp, np.zeros_like(content))
        counts = {"recvcounts": [content.size // comm.size] * comm.size} if operation == "Reduce_scatter" else {}
        part = content.size // comm.size if "scatter" in operation else content.size
        with pytest.raises(InvalidUsageError, match=re.escape(f"op={said} is not defined for {name}")):
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


@pytest.mark.parametrize("count", [1, 3000, LARGE])
def test_arrays_that_overlap_never_reach_mpi(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    size, root = comm.size, comm.rank  # at a root both buffers count
    array = Placed(xp, np.ones(2 * count * size + 1, np.float32)).array
    one, next_one = array[: count + 1], array[1 : count + 2]
    many, within = array[: count * size], array[count * size - count : count * size]
    every = {"sendbuf": array[: count * size], "recvbuf": array[count * size - 1 : 2 * count * size - 1]}
    calls: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "Allreduce": (one, next_one, {}),
        "Reduce": (one, next_one, {"root": root}),
        "Scan": (one, next_one, {}),
        "Exscan": (one, next_one, {}),
        "Reduce_scatter_block": (many, within, {}),
        "Reduce_scatter": (many, within, {"recvcounts": [count] * size}),
        "Allgather": (within, many, {}),
        "Allgatherv": (within, many, {}),
        "Gather": (within, many, {"root": root}),
        "Gatherv": (within, many, {"root": root}),
        "Scatter": (many, within, {"root": root}),
        "Scatterv": (many, within, {"root": root}),
        "Alltoall": (*every.values(), {}),
        "Alltoallv": (*every.values(), {}),
    }
    for operation, (send, receive, more) in calls.items():
        if size == 1 and operation.startswith("Reduce_scatter"):
            continue  # there they are the same memory
        for method in OPERATIONS[operation].methods:
            with pytest.raises(InvalidUsageError, match="sendbuf and recvbuf overlap"):
                getattr(comm, method)(send, receive, **more)


@pytest.mark.parametrize("count", [100, 1 << 20])
@pytest.mark.parametrize("nonblocking", [False, True])
def test_who_receives_nothing_of_a_reduce_scatter_need_not_be_in_place(
    comm: mpicomm.Communicator, xp: Any, nonblocking: bool, count: int
) -> None:
    counts = [0] * (comm.size - 1) + [count]
    for same_memory in {False, xp is not np}:  # MPI refuses it, even if it has no bytes
        buffer = Placed(xp, np.ones(count, np.float32))
        arguments = (MPI.IN_PLACE, buffer.array)
        if comm.rank < comm.size - 1:
            arguments = (buffer.array, buffer.array[:0] if same_memory else Placed(xp, np.ones(0, np.float32)).array)
        if nonblocking:
            comm.Ireduce_scatter(*arguments, counts).Wait()
        else:
            comm.Reduce_scatter(*arguments, counts)
        comm.check()
        assert set(buffer.get().tolist()) == {comm.size if comm.rank == comm.size - 1 else 1}


def bad_arguments(xp: Any, size: int, count: int) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    """Calls by their fault: operation, arguments, and the text of the error."""
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
        "no two_shot": ("Scan", (send, receive), {"algorithm": "two_shot"}, "two_shot.* is for .*, not Scan"),
        "average of a ring": ("Allreduce", (send, receive, mpicomm.AVG), {"algorithm": "ring"}, "ring cannot average"),
        "no recvcounts": ("Reduce_scatter", (MPI.IN_PLACE, send), {}, "recvcounts is needed"),
        "few recvcounts": ("Reduce_scatter", (MPI.IN_PLACE, send, [1] * (size - 1)), {}, "recvcounts"),
        "sum of recvcounts": ("Reduce_scatter", (MPI.IN_PLACE, send, [count] * (size + 1)), {}, "recvcounts"),
        "in place receive": ("Allreduce", (send, MPI.IN_PLACE), {}, "recvbuf=.*IN_PLACE.* has no meaning"),
    }


@pytest.mark.parametrize("way", WAYS)
def test_bad_arguments_are_refused_before_anything_moves(comm: mpicomm.Communicator, xp: Any, way: str) -> None:
    count = LARGE if way == "large" else 2 * comm.size
    for name, (operation, arguments, keywords, text) in bad_arguments(xp, comm.size, count).items():
        if "algorithm" in keywords and way == "one_shot":
            continue
        if way == "large" and xp is np and (operation not in ("Allreduce", "Reduce", "Scan") or comm.size == 1):
            continue  # MPI carries out these of any size
        try:
            with pytest.raises(InvalidUsageError, match=text):
                call(comm, way, operation, *arguments, **keywords)
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    require_works(comm, xp)


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
    bad_roots: list[Any] = [None, "0", [0], 0.5]
    for root in bad_roots:
        with pytest.raises(TypeError, match=re.escape(f"Bcast: root={root!r} is no rank: pass an integer from 0 to ")):
            comm.Bcast(receive, root=root, algorithm="one_shot")
    bad_counts: list[Any] = [5, ["x"], [1.5]]
    for counts in bad_counts:
        with pytest.raises(TypeError, match=re.escape(f"Reduce_scatter: recvcounts={counts!r}: pass a sequence of")):
            comm.Reduce_scatter(receive.copy(), receive, counts, algorithm="one_shot")


@pytest.mark.parametrize("form", FORMS)
def test_algorithm_mpi_refuses_calls_that_mpi_lacks(comm: mpicomm.Communicator, xp: Any, form: str) -> None:
    half = Placed(xp, np.ones(3, np.float32).astype(dtype_named("bfloat16"))).array
    for operation, arguments, text in (
        ("Allreduce", ([half, "bfloat16"],) * 2, 'algorithm="mpi": MPI has no type for the bfloat16 of Allreduce'),
        ("Scan", ([half, "bfloat16"],) * 2, 'algorithm="mpi": MPI has no type for the bfloat16 of Scan'),
        ("Allreduce", (*(Placed(xp, np.ones(3)).array for _ in range(2)), mpicomm.AVG), "MPI has no AVG for Allreduce"),
    ):
        method = getattr(comm, method_name(form, operation))
        with pytest.raises(InvalidUsageError, match=re.escape(text)):
            method(*arguments, algorithm="mpi")


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


DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # The difference: operation, the arguments of rank 0, the arguments of the others.
    "operation": ("", {"operation": "Allreduce"}, {"operation": "Scan"}),
    "count": ("Allreduce", {"count": 5}, {"count": 7}),
    "large count": ("Allreduce", {"count": 5}, {"count": LARGE}),
    "dtype": ("Allreduce", {"dtype": np.dtype(np.int32)}, {"dtype": FLOAT32}),
    "bytes of movement": ("Allgather", {"dtype": np.dtype(np.float64), "count": 4}, {"dtype": FLOAT32, "count": 9}),
    "op": ("Allreduce", {"op": "sum"}, {"op": "max"}),
    "expression": ("Allreduce", {"op": "sum"}, {"op": "a * 2 - b"}),
    "algorithm": ("Allreduce", {"algorithm": "one_shot"}, {"algorithm": "two_shot"}),
    "ring": ("Allreduce", {"algorithm": "one_shot"}, {"algorithm": "ring"}),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told_who_said_what(device: str, what: str) -> None:
    operation, first, others = DIFFERENT[what]
    comm = communicator(device, timeout_s=stretched(10.0))
    arguments = {"operation": operation, "dtype": FLOAT32, "count": 5, "algorithm": "one_shot"}
    text = told_on_every_rank(comm, Case(**{**arguments, **(first if comm.rank == 0 else others)}))
    if operation == "Allgather":  # collectives move bytes
        first, others = ({"count": each["count"] * each["dtype"].itemsize} for each in (first, others))
    named = ("count", "op", "root", "algorithm")
    said = {f"{name}={value}" for name, value in (*first.items(), *others.items()) if name in named}
    said |= {str(each[name]) for each in (first, others) for name in each if name in ("operation", "dtype")}
    assert all(word in text for word in said), f"{said} are not all in: {text}"
    assert all(f"rank {rank}: " in text for rank in range(comm.size)), text
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["Bcast", "Gather", "Reduce", "Scatter"])
def test_different_roots_are_an_error_on_all_ranks(device: str, operation: str) -> None:
    # Some ranks wait for each other, until their time is up, or until another rank tells them.
    comm = communicator(device, timeout_s=HANG_S)
    text = told_on_every_rank(comm, Case(operation, FLOAT32, 5, root=min(comm.rank, 1), algorithm="one_shot"))
    for rank in range(comm.size):
        assert re.search(rf"rank {rank}: {operation}\([^)]*root={min(rank, 1)}[,)]", text), text
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


def told_on_every_rank(comm: mpicomm.Communicator, case: Case) -> str:
    """Return the error of all ranks when each calls its ``case``; the communicator is unusable then."""
    with array_module(comm) as xp:
        prepared = Prepared(case, comm.rank, comm.size, xp)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), comm.rank, comm.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError, match=r"ranks called different things: rank 0: ") as info:
            prepared.run(comm)
            comm.check()
            after.run(comm)  # a rank that had nothing to wait for is told at its next call
            comm.check()
        require_unusable(comm, after, PeerError)
    return str(info.value)


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
