"""A collective on derived datatypes as a collective on packed memory, which one launch packs and another unpacks.

MPI lets the ranks of a call use datatypes of different layout if they name the same basic elements. Packed memory holds
these elements one after the other. So all algorithms serve all datatypes, and ranks with plain arrays can meet ranks
with derived datatypes. If each block of a buffer is one run of bytes, nothing is packed, and the buffer stays in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpicomm.collectives.pack_tables import PackJob
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.layout import Elements

_ALIGNED_NBYTES = 256


@dataclass(frozen=True)
class Packed:
    """The buffers of a call. Buffers with gaps in a block lie in scratch memory; their pointers are offsets."""

    send: Operand | None
    receive: Operand | None
    nbytes: int
    """The bytes of scratch memory."""
    before: tuple[PackJob, ...]
    """The elements that are packed before the collective."""
    after: tuple[PackJob, ...]
    """The elements that are unpacked after it."""

    @classmethod
    def of(
        cls, send: Operand | None, receive: Operand | None, *, input_in_receive: bool, receives: bool, as_bytes: bool
    ) -> Packed | None:
        """Return the call on packed memory; None if no buffer has a derived datatype.

        ``input_in_receive`` is whether this rank's input lies in its receive buffer. ``receives`` is whether this rank
        receives into that buffer. ``as_bytes`` is for calls in which each pair of ranks may use other types.
        """
        given = [operand for operand in (send, receive) if operand is not None]
        if not any(operand.derived for operand in given):
            return None
        dtype = types.BYTE if as_bytes else _common_dtype(given)
        packed_send, sent, nbytes = _pack(send, dtype, 0)
        packed_receive, received, nbytes = _pack(receive, dtype, nbytes)
        before = (*sent, *(received if input_in_receive else ()))
        return cls(packed_send, packed_receive, nbytes, before, received if receives else ())

    def placed(self, scratch: int) -> tuple[Operand | None, Operand | None]:
        """Return the buffers. Packed buffers get addresses in the memory at ``scratch``."""
        send, receive = (
            operand
            if operand is None or operand.derived is None
            else replace(operand, pointer=operand.pointer + scratch)
            for operand in (self.send, self.receive)
        )
        return send, receive


def _common_dtype(operands: list[Operand]) -> np.dtype[Any]:
    """Return the type of all basic elements; ``types.BYTE`` if there are several types."""
    found: set[np.dtype[Any]] = set()
    for operand in operands:
        if operand.derived is None:
            assert operand.dtype is not None
            found.add(operand.dtype)
        else:
            found.update(block.layout.dtype or types.BYTE for block in operand.derived)
    return found.pop() if len(found) == 1 else types.BYTE


def _pack(operand: Operand | None, dtype: np.dtype[Any], at: int) -> tuple[Operand | None, tuple[PackJob, ...], int]:
    """Return an operand in elements of ``dtype``, the jobs that pack it from offset ``at`` on, and the next offset."""
    if operand is None:
        return None, (), at
    if operand.derived is None:
        assert operand.dtype is not None
        return _rescaled(operand, operand.dtype.itemsize // dtype.itemsize, dtype), (), at
    lengths = [block.layout.nbytes for block in operand.derived]
    if all(block.layout.is_run for block in operand.derived):
        starts = [block.address + block.layout.begin - operand.pointer for block in operand.derived]
        in_place = replace(operand, derived=None)
        return _in_elements(in_place, lengths, starts, dtype), (), at
    places, end = dict[Elements, int](), 0
    for block, nbytes in zip(operand.derived, lengths, strict=True):
        if block not in places:  # the same elements for several ranks are packed once
            places[block] = end
            end += nbytes
    starts = [places[block] for block in operand.derived]
    jobs = tuple(
        PackJob(block.address, block.layout, at + start) for block, start in places.items() if block.layout.regions
    )
    packed = _in_elements(replace(operand, pointer=at), lengths, starts, dtype)
    return packed, jobs, at + -(-end // _ALIGNED_NBYTES) * _ALIGNED_NBYTES


def _in_elements(operand: Operand, lengths: Sequence[int], starts: Sequence[int], dtype: np.dtype[Any]) -> Operand:
    """Return an operand with blocks of ``lengths`` bytes, ``starts`` bytes from its pointer on, in elements."""
    if any(start % dtype.itemsize for start in starts):
        dtype = types.BYTE  # an extent need not be a multiple of the elements
    counts, displs = (tuple(number // dtype.itemsize for number in numbers) for numbers in (lengths, starts))
    total = sum(counts)
    if operand.counts is not None:
        return replace(operand, dtype=dtype, count=total, total=total, counts=counts, displs=displs)
    parts = operand.total // operand.count if operand.count else 1
    return replace(operand, pointer=operand.pointer + starts[0], dtype=dtype, count=total // parts, total=total)


def _rescaled(operand: Operand, factor: int, dtype: np.dtype[Any]) -> Operand:
    if factor == 1:
        return replace(operand, dtype=dtype)
    counts, displs = (
        None if numbers is None else tuple(number * factor for number in numbers)
        for numbers in (operand.counts, operand.displs)
    )
    return replace(
        operand, dtype=dtype, count=operand.count * factor, total=operand.total * factor, counts=counts, displs=displs
    )
