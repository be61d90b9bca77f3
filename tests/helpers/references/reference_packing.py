"""Packing and unpacking by NumPy, byte by byte, in the order that a layout says; and regions to pack."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mpicomm.kernels.packing import PackTable, RegionEntry
from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.mpi.regions import Loop, Region

Bytes = npt.NDArray[np.uint8]
_PLACE = struct.Struct("=q")


def pack(layout: DatatypeLayout, memory: Bytes, at: int) -> Bytes:
    """Return the packed bytes of a layout whose buffer begins at index ``at`` of ``memory``.

    Its runs must fill packed memory, each byte once.
    """
    packed = np.zeros(layout.nbytes, np.uint8)
    starts, places = _bytes_of(layout)
    packed[places] = memory[at + starts]
    assert (np.bincount(places, minlength=layout.nbytes) == 1).all()
    return packed


def unpack(layout: DatatypeLayout, packed: Bytes, memory: Bytes, at: int) -> None:
    """Put packed bytes into the places of a layout."""
    starts, places = _bytes_of(layout)
    memory[at + starts] = packed[places]


def _bytes_of(layout: DatatypeLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the place of each byte of a layout in memory, and in packed memory."""
    starts, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for region in layout.regions:
        start, place = np.array([region.offset]), np.array([region.packed])
        for loop in region.loops:
            numbers = np.arange(loop.rounds)
            start = np.add.outer(start, loop.displacements() if loop.displs else numbers * loop.stride).ravel()
            place = np.add.outer(place, numbers * loop.packed).ravel()
        starts.append(np.add.outer(start, np.arange(region.run_nbytes)).ravel())
        places.append(np.add.outer(place, np.arange(region.run_nbytes)).ravel())
    return np.concatenate(starts), np.concatenate(places)


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


def region(
    offset: int,
    loops: Sequence[tuple[int, int] | Sequence[int]],
    run_nbytes: int,
    packed: int = 0,
    strides: Sequence[int] | None = None,
) -> Region:
    """Return a region. A loop is a tuple of its rounds and its stride, or a list of places.

    ``strides`` are the strides in packed memory; without them the runs follow each other.
    """
    made: list[Loop] = []
    stride = run_nbytes
    for number, loop in reversed(list(enumerate(loops))):
        step = stride if strides is None else strides[number]
        if isinstance(loop, tuple):
            made.insert(0, Loop(loop[0], loop[1], step))
        else:
            made.insert(0, Loop(len(loop), 0, step, np.array(loop, np.int64).tobytes()))
        stride = step * made[0].rounds
    return Region(offset, tuple(made), run_nbytes, packed)


def layout(*regions: Region) -> DatatypeLayout:
    """Return the layout of regions that follow each other in packed memory."""
    moved, packed = [], 0
    for each in regions:
        moved.append(each.moved(0, packed))
        packed += each.nbytes
    return DatatypeLayout(tuple(moved), 0, None)
