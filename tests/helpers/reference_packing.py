"""Packing and unpacking by NumPy, byte by byte, in the order that a layout says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mpicomm.kernels.packing import PackTable, RegionEntry
from mpicomm.mpi.layout import Layout

Bytes = npt.NDArray[np.uint8]


def pack(layout: Layout, memory: Bytes, at: int) -> Bytes:
    """Return the packed bytes of a layout whose buffer begins at index ``at`` of ``memory``."""
    runs = [memory[at + start : at + stop] for start, stop in _runs(layout)]
    return np.concatenate([np.empty(0, np.uint8), *runs])


def unpack(layout: Layout, packed: Bytes, memory: Bytes, at: int) -> None:
    """Put packed bytes where a layout says."""
    taken = 0
    for start, stop in _runs(layout):
        memory[at + start : at + stop] = packed[taken : taken + stop - start]
        taken += stop - start


def _runs(layout: Layout) -> Iterator[tuple[int, int]]:
    for region in layout.regions:
        for place in itertools.product(*(range(count) for count, _ in region.loops)):
            strides = (stride for _, stride in region.loops)
            start = region.offset + sum(index * stride for index, stride in zip(place, strides, strict=True))
            yield start, start + region.run_nbytes


def runs_of(table: PackTable) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a table: where each lies in memory and in packed memory, and its bytes."""
    entries = (RegionEntry * table.num_regions).from_buffer_copy(table.content)
    for entry in entries:
        counts, strides = list(entry.counts)[::-1], list(entry.strides)[::-1]
        for number, place in enumerate(itertools.product(*map(range, counts))):
            start = entry.memory + sum(index * stride for index, stride in zip(place, strides, strict=True))
            yield start, entry.packed + number * entry.run_nbytes, entry.run_nbytes
