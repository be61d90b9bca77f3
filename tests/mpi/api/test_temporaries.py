"""A request keeps the host buffers of its call alive, and lets go of them when it is complete."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS, Operation

N = 5
MESSAGES = ("Isend", "Issend", "Irsend", "Ibsend", "Isendrecv", "Isendrecv_replace")


def _buffer(array: Any, shape: str, size: int) -> Any:
    if shape == "typed":
        return [array, [N] * size, [8 * N * rank for rank in range(size)], [MPI.DOUBLE] * size]
    return [array, [N] * size, None, MPI.DOUBLE] if shape == "vector" else array


def _arrays(row: Operation, size: int) -> tuple[Any, Any]:
    send, receive = (np.ones(N * (1 if shape == "one" else size)) for shape in (row.send, row.receive))
    return send, receive


def _arguments(row: Operation, send: Any, receive: Any, size: int) -> list[Any]:
    if row.rooted == "bcast":
        return [receive]
    given = [_buffer(send, row.send, size), _buffer(receive, row.receive, size)]
    return [*given, [N] * size] if row.send == "counted" else given


@pytest.fixture(scope="module", params=["a Communicator", "an intercommunicator"])
def comm(request: pytest.FixtureRequest, device: str) -> Iterator[Any]:
    with mpicomm.Communicator(device="cpu") as world:
        if request.param == "a Communicator":
            graph = world.Create_dist_graph_adjacent(range(world.size), range(world.size))
            yield graph
            graph.Free()
        elif world.size % 2 or world.size == 1:
            pytest.skip("two groups of one size")
        else:
            half = world.Split(world.rank % 2, world.rank)
            between = half.Create_intercomm(0, world, 1 - world.rank % 2)
            yield between
            between.Free()
            half.Free()


def _held(*arrays: Any) -> list[int]:
    """Return how many references there are to each array."""
    return list(map(sys.getrefcount, arrays))


@pytest.mark.parametrize("name", [*OPERATIONS])
def test_collectives(comm: Any, name: str) -> None:
    row, size = OPERATIONS[name], comm.size
    if not hasattr(comm, name) or (comm.Is_inter() and (row.rooted or name in ("Scan", "Exscan"))):
        pytest.skip("MPI has none of two groups")
    used = (1,) if row.rooted == "bcast" else (0, 1)
    for form in (f"I{name.lower()}", f"{name}_init"):
        arrays = _arrays(row, size)
        free = _held(*arrays)
        request = getattr(comm, form)(*_arguments(row, *arrays, size))
        assert all(_held(*arrays)[index] > free[index] for index in used), form
        if isinstance(request, MPI.Prequest):
            request.Start()
            request.Wait()
            assert all(_held(*arrays)[index] > free[index] for index in used), form
            request.Free()
            del request
        else:
            request.Wait()
        assert _held(*arrays) == free, form


def test_messages(comm: Any) -> None:
    me = comm.rank
    MPI.Attach_buffer(np.empty(1 << 12, np.uint8))
    for name in MESSAGES:
        send, receive = np.ones(N), np.zeros(N)
        free = _held(send, receive)
        if name == "Isendrecv":
            requests = [comm.Isendrecv(send, me, 0, receive, me)]
        elif name == "Isendrecv_replace":
            requests = [comm.Isendrecv_replace(receive, me, source=me)]
        else:
            requests = [comm.Irecv(receive, me), getattr(comm, name)(send, me)]
        held = _held(send, receive)
        assert held[1] > free[1] and (held[0] > free[0] or name.endswith("replace")), name
        MPI.Request.Waitall(requests)
        del requests
        assert _held(send, receive) == free, name
    MPI.Detach_buffer()


@pytest.mark.parametrize("name", ["Iallreduce", "Iscan", "Ireduce_scatter_block", "Iallgatherv"])
def test_buffers_that_a_caller_drops_arrive(comm: Any, name: str) -> None:
    size = comm.size
    if comm.Is_inter() and name == "Iscan":
        pytest.skip("MPI has none of two groups")
    count = N * size if name == "Ireduce_scatter_block" else N
    results = [np.zeros(N * size if name == "Iallgatherv" else N) for _ in range(40)]
    requests = []
    for result in results:
        requests.append(getattr(comm, name)(np.full(count, 3.0) - 1, result))
        np.full(count, -7.0)  # it takes the place of the temporary that is dropped
    MPI.Request.Waitall(requests)
    expected = {"Iscan": 2.0 * (comm.rank + 1), "Iallgatherv": 2.0}.get(name, 2.0 * size)
    assert all((result == expected).all() for result in results)
