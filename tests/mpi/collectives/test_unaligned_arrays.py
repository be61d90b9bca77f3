"""Unaligned NumPy arrays on one rank, and aligned arrays on the others. mpi4py has no type for the format of the first.

Plain mpi4py makes the same calls on aligned arrays. Without a type in the argument it refuses unaligned arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS, Operation
from tests.helpers.rigs.call_forms import FORMS, complete, method_name

COUNTS = (3, 30_000)  # also beyond the sizes that go to MPI at once
DTYPES = ("f", "d", "h", "F", "e")


def unaligned(content: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array at an odd address."""
    array = np.frombuffer(bytearray(content.nbytes + 1), content.dtype, content.size, 1)
    array[:] = content
    assert not array.flags.aligned
    return array


def arguments(row: Operation, rank: int, size: int, count: int, dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arrays of a call, and its other arguments."""
    blocks = {"one": count, "blocks": count * size, "vector": count * size, "counted": count * size}
    rng = np.random.default_rng((rank, count))
    sent, received = (rng.integers(-9, 9, blocks[shape]).astype(dtype) for shape in (row.send, row.receive))
    given: list[Any] = [received] if row.rooted == "bcast" else [sent, received]
    if row.rooted in ("send", "receive") and rank:
        given[0 if row.rooted == "send" else 1] = None
    return given, {"recvcounts": [count] * size} if row.send == "counted" else {}


def with_lists(given: Sequence[Any], row: Operation, size: int, count: int) -> list[Any]:
    """Return the arrays in lists with counts and without types."""
    shapes = [row.receive] if row.rooted == "bcast" else [row.send, row.receive]
    forms: dict[str, Any] = {"vector": ([count] * size, None), "blocks": count, "one": count, "counted": count * size}
    return [None if each is None else [each, forms[shape]] for each, shape in zip(given, shapes, strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if row.send != "typed"])
def test_unaligned_arrays_on_one_rank(host_comm: mpicomm.Communicator, name: str, form: str) -> None:
    row, everybody = OPERATIONS[name], range(host_comm.size)
    pair: tuple[Any, Any] = host_comm, MPI.Intracomm(MPI.COMM_WORLD)
    if row.of_neighbors:
        pair = tuple(each.Create_dist_graph_adjacent(everybody, everybody) for each in pair)
    comm, plain = pair
    failures = []
    for count in COUNTS:
        for dtype in DTYPES:
            if dtype == "e" and row.reduces:
                continue  # plain mpi4py lacks these sums, and MPI as well in some forms
            expected, more = arguments(row, comm.rank, comm.size, count, dtype)
            types = [[each.view("i2"), MPI.INT16_T] if dtype == "e" and each is not None else each for each in expected]
            getattr(plain, name)(*types, **more)
            for in_lists in (False, True):
                given, _ = arguments(row, comm.rank, comm.size, count, dtype)
                if comm.rank == comm.size - 1:
                    given = [None if each is None else unaligned(each) for each in given]
                passed = with_lists(given, row, comm.size, count) if in_lists else given
                failure = ""
                try:
                    complete(getattr(comm, method_name(form, name))(*passed, **more))
                    for got, wanted in zip(given, expected, strict=True):
                        assert got is None or np.array_equal(got, wanted)
                except Exception as error:
                    failure = f"{count} {dtype} {in_lists}: {type(error).__name__}: {error}"
                failures += [each for each in plain.allgather(failure) if each]
    if row.of_neighbors:
        comm.Free()
        plain.Free()
    assert not failures


def test_unaligned_arrays_in_messages(host_comm: mpicomm.Communicator) -> None:
    right, left = (host_comm.rank + 1) % host_comm.size, (host_comm.rank - 1) % host_comm.size
    for count in COUNTS:
        sent, received = unaligned(np.full(count, host_comm.rank, "f")), unaligned(np.zeros(count, "f"))
        host_comm.Sendrecv(sent, right, 1, received, left, 1)
        assert (received == left).all()
        again = unaligned(np.zeros(count, "f"))
        requests = [host_comm.Irecv(again, left, 2), host_comm.Isend(sent, right, 2)]
        MPI.Request.Waitall(requests)
        assert (again == left).all()
