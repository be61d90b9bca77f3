"""The arguments of one-sided calls: buffers of this rank, targets in the parts of other ranks, and updates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.devices.cuda.types import Backend
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.window import LOCATING, MOVING
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, parse, require_same_device
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.layout import DatatypeLayout, derived_layout, elements_at, facts_of, layout_from_mpi
from mpicomm.mpi.ops import check_legal, op_name
from mpicomm.mpi.regions import Region
from mpicomm.mpi.spec import datatype_of, index_of, no_type
from mpicomm.windows.memory import WindowMemory

_OPERATIONS = (MPI.REPLACE, "replace"), (MPI.NO_OP, "no_op"), (MPI.MINLOC, "minloc"), (MPI.MAXLOC, "maxloc")
_MOVING_OR_LOCATING = {op.handle: name for op, name in _OPERATIONS}
"""The names of these operations by MPI's handle."""
_VALUES = (
    (MPI.FLOAT_INT, "f4"),
    (MPI.DOUBLE_INT, "f8"),
    (MPI.LONG_INT, "i8"),
    (MPI.TWOINT, "i4"),
    (MPI.SHORT_INT, "i2"),
    (MPI.LONG_DOUBLE_INT, "g"),
)


# These classes are not frozen, because every call makes some, and a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class TypedElements:
    """Elements of one type."""

    count: int
    extent: int
    """The bytes from one element to the next."""
    dtype: np.dtype[Any] | None
    """The type of the basic elements; None for several types, or types that NumPy lacks."""
    layout: DatatypeLayout | None
    """The layout of all elements; None if they are contiguous."""
    datatype: MPI.Datatype | None = None
    """The derived datatype of an element."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, without gaps."""
        return self.count * self.extent if self.layout is None else self.layout.nbytes

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte of the elements, and the byte after the last, as offsets from their address."""
        return (0, self.nbytes) if self.layout is None else (self.layout.begin, self.layout.end)


@dataclass(slots=True, eq=False)
class LocalBuffer:
    """A buffer of this rank."""

    name: str
    pointer: int
    elements: TypedElements
    on_device: bool
    array: Any
    """The array of the argument, whose library has the current stream."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, without gaps."""
        return self.elements.nbytes


@dataclass(slots=True, eq=False)
class Target:
    """Elements in the part of ``rank``, which this rank has mapped at ``address``."""

    rank: int
    address: int
    elements: TypedElements


def read_buffer(spec: Any, backend: Backend, *, writable: bool, name: str) -> LocalBuffer:
    """Read the argument ``name`` of a call on a window. Local. Raises `TypeError` and `InvalidUsageError`."""
    array = array_of(spec)
    if array is MPI.BOTTOM:
        raise InvalidUsageError(f"{name}: MPI.BOTTOM has no meaning for a window of a device: pass the array itself")
    operand = parse(spec, writable=writable, name=name)
    if operand.on_device:
        require_same_device(name, operand.device, backend.device)
    return LocalBuffer(name, operand.pointer, _elements_of(operand), operand.on_device, array)


def elements_of(spec: Any, name: str, *, only_type: bool = False) -> TypedElements:
    """Return the elements of the argument ``name``, which is in host memory. Local.

    With ``only_type`` it may return fewer elements of the type.
    """
    if only_type and isinstance(spec, (list, tuple)) and spec and isinstance(spec[-1], (MPI.Datatype, str)):
        return _elements_of_type(spec[-1], 1, name)  # also of MPI.BOTTOM, which has addresses in its datatype
    return _elements_of(parse(spec, writable=False, name=name))


def _elements_of(operand: Operand) -> TypedElements:
    if operand.dtype is not None:
        return TypedElements(operand.total, operand.dtype.itemsize, operand.dtype, None)
    memory = operand.memory
    if operand.mpi_type is None:
        raise no_type(memory, operand.name)
    room = memory.pointer, memory.nbytes if memory.room is None else memory.room
    start = operand.pointer - memory.pointer
    found = elements_at(operand.mpi_type, room, start, operand.total, name=operand.name)
    return derived(operand.mpi_type, operand.total, found.layout)


def derived(datatype: MPI.Datatype, count: int, layout: DatatypeLayout) -> TypedElements:
    """Return elements of a derived datatype, whose layout is ``layout``."""
    return TypedElements(count, datatype.Get_extent()[1], layout.dtype, layout, datatype)


def read_target(
    spec: Any, rank: int, memory: WindowMemory, local: LocalBuffer, what: str, *, pairs: bool = False
) -> Target:
    """Read the argument ``target`` of the call ``what``: None, a displacement, or (displacement, count, datatype).

    Local. Missing items are those of ``local``, the buffer of this rank. Raises `InvalidUsageError` for elements
    outside the part of ``rank``, and if the target has more or fewer bytes than ``local``. With ``pairs`` the elements
    may be pairs, as those of ``local``.
    """
    disp, elements = target_elements(spec, local.elements, what)
    if pairs:
        elements = as_pairs(elements)
    address = memory.locate(rank, disp, elements.bounds, what)
    if elements.nbytes != local.nbytes:
        raise RefusedByMpiError(
            f"{what}: target has {elements.nbytes} bytes, and {local.name} has {local.nbytes}: pass as many elements "
            "of the same types",
            MPI.ERR_TRUNCATE if elements.nbytes > local.nbytes else MPI.ERR_COUNT,
        )
    return Target(rank, address, elements)


