"""GrowingScratch: scratch memory of one rank that all calls share, in stream order."""

from __future__ import annotations

from mpicomm.devices.base import GpuBackend, Scratch
from mpicomm.mpi.arguments import Span


class GrowingScratch:
    """Memory that grows by powers of two. All of it lives as long as this object."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._parts = [Scratch(0, 0, None)]

    @property
    def largest(self) -> Scratch:
        """The part that the next calls use; a part without bytes before the first `of`."""
        return self._parts[-1]

    @property
    def nbytes(self) -> int:
        """The bytes of all memory."""
        return sum(part.nbytes for part in self._parts)

    def of(self, nbytes: int) -> Span | None:
        """Return memory of at least ``nbytes`` bytes; None for 0 bytes. Local."""
        if nbytes == 0:
            return None
        if self.largest.nbytes < nbytes:
            # Smaller parts stay, because a captured graph may use them. Sizes are powers of two, so all parts together
            # have at most twice the bytes of the largest part.
            self._parts.append(self._backend.scratch(1 << (nbytes - 1).bit_length()))
        return Span(self.largest.pointer, 0)
