"""Collectives of neighbours: the same result as MPI's own on host arrays, on whatever device the arrays are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, PeerError
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import (
    CALLS,
    TOPOLOGIES,
    NeighborCall,
    array_module,
    communicator,
    fails_in_open_mpi,
    result_of_mpi,
    to_host,
)

TURNS = 3


@pytest.fixture(scope="module", params=TOPOLOGIES)
def made(request: pytest.FixtureRequest, comm: mpicomm.Communicator) -> Iterator[Any]:
    """A Communicator with a topology."""
    made = TOPOLOGIES[request.param](comm)
    assert isinstance(made, mpicomm.Communicator)
    yield made
    made.Free()


def calls(made: Any) -> Iterator[NeighborCall]:
    for name in CALLS:
        # Open MPI 5.0.11 fails in it where a rank receives from no neighbour, or sends to none.
        if not fails_in_open_mpi(made, name):
            call = NeighborCall(name, made)
            yield call
            call.free()


def check(made: Any, call: NeighborCall, turn: int, sent: Any, received: Any) -> None:
    """Compare with MPI's blocking call on host arrays."""
    made.check()
    np.testing.assert_array_equal(to_host(received), result_of_mpi(made, call, turn))
    np.testing.assert_array_equal(to_host(sent), call.sent(turn))


def test_results(made: Any, xp: Any) -> None:
    for call in calls(made):
        for form in ("Neighbor_{}", "Ineighbor_{}", "Neighbor_{}_init"):
            sent, received = xp.asarray(call.sent(0)), xp.asarray(call.nothing())
            begin = functools.partial(getattr(made, form.format(call.name)), *call.arguments(sent, received))
            prepared = begin() if form.endswith("_init") else None
            for turn in range(TURNS):
                sent[...], received[...] = xp.asarray(call.sent(turn)), -1
                complete_one(begin() if prepared is None else prepared)
                check(made, call, turn, sent, received)
            if prepared is not None:
                prepared.Free()
        send, receive = call.arguments(sent, received)
        received[...] = -1
        getattr(made, f"Neighbor_{call.name}")(sendbuf=send, recvbuf=receive, algorithm="mpi")
        check(made, call, TURNS - 1, sent, received)


def complete_one(request: MPI.Request | None) -> None:
    if isinstance(request, MPI.Prequest):
        request.Start()
    if request is not None:
        request.Wait()


def test_blocks_cross_in_every_form_of_a_buffer(comm: mpicomm.Communicator) -> None:
    """In a ring of 1 or 2 ranks both neighbours are one rank, and some MPIs would not cross its blocks."""
    ring: Any = comm.Create_cart([comm.size], [True])
    left, right = ring.Shift(0, 1)
    pair = MPI.INT.Create_vector(2, 1, 2).Create_resized(0, 4).Commit()
    forms: list[tuple[Any, Callable[[Any], list[Any]]]] = [
        ("int32", lambda array: [array, (2, 2), MPI.INT]),
        ("float32", lambda array: [array[2:], 2]),
        (dtype_or_skip("bfloat16"), lambda array: [array[2:], 2, "bfloat16"]),
        ("int32", lambda array: [array[2:], 1, pair]),
    ]
    for start in (ring.Ineighbor_alltoall, ring.Neighbor_alltoall_init):
        for dtype, form in forms:
            sent = np.array([-1, -1, *(10 * ring.rank + n for n in range(4))], dtype)
            received = np.zeros_like(sent)
            complete_one(start(form(sent), form(received)))
            blocks = ([0, 2], [1, 3]) if form(sent)[-1] is pair else ([0, 1], [2, 3])
            expected = np.zeros(6)
            expected[2:][blocks[0]] = np.array(blocks[1]) + 10 * left
            expected[2:][blocks[1]] = np.array(blocks[0]) + 10 * right
            assert received.astype(float).tolist() == expected.tolist(), (start, dtype)
    pair.Free()
    ring.Free()


@pytest.mark.gpu_alone  # graphs are a GPU's
def test_in_a_graph(made: Any, xp: Any) -> None:
    stream = xp.cuda.Stream(non_blocking=True)
    made.Allreduce(xp.zeros(1), xp.zeros(1))  # a communicator sets itself up outside of captures
    for call in calls(made):
        sent, received = xp.asarray(call.sent(0)), xp.asarray(call.nothing())
        collective = getattr(made, f"Neighbor_{call.name}")
        xp.cuda.get_current_stream().synchronize()
        with stream:
            for known in (False, True):  # the first call of these arrays is in the first capture
                stream.begin_capture()
                collective(*call.arguments(sent, received))
                graph = stream.end_capture()
                for turn in range(TURNS):
                    sent[...], received[...] = xp.asarray(call.sent(turn)), -1
                    graph.launch(stream)
                    made.check(stream)
                    check(made, call, turn, sent, received)
                if not known:
                    collective(*call.arguments(sent, received))
                    stream.synchronize()


def test_large_blocks(comm: mpicomm.Communicator, xp: Any) -> None:
    """Larger than the inboxes of the arena; some neighbours send more than others."""
    ring: Any = comm.Create_cart([comm.size], [True])
    counts = [1_000_000 * (rank % 2 + 1) + 7 for rank in range(comm.size)]
    receives = [counts[rank] for rank in ring.Shift(0, 1)]
    for turn in range(TURNS):
        sent = np.arange(2 * counts[ring.rank]) + 10_000_000 * (10 * ring.rank + turn)
        received, of_mpi = xp.zeros(sum(receives), np.int64), np.zeros(sum(receives), np.int64)
        ring.Neighbor_alltoallv([xp.asarray(sent), counts[ring.rank]], [received, receives])
        ring.check()
        MPI.Topocomm.Neighbor_alltoallv(ring, [sent, [counts[ring.rank]] * 2], [of_mpi, receives])
        np.testing.assert_array_equal(to_host(received), of_mpi)
    ring.Free()


