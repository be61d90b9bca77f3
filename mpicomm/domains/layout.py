"""Layout: the peer domains of a communicator, and the ranks of different domains that talk to each other.

A *domain* is a set of ranks that map each other's memory and that one engine serves. A *rail* is made of the ranks with
the same index in their domains. Each rank of a domain uses another network card, so traffic along all rails uses all
cards. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property


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
        self.number, self.index = self._places[rank]
        """The number of this rank's domain, and this rank's index in the domain."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's domain."""
        return self.domains[self.number]

    @cached_property
    def rails(self) -> int:
        """The number of rails, which is the number of ranks in the smallest domain."""
        return min(len(ranks) for ranks in self.domains)

    @cached_property
    def in_rank_order(self) -> bool:
        """Whether the ranks of each domain, domain by domain, are in the order of ranks."""
        return [rank for ranks in self.domains for rank in ranks] == list(range(self.size))

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The numbers of the other domains, from the next domain on, so that not all ranks begin with one domain."""
        return tuple(self.ahead(distance) for distance in range(1, len(self.domains)))

    @cached_property
    def elsewhere(self) -> tuple[int, ...]:
        """The ranks of the other domains, domain by domain."""
        return tuple(rank for domain in self.others for rank in self.domains[domain])

    def ahead(self, distance: int) -> int:
        """Return the number of the domain ``distance`` domains after this rank's domain, in a circle."""
        return (self.number + distance) % len(self.domains)

    def domain_of(self, rank: int) -> int:
        """Return the number of a rank's domain."""
        return self._places[rank][0]

    def index_of(self, rank: int) -> int:
        """Return a rank's index in its domain."""
        return self._places[rank][1]

    def partner(self, rank: int, domain: int) -> int:
        """Return the rank of a domain that exchanges data with ``rank`` on behalf of its domain.

        The partner has the same index if the domain has this index. In smaller domains a rank serves several other
        ranks.
        """
        ranks = self.domains[domain]
        return ranks[self.index_of(rank) % len(ranks)]

    @cached_property
    def contacts(self) -> tuple[int, ...]:
        """The ranks of other domains with which this rank exchanges data in most schedules."""
        partners = {self.partner(self.rank, domain) for domain in self.others}
        return tuple(sorted(partners.union(*(self.served(domain) for domain in self.others))))

    def served(self, domain: int) -> tuple[int, ...]:
        """Return the ranks of a domain that have this rank as their partner."""
        return self.domains[domain][self.index :: len(self.ranks)]

    def served_by_each(self, domains: Sequence[int]) -> list[list[int]]:
        """Return for each rank of this domain the ranks of other domains that it serves, domain by domain."""
        size = len(self.ranks)
        return [[rank for domain in domains for rank in self.domains[domain][index::size]] for index in range(size)]

    def turns(self, domain: int) -> list[tuple[int, ...]]:
        """Cut the ranks of a domain into groups of at most as many ranks as this rank's domain has."""
        ranks, size = self.domains[domain], len(self.ranks)
        return [ranks[first : first + size] for first in range(0, len(ranks), size)]
