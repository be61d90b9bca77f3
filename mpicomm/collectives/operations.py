"""The table of MPI's collectives: a row holds all facts that the package knows about one collective.

The API, the dispatcher, the engines, tuning, bench and tests read this table. No other file decides by name how a
collective works; only tables of measured sizes have names as keys. The methods of Communicators are made from the
table (`mpicomm.api.methods`). The text below a row begins the docstring of the blocking method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from mpi4py import MPI

from mpicomm.activity.page import mpi_call_number
from mpicomm.collectives import patterns
from mpicomm.collectives.exchange import Chain, Exchange, TwoShot
from mpicomm.collectives.patterns import Buffers, OneShot
from mpicomm.mpi.spec import Shape

BLOCKING, NONBLOCKING, PERSISTENT = range(3)
"""The modes of a collective, in the order of `Operation.methods`."""


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
    to_all: bool = False
    """Whether all ranks send to all others. Else a rank mostly either sends or receives."""
    of_neighbors: bool = False
    """Whether each rank exchanges data only with its neighbours in a topology. The pattern gets a block for each rank,
    as in an all-to-all; a rank that is no neighbour has an empty block. The collective is never in place."""
    into_all: bool = False
    """Whether all ranks have output of the same form and receive into it, so that peers may store into it."""
    two_shot: Callable[[Buffers], TwoShot] | None = None
    ring: Callable[[Buffers], list[Exchange]] | None = None
    chain: Callable[[Buffers], Chain] | None = None
    quantizable: bool = False
    """Whether elements may travel quantized: the argument ``wire_dtype``."""
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
    def methods(self) -> tuple[str, str, str]:
        """mpi4py's names of the blocking, the nonblocking and the persistent method."""
        return self.name, self.nonblocking, f"{self.name}_init"

    @property
    def is_even(self) -> bool:
        """Whether all blocks have one length, the same on all ranks."""
        return self.counts == "same" and self.send != "by_recvcounts"

    @property
    def mpi_class(self) -> type[MPI.Intracomm]:
        """mpi4py's class that has the collective."""
        return MPI.Topocomm if self.of_neighbors else MPI.Intracomm

    @cached_property
    def number(self) -> int:
        """The number by which the doctor names MPI's calls."""
        return mpi_call_number(self.name)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of mpi4py's arguments, in order."""
        names = ["buf"] if self.rooted == "bcast" else ["sendbuf", "recvbuf"]
        names += ["recvcounts"] * (self.send == "by_recvcounts") + ["op"] * self.reduces + ["root"] * bool(self.rooted)
        return tuple(names)

    @cached_property
    def passed(self) -> Callable[[Any], tuple[Any, ...]]:
        """A function that returns the fields of an `Arguments` as mpi4py takes them, in order."""
        fields = {"buf": "receive", "sendbuf": "send", "recvbuf": "receive", "recvcounts": "counts"}
        get: Callable[[Any], tuple[Any, ...]] = attrgetter(*(fields.get(name, name) for name in self.arguments))
        return get


DOCS: dict[Operation, str] = {}
"""The text of the blocking method's docstring: what it does, its buffers, and an example."""

