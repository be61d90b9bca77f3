"""Received: the rows that a dispatch has laid out for the experts of this rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpicomm.experts.arrays import new_array, pointer_of
from mpicomm.experts.shape import Shape

INT32, UINT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32)


@dataclass
class Received:
    """The tokens of all ranks for the experts of this rank. ``Experts.dispatch`` makes it.

    The arrays are of the library of the dispatched array, in the same place. On a GPU they are filled in stream order.
    """

    x: Any
    """Rows by expert: ``[capacity, hidden]``, of the dtype of the Experts or of ``wire_dtype``.

    Each slot of a token that names an expert of this rank has a row. CuPy has no floats of 8 bits, so its arrays have
    bytes instead.

    The rows of an expert follow each other: by the number of the token, then by its rank, then by slot. Rows between
    the end of an expert and the start of the next are zero. Rows behind the last expert keep their old content.
    """
    scales: Any
    """With ``wire_dtype`` the scales of the rows: float32 ``[capacity, hidden // 128]``; else None.

    A group of 128 elements is its floats of 8 bits, multiplied by its scale.
    """
    counts: Any
    """The number of rows of each expert of this rank: int32."""
    offsets: Any
    """The first row of each expert, then the end of the last: int32, multiples of ``alignment``."""
    sources: Any
    """The rank, the token and the slot of each row: int32 ``[capacity, 3]``; -1 in rows without a token."""
    weights: Any
    """The weight of each row: float32 ``[capacity]``; 0 in rows without a token."""
    places: Any
    """The row of each slot of each token of each rank, or -1: int32 ``[size, max_tokens, top_k]``."""
    targets: Any
    """The sets of ranks and of slots with an expert of each token of this rank: int32 ``[max_tokens, 2]``.

    Bit r stands for rank r, or for slot r.
    """
    tokens: Any
    """The number of tokens of each rank: int32."""
    num_tokens: int
    """The number of tokens of this rank."""
    on_device: bool

    @classmethod
    def empty(cls, shape: Shape, rank: int, like: Any, *, on_device: bool) -> Received:
        """Return new arrays of the library of ``like``. Local."""

        def new(dtype: np.dtype[Any], *dimensions: int) -> Any:
            return new_array(like, dimensions, dtype, on_device=on_device)

        experts = shape.experts_per_rank[rank]
        return cls(
            x=new(shape.row_dtype, shape.capacity, shape.hidden),
            scales=new(FLOAT32, shape.capacity, shape.scales) if shape.scales else None,
            counts=new(INT32, experts),
            offsets=new(INT32, experts + 1),
            sources=new(INT32, shape.capacity, 3),
            weights=new(FLOAT32, shape.capacity),
            places=new(INT32, shape.size, shape.max_tokens, shape.top_k),
            targets=new(INT32, shape.max_tokens, 2),
            tokens=new(INT32, shape.size),
            num_tokens=0,
            on_device=on_device,
        )

    @cached_property
    def pointers(self) -> dict[str, int]:
        """The addresses of the arrays, by their names."""
        names = ("x", "scales", "counts", "offsets", "sources", "weights", "places", "targets", "tokens")
        arrays = {name: getattr(self, name) for name in names}
        return {name: 0 if array is None else pointer_of(array) for name, array in arrays.items()}
