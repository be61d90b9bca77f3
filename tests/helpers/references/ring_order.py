"""The right results of the ring all-reduce, which reduces in another order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from mpicomm.collectives.patterns import split
from mpicomm.mpi.arguments import Span
from tests.helpers.references.reductions import Array, reduced


def ring_reduced(op: str, parts: Sequence[Array]) -> Array:
    """Return for shard r ((part r + 1 op part r + 2) op ...) op part r, rounded to the dtype at every step."""
    size, whole = len(parts), parts[0]
    stops = np.cumsum([shard.count for shard in split(Span(0, whole.size), size, whole.itemsize)])
    shards = [np.split(part, stops[:-1]) for part in parts]
    orders = [[(index + step) % size for step in range(1, size + 1)] for index in range(size)]
    return np.concatenate(
        [
            reduce(lambda a, b: reduced(op, [a, b]), [shards[rank][index] for rank in order])
            for index, order in enumerate(orders)
        ]
    )
