"""The engine of collectives on GPUs: ranks that call different things, or do not come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.signature import Signature
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import communicator
from tests.helpers.rigs.device_engines import Memory, in_place_sum, rig_of


@pytest.fixture
def device_name(device: str) -> str:
    if device == "cpu" or MPI.COMM_WORLD.size == 1:
        pytest.skip("several ranks with GPUs are needed")
    return device


def test_different_calls_are_an_error_on_all_ranks(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=HANG_S)
    with rig_of(comm) as rig:
        memory = Memory(np.ones(1000, np.int64))  # no more memory is set up for it
        name = "Allreduce" if rig.rank == 0 else "Allgather"
        rig.run(in_place_sum(rig, memory, two_shot=False), Signature(name, "int64", 1000, "sum"))
        rig.backend.synchronize()
        with pytest.raises(mpicomm.PeerError, match=r"called different things: rank 0: Allreduce.*rank 1: Allgather"):
            rig.backend.check()
    comm.Free()


def test_different_counts_are_an_error_on_all_ranks(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=20)
    with rig_of(comm) as rig:
        count = 100 if rig.rank == 0 else 300000
        exchanges = in_place_sum(rig, Memory(np.ones(count, np.int64)), two_shot=False)
        with pytest.raises(mpicomm.PeerError, match=r"rank 0: .*count=100, .*rank 1: .*count=300000"):
            # The larger call needs more memory, and notices here that the ranks cannot set it up together.
            rig.run(exchanges, Signature("Allreduce", "int64", count, "sum"))
            rig.backend.synchronize()
            rig.backend.check()
    comm.Free()


def test_a_rank_that_does_not_come_is_named(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=stretched(1.0))
    late = MPI.COMM_WORLD.size - 1
    with rig_of(comm) as rig:
        memory = Memory(np.ones(1000003, np.int64))
        rig.run(in_place_sum(rig, memory, two_shot=True))
        rig.finish()
        MPI.COMM_WORLD.Barrier()
        start = time.monotonic()
        if rig.rank != late:
            rig.run(in_place_sum(rig, memory, two_shot=True))
            rig.backend.synchronize()
            assert time.monotonic() - start < stretched(4.0)
        MPI.COMM_WORLD.Barrier()
        if rig.rank == late:  # it learns at once that the others have given up
            rig.run(in_place_sum(rig, memory, two_shot=True))
            rig.backend.synchronize()
        with raises_naming(late):
            rig.backend.check()
        # The device is free for others.
        start = time.monotonic()
        memory.get()
        assert time.monotonic() - start < stretched(1.0)
    comm.Free()


def test_a_rank_whose_signal_did_not_come_tells_the_others(device_name: str) -> None:
    comm = communicator(device_name, timeout_s=HANG_S)
    with rig_of(comm) as rig:
        memory = Memory(np.ones(1000, np.int64))
        words = Memory(np.zeros(2, np.uint64))
        if rig.rank == 0:
            rig.backend.timeout_ns = 300_000_000
            rig.backend.wait_signal(words.span.pointer, words.span.pointer + 8, 0, rig.stream.ptr)
        rig.run(in_place_sum(rig, memory, two_shot=False))
        rig.backend.synchronize()
        with raises_naming(0):
            rig.backend.check()
        words.get()
    comm.Free()


@contextlib.contextmanager
def raises_naming(late: int) -> Iterator[None]:
    with pytest.raises(mpicomm.CollectiveTimeoutError, match=f"from rank {late} did not come") as info:
        yield
    assert info.value.ranks == (late,)
