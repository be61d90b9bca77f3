"""Packing and unpacking by NumPy, byte by byte, in the order that a layout says."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mpicomm.kernels.packing import PackTable, RegionEntry
from mpicomm.mpi.layout import DatatypeLayout

Bytes = npt.NDArray[np.uint8]
_PLACE = struct.Struct("=q")


def pack(layout: DatatypeLayout, memory: Bytes, at: int) -> Bytes:
    """Return the packed bytes of a layout whose buffer begins at index ``at`` of ``memory``.

    Its runs must fill packed memory, each byte once.
    """
    packed, times = np.zeros(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    for start, place, nbytes in _runs(layout):
        packed[place : place + nbytes] = memory[at + start : at + start + nbytes]
        times[place : place + nbytes] += 1
    assert (times == 1).all()
    return packed


def unpack(layout: DatatypeLayout, packed: Bytes, memory: Bytes, at: int) -> None:
    """Put packed bytes into the places of a layout."""
    for start, place, nbytes in _runs(layout):
        memory[at + start : at + start + nbytes] = packed[place : place + nbytes]


def _runs(layout: DatatypeLayout) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a layout: the place of each in memory and in packed memory, and its bytes."""
    for region in layout.regions:
        rounds = [
            [
                (loop.listed().tolist()[number] if loop.places else number * loop.stride, number * loop.packed)
                for number in range(loop.rounds)
            ]
            for loop in region.loops
        ]
        for place in itertools.product(*rounds):
            start, packed = (sum(offsets) for offsets in zip(*place, (region.offset, region.packed), strict=True))
            yield start, packed, region.run_nbytes


def runs_of(table: PackTable) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a table: the place of each in memory and in packed memory, and its bytes."""
    entries = (RegionEntry * table.num_regions).from_buffer_copy(table.content)
    for entry in entries:
        for numbers in itertools.product(*map(range, list(entry.counts))):
            start, packed = entry.memory, entry.packed
            for loop, number in enumerate(numbers):
                start += number * entry.strides[loop]
                packed += number * entry.packed_strides[loop]
                if loop == entry.listed:
                    start += _PLACE.unpack_from(table.content, entry.list + _PLACE.size * number)[0]
            yield start % (1 << 64), packed, entry.run_nbytes
