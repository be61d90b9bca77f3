"""Whether a product overlaps with its collective, and how it is cut: a pure function of facts that all ranks share.

The times come from a model with figures that were measured on H100s. A library computes a product tile by tile, and
each multiprocessor takes one tile at a time. So a product takes as many *waves* as each multiprocessor has tiles. The
library takes narrower tiles if they fit better. A cut that adds a wave costs more than the overlap saves, so cuts lie
at the rows that add none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Literal

from mpicomm.products.schedule import RowCut, is_possible

_TILE_ROWS = 128
_TILE_COLUMNS = {256: 1.0, 192: 1.05, 160: 1.05, 128: 1.1}
"""The columns of tiles, and the time for each column beside the time in the widest tile."""
_FLOPS_PER_US = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 12.0e6),
    **dict.fromkeys(("bfloat16", "float16"), 6.3e6),
    **dict.fromkeys(("float32", "complex64"), 0.36e6),
    **dict.fromkeys(("float64", "complex128"), 0.4e6),
}
"""The floating-point operations of a multiprocessor in a microsecond."""
_OTHER_FLOPS_PER_US = 0.05e6  # integers, which libraries multiply without tensor cores
_LINK_NBYTES_PER_US = 0.33e6
_MEMORY_NBYTES_PER_US = 2.6e6
_COLLECTIVE_US = 4.0  # the time of a collective of few bytes
_TURN_US = 6.0  # a join and a barrier between two products
_COPY_US = 8.0  # the time from a fork to the first byte, and the rest of an engine between two copies
_PRODUCT_US = 1.5  # each further product
_PULL_US = 2.0  # the first loads over a link
_SAVING = 0.98  # overlap has to pay by more than the model errs
_MAX_PARTS = 4

ProductKind = Literal["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]
_KINDS: tuple[ProductKind, ...] = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")


@dataclass(frozen=True)
class ProductProblem:
    """The facts of a call that all ranks share.

    ``rows``, ``inner`` and ``columns`` are the sizes of a rank's product, with the shards of all ranks.
    """

    kind: ProductKind
    dtype: str
    itemsize: int
    result_itemsize: int
    rows: int
    inner: int
    columns: int
    size: int
    multiprocessors: int
    link_speed: float
    """See `Domain.link_speed`."""

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row that travels."""
        if self.kind == "allgather_matmul":
            return self.inner * self.itemsize
        return self.columns * self.result_itemsize

    @property
    def shard_rows(self) -> int:
        """The rows of a shard; the most rows of a rank in an all-reduce."""
        return -(-self.rows // self.size)


@dataclass(frozen=True)
class OverlapChoice:
    """Whether and how a product overlaps with its collective, and the predicted times."""

    problem: ProductProblem
    cut: RowCut | None
    """None if the collective and the product run one after the other."""
    overlapped_us: float
    serial_us: float
    why: str = ""
    """The reason for the choice."""


def choose(problem: ProductProblem) -> OverlapChoice:
    """Choose for a call between several ranks. All ranks make the same choice."""
    hops = 2 if problem.kind == "matmul_allreduce" else 1
    nbytes = hops * (problem.size - 1) * problem.shard_rows * problem.row_nbytes
    collective_us = _COLLECTIVE_US + nbytes / (_LINK_NBYTES_PER_US * problem.link_speed)
    serial_us = _product_us(problem, problem.rows) + collective_us
    cuts = {"allgather_matmul": _gather_cuts, "matmul_reduce_scatter": _scatter_cuts, "matmul_allreduce": _reduce_cuts}
    overlapped_us, cut = min(cuts[problem.kind](problem), key=lambda each: each[0])
    why = f"the model says {overlapped_us:.0f} us with overlap, {serial_us:.0f} us one after the other"
    return OverlapChoice(problem, cut if overlapped_us < _SAVING * serial_us else None, overlapped_us, serial_us, why)


def describe(size: int, multiprocessors: int, link_speed: float) -> tuple[str, ...]:
    """Return from how many rows on products of a large layer overlap, as text for each call."""
    inner, columns = 8192, 7168
    found = []
    for kind in _KINDS:
        k, n = (inner, columns) if kind == "allgather_matmul" else (columns, inner)
        domain = size, multiprocessors, link_speed
        problems = (ProductProblem(kind, "bfloat16", 2, 2, 64 << step, k, n, *domain) for step in range(12))
        first = next((problem.rows for problem in problems if choose(problem).cut is not None), None)
        how = "one after the other" if first is None else f"overlap from {first} rows on"
        found.append(f"{kind}, bfloat16 [rows, {k}] x [{k}, {n}]: {how}")
    return tuple(found)


def _gather_cuts(problem: ProductProblem) -> list[tuple[float, RowCut]]:
    size, product_us = problem.size, cache(partial(_product_us, problem))

    def end_us(products: Iterable[tuple[int, int]]) -> float:
        at = 0.0
        for turn, rows in products:
            landed = (_TURN_US if turn else 0) + turn * _copy_us(problem, problem.shard_rows)
            at = max(at, landed) + _TURN_US + product_us(rows)
        return at

    found = [(end_us((turn, problem.shard_rows) for turn in range(size)), RowCut())]
    for nested in sorted(_nested(problem), reverse=True):  # of equal cuts the first products are the longest
        rows = (after - before for before, after in zip((0, *nested), nested, strict=False))
        end = end_us(((1 << level) - 1, each) for level, each in enumerate(rows))
        found.append((round(end, 3), RowCut(nested)))
    return found


def _nested(problem: ProductProblem) -> Iterator[tuple[int, ...]]:
    """Yield the possible nested cuts, if the number of ranks is a power of two."""
    rows, size = problem.shard_rows, problem.size
    if size & (size - 1):
        return
    levels = size.bit_length() - 1
    step = max(1, -(-rows // (_TILE_ROWS * _STEPS_OF_SHARD[levels]))) * _TILE_ROWS
    for inner in product(*([*range(step, rows << level, step), rows << level] for level in range(levels))):
        nested = (*inner, rows * size)
        if is_possible(RowCut(nested), size, rows):
            yield nested


_STEPS_OF_SHARD = {1: 64, 2: 16, 3: 4}
"""The most places of a cut in a shard, by the regions within all rows. Their product bounds the time of the search."""


def _scatter_cuts(problem: ProductProblem) -> list[tuple[float, RowCut]]:
    rows, size = problem.shard_rows, problem.size
    nbytes = rows * problem.row_nbytes
    reduction = (size + 1) * nbytes / _MEMORY_NBYTES_PER_US
    pulling = max(reduction, _PULL_US + nbytes / (_LINK_NBYTES_PER_US * problem.link_speed))
    tail = _TURN_US + _PRODUCT_US
    own, pair, copy = _product_us(problem, rows), _product_us(problem, 2 * rows), _copy_us(problem, rows)

    def end_us(product_us: float, products: int, copies: int) -> float:
        """Return the end of the last product, which copies nothing, and of the copies of all other products."""
        at = landed = _TURN_US
        for _ in range(products - 1):
            at += product_us
            landed = max(at, landed) + copies * copy
        return max(at + product_us, landed)

    found = [(end_us(own, size, 1) + tail + reduction, RowCut())]
    if size > 2 and size & (size - 1) == 0:
        found.append((end_us(pair, size // 2, 2) + tail + pulling, RowCut(pairs=True)))
    if size > 2:
        at = _TURN_US + _product_us(problem, rows * (size - 1))
        found.append((max(at + own, at + (size - 1) * copy) + tail + reduction, RowCut(merged=True)))
    return found


def _reduce_cuts(problem: ProductProblem) -> list[tuple[float, RowCut]]:
    found = []
    for parts in range(1, _MAX_PARTS + 1):
        rows = -(-problem.shard_rows // parts)
        nbytes = rows * problem.row_nbytes
        product, copy = _product_us(problem, rows), _copy_us(problem, rows)
        reduction = _PRODUCT_US + (problem.size + 1) * nbytes / _MEMORY_NBYTES_PER_US
        unloading = _PRODUCT_US + 2 * (problem.size - 1) * nbytes / _MEMORY_NBYTES_PER_US
        at = landed = _TURN_US
        for _ in range(parts):
            for _ in range(1, problem.size):
                at += product
                landed = max(at, landed) + copy
            at = max(at + product, landed) + _TURN_US + reduction
            landed = at + (problem.size - 1) * copy
            at += unloading
        found.append((max(at, landed + unloading) + _TURN_US, RowCut(parts=parts)))
    return found


def _product_us(problem: ProductProblem, rows: int) -> float:
    flops = _FLOPS_PER_US.get(problem.dtype, _OTHER_FLOPS_PER_US)
    waves_of_columns = min(
        -(-(-(-rows // _TILE_ROWS) * -(-problem.columns // columns)) // problem.multiprocessors) * columns * slower
        for columns, slower in _TILE_COLUMNS.items()
    )
    return waves_of_columns * 2.0 * _TILE_ROWS * problem.inner / flops + _PRODUCT_US


def _copy_us(problem: ProductProblem, rows: int) -> float:
    return _COPY_US + rows * problem.row_nbytes / (_LINK_NBYTES_PER_US * problem.link_speed)
