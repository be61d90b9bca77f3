"""The kernels of a mixture of experts: their arguments and the layout of their memory. Imports no CUDA package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from mpicomm.kernels.reductions import cpp_name, options_for
from mpicomm.kernels.team import HEAD_NBYTES, LANES, LINE_NBYTES, MAX_BLOCKS, MAX_RANKS, Team
from mpicomm.kernels.variant import SHARED, Variant, u32, u64

# Constants of the kernels and of faults.cuh; a test compares them.
DISPATCH_THREADS = 384
SUM_THREADS = 256
QUANTIZE_THREADS = 384
MOST_EXPERTS = 512
MOST_TOP_K = 32
DISPATCH, COMBINE, ROUTES, ROOM = 9, 10, 11, 12
"""The operations of experts in ``enum Operation``."""

BLOCKS_OF_A_MULTIPROCESSOR = 2  # of __launch_bounds__ of both kernels
PACKET_NBYTES = 16
_WORD_NBYTES = 8
_HEADS = 2  # kHeads in experts.cuh
FEW_TOKENS = 256
"""Up to so many tokens of a rank a launch is in the mode of low latency."""
GROUP = 128
"""The number of elements that share a scale."""
_LANES_OF_A_GROUP = 16
PART_PACKETS = 4
_PART_NBYTES = PART_PACKETS * LANES * PACKET_NBYTES
"""The most bytes of a row that a warp moves at once."""


class ExpertsArguments(ctypes.Structure):
    """The host's copy of ``Experts`` in experts.cuh."""

    _fields_ = [
        ("team", Team),
        *u64("routes", "row_flags", "rows", "sum_flags", "sums"),
        *u64("values", "counted", "histograms", "row_nbytes", "part_nbytes"),
        *u32("parts", "max_tokens", "few_tokens", "seats", "top_k", "senders", "unused"),
        ("firsts", ctypes.c_uint32 * (MAX_RANKS + 1)),
    ]


class TwoArrays(ctypes.Structure):
    """The host's copy of ``TwoArrays`` in experts_dispatch.cu."""

    _fields_ = [*u64("first", "second", "first_nbytes", "second_nbytes")]


class DispatchArguments(ctypes.Structure):
    """The host's copy of ``Dispatch`` in experts_dispatch.cu."""

    _fields_ = [
        ("experts", ExpertsArguments),
        ("x", TwoArrays),
        ("rows", TwoArrays),
        *u64("ids", "weights", "counts", "offsets", "sources", "place_weights"),
        *u64("places", "targets", "tokens", "token_rows", "place_rows", "slot_ids"),
        *u64("slot_weights", "row_count", "capacity", "all_places"),
        *u32("num_tokens", "alignment", "wide_ids", "unused"),
    ]


class CombineExpertsArguments(ctypes.Structure):
    """The host's copy of ``Combine`` in experts_combine.cu."""

    _fields_ = [
        ("experts", ExpertsArguments),
        *u64("rows", "row_weights", "places", "token_rows", "targets", "tokens", "values", "output", "slot_values"),
        *u32("num_tokens", "unused"),
    ]


class QuantizeArguments(ctypes.Structure):
    """The host's copy of ``Quantize`` in experts_quantize.cu."""

    _fields_ = [*u64("x", "values", "scales", "groups")]


DISPATCH_KERNEL = Variant(SHARED / "experts_dispatch.cu", "mpicomm_experts_dispatch", options_for(None))


def combine_experts_kernel(dtype: str, result: str, *, by_token: bool) -> Variant:
    """Return the kernel that adds rows of ``dtype`` and rounds the sums to ``result``, for a layout."""
    layout = f"-DMPICOMM_BY_TOKEN={str(by_token).lower()}"
    options = (*options_for((dtype, "sum")), f"-DMPICOMM_RESULT={cpp_name(result)}", layout)
    return Variant(SHARED / "experts_combine.cu", "mpicomm_experts_combine", options)


def quantize_experts_kernel(dtype: str) -> Variant:
    """Return the kernel that quantises elements of ``dtype``."""
    return Variant(SHARED / "experts_quantize.cu", "mpicomm_experts_quantize", options_for((dtype, "sum")))


