"""The check of the lists of neighbours of which a communicator is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError


def require_matching(comm: MPI.Intracomm, sources: Sequence[int] | None, destinations: Sequence[int] | None) -> None:
    """Raise `InvalidUsageError`, on every rank alike, where the ranks' lists of neighbours do not match. Collective.

    MPI would wait for a message for ever. Ranks that do not exist are left to MPI.
    """
    size, rank = comm.size, comm.rank
    sent, named, expected = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for counts, ranks in ((sent, destinations), (expected, sources)):
        for peer in ranks or ():
            if 0 <= peer < size:
                counts[peer] += 1
    comm.Alltoall(sent, named)
    wrong = [
        f"rank {peer} names rank {rank} {named[peer]} times as a destination, rank {rank} names rank {peer} "
        f"{expected[peer]} times as a source"
        for peer in np.flatnonzero(named != expected).tolist()
    ]
    found = next((text for texts in comm.allgather(wrong) for text in texts), None)
    if found is not None:
        raise InvalidUsageError(f"Create_dist_graph_adjacent: {found}: let both ranks name each other equally often")