def target_elements(spec: Any, default: TypedElements, what: str) -> tuple[int, TypedElements]:
    """Return the displacement and the elements of the argument ``target``. Missing items are those of ``default``.

    Local. Raises as `read_target`.
    """
    disp, count, datatype = parse_target(spec)
    disp = index_of(disp, "displacement", "target")
    count = default.count if count is None else index_of(count, "count", "target")
    if count < 0:
        raise RefusedByMpiError(f"{what}: target: count {count} is negative: pass 0 or more", MPI.ERR_COUNT)
    if datatype is None and default.layout is None:
        return disp, TypedElements(count, default.extent, default.dtype, None)
    if datatype is not None or count != default.count:
        return disp, _elements_of_type(default.datatype if datatype is None else datatype, count, "target")
    return disp, default


def parse_target(spec: Any) -> tuple[Any, Any, Any]:
    """Return the displacement, the count and the datatype of the argument ``target``; None for a missing item."""
    if isinstance(spec, (list, tuple)):
        if len(spec) > 3:
            raise InvalidUsageError(f"target has {len(spec)} items: pass at most 3, (displacement, count, datatype)")
        disp, count, datatype = (*spec, None, None, None)[:3]
        return 0 if disp is None else disp, count, datatype
    return 0 if spec is None else spec, None, None


def _elements_of_type(datatype: Any, count: int, name: str) -> TypedElements:
    dtype, mpi_type = datatype_of(datatype, name)
    if dtype is not None:
        return TypedElements(count, dtype.itemsize, dtype, None)
    assert mpi_type is not None
    # The room is for any target, whose bounds `read_target` compares with the part of the rank.
    found = elements_at(mpi_type, (0, 1 << 62), 1 << 61, count, name=name)
    return derived(mpi_type, count, found.layout)


def _pair_dtype(datatype: MPI.Datatype, value: str) -> np.dtype[Any]:
    extent = datatype.Get_extent()[1]
    index_at = datatype.Get_true_extent()[1] - np.dtype("i4").itemsize
    names, formats, offsets = ["value", "index"], [value, "i4"], [0, index_at]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": extent})


@lru_cache
def kernel_types() -> dict[np.dtype[Any], str]:
    """Return the names of the types of pairs in accumulate.cu. Not at import: MPI need not be initialised then."""
    return {_pair_dtype(datatype, value): f"pair_{value}" for datatype, value in _VALUES}


def as_pairs(elements: TypedElements) -> TypedElements:
    """Return elements of a datatype of pairs as whole pairs, and all other elements unchanged.

    MPI packs the gap out of a pair with a gap. An atomic update takes the word with the gap.
    """
    if elements.datatype is None or elements.dtype is not None:
        return elements
    known = facts_of(elements.datatype)
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
        dtype = next((_pair_dtype(pair, value) for pair, value in _VALUES if pair == datatype), None)
        if dtype is None:
            return layout_from_mpi(datatype)
        return DatatypeLayout((Region(0, (), dtype.itemsize),), dtype.itemsize, dtype)
    return derived_layout(datatype, _with_whole_pairs)


@dataclass(frozen=True)
class Update:
    """Replaces each element by ``op`` of the element and a contribution."""

    op: str
    """A name of kernels.reductions or kernels.window, or an expression of the user."""
    dtype: np.dtype[Any]

    @property
    def kernel_type(self) -> str:
        """The name of the type of the elements for kernels."""
        named: str = kernel_types().get(self.dtype, self.dtype.name)
        return named


def operation_name(op: MPI.Op, what: str) -> str:
    """Return the name of an operation. Raises for an operation that accumulates do not have. Local."""
    if isinstance(op, MPI.Op) and op.handle in _MOVING_OR_LOCATING:
        return _MOVING_OR_LOCATING[op.handle]
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


def require_same_type(elements: TypedElements, local: LocalBuffer, what: str) -> None:
    """Raise unless a buffer has elements of the type of the target."""
    if local.elements.dtype != elements.dtype:
        raise RefusedByMpiError(
            f"{what}: {local.name} has elements of {local.elements.dtype}, and target of {elements.dtype}: pass the "
            "same basic type",
            MPI.ERR_TYPE,
        )


def require_single_element(local: LocalBuffer, what: str) -> None:
    """Raise unless a buffer is one element of a basic type."""
    elements = local.elements
    if elements.layout is not None or elements.count != 1:
        shown = "a derived datatype" if elements.layout is not None else f"{elements.count} elements"
        raise RefusedByMpiError(f"{what}: {local.name} has {shown}: pass one element of a basic type", MPI.ERR_COUNT)


def is_aligned(layout: DatatypeLayout | None, nbytes: int) -> bool:
    """Return whether all elements of ``nbytes`` bytes lie at multiples of their size from the begin of a layout."""
    if layout is None:
        return True
    for region in layout.regions:
        offsets = [region.offset, region.run_nbytes]
        for loop in region.loops:
            offsets += loop.displacements().tolist() if loop.displs else [loop.stride]
        if any(offset % nbytes for offset in offsets):
            return False
    return True
