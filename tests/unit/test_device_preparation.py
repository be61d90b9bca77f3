from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu import preparation as device_preparation
from mpicomm.collectives.gpu.arena import NoStagingError
from mpicomm.collectives.gpu.preparation import prepare
from mpicomm.errors import HandleError, MpicommError, PeerError
from mpicomm.symmetric.registry import Mappings
from tests.helpers.tuning import row, table

TUNING = table(row("Allreduce", 3, (100, "two_shot"), (1000, "copy_engine")))


class Engine:
    """Prepares what is not to fail, and says with which algorithm and how many exchanges."""

    tuning = TUNING

    def __init__(self, **failures: MpicommError) -> None:
        self._failures = failures
        self.tried: list[str] = []

    def prepare(self, exchanges: Sequence[Exchange], *_: Any, algorithm: str) -> Any:
        self.tried.append(algorithm)
        if algorithm in self._failures:
            raise self._failures[algorithm]
        return algorithm, len(exchanges)


def prepared(engine: Engine, count: int = 1000, asked: str = "auto", operation: str = "Allreduce") -> Any:
    array = np.zeros(count, np.float32)
    call = Call(operation, Arguments(array, array.copy(), MPI.SUM), 0, 3)
    return prepare(engine, Mappings(), call, 3, asked, lambda call: None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _unwarned() -> None:
    device_preparation._warn_of_memory.cache_clear()


def test_the_table_decides_and_two_hops_are_two_exchanges() -> None:
    for count, expected in ((2, ("one_shot", 1)), (100, ("two_shot", 2)), (1000, ("copy_engine", 2))):
        assert prepared(Engine(), count) == expected
    assert prepared(Engine(), 1000, "one_shot") == ("one_shot", 1)
    # All goes to the root: what another rank reduces it could not store for copy engines to send on.
    assert prepared(Engine(), 1000, "copy_engine", "Reduce") == ("copy_engine", 1)
    assert prepared(Engine(), 1000, "chain", "Reduce") == ("chain", 3)  # two hops to the last rank, one to the first


def test_without_memory_for_copy_engines_another_way_is_taken_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mpicomm")
    engine = Engine(copy_engine=NoStagingError("rank 1: out of memory"))
    for _ in range(2):
        assert prepared(engine) == ("two_shot", 2)
    assert engine.tried == ["copy_engine", "two_shot"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "Allreduce goes without copy engines, which is slower, for want of memory: rank 1: out of memory"
    ]


@pytest.mark.parametrize(
    ("asked", "failures"),
    [
        ("copy_engine", {"copy_engine": NoStagingError("x")}),  # asked for
        ("auto", {"copy_engine": PeerError("x")}),  # no matter of memory
        ("auto", {"copy_engine": HandleError("x")}),  # of a kernel's code, say, on this rank alone
        ("auto", {"copy_engine": NoStagingError("y"), "two_shot": HandleError("x")}),  # not for anything
        ("two_shot", {"two_shot": HandleError("x")}),
    ],
)
def test_other_failures_are_raised(asked: str, failures: dict[str, MpicommError]) -> None:
    with pytest.raises(MpicommError, match="x"):
        prepared(Engine(**failures), asked=asked)
