"""The peer domains of a communicator, the steps of one rank over several of them, and the base of a transport.

A *domain* is a set of ranks that map each other's memory and that one engine serves. A *rail* consists of the ranks
with the same index in their domains. Each rank of a domain uses another network card, so traffic along all rails uses
all cards. Steps know neither devices nor engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.signature import Signature
from mpicomm.errors import MpicommError
from mpicomm.mpi.arguments import Span

ALIGNED_NBYTES = 256


@dataclass(frozen=True)
class DomainStep:
    """A collective of this rank's domain; ``buffers`` number its ranks by their index in the domain."""

    operation: Operation
    buffers: Buffers


class NetworkMessage(NamedTuple):
    """Bytes for a rank of another domain, or from it."""

    rank: int
    pointer: int
    nbytes: int


Spans = Iterable[tuple[int, Span]]
"""Elements for ranks, or from them."""


@dataclass(frozen=True)
class NetworkStep:
    """Network messages between domains. Each two ranks list the messages between them in the same order."""

    sends: tuple[NetworkMessage, ...] = ()
    receives: tuple[NetworkMessage, ...] = ()

    @classmethod
    def of(cls, dtype: np.dtype[Any], sends: Spans = (), receives: Spans = ()) -> NetworkStep:
        """Return the step with a message for each span. Both ranks leave out empty messages."""

        def messages(spans: Spans) -> tuple[NetworkMessage, ...]:
            return tuple(
                NetworkMessage(rank, span.pointer, span.count * dtype.itemsize) for rank, span in spans if span.count
            )

        return cls(messages(sends), messages(receives))


TransportName = Literal["mapped", "nccl", "mpi", "pinned"]


class Transport:
    """Moves network messages between device memory of different domains."""

    name: TransportName
    capturable = True
    """Whether CUDA graphs can capture its work; else it blocks the host, and a capture is an error."""

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """Start messages after the work of ``stream``. Return a function that makes the stream wait for them.

        All ranks start equally many network steps in the same order. A step may have no network messages. The function
        does not block, or raises `CollectiveTimeoutError` or `PeerError` as `Transfers.start` says.
        """
        raise NotImplementedError

    def publish_error(self, error: MpicommError) -> None:
        """Send ranks of other domains the error of a call that this rank has given up: see `Transfers`. Local.

        It does nothing if all waits for this rank have a deadline of their own.
        """

    def close(self) -> None:
        """Release the resources of the transport; its work must be done, or have failed. Local."""


@dataclass(frozen=True)
class Combine:
    """Reduce arrays of ``count`` elements in this rank's memory, in their order, into ``output``.

    The result is divided by ``divisor`` and rounded to ``result``. A single array is only converted.
    """

    op: str
    dtype: np.dtype[Any]
    sources: range
    """The addresses of the arrays: see `ScratchAllocator.arrays`."""
    count: int
    output: int
    result: np.dtype[Any]
    divisor: int = 1


@dataclass(frozen=True)
class Pack:
    """Copy blocks of this rank's memory to contiguous memory; with ``unpacks`` copy back."""

    blocks: tuple[Span, ...]
    """The blocks with counts in bytes. No block is empty."""
    packed: int
    unpacks: bool = False

    @classmethod
    def of(cls, blocks: Iterable[Span], packed: int, dtype: np.dtype[Any], *, unpacks: bool = False) -> Pack:
        """Return the step for blocks of elements."""
        in_bytes = (Span(block.pointer, block.count * dtype.itemsize) for block in blocks if block.count)
        return cls(tuple(in_bytes), packed, unpacks)

    def copies(self) -> Iterator[tuple[int, int, int]]:
        """Yield the target, the source and the bytes of the copy of each block."""
        packed = self.packed
        for block in self.blocks:
            target, source = (block.pointer, packed) if self.unpacks else (packed, block.pointer)
            yield target, source, block.count
            packed += block.count


Step = DomainStep | NetworkStep | Combine | Pack


