"""The table of MPI's collectives: a row holds all facts that the package knows about one collective.

The API, the dispatcher, the engines, tuning, bench and tests read this table. No other file decides by name how a
collective works; only tables of measured sizes have names as keys. scripts/write_methods.py writes the methods of
Communicators from the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from mpi4py import MPI

from mpicomm.activity.page import by_mpi
from mpicomm.collectives import patterns
from mpicomm.collectives.exchange import Chain, Exchange, TwoShot
from mpicomm.collectives.patterns import Buffers, OneShot
from mpicomm.mpi.spec import Shape


# Rows compare by identity, because each row exists once. That also makes them cheap keys of dictionaries.
@dataclass(frozen=True, eq=False)
class Operation:
    """A row: one collective."""

    name: str
    """mpi4py's name of the blocking method."""
    send: Shape
    receive: Shape
    one_shot: OneShot
    """The collective as one exchange, in which every rank sends straight to every rank."""
    rooted: Literal["", "send", "receive", "bcast"] = ""
    """The buffer that only the root has. "bcast" means one buffer, which all ranks have and the root sends."""
    reduces: bool = False
    counts: Literal["same", "vector", "private"] = "same"
    """The ranks that know a count. "same": all ranks pass the same count. "vector": every rank passes its own count and
    knows the counts of all ranks. "private": only the two ranks of a message know its count."""
    traffic: Literal["even", "uneven", "one-way"] = "one-way"
    """The bytes that ranks send. "even": all ranks send the same number of bytes to all others. "uneven": all ranks
    send to all others, and some send more. "one-way": a rank mostly either sends or receives."""
    of_neighbors: bool = False
    """Whether each rank exchanges data only with its neighbours in a topology. The pattern gets a block for each rank,
    as in an all-to-all; a rank that is no neighbour has an empty block. The collective is never in place."""
    into_all: bool = False
    """Whether all ranks have output of the same form and receive into it, so that peers may store into it."""
    two_shot: Callable[[Buffers], TwoShot] | None = None
    ring: Callable[[Buffers], list[Exchange]] | None = None
    chain: Callable[[Buffers], Chain] | None = None
    coded: bool = False
    """Whether elements may travel as codes of 8 bits: the argument ``wire_dtype``."""
    tree: bool = False
    """Whether it can add in the order of a binary tree: the argument ``order``."""
    copies: Literal["", "one_shot", "two_shot"] = ""
    """The pattern that copy engines carry out; "" if they do not serve the collective."""

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def nonblocking(self) -> str:
        """mpi4py's name of the nonblocking method."""
        return f"I{self.name.lower()}"

    @cached_property
    def persistent(self) -> str:
        """mpi4py's name of the persistent method."""
        return f"{self.name}_init"

    @property
    def methods(self) -> tuple[str, str, str]:
        """mpi4py's names of the blocking, the nonblocking and the persistent method."""
        return self.name, self.nonblocking, self.persistent

    @property
    def is_even(self) -> bool:
        """Whether all blocks have one length, the same on all ranks."""
        return self.counts == "same" and self.send != "counted"

    @cached_property
    def in_mpi(self) -> bool:
        """Whether MPI has the collective, so that it can carry out calls that the engines cannot."""
        return hasattr(self.mpi_class, self.name)

    @property
    def mpi_class(self) -> type[MPI.Intracomm]:
        """mpi4py's class that has the collective, if MPI has it."""
        return MPI.Topocomm if self.of_neighbors else MPI.Intracomm

    @cached_property
    def number(self) -> int:
        """The number by which the doctor names MPI's calls."""
        return by_mpi(self.name)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of mpi4py's arguments, in order."""
        names = ["buf"] if self.rooted == "bcast" else ["sendbuf", "recvbuf"]
        names += ["recvcounts"] * (self.send == "counted") + ["op"] * self.reduces + ["root"] * bool(self.rooted)
        return tuple(names)

    @cached_property
    def passed(self) -> Callable[[Any], tuple[Any, ...]]:
        """A function that returns the fields of an `Arguments` as mpi4py takes them, in order."""
        fields = {"buf": "receive", "sendbuf": "send", "recvbuf": "receive", "recvcounts": "counts"}
        get: Callable[[Any], tuple[Any, ...]] = attrgetter(*(fields.get(name, name) for name in self.arguments))
        return get


