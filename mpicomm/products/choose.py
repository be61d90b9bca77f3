"""Whether a product overlaps with its collective, and how it is cut: a pure function of facts that all ranks share.

The times come from a model with figures that were measured on H100s. A library computes a product tile by tile, and
each multiprocessor takes one tile at a time. So a product takes as many *waves* as each multiprocessor has tiles. The
products of a gathered matrix, or of its partial sums, run on two lanes (schedule.py), so they share their last waves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpicomm.products.schedule import RowCut

_TILE_ROWS, _TILE_COLUMNS = 128, 256
_FLOPS_PER_US = {
    "float8_e4m3fn": 12.0e6,
    "float8_e5m2": 12.0e6,
    "bfloat16": 6.3e6,
    "float16": 6.3e6,
    "float32": 0.36e6,
    "float64": 0.4e6,
    "complex64": 0.36e6,
    "complex128": 0.4e6,
}
"""The floating-point operations of a multiprocessor in a microsecond."""
_OTHER_FLOPS_PER_US = 0.05e6  # integers, which libraries multiply without tensor cores
_LINK_NBYTES_PER_US = 0.33e6
_MEMORY_NBYTES_PER_US = 2.6e6
_COLLECTIVE_US = 4.0  # the time of a collective of few bytes
_TURN_US = 6.0  # a join and a barrier between two products
_COPY_US = 8.0  # the time from a fork to the first byte, and the rest of an engine between two copies
_PRODUCT_US = 1.5  # each further product
_SAVING = 0.98  # overlap has to pay by more than the model errs
_MOST_PARTS = 4

Kind = Literal["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]
_KINDS: tuple[Kind, ...] = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")


@dataclass(frozen=True)
class Facts:
    """The facts of a call in which all ranks agree. ``rows``, ``inner`` and ``columns`` are the sizes of a product on
    one rank: all rows, also of the shards of other ranks."""

    kind: Kind
    dtype: str
    itemsize: int
    result_itemsize: int
    rows: int
    inner: int
    columns: int
    size: int
    multiprocessors: int
    link_speed: float
    """See `Node.link_speed`."""

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
class ProductWay:
    """The way of a call, and the predicted times."""

    facts: Facts
    cut: RowCut | None
    """None if the collective and the product run one after the other."""
    overlapped_us: float
    serial_us: float
    memory_is_short: bool = False

    @property
    def why(self) -> str:
        """The reason for the choice as text."""
        if self.memory_is_short:
            return "the data on its way would take more memory of the GPU than the communicator may take"
        return f"the model says {self.overlapped_us:.0f} us with overlap, {self.serial_us:.0f} us one after the other"


def choose(facts: Facts) -> ProductWay:
    """Return the way of a call between several ranks."""
    serial_us = _product_us(facts, [facts.rows]) + _collective_us(facts)
    cuts = {"allgather_matmul": _gather_cuts, "matmul_reduce_scatter": _scatter_cuts, "matmul_allreduce": _reduce_cuts}
    overlapped_us, cut = min(cuts[facts.kind](facts), key=lambda each: each[0])
    return ProductWay(facts, cut if overlapped_us < _SAVING * serial_us else None, overlapped_us, serial_us)


def describe(size: int, multiprocessors: int, link_speed: float) -> tuple[str, ...]:
    """Return from how many rows on products of a large layer overlap, as text for each call."""
    inner, columns = 8192, 7168
    found = []
    for kind in _KINDS:
        k, n = (inner, columns) if kind == "allgather_matmul" else (columns, inner)
        shapes = (
            Facts(kind, "bfloat16", 2, 2, 64 << step, k, n, size, multiprocessors, link_speed) for step in range(12)
        )
        first = next((facts.rows for facts in shapes if choose(facts).cut is not None), None)
        way = "one after the other" if first is None else f"overlap from {first} rows on"
        found.append(f"{kind}, bfloat16 [rows, {k}] x [{k}, {n}]: {way}")
    return tuple(found)


def _gather_cuts(facts: Facts) -> list[tuple[float, RowCut]]:
    rows, size = facts.shard_rows, facts.size
    wholes = [rows]
    if size == 2:  # only between two ranks the rest of a shard certainly lies beside the next shard
        wholes += [own for own in range(rows // _TILE_ROWS * _TILE_ROWS, rows // 2, -_TILE_ROWS) if own < rows]
    arrival = [_TURN_US, *(2 * _TURN_US + turn * _copy_us(facts, rows) for turn in range(1, size))]
    found = [
        (_end_us(facts, [(arrival[0], own), (arrival[-1], rows * size - own)]), RowCut(own, merged=True))
        for own in wholes
    ]
    if size > 2:
        found.append((_end_us(facts, [(each, rows) for each in arrival]), RowCut(rows, merged=False)))
    return found


def _end_us(facts: Facts, pieces: list[tuple[float, int]]) -> float:
    """Return the end of products on two lanes. ``pieces`` have the times at which each can begin, and its rows."""
    ends = (begin + _product_us(facts, [rows for _, rows in pieces[at:]]) for at, (begin, _) in enumerate(pieces))
    return max(ends)


def _scatter_cuts(facts: Facts) -> list[tuple[float, RowCut]]:
    rows, size = facts.shard_rows, facts.size
    nbytes = rows * facts.row_nbytes
    tail = _TURN_US + _PRODUCT_US + (size + 1) * nbytes / _MEMORY_NBYTES_PER_US
    copy = _copy_us(facts, rows)
    landed = _TURN_US
    for products in range(1, size):
        landed = max(_TURN_US + _product_us(facts, [rows] * products), landed) + copy
    found = [(max(_TURN_US + _product_us(facts, [rows] * size), landed) + tail, RowCut(rows, merged=False))]
    if size > 2:
        at = _TURN_US + _product_us(facts, [rows * (size - 1)])
        own = _product_us(facts, [rows])
        found.append((max(at + own, at + (size - 1) * copy) + tail, RowCut(rows, merged=True)))
    return found


def _reduce_cuts(facts: Facts) -> list[tuple[float, RowCut]]:
    found = []
    for parts in range(1, _MOST_PARTS + 1):
        rows = -(-facts.shard_rows // parts)
        nbytes = rows * facts.row_nbytes
        product, copy = _product_us(facts, [rows]), _copy_us(facts, rows)
        reduction = _PRODUCT_US + (facts.size + 1) * nbytes / _MEMORY_NBYTES_PER_US
        unloading = _PRODUCT_US + 2 * (facts.size - 1) * nbytes / _MEMORY_NBYTES_PER_US
        at = landed = _TURN_US
        for _ in range(parts):
            for _ in range(1, facts.size):
                at += product
                landed = max(at, landed) + copy
            at = max(at + product, landed) + _TURN_US + reduction
            landed = at + (facts.size - 1) * copy
            at += unloading
        found.append((max(at, landed + unloading) + _TURN_US, RowCut(rows, merged=False, parts=parts)))
    return found


def _product_us(facts: Facts, pieces: list[int]) -> float:
    """Return the time of products that share their last waves."""
    flops = _FLOPS_PER_US.get(facts.dtype, _OTHER_FLOPS_PER_US)
    wave_us = 2.0 * _TILE_ROWS * _TILE_COLUMNS * facts.inner / flops
    tiles = sum(-(-rows // _TILE_ROWS) * -(-facts.columns // _TILE_COLUMNS) for rows in pieces)
    return -(-tiles // facts.multiprocessors) * wave_us + len(pieces) * _PRODUCT_US


def _copy_us(facts: Facts, rows: int) -> float:
    return _COPY_US + rows * facts.row_nbytes / (_LINK_NBYTES_PER_US * facts.link_speed)


def _collective_us(facts: Facts) -> float:
    hops = 2 if facts.kind == "matmul_allreduce" else 1
    nbytes = hops * (facts.size - 1) * facts.shard_rows * facts.row_nbytes
    return _COLLECTIVE_US + nbytes / (_LINK_NBYTES_PER_US * facts.link_speed)