ALLGATHER = Operation(
    "Allgather", "one", "blocks", patterns.allgather, to_all=True, into_all=True, quantizable=True, copies="one_shot"
)
DOCS[ALLGATHER] = """\
Bring block r, the ``sendbuf`` of rank r, to every rank's ``recvbuf``.

``sendbuf`` has n elements, n is the same on all ranks, and ``recvbuf`` has n for each rank, in rank order.

    x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
    comm.Allgather(x, y)

With ``wire_dtype`` elements travel as fp8 or int8: see `Allreduce`. Each rank also stores its own block as it has sent
it, so all ranks have the same bits. An element differs from its input by at most e * A.
"""
ALLGATHERV = Operation("Allgatherv", "one", "vector", patterns.allgather, counts="vector", to_all=True)
DOCS[ALLGATHERV] = """\
Bring block r, the ``sendbuf`` of rank r, to every rank's ``recvbuf``. Blocks differ in length.

``recvbuf`` is ``[array, counts]``, ``[array, (counts, displacements)]`` or ``[array, counts, displacements, type]``.
Counts and displacements have an entry for each rank, in elements, and are the same on all ranks.

    counts = [rank + 1 for rank in range(comm.size)]
    x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
    comm.Allgatherv(x, [y, counts])
"""
ALLREDUCE = Operation(
    "Allreduce", "one", "one", patterns.allreduce, reduces=True, to_all=True, into_all=True,
    two_shot=patterns.two_shot_allreduce, ring=patterns.ring_allreduce, quantizable=True, tree=True, copies="two_shot",
)  # fmt: skip
DOCS[ALLREDUCE] = """\
Reduce the ``sendbuf`` of all ranks with ``op`` into every rank's ``recvbuf``, element by element.

Both buffers have n elements of one type, and n is the same on all ranks.

    x, y = cp.ones(8), cp.empty(8)
    comm.Allreduce(x, y, op=MPI.MAX)

``epilogue`` is applied to each element of the result before it is stored. It is an expression, or one of
`mpicomm.epilogues`. In the expression v is the element and i its index. ``operands`` have their names there, and are
numbers or arrays: ``epilogue="v * scale + bias[i]", scale=0.5, bias=b``. See `Epilogue`. In "one_shot" and "two_shot"
on GPUs the kernel that reduces applies the epilogue. In other calls one more kernel follows and applies it, or NumPy
does on host arrays.

``wire_dtype`` is "float8_e4m3fn" or "int8", the same on all ranks. Elements of float32, float16 or bfloat16 then travel
quantized, with a power of two as the scale of each block of 128. ``op`` is SUM or AVG. The sum travels quantized again,
except with a pair such as ("int8", None). Its bits do not depend on rank, run, algorithm and device. Let A be the sum
over the ranks of the largest magnitude in the block, and e be 1/16 for "float8_e4m3fn" and 1/127 for "int8". The sum
differs from the exact sum by at most e * (2 + e) * A, or with a pair e * A, besides roundings to float32 and to the
elements' type. AVG divides all that by the number of ranks. A block is NaN as a whole on all ranks if it has a NaN or
an infinity on any rank, or if its sum exceeds float32. A magnitude within 1/32 of the largest number of its type may
become infinite by rounding. Device arrays in several peer domains, and other types, operations and algorithms than
"auto", "one_shot" and "two_shot", raise `InvalidUsageError`. It saves time on GPUs from 1 MiB on. Smaller calls, and
calls on the host, may take longer than without ``wire_dtype``.

``order="tree"`` adds with ``MPI.SUM`` along a binary tree: ranks 0 and 1, 2 and 3, ..., then pairs of their sums.
`tree_sum` adds the leaves of a rank in the same way. So 1, 2, 4 or more ranks that hold the ``leaves`` of the
`Communicator` in equal blocks get the same bits. All ranks pass the same ``order``. A number of ranks that is no power
of two or exceeds ``leaves``, elements of 16 bits or fewer, and the algorithms "ring", "chain" and "mpi" raise
`InvalidUsageError`.
"""
ALLTOALL = Operation("Alltoall", "blocks", "blocks", patterns.alltoall, to_all=True, into_all=True, copies="one_shot")
DOCS[ALLTOALL] = """\
Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``, for all r and s.

Both buffers have n elements for each rank, in rank order, and n is the same on all ranks.

    x, y = cp.arange(2 * comm.size), cp.empty(2 * comm.size, int)
    comm.Alltoall(x, y)
"""
ALLTOALLV = Operation("Alltoallv", "vector", "vector", patterns.alltoall, counts="private", to_all=True)
DOCS[ALLTOALLV] = """\
Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``. Blocks differ in length.

A buffer is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each rank, in elements. Rank
r's count for s in ``sendbuf`` is rank s's count for r in ``recvbuf``.

    counts = [rank + 1 for rank in range(comm.size)]
    x, y = cp.ones(sum(counts)), cp.empty(comm.size * (comm.rank + 1))
    comm.Alltoallv([x, counts], [y, [comm.rank + 1] * comm.size])

Counts may be integer arrays on the GPU, of int32 or int64: ``[sendbuf, counts]`` and ``[recvbuf, counts]``. Then the
call reads the counts of ``sendbuf`` in stream order, and writes the counts that have come into the counts of
``recvbuf``. ``recvbuf`` has room for the most elements that may come. Blocks follow each other in rank order, unless
``(counts, displacements)`` say other places. If a rank has too little room, or a count does not fit ``sendbuf``, all
ranks raise `InvalidUsageError` in the next call or in ``check``, and the communicator is unusable.
"""
ALLTOALLW = Operation("Alltoallw", "typed", "typed", patterns.alltoall, counts="private", to_all=True)
DOCS[ALLTOALLW] = """\
Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``. Blocks differ in datatype.

A buffer is ``[array, counts, displacements, types]``, with an entry for each rank. Displacements are in bytes. On GPUs
vectors, subarrays and other regular blocks go from layout to layout without packing. A kernel packs other blocks.

    x, y = cp.arange(4.0 * comm.size).reshape(4, comm.size), cp.empty((4, comm.size))
    column = MPI.DOUBLE.Create_vector(4, 1, comm.size).Commit()
    columns = [1] * comm.size, [8 * rank for rank in range(comm.size)], [column] * comm.size
    comm.Alltoallw([x, *columns], [y, *columns])
"""
BCAST = Operation(
    "Bcast", "one", "one", patterns.bcast, rooted="bcast", into_all=True, two_shot=patterns.two_shot_bcast,
    chain=patterns.chain_bcast, copies="two_shot",
)  # fmt: skip
DOCS[BCAST] = """\
Bring the root's ``buf`` to every rank's ``buf``.

``buf`` has the same number of elements on all ranks.

    x = cp.arange(8) if comm.rank == 0 else cp.empty(8, int)
    comm.Bcast(x, root=0)
"""
EXSCAN = Operation("Exscan", "one", "one", patterns.exscan, reduces=True)
DOCS[EXSCAN] = """\
Reduce the ``sendbuf`` of the ranks before r into rank r's ``recvbuf``. The ``recvbuf`` of rank 0 does not change.

Both buffers have n elements of one type, and n is the same on all ranks.

    x, y = cp.full(8, comm.rank), cp.zeros(8, int)
    comm.Exscan(x, y)
"""
GATHER = Operation("Gather", "one", "blocks", patterns.gather, rooted="receive", copies="one_shot")
DOCS[GATHER] = """\
Bring the ``sendbuf`` of rank r to block r of the root's ``recvbuf``.

``sendbuf`` has n elements, n is the same on all ranks, and the root's ``recvbuf`` has n for each rank, in rank order.
Other ranks pass None for it.

    x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
    comm.Gather(x, y if comm.rank == 0 else None, root=0)
"""
GATHERV = Operation("Gatherv", "one", "vector", patterns.gather, rooted="receive", counts="private")
DOCS[GATHERV] = """\
Bring the ``sendbuf`` of rank r to block r of the root's ``recvbuf``. Blocks differ in length.

The root's ``recvbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each rank, in
elements. Other ranks pass None for it.

    counts = [rank + 1 for rank in range(comm.size)]
    x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
    comm.Gatherv(x, [y, counts] if comm.rank == 0 else None, root=0)
"""
_OF_NEIGHBORS: dict[str, Any] = {"counts": "private", "to_all": True, "of_neighbors": True}
NEIGHBOR_ALLGATHER = Operation("Neighbor_allgather", "one", "blocks", patterns.alltoall, **_OF_NEIGHBORS)
DOCS[NEIGHBOR_ALLGATHER] = """\
Receive a block from each neighbour, and send the same block to each.

``sendbuf`` has n elements, and ``recvbuf`` n for each neighbour that sends, in MPI's order of neighbours.

    with comm.Create_cart([comm.size], periods=[True]) as grid:
        x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
        grid.Neighbor_allgather(x, y)
"""
NEIGHBOR_ALLGATHERV = Operation("Neighbor_allgatherv", "one", "vector", patterns.alltoall, **_OF_NEIGHBORS)
DOCS[NEIGHBOR_ALLGATHERV] = """\
Receive a block from each neighbour, and send the same block to each. Blocks differ in length.

``recvbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each neighbour that sends.

    with comm.Create_cart([comm.size], periods=[True]) as grid:
        x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
        grid.Neighbor_allgatherv(x, [y, [3, 3]])
"""
NEIGHBOR_ALLTOALL = Operation("Neighbor_alltoall", "blocks", "blocks", patterns.alltoall, **_OF_NEIGHBORS)
DOCS[NEIGHBOR_ALLTOALL] = """\
Receive a block from each neighbour, and send another block to each.

Both buffers have n elements for each neighbour, in MPI's order of neighbours.

    with comm.Create_cart([comm.size], periods=[True]) as grid:
        x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
        grid.Neighbor_alltoall(x, y)
"""
NEIGHBOR_ALLTOALLV = Operation("Neighbor_alltoallv", "vector", "vector", patterns.alltoall, **_OF_NEIGHBORS)
DOCS[NEIGHBOR_ALLTOALLV] = """\
Receive a block from each neighbour, and send another block to each. Blocks differ in length.

A buffer is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each neighbour, in elements.

    with comm.Create_cart([comm.size], periods=[True]) as grid:
        x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
        grid.Neighbor_alltoallv([x, [3, 3]], [y, [3, 3]])
"""
NEIGHBOR_ALLTOALLW = Operation("Neighbor_alltoallw", "typed", "typed", patterns.alltoall, **_OF_NEIGHBORS)
DOCS[NEIGHBOR_ALLTOALLW] = """\
Receive a block from each neighbour, and send another block to each. Blocks differ in datatype.

A buffer is ``[array, counts, displacements, types]``, with an entry for each neighbour. Displacements are in bytes.

    with comm.Create_cart([comm.size], periods=[True]) as grid:
        x, y = cp.full((2, 3), float(grid.rank)), cp.empty((2, 3))
        blocks = [1, 1], [0, x.nbytes // 2], [MPI.DOUBLE.Create_contiguous(3).Commit()] * 2
        grid.Neighbor_alltoallw([x, *blocks], [y, *blocks])
"""
# Copy engines carry it out in one shot: only the root has memory for a shard that they would send on.
REDUCE = Operation(
    "Reduce", "one", "one", patterns.reduce, rooted="receive", reduces=True, two_shot=patterns.two_shot_reduce,
    chain=patterns.chain_reduce, tree=True, copies="one_shot",
)  # fmt: skip
DOCS[REDUCE] = """\
Reduce the ``sendbuf`` of all ranks with ``op`` into the root's ``recvbuf``, element by element.

Both buffers have n elements of one type, and n is the same on all ranks. Other ranks pass None for ``recvbuf``.

    x, y = cp.ones(8), cp.empty(8)
    comm.Reduce(x, y if comm.rank == 0 else None, op=MPI.MAX, root=0)

With ``order="tree"`` the bits of a sum do not depend on the number of ranks: see `Allreduce`.
"""
REDUCE_SCATTER = Operation("Reduce_scatter", "by_recvcounts", "one", patterns.reduce_scatter, reduces=True, to_all=True)
DOCS[REDUCE_SCATTER] = """\
Reduce block r of all ranks' ``sendbuf`` with ``op`` into rank r's ``recvbuf``. Blocks differ in length.

Block r has ``recvcounts[r]`` elements. Without ``recvcounts`` the ranks exchange the counts of their ``recvbuf``, which
blocks. If the other ranks are in place, a rank with count 0 need not be in place, except in a persistent call on host
arrays.

    counts = [rank + 1 for rank in range(comm.size)]
    x, y = cp.ones(sum(counts)), cp.empty(comm.rank + 1)
    comm.Reduce_scatter(x, y, recvcounts=counts)
"""
REDUCE_SCATTER_BLOCK = Operation(
    "Reduce_scatter_block", "blocks", "one", patterns.reduce_scatter, reduces=True, to_all=True, quantizable=True,
    tree=True, copies="one_shot",
)  # fmt: skip
DOCS[REDUCE_SCATTER_BLOCK] = """\
Reduce block r of all ranks' ``sendbuf`` with ``op`` into rank r's ``recvbuf``.

``recvbuf`` has n elements, n is the same on all ranks, and ``sendbuf`` has n for each rank, in rank order.

    x, y = cp.ones(3 * comm.size), cp.empty(3)
    comm.Reduce_scatter_block(x, y)

With ``wire_dtype`` elements travel as fp8 or int8: see `Allreduce`. The blocks of 128 elements begin with block r. The
sum differs from the exact sum by at most e * A, besides roundings to float32 and to the elements' type.

With ``order="tree"`` the bits of a sum do not depend on the number of ranks: see `Allreduce`.
"""
SCAN = Operation("Scan", "one", "one", patterns.scan, reduces=True)
DOCS[SCAN] = """\
Reduce the ``sendbuf`` of the ranks up to and including r into rank r's ``recvbuf``.

Both buffers have n elements of one type, and n is the same on all ranks.

    x, y = cp.full(8, comm.rank), cp.empty(8, int)
    comm.Scan(x, y)
"""
SCATTER = Operation("Scatter", "blocks", "one", patterns.scatter, rooted="send", copies="one_shot")
DOCS[SCATTER] = """\
Bring block r of the root's ``sendbuf`` to rank r's ``recvbuf``.

``recvbuf`` has n elements, n is the same on all ranks, and the root's ``sendbuf`` has n for each rank, in rank order.
Other ranks pass None for it.

    x, y = cp.arange(3 * comm.size), cp.empty(3, int)
    comm.Scatter(x if comm.rank == 0 else None, y, root=0)
"""
SCATTERV = Operation("Scatterv", "vector", "one", patterns.scatter, rooted="send", counts="private")
DOCS[SCATTERV] = """\
Bring block r of the root's ``sendbuf`` to rank r's ``recvbuf``. Blocks differ in length.

The root's ``sendbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each rank, in
elements. Other ranks pass None for it.

    counts = [rank + 1 for rank in range(comm.size)]
    x, y = cp.arange(sum(counts)), cp.empty(comm.rank + 1, int)
    comm.Scatterv([x, counts] if comm.rank == 0 else None, y, root=0)
"""

OPERATIONS = {row.name: row for row in list(globals().values()) if isinstance(row, Operation)}
"""All rows, by name."""
