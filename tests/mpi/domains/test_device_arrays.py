"""Device arrays between peer domains: graphs, barriers of streams, datatypes and neighbours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module
from tests.helpers.rigs.hosts_by_name import PLACEMENTS, on_hosts

if MPI.COMM_WORLD.size == 1:
    pytest.skip("one rank is one peer domain", allow_module_level=True)


@pytest.fixture(params=PLACEMENTS)
def comm(request: pytest.FixtureRequest, device: str) -> Iterator[mpicomm.Communicator]:
    if device == "cpu":
        pytest.skip("streams are a GPU's, and MPI carries out these calls on host arrays")
    with on_hosts(request.param, device) as comm:
        yield comm


@pytest.fixture
def xp(comm: mpicomm.Communicator) -> Iterator[Any]:
    with array_module(comm) as module:
        yield module


def test_graphs_hold_calls_if_the_engine_takes_no_host(comm: mpicomm.Communicator, xp: Any) -> None:
    send, total = xp.zeros(5000, np.float32), xp.zeros(5000, np.float32)
    blocks, received = xp.zeros(4 * comm.size, np.int32), xp.zeros(4 * comm.size, np.int32)
    stream = xp.cuda.Stream(non_blocking=True)
    for _ in range(2):  # a graph cannot hold the set-up of a first call
        comm.Allreduce(send, total, stream=stream)
        comm.Alltoall(blocks, received, stream=stream)
    comm.check(stream)
    if comm.describe().internode in ("mpi", "pinned"):
        with stream:
            stream.begin_capture()
            with pytest.raises(mpicomm.InvalidUsageError, match="cannot be part of a CUDA graph"):
                comm.Allreduce(send, total)
            stream.end_capture()
        return
    with stream:
        stream.begin_capture()
        comm.Allreduce(send, total)
        comm.Alltoall(blocks, received)
        graph = stream.end_capture()
        for turn in range(20):
            send.fill(turn + comm.rank)
            blocks[:] = xp.repeat(xp.arange(comm.size, dtype=np.int32), 4) * 100 + comm.rank + turn
            graph.launch(stream)
            stream.synchronize()
            assert (total == sum(turn + rank for rank in range(comm.size))).all()
            expected = np.repeat(comm.rank * 100 + np.arange(comm.size) + turn, 4)
            assert received.get().tolist() == expected.tolist()
    comm.check(stream)


def test_a_barrier_holds_the_stream_until_all_have_come(comm: mpicomm.Communicator, xp: Any) -> None:
    stream = xp.cuda.Stream(non_blocking=True)
    comm.Barrier(stream=stream)
    comm.check(stream)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(0.3)
    start = time.monotonic()
    comm.Barrier(stream=stream)
    stream.synchronize()
    assert comm.rank == 0 or time.monotonic() - start > 0.2
    comm.check(stream)


def test_alltoallw_transposes(comm: mpicomm.Communicator, xp: Any) -> None:
    size, rank = comm.size, comm.rank
    whole = np.arange(2 * size * 3 * size, dtype=np.float64).reshape(2 * size, 3 * size)
    sends = [MPI.DOUBLE.Create_subarray([2, 3 * size], [2, 3], [0, 3 * peer]).Commit() for peer in range(size)]
    receives = [MPI.DOUBLE.Create_subarray([2 * size, 3], [2, 3], [2 * peer, 0]).Commit() for peer in range(size)]
    for turn in range(3):
        mine, got = xp.asarray(whole[2 * rank : 2 * rank + 2] + turn), xp.full((2 * size, 3), -1.0)
        comm.Alltoallw([mine, sends], [got, receives])
        comm.check()
        np.testing.assert_array_equal(got.get(), whole[:, 3 * rank : 3 * rank + 3] + turn)
    for datatype in (*sends, *receives):
        datatype.Free()


def test_neighbours(comm: mpicomm.Communicator, xp: Any) -> None:
    grid = comm.Create_cart([comm.size], [True])
    assert isinstance(grid, mpicomm.Communicator)
    for turn in range(3):
        sent = xp.asarray([10 * grid.rank + turn, 10 * grid.rank + turn + 5], np.int64)
        received, expected = xp.zeros(2, np.int64), np.zeros(2, np.int64)
        grid.Neighbor_alltoall(sent, received)
        grid.check()
        MPI.Cartcomm(grid).Neighbor_alltoall(sent.get(), expected)
        assert received.get().tolist() == expected.tolist()
    grid.Free()


def test_counts_that_differ_between_groups_are_an_error(device: str) -> None:
    if device == "cpu":
        pytest.skip("MPI carries out this call on host arrays")
    with on_hosts("in turns", device, timeout_s=stretched(3.0)) as comm, array_module(comm) as xp:
        if comm.describe().internode == "nccl":
            pytest.skip("NCCL does not compare lengths")
        counts = [4 if comm.rank == 0 else 6] * comm.size
        send, received = xp.zeros(sum(counts), np.int32), xp.zeros(sum(counts), np.int32)
        with pytest.raises(mpicomm.MpicommError):
            comm.Alltoallv([send, counts], [received, counts])
            comm.check()
        with contextlib.suppress(mpicomm.CollectiveTimeoutError):  # ranks give up at different times
            comm.Free()


def test_several_domains_refuse_counts_on_the_device_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    x, y = xp.zeros(comm.size, np.float32), xp.zeros(comm.size, np.float32)
    counts, came = xp.ones(comm.size, np.int64), xp.zeros(comm.size, np.int64)
    if not comm.describe().internode:  # few ranks are one peer domain in some placements
        comm.Alltoallv([x, counts], [y, came])
        assert came.get().tolist() == [1] * comm.size
    else:
        with pytest.raises(mpicomm.InvalidUsageError, match="counts on the GPU are for the GPUs of one peer domain"):
            comm.Alltoallv([x, counts], [y, came])
    comm.Alltoallv([x, counts.get()], [y, [1] * comm.size])  # nothing is lost
    comm.check()
