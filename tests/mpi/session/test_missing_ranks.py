"""A rank comes late to a call, or never: the others name it in time, it raises as they did, and nobody hangs."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError
from mpicomm.cluster import agreement
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.errors import name_ranks
from mpicomm.sharing.fd_exchange import FdExchange
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import ALLOCATE, FIRST_AND_LAST, WORLD, attribute, broken, raises_everywhere
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module, communicator, patience_s, require_memory_works

pytestmark = pytest.mark.mpi(min_size=2)

LAST, COUNT = WORLD.size - 1, 100_000
Call = Callable[[mpicomm.Communicator, mpicomm.SymmetricArray, int], Any]


def reduce(comm: mpicomm.Communicator, count: int = 60, name: str = "Allreduce") -> None:
    with array_module(comm) as xp:
        getattr(comm, name)(xp.ones(count, "f8"), xp.empty(count, "f8"), algorithm="one_shot")
        comm.check()


def multiply(name: str) -> Call:
    def call(comm: mpicomm.Communicator, array: mpicomm.SymmetricArray, late: int) -> None:
        with array_module(comm) as xp:
            getattr(comm, name)(xp.ones((4 * comm.size, 4)), xp.ones((4, 2)))
            comm.check()

    return call


MAKERS: dict[str, Callable[[Any], Any]] = {
    "Communicator": lambda comm: mpicomm.Communicator(comm, device="cpu", timeout_s=patience_s("cpu")),
    "Dup": lambda comm: comm.Dup(),
    "Dup_with_info": lambda comm: comm.Dup_with_info(MPI.INFO_NULL),
    "Clone": lambda comm: comm.Clone(),
    "Split": lambda comm: comm.Split(0, comm.rank),
    "Split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda comm: comm.Create(comm.Get_group()),
    "Create_cart": lambda comm: comm.Create_cart([comm.size]),
    "Create_graph": lambda comm: comm.Create_graph(range(1, comm.size + 1), [*range(1, comm.size), 0]),
    "Create_dist_graph": lambda comm: comm.Create_dist_graph([], [], []),
    "Create_dist_graph_adjacent": lambda comm: comm.Create_dist_graph_adjacent([], []),
    "Sub": lambda comm: comm.Sub([True]),
}
"""Calls that make a communicator; after a timeout they can be made again."""

OF_ALL: dict[str, Call] = {
    "empty": lambda comm, array, late: comm.empty(3),
    "zeros": lambda comm, array, late: comm.zeros(3),
    "shared_event": lambda comm, array, late: comm.shared_event(),
    "SymmetricArray 0: close": lambda comm, array, late: array.close(),
    "Free": lambda comm, array, late: comm.Free(),
}
"""Calls after which the communicator is unusable, and whose errors name the call; "empty" makes the first array."""

OTHERS: dict[str, Call] = {
    "Create_group": lambda comm, array, late: comm.Create_group(comm.Get_group()),
    "suspend": lambda comm, array, late: comm.suspend(),
    "resume": lambda comm, array, late: comm.resume(),
    "Allreduce": lambda comm, array, late: reduce(comm),
    "Alltoall": lambda comm, array, late: reduce(comm, name="Alltoall"),
    **{name: multiply(name) for name in ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")},
}


@contextmanager
def without(culprit: int) -> Iterator[MPI.Comm | None]:
    """The other ranks as a communicator; None on the culprit, which waits at the end for them."""
    others = WORLD.Split(MPI.UNDEFINED if WORLD.rank == culprit else 0)
    try:
        yield None if others == MPI.COMM_NULL else others
    finally:
        if others != MPI.COMM_NULL:
            others.Free()
        WORLD.Barrier()


@contextmanager
def impatient_without(
    culprit: int, device: str, *, timeout_s: float | None = None
) -> Iterator[tuple[mpicomm.Communicator, MPI.Comm | None]]:
    """A new Communicator and `without`: the others free it at the end, and the culprit frees it after them."""
    impatient = communicator(device, timeout_s=timeout_s or patience_s(device))
    with without(culprit) as others:
        yield impatient, others
        if others:
            impatient.Free()
    if WORLD.rank == culprit:
        with suppress(MpicommError):
            impatient.Free()


def require_unusable(comm: mpicomm.Communicator, ranks: MPI.Comm, text: str) -> None:
    for call in (comm.check, lambda: comm.zeros(3), comm.shared_event):
        with raises_everywhere(ranks, MpicommError, match=f"unusable since an {text}"):
            call()


@pytest.mark.parametrize(("name", "late"), [*((name, LAST) for name in MAKERS), ("Communicator", 0), ("Dup", 0)])
def test_a_communicator_can_be_made_after_a_rank_came_late(device: str, name: str, late: int) -> None:
    limit_s = patience_s("cpu")
    whole = communicator(device, timeout_s=limit_s)
    comm: Any = whole.Create_cart([whole.size]) if name == "Sub" else whole
    plain, anything = MPI.Intracomm(comm), np.zeros(1)
    receive = plain.Irecv(anything)  # the messages of the user may have any source and tag
    for _ in range(2 if name == "Dup" else 1):
        if WORLD.rank == late:
            WORLD.Barrier()
        text = f"^{name}: rank {late} did not arrive within {limit_s:g} s"
        with pytest.raises(CollectiveTimeoutError, match=text) as raised:
            MAKERS[name](comm)
        assert raised.value.ranks == (late,)
        if WORLD.rank != late:
            WORLD.Barrier()
        WORLD.Barrier()
        made = MAKERS[name](comm)
        assert made.allreduce(1) == WORLD.size
        made.Free()
    plain.Send(np.ones(1), (comm.rank + 1) % comm.size)
    receive.Wait()
    assert anything[0] == 1
    comm.Free()
    whole.Free()


@pytest.mark.parametrize(("name", "late"), [*itertools.product(OF_ALL, FIRST_AND_LAST)])
def test_rank_that_never_comes_is_named(own_comm: mpicomm.Communicator, device: str, name: str, late: int) -> None:
    require_memory_works(own_comm)
    limit_s = patience_s(device)
    with nothing_leaks():
        impatient = communicator(device, timeout_s=limit_s)
        array: Any = None if name == "empty" else impatient.zeros(3)
        with without(late) as others:
            if others:
                text = f"^{name}: .*rank {late} did not arrive within {limit_s:g} s"
                text += ": let every rank make this call$" if name == "empty" else ""
                with raises_everywhere(others, CollectiveTimeoutError, match=text) as excinfo:
                    OF_ALL[name](impatient, array, late)
                assert excinfo.value.ranks == (late,)
                del excinfo
                if name != "Free":
                    require_unusable(impatient, others, f"earlier timeout .*rank {late} did not arrive")
                impatient.Free()
        if WORLD.rank == late:  # the error of its call names the call of the others
            with pytest.raises(MpicommError, match=name):
                impatient.Free()
            for _ in range(2):
                with suppress(MpicommError):
                    impatient.Free()
        impatient.Free()
        assert array is None or array.closed
        require_memory_works(own_comm)
        del array, impatient


@pytest.mark.parametrize(("name", "late"), [*itertools.product(OTHERS, FIRST_AND_LAST)])
def test_a_rank_that_comes_after_the_others_have_given_up_raises_as_they_did(device: str, name: str, late: int) -> None:
    if (device, name) == ("cuda", "resume"):
        pytest.skip("the memory of most handle kinds cannot come back")
    comm = communicator(device, timeout_s=patience_s(device))
    array = comm.zeros(1)
    reduce(comm)  # sets up the memory of later calls
    if name == "resume":
        comm.suspend()
    if WORLD.rank == late:
        WORLD.Barrier()
    # The kernels of products do not read that a peer has given up: on a GPU the late rank's own time runs out.
    missed = r"\d+" if device == "cuda" and "matmul" in name and WORLD.rank == late else late
    with pytest.raises(CollectiveTimeoutError, match=f"rank {missed} did not|rank {missed} has not") as raised:
        OTHERS[name](comm, array, late)
    if name in OPERATIONS:  # the communicator stays unusable
        assert raised.value.ranks == (late,)
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError):
                OTHERS[name](comm, array, late)
    if WORLD.rank != late:
        WORLD.Barrier()
    WORLD.Barrier()  # a communicator that is still whole waits in Free for ranks that are late
    comm.Free()


@pytest.mark.parametrize("name", ["Allreduce", "wait_signal", "Fence"])
def test_free_waits_for_no_rank_after_a_timeout(device: str, name: str) -> None:
    if (device, name) == ("cpu", "Fence"):
        pytest.skip("windows of the host are MPI's, which waits without a limit")
    comm = communicator(device, timeout_s=patience_s("cpu"))
    array = comm.zeros(1)
    win: Any = mpicomm.Win.Allocate(80, 8, comm=comm) if device == "cuda" else None
    reduce(comm)
    calls: dict[str, Callable[[], object]] = {
        "Allreduce": lambda: reduce(comm),
        "wait_signal": lambda: array.wait_signal(LAST),
        "Fence": lambda: win.Fence(),
    }
    if comm.rank != LAST:
        with pytest.raises(CollectiveTimeoutError):
            calls[name]()
            comm.check()
        array.close()
        if win is not None:
            win.Free()
        comm.Free()
    WORLD.Barrier()
    with suppress(CollectiveTimeoutError):  # of a rank whose first call this is
        comm.Free()
    WORLD.Barrier()


def test_a_missing_rank_of_a_group_is_named() -> None:
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    everyone, first = comm.Get_group(), comm.Get_group().Incl([0])
    pairs = [everyone.Incl([0, rank]) for rank in range(1, WORLD.size)]
    for _ in range(3):  # groups that share a rank do not mix
        for group in [first, *pairs]:
            if group.rank != MPI.UNDEFINED:
                made = comm.Create_group(group)
                assert made.size == group.size
                made.Free()
    for rank in (0, 1, None):  # the last call: its messages could meet messages of the call before
        if WORLD.rank in ((0, 1) if rank is None else (rank,)):
            text = re.escape("Create_group: rank 1 did not arrive within") if rank == 0 else "rank 1 did not arrive"
            with pytest.raises(CollectiveTimeoutError, match=text) as raised:
                comm.Create_group(pairs[0])
            assert rank != 0 or raised.value.ranks == (1,)
        WORLD.Barrier()
    comm.Split().Free()
    for group in (everyone, first, *pairs):
        group.Free()
    comm.Free()


@pytest.mark.mpi(min_size=3)
def test_all_ranks_that_never_come_are_named_and_get_no_words_in_a_later_communicator() -> None:
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    if WORLD.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"^Dup: rank") as raised:
            comm.Dup()
        assert raised.value.ranks == tuple(range(1, WORLD.size))
    WORLD.Barrier()
    comm.Free()
    others = WORLD.Create_group(WORLD.Get_group().Excl([0]))  # MPI would give it the number of the freed communicator
    strays = WORLD.rank > 0 and any(others.Iprobe(rank, MPI.ANY_TAG) for rank in range(others.size))
    assert not WORLD.allreduce(strays, MPI.LOR)
    if WORLD.rank > 0:
        others.Free()


@pytest.mark.mpi(min_size=3)
def test_two_ranks_that_never_come_cost_one_deadline() -> None:
    """The last rank has found one rank missing in an inner exchange, and the first rank does not come either."""
    comm, timeout_s = WORLD.Dup(), stretched(0.3)

    def find_a_rank_missing() -> None:
        time.sleep(timeout_s)
        raise CollectiveTimeoutError("inner: rank 1 did not arrive", ranks=(1,))

    if comm.rank == LAST:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 0 did not arrive"):
            agreement.Group(comm, range(comm.size), timeout_s).agree("outer", find_a_rank_missing)
        assert time.monotonic() - start < timeout_s + stretched(1.0)
    elif comm.rank == 0:
        comm.recv(source=LAST)  # what the last rank has told the first
    comm.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=3)
def test_first_rank_that_comes_late_is_not_taken_for_the_one_that_never_comes(device: str) -> None:
    limit_s = stretched(1.0)
    with impatient_without(LAST, device, timeout_s=limit_s) as (impatient, others):
        if others:
            if WORLD.rank == 0:
                time.sleep(limit_s / 2)
            text = f"rank {LAST} did not arrive within {limit_s:g} s"
            with raises_everywhere(others, CollectiveTimeoutError, match=text):
                impatient.zeros(3)


# It has sent nothing yet, or is gone before it sends a descriptor, or the others may have completed its exchange.
STAGES = {
    "allocate": ALLOCATE["allocate"],
    "swap": attribute(FdExchange, "swap"),
    "exchange": attribute(agreement, "wait_until"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_rank_that_is_interrupted_is_missed_by_the_others_in_time(
    own_comm: mpicomm.Communicator, device: str, stage: str
) -> None:
    device = "cpu" if stage == "swap" else device
    for culprit in FIRST_AND_LAST:
        with impatient_without(culprit, device) as (impatient, others):
            impatient.zeros(3)
            raises: Any = pytest.raises(CollectiveTimeoutError if others else KeyboardInterrupt)
            if others and stage != "swap":
                raises = raises_everywhere(others, CollectiveTimeoutError, match=f"rank {culprit} did not arrive")
            start = time.monotonic()
            with broken(culprit, device, STAGES[stage], KeyboardInterrupt), raises:
                impatient.zeros(4)
            assert time.monotonic() - start < patience_s(device) + stretched(1.0)
            if stage == "exchange" and not others:
                left = f"earlier error .rank {culprit} left in the middle of .*: KeyboardInterrupt"
                require_unusable(impatient, MPI.COMM_SELF, left)
        require_memory_works(own_comm)


@pytest.mark.mpi(min_size=3)
def test_rank_that_is_interrupted_in_free_reaches_no_later_communicator(device: str) -> None:
    """The others have left the communicator to which it still sends; MPI must not give its number to another one."""
    barrier = agreement.Group.barrier

    def interrupted(group: agreement.Group, step: str) -> None:
        barrier(group, step)
        raise KeyboardInterrupt

    for culprit in FIRST_AND_LAST:
        impatient = communicator(device, timeout_s=patience_s(device))
        with without(culprit) as others:
            if not others:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(agreement.Group, "barrier", interrupted)
                    impatient.Free()
            with pytest.raises(PeerError, match=f"rank {culprit}: Free"):
                impatient.Free()
            WORLD.Barrier()
            if others:
                time.sleep(patience_s(device) / 2)  # the other one sends meanwhile
                with communicator(device, MPI.Intracomm(others)) as later:
                    require_memory_works(later)
            else:
                with pytest.raises(CollectiveTimeoutError):
                    impatient.Free()
            impatient.Free()


def test_free_waits_for_ranks_that_wait_in_a_call_which_this_rank_has_not_made() -> None:
    for culprit in FIRST_AND_LAST:
        comm = communicator("cpu", timeout_s=patience_s("cpu"))
        reduce(comm, COUNT)
        if comm.rank == culprit:
            with pytest.raises(InvalidUsageError, match="they must be equal"):
                comm.Allreduce(np.ones(COUNT), np.ones(5), algorithm="one_shot")
        else:
            time.sleep(patience_s("cpu") / 2)  # so the time of the culprit's Free is over first
            with pytest.raises(CollectiveTimeoutError, match=f"Allreduce.*rank {culprit} did not arrive"):
                reduce(comm, COUNT)
        comm.Free()
        WORLD.Barrier()


@pytest.mark.parametrize("name", ["Free", "zeros"])
def test_a_rank_in_another_call_hears_which_call_the_others_have_given_up(name: str) -> None:
    for culprit in FIRST_AND_LAST:
        comm = communicator("cpu", timeout_s=patience_s("cpu"))
        reduce(comm, COUNT)
        if comm.rank == culprit:
            with pytest.raises(CollectiveTimeoutError, match="did not arrive") as excinfo:
                comm.Free() if name == "Free" else comm.zeros(3)
            said = str(excinfo.value)
            if name == "Free":
                assert said.startswith("Free: rank")
                assert f"the ranks have given up an earlier call (Allreduce(float64, count={COUNT}" in said
                assert f"rank {culprit} did not arrive within {patience_s('cpu'):g} s" in said
                assert "call Free on every rank after an error" in said
                assert culprit not in excinfo.value.ranks
            else:
                assert f"is in Allreduce(float64, count={COUNT}" in said or "have given up an earlier call" in said
        else:
            with pytest.raises(CollectiveTimeoutError, match=f"Allreduce.*rank {culprit} did not arrive"):
                reduce(comm, COUNT)
        WORLD.Barrier()
        with suppress(MpicommError):
            comm.Free()
        WORLD.Barrier()


def test_an_error_in_a_with_block_is_the_only_error_of_its_rank() -> None:
    for culprit in FIRST_AND_LAST:
        error, text = (ZeroDivisionError, "zero") if WORLD.rank == culprit else (CollectiveTimeoutError, "^wait_signal")
        with (
            pytest.raises(error, match=text),
            communicator("cpu", timeout_s=patience_s("cpu")) as comm,
        ):
            array = comm.zeros(1)
            if comm.rank == culprit:
                _ = 1 // 0
            time.sleep(patience_s("cpu") * 0.4)  # so the time of the culprit's Free is over first
            array.wait_signal(culprit)
        WORLD.Barrier()


def test_free_tells_a_late_rank_why_the_others_have_left(caplog: pytest.LogCaptureFixture) -> None:
    limit_s, error = stretched(0.2), CollectiveTimeoutError if WORLD.rank else ZeroDivisionError
    with (
        caplog.at_level("WARNING", "mpicomm"),
        pytest.raises(error) as excinfo,
        communicator("cpu", timeout_s=limit_s) as comm,
    ):
        comm.zeros(1)
        if comm.rank == 0:
            _ = 1 // 0
        time.sleep(5 * limit_s)
    late = list(range(1, WORLD.size))
    said = f"{name_ranks(late)} did not arrive within {limit_s:g} s: rank 0 left its with block by ZeroDivisionError: "
    assert said in (str(excinfo.value) if WORLD.rank else caplog.text)
    assert (f"; this is rank {WORLD.rank}, which came later" in str(excinfo.value)) == (WORLD.rank > 0)
    WORLD.Barrier()