def test_among_other_collectives_on_a_stream(comm: mpicomm.Communicator, xp: Any) -> None:
    ring: Any = comm.Create_cart([comm.size], [True])
    stream = None if xp is np else xp.cuda.Stream(non_blocking=True)
    values = np.arange(comm.size) + 1
    with contextlib.nullcontext() if stream is None else stream:
        value, both, total = xp.full(1, ring.rank + 1), xp.zeros(2, np.int64), xp.zeros(1, np.int64)
        for _ in range(20):
            ring.Neighbor_allgather(value, both, stream=stream)
            ring.Allreduce(value, total, stream=stream)
            value[...] = (both[:1] + 2 * both[1:] + total) % 1009
            values = (np.roll(values, 1) + 2 * np.roll(values, -1) + values.sum()) % 1009
        ring.check(stream)
        assert to_host(value)[0] == values[ring.rank]
    ring.Free()


@pytest.mark.gpu_alone  # MPI looks at the lengths of host arrays
@pytest.mark.mpi(min_size=2)
def test_two_neighbours_that_disagree_on_counts_are_told(device: str) -> None:
    for expected in (1, 3, 1_000_000):
        with communicator(device, timeout_s=stretched(10.0)) as comm, array_module(comm) as xp:
            graph: Any = comm.Create_dist_graph_adjacent([(comm.rank - 1) % comm.size], [(comm.rank + 1) % comm.size])
            sent, total = xp.zeros(2), xp.zeros(1)
            received = xp.full(2 if graph.rank else expected, -1.0)
            with pytest.raises(PeerError, match=r"rank . sent data of another call|sends 16 bytes, but"):
                graph.Neighbor_alltoall(sent, received)
                graph.check()
                graph.Allreduce(sent[:1], total)  # a rank that had nothing to wait for is told at its next call
                graph.check()
            assert (to_host(received)[2:] == -1).all()  # beyond the data of the neighbour
            graph.Free()


@pytest.mark.gpu_alone  # MPI looks at the lengths of host arrays
@pytest.mark.mpi(min_size=2)
def test_no_gap_changes_if_neighbours_disagree(device: str) -> None:
    with communicator(device, timeout_s=stretched(10.0)) as comm, array_module(comm) as xp:
        graph: Any = comm.Create_dist_graph_adjacent([(comm.rank - 1) % comm.size], [(comm.rank + 1) % comm.size])
        short, long = (MPI.INT32_T.Create_vector(rows, 1, 2).Commit() for rows in (500, 600))
        sent, received, total = xp.zeros(1200, np.int32), xp.full(1200, -1, np.int32), xp.zeros(1, np.int32)
        expected = long if graph.rank == 0 else short
        with pytest.raises(PeerError):
            graph.Neighbor_alltoallw([sent, ([1], [0]), [short]], [received, ([1], [0]), [expected]])
            graph.check()
            graph.Allreduce(sent[:1], total)
            graph.check()
        if graph.rank == 0:
            assert (to_host(received)[1::2] == -1).all()  # kernels write the elements as they come
        graph.Free()
        short.Free()
        long.Free()


@pytest.mark.gpu_alone  # waits inside MPI have no limit
@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_is_named(device: str) -> None:
    with communicator(device, timeout_s=stretched(1.0)) as comm, array_module(comm) as xp:
        ring: Any = comm.Create_cart([comm.size], [True])
        one, both = xp.zeros(1), xp.zeros(2)
        ring.Neighbor_allgather(one, both)
        ring.check()
        # Only the neighbours of rank 0 wait for it.
        waits = ring.rank in (1, ring.size - 1)
        raises: Any = pytest.raises(CollectiveTimeoutError, match="rank 0") if waits else contextlib.nullcontext()
        with raises:
            if ring.rank:
                ring.Neighbor_allgather(one, both)
                ring.check()
        MPI.COMM_WORLD.Barrier()
        ring.Free()


def test_refusals(comm: mpicomm.Communicator, xp: Any) -> None:
    ring: Any = comm.Create_cart([comm.size], [True])
    array, other = xp.zeros(4), xp.zeros(4)
    for form in ("Neighbor_alltoall", "Ineighbor_alltoall", "Neighbor_alltoall_init"):
        method = getattr(ring, form)
        with pytest.raises(InvalidUsageError, match=r"MPI\.IN_PLACE: neighbours exchange no data in place"):
            method(MPI.IN_PLACE, other)
        with pytest.raises(TypeError, match="sendbuf is None: pass a buffer"):
            method(None, other)
        with pytest.raises(InvalidUsageError, match="two_shot"):
            method(array, other, algorithm="two_shot")
    if xp is np:
        with pytest.raises(InvalidUsageError, match="is for device arrays, and MPI carries it out on host arrays"):
            ring.Neighbor_alltoall(array, other, algorithm="one_shot")
        with pytest.raises(InvalidUsageError, match="stream"):
            ring.Neighbor_alltoall(array, other, stream=1)
    ring.Free()
