"""Exchange: the data that one rank sends to each rank and receives from each rank in one step of a collective.

The engines of the host and of GPUs know exchanges and nothing of MPI. patterns.py knows MPI's collectives and nothing
of memory. A rank needs to know only its own counts, because an exchange is right where the bytes that rank a sends to
rank b are the bytes that rank b receives from rank a.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpicomm.mpi.derived import Elements
from mpicomm.mpi.span import Span


@dataclass(frozen=True)
class Message:
    """Bytes that go to rank ``peer`` of the node or come from it; ``tag`` is MPI's, None where any tag matches."""

    peer: int
    span: Span
    tag: int | None
    elements: Elements | None = None
    """Elements of a derived datatype, which a kernel packs: ``span`` then has their bytes alone, and no address."""


@dataclass(frozen=True)
class Reduction:
    """Reduce the data that the ranks ``sources`` send, in this order, into ``output``.

    ``own`` is this rank's contribution where this rank is one of the sources. ``own`` may be the same memory as
    ``output``. Sources and output do not overlap otherwise.
    """

    op: str
    sources: tuple[int, ...]
    own: Span | None
    output: Span


@dataclass(frozen=True)
class Exchange:
    """One step of a collective as one rank sees it; ranks are indices in the node.

    ``sends[r]`` goes to rank r, and the data of rank r lands in ``receives[r]``. A rank that is one of
    ``reduction.sources`` has no place in ``receives``, because its data is reduced. An engine copies ``sends[self]`` to
    ``receives[self]``, unless both are the same memory; in a reduction ``own`` is this rank's data.

    Sends may overlap each other. In a reduction they may also be the same memory as the output, because an engine reads
    all contributions to an element before it writes the element, and sends a piece before it overwrites the piece. (On
    the host such memory must be ``own`` too.)
    """

    dtype: np.dtype[Any]
    sends: tuple[Span | None, ...]
    receives: tuple[Span | None, ...]
    reduction: Reduction | None = None
    lands: tuple[Span | None, ...] | None = None
    """The place where ``sends[r]`` belongs on rank r, as an address of this rank. It is given where all ranks have
    output of one form. Engines that store into symmetric memory use it."""
    move: tuple[Span, Span] | None = None
    """After the exchange this rank copies the first span to the second. Other ranks take no part in that."""

    cuts: tuple[tuple[int, int], ...] = ()
    """For each rank, how the data that goes to it and the data that comes from it are cut, as numbers; the two ranks
    must agree on them. Empty where each rank sends one block to each."""

    @cached_property
    def longest_nbytes(self) -> int:
        """The most bytes that one rank sends to another, as far as this rank can know."""
        spans = [*self.sends, *self.receives, self.reduction.output if self.reduction else None]
        return max((span.count for span in spans if span is not None), default=0) * self.dtype.itemsize

    def nbytes_with(self, peer: int) -> tuple[int, int]:
        """Return the bytes that go to ``peer`` and the bytes that come from it."""
        place = self.receives[peer]
        if self.reduction is not None and peer in self.reduction.sources:
            place = self.reduction.output
        sent, received = (span.count if span else 0 for span in (self.sends[peer], place))
        return sent * self.dtype.itemsize, received * self.dtype.itemsize


@dataclass(frozen=True)
class TwoShot:
    """Two exchanges, of which the second sends on the data that the first has reduced or brought to this rank."""

    first: Exchange
    second: Exchange

    @cached_property
    def longest_nbytes(self) -> int:
        """The most bytes that one rank sends to another, as far as this rank can know."""
        return max(self.first.longest_nbytes, self.second.longest_nbytes)


@dataclass(frozen=True)
class ChainHop:
    """A rank's place in a chain: it adds ``own`` to the data that it receives, keeps ``output``, and sends it on.

    ``own`` is None where the rank adds nothing, ``output`` is None where it keeps nothing. The first hop sends its
    ``own`` and receives nothing.
    """

    own: Span | None
    output: Span | None
    receives: bool
    sends: bool


@dataclass(frozen=True)
class Chain:
    """Data that goes from rank to rank, each sending to the next one alone, over ``links`` links.

    A rank has two hops where the chain comes back to the rank where it began.
    """

    dtype: np.dtype[Any]
    hops: tuple[ChainHop, ...]
    links: int

    @property
    def nbytes(self) -> int:
        """The bytes that each link carries."""
        spans = (span for hop in self.hops for span in (hop.own, hop.output) if span is not None)
        return max(span.count for span in spans) * self.dtype.itemsize
