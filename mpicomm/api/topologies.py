"""The checks of the arguments that describe a graph to a call that makes a communicator.

If the arguments are wrong, MPI ends the program, reads other memory or waits for ever. The functions are *collective*,
and raise `InvalidUsageError` on every rank alike.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.api.reorder import listed, starts_of_graph
from mpicomm.errors import InvalidUsageError

_TAKES_NULL = "Open MPI" not in MPI.Get_library_version()
"""Whether MPI takes MPI.PROC_NULL for a neighbour. Open MPI 5.0.11 ends the program in a collective of neighbours."""


def require_graph(comm: MPI.Intracomm, index: Any, edges: Any) -> None:
    """Raise if ``index`` and ``edges`` are no graph of ranks of ``comm``."""

    def check() -> None:
        ends, peers = _integers("index", index), _integers("edges", edges)
        starts = starts_of_graph(ends, peers)
        nodes = len(starts) - 1
        if nodes > comm.size:
            raise InvalidUsageError(f"index has {nodes} ranks, but the communicator has {comm.size}: pass up to these")
        for start, end in itertools.pairwise(starts):
            if end < start:
                raise InvalidUsageError(
                    f"index={ends!r} goes down to {end}: pass the sums of the numbers of neighbours"
                )
        if starts[-1] > len(peers):
            raise InvalidUsageError(f"edges has {len(peers)} items, but index says {starts[-1]}: pass all of them")
        _require_ranks("edges", peers, nodes)

    _raise_together(comm, "Create_graph", check)


def require_edges(comm: MPI.Intracomm, sources: Any, degrees: Any, destinations: Any, weights: Any) -> None:
    """Raise if the lists of a rank are no edges between ranks of ``comm``."""

    def check() -> None:
        starts = _integers("sources", sources)
        counts = _integers("degrees", degrees, len(starts))
        if min(counts, default=0) < 0:
            raise InvalidUsageError(f"degrees={counts!r} has a negative number: pass 0 or more")
        ends = _integers("destinations", destinations, sum(counts))
        _require_ranks("sources", starts, comm.size)
        _require_ranks("destinations", ends, comm.size)
        _require_weights("weights", weights, len(ends))

    _raise_together(comm, "Create_dist_graph", check)


def require_matching(
    comm: MPI.Intracomm, sources: Any, destinations: Any, sourceweights: Any, destweights: Any
) -> None:
    """Raise if a neighbour is no rank of ``comm``, or if the lists of two ranks do not match."""
    size, rank = comm.size, comm.rank
    sent, named, expected = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)

    def check() -> None:
        for counts, ranks, name, weights, name_of_weights in (
            (expected, sources, "sources", sourceweights, "sourceweights"),
            (sent, destinations, "destinations", destweights, "destweights"),
        ):
            peers = _integers(name, () if ranks is None else ranks)
            _require_ranks(name, peers, size, or_null=True)
            _require_weights(name_of_weights, weights, len(peers))
            np.add.at(counts, [peer for peer in peers if peer != MPI.PROC_NULL], 1)

    def compare() -> None:
        for peer in np.flatnonzero(named != expected).tolist():
            raise InvalidUsageError(
                f"rank {peer} names rank {rank} {named[peer]} times as a destination, and this rank names rank {peer} "
                f"{expected[peer]} times as a source: let both ranks name each other equally often"
            )

    _raise_together(comm, "Create_dist_graph_adjacent", check)
    comm.Alltoall(sent, named)
    _raise_together(comm, "Create_dist_graph_adjacent", compare)


def _raise_together(comm: MPI.Intracomm, what: str, check: Callable[[], None]) -> None:
    """Raise the error of ``check`` on all ranks if it raises on one. Collective."""
    fault = ""
    try:
        check()
    except (InvalidUsageError, TypeError) as error:
        fault = f"rank {comm.rank}: {error}"
    for rank, said in enumerate(comm.allgather(fault)):
        if said:
            raise InvalidUsageError(f"{what}: {said}", ranks=[rank])


def _integers(name: str, values: Any, count: int | None = None) -> list[int]:
    try:
        integers = [operator.index(value) for value in values]
    except TypeError:
        raise InvalidUsageError(f"{name}={values!r} is no list of integers: pass one") from None
    if count is not None and len(integers) != count:
        raise InvalidUsageError(f"{name} has {len(integers)} items: pass {count}")
    return integers


def _require_ranks(name: str, ranks: list[int], size: int, *, or_null: bool = False) -> None:
    for place, rank in enumerate(ranks):
        if or_null and rank == MPI.PROC_NULL and not _TAKES_NULL:
            raise InvalidUsageError(
                f"{name}[{place}] is MPI.PROC_NULL, with which Open MPI ends the program in collectives of neighbours: "
                "leave it out"
            )
        if not (0 <= rank < size or (or_null and rank == MPI.PROC_NULL)):
            way_out = f"use 0 to {size - 1}" + (" or MPI.PROC_NULL" if or_null else "")
            raise InvalidUsageError(f"{name}[{place}]={rank} is no rank of the communicator: {way_out}")


def _require_weights(name: str, weights: Any, count: int) -> None:
    if (given := listed(weights)) is not None:
        _integers(name, given, count)
