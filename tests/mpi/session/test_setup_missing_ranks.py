"""A rank does not come to a set-up, or leaves in the middle: the others name it in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, MpicommError, PeerError
from mpicomm.cluster import agreement as bootstrap
from mpicomm.sharing.fd_exchange import FdExchange
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.faults.setup_failures import ALLOCATE, EVERY_RANK, FIRST_AND_LAST, WORLD, attribute, broken, raising
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator, patience_s, require_memory_works

Call = Callable[[mpicomm.Communicator, mpicomm.SymmetricArray], object]
CALLS: dict[str, Call] = {
    "zeros": lambda comm, array: comm.zeros(3),
    "shared_event": lambda comm, array: comm.shared_event(),
    "SymmetricArray 0: close": lambda comm, array: array.close(),
    "Free": lambda comm, array: comm.Free(),
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


@pytest.mark.mpi(min_size=3)
def test_two_ranks_that_never_come_cost_one_deadline() -> None:
    """The last rank has found one rank missing in an inner exchange, and the first rank does not come either."""
    comm, timeout_s, last = WORLD.Dup(), stretched(0.3), WORLD.size - 1

    def find_a_rank_missing() -> None:
        time.sleep(timeout_s)
        raise CollectiveTimeoutError("inner: rank 1 did not arrive", ranks=(1,))

    if comm.rank == last:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 0 did not arrive"):
            bootstrap.Group(comm, range(comm.size), timeout_s).agree("outer", find_a_rank_missing)
        assert time.monotonic() - start < timeout_s + stretched(1.0)
    elif comm.rank == 0:
        comm.recv(source=last)  # what the last rank has told the first
    comm.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CALLS)
def test_rank_that_never_comes_is_named(own_comm: mpicomm.Communicator, device: str, name: str) -> None:
    require_memory_works(own_comm)
    for culprit in FIRST_AND_LAST if name != "zeros" else EVERY_RANK:
        with nothing_leaks():
            impatient = communicator(device, timeout_s=patience_s(device))
            array = impatient.zeros(3)
            with without(culprit) as others:
                if others:
                    text = f"{name}.*: rank {culprit} did not arrive within {patience_s(device):g} s"
                    with raises_everywhere(others, CollectiveTimeoutError, match=text) as excinfo:
                        CALLS[name](impatient, array)
                    assert excinfo.value.ranks == (culprit,)
                    del excinfo
                    if name != "Free":
                        require_unusable(impatient, others, f"earlier timeout .*rank {culprit} did not arrive")
                    impatient.Free()
                    assert array.closed
                    impatient.Free()
            # A rank that comes late gets the same error.
            if WORLD.rank == culprit:
                with pytest.raises(MpicommError, match=name):
                    impatient.Free()
                while not array.closed:
                    with suppress(MpicommError):
                        impatient.Free()
                impatient.Free()
            require_memory_works(own_comm)
            del array, impatient


def require_unusable(comm: mpicomm.Communicator, ranks: MPI.Comm, text: str) -> None:
    for call in (comm.check, lambda: comm.zeros(3), comm.shared_event):
        with raises_everywhere(ranks, MpicommError, match=f"unusable since an {text}"):
            call()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["zeros", "empty"])
def test_the_first_array_of_a_communicator_names_its_call(name: str) -> None:
    culprit, limit_s = WORLD.size - 1, patience_s("cpu")
    with impatient_without(culprit, "cpu") as (impatient, others):
        if others:
            text = f"^{name}: .*rank {culprit} did not arrive within {limit_s:g} s: let every rank make this call$"
            with raises_everywhere(others, CollectiveTimeoutError, match=text):
                getattr(impatient, name)(3)


@pytest.mark.mpi(min_size=3)
def test_first_rank_that_comes_late_is_not_taken_for_the_one_that_never_comes(device: str) -> None:
    limit_s = stretched(1.0)
    with impatient_without(WORLD.size - 1, device, timeout_s=limit_s) as (impatient, others):
        if others:
            if WORLD.rank == 0:
                time.sleep(limit_s / 2)
            text = f"rank {WORLD.size - 1} did not arrive within {limit_s:g} s"
            with raises_everywhere(others, CollectiveTimeoutError, match=text):
                impatient.zeros(3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", ["allocate", "swap"])
def test_rank_that_is_interrupted_is_missed_by_the_others_in_time(
    own_comm: mpicomm.Communicator, device: str, stage: str
) -> None:
    """It has sent nothing yet, or is gone before it sends a descriptor, for which its peers wait."""
    if stage == "swap":
        device = "cpu"
    break_ = ALLOCATE["allocate"] if stage == "allocate" else attribute(FdExchange, "swap")
    for culprit in FIRST_AND_LAST:
        with impatient_without(culprit, device) as (impatient, others):
            impatient.zeros(3)
            raises: Any = pytest.raises(CollectiveTimeoutError if others else KeyboardInterrupt)
            if others and stage == "allocate":
                raises = raises_everywhere(others, CollectiveTimeoutError, match=f"rank {culprit} did not arrive")
            start = time.monotonic()
            with broken(culprit, device, break_, KeyboardInterrupt), raises:
                impatient.zeros(4)
            assert time.monotonic() - start < patience_s(device) + stretched(1.0)
        require_memory_works(own_comm)


@pytest.mark.mpi(min_size=2)
def test_rank_that_is_interrupted_in_an_exchange_takes_part_in_no_other(device: str) -> None:
    for culprit in FIRST_AND_LAST:
        impatient = communicator(device, timeout_s=patience_s(device))
        with without(culprit) as others:
            if others:
                # They may have completed the exchange that it left.
                with raises_everywhere(others, CollectiveTimeoutError, match=f"rank {culprit} did not arrive"):
                    impatient.zeros(3)
                impatient.Free()
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bootstrap, "wait_until", raising(KeyboardInterrupt))
                    with pytest.raises(KeyboardInterrupt):
                        impatient.zeros(3)
                text = f"earlier error .rank {culprit} left in the middle of .*: KeyboardInterrupt"
                require_unusable(impatient, MPI.COMM_SELF, text)
                impatient.Free()


@pytest.mark.mpi(min_size=3)
def test_rank_that_is_interrupted_in_free_reaches_no_later_communicator(device: str) -> None:
    """The others have left the communicator to which it still sends; MPI must not give its number to another one."""
    for culprit in FIRST_AND_LAST:
        impatient = communicator(device, timeout_s=patience_s(device))
        barrier = bootstrap.Group.barrier

        def interrupted(group: bootstrap.Group, step: str, barrier: Callable[..., None] = barrier) -> None:
            barrier(group, step)
            raise KeyboardInterrupt

        with without(culprit) as others:
            if others:
                with pytest.raises(PeerError, match=f"rank {culprit}: Free"):
                    impatient.Free()
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bootstrap.Group, "barrier", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        impatient.Free()
                with pytest.raises(PeerError, match=f"rank {culprit}: Free"):
                    impatient.Free()
            WORLD.Barrier()
            if others:
                time.sleep(patience_s(device) / 2)  # the other one sends meanwhile
                with communicator(device, MPI.Intracomm(others)) as later:
                    require_memory_works(later)
                impatient.Free()
            else:
                with pytest.raises(CollectiveTimeoutError):
                    impatient.Free()
                impatient.Free()


@pytest.mark.mpi(min_size=3)
def test_all_ranks_that_never_come_are_named_by_the_first_rank(comm_world: MPI.Intracomm) -> None:
    parent = comm_world.Dup()
    if comm_world.rank == 0:
        with pytest.raises(CollectiveTimeoutError) as excinfo:
            mpicomm.Communicator(parent, device="cpu", timeout_s=patience_s("cpu"))
        assert excinfo.value.ranks == tuple(range(1, comm_world.size))
    comm_world.Barrier()


@pytest.mark.mpi(min_size=2)
def test_rank_that_comes_late_to_create_a_communicator_raises_too_and_the_parent_stays_usable(
    comm_world: MPI.Intracomm,
) -> None:
    for culprit in FIRST_AND_LAST:
        parent = comm_world.Dup()
        # The messages of the user may have any source and tag.
        anything = np.zeros(1)
        receive = parent.Irecv(anything)
        with without(culprit) as others:
            if others:
                with pytest.raises(CollectiveTimeoutError, match=f"rank {culprit} did not arrive"):
                    mpicomm.Communicator(parent, device="cpu", timeout_s=patience_s("cpu"))
        if comm_world.rank == culprit:
            with pytest.raises(CollectiveTimeoutError, match=f"Communicator: rank {culprit} did not arrive"):
                mpicomm.Communicator(parent, device="cpu", timeout_s=patience_s("cpu"))
        with mpicomm.Communicator(parent, device="cpu") as comm:
            require_memory_works(comm)
        parent.Send(np.ones(1), (parent.rank + 1) % parent.size)
        receive.Wait()
        assert anything[0] == 1
        parent.Free()
