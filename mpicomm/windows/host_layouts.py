"""TypedElements of derived datatypes in host memory, packed and unpacked by NumPy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.host import array_at
from mpicomm.mpi.layout import DatatypeLayout

_BYTE = np.dtype(np.uint8)


def gather(layout: DatatypeLayout, memory: int, packed: int) -> None:
    """Pack elements, which lie from ``memory`` on, to ``packed``."""
    array_at(packed, layout.nbytes, _BYTE)[:] = _reached(layout, memory)[_places_of(layout)]


def scatter(layout: DatatypeLayout, memory: int, packed: int) -> None:
    """Unpack elements from ``packed`` to their places from ``memory`` on."""
    _reached(layout, memory)[_places_of(layout)] = array_at(packed, layout.nbytes, _BYTE)


def _reached(layout: DatatypeLayout, memory: int) -> npt.NDArray[np.uint8]:
    return array_at(memory + layout.begin, layout.end - layout.begin, _BYTE)


@lru_cache(maxsize=16)  # a place takes eight bytes
def _places_of(layout: DatatypeLayout) -> npt.NDArray[np.int64]:
    """Return the place of each packed byte, in bytes from the first byte that the elements touch."""
    places = np.empty(layout.nbytes, np.int64)
    for region in layout.regions:
        begins: Any = np.array([region.offset - layout.begin])
        packed: Any = np.array([region.packed])
        for loop in region.loops:
            rounds = np.arange(loop.rounds)
            steps = loop.listed() if loop.places else rounds * loop.stride
            begins = (begins[:, None] + steps).ravel()
            packed = (packed[:, None] + rounds * loop.packed).ravel()
        run = np.arange(region.run_nbytes)
        places[(packed[:, None] + run).ravel()] = (begins[:, None] + run).ravel()
    return places