ALLGATHER = Operation(
    "Allgather", "one", "blocks", patterns.allgather, traffic="even", into_all=True, coded=True, copies="one_shot"
)
ALLGATHERV = Operation("Allgatherv", "one", "vector", patterns.allgather, counts="vector", traffic="uneven")
ALLREDUCE = Operation(
    "Allreduce",
    "one",
    "one",
    patterns.allreduce,
    reduces=True,
    traffic="even",
    into_all=True,
    two_shot=patterns.two_shot_allreduce,
    ring=patterns.ring_allreduce,
    coded=True,
    tree=True,
    copies="two_shot",
)
ALLTOALL = Operation(
    "Alltoall", "blocks", "blocks", patterns.alltoall, traffic="even", into_all=True, copies="one_shot"
)
ALLTOALLV = Operation("Alltoallv", "vector", "vector", patterns.alltoall, counts="private", traffic="uneven")
ALLTOALLW = Operation("Alltoallw", "typed", "typed", patterns.alltoall, counts="private", traffic="uneven")
BCAST = Operation(
    "Bcast",
    "one",
    "one",
    patterns.bcast,
    rooted="bcast",
    into_all=True,
    two_shot=patterns.two_shot_bcast,
    chain=patterns.chain_bcast,
    copies="two_shot",
)
EXSCAN = Operation("Exscan", "one", "one", patterns.exscan, reduces=True)
GATHER = Operation("Gather", "one", "blocks", patterns.gather, rooted="receive", copies="one_shot")
GATHERV = Operation("Gatherv", "one", "vector", patterns.gather, rooted="receive", counts="private")
NEIGHBOR_ALLGATHER = Operation(
    "Neighbor_allgather", "one", "blocks", patterns.alltoall, counts="private", traffic="uneven", of_neighbors=True
)
NEIGHBOR_ALLGATHERV = Operation(
    "Neighbor_allgatherv", "one", "vector", patterns.alltoall, counts="private", traffic="uneven", of_neighbors=True
)
NEIGHBOR_ALLTOALL = Operation(
    "Neighbor_alltoall", "blocks", "blocks", patterns.alltoall, counts="private", traffic="uneven", of_neighbors=True
)
NEIGHBOR_ALLTOALLV = Operation(
    "Neighbor_alltoallv", "vector", "vector", patterns.alltoall, counts="private", traffic="uneven", of_neighbors=True
)
NEIGHBOR_ALLTOALLW = Operation(
    "Neighbor_alltoallw", "typed", "typed", patterns.alltoall, counts="private", traffic="uneven", of_neighbors=True
)
REDUCE = Operation(
    "Reduce",
    "one",
    "one",
    patterns.reduce,
    rooted="receive",
    reduces=True,
    two_shot=patterns.two_shot_reduce,
    chain=patterns.chain_reduce,
    tree=True,
    copies="one_shot",  # only the root has memory for a shard that copy engines would send on
)
REDUCE_SCATTER = Operation("Reduce_scatter", "counted", "one", patterns.reduce_scatter, reduces=True, traffic="uneven")
REDUCE_SCATTER_BLOCK = Operation(
    "Reduce_scatter_block",
    "blocks",
    "one",
    patterns.reduce_scatter,
    reduces=True,
    traffic="even",
    coded=True,
    tree=True,
    copies="one_shot",
)
SCAN = Operation("Scan", "one", "one", patterns.scan, reduces=True)
SCATTER = Operation("Scatter", "blocks", "one", patterns.scatter, rooted="send", copies="one_shot")
SCATTERV = Operation("Scatterv", "vector", "one", patterns.scatter, rooted="send", counts="private")

OPERATIONS = {row.name: row for row in list(globals().values()) if isinstance(row, Operation)}
"""All rows, by name."""
