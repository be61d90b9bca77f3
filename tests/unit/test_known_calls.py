from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives import known_calls
from mpicomm.collectives.calls import Arguments
from mpicomm.collectives.known_calls import KnownCalls


class Array:
    """What CuPy's arrays have of what tells them apart."""

    def __init__(self, pointer: int, shape: tuple[int, ...] = (4,), dtype: str = "f4", step: int = 1) -> None:
        self.data = SimpleNamespace(ptr=pointer)
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.strides = tuple(step * self.dtype.itemsize for _ in shape)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))


def arguments(send: Any, receive: Any, op: MPI.Op | None = MPI.SUM, **others: Any) -> Arguments:
    return Arguments(send=send, receive=receive, op=op, **others)


def test_the_same_call_is_known_again_whatever_the_objects() -> None:
    known, plan = KnownCalls(), object()
    known.add(known.key("Allreduce", arguments(Array(16), Array(64)), "auto"), plan, MPI.SUM)  # type: ignore[arg-type]
    assert known.find(known.key("Allreduce", arguments(Array(16), Array(64)), "auto")) is plan


@pytest.mark.parametrize(
    ("operation", "given", "algorithm"),
    [
        ("Reduce", arguments(Array(16), Array(64)), "auto"),
        ("Allreduce", arguments(Array(32), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(32)), "auto"),
        ("Allreduce", arguments(Array(16, (2, 2)), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16, dtype="i4"), Array(64, dtype="i4")), "auto"),
        ("Allreduce", arguments(Array(16, step=2), Array(64)), "auto"),
        ("Allreduce", arguments(MPI.IN_PLACE, Array(64)), "auto"),
        ("Allreduce", arguments(None, Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(64), MPI.MAX), "auto"),
        ("Allreduce", arguments(Array(16), Array(64), root=1), "auto"),
        ("Allreduce", arguments(Array(16), Array(64)), "two_shot"),
    ],
)
def test_another_call_is_not(operation: str, given: Arguments, algorithm: str) -> None:
    known = KnownCalls()
    known.add(known.key("Allreduce", arguments(Array(16), Array(64)), "auto"), object(), MPI.SUM)  # type: ignore[arg-type]
    key = known.key(operation, given, algorithm)
    assert key is not None
    assert known.find(key) is None


def test_what_says_more_than_an_array_is_never_known() -> None:
    known = KnownCalls()
    for given in (
        arguments([Array(16), 4], Array(64)),
        arguments(Array(16), np.zeros(4)),
        arguments(Array(16), Array(64), counts=[1, 3]),
    ):
        assert known.key("Allreduce", given, "auto") is None
    known.add(None, object(), None)  # type: ignore[arg-type]
    assert known.find(None) is None


def test_calls_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_MOST", 3)
    known = KnownCalls()
    keys = [known.key("Bcast", arguments(None, Array(16 * number), None), "auto") for number in range(1, 6)]
    for key in keys:
        known.add(key, object(), None)  # type: ignore[arg-type]
    assert known.find(keys[-1]) is not None
    assert sum(known.find(key) is not None for key in keys) <= 3
