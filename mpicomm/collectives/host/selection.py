"""Selection: which collectives on host arrays go through mapped memory, and how, by what was measured.

`scripts/measure_host_collectives.py` compares with the MPI beneath: MPICH 5 with its copies from process to process, 2
ranks on 2 cores, and 4 ranks on the same 2. The reductions gain most: MPI's are bound by what they do between copies.
What only moves data is bound by memory in MPI as well, so there is little to gain, and much to lose: MPI copies from
memory to memory, the slots pass from cache to cache, which takes four times as long where two cores share none.
"""

from __future__ import annotations

_KIB = 1024
_MIB = 1024 * _KIB
_NEVER = 1 << 63

_MAPPED_FROM = {
    "Allreduce": (256 * _KIB, _MIB),
    "Reduce": (128 * _KIB, 128 * _KIB),
    "Reduce_scatter": (_MIB, 16 * _MIB),
    "Reduce_scatter_block": (_MIB, 16 * _MIB),
    "Scan": (256 * _KIB, 256 * _KIB),
    "Exscan": (128 * _KIB, 256 * _KIB),
    "Gather": (_NEVER, 256 * _KIB),
    "Scatter": (_NEVER, 256 * _KIB),
}
"""From how many bytes on mapped memory is used, with 2 ranks and with more. Other operations are MPI's at any size: in
Allgather, Alltoall and Bcast it copies once where mapped memory copies twice; in the rest ranks do not know how many
bytes others have."""

_TWO_SHOT_FROM = _MIB
_SHARD_NBYTES = _MIB


def least_mapped(operation: str) -> int:
    """Return from how many bytes on a collective may go through mapped memory, with any number of ranks. Local."""
    return min(_MAPPED_FROM.get(operation, (_NEVER,)))


def use_mapped(operation: str, nbytes: int, size: int) -> bool:
    """Return whether a collective of MPI's name ``operation`` goes through mapped memory. Local.

    ``nbytes`` is that of a rank's largest buffer, which has to be the same number on all ranks.
    """
    few, many = _MAPPED_FROM.get(operation, (_NEVER, _NEVER))
    return size > 1 and nbytes >= (few if size == 2 else many)


def piece_nbytes(operation: str, nbytes: int, size: int, *, forced: bool = False) -> int | None:
    """Return the size of the pieces of a two-shot collective, or None where one-shot is faster. Local.

    A piece has a shard for each rank, of a size that is still in the cache when the next step reads it.
    """
    if forced or (operation == "Allreduce" and nbytes >= _TWO_SHOT_FROM):
        return _SHARD_NBYTES * size
    return None
