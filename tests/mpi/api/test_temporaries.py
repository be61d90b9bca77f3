"""A request keeps the host buffers of its call alive, and lets go of them when it is complete."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS, Operation
from tests.helpers.rigs.call_forms import method_name

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


@pytest.fixture
def comm(host_comm: mpicomm.Communicator) -> Iterator[Any]:
    """A communicator of the host with neighbours."""
    graph = host_comm.Create_dist_graph_adjacent(range(host_comm.size), range(host_comm.size))
    yield graph
    graph.Free()


def _held(*arrays: Any) -> list[int]:
    """Return how many references there are to each array."""
    return list(map(sys.getrefcount, arrays))


def test_collectives(comm: Any) -> None:
    size = comm.size
    for row, form in itertools.product(OPERATIONS.values(), ("I{}", "{}_init")):
        used = (1,) if row.rooted == "bcast" else (0, 1)
        arrays = _arrays(row, size)
        free = _held(*arrays)
        request = getattr(comm, method_name(form, row.name))(*_arguments(row, *arrays, size))
        assert all(_held(*arrays)[index] > free[index] for index in used), (form, row.name)
        if isinstance(request, MPI.Prequest):
            request.Start()
            request.Wait()
            assert all(_held(*arrays)[index] > free[index] for index in used), (form, row.name)
            request.Free()
            del request
        else:
            request.Wait()
        assert _held(*arrays) == free, (form, row.name)


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
