"""GrowingScratch: scratch memory of one rank that all calls share, in stream order."""

from __future__ import annotations

from mpicomm.devices.base import GpuBackend, Scratch
from mpicomm.mpi.span import Span


class GrowingScratch:
    """Memory that grows by powers of two. All of it lives as long as this object."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self.parts = [Scratch(0, 0, None)]
        """All memory. The first part has no bytes, and the last part is the largest."""

    @property
    def nbytes(self) -> int:
        """The bytes of all memory."""
        return sum(part.nbytes for part in self.parts)

    def of(self, nbytes: int) -> Span | None:
        """Return memory of at least ``nbytes`` bytes; None for 0 bytes. Local."""
        if nbytes == 0:
            return None
        if self.parts[-1].nbytes < nbytes:
            # Smaller parts stay, because a captured graph may use them. Sizes are powers of two, so all parts together
            # have at most twice the bytes of the largest part.
            self.parts.append(self._backend.scratch(1 << (nbytes - 1).bit_length()))
        return Span(self.parts[-1].pointer, 0)
