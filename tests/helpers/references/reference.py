"""The right results of every collective, on host copies: from the buffers of all ranks to the results of all ranks.

Arrays are flat, one for each rank, and are never changed. A rank that receives nothing has None. Reductions take the
ranks in order, ((rank 0 op rank 1) op rank 2) ..., as `reduced` does. Narrow floats are reduced in float32 and rounded
once, integers wrap, and ``avg`` divides the sum by the number of contributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.helpers.references.reductions import Array, Groups, reduced

Arrays = Sequence[Array]
Received = list[Array | None]
Places = Sequence[tuple[int, int]]
"""Count and displacement of the block of each rank, in elements."""


def bcast(buffers: Arrays, root: int) -> list[Array]:
    """All ranks have the root's content."""
    return [buffers[root].copy() for _ in buffers]


def gather(sent: Arrays, root: int) -> Received:
    """The root has the blocks of all ranks, one after the other."""
    return _at_root(np.concatenate(sent), root, len(sent))


def gatherv(sent: Arrays, places: Places, old: Array, root: int) -> Received:
    """The root has the blocks of all ranks in their places; the gaps between them keep their content."""
    return _at_root(put(sent, places, old), root, len(sent))


def scatter(sent: Array, size: int) -> list[Array]:
    """Every rank has its part of the root's content."""
    return split(sent, size)


def scatterv(sent: Array, places: Places) -> list[Array]:
    """Every rank has the block of the root's content that lies in its place."""
    return take(sent, places)


def allgather(sent: Arrays) -> list[Array]:
    """Every rank has the blocks of all ranks."""
    return [np.concatenate(sent) for _ in sent]


def allgatherv(sent: Arrays, places: Sequence[Places], old: Arrays) -> list[Array]:
    """Every rank has the blocks of all ranks in the places it asked for; ``places`` and ``old`` are the receivers'."""
    return [put(sent, mine, buffer) for mine, buffer in zip(places, old, strict=True)]


def alltoall(sent: Arrays) -> list[Array]:
    """Every rank has from each rank the block meant for it."""
    blocks = [split(buffer, len(sent)) for buffer in sent]
    return [np.concatenate([of_sender[rank] for of_sender in blocks]) for rank in range(len(sent))]


def alltoallv(sent: Arrays, send: Sequence[Places], receive: Sequence[Places], old: Arrays) -> list[Array]:
    """As `alltoall`, with blocks in the places of the senders and the receivers."""
    blocks = [take(buffer, places) for buffer, places in zip(sent, send, strict=True)]
    return [put([of_sender[rank] for of_sender in blocks], receive[rank], old[rank]) for rank in range(len(sent))]


def allreduce(sent: Arrays, op: str, groups: Groups | None = None) -> list[Array]:
    """Every rank has the reduction of all contributions."""
    result = reduced(op, sent, groups)
    return [result.copy() for _ in sent]


def reduce(sent: Arrays, op: str, root: int, groups: Groups | None = None) -> Received:
    """The root has the reduction of all contributions."""
    return _at_root(reduced(op, sent, groups).copy(), root, len(sent))


def reduce_scatter(sent: Arrays, op: str, counts: Sequence[int], groups: Groups | None = None) -> list[Array]:
    """Every rank has its part of the reduction, ``counts[rank]`` elements of it."""
    ends = np.cumsum(counts)
    assert ends[-1] == sent[0].size, f"counts {counts} of {sent[0].size} elements"
    return [part.copy() for part in np.split(reduced(op, sent, groups), ends[:-1])]


def reduce_scatter_block(sent: Arrays, op: str, groups: Groups | None = None) -> list[Array]:
    """Every rank has its part of the reduction; all parts are equally long."""
    return split(reduced(op, sent, groups), len(sent))


def scan(sent: Arrays, op: str) -> list[Array]:
    """Every rank has the reduction of the contributions of the ranks up to itself."""
    return [reduced(op, sent[: rank + 1]).copy() for rank in range(len(sent))]


def exscan(sent: Arrays, op: str, old: Array) -> list[Array]:
    """Every rank has the reduction of the contributions of the ranks before it; rank 0 keeps ``old``."""
    return [old.copy(), *scan(sent, op)[:-1]]


def split(array: Array, size: int) -> list[Array]:
    """Cut an array into one block for each rank, all equally long."""
    assert array.size % size == 0, f"{array.size} elements for {size} ranks"
    return [part.copy() for part in np.split(array, size)]


def take(array: Array, places: Places) -> list[Array]:
    """Cut the blocks in these places out of an array."""
    for count, start in places:
        assert count == 0 or 0 <= start <= array.size - count, f"{count} elements from {start} on"
    return [array[start : start + count].copy() for count, start in places]


def put(blocks: Arrays, places: Places, old: Array) -> Array:
    """Return a copy of ``old`` with the blocks in these places."""
    new: Array = old.copy()
    for block, (count, start) in zip(blocks, places, strict=True):
        assert block.size == count, f"{block.size} elements in a place for {count}"
        if count:
            new[start : start + count] = block
    return new


def _at_root(array: Array, root: int, size: int) -> Received:
    return [array if rank == root else None for rank in range(size)]
