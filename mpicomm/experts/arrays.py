"""Arrays of a call: their memory, new arrays of the same library, and those that a dispatch fills."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.experts.shape import Shape
from mpicomm.mpi.buffers import read

ARRAYS = (
    *("x", "scales", "counts", "offsets", "sources", "weights", "places", "targets", "tokens"),
    *("rows", "topk_ids", "topk_weights", "token_rows", "row_count"),
)
INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


# The class is not frozen, because every call makes some, and a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class GivenArray:
    """A C-contiguous array, read once."""

    array: Any
    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    on_device: bool
    device: int | None

    def on_host(self) -> npt.NDArray[Any]:
        """Return host memory as a NumPy array."""
        return _view(self.pointer, self.shape, self.dtype, self.array)


def read_array(
    array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], *, writable: bool = False
) -> GivenArray:
    """Read the argument ``name``. Raises `InvalidUsageError` unless it has one of the dtypes and the shape.

    None as the first length of ``shape`` stands for any length.
    """
    flags = getattr(array, "flags", None)
    in_order = array.is_contiguous() if hasattr(array, "is_contiguous") else flags is None or flags.c_contiguous
    if not in_order:
        raise InvalidUsageError(f"{name} of shape {tuple(array.shape)} is not C-contiguous: copy it first")
    memory = read(array, writable, name)
    found = tuple(array.shape)
    if found != shape and (shape[0] is not None or found[1:] != shape[1:] or not found):
        wanted = ", ".join("tokens" if length is None else str(length) for length in shape)
        raise InvalidUsageError(f"{name} has shape {found}: pass one of shape ({wanted}{',' * (len(shape) == 1)})")
    if memory.dtype is None or name_of(memory.dtype) not in dtypes:
        raise InvalidUsageError(f"{name} has dtype {memory.dtype or array.dtype}: pass one of {', '.join(dtypes)}")
    return GivenArray(array, memory.pointer, found, memory.dtype, memory.on_device, memory.device)


@lru_cache  # a NumPy type takes some microseconds to name
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a type."""
    return str(dtype.name)


def new_array(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, on_device: bool) -> Any:
    """Return a new array of the library of ``like``, in the same place. Other libraries than PyTorch get CuPy's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.device)
    if on_device:
        # The backend of a GPU has imported CuPy, which has no floats of 8 bits.
        return sys.modules["cupy"].empty(shape, dtype if name_of(dtype) != "float8_e4m3fn" else np.uint8)
    return np.empty(shape, dtype)


def pointer_of(array: Any) -> int:
    """Return the address of an array that `new_array` has made."""
    return read(array, True, "array").pointer


def host_view(array: Any) -> npt.NDArray[Any]:
    """Return an array of `new_array` in host memory as a NumPy array."""
    memory = read(array, True, "array")
    assert memory.dtype is not None
    return _view(memory.pointer, tuple(array.shape), memory.dtype, array)


def _view(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> npt.NDArray[Any]:
    # NumPy's array interface has no name for bfloat16.
    nbytes = math.prod(shape) * dtype.itemsize
    return array_at(pointer, nbytes, np.dtype(np.uint8), owner).view(dtype).reshape(shape)


@dataclass
class Received:
    """The tokens of all ranks for the experts of this rank. ``Experts.dispatch`` makes it.

    The arrays are of the library of the dispatched array, in the same place. On a GPU they are filled in stream order.
    """

    x: Any
    """Rows: ``[capacity, hidden]``, of the dtype of the Experts or of ``wire_dtype``.

    CuPy has no floats of 8 bits, so its arrays have bytes instead.

    In the layout by expert each place has a row. Rows between the end of an expert and the start of the next are zero.
    In the layout by token each token with an expert here has one row, by the number of the token, then by its rank.
    Rows behind the last keep their old content.
    """
    scales: Any
    """With ``wire_dtype`` the scales of the rows: float32 ``[capacity, hidden // 128]``; else None.

    A group of 128 elements is its floats of 8 bits, multiplied by its scale.
    """
    counts: Any
    """The number of places of each expert of this rank: int32.

    Each slot of a token that names an expert of this rank has a place. The places of an expert follow each other: by
    the number of the token, then by its rank, then by slot.
    """
    offsets: Any
    """The first place of each expert, then the end of the last: int32, multiples of ``alignment``."""
    sources: Any
    """The rank, the token and the slot of each place: int32 ``[places, 3]``; -1 in places without a token.

    In the layout by expert there are ``capacity`` places. In the layout by token there are as many as may be needed.
    """
    weights: Any
    """The weight of each place: float32 ``[places]``; 0 in places without a token."""
    places: Any
    """The place of each slot of each token of each rank, or -1: int32 ``[size, max_tokens, top_k]``."""
    targets: Any
    """The sets of ranks and of slots with an expert of each token of this rank: int32 ``[max_tokens, 2]``.

    Bit r stands for rank r, or for slot r.
    """
    tokens: Any
    """The number of tokens of each rank: int32."""
    num_tokens: int
    """The number of tokens of this rank."""
    on_device: bool
    rows: Any = None
    """In the layout by token the row of each place: int32 ``[places]``, -1 in places without a token.

    A grouped product gathers its rows by it.
    """
    topk_ids: Any = None
    """In the layout by token the experts of each row: int32 ``[capacity, top_k]``.

    Experts count from the first expert of this rank. A slot with an expert of another rank, or with none, has -1.
    """
    topk_weights: Any = None
    """In the layout by token the weights of these slots: float32 ``[capacity, top_k]``, 0 where the id is -1."""
    token_rows: Any = None
    """In the layout by token the row of each token of each rank, or -1: int32 ``[size, max_tokens]``."""
    row_count: Any = None
    """In the layout by token the number of rows: int32 ``[1]``."""

    @classmethod
    def empty(cls, shape: Shape, rank: int, like: Any, *, on_device: bool) -> Received:
        """Return new arrays of the library of ``like``. Local."""

        def new(dtype: np.dtype[Any], *dimensions: int) -> Any:
            return new_array(like, dimensions, dtype, on_device=on_device)

        experts = shape.experts_per_rank[rank]
        of_tokens = {}
        if shape.by_token:
            of_tokens = {
                "rows": new(INT32, shape.places),
                "topk_ids": new(INT32, shape.capacity, shape.top_k),
                "topk_weights": new(FLOAT32, shape.capacity, shape.top_k),
                "token_rows": new(INT32, shape.size, shape.max_tokens),
                "row_count": new(INT32, 1),
            }
        return cls(
            x=new(shape.row_dtype, shape.capacity, shape.hidden),
            scales=new(FLOAT32, shape.capacity, shape.scales) if shape.scales else None,
            counts=new(INT32, experts),
            offsets=new(INT32, experts + 1),
            sources=new(INT32, shape.places, 3),
            weights=new(FLOAT32, shape.places),
            places=new(INT32, shape.size, shape.max_tokens, shape.top_k),
            targets=new(INT32, shape.max_tokens, 2),
            tokens=new(INT32, shape.size),
            num_tokens=0,
            on_device=on_device,
            **of_tokens,
        )

    @cached_property
    def pointers(self) -> dict[str, int]:
        """The addresses of the arrays, by their names."""
        arrays = ((name, getattr(self, name)) for name in ARRAYS)
        return {name: 0 if array is None else pointer_of(array) for name, array in arrays}