def quantize_blocks(groups: int, multiprocessors: int) -> int:
    """Return the number of blocks of a launch that quantises so many groups."""
    return max(1, min(4 * multiprocessors, -(-groups * _LANES_OF_A_GROUP // QUANTIZE_THREADS)))


@dataclass(frozen=True)
class RowShape:
    """The bytes of a row, which travels in parts."""

    nbytes: int

    @property
    def parts(self) -> int:
        """The number of parts."""
        return -(-self.nbytes // _PART_NBYTES)

    @property
    def part_nbytes(self) -> int:
        """The bytes of a part, in whole packets. The last part may be shorter."""
        return _up(-(-self.nbytes // self.parts), PACKET_NBYTES)


@dataclass(frozen=True)
class ExpertsShape:
    """The numbers of an Experts object that are the same on all ranks."""

    experts_per_rank: tuple[int, ...]
    row: RowShape
    """A row of a dispatch."""
    sums: RowShape
    """A row of a combine."""
    max_tokens: int
    few_tokens: int
    """Up to so many tokens of a rank are few. At most ``max_tokens``."""
    top_k: int
    quantizes: bool

    @property
    def seats(self) -> int:
        """The seats of a source, see experts.cuh."""
        return 2 * self.few_tokens + (self.max_tokens if self.max_tokens > self.few_tokens else 0)

    @property
    def firsts(self) -> list[int]:
        """The first expert of each rank, then the number of experts."""
        firsts = [0]
        for count in self.experts_per_rank:
            firsts.append(firsts[-1] + count)
        return firsts


class ExpertsMemory:
    """The layout of an arena for an `ExpertsShape`: see experts.cuh."""

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = shape
        size = len(shape.experts_per_rank)
        seats = (size - 1) * shape.seats
        self.routes = HEAD_NBYTES
        packets = size * (shape.seats * shape.top_k + _HEADS)
        self.row_flags = _up(self.routes + packets * PACKET_NBYTES, LINE_NBYTES)
        self.sum_flags = _up(self.row_flags + seats * shape.row.parts * _WORD_NBYTES, LINE_NBYTES)
        self.counted = _up(self.sum_flags + seats * shape.sums.parts * _WORD_NBYTES, LINE_NBYTES)
        self.histograms = _up(self.counted + (MAX_BLOCKS + 3) * _WORD_NBYTES, LINE_NBYTES)
        self.values = _up(self.histograms + MAX_BLOCKS * (shape.firsts[-1] + size) * 4, LINE_NBYTES)
        self.rows = _up(self.values + shape.seats * shape.top_k * 4, LINE_NBYTES)
        self.sums = _up(self.rows + seats * shape.row.nbytes, LINE_NBYTES)
        self.quantized = _up(self.sums + seats * shape.sums.nbytes, LINE_NBYTES)
        """Private memory for the tokens of this rank as they travel, if they are quantised."""
        self.nbytes = self.quantized + (shape.max_tokens * shape.row.nbytes if shape.quantizes else 0)

    @property
    def zeroed_nbytes(self) -> int:
        """The bytes from the start that are zero at first."""
        return self.histograms

    def arguments(self, team: Team, row: RowShape) -> ExpertsArguments:
        """Return the part of the argument that dispatch and combine share, without the number of senders.

        ``row`` is the row of the one or of the other.
        """
        shape = self.shape
        arguments = ExpertsArguments(
            team=team,
            routes=self.routes,
            row_flags=self.row_flags,
            rows=self.rows,
            sum_flags=self.sum_flags,
            sums=self.sums,
            values=self.values,
            counted=self.counted,
            histograms=self.histograms,
            row_nbytes=row.nbytes,
            part_nbytes=row.part_nbytes,
            parts=row.parts,
            max_tokens=shape.max_tokens,
            few_tokens=shape.few_tokens,
            seats=shape.seats,
            top_k=shape.top_k,
        )
        for rank, first in enumerate(shape.firsts):
            arguments.firsts[rank] = first
        return arguments


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
