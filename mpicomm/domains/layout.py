"""Layout: the cliques of a communicator, and which ranks of different cliques talk to each other. Pure functions.

A *clique* is a set of ranks that map each other's memory and that one engine serves. A *rail* is made of the ranks with
the same index in their cliques: each of them uses its own network card, so traffic along all rails uses all cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property


class Layout:
    """The cliques of all ranks, and this rank among them. All ranks have the same one, but for ``rank``."""

    def __init__(self, cliques: Sequence[Sequence[int]], rank: int) -> None:
        self.cliques = tuple(tuple(ranks) for ranks in cliques)
        self.rank = rank
        self._places = {
            each: (number, index) for number, ranks in enumerate(self.cliques) for index, each in enumerate(ranks)
        }
        self.size = len(self._places)
        """The number of ranks."""
        self.number, self.index = self._places[rank]
        """The number of this rank's clique, and this rank's index in the clique."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's clique."""
        return self.cliques[self.number]

    @cached_property
    def rails(self) -> int:
        """The number of rails: the ranks of the smallest clique."""
        return min(len(ranks) for ranks in self.cliques)

    @cached_property
    def in_rank_order(self) -> bool:
        """Whether the ranks of each clique, clique by clique, are in the order of ranks."""
        return [rank for ranks in self.cliques for rank in ranks] == list(range(self.size))

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The numbers of the other cliques, from the next one on, so that not all ranks begin with the same clique."""
        return tuple(self.ahead(distance) for distance in range(1, len(self.cliques)))

    @cached_property
    def elsewhere(self) -> tuple[int, ...]:
        """The ranks of the other cliques, clique by clique."""
        return tuple(rank for clique in self.others for rank in self.cliques[clique])

    def ahead(self, distance: int) -> int:
        """Return the number of the clique ``distance`` places after this rank's, in a circle."""
        return (self.number + distance) % len(self.cliques)

    def clique_of(self, rank: int) -> int:
        """Return the number of a rank's clique."""
        return self._places[rank][0]

    def index_of(self, rank: int) -> int:
        """Return a rank's index in its clique."""
        return self._places[rank][1]

    def partner(self, rank: int, clique: int) -> int:
        """Return the rank of a clique that exchanges data with ``rank`` on behalf of its clique.

        It has the same index where the clique has so many ranks. In smaller cliques a rank serves several others.
        """
        ranks = self.cliques[clique]
        return ranks[self.index_of(rank) % len(ranks)]

    @cached_property
    def contacts(self) -> tuple[int, ...]:
        """The ranks of other cliques with which this rank exchanges data in most schedules."""
        partners = {self.partner(self.rank, clique) for clique in self.others}
        return tuple(sorted(partners.union(*(self.served(clique) for clique in self.others))))

    def served(self, clique: int) -> tuple[int, ...]:
        """Return the ranks of a clique that have this rank for their partner."""
        return self.cliques[clique][self.index :: len(self.ranks)]

    def served_by_each(self, cliques: Sequence[int]) -> list[list[int]]:
        """Return for each rank of this clique the ranks of other cliques, clique by clique, whose partner it is."""
        size = len(self.ranks)
        return [[rank for clique in cliques for rank in self.cliques[clique][index::size]] for index in range(size)]

    def turns(self, clique: int) -> list[tuple[int, ...]]:
        """Cut the ranks of a clique into rows of at most as many ranks as this rank's clique has."""
        ranks, size = self.cliques[clique], len(self.ranks)
        return [ranks[first : first + size] for first in range(0, len(ranks), size)]
