"""The configuration of an Experts object, and the arrays of its calls."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.experts import FEW_TOKENS, GROUP, MAX_EXPERTS, MAX_TOP_K
from mpicomm.kernels.team import PACKET_NBYTES
from mpicomm.mpi.buffers import new_array, read
from mpicomm.mpi.types import named_dtype

DTYPES = ("float32", "float16", "bfloat16")
WIRE = "float8_e4m3fn"
BY_EXPERT, BY_TOKEN = LAYOUTS = ("experts", "tokens")
_SCALE_NBYTES = 4
_HIDDEN_OF_WIRE = 4 * GROUP  # the scales of a row are whole packets
_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class ExpertsConfig:
    """The numbers of an Experts object, the same on all ranks."""

    experts_per_rank: tuple[int, ...]
    hidden: int
    max_tokens: int
    top_k: int
    dtype: np.dtype[Any]
    capacity: int
    alignment: int
    blocks: int | None
    by_token: bool = False
    """Whether a token has one row on a rank, and not one for each of its experts there."""
    wire: np.dtype[Any] | None = None
    """The type in which rows travel, with scales; None for `dtype`, without scales."""
    max_few: int = FEW_TOKENS
    """Ranks with at most so many tokens use the low-latency kernels."""

    @property
    def in_packets(self) -> bool:
        """Whether rows travel as packets: in the layout by token, if no rank ever has many tokens."""
        return self.by_token and self.max_tokens <= self.max_few

    @property
    def scales(self) -> int:
        """The number of scales of a row."""
        return 0 if self.wire is None else self.hidden // GROUP

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The type of the elements of a row."""
        return self.wire or self.dtype

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.experts_per_rank)

    @property
    def num_experts(self) -> int:
        """The number of experts of all ranks."""
        return sum(self.experts_per_rank)

    @property
    def places(self) -> int:
        """The number of places of pairs by expert."""
        return self.max_places if self.by_token else self.capacity

    @property
    def max_places(self) -> int:
        """The most places that pairs and padding take."""
        return self.size * self.max_tokens * self.top_k + max(self.experts_per_rank) * (self.alignment - 1)

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row of a dispatch."""
        return self.hidden * self.row_dtype.itemsize + self.scales * _SCALE_NBYTES

    @property
    def sum_nbytes(self) -> int:
        """The bytes of a row of a combine."""
        return self.hidden * self.dtype.itemsize

    @property
    def few_tokens(self) -> int:
        """Ranks with at most so many tokens use the low-latency kernels; at most ``max_tokens``."""
        return min(self.max_few, self.max_tokens)

    @property
    def recv_slots(self) -> int:
        """The receive slots reserved for each source rank: *recv_slots* in experts.cuh."""
        return 2 * self.few_tokens + (self.max_tokens if self.max_tokens > self.few_tokens else 0)

    @property
    def firsts(self) -> list[int]:
        """The first expert of each rank, then the number of experts."""
        return [0, *accumulate(self.experts_per_rank)]


def checked_config(
    size: int,
    num_experts: int | Sequence[int],
    hidden: int,
    max_tokens: int,
    top_k: int,
    dtype: Any,
    capacity: int | None,
    alignment: int,
    blocks: int | None,
    layout: Any = BY_EXPERT,
    wire_dtype: Any = None,
) -> ExpertsConfig:
    """Return the configuration of an Experts object of ``size`` ranks. Local.

    Raises `InvalidUsageError` for numbers that cannot work.
    """
    experts = _experts_per_rank(num_experts, size)
    element = checked_dtype(dtype, "Experts")
    hidden, max_tokens, top_k = (
        _number(value, name, 1) for value, name in ((hidden, "hidden"), (max_tokens, "max_tokens"), (top_k, "top_k"))
    )
    alignment = _number(alignment, "alignment", 1)
    if blocks is not None:
        blocks = _number(blocks, "blocks", 2)
    if hidden * element.itemsize % PACKET_NBYTES:
        raise InvalidUsageError(
            f"Experts: a row of hidden={hidden} elements of {element.name} has {hidden * element.itemsize} bytes: pass "
            f"a hidden whose rows are a multiple of {PACKET_NBYTES} bytes"
        )
    wire = None
    if wire_dtype is not None:
        wire = named_dtype(wire_dtype)
        if wire is None or wire.name != WIRE:
            raise InvalidUsageError(f"Experts: wire_dtype={wire_dtype!r}: pass {WIRE}, or leave it out")
        if hidden % _HIDDEN_OF_WIRE:
            raise InvalidUsageError(
                f"Experts: hidden={hidden} with wire_dtype={WIRE}: pass a multiple of {_HIDDEN_OF_WIRE}"
            )
    if top_k > MAX_TOP_K:
        raise InvalidUsageError(f"Experts: top_k={top_k}: pass {MAX_TOP_K} or less")
    if layout not in LAYOUTS:
        raise InvalidUsageError(f"Experts: layout={layout!r}: pass one of {', '.join(LAYOUTS)}")
    by_token = layout == BY_TOKEN
    rows = 1 if capacity is None else _number(capacity, "capacity", 1)
    config = ExpertsConfig(experts, hidden, max_tokens, top_k, element, rows, alignment, blocks, by_token, wire)
    if capacity is None:
        capacity = size * max_tokens if by_token else config.max_places
        config = replace(config, capacity=capacity)
    if max(config.max_places, config.capacity) > _MAX_ROWS:
        raise InvalidUsageError(
            f"Experts: max_tokens={max_tokens}, top_k={top_k} and capacity={capacity} on {size} ranks are more than "
            f"{_MAX_ROWS} rows: pass smaller numbers"
        )
    return config


def _experts_per_rank(num_experts: int | Sequence[int], size: int) -> tuple[int, ...]:
    if isinstance(num_experts, Sequence):
        experts = tuple(_number(count, "num_experts", 0) for count in num_experts)
        if len(experts) != size:
            raise InvalidUsageError(
                f"Experts: num_experts={list(experts)} has {len(experts)} numbers: pass one for each of {size} ranks"
            )
    else:
        each, rest = divmod(_number(num_experts, "num_experts", 1), size)
        experts = tuple(each + (rank < rest) for rank in range(size))
    if not 1 <= sum(experts) <= MAX_EXPERTS:
        raise InvalidUsageError(f"Experts: num_experts={sum(experts)}: pass 1 to {MAX_EXPERTS}")
    return experts


def checked_dtype(dtype: Any, what: str) -> np.dtype[Any]:
    """Return one of `DTYPES`, by its name or as a dtype of NumPy or PyTorch. Raises `InvalidUsageError`. Local."""
    known = named_dtype(dtype)
    if known is None or known.name not in DTYPES:
        raise InvalidUsageError(f"{what}: dtype={dtype!r}: pass one of {', '.join(DTYPES)}")
    return known


def _number(value: Any, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidUsageError(f"Experts: {name}={value!r} is no int") from None
    if number < least:
        raise InvalidUsageError(f"Experts: {name}={number}: pass {least} or more")
    return number


INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def pointer_of(array: Any) -> int:
    """Return the address of an array that `new_array` has made."""
    return read(array, True, "array").pointer


def host_view(array: Any) -> npt.NDArray[Any]:
    """Return a C-contiguous array in host memory as a NumPy array."""
    memory = read(array, False, "array")
    assert memory.dtype is not None
    shape: tuple[int, ...] = tuple(array.shape)
    return array_at(memory.pointer, math.prod(shape), memory.dtype, array).reshape(shape)


@dataclass
class Received:
    """The tokens of all ranks for the experts of this rank. ``Experts.dispatch`` makes it.

    The arrays are of the library of the dispatched array, in the same place. On a GPU they are filled in stream order.
    """

    x: Any
    """Rows: ``[capacity, hidden]``, of the dtype of the Experts or of ``wire_dtype``.

    CuPy has no fp8, so its arrays have bytes instead.

    In the layout by expert each place has a row, and padding is zero. In the layout by token each token with an expert
    of this rank has one row, in the order of token numbers, then of ranks. Rows behind the last keep their old content.
    """
    scales: Any
    """With ``wire_dtype`` the scales of the rows: float32 ``[capacity, hidden // 128]``; else None.

    A group of 128 elements is its fp8 values, multiplied by their scale.
    """
    counts: Any
    """The number of places of each expert of this rank: int32.

    Each slot of a token that names an expert of this rank has a place. The places of an expert are contiguous: in the
    order of token numbers, then of ranks, then of slots.
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
    """Two bitmaps for each token of this rank: int32 ``[max_tokens, 2]``.

    Bit r of the first stands for an expert on rank r, bit s of the second for an expert in slot s.
    """
    tokens: Any
    """The number of tokens of each rank: int32."""
    num_tokens: int
    """The number of tokens of this rank."""
    on_device: bool
    rows: Any = None
    """In the layout by token the row of each place: int32 ``[places]``, -1 in places without a token.

    A grouped GEMM gathers its rows by it.
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
    def empty(cls, config: ExpertsConfig, rank: int, like: Any, *, on_device: bool) -> Received:
        """Return new arrays of the library of ``like``. Local."""

        def new(dtype: np.dtype[Any], *dimensions: int) -> Any:
            return new_array(like, dimensions, dtype, on_device=on_device)

        experts = config.experts_per_rank[rank]
        of_tokens = {}
        if config.by_token:
            of_tokens = {
                "rows": new(INT32, config.places),
                "topk_ids": new(INT32, config.capacity, config.top_k),
                "topk_weights": new(FLOAT32, config.capacity, config.top_k),
                "token_rows": new(INT32, config.size, config.max_tokens),
                "row_count": new(INT32, 1),
            }
        return cls(
            x=new(config.row_dtype, config.capacity, config.hidden),
            scales=new(FLOAT32, config.capacity, config.scales) if config.scales else None,
            counts=new(INT32, experts),
            offsets=new(INT32, experts + 1),
            sources=new(INT32, config.places, 3),
            weights=new(FLOAT32, config.places),
            places=new(INT32, config.size, config.max_tokens, config.top_k),
            targets=new(INT32, config.max_tokens, 2),
            tokens=new(INT32, config.size),
            num_tokens=0,
            on_device=on_device,
            **of_tokens,
        )

    @cached_property
    def pointers(self) -> dict[str, int]:
        """The addresses of the arrays, by their names."""
        names = {each.name for each in fields(self)} - {"num_tokens", "on_device"}
        arrays = {name: getattr(self, name) for name in names}
        return {name: 0 if array is None else pointer_of(array) for name, array in arrays.items()}