class ScratchAllocator:
    """Scratch memory of one call from an address on, from which the schedule of the call allocates.

    A schedule is a pure function of its arguments, so a run with any address counts the bytes that it needs.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self.nbytes = 0
        """The number of bytes that the schedule has taken."""

    def take(self, nbytes: int) -> int:
        """Return the address of memory that nothing else of the call uses."""
        return self.arrays(1, nbytes).start

    def span(self, count: int, dtype: np.dtype[Any]) -> Span:
        """As `take`, for elements."""
        return Span(self.take(count * dtype.itemsize), count)

    def arrays(self, number: int, nbytes: int) -> range:
        """As `take`, for ``number`` arrays of ``nbytes`` bytes."""
        start = self._start + self.nbytes
        stride = -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES
        self.nbytes += number * stride
        stride = stride or ALIGNED_NBYTES  # a range has no step of 0
        return range(start, start + number * stride, stride)


class DomainLayout:
    """The domains of all ranks, and this rank among them. It is the same on all ranks, except for ``rank``."""

    def __init__(self, domains: Sequence[Sequence[int]], rank: int) -> None:
        self.domains = tuple(tuple(ranks) for ranks in domains)
        self.rank = rank
        self._places = {
            each: (number, index) for number, ranks in enumerate(self.domains) for index, each in enumerate(ranks)
        }
        self.size = len(self._places)
        """The number of ranks."""
        self.domain, self.index = self._places[rank]
        """The number of this rank's domain, and this rank's index in it."""
        self.ranks = self.domains[self.domain]
        """The ranks of this rank's domain."""
        self.rails = min(map(len, self.domains))
        """The number of rails, which is the number of ranks in the smallest domain."""
        self.in_rank_order = [each for ranks in self.domains for each in ranks] == list(range(self.size))
        """Whether the domains, one after the other, have the ranks in order."""
        self.other_domains = tuple(self.ahead(distance) for distance in range(1, len(self.domains)))
        """The numbers of the other domains, from the next one on, so that not all ranks begin with the same domain."""
        self.remote_ranks = tuple(each for domain in self.other_domains for each in self.domains[domain])
        """The ranks of the other domains, domain by domain."""
        partners = {self.partner(rank, domain) for domain in self.other_domains}
        self.remote_peers = tuple(sorted(partners.union(*(self.served(domain) for domain in self.other_domains))))
        """The ranks of other domains with which this rank exchanges data in most schedules."""

    def ahead(self, distance: int) -> int:
        """Return the number of the domain ``distance`` domains after this rank's domain, in a circle."""
        return (self.domain + distance) % len(self.domains)

    def domain_of(self, rank: int) -> int:
        """Return the number of a rank's domain."""
        return self._places[rank][0]

    def index_of(self, rank: int) -> int:
        """Return a rank's index in its domain."""
        return self._places[rank][1]

    def partner(self, rank: int, domain: int) -> int:
        """Return the rank that exchanges data with ``rank`` on behalf of a domain.

        The partner has the same index if the domain has this index. In smaller domains a rank serves several ranks of
        another domain.
        """
        ranks = self.domains[domain]
        return ranks[self.index_of(rank) % len(ranks)]

    def served(self, domain: int) -> tuple[int, ...]:
        """Return the ranks of a domain that have this rank as their partner."""
        return self.domains[domain][self.index :: len(self.ranks)]

    def served_by_each(self, domains: Sequence[int]) -> list[list[int]]:
        """Return for each rank of this domain the ranks of ``domains`` that it serves, domain by domain."""
        size = len(self.ranks)
        return [[rank for domain in domains for rank in self.domains[domain][index::size]] for index in range(size)]

    def rail_peers(self) -> dict[int, int]:
        """Return the rank on this rank's rail in each other domain; {} for a rank without a rail."""
        if self.index >= self.rails:
            return {}
        return {domain: self.domains[domain][self.index] for domain in self.other_domains}

    def rounds(self, domain: int) -> list[tuple[int, ...]]:
        """Return the ranks of a domain in rounds, each with at most as many ranks as this rank's domain has."""
        ranks, size = self.domains[domain], len(self.ranks)
        return [ranks[first : first + size] for first in range(0, len(ranks), size)]
