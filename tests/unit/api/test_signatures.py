"""The collective methods of a Communicator have mpi4py's arguments, in mpi4py's order, and mpicomm's by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.api.communicator import DistGraphCommunicator
from mpicomm.collectives.operations import OPERATIONS, Operation

METHODS = [pytest.param(row, name, id=name) for row in OPERATIONS.values() for name in row.methods]


def positional(method: Callable[..., Any]) -> list[tuple[str, object]]:
    """Names and defaults of the arguments that may be passed by position."""
    parameters = inspect.signature(method).parameters.values()
    return [(each.name, each.default) for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(("row", "name"), METHODS)
def test_the_arguments_are_mpi4pys(row: Operation, name: str) -> None:
    assert positional(getattr(DistGraphCommunicator, name)) == positional(getattr(row.mpi_class, name))


@pytest.mark.parametrize(("row", "name"), METHODS)
def test_stream_and_algorithm_are_passed_by_name(row: Operation, name: str) -> None:
    parameters = inspect.signature(getattr(DistGraphCommunicator, name)).parameters.values()
    by_name = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    expected = {"stream": None, "algorithm": "auto"} | ({"wire_dtype": None} if row.coded else {})
    assert by_name == expected | ({"order": "auto"} if row.tree else {}) | (
        {"epilogue": None} if row.name == "Allreduce" else {}
    )


@pytest.mark.parametrize(("row", "name"), METHODS)
def test_each_method_has_a_docstring_that_names_the_blocking_one(row: Operation, name: str) -> None:
    method = getattr(DistGraphCommunicator, name)
    assert (
        inspect.signature(method).return_annotation == ("None", "MPI.Request", "MPI.Prequest")[row.methods.index(name)]
    )
    assert method.__doc__ and (name == row.name or f"`{row}`" in method.__doc__)


@pytest.mark.parametrize("name", ["send", "ssend"])
def test_objects_are_sent_by_the_names_of_mpi4pys_arguments(name: str) -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        request = comm.irecv(source=0, tag=7)
        getattr(comm, name)(obj=[1, 2], dest=0, tag=7)
        assert request.wait() == [1, 2]
