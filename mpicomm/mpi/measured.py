"""The regions of a datatype without a rule: MPI packs the number of each byte, and so shows where the bytes lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.mpi.regions import Region, Regions, at_blocks

_BYTE = (Region(0, (), 1),)


def regions_of(datatype: MPI.Datatype) -> Regions:
    """Return the regions of one element, in the order in which MPI packs them. Local.

    For a moment it takes as much host memory as the element spans.
    """
    if datatype.size == 0:
        return ()
    begin, nbytes = datatype.Get_true_extent()
    # The datatype need not be committed. mpi4py divides the memory by the extent to count the elements, so this copy
    # has the extent of the memory, and packs one element.
    alone = datatype.Create_resized(begin, nbytes).Commit()
    try:
        places = np.full(datatype.size, begin, np.int64)
        for digit in range((max(nbytes - 1, 1).bit_length() + 7) // 8):
            places += _packed(alone, begin, _digits(digit, nbytes)).astype(np.int64) << (8 * digit)
    finally:
        alone.Free()
    return at_blocks(_BYTE, 1, places.tolist(), [1] * len(places), 1)


def _digits(digit: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return one digit, to base 256, of each of the numbers from 0 to ``nbytes - 1``."""
    return np.resize(np.repeat(np.arange(256, dtype=np.uint8), min(256**digit, nbytes)), nbytes)


def _packed(datatype: MPI.Datatype, begin: int, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    packed = np.empty(datatype.Pack_size(1, MPI.COMM_SELF), np.uint8)
    element = MPI.memory.fromaddress(memory.ctypes.data - begin, memory.nbytes)
    end = datatype.Pack(element, packed, 0, MPI.COMM_SELF)
    assert end == datatype.size, "MPI packs more than the elements"
    return packed[:end]
