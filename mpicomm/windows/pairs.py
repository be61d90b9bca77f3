"""Pairs of a value and an index, the elements of MINLOC and MAXLOC."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.windows.buffers import TypedElements

OPERATIONS = {MPI.MINLOC.handle: "minloc", MPI.MAXLOC.handle: "maxloc"}
"""The operations on pairs, by MPI's handle."""
_VALUES = (
    (MPI.FLOAT_INT, "f4"),
    (MPI.DOUBLE_INT, "f8"),
    (MPI.LONG_INT, "i8"),
    (MPI.TWOINT, "i4"),
    (MPI.SHORT_INT, "i2"),
    (MPI.LONG_DOUBLE_INT, "g"),
)


def _dtype(datatype: MPI.Datatype, value: str) -> np.dtype[Any]:
    extent = datatype.Get_extent()[1]
    index_at = datatype.Get_true_extent()[1] - np.dtype("i4").itemsize
    names, formats, offsets = ["value", "index"], [value, "i4"], [0, index_at]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": extent})


@lru_cache
def _dtypes() -> dict[int, np.dtype[Any]]:
    """Return the dtypes of pairs by MPI's handle. Not at import, because MPI need not be initialised then."""
    return {datatype.handle: _dtype(datatype, value) for datatype, value in _VALUES}


@lru_cache
def kernel_types() -> dict[np.dtype[Any], str]:
    """Return the names of the types of pairs in accumulate.cu."""
    return {_dtype(datatype, value): f"pair_{value}" for datatype, value in _VALUES}


def as_pairs(elements: TypedElements) -> TypedElements:
    """Return elements of a datatype of pairs as consecutive pairs; all other elements as they are.

    MPI packs the gap out of a pair with a gap. An atomic update takes the word with the gap.
    """
    dtype = None if elements.datatype is None else _dtypes().get(elements.datatype.handle)
    if dtype is None:
        return elements
    return TypedElements(elements.count, dtype.itemsize, dtype, None, elements.datatype)


def combine(op: str, now: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """Replace each pair of ``now`` by the pair with the smaller or larger value; of equal values the smaller index."""
    first, other = now["value"], values["value"]
    wins = other < first if op == "minloc" else other > first
    wins |= (other == first) & (values["index"] < now["index"])
    now[wins] = values[wins]
