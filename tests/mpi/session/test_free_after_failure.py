"""A rank fails and lives: `Free` waits for it while it is in another call, and else says why it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, MpicommError
from mpicomm.errors import name_ranks
from tests.helpers.faults.setup_failures import FIRST_AND_LAST, WORLD
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module, communicator, patience_s

COUNT = 100_000


@pytest.mark.mpi(min_size=2)
def test_free_waits_for_ranks_that_wait_in_a_call_which_this_rank_has_not_made() -> None:
    for culprit in FIRST_AND_LAST:
        comm = communicator("cpu", timeout_s=patience_s("cpu"))
        send, receive = np.ones(COUNT), np.zeros(COUNT)
        comm.Allreduce(send, receive, algorithm="one_shot")
        if comm.rank == culprit:
            with pytest.raises(InvalidUsageError, match="they must be equal"):
                comm.Allreduce(send, receive[:5], algorithm="one_shot")
        else:
            time.sleep(patience_s("cpu") / 2)  # so the time of the culprit's Free is over first
            with pytest.raises(CollectiveTimeoutError, match=f"Allreduce.*rank {culprit} did not arrive"):
                comm.Allreduce(send, receive, algorithm="one_shot")
        comm.Free()
        WORLD.Barrier()


def reduce(comm: mpicomm.Communicator, array: mpicomm.SymmetricArray, win: Any) -> None:
    with array_module(comm) as xp:
        comm.Allreduce(xp.ones(64, "f4"), xp.empty(64, "f4"), algorithm="one_shot")


CALLS: dict[str, Callable[[mpicomm.Communicator, mpicomm.SymmetricArray, Any], None]] = {
    "Allreduce": reduce,
    "wait_signal": lambda comm, array, win: array.wait_signal(FIRST_AND_LAST[-1]),
    "Fence": lambda comm, array, win: win.Fence(),
    "zeros": lambda comm, array, win: comm.zeros(3).close(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CALLS)
def test_free_waits_for_no_rank_after_a_timeout(device: str, name: str) -> None:
    if (device, name) == ("cpu", "Fence"):
        pytest.skip("windows of the host are MPI's, which waits without a limit")
    comm = communicator(device, timeout_s=patience_s("cpu"))
    array: mpicomm.SymmetricArray = comm.zeros(1)
    win = mpicomm.Win.Allocate(80, 8, comm=comm) if device == "cuda" else None
    reduce(comm, array, win)
    comm.check()
    if comm.rank == FIRST_AND_LAST[-1]:
        WORLD.Barrier()
    else:
        with pytest.raises(CollectiveTimeoutError):
            CALLS[name](comm, array, win)
            comm.check()
        array.close()
        if win is not None:
            win.Free()
        comm.Free()
        WORLD.Barrier()
    with suppress(CollectiveTimeoutError):  # of a rank whose first call this is
        comm.Free()
    WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
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


@pytest.mark.mpi(min_size=2)
def test_free_tells_a_late_rank_why_the_others_have_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["Free", "zeros"])
def test_a_rank_in_another_call_hears_which_call_the_others_have_given_up(name: str) -> None:
    for culprit in FIRST_AND_LAST:
        comm = communicator("cpu", timeout_s=patience_s("cpu"))
        send, receive = np.ones(COUNT), np.zeros(COUNT)
        comm.Allreduce(send, receive, algorithm="one_shot")
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
                comm.Allreduce(send, receive, algorithm="one_shot")
        WORLD.Barrier()
        with suppress(MpicommError):
            comm.Free()
        WORLD.Barrier()
