"""Updates: the operation of an accumulate, and the type of the elements that it updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.kernels.accumulate import LOCATING, MOVING
from mpicomm.mpi import types
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.mpi.ops import check_legal, op_name
from mpicomm.windows import pairs
from mpicomm.windows.buffers import LocalBuffer, TypedElements


@dataclass(frozen=True)
class Update:
    """Replaces each element by ``op`` of the element and a contribution."""

    op: str
    """A word of kernels.reductions or kernels.accumulate, or an expression of the user."""
    dtype: np.dtype[Any]

    @property
    def kernel_type(self) -> str:
        """The name of the type of the elements for kernels."""
        named: str = pairs.kernel_types().get(self.dtype, self.dtype.name)
        return named

    @property
    def reads_only(self) -> bool:
        """Whether it has no contributions."""
        return self.op == "no_op"


def name_of(op: MPI.Op, what: str) -> str:
    """Return the name of an operation. Raises for an operation that accumulates do not have. Local."""
    if isinstance(op, MPI.Op) and op == MPI.REPLACE:
        return "replace"
    if isinstance(op, MPI.Op) and op == MPI.NO_OP:
        return "no_op"
    if isinstance(op, MPI.Op) and op.handle in pairs.OPERATIONS:
        return pairs.OPERATIONS[op.handle]
    name = op_name(op)
    if name is None or name == "avg":
        raise RefusedByMpiError(
            f"{what}: op={op!r} cannot update single elements of device memory: pass an operation that MPI defines, or "
            "an mpicomm.Op",
            MPI.ERR_OP,
        )
    return name


def update_of(name: str, elements: TypedElements, what: str) -> Update:
    """Return the update of ``elements`` by the operation ``name``. Raises for a type that has no such update. Local."""
    dtype = elements.dtype
    if dtype is None:
        raise RefusedByMpiError(
            f"{what}: elements of several types, or of a type that NumPy lacks, cannot be updated: pass elements of "
            "one basic type",
            MPI.ERR_TYPE,
        )
    if (name in LOCATING) != (dtype in pairs.kernel_types()) and name not in MOVING:
        raise RefusedByMpiError(
            f"{what}: op={name} is not defined for {dtype}: MINLOC and MAXLOC are for pairs such as MPI.DOUBLE_INT, "
            "and pairs have no other operations",
            MPI.ERR_OP,
        )
    if name not in (*MOVING, *LOCATING):
        check_legal(name, dtype)
    return Update(name, np.dtype(np.uint8) if dtype == types.BYTE else dtype)


def require_alike(elements: TypedElements, local: LocalBuffer, what: str) -> None:
    """Raise unless a buffer has elements of the type of the target."""
    if local.elements.dtype != elements.dtype:
        raise RefusedByMpiError(
            f"{what}: {local.name} has elements of {local.elements.dtype}, and target of {elements.dtype}: pass the "
            "same basic type",
            MPI.ERR_TYPE,
        )


def require_bytes(local: LocalBuffer, nbytes: int, name: str, what: str) -> None:
    """Raise unless a buffer has as many bytes as the buffer ``name``."""
    if local.nbytes != nbytes:
        raise RefusedByMpiError(
            f"{what}: {local.name} has {local.nbytes} bytes, and {name} has {nbytes}: pass as many elements",
            MPI.ERR_COUNT,
        )


def require_one(local: LocalBuffer, what: str) -> None:
    """Raise unless a buffer is one element of a basic type."""
    elements = local.elements
    if elements.layout is not None or elements.count != 1:
        shown = "a derived datatype" if elements.layout is not None else f"{elements.count} elements"
        raise RefusedByMpiError(f"{what}: {local.name} has {shown}: pass one element of a basic type", MPI.ERR_COUNT)


def is_aligned(layout: DatatypeLayout | None, nbytes: int) -> bool:
    """Return whether all elements of ``nbytes`` bytes lie at multiples of their size from the address of a layout."""
    if layout is None:
        return True
    for region in layout.regions:
        places = [region.offset, region.run_nbytes]
        for loop in region.loops:
            places += loop.listed().tolist() if loop.places else [loop.stride]
        if any(place % nbytes for place in places):
            return False
    return True
