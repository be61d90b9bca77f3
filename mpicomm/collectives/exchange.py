"""Exchange: what one rank sends to each rank and does with what it receives; every collective is a list of these.

The engines (host_engine, device_engine) know exchanges and nothing of MPI; patterns.py knows MPI's collectives and
nothing of memory. Between two ranks the bytes sent and received agree, which is all that has to agree: no rank needs to
know the counts of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomm.mpi.span import Span


@dataclass(frozen=True)
class Message:
    """Bytes that go to rank ``peer`` of the node or come from it; ``tag`` is MPI's, None where any will do."""

    peer: int
    span: Span
    tag: int | None


@dataclass(frozen=True)
class Reduction:
    """Reduce what the ``sources`` send, in that order, into ``output``.

    ``own`` is this rank's contribution where it is one of the sources. It may be the same memory as ``output``; sources
    and output do not overlap otherwise.
    """

    op: str
    sources: tuple[int, ...]
    own: Span | None
    output: Span


@dataclass(frozen=True)
class Exchange:
    """One step of a collective as one rank sees it; ranks are indices in the node.

    ``sends[r]`` is what goes to rank r. Of what comes from rank r, ``receives[r]`` says where it lands; a rank that is
    one of ``reduction.sources`` has no place in ``receives``: its data is reduced. What a rank sends to itself is
    copied to ``receives[self]`` (nothing happens if both are the same memory); in a reduction it is ``own``. Sends may
    overlap each other and the output, in a reduction only where they are the same memory: an engine reads all of an
    element's contributions before it writes the element, and sends a piece before it overwrites it. (On the host that
    memory has to be ``own`` too.)
    """

    dtype: np.dtype[Any]
    sends: tuple[Span | None, ...]
    receives: tuple[Span | None, ...]
    reduction: Reduction | None = None
    lands: tuple[Span | None, ...] | None = None
    """Where what goes to each rank belongs there, as it would on this rank, if the place is the same on all: known
    where all ranks have buffers of one form. For engines that store into symmetric memory."""

    @property
    def longest_nbytes(self) -> int:
        """The most that one rank sends to another, as far as this one can know."""
        spans = [*self.sends, *self.receives, self.reduction.output if self.reduction else None]
        return max((span.count for span in spans if span is not None), default=0) * self.dtype.itemsize

    def nbytes_with(self, peer: int) -> tuple[int, int]:
        """Return how much goes to ``peer`` and how much comes from it."""
        place = self.receives[peer]
        if self.reduction is not None and peer in self.reduction.sources:
            place = self.reduction.output
        sent, received = (span.count if span else 0 for span in (self.sends[peer], place))
        return sent * self.dtype.itemsize, received * self.dtype.itemsize
