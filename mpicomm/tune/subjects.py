"""Subjects: the collectives with a choice of algorithms, on symmetric and on ordinary arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mpicomm.bench.operations import OPERATIONS, BenchOperation, Case, blocks_of
from mpicomm.collectives.gpu.tuning import TUNED, Kind, algorithms_of, kind_of
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.types import is_narrow

OP = "sum"
"""The operation for the measurement of reductions."""

_TUNED = {
    name: operation.collective.name
    for name, operation in OPERATIONS.items()
    if operation.collective is not None and operation.collective.name in TUNED
}
NAMES = tuple(_TUNED)
"""The collectives with a choice of algorithms, by the bench's names."""


@dataclass(frozen=True)
class Subject:
    """The kind of calls that a row of the table is for, and the operation and type for its measurement."""

    kind: Kind
    operation: BenchOperation
    dtype: np.dtype[Any]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms from which the table chooses."""
        return algorithms_of(self.kind.operation)

    def __str__(self) -> str:
        arrays = "symmetric" if self.kind.registered else "ordinary"
        return f"{self.kind.operation} of {self.dtype.name}, {arrays} arrays"

    def cases(self, sizes: Sequence[int], rank: int, size: int) -> list[Case]:
        """Return the cases nearest to these sizes, out of place if the operation allows it."""
        blocks = blocks_of(self.operation, sizes, self.dtype, size)
        place = self.operation.places[0]
        return [Case(self.operation, self.dtype, OP, block, False, rank, size).at(place) for block in blocks]


def subjects_of(names: Sequence[str], dtype: np.dtype[Any]) -> list[Subject]:
    """Return the subjects of the collectives ``names``, by the bench's names.

    Raises `InvalidUsageError` for a type that some algorithm cannot carry. The table is for all types, and a row
    without an algorithm would keep it from the types that it can carry.
    """
    found: dict[Kind, Subject] = {}
    for name, registered in product(names, (False, True)):
        kind = kind_of(_TUNED[name], registered=registered)
        found.setdefault(kind, Subject(kind, OPERATIONS[name], dtype))
    for subject in found.values():
        _require_carried(subject)
    return list(found.values())


def _require_carried(subject: Subject) -> None:
    dtype = subject.dtype
    if "chain" in subject.algorithms and subject.operation.reduces and is_narrow(dtype):
        name = subject.kind.operation
        raise InvalidUsageError(
            f"-d {dtype.name}: chain cannot carry a {name} of {dtype.name}, and would be missing from the table, which "
            f"is for all types: measure with -d float32, or leave {subject.operation.name} out of --operations"
        )
