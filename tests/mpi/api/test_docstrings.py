"""The examples in the docstrings of a Communicator's methods run on all ranks."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm import Communicator
from mpicomm.api.communicator import CartCommunicator
from mpicomm.collectives.operations import OPERATIONS

MOST_USED = {*OPERATIONS, "Allreduce_init", "Barrier", "Iallreduce", "Recv", "Send", "Sendrecv", "Split", "zeros"}

CLASSES = (Communicator, mpicomm.Experts, mpicomm.SymmetricArray, mpicomm.Win)


def examples() -> Iterator[tuple[str, str]]:
    methods = inspect.getmembers(CartCommunicator, inspect.isfunction)
    for name, documented in [*methods, *((cls.__name__, cls) for cls in CLASSES)]:
        for block in re.findall(r"(?:^    .*\n?)+", inspect.getdoc(documented) or "", re.MULTILINE):
            yield name, textwrap.dedent(block)


def test_the_most_used_methods_have_examples_and_all_examples_run(host_comm: Communicator) -> None:
    missing = {*MOST_USED}
    for name, source in examples():
        missing.discard(name)
        assert name in source or name == "SymmetricArray"
        code = compile(source, f"the example of {name}", "exec")
        exec(code, {"comm": host_comm, "cp": np, "mpicomm": mpicomm, "MPI": MPI})
    assert not missing
