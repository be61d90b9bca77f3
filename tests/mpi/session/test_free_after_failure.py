"""A rank fails and lives: `Free` waits for it while it is in another call, and else says why it fails."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, MpicommError
from mpicomm.errors import name_ranks
from tests.helpers.faults.setup_failures import FIRST_AND_LAST, WORLD

TIMEOUT_S = 0.5
COUNT = 100_000


@pytest.mark.mpi(min_size=2)
def test_free_waits_for_ranks_that_wait_in_a_call_which_this_rank_has_not_made(comm_world: MPI.Intracomm) -> None:
    for culprit in FIRST_AND_LAST:
        comm = mpicomm.Communicator(comm_world, device="cpu", timeout_s=TIMEOUT_S)
        send, receive = np.ones(COUNT), np.zeros(COUNT)
        comm.Allreduce(send, receive, algorithm="one_shot")
        if comm.rank == culprit:
            with pytest.raises(InvalidUsageError, match="they must be equal"):
                comm.Allreduce(send, receive[:5], algorithm="one_shot")
        else:
            time.sleep(TIMEOUT_S / 2)  # so the time of the culprit's Free is over first
            with pytest.raises(CollectiveTimeoutError, match=f"Allreduce.*rank {culprit} did not arrive"):
                comm.Allreduce(send, receive, algorithm="one_shot")
        comm.Free()
        assert comm == MPI.COMM_NULL
        WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_an_error_in_a_with_block_is_the_only_error_of_its_rank(comm_world: MPI.Intracomm) -> None:
    for culprit in FIRST_AND_LAST:
        error, text = (ZeroDivisionError, "zero") if WORLD.rank == culprit else (CollectiveTimeoutError, "^wait_signal")
        with pytest.raises(error, match=text), mpicomm.Communicator(comm_world, device="cpu", timeout_s=0.5) as comm:
            array = comm.zeros(1)
            if comm.rank == culprit:
                _ = 1 // 0
            time.sleep(0.2)  # so the time of the culprit's Free is over first
            array.wait_signal(culprit)
        WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_free_tells_a_late_rank_why_the_others_have_left(
    comm_world: MPI.Intracomm, caplog: pytest.LogCaptureFixture
) -> None:
    limit_s, error = 0.2, CollectiveTimeoutError if WORLD.rank else ZeroDivisionError
    with (
        caplog.at_level("WARNING", "mpicomm"),
        pytest.raises(error) as excinfo,
        mpicomm.Communicator(comm_world, device="cpu", timeout_s=limit_s) as comm,
    ):
        comm.zeros(1)
        if comm.rank == 0:
            _ = 1 // 0
        time.sleep(5 * limit_s)
    late = list(range(1, WORLD.size))
    said = f"{name_ranks(late)} did not arrive within 0.2 s: rank 0 left its with block by ZeroDivisionError: "
    assert said in (str(excinfo.value) if WORLD.rank else caplog.text)
    assert (f"; this is rank {WORLD.rank}, which came later" in str(excinfo.value)) == (WORLD.rank > 0)
    WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_free_says_which_error_a_rank_had_that_does_not_call_it(comm_world: MPI.Intracomm) -> None:
    for culprit in FIRST_AND_LAST:
        comm = mpicomm.Communicator(comm_world, device="cpu", timeout_s=TIMEOUT_S)
        send, receive = np.ones(COUNT), np.zeros(COUNT)
        comm.Allreduce(send, receive, algorithm="one_shot")
        if comm.rank == culprit:
            with pytest.raises(CollectiveTimeoutError) as excinfo:
                comm.Free()
            assert str(excinfo.value).startswith("Free: rank")
            assert f"the ranks have given up an earlier call (Allreduce(float64, count={COUNT}" in str(excinfo.value)
            assert f"rank {culprit} did not arrive within {TIMEOUT_S} s" in str(excinfo.value)
            assert "call Free on every rank after an error" in str(excinfo.value)
            assert culprit not in excinfo.value.ranks
        else:
            with pytest.raises(CollectiveTimeoutError, match=f"Allreduce.*rank {culprit} did not arrive"):
                comm.Allreduce(send, receive, algorithm="one_shot")
        WORLD.Barrier()
        if comm.rank != culprit:
            with pytest.raises(CollectiveTimeoutError, match=r"the ranks have given up|rank .* did not arrive"):
                comm.Free()
        WORLD.Barrier()
        with suppress(MpicommError):
            comm.Free()


@pytest.mark.mpi(min_size=2)
def test_set_up_says_that_a_rank_is_in_another_call(comm_world: MPI.Intracomm) -> None:
    for culprit in FIRST_AND_LAST:
        comm = mpicomm.Communicator(comm_world, device="cpu", timeout_s=TIMEOUT_S)
        send, receive = np.ones(COUNT), np.zeros(COUNT)
        comm.Allreduce(send, receive, algorithm="one_shot")
        if comm.rank == culprit:
            text = r"did not arrive.*(is in Allreduce\(float64, count=100000|have given up an earlier call)"
            with pytest.raises(CollectiveTimeoutError, match=text):
                comm.zeros(3)
        else:
            with pytest.raises(CollectiveTimeoutError, match=f"Allreduce.*rank {culprit} did not arrive"):
                comm.Allreduce(send, receive, algorithm="one_shot")
        WORLD.Barrier()
        with suppress(MpicommError):
            comm.Free()
