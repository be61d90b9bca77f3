"""Exchange: the data that one rank sends to each rank and receives from each rank in one step of a collective.

The engines of the host and of GPUs know exchanges, but not MPI. patterns.py knows MPI's collectives, but not memory. A
rank needs to know only its own counts. An exchange is right if the bytes that rank a sends to rank b are the bytes that
rank b receives from rank a.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpicomm.mpi.arguments import Span
from mpicomm.mpi.layout import Elements


@dataclass(frozen=True)
class Message:
    """Bytes that go to rank ``peer`` of the node or come from it. ``tag`` is MPI's; None if any tag matches."""

    peer: int
    span: Span
    tag: int | None
    elements: Elements | None = None
    """Elements of a derived datatype, which a kernel packs. ``span`` then has only their bytes, and no address."""


@dataclass(frozen=True)
class Reduction:
    """Reduce the data that the ranks ``sources`` send, in this order, into ``output``.

    ``own`` is this rank's contribution, if this rank is one of the sources. ``own`` may be the same memory as
    ``output``. Otherwise sources and output do not overlap.
    """

    op: str
    sources: tuple[int, ...]
    own: Span | None
    output: Span


@dataclass(frozen=True)
class Exchange:
    """One step of a collective as one rank sees it; ranks are indices in the node.

    ``sends[r]`` goes to rank r, and ``receives[r]`` gets the data of rank r. If rank r is one of
    ``reduction.sources``, ``receives[r]`` is None, because its data is reduced. An engine copies ``sends[self]`` to
    ``receives[self]``, unless both are the same memory.

    Sends may overlap each other. In a reduction, sends may also be the same memory as the output. An engine reads all
    contributions to an element before it writes the element, and sends a piece before it overwrites the piece. (On the
    host such memory must also be ``reduction.own``.)
    """

    dtype: np.dtype[Any]
    sends: tuple[Span | None, ...]
    receives: tuple[Span | None, ...]
    reduction: Reduction | None = None
    targets: tuple[Span | None, ...] | None = None
    """``targets[r]`` is where ``sends[r]`` goes on rank r, as an address in this rank's output. None unless all ranks
    have output of one form. Engines that store into symmetric memory use it."""
    move: tuple[Span, Span] | None = None
    """After the exchange this rank copies the first span to the second. Other ranks take no part in the copy."""

    block_hashes: tuple[tuple[int, int], ...] = ()
    """For each rank a hash of the lengths of the blocks to it, and of those from it. Two neighbours may agree in the
    bytes of a message and still differ in its blocks. Empty if each rank sends one block to each rank."""

    @cached_property
    def longest_nbytes(self) -> int:
        """The most bytes that one rank sends to another, as far as this rank knows."""
        spans = [*self.sends, *self.receives, self.reduction.output if self.reduction else None]
        return max((span.count for span in spans if span is not None), default=0) * self.dtype.itemsize

    def nbytes_with(self, peer: int) -> tuple[int, int]:
        """Return the bytes that go to ``peer`` and the bytes that come from it."""
        place = self.receives[peer]
        if self.reduction is not None and peer in self.reduction.sources:
            place = self.reduction.output
        sent, received = (span.count if span else 0 for span in (self.sends[peer], place))
        return sent * self.dtype.itemsize, received * self.dtype.itemsize


TwoShot = tuple[Exchange, Exchange]
"""Two exchanges: the second sends on the data that the first has reduced or brought to this rank."""


@dataclass(frozen=True)
class ChainHop:
    """One hop of a rank in a chain: it adds ``own`` to the data that it receives, keeps ``output``, and sends it on.

    ``own`` is None if the rank adds nothing. ``output`` is None if it keeps nothing. The first hop sends its ``own``
    and receives nothing.
    """

    own: Span | None
    output: Span | None
    receives: bool
    sends: bool


@dataclass(frozen=True)
class Chain:
    """Data that goes from rank to rank over ``links`` links. Each rank sends only to the next rank.

    The first rank has two hops if the chain comes back to it.
    """

    dtype: np.dtype[Any]
    hops: tuple[ChainHop, ...]
    links: int
