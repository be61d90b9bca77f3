"""Epilogue: a function for the result of a call. BoundEpilogue: the same for the types and buffers of one call."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.functions import KINDS, kind_of
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.overlap import overlaps
from mpicomm.mpi.types import is_covered


class KernelCall(NamedTuple):
    """A launch of a kernel, without its stream."""

    variant: Variant
    arguments: ctypes.Structure
    blocks: int
    threads: int


@dataclass(frozen=True)
class Rows:
    """Rows of a shard of the result. An epilogue needs all elements of a row at once."""

    count: int
    nbytes: int
    """The bytes of one row, in elements of the reduction."""


class Fused(NamedTuple):
    """An epilogue as a part of a kernel that reduces."""

    options: tuple[str, ...]
    """The compiler options that make it a part of the kernel."""
    arguments: ctypes.Structure
    rows: Rows | None = None
    """The rows of a shard, which one rank must reduce as a whole; None if the epilogue needs only single elements."""


class BoundEpilogue(ABC):
    """An epilogue for the types and buffers of a call. Its methods are local."""

    writes: tuple[Operand, ...] = ()
    """The other arrays that it writes, besides the result."""

    def __init__(self, text: str, dtype: np.dtype[Any], result: np.dtype[Any]) -> None:
        self.text = text
        """The epilogue in words. Ranks must agree in it."""
        self.dtype = dtype
        """The type of the reduced elements."""
        self.result = result
        """The type of the stored elements."""

    @property
    def converts(self) -> bool:
        """Whether the stored elements have another type than the reduced ones."""
        return self.result != self.dtype

    @abstractmethod
    def fused(self, reduced: int, finished: int, shards: int = 1) -> Fused:
        """Return it as a part of a kernel that reduces. The kernel makes elements at ``finished``.

        The kernel's exchange names addresses from ``reduced`` on. It stores nothing there if the epilogue `converts`.
        ``shards`` is the number of ranks that each reduce a shard. A shard has whole rows.
        """

    @abstractmethod
    def following_kernel(self, source: int, output: int, failed: int, multiprocessors: int) -> KernelCall:
        """Return the kernel that makes elements at ``output`` from elements at ``source``. The addresses may be equal.

        The kernel does nothing after the word at ``failed`` is set.
        """

    @abstractmethod
    def on_host(self, reduced: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Make elements of ``out`` from elements of ``reduced``. Both may be the same memory."""


class Epilogue(ABC):
    """One of `mpicomm.epilogues`. An all-reduce applies it to its result before it stores the result."""

    @abstractmethod
    def key(self, identity_of: Callable[[Any], Hashable]) -> Hashable:
        """Return a key that is equal for equal epilogues, or None if an array cannot be recognised."""

    @abstractmethod
    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        """Return it for a call that turns elements of ``dtype`` into elements of ``result``.

        Raises `InvalidUsageError`.
        """

    def elements_in(self, result: Operand) -> int:
        """Return the number of reduced elements for which ``result`` has room."""
        return result.total

    def read(self, name: str, array: Any, result: Operand, *, writable: bool = False) -> Operand:
        """Return an array that it uses. Raises `InvalidUsageError` and TypeError for others."""
        try:
            operand = parse(array, writable=writable, name=name)
        except (TypeError, InvalidUsageError) as error:
            said = f"epilogue={self!r}: {name} is no array of numbers: {error}"
            raise (TypeError(said) if isinstance(error, TypeError) else error.like(said, error.ranks)) from error
        if operand.dtype is None or not is_covered(operand.dtype) or kind_of(operand.dtype.name) is None:
            raise InvalidUsageError(f"epilogue={self!r}: {name} has no elements that are numbers: convert it")
        if operand.on_device != result.on_device or operand.device != result.device:
            raise InvalidUsageError(f"epilogue={self!r}: {name} is not on the device of {result.name}: move it there")
        if overlaps(operand, result):
            raise InvalidUsageError(f"epilogue={self!r}: {name} overlaps {result.name}: copy one of them")
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
    return array_at(array.pointer, array.nbytes, np.dtype(np.uint8)).view(array.dtype)
