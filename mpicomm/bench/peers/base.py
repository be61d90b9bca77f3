"""Peer: the bench's interface to a library, mpicomm or another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mpicomm.bench.machine import Call
from mpicomm.bench.operations import Case, CaseBuffers


class UnsupportedError(Exception):
    """The error of a library without such a collective, element type, operation, or support for such arrays."""


class Peer(Protocol):
    """A library in use. All methods are collective."""

    version: str
    exact: bool
    """Whether its reductions are in rank order, so that the bench can compare every bit."""
    capturable: bool
    """Whether CUDA graphs can capture its calls."""
    result_at_front: bool
    """Whether an in-place reduce-scatter leaves its block at the front of the buffer; see `operations.buffers`."""

    def allocate(self, nbytes: int) -> Any:
        """Return memory of the kind that is fastest for this library, as a NumPy or CuPy array of bytes."""

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return the ways to carry out a case, by name. The fastest way counts. Raises `UnsupportedError`."""

    def close(self) -> None:
        """Free everything."""


def view_bytes(pointer: int, nbytes: int, owner: object) -> Any:
    """Return device memory of another library as a CuPy array of bytes."""
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner)
    return cupy.ndarray((nbytes,), cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
