"""Epilogue: a function for the result of a call. BoundEpilogue: the same for the types and buffers of one call."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.functions import KINDS, kind_of
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Operand, overlaps, parse
from mpicomm.mpi.buffers import NOWHERE
from mpicomm.mpi.descriptors import descriptor_of
from mpicomm.mpi.types import is_covered

if TYPE_CHECKING:
    from typing_extensions import Self

Memory = tuple[int, int]
"""The address of an array, and the number of its elements."""


class BoundEpilogue(ABC):
    """An epilogue for the types and buffers of a call. Its methods are local.

    `rebind` makes it the epilogue of another call of the same form.
    """

    writes: tuple[Operand, ...] = ()
    """The other arrays that it writes, besides the result."""
    row_nbytes = 0
    """The bytes of a row of reduced elements, if it needs all elements of a row at once; else 0."""
    reduced_per_element = 1
    """The reduced elements in an element of the result."""

    def __init__(self, text: str, dtype: np.dtype[Any], result: Operand, arrays: Mapping[str, Operand]) -> None:
        assert result.dtype is not None
        self.text = text
        """The epilogue in words. Ranks must agree in it."""
        self.dtype = dtype
        """The type of the reduced elements."""
        self.result = result.dtype
        """The type of the stored elements."""
        self.output = result.pointer
        """The address of the result."""
        self.itemsizes = [array.dtype.itemsize for array in arrays.values() if array.dtype is not None]
        """The bytes of an element of each of ``arrays``, the `Epilogue.arrays` as read."""
        self._arrays = arrays

    @property
    def converts(self) -> bool:
        """Whether the stored elements have another type than the reduced ones."""
        return self.result != self.dtype

    def detached(self) -> Self:
        """Return a copy that keeps no array alive. Kernels can apply it after `rebind`, and the host cannot."""
        kept = copy(self)
        kept._arrays = {name: replace(array, memory=NOWHERE, spec=None) for name, array in self._arrays.items()}
        kept.writes = ()
        return kept

    @abstractmethod
    def rebind(self, output: int, count: int, arrays: Sequence[Memory]) -> bool:
        """Take the memory of a call of this form that reduces ``count`` elements; return whether all lengths fit.

        ``output`` is the address of the result, and ``arrays`` are in the order of `Epilogue.arrays`.
        """

    @abstractmethod
    def fused(self, reduced: int, shards: int = 1) -> tuple[tuple[str, ...], ctypes.Structure]:
        """Return the compiler options that make it a part of a kernel that reduces, and its argument.

        The kernel makes elements at `output`. Its exchange names addresses from ``reduced`` on, where it stores nothing
        if the epilogue `converts`. ``shards`` is the number of ranks that each reduce a shard. A shard has whole rows.
        """

    @abstractmethod
    def separate_launch(self, source: int, failed: int, multiprocessors: int) -> Launch:
        """Return the kernel that makes elements at `output` from elements at ``source``. The addresses may be equal.

        The kernel does nothing after the word at ``failed`` is set.
        """

    @abstractmethod
    def apply_on_host(self, reduced: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Make elements of ``out`` from elements of ``reduced``. Both may be the same memory."""


class Epilogue(ABC):
    """One of `mpicomm.epilogues`. An all-reduce applies it to its result before it stores the result."""

    sized_by_result: tuple[str, ...] = ()
    """The arrays whose lengths depend on the length of the result."""

    constants: Hashable
    """All of it except the memory of `arrays`."""
    arrays: dict[str, Any]
    """The arrays that it uses, by name."""

    def key(self) -> tuple[Hashable, tuple[Any, ...]]:
        """Return a key that calls of one form share, and the `Memory` of each of `arrays`.

        The key is None if an array is not plain.
        """
        kinds, memory = [self.constants], []
        for name, array in self.arrays.items():
            plain = descriptor_of(array)
            if plain is None or len(plain) > 3:
                return None, ()
            kinds.append(plain[2] if name in self.sized_by_result else plain[1:])
            memory.append(plain[:2])
        return tuple(kinds), tuple(memory)

    @abstractmethod
    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        """Return it for a call that turns elements of ``dtype`` into elements of ``result``.

        Raises `InvalidUsageError`.
        """

    def reduced_capacity(self, result: Operand) -> int:
        """Return the number of reduced elements for which ``result`` has room."""
        return result.total

    def read(self, name: str, array: Any, result: Operand, *, writable: bool = False) -> Operand:
        """Return an array that it uses. Raises `InvalidUsageError` and TypeError for others."""
        operand = parse(array, writable=writable, name=f"epilogue={self!r}: {name}")
        if operand.dtype is None or not is_covered(operand.dtype) or kind_of(operand.dtype.name) is None:
            raise InvalidUsageError(f"{operand.name} has no elements that are numbers: convert it")
        if operand.on_device != result.on_device or operand.device != result.device:
            raise InvalidUsageError(f"{operand.name} is not on the device of {result.name}: move it there")
        if overlaps(operand, result):
            raise InvalidUsageError(f"{operand.name} overlaps {result.name}: copy one of them")
        return operand

    def require_kind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> None:
        """Raise `InvalidUsageError` unless numbers of ``dtype`` may become numbers of the type of ``result``."""
        assert result.dtype is not None
        kinds = [KINDS.index(kind) for each in (dtype, result.dtype) if (kind := kind_of(each.name)) is not None]
        if len(kinds) < 2 or kinds[1] < kinds[0]:
            raise InvalidUsageError(
                f"{operation}: epilogue={self!r}: recvbuf has {result.dtype} for results of {dtype}: pass one of "
                f"{kind_of(dtype.name)}"
            )


def host_array(array: Operand) -> npt.NDArray[Any]:
    """Return the elements of an operand in host memory, one after the other."""
    assert array.dtype is not None
    return array_at(array.pointer, array.total, array.dtype)
