"""The examples in the docstrings of a Communicator's methods run on all ranks."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import Communicator
from mpicomm.api.communicator import CartCommunicator
from mpicomm.collectives.operations import OPERATIONS

MOST_USED = {*OPERATIONS, "Allreduce_init", "Barrier", "Iallreduce", "Recv", "Send", "Sendrecv", "Split", "zeros"}


def examples() -> Iterator[tuple[str, str]]:
    for name, method in inspect.getmembers(CartCommunicator, inspect.isfunction):
        for block in re.findall(r"(?:^    .*\n?)+", inspect.getdoc(method) or "", re.MULTILINE):
            yield name, textwrap.dedent(block)


EXAMPLES = list(examples())


def test_the_most_used_methods_have_examples() -> None:
    assert {name for name, _ in EXAMPLES} >= MOST_USED


@pytest.mark.parametrize(("name", "source"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_an_example_runs(name: str, source: str, host_comm: Communicator) -> None:
    calls = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert name in calls
    exec(source, {"comm": host_comm, "cp": np, "MPI": MPI})
