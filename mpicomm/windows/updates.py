"""Updates: the operation of an accumulate, and the type of the elements that it updates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.kernels.window import LOCATING, MOVING
from mpicomm.mpi import types
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.layout import DatatypeLayout, known_of, made_layout, made_of
from mpicomm.mpi.ops import check_legal, op_name
from mpicomm.mpi.regions import Region
from mpicomm.windows.buffers import LocalBuffer, TypedElements

_OPERATIONS_ON_PAIRS = {MPI.MINLOC.handle: "minloc", MPI.MAXLOC.handle: "maxloc"}
"""The operations on pairs, by MPI's handle."""
_VALUES = (
    (MPI.FLOAT_INT, "f4"),
    (MPI.DOUBLE_INT, "f8"),
    (MPI.LONG_INT, "i8"),
    (MPI.TWOINT, "i4"),
    (MPI.SHORT_INT, "i2"),
    (MPI.LONG_DOUBLE_INT, "g"),
)


def _dtype(datatype: MPI.Datatype, value: str) -> np.dtype[Any]:
    extent = datatype.Get_extent()[1]
    index_at = datatype.Get_true_extent()[1] - np.dtype("i4").itemsize
    names, formats, offsets = ["value", "index"], [value, "i4"], [0, index_at]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": extent})


@lru_cache
def _dtypes() -> dict[int, np.dtype[Any]]:
    """Return the dtypes of pairs by MPI's handle. Not at import, because MPI need not be initialised then."""
    return {datatype.handle: _dtype(datatype, value) for datatype, value in _VALUES}


@lru_cache
def kernel_types() -> dict[np.dtype[Any], str]:
    """Return the names of the types of pairs in accumulate.cu."""
    return {_dtype(datatype, value): f"pair_{value}" for datatype, value in _VALUES}


def as_pairs(elements: TypedElements) -> TypedElements:
    """Return elements of a datatype of pairs as whole pairs; all other elements as they are.

    MPI packs the gap out of a pair with a gap. An atomic update takes the word with the gap.
    """
    if elements.datatype is None or elements.dtype is not None:
        return elements
    known = known_of(elements.datatype)
    layout = known.whole_pairs = known.whole_pairs or _with_whole_pairs(elements.datatype)
    if layout is None or layout.dtype not in kernel_types():
        return elements
    itemsize = layout.dtype.itemsize
    if any(region.run_nbytes % itemsize for region in layout.regions):
        return elements  # a datatype without a rule, such as a DARRAY, has the bytes that MPI packs
    if elements.datatype.is_predefined:
        return TypedElements(elements.count, itemsize, layout.dtype, None, elements.datatype)
    whole = layout.repeated(elements.count)
    return TypedElements(elements.count, elements.extent, layout.dtype, whole, elements.datatype)


def _with_whole_pairs(datatype: MPI.Datatype) -> DatatypeLayout | None:
    """Return the layout of a datatype, with the gaps in its pairs; None for DATATYPE_NULL."""
    if datatype.is_predefined:
        dtype = _dtypes().get(datatype.handle)
        if dtype is None:
            return made_layout(datatype)
        return DatatypeLayout((Region(0, (), dtype.itemsize),), dtype.itemsize, dtype)
    return made_of(datatype, _with_whole_pairs)


@dataclass(frozen=True)
class Update:
    """Replaces each element by ``op`` of the element and a contribution."""

    op: str
    """A word of kernels.reductions or kernels.window, or an expression of the user."""
    dtype: np.dtype[Any]

    @property
    def kernel_type(self) -> str:
        """The name of the type of the elements for kernels."""
        named: str = kernel_types().get(self.dtype, self.dtype.name)
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
    if isinstance(op, MPI.Op) and op.handle in _OPERATIONS_ON_PAIRS:
        return _OPERATIONS_ON_PAIRS[op.handle]
    name = op_name(op)
    if name is None or name == "avg":
        raise RefusedByMpiError(
            f"{what}: op={op!r} cannot update single elements of a window: pass an operation that MPI defines, or "
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
    if (name in LOCATING) != (dtype in kernel_types()) and name not in MOVING:
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
