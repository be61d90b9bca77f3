"""Communicators with reductions="ordered": all ranks have the bits of rank order, also of small host arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.references.reductions import reduced, require_same

SIZES = (1, 5, 1000)


@pytest.fixture(params=["argument", "environment", "child"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpicomm.Communicator]:
    how: dict[str, Any] = {} if request.param == "environment" else {"reductions": "ordered"}
    if request.param == "environment":
        monkeypatch.setenv("MPICOMM_REDUCTIONS", "ordered")
    with mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", **how) as comm:
        assert comm.describe().reductions == "ordered"
        if request.param != "child":
            yield comm
            return
        with comm.Dup() as child:
            yield child


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_ranks_have_the_bits_of_rank_order(ordered: mpicomm.Communicator, op: str) -> None:
    size, rank, mpi_op = ordered.size, ordered.rank, getattr(MPI, op.upper())
    for count in SIZES:
        parts = [np.random.default_rng(peer).standard_normal(count) * 10.0**peer for peer in range(size)]
        for peer, part in enumerate(parts):
            part[peer::size] = np.nan if op != "sum" else 1e-17
        for method in ("Allreduce", "Reduce", "Scan"):
            expected = reduced(op, parts[: rank + 1] if method == "Scan" else parts)
            for form in OPERATIONS[method].methods:
                received = np.zeros(count)
                request = getattr(ordered, form)(parts[rank], received, mpi_op)
                if form.endswith("_init"):
                    request.Start()
                if request is not None:
                    request.Wait()
                if method != "Reduce" or rank == 0:
                    require_same(received, expected)
                if form.endswith("_init"):
                    request.Free()


def test_what_only_mpi_has_goes_to_mpi(ordered: mpicomm.Communicator) -> None:
    pair = np.zeros(1, np.dtype([("value", "f8"), ("rank", "i4")], align=True))
    pair["value"], pair["rank"] = ordered.rank, ordered.rank
    found = np.zeros_like(pair)
    ordered.Allreduce([pair, 1, MPI.DOUBLE_INT], [found, 1, MPI.DOUBLE_INT], MPI.MAXLOC)
    assert found["rank"] == ordered.size - 1


def test_other_words_are_an_error_on_all_ranks(comm_world: MPI.Intracomm) -> None:
    with pytest.raises(InvalidUsageError, match="reductions='fast': use auto"):
        mpicomm.Communicator(comm_world, device="cpu", reductions="fast" if comm_world.rank == 0 else "auto")
